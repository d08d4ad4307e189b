"""One metric and its series: counters, gauges and histograms, each change mirrored if asked."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from shapeserve.metrics.catalogue import MetricDef

Labels = Mapping[str, str]
Record = Callable[[float, Labels], None]


class Mirror(Protocol):
    """A second backend that gets every change; each method returns the function to call.

    Counters pass the increment (never 0), gauges the new value, histograms the observation.
    A function must not raise, and may be called from any thread. Series preset at 0 are not
    passed on.
    """

    def counter(self, definition: MetricDef) -> Record:
        """Return what takes the increments of this counter."""

    def gauge(self, definition: MetricDef) -> Record:
        """Return what takes the values of this gauge, or of this info as 1 and 0."""

    def histogram(self, definition: MetricDef) -> Record:
        """Return what takes the observations of this histogram."""


class Counter:
    """One series that only grows."""

    __slots__ = ("_labels", "_lock", "_mirror", "_value")

    def __init__(self, labels: Labels, lock: Lock, mirror: Record | None) -> None:
        self._labels = labels
        self._lock = lock
        self._mirror = mirror
        self._value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount`` >= 0."""
        if amount < 0:
            raise ValueError(f"a counter cannot be increased by {amount}; it must be at least 0")
        with self._lock:
            self._value += amount
        if amount and self._mirror is not None:
            self._mirror(amount, self._labels)

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield the series as Prometheus samples."""
        yield Sample(name, dict(self._labels), self._value)


class Gauge:
    """One series that is set."""

    __slots__ = ("_labels", "_lock", "_mirror", "_value")

    def __init__(self, labels: Labels, lock: Lock, mirror: Record | None) -> None:
        self._labels = labels
        self._lock = lock
        self._mirror = mirror
        self._value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        self._value = value
        if self._mirror is not None:
            self._mirror(value, self._labels)

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``, which may be negative."""
        with self._lock:
            self._value += amount
            value = self._value
        if self._mirror is not None:
            self._mirror(value, self._labels)

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield the series as Prometheus samples."""
        yield Sample(name, dict(self._labels), self._value)


class Histogram:
    """One series of counts, one for each edge and one above the last."""

    __slots__ = ("_counts", "_edges", "_labels", "_lock", "_mirror", "_sum")

    def __init__(
        self, labels: Labels, lock: Lock, mirror: Record | None, edges: tuple[float, ...]
    ) -> None:
        self._labels = labels
        self._lock = lock
        self._mirror = mirror
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a value equal to an edge belongs to that edge (``le``)."""
        i = bisect_left(self._edges, value)
        with self._lock:
            self._counts[i] += 1
            self._sum += value
        if self._mirror is not None:
            self._mirror(value, self._labels)

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values at the cost of one lock."""
        places = [bisect_left(self._edges, value) for value in values]
        with self._lock:
            for i in places:
                self._counts[i] += 1
            self._sum += sum(values)
        if self._mirror is not None:
            for value in values:
                self._mirror(value, self._labels)

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield the series as Prometheus samples, counts cumulated over the edges."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        cumulated = list(itertools.accumulate(counts))
        for edge, count in zip((*map(repr, self._edges), "+Inf"), cumulated, strict=True):
            yield Sample(f"{name}_bucket", {**self._labels, "le": edge}, count)
        yield Sample(f"{name}_count", dict(self._labels), cumulated[-1])
        yield Sample(f"{name}_sum", dict(self._labels), total)


Child = TypeVar("Child", Counter, Gauge, Histogram)


class Instrument(Generic[Child]):
    """One metric: finds or makes the series (child) of a set of label values.

    A new series is checked: a closed label takes only its enum's words, a model and its buckets
    and axes must have been preset. So no label can carry what a client sent (I7).
    """

    def __init__(
        self,
        definition: MetricDef,
        check: Callable[[MetricDef, Labels], None],
        make: Callable[[Labels], Child],
    ) -> None:
        self.definition = definition
        self._check = check
        self._make: Callable[[Labels], Child] = make
        self._children: dict[tuple[str, ...], Child] = {}

    def labels(self, **labels: str) -> Child:
        """Return the series of these labels; keep it where the path is hot."""
        names = self.definition.labels
        if len(labels) != len(names) or any(name not in labels for name in names):
            raise ValueError(
                f"{self.definition.name} has the labels {', '.join(names)}; "
                f"got {', '.join(labels) or 'none'}"
            )
        return self.child(*[labels[name] for name in names])

    def child(self, *values: str) -> Child:
        """Return the series of these label values, in the order of the definition's labels."""
        child = self._children.get(values)
        return self._create(values) if child is None else child

    def remove(self, **labels: str) -> None:
        """Forget a series, if it is there."""
        self._children.pop(tuple(str(labels[name]) for name in self.definition.labels), None)

    def family(self) -> Metric:
        """Return the metric with its series, as Prometheus sees it."""
        family = self.describe()
        children = list(self._children.values())
        family.samples = [s for child in children for s in child.samples(self.definition.name)]
        return family

    def describe(self) -> Metric:
        """Return the metric without series."""
        d = self.definition
        # Prometheus' model names counters and infos without the suffix of their samples.
        name = d.name.removesuffix({"counter": "_total", "info": "_info"}.get(d.kind, ""))
        return Metric(name, d.help, d.kind)

    def _create(self, values: tuple[str, ...]) -> Child:
        key = tuple(str(value) for value in values)
        labels = dict(zip(self.definition.labels, key, strict=True))
        self._check(self.definition, labels)
        # setdefault, so that two threads that create one series share it.
        return self._children.setdefault(key, self._make(labels))


AnyInstrument = Instrument[Counter] | Instrument[Gauge] | Instrument[Histogram]
