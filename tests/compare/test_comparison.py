"""Whole comparisons of tiny models: finished runs are used as they are, broken ones go on, failures stay alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import run_config

from hacrl.compare.comparison import compare_methods, run_all, unfinished, write_results
from hacrl.compare.execute import Event
from hacrl.compare.plan import make_plan
from hacrl.errors import HacrlError, RunDirectoryError
from hacrl.stop import StopRequest

pytestmark = pytest.mark.slow


def config_for(models: Mapping[str, Path], output: Path, **changes: Any) -> dict[str, Any]:
    return run_config(models, output, steps=2, evaluation={"k": 2, "every": 1}, **changes)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below `folder` with its modification time and bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def compared(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A finished comparison of two methods over two seeds."""
    output = tmp_path_factory.mktemp("compared")
    config = config_for(tiny_models, output / "unused")
    return compare_methods(config, methods="hacpo,gspo", seeds=2, jobs=2, output=output), output


def test_files_and_figures(compared: tuple[dict[str, Any], Path]) -> None:
    found, output = compared
    assert json.loads((output / "comparison.json").read_text()) == found
    assert (output / "comparison.md").read_text().startswith("# Comparison")
    assert (output / "comparison.csv").read_text().startswith("agent,method,")
    assert set(found["runs"]) == {f"{method}/seed-{seed}" for method in ("hacpo", "gspo") for seed in (0, 1)}
    for place in found["runs"].values():
        assert steps_of(output / place) == [1, 2]
        assert len(list((output / place / "checkpoints").iterdir())) == 1
        assert not (output / place / "agents").exists()
    assert found["axis_budget"] == {"hacpo": 48, "gspo": 48}
    figures = [row for row in found["results"] if row["metric"] == "avg@2"]
    assert {(row["agent"], row["method"]) for row in figures} == {
        (agent, method) for agent in ("qwen", "llama", "mean") for method in ("hacpo", "gspo")
    }
    # The same figure as the run's own evaluations give.
    ends = [
        json.loads(line)["avg@k"]
        for seed in (0, 1)
        for line in (output / f"runs/gspo/seed-{seed}/evaluations.jsonl").read_text().splitlines()
        if json.loads(line)["step"] == 2 and json.loads(line)["agent"] == "qwen"
    ]
    (qwen,) = (row for row in figures if (row["agent"], row["method"]) == ("qwen", "gspo"))
    assert qwen["mean"] == pytest.approx(sum(ends) / 2)


def test_what_is_finished_is_used_as_it_is_and_more_is_added(
    compared: tuple[dict[str, Any], Path], tiny_models: Mapping[str, Path]
) -> None:
    _, output = compared
    before = contents(output / "runs")
    config = config_for(tiny_models, output / "unused")
    plan = make_plan(config, methods="hacpo,gspo,naive", seeds=2, output=output)
    assert [run.name for run in unfinished(plan)] == ["naive/seed-0", "naive/seed-1"]
    started = {event.run for event in run_all(plan, jobs=2)}
    assert started == {"naive/seed-0", "naive/seed-1"}
    after = contents(output / "runs")
    assert {name: after[name] for name in before} == before


def test_changed_settings_are_refused_before_anything_runs(
    compared: tuple[dict[str, Any], Path], tiny_models: Mapping[str, Path]
) -> None:
    _, output = compared
    config = config_for(tiny_models, output / "unused")
    with pytest.raises(RunDirectoryError) as caught:
        compare_methods(config, ["agents.qwen.learning_rate=5e-4"], methods="grpo,gspo", seeds=2, output=output)
    message = str(caught.value)
    assert "gspo/seed-0\n  agents.0.learning_rate: was 0.001, now 0.0005\ngspo/seed-1" in message
    assert not (output / "runs" / "grpo").exists()


