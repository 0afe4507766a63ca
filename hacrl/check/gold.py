"""Do the reward functions give the reference answers the full score? And what do reference answers look like?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.config import RunConfig
from hacrl.rewards import RewardSet, Verifier, gold_scores
from hacrl.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldReport:
    """One reward function's scores of reference answers.

    `tasks` is how many were tried, 0 where the function cannot write a right answer. `failures` are those whose own
    reference got less than the full score, with an `example`. `answers` are the references, as completions.
    """

    reward: str
    tasks: int
    failures: int
    example: str | None
    answers: tuple[str, ...]


def gold_reports(config: RunConfig, rewards: RewardSet, tasks: Sequence[Task]) -> list[GoldReport]:
    """One entry per reward function."""
    with Verifier(
        rewards, workers=config.verification.workers, time_limit_s=config.verification.time_limit_s
    ) as verifier:
        scores = gold_scores(verifier, tasks, len(tasks))
    reports = []
    for reward in rewards.rewards:
        mine = [score for score in scores if score.function == reward.name]
        failed = [score for score in mine if not score.full]
        example = None
        if failed:
            got = failed[0].score if failed[0].score is not None else failed[0].detail or failed[0].cause
            example = f"{failed[0].task_id}: {failed[0].completion!r} got {got}"
        reports.append(
            GoldReport(
                reward=reward.name,
                tasks=len(mine),
                failures=len(failed),
                example=example,
                answers=tuple(score.completion for score in mine if score.completion),
            )
        )
    return reports


def spread(tasks: Sequence[Task], most: int) -> list[Task]:
    """At most so many tasks, evenly from first to last."""
    count = min(most, len(tasks))
    return [tasks[index * len(tasks) // count] for index in range(count)]
