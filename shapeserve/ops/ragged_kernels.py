"""The Triton kernels of row_bounds, pad_ragged and unpad_ragged."""
# mypy: ignore-errors
# Triton is not installed where only the CPU is used, and its language is not Python's to type.

import torch
import triton
import triton.language as tl

_BOUNDS_BLOCK = 128  # tokens of one program: one for each thread of four warps
_PAD_BLOCK = 128  # ids of one program: one for each thread of four warps
_UNPAD_ELEMENTS = 4096  # elements of one program: 32 for each thread of four warps
_UNPAD_FEATURES = 1024  # and at most so many of one token,
_UNPAD_TOKENS = 256  # and so many tokens, each of which costs a search for its row


def launch_bounds(
    offsets: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the kernel; the arguments are those of ``row_bounds``."""
    bounds = tuple(offsets.new_empty(tokens) for _ in range(4))
    rows = offsets.shape[0] - 1
    if tokens > 0:
        row_bounds_kernel[(triton.cdiv(tokens, _BOUNDS_BLOCK),)](
            offsets.contiguous(), *bounds, tokens, rows, rows.bit_length(), block=_BOUNDS_BLOCK
        )
    return bounds


def launch_pad(
    tokens: torch.Tensor, offsets: torch.Tensor, seq: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; the arguments are those of ``pad_ragged``."""
    rows = offsets.shape[0] - 1
    ids = torch.empty((rows, seq), dtype=torch.int64, device=tokens.device)
    mask = torch.empty_like(ids)
    if ids.numel() > 0:
        pad_ragged_kernel[(rows, triton.cdiv(seq, _PAD_BLOCK))](
            tokens.contiguous(),
            offsets.contiguous(),
            ids,
            mask,
            tokens.shape[0],
            seq,
            pad,
            block=_PAD_BLOCK,
        )
    return ids, mask


def launch_unpad(padded: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Run the kernel; the arguments are those of ``unpad_ragged``."""
    if padded.dtype == torch.bool:
        return launch_unpad(padded.view(torch.uint8), offsets, total).view(torch.bool)
    out = torch.empty((total, *padded.shape[2:]), dtype=padded.dtype, device=padded.device)
    if out.numel() == 0:
        return out
    rows, seq = padded.shape[:2]
    features = out.numel() // total
    block_f = min(triton.next_power_of_2(features), _UNPAD_FEATURES)
    block_t = min(_UNPAD_ELEMENTS // block_f, _UNPAD_TOKENS)
    unpad_ragged_kernel[(triton.cdiv(total, block_t), triton.cdiv(features, block_f))](
        padded.contiguous(),
        offsets.contiguous(),
        out,
        total,
        rows,
        seq,
        rows.bit_length(),
        features,
        block_t=block_t,
        block_f=block_f,
    )
    return out


@triton.jit
def _row_of(t, offsets, rows, steps):
    """The number of rows that end at or before each token: bisection over the ends."""
    row = tl.zeros_like(t)
    above = row + rows
    for _ in range(steps):
        middle = (row + above) // 2
        open_ = row < above
        passed = open_ & (tl.load(offsets + 1 + middle, mask=open_, other=0) <= t)
        row = tl.where(passed, middle + 1, row)
        above = tl.where(open_ & (passed == 0), middle, above)
    return row


# Sizes that differ between buckets are not specialised: each would compile variants of its own.
@triton.jit(do_not_specialize=["tokens", "rows", "steps"])
def row_bounds_kernel(
    offsets, row_of, starts, ends, positions, tokens, rows, steps, block: tl.constexpr
):
    """Write the bounds of ``block`` tokens (program id: block)."""
    t = tl.program_id(0) * block + tl.arange(0, block)
    row = _row_of(t, offsets, rows, steps)
    inside = t < tokens
    real = inside & (row < rows)
    start = tl.load(offsets + row, mask=real, other=0)
    start = tl.where(real, start, t)
    end = tl.load(offsets + row + 1, mask=real, other=0)
    end = tl.where(real, tl.minimum(end, tokens), t + 1)
    tl.store(row_of + t, row, mask=inside)
    tl.store(starts + t, start, mask=inside)
    tl.store(ends + t, end, mask=inside)
    tl.store(positions + t, t - start, mask=inside)


@triton.jit(do_not_specialize=["capacity", "seq", "pad"])
def pad_ragged_kernel(tokens, offsets, ids, mask, capacity, seq, pad, block: tl.constexpr):
    """Write ``block`` ids and mask elements of one row (program ids: row, block)."""
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    low = tl.maximum(tl.load(offsets + row), 0)
    high = tl.minimum(tl.load(offsets + row + 1), capacity)  # no access beyond the tensor
    real = column < high - low
    values = tl.load(tokens + low + column, mask=real, other=0).to(tl.int64)
    to = row.to(tl.int64) * seq + column
    tl.store(ids + to, tl.where(real, values, pad), mask=column < seq)
    valid = real | ((high <= low) & (column == 0))
    tl.store(mask + to, valid.to(tl.int64), mask=column < seq)


@triton.jit(do_not_specialize=["total", "rows", "seq", "steps"])
def unpad_ragged_kernel(
    padded,
    offsets,
    out,
    total,
    rows,
    seq,
    steps,
    features,
    block_t: tl.constexpr,
    block_f: tl.constexpr,
):
    """Write ``block_t`` tokens, or a part of their features (program ids: tokens, features)."""
    t = tl.program_id(0) * block_t + tl.arange(0, block_t)
    f = tl.program_id(1) * block_f + tl.arange(0, block_f)
    row = _row_of(t, offsets, rows, steps)
    real = (row < rows) & (t < total)
    position = t - tl.load(offsets + row, mask=real, other=0)
    real = real & (position < seq)
    at = (row.to(tl.int64) * seq + position) * features
    values = tl.load(
        padded + at[:, None] + f[None, :], mask=real[:, None] & (f < features)[None, :], other=0
    )
    to = t.to(tl.int64) * features
    tl.store(
        out + to[:, None] + f[None, :], values, mask=(t < total)[:, None] & (f < features)[None, :]
    )
