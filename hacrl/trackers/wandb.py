"""Weights & Biases, online or offline; local files in `wandb/` of the run directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import wandb

from hacrl.config import RunConfig, WandbConfig


class WandbTracker:
    """See `Tracker`. The W&B run has the run's own id, so every start goes on with the same one.

    Online the server says where to go on. Offline nobody knows what a killed process has still written, so each start
    writes the whole run into a folder of its own and removes those of earlier starts; what `wandb sync` has sent stays.
    """

    def __init__(self, settings: WandbConfig, config: RunConfig, run: Path, *, run_id: str) -> None:
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.run_name or Path(config.output).absolute().name,
            id=run_id,
            resume="allow",
            dir=str(run),
            mode=settings.mode,
            config=config.model_dump(mode="json"),
            # A run that the calling program has open stays its own.
            reinit="create_new",
            # Nothing of the terminal is captured: the live view redraws it four times a second.
            settings=wandb.Settings(console="off", quiet=True),
        )

    def begin(self) -> int:
        if not self._run.offline:
            return self._run.step
        own = Path(self._run.dir).parent
        for folder in own.parent.glob(f"offline-run-*-{self._run.id}"):
            if folder != own and not any(folder.glob("*.synced")):
                shutil.rmtree(folder)
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
