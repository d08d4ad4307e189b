"""``/ui``: what it shows, to whom, and that it loads and runs nothing; in a real browser too."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import BUCKET, FakeEngine
from frontend_server import serving
from test_frontend import Service

from shapeserve.compile.monitor import Recompile
from shapeserve.compile.record import VariantState
from shapeserve.config import ModelConfig
from shapeserve.engine import RecentFallback
from shapeserve.metrics import FallbackReason, Metrics, RecompileReason, Tier
from shapeserve.protocols.health import Board, ReplicaReport
from shapeserve.serve.admin import Guard
from shapeserve.serve.endpoints import ui as ui_module
from shapeserve.serve.heatmap import heat_map
from shapeserve.serve.page import EVENTS, status_page, warmup_page
from shapeserve.serve.status import ModelStatus, ReplicaStatus

ADMIN = {"authorization": "Bearer token"}
GUARD = "tensor 'ids' size mismatch at index 1. expected 8, actual 9"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(ui_module, "KEEP_S", 0.0)  # the page of this moment
    made = Service(guard=Guard("token"))
    yield made
    made.frontend.close()


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int, str]] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attributes}
        if "data-bucket" in known:
            numbers = int(known["data-rows"]), int(known["data-batches"])
            self.found[known["data-bucket"]] = (*numbers, known["class"])


def cells(html: str) -> dict[str, tuple[int, int, str]]:
    """Bucket -> rows, batches and class of its cell; of several models the last one's."""
    parser = _Cells()
    parser.feed(html)
    return parser.found


def words(html: str) -> str:
    """What a reader sees, in one line."""
    body = html.partition("<body>")[2]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def page(*statuses: ReplicaStatus, missing: int = 0, admin: bool = False) -> str:
    return status_page(statuses, missing, admin=admin).body.decode()


def variant(bucket: str, tier: Tier = Tier.COMPILED, wanted: Tier = Tier.COMPILED) -> VariantState:
    return VariantState(bucket, tier, wanted, degraded=tier is not wanted)


def status(
    replica: str, buckets: dict[str, int], *variants: VariantState, **fields: Any
) -> ReplicaStatus:
    """A replica whose model ``m`` answered so many rows in these buckets, one a batch."""
    counts = {
        "rows_total": {("compiled", bucket): float(n) for bucket, n in buckets.items()},
        "batches_total": {("compiled", bucket): float(n) for bucket, n in buckets.items()},
        "tokens_total": {(bucket, "real"): 3.0 * n for bucket, n in buckets.items()}
        | {(bucket, "padding_seq"): 1.0 * n for bucket, n in buckets.items()},
    }
    shown = variants or tuple(variant(bucket) for bucket in buckets)
    values = {"state": "ready", "counts": counts, "recompiles": (), "fallbacks": (), **fields}
    model = ModelStatus("m", done=1, total=1, grid="g", variants=shown, max_queue_rows=10, **values)
    return ReplicaStatus(ReplicaReport(replica, "ready"), (model,))


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_cell_of_a_bucket_has_the_rows_that_were_sent(service: Service) -> None:
    for _ in range(3):
        await service.embed(["a b"] * 7)
    html = (await service.http.get("/ui")).text
    assert cells(html.partition("<h2>other")[0])[BUCKET.label][0] == 21
    assert cells(html)[BUCKET.label][0] == 0
    assert "21 rows accepted" not in words(html)
    assert "rows accepted 21" in words(html)
    assert "▼ eager" in words(html)  # the fakes asked for `compiled`


