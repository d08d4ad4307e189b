"""From a policy to a grid: size generators, and defaults derived from the model's maximum.

Source of the defaults: on the CPU all buckets share one dynamic-shape program, so a bucket
costs nothing and padding costs time; on CUDA every bucket is captured as a graph of its own
(4 to 12 ms and some memory each on an H200), so their number is bounded.

``height`` and ``width`` get shapes together: a photo has one of few aspect ratios, so most of the
product of heights and widths would never be used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid
from shapeserve.config import AxisPolicy, Exponential, Policy, axes_of, policy_of
from shapeserve.errors import ConfigError

Device = Literal["cpu", "cuda"]

# Arbitrary: far above any useful policy, far below what hangs a start.
MAX_AXIS_SIZES = 512
MAX_BUCKETS = 4096
# 66 = 9 seq x 8 batch sizes within 8192 tokens; captured in 4.3 s on an H200.
MAX_DEFAULT_BUCKETS: Mapping[Device, int] = {"cpu": 256, "cuda": 66}  # cpu: arbitrary
BATCHES: Mapping[Device, tuple[int, ...]] = {
    "cpu": (1, 2, 4, 8, 16, 32),
    "cuda": (1, 2, 4, 8, 16, 32, 64, 128),
}
_MIN_PACKED = 16  # one short text
_ALIGN = 8  # vector and tensor-core tiles are multiples of 8 elements
_FINE_STEPS_TO = 64  # steps of 8 up to here, then the step doubles whenever the size does
# Tried from fine to coarse until the grid is small enough; inf means the maximum alone.
_RATIOS = (1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 8.0, 16.0, math.inf)
PHOTO = ("height", "width")
# Long side to short side, lying and standing. 5,000 photos of COCO val2017, long side at most 384:
# 1, 4:3 and 3:2 leave 3.9 % padding, 16:9 takes it to 3.4 %, 5:4 to 2.4 %.
_ASPECTS = (1.0, 5 / 4, 4 / 3, 3 / 2, 16 / 9)
_FEW_ASPECTS = (1.0, 4 / 3)
_PHOTO_RATIO = 1.2  # finer ones save less than 1 % there, and every bucket is verified at start
_PHOTO_ALIGN = 16  # patches and the strides of convolutional encoders are 16 pixels


def generate(policy: AxisPolicy, key: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that a policy makes for the axes of ``key``: one size each, or several.

    Raises:
        ConfigError: see :func:`generate_axis`.
    """
    return policy.shapes or tuple((size,) for size in generate_axis(policy, key))


def generate_axis(policy: AxisPolicy, axis: str = "axis") -> tuple[int, ...]:
    """Return the sizes that a policy makes for one axis, ascending.

    Args:
        policy: one of explicit, linear, exponential; the last size is always its ``max``.
        axis: name used in the error.

    Raises:
        ConfigError: more than ``MAX_AXIS_SIZES`` sizes.
    """
    sizes = tuple(itertools.islice(_sizes(policy), MAX_AXIS_SIZES + 1))
    if len(sizes) > MAX_AXIS_SIZES:
        raise ConfigError(
            f"policy.{axis} makes more than {MAX_AXIS_SIZES} sizes; use a larger step, ratio "
            "or align"
        )
    return sizes


def _sizes(policy: AxisPolicy) -> Iterator[int]:
    if policy.explicit:
        yield from policy.explicit
    elif policy.linear:
        yield from range(policy.linear.min, policy.linear.max, policy.linear.step)
        yield policy.linear.max
    elif policy.exponential:
        yield from _growing(policy.exponential)


def _growing(spec: Exponential) -> Iterator[int]:
    size = spec.min
    while size < spec.max:
        yield size
        # 1e-9 keeps a product such as 50 * 1.1 = 55.00000000000001 from spilling over.
        grown = math.ceil(size * spec.ratio / spec.align - 1e-9) * spec.align
        size = max(grown, size + spec.align)
    yield spec.max


