"""A full disk, no memory left for one agent, numbers that overflow."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from drill import Drill

LET_GO = {"restarts": 0, "on_agent_failure": "continue_without", "rejoin_every": 0}
AGAIN = "room made and started again: the same run"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "hacrl-drill", str(folder)], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {tried.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, *, leave: int = 0) -> None:
    """Until so many bytes are free."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - leave
            if free <= 0 or not file.write(bytes(min(free, 1 << 16))):
                return


@pytest.mark.parametrize("leave", [0, 200_000])
def test_a_full_disk(drill: Drill, disk: Path, leave: int) -> None:
    run = drill.run(disk / "run")
    moment = run.wait_for_random_moment(drill.name)
    fill(disk, leave=leave)
    drill.ends(run, moment, status=1, says="make room or give access, then start again with the same command")
    (disk / "filler").unlink()
    drill.started_again(run)
    what = "no byte free" if leave == 0 else "too little room for a checkpoint"
    drill.row(run, moment, f"the disk is full: {what}", f"ends, the file and the remedy named; {AGAIN}")


def test_a_full_disk_is_no_fault_of_an_agent(drill: Drill, disk: Path) -> None:
    run = drill.run(disk / "run", execution=LET_GO)
    moment = run.wait_for_random_moment(drill.name)
    fill(disk, leave=200_000)
    drill.ends(run, moment, status=1, says="could not be written")
    assert "is let go" not in run.printed()
    (disk / "filler").unlink()
    drill.started_again(run)
    what = "the disk is full: too little room for a checkpoint, under `continue_without`"
    drill.row(run, moment, what, f"ends, no agent is let go; {AGAIN}")


@pytest.mark.parametrize("execution", [{}, LET_GO], ids=["stop", "continue_without"])
def test_no_memory_for_one_agent(drill: Drill, execution: dict[str, object]) -> None:
    """It has what loading took; learning takes more."""
    run = drill.run(execution=execution)
    run.wait_until(lambda: (run.folder / "evaluations.jsonl").exists())
    moment = run.now("before the first step")
    victim = psutil.Process(run.agents()["llama"])
    # Whatever it asks the system for from now on is refused.
    victim.rlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    fault = "no more memory for an agent (RLIMIT_AS)"
    if execution:
        drill.reaches_its_end(run, moment, says="agent llama is let go")
        absent = sum(line.get("agent/llama/absent", 0) for line in run.metrics())
        what = f"goes on without it for the last {absent:.0f} steps"
        drill.row(run, moment, f"{fault}, under `continue_without`", what)
        return
    if run.wait(moment) == 0:
        # Its process ended itself, as one does that cannot even tell of its error.
        assert "restart 1 of 2" in run.printed()
        drill.is_the_undisturbed_run(run, moment)
        drill.row(run, moment, fault, "its process ends; restarts from the last checkpoint; the same run")
        return
    assert "error: agent llama" in run.printed(), run.printed()
    drill.started_again(run)
    drill.row(run, moment, fault, "ends, with the error from the agent's process; started again: the same run")


@pytest.mark.parametrize("execution", [{}, LET_GO], ids=["stop", "continue_without"])
def test_an_agent_that_diverges(drill: Drill, execution: dict[str, object]) -> None:
    run = drill.run(execution=execution, learning_rates=[1e-3, 1e30])
    run.wait_until(lambda: (run.folder / "evaluations.jsonl").exists())
    moment = run.now("the first steps")
    fault = "an agent whose numbers overflow (`learning_rate: 1e30`)"
    if execution:
        drill.reaches_its_end(run, moment, says="agent llama is let go")
        assert any((run.folder / "nonfinite").iterdir())
        absent = sum(line.get("agent/llama/absent", 0) for line in run.metrics())
        what = f"goes on without it for the last {absent:.0f} steps; the batch is kept"
        drill.row(run, moment, f"{fault}, under `continue_without`", what)
        return
    drill.ends(run, moment, status=1, says="agent llama")
    assert any((run.folder / "nonfinite").iterdir())
    drill.row(run, moment, fault, "ends, the agent and the batch named")