@pytest.mark.asyncio
async def test_it_loads_nothing_and_the_policy_allows_its_own_style_alone(service: Service) -> None:
    response = await service.http.get("/ui")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    style = re.search(r"<style>(.*?)</style>", response.text, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in policy
    assert not re.findall(r"<script|\bsrc=|\bstyle=|\bon\w+=|https?:|@import|url\(", response.text)


@pytest.mark.asyncio
async def test_the_guard_of_a_recompile_is_for_the_administrator_only(service: Service) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        html = (await service.http.get("/ui", headers=headers)).text
        assert "recompile shape" in words(html)
        assert "size mismatch" not in html
        assert "many_0" not in html
    html = (await service.http.get("/ui", headers=ADMIN)).text
    assert "many_0 [5/1]: tensor &#39;ids&#39; size mismatch at index 1." in html


@pytest.mark.asyncio
async def test_nothing_of_a_request_is_shown(service: Service) -> None:
    await service.embed(["private words", "fallback"], headers={"x-request-id": "private-id"})
    html = (await service.http.get("/ui", headers=ADMIN)).text
    assert "private" not in html


@pytest.mark.asyncio
async def test_names_are_escaped() -> None:
    name = "<script>alert(1)</script>\"'&"
    service = Service(more={name: FakeEngine})
    html = (await service.http.get("/ui")).text
    service.frontend.close()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;" in html


@pytest.mark.asyncio
async def test_many_readers_cost_one_page_a_second(service: Service) -> None:
    asked = 0

    async def statuses() -> tuple[list[ReplicaStatus], int]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return [status("r", {"batch=1,seq=8": asked})], 0

    many = Service(statuses=statuses)
    ui_module.KEEP_S = 3600.0  # the fixture puts it back
    pages = await asyncio.gather(*(many.http.get("/ui") for _ in range(20)))
    late = await many.http.get("/ui")
    assert (asked, {page.text for page in pages}) == (1, {late.text})
    ui_module.KEEP_S = 0.0
    assert cells((await many.http.get("/ui")).text)["batch=1,seq=8"][0] == 2
    many.frontend.close()


@pytest.mark.asyncio
async def test_a_reader_that_leaves_takes_the_page_from_nobody(service: Service) -> None:
    go = asyncio.Event()

    async def statuses() -> tuple[list[ReplicaStatus], int]:
        await go.wait()
        return [], 0

    slow = Service(statuses=statuses)
    leaving, staying = (asyncio.create_task(slow.http.get("/ui")) for _ in range(2))
    await asyncio.sleep(0.02)
    leaving.cancel()
    await asyncio.sleep(0)
    go.set()
    assert (await staying).status_code == 200
    slow.frontend.close()


@pytest.mark.asyncio
async def test_it_is_answered_while_the_service_stops(service: Service) -> None:
    service.frontend.drain(lambda: None)
    assert (await service.http.get("/ui")).status_code == 200


# --- what is shown --------------------------------------------------------------------------------


def test_the_numbers_of_all_replicas_are_added_up_and_silent_ones_named() -> None:
    two = [status(name, {"batch=1,seq=8": 4, "batch=1,seq=16": 1}) for name in ("b", "a")]
    html = page(*two, missing=1)
    assert {bucket: cell[0] for bucket, cell in cells(html).items()} == {
        "batch=1,seq=8": 8,
        "batch=1,seq=16": 2,
    }
    assert "these 2 replicas together" in words(html)
    assert "1 more did not answer" in words(html)


def test_buckets_stand_by_row_shape_and_batch_size_in_order_of_size() -> None:
    labels = ["batch=16,seq=128", "batch=2,seq=16", "batch=16,seq=16", "batch=2,seq=128"]
    found = heat_map([variant(label) for label in labels[:3]], {}, {}, {})
    assert found is not None
    assert (found.corner, found.across, found.columns) == ("seq", "batch", ("2", "16"))
    assert [head for head, _ in found.lines] == ["16", "128"]
    assert [[cell and cell.bucket for cell in line] for _, line in found.lines] == [
        ["batch=2,seq=16", "batch=16,seq=16"],
        [None, "batch=16,seq=128"],
    ]


def test_shapes_of_two_axes_and_packed_batches_have_maps_too() -> None:
    photos = heat_map([variant("batch=4,height=224,width=320")], {}, {}, {})
    packed = heat_map([variant(f"tokens={n}") for n in (2048, 512)], {}, {}, {})
    assert photos is not None
    assert packed is not None
    times = "\N{MULTIPLICATION SIGN}"
    assert (photos.corner, photos.lines[0][0]) == (f"height {times} width", f"224 {times} 320")
    assert (packed.corner, packed.across, packed.columns) == ("tokens", "", ("packed rows",))
    assert [head for head, _ in packed.lines] == ["512", "2048"]


def test_the_shade_grows_with_the_rows_and_only_an_unused_bucket_has_none() -> None:
    rows = {f"batch=1,seq={n}": n for n in (1, 10, 100, 1000)}
    html = page(status("r", rows, *(variant(b) for b in [*rows, "batch=1,seq=9999"])))
    shades = [cells(html)[bucket][2] for bucket in (*rows, "batch=1,seq=9999")]
    assert shades == ["l1", "l1", "l3", "l8", "l0"]


def test_padding_and_lower_tiers_are_in_the_cells() -> None:
    variants = [variant("batch=1,seq=8", Tier.EAGER), *map(variant, ("a=1,seq=1", "a=1,seq=2"))]
    html = page(status("r", {"batch=1,seq=8": 4}, *variants))
    assert "4 4 · 25 % ▼ eager" in words(html)
    assert "Served by compiled unless" in words(html)
    assert "compiled was asked for" in html


def test_rows_of_earlier_grids_and_of_the_fallback_are_told_apart() -> None:
    html = page(status("r", {"batch=1,seq=8": 4, "none": 3, "batch=1,seq=7": 2}, variant("seq=9")))
    assert "outside the grid 3" in words(html)
    assert "6 more rows ran in earlier grids" in words(html)


def test_events_are_the_last_ones_newest_first() -> None:
    fallbacks = tuple(
        RecentFallback(FallbackReason.OVER_MAX, 1 + i % 2, 1.8e9 + i) for i in range(EVENTS + 5)
    )
    again = Recompile("1/2", "f", RecompileReason.SHAPE, None, 0.25, 1.8e9 + 1000)
    html = page(status("r", {}, variant("seq=8"), fallbacks=fallbacks, recompiles=(again,)))
    events = words(html).partition("Last recompiles and fallbacks")[2]
    assert events.count("over_max") == EVENTS - 1
    first, second = re.findall(r"2027-01-15 08:\S+ (?:recompile|fallback) \w+ [\d.]+ \w+", events)[
        :2
    ]
    assert first == "2027-01-15 08:16:40 recompile shape 0.2 s"
    assert second == "2027-01-15 08:00:24 fallback over_max 1 row"


def test_a_model_that_warms_up_shows_how_far_it_is() -> None:
    html = page(status("r-1", {}, variant("seq=8"), state="warming"))
    assert "r-1 1 of 1 warm" in words(html)


# --- while no replica answers ---------------------------------------------------------------------


def test_the_health_application_shows_the_warm_up_of_every_replica() -> None:
    board = Board()
    assert "No replica has been heard of" in words(warmup_page([], board.state(0)).body.decode())
    board.report(ReplicaReport("r-1", "warming", 3, 12, "compile", "batch=8,seq=64"), 0.0)
    board.report(ReplicaReport("r-2", "failed", message="ModelError: <b>no</b>"), 9.0)
    html = warmup_page(board.reports(10.0), board.state(10.0)).body.decode()
    assert "Service failed" in words(html)
    assert '<progress value="3" max="12">' in html
    assert "r-1 warming 3 of 12 compile batch=8,seq=64 10 s ago" in words(html)
    assert "ModelError: &lt;b&gt;no&lt;/b&gt;" in html
    assert html.count('class="old"') == 1  # r-1 fell silent


@pytest.mark.asyncio
async def test_a_replica_answers_for_the_health_application_where_there_is_none() -> None:
    service = Service("warming")
    assert "r warming 1 of 3" in words((await service.http.get("/v2/health/ui")).text)
    service.frontend.close()


# --- in a browser ---------------------------------------------------------------------------------


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed to open the page")
def test_a_browser_shows_the_page_without_errors_and_asks_for_nothing_else(tmp_path: Path) -> None:
    metrics = Metrics()
    engine = FakeEngine(ModelConfig(name="mini", path="x"), metrics).start()
    with serving({"mini": engine}) as address:  # type: ignore[dict-item]
        body = {"model": "mini", "input": ["a b"] * 12}
        assert httpx.post(f"http://{address}/v1/embeddings", json=body).status_code == 200
        dom, console, asked = browse(f"http://{address}/ui", tmp_path)
    assert cells(dom)[BUCKET.label][0] == 12
    assert console == []
    assert asked == [f"http://{address}/ui"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed to open the page")
def test_the_check_of_the_browser_finds_what_a_page_must_not_do(tmp_path: Path) -> None:
    """Else nothing would be proved by the test above."""
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png"><script>undefined.y</script>')
    _, console, asked = browse(bad.as_uri(), tmp_path)
    assert any("TypeError" in line for line in console)
    assert "http://127.0.0.1:9/x.png" in asked


def browse(url: str, directory: Path) -> tuple[str, list[str], list[str]]:
    """Open a page: its document, what it wrote to the console, what was asked for on its behalf."""
    assert BROWSER is not None
    log = directory / "net.json"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += [f"--user-data-dir={directory}/profile", f"--log-net-log={log}", "--no-first-run"]
    flags += ["--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *flags, url], capture_output=True, text=True, timeout=100, check=True
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console, _asked(log)


def _asked(log: Path) -> list[str]:
    """Addresses of the requests in Chromium's network log, but those of its own services."""
    net = json.loads(log.read_text())
    start = net["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    urls = [e.get("params", {}).get("url", "") for e in net["events"] if e["type"] == start]
    own = re.compile(r"https?://[\w.-]*(google|googleapis|gvt1|chromium)\.\w+[:/]")
    return [*dict.fromkeys(url for url in urls if url.startswith("http") and not own.match(url))]
