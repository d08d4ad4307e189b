"""The values that travel through the engine: samples in, rows on the way, results out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shapeserve.batcher import Lane, Row
from shapeserve.errors import ShapeServeError
from shapeserve.layout import RowArrays
from shapeserve.metrics import FallbackReason, Mode
from shapeserve.models.spec import TextPair
from shapeserve.runner import ModelRunner

Sample = str | TextPair | Sequence[int] | np.ndarray | Mapping[str, np.ndarray]
"""What a caller may send: a text, a pair of texts (to a classification model), token ids, or arrays
by input name without the batch axis."""


class Run(NamedTuple):
    """One executed batch. Times are on ``time.monotonic()``.

    Attributes:
        started_s: when its rows began to be written into the buffers.
        written_s: when they were.
        finished_s: when its outputs were read.
        number: tells the batches of one model of a replica apart.
        mode: how it ran.
        bucket: label of its bucket, ``none`` for the fallback.
        rows: of all requests.
        elements: executed.
        padding: those of them that were padding.
    """

    started_s: float
    written_s: float
    finished_s: float
    number: int
    mode: Mode
    bucket: str
    rows: int
    elements: int
    padding: int


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one sample.

    Attributes:
        outputs: output name -> array without the batch axis, unpadded, owned by the caller.
        length: elements executed for it, after truncation (tokens of a text).
        mode: how it ran.
        bucket: label of its bucket, ``none`` for the fallback.
        truncated_from: its length before truncation, or None.
        pieces: rows it was split into, 1 if it was not.
        reason: why it went to the fallback, or None.
        runs: the batch that it was in; of a split one those of its pieces, each once.
    """

    outputs: Mapping[str, np.ndarray]
    length: int
    mode: Mode
    bucket: str
    truncated_from: int | None = None
    pieces: int = 1
    reason: FallbackReason | None = None
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class RecentFallback:
    """Rows of one request that went to the fallback.

    Attributes:
        reason: why.
        rows: how many.
        unix_s: when they were queued.
    """

    reason: FallbackReason
    rows: int
    unix_s: float


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that knows where it will run.

    Attributes:
        arrays: the row.
        lane: rows of one lane may share a batch.
        cost: its padded elements.
        units: what it takes of a batch of its lane.
        reason: why it goes to the fallback, or None.
        runner: the runner (policy) that it was prepared for.
    """

    arrays: RowArrays
    lane: Lane
    cost: int
    units: int
    reason: FallbackReason | None
    runner: ModelRunner


@dataclass(frozen=True, slots=True)
class PreparedSample:
    """One sample, tokenised, checked and routed: its rows (several when it is split).

    Attributes:
        rows: one, or the pieces in order.
        sizes: row axis -> size as the caller sent it, before truncation.
        truncated_from: length before truncation, or None.
    """

    rows: tuple[PreparedRow, ...]
    sizes: Mapping[str, int]
    truncated_from: int | None = None

    @property
    def executed(self) -> dict[str, int]:
        """Row axis -> size that will be executed: all the pieces together, if it is split."""
        pieces = [row.arrays.sizes for row in self.rows]
        return {axis: sum(sizes[axis] for sizes in pieces) for axis in self.sizes}

    @property
    def length(self) -> int:
        """Elements that will be executed for it, padding apart."""
        return sum(math.prod(row.arrays.sizes.values()) for row in self.rows)


class RowAnswer(NamedTuple):
    """What the device thread gave for one row; a tuple, because one is made for every row."""

    outputs: Mapping[str, np.ndarray]
    run: Run


Outcome = RowAnswer | ShapeServeError


class Ticket:
    """Collects the outcomes of one request's rows and delivers them together, exactly once.

    Attributes:
        rows: as they were queued.
        context: of whoever queued them; what is logged of a row in it is its request's.

    Thread rule: ``settle`` is called by whoever holds the row (the device thread, or the thread
    that closes the engine); ``deliver`` is called by the one that settles the last row and must
    not raise.
    """

    __slots__ = ("_deliver", "_lock", "_outcomes", "_remaining", "context", "rows")

    def __init__(
        self, prepared: Sequence[PreparedRow], deliver: Callable[[list[Outcome]], None]
    ) -> None:
        self._outcomes: list[Outcome | None] = [None] * len(prepared)
        self._remaining = len(prepared)
        self._lock = threading.Lock()
        self._deliver = deliver
        self.context = copy_context()
        self.rows: tuple[Row, ...] = ()

    def settle(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Set outcomes by row index; deliver all when the last one is there."""
        kept = self._outcomes
        with self._lock:
            for index, outcome in outcomes:
                if kept[index] is not None:
                    raise RuntimeError(f"row {index} was settled twice")
                kept[index] = outcome
            self._remaining -= len(outcomes)
            last = self._remaining == 0
        if last:
            self._deliver([o for o in kept if o is not None])

    def settled(self, index: int) -> bool:
        """Whether row ``index`` has its outcome."""
        return self._outcomes[index] is not None


class RowPayload(NamedTuple):
    """What the batcher carries for the engine."""

    ticket: Ticket
    row_index: int
    prepared: PreparedRow
