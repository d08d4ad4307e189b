"""``shapeserve plan``: what a configuration will build, and what padding it will cost."""

from __future__ import annotations

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.buckets import BATCH, TOKENS, Grid, RowKey
from shapeserve.cli.common import (
    check_apart,
    check_target,
    config_argument,
    json_option,
    load_config,
    model_option,
    write_json,
)
from shapeserve.config import ModelConfig
from shapeserve.expect import Expectation
from shapeserve.plan import Plan, plan
from shapeserve.policy import Device
from shapeserve.traces import read_shapes

_PER_LINE = 10  # sizes of packed buckets on a line


@click.command("plan")
@config_argument
@model_option
@click.option(
    "--lengths",
    metavar="TRACE.csv.gz",
    help="Recorded rows, `t_s,len`, `t_s,height,width` or `tokens,count`: adds the expected "
    "padding waste.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Plan for this device instead of the configured one; it need not be here.",
)
@json_option
def plan_command(
    config_path: str | None,
    model: str | None,
    lengths: str | None,
    device: Device | None,
    json_target: str | None,
) -> None:
    """Print the grid, the variants and the expected padding; loads no model.

    \b
    Examples:
      shapeserve plan service.yaml
      shapeserve plan --model ./all-MiniLM-L6-v2 --lengths trace.csv.gz
      shapeserve plan service.yaml --device cuda --json plan.json
    """
    check_target("--json", json_target)
    check_apart({"CONFIG.yaml": config_path, "--lengths": lengths}, {"--json": json_target})
    config = load_config(config_path, model)
    recorded = None if lengths is None else read_shapes(lengths)
    plans = [plan(m, device or _device(m), recorded) for m in config.models]
    if json_target is not None:
        write_json({"models": [p.to_dict() for p in plans]}, json_target)
    if json_target != "-":
        console = Console(highlight=False)
        for planned in plans:
            _print(console, planned)


def _device(model: ModelConfig) -> Device:
    if model.device != "auto":
        return model.device
    # Only torch knows, and it takes seconds to import: nothing else here needs it.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print(console: Console, planned: Plan) -> None:
    axes = " x ".join(planned.grid.axes)
    console.print(f"{planned.model} on {planned.device}: {len(planned.grid)} buckets ({axes})")
    console.print(_grid_table(planned.grid, planned.expected))
    console.print(f"grid {planned.grid.version}")
    console.print(f"variants: {len(planned.grid)} at tier {planned.tier}; {planned.programs}.")
    if planned.graph_bytes is not None:
        console.print(f"graph memory: about {planned.graph_bytes / 2**20:.0f} MiB expected")
    console.print(f"why: {planned.why}")
    if planned.expected is not None:
        console.print(_waste_table(planned.expected))
        _print_outcomes(console, planned.grid, planned.expected)


def _grid_table(grid: Grid, expected: Expectation | None) -> Table:
    """One line per row shape; a cell is the area of a bucket, empty where there is none."""
    if BATCH not in grid.axes:
        return _packed_table(grid)
    batches = sorted({bucket.as_dict().get(BATCH, 1) for bucket in grid.buckets})
    table = Table(title="padded elements per bucket", title_justify="left", box=SIMPLE_HEAD)
    table.add_column(f"{' x '.join(grid.row_axes)} \\ batch", justify="right")
    for batch in batches:
        table.add_column(str(batch), justify="right")
    if expected is not None:
        table.add_column("rows", justify="right")
    for row in sorted({bucket.without(BATCH) for bucket in grid.buckets}, key=_sizes):
        there = grid.batch_sizes(row)
        cells = [str(grid.bucket(b, row).area) if b in there else "" for b in batches]
        if expected is not None:
            rows = expected.by_size.get(_sizes(row))
            cells.append("" if rows is None else f"{rows / expected.rows:.1%}")
        table.add_row(" x ".join(map(str, _sizes(row))), *cells)
    return table


def _packed_table(grid: Grid) -> Table:
    table = Table(
        title="tokens per bucket", title_justify="left", box=SIMPLE_HEAD, show_header=False
    )
    sizes = [str(bucket.area) for bucket in grid.buckets]
    for start in range(0, len(sizes), _PER_LINE):
        table.add_row(*sizes[start : start + _PER_LINE])
    return table


def _sizes(row: RowKey) -> tuple[int, ...]:
    return tuple(size for _, size in row)


def _waste_table(expected: Expectation) -> Table:
    title = f"expected for {expected.rows} rows"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("policy")
    for axis in expected.axes:
        table.add_column(f"padding_{axis}", justify="right")
    for name, waste in {"this grid": expected.waste, **expected.compared}.items():
        table.add_row(name, *(f"{waste.share(axis):.1%}" for axis in expected.axes))
    return table


def _print_outcomes(console: Console, grid: Grid, expected: Expectation) -> None:
    for outcome, rows in sorted(expected.outcomes.items(), key=lambda item: -item[1]):
        console.print(f"{outcome}: {rows} rows ({rows / expected.rows:.1%})")
    console.print(
        f"padding_{BATCH if BATCH in grid.axes else TOKENS}: not predicted; it depends on which "
        "rows arrive together "
        "(shapeserve_tokens_total counts it)."
    )
