"""What the training loop asks of a set of agents, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from hacrl.agent import AgentUpdate
from hacrl.algorithms.algorithm import Credit
from hacrl.config import EvaluationConfig
from hacrl.execution.timeline import Lap
from hacrl.types import Completion, RolloutGroup, Task

Deliver = Callable[[Sequence[Completion]], None]
"""Told of answers as they are done: whole groups of one author, in any order."""


class Sampling(Protocol):
    """One step's sampling, begun."""

    def wait(self) -> None:
        """Return when all answers have been delivered, or the missing ones are not waited for any longer."""
        ...


class Updating(Protocol):
    """One step's update, begun."""

    def wait(self) -> Mapping[str, AgentUpdate]:
        """Every agent's part: empty for authors only, and for agents that are late or have been let go."""
        ...


class Fleet(Protocol):
    """All agents of a run. Between agents only text, numbers and ids of an identical tokenizer are passed on.

    What is begun is done in the order in which it was begun, by each agent for itself.
    """

    @property
    def names(self) -> Sequence[str]:
        """Agents in the order of the author and learner axes."""
        ...

    @property
    def absent(self) -> Mapping[str, str]:
        """Agents that have been let go, and why."""
        ...

    @property
    def weights_versions(self) -> Mapping[str, int]:
        """How many updates each agent's weights have behind them, as far as it is known here."""
        ...

    def sample(self, tasks: Sequence[Task], *, step: int, deliver: Deliver) -> Sampling:
        """Begin every author's answers to the tasks, with the weights that the updates begun so far give."""
        ...

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        """Every agent's answers to held-out tasks, by these settings; by the run's own if left out."""
        ...

    def update(self, groups: Sequence[RolloutGroup], credit: Credit, *, step: int) -> Updating:
        """Let every learner begin to learn."""
        ...

    def lap(self) -> Lap:
        """What became of the time since the last lap."""
        ...

    def save(self, folder: Path, *, before: Path | None) -> None:
        """Write every agent's state to `folder/<name>/`; for an absent one, what the folder `before` has of it."""
        ...

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Take over what `save` wrote; without the optimizer's state where `weights_only`."""
        ...

    def rejoin(self, folder: Path) -> Sequence[str]:
        """Try to start absent agents anew, from what `save` wrote to `folder`; the names of those that are back."""
        ...

    def export(self, folder: Path, cards: Mapping[str, str]) -> None:
        """Write every learner as an ordinary Hugging Face folder `folder/<name>/`; `cards` are the model cards."""
        ...

    def close(self) -> None:
        """Release models and processes."""
        ...


def learner_credit(
    credit: Credit, learner: int, names: Sequence[str], authors: Sequence[str]
) -> tuple[np.ndarray, dict[str, float]]:
    """What one learner is told of the authors that it uses: advantages (P x A x G, NaN = no such row), and each
    author's capability ratio."""
    used = set(authors)
    places = [place for place, name in enumerate(names) if name in used]
    ratio_A = credit.ratio_LA[learner, places].tolist()
    return credit.advantages_LPAG[learner][:, places].numpy(), dict(
        zip((names[place] for place in places), ratio_A, strict=True)
    )


def advantages_by_author(advantages_PAG: np.ndarray, names: Sequence[str]) -> dict[str, list[list[float]]]:
    """The same as an agent takes it: P x G by author."""
    return dict(zip(names, advantages_PAG.swapaxes(0, 1).tolist(), strict=True))
