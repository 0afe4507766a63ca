"""kill -9 of each kind of process, at random moments."""

from __future__ import annotations

import os
import signal

import pytest
from drill import Drill

SAME = "restarts from the last checkpoint; the same run"
AGAIN = "started again with the same command: the same run"


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", range(4))
def test_a_worker(drill: Drill, number: int) -> None:
    run = drill.run()
    moment = run.wait_for_random_moment(drill.name)
    kill(run.agents()[("qwen", "llama")[number % 2]])
    drill.goes_on(run, moment, says="restart 1 of 2")
    drill.row(run, moment, "kill -9 of an agent", SAME)


def test_a_worker_that_loads(drill: Drill) -> None:
    run = drill.run()
    moment = run.wait_for_loading(drill.name)
    kill(run.agents()["llama"])
    drill.goes_on(run, moment, says="restart 1 of 2")
    drill.row(run, moment, "kill -9 of an agent", SAME)


@pytest.mark.parametrize("agent", ["qwen", "llama"])
def test_a_worker_that_saves(drill: Drill, agent: str) -> None:
    run = drill.run()
    victim: list[int] = []
    run.wait_until(lambda: run.recorded() >= 1)
    victim.append(run.agents()[agent])
    moment = run.wait_for_saving(drill.name)
    kill(*victim)
    drill.goes_on(run, moment, says="restart 1 of 2")
    drill.row(run, moment, "kill -9 of an agent", SAME)


def test_all_agents_at_once(drill: Drill) -> None:
    run = drill.run()
    moment = run.wait_for_random_moment(drill.name)
    kill(*run.agents().values())
    drill.goes_on(run, moment, says="restart 1 of 2")
    drill.row(run, moment, "kill -9 of all agents at once", SAME)


def test_agents_again_and_again(drill: Drill) -> None:
    run = drill.run(execution={"restarts": 1})
    moment = run.wait_for_random_moment(drill.name)
    victim = run.agents()["qwen"]
    kill(victim)
    run.wait_until(lambda: run.agents().get("qwen", victim) != victim)
    again = run.now("")
    run.wait_until(lambda: run.recorded() > again.recorded)
    moment = run.now(f"{moment.told}; and once more, after step {run.recorded()}")
    kill(run.agents()["qwen"])
    drill.ends(run, moment, status=1, says="agent qwen")
    drill.started_again(run)
    drill.row(run, moment, "kill -9 of an agent, more often than `restarts`", f"ends, the agent named; {AGAIN}")


WORKERS = [{"workers": 2}, {}]


@pytest.mark.parametrize("process", ["qwen", "qwen.worker-1"])
def test_one_of_two_workers(drill: Drill, process: str) -> None:
    run = drill.run(resources=WORKERS)
    moment = run.wait_for_random_moment(drill.name)
    kill(run.agents()[process])
    drill.goes_on(run, moment, says="restart 1 of 2")
    drill.row(run, moment, "kill -9 of one of an agent's two workers", SAME)


@pytest.mark.parametrize("process", ["qwen.sampler-0", "qwen"])
def test_a_sampler_or_the_worker_beside_it(drill: Drill, process: str) -> None:
    run = drill.run(max_staleness=1)
    moment = run.wait_for_random_moment(drill.name)
    kill(run.agents()[process])
    drill.goes_on(run, moment, says="restart 1 of 2")
    what = "an agent's sampler" if "sampler" in process else "the worker of an agent with a sampler"
    drill.row(run, moment, f"kill -9 of {what} (`max_staleness: 1`)", SAME)


def test_the_process_of_the_rewards(drill: Drill) -> None:
    run = drill.run()
    moment = run.wait_for_random_moment(drill.name)
    kill(*run.named("spawn_main"))
    drill.goes_on(run, moment)
    drill.row(run, moment, "kill -9 of the process of the rewards", "another one is started; the same run")


@pytest.mark.parametrize("when", ["random", "loading", "saving"])
def test_the_run_itself(drill: Drill, when: str) -> None:
    run = drill.run()
    wait = {"random": run.wait_for_random_moment, "loading": run.wait_for_loading, "saving": run.wait_for_saving}[when]
    moment = wait(drill.name)
    kill(run.pid)
    drill.ends(run, moment, status=-signal.SIGKILL, says="")
    drill.started_again(run)
    drill.row(run, moment, "kill -9 of the run itself", f"its processes end; {AGAIN}")


@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_what_ray_needs(drill: Drill, process: str) -> None:
    """Ray may end the run's own process, without hacrl's words but never as if all had been well; or an agent's death
    is seen first, and the run starts a Ray of its own anew."""
    run = drill.run()
    moment = run.wait_for_random_moment(drill.name)
    kill(*run.named(f"/{process} "))
    status = run.wait(moment)
    if status == 0:
        assert "restart 1 of 2" in run.printed()
        drill.is_the_undisturbed_run(run, moment)
        what = "restarts with a Ray of its own anew; the same run"
    else:
        run.assert_kept(moment)
        drill.started_again(run)
        what = f"Ray ends the run in a minute, status {status}; {AGAIN}"
    drill.row(run, moment, f"kill -9 of Ray's `{process}`", what)


def test_what_ray_can_do_without(drill: Drill) -> None:
    run = drill.run()
    moment = run.wait_for_random_moment(drill.name)
    kill(*run.named(r"/(log_monitor|monitor|dashboard)\.py "))
    drill.goes_on(run, moment)
    drill.row(run, moment, "kill -9 of Ray's `monitor`, `log_monitor` and `dashboard`", "the same run")


def test_an_agent_that_is_let_go(drill: Drill) -> None:
    run = drill.run(execution={"restarts": 0, "on_agent_failure": "continue_without", "rejoin_every": 2})
    moment = run.wait_for_random_moment(drill.name, latest=4)
    kill(run.agents()["llama"])
    drill.reaches_its_end(run, moment, says="agent llama is let go")
    absent = [line.get("agent/llama/absent", 0) for line in run.metrics()]
    assert sum(absent) > 0
    assert absent[-1] == 0
    what = f"goes on without it for {sum(absent):.0f} steps, then it is taken back in"
    drill.row(run, moment, "kill -9 of an agent under `continue_without`", what)
