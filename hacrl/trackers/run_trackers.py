"""All trackers of one run, fed with its step records.

    with RunTrackers.open(config, directory) as trackers:
        for record in ...:
            trackers.record(record)
        trackers.catch_up()

The run directory is the record that counts; trackers hold copies of it. On its first record each tracker gets whatever
it lacks of the steps before, so a resumed run is continued there, and a tracker that is added later has every step.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from hacrl.config import RunConfig, TensorboardConfig, TrackerConfig, WandbConfig
from hacrl.errors import ConfigError
from hacrl.run_directory import RunDirectory, recorded
from hacrl.trackers.tracker import Tracker
from hacrl.types import StepRecord

# What a line has besides figures.
_STAMPS = ("run_id", "step", "time", "split", "agent")


def missing_libraries(trackers: Sequence[TrackerConfig]) -> list[str]:
    """One line for each tracker whose library is not installed; nothing is imported."""
    return [
        f"trackers.{index}: {tracker.name} is not installed; pip install 'hacrl[{tracker.name}]', or leave it out"
        for index, tracker in enumerate(trackers)
        if importlib.util.find_spec(tracker.name) is None
    ]


class RunTrackers:
    """Sends each step to every tracker. A tracker that fails never ends the run: what it did not take is sent again
    with the next step, and `failures` counts the failed attempts by name."""

    def __init__(self, trackers: Mapping[str, Tracker], directory: RunDirectory) -> None:
        self.failures = dict.fromkeys(trackers, 0)
        self._trackers = dict(trackers)
        self._directory = directory
        # By name, once `begin` has told it.
        self._first: dict[str, int] = {}
        # Steps on their way, oldest first; None until the steps before the first record have been looked up.
        self._waiting: dict[str, list[tuple[int, dict[str, float]]]] | None = None

    @classmethod
    def open(cls, config: RunConfig, directory: RunDirectory) -> RunTrackers:
        """Start every tracker of the configuration.

        Raises: ConfigError where a library refuses (no login, no network, a name it does not like).
        """
        started: dict[str, Tracker] = {}
        for index, settings in enumerate(config.trackers):
            try:
                started[settings.name] = _start(settings, config, directory)
            except Exception as error:
                cls(started, directory).close(failed=True)
                offline = ", use mode: offline" if settings.name == "wandb" else ""
                problem = (
                    f"trackers.{index}: {settings.name} cannot be started: {type(error).__name__}: {error}; mend "
                    f"that{offline}, or leave the tracker out"
                )
                raise ConfigError([problem]) from error
        return cls(started, directory)

    def record(self, record: StepRecord) -> None:
        """Send one step, and before the first one whatever trackers lack of the steps before it."""
        if self._trackers:
            self.catch_up(before=record.step)
            self._send([(record.step, figures(record.metrics, record.evaluation))])

    def catch_up(self, *, before: int | None = None) -> None:
        """Send what trackers lack of the recorded steps; all that are `before` a step, or all. Done once."""
        if self._waiting is None and self._trackers:
            self._waiting = {name: [] for name in self._trackers}
            self._send(step for step in recorded_steps(self._directory) if before is None or step[0] < before)

    def close(self, *, failed: bool) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close(failed=failed)
            except Exception as error:
                self._failed(name, "could not be closed", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing the generator of steps early is an ordinary end.
        self.close(failed=kind is not None and kind is not GeneratorExit)

    def _send(self, steps: Iterable[tuple[int, dict[str, float]]]) -> None:
        assert self._waiting is not None
        steps = list(steps)
        for name, tracker in self._trackers.items():
            waiting = self._waiting[name]
            waiting += steps
            try:
                if name not in self._first:
                    self._first[name] = tracker.begin()
                waiting[:] = [step for step in waiting if step[0] >= self._first[name]]
                while waiting:
                    tracker.log(*waiting[0])
                    del waiting[0]
            except Exception as error:
                self._failed(name, f"did not take step {waiting[0][0]}" if waiting else "could not begin", error)

    def _failed(self, name: str, what: str, error: Exception) -> None:
        self.failures[name] += 1
        if self.failures[name] == 1:
            warnings.warn(
                f"tracker {name} {what}: {type(error).__name__}: {error}; training goes on, the metric "
                f"trackers/{name}/failures counts further failures, and the run directory has every step",
                RuntimeWarning,
                stacklevel=2,
            )


def recorded_steps(directory: RunDirectory) -> Iterator[tuple[int, dict[str, float]]]:
    """Every recorded step as its number and figures, in order; step 0 is an evaluation before training."""
    lines, evaluations = recorded(directory.path)
    metrics = {line["step"]: line for line in lines}
    for step in sorted({*metrics, *(entry["step"] for entry in evaluations)}):
        yield step, figures(metrics.get(step, {}), [entry for entry in evaluations if entry["step"] == step])


def figures(metrics: Mapping[str, Any], evaluation: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A step's finite numbers: metrics by their own names, evaluations as `evaluation/<split>/<agent>/<figure>`."""
    parts = [("", metrics), *((f"evaluation/{entry['split']}/{entry['agent']}/", entry) for entry in evaluation)]
    return {
        start + name: float(value)
        for start, part in parts
        for name, value in part.items()
        if name not in _STAMPS and isinstance(value, int | float) and math.isfinite(value)
    }


def _start(settings: TrackerConfig, config: RunConfig, directory: RunDirectory) -> Tracker:
    if isinstance(settings, TensorboardConfig):
        from hacrl.trackers.tensorboard import TensorboardTracker

        return TensorboardTracker(config, directory.path)
    if isinstance(settings, WandbConfig):
        from hacrl.trackers.wandb import WandbTracker

        return WandbTracker(settings, config, directory.path, run_id=directory.run_id)
    from hacrl.trackers.trackio import TrackioTracker

    return TrackioTracker(settings, config, run_id=directory.run_id)
