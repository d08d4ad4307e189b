"""What a simulation found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapeserve.metrics import REAL

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a simulation found.

    Attributes:
        rows: samples that came.
        replicas: how many served them.
        span_s: from the first arrival to the last answer.
        device_s: seconds that devices worked.
        elements: kind -> executed elements, as ``shapeserve_tokens_total`` counts them.
        batches: bucket label, ``none`` for the fallback -> batches.
        fallbacks: reason -> rows.
        refused: reason -> samples, ``too_long``, ``too_short`` or ``queue_full``.
        most_load: most rows that waited or ran in one replica.
        latencies_s: ascending, from arrival to answer, of all answered samples.
        queue_s: ascending, from arrival to launch, of all rows.
        batch_real: elements of every batch that are no padding, in the order of launch.
    """

    rows: int
    replicas: int
    span_s: float
    device_s: float
    elements: Mapping[str, int]
    batches: Mapping[str, int]
    fallbacks: Mapping[str, int]
    refused: Mapping[str, int]
    most_load: int
    latencies_s: np.ndarray
    queue_s: np.ndarray
    batch_real: np.ndarray

    @property
    def answered(self) -> int:
        """Samples that were not refused."""
        return len(self.latencies_s)

    @property
    def utilisation(self) -> float:
        """Share of the time that a device worked, the mean of all replicas."""
        return self.device_s / (self.span_s * self.replicas) if self.span_s else 0.0

    @property
    def rows_per_s(self) -> float:
        """Answered samples over the whole span."""
        return self.answered / self.span_s if self.span_s else 0.0

    @property
    def waste(self) -> dict[str, float]:
        """``padding_<axis>`` -> share of all executed elements; they add up to all padding."""
        whole = sum(self.elements.values())
        return {kind: n / whole for kind, n in self.elements.items() if kind != REAL}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "rows": self.rows,
            "answered": self.answered,
            "refused": dict(self.refused),
            "replicas": self.replicas,
            "span_s": self.span_s,
            "device_s": self.device_s,
            "utilisation": self.utilisation,
            "rows_per_s": self.rows_per_s,
            "elements": dict(self.elements),
            "waste": {**self.waste, "all": sum(self.waste.values())},
            "latency_s": _summary(self.latencies_s),
            "queue_s": _summary(self.queue_s),
            "most_load_rows": self.most_load,
            "fallbacks": dict(self.fallbacks),
            "batches": dict(self.batches),
        }

    def latency_s(self, percentile: float) -> float:
        """Return a percentile of the latencies; 0 if nothing was answered."""
        return _percentile(self.latencies_s, percentile)


def _summary(values: np.ndarray) -> dict[str, float]:
    mean = float(values.mean()) if len(values) else 0.0
    return {"mean": mean, **{f"p{p}": _percentile(values, p) for p in _PERCENTILES}}


def _percentile(values: np.ndarray, percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else 0.0
