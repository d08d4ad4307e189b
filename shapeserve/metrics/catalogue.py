"""The catalogue: every metric's name, kind, help, labels and histogram edges, and every label word.

A label is either *closed*, that is one of the words of an enum here, or it comes from the
configuration (model, bucket, axis, kind) or the build. Nothing that a client sends is ever a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Literal

from shapeserve.buckets import REAL as REAL  # the label `kind` of what is no padding

PREFIX = "shapeserve_"
NO_BUCKET = "none"
"""The ``bucket`` label of the fallback."""
NO_MODEL = "none"
"""The ``model`` label of a request that named no model that is served."""


class Mode(StrEnum):
    """How a batch was run."""

    GRAPH = "graph"
    SPECIALIZED = "specialized"
    COMPILED = "compiled"
    EAGER = "eager"
    FALLBACK = "fallback"


class Tier(StrEnum):
    """What a variant is made of, slowest first."""

    EAGER = "eager"
    COMPILED = "compiled"
    GRAPH = "graph"
    SPECIALIZED = "specialized"


class VariantState(StrEnum):
    """Whether a variant reached the tier asked for; a degraded one is served at a lower one."""

    WARM = "warm"
    DEGRADED = "degraded"


class FallbackReason(StrEnum):
    """Why a row went to the dynamic-shape fallback."""

    OVER_MAX = "over_max"
    PADDING_WASTE = "padding_waste"
    REQUESTED = "requested"
    CAPABILITY = "capability"


class DropReason(StrEnum):
    """Why an accepted row was not answered with a result."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    SHUTDOWN = "shutdown"


class RejectReason(StrEnum):
    """Why a request was refused before anything of it was queued."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    QUEUE_BYTES = "queue_bytes"
    TOO_LONG = "too_long"
    TOO_MANY_ROWS = "too_many_rows"
    TOO_MANY_TOKENS = "too_many_tokens"
    INVALID = "invalid"
    UNKNOWN_MODEL = "unknown_model"
    BODY_TOO_LARGE = "body_too_large"
    MEDIA_TYPE = "media_type"
    UNAVAILABLE = "unavailable"


class CompileStage(StrEnum):
    """A stage of torch's compiler; its time excludes the stages that it calls."""

    DYNAMO = "dynamo"
    AOT = "aot_autograd"
    INDUCTOR = "inductor"
    AUTOTUNE = "autotune"


class CompilePhase(StrEnum):
    """When a compile ran; after the seal, ``request`` must stay at 0."""

    WARMUP = "warmup"
    BACKGROUND = "background"
    REQUEST = "request"


class RecompileReason(StrEnum):
    """The kind of guard that failed; never the guard's text."""

    FIRST_COMPILE = "first_compile"
    SHAPE = "shape"
    STRIDE = "stride"
    DTYPE = "dtype"
    TENSOR_KIND = "tensor_kind"
    GLOBAL_STATE = "global_state"
    OTHER = "other"


class GraphBreakReason(StrEnum):
    """The kind of code that broke a graph; never the message's text."""

    DATA_DEPENDENT = "data_dependent"
    OPAQUE_OP = "opaque_op"
    UNSUPPORTED_CALL = "unsupported_call"
    SIDE_EFFECT = "side_effect"
    EXPLICIT = "explicit"
    EAGER_ISLAND = "eager_island"
    OTHER = "other"


class EagerFrameReason(StrEnum):
    """Why a frame that should be compiled ran eager."""

    RECOMPILE_LIMIT = "recompile_limit"
    UNSUPPORTED = "unsupported"
    EAGER_ISLAND = "eager_island"
    NOT_COMPILED = "not_compiled"
    OTHER = "other"


class CacheResult(StrEnum):
    """What torch's compile cache answered; frozen graphs bypass it."""

    HIT = "hit"
    MISS = "miss"
    BYPASS = "bypass"


class CaptureOutcome(StrEnum):
    """What became of a CUDA-graph capture."""

    CAPTURED = "captured"
    REFUSED = "refused"
    FAILED = "failed"


class SwapResult(StrEnum):
    """What became of a new policy."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    REJECTED = "rejected"
    FAILED = "failed"


class RecordResult(StrEnum):
    """What became of a row that ``record`` asks to be noted."""

    WRITTEN = "written"
    LOST = "lost"


class Endpoint(StrEnum):
    """The route of a request; ``other`` is every path that does not exist."""

    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    CLASSIFY = "classify"
    OIP_HTTP = "oip_http"
    OIP_GRPC = "oip_grpc"
    MODELS = "models"
    METRICS = "metrics"
    OTHER = "other"


MODEL_ENDPOINTS = (
    Endpoint.EMBEDDINGS,
    Endpoint.RERANK,
    Endpoint.CLASSIFY,
    Endpoint.OIP_HTTP,
    Endpoint.OIP_GRPC,
)
"""Endpoints whose requests carry a model's name."""


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    SERVER_ERROR = "server_error"

    @classmethod
    def of_status(cls, status: int) -> Outcome:
        """Return the outcome that an HTTP status stands for (499 = the client went away)."""
        special = {
            408: cls.DEADLINE,
            429: cls.OVERLOADED,
            499: cls.CANCELLED,
            503: cls.UNAVAILABLE,
            504: cls.DEADLINE,
        }
        if status in special:
            return special[status]
        if status < 400:
            return cls.OK
        return cls.CLIENT_ERROR if status < 500 else cls.SERVER_ERROR


