"""The comparison of the simulator with the live service, with a fake service."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from benchmarks import environment, replay
from benchmarks import simulator_validation as validation
from benchmarks.arms import free_port
from benchmarks.comparison import compared, table
from benchmarks.http_client import Target
from benchmarks.live import GROUP_REQUESTS, GROUPS, Counters, Live
from benchmarks.processes import ServerProcess
from benchmarks.scenarios import UNFINISHED, Sample
from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.traces import Traffic
from shapeserve.tuning import CostPoint, CostTable, Formula, Served

TOY = {"models": [tiny.module_config("masked_tokens", threads=1)]}


# --- arithmetic


@pytest.mark.parametrize(
    ("predicted", "measured", "ok"),
    [
        pytest.param(1.0, [1.15, 1.15, 1.15], True, id="within 15 % of the median"),
        pytest.param(1.0, [1.20, 1.20, 1.20], False, id="beyond 15 % and no spread"),
        pytest.param(1.0, [1.00, 1.25, 1.50], True, id="beyond 15 %, within twice the spread"),
        pytest.param(1.0, [1.80, 2.00, 2.20], False, id="beyond twice the spread"),
        pytest.param(1.0, [1.0, 1.0, 99.0], True, id="one bad run moves no median"),
        pytest.param(1.0, [1.3], False, id="one run has no spread"),
        pytest.param(1.0, [0.0], False, id="nothing was measured"),
    ],
)
def test_a_share_may_be_off_by_15_percent_or_twice_the_spread_of_the_runs(
    predicted: float, measured: list[float], ok: bool
) -> None:
    assert compared("p50", predicted, measured).ok is ok


@pytest.mark.parametrize(("measured", "ok"), [([0.05, 0.059], True), ([0.03, 0.035], False)])
def test_waste_may_be_off_by_a_number_whatever_the_spread(measured: list[float], ok: bool) -> None:
    assert compared("waste", 0.05, measured, absolute=0.01).ok is ok


def test_the_table_states_median_spread_and_what_is_allowed() -> None:
    one = compared("p50, ms", 9.0, [8.0, 10.0, 12.0])
    assert (one.median, one.spread, one.off) == (10.0, pytest.approx(0.2), pytest.approx(-0.1))
    assert one.allowed == pytest.approx(0.4)
    text = table([one, compared("utilisation", 9.0, [1.0])]).markdown()
    assert "| p50, ms | 9 | 10 | 8 to 12 | 20.0% | -10% | 40% | yes |" in text
    assert "| +800% | 15% | NO |" in text


BEFORE = """
# TYPE shapeserve_tokens_total counter
shapeserve_tokens_total{model="m",bucket="batch=1,seq=8",kind="real",replica="a"} 10.0
shapeserve_tokens_total{model="m",bucket="batch=1,seq=8",kind="padding_seq",replica="a"} 2.0
# TYPE shapeserve_device_seconds_total counter
shapeserve_device_seconds_total{model="m",mode="compiled",bucket="batch=1,seq=8"} 1.0
# TYPE shapeserve_recompiles_total counter
shapeserve_recompiles_total{model="m",reason="other"} 1.0
"""
AFTER = """
# TYPE shapeserve_tokens_total counter
shapeserve_tokens_total{model="m",bucket="batch=1,seq=8",kind="real",replica="a"} 40.0
shapeserve_tokens_total{model="m",bucket="none",kind="real",replica="a"} 30.0
shapeserve_tokens_total{model="m",bucket="batch=1,seq=8",kind="padding_seq",replica="a"} 22.0
shapeserve_tokens_total{model="m",bucket="none",kind="padding_batch",replica="a"} 20.0
# TYPE shapeserve_device_seconds_total counter
shapeserve_device_seconds_total{model="m",mode="compiled",bucket="batch=1,seq=8"} 1.5
shapeserve_device_seconds_total{model="m",mode="fallback",bucket="none"} 2.0
# TYPE shapeserve_recompiles_total counter
shapeserve_recompiles_total{model="m",reason="other"} 1.0
"""


def test_counters_are_those_of_all_buckets_since_before() -> None:
    since = Counters.parse(AFTER).since(Counters.parse(BEFORE))
    assert since.elements == {"real": 60.0, "padding_seq": 20.0, "padding_batch": 20.0}
    assert since.waste == {"padding_seq": 0.2, "padding_batch": 0.2}
    assert (since.device_s, since.recompiles) == (2.5, 0.0)


def test_a_run_is_summed_up_over_the_time_to_the_last_answer() -> None:
    samples = [Sample(0.001 * i, 1) for i in range(1, 101)] + [Sample(9.0, 1, UNFINISHED)]
    run = validation.run_summary(samples, 10.0, Counters({"real": 8.0, "padding_seq": 2.0}, 4, 0))
    assert (run["utilisation"], run["waste"], run["errors"]) == (0.4, {"padding_seq": 0.2}, 1)
    assert run["latency_ms"][49] == pytest.approx(50.0)
    assert run["latency_ms"][98] == pytest.approx(99.0)


# --- what is played


def traffic(rows: int = 4000) -> Traffic:
    rng = np.random.default_rng(0)
    times_s = np.cumsum(rng.exponential(1.0, rows))
    return Traffic(("seq",), rng.integers(1, 17, (rows, 1)), np.ones(rows), times_s)


def test_the_speed_is_that_at_which_the_device_is_as_busy_as_asked() -> None:
    config = ServeConfig.from_dict(TOY).models[0]
    served = Served.from_config(config, "cpu", Formula(0.002, 1e-3, 0.0, "test"))
    made = validation.plan(served, traffic(), seconds=20.0, busy=0.4)
    assert made.outcome.utilisation == pytest.approx(0.4, rel=0.1)
    schedule_s = made.schedule_s
    assert schedule_s[0] == 0.0
    assert 15.0 < schedule_s[-1] <= 20.0
    assert len(schedule_s) == made.outcome.rows == len(made.traffic.sizes)


def test_a_device_too_slow_for_the_time_is_said_instead_of_playing_two_rows() -> None:
    config = ServeConfig.from_dict(TOY).models[0]
    served = Served.from_config(config, "cpu", Formula(9.0, 1e-3, 0.0, "test"))
    with pytest.raises(SystemExit, match="no speed of the trace keeps the device 40% busy for 5 s"):
        validation.plan(served, traffic(), seconds=5.0, busy=0.4)


def test_more_than_half_busy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        validation.main(["--busy", "0.6"])
    assert "at most 0.5" in capsys.readouterr().err


# --- asking a service


@contextmanager
def service(device_s: float = 0.0) -> Iterator[tuple[Live, list[list[int]]]]:
    """A service that counts ``device_s`` for each row, and the token ids that it was sent."""
    rows: list[list[int]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_GET(self) -> None:
            self.answer(
                f'shapeserve_tokens_total{{kind="real"}} {sum(map(len, rows))}\n'
                f'shapeserve_device_seconds_total{{mode="compiled"}} {device_s * len(rows)}\n'
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            rows.extend(body["input"])
            self.answer(json.dumps({"data": [{"embedding": [0.6]} for _ in body["input"]]}))

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    class Alive(ServerProcess):
        def check_alive(self) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        target = Target("127.0.0.1", server.server_port, "/v1/embeddings", "m")
        yield Live(Alive([], {}, Path()), target, seed=0), rows
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_rows_of_exactly_these_lengths_are_sent_and_only_theirs_is_counted() -> None:
    with service(device_s=0.5) as (live, rows):
        live.play([9], [0.0])
        played = live.play([3, 1, 7], [0.0, 0.01, 0.02])
    assert sorted(map(len, rows[1:])) == [1, 3, 7]
    assert [sample.error for sample in played.samples] == [None] * 3
    assert played.counted == Counters({"real": 11.0}, 1.5, 0.0)
    assert played.elapsed_s >= 0.02


def test_the_constant_is_the_latency_of_an_idle_service_without_its_device_time() -> None:
    with service(device_s=1000.0) as (live, rows):
        host_s = live.host_s(5)
    assert -1000.0 < host_s < -900.0  # what is left of the latency after 1,000 s of device time
    assert [len(row) for row in rows] == [5] * GROUPS * GROUP_REQUESTS


# --- a trace, round and round


def replayed(tmp_path: Path, url: str, *options: str) -> int:
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,len\n0,3\n0.1,400\n0.2,7\n")
    arguments = [url, "--model", "m", "--trace", str(trace), "--max-length", "20", *options]
    return replay.main(arguments)


def test_a_trace_is_replayed_round_and_round_at_its_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service() as (live, rows):
        url = f"http://127.0.0.1:{live.target.port}"
        assert replayed(tmp_path, url, "--seconds", "0.5", "--speed", "2") == 0
    assert [len(row) for row in rows[:6]] == [3, 20, 7, 3, 20, 7]
    assert f"{len(rows)} answered, 0 failed" in capsys.readouterr().out


def test_a_replay_with_a_failed_request_says_so_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert replayed(tmp_path, nobody, "--seconds", "0.01") == 1
    assert "1 failed (ConnectionRefusedError: 1)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        replayed(tmp_path, "localhost:8000")
    for content in ("tokens,count\n3,4\n", "t_s,height,width\n0,3,4\n1,3,4\n"):
        (tmp_path / "other.csv").write_text(content)
        assert replayed(tmp_path, nobody, "--trace", str(tmp_path / "other.csv")) == 2


# --- the verdict

EXPECTED = {
    "utilisation": 0.4,
    "waste": {"padding_seq": 0.1, "padding_batch": 0.0},
    "real": 60,
    "latency_ms": [float(p) for p in range(1, 100)],
}
RUN = {**EXPECTED, "errors": 0, "recompiles": 0.0}


def test_runs_that_do_what_was_predicted_pass() -> None:
    judged = validation.comparisons(EXPECTED, [RUN, RUN])
    names = ["waste: padding_batch", "waste: padding_seq", "utilisation", "p50, ms"]
    assert [one.name for one in judged] == names
    assert all(one.ok and one.off == 0 for one in judged)
    assert validation.faults(EXPECTED, [RUN, RUN]) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"utilisation": 0.9}, "utilisation"),
        ({"waste": {"padding_seq": 0.12, "padding_batch": 0.0}}, "waste: padding_seq"),
        ({"waste": {"padding_seq": 0.1, "padding_tokens": 0.02}}, "waste: padding_tokens"),
        ({"latency_ms": [70.0] * 99}, "p50, ms"),
    ],
)
def test_the_quantity_that_is_off_is_named(change: dict[str, Any], name: str) -> None:
    judged = validation.comparisons(EXPECTED, [{**RUN, **change}])
    assert [one.name for one in judged if not one.ok] == [name]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"errors": 3}, "run 2: 3 requests failed"),
        ({"recompiles": 2.0}, "run 2: 2 recompiles"),
        ({"real": 1.0}, "run 2: 1 tokens ran, 60 were sent"),
    ],
)
def test_a_run_of_something_else_than_was_simulated_is_a_fault(
    change: dict[str, Any], fault: str
) -> None:
    assert validation.faults(EXPECTED, [RUN, {**RUN, **change}]) == [fault]


@pytest.mark.parametrize(("errors", "code"), [(0, 0), (1, 1)])
def test_a_whole_run_writes_its_result_and_exits_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errors: int, code: int
) -> None:
    points = tuple(
        CostPoint((("batch", b), ("seq", n)), 0.002 + 1e-3 * b * n) for b in (1, 4) for n in (4, 32)
    )
    CostTable({"model": "toy"}, ("batch", "seq"), points).write(tmp_path / "costs.json")
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,len\n" + "".join(f"{i},{1 + i % 40}\n" for i in range(3000)))

    def fake_live(
        config: ModelConfig, cost: CostTable, options: argparse.Namespace
    ) -> tuple[validation.Plan, float, Any]:
        made = validation.plan_for(config, cost, options)
        run = {**validation.predicted(made, 0.003), "errors": errors, "recompiles": 0.0}
        return made, 0.003, [run] * options.runs

    monkeypatch.setattr(validation, "SHAPESERVE_CONFIG", TOY)
    monkeypatch.setattr(validation, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(validation, "run_live", fake_live)
    arguments = ["--trace", trace, "--costs", tmp_path / "costs.json", "--seconds", "5"]
    assert validation.main([*map(str, arguments), "--runs", "2", "--out", "x"]) == code
    result = json.loads((tmp_path / "x.json").read_text())
    assert [len(one["measured"]) for one in result["comparisons"]] == [2] * 4
    assert result["played"]["threads"] == max(1, environment.cores() - 1)
    assert result["played"]["host_ms"] == pytest.approx(3.0)
    text = (tmp_path / "x.md").read_text()
    assert "measured: 4 batches" in text
    assert "| utilisation |" in text
    assert ("1 requests failed" in text) is bool(errors)
