"""The operators of shapeserve.ops against plain torch, on one GPU. See --help.

    python -m benchmarks.ops --out benchmarks/results/ops

Everything is timed as a CUDA graph of ten calls: what serves is captured, and at some of these
sizes a launch costs more than the kernel. Inputs are the same in every call, so that those that fit
stay in the L2 cache, as they do behind the layer that makes them. A case that fails says why, and
the others go on; what does not fit into --seconds is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shapeserve import ops
from shapeserve.models.pooling import POOL
from shapeserve.ops.attention_kernel import AttentionConfig
from shapeserve.ops.attention_kernel import launch as launch_attention

CALLS = 10  # in one graph: makes the cost of the replay itself a small part
REPLAYS = 40
TOKENS = (2048, 8192, 16384)
# The lengths of the workload in README.md's terms: mean 79, median 52, within 4 and 512.
MEAN, MEDIAN, SHORTEST, LONGEST = 79, 52, 4, 512
PAD_SHAPES = ((1, 16), (32, 64), (128, 64), (32, 256))
DEVICE = "cuda"

Run = Callable[[], Any]


@dataclass(frozen=True)
class Model:
    """The sizes of an encoder."""

    name: str
    heads: int
    head_dim: int
    ffn: int

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


MODELS = (Model("MiniLM", 12, 32, 1536), Model("BERT-base", 12, 64, 3072))

ATTENTION_CONFIGS = (
    AttentionConfig(64, 64, 4, 2),
    AttentionConfig(64, 64, 4, 2, 168),
    AttentionConfig(64, 64, 4, 2, 128),
    AttentionConfig(64, 64, 4, 1, 128),
    AttentionConfig(64, 64, 4, 3, 168),
    AttentionConfig(64, 32, 4, 2, 128),
    AttentionConfig(64, 32, 4, 3),
    AttentionConfig(64, 128, 4, 2),
    AttentionConfig(128, 64, 8, 2),
    AttentionConfig(128, 64, 8, 2, 128),
    AttentionConfig(128, 128, 8, 2),
    AttentionConfig(32, 64, 4, 2, 128),
    AttentionConfig(32, 64, 2, 2),
    AttentionConfig(32, 32, 2, 2),
)


@dataclass
class Row:
    """One measurement.

    Attributes:
        us: median time of one call.
        spread_us: between the 10th and the 90th percentile of the replays.
        error: relative to a float32 or float64 reference over the real elements.
        max_error: the largest difference to it.
        tflops: useful operations (of real tokens) a second.
        gbps: least bytes that must move, a second.
        failure: why there is no time.
    """

    section: str
    case: str
    arm: str
    us: float | None = None
    spread_us: float | None = None
    error: float | None = None
    max_error: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    failure: str | None = None


@dataclass
class Case:
    """Ways to compute one thing at one size; the first arm is the operator.

    Attributes:
        real: cuts an output to what is defined.
        flops: useful operations of one call.
        moved: bytes that one call must read and write.
    """

    section: str
    name: str
    arms: dict[str, Run]
    reference: Run | None = None
    real: Callable[[Any], Tensor] = lambda output: output
    flops: float = 0.0
    moved: float = 0.0


@dataclass
class Session:
    """What was measured, and when to stop."""

    seconds: float
    started_s: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)

    def late(self) -> bool:
        return time.monotonic() - self.started_s > self.seconds

    def run(self, case: Case) -> None:
        """Measure every arm of a case."""
        expected = None if self.late() else _expected(case)
        for arm, call in case.arms.items():
            row = Row(case.section, case.name, arm)
            self.rows.append(row)
            if self.late():
                row.failure = "left out: no time"
                continue
            try:
                _measure(row, case, call, expected)
            except Exception as error:
                row.failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                traceback.print_exc(limit=3)
            print(_line(row), flush=True)
        with contextlib.suppress(RuntimeError):  # after a fault of the device, every call raises
            torch.cuda.empty_cache()


def _expected(case: Case) -> Tensor | None:
    try:
        return None if case.reference is None else case.real(case.reference()).double()
    except Exception:  # the times are still worth having
        traceback.print_exc(limit=3)
        return None


def _measure(row: Row, case: Case, call: Run, expected: Tensor | None) -> None:
    if expected is not None:
        got = case.real(call()).double()
        row.error = float((got - expected).norm() / expected.norm())
        row.max_error = float((got - expected).abs().max())
    times = captured_us(call)
    row.us = statistics.median(times)
    tenths = statistics.quantiles(times, n=10)
    row.spread_us = tenths[-1] - tenths[0]
    row.tflops = case.flops / row.us / 1e6 if case.flops else None
    row.gbps = case.moved / row.us / 1e3 if case.moved else None


def captured_us(call: Run) -> list[float]:
    """Return the times of the replays of a graph of ``CALLS`` calls, for one call each."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    for _ in range(5):
        graph.replay()
    marks = [(_event(), _event()) for _ in range(REPLAYS)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / CALLS for begin, end in marks]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def warm_up() -> None:
    """Work until the clocks are up."""
    x = random(4096, 4096)
    for _ in range(300):
        x @ x
    torch.cuda.synchronize()


