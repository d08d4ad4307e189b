"""The padded layout: what is written around the real rows, and what is read back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.layout import PaddedLayout, RowArrays, takes_tokens
from shapeserve.models.spec import ModelSpec, TensorSpec

CPU = torch.device("cpu")


def make_spec(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = ()) -> ModelSpec:
    axes = tuple(dict.fromkeys(d for t in inputs for d in t.dims if isinstance(d, str)))
    return ModelSpec(
        name="m",
        task="module",
        dtype="float32",
        inputs={t.name: t for t in inputs},
        outputs={t.name: t for t in outputs},
        axes=axes,
        max_length={},
        hard_limit={},
    )


IDS = TensorSpec("ids", "int64", ("batch", "seq"), pad=7)
MASK = TensorSpec("mask", "int64", ("batch", "seq"), make="mask")
POSITIONS = TensorSpec("positions", "int64", ("batch", "seq"), make="positions")
PIXELS = TensorSpec("pixels", "float32", ("batch", 3, "height", "width"), pad=0.5)
REAL_PIXELS = TensorSpec("real", "bool", ("batch", "height", "width"), make="mask")


def ids_row(*ids: int) -> RowArrays:
    return RowArrays({"ids": np.array(ids)}, {"seq": len(ids)})


def test_text_rows_get_their_pad_value_mask_and_positions() -> None:
    layout = PaddedLayout(make_spec(IDS, MASK, POSITIONS), 64, CPU)
    layout.poison()
    ids, mask, positions = layout.write([ids_row(1, 2, 3), ids_row(4)], {"batch": 3, "seq": 4})
    assert ids.tolist() == [[1, 2, 3, 7], [4, 7, 7, 7], [7, 7, 7, 7]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_filler_rows_have_exactly_one_valid_element_so_that_softmax_makes_no_nan() -> None:
    layout = PaddedLayout(make_spec(IDS, MASK), 64, CPU)
    _, mask = layout.write([ids_row(1)], {"batch": 8, "seq": 4})
    assert mask[1:].sum(1).tolist() == [1] * 7


def test_two_dynamic_axes_are_padded_and_masked_together() -> None:
    layout = PaddedLayout(make_spec(PIXELS, REAL_PIXELS), 2 * 4 * 4, CPU)
    layout.poison()
    row = RowArrays({"pixels": np.ones((3, 2, 3), np.float32)}, {"height": 2, "width": 3})
    pixels, real = layout.write([row], {"batch": 2, "height": 4, "width": 4})
    assert pixels.shape == (2, 3, 4, 4)
    assert pixels[0, :, :2, :3].eq(1).all()
    assert pixels.sum().item() == 18 + 0.5 * (96 - 18)
    assert real[0].sum().item() == 6
    assert real[1].sum().item() == 1


def test_a_row_dtype_other_than_the_spec_is_cast_at_the_edge() -> None:
    layout = PaddedLayout(make_spec(IDS, MASK), 64, CPU)
    row = RowArrays({"ids": np.array([1, 2], np.int32)}, {"seq": 2})
    ids, _ = layout.write([row], {"batch": 1, "seq": 2})
    assert ids.dtype == torch.int64


def test_bfloat16_inputs_are_rounded_by_torch() -> None:
    spec = TensorSpec("x", "bfloat16", ("batch", "seq"))
    layout = PaddedLayout(make_spec(spec), 8, CPU)
    row = RowArrays({"x": np.array([1.0, 2.0], np.float32)}, {"seq": 2})
    (x,) = layout.write([row], {"batch": 1, "seq": 4})
    assert x.dtype == torch.bfloat16
    assert x.tolist() == [[1.0, 2.0, 0.0, 0.0]]


def test_outputs_are_cut_along_their_declared_axes() -> None:
    tokens = TensorSpec("tokens", "float32", ("batch", "seq", 2))
    pooled = TensorSpec("pooled", "float32", ("batch", 2))
    layout = PaddedLayout(make_spec(IDS, outputs=(tokens, pooled)), 64, CPU)
    out = torch.arange(16, dtype=torch.float32).reshape(2, 4, 2)
    (row,) = layout.read((out, out[:, 0]), [ids_row(5, 6, 7)], {}).rows()[0]
    assert row["tokens"].shape == (3, 2)
    assert row["pooled"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dims", [("batch", "seq", 2), ("batch", 2)], ids=["ragged", "pooled"])
def test_i5_no_result_is_a_view_of_the_output_buffer(dims: tuple[str | int, ...]) -> None:
    layout = PaddedLayout(make_spec(IDS, outputs=(TensorSpec("y", "float32", dims),)), 64, CPU)
    static = torch.ones([2, *(4 if d == "seq" else int(d) for d in dims[1:])])
    (row,) = layout.read((static,), [ids_row(1, 2)], {}).rows()[0]
    static.fill_(9.0)
    assert (row["y"] == 1.0).all()


@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    later=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_nothing_of_an_earlier_batch_is_left_in_a_later_one(
    lengths: list[int], later: list[int]
) -> None:
    used = PaddedLayout(make_spec(IDS, MASK, POSITIONS), 64, CPU)
    used.write([ids_row(*range(100, 100 + n)) for n in lengths], {"batch": 4, "seq": 8})
    rows = [ids_row(*range(1, 1 + n)) for n in later]
    again = used.write(rows, {"batch": 4, "seq": 8})
    fresh = PaddedLayout(make_spec(IDS, MASK, POSITIONS), 64, CPU)
    for a, b in zip(again, fresh.write(rows, {"batch": 4, "seq": 8}), strict=True):
        assert torch.equal(a, b)


def test_a_mask_may_have_fixed_dims_beside_its_axes() -> None:
    mask = TensorSpec("mask", "float32", ("batch", 2, "height", "width"), make="mask")
    layout = PaddedLayout(make_spec(PIXELS, mask), 2 * 4 * 4, CPU)
    layout.poison()
    row = RowArrays({"pixels": np.ones((3, 2, 3), np.float32)}, {"height": 2, "width": 3})
    _, real = layout.write([row], {"batch": 2, "height": 4, "width": 4})
    assert real[0, 0].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [0] * 4, [0] * 4]
    assert real[0, 1].equal(real[0, 0])
    assert real[1].sum((1, 2)).tolist() == [1, 1]  # a filler row has one valid element a channel


def test_positions_count_along_the_axis_wherever_it_stands() -> None:
    features = TensorSpec("features", "float32", ("batch", "frames", 5))
    counted = TensorSpec("positions", "int64", ("batch", 1, "frames", 2), make="positions")
    layout = PaddedLayout(make_spec(features, counted), 2 * 4, CPU)
    layout.poison()
    row = RowArrays({"features": np.ones((3, 5), np.float32)}, {"frames": 3})
    _, positions = layout.write([row], {"batch": 2, "frames": 4})
    assert positions[0, 0].tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]
    assert positions[1].sum() == 0


@pytest.mark.parametrize(("length", "left"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_an_output_at_a_lower_rate_is_cut_rounded_up(length: int, left: int) -> None:
    states = TensorSpec("states", "float32", ("batch", "frames/4", 2))
    features = TensorSpec("features", "float32", ("batch", "frames", 5))
    layout = PaddedLayout(make_spec(features, outputs=(states,)), 64, CPU)
    row = RowArrays({}, {"frames": length})
    (cut,) = layout.read((torch.ones(2, 3, 2),), [row], {}).rows()[0]
    assert cut["states"].shape == (left, 2)


@pytest.mark.parametrize(
    ("dims", "fits"),
    [
        (("batch", "seq", 2), True),
        (("batch", 2), True),
        (("batch",), True),
        (("batch", 2, "seq"), False),
        (("batch", "seq/4", 2), False),
    ],
)
def test_outputs_that_do_not_follow_the_ids_are_padded_on_the_host(
    dims: tuple[str | int, ...], fits: bool
) -> None:
    spec = make_spec(IDS, MASK, outputs=(TensorSpec("y", "float32", dims),))
    assert takes_tokens(spec) is fits
