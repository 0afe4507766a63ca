"""A reward function of one's own, in the signature that TRL uses as well: the last integer must be the answer.

reward: examples/last_integer.py:last_integer
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

INTEGER = re.compile(r"-?\d+")


def last_integer(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answer: Sequence[Any],
    **_columns: Any,
) -> list[float]:
    """1.0 where the last integer of the completion equals the column `answer`, else 0.0."""
    found = answers(prompts, completions)
    return [float(text is not None and int(text) == int(right)) for text, right in zip(found, answer, strict=True)]


def answers(prompts: Sequence[Any], completions: Sequence[Any], **_columns: Any) -> list[str | None]:  # noqa: ARG001
    """The final answer of each completion, None where it holds no integer; for maj@k and the parse-failure rate."""
    return [next(reversed(INTEGER.findall(_text(completion))), None) for completion in completions]


def gold(*, answer: Any) -> str:
    """A completion that must get 1.0; `hacrl check` tries it."""
    return str(answer)


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


last_integer.answers = answers  # type: ignore[attr-defined]
last_integer.gold = gold  # type: ignore[attr-defined]
