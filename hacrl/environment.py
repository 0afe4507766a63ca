"""Under which circumstances a run was started: versions, hardware, code, command line."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

_PACKAGES = (
    "hacrl", "torch", "transformers", "tokenizers", "safetensors", "peft", "accelerate", "datasets", "math-verify",
    "reasoning-gym", "pydantic", "omegaconf", "numpy", "vllm", "ray",
)  # fmt: skip


def describe_start() -> dict[str, Any]:
    """One entry of `starts` in `environment.json`. Loads nothing that is not loaded yet."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": _gpus(),
        "git": _git(),
        "packages": versions(_PACKAGES),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed versions of those packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _gpus() -> list[str]:
    # Only what is loaded anyway: describing a run must not cost seconds or claim a GPU.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _git() -> dict[str, Any] | None:
    """Commit of the working directory, and whether tracked files differ from it; None outside a repository."""
    try:
        commit, status = (
            subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True).stdout
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(status.strip())}
