"""What a report makes of run directories: reading, grouping, curves, intervals, summary, and the rollouts it shows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_comparison, write_run

from hacrl.errors import RunDirectoryError
from hacrl.report import rollouts as rollouts_module
from hacrl.report.figures import Chart, band, charts
from hacrl.report.intervals import difference, over_seeds
from hacrl.report.methods import Method, group_runs
from hacrl.report.rollouts import EXTREME_GROUPS, HEAD, TAIL, sample, spread
from hacrl.report.runs import Run, read_runs
from hacrl.report.scores import Measure
from hacrl.report.series import bin_steps, costs, curve, held_out
from hacrl.report.summary import Summary, summarise
from hacrl.report.tables import PairMeans, comparison_table, pair_table, results_table, runs_table


def read(*paths: Path) -> list[Run]:
    return read_runs(paths)[0]


def grouped(*paths: Path) -> list[Method]:
    return group_runs(read(*paths))


def summary_of(*paths: Path) -> Summary:
    runs, comparisons = read_runs(paths)
    methods = group_runs(runs)
    return summarise(methods, comparisons, Measure(methods), sample(methods))


def charts_of(*paths: Path) -> dict[str, Chart]:
    methods = grouped(*paths)
    return {chart.id: chart for chart in charts(methods, sample(methods))}


# ---------------------------------------------------------------- reading


def test_a_run_is_read(tmp_path: Path) -> None:
    [run] = read(write_run(tmp_path / "a", steps=3, seed=5))
    assert (run.name, run.seed, run.done, run.planned, run.agents) == ("a", 5, 3, 3, ("qwen", "llama"))
    assert run.column("agent/llama/reward/mean") == pytest.approx({1: 0.61, 2: 0.62, 3: 0.63})
    assert run.column("no/such") == {}
    assert run.notes == ()
    assert held_out(run, "qwen") == pytest.approx({0: 0.5, 2: 0.52})


def test_half_a_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", steps=3, planned=9)
    data = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(data[:-40])
    with open(path / "rollouts" / "step-000002.jsonl", "ab") as file:
        file.write(b'{"step": 2, "te')
    [run] = read(path)
    assert run.done == 2
    assert run.notes == ("metrics.jsonl: 1 unreadable line left out",)
    checks = [line.text for line in summary_of(path).checks]
    assert "Unfinished: a (2 of 9 steps)." in checks
    assert "1 lines of rollout files could not be read." in checks


@pytest.mark.parametrize("line", [b"null", b"[1]", b'{"step": "x"}', b"\xff\xfe", b'{"step": 1, "avg@k": '])
def test_lines_of_other_forms_do_no_harm(tmp_path: Path, line: bytes) -> None:
    path = write_run(tmp_path / "a", steps=2)
    for name in ("metrics.jsonl", "evaluations.jsonl", "rollouts/step-000001.jsonl"):
        with open(path / name, "ab") as file:
            file.write(line + b"\n")
    [run] = read(path)
    assert len(run.notes) == 2
    assert sample(group_runs([run])).unreadable == 1


def test_values_that_are_no_finite_numbers_are_absent(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", steps=1)
    line = json.loads((path / "metrics.jsonl").read_text())
    line |= {"agent/qwen/kl": None, "agent/qwen/entropy": "high", "agent/qwen/grad_norm": math.inf, "rollouts": True}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    [run] = read(path)
    assert not {"agent/qwen/kl", "agent/qwen/entropy", "agent/qwen/grad_norm", "rollouts"} & run.metrics.keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such folder"),
        (lambda path: path.touch(), "is a file"),
        (lambda path: path.mkdir(), "neither config.yaml nor comparison.json here"),
        (
            lambda path: (path.mkdir(), (path / "config.yaml").write_text("[")),
            "cannot be read as a run's configuration",
        ),
        (lambda path: (path.mkdir(), (path / "config.yaml").write_text("a: 1")), "it needs at least agents, steps"),
        (lambda path: (path.mkdir(), (path / "comparison.json").write_text("{}")), "make it again with hacrl compare"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(RunDirectoryError, match=message) as error:
        read(tmp_path / "x")
    assert str(tmp_path / "x") in str(error.value)


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / method / "1", algorithm=method) for method in ("hacpo", "gspo")]
    assert [run.name for run in read(*paths, paths[0])] == ["hacpo/1", "gspo/1"]


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", steps=0, planned=5, every=None)
    assert charts_of(path) == {}
    assert "Unfinished: a (0 of 5 steps)." in [line.text for line in summary_of(path).checks]


# ---------------------------------------------------------------- methods


def test_runs_that_differ_in_their_seed_are_one_method(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{method}-{seed}", algorithm=method, seed=seed, steps=2 + seed)
        for seed in range(2)
        for method in ("gspo", "hacpo")
    ]
    methods = grouped(*paths)
    # The one that shares comes first, for its line is the solid one.
    assert [(method.name, len(method.runs), method.shares) for method in methods] == [
        ("hacpo", 2, True),
        ("gspo", 2, False),
    ]
    assert methods[0].pairs == [("qwen", "llama"), ("llama", "qwen")]


def test_variants_of_an_algorithm_are_named_after_their_options(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a", algorithm={"name": "hacpo", "alpha": 1.0}),
        write_run(tmp_path / "b", algorithm={"name": "hacpo", "alpha": 3.0}),
        write_run(tmp_path / "c", algorithm="gspo", agents=["qwen"]),
        write_run(tmp_path / "d", algorithm="gspo", agents=["llama"]),
    ]
    assert [method.name for method in grouped(*paths)] == [
        "hacpo (algorithm.alpha=1.0)",
        "hacpo (algorithm.alpha=3.0)",
        "gspo (qwen)",
        "gspo (llama)",
    ]


def test_a_comparison_names_its_methods(tmp_path: Path) -> None:
    runs, [comparison] = read_runs([write_comparison(tmp_path / "c")])
    assert [(method.name, len(method.runs)) for method in group_runs(runs)] == [("hacpo", 2), ("gspo", 2)]
    [row, *_] = comparison_table(comparison, 0).rows
    assert row[:7] == ["qwen", "hacpo", "eval", "avg@4", "0.500", "0.700 [0.650, 0.750]", "2"]
    assert row[7:] == ["+0.123 [+0.100, +0.146]", "12 (50%)", "24", "12", "480", "36"]


# ---------------------------------------------------------------- numbers


def test_interval_over_seeds() -> None:
    # t(0.975, 2) = 4.303; the sample standard deviation of 1, 2, 3 is 1.
    assert over_seeds([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / math.sqrt(3))
    assert over_seeds([1.0]).half is None


def test_differences_are_paired_by_seed() -> None:
    found = difference({1: 0.5, 2: 0.7, 3: 0.9}, {2: 0.6, 1: 0.4, 9: 0.0})
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.half == pytest.approx(0.0, abs=1e-12)
    # Without common seeds Welch's interval: equal variances and sizes give 2n - 2 = 2 degrees of freedom.
    found = difference({1: 0.0, 2: 2.0}, {3: 0.0, 4: 2.0})
    assert found is not None
    assert found.half == pytest.approx(4.303 * math.sqrt(2), rel=1e-3)
    assert difference({}, {1: 0.0}) is None


def test_curves_average_over_runs_that_have_the_step() -> None:
    found = curve([{1: 0.0, 2: 1.0}, {1: 1.0}])
    assert (found.steps, found.mean, found.runs) == ([1, 2], [0.5, 1.0], [2, 1])
    assert found.low[1] is None
    assert not curve([])


def test_long_curves_are_averaged_in_bins_that_end_at_their_step() -> None:
    found = curve([{step: float(step) for step in range(1, 8)}], bin_steps=3)
    assert (found.steps, found.mean) == ([3, 6, 7], [2.0, 5.0, 7.0])


def test_costs_count_what_the_agent_sampled_and_leave_evaluation_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", steps=3)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[1]["time/evaluate"] = 4.0
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [method] = grouped(path)
    found = costs(method, "qwen")
    assert found["steps"] == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert found["rollouts"] == {0: 0.0, 1: 4.0, 2: 8.0, 3: 12.0}
    assert found["tokens"] == {0: 0.0, 1: 80.0, 2: 160.0, 3: 240.0}
    assert found["seconds"] == {0: 0.0, 1: 6.0, 2: 8.0, 3: 14.0}
    assert costs(method, None)["rollouts"][3] == 24.0


def test_bins_keep_a_long_run_small(tmp_path: Path) -> None:
    assert bin_steps(grouped(write_run(tmp_path / "a", steps=401, tasks=1, group=1))) == 3


def test_the_band_narrows_with_the_updates_of_a_step(tmp_path: Path) -> None:
    [method] = grouped(write_run(tmp_path / "a", algorithm={"name": "hacpo", "delta": 0.2, "delta_step": 0.05}))
    assert band(method) == pytest.approx((0.8, 0.85, 1.0))
    [method] = grouped(write_run(tmp_path / "b", algorithm={"name": "hacpo", "clipping": "none"}))
    assert band(method) is None


def test_pair_means_and_sums(tmp_path: Path) -> None:
    methods = grouped(write_run(tmp_path / "a", steps=6), write_run(tmp_path / "b", algorithm="gspo"))
    pair = PairMeans(methods[0], "qwen", "llama")
    assert pair.of("inside_share") == pytest.approx(0.5)
    assert pair.total("round_trip_failures") == 6.0
    assert pair.of("missing") is None
    table = pair_table(methods)
    assert table is not None
    assert [row[:2] for row in table.rows] == [["hacpo", "qwen ← llama"], ["hacpo", "llama ← qwen"]]
    assert table.rows[0][4:9] == ["0.8 to 1", "30 %", "50 %", "20 %", "40 %"]


# ---------------------------------------------------------------- the summary


def write_pair_of_methods(folder: Path, gains: list[float]) -> list[Path]:
    return [
        write_run(folder / f"{method}-{seed}", algorithm=method, seed=seed, score=0.4 + shift)
        for seed, gain in enumerate(gains)
        for method, shift in (("hacpo", gain), ("gspo", 0.0))
    ]


def test_summary_where_sharing_helps(tmp_path: Path) -> None:
    summary = summary_of(*write_pair_of_methods(tmp_path, [0.10, 0.11, 0.12]))
    assert summary.headline == "Sharing helped: +11.0 points on average, and clearly for each agent."
    cards = {card.agent: card for card in summary.cards}
    assert cards.keys() == {"qwen", "llama", None}
    # 4.303 * 1 point / sqrt(3) around 11.
    assert "interval +8.5 to +13.5 over 3 seeds" in cards["qwen"].detail
    assert cards["qwen"].detail.startswith("57.0 % with hacpo against 46.0 % with gspo")
    why = " ".join(line.text for line in summary.why)
    assert "qwen could use 50 % of llama's answers" in why
    assert "20 % of qwen's tasks taught nothing with sharing, 60 % alone" in why
    checks = " ".join(line.text for line in summary.checks)
    assert "hacpo: 18 of 72 answers of llama read differently after qwen's tokenizer." in checks
    assert "gspo, qwen: 60 % of the tasks taught nothing" in checks


@pytest.mark.parametrize(
    ("gains", "headline"),
    [
        ([-0.10, -0.11], "Sharing did harm: -10.5 points on average"),
        ([-0.10, 0.10], "No difference shown between sharing and training alone on average."),
        ([0.05], "Too few seeds to tell whether sharing helped: +5.0 points with hacpo."),
    ],
)
def test_summary_where_it_does_not(tmp_path: Path, gains: list[float], headline: str) -> None:
    assert summary_of(*write_pair_of_methods(tmp_path, gains)).headline.startswith(headline)


def test_one_seed_says_what_the_tasks_alone_leave_open(tmp_path: Path) -> None:
    cards = summary_of(*write_pair_of_methods(tmp_path, [0.05])).cards
    # 1.96 * sqrt(2) * 0.03
    assert "the held-out tasks alone leave ±8.3" in cards[0].detail


def test_summary_without_something_to_compare(tmp_path: Path) -> None:
    alone = write_run(tmp_path / "gspo", algorithm="gspo")
    assert "add a run with algorithm=hacpo" in summary_of(alone).headline
    assert "Add a run with algorithm=gspo" in summary_of(write_run(tmp_path / "hacpo")).headline
    one = write_run(tmp_path / "one", agents=["qwen"])
    assert [card.agent for card in summary_of(one).cards] == ["qwen"]


def test_summary_takes_a_comparisons_own_figures(tmp_path: Path) -> None:
    summary = summary_of(write_comparison(tmp_path / "c"))
    assert summary.headline.startswith("Sharing helped: +12.3 points")
    assert "interval +10.0 to +14.6 over 2 seeds and the held-out tasks" in summary.cards[0].detail
    # Its interval of one seed is one over tasks alone, which does not show that sharing helped.
    assert summary_of(write_comparison(tmp_path / "d", seeds=1)).headline.startswith("Too few seeds to tell")


def test_runs_without_evaluation_are_compared_by_reward(tmp_path: Path) -> None:
    paths = [
        write_run(
            tmp_path / f"{method}-{seed}", algorithm=method, seed=seed, every=None, score=0.3 + shift + 0.01 * seed
        )
        for seed in range(2)
        for method, shift in (("hacpo", 0.2), ("gspo", 0.0))
    ]
    assert "Sharing helped: +20.0 points" in summary_of(*paths).headline
    assert not any(name.startswith("held-out") for name in charts_of(*paths))
    table = results_table(methods := grouped(*paths), Measure(methods))
    assert "Training reward (nothing was held out)" in table.caption


def test_agents_that_only_some_runs_have(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "pair"),
        write_run(tmp_path / "qwen", algorithm="gspo", agents=["qwen"]),
        write_run(tmp_path / "other", algorithm="gspo", agents=["phi"]),
    ]
    methods = grouped(*paths)
    rows = {row[0]: row[1:] for row in results_table(methods, Measure(methods)).rows}
    assert rows["phi"] == ["50.0", "", "", "56.0", ""]
    assert rows["qwen"] == ["50.0", "56.0", "56.0", "", "+0.0"]
    # No run has all three.
    assert "mean" not in rows
    panels = charts_of(*paths)["held-out-0"].panels
    assert [panel.title for panel in panels] == ["qwen", "llama", "phi"]
    assert [len(panel.series) for panel in panels] == [2, 1, 1]


def test_each_agent_has_its_own_control(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{name}-{seed}", algorithm=algorithm, agents=agents, seed=seed, score=score)
        for seed in range(2)
        for name, algorithm, agents, score in (
            ("pair", "hacpo", ["qwen", "llama"], 0.4),
            ("qwen", "gspo", ["qwen"], 0.3 + 0.01 * seed),
            ("llama", "gspo", ["llama"], 0.2 + 0.01 * seed),
        )
    ]
    summary = summary_of(*paths)
    assert summary.headline == "qwen: sharing helped (+9.5 points); llama: sharing helped (+19.5 points)."
    assert summary.detail.startswith("Held-out avg@4: hacpo against gspo (qwen) and gspo (llama)")


def test_the_control_is_the_method_with_as_many_rollouts_not_the_first_one(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{name}-{seed}", algorithm=algorithm, seed=seed, group=group, score=score + 0.01 * seed)
        for seed in range(2)
        for name, algorithm, group, score in (
            ("doubled", {"name": "gspo", "clip_low": 0.1}, 4, 0.45),
            ("shared", "hacpo", 2, 0.4),
            ("alone", {"name": "gspo", "clip_low": 0.2}, 2, 0.3),
        )
    ]
    summary = summary_of(*paths)
    assert "algorithm.clip_low=0.2" in summary.detail
    assert "+10.0 points" in summary.headline


def test_different_budgets_are_told(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", steps=6), write_run(tmp_path / "b", algorithm="gspo", steps=4)]
    assert "different numbers of rollouts (hacpo 48, gspo 32)" in " ".join(
        line.text for line in summary_of(*paths).checks
    )


# ---------------------------------------------------------------- charts


def test_all_charts_are_there(tmp_path: Path) -> None:
    found = charts_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", algorithm="gspo"))
    assert found.keys() == {
        *("held-out-0", "reward", "capability", "omega", "ratios", "shares", "weight", "ess", "drift", "lost"),
        *("clip", "zero-variance", "entropy", "truncation", "length", "grad-norm", "time"),
    }
    assert [series.label for series in found["lost"].panels[0].series] == ["changed by tokenizer"]
    assert found["time"].panels[0].bars[0] == pytest.approx([12.0, 0.6, 18.0, 0.0, 0.0, 5.4])
    clipped = found["clip"].panels[0].series[0].curve
    assert clipped.mean == pytest.approx([0.25] * 6)


def test_memory_is_shown_where_a_metric_speaks_of_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", steps=1)
    line = json.loads((path / "metrics.jsonl").read_text()) | {"memory/process_gib": 3.0}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    [panel] = charts_of(path)["memory"].panels
    assert (panel.title, panel.series[0].curve.mean) == ("memory/process_gib", [3.0])


def test_the_histogram_counts_foreign_ratios(tmp_path: Path) -> None:
    panels = charts_of(write_run(tmp_path / "a", steps=2))["ratios"].panels
    assert [panel.title for panel in panels] == ["qwen ← llama", "llama ← qwen"]
    # All foreign rows have s = 0.9, in the bin from 0.88 to 0.92.
    assert panels[0].bars[0][22] == 1.0
    assert panels[0].note.startswith("8 rows")


# ---------------------------------------------------------------- rollouts


def test_groups_are_whole_and_spread_over_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_module, "MOST_ROLLOUTS", 40)
    methods = grouped(write_run(tmp_path / "a", steps=12, tasks=3, group=2))
    found = sample(methods)
    assert found.total == 12 * 3 * 2 * 2
    assert found.shown == sum(len(group["rollouts"]) for group in found.groups) <= 40
    assert all(len(group["rollouts"]) == 4 for group in found.groups)
    steps = [group["step"] for group in found.groups]
    assert (steps[0], steps[-1]) == (1, 12)
    # All of the third step's groups have the largest advantages.
    assert steps.count(3) >= EXTREME_GROUPS
    fewer = found.thinned(2)
    assert [group["step"] for group in fewer.groups] == [1, 12]
    assert fewer.total == found.total


def test_large_files_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "a", steps=10)
    size = (path / "rollouts" / "step-000001.jsonl").stat().st_size
    monkeypatch.setattr(rollouts_module, "MOST_BYTES", 4 * size)
    found = sample(grouped(path))
    assert 2 <= found.steps_read <= 4
    assert found.steps_there == 10
    assert {group["step"] for group in found.groups} >= {1, 10}


def test_long_texts_keep_head_and_tail(tmp_path: Path) -> None:
    long = "a" * 50_000 + "b" * 50_000
    found = sample(grouped(write_run(tmp_path / "a", steps=1, text=lambda *_: long)))
    rollout = found.groups[0]["rollouts"][0]
    assert rollout["text"] == "a" * HEAD + "\n[...]\n" + "b" * TAIL
    assert rollout["cut"] == 100_000 - HEAD - TAIL


def test_a_prompt_of_messages_keeps_its_roles(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    found = sample(grouped(write_run(tmp_path / "a", steps=1, prompt=messages)))
    assert found.groups[0]["prompt"] == [("system", "Be brief."), ("user", "1 + 1?")]


def test_spread() -> None:
    assert spread(list(range(10)), 4) == [0, 3, 6, 9]
    assert spread([1, 2], 5) == [1, 2]
    assert spread([1, 2, 3], 1) == [1]


def test_the_runs_table_says_where_everything_comes_from(tmp_path: Path) -> None:
    [row] = runs_table(grouped(write_run(tmp_path / "a", steps=2, planned=3, seed=4))).rows
    assert row == ["hacpo", "a", "qwen = m, llama = m", "4", "2 of 3", "unfinished", "2026-11-30 20:49", "0.1.0", ""]
