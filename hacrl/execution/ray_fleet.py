"""Each agent in processes of its own, all at the same time: on this machine or on a cluster."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hacrl.agent import ABSENT, AgentUpdate
from hacrl.algorithms.algorithm import Algorithm, Credit
from hacrl.config import AgentConfig, EvaluationConfig, RayConfig, RunConfig
from hacrl.errors import AgentError, AgentLostError, ClusterError, HacrlError, RunDirectoryError
from hacrl.execution.exchange import Exchange
from hacrl.execution.fleet import Deliver, learner_credit
from hacrl.execution.hosted_agent import Answer, HostedAgent
from hacrl.execution.placement import Demand, demands, threads
from hacrl.execution.ray_cluster import PATIENCE_SECONDS, DiedError, FailedError, Pending, RayCluster
from hacrl.execution.timeline import TIMED_PHASES, Lap, Span, Timeline
from hacrl.types import Completion, RolloutGroup, Task

LOG_LINES = 20
# How long an agent may take to end its engine before its process is ended from outside.
CLOSE_SECONDS = 5.0
# How long a process may take to begin where its part is reserved: if that machine is lost in between, nobody tells.
START_SECONDS = 300.0
# How long a process that has made no progress is given to tell what it is doing.
STACK_SECONDS = 3.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Process:
    """One of an agent's processes, as far as it is known here. `moved_at` is when it last was seen to make progress."""

    demand: Demand
    remote: Any
    log: Path
    log_begins: int
    where: str = "starting"
    pulse: Any = None
    asked_pulse: Pending | None = None
    moved_at: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """A call of one process, under way. `take` is told each value of a stream but the last, which is an `Answer`."""

    process: _Process
    phase: str
    pending: Pending
    request: _Request
    take: Callable[[Any], None] | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class _Request:
    """What an agent has been asked, of one or several of its processes; the value is that of the first of them."""

    agent: str
    phase: str
    open: int = 0
    value: Any = None
    ended_at: float | None = None
    # Nobody waits for it any longer; what still comes is counted.
    abandoned: bool = False

    @property
    def done(self) -> bool:
        return self.open == 0


@dataclass(kw_only=True, slots=True)
class _Agent:
    """An agent's processes."""

    config: AgentConfig
    workers: list[_Process] = field(default_factory=list)
    samplers: list[_Process] = field(default_factory=list)

    @property
    def processes(self) -> list[_Process]:
        return [*self.workers, *self.samplers]

    @property
    def sampling(self) -> list[_Process]:
        return self.samplers or self.workers


