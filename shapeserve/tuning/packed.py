"""Sizes along ``tokens`` for packed rows, from the batches that the traffic forms.

How many tokens are in a batch is not in a trace: it depends on how many rows wait when the device
is free. So the rows are first simulated on a grid so fine that hardly anything is padded; what its
batches hold is what the sizes are fitted to, as if it were rows. What a policy does is simulated
again, with its own sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from shapeserve.buckets import TOKENS, Grid
from shapeserve.errors import ConfigError
from shapeserve.policy import MAX_AXIS_SIZES, packed_grid
from shapeserve.traces import Traffic
from shapeserve.tuning.conditions import check_axes
from shapeserve.tuning.cost import ANALYTIC, Cost
from shapeserve.tuning.fit import Buckets, Rules
from shapeserve.tuning.outcome import Outcome
from shapeserve.tuning.request import Request, Scored
from shapeserve.tuning.served import Served
from shapeserve.tuning.simulate import simulate
from shapeserve.tuning.stand_in import grid_of
from shapeserve.tuning.task import Batches, ends_of, played, timed, usual_of

_FINE = (
    256  # sizes of the first simulation: at most 1/256 of the largest batch is padded; arbitrary
)


@dataclass(frozen=True, slots=True)
class PackedTask:
    """Sizes of packed batches; see :class:`shapeserve.tuning.task.Task`.

    Attributes:
        request: what is asked for.
        ends: ``tokens`` -> the largest batch.
        cost: of a batch.
        rules: what the sizes must obey.
        first: real tokens of the batches of the first half, as if each were a row.
        second: those of the second half.
        halves: the rows themselves.
        longest: row.
    """

    request: Request
    ends: Mapping[str, int]
    cost: Cost
    rules: Rules
    first: Traffic
    second: Traffic
    halves: tuple[Traffic, Traffic]
    longest: int

    @classmethod
    def of(cls, traffic: Traffic, request: Request) -> Self:
        """Prepare a request for packed rows.

        Raises:
            ConfigError: it cannot be met.
        """
        _check(traffic, request)
        check_axes(request.cost, (TOKENS,))
        row_ends = ends_of(traffic, request)
        (longest,) = row_ends.values()
        end = max(request.max_batch_tokens, longest)
        cost = request.cost or ANALYTIC[request.device]
        halves = played(traffic, request).clipped(row_ends).halves()
        served = Served.for_tokens(
            _fine_sizes(end), longest, request.device, cost, max_batch_tokens=end
        )
        first, second = (_sums(simulate(served, half)) for half in halves)
        rules = _rules(request, end, cost)
        return cls(request, {TOKENS: end}, cost, rules, first, second, halves, longest)

    def grid(self, buckets: Buckets, batches: Batches) -> Grid:
        """See :class:`shapeserve.tuning.task.Task`; packed rows have no batch sizes."""
        return grid_of(buckets, self.request.device, max_batch_tokens=self.ends[TOKENS])

    def served(self, buckets: Buckets, batches: Batches) -> Served:
        """See :class:`shapeserve.tuning.task.Task`."""
        sizes = [size for size in buckets[TOKENS] if isinstance(size, int)]
        return Served.for_tokens(
            sizes,
            self.longest,
            self.request.device,
            self.cost,
            max_batch_tokens=self.ends[TOKENS],
        )

    def play(self, buckets: Buckets, batches: Batches, *, second: bool) -> Outcome:
        """See :class:`shapeserve.tuning.task.Task`."""
        return simulate(self.served(buckets, batches), self.halves[second])

    def waste(self, buckets: Buckets) -> float:
        """See :class:`shapeserve.tuning.task.Task`: other sizes make other batches."""
        return _tail(self.play(buckets, None, second=True))

    def score(self, buckets: Buckets, batches: Batches = None) -> Scored:
        """See :class:`shapeserve.tuning.task.Task`: here everything is simulated."""
        first, second = (self.play(buckets, None, second=half) for half in (False, True))
        scored = Scored(buckets, _tail(first), _tail(second), second.device_s)
        return timed(scored, second, self.halves[1])

    def usual(self) -> dict[str, Buckets]:
        """See :class:`shapeserve.tuning.task.Task`."""
        default = packed_grid({}, self.ends[TOKENS], {TOKENS: self.longest})
        sizes = tuple(bucket.size(TOKENS) for bucket in default.buckets)
        named: dict[str, Buckets] = {"default": {TOKENS: sizes}, **usual_of(self.ends)}
        # Everything is simulated here, and no service has more sizes.
        return {name: made for name, made in named.items() if len(made[TOKENS]) <= MAX_AXIS_SIZES}


def _check(traffic: Traffic, request: Request) -> None:
    if len(traffic.axes) != 1:
        raise ConfigError(
            f"packed rows have one axis, the trace has {', '.join(traffic.axes)}; use the layout "
            "padded"
        )
    if traffic.times_s is None:
        raise ConfigError(
            "a histogram has no times, and how many tokens a packed batch holds depends on how "
            "many rows wait when the device is free; give a trace (t_s,len)"
        )
    if request.batches is not None:
        raise ConfigError(
            "--batch: a packed batch is a number of tokens, not of rows; leave it out"
        )


def _sums(outcome: Outcome) -> Traffic:
    """Return the real tokens of every batch, as if each were a row; only their order matters."""
    real = outcome.batch_real
    times_s = np.arange(float(len(real)))
    return Traffic((TOKENS,), real[:, None], np.ones(len(real)), times_s, True)


def _tail(outcome: Outcome) -> float:
    """Return padding / all elements."""
    return sum(outcome.waste.values())


def _fine_sizes(end: int) -> list[int]:
    """Even steps up to the end."""
    step = -(-end // _FINE)
    return [*range(step, end, step), end]


def _rules(request: Request, end: int, cost: Cost) -> Rules:
    if request.objective == "padding":
        return Rules({TOKENS: end}, request.align, request.include)

    def batch_cost(areas: np.ndarray) -> np.ndarray:
        distinct, places = np.unique(areas, return_inverse=True)
        seconds = [cost.seconds({TOKENS: int(area)}) for area in distinct]
        return np.maximum.accumulate(seconds)[places].reshape(areas.shape)

    ends = {TOKENS: end}
    return Rules(ends, request.align, request.include, batch_cost, request.variant_cost_s)
