"""One vector a row from the token vectors of a ragged batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shapeserve.ops.ragged import row_bounds

# As shapeserve.models.spec.POOLINGS; models may use this module, so this module not them.
MODES = ("mean", "cls", "lasttoken", "max")
# What the kernel's registers hold; embedding models reach 4096.
MAX_DIM = 8192


def segment_pool(hidden: Tensor, offsets: Tensor, mode: str, normalize: bool) -> Tensor:
    """Pool the tokens of every row, in fp32 whatever the dtype.

    Args:
        hidden: [T, D] float32, float16 or bfloat16.
        offsets: [R + 1] int32, where the rows lie (see :mod:`shapeserve.ops`).
        mode: ``mean``, ``max``, ``cls`` (first token) or ``lasttoken``.
        normalize: whether to divide by the length, as torch.nn.functional.normalize does.

    Returns:
        [R, D] float32; an empty row's vector is 0.

    Raises:
        ValueError: an unknown mode, shapes or dtypes that do not fit, or D above 8192 on a GPU.
    """
    if mode not in MODES:
        raise ValueError(f"unknown pooling {mode!r}; one of {', '.join(MODES)}")
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be [T, D], not {tuple(hidden.shape)}")
    if offsets.dim() != 1 or offsets.dtype != torch.int32:
        raise ValueError(f"offsets must be int32 [R + 1], not {offsets.dtype} {offsets.dim()}-D")
    if hidden.is_cuda and hidden.shape[1] > MAX_DIM:
        raise ValueError(f"vectors of {hidden.shape[1]} are wider than the kernel's {MAX_DIM}")
    vectors: Tensor = _segment_pool(hidden, offsets, mode, normalize)
    return vectors


@torch.library.custom_op("shapeserve::segment_pool", mutates_args=(), device_types="cpu")
def _segment_pool(hidden: Tensor, offsets: Tensor, mode: str, normalize: bool) -> Tensor:
    lengths = offsets[1:] - offsets[:-1]
    if hidden.shape[0] == 0:  # every row is empty, and there is no token to read instead
        return hidden.new_zeros((lengths.shape[0], hidden.shape[1]), dtype=torch.float32)
    if mode == "mean":
        vectors = _by_row(hidden, offsets, 0.0, "sum") / lengths.clamp(min=1).unsqueeze(1)
    elif mode == "max":
        vectors = _by_row(hidden, offsets, float("-inf"), "amax")
    else:
        at = offsets[:-1] if mode == "cls" else offsets[1:] - 1
        # An empty row's index may be -1 or T: it reads some other token, and is overwritten.
        vectors = hidden[at.clamp(0, hidden.shape[0] - 1)].float()
    vectors = torch.where((lengths > 0).unsqueeze(1), vectors, 0.0)
    return functional.normalize(vectors, dim=-1) if normalize else vectors


def _by_row(hidden: Tensor, offsets: Tensor, start: float, reduce: str) -> Tensor:
    """Reduce the tokens of every row from ``start``; filler goes into a row that is cut off."""
    rows = row_bounds(offsets, hidden.shape[0])[0]
    index = rows.long().unsqueeze(1).expand(-1, hidden.shape[1])
    result = torch.full((offsets.shape[0], hidden.shape[1]), start)
    return result.scatter_reduce_(0, index, hidden.float(), reduce)[:-1]


@_segment_pool.register_fake
def _(hidden: Tensor, offsets: Tensor, mode: str, normalize: bool) -> Tensor:
    return hidden.new_empty((offsets.shape[0] - 1, hidden.shape[1]), dtype=torch.float32)


@_segment_pool.register_kernel("cuda")
def _(hidden: Tensor, offsets: Tensor, mode: str, normalize: bool) -> Tensor:
    from shapeserve.ops.pool_kernel import launch

    with torch.cuda.device(hidden.device):
        return launch(hidden, offsets, mode, normalize)
