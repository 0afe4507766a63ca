"""What run directories hold, read without the libraries that made it. Half a run is still worth seeing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from hacrl.errors import RunDirectoryError

COMPARISON = "comparison.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run's records.

    name         as it is shown: the name a comparison gives it, else the end of its path that tells it from the others.
    method       the comparison's name of its method; None where `methods.py` has to find one.
    steps        steps that have metrics, ascending.
    metrics      by name: step to value. Steps without the metric are absent, as are values that are no finite numbers.
    evaluations  lines of `evaluations.jsonl`, in order.
    notes        what could not be read, for people.
    """

    path: Path
    name: str
    method: str | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: tuple[int, ...]
    metrics: Mapping[str, Mapping[int, float]]
    evaluations: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def planned(self) -> int:
        """Steps that the run was to make."""
        return self.config["steps"]

    @property
    def done(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(agent["name"] for agent in self.config["agents"])

    def column(self, name: str) -> Mapping[int, float]:
        """A metric's values by step; empty where the run has no such metric."""
        return self.metrics.get(name, {})

    def pairs(self) -> list[tuple[str, str]]:
        """(learner, author) of all pairs whose foreign rows were counted: who really learned from whom."""
        return [
            (learner, author)
            for learner in self.agents
            for author in self.agents
            if learner != author and any(self.column(f"pair/{learner}/{author}/rows").values())
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A compare output directory's `comparison.json`."""

    path: Path
    axis: str
    results: tuple[Mapping[str, Any], ...]


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], list[Comparison]]:
    """The runs in `paths`, in order: run directories, or compare output directories with all of their runs.

    A run that is named twice is read once. Raises RunDirectoryError for a path that is neither, or cannot be read.
    """
    runs: dict[Path, Run] = {}
    comparisons: list[Comparison] = []
    for path in paths:
        if (path / COMPARISON).is_file():
            comparison, named = _read_comparison(path)
            comparisons.append(comparison)
            for name, folder in named.items():
                runs.setdefault(folder.resolve(), _read_run(folder, name=name, method=name.rpartition("/")[0] or name))
        else:
            runs.setdefault(path.resolve(), _read_run(path, name="", method=None))
    return _named(runs), comparisons


def json_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """A file's lines, None for one that is no JSON mapping. An absent file has none."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        # Split at \n alone: a text may hold other characters that some readers take for line ends.
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            yield cast(dict[str, Any], row) if isinstance(row, dict) else None


def number(value: Any) -> float | None:
    """`value` where it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _named(runs: Mapping[Path, Run]) -> list[Run]:
    """Runs without a name get the shortest end of their path that no other one has."""
    named = []
    for path, run in runs.items():
        others = [other.parts for other in runs if other != path]
        length = 1
        while length < len(path.parts) and any(other[-length:] == path.parts[-length:] for other in others):
            length += 1
        named.append(replace(run, name=run.name or "/".join(path.parts[-length:])))
    return named


def _read_comparison(path: Path) -> tuple[Comparison, dict[str, Path]]:
    file = path / COMPARISON
    try:
        content = json.loads(file.read_bytes())
        runs = {str(name): path / folder for name, folder in content["runs"].items()}
        comparison = Comparison(path=path, axis=str(content["axis"]), results=tuple(content["results"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{file}: cannot be read ({type(error).__name__}: {error}); make it again with hacrl compare, or give the "
            f"run directories themselves"
        ) from error
    return comparison, runs


def _read_run(path: Path, *, name: str, method: str | None) -> Run:
    if not path.is_dir():
        raise RunDirectoryError(f"{path}: {'is a file' if path.exists() else 'no such folder'}; give run directories")
    if not (path / "config.yaml").is_file():
        raise RunDirectoryError(
            f"{path}: neither config.yaml nor {COMPARISON} here, so this is no run directory; give the output folder "
            f"of hacrl train or hacrl compare"
        )
    notes: list[str] = []
    metrics: dict[str, dict[int, float]] = {}
    steps: set[int] = set()
    for row in _records(path / "metrics.jsonl", notes):
        step = row.pop("step")
        steps.add(step)
        for key, value in row.items():
            if key != "time" and (found := number(value)) is not None:
                metrics.setdefault(key, {})[step] = found
    evaluations = tuple(row for row in _records(path / "evaluations.jsonl", notes) if isinstance(row.get("agent"), str))
    return Run(
        path=path,
        name=name,
        method=method,
        config=_config(path / "config.yaml"),
        environment=_environment(path / "environment.json", notes),
        steps=tuple(sorted(steps)),
        metrics=metrics,
        evaluations=evaluations,
        notes=tuple(notes),
    )


def _records(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    unreadable = 0
    for row in json_rows(path):
        if row is None or not isinstance(row.get("step"), int):
            unreadable += 1
        else:
            yield row
    if unreadable:
        notes.append(f"{path.name}: {unreadable} unreadable line{'s' * (unreadable > 1)} left out")


def _config(path: Path) -> Mapping[str, Any]:
    """The configuration as written: a run of another version shows what it can instead of being refused."""
    try:
        config = yaml.safe_load(path.read_bytes())
        names = [*(agent["name"] for agent in config["agents"]), config["algorithm"]["name"]]
        if not isinstance(config["steps"], int) or not all(isinstance(name, str) for name in names):
            raise TypeError("one of them is of another type")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{path}: cannot be read as a run's configuration ({type(error).__name__}: {error}); it needs at least "
            f"agents, steps and algorithm.name"
        ) from error
    return cast(Mapping[str, Any], config)


def _environment(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError("not a mapping")
    except (OSError, ValueError, TypeError) as error:
        notes.append(f"{path.name}: cannot be read ({type(error).__name__})")
        return {}
    return cast(Mapping[str, Any], content)
