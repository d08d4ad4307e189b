"""Whether the model can be a CUDA graph, from what is known without a GPU."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from shapeserve.compile.islands import HostWait
from shapeserve.explain.report import Blocker, Break
from shapeserve.explain.trace import TracedGraph
from shapeserve.metrics import GraphBreakReason

_TO_HOST = {"cpu", "numpy", "tolist", "item"}
_LINE = re.compile(r'File "(.+)", line (\d+)')


def find_blockers(
    breaks: Iterable[Break],
    graphs: Iterable[TracedGraph],
    waits: Sequence[HostWait],
    random_sources: Sequence[str],
) -> tuple[Blocker, ...]:
    """Return why a capture is impossible or would not replay what the model does.

    Args:
        breaks: of all programs.
        graphs: of all programs.
        waits: operators of eager islands that wait for the device.
        random_sources: generators on the host that the model draws from.
    """
    found = [
        *(_of_break(broken) for broken in breaks if not broken.island),
        *(Blocker("cpu_sync", f"{w.op} in an eager island waits", w.place) for w in waits),
        *(blocker for graph in graphs for blocker in _of_graph(graph)),
        *(
            Blocker("host_random", f"{source}: a replay would repeat the captured numbers", "")
            for source in random_sources
        ),
    ]
    return tuple(dict.fromkeys(found))


def _of_break(broken: Break) -> Blocker:
    place = str(broken.place or "")
    if broken.kind is GraphBreakReason.DATA_DEPENDENT:
        return Blocker("data_dependent", f"{broken.what}: Python waits for a value", place)
    return Blocker("graph_break", f"{broken.what}: Python there is not replayed", place)


def _of_graph(graph: TracedGraph) -> Iterator[Blocker]:
    for node in graph.nodes:
        if node.op != "call_method" or _python_number(node):
            continue
        if node.target in _TO_HOST or _to_cpu(node):
            yield Blocker("cpu_sync", f"Tensor.{node.target} copies to the host", _line(node))
    for node in graph.ops:
        if _waits(node):
            yield Blocker("cpu_sync", f"{node.target} waits for the device", _line(node))
        elif _unsafe(node.target):
            yield Blocker("unsafe_op", f"{node.target} is tagged cudagraph_unsafe", _line(node))


def _waits(node: torch.fx.Node) -> bool:
    """Whether a value or a size is made on the host; a size that is shows as an unknown symbol."""
    made = torch.Tag.data_dependent_output in getattr(node.target, "tags", ())
    return made or bool(free_unbacked_symbols(node.meta.get("val")))


def _to_cpu(node: torch.fx.Node) -> bool:
    # Traced on the CPU, ``x.to(y.device)`` names the CPU as well, but as a device.
    wanted = [*node.args[1:], *node.kwargs.values()]
    return node.target == "to" and any(isinstance(w, str) and w == "cpu" for w in wanted)


def _python_number(node: torch.fx.Node) -> bool:
    """Whether ``item`` gives back a number that Python made: Dynamo hands those in as tensors."""
    (given, *_) = node.args
    return (
        node.target == "item"
        and isinstance(given, torch.fx.Node)
        and given.op == "placeholder"
        and getattr(given.meta.get("example_value"), "dtype", None) == torch.float64
    )


def _unsafe(op: object) -> bool:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    return tag is not None and tag in getattr(op, "tags", ())


def _line(node: torch.fx.Node) -> str:
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    return ":".join(lines[-1]) if lines else ""


def host_random(run: Callable[[], object]) -> tuple[str, ...]:
    """Run the eager model and return the generators on the host that it drew from."""
    python, numpy = random.getstate(), _numpy_state()
    run()
    found = []
    if random.getstate() != python:
        found.append("Python's random")
    if _numpy_state() != numpy:
        found.append("numpy.random")
    return tuple(found)


def _numpy_state() -> str:
    return repr(np.random.get_state(legacy=False))
