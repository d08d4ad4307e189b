"""A real Prometheus scrapes a live service, and every rule, alert and panel gives the true number.

The committed expressions run as they are: the whole traffic lies within the shortest window, and
they are evaluated at the time of a scrape of the quiet service, where ``rate`` has nothing to
extrapolate. So a rate is the count divided by the window.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from engines import text_config
from frontend_server import serving
from prometheus_process import (
    MONITORING,
    Labels,
    Prometheus,
    committed_config,
    labels,
    needs_prometheus,
)
from service_process import eventually
from tiny import text_of, write_model

from shapeserve.config import parse_policy
from shapeserve.engine import Engine
from shapeserve.errors import ConfigError
from shapeserve.metrics import (
    CATALOGUE,
    NO_MODEL,
    Endpoint,
    FallbackReason,
    Metrics,
    Mode,
    Outcome,
    RejectReason,
    length_edges,
    merge_texts,
    parse_samples,
)
from shapeserve.metrics.catalogue import Scope
from shapeserve.monitoring import Targets, rule_groups
from shapeserve.monitoring.__main__ import RUNBOOKS

pytestmark = needs_prometheus

MODEL = "tiny"
SIZES, BATCH, LONGEST = (8, 16, 24), 2, 48
FALLBACK_ALIGN = 8  # what a fallback pads to
# Lengths of the rows of each request. Sent one after the other, and rows of two buckets never share
# a batch, so the batches follow from the lengths.
TRAFFIC = [[5], [8], [9, 10], [16], [3, 20], [3], [30], [9], [4], [17], [25], [3], [3], [9]] * 5
# Requests that are turned away before it is known which model they are for.
UNREAD = [(RejectReason.QUEUE_BYTES, Outcome.OVERLOADED)] * 2
UNREAD += [(RejectReason.UNAVAILABLE, Outcome.UNAVAILABLE)]
PREDICTED = 0.05  # by the policy: less than the traffic pads
M, NONE = labels(model=MODEL), labels(model=NO_MODEL)
RULES = rule_groups("metrics", Targets(), RUNBOOKS)["groups"][0]["rules"]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARD = json.loads((MONITORING.parent / "grafana" / "dashboard.json").read_text())
PANEL_QUERIES = [
    pytest.param(
        panel["title"], target["refId"], target["expr"], id=panel["title"] + target["refId"]
    )
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
WINDOW_S = {"5m": 300, "15m": 900, "30m": 1800, "1h": 3600, "6h": 21600}


@dataclass
class Ledger:
    """What the traffic must come to, from its lengths and the grid alone."""

    tokens: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    rows: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)

    def request(self, lengths: list[int]) -> None:
        for size in SIZES:
            rows = [n for n in lengths if min(s for s in (*SIZES, LONGEST) if s >= n) == size]
            if rows:
                padding = {
                    "padding_seq": sum(size - n for n in rows),
                    "padding_batch": (BATCH - len(rows)) * size,
                }
                self._batch(f"batch={BATCH},seq={size}", rows, padding)
        for n in lengths:
            if n > SIZES[-1]:
                self._batch("none", [n], {"padding_seq": -n % FALLBACK_ALIGN})
        self.lengths += lengths

    def _batch(self, bucket: str, rows: list[int], padding: Mapping[str, int]) -> None:
        self.tokens[bucket] += Counter({"real": sum(rows), **padding})
        self.rows[bucket] += len(rows)
        self.batches[bucket] += 1

    def total(self, *kinds: str) -> int:
        return sum(n for tokens in self.tokens.values() for k, n in tokens.items() if k in kinds)

    @property
    def executed(self) -> int:
        return self.total("real", "padding_seq", "padding_batch")

    @property
    def waste(self) -> float:
        return self.total("padding_seq", "padding_batch") / self.executed


class Raw:
    """The counters of the quiet service, as it says them."""

    def __init__(self, text: str) -> None:
        self.samples = parse_samples(text)

    def by(self, label: str, name: str, **where: str) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for s in self.samples:
            if (
                s.name == f"shapeserve_{name}"
                and {"model": MODEL, **where}.items() <= s.labels.items()
            ):
                found[s.labels[label]] += s.value
        return dict(found)

    def total(self, name: str, **where: str) -> float:
        return sum(self.by("model", name, **where).values())

    def quantile(self, q: float, name: str) -> float:
        """As Prometheus defines it: linear between the edges around it."""
        edges = sorted((float(le), n) for le, n in self.by("le", f"{name}_bucket").items())
        rank, below, edge = q * edges[-1][1], 0.0, 0.0
        for le, count in edges:
            if count >= rank:
                return edge + (le - edge) * (rank - below) / (count - below)
            below, edge = count, le
        raise AssertionError(name)


@dataclass
class Lab:
    """A service that has served ``TRAFFIC``, and what watched it."""

    prometheus: Prometheus
    url: str
    engine: Engine
    ledger: Ledger
    raw: Raw
    at_s: float

    def ask(self, expr: str) -> dict[Labels, float]:
        return self.prometheus.query(expr, self.at_s)


def incidents(metrics: Metrics, engine: Engine) -> None:
    """What traffic must not cause, recorded as the service would; a swap really fails."""
    metrics.recompiles_total.child(MODEL, "shape").inc(2)
    metrics.eager_frames_total.child(MODEL, "recompile_limit").inc(5)
    metrics.nonfinite_rows_total.child(MODEL).inc()
    for _ in range(3):
        metrics.rejected_total.child(MODEL, RejectReason.QUEUE_FULL).inc()
        metrics.record_request(MODEL, Endpoint.EMBEDDINGS, Outcome.OVERLOADED, 0.001)
    for reason, outcome in UNREAD:
        metrics.rejected_total.child(NO_MODEL, reason).inc()
        metrics.record_request(NO_MODEL, Endpoint.EMBEDDINGS, outcome, 0.001)
    metrics.variants.child(MODEL, "compiled", "degraded").set(1)
    metrics.graph_pool_bytes.child(MODEL).set(1 << 20)
    metrics.queue_rows.child(MODEL).set(7)
    metrics.policy_predicted_waste.child(MODEL, "seq").set(PREDICTED)
    with pytest.raises(ConfigError):
        engine.swap_policy(parse_policy({"seq": {"explicit": [4096]}, "batch": {"explicit": [2]}}))


def embed(http: httpx.Client, lengths: list[int]) -> httpx.Response:
    texts = [text_of(n, seed) for seed, n in enumerate(lengths)]
    return http.post("/v1/embeddings", json={"model": MODEL, "input": texts})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    policy = {"seq": {"explicit": list(SIZES)}, "batch": {"explicit": [BATCH]}}
    model = write_model(tmp_path_factory.mktemp("model"))
    config = text_config(model, name=MODEL, policy=policy, compile={"tier": "eager"})
    engine = Engine(config).start()
    ledger = Ledger()
    with serving({MODEL: engine}) as address:
        scraped = committed_config("single-node.yml", [address])
        prometheus = Prometheus(scraped, tmp_path_factory.mktemp("prometheus"))
        try:
            prometheus.await_scrapes("shapeserve", 1)
            with httpx.Client(base_url=f"http://{address}", timeout=60) as http:
                for lengths in TRAFFIC:
                    assert embed(http, lengths).status_code == 200
                    ledger.request(lengths)
                blank = http.post("/v1/embeddings", json={"model": MODEL, "input": ""})
                assert blank.status_code == 400
                incidents(engine.metrics, engine)
                text = http.get("/metrics").text
            at_s = prometheus.await_scrapes("shapeserve", 2)
            yield Lab(prometheus, f"http://{address}", engine, ledger, Raw(text), at_s)
        finally:
            prometheus.stop()
            engine.close()


# --- waste ---------------------------------------------------------------------------------------


def test_the_counters_are_what_lengths_and_grid_come_to(lab: Lab) -> None:
    assert lab.raw.total("tokens_total") == lab.ledger.executed
    for bucket, tokens in lab.ledger.tokens.items():
        counted = lab.raw.by("kind", "tokens_total", bucket=bucket)
        assert counted == {"real": 0, "padding_seq": 0, "padding_batch": 0} | tokens
    counted = lab.raw.total("tokens_total") - lab.raw.total("tokens_total", kind="real")
    assert counted / lab.raw.total("tokens_total") == pytest.approx(lab.ledger.waste, rel=1e-9)


def test_what_prometheus_holds_is_what_the_service_says(lab: Lab) -> None:
    total = lab.ask("sum by (bucket, kind) (shapeserve_tokens_total)")
    assert total == {
        labels(bucket=bucket, kind=kind): n
        for bucket in {s.labels["bucket"] for s in lab.raw.samples if "bucket" in s.labels}
        for kind, n in lab.raw.by("kind", "tokens_total", bucket=bucket).items()
    }


# --- every rule, alert and panel -----------------------------------------------------------------


def rates(
    counts: Mapping[str, float], label: str, window_s: float = 300, of: Labels = M
) -> dict[Labels, float]:
    return {of | labels(**{label: word}): n / window_s for word, n in counts.items()}


def by_axis(lab: Lab) -> dict[Labels, float]:
    return {
        M | labels(axis=axis): lab.ledger.total(f"padding_{axis}") / lab.ledger.executed
        for axis in ("seq", "batch")
    }


def of_rows(lab: Lab) -> dict[Labels, float]:
    padded = lab.ledger.total("padding_seq")
    return {M | labels(axis="seq"): padded / (lab.ledger.total("real") + padded)}


def wasted_by_bucket(lab: Lab) -> dict[str, float]:
    return {b: 1 - t["real"] / sum(t.values()) for b, t in lab.ledger.tokens.items()}


def padding_seconds(lab: Lab) -> float:
    took = lab.raw.by("bucket", "device_seconds_total")
    return sum(took[bucket] * share for bucket, share in wasted_by_bucket(lab).items()) / 300


def failed(_: Lab) -> dict[Labels, float]:
    return {M: 3 / (len(TRAFFIC) + 3), NONE: 3 / (len(TRAFFIC) + 3 + 3)}


def slow(lab: Lab) -> float:
    fast = lab.raw.total("request_seconds_bucket", le="0.25")
    return 1 - fast / lab.raw.total("request_seconds_count")


def refused(_: Lab) -> dict[Labels, float]:
    return {M: 3 / (len(TRAFFIC) + 4), NONE: 2 / (len(TRAFFIC) + 4 + 3)}


def fallbacks(lab: Lab) -> float:
    return lab.ledger.rows["none"] / len(lab.ledger.lengths)


def device_seconds(lab: Lab) -> float:
    return lab.raw.total("device_seconds_total") / 300


Expected = Callable[[Lab], float | dict[Labels, float]]

RECORDS: dict[str, Expected] = {
    "model_axis:shapeserve_padding_waste:ratio_rate5m": by_axis,
    "model_axis:shapeserve_row_padding_waste:ratio_rate1h": of_rows,
    "model:shapeserve_padding_waste:ratio_rate5m": lambda lab: lab.ledger.waste,
    "model:shapeserve_padding_device_seconds:rate5m": padding_seconds,
    "model:shapeserve_device_busy:ratio_rate5m": device_seconds,
    "model:shapeserve_fallback:ratio_rate5m": fallbacks,
    "model:shapeserve_recompiles:rate5m": lambda lab: 2 / 300,
    "model:shapeserve_refused:ratio_rate5m": refused,
    "model:shapeserve_queue_seconds:p95_rate5m": lambda lab: lab.raw.quantile(
        0.95, "queue_seconds"
    ),
    "shapeserve_replicas:count": lambda lab: {labels(): 1},
    **{
        f"model:shapeserve_failed_requests:ratio_rate{w}": failed for w in ("5m", "30m", "1h", "6h")
    },
    **{f"model:shapeserve_slow_requests:ratio_rate{w}": slow for w in ("5m", "30m", "1h", "6h")},
}


def agree(found: dict[Labels, float], expected: float | dict[Labels, float]) -> None:
    wanted = expected if isinstance(expected, dict) else {M: expected}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_gives_the_number_that_the_traffic_implies(lab: Lab, name: str) -> None:
    agree(lab.ask(RECORDED[name]), RECORDS[name](lab))


def outcomes(lab: Lab) -> dict[Labels, float]:
    counts = dict.fromkeys(Outcome, 0) | {"ok": len(TRAFFIC), "overloaded": 3, "client_error": 1}
    unread = dict.fromkeys(Outcome, 0) | Counter(outcome for _, outcome in UNREAD)
    return rates(counts, "outcome") | rates(unread, "outcome", of=NONE)


def rejected(_: Lab) -> dict[Labels, float]:
    counts = dict.fromkeys(RejectReason, 0) | {"queue_full": 3, "invalid": 1}
    unread = dict.fromkeys(RejectReason, 0) | Counter(reason for reason, _ in UNREAD)
    return rates(counts, "reason") | rates(unread, "reason", of=NONE)


def reasons(name: str, **counts: int) -> dict[Labels, float]:
    """Every word of a closed label, at 0 where not given; counted, not per second."""
    (definition,) = (d for d in CATALOGUE if d.attribute == name)
    label = definition.labels[-1]
    words: Any = definition.sources[label]
    return rates(dict.fromkeys(words, 0) | counts, label, window_s=1)


def lengths(lab: Lab) -> dict[Labels, float]:
    edges = [str(edge) for edge in length_edges(LONGEST)] + ["+Inf"]
    return {labels(le=le): sum(n <= float(le) for n in lab.ledger.lengths) for le in edges}


def predicted(_: Lab) -> dict[Labels, float]:
    return {M | labels(axis="seq"): PREDICTED}


def buckets(counts: Mapping[str, float]) -> dict[str, float]:
    return {f"batch={BATCH},seq={size}": 0.0 for size in SIZES} | {"none": 0.0} | dict(counts)


PANELS: dict[tuple[str, str], Expected] = {
    ("Requests/s", "A"): lambda lab: (len(TRAFFIC) + 4) / 300,
    ("Failed requests", "A"): failed,
    ("p99", "A"): lambda lab: lab.raw.quantile(0.99, "request_seconds"),
    ("Padding waste", "A"): lambda lab: lab.ledger.waste,
    ("Recompiles after ready", "A"): lambda lab: 2,
    ("Replicas", "A"): lambda lab: 1,
    ("Requests by outcome", "A"): outcomes,
    ("Latency", "A"): lambda lab: lab.raw.quantile(0.5, "request_seconds"),
    ("Latency", "B"): lambda lab: lab.raw.quantile(0.95, "request_seconds"),
    ("Latency", "C"): lambda lab: lab.raw.quantile(0.99, "request_seconds"),
    ("Padding waste by axis", "A"): by_axis,
    ("Rows by mode", "A"): lambda lab: rates(
        {
            Mode.EAGER: len(lab.ledger.lengths) - lab.ledger.rows["none"],
            Mode.FALLBACK: lab.ledger.rows["none"],
        },
        "mode",
    ),
    ("Recompiles and eager calls", "A"): lambda lab: reasons("recompiles_total", shape=2),
    ("Recompiles and eager calls", "B"): lambda lab: reasons(
        "eager_frames_total", recompile_limit=5
    ),
    ("Warm-up and degraded variants", "A"): lambda lab: 1,
    ("Warm-up and degraded variants", "B"): lambda lab: 1 / (len(SIZES) + 1),
    ("Queue", "A"): lambda lab: 7,
    ("Wait and device", "A"): lambda lab: lab.raw.quantile(0.95, "queue_seconds"),
    ("Wait and device", "B"): lambda lab: lab.raw.quantile(0.95, "execute_seconds"),
    ("Device busy", "A"): device_seconds,
    ("Rejected by reason", "A"): rejected,
    ("Memory of captured graphs", "A"): lambda lab: {M | labels(replica="r"): 1 << 20},
    ("Non-finite rows, failed swaps", "A"): lambda lab: 1,
    ("Non-finite rows, failed swaps", "B"): lambda lab: reasons("policy_swaps_total", rejected=1),
    ("Lengths along $axis", "A"): lengths,
    ("Predicted and measured waste", "A"): of_rows,
    ("Predicted and measured waste", "B"): predicted,
    ("Waste by bucket", "A"): lambda lab: rates(wasted_by_bucket(lab), "bucket", window_s=1),
    ("Device seconds by bucket", "A"): lambda lab: rates(
        lab.raw.by("bucket", "device_seconds_total"), "bucket"
    ),
    ("Rows by bucket", "A"): lambda lab: rates(buckets(lab.ledger.rows), "bucket"),
    ("Device seconds spent on padding", "A"): padding_seconds,
    ("Fallbacks by reason", "A"): lambda lab: rates(
        dict.fromkeys(FallbackReason, 0) | {FallbackReason.OVER_MAX: lab.ledger.rows["none"]},
        "reason",
        window_s=len(lab.ledger.lengths),
    ),
    ("Rows in a batch", "A"): lambda lab: len(lab.ledger.lengths) / lab.ledger.batches.total(),
}


def as_grafana_sends(expr: str) -> str:
    """A panel's query with its variables filled in."""
    chosen = {"${prefix}": "shapeserve_", "$rate": "5m", "$__range": "5m"}
    for name, value in (chosen | {"$model": MODEL, "$axis": "seq"}).items():
        expr = expr.replace(name, value)
    return expr


