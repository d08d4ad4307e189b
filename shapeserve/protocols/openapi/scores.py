"""``/v1/rerank`` and ``/v1/classify``."""

from __future__ import annotations

from collections.abc import Mapping

from shapeserve.protocols import http
from shapeserve.protocols.openai import ModelInfo, Task
from shapeserve.protocols.openapi.parts import (
    CUT_FROM,
    Data,
    fields,
    list_of,
    long_rows,
    text,
    text_task,
    whole,
    words,
)
from shapeserve.protocols.rerank import OVER_MAX

_ROW = text("Not white space alone.", minLength=1, pattern=r"\S")
_SWITCH: Data = {"type": ["boolean", "null"]}
_NUMBERS = list_of({"type": "number"}, 1)
_USAGE = fields({"prompt_tokens": whole(), "total_tokens": whole()})


def paths() -> Data:
    """Return path -> method -> operation."""
    return {
        http.RERANK: text_task(
            "rerank",
            "Documents by relevance to a query.",
            "RerankRequest",
            "The best documents first.",
            "Ranking",
        ),
        http.CLASSIFY: text_task(
            "classify",
            "Texts, or pairs of texts, to labels.",
            "ClassifyRequest",
            "A label a row.",
            "Labels",
        ),
    }


def schemas(models: Mapping[str, ModelInfo]) -> Data:
    """Return the components that :func:`paths` refers to, for these names and aliases."""
    return {
        "RerankRequest": _rerank(models),
        "Ranking": _ranking(),
        "ClassifyRequest": _classify(models),
        "Labels": _labels(),
    }


def _able(models: Mapping[str, ModelInfo], task: Task) -> tuple[list[str], int]:
    """The models that can do a task, and the most rows that one of them takes."""
    able = {name: model for name, model in models.items() if model.can(task)}
    return sorted(able), max((model.max_rows for model in able.values()), default=1)


def _rerank(models: Mapping[str, ModelInfo]) -> Data:
    names, rows = _able(models, "rerank")
    document = {"anyOf": [_ROW, fields({"text": _ROW})]}
    return long_rows(
        {
            "model": words(*names),
            "query": _ROW,
            "documents": list_of(document, 1, rows),
            "top_n": {
                "type": ["integer", "null"],
                "minimum": 1,
                "description": "Results wanted; all, if left out or if there are fewer.",
            },
            "return_documents": _SWITCH,
            "raw_scores": _SWITCH | {"description": "Logits instead of scores."},
        },
        OVER_MAX,
        optional=("top_n", "return_documents", "raw_scores"),
        examples=[{"model": n, "query": "a cat", "documents": ["A dog."]} for n in names[:1]],
    )


def _ranking() -> Data:
    result = fields(
        {
            "index": whole(),
            "relevance_score": {"type": "number"},
            "document": fields({"text": text()}),
            "truncated_from": whole(1, description=CUT_FROM),
        },
        optional=("document", "truncated_from"),
    )
    return fields(
        {
            "object": words("list"),
            "model": text(),
            "results": list_of(result, 1),
            "usage": _USAGE,
        }
    )


def _classify(models: Mapping[str, ModelInfo]) -> Data:
    names, rows = _able(models, "classify")
    row = {"anyOf": [_ROW, fields({"text": _ROW, "text_pair": _ROW})]}
    return long_rows(
        {
            "model": words(*names),
            "input": {"anyOf": [row, list_of(row, 1, rows)]},
            "raw_scores": _SWITCH | {"description": "`logits` instead of `probs`."},
        },
        OVER_MAX,
        optional=("raw_scores",),
        examples=[{"model": name, "input": ["A cat."]} for name in names[:1]],
    )


def _labels() -> Data:
    row = fields(
        {
            "index": whole(),
            "label": text(),
            "probs": _NUMBERS,
            "logits": _NUMBERS,
            "num_classes": whole(1),
            "truncated_from": whole(1, description=CUT_FROM),
        },
        optional=("probs", "logits", "truncated_from"),
    )
    return fields(
        {
            "object": words("list"),
            "model": text(),
            "labels": list_of(text(), 1),
            "data": list_of(row, 1),
            "usage": _USAGE,
        }
    )
