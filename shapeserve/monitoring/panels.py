"""What the dashboard shows: its panels and their queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shapeserve.metrics import queries
from shapeserve.metrics.catalogue import NO_MODEL, VariantState
from shapeserve.metrics.queries import View

VIEW = View(prefix="${prefix}", window="$rate", only='model=~"$model"')
# With the requests that were turned away before it was known which model they are for.
WITH_UNREAD = replace(VIEW, only=f'model=~"$model|{NO_MODEL}"')


@dataclass(frozen=True)
class Query:
    """One query of a panel, and what its series are called."""

    expr: str
    legend: str
    instant: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel: its type is Grafana's, its unit too."""

    title: str
    queries: Sequence[Query]
    type: str = "timeseries"
    unit: str = "short"
    help: str = ""
    width: int = 8
    height: int = 8
    stacked: bool = False
    red_above: float | None = None


def _one(expr: str, legend: str = "{{model}}") -> list[Query]:
    return [Query(expr, legend)]


def _now(expr: str, legend: str = "{{model}}") -> list[Query]:
    return [Query(expr, legend, instant=True)]


_STATS = (
    Panel("Requests/s", _now(VIEW.rate("requests_total")), "stat", "reqps", width=4, height=4),
    Panel(
        "Failed requests",
        _now(queries.failed_share(WITH_UNREAD)),
        "stat",
        "percentunit",
        "Those that the service is to blame for: 5xx, 429, deadlines.",
        width=4,
        height=4,
        red_above=0.001,
    ),
    Panel("p99", _now(VIEW.quantile(0.99, "request_seconds")), "stat", "s", width=4, height=4),
    Panel(
        "Padding waste",
        _now(queries.waste(VIEW)),
        "stat",
        "percentunit",
        "Padding / all elements executed.",
        width=4,
        height=4,
        red_above=0.5,
    ),
    Panel(
        "Recompiles after ready",
        _now(VIEW.over("$__range").events("recompiles_total")),
        "stat",
        "none",
        "In the time that is shown. Anything but 0 is a defect.",
        width=4,
        height=4,
        red_above=1,
    ),
    Panel(
        "Replicas",
        [Query(f"count by (model) ({VIEW.series('queue_rows')})", "{{model}}", instant=True)],
        "stat",
        "none",
        "Those that answer the scrape.",
        width=4,
        height=4,
    ),
)

