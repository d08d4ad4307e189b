"""The vector of every token: un-padded for each row, the same in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny
import torch
import transformers
from torch import Tensor

from shapeserve.buckets import TOKENS
from shapeserve.config import ServeConfig
from shapeserve.engine import Engine
from shapeserve.engine import modules as modules_module
from shapeserve.errors import ConfigError
from shapeserve.layout import RaggedLayout
from shapeserve.metrics import identities
from shapeserve.models import describe, load
from shapeserve.models.packed import bounded

CPU = torch.device("cpu")
POLICIES: dict[str, dict[str, Any]] = {
    "padded": {"seq": {"explicit": [8, 16, 24]}, "batch": {"explicit": [1, 2, 4]}},
    "packed": {TOKENS: {"explicit": [16, 32]}},
}
POLICIES["ragged"] = POLICIES["padded"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("tokens") / "m", kind="roberta")


def config_of(directory: Path, layout: str = "padded", **settings: Any) -> ServeConfig:
    where = {"layout": "packed"} if layout == "packed" else {}
    options = {"token_embeddings": True, "policy": POLICIES[layout], **where, **settings}
    return engines.text_config(directory, **options)


@pytest.fixture(scope="module", params=POLICIES)
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ragged":  # on a GPU; it works on the CPU as well

            def ragged(spec: Any, config: Any, grid: Any, device: Any) -> RaggedLayout:
                return RaggedLayout(spec, 8192, grid.max_size("batch"), device)

            patch.setattr(modules_module, "make_layout", ragged)
        with engines.started(config_of(directory, request.param)) as started:
            assert isinstance(started.runner.layout, RaggedLayout) == (request.param == "ragged")
            yield started


def hidden_states(directory: Path, ids: Tensor) -> np.ndarray:
    """What transformers gives for one row alone and unpadded."""
    model = transformers.AutoModel.from_pretrained(directory).eval()
    with torch.no_grad():
        hidden: Tensor = model(input_ids=ids[None]).last_hidden_state[0]
    return hidden.numpy()


def ids_of(engine: Engine, text: str, **options: Any) -> list[Tensor]:
    (prepared,) = engine.prepare([text], **options)
    return [torch.from_numpy(row.arrays.arrays["input_ids"]) for row in prepared.rows]


def test_i4_every_token_has_its_unpadded_vector_in_every_layout_and_beside_any_neighbour(
    engine: Engine, directory: Path
) -> None:
    lengths = [3 + (5 * i) % 22 for i in range(30)] + [40]  # the last one runs in the fallback
    texts = [tiny.text_of(n, seed=n) for n in lengths]
    results = engine.run(texts)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    for text, length, result in zip(texts, lengths, results, strict=True):
        tokens = result.outputs["token_embeddings"]
        assert tokens.shape == (length, 32)
        (ids,) = ids_of(engine, text)
        with torch.no_grad():
            expected = model(input_ids=ids[None]).last_hidden_state[0].numpy()
        np.testing.assert_allclose(tokens, expected, atol=1e-4)
        pooled = expected.mean(0) / np.linalg.norm(expected.mean(0))
        np.testing.assert_allclose(result.outputs["sentence_embedding"], pooled, atol=1e-5)
    assert results[-1].mode == "fallback"
    assert identities(engine.metrics.samples()) == []
    assert engines.value(engine, "recompiles_total") == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("over_max", ["truncate", "split"])
async def test_a_cut_text_has_the_vectors_of_what_is_left_and_a_split_one_of_all_pieces(
    engine: Engine, directory: Path, over_max: str
) -> None:
    text = tiny.text_of(60, seed=3)
    result = await engine.submit(text, over_max=over_max)
    rows = ids_of(engine, text, over_max=over_max)
    assert [len(row) for row in rows] == ([24] if over_max == "truncate" else [24, 24, 16])
    expected = np.concatenate([hidden_states(directory, row) for row in rows])
    np.testing.assert_allclose(result.outputs["token_embeddings"], expected, atol=1e-4)
    assert result.length == len(expected)


def test_the_vectors_are_the_callers_own(engine: Engine) -> None:
    first, second = engine.run([tiny.text_of(5), tiny.text_of(7)])
    kept = second.outputs["token_embeddings"].copy()
    first.outputs["token_embeddings"][:] = 9.0
    engine.run([tiny.text_of(6)] * 3)
    assert np.array_equal(second.outputs["token_embeddings"], kept)


def test_padded_rows_with_bounds_have_the_vectors_of_the_mask(directory: Path) -> None:
    model = load(config_of(directory).models[0], CPU)
    _, padded = bounded(model.module.encoder, "mean", normalize=True, token_embeddings=True)
    assert padded is not None
    mask = (torch.arange(9)[None] < torch.tensor([9, 1, 4, 7])[:, None]).long()
    ids = torch.randint(5, 40, (4, 9), generator=torch.Generator().manual_seed(0))
    ids = torch.where(mask.bool(), ids, model.spec.pad_token_id or 0)
    with torch.no_grad():
        ours, theirs = padded(ids, mask)[1], model.module(ids, mask)[1]
    assert torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-5)


def test_they_are_off_by_default_and_come_after_the_vector_of_the_text(directory: Path) -> None:
    spec = describe(engines.text_config(directory).models[0])
    assert [*spec.outputs] == ["sentence_embedding"]
    spec = describe(config_of(directory).models[0])
    assert [*spec.outputs] == ["sentence_embedding", "token_embeddings"]
    assert spec.outputs["token_embeddings"].dims == ("batch", "seq", 32)


def test_a_module_declares_its_outputs_instead() -> None:
    with pytest.raises(ConfigError, match=r"token_embeddings is for text encoders \(path\)"):
        engines.module_config("poisonous", token_embeddings=True)
