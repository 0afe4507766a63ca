"""One agent's view of text: prompts, own ids, foreign text, and the tensors of a micro-batch.

    Encoder           tokenizer + chat template: prompt -> ids, ids <-> text, another agent's answer -> ids
    training_samples  verified rollouts + advantages -> one learner's rows
    micro_batches     rows -> parts that fit in memory
    collate           rows -> padded tensors

Own answers keep the ids that were sampled. Only another agent's answer is ever encoded from text. Nothing is cut to
fit a limit unless the configuration asks for it, and whatever is left out is counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hacrl.config import AgentConfig, ExchangeConfig
from hacrl.errors import ModelError
from hacrl.metrics import Metrics
from hacrl.types import (
    Completion,
    FinishReason,
    Message,
    Prompt,
    RolloutGroup,
    SharedCompletion,
    SharedGroup,
    TrainingSample,
)

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignEncoding:
    """Another agent's answer in this agent's ids.

    `passed_on`: the tokenizers are identical and the author's ids were taken over. `length_change` is the number of
    ids minus the author's. `round_trip`: the ids decode to the author's text again.
    """

    ids: tuple[int, ...]
    passed_on: bool
    length_change: int
    round_trip: bool


class Encoder:
    """Encodes and decodes for one agent; immutable after construction and safe to use from many threads.

    Attributes:
        tokenizer       the Hugging Face tokenizer, kept for saving; the encoder works on copies of its backend.
        uses_chat       prompts go through the chat template (`prompt_format` resolved).
        stop_token_ids  every id that ends an answer, ascending: the tokenizer's end of sequence, the generation
                        config's, and the one with which the chat template ends an assistant turn.
        eos_token_id    the stop id that this agent is taught as the end of another agent's answer.
        pad_token_id    fills padded places, which no mask covers; not a stop id unless there is no other special token.
        fingerprint     equal for two encoders iff their tokenizers map every text to the same ids.
        context_length  positions that the model was made for, None where unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_arguments: Mapping[str, Any] | None = None,
        prompt_format: Literal["auto", "chat", "plain"] = "auto",
        generation_eos: int | Sequence[int] | None = None,
        generation_pad: int | Sequence[int] | None = None,
        context_length: int | None = None,
        name: str = "agent",
    ) -> None:
        """`generation_eos` and `generation_pad` are what the model's (generation) config says; `name` is for messages.

        Raises: ModelError for a tokenizer without a `tokenizers` backend, `prompt_format` chat without a template, and
        a model that could never end an answer.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            kind = type(cast(object, tokenizer)).__name__
            raise ModelError(
                f"agent {name}: tokenizer {kind} has no fast (tokenizers) backend; set `tokenizer` to a repository or "
                f"folder with a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._name = name
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self._template_arguments = dict(chat_template_arguments or {})
        has_template = bool(cast(Any, tokenizer).chat_template)
        if prompt_format == "chat" and not has_template:
            raise ModelError(
                f"agent {name}: prompt_format is chat, but the tokenizer has no chat template; give `chat_template` "
                f"or use prompt_format: plain"
            )
        self.uses_chat = has_template and prompt_format != "plain"

        serialised = cast(str, backend.to_str())
        self.fingerprint = _fingerprint(serialised)
        self._prompts = _copy(serialised)
        self._bos = _prefix(self._prompts)

        end_of_turn = self._end_of_turn() if self.uses_chat else None
        own_eos = _ids(cast(Any, tokenizer).eos_token_id)
        stops = own_eos + _ids(generation_eos)
        if end_of_turn is not None and (end_of_turn in stops or self._is_special(end_of_turn)):
            stops = (end_of_turn, *stops)
        if not stops:
            raise ModelError(
                f"agent {name}: neither tokenizer, generation config nor chat template name an end-of-sequence token, "
                f"so no answer could end by itself; set eos_token in the tokenizer's files"
            )
        self.eos_token_id = stops[0]
        self.stop_token_ids = tuple(sorted(set(stops)))
        self._continuations = self._continuation_backend(serialised)
        added = self._continuations.get_added_tokens_decoder()
        unknown = cast(Any, tokenizer).unk_token_id
        self._special = {id_: token.content for id_, token in added.items() if token.special and id_ != unknown}
        self.pad_token_id = self._pad(generation_pad)

    @classmethod
    def from_config(cls, agent: AgentConfig) -> Encoder:
        """Load the agent's tokenizer and stop ids; weights are not touched. Raises ModelError."""
        from transformers import AutoTokenizer

        source = agent.tokenizer or agent.model
        common: dict[str, Any] = {"revision": agent.revision, "trust_remote_code": agent.trust_remote_code}
        arguments = dict(common)
        if agent.tokenizer is None and agent.gguf_file is not None:
            arguments["gguf_file"] = agent.gguf_file
        if agent.tokenizer is not None:
            del arguments["revision"]  # a revision of the model's repository
        try:
            tokenizer = cast(Any, AutoTokenizer).from_pretrained(source, **arguments)
        except Exception as error:  # missing files, bad JSON, refused remote code: no common error type
            raise ModelError(
                f"agent {agent.name}: no tokenizer can be loaded from {source!r}: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}; set `tokenizer` to a repository or folder that has one"
            ) from error
        # Some tokenizer classes come up empty where their files are missing, instead of failing.
        words = cast(list[int], tokenizer.encode("The answer is 42.", add_special_tokens=False))
        if set(words) <= {tokenizer.unk_token_id}:
            raise ModelError(
                f"agent {agent.name}: no tokenizer can be loaded from {source!r}: it has no vocabulary "
                f"({len(tokenizer)} tokens); set `tokenizer` to a repository or folder that has one"
            )
        generation = _generation_settings(agent, common)
        return cls(
            tokenizer,
            chat_template=_template_text(agent),
            chat_template_arguments=agent.chat_template_arguments,
            prompt_format=agent.prompt_format,
            generation_eos=generation.eos,
            generation_pad=generation.pad,
            context_length=generation.context_length,
            name=agent.name,
        )

    # ------------------------------------------------------------ prompts

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt as this agent sees it, ready for an answer to follow; never cut, whatever its length.

        Chat: the template renders the messages (a text prompt is one user message) with the opening of an assistant
        turn, and special tokens stand only where the template wrote them. Plain: contents joined by blank lines, with
        the beginning-of-sequence token iff the tokenizer puts one.

        Raises: ModelError when the template refuses the messages.
        """
        before: tuple[int, ...] = ()
        if self.uses_chat:
            messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
            text = self._render(messages, add_generation_prompt=True)
        else:
            text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
            before = self._bos
        ids = tuple(self._prompts.encode(text, add_special_tokens=False).ids)
        return ids if ids[: len(before)] == before else before + ids

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            text: str = cast(Any, self.tokenizer).apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_arguments,
            )
        except Exception as error:  # templates raise jinja errors and whatever their expressions raise
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(
                f"agent {self._name}: the chat template refuses messages of roles {roles}: {type(error).__name__}: "
                f"{error}; change the tasks' messages (e.g. leave out `system`) or give another `chat_template`"
            ) from error
        return text

    def _end_of_turn(self) -> int | None:
        """The id that follows an assistant's words in the rendered template, if it is an added token."""
        words = "hacrl"
        turns = [Message(role="user", content="a"), Message(role="assistant", content=words)]
        try:
            before, _, after = self._render(turns, add_generation_prompt=False).rpartition(words)
        except ModelError:  # a template may demand more of a conversation than this; prompts will tell
            return None
        ids = self._prompts.encode(after.strip(), add_special_tokens=False).ids if before and after.strip() else []
        return ids[0] if ids and ids[0] in self._prompts.get_added_tokens_decoder() else None

    def _is_special(self, token_id: int) -> bool:
        token = self._prompts.get_added_tokens_decoder().get(token_id)
        return token is not None and token.special

    # ------------------------------------------------------------ answers

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, as it continues its prompt: a leading space is kept, special tokens are left out.

        Bytes that are not a whole character become U+FFFD.
        """
        return self._continuations.decode(list(ids), skip_special_tokens=True)

    def encode_completion(self, text: str, *, finish_reason: FinishReason) -> tuple[int, ...]:
        """Text as the continuation of a prompt, with `eos_token_id` behind it iff `finish_reason` is `stop`.

        No beginning of sequence, no space that is not in the text; the name of a special token occurring in the text
        is text.
        """
        ids = tuple(self._text_ids(text))
        return (*ids, self.eos_token_id) if finish_reason == "stop" else ids

    def foreign_ids(self, completion: Completion | SharedCompletion, *, author_fingerprint: str) -> ForeignEncoding:
        """Another agent's answer in this agent's ids.

        Ids of an identical tokenizer are passed on, a closing end of sequence replaced by this agent's where this
        agent does not stop on it. Ids that hold one of this agent's stop ids earlier (the author did not stop there)
        are not: like text of any other tokenizer, they are encoded anew without it.
        """
        ended = completion.finish_reason == "stop"
        passed = self._passed_on(completion) if author_fingerprint == self.fingerprint else None
        if passed is None:
            # The length limit can cut a character in two; the half is noise that no one should learn.
            text = completion.text if ended else completion.text.rstrip("\ufffd")
            ids = self.encode_completion(text, finish_reason=completion.finish_reason)
        else:
            ids = passed
        return ForeignEncoding(
            ids=ids,
            passed_on=passed is not None,
            length_change=len(ids) - completion.tokens,
            round_trip=self.decode(ids) == completion.text,
        )

    def _passed_on(self, completion: Completion | SharedCompletion) -> tuple[int, ...] | None:
        """The author's ids as this agent takes them over, or None where it cannot."""
        ids = completion.token_ids
        if ids is None:
            raise ValueError(f"completion of {completion.author} for {completion.task_id}: its ids have been left out")
        ended = completion.finish_reason == "stop"
        body = ids[:-1] if ended else ids
        if set(body) & set(self.stop_token_ids):
            return None
        return (*body, self.eos_token_id) if ended and ids[-1] not in self.stop_token_ids else ids

    def _text_ids(self, text: str) -> list[int]:
        ids = self._continuations.encode(text, add_special_tokens=False).ids
        found = {self._special[id_] for id_ in ids if id_ in self._special}
        if not found:
            return ids
        # A Unigram model holds special tokens as ordinary pieces and finds them in text: keep their letters apart.
        cuts = "|".join(
            f"(?<={re.escape(content[0])})(?={re.escape(content[1:])})" for content in found if len(content) > 1
        )
        pieces = re.split(cuts, text) if cuts else [text]
        return [id_ for piece in pieces for id_ in self._continuations.encode(piece, add_special_tokens=False).ids]

    def _continuation_backend(self, serialised: str) -> Tokenizer:
        """A copy for text in the middle of a sequence: without added spaces, special tokens or their names."""
        backend = _copy(json.dumps(_without_dummy_prefix(json.loads(serialised))))
        added = backend.get_added_tokens_decoder()
        cast(Any, backend).add_special_tokens([added[id_] for id_ in self.stop_token_ids if id_ in added])
        backend.encode_special_tokens = True
        return backend

    def _pad(self, generation_pad: int | Sequence[int] | None) -> int:
        tokenizer = cast(Any, self.tokenizer)
        named_pad = [id_ for id_, content in self._special.items() if "pad" in content.lower()]
        usual = [*_ids(tokenizer.pad_token_id), *_ids(generation_pad), *named_pad, *_ids(tokenizer.unk_token_id)]
        others = [id_ for id_ in self._special if id_ not in self._bos]
        choices = [*usual, *others, *self._bos]
        return next((id_ for id_ in choices if id_ not in self.stop_token_ids), self.eos_token_id)


