"""The Triton kernel of packed_attention."""
# mypy: ignore-errors
# Triton is not installed where only the CPU is used, and its language is not Python's to type.

from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl

# exp(x) is exp2(x * log2(e)): the hardware has exp2.
_LOG2_E = log2(e)


@dataclass(frozen=True)
class AttentionConfig:
    """How the work is cut.

    Attributes:
        block_m: tokens (queries) of one program.
        block_n: keys of one step.
        num_warps: warps of one program.
        num_stages: steps of loads in flight.
        max_registers: limit of one thread's registers, so that more programs share a
            multiprocessor; None leaves it to the compiler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# Head dim, as a power of two -> what serves half-precision inputs. Of a dozen each, measured on an
# H200 with 2,048 and 16,384 tokens of log-normal lengths (mean 79) by benchmarks/ops.py; that of
# 16 is carried over, that of 128 from the compiler's reports.
CONFIGS: dict[int, AttentionConfig] = {
    16: AttentionConfig(64, 32, 4, 3),
    32: AttentionConfig(64, 32, 4, 3),
    64: AttentionConfig(64, 32, 4, 3),
    128: AttentionConfig(128, 64, 8, 2),
}
# float32 takes twice the registers and shared memory, and three products for one (tf32x3).
FLOAT32_CONFIG = AttentionConfig(32, 32, 4, 1)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Run the kernel: the arguments of ``packed_attention``, and how to cut the work.

    Without a config, that of the table is taken.
    """
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    block_d = max(16, triton.next_power_of_2(dim))  # 16: the least that a matrix unit takes
    if config is None:
        config = FLOAT32_CONFIG if q.dtype == torch.float32 else CONFIGS[block_d]
    packed_attention_kernel[(triton.cdiv(tokens, config.block_m), heads)](
        q,
        k,
        v,
        out,
        starts.contiguous(),
        ends.contiguous(),
        tokens,
        scale * _LOG2_E,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads * dim,
        dim=dim,
        block_d=block_d,
        block_m=config.block_m,
        block_n=config.block_n,
        # "ieee" would run float32 on the plain units; tf32x3 keeps its precision on the matrix
        # units. Half-precision inputs are not touched by it.
        precision="tf32x3",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return out


# The number of tokens is not specialised: buckets would otherwise compile a variant each for
# sizes that 16 divides and for others.
@triton.jit(do_not_specialize=["tokens"])
def packed_attention_kernel(
    q,
    k,
    v,
    out,
    starts,
    ends,
    tokens,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    dim: tl.constexpr,
    block_d: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    precision: tl.constexpr,
):
    """Attend for ``block_m`` consecutive tokens of one head (program ids: tile, head).

    The program walks over the rows that its tokens belong to. A row longer than ``block_n`` is a
    loop over its keys alone. Shorter rows that fit into ``block_n`` keys together are one step
    under a mask, because a step for each would leave the matrix units nearly empty.
    """
    first = tl.program_id(0) * block_m
    head = tl.program_id(1).to(tl.int64)
    stop = tl.minimum(first + block_m, tokens)
    m = first + tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    real_d = d < dim
    inside = m < stop
    row_start = tl.load(starts + m, mask=inside, other=0)
    row_end = tl.load(ends + m, mask=inside, other=0)

    # Tokens times strides pass 2**31 before memory ends; inside a row, 32 bits are enough.
    q += first.to(tl.int64) * q_token + head * q_head
    out += first.to(tl.int64) * out_token + head * dim
    k += head * k_head
    v += head * v_head
    local = tl.arange(0, block_m)
    queries = tl.load(
        q + local[:, None] * q_token + d[None, :],
        mask=inside[:, None] & real_d[None, :],
        other=0.0,
    )

    token = first
    while token < stop:
        # Clamped, so that wrong bounds can give wrong answers but no access out of the tensors.
        low = tl.maximum(tl.load(starts + token), 0)
        high = tl.minimum(tl.load(ends + token), tokens)
        keys = k + low.to(tl.int64) * k_token
        values = v + low.to(tl.int64) * v_token
        if high - low > block_n:
            acc, total = _one_row(
                queries,
                keys,
                values,
                high - low,
                scale,
                k_token,
                v_token,
                dim,
                block_d,
                block_m,
                block_n,
                precision,
            )
            mine = (m >= token) & (m < high)
        else:
            acc, total = _short_rows(
                queries,
                keys,
                values,
                row_start - low,
                row_end - low,
                tokens - low,
                scale,
                k_token,
                v_token,
                dim,
                block_d,
                block_n,
                precision,
            )
            mine = (m >= token) & (row_end <= low + block_n)
            high = tl.max(tl.where(mine & inside, row_end, high), 0)
        tl.store(
            out + local[:, None] * out_token + d[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(mine & inside)[:, None] & real_d[None, :],
        )
        token = tl.maximum(high, token + 1)  # forward whatever the bounds say: no endless loop


@triton.jit
def _one_row(
    queries,
    keys,
    values,
    length,
    scale,
    k_token,
    v_token,
    dim: tl.constexpr,
    block_d: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    precision: tl.constexpr,
):
    """Online softmax over the keys of one row; returns the sums, weighted and of the weights."""
    d = tl.arange(0, block_d)
    acc = tl.zeros([block_m, block_d], tl.float32)
    total = tl.zeros([block_m], tl.float32)
    peak = tl.full([block_m], float("-inf"), tl.float32)
    for start in range(0, length, block_n):
        n = start + tl.arange(0, block_n)
        real = n < length  # beyond it lies another row
        key = tl.load(
            keys + n[None, :] * k_token + d[:, None],
            mask=real[None, :] & (d < dim)[:, None],
            other=0.0,
        )
        value = tl.load(
            values + n[:, None] * v_token + d[None, :],
            mask=real[:, None] & (d < dim)[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, key, input_precision=precision)
        scores = tl.where(real[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=precision)
        peak = new_peak
    return acc, total


@triton.jit
def _short_rows(
    queries,
    keys,
    values,
    row_start,
    row_end,
    available,
    scale,
    k_token,
    v_token,
    dim: tl.constexpr,
    block_d: tl.constexpr,
    block_n: tl.constexpr,
    precision: tl.constexpr,
):
    """Softmax over one block of keys of several rows, each query within its own row.

    A weight of 0 does not keep a neighbour's NaN or infinity out of a product, so such values are
    replaced by 0, and the scores of their tokens by NaN: only their own row becomes NaN.
    """
    d = tl.arange(0, block_d)
    n = tl.arange(0, block_n)
    held = n < available
    key = tl.load(
        keys + n[None, :] * k_token + d[:, None],
        mask=held[None, :] & (d < dim)[:, None],
        other=0.0,
    )
    value = tl.load(
        values + n[:, None] * v_token + d[None, :],
        mask=held[:, None] & (d < dim)[None, :],
        other=0.0,
    )
    finite = tl.abs(value.to(tl.float32)) < float("inf")
    poison = tl.where(tl.min(finite.to(tl.int32), 1) == 1, 0.0, float("nan"))
    value = tl.where(finite, value, tl.zeros_like(value))
    scores = tl.dot(queries, key, input_precision=precision)
    allowed = (n[None, :] >= row_start[:, None]) & (n[None, :] < row_end[:, None])
    scores = tl.where(allowed, scores * scale + poison[None, :], float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    acc = tl.dot(weights.to(value.dtype), value, input_precision=precision)
    return acc, tl.sum(weights, 1)
