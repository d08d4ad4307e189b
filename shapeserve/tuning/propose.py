"""From traffic to a proposal: fitted on the first half of the rows, judged on the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from shapeserve.buckets import BATCH
from shapeserve.config import AxisPolicy, RareShape, axes_of
from shapeserve.errors import ConfigError
from shapeserve.expect import powers_of_two
from shapeserve.policy import Device, default_policy, generate_axis
from shapeserve.traces import Traffic
from shapeserve.tuning.cost import ANALYTIC, Cost, row_seconds
from shapeserve.tuning.fit import (
    Buckets,
    Entries,
    Rules,
    assigned,
    executed,
    fit,
    row_shapes,
    waste,
    waste_by_axis,
)

Objective = Literal["padding", "seconds"]

MAX_SHAPES = 32
"""Row shapes that the automatic choice looks at."""
# One more row shape costs a capture for each batch size on a GPU (4 to 12 ms and some memory each)
# and a longer warm-up; it must take away so much of all that is executed. Arbitrary.
WORTHWHILE = 0.005


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        shapes: row shapes, at most; None leaves the number to the traffic.
        max_length: sizes are cut to it, and it is the last bucket along every axis; None: the
            longest row of the whole trace.
        align: sizes are multiples of it, except the last.
        include: further sizes that must be buckets, if there is one axis.
        objective: minimise padded elements, or device seconds.
        cost: what a batch costs; None: the analytic one of ``device``, which is for tokens.
        device: kind of device that today's default is for.
        variant_cost_s: device seconds that one more row shape must save over the trace.
        max_batch_tokens: padded elements of a batch, as ``limits.max_batch_tokens``.
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


@dataclass(frozen=True, slots=True)
class Scored:
    """What one policy does to both halves.

    Attributes:
        buckets: key of a policy -> its sizes or shapes.
        first_half: padding / all elements along the axes of a row, of the rows it was fitted to.
        second_half: the same of the rows that it had not seen.
        device_s: seconds of the rows of the second half in full batches; None on two axes without
            measured costs.
    """

    buckets: Buckets
    first_half: float
    second_half: float
    device_s: float | None

    @property
    def shapes(self) -> int:
        """Row shapes."""
        return row_shapes(self.buckets)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The proposed sizes beside the usual ones.

    Attributes:
        axes: names of the row axes.
        rows: rows of the trace, both halves.
        ends: axis -> last bucket.
        proposed: fitted on the first half.
        compared: name -> a usual policy, ``pow2``, ``multiple_64``, ``pad_to_max`` and ``default``
            (what this device gets without a policy).
        optimum_second_half: waste of the second half with as many shapes fitted to itself: what
            could not be known.
        gap: of the search, see ``Fit``.
        curve: number of shapes -> waste on rows that the fit had not seen, within the first half;
            empty if the number was given.
        predicted: axis -> padding along it / all elements, of the rows of the second half.
        guarded: share of the second half's rows that the default ``rare_shapes`` would send to the
            fallback, because their bucket would be more padding than it allows.
        cost_source: where ``device_s`` comes from, None without it.
    """

    axes: tuple[str, ...]
    rows: int
    ends: Mapping[str, int]
    proposed: Scored
    compared: Mapping[str, Scored]
    optimum_second_half: float
    gap: float
    curve: Mapping[int, float]
    predicted: Mapping[str, float]
    guarded: float
    cost_source: str | None

    def policy(self) -> dict[str, dict[str, Any]]:
        """Return the ``policy`` block of a model's configuration."""
        return {key: self._sizes(key) for key in self.proposed.buckets}

    def _sizes(self, key: str) -> dict[str, Any]:
        entries, axes = self.proposed.buckets[key], axes_of(key)
        predicted = {axis: round(self.predicted[axis], 4) for axis in axes}
        if len(axes) == 1:
            return {"explicit": list(entries), "predicted_waste": predicted[key]}
        shapes = [list(shape) for shape in entries if isinstance(shape, tuple)]
        return {"shapes": shapes, "predicted_waste": predicted}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        named = {"proposed": self.proposed, **self.compared}
        shapes = {name: scored.shapes for name, scored in named.items()}
        (way,) = self.policy().values()
        wastes = {
            name: {"first_half": scored.first_half, "second_half": scored.second_half}
            for name, scored in named.items()
        }
        default = wastes.pop("default")
        return {
            "rows": self.rows,
            "buckets": way.get("explicit") or way["shapes"],
            "waste": wastes,
            "details": {
                "axes": list(self.axes),
                "max_length": dict(self.ends),
                "shapes": shapes,
                "default_waste": default,
                "device_s_second_half": {name: scored.device_s for name, scored in named.items()},
                "cost": self.cost_source,
                "optimum_second_half": self.optimum_second_half,
                "search_gap": self.gap,
                "unseen_waste_by_shapes": {str(k): v for k, v in self.curve.items()},
                "guarded_rows": self.guarded,
            },
        }


