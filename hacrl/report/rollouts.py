"""Rollouts of all runs: a spread of whole task groups to read, and the distribution of the sequence ratio s.

Rollout files grow without end and a page must not, so both come from a part of them, by the rule that `RULE` tells.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hacrl.report.methods import Method
from hacrl.report.runs import json_rows, number

T = TypeVar("T")
_Rows = list[dict[str, Any]]

# Bytes of rollout files to read, shared equally by the runs: what takes a few seconds.
MOST_BYTES = 240_000_000
MOST_ROLLOUTS = 2000
# Kept of one step while reading, so that memory does not grow with the batch.
MOST_GROUPS_OF_STEP = 24
# Groups with the largest advantages, per run: an even spread would miss what moved the weights most.
EXTREME_GROUPS = 3
# Longer texts keep their head and their tail, where the final answer is.
HEAD, TAIL = 4000, 2000

RULE = (
    "From each run an even spread of whole task groups (all answers to one task at one step) over its steps, first and "
    f"last included, and the {EXTREME_GROUPS} groups with the largest advantages of the steps that were read. Texts of "
    f"more than {HEAD + TAIL:,} characters keep their first {HEAD:,} and last {TAIL:,}."
)

# Bins of s; the last one holds everything above.
BIN = 0.04
BINS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """How often s fell into each bin `[i * BIN, (i + 1) * BIN)`, for one method, learner and author."""

    counts: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, s: float) -> None:
        self.counts[min(int(s / BIN), BINS - 1)] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Groups to show and the ratios that were read.

    groups      JSON-able, in order of run and step; `run` counts the runs of all methods in their order.
    total       rollouts that the runs made; `shown` of them are in `groups`.
    ratios      by (method, learner, author).
    steps_read, steps_there  step files behind the ratios, of all runs together.
    unreadable  lines of rollout files that could not be read.
    """

    groups: list[dict[str, Any]]
    total: int
    ratios: Mapping[tuple[str, str, str], Ratios]
    steps_read: int
    steps_there: int
    unreadable: int

    @property
    def shown(self) -> int:
        return sum(len(group["rollouts"]) for group in self.groups)

    def thinned(self, groups: int) -> Sample:
        """The same with an even spread of at most `groups` groups."""
        return Sample(
            groups=spread(self.groups, groups),
            total=self.total,
            ratios=self.ratios,
            steps_read=self.steps_read,
            steps_there=self.steps_there,
            unreadable=self.unreadable,
        )


