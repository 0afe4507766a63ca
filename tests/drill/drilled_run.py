"""A run that faults are injected into: started as a user starts it, watched and judged from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
import yaml
from namespaces import Machine
from rewards import ORDERS
from run_processes import gone, processes_where
from tiny_runs import run_config

MARK = "HACRL_DRILL"
SEED = int(os.environ.get("HACRL_DRILL_SEED", "0"))
WATCHDOG_SECONDS = 20.0
# Starting and loading everything on a machine that does other work as well.
START_SECONDS = 90.0
# A fault is noticed, at the latest by the watchdog, and all agents are started again.
GO_ON_SECONDS = WATCHDOG_SECONDS + START_SECONDS
# Ray takes a machine for dead when it has not answered for half a minute, and moves reserved parts only then.
LOST_SECONDS = 90.0
# Agents and rewards end at once; two of Ray's own helpers look for their cluster for a minute first.
OWN_ORPHAN_SECONDS = 20.0
ORPHAN_SECONDS = 90.0
# On a machine that cannot be reached its own part of Ray ends them, when it has given the others up.
UNREACHABLE_ORPHAN_SECONDS = 300.0
# A whole run, with all that may happen to it.
RUN_SECONDS = 240.0
STEPS = 10


def drilled_config(models: Mapping[str, Path], output: Path, **changes: Any) -> dict[str, Any]:
    """Two agents of different families; a checkpoint every second step, so that there are steps to be made again.
    `execution` is put over these settings; `resources` and `learning_rates` are those of
    each agent."""
    resources = changes.pop("resources", [{}, {}])
    rates = changes.pop("learning_rates", [1e-3, 1e-3])
    execution = {"name": "ray", "watchdog_s": WATCHDOG_SECONDS, **changes.pop("execution", {})}
    settings = {
        "reward": f"{Path(__file__).parent / 'rewards.py'}:obedient",
        "steps": STEPS,
        "prompts_per_step": 4,
        "sampling": {"max_new_tokens": 48, "max_prompt_tokens": 64},
        "checkpoint": {"every": 2},
        "evaluation": {"k": 1, "every": 5, "at_start": True},
        "verification": {"time_limit_s": 2},
    }
    config = run_config(models, output, **settings | changes, execution=execution)
    for agent, own, rate in zip(config["agents"], resources, rates, strict=True):
        agent.update(resources=own, learning_rate=rate)
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When a fault was injected: in words, by the clock, and what had been recorded and saved by then."""

    told: str
    at: float
    recorded: int
    saved: int
    lines: tuple[bytes, ...]


