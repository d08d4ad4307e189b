"""Modules that torch cannot compile as one graph, imported as ``remedy_modules:NAME``.

Each is a masked mean with something in the way; the operators stand for C extensions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LIB = torch.library.Library("remedy", "DEF")  # kept for the life of the process
CALLS: dict[str, int] = {"smooth": 0}


def _define(name: str) -> None:
    LIB.define(f"{name}(Tensor x) -> Tensor")
    LIB.impl(name, lambda x: torch.from_numpy(x.numpy() * 2), "CPU")


_define("opaque")  # never has a fake implementation
_define("declared")  # gets one from the module remedy_fakes


def _smooth(x: Tensor) -> Tensor:
    CALLS["smooth"] += 1
    return torch.tanh(x) * 0.5 + 0.5


smooth = torch.library.custom_op(
    "remedy::smooth", _smooth, mutates_args=(), schema="(Tensor x) -> Tensor"
)
smooth.register_fake(torch.empty_like)


def smooth_decomposed(x: Tensor) -> Tensor:
    return torch.ops.aten.add(torch.ops.aten.mul(torch.ops.aten.tanh(x), 0.5), 0.5)


TABLE = {torch.ops.remedy.smooth.default: smooth_decomposed}


def table() -> dict[Any, Callable[..., Any]]:
    return {torch.ops.remedy.smooth: smooth_decomposed}


class Gate(nn.Module):
    """Looks at a value; the other branch is never taken."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 1e6).any()):
            return x.clamp(-1e6, 1e6)
        return x


class Lambda(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class Between(nn.Module):
    """A masked mean of two layers with ``middle`` between them."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.middle = middle
        self.last = nn.Linear(8, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.relu(self.first(ids[..., None].to(torch.float32) / 8))  # [B, S, 8]
        hidden = self.middle(hidden)
        values = self.last(hidden)[..., 0] * mask
        return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True)


class Tied(nn.Module):
    """Takes rows of one length only: of 40, where the trace happens to be."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        scale = 2.0 if ids.shape[1] == self.length else 1.0
        return (ids * mask).sum(1, keepdim=True) * scale / (mask.sum(1, keepdim=True) * scale)


class Guarded(nn.Module):
    """Takes another way for rows that no bucket has."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        total = (ids * mask).sum(1, keepdim=True).float()
        return total / mask.sum(1, keepdim=True) if ids.shape[1] > 4 else total


class Looped(nn.Module):
    """The same gate in a loop over layers, which torch cannot resume."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate(), Gate()])

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        values = (ids * mask).to(torch.float32)
        for gate in self.gates:
            values = gate(values + 1) - 1
        return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True)


class Counting(nn.Module):
    """Remembers how often it was called, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0.0 * self.calls


class Scaled(nn.Module):
    """Multiplies by a number that Python makes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * math.cos(float(x.dim()))


class WideAsTraced(nn.Module):
    """As wide as the traced rows are long, behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 40)
        self.head = nn.Linear(40, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        values = self.embed(ids)
        torch._dynamo.graph_break()
        values = self.head(values) * mask[:, :, None]
        return values.sum(1) / mask.sum(1, keepdim=True)


def _seeded(middle: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Between(middle)


def clean() -> nn.Module:
    return _seeded(nn.Tanh())


def branching() -> nn.Module:
    return _seeded(Gate())


def opaque() -> nn.Module:
    return _seeded(Lambda(torch.ops.remedy.opaque))


def declared() -> nn.Module:
    return _seeded(Lambda(torch.ops.remedy.declared))


def composite() -> nn.Module:
    return _seeded(Lambda(torch.ops.remedy.smooth))


def printing() -> nn.Module:
    return _seeded(Lambda(_print))


def _print(x: Tensor) -> Tensor:
    print("side effect")
    return x


def dicing() -> nn.Module:
    return _seeded(Lambda(lambda x: x + 0 * random.random()))


def fetching() -> nn.Module:
    return _seeded(Lambda(lambda x: x.cpu()))


def counting() -> nn.Module:
    return _seeded(Counting())


def scaled() -> nn.Module:
    return _seeded(Scaled())


def wide_as_traced() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return WideAsTraced()


def looped() -> nn.Module:
    return Looped()


def guarded() -> nn.Module:
    return Guarded()


def tied() -> nn.Module:
    return Tied(40)


_IDS = {
    "ids": {"dtype": "int64", "dims": ["batch", "seq"]},
    "mask": {"dtype": "int64", "dims": ["batch", "seq"], "make": "mask"},
}


def config(name: str, batches: tuple[int, ...] = (2, 4), **compile_: Any) -> dict[str, Any]:
    """Plain config data of one of the modules; ``compile_`` is its section ``compile``."""
    return {
        "name": name,
        "import": f"remedy_modules:{name}",
        "inputs": _IDS,
        "outputs": {"mean": {"dtype": "float32", "dims": ["batch", 1]}},
        "policy": {"seq": {"explicit": [8, 24, 40]}, "batch": {"explicit": list(batches)}},
        "compile": compile_,
        "device": "cpu",
        "threads": 1,
    }
