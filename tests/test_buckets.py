"""Invariant I1: fit never raises, is optimal and monotone, and more buckets never hurt."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.buckets import Bucket, Grid, Shape, padding

AXES = {1: ("seq",), 2: ("batch", "seq"), 3: ("batch", "height", "width")}
SIZES = st.integers(1, 40)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    axes = AXES[draw(st.sampled_from(sorted(AXES)))]
    rows = draw(st.lists(st.tuples(*[SIZES] * len(axes)), max_size=12))
    return Grid(axes, [Bucket(tuple(zip(axes, row, strict=True))) for row in rows])


@st.composite
def grids_and_shapes(draw: st.DrawFn, count: int = 1) -> tuple[Grid, list[Shape]]:
    grid = draw(grids())
    size = st.integers(1, 44)
    return grid, [{axis: draw(size) for axis in grid.axes} for _ in range(count)]


def rows(bucket: Bucket) -> int:
    return bucket.as_dict().get("batch", 1)


def cost_or_inf(bucket: Bucket | None) -> float:
    return float("inf") if bucket is None else bucket.area


@given(grids_and_shapes())
def test_i1_fit_is_the_cheapest_cover_then_fewer_rows(case: tuple[Grid, list[Shape]]) -> None:
    grid, (shape,) = case
    covers = [b for b in grid.buckets if all(b.size(a) >= shape[a] for a in grid.axes)]
    found = grid.fit(shape)
    if not covers:
        assert found is None
        return
    assert found in covers
    assert (found.area, rows(found)) == min((b.area, rows(b)) for b in covers)


@given(grids_and_shapes(count=2))
def test_i1_fit_is_monotone(case: tuple[Grid, list[Shape]]) -> None:
    grid, (one, other) = case
    larger = {axis: max(one[axis], other[axis]) for axis in grid.axes}
    assert cost_or_inf(grid.fit(one)) <= cost_or_inf(grid.fit(larger))


@given(grids())
def test_i1_a_shape_equal_to_a_bucket_uses_that_bucket(grid: Grid) -> None:
    for bucket in grid.buckets:
        assert grid.fit(bucket.as_dict()) == bucket


@given(grids_and_shapes(), st.lists(SIZES, min_size=3, max_size=3))
def test_i1_adding_a_bucket_never_makes_an_answer_worse(
    case: tuple[Grid, list[Shape]], sizes: list[int]
) -> None:
    grid, (shape,) = case
    added = Bucket(tuple(zip(grid.axes, sizes, strict=False)))
    more = Grid(grid.axes, [*grid.buckets, added])
    assert cost_or_inf(more.fit(shape)) <= cost_or_inf(grid.fit(shape))


@given(
    grids(),
    st.dictionaries(
        st.sampled_from(["batch", "seq", "height", "width", "depth"]),
        st.integers(-(2**70), 2**70),
    ),
)
def test_i1_fit_never_raises_and_what_it_finds_covers(grid: Grid, shape: Shape) -> None:
    found = grid.fit(shape)
    assert found is None or found.covers({a: s for a, s in shape.items() if s > 0})


@given(grids_and_shapes(), st.data())
def test_i1_holds_for_a_measured_cost_that_grows_with_the_bucket(
    case: tuple[Grid, list[Shape]], data: st.DataObject
) -> None:
    grid, (shape,) = case
    weights = {axis: data.draw(st.integers(1, 9)) for axis in grid.axes}
    table = {b: float(sum(weights[a] * s for a, s in b.sizes)) for b in grid.buckets}
    measured = Grid(grid.axes, grid.buckets, table.__getitem__)
    found = measured.fit(shape)
    covers = [b for b in grid.buckets if b.covers(shape)]
    assert (table[found] if found else None) == min((table[b] for b in covers), default=None)
    assert all(measured.fit(b.as_dict()) == b for b in grid.buckets)


def test_the_cheapest_cover_wins_where_a_lexicographic_scan_takes_the_first() -> None:
    # vllm-gaudi took (2, 4096), 8192 padded elements, for this shape.
    grid = Grid(("batch", "seq"), [Bucket.of(batch=2, seq=4096), Bucket.of(batch=4, seq=128)])
    assert grid.fit({"batch": 2, "seq": 100}) == Bucket.of(batch=4, seq=128)


def test_equal_areas_go_to_fewer_rows() -> None:
    grid = Grid(("batch", "seq"), [Bucket.of(batch=4, seq=64), Bucket.of(batch=2, seq=128)])
    assert grid.fit({"batch": 1, "seq": 10}) == Bucket.of(batch=2, seq=128)


def test_equal_costs_go_to_fewer_rows_even_if_the_area_is_larger() -> None:
    buckets = [Bucket.of(batch=4, seq=16), Bucket.of(batch=1, seq=128)]
    grid = Grid(("batch", "seq"), buckets, cost=lambda _: 1.0)
    assert grid.fit({"batch": 1, "seq": 10}) == Bucket.of(batch=1, seq=128)


@pytest.mark.parametrize(
    ("seq", "expected"), [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, None)]
)
def test_a_length_on_the_boundary_stays_in_its_bucket(seq: int, expected: int | None) -> None:
    grid = Grid(("batch", "seq"), [Bucket.of(batch=1, seq=s) for s in (16, 32)])
    found = grid.fit_row({"seq": seq})
    assert (found.size("seq") if found else None) == expected


def test_an_axis_left_out_is_free_and_an_unknown_axis_is_never_covered() -> None:
    grid = Grid(("batch", "seq"), [Bucket.of(batch=2, seq=16), Bucket.of(batch=4, seq=8)])
    assert grid.fit({"seq": 12}) == Bucket.of(batch=2, seq=16)
    assert grid.fit({"batch": 3}) == Bucket.of(batch=4, seq=8)
    assert grid.fit({"batch": 1, "seq": 8, "width": 1}) is None


@pytest.mark.parametrize("axes", AXES.values(), ids=",".join)
def test_an_empty_grid_covers_nothing(axes: tuple[str, ...]) -> None:
    grid = Grid(axes, [])
    assert grid.fit(dict.fromkeys(axes, 1)) is None
    assert [grid.max_size(axis) for axis in axes] == [0] * len(axes)


def test_batch_sizes_of_a_row_shape_are_ascending_and_lead_to_their_buckets() -> None:
    sizes = itertools.product((8, 1, 4), (32, 16))
    grid = Grid(
        ("batch", "seq"), [Bucket.of(batch=b, seq=s) for b, s in sizes if (b, s) != (8, 32)]
    )
    assert grid.row_axes == ("seq",)
    assert grid.batch_sizes((("seq", 16),)) == (1, 4, 8)
    assert grid.batch_sizes((("seq", 32),)) == (1, 4)
    assert grid.batch_sizes((("seq", 64),)) == ()
    assert grid.bucket(4, (("seq", 32),)) == Bucket.of(batch=4, seq=32)
    with pytest.raises(KeyError):
        grid.bucket(8, (("seq", 32),))


def test_a_grid_without_a_batch_axis_fits_single_rows() -> None:
    grid = Grid(("tokens",), [Bucket.of(tokens=512), Bucket.of(tokens=2048)])
    assert grid.fit_row({"tokens": 600}) == Bucket.of(tokens=2048)
    assert grid.batch_sizes((("tokens", 512),)) == (1,)


def test_the_version_depends_on_the_buckets_and_not_on_their_order() -> None:
    small, large = Bucket.of(batch=1, seq=8), Bucket.of(seq=16, batch=1)
    grid = Grid(("batch", "seq"), [small, large, small])
    assert grid.buckets == (small, Bucket.of(batch=1, seq=16))
    assert grid.version == Grid(("batch", "seq"), [large, small]).version
    assert grid.version != Grid(("batch", "seq"), [small]).version


@pytest.mark.parametrize(
    "bucket",
    [Bucket.of(batch=1), Bucket.of(batch=1, seq=8, width=1), Bucket.of(batch=0, seq=8)],
    ids=["axis missing", "axis too many", "size below 1"],
)
def test_a_grid_refuses_a_malformed_bucket(bucket: Bucket) -> None:
    with pytest.raises(ValueError, match="bucket '"):
        Grid(("batch", "seq"), [bucket])


def test_a_bucket_knows_its_area_label_and_row() -> None:
    bucket = Bucket.of(batch=8, height=32, width=64)
    assert bucket.area == 8 * 32 * 64
    assert bucket.label == "batch=8,height=32,width=64"
    assert bucket.axes == ("batch", "height", "width")
    assert bucket.without("batch") == (("height", 32), ("width", 64))
    with pytest.raises(KeyError):
        bucket.size("seq")


def test_a_bucket_covers_shapes_up_to_its_sizes_on_its_own_axes() -> None:
    bucket = Bucket.of(batch=2, seq=8)
    assert bucket.covers({"batch": 2, "seq": 8})
    assert not bucket.covers({"batch": 1, "seq": 9})
    assert not bucket.covers({"seq": 1, "width": 1})


# What an executed area holds


@st.composite
def areas(draw: st.DrawFn) -> tuple[dict[str, int], list[dict[str, int]]]:
    sizes = {axis: draw(st.integers(1, 6)) for axis in ("batch", "height", "width")}
    row = st.fixed_dictionaries(
        {axis: st.integers(1, sizes[axis]) for axis in sizes if axis != "batch"}
    )
    return sizes, draw(st.lists(row, max_size=sizes["batch"]))


@given(areas())
def test_i7_every_element_of_an_area_is_real_or_padding_of_one_axis(
    case: tuple[dict[str, int], list[dict[str, int]]],
) -> None:
    sizes, real_rows = case
    kinds = np.full((sizes["batch"], sizes["height"], sizes["width"]), "padding_batch", object)
    for image, row in zip(kinds, real_rows, strict=False):
        image[:] = "padding_height"
        image[: row["height"]] = "padding_width"
        image[: row["height"], : row["width"]] = "real"
    counted = padding(("batch", "height", "width"), real_rows, sizes)
    assert {kind: n for kind, n in counted.items() if n} == Counter(kinds.ravel().tolist())
    assert sum(counted.values()) == kinds.size
