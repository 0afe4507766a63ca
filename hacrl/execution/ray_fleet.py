"""Each agent in a process of its own, all at the same time, carried by Ray: on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hacrl.agent import AgentUpdate
from hacrl.algorithms.algorithm import Algorithm, Credit
from hacrl.config import AgentConfig, EvaluationConfig, RayConfig, RunConfig
from hacrl.errors import AgentError, AgentLostError, ClusterError, HacrlError, RunDirectoryError
from hacrl.execution.fleet import AgentSeconds, learner_credit
from hacrl.execution.hosted_agent import HostedAgent
from hacrl.execution.placement import Demand, Node, arithmetic, demands, impossible, threads
from hacrl.types import Completion, RolloutGroup, Task

LOG_LINES = 20
# How long an agent may take to end its engine before its process is ended from outside.
CLOSE_SECONDS = 5.0
# How long a process may take to begin where its part is reserved: if that machine is lost in between, nobody tells.
START_SECONDS = 300.0
# Waiting is cut into pieces of this length, so that signals are seen between them.
PATIENCE_SECONDS = 1.0


class RayFleet:
    """See `Fleet`. Folders of checkpoints and exports are written by the agents' processes: on a cluster of several
    machines they must be on a file system that all of them share.

    Raises ClusterError where the cluster cannot be reached or cannot hold the agents. From any method, an error of
    `hacrl.errors` that an agent raised comes out as it is; AgentError tells of any other, AgentLostError of a process
    that died. After an error nothing but `close` is of use.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: RayConfig,
        algorithm: Algorithm,
        *,
        dump_directory: Path,
        log_directory: Path,
        engine_log_directory: Path | None = None,
    ) -> None:
        self.config = config
        self.names = tuple(agent.name for agent in config.agents)
        self._log_directory = log_directory.absolute()
        self._log_begins = {name: _size(self._log(name)) for name in self.names}
        self._actors: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._fingerprints: dict[str, str] = {}
        self._group: Any = None
        self._connected = self._own_cluster = False
        self._seconds = AgentSeconds(self.names)
        try:
            self._connect(settings)
            asked = self._reserve(settings)
            self._start_processes(asked)
            engine_logs = engine_log_directory.absolute() if engine_log_directory is not None else None
            self._fingerprints = self._ask(
                "load",
                "start",
                {
                    demand.agent: (
                        as_seen_by(config, demand),
                        algorithm,
                        dump_directory.absolute(),
                        engine_logs,
                    )
                    for demand in asked
                },
            )
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ what the loop asks

    def sample(self, tasks: Sequence[Task], *, step: int) -> list[Completion]:
        questions = _put([_question(task) for task in tasks])
        answers = self._ask("sample", "sample", dict.fromkeys(self.names, (questions, step)))
        return [completion for name in self.names for completion in answers[name]]

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        questions = _put([_question(task) for task in tasks])
        answers = self._ask("evaluate", "sample_evaluation", dict.fromkeys(self.names, (questions, settings)))
        return [completion for name in self.names for completion in answers[name]]

    def update(self, groups: Sequence[RolloutGroup], credit: Credit, *, step: int) -> Mapping[str, AgentUpdate]:
        # Once into the object store, for all learners.
        exchanged = _put([replace(group, task=_question(group.task)) for group in groups])
        arguments = {
            name: (exchanged, *learner_credit(credit, learner, self.names), self._fingerprints, step)
            for learner, name in enumerate(self.names)
        }
        updates = self._ask("update", "update", arguments)
        return {name: updates[name] for name in self.names}

    def lap(self) -> Mapping[str, Mapping[str, float]]:
        return self._seconds.lap()

    def save(self, folder: Path) -> None:
        self._ask("save", "save", {name: (folder.absolute() / name,) for name in self.names})
        self._check_shared(folder, self.names, "agent.json")

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self._ask("load", "load", {name: (folder.absolute() / name, weights_only) for name in self.names})

    def export(self, folder: Path, cards: Mapping[str, str]) -> None:
        learners = [agent.name for agent in self.config.agents if agent.role != "author"]
        as_adapter = self.config.export == "adapter"
        self._ask("export", "export", {name: (folder.absolute() / name, cards[name], as_adapter) for name in learners})
        self._check_shared(folder, learners, "README.md")

    def close(self) -> None:
        import ray

        actors, self._actors = self._actors, {}
        if ray.is_initialized():
            closing = [actor.close.remote() for actor in actors.values()]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
            for actor in actors.values():
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
                self._group = None
        if self._connected:
            self._connected = False
            ray.shutdown()

    # ------------------------------------------------------------ starting

    def _connect(self, settings: RayConfig) -> None:
        # Ray would otherwise send usage figures to its makers, and its handler would end the run at once on SIGTERM.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        with _signals_as_they_were():
            import ray

            if ray.is_initialized():
                return
            address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
            arguments = {"include_dashboard": False} if address == "local" else {}
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **arguments)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ClusterError(
                    f"execution.address: no cluster can be reached at {address!r}: {error}; start one with `ray "
                    f"start`, give another address, or leave it out to use this machine alone"
                ) from error
            self._connected, self._own_cluster = True, address == "local"

    def _reserve(self, settings: RayConfig) -> list[Demand]:
        """Take each agent's part of the cluster. Raises ClusterError where that cannot be had, or not in time."""
        from ray.util.placement_group import placement_group

        # A cluster of this run's own will not grow, and nobody else uses it.
        patience = 0.0 if self._own_cluster else settings.wait_s
        begin = time.perf_counter()
        while True:
            if self._group is None:
                nodes = list(_nodes().values())
                asked = demands(self.config, nodes)
                reason = impossible(asked, nodes)
            if self._group is None and reason is None:
                bundles = [{"CPU": demand.cpus} | ({"GPU": demand.gpus} if demand.gpus else {}) for demand in asked]
                self._group = placement_group(bundles, strategy="PACK")
            if self._group is not None and self._group.wait(PATIENCE_SECONDS):
                return asked
            if time.perf_counter() - begin > patience:
                break
            if self._group is None:
                time.sleep(PATIENCE_SECONDS)
        # Machines may have come or gone meanwhile.
        nodes = list(_nodes().values())
        reason = impossible(asked, nodes)
        if reason is None:
            free = _free()
            reason = (
                f"after {patience:g} s (execution.wait_s) {free['CPU']:g} CPUs and {free['GPU']:g} GPUs are free, and "
                f"each agent needs its part on one machine"
            )
        raise ClusterError(
            f"the cluster cannot hold the run's agents: {reason}\n{arithmetic(asked, nodes)}\n"
            f"lower agents[].resources (docs/ray.md), or give the run a larger cluster"
        )

    def _start_processes(self, asked: Sequence[Demand]) -> None:
        import ray
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node_of_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = _nodes()
        homes = {demand.agent: node_of_bundle[index] for index, demand in enumerate(asked)}
        for index, demand in enumerate(asked):
            home = homes[demand.agent]
            if home not in nodes:
                raise AgentLostError(f"agent {demand.agent}: the machine that was reserved for it has died")
            options = {
                "num_cpus": demand.cpus,
                "num_gpus": demand.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            }
            self._actors[demand.agent] = (
                ray.remote(HostedAgent)
                .options(**options)
                .remote(
                    demand.agent,
                    folder=os.getcwd(),
                    log=str(self._log(demand.agent)),
                    threads=threads(
                        self.config.agent(demand.agent),
                        node=nodes[home],
                        agents_there=sum(other == home for other in homes.values()),
                        environment=os.environ.get("OMP_NUM_THREADS"),
                    ),
                )
            )
        calls = {name: actor.where.remote() for name, actor in self._actors.items()}
        self._where = self._collect("start", calls, within_s=START_SECONDS)

    # ------------------------------------------------------------ asking

    def _ask(self, phase: str, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call a method of several agents at the same time; what each gave, once all have answered."""
        begin = time.perf_counter()
        calls = {name: getattr(self._actors[name], method).remote(*values) for name, values in arguments.items()}
        answers = self._collect(phase, calls)
        waited = time.perf_counter() - begin
        for name, answer in answers.items():
            self._seconds.add(name, phase, answer.seconds, waited=waited - answer.seconds)
            for text in answer.warnings:
                warnings.warn(text if text.startswith(f"agent {name}") else f"agent {name}: {text}", stacklevel=3)
        return {name: answer.value for name, answer in answers.items()}

    def _collect(self, phase: str, calls: Mapping[str, Any], *, within_s: float = math.inf) -> dict[str, Any]:
        """The results by agent. The first failure is told at once, whatever the others are doing."""
        import ray

        begin = time.perf_counter()
        names = {reference: name for name, reference in calls.items()}
        results = {}
        while names:
            done, _ = ray.wait(list(names), num_returns=1, timeout=PATIENCE_SECONDS)
            for reference in done:
                name = names.pop(reference)
                results[name] = self._result(name, phase, reference)
            if names and time.perf_counter() - begin > within_s:
                raise AgentLostError(
                    f"agent {', '.join(names.values())}: nothing heard for {within_s:g} s in the phase {phase!r}"
                )
        return results

    def _result(self, name: str, phase: str, reference: Any) -> Any:
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            return ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, HacrlError):
                raise error.cause from None
            raise AgentError(
                f"agent {name} ({self._where.get(name, 'starting')}) failed in the phase {phase!r}:\n{_plain(error)}"
            ) from None
        except RayError as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise AgentError(f"agent {name}: its process cannot be used:\n{_plain(error)}") from None
            raise AgentLostError(
                f"agent {name} ({self._where.get(name, 'starting')}): its process died or cannot be reached, in the "
                f"phase {phase!r} (a process killed by SIGKILL is often out of memory)\n"
                f"{_plain(error)}\n{self._last_lines(name)}"
            ) from None

    def _check_shared(self, folder: Path, names: Sequence[str], file: str) -> None:
        for name in names:
            if not (folder / name / file).exists():
                raise RunDirectoryError(
                    f"{folder / name}: agent {name} ({self._where[name]}) wrote its files there, and they are not seen "
                    f"on {socket.gethostname()}; with several machines, output must be on a file system that all share"
                )

    def _log(self, name: str) -> Path:
        return self._log_directory / f"{name}.log"

    def _last_lines(self, name: str) -> str:
        log = self._log(name)
        try:
            with log.open("rb") as file:
                file.seek(self._log_begins[name])
                lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        except OSError:
            return f"{log} cannot be read here"
        if not lines:
            return f"it printed nothing to {log}"
        return "\n".join([f"the last lines of {log}:", *(f"  {line}" for line in lines)])


def as_seen_by(config: RunConfig, demand: Demand) -> RunConfig:
    """The run's configuration in one agent's process, where Ray shows no GPUs but its own, counted from 0."""
    agents = [
        agent if agent.name != demand.agent else agent.model_copy(update={"device": _device(agent, demand)})
        for agent in config.agents
    ]
    return config.model_copy(update={"agents": agents})


def _device(agent: AgentConfig, demand: Demand) -> str:
    return ("cuda" if demand.gpus else "cpu") if agent.device.startswith(("auto", "cuda")) else agent.device


def _question(task: Task) -> Task:
    """A task as agents need it. Columns stay behind: they are for rewards, and may be of types unknown elsewhere."""
    return replace(task, columns={})


def _put(value: Any) -> Any:
    import ray

    return ray.put(value)


def _nodes() -> dict[str, Node]:
    """The machines of the cluster by Ray's id."""
    import ray

    return {
        node["NodeID"]: Node(
            name=node["NodeManagerHostname"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def _free() -> dict[str, float]:
    import ray

    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in ("CPU", "GPU")}


def _plain(error: BaseException) -> str:
    """Ray's message without the codes that colour it, and without its general advice."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return re.sub(r" Some common causes include: .*", "", text).rstrip()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def _signals_as_they_were() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
