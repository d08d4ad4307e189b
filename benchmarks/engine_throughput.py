"""How long an engine takes for thousands of requests of mixed lengths, against the simple loops.

    python benchmarks/engine_throughput.py --out h200      # a GPU: below six minutes
    python benchmarks/engine_throughput.py --quick         # fewer rows and passes
    python benchmarks/engine_throughput.py --models tiny --dtype float32 --backend eager --quick \\
        --max-batch-tokens 512                             # no GPU: is it all there?

Everything is timed from token ids on the host to vectors on the host. An arm of shapeserve is
measured at three levels: its runner (batches formed in the plainest way, launched and finished on
the device thread), ``Engine.run`` with all that it checks and counts, and the device alone.

Writes OUT.json after every arm, and OUT.md and OUT.png at the end. Exit code 1 if an arm failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import synthetic
from benchmarks.report import NO_VALUE, Table, number
from benchmarks.synthetic import MODELS, Budget, Sizes
from shapeserve.buckets import BATCH, TOKENS, Grid, RowKey
from shapeserve.engine import Engine
from shapeserve.engine.rows import Result
from shapeserve.layout import MIN_ROW_TOKENS, RowArrays
from shapeserve.runner import Flight, ModelRunner
from shapeserve.warmup import WarmupProgress

# What is most worth knowing comes first: a run may be out of time.
LAYOUTS = ("packed", "padded")
GPU_TIERS, CPU_TIERS = ("graph", "eager_graph"), ("compiled", "eager")
BASELINES = ("eager", "sorted-eager", "dynamic", "no-batching")
FAMILIES = (
    *(f"{layout}-{tier}" for tier in (*GPU_TIERS, *CPU_TIERS) for layout in LAYOUTS),
    *BASELINES,
)
BATCH_ROWS = 32
SORTED_BATCH_ROWS = (32, 128)
NO_BATCHING_ROWS = 128  # the time of a pass is scaled up from so many
CHECKED_ROWS = 64
QUICK_ROWS, QUICK_PASSES, PASSES = 512, 3, 5
BUDGET_S = 320.0

Vectors = list[np.ndarray | None]
Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Tables need room; a log file has no width of its own.
console = Console(width=None if sys.stdout.isatty() else 200)


@dataclass(slots=True)
class Pass:
    """One pass over all requests of a workload.

    Attributes:
        seconds: from ids on the host to vectors on the host.
        vectors: one for each request, in order; None where it was left out.
        batches: how many ran.
        executed: elements that ran, padding included.
        device_s: how long the device worked, None if that was not measured.
        modes: rows by how they ran.
    """

    seconds: float
    vectors: Vectors
    batches: int
    executed: int
    device_s: float | None = None
    modes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a workload for one model, and what is right for some of them."""

    name: str
    ids: list[np.ndarray]
    lengths: np.ndarray
    floor_s: float
    checked: np.ndarray  # indices
    reference: np.ndarray  # [checked, D] float64

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on disk with its loads."""

    name: str
    directory: Path
    loads: list[Load]


Record = Callable[[str, dict[str, Any]], None]
"""Takes the name of an arm and what is known of it so far."""


# --- the simple loops


class Encoder(torch.nn.Module):
    """transformers' own model, the mean over real tokens in float32, unit length."""

    def __init__(self, directory: Path, dtype: str) -> None:
        super().__init__()
        from transformers import AutoModel
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.encoder = AutoModel.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            add_pooling_layer=False,
            local_files_only=True,
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # input_ids, attention_mask: [B, S] int64 -> [B, D] float32
        hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state.float()
        real = attention_mask.unsqueeze(-1).float()
        return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=1)


def load_encoder(directory: Path, dtype: str, device: torch.device) -> Encoder:
    """Load a model for the simple loops."""
    return Encoder(directory, dtype).eval().requires_grad_(False).to(device)


