"""Images and audio through the engine: padding along several axes, exact shapes, strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import engines
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapeserve.config import parse_policy
from shapeserve.engine import Engine, Result
from shapeserve.errors import InvalidRequest, ModelError
from shapeserve.metrics import identities
from shapeserve.warmup import TOLERANCE, relative_error

SHAPES = [[4, 6], [6, 4], [8, 8], [12, 8]]
TOGETHER = {"height,width": {"shapes": SHAPES}, "batch": {"explicit": [1, 2, 4]}}
RARE = {"height": {"guard_min": 16}, "width": {"guard_min": 16}}

Size = tuple[int, int]
sizes_within = st.tuples(st.integers(1, 12), st.integers(1, 8))


@pytest.fixture(scope="module")
def images() -> Iterator[Engine]:
    config = engines.module_config("masked_conv", policy=TOGETHER, rare_shapes=RARE)
    with engines.started(config) as engine:
        yield engine


def image(size: Size, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([seed, *size])
    return {"pixels": rng.standard_normal((3, *size)).astype(np.float32)}


def frames(length: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([seed, length])
    return {"features": rng.standard_normal((length, 5)).astype(np.float32)}


def error_of(engine: Engine, row: dict[str, np.ndarray], result: Result, **sizes: int) -> float:
    expected = engines.alone(engine, row, sizes)
    return relative_error([result.outputs[name] for name in engine.spec.outputs], expected)


def check(engine: Engine, sizes: list[Size], rows: list[dict[str, np.ndarray]]) -> list[Result]:
    """Every answer is the row's own, unpadded one."""
    results = engine.run(rows)
    for (height, width), row, result in zip(sizes, rows, results, strict=True):
        error = error_of(engine, row, result, height=height, width=width)
        assert error < TOLERANCE["float32"]
    return results


# Padding along two axes


@settings(max_examples=25)
@given(sizes=st.lists(sizes_within, min_size=1, max_size=6))
def test_i4_images_of_any_sizes_beside_each_other_get_their_unpadded_answers(
    images: Engine, sizes: list[Size]
) -> None:
    images.on_device(images.runner.layout.poison)
    results = check(images, sizes, [image(size, i) for i, size in enumerate(sizes)])
    for size, result in zip(sizes, results, strict=True):
        assert result.outputs["maps"].shape == (4, *size)


def test_i7_real_and_padded_pixels_of_each_axis_add_up_to_the_executed_areas(
    images: Engine,
) -> None:
    images.run([image(size, i) for i, size in enumerate([(3, 5), (12, 8), (5, 3), (7, 7)])])
    assert identities(images.metrics.samples()) == []
    kinds = {f"padding_{axis}": 0.0 for axis in ("batch", "height", "width")}
    for kind in kinds:
        kinds[kind] = engines.value(images, "tokens_total", kind=kind)
    assert kinds["padding_height"] > 0
    assert kinds["padding_width"] > 0


def test_only_the_listed_shapes_are_buckets(images: Engine) -> None:
    assert {b.without("batch") for b in images.grid.buckets} == {
        (("height", h), ("width", w)) for h, w in SHAPES
    }
    (narrow, square) = images.run([image((4, 5)), image((5, 5))])
    assert narrow.bucket.endswith("height=4,width=6")
    assert square.bucket.endswith("height=8,width=8")


def test_a_corner_that_no_shape_covers_runs_in_the_fallback() -> None:
    policy = {**TOGETHER, "height,width": {"shapes": [[4, 8], [8, 4]]}}
    with engines.started(engines.module_config("masked_conv", policy=policy)) as engine:
        (result,) = check(engine, [(7, 7)], [image((7, 7))])
        assert (result.mode, result.reason) == ("fallback", "over_max")


def test_i2_shapes_are_swapped_like_any_policy(images: Engine) -> None:
    before = images.grid.version
    policy = parse_policy({**TOGETHER, "height,width": {"shapes": [[6, 6], [12, 8]]}})
    try:
        images.swap_policy(policy)
        (result,) = check(images, [(5, 5)], [image((5, 5))])
        assert result.bucket.endswith("height=6,width=6")
    finally:
        images.swap_policy(parse_policy(TOGETHER))
    assert images.grid.version == before
    assert engines.value(images, "recompiles_total") == 0


# Models that padding would change


@pytest.mark.parametrize(
    ("module", "axes"),
    [
        ("mean_over_pixels", ["height", "width"]),
        ("conv_borders", ["height", "width"]),
        ("group_norm_over_time", ["frames"]),
    ],
)
def test_i4_a_model_that_sees_padding_is_refused_with_the_remedies(
    module: str, axes: list[str]
) -> None:
    with pytest.raises(ModelError, match="padding changes the answers") as caught:
        engines.started(engines.module_config(module, compile={"tier": "eager"}))
    message = str(caught.value)
    assert all(f"{axis}=" in message for axis in axes)
    assert "make: mask" in message
    assert "padding_invariant: false" in message


def test_padding_along_one_of_two_axes_is_found() -> None:
    wrong = engines.module_config(
        "mean_over_pixels",
        policy={
            "height": {"explicit": [1]},
            "width": {"explicit": [4, 8]},
            "batch": {"explicit": [4]},
        },
        compile={"tier": "eager"},
    )
    with pytest.raises(ModelError, match=r"height=1,width=\d padded into"):
        engines.started(wrong)


