import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic
from shapeserve.tuning.fit import Rules, executed, fit, waste
from shapeserve.tuning.ladder import Demand, best_ladders
from shapeserve.tuning.tail import tail_beyond, with_tail


def traffic_of(*rows: tuple[int, ...], counts: list[float] | None = None) -> Traffic:
    axes = ("seq",) if len(rows[0]) == 1 else ("height", "width")
    return Traffic(axes, np.array(rows), np.array(counts or [1.0] * len(rows)))


def lengths(*sizes: int) -> Traffic:
    return traffic_of(*((size,) for size in sizes))


# --- one axis


def brute_force(demand: Demand, most: int) -> float:
    """The least cost over every ladder of at most ``most`` candidates."""
    n = len(demand.sizes)
    free = [i for i in range(n - 1) if i not in demand.forced]
    best = math.inf
    for number in range(most - len(demand.forced)):
        for chosen in itertools.combinations(free, number):
            ladder = sorted((*chosen, *demand.forced, n - 1))
            cost = sum(demand.variant_costs[i] for i in ladder)
            for row in range(n):
                bucket = next(i for i in ladder if i >= row)
                cost += float((demand.counts[row] * demand.costs[bucket]).sum())
            best = min(best, cost)
    return best


def cost_of(demand: Demand, sizes: tuple[int, ...]) -> float:
    places = np.searchsorted(demand.sizes, sizes)
    buckets = places[np.searchsorted(places, np.arange(len(demand.sizes)))]
    return float((demand.counts * demand.costs[buckets]).sum() + demand.variant_costs[places].sum())


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    n, classes = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    numbers = st.integers(0, 9)
    table = st.lists(st.lists(numbers, min_size=classes, max_size=classes), min_size=n, max_size=n)
    sizes = np.cumsum(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)))
    forced = draw(st.sets(st.integers(0, max(n - 2, 0)), max_size=2 if n > 1 else 0))
    return Demand(
        sizes=sizes,
        counts=np.array(draw(table), float),
        costs=np.cumsum(np.array(draw(table), float), axis=0),
        variant_costs=np.array(draw(st.lists(numbers, min_size=n, max_size=n)), float),
        forced=tuple(sorted(forced)),
    )


@given(demands(), st.integers(0, 4))
def test_every_number_of_buckets_costs_what_brute_force_finds(demand: Demand, spare: int) -> None:
    least = len(demand.forced) + 1
    found = best_ladders(demand, least + spare)
    assert len(found) == spare + 1
    for number, ladder in enumerate(found, least):
        assert ladder.cost == pytest.approx(brute_force(demand, number))
        assert ladder.cost == pytest.approx(cost_of(demand, ladder.sizes))
        assert len(ladder.sizes) <= number
        assert set(demand.sizes[list(demand.forced)]) <= set(ladder.sizes)
        assert ladder.sizes[-1] == demand.sizes[-1]


def test_large_cases_match_the_plain_recurrence() -> None:
    """Without divide and conquer it takes minutes for all lengths, so for every 16th of them."""
    n, most = 8192, 32
    counts = np.random.default_rng(0).integers(0, 12, n).astype(float)
    sizes = np.arange(1, n + 1)
    demand = Demand(sizes, counts[:, None], sizes[:, None].astype(float), np.zeros(n))
    ladder = best_ladders(demand, most)[-1]
    assert len(ladder.sizes) == most
    assert ladder.cost == pytest.approx(cost_of(demand, ladder.sizes))
    # 16 neighbours as one size: no such ladder may be better, and the optimum is at most 16 rows
    # of padding a row away.
    coarse = Demand(
        sizes[15::16],
        counts.reshape(-1, 16).sum(1)[:, None],
        sizes[15::16, None] * 1.0,
        np.zeros(512),
    )
    below = np.concatenate(([0.0], np.cumsum(coarse.counts[:, 0])))
    totals = np.concatenate(([0.0], below[1:] * coarse.costs[:, 0]))
    for _ in range(most - 1):
        steps = totals[None, :-1] - below[None, :-1] * coarse.costs
        steps[np.triu_indices(512, 1)] = np.inf
        totals = np.concatenate(([0.0], steps.min(axis=1) + below[1:] * coarse.costs[:, 0]))
    assert best_ladders(coarse, most)[-1].cost == pytest.approx(totals[-1])
    assert ladder.cost <= totals[-1] <= ladder.cost + 16 * counts.sum()


def test_a_row_that_costs_less_in_a_larger_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="costs must not fall"):
        Demand(np.array([1, 2]), np.ones((2, 1)), np.array([[2.0], [1.0]]), np.zeros(2))


def test_sizes_are_aligned_but_for_the_end_and_what_is_forced() -> None:
    rules = Rules({"seq": 50}, align=8, forced={"seq": (13,)})
    made = fit(lengths(3, 9, 10, 11, 17, 30, 50), rules, [4])[4].ladders["seq"]
    assert {13, 50} < set(made)
    assert all(size % 8 == 0 for size in made if size not in (13, 50))
    assert waste(lengths(13), {"seq": made}) == 0


def test_more_buckets_never_cost_more_and_as_many_as_lengths_pad_nothing() -> None:
    traffic = lengths(3, 3, 9, 10, 17, 50)
    fits = fit(traffic, Rules({"seq": 50}), range(1, 8))
    costs = [fits[number].cost for number in range(1, 8)]
    assert costs == sorted(costs, reverse=True)
    assert waste(traffic, fits[5].ladders) == 0


