"""Optimizers by configuration."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import ConfigError
from hacrl.optimizer import build_optimizer, stepping
from hacrl.preflight import prepare


@pytest.fixture(params=["float32", "int8"])
def states(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "int8" and importlib.util.find_spec("torchao") is None:
        beside = Path(sys.prefix) / "torchao"  # where `make test` puts it
        if not beside.exists():
            pytest.skip("torchao is not installed (make test does it)")
        monkeypatch.syspath_prepend(str(beside))
    return str(request.param)


def trained(tmp_path: Path, states: str, *, resume: bool = False) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A matrix after six steps of a quadratic, its state saved and loaded after three of them where `resume`."""
    agent = AgentConfig(name="a", model="m", learning_rate=1e-2, optimizer={"states": states})
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(64, 128))
    target = torch.randn(64, 128)
    optimizer = build_optimizer([weights], agent)
    for step in range(6):
        if resume and step == 3:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            optimizer = build_optimizer([weights], agent)
            optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        (weights - target).square().sum().backward()
        with stepping(torch.device("cpu")):
            optimizer.step()
        optimizer.zero_grad()
    return weights.detach(), optimizer


@pytest.mark.parametrize("states", ["int8"], indirect=True)
def test_states_of_8_bits_take_a_quarter_and_move_the_weights_alike(tmp_path: Path, states: str) -> None:
    exact, _ = trained(tmp_path, "float32")
    rounded, optimizer = trained(tmp_path, states)
    moved = (exact - trained_start()).abs().mean()
    assert float((exact - rounded).abs().mean() / moved) < 0.02
    (state,) = optimizer.state.values()
    stored = sum(
        part.numel() * part.element_size()
        for name in ("exp_avg", "exp_avg_sq")
        for part in (state[name].codes, state[name].scale)
    )
    assert stored < 2.1 * exact.numel()


def trained_start() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 128)


def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path: Path, states: str) -> None:
    assert torch.equal(trained(tmp_path, states)[0], trained(tmp_path, states, resume=True)[0])


def test_a_missing_library_is_told_before_a_model_loads(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    config: dict[str, Any] = {
        "agents": [{"name": "a", "model": str(tiny_models["qwen"]), "optimizer": {"states": "int8"}}],
        "tasks": {"train": {"function": "tests.tiny_runs:tasks"}},
        "reward": "exact",
        "steps": 1,
        "prompts_per_step": 1,
        "output": "unused",
    }
    with pytest.raises(ConfigError, match=r"agent a: optimizer.states is int8.*pip install 'hacrl\[torchao\]'"):
        prepare(RunConfig(**config))
