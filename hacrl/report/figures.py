"""The charts of a report as plain data: which curves, in which panels, with which words. The page draws them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hacrl.report.methods import Method
from hacrl.report.rollouts import BIN, BINS, Sample
from hacrl.report.runs import Run
from hacrl.report.series import ByStep, Curve, bin_steps, curve, held_out
from hacrl.report.timeline import TIMELINE, Work, work

Unit = Literal["share", "number", "seconds"]
Section = Literal["learning", "sharing", "health", "time"]

PHASES = ("sample", "verify", "update", "evaluate", "save")


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve. `agent` gives its colour, `method` its line; `label` replaces both names where it is set."""

    method: str
    agent: str | None
    curve: Curve
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One small plot of a chart.

    kind    `lines`: curves over the chosen axis; `areas`: stacked shares; `histogram`: bars over s with a band;
            `bars`: one stacked bar per label; `work`: lanes of processes over seconds.
    method  set where the panel belongs to one method and is shown when that is chosen.
    bars    histogram: height of each bin; bars: one list per label.
    band    histogram: (low at the first update, low at the last, high), or None.
    """

    title: str
    kind: Literal["lines", "areas", "histogram", "bars", "work"]
    series: list[Series] = field(default_factory=list[Series])
    method: str | None = None
    agent: str | None = None
    labels: list[str] = field(default_factory=list[str])
    bars: list[list[float]] = field(default_factory=list[list[float]])
    bins: float | None = None
    band: tuple[float, float, float] | None = None
    work: Work | None = None
    note: str = ""

    def __bool__(self) -> bool:
        return bool(any(series.curve for series in self.series) or self.bars or self.work)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Panels side by side under one title; `caption` is for a newcomer, `keys` are the names in `docs/metrics.md`."""

    id: str
    section: Section
    title: str
    caption: str
    keys: list[str]
    unit: Unit
    panels: list[Panel]


def charts(methods: Sequence[Method], sample: Sample) -> list[Chart]:
    """All charts for which the runs hold anything."""
    made = [*_learning(methods), *_sharing(methods, sample), *_health(methods), _work(methods), _time(methods)]
    kept = [
        Chart(
            id=chart.id,
            section=chart.section,
            title=chart.title,
            caption=chart.caption,
            keys=chart.keys,
            unit=chart.unit,
            panels=[panel for panel in chart.panels if panel],
        )
        for chart in made
    ]
    return [chart for chart in kept if chart.panels]


def band(method: Method) -> tuple[float, float, float] | None:
    """The band of foreign rows: low at the first update of a step, low at its last, high. None where there is none."""
    settings = method.algorithm
    try:
        if settings["name"] != "hacpo":
            return (1 - settings["clip_low"], 1 - settings["clip_low"], 1 + settings["clip_high"])
        if settings["clipping"] in ("none", "truncated"):
            return None
        step = settings["delta_step"] if settings["clipping"] == "stepwise" else 0.0
        updates = [
            count
            for run in method.runs
            for agent in run.agents
            for count in run.column(f"agent/{agent}/updates").values()
        ]
        low = 1 - settings["delta"]
        return (low, min(1.0, low + step * (max(updates, default=1.0) - 1)), 1.0)
    except (KeyError, TypeError):
        return None


# ---------------------------------------------------------------- learning


def _learning(methods: Sequence[Method]) -> list[Chart]:
    splits = list(
        dict.fromkeys(
            str(entry.get("split", "eval")) for method in methods for run in method.runs for entry in run.evaluations
        )
    )
    k = sorted({str(e.get("k", "k")) for method in methods for run in method.runs for e in run.evaluations})
    made = [
        _by_agent(
            f"held-out-{number}",
            "learning",
            f"Held-out accuracy, {split}" if len(splits) > 1 else "Held-out accuracy",
            "What the agents can do on tasks that they are never trained on: the mean reward of "
            f"{' or '.join(k)} answers per task. A solid line above a broken one means that sharing helped.",
            ["avg@k in evaluations.jsonl"],
            methods,
            functools.partial(_held_out, split=split),
            unit=_unit_of_evaluations(methods),
            mean=True,
        )
        for number, split in enumerate(splits)
    ]
    return [
        *made,
        _metric_by_agent(
            "reward",
            "learning",
            "Training reward",
            "Mean reward of the answers that an agent sampled for training: it should rise, noisily, for every step "
            "brings other tasks.",
            "reward/mean",
            methods,
            unit="number",
        ),
    ]


