"""Which process was at work when, in a run's last steps: the end of `timeline.jsonl`, laid out in lanes.

The file grows without end, so it is read from its end, and never more of it than `MOST_BYTES`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.report.runs import Run, number

TIMELINE = "timeline.jsonl"
LAST_STEPS = 5
# More bars than this are slow to draw, and on no screen wide enough to see.
MOST_SPANS = 1500
MOST_BYTES = 8_000_000
BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One line of the file: `begin` and `end` in seconds since 1970; `agent` is None for the loop itself."""

    step: int
    agent: str | None
    process: str
    phase: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A span as it is drawn: `lane` counts from the top, `begin` is in seconds from where the chart begins.

    Negative where the work began before that, which is then not drawn whole.
    """

    lane: int
    phase: str
    step: int
    begin: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Where the loop began a step, in seconds from where the chart begins."""

    step: int
    begin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Some consecutive steps of one run.

    lanes       names of processes: those of an agent next to each other, agents in the configuration's order, the loop
                last.
    labels      the same with the agent's name at its first lane alone.
    groups      first lane of each agent, and of the loop.
    seconds     length of the time that is shown.
    left_out    shorter spans for which there is no room.
    unreadable  lines that were passed over.
    """

    lanes: list[str]
    labels: list[str]
    groups: list[int]
    bars: list[Bar]
    marks: list[Mark]
    seconds: float
    left_out: int
    unreadable: int


def work(run: Run) -> Work | None:
    """The run's last steps as lanes of bars, None where it has no timeline.

    Steps that are not in `metrics.jsonl` are not shown; nor are those before a pause that is longer than the steps on
    both of its sides, in which the run was not running.
    """
    path = run.path / TIMELINE
    if not path.is_file():
        return None
    by_step, unreadable = _last_steps(path, until=run.done)
    steps = _without_pause(by_step)
    found = [span for step in steps for span in by_step[step]]
    if not found:
        return None
    spans = sorted(found, key=lambda span: span.begin - span.end)[:MOST_SPANS]
    begins = {step: _loop_begin(by_step[step]) for step in steps}
    first, end = begins[steps[0]], max(span.end for span in spans)
    # Work of an agent that is late may have begun long before: one step's length of it says enough.
    start = max(min(span.begin for span in spans), first - (end - first) / len(steps))
    spans = sorted((span for span in spans if span.end >= start), key=lambda span: (span.begin, span.end))
    places = sorted({(span.agent, span.process) for span in spans}, key=lambda place: _order(run, *place))
    groups = [lane for lane, (agent, _) in enumerate(places) if lane == 0 or places[lane - 1][0] != agent]
    return Work(
        lanes=[_name(*place) for place in places],
        labels=[
            _name(*place) if lane in groups else place[1].removeprefix(f"{place[0]}.")
            for lane, place in enumerate(places)
        ],
        groups=groups,
        bars=[
            Bar(
                lane=places.index((span.agent, span.process)),
                phase=span.phase,
                step=span.step,
                begin=span.begin - start,
                seconds=span.end - span.begin,
            )
            for span in spans
        ],
        marks=[Mark(step=step, begin=begin - start) for step, begin in begins.items()],
        seconds=end - start,
        left_out=max(0, len(found) - MOST_SPANS),
        unreadable=unreadable,
    )


def _last_steps(path: Path, *, until: int) -> tuple[dict[int, list[Span]], int]:
    """Spans of the last steps up to `until`, as many whole ones as may be shown, by step; and the unreadable lines.

    Of a last step that is too large by itself the part that was read.
    """
    by_step: dict[int, list[Span]] = {}
    unreadable = spans = 0
    whole = path.stat().st_size <= MOST_BYTES
    for line in _backwards(path):
        span = _span(line)
        if span is None:
            unreadable += 1
        elif span.step <= until:
            if span.step not in by_step and (len(by_step) == LAST_STEPS or spans > MOST_SPANS):
                whole = True
                break
            by_step.setdefault(span.step, []).append(span)
            spans += 1
    # Walking backwards, the step that does not fit is the last one that was added.
    if len(by_step) > 1 and (not whole or spans > MOST_SPANS):
        by_step.popitem()
    return dict(reversed(by_step.items())), unreadable


def _backwards(path: Path) -> Iterator[bytes]:
    """A file's lines from the last to the first; what stands behind the last line end is half a line and left out."""
    with open(path, "rb") as file:
        start = size = file.seek(0, os.SEEK_END)
        tail, ended = b"", False
        while start > max(0, size - MOST_BYTES):
            length = min(BLOCK, start)
            start -= length
            file.seek(start)
            tail, *lines = (file.read(length) + tail).split(b"\n")
            if lines and not ended:
                lines.pop()
                ended = True
            yield from reversed(lines)
        if ended and start == 0:
            yield tail


def _span(line: bytes) -> Span | None:
    try:
        row = json.loads(line)
        step, agent, process, phase = (row[key] for key in ("step", "agent", "process", "phase"))
        begin, end = number(row["begin"]), number(row["end"])
    except (ValueError, KeyError, TypeError):
        return None
    texts = isinstance(process, str) and isinstance(phase, str) and (agent is None or isinstance(agent, str))
    if not texts or not isinstance(step, int) or begin is None or end is None or end < begin:
        return None
    return Span(step=step, agent=agent, process=process, phase=phase, begin=begin, end=end)


def _without_pause(by_step: dict[int, list[Span]]) -> list[int]:
    """The steps that follow the last long pause, in order."""
    steps = sorted(by_step)
    reach = {step: (_loop_begin(by_step[step]), max(span.end for span in by_step[step])) for step in steps}
    for place in range(len(steps) - 1, 0, -1):
        (begin, end), (next_begin, next_end) = reach[steps[place - 1]], reach[steps[place]]
        if next_begin - end > (end - begin) + (next_end - next_begin):
            return steps[place:]
    return steps


def _loop_begin(spans: Sequence[Span]) -> float:
    own = [span.begin for span in spans if span.agent is None]
    return min(own or [span.begin for span in spans])


def _order(run: Run, agent: str | None, process: str) -> tuple[int, str, bool, list[str | int]]:
    place = len(run.agents) + 1 if agent is None else len(run.agents)
    if agent in run.agents:
        place = run.agents.index(agent)
    numbered: list[str | int] = [
        int(part) if odd % 2 else part for odd, part in enumerate(re.split(r"([0-9]{1,9})", process))
    ]
    # An agent's samplers behind its workers, of which the first has the agent's own name.
    return place, agent or "", ".sampler-" in process, numbered


def _name(agent: str | None, process: str) -> str:
    """The process; with the agent where it has more than one agent's work, as under `execution: local`."""
    if agent is None or process == agent or process.startswith(f"{agent}."):
        return process
    return f"{agent} ({process})"
