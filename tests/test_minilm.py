"""The real model through the engine, compiled for real: scores, cosines, every bucket."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import engines
import httpx
import numpy as np
import pytest
import sts
import tritonclient.http as triton
from frontend_server import serving

from shapeserve.config import ServeConfig
from shapeserve.engine import Engine
from shapeserve.metrics import identities
from shapeserve.warmup.probe import relative_error

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def engine(minilm_dir: Path) -> Iterator[Engine]:
    config = ServeConfig.from_dict({"models": [{"path": str(minilm_dir)}]})
    with Engine(config).start() as engine:
        yield engine


def vectors(engine: Engine, texts: list[str]) -> np.ndarray:
    return np.stack([r.outputs["sentence_embedding"] for r in engine.run(texts)])


def test_the_default_grid_took_at_most_two_compiles_with_packed_weights(engine: Engine) -> None:
    assert 1 <= engines.value(engine, "compiles_total", stage="dynamo") <= 2
    assert engine._ready_parts().programs.frozen
    assert engines.value(engine, "variants", state="degraded") == 0
    assert engine.spec.name == "all-MiniLM-L6-v2"
    assert engine.grid.max_size("seq") == 256


def test_scored_pairs_have_the_reference_cosines_and_rank(engine: Engine, data_dir: Path) -> None:
    pairs = sts.load_pairs(data_dir)
    found = sts.cosines(vectors(engine, pairs.first), vectors(engine, pairs.second))
    assert np.abs(found - pairs.cosines).max() < 1e-5
    assert sts.spearman(found, pairs.scores) == pytest.approx(sts.SPEARMAN, abs=1e-3)


@pytest.mark.slow
def test_i4_one_text_gives_the_same_vector_in_every_bucket_that_covers_it(
    engine: Engine, data_dir: Path
) -> None:
    pairs = sts.load_pairs(data_dir)
    prepared = engine.prepare(pairs.first[:8])
    rows = [sample.rows[0].arrays for sample in prepared]
    alone = [engines.alone(engine, dict(r.arrays), dict(r.sizes))[0] for r in rows]
    longest = max(row.sizes["seq"] for row in rows)
    runner = engine.runner

    def run_everywhere() -> float:
        worst = 0.0
        for bucket in engine.grid.buckets:
            batch, seq = bucket.size("batch"), bucket.size("seq")
            if seq < longest:
                continue
            got = runner.execute(rows[:batch], bucket.as_dict(), fallback=False).outputs
            for outputs, expected in zip(got, alone, strict=False):
                worst = max(worst, relative_error(list(outputs.values()), [expected]))
        return worst

    assert engine.on_device(run_everywhere) < 1e-5


def test_lengths_around_the_model_limits(engine: Engine) -> None:
    words = ["word"] * 510
    for tokens, bucket in [(256, "batch=1,seq=256"), (257, "none"), (512, "none")]:
        (result,) = engine.run([" ".join(words[: tokens - 2])])
        assert (result.length, result.bucket) == (tokens, bucket)


def test_i2_i7_real_texts_add_no_recompile_and_keep_the_books(
    engine: Engine, data_dir: Path
) -> None:
    pairs = sts.load_pairs(data_dir)
    texts = [" ".join(pairs.first[i : i + 1 + i % 20]) for i in range(200)]
    vectors(engine, texts)
    assert engines.value(engine, "recompiles_total") == 0
    assert identities(engine.metrics.samples()) == []


def test_both_protocols_give_the_eager_vectors_of_the_same_tokens(
    engine: Engine, data_dir: Path
) -> None:
    name, texts = engine.spec.name, sts.load_pairs(data_dir).first[:12]
    rows = [sample.rows[0].arrays for sample in engine.prepare(texts)]
    expected = np.stack([engines.alone(engine, dict(r.arrays), dict(r.sizes))[0] for r in rows])
    lengths = [row.sizes["seq"] for row in rows]
    ids = np.zeros((len(rows), max(lengths)), np.int64)
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    for i, row in enumerate(rows):
        ids[i, : lengths[i]] = row.arrays["input_ids"]
    inputs = [
        triton.InferInput("input_ids", list(ids.shape), "INT64").set_data_from_numpy(ids),
        triton.InferInput("attention_mask", list(ids.shape), "BOOL").set_data_from_numpy(mask),
    ]
    with serving({name: engine}) as url, triton.InferenceServerClient(url) as client:
        over_oip = client.infer(name, inputs).as_numpy("sentence_embedding")
        asked = {"model": name, "input": texts}
        answer = httpx.post(f"http://{url}/v1/embeddings", json=asked, timeout=60).json()
    over_openai = np.array([item["embedding"] for item in answer["data"]])
    for got in (over_oip, over_openai):
        assert relative_error([got], [expected]) < 1e-5


def examples(language: str, url: str) -> list[str]:
    """The examples of docs/http.md, made to ask ``url``."""
    page = (Path(__file__).parent.parent / "docs" / "http.md").read_text()
    found = re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)
    return [code.replace("localhost:8000", url) for code in found if "localhost:8000" in code]


def test_the_python_example_of_the_page_prints_what_it_says(engine: Engine) -> None:
    with serving({engine.spec.name: engine}) as url:
        (code,) = examples("python", url)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "http.md", "exec"), {})
    said = re.findall(r"print\(.*\)  # (.*)", code)
    assert printed.getvalue().splitlines() == said


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_example_of_the_page_runs(engine: Engine) -> None:
    with serving({engine.spec.name: engine}) as url:
        (code,) = [code for code in examples("bash", url) if "/infer" in code]
        done = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=True)
    metadata, end = json.JSONDecoder().raw_decode(done.stdout)
    assert metadata["name"] == engine.spec.name
    assert json.loads(done.stdout[end:])["outputs"][0]["shape"] == [2, 384]