def _held_out(run: Run, agent: str, *, split: str) -> ByStep:
    return held_out(run, agent, split)


def _unit_of_evaluations(methods: Sequence[Method]) -> Unit:
    values = [
        value
        for method in methods
        for run in method.runs
        for agent in run.agents
        for value in held_out(run, agent).values()
    ]
    return "share" if all(0 <= value <= 1 for value in values) else "number"


# ---------------------------------------------------------------- sharing


def _sharing(methods: Sequence[Method], sample: Sample) -> list[Chart]:
    sharing = [method for method in methods if method.shares]
    width = bin_steps(methods)

    def by_pair(
        id: str, title: str, caption: str, keys: Sequence[str], *, unit: Unit, labels: Sequence[str] = ()
    ) -> Chart:
        """A panel per method and pair, with a curve per key; the author's colour. Of several keys only those show
        that are ever above 0."""
        panels = [
            Panel(
                title=f"{learner} ← {author}",
                kind="lines",
                method=method.name,
                agent=author,
                series=[
                    Series(method=method.name, agent=author, curve=found, label=label)
                    for key, label in zip(keys, labels or [""] * len(keys), strict=True)
                    if (found := curve(_columns(method, f"pair/{learner}/{author}/{key}"), bin_steps=width))
                    and (any(found.mean) or not labels)
                ],
            )
            for method in sharing
            for learner, author in method.pairs
        ]
        named = [f"pair/<learner>/<author>/{key}" for key in keys]
        return Chart(id=id, section="sharing", title=title, caption=caption, keys=named, unit=unit, panels=panels)

    capability = [
        Panel(
            title=method.name,
            kind="lines",
            method=method.name,
            series=[
                Series(method=method.name, agent=agent, label=agent, curve=found)
                for agent in method.agents
                if (found := curve(_columns(method, f"agent/{agent}/capability"), bin_steps=width))
            ],
        )
        for method in sharing
    ]
    shares = [
        Panel(
            title=f"{learner} ← {author}",
            kind="areas",
            method=method.name,
            agent=author,
            series=[
                Series(method=method.name, agent=None, label=part, curve=found)
                for part in ("inside", "below", "above")
                if (found := curve(_columns(method, f"pair/{learner}/{author}/{part}_share"), bin_steps=width))
            ],
        )
        for method in sharing
        for learner, author in method.pairs
    ]
    read = f"{sample.steps_read:,} of {sample.steps_there:,} step files"
    return [
        Chart(
            id="capability",
            section="sharing",
            title="Capability",
            caption="How strong each agent is by its latest answers, averaged over a few steps. HACPO weighs the "
            "answers of stronger agents more.",
            keys=["agent/<agent>/capability"],
            unit="share",
            panels=capability,
        ),
        by_pair(
            "omega",
            "Capability ratio ω",
            "Capability of the author over that of the learner. Above 1 the learner listens to a stronger agent, and "
            "its answers count more; below 1 less.",
            ["omega"],
            unit="number",
        ),
        Chart(
            id="ratios",
            section="sharing",
            title="Where foreign answers lie: the ratio s",
            caption="s tells how likely the learner finds an answer, compared with its author: 1 means equally likely. "
            "Where a band is shaded, only answers inside it are learned from; the dashed line is where its lower edge "
            f"has moved by the last update of a step. The last bin holds everything above. From {read}.",
            keys=["ratios in rollouts/*.jsonl"],
            unit="share",
            panels=_ratio_panels(sharing, sample),
        ),
        Chart(
            id="shares",
            section="sharing",
            title="Foreign answers inside the band",
            caption="Share of foreign rows that the learner could use (inside), found too unlikely (below) or too "
            "likely (above). Rows outside give no gradient; a method without a band has all inside.",
            keys=[f"pair/<learner>/<author>/{part}_share" for part in ("below", "inside", "above")],
            unit="share",
            panels=shares,
        ),
        by_pair(
            "weight",
            "Part of the gradient",
            "How much of what moved the learner came from this author. Near 0, nothing is shared in effect.",
            ["weight_share"],
            unit="share",
        ),
        by_pair(
            "ess",
            "Effective sample size",
            "How many equally weighted rows the weighted foreign rows are worth. Far below the rows inside the band, "
            "a few answers decide.",
            ["effective_sample_size"],
            unit="number",
        ),
        by_pair(
            "drift",
            "Length change by the other tokenizer",
            "How many tokens more (or fewer) an answer takes in the learner's tokenizer than in its author's. Large "
            "differences make s compare unlike pieces.",
            ["length_change_mean"],
            unit="number",
        ),
        by_pair(
            "lost",
            "Answers lost or changed on the way",
            "Foreign rows per step that were dropped, cut, or read differently after the learner's tokenizer. What "
            "never happened is left out.",
            [
                "round_trip_failures",
                "truncated",
                "dropped/too_long",
                "dropped/cut_off",
                "dropped/empty",
                "dropped/logprob_not_finite",
            ],
            unit="number",
            labels=["changed by tokenizer", "cut", "too long", "cut off", "empty", "no log-probability"],
        ),
    ]


