"""The demo's two configurations: the same agents, tasks and number of rollouts, with and without sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

METHODS = ("hacpo", "gspo")
AGENTS = Path(__file__).parent / "agents"


def demo_config(method: str, *, output: Path, seed: int) -> dict[str, Any]:
    """Options for `load_config`; `method` is any algorithm name."""
    return {
        "agents": [
            {"name": "qwen", "model": str(AGENTS / "qwen"), "learning_rate": 3e-4},
            {"name": "llama", "model": str(AGENTS / "llama"), "learning_rate": 3e-4},
        ],
        "tasks": {
            "train": {"function": "hacrl.demo.tasks:train_tasks", "arguments": {"count": 2000, "seed": "${seed}"}},
            "eval": {"function": "hacrl.demo.tasks:heldout_tasks", "arguments": {"count": 64, "seed": 0}},
        },
        "reward": {"function": "exact", "arguments": {"final_answer": "hash"}},
        "algorithm": {"name": method},
        "steps": 30,
        "prompts_per_step": 8,
        "group_size": 4,
        "minibatch_order": "mixed",
        "sampling": {"max_prompt_tokens": 64, "max_new_tokens": 48, "batch_rows": 256},
        "evaluation": {"every": 5, "k": 4},
        "checkpoint": {"every": 10},
        "seed": seed,
        "output": str(output),
    }
