"""A tracker that cannot start is told before models load; one that fails later costs the run nothing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import run_config

import hacrl
from hacrl.config import load_config
from hacrl.run_directory import RunDirectory
from hacrl.trackers import RunTrackers, missing_libraries
from hacrl.trackers.run_trackers import figures
from hacrl.types import StepRecord

# ---------------------------------------------------------------- before models load


def test_a_missing_library_is_told_before_models_load(
    tiny_models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("hacrl.trainer.LocalFleet", lambda *_, **__: pytest.fail("a model was loaded"))
    config = run_config(tiny_models, tmp_path / "run", trackers=["tensorboard", "wandb"])
    with pytest.raises(hacrl.ConfigError) as caught:
        hacrl.train(config)
    assert caught.value.problems == (
        "trackers.0: tensorboard is not installed; pip install 'hacrl[tensorboard]', or leave it out",
        "trackers.1: wandb is not installed; pip install 'hacrl[wandb]', or leave it out",
    )
    assert not (tmp_path / "run").exists()


def test_an_installed_library_is_not_missing(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    assert missing_libraries(load_config(run_config(tiny_models, tmp_path, trackers="tensorboard")).trackers) == []


def test_a_library_that_refuses_is_told_before_models_load(
    tiny_models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setattr("hacrl.preflight.missing_libraries", lambda _: [])
    monkeypatch.setattr("hacrl.trackers.run_trackers._start", refuse)
    monkeypatch.setattr("hacrl.trainer.LocalFleet", lambda *_, **__: pytest.fail("a model was loaded"))
    config = run_config(tiny_models, tmp_path / "run", trackers="wandb")
    with pytest.raises(hacrl.ConfigError, match=r"wandb cannot be started: RuntimeError: no API key; .*mode: offline"):
        hacrl.train(config)


def test_trackers_may_change_when_a_run_goes_on(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    before = load_config(run_config(tiny_models, tmp_path / "run", trackers=["tensorboard"]))
    with RunDirectory.open(before.output, before):
        pass
    now = load_config(before, ["trackers=[]"])
    with RunDirectory.open(now.output, now):
        pass


# ---------------------------------------------------------------- a tracker that fails


class Flaky:
    """Refuses the attempts whose numbers are given, counted from 1 over `begin` and `log`."""

    def __init__(self, *refused: int, first: int = 0) -> None:
        self.taken: list[int] = []
        self._refused = refused
        self._first = first
        self._attempts = 0

    def _attempt(self) -> None:
        self._attempts += 1
        if self._attempts in self._refused:
            raise ConnectionError("out of reach")

    def begin(self) -> int:
        self._attempt()
        return self._first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._attempt()
        self.taken.append(step)

    def close(self, *, failed: bool) -> None:
        self._attempt()


def record(step: int) -> StepRecord:
    return StepRecord(step=step, steps=9, metrics={"x": float(step)}, rollouts=())


@pytest.fixture
def directory(tiny_models: Mapping[str, Path], tmp_path: Path) -> Any:
    config = load_config(run_config(tiny_models, tmp_path / "run"))
    with RunDirectory.open(config.output, config) as directory:
        yield directory


@pytest.mark.parametrize("refused", [(1,), (2,), (3, 4), (5,), (1, 2, 3)])
def test_what_a_tracker_refused_is_sent_again(directory: RunDirectory, refused: tuple[int, ...]) -> None:
    flaky, sound = Flaky(*refused), Flaky()
    trackers = RunTrackers({"flaky": flaky, "sound": sound}, directory)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1, 7):
            directory.record(record(step))
            trackers.record(record(step))
    assert len(told) == 1
    assert "out of reach; training goes on" in str(told[0].message)
    assert flaky.taken == sound.taken == [1, 2, 3, 4, 5, 6]
    assert trackers.failures == {"flaky": len(refused), "sound": 0}


def test_steps_that_a_tracker_has_are_not_sent_again(directory: RunDirectory) -> None:
    directory.record_start([{"split": "eval", "agent": "qwen", "avg@k": 0.5}])
    for step in (1, 2, 3):
        directory.record(record(step))
    behind, ahead, empty = Flaky(first=2), Flaky(first=5), Flaky()
    trackers = RunTrackers({"behind": behind, "ahead": ahead, "empty": empty}, directory)
    for step in (4, 5, 6):
        directory.record(record(step))
        trackers.record(record(step))
    trackers.catch_up()
    assert behind.taken == [2, 3, 4, 5, 6]
    assert ahead.taken == [5, 6]
    assert empty.taken == [0, 1, 2, 3, 4, 5, 6]


def test_a_tracker_that_cannot_be_closed_is_told(directory: RunDirectory) -> None:
    with pytest.warns(RuntimeWarning, match="could not be closed"), RunTrackers({"flaky": Flaky(1)}, directory):
        pass


def test_a_failing_tracker_does_not_end_the_run(
    tiny_models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hacrl.trackers.tensorboard import TensorboardTracker

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(TensorboardTracker, "log", fail)
    config = run_config(tiny_models, tmp_path / "run", export="none", trackers="tensorboard")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hacrl.train(config)
    assert sum("tracker tensorboard did not take step 1: OSError: disk full" in str(item.message) for item in told) == 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    counts = [json.loads(line)["trackers/tensorboard/failures"] for line in lines]
    # A step is counted in the metrics of the next one, for it is on disk before it is sent.
    assert counts == [0, 1, 2]


def test_numbers_that_are_not_finite_are_left_out(directory: RunDirectory) -> None:
    seen = figures({"step": 1, "time": 2.0, "a": float("nan"), "b": float("inf"), "c": None, "d": 1, "time/x": 3.0}, [])
    assert seen == {"d": 1.0, "time/x": 3.0}
