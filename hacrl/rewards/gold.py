"""Does a reward function give its own reference answer the full score? If not, it cannot reward a right answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hacrl.rewards.verdict import check_any_returned
from hacrl.rewards.verifier import Verifier
from hacrl.types import Task, UnscoredCause

FULL_SCORE = 1.0


@dataclass(frozen=True, kw_only=True)
class GoldScore:
    """What one function gave to one task's reference; `score` is None where `cause` says why there is none."""

    task_id: str
    function: str
    completion: str
    score: float | None
    cause: UnscoredCause | None
    detail: str | None

    @property
    def full(self) -> bool:
        return self.score is not None and self.score >= FULL_SCORE


def gold_scores(verifier: Verifier, tasks: Sequence[Task], n: int) -> list[GoldScore]:
    """Scores the reference of the first `n` tasks with every function that can write one (all built-ins can).

    Functions without a `gold` attribute, and tasks for which it returns None, are left out. The entries whose `full` is
    False are the ones to report.

    Raises:
        RewardError: as `Verifier.verify` and `check_any_returned`.
    """
    scored: list[GoldScore] = []
    for reward in verifier.rewards.rewards:
        if reward.gold is None:
            continue
        pairs: list[tuple[Task, str]] = []
        for task in tasks[:n]:
            try:
                text = reward.call(reward.gold, task.columns)
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                scored.append(_gold_score(task.id, reward.name, "", None, "exception", detail))
                continue
            if text is not None:
                pairs.append((task, text))
        # Each text as a task of its own: one whose reference is broken must not be mixed up with the others.
        judged = [replace(task, id=f"{task.id}#{position}") for position, (task, _) in enumerate(pairs)]
        verdicts = verifier.verify(judged, [text for _, text in pairs])
        check_any_returned(verdicts)
        scored += [
            _gold_score(task.id, reward.name, text, v.scores[reward.name], v.unscored.get(reward.name), v.detail)
            for (task, text), v in zip(pairs, verdicts, strict=True)
        ]
    return scored


def _gold_score(
    task_id: str, function: str, completion: str, score: float | None, cause: UnscoredCause | None, detail: str | None
) -> GoldScore:
    return GoldScore(task_id=task_id, function=function, completion=completion, score=score, cause=cause, detail=detail)