def _ratio_panels(sharing: Sequence[Method], sample: Sample) -> list[Panel]:
    panels = []
    for method in sharing:
        for learner, author in method.pairs:
            found = sample.ratios.get((method.name, learner, author))
            if found is None:
                continue
            total = sum(found.counts)
            panels.append(
                Panel(
                    title=f"{learner} ← {author}",
                    kind="histogram",
                    method=method.name,
                    agent=author,
                    bars=[[count / total for count in found.counts]],
                    bins=BIN,
                    band=band(method),
                    note=f"{total:,} rows; the last bin is {BIN * (BINS - 1):.2f} and more",
                )
            )
    return panels


# ---------------------------------------------------------------- health


def _health(methods: Sequence[Method]) -> list[Chart]:
    def by_agent(id: str, metric: str, title: str, caption: str, *, unit: Unit) -> Chart:
        return _metric_by_agent(id, "health", title, caption, metric, methods, unit=unit)

    return [
        _by_agent(
            "clip",
            "health",
            "Own answers clipped",
            "Share of an agent's own answers (under GRPO: tokens) whose gradient the clip stopped.",
            ["1 - pair/<agent>/<agent>/inside_share", "pair/<agent>/<agent>/clipped_fraction"],
            methods,
            _clipped,
            unit="share",
        ),
        by_agent(
            "zero-variance",
            "zero_variance_share",
            "Tasks without a lesson",
            "Share of tasks whose answers were all equally good, so that nothing could be learned. Above one half, the "
            "tasks are too easy or too hard, or the groups too small.",
            unit="share",
        ),
        by_agent(
            "entropy",
            "entropy",
            "Entropy",
            "How open the agent still is between tokens, in nats per token. It falls slowly in a healthy run; near 0 "
            "nothing new is tried.",
            unit="number",
        ),
        by_agent(
            "truncation",
            "truncated_rate",
            "Answers cut off",
            "Share of answers that hit the length limit before they ended. Above 5 %, raise max_new_tokens.",
            unit="share",
        ),
        by_agent(
            "length",
            "completion_tokens_mean",
            "Length of answers",
            "Mean tokens of an answer. A fast rise to the limit means rambling.",
            unit="number",
        ),
        by_agent(
            "grad-norm",
            "grad_norm",
            "Gradient norm",
            "Mean norm of the gradient before clipping. It should be steady; rising without end means that the "
            "learning rate is too high.",
            unit="number",
        ),
        by_agent(
            "kl",
            "kl",
            "KL to the starting weights",
            "How far the agent has moved from where it started, in nats.",
            unit="number",
        ),
        _memory(methods),
    ]


def _clipped(run: Run, agent: str) -> ByStep:
    inside = run.column(f"pair/{agent}/{agent}/inside_share")
    return {step: 1 - share for step, share in inside.items()} or run.column(f"pair/{agent}/{agent}/clipped_fraction")


def _memory(methods: Sequence[Method]) -> Chart:
    names = sorted(
        {name for method in methods for run in method.runs for name in run.metrics if name.startswith("memory/")}
    )
    width = bin_steps(methods)
    panels = []
    for name in names:
        series = [
            Series(method=method.name, agent=None, curve=found)
            for method in methods
            if (found := curve(_columns(method, name), bin_steps=width))
        ]
        panels.append(Panel(title=name, kind="lines", agent=None, series=series))
    return Chart(
        id="memory",
        section="health",
        title="Memory",
        caption="GiB at the end of each step (main memory), and the most during it (devices). A steady rise is a leak.",
        keys=names,
        unit="number",
        panels=panels,
    )


# ---------------------------------------------------------------- where the time went


