"""Rollouts sampled ahead: by which weights, what they are compared with, and that a resume changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_states import assert_same_run, metric_lines, rollout_lines
from tiny_runs import run_config

from hacrl.config import load_config
from hacrl.execution.local import LocalFleet
from hacrl.preflight import prepare
from hacrl.trainer import build_algorithm, build_fleet, train, training_steps, without_stale
from hacrl.types import Completion, Rollout, RolloutGroup, Task, Verdict, completion_from_json


def versions_by_step(run: Path) -> list[set[int]]:
    steps: dict[int, set[int]] = {}
    for row in rollout_lines(run):
        steps.setdefault(row["step"], set()).add(row["weights_version"])
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2])],
)
def test_a_step_is_sampled_with_the_weights_that_the_bound_gives(
    tiny_models: dict[str, Path], tmp_path: Path, staleness: int, expected: list[int]
) -> None:
    run = train(run_config(tiny_models, tmp_path / "run", steps=5, max_staleness=staleness))
    assert versions_by_step(run) == [{version} for version in expected]
    lines = metric_lines(run)
    if staleness == 0:
        assert "agent/qwen/staleness" not in lines[0]
        return
    assert [line["agent/qwen/staleness"] for line in lines] == [step - version for step, version in enumerate(expected)]
    assert all(line["agent/llama/rollouts_stale"] == 0 for line in lines)


def test_own_rows_are_compared_with_the_weights_that_sampled_them(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """In a synchronous step the ratio of the first update is 1. Here weights have moved on since, from step 2 on."""
    errors = {}
    for staleness in (0, 1):
        run = train(run_config(tiny_models, tmp_path / str(staleness), steps=3, max_staleness=staleness))
        errors[staleness] = [line["agent/qwen/own_ratio_error"] for line in metric_lines(run)]
    assert max(errors[0]) < 1e-5
    assert errors[1][0] < 1e-5
    assert min(errors[1][1:]) > 1e-3


def test_the_samplers_log_probabilities_are_kept_whatever_the_arithmetic(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Recomputing them is right in a synchronous step of bfloat16; here it would be done by other weights."""
    recomputes = []
    for staleness in (0, 1):
        config = run_config(tiny_models, tmp_path / "run", max_staleness=staleness)
        for agent in config["agents"]:
            agent["dtype"] = "bfloat16"
        loaded = load_config(config)
        fleet = build_fleet(loaded, prepare(loaded), build_algorithm(loaded), tmp_path / "run")
        assert isinstance(fleet, LocalFleet)
        recomputes.append([agent.learner.recomputes_old_logprobs for agent in fleet.agents if agent.learner])
    assert recomputes == [[True, True], [False, False]]


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_that_is_left_goes_on_as_if_it_had_not_been(
    tiny_models: dict[str, Path], tmp_path: Path, staleness: int
) -> None:
    changes = {"steps": 5, "max_staleness": staleness, "checkpoint": {"every": 2}}
    whole = train(run_config(tiny_models, tmp_path / "whole", **changes))
    left = tmp_path / "left"
    for _ in range(2):
        steps = training_steps(run_config(tiny_models, left, **changes))
        for record in steps:
            if record.step == 3:
                break
        steps.close()
    files = sorted((left / "checkpoints/step-000002/ahead").iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.jsonl" for step in range(3, 3 + staleness)]
    ahead = [completion_from_json(json.loads(line)) for line in files[0].read_text().splitlines()]
    assert len(ahead) == 24
    assert {completion.weights_version for completion in ahead} == {max(0, 2 - staleness)}
    train(run_config(tiny_models, left, **changes))
    assert_same_run(whole, left)


def test_rollouts_beyond_the_bound_are_dropped_and_counted(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalFleet.weights_versions.fget
    assert real is not None
    # As if llama had made two more updates since.
    monkeypatch.setattr(
        LocalFleet,
        "weights_versions",
        property(lambda fleet: {name: version + 2 * (name == "llama") for name, version in real(fleet).items()}),
    )
    run = train(run_config(tiny_models, tmp_path / "run", steps=2, max_staleness=1))
    assert [line["agent/llama/rollouts_stale"] for line in metric_lines(run)] == [12, 12]
    assert [line["rollouts"] for line in metric_lines(run)] == [12, 12]
    assert {row["author"] for row in rollout_lines(run)} == {"qwen"}


def test_only_rollouts_within_the_bound_are_fresh() -> None:
    def rollout(author: str, version: int) -> Rollout:
        completion = Completion(
            task_id="t",
            author=author,
            index=0,
            text="",
            token_ids=(),
            logprobs=(),
            finish_reason="stop",
            weights_version=version,
        )
        return Rollout(completion=completion, verdict=Verdict(reward=1.0))

    group = RolloutGroup(
        task=Task(id="t", prompt="?"),
        # The last one is from weights that its author has gone back from.
        rollouts=(rollout("a", 3), rollout("a", 4), rollout("a", 5), rollout("b", 1), rollout("b", 2)),
    )
    (fresh,), stale, ages = without_stale([group], {"a": 5, "b": 1, "c": 0}, most=1)
    assert fresh.rollouts == group.rollouts[1:4]
    assert stale == {"a": 1, "b": 1, "c": 0}
    assert ages == {"a": 0.5, "b": 0.0}
