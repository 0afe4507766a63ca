from __future__ import annotations

import math

import pytest
import torch
from loss_rows import difference_quotient
from torch import Tensor

from hacrl.algorithms import ops

NAN, INF = math.nan, math.inf
HIDDEN = [NAN, -INF, INF, 1e30]


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_masked_mean_is_per_row_and_blind_to_what_is_masked(hidden: float) -> None:
    values = tensor([[1.0, 3.0, hidden, 8.0], [hidden, 5.0, hidden, hidden]]).requires_grad_()
    mask = torch.tensor([[True, True, False, True], [False, True, False, False]])
    means = ops.masked_mean(values, mask)
    assert means.tolist() == [4.0, 5.0]
    (gradient,) = torch.autograd.grad(means.sum(), values)
    assert gradient.tolist() == [[1 / 3, 1 / 3, 0.0, 1 / 3], [0.0, 1.0, 0.0, 0.0]]


def test_masked_mean_of_an_empty_row_is_zero_without_gradient() -> None:
    values = tensor([[NAN, NAN]]).requires_grad_()
    mean = ops.masked_mean(values, torch.zeros(1, 2, dtype=torch.bool))
    assert mean.tolist() == [0.0]
    assert torch.autograd.grad(mean.sum(), values)[0].tolist() == [[0.0, 0.0]]


def test_integer_mask_counts_like_a_boolean_one() -> None:
    values = tensor([[1.0, 2.0, NAN]])
    assert ops.masked_mean(values, torch.tensor([[1, 1, 0]])).tolist() == [1.5]
    assert ops.sequence_log_ratio(values, torch.tensor([[1, 1, 0]]), tensor([1.0])).tolist() == [0.5]


def test_square_batch_is_averaged_along_its_rows() -> None:
    values = torch.arange(16, dtype=torch.float64).reshape(4, 4)
    assert ops.masked_mean(values, torch.ones(4, 4)).tolist() == [1.5, 5.5, 9.5, 13.5]


def test_sequence_ratio_compares_means_over_different_token_counts() -> None:
    # The learner needs 3 tokens (mean -2) for what took the author another number of them (mean -1.5).
    log_ratio = ops.sequence_log_ratio(tensor([[-1.0, -2.0, -3.0, NAN]]), tensor([[1, 1, 1, 0]]), tensor([-1.5]))
    assert log_ratio.tolist() == [-0.5]


def test_split_token_has_the_product_of_its_parts() -> None:
    # One word as one token (-1.5) or as three (-0.2, -0.3, -1.0): equal sums, so means 1 : 1 / 3.
    log_ratio = ops.sequence_log_ratio(tensor([[-0.2, -0.3, -1.0]]), torch.ones(1, 3), tensor([-1.5]))
    assert float(log_ratio) == pytest.approx(-0.5 + 1.5)


@pytest.mark.parametrize("author", [NAN, -INF, -1.0])
def test_row_without_tokens_has_ratio_one_whatever_its_author(author: float) -> None:
    assert ops.sequence_log_ratio(tensor([[NAN]]), torch.zeros(1, 1), tensor([author])).tolist() == [0.0]


def test_author_receives_no_gradient() -> None:
    learner, author = tensor([[-1.0, -2.0]]).requires_grad_(), tensor([-1.0]).requires_grad_()
    ops.sequence_log_ratio(learner, torch.ones(1, 2), author).sum().backward()
    assert learner.grad is not None
    assert author.grad is None


def test_ratio_keeps_the_learner_dtype() -> None:
    assert ops.sequence_log_ratio(torch.zeros(1, 1), torch.ones(1, 1), tensor([-1.0])).dtype == torch.float32


# KL (bug case 41: no gradient, wrong gradient, masked tokens counted).

