"""Roll the proposed policy out to a service that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console

from shapeserve.cli.fetch import as_path, check_address, fetch_json, fetch_text
from shapeserve.errors import ConfigError, RolloutFailed
from shapeserve.serve.admin import TOKEN_VARIABLE

# A swap warms the new grid: seconds on a CPU, minutes for hundreds of captures. Arbitrary.
SWAP_TIMEOUT_S = 660.0

_OPTIONS = (
    click.option(
        "--apply",
        metavar="DASHBOARD_URL",
        help="Deploy the policy through the dashboard of the Ray cluster that serves: in place, "
        "and for replicas to come.",
    ),
    click.option(
        "--apply-admin",
        metavar="SERVICE_URL",
        help=f"Give the policy to the replicas that live now; {TOKEN_VARIABLE} has the token.",
    ),
)


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a policy that was rolled out.

    Attributes:
        model: whose.
        grids: replica -> version of the grid that serves now; empty if that cannot be seen.
        message: the same for people.
    """

    model: str
    grids: Mapping[str, str]
    message: str


def apply_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that roll a policy out."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_apply(given: Mapping[str, Any]) -> None:
    """Refuse before anything is fitted what could not be applied afterwards.

    Raises:
        ConfigError: an address is none, or there is no token.
        click.UsageError: both ways are given.
    """
    if given["apply"] and given["apply_admin"]:
        raise click.UsageError("--apply and --apply-admin: give one of them")
    for option in ("apply", "apply_admin"):
        if given[option]:
            check_address("--" + option.replace("_", "-"), given[option])
    if given["apply_admin"]:
        _token()


def applier(given: Mapping[str, Any]) -> Callable[[str | None, dict[str, Any]], Applied] | None:
    """Return what rolls a model's policy out in the way that was asked for; None if in none."""
    if given["apply"]:
        return lambda model, policy: _deploy(given["apply"], model, policy)
    if given["apply_admin"]:
        return lambda model, policy: _put(given["apply_admin"], model, policy)
    return None


def print_applied(applied: Applied, json_target: str | None) -> None:
    """Say what became of it; on stderr where stdout is JSON."""
    console = Console(highlight=False, stderr=json_target == "-", soft_wrap=True)
    console.print(applied.message)


def _deploy(address: str, model: str | None, policy: dict[str, Any]) -> Applied:
    from shapeserve.serve.dashboard import Dashboard  # loads Ray
    from shapeserve.serve.rollout import roll_out

    done = roll_out(
        Dashboard(check_address("--apply", address)),
        model,
        policy,
        read_metrics=fetch_text,
    )
    return Applied(done.model, done.grids, _said(done.app, done.model, done))


def _said(app: str, model: str, done: Any) -> str:
    if not done.changed:
        return f"{model}: this policy is deployed to {app} already; nothing was done"
    if not done.grids:
        return (
            f"{model}: deployed to {app}, and Serve says it is healthy; the service itself cannot "
            "be reached from here, so whether the replicas took the policy is in its "
            "shapeserve_policy_swaps_total"
        )
    kept = "replicas came or went meanwhile" if done.restarted else "no replica was restarted"
    return f"{model}: deployed to {app}; {_served(done.grids)}; {kept}"


def _served(grids: Mapping[str, str]) -> str:
    versions = sorted(set(grids.values()))
    replicas = "1 replica serves" if len(grids) == 1 else f"{len(grids)} replicas serve"
    return f"{replicas} grid {', '.join(versions)}"


def _put(address: str, model: str | None, policy: dict[str, Any]) -> Applied:
    address = check_address("--apply-admin", address)
    name = model or _only_model(address)
    url = f"{address}/v2/models/{as_path(name)}/policy"
    headers = {"authorization": f"Bearer {_token()}"}
    status, answer = fetch_json(
        "--apply-admin", url, put=policy, headers=headers, timeout_s=SWAP_TIMEOUT_S
    )
    if status in (404, 405):  # without the token, the path is one of a model
        raise ConfigError(
            f"--apply-admin: {url} is not there: {answer.get('error')} Check the model's name, "
            f"that the service was started with {TOKEN_VARIABLE}, and that this is its token"
        )
    if status != 200:
        raise RolloutFailed(f"{name}: the service answered {status}: {answer.get('error')}")
    grids = {state["replica"]: state["grid"] for state in answer["replicas"]}
    return Applied(name, grids, f"{name}: {_served(grids)}; it lasts {answer['lasts']}")


def _only_model(address: str) -> str:
    _, answer = fetch_json("--apply-admin", f"{address}/v1/models")
    data = answer.get("data", []) if isinstance(answer, dict) else []
    names = [model["id"] for model in data]
    if len(names) != 1:
        raise ConfigError(
            f"--model is not given, and {address} serves {', '.join(names) or 'none'}; give one"
        )
    return str(names[0])


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise ConfigError(
            f"--apply-admin: {TOKEN_VARIABLE} is not set; set it to the token that the service was "
            "started with"
        )
    return token
