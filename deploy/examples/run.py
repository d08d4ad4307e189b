r"""Run a model over recorded sizes in this process, and compare it with the unpadded eager model.

    python deploy/examples/run.py deploy/examples/image_encoder.yaml \
        benchmarks/data/traces/coco_val2017.csv.gz

Takes the config of any model that is given by ``import``, and a trace of sizes along its axes. What
is in the rows is random; their sizes are the recorded ones.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve import Engine, ServeConfig
from shapeserve.engine import Result
from shapeserve.errors import ShapeServeError
from shapeserve.layout import RowArrays
from shapeserve.traces import Shapes, read_shapes
from shapeserve.warmup import TOLERANCE, Probe, relative_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if every answer is the eager one and nothing was compiled for a request, else 1."""
    options = _options().parse_args(arguments)
    console = Console(highlight=False)
    try:
        config = ServeConfig.from_yaml(options.config)
        shapes = read_shapes(options.trace)
        with console.status("warming up") as status:
            report = lambda p: status.update(f"{p.stage} {p.done}/{p.total} {p.detail}")  # noqa: E731
            engine = Engine(config, on_progress=report).start()
        with engine:
            return _run(engine, _sample(shapes, engine.spec.row_axes, options.rows), console)
    except ShapeServeError as error:
        print(error, file=sys.stderr)
        return 2


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="configuration of one model, as for `shapeserve serve`")
    parser.add_argument("trace", help="recorded sizes: t_s,height,width or t_s,len")
    parser.add_argument("--rows", type=int, default=48, help="how many of them (default 48)")
    return parser


def _sample(shapes: Shapes, axes: Sequence[str], rows: int) -> list[dict[str, int]]:
    """So many of the recorded sizes, spread evenly over all of them in order of size."""
    named = shapes.axes or tuple(axes)
    every = [
        dict(zip(named, sizes, strict=True)) for sizes, n in shapes.rows.items() for _ in range(n)
    ]
    rows = min(rows, len(every))
    return [every[(2 * i + 1) * len(every) // (2 * rows)] for i in range(rows)]


def _run(engine: Engine, sizes: Sequence[dict[str, int]], console: Console) -> int:
    probe = Probe(engine.spec, engine.runner.programs.eager, engine.runner.device)
    rows = [probe.row(shape) for shape in sizes]
    results = engine.run([row.arrays for row in rows])
    error = max(_error(engine, probe, r, a) for r, a in zip(rows, results, strict=True))
    recompiles = _total(engine, "recompiles_total")
    console.print(_buckets(results))
    console.print(_summary(engine, results, error, recompiles))
    return int(error > TOLERANCE[engine.spec.dtype] or recompiles > 0)


def _error(engine: Engine, probe: Probe, row: RowArrays, result: Result) -> float:
    """How far an answer is from what the eager model gives the row alone and unpadded."""
    expected = engine.on_device(lambda: probe.answer(row))
    return relative_error([result.outputs[name] for name in engine.spec.outputs], expected)


def _buckets(results: Sequence[Result]) -> Table:
    table = Table(title="where the rows ran", title_justify="left", box=SIMPLE_HEAD)
    for column in ("bucket", "mode", "reason"):
        table.add_column(column)
    table.add_column("rows", justify="right")
    counts = Counter((r.bucket, r.mode.value, r.reason or "") for r in results)
    for place, rows in sorted(counts.items(), key=lambda item: -item[1]):
        table.add_row(*place, str(rows))
    return table


def _summary(engine: Engine, results: Sequence[Result], error: float, recompiles: float) -> Table:
    table = Table(title=engine.spec.name, title_justify="left", box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    elements = _total(engine, "tokens_total")
    table.add_row("rows", str(len(results)))
    table.add_row("buckets in the grid", str(len(engine.grid)))
    for axis in engine.spec.axes:
        share = _total(engine, "tokens_total", kind=f"padding_{axis}") / elements
        table.add_row(f"padding_{axis}", f"{share:.1%}")
    table.add_row("compiles at start", f"{_total(engine, 'compiles_total', stage='dynamo'):.0f}")
    table.add_row("recompiles on requests", f"{recompiles:.0f}")
    table.add_row("largest error against eager, unpadded", f"{error:.1e}")
    return table


def _total(engine: Engine, name: str, **labels: str) -> float:
    return sum(
        s.value
        for s in engine.metrics.samples()
        if s.name == f"shapeserve_{name}" and labels.items() <= s.labels.items()
    )


if __name__ == "__main__":
    sys.exit(main())
