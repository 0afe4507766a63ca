"""Curves of a method: means over its runs at each step, with a band over seeds, and what a step cost by then."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hacrl.report.intervals import over_seeds
from hacrl.report.methods import Method
from hacrl.report.runs import Run, number

AXES = ("steps", "rollouts", "tokens", "seconds")
# A curve with more points than this is averaged over bins of steps: no screen shows more.
MOST_POINTS = 200

ByStep = Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Values over steps: mean over runs, 95 % interval over seeds (None where there is one run), number of runs."""

    steps: list[int]
    mean: list[float]
    low: list[float | None]
    high: list[float | None]
    runs: list[int]

    def __bool__(self) -> bool:
        return bool(self.steps)


def curve(runs: Sequence[ByStep], *, bin_steps: int = 1) -> Curve:
    """Mean over runs at every step that any of them has; bins of `bin_steps` are averaged in each run first."""
    binned = [_binned(run, bin_steps) for run in runs]
    steps = sorted(set().union(*binned)) if binned else []
    found = [[run[step] for run in binned if step in run] for step in steps]
    intervals = [over_seeds(values) for values in found]
    return Curve(
        steps=steps,
        mean=[interval.mean for interval in intervals],
        low=[interval.low for interval in intervals],
        high=[interval.high for interval in intervals],
        runs=[len(values) for values in found],
    )


def bin_steps(methods: Sequence[Method]) -> int:
    """Steps that are averaged into one point, the same for all of a report."""
    longest = max((run.done for method in methods for run in method.runs), default=0)
    return max(1, -(-longest // MOST_POINTS))


def held_out(run: Run, agent: str, split: str | None = None) -> dict[int, float]:
    """avg@k by step; the mean over splits where none is named."""
    found: dict[int, dict[str, float]] = {}
    for entry in run.evaluations:
        value = number(entry.get("avg@k"))
        name = str(entry.get("split", "eval"))
        if entry["agent"] == agent and value is not None and split in (None, name):
            found.setdefault(entry["step"], {})[name] = value
    return {step: statistics.fmean(by_split.values()) for step, by_split in sorted(found.items())}


def costs(method: Method, agent: str | None) -> dict[str, dict[int, float]]:
    """For each axis, what had been spent after each step, step 0 included: the mean over the method's runs.

    Rollouts and tokens are those that `agent` sampled, or all of the run's where it samples none or is None. Seconds
    are the whole run's, held-out evaluation excepted. An axis whose metrics a run lacks is empty.
    """
    spent: dict[str, Callable[[Run], ByStep]] = {
        "rollouts": lambda run: _sampled(run, agent)[0],
        "tokens": lambda run: _sampled(run, agent)[1],
        "seconds": _seconds,
    }
    steps = sorted({0}.union(*(run.steps for run in method.runs)))
    result: dict[str, dict[int, float]] = {"steps": {step: float(step) for step in steps}}
    for axis, of_run in spent.items():
        sums = [_cumulative(run, of_run(run)) for run in method.runs]
        known = [run for run in sums if run]
        result[axis] = {
            step: statistics.fmean(found) for step in steps if (found := [run[step] for run in known if step in run])
        }
    return result


def _sampled(run: Run, agent: str | None) -> tuple[ByStep, ByStep]:
    texts = run.column(f"agent/{agent}/reward/texts")
    lengths = run.column(f"agent/{agent}/completion_tokens_mean")
    if not texts:
        return run.column("rollouts"), run.column("tokens_sampled")
    return texts, {step: count * lengths[step] for step, count in texts.items() if step in lengths}


def _seconds(run: Run) -> ByStep:
    evaluation = run.column("time/evaluate")
    return {step: seconds - evaluation.get(step, 0.0) for step, seconds in run.column("time/total").items()}


def _cumulative(run: Run, spent: ByStep) -> dict[int, float]:
    if not spent:
        return {}
    sums = accumulate(spent.get(step, 0.0) for step in run.steps)
    return {0: 0.0, **dict(zip(run.steps, sums, strict=True))}


def _binned(values: ByStep, width: int) -> ByStep:
    if width == 1:
        return values
    bins: dict[int, list[float]] = {}
    for step, value in values.items():
        bins.setdefault(-(-step // width) * width, []).append(value)
    last = max(values, default=0)
    # A bin stands at its last step, for what was spent by then is known there.
    return {min(step, last): statistics.fmean(found) for step, found in bins.items()}
