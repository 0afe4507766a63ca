"""A state that cannot be written is told as what it is, whatever the library that wrote it raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hacrl.agent_state import told_refusal
from hacrl.errors import RunDirectoryError


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save_file({"weight": torch.zeros(2)}, path),
        lambda path: torch.save({"weight": torch.zeros(2)}, path),
        lambda path: path.write_text("1"),
    ],
    ids=["safetensors", "torch", "Python"],
)
def test_a_refusal_is_told_with_place_room_and_remedy(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with (
        pytest.raises(
            RunDirectoryError, match=r"could not be written, with \d+\.\d MiB free .* make room or give access"
        ),
        told_refusal(tmp_path),
    ):
        write(tmp_path)  # a folder, where a file is wanted
