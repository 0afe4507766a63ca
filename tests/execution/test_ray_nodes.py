"""A cluster of several machines, all of them on this one: agents on different nodes, and a node that dies."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_states import assert_identical, final_state, metric_lines, rollout_lines
from tiny_runs import run_config

from hacrl.trainer import train, training_steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: hacrl[ray]"),
]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without a core; nodes are added by the tests."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


def test_nodes_die_in_turn_and_the_run_goes_on(cluster: Any, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """A core for each agent and one on each node, so that no node holds both. A new node comes for each that dies."""
    import ray

    # The head has no core for an agent: the agents' nodes are the two others.
    nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
    cluster.wait_for_nodes()
    run = tmp_path / "run"
    whole = train(run_config(tiny_models, tmp_path / "whole", steps=4))
    config = run_config(tiny_models, run, steps=4, execution={"name": "ray", "address": cluster.address})
    for agent in config["agents"]:
        agent["resources"] = {"cpus": 1}
    loads = 0

    def phase(name: str) -> None:
        nonlocal loads
        loads += name == "load"
        if name == "load" and loads > 1:
            nodes.append(cluster.add_node(num_cpus=1))

    made = []
    for record in training_steps(config, on_phase=phase):
        made.append((record.step, record.metrics["execution/restarts"]))
        if record.step in (1, 3):
            homes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            assert {node.node_id for node in nodes} <= homes
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
    assert made == [(1, 0), (2, 1), (3, 1), (4, 2)]
    assert metric_lines(run) == metric_lines(whole)
    assert rollout_lines(run) == rollout_lines(whole)
    assert_identical(final_state(run), final_state(whole))
    assert not ray.is_initialized()
