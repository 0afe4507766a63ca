"""The processes that train one agent together, as one of them sees the group."""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """Worker `rank` of the `size` workers of one agent; `mesh` is torch's device mesh over them, None for one alone.

    All workers call every method, and in the same order: each waits for the others. Alone, nothing is sent.
    """

    rank: int
    size: int
    mesh: Any = None

    @classmethod
    def alone(cls) -> Workers:
        return cls(rank=0, size=1)

    @classmethod
    def join(cls, *, rank: int, size: int, rendezvous: str, device: torch.device, timeout_s: float) -> Workers:
        """Wait for the `size` workers that meet at `rendezvous`; NCCL carries what lies on GPUs, gloo the rest.

        A worker that waits for another one longer than `timeout_s`, now or in any later call, raises; in a transfer
        between GPUs torch ends its process.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if device.type == "cuda":
            # Otherwise the mesh would choose a device by the worker's rank.
            torch.cuda.set_device(device.index or 0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        return cls(rank=rank, size=size, mesh=init_device_mesh(device.type, (size,)))

    def leave(self) -> None:
        if self.mesh is not None:
            import torch.distributed as dist

            dist.destroy_process_group()

    # ------------------------------------------------------------ what workers tell each other

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the workers."""
        return self._reduced(values, "SUM")

    def maximum(self, value: float) -> float:
        return self._reduced([value], "MAX")[0]

    def _reduced(self, values: Sequence[float], operation: str) -> list[float]:
        if self.mesh is None:
            return list(values)
        import torch.distributed as dist

        # In main memory: the numbers are few, and a GPU would have to be waited for.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
        return tensor.tolist()

    def gather(self, part: T) -> list[T]:
        """Every worker's part, by rank, on rank 0; nothing elsewhere."""
        if self.mesh is None:
            return [part]
        import torch.distributed as dist

        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(part, parts)
        return parts or []

    def exchange(self, part: T) -> list[T]:
        """Every worker's part, by rank, on all of them."""
        if self.mesh is None:
            return [part]
        import torch.distributed as dist

        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part)
        return parts

    def on_first(self, call: Callable[[], None]) -> None:
        """Rank 0 makes the call while the others wait for its end; what it raises is raised in all of them."""
        if self.mesh is None:
            call()
            return
        import torch.distributed as dist

        outcome: list[Exception | None] = [None]
        if self.rank == 0:
            try:
                call()
            except Exception as error:
                outcome = [error]
        dist.broadcast_object_list(outcome)
        if outcome[0] is not None:
            raise outcome[0]

    def barrier(self) -> None:
        self.maximum(0)


def rendezvous() -> str:
    """Where workers can meet, for rank 0 to make up: this machine's address as others reach it, and a free port.

    The port is free at this moment; whoever takes it before rank 0 joins makes the joining fail.
    """
    host = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Nothing is sent: connecting a datagram socket only chooses the interface.
        probe.connect(("192.0.2.1", 9))
        host = probe.getsockname()[0]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return f"tcp://{host}:{listener.getsockname()[1]}"


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each worker holds a part, put together on all of them; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_of(tensor: Tensor, *, like: Tensor) -> Tensor:
    """A whole tensor laid out as `like`: this worker's part of it where `like` is shared out. Nothing is sent."""
    placements = getattr(like, "placements", None)
    if placements is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)
