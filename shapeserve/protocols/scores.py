"""From logits to what clients see, in float64, where a sigmoid saturates later than in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shapeserve.models.spec import Activation

Array = np.ndarray[Any, Any]


def logits_of(outputs: Mapping[str, Array]) -> Array:
    """Return the logits [labels] of one row; the engine has seen that they are finite."""
    return np.asarray(outputs["logits"], dtype=np.float64)


def _sigmoid(logits: Array) -> Array:
    small = np.exp(-np.abs(logits))  # of the negative value only, which cannot overflow
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def _softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max())
    return np.asarray(exponentials / exponentials.sum())


def _identity(logits: Array) -> Array:
    return logits


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "identity": _identity,
}
