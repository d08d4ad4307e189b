"""The engine: one model served through its buckets, without Ray."""

from shapeserve.engine.engine import Engine
from shapeserve.engine.rows import PreparedSample, Result, Sample
from shapeserve.models.spec import TextPair

__all__ = ["Engine", "PreparedSample", "Result", "Sample", "TextPair"]
