"""HACPO: Heterogeneous Agent Collaborative Policy Optimization (arXiv 2603.02604), in the order of the paper.

    Eq. 6-8    agent-capability-aware advantage          learner_advantages, advantages
    Eq. 10     capability discrepancy coefficient        ratio_B in foreign_objective
    Eq. 11-12  exponential importance sampling           alpha   in foreign_objective
    Eq. 13-14  stepwise clipping                         stepwise_band
               objective                                 policy_loss
    not in the paper: truncated importance weights        truncated_objective, truncated_policy_loss

Capabilities themselves (Eq. 6-7) are in `capability.py`; own rows keep GSPO's objective (`gspo.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Credit, LossBatch, LossOutput
from hacrl.algorithms.capability import capability_ratios
from hacrl.algorithms.gspo import Objective, clipped_objective
from hacrl.algorithms.ops import (
    check_at_least,
    check_normaliser,
    check_rewards,
    check_rows,
    check_shape,
    group_mean,
    group_statistics,
    sequence_log_ratio,
    standardise,
)


def learner_advantages(
    rewards_PAG: Tensor, ratio_A: Tensor, learner: int, *, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantage of every rollout for one learner, over the joint group of all authors (Eq. 6-8).

        baseline  = mean over rollouts of R / ratio[author]      (each reward at the learner's level)
        advantage = (R - baseline) / (std of the joint R + epsilon),  std unweighted, with n - 1

    The learner's baseline serves own and foreign rollouts alike (Eq. 50 and the authors' program).
    Two guards, both from the authors' program:
    a joint group whose present rewards are all equal, or with fewer than two of them, gives exactly 0;
    a baseline outside the range of the present rewards is replaced by the mean of the learner's own rewards, or by
    the plain joint mean if it has none, since otherwise even the best answer would be pushed down (or the worst up).

    rewards_PAG  (P, A, G); NaN = missing: it enters no statistic and its advantage is NaN.
    ratio_A      (A,) capability of each author over the learner's.
    learner      the learner's place on the author axis.
    Returns      values_PAG (P, A, G), baseline_P (P,) and fell_back_P (P,) bool: the second guard has acted.
    """
    level_PAG = rewards_PAG / ratio_A.to(rewards_PAG.dtype)[:, None]
    rewards_PK = rewards_PAG.flatten(start_dim=1)
    group = group_statistics(rewards_PK)
    weighted_P = group_mean(level_PAG.flatten(start_dim=1))
    outside_P = (weighted_P < group.low_X) | (weighted_P > group.high_X)
    fell_back_P = outside_P & ~group.uniform_X
    own_P = group_mean(rewards_PAG[:, learner])
    substitute_P = torch.where(own_P.isnan() | group.uniform_X, group.mean_X, own_P)
    baseline_P = torch.where(outside_P | group.uniform_X, substitute_P, weighted_P)
    values_PK = standardise(rewards_PK, baseline_P, group, epsilon=epsilon)
    return values_PK.reshape(rewards_PAG.shape), baseline_P, fell_back_P


