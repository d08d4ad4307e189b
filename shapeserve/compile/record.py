"""What one replica has compiled for a model, and what serves of that, for whoever looks into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.samples import Sample

from shapeserve.compile.monitor import CompileMonitor, Recompile
from shapeserve.compile.variants import VariantSet
from shapeserve.metrics import CompilePhase, CompileStage, Counter, Instrument, Metrics, Tier


@dataclass(frozen=True, slots=True)
class VariantState:
    """A bucket's variant; ``degraded`` if it serves at a lower tier than was wanted."""

    bucket: str
    tier: Tier
    wanted: Tier
    degraded: bool


@dataclass(frozen=True, slots=True)
class CompileTotal:
    """The compiles of one phase and stage, and their time without that of the stages they call."""

    phase: CompilePhase
    stage: CompileStage
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """Everything since the replica started; reasons that never happened are left out.

    Attributes:
        model: its name.
        grid: version of the grid that serves.
        variants: one for each bucket of that grid.
        compiles: by phase and stage.
        recompiles: reason -> compiles on the request path.
        recent_recompiles: the last of them, oldest first.
        graph_breaks: reason -> times.
        eager_frames: reason -> calls that ran eager because torch refused to compile once more.
        captures: outcome -> CUDA graph captures.
    """

    model: str
    grid: str
    variants: tuple[VariantState, ...]
    compiles: tuple[CompileTotal, ...]
    recompiles: Mapping[str, int]
    recent_recompiles: tuple[Recompile, ...]
    graph_breaks: Mapping[str, int]
    eager_frames: Mapping[str, int]
    captures: Mapping[str, int]


def compile_record(
    model: str, variants: VariantSet, monitor: CompileMonitor, metrics: Metrics
) -> CompileRecord:
    """Read the record of one model; any thread may.

    Args:
        model: its name, as in the metrics.
        variants: sealed ones, those that serve.
        monitor: of the model.
        metrics: where everything was counted.
    """
    return CompileRecord(
        model=model,
        grid=variants.grid.version,
        variants=tuple(
            VariantState(bucket.label, variant.tier, variant.wanted, variant.degraded)
            for bucket, variant in variants.all.items()
        ),
        compiles=tuple(_totals(model, metrics)),
        recompiles=_counts(metrics.recompiles_total, model, "reason"),
        recent_recompiles=monitor.recent_recompiles,
        graph_breaks=_counts(metrics.graph_breaks_total, model, "reason"),
        eager_frames=_counts(metrics.eager_frames_total, model, "reason"),
        captures=_counts(metrics.captures_total, model, "outcome"),
    )


def _totals(model: str, metrics: Metrics) -> Iterator[CompileTotal]:
    for sample in _happened(metrics.compiles_total, model):
        phase = CompilePhase(sample.labels["phase"])
        stage = CompileStage(sample.labels["stage"])
        (took,) = metrics.compile_seconds_total.labels(
            model=model, stage=stage, phase=phase
        ).samples("")
        yield CompileTotal(phase, stage, int(sample.value), took.value)


def _counts(instrument: Instrument[Counter], model: str, label: str) -> dict[str, int]:
    return {sample.labels[label]: int(sample.value) for sample in _happened(instrument, model)}


def _happened(instrument: Instrument[Counter], model: str) -> Iterator[Sample]:
    return (s for s in instrument.family().samples if s.labels["model"] == model and s.value)
