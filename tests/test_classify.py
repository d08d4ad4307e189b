"""Classification models and cross-encoders: equal to transformers, alone and among others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny
import torch
import transformers

from shapeserve.config import ServeConfig
from shapeserve.engine import Engine, Result, TextPair
from shapeserve.errors import ConfigError, InvalidRequest, ModelError
from shapeserve.metrics import identities
from shapeserve.models import Head, describe, load
from shapeserve.models.head import read_head
from shapeserve.plan import plan
from shapeserve.warmup import Probe

SEQ = [8, 16, 24]
POLICY = {"seq": {"explicit": SEQ}, "batch": {"explicit": [1, 2, 4]}}
POSITIONS = 32
# kind -> labels; the first has token types, the last reads the last token of a row.
KINDS = {"bert": 1, "roberta": 3, "distilbert": 2, "qwen3": 1}
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@dataclass
class Reference:
    """transformers' own tokenizer and model of a directory."""

    directory: Path

    def __post_init__(self) -> None:
        auto = transformers.AutoModelForSequenceClassification
        self.model = auto.from_pretrained(self.directory).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory)
        self.types = getattr(self.model.config, "type_vocab_size", 0) > 1

    def encode(self, text: str, pair: str | None = None, **options: Any) -> dict[str, Any]:
        options = {"truncation": False, "padding": False, **options}
        encoded = dict(self.tokenizer(text, pair, return_tensors="pt", **options))
        if not self.types:
            del encoded["token_type_ids"]
        return encoded

    def logits(self, text: str, pair: str | None = None, **options: Any) -> np.ndarray:
        with torch.no_grad():
            return self.model(**self.encode(text, pair, **options)).logits[0].numpy()


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("classify") / request.param
    kind: str = request.param
    return tiny.write_classifier(where, kind=kind, labels=KINDS[kind], positions=POSITIONS)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with engines.started(config_of(directory)) as started:
        yield started


@pytest.fixture(scope="module")
def ranker_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("ranker") / "m"
    return tiny.write_classifier(where, positions=POSITIONS, seed=3)


@pytest.fixture(scope="module")
def ranker(ranker_dir: Path) -> Iterator[Engine]:
    with engines.started(config_of(ranker_dir)) as started:
        yield started


@pytest.fixture
def broken(ranker_dir: Path, tmp_path: Path) -> Path:
    """A tiny cross-encoder to break."""
    return Path(shutil.copytree(ranker_dir, tmp_path / "m"))


def config_of(directory: Path, **settings: Any) -> ServeConfig:
    limits = {"max_length": SEQ[-1]}
    return engines.text_config(directory, **{"policy": POLICY, "limits": limits, **settings})


def words(n: int, seed: int = 0) -> str:
    """A text of exactly ``n`` tokens, special ones apart."""
    return tiny.text_of(n + 2, seed)


def logits(result: Result) -> np.ndarray:
    return np.asarray(result.outputs["logits"])


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file, or have them "removed"."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v != "removed"}))


# --- answers --------------------------------------------------------------------------------------


def test_i4_texts_and_pairs_are_classified_as_transformers_does_in_every_bucket(
    engine: Engine, reference: Reference
) -> None:
    pairs = [(words(1 + i % 6, i), words(1 + (7 * i) % 15, 3 * i)) for i in range(24)]
    texts = [words(1 + (5 * i) % 22, i) for i in range(24)]
    # Alone first, then all together: neighbours of both kinds must change nothing.
    for text, pair in pairs[:3]:
        (result,) = engine.run([TextPair(text, pair)])
        np.testing.assert_allclose(logits(result), reference.logits(text, pair), atol=1e-4)
    results = engine.run([*(TextPair(*pair) for pair in pairs), *texts])
    expected = [reference.logits(*pair) for pair in pairs] + [reference.logits(t) for t in texts]
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(logits(result), wanted, atol=1e-4)
    lengths = [reference.encode(*pair)["input_ids"].shape[1] for pair in pairs]
    assert [r.length for r in results[: len(pairs)]] == lengths
    ran = {r.bucket.partition(",")[2] for r in results}
    assert ran == {f"seq={size}" for size in SEQ}
    assert identities(engine.metrics.samples()) == []
    assert engines.value(engine, "recompiles_total") == 0