_GRAPHS = (
    Panel(
        "Requests by outcome",
        _one(
            WITH_UNREAD.rate("requests_total", queries.FOR_WORK, by="model, outcome"),
            "{{model}} {{outcome}}",
        ),
        unit="reqps",
        help="Those of no model were turned away before they were read.",
    ),
    Panel(
        "Latency",
        [
            Query(VIEW.quantile(q, "request_seconds"), f"{{{{model}}}} p{q * 100:g}")
            for q in (0.5, 0.95, 0.99)
        ],
        unit="s",
    ),
    Panel(
        "Padding waste by axis",
        _one(queries.waste_by_axis(VIEW), "{{model}} {{axis}}"),
        unit="percentunit",
        help="Padding along one axis / all elements executed.",
    ),
    Panel(
        "Rows by mode",
        _one(VIEW.rate("rows_total", by="model, mode"), "{{model}} {{mode}}"),
        help="graph, specialized and compiled are warm; eager and fallback are slow.",
        unit="rowsps",
        stacked=True,
    ),
    Panel(
        "Recompiles and eager calls",
        [
            Query(VIEW.events("recompiles_total", by="model, reason"), "{{model}} {{reason}}"),
            Query(
                VIEW.events("eager_frames_total", by="model, reason"),
                "{{model}} eager: {{reason}}",
            ),
        ],
        unit="none",
        help="How many in each interval. Recompiles must stay at 0.",
    ),
    Panel(
        "Warm-up and degraded variants",
        [
            Query(f"min by (model) ({VIEW.series('warmup_ratio')})", "{{model}} warm"),
            Query(
                "sum by (model) ("
                + VIEW.series("variants", f'state="{VariantState.DEGRADED}"')
                + ")\n  / (sum by (model) ("
                + VIEW.series("variants")
                + ") > 0)",
                "{{model}} degraded",
            ),
        ],
        unit="percentunit",
        help="Share of the variants; of the replica that is furthest behind.",
    ),
    Panel(
        "Queue",
        _one(f"sum by (model) ({VIEW.series('queue_rows')})", "{{model}} rows waiting"),
        unit="none",
    ),
    Panel(
        "Wait and device",
        [
            Query(VIEW.quantile(0.95, "queue_seconds"), "{{model}} p95 wait"),
            Query(VIEW.quantile(0.95, "execute_seconds"), "{{model}} p95 batch"),
        ],
        unit="s",
    ),
    Panel(
        "Device busy",
        _one(queries.device_busy(VIEW)),
        unit="percentunit",
        help="Of each replica's time. Models of one device add up.",
        stacked=True,
    ),
    Panel(
        "Rejected by reason",
        _one(WITH_UNREAD.rate("rejected_total", by="model, reason"), "{{model}} {{reason}}"),
        unit="reqps",
        help="Those of no model were turned away before they were read.",
    ),
    Panel(
        "Memory of captured graphs",
        _one(
            f"sum by (model, replica) ({VIEW.series('graph_pool_bytes')})", "{{model}} {{replica}}"
        ),
        unit="bytes",
    ),
    Panel(
        "Non-finite rows, failed swaps",
        [
            Query(VIEW.events("nonfinite_rows_total"), "{{model}} non-finite rows"),
            Query(
                VIEW.events("policy_swaps_total", by="model, result"), "{{model}} swap {{result}}"
            ),
        ],
        unit="none",
        help="How many in each interval.",
    ),
)

OVERVIEW = (*_STATS, *_GRAPHS)

_AXIS = 'axis=~"$axis"'
_LENGTHS = f"sum by (le) (increase({VIEW.series('request_length_bucket', _AXIS)}[$rate]))"

TUNING = (
    Panel(
        "Lengths along $axis",
        [Query(_LENGTHS, "{{le}}")],
        "heatmap",
        help="Rows by size, before truncation; what `shapeserve tune --prometheus` reads.",
        width=12,
    ),
    Panel(
        "Predicted and measured waste",
        [
            Query(
                queries.waste_by_axis(VIEW.over("1h"), of_rows=True), "{{model}} {{axis}} measured"
            ),
            Query(queries.predicted_waste(VIEW), "{{model}} {{axis}} predicted"),
        ],
        unit="percentunit",
        help="Over an hour, without filler rows. Far apart: the traffic is not what the policy was "
        "tuned for.",
        width=12,
    ),
    Panel(
        "Waste by bucket",
        _now(queries.waste(VIEW, by="model, bucket"), "{{model}} {{bucket}}"),
        "bargauge",
        "percentunit",
        "Padding / all elements of the bucket.",
    ),
    Panel(
        "Device seconds by bucket",
        _now(VIEW.rate("device_seconds_total", by="model, bucket"), "{{model}} {{bucket}}"),
        "bargauge",
        "s",
        "Per second. A bucket that is wasteful and busy is the one to split.",
    ),
    Panel(
        "Rows by bucket",
        _now(VIEW.rate("rows_total", by="model, bucket"), "{{model}} {{bucket}}"),
        "bargauge",
        "rowsps",
    ),
    Panel(
        "Device seconds spent on padding",
        _one(queries.padding_device_seconds(VIEW)),
        unit="s",
        help="Per second: 0.3 is 30 % of a device.",
    ),
    Panel(
        "Fallbacks by reason",
        _one(queries.fallback_share_by_reason(VIEW), "{{model}} {{reason}}"),
        unit="percentunit",
        help="Share of the rows.",
        stacked=True,
    ),
    Panel(
        "Rows in a batch",
        _one(f"{VIEW.rate('rows_total')}\n  / ({VIEW.rate('batches_total')} > 0)"),
        unit="none",
        help="Few rows in large batches are padding along `batch`.",
    ),
)
