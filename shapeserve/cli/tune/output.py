"""What ``tune`` writes and prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.cli.common import check_apart, check_target, json_option, write_json
from shapeserve.cli.tune.bound_words import (
    latency_cells,
    print_specialized,
    slo_missed,
)
from shapeserve.cli.tune.inputs import Input
from shapeserve.cli.tune.report import write_report
from shapeserve.config import parse_policy
from shapeserve.errors import ConfigError
from shapeserve.page import require_plotly
from shapeserve.tuning import Proposal, Request
from shapeserve.tuning.words import NAMES, bounds, headline, sentences, sizes

_WIDTH = 110


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what is written."""
    out = click.option(
        "--out", metavar="POLICY.yaml", help="Write the `policy` block of the proposal."
    )
    report = click.option(
        "--report",
        metavar="REPORT.html",
        help="Write charts and simulated latencies as one HTML file; up to half a minute more.",
    )
    return out(report(json_option(command)))


def check_outputs(given: Mapping[str, Any]) -> None:
    """Find out early that something cannot be written.

    Args:
        given: the values of all options of the command.
    """
    targets = {
        "--out": given["out"],
        "--report": given["report"],
        "--json": given["json_target"],
    }
    for option, target in targets.items():
        check_target(option, target)
    check_apart({"--trace": given["trace"], "--costs": given["costs"]}, targets)
    if given["report"] is not None:
        require_plotly()


def write_outputs(
    given: Mapping[str, Any], read: Input, request: Request, proposal: Proposal
) -> None:
    """Write and print all that was asked for.

    Args:
        given: the values of all options of the command.
        read: what the proposal was made from.
        request: what was asked for.
        proposal: the result.
    """
    write_files(given, read, request, proposal)
    if given["json_target"] is not None:
        write_json(_to_dict(read, proposal), given["json_target"])
    if given["json_target"] != "-":
        console = Console(highlight=False)
        if not console.is_terminal:  # 80 columns there, and the tables need more
            console = Console(highlight=False, width=_WIDTH)
        _print(console, proposal, ordered=read.traffic.times_s is not None)
        if read.note:
            console.print(read.note)
    if not proposal.keeps_slo:
        raise click.ClickException(slo_missed(proposal))


def write_files(
    given: Mapping[str, Any], read: Input, request: Request, proposal: Proposal
) -> None:
    """Write the files that were asked for; ``--watch`` does so for each new proposal."""
    if given["out"] is not None:
        _write_policy(proposal, given["out"], read.source)
    if given["report"] is not None:
        write_report(read, request, proposal, given["report"])


def _to_dict(read: Input, proposal: Proposal) -> dict[str, Any]:
    data = proposal.to_dict()
    data["details"]["input"] = {"source": read.source, "note": read.note}
    return data


def _write_policy(proposal: Proposal, path: str, source: str) -> None:
    """Write the block after reading it back as the configuration does."""
    policy = proposal.policy()
    parse_policy(policy)
    ends = ", ".join(f"{axis} {end}" for axis, end in proposal.ends.items())
    limit = (
        "limits.max_batch_tokens must be at least that"
        if proposal.packed
        else "limits.max_length, if it is set, must be the same"
    )
    head = (
        f"# models[].policy, made by `shapeserve tune` from {source} ({proposal.rows} "
        f"rows)\n# largest sizes: {ends}; {limit}\n"
    )
    text = head + yaml.safe_dump(policy, default_flow_style=None, sort_keys=False, width=96)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written: {error.strerror}; give another path"
        ) from error


def _print(console: Console, proposal: Proposal, *, ordered: bool) -> None:
    console.print(headline(proposal, ordered=ordered))
    console.print(_table(proposal))
    for line in (*sizes(proposal), *bounds(proposal)):
        console.print(line)
    print_specialized(console, proposal)
    for line in sentences(proposal):
        console.print(line)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3g}"


def _table(proposal: Proposal) -> Table:
    title = "padding / all elements along the axes of a row"
    if proposal.packed:
        title = "padding / all elements: tails of packed batches, simulated"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("policy", no_wrap=True)
    timed = ("device-s",) if proposal.cost_source else ()
    played = ("p99 ms", "load") if proposal.proposed.p99_s is not None else ()
    for name in (proposal.counted, "first half", "second half", *timed, *played):
        table.add_column(name, justify="right")
    for name, scored in {**proposal.compared, "proposed": proposal.proposed}.items():
        table.add_row(
            NAMES[name],
            str(scored.shapes),
            f"{scored.first_half:.1%}",
            f"{scored.second_half:.1%}",
            *([] if scored.device_s is None else [_seconds(scored.device_s)]),
            *latency_cells(scored),
        )
    return table
