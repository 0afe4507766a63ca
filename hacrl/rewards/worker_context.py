"""How worker processes are started: spawned, and without running the user's script again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

_starting = threading.Lock()


@contextmanager
def _hidden_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    attributes = vars(main)
    with _starting:
        hidden: dict[str, Any] = {name: attributes.pop(name) for name in ("__spec__", "__file__") if name in attributes}
        attributes["__spec__"] = None
        try:
            yield
        finally:
            attributes.update(hidden)


class WorkerProcess(SpawnProcess):
    """A spawned process that does not import the parent's main module.

    By default a spawned child runs the parent's script up to its `__name__` guard: seconds and gigabytes where that
    imports torch, and an endless chain of processes where the guard is missing. The child learns the script's place
    from `__main__` at start, so that is hidden for the moment. Functions of the script arrive by value instead.
    """

    def start(self) -> None:
        with _hidden_main():
            super().start()


class WorkerContext(SpawnContext):
    """The multiprocessing context of the verifier's pool."""

    Process = WorkerProcess
