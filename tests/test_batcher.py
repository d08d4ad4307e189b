"""Admission, order and batch formation (I6), on a virtual clock."""

from __future__ import annotations

import weakref
from fractions import Fraction
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shapeserve.batcher import Batch, Batcher, Lane, Row, RowState, best_batch_size
from shapeserve.errors import InvalidRequest, Overloaded, Unavailable

SHORT = Lane((("seq", 8),), fallback=False, batch_sizes=(1, 2, 4))
LONG = Lane((("seq", 64),), fallback=False, batch_sizes=(1, 2))
COARSE = Lane((("seq", 16),), fallback=False, batch_sizes=(3, 8))
FALLBACK = Lane((("seq", 104),), fallback=True, batch_sizes=(1, 2, 4))
LANES = (SHORT, LONG, COARSE, FALLBACK)


def row(lane: Lane = SHORT, payload: object = None, deadline_s: float | None = None) -> Row:
    return Row(payload, lane, lane.unit_area, deadline_s=deadline_s)


def rows(n: int, lane: Lane = SHORT) -> list[Row]:
    return [row(lane, payload=i) for i in range(n)]


def batcher(
    max_rows: int = 100, max_tokens: int = 100_000, wait_s: float = 0.0, overhead: float = 0.0
) -> Batcher:
    return Batcher(max_rows, max_tokens, wait_s, overhead)


def drain(b: Batcher, now: float = 0.0) -> list[Batch]:
    """Form and complete batches until none is ready."""
    batches = []
    while (batch := b.next_batch(now)) is not None:
        batches.append(batch)
        b.complete(batch, now)
    return batches


def payloads(batches: list[Batch]) -> list[list[object]]:
    return [[r.payload for r in batch.rows] for batch in batches]


# --- order and formation -----------------------------------------------------------------------


def test_33_rows_run_as_several_batches_in_order() -> None:
    lane = Lane((("seq", 8),), fallback=False, batch_sizes=(1, 2, 4, 8, 16, 32))
    b = batcher()
    b.offer(rows(33, lane), 0.0)
    batches = drain(b)
    assert [batch.size for batch in batches] == [32, 1]
    assert [r.payload for batch in batches for r in batch.rows] == list(range(33))


def test_a_long_row_does_not_share_a_batch_with_short_neighbours() -> None:
    b = batcher()
    b.offer([row(SHORT, "a"), row(LONG, "b"), row(SHORT, "c")], 0.0)
    assert payloads(drain(b)) == [["a", "c"], ["b"]]


def test_the_lane_of_the_oldest_row_is_next_however_long_another_lane_is() -> None:
    b = batcher()
    b.offer([row(LONG, "old")], 0.0)
    b.offer(rows(50), 0.0)
    assert payloads(drain(b))[0] == ["old"]


def test_rows_of_a_later_request_fill_up_the_batch_of_their_lane() -> None:
    b = batcher()
    for name in "abc":
        b.offer([row(SHORT, name)], 0.0)
    assert payloads(drain(b)) == [["a", "b"], ["c"]]


def test_a_fallback_batch_has_as_many_rows_as_wait_up_to_its_largest() -> None:
    b = batcher()
    b.offer(rows(7, FALLBACK), 0.0)
    assert [(len(x.rows), x.size) for x in drain(b)] == [(4, 4), (3, 3)]


def test_a_batch_is_padded_when_its_lane_has_no_smaller_size() -> None:
    b = batcher()
    b.offer(rows(1, COARSE), 0.0)
    (batch,) = drain(b)
    assert (len(batch.rows), batch.size) == (1, 3)


@pytest.mark.parametrize(
    ("waiting", "overhead", "size"),
    [(3, 0, 2), (3, 20, 4), (1, 1000, 1), (4, 0, 4), (9, 0, 4)],
)
def test_a_launch_that_costs_much_makes_padding_pay(
    waiting: int, overhead: float, size: int
) -> None:
    b = batcher()
    b.set_overhead(overhead)
    b.offer(rows(waiting), 0.0)
    batch = b.next_batch(0.0)
    assert batch is not None
    assert batch.size == size


