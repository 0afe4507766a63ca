"""The folder of one run: what it was, what happened at every step, and where to go on (docs/run-directory.md).

    with RunDirectory.open(config.output, config) as directory:
        checkpoint = directory.resume_from
        ...                                   # load it, where there is one
        directory.rewind(checkpoint)          # records after it are dropped: those steps are made again
        for each step:
            directory.record(record)
            directory.save(record.step, write, state=..., score=...)

One process at a time; a process that is killed leaves no lock behind.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

from hacrl.checkpoint import Checkpoint, CheckpointStore, step_name
from hacrl.config import RunConfig, load_config
from hacrl.config_changes import altering_changes, config_yaml, differences, listed
from hacrl.durable_files import (
    FolderLock,
    append_durably,
    fsync,
    json_lines,
    make_folder,
    write_atomically,
    write_json,
)
from hacrl.environment import describe_start
from hacrl.errors import ConfigError, RunDirectoryError
from hacrl.types import StepRecord

_CONFIG = "config.yaml"
_ENVIRONMENT = "environment.json"
_METRICS = "metrics.jsonl"
_EVALUATIONS = "evaluations.jsonl"
_TIMELINE = "timeline.jsonl"
_ROLLOUTS = "rollouts"
_CHECKPOINTS = "checkpoints"
_FORMAT = 1


class RunDirectory:
    """One run's folder, opened for writing. `RunDirectory.open` makes one; it is a context manager.

    `resume_from` is the checkpoint to go on from, None for a run that starts at its beginning; `run_id` is the same
    for the whole life of the run.
    """

    def __init__(
        self,
        path: Path,
        lock: FolderLock,
        config: RunConfig,
        *,
        run_id: str,
        resume_from: Checkpoint | None,
        fresh: bool,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.resume_from = resume_from
        self.checkpoints = CheckpointStore(path / _CHECKPOINTS, run_id=run_id)
        self._policy = config.checkpoint
        self._lock = lock
        # The last recorded step; None until `rewind` has brought an older run's records to a known state.
        self._step = 0 if fresh else None

    @classmethod
    def open(
        cls, path: str | Path, config: RunConfig, *, resume: Literal["auto", "never", "must"] = "auto"
    ) -> RunDirectory:
        """Start a run in a new or empty folder, or go on with the run that is there.

        `resume`: `auto` takes either, `never` wants no run there, `must` wants one. Going on needs the configuration
        that the run was started with; only keys that do not alter its results may differ (docs/run-directory.md), and
        such a change is kept in `config.yaml` and noted in `environment.json`.

        Nothing that is there is deleted or moved. Raises RunDirectoryError: another process uses the folder; it holds
        other files or another run; the configuration differs, each key named with its old and new value; a run that
        `never` forbids or `must` misses; all checkpoints damaged or gone.
        """
        path = Path(path)
        try:
            # Looked at before anything is created, so that a refused folder stays as it was, and again under the
            # lock, for another process may have started a run in between.
            _refuse(path, resume)
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(path)
            try:
                _refuse(path, resume)
                return cls._continue(path, lock, config) if _holds_run(path) else cls._start(path, lock, config)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise RunDirectoryError(
                f"{path}: cannot be used as run directory: {error}; make room or give access, or choose another output"
            ) from error

    @classmethod
    def _start(cls, path: Path, lock: FolderLock, config: RunConfig) -> RunDirectory:
        run_id = secrets.token_hex(6)
        environment = {"format": _FORMAT, "run_id": run_id, "seed": config.seed, "starts": [describe_start()]}
        write_json(path / _ENVIRONMENT, environment)
        write_atomically(path / _CONFIG, config_yaml(config).encode())
        with contextlib.suppress(PermissionError):
            # A parent that may be entered but not read cannot be forced to disk either.
            fsync(path.absolute().parent)
        return cls(path, lock, config, run_id=run_id, resume_from=None, fresh=True)

    @classmethod
    def _continue(cls, path: Path, lock: FolderLock, config: RunConfig) -> RunDirectory:
        environment = _read_environment(path)
        run_id: str = environment["run_id"]
        try:
            before = load_config(path / _CONFIG)
        except ConfigError as error:
            raise RunDirectoryError(
                f"{path / _CONFIG}: cannot be compared with this run's configuration: {error}; choose another output, "
                f"or use the hacrl version named in {_ENVIRONMENT}"
            ) from error
        recorded = _last_step(path / _METRICS)
        changes = differences(before, config)
        if refused := altering_changes(before, config, done=recorded):
            raise RunDirectoryError(
                f"{path}: the run there was started with another configuration, and these changes alter its results:\n"
                f"{listed(refused)}\nput them back to resume this run, or choose another output for a new one"
            )
        checkpoint = CheckpointStore(path / _CHECKPOINTS, run_id=run_id).latest()
        if checkpoint is None and recorded > before.checkpoint.every:
            # A crash loses a checkpoint at most before the first one; starting over would wipe the records silently.
            raise RunDirectoryError(
                f"{path}: {recorded} steps are recorded, but {_CHECKPOINTS}/ holds no checkpoint; put the checkpoints "
                f"back to resume, or choose another output to start anew"
            )
        start = describe_start() | {
            "resumed_from_step": checkpoint.step if checkpoint else 0,
            "recorded_steps": recorded,
            "changed": {key: {"was": was, "now": now} for key, (was, now) in changes.items()},
        }
        write_json(path / _ENVIRONMENT, environment | {"starts": [*environment["starts"], start]})
        if changes:
            write_atomically(path / _CONFIG, config_yaml(config).encode())
        return cls(path, lock, config, run_id=run_id, resume_from=checkpoint, fresh=False)

    @property
    def recorded_steps(self) -> int:
        """Steps recorded so far; raises ValueError where only `rewind` can tell."""
        if self._step is None:
            raise ValueError("the records are in no known state: call rewind(resume_from) first")
        return self._step

    # ------------------------------------------------------------ writing

    def record(self, record: StepRecord) -> None:
        """Write one step: rollouts, evaluation, timeline, and last the metrics line, on disk when this returns.

        Numbers that are not finite become null, for JSON has no NaN. Steps come in order and once. Raises
        RunDirectoryError where the disk refuses; what was recorded before stays readable.
        """
        if self._step is None:
            raise ValueError("a resumed run directory is rewound before it records: call rewind(resume_from) first")
        if record.step != self._step + 1:
            raise ValueError(f"step {record.step} recorded after step {self._step}")
        for name in ("run_id", "step", "time"):
            if name in record.metrics:
                raise ValueError(f"metric {name!r}: this name is taken by the run directory")
        now = time.time()
        # All lines are made before the first is written: a value that is no JSON leaves nothing behind.
        rollouts = self._stamped(record.rollouts, step=record.step)
        evaluation = self._stamped(record.evaluation, step=record.step, time=now)
        timeline = self._stamped(record.timeline, step=record.step)
        metrics = self._stamped([record.metrics], step=record.step, time=now)
        try:
            if rollouts:
                make_folder(self.path / _ROLLOUTS)
                write_atomically(self.path / _ROLLOUTS / f"{step_name(record.step)}.jsonl", rollouts)
            if evaluation:
                append_durably(self.path / _EVALUATIONS, evaluation)
            if timeline:
                append_durably(self.path / _TIMELINE, timeline)
            append_durably(self.path / _METRICS, metrics)
        except OSError as error:
            # Part of the step may be on disk; only a rewind knows how to go on from there.
            self._step = None
            raise RunDirectoryError(
                f"{self.path}: step {record.step} could not be recorded: {error}; make room or give access, then "
                f"start again with the same command"
            ) from error
        self._step = record.step

    def record_start(self, evaluation: Sequence[Mapping[str, Any]]) -> None:
        """Write an evaluation that was made before the first step, as step 0."""
        if self._step != 0:
            raise ValueError(f"an evaluation of step 0 recorded after step {self._step}")
        lines = self._stamped(evaluation, step=0, time=time.time())
        try:
            if lines:
                append_durably(self.path / _EVALUATIONS, lines)
        except OSError as error:
            self._step = None
            raise RunDirectoryError(
                f"{self.path}: the evaluation of step 0 could not be recorded: {error}; make room or give access, "
                f"then start again with the same command"
            ) from error

    def save(
        self, step: int, write: Callable[[Path], None], *, state: Mapping[str, Any], score: float | None
    ) -> Checkpoint:
        """Save a checkpoint of the step that was recorded last (0 before the first). See `CheckpointStore.save`."""
        if step != self._step:
            # A checkpoint vouches for the records up to its step, which a resume keeps and never makes again.
            raise ValueError(f"checkpoint of step {step}, but the last recorded step is {self._step}")
        return self.checkpoints.save(
            step,
            write,
            state=state,
            score=score,
            keep_last=self._policy.keep_last,
            keep_best=self._policy.keep_best,
        )

    def rewind(self, to: Checkpoint | None) -> None:
        """Bring the records back to a checkpoint: everything of later steps is removed, checkpoints included.

        None is the run's beginning: everything goes, an evaluation of step 0 too. Each file is replaced in one act,
        and a rewind that is cut short is finished by the next one. A half-written last line is dropped; whatever else
        cannot be read is dropped with a warning. Raises RunDirectoryError for lines of another run.
        """
        step = -1 if to is None else to.step
        self._step = None
        try:
            self.checkpoints.remove_leftovers()
            self.checkpoints.remove_after(step)
            # A process killed between saving its last checkpoint and pruning leaves this to its successor.
            self.checkpoints.prune(keep_last=self._policy.keep_last, keep_best=self._policy.keep_best)
            for file in (*self.path.glob(".tmp-*"), *(self.path / _ROLLOUTS).glob(".tmp-*")):
                file.unlink()
            for file in (self.path / _ROLLOUTS).glob("step-*.jsonl"):
                match = re.fullmatch(r"step-(\d{6,})\.jsonl", file.name)
                if match and int(match[1]) > step:
                    file.unlink()
            for name in (_METRICS, _EVALUATIONS, _TIMELINE):
                self._cut(self.path / name, step)
        except OSError as error:
            raise RunDirectoryError(f"{self.path}: cannot be rewound to step {max(step, 0)}: {error}") from error
        recorded = _last_step(self.path / _METRICS)
        if recorded < step:
            warnings.warn(
                f"{self.path / _METRICS}: ends at step {recorded}, but the checkpoint is of step {step}; the steps "
                f"in between stay missing",
                RuntimeWarning,
                stacklevel=2,
            )
        self._step = max(step, 0)

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _stamped(self, rows: Sequence[Mapping[str, Any]], **stamp: Any) -> bytes:
        stamp = {"run_id": self.run_id, **stamp}
        # In front for the reader, and again behind, so that no row can claim another step.
        return json_lines({**stamp, **row, **stamp} for row in rows)

    def _cut(self, path: Path, step: int) -> None:
        if not path.exists():
            return
        data = path.read_bytes()
        kept: list[bytes] = []
        unreadable = 0
        *whole, half = data.split(b"\n")
        for line in whole:
            content = _parse(line)
            if content is None:
                unreadable += 1
            elif content.get("run_id") != self.run_id:
                raise RunDirectoryError(
                    f"{path}: holds lines of run {content.get('run_id')}, this is run {self.run_id}; move the file away"
                )
            elif content["step"] <= step:
                kept.append(line + b"\n")
        if unreadable:
            warnings.warn(f"{path}: {unreadable} unreadable line(s) dropped", RuntimeWarning, stacklevel=3)
        if half or len(kept) != len(whole):
            if kept:
                write_atomically(path, b"".join(kept))
            else:
                path.unlink()


# ---------------------------------------------------------------- reading what is there


def recorded(path: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of `metrics.jsonl` and of `evaluations.jsonl`; a half-written last line is left out."""
    metrics, evaluations = (list(_lines(Path(path) / name)) for name in (_METRICS, _EVALUATIONS))
    return metrics, evaluations


