"""Processes that are stopped (SIGSTOP) for 30 seconds, or for good."""

from __future__ import annotations

import os
import signal
import time

import pytest
from drill import Drill

PAUSE_SECONDS = 30.0


@pytest.mark.parametrize("process", ["llama", "qwen.sampler-0"])
def test_an_agent_that_hangs(drill: Drill, process: str) -> None:
    run = drill.run(**({"max_staleness": 1} if "sampler" in process else {}))
    moment = run.wait_for_random_moment(drill.name)
    os.kill(run.agents()[process], signal.SIGSTOP)
    drill.goes_on(run, moment, says="no progress for 20 s (execution.watchdog_s)")
    what = "an agent's sampler" if "sampler" in process else "an agent"
    drill.row(run, moment, f"SIGSTOP of {what}, for good", "the watchdog (20 s) restarts all; the same run")


def test_one_of_two_workers_that_hangs(drill: Drill) -> None:
    run = drill.run(resources=[{"workers": 2}, {}])
    moment = run.wait_for_random_moment(drill.name)
    os.kill(run.agents()["qwen.worker-1"], signal.SIGSTOP)
    drill.goes_on(run, moment, says="no progress for 20 s (execution.watchdog_s)")
    what = "SIGSTOP of one of an agent's two workers, for good"
    drill.row(run, moment, what, "the watchdog (20 s) restarts all; the same run")


@pytest.mark.parametrize("process", ["llama", "raylet", "gcs_server", "itself"])
def test_what_is_stopped_for_a_while(drill: Drill, process: str) -> None:
    run = drill.run(execution={"watchdog_s": 60})
    moment = run.wait_for_random_moment(drill.name)
    stopped = {"itself": [run.pid], "llama": [run.agents()["llama"]]}.get(process) or run.named(f"/{process} ")
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(PAUSE_SECONDS)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    drill.goes_on(run, moment)
    what = {"itself": "the run itself", "llama": "an agent"}.get(process, f"Ray's `{process}`")
    drill.row(run, moment, f"SIGSTOP of {what} for 30 s (`watchdog_s: 60`)", "the same run")
