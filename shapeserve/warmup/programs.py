"""The steps before there are variants: refuse a padding-sensitive model, compile the programs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from shapeserve.buckets import BATCH, Grid
from shapeserve.compile.breaks import since, snapshot
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.variants import Programs, single_pays
from shapeserve.errors import ModelError
from shapeserve.layout import PaddedLayout
from shapeserve.metrics import CompilePhase, Tier
from shapeserve.models.spec import ModelSpec
from shapeserve.warmup.probe import TOLERANCE, Probe, label, relative_error, row_area
from shapeserve.warmup.progress import WarmupProgress

log = logging.getLogger("shapeserve.warmup")

# Sizes that the compile starts looking from: small, so that its run costs little.
_COMPILE_BATCH = 3
_COMPILE_SIZE = 40
_SELF_TEST_BATCH = 4  # enough for neighbours and filler rows; arbitrary


def build_programs(
    programs: Programs,
    spec: ModelSpec,
    grid: Grid,
    layout: PaddedLayout,
    probe: Probe,
    monitor: CompileMonitor,
) -> Iterator[WarmupProgress]:
    """Refuse a padding-sensitive model, then compile the (at most two) programs.

    Yields before each step. Raises :class:`ModelError` as :func:`self_test` does.
    """
    total = len(grid.buckets)
    if spec.padding_invariant is not False:
        yield WarmupProgress("self-test", 0, total)
        self_test(programs, spec, grid, layout, probe)
    if programs.tier is Tier.EAGER:
        return
    batches = {bucket.size(BATCH) for bucket in grid.buckets}
    sizes = compile_sizes(spec, grid)
    row = {axis: size for axis, size in sizes.items() if axis != BATCH}
    if 1 in batches and (batches == {1} or _single_pays(programs, layout, probe, row)):
        yield WarmupProgress("compile", 0, total, "program for one row")
        _compile(programs, layout, probe, {BATCH: 1, **row}, monitor)
    if batches != {1}:
        yield WarmupProgress("compile", 0, total, "program for two rows and more")
        _compile(programs, layout, probe, sizes, monitor)


def self_test(
    programs: Programs, spec: ModelSpec, grid: Grid, layout: PaddedLayout, probe: Probe
) -> None:
    """Check on the eager model that padding does not change an answer.

    Run before any compile, in the smallest and a middle row shape, so that a padding-sensitive
    model is refused within seconds.

    Raises:
        ModelError: naming the bucket, the row and the error.
    """
    keys = sorted({b.without(BATCH) for b in grid.buckets}, key=row_area)
    for key in dict.fromkeys((keys[0], keys[len(keys) // 2])):
        row = probe.row_for(grid, key)
        sizes = {BATCH: min(grid.batch_sizes(key)[-1], _SELF_TEST_BATCH), **dict(key)}
        index, rows = probe.plant(row, key, sizes[BATCH])
        layout.poison()
        got = layout.read(programs.eager(*layout.write(rows, sizes)), rows)[index]
        error = relative_error(list(got.values()), probe.answer(row))
        if not error <= TOLERANCE[spec.dtype]:
            raise ModelError(
                f"padding changes the answers of {spec.name}: a row of {label(row.sizes)} padded "
                f"into {label(sizes)} differs by {error:.2g} from the unpadded eager answer "
                f"(tolerance {TOLERANCE[spec.dtype]:g}). Let the model ignore padding (give it an "
                "input with `make: mask`, pool over real elements only), or set "
                "`padding_invariant: false` to run every row at its exact size."
            )


def _compile(
    programs: Programs,
    layout: PaddedLayout,
    probe: Probe,
    sizes: Mapping[str, int],
    monitor: CompileMonitor,
) -> None:
    """Compile one program; keep weight packing only if it reproduces the eager answers."""
    batch = sizes[BATCH]
    build = programs.compile_single if batch == 1 else programs.compile_many
    rows = [probe.row({axis: s for axis, s in sizes.items() if axis != BATCH})] * batch
    inputs = layout.write(rows, sizes)
    breaks = snapshot()
    build(inputs)
    monitor.count_breaks(since(breaks))
    if not monitor.collect(CompilePhase.WARMUP):
        raise ModelError(
            "torch.compile compiled nothing: it is switched off in this process; unset "
            "TORCHDYNAMO_DISABLE, or set `compile.tier: eager`"
        )
    if not programs.frozen:
        return
    program, _ = programs.for_sizes(sizes)
    got = layout.read(program(*inputs), rows)[0]
    error = relative_error(list(got.values()), probe.answer(rows[0]))
    if not error <= TOLERANCE["float32"]:
        log.warning("weight packing changes answers by %.1e; compiling without it", error)
        programs.frozen = False
        build(inputs)
        monitor.collect(CompilePhase.WARMUP)


def compile_sizes(spec: ModelSpec, grid: Grid) -> dict[str, int]:
    """Pick sizes for the compile that are unlike each other and every fixed dim of the inputs.

    Torch takes equal sizes for the same size (duck sizing): a batch of 3 beside 3 channels would
    be compiled for 3 rows only, and the first other batch would compile again.
    """
    taken = {dim for t in spec.inputs.values() for dim in t.dims if isinstance(dim, int)}
    sizes: dict[str, int] = {}
    for axis in grid.axes:
        start = _COMPILE_BATCH if axis == BATCH else min(_COMPILE_SIZE, grid.max_size(axis))
        # Downwards on the row axes, because the grid's end may be the model's limit.
        step = 1 if axis == BATCH else -1
        size = start
        while size in taken and size > 2:
            size += step
        sizes[axis] = size
        taken.add(size)
    return sizes


def _single_pays(
    programs: Programs, layout: PaddedLayout, probe: Probe, row: Mapping[str, int]
) -> bool:
    rows = [probe.row(row), probe.row(row)]
    return single_pays(
        programs.eager, lambda batch: layout.write(rows[:batch], {BATCH: batch, **row})
    )