def saved_checkpoints(path: str | Path) -> CheckpointStore:
    """The checkpoints of a run's folder, to read from (evaluation, export). Takes no lock and changes nothing.

    Raises RunDirectoryError where `path` is not the folder of a run.
    """
    path = Path(path)
    if not _holds_run(path):
        raise RunDirectoryError(
            f"{path}: no {_CONFIG} here, so this is not a run directory; give a run's output folder"
        )
    return CheckpointStore(path / _CHECKPOINTS, run_id=_read_environment(path)["run_id"])


def _read_environment(path: Path) -> dict[str, Any]:
    try:
        environment = json.loads((path / _ENVIRONMENT).read_bytes())
        if not isinstance(environment["run_id"], str) or not isinstance(environment["starts"], list):
            raise TypeError("run_id or starts is of another type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path / _ENVIRONMENT}: cannot be read ({type(error).__name__}: {error}), and without its run id nothing "
            f"here can be told from another run's files; put the file back, or choose another output"
        ) from error
    return environment


def _holds_run(path: Path) -> bool:
    return (path / _CONFIG).is_file()


def _refuse(path: Path, resume: Literal["auto", "never", "must"]) -> None:
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path}: is a file, and a run needs a folder; choose another output")
    if _holds_run(path):
        if resume == "never":
            raise RunDirectoryError(
                f"{path}: holds a run already; choose another output, remove the folder yourself, or resume it"
            )
        return
    held = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")} if path.is_dir() else set()
    # environment.json alone is a start that was killed before config.yaml, which is written last.
    if others := sorted(held - {_ENVIRONMENT}):
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise RunDirectoryError(
            f"{path}: holds other files ({shown}) and no {_CONFIG}, so it is not the folder of a run that could be "
            f"resumed; choose another output, or empty the folder yourself"
        )
    if resume == "must":
        raise RunDirectoryError(f"{path}: no run to resume here; check output, or start without resuming")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    row = cast(dict[str, Any], content)
    return row if isinstance(row.get("step"), int) else None


def _last_step(metrics: Path) -> int:
    return max((row["step"] for row in _lines(metrics)), default=0)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with open(path, "rb") as file:
            yield from (row for row in map(_parse, file) if row is not None)
