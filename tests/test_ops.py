"""The operators against loops over rows: on the CPU, on a GPU, and in Triton's interpreter.

A test with a ``backend`` is written once and runs wherever its operator can. The interpreter runs
the kernels' own code on CPU tensors; Triton decides at import, by an environment variable, so one
test starts this file again in a process of its own.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from shapeserve import ops
from shapeserve.models.pooling import POOL
from shapeserve.models.spec import POOLINGS
from shapeserve.ops import pool
from shapeserve.ops.attention import _packed_attention
from shapeserve.ops.linear import _linear_gelu
from shapeserve.ops.pool import _segment_pool
from shapeserve.ops.ragged import _pad_ragged, _row_bounds, _unpad_ragged

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BACKENDS = ["interpreted"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=ON_GPU)]
EXAMPLES = 6 if INTERPRETED else 40  # the interpreter takes up to a second for one

each_backend = pytest.mark.parametrize("backend", BACKENDS)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

# Relative error of the whole tensor against float64 on the same (rounded) inputs.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = list(TOLERANCE)
# The interpreter multiplies the bits of bfloat16 as if they were integers.
DOT_DTYPES = [d for d in DTYPES if not (INTERPRETED and d is torch.bfloat16)]

if INTERPRETED:
    # triton 3.6 calls int() of an array of one element, which numpy refuses since 2.4.
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        _patch_lang_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_lang_tensor

LAUNCHERS = {
    "packed_attention": ("attention_kernel", "launch"),
    "segment_pool": ("pool_kernel", "launch"),
    "row_bounds": ("ragged_kernels", "launch_bounds"),
    "pad_ragged": ("ragged_kernels", "launch_pad"),
    "unpad_ragged": ("ragged_kernels", "launch_unpad"),
}


def launcher(name: str) -> Callable[..., Any]:
    module, function = LAUNCHERS[name]
    return getattr(import_module(f"shapeserve.ops.{module}"), function)


def to(device: str, value: Any) -> Any:
    """Move tensors; a move keeps their strides, so views are moved as what they view."""
    if not isinstance(value, Tensor) or value.device.type == device:
        return value
    base = value if value._base is None else value._base
    return base.to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def run(backend: str, name: str, *arguments: Any, **options: Any) -> Any:
    """Call an operator (or, with options, its launcher) on CPU tensors; return CPU tensors."""
    if backend == "interpreted" or options:
        device = "cuda" if backend == "cuda" else "cpu"
        call = launcher(name)
    else:
        device, call = backend, getattr(ops, name)
    result = call(*(to(device, a) for a in arguments), **options)
    return tuple(x.cpu() for x in result) if isinstance(result, tuple) else result.cpu()


def offsets_of(lengths: list[int], rows: int | None = None) -> Tensor:
    """Offsets of rows of these lengths, repeated up to ``rows`` rows."""
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ends += [ends[-1]] * ((rows or len(lengths)) - len(lengths))
    return torch.tensor(ends, dtype=torch.int32)


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(offsets.tolist()))


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float(error)  # NaN compares as false, so it passes no limit


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def random_qkv(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Three views of one joined projection."""
    joined = random(tokens, 3 * heads * dim, dtype=dtype)
    return [x.view(tokens, heads, dim) for x in joined.split(heads * dim, dim=1)]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """Softmax of each row alone, in float64; filler copies v."""
    out = v.double().clone()
    for a, b in spans(offsets):
        queries, keys, values = (x[a:b].double().transpose(0, 1) for x in (q, k, v))
        weights = torch.softmax(queries @ keys.transpose(1, 2) * scale, dim=-1)
        out[a:b] = (weights @ values).transpose(0, 1)
    return out


def check_attention(backend: str, qkv: list[Tensor], offsets: Tensor, **options: Any) -> None:
    q, k, v = qkv
    scale = q.shape[2] ** -0.5
    _, starts, ends, _ = ops.row_bounds(offsets, q.shape[0])
    got = run(backend, "packed_attention", q, k, v, starts, ends, scale, **options)
    assert got.is_contiguous()
    assert got.dtype == q.dtype
    expected = attention_reference(q, k, v, offsets, scale)
    assert relative_error(got, expected) < TOLERANCE[q.dtype]


