"""What was predicted beside what was measured in some runs, and whether that is close enough."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import Table

RELATIVE = 0.15
SPREADS = 2.0


@dataclass(frozen=True)
class Comparison:
    """One quantity.

    Attributes:
        name: what it is.
        predicted: what was expected.
        measured: what each run gave.
        absolute: how far the median of the runs may be from the prediction; None: a share of that
            median, ``RELATIVE`` or ``SPREADS`` times the spread of the runs, whichever is more.
    """

    name: str
    predicted: float
    measured: tuple[float, ...]
    absolute: float | None = None

    @property
    def median(self) -> float:
        """Of the runs."""
        return statistics.median(self.measured)

    @property
    def spread(self) -> float:
        """Standard deviation of the runs / their median; 0 for one run."""
        if len(self.measured) < 2 or not self.median:
            return 0.0
        return statistics.stdev(self.measured) / self.median

    @property
    def off(self) -> float:
        """How far the prediction is from the median: as a number, or as a share of the median."""
        difference = self.predicted - self.median
        if self.absolute is not None:
            return difference
        return difference / self.median if self.median else float("inf")

    @property
    def allowed(self) -> float:
        """How far it may be."""
        if self.absolute is not None:
            return self.absolute
        return max(RELATIVE, SPREADS * self.spread)

    @property
    def ok(self) -> bool:
        """Whether it is close enough."""
        return abs(self.off) <= self.allowed

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        derived = ("median", "spread", "off", "allowed", "ok")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def compared(
    name: str, predicted: float, measured: Sequence[float], absolute: float | None = None
) -> Comparison:
    """Compare a prediction with at least one run."""
    return Comparison(name, predicted, tuple(measured), absolute)


def table(judged: Sequence[Comparison]) -> Table:
    """Return all quantities, one a row."""
    header = ["", "predicted", "median", "runs", "spread", "off", "allowed", "ok"]
    return Table("Predicted and measured", header, [_cells(one) for one in judged])


def _cells(one: Comparison) -> list[str]:
    low, high = min(one.measured), max(one.measured)
    sign = "" if one.absolute is not None else "%"
    scale = 1.0 if one.absolute is not None else 100.0
    return [
        one.name,
        f"{one.predicted:.4g}",
        f"{one.median:.4g}",
        f"{low:.4g} to {high:.4g}",
        f"{one.spread:.1%}",
        f"{scale * one.off:+.3g}{sign}",
        f"{scale * one.allowed:.3g}{sign}",
        "yes" if one.ok else "NO",
    ]
