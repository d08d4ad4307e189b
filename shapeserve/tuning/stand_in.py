"""A service with certain buckets for no model in particular: what a proposal is simulated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shapeserve.buckets import BATCH, TOKENS, Grid
from shapeserve.config import AxisPolicy, ModelConfig, Policy, ServeConfig, axes_of
from shapeserve.lanes import without_single
from shapeserve.models.describe import describe
from shapeserve.plan import planned_grid
from shapeserve.policy import Device, packed_grid
from shapeserve.traces import SEQ
from shapeserve.tuning.cost import Cost
from shapeserve.tuning.fit import Buckets
from shapeserve.tuning.served import Served


def policy_of(buckets: Buckets, batches: Sequence[int] | None = None) -> Policy:
    """Return the policy that makes these row shapes, and these batch sizes if given."""
    made = {
        key: AxisPolicy.model_validate(
            {"explicit" if len(axes_of(key)) == 1 else "shapes": tuple(entries)}
        )
        for key, entries in buckets.items()
    }
    return made if batches is None else {**made, BATCH: AxisPolicy(explicit=tuple(batches))}


def stand_in(
    buckets: Buckets,
    *,
    max_batch_tokens: int,
    batches: Sequence[int] | None = None,
    rare_shapes: Mapping[str, Mapping[str, object]] | None = None,
) -> ModelConfig:
    """Return a model with these buckets whose queue takes whatever comes.

    So all rows are answered, however late, and count.

    Args:
        buckets: row shapes.
        max_batch_tokens: as ``limits.max_batch_tokens``.
        batches: sizes along ``batch``; None: the default.
        rare_shapes: axis -> rules; None: the defaults.
    """
    axes = [axis for key in buckets for axis in axes_of(key)]
    policy = {
        key: made.model_dump(exclude_none=True) for key, made in policy_of(buckets, batches).items()
    }
    data = {
        "import": "nowhere:none",  # never imported: only its shape is simulated
        "inputs": {"x": {"dtype": "float32", "dims": [BATCH, *axes]}},
        "outputs": {"y": {"dtype": "float32", "dims": [BATCH, 1]}},
        "policy": policy,
        "rare_shapes": dict(rare_shapes or {}),
        "limits": {
            "max_batch_tokens": max_batch_tokens,
            "max_queue_rows": 10**9,
            "max_queue_tokens": 10**15,
        },
    }
    return ServeConfig.from_dict({"models": [data]}).models[0]


def grid_of(
    buckets: Buckets,
    device: Device,
    *,
    max_batch_tokens: int,
    batches: Sequence[int] | None = None,
    min_batch: int = 1,
) -> Grid:
    """Return the grid that a service with these buckets has.

    Args:
        buckets: row shapes, or sizes along ``tokens``.
        device: kind of device.
        max_batch_tokens: as ``limits.max_batch_tokens``.
        batches: sizes along ``batch``; None: the default.
        min_batch: 2 if one row has no program of its own.

    Raises:
        ConfigError: a policy may not have them.
    """
    if TOKENS in buckets:
        return packed_grid(policy_of(buckets), max_batch_tokens, {SEQ: 1})
    config = stand_in(buckets, max_batch_tokens=max_batch_tokens, batches=batches)
    grid = planned_grid(config, describe(config), device)
    return without_single(grid) if min_batch > 1 else grid


def served(
    buckets: Buckets,
    device: Device,
    cost: Cost,
    *,
    max_batch_tokens: int,
    batches: Sequence[int] | None = None,
    min_batch: int | None = None,
) -> Served:
    """Return a service with these row shapes, to be simulated.

    Args:
        buckets: row shapes.
        device: kind of device.
        cost: of a batch.
        max_batch_tokens: as ``limits.max_batch_tokens``.
        batches: sizes along ``batch``; None: the default.
        min_batch: see :meth:`Served.from_config`.

    Raises:
        ConfigError: a policy may not have them.
    """
    config = stand_in(buckets, max_batch_tokens=max_batch_tokens, batches=batches)
    return Served.from_config(config, device, cost, min_batch=min_batch)


def served_packed(
    tokens: Sequence[int], longest: int, device: Device, cost: Cost, *, max_batch_tokens: int
) -> Served:
    """Return a service of packed rows, to be simulated.

    Args:
        tokens: sizes of its batches.
        longest: row that it takes.
        device: kind of device.
        cost: of a batch.
        max_batch_tokens: as ``limits.max_batch_tokens``.

    Raises:
        ConfigError: the largest batch does not hold the longest row, or is too large.
    """
    config = stand_in({SEQ: (longest,)}, max_batch_tokens=max_batch_tokens)
    spec = describe(config)
    policy = policy_of({TOKENS: tuple(tokens)})
    grid = packed_grid(policy, max_batch_tokens, {SEQ: longest})
    return Served.of_grid(config, spec, grid, device, cost, min_batch=1)