# --- Where the rows lie ---------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 9), max_size=8),
    empty=st.integers(0, 3),
    tokens=st.integers(0, 60),
)
def test_row_bounds_say_for_every_token_what_a_loop_says(
    lengths: list[int], empty: int, tokens: int
) -> None:
    offsets = offsets_of(lengths, len(lengths) + empty)
    expected = [(len(lengths) + empty, t, t + 1, 0) for t in range(tokens)]
    for row, (a, b) in enumerate(spans(offsets)):
        for t in range(a, min(b, tokens)):
            expected[t] = (row, a, min(b, tokens), t - a)
    bounds = ops.row_bounds(offsets, tokens)
    assert {x.dtype for x in bounds} == {torch.int32}
    assert list(zip(*(x.tolist() for x in bounds), strict=True)) == expected


@each_backend
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_row_bounds_are_the_same_everywhere(backend: str, tokens: int) -> None:
    offsets = offsets_of([5, 0, 17, 64, 1, 0], rows=11)
    expected = torch.stack(ops.row_bounds(offsets, tokens))
    assert torch.equal(torch.stack(run(backend, "row_bounds", offsets, tokens)), expected)


# --- Attention ------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("dim", [32, 64, 128, 20, 1])
@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
def test_attention_is_that_of_each_row_alone(backend: str, dim: int, dtype: torch.dtype) -> None:
    # Short rows together, one of just a block, one longer, one of many blocks, one token; filler.
    offsets = offsets_of([5, 17, 64, 65, 1, 1, 150, 3], rows=10)
    check_attention(backend, random_qkv(310, 2, dim, dtype), offsets)


@each_backend
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_attention_of_any_rows(backend: str, data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.integers(0, 20) | st.sampled_from([31, 32, 33, 63, 64, 65, 130]), max_size=12)
    )
    tokens = sum(lengths) + data.draw(st.integers(0, 70))
    heads = data.draw(st.integers(1, 3))
    check_attention(backend, random_qkv(tokens, heads, 32, torch.float32), offsets_of(lengths))


@each_backend
def test_attention_takes_any_strides(backend: str) -> None:
    offsets = offsets_of([40, 7])
    by_head = [random(1, 2, 50, 32, seed=i)[0].transpose(0, 1) for i in range(3)]
    check_attention(backend, by_head, offsets)
    apart = [by_head[0], by_head[1].contiguous(), random(50, 2, 40, seed=3)[:, :, 3:35]]
    check_attention(backend, apart, offsets)
    check_attention(backend, [random(50, 32, 2, seed=i).transpose(1, 2) for i in range(3)], offsets)


