"""The demo's reward: the number after `####` is the right one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

FINAL_ANSWER = re.compile(r"^#### (-?\d+)\Z", re.MULTILINE)


def final_answer(text: str) -> str | None:
    """The number on the last line of a worked solution, `#### 32`; None where the text does not end in one."""
    found = FINAL_ANSWER.search(text.rstrip())
    return found.group(1) if found else None


def demo_reward(
    prompts: Sequence[Any],  # noqa: ARG001
    completions: Sequence[Any],
    *,
    answer: Sequence[str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """1.0 where a completion ends in `#### ` and its task's answer, else 0.0.

    The signature is TRL's: one prompt, completion and entry of every column per rollout. A completion is a text or, in
    conversational form, a list of messages of which the last one counts.
    """
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(final_answer(text) == right) for text, right in zip(texts, answer, strict=True)]
