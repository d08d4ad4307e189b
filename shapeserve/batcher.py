"""The batcher: admits rows, keeps them in order, and forms the next batch when asked.

A pure state machine. It has no clock (every method is told ``now``, in seconds of any monotonic
clock), no thread and no tensor, so that a simulator can run this very code on a virtual clock.

Rows wait in *lanes*: one for each padded row shape, so that a long row never makes short
neighbours longer. Packed rows share one lane, because they are not padded to each other; there a
batch is a number of tokens, and a row takes as many *units* of it as it has tokens. A row is in
exactly one state::

    new --offer--> queued --next_batch--> running --complete--> done
                     |
                     +--cancel | deadline | close--> dropped

Every operation is O(1) amortised in the number of waiting rows (deadlines: O(log n)). Rows that
leave out of turn are only marked; their places in the queues are cleared when they are reached,
or all at once when they outnumber the rows that wait.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

from shapeserve.buckets import BATCH
from shapeserve.errors import InvalidRequest, Overloaded, Unavailable

# Bounds of the retry hint: below a second a client only hammers, above a minute it guesses.
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
# Each batch weighs 0.9 of the next one, so the drain rate covers about the last ten. Arbitrary.
_RATE_DECAY = 0.9
# Stale places are left alone until there are this many; arbitrary, saves work on short queues.
_COMPACT_SLACK = 64


class RowState(Enum):
    """Where a row is; see the module's diagram."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Lane:
    """The rows that may share a batch: those padded to one row shape, or all packed ones.

    Attributes:
        row: (axis, size) of the padded row, without ``batch``; () if packed.
        fallback: whether these rows run without a bucket. Their batch may then have any size up
            to the largest of ``batch_sizes``, else exactly one of ``batch_sizes``.
        batch_sizes: ascending, each at least 1, along ``axis``.
        axis: what a batch is a number of: rows (``batch``), or tokens of packed rows.
    """

    row: tuple[tuple[str, int], ...]
    fallback: bool
    batch_sizes: tuple[int, ...]
    axis: str = BATCH
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(
                f"batch_sizes={sizes} of lane {self.row} must be ascending numbers from 1 up"
            )
        # Kept, because each row that comes or goes looks its lane up.
        object.__setattr__(self, "_hash", hash((self.row, self.fallback, sizes, self.axis)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def unit_area(self) -> int:
        """Padded elements of one unit: of a row, or 1 if packed."""
        return math.prod(size for _, size in self.row)

    def sizes(self, size: int) -> dict[str, int]:
        """Return the executed sizes (axis -> size) of a batch of ``size``."""
        return {self.axis: size, **dict(self.row)}


@dataclass(slots=True, eq=False)
class Row:
    """One row on its way through the batcher; compared by identity.

    Attributes:
        payload: the caller's; not looked at.
        lane: where it waits.
        cost_tokens: what it counts against ``max_queue_tokens``: its padded elements.
        units: what it takes of a batch of its lane: 1, or its tokens if packed.
        enqueued_s: set by ``offer``.
        deadline_s: from this time on it is dropped if it still waits; None = never.
        state: set by the batcher.
        arrival: its place in the order of arrival; set by ``offer``.
    """

    payload: Any
    lane: Lane
    cost_tokens: int
    units: int = 1
    enqueued_s: float = 0.0
    deadline_s: float | None = None
    state: RowState = RowState.NEW
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to run together, oldest first.

    Attributes:
        lane: the lane that all rows come from.
        rows: at least one, of at most ``size`` units together.
        size: units (rows, or tokens) to pad to; the rest is filler.
        formed_s: when it was formed.
    """

    lane: Lane
    rows: tuple[Row, ...]
    size: int
    formed_s: float

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> executed size."""
        return self.lane.sizes(self.size)

    @property
    def area(self) -> int:
        """Padded elements that it executes."""
        return self.size * self.lane.unit_area


@dataclass(slots=True)
class _LaneQueue:
    """The rows of one lane in order; ``waiting`` of them are queued, the rest are stale."""

    lane: Lane
    rows: deque[Row] = field(default_factory=deque)
    waiting: int = 0
    units: int = 0

    def full(self) -> bool:
        return self.units >= self.lane.batch_sizes[-1]

    def prefix_units(self) -> list[int]:
        """Units of the first row, the first two, ... as far as the largest batch goes."""
        largest = self.lane.batch_sizes[-1]
        if self.units == self.waiting:  # one unit each
            return [*range(1, min(self.waiting, largest) + 1)]
        sums: list[int] = []
        total = 0
        for row in _queued(self.rows):
            total += row.units
            if sums and total > largest:
                break
            sums.append(total)
        return sums

    def head(self) -> Row:
        _skip_stale(self.rows)
        return self.rows[0]

    def take(self, n: int) -> tuple[Row, ...]:
        """Take the first ``n`` rows that wait, and mark them as running."""
        taken: list[Row] = []
        rows, units = self.rows, 0
        while len(taken) < n:
            row = rows.popleft()
            if row.state is RowState.QUEUED:
                row.state = RowState.RUNNING
                units += row.units
                taken.append(row)
        self.waiting -= n
        self.units -= units
        return tuple(taken)


class Batcher:
    """Admission, order and batch formation for one model.

    Args:
        max_queue_rows: rows that may wait, at least 1.
        max_queue_tokens: padded elements that may wait, at least 1.
        batch_wait_timeout_s: how long a row may be held back for its lane to fill up although
            the device is free. At 0, the default, nothing is ever held back.
        overhead_tokens: fixed cost of one launch, in padded elements (see ``best_batch_size``).

    Thread rule: none of its own; the caller holds a lock around every call.
    """

    def __init__(
        self,
        max_queue_rows: int,
        max_queue_tokens: int,
        batch_wait_timeout_s: float = 0.0,
        overhead_tokens: float = 0.0,
    ) -> None:
        self._max_rows = max_queue_rows
        self._max_tokens = max_queue_tokens
        self._wait_s = batch_wait_timeout_s
        self._overhead_tokens = overhead_tokens
        self._lanes: dict[Lane, _LaneQueue] = {}
        self._arrivals: deque[Row] = deque()
        self._deadlines: list[tuple[float, int, Row]] = []  # a heap
        self._expired: list[Row] = []
        self._arrived = 0
        self._rows = 0
        self._tokens = 0
        self._closed = False
        self._drain_rate = _DrainRate()

    @property
    def queue_rows(self) -> int:
        """Rows that wait."""
        return self._rows

    @property
    def queue_tokens(self) -> int:
        """Padded elements of the rows that wait."""
        return self._tokens

    def set_overhead(self, overhead_tokens: float) -> None:
        """Set the fixed cost of one launch, once it has been measured."""
        self._overhead_tokens = overhead_tokens

    def offer(self, rows: Sequence[Row], now: float) -> None:
        """Queue all rows of a request, or none.

        Raises:
            InvalidRequest: they will never fit. ``code`` is ``too_many_rows`` or
                ``too_many_tokens``.
            Overloaded: they do not fit now. ``code`` is ``queue_full`` (rows) or
                ``queue_tokens``.
            Unavailable: the batcher is closed.
        """
        if self._closed:
            raise Unavailable("this replica is shutting down; send the request again")
        if any(row.state is not RowState.NEW for row in rows):
            raise ValueError("a row can be offered only once; make a new Row")
        self._drop_expired(now)
        self._check_room(len(rows), sum(row.cost_tokens for row in rows))
        self._enqueue(rows, now)
        if max(len(self._arrivals), len(self._deadlines)) > 2 * self._rows + _COMPACT_SLACK:
            self._compact()

    def has_room(self, rows: int, tokens: int) -> bool:
        """Say whether waiting for room is over: they fit now, or never will (``offer`` tells)."""
        return (
            self._closed
            or not self._rows
            or (self._rows + rows <= self._max_rows and self._tokens + tokens <= self._max_tokens)
        )

    def next_batch(self, now: float, *, ahead: bool = False) -> Batch | None:
        """Return the next batch, or None if no row waits or all may be held back longer.

        The lane of the oldest row is next. Only while that row is held back (see
        ``batch_wait_timeout_s``) may a lane that is full go first.

        Args:
            now: the time.
            ahead: another batch still runs. A batch is then formed only if more rows wait than
                it can take, because rows that come until the device is free could still join it.
        """
        self._drop_expired(now)
        queue = self._ready_lane(now)
        if queue is None or (ahead and self._rows == queue.waiting and not queue.full()):
            return None
        lane, prefix = queue.lane, queue.prefix_units()
        if lane.fallback:
            size = prefix[-1]
        else:
            size = best_batch_size(lane.batch_sizes, prefix, lane.unit_area, self._overhead_tokens)
        rows = queue.take(bisect_right(prefix, size))
        self._left(queue, len(rows), sum([row.cost_tokens for row in rows]))
        return Batch(lane, rows, size, formed_s=now)

    def complete(self, batch: Batch, now: float) -> None:
        """Say that a batch has left the device, whatever became of its rows."""
        running, done = RowState.RUNNING, RowState.DONE
        for row in batch.rows:
            if row.state is not running:
                raise ValueError("a batch can be completed only once")
            row.state = done
        self._drain_rate.record(batch, now)

    def cancel(self, row: Row) -> bool:
        """Drop a row if it still waits; return whether it did."""
        if row.state is not RowState.QUEUED:
            return False
        self._drop(row)
        return True

    def expire(self, now: float) -> list[Row]:
        """Return the rows dropped for their deadline since the last call, each once."""
        self._drop_expired(now)
        expired, self._expired = self._expired, []
        return expired

    def close(self) -> list[Row]:
        """Refuse new rows from now on; drop those that wait and return them in order.

        Also returns rows whose deadline passed but which ``expire`` has not returned yet, so
        that every accepted row is heard of exactly once. Running batches may still complete.
        """
        self._closed = True
        waiting = [row for row in self._arrivals if row.state is RowState.QUEUED]
        for row in waiting:
            self._drop(row)
        left, self._expired = self._expired + waiting, []
        self._arrivals.clear()
        self._deadlines.clear()
        return left

    def next_wakeup(self, now: float) -> float | None:
        """Return the seconds until ``expire`` or ``next_batch`` has something, None if never.

        Holds as long as nothing is offered, cancelled or completed.
        """
        oldest = self._oldest()
        if self._expired or (oldest is not None and self._ready_lane(now) is not None):
            return 0.0
        times = []
        if oldest is not None:
            times.append(oldest.enqueued_s + self._wait_s)
        if (deadline := self._next_deadline()) is not None:
            times.append(deadline)
        return max(min(times) - now, 0.0) if times else None

    # --- admission ----------------------------------------------------------------------------

    def _check_room(self, rows: int, tokens: int) -> None:
        """Raise if the rows do not fit into what is free; with a hint, if they will later."""
        if rows > self._max_rows:
            raise InvalidRequest(
                f"this request has {rows} rows, the queue admits at most {self._max_rows} "
                "(limits.max_queue_rows) even when it is empty; send fewer rows per request",
                code="too_many_rows",
            )
        if tokens > self._max_tokens:
            raise InvalidRequest(
                f"this request has {tokens} padded elements, the queue admits at most "
                f"{self._max_tokens} (limits.max_queue_tokens) even when it is empty; "
                "send fewer or shorter rows per request",
                code="too_many_tokens",
            )
        over_rows = self._rows + rows - self._max_rows
        over_tokens = self._tokens + tokens - self._max_tokens
        if over_rows <= 0 and over_tokens <= 0:
            return
        retry_after_s = self._drain_rate.seconds_for(over_rows, over_tokens)
        what, used, bound, code = (
            (f"{rows} rows", self._rows, f"{self._max_rows} (limits.max_queue_rows)", "queue_full")
            if over_rows > 0
            else (
                f"{tokens} padded elements",
                self._tokens,
                f"{self._max_tokens} (limits.max_queue_tokens)",
                "queue_tokens",
            )
        )
        raise Overloaded(
            f"the queue is full: {used} of {bound} are waiting and this request adds {what}; "
            f"retry in {math.ceil(retry_after_s)} s",
            code=code,
            retry_after_s=retry_after_s,
        )

    def _enqueue(self, rows: Sequence[Row], now: float) -> None:
        queue: _LaneQueue | None = None
        for row in rows:
            row.state = RowState.QUEUED
            row.enqueued_s = now
            row.arrival = self._arrived = self._arrived + 1
            if queue is None or queue.lane is not row.lane:
                queue = self._lanes.get(row.lane)
                if queue is None:
                    queue = self._lanes[row.lane] = _LaneQueue(row.lane)
            queue.rows.append(row)
            queue.waiting += 1
            queue.units += row.units
            self._tokens += row.cost_tokens
            if row.deadline_s is not None:
                heapq.heappush(self._deadlines, (row.deadline_s, row.arrival, row))
        self._arrivals.extend(rows)
        self._rows += len(rows)

    # --- order --------------------------------------------------------------------------------

    def _ready_lane(self, now: float) -> _LaneQueue | None:
        """Return the lane to serve now."""
        oldest = self._oldest()
        if oldest is None:
            return None
        if now >= oldest.enqueued_s + self._wait_s:
            return self._lanes[oldest.lane]
        full = [queue for queue in self._lanes.values() if queue.full()]
        return min(full, key=lambda queue: queue.head().arrival, default=None)

    def _oldest(self) -> Row | None:
        _skip_stale(self._arrivals)
        return self._arrivals[0] if self._arrivals else None

    def _drop(self, row: Row) -> None:
        """Take a queued row out of all counts; its places in the queues become stale."""
        row.state = RowState.DROPPED
        queue = self._lanes[row.lane]
        queue.waiting -= 1
        queue.units -= row.units
        self._left(queue, 1, row.cost_tokens)

    def _left(self, queue: _LaneQueue, rows: int, tokens: int) -> None:
        self._rows -= rows
        self._tokens -= tokens
        if not queue.waiting:
            # Fallback lanes have as many shapes as clients care to send: keep none that is empty.
            del self._lanes[queue.lane]

    # --- deadlines ----------------------------------------------------------------------------

    def _drop_expired(self, now: float) -> None:
        while (deadline := self._next_deadline()) is not None and deadline <= now:
            row = heapq.heappop(self._deadlines)[2]
            self._drop(row)
            self._expired.append(row)

    def _next_deadline(self) -> float | None:
        """Return the earliest deadline of a row that waits."""
        heap = self._deadlines
        while heap and heap[0][2].state is not RowState.QUEUED:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _compact(self) -> None:
        """Clear every stale place, so that memory follows the rows that wait."""
        self._arrivals = deque(_queued(self._arrivals))
        self._deadlines = [entry for entry in self._deadlines if entry[2].state is RowState.QUEUED]
        heapq.heapify(self._deadlines)
        for queue in self._lanes.values():
            queue.rows = deque(_queued(queue.rows))


class _DrainRate:
    """How fast rows and tokens left lately while the device was busy."""

    def __init__(self) -> None:
        self._rows = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0
        self._last_s = -math.inf

    def record(self, batch: Batch, now: float) -> None:
        """Add one batch; time in which nothing ran does not count."""
        busy_s = now - max(batch.formed_s, self._last_s)
        tokens = sum([row.cost_tokens for row in batch.rows])
        self._rows = self._rows * _RATE_DECAY + len(batch.rows)
        self._tokens = self._tokens * _RATE_DECAY + tokens
        self._busy_s = self._busy_s * _RATE_DECAY + max(busy_s, 0.0)
        self._last_s = now

    def seconds_for(self, rows: float, tokens: float) -> float:
        """Return whole seconds until so many have left, from 1 to 60; 1 if nothing is known."""
        share = max(
            rows / self._rows if self._rows else 0.0,
            tokens / self._tokens if self._tokens else 0.0,
        )
        return min(max(float(math.ceil(share * self._busy_s)), _MIN_RETRY_S), _MAX_RETRY_S)


def best_batch_size(
    batch_sizes: Iterable[int], prefix: Sequence[int], unit_area: int, overhead_tokens: float
) -> int:
    """Return the batch size of least cost for each unit that it serves.

    Args:
        batch_sizes: what a batch may be padded to.
        prefix: units of the first row that waits, of the first two, and so on.
        unit_area: padded elements of one unit.
        overhead_tokens: fixed cost of a launch, in elements.

    The cost of a batch is ``overhead_tokens + size * unit_area``, filler included; it serves the
    rows whose units fit. Ties go to the batch that serves more. A size that not even the first
    row fits is out; one that it fits always exists, because its lane was chosen so.
    """

    def cost(size: int) -> tuple[float, int]:
        served = prefix[bisect_right(prefix, size) - 1] if size >= prefix[0] else 0
        if not served:
            return math.inf, 0
        return (overhead_tokens + size * unit_area) / served, -served

    return min(batch_sizes, key=cost)


def _queued(rows: Iterable[Row]) -> Iterable[Row]:
    return (row for row in rows if row.state is RowState.QUEUED)


def _skip_stale(rows: deque[Row]) -> None:
    while rows and rows[0].state is not RowState.QUEUED:
        rows.popleft()
