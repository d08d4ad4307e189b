"""The engine: one model served through its buckets, without Ray; several may share a device."""

from shapeserve.engine.device import DeviceThread
from shapeserve.engine.engine import Engine
from shapeserve.engine.rows import PreparedSample, RecentFallback, Result, Run, Sample
from shapeserve.engine.shared import shared_engine
from shapeserve.models.spec import TextPair

__all__ = [
    "DeviceThread",
    "Engine",
    "PreparedSample",
    "RecentFallback",
    "Result",
    "Run",
    "Sample",
    "TextPair",
    "shared_engine",
]