def _copy(serialised: str) -> Tokenizer:
    """A private backend that nobody else can set to truncate, pad or treat special tokens differently."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(serialised)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _prefix(backend: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before a text by itself: the beginning of sequence, or nothing."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:start])


def _fingerprint(serialised: str) -> str:
    """Hash of everything that decides which ids a text gets; templates, padding and decoding decide nothing."""
    parts = json.loads(serialised)
    relevant = {key: parts.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    # Saving and loading turns an absent affix into an empty one and back.
    model = {key: value for key, value in relevant["model"].items() if value not in ("", None)}
    text = json.dumps({**relevant, "model": model}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _without_dummy_prefix(node: Any) -> Any:
    """The serialised backend with every component that adds a leading space, or takes one off again, disarmed."""
    if isinstance(node, list):
        return [_without_dummy_prefix(item) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    component = cast(dict[str, Any], node)
    changed = {
        # The vocabulary is large and holds no components.
        key: value if key in ("model", "added_tokens") else _without_dummy_prefix(value)
        for key, value in component.items()
    }
    match component.get("type"):
        case "Metaspace":
            changed["prepend_scheme"] = "never"
            changed.pop("add_prefix_space", None)
        case "ByteLevel" if "add_prefix_space" in component:
            changed["add_prefix_space"] = False
        case "Prepend":
            changed["prepend"] = ""
        case "Strip" if component.get("content") == " ":
            changed["start"] = 0
        case _:
            pass
    return changed


def _ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or None, as configs hold them, in order; -1 and the like stand for none."""
    if value is None:
        return ()
    values: list[Any] = list(cast(Any, value)) if isinstance(value, Sequence) else [value]
    return tuple(int(item) for item in values if item is not None and int(item) >= 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _GenerationSettings:
    eos: tuple[int, ...]
    pad: tuple[int, ...]
    context_length: int | None


def _generation_settings(agent: AgentConfig, arguments: Mapping[str, Any]) -> _GenerationSettings:
    from transformers import AutoConfig
    from transformers.utils import hub

    gguf = {} if agent.gguf_file is None else {"gguf_file": agent.gguf_file}
    try:
        config = cast(Any, AutoConfig).from_pretrained(agent.model, **arguments, **gguf)
    except Exception as error:  # as for tokenizers
        raise ModelError(
            f"agent {agent.name}: no model configuration can be loaded from {agent.model!r}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; check `model`"
        ) from error
    text_config = config.get_text_config()
    generation = {key: getattr(text_config, key, None) for key in ("eos_token_id", "pad_token_id")}
    try:
        path = cast(Any, hub).cached_file(agent.model, "generation_config.json", revision=agent.revision)
        # Not through GenerationConfig: it refuses the lists that some published files hold.
        generation |= json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is optional; without it generation goes by the model's config
        pass
    return _GenerationSettings(
        eos=_ids(generation["eos_token_id"]),
        pad=_ids(generation["pad_token_id"]),
        context_length=getattr(text_config, "max_position_embeddings", None),
    )


def _template_text(agent: AgentConfig) -> str | None:
    template = agent.chat_template
    if template is None or not template.endswith((".jinja", ".jinja2", ".j2")):
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"agent {agent.name}: chat_template {template!r} cannot be read: {error}") from error


