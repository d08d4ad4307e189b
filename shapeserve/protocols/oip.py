"""Open Inference Protocol v2, whatever carries it: requests to rows, results to tensors.

A request is read completely, inputs, outputs and parameters, before anything is queued.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shapeserve.buckets import BATCH
from shapeserve.errors import InvalidRequest, NotFound
from shapeserve.models.spec import ModelSpec, TensorSpec
from shapeserve.protocols.fields import OVER_MAX
from shapeserve.protocols.http import MAX_TIMEOUT_S
from shapeserve.protocols.oip_rows import Row, TensorInfo, info_of, read_rows
from shapeserve.protocols.oip_types import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    MAX_WORD,
    Array,
    InferRequest,
    InferResponse,
    Parameter,
    Parameters,
    Tensor,
    datatype_of,
    shown,
)

VERSION: Final = "1"
"""The one version of every model."""

PLATFORM: Final = "pytorch_compile"  # "<project>_<format>", as the protocol recommends

# Parameters of a request, of an input and of an output that would change the answer, and that
# this server cannot honour. Any other unknown one is the client's own affair.
REFUSED: Final = {
    "sequence_id": "rows are independent",
    "sequence_start": "rows are independent",
    "sequence_end": "rows are independent",
    "priority": "rows are answered in the order in which they come",
    "headers": "send HTTP headers or gRPC metadata",
    "classification": "the output itself is returned",
    "shared_memory_region": "send and read the data itself",
    "shared_memory_byte_size": "send and read the data itself",
    "shared_memory_offset": "send and read the data itself",
}
REFUSED_PREFIX: Final = "triton_"
_OURS: Final = frozenset({"over_max", "timeout"})


@dataclass(frozen=True, slots=True)
class Job:
    """A request that passed every check that needs no tokenizer.

    Attributes:
        rows: one entry per row along the first dim of the inputs.
        outputs: those asked for, in the order of the request.
        over_max: the caller's choice for rows beyond the largest bucket; None: as configured.
        timeout_s: rows that have not started after it are dropped; None: never.
        parameters: those of the request that mean nothing here, to be returned.
    """

    rows: list[Row]
    outputs: tuple[TensorSpec, ...]
    over_max: str | None
    timeout_s: float | None
    parameters: Parameters


def outputs_of(spec: ModelSpec) -> tuple[TensorInfo, ...]:
    """Return the outputs in a model's metadata."""
    return tuple(info_of(tensor) for tensor in spec.outputs.values())


def check_version(model: str, version: str) -> None:
    """Refuse a version that is not served; an empty one leaves the choice to the server."""
    if version not in ("", VERSION):
        raise NotFound(
            f"version {shown(version)} of model {shown(model)} is not served; its one version is "
            f"{VERSION!r}: ask for that or for none.",
            code="version_not_found",
        )


def read(request: InferRequest, spec: ModelSpec, *, max_rows: int) -> Job:
    """Hold a request against the model that it names.

    Raises:
        InvalidRequest: 400, naming the tensor, the parameter or the rows, the bound, the remedy.
    """
    parameters = request.parameters
    if len(request.id) > MAX_WORD:
        raise InvalidRequest(
            f"id has {len(request.id)} characters, at most {MAX_WORD} are sent back; send a "
            "shorter one.",
            param="id",
        )
    check_parameters("parameters", parameters)
    return Job(
        rows=read_rows(request.inputs, spec, max_rows),
        outputs=_outputs(request, spec),
        over_max=_over_max(parameters),
        timeout_s=_timeout_s(parameters),
        parameters={key: value for key, value in parameters.items() if key not in _OURS},
    )


def check_tensors(name: str, count: int) -> None:
    """Refuse more inputs, or outputs, than any model has, before they are read."""
    if count > MAX_TENSORS:
        raise InvalidRequest(
            f"{name} has {count} tensors, at most {MAX_TENSORS} are read; send each once, with all "
            "its rows.",
            param=name,
        )


def check_parameters(where: str, parameters: Parameters) -> None:
    """Refuse parameters that this server cannot honour, or that are too long to be sent back.

    Args:
        where: the place in the request, for messages: ``parameters``, ``outputs[0].parameters``.
        parameters: what stands there.
    """
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequest(
            f"{where} has {len(parameters)} entries, at most {MAX_PARAMETERS} are read; leave out "
            "those without a meaning here.",
            param=where,
        )
    for name, value in parameters.items():
        _check_length(where, name, value)
        why = REFUSED.get(name)
        if why is None and name.startswith(REFUSED_PREFIX):
            why = "it is for another server"
        if why is not None:
            raise InvalidRequest(
                f"{where} has {shown(name)}, which this server does not support: {why}; leave it "
                "out.",
                param=f"{where}[{name[:40]}]",
                code="unsupported_parameter",
            )


