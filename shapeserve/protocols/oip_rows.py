"""The inputs of an Open Inference Protocol request: what a model takes, and tensors to rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from shapeserve.errors import InvalidRequest
from shapeserve.models.spec import ModelSpec, TensorSpec
from shapeserve.protocols.oip_types import Array, Tensor, datatype_of, shown

IDS, MASK, TYPES, TEXT = "input_ids", "attention_mask", "token_type_ids", "text"
_INTEGERS: Final = ("INT64", "INT32")
_NUMBERS: Final = ("INT64", "INT32", "BOOL", "UINT8", "FP32", "FP16", "BF16")
_MAX_NAMED: Final = 10  # bad rows that one message names

Row: TypeAlias = str | Mapping[str, Array]
"""What ``Engine.prepare`` takes: a text, or arrays by input name without the batch axis."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor in a model's metadata; a size of -1 is dynamic."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


def takes_text(spec: ModelSpec) -> bool:
    """Whether the model has a vocabulary: its rows are token ids, or text."""
    return spec.vocab_size is not None


def inputs_of(spec: ModelSpec) -> tuple[TensorInfo, ...]:
    """Return the inputs in a model's metadata.

    Of a text model, ``text`` stands for all the others: a request has either, so that each of
    them may be left out.
    """
    if takes_text(spec):
        return (
            TensorInfo(IDS, "INT64", (-1, -1), optional=True),
            TensorInfo(MASK, "INT64", (-1, -1), optional=True),
            TensorInfo(TYPES, "INT64", (-1, -1), optional=True),
            TensorInfo(TEXT, "BYTES", (-1,), optional=True),
        )
    return tuple(info_of(tensor) for tensor in _sent(spec).values())


def info_of(tensor: TensorSpec) -> TensorInfo:
    """Return the metadata of one of the spec's tensors."""
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in tensor.dims)
    return TensorInfo(tensor.name, datatype_of(tensor.dtype).name, shape)


def _sent(spec: ModelSpec) -> dict[str, TensorSpec]:
    return {name: tensor for name, tensor in spec.inputs.items() if tensor.make is None}


def read_rows(inputs: Sequence[Tensor], spec: ModelSpec, max_rows: int) -> list[Row]:
    """Hold the inputs of a request against the model and split them into rows.

    Text models take ``input_ids`` with, optionally, ``attention_mask`` and ``token_type_ids``; or
    ``text`` instead. Modules take exactly the inputs that the layout does not make.
    """
    known = [info.name for info in inputs_of(spec)]
    tensors: dict[str, Tensor] = {}
    for tensor in inputs:
        if tensor.name not in known:
            raise _input_error(
                tensor.name,
                f"is not an input of model {spec.name!r}; it takes {', '.join(known)}",
            )
        if tensor.name in tensors:
            raise _input_error(tensor.name, "is there twice; send each input once")
        tensors[tensor.name] = tensor
    if takes_text(spec):
        return _text_rows(tensors, spec, max_rows)
    return _array_rows(tensors, spec, max_rows)


def _text_rows(tensors: Mapping[str, Tensor], spec: ModelSpec, max_rows: int) -> list[Row]:
    text, ids = tensors.get(TEXT), tensors.get(IDS)
    if text is not None:
        if len(tensors) > 1:
            others = ", ".join(sorted(tensors.keys() - {TEXT}))
            raise _input_error(TEXT, f"and {others} are both there; send only one of the two")
        return _decoded(text, max_rows)
    if ids is None:
        raise _input_error(IDS, f"is missing; send it, or {TEXT} (BYTES, one text a row)")
    _check(ids, _INTEGERS, 2, max_rows)
    token_ids = np.asarray(ids.data).astype(np.int64, copy=False)
    lengths = _lengths(tensors.get(MASK), ids)
    types = _token_types(tensors.get(TYPES), ids, lengths, spec)
    if types is None:
        return [{IDS: row[:end]} for row, end in zip(token_ids, lengths, strict=True)]
    return [
        {IDS: row[:end], TYPES: kinds[:end]}
        for row, kinds, end in zip(token_ids, types, lengths, strict=True)
    ]


def _decoded(text: Tensor, max_rows: int) -> list[Row]:
    _check(text, ("BYTES",), 1, max_rows)
    rows: list[Row] = []
    for i, value in enumerate(text.data):
        try:
            rows.append(bytes(value).decode())
        except UnicodeDecodeError as error:
            why = f"row {i} is not UTF-8 (byte {error.start}); encode it as UTF-8"
            raise _input_error(TEXT, why) from None
    return rows


