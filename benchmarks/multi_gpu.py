"""How the rate grows with the number of GPUs: one process for each, the same rows split by tokens.

    python benchmarks/multi_gpu.py --out h200-x2            # every GPU there is; a few minutes
    python benchmarks/multi_gpu.py --models tiny --dtype float32 --tier eager --quick \\
        --devices 2                                         # no GPU: two processes

The processes are started once. For every number of devices, that many of them run their share of
the rows, started together by a barrier, while the others wait; start-up is not counted. A pass
lasts from the first process's start to the last one's end. ``runner`` is the engine's runner on
its device thread, ``engine`` is ``Engine.run`` (see engine_throughput.py).

Writes OUT.json and OUT.md. Exit code 1 if a process failed.
"""

from __future__ import annotations

import argparse
import heapq
import os
import queue
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import synthetic
from benchmarks.engine_throughput import Pass, engine_pass, runner_pass
from benchmarks.report import Table, number
from benchmarks.synthetic import MODELS
from shapeserve.engine import Engine

VISIBLE = "CUDA_VISIBLE_DEVICES"
ROWS, QUICK_ROWS = 65_536, 512
PASSES = 3
BUDGET_S = 400.0
LEVELS = ("runner", "engine")
_POLL_S = 1.0

console = Console(width=None if sys.stdout.isatty() else 140)


class Barrier(Protocol):
    """Of threads or of processes."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all others."""

    def abort(self) -> None:
        """Make everybody who waits raise."""


class Channel(Protocol):
    """A queue of threads or of processes."""

    def put(self, item: Any) -> None:
        """Send something to the parent."""


@dataclass(frozen=True, slots=True)
class Job:
    """What every process does.

    Attributes:
        directory: of the model.
        model: its name in ``MODELS``.
        counts: numbers of devices to compare, ascending.
        rows: of the log-normal workload, all devices together.
        passes: that count, for each number of devices and level.
        device: ``cuda`` or ``cpu``.
        layout: of the rows.
        tier: of the variants.
        dtype: of weights and arithmetic.
        backend: of torch.compile.
        max_batch_tokens: of a batch.
        timeout_s: for a barrier.
    """

    directory: Path
    model: str
    counts: tuple[int, ...]
    rows: int
    passes: int
    device: str
    layout: str
    tier: str
    dtype: str
    backend: str
    max_batch_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A process has its engine."""

    rank: int
    seconds: float
    device: str


@dataclass(frozen=True, slots=True)
class Timed:
    """One process's part of a pass; times are of the machine's monotonic clock."""

    rank: int
    count: int
    level: str
    number: int
    start_s: float
    end_s: float
    rows: int
    tokens: int
    device_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A process is gone."""

    rank: int
    error: str


def split_by_tokens(lengths: Sequence[int] | np.ndarray, parts: int) -> list[list[int]]:
    """Give every row to one of ``parts``, so that all have about as many tokens.

    The longest rows first, each to the part with the fewest tokens so far; within a part the rows
    keep their order.
    """
    loads = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for index in np.argsort(np.negative(lengths), kind="stable"):
        tokens, part = heapq.heappop(loads)
        shares[part].append(int(index))
        heapq.heappush(loads, (tokens + int(lengths[index]), part))
    return [sorted(share) for share in shares]


def work(rank: int, job: Job, barriers: Mapping[int, Barrier], channel: Channel) -> None:
    """Be one process: start an engine, then run a share of every pass that has one for it."""
    try:
        _work(rank, job, barriers, channel)
    except BaseException:
        channel.put(Failure(rank, traceback.format_exc()))
        for barrier in barriers.values():
            barrier.abort()


