"""Recording rules: the numbers that alerts and people ask for, computed once.

Their names say level, metric and operation, as Prometheus advises, and are the same whichever form
is scraped, so that what reads them need not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shapeserve.metrics import queries
from shapeserve.metrics.queries import View
from shapeserve.monitoring.targets import Targets

FORMS = {"metrics": View(), "ray": View(prefix="ray_shapeserve_")}
"""What can be scraped: ``/metrics`` of the service, or the agents of Ray."""

BURN_WINDOWS = ("5m", "30m", "1h", "6h")
LONG_WINDOW = "1h"
ROW_WASTE = f"model_axis:shapeserve_row_padding_waste:ratio_rate{LONG_WINDOW}"
"""The rule that can be compared with what the tuner predicted."""


@dataclass(frozen=True)
class Rule:
    """A recording rule or, with ``alert``, an alert."""

    name: str
    expr: str
    alert: bool = False
    for_: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as Prometheus reads it."""
        parts: dict[str, Any] = {"alert" if self.alert else "record": self.name, "expr": self.expr}
        more = {
            "for": self.for_,
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
        }
        return parts | {key: value for key, value in more.items() if value}


def recording_rules(view: View, targets: Targets) -> list[Rule]:
    """Return the recording rules for one form."""
    return [
        Rule(
            f"model_axis:shapeserve_padding_waste:ratio_rate{view.window}",
            queries.waste_by_axis(view),
        ),
        Rule(ROW_WASTE, queries.waste_by_axis(view.over(LONG_WINDOW), of_rows=True)),
        Rule(f"model:shapeserve_padding_waste:ratio_rate{view.window}", queries.waste(view)),
        Rule(
            f"model:shapeserve_padding_device_seconds:rate{view.window}",
            queries.padding_device_seconds(view),
        ),
        Rule(f"model:shapeserve_device_busy:ratio_rate{view.window}", queries.device_busy(view)),
        Rule(f"model:shapeserve_fallback:ratio_rate{view.window}", queries.fallback_share(view)),
        Rule(f"model:shapeserve_recompiles:rate{view.window}", view.rate("recompiles_total")),
        Rule(f"model:shapeserve_refused:ratio_rate{view.window}", queries.refused_share(view)),
        Rule(
            f"model:shapeserve_queue_seconds:p95_rate{view.window}",
            view.quantile(0.95, "queue_seconds"),
        ),
        Rule("shapeserve_replicas:count", queries.replicas(view)),
        *_burn_rules(view, targets),
    ]


def failed_name(window: str) -> str:
    """Return the name of the rule for the share of failed requests."""
    return f"model:shapeserve_failed_requests:ratio_rate{window}"


def slow_name(window: str) -> str:
    """Return the name of the rule for the share of slow requests."""
    return f"model:shapeserve_slow_requests:ratio_rate{window}"


def _burn_rules(view: View, targets: Targets) -> list[Rule]:
    rules = []
    for window in BURN_WINDOWS:
        over = view.over(window)
        rules.append(Rule(failed_name(window), queries.failed_share(over)))
        rules.append(Rule(slow_name(window), queries.slow_share(over, targets.latency_s)))
    return rules