def grid_for(
    axes: tuple[str, ...],
    policy: Policy,
    *,
    device: Device,
    max_batch_tokens: int,
    max_sizes: Mapping[str, int],
    hard_limits: Mapping[str, int] | None = None,
    min_sizes: Mapping[str, int] | None = None,
    cost: Callable[[Bucket], float] | None = None,
) -> Grid:
    """Build the grid of a model: the product of its axes, within the area of one batch.

    Axes that the policy names together, as ``height,width``, have only the shapes that it lists.

    Args:
        axes: the model's axes in the order of its tensors, ``batch`` among them.
        policy: axis -> sizes; an axis that is left out gets the default for ``device``.
        device: kind of device that the defaults are for.
        max_batch_tokens: buckets of a larger area are left out, except the smallest batch
            of each row shape, so that no row within the grid is without a bucket.
        max_sizes: axis -> size at which the grid ends (the config's ``max_length``, else the
            model's own); an axis without one takes it from the policy.
        hard_limits: axis -> longest size that the model can execute.
        min_sizes: axis -> shortest size that the model can execute; defaults begin there.
        cost: see ``Grid``.

    Raises:
        ConfigError: the policy names an axis that the model does not have, goes beyond a
            limit, does not reach ``max_sizes``, makes more than ``MAX_BUCKETS`` buckets, or has
            a batch size that is never used.
    """
    _check_axes(axes, policy, max_sizes)
    for key, sizes in policy.items():
        for axis, (_, last) in zip(axes_of(key), sizes.ends, strict=True):
            if axis != BATCH:
                _check_end(key, axis, last, max_sizes.get(axis), (hard_limits or {}).get(axis))
    full = default_policy(
        {axis: max_sizes.get(axis, 0) for axis in axes if axis != BATCH},
        device,
        max_batch_tokens=max_batch_tokens,
        given=policy,
        min_sizes=min_sizes,
    )
    shapes = {key: generate(full[key], key) for key in full}
    buckets = _product(shapes, max_batch_tokens, MAX_BUCKETS + 1)
    if len(buckets) > MAX_BUCKETS:
        made = " x ".join(f"{len(values)} {key}" for key, values in shapes.items())
        raise ConfigError(
            f"policy: {made} sizes make more than {MAX_BUCKETS} buckets; use fewer sizes per axis"
        )
    grid = Grid(axes, buckets, cost)
    if BATCH in policy:
        _check_batches_used(grid, [size for (size,) in shapes[BATCH]], max_batch_tokens)
    return grid


def packed_grid(policy: Policy, max_batch_tokens: int, max_sizes: Mapping[str, int]) -> Grid:
    """Build the grid of packed rows: sizes along ``tokens``.

    Args:
        policy: ``tokens`` -> sizes; without it sizes grow by a quarter from 16 to
            ``max_batch_tokens``, so that at most a fifth of a batch is tail.
        max_batch_tokens: end of the default, and the most that a policy may have.
        max_sizes: row axis -> where rows end; the largest batch must hold one such row.

    Raises:
        ConfigError: the policy ends before ``max_sizes`` or after ``max_batch_tokens``, or names
            another axis.
    """
    for axis in policy:
        if axis != TOKENS:
            raise ConfigError(
                f"policy.{axis} says nothing about packed rows, whose buckets are numbers of "
                f"tokens; use policy.{TOKENS}"
            )
    longest = max(max_sizes.values())
    given = policy.get(TOKENS)
    if given is None:
        end = max(max_batch_tokens, longest)
        sizes: tuple[int, ...] = (end,)
        if end > _MIN_PACKED:
            spec = Exponential(min=_MIN_PACKED, max=end, ratio=1.25, align=_ALIGN)
            sizes = generate_axis(AxisPolicy(exponential=spec), TOKENS)
    else:
        sizes = generate_axis(given, TOKENS)
        if sizes[-1] > max(max_batch_tokens, longest):
            raise ConfigError(
                f"policy.{TOKENS}: the largest batch of {sizes[-1]} is above "
                f"limits.max_batch_tokens {max_batch_tokens}; end the policy there or raise "
                f"limits.max_batch_tokens to {sizes[-1]}"
            )
        if sizes[-1] < longest:
            raise ConfigError(
                f"policy.{TOKENS}: the largest batch of {sizes[-1]} does not hold one row of "
                f"{longest}; end the policy at {longest} or more"
            )
    return Grid((TOKENS,), [Bucket(((TOKENS, size),)) for size in sizes])


