"""Values and gradients computed by a separate program (float64), each within 1e-9."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.algorithms import hacpo
from hacrl.algorithms.capability import CapabilityTracker, capability_ratios

GOLDEN = Path(__file__).parent.parent / "golden"
ADVANTAGES, CAPABILITY, LOSS = (
    json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("advantages", "capability", "loss")
)


@pytest.mark.parametrize("case", ADVANTAGES, ids=lambda case: f"{case['name']}, learner {case['learner']}")
def test_advantages(case: dict[str, Any]) -> None:
    agents = list(case["capabilities"])
    rewards = torch.full((1, len(agents), max(map(case["authors"].count, agents))), math.nan, dtype=torch.float64)
    places = [
        (0, agents.index(author), case["authors"][:position].count(author))
        for position, author in enumerate(case["authors"])
    ]
    for place, reward in zip(places, case["rewards"], strict=True):
        rewards[place] = math.nan if reward is None else reward
    capability = torch.tensor(list(case["capabilities"].values()), dtype=torch.float64)
    ratios = capability_ratios(capability, ratio_min=case["ratio_min"], ratio_max=case["ratio_max"])

    values, baselines, fell_back = hacpo.advantages(rewards, ratios, epsilon=case["epsilon"])

    learner = agents.index(case["learner"])
    expected = [math.nan if value is None else value for value in case["advantages"]]
    got = [float(values[learner][place]) for place in places]
    assert got == pytest.approx(expected, abs=1e-9, rel=0, nan_ok=True)
    assert float(baselines[learner, 0]) == pytest.approx(case["baseline"], abs=1e-9, rel=0)
    assert bool(fell_back[learner, 0]) is case["baseline_fell_back"]


@pytest.mark.parametrize("case", CAPABILITY, ids=lambda case: case["name"])
def test_capability(case: dict[str, Any]) -> None:
    tracker = CapabilityTracker(["only"], window=case["window"], score="mean", floor=case["floor"])
    for score in case["history"]:
        tracker.observe(torch.tensor([[[score]]], dtype=torch.float64))
    assert float(tracker.estimate()[0]) == pytest.approx(case["capability"], abs=1e-9, rel=0)


@pytest.mark.parametrize("case", LOSS, ids=lambda case: f"{case['hyperparameters']}, update {case['update_index']}")
def test_loss_and_gradient(case: dict[str, Any]) -> None:
    rows = case["rows"]
    # What lies behind a row's end is NaN: it must not matter.
    logprobs = torch.full((len(rows), max(len(row["logprobs"]) for row in rows)), math.nan, dtype=torch.float64)
    for place, row in zip(logprobs, rows, strict=True):
        place[: len(row["logprobs"])] = torch.tensor(row["logprobs"], dtype=torch.float64)
    mask = ~logprobs.isnan()
    logprobs.requires_grad_()

    def column(name: str) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=torch.bool if name == "own" else torch.float64)

    output = hacpo.policy_loss(
        logprobs,
        mask,
        column("author_mean_logprob"),
        column("advantage"),
        column("own"),
        column("omega"),
        update_index=case["update_index"],
        normaliser=case["normaliser"],
        **case["hyperparameters"],
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)

    assert float(output.loss.detach()) == pytest.approx(case["loss"], abs=1e-9, rel=0)
    assert output.metrics["ratio"].tolist() == pytest.approx(case["sequence_ratios"], abs=1e-9, rel=0)
    for got, keep, expected in zip(gradient, mask, case["gradient"], strict=True):
        assert got[keep].tolist() == pytest.approx(expected, abs=1e-9, rel=0)
        assert not got[~keep].any()
