"""The command itself: traffic in, a proposal, what is to be done with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from shapeserve.cli.common import progress_bar
from shapeserve.cli.tune.apply import applier, apply_options, check_apply, print_applied
from shapeserve.cli.tune.bounds import bound_options
from shapeserve.cli.tune.fitting import fit_options, fit_request
from shapeserve.cli.tune.inputs import input_options, read_input
from shapeserve.cli.tune.output import check_outputs, output_options, write_outputs
from shapeserve.cli.tune.watch import check_no_watch, watch, watch_options
from shapeserve.tuning import propose


@click.command("tune")
@input_options
@fit_options
@bound_options
@output_options
@apply_options
@watch_options
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
      shapeserve tune --prometheus http://prometheus:9090 --range 7d --model all-MiniLM-L6-v2
      shapeserve tune --prometheus http://prometheus:9090 --max-length 256 --apply http://ray-head:8265
      shapeserve tune --prometheus http://prometheus:9090 --model encoder --max-length 256 --watch
    """
    check_apply(given)
    check_outputs(given)
    if given["watch"]:
        watch(given)
    else:
        check_no_watch(click.get_current_context())
        _once(given)


def _once(given: Mapping[str, Any]) -> None:
    request = fit_request(given)
    read = read_input(given)
    with progress_bar("fitting") as on_step:
        proposal = propose(read.traffic, request, on_step)
    write_outputs(given, read, request, proposal)
    apply = applier(given)
    if apply is not None:
        print_applied(apply(read.model, proposal.policy()), given["json_target"])
