"""From traffic to a proposal: fitted on the first half of the rows, judged on the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapeserve.buckets import BATCH, TOKENS
from shapeserve.config import RareShape, axes_of
from shapeserve.traces import Traffic
from shapeserve.tuning.fit import Buckets, assigned, fit, waste_by_axis
from shapeserve.tuning.limits import Footprint
from shapeserve.tuning.packed import PackedTask
from shapeserve.tuning.request import Request, Scored
from shapeserve.tuning.search import Choice, Steps, choose
from shapeserve.tuning.specialize import Specialization, specializations, specialized_points
from shapeserve.tuning.task import PaddedTask, Task


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
        predicted: axis -> padding along it / all elements, of the rows of the second half; of
            rows that are padded.
        guarded: share of the second half's rows that the default ``rare_shapes`` would send to the
            fallback, because their bucket would be more padding than it allows.
        cost_source: where ``device_s`` comes from, None without it.
        batches: sizes along ``batch``; None: what the device gets by default.
        footprint: what the proposed variants take; None if a policy may not have so many.
        p99_first_half_s: simulated latency of the rows that were fitted to, with that objective.
        slo_s: the bound that was asked for.
        limited_from: number of row shapes without the limits; None if they took none away.
        specialized: buckets that the second half used, and whether a program of their own pays;
            empty unless a horizon was given.
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
    batches: tuple[int, ...] | None = None
    footprint: Footprint | None = None
    p99_first_half_s: float | None = None
    slo_s: float | None = None
    limited_from: int | None = None
    specialized: tuple[Specialization, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether the sizes are along ``tokens``."""
        return TOKENS in self.proposed.buckets

    @property
    def counted(self) -> str:
        """What there is a number of."""
        return "sizes" if self.packed else "row shapes"

    @property
    def keeps_slo(self) -> bool:
        """Whether the rows that the fit had not seen keep the bound, if there is one."""
        return self.slo_s is None or (self.proposed.p99_s or 0.0) <= self.slo_s

    def policy(self) -> dict[str, dict[str, Any]]:
        """Return the ``policy`` block of a model's configuration."""
        made = {key: self._sizes(key) for key in self.proposed.buckets}
        return made if self.batches is None else {**made, BATCH: {"explicit": [*self.batches]}}

    def _sizes(self, key: str) -> dict[str, Any]:
        entries, axes = self.proposed.buckets[key], axes_of(key)
        if self.packed:  # what a tail will be is not a property of a row, and no metric says it
            return {"explicit": list(entries)}
        predicted = {axis: round(self.predicted[axis], 4) for axis in axes}
        if len(axes) == 1:
            return {"explicit": list(entries), "predicted_waste": predicted[key]}
        shapes = [list(shape) for shape in entries if isinstance(shape, tuple)]
        return {"shapes": shapes, "predicted_waste": predicted}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        named = {"proposed": self.proposed, **self.compared}
        shapes = {name: scored.shapes for name, scored in named.items()}
        (entries,) = self.proposed.buckets.values()
        wastes = {
            name: {"first_half": scored.first_half, "second_half": scored.second_half}
            for name, scored in named.items()
        }
        default = wastes.pop("default")
        return {
            "rows": self.rows,
            "buckets": [list(e) if isinstance(e, tuple) else e for e in entries],
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
                "batch": None if self.batches is None else list(self.batches),
                "shapes_without_limits": self.limited_from,
                "footprint": None if self.footprint is None else self.footprint.to_dict(),
                **self._latency(named),
                "specialize": [each.to_dict() for each in self.specialized],
            },
        }

    def _latency(self, named: Mapping[str, Scored]) -> dict[str, Any]:
        if self.proposed.p99_s is None:
            return {}
        return {
            "p99_s_first_half": self.p99_first_half_s,
            "p99_s_second_half": {name: scored.p99_s for name, scored in named.items()},
            "load_second_half": {name: scored.load for name, scored in named.items()},
            "slo_s": self.slo_s,
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
    steps = Steps(on_step)
    steps.expect(1)
    packed = request.layout == "packed"
    if request.horizon_s is not None:
        specialized_points(request.cost)  # refused before the search
    task: Task = (PackedTask if packed else PaddedTask).of(traffic, request)
    choice = choose(task, steps)
    buckets = choice.fit.buckets
    known = fit(task.second, task.rules, [choice.number], steps, expect_longer=False)
    proposed = task.score(buckets, choice.batches)
    return Proposal(
        axes=traffic.axes,
        rows=traffic.rows,
        ends=task.ends,
        proposed=proposed,
        compared={name: task.score(made) for name, made in task.usual().items()},
        optimum_second_half=task.waste(known[choice.number].buckets),
        gap=choice.fit.gap,
        curve=choice.curve,
        predicted={} if packed else waste_by_axis(task.second, buckets),
        guarded=0.0 if packed else guarded(task.second, buckets),
        cost_source=None if task.cost is None else task.cost.source,
        batches=choice.batches,
        footprint=choice.footprint,
        p99_first_half_s=choice.p99_s,
        slo_s=request.slo_s,
        limited_from=choice.wanted if choice.wanted != choice.number else None,
        specialized=_specialized(task, choice),
    )


def _specialized(task: Task, choice: Choice) -> tuple[Specialization, ...]:
    """Weigh specialising the proposed buckets, on the rows that the fit had not seen."""
    cost, horizon_s = task.cost, task.request.horizon_s
    if horizon_s is None or cost is None:
        return ()
    outcome = task.play(choice.fit.buckets, choice.batches, second=True)
    return specializations(outcome, cost, specialized_points(cost), horizon_s)


def guarded(traffic: Traffic, buckets: Buckets, rule: RareShape | None = None) -> float:
    """Return the share of rows whose bucket is more padding than ``rare_shapes`` allows."""
    rule = rule or RareShape()
    real = traffic.sizes.prod(axis=1, dtype=np.float64)
    sizes = assigned(traffic, buckets)
    wasteful = 1 - real / sizes.prod(axis=1, dtype=np.float64) > rule.max_padding_waste
    judged = ((sizes > traffic.sizes) & (sizes > rule.guard_min)).any(axis=1)
    return float(traffic.counts[wasteful & judged].sum() / traffic.counts.sum())
