"""What two runs must have in common to be the same run: metrics, rollouts, and the state that they end in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def differs_by_nature(name: str) -> bool:
    """Whether a metric is a clock time, memory, the run's id, or the number of restarts."""
    return name.startswith(("time", "memory/")) or "/time/" in name or name in ("run_id", "execution/restarts")


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """The metrics without what differs between two runs: clock times, memory and the run's id."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not differs_by_nature(name)} for line in lines]


def rollout_lines(run: Path) -> list[dict[str, Any]]:
    lines = []
    for file in sorted((run / "rollouts").iterdir()):
        for text in file.read_text().splitlines():
            row = json.loads(text)
            del row["run_id"]
            lines.append(row)
    return lines


def final_state(run: Path) -> dict[str, Any]:
    """Everything of the last checkpoint that a person could compare: weights, optimizers, capability window."""
    last = sorted((run / "checkpoints").iterdir())[-1]
    state: dict[str, Any] = {"step": last.name, "loop": json.loads((last / "state.json").read_text())}
    for agent in sorted((last / "agents").iterdir()):
        state[agent.name] = {"version": json.loads((agent / "agent.json").read_text())}
        if (agent / "weights.safetensors").exists():
            state[agent.name]["weights"] = load_file(agent / "weights.safetensors")
            state[agent.name]["learner"] = torch.load(agent / "learner.pt", weights_only=True)
    return state


def assert_identical(left: Any, right: Any, place: str = "") -> None:
    assert type(left) is type(right), place
    if isinstance(left, dict):
        assert left.keys() == right.keys(), place
        for key in left:
            assert_identical(left[key], right[key], f"{place}/{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), place
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_identical(*pair, f"{place}/{index}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), place
    else:
        assert left == right, place


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("run_id", "time")} for line in lines]


def assert_same_run(left: Path, right: Path) -> None:
    assert metric_lines(left) == metric_lines(right)
    assert rollout_lines(left) == rollout_lines(right)
    assert evaluations(left) == evaluations(right)
    assert_identical(final_state(left), final_state(right))