@pytest.mark.parametrize(("title", "ref", "expr"), PANEL_QUERIES)
def test_a_panel_shows_the_number_that_the_traffic_implies(
    lab: Lab, title: str, ref: str, expr: str
) -> None:
    agree(lab.ask(as_grafana_sends(expr)), PANELS[title, ref](lab))


def with_records_inlined(expr: str) -> str:
    """An alert's expression over the raw series, so that it can be asked at one moment."""
    for name, recorded in RECORDED.items():
        expr = re.sub(rf"{name}\[(\w+)\]", lambda m, r=recorded: f"({r})[{m[1]}:1s]", expr)
        expr = re.sub(rf"{name}(?![\w:])", lambda m, r=recorded: f"({r})", expr)
    return expr


def test_the_alerts_whose_bounds_the_traffic_exceeds_fire_and_no_other(lab: Lab) -> None:
    targets = Targets()
    exceeded = {
        "PaddingWaste": lab.ledger.waste > targets.padding_waste,
        "FallbackShare": fallbacks(lab) > targets.fallback_share,
        "RequestsRefused": refused(lab)[M] > targets.refused_share,
        "ErrorBudgetBurn": failed(lab)[M] > 14.4 * (1 - targets.availability),
        "LengthDrift": any(
            of_rows(lab)[key] > share + targets.drift_margin
            for key, share in predicted(lab).items()
        ),
        # These depend on how busy the machine is.
        "QueueSaturated": lab.raw.quantile(0.95, "queue_seconds") > targets.queue_wait_s,
        "LatencyBudgetBurn": slow(lab) > 6 * (1 - targets.latency_share),
    }
    assert list(exceeded.values())[:4] == [True] * 4
    incident = {
        *("Recompiled", "SilentEager", "VariantsDegraded", "NonfiniteOutputs", "PolicySwapFailed")
    }
    fired = {
        rule["alert"].removeprefix("Shapeserve")
        for rule in ALERTS
        if lab.ask(with_records_inlined(rule["expr"]))
    }
    assert fired == incident | {name for name, is_so in exceeded.items() if is_so}


