"""The identities that hold between metrics when nothing is in flight (invariant I7)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from shapeserve.metrics.catalogue import NO_BUCKET, PREFIX, CompilePhase, CompileStage


def parse_samples(text: str) -> list[Sample]:
    """Return the samples of an exposition, such as the body of ``/metrics``."""
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def identities(samples: Iterable[Sample]) -> list[str]:
    """Return the violated statements, [] if all hold.

    Args:
        samples: of one process or, with their ``replica`` labels, of several; each model of each
            replica is judged by itself, and must be at rest.
    """
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if "model" in sample.labels:
            key = (sample.labels.get("replica", ""), sample.labels["model"])
            groups[key].append(sample)
    return [
        f"{f'replica {replica}, ' if replica else ''}model {model}: {statement}"
        for (replica, model), group in groups.items()
        for statement in _violations(_Sums(group))
    ]


class _Sums:
    """Sums of samples by name and labels."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            self._by_name[sample.name.removeprefix(PREFIX)].append(sample)

    def total(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self._by_name[name] if labels.items() <= s.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for sample in self._by_name[name]:
            sums[sample.labels[label]] += sample.value
        return dict(sums)


def _violations(sums: _Sums) -> Iterator[str]:
    yield from _rows(sums)
    yield from _areas(sums)
    yield from _timings(sums)


def _rows(sums: _Sums) -> Iterator[str]:
    accepted = sums.total("rows_accepted_total")
    answered, dropped = sums.total("rows_total"), sums.total("rows_dropped_total")
    if accepted != answered + dropped:
        yield f"rows accepted {accepted:g} != answered {answered:g} + dropped {dropped:g}"
    for name in ("queue_rows", "queue_tokens"):
        if waiting := sums.total(name):
            yield f"{name} {waiting:g} != 0 at rest"


def _areas(sums: _Sums) -> Iterator[str]:
    """Real + padding = executed areas, bucket by bucket; the fallback's area is not fixed."""
    tokens, batches = sums.by("tokens_total", "bucket"), sums.by("batches_total", "bucket")
    areas = sums.by("bucket_area", "bucket")
    for bucket in sorted(tokens.keys() | batches.keys()):
        executed, ran = tokens.get(bucket, 0), batches.get(bucket, 0)
        if bucket == NO_BUCKET:
            if (executed > 0) != (ran > 0):
                yield f"fallback: {executed:g} tokens in {ran:g} batches"
        elif executed != ran * areas.get(bucket, 0):
            yield (
                f"bucket {bucket}: real + padding {executed:g} != "
                f"{ran:g} batches x area {areas.get(bucket, 0):g}"
            )


def _timings(sums: _Sums) -> Iterator[str]:
    """Each batch and request is timed once; each request-path compile is one recompile."""
    pairs = [
        ("execute_seconds_count", "batches_total", "mode"),
        ("request_seconds_count", "requests_total", "endpoint"),
    ]
    for timed, counted, label in pairs:
        left, right = sums.by(timed, label), sums.by(counted, label)
        for word in sorted(left.keys() | right.keys()):
            if left.get(word, 0) != right.get(word, 0):
                yield (
                    f"{timed}{{{label}={word}}} {left.get(word, 0):g} "
                    f"!= {counted} {right.get(word, 0):g}"
                )
    recompiles = sums.total("recompiles_total")
    compiles = sums.total(
        "compiles_total", stage=CompileStage.DYNAMO.value, phase=CompilePhase.REQUEST.value
    )
    if recompiles != compiles:
        yield f"recompiles {recompiles:g} != compiles in phase request {compiles:g}"
