"""Calls of the Open Inference Protocol over gRPC, by Triton's own client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def texts_input(texts: Sequence[str]) -> Any:
    made = triton.InferInput("text", [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array([text.encode() for text in texts], object))
    return made


def ids_input(rows: Sequence[Sequence[int]]) -> list[Any]:
    """Token ids padded to the longest row, and the mask that says so."""
    width = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    made = []
    for name, array in (("input_ids", ids), ("attention_mask", mask)):
        made.append(triton.InferInput(name, list(array.shape), "INT64"))
        made[-1].set_data_from_numpy(array)
    return made


def vectors(result: Any) -> np.ndarray:
    array: np.ndarray = result.as_numpy("sentence_embedding")
    return array


def fake_vectors(texts: Sequence[str]) -> np.ndarray:
    """What ``FakeEngine`` answers: vectors made of the numbers of words."""
    rows = np.array([[3, 0, 4, len(text.split())] for text in texts], np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def status(error: triton.InferenceServerException) -> str:
    """``StatusCode.NOT_FOUND`` -> ``NOT_FOUND``."""
    return str(error.status()).removeprefix("StatusCode.")


def trailing(error: triton.InferenceServerException) -> dict[str, str]:
    """The metadata that came with an error."""
    cause: Any = error.__context__  # the client keeps code and details of it, not the metadata
    return dict(cause.trailing_metadata())
