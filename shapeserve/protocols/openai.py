"""The OpenAI embeddings API: ``/v1/embeddings`` and ``/v1/models``.

A request is checked by hand, not by a schema library: the checks are few, exact, name the bad
item, and cost microseconds on the hot path.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import orjson

from shapeserve.errors import InvalidRequest, NotFound
from shapeserve.models import Head
from shapeserve.protocols.fields import (
    MISSING,
    bad_text,
    check_items,
    check_known,
    check_rows,
    kind,
    non_empty,
    over_max,
    shown,
)
from shapeserve.protocols.http import Reply, check_lists, json_reply

EncodingFormat = Literal["float", "base64"]
Task = Literal["make embeddings", "rerank", "classify"]
TASKS: Final[Mapping[str, Task]] = {
    "embeddings": "make embeddings",
    "rerank": "rerank",
    "classify": "classify",
}
"""The last part of a path below ``/v1``, and what a model must do for it."""
# `user` is part of the API and has no meaning here; the last two are ours.
_FIELDS: Final = frozenset(
    {"input", "model", "encoding_format", "dimensions", "user", "truncate", "over_max"}
)
MAX_TOKEN_ID: Final = 2**31 - 1  # ids become int64 arrays; the model's own bound is checked later
_AN_ID: Final = f"a token id, a whole number from 0 to {MAX_TOKEN_ID}"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a request may ask of one model.

    Attributes:
        name: the model's name in answers and metrics.
        aliases: other names that requests may use.
        dim: length of one embedding; None for a model that makes none.
        max_rows: inputs that one request may carry.
        normalize: embeddings have unit length.
        created_s: Unix time at which the model was loaded, whole seconds.
        head: what the logits of a classification model mean; None for other models.
    """

    name: str
    aliases: tuple[str, ...] = ()
    dim: int | None = None
    max_rows: int = 2048
    normalize: bool = True
    created_s: int = 0
    head: Head | None = None

    @property
    def tasks(self) -> list[str]:
        """What of ``/v1`` the model answers: the last parts of the paths."""
        return [name for name, task in TASKS.items() if self.can(task)]

    def can(self, task: Task) -> bool:
        """Whether the model does that."""
        if task == "make embeddings":
            return self.dim is not None
        return self.head is not None and (task == "classify" or self.head.relevance is not None)


class RowResult(Protocol):
    """What rendering reads of one answered row (``shapeserve.engine.Result`` has it)."""

    @property
    def outputs(self) -> Mapping[str, np.ndarray[Any, Any]]: ...  # noqa: D102
    @property
    def length(self) -> int: ...  # noqa: D102
    @property
    def mode(self) -> str: ...  # noqa: D102
    @property
    def bucket(self) -> str: ...  # noqa: D102
    @property
    def reason(self) -> str | None: ...  # noqa: D102
    @property
    def truncated_from(self) -> int | None: ...  # noqa: D102
    @property
    def pieces(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request that passed every check that needs no tokenizer."""

    model: ModelInfo
    samples: list[str] | list[list[int]]
    encoding_format: EncodingFormat
    dimensions: int | None
    over_max: str | None


def by_name(models: Iterable[ModelInfo]) -> dict[str, ModelInfo]:
    """Return name and alias -> model."""
    return {name: model for model in models for name in (model.name, *model.aliases)}


def parse_embeddings(body: bytes, models: Mapping[str, ModelInfo]) -> EmbeddingRequest:
    """Return the request in ``body``: the three steps below, for callers that need no step alone.

    Args:
        body: JSON in UTF-8, at most the configured number of bytes.
        models: every name and alias that is served (``by_name``).

    Raises:
        InvalidRequest: 400, naming the field or the indices, the bound and the remedy.
        NotFound: 404, an unknown model.
    """
    fields = read_object(body)
    model = read_model(fields, models)
    check_task(model, "make embeddings", models)
    return read_embeddings(fields, model)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``."""
    check_lists(body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error}; NaN, Infinity, comments and trailing commas are "
            "not JSON either.",
            code="invalid_json",
        ) from None
    if not isinstance(fields, dict):
        raise InvalidRequest(
            f"the body is {kind(fields)}; send a JSON object with the fields of this endpoint."
        )
    return fields


