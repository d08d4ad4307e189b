"""``Metrics``: the catalogue with values, as one Prometheus collector.

Values live in our own instruments rather than in ``prometheus_client``'s for three reasons: a
histogram may have other edges for each model, finding its edge is a bisection, and no ``_created``
series doubles the exposition (the switch for those is global to the process).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from threading import Lock

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from shapeserve.metrics.catalogue import (
    CATALOGUE,
    MODEL_ENDPOINTS,
    NO_BUCKET,
    NO_MODEL,
    REAL,
    Endpoint,
    MetricDef,
    Mode,
    Outcome,
    Scope,
    length_edges,
)
from shapeserve.metrics.instruments import (
    AnyInstrument,
    Counter,
    Gauge,
    Histogram,
    Instrument,
    Labels,
    Mirror,
)


class Metrics:
    """All metrics of one process, each an attribute: its name without ``shapeserve_``.

    Args:
        registry: where to register; a registry of its own if not given.
        mirror: gets every change too (under Ray: ``ray.serve.metrics``).

    Thread rule: any thread may record and scrape. Call :meth:`preset` for a model before
    anything is recorded for it.
    """

    requests_total: Instrument[Counter]
    rows_accepted_total: Instrument[Counter]
    rows_total: Instrument[Counter]
    rows_dropped_total: Instrument[Counter]
    rejected_total: Instrument[Counter]
    tokens_total: Instrument[Counter]
    batches_total: Instrument[Counter]
    device_seconds_total: Instrument[Counter]
    fallbacks_total: Instrument[Counter]
    compiles_total: Instrument[Counter]
    compile_seconds_total: Instrument[Counter]
    recompiles_total: Instrument[Counter]
    graph_breaks_total: Instrument[Counter]
    eager_frames_total: Instrument[Counter]
    compile_cache_total: Instrument[Counter]
    captures_total: Instrument[Counter]
    policy_swaps_total: Instrument[Counter]
    nonfinite_rows_total: Instrument[Counter]
    recorded_rows_total: Instrument[Counter]
    variants: Instrument[Gauge]
    bucket_area: Instrument[Gauge]
    graph_pool_bytes: Instrument[Gauge]
    queue_rows: Instrument[Gauge]
    queue_tokens: Instrument[Gauge]
    warmup_ratio: Instrument[Gauge]
    warmup_seconds: Instrument[Gauge]
    policy_predicted_waste: Instrument[Gauge]
    request_seconds: Instrument[Histogram]
    queue_seconds: Instrument[Histogram]
    execute_seconds: Instrument[Histogram]
    request_length: Instrument[Histogram]
    grid_info: Instrument[Gauge]
    build_info: Instrument[Gauge]

    def __init__(
        self, registry: CollectorRegistry | None = None, mirror: Mirror | None = None
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._lock = Lock()
        self._mirror = mirror
        self._scopes: dict[str, dict[Scope, tuple[str, ...]]] = {NO_MODEL: {}}
        self._length_edges: dict[tuple[str, str], tuple[float, ...]] = {}
        self._grid_versions: dict[str, str] = {}
        self._instruments: list[AnyInstrument] = [
            self._instrument(definition) for definition in CATALOGUE
        ]
        for instrument in self._instruments:
            setattr(self, instrument.definition.attribute, instrument)
        for instrument in (self.requests_total, self.request_seconds, self.rejected_total):
            self._preset_series(instrument, NO_MODEL, ())
        self.registry.register(self)

    def preset(
        self,
        model: str,
        buckets: Iterable[str],
        axes: Iterable[str],
        *,
        row_axes: Iterable[str] | None = None,
        max_sizes: Mapping[str, int] | None = None,
        modes: Iterable[Mode] = tuple(Mode),
    ) -> None:
        """Make every series of a model that can ever appear, at 0.

        Call it again for a new grid, before the grid is used: buckets are added, counts stay.

        Args:
            model: its name.
            buckets: bucket labels of the grid, such as ``batch=8,seq=128``.
            axes: the grid's axes.
            row_axes: the axes that a row has a size along; those of the grid but ``batch``
                where not given. Packed rows have sizes along ``seq``, their grid has ``tokens``.
            max_sizes: axis -> the largest size the model takes; sets the edges of
                ``request_length``, once. 512 where not given.
            modes: the modes that this platform and tier can use.
        """
        scopes = self._scopes.get(model, {})
        new = tuple(buckets)
        known = dict.fromkeys((*scopes.get(Scope.BUCKET, ()), *new, NO_BUCKET))
        axes, modes = tuple(axes), tuple(modes)
        row_axes = tuple(row_axes or (axis for axis in axes if axis != "batch"))
        self._scopes[model] = {
            Scope.BUCKET: tuple(known),
            Scope.AXIS: row_axes,
            Scope.KIND: (REAL, *(f"padding_{axis}" for axis in axes)),
        }
        for axis in row_axes:
            edges = length_edges((max_sizes or {}).get(axis, 512))
            self._length_edges.setdefault((model, axis), edges)
        for instrument in self._instruments:
            self._preset_series(instrument, model, modes)
        for label in new:
            self.bucket_area.child(model, label).set(bucket_area(label))

    def set_grid_version(self, model: str, version: str) -> None:
        """Say which grid serves a model; the series of its previous grid goes away."""
        old = self._grid_versions.get(model)
        if old is not None and old != version:
            self.grid_info.labels(model=model, version=old).set(0)  # for the mirror
            self.grid_info.remove(model=model, version=old)
        self._grid_versions[model] = version
        self.grid_info.labels(model=model, version=version).set(1)

    def set_predicted_waste(self, model: str, waste: Mapping[str, float]) -> None:
        """Say what padding the policy in use was expected to have; axes it leaves out get 0."""
        for axis in self._scopes[model][Scope.AXIS]:
            self.policy_predicted_waste.labels(model=model, axis=axis).set(waste.get(axis, 0.0))

    def record_request(
        self, model: str, endpoint: Endpoint, outcome: Outcome, seconds: float
    ) -> None:
        """Count one request that ended; ``NO_MODEL`` if it named no served model."""
        self.requests_total.child(model, endpoint, outcome).inc()
        self.request_seconds.child(model, endpoint).observe(seconds)

    def record_batch(
        self, model: str, mode: Mode, bucket: str, tokens: Mapping[str, int], seconds: float
    ) -> None:
        """Count one executed batch, also one that failed and is retried.

        Args:
            model: its name.
            mode: how the batch ran.
            bucket: the bucket's label, ``NO_BUCKET`` for the fallback.
            tokens: kind -> elements; they add up to the executed area.
            seconds: how long it kept the device.

        Rows are not counted here: a row counts once, in the batch that answered it.
        """
        self.batches_total.child(model, mode, bucket).inc()
        self.device_seconds_total.child(model, mode, bucket).inc(seconds)
        self.execute_seconds.child(model, mode).observe(seconds)
        for kind, n in tokens.items():
            self.tokens_total.child(model, bucket, kind).inc(n)

    def text(self) -> str:
        """Return the exposition in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def samples(self) -> list[Sample]:
        """Return every sample of these metrics."""
        return [sample for family in self.collect() for sample in family.samples]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its series; the registry calls this."""
        for instrument in self._instruments:
            yield instrument.family()

    def describe(self) -> Iterator[Metric]:
        """Yield every metric without series, so that the registry sees duplicates."""
        for instrument in self._instruments:
            yield instrument.describe()

    def _instrument(self, definition: MetricDef) -> AnyInstrument:
        lock, mirror = self._lock, self._mirror
        if definition.kind == "counter":
            count = mirror.counter(definition) if mirror else None
            return Instrument(definition, self._check, lambda s: Counter(s, lock, count))
        if definition.kind == "histogram":
            observe = mirror.histogram(definition) if mirror else None
            return Instrument(
                definition,
                self._check,
                lambda s: Histogram(s, lock, observe, self._edges(definition, s)),
            )
        put = mirror.gauge(definition) if mirror else None
        return Instrument(definition, self._check, lambda s: Gauge(s, lock, put))

    def _edges(self, definition: MetricDef, labels: Labels) -> tuple[float, ...]:
        if "axis" in labels:  # request_length
            return self._length_edges[labels["model"], labels["axis"]]
        return definition.buckets

    def _preset_series(
        self,
        instrument: AnyInstrument,
        model: str,
        modes: tuple[Mode, ...],
    ) -> None:
        d = instrument.definition
        names = d.labels
        values = [modes if d.sources[n] is Mode else self._values(d, n, model) for n in names]
        for combination in itertools.product(*values):
            if _can_appear(dict(zip(names, combination, strict=True))):
                instrument.child(*combination)

    def _values(self, definition: MetricDef, label: str, model: str) -> tuple[str, ...]:
        """Return all the values that a label can take in series of ``model``."""
        source = definition.sources[label]
        if not isinstance(source, Scope):
            return tuple(source)
        if source is Scope.MODEL:
            return (model,) if model in self._scopes else ()
        return self._scopes[model].get(source, ())

    def _check(self, definition: MetricDef, labels: Labels) -> None:
        """Refuse a label value that is not of its closed set (I7)."""
        for name, value in labels.items():
            source = definition.sources[name]
            if source is Scope.BUILD:
                continue
            allowed = self._values(definition, name, labels["model"])
            if value in allowed:
                continue
            remedy = (
                "call Metrics.preset for the model and its grid first"
                if isinstance(source, Scope)
                else "use a member of " + _enum_name(source)
            )
            raise ValueError(
                f"{definition.name}: {name}={value!r} is not allowed "
                f"({len(allowed)} values are); {remedy}"
            )


def bucket_area(label: str) -> int:
    """Return the elements that a bucket of this label executes: the product of its sizes."""
    return math.prod(int(part.partition("=")[2]) for part in label.split(","))


def _enum_name(source: type[StrEnum]) -> str:
    return source.__name__


def _can_appear(labels: Labels) -> bool:
    """Say whether a combination of allowed values can ever be recorded."""
    if "bucket" in labels and "mode" in labels:
        return (labels["mode"] == Mode.FALLBACK) == (labels["bucket"] == NO_BUCKET)
    if set(labels) == {"model", "bucket"}:  # bucket_area: the fallback has no fixed area
        return labels["bucket"] != NO_BUCKET
    if "endpoint" in labels and labels["model"] != NO_MODEL:
        return labels["endpoint"] in MODEL_ENDPOINTS
    return True
