"""The tables of a report as plain data: results by method, what passed between agents, and the runs themselves."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from hacrl.report.figures import band
from hacrl.report.methods import Method
from hacrl.report.runs import Comparison, number
from hacrl.report.scores import Measure

DROPS = ("too_long", "cut_off", "empty", "logprob_not_finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """`rows` hold texts; `text_columns` of them are texts, the others numbers and right-aligned."""

    id: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    marked: list[int] = field(default_factory=list[int])


def results_table(methods: Sequence[Method], measure: Measure) -> Table:
    """Start and end of every agent under every method, and what sharing made of it."""
    controls = {agent: measure.control(methods, agent) for agent in measure.agents}
    names = {control.name for control in controls.values() if control}
    sharing = [method for method in methods if method.shares] if names else []
    alone = names.pop() if len(names) == 1 else "alone"
    rows = []
    for agent in measure.agents:
        ends = [measure.end(method, agent) for method in methods]
        if not any(ends):
            continue
        row = [agent or "mean", measure.shown(measure.start(methods, agent))]
        row += [measure.shown(end) for end in ends]
        row += [measure.shown_difference(measure.gain(ours, controls[agent], agent)) for ours in sharing]
        rows.append(row)
    rows.append(
        ["rollouts per run", ""] + [_mean_sum(method, "rollouts") for method in methods] + ["" for _ in sharing]
    )
    return Table(
        id="results",
        title="",
        caption=f"{measure.name} at the end of the runs; ± is a 95 % interval over seeds. Differences are in "
        f"{'percentage points' if measure.percent else 'units of reward'}, over the seeds that both have.",
        columns=[
            "agent",
            "start",
            *(f"{method.name} ({len(method.runs)})" for method in methods),
            *(f"{ours.name} - {alone}" for ours in sharing),
        ],
        rows=rows,
        marked=[number for number, agent in enumerate(measure.agents) if agent is None][: len(rows) - 1],
    )


def comparison_table(comparison: Comparison, number_of: int) -> Table:
    """`comparison.json`'s own results, as they are."""
    others = list(dict.fromkeys(name for result in comparison.results for name in _mapping(result.get("differences"))))
    rows = []
    for result in comparison.results:
        differences, to_reach = _mapping(result.get("differences")), _mapping(result.get("to_reach"))
        cost = _mapping(result.get("cost"))
        row = [str(result.get(key, "")) for key in ("agent", "method", "source", "metric")]
        row += [_figure(result.get("start")), _with_range(result), str(result.get("runs", ""))]
        row += [_with_range(_mapping(differences.get(name)), sign="+") for name in others]
        row += [_reach(to_reach.get(name)) for name in others]
        row += [_count(number(cost.get(key))) for key in ("rollouts", "updates", "tokens", "seconds")]
        rows.append(row)
    return Table(
        id=f"comparison-{number_of}",
        title=f"Comparison at equal {comparison.axis}",
        caption=f"From {PurePath(comparison.path).name}/comparison.json: means with 95 % intervals, differences to "
        f"other methods, and how many rollouts a method needed to reach the end of another one.",
        columns=[
            *("agent", "method", "held out", "metric", "start", "end", "runs"),
            *(f"against {name}" for name in others),
            *(f"to reach {name}" for name in others),
            *("rollouts", "updates", "tokens", "seconds"),
        ],
        rows=rows,
        text_columns=4,
    )


def pair_table(methods: Sequence[Method]) -> Table | None:
    """What passed between each learner and author: means over steps and runs, and sums of what was lost."""
    rows = []
    for method in methods:
        if not method.shares:
            continue
        edge = band(method)
        for learner, author in method.pairs:
            mean = PairMeans(method, learner, author)
            rows.append(
                [
                    method.name,
                    f"{learner} ← {author}",
                    _figure(mean.of("omega")),
                    _figure(mean.of("s_mean")),
                    "none" if edge is None else f"{edge[0]:.4g} to {edge[2]:.4g}",
                    *(_share(mean.of(f"{part}_share")) for part in ("below", "inside", "above")),
                    _share(mean.of("weight_share")),
                    _figure(mean.of("effective_sample_size")),
                    _count(mean.total("rows")),
                    _figure(mean.of("length_change_mean"), sign="+"),
                    _count(mean.total("round_trip_failures")),
                    _count(mean.total(*(f"dropped/{cause}" for cause in DROPS))),
                ]
            )
    if not rows:
        return None
    return Table(
        id="pairs",
        title="What passed between the agents",
        caption="Means over steps and seeds; rows, changed and dropped are sums over all runs of the method. "
        "Metrics pair/<learner>/<author>/...",
        columns=[
            *("method", "learner ← author", "ω", "mean s", "band at first", "below", "inside", "above"),
            *("of gradient", "effective rows", "rows", "length change", "changed", "dropped"),
        ],
        rows=rows,
        text_columns=2,
    )


# Column; how often it happened, by these metrics of an agent together.
LATE = (
    ("answers too late", ("rollouts_late",)),
    ("answers too old", ("rollouts_stale",)),
    ("not waited for", ("sample_late", "update_late")),
    ("steps missed", ("steps_missed",)),
    ("steps absent", ("absent",)),
)


