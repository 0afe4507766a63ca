"""The embedded demo: two tiny agents that ship with the package, the tasks they train on, and how they are made.

tasks.py         three-step arithmetic, training and held-out questions disjoint by construction
settings.py      the configuration
run.py           `hacrl demo`
build.py         rebuilds `agents/` from seeds: `python -m hacrl.demo.build`
pretraining.py   how tiny agents are made
agents/          `qwen` (Qwen3, cuts numbers into digits, misreads minus) and `llama` (Llama, whole numbers, misreads
                 times): ordinary Hugging Face folders
"""

from __future__ import annotations

from pathlib import Path

AGENTS_DIRECTORY = Path(__file__).parent / "agents"
