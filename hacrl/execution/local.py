"""All agents in this process, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hacrl.agent import Agent, AgentUpdate
from hacrl.algorithms.algorithm import Algorithm, Credit
from hacrl.config import EvaluationConfig, RunConfig
from hacrl.encode import Encoder
from hacrl.export import export_agent
from hacrl.policy import load_policies
from hacrl.process import keep_freed_memory
from hacrl.types import Completion, RolloutGroup, Task


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

    def sample(self, tasks: Sequence[Task], *, step: int) -> list[Completion]:
        return [completion for agent in self.agents for completion in agent.sample(tasks, step=step)]

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        return [completion for agent in self.agents for completion in agent.sample_evaluation(tasks, settings)]

    def update(self, groups: Sequence[RolloutGroup], credit: Credit, *, step: int) -> Mapping[str, AgentUpdate]:
        updates = {}
        for learner, agent in enumerate(self.agents):
            advantages_APG = credit.advantages_LPAG[learner].transpose(0, 1).tolist()
            updates[agent.name] = agent.update(
                groups,
                dict(zip(self.names, advantages_APG, strict=True)),
                dict(zip(self.names, credit.ratio_LA[learner].tolist(), strict=True)),
                self._fingerprints,
                step=step,
            )
        return updates

    def save(self, folder: Path) -> None:
        for agent in self.agents:
            agent.save(folder / agent.name)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        for agent in self.agents:
            agent.load(folder / agent.name, weights_only=weights_only)

    def export(self, folder: Path, cards: Mapping[str, str]) -> None:
        for agent in self.agents:
            if agent.learner is not None:
                export_agent(
                    agent.policy,
                    agent.encoder,
                    folder / agent.name,
                    card=cards[agent.name],
                    as_adapter=self.config.export == "adapter",
                )

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.agents = []