# --- Inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows that nearly fill ``tokens``, and what follows from their lengths."""

    tokens: int
    lengths: list[int]
    offsets: Tensor
    bounds: tuple[Tensor, Tensor, Tensor, Tensor]

    @property
    def real(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


def make_batch(tokens: int, seed: int) -> Batch:
    """Draw log-normal lengths until the next row does not fit."""
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(2 * math.log(MEAN / MEDIAN))
    lengths: list[int] = []
    while True:
        length = int(np.clip(round(rng.lognormal(math.log(MEDIAN), sigma)), SHORTEST, LONGEST))
        if sum(lengths) + length > tokens:
            break
        lengths.append(length)
    capacity = -(-len(lengths) // 32) * 32  # some rows at the end are empty, as when serving
    ends = np.cumsum([0, *lengths, *[0] * (capacity - len(lengths))])
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    return Batch(tokens, lengths, offsets, ops.row_bounds(offsets, tokens))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def padded(batch: Batch, x: Tensor) -> Tensor:
    """Return [T, ...] as [R, longest, ...] with zeros."""
    parts = torch.split(x[: batch.real], batch.lengths)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


# --- Attention ------------------------------------------------------------------------------------


def attention_inputs(model: Model, batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    joined = random(batch.tokens, 3 * model.hidden, dtype=dtype)
    shape = (batch.tokens, model.heads, model.head_dim)
    return [x.view(shape) for x in torch.split(joined, model.hidden, dim=1)]


def attention_case(model: Model, batch: Batch, dtype: torch.dtype) -> Case:
    """The operator, torch's kernel for packed rows, and rows padded to the longest."""
    q, k, v = attention_inputs(model, batch, dtype)
    _, starts, ends, _ = batch.bounds
    scale = model.head_dim**-0.5
    rows = [padded(batch, x).transpose(1, 2) for x in (q, k, v)]  # [R, H, S, D]
    lengths = torch.tensor(batch.lengths, device=DEVICE)
    real = torch.arange(batch.longest, device=DEVICE) < lengths[:, None]

    def varlen() -> Any:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, batch.offsets, batch.offsets, LONGEST, LONGEST)

    def sdpa(inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=real[:, None, None], scale=scale
        )

    def reference() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return sdpa([x.float() for x in rows])

    def cut(output: Tensor) -> Tensor:
        return output.transpose(1, 2)[real] if output.dim() == 4 else output[: batch.real]

    return Case(
        "attention",
        f"{model.name} {str(dtype).removeprefix('torch.')} T={batch.tokens}",
        {
            "shapeserve": lambda: ops.packed_attention(q, k, v, starts, ends, scale),
            "varlen_attn": varlen,
            "padded sdpa": lambda: sdpa(rows),
        },
        reference,
        cut,
        flops=4.0 * model.hidden * sum(n * n for n in batch.lengths),
        moved=4.0 * batch.real * model.hidden * q.element_size(),
    )


def attention_sweep(model: Model, batch: Batch) -> Case:
    q, k, v = attention_inputs(model, batch, torch.bfloat16)
    _, starts, ends, _ = batch.bounds
    scale = model.head_dim**-0.5

    def arm(config: AttentionConfig) -> Run:
        return lambda: launch_attention(q, k, v, starts, ends, scale, config)

    return Case(
        "attention sweep",
        f"{model.name} bfloat16 T={batch.tokens}",
        {_name(config): arm(config) for config in ATTENTION_CONFIGS},
        lambda: ops.packed_attention(q, k, v, starts, ends, scale),
        lambda output: output[: batch.real],
    )


def _name(config: AttentionConfig) -> str:
    values = asdict(config).items()
    return " ".join(f"{key}={value}" for key, value in values if value not in (None, False))


# --- Linear and GELU ------------------------------------------------------------------------------


def linear_inputs(model: Model, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    weight = random(model.ffn, model.hidden) / model.hidden**0.5
    return random(tokens, model.hidden), weight, random(model.ffn)


def plain_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias))


def exact_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In float64, of the first tokens only: it is slow."""
    return plain_linear_gelu(x[:512].double(), weight.double(), bias.double())


def linear_case(model: Model, tokens: int, compiled: Callable[..., Any]) -> Case:
    """The operator, plain torch, its compiled form, and the product without the GELU."""
    x, weight, bias = linear_inputs(model, tokens)
    return Case(
        "linear_gelu",
        f"{model.name} {model.hidden}->{model.ffn} T={tokens}",
        {
            "shapeserve": lambda: ops.linear_gelu(x, weight, bias),
            "plain": lambda: plain_linear_gelu(x, weight, bias),
            "compiled": lambda: compiled(x, weight, bias),
            "linear alone (no gelu)": lambda: functional.linear(x, weight, bias),
        },
        lambda: exact_linear_gelu(x, weight, bias),
        lambda output: output[:512],
        flops=2.0 * tokens * model.hidden * model.ffn,
        moved=2.0 * (tokens * (model.hidden + model.ffn) + model.hidden * model.ffn),
    )


# --- Pooling --------------------------------------------------------------------------------------


def plain_pool(hidden: Tensor, offsets: Tensor, rows: Tensor, mode: str) -> Tensor:
    """Scatter by row (filler into one more), or gather; then normalise."""
    lengths = offsets[1:] - offsets[:-1]
    if mode in ("cls", "lasttoken"):
        at = offsets[:-1] if mode == "cls" else offsets[1:] - 1
        vectors = hidden[at.clamp(0, hidden.shape[0] - 1)].float()
    else:
        start = 0.0 if mode == "mean" else float("-inf")
        index = rows.long()[:, None].expand(-1, hidden.shape[1])
        vectors = hidden.new_full((offsets.shape[0], hidden.shape[1]), start, dtype=torch.float32)
        reduce = "sum" if mode == "mean" else "amax"
        vectors = vectors.scatter_reduce(0, index, hidden.float(), reduce)[:-1]
    if mode == "mean":
        vectors = vectors / lengths.clamp(min=1)[:, None]
    return functional.normalize(torch.where((lengths > 0)[:, None], vectors, 0.0), dim=-1)


def pool_case(model: Model, batch: Batch, mode: str, compiled: Callable[..., Any]) -> Case:
    """The operator, scattering with plain torch, compiled, and padded rows."""
    hidden = random(batch.tokens, model.hidden)
    offsets, rows, count = batch.offsets, batch.bounds[0], len(batch.lengths)
    rows_padded = padded(batch, hidden)
    lengths = torch.tensor(batch.lengths, device=DEVICE)
    mask = (torch.arange(batch.longest, device=DEVICE) < lengths[:, None]).long()

    def of_padded() -> Tensor:
        return functional.normalize(POOL[mode](rows_padded, mask), dim=-1)

    read = batch.real if mode in ("mean", "max") else count
    return Case(
        "segment_pool",
        f"{model.name} {mode} T={batch.tokens}",
        {
            "shapeserve": lambda: ops.segment_pool(hidden, offsets, mode, True),
            "plain": lambda: plain_pool(hidden, offsets, rows, mode),
            "compiled": lambda: compiled(hidden, offsets, rows, mode),
            "padded": of_padded,
        },
        lambda: plain_pool(hidden.double(), offsets, rows, mode),
        lambda output: output[:count],
        moved=2.0 * read * model.hidden + 4.0 * count * model.hidden,
    )


# --- Padding --------------------------------------------------------------------------------------


def plain_pad(tokens: Tensor, offsets: Tensor, seq: int, pad: int) -> tuple[Tensor, Tensor]:
    column = torch.arange(seq, dtype=torch.int32, device=tokens.device)
    at = offsets[:-1, None] + column
    real = at < offsets[1:, None]
    ids = torch.where(real, tokens[at.clamp(max=tokens.shape[0] - 1)].long(), pad)
    empty = offsets[1:, None] <= offsets[:-1, None]
    return ids, (real | (empty & (column == 0))).long()


def plain_unpad(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    rows, _, _, positions = ops.row_bounds(offsets, total)
    real = rows < x.shape[0]
    tokens = x[rows.clamp(max=x.shape[0] - 1), positions.clamp(max=x.shape[1] - 1)]
    return torch.where(real[:, None], tokens, 0)


def shape_offsets(rows: int, seq: int, seed: int) -> tuple[Tensor, int]:
    """Offsets of rows between a quarter of ``seq`` and all of it, the last tenth empty."""
    lengths = np.random.default_rng(seed).integers(max(seq // 4, 1), seq + 1, rows)
    lengths[rows - rows // 10 :] = 0
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE), int(ends[-1])


def pad_case(rows: int, seq: int, seed: int, compiled: Callable[..., Any]) -> Case:
    offsets, total = shape_offsets(rows, seq, seed)
    tokens = torch.randint(1, 30000, (rows * seq,), dtype=torch.int32, device=DEVICE)
    return Case(
        "pad_ragged",
        f"{rows}x{seq}",
        {
            "shapeserve": lambda: ops.pad_ragged(tokens, offsets, seq, 0),
            "plain": lambda: plain_pad(tokens, offsets, seq, 0),
            "compiled": lambda: compiled(tokens, offsets, seq, 0),
        },
        lambda: plain_pad(tokens, offsets, seq, 0),
        lambda output: torch.stack(output),
        moved=16.0 * rows * seq + 4.0 * total,
    )


def unpad_case(model: Model, rows: int, seq: int, seed: int, compiled: Callable[..., Any]) -> Case:
    offsets, real = shape_offsets(rows, seq, seed)
    x, total = random(rows, seq, model.hidden), rows * seq
    return Case(
        "unpad_ragged",
        f"{model.name} {rows}x{seq}x{model.hidden}",
        {
            "shapeserve": lambda: ops.unpad_ragged(x, offsets, total),
            "plain": lambda: plain_unpad(x, offsets, total),
            "compiled": lambda: compiled(x, offsets, total),
        },
        lambda: plain_unpad(x, offsets, total),
        moved=2.0 * (real + total) * model.hidden,
    )


# --- All of it ------------------------------------------------------------------------------------


def cases(seed: int) -> Iterator[Callable[[], Case]]:
    """Yield what makes each case, the most wanted first."""
    batches = {tokens: make_batch(tokens, seed) for tokens in TOKENS}
    linear, pool, pad, unpad = (
        torch.compile(plain, dynamic=True, fullgraph=True)
        for plain in (plain_linear_gelu, plain_pool, plain_pad, plain_unpad)
    )
    for model, batch in product(MODELS, batches.values()):
        yield partial(attention_case, model, batch, torch.bfloat16)
    for model, tokens in product(MODELS, (16384, 2048)):
        yield partial(attention_sweep, model, batches[tokens])
    for model, tokens in product(MODELS, TOKENS):
        yield partial(linear_case, model, tokens, linear)
    for model, batch in product(MODELS, batches.values()):
        yield partial(pool_case, model, batch, "mean", pool)
    for rows, seq in PAD_SHAPES:
        yield partial(pad_case, rows, seq, seed, pad)
    for model, (rows, seq) in product(MODELS, PAD_SHAPES[2:]):
        yield partial(unpad_case, model, rows, seq, seed, unpad)
    for model in MODELS:
        yield partial(attention_case, model, batches[16384], torch.float16)
    for mode in ("max", "cls", "lasttoken"):
        yield partial(pool_case, MODELS[1], batches[16384], mode, pool)


def describe(seed: int) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton"),
        "seed": seed,
        "commit": _commit(),
        "calls_per_graph": CALLS,
        "replays": REPLAYS,
    }


def _commit() -> str:
    """Return the commit of this checkout; a copy of the files has none."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def _line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.section:17} {row.case:32} {row.arm:26} {row.failure}"
    numbers = [
        f"{row.us:9.2f} us ±{row.spread_us:6.2f}",
        "" if row.error is None else f"error {row.error:.1e} max {row.max_error:.1e}",
        "" if row.tflops is None else f"{row.tflops:5.0f} TFLOP/s",
        "" if row.gbps is None else f"{row.gbps:5.0f} GB/s",
    ]
    return f"{row.section:17} {row.case:32} {row.arm:26} " + "  ".join(filter(None, numbers))


def table(rows: list[Row], best: int) -> str:
    """Return a line a case: the time of each arm; of the sweeps, the ``best`` first."""
    lines = []
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.section, row.case), []).append(row)
    for (section, case), arms in grouped.items():
        if section.endswith("sweep"):
            timed = sorted((r for r in arms if r.us is not None), key=lambda r: r.us or 0.0)
            lines.append(f"{section}: {case}")
            lines += [f"    {r.us:9.2f} us  {r.arm}" for r in timed[:best]]
        else:
            times = [f"{r.arm} " + ("-" if r.us is None else f"{r.us:.1f}") for r in arms]
            lines.append(f"{section}: {case}: " + ", ".join(times) + " us")
    return "\n".join(lines)


