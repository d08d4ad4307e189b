"""Keep an eye on the traffic, and tune again when it has changed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from shapeserve.cli.common import FiniteRange
from shapeserve.cli.fetch import check_address
from shapeserve.cli.tune.apply import applier
from shapeserve.cli.tune.fitting import fit_request
from shapeserve.cli.tune.inputs import Input, read_input
from shapeserve.cli.tune.output import write_files
from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic
from shapeserve.tuning import (
    WORDS,
    Decision,
    Proposal,
    Watcher,
    WatchRules,
    duration_s,
    propose,
)

_DEFAULTS = WatchRules()
_LEAST_INTERVAL_S = 1.0  # Prometheus has other things to do; arbitrary
_OPTIONS = (
    click.option(
        "--watch",
        is_flag=True,
        help="Go on: look at the traffic every --interval, and tune again when it has changed. A "
        "JSON line each time; rolls nothing out without --yes.",
    ),
    click.option("--yes", is_flag=True, help="With --watch: roll new policies out, unasked."),
    click.option(
        "--interval", metavar="DURATION", default="15m", help="Between two looks. [default: 15m]"
    ),
    click.option(
        "--drift",
        type=FiniteRange(min=0, min_open=True),
        default=_DEFAULTS.drift,
        help="Octaves that lengths must have moved on average, at two looks in a row. "
        f"[default: {_DEFAULTS.drift}]",
    ),
    click.option(
        "--min-saving",
        type=FiniteRange(min=0, max=1),
        default=_DEFAULTS.min_saving,
        help="Padding that a new policy must save to be rolled out, as a share of all elements. "
        f"[default: {_DEFAULTS.min_saving}]",
    ),
    click.option(
        "--min-apply-interval",
        metavar="DURATION",
        default="1h",
        help="Least time between two rollouts. [default: 1h]",
    ),
    click.option(
        "--metrics-port",
        type=click.IntRange(1, 65_535),
        help="Serve the tuner's own metrics there, on all interfaces.",
    ),
)


def watch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a tuner that goes on."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_no_watch(context: click.Context) -> None:
    """Refuse options that only a tuner that goes on has a use for.

    Raises:
        click.UsageError: one is given.
    """
    for option in ("yes", "interval", "drift", "min_saving", "min_apply_interval", "metrics_port"):
        if context.get_parameter_source(option) is not ParameterSource.DEFAULT:
            shown = "--" + option.replace("_", "-")
            raise click.UsageError(f"{shown} is for --watch; leave it out, or add --watch")


class TunerMetrics:
    """Counts what was decided. Names as in ``docs/tuning.md``."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "shapeserve_tuner_decisions_total",
            "Looks at the traffic, by what they led to.",
            ("model", "decision"),
            registry=self.registry,
        )
        self._drift = Gauge(
            "shapeserve_tuner_drift",
            "Octaves between the lengths now and those of the last tuning.",
            ("model",),
            registry=self.registry,
        )
        self._model = model
        for word in WORDS:
            self._decisions.labels(model, word)
        self._drift.labels(model)

    def count(self, decision: Decision) -> None:
        """Count one look."""
        self._decisions.labels(self._model, decision.decision).inc()
        if decision.drift is not None:
            self._drift.labels(self._model).set(decision.drift)


def watch(
    given: Mapping[str, Any],
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Look until interrupted.

    Args:
        given: the values of all options of the command.
        sleep: waits; tests do not.
        now: monotonic clock.
    """
    _check(given)
    interval_s = duration_s("--interval", given["interval"])
    rules = WatchRules(
        drift=given["drift"],
        min_saving=given["min_saving"],
        min_apply_s=duration_s("--min-apply-interval", given["min_apply_interval"]),
    )
    session = _Session(given)
    metrics = TunerMetrics(given["model"])
    if given["metrics_port"] is not None:
        _serve(metrics, given["metrics_port"])
    watcher = Watcher(rules, session.read, session.propose, session.apply, now)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            decision = watcher.look()
            metrics.count(decision)
            line = {"unix_s": round(time.time(), 3), "model": given["model"], **asdict(decision)}
            click.echo(json.dumps(line))
            if decision.decision in ("proposed", "applied"):
                session.write()
            sleep(interval_s)


class _Session:
    """What the options of the command mean, look after look."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._request = fit_request(given)
        self._read: Input
        self._proposal: Proposal
        rolled_out = applier(given) if given["yes"] else None
        self.apply: Callable[[dict[str, Any]], str] | None = (
            None
            if rolled_out is None
            else lambda policy: rolled_out(given["model"], policy).message
        )

    def read(self) -> Traffic:
        self._read = read_input(self._given)
        return self._read.traffic

    def propose(self, traffic: Traffic) -> Proposal:
        self._proposal = propose(traffic, self._request)
        return self._proposal

    def write(self) -> None:
        """Write the files that were asked for, of the last proposal."""
        write_files(self._given, self._read, self._request, self._proposal)


def _check(given: Mapping[str, Any]) -> None:
    for option, why in (
        ("prometheus", "a trace does not change"),
        ("model", "it must be clear whose traffic and policy are meant"),
        ("max_length", "the policy must end where the model does, whatever comes in an hour"),
    ):
        if given[option] is None:
            raise click.UsageError(f"--watch needs --{option.replace('_', '-')}: {why}")
    check_address("--prometheus", given["prometheus"])
    duration_s("--range", given["range_"] or "24h")
    if duration_s("--interval", given["interval"]) < _LEAST_INTERVAL_S:
        raise click.UsageError(
            f"--interval {given['interval']}: at least {_LEAST_INTERVAL_S:g}s are needed between "
            "two looks"
        )
    if given["json_target"] is not None:
        raise click.UsageError("--watch prints a JSON line a look already; leave --json out")
    if given["yes"] and not (given["apply"] or given["apply_admin"]):
        raise click.UsageError("--yes allows to roll out; say where with --apply or --apply-admin")


def _serve(metrics: TunerMetrics, port: int) -> None:
    try:
        start_http_server(port, registry=metrics.registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port {port}: cannot be used ({error.strerror}); stop what listens there or "
            "choose another"
        ) from error