def _check_length(where: str, name: str, value: Parameter) -> None:
    for what, word in (("name", name), ("value", value)):
        if isinstance(word, str) and len(word) > MAX_WORD:
            raise InvalidRequest(
                f"{where}[{name[:40]}] has a {what} of {len(word)} characters, at most {MAX_WORD} "
                "are read; send a shorter one.",
                param=f"{where}[{name[:40]}]",
            )


def _over_max(parameters: Parameters) -> str | None:
    value = parameters.get("over_max")
    if value is not None and value not in OVER_MAX:
        raise InvalidRequest(
            f"parameters[over_max] is {shown(value)}; it must be one of {', '.join(OVER_MAX)}.",
            param="parameters[over_max]",
        )
    return None if value is None else str(value)


def _timeout_s(parameters: Parameters) -> float | None:
    """Return ``timeout`` as seconds; the protocol's clients count microseconds, 0 is no limit."""
    value = parameters.get("timeout", 0)
    if type(value) is not int or not 0 <= value <= MAX_TIMEOUT_S * 1e6:
        raise InvalidRequest(
            f"parameters[timeout] is {shown(value)}; it must be a whole number of microseconds, at "
            f"most {MAX_TIMEOUT_S * 1e6:.0f}, or 0 for no limit.",
            param="parameters[timeout]",
        )
    return value / 1e6 if value else None


def _outputs(request: InferRequest, spec: ModelSpec) -> tuple[TensorSpec, ...]:
    if not request.outputs:
        return tuple(spec.outputs.values())
    wanted: dict[str, TensorSpec] = {}
    for i, output in enumerate(request.outputs):
        tensor = spec.outputs.get(output.name)
        if tensor is None:
            raise InvalidRequest(
                f"outputs[{i}].name is {shown(output.name)}; model {spec.name!r} gives "
                f"{', '.join(spec.outputs)}.",
                param=f"outputs[{i}].name",
            )
        if output.name in wanted:
            raise InvalidRequest(
                f"outputs[{i}].name {output.name!r} is there twice; ask for each output once.",
                param=f"outputs[{i}].name",
            )
        check_parameters(f"outputs[{i}].parameters", output.parameters)
        wanted[output.name] = tensor
    return tuple(wanted.values())


def check_answer(job: Job, sizes: Sequence[Mapping[str, int]], max_bytes: float) -> None:
    """Refuse what would be answered with too much: one long row makes all the others as long.

    Args:
        job: from :func:`read`.
        sizes: axis -> size of each row that will run.
        max_bytes: of all the outputs together, as binary data.

    Raises:
        InvalidRequest: 400, naming the size, the bound and the remedy.
    """
    largest = {axis: max(row[axis] for row in sizes) for axis in sizes[0]}
    shapes = [tensor.shape({**largest, BATCH: len(sizes)}) for tensor in job.outputs]
    held = [datatype_of(tensor.dtype).held or np.dtype("O") for tensor in job.outputs]
    size_bytes = sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, held, strict=True)
    )
    if size_bytes > max_bytes:
        raise InvalidRequest(
            f"the outputs would have shapes {', '.join(shown(list(s)) for s in shapes)} and "
            f"{size_bytes} bytes, at most {max_bytes} are sent; send fewer rows a request, long "
            "ones apart from short ones, ask for fewer `outputs`, or raise "
            "`serve.max_answer_bytes`.",
            param="outputs",
            code="too_much_output",
        )


def answer(
    request: InferRequest, spec: ModelSpec, job: Job, results: Sequence[Mapping[str, Array]]
) -> InferResponse:
    """Return the answer.

    Args:
        request: what was asked.
        spec: of the model.
        job: from :func:`read`.
        results: output name -> array without the batch axis, for each row in order.
    """
    outputs = tuple(
        _stacked(tensor, [row[tensor.name] for row in results]) for tensor in job.outputs
    )
    return InferResponse(spec.name, VERSION, request.id, job.parameters, outputs)


def _stacked(tensor: TensorSpec, rows: Sequence[Array]) -> Tensor:
    """Stack rows; where their sizes differ, zeros fill each up to the largest of the request."""
    datatype = datatype_of(tensor.dtype)
    shape = (len(rows), *(max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)))
    array: Array = np.zeros(shape, datatype.held)
    for i, row in enumerate(rows):
        region: tuple[Any, ...] = (i, *map(slice, row.shape))
        array[region] = row
    return Tensor(tensor.name, datatype.name, shape, array)
