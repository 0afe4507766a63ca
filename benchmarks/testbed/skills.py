"""The test-bed's tasks, from three reasoning-gym generators, and worked solutions for them to pretrain agents on.

    chain_sum          4 - 1 = 3 / 3 - 7 = -4 / #### -4
    gcd                98 % 58 = 40 / 58 % 40 = 18 / 40 % 18 = 4 / 18 % 4 = 2 / 4 % 2 = 0 / #### 2
    simple_equations   10*b = 82 - 12 = 70 / b = 70 / 10 = 7 / #### 7

A solution goes by the right method or by a wrong one: minus taken for plus, the first remainder taken for the divisor,
the constant moved without a change of sign. How often it is the right one makes an agent strong or weak in a skill. A
step may also slip: it goes wrong by a little, and what follows goes on from there.

Training, pretraining and held-out questions never meet: a hash of the text decides where a question belongs.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from reasoning_gym.factory import create_dataset

from hacrl.demo.pretraining import Example
from hacrl.demo.tasks import Split, split_of
from hacrl.types import Task

SKILLS: Mapping[str, Mapping[str, Any]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 60},
    "simple_equations": {
        "min_terms": 2,
        "max_terms": 2,
        "min_value": 1,
        "max_value": 9,
        "operators": ["+", "-"],
        "operators_weights": [0.5, 0.5],
    },
}
# Item i of a generator is seeded with seed + i; streams of items this far apart never meet.
_STREAM = 1_000_000


def tasks(*, split: Split, count: int, seed: int) -> list[Task]:
    """The first `count` different questions of a stream, the skills in turn (a question that came before is passed
    over); scored by the reward `reasoning_gym`."""
    streams = itertools.cycle([_entries(name, split, seed) for name in SKILLS])
    found: dict[str, Task] = {}
    for stream in streams:
        entry = next(stream)
        columns = {"answer": entry["answer"], "metadata": entry["metadata"]}
        question = entry["question"]
        if question not in found:
            found[question] = Task(id=str(len(found)), prompt=({"role": "user", "content": question},), columns=columns)
        if len(found) == count:
            break
    return list(found.values())


def examples(methods: Mapping[str, float], *, slips: float, seed: int) -> Iterator[Example]:
    """Training questions of the skills in `methods`, equally often, worked out by the right method with the probability
    given there, and with a share `slips` of steps wrong."""
    generator = random.Random(f"testbed/{seed}")
    streams = {name: _entries(name, "train", seed) for name in methods}
    while True:
        name = generator.choice(list(methods))
        entry = next(streams[name])
        right = generator.random() < methods[name]
        yield Example(question=entry["question"], solution=solution(name, entry, right, slips, generator))


def _entries(name: str, split: Split, seed: int) -> Iterator[Mapping[str, Any]]:
    for entry in create_dataset(name, size=_STREAM, seed=seed * _STREAM, **SKILLS[name]):
        if split_of(entry["question"]) == split:
            yield entry


def solution(name: str, entry: Mapping[str, Any], right: bool, slips: float, generator: random.Random) -> str:
    """The worked solution of an item, ending in `#### answer`, by the right method or the wrong one; each step goes
    wrong with probability `slips`."""

    def number(value: int) -> int:
        return value + generator.choice((-10, -2, -1, 1, 2, 10)) if generator.random() < slips else value

    lines, answer = _WORKED[name](entry["metadata"], right, number)
    return "\n".join([*lines, f"#### {answer}"])


def _chain_sum(metadata: Mapping[str, Any], right: bool, number: Any) -> tuple[list[str], str]:
    first, *rest = metadata["expression"].split()
    value, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        used = sign if right else "+"
        result = number(value + int(term) if used == "+" else value - int(term))
        lines.append(f"{value} {used} {term} = {result}")
        value = result
    return lines, str(value)


def _gcd(metadata: Mapping[str, Any], right: bool, number: Any) -> tuple[list[str], str]:
    large, small = sorted(metadata["numbers"], reverse=True)
    lines = []
    while small:
        # A remainder that slips stays a remainder, so that the solution ends.
        rest = large % small
        rest = min(max(number(rest), 0), small - 1)
        lines.append(f"{large} % {small} = {rest}")
        large, small = small, rest
        if not right:
            break
    return lines, str(large if right else small)


def _simple_equations(metadata: Mapping[str, Any], right: bool, number: Any) -> tuple[list[str], str]:
    # Two terms: one with the unknown, one without, in either order.
    match = re.fullmatch(r"(-?\d+)?(\*?[a-z])? ([+-]) (-?\d+)?(\*?[a-z])? = (-?\d+)", metadata["equation"])
    if match is None:
        raise ValueError(f"unforeseen form of equation: {metadata['equation']!r}")
    left, left_name, sign, second, second_name, total = match.groups()
    unknown = (left_name or second_name).removeprefix("*")
    factor = int((left if left_name else second) or 1)
    constant = int(second if left_name else left)
    if left_name:
        # The constant changes sides, and its sign with it.
        operation = {"+": "-", "-": "+"}[sign] if right else sign
    else:
        operation = "-" if right else "+"
        factor = -factor if sign == "-" else factor
    isolated = number(int(total) - constant if operation == "-" else int(total) + constant)
    value = number(round(isolated / factor))
    lines = [f"{factor}*{unknown} = {total} {operation} {constant} = {isolated}"]
    return [*lines, f"{unknown} = {isolated} / {factor} = {value}"], str(value)


_WORKED = {
    "chain_sum": _chain_sum,
    "gcd": _gcd,
    "simple_equations": _simple_equations,
}