def advantages(rewards_PAG: Tensor, ratio_LA: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Agent-capability-aware advantage of every rollout for every learner (Eq. 6-8); see `learner_advantages`.

    rewards_PAG  (P, A, G); NaN = no such rollout, or not scored.
    ratio_LA     (L, A) from `capability_ratios`, L = A; learner l is author l.
    Returns      values_LPAG (L, P, A, G), NaN where the reward is NaN; baselines_LP (L, P), NaN where a prompt has no
                 reward at all; fell_back_LP (L, P) bool.
    Raises       ValueError if shapes do not fit, rewards are not floating or infinite, or a ratio is not above 0.
    """
    check_rewards(rewards_PAG)
    check_shape("ratio_LA", ratio_LA, (rewards_PAG.shape[1], rewards_PAG.shape[1]))
    if not bool((ratio_LA > 0).all()):
        raise ValueError(f"ratio_LA: expected ratios above 0, got {ratio_LA}")
    learners = [
        learner_advantages(rewards_PAG, ratio_A, learner, epsilon=epsilon) for learner, ratio_A in enumerate(ratio_LA)
    ]
    values, baselines, fell_back = zip(*learners, strict=True)
    return torch.stack(values), torch.stack(baselines), torch.stack(fell_back)


def stepwise_band(*, update_index: int, delta: float, delta_step: float) -> tuple[float, float]:
    """Where a foreign row's sequence ratio may lie (Eq. 13-14): `[min(1, 1 - delta + m * delta_step), 1]`.

    update_index  m, optimizer updates already made within this training step; each narrows the band.
    delta         1 minus the first lower bound. `math.inf` opens both sides: no clipping of foreign rows at all.
    delta_step    0 keeps the band fixed. From m >= delta / delta_step on, the band is closed and only s = 1 passes.
    """
    check_at_least(0, update_index=update_index, delta=delta, delta_step=delta_step)
    if delta == math.inf:
        return -math.inf, math.inf
    return min(1.0, 1.0 - delta + update_index * delta_step), 1.0


def foreign_objective(
    log_ratio_B: Tensor, advantage_B: Tensor, ratio_B: Tensor, *, lower: float, upper: float, alpha: float
) -> tuple[Objective, Tensor]:
    """What foreign rows add to the objective (Eq. 10-14): `c sg(c)^alpha ratio A` with `c = clamp(s, lower, upper)`.

    There is no `min()` with the unclipped term: outside the band the gradient is exactly 0, on both sides and for
    either sign of the advantage.

    log_ratio_B  (B,) log s; receives gradient through c alone, and only inside the band.
    advantage_B  (B,); receives no gradient.
    ratio_B      (B,) capability of the author over the learner's (Eq. 10); stronger authors weigh more.
    alpha        exponent of the importance weight sg(c)^alpha (Eq. 12), sg = no gradient; 0 removes it.
    Returns      the objective, and importance_B (B,): c^(1 + alpha) inside the band, 0 outside.
    """
    ratio_of_policies_B = log_ratio_B.detach().exp()
    below_B, above_B = ratio_of_policies_B < lower, ratio_of_policies_B > upper
    inside_B = ~(below_B | above_B)
    clipped_B = ratio_of_policies_B.clamp(lower, upper)
    # As in GSPO's objective, rows outside leave before exp(), or an overflowing s would make their gradient NaN.
    moving_B = torch.where(inside_B, log_ratio_B, 0.0).exp()
    scale_B = clipped_B**alpha * ratio_B * advantage_B
    importance_B = torch.where(inside_B, clipped_B ** (1 + alpha), 0.0)
    objective = Objective(
        value=torch.where(inside_B, moving_B, clipped_B) * scale_B,
        weight=importance_B * ratio_B * advantage_B.abs(),
        band=above_B.to(clipped_B.dtype) - below_B.to(clipped_B.dtype),
    )
    return objective, importance_B


def truncated_objective(
    log_ratio_B: Tensor, advantage_B: Tensor, ratio_B: Tensor, *, alpha: float
) -> tuple[Objective, Tensor]:
    """What foreign rows add without a band (not in the paper): `sg(t)^(1 + alpha) ratio A log s` with `t = min(s, 1)`.

    The gradient is that of `foreign_objective` inside its band, and goes on outside: below, where a small s^(1 + alpha)
    damps a row and no wall cuts it off, and above, where the weight stays at 1 (truncated importance sampling).

    log_ratio_B, advantage_B, ratio_B, alpha  as in `foreign_objective`; log_ratio_B receives gradient in every row.
    Returns  the objective, whose value is that of `c sg(c)^alpha ratio A` with c = t, and importance_B (B,):
             t^(1 + alpha).
    Source   the truncation: E. L. Ionides, J. Comput. Graph. Stat. 17, 2008.
    """
    importance_B = log_ratio_B.detach().clamp(max=0.0).mul(1 + alpha).exp()
    scale_B = importance_B * ratio_B * advantage_B
    objective = Objective(
        # 1 in value; its gradient is that of log s.
        value=scale_B * (1.0 + log_ratio_B - log_ratio_B.detach()),
        weight=scale_B.abs(),
        band=torch.zeros_like(scale_B),
    )
    return objective, importance_B


def policy_loss(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    author_mean_logprob_B: Tensor,
    advantage_B: Tensor,
    own_B: Tensor,
    ratio_B: Tensor,
    *,
    update_index: int,
    normaliser: float,
    clip_low: float,
    clip_high: float,
    delta: float,
    delta_step: float,
    alpha: float,
) -> LossOutput:
    """HACPO's policy loss over own and foreign rows.

        own      min(s A, clamp(s, 1 - clip_low, 1 + clip_high) A)                       (GSPO)
        foreign  c sg(c)^alpha ratio A,  c = clamp(s, min(1, 1 - delta + m delta_step), 1)  (Eq. 10-14)
        loss     - sum over rows / normaliser

    With own rows only, so with a single agent, it is GSPO in value and gradient.

    logprobs_BT            (B, T) of the learner now; receives gradient.
    mask_BT                (B, T); non-zero = counts. A row without any adds nothing.
    author_mean_logprob_B  (B,) mean log-probability at sampling time over the author's tokens.
    advantage_B            (B,) from `advantages`.
    own_B                  (B,) bool; the learner is the author.
    ratio_B                (B,) capability of the author over the learner's; not read in own rows.
    update_index           m, optimizer updates already made within this training step.
    normaliser             rows of the whole optimizer minibatch, those dropped for a zero advantage included.
    clip_low, clip_high    own rows: distances from 1.
    delta, delta_step      foreign rows: see `stepwise_band`; delta = math.inf is the ablation without clipping.
    alpha                  foreign rows: exponent of the importance weight; 0 removes it.
    Raises                 ValueError if shapes do not fit, log-probabilities are half precision, or a number is
                           out of range.
    """
    lower, upper = stepwise_band(update_index=update_index, delta=delta, delta_step=delta_step)
    return _loss_of_rows(
        LossRows(logprobs_BT, mask_BT, author_mean_logprob_B, advantage_B, own_B, ratio_B),
        functools.partial(foreign_objective, lower=lower, upper=upper, alpha=alpha),
        normaliser=normaliser,
        clip_low=clip_low,
        clip_high=clip_high,
        alpha=alpha,
    )


def truncated_policy_loss(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    author_mean_logprob_B: Tensor,
    advantage_B: Tensor,
    own_B: Tensor,
    ratio_B: Tensor,
    *,
    normaliser: float,
    clip_low: float,
    clip_high: float,
    alpha: float,
) -> LossOutput:
    """`policy_loss` with `truncated_objective` for foreign rows: no band, so neither delta nor the update's number.

    Arguments, gradient and errors as in `policy_loss`.
    """
    return _loss_of_rows(
        LossRows(logprobs_BT, mask_BT, author_mean_logprob_B, advantage_B, own_B, ratio_B),
        functools.partial(truncated_objective, alpha=alpha),
        normaliser=normaliser,
        clip_low=clip_low,
        clip_high=clip_high,
        alpha=alpha,
    )


class LossRows(NamedTuple):
    """The tensors of `policy_loss`, which explains each."""

    logprobs_BT: Tensor
    mask_BT: Tensor
    author_mean_logprob_B: Tensor
    advantage_B: Tensor
    own_B: Tensor
    ratio_B: Tensor


def _loss_of_rows(
    rows: LossRows,
    foreign_rows: Callable[[Tensor, Tensor, Tensor], tuple[Objective, Tensor]],
    *,
    normaliser: float,
    clip_low: float,
    clip_high: float,
    alpha: float,
) -> LossOutput:
    """Own rows by GSPO, the others by `foreign_rows(log_ratio_B, advantage_B, ratio_B)`."""
    check_rows(
        rows.logprobs_BT,
        rows.mask_BT,
        author_mean_logprob_B=rows.author_mean_logprob_B,
        advantage_B=rows.advantage_B,
        own_B=rows.own_B,
        ratio_B=rows.ratio_B,
    )
    check_normaliser(normaliser)
    check_at_least(0, clip_low=clip_low, clip_high=clip_high, alpha=alpha)
    dtype = rows.logprobs_BT.dtype
    own_B = rows.own_B.bool()
    empty_B = ~rows.mask_BT.bool().any(dim=-1)
    advantage_B = torch.where(empty_B, 0.0, rows.advantage_B).detach().to(dtype)
    ratio_B = torch.where(own_B | empty_B, 1.0, rows.ratio_B).detach().to(dtype)
    log_ratio_B = sequence_log_ratio(rows.logprobs_BT, rows.mask_BT, rows.author_mean_logprob_B)
    # Each objective sees s = 1 in the other's rows: an overflow there would reach the gradient through where().
    own = clipped_objective(torch.where(own_B, log_ratio_B, 0.0), advantage_B, clip_low=clip_low, clip_high=clip_high)
    foreign, importance_B = foreign_rows(torch.where(own_B, 0.0, log_ratio_B), advantage_B, ratio_B)
    return LossOutput(
        loss=-torch.where(own_B, own.value, foreign.value).sum() / normaliser,
        metrics={
            "ratio": log_ratio_B.detach().exp(),
            "weight": torch.where(own_B, own.weight, foreign.weight),
            "importance": torch.where(own_B, torch.nan, importance_B),
            "band": torch.where(own_B, own.band, foreign.band),
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hacpo:
    """HACPO with its hyper-parameters and the switches of the paper's ablation, each of which chooses an argument.

    capability_advantage    False: ratios of 1 in the baseline, so the plain joint mean (without Eq. 6-8).
    capability_coefficient  False: ratios of 1 on foreign rows (without Eq. 10).
    importance_weighting    False: alpha = 0 (without Eq. 12).
    clipping                `stepwise` (Eq. 13-14), `fixed`: delta_step = 0, `none`: delta = math.inf; not in the
                            paper: `truncated`, which is `truncated_policy_loss`.
    """

    shares: ClassVar[bool] = True

    alpha: float
    delta: float
    delta_step: float
    clip_low: float
    clip_high: float
    epsilon: float
    ratio_min: float
    ratio_max: float
    capability_advantage: bool
    capability_coefficient: bool
    importance_weighting: bool
    clipping: Literal["stepwise", "fixed", "none", "truncated"]

    def credit(self, rewards_PAG: Tensor, capability_A: Tensor, allowed_LA: Tensor) -> Credit:
        check_rewards(rewards_PAG)
        authors = rewards_PAG.shape[1]
        check_shape("capability_A", capability_A, (authors,))
        check_shape("allowed_LA", allowed_LA, (authors, authors))
        ratio_LA = capability_ratios(capability_A, ratio_min=self.ratio_min, ratio_max=self.ratio_max)
        level_LA = ratio_LA if self.capability_advantage else torch.ones_like(ratio_LA)
        usable_LPAG = torch.where(allowed_LA.bool()[:, None, :, None], rewards_PAG, torch.nan)
        values, baselines, fell_back = zip(
            *(
                learner_advantages(usable_LPAG[learner], level_LA[learner], learner, epsilon=self.epsilon)
                for learner in range(authors)
            ),
            strict=True,
        )
        return Credit(
            advantages_LPAG=torch.stack(values),
            ratio_LA=ratio_LA,
            baselines_LP=torch.stack(baselines),
            fell_back_LP=torch.stack(fell_back),
        )

    def loss(self, batch: LossBatch, *, update_index: int, normaliser: float) -> LossOutput:
        rows = LossRows(
            batch.logprobs_BT,
            batch.mask_BT,
            batch.author_mean_logprob_B,
            batch.advantage_B,
            batch.own_B,
            batch.ratio_B if self.capability_coefficient else torch.ones_like(batch.ratio_B),
        )
        alpha = self.alpha if self.importance_weighting else 0.0
        if self.clipping == "truncated":
            return truncated_policy_loss(
                *rows, normaliser=normaliser, clip_low=self.clip_low, clip_high=self.clip_high, alpha=alpha
            )
        return policy_loss(
            *rows,
            update_index=update_index,
            normaliser=normaliser,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            delta=math.inf if self.clipping == "none" else self.delta,
            delta_step=self.delta_step if self.clipping == "stepwise" else 0.0,
            alpha=alpha,
        )
