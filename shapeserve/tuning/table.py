"""Measured costs: seconds and memory of some batches, and what follows for all others."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from shapeserve.buckets import BATCH
from shapeserve.errors import ConfigError
from shapeserve.tuning.cost import Formula, Sizes, padded_pairs
from shapeserve.tuning.cost_file import parse
from shapeserve.tuning.regress import fit_factors
from shapeserve.tuning.variants import SizeItems, VariantCosts

_NEAREST = 4  # points that correct the formula at a place between them; arbitrary


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One measured batch.

    Attributes:
        sizes: (axis, size) of what was executed, in the table's order of axes.
        seconds: device time of one batch.
        peak_bytes: device memory that it needs, None where that is not known.
        pairs: pairs of tokens that attended to each other, where the sizes do not say it: in a
            packed batch.
    """

    sizes: SizeItems
    seconds: float
    peak_bytes: int | None = None
    pairs: float | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How far off a fit is at measured batches that it has not seen, relative to what they took.

    Attributes:
        sizes: of these batches.
        median_error: of all of them.
        worst_error: of the worst one.
    """

    sizes: tuple[SizeItems, ...]
    median_error: float
    worst_error: float


@dataclass(frozen=True)
class CostTable:
    """Measured batches of one model on one device, with a formula fitted to them.

    A batch that was measured costs what was measured. Any other costs what the formula says, times
    how far the nearest measured batches lie from it.

    Attributes:
        conditions: what the numbers hold for: model, dtype, device, versions.
        axes: ``batch`` and the row axes, or ``tokens``.
        points: at least one.
        held_out: the error of the same fit without some of the points.
        variants: what it costs to have variants, None where it was not measured.
    """

    conditions: Mapping[str, str]
    axes: tuple[str, ...]
    points: tuple[CostPoint, ...]
    held_out: HeldOut | None = None
    variants: VariantCosts | None = None

    def __post_init__(self) -> None:
        for point in self.points:
            if tuple(axis for axis, _ in point.sizes) != self.axes:
                raise ConfigError(
                    f"the cost of {_label(point)} was measured, but the table has the axes "
                    f"{', '.join(self.axes)}; every point names exactly these"
                )
        if not self.points:
            raise ConfigError("a cost table needs at least one measured batch")

    @property
    def fingerprint(self) -> str:
        """Equal for equal conditions and axes: whether numbers hold for something else."""
        text = json.dumps([dict(sorted(self.conditions.items())), list(self.axes)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        what = ", ".join(f"{key} {value}" for key, value in sorted(self.conditions.items()))
        unseen = ""
        if self.held_out is not None:
            unseen = (
                f", off by {self.held_out.median_error:.1%} (median), "
                f"{self.held_out.worst_error:.1%} (worst) at {len(self.held_out.sizes)} held out"
            )
        return (
            f"measured: {len(self.points)} batches, fitted within {self.errors[0]:.1%} (median), "
            f"{self.errors[1]:.1%} (worst){unseen}; {what or 'conditions not stated'}"
        )

    @cached_property
    def formula(self) -> Formula:
        """The formula that fits the measured seconds best, by relative error."""
        seconds = np.array([point.seconds for point in self.points])
        launch_s, linear_s, quadratic_s = fit_factors(self._terms, seconds)
        return Formula(launch_s, linear_s, quadratic_s, "fitted")

    @cached_property
    def errors(self) -> tuple[float, float]:
        """Median and largest relative error of the formula at the measured batches."""
        off = np.abs(1 / self._ratios - 1)
        return float(np.median(off)), float(off.max())

    @property
    def overhead_elements(self) -> float:
        """Cost of a launch, in padded elements."""
        return self.formula.overhead_elements

    def seconds(self, sizes: Sizes, pairs: float | None = None) -> float:
        """Return the seconds of one batch.

        Args:
            sizes: what is executed.
            pairs: of packed rows; if not given, rows are as long as typical measured ones. Those of
                padded rows follow from the sizes.
        """
        pairs = self._pairs(sizes, pairs)
        place = self._log(sizes, pairs)
        return self.formula.seconds(sizes, pairs) * self._correction(place, self._ratios)

    def fitted_s(self, point: CostPoint) -> float:
        """Return what the formula alone says of a measured batch."""
        sizes = dict(point.sizes)
        return self.formula.seconds(sizes, self._pairs(sizes, point.pairs))

    def check(self, unseen: Sequence[CostPoint]) -> HeldOut:
        """Return how far off the table is at batches that it does not hold."""
        off = [abs(self.seconds(dict(p.sizes), p.pairs) / p.seconds - 1) for p in unseen]
        return HeldOut(tuple(p.sizes for p in unseen), float(np.median(off)), max(off))

    def peak_bytes(self, sizes: Sizes) -> float | None:
        """Return the device memory of one batch, None where it was not measured."""
        if any(point.peak_bytes is None for point in self.points):
            return None
        values = np.array([float(point.peak_bytes or 0) for point in self.points])
        terms = np.array(fit_factors(self._terms[:, :2], values))
        ratios = values / np.maximum(self._terms[:, :2] @ terms, 1.0)
        estimate = float(np.array([1.0, math.prod(sizes.values())]) @ terms)
        place = self._log(sizes, self._pairs(sizes, None))
        return max(estimate, 1.0) * self._correction(place, ratios)

    @cached_property
    def _terms(self) -> np.ndarray:
        """[points, 3]: what launch, linear and quadratic seconds are multiplied with."""
        rows = []
        for point in self.points:
            sizes = dict(point.sizes)
            rows.append([1.0, float(math.prod(sizes.values())), self._pairs(sizes, point.pairs)])
        return np.array(rows)

    @cached_property
    def _ratios(self) -> np.ndarray:
        seconds = np.array([point.seconds for point in self.points])
        formula = self.formula
        fitted = self._terms @ [formula.launch_s, formula.linear_s, formula.quadratic_s]
        return np.asarray(seconds / fitted)

    @cached_property
    def _places(self) -> np.ndarray:
        rows = ((dict(point.sizes), point.pairs) for point in self.points)
        return np.array([self._log(sizes, self._pairs(sizes, pairs)) for sizes, pairs in rows])

    @cached_property
    def _typical_row(self) -> float:
        """Tokens of a row in the measured packed batches, weighted by length; 0 if not stated."""
        known = [p.pairs / math.prod(dict(p.sizes).values()) for p in self.points if p.pairs]
        return float(np.median(known)) if known else 0.0

    def _pairs(self, sizes: Sizes, pairs: float | None) -> float:
        """Return the pairs that attend in a batch: the table's idea of it where nobody says."""
        if BATCH in sizes:
            return padded_pairs(sizes)
        if not self._typical_row:  # the formula has no use for them
            return 0.0
        return math.prod(sizes.values()) * self._typical_row if pairs is None else pairs

    def _log(self, sizes: Sizes, pairs: float) -> list[float]:
        """Return where a batch lies: twice the size is as far from everywhere."""
        if BATCH not in self.axes or BATCH not in sizes:
            elements = math.prod(sizes.values())
            # Of packed rows also how long they are, where that was measured.
            return [math.log(elements), math.log(max(pairs / elements, 1.0))]
        batch = sizes[BATCH]
        return [math.log(batch), math.log(math.prod(sizes.values()) / batch)]

    def _correction(self, place: Sequence[float], ratios: np.ndarray) -> float:
        """Return the mean ratio of the nearest points, weighted by 1 / squared distance."""
        squares = ((self._places - place) ** 2).sum(axis=1)
        nearest = np.argsort(squares, kind="stable")[:_NEAREST]
        if squares[nearest[0]] < 1e-12:
            return float(ratios[nearest[0]])
        weights = 1 / squares[nearest]
        return float((weights * ratios[nearest]).sum() / weights.sum())

    # --- files --------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; ``from_dict`` reads it back."""
        return {
            "version": 1,
            "fingerprint": self.fingerprint,
            "conditions": dict(self.conditions),
            "axes": list(self.axes),
            "points": [
                {
                    "sizes": dict(p.sizes),
                    "seconds": p.seconds,
                    "bytes": p.peak_bytes,
                    **({} if p.pairs is None else {"pairs": p.pairs}),
                }
                for p in self.points
            ],
            **({"held_out": _named(asdict(self.held_out))} if self.held_out else {}),
            **({"variants": _named(asdict(self.variants))} if self.variants else {}),
        }

    @classmethod
    def from_dict(cls, data: object, file: Path | None = None) -> Self:
        """Build a table from plain data.

        Raises:
            ConfigError: naming key, value and remedy, or saying that the fingerprint is another's.
        """
        read = parse(data, file)
        points = tuple(
            CostPoint(tuple(p.sizes.items()), p.seconds, p.peak_bytes, p.pairs) for p in read.points
        )
        held_out = variants = None
        if read.held_out is not None:
            sizes = tuple(tuple(each.items()) for each in read.held_out.sizes)
            held_out = HeldOut(sizes, read.held_out.median_error, read.held_out.worst_error)
        if read.variants is not None:
            variants = read.variants.made()
        table = cls(read.conditions, read.axes, points, held_out, variants)
        if read.fingerprint != table.fingerprint:
            raise ConfigError(
                f"{file or 'cost table'}: fingerprint {read.fingerprint!r} is not that of its "
                f"conditions and axes, {table.fingerprint}; measure again instead of editing them"
            )
        return table

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a JSON file.

        Raises:
            ConfigError: it cannot be read, is not JSON, or as for ``from_dict``.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: cannot be read: {error}; give a cost table in JSON"
            ) from error
        return cls.from_dict(data, Path(path))

    def write(self, path: str | Path) -> None:
        """Write a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def _named(data: Any) -> Any:
    """Write ``sizes`` as axis -> size, wherever they are in the data."""
    if isinstance(data, Mapping):
        return {key: _as_sizes(v) if key == "sizes" else _named(v) for key, v in data.items()}
    return [_named(item) for item in data] if isinstance(data, (list, tuple)) else data


def _as_sizes(sizes: Any) -> Any:
    """``(("batch", 1), ...)`` as a mapping, or a list of such."""
    return dict(sizes) if isinstance(sizes[0][0], str) else [dict(each) for each in sizes]


def _label(point: CostPoint) -> str:
    return ",".join(f"{axis}={size}" for axis, size in point.sizes)
