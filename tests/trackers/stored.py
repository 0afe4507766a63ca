"""What a tracking library has on disk for a run: every (step, figures) that was written, in the order of writing."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Steps = list[tuple[int, dict[str, float]]]


def tensorboard(run: Path) -> Steps:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    steps: Steps = []
    for path in sorted((run / "tensorboard").glob("events.out.tfevents.*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    if not steps or steps[-1][0] != event.step:
                        steps.append((event.step, {}))
                    assert value.tag not in steps[-1][1]
                    steps[-1][1][value.tag] = value.simple_value
    return steps


def wandb(run: Path) -> Steps:
    steps: Steps = []
    for record in wandb_records(run):
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = items["_step"]
            steps.append((step, {name: value for name, value in items.items() if not name.startswith("_")}))
    return steps


def wandb_records(run: Path) -> Iterator[Any]:
    """Records of all offline folders of a run, oldest folder first."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        yield from map(Record.FromString, _blocks(path.read_bytes()[7:]))


def _blocks(data: bytes) -> Iterator[bytes]:
    """The log format of LevelDB, which .wandb files have behind a head of 7 bytes: blocks of 32 KiB."""
    place, whole = 0, b""
    while place + 7 <= len(data):
        rest = 32768 - (place + 7) % 32768  # the head belongs to the first block
        if rest < 7:
            place += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""
        elif kind == 0:
            return


def trackio(project: str, run_id: str) -> Steps:
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / f"{project}.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    return [(step, json.loads(metrics)) for name, step, metrics in rows if name.endswith(run_id)]
