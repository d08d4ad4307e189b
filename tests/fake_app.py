"""``import_path: fake_app:app``: the real deployment; models with ``path: fake:...`` are fakes.

No ``from __future__ import annotations`` here: Ray reads the builder's annotation at run time.
"""

from typing import Any

from fake_engine import FakeEngine
from ray.serve import Application

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.metrics import Metrics
from shapeserve.serve.builder import build
from shapeserve.serve.replica import new_engine


def make_engine(config: ModelConfig, metrics: Metrics, devices: dict[str, Any]) -> Any:
    if (config.path or "").startswith("fake:"):
        return FakeEngine(config, metrics)
    return new_engine(config, metrics, devices)


def app(args: ServeConfig) -> Application:
    return build(args, make_engine)
