"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071). Sequence ratio, own rows.

HACPO keeps this objective for a learner's own rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Credit, LossBatch, LossOutput
from hacrl.algorithms.ops import (
    check_at_least,
    check_normaliser,
    check_rewards,
    check_rows,
    check_shape,
    group_statistics,
    sequence_log_ratio,
    standardise,
)


def advantages(rewards_PAG: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Advantage within each author's own group (GSPO Eq. 6).

        advantage = (R - mean of the group) / (std of the group + epsilon),  std with n - 1

    rewards_PAG  (P, A, G); NaN = missing: it enters no statistic and its advantage is NaN.
    Returns      values_PAG (P, A, G) and baselines_PA (P, A). A group whose present rewards are all equal, or with
                 fewer than two of them, gives exactly 0.
    Raises       ValueError if rewards_PAG is not a floating (P, A, G) or holds an infinity.
    """
    check_rewards(rewards_PAG)
    statistics = group_statistics(rewards_PAG)
    return standardise(rewards_PAG, statistics.mean_X, statistics, epsilon=epsilon), statistics.mean_X


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What each element adds to the objective (to be maximised), and what became of its gradient.

    value  with gradient.
    weight detached; |d value / d log ratio|.
    band   detached; -1 or +1 where the clip below or above stops the gradient, else 0.
    """

    value: Tensor
    weight: Tensor
    band: Tensor


def clipped_objective(log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> Objective:
    """`min(s A, clamp(s, 1 - clip_low, 1 + clip_high) A)` for each element (GSPO Eq. 5).

    log_ratio  log s, any shape; receives gradient `s A` unless the clip decides, and exactly 0 then.
    advantage  broadcastable to it; receives no gradient.

    The clipped elements leave before exp(): where s overflows, 0 * inf would make their zero gradient NaN.
    """
    advantage = advantage.detach().to(log_ratio.dtype)
    ratio = log_ratio.detach().exp()
    below = (advantage < 0) & (ratio < 1 - clip_low)
    above = (advantage > 0) & (ratio > 1 + clip_high)
    still = below | above | (advantage == 0)
    moving = torch.where(still, 0.0, log_ratio).exp() * advantage
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return Objective(
        value=torch.where(still, held, moving),
        weight=torch.where(still, 0.0, ratio * advantage.abs()),
        band=above.to(ratio.dtype) - below.to(ratio.dtype),
    )


def policy_loss(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    author_mean_logprob_B: Tensor,
    advantage_B: Tensor,
    *,
    normaliser: float,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """Sequence-level clipped policy loss (GSPO Eq. 5).

        loss = - sum over rows of min(s A, clamp(s, 1 - clip_low, 1 + clip_high) A) / normaliser

    logprobs_BT            (B, T) of the learner now; receives gradient.
    mask_BT                (B, T); non-zero = counts. A row without any adds nothing.
    author_mean_logprob_B  (B,) mean log-probability at sampling time over the author's tokens.
    advantage_B            (B,)
    normaliser             rows of the whole optimizer minibatch, so that how it is split cannot change the gradient.
    clip_low, clip_high    distances from 1.
    Raises                 ValueError if shapes do not fit, log-probabilities are half precision, or a number is
                           out of range.
    """
    check_rows(logprobs_BT, mask_BT, author_mean_logprob_B=author_mean_logprob_B, advantage_B=advantage_B)
    check_normaliser(normaliser)
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    advantage_B = torch.where(mask_BT.bool().any(dim=-1), advantage_B, 0.0)
    log_ratio_B = sequence_log_ratio(logprobs_BT, mask_BT, author_mean_logprob_B)
    objective = clipped_objective(log_ratio_B, advantage_B, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(
        loss=-objective.value.sum() / normaliser,
        metrics={
            "ratio": log_ratio_B.detach().exp(),
            "weight": objective.weight,
            "importance": torch.full_like(objective.weight, torch.nan),
            "band": objective.band,
        },
    )


def own_credit(rewards_PAG: Tensor, allowed_LA: Tensor, *, epsilon: float) -> Credit:
    """Credit where every learner has its own rows only: the other authors' places are NaN."""
    check_rewards(rewards_PAG)
    authors = rewards_PAG.shape[1]
    check_shape("allowed_LA", allowed_LA, (authors, authors))
    own_LA = torch.diag_embed(allowed_LA.bool().diagonal())
    values_PAG, baselines_PA = advantages(rewards_PAG, epsilon=epsilon)
    baselines_LP = torch.where(own_LA.diagonal().unsqueeze(1), baselines_PA.T, torch.nan)
    return Credit(
        advantages_LPAG=torch.where(own_LA[:, None, :, None], values_PAG, torch.nan),
        ratio_LA=torch.ones_like(own_LA, dtype=rewards_PAG.dtype),
        baselines_LP=baselines_LP,
        fell_back_LP=torch.zeros_like(baselines_LP, dtype=torch.bool),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gspo:
    """GSPO with its hyper-parameters."""

    shares: ClassVar[bool] = False

    clip_low: float
    clip_high: float
    epsilon: float

    def credit(self, rewards_PAG: Tensor, capability_A: Tensor, allowed_LA: Tensor) -> Credit:  # noqa: ARG002
        return own_credit(rewards_PAG, allowed_LA, epsilon=self.epsilon)

    def loss(self, batch: LossBatch, *, update_index: int, normaliser: float) -> LossOutput:  # noqa: ARG002
        return policy_loss(
            batch.logprobs_BT,
            batch.mask_BT,
            batch.author_mean_logprob_B,
            batch.advantage_B,
            normaliser=normaliser,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
