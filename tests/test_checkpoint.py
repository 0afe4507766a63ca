"""A checkpoint is whole or not there, and no failure costs an older one."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hacrl import checkpoint as checkpoint_module
from hacrl.checkpoint import Checkpoint, CheckpointStore
from hacrl.errors import RunDirectoryError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", run_id="run-1")


def _write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"weights" * 100)
    (folder / "agents" / "qwen").mkdir(parents=True)
    (folder / "agents" / "qwen" / "optimizer.bin").write_bytes(b"moments")


def _save(
    store: CheckpointStore,
    step: int,
    *,
    score: float | None = None,
    keep_last: int = 2,
    keep_best: bool = True,
    write: Callable[[Path], None] = _write,
    state: dict[str, Any] | None = None,
) -> Checkpoint:
    return store.save(step, write, state=state or {"at": step}, score=score, keep_last=keep_last, keep_best=keep_best)


def _latest(store: CheckpointStore) -> Checkpoint:
    checkpoint = store.latest()
    assert checkpoint is not None
    return checkpoint


# ---------------------------------------------------------------- what comes back


def test_nothing_saved_is_none_and_no_error(store: CheckpointStore) -> None:
    assert store.latest() is None
    assert store.best() is None
    store.path.mkdir()
    assert store.latest() is None


def test_files_and_state_come_back_bit_for_bit(store: CheckpointStore) -> None:
    state = {"window": [[0.1, 1 / 3, 5e-324, math.inf], [-0.0]], "order": 2**70, "text": "ü\u2028\ud800", "none": None}
    returned = _save(store, 7, state=state, score=0.25)
    loaded = _latest(store)
    assert loaded == returned
    assert (loaded.step, loaded.score, loaded.run_id, loaded.path.name) == (7, 0.25, "run-1", "step-000007")
    assert repr(loaded.state) == repr(state)
    assert (loaded.path / "weights.bin").read_bytes() == b"weights" * 100
    assert (loaded.path / "agents/qwen/optimizer.bin").read_bytes() == b"moments"


def test_a_state_that_json_would_change_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match=r"state\.window\.0: key 3 is int"):
        _save(store, 1, state={"window": [{3: 0.5}]})
    assert store.latest() is None


def test_newest_is_by_number_also_beyond_six_digits(store: CheckpointStore) -> None:
    for step in (999_999, 1_000_000):
        _save(store, step)
    assert _latest(store).step == 1_000_000


def test_manifest_lists_every_file_with_its_sha256(store: CheckpointStore) -> None:
    folder = _save(store, 1).path
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["agents/qwen/optimizer.bin", "state.json", "weights.bin"]
    assert manifest["files"]["agents/qwen/optimizer.bin"] == {
        "bytes": 7,
        "sha256": "690a8d18f75dfaa79dd8134ac62cdad42fffe0f34cb78dd14e2d3aae3ae83ad3",
    }
    assert (manifest["step"], manifest["run_id"], manifest["score"]) == (1, "run-1", None)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_names_of_its_own_are_refused_to_write(store: CheckpointStore, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        _save(store, 1, write=lambda folder: (folder / name).touch())
    assert list(store.path.iterdir()) == []


def test_a_link_is_refused_for_its_target_is_not_saved(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="link"):
        _save(store, 1, write=lambda folder: (folder / "weights").symlink_to(tmp_path))


def test_saving_the_same_step_again_keeps_what_is_there(store: CheckpointStore) -> None:
    first = _save(store, 3, state={"a": 1})
    assert _save(store, 3, state={"a": 2}) == first


# ---------------------------------------------------------------- what is kept


def test_the_last_ones_and_the_best_one_are_kept(store: CheckpointStore) -> None:
    for step, score in enumerate([0.1, 0.9, 0.3, None, math.nan, 0.2], 1):
        _save(store, step, score=score)
    assert store.steps() == [2, 5, 6]
    best = store.best()
    assert best is not None
    assert (best.step, best.score) == (2, 0.9)


def test_without_keep_best_only_the_last_ones_stay(store: CheckpointStore) -> None:
    for step, score in enumerate([0.9, 0.1, 0.2], 1):
        _save(store, step, score=score, keep_last=1, keep_best=False)
    assert store.steps() == [3]


def test_of_equal_scores_the_later_one_is_best(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        _save(store, step, score=0.5 if step < 3 else 0.4, keep_last=3)
    best = store.best()
    assert best is not None
    assert best.step == 2


def test_an_old_one_that_cannot_be_deleted_does_not_stop_the_run(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(store, 1, keep_last=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(store, "_discard", refuse)
    with pytest.warns(RuntimeWarning, match="step-000001 could not be removed"):
        assert _save(store, 2, keep_last=1).step == 2


# ---------------------------------------------------------------- failures while saving


def test_the_only_good_one_is_there_until_the_new_one_is(store: CheckpointStore) -> None:
    """Keep-1 must not delete before the new one stands (verl 4873)."""
    _save(store, 1, keep_last=1, keep_best=False)

    def fail(folder: Path) -> None:
        (folder / "half.bin").write_bytes(b"x")
        assert store.steps() == [1]
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        _save(store, 2, keep_last=1, keep_best=False, write=fail)
    assert [entry.name for entry in store.path.iterdir()] == ["step-000001"]
    assert _latest(store).state == {"at": 1}


def test_a_full_disk_is_told_with_what_is_untouched(store: CheckpointStore) -> None:
    _save(store, 1)

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunDirectoryError, match=r"No space left.*step-000001.*untouched.*make room"):
        _save(store, 2, write=full)
    assert [entry.name for entry in store.path.iterdir()] == ["step-000001"]


def _failing_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Let the number-th of all calls that change or force files fail as on a full disk; tells the calls made."""
    made = 0

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == number:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments, **options)

        return call

    for name in ("replace", "mkdir", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    monkeypatch.setattr(os, "fsync", wrap(lambda _: None))
    monkeypatch.setattr(Path, "write_text", wrap(Path.write_text))
    monkeypatch.setattr(Path, "write_bytes", wrap(Path.write_bytes))
    return lambda: made


def test_whichever_call_fails_the_older_or_the_newer_one_is_complete(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(store, 1)
    failed = 0
    for number in range(1, 200):
        newest = _latest(store).step
        with monkeypatch.context() as patch:
            made = _failing_at(patch, number)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _save(store, newest + 1, keep_last=1, keep_best=False)
            except RunDirectoryError:
                failed += 1
            calls = made()
        after = _latest(store)
        assert after.step in (newest, newest + 1)
        assert after.state == {"at": after.step}
        if calls < number:
            break
    else:
        pytest.fail("more calls than tried")
    assert failed > 10
    store.remove_leftovers()
    assert all(entry.name.startswith("step-") for entry in store.path.iterdir())


def test_all_is_on_disk_before_it_becomes_visible(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsync a rename can survive a power cut that the files behind it do not."""
    events: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append(("replace", str(source)))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    final = _save(store, 1).path
    visible, temporary = next((place, path) for place, (kind, path) in enumerate(events) if kind == "replace")
    assert Path(temporary).parent == store.path
    assert Path(temporary).name.startswith(".tmp-step-000001-")
    forced = {path for kind, path in events[:visible] if kind == "fsync"}
    contents = {temporary + str(entry).removeprefix(str(final)) for entry in [final, *final.rglob("*")]}
    assert contents <= forced
    assert ("fsync", str(store.path)) in events[visible:]


def test_the_new_one_is_checked_before_old_ones_go(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(store, 1, keep_last=1)
    real_replace = os.replace

    def losing(source: Path, target: Path) -> None:
        real_replace(source, target)
        if target.name == "step-000002":
            (target / "weights.bin").write_bytes(b"short")

    monkeypatch.setattr(os, "replace", losing)
    with pytest.raises(RunDirectoryError, match=r"damaged right after.*weights.bin has 5 of 700 bytes"):
        _save(store, 2, keep_last=1)
    assert store.steps() == [1]


# ---------------------------------------------------------------- damage found later


def _damage_cut(folder: Path) -> None:
    with open(folder / "weights.bin", "r+b") as file:
        file.truncate(10)


def _damage_flip(folder: Path) -> None:
    with open(folder / "weights.bin", "r+b") as file:
        file.write(b"W")


def _damage_remove(folder: Path) -> None:
    (folder / "agents/qwen/optimizer.bin").unlink()


def _damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _damage_manifest_cut(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _damage_manifest_fields(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"step": 2}')


def _damage_manifest_kind(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def _damage_state_unlisted(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _damage_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _damage_other_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-000001"), folder)


_DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_damage_cut, "weights.bin has 10 of 700 bytes"),
    (_damage_flip, "weights.bin does not match its checksum"),
    (_damage_remove, "agents/qwen/optimizer.bin is missing"),
    (_damage_manifest, "manifest.json is missing"),
    (_damage_manifest_cut, "manifest.json is not JSON"),
    (_damage_manifest_fields, "manifest.json is incomplete"),
    (_damage_manifest_kind, "manifest.json holds no mapping"),
    (_damage_state_unlisted, "does not list state.json"),
    (_damage_empty, "manifest.json is missing"),
    (_damage_other_step, "manifest.json is that of step 1"),
]


@pytest.mark.parametrize(("damage", "reason"), _DAMAGES)
def test_a_damaged_one_is_skipped_and_named(
    store: CheckpointStore, damage: Callable[[Path], None], reason: str
) -> None:
    _save(store, 1)
    damage(_save(store, 2).path)
    with pytest.warns(RuntimeWarning, match=rf"1 damaged.*step-000002.*{reason}.*step 1 is the newest") as caught:
        assert _latest(store).step == 1
    assert len(caught) == 1


@pytest.mark.parametrize(("damage", "reason"), _DAMAGES[:-1])
def test_only_damaged_ones_are_an_error_and_not_a_fresh_start(
    store: CheckpointStore, damage: Callable[[Path], None], reason: str
) -> None:
    damage(_save(store, 2).path)
    with pytest.raises(RunDirectoryError, match=rf"all 1 checkpoints are damaged: step-000002.*{reason}.*restore"):
        store.latest()


def test_a_damaged_best_one_is_passed_over(store: CheckpointStore) -> None:
    for step, score in ((1, 0.2), (2, 0.8), (3, 0.5)):
        _save(store, step, score=score, keep_last=3)
    _damage_flip(store.path / "step-000002")
    with pytest.warns(RuntimeWarning, match="step-000002"):
        best = store.best()
    assert best is not None
    assert best.step == 3


def test_a_damaged_one_neither_counts_nor_stays_when_newer_ones_stand(store: CheckpointStore) -> None:
    _save(store, 1)
    _damage_cut(_save(store, 2).path)
    _save(store, 3)
    assert store.steps() == [1, 3]
    _save(store, 4)
    assert sorted(entry.name for entry in store.path.iterdir()) == ["step-000003", "step-000004"]


def test_a_damaged_one_of_the_same_step_makes_room(store: CheckpointStore) -> None:
    _damage_cut(_save(store, 1).path)
    assert _save(store, 1, state={"again": True}).state == {"again": True}
    assert _latest(store).state == {"again": True}


def test_one_of_another_run_is_refused_not_skipped(store: CheckpointStore) -> None:
    _save(store, 1)
    other = CheckpointStore(store.path, run_id="run-2")
    with pytest.raises(RunDirectoryError, match="belongs to run run-1, the folder to run run-2"):
        other.latest()


def test_a_disk_that_refuses_to_read_is_no_damage(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on from an older checkpoint would throw good steps away."""
    _save(store, 1)
    _save(store, 2)

    def refuse(_: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_module, "_sha256", refuse)
    with pytest.raises(RunDirectoryError, match=r"cannot be read.*Input/output error"):
        store.latest()


def test_leftovers_are_no_checkpoints_and_are_removed(store: CheckpointStore) -> None:
    _save(store, 1)
    for name in (".tmp-step-000002", ".old-step-000000"):
        (store.path / name).mkdir()
        (store.path / name / "weights.bin").touch()
    (store.path / "notes").mkdir()
    assert _latest(store).step == 1
    store.remove_leftovers()
    assert sorted(entry.name for entry in store.path.iterdir()) == ["notes", "step-000001"]


def test_later_ones_are_removed_newest_first(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3, 4):
        _save(store, step, keep_last=9)
    _damage_cut(store.path / "step-000004")
    removed: list[str] = []
    real_replace = os.replace

    def replace(source: Path, target: Path) -> None:
        removed.append(source.name)
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    store.remove_after(2)
    assert removed == ["step-000004", "step-000003"]
    assert store.steps() == [1, 2]
