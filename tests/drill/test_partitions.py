"""A cluster of machines, one of which cannot be reached for 30 seconds, or for good, or loses its power."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from drill import Drill
from drilled_run import GO_ON_SECONDS, LOST_SECONDS, DrilledRun
from namespaces import Machines, not_permitted

PARTED_SECONDS = 30.0
AGAIN = "started again with the same command: the same run"


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Without Ray: one for the run itself, two for an agent each, and a spare one."""
    if reason := not_permitted():
        pytest.skip(reason)
    with Machines(4) as machines:
        yield machines


def start_ray(machines: Machines, *, kept: bool = False, patience: int | None = None) -> None:
    """A core for an agent on two of them. `kept`: Ray is started again there when it has ended. `patience`: how many
    times a machine may fail to answer, where that is not what Ray takes for enough."""
    patient = {} if patience is None else {"RAY_health_check_failure_threshold": str(patience)}
    machines.start_ray_on(machines[0], cpus=0, environment=patient)
    for machine in list(machines)[1:3]:
        (machines.keep_ray_on if kept else machines.start_ray_on)(machine, cpus=1)


def on(drill: Drill, machines: Machines, **execution: Any) -> DrilledRun:
    """A run whose agents take a core each: they cannot be on one machine."""
    settings = {"address": machines.ray_address} | execution
    return drill.run(machine=machines[0], resources=[{"cpus": 1}, {"cpus": 1}], execution=settings)


def part(machines: Machines, number: int) -> None:
    machines[number].cut()
    time.sleep(PARTED_SECONDS)
    machines[number].heal()


WITHIN = GO_ON_SECONDS + LOST_SECONDS


@pytest.mark.parametrize("watchdog_s", [20, 90])
@pytest.mark.parametrize("which", [0, 1])
def test_a_machine_that_comes_back(drill: Drill, machines: Machines, which: int, watchdog_s: int) -> None:
    start_ray(machines, kept=True)
    run = on(drill, machines, watchdog_s=watchdog_s)
    moment = run.wait_for_random_moment(drill.name)
    part(machines, which)
    drill.goes_on(run, moment, says="restart 1 of 2", within_s=WITHIN)
    whose = "the run's own machine" if which == 0 else "an agent's machine"
    drill.row(
        run,
        moment,
        f"{whose} is cut off for 30 s (`watchdog_s: {watchdog_s}`); Ray is kept running there",
        "restarts; the same run",
    )


def test_a_machine_that_ray_waits_for(drill: Drill, machines: Machines) -> None:
    start_ray(machines, patience=100)
    run = on(drill, machines, watchdog_s=90)
    moment = run.wait_for_random_moment(drill.name)
    part(machines, 1)
    drill.goes_on(run, moment, within_s=WITHIN)
    what = "an agent's machine is cut off for 30 s (`watchdog_s: 90`, RAY_health_check_failure_threshold=100)"
    how = "restarts" if "restart 1" in run.printed() else "waits"
    drill.row(run, moment, what, f"{how}; the same run")


@pytest.mark.parametrize("how", ["is cut off for good", "loses its power"])
def test_a_machine_that_is_lost_while_there_is_another(drill: Drill, machines: Machines, how: str) -> None:
    start_ray(machines)
    machines.start_ray_on(machines[3], cpus=1)
    run = on(drill, machines, wait_s=120)
    moment = run.wait_for_random_moment(drill.name)
    lost = next(machine for machine in machines if run.agents()["llama"] in machine.processes())
    lost.cut() if "cut" in how else lost.kill()
    drill.goes_on(run, moment, says="restart 1 of 2", within_s=WITHIN)
    drill.row(run, moment, f"an agent's machine {how}; there is a spare one", "restarts on the spare one; the same run")


def test_a_machine_that_is_lost_while_there_is_no_other(drill: Drill, machines: Machines) -> None:
    start_ray(machines)
    run = on(drill, machines, wait_s=5)
    moment = run.wait_for_random_moment(drill.name)
    lost = next(machine for machine in machines if run.agents()["llama"] in machine.processes())
    lost.kill()
    drill.ends(run, moment, status=1, says="the cluster cannot hold the run's agents", within_s=GO_ON_SECONDS)
    machines.start_ray_on(machines[3], cpus=1)
    drill.started_again(run)
    what = "an agent's machine loses its power; there is no other (`wait_s: 5`)"
    drill.row(run, moment, what, f"ends: the cluster cannot hold the agents; with a new machine {AGAIN}")


def test_a_machine_that_is_lost_under_continue_without(drill: Drill, machines: Machines) -> None:
    settings = {"restarts": 0, "on_agent_failure": "continue_without", "rejoin_every": 0}
    start_ray(machines)
    run = on(drill, machines, **settings)
    moment = run.wait_for_random_moment(drill.name)
    lost = next(machine for machine in machines if run.agents()["llama"] in machine.processes())
    lost.cut()
    drill.reaches_its_end(run, moment, says="agent llama is let go", within_s=GO_ON_SECONDS)
    absent = [line.get("agent/llama/absent", 0) for line in run.metrics()]
    what = "an agent's machine is cut off for good, under `continue_without`"
    drill.row(run, moment, what, f"goes on without the agent for the last {sum(absent):.0f} steps")