def read_model(fields: Mapping[str, Any], models: Mapping[str, ModelInfo]) -> ModelInfo:
    """Return the model that the request names."""
    name, served = fields.get("model", MISSING), ", ".join(sorted(models))
    if not isinstance(name, str):
        raise InvalidRequest(
            f"`model` is {kind(name)}; it must be the name of a served model: {served}.",
            param="model",
        )
    return find_model(name, models)


def find_model(name: str, models: Mapping[str, ModelInfo]) -> ModelInfo:
    """Return the model of that name or alias.

    Raises:
        NotFound: 404, naming those that are served.
    """
    model = models.get(name)
    if model is None:
        served = ", ".join(sorted(models))
        raise NotFound(f"model {name[:80]!r} is not served; served are: {served}.", param="model")
    return model


def check_task(model: ModelInfo, task: Task, models: Mapping[str, ModelInfo]) -> None:
    """Refuse to ask a model for what it does not do, naming those that do."""
    if model.can(task):
        return
    others = ", ".join(sorted({other.name for other in models.values() if other.can(task)}))
    raise InvalidRequest(
        f"model {model.name!r} does not {task}; served models that do: {others or 'none'}.",
        param="model",
    )


def read_embeddings(fields: Mapping[str, Any], model: ModelInfo) -> EmbeddingRequest:
    """Return the checked request of ``POST /v1/embeddings`` to a model that makes embeddings."""
    check_known(fields, _FIELDS)
    return EmbeddingRequest(
        model=model,
        samples=_samples(fields.get("input", MISSING), model.max_rows),
        encoding_format=_encoding_format(fields.get("encoding_format")),
        dimensions=_dimensions(fields.get("dimensions"), model),
        over_max=over_max(fields),
    )


def _samples(value: Any, max_rows: int) -> list[str] | list[list[int]]:
    """Return the rows of ``input``: a text, texts, token ids, or lists of token ids."""
    wanted = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    rows: list[Any] = [value] if isinstance(value, str) else non_empty("input", value, wanted)
    if type(rows[0]) in (int, float):
        if _bad_ids(rows):  # which is quick; the other names the places
            check_items("input", rows, _AN_ID, _bad_id)
        return [rows]
    check_rows("input", len(rows), max_rows)
    if isinstance(rows[0], list):
        check_items("input", rows, f"a list of token ids, not empty, each {_AN_ID}", _bad_ids)
    elif isinstance(rows[0], str):
        check_items("input", rows, "a string", bad_text)
    else:
        check_items(
            "input", rows, "a string (or all of them token ids, or lists of those)", bad_text
        )
    return rows


def _bad_id(item: Any) -> str | None:
    if type(item) is float:
        return f"is {shown(item)}"
    if type(item) is not int:  # bool is an int to isinstance
        return f"is {kind(item)}"
    return None if 0 <= item <= MAX_TOKEN_ID else f"is {item}, outside 0..{MAX_TOKEN_ID}"


def _bad_ids(item: Any) -> str | None:
    if not isinstance(item, list):
        return f"is {kind(item)}"
    if not item:
        return "is an empty list"
    # The whole list at once first: a loop in Python over 100,000 ids takes 10 ms.
    if set(map(type, item)) == {int} and min(item) >= 0 and max(item) <= MAX_TOKEN_ID:
        return None
    return next(f"[{i}] {what}" for i, one in enumerate(item) if (what := _bad_id(one)))


def _encoding_format(value: Any) -> EncodingFormat:
    if value is None or value == "float":
        return "float"
    if value == "base64":
        return "base64"
    raise InvalidRequest(
        f"`encoding_format` is {shown(value)}; it must be 'float' or 'base64'.",
        param="encoding_format",
    )