class Scope(StrEnum):
    """Where the values of a label come from when they are not words of an enum."""

    MODEL = "the models of the configuration; `none` when the request named no served model"
    BUCKET = "the model's grid; `none` for the fallback"
    AXIS = "the model's axes"
    KIND = "`real`, and `padding_<axis>` for each of the model's axes"
    BUILD = "fixed when the process starts or the grid changes"


LabelSource = type[StrEnum] | Scope
Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True)
class MetricDef:
    """One metric of the catalogue.

    Attributes:
        name: full name, with unit and, for counters, ``_total``.
        kind: counter, gauge, histogram or info (a gauge of value 1 that carries labels).
        help: one sentence; what one unit of it is.
        labels: label names in order; ``/metrics`` adds ``replica``.
        buckets: histogram edges, ascending, without +Inf; () for other kinds. Those of
            ``request_length`` are a default: each model's own come from its maximum.
        sources: label name -> the enum of its words, or where its values come from.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    sources: Mapping[str, LabelSource]

    @property
    def attribute(self) -> str:
        """The name of this metric's attribute on ``Metrics``."""
        return self.name.removeprefix(PREFIX)


# 0.1 ms is below one graph replay, 60 s above any deadline that makes sense; 1-2.5-5 between.
SECONDS_EDGES = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Padding is a share of a row, so edges are as close as a share of it: with 16 to an octave a row is
# taken for one that is up to 6 % longer. With one every 8, queries of 12 tokens were taken for 16,
# and a tuner saw 11 % of padding where there was 19.
_PER_OCTAVE = 16
_FINE_END = 512
_RATIO = 1.15
_MAX_EDGES = 144


def length_edges(max_size: int) -> tuple[float, ...]:
    """Return the edges of ``request_length`` for an axis whose sizes end at ``max_size``.

    Each size to 32, then 16 to an octave to 512, so that a bucket policy can be fitted to the
    histogram; then by ratio 1.15; at most 144 edges, and ``max_size`` is always the last one, so
    +Inf holds only what is longer than the model takes.
    """
    if max_size < 1:
        raise ValueError(f"max_size={max_size} must be at least 1")
    fine = range(1, min(max_size, _FINE_END) + 1)
    edges = [float(size) for size in fine if size % _step_below(size) == 0]
    edge = float(_FINE_END)
    while (edge := float(ceil(edge * _RATIO))) < max_size and len(edges) < _MAX_EDGES - 1:
        edges.append(edge)
    if not edges or edges[-1] < max_size:
        edges.append(float(max_size))
    return tuple(edges)


