"""Several workers for one agent: what they compute together is what one computes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import build, sampled_rows
from worker_group import WorkerGroup

from hacrl.metrics import Metrics
from hacrl.types import TrainingSample
from hacrl.workers import Workers, whole


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    processes = WorkerGroup(3)
    yield processes
    processes.close()


@pytest.fixture
def model(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["qwen"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What rank 0 knows after some steps."""

    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    ratios: list[dict[Any, float]]


def train(
    workers: Workers, model: Path, folder: Path, rows: list[TrainingSample], *, steps: int = 1, **options: Any
) -> Outcome:
    learner = build(model, folder, workers=workers, **options)
    gradients: list[dict[str, torch.Tensor]] = []

    def keep(*_: Any) -> None:
        gradients.append({
            name: whole(parameter.grad).clone()
            for name, parameter in learner.policy.trained_parameters().items()
            if parameter.grad is not None
        })  # fmt: skip

    learner.optimizer.register_step_pre_hook(keep)
    told = []
    for step in range(1, steps + 1):
        update = learner.update(rows, step=step)
        parts = workers.gather((update.metrics, update.ratios))
        metrics = Metrics()
        for part, _ in parts:
            metrics.merge(part)
        told.append((metrics.values(), {key: value for _, ratios in parts for key, value in ratios.items()}))
    weights = {name: whole(value.detach()).clone() for name, value in learner.policy.trained_parameters().items()}
    return Outcome(
        gradients=gradients, weights=weights, metrics=[m for m, _ in told], ratios=[ratios for _, ratios in told]
    )


def assert_close(several: Outcome, one: Outcome) -> None:
    assert len(several.gradients) == len(one.gradients) > 0
    for left, right in zip(several.gradients, one.gradients, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name in one.weights:
        torch.testing.assert_close(several.weights[name], one.weights[name], rtol=1e-4, atol=2e-5)
    for left_ratios, right_ratios in zip(several.ratios, one.ratios, strict=True):
        assert left_ratios == pytest.approx(right_ratios, rel=1e-4)
    for left_metrics, right_metrics in zip(several.metrics, one.metrics, strict=True):
        left_metrics.pop("padding_share"), right_metrics.pop("padding_share")
        assert left_metrics == pytest.approx(right_metrics, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"minibatch_rows": 5, "micro_batch_tokens": 20, "steps": 3},
        {"minibatch_rows": 5, "old_logprobs": "learner", "gradient_checkpointing": True},
        {"kl_coefficient": 0.5, "steps": 2, "learning_rate": 1e-2},
        {"kl_coefficient": 0.5, "steps": 2, "learning_rate": 1e-2, "lora": {"rank": 2}},
    ],
)
def test_several_workers_do_what_one_does(
    group: WorkerGroup, model: Path, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    rows = sampled_rows(build(model, tmp_path))
    one = train(Workers.alone(), model, tmp_path, rows, **options)
    several = group(size, train, model, tmp_path, rows, **options)
    assert_close(several[0], one)