class RayFleet:
    """See `Fleet`. Folders of checkpoints and exports are written by the agents' processes: on a cluster of several
    machines they must be on a file system that all of them share.

    An error of `hacrl.errors` that an agent raised comes out of any method as it is, AgentError tells of any other, and
    AgentLostError of a process that died or made no progress for `execution.watchdog_s`; after an error nothing but
    `close` is of use. With `execution.on_agent_failure: continue_without` the agent is let go instead, as long as one
    that learns is left; a lost one only if it is not to be `restarted` by whoever catches AgentLostError. Raises
    ClusterError where the cluster cannot be reached or cannot hold the agents.
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
        restarted: bool = False,
    ) -> None:
        self.config = config
        self.names = tuple(agent.name for agent in config.agents)
        self.absent: dict[str, str] = {}
        self.weights_versions: dict[str, int] = dict.fromkeys(self.names, 0)
        self._settings = settings
        self._algorithm = algorithm
        self._dump_directory = dump_directory.absolute()
        self._log_directory = log_directory.absolute()
        self._engine_logs = engine_log_directory.absolute() if engine_log_directory is not None else None
        self._restarted = restarted
        # Agents are let go once all have been loaded: a run that cannot begin is no run.
        self._lets_go = False
        self._agents: dict[str, _Agent] = {}
        self._calls: list[_Call] = []
        self._fingerprints: dict[str, str] = {}
        self._counts: dict[str, dict[str, float]] = {}
        self._looked_at = 0.0
        self._timeline = Timeline(self.names)
        self._cluster = RayCluster(settings)
        try:
            self._asked = self._cluster.reserve(lambda nodes: demands(config, nodes))
            self._start(self.names, within_s=START_SECONDS)
        except BaseException:
            self.close()
            raise
        self._lets_go = settings.on_agent_failure == "continue_without"

    # ------------------------------------------------------------ what the loop asks

    def sample(self, tasks: Sequence[Task], *, step: int, deliver: Deliver) -> _Sampling:
        questions = self._cluster.put([_question(task) for task in tasks])
        requests = []
        for name, agent in self._present().items():
            if self._behind(name):
                self._count(name, "steps_missed")
                continue
            request = _Request(agent=name, phase="sample")
            requests.append(request)
            for process in agent.sampling:
                pending = self._cluster.stream(process.remote, "sample", questions, step)
                self._add(process, pending, request, take=partial(self._arrived, request, deliver))
        return _Sampling(self, requests)

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        questions = self._cluster.put([_question(task) for task in tasks])
        place = {task.id: number for number, task in enumerate(tasks)}
        requests = []
        for name, agent in self._present().items():
            request = _Request(agent=name, phase="evaluate", value=[])
            requests.append(request)
            for process in agent.sampling:
                pending = self._cluster.call(process.remote, "sample_evaluation", questions, settings)
                self._add(process, pending, request, take=request.value.extend)
        self._wait(requests)
        return [
            completion
            for request in requests
            if request.agent not in self.absent
            for completion in sorted(request.value, key=lambda item: (place[item.task_id], item.index))
        ]

    def update(self, groups: Sequence[RolloutGroup], credit: Credit, *, step: int) -> _Updating:
        tasks = self._cluster.put([_question(group.task) for group in groups])
        exchange = Exchange(groups, self._fingerprints, self._cluster.put)
        requests = []
        for learner, name in enumerate(self.names):
            if name in self.absent or self._behind(name, "update"):
                continue
            authors = self.config.authors_for(self._agents[name].config)
            told, fingerprints = exchange.told(name, authors)
            advantages_PAG, ratio = learner_credit(credit, learner, self.names, authors)
            arguments = (tasks, advantages_PAG, ratio, fingerprints, step, *told)
            requests.append(self._ask(name, "update", "update", arguments))
            self._send_weights(name)
        return _Updating(self, requests)

    def lap(self) -> Lap:
        seconds, spans = self._timeline.lap()
        counts, self._counts = self._counts, {}
        for name in self.absent:
            counts.setdefault(name, {})["absent"] = 1.0
        return Lap(seconds=seconds, counts=counts, spans=spans)

    def save(self, folder: Path, *, before: Path | None) -> None:
        folder = folder.absolute()
        self._wait([self._ask(name, "save", "save", (folder / name,)) for name in self._present()])
        self._check_shared(folder, list(self._present()), "agent.json")
        for name, reason in self.absent.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            if before is not None and (before / name).exists():
                shutil.copytree(before / name, folder / name)
            (folder / name).mkdir(exist_ok=True)
            (folder / name / ABSENT).write_text(json.dumps({"reason": reason}))

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self._load(self.names, folder, weights_only=weights_only)

    def rejoin(self, folder: Path) -> Sequence[str]:
        back = []
        for name in list(self.absent):
            reason = self.absent.pop(name)
            lets_go, self._lets_go = self._lets_go, False
            try:
                if not self._cluster.whole():
                    raise ClusterError("the cluster has no place for it")
                self._start([name], within_s=max(self._settings.wait_s, START_SECONDS / 10))
                self._load([name], folder, weights_only=False)
            except HacrlError as error:
                self._drop(name, f"{reason}\nit could not be taken back in: {error}")
            else:
                back.append(name)
            finally:
                self._lets_go = lets_go
        return back

    def export(self, folder: Path, cards: Mapping[str, str]) -> None:
        folder = folder.absolute()
        learners = [name for name, agent in self._present().items() if agent.config.role != "author"]
        as_adapter = self.config.export == "adapter"
        self._wait([self._ask(name, "export", "export", (folder / name, cards[name], as_adapter)) for name in learners])
        self._check_shared(folder, [name for name in learners if name not in self.absent], "README.md")

    def close(self) -> None:
        processes = [process.remote for agent in self._agents.values() for process in agent.processes]
        self._agents, self._calls = {}, []
        self._cluster.end(processes, within_s=CLOSE_SECONDS)
        self._cluster.close()

    # ------------------------------------------------------------ starting

    def _start(self, names: Sequence[str], *, within_s: float) -> None:
        """Start and load all processes of these agents."""
        homes = self._cluster.homes()
        for part, demand in enumerate(self._asked):
            if demand.agent not in names:
                continue
            home, node = homes[part]
            if node is None:
                raise AgentLostError(f"agent {demand.agent}: the machine that was reserved for it has died")
            config = self.config.agent(demand.agent)
            log = self._log_directory / f"{demand.process}.log"
            arguments = {
                "name": demand.agent,
                "kind": demand.kind,
                "rank": demand.rank,
                "size": demand.size,
                "folder": os.getcwd(),
                "log": str(log),
                "threads": threads(
                    config,
                    node=node,
                    processes_there=sum(other == home for other, _ in homes),
                    environment=os.environ.get("OMP_NUM_THREADS"),
                ),
            }
            remote = self._cluster.start(HostedAgent, part, demand, arguments)
            process = _Process(demand=demand, remote=remote, log=log, log_begins=_size(log))
            agent = self._agents.setdefault(demand.agent, _Agent(config=config))
            (agent.workers if demand.kind == "worker" else agent.samplers).append(process)
        processes = [process for name in names for process in self._agents[name].processes]
        self._learn_where(processes, within_s=within_s)
        meetings = {
            name: self._value(self._agents[name].workers[0], "start", "rendezvous")
            if len(self._agents[name].workers) > 1
            else None
            for name in names
        }
        requests = []
        for name in names:
            request = _Request(agent=name, phase="load")
            requests.append(request)
            for process in self._agents[name].processes:
                meeting = meetings[name] if process.demand.kind == "worker" else None
                pending = self._cluster.call(
                    process.remote,
                    "start",
                    as_seen_by(self.config, process.demand),
                    self._algorithm,
                    self._dump_directory,
                    self._engine_logs,
                    meeting,
                )
                self._add(process, pending, request)
        self._wait(requests)
        self._fingerprints |= {request.agent: request.value for request in requests}

    def _learn_where(self, processes: Sequence[_Process], *, within_s: float) -> None:
        asked = [(process, self._cluster.call(process.remote, "where")) for process in processes]
        end = time.monotonic() + within_s
        while asked:
            ready = self._cluster.ready([pending for _, pending in asked], timeout=PATIENCE_SECONDS)
            for process, pending in asked:
                if pending in ready:
                    process.where = self._taken(process, "start", pending)
            asked = [(process, pending) for process, pending in asked if pending not in ready]
            if asked and time.monotonic() > end:
                late = ", ".join(process.demand.process for process, _ in asked)
                raise AgentLostError(f"agent {late}: nothing heard for {within_s:g} s in the phase 'start'")

    def _value(self, process: _Process, phase: str, method: str) -> Any:
        pending = self._cluster.call(process.remote, method)
        while not self._cluster.ready([pending], timeout=PATIENCE_SECONDS):
            pass
        return self._taken(process, phase, pending)

    def _load(self, names: Sequence[str], folder: Path, *, weights_only: bool) -> None:
        folder = folder.absolute()
        self._wait([self._ask(name, "load", "load", (folder / name, weights_only)) for name in names])
        for name in names:
            self._send_weights(name)

    # ------------------------------------------------------------ asking

    def _present(self) -> dict[str, _Agent]:
        return {name: self._agents[name] for name in self.names if name not in self.absent}

    def _behind(self, name: str, phase: str | None = None) -> bool:
        """Whether the agent still works at what nobody waits for any longer."""
        return any(
            call.request.agent == name and call.request.abandoned and phase in (None, call.phase)
            for call in self._calls
        )

    def _ask(self, name: str, phase: str, method: str, arguments: tuple[Any, ...]) -> _Request:
        """Call a method of all workers of an agent."""
        request = _Request(agent=name, phase=phase)
        for process in self._agents[name].workers:
            self._add(process, self._cluster.call(process.remote, method, *arguments), request)
        return request

    def _send_weights(self, name: str) -> None:
        """From an agent's workers to its samplers, through the object store and not through here."""
        agent = self._agents[name]
        if not agent.samplers:
            return
        # All workers have to take part where each has a shard; the first gives the whole.
        sent = [self._cluster.call(process.remote, "trained_weights") for process in agent.workers]
        request = _Request(agent=name, phase="take weights")
        for process in agent.samplers:
            pending = self._cluster.call(process.remote, "take_weights", sent[0].reference)
            self._add(process, pending, request)

    def _add(
        self, process: _Process, pending: Pending, request: _Request, *, take: Callable[[Any], None] | None = None
    ) -> None:
        if not any(call.process is process for call in self._calls):
            process.moved_at = time.monotonic()
        request.open += 1
        self._calls.append(_Call(process=process, phase=request.phase, pending=pending, request=request, take=take))

    def _arrived(self, request: _Request, deliver: Deliver, part: Sequence[Completion]) -> None:
        if request.abandoned:
            self._count(request.agent, "rollouts_late", len(part))
        else:
            deliver(part)

    def _count(self, name: str, what: str, value: float = 1.0) -> None:
        counts = self._counts.setdefault(name, {})
        counts[what] = counts.get(what, 0.0) + value

    # ------------------------------------------------------------ waiting

    def _wait(self, requests: Sequence[_Request], *, for_peers: bool = False) -> None:
        """Until all are done; with `for_peers`, those that are done wait `execution.peer_timeout` for the others."""
        patience = (self._settings.peer_timeout if for_peers else None) or math.inf
        while not all(request.done for request in requests):
            self._pump()
            ended = [request.ended_at for request in requests if request.ended_at is not None]
            if ended and time.monotonic() - min(ended) > patience:
                for request in requests:
                    if not request.done:
                        request.abandoned = True
                        self._count(request.agent, f"{request.phase}_late")
                return

    def _pump(self) -> None:
        """Take whatever has come, of any call; waits a little where nothing has."""
        by_pending = {call.pending: call for call in self._calls}
        for pending in self._cluster.ready(list(by_pending), timeout=self._nap()):
            call = by_pending[pending]
            if call in self._calls:  # an agent that is let go takes its other calls with it
                self._advance(call)
        self._look_for_still_ones()

    def _nap(self) -> float:
        return min(PATIENCE_SECONDS, self._settings.watchdog_s / 10, (self._settings.peer_timeout or math.inf) / 4)

    def _advance(self, call: _Call) -> None:
        try:
            value = self._taken(call.process, call.phase, call.pending)
        except StopIteration:
            self._close_call(call)
            return
        except HacrlError as error:
            self._failed(call.request.agent, error)
            return
        call.process.moved_at = time.monotonic()
        if isinstance(value, Answer):
            self._note(call, value)
        elif call.take is not None:
            call.take(value)
        if not call.pending.streams:
            self._close_call(call)

    def _close_call(self, call: _Call) -> None:
        self._calls.remove(call)
        request = call.request
        request.open -= 1
        if request.done:
            request.ended_at = time.monotonic()

    def _note(self, call: _Call, answer: Answer) -> None:
        """What every answer tells, besides its value."""
        name, process = call.request.agent, call.process.demand
        if call.request.phase == "evaluate" and call.take is not None:
            call.take(answer.value)
        elif (process.kind, process.rank) == ("worker", 0):
            call.request.value = answer.value
        if process.kind == "worker":
            self.weights_versions[name] = answer.weights_version
        self._timeline.add(
            Span(agent=name, process=process.process, phase=call.phase, begin=answer.begin, end=answer.end)
        )
        for text in answer.warnings:
            warnings.warn(text if text.startswith(f"agent {name}") else f"agent {name}: {text}", stacklevel=6)

    def _taken(self, process: _Process, phase: str, pending: Pending) -> Any:
        name = process.demand.process
        try:
            return self._cluster.take(pending)
        except FailedError as error:
            self._raise_loss_behind(process, phase)
            raise AgentError(f"agent {name} ({process.where}) failed in the phase {phase!r}:\n{error}") from None
        except DiedError as error:
            if error.at_start:
                raise AgentError(f"agent {name}: its process cannot be used:\n{error}") from None
            raise _lost(process, phase, error) from None

    def _raise_loss_behind(self, process: _Process, phase: str) -> None:
        """The death of one of an agent's workers is an error in those that wait for it, which may be heard first."""
        agent = self._agents.get(process.demand.agent)
        others = [other for other in agent.workers if other is not process] if agent is not None else []
        asked = {self._cluster.aside(other.remote, "pulse"): other for other in others}
        end = time.monotonic() + STACK_SECONDS
        while asked and (left := end - time.monotonic()) > 0:
            for pending in self._cluster.ready(list(asked), timeout=left):
                other = asked.pop(pending)
                try:
                    self._cluster.take(pending)
                except DiedError as error:
                    raise _lost(other, phase, error) from None

    # ------------------------------------------------------------ agents that fail, and agents that hang

    def _failed(self, name: str, error: HacrlError) -> None:
        """Let the agent go, or raise the error."""
        lets_go = self._lets_go and not (isinstance(error, AgentLostError) and self._restarted)
        left = [agent for other, agent in self._present().items() if other != name]
        # A disk that refuses is nobody's fault, and without this agent it would be no less full.
        lets_go = lets_go and not isinstance(error, RunDirectoryError)
        if not lets_go or not any(agent.config.role != "author" for agent in left):
            raise error
        self._drop(name, str(error))
        warnings.warn(
            f"{error}\nagent {name} is let go (execution.on_agent_failure); the others go on without it", stacklevel=2
        )

    def _drop(self, name: str, reason: str) -> None:
        self.absent[name] = reason
        for call in [call for call in self._calls if call.request.agent == name]:
            self._close_call(call)
        agent = self._agents.pop(name, None)
        if agent is not None:
            self._cluster.end([process.remote for process in agent.processes], within_s=0.0)

    def _look_for_still_ones(self) -> None:
        """Ask processes at work for their pulse; one without progress for too long counts as dead."""
        now = time.monotonic()
        if now - self._looked_at < min(PATIENCE_SECONDS, self._settings.watchdog_s / 10):
            return
        self._looked_at = now
        first: dict[int, _Call] = {}
        for call in self._calls:
            first.setdefault(id(call.process), call)
        # A sampler that waits for its agent's workers is not at work.
        at_work = [call for call in first.values() if call.phase != "take weights"]
        asked = [call.process for call in at_work if call.process.asked_pulse is not None]
        answered = self._cluster.ready([process.asked_pulse for process in asked if process.asked_pulse], timeout=0)
        for call in at_work:
            if call not in self._calls:
                continue  # its agent has just been let go, for another of its processes
            process = call.process
            if process.asked_pulse in answered and process.asked_pulse is not None:
                try:
                    passes, seconds = self._cluster.take(process.asked_pulse)
                except (DiedError, FailedError):
                    # The call itself will tell.
                    passes, seconds = process.pulse or (0, 0)
                process.asked_pulse = None
                # While the model is at work its passes tell; elsewhere, and in an engine, it is processor time.
                counts = (
                    call.phase in TIMED_PHASES
                    and self.config.sampling_of(self._agents[call.request.agent].config).engine == "transformers"
                )
                pulse = (passes, 0 if counts else seconds)
                if pulse != process.pulse:
                    process.pulse, process.moved_at = pulse, now
            if process.asked_pulse is None:
                process.asked_pulse = self._cluster.aside(process.remote, "pulse")
            if now - process.moved_at > self._settings.watchdog_s:
                self._failed(call.request.agent, self._still(call))

    def _still(self, call: _Call) -> AgentLostError:
        process = call.process
        stack = self._cluster.aside(process.remote, "stack")
        text = "it does not answer (stopped, or its machine is out of reach)"
        if self._cluster.ready([stack], timeout=STACK_SECONDS):
            try:
                text = f"it is at\n{self._cluster.take(stack)}"
            except (DiedError, FailedError) as error:
                text = str(error)
        return AgentLostError(
            f"agent {process.demand.process} ({process.where}): no progress for {self._settings.watchdog_s:g} s "
            f"(execution.watchdog_s) in the phase {call.phase!r}; {text}\n{_last_lines(process)}"
        )

    def _check_shared(self, folder: Path, names: Sequence[str], file: str) -> None:
        for name in names:
            if not (folder / name / file).exists():
                where = self._agents[name].workers[0].where
                raise RunDirectoryError(
                    f"{folder / name}: agent {name} ({where}) wrote its files there, and they are not seen "
                    f"on {socket.gethostname()}; with several machines, output must be on a file system that all share"
                )