def padded_pass(
    program: Program,
    ids: Sequence[np.ndarray],
    batches: Callable[[], Sequence[Sequence[int]]],
    device: torch.device,
) -> Pass:
    """Run batches of indices, each padded to its longest row.

    The vectors stay on the device until the end, so that the host never waits for a batch.
    """
    outputs: list[torch.Tensor] = []
    order: list[int] = []
    executed = 0
    started = time.perf_counter()
    with torch.inference_mode():
        for rows in batches():
            longest = max(len(ids[i]) for i in rows)
            padded = np.zeros((len(rows), longest), np.int64)
            mask = np.zeros((len(rows), longest), np.int64)
            for at, i in enumerate(rows):
                padded[at, : len(ids[i])] = ids[i]
                mask[at, : len(ids[i])] = 1
            moved = [torch.from_numpy(array).to(device) for array in (padded, mask)]
            outputs.append(program(moved[0], moved[1]))
            order += rows
            executed += padded.size
        host = torch.cat(outputs).cpu().numpy()
    vectors: Vectors = [None] * len(ids)
    for at, i in enumerate(order):
        vectors[i] = host[at]
    return Pass(time.perf_counter() - started, vectors, len(outputs), executed)


def in_batches(order: Sequence[int], rows: int) -> list[Sequence[int]]:
    """Cut a list into batches."""
    return [order[at : at + rows] for at in range(0, len(order), rows)]


def by_length(ids: Sequence[np.ndarray]) -> list[int]:
    """Return the indices from the shortest to the longest."""
    return sorted(range(len(ids)), key=lambda i: len(ids[i]))


def spread_by_length(lengths: np.ndarray, rows: int) -> np.ndarray:
    """Pick rows at even distances from the shortest to the longest; ascending indices."""
    order = np.argsort(lengths, kind="stable")
    at = np.linspace(0, len(order) - 1, min(rows, len(order))).astype(int)
    return np.sort(order[at])


# --- shapeserve's runner


def form_batches(
    grid: Grid, axis: str, lengths: Sequence[int]
) -> Iterator[tuple[list[int], dict[str, int]]]:
    """Form batches in the plainest way: first in, first out.

    Packed rows fill up the largest bucket. Padded rows are grouped by the bucket of their length,
    and a group runs as soon as it fills its largest batch; what is left over runs at the end.

    Yields:
        Indices of rows, and the sizes to execute.
    """
    if BATCH in grid.axes:
        return _grouped(grid, axis, lengths)
    return _filled(grid, lengths)


def _filled(grid: Grid, lengths: Sequence[int]) -> Iterator[tuple[list[int], dict[str, int]]]:
    largest = grid.max_size(TOKENS)
    rows: list[int] = []
    units = 0

    def sizes() -> dict[str, int]:
        bucket = grid.fit({TOKENS: units})
        if bucket is None:
            raise ValueError(f"no bucket holds {units} tokens")
        return bucket.as_dict()

    for i, length in enumerate(lengths):
        unit = max(length, MIN_ROW_TOKENS)
        if rows and units + unit > largest:
            yield rows, sizes()
            rows, units = [], 0
        rows.append(i)
        units += unit
    if rows:
        yield rows, sizes()


def _grouped(
    grid: Grid, axis: str, lengths: Sequence[int]
) -> Iterator[tuple[list[int], dict[str, int]]]:
    lanes: dict[int, tuple[RowKey, int]] = {}  # length -> row shape, rows of its largest batch
    waiting: dict[RowKey, list[int]] = {}
    for i, length in enumerate(lengths):
        lane = lanes.get(length)
        if lane is None:
            bucket = grid.fit_row({axis: length})
            if bucket is None:
                raise ValueError(f"no bucket holds a row of {length}")
            key = bucket.without(BATCH)
            lane = lanes[length] = key, grid.batch_sizes(key)[-1]
        key, largest = lane
        rows = waiting.setdefault(key, [])
        rows.append(i)
        if len(rows) == largest:
            yield rows, grid.bucket(largest, key).as_dict()
            del waiting[key]
    for key, rows in waiting.items():
        size = next(n for n in grid.batch_sizes(key) if n >= len(rows))
        yield rows, grid.bucket(size, key).as_dict()


