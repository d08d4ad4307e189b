"""The configuration that is deployed on a Ray cluster, with another policy in it.

From and to the data of Ray's REST API (``GET``, ``PUT /api/serve/applications/``), where a change
of ``user_config`` alone leaves the replicas running, and reaches those that come later.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shapeserve.errors import ConfigError
from shapeserve.serve.names import DEPLOYMENT

REDACTED = "<redacted>"
"""What Ray puts in the place of secrets for some who ask; deployed again it would be the secret."""

_KEPT = ("proxy_location", "http_options", "grpc_options", "target_capacity")


@dataclass(frozen=True, slots=True)
class Change:
    """What is deployed.

    Attributes:
        app: the application that is changed.
        model: whose policy.
        schema: the whole configuration.
        before: the model's policy that is deployed; None: none is.
        new: whether it differs from what is deployed already.
    """

    app: str
    model: str
    schema: Mapping[str, Any]
    before: Mapping[str, Any] | None
    new: bool


def change(
    details: Mapping[str, Any], model: str | None, policy: Mapping[str, Any] | None
) -> Change:
    """Return the deployed configuration with another policy for one model, and nothing else.

    Args:
        details: of ``Cluster.details``.
        model: its name; None: the only one there is.
        policy: the new one; None: the configured one.

    Raises:
        ConfigError: there is no such application, or it is not clear which.
    """
    apps = details.get("applications", {})
    ours = {name: app for name, app in apps.items() if DEPLOYMENT in app.get("deployments", {})}
    deployed = {n: app["deployed_app_config"] for n, app in ours.items()}
    app, name = _choose(deployed, model, sorted(apps))
    configs = [a["deployed_app_config"] for a in apps.values() if a.get("deployed_app_config")]
    kept = {key: details[key] for key in _KEPT if details.get(key) is not None}
    schema = copy.deepcopy({**kept, "applications": configs})
    if REDACTED in json.dumps(schema):
        raise ConfigError(
            f"the cluster hides parts of its configuration ({REDACTED}), which cannot be deployed "
            "again; ask it directly, not through a browser's proxy, or use --apply-admin"
        )
    (config,) = (a for a in schema["applications"] if a["name"] == app)
    user_config = _user_config(config)
    before = user_config.get("policies") or {}
    policies = {key: value for key, value in before.items() if key != name}
    if policy is not None:
        policies[name] = policy
    user_config["policies"] = policies
    return Change(app, name, schema, before.get(name), new=before != policies)


def _choose(
    deployed: Mapping[str, Mapping[str, Any] | None], model: str | None, apps: list[str]
) -> tuple[str, str]:
    """Return the application and the name of the model."""
    if not deployed:
        raise ConfigError(
            f"no application on this cluster has a deployment {DEPLOYMENT}; there are: "
            f"{', '.join(apps) or 'none'}; give the dashboard of the cluster that serves the model"
        )
    named = {app: _models(config) for app, config in deployed.items()}
    holders = [app for app, names in named.items() if model in names] if model else []
    candidates = holders or list(named)
    if len(candidates) > 1:
        raise ConfigError(
            f"--model {model}: the applications {', '.join(sorted(candidates))} could serve it; "
            "give the name of a model that only one of them has in its configuration"
        )
    (app,) = candidates
    names = named[app]
    if deployed[app] is None:
        raise ConfigError(
            f"the application {app} was not deployed with a configuration file, so there is none "
            "to change; deploy it with `serve deploy`, or use --apply-admin"
        )
    if model is None and (len(names) != 1 or names[0] is None):
        known = ", ".join(name for name in names if name)
        raise ConfigError(
            f"--model is not given, and the configuration of {app} does not tell it"
            f"{f' (it names {known})' if known else ''}; give the name that GET /v1/models says"
        )
    return app, model or str(names[0])


def _models(config: Mapping[str, Any] | None) -> list[str | None]:
    models = ((config or {}).get("args") or {}).get("models") or []
    return [model.get("name") for model in models]


def _user_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an application's configuration to be changed, made where it is not."""
    deployments = config.setdefault("deployments", [])
    for deployment in deployments:
        if deployment["name"] == DEPLOYMENT:
            break
    else:
        deployments.append(deployment := {"name": DEPLOYMENT})
    if not deployment.get("user_config"):
        deployment["user_config"] = {}
    made: dict[str, Any] = deployment["user_config"]
    return made
