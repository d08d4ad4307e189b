"""Deploys a policy on a Ray cluster, and sees what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from shapeserve.errors import RolloutFailed
from shapeserve.metrics import SwapResult
from shapeserve.serve.deployed import Change, change
from shapeserve.serve.names import DEPLOYMENT

# A swap warms the new grid: seconds on a CPU, minutes for hundreds of captures. Arbitrary.
ROLLOUT_S = 600.0
POLL_S = 1.0
ReadMetrics = Callable[[str], "str | None"]
"""Address of a service -> the text of its ``/metrics``; None if it cannot be reached from here."""


class Cluster(Protocol):
    """The REST API of Ray's dashboard."""

    def details(self) -> dict[str, Any]:
        """Return what runs, and the configurations that were deployed."""

    def deploy(self, schema: Mapping[str, Any]) -> None:
        """Deploy all applications of a configuration, and end those that it leaves out."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a replica has done so far.

    Attributes:
        grid: version that serves.
        swaps: result -> policies that ended so.
    """

    grid: str
    swaps: Mapping[str, int]

    @property
    def total(self) -> int:
        """Policies that it was given."""
        return sum(self.swaps.values())


@dataclass(frozen=True, slots=True)
class Rollout:
    """What became of it.

    Attributes:
        app: the application that was changed.
        model: whose policy.
        changed: False if it was deployed already, so that nothing was.
        grids: replica -> version of the grid that it serves; empty if the service cannot be
            reached from here, and only Serve's word is known.
        restarted: whether replicas have come or gone meanwhile.
    """

    app: str
    model: str
    changed: bool
    grids: Mapping[str, str] = field(default_factory=dict)
    restarted: bool = False


def roll_out(
    cluster: Cluster,
    model: str | None,
    policy: Mapping[str, Any],
    read_metrics: ReadMetrics,
    *,
    timeout_s: float = ROLLOUT_S,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Rollout:
    """Deploy a policy and wait until every replica has it.

    One that a replica refuses is taken back, so that what is deployed is what serves.

    Args:
        cluster: where the service runs.
        model: whose policy; None: of the only model.
        policy: the new one.
        read_metrics: asks the service itself.
        timeout_s: how long to wait for the replicas.
        sleep: waits; tests do not.
        now: monotonic clock.

    Raises:
        ConfigError: see :func:`change`.
        RolloutFailed: a replica refused it, or not all have it in time.
    """
    details = cluster.details()
    made = change(details, model, policy)
    if not made.new:
        return Rollout(made.app, made.model, changed=False)
    address = _address(details, made.app)
    before = _swapped(address, made.model, read_metrics)
    cluster.deploy(made.schema)
    deadline_s = now() + timeout_s
    while True:
        sleep(POLL_S)
        after = cluster.details()
        _check_kept(made, after)
        states = _swapped(address, made.model, read_metrics) if before else {}
        failed = _failures(before, states)
        if failed:
            cluster.deploy(change(details, made.model, made.before).schema)
            raise RolloutFailed(
                f"the policy for {made.model} was deployed and taken back: {failed}; what serves "
                "is what served. The replica's log says why (Ray's dashboard, Serve)"
            )
        if _settled(after, made.app) and _all_swapped(before, states):
            grids = {replica: state.grid for replica, state in states.items()}
            return Rollout(
                made.app,
                made.model,
                changed=True,
                grids=grids,
                restarted=_replicas(details, made.app) != _replicas(after, made.app),
            )
        if now() > deadline_s:
            raise RolloutFailed(_late(made, after, before, states, timeout_s))


def _check_kept(made: Change, details: Mapping[str, Any]) -> None:
    """Raise if what is deployed is not what was sent: somebody else deployed meanwhile."""
    apps = details["applications"]
    for sent in made.schema["applications"]:
        found = apps.get(sent["name"], {}).get("deployed_app_config")
        if found != sent:
            raise RolloutFailed(
                f"the deployed configuration of {sent['name']} is not the one that was sent; "
                "somebody else deploys at the same time. See `serve config`, and try again"
            )


def _settled(details: Mapping[str, Any], app: str) -> bool:
    """Whether Serve says that all replicas are up and have the configuration."""
    found = details["applications"][app]
    deployment = found["deployments"].get(DEPLOYMENT, {})
    return bool(found["status"] == "RUNNING" and deployment.get("status") == "HEALTHY")


def _replicas(details: Mapping[str, Any], app: str) -> set[str]:
    replicas = details["applications"][app]["deployments"][DEPLOYMENT].get("replicas", [])
    return {replica["replica_id"] for replica in replicas}


def _address(details: Mapping[str, Any], app: str) -> str | None:
    """Return where the service listens, if the cluster says; ``/metrics`` is of all replicas."""
    prefix = (details["applications"][app].get("route_prefix") or "/").rstrip("/")
    options = details.get("http_options") or {}
    host, port = options.get("host", "127.0.0.1"), options.get("port", 8000)
    for proxy in (details.get("proxies") or {}).values():
        # Listening everywhere, it is reached under the address of its node.
        known = proxy.get("node_ip") if host in ("0.0.0.0", "::") else host
        if known:
            return f"http://{known}:{port}{prefix}"
    return None


def _swapped(address: str | None, model: str, read_metrics: ReadMetrics) -> dict[str, Swapped]:
    """Return replica -> what it has done so far; nothing if the service cannot be reached."""
    text = None if address is None else read_metrics(f"{address}/metrics")
    grids: dict[str, str] = {}
    swaps: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families(text or ""):
        for sample in family.samples:
            if sample.labels.get("model") != model:
                continue
            replica = sample.labels.get("replica", "")
            if sample.name == "shapeserve_grid_info":
                grids[replica] = sample.labels["version"]
            elif sample.name == "shapeserve_policy_swaps_total":
                swaps.setdefault(replica, {})[sample.labels["result"]] = int(sample.value)
    return {replica: Swapped(grid, swaps.get(replica, {})) for replica, grid in grids.items()}


def _failures(before: Mapping[str, Swapped], after: Mapping[str, Swapped]) -> str:
    """Say which replicas refused the policy."""
    olds = {replica: state.swaps for replica, state in before.items()}
    return ", ".join(
        f"replica {replica} says {result}"
        for replica, state in after.items()
        for result in (SwapResult.REJECTED, SwapResult.FAILED)
        if state.swaps.get(result, 0) > olds.get(replica, {}).get(result, 0)
    )


def _all_swapped(before: Mapping[str, Swapped], after: Mapping[str, Swapped]) -> bool:
    """Whether every replica has applied a policy since; true if none could be asked before."""
    if not before:
        return True
    swapped = [
        state.total > (before[replica].total if replica in before else 0)
        for replica, state in after.items()
    ]
    return bool(swapped) and all(swapped)


def _late(
    made: Change,
    details: Mapping[str, Any],
    before: Mapping[str, Swapped],
    states: Mapping[str, Swapped],
    timeout_s: float,
) -> str:
    app = details["applications"][made.app]
    waiting = [r for r, s in states.items() if r in before and s.total <= before[r].total]
    still = f"; replicas that have not: {', '.join(waiting)}" if waiting else ""
    return (
        f"the policy for {made.model} is deployed, but not every replica has it after "
        f"{timeout_s:.0f} s{still}; Serve says {app['status']}: {app.get('message') or '-'}. They "
        "go on; see Ray's dashboard"
    )
