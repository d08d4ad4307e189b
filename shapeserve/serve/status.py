"""What one replica says of its models: the values behind ``/ui``, small enough to be sent around.

Replicas send them to each other, so everything here is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shapeserve.errors import Unavailable
from shapeserve.protocols.health import ReplicaReport

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.compile.monitor import Recompile
    from shapeserve.compile.record import VariantState
    from shapeserve.engine import Engine, RecentFallback
    from shapeserve.metrics import Metrics

Series = Mapping[tuple[str, ...], float]
"""Values of the labels but ``model``, in the catalogue's order -> value."""

COUNTED: Final = (
    *("rows_accepted_total", "rows_total", "batches_total", "tokens_total"),
    *("device_seconds_total", "rows_dropped_total", "fallbacks_total", "recompiles_total"),
    *("queue_rows", "queue_tokens"),
)
"""The metrics that the page needs."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model of one replica.

    Attributes:
        model: its name.
        state: ``warming``, ``ready`` or ``unhealthy``.
        done: warm-up steps finished.
        total: warm-up steps in all.
        grid: version of the grid that serves.
        variants: one for each bucket of that grid.
        counts: metric -> its series of this model.
        max_queue_rows: when requests are refused.
        recompiles: the last compiles on the request path, oldest first.
        fallbacks: the last rows that ran outside the grid, oldest first.
    """

    model: str
    state: str
    done: int
    total: int
    grid: str
    variants: tuple[VariantState, ...]
    counts: Mapping[str, Series]
    max_queue_rows: int
    recompiles: tuple[Recompile, ...]
    fallbacks: tuple[RecentFallback, ...]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica and its models, as they are now."""

    report: ReplicaReport
    models: tuple[ModelStatus, ...]


def replica_status(
    report: ReplicaReport, engines: Sequence[Engine], metrics: Metrics
) -> ReplicaStatus:
    """Read the status of started engines; any thread may."""
    counts: dict[str, dict[str, dict[tuple[str, ...], float]]] = {}
    for name in COUNTED:
        instrument = getattr(metrics, name)
        others = [label for label in instrument.definition.labels if label != "model"]
        for sample in instrument.family().samples:
            series = counts.setdefault(sample.labels["model"], {}).setdefault(name, {})
            series[tuple(sample.labels[label] for label in others)] = sample.value
    models = tuple(_model_status(engine, counts.get(engine.spec.name, {})) for engine in engines)
    return ReplicaStatus(report, models)


def _model_status(engine: Engine, counts: Mapping[str, Series]) -> ModelStatus:
    record, progress = engine.compile_record(), engine.progress
    try:
        engine.healthy()
        state = "ready" if engine.ready else "warming"
    except Unavailable:
        state = "unhealthy"
    return ModelStatus(
        engine.spec.name,
        state,
        progress.done,
        progress.total,
        record.grid,
        record.variants,
        counts,
        engine.config.limits.max_queue_rows,
        record.recent_recompiles,
        engine.recent_fallbacks,
    )
