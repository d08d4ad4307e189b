"""Graph breaks: what Dynamo could not trace, in a closed set of reasons."""

from __future__ import annotations

import threading
from collections import Counter

import torch._dynamo.utils as dynamo_utils

from shapeserve.metrics import GraphBreakReason

ISLAND_MARK = "shapeserve eager island"
"""Begins the reason of a break that the configuration asked for (``compile.eager_islands``)."""

# Words of torch's messages (2.11-2.14); the first found wins.
_WORDS: tuple[tuple[str, GraphBreakReason], ...] = (
    (ISLAND_MARK, GraphBreakReason.EAGER_ISLAND),
    ("does not support running with fake tensors", GraphBreakReason.OPAQUE_OP),
    ("no meta kernel", GraphBreakReason.OPAQUE_OP),
    ("unsupported operator", GraphBreakReason.OPAQUE_OP),
    ("data-dependent", GraphBreakReason.DATA_DEPENDENT),
    ("Data-dependent", GraphBreakReason.DATA_DEPENDENT),
    ("Data dependent", GraphBreakReason.DATA_DEPENDENT),
    ("Dynamic shape operator", GraphBreakReason.DATA_DEPENDENT),
    ("Tensor.item", GraphBreakReason.DATA_DEPENDENT),
    ("torch._dynamo.graph_break", GraphBreakReason.EXPLICIT),
    ("graph_break()", GraphBreakReason.EXPLICIT),
    ("torch.compiler.disable", GraphBreakReason.EXPLICIT),
    ("`print`", GraphBreakReason.SIDE_EFFECT),
    ("logging", GraphBreakReason.SIDE_EFFECT),
    ("side effect", GraphBreakReason.SIDE_EFFECT),
    ("Failed to trace builtin", GraphBreakReason.UNSUPPORTED_CALL),
    ("Unsupported", GraphBreakReason.UNSUPPORTED_CALL),
    ("marked as skipped", GraphBreakReason.UNSUPPORTED_CALL),
    ("skipped function", GraphBreakReason.UNSUPPORTED_CALL),
)

_LOCK = threading.Lock()
_claimed: Counter[str] = Counter()


def claim() -> Counter[GraphBreakReason]:
    """Return the graph breaks since the last call of anyone: reason class -> times.

    Torch counts them per process. Each is returned once, so that the sum over all models is right;
    two models that compile at the same moment may be given each other's.
    """
    global _claimed
    with _LOCK:
        seen: Counter[str] = Counter(
            {str(text): int(n) for text, n in dynamo_utils.counters["graph_break"].items()}
        )
        # Someone emptied torch's counters: what they hold now is all new.
        before = _claimed if not _claimed - seen else Counter()
        _claimed = seen
    found: Counter[GraphBreakReason] = Counter()
    for text, times in (seen - before).items():
        found[classify_break(text)] += times
    return found


def classify_break(text: str) -> GraphBreakReason:
    """Map a message to the closed set of reasons that a metric label may carry."""
    for word, reason in _WORDS:
        if word in text:
            return reason
    return GraphBreakReason.OTHER