def _work(methods: Sequence[Method]) -> Chart:
    """The last steps of each method's first run that has a timeline: the others of a method look alike."""
    panels = []
    for method in methods:
        run, found = next(((run, found) for run in method.runs if (found := work(run))), (None, None))
        if run is None or found is None:
            continue
        first, last = found.marks[0].step, found.marks[-1].step
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        lost = [
            *([f"{found.left_out:,} shorter spans are not shown"] if found.left_out else []),
            *([f"{found.unreadable:,} lines of {TIMELINE} could not be read"] if found.unreadable else []),
        ]
        note = f"{'; '.join(lost)}." if lost else ""
        panels.append(Panel(title=f"{run.name}, {steps}", kind="work", method=method.name, work=found, note=note))
    return Chart(
        id="work",
        section="time",
        title="Who was at work, and who waited",
        caption="A lane for each process, a bar for each piece of work: where a lane is empty, its process was idle. "
        "The last lane is the loop, which mostly waits for the agents. Dotted lines tell where it began a step. Each "
        "machine has its own clock, so lanes of different machines may be shifted.",
        keys=[TIMELINE],
        unit="seconds",
        panels=panels,
    )


def _time(methods: Sequence[Method]) -> Chart:
    rows = {method.name: _phase_seconds(method) for method in methods}
    rows = {name: row for name, row in rows.items() if any(row)}
    panel = Panel(
        title="Seconds per run",
        kind="bars",
        series=[],
        labels=list(rows),
        bars=[list(row) for row in rows.values()],
    )
    return Chart(
        id="time",
        section="time",
        title="Time by phase",
        caption="What the loop did or waited for, on average over a method's seeds: sampling answers, scoring them, "
        "updating weights, held-out evaluation, checkpoints, and the rest (loading excepted).",
        keys=[f"time/{phase}" for phase in (*PHASES, "total")],
        unit="seconds",
        panels=[panel],
    )


def _phase_seconds(method: Method) -> list[float]:
    def total(phase: str) -> float:
        return statistics.fmean(sum(run.column(f"time/{phase}").values()) for run in method.runs)

    phases = [total(phase) for phase in PHASES]
    return [*phases, max(0.0, total("total") - sum(phases))]


# ---------------------------------------------------------------- what the charts share


def _metric_by_agent(
    id: str, section: Section, title: str, caption: str, metric: str, methods: Sequence[Method], *, unit: Unit
) -> Chart:
    return _by_agent(
        id,
        section,
        title,
        caption,
        [f"agent/<agent>/{metric}"],
        methods,
        lambda run, agent: run.column(f"agent/{agent}/{metric}"),
        unit=unit,
    )


def _by_agent(
    id: str,
    section: Section,
    title: str,
    caption: str,
    keys: list[str],
    methods: Sequence[Method],
    values: Callable[[Run, str], ByStep],
    *,
    unit: Unit,
    mean: bool = False,
) -> Chart:
    """A panel per agent with a curve per method; `mean` adds one of the mean over agents."""
    agents = list(dict.fromkeys(agent for method in methods for agent in method.agents))
    width = 1 if mean else bin_steps(methods)
    panels = [
        Panel(
            title=agent,
            kind="lines",
            agent=agent,
            series=[
                Series(method=method.name, agent=agent, curve=found)
                for method in methods
                if (found := curve([values(run, agent) for run in method.runs if agent in run.agents], bin_steps=width))
            ],
        )
        for agent in agents
    ]
    if mean and len(agents) > 1:
        series = [
            Series(method=method.name, agent=None, curve=found)
            for method in methods
            if set(method.agents) == set(agents) and (found := curve([_mean(run, values) for run in method.runs]))
        ]
        panels.append(Panel(title="mean of agents", kind="lines", series=series))
    return Chart(id=id, section=section, title=title, caption=caption, keys=keys, unit=unit, panels=panels)


def _mean(run: Run, values: Callable[[Run, str], ByStep]) -> dict[int, float]:
    """Mean over the run's agents, at steps that all of them have."""
    of_agents = [values(run, agent) for agent in run.agents]
    steps = set(of_agents[0]).intersection(*of_agents)
    return {step: statistics.fmean(found[step] for found in of_agents) for step in sorted(steps)}


def _columns(method: Method, name: str) -> list[Mapping[int, float]]:
    return [run.column(name) for run in method.runs if run.column(name)]
