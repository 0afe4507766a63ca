"""Contamination: held-out questions that are also trained on."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.types import Task


def overlap(train: Sequence[Task], held_out: Sequence[Task]) -> list[tuple[str, str]]:
    """Pairs (train id, held-out id) of tasks that ask the same, one pair for each held-out task concerned.

    Compared is what the user says; system messages, letter case and white space are left aside.
    """
    trained: dict[str, str] = {}
    for task in train:
        trained.setdefault(_question(task), task.id)
    return [(trained[key], task.id) for task in held_out if (key := _question(task)) in trained]


def _question(task: Task) -> str:
    if isinstance(task.prompt, str):
        text = task.prompt
    else:
        text = "\n".join(message["content"] for message in task.prompt if message["role"] != "system")
    return " ".join(text.casefold().split())
