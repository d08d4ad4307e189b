"""What the terminal shows of single variants and of latency."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.tuning import Proposal, Scored

_SHOWN = 12  # buckets that the table shows


def print_specialized(console: Console, proposal: Proposal) -> None:
    """Show the buckets whose own program would win or lose most within the horizon."""
    if not proposal.specialized:
        return
    paying = sum(each.pays for each in proposal.specialized)
    title = f"a program of its own pays for {paying} of {len(proposal.specialized)} buckets"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("bucket", no_wrap=True)
    for name in ("calls", "compile s", "shared ms", "own ms", "break-even", "won s", "pays"):
        table.add_column(name, justify="right")
    for each in proposal.specialized[:_SHOWN]:
        shape = each.shape
        table.add_row(
            each.bucket,
            f"{each.calls:,}",
            f"{shape.compile_s:.1f}",
            f"{1e3 * shape.dynamic_s:.3f}",
            f"{1e3 * shape.specialized_s:.3f}",
            "never" if shape.break_even is None else f"{shape.break_even:,}",
            f"{each.net_s:,.1f}",
            "yes" if each.pays else "no",
        )
    console.print(table)


def latency_cells(scored: Scored) -> list[str]:
    """Return p99 and load of a policy, if they were simulated."""
    if scored.p99_s is None:
        return []
    ms = 1e3 * scored.p99_s
    shown = f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}"
    return [shown, "" if scored.load is None else f"{scored.load:.2f}"]


def slo_missed(proposal: Proposal) -> str:
    """Say by how much the bound on the latency is missed."""
    return (
        f"--slo-ms {1e3 * (proposal.slo_s or 0.0):g}: p99 of the proposal is "
        f"{1e3 * (proposal.proposed.p99_s or 0.0):,.1f} ms on the second half; allow more row "
        "shapes or variants, a larger bound, or more replicas (a lower --speed)"
    )