def default_policy(
    max_sizes: Mapping[str, int],
    device: Device,
    *,
    max_batch_tokens: int = 8192,
    given: Policy | None = None,
    min_sizes: Mapping[str, int] | None = None,
) -> dict[str, AxisPolicy]:
    """Return a policy for ``batch`` and every axis in ``max_sizes``.

    Args:
        max_sizes: axis other than ``batch`` -> largest size of its buckets.
        device: ``cpu`` gets fine steps, ``cuda`` at most 66 buckets.
        max_batch_tokens: area above which a bucket is not built, so does not count.
        given: axes that are decided already and kept as they are.
        min_sizes: axis -> smallest size of its buckets, 1 where it is not there.
    """
    policy = {BATCH: AxisPolicy(explicit=BATCHES[device]), **(given or {})}
    missing = [axis for axis in max_sizes if policy_of(policy, axis) is None]
    if not missing:
        return policy
    low = min_sizes or {}
    if device == "cpu" and missing == ["seq"] == list(max_sizes):
        policy["seq"] = AxisPolicy(explicit=_stepped(low.get("seq", 1), max_sizes["seq"]))
        return policy
    for ratio in _RATIOS:
        policy |= _at_ratio(missing, max_sizes, low, ratio)
        shapes = {key: generate(p, key) for key, p in policy.items()}
        limit = MAX_DEFAULT_BUCKETS[device]
        if len(_product(shapes, max_batch_tokens, limit + 1)) <= limit:
            break
    return policy


def _at_ratio(
    axes: list[str], ends: Mapping[str, int], low: Mapping[str, int], ratio: float
) -> dict[str, AxisPolicy]:
    """Sizes of axes that grow by a ratio; those of a photo together."""
    made: dict[str, AxisPolicy] = {}
    if set(PHOTO) <= set(axes):
        axes = [axis for axis in axes if axis not in PHOTO]
        least = [low.get(axis, 1) for axis in PHOTO]
        made[",".join(PHOTO)] = AxisPolicy(
            shapes=_photo_shapes([ends[axis] for axis in PHOTO], least, ratio)
        )
    return made | {axis: _exponential(axis, low.get(axis, 1), ends[axis], ratio) for axis in axes}


