"""The arithmetic of amortisation: worked examples to the digit, and what must always hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.amortize import (
    BreakCost,
    Fusion,
    Launches,
    Padding,
    Shape,
    Strategy,
    break_even_calls,
    cheaper_from,
    net_gain_s,
    one_dynamic,
    specialize_all,
    worth_specializing,
)
from shapeserve.evaluate.latency import FirstCall, Latency

SECONDS = st.integers(0, 10**9).map(lambda us: us / 1e6)
COUNTS = st.integers(0, 10**7)


# --- worked examples


def test_ten_kernels_joined_to_two() -> None:
    before = Launches(kernels=10, busy_s=10 * 8 / 1e6, launch_s=5e-6)
    after = Launches(kernels=2, busy_s=70e-6, launch_s=5e-6)
    fusion = Fusion(before, after)
    assert (before.total_s, after.total_s) == (130e-6, 80e-6)
    assert fusion.speedup == 1.625
    assert (fusion.saved_s, fusion.launch_saved_s) == (50e-6, 40e-6)


def test_twelve_seconds_of_compile_are_earned_back_after_400_calls() -> None:
    assert break_even_calls(12, 0.100, 0.070) == 400
    assert net_gain_s(12, 0.100, 0.070, 400) == 0
    assert net_gain_s(12, 0.100, 0.070, 100) == -9


def test_three_specialised_shapes_against_one_dynamic_program() -> None:
    shapes = [Shape(name, 1, 4, 0.008, 0.010) for name in "abc"]
    special, dynamic = specialize_all(shapes), one_dynamic(shapes, 6)
    assert (special.cold_s, dynamic.cold_s) == (12, 6)
    assert cheaper_from(dynamic, special) == 3000  # 6 s more, 2 ms less a call
    assert special.total_s(3000) == dynamic.total_s(3000) == 36
    assert shapes[0].break_even == 2000


def test_four_graph_breaks_of_twenty_microseconds() -> None:
    cost = BreakCost(breaks=4, one_s=20e-6)
    assert cost.call_s == 80e-6
    assert cost.million_calls_s == 80


def test_padding_against_the_recompiles_it_avoids() -> None:
    padding = Padding(call_s=0.010, waste=0.2, compile_s=5, shapes=100, programs=2, programs_s=20)
    assert padding.padding_s == 0.002
    assert padding.recompiles_avoided == 98
    assert padding.avoided_s == 480
    assert padding.pays_until == 240_000


def test_a_share_decides_what_is_worth_specialising() -> None:
    hot, cold = Shape("hot", 0.9, 4, 0.008, 0.010), Shape("cold", 0.1, 4, 0.008, 0.010)
    assert worth_specializing([hot, cold], 2222) == []
    assert worth_specializing([hot, cold], 2223) == [hot]
    assert worth_specializing([hot, cold], 20_000) == [hot, cold]


def test_what_saves_nothing_never_pays() -> None:
    assert break_even_calls(1, 0.1, 0.1) is None
    assert break_even_calls(1, 0.1, 0.2) is None
    assert break_even_calls(0, 0.1, 0.2) == 0
    assert cheaper_from(Strategy("a", 1, 0.1), Strategy("b", 1, 0.2)) is None
    assert cheaper_from(Strategy("a", 2, 0.2), Strategy("b", 1, 0.1)) == 0
    free = Padding(call_s=0.01, waste=0, compile_s=5, shapes=9, programs=2, programs_s=20)
    assert free.pays_until is None
    dear = Padding(call_s=0.01, waste=0.1, compile_s=5, shapes=3, programs=2, programs_s=20)
    assert (dear.avoided_s, dear.pays_until, dear.recompiles_avoided) == (-5, 0, 1)
    assert Fusion(Launches(1, 1, 0), Launches(0, 0, 0)).speedup == math.inf


# --- what always holds


@given(cost=SECONDS, before=SECONDS, after=SECONDS)
def test_break_even_is_the_first_call_without_a_loss(
    cost: float, before: float, after: float
) -> None:
    calls = break_even_calls(cost, before, after)
    if calls is None:
        assert after >= before
        assert net_gain_s(cost, before, after, 10**9) < 0
        return
    assert net_gain_s(cost, before, after, calls) >= 0
    assert calls == 0 or net_gain_s(cost, before, after, calls - 1) < 0


@given(cost=SECONDS, more=SECONDS, before=SECONDS, after=SECONDS)
def test_a_dearer_compile_never_pays_earlier(
    cost: float, more: float, before: float, after: float
) -> None:
    cheap, dear = (break_even_calls(c, before, after) for c in (cost, cost + more))
    assert dear is None or (cheap is not None and cheap <= dear)


@given(cost=SECONDS, before=SECONDS, after=SECONDS, faster=SECONDS)
def test_a_faster_program_never_pays_later(
    cost: float, before: float, after: float, faster: float
) -> None:
    slow, fast = (break_even_calls(cost, before, a) for a in (after, min(after, faster)))
    assert slow is None or (fast is not None and fast <= slow)


@given(first=st.tuples(SECONDS, SECONDS), second=st.tuples(SECONDS, SECONDS), calls=COUNTS)
def test_a_strategy_is_cheaper_from_exactly_its_break_even(
    first: tuple[float, float], second: tuple[float, float], calls: int
) -> None:
    a, b = Strategy("a", *first), Strategy("b", *second)
    start = cheaper_from(a, b)
    # Whole microseconds, so that the comparison is exact.
    total_a, total_b = (round(1e6 * c) + round(1e6 * p) * calls for c, p in (first, second))
    if b.cold_s > a.cold_s:
        assert (total_b <= total_a) == (start is not None and calls >= start)
    elif start == 0:
        assert total_b <= total_a
    else:
        assert start is None
        assert b.call_s > a.call_s


@given(
    shares=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    calls=COUNTS,
    more=COUNTS,
)
def test_more_traffic_never_makes_fewer_shapes_worth_it(
    shares: list[int], calls: int, more: int
) -> None:
    shapes = [Shape(str(i), s, 4 + i, 0.008, 0.010) for i, s in enumerate(shares)]
    now = worth_specializing(shapes, calls)
    assert set(now) <= set(worth_specializing(shapes, calls + more))


@given(kernels=st.integers(1, 1000), fewer=st.integers(0, 1000), busy=SECONDS, launch=SECONDS)
def test_fewer_launches_of_the_same_work_are_never_slower(
    kernels: int, fewer: int, busy: float, launch: float
) -> None:
    fusion = Fusion(
        Launches(kernels, busy, launch), Launches(max(kernels - fewer, 0), busy, launch)
    )
    assert fusion.saved_s >= 0
    assert fusion.speedup >= 1 or fusion.before.total_s == 0


@given(waste=st.integers(0, 100).map(lambda p: p / 100), less=st.integers(0, 100))
def test_less_padding_pays_for_longer(waste: float, less: int) -> None:
    def until(share: float) -> float:
        calls = Padding(0.01, share, compile_s=5, shapes=50, programs=2, programs_s=20).pays_until
        return math.inf if calls is None else calls

    assert until(min(waste, less / 100)) >= until(waste)


# --- what is refused


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: break_even_calls(-1, 0.1, 0.05), "cost_s is -1"),
        (lambda: break_even_calls(1, math.nan, 0.05), "before_s is nan"),
        (lambda: break_even_calls(1, 0.1, math.inf), "after_s is inf"),
        (lambda: net_gain_s(1, 0.1, 0.05, -1), "calls is -1"),
        (lambda: specialize_all([]), "at least one shape"),
        (lambda: one_dynamic([Shape("a", 0, 1, 1, 1)], 1), "at least one shape"),
        (lambda: Padding(1, 1.5, 1, 1, 1, 1).padding_s, "waste is 1.5"),
        (lambda: FirstCall(0, "nothing"), "first call of 0 s"),
        (lambda: FirstCall(math.nan, "nothing"), "first call of nan s"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(call: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


# --- a steady-state number needs the first call


def test_a_steady_state_number_cannot_be_built_without_the_first_call() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        Latency(later_s=(0.001,))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="needs the FirstCall"):
        Latency(None, (0.001,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs the FirstCall"):
        Latency(12.0, (0.001,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="later_s is empty"):
        Latency(FirstCall(12.0, "compile"), ())


def test_the_percentile_is_a_call_that_was_measured() -> None:
    latency = Latency(FirstCall(1.0, "compile"), tuple(i / 1e3 for i in range(1, 101)))
    assert latency.median_s == pytest.approx(0.0505)
    assert latency.p99_s == 0.1
    assert Latency(FirstCall(1.0, "x"), (0.001, 0.009)).p99_s == 0.009
    assert latency.to_dict()["first_s"] == 1.0
