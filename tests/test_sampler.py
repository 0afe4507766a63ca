"""The sampler in process: its log-probabilities, stopping, batching and reproducibility."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config import AgentConfig, LoraConfig
from hacrl.policy import Policy, load_policies
from hacrl.sampling.sampler import SampledTokens
from hacrl.sampling.transformers import TransformersSampler, _draw

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14, 15, 16), (17,)]


@pytest.fixture(scope="module", params=["qwen", "llama"])
def policy(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Policy:
    return load_policies([AgentConfig(name="a", model=str(tiny_models[request.param]))], seed=0)["a"]


def in_order(sampler: TransformersSampler, prompts: list[tuple[int, ...]], **arguments: Any) -> list[Any]:
    """All prompts' answers in the order of the prompts."""
    groups = dict(sampler.sample(prompts, places=range(len(prompts)), **arguments))
    return [groups[index] for index in range(len(prompts))]


def sample(
    policy: Policy,
    *,
    stop: tuple[int, ...] = (),
    answers: int = 3,
    batch_rows: int = 64,
    temperature: float = 0.8,
    top_p: float = 1.0,
    new: int = 10,
    seed: int = 1,
) -> list[list[SampledTokens]]:
    sampler = TransformersSampler(policy, stop_token_ids=stop, pad_token_id=0, batch_rows=batch_rows)
    return in_order(
        sampler,
        PROMPTS,
        answers=answers,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=new,
        seed=seed,
    )


def logprobs_of(policy: Policy, prompt: tuple[int, ...], answer: SampledTokens, temperature: float) -> torch.Tensor:
    """Log-probabilities of an answer's ids by one plain forward pass without cache or padding."""
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.no_grad():
        logits = policy.causal_lm(input_ids=ids).logits.float() / temperature
    values = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    return values[len(prompt) - 1 :]


def stop_ids(policy: Policy) -> tuple[int, ...]:
    """A third of the vocabulary ends an answer, so that rows end at many different lengths."""
    return tuple(range(0, policy.vocabulary, 3))


def test_logprobs_belong_to_the_sampled_ids(policy: Policy) -> None:
    """Through left padding, a shared prefill, the cache and rows that leave the batch."""
    groups = sample(policy, stop=stop_ids(policy), answers=5)
    lengths = {len(answer.token_ids) for group in groups for answer in group}
    assert len(lengths) > 3
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for answer in group:
            expected = logprobs_of(policy, prompt, answer, 0.8).tolist()
            assert answer.logprobs == pytest.approx(expected, abs=2e-5)


def test_an_answer_ends_at_its_first_stop_id_and_keeps_it(policy: Policy) -> None:
    stops = set(stop_ids(policy))
    answers = [answer for group in sample(policy, stop=tuple(stops), answers=6) for answer in group]
    for answer in answers:
        inner, last = answer.token_ids[:-1], answer.token_ids[-1]
        assert not stops & set(inner)
        assert (answer.finish_reason == "stop") == (last in stops)
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 10
    assert sum(answer.finish_reason == "stop" for answer in answers) > len(answers) / 2


def test_without_a_stop_every_answer_is_cut_at_the_limit(policy: Policy) -> None:
    for group in sample(policy, new=4):
        assert [len(answer.token_ids) for answer in group] == [4, 4, 4]
        assert {answer.finish_reason for answer in group} == {"length"}


def test_the_same_seed_gives_the_same_answers_and_another_does_not(policy: Policy) -> None:
    assert sample(policy, seed=5) == sample(policy, seed=5)
    assert sample(policy, seed=5) != sample(policy, seed=6)


def test_answers_of_one_prompt_differ(policy: Policy) -> None:
    for group in sample(policy, answers=4):
        assert len({answer.token_ids for answer in group}) == 4


@pytest.mark.parametrize("batch_rows", [1, 2, 5, 7])
def test_small_batches_give_every_prompt_its_answers(policy: Policy, batch_rows: int) -> None:
    groups = sample(policy, answers=5, batch_rows=batch_rows, stop=stop_ids(policy))
    assert [len(group) for group in groups] == [5, 5, 5, 5]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for answer in group:
            assert answer.logprobs == pytest.approx(logprobs_of(policy, prompt, answer, 0.8).tolist(), abs=2e-5)


