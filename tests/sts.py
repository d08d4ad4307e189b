"""The scored sentence pairs in tests/data, and how an answer to them is judged."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SPEARMAN = 0.9079
"""Of all-MiniLM-L6-v2 on these 375 pairs (sentence-transformers 6.2.0, fp32, CPU)."""


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs with a human score and the cosine that the reference gives."""

    scores: np.ndarray
    cosines: np.ndarray
    first: list[str]
    second: list[str]


def load_pairs(data_dir: Path) -> Pairs:
    with gzip.open(data_dir / "stsb_test_ccbysa_375.tsv.gz", "rt", encoding="utf-8") as file:
        header, *lines = [line.rstrip("\n").split("\t") for line in file]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    return Pairs(
        scores=np.array([float(row["score"]) for row in rows]),
        cosines=np.array([float(row["ref_cos_minilm"]) for row in rows]),
        first=[row["sentence1"] for row in rows],
        second=[row["sentence2"] for row in rows],
    )


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Row-wise cosine of two matrices of vectors."""
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(1) / norms)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse])
