"""The catalogue, the instruments, the merge of replicas, and the identities (I7)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from shapeserve.metrics import (
    CATALOGUE,
    NO_BUCKET,
    NO_MODEL,
    CompilePhase,
    CompileStage,
    Counter,
    DropReason,
    Endpoint,
    FallbackReason,
    Gauge,
    Histogram,
    MetricDef,
    Metrics,
    Mode,
    Outcome,
    RecompileReason,
    RejectReason,
    identities,
    length_edges,
    merge_texts,
    parse_samples,
    render_docs,
)
from shapeserve.metrics.catalogue import Scope
from shapeserve.metrics.instruments import Record

BUCKETS = ("batch=2,seq=8", "batch=4,seq=16")
AXES = ("batch", "seq")

# The names and labels that dashboards hold on to.
STABLE = """
requests_total{model,endpoint,outcome} rows_accepted_total{model} rows_total{model,mode,bucket}
rows_dropped_total{model,reason} rejected_total{model,reason} tokens_total{model,bucket,kind}
batches_total{model,mode,bucket} device_seconds_total{model,mode,bucket}
fallbacks_total{model,reason} compiles_total{model,stage,phase}
compile_seconds_total{model,stage,phase} recompiles_total{model,reason}
graph_breaks_total{model,reason} eager_frames_total{model,reason}
compile_cache_total{model,result} captures_total{model,outcome} policy_swaps_total{model,result}
nonfinite_rows_total{model} recorded_rows_total{model,result}
variants{model,tier,state} bucket_area{model,bucket}
graph_pool_bytes{model} queue_rows{model} queue_tokens{model} warmup_ratio{model}
warmup_seconds{model} policy_predicted_waste{model,axis}
request_seconds{model,endpoint} queue_seconds{model}
execute_seconds{model,mode} request_length{model,axis} grid_info{model,version}
build_info{version,python,torch,device}
"""


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    made.preset("m", BUCKETS, AXES, max_sizes={"seq": 512})
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"shapeserve_{name}", labels)


def serve_some(metrics: Metrics, *, model: str = "m") -> None:
    """Record one batch, one fallback, one dropped row and the requests around them."""
    metrics.rows_accepted_total.labels(model=model).inc(5)
    tokens = {"real": 10, "padding_seq": 6, "padding_batch": 0}
    metrics.record_batch(model, Mode.EAGER, BUCKETS[0], tokens, 0.01)
    metrics.rows_total.labels(model=model, mode=Mode.EAGER, bucket=BUCKETS[0]).inc(2)
    metrics.record_batch(model, Mode.FALLBACK, NO_BUCKET, {"real": 300, "padding_seq": 4}, 0.02)
    metrics.rows_total.labels(model=model, mode=Mode.FALLBACK, bucket=NO_BUCKET).inc(2)
    metrics.fallbacks_total.labels(model=model, reason=FallbackReason.OVER_MAX).inc(2)
    metrics.rows_dropped_total.labels(model=model, reason=DropReason.CANCELLED).inc()
    for outcome in (Outcome.OK, Outcome.CANCELLED):
        metrics.record_request(model, Endpoint.EMBEDDINGS, outcome, 0.03)


# --- catalogue ---------------------------------------------------------------------------------


def test_names_and_labels_are_the_stable_ones() -> None:
    declared = {f"{d.attribute}{{{','.join(d.labels)}}}" for d in CATALOGUE}
    assert declared == set(STABLE.split())


def test_every_metric_is_a_typed_attribute() -> None:
    child = {"counter": Counter, "gauge": Gauge, "info": Gauge, "histogram": Histogram}
    hints = get_type_hints(Metrics)
    typed = {name: get_args(hint)[0] for name, hint in hints.items()}
    assert typed == {d.attribute: child[d.kind] for d in CATALOGUE}


@pytest.mark.parametrize("d", CATALOGUE, ids=lambda d: d.attribute)
def test_definition_follows_the_conventions(d: MetricDef) -> None:
    assert re.fullmatch(r"shapeserve_[a-z_]+", d.name)
    assert d.name.endswith("_total") == (d.kind == "counter")
    assert d.name.endswith("_info") == (d.kind == "info")
    assert (d.kind == "histogram") == bool(d.buckets)
    assert list(d.buckets) == sorted(set(d.buckets))
    assert d.help.endswith(".")
    assert "replica" not in d.labels  # the merge adds it
    if any(source is not Scope.BUILD for source in d.sources.values()):
        assert d.labels[0] == "model"


@given(max_size=st.integers(1, 10_000_000))
def test_length_edges_end_at_the_maximum_and_are_at_most_144(max_size: int) -> None:
    edges = length_edges(max_size)
    assert list(edges) == sorted(set(edges))
    assert edges[-1] == max_size
    assert len(edges) <= 144
    assert set(edges) >= {float(size) for size in range(1, min(max_size, 32) + 1)}


@given(max_size=st.integers(512, 10_000_000), size=st.integers(1, 512))
def test_a_size_to_512_is_taken_for_hardly_more_than_it_is(max_size: int, size: int) -> None:
    taken = min(edge for edge in length_edges(max_size) if edge >= size)
    assert taken < size * (1 + 1 / 16)


def test_length_edges_above_512_grow_by_at_most_the_ratio() -> None:
    long = [e for e in length_edges(32_768) if e >= 512]
    assert all(b / a <= 1.15 + 1 / a for a, b in pairwise(long))


def test_length_edges_refuse_a_maximum_below_1() -> None:
    with pytest.raises(ValueError, match="max_size=0 must be at least 1"):
        length_edges(0)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.OK),
        (304, Outcome.OK),
        (400, Outcome.CLIENT_ERROR),
        (413, Outcome.CLIENT_ERROR),
        (429, Outcome.OVERLOADED),
        (499, Outcome.CANCELLED),
        (500, Outcome.SERVER_ERROR),
        (503, Outcome.UNAVAILABLE),
        (504, Outcome.DEADLINE),
    ],
)
def test_outcome_of_status(status: int, outcome: Outcome) -> None:
    assert Outcome.of_status(status) is outcome


# --- preset and labels -------------------------------------------------------------------------


def test_every_closed_series_is_there_at_0_before_traffic(metrics: Metrics) -> None:
    present = {s.name.removeprefix("shapeserve_") for s in metrics.samples()}
    for d in CATALOGUE:
        if d.kind == "histogram":
            assert f"{d.attribute}_count" in present
        elif d.kind != "info":
            assert d.attribute in present
    assert all(s.value == 0 for s in metrics.samples() if not s.name.endswith("bucket_area"))
    for reason in DropReason:
        assert value(metrics, "rows_dropped_total", model="m", reason=reason) == 0
    for bucket in BUCKETS:
        assert value(metrics, "rows_total", model="m", mode="graph", bucket=bucket) == 0
        assert value(metrics, "tokens_total", model="m", bucket=bucket, kind="padding_seq") == 0
    assert value(metrics, "rejected_total", model=NO_MODEL, reason=RejectReason.INVALID) == 0


def test_preset_leaves_out_what_cannot_happen(metrics: Metrics) -> None:
    assert value(metrics, "rows_total", model="m", mode="fallback", bucket=BUCKETS[0]) is None
    assert value(metrics, "rows_total", model="m", mode="eager", bucket=NO_BUCKET) is None
    assert value(metrics, "bucket_area", model="m", bucket=NO_BUCKET) is None
    unnamed = {"endpoint": "models", "outcome": "ok"}
    assert value(metrics, "requests_total", model="m", **unnamed) is None
    assert value(metrics, "requests_total", model=NO_MODEL, **unnamed) == 0


def test_preset_makes_only_the_modes_of_the_platform() -> None:
    metrics = Metrics()
    metrics.preset("m", BUCKETS, AXES, modes=(Mode.COMPILED, Mode.FALLBACK))
    modes = {s.labels["mode"] for s in metrics.samples() if "mode" in s.labels}
    assert modes == {"compiled", "fallback"}


def test_preset_of_a_new_grid_adds_buckets_and_keeps_counts(metrics: Metrics) -> None:
    serve_some(metrics)
    metrics.preset("m", ("batch=8,seq=32",), AXES)
    assert value(metrics, "rows_total", model="m", mode="eager", bucket=BUCKETS[0]) == 2
    assert value(metrics, "rows_total", model="m", mode="eager", bucket="batch=8,seq=32") == 0
    assert value(metrics, "bucket_area", model="m", bucket=BUCKETS[0]) == 16
    assert value(metrics, "bucket_area", model="m", bucket="batch=8,seq=32") == 256
    assert identities(metrics.samples()) == []


def test_rows_of_the_old_grid_are_still_counted_after_a_swap() -> None:
    metrics = Metrics()
    metrics.preset("m", BUCKETS, AXES, modes=(Mode.COMPILED,))
    metrics.preset("m", ("batch=8,seq=32",), AXES)
    metrics.rows_total.labels(model="m", mode=Mode.GRAPH, bucket=BUCKETS[0]).inc()
    assert value(metrics, "rows_total", model="m", mode="graph", bucket=BUCKETS[0]) == 1


def test_bucket_area_is_the_product_of_all_axes() -> None:
    metrics = Metrics()
    metrics.preset("v", ("batch=2,height=32,width=64",), ("batch", "height", "width"))
    bucket = {"model": "v", "bucket": "batch=2,height=32,width=64"}
    assert value(metrics, "bucket_area", **bucket) == 4096
    assert value(metrics, "tokens_total", kind="padding_width", **bucket) == 0


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("rows_dropped_total", {"model": "m", "reason": "because"}),
        ("rows_total", {"model": "m", "mode": "eager", "bucket": "batch=3,seq=77"}),
        ("tokens_total", {"model": "m", "bucket": BUCKETS[0], "kind": "padding_height"}),
        ("request_length", {"model": "m", "axis": "height"}),
        ("rejected_total", {"model": "named by a client", "reason": "invalid"}),
        ("requests_total", {"model": "m", "endpoint": "/etc/passwd", "outcome": "ok"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_label_outside_its_closed_set_is_refused(
    metrics: Metrics, name: str, labels: dict[str, str]
) -> None:
    before = len(metrics.samples())
    with pytest.raises(ValueError, match="is not allowed"):
        getattr(metrics, name).labels(**labels)
    assert len(metrics.samples()) == before


def test_the_refusal_names_metric_value_and_remedy(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match=r"rows_total: mode='fast' .* use a member of Mode"):
        metrics.rows_total.labels(model="m", mode="fast", bucket=NO_BUCKET)
    with pytest.raises(ValueError, match=r"queue_rows: model='x' .* call Metrics.preset"):
        metrics.queue_rows.labels(model="x")


@pytest.mark.parametrize("labels", [{}, {"model": "m", "reason": "x"}, {"modle": "m"}])
def test_wrong_label_names_are_refused(metrics: Metrics, labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="queue_rows has the labels model"):
        metrics.queue_rows.labels(**labels)


def test_words_of_an_enum_and_their_text_name_one_series(metrics: Metrics) -> None:
    by_word = metrics.execute_seconds.labels(model="m", mode=Mode.EAGER)
    assert metrics.execute_seconds.labels(mode="eager", model="m") is by_word
    assert metrics.execute_seconds.child("m", "eager") is by_word


def test_lengths_use_the_edges_of_their_own_model(metrics: Metrics) -> None:
    metrics.preset("long", BUCKETS, AXES, max_sizes={"seq": 4096})
    for model, last in (("m", "512.0"), ("long", "4096.0")):
        metrics.request_length.labels(model=model, axis="seq").observe(1000)
        edges = [
            s.labels["le"]
            for s in metrics.samples()
            if s.name == "shapeserve_request_length_bucket" and s.labels["model"] == model
        ]
        assert edges[-2:] == [last, "+Inf"]
    labels = {"axis": "seq", "le": "512.0"}
    assert value(metrics, "request_length_bucket", model="m", **labels) == 0
    assert value(metrics, "request_length_count", model="m", axis="seq") == 1


def test_lengths_have_no_batch_axis(metrics: Metrics) -> None:
    assert value(metrics, "request_length_count", model="m", axis="batch") is None


# --- instruments -------------------------------------------------------------------------------


def test_counter_refuses_to_shrink(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="cannot be increased by -1"):
        metrics.rows_accepted_total.labels(model="m").inc(-1)


def test_histogram_counts_a_value_on_an_edge_below_it(metrics: Metrics) -> None:
    series = metrics.request_length.labels(model="m", axis="seq")
    for length in (8, 9, 10_000):
        series.observe(length)
    at = {"model": "m", "axis": "seq"}
    assert value(metrics, "request_length_bucket", le="8.0", **at) == 1
    assert value(metrics, "request_length_bucket", le="16.0", **at) == 2
    assert value(metrics, "request_length_bucket", le="512.0", **at) == 2
    assert value(metrics, "request_length_bucket", le="+Inf", **at) == 3
    assert value(metrics, "request_length_sum", **at) == 10_017


def test_gauge_sets_and_moves_both_ways(metrics: Metrics) -> None:
    rows = metrics.queue_rows.labels(model="m")
    rows.set(5)
    rows.inc(-2)
    assert value(metrics, "queue_rows", model="m") == 3


def test_a_new_grid_version_replaces_the_old_one(metrics: Metrics) -> None:
    for version in ("aa", "bb", "bb"):
        metrics.set_grid_version("m", version)
    versions = [s.labels["version"] for s in metrics.samples() if s.name.endswith("grid_info")]
    assert versions == ["bb"]


class SlowToAdd(float):
    """A number that lets another thread run in the middle of an addition."""

    def __radd__(self, other: float) -> float:
        time.sleep(0.0001)
        return other + float(self)


def test_threads_lose_no_increment(metrics: Metrics) -> None:
    series = metrics.rows_accepted_total.labels(model="m")

    def work() -> None:
        for _ in range(50):
            series.inc(SlowToAdd(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(metrics, "rows_accepted_total", model="m") == 200


def test_two_catalogues_do_not_fit_one_registry() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(registry)


class FakeMirror:
    """Keeps every change as (metric, value, labels)."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}
        self.changes: list[tuple[str, float, dict[str, str]]] = []

    def _record(self, kind: str, d: MetricDef) -> Record:
        self.made[d.attribute] = kind

        def record(value: float, labels: Mapping[str, str]) -> None:
            self.changes.append((d.attribute, value, dict(labels)))

        return record

    def counter(self, definition: MetricDef) -> Record:
        return self._record("counter", definition)

    def gauge(self, definition: MetricDef) -> Record:
        return self._record("gauge", definition)

    def histogram(self, definition: MetricDef) -> Record:
        return self._record("histogram", definition)


