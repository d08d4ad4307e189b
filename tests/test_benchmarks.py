"""The arithmetic of the load generator, the mix, and one run against a fake server."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import arms, loadgen, mix, report, serve_load
from benchmarks.http_client import Pool, Target
from benchmarks.processes import ArmError, ServerProcess, marked_processes
from benchmarks.scenarios import (
    UNFINISHED,
    Sample,
    Scenario,
    kept_up,
    percentile,
    poisson_schedule,
    summarise,
)

FAKE_SERVER = Path(__file__).parent / "fake_embeddings_server.py"


# --- arithmetic


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (99, 99), (100, 100)]
)
def test_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile(range(1, 101), percent) == expected


def test_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


def test_rates_count_good_answers_over_the_whole_elapsed_time() -> None:
    samples = [Sample(0.1, rows=32), Sample(0.3, rows=32), Sample(0.2, 32, "status 500")]
    summary = summarise(samples, elapsed_s=4.0)
    assert summary["requests_per_s"] == 0.5
    assert summary["rows_per_s"] == 16
    assert (summary["requests"], summary["answered"]) == (3, 2)
    assert summary["errors"] == {"status 500": 1}


def test_a_refused_request_does_not_improve_latency_and_an_unfinished_one_worsens_it() -> None:
    samples = [Sample(0.2, 1), Sample(0.001, 1, "status 429"), Sample(9.0, 1, UNFINISHED)]
    summary = summarise(samples, elapsed_s=10.0)
    assert summary["p50_ms"] == pytest.approx(200)
    assert summary["p99_ms"] == summary["max_ms"] == pytest.approx(9000)
    assert summary["errors"] == {"status 429": 1, UNFINISHED: 1}


def test_a_scenario_without_any_answer_has_no_latency() -> None:
    summary = summarise([Sample(0.1, 1, "status 500")], elapsed_s=1.0)
    assert "p50_ms" not in summary
    assert summary["requests_per_s"] == 0


@pytest.mark.parametrize(("answered_per_s", "expected"), [(10.0, True), (9.0, True), (8.9, False)])
def test_a_server_keeps_up_when_it_answers_nine_tenths_of_the_offered_rate(
    answered_per_s: float, expected: bool
) -> None:
    scenario = Scenario("open", duration_s=10.0, rate_per_s=10.0)
    assert kept_up(scenario, {"requests": 100, "requests_per_s": answered_per_s}) is expected


def test_poisson_arrivals_are_seeded_ascending_and_of_the_asked_rate() -> None:
    times = poisson_schedule(50.0, 200.0, seed=1)
    assert times == poisson_schedule(50.0, 200.0, seed=1)
    assert times != poisson_schedule(50.0, 200.0, seed=2)
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] < 200
    assert len(times) / 200 == pytest.approx(50, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.pstdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.05)


# --- the mix


def test_every_twenty_texts_hold_seventeen_queries_and_three_passages() -> None:
    queries, passages = set(mix.load_texts("queries.jsonl")), set(mix.load_texts("passages.jsonl"))
    texts = mix.mixed_texts(seed=5)
    for _ in range(250):  # more than all texts once
        block = list(itertools.islice(texts, 20))
        assert sum(text in queries for text in block) == 17
        assert sum(text in passages for text in block) == 3


def test_the_same_seed_gives_the_same_texts() -> None:
    def first(seed: int) -> list[str]:
        return list(itertools.islice(mix.mixed_texts(seed), 100))

    assert first(1) == first(1)
    assert first(1) != first(2)


@pytest.mark.parametrize(
    ("file_name", "median_tokens", "most_tokens"),
    [("queries.jsonl", 12, 58), ("passages.jsonl", 116, 256)],
)
def test_every_text_carries_its_licence_and_no_text_is_longer_than_the_model_reads(
    file_name: str, median_tokens: float, most_tokens: int
) -> None:
    with (mix.DATA_DIR / file_name).open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    assert all(line["licence"] and line["text"].strip() for line in lines)
    tokens = [line["tokens"] for line in lines]
    assert (statistics.median(tokens), max(tokens)) == (median_tokens, most_tokens)


def test_check_texts_go_from_the_shortest_to_the_longest() -> None:
    texts = mix.check_texts()
    every = mix.load_texts("queries.jsonl") + mix.load_texts("passages.jsonl")
    assert len(texts) == mix.CHECK_TEXTS
    assert (len(texts[0]), len(texts[-1])) == (min(map(len, every)), max(map(len, every)))


# --- answers


def embeddings(*vectors: Sequence[float | None]) -> bytes:
    return orjson.dumps({"data": [{"embedding": vector} for vector in vectors]})


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        pytest.param(200, embeddings([0.1], [0.2]), None, id="good"),
        pytest.param(503, b"", "status 503", id="status"),
        pytest.param(200, b"<html>", "unreadable answer", id="not-json"),
        pytest.param(200, b"[]", "unreadable answer", id="not-an-object"),
        pytest.param(200, b'{"data": [{}, {}]}', "unreadable answer", id="no-embedding"),
        pytest.param(200, embeddings([0.1]), "wrong number of embeddings", id="too-few"),
        pytest.param(200, embeddings([0.1], []), "empty or null embedding", id="empty"),
        pytest.param(200, embeddings([0.1], [None]), "empty or null embedding", id="null"),
    ],
)
def test_every_answer_is_checked(status: int, body: bytes, error: str | None) -> None:
    assert loadgen.answer_error(status, body, rows=2) == error


# --- loops against a server in this process

Handler = Callable[[bytes], Awaitable[bytes | None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[Pool, Target]]:
    """Serve HTTP: ``handler`` makes the whole answer of one body; None hangs up."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                answer = await handler(await reader.readexactly(length))
                if answer is None:
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    target = Target("127.0.0.1", server.sockets[0].getsockname()[1], "/v1/embeddings", "m")
    pool = Pool(target, limit=8)
    try:
        yield pool, target
    finally:
        pool.close()
        server.close()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def echo(body: bytes) -> bytes:
    return http(embeddings(*[[1.0] for _ in orjson.loads(body)["input"]]))


