"""``shapeserve simulate``: a trace against a configuration, on a virtual clock."""

from __future__ import annotations

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.buckets import TOKENS
from shapeserve.cli.common import (
    FiniteRange,
    check_apart,
    check_target,
    choose_model,
    json_option,
    progress_bar,
    write_json,
)
from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.policy import Device
from shapeserve.traces import read_traffic
from shapeserve.tuning import (
    ANALYTIC,
    ROUTINGS,
    CostTable,
    Outcome,
    Routing,
    Served,
    simulate,
)
from shapeserve.tuning.conditions import check_axes, check_conditions, conditions_of

_MOST_REPLICAS = 10_000  # each has a batcher of its own in memory; arbitrary
_MOST_BATCHES = 12  # buckets that the table shows, those with the most batches


@click.command("simulate")
@click.argument("config_path", metavar="CONFIG.yaml")
@click.option(
    "--trace",
    required=True,
    metavar="TRACE.csv.gz",
    help="Recorded arrivals, `t_s,len` or `t_s` and the model's axes; CSV or JSONL.",
)
@click.option("--model", "name", help="Name of the model, if the configuration has several.")
@click.option(
    "--replicas", type=click.IntRange(1, _MOST_REPLICAS), help="Replicas [default: serve.replicas]."
)
@click.option(
    "--routing",
    type=click.Choice(ROUTINGS),
    default="p2c",
    help="How a row finds its replica: at random, the better of two, or by shape. [default: p2c]",
)
@click.option(
    "--speed",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    help="Play the trace so many times as fast. [default: 1]",
)
@click.option(
    "--costs", metavar="COSTS.json", help="Measured cost table; without it an analytic one."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Device to simulate [default: the configured one, cpu for auto].",
)
@click.option("--seed", type=int, default=0, help="Of the random choices. [default: 0]")
@json_option
def simulate_command(
    config_path: str,
    trace: str,
    name: str | None,
    replicas: int | None,
    routing: Routing,
    speed: float,
    costs: str | None,
    device: Device | None,
    seed: int,
    json_target: str | None,
) -> None:
    """Serve a trace on a virtual clock, with the real batcher; loads no model.

    \b
    Examples:
      shapeserve simulate --trace trace.csv.gz service.yaml
      shapeserve simulate --trace trace.csv.gz service.yaml --replicas 100 --routing affinity
      shapeserve simulate --trace trace.csv.gz service.yaml --speed 20 --costs costs.json --json -
    """
    check_target("--json", json_target)
    check_apart(
        {"CONFIG.yaml": config_path, "--trace": trace, "--costs": costs}, {"--json": json_target}
    )
    config = ServeConfig.from_yaml(config_path)
    model = choose_model(config, name, "--model")
    kind: Device = device or ("cuda" if model.device == "cuda" else "cpu")
    served = _served(model, kind, costs)
    with progress_bar("simulating") as on_step:
        outcome = simulate(
            served,
            read_traffic(trace),
            replicas=replicas or config.serve.replicas,
            routing=routing,
            speed=speed,
            seed=seed,
            on_step=on_step,
        )
    about = {
        "model": served.spec.name,
        "device": kind,
        "cost": served.cost.source,
        "routing": routing,
    }
    if json_target is not None:
        write_json({**about, "speed": speed, **outcome.to_dict()}, json_target)
    if json_target != "-":
        console = Console(highlight=False)
        console.print(
            f"{served.spec.name} on {kind}, {len(served.grid)} buckets, {routing} routing"
        )
        console.print(_table(outcome))
        console.print(_batches(outcome))
        console.print(f"device time is {served.cost.source}; other time is not simulated")


def _served(model: ModelConfig, kind: Device, costs: str | None) -> Served:
    """Build what is simulated; measured costs must be of this very model, as it is configured."""
    if costs is None:
        return Served.from_config(model, kind, ANALYTIC[kind])
    table = CostTable.read(costs)
    min_batch = table.variants.min_batch if table.variants else None
    served = Served.from_config(model, kind, table, min_batch=min_batch)
    packed = TOKENS in served.grid.axes
    check_conditions(table, conditions_of(model, served.spec, kind, packed=packed), costs)
    check_axes(table, served.grid.axes)
    return served


def _table(outcome: Outcome) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    refused = ", ".join(f"{n} {why}" for why, n in outcome.refused.items()) or "none"
    fallbacks = ", ".join(f"{n} {why}" for why, n in outcome.fallbacks.items()) or "none"
    rows = {
        "rows": f"{outcome.rows:,}",
        "refused": refused,
        "rows in the fallback": fallbacks,
        "replicas": f"{outcome.replicas}",
        "span": f"{outcome.span_s:,.1f} s",
        "rows/s": f"{outcome.rows_per_s:,.1f}",
        "device time": f"{outcome.device_s:,.2f} s",
        "utilisation": f"{outcome.utilisation:.1%}",
        **{f"latency p{p}": f"{1e3 * outcome.latency_s(p):,.1f} ms" for p in (50, 90, 99)},
        **{kind: f"{share:.1%}" for kind, share in outcome.waste.items()},
        "all padding": f"{sum(outcome.waste.values()):.1%}",
        "most rows in a replica": f"{outcome.most_load:,}",
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def _batches(outcome: Outcome) -> Table:
    """The buckets that ran most often, and the rest in one line."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("bucket")
    table.add_column("batches", justify="right")
    most = sorted(outcome.batches.items(), key=lambda item: -item[1])
    for label, number in most[:_MOST_BATCHES]:
        table.add_row(label, f"{number:,}")
    if rest := most[_MOST_BATCHES:]:
        table.add_row(f"{len(rest)} others", f"{sum(number for _, number in rest):,}")
    return table
