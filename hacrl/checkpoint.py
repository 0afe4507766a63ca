"""Checkpoints that are either whole or not there: written aside, listed with checksums, renamed in one act.

    checkpoints/step-000012/
      manifest.json    step, run, score, and size and sha256 of every other file; written last
      state.json       the loop's own state
      ...              whatever `write` put there
    checkpoints/.tmp-..., .old-...    left by a killed process; removed at the next start

`write` is the caller's; this file knows nothing of models and optimizers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hacrl.durable_files import fsync, make_folder
from hacrl.errors import RunDirectoryError

_MANIFEST = "manifest.json"
_STATE = "state.json"
_FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


def step_name(step: int) -> str:
    """`step-000012`: sorts by name as by number up to a million steps."""
    return f"step-{step:06d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: the state after `step` steps. `state` is what was given to `CheckpointStore.save`."""

    step: int
    path: Path
    run_id: str
    score: float | None
    state: Mapping[str, Any]


class _DamagedError(Exception):
    """Why a folder is not a complete checkpoint; never leaves this file."""


class CheckpointStore:
    """The folder `checkpoints/` of one run. Writing needs the run directory's lock; reading does not."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        self.path = path
        self._run_id = run_id

    # ------------------------------------------------------------ reading

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, every file checked against its checksum; None where there is none at all.

        Damaged ones that are newer are skipped with a warning that names each and says what is wrong. Raises
        RunDirectoryError where checkpoints exist but none is usable, or one belongs to another run.
        """
        damaged: list[str] = []
        found: Checkpoint | None = None
        for step in self._steps(newest_first=True):
            try:
                found = self._read(step, checksums=True)
                break
            except _DamagedError as error:
                damaged.append(f"{step_name(step)} ({error})")
        if not damaged:
            return found
        listed = "; ".join(damaged)
        if found is None:
            raise RunDirectoryError(
                f"{self.path}: all {len(damaged)} checkpoints are damaged: {listed}; "
                f"restore the files from a copy, or choose another output to start anew"
            )
        warnings.warn(
            f"{self.path}: {len(damaged)} damaged checkpoint(s) skipped: {listed}; "
            f"step {found.step} is the newest complete one",
            RuntimeWarning,
            stacklevel=2,
        )
        return found

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the highest score, the later one of equals; None where none has a score.

        Every file is checked against its checksum, a damaged one is passed over with a warning.
        """
        for step in self._by_score():
            try:
                return self._read(step, checksums=True)
            except _DamagedError as error:
                warnings.warn(
                    f"{self.path}: damaged checkpoint {step_name(step)} skipped ({error})", RuntimeWarning, stacklevel=2
                )
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of one step, every file checked. Raises RunDirectoryError: there is none, or it is damaged."""
        if step not in self._steps():
            kept = ", ".join(map(str, self.steps())) or "none"
            raise RunDirectoryError(f"{self.path}: no checkpoint of step {step}; kept are those of step(s) {kept}")
        try:
            return self._read(step, checksums=True)
        except _DamagedError as error:
            raise RunDirectoryError(
                f"{self.path}: checkpoint {step_name(step)} is damaged ({error}); restore its files, or take another"
            ) from error

    def steps(self) -> list[int]:
        """Steps of all checkpoints whose files are there in full length, oldest first. Checksums are not read."""
        return sorted(self._scores())

    # ------------------------------------------------------------ writing

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        state: Mapping[str, Any],
        score: float | None,
        keep_last: int,
        keep_best: bool,
    ) -> Checkpoint:
        """Write a checkpoint, make it durable and visible in one act, and only then remove superseded ones.

        `write` fills the empty folder it is given. `state` must be JSON with text keys; floats come back bit for
        bit, tuples as lists. `score` is what `best` compares, higher is better, None or NaN where there is none. An
        intact checkpoint of the same step is kept and returned: the state after a step is one thing. Afterwards the
        `keep_last` newest complete checkpoints are left, and the best one if `keep_best`.

        Whatever fails, earlier checkpoints stay as they are. Raises RunDirectoryError where the disk refuses (full,
        read-only), ValueError for a state that JSON would change; what `write` raises passes through.
        """
        _check_text_keys(state, "state")
        if score is not None and not math.isfinite(score):
            score = None
        final = self.path / step_name(step)
        if step in self._scores():
            return self._read(step, checksums=False)
        # A name of its own each time: a process that was cut off may still be writing to that of an attempt before.
        temporary = self.path / f".tmp-{step_name(step)}-{secrets.token_hex(4)}"
        try:
            make_folder(self.path)
            temporary.mkdir()
            write(temporary)
            self._seal(temporary, step, state, score)
            if final.exists():
                # Only a damaged one can be here; it must make room, for a folder cannot replace a folder.
                self._discard(final)
            os.replace(temporary, final)
            fsync(self.path)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise RunDirectoryError(
                    f"{final}: the checkpoint could not be written: {error}; earlier checkpoints "
                    f"({', '.join(map(step_name, self._steps())) or 'none'}) are untouched: make room or "
                    f"give access, then start again with the same command"
                ) from error
            raise
        try:
            saved = self._read(step, checksums=False)
        except _DamagedError as error:
            raise RunDirectoryError(
                f"{final}: the checkpoint is damaged right after it was written ({error}); no earlier checkpoint was "
                f"removed; check the disk"
            ) from error
        self.prune(keep_last=keep_last, keep_best=keep_best)
        return saved

    def prune(self, *, keep_last: int, keep_best: bool) -> None:
        """Remove all but the `keep_last` newest complete checkpoints, and the best one if `keep_best`."""
        complete = self.steps()
        keep = set(complete[-keep_last:])
        if keep_best:
            keep.update(self._by_score()[:1])
        # Damaged ones go as well, once as many complete ones are newer.
        for step in self._steps():
            if step < complete[-1] and step not in keep:
                try:
                    self._discard(self.path / step_name(step))
                except OSError as error:
                    # The new checkpoint is safe; an old one too many is no reason to stop the run.
                    warnings.warn(
                        f"{self.path}: {step_name(step)} could not be removed: {error}", RuntimeWarning, stacklevel=3
                    )

    def remove_after(self, step: int) -> None:
        """Remove all later checkpoints, complete or damaged, newest first, so that a crash in between leaves the
        newest that remains in agreement with the run's records."""
        for later in self._steps(newest_first=True):
            if later > step:
                self._discard(self.path / step_name(later))

    def remove_leftovers(self) -> None:
        """Remove what a killed process left half written or half deleted."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if entry.name.startswith((".tmp-", ".old-")):
                    shutil.rmtree(entry)

    # ------------------------------------------------------------ inside

    def _seal(self, folder: Path, step: int, state: Mapping[str, Any], score: float | None) -> None:
        for reserved in (_MANIFEST, _STATE):
            if (folder / reserved).exists():
                raise ValueError(f"checkpoint of step {step}: {reserved} is written by the run directory itself")
        (folder / _STATE).write_text(json.dumps(dict(state)), encoding="utf-8")
        files: dict[str, dict[str, Any]] = {}
        folders = [folder]
        for entry in sorted(folder.rglob("*")):
            if entry.is_symlink():
                raise ValueError(f"checkpoint of step {step}: {entry.name} is a link; a checkpoint holds its own files")
            if entry.is_dir():
                folders.append(entry)
                continue
            fsync(entry)
            name = entry.relative_to(folder).as_posix()
            files[name] = {"bytes": entry.stat().st_size, "sha256": _sha256(entry)}
        manifest = {
            "format": _FORMAT,
            "run_id": self._run_id,
            "step": step,
            "score": score,
            "time": time.time(),
            "files": files,
        }
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        fsync(folder / _MANIFEST)
        for inner in reversed(folders):
            fsync(inner)

    def _read(self, step: int, *, checksums: bool) -> Checkpoint:
        folder = self.path / step_name(step)
        manifest = _read_json(folder / _MANIFEST)
        try:
            written, run_id, score = manifest["step"], manifest["run_id"], manifest["score"]
            files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise _DamagedError(f"{_MANIFEST} is incomplete: {error}") from error
        if written != step:
            raise _DamagedError(f"{_MANIFEST} is that of step {written}")
        if run_id != self._run_id:
            raise RunDirectoryError(
                f"{folder}: this checkpoint belongs to run {run_id}, the folder to run {self._run_id}; "
                f"move the checkpoint back to its own run"
            )
        if _STATE not in files:
            raise _DamagedError(f"{_MANIFEST} does not list {_STATE}")
        for name, (size, digest) in files.items():
            path = folder / name
            try:
                found = path.stat().st_size
                if found != size:
                    raise _DamagedError(f"{name} has {found} of {size} bytes")
                if checksums and _sha256(path) != digest:
                    raise _DamagedError(f"{name} does not match its checksum")
            except (FileNotFoundError, NotADirectoryError) as error:
                raise _DamagedError(f"{name} is missing") from error
            except OSError as error:
                raise _unreadable(path, error) from error
        return Checkpoint(step=step, path=folder, run_id=run_id, score=score, state=_read_json(folder / _STATE))

    def _scores(self) -> dict[int, float | None]:
        scores: dict[int, float | None] = {}
        for step in self._steps():
            try:
                scores[step] = self._read(step, checksums=False).score
            except _DamagedError:
                continue
        return scores

    def _by_score(self) -> list[int]:
        scored = [(score, step) for step, score in self._scores().items() if score is not None]
        return [step for _, step in sorted(scored, reverse=True)]

    def _steps(self, *, newest_first: bool = False) -> list[int]:
        if not self.path.is_dir():
            return []
        matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=newest_first)

    def _discard(self, folder: Path) -> None:
        # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
        doomed = self.path / f".old-{folder.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
        fsync(self.path)
        shutil.rmtree(doomed)


# ---------------------------------------------------------------- contents of a checkpoint


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _DamagedError(f"{path.name} is missing") from error
    except ValueError as error:
        raise _DamagedError(f"{path.name} is not JSON") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise _DamagedError(f"{path.name} holds no mapping")
    return cast(dict[str, Any], content)


def _unreadable(path: Path, error: OSError) -> RunDirectoryError:
    # A disk that refuses to read is not a damaged checkpoint: going on from an older one would throw steps away.
    return RunDirectoryError(f"{path}: cannot be read: {error}; give access to it, then start again")


def _check_text_keys(value: Any, place: str) -> None:
    # JSON turns other keys into text without a word, and the state would come back changed.
    if isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            if not isinstance(key, str):
                raise ValueError(f"{place}: key {key!r} is {type(key).__name__}; keys of a checkpoint's state are text")
            _check_text_keys(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast(list[Any], value)):
            _check_text_keys(item, f"{place}.{index}")
