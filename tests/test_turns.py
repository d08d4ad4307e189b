"""Whose batch is next: equal shares of device time, and no flood that keeps others waiting."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapeserve.turns import Turns

SECONDS = st.integers(1, 50).map(float)


def serve(turns: Turns[str], who: str, seconds: float, cost: float = 1.0) -> None:
    """Run one batch alone on the device."""
    turns.done(who, cost, turns.take(who, cost), seconds)


def members(*names: str) -> Turns[str]:
    turns: Turns[str] = Turns()
    for name in names:
        turns.join(name)
    return turns


def chosen(turns: Turns[str], ready: str | list[str]) -> str:
    who = turns.next(ready)
    assert who is not None
    return who


@settings(max_examples=100)
@given(
    longest=st.lists(SECONDS, min_size=2, max_size=4),
    durations=st.lists(st.floats(0.01, 1), min_size=1, max_size=80),
)
def test_queues_that_never_empty_get_equal_device_time_give_or_take_a_batch(
    longest: list[float], durations: list[float]
) -> None:
    names = [str(i) for i in range(len(longest))]
    turns = members(*names)
    served = dict.fromkeys(names, 0.0)
    for share in durations:
        who = chosen(turns, names)
        seconds = share * longest[int(who)]
        serve(turns, who, seconds)
        served[who] += seconds
        assert max(served.values()) - min(served.values()) <= max(longest)


@settings(max_examples=100)
@given(
    flood_s=st.lists(SECONDS, min_size=1, max_size=60),
    lone_s=SECONDS,
    pauses=st.lists(st.integers(0, 6), min_size=1, max_size=10),
)
def test_a_lone_request_in_the_flood_of_another_waits_a_batch_or_its_own_excess(
    flood_s: list[float], lone_s: float, pauses: list[int]
) -> None:
    turns = members("flood", "lone")
    durations = deque(flood_s)
    for pause in pauses:
        for _ in range(pause):
            assert turns.next(["flood"]) == "flood"
            serve(turns, "flood", durations[0])
            durations.rotate()
        waited_s = 0.0
        while turns.next(["flood", "lone"]) == "flood":
            serve(turns, "flood", durations[0])
            waited_s += durations[0]
            durations.rotate()
        # Without a pause it may have to make up for its last batch.
        assert waited_s <= (0 if pause * min(flood_s) >= lone_s else lone_s + max(flood_s))
        serve(turns, "lone", lone_s)


def test_after_any_time_alone_a_flood_has_no_debt_and_the_idle_no_credit() -> None:
    turns = members("a", "b")
    for _ in range(1000):
        assert turns.next(["a"]) == "a"
        serve(turns, "a", 1.0)
    order = []
    for _ in range(10):
        order.append(chosen(turns, "ab"))
        serve(turns, order[-1], 1.0)
    assert order == ["b", "a"] * 5


def test_who_was_alone_so_far_owes_nothing_to_who_joins() -> None:
    turns = members("a")
    for _ in range(100):
        assert turns.next("a") == "a"
        serve(turns, "a", 1.0)
    assert turns.next("") is None
    assert turns.next("a") == "a"
    turns.join("b")
    order = []
    for _ in range(4):
        order.append(chosen(turns, "ab"))
        serve(turns, order[-1], 1.0)
    assert order == ["b", "a", "b", "a"]


def test_once_the_device_was_idle_nobody_owes_anything() -> None:
    turns = members("a", "b")
    for seconds in (1.0, 100.0, 1.0, 1.0):  # the second turn is b's, which owes 97 s now
        serve(turns, chosen(turns, "ab"), seconds)
    assert turns.next("ab") == "a"
    assert turns.next("ab") == "a"  # nobody has taken anything
    assert turns.next("") is None
    order = []
    for _ in range(4):
        order.append(chosen(turns, "ab"))
        serve(turns, order[-1], 1.0)
    assert order == ["b", "a", "b", "a"]  # b's turn is longer ago


def test_a_batch_in_flight_is_charged_by_its_cost_before_it_is_done() -> None:
    turns = members("slow", "quick")
    both = ["slow", "quick"]
    assert turns.next(both) == "slow"
    serve(turns, "slow", 10.0, cost=100)
    serve(turns, "quick", 1.0, cost=100)
    assert turns.next(both) == "quick"
    for _ in range(9):
        serve(turns, "quick", 1.0, cost=100)
    first = turns.take(chosen(turns, both), 100)  # level at 10 s: the turn that is longer ago
    assert first == pytest.approx(10.0)
    # The slow one's next batch waits although its first is not done yet.
    assert turns.next(both) == "quick"
    turns.done("slow", 100, first, 0.1)  # much less than expected: it gets back what it paid
    assert turns.next(both) == "quick"
    serve(turns, "quick", 1.0, cost=100)
    assert turns.next(both) == "slow"


def test_a_charge_that_was_too_low_is_corrected_upwards() -> None:
    turns = members("a", "b")
    charge_s = turns.take(chosen(turns, "ab"), 1e6)  # nothing is known of its rate
    assert charge_s == 0.0
    turns.done("a", 1e6, charge_s, 5.0)
    for _ in range(5):
        assert turns.next("ab") == "b"
        serve(turns, "b", 1.0)
    assert turns.next("ab") == "a"


def test_who_joins_late_starts_level_and_who_left_is_forgotten() -> None:
    turns = members("a", "b")
    for _ in range(100):
        serve(turns, chosen(turns, "ab"), 1.0)
    turns.join("c")
    first = [chosen(turns, "abc")]
    serve(turns, first[0], 1.0)
    for _ in range(5):
        first.append(chosen(turns, "abc"))
        serve(turns, first[-1], 1.0)
    assert sorted(first) == ["a", "a", "b", "b", "c", "c"]
    charge_s = turns.take("c", 1.0)
    turns.leave("c")
    turns.done("c", 1.0, charge_s, 99.0)
    assert turns.next("ab") in ("a", "b")
    turns.join("c")
    assert turns.next("c") == "c"
