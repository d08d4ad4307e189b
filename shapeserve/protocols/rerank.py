"""``/v1/rerank``: a query and documents to documents by relevance, as Jina and Cohere have it.

``raw_scores`` is text-embeddings-inference's word for scores without the activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shapeserve.errors import InvalidRequest
from shapeserve.models import TextPair
from shapeserve.protocols.fields import (
    MISSING,
    bad_text,
    boolean,
    check_items,
    check_known,
    check_rows,
    kind,
    non_empty,
    over_max,
    shown,
)
from shapeserve.protocols.http import Reply, json_reply
from shapeserve.protocols.openai import ModelInfo, RowResult, report_headers
from shapeserve.protocols.scores import ACTIVATIONS, logits_of

# `user` has no meaning here, as in the embeddings API; `truncate` and `over_max` are ours.
_FIELDS: Final = frozenset(
    {
        "model",
        "query",
        "documents",
        "top_n",
        "return_documents",
        "raw_scores",
        "truncate",
        "over_max",
        "user",
    }
)
OVER_MAX: Final = ("fallback", "truncate", "reject")
"""What may become of a long document; a pair cannot be split."""


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A request that passed every check that needs no tokenizer.

    Attributes:
        model: a model with one logit.
        query: what the documents are compared with.
        documents: in the order of the request.
        top_n: how many results are wanted, at most the number of documents.
        return_documents: whether results carry their document.
        raw_scores: whether scores are logits.
        over_max: the caller's choice for long pairs.
    """

    model: ModelInfo
    query: str
    documents: Sequence[str]
    top_n: int
    return_documents: bool
    raw_scores: bool
    over_max: str | None

    @property
    def samples(self) -> list[TextPair]:
        """One row for each document."""
        return [TextPair(self.query, document) for document in self.documents]


def read_rerank(fields: Mapping[str, Any], model: ModelInfo) -> RerankRequest:
    """Return the checked request of ``POST /v1/rerank`` to a model that can rerank.

    Raises:
        InvalidRequest: naming the field or the indices, the bound and the remedy.
    """
    check_known(fields, _FIELDS)
    query = _query(fields.get("query", MISSING))
    documents = _documents(fields.get("documents", MISSING), model.max_rows)
    return RerankRequest(
        model=model,
        query=query,
        documents=documents,
        top_n=_top_n(fields.get("top_n"), len(documents)),
        return_documents=boolean(fields, "return_documents"),
        raw_scores=boolean(fields, "raw_scores"),
        over_max=over_max(fields, OVER_MAX),
    )


def _query(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"`query` is {kind(value)}; it must be a text.", param="query")
    return value


def _documents(value: Any, max_rows: int) -> list[str]:
    """Return the texts of ``documents``: strings, or objects with a ``text``."""
    non_empty("documents", value, "a list of strings, or of objects with a `text`")
    check_rows("documents", len(value), max_rows)
    check_items("documents", value, "a string, or an object with nothing but a `text`", _bad)
    return [item if isinstance(item, str) else item["text"] for item in value]


def _bad(item: Any) -> str | None:
    if not isinstance(item, dict):
        return bad_text(item)
    if set(item) != {"text"}:
        keys = ", ".join(repr(key[:40]) for key in sorted(item)[:3]) or "no key"
        return f"has {keys} instead of `text` alone"
    problem = bad_text(item["text"])
    return f"has a `text` that {problem}" if problem else None


def _top_n(value: Any, documents: int) -> int:
    """Return how many results are wanted; clients ask for 3 whatever they send."""
    if value is None:
        return documents
    if type(value) is not int or value < 1:
        raise InvalidRequest(
            f"`top_n` is {shown(value)}; it must be a whole number from 1 on, of which at most the "
            f"{documents} documents are given.",
            param="top_n",
        )
    return min(value, documents)


def render_rerank(request: RerankRequest, results: Sequence[RowResult]) -> Reply:
    """Return the best documents first; of equal ones the earlier.

    They are ordered by logit, which tells apart what the activation has rounded to the same.
    """
    logits = [float(logits_of(result.outputs)[0]) for result in results]
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: request.top_n]
    tokens = sum(result.length for result in results)
    content = {
        "object": "list",
        "model": request.model.name,
        "results": [_item(request, i, results[i]) for i in best],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    reply = json_reply(content)
    return Reply(reply.status, reply.body, report_headers(results))


def _item(request: RerankRequest, index: int, result: RowResult) -> dict[str, Any]:
    head = request.model.head
    activation = head.relevance if head and head.relevance and not request.raw_scores else None
    score = ACTIVATIONS[activation or "identity"](logits_of(result.outputs))
    item: dict[str, Any] = {"index": index, "relevance_score": float(score[0])}
    if request.return_documents:
        item["document"] = {"text": request.documents[index]}
    if result.truncated_from is not None:
        item["truncated_from"] = result.truncated_from
    return item
