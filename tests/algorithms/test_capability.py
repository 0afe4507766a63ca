from __future__ import annotations

import json
import math

import pytest
import torch

from hacrl.algorithms.capability import CapabilityTracker, capability_ratios

NAN = math.nan


def tracker(**changes: object) -> CapabilityTracker:
    settings = {"window": 5, "score": "positive_rate", "floor": 1e-3, **changes}
    return CapabilityTracker(["strong", "weak"], **settings)  # pyright: ignore[reportArgumentType]


def rewards(strong: list[float], weak: list[float]) -> torch.Tensor:
    return torch.tensor([[strong, weak]], dtype=torch.float64)


def test_positive_rate_counts_rewards_above_zero() -> None:
    estimate = tracker().observe(rewards([0.25, 1.0, 0.0, -1.0], [-0.5, 0.0, 0.0, 3.0])).estimate()
    assert estimate.tolist() == [0.5, 0.25]
    assert estimate.dtype == torch.float64


def test_mean_averages_rewards() -> None:
    estimate = tracker(score="mean").observe(rewards([0.25, 1.0, 0.0, -1.0], [0.5, 0.0, 0.0, 3.0])).estimate()
    assert estimate.tolist() == [0.0625, 0.875]


def test_mean_runs_over_steps_not_over_rollouts() -> None:
    capability = tracker()
    capability.observe(rewards([1.0, 0.0, 0.0, 0.0], [0.0] * 4))
    capability.observe(torch.tensor([[[1.0], [1.0]]]))
    assert capability.estimate().tolist() == [0.625, 0.5]


def test_scores_are_averaged_in_double_precision() -> None:
    step = torch.tensor([[[1.0, 2.0**-30], [0.0, 1.0]]], dtype=torch.float32)
    assert tracker(score="mean").observe(step).estimate().tolist() == [0.5 + 2.0**-31, 0.5]


def test_every_prompt_of_a_step_counts() -> None:
    step = torch.tensor([[[1.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    assert tracker().observe(step).estimate().tolist() == [0.75, 0.25]


def test_missing_rewards_enter_no_statistic() -> None:
    assert tracker().observe(rewards([1.0, NAN, 0.0, NAN], [NAN, NAN, 1.0, NAN])).estimate().tolist() == [0.5, 1.0]


def test_no_history_is_nan_and_a_step_without_a_score_adds_nothing() -> None:
    capability = tracker(window=2)
    assert capability.estimate().isnan().tolist() == [True, True]
    capability.observe(rewards([1.0], [NAN]))
    assert capability.estimate().isnan().tolist() == [False, True]
    capability.observe(rewards([NAN], [1.0])).observe(rewards([NAN], [0.0])).observe(rewards([NAN], [0.0]))
    assert capability.estimate().tolist() == [1.0, 1e-3]


def test_peer_that_fails_for_five_steps_gets_the_floor_and_a_clamped_ratio() -> None:
    capability = tracker()
    capability.observe(rewards([1.0], [1.0]))
    for _ in range(5):
        capability.observe(rewards([1.0, 0.0], [0.0, 0.0]))
    estimate = capability.estimate()
    assert estimate.tolist() == [0.5, 1e-3]
    ratios = capability_ratios(estimate, ratio_min=0.1, ratio_max=10.0)
    assert ratios.tolist() == [[1.0, 0.1], [10.0, 1.0]]


def test_resume_continues_like_an_unbroken_run() -> None:
    unbroken, stopped = tracker(window=3), tracker(window=3)
    steps = [rewards([float(i % 2), 1.0, 0.0], [0.0, float(i % 3 == 0), NAN]) for i in range(7)]
    for step in steps[:4]:
        unbroken.observe(step)
        stopped.observe(step)
    resumed = tracker(window=3)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for step in steps[4:]:
        assert unbroken.observe(step).estimate().tolist() == resumed.observe(step).estimate().tolist()


def test_loading_replaces_and_keeps_the_newest_steps() -> None:
    capability = tracker(window=2).observe(rewards([1.0], [1.0]))
    capability.load_state_dict({"score": "positive_rate", "history": {"weak": [], "strong": [1.0, 0.25, 0.5]}})
    assert capability.state_dict() == {"score": "positive_rate", "history": {"strong": [0.25, 0.5], "weak": []}}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"score": "mean", "history": {"strong": [0.1], "weak": [0.1]}}, "kept by score 'mean'.*uses 'positive_rate'"),
        ({"history": {"strong": [0.1], "weak": [0.1]}}, "kept by score None"),
        ({"score": "positive_rate", "history": {"strong": [0.1]}}, r"expected agents \['strong', 'weak'\]"),
        ({"score": "positive_rate", "history": [0.1]}, r"expected agents .*got \[0.1\]"),
        ({"score": "positive_rate"}, "expected agents .*got None"),
    ],
)
def test_foreign_state_is_refused_and_changes_nothing(state: dict[str, object], message: str) -> None:
    capability = tracker().observe(rewards([1.0], [0.0]))
    with pytest.raises(ValueError, match=message):
        capability.load_state_dict(state)
    assert capability.state_dict()["history"] == {"strong": [1.0], "weak": [0.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window.*got 0"),
        ({"score": "median"}, "score.*'median'"),
        ({"floor": 0.0}, r"floor.*got 0\.0"),
        ({"floor": -1.0}, "floor.*got -1"),
        ({"floor": NAN}, "floor.*got nan"),
        ({"floor": math.inf}, "floor.*got inf"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tracker(**changes)


@pytest.mark.parametrize("agents", [[], ["a", "a"]])
def test_agents_must_be_named_apart(agents: list[str]) -> None:
    with pytest.raises(ValueError, match=r"agents.*got \["):
        CapabilityTracker(agents, window=1, score="mean", floor=1e-3)


def test_limits_of_the_settings_are_allowed() -> None:
    assert tracker(window=1, floor=2.0).observe(rewards([1.0], [1.0])).estimate().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 1, 2), (2, 2)])
