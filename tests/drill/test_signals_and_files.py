"""Ends that are asked for, and files that a crash or a disk has damaged."""

from __future__ import annotations

import os
import signal
import time

import pytest
from drill import Drill

AGAIN = "started again with the same command: the same run"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["random", "saving"])
def test_an_end_that_is_asked_for(drill: Drill, number: signal.Signals, when: str) -> None:
    run = drill.run()
    moment = (run.wait_for_random_moment if when == "random" else run.wait_for_saving)(drill.name)
    os.kill(run.pid, number)
    drill.ends(run, moment, status=128 + number, says="Interrupted after step")
    # Every step that was recorded has been saved.
    assert max(run.saved()) == run.recorded()
    drill.started_again(run)
    drill.row(run, moment, number.name, f"ends after the step in progress, saved; {AGAIN}")


def test_an_end_that_is_asked_for_twice(drill: Drill) -> None:
    """The second time because an agent hangs."""
    run = drill.run()
    moment = run.wait_for_random_moment(drill.name)
    os.kill(run.agents()["llama"], signal.SIGSTOP)
    os.kill(run.pid, signal.SIGTERM)
    time.sleep(1)
    os.kill(run.pid, signal.SIGTERM)
    drill.ends(run, moment, status=-signal.SIGTERM, says="")
    drill.started_again(run)
    drill.row(run, moment, "SIGTERM twice, because an agent hangs", f"ends at once, its processes too; {AGAIN}")


def test_a_damaged_checkpoint_after_a_kill(drill: Drill) -> None:
    run = drill.run()
    run.wait_for_random_moment(drill.name)
    run.wait_until(lambda: len(run.saved()) > 1)
    moment = run.now(f"after step {run.recorded()}")
    os.kill(run.pid, signal.SIGKILL)
    drill.ends(run, moment, status=-signal.SIGKILL, says="")
    older, newest = sorted(run.saved())[-2:]
    file = run.folder / "checkpoints" / f"step-{newest:06d}" / "agents" / "llama" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    drill.started_again(run, after=older)
    assert "damaged checkpoint(s) skipped" in run.printed()
    what = "kill -9 of the run itself, and one bit of the newest checkpoint flipped"
    drill.row(run, moment, what, "started again: goes on from the checkpoint before, with a warning; the same run")


def test_a_line_cut_in_two_after_a_kill(drill: Drill) -> None:
    run = drill.run(checkpoint={"every": 4})
    moment = run.wait_for_random_moment(drill.name)
    run.wait_until(lambda: run.recorded() % 4)
    os.kill(run.pid, signal.SIGKILL)
    drill.ends(run, moment, status=-signal.SIGKILL, says="")
    file = run.folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-100])
    drill.started_again(run)
    what = "kill -9 of the run itself, and its last line of metrics cut in two"
    drill.row(run, moment, what, "started again: the line is dropped, its step made again; the same run")