@each_backend
@pytest.mark.parametrize("what", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_i6_a_broken_row_breaks_no_neighbour(backend: str, what: str, poison: float) -> None:
    lengths = [9, 6, 70, 80, 5]  # between short ones, and between long ones
    offsets = offsets_of(lengths)
    _, starts, ends, _ = ops.row_bounds(offsets, 190)
    q, k, v = (x.contiguous() for x in random_qkv(190, 1, 32, torch.float16))
    clean = run(backend, "packed_attention", q, k, v, starts, ends, 0.2)
    for row in (1, 2):
        broken = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        a, b = spans(offsets)[row]
        for name in what:
            broken[name][a + 2, :, 3] = poison
        got = run(backend, "packed_attention", *broken.values(), starts, ends, 0.2)
        assert torch.equal(got[:a], clean[:a])
        assert torch.equal(got[b:], clean[b:])
        # One infinite key can just be unattended, and torch's CPU kernel makes 0 of a NaN query.
        if "v" in what or (what == "k" and math.isnan(poison)):
            assert not got[a:b].isfinite().all(dim=-1).any()


@each_backend
@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
def test_i4_poisoned_filler_changes_no_row(backend: str, dtype: torch.dtype) -> None:
    offsets = offsets_of([30, 2, 75], rows=6)
    _, starts, ends, _ = ops.row_bounds(offsets, 200)
    qkv = [x.contiguous() for x in random_qkv(200, 2, 64, dtype)]
    clean = run(backend, "packed_attention", *qkv, starts, ends, 0.125)
    for x in qkv:
        x[107:] = math.nan
    poisoned = run(backend, "packed_attention", *qkv, starts, ends, 0.125)
    assert torch.equal(clean[:107], poisoned[:107])


@each_backend
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_attention_of_filler_alone_copies_v(backend: str, tokens: int) -> None:
    q, k, v = random_qkv(tokens, 2, 32, torch.float16)
    _, starts, ends, _ = ops.row_bounds(offsets_of([], rows=4), tokens)
    assert torch.equal(run(backend, "packed_attention", q, k, v, starts, ends, 1.0), v)


@each_backend
def test_attention_survives_large_scores(backend: str) -> None:
    q, k, v = (x * 20 for x in random_qkv(90, 1, 32, torch.float16))  # exp(400) has no float32
    check_attention(backend, [q, k, v], offsets_of([10, 80]))


@each_backend
def test_attention_with_senseless_bounds_ends(backend: str) -> None:
    q, k, v = random_qkv(40, 1, 32, torch.float32)
    for low, high in ((0, 0), (-5, 1000), (30, 10)):
        starts = torch.full((40,), low, dtype=torch.int32)
        ends = torch.full((40,), high, dtype=torch.int32)
        if backend == "cpu" and low < 0:
            continue  # there is no row to begin
        run(backend, "packed_attention", q, k, v, starts, ends, 1.0)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no kernel runs here")
@pytest.mark.parametrize("backend", ["interpreted"] if INTERPRETED else BACKENDS[1:])
@pytest.mark.parametrize("blocks", [(16, 16), (32, 64), (64, 32), (128, 64), (64, 128)])
def test_attention_is_the_same_in_other_blocks(backend: str, blocks: tuple[int, int]) -> None:
    from shapeserve.ops.attention_kernel import CONFIGS

    config = replace(CONFIGS[64], block_m=blocks[0], block_n=blocks[1])
    qkv = random_qkv(250, 2, 64, torch.float16)
    check_attention(backend, qkv, offsets_of([100, 3, 20, 16, 1, 70]), config=config)


def test_attention_names_what_does_not_fit() -> None:
    q, k, v = random_qkv(8, 2, 32, torch.float32)
    _, starts, ends, _ = ops.row_bounds(offsets_of([8]), 8)
    with pytest.raises(ValueError, match="one shape"):
        ops.packed_attention(q, k[:4], v, starts, ends, 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        ops.packed_attention(q, k, v.half(), starts, ends, 1.0)
    with pytest.raises(ValueError, match=r"int32 \[8\]"):
        ops.packed_attention(q, k, v, starts.long(), ends, 1.0)
    with pytest.raises(ValueError, match=r"int32 \[8\]"):
        ops.packed_attention(q, k, v, starts, ends[:3], 1.0)
    with pytest.raises(ValueError, match="above 0"):
        ops.packed_attention(q, k, v, starts, ends, 0.0)


# --- Pooling --------------------------------------------------------------------------------------


def pool_reference(hidden: Tensor, offsets: Tensor, mode: str, normalize: bool) -> Tensor:
    """The padded pooling of each row alone; 0 for an empty row."""
    vectors = torch.zeros(offsets.shape[0] - 1, hidden.shape[1])
    for row, (a, b) in enumerate(spans(offsets)):
        if b > a:
            vectors[row] = POOL[mode](hidden[None, a:b], torch.ones(1, b - a, dtype=torch.int64))[0]
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def test_the_modes_are_those_of_the_padded_poolings() -> None:
    assert pool.MODES == POOLINGS


@each_backend
@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(100, torch.bfloat16), (20, torch.float32), (1, torch.float16)]
)
def test_pooling_is_the_padded_one_of_each_row(
    backend: str, mode: str, normalize: bool, dim: int, dtype: torch.dtype
) -> None:
    hidden = random(130, dim, dtype=dtype)
    hidden[101:] = math.nan  # filler
    offsets = offsets_of([3, 0, 70, 1, 27], rows=7)
    got = run(backend, "segment_pool", hidden, offsets, mode, normalize)
    assert got.dtype == torch.float32
    expected = pool_reference(hidden, offsets, mode, normalize)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
    assert not got[1].any()
    assert not got[5:].any()


