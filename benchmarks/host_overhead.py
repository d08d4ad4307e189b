"""What the device thread does for each batch beside waiting, and how often the GPU is idle for it.

    python benchmarks/host_overhead.py --out h200-host      # a GPU: below a minute
    python benchmarks/host_overhead.py --models tiny --dtype float32 --quick

The first part queues batches of 32 short rows (12 to 16 tokens) while the device thread is held,
lets it go, and times the parts of its work from one formed batch to the next. Nothing is tokenised
then, and no other thread works, so that these are the thread's own microseconds. It is done twice:
with one request for all rows, and with one request a row, each awaited in an event loop. Without
a GPU the model runs within ``launch``, and the target says nothing.

The second part, on a GPU only, runs ``Engine.run`` over the log-normal workload under
torch.profiler and adds up when the compute stream had nothing to do.

Writes OUT.json after every measurement, and OUT.md at the end. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import synthetic
from benchmarks.engine_throughput import counted
from benchmarks.report import Table, number
from benchmarks.synthetic import MODELS, Budget
from shapeserve.engine import Engine
from shapeserve.engine.rows import PreparedSample
from shapeserve.layout.transfer import Landing

LAYOUTS = ("packed", "padded")
# 32 rows of 12 to 16 tokens, 448 together: a packed bucket that holds exactly them.
BATCH_LENGTHS = [*([12, 13, 14, 15, 16] * 6), 14, 14]
MAX_LENGTH = 16
POLICIES: Mapping[str, Any] = {
    "packed": {"tokens": {"explicit": [sum(BATCH_LENGTHS)]}},
    "padded": {"batch": {"explicit": [len(BATCH_LENGTHS)]}, "seq": {"explicit": [MAX_LENGTH]}},
}
LIMITS = {"max_queue_rows": 1_000_000, "max_queue_tokens": 100_000_000}
BATCHES, QUICK_BATCHES = 400, 30
STEADY_FROM = 0.25  # the share of batches, and of the trace, that is left out at its start
STEADY_TO = 0.9
TARGET_US, TARGET_IDLE = 120.0, 0.10
IDLE_PASSES = 3
BUDGET_S = 40.0

# In the order of a cycle; ``wait`` is the device's time, ``settle`` holds the callbacks.
PARTS = ("form", "write", "launch", "read", "wait", "finish", "settle", "complete", "rest")

Span = tuple[str, float, float]  # name, start, end
Interval = tuple[float, float]

console = Console(width=None if sys.stdout.isatty() else 160)


# --- host work


class Timeline:
    """Start and end of what the device thread does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its spans noted; a batch that is not formed is none."""

        def run(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            answer = call(*args, **options)
            ended = time.perf_counter()
            if name != "form" or answer is not None:
                self.spans.append((name, started, ended))
            return answer

        return run


@contextmanager
def instrumented(engine: Engine, timeline: Timeline) -> Iterator[None]:
    """Time the parts of the device thread's work; each costs it about half a microsecond more."""
    batcher, executor, layout = engine._batcher, engine._executor, engine.runner.layout
    parts = (
        ("form", batcher, "next_batch"),
        ("write", layout, "write"),
        ("launch", executor, "launch"),
        ("read", layout, "read"),
        ("finish", executor, "finish"),
        ("settle", executor, "_settle"),
        ("complete", batcher, "complete"),
    )
    arrays = Landing.arrays

    def wait(landing: Landing) -> None:
        if landing.done is not None:
            landing.done.synchronize()

    timed_wait = timeline.timed("wait", wait)

    def landed(landing: Landing) -> list[np.ndarray]:
        timed_wait(landing)
        return arrays(landing)

    with ExitStack() as patches:
        for name, owner, method in parts:
            timed = timeline.timed(name, getattr(owner, method))
            patches.enter_context(patch.object(owner, method, timed))
        patches.enter_context(patch.object(Landing, "arrays", landed))
        yield


