"""Statistics of a comparison: numbers in, numbers out. Axes: S seed, T held-out task."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
# At most so many counts of drawn tasks are kept, 8 bytes each.
_KEPT_COUNTS = 4_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def interval(scores_ST: NDArray[np.float64], *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Mean over seeds and tasks with a 95 % interval for other seeds and other tasks: a two-level bootstrap.

    Seeds and tasks are crossed (every seed's run answers the same tasks), so with Y_st = m + a_s + b_t + e_st

        draw = m  +  sqrt(var(a) / S) * t   +  r * sqrt(T / (T - 1)) * mean of T tasks' b, drawn with replacement

    and the interval is that of the draws' 2.5 and 97.5 % quantiles. At the level of seeds, t is Student's with S - 1
    degrees of freedom, a parametric bootstrap: resampling five seeds covers far less than 95 %. a_s carries the noise
    of its own answers, so var(a) / S holds all of var(e) / (S T), and r^2 = max(0, 1 - MS_e / MS_b) takes from the
    tasks what would count it twice. With one seed there is neither a nor r: the interval is one over tasks alone.

    A difference of two methods is paired by giving `left_ST - right_ST`: what both share (an easy task, a lucky seed's
    order of data) is gone before anything is drawn.

    Args:
        scores_ST: float64, at least one seed and one task, no NaN.
    """
    seeds, tasks = scores_ST.shape
    if not scores_ST.size or not np.isfinite(scores_ST).all():
        raise ValueError(f"scores of {seeds} seeds x {tasks} tasks: there must be some, all finite")
    generator = np.random.default_rng(seed)
    mean = float(scores_ST.mean())
    a_S = scores_ST.mean(axis=1) - mean
    b_T = scores_ST.mean(axis=0) - mean
    values = np.full(draws, mean)
    if seeds > 1:
        values += generator.standard_t(seeds - 1, draws) * a_S.std(ddof=1) / math.sqrt(seeds)
    if tasks > 1:
        scale = math.sqrt(tasks / (tasks - 1)) * _task_share(scores_ST - mean - a_S[:, None] - b_T, b_T)
        values += scale * _drawn_means(b_T, draws, seed)
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(mean=mean, low=float(low), high=float(high))


def _drawn_means(b_T: NDArray[np.float64], draws: int, seed: int) -> NDArray[np.float64]:
    """Means of T values drawn from `b_T` with replacement, `draws` of them."""
    tasks = len(b_T)
    if draws * tasks <= _KEPT_COUNTS:
        return _counts(draws, tasks, seed) @ b_T / tasks
    generator = np.random.default_rng([seed, 1])
    at_once = max(1, _KEPT_COUNTS // tasks)
    sizes = [min(at_once, draws - first) for first in range(0, draws, at_once)]
    return np.concatenate([b_T[generator.integers(0, tasks, (size, tasks))].mean(axis=1) for size in sizes])


@functools.lru_cache(maxsize=2)
def _counts(draws: int, tasks: int, seed: int) -> NDArray[np.float64]:
    """How often each task comes up in each draw; comparing many methods asks for the same draws again and again."""
    generator = np.random.default_rng([seed, 1])
    return generator.multinomial(tasks, np.full(tasks, 1 / tasks), draws).astype(np.float64)


def _task_share(e_ST: NDArray[np.float64], b_T: NDArray[np.float64]) -> float:
    """r: the share of the tasks' spread that is the tasks' own and not noise of the answers; 1 with a single seed."""
    seeds, tasks = e_ST.shape
    if seeds == 1:
        return 1.0
    ms_e = float((e_ST**2).sum()) / ((seeds - 1) * (tasks - 1))
    ms_b = seeds * float(b_T.var(ddof=1))
    return math.sqrt(max(0.0, 1 - ms_e / ms_b)) if ms_b > 0 else 0.0


def first_reached(x: Sequence[float], y: Sequence[float], target: float) -> float | None:
    """The least x at which the line through the points (x, y), x rising, is at or above `target`; None if nowhere."""
    for place, (x_now, y_now) in enumerate(zip(x, y, strict=True)):
        if y_now >= target:
            if place == 0:
                return x_now
            x_before, y_before = x[place - 1], y[place - 1]
            return x_before + (x_now - x_before) * (target - y_before) / (y_now - y_before)
    return None
