"""Do the reward functions give the reference answers the full score?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hacrl.config import RunConfig
from hacrl.rewards import Reward, RewardSet, Verifier, load_rewards
from hacrl.types import Task

MOST_TASKS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldScores:
    """One reward function's scores of reference answers.

    `tasks` is how many were tried, 0 where the function cannot tell what a right answer looks like (it has no `gold`).
    `full` is the best score seen. `failures` are tasks whose own reference scored less or nothing, with an example.
    """

    reward: str
    tasks: int
    full: float | None
    failures: int
    example: str | None


def gold_scores(config: RunConfig, rewards: RewardSet, tasks: Sequence[Task]) -> list[GoldScores]:
    """One entry per reward function, on tasks spread evenly over those given."""
    chosen = spread(tasks, MOST_TASKS)
    return [_scores(config, reward, chosen) for reward in rewards.rewards]


def gold_answer(reward: Reward, task: Task) -> str | None:
    """A completion that should get the full score; None where the function, or this row, does not tell."""
    if reward.gold is None:
        return None
    try:
        return reward.call(reward.gold, {"prompt": task.prompt, **task.columns})
    except Exception:  # a user's function on a user's row: that it fails is the finding
        return None


def spread(tasks: Sequence[Task], most: int) -> list[Task]:
    """At most so many tasks, evenly from first to last."""
    count = min(most, len(tasks))
    return [tasks[index * len(tasks) // count] for index in range(count)]


def _scores(config: RunConfig, reward: Reward, tasks: Sequence[Task]) -> GoldScores:
    if reward.gold is None or not tasks:
        return GoldScores(reward=reward.name, tasks=0, full=None, failures=0, example=None)
    answers = [(task, gold_answer(reward, task)) for task in tasks]
    without = [task for task, answer in answers if answer is None]
    given = [(task, answer) for task, answer in answers if answer is not None]
    # Alone and unweighted: in a sum, another function's score would hide a failure.
    alone = load_rewards([replace(reward.spec, weight=1.0, name=reward.name)])
    limit = config.verification.time_limit_s
    with Verifier(alone, workers=config.verification.workers, time_limit_s=limit) as verifier:
        verdicts = verifier.verify([task for task, _ in given], [answer for _, answer in given]) if given else []
    full = max((verdict.reward for verdict in verdicts if verdict.reward is not None), default=None)
    failed = [
        f"{task.id}: {answer!r} scored {verdict.reward if verdict.reward is not None else verdict.detail or 'nothing'}"
        for (task, answer), verdict in zip(given, verdicts, strict=True)
        if verdict.reward is None or verdict.reward <= 0 or (full is not None and verdict.reward < full)
    ]
    failed += [f"{task.id}: no reference answer can be made from its columns" for task in without]
    return GoldScores(
        reward=reward.name, tasks=len(tasks), full=full, failures=len(failed), example=failed[0] if failed else None
    )
