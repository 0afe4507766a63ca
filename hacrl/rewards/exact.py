"""The built-in reward `exact`: the final answer must be the reference, character by character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hacrl.rewards import final_answer as extraction
from hacrl.rewards.completion import completion_text


def exact(
    prompts: Sequence[Any],  # noqa: ARG001  (TRL's signature)
    completions: Sequence[Any],
    *,
    answer: Sequence[Any],
    final_answer: extraction.FinalAnswer = "auto",
    ignore_case: bool = False,
    **_columns: Any,
) -> list[float | None]:
    """1.0 where the extracted final answer equals the column `answer`, blanks around both aside, else 0.0.

    Args:
        answer: reference per completion; None gives None (not scored).
        final_answer: where the answer stands, see `hacrl.rewards.final_answer`.
        ignore_case: compare without regard to case.
    """
    found = answers(completions, final_answer=final_answer)
    return [_score(text, right, ignore_case) for text, right in zip(found, answer, strict=True)]


def answers(completions: Sequence[Any], *, final_answer: extraction.FinalAnswer = "auto") -> list[str | None]:
    """The final answer of each completion, None where there is none."""
    extract = extraction.rule(final_answer)
    return [extract(completion_text(completion)) for completion in completions]


def gold(*, answer: Any, final_answer: extraction.FinalAnswer = "auto") -> str:
    """A completion that must get 1.0."""
    return extraction.written(str(answer), final_answer)


def _score(found: str | None, right: Any, ignore_case: bool) -> float | None:
    if right is None:
        return None
    if found is None:
        return 0.0
    wanted = str(right).strip()
    return float(found.casefold() == wanted.casefold() if ignore_case else found == wanted)
