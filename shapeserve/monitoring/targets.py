"""What the alerts compare with: the numbers that differ from service to service."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from shapeserve.errors import ConfigError
from shapeserve.metrics.catalogue import SECONDS_EDGES

FAST_BURN = 14.4
"""Times the budget; Google's SRE workbook, chapter 5: 2 % of a month's budget in an hour."""


def _target(help_: str, default: float) -> float:
    value: float = field(default=default, metadata={"help": help_})
    return value


@dataclass(frozen=True)
class Targets:
    """Objectives and bounds; each is an option of ``python -m shapeserve.monitoring``.

    The defaults are a place to start from, not measurements.
    """

    availability: float = _target("share of requests that must be answered", 0.999)
    latency_s: float = _target("a request is slow above it; an edge of request_seconds", 0.25)
    latency_share: float = _target("share of requests that must not be slow", 0.99)
    padding_waste: float = _target("padding / all elements that is too much", 0.5)
    fallback_share: float = _target("share of rows in the fallback that is too much", 0.05)
    queue_wait_s: float = _target("p95 of the wait in the queue that is too long", 0.1)
    refused_share: float = _target("share of requests refused that is too much", 0.01)
    drift_margin: float = _target("how far measured waste may exceed the predicted", 0.1)
    replicas: int = field(
        default=0,
        metadata={"help": "how many there should be; 0: as many as there mostly were in six hours"},
    )

    def __post_init__(self) -> None:
        if self.latency_s not in SECONDS_EDGES:
            edges = ", ".join(f"{edge:g}" for edge in SECONDS_EDGES)
            raise ConfigError(
                f"latency_s={self.latency_s:g} is no edge of request_seconds, so requests below it "
                f"are not counted; use one of {edges}"
            )
        if not 0 < self.queue_wait_s < SECONDS_EDGES[-1]:
            raise ConfigError(
                f"queue_wait_s={self.queue_wait_s:g} must be above 0 and below "
                f"{SECONDS_EDGES[-1]:g} seconds, the last edge of queue_seconds: "
                "no quantile is above it"
            )
        if self.replicas < 0:
            raise ConfigError(f"replicas={self.replicas} must be 0 or more")
        for share in fields(self):
            if share.name in ("latency_s", "queue_wait_s", "replicas"):
                continue
            if not 0 < (value := getattr(self, share.name)) < 1:
                raise ConfigError(f"{share.name}={value:g} must be a share between 0 and 1")
        least = 1 - 1 / FAST_BURN
        for name in ("availability", "latency_share"):
            if not (value := getattr(self, name)) > least:
                raise ConfigError(
                    f"{name}={value:g} must be above {least:.4f}: {FAST_BURN:g} times the budget "
                    "that it leaves is more than all requests, and the fast alert would never fire"
                )
