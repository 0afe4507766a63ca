"""The same runs on Ray: equal results, faults that are told, and nothing left behind. One small cluster for all."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_states import assert_identical, final_state, metric_lines, rollout_lines
from tiny_runs import run_config, three_agents

from hacrl.errors import ClusterError, ModelError
from hacrl.trainer import train, training_steps

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: hacrl[ray]")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray with two cores in this process; runs use it and leave it as it is."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("run_id", "time")} for line in lines]


def assert_same_run(left: Path, right: Path) -> None:
    assert metric_lines(left) == metric_lines(right)
    assert rollout_lines(left) == rollout_lines(right)
    assert evaluations(left) == evaluations(right)
    assert_identical(final_state(left), final_state(right))


@pytest.mark.parametrize("make", [run_config, three_agents])
def test_local_and_ray_give_the_same_run(cluster: Any, tiny_models: dict[str, Path], tmp_path: Path, make: Any) -> None:
    local = train(make(tiny_models, tmp_path / "local"))
    ray = train(make(tiny_models, tmp_path / "ray", execution="ray"))
    assert_same_run(local, ray)
    for folder in (local / "agents").iterdir():
        weights = (folder / "model.safetensors").read_bytes()
        assert weights == (ray / "agents" / folder.name / "model.safetensors").read_bytes()
    # The cluster is as it was: nothing is reserved any more.
    assert cluster.available_resources()["CPU"] == 2


@pytest.mark.parametrize(("first", "second"), [("local", "ray"), ("ray", "local"), ("ray", "ray")])
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


def test_this_process_loads_no_model(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("a model"))
    train(run_config(tiny_models, tmp_path / "run", steps=1, execution="ray"))


def test_agents_that_the_cluster_can_never_hold_are_refused_with_the_sums(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = run_config(tiny_models, tmp_path / "run", execution="ray")
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
