import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic
from shapeserve.tuning.fit import Rules, executed, fit, row_shapes, waste
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
                cost += float(demand.counts[row] * demand.costs[bucket])
            best = min(best, cost)
    return best


def cost_of(demand: Demand, sizes: tuple[int, ...]) -> float:
    places = np.searchsorted(demand.sizes, sizes)
    buckets = places[np.searchsorted(places, np.arange(len(demand.sizes)))]
    return float((demand.counts * demand.costs[buckets]).sum() + demand.variant_costs[places].sum())


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    n = draw(st.integers(1, 9))
    numbers = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    forced = draw(st.sets(st.integers(0, max(n - 2, 0)), max_size=2 if n > 1 else 0))
    return Demand(
        sizes=np.cumsum(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))),
        counts=np.array(draw(numbers), float),
        costs=np.cumsum(draw(numbers)).astype(float),
        variant_costs=np.array(draw(numbers), float),
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
    demand = Demand(sizes, counts, sizes.astype(float), np.zeros(n))
    ladder = best_ladders(demand, most)[-1]
    assert len(ladder.sizes) == most
    assert ladder.cost == pytest.approx(cost_of(demand, ladder.sizes))
    # 16 neighbours as one size: no such ladder may be better, and the optimum is at most 16 rows
    # of padding a row away.
    coarse = Demand(
        sizes[15::16], counts.reshape(-1, 16).sum(1), sizes[15::16] * 1.0, np.zeros(512)
    )
    below = np.concatenate(([0.0], np.cumsum(coarse.counts)))
    totals = np.concatenate(([0.0], below[1:] * coarse.costs))
    for _ in range(most - 1):
        steps = totals[None, :-1] - below[None, :-1] * coarse.costs[:, None]
        steps[np.triu_indices(512, 1)] = np.inf
        totals = np.concatenate(([0.0], steps.min(axis=1) + below[1:] * coarse.costs))
    assert best_ladders(coarse, most)[-1].cost == pytest.approx(totals[-1])
    assert ladder.cost <= totals[-1] <= ladder.cost + 16 * counts.sum()


def test_a_row_that_costs_less_in_a_larger_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="costs must not fall"):
        Demand(np.array([1, 2]), np.ones(2), np.array([2.0, 1.0]), np.zeros(2))


def test_sizes_are_aligned_but_for_the_end_and_what_is_forced() -> None:
    rules = Rules({"seq": 50}, align=8, forced=(13,))
    made = fit(lengths(3, 9, 10, 11, 17, 30, 50), rules, [4])[4].buckets["seq"]
    assert {13, 50} < set(made)
    assert all(size % 8 == 0 for size in made if size not in (13, 50))
    assert waste(lengths(13), {"seq": made}) == 0


def test_more_buckets_never_cost_more_and_as_many_as_lengths_pad_nothing() -> None:
    traffic = lengths(3, 3, 9, 10, 17, 50)
    fits = fit(traffic, Rules({"seq": 50}), range(1, 8))
    costs = [fits[number].cost for number in range(1, 8)]
    assert costs == sorted(costs, reverse=True)
    assert waste(traffic, fits[5].buckets) == 0


def test_too_few_buckets_for_what_is_forced_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 buckets are too few: 3 sizes are forced.*allow 3"):
        fit(lengths(3, 50), Rules({"seq": 50}, forced=(8, 16)), [1, 2])


def test_a_variant_cost_leaves_out_a_bucket_that_saves_less() -> None:
    traffic = traffic_of((10,), (19,), (20,), counts=[100, 5, 100])
    assert fit(traffic, Rules({"seq": 20}), [3])[3].buckets["seq"] == (10, 19, 20)
    made = fit(traffic, Rules({"seq": 20}, variant_cost=10.0), [3])[3]
    assert made.buckets["seq"] == (10, 20)
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


def test_a_tail_to_a_far_end_is_dense_where_rows_are_likely() -> None:
    beyond, rows = tail_beyond(np.array([3, 37]), np.array([9.0, 40.0]), 2**24)
    assert len(beyond) < 2**14
    assert (beyond[:8].tolist(), beyond[-1]) == ([*range(38, 46)], 2**24)
    assert rows.sum() == pytest.approx(1.0)


def test_equal_rows_have_a_tail_close_to_them() -> None:
    beyond, rows = tail_beyond(np.array([20]), np.array([50.0]), 100)
    assert rows[beyond <= 22].sum() > 0.99


def test_the_fit_leaves_room_above_the_longest_row_unless_told_otherwise() -> None:
    traffic = traffic_of(*((n,) for n in range(1, 81)), counts=[20.0] * 80)
    rules = Rules({"seq": 8192})
    assert fit(traffic, rules, [8], expect_longer=False)[8].buckets["seq"][-2] == 80
    assert 80 < fit(traffic, rules, [8])[8].buckets["seq"][-2] < 1000


