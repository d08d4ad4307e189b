"""From a configuration to a Ray Serve application.

No ``from __future__ import annotations`` here: Ray reads the builder's annotation at run time.
"""

import os

import ray
from ray import serve
from ray.serve import Application

from shapeserve.config import ServeConfig
from shapeserve.serve import sizing
from shapeserve.serve.names import DEPLOYMENT
from shapeserve.serve.replica import EngineFactory, ShapeServe, new_engine

AppArgs = ServeConfig


def app(args: AppArgs) -> Application:
    """Build the application; ``args`` in a Serve config file is the configuration itself."""
    return build(args)


def build(config: ServeConfig, make_engine: EngineFactory = new_engine) -> Application:
    """Build the application.

    Args:
        config: the service's configuration.
        make_engine: makes the engine of one model; tests pass a fake.
    """
    cpus = _cluster("CPU", os.cpu_count() or 1)
    threads = sizing.threads_per_replica(config, cpus)
    models = tuple(
        model if model.threads else model.model_copy(update={"threads": threads})
        for model in config.models
    )
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=config.serve.replicas,
        max_ongoing_requests=sizing.max_ongoing_requests(config),
        ray_actor_options={
            "num_cpus": sizing.cpus_per_replica(config, cpus),
            "num_gpus": sizing.gpus_per_replica(config, _cluster("GPU", 0)),
        },
        # A file without it takes policies and draining back: Serve tells of no change to nothing.
        user_config={"policies": {}},
        health_check_period_s=2.0,
        # Only a loop that cannot run at all takes longer; one busy batch does not touch it.
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=max(config.serve.drain_s, 0.1),
        # A model that fails to load fails again; one more try covers a port or a node that went.
        max_constructor_retry_count=2,
    )
    bound = config.model_copy(update={"models": models})
    return deployment(ShapeServe).bind(bound, make_engine)


def _cluster(resource: str, default: float) -> float:
    """Return how much of a resource the cluster has; ``default`` outside a cluster."""
    if not ray.is_initialized():
        return default
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get(resource, 0.0)