def test_mirror_gets_every_change_and_no_zero_increment() -> None:
    mirror = FakeMirror()
    metrics = Metrics(mirror=mirror)
    kinds = {"info": "gauge"}
    assert mirror.made == {d.attribute: kinds.get(d.kind, d.kind) for d in CATALOGUE}
    metrics.preset("m", BUCKETS[:1], AXES)
    assert {name for name, _, _ in mirror.changes} == {"bucket_area"}
    mirror.changes.clear()
    metrics.rows_accepted_total.labels(model="m").inc(3)
    metrics.rows_accepted_total.labels(model="m").inc(0)
    metrics.queue_rows.labels(model="m").set(0)
    metrics.queue_seconds.labels(model="m").observe(0.5)
    assert mirror.changes == [
        ("rows_accepted_total", 3, {"model": "m"}),
        ("queue_rows", 0, {"model": "m"}),
        ("queue_seconds", 0.5, {"model": "m"}),
    ]


def test_mirror_sees_the_old_grid_version_go() -> None:
    mirror = FakeMirror()
    metrics = Metrics(mirror=mirror)
    metrics.preset("m", BUCKETS, AXES)
    mirror.changes.clear()
    metrics.set_grid_version("m", "aa")
    metrics.set_grid_version("m", "bb")
    seen = [(v, labels["version"]) for _, v, labels in mirror.changes]
    assert seen == [(1, "aa"), (0, "aa"), (1, "bb")]


