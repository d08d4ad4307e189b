"""What a captured graph of one bucket costs, however it is made; a micro-benchmark.

    python benchmarks/capture.py --out capture       # a GPU: about two minutes

Arms, each in the main thread: the eager module, one dynamic-shape program, our own captures of
both, and ``torch.compile(mode="reduce-overhead")``, torch's own captures, one compile a bucket.
Prints milliseconds a call (median) beside what came before the first good call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import synthetic
from shapeserve.compile.graph import GraphPool
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.program import compiled
from shapeserve.config import ServeConfig
from shapeserve.metrics import Metrics
from shapeserve.models import load

BUCKETS = ((2, 16), (8, 128), (32, 64), (32, 128))
CALLS = 40
Inputs = tuple[torch.Tensor, torch.Tensor]


def inputs_of(batch: int, seq: int, device: torch.device) -> Inputs:
    """Random ids and a mask of ones [batch, seq]."""
    ids = torch.randint(10, 1000, (batch, seq), device=device)
    return ids, torch.ones_like(ids)


def median_ms(call: Callable[[], object]) -> float:
    """Median of some calls, each waited for."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def measure(model: str, dtype: str) -> dict[str, Any]:
    """Measure every arm of one model; start-up is what its buckets together needed."""
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as root:
        directory = synthetic.write_model(Path(root) / model, model, dtype)
        config = ServeConfig.for_model_dir(directory).models[0].model_copy(update={"dtype": dtype})
        module = load(config, device).module
    arms: dict[str, Any] = {}
    inputs = {bucket: inputs_of(*bucket, device) for bucket in BUCKETS}

    def record(
        name: str, make: Callable[[Inputs], Callable[[], object]], before_s: float = 0.0
    ) -> None:
        started = time.perf_counter() - before_s
        calls = {bucket: make(given) for bucket, given in inputs.items()}
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        start_s = time.perf_counter() - started
        arms[name] = {"start_s": start_s} | {
            f"{b}x{s}": median_ms(call) for (b, s), call in calls.items()
        }

    def own(program: Any) -> Callable[[Inputs], Callable[[], object]]:
        pool = GraphPool(device)
        return lambda given: pool.capture(program, given)

    with torch.no_grad():
        record("eager", lambda given: lambda: module(*given))
        record("eager, own capture", own(module))
        started = time.perf_counter()
        program = compiled(
            module, "many", backend="inductor", monitor=CompileMonitor(Metrics(), "m")
        )
        program(*inputs_of(3, 40, device))
        torch.cuda.synchronize()
        compile_s = time.perf_counter() - started
        record("dynamic program", lambda given: lambda: program(*given), compile_s)
        record("dynamic program, own capture", own(program), compile_s)
        record("reduce-overhead", _reduce_overhead(module))
    return arms


def _reduce_overhead(module: torch.nn.Module) -> Callable[[Inputs], Callable[[], object]]:
    def make(given: Inputs) -> Callable[[], object]:
        torch._dynamo.config.recompile_limit = 64  # else the ninth bucket runs eager, silently
        program: Any = torch.compile(module, mode="reduce-overhead", dynamic=False)
        for _ in range(3):  # compile, record, replay
            program(*given)
        return lambda: program(*given)

    return make


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="minilm,bert-base")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", default="capture")
    parser.add_argument("--results-dir", default="benchmarks/results")
    parser.add_argument("--commit", default="", help="of the code, where this is no checkout")
    given = parser.parse_args()
    console = Console(width=140)
    result: dict[str, Any] = {"machine": synthetic.describe_machine(given.commit), "arms": {}}
    for model in given.models.split(","):
        result["arms"][model] = arms = measure(model, given.dtype)
        columns = ["start_s", *(f"{b}x{s}" for b, s in BUCKETS)]
        table = Table("arm", *columns, title=f"{model}, {given.dtype}: ms a call")
        for arm, values in arms.items():
            table.add_row(arm, *(f"{values[column]:.3f}" for column in columns))
        console.print(table)
    path = Path(given.results_dir, given.out).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    console.print(result["machine"])


if __name__ == "__main__":
    main()
