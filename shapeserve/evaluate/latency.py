"""How long calls take: never a steady-state number without the number of the first call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first call, with everything that had to be done before there was an answer.

    Attributes:
        seconds: all of it.
        includes: what that is, in words.
    """

    seconds: float
    includes: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            raise ValueError(f"first call of {self.seconds} s; measure it (a finite time above 0)")


@dataclass(frozen=True, slots=True)
class Latency:
    """The calls of one program in one bucket.

    Median and 99th percentile are those of ``later_s`` and cannot be had without ``first``: a
    program that is fast from its second call on may be slow for whoever waits for the first.
    """

    first: FirstCall
    later_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.first, FirstCall):
            raise TypeError(
                f"first is {self.first!r}; a steady-state number needs the FirstCall before it"
            )
        if not self.later_s:
            raise ValueError("later_s is empty; time at least one call after the first")

    @property
    def median_s(self) -> float:
        """Median of the later calls."""
        return float(np.median(self.later_s))

    @property
    def p99_s(self) -> float:
        """99th percentile of the later calls: one of them, the slowest of fewer than 100."""
        return float(np.quantile(self.later_s, 0.99, method="higher"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "first_s": self.first.seconds,
            "first_includes": self.first.includes,
            "median_s": self.median_s,
            "p99_s": self.p99_s,
            "calls": len(self.later_s),
        }