def test_a_killed_comparison_goes_on_where_it_was(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(config_for(tiny_models, tmp_path / "run") | {"steps": 6}))
    command = [sys.executable, "-m", "hacrl.cli", "compare", str(config), "--methods", "gspo,naive", "--seeds", "1"]
    process = subprocess.Popen([*command, "--jobs", "1"], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    second = tmp_path / "run-compare/runs/naive/seed-0"
    wait_for(lambda: list(second.glob("checkpoints/step-*")), process)
    process.kill()
    process.wait()
    # The run under way ends with its parent, so that its folder is free.
    wait_for(lambda: not _locked(second))
    first = contents(tmp_path / "run-compare/runs/gspo")
    made = len(steps_of(second))
    assert 1 <= made < 6
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 runs were finished before" in done.stdout
    assert contents(tmp_path / "run-compare/runs/gspo") == first
    assert steps_of(second) == [1, 2, 3, 4, 5, 6]
    starts = json.loads((second / "environment.json").read_text())["starts"]
    assert [start.get("resumed_from_step", 0) > 0 for start in starts] == [False, True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_comparison_saves_the_runs_under_way(
    tiny_models: Mapping[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    config = tmp_path / "run.yaml"
    changes = {"steps": 500, "checkpoint": {"every": 1000}, "evaluation": {"k": 2}}
    config.write_text(yaml.safe_dump(config_for(tiny_models, tmp_path / "run") | changes))
    command = [sys.executable, "-m", "hacrl.cli", "compare", str(config), "--methods", "gspo", "--seeds", "2"]
    process = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    runs = [tmp_path / f"run-compare/runs/gspo/seed-{seed}" for seed in (0, 1)]
    wait_for(lambda: all((run / "metrics.jsonl").exists() for run in runs), process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "Interrupted; the same command goes on from here" in output
    for run in runs:
        (saved,) = (run / "checkpoints").iterdir()
        assert saved.name == f"step-{len(steps_of(run)):06}"


def test_a_failing_method_does_not_stop_the_others(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = config_for(tiny_models, tmp_path / "unused")
    # A prompt of this length fits no agent: told by the run, not by the configuration.
    methods = ["gspo:sampling.max_prompt_tokens=1", "naive"]
    with pytest.raises(HacrlError) as caught:
        compare_methods(config, methods=methods, seeds=1, jobs=1, output=tmp_path)
    message = str(caught.value)
    assert "1 of 2 runs failed" in message
    assert "max_prompt_tokens" in message
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert list(found["runs"]) == ["naive/seed-0"]
    log = tmp_path / "logs/gspo_sampling.max_prompt_tokens=1/seed-0.log"
    assert "max_prompt_tokens" in log.read_text()


def test_the_command_tells_failures_by_its_status(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(config_for(tiny_models, tmp_path / "run")))
    (tmp_path / "run-compare/runs/gspo/seed-0").mkdir(parents=True)
    (tmp_path / "run-compare/runs/gspo/seed-0/thesis.tex").touch()
    command = [sys.executable, "-m", "hacrl.cli", "compare", str(config), "--methods", "gspo,naive", "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 1
    assert "thesis.tex" in done.stderr
    assert "Traceback" not in done.stderr
    assert "naive/seed-0: done" in done.stdout


def test_no_run_starts_once_a_stop_is_requested(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    plan = make_plan(config_for(tiny_models, tmp_path / "unused"), methods="gspo", seeds=3, output=tmp_path)
    stop = StopRequest()
    events: list[Event] = []
    for event in run_all(plan, jobs=1, stop=stop):
        events.append(event)
        stop.request()
    assert {event.run for event in events} == {"gspo/seed-0"}
    assert events[-1].ended in ("stopped", "done")
    assert write_results(plan)["methods"] == ["gspo"]


def wait_for(condition: Any, process: subprocess.Popen[str] | None = None) -> None:
    limit = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < limit
        assert process is None or process.poll() is None, "ended before it was to be interrupted"
        time.sleep(0.05)


def _locked(folder: Path) -> bool:
    import fcntl

    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