@each_backend
@given(lengths=st.lists(st.integers(0, 12), max_size=6), filler=st.integers(0, 4))
@settings(max_examples=EXAMPLES)
def test_pooling_of_any_rows(backend: str, lengths: list[int], filler: int) -> None:
    offsets = offsets_of(lengths)
    hidden = random(sum(lengths) + filler, 8)
    for mode in POOLINGS:
        got = run(backend, "segment_pool", hidden, offsets, mode, True)
        expected = pool_reference(hidden, offsets, mode, True)
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@each_backend
@pytest.mark.parametrize("mode", POOLINGS)
def test_a_broken_token_shows_in_its_own_vector_only(backend: str, mode: str) -> None:
    hidden = random(6, 8)
    hidden[2:4, 3] = math.nan
    offsets = offsets_of([2, 2, 2])
    plain = run(backend, "segment_pool", hidden, offsets, mode, False)
    assert plain.isnan().nonzero().tolist() == [[1, 3]]
    normal = run(backend, "segment_pool", hidden, offsets, mode, True)
    assert normal.isnan().any(dim=1).tolist() == [False, True, False]
    assert normal[1].isnan().all()


@each_backend
def test_pooling_takes_any_strides(backend: str) -> None:
    offsets = offsets_of([12, 8])
    for hidden in (random(20, 48)[:, 8:40], random(32, 20).T):
        got = run(backend, "segment_pool", hidden, offsets, "mean", False)
        torch.testing.assert_close(got, pool_reference(hidden, offsets, "mean", False))


def test_pooling_names_what_does_not_fit() -> None:
    offsets = offsets_of([2])
    with pytest.raises(ValueError, match="one of mean, cls, lasttoken, max"):
        ops.segment_pool(random(2, 4), offsets, "median", False)
    with pytest.raises(ValueError, match=r"\[T, D\]"):
        ops.segment_pool(random(1, 2, 4), offsets, "mean", False)
    with pytest.raises(ValueError, match="int32"):
        ops.segment_pool(random(2, 4), offsets.long(), "mean", False)


# --- Padded and back ------------------------------------------------------------------------------


def pad_reference(tokens: list[int], offsets: Tensor, seq: int, pad: int) -> tuple[Tensor, Tensor]:
    ids, mask = [], []
    for a, b in spans(offsets):
        row = tokens[a:b][:seq]
        ids.append(row + [pad] * (seq - len(row)))
        valid = max(len(row), 1)
        mask.append([1] * valid + [0] * (seq - valid))
    shape = (len(ids), seq)
    return torch.tensor(ids).reshape(shape).long(), torch.tensor(mask).reshape(shape).long()


@each_backend
@given(
    lengths=st.lists(st.integers(0, 20), max_size=7),
    seq=st.integers(1, 24),
    spare=st.integers(-12, 12),
    pad=st.sampled_from([0, 1, -7]),
)
@settings(max_examples=EXAMPLES)
def test_padding_is_what_a_loop_writes(
    backend: str, lengths: list[int], seq: int, spare: int, pad: int
) -> None:
    offsets = offsets_of(lengths)
    # With too few tokens (negative spare), rows end where the tokens do.
    tokens = list(range(100, 100 + max(sum(lengths) + spare, 0)))
    got = run(backend, "pad_ragged", torch.tensor(tokens, dtype=torch.int32), offsets, seq, pad)
    expected = pad_reference(tokens, offsets, seq, pad)
    for tensor, wanted in zip(got, expected, strict=True):
        assert torch.equal(tensor, wanted)


@each_backend
def test_padding_of_rows_wider_than_a_program(backend: str) -> None:
    tokens = torch.arange(1, 700, dtype=torch.int32)
    offsets = offsets_of([300, 0, 129], rows=4)
    got = run(backend, "pad_ragged", tokens, offsets, 300, 0)
    for tensor, wanted in zip(got, pad_reference(tokens.tolist(), offsets, 300, 0), strict=True):
        assert torch.equal(tensor, wanted)


