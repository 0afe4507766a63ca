"""TensorBoard: event files in `tensorboard/` of the run directory (`tensorboard --logdir runs` compares runs)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from hacrl.config import RunConfig
from hacrl.config_changes import config_yaml


class TensorboardTracker:
    """See `Tracker`. Each start writes the whole run anew and then removes the event files of the start before: a step
    that was made twice, or that a kill cut short, is there once."""

    def __init__(self, config: RunConfig, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._config = config_yaml(config)
        self._writer: SummaryWriter | None = None

    def begin(self) -> int:
        before = list(self._folder.glob("events.out.tfevents.*"))
        # purge_step makes a running TensorBoard forget what it has read from the older files.
        self._writer = SummaryWriter(str(self._folder), purge_step=0)
        self._writer.add_text("config", f"```yaml\n{self._config}```")
        for path in before:
            path.unlink()
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        if self._writer is not None:
            self._writer.close()
