"""Code that the operator's configuration names; nothing that a client sends ever comes here."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from shapeserve.errors import ModelError


def import_custom_ops(modules: Iterable[str]) -> None:
    """Import modules that register operators and their fake implementations.

    Raises:
        ModelError: one cannot be imported.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # the user's code: whatever it raises, they are not there
            remedy = (
                "install the package or put its directory on PYTHONPATH"
                if isinstance(error, ImportError)
                else "it is imported before the model, so let it import what defines its operators"
            )
            raise ModelError(
                f"compile.custom_ops: {name}: {type(error).__name__}: {error}; {remedy}"
            ) from error


def import_name(path: str) -> object:
    """Return what ``package.module:name`` names.

    Raises:
        ModelError: it cannot be imported.
    """
    module_name, _, attributes = path.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"import {path}: {error}; install the package or put its directory on PYTHONPATH"
        ) from error
    return found
