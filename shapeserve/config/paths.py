"""Find model directories, also inside installed packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shapeserve.errors import ConfigError

_PACKAGE = "package:"
_MARKER = "config.json"


def is_package_path(path: str) -> bool:
    """Say whether a model path names an installed package instead of a directory."""
    return path.startswith(_PACKAGE)


def model_directory(path: str) -> Path:
    """Return the absolute directory behind a model path.

    Args:
        path: a directory, or ``package:NAME``: the directory of that installed package if
            it has a config.json, else the only directory directly below that has one. The
            package is looked up but not imported, so none of its code runs.

    Raises:
        ConfigError: there is no such directory or package, or not exactly one model in it.
    """
    if is_package_path(path):
        return _in_package(path.removeprefix(_PACKAGE))
    directory = Path(path).expanduser().resolve()
    if not directory.is_dir():
        raise ConfigError(
            f"model path {path!r} is not a directory; give the directory that holds {_MARKER} "
            "and the weights"
        )
    return directory


def _in_package(name: str) -> Path:
    if not name.isidentifier():  # find_spec imports the parents of a dotted name
        raise ConfigError(f"{_PACKAGE}{name} is not the import name of a top-level package")
    spec = importlib.util.find_spec(name)
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    if not roots:
        raise ConfigError(f"the package {name!r} is not installed; install it or give a directory")
    found = [root for root in roots if (root / _MARKER).is_file()] or sorted(
        marker.parent for root in roots for marker in root.glob(f"*/{_MARKER}")
    )
    if len(found) != 1:
        where = ", ".join(map(str, found or roots))
        raise ConfigError(
            f"the package {name!r} must hold exactly one directory with a {_MARKER}, it holds "
            f"{len(found)} ({where}); give the directory itself"
        )
    return found[0].resolve()