def runner_pass(runner: ModelRunner, ids: Sequence[np.ndarray]) -> Pass:
    """Run all requests through a runner; to be called on the device thread.

    As many batches are on their way as the layout has slots for.
    """
    (name,) = (spec.name for spec in runner.spec.inputs.values() if spec.make is None)
    (axis,) = runner.spec.row_axes
    (output,) = runner.spec.outputs
    done = Pass(0.0, [None] * len(ids), 0, 0, device_s=0.0)
    flights: deque[tuple[list[int], Flight]] = deque()
    device_s = 0.0

    def finish() -> None:
        nonlocal device_s
        indices, flight = flights.popleft()
        execution = flight.finish()
        device_s += execution.seconds
        done.modes[execution.mode.value] += len(indices)
        for i, row in zip(indices, execution.outputs, strict=True):
            done.vectors[i] = row[output]

    started = time.perf_counter()
    for indices, sizes in form_batches(runner.grid, axis, [len(row) for row in ids]):
        if len(flights) == runner.layout.slots:
            finish()
        rows = [RowArrays({name: ids[i]}, {axis: len(ids[i])}) for i in indices]
        flights.append((indices, runner.launch(rows, sizes, fallback=False)))
        done.batches += 1
        done.executed += prod(sizes.values())
    while flights:
        finish()
    done.seconds = time.perf_counter() - started
    done.device_s = device_s
    return done


def engine_pass(engine: Engine, ids: Sequence[np.ndarray]) -> Pass:
    """Run all requests through ``Engine.run``; batches and elements are what it counted."""
    (output,) = engine.spec.outputs
    before = counted(engine)
    started = time.perf_counter()
    results: list[Result] = engine.run(ids)
    seconds = time.perf_counter() - started
    after = counted(engine)
    batches, executed, device_s = (b - a for a, b in zip(before, after, strict=True))
    modes = Counter(result.mode.value for result in results)
    vectors: Vectors = [result.outputs[output] for result in results]
    return Pass(seconds, vectors, int(batches), int(executed), device_s, modes)


def counted(engine: Engine) -> list[float]:
    """Return how many batches ran so far, their elements, and the device's seconds."""
    totals = dict.fromkeys(("batches_total", "tokens_total", "device_seconds_total"), 0.0)
    for sample in engine.metrics.samples():
        name = sample.name.removeprefix("shapeserve_")
        if name in totals:
            totals[name] += sample.value
    return [*totals.values()]


# --- measuring an arm


def measure(run: Callable[[], Pass], load: Load, passes: int) -> dict[str, Any]:
    """Run one pass to warm up and some that count."""
    run()
    done = [run() for _ in range(passes)]
    last = done[-1]
    times = synthetic.spread([one.seconds for one in done])
    summary: dict[str, Any] = {
        **times,
        "tokens_per_s": 1e3 * load.tokens / times["median_ms"],
        "rows_per_s": 1e3 * len(load.ids) / times["median_ms"],
        "times_floor": times["median_ms"] / (1e3 * load.floor_s),
        "batches": last.batches,
        "waste": 1 - load.tokens / last.executed,
        "worst_error": worst_error(load, last.vectors),
        "modes": dict(last.modes),
    }
    if last.device_s is not None:
        summary["device_ms"] = 1e3 * statistics.median(one.device_s or 0.0 for one in done)
    return summary


def worst_error(load: Load, vectors: Vectors) -> float:
    """Return the largest norm-wise relative error of the checked rows; infinite if one lacks."""
    worst = 0.0
    for i, expected in zip(load.checked, load.reference, strict=True):
        vector = vectors[i]
        if vector is None or not np.isfinite(vector).all():
            return float("inf")
        gap = float(np.linalg.norm(vector.astype(np.float64) - expected))
        worst = max(worst, gap / float(np.linalg.norm(expected)))
    return worst