# ---------------------------------------------------------------- one learner's rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What happened to one author's rollouts on their way to one learner.

    `rows` became training samples; of these, `truncated` were cut to the learner's limit. `dropped` counts rollouts
    left out, by cause:
        too_long             foreign, above the learner's max_new_tokens
        cut_off              foreign, ended by its author's length limit
        empty                no id at all
        logprob_not_finite   the sampler gave NaN or infinity
    Of the rows that came through as foreign, `passed_on` kept their ids, `length_change` sums the change in ids, and
    `round_trip_failures` decode to another text.
    """

    own: bool
    rows: int
    truncated: int
    dropped: Mapping[str, int]
    passed_on: int
    length_change: int
    round_trip_failures: int

    def metrics(self) -> Metrics:
        metrics = Metrics()
        metrics.total("rows", self.rows)
        for cause, count in self.dropped.items():
            metrics.total(f"dropped/{cause}", count)
        if not self.own:
            metrics.total("truncated", self.truncated)
            metrics.total("round_trip_failures", self.round_trip_failures)
            if self.rows:
                metrics.mean("passed_on_share", self.passed_on / self.rows, self.rows)
                metrics.mean("length_change_mean", self.length_change / self.rows, self.rows)
        return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One learner's rows of one step, in the order of groups and rollouts, and what happened on the way, by author."""

    samples: tuple[TrainingSample, ...]
    exchange: Mapping[str, Exchange]


