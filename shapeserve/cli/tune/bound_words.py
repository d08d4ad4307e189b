"""What is said of the variants of a proposal and of its latency."""

from __future__ import annotations

from rich.console import Console

from shapeserve.tuning import Proposal, Scored
from shapeserve.tuning.limits import MIB

_SATURATED = 0.98  # busier than this a queue grows as long as rows come


def print_bounds(console: Console, proposal: Proposal) -> None:
    """Say what the variants take, and whether one device keeps up."""
    if (found := proposal.footprint) is not None:
        parts = [f"variants: {found.variants}"]
        if found.graph_bytes is not None:
            parts.append(f"about {found.graph_bytes / MIB:.1f} MiB of graphs")
        if found.warmup_s is not None:
            parts.append(f"a start from an empty compile cache of about {found.warmup_s:.1f} s")
        console.print(", ".join(parts))
    if proposal.p99_first_half_s is not None:
        console.print(
            f"p99: of the second half, simulated at the rate of the trace; "
            f"{1e3 * proposal.p99_first_half_s:,.1f} ms on the first half, which chose"
        )
    if (proposal.proposed.load or 0.0) > _SATURATED:
        console.print(
            f"load {proposal.proposed.load:.2f}: rows come faster than one device serves them, so "
            "that the latency is about the length of the trace; a lower --speed says what each of "
            "several replicas would do"
        )


def latency_cells(scored: Scored) -> list[str]:
    """Return p99 and load of a policy, if they were simulated."""
    if scored.p99_s is None:
        return []
    return [f"{1e3 * scored.p99_s:,.1f}", "" if scored.load is None else f"{scored.load:.2f}"]


def slo_missed(proposal: Proposal) -> str:
    """Say by how much the bound on the latency is missed."""
    return (
        f"--slo-ms {1e3 * (proposal.slo_s or 0.0):g}: p99 of the proposal is "
        f"{1e3 * (proposal.proposed.p99_s or 0.0):,.1f} ms on the second half; allow more row "
        "shapes or variants, a larger bound, or more replicas (a lower --speed)"
    )
