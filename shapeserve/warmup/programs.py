"""The steps before there are variants: refuse a padding-sensitive model, compile the programs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch

from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid, RowKey
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.variants import Programs, single_pays
from shapeserve.errors import ModelError
from shapeserve.layout import Forward, Layout, RowArrays
from shapeserve.metrics import CompilePhase
from shapeserve.models.spec import ModelSpec
from shapeserve.warmup.probe import TOLERANCE, Probe, label, row_area
from shapeserve.warmup.progress import WarmupProgress

log = logging.getLogger("shapeserve.warmup")

# Sizes that the compile starts looking from: small, so that its run costs little.
_COMPILE_BATCH = 3
_COMPILE_SIZE = 40  # of tokens
_SELF_TEST_BATCH = 4  # enough for neighbours and filler rows; arbitrary


def build_programs(
    programs: Programs,
    spec: ModelSpec,
    grid: Grid,
    layout: Layout,
    probe: Probe,
    monitor: CompileMonitor,
) -> Iterator[WarmupProgress]:
    """Compile the (at most two) programs; yields before each.

    Raises :class:`ModelError` if torch compiled nothing.
    """
    total = len(grid.buckets)
    if not programs.compiles:
        return
    sizes = compile_sizes(spec, grid)
    if BATCH not in grid.axes:
        yield WarmupProgress("compile", 0, total, "program for packed rows")
        compile_program(programs, layout, probe, sizes, monitor)
        return
    batches = {bucket.size(BATCH) for bucket in grid.buckets}
    row = {axis: size for axis, size in sizes.items() if axis != BATCH}
    if 1 in batches and (batches == {1} or _single_pays(programs, layout, probe, row)):
        yield WarmupProgress("compile", 0, total, "program for one row")
        compile_program(programs, layout, probe, {BATCH: 1, **row}, monitor)
    if batches != {1}:
        yield WarmupProgress("compile", 0, total, "program for two rows and more")
        compile_program(programs, layout, probe, sizes, monitor)


def self_test(module: Forward, spec: ModelSpec, grid: Grid, layout: Layout, probe: Probe) -> None:
    """Check on an eager module that padding (or packing) does not change an answer.

    Run before any compile, in the smallest and a middle row shape, so that a padding-sensitive
    model is refused within seconds.

    Raises:
        ModelError: naming the bucket, the row and the error.
    """
    for bucket in _self_test_buckets(grid):
        packed = BATCH not in grid.axes
        row = probe.row_for(grid, bucket) if packed else probe.padded_row(bucket)
        if row is None:
            continue
        expected = probe.answer(row)  # first, because it says more of a model that cannot run it
        sizes = bucket.as_dict()
        index, rows = probe.plant(row, bucket)
        layout.poison()
        outputs = layout.bind(module, sizes)(*layout.write(rows, sizes))
        got = layout.read(outputs, rows, sizes).rows()[0][index]
        error = probe.error(list(got.values()), expected)
        if not error <= TOLERANCE[spec.dtype]:
            raise ModelError(_refusal(spec, row, bucket, error))


def _refusal(spec: ModelSpec, row: RowArrays, bucket: Bucket, error: float) -> str:
    packed = BATCH not in bucket.axes
    what, how = ("packing", "packed") if packed else ("padding", "padded")
    remedy = (
        "Use `layout: padded`."
        if packed
        else "Let the model ignore padding (give it an input with `make: mask`, zero what lies "
        "outside before each convolution, pool and normalise over real elements only), or set "
        "`padding_invariant: false` to run every row at its exact size; the sizes listed in "
        "`policy` are then warm."
    )
    return (
        f"{what} changes the answers of {spec.name}: a row of {label(row.sizes)} {how} into "
        f"{bucket.label} differs by {error:.2g} from the unpadded eager answer (tolerance "
        f"{TOLERANCE[spec.dtype]:g}). {remedy}"
    )


def _self_test_buckets(grid: Grid) -> list[Bucket]:
    """The smallest and a middle row shape, with enough rows for neighbours and filler."""
    if BATCH not in grid.axes:
        return [grid.buckets[0], grid.buckets[len(grid.buckets) // 2]]
    keys = _row_shapes(grid)
    return [
        grid.bucket(min(grid.batch_sizes(key), key=lambda b: abs(b - _SELF_TEST_BATCH)), key)
        for key in dict.fromkeys((keys[0], keys[len(keys) // 2]))
    ]


def compile_program(
    programs: Programs,
    layout: Layout,
    probe: Probe,
    sizes: Mapping[str, int],
    monitor: CompileMonitor,
) -> None:
    """Compile one program; keep weight packing only if it reproduces the eager answers."""
    build = programs.compile_single if sizes.get(BATCH) == 1 else programs.compile_many
    rows = probe.fill(sizes)
    inputs = layout.write(rows, sizes)

    def run(program: Forward) -> tuple[torch.Tensor, ...]:
        return layout.bind(program, sizes)(*inputs)

    build(run)
    if not monitor.collect(CompilePhase.WARMUP, label(sizes)):
        raise ModelError(
            "torch.compile compiled nothing: it is switched off in this process; unset "
            "TORCHDYNAMO_DISABLE, or set `compile.tier: eager`"
        )
    if not programs.frozen:
        return
    program, _ = programs.for_sizes(sizes)
    got = layout.read(run(program), rows, sizes).rows()[0][0]
    error = probe.error(list(got.values()), probe.answer(rows[0]))
    if not error <= TOLERANCE["float32"]:
        log.warning("weight packing changes answers by %.1e; compiling without it", error)
        programs.frozen = False
        build(run)
        monitor.collect(CompilePhase.WARMUP, label(sizes))


def compile_sizes(spec: ModelSpec, grid: Grid) -> dict[str, int]:
    """Pick sizes for the compile that are unlike each other, every fixed dim and every weight's.

    Torch takes equal sizes for the same size (duck sizing): a batch of 3 beside 3 channels would
    be compiled for 3 rows only, and the first other batch would compile again. Behind a graph break
    the width of a layer is such a size.
    """
    fixed = {dim for t in spec.inputs.values() for dim in t.dims if isinstance(dim, int)}
    fixed |= spec.widths
    row = _compile_row(spec, grid, fixed)
    batch = _COMPILE_BATCH
    while batch in fixed or batch in row.values():
        batch += 1
    return {axis: batch if axis == BATCH else row[axis] for axis in grid.axes}


def _compile_row(spec: ModelSpec, grid: Grid, fixed: set[int]) -> dict[str, int]:
    """Of tokens a few, because they cost least; of pixels and frames a middle row shape.

    There the strides of convolutions divide sizes, and torch would specialise a 1 behind them; and
    two small images cost hardly more than one, two middle ones twice as much (``single_pays``).
    """
    shapes = [dict(key) for key in _row_shapes(grid)]
    if set(grid.row_axes) <= {"seq", TOKENS}:
        shapes = [{axis: min(_COMPILE_SIZE, grid.max_size(axis)) for axis in grid.row_axes}]
    unlike = [s for s in shapes if len(set(s.values()) - fixed) == len(s) and min(s.values()) > 1]
    candidates = unlike or shapes
    row = candidates[len(candidates) // 2]
    if unlike or spec.padding_invariant is False:
        return row
    taken = set(fixed)
    for axis in row:  # downwards, because the grid's end may be the model's limit
        while row[axis] in taken and row[axis] > max(spec.min_length.get(axis, 1), 2):
            row[axis] -= 1
        taken.add(row[axis])
    return row


def _row_shapes(grid: Grid) -> list[RowKey]:
    """Every padded row shape, the smallest area first."""
    return sorted({b.without(BATCH) for b in grid.buckets}, key=lambda key: (row_area(key), key))


def _single_pays(programs: Programs, layout: Layout, probe: Probe, row: Mapping[str, int]) -> bool:
    """Whether one row gets a program of its own, or is padded to two.

    On a CPU always: compiled, two rows of MiniLM take 1.3 to 1.9 times as long as one at 8 to 256
    tokens (two Xeon cores, 1 and 2 threads), while the eager model, whose overhead hides it, says
    1.1 to 1.3 at the short ones, so that a measurement would decide differently at each start.
    """
    if probe.device.type == "cpu":
        return True
    rows = [probe.row(row), probe.row(row)]

    def run(batch: int) -> None:
        sizes = {BATCH: batch, **row}
        layout.bind(programs.eager, sizes)(*layout.write(rows[:batch], sizes))

    return single_pays(run, probe.device)
