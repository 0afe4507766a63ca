"""Held-out accuracy: avg@k, best@k and maj@k with their uncertainty, per agent."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.config import EvaluationConfig
from hacrl.execution.fleet import Fleet
from hacrl.rewards import Verifier, check_any_returned
from hacrl.types import Completion, Rollout, Task


def evaluate_fleet(
    fleet: Fleet,
    verifier: Verifier,
    splits: Mapping[str, Sequence[Task]],
    *,
    step: int,
    settings: EvaluationConfig | None = None,
) -> list[dict[str, Any]]:
    """One entry per split and agent, absent ones left out; see `summarise` for its fields. `step` is the number of
    finished steps; sampling is by `settings`, the run's own if left out."""
    entries = []
    for split, tasks in splits.items():
        completions = fleet.sample_evaluation(tasks, settings)
        by_id = {task.id: task for task in tasks}
        verdicts = verifier.verify([by_id[item.task_id] for item in completions], [item.text for item in completions])
        check_any_returned(verdicts)
        rollouts = [
            Rollout(completion=completion, verdict=verdict)
            for completion, verdict in zip(completions, verdicts, strict=True)
        ]
        for name in fleet.names:
            if name in fleet.absent:
                continue
            mine = [rollout for rollout in rollouts if rollout.completion.author == name]
            entries.append({"step": step, "split": split, "agent": name, **summarise(mine)})
    return entries


def summarise(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Accuracy of one agent's answers, k for each task.

    `k`, `tasks`; `avg@k`: mean reward over the scored answers of a task, averaged over tasks; `best@k`: the mean over
    tasks of the best answer's reward; `maj@k`: reward of the most frequent extracted answer (the earliest of equals),
    a task without any extracted answer counting 0, null where the rewards extract no answers; with each of the three
    its `_stderr`, the standard error over tasks, which are the independent units: the k answers to a task are one
    cluster (a 95 % interval is 1.96 of it each way); `truncated_rate`: answers cut by the length limit;
    `parse_failure_rate`: answers in which no final answer was found, null as for maj@k; `unscored`: answers without a
    score, which enter no mean; `mean_tokens`: length with the end of sequence; `per_task`: a list for each of `id`,
    `avg@k`, `best@k` and `maj@k`, in the order of the tasks, null where none of a task's answers was scored: what
    paired comparisons are made of.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.completion.task_id, []).append(rollout)
    per_task: dict[str, list[Any]] = {"id": list(groups), "avg@k": [], "best@k": [], "maj@k": []}
    extracts = any(rollout.verdict.parsed is not None for rollout in rollouts)
    for group in groups.values():
        scored = [rollout for rollout in group if rollout.verdict.reward is not None]
        rewards = [rollout.verdict.reward for rollout in scored if rollout.verdict.reward is not None]
        per_task["avg@k"].append(statistics.fmean(rewards) if rewards else None)
        per_task["best@k"].append(max(rewards, default=None))
        per_task["maj@k"].append(_majority_reward(scored) if rewards and extracts else None)
    completions: list[Completion] = [rollout.completion for rollout in rollouts]
    parsed = [rollout.verdict.parsed for rollout in rollouts if rollout.verdict.parsed is not None]
    return {
        "k": max((len(group) for group in groups.values()), default=0),
        "tasks": len(groups),
        **{
            f"{name}{suffix}": figure([value for value in per_task[name] if value is not None])
            for name in ("avg@k", "best@k", "maj@k")
            for suffix, figure in (("", _mean), ("_stderr", _standard_error))
        },
        "truncated_rate": _mean([completion.finish_reason == "length" for completion in completions]),
        "parse_failure_rate": _mean([not item for item in parsed]),
        "unscored": sum(rollout.verdict.reward is None for rollout in rollouts),
        "mean_tokens": _mean([len(completion.token_ids) for completion in completions]),
        "per_task": per_task,
    }


def mean_score(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean avg@k over agents and splits, by which the best checkpoint is chosen; None without evaluation."""
    return _mean([entry["avg@k"] for entry in entries if entry["avg@k"] is not None])


def _majority_reward(rollouts: Sequence[Rollout]) -> float:
    answers = Counter(rollout.verdict.answer for rollout in rollouts if rollout.verdict.answer is not None)
    if not answers:
        return 0.0
    winner = answers.most_common(1)[0][0]
    reward = next(rollout.verdict.reward for rollout in rollouts if rollout.verdict.answer == winner)
    return reward if reward is not None else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
