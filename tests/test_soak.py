"""all-MiniLM-L6-v2 served by ``shapeserve serve``: scores at two concurrencies, 5,000 requests.

Slow: a real compile and a few thousand real requests (``make soak``).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import sts
from service_process import eventually, free_port

from shapeserve.metrics import identities, parse_samples

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

START_S = 600.0
REQUESTS = 5_000
MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> Iterator[httpx.Client]:
    port = free_port()
    config = tmp_path_factory.mktemp("service") / "service.yaml"
    config.write_text(json.dumps({"models": [{"path": str(minilm_dir)}], "serve": {"port": port}}))
    command = [sys.executable, "-m", "shapeserve.cli", "serve", str(config)]
    process = subprocess.Popen(command, start_new_session=True, env=dict(os.environ))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            eventually(lambda: _is_ready(client) or process.poll() is not None, START_S)
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def embed(client: httpx.Client, texts: list[str] | str, **fields: object) -> httpx.Response:
    return client.post("/v1/embeddings", json={"model": MODEL, "input": texts, **fields})


def vector(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array(response.json()["data"][0]["embedding"])


@pytest.mark.parametrize("concurrency", [1, 32])
def test_scored_pairs_over_http_have_the_reference_cosines_and_rank(
    client: httpx.Client, data_dir: Path, concurrency: int
) -> None:
    pairs = sts.load_pairs(data_dir)
    texts = pairs.first + pairs.second
    with ThreadPoolExecutor(concurrency) as pool:
        vectors = np.stack(list(pool.map(lambda text: vector(embed(client, text)), texts)))
    found = sts.cosines(vectors[: len(pairs.first)], vectors[len(pairs.first) :])
    assert np.abs(found - pairs.cosines).max() < 1e-5
    assert sts.spearman(found, pairs.scores) == pytest.approx(sts.SPEARMAN, abs=1e-3)


def test_i2_i7_5000_mixed_requests_add_no_recompile_and_keep_the_books(
    client: httpx.Client, data_dir: Path
) -> None:
    sentences = sts.load_pairs(data_dir).first
    rng = random.Random(7)

    def text() -> str:
        return " ".join(rng.choices(sentences, k=rng.choice([1, 1, 1, 1, 2, 5, 12, 30])))

    # Texts of 257 to 512 tokens fall back; of the longest some are too long, which is a 400.
    batches = [[text() for _ in range(rng.choice([1, 1, 1, 4]))] for _ in range(REQUESTS)]
    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(lambda texts: embed(client, texts).status_code, batches))
    assert set(codes) <= {200, 400}
    assert codes.count(200) > 0.8 * REQUESTS

    def settled() -> str | None:
        scraped = client.get("/metrics").text
        return scraped if not identities(parse_samples(scraped)) else None

    samples = parse_samples(eventually(settled))
    total = {"shapeserve_recompiles_total": 0.0, "shapeserve_nonfinite_rows_total": 0.0}
    for sample in samples:
        if sample.name in total:
            total[sample.name] += sample.value
    assert total == dict.fromkeys(total, 0.0)
