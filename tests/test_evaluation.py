"""Held-out figures of one agent, from rollouts made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hacrl.evaluation import summarise
from hacrl.types import Completion, Rollout, Verdict


def rollout(task: str, index: int, reward: float | None, answer: str | None = None, **options: Any) -> Rollout:
    completion = Completion(
        task_id=task,
        author="a",
        index=index,
        text="",
        token_ids=(1, 2),
        logprobs=(0.0, 0.0),
        finish_reason="stop",
        weights_version=0,
    )
    return Rollout(completion=completion, verdict=Verdict(reward=reward, answer=answer, **options))


def test_scores_of_single_tasks_are_what_the_means_are_made_of() -> None:
    found = summarise(
        [
            *(rollout("eval/3", index, reward, answer, parsed=True)
              for index, (reward, answer) in enumerate([(0.0, "7"), (0.0, "7"), (1.0, "8"), (None, None)])),
            *(rollout("eval/1", index, 1.0, "5", parsed=True) for index in range(4)),
            *(rollout("eval/2", index, None, parsed=False) for index in range(4)),
        ]
    )  # fmt: skip
    assert found["per_task"] == {
        "id": ["eval/3", "eval/1", "eval/2"],
        "avg@k": [pytest.approx(1 / 3), 1.0, None],
        "best@k": [1.0, 1.0, None],
        "maj@k": [0.0, 1.0, None],
    }
    assert found["avg@k"] == pytest.approx(2 / 3)
    assert (found["best@k"], found["maj@k"]) == (1.0, 0.5)
    assert (found["tasks"], found["unscored"]) == (3, 5)


def test_there_is_no_majority_where_no_answer_is_extracted() -> None:
    found = summarise([rollout("eval/0", 0, 0.5), rollout("eval/0", 1, 1.0)])
    assert found["per_task"] == {"id": ["eval/0"], "avg@k": [0.75], "best@k": [1.0], "maj@k": [None]}
    assert found["maj@k"] is None
