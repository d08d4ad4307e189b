"""Operators for ragged batches: rows of different lengths without padding between them.

Each is a ``torch.library`` operator of the namespace ``shapeserve`` (row_bounds is plain torch):
plain torch on the CPU, a Triton kernel on CUDA, shapes known to ``torch.compile`` without running
it. None synchronises, none allocates on the host, and no shape depends on data, so that all can be
captured in CUDA graphs. They are for inference: no gradient is defined.

Ragged layout, everywhere here: rows lie one after the other in one token axis of a fixed capacity.
``offsets`` int32 [R + 1] says where: row r is [offsets[r], offsets[r + 1]), offsets[0] is 0. A
batch of fewer than R rows repeats its last offset, which makes empty rows. Tokens at and beyond
offsets[R] are filler: whatever they hold, NaN too, changes no row.

Triton is imported at the first call with a CUDA tensor, so that the CPU needs none.
"""

from shapeserve.ops.attention import packed_attention
from shapeserve.ops.linear import linear_gelu
from shapeserve.ops.pool import segment_pool
from shapeserve.ops.ragged import pad_ragged, row_bounds, unpad_ragged

__all__ = [
    "linear_gelu",
    "packed_attention",
    "pad_ragged",
    "row_bounds",
    "segment_pool",
    "unpad_ragged",
]
