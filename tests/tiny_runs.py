"""A small complete run for tests: configuration, tasks and reward for the models of `tiny_models.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacrl.types import Task


def tasks(*, first: int, count: int) -> list[Task]:
    return [
        Task(id=str(number), prompt=f"What is {number} + 3?", columns={"answer": str(number + 3)})
        for number in range(first, first + count)
    ]


def many_letters(completions: list[str], **_: Any) -> list[float]:
    """Random weights answer with noise; about half of it has this many letters, so groups are mixed."""
    return [float(sum(character.isalpha() for character in text) >= 2) for text in completions]


def run_config(models: Mapping[str, Path], output: Path, **changes: Any) -> dict[str, Any]:
    """Two agents of different family, size and tokenizer; `changes` replace top-level options."""
    here = Path(__file__)
    return {
        "agents": [
            {"name": "qwen", "model": str(models["qwen"]), "learning_rate": 1e-3},
            {"name": "llama", "model": str(models["llama"]), "learning_rate": 1e-3},
        ],
        "tasks": {
            "train": {"function": f"{here}:tasks", "arguments": {"first": 0, "count": 12}},
            "eval": {"function": f"{here}:tasks", "arguments": {"first": 100, "count": 3}},
        },
        "reward": f"{here}:many_letters",
        "steps": 3,
        "prompts_per_step": 3,
        "group_size": 4,
        "sampling": {"max_new_tokens": 8, "max_prompt_tokens": 64},
        "exchange": {"too_long": "truncate"},
        "algorithm": {"name": "hacpo", "delta": 0.9, "delta_step": 0.01},
        "evaluation": {"k": 2, "at_start": False},
        "output": str(output),
        **changes,
    }


def three_agents(models: dict[str, Path], output: Path, **changes: Any) -> dict[str, Any]:
    """Two adapters on one base, one of another family; other group sizes; one that only writes."""
    agents = [
        {"name": "first", "model": str(models["qwen"]), "lora": {"rank": 2}, "learning_rate": 1e-2, "group_size": 3},
        {"name": "second", "model": str(models["qwen"]), "lora": {"rank": 4}, "learning_rate": 1e-2},
        {"name": "writer", "model": str(models["llama"]), "role": "author", "group_size": 2},
    ]
    return run_config(models, output, agents=agents, **changes)
