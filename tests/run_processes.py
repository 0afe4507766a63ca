"""The processes of a run, as they are seen from outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def agents_of(process: psutil.Process, run: Path) -> dict[str, int]:
    """The process of each agent, found by the log that it writes to."""
    found = {}
    for child in process.children(recursive=True):
        try:
            log = Path(os.readlink(f"/proc/{child.pid}/fd/1"))
        except OSError:
            continue
        if log.parent == run / "processes":
            found[log.stem] = child.pid
    return found


def processes_where(holds: Callable[[psutil.Process], bool]) -> list[int]:
    """Living processes; one that ends while it is looked at does not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and holds(process):
                found.append(process.pid)
    return found


def gone(find: Callable[[], list[int]], *, within_s: float = 20) -> bool:
    """Whether nothing is found any more, soon."""
    end = time.monotonic() + within_s
    while find() and time.monotonic() < end:
        time.sleep(0.1)
    return not find()
