"""Which buckets deserve a program of their own: those that earn its compile within the horizon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shapeserve.amortize import Shape, net_gain_s, worth_specializing
from shapeserve.errors import ConfigError
from shapeserve.metrics import NO_BUCKET
from shapeserve.tuning.cost import Cost, Sizes
from shapeserve.tuning.outcome import Outcome
from shapeserve.tuning.table import CostTable
from shapeserve.tuning.variants import SpecializedPoint


@dataclass(frozen=True, slots=True)
class Specialization:
    """One bucket, specialised or not.

    Attributes:
        bucket: its label.
        calls: batches within the horizon, at the rate of the trace.
        shape: seconds of its compile, and of a call with its own program and the shared one.
        pays: whether its compile is earned back within the horizon.
    """

    bucket: str
    calls: int
    shape: Shape
    pays: bool

    @property
    def net_s(self) -> float:
        """Device seconds won within the horizon; a loss is negative."""
        shape = self.shape
        return net_gain_s(shape.compile_s, shape.dynamic_s, shape.specialized_s, self.calls)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            **asdict(self.shape),
            "calls": self.calls,
            "break_even_calls": self.shape.break_even,
            "net_gain_s": self.net_s,
            "pays": self.pays,
        }


def specialized_points(cost: Cost | None) -> Sequence[SpecializedPoint]:
    """Return the buckets that were specialised when the costs were measured.

    Raises:
        ConfigError: none was; it says what to measure.
    """
    variants = cost.variants if isinstance(cost, CostTable) else None
    if variants is None or not variants.specialized:
        raise ConfigError(
            "--horizon-s needs what specialising costs and gives; measure it with `shapeserve "
            "profile CONFIG.yaml --specialized 3 --out COSTS.json` and give --costs COSTS.json"
        )
    return variants.specialized


def specializations(
    outcome: Outcome, cost: Cost, points: Sequence[SpecializedPoint], horizon_s: float
) -> tuple[Specialization, ...]:
    """Weigh every bucket that the rows used, the one that wins most first.

    A bucket that was not specialised itself changes as the nearest one that was.

    Args:
        outcome: of a simulation at the rate of the trace.
        cost: of a call of the shared program.
        points: buckets that were specialised, at least one.
        horizon_s: seconds that the programs will be used for.
    """
    ran = {label: n for label, n in outcome.batches.items() if label != NO_BUCKET}
    whole = sum(ran.values())
    if not whole or not outcome.span_s:
        return ()
    per_s = whole / outcome.span_s
    shapes = [_shape(label, n / whole, cost, points) for label, n in ran.items()]
    paying = {shape.name for shape in worth_specializing(shapes, int(per_s * horizon_s))}
    found = [
        Specialization(s.name, int(s.share * per_s * horizon_s), s, s.name in paying)
        for s in shapes
    ]
    return tuple(sorted(found, key=lambda each: -each.net_s))


def _shape(label: str, share: float, cost: Cost, points: Sequence[SpecializedPoint]) -> Shape:
    sizes = _sizes(label)
    near = min(points, key=lambda point: _distance(sizes, dict(point.sizes)))
    shared_s = cost.seconds(sizes)
    return Shape(
        name=label,
        share=share,
        compile_s=near.compile_s,
        specialized_s=shared_s * near.specialized_s / near.shared_s,
        dynamic_s=shared_s,
    )


def _sizes(label: str) -> Mapping[str, int]:
    """``batch=8,seq=128`` as axis -> size."""
    pairs = (part.partition("=") for part in label.split(","))
    return {axis: int(size) for axis, _, size in pairs}


def _distance(one: Sizes, other: Sizes) -> float:
    return sum(math.log(one[axis] / other[axis]) ** 2 for axis in one)
