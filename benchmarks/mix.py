"""The texts of the benchmark: 85 % short queries, 15 % passages, in a seeded order.

The order is drawn in blocks of 20 (17 queries, 3 passages, shuffled), so that every stretch
of a run holds the same share of passages and arms can be compared after any duration.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

DATA_DIR = Path(__file__).parent / "data"
QUERIES_PER_BLOCK = 17
PASSAGES_PER_BLOCK = 3
CHECK_TEXTS = 8


def load_texts(file_name: str) -> list[str]:
    """Return the texts of one file of ``data/``, in file order."""
    with (DATA_DIR / file_name).open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def mixed_texts(seed: int) -> Iterator[str]:
    """Yield texts of the mix without end; the same seed gives the same order."""
    rng = random.Random(seed)
    queries = _shuffled_for_ever(load_texts("queries.jsonl"), rng)
    passages = _shuffled_for_ever(load_texts("passages.jsonl"), rng)
    while True:
        block = [queries] * QUERIES_PER_BLOCK + [passages] * PASSAGES_PER_BLOCK
        rng.shuffle(block)
        for source in block:
            yield next(source)


def check_texts() -> list[str]:
    """Return the few texts that every arm must answer alike: the shortest to the longest."""
    by_length = sorted(load_texts("queries.jsonl") + load_texts("passages.jsonl"), key=len)
    last = len(by_length) - 1
    return [by_length[last * i // (CHECK_TEXTS - 1)] for i in range(CHECK_TEXTS)]


def _shuffled_for_ever(texts: list[str], rng: random.Random) -> Iterator[str]:
    while True:
        yield from rng.sample(texts, len(texts))
