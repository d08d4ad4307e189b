"""A proposal in sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterator

from shapeserve.tuning.fit import Entries
from shapeserve.tuning.limits import MIB
from shapeserve.tuning.propose import Proposal

_SATURATED = 0.98  # busier than this a queue grows as long as rows come

NAMES = {
    "default": "today's default",
    "pow2": "powers of two",
    "multiple_64": "multiples of 64",
    "pad_to_max": "pad to the longest",
    "proposed": "proposed",
}
"""Name of a policy -> what people call it."""


def headline(proposal: Proposal, *, ordered: bool) -> str:
    """Say what the rows are; ``ordered`` if they have times."""
    halves = "halves by row order" if ordered else "a histogram has no order: halves at random"
    return f"{proposal.rows} rows, {' x '.join(proposal.axes)}; {halves}"


def sizes(proposal: Proposal) -> Iterator[str]:
    """Yield the sizes along every axis."""
    for key, entries in proposal.proposed.buckets.items():
        yield f"{key}: {', '.join(_labels(entries))}"
    if proposal.batches is not None:
        yield f"batch: {', '.join(map(str, proposal.batches))}"


def bounds(proposal: Proposal) -> Iterator[str]:
    """Yield what the variants take, and whether one device keeps up."""
    if (found := proposal.footprint) is not None:
        parts = [f"variants: {found.variants}"]
        if found.graph_bytes is not None:
            parts.append(f"about {found.graph_bytes / MIB:.1f} MiB of graphs")
        if found.warmup_s is not None:
            parts.append(f"a start from an empty compile cache of about {found.warmup_s:.1f} s")
        yield ", ".join(parts)
    if proposal.p99_first_half_s is not None:
        yield (
            f"p99: of the second half, simulated at the rate of the trace; "
            f"{1e3 * proposal.p99_first_half_s:,.1f} ms on the first half, which chose"
        )
    if (proposal.proposed.load or 0.0) > _SATURATED:
        yield (
            f"load {proposal.proposed.load:.2f}: rows come faster than one device serves them, so "
            "that the latency is about the length of the trace; a lower --speed says what each of "
            "several replicas would do"
        )


def sentences(proposal: Proposal) -> Iterator[str]:
    """Yield what a reader of the numbers has to know."""
    proposed, counted = proposal.proposed, proposal.counted
    yield f"as many {counted}, had the second half been known: {proposal.optimum_second_half:.1%}"
    if proposal.limited_from is not None:
        yield (
            f"{proposed.shapes} {counted} instead of {proposal.limited_from}: no more are within "
            "the limits"
        )
    elif proposal.curve:
        yield (
            f"{proposed.shapes} {counted}: no larger number took away 0.5 % more for each further "
            "one, on rows within the first half that the fit had not seen"
        )
    if len(proposal.axes) == 2:
        yield f"two axes are searched: no better one saves more than {proposal.gap:.2%}"
    if proposal.guarded:
        yield (
            f"{proposal.guarded:.1%} of rows would still be mostly padding and go to the fallback "
            "(rare_shapes.max_padding_waste 0.6 by default); more row shapes avoid it"
        )
    if proposal.cost_source:
        how = "simulated" if proposal.packed else "in full batches"
        yield f"device-s: of the second half {how}; {proposal.cost_source}"


def _labels(entries: Entries) -> list[str]:
    """Return sizes, or shapes as ``480x640``, as texts."""
    return [
        "x".join(map(str, entry)) if isinstance(entry, tuple) else str(entry) for entry in entries
    ]
