"""Wall-clock time by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Sums seconds by phase between two laps; `on_phase` is told the name of each phase as it begins."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._on_phase is not None:
            self._on_phase(name)
        start, begin = time.perf_counter(), time.time()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._spans.append((name, begin, begin + seconds))

    def spans(self) -> list[tuple[str, float, float]]:
        """Name, begin and end (seconds since 1970) of the phases that have ended since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, and `total` with everything in between; starts a new lap."""
        now = time.perf_counter()
        seconds = {**self._seconds, "total": now - self._start}
        self._seconds, self._start = {}, now
        return seconds