def test_greedy_takes_the_most_likely_token(policy: Policy) -> None:
    for prompt, (answer,) in zip(PROMPTS, sample(policy, answers=1, temperature=0.0), strict=True):
        ids = prompt
        for token in answer.token_ids:
            with torch.no_grad():
                logits = policy.causal_lm(input_ids=torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids = (*ids, token)


def test_nucleus_logprobs_are_of_the_nucleus(policy: Policy) -> None:
    """Raw log-probabilities would be lower than those of the cut and renormalised distribution."""
    groups = sample(policy, top_p=0.3, temperature=1.0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for answer in group:
            raw = logprobs_of(policy, prompt, answer, 1.0).tolist()
            assert all(cut > full for cut, full in zip(answer.logprobs, raw, strict=True))


def test_frequencies_follow_the_tempered_distribution(policy: Policy) -> None:
    """Chi-square over 4,000 first tokens, most likely ids apart, the rest together."""
    sampler = TransformersSampler(policy, stop_token_ids=(), pad_token_id=0, batch_rows=4000)
    (group,) = in_order(sampler, [(5, 6, 7)], answers=4000, temperature=0.3, top_p=1.0, max_new_tokens=1, seed=0)
    with torch.no_grad():
        logits = policy.causal_lm(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].float() / 0.3
    expected = logits.softmax(-1)
    top = expected.topk(8)
    counts = torch.tensor([sum(answer.token_ids[0] == token for answer in group) for token in top.indices.tolist()])
    observed = torch.cat([counts, 4000 - counts.sum()[None]]).double()
    expectation = torch.cat([top.values, 1 - top.values.sum()[None]]).double() * 4000
    chi_square = float(((observed - expectation) ** 2 / expectation).sum())
    assert chi_square < 26.1  # 99.9 % quantile for 8 degrees of freedom


def test_a_token_without_mass_is_never_drawn() -> None:
    logits = torch.full((5000, 6), -math.inf)
    logits[:, 2], logits[:, 4] = 0.0, 1.0
    uniform = torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids, logprobs = _draw(logits, uniform, 1.0, 1.0)
    assert set(ids.tolist()) == {2, 4}
    assert (ids == 4).double().mean() == pytest.approx(math.e / (1 + math.e), abs=0.03)
    assert logprobs[ids == 2].unique().item() == pytest.approx(-math.log(1 + math.e), abs=1e-6)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Windows of 8 tokens in every other layer: rows outgrow them."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=256,
    )
    return saved_policy(Gemma3ForCausalLM, config, tmp_path_factory.mktemp("sliding"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Convolutions beside attention: their states cannot be aligned by columns."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        max_position_embeddings=256,
    )
    return saved_policy(Lfm2ForCausalLM, config, tmp_path_factory.mktemp("hybrid"))


def saved_policy(kind: type, config: object, folder: Path) -> Policy:
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)  # type: ignore[call-arg]
    return load_policies([AgentConfig(name="a", model=str(folder))], seed=0)["a"]


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
@pytest.mark.parametrize("batch_rows", [4, 64])
def test_other_kinds_of_layers(kind: str, batch_rows: int, request: pytest.FixtureRequest) -> None:
    policy = request.getfixturevalue(kind)
    groups = sample(policy, answers=6, batch_rows=batch_rows, stop=tuple(range(0, 60, 9)), new=30)
    assert max(len(answer.token_ids) for group in groups for answer in group) > 15
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 6
        for answer in group:
            assert answer.logprobs == pytest.approx(logprobs_of(policy, prompt, answer, 0.8).tolist(), abs=2e-5)


def test_waiting_rows_take_the_places_of_ended_ones(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch never waits for its longest row: it is full until no row waits, and forgets columns that nobody needs."""
    rows, columns = [], []
    step = Policy.decode_step

    def watched(self: Policy, ids: torch.Tensor, attention: torch.Tensor, *others: object) -> torch.Tensor:
        if ids.shape[1] == 1 < attention.shape[1]:
            rows.append(len(ids))
            columns.append(attention.shape[1])
        return step(self, ids, attention, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Policy, "decode_step", watched)
    groups = sample(policy, answers=60, batch_rows=8, stop=tuple(range(0, policy.vocabulary, 12)), new=40)
    tokens = sum(len(answer.token_ids) - 1 for group in groups for answer in group)
    # At most a quarter of the places stands idle while rows wait; at the end the batch shrinks.
    assert sum(rows) <= 1.25 * tokens + 40 * 8
    assert rows[: len(rows) // 2] == [8] * (len(rows) // 2)
    assert len(rows) > 200
    assert max(columns) < 3 * (40 + 7)


def test_an_ended_row_never_leaves_the_positions_that_a_model_knows(tmp_path: Path) -> None:
    """Learned positions, as many as the longest row: ended rows wait in the batch while others fill theirs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=7 + 40)
    policy = saved_policy(GPT2LMHeadModel, config, tmp_path)
    for seed in range(6):
        groups = sample(policy, answers=8, batch_rows=16, stop=(7, 8), new=40, seed=seed)
        assert max(len(answer.token_ids) for group in groups for answer in group) == 40


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize("batch_rows", [1, 3, 8, 17])
def test_answers_do_not_depend_on_what_is_computed_together(policy: Policy, batch_rows: int) -> None:
    assert ids_of(sample(policy, answers=5, batch_rows=batch_rows, stop=stop_ids(policy))) == ids_of(
        sample(policy, answers=5, batch_rows=64, stop=stop_ids(policy))
    )


def test_answers_do_not_depend_on_how_prompts_are_split(policy: Policy) -> None:
    """Over two calls, as two processes would make them; and fewer or shorter answers are the same ones, cut."""
    sampler = TransformersSampler(policy, stop_token_ids=stop_ids(policy), pad_token_id=0, batch_rows=8)
    prompts = [*PROMPTS, PROMPTS[0]]

    def part(places: list[int], answers: int = 5, new: int = 10) -> dict[int, list[tuple[int, ...]]]:
        found = sampler.sample(
            [prompts[place] for place in places],
            places=places,
            answers=answers,
            temperature=0.8,
            top_p=1.0,
            max_new_tokens=new,
            seed=1,
        )
        return {places[index]: [answer.token_ids for answer in group] for index, group in found}

    whole = part([0, 1, 2, 3, 4])
    assert sorted(whole) == [0, 1, 2, 3, 4]
    assert part([4, 2]) | part([1, 0, 3]) == whole
    assert part([1], answers=2, new=4) == {1: [ids[:4] for ids in whole[1][:2]]}
    assert whole[0] != whole[4]  # one prompt at two places
    assert all(len({ids[0] for ids in group}) > 1 for group in whole.values())


def test_random_numbers_of_one_answer_and_of_neighbours_are_independent(tiny_models: dict[str, Path]) -> None:
    """All weights zero, so that every id is as likely as any other, and an id is the random number itself, rounded."""
    policy = load_policies([AgentConfig(name="a", model=str(tiny_models["llama"]))], seed=0)["a"]
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.zero_()
    sampler = TransformersSampler(policy, stop_token_ids=(), pad_token_id=0, batch_rows=2000)
    groups = in_order(sampler, [(5, 6), (7, 8)], answers=1000, temperature=1.0, top_p=1.0, max_new_tokens=3, seed=0)
    ids_PGT = torch.tensor(ids_of(groups)).double() / policy.vocabulary
    assert ids_PGT.mean((0, 1)).tolist() == pytest.approx([0.5] * 3, abs=0.03)
    pairs = [
        (ids_PGT[:, :, :-1], ids_PGT[:, :, 1:]),
        (ids_PGT[:, :-1], ids_PGT[:, 1:]),
        (ids_PGT[0], ids_PGT[1]),
    ]
    for one, other in pairs:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / one.numel() ** 0.5


def ids_of(groups: list[list[SampledTokens]]) -> list[list[tuple[int, ...]]]:
    return [[answer.token_ids for answer in group] for group in groups]


# ---------------------------------------------------------------- parts


def parts_of(
    policy: Policy, prompts: list[tuple[int, ...]] = PROMPTS, *, answers: int = 5, batch_rows: int = 5, new: int = 40
) -> Iterator[tuple[int, list[SampledTokens]]]:
    """By default a batch is as many rows as a prompt has answers."""
    sampler = TransformersSampler(policy, stop_token_ids=stop_ids(policy), pad_token_id=0, batch_rows=batch_rows)
    return sampler.sample(
        prompts, places=range(len(prompts)), answers=answers, temperature=0.8, top_p=1.0, max_new_tokens=new, seed=1
    )


@pytest.mark.parametrize("batch_rows", [5, 60])
def test_a_prompt_leaves_as_soon_as_it_is_finished(
    policy: Policy, batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows in the batch and rows that wait alike."""
    step, steps = Policy.decode_step, 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return step(*arguments)

    monkeypatch.setattr(Policy, "decode_step", counted)
    left_at = [(steps, index) for index, _ in parts_of(policy, PROMPTS * 3, batch_rows=batch_rows)]
    assert sorted(index for _, index in left_at) == list(range(12))
    assert len({at for at, _ in left_at}) > 2
    assert left_at[0][0] < steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_of_the_sampler_holds_while_it_is_suspended(
    tiny_models: dict[str, Path], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AgentConfig(name="a", model=str(tiny_models["qwen"]), dtype=dtype)  # type: ignore[arg-type]
    policy = load_policies([config], seed=0)["a"]
    step, modes = Policy.decode_step, set()

    def watched(*arguments: Any) -> torch.Tensor:
        modes.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return step(*arguments)

    monkeypatch.setattr(Policy, "decode_step", watched)
    parts = parts_of(policy)
    for _ in range(2):
        next(parts)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert policy.causal_lm(input_ids=torch.tensor([[5, 6]])).logits.requires_grad
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        next(parts)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert modes == {(False, dtype == "bfloat16")}


def test_a_sampler_that_was_left_half_way_samples_again(policy: Policy) -> None:
    sampler = TransformersSampler(policy, stop_token_ids=stop_ids(policy), pad_token_id=0, batch_rows=5)

    def parts() -> Iterator[tuple[int, list[SampledTokens]]]:
        return sampler.sample(
            PROMPTS, places=range(4), answers=5, temperature=0.8, top_p=1.0, max_new_tokens=40, seed=1
        )

    whole = list(parts())
    left = parts()
    assert next(left) == whole[0]
    left.close()  # type: ignore[attr-defined]
    assert list(left) == []
    assert list(parts()) == whole


def test_two_adapters_of_one_base_may_sample_by_turns(tiny_models: dict[str, Path]) -> None:
    agents = [
        AgentConfig(name=name, model=str(tiny_models["qwen"]), lora=LoraConfig(rank=4), dtype="float32")
        for name in ("one", "two")
    ]
    policies = load_policies(agents, seed=0)
    assert policies["one"].causal_lm is policies["two"].causal_lm
    with torch.no_grad():
        for seed, policy in enumerate(policies.values()):
            generator = torch.Generator().manual_seed(seed)
            for weight in policy.trained_parameters().values():
                weight.copy_(torch.randn(weight.shape, generator=generator))
    alone = [list(parts_of(policy)) for policy in policies.values()]
    assert alone[0] != alone[1]
    assert list(zip(*(parts_of(policy) for policy in policies.values()), strict=True)) == list(zip(*alone, strict=True))


def test_no_prompts_and_no_answers(policy: Policy) -> None:
    assert list(parts_of(policy, [])) == []
    assert list(parts_of(policy, answers=0)) == [(0, []), (1, []), (2, []), (3, [])]
