"""How long one request takes alone: from ``await engine.submit(ids)`` to its vector.

    python benchmarks/latency.py --out h200-latency         # a GPU: below 90 seconds
    python benchmarks/latency.py --tier graph --time-budget-s 240   # as served by default
    python benchmarks/latency.py --models tiny --dtype float32 --quick   # no GPU: is it there?

Beside it stand the parts that it is made of, measured on the device thread of the same engine: the
bare replay of the same variant with one synchronisation, and the runner's launch and finish; and
``submit_prepared``, which is submit without the hop to a thread that checks the request.

Writes OUT.json after every engine, and OUT.md at the end. Exit code 1 if an engine failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import synthetic
from benchmarks.report import Table, number
from benchmarks.scenarios import percentile
from benchmarks.synthetic import MODELS, Budget
from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid
from shapeserve.engine import Engine
from shapeserve.layout import MIN_ROW_TOKENS, RowArrays
from shapeserve.runner import ModelRunner

LENGTHS = (16, 128, 512)
LAYOUTS = ("packed", "padded")
CALLS, QUICK_CALLS, WARM_CALLS = 400, 20, 30
BUDGET_S = 75.0
LEVELS = ("replay", "runner", "submit_prepared", "submit")

console = Console(width=None if sys.stdout.isatty() else 160)


def bucket_for(grid: Grid, axis: str, length: int) -> Bucket:
    """Return the bucket in which a row runs alone."""
    if BATCH in grid.axes:
        bucket = grid.fit_row({axis: length})
    else:
        bucket = grid.fit({TOKENS: max(length, MIN_ROW_TOKENS)})
    if bucket is None:
        raise ValueError(f"no bucket holds a row of {length}")
    return bucket


def time_replays(runner: ModelRunner, row: RowArrays, bucket: Bucket, calls: int) -> list[float]:
    """Time the bare variant, inputs in place; on the device thread with nothing on its way."""
    inputs = runner.layout.write([row], bucket.as_dict())
    run = runner.variants[bucket].run

    def call() -> None:
        run(*inputs)
        synthetic.synchronize(runner.device)

    return _timed(call, calls)


def time_runner(runner: ModelRunner, row: RowArrays, bucket: Bucket, calls: int) -> list[float]:
    """Time launch and finish of one row; on the device thread."""
    sizes = bucket.as_dict()
    return _timed(lambda: runner.launch([row], sizes, fallback=False).finish(), calls)


def _timed(call: Callable[[], object], calls: int) -> list[float]:
    seconds = []
    for i in range(WARM_CALLS + calls):
        started = time.perf_counter()
        call()
        if i >= WARM_CALLS:
            seconds.append(time.perf_counter() - started)
    return seconds


async def time_awaits(call: Callable[[], Awaitable[object]], calls: int) -> list[float]:
    """Time one call after another, each awaited in the event loop."""
    seconds = []
    for i in range(WARM_CALLS + calls):
        started = time.perf_counter()
        await call()
        if i >= WARM_CALLS:
            seconds.append(time.perf_counter() - started)
    return seconds


def measure_length(engine: Engine, ids: np.ndarray, calls: int) -> dict[str, Any]:
    """Measure all levels for one request."""
    runner = engine.runner
    (name,) = (spec.name for spec in runner.spec.inputs.values() if spec.make is None)
    (axis,) = runner.spec.row_axes
    row = RowArrays({name: ids}, {axis: len(ids)})
    bucket = bucket_for(runner.grid, axis, len(ids))
    prepared = engine.prepare([ids])
    times = {
        "replay": engine.on_device(partial(time_replays, runner, row, bucket, calls)),
        "runner": engine.on_device(partial(time_runner, runner, row, bucket, calls)),
        "submit_prepared": asyncio.run(
            time_awaits(partial(engine.submit_prepared, prepared), calls)
        ),
        "submit": asyncio.run(time_awaits(partial(engine.submit, ids), calls)),
    }
    return {
        "bucket": bucket.label,
        "tier": runner.variants[bucket].tier.value,
        "calls": calls,
        **{level: summarise(seconds) for level, seconds in times.items()},
    }


def summarise(seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": 1e3 * percentile(ordered, 50),
        "p99_ms": 1e3 * percentile(ordered, 99),
        "min_ms": 1e3 * ordered[0],
        "max_ms": 1e3 * ordered[-1],
    }


def measure_engine(
    directory: Path, model: str, layout: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Start one engine and measure every length."""
    config = synthetic.engine_config(
        directory,
        layout=layout,
        tier=options.tier,
        dtype=options.dtype,
        device=options.device,
        backend=options.backend,
        limits={"max_batch_tokens": options.max_batch_tokens},
    )
    vocab = MODELS[model].vocab
    started = time.perf_counter()
    with Engine(config).start() as engine:
        ready_s = time.perf_counter() - started
        lengths = {
            str(length): measure_length(
                engine, synthetic.token_ids(np.array([length]), vocab)[0], options.calls
            )
            for length in options.lengths
        }
    return {"ready_s": ready_s, "lengths": lengths}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic.add_options(parser, budget_s=BUDGET_S, models="minilm,bert-base")
    parser.add_argument("--layouts", type=synthetic.names(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--tier",
        choices=["graph", "eager_graph", "compiled", "eager"],
        help="of the variants (eager_graph; without a GPU eager): what comes on top of the replay "
        "does not depend on it, and graph takes a compile for each engine",
    )
    parser.add_argument("--lengths", type=synthetic.numbers, default=list(LENGTHS))
    parser.add_argument("--calls", type=int, help=f"of each level ({CALLS}; quick: {QUICK_CALLS})")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    options.out = options.out or "latest-latency"
    cuda = synthetic.use_device(options.device).type == "cuda"
    options.tier = options.tier or ("eager_graph" if cuda else "eager")
    options.calls = options.calls or (QUICK_CALLS if options.quick else CALLS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every engine; write and show the result."""
    options = parse(arguments)
    budget = Budget(options.time_budget_s)
    result = synthetic.new_result("latency", options)
    outcomes = result["engines"] = {}
    base: Path = options.results_dir / options.out
    console.print(synthetic.headline(result["environment"]), highlight=False)
    with tempfile.TemporaryDirectory(prefix="shapeserve-bench-") as work:
        for model in options.models:
            directory = synthetic.write_model(Path(work) / model, model, options.dtype)
            for layout in options.layouts:
                measure = partial(measure_engine, directory, model, layout, options)
                name = f"{model} {layout}"
                outcomes[name] = synthetic.attempt(name, budget, console, measure)
                synthetic.write_json(result, base)
    made = [latency_table(result), synthetic.failure_table(outcomes)]
    synthetic.finish(result, made, base, console)
    return int(synthetic.failed(outcomes))


def latency_table(result: dict[str, Any]) -> Table:
    """Every length of every engine."""
    header = ["engine", "tokens", "bucket", "ran as"]
    header += [f"{level} p50 ms" for level in LEVELS]
    header += ["submit p99 ms", "submit - replay, p50 ms"]
    rows = []
    for name, outcome in result["engines"].items():
        for length, levels in outcome.get("lengths", {}).items():
            above = levels["submit"]["p50_ms"] - levels["replay"]["p50_ms"]
            times = [levels[level]["p50_ms"] for level in LEVELS]
            cells = [*times, levels["submit"]["p99_ms"], above]
            rows.append(
                [name, length, levels["bucket"], levels["tier"], *(number(c, 3) for c in cells)]
            )
    calls = result["settings"]["calls"]
    return Table(f"One request at a time, {calls} calls of each level", header, rows)


if __name__ == "__main__":
    sys.exit(main())
