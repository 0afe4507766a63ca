"""Which tasks a step gets, and which held-out questions are trained on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hacrl.errors import TaskError
from hacrl.tasks import batch, overlap
from hacrl.types import Message, Task


def tasks(count: int) -> list[Task]:
    return [Task(id=f"train/{i}", prompt=f"question {i}") for i in range(count)]


def drawn(count: int, *, step: int, prompts_per_step: int, seed: int = 0) -> list[int]:
    return [int(task.id[6:]) for task in batch(tasks(count), step=step, prompts_per_step=prompts_per_step, seed=seed)]


def test_the_order_is_the_same_everywhere() -> None:
    # Fixed values: another Python version or platform must draw the same, or a resumed run would change its data.
    assert drawn(10, step=1, prompts_per_step=4) == ORDER[:4]
    assert drawn(10, step=2, prompts_per_step=4) == ORDER[4:8]
    assert drawn(10, step=3, prompts_per_step=4)[:2] == ORDER[8:]


ORDER = [4, 0, 3, 7, 8, 1, 6, 9, 2, 5]


@pytest.mark.parametrize(("count", "prompts_per_step"), [(10, 4), (10, 3), (7, 5), (5, 5), (6, 1), (11, 8), (12, 6)])
def test_epochs_without_replacement(count: int, prompts_per_step: int) -> None:
    epochs = 40
    steps = [
        drawn(count, step=step, prompts_per_step=prompts_per_step)
        for step in range(1, epochs * count // prompts_per_step + 1)
    ]
    assert all(len(set(step)) == prompts_per_step for step in steps), "a task stands twice in one step"
    stream = [index for step in steps for index in step]
    orders = [tuple(stream[start : start + count]) for start in range(0, len(stream) - count + 1, count)]
    assert len(orders) >= epochs - 1
    assert all(sorted(order) == list(range(count)) for order in orders), "an epoch is not a permutation"
    assert len(set(orders)) > 1, "every epoch has the same order"


def test_seeds_differ() -> None:
    assert drawn(100, step=1, prompts_per_step=10, seed=0) != drawn(100, step=1, prompts_per_step=10, seed=1)


def test_a_step_needs_no_earlier_step() -> None:
    code = (
        "from hacrl.tasks import batch; from hacrl.types import Task\n"
        "tasks = [Task(id=f'train/{i}', prompt='q') for i in range(10)]\n"
        "print([task.id for task in batch(tasks, step=9, prompts_per_step=4, seed=3)])\n"
        "import sys; print(sorted({'torch', 'transformers', 'datasets', 'reasoning_gym'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = [f"train/{i}" for i in drawn(10, step=9, prompts_per_step=4, seed=3)]
    assert output[0] == str(expected)
    assert output[1] == "[]", "loading tasks must not import heavy packages"


def test_late_steps_are_cheap() -> None:
    assert len(set(drawn(7500, step=100_000, prompts_per_step=128))) == 128


def test_impossible_draws() -> None:
    with pytest.raises(TaskError, match=r"prompts_per_step is 11, but there are only 10 training tasks"):
        drawn(10, step=1, prompts_per_step=11)
    with pytest.raises(ValueError, match="steps count from 1"):
        drawn(10, step=0, prompts_per_step=2)


def test_overlap_sees_through_white_space_case_and_system() -> None:
    train = [
        Task(id="train/0", prompt="What is 1 + 1?"),
        Task(id="train/1", prompt="What is 2 + 2?"),
        Task(id="train/2", prompt="what is  1 + 1?\n"),
    ]
    held_out = [
        Task(id="eval/0", prompt="What is 3 + 3?"),
        Task(
            id="eval/1",
            prompt=(Message(role="system", content="Brief."), Message(role="user", content="WHAT is 1 + 1?")),
        ),
    ]
    assert overlap(train, held_out) == [("train/0", "eval/1")]
    assert overlap(held_out, []) == []
