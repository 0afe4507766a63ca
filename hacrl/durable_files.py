"""Files that survive a crash at any moment: replaced in one act, appended and forced to disk, one writer per folder."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import warnings
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from hacrl.errors import RunDirectoryError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's whole content in one act that survives a crash: afterwards it is the old or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_bytes(data)
        fsync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def append_durably(path: Path, data: bytes) -> None:
    """Append to a file and force it to disk. If that fails, the file is cut back to what it was, as far as possible."""
    created = not path.exists()
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(before)
            raise
    if created:
        fsync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder within an existing one, durably; an existing folder is fine."""
    if not path.is_dir():
        path.mkdir()
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's creations, renames and removals, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by one JSON mapping in one act; numbers that are not finite become null."""
    write_atomically(path, (json.dumps(_plain(content), indent=2, ensure_ascii=False) + "\n").encode())


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON mapping per line; numbers that are not finite become null, for JSON has no NaN."""
    # A lone surrogate in a text, which UTF-8 refuses, becomes the JSON escape of the same character.
    return b"".join(f"{_json(row)}\n".encode("utf-8", "backslashreplace") for row in rows)


def _json(row: Mapping[str, Any]) -> str:
    try:
        return _LINE.encode(row)
    except (TypeError, ValueError):
        # Only where there is something to replace: looking for it takes longer than all the rest.
        return _LINE.encode(_plain(row))


_LINE = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(list[Any], value)]
    return value


class FolderLock:
    """An exclusive flock on `.lock`, which the kernel drops when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip() or "unknown"
            self.release()
            raise RunDirectoryError(
                f"{folder}: in use by another process ({holder}); wait for it, or choose another output"
            ) from error
        except OSError as error:
            warnings.warn(
                f"{folder}: this file system has no locks ({error}); make sure that only one process uses the folder",
                RuntimeWarning,
                stacklevel=4,
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"pid {os.getpid()} on {platform.node()}\n".encode(), 0)
        # A forked worker would keep the lock of a killed parent alive, for it shares the open file.
        reference = weakref.WeakMethod(self.release)
        os.register_at_fork(after_in_child=lambda: (close := reference()) and close())

    def release(self) -> None:
        """Let another process have it; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