@pytest.mark.parametrize("module", ["mean_over_pixels", "conv_borders"])
def test_i4_declared_sensitive_images_run_at_their_exact_size(module: str) -> None:
    config = engines.module_config(module, policy=TOGETHER, padding_invariant=False)
    sizes = [(4, 6), (4, 5), (8, 8), (4, 6), (3, 3), (12, 8), (4, 5), (13, 9)]
    with engines.started(config) as engine:
        results = check(engine, sizes, [image(size, i) for i, size in enumerate(sizes)])
        listed = [list(size) in SHAPES for size in sizes]
        assert [r.reason is None for r in results] == listed
        assert all(engines.value(engine, "tokens_total", kind=k) == 0 for k in _ROW_PADDING)
        assert engines.value(engine, "recompiles_total") == 0


_ROW_PADDING = ("padding_height", "padding_width")


def test_exact_rows_of_equal_shape_share_batches() -> None:
    config = engines.module_config("mean_over_pixels", policy=TOGETHER, padding_invariant=False)
    sizes = [(4, 6), (5, 5)] * 4
    with engines.started(config) as engine:
        check(engine, sizes, [image(size, i) for i, size in enumerate(sizes)])
        assert engines.value(engine, "batches_total", bucket="batch=4,height=4,width=6") == 1
        assert engines.value(engine, "batches_total", bucket="none") == 1
        assert engines.value(engine, "fallbacks_total", reason="capability") == 4


def test_declared_sensitive_audio_runs_at_its_exact_length() -> None:
    config = engines.module_config("group_norm_over_time", padding_invariant=False)
    with engines.started(config) as engine:
        rows = {n: frames(n) for n in (2, 3, 8, 13, 16, 20)}
        results = engine.run([*rows.values()])
        for (length, row), result in zip(rows.items(), results, strict=True):
            assert error_of(engine, row, result, frames=length) < TOLERANCE["float32"]
            assert (result.reason is None) == (length in (4, 8, 16))


def test_a_model_whose_rows_depend_on_their_neighbours_is_not_served_at_exact_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tiny

    def forward(self: Any, pixels: Any) -> Any:
        return pixels.mean((0, 2, 3)).expand(pixels.shape[0], -1)

    monkeypatch.setattr(tiny.MeanOverPixels, "forward", forward)
    config = engines.module_config(
        "mean_over_pixels", padding_invariant=False, compile={"tier": "eager"}
    )
    with pytest.raises(ModelError, match="differs by"):
        engines.started(config)


# Strides


def test_i2_a_size_that_becomes_1_behind_a_stride_never_compiles_on_the_request_path() -> None:
    config = engines.module_config(
        "strided_frames",
        policy={"frames": {"explicit": [12, 32]}},
        rare_shapes={"frames": {"max_padding_waste": 0.01, "guard_min": 1}},
    )
    with engines.started(config) as engine:
        compiled = engines.value(engine, "compiles_total", stage="dynamo")
        lengths = [1, 2, 3, 4, 5, 6, 8, 9, 33, 40, 63, 64]
        rows = [frames(n) for n in lengths]
        results = engine.run(rows)
        # Each alone as well: the batch is then two rows, whatever its neighbours were.
        results += [engine.run([row])[0] for row in rows]
        for length, row, result in zip(lengths * 2, rows * 2, results, strict=True):
            assert result.outputs["states"].shape == (-(-length // 4), 4)
            assert error_of(engine, row, result, frames=length) < TOLERANCE["float32"]
        assert {r.mode for r in results} == {"fallback"}
        assert engines.value(engine, "recompiles_total") == 0
        assert engines.value(engine, "compiles_total", stage="dynamo") == compiled
        # What no compile holds for ran eagerly, and that is counted.
        assert engines.value(engine, "eager_frames_total", reason="not_compiled") > 0


def test_an_output_at_a_quarter_of_the_rate_is_put_together_from_pieces() -> None:
    rare = {"frames": {"over_max": "split"}}
    config = engines.module_config("strided_frames", rare_shapes=rare, compile={"tier": "eager"})
    with engines.started(config) as engine:
        (result,) = engine.run([frames(27)])
        assert result.pieces == 2
        assert result.outputs["states"].shape == (4 + 3, 4)


# The shortest row


def test_a_model_that_cannot_run_short_rows_says_which_limit_to_set() -> None:
    with pytest.raises(ModelError, match=r"cannot run a row of frames=\d.*limits\.min_length"):
        engines.started(engines.module_config("needs_four_frames", compile={"tier": "eager"}))


@pytest.mark.parametrize("limit", [4, {"frames": 4}])
def test_a_row_below_the_shortest_is_refused_and_harms_nobody(limit: int | dict[str, int]) -> None:
    config = engines.module_config(
        "needs_four_frames", limits={"min_length": limit}, compile={"tier": "eager"}
    )
    with engines.started(config) as engine:
        with pytest.raises(InvalidRequest, match=r"input\[1\] has frames=3, .* at least 4") as e:
            engine.prepare([frames(4), frames(3)])
        assert e.value.code == "too_short"
        (result,) = engine.run([frames(4)])
        assert error_of(engine, frames(4), result, frames=4) < TOLERANCE["float32"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_input_that_is_not_finite_is_refused_and_not_taken_for_our_fault(
    images: Engine, value: float
) -> None:
    bad = image((7, 9))
    bad["pixels"][1, 2, 3] = value
    where = rf"input\[1\] pixels holds {value} at \[1, 2, 3\]"
    with pytest.raises(InvalidRequest, match=where):
        images.prepare([image((7, 9)), bad])
