"""Modules for the tests of ``evaluate``; each is small, and odd in one way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FAILS = {"now": False}
"""Whether ``Failing`` raises."""


class Broken(nn.Module):
    """One graph break between two additions."""

    def forward(self, values: Tensor) -> Tensor:
        values = values + 1
        torch._dynamo.graph_break()
        return values * 2


class Failing(nn.Module):
    """Doubles, until it is told to fail."""

    def forward(self, values: Tensor) -> Tensor:
        if FAILS["now"]:
            raise RuntimeError("planted failure\nwith a second line")
        return values * 2


class SinglePrecision(nn.Module):
    """Holds a float32 tensor that is no parameter, so float64 does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = [torch.eye(4)]

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.matrix[0]


def broken() -> nn.Module:
    return Broken()


def failing() -> nn.Module:
    return Failing()


def single_precision() -> nn.Module:
    return SinglePrecision()