def _lengths(mask: Tensor | None, ids: Tensor) -> list[int]:
    """Return the real length of each row: a mask is 1s and then 0s."""
    rows, width = ids.shape
    if mask is None:
        return [width] * rows
    _check_datatype(mask, _NUMBERS)
    _check_same_shape(mask, ids)
    values = np.asarray(mask.data)
    ones = values == 1
    lengths = ones.sum(axis=1)
    expected = np.arange(width) < lengths[:, None]
    bad = ((values != 0) & ~ones).any(axis=1) | (ones != expected).any(axis=1) | (lengths == 0)
    _refuse_rows(
        MASK,
        np.flatnonzero(bad),
        "must be 1s and then 0s, with a 1 at least: 0 marks padding after the tokens",
    )
    return [int(length) for length in lengths]


def _token_types(
    types: Tensor | None, ids: Tensor, lengths: Sequence[int], spec: ModelSpec
) -> Array | None:
    """Return the token types for a model that takes them, None for one that does not."""
    takes = TYPES in _sent(spec)
    if types is None:
        return np.zeros(ids.shape, np.int64) if takes else None
    _check_datatype(types, _INTEGERS)
    _check_same_shape(types, ids)
    values = np.asarray(types.data).astype(np.int64, copy=False)
    if takes:
        return values
    real = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
    _refuse_rows(
        TYPES,
        np.flatnonzero(((values != 0) & real).any(axis=1)),
        f"must be 0: model {spec.name!r} has one type of token",
    )
    return None


def _array_rows(tensors: Mapping[str, Tensor], spec: ModelSpec, max_rows: int) -> list[Row]:
    sent = _sent(spec)
    missing = [name for name in sent if name not in tensors]
    if missing:
        raise _input_error(missing[0], f"is missing; model {spec.name!r} takes {', '.join(sent)}")
    sizes: dict[str, tuple[int, str]] = {}
    for name, wanted in sent.items():
        tensor = tensors[name]
        _check(tensor, (datatype_of(wanted.dtype).name,), len(wanted.dims), max_rows)
        for i, (dim, size) in enumerate(zip(wanted.dims, tensor.shape, strict=True)):
            known, of = (dim, "") if isinstance(dim, int) else sizes.setdefault(dim, (size, name))
            if size != known:
                why = f"as inputs[{of}] has" if of else "which the model fixes"
                raise _input_error(
                    name, f"has size {size} in dim {i} ({dim}); send {known}, {why}", ".shape"
                )
    arrays = {name: np.asarray(tensors[name].data) for name in sent}
    rows = next(iter(arrays.values())).shape[0]
    return [{name: array[i] for name, array in arrays.items()} for i in range(rows)]


def _check(tensor: Tensor, datatypes: Sequence[str], dims: int, max_rows: int) -> None:
    """Check datatype, number of dims, and the number of rows."""
    _check_datatype(tensor, datatypes)
    if len(tensor.shape) != dims:
        raise _input_error(
            tensor.name,
            f"has shape {shown(list(tensor.shape))}; send {dims} dims, the first of them the rows",
            ".shape",
        )
    if tensor.shape[0] > max_rows:
        raise InvalidRequest(
            f"inputs[{tensor.name}] has {tensor.shape[0]} rows, the limit is {max_rows} a request; "
            "send several requests or raise `limits.max_rows`.",
            param=f"inputs[{tensor.name}].shape",
            code="too_many_rows",
        )


def _check_datatype(tensor: Tensor, datatypes: Sequence[str]) -> None:
    if tensor.datatype not in datatypes:
        raise _input_error(
            tensor.name,
            f"has datatype {tensor.datatype}; send {' or '.join(datatypes)}",
            ".datatype",
        )


def _check_same_shape(tensor: Tensor, ids: Tensor) -> None:
    if tensor.shape != ids.shape:
        raise _input_error(
            tensor.name,
            f"has shape {shown(list(tensor.shape))}; send {shown(list(ids.shape))}, as "
            f"inputs[{IDS}] has",
            ".shape",
        )


def _refuse_rows(name: str, bad: Iterable[int], rule: str) -> None:
    """Raise one 400 that names the first ten bad rows, if there are any."""
    rows = [int(row) for row in bad]
    if not rows:
        return
    named = ", ".join(map(str, rows[:_MAX_NAMED]))
    more = f" and {len(rows) - _MAX_NAMED} more" if len(rows) > _MAX_NAMED else ""
    raise _input_error(name, f"row {named}{more} {rule}")


def _input_error(name: str, what: str, field: str = "") -> InvalidRequest:
    # The name may be the client's, of any length.
    where = f"inputs[{name[:40]}]"
    return InvalidRequest(f"{where} {what}.", param=where + field)
