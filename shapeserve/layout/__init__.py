"""How rows become the tensors of a bucket, and its outputs become rows again."""

from shapeserve.buckets import MIN_ROW_TOKENS
from shapeserve.layout.base import Forward, Layout, Reading, RowOutputs
from shapeserve.layout.packed import PackedLayout, max_rows
from shapeserve.layout.padded import PaddedLayout, positions
from shapeserve.layout.ragged import RaggedLayout
from shapeserve.layout.rows import RowArrays
from shapeserve.layout.tokens import takes_tokens

__all__ = [
    "MIN_ROW_TOKENS",
    "Forward",
    "Layout",
    "PackedLayout",
    "PaddedLayout",
    "RaggedLayout",
    "Reading",
    "RowArrays",
    "RowOutputs",
    "max_rows",
    "positions",
    "takes_tokens",
]