def training_samples(
    groups: Sequence[RolloutGroup | SharedGroup],
    *,
    learner: str,
    advantages: Mapping[str, Sequence[Sequence[float]]],
    ratio: Mapping[str, float],
    encoder: Encoder,
    fingerprints: Mapping[str, str],
    max_new_tokens: int,
    exchange: ExchangeConfig,
) -> Samples:
    """The rows that one learner trains on.

    groups          P joint groups.
    advantages      author -> P x G: the value of that author's rollout `index` g for prompt p to this learner; NaN =
                    no row. An author left out gives no rows.
    ratio           author -> capability(author) / capability(learner); own rows have ratio 1.
    fingerprints    author -> its encoder's fingerprint.
    max_new_tokens  the learner's limit, for foreign rows.

    Own rows keep ids and log-probabilities as they are, foreign rows come through `Encoder.foreign_ids`. A foreign
    answer cut to the limit has no end of sequence. Rows with advantage 0 are kept: they count in the normaliser.
    Raises ValueError if an author's advantages are not one list per group.
    """
    counts = {author: _Counts(own=author == learner) for author in advantages}
    for author, values in advantages.items():
        if len(values) != len(groups):
            raise ValueError(f"advantages of {author}: {len(values)} lists for {len(groups)} groups")
    samples: list[TrainingSample] = []
    for position, group in enumerate(groups):
        prompt_ids: tuple[int, ...] | None = None
        for completion in group.completions:
            author = completion.author
            if author not in advantages:
                continue
            advantage = float(advantages[author][position][completion.index])
            if math.isnan(advantage):
                continue
            count = counts[author]
            own = author == learner
            ids: tuple[int, ...] | None
            if own:
                assert isinstance(completion, Completion), "a learner has its own completions whole"
                ids, author_logprobs = completion.token_ids, completion.logprobs
            else:
                ids = _foreign(completion, count, encoder, fingerprints[author], max_new_tokens, exchange)
                author_logprobs = None
            if ids is None:
                continue
            if not ids:
                count.drop("empty")
                continue
            author_mean_logprob = completion.mean_logprob
            if not math.isfinite(author_mean_logprob):
                count.drop("logprob_not_finite")
                continue
            count.rows += 1
            if prompt_ids is None:
                prompt_ids = encoder.prompt_ids(group.task.prompt)
            samples.append(
                TrainingSample(
                    task_id=group.task.id,
                    author=author,
                    index=completion.index,
                    own=own,
                    prompt_ids=prompt_ids,
                    completion_ids=ids,
                    author_mean_logprob=author_mean_logprob,
                    author_logprobs=author_logprobs,
                    advantage=advantage,
                    ratio=1.0 if own else float(ratio[author]),
                )
            )
    return Samples(samples=tuple(samples), exchange={author: count.result() for author, count in counts.items()})


