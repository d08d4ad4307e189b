"""Any torch module by import path, with the tensors that the config declares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shapeserve.errors import ModelError
from shapeserve.models.describe import describe
from shapeserve.models.imports import import_name
from shapeserve.models.spec import LoadedModel, ModelSpec, TensorSpec

if TYPE_CHECKING:
    from shapeserve.config import ModelConfig


class ImportedModule(nn.Module):
    """Holds a module to its declared outputs.

    Floating inputs are cast to the model's dtype, floating outputs to their declared one; any other
    difference is an error, raised when the module first runs (the self-test does, eagerly).
    """

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.module = module
        self._name = spec.name
        self._outputs = tuple(spec.outputs.values())
        self._dtype: torch.dtype = getattr(torch, spec.dtype)

    @property
    def inner(self) -> nn.Module:
        """What the factory made."""
        return self.module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run on tensors in spec order; return a tuple in spec order.

        Raises:
            ModelError: the outputs are not the declared ones.
        """
        # Lists: where the module breaks the graph, torch cannot go on inside a generator.
        cast = [t.to(self._dtype) if t.is_floating_point() else t for t in inputs]
        outputs = self._in_order(self.module(*cast))
        if len(outputs) != len(self._outputs):
            raise ModelError(
                f"{self._name} returned {len(outputs)} outputs, declared are {len(self._outputs)}; "
                "correct `outputs`"
            )
        pairs = zip(outputs, self._outputs, strict=True)
        return tuple([self._as_declared(tensor, spec) for tensor, spec in pairs])

    def _in_order(self, outputs: object) -> tuple[object, ...]:
        if isinstance(outputs, Mapping):
            names = {spec.name for spec in self._outputs}
            if set(outputs) != names:
                raise ModelError(
                    f"{self._name} returned {sorted(outputs)}, declared are {sorted(names)}; "
                    "correct `outputs`"
                )
            return tuple(outputs[spec.name] for spec in self._outputs)
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)

    def _as_declared(self, tensor: object, spec: TensorSpec) -> Tensor:
        place = f"output {spec.name!r} of {self._name}"
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{place} is {type(tensor).__name__}; return a tensor")
        if tensor.dim() != len(spec.dims):
            raise ModelError(
                f"{place} has {tensor.dim()} dims, declared are {list(spec.dims)}; correct "
                f"`outputs.{spec.name}`"
            )
        declared: torch.dtype = getattr(torch, spec.dtype)
        if tensor.dtype != declared and not (
            tensor.dtype.is_floating_point and declared.is_floating_point
        ):
            raise ModelError(
                f"{place} is {tensor.dtype}, declared is {declared}; correct `outputs.{spec.name}`"
            )
        return tensor.to(declared)


def load_module(config: ModelConfig, device: torch.device | str) -> LoadedModel:
    """Import a factory, call it without arguments, and hold the result to the declared tensors.

    Raises:
        ConfigError: the config says too little about the module.
        ModelError: the factory cannot be imported, fails, or returns no torch module.
    """
    spec = describe(config)
    inner = _make(str(config.import_))
    module = ImportedModule(inner, spec)
    module.eval().requires_grad_(False).to(device, getattr(torch, spec.dtype))
    return LoadedModel(spec, module, None, _fingerprint(str(config.import_), inner, spec))


def _make(path: str) -> nn.Module:
    factory = import_name(path)
    if not callable(factory):
        raise ModelError(f"import {path} is {type(factory).__name__}; name a function or a class")
    try:
        made = factory()
    except Exception as error:  # the user's code: whatever it raises, the model is not there
        raise ModelError(f"import {path} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"import {path} returned {type(made).__name__}; return a torch nn.Module")
    return made


def _fingerprint(path: str, module: nn.Module, spec: ModelSpec) -> str:
    """Hash what is known of the program: path, structure, tensors, dtype, torch.

    The code of ``forward`` is not seen here; torch's own caches key on the traced graph.
    """
    layout = [(name, tuple(t.shape), str(t.dtype)) for name, t in module.state_dict().items()]
    facts = (path, str(module), layout, spec.inputs, spec.outputs, spec.dtype, torch.__version__)
    return hashlib.sha256(repr(facts).encode()).hexdigest()
