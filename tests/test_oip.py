"""Open Inference Protocol requests to rows, and results to tensors, whatever carries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.errors import InvalidRequest, NotFound
from shapeserve.models.spec import ModelSpec, TensorSpec
from shapeserve.protocols import oip
from shapeserve.protocols.oip_rows import TensorInfo, inputs_of
from shapeserve.protocols.oip_types import DATATYPES, InferRequest, RequestedOutput, Tensor

IDS = TensorSpec("input_ids", "int64", ("batch", "seq"))
MASK = TensorSpec("attention_mask", "int64", ("batch", "seq"), make="mask")
TYPES = TensorSpec("token_type_ids", "int64", ("batch", "seq"))
VECTOR = TensorSpec("sentence_embedding", "float32", ("batch", 3))
TOKENS = TensorSpec("tokens", "bfloat16", ("batch", "seq", 2))
MAX_ROWS = 40


def spec_of(inputs: list[TensorSpec], outputs: list[TensorSpec], vocab: int | None) -> ModelSpec:
    return ModelSpec(
        name="m",
        task="module" if vocab is None else "embed",
        dtype="float32",
        inputs={tensor.name: tensor for tensor in inputs},
        outputs={tensor.name: tensor for tensor in outputs},
        axes=("batch", "seq"),
        max_length={"seq": 8},
        hard_limit={"seq": 8},
        vocab_size=vocab,
    )


TEXT = spec_of([IDS, MASK], [VECTOR, TOKENS], 100)
TYPED = spec_of([IDS, TYPES, MASK], [VECTOR], 100)
IMAGE = spec_of(
    [
        TensorSpec("left", "float32", ("batch", 3, "height", "width")),
        TensorSpec("right", "uint8", ("batch", "height")),
        TensorSpec("mask", "float32", ("batch", "height", "width"), make="mask"),
    ],
    [VECTOR],
    None,
)


def tensor(name: str, data: Any, datatype: str = "INT64") -> Tensor:
    if datatype == "BYTES":
        return Tensor(name, datatype, (len(data),), [bytes(value) for value in data])
    array = np.array(data, DATATYPES[datatype].held)
    return Tensor(name, datatype, array.shape, array)


def request(*inputs: Tensor, outputs: Any = (), **parameters: Any) -> InferRequest:
    return InferRequest("m", "", "id", parameters, inputs, tuple(outputs))


def rows(spec: ModelSpec, *inputs: Tensor) -> list[Any]:
    return oip.read(request(*inputs), spec, max_rows=MAX_ROWS).rows


def plain(read: list[Any]) -> list[Any]:
    return [
        {name: array.tolist() for name, array in row.items()} if isinstance(row, Mapping) else row
        for row in read
    ]


# --- text models ------------------------------------------------------------------------------


def test_token_ids_become_a_row_each() -> None:
    got = rows(TEXT, tensor("input_ids", [[1, 2], [3, 4]], "INT32"))
    assert plain(got) == [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}]
    assert {row["input_ids"].dtype for row in got} == {np.dtype(np.int64)}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from(sorted(DATATYPES)))
def test_a_mask_of_any_number_type_cuts_each_row_to_its_length(
    lengths: list[int], datatype: str
) -> None:
    if datatype == "BYTES":
        return
    width = max(lengths)
    ids = [[7] * n + [0] * (width - n) for n in lengths]
    mask = [[1] * n + [0] * (width - n) for n in lengths]
    got = rows(TEXT, tensor("attention_mask", mask, datatype), tensor("input_ids", ids))
    assert plain(got) == [{"input_ids": [7] * n} for n in lengths]


@pytest.mark.parametrize(
    ("bad", "datatype"),
    [
        *(([0, 0, 0], "INT64"), ([0, 1, 1], "INT64"), ([1, 0, 1], "BOOL"), ([2, 1, 0], "INT64")),
        *(([-1, 0, 0], "INT64"), ([1, 0.5, 0], "FP32"), ([1, float("nan"), 0], "FP32")),
    ],
)
def test_a_mask_that_is_no_padding_at_the_end_is_refused_by_row(bad: Any, datatype: str) -> None:
    mask = tensor("attention_mask", [[1, 1, 1], bad, [1, 1, 0], bad], datatype)
    with pytest.raises(InvalidRequest, match="row 1, 3 must be 1s and then 0s") as refused:
        rows(TEXT, tensor("input_ids", [[5, 6, 7]] * 4), mask)
    assert refused.value.param == "inputs[attention_mask]"


def test_at_most_ten_bad_rows_are_named() -> None:
    mask = tensor("attention_mask", [[0]] * 12)
    with pytest.raises(InvalidRequest, match="row 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"):
        rows(TEXT, tensor("input_ids", [[5]] * 12), mask)


def test_token_types_of_0_are_dropped_for_a_model_that_has_none() -> None:
    got = rows(TEXT, tensor("input_ids", [[5, 6]]), tensor("token_type_ids", [[0, 0]]))
    assert plain(got) == [{"input_ids": [5, 6]}]


def test_token_types_that_a_model_would_ignore_are_refused_by_row() -> None:
    ids = tensor("input_ids", [[5, 6], [5, 6], [5, 6]])
    mask = tensor("attention_mask", [[1, 1], [1, 0], [1, 1]])
    types = tensor("token_type_ids", [[0, 0], [0, 1], [0, 1]])  # row 1 differs in its padding only
    with pytest.raises(InvalidRequest, match="row 2 must be 0"):
        rows(TEXT, ids, mask, types)


def test_token_types_are_cut_with_their_row_for_a_model_that_has_them() -> None:
    ids, mask = tensor("input_ids", [[5, 6, 0]]), tensor("attention_mask", [[1, 1, 0]], "BOOL")
    typed = rows(TYPED, ids, mask, tensor("token_type_ids", [[0, 1, 0]], "INT32"))
    assert plain(typed) == [{"input_ids": [5, 6], "token_type_ids": [0, 1]}]
    assert plain(rows(TYPED, ids, mask)) == [{"input_ids": [5, 6], "token_type_ids": [0, 0]}]


def test_texts_become_a_row_each() -> None:
    assert rows(TEXT, tensor("text", ["naïve".encode(), b""], "BYTES")) == ["naïve", ""]


BAD_TEXT: dict[str, tuple[list[Tensor], str, str]] = {
    "nothing": ([], "is missing; send it, or text", "inputs[input_ids]"),
    "mask-alone": ([tensor("attention_mask", [[1]])], "is missing", "inputs[input_ids]"),
    "both": (
        [tensor("input_ids", [[1]]), tensor("text", [b"a"], "BYTES")],
        "and input_ids are both there",
        "inputs[text]",
    ),
    "unknown": (
        [tensor("ids", [[1]])],
        "it takes input_ids, attention_mask, token_type_ids, text",
        "inputs[ids]",
    ),
    "twice": ([tensor("input_ids", [[1]])] * 2, "is there twice", "inputs[input_ids]"),
    "float-ids": (
        [tensor("input_ids", [[1]], "FP32")],
        "has datatype FP32; send INT64 or INT32",
        "inputs[input_ids].datatype",
    ),
    "flat-ids": (
        [tensor("input_ids", [1, 2])],
        "has shape [2]; send 2 dims",
        "inputs[input_ids].shape",
    ),
    "rows": (
        [tensor("input_ids", [[1]] * (MAX_ROWS + 1))],
        f"has {MAX_ROWS + 1} rows, the limit is {MAX_ROWS}",
        "inputs[input_ids].shape",
    ),
    "mask-shape": (
        [tensor("input_ids", [[1, 2]]), tensor("attention_mask", [[1]] * (MAX_ROWS + 1))],
        f"has shape [{MAX_ROWS + 1}, 1]; send [1, 2], as inputs[input_ids] has",
        "inputs[attention_mask].shape",
    ),
    "mask-bytes": (
        [tensor("input_ids", [[1]]), tensor("attention_mask", [b"1"], "BYTES")],
        "has datatype BYTES",
        "inputs[attention_mask].datatype",
    ),
    "types-shape": (
        [tensor("input_ids", [[1, 2]]), tensor("token_type_ids", [[0]])],
        "has shape [1, 1]; send [1, 2]",
        "inputs[token_type_ids].shape",
    ),
    "text-ids": ([tensor("text", [1])], "has datatype INT64; send BYTES", "inputs[text].datatype"),
    "text-rows": (
        [tensor("text", [b"a"] * (MAX_ROWS + 1), "BYTES")],
        f"the limit is {MAX_ROWS}",
        "inputs[text].shape",
    ),
    "not-utf8": (
        [tensor("text", [b"a", b"b\xff"], "BYTES")],
        "row 1 is not UTF-8 (byte 1)",
        "inputs[text]",
    ),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_inputs_that_no_text_model_takes_are_refused_by_name(case: str) -> None:
    inputs, message, param = BAD_TEXT[case]
    with pytest.raises(InvalidRequest) as refused:
        rows(TEXT, *inputs)
    assert message in refused.value.message
    assert refused.value.param == param


def test_i8_a_long_input_name_is_cut_in_a_message() -> None:
    with pytest.raises(InvalidRequest) as refused:
        rows(TEXT, tensor("x" * 10_000, [[1]]))
    assert len(refused.value.message) < 200


# --- modules ----------------------------------------------------------------------------------


def test_every_input_of_a_module_is_split_along_the_batch() -> None:
    left = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)
    right = tensor("right", [[1, 2], [3, 4]], "UINT8")
    got = rows(IMAGE, right, tensor("left", left, "FP32"))
    assert len(got) == 2
    for i, row in enumerate(got):
        assert set(row) == {"left", "right"}
        np.testing.assert_array_equal(row["left"], left[i])
        np.testing.assert_array_equal(row["right"], right.data[i])


def left(*shape: int, datatype: str = "FP32") -> Tensor:
    return tensor("left", np.zeros(shape), datatype)


RIGHT = tensor("right", np.zeros((2, 4)), "UINT8")
BAD_MODULE: dict[str, tuple[list[Tensor], str, str]] = {
    "missing": ([RIGHT], "is missing; model 'm' takes left, right", "inputs[left]"),
    "made-by-us": (
        [left(2, 3, 4, 4), RIGHT, tensor("mask", np.zeros((2, 4, 4)), "FP32")],
        "is not an input of model 'm'; it takes left, right",
        "inputs[mask]",
    ),
    "datatype": (
        [left(2, 3, 4, 4, datatype="FP16"), RIGHT],
        "has datatype FP16; send FP32",
        "inputs[left].datatype",
    ),
    "dims": ([left(2, 3, 4), RIGHT], "send 4 dims", "inputs[left].shape"),
    "fixed": (
        [left(2, 4, 4, 4), RIGHT],
        "has size 4 in dim 1 (3); send 3, which the model fixes",
        "inputs[left].shape",
    ),
    "named": (
        [left(2, 3, 5, 4), RIGHT],
        "has size 4 in dim 1 (height); send 5, as inputs[left] has",
        "inputs[right].shape",
    ),
    "rows-differ": (
        [left(3, 3, 4, 4), RIGHT],
        "has size 2 in dim 0 (batch); send 3, as inputs[left] has",
        "inputs[right].shape",
    ),
    "too-many-rows": (
        [left(MAX_ROWS + 1, 3, 1, 1), RIGHT],
        f"has {MAX_ROWS + 1} rows, the limit is {MAX_ROWS}",
        "inputs[left].shape",
    ),
}


@pytest.mark.parametrize("case", BAD_MODULE)
def test_inputs_that_the_module_does_not_take_are_refused_by_name(case: str) -> None:
    inputs, message, param = BAD_MODULE[case]
    with pytest.raises(InvalidRequest) as refused:
        rows(IMAGE, *inputs)
    assert message in refused.value.message
    assert refused.value.param == param


# --- metadata, versions, parameters, outputs --------------------------------------------------


def test_metadata_has_what_a_caller_sends_with_minus_1_for_what_varies() -> None:
    assert all(info.optional for info in inputs_of(TEXT))  # text may be sent instead of ids
    assert inputs_of(IMAGE) == (
        TensorInfo("left", "FP32", (-1, 3, -1, -1)),
        TensorInfo("right", "UINT8", (-1, -1)),
    )
    assert oip.outputs_of(TEXT) == (
        TensorInfo("sentence_embedding", "FP32", (-1, 3)),
        TensorInfo("tokens", "BF16", (-1, -1, 2)),
    )


@pytest.mark.parametrize("version", ["2", "01", "latest"])
def test_only_version_1_is_served(version: str) -> None:
    oip.check_version("m", "")
    oip.check_version("m", "1")
    with pytest.raises(NotFound, match="its one version is '1'"):
        oip.check_version("m", version)


ONE = tensor("input_ids", [[1, 2]])


def test_parameters_of_ours_are_read_and_others_are_returned() -> None:
    asked = request(ONE, over_max="split", timeout=1_500_000, trace="t1", top=5)
    job = oip.read(asked, TEXT, max_rows=MAX_ROWS)
    assert (job.over_max, job.timeout_s) == ("split", 1.5)
    answer = oip.answer(asked, TEXT, job, [{"sentence_embedding": np.ones(3), "tokens": TOKEN_ROW}])
    assert answer.parameters == {"trace": "t1", "top": 5}
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "id")


TOKEN_ROW = np.ones((2, 2), np.float32)


@pytest.mark.parametrize("timeout", [0, None])
def test_no_timeout_is_no_limit(timeout: int | None) -> None:
    parameters = {} if timeout is None else {"timeout": timeout}
    assert oip.read(request(ONE, **parameters), TEXT, max_rows=MAX_ROWS).timeout_s is None


BAD_PARAMETERS: dict[str, Any] = {
    "over_max": "shrink",
    "timeout": -1,
    "sequence_id": 5,
    "sequence_start": True,
    "sequence_end": True,
    "priority": 1,
    "headers": "x",
    "triton_enable_empty_final_response": True,
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    asked = request(ONE, **{name: BAD_PARAMETERS[name]})
    with pytest.raises(InvalidRequest, match=name) as refused:
        oip.read(asked, TEXT, max_rows=MAX_ROWS)
    assert refused.value.param == f"parameters[{name}]"


@pytest.mark.parametrize("timeout", ["1", 1.5, True, 86_400_000_001])
def test_a_timeout_is_a_number_of_microseconds(timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match="whole number of microseconds, at most 86400000000"):
        oip.read(request(ONE, timeout=timeout), TEXT, max_rows=MAX_ROWS)


BAD_OUTPUTS: dict[str, tuple[list[RequestedOutput], str]] = {
    "unknown": ([RequestedOutput("logits")], "model 'm' gives sentence_embedding, tokens"),
    "twice": ([RequestedOutput("tokens")] * 2, "is there twice"),
    "classes": ([RequestedOutput("tokens", {"classification": 3})], "classification"),
    "shared": ([RequestedOutput("tokens", {"shared_memory_region": "r"})], "shared_memory_region"),
}


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_an_output_that_cannot_be_given_is_refused_before_anything_runs(case: str) -> None:
    outputs, message = BAD_OUTPUTS[case]
    with pytest.raises(InvalidRequest, match=message) as refused:
        oip.read(request(ONE, outputs=outputs), TEXT, max_rows=MAX_ROWS)
    assert str(refused.value.param).startswith("outputs[")


def answered(*asked: str, results: list[Any]) -> list[Tensor]:
    one = request(ONE, outputs=[RequestedOutput(name) for name in asked])
    job = oip.read(one, TEXT, max_rows=MAX_ROWS)
    return list(oip.answer(one, TEXT, job, results).outputs)


RAGGED = [
    {"sentence_embedding": np.full(3, i, np.float32), "tokens": np.full((i, 2), i, np.float32)}
    for i in (1, 3, 2)
]


def test_outputs_come_in_the_order_in_which_they_were_asked_for() -> None:
    assert [t.name for t in answered(results=RAGGED)] == ["sentence_embedding", "tokens"]
    asked = answered("tokens", "sentence_embedding", results=RAGGED)
    assert [t.name for t in asked] == ["tokens", "sentence_embedding"]
    assert [t.name for t in answered("tokens", results=RAGGED)] == ["tokens"]


def test_rows_of_different_length_are_padded_with_zeros_to_the_longest_of_the_request() -> None:
    (tokens,) = answered("tokens", results=RAGGED)
    assert (tokens.datatype, tokens.shape) == ("BF16", (3, 3, 2))
    assert isinstance(tokens.data, np.ndarray)
    assert tokens.data[..., 0].tolist() == [[1, 0, 0], [3, 3, 3], [2, 2, 0]]


def test_i6_row_i_of_an_output_belongs_to_row_i_of_the_input() -> None:
    (vectors,) = answered("sentence_embedding", results=RAGGED)
    assert isinstance(vectors.data, np.ndarray)
    assert vectors.data[:, 0].tolist() == [1, 3, 2]
