"""Where ``tune`` gets traffic from: a recorded trace, or the histogram in a Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shapeserve.cli.fetch import check_address, fetch_json
from shapeserve.traces import Traffic, read_traffic
from shapeserve.tuning import Lengths, read_lengths

_OPTIONS = (
    click.option(
        "--trace",
        metavar="TRACE.csv.gz",
        help="Recorded traffic: `t_s,len`, `t_s,height,width` or `tokens,count`; CSV or JSONL; "
        "or a directory of traces.",
    ),
    click.option(
        "--prometheus",
        metavar="URL",
        help="Read the lengths of the last --range from a Prometheus that scrapes the service.",
    ),
    click.option(
        "--range", "range_", metavar="DURATION", help="How far back, for Prometheus. [default: 24h]"
    ),
    click.option(
        "--prometheus-form",
        type=click.Choice(["direct", "ray"]),
        help="Names as the service's /metrics has them, or as Ray's nodes do (ray_shapeserve_...). "
        "[default: those that are there]",
    ),
    click.option("--model", metavar="NAME", help="Whose lengths, and whose policy is applied."),
    click.option(
        "--axis", help="Name of the model's axis for a trace of one length [default: seq]."
    ),
)


@dataclass(frozen=True, slots=True)
class Input:
    """Traffic, and where it is from.

    Attributes:
        traffic: rows or a histogram.
        source: what the written policy says it was made from.
        model: whose traffic it is; None if nothing says.
        note: what the source does not know, for whoever reads the result.
    """

    traffic: Traffic
    source: str
    model: str | None = None
    note: str = ""


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where traffic comes from."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_input(given: Mapping[str, Any]) -> Input:
    """Read the traffic that the options name.

    Args:
        given: the values of all options of the command.
    """
    trace, prometheus = given["trace"], given["prometheus"]
    if (trace is None) == (prometheus is None):
        raise click.UsageError(
            "give either --trace FILE (or a directory) or --prometheus URL: what to tune to"
        )
    if prometheus is not None:
        return _from_prometheus(given)
    for option in ("range_", "prometheus_form"):
        if given[option] is not None:
            shown = "--" + option.rstrip("_").replace("_", "-")
            raise click.UsageError(f"{shown} is for --prometheus; leave it out with --trace")
    if given["model"] is not None and not (given["apply"] or given["apply_admin"]):
        raise click.UsageError(
            "--model with --trace says whose policy is applied; add --apply or --apply-admin, or "
            "leave it out"
        )
    traffic = _named(read_traffic(trace), given["axis"])
    return Input(traffic, Path(trace).name, given["model"])


def _from_prometheus(given: Mapping[str, Any]) -> Input:
    if given["axis"] is not None:
        raise click.UsageError("--axis is for --trace; what Prometheus has names its axis")
    address = check_address("--prometheus", given["prometheus"])

    def ask(query: str) -> Any:
        return fetch_json("--prometheus", f"{address}/api/v1/query", query={"query": query})[1]

    range_ = given["range_"] or "24h"
    read = read_lengths(ask, range_, given["model"], given["prometheus_form"])
    return Input(read.traffic, f"Prometheus, {read.model}, last {range_}", read.model, _note(read))


def _note(read: Lengths) -> str:
    (longest,) = read.traffic.longest.values()
    note = (
        f"lengths are known to the edges of the histogram and spread evenly between them: a row is "
        f"up to {read.resolution:.0%} off"
    )
    if read.beyond:
        note += f"; {read.beyond} rows above {longest} are taken as {longest}"
    return note


def _named(traffic: Traffic, axis: str | None) -> Traffic:
    if axis is None:
        return traffic
    if len(traffic.axes) != 1 or not axis.isidentifier() or axis in ("batch", "tokens"):
        raise click.UsageError(
            f"--axis {axis}: it names the row axis of a trace of one length, such as frames; this "
            f"trace has {', '.join(traffic.axes)}"
        )
    return traffic.renamed(axis)
