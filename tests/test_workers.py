"""Several workers for one agent: what they compute together is what one computes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import build, sampled_rows
from tiny_runs import run_config, tasks
from worker_group import WorkerGroup

from hacrl.agent import Agent, AgentUpdate
from hacrl.config import load_config
from hacrl.encode import Encoder
from hacrl.metrics import Metrics
from hacrl.policy import load_policies
from hacrl.trainer import build_algorithm
from hacrl.types import Rollout, RolloutGroup, TrainingSample, Verdict
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


# ---------------------------------------------------------------- agents


def build_agent(workers: Workers, models: dict[str, Path], folder: Path, **options: Any) -> Agent:
    run = run_config(models, folder)
    run["agents"][0] |= options
    config = load_config(run)
    return Agent(
        config,
        config.agents[0],
        load_policies([config.agents[0]], seed=config.seed)["qwen"],
        Encoder.from_config(config.agents[0]),
        build_algorithm(config),
        dump_directory=folder / "nonfinite",
        workers=workers,
    )


def groups_of(agent: Agent) -> list[RolloutGroup]:
    """Sampled answers of the agent itself, judged by their place in the group."""
    asked = tasks(first=0, count=3)
    by_task: dict[str, list[Rollout]] = {}
    for completion in agent.sample(asked, step=1):
        rollout = Rollout(completion=completion, verdict=Verdict(reward=float(completion.index % 2)))
        by_task.setdefault(completion.task_id, []).append(rollout)
    return [RolloutGroup(task=task, rollouts=tuple(by_task[task.id])) for task in asked]


def updated(agent: Agent, groups: list[RolloutGroup], *, step: int) -> AgentUpdate:
    advantages = {"qwen": [[1.0, -0.5, 0.8, -1.2]] * len(groups)}
    return agent.update(groups, advantages, {"qwen": 1.0}, {"qwen": agent.encoder.fingerprint}, step=step)


def go(
    workers: Workers,
    models: dict[str, Path],
    folder: Path,
    groups: list[RolloutGroup],
    *,
    steps: Sequence[int],
    load: Path | None = None,
    weights_only: bool = False,
    save: dict[int, Path] | None = None,
    export: Path | None = None,
    **options: Any,
) -> tuple[list[AgentUpdate], dict[str, Any], int]:
    agent = build_agent(workers, models, folder, **options)
    if load is not None:
        agent.load(load, weights_only=weights_only)
    updates = []
    for step in steps:
        updates.append(updated(agent, groups, step=step))
        if save is not None and step in save:
            agent.save(save[step])
    if export is not None:
        agent.export(export, card="about", as_adapter=False)
    return updates, agent.trained_weights(), agent.weights_version


LIKE_ONE = {"optimizer": {"eps": 1e-4}}


def assert_weights(left: dict[str, Any], right: dict[str, Any], *, exactly: bool) -> None:
    assert left.keys() == right.keys()
    for name in left:
        if exactly:
            assert np.array_equal(left[name], right[name]), name
        else:
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_checkpoint_is_read_by_any_number_of_workers(
    group: WorkerGroup, tiny_models: dict[str, Path], tmp_path: Path, lora: Any
) -> None:
    options = {"lora": lora, "schedule": {"name": "cosine", "warmup_steps": 2}, **LIKE_ONE}
    groups = groups_of(build_agent(Workers.alone(), tiny_models, tmp_path, **options))
    arguments = (tiny_models, tmp_path, groups)
    two, one = tmp_path / "two", tmp_path / "one"
    (updates, expected, version), other = group(2, go, *arguments, steps=[1, 2], save={1: two}, **options)
    assert (other[0][-1].metrics, other[1]) == ({}, {})
    alone = go(Workers.alone(), *arguments, steps=[1, 2], save={1: one}, **options)
    assert version == alone[2] == 2
    assert sorted(path.name for path in two.iterdir()) == ["agent.json", "learner.pt", "shards"]
    assert sorted(path.name for path in one.iterdir()) == ["agent.json", "learner.pt", "weights.safetensors"]
    moved = max(float(np.abs(alone[1][name] - value).max()) for name, value in go(
        Workers.alone(), *arguments, steps=[], load=one, **options)[1].items())  # fmt: skip
    assert moved > 1e-4  # so that a next step which starts anew would be seen
    for source in (one, two):
        for size in (1, 2, 3):
            result = (
                go(Workers.alone(), *arguments, steps=[2], load=source, **options)
                if size == 1
                else group(size, go, *arguments, steps=[2], load=source, **options)[0]
            )
            assert result[2] == 2
            written_by = {one: 1, two: 2}[source]
            reference = {1: alone[1], 2: expected}[written_by]
            assert_weights(result[1], reference, exactly=size == written_by)
            assert result[0][0].metrics == pytest.approx(updates[1].metrics, rel=1e-3, abs=1e-5)