# --- exposition and merge ----------------------------------------------------------------------


def test_text_has_every_metric_after_traffic_with_its_own_type(metrics: Metrics) -> None:
    serve_some(metrics)
    metrics.set_grid_version("m", "aa")
    metrics.build_info.labels(version="0", python="3", torch="2", device="cpu").set(1)
    families = {f.name: f for f in text_string_to_metric_families(metrics.text())}
    for d in CATALOGUE:
        family = families[d.name.removesuffix("_total")]
        assert family.type == {"info": "gauge"}.get(d.kind, d.kind)
        assert family.documentation == d.help
        assert family.samples
    assert not [name for name in families if name.endswith("_created")]


def test_merge_keeps_every_sample_and_adds_the_replica(metrics: Metrics) -> None:
    serve_some(metrics)
    other = Metrics()
    other.preset("m", BUCKETS[:1], AXES)
    parts = {"r1": metrics.text(), "r2": other.text()}
    merged = parse_samples(merge_texts(parts))
    for replica, text in parts.items():
        expected = [
            (s.name, {**s.labels, "replica": replica}, s.value) for s in parse_samples(text)
        ]
        got = [(s.name, s.labels, s.value) for s in merged if s.labels["replica"] == replica]
        assert got == expected


def test_merge_groups_each_metric_once_and_keeps_its_type(metrics: Metrics) -> None:
    text = merge_texts({"r1": metrics.text(), "r2": metrics.text()})
    types = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    kinds = {d.name: {"info": "gauge"}.get(d.kind, d.kind) for d in CATALOGUE}
    assert len(types) == len(CATALOGUE)
    assert dict(types) == kinds
    assert len(re.findall("^# HELP ", text, re.MULTILINE)) == len(CATALOGUE)


