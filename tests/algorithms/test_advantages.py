"""Advantages of all algorithms, and the credit that the trainer asks for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hacrl.algorithms import gspo, hacpo, naive
from hacrl.algorithms.algorithm import Algorithm, Credit
from hacrl.algorithms.grpo import Grpo
from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.hacpo import Hacpo
from hacrl.algorithms.naive import Naive
from hacrl.algorithms.ops import group_statistics

NAN = math.nan
EPSILON = 1e-6
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and bool(torch.allclose(got, expected, rtol=0, atol=1e-12, equal_nan=True))


def ratios(capability: list[float]) -> Tensor:
    level = tensor(capability)
    return level[None, :] / level[:, None]


def hacpo_with(**changes: Any) -> Hacpo:
    arguments: dict[str, Any] = {
        "alpha": 1.0,
        "delta": 0.2,
        "delta_step": 0.025,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "epsilon": EPSILON,
        "ratio_min": 0.1,
        "ratio_max": 10.0,
        "capability_advantage": True,
        "capability_coefficient": True,
        "importance_weighting": True,
        "clipping": "stepwise",
    }
    return Hacpo(**{**arguments, **changes})


CLIPPED = {"clip_low": 0.2, "clip_high": 0.28, "epsilon": EPSILON}
ALGORITHMS: list[Algorithm] = [hacpo_with(), Naive(**CLIPPED), Gspo(**CLIPPED), Grpo(**CLIPPED)]
SHARING, SOLITARY = ALGORITHMS[:2], ALGORITHMS[2:]
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)

reward = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, NAN])


@st.composite
def joint_groups(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Rewards (P, A, G) with gaps, and capability ratios (A, A)."""
    prompts, authors, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    total = prompts * authors * size
    values = draw(st.lists(reward, min_size=total, max_size=total))
    capability = draw(st.lists(st.sampled_from([0.1, 0.2, 0.35, 0.8, 1.0]), min_size=authors, max_size=authors))
    return tensor(values).reshape(prompts, authors, size), ratios(capability)


# Bug cases 1 to 3: what the authors' program guards against.


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_solved_or_failed_prompt_gives_exactly_zero(value: float) -> None:
    values, baselines, fell_back = hacpo.advantages(
        tensor([[[value] * 2, [value] * 2]]), ratios([0.2, 0.8]), epsilon=EPSILON
    )
    assert values.tolist() == [[[[0.0, 0.0], [0.0, 0.0]]]] * 2
    assert same(baselines, tensor([[value], [value]]))
    assert not fell_back.any()


def test_baseline_above_every_reward_becomes_the_own_mean_and_is_counted() -> None:
    values, baselines, fell_back = hacpo.advantages(
        tensor([[[1.0, 1, 1, 0], [1, 1, 1, 0]]]), ratios([0.8, 0.2]), epsilon=EPSILON
    )
    assert fell_back.tolist() == [[True], [False]]
    assert baselines.tolist() == [[0.75], [0.46875]]
    assert (values[0] > 0).tolist() == [[[True, True, True, False]] * 2]


def test_baseline_below_every_reward_becomes_the_own_mean_and_is_counted() -> None:
    values, baselines, fell_back = hacpo.advantages(
        tensor([[[0.75, 0.5], [0.5, 0.75]]]), ratios([0.2, 0.8]), epsilon=EPSILON
    )
    assert fell_back.tolist() == [[True], [True]]
    assert baselines.tolist() == [[0.625], [0.625]]
    assert (values[0] < 0).any()


def test_baseline_on_the_edge_of_the_range_is_kept() -> None:
    # Learner 0: (1 + 0 + 2) / 3 = 1, the largest reward itself.
    _, baselines, fell_back = hacpo.advantages(tensor([[[1.0, NAN], [0, 1]]]), ratios([0.5, 0.25]), epsilon=EPSILON)
    assert baselines[0].tolist() == [1.0]
    assert not fell_back.any()
    # Learner 0: (1 + 2 / 2) / 2 = 1, the smallest reward itself.
    _, baselines, fell_back = hacpo.advantages(tensor([[[1.0], [2.0]]]), ratios([0.25, 0.5]), epsilon=EPSILON)
    assert baselines[0].tolist() == [1.0]
    assert not fell_back[0].any()


