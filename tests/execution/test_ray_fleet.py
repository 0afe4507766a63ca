"""The same runs on Ray: equal results, faults that are told, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import yaml
from run_processes import agents_of, gone, processes_where
from run_states import assert_same_run, final_state, metric_lines, rollout_lines
from scripted_agents import ScriptedAgent, no_credit, scripted_fleet
from tiny_runs import run_config, three_agents

from hacrl.config import load_config
from hacrl.errors import AgentError, AgentLostError, ClusterError, ConfigError, ModelError, RunDirectoryError
from hacrl.execution.placement import Demand
from hacrl.execution.ray_fleet import RayFleet, as_seen_by
from hacrl.preflight import prepare
from hacrl.trainer import build_algorithm, build_fleet, train, training_steps
from hacrl.types import Task

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: hacrl[ray]")


@pytest.mark.parametrize("make", [pytest.param(run_config, marks=pytest.mark.slow), three_agents])
def test_local_and_ray_give_the_same_run(cluster: Any, tiny_models: dict[str, Path], tmp_path: Path, make: Any) -> None:
    local = train(make(tiny_models, tmp_path / "local"))
    ray = train(make(tiny_models, tmp_path / "ray", execution="ray"))
    assert_same_run(local, ray)
    for folder in (local / "agents").iterdir():
        weights = (folder / "model.safetensors").read_bytes()
        assert weights == (ray / "agents" / folder.name / "model.safetensors").read_bytes()
    for line in map(json.loads, (ray / "metrics.jsonl").read_text().splitlines()):
        for agent in (ray / "processes").iterdir():
            own = [line.get(f"agent/{agent.stem}/time/{name}", 0.0) for name in ("sample", "update", "evaluate")]
            assert min(own[:2]) > 0
            assert 0 < line[f"agent/{agent.stem}/time/wait"] < line["time/total"]
    # The cluster is as it was: nothing is reserved any more.
    assert gone(lambda: [] if cluster.available_resources()["CPU"] == 2 else [0])


@pytest.mark.slow
@pytest.mark.parametrize("samplers", [None, 0, 2])
def test_rollouts_sampled_ahead_are_the_same_on_ray(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path, samplers: int | None
) -> None:
    """By a sampler of its own, by the workers, or by two samplers that share the prompts."""
    local = train(run_config(tiny_models, tmp_path / "local", steps=4, max_staleness=1))
    config = run_config(tiny_models, tmp_path / "ray", steps=4, max_staleness=1, execution="ray")
    for agent in config["agents"]:
        agent["resources"] = {"cpus": 0.25, "samplers": samplers}
    ray = train(config)
    count = 1 if samplers is None else samplers
    assert {path.stem for path in (ray / "processes").iterdir()} == {
        name + end for name in ("qwen", "llama") for end in ("", *(f".sampler-{number}" for number in range(count)))
    }
    if count < 2:
        assert_same_run(local, ray)
    else:  # other batches, so other rounding
        assert_alike(local, ray)


def assert_alike(left: Path, right: Path, *, but: frozenset[str] = frozenset()) -> None:
    """The same answers, and the same figures within rounding."""
    for one, two in zip(metric_lines(left), metric_lines(right), strict=True):
        assert {name: one[name] for name in one.keys() - but} == pytest.approx(
            {name: two[name] for name in two.keys() - but}, rel=1e-3, abs=1e-5
        )
    assert [row["text"] for row in rollout_lines(left)] == [row["text"] for row in rollout_lines(right)]


@pytest.mark.slow
def test_samplers_go_on_with_the_weights_of_the_checkpoint(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """They load the models of the beginning, and are given what the workers have loaded before the first rollout."""
    whole = train(run_config(tiny_models, tmp_path / "whole"))
    config = run_config(tiny_models, tmp_path / "left", execution="ray")
    for agent in config["agents"]:
        agent["resources"] = {"cpus": 0.25, "samplers": 1}
    steps = training_steps(config)
    assert next(steps).step == 1
    steps.close()
    train(config)
    assert_same_run(whole, tmp_path / "left")


@pytest.mark.slow
def test_two_workers_of_an_agent_do_what_one_does(cluster: Any, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The same answers and, within rounding, the same gradients step by step; a checkpoint of two goes on as one."""
    local = train(run_config(tiny_models, tmp_path / "local", steps=4))
    config = run_config(tiny_models, tmp_path / "ray", steps=4, execution="ray")
    config["agents"][0]["resources"] = {"workers": 2, "cpus": 0.25}
    steps = training_steps(config)
    next(steps)
    next(steps)
    steps.close()
    assert (tmp_path / "ray/checkpoints/step-000002/agents/qwen/shards").is_dir()
    config["agents"][0]["resources"] = {}
    train(config)
    # Two workers pad their own halves.
    assert_alike(local, tmp_path / "ray", but=frozenset({"agent/qwen/padding_share"}))


