"""Tensors of the Open Inference Protocol: bytes and values, there and back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.utils as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shapeserve.errors import InvalidRequest
from shapeserve.protocols import oip_types
from shapeserve.protocols.oip_types import (
    DATATYPES,
    MAX_DIMS,
    Tensor,
    check_datatype,
    check_shape,
    from_bytes,
    from_values,
    to_bytes,
    to_values,
)

NUMERIC = [name for name, datatype in DATATYPES.items() if datatype.held is not None]
SHAPES = hnp.array_shapes(max_dims=3, max_side=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any tensor with finite elements that its datatype holds exactly."""
    name = draw(st.sampled_from(list(DATATYPES)))
    shape = draw(SHAPES)
    if name == "BYTES":
        texts = st.lists(st.text(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
        return Tensor("x", name, shape, [text.encode() for text in draw(texts)])
    if name == "BF16":
        bits = draw(hnp.arrays(np.uint16, shape))
        array = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        return Tensor("x", name, shape, np.where(np.isfinite(array), array, np.float32(0)))
    held = DATATYPES[name].held
    finite: dict[str, Any] = {"allow_nan": False, "allow_infinity": False}
    elements = hnp.from_dtype(held, **(finite if held.kind == "f" else {}))
    return Tensor("x", name, shape, draw(hnp.arrays(held, shape, elements=elements)))


def assert_same(got: Tensor, sent: Tensor) -> None:
    assert (got.name, got.datatype, got.shape) == (sent.name, sent.datatype, sent.shape)
    if isinstance(sent.data, list):
        assert got.data == sent.data
        return
    assert isinstance(got.data, np.ndarray)
    assert (got.data.dtype, got.data.shape) == (sent.data.dtype, sent.shape)
    np.testing.assert_array_equal(got.data, sent.data)


@given(tensors())
def test_binary_data_comes_back_as_it_was(tensor: Tensor) -> None:
    raw = to_bytes(tensor)
    datatype = DATATYPES[tensor.datatype]
    assert_same(from_bytes("inputs[0]", "x", datatype, tensor.shape, memoryview(raw)), tensor)


@given(tensors())
def test_json_values_come_back_as_they_were(tensor: Tensor) -> None:
    values = to_values(tensor)
    plain = [v.decode() for v in values] if isinstance(values, list) else values.tolist()
    values = json.loads(json.dumps(plain))
    datatype = DATATYPES[tensor.datatype]
    assert_same(from_values("inputs[0].data", "x", datatype, tensor.shape, values), tensor)


@given(tensors())
def test_binary_data_is_what_tritonclient_makes(tensor: Tensor) -> None:
    if isinstance(tensor.data, list):
        array = np.array(tensor.data, dtype=object).reshape(tensor.shape)
        theirs = triton.serialize_byte_tensor(array).item()
    else:
        theirs = tensor.data.astype(triton.triton_to_np_dtype(tensor.datatype)).tobytes()
    assert to_bytes(tensor) == theirs


@given(hnp.arrays(np.float32, 5, elements=st.floats(-(2.0**126), 2.0**126, width=32)))
def test_float32_is_rounded_to_the_nearest_bf16(values: np.ndarray) -> None:
    theirs = values.astype(ml_dtypes.bfloat16).tobytes()
    assert to_bytes(Tensor("x", "BF16", (5,), values)) == theirs


def test_bytes_are_read_where_they_lie_without_a_copy() -> None:
    raw = np.arange(6, dtype=np.int64).tobytes()
    tensor = from_bytes("inputs[0]", "x", DATATYPES["INT64"], (2, 3), raw)
    assert isinstance(tensor.data, np.ndarray)
    assert not tensor.data.flags.owndata
    assert not tensor.data.flags.writeable


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("change", [-1, 1], ids=["short", "long"])
def test_a_wrong_number_of_bytes_is_refused_with_the_right_one(name: str, change: int) -> None:
    datatype = DATATYPES[name]
    assert datatype.wire is not None
    right = 6 * datatype.wire.itemsize
    with pytest.raises(InvalidRequest, match=f"takes {right}") as refused:
        from_bytes("inputs[0]", "x", datatype, (2, 3), bytes(right + change))
    assert refused.value.param == "inputs[0]"


@pytest.mark.parametrize("name", list(DATATYPES))
def test_a_huge_shape_is_refused_before_anything_is_allocated(name: str) -> None:
    shape = (2**62, 2**62, 4)  # its product overflows int64 to 0
    with pytest.raises(InvalidRequest, match="agree"):
        from_bytes("inputs[0]", "x", DATATYPES[name], shape, b"")
    with pytest.raises(InvalidRequest, match=str(2**126)):
        from_values("inputs[0].data", "x", DATATYPES[name], shape, [])


BAD_BYTES = {
    "no-length": (b"\1\0\0", "0 whole elements in its 3 bytes"),
    "beyond-the-end": (b"\5\0\0\0abc", "says that it has 5 bytes, but 3 are left"),
    "huge-length": (b"\xff\xff\xff\xffabc", "says that it has 4294967295 bytes"),
    "too-few": (b"\1\0\0\0a", "1 whole elements"),
    "too-many": (b"\1\0\0\0a" * 3, "5 bytes after them"),
}


@pytest.mark.parametrize("case", BAD_BYTES)
def test_bytes_elements_that_do_not_add_up_are_refused(case: str) -> None:
    raw, message = BAD_BYTES[case]
    with pytest.raises(InvalidRequest, match=message):
        from_bytes("inputs[0]", "x", DATATYPES["BYTES"], (2,), raw)


def test_a_bool_byte_other_than_0_and_1_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="byte 2; an element of BOOL is 0 or 1"):
        from_bytes("inputs[0]", "x", DATATYPES["BOOL"], (2,), b"\1\2")


BAD_VALUES = {
    "bool-for-int": ("INT64", [1, True], "[1] is true; an element of INT64 is a whole number"),
    "float-for-int": ("INT32", [1, 1.0], "[1] is 1.0; an element of INT32 is a whole number"),
    "beyond-64-bits": ("INT64", [1, 2.0**70], "[1] is 1180591620717411303424; an element of INT64"),
    "nested": ("INT64", [1, [None, True]], "[1] is [null, true]; an element"),
    "int-for-bool": ("BOOL", [True, 1], "[1] is 1; an element of BOOL is true or false"),
    "text-for-float": ("FP32", [1, "1"], "[1] is '1'; an element of FP32 is a number"),
    "null-for-float": ("FP32", [1, None], "[1] is null"),
    "int-for-text": ("BYTES", ["a", 1], "[1] is 1; an element of BYTES is a string"),
    "list-for-int": ("INT64", [1, [2]], "[1] is [2]; an element of INT64"),
    "uint8-above": ("UINT8", [0, 256], "[1] is 256; UINT8 holds 0 to 255"),
    "uint8-below": ("UINT8", [-1, 0], "[0] is -1; UINT8 holds 0 to 255"),
    "int32-above": ("INT32", [0, 2**31], "INT32 holds -2147483648 to 2147483647"),
    "int64-above": ("INT64", [0, 2**63], "[1] is 9223372036854775808"),
    "fp16-above": ("FP16", [0, 1e6], "[1] is 1000000.0; FP16 holds numbers up to 65504"),
    "fp32-above": ("FP32", [0, -1e39], "FP32 holds numbers up to about 3.4e38"),
    "bf16-above": ("BF16", [0, 3.4e38], "BF16 holds numbers up to about 3.4e38"),
    "too-few": ("INT64", [1], "has 1 elements, but shape [2] has 2"),
    "too-many": ("INT64", [1, 2, 3], "has 3 elements, but shape [2] has 2"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_values_that_the_datatype_does_not_hold_are_refused_by_index(case: str) -> None:
    name, values, message = BAD_VALUES[case]
    with pytest.raises(InvalidRequest) as refused:
        from_values("inputs[3].data", "x", DATATYPES[name], (2,), values)
    assert message in refused.value.message
    assert refused.value.param == "inputs[3].data"


@pytest.mark.parametrize("name", ["int64", "FP64", "FLOAT32", "STRING", "", None, 5, ["INT64"]])
def test_an_unknown_datatype_is_refused_with_those_that_there_are(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="BOOL, UINT8, INT32, INT64, FP16, BF16, FP32") as e:
        check_datatype("inputs[0]", name)
    assert e.value.param == "inputs[0].datatype"


@pytest.mark.parametrize(
    "shape",
    [
        *(None, 3, "23", {}, [], [1] * (MAX_DIMS + 1)),
        *([2, -1], [0, 2], [2, 1.0], [True, 2], ["2"], [None], [2**63], [[1]]),
    ],
    ids=str,
)
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_shape("inputs[0]", shape)
    assert refused.value.param == "inputs[0].shape"


def test_a_long_value_is_cut_in_a_message() -> None:
    assert len(oip_types.shown("x" * 10_000)) < 50
    assert len(oip_types.shown([["x" * 100] * 100])) < 50
