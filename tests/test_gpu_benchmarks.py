"""The engine benchmarks on the CPU: their arithmetic, and one small run of each."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import engine_throughput, host_overhead, latency, multi_gpu, synthetic
from benchmarks.engine_throughput import form_batches
from benchmarks.multi_gpu import Failure, Job, Ready, Timed, split_by_tokens
from benchmarks.synthetic import MODELS, Sizes
from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid
from shapeserve.engine import Engine
from shapeserve.layout import MIN_ROW_TOKENS

SMALL = ["--models", "tiny", "--dtype", "float32", "--device", "cpu", "--backend", "eager"]
PACKED = Grid((TOKENS,), [Bucket.of(tokens=n) for n in (16, 64, 128)])
PADDED = Grid(
    (BATCH, "seq"), [Bucket.of(batch=b, seq=s) for b in (1, 4) for s in (8, 32, 64) if b * s <= 128]
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_model(tmp_path_factory.mktemp("bench") / "tiny", "tiny", "float32")


@pytest.fixture(scope="module", params=["packed", "padded"])
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Engine]:
    config = synthetic.engine_config(
        directory,
        layout=request.param,
        tier="eager",
        dtype="float32",
        device="cpu",
        limits={"max_batch_tokens": 128, "max_length": 64},
    )
    with Engine(config).start() as engine:
        yield engine


# --- requests


def test_the_lognormal_workload_has_the_stated_statistics() -> None:
    about = synthetic.describe_lengths(synthetic.workload_lengths("lognormal"))
    assert about["rows"] == 4096
    # Not exactly: numpy may change what a seed draws.
    assert about["mean"] == pytest.approx(79, rel=0.05)
    assert about["p50"] == pytest.approx(52, abs=3)
    assert about["p99"] == pytest.approx(440, rel=0.1)
    assert about["largest"] == 512


def test_the_recorded_workload_is_the_file_and_carries_its_licence() -> None:
    about = synthetic.describe_lengths(synthetic.workload_lengths("enc_rag_mix"))
    assert about == {
        "rows": 8192,
        "tokens": 385_446,
        "mean": 47.05,
        "p50": 12.0,
        "p99": 512.0,
        "largest": 512,
    }
    with gzip.open(synthetic.DATA_DIR / "enc_rag_mix.csv.gz", "rt") as file:
        assert "Licence" in file.read().splitlines()[1]
    assert np.array_equal(
        synthetic.recorded_lengths("enc_rag_mix", 20_000)[19_366:],
        synthetic.recorded_lengths("enc_rag_mix", 20_000 - 19_366),
    )


@pytest.mark.parametrize("workload", synthetic.WORKLOAD_ROWS)
def test_a_workload_is_the_same_every_time(workload: str) -> None:
    lengths = synthetic.workload_lengths(workload, 300)
    assert np.array_equal(lengths, synthetic.workload_lengths(workload, 300))
    assert 1 <= lengths.min() <= lengths.max() <= 512
    ids = synthetic.token_ids(lengths, vocab=1000)
    assert [len(row) for row in ids] == lengths.tolist()
    assert all(row.min() >= len(synthetic.SPECIALS) and row.max() < 1000 for row in ids)
    again = synthetic.token_ids(lengths, vocab=1000)
    assert all(np.array_equal(a, b) for a, b in zip(ids, again, strict=True))


# --- the floor


def test_flops_are_those_of_torch_linear_layers_and_attention() -> None:
    sizes = Sizes(layers=3, hidden=4, heads=2, ffn=16)
    flops = synthetic.matmul_flops(sizes, np.array([2, 5]))
    tokens, squares = 2 + 5, 4 + 25
    assert flops.projections == 3 * tokens * 4 * (2 * 4 * 4)
    assert flops.ffn == 3 * tokens * 2 * (2 * 4 * 16)
    assert flops.attention == 3 * squares * 2 * (2 * 4)
    assert flops.total == flops.projections + flops.ffn + flops.attention


@pytest.mark.parametrize(("model", "expected_ms"), [("minilm", 9.3), ("bert-base", 72.1)])
def test_the_floor_of_the_lognormal_workload(model: str, expected_ms: float) -> None:
    seconds = synthetic.floor_seconds(MODELS[model], synthetic.workload_lengths("lognormal"))
    assert 1e3 * seconds == pytest.approx(expected_ms, rel=0.05)


# --- models


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_saved_in_the_dtype_asked_for_and_seeded(tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import load_file

    first, second = (
        load_file(synthetic.write_model(tmp_path / name, "tiny", dtype) / "model.safetensors")
        for name in ("a", "b")
    )
    assert {tensor.dtype for tensor in first.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_both_levels_answer_as_plain_transformers_does(engine: Engine, directory: Path) -> None:
    lengths = np.clip(synthetic.workload_lengths("lognormal", 40), 1, 64)
    ids = synthetic.token_ids(lengths, MODELS["tiny"].vocab)
    encoder = engine_throughput.load_encoder(directory, "float32", torch.device("cpu"))
    alone = engine_throughput.padded_pass(
        encoder, ids, lambda: [[i] for i in range(len(ids))], torch.device("cpu")
    )
    runner = engine.runner
    for done in (
        engine.on_device(lambda: engine_throughput.runner_pass(runner, ids)),
        engine_throughput.engine_pass(engine, ids),
    ):
        for got, expected in zip(done.vectors, alone.vectors, strict=True):
            assert got is not None
            assert np.allclose(got, expected, atol=1e-5)
        assert dict(done.modes) == {"eager": len(ids)}
        assert done.batches > 1
        assert done.executed >= lengths.sum()
        assert done.device_s is not None
        assert 0 < done.device_s <= done.seconds


# --- batches


@pytest.mark.parametrize("grid", [PACKED, PADDED], ids=["packed", "padded"])
def test_every_row_is_in_one_batch_that_it_fits_and_lanes_keep_their_order(grid: Grid) -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 65, 200)]
    seen: list[int] = []
    for rows, sizes in form_batches(grid, "seq", lengths):
        assert Bucket(tuple(sizes.items())) in grid.buckets
        assert rows == sorted(rows)
        if TOKENS in sizes:
            assert sum(max(lengths[i], MIN_ROW_TOKENS) for i in rows) <= sizes[TOKENS]
        else:
            assert len(rows) <= sizes[BATCH]
            assert max(lengths[i] for i in rows) <= sizes["seq"]
        seen += rows
    assert sorted(seen) == list(range(200))


def test_packed_batches_are_filled_up_and_the_last_takes_the_smallest_bucket() -> None:
    batches = list(form_batches(PACKED, "seq", [60, 60, 20, 3]))
    assert batches == [([0, 1], {TOKENS: 128}), ([2, 3], {TOKENS: 64})]


def test_padded_batches_run_when_full_and_the_rest_at_the_end() -> None:
    assert list(form_batches(PADDED, "seq", [5, 30, 5, 5, 64, 5, 7])) == [
        ([4], {BATCH: 1, "seq": 64}),  # there is no larger batch of this length
        ([0, 2, 3, 5], {BATCH: 4, "seq": 8}),
        ([1], {BATCH: 1, "seq": 32}),
        ([6], {BATCH: 1, "seq": 8}),
    ]


def test_rows_are_picked_from_the_shortest_to_the_longest() -> None:
    lengths = np.array([7, 3, 9, 1, 5])
    assert engine_throughput.spread_by_length(lengths, 3).tolist() == [2, 3, 4]
    assert engine_throughput.spread_by_length(lengths, 99).tolist() == [0, 1, 2, 3, 4]


def test_an_error_is_relative_and_a_missing_or_broken_vector_is_infinite() -> None:
    reference = np.array([[3.0, 4.0], [0.0, 2.0]])
    load = engine_throughput.Load(
        "x", [], np.array([1, 1, 1]), 1.0, checked=np.array([0, 2]), reference=reference
    )
    good = np.array([0.0, 2.0])
    assert engine_throughput.worst_error(load, [np.array([3.0, 4.5]), None, good]) == 0.1
    for bad in (None, np.array([np.nan, 1.0])):
        assert engine_throughput.worst_error(load, [bad, None, good]) == math.inf


# --- several devices


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_rows_are_split_by_tokens_each_to_one_part(parts: int) -> None:
    lengths = synthetic.workload_lengths("lognormal", 1000)
    shares = split_by_tokens(lengths, parts)
    assert sorted(i for share in shares for i in share) == list(range(1000))
    assert all(share == sorted(share) for share in shares)
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= 512


def timed(rank: int, count: int, number: int, start_s: float, end_s: float) -> Timed:
    return Timed(rank, count, "engine", number, start_s, end_s, 100 // count, 1000 // count, 0.5)


def test_a_pass_lasts_from_the_first_start_to_the_last_end() -> None:
    one, two = multi_gpu.summarise(
        [
            *(timed(0, 1, n, 0.0, 2.0) for n in range(3)),
            *(timed(0, 2, n, 0.0, 0.9) for n in range(3)),
            *(timed(1, 2, n, 0.1, 1.0) for n in range(3)),
        ]
    )
    assert (one["rows_per_s"], one["tokens_per_s"], one["scaling"]) == (50, 500, 1)
    assert (two["rows_per_s"], two["scaling"], two["efficiency"]) == (100, 2, 1)
    assert two["passes"] == 3
    assert two["imbalance"] == 0


def job(directory: Path) -> Job:
    return Job(
        directory=directory,
        model="tiny",
        counts=(1,),
        rows=20,
        passes=2,
        device="cpu",
        layout="packed",
        tier="eager",
        dtype="float32",
        backend="eager",
        max_batch_tokens=512,
        timeout_s=60.0,
    )


def work(wanted: Job) -> list[Any]:
    channel: queue.Queue[Any] = queue.Queue()
    multi_gpu.work(0, wanted, {1: threading.Barrier(1)}, channel)
    return [channel.get_nowait() for _ in range(channel.qsize())]


def test_a_process_says_that_it_is_ready_and_then_times_every_pass(directory: Path) -> None:
    ready, *timings = work(job(directory))
    assert isinstance(ready, Ready)
    assert [(t.level, t.number) for t in timings] == [
        (level, number) for level in multi_gpu.LEVELS for number in range(2)
    ]
    assert {t.rows for t in timings} == {20}
    assert all(t.start_s < t.end_s for t in timings)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    (failure,) = work(job(tmp_path / "nothing"))
    assert isinstance(failure, Failure)
    assert "nothing" in failure.error


# --- host overhead


def test_parts_of_a_cycle_add_up_and_inner_ones_are_taken_out() -> None:
    us = 1e-6
    spans = [
        ("form", 0 * us, 10 * us),
        ("write", 12 * us, 22 * us),
        ("read", 30 * us, 35 * us),
        ("launch", 11 * us, 40 * us),
        ("wait", 41 * us, 71 * us),
        ("settle", 80 * us, 90 * us),
        ("finish", 41 * us, 92 * us),
        ("complete", 93 * us, 95 * us),
        ("form", 96 * us, 110 * us),
        ("write", 112 * us, 113 * us),  # of a cycle that does not end
    ]
    (cycle,) = host_overhead.cycles(spans)
    expected = {"form": 14, "write": 10, "launch": 14, "read": 5, "wait": 30, "finish": 11}
    expected |= {"settle": 10, "complete": 2, "rest": 4, "total": 100}
    assert cycle == {part: pytest.approx(value) for part, value in expected.items()}
    assert sum(cycle[part] for part in host_overhead.PARTS) == pytest.approx(cycle["total"])


def test_time_that_two_intervals_cover_counts_once() -> None:
    intervals = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]
    assert host_overhead.union_length(intervals) == 4.0
    assert host_overhead.gaps(intervals) == [2.0]
    assert host_overhead.gaps([]) == []


def test_idle_time_is_read_from_a_trace() -> None:
    def event(category: str, start: float, length: float, stream: int, launch: int) -> Any:
        args = {"stream": stream, "correlation": launch}
        return {"ph": "X", "cat": category, "ts": start, "dur": length, "args": args}

    events: list[Any] = [{"ph": "M", "name": "process_name"}]
    for n in range(100):  # a replay of two kernels with a gap of 10 in it, then a gap of 20
        events.append(event("kernel", 100 * n, 40, 7, n))
        events.append(event("kernel", 100 * n + 50, 30, 7, n))
        events.append(event("gpu_memcpy", 100 * n + 85, 5, 9, 1000 + n))
        events.append({**event("cpu_op", 100 * n, 100, 7, n)})
    found = host_overhead.idle_shares(events)
    assert found["between_replays"] == pytest.approx(0.20, abs=0.01)
    assert found["kernels"] == pytest.approx(0.25, abs=0.01)
    assert found["largest_gaps_us"][0] == found["median_gap_us"] == 20
    with pytest.raises(ValueError, match="no kernel"):
        host_overhead.idle_shares(events[:1])


def test_a_batch_of_short_rows_fills_its_packed_bucket() -> None:
    assert len(host_overhead.BATCH_LENGTHS) == 32
    (tokens,) = host_overhead.POLICIES["packed"]["tokens"]["explicit"]
    assert tokens == sum(host_overhead.BATCH_LENGTHS)
    assert {min(host_overhead.BATCH_LENGTHS), max(host_overhead.BATCH_LENGTHS)} == {12, 16}


# --- whole runs


def run(main: Any, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*SMALL, "--results-dir", str(tmp_path), "--out", "x", *arguments])
    return code, json.loads((tmp_path / "x.json").read_text())


THROUGHPUT = ["--rows", "32", "--passes", "1", "--workloads", "lognormal"]


@pytest.mark.slow
def test_throughput_writes_every_arm(tmp_path: Path) -> None:
    wanted = "packed-eager,padded-eager,eager,sorted-eager,no-batching"
    sizes = ["--max-batch-tokens", "640,512"]
    code, result = run(engine_throughput.main, tmp_path, *THROUGHPUT, *sizes, "--arms", wanted)
    assert code == 0
    found = result["models"]["tiny"]["arms"]
    assert list(found) == [
        "packed-eager-640",
        "packed-eager-512",
        "padded-eager-640",
        "padded-eager-512",
        "eager",
        "sorted-eager-32",
        "sorted-eager-128",
        "no-batching",
    ]
    for outcome in found.values():
        for level in outcome["workloads"]["lognormal"].values():
            assert level["worst_error"] < 1e-5
            assert 0 <= level["waste"] < 1
    assert found["packed-eager-640"]["stages_s"]["verify"] > 0
    assert found["packed-eager-512"]["swap_s"] > 0
    assert result["environment"]["versions"]["torch"] == torch.__version__
    assert "| packed-eager-640 |" in (tmp_path / "x.md").read_text()


def test_a_failing_arm_is_reported_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(engine_throughput, "measure_shapeserve", fail)
    code, result = run(
        engine_throughput.main, tmp_path, *THROUGHPUT, "--arms", "packed-eager,eager"
    )
    assert code == 1
    found = result["models"]["tiny"]["arms"]
    assert "no luck" in found["packed-eager (failed)"]["error"]
    assert found["eager"]["status"] == "ok"


def test_what_the_time_budget_leaves_out_is_said(tmp_path: Path) -> None:
    limits = ["--time-budget-s", "0", "--arms", "eager"]
    code, result = run(engine_throughput.main, tmp_path, *THROUGHPUT, *limits)
    assert code == 0
    assert result["models"]["tiny"]["arms"]["eager (skipped)"]["status"] == "skipped"
    assert "left out" in (tmp_path / "x.md").read_text()


@pytest.mark.slow
def test_latency_measures_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "WARM_CALLS", 1)
    few = ["--calls", "3", "--lengths", "16,20", "--max-batch-tokens", "512"]
    code, result = run(latency.main, tmp_path, *few)
    assert code == 0
    assert list(result["engines"]) == ["tiny packed", "tiny padded"]
    for outcome in result["engines"].values():
        for levels in outcome["lengths"].values():
            assert all(levels[name]["p50_ms"] <= levels[name]["p99_ms"] for name in latency.LEVELS)
    assert result["engines"]["tiny packed"]["lengths"]["16"]["bucket"] == "tokens=16"


def test_host_overhead_times_batches_of_32_rows(tmp_path: Path) -> None:
    code, result = run(host_overhead.main, tmp_path, "--batches", "8")
    assert code == 0
    for outcome in result["host"].values():
        for requests in host_overhead.RUNS:
            found = outcome[requests]
            assert found["rows_per_batch"] == 32
            assert found["batches"] == 8
            assert all(found["parts_us"][part] > 0 for part in ("form", "launch", "finish"))


def test_an_unknown_arm_is_refused_with_the_names_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        engine_throughput.main(["--arms", "static"])
    assert "not one of packed-graph" in capsys.readouterr().err


def test_options_go_into_the_result_as_plain_data() -> None:
    options = argparse.Namespace(commit="abc", results_dir=Path("x"), models=["tiny"])
    result = synthetic.new_result("latency", options)
    assert json.loads(json.dumps(result))["settings"]["results_dir"] == "x"
    assert result["environment"]["commit"] == "abc"