@each_backend
@pytest.mark.parametrize("rest", [(), (5,), (2, 3), (2100,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_unpadding_joins_the_real_tokens(
    backend: str, rest: tuple[int, ...], dtype: torch.dtype
) -> None:
    padded = (random(5, 9, *rest) * 10).to(dtype)
    lengths = [4, 0, 9, 1, 0]
    got = run(backend, "unpad_ragged", padded, offsets_of(lengths), 20)
    real = [padded[row, :length] for row, length in enumerate(lengths)]
    expected = torch.cat([*real, torch.zeros(6, *rest, dtype=dtype)])
    assert got.dtype == dtype
    assert torch.equal(got, expected)


@each_backend
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9), spare=st.integers(-5, 5))
@settings(max_examples=EXAMPLES)
def test_unpadding_undoes_padding(backend: str, lengths: list[int], spare: int) -> None:
    offsets = offsets_of(lengths)
    tokens = torch.arange(1, sum(lengths) + 1, dtype=torch.int32)
    ids, _ = run(backend, "pad_ragged", tokens, offsets, 9, -1)
    total = max(sum(lengths) + spare, 0)
    expected = torch.nn.functional.pad(tokens.long(), (0, 5))[:total]
    assert torch.equal(run(backend, "unpad_ragged", ids, offsets, total), expected)


@each_backend
def test_unpadding_leaves_poison_behind_and_never_reads_beyond_a_row(backend: str) -> None:
    padded = random(2, 4, 3)
    padded[0, 2:] = math.nan
    got = run(backend, "unpad_ragged", padded, offsets_of([2, 6]), 10)  # the second is cut
    assert torch.equal(got, torch.cat([padded[0, :2], padded[1], torch.zeros(4, 3)]))


def test_ragged_operators_name_what_does_not_fit() -> None:
    offsets = offsets_of([2, 3])
    with pytest.raises(ValueError, match="tokens must be int32"):
        ops.pad_ragged(torch.arange(5), offsets, 4, 0)
    with pytest.raises(ValueError, match="offsets must be int32"):
        ops.pad_ragged(torch.arange(5, dtype=torch.int32), offsets.long(), 4, 0)
    with pytest.raises(ValueError, match="padded must be"):
        ops.unpad_ragged(random(4), offsets, 5)
    with pytest.raises(ValueError, match=r"must be \[4\] for 3 rows"):
        ops.unpad_ragged(random(3, 4), offsets, 5)


# --- Linear and GELU ------------------------------------------------------------------------------


DEVICES = [b for b in BACKENDS if b != "interpreted"]


def check_linear(device: str, x: Tensor, features: int) -> None:
    inner = x.shape[-1]
    weight = random(features, inner, dtype=x.dtype, seed=1) / inner**0.5
    bias = random(features, dtype=x.dtype, seed=2)
    got = run(device, "linear_gelu", x, weight, bias)
    assert got.is_contiguous()
    assert got.dtype == x.dtype
    product = x.double() @ weight.double().T + bias.double()
    expected = torch.nn.functional.gelu(product)
    assert relative_error(got, expected) < TOLERANCE[x.dtype]


@pytest.mark.skipif(INTERPRETED, reason="it has no Triton kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DOT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "features"), [((1, 64), 32), ((2, 70, 96), 200), ((140, 33), 7)], ids=str
)
def test_linear_gelu_is_gelu_of_linear(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], features: int
) -> None:
    check_linear(device, random(*shape, dtype=dtype), features)


@pytest.mark.skipif(INTERPRETED, reason="it has no Triton kernel")
@pytest.mark.parametrize("device", DEVICES)
def test_linear_gelu_of_nothing_and_of_strides(device: str) -> None:
    check_linear(device, random(64, 30, dtype=torch.float16).T, 16)
    weight, bias = random(16, 64, dtype=torch.float16), random(16, dtype=torch.float16)
    got = run(device, "linear_gelu", random(0, 64, dtype=torch.float16), weight, bias)
    assert got.shape == (0, 16)


def test_linear_gelu_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[\.\.\., K\]"):
        ops.linear_gelu(random(2, 8), random(4, 9), random(4))
    with pytest.raises(ValueError, match="one dtype"):
        ops.linear_gelu(random(2, 8), random(4, 8).half(), random(4))


# --- As torch operators ---------------------------------------------------------------------------


