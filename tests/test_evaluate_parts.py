"""Parts of ``evaluate`` that need no engine: choices, traces, timing, accounts, words."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.buckets import Bucket, Grid
from shapeserve.errors import ConfigError
from shapeserve.evaluate.account import account
from shapeserve.evaluate.choice import choose, traffic
from shapeserve.evaluate.latency import FirstCall, Latency
from shapeserve.evaluate.profile import CALL, profile_calls, read_trace
from shapeserve.evaluate.report import render, write_report
from shapeserve.evaluate.result import (
    Arm,
    CompileCost,
    Environment,
    Evaluation,
    KernelAccount,
    Numerics,
    Row,
    Scope,
    Start,
    Traffic,
)
from shapeserve.evaluate.timing import Timing, graph_break_s, time_calls
from shapeserve.evaluate.words import sentences
from shapeserve.expect import Expectation, Waste

GRID = Grid(
    ("batch", "seq"), [Bucket.of(batch=b, seq=s) for b in (1, 2, 4) for s in (8, 16, 32, 64)]
)


def labels(buckets: list[Bucket]) -> list[str]:
    return [bucket.label for bucket in buckets]


# --- which buckets


def test_a_sample_has_the_smallest_and_the_largest_bucket() -> None:
    sampled = choose(GRID, "sampled")
    assert len(sampled) == 5
    assert labels(sampled)[0] == "batch=1,seq=8"
    assert labels(sampled)[-1] == "batch=4,seq=64"
    assert len(choose(GRID, "all")) == 12


@given(count=st.integers(1, 30))
def test_a_sample_never_names_a_bucket_twice(count: int) -> None:
    grid = Grid(("tokens",), [Bucket.of(tokens=n + 1) for n in range(count)])
    sampled = choose(grid, "sampled")
    assert len(set(sampled)) == len(sampled) == min(count, 5)


def test_a_list_of_sizes_chooses_these_buckets_smallest_first() -> None:
    assert labels(choose(GRID, "4x16, 1x8")) == ["batch=1,seq=8", "batch=4,seq=16"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("3x8", "no such bucket .batch x seq.; it has 1x8"), ("some", "neither sampled, all, nor")],
)
def test_an_unknown_bucket_is_refused_with_those_that_exist(wanted: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(GRID, wanted)


# --- what share of the traffic


def expectation(by_size: dict[tuple[int, ...], int]) -> Expectation:
    waste = Waste(60, {"seq": 40})
    return Expectation(("seq",), sum(by_size.values()), {}, by_size, waste, {})


def test_without_recorded_rows_every_bucket_counts_alike() -> None:
    found = traffic(choose(GRID, "1x8,4x64"), None, None)
    assert (found.observed, found.waste) == (False, None)
    assert set(found.shares.values()) == {0.5}


def test_rows_count_for_the_smallest_measured_shape_that_holds_them() -> None:
    # 40 rows of up to 8 tokens in calls of 1; 80 of up to 64 in calls of 4: 40 calls and 20.
    expected = expectation({(8,): 40, (16,): 20, (32,): 20, (64,): 40})
    found = traffic(choose(GRID, "1x8,4x64"), expected, 99)
    assert found.shares["batch=1,seq=8"] == pytest.approx(40 / 60)
    assert found.shares["batch=4,seq=64"] == pytest.approx(20 / 60)
    assert (found.observed, found.shapes, found.waste) == (True, 99, 0.4)


@given(
    counts=st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    wanted=st.sampled_from(["all", "sampled", "1x8", "2x16,4x16"]),
)
def test_the_shares_of_a_mix_add_up_to_one(counts: list[int], wanted: str) -> None:
    expected = expectation(dict(zip([(8,), (16,), (32,), (64,)], counts, strict=True)))
    found = traffic(choose(GRID, wanted), expected, 4)
    assert sum(found.shares.values()) == pytest.approx(1.0 if sum(counts) else 0.0)


# --- timing


def test_calls_are_timed_in_turn_and_a_failing_one_does_not_stop_the_others() -> None:
    order: list[str] = []

    def bad() -> None:
        order.append("bad")
        if order.count("bad") == 2:
            raise RuntimeError("planted")

    calls = {"good": lambda: order.append("good"), "bad": bad}
    seconds, failed = time_calls(calls, torch.device("cpu"), Timing(least=3, most=4, budget_s=1e9))
    assert order == ["good", "bad", "good", "bad", "good", "good"]
    assert Counter({k: len(v) for k, v in seconds.items()}) == {"good": 4, "bad": 1}
    assert [*failed] == ["bad"]


def test_timing_stops_after_the_least_number_of_calls_when_the_budget_is_spent() -> None:
    seconds, _ = time_calls({0: lambda: None}, torch.device("cpu"), Timing(5, 50, budget_s=0))
    assert len(seconds[0]) == 5


def test_a_graph_break_is_timed_only_where_torch_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 <= graph_break_s() < math.inf
    assert 0 <= graph_break_s() < math.inf  # compiled anew, else there would be no break to see
    monkeypatch.setattr("shapeserve.evaluate.timing._broken", lambda x: x + 1)
    with pytest.raises(RuntimeError, match="0 graph breaks instead of 4"):
        graph_break_s()


# --- traces


def span(name: str, start: float, dur: float, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "args": args}


def memory(ts: float, total: int, size: int, kind: int = 0) -> dict[str, Any]:
    args = {"Total Allocated": total, "Bytes": size, "Device Type": kind}
    return {"ph": "i", "name": "[memory]", "ts": ts, "args": args}


def test_a_cpu_trace_counts_outermost_operators_and_the_time_without_any() -> None:
    events = [
        span(CALL, 0, 100, "user_annotation"),
        span("Torch-Compiled Region: 0/0", 1, 98),
        span("Pregraph bytecode", 2, 1),
        span("aten::linear", 10, 20),
        span("aten::addmm", 11, 18),  # part of the linear
        span("aten::view", 35, 1),  # makes no work
        span("graph_0_cpp_fused_add_1", 40, 30),
        span("graph_0_cpp_fused_add_1", 80, 9),
        span("aten::add", 200, 50),  # after the call
        memory(12, 1000, 400),
        memory(15, 1700, 700),
        memory(20, 1000, -700),
    ]
    seen = read_trace(events, cuda=False)
    assert (seen.platform, seen.kernels) == ("cpu", 3)
    assert seen.busy_s == pytest.approx(60e-6)
    assert seen.gap_s == pytest.approx(40e-6)
    assert seen.launch_s == pytest.approx(40e-6 / 3)
    assert seen.generated == {"graph_0_cpp_fused_add_1": 2}
    assert seen.longest[0] == ("graph_0_cpp_fused_add_1", 2, pytest.approx(39e-6))
    assert seen.peak_bytes == 1100
    assert (seen.copied_bytes, seen.launches, seen.graphs_run) == (None, None, 1)


def test_a_cuda_trace_counts_kernels_and_the_time_between_them() -> None:
    events = [
        span(CALL, 0, 100, "user_annotation"),
        span(CALL, 1, 90, "gpu_user_annotation"),
        span("cudaLaunchKernel", 1, 2, "cuda_runtime"),
        span("cudaLaunchKernel", 3, 2, "cuda_runtime"),
        span("cudaMemcpyAsync", 5, 2, "cuda_runtime"),
        span("cudaDeviceSynchronize", 7, 80, "cuda_runtime"),
        span("Memcpy HtoD", 10, 5, "gpu_memcpy", bytes=4096),
        span("triton_poi_fused_add_0", 20, 10, "kernel"),
        span("ampere_gemm", 25, 15, "kernel"),  # of another stream, at the same time in part
        memory(2, 5000, 1000, kind=1),
        memory(3, 100, 100, kind=0),
    ]
    seen = read_trace(events, cuda=True)
    assert (seen.platform, seen.kernels, seen.launches) == ("cuda", 2, 2)
    assert seen.busy_s == pytest.approx(25e-6)
    assert seen.gap_s == pytest.approx(5e-6)  # from the copy's end to the first kernel
    assert seen.generated == {"triton_poi_fused_add_0": 1}
    assert (seen.copied_bytes, seen.peak_bytes) == (4096, 1000)


def test_the_fastest_call_of_a_trace_is_the_one_that_counts() -> None:
    events = [
        span(CALL, 0, 100, "user_annotation"),
        span("aten::add", 10, 80),
        span(CALL, 200, 50, "user_annotation"),
        span("aten::add", 210, 20),
    ]
    assert read_trace(events, cuda=False).busy_s == pytest.approx(20e-6)


def test_a_replay_of_a_graph_allocates_nothing() -> None:
    events = [span(CALL, 0, 10, "user_annotation"), span("k", 1, 2, "kernel")]
    seen = read_trace(events, cuda=True)
    assert (seen.peak_bytes, seen.launches) == (0, 0)


def test_a_trace_without_a_call_is_refused() -> None:
    with pytest.raises(ValueError, match="no range shapeserve::call"):
        read_trace([span("aten::add", 0, 1)], cuda=False)


def test_the_profiler_sees_the_operators_and_the_memory_of_a_call() -> None:
    x = torch.ones(64, 64)
    seen = profile_calls(lambda: torch.relu(x @ x), torch.device("cpu"))
    assert [name for name, *_ in sorted(seen.longest)] == ["aten::matmul", "aten::relu"]
    assert seen.peak_bytes == 2 * 64 * 64 * 4
    assert seen.gap_s > 0


# --- accounts and reports, of made-up numbers


def took(first_s: float, call_s: float) -> Latency:
    return Latency(FirstCall(first_s, "compiling"), (call_s,))


def evaluation(**changes: Any) -> Evaluation:
    """Two buckets: 100 ms eager, 70 ms compiled in 12 s, 65 ms specialised in 4 s each."""
    buckets = ("batch=1,seq=8", "batch=4,seq=64")
    off = Numerics("float64", 1e-6, 0, 2, 1e-4)
    eager = KernelAccount("cpu", 10, 80e-6, 50e-6)
    longest = (("cpp_fused", 2, 70e-6),)
    fused = KernelAccount("cpu", 2, 70e-6, 10e-6, {"cpp_fused": 2}, longest, graphs_run=5)
    cost = CompileCost(12, graphs=3, graph_breaks=4)
    rows = []
    for bucket in buckets:
        rows += [
            Row(bucket, Arm.EAGER, Scope.MODULE, took(0.1, 0.1), numerics=off, kernels=eager),
            Row(bucket, Arm.COMPILED, Scope.MODULE, took(12, 0.07), cost, 0, off, fused),
            Row(bucket, Arm.SPECIALIZED, Scope.MODULE, took(4, 0.065), CompileCost(4)),
            Row(bucket, Arm.EAGER, Scope.REQUEST, took(5, 0.11)),
            Row(bucket, Arm.COMPILED, Scope.REQUEST, took(35, 0.08), cost, 0),
        ]
    found = {
        "model": "m",
        "environment": Environment("cpu (x)", 1, "float32", {"torch": "2"}),
        "buckets": buckets,
        "grid_buckets": 12,
        "start": Start(30, 0.0, {"program for two rows and more": cost}),
        "eager_start": Start(5),
        "rows": tuple(rows),
        "traffic": Traffic(True, dict.fromkeys(buckets, 0.5), shapes=100, waste=0.1),
        "graph_break_s": 20e-6,
    }
    return Evaluation(**{**found, **changes})


def test_an_account_adds_up_the_measured_numbers() -> None:
    sums = account(evaluation())
    module, request = sums.compiling
    assert (module.break_even, module.net_s(100)) == (400, -9)
    assert (request.cost_s, request.break_even) == (25, 834)
    assert [shape.break_even for shape in sums.shapes] == [800, 800]
    assert sums.dynamic is not None
    assert sums.special is not None
    assert (sums.dynamic.cold_s, sums.special.cold_s) == (12, 8)
    assert sums.specialize_all_from == 0
    assert sums.fusion["batch=1,seq=8"].speedup == 1.625
    assert sums.breaks is not None
    assert (sums.breaks.call_s, sums.breaks.million_calls_s) == (80e-6, 80)
    assert sums.padding is not None
    assert (sums.padding.padding_s, sums.padding.avoided_s) == (0.007, 388)
    assert json.loads(json.dumps(sums.to_dict()))["compiling"][0]["break_even_calls"] == 400


def test_loading_the_compiler_counts_for_compiling_at_all_but_not_for_one_more_program() -> None:
    cost = CompileCost(12)
    sums = account(evaluation(start=Start(30, 3.0, {"program for two rows and more": cost})))
    assert sums.compiling[0].cost_s == 15
    assert sums.dynamic is not None
    assert sums.dynamic.cold_s == 12


def test_time_without_a_kernel_on_a_gpu_is_that_of_calls_that_were_not_profiled() -> None:
    """A profiled launch takes twice as long as another."""
    kernels = KernelAccount("cuda", kernels=10, busy_s=0.02, gap_s=9.0)
    found = evaluation()
    rows = tuple(
        replace(row, kernels=kernels) if row.scope is Scope.MODULE else row for row in found.rows
    )
    for fusion in account(evaluation(rows=rows)).fusion.values():
        assert fusion.before.total_s == pytest.approx(0.1)  # the median of the eager call
        assert fusion.after.busy_s == 0.02


def test_parts_without_numbers_are_left_out() -> None:
    found = evaluation()
    eager = tuple(row for row in found.rows if row.arm is Arm.EAGER)
    bare = Traffic(False, dict.fromkeys(found.buckets, 0.5))
    sums = account(evaluation(rows=eager, start=Start(5), traffic=bare))
    assert (sums.compiling, sums.shapes, sums.fusion, sums.padding) == ((), (), {}, None)
    said = " ".join(sentences(evaluation(rows=eager, traffic=bare), sums))
    assert "Nothing is compiled" in said
    assert "No traffic was given" in said
    assert json.dumps(sums.to_dict())


def test_a_graph_break_that_cannot_be_timed_is_left_out() -> None:
    found = evaluation(graph_break_s=None)
    sums = account(found)
    assert sums.to_dict()["graph_breaks"] is None
    assert "graph breaks x" not in " ".join(sentences(found, sums))


def test_the_sentences_say_the_numbers() -> None:
    found = evaluation()
    said = "\n".join(sentences(found, account(found)))
    assert "70.000 ms instead of 100.000 ms for 12.0 s once; paid back after 400 calls" in said
    assert "Specialising batch=1,seq=8: 65.000 ms instead of 70.000 ms" in said
    assert "8.0 s cold (all 12 buckets of the grid: about 48 s)" in said
    assert "10 kernels, 0.080 ms busy and 0.050 ms without one -> 2, 0.070 ms and 0.010" in said
    assert "4 graph breaks x 20.0 us (measured here) = 80 us a call, 80 s over a million" in said
    assert "Padding: 10.0% of the elements" in said


def test_numbers_that_contradict_each_other_are_called_noise() -> None:
    """A request contains a call of the module, so it cannot be the faster of the two."""
    quiet = evaluation()
    assert not any("Noise" in line for line in sentences(quiet, account(quiet)))
    rows = tuple(
        replace(row, latency=took(5, 0.02)) if row.scope is Scope.REQUEST else row
        for row in quiet.rows
    )
    busy = evaluation(rows=rows)
    (said,) = (line for line in sentences(busy, account(busy)) if "Noise" in line)
    assert "eager the module alone took 5.00 times as long as a whole request" in said


def test_a_report_escapes_what_it_was_given() -> None:
    evil = "</script><script>alert(1)</script>"
    found = evaluation(model=evil)
    page = render([(found, account(found))])
    assert evil not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page


def test_a_report_needs_nothing_from_elsewhere() -> None:
    page = render([(evaluation(), account(evaluation()))])
    own = page.split("</script></head>", 1)[1]  # behind plotly's own code
    assert "src=" not in own
    assert "http" not in own.replace("http://www.w3.org", "")
    assert own.count('class="plotly-graph-div"') == 6


def test_a_failed_measurement_is_shown_in_its_row() -> None:
    failed = Row("batch=1,seq=8", Arm.COMPILED, Scope.MODULE, error="RuntimeError: planted")
    found = evaluation(rows=(failed, *evaluation().rows[3:]))
    assert found.errors == (failed,)
    page = render([(found, account(found))])
    assert '<td class="word bad" colspan="6">RuntimeError: planted</td>' in page


def test_a_report_that_cannot_be_written_names_the_path(tmp_path: Path) -> None:
    found = evaluation()
    with pytest.raises(ConfigError, match=r"--report .*nowhere.*: cannot be written"):
        write_report([(found, account(found))], str(tmp_path / "nowhere" / "report.html"))
