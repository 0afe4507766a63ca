"""All agents in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hacrl.agent import Agent, AgentUpdate
from hacrl.algorithms.algorithm import Algorithm, Credit
from hacrl.clock import Clock
from hacrl.config import EvaluationConfig, RunConfig
from hacrl.encode import Encoder
from hacrl.execution.fleet import AgentSeconds, learner_credit
from hacrl.policy import load_policies
from hacrl.process import keep_freed_memory
from hacrl.types import Completion, RolloutGroup, Task

T = TypeVar("T")


class LocalFleet:
    """See `Fleet`. Agents whose LoRA adapters sit on the same base model share it in memory."""

    def __init__(
        self,
        config: RunConfig,
        encoders: Mapping[str, Encoder],
        algorithm: Algorithm,
        *,
        dump_directory: Path,
        log_directory: Path | None = None,
    ) -> None:
        keep_freed_memory()
        self.config = config
        self.names = tuple(agent.name for agent in config.agents)
        policies = load_policies(config.agents, seed=config.seed)
        self.agents = [
            Agent(
                config,
                agent,
                policies[agent.name],
                encoders[agent.name],
                algorithm,
                dump_directory=dump_directory,
                log_directory=log_directory,
            )
            for agent in config.agents
        ]
        self._fingerprints = {agent.name: agent.encoder.fingerprint for agent in self.agents}
        self._seconds = AgentSeconds(self.names)

    def sample(self, tasks: Sequence[Task], *, step: int) -> list[Completion]:
        answers = self._in_turn("sample", lambda _, agent: agent.sample(tasks, step=step))
        return [completion for name in self.names for completion in answers[name]]

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        answers = self._in_turn("evaluate", lambda _, agent: agent.sample_evaluation(tasks, settings))
        return [completion for name in self.names for completion in answers[name]]

    def update(self, groups: Sequence[RolloutGroup], credit: Credit, *, step: int) -> Mapping[str, AgentUpdate]:
        return self._in_turn(
            "update",
            lambda learner, agent: agent.update(
                groups, *learner_credit(credit, learner, self.names), self._fingerprints, step=step
            ),
        )

    def lap(self) -> Mapping[str, Mapping[str, float]]:
        return self._seconds.lap()

    def _in_turn(self, phase: str, call: Callable[[int, Agent], T]) -> dict[str, T]:
        """Every agent's result by name; while one is at work the others wait."""
        clock = Clock()
        results = {}
        for number, agent in enumerate(self.agents):
            with clock.phase(agent.name):
                results[agent.name] = call(number, agent)
        seconds = clock.lap()
        for name in self.names:
            self._seconds.add(name, phase, seconds[name], waited=seconds["total"] - seconds[name])
        return results

    def save(self, folder: Path) -> None:
        for agent in self.agents:
            agent.save(folder / agent.name)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        for agent in self.agents:
            agent.load(folder / agent.name, weights_only=weights_only)

    def export(self, folder: Path, cards: Mapping[str, str]) -> None:
        for agent in self.agents:
            if agent.learner is not None:
                agent.export(folder / agent.name, card=cards[agent.name], as_adapter=self.config.export == "adapter")

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.agents = []
