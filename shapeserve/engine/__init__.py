"""The engine: one model served through its buckets, without Ray."""

from shapeserve.engine.engine import Engine
from shapeserve.engine.rows import PreparedSample, Result, Sample

__all__ = ["Engine", "PreparedSample", "Result", "Sample"]
