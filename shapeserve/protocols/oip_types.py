"""Tensors of the Open Inference Protocol v2, whatever carries them: HTTP or gRPC."""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from shapeserve.errors import InvalidRequest
from shapeserve.protocols import fields
from shapeserve.protocols.fields import MISSING

Array: TypeAlias = np.ndarray[Any, Any]
Parameter: TypeAlias = str | int | float | bool
Parameters: TypeAlias = Mapping[str, Parameter]

MAX_DIMS: Final = 32  # what every numpy can hold
MAX_TENSORS: Final = 256  # inputs, or outputs, of one request; arbitrary
MAX_PARAMETERS: Final = 64  # of a request, an input or an output; arbitrary
MAX_WORD: Final = 1024  # characters of what is sent back: ids, names and values; arbitrary
_MAX_SIZE: Final = 2**63 - 1  # sizes are int64 in gRPC


@dataclass(frozen=True, slots=True)
class Datatype:
    """One element type.

    Attributes:
        name: the protocol's name.
        dtype: our name, as specs have it; None for ``BYTES``.
        wire: an element in binary data, little-endian; None for ``BYTES``, where an element is
            its length (uint32) and that many bytes.
        held: an element in a ``Tensor``; numpy has no bfloat16, so ``BF16`` is held as float32.
    """

    name: str
    dtype: str | None
    wire: np.dtype[Any] | None
    held: np.dtype[Any] | None


def _numeric(name: str, dtype: str, wire: str, held: str | None = None) -> Datatype:
    return Datatype(name, dtype, np.dtype(wire), np.dtype(held or dtype))


DATATYPES: Final[Mapping[str, Datatype]] = {
    datatype.name: datatype
    for datatype in (
        _numeric("BOOL", "bool", "u1"),
        _numeric("UINT8", "uint8", "u1"),
        _numeric("INT32", "int32", "<i4"),
        _numeric("INT64", "int64", "<i8"),
        _numeric("FP16", "float16", "<f2"),
        _numeric("BF16", "bfloat16", "<u2", held="float32"),
        _numeric("FP32", "float32", "<f4"),
        Datatype("BYTES", None, None, None),
    )
}
_BY_DTYPE: Final = {datatype.dtype: datatype for datatype in DATATYPES.values()}


def datatype_of(dtype: str) -> Datatype:
    """Return the datatype of a spec's ``dtype``."""
    return _BY_DTYPE[dtype]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a request or an answer.

    Attributes:
        name: as the model's metadata has it.
        datatype: a key of ``DATATYPES``.
        shape: as it was sent; every size is at least 1 in a request.
        data: an array of ``shape`` (read-only: it may be a view of the body), or the elements of
            ``BYTES`` in row-major order.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Array | list[bytes]


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that the request asks for."""

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """An inference request, its tensors read but not yet held against the model.

    Attributes:
        model_name: name or alias.
        model_version: empty if the request leaves it to the server.
        id: the client's, to be returned; empty if there is none.
        parameters: of the request as a whole.
        inputs: in the order of the request.
        outputs: in the order of the request; empty: all.
    """

    model_name: str
    model_version: str
    id: str
    parameters: Parameters
    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The answer to an ``InferRequest``; ``parameters`` are those that mean nothing here."""

    model_name: str
    model_version: str
    id: str
    parameters: Parameters
    outputs: tuple[Tensor, ...]


class _Short(reprlib.Repr):
    """Shows what lists hold with JSON's words."""

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802 - named by type
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"


def shown(value: object) -> str:
    """Show a client's value in a message, cut to a length that a log line bears."""
    if value is None or isinstance(value, (bool, float)) or value is MISSING:
        return fields.shown(value)
    short = _Short()
    short.maxstring = short.maxlong = short.maxother = 40
    short.maxlist, short.maxlevel = MAX_DIMS, 1
    return short.repr(value)