def test_documents_rank_as_in_transformers_with_the_token_types_that_a_pair_needs(
    ranker: Engine, ranker_dir: Path
) -> None:
    reference = Reference(ranker_dir)
    query, documents = words(3), [words(n, seed=n) for n in range(2, 14)]
    expected = [float(reference.logits(query, d)[0]) for d in documents]
    got = [float(logits(r)[0]) for r in ranker.run([TextPair(query, d) for d in documents])]
    assert np.argsort(got).tolist() == np.argsort(expected).tolist()
    # The reference tells apart what a server gets wrong that sends zeros for the second text.
    zeros = []
    for document in documents:
        encoded = reference.encode(query, document)
        encoded["token_type_ids"] = torch.zeros_like(encoded["token_type_ids"])
        with torch.no_grad():
            zeros.append(float(reference.model(**encoded).logits[0, 0]))
    assert np.argsort(zeros).tolist() != np.argsort(expected).tolist()


def test_token_ids_and_arrays_are_answered_like_the_text_they_stand_for(ranker: Engine) -> None:
    (prepared,) = ranker.prepare([TextPair(words(3), words(5))])
    arrays = dict(prepared.rows[0].arrays.arrays)
    assert arrays["token_type_ids"].tolist() == [0] * 5 + [1] * 6
    pair, same = ranker.run([TextPair(words(3), words(5)), arrays])
    np.testing.assert_allclose(logits(same), logits(pair), atol=1e-5)
    text, ids = ranker.run([words(4), [2, *(tiny.VOCAB.index(w) for w in words(4).split()), 3]])
    np.testing.assert_allclose(logits(ids), logits(text), atol=1e-5)


def test_a_row_whose_logit_is_nearly_zero_is_no_reason_to_refuse_a_model(
    ranker_dir: Path,
) -> None:
    model = load(config_of(ranker_dir).models[0], "cpu")
    probe = Probe(model.spec, model.module, torch.device("cpu"))
    expected = [np.array([1e-9])]
    assert probe.error([np.array([2e-9], np.float32)], expected) < 1e-6
    # An error of the size of usual logits is one still, and so is NaN.
    assert probe.error([np.array([1.0], np.float32)], expected) > 1e-2
    assert probe.error([np.array([np.nan], np.float32)], expected) == float("inf")


# --- what is cut ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [24, 25, 31, 32, 33, 200])
def test_only_the_document_is_cut_and_the_cut_is_reported(
    ranker: Engine, ranker_dir: Path, length: int
) -> None:
    query, document = words(9), words(length - 12, seed=5)
    reference = Reference(ranker_dir)
    (prepared,) = ranker.prepare([TextPair(query, document)], over_max="truncate")
    expected = reference.encode(query, document, truncation="only_second", max_length=24)
    row = prepared.rows[0].arrays.arrays
    assert {k: v.tolist() for k, v in row.items()} == {
        k: expected[k][0].tolist() for k in ("input_ids", "token_type_ids")
    }
    assert prepared.truncated_from == (length if length > 24 else None)
    assert prepared.sizes == {"seq": length}


@pytest.mark.asyncio
async def test_a_cut_pair_is_answered_as_transformers_cuts_it(
    ranker: Engine, ranker_dir: Path
) -> None:
    pair = TextPair(words(9), words(100, seed=5))
    result = await ranker.submit(pair, over_max="truncate")
    options = {"truncation": "only_second", "max_length": 24}
    expected = Reference(ranker_dir).logits(pair.text, pair.text_pair, **options)
    np.testing.assert_allclose(logits(result), expected, atol=1e-4)
    assert (result.length, result.truncated_from) == (24, 112)


