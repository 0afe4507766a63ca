"""What the trainer asks of an algorithm: credit for rollouts first, then a loss for rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """What each rollout is worth to each learner.

    advantages_LPAG  (L, P, A, G); NaN = this learner has no such row.
    ratio_LA         (L, A) capability of the author over that of the learner; ones where an algorithm has none.
    baselines_LP     (L, P) the baseline that was subtracted; NaN where the learner has no scored rollout to use.
    fell_back_LP     (L, P) bool; the baseline was out of range and has been replaced.
    """

    advantages_LPAG: Tensor
    ratio_LA: Tensor
    baselines_LP: Tensor
    fell_back_LP: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBatch:
    """The rows of one micro-batch of one learner.

    logprobs_BT            (B, T) of the learner now; the only member that receives gradient.
    mask_BT                (B, T) bool; True where a token counts.
    author_logprobs_BT     (B, T) of the author at sampling time, token by token; may hold NaN in foreign rows.
    author_mean_logprob_B  (B,) mean over the author's own tokens.
    advantage_B            (B,)
    own_B                  (B,) bool; the learner is the author.
    ratio_B                (B,) capability of the author over that of the learner, 1 in own rows.
    """

    logprobs_BT: Tensor
    mask_BT: Tensor
    author_logprobs_BT: Tensor
    author_mean_logprob_B: Tensor
    advantage_B: Tensor
    own_B: Tensor
    ratio_B: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """A loss and what happened to each row.

    loss     scalar, with gradient.
    metrics  detached float tensors of shape (B,), so that they can be summed and counted by author:

        ratio             the sequence ratio s (GRPO: mean of the token ratios); 1 for a row without tokens.
        weight            |d loss / d mean log-probability| * normaliser, |advantage| included; 0 where clipped.
        importance        HACPO's foreign rows: c^(1 + alpha) inside the band, 0 outside; NaN in every other row.
        band              -1 below, 0 inside, +1 above the band that stops the gradient; NaN in GRPO, whose clip is
                          per token. An own row is below or above only if its gradient is stopped there.
        clipped_fraction  GRPO only: share of the row's tokens whose gradient is stopped.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Algorithm(Protocol):
    """An algorithm with its hyper-parameters bound; `shares` tells whether learners train on foreign rows."""

    shares: ClassVar[bool]

    def credit(self, rewards_PAG: Tensor, capability_A: Tensor, allowed_LA: Tensor) -> Credit:
        """Value every rollout for every learner.

        rewards_PAG   (P, A, G); NaN = no such rollout, or not scored.
        capability_A  (A,); NaN = no history yet.
        allowed_LA    (L, A) bool, L = A; may learner l use rollouts of author a. An author that is not allowed enters
                      neither the group nor the baseline nor the standard deviation of that learner.
        """
        ...

    def loss(self, batch: LossBatch, *, update_index: int, normaliser: float) -> LossOutput:
        """Loss of one micro-batch.

        update_index  optimizer updates already made within this training step.
        normaliser    rows of the whole optimizer minibatch, those dropped for a zero advantage included.
        """
        ...
