"""A module with an input and an output of every element type, imported as ``oip_modules:echo``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")


class Echo(nn.Module):
    """Gives back what it takes."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)


def echo() -> nn.Module:
    return Echo()


def config() -> dict[str, Any]:
    """Return plain config data: inputs ``in_DTYPE``, outputs ``out_DTYPE``, rows of any length."""
    dims = ["batch", "seq", 2]
    return {
        "name": "org/echo",
        "import": "oip_modules:echo",
        "inputs": {f"in_{dtype}": {"dtype": dtype, "dims": dims} for dtype in DTYPES},
        "outputs": {f"out_{dtype}": {"dtype": dtype, "dims": dims} for dtype in DTYPES},
        "policy": {"seq": {"explicit": [4, 8]}, "batch": {"explicit": [1, 2, 4]}},
        "compile": {"backend": "eager"},
        "threads": 1,
    }
