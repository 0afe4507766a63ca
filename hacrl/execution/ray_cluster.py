"""Processes on a Ray cluster: reserved, started, called, watched and ended. The only file that knows Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl.config import RayConfig
from hacrl.errors import ClusterError, HacrlError
from hacrl.execution.placement import Demand, Node, arithmetic, impossible

# Waiting is cut into pieces of this length, so that signals are seen between them.
PATIENCE_SECONDS = 1.0


class DiedError(Exception):
    """A process died or cannot be reached; `at_start` where it never began. Never leaves the fleet."""

    def __init__(self, text: str, *, at_start: bool) -> None:
        super().__init__(text)
        self.at_start = at_start


class FailedError(Exception):
    """A process raised what is no error of hacrl's; the message has its traceback. Never leaves the fleet."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pending:
    """A call under way. One that streams gives several values, one after the other."""

    reference: Any
    streams: bool = False


class RayCluster:
    """A cluster, joined or of this run's own, and the part of it that the run has reserved.

    Raises ClusterError where it cannot be reached, or cannot hold what is asked for.
    """

    def __init__(self, settings: RayConfig) -> None:
        self._settings = settings
        self._group: Any = None
        self._connected = self._own = False
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
            except Exception as error:  # where Ray takes too long to start, it raises no class of its own
                ray.shutdown()
                if address == "local":
                    raise ClusterError(
                        f"execution: Ray could not be started on this machine: {error}; if it is very busy or short "
                        f"of memory, start again when it is not, or use `execution: local`"
                    ) from error
                raise ClusterError(
                    f"execution.address: no cluster can be reached at {address!r}: {error}; start one with `ray "
                    f"start`, give another address, or leave it out to use this machine alone"
                ) from error
            self._connected, self._own = True, address == "local"

    # ------------------------------------------------------------ places

    def reserve(self, demands_on: Callable[[Sequence[Node]], list[Demand]]) -> list[Demand]:
        """Take all parts of the cluster, or none. Raises ClusterError where that cannot be had, or not in time."""
        from ray.util.placement_group import placement_group

        # A cluster of this run's own will not grow, and nobody else uses it.
        patience = 0.0 if self._own else self._settings.wait_s
        begin = time.perf_counter()
        while True:
            if self._group is None:
                nodes = list(_nodes().values())
                asked = demands_on(nodes)
                reason = impossible(asked, nodes)
            if self._group is None and reason is None:
                self._group = placement_group([_bundle(demand) for demand in asked], strategy="PACK")
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
                f"each process needs its part on one machine"
            )
        raise ClusterError(
            f"the cluster cannot hold the run's agents: {reason}\n{arithmetic(asked, nodes)}\n"
            f"lower agents[].resources (docs/ray.md), or give the run a larger cluster"
        )

    def homes(self) -> list[tuple[str, Node | None]]:
        """For each reserved part the id of its machine, and the machine; None where that has died."""
        from ray.util.placement_group import placement_group_table

        node_of_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = _nodes()
        return [(node_of_bundle[index], nodes.get(node_of_bundle[index])) for index in sorted(node_of_bundle)]

    def whole(self) -> bool:
        """Whether every reserved part has a living machine; Ray moves those of a machine that died, where it can."""
        return bool(self._group.wait(PATIENCE_SECONDS))

    def start(self, kind: type, part: int, demand: Demand, arguments: Mapping[str, Any]) -> Any:
        """A new process in a reserved part: an object of the class `kind`, made from `arguments`, that can be called.
        Its calls are answered in order, but for `aside` ones."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=part)
        resources = {f"node:{demand.node}": NODE_SHARE} if demand.node is not None else {}
        remote = ray.remote(concurrency_groups={"aside": 1})(kind)
        return remote.options(
            num_cpus=demand.cpus, num_gpus=demand.gpus, resources=resources, scheduling_strategy=place
        ).remote(**arguments)

    # ------------------------------------------------------------ calls

    def put(self, value: Any) -> Any:
        """Into the object store, once, for any number of calls."""
        import ray

        return ray.put(value)

    def call(self, process: Any, method: str, *arguments: Any) -> Pending:
        """An argument may be what `put` returned, or the `reference` of another call's result."""
        return Pending(reference=getattr(process, method).remote(*arguments))

    def stream(self, process: Any, method: str, *arguments: Any) -> Pending:
        stream = getattr(process, method).options(num_returns="streaming").remote(*arguments)
        return Pending(reference=stream, streams=True)

    def aside(self, process: Any, method: str) -> Pending:
        """A call that does not wait for the others."""
        return Pending(reference=getattr(process, method).options(concurrency_group="aside").remote())

    def ready(self, calls: Sequence[Pending], *, timeout: float) -> list[Pending]:
        """Those that have something to take, a failure included; waits for the first one up to `timeout` seconds."""
        import ray

        by_reference = {call.reference: call for call in calls}
        if not by_reference:
            return []
        done, _ = ray.wait(list(by_reference), num_returns=1, timeout=timeout)
        if done and len(by_reference) > 1:
            # Whatever else is there by now; one by one, each round would look at all of them.
            done, _ = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=0)
        return [by_reference[reference] for reference in done]

    def take(self, call: Pending) -> Any:
        """The value of a call that is ready, the next one of a stream. Raises StopIteration at a stream's end; an error
        of hacrl's as it was raised; else FailedError or DiedError."""
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            return ray.get(next(call.reference) if call.streams else call.reference)
        except RayTaskError as error:
            if isinstance(error.cause, HacrlError):
                raise error.cause from None
            raise FailedError(_plain(error)) from None
        except RayError as error:
            at_start = isinstance(error, RayActorError) and error.actor_init_failed
            raise DiedError(_plain(error), at_start=at_start) from None

    # ------------------------------------------------------------ ending

    def end(self, processes: Sequence[Any], *, within_s: float) -> None:
        """Let processes close what they have started, for so many seconds, and end them."""
        import ray

        if not ray.is_initialized():
            return
        closing = [self.aside(process, "close").reference for process in processes]
        if closing and within_s > 0:
            ray.wait(closing, num_returns=len(closing), timeout=within_s)
        for process in processes:
            ray.kill(process)

    def close(self) -> None:
        """Give back what was reserved, and end a cluster of this run's own."""
        import ray

        if self._group is not None and ray.is_initialized():
            ray.util.remove_placement_group(self._group)
        self._group = None
        if self._connected:
            self._connected = False
            ray.shutdown()


# What a process takes of the resource that Ray gives each machine under its address: any part will do.
NODE_SHARE = 0.001


def _bundle(demand: Demand) -> dict[str, float]:
    bundle = {"CPU": demand.cpus}
    if demand.gpus:
        bundle["GPU"] = demand.gpus
    if demand.node is not None:
        bundle[f"node:{demand.node}"] = NODE_SHARE
    return bundle


def _nodes() -> dict[str, Node]:
    """The machines of the cluster by Ray's id."""
    import ray

    return {
        node["NodeID"]: Node(
            name=node["NodeManagerHostname"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            address=node["NodeManagerAddress"],
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