def test_learner_without_own_rewards_falls_back_to_the_joint_mean() -> None:
    values, baselines, fell_back = hacpo.advantages(
        tensor([[[NAN, NAN], [1.0, 0.5]]]), ratios([0.8, 0.2]), epsilon=EPSILON
    )
    assert fell_back.tolist() == [[True], [False]]
    assert baselines.tolist() == [[0.75], [0.75]]
    assert values[0].isnan().tolist() == [[[True, True], [False, False]]]


def test_learner_without_own_rewards_keeps_a_baseline_in_range() -> None:
    _, baselines, fell_back = hacpo.advantages(tensor([[[NAN, NAN], [1.0, 0.0]]]), ratios([0.4, 0.8]), epsilon=EPSILON)
    assert baselines[0].tolist() == [0.25]
    assert not fell_back.any()


@given(joint_groups())
@quick
def test_no_advantage_exceeds_what_the_group_size_allows(group: tuple[Tensor, Tensor]) -> None:
    rewards, ratio = group
    values, _, _ = hacpo.advantages(rewards, ratio, epsilon=EPSILON)
    count = (~rewards.isnan()).sum(dim=(1, 2))
    # Baseline and reward both lie in [min, max], and max - min is at most std * sqrt(2 (n - 1)).
    limit = (2 * (count - 1).clamp(min=0)).double().sqrt()
    assert (values.nan_to_num(0).abs() <= limit[None, :, None, None] + 1e-9).all()


def test_rounding_in_a_uniform_group_stays_small() -> None:
    values, _, _ = hacpo.advantages(tensor([[[0.1 + 0.2, 0.3], [0.3, 0.3]]]), ratios([0.2, 0.8]), epsilon=EPSILON)
    assert values.abs().max() < 1e-9


# Bug case 5: a rollout that was not scored.


def test_unscored_rollout_leaves_the_group_whole() -> None:
    values, baselines = gspo.advantages(tensor([[[1.0, NAN, 0.0, 1.0]]]), epsilon=EPSILON)
    reference, _ = gspo.advantages(tensor([[[1.0, 0.0, 1.0]]]), epsilon=EPSILON)
    assert values.isnan().tolist() == [[[False, True, False, False]]]
    assert same(values[~values.isnan()], reference.flatten())
    assert same(baselines, tensor([[2 / 3]]))


@given(joint_groups())
@quick
def test_missing_rollouts_enter_no_statistic(group: tuple[Tensor, Tensor]) -> None:
    rewards, ratio = group
    padded = torch.cat([torch.full_like(rewards, NAN), rewards], dim=2)
    values, baselines, fell_back = hacpo.advantages(rewards, ratio, epsilon=EPSILON)
    wide_values, wide_baselines, wide_fell_back = hacpo.advantages(padded, ratio, epsilon=EPSILON)
    assert same(wide_values[..., rewards.shape[2] :], values)
    assert wide_values[..., : rewards.shape[2]].isnan().all()
    assert same(wide_baselines, baselines)
    assert wide_fell_back.equal(fell_back)
    assert values.isnan().equal(rewards.isnan().expand_as(values))


# Bug case 4: a group of one.


@pytest.mark.parametrize("rewards", [[[1.0], [NAN]], [[NAN], [1.0]]])
def test_fewer_than_two_present_rewards_give_zero(rewards: list[list[float]]) -> None:
    group = tensor([rewards])
    for values in (
        hacpo.advantages(group, ratios([0.2, 0.8]), epsilon=EPSILON)[0],
        naive.advantages(group, epsilon=EPSILON)[0],
        gspo.advantages(group, epsilon=EPSILON)[0],
    ):
        assert values[~values.isnan()].unique().tolist() == [0.0]


def test_prompt_without_any_reward_gives_no_row_and_no_baseline() -> None:
    values, baselines, fell_back = hacpo.advantages(
        torch.full((1, 2, 2), NAN), ratios([0.2, 0.8]).float(), epsilon=EPSILON
    )
    assert values.isnan().all()
    assert baselines.isnan().all()
    assert not fell_back.any()


# Bug cases 7 and 8: the statistic is that of the prompt's group, along the right axis.


def test_each_prompt_has_its_own_mean_and_deviation() -> None:
    rewards = tensor([[[0.0, 1.0]], [[0.0, 10.0]]])
    half = math.sqrt(0.5)
    values, baselines = gspo.advantages(rewards, epsilon=0.0)
    assert same(values, tensor([[[-half, half]], [[-half, half]]]))
    assert same(baselines, tensor([[0.5], [5.0]]))
    assert same(naive.advantages(rewards, epsilon=0.0)[0], values)
    assert same(hacpo.advantages(rewards, ratios([0.5]), epsilon=0.0)[0][0], values)