def check_datatype(where: str, name: object) -> Datatype:
    """Return the datatype called ``name``.

    Args:
        where: the tensor in the request, for messages: ``inputs[0]``.
        name: what the request says.
    """
    datatype = DATATYPES.get(name) if isinstance(name, str) else None
    if datatype is None:
        raise InvalidRequest(
            f"{where}.datatype is {shown(name)}; it must be one of {', '.join(DATATYPES)}.",
            param=f"{where}.datatype",
        )
    return datatype


def check_shape(where: str, shape: object) -> tuple[int, ...]:
    """Return ``shape`` as a tuple; every size must be a whole number of at least 1."""
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise InvalidRequest(
            f"{where}.shape is {shown(shape)}; it must be a list of whole numbers.",
            param=f"{where}.shape",
        )
    if not 1 <= len(shape) <= MAX_DIMS:
        raise InvalidRequest(
            f"{where}.shape has {len(shape)} sizes; it must have 1 to {MAX_DIMS}, the first of "
            "them the number of rows.",
            param=f"{where}.shape",
        )
    for i, size in enumerate(shape):
        if type(size) is not int or not 1 <= size <= _MAX_SIZE:  # bool is an int to isinstance
            raise InvalidRequest(
                f"{where}.shape[{i}] is {shown(size)}; it must be a whole number of at least 1: "
                "send the sizes of the data.",
                param=f"{where}.shape",
            )
    return tuple(shape)


def from_bytes(
    where: str, name: str, datatype: Datatype, shape: tuple[int, ...], raw: bytes | memoryview
) -> Tensor:
    """Return the tensor in binary data.

    Nothing is allocated for a shape before the number of bytes has been held against it.

    Args:
        where: the tensor in the request, for messages: ``inputs[0]``.
        name: of the tensor.
        datatype: of its elements.
        shape: from :func:`check_shape`.
        raw: exactly its bytes.
    """
    count = math.prod(shape)  # of Python's integers, which do not overflow
    if datatype.wire is None or datatype.held is None:
        return Tensor(name, datatype.name, shape, _split_bytes(where, count, shape, raw))
    expected_bytes = count * datatype.wire.itemsize
    if len(raw) != expected_bytes:
        raise InvalidRequest(
            f"{where} has {len(raw)} bytes of data, but shape {shown(list(shape))} of "
            f"{datatype.name} takes {expected_bytes}; send shape and data that agree.",
            param=where,
        )
    flat = np.frombuffer(raw, datatype.wire)
    if datatype.name == "BOOL":
        if flat.max() > 1:
            raise InvalidRequest(
                f"{where} holds the byte {flat.max()}; an element of BOOL is 0 or 1.", param=where
            )
        flat = flat.view(np.bool_)
    elif datatype.name == "BF16":
        flat = _widened(flat)
    array = flat.astype(datatype.held, copy=False).reshape(shape)
    return Tensor(name, datatype.name, shape, array)


def _split_bytes(
    where: str, count: int, shape: tuple[int, ...], raw: bytes | memoryview
) -> list[bytes]:
    """Return the elements of binary ``BYTES`` data."""
    elements: list[bytes] = []
    at, end = 0, len(raw)
    while at + 4 <= end and len(elements) < count:
        (size,) = struct.unpack_from("<I", raw, at)
        if size > end - at - 4:
            raise InvalidRequest(
                f"{where} element {len(elements)} says that it has {size} bytes, but "
                f"{end - at - 4} are left; each element is its length (4 bytes, little-endian) "
                "and that many bytes.",
                param=where,
            )
        elements.append(bytes(raw[at + 4 : at + 4 + size]))
        at += 4 + size
    if len(elements) != count or at != end:
        raise InvalidRequest(
            f"{where} has {len(elements)} whole elements in its {end} bytes and {end - at} bytes "
            f"after them, but shape {shown(list(shape))} has {count} elements; send shape and "
            "data that agree.",
            param=where,
        )
    return elements


