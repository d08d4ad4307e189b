"""Runs a module under Dynamo and keeps everything that torch says about it.

Sources, all torch's own: a backend that gets every graph, the structured trace (which
``TORCH_TRACE`` writes and tlparse reads) for breaks and size guards, the guard filter for the list
of guards, and the compilation metrics for the frames. Code is not generated: AOTAutograd stops
before Inductor.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import CompileContext

from shapeserve.compile.decompose import Table
from shapeserve.compile.program import served_guards, with_own_code

Inputs = tuple[torch.Tensor, ...]

# Frames of one function that may be compiled, such as that of a layer; above any depth of layers.
_FRAME_LIMIT = 256
_SIZE_EVENTS = ("create_symbol", "symbolic_shape_specialization", "guard_added_fast", "guard_added")


@dataclass
class TracedGraph:
    """A graph as Dynamo found it, and the operators that Inductor would get.

    ``calls`` are those so far, ``runs`` those of one call of the program.
    """

    compile_id: str
    nodes: list[torch.fx.Node]
    ops: list[torch.fx.Node] = field(default_factory=list)
    calls: int = 0
    runs: int = 0


@dataclass(frozen=True)
class SizeEvent:
    """A symbol, a specialisation or a guard on sizes, with the user's stack."""

    kind: str
    data: Mapping[str, Any]
    stack: Sequence[Mapping[str, Any]]


@dataclass
class Trace:
    """Everything that torch said.

    Attributes:
        graphs: compiled graphs.
        breaks: torch's reports, in full.
        sizes: events about sizes.
        guards: kind -> number.
        kept_guards: those of them that a program of one graph keeps.
        frames: compile id -> (function, place).
        recompiles: guard texts of compiles in later calls.
        tried: whether other sizes ran.
    """

    graphs: list[TracedGraph] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    sizes: list[SizeEvent] = field(default_factory=list)
    guards: Counter[str] = field(default_factory=Counter)
    frames: dict[str, tuple[str, str]] = field(default_factory=dict)
    recompiles: list[str] = field(default_factory=list)
    kept_guards: int = 0
    tried: bool = False

    def copy(self) -> Trace:
        """What was said up to now."""
        graphs, breaks, sizes = list(self.graphs), list(self.breaks), list(self.sizes)
        guards, frames = self.guards.copy(), dict(self.frames)
        return Trace(graphs, breaks, sizes, guards, frames, kept_guards=self.kept_guards)


def trace_program(
    module: nn.Module, name: str, calls: Sequence[Inputs], table: Table | None
) -> Trace:
    """Trace ``module`` on the first inputs, count a second run, then run the others.

    Args:
        module: tensors -> tuple of tensors.
        name: of the program.
        calls: inputs of different sizes; the first are the sizes to compile for.
        table: user decompositions.
    """
    found = Trace()
    torch._dynamo.reset()
    dynamo_utils.clear_compilation_metrics()
    limits = torch._dynamo.config.patch(
        recompile_limit=_FRAME_LIMIT, accumulated_recompile_limit=4 * _FRAME_LIMIT
    )
    try:
        with torch.no_grad(), limits, _listening(found):
            program = _program(module, name, found, table)
            program(*calls[0])
            records = _records()
            found.frames.update({str(r.compile_id): _frame(r) for r in records})
            # Torch may begin a frame again after it had a graph: the last one is the one that runs.
            found.graphs = [*{graph.compile_id: graph for graph in found.graphs}.values()]
            first = found.copy()
            _count_runs(first.graphs, lambda: program(*calls[0]))
            for inputs in calls[1:]:
                program(*inputs)
            first.tried = len(calls) > 1
            known = {str(r.compile_id) for r in records}
            later = [r for r in _records() if str(r.compile_id) not in known]
            first.recompiles += [str(r.recompile_reason) for r in later if r.recompile_reason]
            return first
    finally:
        torch._dynamo.reset()


def _count_runs(graphs: Sequence[TracedGraph], run: Callable[[], object]) -> None:
    before = [graph.calls for graph in graphs]
    run()
    for graph, calls in zip(graphs, before, strict=True):
        graph.runs = graph.calls - calls


def _program(
    module: nn.Module, name: str, found: Trace, table: Table | None
) -> Callable[..., object]:
    def forward(*inputs: torch.Tensor) -> object:
        return module(*inputs)

    keep = served_guards()

    def keep_all(guards: Sequence[Any]) -> list[bool]:
        found.guards.update(guard.guard_type for guard in guards)
        found.kept_guards += sum(keep(guards)) if keep else len(guards)
        return [True] * len(guards)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return _lower(gm, example_inputs, found, table)

    program: Callable[..., object] = torch.compile(
        with_own_code(forward, name),
        backend=backend,
        dynamic=True,
        options={"guard_filter_fn": keep_all},
    )
    return program


def _lower(
    gm: torch.fx.GraphModule,
    example_inputs: list[torch.Tensor],
    found: Trace,
    table: Table | None,
) -> Callable[..., Any]:
    """Note Dynamo's graph and the one that AOTAutograd makes of it; return what runs it."""
    from torch._inductor.decomposition import select_decomp_table

    compile_id = str(CompileContext.current_compile_id())
    graph = TracedGraph(compile_id, list(gm.graph.nodes))
    found.graphs.append(graph)

    def note(lowered: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graph.ops = [node for node in lowered.graph.nodes if node.op == "call_function"]
        boxed: Callable[..., Any] = make_boxed_func(lowered.forward)
        return boxed

    decompositions = {**select_decomp_table(), **(table or {})}
    lower = aot_autograd(fw_compiler=note, bw_compiler=note, decompositions=decompositions)
    run = lower(gm, example_inputs)

    def counted(*inputs: Any) -> Any:
        graph.calls += 1
        return run(*inputs)

    return counted


def _records() -> list[Any]:
    return [r for r in dynamo_utils.get_compilation_metrics() if not r.is_runtime and r.compile_id]


def _frame(record: Any) -> tuple[str, str]:
    return str(record.co_name), f"{record.co_filename}:{record.co_firstlineno}"


@contextmanager
def _listening(found: Trace) -> Iterator[None]:
    """Attach to torch's structured trace, and keep torch from printing what we report."""
    logger, dynamo = logging.getLogger("torch.__trace"), logging.getLogger("torch._dynamo")
    level = dynamo.level
    handler = _Listener(found)
    logger.addHandler(handler)
    dynamo.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dynamo.setLevel(level)
        logger.removeHandler(handler)


class _Listener(logging.Handler):
    def __init__(self, found: Trace) -> None:
        super().__init__()
        self._found = found
        self._files: dict[int, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        metadata: Mapping[str, Any] = getattr(record, "metadata", {})
        if metadata.get("artifact", {}).get("name") == "dynamo_graph_break_reason":
            self._found.breaks.append(str(getattr(record, "payload", "")))
        for kind in _SIZE_EVENTS:
            if kind in metadata:
                data = metadata[kind]
                self._found.sizes.append(SizeEvent(kind, data, self._stack(data)))

    def _stack(self, data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The user's stack; torch writes the index of a file name instead of the name."""
        from torch._logging.structured import INTERN_TABLE

        if len(self._files) != len(INTERN_TABLE):
            self._files = {index: name for name, index in INTERN_TABLE.items()}
        frames = data.get("user_stack") or ()
        return [{**f, "filename": self._files.get(f["filename"], "")} for f in frames]
