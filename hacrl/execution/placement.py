"""What each agent's processes ask of a cluster, and whether the cluster can ever hold them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.config import AgentConfig, RunConfig
from hacrl.execution.hosted_agent import Kind

# What a process reserves where the configuration does not say: so little that any machine takes several, for agents
# that wait for each other leave cores idle.
DEFAULT_CPUS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of a cluster: everything it has, used or not."""

    name: str
    cpus: float
    gpus: float
    address: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one process of an agent reserves, on one machine; `node` is the address of the only one that will do."""

    agent: str
    kind: Kind
    rank: int
    size: int
    cpus: float
    gpus: float
    node: str | None = None

    @property
    def process(self) -> str:
        """The agent's name for its first worker, which is often its only process."""
        return self.agent if (self.kind, self.rank) == ("worker", 0) else f"{self.agent}.{self.kind}-{self.rank}"

    def fits(self, node: Node) -> bool:
        return self.cpus <= node.cpus and self.gpus <= node.gpus and self.node in (None, node.address)

    def __str__(self) -> str:
        return f"{self.process} {_amounts(self.cpus, self.gpus)}" + (f" on {self.node}" if self.node else "")


def demands(config: RunConfig, nodes: Sequence[Node]) -> list[Demand]:
    """Every process's demand, in the order of the agents; what is left out depends on the cluster's GPUs.

    `device: auto` means CUDA where the cluster has a GPU. Processes on CUDA that are too many for one GPU each share: k
    of them on a GPU reserve 1/k.
    """
    total = sum(node.gpus for node in nodes)
    processes = [
        (agent, kind, rank, size)
        for agent in config.agents
        for kind, size in _sizes(config, agent)
        for rank in range(size)
    ]
    on_cuda = [agent for agent, *_ in processes if _on_cuda(agent, cluster_has_gpus=total > 0)]
    share = math.ceil(len(on_cuda) / total) if on_cuda and total >= 1 else 1
    # Rounded down: three thirds must not be more than one.
    part = 1.0 if share == 1 else math.floor(1e4 / share) / 1e4
    asked = []
    for agent, kind, rank, size in processes:
        sampling = config.sampling_of(agent)
        samples = kind == "sampler" or config.samplers_of(agent) == 0
        engine_gpus = sampling.vllm.tensor_parallel_size if sampling.engine == "vllm" and samples else 1
        gpus = agent.resources.gpus
        if gpus is None:
            gpus = 0.0 if agent not in on_cuda else part if engine_gpus == 1 else float(engine_gpus)
        asked.append(
            Demand(
                agent=agent.name,
                kind=kind,
                rank=rank,
                size=size,
                cpus=agent.resources.cpus or DEFAULT_CPUS,
                gpus=gpus,
                node=agent.resources.node,
            )
        )
    return asked


def _sizes(config: RunConfig, agent: AgentConfig) -> list[tuple[Kind, int]]:
    return [("worker", agent.resources.workers), ("sampler", config.samplers_of(agent))]


def threads(agent: AgentConfig, *, node: Node, processes_there: int, environment: str | None) -> int:
    """Threads of a process's arithmetic; `environment` is OMP_NUM_THREADS where the run was started."""
    if agent.resources.cpus is not None:
        return max(1, int(agent.resources.cpus))
    if environment is not None and environment.isdigit():
        return max(1, int(environment))
    return max(1, int(node.cpus) // processes_there)


def impossible(asked: Sequence[Demand], nodes: Sequence[Node]) -> str | None:
    """Why no state of the cluster holds all demands, with the arithmetic; None where nothing speaks against it.

    Only what is certain is told: a process above every machine, or a sum above the whole. Whether the rest can be
    packed is for the cluster to find out.
    """
    reasons = [f"{demand} fits on no machine" for demand in asked if not any(demand.fits(node) for node in nodes)]
    for name, wanted, there in (
        ("CPUs", sum(demand.cpus for demand in asked), sum(node.cpus for node in nodes)),
        ("GPUs", sum(demand.gpus for demand in asked), sum(node.gpus for node in nodes)),
    ):
        if wanted > there + 1e-9:
            reasons.append(f"{wanted:g} {name} are asked for and {there:g} are there")
    return "; ".join(reasons) or None


def arithmetic(asked: Sequence[Demand], nodes: Sequence[Node]) -> str:
    """Who asks for what, and what each machine has; two lines for a message."""
    machines = ", ".join(f"{node.name} {_amounts(node.cpus, node.gpus)}" for node in nodes) or "none"
    cpus, gpus = sum(demand.cpus for demand in asked), sum(demand.gpus for demand in asked)
    return f"  agents: {', '.join(map(str, asked))}; together {_amounts(cpus, gpus)}\n  machines: {machines}"


def _on_cuda(agent: AgentConfig, *, cluster_has_gpus: bool) -> bool:
    return agent.device.startswith("cuda") or (agent.device == "auto" and cluster_has_gpus)


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
