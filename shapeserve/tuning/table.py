"""Measured costs: seconds and memory of some batches, and what follows for all others."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shapeserve.buckets import BATCH
from shapeserve.config.load import Document
from shapeserve.errors import ConfigError
from shapeserve.tuning.cost import Formula, Sizes, padded_pairs

_NEAREST = 4  # points that correct the formula at a place between them; arbitrary


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One measured batch.

    Attributes:
        sizes: (axis, size) of what was executed, in the table's order of axes.
        seconds: device time of one batch.
        peak_bytes: device memory that it needs, None where that is not known.
    """

    sizes: tuple[tuple[str, int], ...]
    seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class CostTable:
    """Measured batches of one model on one device, with a formula fitted to them.

    A batch that was measured costs what was measured. Any other costs what the formula says, times
    how far the nearest measured batches lie from it.

    Attributes:
        conditions: what the numbers hold for: model, dtype, device, versions.
        axes: ``batch`` and the row axes, or ``tokens``.
        points: at least one.
    """

    conditions: Mapping[str, str]
    axes: tuple[str, ...]
    points: tuple[CostPoint, ...]

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
        return (
            f"measured: {len(self.points)} batches, fitted within {self.errors[0]:.1%} (median), "
            f"{self.errors[1]:.1%} (worst); {what or 'conditions not stated'}"
        )

    @cached_property
    def formula(self) -> Formula:
        """The formula that fits the measured seconds best, by relative error."""
        seconds = np.array([point.seconds for point in self.points])
        launch_s, linear_s, quadratic_s = _fit(self._terms, seconds)
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
        """Return the seconds of one batch; ``pairs`` are those of the measured batches.

        Raises:
            ConfigError: ``sizes`` have other axes than the table.
        """
        return self.formula.seconds(sizes) * self._correction(self._log(sizes), self._ratios)

    def peak_bytes(self, sizes: Sizes) -> float | None:
        """Return the device memory of one batch, None where it was not measured."""
        if any(point.peak_bytes is None for point in self.points):
            return None
        values = np.array([float(point.peak_bytes or 0) for point in self.points])
        terms = np.array(_fit(self._terms[:, :2], values))
        ratios = values / np.maximum(self._terms[:, :2] @ terms, 1.0)
        estimate = float(np.array([1.0, math.prod(sizes.values())]) @ terms)
        return max(estimate, 1.0) * self._correction(self._log(sizes), ratios)

    @cached_property
    def _terms(self) -> np.ndarray:
        """[points, 3]: what launch, linear and quadratic seconds are multiplied with."""
        rows = []
        for point in self.points:
            sizes = dict(point.sizes)
            rows.append([1.0, float(math.prod(sizes.values())), padded_pairs(sizes)])
        return np.array(rows)

    @cached_property
    def _ratios(self) -> np.ndarray:
        seconds = np.array([point.seconds for point in self.points])
        formula = self.formula
        fitted = self._terms @ [formula.launch_s, formula.linear_s, formula.quadratic_s]
        return np.asarray(seconds / fitted)

    @cached_property
    def _places(self) -> np.ndarray:
        return np.array([self._log(dict(point.sizes)) for point in self.points])

    def _log(self, sizes: Sizes) -> list[float]:
        """Return where a batch lies: twice the size is as far from everywhere."""
        if BATCH not in self.axes or BATCH not in sizes:
            return [math.log(math.prod(sizes.values()))]
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
                {"sizes": dict(p.sizes), "seconds": p.seconds, "bytes": p.peak_bytes}
                for p in self.points
            ],
        }

    @classmethod
    def from_dict(cls, data: object, file: Path | None = None) -> Self:
        """Build a table from plain data.

        Raises:
            ConfigError: naming key, value and remedy, or saying that the fingerprint is another's.
        """
        try:
            read = _File.model_validate(data)
        except ValidationError as error:
            raise Document(data, file).explain(error) from None
        points = tuple(
            CostPoint(tuple(p.sizes.items()), p.seconds, p.peak_bytes) for p in read.points
        )
        table = cls(read.conditions, read.axes, points)
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


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Size = Annotated[int, Field(ge=1)]


class _Point(_Strict):
    sizes: dict[str, _Size]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    peak_bytes: Annotated[int | None, Field(ge=0, alias="bytes")] = None


class _File(_Strict):
    version: Literal[1]
    fingerprint: str
    conditions: dict[str, str]
    axes: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    points: Annotated[list[_Point], Field(min_length=1)]


def _fit(terms: np.ndarray, values: np.ndarray) -> list[float]:
    """Return factors of at least 0 for the columns of ``terms``, of least squared relative error.

    There are three columns at most, so every choice of those that are not 0 is tried.
    """
    scaled = terms / values[:, None]
    best, least = [0.0] * terms.shape[1], math.inf
    for number in range(1, min(terms.shape) + 1):
        for chosen in itertools.combinations(range(terms.shape[1]), number):
            part = scaled[:, chosen]
            norms = np.linalg.norm(part, axis=0)
            if not norms.all():
                continue
            factors = np.linalg.lstsq(part / norms, np.ones(len(values)), rcond=None)[0] / norms
            error = float(((part @ factors - 1) ** 2).sum())
            if factors.min() >= 0 and error < least - 1e-12:
                best, least = [0.0] * terms.shape[1], error
                for column, factor in zip(chosen, factors, strict=True):
                    best[column] = float(factor)
    return best


def _label(point: CostPoint) -> str:
    return ",".join(f"{axis}={size}" for axis, size in point.sizes)