@pytest.mark.parametrize(
    ("first", "second"),
    [("local", "ray"), *(pytest.param("ray", second, marks=pytest.mark.slow) for second in ("local", "ray"))],
)
def test_a_run_goes_on_under_another_execution(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path, first: str, second: str
) -> None:
    whole = train(run_config(tiny_models, tmp_path / "whole"))
    steps = training_steps(run_config(tiny_models, tmp_path / "left", execution=first))
    assert next(steps).step == 1
    steps.close()
    again = run_config(tiny_models, tmp_path / "left", execution=second)
    for agent in again["agents"]:
        agent["resources"] = {"cpus": 0.25}
    assert [record.step for record in training_steps(again)] == [2, 3]
    assert_same_run(whole, tmp_path / "left")


@pytest.mark.slow
def test_this_process_loads_no_model(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("a model"))
    train(run_config(tiny_models, tmp_path / "run", steps=1, execution="ray"))


def test_agents_that_the_cluster_can_never_hold_are_refused_with_the_sums(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = run_config(tiny_models, tmp_path / "run", execution={"name": "ray", "wait_s": 0})
    for agent in config["agents"]:
        agent["resources"] = {"cpus": 1.5}
    with pytest.raises(ClusterError) as caught:
        next(training_steps(config))
    assert "3 CPUs are asked for and 2 are there" in str(caught.value)
    assert "qwen 1.5 CPUs, llama 1.5 CPUs" in str(caught.value)


def test_resources_that_others_hold_are_waited_for_and_not_for_ever(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    class Holder:
        def ready(self) -> None: ...

    holder = cluster.remote(Holder).options(num_cpus=1.5).remote()
    cluster.get(holder.ready.remote())
    config = run_config(tiny_models, tmp_path / "run", execution={"name": "ray", "wait_s": 0.1})
    with pytest.raises(ClusterError, match=r"after 0.1 s .* 0.5 CPUs and 0 GPUs are free"):
        next(training_steps(config))
    cluster.kill(holder)


def test_an_error_of_hacrl_keeps_its_type_and_text(cluster: Any, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    texts = []
    for execution in ("local", "ray"):
        config = run_config(tiny_models, tmp_path / execution, execution=execution)
        config["agents"][1]["lora"] = {"rank": 2, "target_modules": ["no_such_layer"]}
        with pytest.raises(ModelError) as caught:
            next(training_steps(config))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "no_such_layer" in texts[0]


# ---------------------------------------------------------------- calls, by agents that only follow a script


@pytest.fixture
def scripted(
    by_value: None, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RayFleet]:
    fleet = scripted_fleet(tiny_models, tmp_path, monkeypatch, ScriptedAgent)
    yield fleet
    fleet.close()


def test_all_agents_are_at_work_at_the_same_time(scripted: RayFleet) -> None:
    parts: list[Any] = []
    with pytest.warns(UserWarning, match="^agent (qwen|llama): take care$"):
        scripted.sample([Task(id="t", prompt="1 + 1?", columns={"answer": "2"})], step=1, deliver=parts.append).wait()
    assert sorted(parts) == [["llama on t"], ["qwen on t"]]
    lap = scripted.lap()
    assert all(own.keys() == {"sample", "wait"} and own["wait"] > 0 for own in lap.seconds.values())
    assert {(span.agent, span.process, span.phase) for span in lap.spans} >= {
        ("qwen", "qwen", "sample"),
        ("llama", "llama", "sample"),
    }
    assert {name: set(own) for name, own in scripted.lap().seconds.items()} == {"qwen": {"wait"}, "llama": {"wait"}}


def test_a_failure_is_told_while_others_are_still_at_work(scripted: RayFleet) -> None:
    begin = time.monotonic()
    with pytest.raises(AgentError, match=r"(?s)^agent llama \(process .* failed in the phase 'update'.*a bug"):
        scripted.update([], no_credit(), step=1).wait()
    scripted.close()
    assert time.monotonic() - begin < 30


def test_a_process_that_does_not_begin_is_not_waited_for_for_ever(scripted: RayFleet, cluster: Any) -> None:
    arguments = {"kind": "worker", "rank": 0, "size": 1, "folder": ".", "log": "log", "threads": 1}
    too_large = (
        cluster.remote(concurrency_groups={"aside": 1})(ScriptedAgent).options(num_cpus=3).remote("qwen", **arguments)
    )
    process = scripted._agents["qwen"].workers[0]
    process.remote = too_large
    with pytest.raises(AgentLostError, match=r"^agent qwen: nothing heard for 0 s in the phase 'start'$"):
        scripted._learn_where([process], within_s=0)


def test_files_that_are_not_seen_here_are_told(scripted: RayFleet, tmp_path: Path) -> None:
    (tmp_path / "folder/qwen").mkdir(parents=True)
    (tmp_path / "folder/qwen/agent.json").touch()
    with pytest.raises(RunDirectoryError, match=r"folder/llama: agent llama \(process .* a file system that all share"):
        scripted._check_shared(tmp_path / "folder", ["qwen", "llama"], "agent.json")


def test_an_agent_sees_its_own_gpus_counted_from_0(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run", execution="ray")
    config["agents"][1]["device"] = "cuda:1"
    run = load_config(config)
    of = {"kind": "worker", "rank": 0, "size": 1, "cpus": 1}
    on_gpu = as_seen_by(run, Demand(agent="llama", gpus=0.5, **of))
    assert [agent.device for agent in on_gpu.agents] == ["auto", "cuda"]
    assert as_seen_by(run, Demand(agent="qwen", gpus=1, **of)).agents[0].device == "cuda"
    assert as_seen_by(run, Demand(agent="qwen", gpus=0, **of)).agents[0].device == "cpu"


def test_missing_ray_is_told_before_anything_starts(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(ConfigError, match=r"execution: ray is not installed; pip install 'hacrl\[ray\]'"):
        next(training_steps(run_config(tiny_models, tmp_path / "run", execution="ray")))
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- faults


def test_an_agent_that_dies_ends_the_run_at_once_and_by_name(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steps = training_steps(run_config(tiny_models, run, execution={"name": "ray", "restarts": 0}))
    next(steps)
    agents = agents_of(psutil.Process(), run)
    assert agents.keys() == {"qwen", "llama"}
    with (run / "processes/llama.log").open("a") as log:
        log.write("last words\n")
    os.kill(agents["llama"], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(AgentLostError) as caught:
        next(steps)
    assert time.monotonic() - begin < 20
    text = str(caught.value)
    assert f"agent llama (process {agents['llama']} on " in text
    assert "its process died or cannot be reached, in the phase 'sample'" in text
    assert text.endswith("  last words")
    assert agents_of(psutil.Process(), run) == {}
    # What was recorded is kept, and the run goes on from there.
    assert [line["step"] for line in metric_lines(run)] == [1]
    assert [record.step for record in training_steps(run_config(tiny_models, run))] == [2, 3]


def test_agents_that_die_are_started_anew_and_the_run_is_the_same(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"steps": 4, "checkpoint": {"every": 2}, "trackers": "tensorboard"}
    whole = train(run_config(tiny_models, tmp_path / "whole", **changes))
    run = tmp_path / "run"

    def disturbed() -> Iterator[tuple[int, float]]:
        kills = {1: "qwen", 3: "llama"}  # before the first checkpoint, and between two
        for record in training_steps(run_config(tiny_models, run, execution="ray", **changes)):
            yield record.step, record.metrics["execution/restarts"]
            if victim := kills.pop(record.step, None):
                os.kill(agents_of(psutil.Process(), run)[victim], signal.SIGKILL)

    with pytest.warns(UserWarning, match=r"restart \d of 2 \(execution.restarts\)"):
        made = list(disturbed())
    assert made == [(1, 0), (1, 1), (2, 1), (3, 1), (3, 2), (4, 2)]
    assert_same_run(whole, run)
    assert len(json.loads((run / "environment.json").read_text())["starts"]) == 3


@pytest.mark.slow
def test_agents_killed_at_random_moments_change_nothing(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """kill -9 of either agent while it loads, samples, waits, updates or saves."""
    changes: dict[str, Any] = {"steps": 60, "evaluation": {"every": 20, "k": 1}}
    whole = train(run_config(tiny_models, tmp_path / "whole", **changes))
    run, moment, killed, over = tmp_path / "run", Random(5), [], threading.Event()

    def recorded() -> int:
        return (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0

    def kill() -> None:
        while len(killed) < 6 and not over.is_set():
            # Some die while they load, most within the steps that follow.
            before, in_steps = recorded(), moment.random() < 0.8
            while in_steps and recorded() == before and not over.is_set():
                over.wait(0.02)
            over.wait(moment.uniform(0.0, 0.5))
            if agents := agents_of(psutil.Process(), run):
                name = moment.choice(sorted(agents))
                os.kill(agents[name], signal.SIGKILL)
                killed.append(agents[name])

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.warns(UserWarning, match="restart 1 of 20"):
            restarts = [
                record.metrics["execution/restarts"]
                for record in training_steps(
                    run_config(tiny_models, run, execution={"name": "ray", "restarts": 20}, **changes)
                )
            ][-1]
    finally:
        over.set()
        killer.join()
    assert len(killed) == 6
    assert 1 <= restarts <= 6  # two agents may be killed at once
    assert_same_run(whole, run)


def test_any_other_error_of_an_agent_comes_with_its_traceback(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    local = train(run_config(tiny_models, tmp_path / "local", steps=1))
    saved = local / "checkpoints/step-000001/agents"
    (saved / "qwen/learner.pt").write_bytes(b"no state")
    config = load_config(run_config(tiny_models, tmp_path / "run", execution="ray"))
    fleet = build_fleet(config, prepare(config), build_algorithm(config), tmp_path / "run")
    try:
        with pytest.raises(AgentError) as caught:
            fleet.load(saved)
    finally:
        fleet.close()
    assert "agent qwen" in str(caught.value)
    assert 'hosted_agent.py", line' in str(caught.value)
    assert 'agent_state.py", line' in str(caught.value)


def engines_of(run: Path) -> list[int]:
    return processes_where(
        lambda process: (
            any(part.endswith("fake_engine.py") for part in process.cmdline())
            and Path(os.readlink(f"/proc/{process.pid}/fd/1")).is_relative_to(run)
        )
    )


@pytest.mark.slow
def test_an_agents_engine_lives_and_dies_with_its_process(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """A stand-in for vLLM, whose wrong probabilities give rise to warnings; these are told here, by agent."""
    interpreter = tmp_path / "python"
    fake = Path(__file__).parents[1] / "fake_engine.py"
    interpreter.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nshift\nexec {sys.executable} {fake} "$@"\n')
    interpreter.chmod(0o755)

    def config(name: str, execution: Any) -> dict[str, Any]:
        config = run_config(tiny_models, tmp_path / name, steps=2, execution=execution)
        config["sampling"] |= {"engine": "vllm", "vllm": {"python": str(interpreter), "on_mismatch": "warn"}}
        return config

    with pytest.warns(UserWarning, match="^agent qwen: vLLM's log-probabilities are"):
        local = train(config("local", "local"))
    with pytest.warns(UserWarning, match="^agent llama: vLLM's log-probabilities are"):
        ray = train(config("ray", "ray"))
    assert_same_run(local, ray)
    assert engines_of(ray) == []
    killed = tmp_path / "killed"
    steps = training_steps(config("killed", {"name": "ray", "restarts": 0}))
    with pytest.warns(UserWarning, match="log-probabilities"):
        next(steps)
    assert len(engines_of(killed)) == 2
    os.kill(agents_of(psutil.Process(), killed)["qwen"], signal.SIGKILL)
    with pytest.raises(AgentLostError):
        next(steps)
    assert gone(lambda: engines_of(killed))


def marked(mark: str) -> list[int]:
    """A run's own process and all that it has started, by a mark in their environment."""
    return processes_where(lambda process: process.environ().get("HACRL_TEST_MARK") == mark)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_from_outside_leaves_no_process(
    tiny_models: dict[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C reaches the whole group of processes, SIGTERM and SIGKILL the run's own alone."""
    run, mark = tmp_path / "run", str(tmp_path)
    config = run_config(tiny_models, run, steps=100_000, execution="ray", checkpoint={"every": 100_000})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    program = [sys.executable, "-c", "from hacrl.cli import main; main()", "train", str(tmp_path / "run.yaml")]
    process = subprocess.Popen(
        program,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HACRL_TEST_MARK": mark},
    )
    try:
        for _ in range(1200):
            if (run / "metrics.jsonl").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        assert process.poll() is None
        assert len(agents_of(psutil.Process(process.pid), run)) == 2
        assert len(marked(mark)) > 3  # those of Ray are found as well
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        assert process.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
    assert gone(lambda: marked(mark))
    if number != signal.SIGKILL:
        steps = len(metric_lines(run))
        assert final_state(run)["step"] == f"step-{steps:06d}"
