"""The built-in reward `reasoning_gym`: the generator that made a task scores the answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hacrl.rewards import final_answer as extraction
from hacrl.rewards.completion import completion_text


def reasoning_gym(
    prompts: Sequence[Any],  # noqa: ARG001  (TRL's signature)
    completions: Sequence[Any],
    *,
    answer: Sequence[Any],
    metadata: Sequence[Mapping[str, Any] | str],
    final_answer: extraction.FinalAnswer = "auto",
    partial_credit: bool = False,
    scorer_errors: Literal["unscored", "wrong"] = "unscored",
    **_columns: Any,
) -> list[float | None]:
    """The score that the task's own generator gives to the final answer.

    Args:
        answer: the entry's `answer`; None for generators whose tasks have many right answers.
        metadata: the entry's `metadata` (or that as JSON), whose `source_dataset` names the generator.
        final_answer: where the answer stands, see `hacrl.rewards.final_answer`. None found gives 0.0.
        partial_credit: keep scores between 0 and 1. By default they become 0.0, because many generators give a wrong
            answer 0.01 to 0.2, which would count as a success wherever rewards above 0 do.
        scorer_errors: some generators (prime_factorization) raise on an answer that they cannot read. `unscored` lets
            the exception out; `wrong` scores 0.0 provided that the same scorer accepts the entry's own answer.

    Raises:
        Exception: what the scorer raises.
    """
    if scorer_errors not in ("unscored", "wrong"):
        raise ValueError(f"scorer_errors: {scorer_errors!r} is neither 'unscored' nor 'wrong'")
    found = answers(completions, final_answer=final_answer)
    scores: list[float | None] = []
    for text, right, about in zip(found, answer, metadata, strict=True):
        entry = {"answer": right, "metadata": json.loads(about) if isinstance(about, str) else dict(about)}
        score = 0.0 if text is None else _score(text, entry, forgiving=scorer_errors == "wrong")
        scores.append(score if partial_credit else float(score >= 1.0))
    return scores


def answers(completions: Sequence[Any], *, final_answer: extraction.FinalAnswer = "auto") -> list[str | None]:
    """The final answer of each completion, None where there is none."""
    extract = extraction.rule(final_answer)
    return [extract(completion_text(completion)) for completion in completions]


def gold(*, answer: Any, final_answer: extraction.FinalAnswer = "auto") -> str | None:
    """A completion that must get 1.0; None where the entry names no answer."""
    if answer is None:
        return None
    # An answer of several lines (a grid) needs a frame, since the last line alone would be taken.
    return extraction.written(str(answer), "tag" if final_answer == "auto" else final_answer)


def prepare() -> None:
    """Loads the library, which takes seconds."""
    import reasoning_gym  # noqa: F401


def _score(text: str, entry: dict[str, Any], *, forgiving: bool) -> float:
    score_answer = _scorer(entry["metadata"]["source_dataset"])
    try:
        return float(score_answer(text, entry))
    except Exception:
        if forgiving and entry["answer"] is not None and score_answer(entry["answer"], entry) >= 1.0:
            return 0.0
        raise


@functools.cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    # Making a generator can take seconds (word lists, ARC), so each is made once per process.
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(dataset)  # pyright: ignore[reportReturnType]