def _photo_shapes(
    ends: Sequence[int], least: Sequence[int], ratio: float
) -> tuple[tuple[int, ...], ...]:
    """Height and width of photos: every long side of a ladder in every usual aspect ratio."""
    # Photos are resized to the model's size: one of a quarter of it is rare already (arbitrary).
    low = max(*least, max(ends) // 4)
    sides: tuple[int, ...] = (max(ends),)
    if ratio <= 4:  # beyond it the quarter and the whole are all that is left, so the whole alone
        growth = max(ratio, _PHOTO_RATIO)
        sides = generate_axis(_exponential("side", low, max(ends), growth, _PHOTO_ALIGN))
    shapes = {tuple(ends)}
    for long, aspect in itertools.product(sides, _ASPECTS if ratio < math.inf else _FEW_ASPECTS):
        short = math.ceil(long / aspect / _PHOTO_ALIGN - 1e-9) * _PHOTO_ALIGN
        for shape in ((long, short), (short, long)):
            shapes.add(tuple(max(min(s, e), m) for s, e, m in zip(shape, ends, least, strict=True)))
    return tuple(sorted(shapes))


def _stepped(low: int, end: int) -> tuple[int, ...]:
    """Return 8, 16 ... 64 in steps of 8, to 128 of 16, to 256 of 32 ... from low to end."""
    sizes, size, step = [], _ALIGN, _ALIGN
    while size < end:
        if size >= low:
            sizes.append(size)
        if size >= _FINE_STEPS_TO and size & (size - 1) == 0:  # a power of two
            step *= 2
        size += step
    return (*sizes, end)


def _exponential(axis: str, low: int, end: int, ratio: float, align: int = _ALIGN) -> AxisPolicy:
    # Short texts are the rule, so seq starts at 8; an image or a recording of a sixteenth of
    # the maximum is already rare (arbitrary).
    start = _ALIGN if axis == "seq" else math.ceil(end / 16 / align) * align
    start = max(start, math.ceil(low / align) * align)
    if start >= end or ratio == math.inf:
        return AxisPolicy(explicit=(end,))
    return AxisPolicy(exponential=Exponential(min=start, max=end, ratio=ratio, align=align))


def _product(
    shapes: Mapping[str, tuple[tuple[int, ...], ...]], max_batch_tokens: int, stop: int
) -> tuple[Bucket, ...]:
    """Return the first ``stop`` buckets of the grid that these shapes (key -> sizes) make."""
    axes = [axis for key in shapes for axis in axes_of(key)]
    made = (
        Bucket(tuple(zip(axes, itertools.chain(*combination), strict=True)))
        for combination in itertools.product(*shapes.values())
    )
    smallest = shapes[BATCH][0][0] if BATCH in shapes else None
    kept = (
        bucket
        for bucket in made
        if bucket.area <= max_batch_tokens or bucket.as_dict().get(BATCH) == smallest
    )
    return tuple(itertools.islice(kept, stop))


def _check_axes(axes: tuple[str, ...], policy: Policy, max_sizes: Mapping[str, int]) -> None:
    for axis in (axis for key in policy for axis in axes_of(key)):
        if axis not in axes:
            raise ConfigError(
                f"policy.{axis}: the model has no axis {axis!r}, its axes are {', '.join(axes)}; "
                "remove or rename it"
            )
    for axis in axes:
        if axis != BATCH and axis not in max_sizes and policy_of(policy, axis) is None:
            raise ConfigError(
                f"the model states no maximum for the axis {axis!r}; add policy.{axis} or "
                "limits.max_length"
            )


def _check_end(key: str, axis: str, last: int, end: int | None, hard: int | None) -> None:
    if hard is not None and last > hard:
        raise ConfigError(
            f"policy.{key}: the largest bucket {axis}={last} is above {hard}, the longest that "
            f"the model can run; end the policy at {min(hard, end or hard)}"
        )
    if end is not None and last > end:
        raise ConfigError(
            f"policy.{key}: the largest bucket {axis}={last} is above max_length {end}; end the "
            f"policy at {end} or set limits.max_length to {last}"
        )
    if end is not None and last < end:
        raise ConfigError(
            f"policy.{key}: the largest bucket {axis}={last} does not cover max_length {end}; "
            f"end the policy at {end} or set limits.max_length to {last}"
        )


def _check_batches_used(grid: Grid, batches: Sequence[int], max_batch_tokens: int) -> None:
    used = {bucket.size(BATCH) for bucket in grid.buckets}
    for batch in batches:
        if batch not in used:
            row = min(math.prod(s for _, s in b.without(BATCH)) for b in grid.buckets)
            raise ConfigError(
                f"policy.batch: batch={batch} times the smallest row of {row} is {batch * row}, "
                f"above limits.max_batch_tokens {max_batch_tokens}; remove {batch} or raise "
                f"limits.max_batch_tokens to {batch * row}"
            )


def explain_default(
    max_sizes: Mapping[str, int],
    device: Device,
    *,
    max_batch_tokens: int = 8192,
    min_sizes: Mapping[str, int] | None = None,
) -> str:
    """Say in plain sentences why the default grid is what it is."""
    policy = default_policy(
        max_sizes, device, max_batch_tokens=max_batch_tokens, min_sizes=min_sizes
    )
    shapes = {key: generate(p, key) for key, p in policy.items()}
    count = len(_product(shapes, max_batch_tokens, MAX_BUCKETS))
    per_axis = "; ".join(f"{key} {_list(values)}" for key, values in shapes.items())
    why = (
        "On the CPU all buckets share one dynamic-shape program, so a further bucket costs no "
        "compile and no memory, while padding costs time: the sizes are close together."
        if device == "cpu"
        else f"On CUDA every bucket is captured as a graph of its own, which costs start-up time "
        f"and memory: there are at most {MAX_DEFAULT_BUCKETS['cuda']}, at the finest ratio that "
        "allows it."
    )
    return (
        f"{why} Sizes: {per_axis}. Combinations of more than {max_batch_tokens} padded elements "
        f"(limits.max_batch_tokens) are left out, except the smallest batch; {count} buckets "
        "remain."
    )


def _list(shapes: tuple[tuple[int, ...], ...]) -> str:
    if len(shapes[0]) == 1:
        return ", ".join(str(size) for (size,) in shapes)
    first, last = ("x".join(map(str, shape)) for shape in (shapes[0], shapes[-1]))
    return f"in {len(shapes)} shapes of usual aspect ratios, {first} to {last}"
