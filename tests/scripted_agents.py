"""Agents without a model, which do what a test wants, and a fleet of them on Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import run_config

from hacrl.algorithms.algorithm import Credit
from hacrl.config import RayConfig, RunConfig, load_config
from hacrl.execution.hosted_agent import Answer, HostedAgent
from hacrl.execution.ray_fleet import RayFleet
from hacrl.trainer import build_algorithm
from hacrl.types import Task


class ScriptedAgent(HostedAgent):
    """Answers without a model. At `sample` it waits until every agent has been asked; `update` is good or bad."""

    def start(self, run: RunConfig, *_: Any) -> Answer:
        self.names = [agent.name for agent in run.agents]
        return self._answered(f"fingerprint of {self.name}", time.time(), ())

    def sample(self, tasks: Sequence[Task], step: int) -> Iterator[Any]:
        begin = time.time()
        Path(f"{self.name}-asked").touch()
        while not all(Path(f"{name}-asked").exists() for name in self.names):
            assert time.time() - begin < 30, "the other agent is not asked before this one has answered"
            time.sleep(0.01)
        assert all(not task.columns for task in tasks)
        for task in tasks:
            yield [f"{self.name} on {task.id}"]
        yield self._answered(None, begin, ("take care",))

    def update(self, *_: Any) -> Answer:
        if self.name == "llama":
            raise ZeroDivisionError("a bug")
        time.sleep(60)
        raise AssertionError


def scripted_fleet(
    tiny_models: dict[str, Path],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: type,
    *,
    restarted: bool = False,
    workers: int = 1,
    **settings: Any,
) -> RayFleet:
    """Agents of the class `agent`, with these settings of `execution`; each has so many workers."""
    monkeypatch.setattr("hacrl.execution.ray_fleet.HostedAgent", agent)
    monkeypatch.chdir(folder)
    options = run_config(tiny_models, folder / "run", execution={"name": "ray", **settings})
    for agent_options in options["agents"]:
        agent_options["resources"] = {"workers": workers}
    config = load_config(options)
    assert isinstance(config.execution, RayConfig)
    return RayFleet(
        config,
        config.execution,
        build_algorithm(config),
        dump_directory=folder,
        log_directory=folder / "processes",
        restarted=restarted,
    )


def no_credit() -> Credit:
    return Credit(
        advantages_LPAG=torch.zeros(2, 1, 2, 1),
        ratio_LA=torch.ones(2, 2),
        baselines_LP=torch.zeros(2, 1),
        fell_back_LP=torch.zeros(2, 1, dtype=torch.bool),
    )
