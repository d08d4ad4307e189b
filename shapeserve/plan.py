"""What a configuration will build and what padding it will cost, without loading the model.

Pure: reads the model's JSON files, never its weights; needs neither torch nor a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shapeserve.buckets import BATCH, TOKENS, Grid
from shapeserve.config import ModelConfig, policy_of
from shapeserve.errors import ConfigError
from shapeserve.expect import Expectation, Lengths, expect
from shapeserve.metrics import Tier
from shapeserve.models.describe import describe
from shapeserve.models.spec import ModelSpec
from shapeserve.policy import Device, explain_default, grid_for, packed_grid

# Hidden states of the largest bucket that the pool of all captures holds. Measured on an H200 with
# MiniLM and BERT-base in bf16, packed and padded, to 8,192 and 16,384 tokens: 9.3 to 11.3 for the
# compiled program and 12.4 to 12.8 for the eager model (torch 2.11).
_COMPILED_STATES, _EAGER_STATES = 10, 13


@dataclass(frozen=True, slots=True)
class Plan:
    """One model's grid and variants, and what a histogram of lengths will do on them.

    ``graph_bytes`` is the device memory that the captures are expected to reserve; None without
    captures, and for models whose width is not known.
    """

    model: str
    device: Device
    tier: Tier
    grid: Grid
    why: str
    expected: Expectation | None
    captures_eager: bool = False
    graph_bytes: int | None = None

    @property
    def programs(self) -> str:
        """Say which programs are compiled, and when a second one is."""
        if self.tier is Tier.EAGER:
            return "no compile: the module runs as it is"
        if self.captures_eager:
            return "no compile: the module is captured as it is, once per bucket"
        if BATCH not in self.grid.axes:
            compiles = "1 compile: one dynamic-shape program for packed rows"
            return f"{compiles}; then a capture per bucket" if self.tier is Tier.GRAPH else compiles
        compiles = (
            "at most 2 compiles: one dynamic-shape program for two rows and more, and one for a "
            "single row if warm-up measures that padding it to two costs more"
        )
        return f"{compiles}; then a capture per bucket" if self.tier is Tier.GRAPH else compiles

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        data: dict[str, Any] = {
            "model": self.model,
            "device": self.device,
            "axes": list(self.grid.axes),
            "grid": {"version": self.grid.version, "buckets": [b.label for b in self.grid.buckets]},
            "variants": {self.tier.value: len(self.grid)},
            "programs": self.programs,
            "why": self.why,
            "graph_bytes": self.graph_bytes,
        }
        if self.expected is not None:
            data["expected"] = self.expected.to_dict()
        return data


def plan(config: ModelConfig, device: Device, lengths: Lengths | None = None) -> Plan:
    """Plan one model.

    Args:
        config: the model.
        device: kind of device to plan for.
        lengths: recorded rows, as from ``traces.read_shapes``, or length -> rows.

    Raises:
        ConfigError: the policy does not fit the model, the tier does not exist on the device, or
            ``lengths`` are along other axes than the model's.
        ModelError: the model's directory is incomplete.
    """
    spec = describe(config)
    grid = planned_grid(config, spec, device)
    why = _why(config, spec, device) if BATCH in grid.axes else _why_packed(config)
    expected = None if lengths is None else expect(config, spec, grid, lengths)
    tier, eager = planned_tier(config, device), config.compile.tier == "eager_graph"
    graph_bytes = _graph_bytes(spec, grid, eager=eager) if tier is Tier.GRAPH else None
    return Plan(spec.name, device, tier, grid, why, expected, eager, graph_bytes)


def planned_grid(config: ModelConfig, spec: ModelSpec, device: Device) -> Grid:
    """Return the grid that the engine will build, if a model that is to be packed can be.

    Raises:
        ConfigError: the policy does not fit the model.
    """
    if config.packs(device) and spec.task == "embed":
        return packed_grid(config.policy, config.limits.max_batch_tokens, spec.max_length)
    return grid_for(
        spec.axes,
        config.policy,
        device=device,
        max_batch_tokens=config.limits.max_batch_tokens,
        max_sizes=spec.max_length,
        hard_limits=spec.hard_limit,
        min_sizes=spec.min_length,
    )


def _graph_bytes(spec: ModelSpec, grid: Grid, *, eager: bool) -> int | None:
    """Predict the pool that all captures share: it is that of the largest bucket."""
    if spec.embedding_dim is None:
        return None
    largest = max(bucket.area for bucket in grid.buckets)
    element = 4 if spec.dtype == "float32" else 2
    states = _EAGER_STATES if eager else _COMPILED_STATES
    return largest * spec.embedding_dim * element * states


def planned_tier(config: ModelConfig, device: Device) -> Tier:
    """Return the tier that the variants are meant to have.

    Raises:
        ConfigError: it does not exist on the device.
    """
    wanted = config.compile.tier
    if wanted == "auto":
        return Tier.GRAPH if device == "cuda" else Tier.COMPILED
    tier = Tier.GRAPH if wanted == "eager_graph" else Tier(wanted)
    if tier is Tier.GRAPH and device != "cuda":
        raise ConfigError(
            f"compile.tier: {wanted} needs a CUDA device; use auto, compiled or eager"
        )
    return tier


def _why_packed(config: ModelConfig) -> str:
    sizes = (
        f"{TOKENS} from the policy in the configuration"
        if TOKENS in config.policy
        else f"{TOKENS} by default, growing by a quarter to {config.limits.max_batch_tokens} "
        "(limits.max_batch_tokens)"
    )
    required = config.layout == "packed" or TOKENS in config.policy
    other = (
        "is refused"
        if required
        else "is padded instead, by the default policy, and the log says so"
    )
    return (
        f"Rows are packed end to end, so only the tail of a batch is padding. Sizes: {sizes}. A "
        f"model that cannot take packed rows {other}."
    )


def _why(config: ModelConfig, spec: ModelSpec, device: Device) -> str:
    given = [axis for axis in spec.axes if policy_of(config.policy, axis) is not None]
    if not given:
        return explain_default(
            spec.max_length,
            device,
            max_batch_tokens=config.limits.max_batch_tokens,
            min_sizes=spec.min_length,
        )
    default = [axis for axis in spec.axes if axis not in given]
    sources = f"{', '.join(given)} from the policy in the configuration"
    if default:
        sources += f", {', '.join(default)} by default for {device}"
    return (
        f"Sizes: {sources}. Combinations of more than {config.limits.max_batch_tokens} padded "
        "elements (limits.max_batch_tokens) are left out, except the smallest batch."
    )
