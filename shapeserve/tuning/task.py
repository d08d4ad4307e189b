"""A request and its traffic: what sizes are fitted to, and what a policy does to both halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from shapeserve.buckets import BATCH, Grid
from shapeserve.config import AxisPolicy
from shapeserve.errors import ConfigError
from shapeserve.expect import powers_of_two
from shapeserve.policy import default_policy, generate_axis
from shapeserve.traces import Traffic
from shapeserve.tuning.conditions import check_axes
from shapeserve.tuning.cost import ANALYTIC, Cost, row_seconds
from shapeserve.tuning.fit import Buckets, Entries, Rules, executed, waste
from shapeserve.tuning.outcome import Outcome
from shapeserve.tuning.request import MAX_LENGTH, Request, Scored
from shapeserve.tuning.served import Served
from shapeserve.tuning.simulate import simulate
from shapeserve.tuning.stand_in import grid_of

Batches = tuple[int, ...] | None
"""Sizes along ``batch``; None: what the device gets by default."""


class Task(Protocol):
    """A request as far as it does not depend on the number of buckets."""

    @property
    def request(self) -> Request:
        """What is asked for."""

    @property
    def ends(self) -> Mapping[str, int]:
        """Axis -> largest size."""

    @property
    def rules(self) -> Rules:
        """What the sizes must obey."""

    @property
    def cost(self) -> Cost | None:
        """Of a batch."""

    @property
    def first(self) -> Traffic:
        """What the sizes are fitted to."""

    @property
    def second(self) -> Traffic:
        """What the same fit would have had to know for the second half."""

    def grid(self, buckets: Buckets, batches: Batches) -> Grid:
        """Return the grid of a service with these buckets.

        Raises:
            ConfigError: a policy may not have them.
        """

    def served(self, buckets: Buckets, batches: Batches) -> Served:
        """Return what the simulator runs for a policy.

        Raises:
            ConfigError: a policy may not have these buckets, or nothing is known about costs.
        """

    def play(self, buckets: Buckets, batches: Batches, *, second: bool) -> Outcome:
        """Simulate one half of the rows.

        Raises:
            ConfigError: a policy may not have these buckets, or rows have no times.
        """

    def waste(self, buckets: Buckets) -> float:
        """Return padding / all elements of the second half."""

    def score(self, buckets: Buckets, batches: Batches = None) -> Scored:
        """Return what a policy does to both halves."""

    def usual(self) -> dict[str, Buckets]:
        """Return name -> the policies that people use."""


@dataclass(frozen=True, slots=True)
class PaddedTask:
    """Row shapes for padded rows; see :class:`Task`."""

    request: Request
    ends: Mapping[str, int]
    cost: Cost | None
    rules: Rules
    first: Traffic
    second: Traffic

    @classmethod
    def of(cls, traffic: Traffic, request: Request) -> Self:
        """Prepare a request for padded rows.

        Raises:
            ConfigError: it cannot be met.
        """
        ends = ends_of(traffic, request)
        cost = _cost(traffic, request)
        check_axes(cost, (BATCH, *traffic.axes))
        halves = played(traffic, request).clipped(ends).halves()
        return cls(request, ends, cost, _rules(request, ends, cost), *halves)

    def grid(self, buckets: Buckets, batches: Batches) -> Grid:
        """See :class:`Task`."""
        costs = self.request.variant_costs
        return grid_of(
            buckets,
            self.request.device,
            max_batch_tokens=self.request.max_batch_tokens,
            batches=batches,
            min_batch=costs.min_batch if costs else None,
        )

    def served(self, buckets: Buckets, batches: Batches) -> Served:
        """See :class:`Task`."""
        if self.cost is None:
            raise ConfigError(_NO_PIXELS)
        costs = self.request.variant_costs
        return Served.for_buckets(
            buckets,
            self.request.device,
            self.cost,
            max_batch_tokens=self.request.max_batch_tokens,
            batches=batches,
            min_batch=costs.min_batch if costs else None,
        )

    def play(self, buckets: Buckets, batches: Batches, *, second: bool) -> Outcome:
        """See :class:`Task`."""
        return simulate(self.served(buckets, batches), self.second if second else self.first)

    def waste(self, buckets: Buckets) -> float:
        """See :class:`Task`."""
        return waste(self.second, buckets)

    def score(self, buckets: Buckets, batches: Batches = None) -> Scored:
        """See :class:`Task`."""
        seconds = None if self.cost is None else self._device_s(buckets, self.cost, batches)
        scored = Scored(buckets, waste(self.first, buckets), waste(self.second, buckets), seconds)
        if self.request.objective != "p99":
            return scored
        try:
            outcome = self.play(buckets, batches, second=True)
        except ConfigError:  # one of the usual policies, of more sizes than a policy may have
            return scored
        return timed(scored, outcome, self.second)

    def usual(self) -> dict[str, Buckets]:
        """See :class:`Task`."""
        most = self.request.max_batch_tokens
        default = default_policy(self.ends, self.request.device, max_batch_tokens=most)
        made = {key: _entries(sizes, key) for key, sizes in default.items() if key != BATCH}
        return {"default": made, **usual_of(self.ends)}

    def _device_s(self, buckets: Buckets, cost: Cost, batches: Batches) -> float:
        seconds = _rising_row_seconds(executed(self.second, buckets), cost, self.request, batches)
        return float((self.second.counts * seconds).sum())


def usual_of(ends: Mapping[str, int]) -> dict[str, Buckets]:
    """Return name -> the policies that people use on every device."""
    return {
        "pow2": {axis: powers_of_two(end) for axis, end in ends.items()},
        "multiple_64": {axis: (*range(64, end, 64), end) for axis, end in ends.items()},
        "pad_to_max": {axis: (end,) for axis, end in ends.items()},
    }


def ends_of(traffic: Traffic, request: Request) -> dict[str, int]:
    """Return axis -> largest size of a row.

    Raises:
        ConfigError: it is beyond all that can be tuned to, a size that must be a bucket is larger,
            or there are too few rows.
    """
    ends = {axis: request.max_length or longest for axis, longest in traffic.longest.items()}
    for axis, end in ends.items():
        if end > MAX_LENGTH:
            raise ConfigError(
                f"{axis} ends at {end}; at most {MAX_LENGTH} can be tuned to; cut longer rows with "
                "--max-length"
            )
    for size in request.include:
        over = [axis for axis, end in ends.items() if size > end]
        if over and request.layout == "padded":
            raise ConfigError(
                f"a bucket of {size} is asked for, but {over[0]} ends at {ends[over[0]]}; leave it "
                "out or raise the largest length"
            )
    if traffic.rows < 4:
        raise ConfigError(
            f"the trace has {traffic.rows} rows; at least 4 are needed to fit on one half and "
            "judge on the other"
        )
    return ends


def played(traffic: Traffic, request: Request) -> Traffic:
    """Return the rows at the speed that is asked for."""
    if traffic.times_s is None or request.speed == 1:
        return traffic
    return replace(traffic, times_s=traffic.times_s / request.speed)


def timed(scored: Scored, outcome: Outcome, half: Traffic) -> Scored:
    """Add what a simulation of the second half found."""
    span_s = 0.0 if half.times_s is None else float(np.ptp(half.times_s))
    load = outcome.device_s / span_s if span_s else None
    return replace(scored, p99_s=outcome.latency_s(99), load=load)


_NO_PIXELS = (
    "the analytic cost is for tokens, and the trace has other axes; give a measured cost table, or "
    "minimise padding"
)


def _entries(made: AxisPolicy, key: str) -> Entries:
    return made.shapes or generate_axis(made, key)


def _cost(traffic: Traffic, request: Request) -> Cost | None:
    if request.cost is not None or len(traffic.axes) == 1:
        return request.cost or ANALYTIC[request.device]
    if request.objective != "padding":
        raise ConfigError(
            f"the analytic cost is for tokens, and the trace has the axes "
            f"{', '.join(traffic.axes)}; give a measured cost table, or minimise padding"
        )
    return None


def _rules(request: Request, ends: Mapping[str, int], cost: Cost | None) -> Rules:
    forced = request.include
    if request.objective == "padding" or cost is None:
        return Rules(ends, request.align, forced)

    def row_cost(areas: np.ndarray) -> np.ndarray:
        batches = None if request.batches == "auto" else request.batches
        return _rising_row_seconds(areas, cost, request, batches)

    return Rules(ends, request.align, forced, row_cost, request.variant_cost_s)


def _rising_row_seconds(
    areas: np.ndarray, cost: Cost, request: Request, batches: Sequence[int] | None
) -> np.ndarray:
    """Return the seconds of a row, never less than of a smaller one: measured costs have noise."""
    distinct, places = np.unique(areas, return_inverse=True)
    rows = {} if batches is None else {"max_rows": max(batches)}
    each = [row_seconds(cost, int(area), request.max_batch_tokens, **rows) for area in distinct]
    return np.maximum.accumulate(each)[places].reshape(areas.shape)
