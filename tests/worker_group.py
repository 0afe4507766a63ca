"""Processes that a test's workers live in: started once, for starting takes longer than most tests."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from hacrl.workers import Workers, rendezvous

SECONDS = 60.0


class WorkerGroup:
    """Calls a function in the first `size` processes at the same time, each with its `Workers` as first argument."""

    def __init__(self, most: int) -> None:
        # Its server loads what takes long once, for all of them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([
            "hacrl.trainer", "peft", "torch.distributed.checkpoint", "torch.distributed.fsdp",
            "transformers.models.qwen3.modeling_qwen3",
        ])  # fmt: skip
        pairs = [context.Pipe() for _ in range(most)]
        self._connections = [ours for ours, _ in pairs]
        self._processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pairs]
        for process in self._processes:
            process.start()

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Every worker's result, by rank. What a worker raises is its result where it is of hacrl's own errors."""
        place = rendezvous()
        members = self._connections[:size]
        for rank, connection in enumerate(members):
            connection.send((rank, size, place, function, arguments, options))
        answers = [connection.recv() if connection.poll(2 * SECONDS) else ("silent", None) for connection in members]
        failed = [f"worker {rank}: {text}" for rank, (kind, text) in enumerate(answers) if kind != "done"]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        rank, size, place, function, arguments, options = connection.recv()
        workers = None
        try:
            workers = Workers.join(
                rank=rank, size=size, rendezvous=place, device=torch.device("cpu"), timeout_s=SECONDS
            )
            answer = "done", function(workers, *arguments, **options)
        except Exception:
            answer = "raised", traceback.format_exc()
        finally:
            if workers is not None:
                workers.leave()
        connection.send(answer)
