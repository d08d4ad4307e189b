"""``shapeserve evaluate``: is the model really compiled, and was it worth it."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.cli.common import (
    check_target,
    config_argument,
    json_option,
    load_config,
    model_option,
    write_json,
)
from shapeserve.cli.warmup import WarmupDisplay
from shapeserve.page import require_plotly
from shapeserve.traces import read_shapes

if TYPE_CHECKING:  # they import torch, which takes seconds
    from shapeserve.evaluate.account import Account
    from shapeserve.evaluate.result import Evaluation, Row


_WIDTH = 120


@click.command("evaluate")
@config_argument
@model_option
@click.option(
    "--grid",
    default="sampled",
    show_default=True,
    metavar="sampled|all|LIST",
    help="Buckets to measure. Each costs a compile of its own; LIST is sizes in the order of the "
    "grid's axes: 1x16,8x128.",
)
@click.option(
    "--lengths",
    metavar="TRACE.csv.gz",
    help="Recorded rows, as for `plan`: weighs the buckets, and adds what padding costs.",
)
@click.option("--report", metavar="PATH", help="Write a report with charts as one HTML file.")
@json_option
def evaluate_command(
    config_path: str | None,
    model: str | None,
    grid: str,
    lengths: str | None,
    report: str | None,
    json_target: str | None,
) -> None:
    """Measure a model eager, compiled, captured and specialised, and what compiling is worth.

    Takes minutes: it compiles from an empty cache, once as the service does and once for each
    measured bucket. Exit code 1: a measurement failed; the others are reported.

    \b
    Examples:
      shapeserve evaluate service.yaml
      shapeserve evaluate --model ./all-MiniLM-L6-v2 --grid 1x16,8x128 --report report.html
      shapeserve evaluate service.yaml --lengths trace.csv.gz --json result.json
    """
    check_target("--json", json_target)
    check_target("--report", report)
    config = load_config(config_path, model)
    recorded = None if lengths is None else read_shapes(lengths)
    # Read when torch is loaded; its profiler says on stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from shapeserve.evaluate.account import account
    from shapeserve.evaluate.report import write_report
    from shapeserve.evaluate.session import Options, evaluate

    if report is not None:
        require_plotly()
    options = Options(grid, recorded)
    found = []
    for model_config in config.models:
        with (
            WarmupDisplay(Console(stderr=True, highlight=False), "evaluating") as display,
            contextlib.redirect_stdout(sys.stderr),  # what the model prints is no result
        ):
            found.append(evaluate(model_config, options, display))
    accounts = [account(evaluation) for evaluation in found]
    pairs = [*zip(found, accounts, strict=True)]
    if json_target is not None:
        data = [{**e.to_dict(), "amortization": a.to_dict()} for e, a in pairs]
        write_json({"models": data}, json_target)
    if report is not None:
        write_report(pairs, report)
    if json_target != "-":
        console = Console(highlight=False)
        if not console.is_terminal:  # 80 columns there, and the tables need more
            console = Console(highlight=False, width=_WIDTH)
        for evaluation, sums in pairs:
            _print(console, evaluation, sums)
    failed = [row for evaluation in found for row in evaluation.errors]
    if failed:
        raise click.ClickException(
            f"{len(failed)} measurements failed: " + "; ".join(map(_failure, failed))
        )


def _failure(row: Row) -> str:
    return f"{row.bucket} {row.arm} {row.scope}: {row.error}"


def _print(console: Console, found: Evaluation, sums: Account) -> None:
    where = found.environment
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    console.print(
        f"{found.model} ({where.dtype}) on {where.device}, {where.threads} threads; {versions}"
    )
    console.print(f"{len(found.buckets)} of {found.grid_buckets} buckets measured")
    console.print(f"ready after {found.start.seconds:.1f} s: {_programs(found)}", soft_wrap=True)
    console.print(_latency_table(found))
    console.print(_check_table(found))
    from shapeserve.evaluate.words import sentences

    for line in sentences(found, sums):
        console.print(line, soft_wrap=True)


def _programs(found: Evaluation) -> str:
    parts = [
        f"{name} {cost.seconds:.1f} s ({cost.graphs} graphs, {cost.graph_breaks} graph breaks)"
        for name, cost in found.start.programs.items()
    ]
    once = f"{found.start.once_s:.1f} s before that to load torch's compiler"
    return ", ".join([*parts, once]) if parts else "nothing was compiled"


def _latency_table(found: Evaluation) -> Table:
    table = Table(title="latency", title_justify="left", box=SIMPLE_HEAD)
    for name in ("bucket", "scope", "run"):
        table.add_column(name, no_wrap=True)
    for name in ("first call s", "median ms", "p99 ms", "calls", "recompiles"):
        table.add_column(name, justify="right")
    for row in found.rows:
        head = (row.bucket, row.scope.value, row.arm.value)
        if row.latency is None:
            table.add_row(*head, row.error or row.note or "")
            continue
        took = row.latency
        table.add_row(
            *head,
            f"{took.first.seconds:.3g}",
            f"{took.median_s * 1e3:.3f}",
            f"{took.p99_s * 1e3:.3f}",
            str(len(took.later_s)),
            "" if row.recompiles is None else str(row.recompiles),
        )
    return table


def _check_table(found: Evaluation) -> Table:
    """What is behind the numbers: answers, kernels, gaps, memory."""
    table = Table(title="module", title_justify="left", box=SIMPLE_HEAD)
    for name in ("bucket", "run"):
        table.add_column(name, no_wrap=True)
    for name in ("error", "kernels", "generated", "busy ms", "between ms", "peak MiB", "cache"):
        table.add_column(name, justify="right")
    for row in found.rows:
        if row.kernels is None:
            continue
        seen, cost = row.kernels, row.compile
        cache = (cost.cache_hits, cost.cache_misses, cost.cache_bypasses) if cost else ()
        table.add_row(
            row.bucket,
            row.arm.value,
            f"{row.numerics.error:.1e}" if row.numerics else "",
            str(seen.kernels),
            str(sum(seen.generated.values())),
            f"{seen.busy_s * 1e3:.3f}",
            f"{seen.gap_s * 1e3:.3f}",
            "" if seen.peak_bytes is None else f"{seen.peak_bytes / 2**20:.1f}",
            "/".join(map(str, cache)),
        )
    table.caption = "cache: graphs found, not found, not asked for"
    return table