def test_square_group_is_standardised_per_author_or_per_prompt() -> None:
    rewards = torch.rand((4, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own, _ = gspo.advantages(rewards, epsilon=0.0)
    assert same(own.mean(dim=2), torch.zeros(4, 4, dtype=torch.float64))
    assert same(own.std(dim=2), torch.ones(4, 4, dtype=torch.float64))
    joint, baselines = naive.advantages(rewards, epsilon=0.0)
    assert same(joint.flatten(1).mean(dim=1), torch.zeros(4, dtype=torch.float64))
    assert same(joint.flatten(1).std(dim=1), torch.ones(4, dtype=torch.float64))
    assert same(baselines, rewards.flatten(1).mean(dim=1))


def test_epsilon_is_added_to_the_deviation() -> None:
    values, _ = gspo.advantages(tensor([[[0.0, 1.0]]]), epsilon=0.5)
    assert same(values, tensor([[[-0.5, 0.5]]]) / (math.sqrt(0.5) + 0.5))
    assert same(naive.advantages(tensor([[[0.0, 1.0]]]), epsilon=0.5)[0], values)
    assert same(hacpo.advantages(tensor([[[0.0, 1.0]]]), ratios([1.0]), epsilon=0.5)[0][0], values)


# Bug case 12: what a run's health is read from.


def test_group_statistics_of_a_half_solved_a_solved_a_single_and_an_empty_group() -> None:
    statistics = group_statistics(tensor([[1.0, 0, 1, 0], [1, 1, 1, NAN], [NAN, 0.25, NAN, NAN], [NAN] * 4]))
    assert same(statistics.mean_X, tensor([0.5, 1.0, 0.25, NAN]))
    assert same(statistics.std_X, tensor([math.sqrt(1 / 3), 0.0, 0.0, 0.0]))
    assert same(statistics.low_X, tensor([0.0, 1.0, 0.25, NAN]))
    assert same(statistics.high_X, tensor([1.0, 1.0, 0.25, NAN]))
    assert statistics.uniform_X.tolist() == [False, True, True, True]


# Relations between the algorithms.


@given(joint_groups())
@quick
def test_single_agent_hacpo_and_naive_equal_gspo(group: tuple[Tensor, Tensor]) -> None:
    rewards = group[0][:, :1]
    expected, means = gspo.advantages(rewards, epsilon=EPSILON)
    values, baselines, fell_back = hacpo.advantages(rewards, ratios([0.3]), epsilon=EPSILON)
    assert same(values[0], expected)
    assert same(baselines[0], means[:, 0])
    assert not fell_back.any()
    assert same(naive.advantages(rewards, epsilon=EPSILON)[0], expected)


@given(joint_groups())
@quick
def test_equal_capability_gives_the_joint_mean(group: tuple[Tensor, Tensor]) -> None:
    rewards, _ = group
    values, baselines, fell_back = hacpo.advantages(
        rewards, torch.ones(rewards.shape[1], rewards.shape[1]), epsilon=EPSILON
    )
    expected, joint = naive.advantages(rewards, epsilon=EPSILON)
    assert same(values, expected.expand_as(values))
    assert same(baselines, joint.expand_as(baselines))
    assert not fell_back.any()


@given(joint_groups(), st.randoms(use_true_random=False))
@quick
def test_order_of_agents_and_rollouts_does_not_matter(group: tuple[Tensor, Tensor], random: Any) -> None:
    rewards, ratio = group
    authors, size = list(range(rewards.shape[1])), list(range(rewards.shape[2]))
    random.shuffle(authors)
    random.shuffle(size)
    values, baselines, _ = hacpo.advantages(rewards, ratio, epsilon=EPSILON)
    moved, moved_baselines, _ = hacpo.advantages(
        rewards[:, authors][:, :, size], ratio[authors][:, authors], epsilon=EPSILON
    )
    assert same(moved, values[authors][:, :, authors][..., size])
    assert same(moved_baselines, baselines[authors])


def test_result_has_the_dtype_of_the_rewards() -> None:
    values, baselines, _ = hacpo.advantages(torch.rand(2, 2, 3), ratios([0.2, 0.8]), epsilon=EPSILON)
    assert values.dtype == baselines.dtype == torch.float32


# Entry checks.


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.zeros(2, 2), "three axes"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), "floating dtype"),
        (torch.full((1, 1, 1), math.inf), "infinite reward"),
        (torch.full((1, 1, 1), -math.inf), "infinite reward"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(rewards: Tensor, message: str) -> None:
    ones = torch.ones(rewards.shape[1], rewards.shape[1])
    with pytest.raises(ValueError, match=f"^rewards_PAG.*{message}"):
        gspo.advantages(rewards, epsilon=EPSILON)
    with pytest.raises(ValueError, match=f"^rewards_PAG.*{message}"):
        naive.advantages(rewards, epsilon=EPSILON)
    with pytest.raises(ValueError, match=f"^rewards_PAG.*{message}"):
        hacpo.advantages(rewards, ones, epsilon=EPSILON)
    for algorithm in ALGORITHMS:
        with pytest.raises(ValueError, match=f"^rewards_PAG.*{message}"):
            algorithm.credit(rewards, torch.ones(rewards.shape[1]), ones.bool())


@pytest.mark.parametrize("ratio", [torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 3), torch.ones(2)])
def test_ratios_of_other_agents_are_refused(ratio: Tensor) -> None:
    with pytest.raises(ValueError, match=r"ratio_LA: expected shape \(2, 2\)"):
        hacpo.advantages(torch.zeros(1, 2, 2), ratio, epsilon=EPSILON)


