"""Naive sharing, the control of HACPO's Table 1: every row, joint mean and standard deviation, GSPO's clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hacrl.algorithms import gspo
from hacrl.algorithms.algorithm import Credit, LossBatch, LossOutput
from hacrl.algorithms.ops import check_rewards, check_shape, group_statistics, standardise


def advantages(rewards_PAG: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Advantage within the joint group of all authors: `(R - joint mean) / (joint std + epsilon)`, std with n - 1.

    rewards_PAG  (P, A, G); NaN = missing: it enters no statistic and its advantage is NaN.
    Returns      values_PAG (P, A, G) and baselines_P (P,). A joint group whose present rewards are all equal, or with
                 fewer than two of them, gives exactly 0.
    Raises       ValueError if rewards_PAG is not a floating (P, A, G) or holds an infinity.
    """
    check_rewards(rewards_PAG)
    rewards_PK = rewards_PAG.flatten(start_dim=1)
    statistics = group_statistics(rewards_PK)
    values_PK = standardise(rewards_PK, statistics.mean_X, statistics, epsilon=epsilon)
    return values_PK.reshape(rewards_PAG.shape), statistics.mean_X


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
    """GSPO's loss over own and foreign rows alike; arguments, gradient and errors as in `gspo.policy_loss`."""
    return gspo.policy_loss(
        logprobs_BT,
        mask_BT,
        author_mean_logprob_B,
        advantage_B,
        normaliser=normaliser,
        clip_low=clip_low,
        clip_high=clip_high,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Naive:
    """Naive sharing with its hyper-parameters."""

    shares: ClassVar[bool] = True

    clip_low: float
    clip_high: float
    epsilon: float

    def credit(self, rewards_PAG: Tensor, capability_A: Tensor, allowed_LA: Tensor) -> Credit:  # noqa: ARG002
        check_rewards(rewards_PAG)
        authors = rewards_PAG.shape[1]
        check_shape("allowed_LA", allowed_LA, (authors, authors))
        usable_LPAG = torch.where(allowed_LA.bool()[:, None, :, None], rewards_PAG, torch.nan)
        learners = [advantages(usable_PAG, epsilon=self.epsilon) for usable_PAG in usable_LPAG]
        baselines_LP = torch.stack([baseline_P for _, baseline_P in learners])
        return Credit(
            advantages_LPAG=torch.stack([values_PAG for values_PAG, _ in learners]),
            ratio_LA=rewards_PAG.new_ones(authors, authors),
            baselines_LP=baselines_LP,
            fell_back_LP=torch.zeros_like(baselines_LP, dtype=torch.bool),
        )

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
