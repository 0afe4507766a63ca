"""docs/metrics.md names every metric that real runs write, and no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_runs import many_letters, run_config

from hacrl.config import AgentConfig, RayConfig, VllmConfig, load_config
from hacrl.execution.ray_fleet import RayFleet, _Call, _Request
from hacrl.execution.timeline import Timeline
from hacrl.policy import load_policies
from hacrl.process import memory_metrics
from hacrl.sampling.sampler import SampledTokens
from hacrl.sampling.vllm_sampler import VllmSampler
from hacrl.step_metrics import execution_metrics
from hacrl.trainer import training_steps

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
HERE = Path(__file__)


def with_answers(completions: list[str], **columns: Any) -> list[float]:
    return many_letters(completions, **columns)


def first_letters(completions: list[str], **_: Any) -> list[str | None]:
    return [text[:1] or None for text in completions]


with_answers.answers = first_letters  # type: ignore[attr-defined]


def always(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def documented() -> set[str]:
    names: set[str] = set()
    prefix = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            prefix = ""
        if found := re.match(r"Names start with `([^`]+)`", line):
            prefix = found[1]
        if found := re.match(r"\| `([^`]+)` \|", line):
            assert prefix + found[1] not in names, f"{prefix + found[1]} is explained twice"
            names.add(prefix + found[1])
    return names


def generic(name: str) -> str:
    """A metric's name with the configuration's names replaced by what stands for them on the page."""
    name = re.sub(r"^agent/[^/]+/", "agent/<agent>/", name)
    name = re.sub(r"^trackers/[^/]+/", "trackers/<tracker>/", name)
    name = re.sub(r"^pair/[^/]+/[^/]+/", "pair/<learner>/<author>/", name)
    name = re.sub(r"^memory/cuda:\d+/", "memory/<device>/", name)
    return re.sub(r"reward/function/[^/]+", "reward/function/<function>", name)


@pytest.fixture(scope="module")
def emitted(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names from short runs that together reach every branch: HACPO with KL, GRPO, and nothing to learn."""
    folder = tmp_path_factory.mktemp("runs")
    hacpo = run_config(tiny_models, folder / "hacpo", steps=2, reward=f"{HERE}:with_answers")
    for agent in hacpo["agents"]:
        agent |= {"kl_coefficient": 0.01, "sampler_correction": 2.0}
    grpo = run_config(tiny_models, folder / "grpo", steps=1, algorithm="grpo", max_staleness=1)
    solved = run_config(tiny_models, folder / "solved", steps=1, reward=f"{HERE}:always", trackers="tensorboard")
    return (
        {
            generic(name)
            for config in (hacpo, grpo, solved)
            for record in training_steps({**config, "export": "none"})
            for name in record.metrics
        }
        | engine_metrics(tiny_models["qwen"])
        | gpu_memory_metrics()
        | faults_on_ray(tiny_models)
    )


def engine_metrics(model: Path) -> set[str]:
    """What only an engine writes, without starting one."""
    policy = load_policies([AgentConfig(name="a", model=str(model))], seed=0)["a"]
    settings = VllmConfig(mismatch_limit=1e6)
    sampler = VllmSampler("a", policy, settings, stop_token_ids=(), batch_rows=1, longest_row=8, log=None)
    sampler._compare([((5,), SampledTokens(token_ids=(6,), logprobs=(-1.0,), finish_reason="stop"))], 1.0, 1.0)
    return {f"agent/<agent>/{name}" for name in sampler.metrics.values()}


def faults_on_ray(models: Mapping[str, Path]) -> set[str]:
    """What is only written on Ray, without it: an agent is late, its answers come, it is not asked, it is let go."""
    config = load_config(run_config(models, Path("run"), execution="ray"))
    fleet = RayFleet.__new__(RayFleet)
    fleet.names, fleet.absent, fleet._settings = ("qwen",), {}, RayConfig(peer_timeout=1e-9)
    fleet._agents, fleet._calls, fleet._counts = {"qwen": mock.Mock()}, [], {}
    fleet._cluster, fleet._timeline = mock.Mock(), Timeline(fleet.names)
    for phase in ("sample", "update"):
        early = _Request(agent="llama", phase=phase, ended_at=-1.0)
        late = _Request(agent="qwen", phase=phase, open=1)
        waits = iter((1, 0))
        with mock.patch.object(fleet, "_pump", lambda late=late, waits=waits: setattr(late, "open", next(waits))):
            fleet._wait([early, late], for_peers=True)
        fleet._calls.append(_Call(process=mock.Mock(), phase=phase, pending=mock.Mock(), request=late))
        fleet._arrived(late, mock.Mock(), [mock.Mock()])
    fleet.sample([], step=1, deliver=mock.Mock())
    fleet.absent["qwen"] = "it is gone"
    return {generic(name) for name in execution_metrics(config, fleet.lap(), restarts=1, stale={}, staleness={})}


def gpu_memory_metrics() -> set[str]:
    """What is only written where there is a GPU, without one."""
    with mock.patch.multiple(
        torch.cuda,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        max_memory_allocated=lambda index: 2**31,
        reset_peak_memory_stats=lambda index: None,
    ):
        found = memory_metrics()
    assert found["memory/cuda:0/peak_gib"] == 2.0
    return {generic(name) for name in found}


def test_every_metric_of_a_run_is_documented(emitted: set[str]) -> None:
    assert sorted(emitted - documented()) == []


def test_every_documented_metric_is_written_by_some_run(emitted: set[str]) -> None:
    assert sorted(documented() - emitted) == []