def cycles(spans: Sequence[Span]) -> list[dict[str, float]]:
    """Return the parts of each cycle, from one formed batch to the next, in microseconds.

    Parts that lie within others are taken out of them, so that all add up to ``total``.
    """
    ordered = sorted(spans, key=lambda span: span[2])
    ends = [span[2] for span in ordered]
    marks = [end for name, _, end in ordered if name == "form"]
    found = []
    for begin, end in pairwise(marks):
        sums: dict[str, float] = defaultdict(float)
        for name, started, ended in ordered[bisect_left(ends, begin) + 1 :]:
            if ended > end:
                break
            sums[name] += 1e6 * (ended - started)
        sums["launch"] -= sums["write"] + sums["read"]
        sums["finish"] -= sums["wait"] + sums["settle"]
        total = 1e6 * (end - begin)
        rest = total - sum(sums.values())
        found.append({**{part: sums[part] for part in PARTS}, "rest": rest, "total": total})
    return found


def steady(items: Sequence[Any]) -> Sequence[Any]:
    """Leave out how it begins and ends."""
    return items[int(len(items) * STEADY_FROM) : max(int(len(items) * STEADY_TO), 1)]


@contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """Keep the device thread from its queue until the event is set."""
    gate, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait()

    holder = threading.Thread(target=engine.on_device, args=(hold,))
    holder.start()
    entered.wait()
    try:
        yield gate
    finally:
        gate.set()
        holder.join()


def run_as_one(engine: Engine, prepared: Sequence[PreparedSample]) -> float:
    """Run all rows as one request; return the seconds from the gate to the last answer."""
    with held(engine) as gate:
        answers = engine.admit_when_free(prepared)
        started = time.perf_counter()
        gate.set()
        answers()
        return time.perf_counter() - started


def run_one_by_one(engine: Engine, prepared: Sequence[PreparedSample]) -> float:
    """Run every row as a request of its own, awaited in an event loop."""

    async def scenario() -> float:
        with held(engine) as gate:
            tasks = [asyncio.ensure_future(engine.submit_prepared([row])) for row in prepared]
            await asyncio.sleep(0)  # each runs until it waits
            started = time.perf_counter()
            gate.set()
            await asyncio.gather(*tasks)
            return time.perf_counter() - started

    return asyncio.run(scenario())


RUNS: Mapping[str, Callable[[Engine, Sequence[PreparedSample]], float]] = {
    "one request": run_as_one,
    "one request a row": run_one_by_one,
}


