"""What agents ask of a cluster, and the arithmetic of a refusal. Needs no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from hacrl.config import RunConfig, load_config
from hacrl.execution.placement import Demand, Node, arithmetic, demands, impossible, threads


def config(*agents: dict[str, Any], **changes: Any) -> RunConfig:
    return load_config(
        {
            "agents": [{"name": f"a{number}", "model": "m", **agent} for number, agent in enumerate(agents)],
            "tasks": {"train": {"dataset": "d"}},
            "reward": "math",
            "steps": 1,
            "prompts_per_step": 1,
            "output": "o",
            "execution": "ray",
            **changes,
        }
    )


def node(name: str = "n", *, cpus: float = 2, gpus: float = 0) -> Node:
    return Node(name=name, cpus=cpus, gpus=gpus)


def asked_gpus(run: RunConfig, *nodes: Node) -> list[float]:
    return [demand.gpus for demand in demands(run, list(nodes))]


def test_two_agents_fit_on_two_cores_without_a_word_in_the_configuration() -> None:
    asked = demands(config({}, {}), [node()])
    assert [(demand.agent, demand.cpus, demand.gpus) for demand in asked] == [("a0", 0.5, 0), ("a1", 0.5, 0)]
    assert impossible(asked, [node()]) is None


@pytest.mark.parametrize(
    ("agents", "gpus", "expected"),
    [
        ([{}, {}], [0], [0, 0]),
        ([{}, {}], [2], [1, 1]),
        ([{}, {}], [1, 1], [1, 1]),
        ([{}, {}], [1], [0.5, 0.5]),
        ([{}, {}, {}], [2], [0.5, 0.5, 0.5]),
        ([{}, {}, {}], [1], [0.3333, 0.3333, 0.3333]),
        ([{"device": "cpu"}, {}], [1], [0, 1]),
        ([{"device": "cuda:1"}, {}], [0], [1, 0]),
        ([{"resources": {"gpus": 0}}, {"resources": {"gpus": 2}}], [4], [0, 2]),
    ],
)
def test_gpus_that_are_left_out_follow_device_and_cluster(
    agents: list[dict[str, Any]], gpus: list[int], expected: list[float]
) -> None:
    assert asked_gpus(config(*agents), *(node(gpus=count) for count in gpus)) == expected


def test_an_engine_over_several_gpus_is_given_them() -> None:
    sampling = {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}
    assert asked_gpus(config({"sampling": sampling}, {}), node(gpus=4)) == [2, 1]


def test_threads_are_what_is_asked_for_then_the_environments_then_a_share_of_the_machine() -> None:
    run = config({"resources": {"cpus": 3.5}}, {"resources": {"cpus": 0.25}}, {})
    many = node(cpus=16)
    of = [threads(agent, node=many, processes_there=3, environment="4") for agent in run.agents]
    assert of == [3, 1, 4]
    assert threads(run.agents[2], node=many, processes_there=3, environment=None) == 5
    assert threads(run.agents[2], node=node(cpus=1), processes_there=3, environment=None) == 1


def test_what_no_state_of_the_cluster_holds_is_told_with_its_sums() -> None:
    of = {"kind": "worker", "rank": 0, "size": 1}
    asked = [Demand(agent="small", cpus=1, gpus=0, **of), Demand(agent="large", cpus=3, gpus=2, **of)]
    machines = [node("left", cpus=2, gpus=1), node("right", cpus=4, gpus=1)]
    assert impossible(asked, machines) == "large 3 CPUs and 2 GPUs fits on no machine"
    assert impossible(asked, [node(cpus=3, gpus=2)]) == "4 CPUs are asked for and 3 are there"
    assert impossible(asked, [node(cpus=4, gpus=2)]) is None
    assert arithmetic(asked, machines) == (
        "  agents: small 1 CPUs, large 3 CPUs and 2 GPUs; together 4 CPUs and 2 GPUs\n"
        "  machines: left 2 CPUs and 1 GPUs, right 4 CPUs and 1 GPUs"
    )
