"""The embedded demo: two tiny agents that ship with the package, the tasks they train on, and the reward.

tasks.py    three-step arithmetic, training and held-out questions disjoint by construction
reward.py   1 where the number after `####` is right
build.py    rebuilds `agents/` from seeds: `python -m hacrl.demo.build`
agents/     `qwen` (Qwen3, cuts numbers into digits, misreads minus) and `llama` (Llama, whole numbers, misreads
            times): ordinary Hugging Face folders
"""

from __future__ import annotations

from pathlib import Path

AGENTS_DIRECTORY = Path(__file__).parent / "agents"
