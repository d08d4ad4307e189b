"""A configuration with certain buckets for no model in particular: what a proposal is tried on."""

from __future__ import annotations

from collections.abc import Sequence

from shapeserve.buckets import BATCH, TOKENS, Grid
from shapeserve.config import AxisPolicy, ModelConfig, Policy, ServeConfig, axes_of
from shapeserve.lanes import without_single
from shapeserve.models.describe import describe
from shapeserve.plan import planned_grid
from shapeserve.policy import Device, packed_grid
from shapeserve.traces import SEQ
from shapeserve.tuning.fit import Buckets

_ENDLESS = 10**18  # above four of the largest images (MAX_LENGTH squared)


def policy_of(buckets: Buckets, batches: Sequence[int] | None = None) -> Policy:
    """Return the policy that makes these row shapes, and these batch sizes if given.

    Raises:
        ConfigError: sizes are not ascending.
    """
    way = {key: "explicit" if len(axes_of(key)) == 1 else "shapes" for key in buckets}
    made = {
        key: AxisPolicy.model_validate({way[key]: tuple(entries)})
        for key, entries in buckets.items()
    }
    return made if batches is None else {**made, BATCH: AxisPolicy(explicit=tuple(batches))}


def stand_in(
    buckets: Buckets, *, max_batch_tokens: int, batches: Sequence[int] | None = None
) -> ModelConfig:
    """Return a model that has only these buckets: none of its rows is refused or leaves them.

    Args:
        buckets: key of a policy -> its sizes or shapes.
        max_batch_tokens: padded elements of a batch.
        batches: sizes along ``batch``; None: what the device gets by default.

    Raises:
        ConfigError: a policy may not have them.
    """
    axes = [axis for key in buckets for axis in axes_of(key)]
    policy = policy_of(buckets, batches)
    data = {
        "name": "buckets",
        "import": "nowhere:none",  # never imported: only its shape matters
        "inputs": {"x": {"dtype": "float32", "dims": [BATCH, *axes]}},
        "outputs": {"y": {"dtype": "float32", "dims": [BATCH, 1]}},
        "policy": {key: made.model_dump(exclude_none=True) for key, made in policy.items()},
        "rare_shapes": {axis: {"max_padding_waste": 1.0} for axis in axes},
        "limits": {
            "max_batch_tokens": max_batch_tokens,
            "max_queue_rows": _ENDLESS,
            "max_queue_tokens": _ENDLESS,
        },
    }
    return ServeConfig.from_dict({"models": [data]}).models[0]


def grid_of(
    buckets: Buckets,
    device: Device,
    *,
    max_batch_tokens: int,
    batches: Sequence[int] | None = None,
    min_batch: int | None = None,
) -> Grid:
    """Return the grid of a service with these buckets.

    Args:
        buckets: row shapes, or sizes along ``tokens``.
        device: kind of device.
        max_batch_tokens: elements of a batch.
        batches: sizes along ``batch``; None: what the device gets by default.
        min_batch: 2 if one row has no program of its own; None: not known, so that buckets of one
            row are there.

    Raises:
        ConfigError: a policy may not have them.
    """
    if TOKENS in buckets:
        return packed_grid(policy_of(buckets), max_batch_tokens, {SEQ: 1})
    config = stand_in(buckets, max_batch_tokens=max_batch_tokens, batches=batches)
    grid = planned_grid(config, describe(config), device)
    return grid if min_batch in (None, 1) else without_single(grid)