class StageTimer:
    """Takes the progress of a start and adds up the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage = "start"
        self._since = time.perf_counter()

    def __call__(self, progress: WarmupProgress) -> None:
        """Note that the stage before this one has ended."""
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = progress.stage, now


def measure_shapeserve(
    family: str, subject: Subject, options: argparse.Namespace, record: Record
) -> None:
    """Measure one layout and tier at every size of a batch.

    The model is compiled once: the other sizes are policies of the same programs, swapped in.
    """
    layout, tier = family.split("-", 1)
    largest, *others = options.max_batch_tokens
    stages = StageTimer()
    config = synthetic.engine_config(
        subject.directory,
        layout=layout,
        tier=tier,
        dtype=options.dtype,
        device=options.device,
        backend=options.backend,
        limits={"max_batch_tokens": largest},
    )
    with Engine(config, on_progress=stages) as engine:
        started = time.perf_counter()
        engine.start()
        ready_s = time.perf_counter() - started
        stages(WarmupProgress("ready"))
        outcome = {"ready_s": ready_s, "stages_s": stages.seconds}
        _measure_grid(engine, f"{family}-{largest}", subject, outcome, options, record)
        for tokens in others:
            started = time.perf_counter()
            limits = engine.config.limits.model_copy(update={"max_batch_tokens": tokens})
            engine.config = engine.config.model_copy(update={"limits": limits})
            engine.swap_policy(engine.config.policy)
            outcome = {"swap_s": time.perf_counter() - started}
            _measure_grid(engine, f"{family}-{tokens}", subject, outcome, options, record)


def _measure_grid(
    engine: Engine,
    arm: str,
    subject: Subject,
    outcome: dict[str, Any],
    options: argparse.Namespace,
    record: Record,
) -> None:
    started = time.perf_counter()
    engine.run(subject.loads[0].ids[:BATCH_ROWS])
    runner = engine.runner
    variants = runner.variants.all.values()
    outcome |= {
        "status": "ok",
        "first_call_ms": 1e3 * (time.perf_counter() - started),
        "variants": dict(Counter(variant.tier.value for variant in variants)),
        "degraded": sum(variant.degraded for variant in variants),
        "graph_pool_bytes": runner.variants.graph_bytes,
        "workloads": {},
    }
    for load in subject.loads:
        on_runner = partial(engine.on_device, partial(runner_pass, runner, load.ids))
        whole = partial(engine_pass, engine, load.ids)
        outcome["workloads"][load.name] = {
            "runner": measure(on_runner, load, options.passes),
            "engine": measure(whole, load, options.passes),
        }
        record(arm, outcome)


def measure_baseline(
    family: str, subject: Subject, options: argparse.Namespace, record: Record
) -> None:
    """Measure one of the simple loops."""
    device = synthetic.use_device(options.device)
    started = time.perf_counter()
    encoder = load_encoder(subject.directory, options.dtype, device)
    program: Program = encoder
    if family == "dynamic":
        torch._dynamo.reset()  # what an arm before this one compiled is not this one's
        program = torch.compile(encoder, dynamic=True, backend=options.backend)
    build = {"ready_s": time.perf_counter() - started}
    sizes = SORTED_BATCH_ROWS if family == "sorted-eager" else (BATCH_ROWS,)
    for rows in sizes:
        arm = family if len(sizes) == 1 else f"{family}-{rows}"
        first = subject.loads[0].ids[:rows]
        started = time.perf_counter()
        padded_pass(program, first, lambda first=first: [range(len(first))], device)  # type: ignore[misc]
        first_call_ms = 1e3 * (time.perf_counter() - started)
        workloads: dict[str, Any] = {}
        for load in subject.loads:
            run = partial(_baseline_pass, family, rows, program, load, device)
            workloads[load.name] = {"loop": measure(run, load, options.passes)}
            outcome = {"first_call_ms": first_call_ms, "workloads": workloads}
            record(arm, {"status": "ok", **build, **outcome})


def _baseline_pass(
    family: str, rows: int, program: Program, load: Load, device: torch.device
) -> Pass:
    if family == "no-batching":
        some = np.union1d(load.checked, spread_by_length(load.lengths, NO_BATCHING_ROWS))
        done = padded_pass(program, load.ids, lambda: [[int(i)] for i in some], device)
        done.seconds *= len(load.ids) / len(some)
        done.batches, done.executed = len(load.ids), load.tokens
        return done
    if family == "sorted-eager":
        return padded_pass(program, load.ids, lambda: in_batches(by_length(load.ids), rows), device)
    return padded_pass(program, load.ids, lambda: in_batches(range(len(load.ids)), rows), device)


# --- a run


def prepare(model: str, directory: Path, options: argparse.Namespace) -> Subject:
    """Write a model; make its requests and the right answers to some of them."""
    sizes: Sizes = MODELS[model]
    synthetic.write_model(directory, model, options.dtype)
    device = synthetic.use_device(options.device)
    encoder = load_encoder(directory, "float32", device)
    loads = []
    for name in options.workloads:
        lengths = synthetic.workload_lengths(name, options.rows)
        ids = synthetic.token_ids(lengths, sizes.vocab)
        checked = spread_by_length(lengths, CHECKED_ROWS)
        alone = padded_pass(encoder, [ids[i] for i in checked], partial(_alone, checked), device)
        reference = np.stack([v.astype(np.float64) for v in alone.vectors if v is not None])
        floor_s = synthetic.floor_seconds(sizes, lengths, options.peak_tflops)
        loads.append(Load(name, ids, lengths, floor_s, checked, reference))
    return Subject(model, directory, loads)


def _alone(rows: np.ndarray) -> list[Sequence[int]]:
    return [[i] for i in range(len(rows))]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic.add_options(parser, budget_s=BUDGET_S, models="minilm,bert-base")
    parser.add_argument(
        "--workloads",
        type=synthetic.names(synthetic.WORKLOAD_ROWS),
        default=list(synthetic.WORKLOAD_ROWS),
    )
    parser.add_argument("--arms", type=synthetic.names(FAMILIES), help="all that the device has")
    parser.add_argument(
        "--max-batch-tokens",
        type=synthetic.numbers,
        default=[16384, 8192],
        help="of the arms of shapeserve; the first one is the start's (16384,8192)",
    )
    parser.add_argument("--rows", type=int, help="of each workload, instead of its own number")
    parser.add_argument("--passes", type=int, help=f"that count ({PASSES}; quick: {QUICK_PASSES})")
    parser.add_argument("--peak-tflops", type=float, default=synthetic.PEAK_TFLOPS)
    options = parser.parse_args(arguments)
    options.out = options.out or "latest"
    options.passes = options.passes or (QUICK_PASSES if options.quick else PASSES)
    if options.quick:
        options.rows = options.rows or QUICK_ROWS
        options.max_batch_tokens = options.max_batch_tokens[:1]
    cuda = synthetic.use_device(options.device).type == "cuda"
    tiers = GPU_TIERS if cuda else CPU_TIERS
    options.arms = options.arms or [
        family for family in FAMILIES if family in BASELINES or family.split("-", 1)[1] in tiers
    ]
    return options


def describe_load(load: Load, sizes: Sizes) -> dict[str, Any]:
    """Return what is asked, and the floor."""
    flops = synthetic.matmul_flops(sizes, load.lengths)
    return {
        **synthetic.describe_lengths(load.lengths),
        "floor_ms": 1e3 * load.floor_s,
        "gflops": {
            "projections": flops.projections / 1e9,
            "ffn": flops.ffn / 1e9,
            "attention": flops.attention / 1e9,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every arm for every model; write and show the result."""
    options = parse(arguments)
    budget = Budget(options.time_budget_s)
    result = synthetic.new_result("engine_throughput", options)
    result["floor"] = (
        "matrix products of the real tokens (projections, feed-forward, attention) at "
        f"{options.peak_tflops:g} TFLOP/s"
    )
    result["models"] = {}
    base: Path = options.results_dir / options.out
    console.print(synthetic.headline(result["environment"]), highlight=False)
    with tempfile.TemporaryDirectory(prefix="shapeserve-bench-") as work:
        subjects = []
        for model in options.models:
            subject = prepare(model, Path(work) / model, options)
            subjects.append(subject)
            workloads = {load.name: describe_load(load, MODELS[model]) for load in subject.loads}
            result["models"][model] = {"workloads": workloads, "arms": {}}
        for family in options.arms:
            for subject in subjects:
                run_family(family, subject, options, budget, result, base)
    result["seconds"] = budget.spent_s
    every = all_arms(result)
    synthetic.finish(result, [*tables(result), synthetic.failure_table(every)], base, console)
    plot(result, base.with_name(f"{base.name}.png"))
    return int(synthetic.failed(every))


