"""A run goes on as what it was or is refused with the reason; its records are strict JSON and never mixed."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hacrl import durable_files
from hacrl import run_directory as run_directory_module
from hacrl.config import RunConfig, load_config
from hacrl.config_changes import config_yaml
from hacrl.errors import RunDirectoryError
from hacrl.run_directory import RunDirectory, saved_checkpoints
from hacrl.types import StepRecord

_OPTIONS: dict[str, Any] = {
    "agents": [
        {"name": "qwen", "model": "org/qwen", "learning_rate": 1e-6, "device": "cuda:0"},
        {"name": "llama", "model": "org/llama", "lora": {"rank": 4}},
        {"name": "teacher", "model": "org/teacher", "role": "author", "schedule": {"name": "constant"}},
    ],
    "tasks": {"train": {"dataset": "train.jsonl"}, "eval": {"dataset": "test.jsonl"}},
    "reward": "math",
    "steps": 6,
    "prompts_per_step": 2,
    "output": "runs/one",
}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    # Asking git and forcing to disk are tested in tests of their own; here they only take time.
    monkeypatch.setattr(run_directory_module, "describe_start", dict[str, Any])
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def _config(*overrides: str) -> RunConfig:
    return load_config(_OPTIONS, overrides)


def _record(step: int, **metrics: float) -> StepRecord:
    return StepRecord(
        step=step,
        steps=6,
        metrics={"loss": step / 3, **metrics},
        rollouts=({"task_id": "train/1", "text": f"answer {step}", "reward": 1.0},),
        evaluation=({"split": "eval", "agent": "qwen", "avg@k": 0.5},) if step % 2 == 0 else (),
    )


def _write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"weights")


def _run(path: Path, steps: int, *, checkpoints: bool = True, config: RunConfig | None = None) -> None:
    with RunDirectory.open(path, config or _config()) as directory:
        directory.rewind(directory.resume_from)
        done = directory.resume_from.step if directory.resume_from else 0
        for step in range(done + 1, steps + 1):
            directory.record(_record(step))
            if checkpoints:
                directory.save(step, _write, state={"at": step}, score=None)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().split(b"\n") if line]


def _steps(path: Path) -> list[int]:
    return [row["step"] for row in _rows(path)]


# ---------------------------------------------------------------- a new run


def test_a_new_folder_holds_the_resolved_configuration(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where"
    with RunDirectory.open(path, _config()) as directory:
        assert directory.resume_from is None
    assert load_config(path / "config.yaml") == _config()


def test_an_empty_folder_and_one_with_hidden_files_will_do(path: Path) -> None:
    path.mkdir()
    (path / ".DS_Store").touch()
    with RunDirectory.open(path, _config()) as directory:
        assert directory.resume_from is None


@pytest.mark.parametrize("left", [["environment.json"], [".lock"], [".tmp-config.yaml", "environment.json"]])
def test_a_start_that_was_killed_halfway_is_started_again(path: Path, left: list[str]) -> None:
    path.mkdir()
    for name in left:
        (path / name).write_text("{")
    _run(path, 1)
    assert _steps(path / "metrics.jsonl") == [1]
    assert len(json.loads((path / "environment.json").read_text())["starts"]) == 1


# Shrinking a failure takes minutes here and adds little.
_PHASES = (Phase.explicit, Phase.generate)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    text=_TEXT,
    argument=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
        max_leaves=6,
    ),
)
@settings(max_examples=30, deadline=None, phases=_PHASES)
def test_any_configuration_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, text: str, argument: Any
) -> None:
    data = _config().model_dump()
    data["agents"][0]["chat_template"] = text
    data["agents"][0]["chat_template_arguments"] = {"x": argument}
    data["agents"][1]["revision"] = "1e-6"
    config = RunConfig.model_validate(data)
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(config_yaml(config).encode())
    assert load_config(file) == config


@pytest.mark.parametrize(
    "text",
    [
        "${x}",
        r"\${x}",
        r"\\${x}",
        "{{ '${' }}",
        "???",
        "null",
        "1e-6",
        "0x1F",
        "a\\",
        "a\x85b",
        "\u2028é\x00",
        "- a: b #",
    ],
)
def test_texts_that_yaml_or_omegaconf_would_read_otherwise(tmp_path: Path, text: str) -> None:
    data = _config().model_dump()
    data["agents"][0]["chat_template"] = text
    config = RunConfig.model_validate(data)
    (tmp_path / "c.yaml").write_bytes(config_yaml(config).encode())
    assert load_config(tmp_path / "c.yaml") == config


# ---------------------------------------------------------------- folders that are refused


@pytest.mark.parametrize("name", ["rollouts/step-000001.jsonl", "metrics.jsonl", "notes.txt", "agents/qwen/model"])
def test_a_folder_with_other_files_is_refused_and_left_as_it_was(path: Path, name: str) -> None:
    """Old rollouts must never enter a new run (prime-rl 2304)."""
    (path / name).parent.mkdir(parents=True)
    (path / name).touch()
    before = sorted(path.rglob("*"))
    with pytest.raises(RunDirectoryError, match=rf"holds other files \({name.split('/')[0]}\).*choose another output"):
        RunDirectory.open(path, _config())
    assert sorted(path.rglob("*")) == before


def test_a_file_in_place_of_the_folder(path: Path) -> None:
    path.touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.open(path, _config())


def test_a_place_that_cannot_be_written(path: Path) -> None:
    path.touch()
    with pytest.raises(RunDirectoryError, match=r"cannot be used as run directory.*choose another output"):
        RunDirectory.open(path / "below", _config())


def test_never_and_must(path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run to resume"):
        RunDirectory.open(path, _config(), resume="must")
    assert not path.exists()
    RunDirectory.open(path, _config(), resume="never").close()
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        RunDirectory.open(path, _config(), resume="never")
    RunDirectory.open(path, _config(), resume="must").close()


def test_lines_of_another_run_are_refused(path: Path, tmp_path: Path) -> None:
    _run(path, 2)
    _run(tmp_path / "other", 2)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        mine = (path / name).read_bytes()
        (path / name).write_bytes((tmp_path / "other" / name).read_bytes())
        with (
            RunDirectory.open(path, _config()) as directory,
            pytest.raises(RunDirectoryError, match=rf"{name}: holds lines of run"),
        ):
            directory.rewind(directory.resume_from)
        (path / name).write_bytes(mine)


def test_checkpoints_of_another_run_are_refused(path: Path, tmp_path: Path) -> None:
    _run(path, 1)
    _run(tmp_path / "other", 3)
    (tmp_path / "other/checkpoints/step-000003").rename(path / "checkpoints/step-000003")
    with pytest.raises(RunDirectoryError, match="belongs to run"):
        RunDirectory.open(path, _config())


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"run_id": 1, "starts": []}', b'{"starts": []}'])
def test_a_missing_or_broken_environment_is_an_error(path: Path, content: bytes | None) -> None:
    _run(path, 1)
    (path / "environment.json").unlink()
    if content is not None:
        (path / "environment.json").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"environment.json: cannot be read"):
        RunDirectory.open(path, _config())


def test_a_config_that_cannot_be_read_is_an_error(path: Path) -> None:
    _run(path, 1)
    (path / "config.yaml").write_text("agents: 3\n")
    with pytest.raises(RunDirectoryError, match=r"config.yaml: cannot be compared"):
        RunDirectory.open(path, _config())


def test_checkpoints_that_are_gone_are_an_error_and_not_a_fresh_start(path: Path) -> None:
    """A missing state file that is passed over trains on other data than the curve says (verl 3457)."""
    _run(path, 3)
    for folder in (path / "checkpoints").iterdir():
        folder.rename(path.parent / folder.name)
    with pytest.raises(RunDirectoryError, match="3 steps are recorded, but checkpoints/ holds no checkpoint"):
        RunDirectory.open(path, _config())
    assert _steps(path / "metrics.jsonl") == [1, 2, 3]


def test_a_run_killed_before_its_first_checkpoint_starts_at_its_beginning(path: Path) -> None:
    _run(path, 2, checkpoints=False, config=_config("checkpoint.every=2"))
    with RunDirectory.open(path, _config("checkpoint.every=2")) as directory:
        assert directory.resume_from is None
        directory.rewind(None)
        assert not (path / "metrics.jsonl").exists()
        assert list((path / "rollouts").iterdir()) == []
        directory.record(_record(1))


# ---------------------------------------------------------------- another configuration


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("agents.0.learning_rate=5e-7", r"agents\.0\.learning_rate: was 1e-06, now 5e-07"),
        ("agents.qwen.model=org/other", r'agents\.0\.model: was "org/qwen", now "org/other"'),
        ("algorithm.alpha=3", r"algorithm\.alpha: was 1\.0, now 3\.0"),
        ("algorithm=grpo", r'algorithm\.name: was "hacpo", now "grpo"'),
        ("agents.1.lora=null", r"agents\.1\.lora\.rank: was 4, now \(not set\)"),
        ("seed=1", "seed: was 0, now 1"),
        ("group_size=4", "group_size: was 8, now 4"),
        ("sampling.engine=vllm", r'sampling\.engine: was "transformers", now "vllm"'),
        ("sampling.temperature=0.5", r"sampling\.temperature: was 1\.0, now 0\.5"),
        ("verification.time_limit_s=1", r"verification\.time_limit_s: was 10\.0, now 1\.0"),
        ("evaluation.k=2", r"evaluation\.k: was 4, now 2"),
        ("agents.0.device=cpu", r'agents\.0\.device: was "cuda:0", now "cpu"'),
        ("agents.0.chat_template_arguments={enable_thinking: false}", r"chat_template_arguments"),
        ("steps=2", "steps: was 6, now 2"),
    ],
)
def test_a_change_that_alters_results_is_refused_with_its_key(path: Path, override: str, told: str) -> None:
    _run(path, 3)
    before = (path / "config.yaml").read_bytes(), (path / "environment.json").read_bytes()
    with pytest.raises(RunDirectoryError, match=told) as caught:
        RunDirectory.open(path, _config(override))
    assert "choose another output" in str(caught.value)
    assert ((path / "config.yaml").read_bytes(), (path / "environment.json").read_bytes()) == before


def test_all_changed_keys_are_named_at_once_and_free_ones_are_not(path: Path) -> None:
    _run(path, 1)
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(path, _config("seed=1", "group_size=4", "output=elsewhere", "checkpoint.keep_last=5"))
    named = [line.split(":")[0].strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert sorted(named) == ["group_size", "seed"]


def test_another_number_of_agents_names_keys_and_does_not_crash(path: Path) -> None:
    _run(path, 1)
    fewer = load_config({**_OPTIONS, "agents": _OPTIONS["agents"][:2]})
    with pytest.raises(RunDirectoryError, match=r'agents\.2\.device: was "auto", now \(not set\)'):
        RunDirectory.open(path, fewer)
    _run(path.with_name("two"), 1, config=fewer)
    with pytest.raises(RunDirectoryError, match=r'agents\.2\.name: was \(not set\), now "teacher"'):
        RunDirectory.open(path.with_name("two"), _config())


@pytest.mark.parametrize(
    "override",
    [
        "output=runs/moved",
        "export=none",
        "checkpoint.every=5",
        "checkpoint.keep_last=7",
        "checkpoint.keep_best=false",
        "verification.workers=8",
        "sampling.vllm.python=/other/python",
        "agents.0.sampling.vllm.memory_share=0.1",
        "agents.0.device=cuda:1",
        "agents.0.micro_batch_tokens=1024",
        "agents.1.gradient_checkpointing=true",
        "steps=60",
        "steps=3",
    ],
)
def test_a_change_that_alters_no_result_goes_on_and_is_kept(path: Path, override: str) -> None:
    _run(path, 3)
    config = _config(override)
    with RunDirectory.open(path, config) as directory:
        assert directory.resume_from is not None
        assert directory.resume_from.step == 3
    assert load_config(path / "config.yaml") == config
    changed = json.loads((path / "environment.json").read_text())["starts"][-1]["changed"]
    assert list(changed) == [override.split("=")[0]]


@pytest.mark.parametrize("agent", ["qwen", "teacher"])
def test_more_steps_are_free_only_where_no_learning_rate_depends_on_them(path: Path, agent: str) -> None:
    schedule = f"agents.{agent}.schedule.name=linear"
    _run(path, 3, config=_config(schedule))
    if agent == "teacher":
        RunDirectory.open(path, _config(schedule, "steps=60")).close()
    else:
        with pytest.raises(RunDirectoryError, match="steps: was 6, now 60"):
            RunDirectory.open(path, _config(schedule, "steps=60"))


# ---------------------------------------------------------------- two at a time


_HOLD = """
import sys, time
from hacrl.durable_files import FolderLock
from pathlib import Path
lock = FolderLock(Path(sys.argv[1]))
if sys.argv[2] == "fork":
    import os
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
print("held", flush=True)
time.sleep(60)
"""


def test_two_in_one_process_are_refused_too(path: Path) -> None:
    with RunDirectory.open(path, _config()):
        with pytest.raises(RunDirectoryError, match=rf"in use by another process \(pid {os.getpid()} on "):
            RunDirectory.open(path, _config())
        assert saved_checkpoints(path).latest() is None
    RunDirectory.open(path, _config()).close()


def test_a_refused_open_gives_the_lock_back(path: Path) -> None:
    RunDirectory.open(path, _config()).close()
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match="seed"):
            RunDirectory.open(path, _config("seed=1"))
    RunDirectory.open(path, _config()).close()


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_a_killed_process_leaves_no_lock_not_even_with_forked_workers(path: Path, kind: str) -> None:
    path.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path), kind], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    worker = int(holder.stdout.readline()) if kind == "fork" else None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=rf"in use by another process \(pid {holder.pid} "):
            RunDirectory.open(path, _config())
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        RunDirectory.open(path, _config()).close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        if worker is not None:
            os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(durable_files.fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="has no locks"):
        RunDirectory.open(path, _config()).close()


# ---------------------------------------------------------------- records


def test_what_a_step_leaves(path: Path) -> None:
    before = time.time()
    with RunDirectory.open(path, _config()) as directory:
        directory.record_start([{"split": "eval", "agent": "qwen", "avg@k": 0.25}])
        directory.record(_record(1))
        directory.record(_record(2))
        run_id = directory.run_id
    metrics, evaluations = _rows(path / "metrics.jsonl"), _rows(path / "evaluations.jsonl")
    assert [row.pop("time") >= before for row in (*metrics, *evaluations)] == [True] * 4
    assert metrics == [{"run_id": run_id, "step": step, "loss": step / 3} for step in (1, 2)]
    assert evaluations == [
        {"run_id": run_id, "step": step, "split": "eval", "agent": "qwen", "avg@k": score}
        for step, score in ((0, 0.25), (2, 0.5))
    ]
    assert _rows(path / "rollouts/step-000002.jsonl") == [
        {"run_id": run_id, "step": 2, "task_id": "train/1", "text": "answer 2", "reward": 1.0}
    ]


def test_numbers_that_are_not_finite_are_null_for_strict_readers(path: Path) -> None:
    with RunDirectory.open(path, _config()) as directory:
        directory.record(
            StepRecord(
                step=1,
                steps=1,
                metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e308},
                rollouts=({"advantages": {"qwen": math.nan}, "ratios": (math.inf, 0.5)},),
                evaluation=({"avg@k": math.nan},),
            )
        )
    assert {"a": None, "b": None, "c": None, "d": 1e308}.items() <= _rows(path / "metrics.jsonl")[0].items()
    rollout = _rows(path / "rollouts/step-000001.jsonl")[0]
    assert (rollout["advantages"], rollout["ratios"]) == ({"qwen": None}, [None, 0.5])
    assert _rows(path / "evaluations.jsonl")[0]["avg@k"] is None


@given(text=st.text(st.characters(exclude_categories=[]), max_size=20))
@settings(deadline=None)
def test_any_text_is_one_line_and_comes_back(text: str) -> None:
    line = durable_files.json_lines([{"text": text}])
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    line.decode("utf-8")
    # Two lone surrogates in a row are the JSON way to write one character.
    assert json.loads(line)["text"].encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")


def test_no_row_can_claim_another_step_or_run(path: Path) -> None:
    with RunDirectory.open(path, _config()) as directory:
        directory.record(
            StepRecord(step=1, steps=1, metrics={}, rollouts=({"step": 9, "run_id": "x"},), evaluation=({"step": 9},))
        )
        run_id = directory.run_id
    assert _rows(path / "rollouts/step-000001.jsonl") == [{"run_id": run_id, "step": 1}]
    assert _steps(path / "evaluations.jsonl") == [1]


@pytest.mark.parametrize("name", ["step", "time", "run_id"])
def test_a_metric_cannot_take_a_name_of_the_line(path: Path, name: str) -> None:
    with RunDirectory.open(path, _config()) as directory, pytest.raises(ValueError, match=name):
        directory.record(StepRecord(step=1, steps=1, metrics={name: 1.0}, rollouts=()))


def test_steps_come_in_order_and_once(path: Path) -> None:
    with RunDirectory.open(path, _config()) as directory:
        with pytest.raises(ValueError, match="step 2 recorded after step 0"):
            directory.record(_record(2))
        directory.record(_record(1))
        with pytest.raises(ValueError, match="step 1 recorded after step 1"):
            directory.record(_record(1))
        with pytest.raises(ValueError, match="step 0 recorded after step 1"):
            directory.record_start([{"avg@k": 0.5}])
        with pytest.raises(ValueError, match="checkpoint of step 2, but the last recorded step is 1"):
            directory.save(2, _write, state={}, score=None)


def test_a_resumed_run_records_only_after_a_rewind(path: Path) -> None:
    _run(path, 1)
    with RunDirectory.open(path, _config()) as directory:
        with pytest.raises(ValueError, match="call rewind"):
            directory.record(_record(2))
        directory.rewind(directory.resume_from)
        directory.record(_record(2))


def test_a_value_that_is_no_json_leaves_nothing_of_the_step(path: Path) -> None:
    with RunDirectory.open(path, _config()) as directory:
        with pytest.raises(TypeError):
            directory.record(StepRecord(step=1, steps=1, metrics={"a": object()}, rollouts=({"text": "x"},)))  # type: ignore[dict-item]
        directory.record(_record(1))
    assert _steps(path / "metrics.jsonl") == [1]
    assert [row["text"] for row in _rows(path / "rollouts/step-000001.jsonl")] == ["answer 1"]


def test_a_full_disk_leaves_earlier_lines_readable_and_stops_the_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory.open(path, _config()) as directory:
        directory.record(_record(1))

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(RunDirectoryError, match=r"step 2 could not be recorded.*No space left.*make room"):
                directory.record(_record(2))
        assert _steps(path / "metrics.jsonl") == [1]
        with pytest.raises(ValueError, match="rewind"):
            directory.record(_record(2))


def test_an_append_that_fails_halfway_takes_its_part_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines"
    durable_files.append_durably(file, b"one\n")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        durable_files.append_durably(file, b"two\n")
    assert file.read_bytes() == b"one\n"


# ---------------------------------------------------------------- going on


def test_records_after_the_checkpoint_are_made_again(path: Path) -> None:
    _run(path, 2)
    _run(path, 4, checkpoints=False)
    assert _steps(path / "metrics.jsonl") == [1, 2, 3, 4]
    with RunDirectory.open(path, _config()) as directory:
        assert directory.resume_from is not None
        assert (directory.resume_from.step, directory.resume_from.state) == (2, {"at": 2})
        directory.rewind(directory.resume_from)
    assert _steps(path / "metrics.jsonl") == [1, 2]
    assert _steps(path / "evaluations.jsonl") == [2]
    assert sorted(file.name for file in (path / "rollouts").iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]


def test_a_file_cut_at_any_byte_after_the_checkpoint_is_mended(path: Path) -> None:
    _run(path, 2)
    kept = (path / "metrics.jsonl").read_bytes()
    _run(path, 4, checkpoints=False)
    whole = (path / "metrics.jsonl").read_bytes()
    with RunDirectory.open(path, _config()) as directory:
        for length in range(len(kept), len(whole) + 1):
            (path / "metrics.jsonl").write_bytes(whole[:length])
            directory.rewind(directory.resume_from)
            assert (path / "metrics.jsonl").read_bytes() == kept


def test_a_rewind_to_an_older_checkpoint_drops_the_newer_ones(path: Path) -> None:
    _run(path, 3)
    with RunDirectory.open(path, _config()) as directory:
        older = directory.checkpoints.latest()
        assert older is not None
        directory.rewind(directory.checkpoints._read(2, checksums=True))  # pyright: ignore[reportPrivateUsage]
        assert directory.checkpoints.steps() == [2]
        directory.record(_record(3))
        directory.save(3, _write, state={"at": 3, "again": True}, score=None)
    assert _steps(path / "metrics.jsonl") == [1, 2, 3]
    latest = saved_checkpoints(path).latest()
    assert latest is not None
    assert latest.state == {"at": 3, "again": True}


def test_after_damage_the_run_goes_on_from_the_one_before_and_says_so(path: Path) -> None:
    _run(path, 3)
    (path / "checkpoints/step-000003/weights.bin").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match=r"1 damaged checkpoint\(s\) skipped: step-000003"):
        _run(path, 5)
    assert _steps(path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    start = json.loads((path / "environment.json").read_text())["starts"][-1]
    assert (start["resumed_from_step"], start["recorded_steps"]) == (2, 3)


def test_an_unreadable_line_is_dropped_with_a_warning(path: Path) -> None:
    _run(path, 2)
    content = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(b"\0\0\0\n[]\n" + content)
    with pytest.warns(RuntimeWarning, match=r"metrics.jsonl: 2 unreadable line"):
        _run(path, 2)
    assert (path / "metrics.jsonl").read_bytes() == content


def test_lines_that_someone_removed_are_told(path: Path) -> None:
    _run(path, 2)
    (path / "metrics.jsonl").unlink()
    with pytest.warns(RuntimeWarning, match="ends at step 0, but the checkpoint is of step 2"):
        _run(path, 3)
    assert _steps(path / "metrics.jsonl") == [3]


def test_a_finished_run_is_opened_at_its_end_and_loses_nothing(path: Path) -> None:
    _run(path, 6)
    before = (path / "metrics.jsonl").read_bytes()
    with RunDirectory.open(path, _config()) as directory:
        assert directory.resume_from is not None
        assert directory.resume_from.step == 6
        directory.rewind(directory.resume_from)
        directory.save(6, _write, state={"at": 6}, score=None)
    assert (path / "metrics.jsonl").read_bytes() == before


def test_the_run_id_stays_and_each_start_is_noted(path: Path) -> None:
    _run(path, 1)
    first = json.loads((path / "environment.json").read_text())
    _run(path, 2)
    second = json.loads((path / "environment.json").read_text())
    assert first["run_id"] == second["run_id"]
    assert first["seed"] == 0
    assert second["starts"] == [*first["starts"], {"resumed_from_step": 1, "recorded_steps": 1, "changed": {}}]
    assert len({row["run_id"] for row in _rows(path / "metrics.jsonl")}) == 1


def test_other_files_in_a_runs_folder_stay(path: Path) -> None:
    _run(path, 1)
    (path / "train.log").write_text("x")
    (path / "agents").mkdir()
    (path / "rollouts" / "notes.jsonl").touch()
    with RunDirectory.open(path, _config()) as directory:
        directory.rewind(None)
    assert {"train.log", "agents"} <= {entry.name for entry in path.iterdir()}
    assert [entry.name for entry in (path / "rollouts").iterdir()] == ["notes.jsonl"]


def test_reading_needs_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no config.yaml here"):
        saved_checkpoints(tmp_path)
