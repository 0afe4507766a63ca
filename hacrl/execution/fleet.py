"""What the training loop asks of a set of agents, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hacrl.agent import AgentUpdate
from hacrl.algorithms.algorithm import Credit
from hacrl.config import EvaluationConfig
from hacrl.types import Completion, RolloutGroup, Task


class Fleet(Protocol):
    """All agents of a run. Between agents only text, numbers and ids of an identical tokenizer are passed on."""

    @property
    def names(self) -> Sequence[str]:
        """Agents in the order of the author and learner axes."""
        ...

    def sample(self, tasks: Sequence[Task], *, step: int) -> list[Completion]:
        """Every author's answers to the tasks, each author with its own group size."""
        ...

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        """Every agent's answers to held-out tasks, by these settings; by the run's own if left out."""
        ...

    def update(self, groups: Sequence[RolloutGroup], credit: Credit, *, step: int) -> Mapping[str, AgentUpdate]:
        """Let every learner learn; the result holds one entry per agent, empty for authors only."""
        ...

    def save(self, folder: Path) -> None:
        """Write every agent's state to `folder/<name>/`."""
        ...

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Take over what `save` wrote; without the optimizer's state where `weights_only`."""
        ...

    def export(self, folder: Path, cards: Mapping[str, str]) -> None:
        """Write every learner as an ordinary Hugging Face folder `folder/<name>/`; `cards` are the model cards."""
        ...

    def close(self) -> None:
        """Release models and processes."""
        ...
