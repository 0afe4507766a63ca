"""One agent's view of text: prompts, answers, other agents' answers, rows and tensors.

The tokenizers are made here, small and in every form that has caused trouble: byte-level BPE, metaspace with byte
fallback, Unigram, with and without template, padding, lists of end-of-sequence ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hacrl.config import AgentConfig, ExchangeConfig
from hacrl.encode import Encoder, Samples, collate, micro_batches, training_samples
from hacrl.errors import ModelError
from hacrl.types import Completion, Message, Rollout, RolloutGroup, SharedCompletion, Task, TrainingSample, Verdict

CORPUS = ["the answer is 42 and the sum is 17, hello world; user assistant system\n\nQ: what is it? <|x|> "] * 8
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}"
    "{% endfor %}"
)
TEXTS = [
    "the answer is 42",
    " the answer is 42",
    "  two spaces  inside and at the end  ",
    "\n\nnew lines\n",
    "héllo 日本語 テスト 🙂👩‍👩‍👧",
    "half a character \ufffd",
    "\t\r\n\x00",
    "<|im_end|> and </s> and <|endoftext|> are words here",
    "",
]


def byte_level(
    *, vocab_size: int = 320, add_prefix_space: bool = False, bos: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    """A GPT-2-like tokenizer: <|endoftext|> is 0, <|im_start|> 1, <|im_end|> 2, <|reserved|> 3."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A <|endoftext|>",
            special_tokens=[("<|im_start|>", 1), ("<|endoftext|>", 0)],
        )
        options["bos_token"] = "<|im_start|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "<|endoftext|>", **options})