UNREADABLE = {
    "did not answer": None,
    "empty": "",
    "html": "<html>502 Bad Gateway</html>\n",
    "cut off in a line": '# HELP a b\n# TYPE a gauge\na{model="m',
    "cut off in a value": '# TYPE a gauge\na{model="m"} 12',
    "cut off at a label": '# HELP a b\n# TYPE a gauge\na{model="m"} 1\na{mod\n',
    "no value": "# TYPE a gauge\na{} one\n",
    "two replicas mixed up": "# TYPE a gauge\nb 1\n",
    "open quote": '# TYPE a gauge\na{x="y} 1\n',
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_merge_survives_a_replica_without_a_readable_text(
    metrics: Metrics, text: str | None
) -> None:
    merged = merge_texts({"dead": text, "alive": metrics.text()})
    samples = parse_samples(merged)
    assert {s.labels["replica"] for s in samples} == {"alive"}
    assert len(samples) == len(metrics.samples())
    assert "# no metrics from replica dead\n" in merged


def test_merge_of_no_readable_replica_is_still_an_exposition() -> None:
    assert parse_samples(merge_texts({"a": None})) == []
    assert merge_texts({}) == ""


@pytest.mark.parametrize(
    "model", ['say "hi"', "back\\slash", "a{b}, c=d", "new\nline", "ü 漢\u2028x"]
)
def test_merge_escapes_what_a_model_or_replica_may_be_called(model: str) -> None:
    metrics = Metrics()
    metrics.preset(model, (), ())
    metrics.rows_accepted_total.labels(model=model).inc(7)
    samples = parse_samples(merge_texts({model: metrics.text()}))
    accepted = [s for s in samples if s.name == "shapeserve_rows_accepted_total"]
    assert [(s.labels, s.value) for s in accepted] == [({"model": model, "replica": model}, 7)]


# --- identities --------------------------------------------------------------------------------


def test_i7_identities_hold_at_rest(metrics: Metrics) -> None:
    assert identities(metrics.samples()) == []
    serve_some(metrics)
    assert identities(metrics.samples()) == []
    assert identities(parse_samples(merge_texts({"a": metrics.text(), "b": metrics.text()}))) == []


def test_i7_each_executed_attempt_counts_its_area_and_a_retried_row_once(metrics: Metrics) -> None:
    metrics.rows_accepted_total.labels(model="m").inc(2)
    for _ in range(3):  # one batch of two rows failed, then each row alone
        tokens = {"real": 9, "padding_seq": 2, "padding_batch": 5}
        metrics.record_batch("m", Mode.EAGER, BUCKETS[0], tokens, 0.01)
    metrics.rows_total.labels(model="m", mode=Mode.EAGER, bucket=BUCKETS[0]).inc()
    metrics.rows_dropped_total.labels(model="m", reason=DropReason.FAILED).inc()
    ran = {"model": "m", "mode": "eager"}
    assert value(metrics, "batches_total", bucket=BUCKETS[0], **ran) == 3
    assert value(metrics, "device_seconds_total", bucket=BUCKETS[0], **ran) == pytest.approx(0.03)
    assert value(metrics, "execute_seconds_count", **ran) == 3
    assert identities(metrics.samples()) == []


def lost_row(m: Metrics) -> None:
    m.rows_accepted_total.labels(model="m").inc()


def left_in_queue(m: Metrics) -> None:
    m.queue_tokens.labels(model="m").set(8)


def padding_forgotten(m: Metrics) -> None:
    m.record_batch("m", Mode.EAGER, BUCKETS[0], {"real": 10}, 0.01)


def fallback_without_tokens(m: Metrics) -> None:
    m.record_batch("m", Mode.FALLBACK, NO_BUCKET, {}, 0.01)


def batch_not_timed(m: Metrics) -> None:
    m.batches_total.labels(model="m", mode=Mode.FALLBACK, bucket=NO_BUCKET).inc()
    m.tokens_total.labels(model="m", bucket=NO_BUCKET, kind="real").inc()


def request_not_timed(m: Metrics) -> None:
    m.requests_total.labels(model="m", endpoint=Endpoint.EMBEDDINGS, outcome=Outcome.OK).inc()


def recompile_not_a_compile(m: Metrics) -> None:
    m.recompiles_total.labels(model="m", reason=RecompileReason.SHAPE).inc()


@pytest.mark.parametrize(
    ("breach", "statement"),
    [
        (lost_row, "rows accepted 1 != answered 0 + dropped 0"),
        (left_in_queue, "queue_tokens 8 != 0 at rest"),
        (padding_forgotten, f"bucket {BUCKETS[0]}: real + padding 10 != 1 batches x area 16"),
        (fallback_without_tokens, "fallback: 0 tokens in 1 batches"),
        (batch_not_timed, "execute_seconds_count{mode=fallback} 0 != batches_total 1"),
        (request_not_timed, "request_seconds_count{endpoint=embeddings} 0 != requests_total 1"),
        (recompile_not_a_compile, "recompiles 1 != compiles in phase request 0"),
    ],
)
def test_i7_a_breach_is_named(
    metrics: Metrics, breach: Callable[[Metrics], None], statement: str
) -> None:
    metrics.preset("sound", BUCKETS, AXES)
    breach(metrics)
    assert identities(metrics.samples()) == [f"model m: {statement}"]
    merged = parse_samples(merge_texts({"r1": metrics.text()}))
    assert identities(merged) == [f"replica r1, model m: {statement}"]


def test_i7_a_counted_recompile_is_a_dynamo_compile_in_phase_request(metrics: Metrics) -> None:
    metrics.recompiles_total.labels(model="m", reason=RecompileReason.SHAPE).inc()
    for stage in CompileStage:
        metrics.compiles_total.labels(model="m", stage=stage, phase=CompilePhase.REQUEST).inc()
    assert identities(metrics.samples()) == []


# --- documentation -----------------------------------------------------------------------------


def test_docs_are_current() -> None:
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    assert page.read_text() == render_docs(), "run: python -m shapeserve.metrics > docs/metrics.md"


def test_queries_in_the_docs_name_only_metrics_of_the_catalogue() -> None:
    suffixes = {"histogram": ("", "_bucket", "_count", "_sum")}
    names = {d.name + suffix for d in CATALOGUE for suffix in suffixes.get(d.kind, ("",))}
    used = set(re.findall(r"\bshapeserve_[a-z_]+\b", render_docs()))
    assert used <= names
