"""The engine: one model served through its buckets, without Ray; several may share a device."""

from shapeserve.engine.build import device_kind
from shapeserve.engine.device import DeviceThread
from shapeserve.engine.engine import Engine
from shapeserve.engine.rows import PreparedSample, Result, Sample

__all__ = ["DeviceThread", "Engine", "PreparedSample", "Result", "Sample", "device_kind"]