def _work(rank: int, job: Job, barriers: Mapping[int, Barrier], channel: Channel) -> None:
    lengths = synthetic.workload_lengths("lognormal", job.rows)
    ids = synthetic.token_ids(lengths, MODELS[job.model].vocab)
    shares = {count: split_by_tokens(lengths, count)[rank] for count in job.counts if rank < count}
    config = synthetic.engine_config(
        job.directory,
        layout=job.layout,
        tier=job.tier,
        dtype=job.dtype,
        device=job.device,
        backend=job.backend,
        limits={"max_batch_tokens": job.max_batch_tokens},
    )
    started = time.monotonic()
    with Engine(config).start() as engine:
        name = torch.cuda.get_device_name() if job.device == "cuda" else "cpu"
        channel.put(Ready(rank, time.monotonic() - started, name))
        smallest = [ids[i] for i in shares[max(shares)]]
        levels: dict[str, Callable[[list[np.ndarray]], Pass]] = {
            "runner": lambda rows: engine.on_device(partial(runner_pass, engine.runner, rows)),
            "engine": partial(engine_pass, engine),
        }
        for run in levels.values():
            run(smallest)  # not counted
        barriers[job.counts[-1]].wait(job.timeout_s)  # a start would disturb those who run
        for count, share in shares.items():
            rows = [ids[i] for i in share]
            for level, run in levels.items():
                for number_ in range(job.passes):
                    barriers[count].wait(job.timeout_s)
                    start_s = time.monotonic()
                    done = run(rows)
                    channel.put(
                        Timed(
                            rank,
                            count,
                            level,
                            number_,
                            start_s,
                            time.monotonic(),
                            len(rows),
                            sum(map(len, rows)),
                            done.device_s or 0.0,
                        )
                    )


