"""Explains one configured model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from shapeserve.buckets import BATCH, Grid
from shapeserve.compile.decompose import Table, load_decompositions
from shapeserve.compile.islands import OpWatch, island_waits
from shapeserve.config import ModelConfig
from shapeserve.engine.modules import Prepared, prepare
from shapeserve.errors import ConfigError, ModelError
from shapeserve.explain.breaks import read_breaks
from shapeserve.explain.capture import find_blockers, host_random
from shapeserve.explain.cost import split_us
from shapeserve.explain.order import check_order
from shapeserve.explain.recompiles import read_recompiles
from shapeserve.explain.report import CustomOp, Explanation, Graph, Summary, TracedProgram
from shapeserve.explain.shapes import read_axes
from shapeserve.explain.trace import Trace, TracedGraph, trace_program
from shapeserve.warmup import compile_sizes

log = logging.getLogger("shapeserve.explain")

_TOP_OPS = 5
# Namespaces of operators that come with torch, which Inductor knows or has templates for.
_TORCHS = {
    *("aten", "prim", "prims", "quantized", "mkldnn", "mkldnn_prepacked", "inductor", "sparse"),
    *("_quantized", "rngprims", "debugprims", "profiler", "torch_attn", "c10d", "symm_mem"),
    *("_c10d_functional", "onednn", "mkl", "streams", "bc"),
}


def explain(config: ModelConfig) -> Explanation:
    """Trace the module that would serve, and again without its remedies if it has some.

    Raises:
        ConfigError: the config does not fit the model.
        ModelError: the model cannot be loaded or run.
    """
    if torch._dynamo.config.disable:
        raise ConfigError(
            "torch.compile is switched off in this process, so nothing would be traced; unset "
            "TORCHDYNAMO_DISABLE"
        )
    remedies = config.compile
    before = None
    if remedies.custom_ops:
        check_order(remedies.custom_ops)
    if remedies.eager_islands or remedies.decompositions or remedies.custom_ops:
        before = _without_remedies(config)
    return _explain(config, before)


def _without_remedies(config: ModelConfig) -> Summary | None:
    none = {"eager_islands": (), "decompositions": (), "custom_ops": ()}
    bare = config.model_copy(update={"compile": config.compile.model_copy(update=none)})
    try:
        return _explain(bare, None).summary
    except Exception as error:  # it may need its operators to run at all
        log.warning("no comparison: without its remedies the model does not run: %s", error)
        return None


def _explain(config: ModelConfig, before: Summary | None) -> Explanation:
    config, notes = _here(config)
    prepared = prepare(config, lambda _: None)
    table = load_decompositions(config.compile.decompositions)
    traces = {
        name: (sizes, _trace(prepared, name, sizes, table))
        for name, sizes in _programs(prepared).items()
    }
    programs = tuple(_program(prepared, n, sizes, t) for n, (sizes, t) in traces.items())
    graphs = [graph for _, found in traces.values() for graph in found.graphs]
    cost = split_us() if any(program.splits for program in programs) else None
    islands = config.compile.eager_islands
    return Explanation(
        model=prepared.model.spec.name,
        device=prepared.device.type,
        torch=torch.__version__,
        programs=programs,
        custom_ops=_custom_ops(prepared, programs, graphs, table, cost),
        blockers=find_blockers(
            [broken for program in programs for broken in program.breaks],
            graphs,
            island_waits(prepared.model.inner, islands, lambda: _run_eager(prepared)),
            host_random(lambda: _run_eager(prepared)),
        ),
        islands=islands,
        decompositions=tuple(sorted(_name(op) for op in table)),
        split_us=cost,
        before=before,
        notes=notes,
        wants_capture=config.compile.tier in ("auto", "graph", "eager_graph"),
    )


def _here(config: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """A model for CUDA is traced on the CPU where there is no GPU."""
    if config.device == "cpu" or torch.cuda.is_available():
        return config, ()
    note = "traced on the CPU: copies between host and device show only on CUDA"
    if config.import_ is None:
        note += ", where text is packed by default and has kernels of its own"
    return config.model_copy(update={"device": "cpu"}), (note,)


def _programs(prepared: Prepared) -> dict[str, dict[str, int]]:
    """The programs that would be compiled: name -> sizes."""
    grid = prepared.grid
    sizes = compile_sizes(prepared.model.spec, grid)
    if BATCH not in grid.axes:
        return {"many": sizes}
    batches = {bucket.size(BATCH) for bucket in grid.buckets}
    many = {} if batches == {1} else {"many": sizes}
    return {**many, "single": {**sizes, BATCH: 1}} if 1 in batches else many


def _trace(prepared: Prepared, name: str, sizes: Mapping[str, int], table: Table) -> Trace:
    shapes = [sizes, *_other_sizes(prepared.grid, sizes)]
    calls = [_inputs(prepared, shape) for shape in shapes]
    try:
        return trace_program(prepared.module, name, calls, table)
    except Exception as error:  # the user's code, or torch over it
        raise ModelError(
            f"{prepared.model.spec.name} cannot be traced: {type(error).__name__}: {error}"
        ) from error


def _other_sizes(grid: Grid, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes of one bucket that differ from the traced ones along every axis but a batch of one."""
    for bucket in grid.buckets:
        other = {**bucket.as_dict(), **({BATCH: 1} if sizes.get(BATCH) == 1 else {})}
        free = [axis for axis in sizes if sizes[axis] > 1]
        if all(other[axis] != sizes[axis] and other[axis] > 1 for axis in free):
            return [other]
    return []


