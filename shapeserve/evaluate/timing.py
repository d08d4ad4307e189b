"""Time calls in turn, so that what else happens on the machine meets all of them."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch._dynamo.utils as dynamo_utils

K = TypeVar("K")
_break: Callable[[], None] = torch._dynamo.graph_break


@dataclass(frozen=True, slots=True)
class Timing:
    """How often a call is timed.

    Attributes:
        least: calls, however long they take.
        most: calls, however short they are.
        budget_s: for all calls of one kind; between the two bounds it decides.
    """

    least: int = 10
    most: int = 200
    budget_s: float = 2.0


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, to the end of its work on the device."""
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def time_calls(
    calls: Mapping[K, Callable[[], object]], device: torch.device, timing: Timing
) -> tuple[dict[K, list[float]], dict[K, Exception]]:
    """Time several calls in turn.

    Returns:
        The seconds of each, and the error of each that failed; it is not called again.
    """
    seconds: dict[K, list[float]] = {key: [] for key in calls}
    failed: dict[K, Exception] = {}
    for _ in range(timing.most):
        for key, call in calls.items():
            if key in failed or _enough(seconds[key], timing):
                continue
            try:
                seconds[key].append(timed(call, device))
            except Exception as error:  # the user's model: whatever it raises is a result
                failed[key] = error
    return seconds, failed


def _enough(seconds: list[float], timing: Timing) -> bool:
    return len(seconds) >= timing.least and sum(seconds) >= timing.budget_s


_BREAKS = 4  # of the calibration: those of _broken


@torch.no_grad()
def graph_break_s() -> float:
    """Measure what one graph break costs a call here: back to Python, guards, the next graph.

    The same additions of one number, with breaks and without. What cannot be fused across a break
    is not in it.

    Raises:
        RuntimeError: torch did not break the graph, or not so often.
    """
    x = torch.zeros(1)
    counter = dynamo_utils.counters["graph_break"]
    broken, whole = (torch.compile(_fresh(f), backend="eager") for f in (_broken, _whole))
    before = sum(counter.values())
    broken(x)
    if (met := sum(counter.values()) - before) != _BREAKS:
        raise RuntimeError(f"{met} graph breaks instead of {_BREAKS}: their cost is not known")
    whole(x)
    calls = {True: lambda: broken(x), False: lambda: whole(x)}
    seconds, failed = time_calls(calls, x.device, Timing(least=50, most=50, budget_s=0))
    for error in failed.values():
        raise error
    # The fastest call: what else runs on the machine only ever adds.
    return max(min(seconds[True]) - min(seconds[False]), 0.0) / _BREAKS


def _fresh(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copy a function with a code object of its own: torch keeps what it compiled on that."""
    code: types.CodeType = fn.__code__
    return types.FunctionType(code.replace(), fn.__globals__)


def _broken(x: torch.Tensor) -> torch.Tensor:
    # Not a loop: torch runs a loop with a break in it eagerly as a whole.
    x = x + 1
    _break()
    x = x + 1
    _break()
    x = x + 1
    _break()
    x = x + 1
    _break()
    return x + 1


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x + 1 + 1 + 1 + 1 + 1
