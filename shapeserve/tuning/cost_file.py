"""The JSON file of a cost table: what it may hold.

Version 1 throughout; ``variants``, ``held_out`` and ``pairs`` came later and may be missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shapeserve.config.load import Document
from shapeserve.tuning.variants import SizeItems, SpecializedPoint, VariantCosts, VariantPoint

_Size = Annotated[int, Field(ge=1)]
_Sizes = dict[str, _Size]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Bytes = Annotated[int | None, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PointBlock(_Strict):
    """A measured batch."""

    sizes: _Sizes
    seconds: _Seconds
    peak_bytes: Annotated[int | None, Field(ge=0, alias="bytes")] = None
    pairs: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None


class _VariantPoint(_Strict):
    sizes: _Sizes
    verify_s: _Seconds
    capture_s: _Seconds | None = None
    graph_bytes: _Bytes = None


class _SpecializedPoint(_Strict):
    sizes: _Sizes
    compile_s: _Seconds
    specialized_s: _Seconds
    shared_s: _Seconds


class VariantBlock(_Strict):
    """What variants cost."""

    fixed_s: _NotNegative
    compile_s: dict[str, _NotNegative]
    min_batch: _Size
    points: Annotated[list[_VariantPoint], Field(min_length=1)]
    specialized: list[_SpecializedPoint] = []

    def made(self) -> VariantCosts:
        """Return what the block describes."""
        return VariantCosts(
            fixed_s=self.fixed_s,
            compile_s=self.compile_s,
            min_batch=self.min_batch,
            points=tuple(
                VariantPoint(_items(p.sizes), p.verify_s, p.capture_s, p.graph_bytes)
                for p in self.points
            ),
            specialized=tuple(
                SpecializedPoint(_items(p.sizes), p.compile_s, p.specialized_s, p.shared_s)
                for p in self.specialized
            ),
        )


class HeldOutBlock(_Strict):
    """How far off the fit was at batches that it had not seen."""

    sizes: Annotated[list[_Sizes], Field(min_length=1)]
    median_error: _NotNegative
    worst_error: _NotNegative


class CostFile(_Strict):
    """The whole file."""

    version: Literal[1]
    fingerprint: str
    conditions: dict[str, str]
    axes: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    points: Annotated[list[PointBlock], Field(min_length=1)]
    held_out: HeldOutBlock | None = None
    variants: VariantBlock | None = None


def parse(data: object, file: Path | None) -> CostFile:
    """Check plain data.

    Raises:
        ConfigError: naming key, value and remedy.
    """
    try:
        return CostFile.model_validate(data)
    except ValidationError as error:
        raise Document(data, file).explain(error) from None


def _items(sizes: _Sizes) -> SizeItems:
    return tuple(sizes.items())
