"""The command line: ``shapeserve``, and a command for each thing that one may want to know or do.

Exit code 0: done. 1: it failed. 2: bad usage or input. Errors are one message on stderr.
"""

from __future__ import annotations

from typing import Any

import click

from shapeserve import __version__
from shapeserve.cli.config import config_command
from shapeserve.cli.evaluate import evaluate_command
from shapeserve.cli.explain import explain_command
from shapeserve.cli.plan import plan_command
from shapeserve.cli.profile import profile_command
from shapeserve.cli.serve import serve_command
from shapeserve.cli.simulate import simulate_command
from shapeserve.cli.tune import tune_command
from shapeserve.errors import ConfigError, ShapeServeError

__all__ = ["main"]


class _BadInput(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    """Turns the errors of this package into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShapeServeError as error:
            kind = _BadInput if isinstance(error, ConfigError) else click.ClickException
            raise kind(str(error)) from error


@click.group(
    cls=_Group,
    commands=[
        *(serve_command, config_command, plan_command, explain_command),
        *(evaluate_command, profile_command, tune_command, simulate_command),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="shapeserve")
def main() -> None:
    """Serve variable-length requests through a small set of warm, bucketed shapes.

    \b
    Examples:
      shapeserve plan --model ./all-MiniLM-L6-v2      what would be built, and why
      shapeserve explain --model ./all-MiniLM-L6-v2   does it compile as one graph
      shapeserve evaluate --model ./all-MiniLM-L6-v2  is it compiled, and is it worth it
      shapeserve profile --model ./all-MiniLM-L6-v2 --out costs.json    what a batch costs
      shapeserve serve --model ./all-MiniLM-L6-v2     serve it until Ctrl-C
      shapeserve config service.yaml                  every value, defaults included
      shapeserve tune --trace trace.csv.gz            bucket sizes for your traffic
      shapeserve simulate --trace trace.csv.gz service.yaml     what they will do
    """
