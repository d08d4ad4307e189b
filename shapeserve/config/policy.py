"""The policy: what sizes a grid has along each axis, or along several axes together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from shapeserve.buckets import BATCH, TOKENS
from shapeserve.config.base import Axis, Float, Frozen, Int, Size, field, problem


class Linear(Frozen):
    """Sizes ``min``, ``min + step``, ... ``max``."""

    min: Int = field("Smallest size.", "elements", ge=1)
    max: Int = field("Largest size, always a bucket.", "elements", ge=1)
    step: Int = field("Distance between neighbouring sizes.", "elements", ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_min_max(self.min, self.max)
        return self


class Exponential(Frozen):
    """Sizes that grow by ``ratio``, each rounded up to ``align``, and ``max``."""

    min: Int = field("Smallest size.", "elements", ge=1)
    max: Int = field("Largest size, always a bucket.", "elements", ge=1)
    ratio: Float = field("Growth from one size to the next.", "factor > 1", 2.0, le=1024)
    align: Int = field("Every size but `max` is a multiple of it.", "elements", 1, ge=1)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        _check_min_max(self.min, self.max)
        if self.ratio <= 1:
            raise problem(
                f"ratio {self.ratio:g} does not grow; it must be above 1, for example 1.3", "ratio"
            )
        if self.min % self.align and self.min != self.max:
            up = math.ceil(self.min / self.align) * self.align
            raise problem(
                f"min {self.min} is not a multiple of align {self.align}; use min: {up}, "
                "or another align",
                "min",
            )
        return self


def _check_min_max(low: int, high: int) -> None:
    if low > high:
        raise problem(f"min {low} is above max {high}; swap them or raise max", "min")


Share = Annotated[Float, Field(ge=0, lt=1)]


class AxisPolicy(Frozen):
    """How the sizes of one axis are made, or of several together: exactly one of the ways."""

    explicit: tuple[Int, ...] | None = field("The sizes themselves, ascending.", "elements", None)
    linear: Linear | None = field("Sizes at a fixed distance.", "elements", None)
    exponential: Exponential | None = field("Sizes at a fixed ratio.", "elements", None)
    shapes: tuple[tuple[Size, ...], ...] | None = field(
        "Sizes of several axes that belong together, under a key that names them all, such as "
        "`height,width`: [[480, 640], [640, 480]].",
        "elements",
        None,
    )
    predicted_waste: Share | Mapping[Axis, Share] | None = field(
        "Padding that `shapeserve tune` expects of these sizes, exported for alerts as "
        "`shapeserve_policy_predicted_waste`; axis -> share where the key names several.",
        "share of the elements along the axes of a row, 0 to 1",
        None,
    )

    @field_validator("explicit")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is None:
            return None
        if not sizes:
            raise problem("no size is given; list at least one, for example [32, 64, 128]")
        for i, size in enumerate(sizes):
            if size < 1:
                raise problem(f"size {size} is below 1; remove it", i)
            if i and size == sizes[i - 1]:
                raise problem(f"size {size} is there twice; remove one", i)
            if i and size < sizes[i - 1]:
                remedy = f"sort them: {_short(sorted(set(sizes)))}"
                raise problem(f"size {size} comes after {sizes[i - 1]}; {remedy}", i)
        return sizes

    @field_validator("shapes")
    @classmethod
    def _distinct(
        cls, shapes: tuple[tuple[int, ...], ...] | None
    ) -> tuple[tuple[int, ...], ...] | None:
        if shapes is None:
            return None
        if not shapes:
            raise problem("no shape is given; list at least one, for example [[480, 640]]")
        for i, shape in enumerate(shapes):
            if shape in shapes[:i]:
                raise problem(f"shape {list(shape)} is there twice; remove one", i)
        return shapes

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [
            way for way in ("explicit", "linear", "exponential", "shapes") if getattr(self, way)
        ]
        if len(ways) != 1:
            given = " and ".join(ways) or "none"
            raise problem(f"{given} given; give exactly one of explicit, linear, exponential")
        return self

    @property
    def largest_key(self) -> tuple[str | int, ...]:
        """Where the largest size stands in the config, for error messages."""
        if self.shapes:
            return ("shapes",)
        if self.explicit:
            return ("explicit", len(self.explicit) - 1)
        return ("linear" if self.linear else "exponential", "max")

    @property
    def ends(self) -> tuple[tuple[int, int], ...]:
        """The smallest and the largest size of each of its axes, in order; of one axis, a pair."""
        if self.shapes:
            return tuple((min(sizes), max(sizes)) for sizes in zip(*self.shapes, strict=True))
        if made := self.linear or self.exponential:
            return ((made.min, made.max),)
        sizes = self.explicit or ()  # never empty: _one_way has seen to it
        return ((sizes[0], sizes[-1]),)


def _short(sizes: Sequence[int]) -> str:
    if len(sizes) <= 12:
        return str(list(sizes))
    return f"[{', '.join(map(str, sizes[:11]))}, ... {sizes[-1]}]"


def axes_of(key: str) -> tuple[str, ...]:
    """Return the axes that a key of a policy names: ``height,width`` names two."""
    return tuple(key.split(","))


def policy_of(policy: Policy, axis: str) -> tuple[str, int, AxisPolicy] | None:
    """Return the key that decides ``axis``, its place in that key, and the sizes; or None."""
    for key, sizes in policy.items():
        if axis in axes_of(key):
            return key, axes_of(key).index(axis), sizes
    return None


def predicted_waste(policy: Policy) -> dict[str, float]:
    """Return axis -> padding that the tuner expects along it, of the axes it says something of."""
    waste: dict[str, float] = {}
    for key, sizes in policy.items():
        if isinstance(sizes.predicted_waste, Mapping):
            waste |= sizes.predicted_waste
        elif sizes.predicted_waste is not None:
            waste[key] = sizes.predicted_waste
    return waste


def _check_prediction(key: str, sizes: AxisPolicy) -> None:
    axes, waste = axes_of(key), sizes.predicted_waste
    if waste is None:
        return
    if BATCH in axes or TOKENS in axes:
        raise problem(
            f"predicted_waste is of the sizes of a row, {key} is none of them; remove it",
            *(key, "predicted_waste"),
        )
    named = set(waste) if isinstance(waste, Mapping) else {key}
    if named != set(axes):
        raise problem(
            f"predicted_waste is given for {', '.join(sorted(named))}; give one share for each of "
            f"{', '.join(axes)}",
            *(key, "predicted_waste"),
        )


def _check_keys(policy: Mapping[str, AxisPolicy]) -> Mapping[str, AxisPolicy]:
    seen: dict[str, str] = {}
    for key, sizes in policy.items():
        _check_prediction(key, sizes)
        axes = axes_of(key)
        for axis in axes:
            if axis in seen:
                raise problem(f"the sizes of {axis} are given by {seen[axis]!r} already", key)
            seen[axis] = key
        if len(axes) > 1 and not sizes.shapes:
            raise problem(
                f"the axes {key} together are given as shapes; write shapes: "
                f"[[{', '.join(['64'] * len(axes))}], ...], or a policy for each axis",
                key,
            )
        if sizes.shapes and (len(axes) == 1 or BATCH in axes or TOKENS in axes):
            raise problem(
                "shapes are sizes of several row axes together, under a key such as height,width; "
                "use explicit for one axis",
                key,
                "shapes",
            )
        for i, shape in enumerate(sizes.shapes or ()):
            if len(shape) != len(axes):
                raise problem(
                    f"shape {list(shape)} has {len(shape)} sizes; {key} needs {len(axes)}",
                    key,
                    "shapes",
                    i,
                )
    return policy


Axes = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*$")]
Policy = Annotated[Mapping[Axes, AxisPolicy], AfterValidator(_check_keys)]
"""Axis (or axes, as ``height,width``) -> how its sizes are made. An axis that is left out gets the
default of the device."""
