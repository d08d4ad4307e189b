"""How rows become the tensors of a bucket, and its outputs become rows again."""

from shapeserve.layout.padded import PaddedLayout, RowArrays

__all__ = ["PaddedLayout", "RowArrays"]
