"""The demo's own parts: two configurations that differ in the method alone, runs side by side, table and charts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hacrl.config import load_config
from hacrl.demo.run import mean_curve, result_table, terminal_chart, train_side_by_side, write_chart
from hacrl.demo.settings import METHODS, demo_config
from hacrl.errors import HacrlError
from hacrl.progress import RunHistory


def histories(tmp_path: Path) -> dict[str, RunHistory]:
    """Runs as they would be read from files: HACPO ends higher for qwen and as high for llama."""
    ends = {"hacpo": {"qwen": 0.6, "llama": 0.7}, "gspo": {"qwen": 0.35, "llama": 0.7}}
    made = {}
    for method in METHODS:
        history = RunHistory(load_config(demo_config(method, output=tmp_path / method, seed=0)))
        history.evaluations = [
            {"step": step, "split": "eval", "agent": agent, "avg@k": score}
            for agent, end in ends[method].items()
            for step, score in ((0, 0.3), (30, end))
        ]
        made[method] = history
    return made


def test_both_methods_get_the_same_agents_tasks_and_rollouts(tmp_path: Path) -> None:
    hacpo, gspo = (
        load_config(demo_config(method, output=tmp_path, seed=3)).model_dump(exclude={"algorithm"})
        for method in ("hacpo", "gspo")
    )
    assert hacpo == gspo


def test_the_table_tells_start_ends_and_difference(tmp_path: Path) -> None:
    table = result_table(histories(tmp_path))
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("qwen", "30.0", "60.0", "35.0", "+25.0"),
        ("llama", "30.0", "70.0", "70.0", "+0.0"),
        ("mean", "30.0", "65.0", "52.5", "+12.5"),
    ]


def test_charts_show_both_methods(tmp_path: Path) -> None:
    made = histories(tmp_path)
    assert mean_curve(made["gspo"]) == ([0, 30], [pytest.approx(0.3), pytest.approx(0.525)])
    chart = terminal_chart(made, width=80)
    assert "HACPO" in chart
    assert "GSPO" in chart
    assert max(map(len, chart.splitlines())) >= 60
    write_chart(made, tmp_path / "chart.html")
    page = (tmp_path / "chart.html").read_text()
    assert page.count("GSPO, alone") == 2
    # It opens from disk: the plotting library is in the file.
    assert "plotly.js v" in page
    assert '<script src="http' not in page


@pytest.mark.slow
def test_two_runs_side_by_side_tell_their_steps(tmp_path: Path) -> None:
    overrides = ["steps=1", "evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every=0", "export=none"]
    configs = {
        method: load_config(demo_config(method, output=tmp_path / method, seed=0), overrides) for method in METHODS
    }
    events = list(train_side_by_side(configs, logs=tmp_path / "logs"))
    assert {event.run: event.step for event in events if event.step is not None} == {"hacpo": 1, "gspo": 1}
    assert {event.run for event in events if event.ended == "done"} == {"hacpo", "gspo"}


@pytest.mark.slow
def test_an_error_in_a_run_reaches_the_caller_and_ends_the_other(tmp_path: Path) -> None:
    configs = {
        method: load_config(demo_config(method, output=tmp_path / method, seed=0), ["steps=1"]) for method in METHODS
    }
    (tmp_path / "gspo").mkdir()
    (tmp_path / "gspo" / "other.txt").write_text("not a run")
    with pytest.raises(HacrlError, match="other files"):
        list(train_side_by_side(configs, logs=tmp_path / "logs"))
