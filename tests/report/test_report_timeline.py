"""Where the time went: the last steps of a timeline as lanes of bars, and what each agent spent its time on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_runs import AT, row, step_rows, with_metrics, with_timeline, write_run

from hacrl.report import timeline
from hacrl.report.figures import Chart, charts
from hacrl.report.methods import group_runs
from hacrl.report.rollouts import sample
from hacrl.report.runs import read_runs
from hacrl.report.scores import Measure
from hacrl.report.summary import LOSSES, summarise
from hacrl.report.tables import LATE, time_table
from hacrl.report.timeline import LAST_STEPS, Bar, Mark, Work, work


def run_of(folder: Path, *, steps: int, begins: Sequence[float] | None = None, **options: Any) -> Path:
    begins = begins or [10.0 * step for step in range(steps)]
    rows = [line for step, begin in enumerate(begins, start=1) for line in step_rows(step, begin)]
    return with_timeline(write_run(folder, steps=steps, **options), rows)


def work_of(path: Path) -> Work:
    [run] = read_runs([path])[0]
    found = work(run)
    assert found is not None
    return found


def steps_of(found: Work) -> list[int]:
    assert {bar.step for bar in found.bars} == {mark.step for mark in found.marks}
    return [mark.step for mark in found.marks]


def charts_of(*paths: Path) -> dict[str, Chart]:
    methods = group_runs(read_runs(paths)[0])
    return {chart.id: chart for chart in charts(methods, sample(methods))}


# ---------------------------------------------------------------- lanes and bars


def test_each_process_has_a_lane_and_each_span_a_bar(tmp_path: Path) -> None:
    rows = [
        row(1, None, "loop", "sample", 0.5, 4.0),
        row(1, "llama", "llama", "update", 4.5, 7.0),
        row(1, "qwen", "qwen.sampler-10", "sample", 1.0, 3.0),
        row(1, "qwen", "qwen.sampler-2", "sample", 1.0, 4.0),
        row(1, "qwen", "qwen.worker-1", "update", 4.0, 6.0),
        row(1, "qwen", "qwen", "update", 4.25, 6.0),
        row(1, "qwen", "qwen.sampler-2", "take weights", 6.0, 6.125),
        row(1, "other", "other", "load", 0.0, 0.5),
    ]
    found = work_of(with_timeline(write_run(tmp_path / "a", steps=1), rows))
    # Agents as in the configuration, workers before samplers, numbers as numbers, the loop last.
    assert found.lanes == [
        *("qwen", "qwen.worker-1", "qwen.sampler-2", "qwen.sampler-10", "llama", "other", "loop"),
    ]
    assert found.labels == ["qwen", "worker-1", "sampler-2", "sampler-10", "llama", "other", "loop"]
    assert found.groups == [0, 4, 5, 6]
    assert found.bars == [
        Bar(lane=5, phase="load", step=1, begin=0.0, seconds=0.5),
        Bar(lane=6, phase="sample", step=1, begin=0.5, seconds=3.5),
        Bar(lane=3, phase="sample", step=1, begin=1.0, seconds=2.0),
        Bar(lane=2, phase="sample", step=1, begin=1.0, seconds=3.0),
        Bar(lane=1, phase="update", step=1, begin=4.0, seconds=2.0),
        Bar(lane=0, phase="update", step=1, begin=4.25, seconds=1.75),
        Bar(lane=4, phase="update", step=1, begin=4.5, seconds=2.5),
        Bar(lane=2, phase="take weights", step=1, begin=6.0, seconds=0.125),
    ]
    assert found.marks == [Mark(step=1, begin=0.5)]
    assert (found.seconds, found.left_out, found.unreadable) == (7.0, 0, 0)


def test_agents_that_take_turns_in_one_process_have_a_lane_each(tmp_path: Path) -> None:
    rows = [row(1, name, "local", "sample", place, place + 1) for place, name in enumerate(("qwen", "llama"))]
    found = work_of(with_timeline(write_run(tmp_path / "a", steps=1), rows))
    assert found.lanes == found.labels == ["qwen (local)", "llama (local)"]
    # Without a loop a step begins with its first span.
    assert found.marks == [Mark(step=1, begin=0.0)]


def test_the_last_recorded_steps_are_shown(tmp_path: Path) -> None:
    path = run_of(tmp_path / "a", steps=9)
    found = work_of(path)
    assert steps_of(found) == [5, 6, 7, 8, 9]
    assert [mark.begin for mark in found.marks] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert found.seconds == 50.0
    assert len(found.bars) == 6 * LAST_STEPS
    # A step without its metrics has not been recorded, and is made again.
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    assert steps_of(work_of(path)) == [4, 5, 6, 7, 8]


def test_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    path = with_timeline(write_run(tmp_path / "a", steps=1), list(step_rows(1, 0.0)))
    whole = work_of(path)
    half = json.dumps(row(1, "qwen", "qwen", "save", 10, 11)).encode()
    # Even one that could be read: its end may be missing.
    for behind in (half[:40], half):
        with_timeline(path, list(step_rows(1, 0.0)), behind=behind)
        assert work_of(path) == whole
    with_timeline(path, list(step_rows(1, 0.0)), behind=half + b"\n")
    assert len(work_of(path).bars) == len(whole.bars) + 1
    with_timeline(path, [], behind=half)
    assert "work" not in charts_of(path)


@pytest.mark.parametrize(
    "line",
    [
        *(b"null", b"[1]", b"\xff\xfe", b'{"step": 1}', b""),
        *(
            json.dumps(row(1, "qwen", "qwen", "save", 10, 11) | change).encode()
            for change in ({"end": AT}, {"begin": None}, {"end": 1e999}, {"step": "1"}, {"agent": 1}, {"phase": None})
        ),
    ],
)
def test_lines_of_other_forms_are_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    path = with_timeline(write_run(tmp_path / "a", steps=1), list(step_rows(1, 0.0)), behind=line + b"\n")
    found = work_of(path)
    assert (len(found.bars), found.unreadable) == (6, 1)
    assert "1 lines of timeline.jsonl could not be read" in charts_of(path)["work"].panels[0].note


@pytest.mark.parametrize("block", [1, 7, 160, 1 << 16])
def test_a_file_is_read_backwards_in_blocks_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    path = run_of(tmp_path / "a", steps=3)
    with open(path / "timeline.jsonl", "ab") as file:
        file.write(b'{"step": 3, "half')
    expected = work_of(path)
    monkeypatch.setattr(timeline, "BLOCK", block)
    assert work_of(path) == expected
    assert steps_of(expected) == [1, 2, 3]


def test_a_huge_file_is_read_from_its_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_of(tmp_path / "a", steps=8)
    data = (path / "timeline.jsonl").read_bytes()
    # Nothing before the step in front of those that are shown is looked at.
    begin = data.index(b'"step": 3')
    (path / "timeline.jsonl").write_bytes(b"x" * begin + b"\n" + data[data.index(b"\n", begin) + 1 :])
    monkeypatch.setattr(timeline, "BLOCK", 64)
    found = work_of(path)
    assert (steps_of(found), found.unreadable) == ([4, 5, 6, 7, 8], 0)
    # Steps that lie only partly in what may be read are not shown.
    size = (path / "timeline.jsonl").stat().st_size
    monkeypatch.setattr(timeline, "MOST_BYTES", size - data.index(b'"step": 7') - 30)
    found = work_of(path)
    assert steps_of(found) == [8]
    assert len(found.bars) == 6


def test_steps_that_hold_too_many_spans_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_of(tmp_path / "a", steps=4)
    monkeypatch.setattr(timeline, "MOST_SPANS", 17)
    assert steps_of(work_of(path)) == [3, 4]
    monkeypatch.setattr(timeline, "MOST_SPANS", 12)
    assert steps_of(work_of(path)) == [3, 4]
    # Of a step that is too large by itself the longest spans are shown.
    monkeypatch.setattr(timeline, "MOST_SPANS", 4)
    found = work_of(path)
    assert sorted(bar.seconds for bar in found.bars) == [4.0, 4.0, 5.0, 5.0]
    assert found.left_out == 2
    assert charts_of(path)["work"].panels[0].note == "2 shorter spans are not shown."


def test_steps_before_a_pause_are_not_shown(tmp_path: Path) -> None:
    assert steps_of(work_of(run_of(tmp_path / "a", steps=4, begins=[0, 10, 41, 51]))) == [3, 4]
    # A pause as long as both steps around it may be a slow tracker.
    assert steps_of(work_of(run_of(tmp_path / "b", steps=4, begins=[0, 10, 40, 50]))) == [1, 2, 3, 4]


def test_work_that_began_long_before_does_not_squeeze_the_rest(tmp_path: Path) -> None:
    late = [
        row(7, "qwen", "qwen.sampler-1", "sample", -500, 65),
        row(7, "qwen", "qwen.sampler-2", "sample", -500, -499),
        row(3, "qwen", "qwen", "save", 18, 19),
    ]
    path = write_run(tmp_path / "a", steps=7)
    rows = [line for step in range(1, 8) for line in step_rows(step, 10.0 * (step - 1))]
    found = work_of(with_timeline(path, sorted([*rows, *late], key=lambda line: line["step"])))
    # One step's length before the first step's loop.
    assert found.seconds == 60.0
    assert found.marks[0] == Mark(step=3, begin=10.0)
    assert "qwen.sampler-2" not in found.lanes
    [bar] = [bar for bar in found.bars if bar.lane == found.lanes.index("qwen.sampler-1")]
    assert (bar.begin, bar.seconds) == (-510.0, 565.0)
    [bar] = [bar for bar in found.bars if bar.phase == "save"]
    assert bar.begin == 8.0


# ---------------------------------------------------------------- the chart


def test_runs_without_a_timeline_have_no_chart_of_it(tmp_path: Path) -> None:
    found = charts_of(write_run(tmp_path / "a"))
    assert "work" not in found
    assert found["time"].section == "time"


def test_one_run_of_each_method_is_shown(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "old", steps=3),
        *(run_of(tmp_path / f"new-{seed}", steps=3, seed=seed) for seed in (1, 2)),
        write_run(tmp_path / "older", steps=3, algorithm="gspo"),
        run_of(tmp_path / "naive", steps=1, algorithm="naive"),
    ]
    panels = charts_of(*paths)["work"].panels
    assert [(panel.method, panel.title) for panel in panels] == [
        ("hacpo", "new-1, steps 1 to 3"),
        ("naive", "naive, step 1"),
    ]
    assert all(panel.work is not None and panel.note == "" for panel in panels)


# ---------------------------------------------------------------- the table


def test_the_table_tells_what_part_of_the_time_went_where(tmp_path: Path) -> None:
    path = with_metrics(
        write_run(tmp_path / "a", steps=3),
        # Before there was such a metric: this step counts in nothing.
        {"time/total": 1000.0},
        {
            "time/total": 10.0,
            "agent/qwen/time/sample": 2.0,
            "agent/qwen/time/update": 2.0,
            "agent/qwen/time/wait": 6.0,
            "agent/llama/time/sample": 8.0,
            "agent/llama/time/wait": 0.0,
        },
        {
            "time/total": 30.0,
            "agent/qwen/time/sample": 8.0,
            "agent/qwen/time/evaluate": 4.0,
            "agent/qwen/time/wait": 24.0,
            "agent/llama/time/sample": 52.0,
            "agent/llama/time/wait": 2.0,
        },
    )
    table = time_table(group_runs(read_runs([path])[0]))
    assert table is not None
    assert table.columns == ["method", "agent", "idle", "sampling", "updating", "evaluating"]
    assert table.rows == [
        ["hacpo", "qwen", "75 %", "25 %", "5 %", "10 %"],
        # Two samplers at once.
        ["hacpo", "llama", "5 %", "150 %", "0 %", "0 %"],
    ]


def test_the_table_counts_what_was_late_absent_or_begun_anew(tmp_path: Path) -> None:
    told = {"time/total": 10.0, "agent/qwen/time/wait": 5.0, "agent/llama/time/wait": 1.0}
    path = with_metrics(
        write_run(tmp_path / "a", steps=4),
        told | {"execution/restarts": 1.0, "agent/qwen/staleness": 0.0, "agent/qwen/rollouts_stale": 0.0},
        told | {"execution/restarts": 2.0, "agent/qwen/staleness": 1.0, "agent/llama/rollouts_late": 12.0},
        told | {"execution/restarts": 0.0, "agent/llama/sample_late": 1.0, "agent/llama/update_late": 1.0},
        told | {"execution/restarts": 1.0, "agent/qwen/absent": 1.0},
    )
    table = time_table(group_runs(read_runs([path])[0]))
    assert table is not None
    assert table.columns[6:] == [
        *("age of answers", "answers too late", "not waited for", "steps absent", "restarts of the run"),
    ]
    assert [row[1:3] + row[6:] for row in table.rows] == [
        ["qwen", "50 %", "0.500", "0", "0", "1", "3"],
        ["llama", "10 %", "", "12", "2", "0", "3"],
    ]


def test_old_runs_have_no_row_in_the_table(tmp_path: Path) -> None:
    old = write_run(tmp_path / "a", steps=1)
    assert time_table(group_runs(read_runs([old])[0])) is None
    new = write_run(tmp_path / "b", steps=1, algorithm="gspo", agents=["qwen"])
    with_metrics(new, {"agent/qwen/time/wait": 3.0})
    table = time_table(group_runs(read_runs([old, new])[0]))
    assert table is not None
    assert [row[:3] for row in table.rows] == [["gspo", "qwen", "50 %"]]


def test_the_summary_says_what_was_lost(tmp_path: Path) -> None:
    path = with_metrics(
        write_run(tmp_path / "a", steps=2),
        {"agent/llama/sample_late": 1.0, "agent/qwen/rollouts_stale": 0.0},
        {"agent/llama/update_late": 1.0, "agent/llama/rollouts_late": 1200.0},
    )
    runs, comparisons = read_runs([path])
    methods = group_runs(runs)
    checks = [line.text for line in summarise(methods, comparisons, Measure(methods), sample(methods)).checks]
    assert "hacpo, llama: 2 times it was not waited for." in checks
    assert "hacpo, llama: 1,200 answers came too late and were not used." in checks
    assert not any("too old" in text for text in checks)
    # The same metrics in both places.
    assert {key for keys, _ in LOSSES for key in keys} == {key for _, keys in LATE for key in keys}