def test_a_text_alone_is_cut_like_any_other(ranker: Engine, ranker_dir: Path) -> None:
    (prepared,) = ranker.prepare([words(60)], over_max="truncate")
    expected = Reference(ranker_dir).encode(words(60), truncation=True, max_length=24)
    assert prepared.rows[0].arrays.arrays["input_ids"].tolist() == expected["input_ids"][0].tolist()


def test_a_pair_beyond_the_grid_runs_in_the_fallback_up_to_the_hard_limit(
    ranker: Engine, ranker_dir: Path
) -> None:
    pair = TextPair(words(9), words(POSITIONS - 12, seed=2))
    (result,) = ranker.run([pair])
    assert (result.mode, result.bucket, result.reason) == ("fallback", "none", "over_max")
    expected = Reference(ranker_dir).logits(pair.text, pair.text_pair)
    np.testing.assert_allclose(logits(result), expected, atol=1e-4)
    with pytest.raises(InvalidRequest, match=f"seq=33 is too long, at most {POSITIONS}") as refused:
        ranker.prepare([pair, TextPair(words(9), words(POSITIONS - 11))])
    assert (refused.value.param, refused.value.code) == ("input[1]", "too_long")


@pytest.mark.parametrize(
    ("over_max", "tokens", "most"),
    [
        (None, POSITIONS - 3, POSITIONS - 4),
        ("truncate", POSITIONS - 3, POSITIONS - 4),
        ("truncate", SEQ[-1] - 3, SEQ[-1] - 4),
        ("truncate", 20_000, POSITIONS - 4),
    ],
)
def test_a_query_that_leaves_no_room_for_a_document_is_refused_naming_the_bound(
    ranker: Engine, over_max: str | None, tokens: int, most: int
) -> None:
    pairs = [TextPair(words(tokens), words(3, seed=i)) for i in range(30)]
    message = f"has {tokens} tokens, at most {most}"
    if tokens == 20_000:
        message = f"characters, at most {128 * POSITIONS} are read"
    with pytest.raises(InvalidRequest, match=f"^query .*{message}") as refused:
        ranker.prepare(pairs, over_max=over_max, item="documents", first="query")
    assert (refused.value.param, refused.value.code) == ("query", "too_long")
    assert refused.value.message.count("query ") == 1  # not once for each document
    with pytest.raises(InvalidRequest) as refused:
        ranker.prepare(pairs, over_max=over_max)
    assert refused.value.param == "input[0].text"


def test_a_query_that_just_leaves_room_keeps_one_token_of_the_document(ranker: Engine) -> None:
    (prepared,) = ranker.prepare([TextPair(words(20), words(9))], over_max="truncate")
    assert prepared.rows[0].arrays.arrays["token_type_ids"].sum() == 2  # and its [SEP]