def test_a_closed_loop_gets_an_answer_to_everything_it_asks() -> None:
    async def scenario() -> dict[str, Any]:
        async with serving(echo) as (_, target):
            wanted = Scenario("closed", duration_s=0.2, rows=3, clients=4)
            return await loadgen.run(target, wanted, seed=0)

    summary = asyncio.run(scenario())
    assert summary["answered"] == summary["requests"] >= 4
    assert summary["errors"] == {}
    assert summary["rows_per_s"] == pytest.approx(3 * summary["requests_per_s"])


def test_an_open_loop_sends_exactly_the_scheduled_requests() -> None:
    async def scenario() -> dict[str, Any]:
        async with serving(echo) as (_, target):
            wanted = Scenario("open", duration_s=0.2, rate_per_s=200)
            return await loadgen.run(target, wanted, seed=3)

    summary = asyncio.run(scenario())
    assert summary["answered"] == len(poisson_schedule(200, 0.2, seed=3))


def test_latency_counts_from_the_scheduled_time() -> None:
    async def scenario() -> Sample:
        async with serving(echo) as (pool, target):
            request = loadgen.embeddings_request(target, ["a"])
            return await loadgen.ask(pool, request, 1, since_s=time.perf_counter() - 60)

    assert asyncio.run(scenario()).latency_s >= 60


def test_requests_that_are_never_answered_are_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loadgen, "GIVE_UP_S", 0.05)

    async def scenario() -> list[Sample]:
        async with serving(lambda _: asyncio.sleep(60, None)) as (pool, target):
            requests = itertools.repeat(loadgen.embeddings_request(target, ["a"]))
            # More than the pool has connections: those that wait for one count as well.
            samples, _ = await loadgen.open_loop(pool, 1, requests, [0.0] * 20)
            return samples

    assert [sample.error for sample in asyncio.run(scenario())] == [UNFINISHED] * 20


def test_a_failing_server_is_counted_and_the_connection_replaced() -> None:
    answers = iter([http(b"{}", "500 Oops"), None, http(b"no json"), http(embeddings([1.0]))])

    async def handler(_: bytes) -> bytes | None:
        return next(answers)

    async def scenario() -> list[str | None]:
        async with serving(handler) as (pool, target):
            request = loadgen.embeddings_request(target, ["a"])
            return [(await loadgen.ask(pool, request, 1, 0.0)).error for _ in range(4)]

    expected = ["status 500", "IncompleteReadError", "unreadable answer", None]
    assert asyncio.run(scenario()) == expected


# --- report


