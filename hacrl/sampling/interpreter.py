"""The Python interpreter of the environment that vLLM lives in."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys


def missing_vllm(python: str | None) -> str | None:
    """Why the interpreter cannot run an engine, None where it can. vLLM itself is not loaded."""
    interpreter = shutil.which(python or sys.executable)
    if interpreter is None:
        return f"{python!r} is no program that can be run"
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([interpreter, "-c", program], capture_output=True, timeout=60, check=False).returncode == 0:
            return None
    return f"{interpreter} has no vLLM"
