"""One step's answers, verified as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from hacrl.rewards.verdict import check_any_scored
from hacrl.rewards.verifier import Verifier
from hacrl.types import Completion, Rollout, RolloutGroup, Task, Verdict


class Scoring:
    """Scores completions in the background, each once, while others are still being sampled.

    A reward function is given one author's answers to a task in one call, not those of all authors.
    """

    def __init__(self, verifier: Verifier, tasks: Sequence[Task]) -> None:
        self._verifier = verifier
        self._tasks = {task.id: task for task in tasks}
        self._parts: list[tuple[Sequence[Completion], Future[list[Verdict]]]] = []

    @property
    def completions(self) -> list[Completion]:
        """What has arrived so far."""
        return [completion for completions, _ in self._parts for completion in completions]

    def add(self, completions: Sequence[Completion]) -> None:
        """Begin to score answers that have just arrived."""
        tasks = [self._tasks[completion.task_id] for completion in completions]
        self._parts.append((completions, self._verifier.submit(tasks, [completion.text for completion in completions])))

    def groups(self, authors: Sequence[str]) -> list[RolloutGroup]:
        """The rollouts by task, in the order of the tasks, of `authors`, and of their numbers.

        Waits until everything that was added has been scored. Raises RewardError: see `Verifier.verify` and
        `check_any_scored`.
        """
        place = {author: number for number, author in enumerate(authors)}
        rollouts: dict[str, list[Rollout]] = {task: [] for task in self._tasks}
        for completions, verdicts in self._parts:
            for completion, verdict in zip(completions, verdicts.result(), strict=True):
                rollouts[completion.task_id].append(Rollout(completion=completion, verdict=verdict))
        for group in rollouts.values():
            group.sort(key=lambda rollout: (place[rollout.completion.author], rollout.completion.index))
        groups = [RolloutGroup(task=task, rollouts=tuple(rollouts[task.id])) for task in self._tasks.values()]
        check_any_scored([rollout.verdict for group in groups for rollout in group.rollouts])
        return groups
