"""How scores of several functions become one reward."""

from __future__ import annotations

import pytest

from hacrl.errors import RewardError
from hacrl.rewards import RewardSpec, load_rewards, verdict_metrics
from hacrl.rewards.verdict import build_verdict
from hacrl.rewards.worker import Outcome


def plain(prompts, completions):
    return [0.0]


def rewards(*weights: float):
    return load_rewards(
        [RewardSpec(function=plain, weight=w, name=n) for w, n in zip(weights, "ab", strict=True)]
    ).rewards


def scored(score: float | None) -> Outcome:
    return Outcome(kind="scored", scores=(score,))


def test_weights_one_and_zero_make_the_first_function_the_reward_and_its_metric():
    verdicts = [build_verdict(rewards(1, 0), [scored(a), scored(b)]) for a, b in [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]]
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0]
    assert verdict_metrics(verdicts)["reward/mean"] == pytest.approx(2 / 3)


def test_what_was_scored_is_summed():
    """Functions A = [1, 0] and B = [None, 1] with equal weights."""
    verdicts = [build_verdict(rewards(0.5, 0.5), [scored(1.0), scored(None)])]
    verdicts.append(build_verdict(rewards(0.5, 0.5), [scored(0.0), scored(1.0)]))
    assert [verdict.reward for verdict in verdicts] == [0.5, 0.5]
    assert verdict_metrics(verdicts)["reward/partial"] == 1


def test_a_score_of_weight_zero_alone_is_no_reward():
    """Else a crash of the function that counts would be trained on as a wrong answer."""
    verdict = build_verdict(rewards(1, 0), [Outcome(kind="crash", detail="died"), scored(1.0)])
    assert verdict.reward is None
    assert verdict.unscored == {"a": "crash"}
    assert verdict.detail == "a: died"


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), True, "1"])
def test_a_weight_must_be_a_finite_number(weight):
    with pytest.raises(RewardError, match="weight"):
        load_rewards([RewardSpec(function=plain, weight=weight)])


def test_not_all_weights_may_be_zero():
    with pytest.raises(RewardError, match="every weight is 0"):
        rewards(0, 0)
