"""Graph breaks: what Dynamo could not trace, in a closed set of reasons."""

from __future__ import annotations

from collections import Counter

import torch._dynamo.utils as dynamo_utils

from shapeserve.metrics import GraphBreakReason

# Words of torch's messages (2.11-2.14); the first found wins.
_WORDS: tuple[tuple[str, GraphBreakReason], ...] = (
    ("data-dependent", GraphBreakReason.DATA_DEPENDENT),
    ("Data-dependent", GraphBreakReason.DATA_DEPENDENT),
    ("Tensor.item", GraphBreakReason.DATA_DEPENDENT),
    ("torch._dynamo.graph_break", GraphBreakReason.EXPLICIT),
    ("graph_break()", GraphBreakReason.EXPLICIT),
    ("print", GraphBreakReason.SIDE_EFFECT),
    ("side effect", GraphBreakReason.SIDE_EFFECT),
    ("Failed to trace builtin", GraphBreakReason.UNSUPPORTED_CALL),
    ("Unsupported", GraphBreakReason.UNSUPPORTED_CALL),
    ("skipped function", GraphBreakReason.UNSUPPORTED_CALL),
)


def snapshot() -> Counter[str]:
    """Return torch's count of every graph break so far (process-wide): message -> times."""
    return Counter({str(k): int(v) for k, v in dynamo_utils.counters["graph_break"].items()})


def since(before: Counter[str]) -> Counter[GraphBreakReason]:
    """Return the graph breaks since ``before``: reason class -> times."""
    found: Counter[GraphBreakReason] = Counter()
    for text, times in (snapshot() - before).items():
        found[classify_break(text)] += times
    return found


def classify_break(text: str) -> GraphBreakReason:
    """Map a message to the closed set of reasons that a metric label may carry."""
    for word, reason in _WORDS:
        if word in text:
            return reason
    return GraphBreakReason.OTHER