def measure_host(
    directory: Path, model: str, layout: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure the device thread's work for each batch of 32 short rows."""
    # What is captured does not matter to the host; eager graphs are there at once.
    cuda = synthetic.use_device(options.device).type == "cuda"
    config = synthetic.engine_config(
        directory,
        layout=layout,
        tier="eager_graph" if cuda else "eager",
        dtype=options.dtype,
        device=options.device,
        limits=LIMITS,
        policy=POLICIES[layout],
    )
    lengths = np.tile(BATCH_LENGTHS, options.batches)
    with Engine(config).start() as engine:
        ids = synthetic.token_ids(lengths, MODELS[model].vocab)
        prepared = [p for p in engine.prepare_each(ids) if isinstance(p, PreparedSample)]
        return {name: _measure_run(engine, prepared, run) for name, run in RUNS.items()}


def _measure_run(
    engine: Engine,
    prepared: Sequence[PreparedSample],
    run: Callable[[Engine, Sequence[PreparedSample]], float],
) -> dict[str, Any]:
    run(engine, prepared)
    before = counted(engine)
    plain_s = run(engine, prepared)
    batches, _, device_s = (b - a for a, b in zip(before, counted(engine), strict=True))
    timeline = Timeline()
    with instrumented(engine, timeline):
        run(engine, prepared)
    found = steady(cycles(timeline.spans))
    parts = {part: statistics.median(c[part] for c in found) for part in (*PARTS, "total")}
    host = [c["total"] - c["wait"] - c["settle"] for c in found]
    return {
        "rows_per_batch": len(prepared) / batches,
        "batches": int(batches),
        "parts_us": parts,
        "host_us": statistics.median(host),
        "host_mean_us": statistics.fmean(host),
        "host_max_us": max(host),
        "uninstrumented_us_per_batch": 1e6 * plain_s / batches,
        "device_us_per_batch": 1e6 * device_s / batches,
    }


# --- idle time of the device


def union_length(intervals: Iterable[Interval]) -> float:
    """Return how much time at least one of the intervals covers."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            covered += end - max(begin, reached)
            reached = end
    return covered


def gaps(intervals: Iterable[Interval]) -> list[float]:
    """Return the lengths of the gaps between the intervals, in order of time."""
    found: list[float] = []
    reached: float | None = None
    for begin, end in sorted(intervals):
        if reached is not None and begin > reached:
            found.append(begin - reached)
        reached = end if reached is None else max(reached, end)
    return found


def idle_shares(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Read the events of a chrome trace: how much of its steady part the device did nothing.

    ``between_replays`` counts the compute stream (the one that worked longest) from the first
    kernel of a replay to its last as busy; ``kernels`` counts the gaps inside replays as well,
    and takes kernels and copies of all streams together.
    """
    work = [
        event
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if not work:
        raise ValueError("the trace holds no kernel")
    streams: dict[Any, float] = defaultdict(float)
    for event in work:
        streams[event["args"].get("stream")] += event["dur"]
    compute = max(streams, key=streams.__getitem__)
    first = min(event["ts"] for event in work)
    last = max(event["ts"] + event["dur"] for event in work)
    begin = first + STEADY_FROM * (last - first)
    end = first + STEADY_TO * (last - first)
    launches: dict[Any, Interval] = {}
    everything: list[Interval] = []
    for index, event in enumerate(work):
        span = (event["ts"], event["ts"] + event["dur"])
        everything.append(span)
        if event["args"].get("stream") == compute:
            # All nodes of a replayed graph carry the correlation of its launch.
            key = event["args"].get("correlation", -1 - index)
            known = launches.get(key, span)
            launches[key] = (min(known[0], span[0]), max(known[1], span[1]))
    replays = _clipped(launches.values(), begin, end)
    between = sorted(gaps(replays), reverse=True)
    return {
        "between_replays": 1 - union_length(replays) / (end - begin),
        "kernels": 1 - union_length(_clipped(everything, begin, end)) / (end - begin),
        "steady_ms": (end - begin) / 1e3,
        "launches": len(replays),
        "events": len(work),
        "streams": len(streams),
        "largest_gaps_us": between[:10],
        "median_gap_us": statistics.median(between) if between else 0.0,
    }


def _clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(a, begin), min(b, end)) for a, b in intervals if b > begin and a < end]


