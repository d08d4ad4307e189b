"""Pairs, logits and token vectors out of captured graphs on a real GPU (`make test-gpu`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from shapeserve.config import ServeConfig
from shapeserve.engine import Engine, TextPair
from shapeserve.layout import PackedLayout, PaddedLayout, RaggedLayout
from shapeserve.metrics import identities
from shapeserve.warmup.probe import TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

# The first is told token types, which travel beside the ids; the second is padded on the device.
CLASSIFIERS = {"bert": PaddedLayout, "roberta": RaggedLayout}
ENCODERS = {"padded": RaggedLayout, "packed": PackedLayout}


def start(directory: Path, tier: str, **settings: Any) -> Engine:
    model = {"path": str(directory), "compile": {"tier": tier}, **settings}
    return Engine(ServeConfig.from_dict({"models": [model]})).start()


@pytest.fixture(params=[(kind, tier) for kind in CLASSIFIERS for tier in ("graph", "eager_graph")])
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    kind, tier = request.param
    directory = tiny.write_classifier(tmp_path / "m", kind=kind, labels=3, positions=128)
    with start(directory, tier) as engine:
        assert isinstance(engine.runner.layout, CLASSIFIERS[kind])
        yield engine


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    directory = tiny.write_model(tmp_path / "m", max_length=96, positions=128)
    with start(directory, "eager_graph", layout=request.param, token_embeddings=True) as engine:
        assert isinstance(engine.runner.layout, ENCODERS[request.param])
        yield engine


def check(engine: Engine, samples: list[Any]) -> None:
    """Every answer is the eager one of the row alone and unpadded."""
    results = engine.run(samples)
    probe = engine._ready_parts().probe
    for sample, result in zip(samples, results, strict=True):
        (prepared,) = engine.prepare([sample])
        row = prepared.rows[0].arrays
        expected = engine.on_device(partial(probe.answer, row))
        error = probe.error([*result.outputs.values()], expected)
        assert error < TOLERANCE[engine.spec.dtype]
    assert {str(result.mode) for result in results} == {"graph"}
    assert identities(engine.metrics.samples()) == []


def test_i4_texts_and_pairs_out_of_graphs_have_the_unpadded_logits(classifier: Engine) -> None:
    pairs = [
        TextPair(tiny.text_of(3 + i % 9, i), tiny.text_of(3 + (7 * i) % 90, i)) for i in range(40)
    ]
    check(classifier, [*pairs, *(tiny.text_of(3 + (5 * i) % 90, i) for i in range(40))])


def test_i4_token_vectors_out_of_graphs_are_the_unpadded_ones(encoder: Engine) -> None:
    check(encoder, [tiny.text_of(3 + (7 * i) % 90, seed=i) for i in range(60)])
