"""NVIDIA's tritonclient against real engines behind the HTTP side of a replica, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import engines
import ml_dtypes
import numpy as np
import oip_modules
import pytest
import tiny
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from frontend_server import serving
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from shapeserve.config import ModelConfig
from shapeserve.engine import Engine
from shapeserve.metrics import Metrics

LARGEST_BATCH = 4
LIMIT = 48  # the tiny model's positions
BYTES_LIMIT = 100_000


def text_model(directory: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "path": str(directory),
        "compile": engines.QUICK,
        "threads": 1,
        "policy": {"seq": {"explicit": [8, 24]}, "batch": {"explicit": [1, 2, LARGEST_BATCH]}},
        "limits": {"max_rows": 100},
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Engine], str]]:
    metrics = Metrics()
    configs = [
        text_model(tiny.write_model(tmp_path_factory.mktemp("model"))),
        oip_modules.config(),
        tiny.module_config("masked_tokens", name="tokens", compile=engines.QUICK, threads=1),
        tiny.module_config("poisonous", name="poisonous", compile=engines.QUICK, threads=1),
    ]
    made = [Engine(ModelConfig(**config), metrics=metrics).start() for config in configs]
    by_name = {engine.spec.name: engine for engine in made}
    try:
        with serving(by_name, BYTES_LIMIT) as url:
            yield by_name, url
    finally:
        for engine in made:
            engine.close()


@pytest.fixture(scope="module")
def engine(served: tuple[dict[str, Engine], str]) -> Engine:
    return served[0]["tiny"]


@pytest.fixture
def client(served: tuple[dict[str, Engine], str]) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served[1], concurrency=8) as made:
        yield made


def tensor(name: str, array: np.ndarray, *, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def texts(*values: str, binary: bool = True) -> list[triton.InferInput]:
    return [tensor("text", np.array([value.encode() for value in values], object), binary=binary)]


def padded(rows: list[list[int]], dtype: Any = np.int64) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of rows of different length."""
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows], np.int64)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype)
    return ids, mask


def vectors(engine: Engine, samples: list[Any]) -> np.ndarray:
    return np.stack([r.outputs["sentence_embedding"] for r in engine.run(samples)])  # type: ignore[union-attr]


ROWS = [[2, 7, 9, 8, 3], [2, 8, 3], [2, 9, 9, 3]]


# --- what the server says of itself -----------------------------------------------------------


def test_the_client_finds_a_live_and_ready_server_and_its_models(
    client: triton.InferenceServerClient,
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    for model, version, ready in [
        ("tiny", "", True),
        ("org/echo", "1", True),
        ("tiny", "2", False),
    ]:
        assert client.is_model_ready(model, version) is ready
    assert not client.is_model_ready("gpt")
    metadata = client.get_model_metadata("org/echo")
    assert metadata["name"] == "org/echo"
    assert {t["datatype"] for t in metadata["inputs"]} == {
        *("FP32", "FP16", "BF16", "INT32", "INT64", "UINT8", "BOOL")
    }
    assert {tuple(t["shape"]) for t in metadata["outputs"]} == {(-1, -1, 2)}


# --- text models ------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_token_ids_give_the_engines_vectors(
    client: triton.InferenceServerClient, engine: Engine, binary: bool, compression: str | None
) -> None:
    ids, mask = padded(ROWS)
    answer = client.infer(
        "tiny",
        [tensor("input_ids", ids, binary=binary), tensor("attention_mask", mask, binary=binary)],
        request_id="my id",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
        outputs=None if binary else [triton.InferRequestedOutput("sentence_embedding", False)],
    )
    assert answer.get_response()["id"] == "my id"
    got = answer.as_numpy("sentence_embedding")
    np.testing.assert_allclose(got, vectors(engine, list(ROWS)), atol=1e-5)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_texts_give_the_engines_vectors(
    client: triton.InferenceServerClient, engine: Engine, binary: bool
) -> None:
    values = ["the cat sat", "naïve café 東京", tiny.text_of(20)]
    got = client.infer("tiny", texts(*values, binary=binary)).as_numpy("sentence_embedding")
    np.testing.assert_allclose(got, vectors(engine, values), atol=1e-5)


@pytest.mark.asyncio
async def test_the_asynchronous_client_gets_the_same(
    served: tuple[dict[str, Engine], str], engine: Engine
) -> None:
    def make(name: str, array: np.ndarray) -> triton_aio.InferInput:
        made = triton_aio.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array)
        return made

    ids, mask = padded(ROWS)
    async with triton_aio.InferenceServerClient(served[1]) as client:
        assert await client.is_model_ready("tiny", "1")
        inputs = [make("input_ids", ids), make("attention_mask", mask)]
        answer = await client.infer("tiny", inputs, model_version="1", request_id="7")
        with pytest.raises(InferenceServerException, match="gives sentence_embedding"):
            await client.infer("tiny", inputs, outputs=[triton_aio.InferRequestedOutput("logits")])
    assert answer.get_response()["id"] == "7"
    got = answer.as_numpy("sentence_embedding")
    np.testing.assert_allclose(got, vectors(engine, list(ROWS)), atol=1e-5)


