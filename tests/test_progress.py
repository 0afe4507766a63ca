"""What is shown of a run: the live view, the plain lines and the tables, from step records alone."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hacrl.config import RunConfig, load_config
from hacrl.progress import (
    LiveView,
    Progress,
    RunHistory,
    closing_table,
    evaluation_table,
    plain_line,
    sparkline,
)
from hacrl.stop import StopRequest
from hacrl.types import StepRecord


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(
        {
            "agents": [{"name": "qwen", "model": "a"}, {"name": "a-rather-long-agent-name", "model": "b"}],
            "tasks": {"train": {"dataset": "t.jsonl"}, "eval": {"dataset": "e.jsonl"}},
            "reward": "exact",
            "steps": 40,
            "prompts_per_step": 4,
            "output": str(tmp_path / "run[bold]"),
        }
    )


def entry(step: int, agent: str, score: float | None, split: str = "eval") -> dict[str, Any]:
    return {
        "step": step,
        "split": split,
        "agent": agent,
        "k": 4,
        "tasks": 20,
        "avg@k": score,
        "avg@k_stderr": 0.05 if score is not None else None,
        "best@k": 0.9,
        "maj@k": None,
        "truncated_rate": 0.1,
        "parse_failure_rate": None,
        "unscored": 0,
        "mean_tokens": 31.2,
    }


def record(step: int, *, evaluation: tuple[Mapping[str, Any], ...] = (), **metrics: float) -> StepRecord:
    values = {
        "agent/qwen/reward/mean": 0.25 + step / 100,
        "agent/qwen/completion_tokens_mean": 120.4,
        "agent/qwen/truncated_rate": 0.02,
        "agent/qwen/entropy": 1.25,
        "pair/qwen/a-rather-long-agent-name/rows": 30.0,
        "pair/qwen/a-rather-long-agent-name/dropped/too_long": 2.0,
        "pair/qwen/a-rather-long-agent-name/s_mean": 0.84,
        "pair/qwen/a-rather-long-agent-name/inside_share": 0.61,
        "pair/qwen/a-rather-long-agent-name/omega": 0.92,
        "time/sample": 4.0,
        "time/update": 2.0,
        "time/total": 10.0,
        "time/tokens_sampled_per_s": 812.0,
        **metrics,
    }
    return StepRecord(step=step, steps=40, metrics=values, rollouts=(), evaluation=evaluation)


def drawn(renderable: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return str(text)


def test_steps_that_are_made_again_take_the_place_of_the_old_ones(config: RunConfig) -> None:
    history = RunHistory(config)
    for step in (1, 2, 3, 2):
        history.add(record(step, evaluation=(entry(step, "qwen", step / 10),), again=float(step)))
    assert [step for step, _ in history.metrics] == [1, 2]
    assert history.held_out("qwen") == [(1, 0.1), (2, 0.2)]
    assert history.done == 2


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_view_fits_its_width_and_shows_what_matters(config: RunConfig, width: int) -> None:
    history = RunHistory(config)
    history.evaluations = [entry(0, "qwen", 0.25)]
    view = LiveView(history)
    view.begin("sample")
    assert "step 0/40" in drawn(view, width)
    history.add(record(1))
    history.add(record(2, evaluation=(entry(2, "qwen", 0.5),)))
    text = drawn(view, width)
    for shown in ("step 2/40", "0.270", "0.250 → 0.500", "sampling step 3", "0.840", "61%", "0.92", "ETA 6:20"):
        assert shown in text
    assert ("entropy" in text) == (width >= 100)


def test_live_view_says_that_it_is_stopping(config: RunConfig) -> None:
    stop = StopRequest()
    view = LiveView(RunHistory(config), stop)
    view.begin("update")
    assert "Stopping" not in drawn(view, 80)
    stop.request()
    assert "Stopping" in drawn(view, 80)


def test_many_pairs_are_cut_short(config: RunConfig) -> None:
    agents = [{"name": f"agent{number}", "model": "m"} for number in range(6)]
    many = load_config({**config.model_dump(), "agents": agents, "tasks": {"train": {"dataset": "t.jsonl"}}})
    history = RunHistory(many)
    history.add(record(1))
    assert "and 18 more pairs" in drawn(LiveView(history), 80)


def test_plain_line_is_one_line_with_scores_pairs_and_time(config: RunConfig) -> None:
    history = RunHistory(config)
    history.add(record(1, evaluation=(entry(1, "qwen", 0.5),)))
    line = plain_line(history)
    assert "\n" not in line
    assert line.startswith("step 1/40  qwen 0.260 (held-out 0.500)  a-rather-long-agent-name -")
    assert "qwen<-a-rather-long-agent-name s 0.840 in 61%" in line
    assert line.endswith("10.0 s  812 tokens/s  ETA 6:30")


def test_answers_without_a_score_are_told(config: RunConfig) -> None:
    history = RunHistory(config)
    history.add(record(1))
    assert "without a score" not in drawn(LiveView(history), 80)
    history.add(record(2, **{"agent/qwen/reward/unscored": 3.0}))
    assert "qwen 0.270 (3 unscored)" in plain_line(history)
    assert "answers without a score: qwen 3" in drawn(LiveView(history), 80)


@pytest.mark.parametrize(("mode", "lines"), [("plain", 3), ("quiet", 0)])
def test_modes(config: RunConfig, mode: Any, lines: int) -> None:
    console = Console(file=io.StringIO(), width=80)
    with Progress(console, RunHistory(config), mode=mode) as progress:
        progress.phase("load")
        progress.phase("sample")
        progress.step(record(1))
        progress.phase("sample")
        progress.step(record(2))
    assert len(console.file.getvalue().splitlines()) == lines  # type: ignore[attr-defined]


def test_resumed_run_knows_what_was_before(config: RunConfig) -> None:
    folder = Path(config.output)
    folder.mkdir()
    (folder / "evaluations.jsonl").write_text(json.dumps(entry(0, "qwen", 0.25)) + "\n")
    lines = [json.dumps({"step": step, **record(step).metrics}) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "half']))
    console = Console(file=io.StringIO(), width=80)
    history = RunHistory(config)
    with Progress(console, history, mode="plain") as progress:
        progress.phase("sample")
        assert history.done == 2
        assert history.seconds_left() is None
        progress.step(record(3, evaluation=(entry(3, "qwen", 0.75),)))
    assert history.series("agent/qwen/reward/mean") == [0.26, 0.27, 0.28]
    assert history.held_out("qwen") == [(0, 0.25), (3, 0.75)]
    assert "resumed after step 2 of 40" in console.file.getvalue()  # type: ignore[attr-defined]
    assert history.seconds_left() == 370.0


def test_closing_table_compares_start_and_end(config: RunConfig) -> None:
    history = RunHistory(config)
    history.evaluations = [entry(0, "qwen", 0.25), entry(2, "qwen", 0.3), entry(40, "qwen", 0.5)]
    text = drawn(closing_table(history), 80)
    assert "0.250 ± 0.098" in text
    assert "0.500 ± 0.098" in text
    assert "+0.250" in text


def test_closing_table_without_evaluation_shows_training_rewards(config: RunConfig) -> None:
    history = RunHistory(config)
    history.add(record(1))
    history.add(record(2))
    text = drawn(closing_table(history), 80)
    assert "0.260" in text
    assert "0.270" in text


def test_evaluation_table_shows_sources_and_unscored_only_where_there_are_any() -> None:
    one = [entry(0, "qwen", 0.25), entry(0, "llama", None)]
    text = drawn(evaluation_table(one), 80)
    assert "0.250 ± 0.098" in text
    assert "unscored" not in text
    assert "source" not in text
    text = drawn(evaluation_table([*one, {**one[0], "split": "other", "unscored": 3}]), 120)
    assert "unscored" in text
    assert "other" in text


def test_held_out_is_the_mean_over_splits(config: RunConfig) -> None:
    history = RunHistory(config)
    history.evaluations = [entry(0, "qwen", 0.25), entry(0, "qwen", 0.75, split="hard"), entry(0, "qwen", None, "none")]
    assert history.held_out("qwen") == [(0, 0.5)]


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [([], 5, ""), ([1.0], 5, "▁"), ([2.0, 2.0], 5, "▁▁"), ([0.0, 1.0], 5, "▁█"), ([0, 0, 7, 7, 14, 14], 3, "▁▅█")],
)
def test_sparkline(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars
