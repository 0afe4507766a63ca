"""The arithmetic the algorithms share.

What a mask hides may be anything, NaN and infinities included. A product with zero would let those through
(0 * NaN = NaN, in the gradient too), so hidden values are replaced before any arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of each row over the places where the mask is set: `sum_t m_t v_t / sum_t m_t`.

    values_BT  (B, T) float; receives gradient 1 / count at set places, 0 elsewhere.
    mask_BT    (B, T); non-zero = counts.
    Returns    (B,); 0 for a row whose mask is empty.
    """
    counted_BT = mask_BT.bool()
    total_B = torch.where(counted_BT, values_BT, 0.0).sum(dim=-1)
    return total_B / counted_BT.sum(dim=-1).clamp(min=1)


def sequence_log_ratio(logprobs_BT: Tensor, mask_BT: Tensor, author_mean_logprob_B: Tensor) -> Tensor:
    """Logarithm of the sequence ratio `s` (GSPO; HACPO Eq. 11).

        log s = mean over the learner's tokens of log pi_learner - mean over the author's tokens of log pi_author,old

    Each mean uses its own tokenizer's token count, so the two may differ in length.

    logprobs_BT            (B, T) of the learner now; receives gradient 1 / count.
    mask_BT                (B, T); non-zero = counts.
    author_mean_logprob_B  (B,); receives no gradient.
    Returns                (B,); 0 (so s = 1) for a row whose mask is empty, whatever the author's mean holds.
    """
    difference_B = masked_mean(logprobs_BT, mask_BT) - author_mean_logprob_B.detach().to(logprobs_BT.dtype)
    return torch.where(mask_BT.bool().any(dim=-1), difference_B, 0.0)


def k3_kl(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """KL divergence from a reference policy, k3 estimator, as the mean of each row over its tokens.

        k3_t = exp(d_t) - d_t - 1,  d_t = log pi_reference - log pi_learner     (never negative, 0 only at d = 0)

    logprobs_BT            (B, T) of the learner now; receives gradient (1 - exp(d_t)) / count.
    reference_logprobs_BT  (B, T); receives no gradient.
    mask_BT                (B, T); non-zero = counts.
    Returns                (B,); 0 for a row whose mask is empty.
    Raises                 ValueError if shapes or dtypes do not fit.
    Source                 J. Schulman, "Approximating KL divergence", 2020.
    """
    check_rows(logprobs_BT, mask_BT)
    check_shape("reference_logprobs_BT", reference_logprobs_BT, tuple(logprobs_BT.shape))
    counted_BT = mask_BT.bool()
    learner_BT = torch.where(counted_BT, logprobs_BT, 0.0)
    reference_BT = torch.where(counted_BT, reference_logprobs_BT.detach().to(logprobs_BT.dtype), 0.0)
    difference_BT = reference_BT - learner_BT
    # expm1 keeps the digits that exp(d) - 1 loses where the policies are close, which is almost everywhere.
    return masked_mean(torch.expm1(difference_BT) - difference_BT, counted_BT)


@torch.no_grad()
def truncated_importance(logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, *, cap: float) -> Tensor:
    """Weight of a row for the gap between the policy that is trained and the program that sampled from it.

        w = min(exp(mean_t (log pi_learner,old - log pi_sampler)), cap)

    Both are of the same weights and the same tokens; they differ where the sampler computes in another way. The mean
    over tokens (a geometric mean of ratios) is the scale of the sequence ratio `s` that the row's objective is made of.

    logprobs_BT          (B, T) of the learner before its first update; receives no gradient.
    sampler_logprobs_BT  (B, T) as sampled.
    mask_BT              (B, T); non-zero = counts.
    cap                  largest weight, above 0.
    Returns              (B,); min(1, cap) for a row whose mask is empty.
    Raises               ValueError if shapes or dtypes do not fit.
    Source               truncated importance sampling: E. L. Ionides, J. Comput. Graph. Stat. 17, 2008.
    """
    check_rows(logprobs_BT, mask_BT)
    check_shape("sampler_logprobs_BT", sampler_logprobs_BT, tuple(logprobs_BT.shape))
    counted_BT = mask_BT.bool()
    # Hidden places may be NaN on either side.
    gap_BT = torch.where(counted_BT, logprobs_BT, 0.0) - torch.where(counted_BT, sampler_logprobs_BT, 0.0)
    return masked_mean(gap_BT, counted_BT).exp().clamp(max=cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatistics:
    """Statistics of the rewards present in a group (X: any leading axes).

    mean_X, low_X, high_X  NaN where nothing is present.
    std_X                  sample standard deviation (n - 1); 0 for fewer than two.
    uniform_X              bool; all present rewards are equal, a single one and none at all included.
    """

    mean_X: Tensor
    std_X: Tensor
    low_X: Tensor
    high_X: Tensor
    uniform_X: Tensor


def group_mean(rewards_XK: Tensor) -> Tensor:
    """Mean over the last axis without its NaN; NaN where nothing is present. (X, K) -> (X)."""
    present_XK = ~rewards_XK.isnan()
    # 0 / 0 is the NaN that says "nothing present".
    return torch.where(present_XK, rewards_XK, 0.0).sum(dim=-1) / present_XK.sum(dim=-1)


def group_statistics(rewards_XK: Tensor) -> GroupStatistics:
    """Statistics over the last axis K of the rewards that are not NaN. (X, K) -> each (X)."""
    present_XK = ~rewards_XK.isnan()
    count_X = present_XK.sum(dim=-1)
    mean_X = group_mean(rewards_XK)
    squares_X = torch.where(present_XK, rewards_XK - mean_X.unsqueeze(-1), 0.0).square().sum(dim=-1)
    low_X = torch.where(present_XK, rewards_XK, torch.inf).amin(dim=-1)
    high_X = torch.where(present_XK, rewards_XK, -torch.inf).amax(dim=-1)
    return GroupStatistics(
        mean_X=mean_X,
        std_X=(squares_X / (count_X - 1).clamp(min=1)).sqrt(),
        low_X=torch.where(count_X > 0, low_X, torch.nan),
        high_X=torch.where(count_X > 0, high_X, torch.nan),
        uniform_X=low_X >= high_X,
    )


def standardise(rewards_XK: Tensor, baseline_X: Tensor, statistics: GroupStatistics, *, epsilon: float) -> Tensor:
    """Advantage of each reward: `(R - baseline) / (std + epsilon)`, exactly 0 in a uniform group, NaN stays NaN.

    A uniform group teaches nothing, and dividing what rounding or weighting left by epsilon alone would reach 1e5.
    """
    scale_X = statistics.std_X + epsilon
    advantage_XK = (rewards_XK - baseline_X.unsqueeze(-1)) / scale_X.unsqueeze(-1)
    silent_XK = statistics.uniform_X.unsqueeze(-1) & ~rewards_XK.isnan()
    return torch.where(silent_XK, 0.0, advantage_XK)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has exactly this shape (broadcasting would hide a mix-up of rows)."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


def check_rows(logprobs_BT: Tensor, mask_BT: Tensor, **rows_B: Tensor) -> None:
    """Raise ValueError unless log-probabilities, mask and per-row tensors describe the same rows.

    Half precision is refused: its rounding alone moves a sequence ratio further than GSPO's clip range is wide.
    """
    if logprobs_BT.dim() != 2:
        raise ValueError(f"logprobs_BT: expected two axes (row, token), got shape {tuple(logprobs_BT.shape)}")
    if logprobs_BT.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs_BT: expected float32 or float64, got {logprobs_BT.dtype}")
    check_shape("mask_BT", mask_BT, tuple(logprobs_BT.shape))
    for name, row_B in rows_B.items():
        check_shape(name, row_B, (logprobs_BT.shape[0],))


def check_rewards(rewards_PAG: Tensor) -> None:
    """Raise ValueError unless rewards are a floating tensor (P, A, G) that is finite wherever it is not NaN."""
    if rewards_PAG.dim() != 3:
        raise ValueError(
            f"rewards_PAG: expected three axes (prompt, author, rollout), got shape {tuple(rewards_PAG.shape)}"
        )
    if not rewards_PAG.is_floating_point():
        raise ValueError(f"rewards_PAG: expected a floating dtype (NaN marks a missing one), got {rewards_PAG.dtype}")
    if bool(rewards_PAG.isinf().any()):
        raise ValueError("rewards_PAG: holds an infinite reward; mark a rollout that cannot be scored with NaN")


def check_at_least(minimum: float, **values: float) -> None:
    """Raise ValueError unless every named number is at least `minimum` (NaN is not)."""
    for name, value in values.items():
        if not value >= minimum:
            raise ValueError(f"{name}: expected a number of at least {minimum:g}, got {value}")


def check_normaliser(normaliser: float) -> None:
    """Raise ValueError unless the normaliser, a number of rows, is above 0."""
    if not normaliser > 0:
        raise ValueError(f"normaliser: expected the number of rows of the optimizer minibatch, got {normaliser}")
