"""``/v1``: embeddings and models."""

from __future__ import annotations

from collections.abc import Mapping

from shapeserve.protocols import http
from shapeserve.protocols.fields import OVER_MAX
from shapeserve.protocols.openai import MAX_TOKEN_ID, TASKS, ModelInfo
from shapeserve.protocols.openapi.parts import (
    CUT_FROM,
    Data,
    answer,
    content,
    errors,
    fields,
    get,
    list_of,
    long_rows,
    ref,
    text,
    text_task,
    whole,
    words,
)


def paths() -> Data:
    """Return path -> method -> operation."""
    return {
        http.EMBEDDINGS: text_task(
            "embed",
            "Texts or token ids to vectors.",
            "EmbeddingsRequest",
            "A vector a row.",
            "Embeddings",
        ),
        http.MODELS: {
            "get": get(
                "listModels",
                "What is served.",
                {
                    "200": answer("The models.", content(ref("Models"))),
                    **errors("Error", (400, 500)),
                },
            )
        },
        f"{http.MODELS}/{{model}}": {
            "get": get(
                "retrieveModel",
                "One model, by name or alias.",
                {
                    "200": answer("The model.", content(ref("Model"))),
                    **errors("Error", (400, 404, 500)),
                },
                [ref("Model", "parameters")],
            )
        },
    }


def schemas(models: Mapping[str, ModelInfo]) -> Data:
    """Return the components that :func:`paths` refers to, for these names and aliases."""
    return {
        "EmbeddingsRequest": _request({n: m for n, m in models.items() if m.dim is not None}),
        "Embeddings": _answer(),
        "Models": fields({"object": words("list"), "data": list_of(ref("Model"))}),
        "Model": fields(
            {
                "id": text("The name in answers and metrics."),
                "object": words("model"),
                "created": whole(description="When it was loaded, Unix time in seconds."),
                "owned_by": words("shapeserve"),
                "aliases": list_of(text()),
                "dimensions": {"type": ["integer", "null"], "description": "Of an embedding."},
                "tasks": list_of(words(*TASKS))
                | {"description": "What of /v1 it answers; /v2 takes every model."},
            }
        ),
    }


def _request(models: Mapping[str, ModelInfo]) -> Data:
    """Return the schema of a request to one of ``models``, which make embeddings."""
    rows = max((model.max_rows for model in models.values()), default=1)
    longest = max((model.dim or 1 for model in models.values()), default=1)
    row = text("Not white space alone.", minLength=1, pattern=r"\S")
    ids = list_of(whole(maximum=MAX_TOKEN_ID), 1)
    return long_rows(
        {
            "model": words(*sorted(models)),
            "input": {"anyOf": [row, list_of(row, 1, rows), ids, list_of(ids, 1, rows)]},
            "encoding_format": words("float", "base64", None),
            "dimensions": {
                "type": ["integer", "null"],
                "minimum": 1,
                "maximum": longest,
                "description": "At most the model's own.",
            },
        },
        OVER_MAX,
        optional=("encoding_format", "dimensions"),
        examples=[{"model": name, "input": ["A cat.", "A dog."]} for name in sorted(models)[:1]],
    )


def _answer() -> Data:
    vector = {
        "anyOf": [
            list_of({"type": "number"}),
            text("Little-endian float32.", contentEncoding="base64"),
        ]
    }
    item = fields(
        {
            "object": words("embedding"),
            "index": whole(),
            "embedding": vector,
            "truncated_from": whole(1, description=CUT_FROM),
            "pieces": whole(2, description="Pieces that the row was split into."),
        },
        optional=("truncated_from", "pieces"),
    )
    return fields(
        {
            "object": words("list"),
            "data": list_of(item),
            "model": text(),
            "usage": fields({"prompt_tokens": whole(), "total_tokens": whole()}),
        }
    )