@given(
    sizes=st.sets(st.integers(1, 64), min_size=1, max_size=8).map(sorted),
    waiting=st.integers(1, 100),
    area=st.integers(1, 4096),
    overhead=st.integers(0, 100_000),
)
def test_the_chosen_size_is_the_cheapest_for_each_row(
    sizes: list[int], waiting: int, area: int, overhead: int
) -> None:
    def cost(size: int) -> Fraction:
        return Fraction(overhead + size * area, min(size, waiting))

    chosen = best_batch_size(sizes, range(1, waiting + 1), area, overhead)
    least = min(map(cost, sizes))
    assert float(cost(chosen)) == float(least)
    ties = [s for s in sizes if cost(s) == least]
    assert min(chosen, waiting) >= max(min(s, waiting) for s in ties)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1)])
def test_a_lane_refuses_sizes_that_are_not_ascending_from_1(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be ascending numbers from 1 up"):
        Lane((("seq", 8),), fallback=False, batch_sizes=sizes)


# --- waiting -----------------------------------------------------------------------------------


def test_a_lone_row_runs_at_once_when_no_wait_is_configured() -> None:
    b = batcher()
    b.offer([row()], 5.0)
    assert b.next_wakeup(5.0) == 0.0
    assert b.next_batch(5.0) is not None


def test_a_lone_row_is_held_back_for_the_configured_wait_and_no_longer() -> None:
    b = batcher(wait_s=0.5)
    b.offer([row()], 5.0)
    assert b.next_batch(5.25) is None
    assert b.next_wakeup(5.25) == 0.25
    assert b.next_batch(5.5) is not None


def test_a_full_lane_is_not_held_back() -> None:
    b = batcher(wait_s=0.5)
    b.offer(rows(4), 0.0)
    assert b.next_batch(0.0) is not None


def test_a_full_lane_goes_first_only_while_the_oldest_row_is_held_back() -> None:
    b = batcher(wait_s=0.5)
    b.offer([row(LONG, "old")], 0.0)
    b.offer(rows(8), 0.0)
    first, second, third = b.next_batch(0.25), b.next_batch(0.5), b.next_batch(0.5)
    assert [x and x.lane for x in (first, second, third)] == [SHORT, LONG, SHORT]


def test_the_full_lane_with_the_older_head_goes_first() -> None:
    b = batcher(wait_s=0.5)
    b.offer([row(COARSE)], 0.0)
    gone, *kept = rows(5, SHORT)
    b.offer([gone, *rows(2, LONG), *kept], 0.0)
    b.cancel(gone)  # so SHORT's head now arrived after LONG's
    batch = b.next_batch(0.0)
    assert batch is not None
    assert batch.lane is LONG


def test_nothing_wakes_an_empty_batcher() -> None:
    assert batcher().next_wakeup(0.0) is None
    assert batcher().next_batch(0.0) is None


# --- admission ---------------------------------------------------------------------------------


def test_a_full_queue_refuses_the_whole_request_and_says_when_to_retry() -> None:
    b = batcher(max_rows=4)
    b.offer(rows(3), 0.0)
    refused = rows(2)
    with pytest.raises(
        Overloaded, match=r"3 of 4 \(limits.max_queue_rows\) are .* adds 2 rows; retry in 1 s"
    ) as caught:
        b.offer(refused, 0.0)
    assert caught.value.code == "queue_full"
    assert caught.value.retry_after_s == 1.0
    assert (b.queue_rows, b.queue_tokens) == (3, 24)
    assert all(r.state is RowState.NEW for r in refused)
    drain(b)
    b.offer(refused, 0.0)  # the same rows may be offered again
    assert b.queue_rows == 2


def test_a_queue_full_of_tokens_refuses_too() -> None:
    b = batcher(max_tokens=100)
    b.offer([row(LONG)], 0.0)
    with pytest.raises(
        Overloaded, match=r"64 of 100 \(limits.max_queue_tokens\) .* 64 padded"
    ) as caught:
        b.offer([row(LONG)], 0.0)
    assert caught.value.code == "queue_tokens"
    b.offer([row(SHORT)], 0.0)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"max_rows": 4}, r"5 rows, .* at most 4 \(limits.max_queue_rows\) even when it is empty"),
        ({"max_tokens": 39}, r"40 padded .* 39 \(limits.max_queue_tokens\) even when it is empty"),
    ],
    ids=["rows", "tokens"],
)
def test_a_request_that_can_never_fit_is_told_so_and_not_to_try_again(
    bound: dict[str, int], message: str
) -> None:
    b = batcher(**bound)
    with pytest.raises(InvalidRequest, match=message) as caught:
        b.offer(rows(5), 0.0)
    assert "send fewer" in caught.value.message
    assert caught.value.retry_after_s is None
    assert caught.value.code == {"max_rows": "too_many_rows"}.get(*bound, "too_many_tokens")


