"""Which tasks a step trains on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hacrl.errors import TaskError
from hacrl.types import Task


def batch(tasks: Sequence[Task], *, step: int, prompts_per_step: int, seed: int) -> list[Task]:
    """The tasks of one step: a pure function of (seed, step), so that a resumed run continues with the same data.

    Every epoch is one permutation of all tasks without replacement. A step may begin in one epoch and end in the next;
    no task stands twice in one step. `step` counts from 1.

    Raises: TaskError when a step needs more tasks than there are; ValueError for step < 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}; steps count from 1")
    if prompts_per_step > len(tasks):
        raise TaskError(
            f"prompts_per_step is {prompts_per_step}, but there are only {len(tasks)} training tasks, and a step has "
            f"each task at most once; lower prompts_per_step or add tasks"
        )
    first = (step - 1) * prompts_per_step
    epoch, place = divmod(first, len(tasks))
    order = _order(len(tasks), prompts_per_step=prompts_per_step, seed=seed, epoch=epoch)
    if place + prompts_per_step > len(tasks):
        order = order + _order(len(tasks), prompts_per_step=prompts_per_step, seed=seed, epoch=epoch + 1)
    return [tasks[index] for index in order[place : place + prompts_per_step]]


def _order(size: int, *, prompts_per_step: int, seed: int, epoch: int) -> list[int]:
    """The permutation of one epoch, its head kept apart from the epoch before where a step crosses the border.

    Only the first `prompts_per_step` places are rearranged, so an epoch of at least two steps ends as it was drawn and
    needs no look further back than the epoch before.
    """
    start = max(0, epoch - 1) if size >= 2 * prompts_per_step else 0
    order = _permutation(size, seed=seed, epoch=start)
    for later in range(start + 1, epoch + 1):
        shared = later * size % prompts_per_step
        used = set(order[size - shared :])
        drawn = _permutation(size, seed=seed, epoch=later)
        head, rest = drawn[:prompts_per_step], drawn[prompts_per_step:]
        order = [index for index in head if index not in used] + [index for index in head if index in used] + rest
    return order


def _permutation(size: int, *, seed: int, epoch: int) -> list[int]:
    indices = list(range(size))
    # A text seed goes through SHA-512, the same on every platform and Python version.
    random.Random(f"tasks/{seed}/{epoch}").shuffle(indices)
    return indices