def _foreign(
    completion: Completion | SharedCompletion,
    count: _Counts,
    encoder: Encoder,
    fingerprint: str,
    max_new_tokens: int,
    exchange: ExchangeConfig,
) -> tuple[int, ...] | None:
    """The learner's ids of a foreign answer, or None if the exchange rules leave it out (counted)."""
    if completion.finish_reason == "length" and exchange.cut_off == "drop":
        count.drop("cut_off")
        return None
    encoding = encoder.foreign_ids(completion, author_fingerprint=fingerprint)
    ids = encoding.ids
    if len(ids) > max_new_tokens and exchange.too_long == "drop":
        count.drop("too_long")
        return None
    if ids and math.isfinite(completion.mean_logprob):
        count.truncated += len(ids) > max_new_tokens
        count.passed_on += encoding.passed_on
        count.length_change += encoding.length_change
        count.round_trip_failures += not encoding.round_trip
    return ids[:max_new_tokens]


class _Counts:
    """`Exchange` while it is being counted."""

    def __init__(self, *, own: bool) -> None:
        self.own = own
        self.rows = self.truncated = self.passed_on = self.length_change = self.round_trip_failures = 0
        causes = ("empty", "logprob_not_finite") if own else ("too_long", "cut_off", "empty", "logprob_not_finite")
        self.dropped: dict[str, int] = dict.fromkeys(causes, 0)

    def drop(self, cause: str) -> None:
        self.dropped[cause] += 1

    def result(self) -> Exchange:
        return Exchange(
            own=self.own,
            rows=self.rows,
            truncated=self.truncated,
            dropped=self.dropped,
            passed_on=self.passed_on,
            length_change=self.length_change,
            round_trip_failures=self.round_trip_failures,
        )


# ---------------------------------------------------------------- tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows as tensors: prompt and answer end to end, padded on the right to T.

    Everything per token stands at the token's own position t; the model's logits for it are those at t - 1.

    input_ids_BT           int64, `pad_token_id` at padded places.
    attention_mask_BT      int64, 1 at prompt and answer.
    mask_BT                bool, the answer, its end of sequence included; never position 0.
    author_logprobs_BT     float32, old log-probabilities of own answers in nats; NaN at every other place.
    author_mean_logprob_B  float32, nats, over the author's own tokens.
    advantage_B, ratio_B   float32.
    own_B                  bool.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    mask_BT: Tensor
    author_logprobs_BT: Tensor
    author_mean_logprob_B: Tensor
    advantage_B: Tensor
    ratio_B: Tensor
    own_B: Tensor

    def select(self, rows: Sequence[int]) -> Batch:
        """These rows alone, not padded anew."""
        return Batch(**{field.name: getattr(self, field.name)[list(rows)] for field in dataclasses.fields(self)})


