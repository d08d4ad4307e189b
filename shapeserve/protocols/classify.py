"""``/v1/classify``: texts or pairs of texts to labels, in the form of vLLM's classification API.

Its ``id`` and ``created`` are left out (the request id is a header), and ``labels`` names what
``probs`` are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shapeserve.errors import InvalidRequest
from shapeserve.models import Head, TextPair
from shapeserve.protocols.fields import (
    MISSING,
    bad_text,
    boolean,
    check_items,
    check_known,
    check_rows,
    non_empty,
    over_max,
)
from shapeserve.protocols.http import Reply, json_reply
from shapeserve.protocols.openai import ModelInfo, RowResult, report_headers
from shapeserve.protocols.rerank import OVER_MAX
from shapeserve.protocols.scores import ACTIVATIONS, logits_of

_FIELDS: Final = frozenset({"model", "input", "raw_scores", "truncate", "over_max", "user"})
_PAIR: Final = {"text", "text_pair"}


@dataclass(frozen=True, slots=True)
class ClassifyRequest:
    """A request that passed every check that needs no tokenizer.

    Attributes:
        model: a classification model.
        head: its labels.
        samples: texts and pairs.
        raw_scores: whether logits are wanted.
        over_max: the caller's choice for long rows.
    """

    model: ModelInfo
    head: Head
    samples: Sequence[str | TextPair]
    raw_scores: bool
    over_max: str | None


def read_classify(fields: Mapping[str, Any], model: ModelInfo) -> ClassifyRequest:
    """Return the checked request of ``POST /v1/classify``.

    Raises:
        InvalidRequest: naming the field or the indices, the bound and the remedy.
    """
    check_known(fields, _FIELDS)
    if model.head is None:
        raise InvalidRequest(f"model {model.name!r} has no labels; ask another.", param="model")
    return ClassifyRequest(
        model=model,
        head=model.head,
        samples=_samples(fields.get("input", MISSING), model.max_rows),
        raw_scores=boolean(fields, "raw_scores"),
        over_max=over_max(fields, OVER_MAX),
    )


def _samples(value: Any, max_rows: int) -> list[str | TextPair]:
    """Return the rows of ``input``: a text, a pair, or a list of those."""
    wanted = "a string, an object with `text` and `text_pair`, or a list of those"
    items = [value] if isinstance(value, str | dict) else non_empty("input", value, wanted)
    check_rows("input", len(items), max_rows)
    check_items("input", items, "a string, or an object with `text` and `text_pair` alone", _bad)
    return [item if isinstance(item, str) else TextPair(**item) for item in items]


def _bad(item: Any) -> str | None:
    if not isinstance(item, dict):
        return bad_text(item)
    if set(item) != _PAIR:
        keys = ", ".join(repr(key[:40]) for key in sorted(item)[:3]) or "no key"
        return f"has {keys} instead of `text` and `text_pair`"
    problems = [(key, bad_text(item[key])) for key in sorted(_PAIR)]
    return next((f"has a `{key}` that {what}" for key, what in problems if what), None)


def render_classify(request: ClassifyRequest, results: Sequence[RowResult]) -> Reply:
    """Return the best label of each row and the scores of all of them, in order."""
    tokens = sum(result.length for result in results)
    content = {
        "object": "list",
        "model": request.model.name,
        "labels": request.head.labels,
        "data": [_item(request, i, result) for i, result in enumerate(results)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    reply = json_reply(content)
    return Reply(reply.status, reply.body, report_headers(results))


def _item(request: ClassifyRequest, index: int, result: RowResult) -> dict[str, Any]:
    logits, labels = logits_of(result.outputs), request.head.labels
    item: dict[str, Any] = {"index": index, "label": labels[int(logits.argmax())]}
    if request.raw_scores:
        item["logits"] = logits.tolist()
    else:
        item["probs"] = ACTIVATIONS[request.head.activation](logits).tolist()
    item["num_classes"] = len(labels)
    if result.truncated_from is not None:
        item["truncated_from"] = result.truncated_from
    return item