def test_i2_ids_and_masks_of_any_type_are_cast_at_the_edge_and_recompile_nothing(
    client: triton.InferenceServerClient, engine: Engine
) -> None:
    expected = vectors(engine, list(ROWS))
    compiles = engines.value(engine, "compiles_total", model="tiny")
    for ids_type in (np.int32, np.int64):
        for mask_type in (np.int32, np.int64, np.bool_, np.uint8, np.float32, np.float16):
            ids, mask = padded(ROWS, mask_type)
            inputs = [tensor("input_ids", ids.astype(ids_type)), tensor("attention_mask", mask)]
            got = client.infer("tiny", inputs).as_numpy("sentence_embedding")
            np.testing.assert_allclose(got, expected, atol=1e-5)
    assert engines.value(engine, "compiles_total", model="tiny") == compiles
    assert engines.value(engine, "recompiles_total") == 0


def test_token_types_of_0_change_nothing_and_others_are_refused(
    client: triton.InferenceServerClient, engine: Engine
) -> None:
    ids = np.array([[2, 7, 3]])
    zeros = tensor("token_type_ids", np.zeros_like(ids))
    got = client.infer("tiny", [tensor("input_ids", ids), zeros]).as_numpy("sentence_embedding")
    np.testing.assert_allclose(got, vectors(engine, [[2, 7, 3]]), atol=1e-5)
    with pytest.raises(InferenceServerException, match="one type of token"):
        client.infer("tiny", [tensor("input_ids", ids), tensor("token_type_ids", ids)])


def test_more_rows_than_the_largest_batch_are_spread_and_answered_in_order(
    client: triton.InferenceServerClient, engine: Engine
) -> None:
    values = [tiny.text_of(3 + i % 20, seed=i) for i in range(8 * LARGEST_BATCH + 1)]
    got = client.infer("tiny", texts(*values)).as_numpy("sentence_embedding")
    alone = np.concatenate([vectors(engine, [value]) for value in values])
    np.testing.assert_allclose(got, alone, atol=1e-5)


def test_i6_concurrent_requests_each_get_their_own_rows(
    client: triton.InferenceServerClient, engine: Engine
) -> None:
    asked = [
        [tiny.text_of(3 + (i + j) % 20, seed=7 * i + j) for j in range(1 + i % 3)]
        for i in range(12)
    ]
    waiting = [client.async_infer("tiny", texts(*values)) for values in asked]
    for values, handle in zip(asked, waiting, strict=True):
        got = handle.get_result().as_numpy("sentence_embedding")
        np.testing.assert_allclose(got, vectors(engine, values), atol=1e-5)


def test_the_longest_row_is_answered_and_one_token_more_is_refused_by_row(
    client: triton.InferenceServerClient,
) -> None:
    answer = client.infer("tiny", [tensor("input_ids", np.full((1, LIMIT), 7))])
    assert answer.as_numpy("sentence_embedding").shape == (1, 32)
    with pytest.raises(InferenceServerException, match=r"input\[0\].* at most 48"):
        client.infer("tiny", [tensor("input_ids", np.full((1, LIMIT + 1), 7))])
    cut = client.infer(
        "tiny",
        [tensor("input_ids", np.full((1, LIMIT + 1), 7))],
        parameters={"over_max": "truncate"},
    )
    assert cut.as_numpy("sentence_embedding").shape == (1, 32)


