"""All agents in this process, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hacrl.agent import Agent, AgentUpdate
from hacrl.algorithms.algorithm import Algorithm, Credit
from hacrl.config import EvaluationConfig, RunConfig
from hacrl.encode import Encoder
from hacrl.execution.fleet import Deliver, advantages_by_author, learner_credit
from hacrl.execution.timeline import Lap, Span, Timeline
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
        self.absent: Mapping[str, str] = {}
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
        self._timeline = Timeline(self.names)
        self._begun: list[_Sampling] = []

    @property
    def weights_versions(self) -> Mapping[str, int]:
        return {agent.name: agent.weights_version for agent in self.agents}

    def sample(self, tasks: Sequence[Task], *, step: int, deliver: Deliver) -> _Sampling:
        def work(_: int, agent: Agent) -> None:
            for part in agent.sample(tasks, step=step):
                deliver(part)

        sampling = _Sampling(lambda: self._in_turn("sample", work))
        self._begun.append(sampling)
        return sampling

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        answers = self._in_turn("evaluate", lambda _, agent: agent.sample_evaluation(tasks, settings))
        return [completion for name in self.names for completion in answers[name]]

    def update(self, groups: Sequence[RolloutGroup], credit: Credit, *, step: int) -> _Updated:
        # What was begun before is sampled with the weights as they are now.
        for sampling in self._begun:
            sampling.wait()
        self._begun.clear()

        def work(learner: int, agent: Agent) -> AgentUpdate:
            advantages_PAG, ratio = learner_credit(credit, learner, self.names, self.config.authors_for(agent.config))
            advantages = advantages_by_author(advantages_PAG, list(ratio))
            return agent.update(groups, advantages, ratio, self._fingerprints, step=step)

        return _Updated(self._in_turn("update", work))

    def lap(self) -> Lap:
        seconds, spans = self._timeline.lap()
        return Lap(seconds=seconds, counts={}, spans=spans)

    def _in_turn(self, phase: str, call: Callable[[int, Agent], T]) -> dict[str, T]:
        """Every agent's result by name; while one is at work the others wait."""
        results = {}
        for number, agent in enumerate(self.agents):
            begin = time.time()
            results[agent.name] = call(number, agent)
            self._timeline.add(
                Span(agent=agent.name, process="local", phase=phase, begin=begin, end=time.time()),
            )
        return results

    def save(self, folder: Path, *, before: Path | None) -> None:  # noqa: ARG002 (nobody is absent here)
        for agent in self.agents:
            agent.save(folder / agent.name)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        for agent in self.agents:
            agent.load(folder / agent.name, weights_only=weights_only)

    def rejoin(self, folder: Path) -> Sequence[str]:  # noqa: ARG002
        return ()

    def export(self, folder: Path, cards: Mapping[str, str]) -> None:
        for agent in self.agents:
            if agent.learner is not None:
                as_adapter = self.config.export == "adapter"
                agent.export(folder / agent.name, card=cards[agent.name], as_adapter=as_adapter)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.agents = []


class _Sampling:
    """Sampling that is put off until it is waited for, or until weights change."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def wait(self) -> None:
        if (work := self._work) is not None:
            self._work = None
            work()


class _Updated:
    """An update that has been made."""

    def __init__(self, updates: Mapping[str, AgentUpdate]) -> None:
        self._updates = updates

    def wait(self) -> Mapping[str, AgentUpdate]:
        return self._updates