def sample(methods: Sequence[Method]) -> Sample:
    """Read rollout files by `RULE`."""
    runs = [(method.name, run) for method in methods for run in method.runs]
    groups: list[dict[str, Any]] = []
    ratios: dict[tuple[str, str, str], Ratios] = {}
    total = read = there = unreadable = 0
    for place, (method, run) in enumerate(runs):
        files = _step_files(run.path)
        chosen = _within(files, MOST_BYTES // len(runs))
        there += len(files)
        read += len(chosen)
        sampled = sum(run.column("rollouts").values())
        reader = _Reader(run=place, method=method, ratios=ratios)
        for file in chosen:
            reader.read(file)
        groups += reader.groups(MOST_ROLLOUTS // len(runs))
        total += int(sampled) or reader.rollouts
        unreadable += reader.unreadable
    return Sample(
        groups=groups,
        total=total,
        ratios=ratios,
        steps_read=read,
        steps_there=there,
        unreadable=unreadable,
    )


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spread, the first and the last included where `most` is two or more."""
    if len(items) <= most:
        return list(items)
    if most <= 1:
        return list(items[:most])
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


class _Reader:
    """Takes in one run's step files one after the other and keeps only what may be shown."""

    def __init__(self, *, run: int, method: str, ratios: dict[tuple[str, str, str], Ratios]) -> None:
        self.rollouts = self.unreadable = 0
        self._run, self._method, self._ratios = run, method, ratios
        self._by_step: list[list[_Rows]] = []
        self._extreme: list[tuple[float, int, _Rows]] = []
        self._groups_seen = 0

    def read(self, file: Path) -> None:
        by_task: dict[str, _Rows] = {}
        for row in json_rows(file):
            if row is None or not isinstance(row.get("step"), int) or not isinstance(row.get("text"), str):
                self.unreadable += 1
                continue
            self.rollouts += 1
            by_task.setdefault(str(row.get("task_id")), []).append(row)
            for learner, s in _numbers(row.get("ratios")).items():
                key = (self._method, learner, str(row.get("author")))
                self._ratios.setdefault(key, Ratios()).add(s)
        groups = list(by_task.values())
        for rows in groups:
            size = max((abs(value) for row in rows for value in _numbers(row.get("advantages")).values()), default=0.0)
            self._groups_seen += 1
            # The count comes before the rows so that equals are never compared by them; earlier ones win.
            entry = (size, -self._groups_seen, rows)
            if len(self._extreme) < EXTREME_GROUPS:
                heapq.heappush(self._extreme, entry)
            else:
                heapq.heappushpop(self._extreme, entry)
        self._by_step.append(spread(groups, MOST_GROUPS_OF_STEP))

    def groups(self, most_rollouts: int) -> list[dict[str, Any]]:
        """What to show of this run: at most so many rollouts, but one group at least."""
        every = [rows for groups in self._by_step for rows in groups]
        if not every:
            return []
        of_group = max(len(rows) for rows in every)
        most = max(1, most_rollouts // of_group - EXTREME_GROUPS)
        per_step = max(1, most // len(self._by_step))
        even = spread([rows for groups in self._by_step for rows in groups[:per_step]], most)
        chosen = {id(rows): rows for rows in [*even, *(rows for _, _, rows in self._extreme)]}
        return sorted(
            (_group(self._run, rows) for rows in chosen.values()), key=lambda group: (group["step"], group["task"])
        )


def _step_files(path: Path) -> list[Path]:
    return sorted(
        (file for file in (path / "rollouts").glob("step-*.jsonl") if re.fullmatch(r"step-\d{6,}", file.stem)),
        key=lambda file: int(file.stem.removeprefix("step-")),
    )


def _within(files: Sequence[Path], most_bytes: int) -> list[Path]:
    """An even spread of files that together hold at most so many bytes, one file at least."""
    sizes = {file: file.stat().st_size for file in files}
    count = len(files)
    while count > 1 and sum(sizes[file] for file in spread(files, count)) > most_bytes:
        count = min(count - 1, max(1, count * 3 // 4))
    return spread(files, count)


def _group(run: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "run": run,
        "step": rows[0]["step"],
        "task": str(rows[0].get("task_id")),
        "prompt": list(_messages(rows[0].get("prompt"))),
        "rollouts": [_rollout(row) for row in rows],
    }


def _rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    text, cut = _cut(row["text"])
    shown = {
        "author": str(row.get("author")),
        "index": row.get("index"),
        "text": text,
        "cut": cut,
        "finish": row.get("finish_reason"),
        "tokens": row.get("tokens"),
        "logprob": number(row.get("mean_logprob")),
        "reward": number(row.get("reward")),
        "scores": row.get("scores"),
        "answer": None if row.get("answer") is None else _cut(str(row["answer"]))[0],
        "unscored": row.get("unscored"),
        "detail": None if row.get("detail") is None else _cut(str(row["detail"]))[0],
        "advantages": _numbers(row.get("advantages")),
        "ratios": _numbers(row.get("ratios")),
    }
    return {key: value for key, value in shown.items() if value not in (None, {}, 0) or key == "reward"}


def _messages(prompt: Any) -> Iterator[tuple[str, str]]:
    for message in prompt if isinstance(prompt, list) else [{"role": "", "content": prompt}]:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else ("", message)
        text, cut = _cut(content if isinstance(content, str) else json.dumps(content))
        yield str(role), text + (f"\n[{cut:,} characters left out]" if cut else "")


def _cut(text: str) -> tuple[str, int]:
    left_out = len(text) - HEAD - TAIL
    return (text, 0) if left_out <= 0 else (f"{text[:HEAD]}\n[...]\n{text[-TAIL:]}", left_out)


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {str(key): found for key, value in values.items() if (found := number(value)) is not None}
