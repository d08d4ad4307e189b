"""The rows that are run, and the answers of the eager model in the highest precision that runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from shapeserve.buckets import BATCH, TOKENS, Bucket
from shapeserve.config import ModelConfig
from shapeserve.evaluate.result import Numerics
from shapeserve.layout import MIN_ROW_TOKENS, RowArrays
from shapeserve.models import LoadedModel, ModelSpec, load
from shapeserve.models.module import ImportedModule
from shapeserve.warmup import TOLERANCE, Probe

log = logging.getLogger("shapeserve.evaluate")

# Rows of a batch that differ; each is answered alone by the reference, which is slow. Arbitrary.
_DISTINCT = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A bucket with rows that fill it.

    Attributes:
        bucket: which.
        rows: of its full size.
        expected: for each row the outputs of the reference, in spec order.
        reference: its arithmetic.
    """

    bucket: Bucket
    rows: tuple[RowArrays, ...]
    expected: tuple[list[np.ndarray], ...]
    reference: str

    @property
    def sizes(self) -> Mapping[str, int]:
        """Axis -> size of the bucket."""
        return self.bucket.as_dict()

    def numerics(
        self, outputs: Sequence[Mapping[str, np.ndarray]], probe: Probe, dtype: str
    ) -> Numerics:
        """Compare the outputs of all rows with what is expected."""
        errors = [
            probe.error([*got.values()], expected)
            for got, expected in zip(outputs, self.expected, strict=True)
        ]
        worst = int(np.argmax(errors))
        return Numerics(self.reference, errors[worst], worst, len(errors), TOLERANCE[dtype])


class Reference:
    """The plain module in float64, or in float32 where it does not run in float64.

    A model that serves in bf16 is loaded in float32 first, so its rounded weights count as errors.
    """

    def __init__(self, config: ModelConfig, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        full = config.model_copy(update={"dtype": "float32"})
        self.dtype = "float64"
        self.probe = Probe(spec, _doubled(load(full, device)), device)
        try:
            self.probe.answer(self.probe.row(spec.max_length))
        except Exception as error:  # a module may hold tensors of a fixed dtype
            log.warning("the reference is float32, because float64 does not run: %s", error)
            self.dtype = "float32"
            self.probe = Probe(spec, load(full, device).module, device)

    def case(self, bucket: Bucket) -> Case:
        """Make rows that fill ``bucket``, with their answers."""
        probe, sizes = self.probe, bucket.as_dict()
        kinds: dict[tuple[int, ...], list[RowArrays]] = {}
        rows: list[RowArrays] = []
        for row_sizes in self._row_sizes(sizes):
            same = kinds.setdefault(tuple(row_sizes.values()), [])
            if len(same) < _DISTINCT:
                same.append(probe.row(row_sizes))
            rows.append(same[len(rows) % len(same)])
        answers = {id(row): probe.answer(row) for same in kinds.values() for row in same}
        return Case(bucket, tuple(rows), tuple(answers[id(row)] for row in rows), self.dtype)

    def _row_sizes(self, sizes: Mapping[str, int]) -> list[dict[str, int]]:
        if BATCH in sizes:
            row = {axis: size for axis, size in sizes.items() if axis != BATCH}
            return [row] * sizes[BATCH]
        (axis,) = self._spec.row_axes
        whole, rest = divmod(sizes[TOKENS], self._spec.max_length[axis])
        least = max(MIN_ROW_TOKENS, self._spec.min_length.get(axis, 1))
        lengths = [self._spec.max_length[axis]] * whole + [rest] * (rest >= least)
        return [{axis: length} for length in lengths]


def _doubled(model: LoadedModel) -> nn.Module:
    if isinstance(model.module, ImportedModule):  # it casts its inputs to the dtype of its spec
        inner = model.module.module.double()
        return ImportedModule(inner, replace(model.spec, dtype="float64")).eval()
    return model.module.double()