REFUSED: dict[str, tuple[list[str], str]] = {
    "empty-text": (["cat", ""], r"input\[1\] is empty"),
    "blank-text": ([" ", "cat"], r"input\[0\] is empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_empty_text_is_refused_by_row_and_the_server_is_unharmed(
    client: triton.InferenceServerClient, case: str
) -> None:
    values, message = REFUSED[case]
    with pytest.raises(InferenceServerException, match=message) as refused:
        client.infer("tiny", texts(*values))
    assert refused.value.status() == "400"
    assert client.infer("tiny", texts("cat")).as_numpy("sentence_embedding").shape == (1, 32)


def test_no_rows_at_all_are_refused(client: triton.InferenceServerClient) -> None:
    for inputs in (texts(), [tensor("input_ids", np.zeros((0, 4), np.int64))]):
        with pytest.raises(InferenceServerException, match=r"shape\[0\] is 0"):
            client.infer("tiny", inputs)
    with pytest.raises(InferenceServerException, match=r"shape\[1\] is 0"):
        client.infer("tiny", [tensor("input_ids", np.zeros((4, 0), np.int64))])


def test_a_token_outside_of_the_vocabulary_is_refused_by_row(
    client: triton.InferenceServerClient,
) -> None:
    with pytest.raises(InferenceServerException, match=r"input\[1\].*not in the vocabulary"):
        client.infer("tiny", [tensor("input_ids", np.array([[2, 3], [2, 10**6]]))])


OPTIONS: dict[str, dict[str, Any]] = {
    "sequence_id": {"sequence_id": 5, "sequence_start": True},
    "priority": {"priority": 1},
    "classification": {
        "outputs": [triton.InferRequestedOutput("sentence_embedding", class_count=3)]
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(
    client: triton.InferenceServerClient, name: str
) -> None:
    with pytest.raises(InferenceServerException, match=name):
        client.infer("tiny", texts("cat"), **OPTIONS[name])


def test_shared_memory_is_refused(client: triton.InferenceServerClient) -> None:
    ids = triton.InferInput("input_ids", [1, 4], "INT64")
    ids.set_shared_memory("region", 32)
    with pytest.raises(InferenceServerException, match="shared_memory_region"):
        client.infer("tiny", [ids])


def test_a_bomb_of_a_body_is_refused_with_the_limit(client: triton.InferenceServerClient) -> None:
    many = [tensor("input_ids", np.zeros((100, 10_000), np.int64))]
    with pytest.raises(InferenceServerException, match=f"more than {BYTES_LIMIT} bytes") as refused:
        client.infer("tiny", many, request_compression_algorithm="gzip")
    assert refused.value.status() == "413"


# --- modules ----------------------------------------------------------------------------------

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "bool": np.bool_,
}


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_every_element_type_goes_there_and_back(
    client: triton.InferenceServerClient, binary: bool
) -> None:
    random = np.random.default_rng(0)
    sent = {
        name: (random.random((3, 5, 2)) * (1 if dtype is np.bool_ else 200)).round().astype(dtype)
        for name, dtype in DTYPES.items()
    }
    # The client itself refuses bfloat16 in JSON, as an input; as an output it reads it.
    inputs = [
        tensor(f"in_{name}", array, binary=binary or name == "bfloat16")
        for name, array in sent.items()
    ]
    asked = [triton.InferRequestedOutput(f"out_{name}", binary) for name in reversed(sent)]
    answer = client.infer("org/echo", inputs, outputs=asked)
    assert [o["name"] for o in answer.get_response()["outputs"]] == [o.name() for o in asked]
    for name, array in sent.items():
        got = answer.as_numpy(f"out_{name}")
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_vectors_of_tokens_have_the_sizes_of_the_request_and_not_of_the_bucket(
    client: triton.InferenceServerClient, served: tuple[dict[str, Engine], str]
) -> None:
    ids = np.array([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])  # buckets of 4, 8 and 16
    answer = client.infer("tokens", [tensor("ids", ids)])
    assert answer.as_numpy("tokens").shape == (2, 5, 8)
    for i, row in enumerate(ids):
        arrays, sizes = {"ids": row}, {"seq": len(row)}
        pooled, tokens = engines.alone(served[0]["tokens"], arrays, sizes)
        np.testing.assert_allclose(answer.as_numpy("pooled")[i], pooled, atol=1e-5)
        np.testing.assert_allclose(answer.as_numpy("tokens")[i], tokens, atol=1e-5)


def test_a_wrong_datatype_or_size_is_refused_with_the_right_one(
    client: triton.InferenceServerClient,
) -> None:
    with pytest.raises(
        InferenceServerException, match=r"inputs\[ids\] has datatype INT32; send INT64"
    ):
        client.infer("tokens", [tensor("ids", np.ones((1, 4), np.int32))])
    with pytest.raises(
        InferenceServerException, match=r"inputs\[ids\] has shape \[4\]; send 2 dims"
    ):
        client.infer("tokens", [tensor("ids", np.ones(4, np.int64))])


def test_i6_a_poisonous_row_fails_its_own_request_by_index_and_no_other(
    client: triton.InferenceServerClient,
) -> None:
    rows = np.array([[1, 2], [3, 4], [5, tiny.POISON], [7, 8]])
    waiting = [
        client.async_infer("poisonous", [tensor("ids", part)])
        for part in (rows[:2], rows, rows[3:], rows[:1])
    ]
    outcomes = []
    for handle in waiting:
        try:
            outcomes.append(handle.get_result().as_numpy("mean")[:, 0].tolist())
        except InferenceServerException as error:
            outcomes.append((error.status(), "input[2]" in error.message()))
    assert outcomes == [[1.5, 3.5], ("500", True), [7.5], [1.5]]