def all_arms(result: dict[str, Any]) -> dict[str, Any]:
    """Return the arms of all models."""
    return {
        f"{model} {arm}": outcome
        for model, measured in result["models"].items()
        for arm, outcome in measured["arms"].items()
    }


def run_family(
    family: str,
    subject: Subject,
    options: argparse.Namespace,
    budget: Budget,
    result: dict[str, Any],
    base: Path,
) -> None:
    """Run the arms of one family for one model; an error is its outcome, and the others go on."""
    arms: dict[str, Any] = result["models"][subject.name]["arms"]
    run = measure_baseline if family in BASELINES else measure_shapeserve

    def record(arm: str, outcome: dict[str, Any]) -> None:
        if outcome["status"] == "ok":
            console.print(f"  {arm}: {one_line(outcome)}", highlight=False)
        arms[arm] = outcome
        synthetic.write_json(result, base)

    def measure_all() -> dict[str, Any]:
        run(family, subject, options, record)
        return {}

    outcome = synthetic.attempt(f"{subject.name} {family}", budget, console, measure_all)
    if outcome["status"] != "ok":
        record(f"{family} ({outcome['status']})", outcome)


def one_line(outcome: dict[str, Any]) -> str:
    """Return the progress line of an arm: its latest workload."""
    workload, levels = list(outcome["workloads"].items())[-1]
    times = ", ".join(f"{name} {level['median_ms']:.1f} ms" for name, level in levels.items())
    return f"{workload} {times}"


