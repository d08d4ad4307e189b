"""Lengths out of a Prometheus: what its answers become, and a real one."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from service_process import eventually, free_port

from shapeserve.cli import main
from shapeserve.errors import ConfigError
from shapeserve.metrics import Metrics
from shapeserve.metrics.catalogue import length_edges
from shapeserve.traces import read_traffic
from shapeserve.tuning import Request, propose, read_lengths, waste

DIRECT, RAY = "shapeserve_request_length_bucket", "ray_shapeserve_request_length_bucket"


def answer(*series: tuple[str, str, dict[str, float]]) -> dict[str, Any]:
    """What Prometheus says: (model, axis, edge -> rows up to it)."""
    result = [
        {"metric": {"model": model, "axis": axis, "le": edge}, "value": [1.8e9, str(rows)]}
        for model, axis, edges in series
        for edge, rows in reversed(edges.items())  # in no order that can be relied on
    ]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


def told(direct: Any, ray: Any = None) -> Any:
    """An ``ask`` that has these answers for the two names, and its queries."""
    ray = answer() if ray is None else ray

    def ask(query: str) -> Any:
        asked.append(query)
        return ray if RAY in query else direct

    asked: list[str] = []
    ask.asked = asked  # type: ignore[attr-defined]
    return ask


MINI = ("mini", "seq", {"8": 10.0, "16": 10.4, "64": 29.7, "+Inf": 31.0})


def test_rows_are_spread_over_their_place_and_those_beyond_the_last_edge_taken_for_it() -> None:
    ask = told(answer(MINI))
    read = read_lengths(ask, "24h", None, None)
    assert read.traffic.axes == ("seq",)
    lengths, rows = read.traffic.sizes[:, 0], read.traffic.counts
    first = lengths <= 8
    assert (lengths[first].tolist(), rows[first].sum()) == ([*range(1, 9)], 10)
    assert rows[(lengths > 8) & (lengths <= 16)].sum() == 0  # 0.4 of a row
    assert rows.sum() == 31
    assert (lengths[-1], rows[-1]) == (64, 1)  # beyond
    assert np.dot(lengths[~first], rows[~first]) == pytest.approx(20 * 40.5 + 64, rel=0.02)
    assert (read.model, read.form, read.beyond) == ("mini", "direct", 1)
    assert read.resolution == 7 / 8  # of the rows to 8, one may have a single token
    assert ask.asked == [f"sum by (model, axis, le) (increase({DIRECT}[24h]))"]


@pytest.mark.parametrize(
    ("name", "end"), [("enc_queries", 256), ("enc_rag_mix", 256), ("librispeech_devclean", 3265)]
)
@pytest.mark.parametrize("shapes", [6, 12])
def test_the_padding_that_is_said_is_that_of_the_rows_themselves(
    trace_dir: Path, name: str, end: int, shapes: int
) -> None:
    rows = read_traffic(trace_dir / f"{name}.csv.gz").clipped({"seq": end})
    edges = length_edges(end)
    up_to = {f"{edge:g}": float((rows.sizes <= edge).sum()) for edge in edges}
    ask = told(answer(("mini", "seq", {**up_to, "+Inf": float(rows.rows)})))
    read = read_lengths(ask, "24h", None, None)
    assert read.traffic.rows == rows.rows
    made = propose(read.traffic, Request(shapes=shapes, max_length=end))
    for scored in (made.proposed, made.compared["default"]):
        assert scored.second_half == pytest.approx(waste(rows, scored.buckets), abs=0.01)
    best = propose(rows, Request(shapes=shapes, max_length=end))
    assert waste(rows, made.proposed.buckets) < waste(rows, best.proposed.buckets) + 0.01


def test_the_services_own_names_come_before_rays_and_either_can_be_asked_for() -> None:
    ray = answer(("ray-model", *MINI[1:]))
    assert read_lengths(told(answer(MINI), ray), "1h", None, None).model == "mini"
    assert read_lengths(told(answer(), ray), "1h", None, None).model == "ray-model"
    assert read_lengths(told(answer(MINI), ray), "1h", None, "ray").model == "ray-model"
    with pytest.raises(ConfigError, match=f"no increase of {DIRECT} in the last 1h; check that"):
        read_lengths(told(answer(), ray), "1h", None, "direct")


IDLE = ("idle", "seq", {"8": 0.0, "+Inf": 0.0})
OTHER = ("other", "seq", {"8": 5.0, "+Inf": 5.0})
PHOTO = (("photo", "height", {"8": 5.0, "+Inf": 5.0}), ("photo", "width", {"8": 5.0, "+Inf": 5.0}))
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "range": (answer(MINI), {"range_": "a day"}, "--range a day: it must be a duration such as"),
    "an age": (answer(MINI), {"range_": "9" * 30 + "y"}, "--range 9+y: it must be at most 100y"),
    "nothing": (answer(), {}, f"no increase of {DIRECT} or {RAY} in the last 24h; check that"),
    "no rows": (answer(IDLE), {}, "no rows came in the last 24h; give a longer --range"),
    "several models": (answer(MINI, OTHER, IDLE), {}, "there are rows of mini, other; choose one"),
    "another model": (
        answer(MINI),
        {"model": "gpt"},
        "--model gpt: no rows of it in the last 24h; there are rows of mini",
    ),
    "several axes": (answer(*PHOTO), {}, "photo has the axes height, width: .* record traffic"),
    "few rows": (
        answer(("mini", "seq", {"8": 3.0, "+Inf": 3.0})),
        {},
        "mini had 3 rows in the last 24h; at least 4",
    ),
    "error": (
        {"status": "error", "error": "query timed out"},
        {},
        "refused the query: query timed out",
    ),
    "another server": ({"detail": "not found"}, {}, "what answered is no Prometheus"),
    "a list": ([], {}, "what answered is no Prometheus"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tuned_to_is_refused_with_a_remedy(name: str) -> None:
    direct, options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read_lengths(told(direct), **{"range_": "24h", "model": None, "form": None, **options})


def test_a_model_that_nobody_used_is_no_choice() -> None:
    assert read_lengths(told(answer(MINI, IDLE)), "24h", None, None).model == "mini"


# --- a real one ---------------------------------------------------------------------------------

LENGTHS = [3] * 40 + [20] * 30 + [100] * 20 + [400] * 9 + [10_000]
"""Their edges: 3, 20, 100, 400, and one beyond the last."""


class Exporter(BaseHTTPRequestHandler):
    """Says the metrics of a service, and those that Ray's nodes would have of another model."""

    metrics: Metrics

    def do_GET(self) -> None:
        text = self.metrics.text()
        mirrored = text.replace("shapeserve_", "ray_shapeserve_").replace('"mini"', '"mirrored"')
        body = (text + mirrored).encode()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has seen ``LENGTHS``."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    metrics = Metrics()
    metrics.preset("mini", ["batch=1,seq=512"], ["batch", "seq"])
    handler = type("Bound", (Exporter,), {"metrics": metrics})
    exporter = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    directory, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "x",
                "static_configs": [{"targets": [f"127.0.0.1:{exporter.server_port}"]}],
            }
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # which is YAML too
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(binary, f"--config.file={directory}/prometheus.yml"),
                *(
                    f"--storage.tsdb.path={directory}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ),
            ],
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: seen(url) == 0.0)
        metrics.request_length.labels(model="mini", axis="seq").observe_all(LENGTHS)
        eventually(lambda: (seen(url) or 0.0) >= len(LENGTHS))
        yield url
    finally:
        process.terminate()
        process.wait()
        exporter.shutdown()
        exporter.server_close()