def test_rewards_of_other_agents_are_refused(shape: tuple[int, ...]) -> None:
    capability = tracker()
    with pytest.raises(ValueError, match=r"^rewards_PAG: expected"):
        capability.observe(torch.ones(shape))
    assert capability.estimate().isnan().all()


def test_ratio_is_author_over_learner() -> None:
    ratios = capability_ratios(torch.tensor([0.2, 0.8, 0.4], dtype=torch.float64), ratio_min=0.1, ratio_max=10.0)
    assert ratios.tolist() == [[1.0, 4.0, 2.0], [0.25, 1.0, 0.5], [0.5, 2.0, 1.0]]


def test_ratio_is_one_without_history_on_either_side() -> None:
    ratios = capability_ratios(torch.tensor([NAN, 0.8, 0.4], dtype=torch.float64), ratio_min=0.1, ratio_max=10.0)
    assert ratios.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.5], [1.0, 2.0, 1.0]]


def test_ratio_is_clamped_even_against_zero() -> None:
    ratios = capability_ratios(torch.tensor([0.0, 0.8, 0.001], dtype=torch.float64), ratio_min=0.25, ratio_max=8.0)
    assert ratios.tolist() == [[1.0, 8.0, 8.0], [0.25, 1.0, 0.25], [0.25, 8.0, 1.0]]


@pytest.mark.parametrize(
    "capability",
    [torch.tensor([[0.5]]), torch.tensor([1, 2]), torch.tensor([0.5, -0.1]), torch.tensor([math.inf, 1.0])],
)
def test_what_is_no_capability_is_refused(capability: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="capability_A"):
        capability_ratios(capability, ratio_min=0.1, ratio_max=10.0)


@pytest.mark.parametrize(("low", "high"), [(0.0, 10.0), (-0.1, 10.0), (1.1, 10.0), (0.1, 0.9), (NAN, 10.0)])
def test_limits_must_lie_around_one(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="ratio_min"):
        capability_ratios(torch.tensor([0.5]), ratio_min=low, ratio_max=high)


def test_limits_may_be_one() -> None:
    ratios = capability_ratios(torch.tensor([0.2, 0.8]), ratio_min=1.0, ratio_max=1.0)
    assert ratios.tolist() == [[1.0, 1.0], [1.0, 1.0]]
