"""How much of a machine a replica asks for, and how many requests it takes."""

from __future__ import annotations

import math

from shapeserve.config import ServeConfig

# Requests that may be on their way beside those whose rows fill the queue: parsing, rendering,
# being refused, scraping. The queue's own bound must be what refuses, so that clients get the 429
# that says why.
SPARE_REQUESTS = 1024


def max_ongoing_requests(config: ServeConfig) -> int:
    """Return how many requests Serve may send to one replica at a time."""
    return sum(model.limits.max_queue_rows for model in config.models) + SPARE_REQUESTS


def threads_per_replica(config: ServeConfig, cpus: float) -> int:
    """Return the CPU threads of one replica's models: configured, else its share of ``cpus``."""
    configured = [model.threads for model in config.models if model.threads]
    return max(configured, default=max(1, int(cpus / config.serve.replicas)))


def cpus_per_replica(config: ServeConfig, cpus: float) -> float:
    """Return the CPUs that a replica asks Ray for, so that all replicas find a place.

    Ray sets ``OMP_NUM_THREADS`` to it, hence as many as it has threads where there are enough.
    """
    share = math.floor(100 * cpus / config.serve.replicas) / 100
    return min(float(threads_per_replica(config, cpus)), share)


def gpus_per_replica(config: ServeConfig, gpus: float) -> float:
    """Return the share of a GPU that a replica asks Ray for: 0 on the CPU, at most 1."""
    devices = {model.device for model in config.models}
    if devices == {"cpu"} or (not gpus and "cuda" not in devices):
        return 0.0
    return min(1.0, max(gpus, 1.0) / config.serve.replicas)
