"""What learners in other processes are given: everything they can use, each form of it sent once."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from hacrl.algorithms.algorithm import Credit
from hacrl.execution.exchange import Exchange, shared_groups
from hacrl.execution.fleet import advantages_by_author, learner_credit
from hacrl.types import Completion, Rollout, RolloutGroup, SharedCompletion, Task, Verdict

# "twin" has the tokenizer of "own"; "absent" has been let go and has no answers.
FINGERPRINTS = {"own": "a", "twin": "a", "other": "b", "absent": "b"}


def completion(
    author: str, task: str, index: int, *, text: str = "4", ids: tuple[int, ...] = (7, 70_000)
) -> Completion:
    return Completion(
        task_id=task,
        author=author,
        index=index,
        text=text,
        token_ids=ids,
        logprobs=tuple(-0.1 * (place + 1) - 1e-17 for place in range(len(ids))),
        finish_reason="stop" if ids else "length",
        weights_version=3,
    )


def groups() -> list[RolloutGroup]:
    """Odd answers, one without a reward, a group without answers, another that lacks an author."""
    answers = {
        "first": [
            completion("own", "first", 0, text="\ud83d lone \u2028 \U0001f600 \ufffd"),
            completion("own", "first", 2),
            completion("twin", "first", 0, text="", ids=()),
            completion("twin", "first", 1),
            completion("other", "first", 0, text="ein Drittel: ⅓"),
        ],
        "none": [],
        "last": [completion("own", "last", 0), completion("other", "last", 1, ids=(1, 2, 3))],
    }
    return [
        RolloutGroup(
            task=Task(id=name, prompt="2 + 2?"),
            rollouts=tuple(
                Rollout(completion=item, verdict=Verdict(reward=None if item.index == 1 else 1.0)) for item in items
            ),
        )
        for name, items in answers.items()
    ]


def given(learner: str, authors: list[str]) -> list[Any]:
    whole = groups()
    told, fingerprints = Exchange(whole, FINGERPRINTS, pickle.dumps).told(learner, authors)
    assert fingerprints == {author: FINGERPRINTS[author] for author in authors}
    return shared_groups([group.task for group in whole], [pickle.loads(part) for part in told])


def test_a_learner_is_given_what_it_can_use() -> None:
    shared = given("own", list(FINGERPRINTS))
    assert [group.task for group in shared] == [group.task for group in groups()]
    for group, whole in zip(shared, groups(), strict=True):
        for told, item in zip(group.completions, whole.completions, strict=True):
            if item.author == "own":
                assert told == item
                continue
            assert told == SharedCompletion(
                task_id=item.task_id,
                author=item.author,
                index=item.index,
                text=item.text,
                tokens=len(item.token_ids),
                token_ids=item.token_ids if item.author == "twin" else None,
                mean_logprob=item.mean_logprob,
                finish_reason=item.finish_reason,
            )


def test_authors_that_a_learner_does_not_use_are_not_sent_to_it() -> None:
    shared = given("other", ["own", "other"])
    assert [[(item.author, item.index) for item in group.completions] for group in shared] == [
        [("own", 0), ("own", 2), ("other", 0)],
        [],
        [("own", 0), ("other", 1)],
    ]


def test_each_form_is_put_once_and_only_where_somebody_wants_it() -> None:
    put: list[Any] = []

    def keep(value: Any) -> int:
        put.append(value)
        return len(put) - 1

    exchange = Exchange(groups(), FINGERPRINTS, keep)
    everybody = list(FINGERPRINTS)
    assert exchange.told("own", everybody)[0] == [0, 1, 2, 3]
    # The twin's own answers whole, those of "own" with ids; the others' text is there.
    assert exchange.told("twin", everybody)[0] == [4, 5, 2, 3]
    assert exchange.told("own", everybody)[0] == [0, 1, 2, 3]
    assert len(put) == 6
    assert exchange.told("other", ["other"])[0] == [6]


def test_credit_goes_to_a_learner_for_the_authors_it_uses() -> None:
    names = ["first", "second", "third"]
    values_LPAG = torch.arange(3 * 2 * 3 * 2, dtype=torch.float64).reshape(3, 2, 3, 2)
    credit = Credit(
        advantages_LPAG=values_LPAG,
        ratio_LA=torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 5.0], [6.0, 7.0, 1.0]], dtype=torch.float64),
        baselines_LP=torch.zeros(3, 2),
        fell_back_LP=torch.zeros(3, 2, dtype=torch.bool),
    )
    advantages_PAG, ratio = learner_credit(credit, 1, names, ["first", "second"])
    assert ratio == {"first": 4.0, "second": 1.0}
    assert advantages_by_author(advantages_PAG, list(ratio)) == {
        "first": values_LPAG[1, :, 0].tolist(),
        "second": values_LPAG[1, :, 1].tolist(),
    }
    advantages_PAG, ratio = learner_credit(credit, 2, names, [])
    assert (advantages_PAG.shape, ratio) == ((2, 0, 2), {})
    assert advantages_by_author(np.asarray(advantages_PAG), []) == {}
