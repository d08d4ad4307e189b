"""What ``tune --report`` adds: more fits, simulated loads, one HTML file."""

from __future__ import annotations

from shapeserve.cli.common import progress_bar
from shapeserve.cli.tune.inputs import Input
from shapeserve.page import write_page
from shapeserve.tuning import Proposal, Request


def write_report(read: Input, request: Request, proposal: Proposal, path: str) -> None:
    """Study a proposal and write the report.

    Args:
        read: what was tuned to.
        request: what was asked for.
        proposal: what came of it.
        path: where the report goes.

    Raises:
        ConfigError: it cannot be written, or the proposal has more buckets than a policy may have.
    """
    from shapeserve.tuning.report import render
    from shapeserve.tuning.study import study

    with progress_bar("for the report") as on_step:
        found = study(read.source, read.note, read.traffic, request, proposal, on_step)
    write_page(render(found), path)
