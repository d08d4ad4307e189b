"""The arms without a server: rows per second over the same texts, in a process each.

Prints one JSON object: the seconds until the arm is ready, the rate of every pass over the texts
(the first one apart: it pays for compiles and caches), and the vectors of the check texts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import OFFLINE_ARMS, SHAPESERVE_CONFIG
from benchmarks.encoder import BATCH_ROWS, MAX_TOKENS, Encoder
from benchmarks.environment import cores, model_dir
from benchmarks.mix import check_texts, mixed_texts

EncodeAll = Callable[[list[str]], Any]  # one vector per text, in order


# Each arm imports its own library: a missing one fails one arm, and none slows another.


def eager() -> EncodeAll:
    """Batches of 32 in arrival order: the simple loop."""
    encoder = Encoder()
    return lambda texts: [vector for batch in batches(texts) for vector in encoder.encode(batch)[0]]


def sentence_transformers() -> EncodeAll:
    """The reference library; it sorts by length itself."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_dir()), device="cpu")
    model.max_seq_length = MAX_TOKENS
    return lambda texts: model.encode(texts, batch_size=BATCH_ROWS, show_progress_bar=False)


def onnxruntime() -> EncodeAll:
    """The exported model on onnxruntime, batches of 32 sorted by length in tokens."""
    from onnxruntime import InferenceSession, SessionOptions

    from benchmarks.onnx_export import INPUTS, export

    tokenizer = Encoder().tokenizer
    options = SessionOptions()
    options.intra_op_num_threads = cores()
    with tempfile.TemporaryDirectory() as directory:
        path = export(Path(directory) / "model.onnx")
        session = InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> list[Any]:
        ids = tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        order = sorted(range(len(texts)), key=lambda row: len(ids[row]))
        vectors: list[Any] = [None] * len(texts)
        for rows in batches(order):
            padded = tokenizer.pad({"input_ids": [ids[row] for row in rows]}, return_tensors="np")
            (answers,) = session.run(None, {name: padded[name] for name in INPUTS})
            for row, vector in zip(rows, answers, strict=True):
                vectors[row] = vector
        return vectors

    return encode


def shapeserve() -> EncodeAll:
    """The engine alone, with the configuration of the server arm."""
    from shapeserve import Engine, ServeConfig

    engine = Engine(ServeConfig.from_dict(SHAPESERVE_CONFIG)).start()

    def encode(texts: list[str]) -> list[Any]:
        rows: list[Any] = engine.run(texts)  # raises on a failed row
        return [next(iter(row.outputs.values())) for row in rows]

    return encode


BUILDERS = dict(
    zip(OFFLINE_ARMS, (eager, sentence_transformers, onnxruntime, shapeserve), strict=True)
)


def batches(items: list[Any]) -> Iterator[list[Any]]:
    """Cut a list into batches of 32."""
    return (items[at : at + BATCH_ROWS] for at in range(0, len(items), BATCH_ROWS))


def measure(encode: EncodeAll, texts: list[str], duration_s: float) -> dict[str, Any]:
    """Encode all texts once, then again and again until ``duration_s`` is over."""
    rates: list[float] = []
    first_pass_s = _seconds(encode, texts)
    while sum(len(texts) / rate for rate in rates) < duration_s:
        rates.append(len(texts) / _seconds(encode, texts))
    return {
        "rows": len(texts),
        "first_pass_s": first_pass_s,
        "passes_rows_per_s": rates,
        "rows_per_s": statistics.median(rates),
    }


def _seconds(encode: EncodeAll, texts: list[str]) -> float:
    start_s = time.perf_counter()
    encode(texts)
    return time.perf_counter() - start_s


def main() -> None:
    """Measure one arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=OFFLINE_ARMS)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--duration-s", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    start_s = time.perf_counter()
    encode = BUILDERS[options.arm]()
    ready_s = time.perf_counter() - start_s
    texts = list(itertools.islice(mixed_texts(options.seed), options.rows))
    result = {"ready_s": ready_s, **measure(encode, texts, options.duration_s)}
    result["check_vectors"] = np.asarray(encode(check_texts())).tolist()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
