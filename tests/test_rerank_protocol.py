"""Rerank and classify without a server: fields to checked values or errors, results to bytes."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.errors import InvalidRequest, RequestError
from shapeserve.models import Head, TextPair
from shapeserve.protocols import classify, rerank
from shapeserve.protocols.classify import read_classify, render_classify
from shapeserve.protocols.openai import ModelInfo, by_name, check_task
from shapeserve.protocols.rerank import read_rerank, render_rerank
from shapeserve.protocols.scores import ACTIVATIONS

RANKER = ModelInfo("ranker", max_rows=4, head=Head(("LABEL_0",), "sigmoid", "sigmoid"))
RAW = ModelInfo("raw", max_rows=4, head=Head(("LABEL_0",), "sigmoid", "identity"))
MOOD = ModelInfo("mood", max_rows=4, head=Head(("bad", "good", "so-so"), "softmax", None))
TAGS = ModelInfo("tags", max_rows=4, head=Head(("a", "b"), "sigmoid", None))
MINI = ModelInfo("mini", dim=4)
MODELS = by_name([RANKER, RAW, MOOD, TAGS, MINI])


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


def result(*logits: float, **kwargs: Any) -> FakeResult:
    return FakeResult({"logits": np.array(logits, dtype=np.float32)}, **kwargs)


def ranked(
    *logits: float, model: ModelInfo = RANKER, **fields: Any
) -> tuple[dict[str, Any], list[int]]:
    documents = [f"d{i}" for i in range(len(logits))]
    request = read_rerank({"query": "q", "documents": documents, **fields}, model)
    content = json.loads(render_rerank(request, [result(x) for x in logits]).body)
    return content, [item["index"] for item in content["results"]]


def classified(
    *rows: tuple[float, ...], model: ModelInfo = MOOD, **fields: Any
) -> list[dict[str, Any]]:
    request = read_classify({"input": ["x"] * len(rows), **fields}, model)
    content = json.loads(render_classify(request, [result(*row) for row in rows]).body)
    assert content["labels"] == list(request.head.labels)
    return list(content["data"])


# --- rerank ---------------------------------------------------------------------------------------


def test_documents_are_strings_or_objects_and_become_pairs_with_the_query() -> None:
    request = read_rerank({"query": "q", "documents": ["a", {"text": "b"}]}, RANKER)
    assert request.samples == [TextPair("q", "a"), TextPair("q", "b")]
    assert (request.top_n, request.return_documents, request.raw_scores) == (2, False, False)
    assert request.over_max is None


def test_results_are_sorted_by_score_and_equal_ones_by_index() -> None:
    content, order = ranked(-1, 2, 0.5, 2)
    assert order == [1, 3, 2, 0]
    scores = [item["relevance_score"] for item in content["results"]]
    assert scores == [pytest.approx(1 / (1 + math.exp(-x))) for x in (2, 2, 0.5, -1)]
    assert content["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    assert (content["model"], content["object"]) == ("ranker", "list")


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=4), st.booleans())
def test_scores_never_rise_along_the_list_and_saturated_ones_keep_their_order(
    logits: list[float], raw: bool
) -> None:
    content, order = ranked(*logits, raw_scores=raw)
    scores = [item["relevance_score"] for item in content["results"]]
    assert scores == sorted(scores, reverse=True)
    assert order == sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert all(math.isfinite(score) for score in scores)


@pytest.mark.parametrize(("top_n", "kept"), [(None, 3), (1, 1), (3, 3), (100, 3)])
def test_top_n_keeps_the_best_and_may_be_more_than_there_are(top_n: int | None, kept: int) -> None:
    content, order = ranked(0, 2, 1, top_n=top_n)
    assert order == [1, 2, 0][:kept]
    assert content["usage"]["total_tokens"] == 15  # all of them were read


def test_documents_are_returned_only_if_asked_for() -> None:
    content, _ = ranked(0, 2)
    assert [sorted(item) for item in content["results"]] == [["index", "relevance_score"]] * 2
    content, _ = ranked(0, 2, return_documents=True)
    assert [item["document"] for item in content["results"]] == [{"text": "d1"}, {"text": "d0"}]


def test_raw_scores_are_logits_and_so_are_those_of_a_model_without_activation() -> None:
    for content, _ in (ranked(1.5, raw_scores=True), ranked(1.5, model=RAW)):
        assert content["results"][0]["relevance_score"] == 1.5


def test_a_cut_document_says_so_and_the_headers_count_it() -> None:
    request = read_rerank({"query": "q", "documents": ["a", "b"]}, RANKER)
    reply = render_rerank(request, [result(1), result(2, truncated_from=600)])
    best, other = json.loads(reply.body)["results"]
    assert (best["truncated_from"], "truncated_from" in other) == (600, False)
    assert reply.headers["x-shapeserve-truncated"] == "1"


# --- classify -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "samples"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ({"text": "a", "text_pair": "b"}, [TextPair("a", "b")]),
        (["a", {"text_pair": "b", "text": "c"}], ["a", TextPair("c", "b")]),
    ],
)
def test_texts_and_pairs_become_rows(value: Any, samples: list[Any]) -> None:
    assert read_classify({"input": value}, MOOD).samples == samples


def test_each_row_has_its_best_label_and_the_probability_of_all() -> None:
    first, second = classified((0, 2, 1), (5, 5, 5))
    e = [math.exp(x) for x in (0, 2, 1)]
    assert first == {
        "index": 0,
        "label": "good",
        "probs": [pytest.approx(x / sum(e)) for x in e],
        "num_classes": 3,
    }
    assert (second["index"], second["label"]) == (1, "bad")
    assert sum(second["probs"]) == pytest.approx(1)


def test_labels_that_do_not_exclude_each_other_have_scores_of_their_own() -> None:
    (row,) = classified((3, -1), model=TAGS)
    assert row["probs"] == [pytest.approx(1 / (1 + math.exp(-x))) for x in (3, -1)]


def test_raw_scores_of_labels_are_logits() -> None:
    (row,) = classified((0, 2, 1), raw_scores=True)
    assert row["logits"] == [0, 2, 1]
    assert "probs" not in row


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_no_activation_overflows(extreme: float) -> None:
    logits = np.array([extreme, 0.0])
    for name, activation in ACTIVATIONS.items():
        assert np.isfinite(activation(logits)).all(), name


# --- refusals -------------------------------------------------------------------------------------

Q: dict[str, Any] = {"query": "q", "documents": ["a"]}
BAD_RERANK: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"documents": ["a"]}, "query", ["missing"]),
    (Q | {"query": None}, "query", ["`query` is null"]),
    (Q | {"query": ["q"]}, "query", ["a list"]),
    ({"query": "q"}, "documents", ["missing"]),
    (Q | {"documents": []}, "documents", ["an empty list"]),
    (Q | {"documents": "a"}, "documents", ["a string", "list of strings"]),
    (Q | {"documents": {"text": "a"}}, "documents", ["an object"]),
    (Q | {"documents": None}, "documents", ["`documents` is null"]),
    (
        Q | {"documents": ["a", 3, None]},
        "documents[1]",
        ["documents[1] is a number", "[2] is null"],
    ),
    (Q | {"documents": [{"text": 1}]}, "documents[0]", ["has a `text` that is a number"]),
    (Q | {"documents": [{"body": "a"}]}, "documents[0]", ["'body' instead of `text`"]),
    (Q | {"documents": [{}]}, "documents[0]", ["no key instead"]),
    (Q | {"documents": [{"text": "a", "title": "b"}]}, "documents[0]", ["'title'"]),
    (Q | {"documents": ["a"] * 5}, "documents", ["5 items", "limit is 4"]),
    (Q | {"top_n": 0}, "top_n", ["0", "from 1 on"]),
    (Q | {"top_n": -1}, "top_n", ["-1"]),
    (Q | {"top_n": 1.0}, "top_n", ["1.0"]),
    (Q | {"top_n": True}, "top_n", ["true"]),
    (Q | {"return_documents": 1}, "return_documents", ["1", "true or false"]),
    (Q | {"raw_scores": "yes"}, "raw_scores", ["'yes'"]),
    (Q | {"over_max": "split"}, "over_max", ["'split'", "fallback, truncate, reject"]),
    (Q | {"truncate": True, "over_max": "reject"}, "over_max", ["only one"]),
    (Q | {"user": 3}, "user", ["a number"]),
    (Q | {"texts": ["a"]}, "texts", ["unknown field 'texts'", "documents"]),
]
BAD_CLASSIFY: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "input", ["missing"]),
    ({"input": []}, "input", ["an empty list"]),
    ({"input": 3}, "input", ["a number", "`text_pair`"]),
    ({"input": None}, "input", ["`input` is null"]),
    ({"input": [1, 2]}, "input[0]", ["input[0] is a number"]),
    ({"input": [["a", "b"]]}, "input[0]", ["is a list", "`text_pair`"]),
    ({"input": {"text": "a"}}, "input[0]", ["'text' instead of `text` and `text_pair`"]),
    ({"input": {"text": "a", "text_pair": 3}}, "input[0]", ["`text_pair` that is a number"]),
    ({"input": {"text": None, "text_pair": "a"}}, "input[0]", ["`text` that is null"]),
    ({"input": ["a"] * 5}, "input", ["5 items", "limit is 4"]),
    ({"input": "a", "raw_scores": 0}, "raw_scores", ["0"]),
    ({"input": "a", "over_max": "split"}, "over_max", ["'split'"]),
    ({"input": "a", "dimensions": 3}, "dimensions", ["unknown field"]),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_RERANK)
def test_a_bad_rerank_request_is_a_400_that_names_the_item(
    fields: dict[str, Any], param: str, words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_rerank(fields, RANKER)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert [word for word in words if word not in caught.value.message] == []


@pytest.mark.parametrize(("fields", "param", "words"), BAD_CLASSIFY)
def test_a_bad_classify_request_is_a_400_that_names_the_item(
    fields: dict[str, Any], param: str, words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_classify(fields, MOOD)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert [word for word in words if word not in caught.value.message] == []


@pytest.mark.parametrize(
    ("model", "task", "others"),
    [
        (MINI, "rerank", "ranker, raw"),
        (MOOD, "rerank", "ranker, raw"),
        (MINI, "classify", "mood, ranker, raw, tags"),
        (RANKER, "make embeddings", "mini"),
    ],
)
def test_a_model_asked_for_what_it_does_not_do_is_a_400_naming_those_that_do(
    model: ModelInfo, task: Any, others: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"does not {task}; .* do: {others}\\.") as caught:
        check_task(model, task, MODELS)
    assert caught.value.param == "model"
    with pytest.raises(InvalidRequest, match="do: none"):
        check_task(model, task, by_name([model]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**63) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["text", "text_pair", "x"]), inner)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(sorted(rerank._FIELDS | classify._FIELDS)), json_values),
    st.sampled_from([(read_rerank, RANKER), (read_classify, MOOD)]),
)
def test_any_fields_at_all_are_accepted_or_refused_by_a_request_error(
    fields: dict[str, Any], endpoint: Any
) -> None:
    read, model = endpoint
    try:
        rows = len(read(fields, model).samples)
    except RequestError as error:
        rows, status = 1, error.status
    else:
        status = 400
    assert status == 400
    assert 1 <= rows <= model.max_rows


def test_the_documentation_names_every_field_and_choice() -> None:
    text = (Path(__file__).parent.parent / "docs" / "http.md").read_text()
    for module, heading in ((rerank, "/v1/rerank"), (classify, "/v1/classify")):
        section = text.split(f"## `POST {heading}`", 1)[1].split("\n## ", 1)[0]
        missing = [w for w in (*module._FIELDS, *rerank.OVER_MAX) if f"`{w}`" not in section]
        assert missing == []