def test_prometheus_evaluates_every_rule_without_an_error(lab: Lab) -> None:
    def evaluated() -> list[dict[str, Any]]:
        groups = lab.prometheus.get("rules")["groups"]
        rules: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in rules) else rules

    rules = eventually(evaluated)
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert len(rules) == len(RULES)
    for name in RECORDED:
        eventually(lambda name=name: lab.prometheus.query(name))
    firing = {a["labels"]["alertname"] for a in lab.prometheus.get("alerts")["alerts"]}
    assert {"ShapeserveRecompiled", "ShapeserveNonfiniteOutputs"} <= firing


# --- series --------------------------------------------------------------------------------------


def series_of(url: str) -> set[tuple[str, Labels]]:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return {(s.name, frozenset(s.labels.items())) for s in parse_samples(text)}


def bound(engine: Engine) -> int:
    """What docs/monitoring.md says: the product of the label sets, times the edges."""
    sets: dict[Scope, int] = {
        Scope.MODEL: 2,  # and `none`
        Scope.BUCKET: len(SIZES) + 1,
        Scope.AXIS: 1,
        Scope.KIND: 3,
        Scope.BUILD: 1,
    }
    total = 0
    for d in CATALOGUE:
        sizes = [
            sets[source] if isinstance(source, Scope) else len(source)
            for source in d.sources.values()
        ]
        product_of = 1
        for size in sizes:
            product_of *= size
        total += product_of * (len(d.buckets) + 3 if d.kind == "histogram" else 1)
    return total


