"""A step's answers on their way to learners in other processes: to each learner what it can use, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from hacrl.types import Completion, RolloutGroup, SharedCompletion, SharedGroup, Task

Told = Sequence[Sequence[Completion | SharedCompletion]]
"""One author's answers, by task."""

# For the author itself; for a learner with the same tokenizer; for any other.
_Form = Literal["whole", "ids", "text"]


class Exchange:
    """Sends each author's answers once in each form that a learner wants, however many learners want it."""

    def __init__(
        self, groups: Sequence[RolloutGroup], fingerprints: Mapping[str, str], put: Callable[[Told], Any]
    ) -> None:
        """`put` takes one author's answers and returns what learners are sent in their place."""
        self._fingerprints = fingerprints
        self._put = put
        self._sent: dict[tuple[str, _Form], Any] = {}
        self._answers: dict[str, list[list[Completion]]] = {name: [[] for _ in groups] for name in fingerprints}
        for position, group in enumerate(groups):
            for completion in group.completions:
                self._answers[completion.author][position].append(completion)

    def told(self, learner: str, authors: Sequence[str]) -> tuple[list[Any], dict[str, str]]:
        """For one learner, of each author that it uses: what was put, and the tokenizer's fingerprint."""
        own = self._fingerprints[learner]
        sent = []
        for author in authors:
            form: _Form = "whole" if author == learner else "ids" if self._fingerprints[author] == own else "text"
            if (author, form) not in self._sent:
                self._sent[author, form] = self._put(self._in_form(author, form))
            sent.append(self._sent[author, form])
        return sent, {author: self._fingerprints[author] for author in authors}

    def _in_form(self, author: str, form: _Form) -> Told:
        answers = self._answers[author]
        if form == "whole":
            return answers
        return [[_shared(completion, ids=form == "ids") for completion in group] for group in answers]


def _shared(completion: Completion, *, ids: bool) -> SharedCompletion:
    return SharedCompletion(
        task_id=completion.task_id,
        author=completion.author,
        index=completion.index,
        text=completion.text,
        tokens=completion.tokens,
        token_ids=completion.token_ids if ids else None,
        mean_logprob=completion.mean_logprob,
        finish_reason=completion.finish_reason,
    )


def shared_groups(tasks: Sequence[Task], told: Sequence[Told]) -> list[SharedGroup]:
    """The groups that a learner is given, from what it was told of each author, in the order of authors."""
    return [
        SharedGroup(task=task, completions=tuple(chain.from_iterable(answers[position] for answers in told)))
        for position, task in enumerate(tasks)
    ]
