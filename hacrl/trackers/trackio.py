"""trackio: a local database, shown by `trackio show`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

import trackio

from hacrl.config import RunConfig, TrackioConfig


class TrackioTracker:
    """See `Tracker`. Each start replaces the run in the database by the whole run as it is recorded: a step that was
    made twice, or that a kill cut short, is there once."""

    def __init__(self, settings: TrackioConfig, config: RunConfig, *, run_id: str) -> None:
        self._project = settings.project
        # trackio knows runs by name, and names of folders repeat.
        self._name = f"{settings.run_name or Path(config.output).absolute().name}-{run_id}"
        with _silence():
            self._run = trackio.init(
                project=self._project,
                name=self._name,
                config=config.model_dump(mode="json"),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def begin(self) -> int:
        # The database has nothing of the new run before its first `log`.
        with contextlib.suppress(ValueError):  # no such project yet
            for run in trackio.Api().runs(self._project):
                if run.name == self._name:
                    run.delete()
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        with _silence():
            # Not the run's own method: trackio would finish it again, and print, when the process ends.
            trackio.finish()


def _silence() -> contextlib.AbstractContextManager[object]:
    """It prints where it stores things, which would break into the live view."""
    return contextlib.redirect_stdout(io.StringIO())