def metaspace(*, legacy: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """A Llama-2-like tokenizer that puts a dummy space before every text: <unk> 0, <s> 1, </s> 2, bytes from 3 on."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=80, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **options})


def unigram() -> PreTrainedTokenizerFast:
    """A SentencePiece-Unigram-like tokenizer whose </s> is an ordinary, and the best, piece of the vocabulary."""
    letters = sorted(set("".join(TEXTS[:1])) - {" "} | set("</s>"))
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def gpt() -> Encoder:
    return Encoder(byte_level(), name="gpt")


@pytest.fixture(scope="module")
def qwen() -> Encoder:
    return Encoder(byte_level(chat_template=CHATML, vocab_size=300), generation_eos=[2, 0], name="qwen")


@pytest.fixture(scope="module")
def llama() -> Encoder:
    return Encoder(metaspace(chat_template=LLAMA2), name="llama")


def tokens(encoder: Encoder, ids: Sequence[int]) -> list[str]:
    return encoder.tokenizer.convert_ids_to_tokens(list(ids))  # type: ignore[return-value]


def completion(
    ids: Sequence[int], text: str, *, reason: Any = "stop", author: str = "peer", index: int = 0, logprob: float = -0.5
) -> Completion:
    return Completion(
        task_id="train/0",
        author=author,
        index=index,
        text=text,
        token_ids=tuple(ids),
        logprobs=(logprob,) * len(ids),
        finish_reason=reason,
        weights_version=0,
    )


# ---------------------------------------------------------------- special ids


def test_stop_ids_are_the_union_of_all_that_name_one() -> None:
    tokenizer = byte_level()
    assert Encoder(tokenizer).stop_token_ids == (0,)
    # Qwen2.5-base: the tokenizer says one, the generation config the other.
    assert Encoder(tokenizer, generation_eos=2).stop_token_ids == (0, 2)
    assert Encoder(tokenizer, generation_eos=[2, 3, 0]).stop_token_ids == (0, 2, 3)
    assert Encoder(tokenizer, generation_eos=[2, -1]).stop_token_ids == (0, 2)
    # The tokenizer may name none at all.
    assert Encoder(byte_level(eos_token=None), generation_eos=[3, 2]).stop_token_ids == (2, 3)
    assert Encoder(byte_level(eos_token=None), generation_eos=[3, 2]).eos_token_id == 3


def test_template_names_the_taught_end() -> None:
    chat = Encoder(byte_level(chat_template=CHATML))
    assert (chat.stop_token_ids, chat.eos_token_id) == ((0, 2), 2)
    plain = Encoder(byte_level(chat_template=CHATML), prompt_format="plain")
    assert (plain.stop_token_ids, plain.eos_token_id) == ((0,), 0)
    own = Encoder(metaspace(chat_template=LLAMA2))
    assert (own.stop_token_ids, own.eos_token_id) == ((2,), 2)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}",  # a turn ends in plain text
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",  # a turn ends in nothing
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}",
        "{{ messages[0].content }}<|im_end|>",  # answers are never rendered
    ],
)
def test_template_without_an_end_token(template: str) -> None:
    encoder = Encoder(byte_level(chat_template=template))
    assert (encoder.stop_token_ids, encoder.eos_token_id) == ((0,), 0)


def test_end_of_turn_that_is_not_marked_special() -> None:
    tokenizer = byte_level(chat_template="{% for m in messages %}{{ m.content }}<turn>{% endfor %}")
    tokenizer.add_tokens([AddedToken("<turn>", special=False, normalized=False)])
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    assert Encoder(tokenizer).stop_token_ids == (0,)
    encoder = Encoder(tokenizer, generation_eos=turn)
    assert (encoder.stop_token_ids, encoder.eos_token_id) == ((0, turn), turn)
    # As a stop id it may neither be spelled by a text nor show in one.
    assert turn not in encoder.encode_completion("a<turn>b", finish_reason="length")
    assert encoder.decode((*encoder.encode_completion("a", finish_reason="length"), turn)) == "a"


def test_no_end_at_all() -> None:
    with pytest.raises(
        ModelError, match=r"agent gpt: neither tokenizer, generation config nor chat template name an end"
    ):
        Encoder(byte_level(eos_token=None), name="gpt")


@pytest.mark.parametrize(
    ("options", "generation_pad", "expected"),
    [
        ({"pad_token": "<|reserved|>"}, None, 3),
        ({}, [3], 3),  # Llama 3.2 configs hold a list
        ({}, 3, 3),
        ({}, None, 1),  # no padding token: any other special token, never the end of sequence
        ({"pad_token": "<|endoftext|>"}, None, 1),
        ({"pad_token": "<|endoftext|>"}, 0, 1),
    ],
)
def test_padding_id(options: dict[str, Any], generation_pad: Any, expected: int) -> None:
    tokenizer = byte_level(**options)
    size = len(tokenizer)
    encoder = Encoder(tokenizer, generation_pad=generation_pad)
    assert encoder.pad_token_id == expected
    assert encoder.pad_token_id not in encoder.stop_token_ids
    assert len(tokenizer) == size, "choosing a padding id must not add a token"


def test_padding_id_may_be_a_stop_id_if_there_is_no_other() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>"))
    assert encoder.pad_token_id == 1


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        chat_template = None

    with pytest.raises(ModelError, match=r"agent a: tokenizer Slow has no fast .* tokenizer.json"):
        Encoder(Slow(), name="a")  # type: ignore[arg-type]


# ---------------------------------------------------------------- prompts


def test_chat_prompt(qwen: Encoder) -> None:
    messages = (Message(role="system", content="user"), Message(role="user", content="what is it?"))
    ids = qwen.prompt_ids(messages)
    assert qwen.tokenizer.decode(list(ids)) == (
        "<|im_start|>system\nuser<|im_end|>\n<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert qwen.prompt_ids("what is it?") == qwen.prompt_ids((messages[1],))


def test_chat_prompt_has_one_beginning(llama: Encoder) -> None:
    ids = llama.prompt_ids("hello")
    assert ids.count(1) == 1
    assert ids[0] == 1
    reference = llama.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=False
    )
    assert list(ids) == reference


def test_plain_prompt(gpt: Encoder) -> None:
    messages = (Message(role="system", content="Q: what"), Message(role="user", content="is it?"))
    assert not gpt.uses_chat
    assert gpt.tokenizer.decode(list(gpt.prompt_ids(messages))) == "Q: what\n\nis it?"
    assert gpt.prompt_ids("is it?")[0] not in (0, 1, 2)


def test_plain_prompt_begins_as_the_tokenizer_begins() -> None:
    encoder = Encoder(byte_level(bos=True))
    ids = encoder.prompt_ids("hello")
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert 0 not in ids, "the tokenizer's own end of sequence does not belong to a prompt"
    assert encoder.prompt_ids("<|im_start|>hello") == ids
    assert Encoder(metaspace()).prompt_ids("hello")[0] == 1


def test_prompt_is_never_cut() -> None:
    tokenizer = byte_level(chat_template=CHATML, model_max_length=8)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=600)
    ids = Encoder(tokenizer).prompt_ids("1" * 500)
    assert Encoder(byte_level(chat_template=CHATML)).prompt_ids("1" * 500) == ids
    assert len(ids) > 500


def test_template_that_rewrites_history() -> None:
    # Thinking is taken out of earlier turns, so the two-turn text does not begin with the one-turn text.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = Encoder(byte_level(chat_template=template), name="me")
    prompt = (
        Message(role="user", content="what is it?"),
        Message(role="assistant", content="<think>hm</think>42"),
        Message(role="user", content="and the sum?"),
    )
    ids = encoder.prompt_ids(prompt)
    assert "think" not in encoder.tokenizer.decode(list(ids))
    own = completion([7, 8, 0], "x", author="me")
    (sample,) = rows(encoder, [own], prompt=prompt, learner="me").samples
    assert sample.prompt_ids == ids
    assert sample.completion_ids == (7, 8, 0)


def test_template_arguments_and_replacement(gpt: Encoder) -> None:
    template = "{{ messages[0].content }}{% if thinking is defined and not thinking %}<|reserved|>{% endif %}"
    encoder = Encoder(byte_level(), chat_template=template, chat_template_arguments={"thinking": False})
    assert encoder.uses_chat
    assert encoder.prompt_ids("hello")[-1] == 3
    assert encoder.tokenizer.chat_template == template, "an exported tokenizer must carry the template trained with"
    assert Encoder(byte_level(), chat_template=template).prompt_ids("hello") == gpt.prompt_ids("hello")


def test_template_refuses(llama: Encoder) -> None:
    messages = (Message(role="system", content="a"), Message(role="user", content="b"))
    with pytest.raises(
        ModelError, match=r"agent llama: the chat template refuses messages of roles system, user: .*no system"
    ):
        llama.prompt_ids(messages)


def test_chat_without_template() -> None:
    with pytest.raises(ModelError, match=r"agent gpt: prompt_format is chat, but the tokenizer has no chat template"):
        Encoder(byte_level(), prompt_format="chat", name="gpt")


def test_special_tokens_of_the_prompt_survive(qwen: Encoder, llama: Encoder) -> None:
    # Each learner renders messages by its own template: nothing is decoded from the author's ids.
    prompt = (Message(role="user", content="hello"),)
    group = [completion([5, 6, 2], "hello", author="llama")]
    (sample,) = rows(qwen, group, prompt=prompt, learner="qwen").samples
    assert sample.prompt_ids == qwen.prompt_ids(prompt)
    assert {1, 2} <= set(sample.prompt_ids)
    (sample,) = rows(llama, [completion([5, 6, 2], "hello")], prompt=prompt, learner="llama").samples
    assert tokens(llama, sample.prompt_ids)[:1] == ["<s>"]


# ---------------------------------------------------------------- answers


ENCODERS = {
    "byte-level": lambda: byte_level(),
    "byte-level with prefix space": lambda: byte_level(add_prefix_space=True),
    "metaspace": lambda: metaspace(),
    "metaspace, legacy normalizer": lambda: metaspace(legacy=True),
    "chat": lambda: byte_level(chat_template=CHATML),
}


@pytest.fixture(scope="module", params=ENCODERS)
def any_encoder(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(ENCODERS[request.param]())


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(any_encoder: Encoder, text: str) -> None:
    ids = any_encoder.encode_completion(text, finish_reason="stop")
    assert any_encoder.decode(ids) == text
    assert ids[-1] == any_encoder.eos_token_id
    assert not set(ids[:-1]) & set(any_encoder.stop_token_ids)
    assert any_encoder.encode_completion(text, finish_reason="length") == ids[:-1]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_survives(text: str) -> None:
    for encoder in HYPOTHESIS_ENCODERS:
        assert encoder.decode(encoder.encode_completion(text, finish_reason="stop")) == text


HYPOTHESIS_ENCODERS = [Encoder(byte_level(chat_template=CHATML)), Encoder(metaspace()), Encoder(metaspace(legacy=True))]


def test_no_dummy_space_and_no_beginning() -> None:
    for tokenizer in (metaspace(), metaspace(legacy=True), byte_level(add_prefix_space=True), byte_level(bos=True)):
        encoder = Encoder(tokenizer)
        with_space = encoder.encode_completion(" the", finish_reason="length")
        without = encoder.encode_completion("the", finish_reason="length")
        assert with_space != without
        assert "".join(tokens(encoder, without)) == "the"
        assert "".join(tokens(encoder, with_space)) in ("▁the", "Ġthe")
        # The prompt keeps the space that the tokenizer was trained with.
        assert tokenizer("the", add_special_tokens=False).input_ids == list(
            encoder.prompt_ids("the")[
                len(encoder.prompt_ids("the")) - len(tokenizer("the", add_special_tokens=False).input_ids) :
            ]
        )


def test_decode_continues_the_prompt(llama: Encoder) -> None:
    space = llama.tokenizer.convert_tokens_to_ids("▁")
    assert llama.decode((space, space)) == "  "
    # The tokenizer by itself takes a leading space off.
    assert llama.tokenizer.decode([space, space]) == " "


def test_the_name_of_a_special_token_is_spelled_like_any_text(gpt: Encoder) -> None:
    ids = gpt.encode_completion("<|im_end|>", finish_reason="length")
    assert tokens(gpt, ids)[0] == "<|"
    assert list(ids) == gpt.tokenizer("<|im_end|>", split_special_tokens=True).input_ids


def test_unigram_does_not_find_special_tokens_in_text() -> None:
    encoder = Encoder(unigram())
    assert 1 in encoder._continuations.encode("a</s>", add_special_tokens=False).ids, "the trap is not there"
    ids = encoder.encode_completion("the</s>answer", finish_reason="length")
    assert 1 not in ids
    assert encoder.decode(ids) == "the</s>answer"
    assert encoder.encode_completion("the", finish_reason="stop")[-1] == 1


def test_ordinary_added_tokens_stay_tokens() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    encoder = Encoder(tokenizer)
    ids = encoder.encode_completion("<think>hm", finish_reason="length")
    assert ids[0] == tokenizer.convert_tokens_to_ids("<think>")
    assert encoder.decode(ids) == "<think>hm"


def test_partial_characters(gpt: Encoder, llama: Encoder) -> None:
    whole = gpt.encode_completion("🙂", finish_reason="length")
    assert len(whole) == 4
    assert gpt.decode(whole[:2]) == "\ufffd"
    assert gpt.decode((*whole, 0)) == "🙂"
    bytes_ = [3 + byte for byte in "日".encode()]
    assert llama.decode(bytes_) == "日"
    assert set(llama.decode(bytes_[:2])) == {"\ufffd"}
    # Ids beyond the tokenizer (padded embeddings) are no text.
    assert gpt.decode((*whole, 100_000)) == "🙂"


def test_spaces_before_punctuation_stay() -> None:
    encoder = Encoder(byte_level(clean_up_tokenization_spaces=True))
    text = "hello , world ! is n't"
    assert encoder.decode(encoder.encode_completion(text, finish_reason="stop")) == text


def test_sixteen_threads() -> None:
    tokenizer = byte_level(chat_template=CHATML)
    encoder = Encoder(tokenizer)
    texts = [text * 20 for text in TEXTS]
    expected = [(encoder.prompt_ids(text), encoder.encode_completion(text, finish_reason="stop")) for text in texts]

    def work(turn: int) -> bool:
        # Others use the tokenizer with and without truncation meanwhile; the encoder must not notice.
        place = turn % len(texts)
        if turn % 3 == 0:
            try:
                tokenizer(texts[place], truncation=turn % 2 == 0, max_length=4, split_special_tokens=turn % 4 == 0)
            except RuntimeError:  # "Already borrowed": their trouble
                return True
        prompt, answer = expected[place]
        return (
            encoder.prompt_ids(texts[place]) == prompt
            and encoder.encode_completion(texts[place], finish_reason="stop") == answer
            and encoder.decode(answer) == texts[place]
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(480)))


# ---------------------------------------------------------------- fingerprints


def test_fingerprint_is_about_text_to_ids() -> None:
    base = Encoder(byte_level()).fingerprint
    assert Encoder(byte_level(chat_template=CHATML)).fingerprint == base
    assert Encoder(byte_level(pad_token="<|reserved|>", padding_side="left")).fingerprint == base
    assert Encoder(byte_level(bos=True)).fingerprint == base, "a beginning of sequence concerns no answer"
    cut = byte_level()
    cut.backend_tokenizer.enable_truncation(4)
    assert Encoder(cut).fingerprint == base
    different = [
        byte_level(vocab_size=290),
        byte_level(add_prefix_space=True),
        metaspace(),
        metaspace(legacy=True),
    ]
    more = byte_level()
    more.add_tokens(["<think>"])
    lower = byte_level()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    fingerprints = [Encoder(tokenizer).fingerprint for tokenizer in (*different, more, lower)]
    assert len({base, *fingerprints}) == 1 + len(fingerprints)


def test_fingerprint_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, tokenizer in (("byte", byte_level(chat_template=CHATML)), ("meta", metaspace())):
        tokenizer.save_pretrained(tmp_path / name)
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        assert Encoder(again).fingerprint == Encoder(tokenizer).fingerprint


# ---------------------------------------------------------------- other agents' answers


def test_identical_tokenizers_pass_ids_on(gpt: Encoder) -> None:
    # Letter by letter is not how the tokenizer itself spells it.
    ids = (*(id_ for letter in "hello" for id_ in gpt.encode_completion(letter, finish_reason="length")), 0)
    assert ids != gpt.encode_completion("hello", finish_reason="stop")
    foreign = gpt.foreign_ids(completion(ids, "hello"), author_fingerprint=gpt.fingerprint)
    assert foreign.ids == ids
    assert (foreign.passed_on, foreign.length_change, foreign.round_trip) == (True, 0, True)


def test_end_of_sequence_becomes_the_learners_own(gpt: Encoder) -> None:
    chat = Encoder(byte_level(chat_template=CHATML))
    assert chat.fingerprint == gpt.fingerprint
    body = gpt.encode_completion("hello", finish_reason="length")
    # gpt does not stop on 2, so the end is replaced; chat stops on 0, so it stays.
    assert gpt.foreign_ids(completion((*body, 2), "hello"), author_fingerprint=chat.fingerprint).ids == (*body, 0)
    assert chat.foreign_ids(completion((*body, 0), "hello"), author_fingerprint=gpt.fingerprint).ids == (*body, 0)
    cut = completion(body, "hello", reason="length")
    assert chat.foreign_ids(cut, author_fingerprint=gpt.fingerprint).ids == body


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stop_id_in_the_middle_is_not_passed_on(gpt: Encoder, reason: Any) -> None:
    chat = Encoder(byte_level(chat_template=CHATML))
    body = gpt.encode_completion("hello", finish_reason="length")
    ids = (*body, 2, *body, 0) if reason == "stop" else (*body, *body, 2)
    foreign = chat.foreign_ids(completion(ids, "hellohello", reason=reason), author_fingerprint=gpt.fingerprint)
    assert not foreign.passed_on
    assert foreign.ids == chat.encode_completion("hellohello", finish_reason=reason)
    assert foreign.length_change == len(foreign.ids) - len(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_foreign_text_is_encoded_anew(qwen: Encoder, llama: Encoder, text: str) -> None:
    authored = llama.encode_completion(text, finish_reason="stop")
    foreign = qwen.foreign_ids(completion(authored, text), author_fingerprint=llama.fingerprint)
    assert foreign.ids == qwen.encode_completion(text, finish_reason="stop")
    assert foreign.ids[-1] == 2
    assert foreign.length_change == len(foreign.ids) - len(authored)
    assert (foreign.passed_on, foreign.round_trip) == (False, True)


def test_empty_answers(qwen: Encoder, llama: Encoder) -> None:
    only_end = qwen.foreign_ids(completion([2], ""), author_fingerprint=llama.fingerprint)
    assert (only_end.ids, only_end.round_trip, only_end.length_change) == ((2,), True, 0)
    passed = qwen.foreign_ids(completion([2], ""), author_fingerprint=qwen.fingerprint)
    assert passed.ids == (2,)
    nothing = qwen.foreign_ids(completion([9], "", reason="length"), author_fingerprint=llama.fingerprint)
    assert nothing.ids == ()


def test_half_a_character_at_the_cut_is_left_out(gpt: Encoder, llama: Encoder) -> None:
    ids = gpt.encode_completion("answer 🙂", finish_reason="length")[:-2]
    text = gpt.decode(ids)
    assert text == "answer \ufffd"
    foreign = llama.foreign_ids(completion(ids, text, reason="length"), author_fingerprint=gpt.fingerprint)
    assert llama.decode(foreign.ids) == "answer "
    assert not foreign.round_trip
    # Mojibake that the author wrote itself is its answer.
    ended = llama.foreign_ids(completion((*ids, 0), text), author_fingerprint=gpt.fingerprint)
    assert llama.decode(ended.ids) == text


def test_lossy_tokenizer_is_told() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    encoder = Encoder(tokenizer)
    foreign = encoder.foreign_ids(completion([9], "HELLO"), author_fingerprint="other")
    assert encoder.decode(foreign.ids) == "hello"
    assert not foreign.round_trip


def test_ids_are_needed_by_an_identical_tokenizer_alone(gpt: Encoder) -> None:
    whole = completion((3, 4, 5, 0), "hello")
    without = SharedCompletion(
        task_id=whole.task_id,
        author=whole.author,
        index=whole.index,
        text=whole.text,
        tokens=4,
        token_ids=None,
        mean_logprob=whole.mean_logprob,
        finish_reason=whole.finish_reason,
    )
    assert gpt.foreign_ids(without, author_fingerprint="other") == gpt.foreign_ids(whole, author_fingerprint="other")
    with pytest.raises(ValueError, match="its ids have been left out"):
        gpt.foreign_ids(without, author_fingerprint=gpt.fingerprint)


# ---------------------------------------------------------------- rows


def rows(
    encoder: Encoder,
    completions: Sequence[Completion],
    *,
    learner: str,
    advantages: Mapping[str, Any] | None = None,
    fingerprints: Mapping[str, str] | None = None,
    ratio: Mapping[str, float] | None = None,
    prompt: Any = "what is it?",
    max_new_tokens: int = 100,
    **exchange: Any,
) -> Samples:
    """`training_samples` for one group; every rollout has advantage 1 unless told otherwise."""
    authors = {item.author for item in completions}
    group = RolloutGroup(
        task=Task(id="train/0", prompt=prompt),
        rollouts=tuple(Rollout(completion=item, verdict=Verdict(reward=1.0)) for item in completions),
    )
    return training_samples(
        [group],
        learner=learner,
        advantages=advantages or {author: [[1.0] * 8] for author in authors},
        ratio=ratio or dict.fromkeys(authors, 1.5),
        encoder=encoder,
        fingerprints=fingerprints or {author: f"tokenizer of {author}" for author in authors},
        max_new_tokens=max_new_tokens,
        exchange=ExchangeConfig(**exchange),
    )


def test_own_rows_keep_ids_and_logprobs(qwen: Encoder) -> None:
    # An unusual spelling, a partial character, no end: kept as sampled, above any limit on foreign rows.
    ids = (
        *qwen.encode_completion("he", finish_reason="length"),
        *qwen.encode_completion("🙂", finish_reason="length")[:2],
    )
    own = completion(ids, "he\ufffd", reason="length", author="qwen", logprob=-0.25)
    result = rows(qwen, [own], learner="qwen", max_new_tokens=2, cut_off="drop", ratio={"qwen": 9.0})
    assert result.samples == (
        TrainingSample(
            task_id="train/0",
            author="qwen",
            index=0,
            own=True,
            prompt_ids=qwen.prompt_ids("what is it?"),
            completion_ids=ids,
            author_mean_logprob=-0.25,
            author_logprobs=(-0.25,) * len(ids),
            advantage=1.0,
            ratio=1.0,
        ),
    )


def test_foreign_rows_carry_the_authors_number_and_the_learners_ids(qwen: Encoder) -> None:
    peer = completion([4, 5, 6, 7], "the sum", logprob=-2.0)
    (sample,) = rows(qwen, [peer], learner="qwen", advantages={"peer": [[-0.5]]}, ratio={"peer": 0.7}).samples
    assert sample.completion_ids == qwen.encode_completion("the sum", finish_reason="stop")
    assert (sample.own, sample.author_logprobs) == (False, None)
    assert (sample.author_mean_logprob, sample.advantage, sample.ratio) == (-2.0, -0.5, 0.7)


def test_advantages_find_their_rollout(qwen: Encoder) -> None:
    completions = [
        completion([5, 2], "a", author=author, index=index) for author in ("qwen", "peer") for index in (0, 1, 2)
    ]
    advantages = {"qwen": [[0.1, math.nan, 0.0]], "peer": [[math.nan, 1.1, 1.2]]}
    result = rows(qwen, completions, learner="qwen", advantages=advantages)
    assert [(row.author, row.index, row.advantage) for row in result.samples] == [
        ("qwen", 0, 0.1),
        ("qwen", 2, 0.0),  # counts in the normaliser
        ("peer", 1, 1.1),
        ("peer", 2, 1.2),
    ]
    # An author left out of the advantages gives no rows.
    result = rows(qwen, completions, learner="qwen", advantages={"qwen": [[0.1, 0.2, 0.3]]})
    assert {row.author for row in result.samples} == {"qwen"}
    assert set(result.exchange) == {"qwen"}
    with pytest.raises(ValueError, match="advantages of qwen: 2 lists for 1 groups"):
        rows(qwen, completions, learner="qwen", advantages={"qwen": [[0.1] * 3] * 2})


def test_every_group_gets_its_own_prompt_and_advantages(qwen: Encoder) -> None:
    groups = [
        RolloutGroup(
            task=Task(id=f"train/{p}", prompt=f"question {p}"),
            rollouts=(Rollout(completion=completion([5, 2], "a", author="qwen"), verdict=Verdict(reward=1.0)),),
        )
        for p in range(3)
    ]
    result = training_samples(
        groups,
        learner="qwen",
        advantages={"qwen": [[0.0], [1.0], [2.0]]},
        ratio={},
        encoder=qwen,
        fingerprints={},
        max_new_tokens=9,
        exchange=ExchangeConfig(),
    )
    assert [(row.task_id, row.prompt_ids, row.advantage) for row in result.samples] == [
        (f"train/{p}", qwen.prompt_ids(f"question {p}"), float(p)) for p in range(3)
    ]


def test_foreign_rows_above_the_limit(qwen: Encoder) -> None:
    text = "日本語 🙂"
    length = len(qwen.encode_completion(text, finish_reason="stop"))
    peers = [completion([5, 2], text), completion([5, 2], "a", index=1)]
    fits = rows(qwen, peers, learner="qwen", max_new_tokens=length)
    assert [len(row.completion_ids) for row in fits.samples] == [length, 2]
    assert fits.samples[0].completion_ids[-1] == 2
    dropped = rows(qwen, peers, learner="qwen", max_new_tokens=length - 1)
    assert [row.index for row in dropped.samples] == [1]
    assert dropped.exchange["peer"].dropped["too_long"] == 1
    assert (dropped.exchange["peer"].rows, dropped.exchange["peer"].truncated) == (1, 0)
    cut = rows(qwen, peers, learner="qwen", max_new_tokens=length - 1, too_long="truncate")
    assert cut.samples[0].completion_ids == qwen.encode_completion(text, finish_reason="length")[: length - 1]
    assert 2 not in cut.samples[0].completion_ids, "a cut answer must not look complete"
    assert (cut.exchange["peer"].rows, cut.exchange["peer"].truncated) == (2, 1)


def test_foreign_rows_that_were_cut_off(qwen: Encoder) -> None:
    peers = [completion([5, 6], "the su", reason="length"), completion([5, 6, 2], "the sum", index=1)]
    kept = rows(qwen, peers, learner="qwen")
    assert kept.samples[0].completion_ids == qwen.encode_completion("the su", finish_reason="length")
    assert [2 in row.completion_ids for row in kept.samples] == [False, True]
    dropped = rows(qwen, peers, learner="qwen", cut_off="drop")
    assert [row.index for row in dropped.samples] == [1]
    assert dropped.exchange["peer"].dropped == {"too_long": 0, "cut_off": 1, "empty": 0, "logprob_not_finite": 0}


def test_rows_that_cannot_be_trained_on_are_counted(qwen: Encoder) -> None:
    nothing = completion([9], "", reason="length", logprob=-1.0)
    bad = completion([9, 2], "a", index=1, logprob=math.nan)
    only_end = completion([2], "", index=2)
    result = rows(qwen, [nothing, bad, only_end], learner="qwen")
    assert [(row.index, row.completion_ids) for row in result.samples] == [(2, (2,))]
    assert result.exchange["peer"].dropped["empty"] == 1
    assert result.exchange["peer"].dropped["logprob_not_finite"] == 1
    own = [
        completion([], "", reason="length", author="qwen"),
        completion([9], "a", author="qwen", index=1, logprob=-math.inf),
    ]
    result = rows(qwen, own, learner="qwen")
    assert result.samples == ()
    assert result.exchange["qwen"].dropped == {"empty": 1, "logprob_not_finite": 1}


def test_exchange_is_counted_by_author(qwen: Encoder) -> None:
    completions = [
        completion([5, 2], "a", author="qwen"),
        completion([5, 2], "a", author="twin"),
        completion([1, 2, 3, 4, 5], "the", author="peer"),
        completion([1, 2], "日本語", author="peer", index=1),
        completion([1, 2], "x\ufffd", author="peer", index=2, reason="length"),
    ]
    fingerprints = {"qwen": qwen.fingerprint, "twin": qwen.fingerprint, "peer": "other"}
    result = rows(qwen, completions, learner="qwen", fingerprints=fingerprints)
    lengths = [len(row.completion_ids) for row in result.samples[2:]]
    assert result.exchange["peer"].length_change == sum(lengths) - 9
    assert (result.exchange["peer"].rows, result.exchange["peer"].passed_on) == (3, 0)
    assert result.exchange["peer"].round_trip_failures == 1
    assert (result.exchange["twin"].passed_on, result.exchange["twin"].length_change) == (1, 0)
    metrics = result.exchange["peer"].metrics().values()
    assert metrics["length_change_mean"] == pytest.approx((sum(lengths) - 9) / 3)
    assert metrics["passed_on_share"] == 0
    assert metrics["round_trip_failures"] == 1
    assert metrics["dropped/too_long"] == 0
    assert result.exchange["qwen"].metrics().values() == {
        "rows": 1,
        "dropped/empty": 0,
        "dropped/logprob_not_finite": 0,
    }


# ---------------------------------------------------------------- tensors


def sample(
    prompt: int, answer: Sequence[int], *, own: bool = True, index: int = 0, advantage: float = 1.0
) -> TrainingSample:
    return TrainingSample(
        task_id="train/0",
        author="me" if own else "peer",
        index=index,
        own=own,
        prompt_ids=tuple(range(10, 10 + prompt)),
        completion_ids=tuple(answer),
        author_mean_logprob=-0.5,
        author_logprobs=tuple(-0.1 * (i + 1) for i in range(len(answer))) if own else None,
        advantage=advantage,
        ratio=1.0 if own else 0.5,
    )


def test_collate() -> None:
    # The padding id is also the end of sequence: the real one stays in the mask, the padding does not.
    batch = collate([sample(2, [1, 4, 0]), sample(3, [7, 0, 5, 6], own=False, advantage=-2.0)], pad_token_id=0)
    assert batch.input_ids_BT.tolist() == [[10, 11, 1, 4, 0, 0, 0], [10, 11, 12, 7, 0, 5, 6]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert batch.mask_BT.tolist() == [
        [False, False, True, True, True, False, False],
        [False, False, False, True, True, True, True],
    ]
    assert torch.equal(batch.author_logprobs_BT[0, 2:5], torch.tensor([-0.1, -0.2, -0.3]))
    assert batch.author_logprobs_BT.isnan().sum() == 14 - 3
    assert batch.own_B.tolist() == [True, False]
    assert batch.advantage_B.tolist() == [1.0, -2.0]
    assert batch.ratio_B.tolist() == [1.0, 0.5]
    assert batch.author_mean_logprob_B.tolist() == [-0.5, -0.5]
    assert batch.input_ids_BT.dtype == batch.attention_mask_BT.dtype == torch.long
    assert batch.mask_BT.dtype == batch.own_B.dtype == torch.bool
    assert batch.author_logprobs_BT.dtype == batch.advantage_B.dtype == torch.float32


def test_the_mask_marks_the_answer_of_a_real_row(qwen: Encoder) -> None:
    (row,) = rows(qwen, [completion([5], "日本 the", author="peer")], learner="qwen").samples
    batch = collate([sample(1, [1] * 200), row], pad_token_id=qwen.pad_token_id)
    marked = batch.input_ids_BT[1][batch.mask_BT[1]].tolist()
    assert marked[-1] == qwen.eos_token_id
    assert qwen.decode(marked) == "日本 the"


def test_collate_refuses_rows_that_do_not_fit_together() -> None:
    import dataclasses

    short = dataclasses.replace(sample(1, [1, 2]), author_logprobs=(-0.1,))
    with pytest.raises(ValueError, match="2 answer ids but 1 log-probabilities"):
        collate([short], pad_token_id=0)
    with pytest.raises(ValueError, match="0 prompt ids"):
        collate([sample(0, [1, 2])], pad_token_id=0)
    with pytest.raises(ValueError, match="0 answer ids"):
        collate([sample(1, [])], pad_token_id=0)
    with pytest.raises(ValueError, match="no rows"):
        collate([], pad_token_id=0)


def test_micro_batches() -> None:
    samples = [sample(2, [index] * length, index=index) for index, length in enumerate([3, 8, 1, 30, 3, 8])]
    parts = micro_batches(samples, max_tokens=20)
    assert [[row.index for row in part] for part in parts] == [[3], [1, 5], [0, 4, 2]]
    assert micro_batches(samples, max_tokens=20) == parts
    assert micro_batches([], max_tokens=20) == []
    assert [len(part) for part in micro_batches(samples, max_tokens=1)] == [1] * 6


def test_equal_rows_take_the_place_of_one() -> None:
    samples = [sample(2, [index % 2] * 8, index=index) for index in range(6)]
    for share_prompts in (False, True):
        parts = micro_batches(samples, max_tokens=20, share_prompts=share_prompts)
        assert [[row.index for row in part] for part in parts] == [[0, 2, 4, 1, 3, 5]]


def test_prompts_copied_for_many_short_answers_count() -> None:
    """500 prompt tokens are computed once, but their keys and values are held for every row."""
    samples = [sample(500, [index, index], index=index) for index in range(50)]
    parts = micro_batches(samples, max_tokens=2048, share_prompts=True)
    assert max(map(len, parts)) == 24
    assert max(500 + len(part) * 2 + len(part) * 500 // 8 for part in parts) <= 2048


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=20), max_tokens=st.integers(1, 120))
def test_micro_batches_hold_every_row_once_and_fit(lengths: list[int], max_tokens: int) -> None:
    samples = [sample(1, [0] * length, index=index) for index, length in enumerate(lengths)]
    parts = micro_batches(samples, max_tokens=max_tokens)
    assert sorted(row.index for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        different = len({row.completion_ids for row in part})
        padded = different * max(1 + len(row.completion_ids) for row in part)
        assert padded <= max_tokens or different == 1


# ---------------------------------------------------------------- from a configuration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    byte_level(chat_template=CHATML).save_pretrained(path)
    config = {"model_type": "llama", "vocab_size": 320, "eos_token_id": 3, "max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config))
    return path


def agent(folder: Path | str, **options: Any) -> AgentConfig:
    return AgentConfig(name="a", model=str(folder), **options)


def test_from_config(folder: Path) -> None:
    encoder = Encoder.from_config(agent(folder))
    assert encoder.stop_token_ids == (0, 2, 3)
    assert encoder.context_length == 64
    assert encoder.uses_chat
    assert encoder.fingerprint == Encoder(byte_level()).fingerprint
    assert not Encoder.from_config(agent(folder, prompt_format="plain")).uses_chat


def test_from_config_with_generation_config(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1], "pad_token_id": [3]}))
    encoder = Encoder.from_config(agent(tmp_path / "m"))
    assert encoder.stop_token_ids == (0, 1, 2)
    assert encoder.pad_token_id == 3


def test_from_config_with_another_tokenizer_and_template(folder: Path, tmp_path: Path) -> None:
    metaspace().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    encoder = Encoder.from_config(
        agent(folder, tokenizer=str(tmp_path / "tokenizer"), chat_template=str(tmp_path / "mine.jinja"))
    )
    assert encoder.fingerprint == Encoder(metaspace()).fingerprint
    assert encoder.tokenizer.decode(list(encoder.prompt_ids("hello"))) == "hello!"
    assert Encoder.from_config(agent(folder, chat_template="{{ messages[0].content }}?")).prompt_ids("a")[-1] != 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "./nowhere"}, r"agent a: no tokenizer can be loaded from './nowhere'.*set `tokenizer`"),
        ({"chat_template": "nowhere.jinja"}, r"agent a: chat_template 'nowhere.jinja' cannot be read"),
    ],
)
def test_from_config_faults(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Encoder.from_config(agent(folder, **options))


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_model_without_tokenizer_files_is_refused(tmp_path: Path, family: str) -> None:
    # Their tokenizer classes come up without any vocabulary instead of failing.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ModelError, match=r"agent x: no tokenizer can be loaded from .*no vocabulary"):
        Encoder.from_config(AgentConfig(name="x", model=str(tmp_path)))


def test_from_config_without_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"agent a: no model configuration can be loaded from"):
        Encoder.from_config(agent(tmp_path, tokenizer=str(folder)))
    with pytest.raises(ModelError, match=r"agent a: no tokenizer can be loaded from"):
        Encoder.from_config(agent(tmp_path))
