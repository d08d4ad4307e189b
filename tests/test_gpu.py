"""Captured graphs on a real GPU (`make test-gpu`); everything else is proven on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from shapeserve.config import ServeConfig
from shapeserve.engine import Engine
from shapeserve.metrics import identities
from shapeserve.warmup.probe import TOLERANCE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def start(directory: Path, dtype: str, tier: str) -> Engine:
    model = {"path": str(directory), "dtype": dtype, "compile": {"tier": tier}}
    return Engine(ServeConfig.from_dict({"models": [model]})).start()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("gpu") / "tiny", max_length=256, positions=512)


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Engine]:
    with start(directory, request.param, "graph") as engine:
        yield engine


def samples(engine: Engine, name: str) -> float:
    return sum(s.value for s in engine.metrics.samples() if s.name == f"shapeserve_{name}")


def test_every_bucket_is_captured_and_sealed(engine: Engine) -> None:
    tiers = {v.tier.value for v in engine._ready_parts().runner.variants.all.values()}
    assert tiers == {"graph"}
    assert samples(engine, "captures_total") == len(engine.grid)
    assert samples(engine, "graph_pool_bytes") > 0


def test_i4_mixed_lengths_in_graphs_equal_the_unpadded_eager_answers(engine: Engine) -> None:
    texts = [tiny.text_of(3 + (17 * i) % 300, seed=i) for i in range(200)]
    results = engine.run(texts)
    assert {r.mode.value for r in results} == {"graph", "fallback"}
    probe = engine._ready_parts().probe
    with torch.no_grad():
        for text, result in list(zip(texts, results, strict=True))[::10]:
            (prepared,) = engine.prepare([text])
            expected = probe.answer(prepared.rows[0].arrays)
            error = relative_error(list(result.outputs.values()), expected)
            assert error < TOLERANCE[engine.spec.dtype]
    assert identities(engine.metrics.samples()) == []
    assert samples(engine, "recompiles_total") == 0


def test_i5_ten_two_ten_rows_replay_to_the_same_vectors(engine: Engine) -> None:
    texts = [tiny.text_of(10, seed=i) for i in range(10)]
    first = engine.run(texts)
    kept = [r.outputs["sentence_embedding"].copy() for r in first]
    engine.run(texts[:2])
    again = engine.run(texts)
    for a, b, c in zip(first, kept, again, strict=True):
        assert np.array_equal(a.outputs["sentence_embedding"], b)
        assert relative_error([c.outputs["sentence_embedding"]], [b]) < 1e-3
