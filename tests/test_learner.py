"""The learner: minibatches, micro-batches, dropped rows, KL, non-finite numbers, state."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.hacpo import Hacpo
from hacrl.config import AgentConfig
from hacrl.errors import NonFiniteError
from hacrl.learner import Learner
from hacrl.policy import load_policies, trained_weights
from hacrl.sampling.transformers import TransformersSampler
from hacrl.types import TrainingSample

HACPO = Hacpo(
    alpha=1.0, delta=0.9, delta_step=0.01, clip_low=3e-4, clip_high=4e-4, epsilon=1e-6, ratio_min=0.1, ratio_max=10.0,
    capability_advantage=True, capability_coefficient=True, importance_weighting=True, clipping="stepwise",
)  # fmt: skip
GSPO = Gspo(clip_low=3e-4, clip_high=4e-4, epsilon=1e-6)


@pytest.fixture
def model(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["qwen"]


def build(model: Path, tmp_path: Path, **options: Any) -> Learner:
    minibatch_rows = options.pop("minibatch_rows", 100)
    order = options.pop("minibatch_order", "own_first")
    algorithm = options.pop("algorithm", HACPO)
    workers = options.pop("workers", None)
    agent = AgentConfig(**{"name": "qwen", "model": str(model), "learning_rate": 1e-3, "max_grad_norm": 1e9, **options})
    policy = load_policies([agent], seed=0)["qwen"]
    return Learner(
        policy, agent, algorithm, temperature=0.9, pad_token_id=0, steps=10, minibatch_rows=minibatch_rows,
        minibatch_order=order, seed=4, dump_directory=tmp_path / "dumps", workers=workers,
    )  # fmt: skip


def sampled_rows(learner: Learner, *, own: int = 6, foreign: int = 6) -> list[TrainingSample]:
    """Rows with true log-probabilities of the policy; foreign ones pretend to come from an author a little surer."""
    sampler = TransformersSampler(learner.policy, stop_token_ids=range(0, 300, 7), pad_token_id=0, batch_rows=64)
    prompts = [(5, 6, 7), (9, 10, 11, 12, 13)]
    groups = sampler.sample(
        prompts, places=range(2), answers=(own + foreign) // 2, temperature=0.9, top_p=1.0, max_new_tokens=9, seed=2
    )
    rows = []
    for prompt, group in ((prompts[index], group) for index, group in sorted(groups)):
        for answer in group:
            position = len(rows)
            is_own = position < own
            mean = sum(answer.logprobs) / len(answer.logprobs)
            rows.append(
                TrainingSample(
                    task_id=f"t{len(prompt)}", author="qwen" if is_own else "peer", index=position, own=is_own,
                    prompt_ids=prompt, completion_ids=answer.token_ids,
                    author_mean_logprob=mean if is_own else mean + 0.05 * (position - 7),
                    author_logprobs=answer.logprobs if is_own else None,
                    advantage=[1.0, -0.5, 0.8, -1.2, 0.3][position % 5], ratio=1.0 if is_own else 1.3,
                )
            )  # fmt: skip
    return rows


class GradientTrap(torch.optim.SGD):
    """Keeps every gradient that a step would have used, and moves nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:
        del closure
        self.seen.append([p.grad.clone() for g in self.param_groups for p in g["params"] if p.grad is not None])


def gradients(learner: Learner, rows: list[TrainingSample]) -> list[list[torch.Tensor]]:
    trap = GradientTrap(learner.parameters)
    learner.optimizer = trap
    learner.update(rows, step=1)
    return trap.seen


