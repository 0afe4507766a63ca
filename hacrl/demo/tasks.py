"""The demo's tasks: three steps of arithmetic, told in words, answered by a worked solution.

    question   Start with 12, minus 5, plus 9, times 2.
    solution   12 - 5 = 7
               7 + 9 = 16
               16 * 2 = 32
               #### 32

Every question has three steps of one of three kinds: two `plus` and one `minus`; two `plus` and one `times`; one of
each. The demo's two agents each misread one operation (see `hacrl.demo.build`), so the first kind is easy for one of
them, the second for the other, and the third for neither.

A task is a pure function of (split, seed, index). Training and held-out questions never meet: which split a question
belongs to is decided by a hash of its text, so no seed and no index can bring the same question into both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hacrl.types import Message, Task

Split = Literal["train", "heldout"]
Operation = Literal["plus", "minus", "times"]

SYMBOLS: Mapping[Operation, str] = {"plus": "+", "minus": "-", "times": "*"}
KINDS: Mapping[str, tuple[Operation, Operation, Operation]] = {
    "minus": ("plus", "plus", "minus"),
    "times": ("plus", "plus", "times"),
    "both": ("plus", "minus", "times"),
}
HELDOUT_SHARE = 8
"""One question in this many is held out."""

LARGEST_START = 12
LARGEST_TERM = 9
LARGEST_FACTOR = 4
LARGEST_MULTIPLICAND = 12


def calculate(value: int, operation: Operation, operand: int) -> int:
    """The result of one step."""
    match operation:
        case "plus":
            return value + operand
        case "minus":
            return value - operand
        case "times":
            return value * operand


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question with its steps: `steps` are (operation, operand) pairs, applied from left to right to `start`."""

    kind: str
    start: int
    steps: tuple[tuple[Operation, int], ...]

    @property
    def question(self) -> str:
        """What the agents are asked."""
        steps = "".join(f", {operation} {operand}" for operation, operand in self.steps)
        return f"Start with {self.start}{steps}."

    @property
    def answer(self) -> int:
        """The right answer."""
        value = self.start
        for operation, operand in self.steps:
            value = calculate(value, operation, operand)
        return value

    def solution(self, misread: Mapping[Operation, Operation] | None = None) -> str:
        """The worked solution, ending in `#### answer`.

        `misread` maps an operation to the one it is mistaken for: with {"minus": "plus"} every `12 - 5` is worked out
        as `12 - 5 = 17`, and the solution goes on from there.
        """
        value, lines = self.start, []
        for operation, operand in self.steps:
            applied = (misread or {}).get(operation, operation)
            result = calculate(value, applied, operand)
            lines.append(f"{value} {SYMBOLS[operation]} {operand} = {result}")
            value = result
        return "\n".join([*lines, f"#### {value}"])


def split_of(question: str) -> Split:
    """The split a question belongs to, decided by its text alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"


def problem(split: Split, seed: int, index: int) -> Problem:
    """Problem `index` of the stream `seed` of a split; no intermediate result is negative."""
    # A string seed goes through SHA-512, so neighbouring seeds and indices give unrelated streams.
    generator = random.Random(f"{split}/{seed}/{index}")
    # Chosen once, outside the loop: kinds whose draws are refused more often would otherwise grow rare.
    kind = generator.choice(sorted(KINDS))
    while True:
        operations = generator.sample(KINDS[kind], k=len(KINDS[kind]))
        start = value = generator.randint(2, LARGEST_START)
        steps: list[tuple[Operation, int]] = []
        for operation in operations:
            if operation == "times" and value > LARGEST_MULTIPLICAND:
                break
            operand = generator.randint(2, LARGEST_FACTOR if operation == "times" else LARGEST_TERM)
            value = calculate(value, operation, operand)
            if value < 0:
                break
            steps.append((operation, operand))
        candidate = Problem(kind=kind, start=start, steps=tuple(steps))
        if len(steps) == len(operations) and split_of(candidate.question) == split:
            return candidate


def task(split: Split, seed: int, index: int) -> Task:
    """Task `index` of the stream `seed` of a split; its columns hold the `answer` and the `kind` of question."""
    drawn = problem(split, seed, index)
    message: Message = {"role": "user", "content": drawn.question}
    return Task(
        id=f"{split}/{seed}/{index}", prompt=(message,), columns={"answer": str(drawn.answer), "kind": drawn.kind}
    )


def tasks(split: Split, *, count: int, seed: int) -> list[Task]:
    """The first `count` tasks of the stream `seed` of a split that ask different questions."""
    found: dict[str, Task] = {}
    index = 0
    while len(found) < count:
        question = problem(split, seed, index).question
        if question not in found:
            found[question] = task(split, seed, index)
        index += 1
    return list(found.values())


def train_tasks(*, count: int, seed: int = 0) -> list[Task]:
    """Tasks to train on."""
    return tasks("train", count=count, seed=seed)


def heldout_tasks(*, count: int, seed: int = 0) -> list[Task]:
    """Tasks to evaluate on; their questions occur neither in training nor in the agents' pretraining."""
    return tasks("heldout", count=count, seed=seed)
