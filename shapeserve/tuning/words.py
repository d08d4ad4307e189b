"""A proposal in sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterator

from shapeserve.tuning.fit import Entries
from shapeserve.tuning.propose import Proposal

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


def sentences(proposal: Proposal) -> Iterator[str]:
    """Yield what a reader of the numbers has to know."""
    proposed = proposal.proposed
    for key, entries in proposed.buckets.items():
        yield f"{key}: {', '.join(labels(entries))}"
    if proposal.batches is not None:
        yield f"batch: {', '.join(map(str, proposal.batches))}"
    yield (
        f"as many {proposal.counted}, had the second half been known: "
        f"{proposal.optimum_second_half:.1%}"
    )
    if proposal.curve:
        yield (
            f"{proposed.shapes} {proposal.counted}: no larger number took away 0.5 % more for each "
            "further one, on rows within the first half that the fit had not seen"
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


def labels(entries: Entries) -> list[str]:
    """Return sizes, or shapes as ``480x640``, as texts."""
    return [
        "x".join(map(str, entry)) if isinstance(entry, tuple) else str(entry) for entry in entries
    ]