def propose(
    traffic: Traffic,
    request: Request,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Proposal:
    """Fit bucket sizes to the first half of the rows and compare them on both halves.

    Args:
        traffic: at least four rows.
        request: what is asked for.
        on_step: told how many steps of how many are done.

    Raises:
        ConfigError: the request cannot be met; it names value, bound and remedy.
    """
    task = _Task.of(traffic, request)
    numbers = [request.shapes] if request.shapes else [*range(1, MAX_SHAPES + 1)]
    total = 2 + (0 if request.shapes else len(numbers))
    steps = iter(range(1, total + 1))

    def step() -> None:
        on_step(next(steps), total)

    curve: dict[int, float] = {}
    if not request.shapes:
        chosen, curve = _choose_number(task.first, task.rules, numbers, step)
        numbers = [chosen]
    fitted = fit(task.first, task.rules, numbers, step)[numbers[0]]
    known = fit(task.second, task.rules, numbers, step, expect_longer=False)[numbers[0]]
    return Proposal(
        axes=traffic.axes,
        rows=traffic.rows,
        ends=task.ends,
        proposed=task.score(fitted.buckets),
        compared={name: task.score(made) for name, made in usual(task.ends, request).items()},
        optimum_second_half=waste(task.second, known.buckets),
        gap=fitted.gap,
        curve=curve,
        predicted=waste_by_axis(task.second, fitted.buckets),
        guarded=guarded(task.second, fitted.buckets),
        cost_source=None if task.cost is None else task.cost.source,
    )


def by_number(
    traffic: Traffic,
    request: Request,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, Scored]:
    """Return what each number of row shapes up to ``MAX_SHAPES`` would do to both halves.

    Args:
        traffic: as for :func:`propose`.
        request: as for :func:`propose`; a larger number of shapes that it asks for is there too.
        on_step: told how many steps of how many are done.

    Raises:
        ConfigError: as for :func:`propose`.
    """
    task = _Task.of(traffic, request)
    numbers = sorted({*range(1, MAX_SHAPES + 1), request.shapes or 1})
    steps = iter(range(1, len(numbers) + 1))
    fits = fit(task.first, task.rules, numbers, lambda: on_step(next(steps), len(numbers)))
    return {number: task.score(found.buckets) for number, found in fits.items()}


@dataclass(frozen=True, slots=True)
class _Task:
    """A request as far as it does not depend on the number of shapes."""

    request: Request
    ends: Mapping[str, int]
    cost: Cost | None
    rules: Rules
    first: Traffic
    second: Traffic

    @classmethod
    def of(cls, traffic: Traffic, request: Request) -> Self:
        ends = _ends(traffic, request)
        cost = _cost(traffic, request)
        return cls(
            request, ends, cost, _rules(request, ends, cost), *traffic.clipped(ends).halves()
        )

    def score(self, buckets: Buckets) -> Scored:
        seconds = None
        if self.cost is not None:
            seconds = _device_seconds(self.second, buckets, self.cost, self.request)
        return Scored(buckets, waste(self.first, buckets), waste(self.second, buckets), seconds)


def usual(ends: Mapping[str, int], request: Request) -> dict[str, Buckets]:
    """Return name -> the policies that people use, along every axis up to its end."""
    default = default_policy(ends, request.device, max_batch_tokens=request.max_batch_tokens)
    return {
        "default": {key: _entries(made, key) for key, made in default.items() if key != BATCH},
        "pow2": {axis: powers_of_two(end) for axis, end in ends.items()},
        "multiple_64": {axis: (*range(64, end, 64), end) for axis, end in ends.items()},
        "pad_to_max": {axis: (end,) for axis, end in ends.items()},
    }


def _entries(made: AxisPolicy, key: str) -> Entries:
    return made.shapes or generate_axis(made, key)


def guarded(traffic: Traffic, buckets: Buckets, rule: RareShape | None = None) -> float:
    """Return the share of rows whose bucket is more padding than ``rare_shapes`` allows."""
    rule = rule or RareShape()
    real = traffic.sizes.prod(axis=1, dtype=np.float64)
    sizes = assigned(traffic, buckets)
    wasteful = 1 - real / sizes.prod(axis=1, dtype=np.float64) > rule.max_padding_waste
    judged = ((sizes > traffic.sizes) & (sizes > rule.guard_min)).any(axis=1)
    return float(traffic.counts[wasteful & judged].sum() / traffic.counts.sum())


def _ends(traffic: Traffic, request: Request) -> dict[str, int]:
    ends = {axis: request.max_length or longest for axis, longest in traffic.longest.items()}
    for size in request.include:
        over = [axis for axis, end in ends.items() if size > end]
        if over:
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


def _cost(traffic: Traffic, request: Request) -> Cost | None:
    if request.cost is not None or len(traffic.axes) == 1:
        return request.cost or ANALYTIC[request.device]
    if request.objective == "seconds":
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
        return _rising_row_seconds(areas, cost, request.max_batch_tokens)

    return Rules(ends, request.align, forced, row_cost, request.variant_cost_s)


def _rising_row_seconds(areas: np.ndarray, cost: Cost, max_batch_tokens: int) -> np.ndarray:
    """Return the seconds of a row, never less than of a smaller one: measured costs have noise."""
    distinct, places = np.unique(areas, return_inverse=True)
    each = [row_seconds(cost, int(area), max_batch_tokens) for area in distinct]
    return np.maximum.accumulate(each)[places].reshape(areas.shape)


def _device_seconds(traffic: Traffic, buckets: Buckets, cost: Cost, request: Request) -> float:
    seconds = _rising_row_seconds(executed(traffic, buckets), cost, request.max_batch_tokens)
    return float((traffic.counts * seconds).sum())


def _choose_number(
    first: Traffic, rules: Rules, numbers: Sequence[int], step: Callable[[], None]
) -> tuple[int, dict[int, float]]:
    """Choose the number of shapes within the first half: fitted to a part, judged on the other.

    It is the smallest after which no larger one takes away ``WORTHWHILE`` of the cost for each
    shape that it has more, on rows that the fit has not seen.
    """
    train, unseen = first.halves()
    fits = fit(train, rules, numbers, step)
    costs = {
        number: float((unseen.counts * rules.cost(executed(unseen, made.buckets))).sum())
        + rules.variant_cost * row_shapes(made.buckets)
        for number, made in fits.items()
    }
    curve = {number: waste(unseen, made.buckets) for number, made in fits.items()}
    for number, cost in costs.items():
        if all(
            cost - more_cost < WORTHWHILE * cost * (more - number)
            for more, more_cost in costs.items()
            if more > number
        ):
            return number, curve
    return max(costs), curve
