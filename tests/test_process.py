"""Threads and memory of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from hacrl.process import keep_freed_memory
torch.set_num_threads(1)
if {keeps}:
    keep_freed_memory()
def faults(blocks):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        parts = [torch.ones(blocks * 2**18) for _ in range(16)]  # MiB
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for blocks in (1, 4, 8, 16, 24):  # a first pass of each, in which memory is new
    faults(blocks)
print(faults(24))
"""


def faults(keeps: bool) -> int:
    result = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keeps=keeps)], capture_output=True, text=True, check=True
    )
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults(keeps=True) < 100 < faults(keeps=False)


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