class _Sampling:
    """See `Sampling`."""

    def __init__(self, fleet: RayFleet, requests: Sequence[_Request]) -> None:
        self._fleet, self._requests = fleet, requests

    def wait(self) -> None:
        self._fleet._wait(self._requests, for_peers=True)


class _Updating:
    """See `Updating`."""

    def __init__(self, fleet: RayFleet, requests: Sequence[_Request]) -> None:
        self._fleet, self._requests = fleet, requests

    def wait(self) -> Mapping[str, AgentUpdate]:
        self._fleet._wait(self._requests, for_peers=True)
        nothing = {name: AgentUpdate(metrics={}, ratios={}) for name in self._fleet.names}
        return nothing | {
            request.agent: request.value
            for request in self._requests
            if request.value is not None and not request.abandoned
        }


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


def _lost(process: _Process, phase: str, error: DiedError) -> AgentLostError:
    return AgentLostError(
        f"agent {process.demand.process} ({process.where}): its process died or cannot be reached, in the phase "
        f"{phase!r} (a process killed by SIGKILL is often out of memory)\n{error}\n{_last_lines(process)}"
    )


def _last_lines(process: _Process) -> str:
    try:
        with process.log.open("rb") as file:
            file.seek(process.log_begins)
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return f"{process.log} cannot be read here"
    if not lines:
        return f"it printed nothing to {process.log}"
    return "\n".join([f"the last lines of {process.log}:", *(f"  {line}" for line in lines)])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
