"""One entrance to all sources of tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hacrl.config import DatasetConfig, FunctionTasksConfig, ReasoningGymConfig
from hacrl.errors import TaskError
from hacrl.tasks.dataset import DatasetRows
from hacrl.tasks.function import FunctionRows
from hacrl.tasks.prompt import build_prompt, check_template
from hacrl.tasks.reasoning_gym import ReasoningGymRows
from hacrl.types import Task


def load_tasks(source: DatasetConfig | ReasoningGymConfig | FunctionTasksConfig, *, name: str) -> list[Task]:
    """All tasks of one source, in order; shuffled and limited as the source says.

    `name` (`train`, or an eval split's) starts every task's id: `name/<row number in the source>`, which neither
    shuffling nor `limit` changes. Only the rows in use are read and checked.

    Raises: TaskError naming source, row, value and remedy.
    """
    check_template(source.template, name=name)
    rows: DatasetRows | ReasoningGymRows | FunctionRows
    match source:
        case DatasetConfig():
            rows = DatasetRows(source, name=name)
        case ReasoningGymConfig():
            rows = ReasoningGymRows(source, name=name)
        case FunctionTasksConfig():
            rows = FunctionRows(source, name=name)
    if len(rows) == 0:
        raise TaskError(f"{name}: {rows.origin} has no rows; check its path, split and filters")
    tasks: list[Task] = []
    for index in _chosen(len(rows), limit=source.limit, shuffle_seed=source.shuffle_seed):
        value, columns = rows.row(index)
        prompt = build_prompt(value, system=source.system, template=source.template, place=rows.place(index))
        tasks.append(Task(id=f"{name}/{index}", prompt=prompt, columns=columns))
    return tasks


def _chosen(size: int, *, limit: int | None, shuffle_seed: int | None) -> Sequence[int]:
    indices = list(range(size))
    if shuffle_seed is not None:
        random.Random(f"shuffle/{shuffle_seed}").shuffle(indices)
    return indices[:limit]
