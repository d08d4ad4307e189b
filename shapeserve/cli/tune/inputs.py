"""Where ``tune`` gets traffic from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shapeserve.traces import Traffic, read_traffic


@dataclass(frozen=True, slots=True)
class Input:
    """Traffic, and where it is from.

    Attributes:
        traffic: rows or a histogram.
        source: what the written policy says it was made from.
    """

    traffic: Traffic
    source: str


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where traffic comes from."""
    trace = click.option(
        "--trace",
        required=True,
        metavar="TRACE.csv.gz",
        help="Recorded traffic: `t_s,len`, `t_s,height,width` or `tokens,count`; CSV or JSONL.",
    )
    axis = click.option(
        "--axis", help="Name of the model's axis for a trace of one length [default: seq]."
    )
    return trace(axis(command))


def read_input(given: Mapping[str, Any]) -> Input:
    """Read the traffic that the options name.

    Args:
        given: the values of all options of the command.
    """
    trace: str = given["trace"]
    return Input(_named(read_traffic(trace), given["axis"]), Path(trace).name)


def _named(traffic: Traffic, axis: str | None) -> Traffic:
    if axis is None:
        return traffic
    if len(traffic.axes) != 1 or not axis.isidentifier() or axis in ("batch", "tokens"):
        raise click.UsageError(
            f"--axis {axis}: it names the row axis of a trace of one length, such as frames; this "
            f"trace has {', '.join(traffic.axes)}"
        )
    return traffic.renamed(axis)
