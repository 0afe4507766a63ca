"""Sides in processes of their own, one step at a time in turn, so that a busy machine disturbs all alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from speed.work import Work

HERE = Path(__file__).resolve().parent


def environment(threads: int) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def write(result: dict[str, Any], path: Path | None) -> None:
    """Print a result without its single rounds, and keep all of it where a path is given."""
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=2))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")


class Side:
    """One side: its process waits between steps and takes no processor time then."""

    def __init__(self, script: str, work: Work, *flags: str, threads: int, log: Path) -> None:
        self.script, self.log = script, log
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), work.to_json(), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment(threads),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # no more orders: the side ends, and takes its temporary files with it
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def step(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order or {"go": True}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.script} ended:\n{self.log.read_text()[-3000:]}")
        seen: dict[str, Any] = json.loads(line)
        return seen
