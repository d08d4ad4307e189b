"""``shapeserve tune``: from recorded traffic to bucket sizes."""

from __future__ import annotations

from pathlib import Path

import click
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.cli.common import json_option, progress_bar, write_json
from shapeserve.cli.tune_report import write_report
from shapeserve.config import parse_policy
from shapeserve.errors import ConfigError
from shapeserve.page import require_plotly
from shapeserve.policy import Device
from shapeserve.traces import Traffic, read_traffic
from shapeserve.tuning import CostTable, Objective, Proposal, Request, propose

_NAMES = {
    "default": "today's default",
    "pow2": "powers of two",
    "multiple_64": "multiples of 64",
    "pad_to_max": "pad to the longest",
}


@click.command("tune")
@click.option(
    "--trace",
    required=True,
    metavar="TRACE.csv.gz",
    help="Recorded traffic: `t_s,len`, `t_s,height,width` or `tokens,count`; CSV or JSONL.",
)
@click.option(
    "-k",
    "shapes",
    type=click.IntRange(min=1),
    help="Row shapes at most; left out, the number after which more stop paying.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    help="Longer rows are cut to it; it is the last bucket. Left out: the longest row.",
)
@click.option("--axis", help="Name of the model's axis for a trace of one length [default: seq].")
@click.option(
    "--align", type=click.IntRange(min=1), default=1, help="Sizes are multiples of it. [default: 1]"
)
@click.option(
    "--include", type=click.IntRange(min=1), multiple=True, help="A size that must be a bucket."
)
@click.option(
    "--objective",
    type=click.Choice(["padding", "seconds"]),
    default="padding",
    help="Minimise padded elements, or device seconds by --costs. [default: padding]",
)
@click.option(
    "--costs", metavar="COSTS.json", help="Measured cost table; without it an analytic one."
)
@click.option(
    "--variant-cost-s",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Device seconds of the first half that one more row shape must save; with `seconds`.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Device of today's default and of the analytic cost. [default: cpu]",
)
@click.option("--out", metavar="POLICY.yaml", help="Write the `policy` block of the proposal.")
@click.option(
    "--report",
    metavar="REPORT.html",
    help="Write charts and simulated latencies as one HTML file; takes up to half a minute more.",
)
@json_option
def tune_command(
    trace: str,
    shapes: int | None,
    max_length: int | None,
    axis: str | None,
    align: int,
    include: tuple[int, ...],
    objective: Objective,
    costs: str | None,
    variant_cost_s: float,
    device: Device,
    out: str | None,
    report: str | None,
    json_target: str | None,
) -> None:
    """Propose bucket sizes: fitted to the first half of a trace, judged on the second.

    \b
    Examples:
      shapeserve tune --trace trace.csv.gz
      shapeserve tune --trace trace.csv.gz -k 8 --max-length 512 --out policy.yaml
      shapeserve tune --trace trace.csv.gz --report report.html
      shapeserve tune --trace images.csv.gz -k 16 --align 8
      shapeserve tune --trace trace.csv.gz --objective seconds --costs costs.json --json -
    """
    if variant_cost_s and objective != "seconds":
        raise click.UsageError("--variant-cost-s is in seconds; use it with --objective seconds")
    if report is not None:
        require_plotly()
    traffic = _named(read_traffic(trace), axis)
    request = Request(
        shapes=shapes,
        max_length=max_length,
        align=align,
        include=include,
        objective=objective,
        cost=None if costs is None else CostTable.read(costs),
        device=device,
        variant_cost_s=variant_cost_s,
    )
    with progress_bar("fitting") as on_step:
        proposal = propose(traffic, request, on_step)
    if out is not None:
        _write_policy(proposal, out, trace)
    if report is not None:
        write_report(Path(trace).name, traffic, request, proposal, report)
    if json_target is not None:
        write_json(proposal.to_dict(), json_target)
    if json_target != "-":
        _print(Console(highlight=False), proposal, ordered=traffic.times_s is not None)


def _named(traffic: Traffic, axis: str | None) -> Traffic:
    if axis is None:
        return traffic
    if len(traffic.axes) != 1 or not axis.isidentifier() or axis in ("batch", "tokens"):
        raise click.UsageError(
            f"--axis {axis}: it names the row axis of a trace of one length, such as frames; this "
            f"trace has {', '.join(traffic.axes)}"
        )
    return traffic.renamed(axis)


def _write_policy(proposal: Proposal, path: str, trace: str) -> None:
    """Write the block after reading it back as the configuration does."""
    policy = proposal.policy()
    parse_policy(policy)
    ends = ", ".join(f"{axis} {end}" for axis, end in proposal.ends.items())
    head = (
        f"# models[].policy, made by `shapeserve tune` from {Path(trace).name} ({proposal.rows} "
        f"rows)\n# largest sizes: {ends}; limits.max_length, if it is set, must be the same\n"
    )
    text = head + yaml.safe_dump(policy, default_flow_style=None, sort_keys=False, width=96)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written: {error.strerror}; give another path"
        ) from error


def _print(console: Console, proposal: Proposal, *, ordered: bool) -> None:
    proposed = proposal.proposed
    halves = "halves by row order" if ordered else "a histogram has no order: halves at random"
    console.print(f"{proposal.rows} rows, {' x '.join(proposal.axes)}; {halves}")
    console.print(_table(proposal))
    for key, entries in proposed.buckets.items():
        console.print(f"{key}: {', '.join(map(_written, entries))}")
    console.print(
        f"as many row shapes, had the second half been known: {proposal.optimum_second_half:.1%}"
    )
    if proposal.curve:
        console.print(
            f"{proposed.shapes} row shapes: no larger number took away 0.5 % more for each further "
            "one, on rows within the first half that the fit had not seen"
        )
    if len(proposal.axes) == 2:
        console.print(f"two axes are searched: no better one saves more than {proposal.gap:.2%}")
    if proposal.guarded:
        console.print(
            f"{proposal.guarded:.1%} of rows would still be mostly padding and go to the fallback "
            "(rare_shapes.max_padding_waste 0.6 by default); more row shapes avoid it"
        )
    if proposal.cost_source:
        console.print(f"device-s: of the second half in full batches; {proposal.cost_source}")


def _written(entry: int | tuple[int, ...]) -> str:
    return "x".join(map(str, entry)) if isinstance(entry, tuple) else str(entry)


def _table(proposal: Proposal) -> Table:
    title = "padding / all elements along the axes of a row"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("policy")
    timed = ("device-s",) if proposal.cost_source else ()
    for name in ("row shapes", "first half", "second half", *timed):
        table.add_column(name, justify="right")
    named = {_NAMES[name]: scored for name, scored in proposal.compared.items()}
    for name, scored in {**named, "proposed": proposal.proposed}.items():
        table.add_row(
            name,
            str(scored.shapes),
            f"{scored.first_half:.1%}",
            f"{scored.second_half:.1%}",
            *([] if scored.device_s is None else [f"{scored.device_s:,.1f}"]),
        )
    return table
