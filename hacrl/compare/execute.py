"""Training runs in processes of their own, several at once, with one thread each."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from hacrl.config import RunConfig
from hacrl.stop import StopRequest

# Threads that spin while they wait make two processes on two cores many times slower than one thread each.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}
SHOWN_LINES = 12
_POLL_S = 0.5

Ending = Literal["done", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What happened to a run: a phase began, a step is on disk, or it ended.

    `error`: the last lines of a failed run's log.
    """

    run: str
    phase: str | None = None
    step: int | None = None
    ended: Ending | None = None
    error: str = ""


def default_jobs(configs: Mapping[str, RunConfig]) -> int:
    """One process per core that this process may use; one in all where runs would share a GPU."""
    on_gpu = any(agent.device != "cpu" for config in configs.values() for agent in config.agents)
    if on_gpu and Path("/dev/nvidia0").exists():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def execute(
    runs: Mapping[str, RunConfig], *, logs: Path, jobs: int | None = None, stop: StopRequest | None = None
) -> Generator[Event]:
    """Start or continue every run, in order, at most `jobs` at a time; yield what happens to each.

    A run that fails is told and the others go on. What a run prints is appended to `logs/<name>.log`. Once `stop` is
    requested, no run is started any more and those under way are asked to save and end. Closing the generator kills
    them: what they recorded stays, and the next start goes on from there.
    """
    jobs = jobs or default_jobs(runs)
    stop = stop or StopRequest()
    events: queue.Queue[Event] = queue.Queue()
    waiting = list(runs.items())
    running: dict[str, subprocess.Popen[str]] = {}
    asked = False
    try:
        while running or (waiting and not stop.requested):
            while waiting and len(running) < jobs and not stop.requested:
                name, config = waiting.pop(0)
                running[name] = _start(name, config, logs / f"{name}.log", events)
            if stop.requested and not asked:
                asked = True
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
            try:
                event = events.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if event.ended is not None:
                del running[event.run]
            if event.ended == "stopped" and not asked:
                event = Event(run=event.run, ended="failed", error="ended from outside by SIGTERM")
            yield event
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _start(name: str, config: RunConfig, log: Path, events: queue.Queue[Event]) -> subprocess.Popen[str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "hacrl.compare.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env={**os.environ, **ONE_THREAD},
            text=True,
            encoding="utf-8",
            # Ctrl-C in a terminal goes to the whole group; a run that got it beside our own signal would end unsaved.
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(config.model_dump_json())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died at once: its log says why, and its exit status is read below
    threading.Thread(target=_read, args=(name, process, log, begin, events), daemon=True).start()
    return process


def _read(name: str, process: subprocess.Popen[str], log: Path, begin: int, events: queue.Queue[Event]) -> None:
    reports: IO[str] | None = process.stdout
    assert reports is not None
    for line in reports:
        told: dict[str, Any] = json.loads(line)
        events.put(Event(run=name, phase=told.get("phase"), step=told.get("step")))
    status = process.wait()
    if status == 0:
        events.put(Event(run=name, ended="done"))
    elif status in (128 + signal.SIGTERM, -signal.SIGTERM):
        events.put(Event(run=name, ended="stopped"))
    else:
        events.put(Event(run=name, ended="failed", error=_last_lines(log, begin, status)))


def _last_lines(log: Path, begin: int, status: int) -> str:
    with open(log, "rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").strip().splitlines()
    if status < 0:
        lines.append(f"ended by signal {signal.Signals(-status).name}")
    return "\n".join(lines[-SHOWN_LINES:]) or f"exit status {status}"
