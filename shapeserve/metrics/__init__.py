"""Metrics: one catalogue, one registry, one merge of all replicas, and the identities they obey."""

from shapeserve.metrics.area import HasSizes, padding
from shapeserve.metrics.catalogue import (
    CATALOGUE,
    NO_BUCKET,
    NO_MODEL,
    REAL,
    CacheResult,
    CaptureOutcome,
    CompilePhase,
    CompileStage,
    DropReason,
    EagerFrameReason,
    Endpoint,
    FallbackReason,
    GraphBreakReason,
    MetricDef,
    Mode,
    Outcome,
    RecompileReason,
    RejectReason,
    SwapResult,
    Tier,
    VariantState,
    length_edges,
)
from shapeserve.metrics.docs import render_docs
from shapeserve.metrics.identities import identities, parse_samples
from shapeserve.metrics.instruments import Counter, Gauge, Histogram, Instrument, Mirror
from shapeserve.metrics.merge import merge_texts
from shapeserve.metrics.registry import Metrics

__all__ = [
    "CATALOGUE",
    "NO_BUCKET",
    "NO_MODEL",
    "REAL",
    "CacheResult",
    "CaptureOutcome",
    "CompilePhase",
    "CompileStage",
    "Counter",
    "DropReason",
    "EagerFrameReason",
    "Endpoint",
    "FallbackReason",
    "Gauge",
    "GraphBreakReason",
    "HasSizes",
    "Histogram",
    "Instrument",
    "MetricDef",
    "Metrics",
    "Mirror",
    "Mode",
    "Outcome",
    "RecompileReason",
    "RejectReason",
    "SwapResult",
    "Tier",
    "VariantState",
    "identities",
    "length_edges",
    "merge_texts",
    "padding",
    "parse_samples",
    "render_docs",
]
