"""The Triton kernel of segment_pool."""
# mypy: ignore-errors
# Triton is not installed where only the CPU is used, and its language is not Python's to type.

import torch
import triton
import triton.language as tl

# Elements that one step of a program loads: 32 for each of its 256 threads, so that enough bytes
# are on their way to hide the latency of the memory, and the sums still fit into registers.
_STEP = 8192
_WARPS = 8
_MAX_TOKENS_OF_A_STEP = 64  # rows are short: a higher step would be mostly masked
_EPS = 1e-12  # the default of torch.nn.functional.normalize


def launch(hidden: torch.Tensor, offsets: torch.Tensor, mode: str, normalize: bool) -> torch.Tensor:
    """Run the kernel; the arguments are those of ``segment_pool``."""
    rows, dim = offsets.shape[0] - 1, hidden.shape[1]
    out = torch.empty((rows, dim), dtype=torch.float32, device=hidden.device)
    if out.numel() == 0:
        return out
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    block_d = triton.next_power_of_2(dim)
    segment_pool_kernel[(rows,)](
        hidden,
        offsets.contiguous(),
        out,
        hidden.shape[0],
        hidden.stride(0),
        _EPS,
        dim=dim,
        block_d=block_d,
        block_t=min(max(1, _STEP // block_d), _MAX_TOKENS_OF_A_STEP),
        mode=mode,
        normalize=normalize,
        num_warps=_WARPS,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def segment_pool_kernel(
    hidden,
    offsets,
    out,
    tokens,
    hidden_token,
    eps,
    dim: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
    mode: tl.constexpr,
    normalize: tl.constexpr,
):
    """Pool one row (program id: row)."""
    row = tl.program_id(0)
    low = tl.maximum(tl.load(offsets + row), 0)
    high = tl.minimum(tl.load(offsets + row + 1), tokens)  # no access beyond the tensor
    length = high - low
    d = tl.arange(0, block_d)
    real_d = d < dim
    held = d < tl.where(length > 0, dim, 0)  # nothing, for a row without tokens
    hidden += low.to(tl.int64) * hidden_token
    if mode == "mean":
        vector = _sum(hidden, length, hidden_token, dim, block_d, block_t)
        vector = vector / tl.maximum(length, 1).to(tl.float32)
    elif mode == "max":
        vector = _max(hidden, length, hidden_token, dim, block_d, block_t)
        vector = tl.where(held, vector, 0.0)
    else:
        at = 0 if mode == "cls" else tl.maximum(length - 1, 0)
        vector = tl.load(hidden + at * hidden_token + d, mask=held, other=0.0)
        vector = vector.to(tl.float32)
    if normalize:
        norm = tl.sqrt_rn(tl.sum(vector * vector, 0))
        # NaN must come through: a finite vector would hide a broken row.
        vector = vector / tl.maximum(norm, eps, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row.to(tl.int64) * dim + d, vector, mask=real_d)


@triton.jit
def _sum(
    hidden,
    length,
    hidden_token,
    dim: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
):
    """Return the sum of the vectors of one row, 0 beyond ``dim``."""
    t = tl.arange(0, block_t)
    d = tl.arange(0, block_d)
    acc = tl.zeros([block_t, block_d], tl.float32)
    for start in range(0, length, block_t):
        acc += tl.load(
            hidden + (start + t)[:, None] * hidden_token + d[None, :],
            mask=(start + t < length)[:, None] & (d < dim)[None, :],
            other=0.0,
        ).to(tl.float32)
    return tl.sum(acc, 0)


@triton.jit
def _max(
    hidden,
    length,
    hidden_token,
    dim: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
):
    """Return the largest value of each feature of one row; NaN where one is NaN, as in torch."""
    t = tl.arange(0, block_t)
    d = tl.arange(0, block_d)
    acc = tl.full([block_t, block_d], float("-inf"), tl.float32)
    for start in range(0, length, block_t):
        values = tl.load(
            hidden + (start + t)[:, None] * hidden_token + d[None, :],
            mask=(start + t < length)[:, None] & (d < dim)[None, :],
            other=float("-inf"),
        ).to(tl.float32)
        acc = tl.maximum(acc, values, propagate_nan=tl.PropagateNan.ALL)
    broken = tl.max((acc != acc).to(tl.int32), 0)  # a reduction ignores NaN
    return tl.where(broken > 0, float("nan"), tl.max(acc, 0))
