"""When each agent was at work: spans of time, and what of a step they leave idle."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Phases of a step whose seconds are told for each agent.
TIMED_PHASES = ("sample", "update", "evaluate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One process of an agent at work, from `begin` to `end` in seconds since 1970, by the clock of its machine."""

    agent: str
    process: str
    phase: str
    begin: float
    end: float


class Timeline:
    """Gathers spans, and sums them up from lap to lap."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._spans: list[Span] = []
        self._start = time.time()
        # Seconds of work that a lap was told of beyond its own length: work of the lap before, told later.
        self._carried = dict.fromkeys(self._names, 0.0)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def lap(self) -> tuple[dict[str, dict[str, float]], tuple[Span, ...]]:
        """What has been told since the last lap; starts a new one.

        By agent: seconds of each timed phase, summed over its processes, and `wait`, the seconds of the lap in which
        none of its processes was at work, whatever for. Work that goes on across laps counts in the lap in which it
        ended, as far as that is long enough, and then in the next ones.
        """
        now = time.time()
        spans, self._spans = tuple(self._spans), []
        seconds: dict[str, dict[str, float]] = {}
        for name in self._names:
            mine = [span for span in spans if span.agent == name]
            own = seconds[name] = {}
            for span in mine:
                if span.phase in TIMED_PHASES:
                    own[span.phase] = own.get(span.phase, 0.0) + span.end - span.begin
            wait = now - self._start - _covered(mine) - self._carried[name]
            self._carried[name] = max(0.0, -wait)
            own["wait"] = max(0.0, wait)
        self._start = now
        return seconds, spans


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans was under way."""
    covered, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return covered


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """What a fleet has to tell of the time since the last lap. `counts` holds metrics by agent: what was late, ..."""

    seconds: Mapping[str, Mapping[str, float]]
    counts: Mapping[str, Mapping[str, float]]
    spans: tuple[Span, ...]
