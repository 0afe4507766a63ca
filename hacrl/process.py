"""How this process uses the machine: threads that do not spin, memory that is kept, and how much of it there is."""

from __future__ import annotations

import ctypes
import os
import sys

# mallopt's names of these numbers, in <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def use_passive_threads() -> None:
    """OpenMP threads sleep while they wait, unless the environment says otherwise; must run before torch is imported.

    Threads that spin make torch many times slower beside any other busy process: another agent, a reward worker.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_freed_memory() -> None:
    """Let glibc's allocator keep what is freed, up to 32 MiB a block; does nothing with other C libraries.

    Its default returns the larger activations to the system, to fault them in again page by page in the next pass,
    which takes about a tenth of an update on a CPU.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(_TRIM_THRESHOLD, 2**30)
        libc.mallopt(_TOP_PAD, 64 * 2**20)


def memory_metrics() -> dict[str, float]:
    """`memory/process_gib`: main memory that this process holds now; `memory/<device>/peak_gib`: the most that tensors
    held on each CUDA device since the last call."""
    import psutil
    import torch

    metrics = {"memory/process_gib": psutil.Process().memory_info().rss / 2**30}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            metrics[f"memory/cuda:{index}/peak_gib"] = torch.cuda.max_memory_allocated(index) / 2**30
            torch.cuda.reset_peak_memory_stats(index)
    return metrics
