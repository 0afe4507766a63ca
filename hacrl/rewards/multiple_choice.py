"""The built-in reward `multiple_choice`: the chosen letter must be the right one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hacrl.rewards import final_answer as extraction
from hacrl.rewards.completion import completion_text

_MARKED = re.compile(
    r"(?:\b(?:answer|choice|option)\b[*_]{0,2}\s{0,2}(?:is|:|=)?\s{0,2}:?|####)"
    r"[\s*_$(\[]{0,8}(?:\\(?:text|textbf|mathrm)\{\s?\(?)?([A-J])(?![A-Za-z'’])",
    re.IGNORECASE,
)
_LONE = re.compile(r"(?:(?<=\()|(?<=^)|(?<=[\s*]))([A-J])(?=[).:*]|\s*$)", re.MULTILINE)
_LETTER = re.compile(r"(?<![A-Za-z\\])([A-J])(?![A-Za-z])")


def multiple_choice(
    prompts: Sequence[Any],  # noqa: ARG001  (TRL's signature)
    completions: Sequence[Any],
    *,
    answer: Sequence[Any],
    **_columns: Any,
) -> list[float | None]:
    """1.0 where the chosen letter is that of the column `answer`, else 0.0.

    Args:
        answer: right choice per completion: a letter A to J, bare or in parentheses, or its number counted from 0.
            None gives None (not scored).

    Raises:
        ValueError: a reference is none of these.
    """
    right = [None if reference is None else letter(reference) for reference in answer]
    found = answers(completions)
    return [None if gold is None else float(text == gold) for text, gold in zip(found, right, strict=True)]


def answers(completions: Sequence[Any]) -> list[str | None]:
    r"""The chosen letter of each completion.

    It is the one in the last complete `\boxed{}` or `<answer>`, else the last one after `answer`, `choice`, `option`
    or `####`, else the last capital that stands alone as `(B)`, `B.` or at a line's end. None where there is none.
    """
    return [_chosen(completion_text(completion)) for completion in completions]


def gold(*, answer: Any) -> str | None:
    """A completion that must get 1.0; None where the reference is missing."""
    return None if answer is None else extraction.written(letter(answer), "boxed")


def letter(reference: Any) -> str:
    """The letter of a reference. Raises ValueError where it is neither a letter A to J nor a number 0 to 9."""
    if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < 10:
        return "ABCDEFGHIJ"[reference]
    found = re.fullmatch(r"\s*\(?([A-Ja-j])[).:]?\s*", reference) if isinstance(reference, str) else None
    if found is None:
        raise ValueError(f"answer {reference!r} is neither a letter A to J nor a number counted from 0")
    return found.group(1).upper()


def _chosen(text: str) -> str | None:
    framed = extraction.last_boxed(text) or extraction.last_tag(text)
    if framed is not None:
        inside = _LETTER.findall(re.sub(r"\\[A-Za-z]+", " ", framed))
        # Two letters in one frame choose nothing.
        return inside[0] if len(set(inside)) == 1 else None
    for pattern in (_MARKED, _LONE):
        last = extraction.last_match(pattern, text)
        if last is not None and last.group(1).isupper():
            return last.group(1)
    return None
