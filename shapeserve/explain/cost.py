"""What leaving compiled code once costs on this machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from shapeserve.compile.program import with_own_code

_SPLITS = 4
_CALLS = 200
_REPEATS = 5


@functools.cache  # of the machine, not of a model
def split_us() -> float:
    """Measure a split: a small function with four graph breaks against one with none.

    The difference is what Dynamo's checks and the frames between the graphs take. That is the
    least that a split costs: what fuses across it, and larger guards, come on top.
    """

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        return x + 1

    def whole(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_SPLITS + 1):
            x = x + 1
        return x

    return max(_call_us(broken) - _call_us(whole), 0.0) / _SPLITS


def _call_us(fn: Callable[[torch.Tensor], torch.Tensor]) -> float:
    # ``eager`` runs the same operators in both, so that they cancel out.
    program = torch.compile(with_own_code(fn, "split_cost"), backend="eager", dynamic=True)
    x = torch.zeros(2, 3)
    with torch.no_grad():
        program(x)
        best = float("inf")
        for _ in range(_REPEATS):
            started = time.perf_counter()
            for _ in range(_CALLS):
                program(x)
            best = min(best, time.perf_counter() - started)
    return best / _CALLS * 1e6