def test_expired_and_cancelled_rows_make_room() -> None:
    b = batcher(max_rows=2)
    late, cancelled = row(deadline_s=1.0), row()
    b.offer([late, cancelled], 0.0)
    b.cancel(cancelled)
    b.offer(rows(2), 1.0)
    assert b.expire(1.0) == [late]


@pytest.mark.parametrize(
    ("seconds_per_batch", "hint"), [(0.001, 1.0), (3.0, 12.0), (1000.0, 60.0), (0.0, 1.0)]
)
def test_the_retry_hint_follows_the_drain_rate_between_1_and_60_s(
    seconds_per_batch: float, hint: float
) -> None:
    b = batcher(max_rows=8)
    now = 0.0
    for _ in range(5):
        b.offer(rows(2), now)
        batch = b.next_batch(now)
        assert batch is not None
        b.complete(batch, now + seconds_per_batch)
        now += seconds_per_batch + 500.0  # idle time is not slowness
    b.offer(rows(8), now)
    with pytest.raises(Overloaded) as caught:
        b.offer(rows(8), now)  # 8 rows have to leave, 2 at a time
    assert caught.value.retry_after_s == hint


def test_a_row_is_accepted_only_once() -> None:
    b = batcher()
    one = row()
    b.offer([one], 0.0)
    with pytest.raises(ValueError, match="offered only once"):
        b.offer([one], 0.0)
    assert b.queue_rows == 1


def test_a_batch_is_completed_only_once() -> None:
    b = batcher()
    b.offer([row()], 0.0)
    batch = b.next_batch(0.0)
    assert batch is not None
    b.complete(batch, 0.0)
    with pytest.raises(ValueError, match="completed only once"):
        b.complete(batch, 0.0)


# --- cancellation, deadlines, close ------------------------------------------------------------


def test_a_cancelled_row_frees_its_place_and_its_neighbours_are_answered() -> None:
    b = batcher()
    first, second, third = waiting = rows(3)
    b.offer(waiting, 0.0)
    assert b.cancel(second)
    assert not b.cancel(second)
    assert (b.queue_rows, b.queue_tokens) == (2, 16)
    (batch,) = drain(b)
    assert batch.rows == (first, third)


def test_a_row_that_runs_cannot_be_cancelled() -> None:
    b = batcher()
    b.offer([running := row()], 0.0)
    assert b.next_batch(0.0) is not None
    assert not b.cancel(running)


def test_a_row_past_its_deadline_is_reported_once_and_never_runs() -> None:
    b = batcher()
    late, fine = row(deadline_s=1.0), row(deadline_s=2.0)
    b.offer([late, fine], 0.0)
    batch = b.next_batch(1.0)
    assert batch is not None
    assert batch.rows == (fine,)
    assert b.next_wakeup(1.0) == 0.0  # somebody has to be told
    assert b.expire(1.0) == [late]
    assert b.expire(9.0) == []


def test_the_wakeup_is_the_earliest_deadline_of_a_row_that_waits() -> None:
    b = batcher(wait_s=100.0)
    gone, kept = row(deadline_s=1.0), row(deadline_s=3.0)
    b.offer([gone, kept], 0.0)
    b.cancel(gone)
    assert b.next_wakeup(0.5) == 2.5


class CountingDeadline(float):
    """A deadline that counts how often it is compared with the clock."""

    compared: ClassVar[int] = 0

    def __le__(self, other: float) -> bool:
        CountingDeadline.compared += 1
        return float(self) <= other