# --- the result


def tables(result: dict[str, Any]) -> list[Table]:
    """Return times and costs of a start for every model."""
    made = []
    for model, outcome in result["models"].items():
        made += [
            times_table(model, name, outcome, gpu=result["environment"]["gpu"] is not None)
            for name in outcome["workloads"]
        ]
        made.append(build_table(model, outcome))
    return made


def times_table(model: str, workload: str, outcome: dict[str, Any], *, gpu: bool) -> Table:
    """Times of one model and workload; the floor is a GPU's."""
    about = outcome["workloads"][workload]
    title = (
        f"{model}, {workload}: {about['rows']:,} requests, {about['tokens']:,} tokens, mean "
        f"{about['mean']:.1f}, p50 {about['p50']:.0f}, p99 {about['p99']:.0f}; floor "
        f"{about['floor_ms']:.1f} ms"
    )
    header = [
        "arm",
        "ms (min-max)",
        "x floor",
        "Mtokens/s",
        "device ms",
        "waste",
        "batches",
        "Engine.run ms (min-max)",
        "x floor",
        "waste",
        "worst error",
        "ran as",
    ]
    rows = []
    for arm, measured in outcome["arms"].items():
        levels = measured.get("workloads", {}).get(workload)
        if levels is None:
            continue
        plain = levels.get("runner") or levels["loop"]
        whole = levels.get("engine")
        rows.append(
            [
                arm,
                _range(plain),
                number(plain["times_floor"] if gpu else None, 2),
                number(plain["tokens_per_s"] / 1e6, 2),
                number(plain.get("device_ms")),
                f"{plain['waste']:.3f}",
                str(plain["batches"]),
                _range(whole) if whole else NO_VALUE,
                number(whole["times_floor"] if whole and gpu else None, 2),
                f"{whole['waste']:.3f}" if whole else NO_VALUE,
                f"{max(level['worst_error'] for level in levels.values()):.1e}",
                ", ".join(sorted({mode for level in levels.values() for mode in level["modes"]}))
                or NO_VALUE,
            ]
        )
    return Table(title, header, rows)