def _dimensions(value: Any, model: ModelInfo) -> int | None:
    if value is None:
        return None
    if type(value) is not int or model.dim is None or not 1 <= value <= model.dim:
        raise InvalidRequest(
            f"`dimensions` is {shown(value)}; it must be a whole number from 1 to {model.dim}, "
            f"the length of an embedding of {model.name!r}.",
            param="dimensions",
        )
    return value


def render_embeddings(request: EmbeddingRequest, results: Sequence[RowResult]) -> Reply:
    """Return the answer: one item a row, in the order of the request.

    ``dimensions`` keeps the first components and, for a model whose embeddings have unit
    length, brings the shorter vector back to unit length. Rows that were cut carry
    ``truncated_from`` and rows that were split carry ``pieces``; the headers count what was
    done. Each row is encoded by itself, so that a large answer rendered on a worker thread
    lets the event loop in between rows.
    """
    rows = [_render_row(request, i, result) for i, result in enumerate(results)]
    tokens = sum(result.length for result in results)
    head = orjson.dumps({"object": "list", "model": request.model.name})[:-1]
    usage = orjson.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    body = b"".join((head, b',"data":[', b",".join(rows), b'],"usage":', usage, b"}"))
    return Reply(200, body, report_headers(results))


def _render_row(request: EmbeddingRequest, index: int, result: RowResult) -> bytes:
    vector = _vector(request, result)
    item: dict[str, Any] = {"object": "embedding", "index": index}
    if request.encoding_format == "base64":
        # Little-endian float32, which is what every OpenAI client decodes.
        item["embedding"] = base64.b64encode(vector.astype("<f4", copy=False).data).decode()
    else:
        item["embedding"] = vector
    if result.truncated_from is not None:
        item["truncated_from"] = result.truncated_from
    if result.pieces > 1:
        item["pieces"] = result.pieces
    return orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)


def _vector(request: EmbeddingRequest, result: RowResult) -> np.ndarray[Any, Any]:
    """Return the embedding as contiguous float32 ``[dimensions]``."""
    vector = np.asarray(next(iter(result.outputs.values())), dtype=np.float32)
    if request.dimensions is not None and request.dimensions < vector.size:
        vector = vector[: request.dimensions]
        norm = float(np.linalg.norm(vector))
        if request.model.normalize and norm > 0:
            vector = vector / np.float32(norm)
    return np.ascontiguousarray(vector)


def report_headers(results: Sequence[RowResult]) -> dict[str, str]:
    """Return ``x-shapeserve-*``: how the rows ran, and what was done to those that did not fit.

    ``modes`` and ``buckets`` are always there; ``fallbacks`` (by reason), ``truncated`` and
    ``split`` only when some row was.
    """
    modes = Counter(str(result.mode) for result in results)
    buckets = Counter(result.bucket for result in results)
    reasons = Counter(str(result.reason) for result in results if result.reason is not None)
    truncated = sum(result.truncated_from is not None for result in results)
    split = sum(result.pieces > 1 for result in results)
    headers = {
        "x-shapeserve-modes": ",".join(f"{mode}={n}" for mode, n in modes.items()),
        # A bucket's name has commas in it, hence the other separator. At most 16 are named:
        # a header of a few hundred bytes passes every proxy.
        "x-shapeserve-buckets": "; ".join(
            f"{bucket} x{n}" for bucket, n in buckets.most_common(16)
        ),
    }
    if reasons:
        headers["x-shapeserve-fallbacks"] = ",".join(f"{why}={n}" for why, n in reasons.items())
    if truncated:
        headers["x-shapeserve-truncated"] = str(truncated)
    if split:
        headers["x-shapeserve-split"] = str(split)
    return headers


def render_models(models: Iterable[ModelInfo]) -> Reply:
    """Return the list of served models."""
    return json_reply({"object": "list", "data": [_card(model) for model in models]})


def render_model(name: str, models: Mapping[str, ModelInfo]) -> Reply:
    """Return one model by name or alias, as ``client.models.retrieve`` asks for it."""
    return json_reply(_card(find_model(name, models)))


def _card(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "shapeserve",
        "aliases": list(model.aliases),
        "dimensions": model.dim,
        "tasks": model.tasks,
    }
