"""The tensors of a model given by ``import``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, model_validator

from shapeserve.buckets import BATCH
from shapeserve.config.base import (
    Float,
    Frozen,
    Int,
    field,
    problem,
)

DType = Literal["float32", "float16", "bfloat16", "int64", "int32", "bool", "uint8"]


def _check_dim(dim: int | str) -> int | str:
    if isinstance(dim, int) and dim < 1:
        raise problem(f"dim {dim} is below 1; write the size of a fixed dimension or an axis name")
    if isinstance(dim, str) and not dim.isidentifier():
        raise problem(f"dim {dim!r} is no axis name; use letters, digits and _, as in seq")
    return dim


def _check_output_dim(dim: int | str) -> int | str:
    if isinstance(dim, int) or "/" not in dim:
        return _check_dim(dim)
    axis, _, rate = dim.partition("/")
    if not axis.isidentifier() or not rate.isdecimal() or int(rate) < 1 or axis == BATCH:
        raise problem(f"dim {dim!r} is no axis at a lower rate; write it as frames/4")
    return dim


Dim = Annotated[Int | str, AfterValidator(_check_dim)]
OutputDim = Annotated[Int | str, AfterValidator(_check_output_dim)]


class InputSpec(Frozen):
    """One input tensor of a model given by ``import``."""

    dtype: DType = field("Element type.", "word")
    dims: tuple[Dim, ...] = field(
        "Names of dynamic axes and sizes of fixed ones; the first is `batch`.", "elements"
    )
    pad: Float | Int = field("Value written where a row is shorter than its bucket.", "value", 0)
    make: Literal["mask", "positions"] | None = field(
        "Made by the layout instead of sent by the caller: `mask` is 1 on real elements and 0 on "
        "padding, along every axis of `dims`; `positions` counts from 0 along its one axis.",
        "word",
        None,
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_batch_first(self.dims)
        named = sum(isinstance(dim, str) for dim in self.dims[1:])
        if self.make == "mask" and not named:
            raise problem("make: mask needs an axis besides batch, as [batch, seq]", "make")
        if self.make == "positions" and named != 1:
            raise problem(
                f"make: positions counts along one axis besides batch, dims has {named}", "make"
            )
        if not self.dtype.startswith(("float", "bfloat")) and self.pad != int(self.pad):
            raise problem(f"pad {self.pad} is not a whole number, but dtype is {self.dtype}", "pad")
        return self


class OutputSpec(Frozen):
    """One output tensor of a model given by ``import``."""

    dtype: DType = field("Element type.", "word")
    dims: tuple[OutputDim, ...] = field(
        "As for inputs; the padding is cut off along every axis named here. `frames/4` is the "
        "axis `frames` at a quarter of its rate, rounded up.",
        "elements",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_batch_first(self.dims)
        return self


def _check_batch_first(dims: tuple[int | str, ...]) -> None:
    if not dims or dims[0] != BATCH:
        raise problem(f"dims {list(dims)} must begin with batch, as [batch, seq]", "dims")
