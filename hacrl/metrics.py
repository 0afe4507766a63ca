"""Metrics as sums and counts, so that a mean over parts is the mean over everything and never a mean of means.

    metrics = Metrics()
    metrics.mean("entropy", 2.5, weight=9)    # 9 tokens with mean entropy 2.5
    metrics.merge(other_rank, prefix="qwen/")
    metrics.values()                          # {"entropy": ..., "qwen/...": ...}

No tensor library is needed; numbers go in, numbers come out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["mean", "total", "maximum", "minimum"]


@dataclass(kw_only=True, slots=True)
class _Cell:
    """What was seen of one name. `weight` counts only for a mean; extremes and totals keep their result in `sum`."""

    kind: Kind
    sum: float
    weight: float


@dataclass(slots=True)
class Metrics:
    """Accumulates named numbers; merging two gives what one would hold that had seen both.

    Each name has one kind, set by its first use. A name that never got a value (or, for a mean, only weight 0) is
    absent from `values()`: a missing number is not zero. NaN is not hidden: once seen, the result is NaN.
    """

    _cells: dict[str, _Cell] = field(default_factory=dict[str, _Cell])

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add a mean `value` over `weight` items (tokens, rows); the result is sum(value * weight) / sum(weight).

        Weight 0 adds nothing, whatever the value: the mean over no items is often NaN. Raises ValueError for a
        negative or non-finite weight, and where `name` is already of another kind.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"metric {name!r}: weight {weight} for a mean; it must be finite and not negative")
        self._add(name, _Cell(kind="mean", sum=value * weight if weight else 0.0, weight=weight))

    def total(self, name: str, value: float = 1.0) -> None:
        """Add `value` to a sum; left out, it counts occurrences. A counter that may stay 0 is started by `value=0`."""
        self._add(name, _Cell(kind="total", sum=value, weight=0.0))

    def maximum(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self._add(name, _Cell(kind="maximum", sum=value, weight=0.0))

    def minimum(self, name: str, value: float) -> None:
        """Keep the smallest value."""
        self._add(name, _Cell(kind="minimum", sum=value, weight=0.0))

    def merge(self, other: Metrics, prefix: str = "") -> None:
        """Take in everything `other` has seen, its names preceded by `prefix`. `other` is left as it is.

        Raises ValueError where a name is of different kinds in the two.
        """
        for name, cell in list(other._cells.items()):
            self._add(prefix + name, cell)

    def values(self) -> dict[str, float]:
        """The flat result, in order of first use."""
        return {
            name: cell.sum / cell.weight if cell.kind == "mean" else cell.sum
            for name, cell in self._cells.items()
            if cell.kind != "mean" or cell.weight > 0
        }

    def _add(self, name: str, new: _Cell) -> None:
        old = self._cells.get(name)
        if old is None:
            self._cells[name] = _Cell(kind=new.kind, sum=float(new.sum), weight=float(new.weight))
            return
        if old.kind != new.kind:
            raise ValueError(f"metric {name!r} is a {old.kind} and cannot also be a {new.kind}; use two names")
        old.weight += new.weight
        if new.kind in ("mean", "total"):
            old.sum += new.sum
        elif math.isnan(old.sum) or math.isnan(new.sum):
            # max() and min() of NaN depend on the order of their arguments; the order of ranks must not matter.
            old.sum = math.nan
        else:
            old.sum = float(max(old.sum, new.sum) if new.kind == "maximum" else min(old.sum, new.sum))