def from_values(
    place: str, name: str, datatype: Datatype, shape: tuple[int, ...], values: Sequence[Any]
) -> Tensor:
    """Return the tensor of values in row-major order, as JSON and typed gRPC contents have them.

    Args:
        place: of the values in the request, for messages: ``inputs[0].data``.
        name: of the tensor.
        datatype: of its elements.
        shape: from :func:`check_shape`.
        values: numbers or booleans; ``BYTES``: strings or bytes.
    """
    count = math.prod(shape)
    if len(values) != count:
        raise InvalidRequest(
            f"{place} has {len(values)} elements, but shape {shown(list(shape))} has {count}; "
            "send shape and data that agree.",
            param=place,
        )
    _check_types(place, datatype, values)
    if datatype.held is None:
        data = [v if isinstance(v, bytes) else v.encode() for v in values]
        return Tensor(name, datatype.name, shape, data)
    return Tensor(name, datatype.name, shape, _fitting(place, datatype, values).reshape(shape))


def _check_types(place: str, datatype: Datatype, values: Sequence[Any]) -> None:
    allowed: set[type]
    if datatype.held is None:
        allowed, wanted = {str, bytes}, "a string"
    elif datatype.held.kind == "b":
        allowed, wanted = {bool}, "true or false"
    elif datatype.held.kind in "iu":
        allowed, wanted = {int}, "a whole number of at most 64 bits"
    else:
        allowed, wanted = {int, float}, "a number"
    # The whole list at once first: a loop in Python over 100,000 values takes 10 ms.
    if set(map(type, values)) <= allowed:
        return
    i = next(i for i, value in enumerate(values) if type(value) not in allowed)
    raise InvalidRequest(
        f"{place}[{i}] is {shown(values[i])}; an element of {datatype.name} is {wanted}.",
        param=place,
    )


def _fitting(place: str, datatype: Datatype, values: Sequence[Any]) -> Array:
    """Return the values in the datatype's own range, or refuse the first one outside of it."""
    held: np.dtype[Any] = np.dtype(datatype.held)
    if held.kind == "b":
        return np.array(values, held)
    if held.kind == "f":
        return _floats(place, datatype, values)
    low, high = np.iinfo(held).min, np.iinfo(held).max
    if min(values) < low or max(values) > high:
        bad = next(i for i, value in enumerate(values) if not low <= value <= high)
        raise _out_of_range(place, datatype, values, bad, f"{low} to {high}")
    return np.array(values, held)


def _floats(place: str, datatype: Datatype, values: Sequence[Any]) -> Array:
    wide: Array = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        array: Array = wide.astype(datatype.held)
    if datatype.name == "BF16":
        array = _widened(_rounded(array))
    bad = np.flatnonzero(np.isinf(array) & np.isfinite(wide))
    if bad.size:
        most = 65504 if datatype.name == "FP16" else "about 3.4e38"
        raise _out_of_range(place, datatype, values, int(bad[0]), f"numbers up to {most}")
    return array


def _out_of_range(
    place: str, datatype: Datatype, values: Sequence[Any], bad: int, holds: str
) -> InvalidRequest:
    return InvalidRequest(
        f"{place}[{bad}] is {shown(values[bad])}; {datatype.name} holds {holds}.",
        param=place,
    )


def _widened(bits: Array) -> Array:
    """Return bfloat16 bits as float32: they are its upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: Array) -> Array:
    """Return finite float32 as the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_bytes(tensor: Tensor) -> bytes:
    """Return the tensor as binary data."""
    wire = DATATYPES[tensor.datatype].wire
    if wire is None:
        return b"".join(struct.pack("<I", len(v)) + v for v in tensor.data)
    array = np.asarray(tensor.data)
    if tensor.datatype == "BF16":
        array = _rounded(array)
    return array.astype(wire, copy=False).tobytes()


def to_values(tensor: Tensor) -> Array | list[bytes]:
    """Return the elements in row-major order, in a type that orjson writes as numbers."""
    if isinstance(tensor.data, list):
        return tensor.data
    flat = np.ascontiguousarray(tensor.data).reshape(-1)
    return flat.astype(np.float32) if tensor.datatype == "FP16" else flat
