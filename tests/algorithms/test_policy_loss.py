"""The policy losses: values, gradients, and what must not change them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_rows import (
    CLIP,
    LOG_RATIOS,
    Rows,
    batches,
    difference_quotient,
    gspo_loss,
    hacpo_loss,
    row_gradient,
    rows_of,
    run,
    truncated_loss,
)
from torch import Tensor

from hacrl.algorithms import grpo, hacpo, naive
from hacrl.algorithms.algorithm import LossBatch, LossOutput
from hacrl.algorithms.grpo import Grpo
from hacrl.algorithms.gspo import Gspo, clipped_objective
from hacrl.algorithms.hacpo import Hacpo, stepwise_band
from hacrl.algorithms.naive import Naive

NAN, INF = math.nan, math.inf
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def naive_loss(rows: Rows, *, normaliser: float = 8) -> LossOutput:
    return naive.policy_loss(
        rows.logprobs_BT,
        rows.mask_BT,
        rows.author_mean_logprob_B,
        rows.advantage_B,
        normaliser=normaliser,
        **CLIP,
    )


def author_tokens(rows: Rows) -> Tensor:
    """Token log-probabilities of an author whose mean is the row's, unevenly spread."""
    mask = rows.mask_BT.bool()
    learner = torch.where(mask, rows.logprobs_BT.detach(), 0.0)
    log_ratio = learner.sum(1) / mask.sum(1).clamp(min=1) - rows.author_mean_logprob_B.detach()
    tilt = torch.linspace(-0.4, 0.4, mask.shape[1], dtype=torch.float64)
    return torch.where(mask, learner - log_ratio[:, None] + tilt, NAN)


def grpo_loss(rows: Rows, *, normaliser: float = 8, author: Tensor | None = None, **changes: float) -> LossOutput:
    return grpo.policy_loss(
        rows.logprobs_BT,
        rows.mask_BT,
        author_tokens(rows) if author is None else author,
        rows.advantage_B,
        normaliser=normaliser,
        **{**WIDE, **changes},
    )


