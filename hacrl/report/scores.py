"""The number by which a report compares methods: held-out accuracy, or training reward where there is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.report.intervals import NORMAL_95, Interval, difference, over_seeds
from hacrl.report.methods import Method, control_of
from hacrl.report.runs import Run, number
from hacrl.report.series import held_out

# Training reward is noisy from step to step, so its end is a mean over the last steps.
LAST_STEPS = 5


class Measure:
    """Scores of agents at the start and the end of runs, `None` as agent being the mean of all agents of a run."""

    def __init__(self, methods: Sequence[Method]) -> None:
        runs = [run for method in methods for run in method.runs]
        evaluated = [entry for run in runs for entry in run.evaluations]
        self.held_out = any(held_out(run, agent) for run in runs for agent in run.agents)
        k = sorted({str(entry.get("k", "k")) for entry in evaluated})
        self.name = (
            f"Held-out avg@{' or '.join(k)}"
            if self.held_out
            else f"Training reward (nothing was held out), mean of {LAST_STEPS} steps,"
        )
        scores = [score for run in runs for agent in run.agents for score in self._by_step(run, agent).values()]
        self.percent = bool(scores) and all(0 <= score <= 1 for score in scores)
        names = list(dict.fromkeys(agent for method in methods for agent in method.agents))
        self.names = names
        self.agents: list[str | None] = [*names, None] if len(names) > 1 else [*names]

    def end(self, method: Method, agent: str | None) -> Interval | None:
        values = list(self._ends(method, agent).values())
        return over_seeds(values) if values else None

    def start(self, methods: Sequence[Method], agent: str | None) -> Interval | None:
        values = [
            score for method in methods for run in method.runs if (score := self._score(run, agent, 0)) is not None
        ]
        return Interval(mean=statistics.fmean(values)) if values else None

    def control(self, methods: Sequence[Method], agent: str | None) -> Method | None:
        """The method that shows `agent`, or all agents, learning alone."""
        return control_of(methods, self.names if agent is None else [agent])

    def gain(self, ours: Method, theirs: Method | None, agent: str | None) -> Interval | None:
        """What `ours` ends above `theirs`."""
        return None if theirs is None else difference(self._ends(ours, agent), self._ends(theirs, agent))

    def task_error(self, methods: Sequence[Method], agent: str | None) -> float | None:
        """Half the 95 % interval of the difference of two methods' ends from the held-out tasks alone, one seed each:
        how well two accuracies are known, not how they would vary over training. None for the mean of agents, who
        answer the same tasks.
        """
        ends = [entry for method in methods for run in method.runs if (entry := _last_entry(run, agent))]
        errors = [number(entry.get("avg@k_stderr")) for entry in ends]
        known = [error for error in errors if error is not None]
        return NORMAL_95 * math.hypot(*known) if len(known) == len(methods) else None

    def shown(self, value: Interval | None) -> str:
        if value is None:
            return ""
        factor, digits = (100, 1) if self.percent else (1, 3)
        half = "" if value.half is None else f" ± {factor * value.half:.{digits}f}"
        return f"{factor * value.mean:.{digits}f}{half}"

    def shown_difference(self, value: Interval | None) -> str:
        text = self.shown(value)
        return text if not text or text.startswith("-") else f"+{text}"

    def _ends(self, method: Method, agent: str | None) -> dict[int, float]:
        # A run without a seed of its own is told apart by its place.
        return {
            run.seed if isinstance(run.seed, int) else -1 - place: score
            for place, run in enumerate(method.runs)
            if (score := self._score(run, agent, -1)) is not None
        }

    def _score(self, run: Run, agent: str | None, place: int) -> float | None:
        """The score at the first (`place` 0) or last (-1) step that has one."""
        if agent is None:
            # A mean over other agents would be another quantity.
            found = [self._score(run, name, place) for name in self.names]
            known = [score for score in found if score is not None]
            return statistics.fmean(known) if len(known) == len(found) else None
        by_step = self._by_step(run, agent)
        values = list(by_step.values())
        if not values or agent not in run.agents:
            return None
        if self.held_out:
            if place == 0 and min(by_step) > 0:
                return None
            return values[place]
        return statistics.fmean(values[:LAST_STEPS] if place == 0 else values[-LAST_STEPS:])

    def _by_step(self, run: Run, agent: str) -> dict[int, float]:
        if self.held_out:
            return held_out(run, agent)
        return dict(sorted(run.column(f"agent/{agent}/reward/mean").items()))


def _last_entry(run: Run, agent: str | None) -> Mapping[str, Any] | None:
    """The last evaluation, where it is one split."""
    entries = [entry for entry in run.evaluations if entry["agent"] == agent]
    last = [entry for entry in entries if entry["step"] == entries[-1]["step"]]
    return last[0] if len(last) == 1 else None