def seen(url: str) -> float | None:
    """How many rows Prometheus knows of; None while it knows of none."""
    query = f'{RAY}{{le="+Inf"}}'
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    except httpx.TransportError:
        return None
    found = answer.get("data", {}).get("result", [])
    return float(found[0]["value"][1]) if found else None


def tune(url: str, *arguments: str) -> Result:
    line = ["tune", "--prometheus", url, "--range", "5m", *arguments]
    return CliRunner().invoke(main, line, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "model"), [((), "mini"), (("--prometheus-form", "ray"), "mirrored")]
)
def test_a_real_prometheus_is_tuned_to(
    prometheus: str, tmp_path: Path, arguments: tuple[str, ...], model: str
) -> None:
    out = tmp_path / "policy.yaml"
    result = tune(prometheus, *arguments, "-k", "16", "--json", "-", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["buckets"][-1] == 512  # one row is beyond the last edge
    places = [(2, 3), (19, 20), (96, 100), (384, 400)]
    assert all(any(low < n <= high for n in data["buckets"]) for low, high in places)
    # increase() makes more of counts that have just begun than there were.
    assert math.isclose(data["rows"], len(LENGTHS), rel_tol=1)
    source = f"Prometheus, {model}, last 5m"
    assert data["details"]["input"]["source"] == source
    assert "a row is up to 4% off" in data["details"]["input"]["note"]
    assert "rows above 512 are taken as 512" in data["details"]["input"]["note"]
    assert source in out.read_text()


def test_what_a_real_prometheus_refuses_is_told(prometheus: str) -> None:
    result = tune(prometheus, "--model", "gpt")
    assert result.exit_code == 2
    assert "--model gpt: no rows of it in the last 5m; there are rows of mini" in result.stderr
    result = tune(prometheus, "--range", "0s")
    assert (result.exit_code, "refused the query" in result.stderr) == (2, True)
