"""The OpenAI API without a server: bytes to checked values or exact errors, results to bytes."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    UnsupportedMediaType,
)
from shapeserve.protocols import http, openai
from shapeserve.protocols.fields import OVER_MAX
from shapeserve.protocols.openai import ModelInfo, by_name, parse_embeddings, render_embeddings

MODEL = ModelInfo("mini", aliases=("text-embedding-3-small",), dim=4, max_rows=3, created_s=7)
MODELS = by_name([MODEL, ModelInfo("classifier")])


@dataclass
class FakeResult:
    """The attributes of ``shapeserve.engine.Result`` that rendering reads."""

    outputs: dict[str, Any]
    length: int = 5
    mode: str = "compiled"
    bucket: str = "batch=1,seq=8"
    reason: str | None = None
    truncated_from: int | None = None
    pieces: int = 1


def result(*values: float, **kwargs: Any) -> FakeResult:
    return FakeResult({"sentence_embedding": np.array(values, dtype=np.float32)}, **kwargs)


def parse(**fields: Any) -> openai.EmbeddingRequest:
    return parse_embeddings(orjson.dumps({"model": "mini", **fields}), MODELS)


def rendered(results: list[FakeResult], **fields: Any) -> dict[str, Any]:
    request = parse(input=["x"] * len(results), **fields)
    return json.loads(render_embeddings(request, results).body)


@pytest.mark.parametrize(
    ("value", "samples"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([15339, 1917], [[15339, 1917]]),
        ([[15339, 1917], [0]], [[15339, 1917], [0]]),
        ([" \t"], [" \t"]),
        ("é🙂", ["é🙂"]),
    ],
    ids=["string", "strings", "token-ids", "lists-of-token-ids", "whitespace", "unicode"],
)
def test_every_documented_form_of_input_becomes_rows(value: Any, samples: list[Any]) -> None:
    assert parse(input=value).samples == samples


def test_token_ids_are_one_row_however_many_there_are() -> None:
    assert parse(input=list(range(MODEL.max_rows + 10))).samples == [
        list(range(MODEL.max_rows + 10))
    ]


def test_an_alias_names_the_model() -> None:
    request = parse_embeddings(b'{"model":"text-embedding-3-small","input":"x"}', MODELS)
    assert request.model is MODEL


def test_null_options_are_absent_options_and_user_is_accepted() -> None:
    request = parse(
        input="x", dimensions=None, encoding_format=None, user="u", truncate=None, over_max=None
    )
    assert (request.dimensions, request.encoding_format, request.over_max) == (None, "float", None)


@pytest.mark.parametrize(
    ("fields", "over_max"),
    [
        ({}, None),
        ({"truncate": False}, None),
        ({"truncate": True}, "truncate"),
        ({"truncate": False, "over_max": "split"}, "split"),
        ({"truncate": True, "over_max": "truncate"}, "truncate"),
        *[({"over_max": word}, word) for word in OVER_MAX],
    ],
)
def test_the_caller_chooses_what_happens_over_the_maximum(
    fields: dict[str, Any], over_max: str | None
) -> None:
    assert parse(input="x", **fields).over_max == over_max


BAD_BODIES = [
    # id, body, param, code, words of the message
    ("empty-body", b"", None, "invalid_json", ["not JSON"]),
    ("broken", b'{"model": "mini", "input": "x"', None, "invalid_json", ["not JSON"]),
    ("nan", b'{"model":"mini","input":[NaN]}', None, "invalid_json", ["NaN"]),
    ("infinity", b'{"model":"mini","input":[-Infinity]}', None, "invalid_json", ["Infinity"]),
    ("overflow", b'{"model":"mini","input":[1e999]}', None, "invalid_json", ["not JSON"]),
    ("not-utf8", b'{"model":"mini","input":"\xff"}', None, "invalid_json", ["UTF-8"]),
    ("lone-surrogate", b'{"model":"mini","input":"\\ud800"}', None, "invalid_json", ["not JSON"]),
    ("too-deep", b"[" * 5000, None, "invalid_json", ["depth"]),
    ("list", b"[]", None, "invalid_value", ["a list", "JSON object with the fields of this"]),
    ("no-model", b'{"input":"a"}', "model", "invalid_value", ["`model` is missing"]),
    (
        "2**64",
        b'{"model":"mini","input":[18446744073709551616]}',
        "input[0]",
        "invalid_value",
        ["input[0] is 18446744073709551616:", "a token id"],
    ),
    ("null", b"null", None, "invalid_value", ["null"]),
]
BAD_FIELDS = [
    ("no-input", {}, "input", "invalid_value", ["missing"]),
    ("null-input", {"input": None}, "input", "invalid_value", ["`input` is null"]),
    ("empty-list", {"input": []}, "input", "invalid_value", ["an empty list"]),
    ("number", {"input": 3}, "input", "invalid_value", ["a number"]),
    ("object", {"input": {"a": 1}}, "input", "invalid_value", ["an object"]),
    ("wrong-member", {"input": ["a", 3]}, "input[1]", "invalid_value", ["a number", "a string"]),
    (
        "null-member",
        {"input": [None]},
        "input[0]",
        "invalid_value",
        ["input[0] is null", "token ids"],
    ),
    ("mixed", {"input": [1, "a"]}, "input[1]", "invalid_value", ["input[1] is a string"]),
    ("bool", {"input": [1, True]}, "input[1]", "invalid_value", ["input[1] is a boolean"]),
    ("bool-first", {"input": [True]}, "input[0]", "invalid_value", ["a boolean"]),
    (
        "float",
        {"input": [1, 2.0]},
        "input[1]",
        "invalid_value",
        ["input[1] is 2.0:", "a whole number from 0"],
    ),
    (
        "float-first",
        {"input": [1.5]},
        "input[0]",
        "invalid_value",
        ["input[0] is 1.5:", "token id"],
    ),
    ("beyond", {"input": [2**64 - 1, -1]}, "input[0]", "invalid_value", ["outside 0.."]),
    ("deep", {"input": [[[1]]]}, "input[0]", "invalid_value", ["input[0][0] is a list:"]),
    ("negative", {"input": [1, -2]}, "input[1]", "invalid_value", ["is -2", "0.."]),
    ("huge", {"input": [2**40]}, "input[0]", "invalid_value", ["outside 0.."]),
    ("empty-ids", {"input": [[1], []]}, "input[1]", "invalid_value", ["is an empty list"]),
    ("bad-ids", {"input": [[1], [2, -1]]}, "input[1]", "invalid_value", ["input[1][1] is -1"]),
    ("ids-text", {"input": [[1], "a"]}, "input[1]", "invalid_value", ["input[1] is a string"]),
    ("text-ids", {"input": ["a", [1]]}, "input[1]", "invalid_value", ["input[1] is a list"]),
    ("too-many", {"input": ["a"] * 4}, "input", "too_many_rows", ["4 items", "3", "limits"]),
    ("dims-0", {"input": "a", "dimensions": 0}, "dimensions", "invalid_value", ["is 0", "to 4"]),
    ("dims-neg", {"input": "a", "dimensions": -1}, "dimensions", "invalid_value", ["is -1"]),
    ("dims-big", {"input": "a", "dimensions": 5}, "dimensions", "invalid_value", ["is 5", "to 4"]),
    ("dims-bool", {"input": "a", "dimensions": True}, "dimensions", "invalid_value", ["true"]),
    ("dims-text", {"input": "a", "dimensions": "4"}, "dimensions", "invalid_value", ["'4'"]),
    ("dims-float", {"input": "a", "dimensions": 2.0}, "dimensions", "invalid_value", ["2.0"]),
    (
        "format",
        {"input": "a", "encoding_format": "hex"},
        "encoding_format",
        "invalid_value",
        ["'hex'", "base64"],
    ),
    (
        "format-list",
        {"input": "a", "encoding_format": []},
        "encoding_format",
        "invalid_value",
        ["a list"],
    ),
    ("user", {"input": "a", "user": 3}, "user", "invalid_value", ["a number"]),
    ("truncate", {"input": "a", "truncate": 1}, "truncate", "invalid_value", ["1", "true or"]),
    ("over-max", {"input": "a", "over_max": "cut"}, "over_max", "invalid_value", ["'cut'"]),
    ("over-max-list", {"input": "a", "over_max": []}, "over_max", "invalid_value", ["a list"]),
    (
        "both",
        {"input": "a", "truncate": True, "over_max": "split"},
        "over_max",
        "invalid_value",
        ["only one"],
    ),
    ("unknown", {"input": "a", "inputs": "b"}, "inputs", "unknown_field", ["'inputs'", "allowed"]),
    (
        "null-model",
        {"input": "a", "model": None},
        "model",
        "invalid_value",
        ["`model` is null", "mini"],
    ),
    ("model-3", {"input": "a", "model": 3}, "model", "invalid_value", ["a number", "mini"]),
    (
        "task",
        {"input": "a", "model": "classifier"},
        "model",
        "invalid_value",
        ["does not make embeddings", "do: mini"],
    ),
]


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [pytest.param(*case[1:], id=case[0]) for case in BAD_BODIES]
    + [
        pytest.param(orjson.dumps({"model": "mini", **case[1]}), *case[2:], id=case[0])
        for case in BAD_FIELDS
    ],
)
def test_a_bad_request_is_a_400_that_names_field_bound_and_remedy(
    body: bytes, param: str | None, code: str, words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_embeddings(body, MODELS)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, code)
    assert [word for word in words if word not in error.message] == []


def test_an_unknown_model_is_a_404_that_lists_the_served_ones() -> None:
    with pytest.raises(NotFound, match="'gpt' is not served; served are: classifier, mini") as it:
        parse(input="a", model="gpt")
    assert it.value.param == "model"


def test_at_most_ten_bad_items_are_named() -> None:
    models = by_name([ModelInfo("mini", dim=4)])
    body = orjson.dumps({"model": "mini", "input": ["a", *([None] * 25)]})
    with pytest.raises(InvalidRequest) as caught:
        parse_embeddings(body, models)
    assert caught.value.message.count("is null") == 10
    assert "and 15 more" in caught.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**63) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@given(
    st.one_of(
        st.binary(max_size=60),
        json_values.map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries(
            {"model": st.just("mini") | json_values, "input": json_values},
            optional=dict.fromkeys(("dimensions", "truncate", "over_max"), json_values),
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_body_at_all_is_accepted_or_refused_by_a_request_error(body: bytes) -> None:
    try:
        rows = len(parse_embeddings(body, MODELS).samples)
    except RequestError as error:
        rows, status = 1, error.status
    else:
        status = 400
    assert 400 <= status < 500
    assert 1 <= rows <= MODEL.max_rows


def test_the_answer_has_one_item_a_row_in_order_and_the_usage() -> None:
    answer = rendered([result(1, 0, 0, 0, length=3), result(0, 1, 0, 0, length=4)])
    assert answer == {
        "object": "list",
        "model": "mini",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.0, 0.0, 0.0]},
            {"object": "embedding", "index": 1, "embedding": [0.0, 1.0, 0.0, 0.0]},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_base64_is_little_endian_float32_equal_to_the_float_answer(values: list[float]) -> None:
    row = [result(*values)]
    coded = rendered(row, encoding_format="base64")["data"][0]["embedding"]
    floats = rendered(row, encoding_format="float")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == values
    assert np.array(floats, dtype=np.float32).tolist() == values


def test_vectors_of_tokens_stay_out_of_the_answer() -> None:
    both = result(0, 1, 0, 0)
    both.outputs["token_embeddings"] = np.ones((3, 4), np.float32)
    assert rendered([both]) == rendered([result(0, 1, 0, 0)])


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_dimensions_keeps_the_first_components_at_unit_length(encoding_format: str) -> None:
    row = [result(0.6, 0.0, 0.8, 0.0)]
    answer = rendered(row, dimensions=2, encoding_format=encoding_format)["data"][0]["embedding"]
    if encoding_format == "base64":
        answer = np.frombuffer(base64.b64decode(answer), "<f4").tolist()
    assert answer == [1.0, 0.0]
    assert rendered(row, dimensions=4)["data"][0]["embedding"] == pytest.approx([0.6, 0, 0.8, 0])


def test_dimensions_only_cuts_where_the_model_does_not_normalise() -> None:
    models = by_name([ModelInfo("mini", dim=4, normalize=False)])
    body = orjson.dumps({"model": "mini", "input": "x", "dimensions": 2})
    reply = render_embeddings(parse_embeddings(body, models), [result(3, 4, 5, 6)])
    assert json.loads(reply.body)["data"][0]["embedding"] == [3.0, 4.0]


def test_a_zero_vector_survives_dimensions() -> None:
    answer = rendered([result(0, 0, 0, 1)], dimensions=2)
    assert answer["data"][0]["embedding"] == [0.0, 0.0]


def test_what_was_done_to_each_row_is_in_the_headers_and_the_item() -> None:
    rows = [
        result(1, 0, 0, 0),
        result(1, 0, 0, 0, mode="fallback", bucket="none", reason="over_max"),
        result(1, 0, 0, 0, truncated_from=600, pieces=1),
        result(1, 0, 0, 0, pieces=2),
    ]
    request = parse(input=["x"] * 3)
    reply = render_embeddings(request, rows)
    assert reply.headers == {
        "x-shapeserve-modes": "compiled=3,fallback=1",
        "x-shapeserve-buckets": "batch=1,seq=8 x3; none x1",
        "x-shapeserve-fallbacks": "over_max=1",
        "x-shapeserve-truncated": "1",
        "x-shapeserve-split": "1",
    }
    items = json.loads(reply.body)["data"]
    assert items[2]["truncated_from"] == 600
    assert items[3]["pieces"] == 2
    assert "truncated_from" not in items[0]


def test_the_model_list_and_one_model_look_as_openai_clients_expect() -> None:
    listing = json.loads(openai.render_models([MODEL]).body)
    one = json.loads(openai.render_model("text-embedding-3-small", MODELS).body)
    assert listing["object"] == "list"
    assert listing["data"] == [one]
    assert (one["id"], one["object"], one["created"]) == ("mini", "model", 7)
    with pytest.raises(NotFound):
        openai.render_model("gpt", MODELS)


def test_an_error_reply_has_the_four_fields_and_the_status() -> None:
    reply = http.error_reply(Overloaded("full", param="input", retry_after_s=1.2))
    assert reply.status == 429
    assert reply.headers == {"retry-after": "2"}
    assert json.loads(reply.body) == {
        "error": {
            "message": "full",
            "type": "overloaded_error",
            "param": "input",
            "code": "queue_full",
        }
    }


def test_an_unknown_path_is_404_and_a_wrong_method_405_with_the_right_ones() -> None:
    missing = http.route_error("/v1/nothing", "GET", ())
    wrong = http.route_error("/metrics", "POST", ("GET", "HEAD"))
    assert missing.status == 404
    assert json.loads(missing.body)["error"]["code"] == "unknown_path"
    assert (wrong.status, wrong.headers) == (405, {"allow": "GET, HEAD"})
    assert "use GET or HEAD" in json.loads(wrong.body)["error"]["message"]


@pytest.mark.parametrize("value", ["a", "4f1c-9b", "x" * 128, "user@host:1/2+3=_."])
def test_a_plain_request_id_is_kept(value: str) -> None:
    assert http.check_request_id(value) == value


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a\nb", 'a"b', "é", "{}"])
def test_a_request_id_that_could_forge_a_log_line_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        http.check_request_id(value)
    assert caught.value.param == "x-request-id"


def test_the_timeout_header_is_read_in_seconds() -> None:
    assert http.parse_timeout_s(None) is None
    assert http.parse_timeout_s("0.25") == 0.25


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "-inf", "1e9"])
def test_a_bad_timeout_is_a_400_that_names_the_header(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        http.parse_timeout_s(value)
    assert caught.value.param == "x-request-timeout-seconds"


@pytest.mark.parametrize(
    "value",
    [None, "application/json", "Application/JSON", 'application/json; charset="UTF-8"'],
)
def test_json_media_types_are_read(value: str | None) -> None:
    http.check_media_type(value)


@pytest.mark.parametrize(
    "value",
    ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin1"],
)
def test_another_media_type_is_a_415_that_names_it(value: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="application/json") as caught:
        http.check_media_type(value)
    assert caught.value.status == 415


def test_a_body_announced_over_the_limit_is_a_413_with_both_numbers() -> None:
    assert http.parse_content_length(None, 10) is None
    assert http.parse_content_length("10", 10) == 10
    with pytest.raises(PayloadTooLarge, match="11 bytes, the limit is 10 bytes"):
        http.parse_content_length("11", 10)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "ten", "٣"])
def test_a_content_length_that_is_no_number_is_a_400(value: str) -> None:
    with pytest.raises(InvalidRequest):
        http.parse_content_length(value, 10)


def test_the_documentation_names_every_field_and_choice() -> None:
    text = (Path(__file__).parent.parent / "docs" / "http.md").read_text()
    missing = [word for word in (*openai._FIELDS, *OVER_MAX) if f"`{word}`" not in text]
    assert missing == []
