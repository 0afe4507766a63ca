"""Means are over items, not over parts; merging is order-free; nothing missing turns into a number."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl.metrics import Metrics


def test_a_mean_over_ranks_weighs_tokens_not_ranks() -> None:
    """Ranks with 1 and 9 tokens: the mean of means would be 0.5."""
    small, large = Metrics(), Metrics()
    small.mean("entropy", 1.0, weight=1)
    large.mean("entropy", 0.0, weight=9)
    small.merge(large)
    assert small.values() == {"entropy": 0.1}


def test_every_kind() -> None:
    metrics = Metrics()
    for value in (3.0, -1.0, 2.0):
        metrics.mean("mean", value)
        metrics.maximum("max", value)
        metrics.minimum("min", value)
        metrics.total("sum", value)
        metrics.total("count")
    assert metrics.values() == {"mean": 4 / 3, "max": 3.0, "min": -1.0, "sum": 4.0, "count": 3.0}
    assert all(type(value) is float for value in metrics.values().values())


def test_a_mean_over_nothing_is_absent_and_a_counter_may_stay_zero() -> None:
    metrics = Metrics()
    metrics.mean("ratio", math.nan, weight=0)
    metrics.total("dropped", 0)
    assert metrics.values() == {"dropped": 0.0}
    metrics.mean("ratio", 0.5, weight=2)
    assert metrics.values()["ratio"] == 0.5


def test_an_empty_one_has_no_values_and_changes_nothing() -> None:
    metrics = Metrics()
    metrics.mean("a", 1.0)
    metrics.merge(Metrics())
    assert metrics.values() == {"a": 1.0}
    assert Metrics().values() == {}


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_not_hidden_by_the_order_of_values(order: tuple[float, float]) -> None:
    metrics = Metrics()
    for value in order:
        metrics.mean("mean", value)
        metrics.maximum("max", value)
        metrics.minimum("min", value)
        metrics.total("sum", value)
    assert all(math.isnan(value) for value in metrics.values().values())
    assert len(metrics.values()) == 4


def test_a_name_has_one_kind() -> None:
    metrics = Metrics()
    metrics.total("loss", 1.0)
    with pytest.raises(ValueError, match=r"'loss' is a total and cannot also be a mean"):
        metrics.mean("loss", 1.0)
    other = Metrics()
    other.maximum("loss", 1.0)
    with pytest.raises(ValueError, match="maximum"):
        metrics.merge(other)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(ValueError, match="'loss'"):
        Metrics().mean("loss", 1.0, weight=weight)


def test_merging_with_a_prefix_leaves_the_other_as_it_was() -> None:
    run, agent = Metrics(), Metrics()
    agent.total("rows", 2)
    run.merge(agent, prefix="qwen/")
    run.merge(agent, prefix="qwen/")
    assert run.values() == {"qwen/rows": 4.0}
    assert agent.values() == {"rows": 2.0}
    agent.merge(agent)
    assert agent.values() == {"rows": 4.0}


def test_it_crosses_a_process_border() -> None:
    metrics = Metrics()
    metrics.mean("a", 2.0, weight=3)
    copy = pickle.loads(pickle.dumps(metrics))
    copy.mean("a", 4.0, weight=1)
    assert copy.values() == {"a": 2.5}
    assert metrics.values() == {"a": 2.0}


_PARTS = st.lists(
    st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50)), max_size=6),
    min_size=1,
    max_size=5,
)


@given(parts=_PARTS, cut=st.integers(0, 5))
def test_any_split_and_any_grouping_gives_the_same(parts: list[list[tuple[int, int]]], cut: int) -> None:
    def filled(items: list[tuple[int, int]]) -> Metrics:
        metrics = Metrics()
        for value, weight in items:
            metrics.mean("mean", value, weight=weight)
            metrics.total("sum", value)
            metrics.maximum("max", value)
            metrics.minimum("min", value)
        return metrics

    def merged(many: list[list[tuple[int, int]]]) -> Metrics:
        metrics = Metrics()
        for items in many:
            metrics.merge(filled(items))
        return metrics

    whole = filled([item for items in parts for item in items]).values()
    left, right = merged(parts[:cut]), merged(parts[cut:])
    left.merge(right)
    assert left.values() == whole
    assert merged(parts[::-1]).values() == whole
    weights = sum(weight for items in parts for _, weight in items)
    if weights:
        assert whole["mean"] == sum(value * weight for items in parts for value, weight in items) / weights