def measure_idle(
    directory: Path, model: str, layout: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Profile ``Engine.run`` over the log-normal workload, several times over."""
    config = synthetic.engine_config(
        directory,
        layout=layout,
        tier=options.tier,
        dtype=options.dtype,
        device=options.device,
        backend=options.backend,
        limits={"max_batch_tokens": options.max_batch_tokens},
    )
    lengths = synthetic.workload_lengths("lognormal", options.rows)
    ids = synthetic.token_ids(lengths, MODELS[model].vocab) * IDLE_PASSES
    with Engine(config).start() as engine:
        engine.run(ids)
        before = counted(engine)
        started = time.perf_counter()
        engine.run(ids)
        plain_s = time.perf_counter() - started
        batches, _, device_s = (b - a for a, b in zip(before, counted(engine), strict=True))
        _profiled(engine, ids[:64])  # the first profile pays for the profiler
        events, profiled_s = _profiled(engine, ids)
        return {
            "tier": sorted({v.tier.value for v in engine.runner.variants.all.values()}),
            **idle_shares(events),
            "ms": 1e3 * plain_s,
            "profiled_ms": 1e3 * profiled_s,
            "device_ms": 1e3 * device_s,
            # Start and end included, so above the share of the steady part.
            "by_events": 1 - device_s / plain_s,
            "batches": int(batches),
        }


def _profiled(engine: Engine, ids: Sequence[np.ndarray]) -> tuple[list[dict[str, Any]], float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        engine.run(ids)
        seconds = time.perf_counter() - started
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="shapeserve-trace-") as work:
        path = Path(work) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events, seconds


# --- a run


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic.add_options(parser, budget_s=BUDGET_S, models="minilm")
    parser.add_argument("--layouts", type=synthetic.names(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--batches", type=int, help=f"({BATCHES}; quick: {QUICK_BATCHES})")
    parser.add_argument("--rows", type=int, help="of the log-normal workload, not its 4,096")
    parser.add_argument("--max-batch-tokens", type=int, default=16384, help="of the second part")
    parser.add_argument(
        "--tier",
        choices=["auto", "graph", "eager_graph"],
        default="auto",
        help="of the second part",
    )
    options = parser.parse_args(arguments)
    options.out = options.out or "latest-host"
    options.batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both parts; write and show the result."""
    options = parse(arguments)
    budget = Budget(options.time_budget_s)
    result = synthetic.new_result("host_overhead", options)
    result["targets"] = {"host_us": TARGET_US, "idle": TARGET_IDLE}
    host: dict[str, Any] = {}
    idle: dict[str, Any] = {}
    result |= {"host": host, "idle": idle}
    base: Path = options.results_dir / options.out
    console.print(synthetic.headline(result["environment"]), highlight=False)
    cuda = synthetic.use_device(options.device).type == "cuda"
    kinds = [("host", host, measure_host)] + [("idle", idle, measure_idle)] * cuda
    with tempfile.TemporaryDirectory(prefix="shapeserve-bench-") as work:
        for kind, outcomes, measure in kinds:
            for model in options.models:
                directory = Path(work) / kind / model
                longest = MAX_LENGTH if kind == "host" else synthetic.LONGEST
                synthetic.write_model(directory, model, options.dtype, max_length=longest)
                for layout in options.layouts:
                    name = f"{model} {layout}"
                    run = partial(measure, directory, model, layout, options)
                    outcomes[name] = synthetic.attempt(f"{name}: {kind}", budget, console, run)
                    synthetic.write_json(result, base)
    every = {
        f"{name}: {kind}": outcome
        for kind, outcomes, _ in kinds
        for name, outcome in outcomes.items()
    }
    made = [host_table(host), idle_table(idle), synthetic.failure_table(every)]
    synthetic.finish(result, made, base, console)
    return int(synthetic.failed(every))


def host_table(outcomes: Mapping[str, Any]) -> Table:
    """Microseconds of each part."""
    title = (
        f"Device thread, microseconds from one formed batch of {len(BATCH_LENGTHS)} rows to the "
        f"next (medians); host = all but wait and settle, target {TARGET_US:.0f}"
    )
    header = ["engine", "requests", "rows/batch", "host", *PARTS, "total", "untimed", "device"]
    rows = []
    for name, outcome in outcomes.items():
        for requests in RUNS:
            found = outcome.get(requests)
            if found is None:
                continue
            cells = [
                found["rows_per_batch"],
                found["host_us"],
                *(found["parts_us"][part] for part in (*PARTS, "total")),
                found["uninstrumented_us_per_batch"],
                found["device_us_per_batch"],
            ]
            rows.append([name, requests, *(number(cell) for cell in cells)])
    return Table(title, header, rows)


def idle_table(outcomes: Mapping[str, Any]) -> Table:
    """Shares of the time in which the device did nothing."""
    header = [
        "engine",
        "ran as",
        "idle between replays",
        "idle between kernels",
        "1 - device/wall",
        "ms",
        "profiled ms",
        "batches",
        "median gap us",
        "largest gap us",
    ]
    rows = [
        [
            name,
            ", ".join(found["tier"]),
            *(f"{found[share]:.1%}" for share in ("between_replays", "kernels", "by_events")),
            number(found["ms"]),
            number(found["profiled_ms"]),
            str(found["batches"]),
            number(found["median_gap_us"]),
            number(max(found["largest_gaps_us"], default=0.0)),
        ]
        for name, found in outcomes.items()
        if found["status"] == "ok"
    ]
    title = f"Engine.run at saturation, {IDLE_PASSES} times the workload; target {TARGET_IDLE:.0%}"
    return Table(title, header, rows)


if __name__ == "__main__":
    sys.exit(main())
