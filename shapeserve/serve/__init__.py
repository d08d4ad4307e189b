"""shapeserve on Ray Serve: the only part of the package that imports ray.

In a Serve config file: ``import_path: shapeserve.serve:app`` with the service's configuration as
``args``, and ``import_path: shapeserve.serve:health_app`` at ``route_prefix: /v2/health``.
``shapeserve.serve.launch`` does that for ``shapeserve serve``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapeserve.serve.builder import app
    from shapeserve.serve.health import health_app

__all__ = ["app", "health_app"]

# On first use, because Ray reads its flags when it is imported and `launch` sets them before.
_HOMES = {"app": "shapeserve.serve.builder", "health_app": "shapeserve.serve.health"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
