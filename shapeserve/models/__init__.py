"""Adapters: from a model's own files or code to one spec and one module.

``describe`` reads configs only and imports neither torch nor transformers; ``load`` reads the
weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapeserve.models.describe import describe
from shapeserve.models.imports import import_custom_ops
from shapeserve.models.spec import Head, LoadedModel, ModelSpec, TensorSpec, TextPair

if TYPE_CHECKING:
    import torch

    from shapeserve.config import ModelConfig

__all__ = ["Head", "LoadedModel", "ModelSpec", "TensorSpec", "TextPair", "describe", "load"]


def load(config: ModelConfig, device: torch.device | str) -> LoadedModel:
    """Load a model's weights onto a device.

    Args:
        config: the model's config.
        device: where to; what ``auto`` means is the caller's to decide.

    Raises:
        ConfigError: the config contradicts the model.
        ModelError: the model cannot be loaded; the message says what to do.
    """
    import_custom_ops(config.compile.custom_ops)
    # Imported here, because torch and transformers take seconds that describe() must not cost.
    if config.import_ is not None:
        from shapeserve.models.module import load_module

        return _with_widths(load_module(config, device))
    from shapeserve.models.text import load_text

    return _with_widths(load_text(config, device))


def _with_widths(model: LoadedModel) -> LoadedModel:
    tensors = [*model.module.parameters(), *model.module.buffers()]
    widths = frozenset(size for tensor in tensors for size in tensor.shape)
    return replace(model, spec=replace(model.spec, widths=widths))