def _range(level: dict[str, Any]) -> str:
    return f"{level['median_ms']:,.1f} ({level['min_ms']:,.1f}-{level['max_ms']:,.1f})"


def build_table(model: str, outcome: dict[str, Any]) -> Table:
    """What it costs to be ready."""
    stages = [
        stage
        for stage in ("load", "self-test", "compile", "capture", "verify")
        if any(stage in arm.get("stages_s", {}) for arm in outcome["arms"].values())
    ]
    header = ["arm", "ready s", *(f"{stage} s" for stage in stages), "swap s", "first call ms"]
    rows = []
    for arm, measured in outcome["arms"].items():
        if "workloads" not in measured:
            continue
        pool = measured.get("graph_pool_bytes")
        rows.append(
            [
                arm,
                number(measured.get("ready_s"), 2),
                *(number(measured.get("stages_s", {}).get(stage), 2) for stage in stages),
                number(measured.get("swap_s"), 2),
                number(measured["first_call_ms"]),
                ", ".join(f"{n} {tier}" for tier, n in measured.get("variants", {}).items())
                or NO_VALUE,
                number(measured.get("degraded"), 0),
                number(None if pool is None else pool / 2**20, 0),
            ]
        )
    return Table(f"{model}: until it is ready", [*header, "variants", "degraded", "pool MiB"], rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Write the plot, if matplotlib is there."""
    try:
        write_plot(result, path)
    except ModuleNotFoundError as missing:
        console.print(f"no plot: {missing.name} is not installed; pip install 'shapeserve[bench]'")


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: the time of every arm, and the floor."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    from matplotlib import pyplot as plt

    models = result["models"]
    workloads = result["settings"]["workloads"]
    size = (7 * len(workloads), 5 * len(models))
    figure, axes = plt.subplots(
        len(models), len(workloads), figsize=size, squeeze=False, constrained_layout=True
    )
    for line, (model, outcome) in zip(axes, models.items(), strict=True):
        for axis, workload in zip(line, workloads, strict=True):
            found = {
                arm: levels
                for arm, measured in outcome["arms"].items()
                if (levels := measured.get("workloads", {}).get(workload))
            }
            for offset, level_names, label in (
                (-0.2, ("runner", "loop"), "loop or runner"),
                (0.2, ("engine",), "Engine.run"),
            ):
                bars = [
                    (at + offset, levels[name]["median_ms"])
                    for at, levels in enumerate(found.values())
                    for name in level_names
                    if name in levels
                ]
                if bars:
                    drawn = axis.barh(*zip(*bars, strict=True), height=0.38, label=label)
                    axis.bar_label(drawn, fmt="%.0f", padding=3, fontsize=7)
            if result["environment"]["gpu"]:
                floor_ms = outcome["workloads"][workload]["floor_ms"]
                label = f"floor {floor_ms:.1f} ms"
                axis.axvline(floor_ms, color="black", linestyle=":", label=label)
            axis.set_yticks(range(len(found)), list(found), fontsize=7)
            axis.invert_yaxis()
            axis.set(xscale="log", xlabel="ms", title=f"{model}, {workload}")
            axis.margins(x=0.1)
            if found:
                axis.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    figure.suptitle(synthetic.headline(result["environment"]), fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
