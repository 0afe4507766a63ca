"""What the training loop asks of a set of agents, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hacrl.agent import AgentUpdate
from hacrl.algorithms.algorithm import Credit
from hacrl.config import EvaluationConfig
from hacrl.types import Completion, RolloutGroup, Task

# Phases of a step whose seconds are told for each agent.
TIMED_PHASES = ("sample", "update", "evaluate")


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

    def lap(self) -> Mapping[str, Mapping[str, float]]:
        """By agent, the seconds it sampled, updated, evaluated, and waited for others since the last lap."""
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


class AgentSeconds:
    """Sums each agent's seconds by phase, and those in which it waited for other agents to end a phase."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._seconds: dict[str, dict[str, float]] = {name: {} for name in self._names}

    def add(self, name: str, phase: str, seconds: float, *, waited: float) -> None:
        if phase in TIMED_PHASES:
            own = self._seconds[name]
            own[phase] = own.get(phase, 0.0) + seconds
            own["wait"] = own.get("wait", 0.0) + waited

    def lap(self) -> Mapping[str, Mapping[str, float]]:
        """What has been summed since the last lap; starts a new one."""
        seconds, self._seconds = self._seconds, {name: {} for name in self._names}
        return seconds


def learner_credit(
    credit: Credit, learner: int, names: Sequence[str]
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """What one learner is told, by author: advantages (P x G, NaN = no such row), and the capability ratio."""
    advantages_APG = credit.advantages_LPAG[learner].transpose(0, 1).tolist()
    return (
        dict(zip(names, advantages_APG, strict=True)),
        dict(zip(names, credit.ratio_LA[learner].tolist(), strict=True)),
    )
