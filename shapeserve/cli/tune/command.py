"""The command itself: traffic in, a proposal, what is to be done with it."""

from __future__ import annotations

from typing import Any

import click

from shapeserve.cli.common import progress_bar
from shapeserve.cli.tune.bounds import bound_options
from shapeserve.cli.tune.fitting import fit_options, fit_request
from shapeserve.cli.tune.inputs import input_options, read_input
from shapeserve.cli.tune.output import check_outputs, output_options, write_outputs
from shapeserve.tuning import propose


@click.command("tune")
@input_options
@fit_options
@bound_options
@output_options
def tune_command(**given: Any) -> None:
    """Propose bucket sizes: fitted to the first half of a trace, judged on the second.

    \b
    Examples:
      shapeserve tune --trace trace.csv.gz
      shapeserve tune --trace trace.csv.gz -k 8 --max-length 512 --out policy.yaml
      shapeserve tune --trace trace.csv.gz --report report.html
      shapeserve tune --trace images.csv.gz -k 16 --align 8
      shapeserve tune --trace trace.csv.gz --objective seconds --costs costs.json --json -
      shapeserve tune --trace trace.csv.gz --costs costs.json --max-variants 48 --max-warmup-s 60
      shapeserve tune --trace trace.csv.gz --objective p99 --slo-ms 50 --speed 20
      shapeserve tune --trace trace.csv.gz --layout packed --device cuda --speed 500
    """
    check_outputs(given)
    request = fit_request(given)
    read = read_input(given)
    with progress_bar("fitting") as on_step:
        proposal = propose(read.traffic, request, on_step)
    write_outputs(given, read, request, proposal)