def test_a_thousand_mixed_requests_add_no_series(lab: Lab) -> None:
    before = series_of(lab.url)
    with httpx.Client(base_url=lab.url, timeout=60) as http:
        for i, (kind, n) in zip(range(1000), product(range(10), range(100)), strict=True):
            if kind < 6:
                embed(http, [1 + 2 + n % 45])
            elif kind == 6:
                http.post("/v1/embeddings", json={"model": f"client-{i}", "input": "a"})
            elif kind == 7:
                http.get(f"/nothing/{i}")
            elif kind == 8:
                http.post("/v1/embeddings", content=b"{" * n)
            else:
                http.get(f"/v2/models/{i}/ready")
    assert series_of(lab.url) == before
    assert len(before) <= bound(lab.engine)
    at_s = lab.prometheus.await_scrapes("shapeserve", 2)
    count = 'count({__name__=~"shapeserve_.+",replica!=""})'
    assert lab.prometheus.query(count, at_s) == {labels(): len(before)}


# --- several replicas ----------------------------------------------------------------------------


class Replicas:
    """Replicas as ``/metrics`` merges them; each works at the pace of its thread."""

    def __init__(self) -> None:
        self.parts: dict[str, Metrics] = {}
        self.sent_at_s: list[float] = []

    def add(self, name: str) -> None:
        metrics = Metrics()
        metrics.preset(MODEL, ["batch=2,seq=8"], ["batch", "seq"])
        metrics.build_info.labels(version="1", python="3", torch="2", device="cpu").set(1)
        self.parts = {**self.parts, name: metrics}

    def kill(self, name: str) -> None:
        self.parts = {key: value for key, value in self.parts.items() if key != name}

    def work(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for metrics in self.parts.values():
                metrics.rows_accepted_total.child(MODEL).inc()
                tokens = {"real": 10, "padding_seq": 6, "padding_batch": 0}
                metrics.record_batch(MODEL, Mode.EAGER, "batch=2,seq=8", tokens, 0.001)
                self.sent_at_s.append(time.time())
            time.sleep(0.02)

    def text(self) -> str:
        return merge_texts({name: metrics.text() for name, metrics in self.parts.items()})


@pytest.fixture
def replicas() -> Iterator[tuple[Replicas, str]]:
    made = Replicas()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(made.text().encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made, f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_replica_that_is_killed_never_makes_a_rate_negative_nor_counts_twice(
    replicas: tuple[Replicas, str], tmp_path: Path
) -> None:
    service, address = replicas
    for name in ("a", "b"):
        service.add(name)
    prometheus = Prometheus(committed_config("single-node.yml", [address]), tmp_path)
    try:
        start_s = prometheus.await_scrapes("shapeserve", 1)
        service.work(2.5)
        service.kill("a")
        service.work(1.5)
        service.add("c")
        service.work(2.5)
        end_s = prometheus.await_scrapes("shapeserve", 2)
        (counted,) = prometheus.query(
            "sum(increase(shapeserve_rows_accepted_total[5m]))", end_s
        ).values()
        between = pairwise(prometheus.scrapes("shapeserve"))
        one_interval = max(sum(a < at <= b for at in service.sent_at_s) for a, b in between)
        assert abs(counted - len(service.sent_at_s)) <= one_interval
        for name, expr in RECORDED.items():
            values = prometheus.range(expr, start_s, end_s)
            assert not [value for value in values if value < 0], name
        waste = prometheus.query(RECORDED["model:shapeserve_padding_waste:ratio_rate5m"], end_s)
        assert waste == {M: pytest.approx(6 / 16, rel=0.01)}
        counts = prometheus.range(RECORDED["shapeserve_replicas:count"], start_s, end_s)
        assert {1, 2} == set(counts)
    finally:
        prometheus.stop()


# --- what is scraped -----------------------------------------------------------------------------


def test_in_kubernetes_only_the_metrics_ports_of_ray_pods_are_scraped(
    replicas: tuple[Replicas, str], tmp_path: Path
) -> None:
    """The relabelling as committed; what Kubernetes would find is given as a file."""
    _, address = replicas
    (job,) = yaml.safe_load((MONITORING / "kuberay.yml").read_text())["scrape_configs"]
    del job["kubernetes_sd_configs"]
    found = {
        "head-metrics": ("head", "metrics"),
        "head-dashboard": ("head", "dashboard"),
        "worker-metrics": ("worker", "metrics"),
        "other": ("", "metrics"),
    }
    pods = [
        {
            "targets": [address],
            "labels": {
                "__meta_kubernetes_pod_label_ray_io_node_type": node,
                "__meta_kubernetes_pod_container_port_name": port,
                "__meta_kubernetes_pod_label_ray_io_cluster": "c1",
                "__meta_kubernetes_namespace": "ns",
                "__meta_kubernetes_pod_name": pod,
            },
        }
        for pod, (node, port) in found.items()
    ]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    job["file_sd_configs"] = [{"files": [str(tmp_path / "pods.json")]}]
    prometheus = Prometheus({"scrape_configs": [job]}, tmp_path)
    try:
        targets = eventually(lambda: prometheus.get("targets")["activeTargets"])
        kept = {target["labels"]["pod"]: target["labels"] for target in targets}
        assert sorted(kept) == ["head-metrics", "worker-metrics"]
        assert {(k["job"], k["ray_io_cluster"], k["namespace"]) for k in kept.values()} == {
            ("ray", "c1", "ns")
        }
    finally:
        prometheus.stop()


def test_the_operator_is_told_the_same_as_kubernetes_discovery() -> None:
    monitor = yaml.safe_load((MONITORING / "kuberay-podmonitor.yaml").read_text())
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    assert (selected["key"], selected["values"]) == ("ray.io/node-type", ["head", "worker"])
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    made = {rule["targetLabel"] for rule in endpoint["relabelings"]}
    assert made == {"job", "ray_io_cluster"}
