"""What a proposal is asked for, and what is said of a policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shapeserve.policy import Device
from shapeserve.tuning.cost import Cost
from shapeserve.tuning.fit import Buckets, row_shapes
from shapeserve.tuning.limits import Limits
from shapeserve.tuning.table import CostTable
from shapeserve.tuning.variants import VariantCosts

MAX_LENGTH = 2**24
"""Longest row that can be tuned to: what is done takes memory in proportion to it."""

Objective = Literal["padding", "seconds", "p99"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        shapes: row shapes, at most; None leaves the number to the traffic.
        max_length: sizes are cut to it, and it is the last bucket along every axis; None: the
            longest row of the whole trace.
        align: sizes are multiples of it, except the last.
        include: further sizes that must be buckets, if there is one axis.
        objective: minimise padded elements, device seconds, or the simulated 99th percentile of the
            latency.
        cost: what a batch costs; None: the analytic one of ``device``, which is for tokens.
        device: kind of device that today's default is for.
        variant_cost_s: device seconds that one more row shape must save over the trace.
        max_batch_tokens: padded elements of a batch, as ``limits.max_batch_tokens``.
        layout: of the rows; ``packed`` asks for sizes along ``tokens``.
        batches: sizes along ``batch``; None: what the device gets by default; ``auto``: those of
            the least 99th percentile, with that objective.
        limits: what the variants may take.
        slo_s: with the objective ``p99``, the fewest variants that keep it, instead of the least
            latency.
        speed: a trace is played so many times as fast.
        horizon_s: weigh specialising the buckets over so many seconds; None: do not.
    """

    shapes: int | None = None
    max_length: int | None = None
    align: int = 1
    include: tuple[int, ...] = ()
    objective: Objective = "padding"
    cost: Cost | None = None
    device: Device = "cpu"
    variant_cost_s: float = 0.0
    max_batch_tokens: int = 8192
    layout: Literal["padded", "packed"] = "padded"
    batches: tuple[int, ...] | Literal["auto"] | None = None
    limits: Limits = field(default_factory=Limits)
    slo_s: float | None = None
    speed: float = 1.0
    horizon_s: float | None = None

    @property
    def variant_costs(self) -> VariantCosts | None:
        """What variants cost, if it was measured."""
        return self.cost.variants if isinstance(self.cost, CostTable) else None


@dataclass(frozen=True, slots=True)
class Scored:
    """What one policy does to both halves.

    Attributes:
        buckets: key of a policy -> its sizes or shapes.
        first_half: padding / all elements along the axes of a row, of the rows it was fitted to.
        second_half: the same of the rows that it had not seen.
        device_s: seconds of the rows of the second half in full batches; None on two axes without
            measured costs.
        p99_s: simulated latency of the rows of the second half; None if it was not asked for.
        load: device seconds of that simulation / the time in which the rows came.
    """

    buckets: Buckets
    first_half: float
    second_half: float
    device_s: float | None
    p99_s: float | None = None
    load: float | None = None

    @property
    def shapes(self) -> int:
        """Row shapes."""
        return row_shapes(self.buckets)
