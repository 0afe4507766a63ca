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
    """One with the run itself and no core for agents, two with a core each, and a spare one without Ray."""
    if reason := not_permitted():
        pytest.skip(reason)
    with Machines(4) as machines:
        for machine, cores in zip(list(machines)[:3], (0, 1, 1), strict=True):
            machines.start_ray_on(machine, cpus=cores)
        yield machines


def on(drill: Drill, machines: Machines, **execution: Any) -> DrilledRun:
    """A run whose agents take a core each: they cannot be on one machine."""
    settings = {"address": machines.ray_address} | execution
    return drill.run(machine=machines[0], resources=[{"cpus": 1}, {"cpus": 1}], execution=settings)


def part(machines: Machines, *numbers: int) -> None:
    for number in numbers:
        machines[number].cut()
    time.sleep(PARTED_SECONDS)
    for number in numbers:
        machines[number].heal()


@pytest.mark.parametrize("which", [0, 1])
def test_a_machine_that_comes_back_before_the_watchdog_looks(drill: Drill, machines: Machines, which: int) -> None:
    run = on(drill, machines, watchdog_s=90)
    moment = run.wait_for_random_moment(drill.name)
    part(machines, which)
    drill.goes_on(run, moment, within_s=GO_ON_SECONDS + LOST_SECONDS)
    whose = "the run's own machine" if which == 0 else "an agent's machine"
    how = "restarts once" if "restart 1" in run.printed() else "waits for it"
    drill.row(run, moment, f"{whose} is cut off for 30 s (`watchdog_s: 90`)", f"{how}; the same run")


def test_a_machine_that_comes_back_after_the_watchdog_has_looked(drill: Drill, machines: Machines) -> None:
    run = on(drill, machines)
    moment = run.wait_for_random_moment(drill.name)
    part(machines, 2)
    drill.goes_on(run, moment, says="restart 1 of 2", within_s=GO_ON_SECONDS + LOST_SECONDS)
    drill.row(run, moment, "an agent's machine is cut off for 30 s (`watchdog_s: 20`)", "restarts; the same run")


@pytest.mark.parametrize("how", ["is cut off for good", "loses its power"])
def test_a_machine_that_is_lost_while_there_is_another(drill: Drill, machines: Machines, how: str) -> None:
    machines.start_ray_on(machines[3], cpus=1)
    run = on(drill, machines, wait_s=120)
    moment = run.wait_for_random_moment(drill.name)
    lost = next(machine for machine in machines if run.agents()["llama"] in machine.processes())
    lost.cut() if "cut" in how else lost.kill()
    drill.goes_on(run, moment, says="restart 1 of 2", within_s=GO_ON_SECONDS + LOST_SECONDS)
    drill.row(run, moment, f"an agent's machine {how}; there is a spare one", "restarts on the spare one; the same run")


def test_a_machine_that_is_lost_while_there_is_no_other(drill: Drill, machines: Machines) -> None:
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
    run = on(drill, machines, **settings)
    moment = run.wait_for_random_moment(drill.name)
    lost = next(machine for machine in machines if run.agents()["llama"] in machine.processes())
    lost.cut()
    drill.reaches_its_end(run, moment, says="agent llama is let go", within_s=GO_ON_SECONDS)
    absent = [line.get("agent/llama/absent", 0) for line in run.metrics()]
    what = "an agent's machine is cut off for good, under `continue_without`"
    drill.row(run, moment, what, f"goes on without the agent for the last {sum(absent):.0f} steps")