def test_ratios_above_one_are_in_favour_of_shapeserve() -> None:
    def server(slowness: float) -> dict[str, Any]:
        summary = {
            "p50_ms": 10 * slowness,
            "p99_ms": 20 * slowness,
            "requests_per_s": 100 / slowness,
            "rows_per_s": 100 / slowness,
        }
        names = (report.SERIAL, report.MANY_CLIENTS, report.MANY_ROWS)
        return {"status": "ok", "scenarios": dict.fromkeys(names, summary)}

    result = {"arms": {"ray-batch": server(5.0), "ray-nobatch": {"status": "failed"}}}
    result["arms"][arms.SHAPESERVE] = server(1.0)
    result["arms"]["offline-eager"] = {"status": "ok", "rows_per_s": 10.0}
    result["arms"]["offline-shapeserve"] = {"status": "ok", "rows_per_s": 40.0}
    assert report.ratios(result).rows == [
        ["ray-batch", *["5.00x"] * 4, "-"],
        ["offline-eager", *["-"] * 4, "4.00x"],
    ]


def test_agreement_is_the_worst_text_of_each_pair() -> None:
    result = {
        "arms": {
            "a": {"check_vectors": [[1.0, 0.0], [0.0, 2.0]]},
            "b": {"check_vectors": [[3.0, 0.0], [1.0, 0.0]]},
            "failed": {},
        }
    }
    assert report.agreement(result) == {"a / b": pytest.approx(1.0)}
    assert report.cosine_distance([1.0, 0.0], [1.0, 0.0, 0.0]) == 2.0


# --- processes and a whole run


def fake_launch(_arm: str, port: int, *_: object) -> arms.Launch:
    return arms.Launch((sys.executable, str(FAKE_SERVER), str(port)), ready_path="/")


def crashing_launch(*_: object) -> arms.Launch:
    return arms.Launch((sys.executable, "-c", "raise SystemExit('no luck')"), ready_path="/")


def test_stop_ends_the_children_that_outlive_their_parent(tmp_path: Path) -> None:
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)"
    code = f"{orphan}; import time; time.sleep(60)"
    server = ServerProcess([sys.executable, "-c", code], {}, tmp_path / "log")
    with server:
        run_id = server._run_id
        while len(marked_processes(run_id)) < 2:
            server.check_alive()
            time.sleep(0.01)
    deadline_s = time.monotonic() + 10
    while marked_processes(run_id) and time.monotonic() < deadline_s:
        time.sleep(0.01)  # a killed process is listed until init has reaped it
    assert marked_processes(run_id) == []


def test_a_server_that_ends_by_itself_is_an_error_at_once(tmp_path: Path) -> None:
    with ServerProcess(crashing_launch().command, {}, tmp_path / "log") as server:
        with pytest.raises(ArmError, match="exit code 1"):
            server.wait_ready(1, "/")
        assert server.log_tail() == "no luck"


def run_main(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = serve_load.main([*arguments, "--duration-s", "0.2", "--rates", "20", "--out", "x"])
    return code, json.loads((tmp_path / "x.json").read_text())


@pytest.mark.slow
def test_a_whole_run_writes_json_and_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_load, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(serve_load, "launch", fake_launch)
    wanted = [report.MANY_CLIENTS, "open-20"]
    names = f"{report.MANY_CLIENTS},open"
    code, result = run_main(tmp_path, "--arms", "ray-batch,shapeserve", "--scenarios", names)
    assert code == 0
    for arm in ("ray-batch", "shapeserve"):
        outcome = result["arms"][arm]
        assert outcome["status"] == "ok"
        assert outcome["first_answer_s"] >= outcome["ready_s"] > 0
        assert list(outcome["scenarios"]) == wanted
        assert all(summary["errors"] == {} for summary in outcome["scenarios"].values())
    assert result["environment"]["cores"] >= 1
    assert "| ray-batch |" in (tmp_path / "x.md").read_text()


@pytest.mark.slow
def test_a_crashed_arm_is_reported_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(arm: str, port: int, *_: object) -> arms.Launch:
        return crashing_launch() if arm == "ray-batch" else fake_launch(arm, port)

    monkeypatch.setattr(serve_load, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(serve_load, "launch", launch)
    code, result = run_main(
        tmp_path, "--arms", "ray-batch,shapeserve", "--scenarios", report.SERIAL
    )
    assert code == 1
    assert result["arms"]["ray-batch"]["status"] == "failed"
    assert result["arms"]["ray-batch"]["log_tail"] == "no luck"
    assert result["arms"]["shapeserve"]["status"] == "ok"


def test_an_unknown_arm_is_refused_with_the_names_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve_load.main(["--arms", "ray"])
    assert "not one of ray-nobatch" in capsys.readouterr().err
