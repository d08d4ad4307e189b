"""Every branch of the decision for one row."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.buckets import Bucket, Grid, RowKey
from shapeserve.config import RareShape
from shapeserve.dispatch import Dispatcher, Route
from shapeserve.errors import ConfigError, InvalidRequest
from shapeserve.metrics import FallbackReason

CHOICES = ["fallback", "split", "truncate", "reject"]


def text_grid(*lengths: int) -> Grid:
    pairs = itertools.product((1, 4), lengths)
    return Grid(("batch", "seq"), [Bucket.of(batch=b, seq=s) for b, s in pairs])


def text(*lengths: int, hard: int = 512, options: Any = None, **rules: Any) -> Dispatcher:
    grid = text_grid(*(lengths or (8, 16, 32, 64, 128, 256)))
    return Dispatcher(grid, {"seq": RareShape(**rules)}, {"seq": hard}, **(options or {}))


def image(rules: dict[str, RareShape], *sizes: tuple[int, int], hard: int = 10**6) -> Dispatcher:
    buckets = [Bucket.of(batch=1, height=h, width=w) for h, w in sizes]
    grid = Grid(("batch", "height", "width"), buckets)
    return Dispatcher(grid, rules, {"height": hard, "width": hard})


def seq(size: int) -> RowKey:
    return (("seq", size),)


# Within the grid


@pytest.mark.parametrize(("length", "bucket"), [(1, 8), (8, 8), (9, 16), (128, 128), (256, 256)])
def test_a_covered_row_runs_in_its_bucket(length: int, bucket: int) -> None:
    assert text().route({"seq": length}) == Route("bucket", seq(bucket))


def test_the_choice_for_long_rows_does_not_touch_rows_that_fit() -> None:
    for choice in CHOICES:
        assert text().route({"seq": 256}, over_max=choice) == Route("bucket", seq(256))


@pytest.mark.parametrize(
    ("length", "rules", "falls_back"),
    [
        (3208, {}, True),
        (3300, {}, False),
        (3208, {"max_padding_waste": 0.7}, False),
        (3208, {"max_padding_waste": 1.0}, False),
        (3208, {"guard_min": 8192}, False),
        (3208, {"guard_min": 8191}, True),
    ],
    ids=["wasteful", "tolerable", "higher bound", "never", "guarded", "just not guarded"],
)
def test_a_bucket_that_would_be_mostly_padding_is_passed_over(
    length: int, rules: dict[str, Any], falls_back: bool
) -> None:
    # 3208 tokens in a bucket of 8192 made sglang slower than eager.
    route = text(2816, 3072, 8192, hard=8192, **rules).route({"seq": length})
    if falls_back:
        assert route == Route("fallback", seq(3208), FallbackReason.PADDING_WASTE)
    else:
        assert route == Route("bucket", seq(8192))


def test_exactly_the_allowed_waste_is_allowed() -> None:
    dispatcher = text(100, max_padding_waste=0.6)
    assert dispatcher.route({"seq": 40}).action == "bucket"
    assert dispatcher.route({"seq": 39}).action == "fallback"


def test_the_batch_axis_is_no_padding_waste() -> None:
    grid = Grid(("batch", "seq"), [Bucket.of(batch=32, seq=128)])
    dispatcher = Dispatcher(grid, {}, {"seq": 512})
    assert dispatcher.route({"seq": 128}) == Route("bucket", seq(128))


def test_waste_is_the_area_of_the_row_and_is_judged_by_the_rules_of_a_padded_axis() -> None:
    strict, lax = RareShape(max_padding_waste=0.5), RareShape(max_padding_waste=1.0)
    shape = {"height": 60, "width": 256}
    wide = image({"height": lax, "width": strict}, (256, 256))
    tall = image({"height": strict, "width": lax}, (256, 256))
    assert wide.route(shape).action == "bucket"  # width has no padding, height may have any
    assert tall.route(shape).reason is FallbackReason.PADDING_WASTE
    assert tall.route({"height": 180, "width": 180}).reason is FallbackReason.PADDING_WASTE
    assert tall.route({"height": 190, "width": 190}).action == "bucket"


# Beyond the grid


def test_between_the_grid_and_the_hard_limit_the_default_is_the_fallback() -> None:
    for length, padded in [(257, 264), (264, 264), (511, 512), (512, 512)]:
        route = text().route({"seq": length})
        assert route == Route("fallback", seq(padded), FallbackReason.OVER_MAX)


def test_the_fallback_is_never_padded_beyond_the_hard_limit() -> None:
    assert text(hard=509).route({"seq": 507}).row == seq(509)


def test_axes_without_an_alignment_are_not_padded_in_the_fallback() -> None:
    route = image({}, (64, 64)).route({"height": 65, "width": 33})
    assert route.row == (("height", 65), ("width", 33))


def test_an_alignment_can_be_chosen() -> None:
    route = text(options={"fallback_align": {"seq": 100}}).route({"seq": 257})
    assert route.row == seq(300)


def test_above_the_hard_limit_a_row_is_rejected_with_the_bound_and_the_remedy() -> None:
    route = text().route({"seq": 513})
    assert route.action == "reject"
    assert route.row == ()
    assert route.message == (
        "seq=513 is too long, at most 512 is accepted; shorten the input or send `over_max: "
        "truncate` (one of the `parameters` of the request in the Open Inference Protocol)"
    )


def test_reject_refuses_whatever_is_longer_than_the_grid() -> None:
    route = text(over_max="reject").route({"seq": 257})
    assert route.action == "reject"
    assert "seq=257 is too long, at most 256 is accepted" in (route.message or "")


@pytest.mark.parametrize("length", [257, 512, 513, 100_000])
def test_truncate_cuts_to_the_largest_bucket_also_above_the_hard_limit(length: int) -> None:
    route = text(over_max="truncate").route({"seq": length})
    assert route == Route("truncate", seq(256), keep={"seq": 256})


@pytest.mark.parametrize(
    ("length", "overhead", "pieces"),
    [
        (257, 0, (256, 1)),
        (512, 0, (256, 256)),
        (600, 0, (256, 256, 88)),
        (257, 2, (256, 3)),
        (510, 2, (256, 256)),
        (511, 2, (256, 256, 3)),
    ],
)
def test_split_cuts_pieces_that_fit_each_with_its_special_tokens(
    length: int, overhead: int, pieces: tuple[int, ...]
) -> None:
    dispatcher = text(over_max="split", options={"piece_overhead": {"seq": overhead}})
    assert dispatcher.route({"seq": length}) == Route("split", axis="seq", pieces=pieces)


@given(st.integers(11, 5000), st.integers(0, 9))
def test_pieces_lose_nothing_and_fit(length: int, overhead: int) -> None:
    dispatcher = text(10, over_max="split", options={"piece_overhead": {"seq": overhead}})
    pieces = dispatcher.route({"seq": length}).pieces
    assert sum(piece - overhead for piece in pieces) == length - overhead
    assert all(overhead < piece <= 10 for piece in pieces)


def test_pieces_without_room_for_content_are_not_cut() -> None:
    dispatcher = text(2, over_max="split", options={"piece_overhead": {"seq": 2}})
    assert dispatcher.route({"seq": 3}).reason is FallbackReason.OVER_MAX


@pytest.mark.parametrize(("configured", "chosen"), [*itertools.product(CHOICES, CHOICES)])
def test_the_caller_overrides_what_is_configured(configured: str, chosen: str) -> None:
    route = text(over_max=configured).route({"seq": 300}, over_max=chosen)
    assert route.action == chosen


def test_a_choice_that_does_not_exist_is_refused_for_rows_of_any_length() -> None:
    for length in (1, 300):
        with pytest.raises(InvalidRequest, match="'drop' is not known; use one of fallback, spl"):
            text().route({"seq": length}, over_max="drop")


# Several axes


FALLBACK, SPLIT, TRUNCATE, REJECT = (RareShape(over_max=c) for c in CHOICES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (
            TRUNCATE,
            TRUNCATE,
            Route("truncate", (("height", 64), ("width", 64)), keep={"height": 64, "width": 64}),
        ),
        (
            TRUNCATE,
            FALLBACK,
            Route(
                "truncate",
                (("height", 64), ("width", 90)),
                FallbackReason.OVER_MAX,
                keep={"height": 64},
            ),
        ),
        (SPLIT, TRUNCATE, Route("split", keep={"width": 64}, axis="height", pieces=(64, 16))),
        (
            SPLIT,
            FALLBACK,
            Route("fallback", (("height", 80), ("width", 90)), FallbackReason.OVER_MAX),
        ),
        (
            SPLIT,
            SPLIT,
            Route("fallback", (("height", 80), ("width", 90)), FallbackReason.OVER_MAX),
        ),
    ],
    ids=["cut both", "cut one", "split and cut", "split and fallback", "split both"],
)
def test_rows_too_long_along_two_axes(height: RareShape, width: RareShape, expected: Route) -> None:
    dispatcher = image({"height": height, "width": width}, (64, 64))
    assert dispatcher.route({"height": 80, "width": 90}) == expected


@pytest.mark.parametrize("other", [FALLBACK, SPLIT, TRUNCATE], ids=lambda rules: rules.over_max)
def test_one_axis_that_rejects_is_enough(other: RareShape) -> None:
    dispatcher = image({"height": other, "width": REJECT}, (64, 64))
    assert dispatcher.route({"height": 80, "width": 90}).action == "reject"
    assert dispatcher.route({"height": 80, "width": 64}).action == other.over_max


def test_a_row_that_would_be_split_along_two_axes_still_obeys_the_hard_limit() -> None:
    dispatcher = image({"height": SPLIT, "width": SPLIT}, (64, 64), hard=85)
    assert "width=90 is too long, at most 85" in (
        dispatcher.route({"height": 80, "width": 90}).message or ""
    )


def test_a_corner_that_no_bucket_covers_falls_back() -> None:
    dispatcher = image({"height": REJECT}, (64, 128), (128, 64))
    route = dispatcher.route({"height": 100, "width": 100})
    assert route == Route("fallback", (("height", 100), ("width", 100)), FallbackReason.OVER_MAX)


# Exact execution


def test_a_caller_can_ask_for_no_padding_at_all() -> None:
    assert text().route({"seq": 13}, exact=True) == Route(
        "fallback", seq(13), FallbackReason.REQUESTED
    )
    assert text().route({"seq": 257}, exact=True) == Route(
        "fallback", seq(257), FallbackReason.OVER_MAX
    )


def test_a_model_that_padding_would_change_runs_every_row_at_its_own_size() -> None:
    dispatcher = text(options={"padding_invariant": False})
    assert dispatcher.route({"seq": 16}) == Route("bucket", seq(16))
    assert dispatcher.route({"seq": 13}) == Route("fallback", seq(13), FallbackReason.CAPABILITY)
    assert dispatcher.route({"seq": 300}).row == seq(300)
    cut = Route("truncate", seq(256), keep={"seq": 256})
    assert dispatcher.route({"seq": 300}, over_max="truncate") == cut
    assert dispatcher.route({"seq": 513}).action == "reject"


def test_a_bucket_serves_only_its_own_shape_where_padding_would_change_answers() -> None:
    shapes = [(480, 640), (640, 480)]
    grid = Grid(
        ("batch", "height", "width"),
        [Bucket.of(batch=b, height=h, width=w) for b in (2, 4) for h, w in shapes],
    )
    dispatcher = Dispatcher(grid, {}, {"height": 1024, "width": 1024}, padding_invariant=False)
    assert dispatcher.route({"height": 480, "width": 640}).reason is None
    for height, width in ((480, 639), (479, 640), (480, 480), (640, 640)):
        route = dispatcher.route({"height": height, "width": width})
        assert route.action == "fallback"
        assert route.row == (("height", height), ("width", width))


# The decision as a value


@given(
    st.integers(1, 700),
    st.sampled_from([None, *CHOICES]),
    st.booleans(),
    st.floats(0.01, 1),
)
def test_a_row_runs_at_least_at_its_size_and_within_the_hard_limit(
    length: int, over_max: str | None, exact: bool, waste: float
) -> None:
    route = text(max_padding_waste=waste).route({"seq": length}, over_max=over_max, exact=exact)
    if route.action in ("reject", "split"):
        assert route.row == ()
        assert length > 256
        return
    ((_, padded),) = route.row
    assert min(length, route.keep.get("seq", length)) <= padded <= 512
    assert (route.reason is None) == (route.action != "fallback" and not (exact and route.keep))


def test_routes_are_frozen_values() -> None:
    route = text().route({"seq": 300}, over_max="truncate")
    assert route == text().route({"seq": 400}, over_max="truncate")
    assert hash(route) == hash(text().route({"seq": 400}, over_max="truncate"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        route.action = "bucket"  # type: ignore[misc]


def test_rules_for_an_axis_that_rows_do_not_have_are_refused() -> None:
    for name in ("width", "batch"):
        with pytest.raises(ConfigError, match=f"rare_shapes.{name}: rows have no axis"):
            Dispatcher(text_grid(8), {name: RareShape()}, {})
