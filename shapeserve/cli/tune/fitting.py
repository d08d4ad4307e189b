"""What is asked of the proposal: its size, its bounds, its objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from shapeserve.cli.common import FiniteRange
from shapeserve.cli.tune.bounds import bounds
from shapeserve.policy import MAX_AXIS_SIZES, Device
from shapeserve.tuning import CostTable, Request
from shapeserve.tuning.conditions import KIND, check_conditions
from shapeserve.tuning.request import MAX_LENGTH

_OPTIONS = (
    click.option(
        "-k",
        "shapes",
        type=click.IntRange(1, MAX_AXIS_SIZES),
        help="Row shapes at most; left out, the number after which more stop paying.",
    ),
    click.option(
        "--max-length",
        type=click.IntRange(1, MAX_LENGTH),
        help="Longer rows are cut to it; it is the last bucket. Left out: the longest row.",
    ),
    click.option(
        "--align",
        type=click.IntRange(1, MAX_LENGTH),
        default=1,
        help="Sizes are multiples of it. [default: 1]",
    ),
    click.option(
        "--include",
        type=click.IntRange(1, MAX_LENGTH),
        multiple=True,
        help="A size that must be a bucket.",
    ),
    click.option(
        "--objective",
        type=click.Choice(["padding", "seconds", "p99"]),
        default="padding",
        help="Minimise padded elements, device seconds by --costs, or the simulated 99th "
        "percentile of the latency. [default: padding]",
    ),
    click.option(
        "--costs", metavar="COSTS.json", help="Measured cost table; without it an analytic one."
    ),
    click.option(
        "--variant-cost-s",
        type=FiniteRange(min=0),
        default=0.0,
        help="Device seconds of the first half that one more row shape must save; with `seconds`.",
    ),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        help="Device of today's default and of the analytic cost. [default: that of --costs, else "
        "cpu]",
    ),
)


def fit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what is asked for."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fit_request(given: Mapping[str, Any]) -> Request:
    """Return what is asked for.

    Args:
        given: the values of all options of the command.
    """
    if given["variant_cost_s"] and given["objective"] != "seconds":
        raise click.UsageError("--variant-cost-s is in seconds; use it with --objective seconds")
    costs, device = _costs(given)
    return Request(
        shapes=given["shapes"],
        max_length=given["max_length"],
        align=given["align"],
        include=given["include"],
        objective=given["objective"],
        cost=costs,
        device=device,
        variant_cost_s=given["variant_cost_s"],
        **bounds(given),
    )


def _costs(given: Mapping[str, Any]) -> tuple[CostTable | None, Device]:
    """Return the measured costs, and the device: theirs, or the one that is asked for."""
    path, device = given["costs"], given["device"]
    if path is None:
        return None, device or "cpu"
    costs = CostTable.read(path)
    if device is not None:
        check_conditions(costs, {KIND: device, "layout": given["layout"]}, path)
        return costs, device
    return costs, "cuda" if costs.conditions.get(KIND) == "cuda" else "cpu"
