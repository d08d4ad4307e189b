"""Serve variable-length requests through a small set of warm, bucketed shapes.

``Engine`` runs a model in this process, with no Ray; ``shapeserve.serve`` puts it
behind Ray Serve. Both names below load on first use, so that importing the package
costs nothing and touches neither torch, ray nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapeserve.config import ServeConfig
    from shapeserve.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "ServeConfig", "__version__"]

_HOMES = {"Engine": "shapeserve.engine", "ServeConfig": "shapeserve.config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