def assert_same(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("max_tokens", [1, 20, 37, 10_000])
def test_micro_batches_do_not_change_the_gradient(model: Path, tmp_path: Path, max_tokens: int) -> None:
    rows = sampled_rows(build(model, tmp_path))
    whole = gradients(build(model, tmp_path), rows)
    assert max(float(g.abs().max()) for g in whole[0]) > 1e-4
    assert_same(whole, gradients(build(model, tmp_path, micro_batch_tokens=max_tokens), rows))


def test_gradient_checkpointing_does_not_change_the_gradient(model: Path, tmp_path: Path) -> None:
    rows = sampled_rows(build(model, tmp_path))
    assert_same(
        gradients(build(model, tmp_path), rows), gradients(build(model, tmp_path, gradient_checkpointing=True), rows)
    )


def test_rows_of_zero_advantage_are_not_computed_but_count_in_the_normaliser(model: Path, tmp_path: Path) -> None:
    rows = sampled_rows(build(model, tmp_path))
    idle = [dataclasses.replace(row, advantage=0.0, index=row.index + 100) for row in rows]
    learner = build(model, tmp_path)
    computed = 0
    forward = learner.policy.token_logprobs

    def counting(input_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal computed
        computed += input_ids.shape[0]
        return forward(input_ids, *arguments, **options)

    learner.policy.token_logprobs = counting  # type: ignore[method-assign]
    diluted = gradients(learner, rows + idle)
    alone = gradients(build(model, tmp_path), rows)
    assert computed == len(rows)
    assert_same([[2 * g for g in update] for update in diluted], alone)


def test_own_rows_come_first_and_the_band_narrows_with_each_update(model: Path, tmp_path: Path) -> None:
    learner = build(model, tmp_path, minibatch_rows=3)
    seen: list[tuple[set[bool], int]] = []
    loss = HACPO.loss

    class Watching:
        shares = True

        def loss(self, batch: Any, *, update_index: int, normaliser: float) -> Any:
            seen.append((set(batch.own_B.tolist()), update_index))
            assert normaliser == 3
            return loss(batch, update_index=update_index, normaliser=normaliser)

    learner.algorithm = Watching()  # type: ignore[assignment]
    learner.update(sampled_rows(learner), step=1)
    assert seen == [({True}, 0), ({True}, 1), ({False}, 2), ({False}, 3)]


def test_mixed_order_puts_own_and_foreign_rows_together(model: Path, tmp_path: Path) -> None:
    learner = build(model, tmp_path, minibatch_rows=4, minibatch_order="mixed")
    rows = sampled_rows(learner)
    batches = learner._minibatches(rows, step=1)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert any(len({row.own for row in batch}) == 2 for batch in batches)
    assert batches == learner._minibatches(rows, step=1)
    assert batches != learner._minibatches(rows, step=2)


def test_on_the_first_update_the_own_ratio_is_one(model: Path, tmp_path: Path) -> None:
    """The sampler's log-probabilities, through cache and left padding, are the learner's up to float32 rounding."""
    learner = build(model, tmp_path)
    update = learner.update(sampled_rows(learner), step=1)
    assert update.metrics.values()["own_ratio_error"] < 2e-6


def test_later_minibatches_see_what_the_first_one_changed_under_autocast_too(model: Path, tmp_path: Path) -> None:
    """Autocast keeps bfloat16 copies of weights: left there, all updates of a step would start from the same ones."""
    learner = build(model, tmp_path, minibatch_rows=6, dtype="bfloat16", lora={"rank": 4}, learning_rate=0.1)
    rows = sampled_rows(learner, own=12, foreign=0)
    first = {(row.task_id, row.author, row.index) for row in learner._minibatches(rows, step=1)[0]}
    ratios = learner.update(rows, step=1).ratios
    assert all(abs(ratio - 1) < 0.02 for key, ratio in ratios.items() if key in first)
    assert max(abs(ratio - 1) for key, ratio in ratios.items() if key not in first) > 0.1


def test_recomputed_old_logprobs_remove_the_samplers_rounding(model: Path, tmp_path: Path) -> None:
    rows = sampled_rows(build(model, tmp_path))
    wrong = [dataclasses.replace(row, author_mean_logprob=row.author_mean_logprob + 0.01) for row in rows if row.own]
    kept = build(model, tmp_path).update(wrong, step=1).metrics.values()["own_ratio_error"]
    fixed = build(model, tmp_path, old_logprobs="learner").update(wrong, step=1).metrics.values()["own_ratio_error"]
    assert kept > 5e-3
    assert fixed < 1e-6


def test_a_samplers_gap_weighs_own_rows_up_to_the_cap(model: Path, tmp_path: Path) -> None:
    """A sampler that found each token 1.5 times less likely than the learner does: the gradient grows by 1.5."""
    rows = [
        dataclasses.replace(row, author_logprobs=tuple(value - math.log(1.5) for value in row.author_logprobs))
        for row in sampled_rows(build(model, tmp_path), own=6, foreign=0)
        if row.author_logprobs is not None
    ]

    def metrics(**options: Any) -> dict[str, float]:
        return build(model, tmp_path, **options).update(rows, step=1).metrics.values()

    plain = metrics(old_logprobs="learner")
    for cap, weight, capped in ((10.0, 1.5, 0.0), (1.2, 1.2, 1.0)):
        weighed = metrics(sampler_correction=cap)
        assert weighed["grad_norm"] == pytest.approx(weight * plain["grad_norm"], rel=1e-4)
        assert weighed["sampler/weight_mean"] == pytest.approx(weight, rel=1e-5)
        assert weighed["sampler/capped_share"] == capped
        assert weighed["own_ratio_error"] < 1e-6


def test_a_step_without_any_gradient_moves_nothing(model: Path, tmp_path: Path) -> None:
    learner = build(model, tmp_path)
    rows = sampled_rows(learner)
    learner.update(rows, step=1)  # so that Adam has momentum that would move the weights
    before = {name: weight.clone() for name, weight in trained_weights(learner.policy).items()}
    update = learner.update([dataclasses.replace(row, advantage=0.0) for row in rows], step=2)
    for name, weight in trained_weights(learner.policy).items():
        assert torch.equal(weight, before[name])
    assert update.metrics.values()["updates_skipped"] == 2
    assert update.metrics.values()["updates"] == 0


def test_better_answers_become_more_likely(model: Path, tmp_path: Path) -> None:
    learner = build(model, tmp_path, algorithm=GSPO, learning_rate=1e-3)
    rows = sampled_rows(learner, own=12, foreign=0)
    rows = [dataclasses.replace(row, advantage=1.0 if row.index % 2 else -1.0) for row in rows]
    ratios = learner.update(rows, step=1).ratios
    again = learner.update(rows, step=2).ratios
    assert all(abs(ratio - 1) < 1e-5 for ratio in ratios.values())
    good = [
        again["t3" if row.prompt_ids == (5, 6, 7) else "t5", "qwen", row.index] for row in rows if row.advantage > 0
    ]
    bad = [again["t3" if row.prompt_ids == (5, 6, 7) else "t5", "qwen", row.index] for row in rows if row.advantage < 0]
    assert sum(good) / len(good) > 1 > sum(bad) / len(bad)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_kl_pulls_back_to_the_starting_weights(model: Path, tmp_path: Path, lora: Any) -> None:
    learner = build(model, tmp_path, kl_coefficient=0.5, lora=lora, learning_rate=1e-2)
    rows = sampled_rows(learner)
    assert learner.update(rows, step=1).metrics.values()["kl"] == pytest.approx(0, abs=1e-9)
    away = learner.update(rows, step=2).metrics.values()["kl"]
    assert away > 1e-4
    idle = [dataclasses.replace(row, advantage=0.0) for row in rows if row.own]
    for step in range(3, 25):
        last = learner.update(idle, step=step).metrics.values()["kl"]
    assert last < 0.5 * away


def test_kl_counts_own_rows_only(model: Path, tmp_path: Path) -> None:
    learner = build(model, tmp_path, kl_coefficient=0.5)
    rows = [dataclasses.replace(row, advantage=0.0) for row in sampled_rows(learner)]
    values = learner.update(rows, step=1).metrics.values()
    assert values["rows_zero_advantage"] == sum(not row.own for row in rows)


def test_a_nan_stops_the_step_and_dumps_the_batch(model: Path, tmp_path: Path) -> None:
    learner = build(model, tmp_path)
    rows = sampled_rows(learner)
    before = {name: weight.clone() for name, weight in trained_weights(learner.policy).items()}
    rows[0] = dataclasses.replace(rows[0], author_mean_logprob=math.nan)
    with pytest.raises(NonFiniteError, match="agent qwen, step 7: loss is nan") as caught:
        learner.update(rows, step=7)
    (dump,) = (tmp_path / "dumps").iterdir()
    assert str(dump) in str(caught.value)
    assert any(math.isnan(row["author_mean_logprob"]) for row in json.loads(dump.read_text()))
    for name, weight in trained_weights(learner.policy).items():
        assert torch.equal(weight, before[name])


def test_the_gradient_is_scaled_down_to_its_limit(model: Path, tmp_path: Path) -> None:
    learner = build(model, tmp_path, max_grad_norm=1e-3)
    trapped = gradients(learner, sampled_rows(learner))
    for update in trapped:
        assert math.sqrt(sum(float((g**2).sum()) for g in update)) == pytest.approx(1e-3, rel=1e-3)


def test_a_restored_learner_continues_bit_for_bit(model: Path, tmp_path: Path) -> None:
    schedule = {"name": "cosine", "warmup_steps": 2}
    first = build(model, tmp_path, schedule=schedule)
    rows = sampled_rows(first)
    first.update(rows, step=1)
    weights = {name: weight.clone() for name, weight in trained_weights(first.policy).items()}
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = build(model, tmp_path, schedule=schedule)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for name, parameter in second.policy.trained_parameters().items():
        parameter.data.copy_(weights[name])
    outcomes = [learner.update(rows, step=2).metrics.values() for learner in (first, second)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["learning_rate"] == pytest.approx(1e-3)
    for name, weight in trained_weights(first.policy).items():
        assert torch.equal(weight, trained_weights(second.policy)[name])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"name": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        ({"name": "linear"}, [1.0, 0.9, 0.8, 0.7]),
        ({"name": "linear", "warmup_steps": 2}, [0.5, 1.0, 0.875, 0.75]),
        ({"name": "cosine", "warmup_steps": 2}, [0.5, 1.0, 0.9619, 0.8536]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    model: Path, tmp_path: Path, schedule: dict[str, Any], expected: list[float]
) -> None:
    learner = build(model, tmp_path, schedule=schedule)
    rows = sampled_rows(learner, own=2, foreign=0)
    rates = [learner.update(rows, step=step).metrics.values()["learning_rate"] for step in range(1, 5)]
    assert rates == pytest.approx([1e-3 * share for share in expected], rel=1e-3)


def with_still_rows(rows: list[TrainingSample]) -> list[TrainingSample]:
    """Most foreign rows far below the band."""
    return [row if row.own or row.index % 5 == 0 else dataclasses.replace(row, author_mean_logprob=9.0) for row in rows]


def watched(learner: Learner) -> list[tuple[int, bool]]:
    """Rows of every call that computes log-probabilities, and whether they are for a gradient."""
    calls: list[tuple[int, bool]] = []
    compute = learner.policy.token_logprobs

    def watching(ids: torch.Tensor, *others: torch.Tensor, temperature: float) -> Any:
        calls.append((len(ids), torch.is_grad_enabled()))
        return compute(ids, *others, temperature=temperature)

    learner.policy.token_logprobs = watching  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("order", ["own_first", "mixed"])
def test_foreign_rows_outside_the_band_are_left_out_without_changing_anything(
    model: Path, tmp_path: Path, order: str, kl_coefficient: float
) -> None:
    options = {"minibatch_order": order, "kl_coefficient": kl_coefficient}
    rows = with_still_rows(sampled_rows(build(model, tmp_path), own=6, foreign=14))
    outside = sum(not row.own and row.author_mean_logprob == 9.0 for row in rows)
    plain, asking = build(model, tmp_path, **options), build(model, tmp_path, **options)
    asking.still_share["foreign"] = 0.9
    assert_same(gradients(plain, rows), gradients(asking, rows))
    plain, asking = build(model, tmp_path, **options), build(model, tmp_path, **options)
    asking.still_share["foreign"] = 0.9
    calls = watched(asking)
    without, with_ = plain.update(rows, step=1), asking.update(rows, step=1)
    assert (14, False) in calls
    assert max(count for count, graded in calls if graded) <= 20 - outside
    assert with_.ratios == pytest.approx(without.ratios, rel=1e-5)
    left, right = without.metrics.values(), with_.metrics.values()
    assert right.pop("rows_still") == outside
    assert right.pop("tokens_trained") < left.pop("tokens_trained")
    left.pop("padding_share"), right.pop("padding_share"), left.pop("rows_still")
    assert right == pytest.approx(left, rel=1e-4, abs=1e-6)


def test_a_minibatch_of_still_rows_alone_is_still_a_step(model: Path, tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(row, own=False, author_mean_logprob=9.0, author_logprobs=None)
        for row in sampled_rows(build(model, tmp_path))
    ]
    learner = build(model, tmp_path)
    learner.still_share["foreign"] = 1.0
    values = learner.update(rows, step=1).metrics.values()
    assert values["updates"] == 1
    assert values["rows_still"] == len(rows)
    assert values["grad_norm"] == 0


def test_rows_are_asked_first_only_where_most_were_still(model: Path, tmp_path: Path) -> None:
    rows = with_still_rows(sampled_rows(build(model, tmp_path), own=6, foreign=14))
    learner = build(model, tmp_path)
    calls = watched(learner)
    first = learner.update(rows, step=1)
    assert not [call for call in calls if not call[1]]
    assert first.metrics.values()["rows_still"] == 0
    assert learner.still_share["foreign"] > 0.5
    restored = build(model, tmp_path)
    restored.load_state_dict(learner.state_dict())
    assert restored.still_share == learner.still_share
    learner.update(rows, step=2)
    assert [call for call in calls if not call[1]]
    older = {name: value for name, value in learner.state_dict().items() if name != "still_share"}
    fresh = build(model, tmp_path)
    fresh.load_state_dict(older)
    assert fresh.still_share == {"own": 0.0, "foreign": 0.0}
    dropping = build(model, tmp_path, lora={"rank": 2, "dropout": 0.5})
    dropping.still_share["foreign"] = 1.0
    assert dropping.update(rows, step=1).metrics.values()["rows_still"] == 0
