"""Rows for the loss tests: small batches whose sequence ratios are known, and the calls that take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hacrl.algorithms import gspo, hacpo
from hacrl.algorithms.algorithm import LossOutput

# None lies on a bound of the settings below: how a padded sum rounds cannot decide a test.
LOG_RATIOS = [-2.0, -0.5, -0.15, -0.05, -0.002, -0.00035, -0.0001, 0.0001, 0.00035, 0.002, 0.15, 1.0]

CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}
HACPO = {**CLIP, "delta": 0.2, "delta_step": 0.025, "alpha": 1.0, "update_index": 1}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A batch in float64, as the losses take it."""

    logprobs_BT: Tensor
    mask_BT: Tensor
    author_mean_logprob_B: Tensor
    advantage_B: Tensor
    own_B: Tensor
    ratio_B: Tensor

    def __getitem__(self, index: Any) -> Rows:
        return Rows(**{name: value[index] for name, value in vars(self).items()})

    def with_(self, **changes: Tensor) -> Rows:
        return replace(self, **changes)


def rows_of(
    log_ratios: list[float],
    *,
    lengths: list[int] | None = None,
    advantages: list[float] | None = None,
    own: list[bool] | None = None,
    ratios: list[float] | None = None,
    seed: int = 0,
) -> Rows:
    """Rows with the given log s. The author's mean is placed that far from the learner's."""
    count = len(log_ratios)
    lengths = lengths or [3] * count
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(*lengths, 1)) < torch.tensor(lengths)[:, None]
    logprobs = -3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64) - 0.01
    means = torch.stack(
        [row[keep].mean() if keep.any() else row.new_zeros(()) for row, keep in zip(logprobs, mask, strict=True)]
    )
    return Rows(
        logprobs_BT=logprobs,
        mask_BT=mask,
        author_mean_logprob_B=means - torch.tensor(log_ratios, dtype=torch.float64),
        advantage_B=torch.tensor(advantages or [1.0] * count, dtype=torch.float64),
        own_B=torch.tensor([False] * count if own is None else own),
        ratio_B=torch.tensor(ratios or [1.0] * count, dtype=torch.float64),
    )


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 1) -> Rows:
    """Own and foreign rows of mixed length (empty ones too), on all sides of the bands."""
    count = draw(st.integers(min_rows, 6))

    def each(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(strategy, min_size=count, max_size=count))

    return rows_of(
        each(st.sampled_from(LOG_RATIOS)),
        lengths=each(st.integers(0, 6)),
        advantages=each(st.sampled_from([-1.5, -0.3, 0.0, 0.4, 2.0])),
        own=each(st.booleans()),
        ratios=each(st.sampled_from([0.1, 0.5, 1.0, 3.0])),
        seed=draw(st.integers(0, 99)),
    )


def hacpo_loss(rows: Rows, *, normaliser: float = 8, **changes: float) -> LossOutput:
    return hacpo.policy_loss(
        rows.logprobs_BT,
        rows.mask_BT,
        rows.author_mean_logprob_B,
        rows.advantage_B,
        rows.own_B,
        rows.ratio_B,
        normaliser=normaliser,
        **{**HACPO, **changes},  # pyright: ignore[reportArgumentType]
    )


def truncated_loss(rows: Rows, *, normaliser: float = 8, **changes: float) -> LossOutput:
    """HACPO with truncated importance weights in place of the band."""
    return hacpo.truncated_policy_loss(
        rows.logprobs_BT,
        rows.mask_BT,
        rows.author_mean_logprob_B,
        rows.advantage_B,
        rows.own_B,
        rows.ratio_B,
        normaliser=normaliser,
        **{**CLIP, "alpha": 1.0, **changes},
    )


def gspo_loss(rows: Rows, *, normaliser: float = 8, **changes: float) -> LossOutput:
    return gspo.policy_loss(
        rows.logprobs_BT,
        rows.mask_BT,
        rows.author_mean_logprob_B,
        rows.advantage_B,
        normaliser=normaliser,
        **{**CLIP, **changes},
    )


def run(loss: Any, rows: Rows, **settings: float) -> tuple[LossOutput, Tensor]:
    """The output of a loss function and the gradient of its log-probabilities."""
    leaf = rows.logprobs_BT.clone().requires_grad_()
    output = loss(rows.with_(logprobs_BT=leaf), **settings)
    (gradient,) = torch.autograd.grad(output.loss, leaf)
    return output, gradient


def row_gradient(gradient: Tensor) -> Tensor:
    """d loss / d mean log-probability of each row: its tokens share it in equal parts."""
    return gradient.sum(dim=-1)


def difference_quotient(function: Any, values: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences of a scalar function, entry by entry."""
    result = torch.zeros_like(values)
    for index in range(values.numel()):
        shift = torch.zeros_like(values).flatten()
        shift[index] = step
        shift = shift.reshape(values.shape)
        result.view(-1)[index] = (float(function(values + shift)) - float(function(values - shift))) / (2 * step)
    return result