def test_looking_for_expired_rows_does_not_scan_the_queue() -> None:
    b = batcher(max_rows=1000)
    b.offer([row(deadline_s=CountingDeadline(100 + i)) for i in range(1000)], 0.0)
    CountingDeadline.compared = 0
    for _ in range(100):
        assert b.expire(50.0) == []
    assert CountingDeadline.compared == 100


def test_close_returns_what_waits_in_order_and_refuses_new_rows() -> None:
    b = batcher()
    late, a, c = row(SHORT, "late", deadline_s=1.0), row(LONG, "a"), row(SHORT, "c")
    b.offer([row(SHORT, "running")], 0.0)
    batch = b.next_batch(0.0)
    b.offer([late, a, c], 0.0)
    assert b.next_batch(1.0) is not None  # LONG; `late` expired and nobody has asked for it
    assert b.close() == [late, c]
    assert b.close() == []
    assert (b.queue_rows, b.queue_tokens, b.next_wakeup(9.0), b.expire(9.0)) == (0, 0, None, [])
    with pytest.raises(Unavailable, match="shutting down"):
        b.offer([row()], 2.0)
    assert batch is not None
    b.complete(batch, 2.0)


class Payload:
    """Something whose life can be watched."""


def test_rows_that_left_out_of_turn_are_not_kept() -> None:
    b = batcher(wait_s=1e9)  # the oldest rows stay where they are
    b.offer([row(LONG), row(SHORT)], 0.0)
    alive: weakref.WeakSet[Payload] = weakref.WeakSet()
    for _ in range(2000):
        payload = Payload()
        alive.add(payload)
        one = row(SHORT, payload, deadline_s=1e9)
        b.offer([one], 0.0)
        b.cancel(one)
    del payload, one
    assert len(alive) < 200


def test_answered_rows_are_not_kept_until_their_deadline() -> None:
    b = batcher(wait_s=1e9)
    b.offer([row(LONG, deadline_s=1e8)], 0.0)  # stays, with the earliest deadline
    alive: weakref.WeakSet[Payload] = weakref.WeakSet()
    for _ in range(2000):
        payload = Payload()
        alive.add(payload)
        b.offer([row(SHORT, payload, deadline_s=1e9) for _ in range(4)], 0.0)
        assert len(drain(b)) == 1
    del payload
    assert len(alive) < 200


class Axis(str):
    """An axis name whose life can be watched."""

    __slots__ = ("__weakref__",)


def test_lanes_of_shapes_that_are_gone_are_not_kept() -> None:
    b = batcher()
    alive: weakref.WeakSet[Axis] = weakref.WeakSet()
    for i in range(200):
        axis = Axis(f"axis{i}")  # each another one: equal names would be one member of the set
        alive.add(axis)
        b.offer([row(Lane(((axis, 8),), fallback=True, batch_sizes=(1,)))], 0.0)
        drain(b)
    del axis
    assert len(alive) <= 1


# --- I6 against a naive model ------------------------------------------------------------------

MAX_ROWS, MAX_TOKENS = 12, 600


