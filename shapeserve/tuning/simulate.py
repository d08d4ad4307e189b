"""A discrete-event simulator: the real batcher and dispatcher on a virtual clock.

A replica is one host thread and one device, as in ``engine.device``: the thread launches a batch
when it is free, launches another ahead while it may, and then waits for the oldest. Everything else
(tokenising, the network, Python) takes no time here.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shapeserve.batcher import Batch, Batcher, Row
from shapeserve.buckets import BATCH, Shape, padding
from shapeserve.errors import ConfigError, Overloaded
from shapeserve.metrics import NO_BUCKET, REAL
from shapeserve.traces import Traffic
from shapeserve.tuning.fleet import Choose, Routing, router
from shapeserve.tuning.outcome import Outcome
from shapeserve.tuning.served import Piece, Served

_STEP_EVENTS = 1000  # arrivals between two calls of on_step; arbitrary


class _Payload(NamedTuple):
    """What a row of the batcher carries here."""

    sample: int
    sizes: Shape


@dataclass(slots=True)
class _Tally:
    """What is added up while the simulation runs."""

    elements: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    device_s: float = 0.0
    last_s: float = 0.0
    queue_s: list[float] = field(default_factory=list)
    batch_real: list[int] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)  # sample -> pieces that have not run
    done_s: dict[int, float] = field(default_factory=dict)


class _Replica:
    """One queue, one host thread, one device."""

    def __init__(self, served: Served, tally: _Tally) -> None:
        self._served = served
        self._tally = tally
        self._batcher = Batcher(
            served.max_queue_rows,
            served.max_queue_tokens,
            served.batch_wait_timeout_s,
            served.overhead_elements,
        )
        self._flights: deque[tuple[float, Batch]] = deque()  # when it ends, what runs
        self._device_free_s = 0.0
        self._running = 0

    @property
    def load(self) -> int:
        """Rows that wait or run."""
        return self._batcher.queue_rows + self._running

    @property
    def waits_for_device(self) -> bool:
        """Whether the host thread does nothing until a batch has ended."""
        return bool(self._flights)

    def offer(self, sample: int, pieces: Sequence[Piece], now: float) -> bool:
        """Queue all rows of a sample, or none; return whether there was room."""
        rows = [
            Row(
                _Payload(sample, piece.sizes), piece.place.lane, piece.place.cost, piece.place.units
            )
            for piece in pieces
        ]
        try:
            self._batcher.offer(rows, now)
        except Overloaded:
            return False
        return True

    def act(self, now: float) -> float | None:
        """Do what the host thread does at ``now``; return when it has to be asked again."""
        if self._flights and self._flights[0][0] > now:
            return None  # it waits for the device, and whoever launched that has asked for the time
        if self._flights:
            self._finish(*self._flights.popleft())
        while len(self._flights) < self._served.slots:
            batch = self._batcher.next_batch(now, ahead=bool(self._flights))
            if batch is None:
                break
            self._launch(batch, now)
        if self._flights:
            return self._flights[0][0]
        wait_s = self._batcher.next_wakeup(now)
        # At least the next number: the sum may round to now.
        return None if wait_s is None else max(now + wait_s, math.nextafter(now, math.inf))

    def _launch(self, batch: Batch, now: float) -> None:
        served, tally, fallback = self._served, self._tally, batch.lane.fallback
        sizes = served.executed(batch.sizes, fallback=fallback)
        payloads: list[_Payload] = [row.payload for row in batch.rows]
        pairs = None
        if BATCH not in sizes:
            pairs = float(sum(math.prod(p.sizes.values()) ** 2 for p in payloads))
        seconds = served.cost.seconds(sizes, pairs)
        end_s = max(now, self._device_free_s) + seconds
        self._device_free_s = end_s
        self._flights.append((end_s, batch))
        self._running += len(payloads)
        tally.device_s += seconds
        label = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        tally.batches[NO_BUCKET if fallback else label] += 1
        split = padding(served.grid.axes, [p.sizes for p in payloads], sizes)
        tally.elements.update(split)
        tally.batch_real.append(split[REAL])
        tally.queue_s.extend(now - row.enqueued_s for row in batch.rows)

    def _finish(self, end_s: float, batch: Batch) -> None:
        tally = self._tally
        self._batcher.complete(batch, end_s)
        self._running -= len(batch.rows)
        tally.last_s = max(tally.last_s, end_s)
        for row in batch.rows:
            sample = row.payload.sample
            tally.left[sample] -= 1
            if not tally.left[sample]:
                tally.done_s[sample] = end_s


def simulate(
    served: Served,
    traffic: Traffic,
    *,
    replicas: int = 1,
    routing: Routing = "p2c",
    speed: float = 1.0,
    seed: int = 0,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Serve a trace on a virtual clock.

    Args:
        served: the model, its policy and what batches cost.
        traffic: a trace; rows of the same time come together.
        replicas: at least 1.
        routing: how a row finds its replica; see :func:`shapeserve.tuning.fleet.router`.
        speed: the trace is played so many times as fast.
        seed: of the random choices.
        on_step: told how many rows of how many have come.

    Raises:
        ConfigError: the traffic is a histogram, or has other axes than the model.
    """
    tally = _Tally()
    fleet = [_Replica(served, tally) for _ in range(replicas)]
    choose = router(routing, replicas, lambda i: fleet[i].load, random.Random(seed))
    return _Run(served, traffic, speed, fleet, choose, tally).run(on_step)