LEARNER = tensor([[-1.0, -0.5, -2.0, -0.7], [-0.3, -1.1, NAN, -INF], [NAN, NAN, NAN, NAN]])
REFERENCE = tensor([[-1.2, -0.5, -0.4, NAN], [-0.9, -1.0, -INF, NAN], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()


def test_k3_values() -> None:
    def k3(difference: float) -> float:
        return math.exp(difference) - difference - 1

    expected = [(k3(-0.2) + k3(0.0) + k3(1.6)) / 3, (k3(-0.6) + k3(0.1)) / 2, 0.0]
    assert ops.k3_kl(LEARNER, REFERENCE, MASK).tolist() == pytest.approx(expected, abs=1e-12)


def test_k3_gradient() -> None:
    learner = LEARNER.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ops.k3_kl(learner, REFERENCE, MASK).sum(), learner)
    expected = torch.where(MASK, 1 - (REFERENCE - LEARNER).exp(), 0.0) / MASK.sum(1, keepdim=True).clamp(min=1)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    quotient = difference_quotient(
        lambda values: ops.k3_kl(torch.where(MASK, values, NAN), REFERENCE, MASK).sum(), LEARNER.nan_to_num(0, 0, 0)
    )
    assert torch.allclose(gradient, quotient, rtol=0, atol=1e-8)


def test_k3_reference_receives_no_gradient() -> None:
    learner, reference = LEARNER.clone().requires_grad_(), REFERENCE.clone().requires_grad_()
    ops.k3_kl(learner, reference, MASK).sum().backward()
    assert reference.grad is None


def test_k3_of_close_policies_keeps_its_digits() -> None:
    kl = ops.k3_kl(torch.full((1, 1), -1.0), torch.full((1, 1), -1.0 + 2**-10), torch.ones(1, 1))
    assert float(kl) == pytest.approx(0.5 * 2**-20, rel=1e-2)


def test_k3_keeps_the_learner_dtype() -> None:
    assert ops.k3_kl(torch.zeros(1, 1), tensor([[-1.0]]), torch.ones(1, 1)).dtype == torch.float32


def test_k3_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"reference_logprobs_BT: expected shape \(3, 4\), got \(3, 3\)"):
        ops.k3_kl(LEARNER, REFERENCE[:, :3], MASK)
    with pytest.raises(ValueError, match=r"mask_BT: expected shape \(3, 4\), got \(2, 4\)"):
        ops.k3_kl(LEARNER, REFERENCE, MASK[:2])


# Entry checks.


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3)])
def test_logprobs_need_rows_and_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="logprobs_BT: expected two axes"):
        ops.check_rows(torch.zeros(shape), torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_half_precision_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"logprobs_BT: expected float32 or float64, got {dtype}"):
        ops.check_rows(torch.zeros((1, 1), dtype=dtype), torch.ones(1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_accepted(dtype: torch.dtype) -> None:
    ops.check_rows(torch.zeros((2, 1), dtype=dtype), torch.ones(2, 1), advantage_B=torch.ones(2))


@pytest.mark.parametrize("value", [-1e-9, NAN, -INF])
def test_number_below_its_minimum_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=f"alpha: expected a number of at least 0, got {value}"):
        ops.check_at_least(0, delta=0.0, alpha=value)


@pytest.mark.parametrize("value", [0, -1.0, NAN])
def test_normaliser_must_be_above_zero(value: float) -> None:
    with pytest.raises(ValueError, match=f"normaliser.*got {value}"):
        ops.check_normaliser(value)


def test_normaliser_may_be_below_one() -> None:
    ops.check_normaliser(0.5)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_truncated_importance_is_the_geometric_mean_of_ratios_up_to_the_cap(hidden: float) -> None:
    learner = tensor([[-1.0, -2.0, hidden], [-1.0, hidden, hidden], [hidden, hidden, hidden]])
    sampler = tensor([[-1.2, -2.4, hidden], [-3.0, hidden, hidden], [hidden, hidden, hidden]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    weights = ops.truncated_importance(learner.requires_grad_(), sampler, mask, cap=2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.3), 2.0, 1.0])
    assert not weights.requires_grad
    assert ops.truncated_importance(sampler, learner, mask, cap=0.5).tolist() == pytest.approx([0.5, math.exp(-2), 0.5])


def test_truncated_importance_refuses_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="sampler_logprobs_BT: expected shape"):
        ops.truncated_importance(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3), cap=1.0)