def time_table(methods: Sequence[Method]) -> Table | None:
    """What part of its runs' time each agent spent on what, and how often it was late; what never happened has no
    column."""
    agents = [
        (method, times) for method in methods for name in method.agents if (times := AgentTimes(method, name)).steps
    ]
    if not agents:
        return None
    late = [(title, keys) for title, keys in LATE if any(times.total(*keys) for _, times in agents)]
    aged = any(times.age for _, times in agents)
    restarted = any(_restarts(method) for method, _ in agents)
    rows = [
        [
            method.name,
            times.agent,
            *(_share(times.share(phase)) for phase in ("wait", "sample", "update", "evaluate")),
            *([_figure(times.age)] if aged else []),
            *(_count(times.total(*keys)) for _, keys in late),
            *([_count(_restarts(method))] if restarted else []),
        ]
        for method, times in agents
    ]
    return Table(
        id="time",
        title="What each agent's time went to",
        caption="Of the time of all steps of all seeds. Idle is when none of an agent's processes was at work; the "
        "other parts are summed over its processes, so that two at work at once count twice."
        + (" Counts are sums over all runs of the method." if late or restarted else "")
        + " Metrics agent/<agent>/time/...",
        columns=[
            *("method", "agent", "idle", "sampling", "updating", "evaluating"),
            *(["age of answers"] if aged else []),
            *(title for title, _ in late),
            *(["restarts of the run"] if restarted else []),
        ],
        rows=rows,
        text_columns=2,
    )


def runs_table(methods: Sequence[Method]) -> Table:
    """Where everything comes from."""
    rows = []
    for method in methods:
        for run in method.runs:
            start: Any = next(iter(_list(run.environment.get("starts"))), {})
            packages = _mapping(_mapping(start).get("packages"))
            state = "finished" if run.done >= run.planned else "unfinished"
            rows.append(
                [
                    method.name,
                    run.name,
                    ", ".join(f"{agent['name']} = {agent.get('model', '?')}" for agent in run.config["agents"]),
                    "" if run.seed is None else str(run.seed),
                    f"{run.done} of {run.planned}",
                    state,
                    str(_mapping(start).get("time", ""))[:16].replace("T", " "),
                    str(packages.get("hacrl", "")),
                    "; ".join(run.notes),
                ]
            )
    return Table(
        id="runs",
        title="Runs",
        caption="Runs that differ in nothing but their seed make one method.",
        columns=["method", "run", "agents", "seed", "steps", "state", "started (UTC)", "hacrl", "notes"],
        rows=rows,
        text_columns=9,
    )


class PairMeans:
    """Means over a method's steps and runs of one pair's metrics."""

    def __init__(self, method: Method, learner: str, author: str) -> None:
        self._columns = [
            {name.removeprefix(prefix): values for name, values in run.metrics.items() if name.startswith(prefix)}
            for prefix in [f"pair/{learner}/{author}/"]
            for run in method.runs
        ]

    def of(self, key: str) -> float | None:
        means = [statistics.fmean(columns[key].values()) for columns in self._columns if columns.get(key)]
        return statistics.fmean(means) if means else None

    def total(self, *keys: str) -> float | None:
        found = [sum(columns[key].values()) for columns in self._columns for key in keys if key in columns]
        return sum(found) if found else None


class AgentTimes:
    """Sums over a method's runs of what one agent's metrics tell of its time. `steps` counts those that tell."""

    def __init__(self, method: Method, agent: str) -> None:
        self.agent = agent
        self._runs = [run for run in method.runs if agent in run.agents]
        self._told = [run.column(f"agent/{agent}/time/wait").keys() & run.column("time/total") for run in self._runs]
        self.steps = sum(map(len, self._told))

    def share(self, phase: str) -> float | None:
        """Seconds of a phase, or `wait`, over those of the steps."""
        spent = whole = 0.0
        for run, steps in zip(self._runs, self._told, strict=True):
            seconds, total = run.column(f"agent/{self.agent}/time/{phase}"), run.column("time/total")
            spent += sum(seconds.get(step, 0.0) for step in steps)
            whole += sum(total[step] for step in steps)
        return spent / whole if whole else None

    @property
    def age(self) -> float | None:
        """Mean age of its answers in updates; None where runs have no such metric."""
        ages = [age for run in self._runs for age in run.column(f"agent/{self.agent}/staleness").values()]
        return statistics.fmean(ages) if ages else None

    def total(self, *keys: str) -> float:
        return sum(sum(run.column(f"agent/{self.agent}/{key}").values()) for run in self._runs for key in keys)


def _restarts(method: Method) -> float:
    """Restarts of a method's runs; the metric counts anew from each start of `hacrl train`."""
    restarts = 0.0
    for run in method.runs:
        before = 0.0
        for _, count in sorted(run.column("execution/restarts").items()):
            restarts += count - before if count >= before else count
            before = count
    return restarts


def _mean_sum(method: Method, metric: str) -> str:
    sums = [sum(run.column(metric).values()) for run in method.runs if run.column(metric)]
    return _count(statistics.fmean(sums)) if sums else ""


def _with_range(result: Mapping[str, Any], *, sign: str = "") -> str:
    mean, low, high = (_figure(result.get(key), sign=sign) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" if low and high else mean


def _reach(reach: Any) -> str:
    if not isinstance(reach, Mapping):
        return ""
    needed, share = number(reach.get("rollouts")), number(reach.get("share"))
    if needed is None:
        return "not reached"
    return _count(needed) + (f" ({share:.0%})" if share is not None else "")


def _figure(value: Any, *, sign: str = "") -> str:
    found = number(value)
    return "" if found is None else f"{found:{sign}.3f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else []
