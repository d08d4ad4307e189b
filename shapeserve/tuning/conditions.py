"""What measured costs hold for, as far as a configuration says it."""

from __future__ import annotations

from collections.abc import Mapping

from shapeserve.buckets import TOKENS
from shapeserve.config import ModelConfig
from shapeserve.errors import ConfigError
from shapeserve.models.spec import ModelSpec
from shapeserve.plan import planned_tier
from shapeserve.policy import Device
from shapeserve.tuning.cost import Cost
from shapeserve.tuning.table import CostTable

KIND = "device_kind"
"""The condition that says ``cpu`` or ``cuda``."""


def conditions_of(
    config: ModelConfig, spec: ModelSpec, device: Device, *, packed: bool
) -> dict[str, str]:
    """Return the conditions that follow from a configuration.

    Args:
        config: of the model.
        spec: of the model.
        device: kind of device.
        packed: whether its rows are packed.

    Raises:
        ConfigError: the tier does not exist on the device.
    """
    eager = config.compile.tier == "eager_graph"
    known = {
        "model": spec.name,
        "dtype": spec.dtype,
        "layout": "packed" if packed else "padded",
        "tier": config.compile.tier if eager else planned_tier(config, device).value,
        "backend": config.compile.backend,
        KIND: device,
    }
    return known if config.threads is None else {**known, "threads": str(config.threads)}


def check_conditions(costs: CostTable, wanted: Mapping[str, str], file: str) -> None:
    """Refuse costs that were measured under other conditions; what they do not state may be any.

    Raises:
        ConfigError: naming every condition that differs.
    """
    other = [
        f"{key} {costs.conditions[key]!r}, here it is {value!r}"
        for key, value in wanted.items()
        if costs.conditions.get(key, value) != value
    ]
    if other:
        raise ConfigError(
            f"{file}: measured for {'; '.join(other)}. Measure what is in use, with "
            "`shapeserve profile CONFIG.yaml --out COSTS.json`"
        )


def check_axes(cost: Cost | None, axes: tuple[str, ...]) -> None:
    """Refuse measured costs of batches along other axes.

    Raises:
        ConfigError: naming both.
    """
    if isinstance(cost, CostTable) and set(cost.axes) != set(axes):
        remedy = (
            "they are of packed rows: tune with --layout packed"
            if TOKENS in cost.axes
            else "name the axis with --axis"
        )
        raise ConfigError(
            f"the costs were measured along {', '.join(cost.axes)}, the batches here have "
            f"{', '.join(axes)}; {remedy}, or measure again"
        )
