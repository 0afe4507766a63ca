"""Threads and memory of the process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

HELD = """
import ctypes
from hacrl.process import keep_freed_memory
libc = ctypes.CDLL(None)
class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
libc.mallinfo2.restype = Mallinfo
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if {keeps}:
    keep_freed_memory()
blocks = [libc.malloc(20 * 2**20) for _ in range(16)]
for block in blocks:
    libc.free(block)
print(libc.mallinfo2().arena >> 20)
"""


def held(keeps: bool) -> int:
    """MiB that the allocator holds after 16 blocks of 20 MiB have been freed."""
    result = subprocess.run(
        [sys.executable, "-c", HELD.format(keeps=keeps)], capture_output=True, text=True, check=True
    )
    return int(result.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_freed_memory_is_kept() -> None:
    assert held(keeps=False) < 20
    assert held(keeps=True) >= 320


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_the_command_keeps_waiting_threads_from_spinning(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    code = (
        "import os, sys; sys.argv = ['hacrl', '--version']; from hacrl.cli import main; import hacrl.cli as cli\n"
        "cli.app = lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == [expected, "False"]
