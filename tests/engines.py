"""Engines over the tiny models, started quickly: no code generation, one CPU thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny

from shapeserve.config import ServeConfig
from shapeserve.engine import Engine
from shapeserve.layout import RowArrays
from shapeserve.warmup import Probe

QUICK = {"backend": "eager"}


def text_config(directory: Path, **settings: Any) -> ServeConfig:
    """A tiny text encoder; ``settings`` are further keys of its model."""
    compile_ = {**QUICK, **settings.pop("compile", {})}
    model = {"path": str(directory), "threads": 1, "compile": compile_, **settings}
    return ServeConfig.from_dict({"models": [model]})


def module_config(name: str, /, **settings: Any) -> ServeConfig:
    """One of the modules of ``tiny``."""
    compile_ = {**QUICK, **settings.pop("compile", {})}
    model = tiny.module_config(name, threads=1, compile=compile_, **settings)
    return ServeConfig.from_dict({"models": [model]})


def started(config: ServeConfig) -> Engine:
    return Engine(config).start()


def alone(engine: Engine, arrays: dict[str, np.ndarray], sizes: dict[str, int]) -> list[np.ndarray]:
    """The eager answer to a row alone and unpadded."""
    built = engine._built
    assert built is not None
    probe: Probe = built.probe
    return probe.answer(RowArrays(arrays, sizes))


def value(engine: Engine, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(
        s.value
        for s in engine.metrics.samples()
        if s.name == f"shapeserve_{name}" and labels.items() <= s.labels.items()
    )
