"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300), with two clip distances (arXiv 2503.14476). Own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Credit, LossBatch, LossOutput
from hacrl.algorithms.gspo import clipped_objective, own_credit
from hacrl.algorithms.ops import check_at_least, check_normaliser, check_rows, check_shape, masked_mean


def policy_loss(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    author_logprobs_BT: Tensor,
    advantage_B: Tensor,
    *,
    normaliser: float,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """Token-level clipped policy loss (GRPO Eq. 3 without its KL term).

        r_t  = exp(log pi_learner,t - log pi_author,old,t)
        loss = - sum over rows of mean over tokens of min(r_t A, clamp(r_t, 1 - clip_low, 1 + clip_high) A)
               / normaliser

    logprobs_BT          (B, T) of the learner now; receives gradient.
    mask_BT              (B, T); non-zero = counts. A row without any adds nothing.
    author_logprobs_BT   (B, T) of the same tokens at sampling time.
    advantage_B          (B,)
    normaliser           rows of the whole optimizer minibatch.
    clip_low, clip_high  distances from 1.
    Raises               ValueError if shapes do not fit, log-probabilities are half precision, or a number is
                         out of range.
    """
    check_rows(logprobs_BT, mask_BT, advantage_B=advantage_B)
    check_shape("author_logprobs_BT", author_logprobs_BT, tuple(logprobs_BT.shape))
    check_normaliser(normaliser)
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    counted_BT = mask_BT.bool()
    learner_BT = torch.where(counted_BT, logprobs_BT, 0.0)
    author_BT = torch.where(counted_BT, author_logprobs_BT.detach().to(logprobs_BT.dtype), 0.0)
    log_ratio_BT = learner_BT - author_BT
    objective = clipped_objective(log_ratio_BT, advantage_B.unsqueeze(1), clip_low=clip_low, clip_high=clip_high)
    ratio_B = masked_mean(log_ratio_BT.detach().exp(), counted_BT)
    return LossOutput(
        loss=-masked_mean(objective.value, counted_BT).sum() / normaliser,
        metrics={
            "ratio": torch.where(counted_BT.any(dim=-1), ratio_B, 1.0),
            "weight": masked_mean(objective.weight, counted_BT),
            "importance": torch.full_like(ratio_B, torch.nan),
            "band": torch.full_like(ratio_B, torch.nan),
            "clipped_fraction": masked_mean(objective.band.abs(), counted_BT),
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Grpo:
    """GRPO with its hyper-parameters; its advantages are GSPO's."""

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
            batch.author_logprobs_BT,
            batch.advantage_B,
            normaliser=normaliser,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
