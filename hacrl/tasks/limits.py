"""Prompts that are too long for an agent: told or counted, never cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from hacrl.errors import TaskError
from hacrl.types import Task


def within_limits(
    tasks: Sequence[Task],
    *,
    lengths: Mapping[str, Sequence[int]],
    limits: Mapping[str, int],
    long_prompts: Literal["error", "drop"],
) -> tuple[list[Task], dict[str, int]]:
    """The tasks whose prompt fits every agent, and per agent how many were above its limit.

    `lengths[agent][i]` is the prompt of `tasks[i]` in that agent's tokens, `limits[agent]` its `max_prompt_tokens`. All
    agents must see the same tasks, so one agent's limit removes a task for everybody.

    Raises: TaskError if a prompt is too long under `error`, or if nothing is left under `drop`.
    """
    above = {
        agent: [index for index, length in enumerate(lengths[agent]) if length > limits[agent]] for agent in lengths
    }
    if long_prompts == "error":
        for agent, indices in above.items():
            if indices:
                worst = max(indices, key=lambda index: lengths[agent][index])
                raise TaskError(
                    f"{len(indices)} of {len(tasks)} prompts are longer than {agent}'s max_prompt_tokens "
                    f"({limits[agent]}); the longest is {tasks[worst].id} with {lengths[agent][worst]} tokens; raise "
                    f"the limit, or set long_prompts: drop in this task source"
                )
    removed = {index for indices in above.values() for index in indices}
    kept = [task for index, task in enumerate(tasks) if index not in removed]
    if tasks and not kept:
        told = ", ".join(f"{agent} {limits[agent]}" for agent in limits)
        raise TaskError(f"all {len(tasks)} prompts are longer than max_prompt_tokens ({told}); raise the limit")
    return kept, {agent: len(indices) for agent, indices in above.items()}