def summarise(timings: Sequence[Timed]) -> list[dict[str, Any]]:
    """Return the rates for every number of devices and level, and how they scale from one.

    ``scaling`` is the rate over that of one device; ``efficiency`` that for each device.
    """
    passes: dict[tuple[str, int], dict[int, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for timed in timings:
        passes[timed.level, timed.count][timed.number].append(timed)
    found: list[dict[str, Any]] = []
    for (level, count), by_number in sorted(passes.items()):
        walls = [
            max(t.end_s for t in parts) - min(t.start_s for t in parts)
            for parts in by_number.values()
        ]
        parts = next(iter(by_number.values()))
        seconds = statistics.median(walls)
        tokens = [t.tokens for t in parts]
        found.append(
            {
                "level": level,
                "devices": count,
                "passes": len(walls),
                **synthetic.spread(walls),
                "rows_per_s": sum(t.rows for t in parts) / seconds,
                "tokens_per_s": sum(tokens) / seconds,
                # How much of a process's time its device worked.
                "device_busy": statistics.median(
                    t.device_s / (t.end_s - t.start_s)
                    for every in by_number.values()
                    for t in every
                ),
                "imbalance": max(tokens) / statistics.fmean(tokens) - 1,
            }
        )
    base = {row["level"]: row["rows_per_s"] for row in found if row["devices"] == 1}
    for row in found:
        alone = base.get(row["level"])
        row["scaling"] = row["rows_per_s"] / alone if alone else None
        row["efficiency"] = row["scaling"] / row["devices"] if alone else None
    return found


def visible_devices(options: argparse.Namespace) -> list[str]:
    """Return the names of the devices to use, as ``CUDA_VISIBLE_DEVICES`` writes them."""
    if synthetic.use_device(options.device).type == "cpu":
        return [""] * (options.devices or 1)
    given = os.environ.get(VISIBLE)
    there = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return there[: options.devices or len(there)]


def run_processes(job: Job, devices: Sequence[str]) -> tuple[list[Ready], list[Timed]]:
    """Start a process for each device and gather what they say.

    Raises:
        RuntimeError: one of them failed, died, or all together took too long.
    """
    context = get_context("spawn")
    channel = context.Queue()
    barriers = {count: context.Barrier(count) for count in {*job.counts, len(devices)}}
    processes = []
    for rank, device in enumerate(devices):
        process = context.Process(target=work, args=(rank, job, barriers, channel))
        # Set before it starts, because CUDA reads it once and whoever imports first decides.
        with patch.dict(os.environ, {VISIBLE: device}):
            process.start()
        processes.append(process)
    expected = len(devices) + sum(job.counts) * len(LEVELS) * job.passes
    try:
        return _gather(channel, processes, expected, job.timeout_s)
    finally:
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.terminate()


def _gather(
    channel: Any, processes: Sequence[Any], expected: int, timeout_s: float
) -> tuple[list[Ready], list[Timed]]:
    ready: list[Ready] = []
    timings: list[Timed] = []
    deadline = time.monotonic() + timeout_s
    while len(ready) + len(timings) < expected:
        try:
            said = channel.get(timeout=_POLL_S)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                codes = [process.exitcode for process in processes]
                raise RuntimeError(f"a process died; exit codes {codes}") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end within {timeout_s:.0f} s") from None
            continue
        if isinstance(said, Failure):
            raise RuntimeError(f"process {said.rank} failed:\n{said.error}")
        if isinstance(said, Ready):
            ready.append(said)
            console.print(f"  {said.device} ready in {said.seconds:.1f} s", highlight=False)
        else:
            timings.append(said)
    return ready, timings


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic.add_options(parser, budget_s=BUDGET_S, models="bert-base")
    parser.add_argument("--devices", type=int, help="how many (all GPUs; without a GPU: one)")
    parser.add_argument("--rows", type=int, help=f"({ROWS}; quick: {QUICK_ROWS})")
    parser.add_argument("--passes", type=int, default=PASSES, help=f"that count ({PASSES})")
    parser.add_argument("--layout", choices=["packed", "padded"], default="packed")
    parser.add_argument(
        "--tier", choices=["auto", "graph", "eager_graph", "compiled", "eager"], default="auto"
    )
    parser.add_argument("--max-batch-tokens", type=int, default=16384)
    options = parser.parse_args(arguments)
    options.out = options.out or "latest-multi-gpu"
    options.rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    return options


def make_job(model: str, directory: Path, devices: int, options: argparse.Namespace) -> Job:
    """Return what the processes do for one model."""
    counts = sorted({n for n in (1, 2, 4, 8) if n < devices} | {devices})
    return Job(
        directory=directory,
        model=model,
        counts=tuple(counts),
        rows=options.rows,
        passes=options.passes,
        device=synthetic.use_device(options.device).type,
        layout=options.layout,
        tier=options.tier,
        dtype=options.dtype,
        backend=options.backend,
        max_batch_tokens=options.max_batch_tokens,
        timeout_s=options.time_budget_s,
    )


def measure(model: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the numbers of devices for one model."""
    devices = visible_devices(options)
    synthetic.write_model(directory, model, options.dtype)
    job = make_job(model, directory, len(devices), options)
    ready, timings = run_processes(job, devices)
    return {
        "ready_s": {str(said.rank): said.seconds for said in ready},
        "devices": [said.device for said in sorted(ready, key=lambda said: said.rank)],
        "rounds": summarise(timings),
        "timings": [asdict(timed) for timed in timings],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every model; write and show the result."""
    options = parse(arguments)
    budget = synthetic.Budget(options.time_budget_s)
    result = synthetic.new_result("multi_gpu", options)
    lengths = synthetic.workload_lengths("lognormal", options.rows)
    result["workload"] = synthetic.describe_lengths(lengths)
    outcomes: dict[str, Any] = {}
    result["models"] = outcomes
    base: Path = options.results_dir / options.out
    console.print(synthetic.headline(result["environment"]), highlight=False)
    with tempfile.TemporaryDirectory(prefix="shapeserve-bench-") as temporary:
        for model in options.models:
            run = partial(measure, model, Path(temporary) / model, options)
            outcomes[model] = synthetic.attempt(model, budget, console, run)
            synthetic.write_json(result, base)
    made = [rate_table(result), synthetic.failure_table(outcomes)]
    synthetic.finish(result, made, base, console)
    return int(synthetic.failed(outcomes))


def rate_table(result: Mapping[str, Any]) -> Table:
    """Rates and scaling."""
    about = result["workload"]
    header = ["model", "level", "GPUs", "s (min-max)", "rows/s", "Mtokens/s", "scaling"]
    header += ["efficiency", "device busy", "imbalance"]
    rows = []
    for model, outcome in result["models"].items():
        for found in outcome.get("rounds", []):
            times = (found["median_ms"], found["min_ms"], found["max_ms"])
            median, low, high = (f"{ms / 1e3:.3f}" for ms in times)
            rows.append(
                [
                    model,
                    found["level"],
                    str(found["devices"]),
                    f"{median} ({low}-{high})",
                    number(found["rows_per_s"], 0),
                    number(found["tokens_per_s"] / 1e6, 3),
                    number(found["scaling"], 2),
                    number(found["efficiency"], 2),
                    f"{found['device_busy']:.1%}",
                    f"{found['imbalance']:.2%}",
                ]
            )
    title = f"{about['rows']:,} rows, {about['tokens']:,} tokens, split by tokens"
    return Table(title, header, rows)


if __name__ == "__main__":
    sys.exit(main())
