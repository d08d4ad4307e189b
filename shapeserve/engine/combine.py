"""One result from the pieces of a split row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shapeserve.engine.rows import PreparedSample, Result, RowAnswer
from shapeserve.models.spec import ModelSpec


def combine(spec: ModelSpec, sample: PreparedSample, answers: Sequence[RowAnswer]) -> Result:
    """Build the result of ``sample`` from the answers to its rows.

    Outputs with the split axis are concatenated along it. All others are averaged, weighted by
    the length of the pieces, and scaled to unit length again where the model normalises: the mean
    of a long text's pieces stands for the text.
    """
    first = answers[0]
    outputs: Mapping[str, np.ndarray] = first.outputs
    if len(answers) > 1:
        weights = np.array([np.prod(list(r.arrays.sizes.values())) for r in sample.rows], float)
        outputs = {
            name: _merge(spec, name, [a.outputs[name] for a in answers], weights)
            for name in first.outputs
        }
    return Result(
        outputs=outputs,
        length=sample.length,
        mode=first.run.mode,
        bucket=first.run.bucket,
        truncated_from=sample.truncated_from,
        pieces=len(answers),
        reason=sample.rows[0].reason,
        runs=tuple(dict.fromkeys(answer.run for answer in answers)),
    )


def _merge(
    spec: ModelSpec, name: str, parts: Sequence[np.ndarray], weights: np.ndarray
) -> np.ndarray:
    dims = spec.outputs[name].dims[1:]
    named = [i for i, dim in enumerate(dims) if isinstance(dim, str)]
    if named:
        return np.concatenate(parts, axis=named[0])
    mean = np.average(np.stack(parts), axis=0, weights=weights)
    if spec.normalize:
        mean = mean / max(float(np.linalg.norm(mean)), 1e-12)
    return mean.astype(parts[0].dtype)