def _inputs(prepared: Prepared, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    """The tensors that the program itself is given, whatever the layout does before it."""
    seen: list[tuple[torch.Tensor, ...]] = []

    def spy(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(tuple(tensor.clone() for tensor in inputs))
        outputs: tuple[torch.Tensor, ...] = prepared.module(*inputs)
        return outputs

    layout = prepared.layout
    written = layout.write(prepared.probe.fill(sizes), sizes)
    with torch.no_grad():
        layout.bind(spy, sizes)(*written)
    return seen[0]


def _program(
    prepared: Prepared, name: str, sizes: Mapping[str, int], found: Trace
) -> TracedProgram:
    return TracedProgram(
        name=name,
        sizes=sizes,
        graphs=tuple(_graph(graph, found) for graph in found.graphs),
        breaks=read_breaks(found.breaks, prepared.model.inner),
        axes=read_axes(found.sizes, sizes, tried=found.tried and not found.recompiles),
        guards=dict(found.guards.most_common()),
        checked_guards=found.guards.total() if found.breaks else found.kept_guards,
        recompiles=read_recompiles(found.recompiles),
    )


def _graph(graph: TracedGraph, found: Trace) -> Graph:
    function, place = found.frames.get(graph.compile_id, ("unknown", ""))
    counts = Counter(str(node.target) for node in graph.ops)
    return Graph(
        function=function,
        place=place,
        nodes=len(graph.nodes),
        ops=len(graph.ops),
        runs=graph.runs,
        top_ops=dict(counts.most_common(_TOP_OPS)),
    )


def _run_eager(prepared: Prepared) -> None:
    inputs = prepared.probe.inputs(prepared.probe.small())
    with torch.no_grad():
        prepared.model.module(*inputs)


def _custom_ops(
    prepared: Prepared,
    programs: Sequence[TracedProgram],
    graphs: Sequence[TracedGraph],
    table: Table,
    cost: float | None,
) -> tuple[CustomOp, ...]:
    watch = OpWatch()
    inputs = prepared.probe.inputs(prepared.probe.small())
    with torch.no_grad(), watch:
        prepared.model.module(*inputs)
    broken = {b.op for program in programs for b in program.breaks if b.op}
    in_graphs = {node.target for graph in graphs for node in graph.ops}
    found = []
    for op, calls in watch.calls.items():
        if op.namespace in _TORCHS:
            continue
        splits = calls if str(op) in broken else 0
        decomposed = op in table and op not in in_graphs
        us = splits * cost if splits and cost is not None else None
        found.append(CustomOp(_name(op), calls, _has_fake(op), decomposed, splits, us))
    return tuple(sorted(found, key=lambda op: op.name))


def _name(op: torch._ops.OpOverload) -> str:
    return str(op.name())  # type: ignore[no-untyped-call]


def _has_fake(op: torch._ops.OpOverload) -> bool:
    entry = torch._library.simple_registry.singleton.find(op._schema.name)
    if entry.fake_impl.kernel is not None:
        return True
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(_name(op), key) for key in keys)