class _Run:
    """The events of one simulation, in order of time."""

    def __init__(
        self,
        served: Served,
        traffic: Traffic,
        speed: float,
        fleet: Sequence[_Replica],
        choose: Choose,
        tally: _Tally,
    ) -> None:
        if traffic.times_s is None:
            raise ConfigError("a histogram has no times; a simulation needs a trace (t_s,len)")
        self._served = served
        self._times_s = (traffic.times_s / speed).tolist()
        self._sizes = list(_named(served, traffic))
        self._fleet = fleet
        self._choose = choose
        self._tally = tally
        self._wakeups: list[tuple[float, int]] = []  # a heap: time, replica
        self._fallbacks: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._most_load = 0

    def run(self, on_step: Callable[[int, int], None]) -> Outcome:
        """Play everything and return what happened."""
        total, came = len(self._times_s), 0
        while came < total or self._wakeups:
            # Rows that come when a batch ends are there for the next one.
            if came < total and (not self._wakeups or self._times_s[came] <= self._wakeups[0][0]):
                now = self._times_s[came]
                first = came
                while came < total and self._times_s[came] == now:
                    came += 1
                self._arrive(range(first, came), now)
                if first // _STEP_EVENTS != came // _STEP_EVENTS:
                    on_step(came, total)
            else:
                now, index = heapq.heappop(self._wakeups)
                self._act(index, now)
        on_step(total, total)
        return self._outcome()

    def _arrive(self, samples: Sequence[int], now: float) -> None:
        touched = set()
        for sample in samples:
            if (reason := self._served.refusal(self._sizes[sample])) is not None:
                self._refused[reason] += 1
                continue
            pieces = self._served.pieces(self._sizes[sample])
            index = self._choose(pieces[0].place.lane)
            if not self._fleet[index].offer(sample, pieces, now):
                self._refused["queue_full"] += 1
                continue
            touched.add(index)
            self._tally.left[sample] = len(pieces)
            for piece in pieces:
                if piece.place.reason is not None:
                    self._fallbacks[piece.place.reason.value] += 1
        for index in sorted(touched):
            self._most_load = max(self._most_load, self._fleet[index].load)
            if not self._fleet[index].waits_for_device:
                self._act(index, now)

    def _act(self, index: int, now: float) -> None:
        again_s = self._fleet[index].act(now)
        if again_s is not None:
            heapq.heappush(self._wakeups, (again_s, index))

    def _outcome(self) -> Outcome:
        tally, times_s = self._tally, self._times_s
        latencies = [done_s - times_s[sample] for sample, done_s in tally.done_s.items()]
        return Outcome(
            rows=len(times_s),
            replicas=len(self._fleet),
            span_s=max(tally.last_s, times_s[-1]) - times_s[0],
            device_s=tally.device_s,
            elements=dict(tally.elements),
            batches=dict(sorted(tally.batches.items())),
            fallbacks=dict(self._fallbacks),
            refused=dict(self._refused),
            most_load=self._most_load,
            latencies_s=np.sort(latencies),
            queue_s=np.sort(tally.queue_s),
            batch_real=np.array(tally.batch_real, np.int64),
        )


def _named(served: Served, traffic: Traffic) -> Iterator[Shape]:
    """Return the sizes of every row by the model's own axes."""
    axes = served.spec.row_axes
    if len(axes) == 1 and not traffic.named:
        columns = [0]
    elif sorted(axes) == sorted(traffic.axes):
        columns = [traffic.axes.index(axis) for axis in axes]
    else:
        raise ConfigError(
            f"the trace has the axes {', '.join(traffic.axes)}, {served.spec.name} has "
            f"{', '.join(axes)}; name the columns of the trace after the model's axes"
        )
    for row in traffic.sizes[:, columns].tolist():
        yield dict(zip(axes, row, strict=True))
