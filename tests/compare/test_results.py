"""From records on disk to figures: which step is read, means, differences, cost, when a baseline is reached."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hacrl.compare.plan import Plan, make_plan
from hacrl.compare.results import Records, comparison, read_records
from hacrl.compare.table import csv_text, markdown, renderables
from hacrl.errors import HacrlError

CONFIG: dict[str, Any] = {
    "agents": [{"name": "a", "model": "one"}, {"name": "b", "model": "two"}],
    "tasks": {"train": {"dataset": "train.jsonl"}, "eval": {"dataset": "eval.jsonl"}},
    "reward": "exact",
    "steps": 2,
    "prompts_per_step": 4,
    "group_size": 4,
    "evaluation": {"every": 1, "k": 2},
    "output": "x",
}

Scores = Sequence[float | None]


def evaluation(step: int, agent: str, scores: Scores) -> dict[str, Any]:
    tasks = [f"eval/{place}" for place in range(len(scores))]
    per_task = {"id": tasks, "avg@k": list(scores), "best@k": [1.0] * len(scores), "maj@k": [None] * len(scores)}
    return {"step": step, "split": "eval", "agent": agent, "avg@k": 0.0, "k": 2, "per_task": per_task}


def write_run(folder: Path, a: Mapping[int, Scores], b: Mapping[int, Scores], *, seconds: float = 10.0) -> None:
    """A run of two steps: `a` and `b` map steps to scores of single tasks."""
    folder.mkdir(parents=True)
    lines = [evaluation(step, "a", scores) for step, scores in a.items()]
    lines += [evaluation(step, "b", scores) for step, scores in b.items()]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [
        {"step": step, "rollouts": 32, "tokens_sampled": 100.0, "agent/a/updates": 2, "agent/b/updates": 1}
        | {"time/total": seconds, "time/evaluate": 4.0}
        for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))


def records_of(plan: Plan) -> dict[str, Records]:
    return {run.name: read_records(run) for run in plan.runs if Path(run.config.output).exists()}


def row(found: Mapping[str, Any], agent: str, method: str, metric: str = "avg@2") -> dict[str, Any]:
    (only,) = (
        row for row in found["results"] if (row["agent"], row["method"], row["metric"]) == (agent, method, metric)
    )
    return only


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two seeds of hacpo and gspo; three tasks, of which agent a was not scored on the last one in one run."""
    made = make_plan(CONFIG, methods="hacpo,gspo,naive", seeds=2, output=tmp_path)
    b = {step: [0.5, 0.5, 0.5] for step in (0, 1, 2)}
    write_run(tmp_path / "runs/hacpo/seed-0", {0: [0, 0, 0], 1: [0.5, 0.5, 1], 2: [1, 0.5, 1]}, b)
    write_run(tmp_path / "runs/hacpo/seed-1", {0: [0, 0, 0], 1: [0.5, 0.5, 1], 2: [0.5, 1, 1]}, b)
    write_run(tmp_path / "runs/gspo/seed-0", {0: [0, 0, 0], 1: [0, 0, 0], 2: [0.5, 0, None]}, b)
    write_run(tmp_path / "runs/gspo/seed-1", {0: [0, 0, 0], 1: [0, 0, 0], 2: [0, 0.5, 0]}, b)
    return made