@dataclass(kw_only=True, slots=True)
class DrilledRun:
    """`machine` is where it is started, this one if left out."""

    config: dict[str, Any]
    machine: Machine | None = None
    overrides: Sequence[str] = ()
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    starts: int = 0
    # The longest time since the fault without a new step, or up to the end.
    paused_s: float = 0.0
    limit_s: float = 0.0

    @property
    def folder(self) -> Path:
        return Path(self.config["output"])

    @property
    def aside(self) -> Path:
        """A folder for what is no part of the run: configuration, orders, what it prints."""
        folder = self.folder.with_name(f"{self.folder.name}-aside")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ------------------------------------------------------------ starting and ending

    def start(self) -> None:
        """Start it, or start it again, with the same command."""
        file = self.aside / "run.yaml"
        file.write_text(yaml.safe_dump(self.config))
        command = [str(Path(sys.executable).parent / "hacrl"), "train", str(file), *self.overrides]
        environment = os.environ | {
            MARK: self.mark,
            ORDERS: str(self.aside / "orders"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # it tells its stacks when it is ended for being late
            "COLUMNS": "400",  # messages are read here line by line
        }
        settings: dict[str, Any] = {"env": environment, "start_new_session": True, "stdin": subprocess.DEVNULL}
        with self._log(self.starts).open("wb") as output:
            settings |= {"stdout": output, "stderr": output}
            self.process = (
                subprocess.Popen(command, **settings)
                if self.machine is None
                else self.machine.popen(command, **settings)
            )
        self.pid = self.process.pid
        self.starts += 1

    def end(self) -> None:
        """Whatever is left of it is killed; for when a test is over."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def order(self, what: str) -> None:
        """See `rewards.obedient`."""
        (self.aside / "orders").write_text(what)

    # ------------------------------------------------------------ moments

    def wait_until(self, holds: Callable[[], Any], *, within_s: float = START_SECONDS, every_s: float = 0.01) -> None:
        assert self.process is not None
        end = time.monotonic() + within_s
        while not holds():
            assert self.process.poll() is None, f"the run has ended:\n{self.printed()}"
            assert time.monotonic() < end, f"waited for {within_s:g} s:\n{self.printed()}"
            time.sleep(every_s)

    def wait_for_random_moment(self, name: str, *, latest: int = STEPS - 3) -> Moment:
        """In the middle of the run: a step, and a part of the time that a step takes, drawn from the drill's seed and
        `name`."""
        draw = Random(f"{SEED} {name}")
        step, part = draw.randint(2, latest), draw.random()
        self.wait_until(lambda: self.recorded() >= step - 1)
        before = time.monotonic()
        self.wait_until(lambda: self.recorded() >= step)
        time.sleep(part * (time.monotonic() - before))
        return self.now(f"step {step + 1}, after {part:.0%} of its time")

    def wait_for_loading(self, name: str) -> Moment:
        """While the agents load."""
        part = Random(f"{SEED} {name}").random()
        self.wait_until(lambda: len(self.agents()) == len(self.config["agents"]))
        time.sleep(2 * part)
        return self.now("loading")

    def wait_for_saving(self, name: str) -> Moment:
        """As a checkpoint is being written."""
        step = 2 * Random(f"{SEED} {name}").randint(1, STEPS // 2 - 1)
        self.wait_until(lambda: self.recorded() >= step - 1)
        store = self.folder / "checkpoints"
        self.wait_until(lambda: any(store.glob(f".tmp-step-{step:06d}-*")), every_s=0.0005)
        return self.now(f"saving step {step}")

    def now(self, told: str, *, saved: int | None = None) -> Moment:
        """`saved`: the step to go on from, if it is not that of the newest checkpoint."""
        lines = self._lines()
        saved = max(self.saved(), default=0) if saved is None else saved
        kept = tuple(line for line in lines if json.loads(line)["step"] <= saved)
        return Moment(told=told, at=time.monotonic(), recorded=len(lines), saved=saved, lines=kept)

    # ------------------------------------------------------------ what is seen

    def recorded(self) -> int:
        return len(self._lines())

    def metrics(self) -> list[dict[str, Any]]:
        """Of each step recorded so far."""
        return [json.loads(line) for line in self._lines()]

    def saved(self) -> list[int]:
        store = self.folder / "checkpoints"
        return [int(folder.name[5:]) for folder in store.glob("step-*")] if store.is_dir() else []

    def printed(self, start: int | None = None) -> str:
        """By the latest start, or by that one (counted from 0)."""
        return self._log(self.starts - 1 if start is None else start).read_text(errors="replace")

    def told(self) -> str:
        """The first line of the error that it ended with, without what differs between machines."""
        lines = [line for line in self.printed().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"(\w*Error|error)\b", line.strip(), re.IGNORECASE)]
        line = (errors or lines or ["nothing"])[0 if errors else -1].strip()
        return re.sub(r"/\S+/", "", re.sub(r"process \d+ on \S+", "process ...", line))

    def processes(self) -> list[int]:
        """All that are left of it, on whatever machine."""
        return processes_where(self._belongs)

    def agents(self) -> dict[str, int]:
        """The process of each agent's worker or sampler by the name of its log."""
        found: dict[str, int] = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                log = Path(os.readlink(f"/proc/{pid}/fd/1"))
                if log.parent == self.folder / "processes":
                    found[log.stem] = pid
        return found

    def named(self, pattern: str) -> list[int]:
        """Its processes whose command line matches."""

        def matches(process: psutil.Process) -> bool:
            told = " ".join(process.cmdline())
            return process.pid != self.pid and re.search(pattern, told) is not None and self._belongs(process)

        return processes_where(matches)

    def _belongs(self, process: psutil.Process) -> bool:
        if f"{MARK}={self.mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
            return True
        # An agent on a cluster that was there before the run.
        log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        return log.parent == self.folder / "processes"

    def _lines(self) -> list[bytes]:
        file = self.folder / "metrics.jsonl"
        # A last line without its end is none yet.
        return file.read_bytes().split(b"\n")[:-1] if file.exists() else []

    def _log(self, start: int) -> Path:
        return self.aside / f"printed-{start}.log"

    # ------------------------------------------------------------ what must hold

    def wait(
        self,
        moment: Moment,
        *,
        within_s: float = RUN_SECONDS,
        go_on_within_s: float = GO_ON_SECONDS,
        orphans_within_s: float = ORPHAN_SECONDS,
    ) -> int:
        """Until it has ended; its exit status. After the fault no step, nor the end, may take longer than
        `go_on_within_s`."""
        assert self.process is not None
        seen, at = moment.recorded, moment.at
        self.paused_s, self.limit_s = 0.0, go_on_within_s
        while True:
            ended = self.process.poll() is not None
            now = time.monotonic()
            if ended or self.recorded() > seen:
                seen, at, self.paused_s = self.recorded(), now, max(self.paused_s, now - at)
            if ended:
                break
            if now - at > go_on_within_s or now - moment.at > within_s:
                self.process.send_signal(signal.SIGABRT)
                self.process.wait()
                raise AssertionError(
                    f"after {now - moment.at:.0f} s, {now - at:.0f} s without a step or an end:\n{self.printed()}"
                )
            time.sleep(0.02)
        if self.machine is None:
            assert gone(lambda: [*self.agents().values(), *self.named("spawn_main")], within_s=OWN_ORPHAN_SECONDS)
        assert gone(self.processes, within_s=orphans_within_s), [
            " ".join(psutil.Process(pid).cmdline())[:200] for pid in self.processes()
        ]
        return self.process.returncode

    def assert_kept(self, moment: Moment) -> None:
        """What was recorded, and belonged to a saved checkpoint, is there as it was; all steps once, in order."""
        lines = self._lines()
        assert tuple(lines[: len(moment.lines)]) == moment.lines
        assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