LOSSES: dict[str, Any] = {
    "hacpo": hacpo_loss,
    "truncated": truncated_loss,
    "gspo": gspo_loss,
    "naive": naive_loss,
    "grpo": grpo_loss,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def close(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and bool(torch.allclose(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True))


def foreign(log_ratio: float, advantage: float = 1.0, ratio: float = 1.0, **settings_: float) -> tuple[float, float]:
    """Objective and gradient of one foreign row of three tokens."""
    rows = rows_of([log_ratio], advantages=[advantage], ratios=[ratio])
    output, gradient = run(hacpo_loss, rows, normaliser=1, **settings_)
    return -float(output.loss.detach()), -float(row_gradient(gradient))


# Own rows: GSPO.


@given(batches())
@quick
def test_own_rows_alone_make_hacpo_gspo(rows: Rows) -> None:
    rows = rows.with_(own_B=torch.ones_like(rows.own_B), ratio_B=torch.full_like(rows.ratio_B, NAN))
    hacpo_output, hacpo_gradient = run(hacpo_loss, rows)
    gspo_output, gspo_gradient = run(gspo_loss, rows)
    assert hacpo_output.loss.equal(gspo_output.loss)
    assert hacpo_gradient.equal(gspo_gradient)
    for name, expected in gspo_output.metrics.items():
        assert torch.equal(hacpo_output.metrics[name].nan_to_num(9), expected.nan_to_num(9)), name


@given(batches())
@quick
def test_naive_is_gspo_over_every_row(rows: Rows) -> None:
    naive_output, naive_gradient = run(naive_loss, rows)
    gspo_output, gspo_gradient = run(gspo_loss, rows)
    assert naive_output.loss.equal(gspo_output.loss)
    assert naive_gradient.equal(gspo_gradient)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", LOG_RATIOS)
def test_gspo_value_and_gradient_by_hand(log_ratio: float, advantage: float) -> None:
    rows = rows_of([log_ratio], advantages=[advantage])
    output, gradient = run(gspo_loss, rows, normaliser=4)
    s = math.exp(log_ratio)
    clipped = min(max(s, 1 - 3e-4), 1 + 4e-4)
    assert float(output.loss.detach()) == pytest.approx(-min(s * advantage, clipped * advantage) / 4, rel=1e-12)
    stopped = (advantage > 0 and s > 1 + 4e-4) or (advantage < 0 and s < 1 - 3e-4)
    expected = 0.0 if stopped else -s * advantage / 4
    assert float(row_gradient(gradient)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert float(output.metrics["ratio"]) == pytest.approx(s, rel=1e-12)
    assert float(output.metrics["band"]) == (0 if not stopped else math.copysign(1, advantage))
    assert output.metrics["importance"].isnan().all()


@pytest.mark.parametrize(("log_ratio", "advantage"), [(math.log(0.5), -1.0), (math.log(2.0), 1.0)])
def test_gspo_bound_itself_is_not_clipped(log_ratio: float, advantage: float) -> None:
    rows = rows_of([0.0], lengths=[1], advantages=[advantage])
    rows = rows.with_(
        logprobs_BT=torch.tensor([[log_ratio]], dtype=torch.float64), author_mean_logprob_B=torch.zeros(1).double()
    )
    output, gradient = run(gspo_loss, rows, clip_low=0.5, clip_high=1.0)
    assert float(output.metrics["ratio"]) in (0.5, 2.0)
    assert output.metrics["band"].tolist() == [0.0]
    assert gradient.all()


@pytest.mark.parametrize("option", ["clip_low", "clip_high"])
@pytest.mark.parametrize("name", ["hacpo", "gspo", "grpo"])
def test_each_clip_distance_changes_the_result(name: str, option: str) -> None:
    log_ratios = [-0.15, 0.15, -0.15, 0.15]
    rows = rows_of(log_ratios, advantages=[-1.0, 1.0, 1.0, -1.0], own=[True] * 4)
    loss: Any = LOSSES[name]
    if name == "grpo":
        loss = partial(grpo_loss, author=rows.logprobs_BT - torch.tensor(log_ratios, dtype=torch.float64)[:, None])
    settings_ = {"clip_low": 0.01, "clip_high": 0.01}
    _, narrow = run(loss, rows, **settings_)
    _, wide = run(loss, rows, **{**settings_, option: 10.0})
    changed = (narrow != wide).any(dim=1).tolist()
    assert changed == ([True, False, False, False] if option == "clip_low" else [False, True, False, False])


@pytest.mark.parametrize("log_ratio", [-0.5, 0.5])
def test_row_without_advantage_is_never_counted_as_clipped(log_ratio: float) -> None:
    rows = rows_of([log_ratio, log_ratio], advantages=[0.0, math.copysign(1, log_ratio)], own=[True, True])
    author = rows.logprobs_BT - log_ratio
    for output in (hacpo_loss(rows), gspo_loss(rows)):
        assert output.metrics["band"].tolist() == [0.0, math.copysign(1, log_ratio)]
    assert grpo_loss(rows, author=author).metrics["clipped_fraction"].tolist() == [0.0, 1.0]


def test_first_update_on_own_samples_has_ratio_one() -> None:
    rows = rows_of([0.0, 0.0], lengths=[1, 4], advantages=[1.0, -1.0], own=[True, True])
    for output in (hacpo_loss(rows), gspo_loss(rows), grpo_loss(rows, author=rows.logprobs_BT)):
        assert output.metrics["ratio"].tolist() == [1.0, 1.0]
        # Bug case 12: the loss is 0 by construction here; the gradient is not.
        assert float(output.loss) == 0.0
        assert output.metrics["weight"].tolist() == [1.0, 1.0]


def test_sequence_ratio_gives_every_token_of_a_row_the_same_gradient() -> None:
    rows = rows_of([0.1, -0.2], lengths=[2, 6], advantages=[1.0, -0.5], own=[True, True])
    _, gradient = run(gspo_loss, rows, clip_low=INF, clip_high=INF)
    assert gradient[0].tolist() == pytest.approx([-math.exp(0.1) / 2 / 8] * 2 + [0.0] * 4)
    assert gradient[1].tolist() == pytest.approx([0.5 * math.exp(-0.2) / 6 / 8] * 6)


# Finite differences.


@pytest.mark.parametrize("settings_", [WIDE, CLIP], ids=["inside the clip", "across the clip"])
@every_loss
def test_gradient_is_the_difference_quotient_for_rows_of_length_2_and_6(loss: Any, settings_: dict[str, float]) -> None:
    rows = rows_of([0.05, -0.05, 0.1, -0.1], lengths=[2, 6, 6, 2], advantages=[1.0, -0.5, -2.0, 0.7], own=[True] * 4)
    if loss is naive_loss:
        settings_ = {}
    author = {"author": author_tokens(rows)} if loss is grpo_loss else {}
    loss = partial(loss, **author, **settings_)
    _, gradient = run(loss, rows)
    quotient = difference_quotient(lambda values: loss(rows.with_(logprobs_BT=values)).loss, rows.logprobs_BT)
    assert torch.allclose(gradient, quotient, rtol=0, atol=1e-8)


def test_foreign_gradient_without_importance_is_the_difference_quotient() -> None:
    rows = rows_of([-0.05, -0.15, 0.15, -0.5], lengths=[2, 6, 3, 4], advantages=[1.0, -0.5, 2.0, 0.7])
    loss = partial(hacpo_loss, alpha=0.0, update_index=0)
    _, gradient = run(loss, rows)
    quotient = difference_quotient(lambda values: loss(rows.with_(logprobs_BT=values)).loss, rows.logprobs_BT)
    assert torch.allclose(gradient, quotient, rtol=0, atol=1e-8)
    assert gradient.any(dim=1).tolist() == [True, True, False, False]


@given(batches())
@quick
def test_importance_weight_is_a_constant_factor_of_the_gradient(rows: Rows) -> None:
    rows = rows.with_(own_B=torch.zeros_like(rows.own_B))
    output, gradient = run(hacpo_loss, rows, alpha=2.5)
    _, plain = run(hacpo_loss, rows, alpha=0.0)
    c = output.metrics["ratio"].clamp(1 - 0.2 + 0.025, 1.0)
    assert close(gradient, plain * (c**2.5)[:, None])


# Foreign rows: coefficient, importance, band.


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", LOG_RATIOS)
def test_foreign_value_and_gradient_by_hand(log_ratio: float, advantage: float) -> None:
    s, lower = math.exp(log_ratio), 1 - 0.2 + 3 * 0.025
    c = min(max(s, lower), 1.0)
    value, gradient = foreign(log_ratio, advantage, ratio=2.0, alpha=0.5, update_index=3)
    assert value == pytest.approx(c * c**0.5 * 2.0 * advantage, rel=1e-12)
    expected = s**1.5 * 2.0 * advantage if lower <= s <= 1 else 0.0
    assert gradient == pytest.approx(expected, rel=1e-12, abs=0)


@given(batches())
@quick
def test_foreign_rows_outside_the_band_have_exactly_zero_gradient(rows: Rows) -> None:
    rows = rows.with_(own_B=torch.zeros_like(rows.own_B))
    output, gradient = run(hacpo_loss, rows)
    s = output.metrics["ratio"]
    outside = (s < 1 - 0.2 + 0.025) | (s > 1)
    assert not gradient[outside].any()
    moving = ~outside & (rows.advantage_B != 0) & rows.mask_BT.any(1)
    assert gradient[moving].any(dim=1).all()
    assert output.metrics["band"].equal((s > 1).double() - (s < 1 - 0.2 + 0.025).double())


def test_band_itself_is_inside() -> None:
    rows = rows_of([0.0, 0.0], lengths=[1, 1])
    rows = rows.with_(
        logprobs_BT=torch.tensor([[0.0], [math.log(0.5)]], dtype=torch.float64),
        author_mean_logprob_B=torch.zeros(2).double(),
    )
    output, gradient = run(hacpo_loss, rows, delta=0.5, update_index=0)
    assert output.metrics["ratio"].tolist() == [1.0, 0.5]
    assert output.metrics["band"].tolist() == [0.0, 0.0]
    assert gradient.all()


def test_band_narrows_with_each_update_and_never_passes_one() -> None:
    lower = [stepwise_band(update_index=m, delta=0.2, delta_step=0.025)[0] for m in range(16)]
    assert lower[:9] == pytest.approx([0.8, 0.825, 0.85, 0.875, 0.9, 0.925, 0.95, 0.975, 1.0])
    assert lower[9:] == [1.0] * 7
    assert {stepwise_band(update_index=m, delta=0.2, delta_step=0.025)[1] for m in range(16)} == {1.0}


@pytest.mark.parametrize("update_index", [9, 15])
def test_closed_band_switches_foreign_rows_off(update_index: int) -> None:
    for log_ratio in LOG_RATIOS:
        value, gradient = foreign(log_ratio, update_index=update_index)
        assert value == 1.0
        assert gradient == 0.0
    assert foreign(0.0, update_index=update_index)[1] in (0.0, pytest.approx(1.0))


def test_step_of_zero_keeps_the_band() -> None:
    assert stepwise_band(update_index=40, delta=0.3, delta_step=0.0) == (0.7, 1.0)
    assert foreign(-0.15, update_index=40, delta_step=0.0) == foreign(-0.15, update_index=0)


@pytest.mark.parametrize("log_ratio", LOG_RATIOS)
@pytest.mark.parametrize("update_index", [0, 100])
def test_infinite_delta_is_no_clipping_on_either_side(log_ratio: float, update_index: int) -> None:
    assert stepwise_band(update_index=update_index, delta=INF, delta_step=0.025) == (-INF, INF)
    s = math.exp(log_ratio)
    value, gradient = foreign(log_ratio, -0.5, ratio=3.0, alpha=1.0, delta=INF, update_index=update_index)
    assert value == pytest.approx(-1.5 * s * s, rel=1e-12)
    assert gradient == pytest.approx(-1.5 * s * s, rel=1e-12)


@given(batches())
@quick
def test_alpha_zero_and_ratio_one_each_remove_their_factor(rows: Rows) -> None:
    rows = rows.with_(own_B=torch.zeros_like(rows.own_B))
    bare = rows.with_(ratio_B=torch.ones_like(rows.ratio_B))
    full, full_gradient = run(hacpo_loss, rows, alpha=1.5)
    plain, plain_gradient = run(hacpo_loss, bare, alpha=0.0)
    c = full.metrics["ratio"].clamp(0.825, 1.0)
    value = torch.where(rows.mask_BT.any(1), c * rows.advantage_B, 0.0)
    assert close(plain.loss.detach(), -value.sum() / 8)
    # The capability coefficient alone, the importance weight alone, both.
    _, gradient = run(hacpo_loss, rows, alpha=0.0)
    assert close(gradient, plain_gradient * rows.ratio_B[:, None])
    _, gradient = run(hacpo_loss, bare, alpha=1.5)
    assert close(gradient, plain_gradient * (c**1.5)[:, None])
    assert close(full_gradient, plain_gradient * (rows.ratio_B * c**1.5)[:, None])


@pytest.mark.parametrize(
    ("option", "value"),
    [("delta", 0.05), ("delta_step", 0.2), ("alpha", 3.0), ("update_index", 6)],
)
def test_each_option_changes_foreign_rows_and_only_those(option: str, value: float) -> None:
    rows = rows_of([-0.1, -0.1], own=[True, False], ratios=[1.0, 2.0])
    _, before = run(hacpo_loss, rows)
    _, after = run(hacpo_loss, rows, **{option: value})
    assert before[0].equal(after[0])
    assert not before[1].equal(after[1])


# Foreign rows without a band: truncated importance weights.


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", [*LOG_RATIOS, -40.0, 800.0])
def test_truncated_value_and_gradient_by_hand(log_ratio: float, advantage: float) -> None:
    rows = rows_of([log_ratio], advantages=[advantage], ratios=[2.0])
    output, gradient = run(truncated_loss, rows, normaliser=1, alpha=0.5)
    weight = min(math.exp(min(log_ratio, 1.0)), 1.0) ** 1.5
    assert -float(output.loss.detach()) == pytest.approx(weight * 2.0 * advantage, rel=1e-12)
    assert -float(row_gradient(gradient)) == pytest.approx(weight * 2.0 * advantage, rel=1e-12)
    assert float(output.metrics["importance"]) == pytest.approx(weight, rel=1e-12)
    assert float(output.metrics["weight"]) == pytest.approx(weight * 3.0, rel=1e-12)
    assert output.metrics["band"].tolist() == [0.0]


@given(batches())
@quick
def test_truncated_is_hacpo_inside_the_band_and_in_own_rows(rows: Rows) -> None:
    banded, banded_gradient = run(hacpo_loss, rows)
    truncated, gradient = run(truncated_loss, rows)
    same = rows.own_B | (banded.metrics["band"] == 0)
    assert close(gradient[same], banded_gradient[same])
    beyond = ~same & (rows.advantage_B != 0) & rows.mask_BT.any(dim=1)
    assert gradient[beyond].any(dim=1).all()
    for name in ("ratio", "weight", "importance"):
        assert close(truncated.metrics[name][same], banded.metrics[name][same]), name


@pytest.mark.parametrize(("option", "value"), [("alpha", 3.0), ("clip_low", 0.5), ("clip_high", 0.5)])
def test_each_option_of_the_truncated_loss_changes_its_own_rows(option: str, value: float) -> None:
    rows = rows_of([-0.1, -0.1, 0.1], advantages=[1.0, -1.0, 1.0], own=[False, True, True])
    _, before = run(truncated_loss, rows)
    _, after = run(truncated_loss, rows, **{option: value})
    changed = (before != after).any(dim=1).tolist()
    assert changed == {"alpha": [True, False, False], "clip_low": [False, True, False]}.get(
        option, [False, False, True]
    )


def test_truncated_loss_does_not_read_the_number_of_the_update() -> None:
    algorithm = Hacpo(**{**HACPO_ARGUMENTS, "clipping": "truncated"})
    first, later = (algorithm.loss(BATCH, update_index=index, normaliser=5) for index in (0, 50))
    expected = truncated_loss(MIXED, normaliser=5, alpha=1.5)
    assert first.loss.equal(expected.loss)
    assert later.loss.equal(expected.loss)
    plain = Hacpo(**{**HACPO_ARGUMENTS, "clipping": "truncated", "importance_weighting": False})
    assert plain.loss(BATCH, update_index=0, normaliser=5).loss.equal(truncated_loss(MIXED, normaliser=5, alpha=0).loss)


# What must not change the gradient.


@given(batches(min_rows=2), st.data())
@quick
def test_micro_batches_add_up_to_the_minibatch(rows: Rows, data: st.DataObject) -> None:
    count = len(rows.own_B)
    cut = data.draw(st.integers(1, count - 1))
    order = torch.tensor(data.draw(st.permutations(range(count))))
    for loss in LOSSES.values():
        whole, gradient = run(loss, rows)
        first, first_gradient = run(loss, rows[order[:cut]])
        second, second_gradient = run(loss, rows[order[cut:]])
        assert close(first.loss + second.loss, whole.loss)
        assert close(torch.cat([first_gradient, second_gradient]), gradient[order])


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@every_loss
def test_six_rows_in_any_split(loss: Any, size: int) -> None:
    rows = rows_of(
        [-0.1, 0.0001, -0.05, -0.0001, 0.15, -0.5],
        lengths=[1, 6, 2, 5, 3, 4],
        advantages=[1.0, -0.5, 0.3, 2.0, -1.0, 0.7],
        own=[False, True, False, True, False, True],
    )
    _, gradient = run(loss, rows)
    parts = [run(loss, rows[slice(start, start + size)])[1] for start in range(0, 6, size)]
    assert close(torch.cat(parts), gradient)
    assert gradient.any()


@given(batches())
@quick
def test_rows_with_zero_advantage_can_be_dropped(rows: Rows) -> None:
    keep = rows.advantage_B != 0
    for loss in LOSSES.values():
        whole, gradient = run(loss, rows)
        assert not gradient[~keep].any()
        if keep.any():
            kept, kept_gradient = run(loss, rows[keep])
            assert close(kept.loss, whole.loss)
            assert close(kept_gradient, gradient[keep])


@given(batches(), st.integers(1, 4), st.sampled_from([NAN, -INF, INF, 0.0, -1e30]), st.booleans())
@quick
def test_masked_places_never_matter(rows: Rows, extra: int, hidden: float, left: bool) -> None:
    count, length = rows.mask_BT.shape
    padding = torch.full((count, extra), hidden, dtype=torch.float64)
    logprobs = torch.where(rows.mask_BT, rows.logprobs_BT, hidden)
    join = (lambda new, old: torch.cat([new, old], 1)) if left else (lambda new, old: torch.cat([old, new], 1))
    padded = rows.with_(
        logprobs_BT=join(padding, logprobs), mask_BT=join(torch.zeros(count, extra, dtype=torch.bool), rows.mask_BT)
    )
    inner = slice(extra, None) if left else slice(None, length)
    for name, loss in LOSSES.items():
        before = after = loss
        if name == "grpo":
            author = author_tokens(rows)
            before = partial(loss, author=author)
            after = partial(loss, author=join(padding, torch.where(rows.mask_BT, author, hidden)))
        expected, gradient = run(before, rows)
        output, wide_gradient = run(after, padded)
        assert close(output.loss, expected.loss)
        assert close(wide_gradient[:, inner], gradient)
        assert not wide_gradient[~padded.mask_BT].any()
        for metric, value in expected.metrics.items():
            assert close(output.metrics[metric], value), metric


@every_loss
def test_row_without_tokens_adds_nothing_whatever_it_holds(loss: Any) -> None:
    rows = rows_of([-0.1, 0.0, 0.0], lengths=[3, 0, 0], own=[False, True, False], advantages=[1.0, 5.0, 5.0])
    broken = rows.with_(
        logprobs_BT=torch.where(rows.mask_BT, rows.logprobs_BT, NAN),
        author_mean_logprob_B=torch.where(rows.mask_BT.any(1), rows.author_mean_logprob_B, NAN),
        advantage_B=torch.tensor([1.0, NAN, 5.0]).double(),
        ratio_B=torch.tensor([1.0, NAN, NAN]).double(),
    )
    first, first_gradient = run(loss, rows[:1])
    for batch in (rows, broken):
        output, gradient = run(loss, batch)
        assert output.loss.equal(first.loss)
        assert gradient[:1].equal(first_gradient)
        assert not gradient[1:].any()
        assert output.metrics["ratio"].tolist()[1:] == [1.0, 1.0]
        assert output.metrics["weight"].tolist()[1:] == [0.0, 0.0]


@every_loss
def test_batch_of_empty_rows_gives_zero_with_a_gradient_of_zeros(loss: Any) -> None:
    output, gradient = run(loss, rows_of([0.0, 0.0], lengths=[0, 0]))
    assert float(output.loss.detach()) == 0.0
    assert gradient.tolist() == [[0.0], [0.0]]


@every_loss
def test_integer_masks_are_accepted(loss: Any) -> None:
    rows = rows_of([-0.1, -0.05], lengths=[2, 3], own=[False, True])
    expected, gradient = run(loss, rows)
    output, got = run(loss, rows.with_(mask_BT=rows.mask_BT.long(), own_B=rows.own_B.long()))
    assert output.loss.equal(expected.loss)
    assert got.equal(gradient)


@every_loss
def test_only_the_learner_receives_gradient_and_metrics_are_detached(loss: Any) -> None:
    rows = rows_of([-0.1, 0.0001], own=[False, True])
    rows = Rows(**{name: value.clone().requires_grad_(value.is_floating_point()) for name, value in vars(rows).items()})
    author = {"author": author_tokens(rows).detach().requires_grad_()} if loss is grpo_loss else {}
    output = loss(rows, **author)
    output.loss.backward()
    receivers = [name for name, value in vars(rows).items() if value.grad is not None]
    assert receivers == ["logprobs_BT"]
    assert all(value.grad is None for value in author.values())
    assert not any(metric.requires_grad for metric in output.metrics.values())
    assert all(metric.shape == (2,) for metric in output.metrics.values())


@every_loss
def test_loss_keeps_the_dtype_of_the_log_probabilities(loss: Any) -> None:
    rows = rows_of([-0.1, 0.0001], own=[False, True])
    output = loss(rows.with_(logprobs_BT=rows.logprobs_BT.float()))
    assert output.loss.dtype == torch.float32
    assert {metric.dtype for metric in output.metrics.values()} == {torch.float32}


@every_loss
def test_normaliser_divides(loss: Any) -> None:
    rows = rows_of([-0.1, 0.0001], own=[False, True])
    one, one_gradient = run(loss, rows, normaliser=1)
    many, many_gradient = run(loss, rows, normaliser=64)
    assert close(many.loss * 64, one.loss)
    assert close(many_gradient * 64, one_gradient)


# Overflow: exp() of a large difference must not turn a stopped gradient into NaN.


@pytest.mark.parametrize(("own", "advantage"), [(True, 1.0), (True, 0.0), (False, 1.0), (False, -1.0), (False, 0.0)])
def test_overflowing_ratio_of_a_stopped_row_gives_zero_gradient(own: bool, advantage: float) -> None:
    rows = rows_of([2000.0, -0.05], own=[own, not own], advantages=[advantage, 1.0])
    output, gradient = run(hacpo_loss, rows)
    assert output.metrics["ratio"].tolist()[0] == INF
    assert math.isfinite(float(output.loss.detach()))
    assert not gradient[0].any()
    assert gradient[1].all()
    if own:
        output, gradient = run(gspo_loss, rows)
        assert math.isfinite(float(output.loss.detach()))
        assert not gradient[0].any()


def test_impossible_token_gives_ratio_zero_and_finite_gradient() -> None:
    rows = rows_of([-0.1, -0.1], own=[True, False])
    logprobs = rows.logprobs_BT.clone()
    logprobs[:, 1] = -INF
    output, gradient = run(hacpo_loss, rows.with_(logprobs_BT=logprobs))
    assert output.metrics["ratio"].tolist() == [0.0, 0.0]
    assert math.isfinite(float(output.loss.detach()))
    assert not gradient.any()


def test_flaw_in_a_counted_place_is_not_hidden() -> None:
    rows = rows_of([-0.1], own=[True])
    logprobs = rows.logprobs_BT.clone()
    logprobs[0, 0] = NAN
    for own in (True, False):
        broken = rows.with_(logprobs_BT=logprobs, own_B=torch.tensor([own]))
        assert hacpo_loss(broken).loss.isnan()


# Metrics.


@given(batches())
@quick
def test_weight_is_the_size_of_the_gradient(rows: Rows) -> None:
    for loss in (hacpo_loss, gspo_loss, grpo_loss):
        output, gradient = run(loss, rows, normaliser=5)
        assert close(output.metrics["weight"], gradient.abs().sum(dim=1) * 5)
        assert (output.metrics["weight"] >= 0).all()


@given(batches())
@quick
def test_importance_is_told_for_foreign_rows_alone(rows: Rows) -> None:
    output = hacpo_loss(rows, alpha=2.0)
    s = output.metrics["ratio"]
    inside = (s >= 0.825) & (s <= 1)
    expected = torch.where(rows.own_B, NAN, torch.where(inside, s**3, 0.0))
    assert close(output.metrics["importance"], expected)


# GRPO.


def test_grpo_by_hand() -> None:
    rows = rows_of([0.0], lengths=[4], advantages=[2.0], own=[True])
    log_ratios = torch.tensor([[-0.5, 0.1, 0.5, 0.2]], dtype=torch.float64)
    output, gradient = run(partial(grpo_loss, author=rows.logprobs_BT - log_ratios), rows)
    ratios = log_ratios.exp()[0]
    expected = (ratios[0] + ratios[1] + 1.28 + ratios[3]) * 2 / 4
    assert close(output.loss.detach(), -expected / 8)
    moving = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    assert close(gradient[0], -ratios * moving * 2 / 4 / 8)
    assert close(output.metrics["ratio"], ratios.mean()[None])
    assert close(output.metrics["weight"], (ratios * moving).sum()[None] * 2 / 4)
    assert output.metrics["clipped_fraction"].tolist() == [0.25]
    assert output.metrics["importance"].isnan().all()
    assert output.metrics["band"].isnan().all()


def test_grpo_counts_tokens_clipped_on_either_side() -> None:
    rows = rows_of([0.0, 0.0], lengths=[4, 2], advantages=[-1.0, 1.0], own=[True, True])
    log_ratios = torch.tensor([[-0.5, -0.4, 0.5, 0.0], [0.5, 0.6, NAN, NAN]], dtype=torch.float64)
    output = grpo_loss(rows, author=rows.logprobs_BT - log_ratios)
    assert output.metrics["clipped_fraction"].tolist() == [0.5, 1.0]


def test_grpo_with_equal_token_ratios_equals_gspo() -> None:
    rows = rows_of([-0.3, 0.1, 0.5], lengths=[2, 6, 4], advantages=[1.0, -1.0, 1.0], own=[True] * 3)
    log_ratio = torch.tensor([-0.3, 0.1, 0.5], dtype=torch.float64)[:, None]
    output, gradient = run(partial(grpo_loss, author=rows.logprobs_BT - log_ratio), rows)
    expected, expected_gradient = run(gspo_loss, rows, **WIDE)
    assert close(output.loss, expected.loss)
    assert close(gradient, expected_gradient)


# Entry checks.


ROW_TENSORS = {
    "hacpo": ["mask_BT", "author_mean_logprob_B", "advantage_B", "own_B", "ratio_B"],
    "gspo": ["mask_BT", "author_mean_logprob_B", "advantage_B"],
    "naive": ["mask_BT", "author_mean_logprob_B", "advantage_B"],
    "grpo": ["mask_BT", "advantage_B"],
}


@pytest.mark.parametrize(("loss", "name"), [(loss, name) for loss, names in ROW_TENSORS.items() for name in names])
def test_tensor_of_other_rows_is_named(loss: str, name: str) -> None:
    rows = rows_of([-0.1, -0.05, 0.1])
    author = {"author": rows.logprobs_BT} if loss == "grpo" else {}
    value: Tensor = getattr(rows, name)
    for wrong in (value[:1], value.unsqueeze(0)):
        with pytest.raises(ValueError, match=f"{name}: expected shape"):
            LOSSES[loss](rows.with_(**{name: wrong}), **author)


def test_grpo_names_author_tokens_that_do_not_fit() -> None:
    rows = rows_of([-0.1, -0.05])
    with pytest.raises(ValueError, match=r"author_logprobs_BT: expected shape \(2, 3\), got \(2, 1\)"):
        grpo_loss(rows, author=rows.logprobs_BT[:, :1])


@every_loss
def test_half_precision_is_refused(loss: Any) -> None:
    rows = rows_of([-0.1])
    with pytest.raises(ValueError, match=r"logprobs_BT: expected float32 or float64, got torch\.bfloat16"):
        loss(rows.with_(logprobs_BT=rows.logprobs_BT.bfloat16()))


@pytest.mark.parametrize("normaliser", [0, -1, NAN])
@every_loss
def test_normaliser_must_be_above_zero(loss: Any, normaliser: float) -> None:
    with pytest.raises(ValueError, match=f"normaliser.*got {normaliser}"):
        loss(rows_of([-0.1]), normaliser=normaliser)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(loss, name) for loss in ("hacpo", "gspo", "grpo") for name in CLIP]
    + [("hacpo", name) for name in ("alpha", "delta", "delta_step", "update_index")],
)
def test_negative_number_is_named(loss: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected a number of at least 0, got -0\.1"):
        LOSSES[loss](rows_of([-0.1]), **{name: -0.1})
    LOSSES[loss](rows_of([-0.1]), **{name: 0})


def test_objective_takes_any_shape() -> None:
    objective = clipped_objective(torch.zeros(2, 3), torch.ones(2, 1), **WIDE)
    assert objective.value.shape == objective.weight.shape == objective.band.shape == (2, 3)


# The classes the trainer uses choose arguments, nothing else.

HACPO_ARGUMENTS: dict[str, Any] = {
    "alpha": 1.5,
    "delta": 0.2,
    "delta_step": 0.03,
    "clip_low": 3e-4,
    "clip_high": 4e-4,
    "epsilon": 1e-6,
    "ratio_min": 0.1,
    "ratio_max": 10.0,
    "capability_advantage": True,
    "capability_coefficient": True,
    "importance_weighting": True,
    "clipping": "stepwise",
}
MIXED = rows_of(
    [-0.15, -0.05, 0.15, -0.5, 0.0001, 0.3, -0.3, 0.3],
    lengths=[1, 5, 2, 3, 4, 2, 2, 1],
    advantages=[1.0, -0.5, 0.3, -2.0, 1.0, -0.7, -0.7, 0.9],
    own=[False] * 4 + [True] * 4,
    ratios=[2.0, 0.5, 3.0, 0.1, 1.0, 1.0, 1.0, 1.0],
)
BATCH = LossBatch(**vars(MIXED), author_logprobs_BT=author_tokens(MIXED))


@pytest.mark.parametrize(
    ("switches", "arguments"),
    [
        ({}, {}),
        ({"importance_weighting": False}, {"alpha": 0.0}),
        ({"clipping": "fixed"}, {"delta_step": 0.0}),
        ({"clipping": "none"}, {"delta": INF}),
        ({"capability_advantage": False}, {}),
        ({"delta": 0.5}, {"delta": 0.5}),
        ({"clip_low": 0.5}, {"clip_low": 0.5}),
        ({"clip_high": 0.5}, {"clip_high": 0.5}),
    ],
)
def test_hacpo_switches_choose_arguments(switches: dict[str, Any], arguments: dict[str, float]) -> None:
    output = Hacpo(**{**HACPO_ARGUMENTS, **switches}).loss(BATCH, update_index=2, normaliser=5)
    settings_ = {"alpha": 1.5, "delta_step": 0.03, "update_index": 2, **arguments}
    expected = hacpo_loss(MIXED, normaliser=5, **settings_)
    assert output.loss.equal(expected.loss)
    usual = hacpo_loss(MIXED, normaliser=5, alpha=1.5, delta_step=0.03, update_index=2)
    assert output.loss.equal(usual.loss) is (not arguments)


def test_hacpo_without_coefficient_has_ratios_of_one() -> None:
    output = Hacpo(**{**HACPO_ARGUMENTS, "capability_coefficient": False}).loss(BATCH, update_index=2, normaliser=5)
    ones = MIXED.with_(ratio_B=torch.ones_like(MIXED.ratio_B))
    expected = hacpo_loss(ones, normaliser=5, alpha=1.5, delta_step=0.03, update_index=2)
    assert output.loss.equal(expected.loss)


@pytest.mark.parametrize("update_index", [0, 7])
def test_gspo_and_naive_classes_pass_everything_on(update_index: int) -> None:
    expected = gspo_loss(MIXED, normaliser=5, **WIDE).loss
    for algorithm in (Gspo(**WIDE, epsilon=1e-6), Naive(**WIDE, epsilon=1e-6)):
        assert algorithm.loss(BATCH, update_index=update_index, normaliser=5).loss.equal(expected)


def test_grpo_class_passes_everything_on() -> None:
    expected = grpo_loss(MIXED, normaliser=5).loss
    assert Grpo(**WIDE, epsilon=1e-6).loss(BATCH, update_index=3, normaliser=5).loss.equal(expected)


def test_hacpo_module_reuses_the_objective_of_gspo() -> None:
    assert hacpo.clipped_objective is clipped_objective
