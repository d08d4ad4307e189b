"""Captured graphs on a real GPU (`make test-gpu`); everything else is proven on the CPU."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_examples
import tiny
import torch

from shapeserve.config import AxisPolicy, ServeConfig
from shapeserve.engine import DeviceThread, Engine
from shapeserve.metrics import identities
from shapeserve.warmup.probe import TOLERANCE, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

CASES = [
    (dtype, tier, layout)
    for dtype, tier, layout in itertools.product(
        ("float32", "float16", "bfloat16"), ("graph", "eager_graph"), ("padded", "packed")
    )
    # A compile costs 20 s: the compiled tier once in fp32 and once in bf16 for each layout.
    if tier == "eager_graph" or dtype != "float16"
]


def start(directory: Path, dtype: str, tier: str, layout: str, **compile_: Any) -> Engine:
    model = {
        "path": str(directory),
        "dtype": dtype,
        "layout": layout,
        "compile": {"tier": tier, **compile_},
    }
    return Engine(ServeConfig.from_dict({"models": [model]})).start()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("gpu") / "tiny", max_length=256, positions=512)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Engine]:
    with start(directory, *request.param) as engine:
        yield engine


def samples(engine: Engine, name: str, **labels: str) -> float:
    return sum(
        s.value
        for s in engine.metrics.samples()
        if s.name == f"shapeserve_{name}" and labels.items() <= s.labels.items()
    )


def vector(result: Any) -> np.ndarray:
    found: np.ndarray = result.outputs["sentence_embedding"]
    return found


def expected(engine: Engine, text: str) -> list[np.ndarray]:
    """The eager answer to a text alone and unpadded."""
    (prepared,) = engine.prepare([text])
    row = prepared.rows[0].arrays
    return engine.on_device(lambda: engine._ready_parts().probe.answer(row))


def test_every_bucket_is_captured_and_sealed(engine: Engine) -> None:
    tiers = {v.tier.value for v in engine.runner.variants.all.values()}
    assert tiers == {"graph"}
    assert samples(engine, "captures_total", outcome="captured") == len(engine.grid)
    assert samples(engine, "graph_pool_bytes") > 0


def test_i4_mixed_lengths_in_graphs_equal_the_unpadded_eager_answers(engine: Engine) -> None:
    texts = [tiny.text_of(3 + (17 * i) % 300, seed=i) for i in range(200)]
    results = engine.run(texts)
    modes = {r.mode.value for r in results}
    assert modes == ({"graph", "fallback"} if "batch" in engine.grid.axes else {"graph"})
    for text, result in list(zip(texts, results, strict=True))[::10]:
        error = relative_error([vector(result)], expected(engine, text))
        assert error < TOLERANCE[engine.spec.dtype]
    assert identities(engine.metrics.samples()) == []
    assert samples(engine, "recompiles_total") == 0


def test_i4_poisoned_buffers_between_replays_change_nothing(engine: Engine) -> None:
    texts = [tiny.text_of(3 + (11 * i) % 60, seed=i) for i in range(24)]
    first = engine.run(texts)
    for _ in range(3):
        engine.on_device(engine.runner.layout.poison)
        for a, b in zip(first, engine.run(texts), strict=True):
            assert relative_error([vector(b)], [vector(a)]) < TOLERANCE[engine.spec.dtype]


def test_i4_a_nan_output_of_one_replay_is_gone_in_the_next(engine: Engine) -> None:
    text = tiny.text_of(12)
    (before,) = engine.run([text])

    def poison_outputs() -> None:
        pool = torch.full((64, 1024, 1024), float("nan"), device=engine.runner.device)
        del pool  # freed blocks hold NaN

    engine.on_device(poison_outputs)
    (after,) = engine.run([text])
    assert relative_error([vector(after)], [vector(before)]) < TOLERANCE[engine.spec.dtype]


def test_i5_ten_two_ten_rows_replay_to_the_same_vectors(engine: Engine) -> None:
    texts = [tiny.text_of(10, seed=i) for i in range(10)]
    first = engine.run(texts)
    kept = [vector(r).copy() for r in first]
    engine.run(texts[:2])
    again = engine.run(texts)
    for a, b, c in zip(first, kept, again, strict=True):
        assert np.array_equal(vector(a), b)
        assert relative_error([vector(c)], [b]) < TOLERANCE[engine.spec.dtype]


def test_i5_i6_overlapping_batches_give_every_row_its_own_answer(engine: Engine) -> None:
    texts = [tiny.text_of(3 + (7 * i) % 90, seed=i) for i in range(1500)]
    alone = {text: vector(engine.run([text])[0]) for text in texts[:40]}

    async def traffic() -> list[list[Any]]:
        parts = [texts[i::15] for i in range(15)]
        return await asyncio.gather(*(engine.submit_many(part) for part in parts))

    for i, results in enumerate(asyncio.run(traffic())):
        for text, result in zip(texts[i::15], results, strict=True):
            if text in alone:
                error = relative_error([vector(result)], [alone[text]])
                assert error < TOLERANCE[engine.spec.dtype]
    assert identities(engine.metrics.samples()) == []


def test_an_exhausted_budget_leaves_buckets_compiled_named_and_counted(directory: Path) -> None:
    with start(directory, "float16", "eager_graph", "padded", graph_memory_fraction=1e-5) as engine:
        refused = samples(engine, "captures_total", outcome="refused")
        assert 0 < refused < len(engine.grid)
        eager = [v for v in engine.runner.variants.all.values() if v.degraded]
        assert len(eager) == refused == samples(engine, "variants", state="degraded")
        (result,) = engine.run([tiny.text_of(12)])
        assert np.isfinite(vector(result)).all()


def test_a_bucket_that_cannot_be_captured_leaves_the_others_captured() -> None:
    """The largest is captured first; it waits for a value of the device."""
    model = tiny.module_config(
        "waits_when_long",
        policy={"seq": {"explicit": [8, 64]}, "batch": {"explicit": [2]}},
        limits={"max_length": {"seq": 64}, "hard_limit": {"seq": 64}},
        compile={"tier": "eager_graph"},
    )
    with Engine(ServeConfig.from_dict({"models": [model]})).start() as engine:
        tiers = {b.label: v.tier.value for b, v in engine.runner.variants.all.items()}
        assert tiers == {"batch=2,seq=8": "graph", "batch=2,seq=64": "eager"}
        assert samples(engine, "captures_total", outcome="failed") == 1
        short, long = (np.arange(1, 1 + n) for n in (5, 60))
        modes = [r.mode.value for r in engine.run([{"ids": short}, {"ids": long}])]
        assert modes == ["graph", "eager"]


def test_token_outputs_travel_back_without_their_padding() -> None:
    model = tiny.module_config("masked_tokens", compile={"tier": "eager_graph"})
    with Engine(ServeConfig.from_dict({"models": [model]})).start() as engine:
        rows = [np.arange(1, 3 + i % 9) for i in range(30)]
        results = engine.run([{"ids": row} for row in rows])
        for row, result in zip(rows, results, strict=True):
            assert result.outputs["tokens"].shape == (len(row), 8)
            assert np.isfinite(result.outputs["tokens"]).all()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_i4_i5_two_models_share_a_gpu_while_the_grid_of_one_is_replaced(
    directory: Path, tmp_path: Path, layout: str
) -> None:
    # More new grids than torch has streams: one frees its graphs while the other's are replayed.
    other = tiny.write_model(tmp_path / "other", max_length=256, positions=512, seed=1)
    device = DeviceThread()
    compile_ = {"tier": "eager_graph"}
    stays, swapped = (
        Engine(
            ServeConfig.from_dict(
                {"models": [{"path": str(path), "layout": layout, "compile": compile_}]}
            ),
            device=device,
        ).start()
        for path in (directory, other)
    )
    texts = [tiny.text_of(3 + (17 * i) % 200, seed=i) for i in range(60)]
    answers = [expected(stays, text) for text in texts]
    axis = "tokens" if layout == "packed" else "seq"
    with stays, swapped:
        for i in range(34):
            last = 512 if axis == "tokens" else 256
            swapped.swap_policy({axis: AxisPolicy(explicit=(64 + 2 * i, last))})
            gc.collect()
            for engine in (swapped, stays):
                results = engine.run(texts)
            for result, answer in zip(results, answers, strict=True):
                assert relative_error([vector(result)], answer) < TOLERANCE["float32"]
        (prepared,) = swapped.run(texts[:1])
        assert relative_error([vector(prepared)], expected(swapped, texts[0])) < 1e-4
        for engine in (stays, swapped):
            assert identities(engine.metrics.samples()) == []
            assert samples(engine, "recompiles_total") == 0


@pytest.mark.parametrize(
    ("tier", "backend"), [("eager_graph", "eager"), ("graph", "eager"), ("graph", "inductor")]
)
@pytest.mark.parametrize("name", ["image_encoder", "audio_encoder"])
def test_i4_images_and_audio_in_graphs_equal_the_unpadded_eager_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, tier: str, backend: str
) -> None:
    config, trace = test_examples.small(tmp_path, name, tier, backend)
    assert test_examples.run.main([str(config), str(trace)]) == 0
    shown = capsys.readouterr().out.split()
    assert "graph" in shown
    assert "fallback" in shown  # one row is beyond the grid
