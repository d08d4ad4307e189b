"""Attention over rows that lie one after the other in one token axis."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# The kernel holds a whole head in registers; encoders have heads of 32, 64 or 128.
MAX_HEAD_DIM = 128


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, scale: float
) -> Tensor:
    """Attend in both directions, each token to the tokens of its own row.

    A row is as alone as in a batch of its own: no value of another row, and none of the filler,
    changes its answer, not even NaN or infinity.

    Args:
        q: [T, H, D] float32, float16 or bfloat16 of any strides, for example a view of a joined
            projection [T, 3 * H * D]. Where the last dim is not contiguous, it is copied first.
        k: like ``q``; its strides may differ.
        v: like ``q``; its strides may differ.
        starts: [T] int32: token t attends to the tokens j with starts[t] <= j < ends[t]. Neither
            vector decreases. A filler token is a row of its own (see :func:`row_bounds`).
        ends: [T] int32.
        scale: factor of the scores, above 0; usually D ** -0.5.

    Returns:
        [T, H, D] contiguous, of the dtype of ``q``; a filler token's is its ``v``.

    Raises:
        ValueError: shapes or dtypes do not fit together, the scale is not positive, or D is above
            128 on a GPU.
    """
    if not (q.dim() == 3 and q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype):
        raise ValueError(
            f"q, k and v must have one shape [T, H, D] and one dtype, not {tuple(q.shape)} "
            f"{q.dtype}, {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}"
        )
    if not (
        starts.shape == ends.shape == q.shape[:1] and starts.dtype == ends.dtype == torch.int32
    ):
        raise ValueError(
            f"starts and ends must be int32 [{q.shape[0]}], not {starts.dtype} "
            f"{tuple(starts.shape)} and {ends.dtype} {tuple(ends.shape)}"
        )
    if scale <= 0:
        raise ValueError(f"the scale must be above 0, not {scale}")
    if q.shape[2] > MAX_HEAD_DIM and q.is_cuda:
        raise ValueError(f"heads of {q.shape[2]} are wider than the kernel's {MAX_HEAD_DIM}")
    attended: Tensor = _packed_attention(q, k, v, starts, ends, scale)
    return attended


@torch.library.custom_op("shapeserve::packed_attention", mutates_args=(), device_types="cpu")
def _packed_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, scale: float
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out.copy_(v)  # already the answer of a row of one token, so of all filler
    index = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    firsts = (starts == index).nonzero().squeeze(1)
    for first, end in zip(firsts.tolist(), ends[firsts].tolist(), strict=True):
        if end - first > 1:
            # [1, H, length, D]: a row is a batch of its own, without mask or padding.
            query, key, value = (x[first:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            attended = functional.scaled_dot_product_attention(query, key, value, scale=scale)
            out[first:end] = attended.squeeze(0).transpose(0, 1)
    return out


@_packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, scale: float) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@_packed_attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, scale: float) -> Tensor:
    from shapeserve.ops.attention_kernel import launch

    with torch.cuda.device(q.device):
        return launch(q, k, v, starts, ends, scale)