def collate(samples: Sequence[TrainingSample], *, pad_token_id: int, device: torch.device | str | None = None) -> Batch:
    """Rows -> tensors on `device`.

    Masks come from lengths, never from ids, so a padding id that is also a stop id hides nothing. Raises ValueError
    for no rows, a row without prompt or answer ids, and old log-probabilities that do not match the ids one to one.
    """
    import torch

    if not samples:
        raise ValueError("no rows to collate")
    shape = (len(samples), max(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.full(shape, math.nan, dtype=torch.float32)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.completion_ids)
        if start == 0 or end == start:
            raise ValueError(
                f"{sample.task_id}, answer {sample.index} of {sample.author}: {start} prompt ids and {end - start} "
                f"answer ids; both must be there"
            )
        input_ids[row, :end] = torch.tensor((*sample.prompt_ids, *sample.completion_ids))
        attention_mask[row, :end] = 1
        mask[row, start:end] = True
        if sample.author_logprobs is not None:
            if len(sample.author_logprobs) != end - start:
                raise ValueError(
                    f"{sample.task_id}, answer {sample.index} of {sample.author}: {end - start} answer ids but "
                    f"{len(sample.author_logprobs)} log-probabilities"
                )
            logprobs[row, start:end] = torch.tensor(sample.author_logprobs, dtype=torch.float32)

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Batch(
        input_ids_BT=input_ids.to(device),
        attention_mask_BT=attention_mask.to(device),
        mask_BT=mask.to(device),
        author_logprobs_BT=logprobs.to(device),
        author_mean_logprob_B=column([sample.author_mean_logprob for sample in samples]),
        advantage_B=column([sample.advantage for sample in samples]),
        ratio_B=column([sample.ratio for sample in samples]),
        own_B=torch.tensor([sample.own for sample in samples], dtype=torch.bool, device=device),
    )


def micro_batches(
    samples: Sequence[TrainingSample], *, max_tokens: int, share_prompts: bool = False
) -> list[list[TrainingSample]]:
    """Cut rows into parts of at most `max_tokens` computed tokens, padding included.

    Computed are different rows x longest row or, where `share_prompts`, each different prompt once and every different
    answer to it, to which the prompt's keys and values copied for each row are added. Rows are ordered by length or,
    if that computes fewer tokens, by prompt. A row above `max_tokens` is a part of its own. The result is a function
    of the arguments.
    """
    # Ids break ties, so that equal rows, which are computed once, come to lie side by side.
    by_length = sorted(
        samples,
        key=lambda sample: (
            -len(sample.prompt_ids) - len(sample.completion_ids),
            sample.prompt_ids,
            sample.completion_ids,
        ),
    )
    cut = _cut(by_length, max_tokens, share_prompts)
    if share_prompts:
        by_prompt = sorted(by_length, key=lambda sample: (-len(sample.prompt_ids), sample.prompt_ids))
        cut = min(cut, _cut(by_prompt, max_tokens, share_prompts), key=lambda parts: sum(cost for _, cost in parts))
    return [part for part, _ in cut]


def _cut(
    samples: Sequence[TrainingSample], max_tokens: int, share_prompts: bool
) -> list[tuple[list[TrainingSample], int]]:
    """Consecutive rows in parts, each with its number of computed tokens."""
    parts: list[tuple[list[TrainingSample], int]] = []
    prompts: set[tuple[int, ...]] = set()
    kinds: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    prompt = completion = whole = 0
    for sample in samples:
        lengths = len(sample.prompt_ids), len(sample.completion_ids)
        kind = sample.prompt_ids, sample.completion_ids
        for attempt in ("same part", "new part"):
            if attempt == "new part" or not parts:
                parts.append(([], 0))
                prompts, kinds, prompt, completion, whole = set(), set(), 0, 0, 0
            rows = len(kinds) + (kind not in kinds)
            longest_prompt, longest_completion = max(prompt, lengths[0]), max(completion, lengths[1])
            longest = max(whole, sum(lengths))
            different = len(prompts) + (sample.prompt_ids not in prompts)
            # Every row has a copy of its prompt's keys and values, an eighth of what a computed token leaves.
            shared = different * longest_prompt + rows * longest_completion + rows * longest_prompt // 8
            cost = min(shared, rows * longest) if share_prompts else rows * longest
            if cost <= max_tokens or rows == 1:
                break
        prompts.add(sample.prompt_ids)
        kinds.add(kind)
        prompt, completion, whole = longest_prompt, longest_completion, longest
        parts[-1] = ([*parts[-1][0], sample], cost)
    return parts
