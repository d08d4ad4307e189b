"""What a proposal must keep to: limits on its variants, a latency, the batches it is made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from shapeserve.cli.common import FiniteRange
from shapeserve.tuning import Limits
from shapeserve.tuning.limits import MIB

_AUTO = "auto"


class _BatchSizes(click.ParamType[Any]):
    """``1,4,16``, or ``auto``."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == _AUTO or isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        sizes = [int(part) for part in parts if part.isdecimal()]
        if len(sizes) != len(parts) or sizes != sorted({*sizes}) or sizes[0] < 1:
            self.fail(
                f"{value!r} is neither {_AUTO} nor ascending numbers of rows; write 1,4,16",
                param,
                ctx,
            )
        return tuple(sizes)


_OPTIONS = (
    click.option(
        "--max-variants",
        type=click.IntRange(min=1),
        help="Variants at most: row shapes times the batch sizes that fit.",
    ),
    click.option(
        "--max-graph-mb",
        type=FiniteRange(min=0, min_open=True),
        help="MiB that the CUDA graphs may take; needs --costs of `shapeserve profile`.",
    ),
    click.option(
        "--max-warmup-s",
        type=FiniteRange(min=0, min_open=True),
        help="Seconds that a start may take; needs --costs of `shapeserve profile`.",
    ),
    click.option(
        "--slo-ms",
        type=FiniteRange(min=0, min_open=True),
        help="With --objective p99: the fewest variants that keep it. Exit code 1 if none does.",
    ),
    click.option(
        "--speed",
        type=FiniteRange(min=0, min_open=True),
        default=1.0,
        help="Play a trace so many times as fast; with --objective p99, --layout packed or "
        "--horizon-s. [default: 1]",
    ),
    click.option(
        "--horizon-s",
        type=FiniteRange(min=0, min_open=True),
        help="Say which buckets earn a compile of their own within so many seconds; needs --costs "
        "of `shapeserve profile --specialized`.",
    ),
    click.option(
        "--layout",
        type=click.Choice(["padded", "packed"]),
        default="padded",
        help="Of the rows: packed ones get sizes along `tokens`. [default: padded]",
    ),
    click.option(
        "--batch",
        "batches",
        type=_BatchSizes(),
        metavar="LIST|auto",
        help="Sizes along `batch`, as 1,4,16; with --objective p99 auto chooses them. "
        "[default: those of the device]",
    ),
    click.option(
        "--max-batch-tokens",
        type=click.IntRange(min=1),
        default=8192,
        help="Padded elements of a batch, as limits.max_batch_tokens. [default: 8192]",
    ),
)


def bound_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what a proposal must keep to."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def bounds(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that these options are.

    Args:
        given: the values of all options of the command.
    """
    simulated = given["objective"] == "p99"
    if given["slo_ms"] is not None and not simulated:
        raise click.UsageError("--slo-ms is a bound on the latency; use it with --objective p99")
    if given["batches"] == _AUTO and not simulated:
        raise click.UsageError(
            "--batch auto chooses by latency; use it with --objective p99, or list the sizes"
        )
    played = simulated or given["layout"] == "packed" or given["horizon_s"] is not None
    if given["speed"] != 1 and not played:
        raise click.UsageError(
            "--speed matters only where the trace is played; use it with --objective p99, "
            "--layout packed or --horizon-s"
        )
    mib = given["max_graph_mb"]
    return {
        "limits": Limits(
            given["max_variants"], None if mib is None else mib * MIB, given["max_warmup_s"]
        ),
        "slo_s": None if given["slo_ms"] is None else given["slo_ms"] / 1e3,
        "speed": given["speed"],
        "horizon_s": given["horizon_s"],
        "layout": given["layout"],
        "batches": given["batches"],
        "max_batch_tokens": given["max_batch_tokens"],
    }