@pytest.mark.parametrize("ratio", [0.0, -1.0, NAN])
def test_ratios_must_be_above_zero(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio_LA: expected ratios above 0, got"):
        hacpo.advantages(torch.zeros(1, 2, 2), tensor([[1.0, ratio], [1.0, 1.0]]), epsilon=EPSILON)


# Credit.


def everyone(authors: int) -> Tensor:
    return torch.ones(authors, authors, dtype=torch.bool)


REWARDS = tensor([[[1.0, 0.0, NAN], [1.0, 1.0, 0.0]], [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]])
CAPABILITY = tensor([0.4, 0.8])


def check_types(credit: Credit, prompts: int, authors: int, size: int) -> None:
    assert credit.advantages_LPAG.shape == (authors, prompts, authors, size)
    assert credit.ratio_LA.shape == (authors, authors)
    assert credit.baselines_LP.shape == (authors, prompts)
    assert credit.fell_back_LP.shape == (authors, prompts)
    assert credit.fell_back_LP.dtype == torch.bool


@every_algorithm
def test_credit_has_its_shapes(algorithm: Algorithm) -> None:
    check_types(algorithm.credit(REWARDS, CAPABILITY, everyone(2)), 2, 2, 3)


def test_hacpo_credits_every_rollout_to_every_learner() -> None:
    credit = hacpo_with().credit(REWARDS, CAPABILITY, everyone(2))
    values, baselines, fell_back = hacpo.advantages(REWARDS, ratios([0.4, 0.8]), epsilon=EPSILON)
    assert same(credit.advantages_LPAG, values)
    assert same(credit.baselines_LP, baselines)
    assert credit.fell_back_LP.equal(fell_back)
    assert same(credit.ratio_LA, tensor([[1.0, 2.0], [0.5, 1.0]]))


def test_hacpo_credit_clamps_ratios_by_its_limits() -> None:
    credit = hacpo_with(ratio_min=0.8, ratio_max=1.5).credit(REWARDS, CAPABILITY, everyone(2))
    assert same(credit.ratio_LA, tensor([[1.0, 1.5], [0.8, 1.0]]))


def test_hacpo_without_capability_advantage_uses_the_joint_mean_but_still_tells_the_ratio() -> None:
    credit = hacpo_with(capability_advantage=False).credit(REWARDS, CAPABILITY, everyone(2))
    expected, baselines = naive.advantages(REWARDS, epsilon=EPSILON)
    assert same(credit.advantages_LPAG, expected.expand(2, -1, -1, -1))
    assert same(credit.baselines_LP, baselines.expand(2, -1))
    assert same(credit.ratio_LA, tensor([[1.0, 2.0], [0.5, 1.0]]))


def test_hacpo_without_history_equals_naive() -> None:
    credit = hacpo_with().credit(REWARDS, tensor([NAN, 0.8]), everyone(2))
    assert same(credit.ratio_LA, torch.ones(2, 2, dtype=torch.float64))
    assert same(credit.advantages_LPAG, Naive(**CLIPPED).credit(REWARDS, CAPABILITY, everyone(2)).advantages_LPAG)


def test_hacpo_credit_reports_a_replaced_baseline() -> None:
    rewards = tensor([[[1.0, 1, 1, 0], [1, 1, 1, 0]]])
    credit = hacpo_with().credit(rewards, tensor([0.8, 0.2]), everyone(2))
    assert credit.fell_back_LP.tolist() == [[True], [False]]


def test_naive_credits_the_joint_group() -> None:
    credit = Naive(**CLIPPED).credit(REWARDS, CAPABILITY, everyone(2))
    expected, baselines = naive.advantages(REWARDS, epsilon=EPSILON)
    assert same(credit.advantages_LPAG, expected.expand(2, -1, -1, -1))
    assert same(credit.baselines_LP, baselines.expand(2, -1))
    assert same(credit.ratio_LA, torch.ones(2, 2, dtype=torch.float64))
    assert not credit.fell_back_LP.any()


@pytest.mark.parametrize("algorithm", SOLITARY, ids=lambda algorithm: type(algorithm).__name__)
def test_solitary_learners_have_their_own_rows_only(algorithm: Algorithm) -> None:
    credit = algorithm.credit(REWARDS, CAPABILITY, everyone(2))
    expected, baselines = gspo.advantages(REWARDS, epsilon=EPSILON)
    for learner in range(2):
        assert same(credit.advantages_LPAG[learner, :, learner], expected[:, learner])
        assert credit.advantages_LPAG[learner, :, 1 - learner].isnan().all()
    assert same(credit.baselines_LP, baselines.T)
    assert same(credit.ratio_LA, torch.ones(2, 2, dtype=torch.float64))
    assert not credit.fell_back_LP.any()


@pytest.mark.parametrize("algorithm", SHARING, ids=lambda algorithm: type(algorithm).__name__)
@given(group=joint_groups())
@quick
def test_author_that_is_not_allowed_enters_nothing(algorithm: Algorithm, group: tuple[Tensor, Tensor]) -> None:
    rewards, ratio = group
    authors = rewards.shape[1]
    capability = ratio[0] * 0.1
    allowed = everyone(authors)
    allowed[0, authors - 1] = False
    hidden = rewards.clone()
    hidden[:, authors - 1] = NAN
    credit = algorithm.credit(rewards, capability, allowed)
    without = algorithm.credit(hidden, capability, everyone(authors))
    full = algorithm.credit(rewards, capability, everyone(authors))
    assert same(credit.advantages_LPAG[0], without.advantages_LPAG[0])
    assert same(credit.baselines_LP[0], without.baselines_LP[0])
    assert credit.fell_back_LP[0].equal(without.fell_back_LP[0])
    assert same(credit.advantages_LPAG[1:], full.advantages_LPAG[1:])
    assert same(credit.baselines_LP[1:], full.baselines_LP[1:])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_learner_that_may_use_only_itself_trains_as_if_alone(algorithm: Algorithm) -> None:
    credit = algorithm.credit(REWARDS, CAPABILITY, torch.eye(2, dtype=torch.bool))
    alone, baselines = gspo.advantages(REWARDS, epsilon=EPSILON)
    for learner in range(2):
        assert same(credit.advantages_LPAG[learner, :, learner], alone[:, learner])
        assert credit.advantages_LPAG[learner, :, 1 - learner].isnan().all()
        assert same(credit.baselines_LP[learner], baselines[:, learner])


@every_algorithm
def test_learner_that_may_use_nothing_has_no_rows(algorithm: Algorithm) -> None:
    credit = algorithm.credit(REWARDS, CAPABILITY, tensor([[0, 0], [1, 1]]).bool())
    assert credit.advantages_LPAG[0].isnan().all()
    assert credit.baselines_LP[0].isnan().all()
    assert not credit.baselines_LP[1].isnan().any()
    assert not credit.fell_back_LP.any()


@every_algorithm
def test_credit_refuses_permissions_of_other_agents(algorithm: Algorithm) -> None:
    for shape in [(2, 3), (3, 2), (2,)]:
        with pytest.raises(ValueError, match=r"allowed_LA: expected shape \(2, 2\)"):
            algorithm.credit(REWARDS, CAPABILITY, torch.ones(shape, dtype=torch.bool))


def test_hacpo_credit_refuses_capabilities_of_other_agents() -> None:
    with pytest.raises(ValueError, match=r"capability_A: expected shape \(2,\)"):
        hacpo_with().credit(REWARDS, tensor([0.5]), everyone(2))


def test_who_shares() -> None:
    assert [algorithm.shares for algorithm in ALGORITHMS] == [True, True, False, False]
