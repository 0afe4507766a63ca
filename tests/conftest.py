"""Shared by all tests: settings that must stand before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two OpenMP threads that spin beside another busy process are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may depend on a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two tiny random-weight models, `qwen` and `llama`; see `tiny_models.py`. Read only."""
    from tiny_models import build_tiny_models

    return build_tiny_models(tmp_path_factory.mktemp("models"))
