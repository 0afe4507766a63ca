"""Kill a process at every one of its file operations: what is found afterwards can always be continued, and the
continued run leaves the files of an uninterrupted one."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hacrl import durable_files
from hacrl import run_directory as run_directory_module
from hacrl.config import RunConfig, load_config
from hacrl.run_directory import RunDirectory
from hacrl.types import StepRecord

_STEPS = 4
# Audit events of operations that change what a crash leaves behind; opening a file to write comes in addition.
_OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    # A killed process leaves its writes with the kernel, so fsync changes nothing here but the time it takes.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(run_directory_module, "describe_start", dict[str, Any])


def _known(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> RunConfig:
    """Spare hundreds of starts the writing and reading of YAML, which the other tests cover."""
    text = run_directory_module.config_yaml(config)

    def read(path: Path) -> RunConfig:
        assert path.read_text() == text
        return config

    monkeypatch.setattr(run_directory_module, "config_yaml", lambda _: text)
    monkeypatch.setattr(run_directory_module, "load_config", read)
    return config


def _config(every: int) -> RunConfig:
    return load_config(
        {
            "agents": [{"name": "a", "model": "m"}],
            "tasks": {"train": {"dataset": "train.jsonl"}},
            "reward": "math",
            "steps": _STEPS,
            "prompts_per_step": 1,
            "output": "unused",
            "checkpoint": {"every": every, "keep_last": 1},
        }
    )


def _train(path: Path, config: RunConfig) -> int:
    """A run whose whole state is one text: each step's depends on the one before, and all records show it.

    Returns the step it went on from.
    """

    def after(weights: str, step: int) -> str:
        return hashlib.sha256(f"{weights} {step}".encode()).hexdigest()

    with RunDirectory.open(path, config) as directory:
        checkpoint = directory.resume_from
        weights = "start" if checkpoint is None else (checkpoint.path / "weights").read_text()
        assert checkpoint is None or checkpoint.state == {"weights": weights}
        directory.rewind(checkpoint)
        if checkpoint is None:
            directory.record_start([{"weights": weights}])
        for step in range(checkpoint.step + 1 if checkpoint else 1, config.steps + 1):
            weights = after(weights, step)
            directory.record(
                StepRecord(
                    step=step,
                    steps=config.steps,
                    metrics={"weights": int(weights[:8], 16)},
                    rollouts=({"text": weights}, {"text": weights[::-1]}),
                    evaluation=({"weights": weights},) if step % 2 == 0 else (),
                )
            )
            if step % config.checkpoint.every == 0 or step == config.steps:

                def write(folder: Path, text: str = weights) -> None:
                    (folder / "weights").write_text(text)

                directory.save(
                    step,
                    write,
                    state={"weights": weights},
                    score=int(weights[:4], 16) / 65536,
                )
    return checkpoint.step if checkpoint else 0


def _contents(path: Path) -> dict[str, Any]:
    """Everything in the folder but what must differ between two runs: run id, time, and the list of starts."""
    contents: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if not file.is_file() or name in (".lock", "environment.json"):
            continue
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in file.read_bytes().decode().split("\n")[:-1]]
            contents[name] = [{k: v for k, v in row.items() if k not in ("run_id", "time")} for row in rows]
        elif file.name == "manifest.json":
            contents[name] = json.loads(file.read_text())["score"]
        else:
            contents[name] = file.read_bytes()
    return contents


def _killed(run: Callable[[], object], at: int) -> bool:
    """Run in a forked child that dies, without any clean-up, at its `at`-th file operation; False if it got through."""
    child = os.fork()
    if child == 0:
        left = at

        def tick() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)

        class _HalfWrites(io.FileIO):
            def write(self, data: Any, /) -> int:
                tick()
                return super().write(data[: len(data) // 2 + 1])

        def opened(file: Path, mode: str, buffering: int = -1) -> Any:
            return _HalfWrites(file, mode.replace("b", "")) if buffering == 0 else open(file, mode, buffering)

        durable_files.open = opened  # type: ignore[attr-defined]

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _OPERATIONS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                tick()

        sys.addaudithook(watch)
        try:
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), "the run failed by itself"
    return status == 9


def _complete_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("every", [1, 2])
def test_killed_at_any_file_operation_the_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    config = _known(monkeypatch, _config(every))
    _train(tmp_path / "whole", config)
    expected = _contents(tmp_path / "whole")
    at = 0
    while True:
        at += 1
        path = tmp_path / str(at)
        if not _killed(lambda path=path: _train(path, config), at):
            break
        recorded = _complete_lines(path / "metrics.jsonl")
        done = _train(path, config)
        # At most the steps since the last due checkpoint are made again.
        assert recorded - every <= done <= recorded, f"killed at operation {at}"
        assert _contents(path) == expected, f"killed at operation {at}"
    assert at > 80


@pytest.mark.parametrize("seed", range(6))
def test_killed_again_and_again_also_while_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    config = _known(monkeypatch, _config(chance.choice([1, 2, 3])))
    _train(tmp_path / "whole", config)
    path = tmp_path / "run"
    kills = 0
    while _killed(lambda: _train(path, config), chance.randint(1, 90)):
        kills += 1
        assert kills < 200
    _train(path, config)
    assert _contents(path) == _contents(tmp_path / "whole")
    starts = json.loads((path / "environment.json").read_text())["starts"]
    assert len(starts) <= kills + 2
