"""How well a mean is known: 95 % intervals of Student's t over training seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % quantile of Student's t by degrees of freedom; 1.96, the limit, serves beyond the table.
# fmt: off
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
NORMAL_95 = 1.96


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its 95 % interval, None where one value cannot tell; `over` says of what."""

    mean: float
    low: float | None = None
    high: float | None = None
    over: str = ""

    @classmethod
    def around(cls, mean: float, half: float, *, over: str) -> Interval:
        return cls(mean=mean, low=mean - half, high=mean + half, over=over)

    @property
    def half(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean of one value per seed, `t * standard deviation (n - 1) / sqrt(n)` around it."""
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Interval(mean=mean, over="1 seed")
    half = quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval.around(mean, half, over=f"{count} seeds")


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Interval | None:
    """Mean of `first - second`, values by seed: paired over the seeds that both have where these are two or more, else
    Welch's interval for unpaired groups. None where either is empty.
    """
    both = sorted(first.keys() & second.keys())
    if len(both) > 1:
        return over_seeds([first[seed] - second[seed] for seed in both])
    if not first or not second:
        return None
    ours, theirs = list(first.values()), list(second.values())
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    over = f"{len(ours)} and {len(theirs)} seeds"
    if min(len(ours), len(theirs)) < 2:
        return Interval(mean=mean, over=over)
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    freedom = sum(parts) ** 2 / max(
        sum(part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True)), 1e-300
    )
    return Interval.around(mean, quantile(max(1, int(freedom))) * math.sqrt(sum(parts)), over=over)


def quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return T_95[freedom - 1] if freedom <= len(T_95) else NORMAL_95