def samples(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name -> (operator, arguments)."""
    offsets = offsets_of([7, 3, 10], rows=5).to(device)
    _, starts, ends, _ = ops.row_bounds(offsets, 24)
    q, k, v = (x.to(device) for x in random_qkv(24, 2, 32, torch.float32))
    linear = (random(24, 64), random(32, 64), random(32))
    return {
        "packed_attention": (_packed_attention, (q, k, v, starts, ends, 0.2)),
        "segment_pool": (_segment_pool, (random(24, 16).to(device), offsets, "mean", True)),
        "row_bounds": (_row_bounds, (offsets, 24)),
        "pad_ragged": (
            _pad_ragged,
            (torch.arange(24, dtype=torch.int32, device=device), offsets, 12, 0),
        ),
        "unpad_ragged": (_unpad_ragged, (random(5, 12, 3).to(device), offsets, 24)),
        "linear_gelu": (_linear_gelu, tuple(x.half().to(device) for x in linear)),
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("name", [*LAUNCHERS, "linear_gelu"])
def test_torch_s_own_check_of_an_operator_passes(name: str, device: str) -> None:
    operator, arguments = samples(device)[name]
    assert f"shapeserve::{name}" in str(operator)
    torch.library.opcheck(operator, arguments)


def forward(tokens: Tensor, table: Tensor, offsets: Tensor, seq: int) -> tuple[Tensor, ...]:
    """Every operator, as a packed encoder would use them."""
    total = tokens.shape[0]
    _, starts, ends, positions = ops.row_bounds(offsets, total)
    hidden = table[tokens] + table[positions]  # [T, D]
    heads = hidden.view(total, 2, -1)
    hidden = ops.packed_attention(heads, heads, heads, starts, ends, 0.2).reshape(total, -1)
    hidden = ops.linear_gelu(hidden, table, table[:, 0].contiguous())
    ids, mask = ops.pad_ragged(tokens, offsets, seq, 0)
    again = ops.unpad_ragged(ids.unsqueeze(-1) * mask.unsqueeze(-1), offsets, total)
    return ops.segment_pool(hidden, offsets, "mean", True), ids, mask, again


def forward_inputs(
    lengths: list[int], rows: int, tokens: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(tokens))
    dtype = torch.float16 if device == "cuda" else torch.float32
    table = random(64, 64, dtype=dtype).to(device)
    return ids.int().to(device), table, offsets_of(lengths, rows).to(device)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=ON_GPU)],
)
def test_one_program_serves_all_sizes(device: str, backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    program = torch.compile(forward, backend=counter, dynamic=True, fullgraph=True)
    batches = [
        ([5, 30, 2], 4, 48, 32),
        ([9], 2, 16, 24),
        ([3] * 20, 33, 96, 8),
        ([60, 1], 7, 72, 96),
    ]
    with torch.no_grad():
        for lengths, rows, tokens, seq in batches:
            inputs = forward_inputs(lengths, rows, tokens, device)
            for got, expected in zip(program(*inputs, seq), forward(*inputs, seq), strict=True):
                torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    assert counter.frame_count == 1


@pytest.mark.gpu
@gpu
def test_a_captured_graph_follows_its_inputs() -> None:
    with torch.no_grad():
        inputs = forward_inputs([5, 30, 2], 12, 120, "cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                forward(*inputs, 64)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = forward(*inputs, 64)
        for lengths in ([64, 1, 50], [1] * 12, [], [10, 0, 64, 0, 7, 39]):
            fresh = forward_inputs(lengths, 12, 120, "cuda")
            fresh[0].random_(0, 64)
            for mine, new in zip(inputs, fresh, strict=True):
                mine.copy_(new)
            for output in outputs:
                output.fill_(-1)
            graph.replay()
            torch.cuda.synchronize()
            for got, expected in zip(outputs, forward(*fresh, 64), strict=True):
                assert torch.equal(got, expected)


@pytest.mark.gpu
@gpu
def test_heads_and_vectors_too_wide_for_the_kernels_are_refused() -> None:
    q, k, v = (x.cuda() for x in random_qkv(4, 1, 129, torch.float16))
    _, starts, ends, _ = ops.row_bounds(offsets_of([4]).cuda(), 4)
    with pytest.raises(ValueError, match="129"):
        ops.packed_attention(q, k, v, starts, ends, 1.0)
    with pytest.raises(ValueError, match="8193"):
        ops.segment_pool(random(2, 8193).cuda(), offsets_of([2]).cuda(), "mean", False)


# --- Without Triton, and with its interpreter -----------------------------------------------------


def test_the_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"  # an import of it would raise
        "import torch; from shapeserve import ops\n"
        "offsets = torch.tensor([0, 2, 3], dtype=torch.int32)\n"
        "print(ops.segment_pool(torch.ones(3, 4), offsets, 'mean', False).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 8.0


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(600)
def test_the_kernels_agree_in_triton_s_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "interpreted", __file__]
    # numpy, which the interpreter calculates with, warns of the NaN that the tests put in.
    command += ["-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 50
    assert "skipped" not in done.stdout
