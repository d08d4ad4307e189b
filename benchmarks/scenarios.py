"""What is asked of a server (Scenario), what one request gave (Sample), and their summary."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UNFINISHED = "unfinished"
# Below this share of the offered rate a server is saturated: higher rates tell nothing more.
KEPT_UP_RATIO = 0.9


@dataclass(frozen=True)
class Scenario:
    """One load: closed loop (``clients`` ask again once answered) or open loop (Poisson).

    Attributes:
        rate_per_s: offered requests per second of an open loop, None for a closed loop.
        clients: number of clients of a closed loop.
        rows: texts of one request.
        duration_s: time during which requests are sent; all of them are then waited for.
    """

    name: str
    duration_s: float
    rows: int = 1
    clients: int = 1
    rate_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. An open loop's latency starts at the scheduled time, sent or not."""

    latency_s: float
    rows: int
    error: str | None = None


def poisson_schedule(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Return the arrival times in [0, duration_s) of a Poisson process."""
    rng = random.Random(seed)
    times = []
    now_s = rng.expovariate(rate_per_s)
    while now_s < duration_s:
        times.append(now_s)
        now_s += rng.expovariate(rate_per_s)
    return times


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of ascending values."""
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


def summarise(samples: Sequence[Sample], elapsed_s: float) -> dict[str, Any]:
    """Return counts, rates and latency percentiles of one scenario.

    Args:
        samples: every request that was sent or was due.
        elapsed_s: from the first request to the last answer.

    Latencies are those of good answers, and of unfinished requests at the moment they were given
    up: leaving those out would make an overloaded server look quick.
    """
    good = [s for s in samples if s.error is None]
    latencies = sorted(s.latency_s for s in samples if s.error in (None, UNFINISHED))
    summary: dict[str, Any] = {
        "requests": len(samples),
        "answered": len(good),
        "errors": dict(Counter(s.error for s in samples if s.error is not None)),
        "elapsed_s": elapsed_s,
        "requests_per_s": len(good) / elapsed_s,
        "rows_per_s": sum(s.rows for s in good) / elapsed_s,
    }
    if latencies:
        for percent in (50, 90, 99):
            summary[f"p{percent}_ms"] = 1e3 * percentile(latencies, percent)
        summary["max_ms"] = 1e3 * latencies[-1]
    return summary


def kept_up(scenario: Scenario, summary: dict[str, Any]) -> bool:
    """Tell whether an open loop was answered at about the rate that was offered."""
    offered_per_s = summary["requests"] / scenario.duration_s
    return bool(summary["requests_per_s"] >= KEPT_UP_RATIO * offered_per_s)
