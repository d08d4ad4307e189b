"""What latency becomes as more rows come: some policies, simulated on the rows of one trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shapeserve.traces import Traffic
from shapeserve.tuning.served import Served
from shapeserve.tuning.simulate import simulate

# Shares of what the best policy does with an endless queue; in an order that leaves a curve if time
# does not suffice for all.
SHARES = (0.55, 0.25, 0.8, 0.1, 0.7, 0.4, 0.9)
# 50 of them are slower than the 99th percentile; three policies at all loads take 3 to 10 s.
MAX_ROWS = 5000
BUDGET_S = 20.0
# If answers are slower than that the queue grows as long as rows come, and latency is about the
# length of the trace. A device that is always busy is no sign of it: its batches may still grow.
KEPT_UP = 0.98


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One policy under one load.

    Attributes:
        rows_per_s: rows that come, on average.
        p50_s: median latency.
        p99_s: 99th percentile of the latency.
        busy: device seconds / the time to the last answer.
        kept_up: the time in which rows come / the time to the last answer.
    """

    rows_per_s: float
    p50_s: float
    p99_s: float
    busy: float
    kept_up: float


@dataclass(frozen=True, slots=True)
class Loads:
    """Latency of some policies against the load.

    Attributes:
        rows: how many were played, in the order and rhythm of the trace.
        recorded_per_s: rows that came in a second when they were recorded.
        points: policy -> its points by ascending load, without those that it cannot keep up with.
        left_out: loads that there was no time for.
    """

    rows: int
    recorded_per_s: float
    points: Mapping[str, tuple[LoadPoint, ...]]
    left_out: int = 0

    @property
    def common(self) -> float | None:
        """The highest load that all policies keep up with; None if there is none."""
        loads = [{point.rows_per_s for point in points} for points in self.points.values()]
        return max(set.intersection(*loads), default=None)


def under_load(
    traffic: Traffic,
    policies: Mapping[str, Served],
    on_step: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Loads | None:
    """Play the first rows of a trace at several speeds; None if it has no times to speed up.

    After ``BUDGET_S`` no further load is begun.

    Args:
        traffic: rows, none longer than the largest bucket.
        policies: name -> what is served by it.
        on_step: told how many simulations of how many are done.
        clock: seconds, for the budget.
    """
    traffic = _first_rows(traffic)
    span_s = 0.0 if traffic.times_s is None else float(np.ptp(traffic.times_s))
    if not span_s:
        return None
    began_s, total = clock(), (1 + len(SHARES)) * len(policies)
    steps = iter(range(1, total + 1))
    most_per_s = 0.0
    for served in policies.values():
        most_per_s = max(most_per_s, _most_per_s(served, traffic))
        on_step(next(steps), total)
    recorded_per_s = len(traffic.sizes) / span_s
    points: dict[str, list[LoadPoint]] = {name: [] for name in policies}
    done = 0
    for share in SHARES:
        if clock() - began_s > BUDGET_S:
            break
        for name, served in policies.items():
            point = _play(served, traffic, span_s, share * most_per_s / recorded_per_s)
            if point.kept_up > KEPT_UP:
                points[name].append(point)
            on_step(next(steps), total)
        done += 1
    found = {name: tuple(sorted(made, key=_load)) for name, made in points.items()}
    return Loads(len(traffic.sizes), recorded_per_s, found, len(SHARES) - done)


def _load(point: LoadPoint) -> float:
    return point.rows_per_s


def _first_rows(traffic: Traffic) -> Traffic:
    times_s = None if traffic.times_s is None else traffic.times_s[:MAX_ROWS]
    return replace(
        traffic,
        sizes=traffic.sizes[:MAX_ROWS],
        counts=traffic.counts[:MAX_ROWS],
        times_s=times_s,
    )


def _most_per_s(served: Served, traffic: Traffic) -> float:
    """Return the rows that a device does in a second if all are there at once."""
    at_once = replace(traffic, times_s=np.zeros(len(traffic.sizes)))
    return len(traffic.sizes) / simulate(served, at_once).device_s


def _play(served: Served, traffic: Traffic, span_s: float, speed: float) -> LoadPoint:
    outcome = simulate(served, traffic, speed=speed)
    return LoadPoint(
        rows_per_s=outcome.rows / (span_s / speed),
        p50_s=outcome.latency_s(50),
        p99_s=outcome.latency_s(99),
        busy=outcome.utilisation,
        kept_up=span_s / speed / outcome.span_s,
    )