def test_too_few_buckets_for_what_is_forced_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"2 buckets are too few: 3 row shapes are forced.*allow 3"
    ):
        fit(lengths(3, 50), Rules({"seq": 50}, forced={"seq": (8, 16)}), [1, 2])


def test_a_variant_cost_leaves_out_a_bucket_that_saves_less() -> None:
    traffic = traffic_of((10,), (19,), (20,), counts=[100, 5, 100])
    assert fit(traffic, Rules({"seq": 20}), [3])[3].ladders["seq"] == (10, 19, 20)
    made = fit(traffic, Rules({"seq": 20}, variant_cost=10.0), [3])[3]
    assert made.ladders["seq"] == (10, 20)
    assert made.cost == 100 * 10 + 105 * 20 + 2 * 10


def test_waste_is_padding_of_all_that_is_executed() -> None:
    assert waste(lengths(2, 4, 5), {"seq": (4, 8)}) == 1 - 11 / 16
    assert waste(traffic_of((2, 3), (4, 4)), {"height": (4,), "width": (3, 4)}) == 1 - 22 / 28


# --- what was not seen


def test_a_tail_is_one_row_that_thins_out_towards_the_end() -> None:
    sizes, counts = np.arange(1, 101), np.full(100, 10.0)
    beyond, rows = tail_beyond(sizes, counts, 200)
    assert (beyond[0], beyond[-1]) == (101, 200)
    assert rows.sum() == pytest.approx(1.0)
    assert np.all(np.diff(rows[:-1]) < 0)


@pytest.mark.parametrize(
    ("rows", "end"), [([5, 9, 50], 50), ([7], 50)], ids=["at the end", "one row"]
)
def test_there_is_no_tail_beyond_the_end_or_of_one_row(rows: list[int], end: int) -> None:
    traffic = lengths(*rows)
    assert with_tail(traffic, {"seq": end}).sizes.tolist() == traffic.sizes.tolist()


def test_equal_rows_have_a_tail_close_to_them() -> None:
    beyond, rows = tail_beyond(np.array([20]), np.array([50.0]), 100)
    assert rows[beyond <= 22].sum() > 0.99


def test_the_fit_leaves_room_above_the_longest_row_unless_told_otherwise() -> None:
    traffic = traffic_of(*((n,) for n in range(1, 81)), counts=[20.0] * 80)
    rules = Rules({"seq": 8192})
    assert fit(traffic, rules, [8], expect_longer=False)[8].ladders["seq"][-2] == 80
    assert 80 < fit(traffic, rules, [8])[8].ladders["seq"][-2] < 1000


# --- two axes


def brute_force_two(traffic: Traffic, ends: dict[str, int], most: int) -> float:
    best = math.inf
    choices = []
    for column, axis in enumerate(traffic.axes):
        inner = sorted({*traffic.sizes[:, column].tolist()} - {ends[axis]})
        choices.append(
            [
                (*chosen, ends[axis])
                for number in range(len(inner) + 1)
                for chosen in itertools.combinations(inner, number)
            ]
        )
    for one, other in itertools.product(*choices):
        if len(one) * len(other) <= most:
            best = min(best, executed(traffic, dict(zip(ends, (one, other), strict=True))).sum())
    return best


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=7),
    st.integers(1, 7),
)
def test_two_axes_lie_between_their_bound_and_a_small_gap(
    rows: list[tuple[int, int]], most: int
) -> None:
    traffic = traffic_of(*rows)
    ends = {"height": 12, "width": 12}
    made = fit(traffic, Rules(ends), [most], expect_longer=False)[most]
    optimum = brute_force_two(traffic, ends, most)
    assert made.bound <= optimum * (1 + 1e-12)
    assert optimum <= made.cost * (1 + 1e-12)
    assert made.cost == executed(traffic, made.ladders).sum()
    assert made.shapes <= most
    assert made.cost <= 1.25 * optimum  # it is a search: sometimes it misses, never by much


def test_two_axes_with_a_cost_of_their_own_are_fitted_to_it() -> None:
    rng = np.random.default_rng(0)
    traffic = traffic_of(*(tuple(row) for row in rng.integers(1, 17, (60, 2)).tolist()))
    ends = {"height": 16, "width": 16}
    steep = Rules(ends, row_cost=lambda areas: areas**4)
    made = fit(traffic, steep, [6], expect_longer=False)[6]
    plain = fit(traffic, Rules(ends), [6], expect_longer=False)[6]
    assert made.cost == (executed(traffic, made.ladders) ** 4).sum()
    assert made.cost < (executed(traffic, plain.ladders) ** 4).sum()
    assert made.bound <= made.cost
    dear = fit(traffic, Rules(ends, variant_cost=1e6), [6], expect_longer=False)[6]
    assert (dear.shapes, dear.cost) == (1, 60 * 256 + 1e6)


def test_two_axes_share_the_shapes_as_the_traffic_needs_them() -> None:
    rows = [(height, 64) for height in (8, 16, 24, 32)]
    made = fit(traffic_of(*rows), Rules({"height": 32, "width": 64}), [4])[4]
    assert (made.ladders, made.gap) == ({"height": (8, 16, 24, 32), "width": (64,)}, 0.0)


def test_three_axes_are_refused() -> None:
    traffic = Traffic(("a", "b", "c"), np.ones((2, 3), int), np.ones(2))
    with pytest.raises(ConfigError, match="at most two can be tuned together"):
        fit(traffic, Rules({"a": 1, "b": 1, "c": 1}), [4])