def test_means_and_paired_differences(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    hacpo, gspo = row(found, "a", "hacpo"), row(found, "a", "gspo")
    assert hacpo["mean"] == pytest.approx((1 + 0.5 + 1 + 0.5 + 1 + 1) / 6)
    assert hacpo["start"] == 0
    # A task without a score in one of the runs is left out of what it would enter, and counted.
    assert gspo["mean"] == pytest.approx(0.25)
    assert (gspo["tasks"], gspo["tasks_left_out"]) == (2, 1)
    difference = hacpo["differences"]["gspo"]
    # Tasks one and two: 1 - .5, .5 - 0 and .5 - 0, 1 - .5. Every difference is .5: what varied, varied in both.
    assert difference == pytest.approx({"mean": 0.5, "low": 0.5, "high": 0.5})
    assert gspo["differences"]["hacpo"]["mean"] == pytest.approx(-0.5)
    assert row(found, "a", "hacpo", "best@2")["mean"] == 1


def test_the_mean_agent_is_averaged_within_seed_and_task(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    assert row(found, "mean", "hacpo")["mean"] == pytest.approx((5 / 6 + 0.5) / 2)
    assert row(found, "mean", "hacpo")["differences"]["gspo"] == pytest.approx(
        {"mean": 0.25, "low": 0.25, "high": 0.25}
    )


def test_rollouts_to_reach_a_baseline_are_interpolated(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    # a under hacpo: 0, 2/3, 5/6 at 0, 32, 64 rollouts; gspo ends at 1/4, so 32 x (1/4) / (2/3) = 12 rollouts.
    assert row(found, "a", "hacpo")["to_reach"]["gspo"] == pytest.approx({"rollouts": 12, "share": 12 / 64})
    assert row(found, "a", "gspo")["to_reach"]["hacpo"] == {"rollouts": None, "share": None}


def test_cost_counts_training_alone(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    assert row(found, "b", "gspo")["cost"] == {"rollouts": 64, "updates": 6, "tokens": 200, "seconds": 12}
    assert found["axis_budget"] == {"hacpo": 64, "gspo": 64}


def test_methods_without_a_finished_run_are_named_and_have_no_figures(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    assert found["methods"] == ["hacpo", "gspo", "naive"]
    assert {row["method"] for row in found["results"]} == {"hacpo", "gspo"}
    assert found["runs"]["hacpo/seed-1"] == "runs/hacpo/seed-1"
    # No answers are extracted here, so there is no majority.
    assert {row["metric"] for row in found["results"]} == {"avg@2", "best@2"}


def test_a_difference_rests_on_the_seeds_that_both_have(plan: Plan) -> None:
    records = records_of(plan)
    del records["gspo/seed-1"]
    found = comparison(plan, records)
    assert row(found, "a", "gspo")["runs"] == 1
    # Seed 0 alone, tasks one and two: 1 - .5 and .5 - 0.
    assert row(found, "a", "hacpo")["differences"]["gspo"]["mean"] == pytest.approx(0.5)


def test_on_the_axis_of_seconds_runs_are_read_within_the_least_of_them(tmp_path: Path) -> None:
    plan = make_plan(CONFIG, methods="hacpo,gspo,gspo-x2", seeds=1, axis="seconds", output=tmp_path)
    curve = {step: [step / 2] for step in (0, 1, 2)}
    write_run(tmp_path / "runs/hacpo/seed-0", curve, curve, seconds=14.0)
    write_run(tmp_path / "runs/gspo/seed-0", curve, curve, seconds=10.0)
    write_run(tmp_path / "runs/gspo-x2/seed-0", curve, curve, seconds=6.0)
    found = comparison(plan, records_of(plan))
    # gspo took 12 s of training, hacpo 20: it is read at step 1, after 10 s. gspo-x2 neither limits nor is limited.
    assert found["axis_budget"] == {"hacpo": 10, "gspo": 12, "gspo-x2": 4}
    ends = {method: row(found, "mean", method)["mean"] for method in ("hacpo", "gspo", "gspo-x2")}
    assert ends == {"hacpo": 0.5, "gspo": 1, "gspo-x2": 1}


def test_records_without_scores_of_single_tasks_are_refused(plan: Plan) -> None:
    path = Path(plan.runs[0].config.output) / "evaluations.jsonl"
    path.write_text('{"step": 2, "split": "eval", "agent": "a", "avg@k": 0.5}\n')
    with pytest.raises(HacrlError, match=r"remove the folder to have the run made again"):
        read_records(plan.runs[0])


# ---------------------------------------------------------------- tables


def test_tables_tell_scores_differences_and_cost(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(*renderables(found))
    shown = console.export_text()
    page = markdown(found)
    for text in (shown, page):
        assert "+0.500 [+0.500, +0.500]" in text
        assert "12 (19%)" in text
        assert "0/2" in text  # naive has no run
    assert "| a | gspo | 0.000 | 0.250 [" in page
    assert "best@2" in page


def test_a_budget_that_is_not_equal_is_marked(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    assert "(x 2)" not in markdown(found)
    assert "| gspo (x 2) |" in markdown({**found, "axis_budget": {"hacpo": 64, "gspo": 128}})


def test_csv_has_a_line_per_figure_and_per_difference(plan: Plan) -> None:
    found = comparison(plan, records_of(plan))
    lines = list(csv.DictReader(io.StringIO(csv_text(found))))
    (own,) = (
        line
        for line in lines
        if [line[key] for key in ("agent", "method", "metric", "against")] == ["a", "gspo", "avg@2", ""]
    )
    assert (float(own["mean"]), own["runs"], float(own["cost_rollouts"])) == (0.25, "2", 64)
    (difference,) = (
        line
        for line in lines
        if [line[key] for key in ("agent", "method", "metric", "against")] == ["a", "hacpo", "avg@2", "gspo"]
    )
    assert (float(difference["mean"]), float(difference["rollouts_to_reach"])) == (0.5, pytest.approx(12))
