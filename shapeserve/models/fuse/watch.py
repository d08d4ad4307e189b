"""Watches one forward: which tensor objects enter and leave linear layers and GELUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# By name, so that transformers need not be there; what it computes is checked as well.
_GELU_CLASSES = ("GELU", "GELUActivation")

# What asking a tensor about itself returns; no value leaves the tensor that way.
_METADATA = (torch.Size, torch.dtype, torch.device, torch.layout, bool, int, str)


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One call of a linear layer.

    Attributes:
        layer: the layer.
        input: the tensor object that it got.
        output: the one that it returned.
        version: how often ``input`` had been written in place; None under ``inference_mode``.
    """

    layer: nn.Linear
    input: Tensor
    output: Tensor
    version: int | None


@dataclass(frozen=True, slots=True)
class GeluCall:
    """One call of what calls itself a GELU."""

    layer: nn.Module
    input: Tensor


@dataclass(slots=True)
class Observation:
    """One forward.

    Attributes:
        linears: calls of linear layers, in order. They hold the tensors, so no id is used twice.
        gelus: calls of GELUs, in order.
        uses: id of a linear layer's output -> operations that read it, 1 more if it was returned.
    """

    linears: list[LinearCall] = field(default_factory=list)
    gelus: list[GeluCall] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Count one use of each linear output among ``tensors``."""
        for tensor in tensors:
            if id(tensor) in self.uses:
                self.uses[id(tensor)] += 1


def observe(module: nn.Module, trial: Callable[[], object]) -> Observation:
    """Run ``trial``, which runs ``module`` once, and return what was seen.

    Holds every input and output of a linear layer until the observation is dropped, so the trial
    should be small.
    """
    seen = Observation()

    def on_linear(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor) and isinstance(output, Tensor):
            version = None if given.is_inference() else given._version
            seen.linears.append(LinearCall(layer, given, output, version))
            seen.uses[id(output)] = 0

    def on_gelu(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor):
            seen.gelus.append(GeluCall(layer, given))

    with contextlib.ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                handle = layer.register_forward_hook(on_linear, with_kwargs=True)
                stack.callback(handle.remove)
            elif type(layer).__name__ in _GELU_CLASSES:
                handle = layer.register_forward_hook(on_gelu, with_kwargs=True)
                stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Uses(seen))
        returned = trial()
    seen.use(tensors_of(returned))
    return seen


class _Uses(TorchFunctionMode):
    """Counts every torch function that reads a linear layer's output."""

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, _METADATA):
            self._seen.use(tensors_of((args, kwargs)))
        return result


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
