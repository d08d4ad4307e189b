"""``shapeserve profile``: what batches and variants of a model cost on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.cli.common import (
    check_apart,
    check_target,
    choose_model,
    config_argument,
    json_option,
    load_config,
    model_option,
    write_json,
)
from shapeserve.cli.warmup import WarmupDisplay
from shapeserve.traces import read_shapes
from shapeserve.tuning import CostPoint, CostTable
from shapeserve.tuning.variants import VariantCosts

_LEAST_POINTS = 4  # a fit of three factors, and something to judge it by


@click.command("profile")
@config_argument
@model_option
@click.option("--model-name", metavar="NAME", help="Which model, if the configuration has several.")
@click.option("--out", required=True, metavar="COSTS.json", help="Write the cost table.")
@click.option(
    "--points",
    type=click.IntRange(min=_LEAST_POINTS),
    default=16,
    show_default=True,
    help="Batches to measure at most, spread over the grid; a quarter of them only judges the fit.",
)
@click.option(
    "--specialized",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Also compile the N buckets that cost most for themselves: a compile each.",
)
@click.option(
    "--lengths",
    metavar="TRACE.csv.gz",
    help="Recorded rows, as for `plan`: with --specialized they say which buckets cost most.",
)
@json_option
def profile_command(
    config_path: str | None,
    model: str | None,
    model_name: str | None,
    out: str,
    points: int,
    specialized: int,
    lengths: str | None,
    json_target: str | None,
) -> None:
    """Measure what batches and variants cost, in the engine as it serves; for tune and simulate.

    Takes the time of a start from an empty compile cache, and about a second for each batch.

    \b
    Examples:
      shapeserve profile service.yaml --out costs.json
      shapeserve profile --model ./all-MiniLM-L6-v2 --out costs.json --points 24
      shapeserve profile service.yaml --out costs.json --specialized 3 --lengths trace.csv.gz
    """
    if lengths is not None and not specialized:
        raise click.UsageError("--lengths says which buckets to specialise; add --specialized N")
    check_target("--out", out)
    check_target("--json", json_target)
    check_apart(
        {"CONFIG.yaml": config_path, "--lengths": lengths}, {"--out": out, "--json": json_target}
    )
    config = choose_model(load_config(config_path, model), model_name, "--model-name")
    recorded = None if lengths is None else read_shapes(lengths)
    # Read when torch is loaded; its profiler says on stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from shapeserve.profile.session import Options, profile

    with WarmupDisplay(Console(stderr=True, highlight=False), "profiling") as display:
        table = profile(config, Options(points, specialized, recorded), display)
    table.write(out)
    if json_target is not None:
        write_json(table.to_dict(), json_target)
    if json_target != "-":
        _print(Console(highlight=False), table, out)


def _print(console: Console, table: CostTable, out: str) -> None:
    for key, value in sorted(table.conditions.items()):
        console.print(f"{key}: {value}", soft_wrap=True)
    console.print(_batches(table))
    formula = table.formula
    console.print(
        f"seconds = {formula.launch_s:.3g} + {formula.linear_s:.3g} x elements + "
        f"{formula.quadratic_s:.3g} x pairs that attend; off by {table.errors[0]:.1%} (median), "
        f"{table.errors[1]:.1%} (worst)",
        soft_wrap=True,
    )
    if table.held_out is not None:
        console.print(
            f"fitted without the {len(table.held_out.sizes)} held out, and corrected by the "
            f"nearest others, off by {table.held_out.median_error:.1%} (median), "
            f"{table.held_out.worst_error:.1%} (worst) there",
            soft_wrap=True,
        )
    if table.variants is not None:
        _print_variants(console, table.variants)
    console.print(f"written: {out} (fingerprint {table.fingerprint})")


def _batches(table: CostTable) -> Table:
    shown = Table(title="batches", title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("bucket", no_wrap=True)
    for name in ("ms", "formula ms", "off", "peak MiB", "held out"):
        shown.add_column(name, justify="right")
    unseen = set(table.held_out.sizes) if table.held_out else set()
    for point in sorted(table.points, key=lambda p: (p.sizes, p.pairs or 0.0)):
        fitted = table.fitted_s(point)
        shown.add_row(
            _label(point),
            f"{1e3 * point.seconds:.3f}",
            f"{1e3 * fitted:.3f}",
            f"{fitted / point.seconds - 1:+.1%}",
            "" if point.peak_bytes is None else f"{point.peak_bytes / 2**20:.1f}",
            "yes" if point.sizes in unseen else "",
        )
    return shown


def _label(point: CostPoint) -> str:
    name = ",".join(f"{axis}={size}" for axis, size in point.sizes)
    if point.pairs is None:
        return name
    (tokens,) = (size for _, size in point.sizes)
    return f"{name}, rows of {point.pairs / tokens:.0f}"


def _print_variants(console: Console, costs: VariantCosts) -> None:
    compiles = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in costs.compile_s.items())
    console.print(
        f"a start: {costs.fixed_s:.1f} s whatever the buckets are (of which "
        f"{compiles or 'nothing was compiled'})",
        soft_wrap=True,
    )
    console.print(f"  verified: {_each([p.verify_s for p in costs.points])}")
    captures = [p.capture_s for p in costs.points if p.capture_s is not None]
    if captures:
        console.print(f"  captured: {_each(captures)}")
    if costs.captured:
        grown = [(p.graph_bytes or 0) / 2**20 for p in costs.captured]
        console.print(
            f"  graph memory: {sum(grown):.1f} MiB, {grown[0]:.1f} of them for the largest bucket"
        )
    if costs.specialized:
        console.print(_specialized(costs))


def _each(seconds: Sequence[float]) -> str:
    whole = sum(seconds)
    return f"{len(seconds)} variants in {whole:.1f} s, {1e3 * whole / len(seconds):.1f} ms each"


def _specialized(costs: VariantCosts) -> Table:
    shown = Table(title="specialised", title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("bucket", no_wrap=True)
    for name in ("compile s", "shared ms", "specialised ms", "change"):
        shown.add_column(name, justify="right")
    for point in costs.specialized:
        shown.add_row(
            ",".join(f"{axis}={size}" for axis, size in point.sizes),
            f"{point.compile_s:.1f}",
            f"{1e3 * point.shared_s:.3f}",
            f"{1e3 * point.specialized_s:.3f}",
            f"{point.specialized_s / point.shared_s - 1:+.1%}",
        )
    return shown