def write_plot(rows: list[Row], title: str, path: Path) -> None:
    """Write the times of all arms as bars; does nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")  # no display
    from matplotlib import pyplot as plt

    shown = [row for row in rows if row.us is not None and not row.section.endswith("sweep")]
    sections = list(dict.fromkeys(row.section for row in shown))
    if not sections:
        return
    figure, axes = plt.subplots(
        1, len(sections), figsize=(6 * len(sections), 8), constrained_layout=True, squeeze=False
    )
    for axis, section in zip(axes[0], sections, strict=True):
        mine = [row for row in shown if row.section == section]
        arms = list(dict.fromkeys(row.arm for row in mine))
        labels = list(range(len(mine)))
        colours = [f"C{arms.index(row.arm)}" for row in mine]
        bars = axis.barh(labels, [row.us for row in mine], color=colours)
        axis.bar_label(bars, fmt="%.0f", fontsize=6)
        axis.set_yticks(labels, [f"{row.case} {row.arm}" for row in mine], fontsize=6)
        axis.set(title=section, xlabel="us")
        axis.invert_yaxis()
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "ops", help="no suffix"
    )
    parser.add_argument("--seconds", type=float, default=140, help="start nothing after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="sections whose names contain this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a CUDA device is needed")
    session = Session(options.seconds)
    failed = 0
    torch.manual_seed(options.seed)
    facts = describe(options.seed)
    print(json.dumps(facts), flush=True)
    warm_up()
    with torch.no_grad():
        for make in cases(options.seed):
            try:
                case = make()
            except Exception:
                traceback.print_exc()
                failed += 1
                continue
            if options.only in case.section:
                session.run(case)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**facts, "rows": [asdict(row) for row in session.rows]}
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    title = ", ".join(f"{key} {facts[key]}" for key in ("gpu", "torch", "triton", "commit"))
    print(table(session.rows, best=6))
    print(f"{time.monotonic() - session.started_s:.0f} s")
    try:
        write_plot(session.rows, title, options.out.with_suffix(".png"))
    except Exception:
        traceback.print_exc()
        failed += 1
    raise SystemExit(int(failed > 0))  # what could be measured is written all the same


if __name__ == "__main__":
    main()
