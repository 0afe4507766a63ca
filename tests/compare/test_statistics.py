"""Intervals against values worked out by hand, their coverage, pairing; when a curve reaches a value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hacrl.compare import statistics
from hacrl.compare.statistics import first_reached, interval


def test_seeds_alone_give_students_interval() -> None:
    # Means .2 .3 .4 .5 .6 of five seeds, every task alike: s = .1 sqrt(2.5), half width 2.776 s / sqrt(5) = .19631.
    scores_ST = np.repeat(np.array([[0.2], [0.3], [0.4], [0.5], [0.6]]), 7, axis=1)
    found = interval(scores_ST, draws=200_000)
    assert found.mean == pytest.approx(0.4)
    assert found.high - 0.4 == pytest.approx(0.19631, rel=0.02)
    assert 0.4 - found.low == pytest.approx(0.19631, rel=0.02)


def test_tasks_alone_give_the_bootstrap_over_tasks() -> None:
    # 100 tasks, half solved, the same in every seed: s^2 = .25 x 100/99, half width 1.96 s / 10 = .0985.
    scores_ST = np.tile(np.array([0.0, 1.0] * 50), (4, 1))
    for seeds in (1, 4):
        found = interval(scores_ST[:seeds], draws=100_000)
        assert found.mean == 0.5
        assert found.high - 0.5 == pytest.approx(0.0985, rel=0.05)


def test_noise_of_answers_is_counted_once() -> None:
    # Pure noise: the standard error of the mean of S x T values is sd / sqrt(S T), whichever axis is looked at; over
    # many draws of the data the squared half width of Student's interval averages (2.776 sd)^2 / (S T).
    generator = np.random.default_rng(0)
    squares = [
        ((found.high - found.low) / 2) ** 2
        for found in (interval(generator.normal(0, 0.3, (5, 64)), draws=2000) for _ in range(200))
    ]
    assert math.sqrt(float(np.mean(squares))) == pytest.approx(2.776 * 0.3 / math.sqrt(5 * 64), rel=0.1)


@pytest.mark.parametrize(
    ("seeds", "seed_sd", "task_sd", "noise_sd"),
    [(5, 0.05, 0.3, 0.2), (5, 0.05, 0.0, 0.3), (5, 0.0, 0.3, 0.2), (2, 0.05, 0.1, 0.2)],
)
def test_a_95_percent_interval_covers_the_truth_in_95_percent_of_worlds(
    seeds: int, seed_sd: float, task_sd: float, noise_sd: float
) -> None:
    generator = np.random.default_rng(1)
    worlds, covered = 400, 0
    for _ in range(worlds):
        scores_ST = (
            0.5
            + generator.normal(0, seed_sd, (seeds, 1))
            + generator.normal(0, task_sd, (1, 40))
            + generator.normal(0, noise_sd, (seeds, 40))
        )
        found = interval(scores_ST, draws=2000)
        covered += found.low <= 0.5 <= found.high
    # Three standard errors of a share of .95 over 400 worlds are .033; wide intervals would show as well.
    assert 0.917 <= covered / worlds <= 0.983


def test_pairing_takes_out_what_both_methods_share() -> None:
    generator = np.random.default_rng(2)
    shared_ST = generator.normal(0, 0.2, (5, 1)) + generator.normal(0, 0.4, (1, 30))
    left_ST = shared_ST + 0.1 + generator.normal(0, 0.02, (5, 30))
    right_ST = shared_ST + generator.normal(0, 0.02, (5, 30))
    paired, alone = interval(left_ST - right_ST), interval(left_ST)
    assert paired.mean == pytest.approx(0.1, abs=0.01)
    assert paired.low > 0.08
    assert alone.high - alone.low > 20 * (paired.high - paired.low)


def test_the_same_scores_give_the_same_interval_and_no_spread_gives_none() -> None:
    scores_ST = np.random.default_rng(3).random((3, 5))
    assert interval(scores_ST) == interval(scores_ST)
    flat = interval(np.full((3, 5), 0.25))
    assert (flat.low, flat.mean, flat.high) == (0.25, 0.25, 0.25)
    single = interval(np.array([[0.25]]))
    assert (single.low, single.high) == (0.25, 0.25)


@pytest.mark.parametrize("scores_ST", [np.empty((0, 3)), np.empty((2, 0)), np.array([[0.5, math.nan]])])
def test_scores_that_are_none_are_refused(scores_ST: np.ndarray) -> None:
    with pytest.raises(ValueError, match="seeds x"):
        interval(scores_ST)


@pytest.mark.parametrize(
    ("target", "reached"),
    [
        (0.4, 100.0),  # exactly at a point
        (0.3, 50.0),  # half way up the first line
        (0.5, 250.0),  # beyond a dip: 0.4, 0.3, 0.7 at 100, 200, 300
        (0.1, 0.0),  # from the beginning
        (0.8, None),
    ],
)
def test_first_reached(target: float, reached: float | None) -> None:
    found = first_reached([0, 100, 200, 300], [0.2, 0.4, 0.3, 0.7], target)
    assert found == (None if reached is None else pytest.approx(reached))


def test_many_tasks_are_drawn_in_parts_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scores_ST = np.random.default_rng(4).normal(0, 0.3, (4, 50)) + np.linspace(0, 1, 50)
    whole = interval(scores_ST)
    monkeypatch.setattr(statistics, "_KEPT_COUNTS", 50 * 300)
    parts = interval(scores_ST)
    assert parts.mean == whole.mean
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), abs=0.01)
    assert parts != whole