class BatcherMachine(RuleBasedStateMachine):
    """Drives the batcher at random; the model is a plain list of waiting rows."""

    @initialize(wait_s=st.sampled_from([0.0, 0.0, 1.0]), overhead=st.sampled_from([0.0, 40.0]))
    def start(self, wait_s: float, overhead: float) -> None:
        self.wait_s = wait_s
        self.overhead = overhead
        self.batcher = Batcher(MAX_ROWS, MAX_TOKENS, wait_s, overhead)
        self.now = 0.0
        self.accepted: list[Row] = []
        self.waiting: list[Row] = []
        self.running: list[Batch] = []
        self.unreported: list[Row] = []
        self.fates: dict[Row, list[str]] = {}

    def expire_in_model(self) -> None:
        for r in list(self.waiting):
            if r.deadline_s is not None and r.deadline_s <= self.now:
                self.waiting.remove(r)
                self.unreported.append(r)

    def due(self, r: Row) -> bool:
        lane = [w for w in self.waiting if w.lane == r.lane]
        return len(lane) >= r.lane.batch_sizes[-1] or self.now >= r.enqueued_s + self.wait_s

    def expected_lane(self) -> Lane | None:
        if not self.waiting:
            return None
        if self.due(self.waiting[0]):
            return self.waiting[0].lane
        return next((r.lane for r in self.waiting if self.due(r)), None)

    @rule(
        lanes=st.lists(st.sampled_from(LANES), max_size=14),
        ttl=st.sampled_from([None, None, 0.0, 0.5, 2.0]),
    )
    def offer(self, lanes: list[Lane], ttl: float | None) -> None:
        deadline = None if ttl is None else self.now + ttl
        new = [row(lane, deadline_s=deadline) for lane in lanes]
        self.expire_in_model()
        tokens = sum(r.cost_tokens for r in self.waiting + new)
        fits = len(self.waiting) + len(new) <= MAX_ROWS and tokens <= MAX_TOKENS
        if fits:
            self.batcher.offer(new, self.now)
            self.waiting += new
            self.accepted += new
            self.fates.update({r: [] for r in new})
            return
        never = len(new) > MAX_ROWS or sum(r.cost_tokens for r in new) > MAX_TOKENS
        with pytest.raises(InvalidRequest if never else Overloaded) as caught:
            self.batcher.offer(new, self.now)
        assert ("even when it is empty" in caught.value.message) == never
        assert never or 1 <= (caught.value.retry_after_s or 0) <= 60

    @rule(dt=st.sampled_from([0.25, 0.5, 1.0, 3.0]))
    def tick(self, dt: float) -> None:
        self.now += dt

    @rule()
    def form_batch(self) -> None:
        self.expire_in_model()
        lane = self.expected_lane()
        batch = self.batcher.next_batch(self.now)
        if lane is None:
            assert batch is None
            assert all(self.now < r.enqueued_s + self.wait_s for r in self.waiting)
            return
        assert batch is not None
        self.take(batch, lane)

    def take(self, batch: Batch, lane: Lane) -> None:
        in_lane = [r for r in self.waiting if r.lane == lane]
        assert batch.lane == lane
        assert 1 <= len(batch.rows) <= batch.size <= lane.batch_sizes[-1]
        assert list(batch.rows) == in_lane[: len(batch.rows)]
        assert len(batch.rows) == min(batch.size, len(in_lane))
        if lane.fallback:
            assert batch.size == len(batch.rows)
        else:
            assert batch.size == best_batch_size(
                lane.batch_sizes, range(1, len(in_lane) + 1), lane.unit_area, self.overhead
            )
        for r in batch.rows:
            self.waiting.remove(r)
            self.fates[r].append("batch")
        self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.running))
        self.running.remove(batch)
        self.batcher.complete(batch, self.now)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from(self.accepted))
        assert self.batcher.cancel(r) == (r in self.waiting)
        if r in self.waiting:
            self.waiting.remove(r)
            self.fates[r].append("cancelled")

    @rule()
    def expire(self) -> None:
        self.expire_in_model()
        expired = self.batcher.expire(self.now)
        assert set(expired) == set(self.unreported)
        for r in expired:
            self.fates[r].append("deadline")
        self.unreported = []

    @rule()
    def sleep_until_woken(self) -> None:
        delay = self.batcher.next_wakeup(self.now)
        if delay is None:
            assert not self.waiting
            assert not self.unreported
            return
        assert delay >= 0
        self.now += delay
        self.expire_in_model()
        assert self.unreported or self.expected_lane() is not None
        if self.unreported:
            self.expire()
        else:
            self.form_batch()

    @invariant()
    def counts_follow_the_model_and_stay_within_bounds(self) -> None:
        assert self.batcher.queue_rows == len(self.waiting) <= MAX_ROWS
        tokens = sum(r.cost_tokens for r in self.waiting)
        assert self.batcher.queue_tokens == tokens <= MAX_TOKENS

    def teardown(self) -> None:
        left = self.batcher.close()
        assert set(left) == {*self.unreported, *self.waiting}
        assert [r for r in left if r in self.waiting] == self.waiting
        for r in left:
            self.fates[r].append("closed")
        for batch in self.running:
            self.batcher.complete(batch, self.now)
        assert (self.batcher.queue_rows, self.batcher.queue_tokens) == (0, 0)
        assert all(len(fate) == 1 for fate in self.fates.values())


TestI6EveryAcceptedRowHasExactlyOneFate = BatcherMachine.TestCase