def test_a_query_is_refused_before_it_is_joined_to_its_documents(
    ranker: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ranker._ready_parts().tokenizer
    assert tokenizer is not None
    joined: list[Any] = []
    monkeypatch.setattr(type(tokenizer), "encode_rows", lambda _, rows: joined.extend(rows) or [])
    with pytest.raises(InvalidRequest):
        ranker.prepare([TextPair(words(100), words(3))] * 9, over_max="truncate")
    assert joined == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "param", "message"),
    [
        (TextPair(" ", "a"), "input[1].text", "is empty or holds no token"),
        (TextPair("a", "\t "), "input[1].text_pair", "is empty or holds no token"),
        (TextPair("a", "\ud800"), "input[1]", "text 1 is not valid Unicode"),
        (TextPair("\ud800", "a"), "input[1]", "text 0 is not valid Unicode"),
        (TextPair("a", "x" * 10_000), "input[1].text_pair", "10000 characters, at most 4096"),
        ("", "input[1]", "is empty or holds no token"),
        ({"input_ids": [2, 7, 3]}, "input[1]", "expected exactly"),
        (
            {"input_ids": [2, 7, 3], "token_type_ids": [0, 2, 0]},
            "input[1]",
            "token_type_ids holds 2; values are 0 to 1",
        ),
        ({"input_ids": [2, 7, 3], "token_type_ids": [0, -1, 0]}, "input[1]", "holds -1"),
        ({"input_ids": [2, 7, 3], "token_type_ids": [0, 0]}, "input[1]", "size 2 along seq"),
    ],
)
def test_a_bad_row_is_refused_with_400_naming_it_and_its_neighbour_is_not(
    ranker: Engine, sample: Any, param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        ranker.prepare([TextPair("a", "cat"), sample])
    assert (refused.value.status, refused.value.param) == (400, param)
    fine, bad = ranker.run([TextPair("a", "cat"), sample], on_error="return")
    assert isinstance(fine, Result)
    assert isinstance(bad, InvalidRequest)


def test_a_pair_is_never_split(ranker: Engine, ranker_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="use fallback, truncate or reject") as refused:
        ranker.prepare([TextPair("a", "cat")], over_max="split")
    assert refused.value.param == "over_max"
    rules = {"seq": {"over_max": "split"}}
    with pytest.raises(ConfigError, match=r"rare_shapes.seq.over_max: split makes no sense"):
        describe(config_of(ranker_dir, rare_shapes=rules).models[0])


def test_an_encoder_takes_no_pairs(tmp_path: Path) -> None:
    eager = {"tier": "eager"}
    encoder = engines.text_config(tiny.write_model(tmp_path / "m"), compile=eager, name="m")
    message = r"input\[1\] is a pair of texts, but m reads one"
    with engines.started(encoder) as engine, pytest.raises(InvalidRequest, match=message):
        engine.prepare(["a", TextPair("a", "b")])
    module, message = engines.module_config("poisonous", compile=eager), "is a text, but poisonous"
    with engines.started(module) as engine, pytest.raises(InvalidRequest, match=message):
        engine.prepare([TextPair("a", "b")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "packed", "policy": {}}, "layout: .* cannot be packed; use layout: padded"),
        ({"policy": {"tokens": {"explicit": [64]}}}, r"policy.tokens: .* cannot be packed"),
        ({"token_embeddings": True}, "token_embeddings: .* gives logits only"),
    ],
)
def test_what_no_classification_model_can_do_is_a_config_error(
    ranker_dir: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(config_of(ranker_dir, **settings).models[0])


def test_auto_pads_a_classification_model_also_on_cuda(ranker_dir: Path) -> None:
    config = config_of(ranker_dir, policy={}).models[0]
    assert config.packs("cuda")  # what it would be for an encoder
    assert plan(config, "cuda").grid.axes == ("batch", "seq")


# --- what a directory says ------------------------------------------------------------------------


def test_a_cross_encoder_is_described_by_its_own_files(ranker_dir: Path) -> None:
    spec = describe(config_of(ranker_dir).models[0])
    assert (spec.task, spec.embedding_dim, spec.pooling) == ("classify", None, None)
    assert [*spec.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert (spec.inputs["token_type_ids"].pad, spec.inputs["token_type_ids"].below) == (0, 2)
    output = spec.outputs["logits"]
    assert (output.dtype, output.dims) == ("float32", ("batch", 1))
    assert spec.head == Head(("LABEL_0",), "sigmoid", "sigmoid")
    assert (spec.max_length, spec.hard_limit) == ({"seq": 24}, {"seq": POSITIONS})


def test_the_form_that_sentence_transformers_saves_is_read(broken: Path) -> None:
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
    (broken / "modules.json").write_text(json.dumps(modules))
    task = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
    (broken / "sentence_bert_config.json").write_text(json.dumps(task))
    settings = {"activation_fn": IDENTITY, "default_prompt_name": None, "prompts": {}}
    (broken / "config_sentence_transformers.json").write_text(json.dumps(settings))
    spec = describe(config_of(broken).models[0])
    assert spec.head == Head(("LABEL_0",), "sigmoid", "identity")
    edit(broken / "sentence_bert_config.json", transformer_task="feature-extraction")
    with pytest.raises(ModelError, match="'feature-extraction' is no classification model"):
        describe(config_of(broken).models[0])


def test_an_encoder_with_a_pooling_is_one_whatever_its_architecture_says(tmp_path: Path) -> None:
    directory = tiny.write_model(tmp_path / "m")
    edit(directory / "config.json", architectures=["BertForSequenceClassification"])
    assert describe(engines.text_config(directory).models[0]).task == "embed"


def test_an_encoder_alone_in_modules_json_is_still_refused(tmp_path: Path) -> None:
    directory = tiny.write_model(tmp_path / "m")
    (only, *_) = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([only]))
    with pytest.raises(ModelError, match=r"lists Transformer; supported are"):
        describe(engines.text_config(directory).models[0])


LABELS = {"0": "bad", "1": "good", "2": "so-so"}


@pytest.mark.parametrize(
    ("config", "settings", "head"),
    [
        ({}, {}, Head(("LABEL_0", "LABEL_1"), "softmax", None)),
        ({"num_labels": 3}, {}, Head(("LABEL_0", "LABEL_1", "LABEL_2"), "softmax", None)),
        ({"id2label": LABELS}, {}, Head(("bad", "good", "so-so"), "softmax", None)),
        (
            {"id2label": LABELS, "problem_type": "multi_label_classification"},
            {},
            Head(("bad", "good", "so-so"), "sigmoid", None),
        ),
        (
            {"num_labels": 1, "problem_type": "regression"},
            {},
            Head(("LABEL_0",), "identity", "sigmoid"),
        ),
        ({"num_labels": 1}, {}, Head(("LABEL_0",), "sigmoid", "sigmoid")),
        ({"num_labels": 1}, {"activation_fn": IDENTITY}, Head(("LABEL_0",), "sigmoid", "identity")),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY}},
            {},
            Head(("LABEL_0",), "sigmoid", "identity"),
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": IDENTITY},
            {"activation_fn": SIGMOID},
            Head(("LABEL_0",), "sigmoid", "sigmoid"),
        ),
    ],
)
def test_labels_and_activations_are_those_of_transformers_and_sentence_transformers(
    config: dict[str, Any], settings: dict[str, Any], head: Head
) -> None:
    assert read_head(Path("m"), config, settings) == head


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must name the labels 0, 1, 2"),
        ({"id2label": {}}, "id2label must name"),
        ({"id2label": ["a"]}, "id2label must name"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            "'torch.nn.Tanh' is not supported",
        ),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "evil.Sigmoid"}},
            "'evil.Sigmoid' is not supported",
        ),
    ],
)
def test_a_head_that_cannot_be_served_is_refused_by_name(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_head(Path("m"), config, {})


def test_a_tokenizer_that_leaves_token_types_out_is_obeyed_as_transformers_does(
    broken: Path,
) -> None:
    names = ["input_ids", "attention_mask"]
    edit(broken / "tokenizer_config.json", model_input_names=names)
    assert "token_type_ids" not in Reference(broken).tokenizer("a", "b")
    assert [*describe(config_of(broken).models[0]).inputs] == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type_vocab_size": "removed"}, "leaves out type_vocab_size"),
        ({"pad_token_id": None}, "has no pad_token_id"),
        ({"auto_map": {"AutoModelForSequenceClassification": "m.M"}}, "auto_map"),
        ({"id2label": {"0": "a", "1": "b"}}, "cannot be loaded"),
    ],
)
def test_a_model_that_would_answer_wrongly_is_refused_with_the_remedy(
    broken: Path, changes: dict[str, Any], message: str
) -> None:
    edit(broken / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load(config_of(broken).models[0], "cpu")


def test_weights_without_the_head_are_refused_instead_of_random(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "classifier" not in name}
    save_file(kept, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 2 tensors \(classifier.bias"):
        load(config_of(broken).models[0], "cpu")


def test_a_tokenizer_with_more_token_types_than_the_model_is_refused(broken: Path) -> None:
    content = json.loads((broken / "tokenizer.json").read_text())
    content["post_processor"]["pair"][3]["Sequence"]["type_id"] = 2
    (broken / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="makes the token type 2, but the model has vectors for 2"):
        load(config_of(broken).models[0], "cpu")
