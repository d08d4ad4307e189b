"""Policies make the sizes they say, and a grid covers every row up to its end."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.buckets import Bucket, Grid
from shapeserve.config import AxisPolicy, parse_policy
from shapeserve.errors import ConfigError
from shapeserve.policy import (
    MAX_AXIS_SIZES,
    MAX_BUCKETS,
    MAX_DEFAULT_BUCKETS,
    Device,
    default_policy,
    explain_default,
    generate_axis,
    grid_for,
)
from shapeserve.traces import Shapes, read_shapes

TEXT = ("batch", "seq")
IMAGE = ("batch", "height", "width")
VIDEO = ("batch", "frames", "height", "width")
DEVICES: list[Device] = ["cpu", "cuda"]


def axis(**way: Any) -> AxisPolicy:
    return parse_policy({"axis": way})["axis"]


def text_grid(end: int = 256, device: Device = "cpu", **changes: Any) -> Grid:
    policy = parse_policy(changes.pop("policy", {}))
    options: dict[str, Any] = {"max_batch_tokens": 8192, "max_sizes": {"seq": end}, **changes}
    return grid_for(TEXT, policy, device=device, **options)


def sizes_of(grid: Grid, name: str) -> list[int]:
    return sorted({bucket.size(name) for bucket in grid.buckets})


# Generators


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (axis(explicit=[5, 17]), (5, 17)),
        (axis(linear={"min": 8, "max": 32, "step": 8}), (8, 16, 24, 32)),
        (axis(linear={"min": 8, "max": 30, "step": 8}), (8, 16, 24, 30)),
        (axis(linear={"min": 8, "max": 8, "step": 8}), (8,)),
        (axis(exponential={"min": 1, "max": 32}), (1, 2, 4, 8, 16, 32)),
        (
            axis(exponential={"min": 8, "max": 256, "ratio": 1.3, "align": 8}),
            (8, 16, 24, 32, 48, 64, 88, 120, 160, 208, 256),
        ),
        (axis(exponential={"min": 8, "max": 100, "ratio": 2, "align": 8}), (8, 16, 32, 64, 100)),
        (axis(exponential={"min": 50, "max": 60, "ratio": 1.1}), (50, 55, 60)),
        (axis(exponential={"min": 7, "max": 7, "align": 8}), (7,)),
    ],
    ids=str,
)
def test_a_policy_makes_these_sizes(policy: AxisPolicy, expected: tuple[int, ...]) -> None:
    assert generate_axis(policy) == expected


@given(
    low=st.integers(1, 64),
    above=st.integers(0, 2000),
    ratio=st.floats(1.1, 8),
    align=st.sampled_from([1, 4, 8]),
)
def test_generated_sizes_ascend_from_min_to_max_and_are_aligned(
    low: int, above: int, ratio: float, align: int
) -> None:
    low *= align
    spec = {"min": low, "max": low + above, "ratio": ratio, "align": align}
    sizes = generate_axis(axis(exponential=spec))
    assert sizes[0] == low
    assert sizes[-1] == low + above
    assert list(sizes) == sorted(set(sizes))
    assert all(size % align == 0 for size in sizes[:-1])


def test_a_policy_that_would_make_endless_sizes_is_refused() -> None:
    endless = axis(linear={"min": 1, "max": 10**12, "step": 1})
    with pytest.raises(
        ConfigError, match=f"policy.seq makes more than {MAX_AXIS_SIZES} sizes; use"
    ):
        generate_axis(endless, "seq")


# Defaults


def test_the_default_cpu_grid_has_fine_steps_and_six_batch_sizes() -> None:
    grid = text_grid(256)
    expected = [*range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    assert sizes_of(grid, "seq") == expected
    assert sizes_of(grid, "batch") == [1, 2, 4, 8, 16, 32]
    assert len(grid.buckets) == len(expected) * 6


@pytest.mark.parametrize(
    ("end", "tail"),
    [
        (5, [5]),
        (8, [8]),
        (60, [48, 56, 60]),
        (128, [112, 128]),
        (384, [256, 320, 384]),
        (1024, [512, 640, 768, 896, 1024]),
    ],
)
def test_the_default_cpu_steps_double_with_the_length_and_end_at_the_maximum(
    end: int, tail: list[int]
) -> None:
    assert sizes_of(text_grid(end), "seq")[-len(tail) :] == tail


@pytest.mark.parametrize("end", [5, 64, 128, 256, 384, 512, 1000, 2048, 8192, 131072])
@pytest.mark.parametrize("max_batch_tokens", [64, 8192, 16384, 10**6])
def test_the_default_cuda_grid_has_at_most_66_buckets(end: int, max_batch_tokens: int) -> None:
    grid = text_grid(end, "cuda", max_batch_tokens=max_batch_tokens)
    assert 1 <= len(grid.buckets) <= 66
    assert sizes_of(grid, "seq")[-1] == end


def test_the_default_cuda_grid_uses_most_of_its_allowance() -> None:
    assert len(text_grid(256, "cuda").buckets) > 55
    assert sizes_of(text_grid(256, "cuda"), "batch") == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("axes", [IMAGE, VIDEO], ids=["image", "video"])
@pytest.mark.parametrize("device", DEVICES)
def test_axes_other_than_seq_have_a_bounded_default_up_to_their_maximum(
    axes: tuple[str, ...], device: Device
) -> None:
    ends = {"frames": 32, "height": 512, "width": 640}
    ends = {name: ends[name] for name in axes[1:]}
    grid = grid_for(axes, {}, device=device, max_batch_tokens=4 * 512 * 640, max_sizes=ends)
    assert len(grid.buckets) <= MAX_DEFAULT_BUCKETS[device]
    assert {name: grid.max_size(name) for name in ends} == ends
    assert grid.fit_row(ends) is not None
    assert grid.fit_row(dict.fromkeys(ends, 1)) != grid.fit_row(ends)


def test_an_axis_that_the_policy_decides_is_kept_and_the_others_get_defaults() -> None:
    given = parse_policy({"batch": {"explicit": [1, 3]}})
    policy = default_policy({"seq": 64}, "cpu", given=given)
    assert policy["batch"] == given["batch"]
    assert policy["seq"].ends[0][1] == 64
    grid = text_grid(64, policy={"seq": {"explicit": [32, 64]}})
    assert sizes_of(grid, "seq") == [32, 64]
    assert sizes_of(grid, "batch") == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(("device", "reason"), [("cpu", "share one"), ("cuda", "at most 66")])
def test_the_explanation_names_the_reason_the_sizes_and_their_number(
    device: Device, reason: str
) -> None:
    text = explain_default({"seq": 256}, device)
    assert reason in text
    assert "seq 8, 16, 24" in text
    assert f"{len(text_grid(256, device).buckets)} buckets" in text


# Grids


def test_buckets_above_the_batch_area_are_not_built_but_one_row_always_fits() -> None:
    grid = text_grid(max_batch_tokens=100)
    large = [bucket for bucket in grid.buckets if bucket.area > 100]
    assert large
    assert {bucket.size("batch") for bucket in large} == {1}
    assert grid.fit_row({"seq": 256}) == Bucket.of(batch=1, seq=256)


def test_the_smallest_batch_is_kept_where_it_is_not_1() -> None:
    policy = {"batch": {"explicit": [2, 4]}, "seq": {"explicit": [8, 64]}}
    grid = text_grid(64, policy=policy, max_batch_tokens=32)
    assert [bucket.label for bucket in grid.buckets] == [
        "batch=2,seq=8",
        "batch=2,seq=64",
        "batch=4,seq=8",
    ]


@given(
    end=st.integers(1, 600),
    tokens=st.integers(1, 20_000),
    device=st.sampled_from(DEVICES),
    data=st.data(),
)
def test_every_row_up_to_the_end_has_a_bucket(
    end: int, tokens: int, device: Device, data: st.DataObject
) -> None:
    grid = text_grid(end, device, max_batch_tokens=tokens)
    length = data.draw(st.integers(1, end))
    assert grid.fit_row({"seq": length}) is not None
    assert grid.fit_row({"seq": end + 1}) is None


def test_a_measured_cost_decides_between_buckets() -> None:
    policy = {"batch": {"explicit": [1]}, "seq": {"explicit": [8, 16]}}
    slow = {"batch=1,seq=8": 9.0, "batch=1,seq=16": 1.0}
    grid = text_grid(16, policy=policy, cost=lambda bucket: slow[bucket.label])
    assert grid.fit_row({"seq": 4}) == Bucket.of(batch=1, seq=16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"policy": {"width": {"explicit": [8]}}},
            "policy.width: the model has no axis 'width', its axes are batch, seq; remove",
        ),
        (
            {"policy": {"seq": {"explicit": [8, 600]}}, "hard_limits": {"seq": 512}},
            "seq=600 is above 512, the longest that the model can run; end the policy at 256",
        ),
        (
            {"policy": {"seq": {"explicit": [8, 320]}}, "hard_limits": {"seq": 512}},
            "seq=320 is above max_length 256; end the policy at 256 or set limits.max_length to",
        ),
        (
            {"policy": {"seq": {"explicit": [8, 128]}}},
            "seq=128 does not cover max_length 256; end the policy at 256 or set limits.max_le",
        ),
        (
            {"policy": {"batch": {"explicit": [1, 2048]}}},
            "batch=2048 times the smallest row of 8 is 16384, above limits.max_batch_tokens 8192",
        ),
        (
            {
                "policy": {
                    "batch": {"linear": {"min": 1, "max": 200, "step": 1}},
                    "seq": {"linear": {"min": 1, "max": 256, "step": 1}},
                },
                "max_batch_tokens": 10**9,
            },
            f"200 batch x 256 seq sizes make more than {MAX_BUCKETS} buckets; use fewer",
        ),
        (
            {"max_sizes": {}},
            "states no maximum for the axis 'seq'; add policy.seq or limits.max_le",
        ),
    ],
    ids=["unknown axis", "hard limit", "above", "uncovering", "unused batch", "too many", "no end"],
)
def test_a_policy_that_does_not_suit_the_model_is_refused(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        text_grid(**changes)
    assert expected in str(caught.value)


def test_an_axis_without_a_known_maximum_ends_where_its_policy_does() -> None:
    grid = text_grid(policy={"seq": {"explicit": [8, 24]}}, max_sizes={})
    assert grid.max_size("seq") == 24


# Photos


def photo_grid(height: int, width: int, device: Device = "cpu", **changes: Any) -> Grid:
    options: dict[str, Any] = {"max_batch_tokens": 4 * height * width, **changes}
    ends = {"height": height, "width": width}
    policy = parse_policy(options.pop("policy", {"batch": {"explicit": [1, 2, 4]}}))
    return grid_for(IMAGE, policy, device=device, max_sizes=ends, **options)


def row_shapes(grid: Grid) -> set[tuple[int, ...]]:
    return {(b.size("height"), b.size("width")) for b in grid.buckets}


def photo_waste(grid: Grid, photos: Shapes) -> float:
    real = padded = 0
    for (height, width), rows in photos.rows.items():
        bucket = grid.fit_row({"height": height, "width": width})
        assert bucket is not None
        real += rows * height * width
        padded += rows * bucket.size("height") * bucket.size("width")
    return 1 - real / padded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(640, 640), (384, 512), (224, 224), (20, 33), (1, 1)])
def test_photo_shapes_lie_stand_and_end_at_the_maximum(
    ends: tuple[int, int], device: Device
) -> None:
    grid = photo_grid(*ends, device)
    shapes = row_shapes(grid)
    assert ends in shapes
    assert all(h <= ends[0] and w <= ends[1] for h, w in shapes)
    assert len(grid.buckets) <= MAX_DEFAULT_BUCKETS[device]
    if ends[0] == ends[1]:
        assert shapes == {(w, h) for h, w in shapes}


@given(
    height=st.integers(1, 700),
    width=st.integers(1, 700),
    device=st.sampled_from(DEVICES),
    data=st.data(),
)
def test_i1_every_photo_up_to_the_maximum_has_a_bucket_and_it_is_the_smallest(
    height: int, width: int, device: Device, data: st.DataObject
) -> None:
    grid = photo_grid(height, width, device)
    h, w = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    found = grid.fit_row({"height": h, "width": w})
    assert found is not None
    least = min(a * b for a, b in row_shapes(grid) if a >= h and b >= w)
    assert found.covers({"height": h, "width": w})
    assert found.size("height") * found.size("width") == least


def test_photo_shapes_waste_less_than_a_finer_product(trace_dir: Path) -> None:
    photos = read_shapes(trace_dir / "coco_val2017.csv.gz")
    ladder = {"exponential": {"min": 48, "max": 640, "ratio": 1.2, "align": 16}}
    product = photo_grid(
        640, 640, policy={"height": ladder, "width": ladder, "batch": {"explicit": [1]}}
    )
    shapes = photo_grid(640, 640, policy={"batch": {"explicit": [1]}})
    assert len(shapes) < len(product)
    assert photo_waste(shapes, photos) < 0.035
    assert photo_waste(product, photos) > 0.07


def test_a_bounded_number_of_graphs_keeps_the_aspect_ratios_rather_than_the_scales() -> None:
    policy = parse_policy({})
    grid = photo_grid(640, 640, "cuda", policy=policy, max_batch_tokens=8 * 640 * 640)
    assert {max(shape) for shape in row_shapes(grid)} == {640}
    assert len(row_shapes(grid)) == 9


def test_axes_of_other_names_are_a_product() -> None:
    grid = grid_for(
        ("batch", "rows", "columns"),
        {},
        device="cpu",
        max_batch_tokens=4096,
        max_sizes={"rows": 64, "columns": 64},
    )
    assert len({b.without("batch") for b in grid.buckets}) == len(
        {b.size("rows") for b in grid.buckets}
    ) * len({b.size("columns") for b in grid.buckets})


def test_listed_shapes_and_batches_are_multiplied_and_nothing_else() -> None:
    policy = {"height,width": {"shapes": [[48, 64], [64, 48]]}, "batch": {"explicit": [1, 2]}}
    grid = photo_grid(64, 64, policy=policy)
    assert [b.label for b in grid.buckets] == [
        "batch=1,height=48,width=64",
        "batch=1,height=64,width=48",
        "batch=2,height=48,width=64",
        "batch=2,height=64,width=48",
    ]


def test_listed_shapes_must_end_where_the_limits_do() -> None:
    with pytest.raises(ConfigError, match=r"policy.height,width: .* height=48 does not cover"):
        photo_grid(64, 64, policy={"height,width": {"shapes": [[48, 64]]}})


def test_defaults_begin_at_the_shortest_row_that_the_model_runs() -> None:
    for device in DEVICES:
        photo = photo_grid(512, 512, device, min_sizes={"height": 200, "width": 100})
        assert min(b.size("height") for b in photo.buckets) >= 200
        assert min(b.size("width") for b in photo.buckets) >= 100
        assert sizes_of(text_grid(256, device, min_sizes={"seq": 50}), "seq")[0] in (56, 64)


def test_the_explanation_of_photos_says_how_many_shapes_there_are() -> None:
    text = explain_default({"height": 640, "width": 640}, "cpu", max_batch_tokens=819200)
    assert "height,width in " in text
    assert "to 640x640" in text