def _step_below(size: int) -> int:
    """Return how far apart the edges are in the octave that ends at ``size`` or above."""
    return max((1 << (size - 1).bit_length()) // (2 * _PER_OCTAVE), 1)


def _counter(name: str, help_: str, **sources: LabelSource) -> MetricDef:
    return MetricDef(PREFIX + name, "counter", help_, tuple(sources), (), sources)


def _gauge(name: str, help_: str, **sources: LabelSource) -> MetricDef:
    return MetricDef(PREFIX + name, "gauge", help_, tuple(sources), (), sources)


def _info(name: str, help_: str, **sources: LabelSource) -> MetricDef:
    return MetricDef(PREFIX + name, "info", help_, tuple(sources), (), sources)


def _histogram(
    name: str, help_: str, edges: tuple[float, ...] = SECONDS_EDGES, **sources: LabelSource
) -> MetricDef:
    return MetricDef(PREFIX + name, "histogram", help_, tuple(sources), edges, sources)


CATALOGUE: tuple[MetricDef, ...] = (
    _counter(
        "requests_total",
        "Requests, by how they ended.",
        model=Scope.MODEL,
        endpoint=Endpoint,
        outcome=Outcome,
    ),
    _counter("rows_accepted_total", "Rows that were queued.", model=Scope.MODEL),
    _counter(
        "rows_total",
        "Rows answered, under the mode and bucket that answered them.",
        model=Scope.MODEL,
        mode=Mode,
        bucket=Scope.BUCKET,
    ),
    _counter(
        "rows_dropped_total",
        "Accepted rows that got no result.",
        model=Scope.MODEL,
        reason=DropReason,
    ),
    _counter(
        "rejected_total",
        "Requests refused before anything was queued.",
        model=Scope.MODEL,
        reason=RejectReason,
    ),
    _counter(
        "tokens_total",
        "Elements executed: real ones, and padding by the axis it is due to.",
        model=Scope.MODEL,
        bucket=Scope.BUCKET,
        kind=Scope.KIND,
    ),
    _counter(
        "batches_total",
        "Batches executed; a retry counts again.",
        model=Scope.MODEL,
        mode=Mode,
        bucket=Scope.BUCKET,
    ),
    _counter(
        "device_seconds_total",
        "Time that batches kept the device busy.",
        model=Scope.MODEL,
        mode=Mode,
        bucket=Scope.BUCKET,
    ),
    _counter(
        "fallbacks_total",
        "Rows sent to the dynamic-shape fallback.",
        model=Scope.MODEL,
        reason=FallbackReason,
    ),
    _counter(
        "compiles_total",
        "Compiles of torch, by stage and by when they ran. `aot_autograd` counts the graphs.",
        model=Scope.MODEL,
        stage=CompileStage,
        phase=CompilePhase,
    ),
    _counter(
        "compile_seconds_total",
        "Compile time; a stage's time excludes the stages it calls.",
        model=Scope.MODEL,
        stage=CompileStage,
        phase=CompilePhase,
    ),
    _counter(
        "recompiles_total",
        "Dynamo compiles on the request path after the seal. Anything but 0 is a defect.",
        model=Scope.MODEL,
        reason=RecompileReason,
    ),
    _counter(
        "graph_breaks_total",
        "Graph breaks met while compiling, as torch counts them: one in a called function breaks "
        "its callers too. `eager_island` are those that the configuration asks for.",
        model=Scope.MODEL,
        reason=GraphBreakReason,
    ),
    _counter(
        "eager_frames_total",
        "Frames that should be compiled and ran eager: each call beyond torch's recompile limit, "
        "each frame that cannot be compiled once.",
        model=Scope.MODEL,
        reason=EagerFrameReason,
    ),
    _counter(
        "compile_cache_total",
        "Look-ups in torch's compile cache.",
        model=Scope.MODEL,
        result=CacheResult,
    ),
    _counter(
        "captures_total",
        "CUDA-graph captures.",
        model=Scope.MODEL,
        outcome=CaptureOutcome,
    ),
    _counter(
        "policy_swaps_total",
        "New policies received.",
        model=Scope.MODEL,
        result=SwapResult,
    ),
    _counter(
        "nonfinite_rows_total",
        "Rows whose output held NaN or infinity, once each.",
        model=Scope.MODEL,
    ),
    _counter(
        "recorded_rows_total",
        "Accepted rows whose sizes were to be recorded (`record`): written to the file, or lost "
        "because it could not be.",
        model=Scope.MODEL,
        result=RecordResult,
    ),
    _gauge(
        "variants",
        "Variants of the grid in use, under the tier that serves them.",
        model=Scope.MODEL,
        tier=Tier,
        state=VariantState,
    ),
    _gauge(
        "bucket_area",
        "Elements that one batch of the bucket executes; constant.",
        model=Scope.MODEL,
        bucket=Scope.BUCKET,
    ),
    _gauge(
        "graph_pool_bytes",
        "Device memory held by the pool of captured graphs.",
        model=Scope.MODEL,
    ),
    _gauge("queue_rows", "Rows that wait to be run.", model=Scope.MODEL),
    _gauge("queue_tokens", "Padded elements of the rows that wait.", model=Scope.MODEL),
    _gauge(
        "warmup_ratio",
        "Share of the required variants that are warm; 1 = ready.",
        model=Scope.MODEL,
    ),
    _gauge("warmup_seconds", "Time from start to the seal; 0 until then.", model=Scope.MODEL),
    _gauge(
        "policy_predicted_waste",
        "Padding along an axis / all elements along the axes of a row, as `shapeserve tune` "
        "predicted it for the policy in use; 0 if the policy does not say.",
        model=Scope.MODEL,
        axis=Scope.AXIS,
    ),
    _histogram(
        "request_seconds",
        "Time from the request's arrival to its answer, whatever the outcome.",
        model=Scope.MODEL,
        endpoint=Endpoint,
    ),
    _histogram(
        "queue_seconds",
        "Time a row waited from acceptance to the start of its batch.",
        model=Scope.MODEL,
    ),
    _histogram(
        "execute_seconds",
        "Time one batch ran; one observation for each executed batch.",
        model=Scope.MODEL,
        mode=Mode,
    ),
    _histogram(
        "request_length",
        "Size of each row along an axis, before truncation.",
        length_edges(_FINE_END),
        model=Scope.MODEL,
        axis=Scope.AXIS,
    ),
    _info("grid_info", "The grid in use.", model=Scope.MODEL, version=Scope.BUILD),
    _info(
        "build_info",
        "What this process runs; one series for each live replica.",
        version=Scope.BUILD,
        python=Scope.BUILD,
        torch=Scope.BUILD,
        device=Scope.BUILD,
    ),
)
