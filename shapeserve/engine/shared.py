"""Engines of one process that share the thread of their device."""

from __future__ import annotations

from shapeserve.config import ModelConfig
from shapeserve.engine.device import DeviceThread
from shapeserve.engine.engine import Engine
from shapeserve.engine.modules import device_kind
from shapeserve.metrics import Metrics


def shared_engine(
    config: ModelConfig, metrics: Metrics, devices: dict[str, DeviceThread]
) -> Engine:
    """Make the engine of one model on the thread of its device.

    Args:
        config: the model's; all that share ``devices`` have the same ``threads``.
        metrics: where it counts.
        devices: kind of device -> the thread that the engines there share; one that is missing is
            added.
    """
    kind = device_kind(config.device)
    if kind not in devices:
        devices[kind] = DeviceThread(threads=config.threads)
    return Engine(config, metrics=metrics, device=devices[kind])