# --- two axes


def images(*rows: tuple[int, int], counts: list[float] | None = None) -> Traffic:
    return traffic_of(*rows, counts=counts)


def brute_force_two(traffic: Traffic, end: tuple[int, int], most: int) -> float:
    """The least elements over all sets of shapes: tight ones have the sizes of some rows."""
    heights, widths = ({*traffic.sizes[:, axis].tolist()} for axis in (0, 1))
    corners = [c for c in itertools.product(heights, widths) if c != end]
    return min(
        executed(traffic, {"height,width": (*chosen, end)}).sum()
        for number in range(most)
        for chosen in itertools.combinations(corners, number)
    )


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_two_axes_lie_between_their_bound_and_a_small_gap(
    rows: list[tuple[int, int]], most: int
) -> None:
    traffic = images(*rows)
    made = fit(traffic, Rules({"height": 12, "width": 12}), [most])[most]
    optimum = brute_force_two(traffic, (12, 12), most)
    assert made.bound <= optimum * (1 + 1e-12)
    assert optimum <= made.cost * (1 + 1e-12)
    assert made.cost == executed(traffic, made.buckets).sum()
    assert row_shapes(made.buckets) <= most
    assert made.cost <= 1.2 * optimum  # it is a search: sometimes it misses, never by much


def test_shapes_are_where_the_rows_are() -> None:
    rows = [(480, 640), (640, 480), (640, 427), (600, 400)]
    made = fit(images(*rows), Rules({"height": 640, "width": 640}), [4])[4]
    assert made.buckets == {"height,width": ((480, 640), (640, 427), (640, 480), (640, 640))}
    assert waste(images(*rows), made.buckets) == 1 - (640 * 907 + 480 * 640 + 600 * 400) / (
        640 * 907 + 480 * 640 + 640 * 427
    )


def test_more_shapes_never_cost_more() -> None:
    rng = np.random.default_rng(2)
    traffic = images(*(tuple(row) for row in rng.integers(1, 65, (200, 2)).tolist()))
    fits = fit(traffic, Rules({"height": 64, "width": 64}), range(1, 17))
    costs = [made.cost for made in fits.values()]
    assert costs == sorted(costs, reverse=True)
    assert all(made.bound <= made.cost for made in fits.values())


def test_shapes_are_aligned_but_for_the_end() -> None:
    rng = np.random.default_rng(3)
    traffic = images(*(tuple(row) for row in rng.integers(1, 101, (60, 2)).tolist()))
    made = fit(traffic, Rules({"height": 100, "width": 100}, align=16), [6])[6]
    sizes = {size for shape in made.buckets["height,width"] for size in shape}
    assert all(size % 16 == 0 or size == 100 for size in sizes)


def test_thousands_of_sizes_are_searched_among_rounded_ones() -> None:
    rng = np.random.default_rng(4)
    traffic = images(*(tuple(row) for row in rng.integers(1, 1001, (4000, 2)).tolist()))
    made = fit(traffic, Rules({"height": 1000, "width": 1000}), [9])[9]
    assert made.cost == executed(traffic, made.buckets).sum()
    # Three even sizes along each axis, which is best for even rows but for their corners, cost
    # (2 / 3) ** 2 of padding to the end.
    assert made.cost < 0.46 * 4000 * 1000 * 1000


def test_two_axes_with_a_cost_of_their_own_are_fitted_to_it() -> None:
    rng = np.random.default_rng(0)
    traffic = images(*(tuple(row) for row in rng.integers(1, 17, (60, 2)).tolist()))
    ends = {"height": 16, "width": 16}
    steep = fit(traffic, Rules(ends, row_cost=lambda areas: areas**4), [6])[6]
    plain = fit(traffic, Rules(ends), [6])[6]
    assert steep.cost == (executed(traffic, steep.buckets) ** 4).sum()
    assert steep.cost < (executed(traffic, plain.buckets) ** 4).sum()
    assert steep.bound <= steep.cost
    dear = fit(traffic, Rules(ends, variant_cost=1e6), [6])[6]
    assert (row_shapes(dear.buckets), dear.cost) == (1, 60 * 256 + 1e6)


def test_what_two_or_three_axes_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="along one axis, the trace has height, width"):
        fit(images((4, 4)), Rules({"height": 8, "width": 8}, forced=(6,)), [4])
    traffic = Traffic(("a", "b", "c"), np.ones((2, 3), int), np.ones(2))
    with pytest.raises(ConfigError, match="at most two can be tuned together"):
        fit(traffic, Rules({"a": 1, "b": 1, "c": 1}), [4])
