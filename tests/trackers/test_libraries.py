"""The real libraries, read back from disk: the same names and numbers as in the run directory, each step once, whatever
happened in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import stored
import yaml
from tiny_runs import run_config

import hacrl

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
pytest.importorskip("trackio")

TRACKERS: list[Any] = [
    "tensorboard",
    {"name": "wandb", "mode": "offline", "project": "trials", "run_name": "first"},
    {"name": "trackio", "project": "trials", "run_name": "first"},
]


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_id(run: Path) -> str:
    return str(json.loads((run / "environment.json").read_text())["run_id"])


def read_back(run: Path) -> dict[str, stored.Steps]:
    return {
        "tensorboard": stored.tensorboard(run),
        "wandb": stored.wandb(run),
        "trackio": stored.trackio("trials", run_id(run)),
    }


def expected(run: Path) -> dict[int, dict[str, float]]:
    """What the run directory has, by step."""
    steps: dict[int, dict[str, float]] = {}
    for line in lines(run, "metrics.jsonl"):
        steps[line["step"]] = {k: v for k, v in line.items() if k not in ("run_id", "step", "time") and v is not None}
    for entry in lines(run, "evaluations.jsonl"):
        start = f"evaluation/{entry['split']}/{entry['agent']}"
        steps.setdefault(entry["step"], {}).update(
            {f"{start}/{name}": entry[name] for name in ("avg@k", "best@k", "k", "tasks", "mean_tokens")}
        )
    return steps


def assert_same(run: Path) -> None:
    """Each recorded step is there once, in order, with the figures of the run directory."""
    wanted = expected(run)
    for tracker, found in read_back(run).items():
        assert [step for step, _ in found] == sorted(wanted), tracker
        for step, figures in found:
            assert not wanted[step].keys() - figures.keys(), tracker
            for name, value in wanted[step].items():
                assert figures[name] == pytest.approx(value, rel=1e-6, abs=1e-9), (tracker, step, name)


def test_a_resumed_run_has_each_step_once(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = run_config(tiny_models, run, steps=4, checkpoint={"every": 2}, export="none", trackers=TRACKERS)
    config["evaluation"] = {"k": 1, "at_start": True}
    for record in hacrl.training_steps(config):
        if record.step == 3:
            break
    assert_same(run)
    first = read_back(run)["tensorboard"]
    assert [step for step, _ in first] == [0, 1, 2, 3]
    assert "evaluation/eval/qwen/avg@k" in first[0][1]
    assert "agent/llama/reward/mean" in first[1][1]
    assert first[1][1]["trackers/wandb/failures"] == 0
    # Step 3 is with the trackers, but the last checkpoint is of step 2.
    assert [record.step for record in hacrl.training_steps(config)] == [3, 4]
    assert_same(run)
    # Once more: nothing is left to do, and nothing is added.
    assert list(hacrl.training_steps(config)) == []
    assert_same(run)


def test_a_tracker_added_later_gets_every_step(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "gsm8k-hacpo"
    config = run_config(tiny_models, run, steps=2, export="none")
    config["evaluation"] = {"k": 1, "at_start": True}
    hacrl.train(config)
    hacrl.train(config, ["trackers=[tensorboard,{name: wandb, mode: offline},{name: trackio, project: trials}]"])
    assert_same(run)

    # Configuration and names.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert b"group_size: 4" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]

    start = next(record.run for record in stored.wandb_records(run) if record.HasField("run"))
    assert (start.run_id, start.project, start.display_name) == (run_id(run), "hacrl", "gsm8k-hacpo")
    assert {item.key: item.value_json for item in start.config.update}["group_size"] == "4"

    import trackio

    mine = next(item for item in trackio.Api().runs("trials") if item.name == f"gsm8k-hacpo-{run_id(run)}")
    assert mine.config is not None
    assert mine.config["group_size"] == 4


def test_synced_folders_and_other_runs_are_left_alone(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = run_config(tiny_models, run, steps=1, export="none", trackers=TRACKERS)
    hacrl.train(config)
    (synced,) = run.glob("wandb/offline-run-*")
    (synced / f"run-{run_id(run)}.wandb.synced").touch()
    other = run / "wandb" / "offline-run-20260101_000000-other"
    other.mkdir()
    other_run = tmp_path / "other" / "run"
    hacrl.train({**config, "output": str(other_run)})
    hacrl.train(config, ["steps=2"])
    assert synced.exists()
    assert other.exists()
    # The same name in the same project, and still two runs.
    assert [step for step, _ in stored.trackio("trials", run_id(other_run))] == [1]
    assert [step for step, _ in stored.trackio("trials", run_id(run))] == [1, 2]


@pytest.mark.slow
def test_a_killed_run_has_each_step_once(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = run_config(tiny_models, run, steps=5, checkpoint={"every": 2}, export="none", trackers=TRACKERS)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "hacrl.cli", "train", str(path)]
    # W&B's background process of this one would outlive the kill, and call the run's id in use.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_SERVICE")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGKILL)
            break
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, errors
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert list(expected(run)) == [1, 2, 3, 4, 5]
    assert_same(run)
