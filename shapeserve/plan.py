"""What a configuration will build and what padding it will cost, without loading the model.

Pure: reads the model's JSON files, never its weights; needs neither torch nor a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid
from shapeserve.config import ModelConfig, RareShape
from shapeserve.dispatch import Dispatcher
from shapeserve.errors import ConfigError
from shapeserve.metrics import Tier
from shapeserve.models.describe import describe
from shapeserve.models.spec import ModelSpec
from shapeserve.policy import Device, explain_default, grid_for, packed_grid

# [CLS] and [SEP]: what each piece of a split text spends again. Exact for BERT-like tokenizers.
SPECIAL_TOKENS = 2

# Hidden states of the largest bucket that the pool of all captures holds. Measured on an H200 with
# MiniLM and BERT-base in bf16, packed and padded, to 8,192 and 16,384 tokens: 9.3 to 11.3 for the
# compiled program and 12.4 to 12.8 for the eager model (torch 2.11).
_COMPILED_STATES, _EAGER_STATES = 10, 13


@dataclass(frozen=True, slots=True)
class Waste:
    """Elements executed for some rows: what they hold and what was added along the row axis."""

    real: int
    padding: int

    def __add__(self, other: Waste) -> Waste:
        return Waste(self.real + other.real, self.padding + other.padding)

    @property
    def ratio(self) -> float:
        """Padding / all elements, 0 to 1."""
        return self.padding / (self.real + self.padding) if self.padding else 0.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a histogram of lengths will do on a grid.

    Attributes:
        axis: the row axis that the lengths are along.
        rows: rows in the histogram.
        outcomes: word -> rows: ``bucket``, ``fallback (REASON)``, ``truncate``, ``split``,
            ``reject``.
        by_size: bucket size along ``axis`` -> rows that run in it.
        waste: of all rows that run, fallback included.
        compared: name of another policy -> its waste for the same rows.
    """

    axis: str
    rows: int
    outcomes: Mapping[str, int]
    by_size: Mapping[int, int]
    waste: Waste
    compared: Mapping[str, Waste]


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
            data["expected"] = _expectation_dict(self.expected)
        return data


def plan(config: ModelConfig, device: Device, lengths: Mapping[int, int] | None = None) -> Plan:
    """Plan one model.

    Args:
        config: the model.
        device: kind of device to plan for.
        lengths: length -> rows, as from ``traces.read_lengths``; the model must have exactly one
            axis besides ``batch``.

    Raises:
        ConfigError: the policy does not fit the model, the tier does not exist on the device, or
            ``lengths`` are given for a model with several row axes.
        ModelError: the model's directory is incomplete.
    """
    spec = describe(config)
    if config.packs(device):
        grid = packed_grid(config.policy, config.limits.max_batch_tokens, spec.max_length)
        why = _why_packed(config)
    else:
        grid = grid_for(
            spec.axes,
            config.policy,
            device=device,
            max_batch_tokens=config.limits.max_batch_tokens,
            max_sizes=spec.max_length,
            hard_limits=spec.hard_limit,
        )
        why = _why(config, spec, device)
    expected = None if lengths is None else expect(config, spec, grid, lengths)
    tier, eager = _tier(config, device), config.compile.tier == "eager_graph"
    graph_bytes = _graph_bytes(spec, grid, eager=eager) if tier is Tier.GRAPH else None
    return Plan(spec.name, device, tier, grid, why, expected, eager, graph_bytes)


def _graph_bytes(spec: ModelSpec, grid: Grid, *, eager: bool) -> int | None:
    """Predict the pool that all captures share: it is that of the largest bucket."""
    if spec.embedding_dim is None:
        return None
    largest = max(bucket.area for bucket in grid.buckets)
    element = 4 if spec.dtype == "float32" else 2
    states = _EAGER_STATES if eager else _COMPILED_STATES
    return largest * spec.embedding_dim * element * states


def expect(
    config: ModelConfig, spec: ModelSpec, grid: Grid, lengths: Mapping[int, int]
) -> Expectation:
    """Dispatch every length and add up what is executed.

    Padding along the row axis is exact, because a row's padded size does not depend on its
    neighbours. Padding along ``batch``, and the tail of a packed batch, do: not predicted.
    """
    packed = BATCH not in grid.axes
    largest = grid.max_size(TOKENS) if packed else 0
    if packed:  # rows are not padded: each is its own size, up to the end of the grid
        (axis,) = spec.row_axes
        grid = Grid((axis,), [Bucket(((axis, n + 1),)) for n in range(spec.max_length[axis])])
    if len(grid.row_axes) != 1:
        raise ConfigError(
            f"--lengths needs a model with one axis besides batch; {spec.name} has "
            f"{', '.join(grid.row_axes)}"
        )
    (axis,) = grid.row_axes
    dispatcher = _dispatcher(config, spec, grid)
    outcomes: Counter[str] = Counter()
    by_size = {bucket.size(axis): 0 for bucket in grid.buckets}
    for length, rows in lengths.items():
        route = dispatcher.route({axis: length})
        if route.action == "fallback" and length <= largest:
            outcomes["bucket"] += rows  # nothing is padded to it, so a long row packs like others
            continue
        outcomes[f"{route.action} ({route.reason})" if route.reason else route.action] += rows
        if route.row and route.reason is None:
            by_size[dict(route.row)[axis]] += rows
    executed = _executed(dispatcher, axis, lengths)
    return Expectation(
        axis=axis,
        rows=sum(lengths.values()),
        outcomes=outcomes,
        by_size={} if packed else by_size,
        waste=Waste(executed.real, 0) if packed else executed,
        compared=_compared(config, spec, axis, grid.max_size(axis), lengths),
    )


def _compared(
    config: ModelConfig, spec: ModelSpec, axis: str, end: int, lengths: Mapping[int, int]
) -> dict[str, Waste]:
    """Return the waste of the usual policies for the same rows; beyond ``end`` they run alike."""
    rule = config.rare_shapes.get(axis, RareShape())
    # A usual policy has no guard: every row within the grid runs in its bucket.
    unguarded = config.model_copy(
        update={"rare_shapes": {axis: rule.model_copy(update={"max_padding_waste": 1.0})}}
    )
    ladders = {"pow2": powers_of_two(end), "pad_to_max": (end,)}
    return {
        name: _executed(
            _dispatcher(unguarded, spec, Grid((axis,), (Bucket(((axis, s),)) for s in sizes))),
            axis,
            lengths,
        )
        for name, sizes in ladders.items()
    }


def _executed(dispatcher: Dispatcher, axis: str, lengths: Mapping[int, int]) -> Waste:
    """Add up what rows of these lengths execute; rejected ones execute nothing."""
    total = Waste(0, 0)
    for length, rows in lengths.items():
        route = dispatcher.route({axis: length})
        if route.pieces:
            total += _executed(dispatcher, axis, _repeated(route.pieces, rows))
        elif route.row:
            real = route.keep.get(axis, length)
            total += Waste(real * rows, (dict(route.row)[axis] - real) * rows)
    return total


def _repeated(pieces: tuple[int, ...], rows: int) -> dict[int, int]:
    return {length: count * rows for length, count in Counter(pieces).items()}


def powers_of_two(end: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... below ``end``, and ``end``."""
    return (*(2**i for i in range(math.ceil(math.log2(end)))), end)


def _dispatcher(config: ModelConfig, spec: ModelSpec, grid: Grid) -> Dispatcher:
    overhead = {"seq": SPECIAL_TOKENS} if spec.task == "embed" else None
    return Dispatcher(
        grid,
        config.rare_shapes,
        spec.hard_limit,
        piece_overhead=overhead,
        padding_invariant=spec.padding_invariant is not False,
    )


def _tier(config: ModelConfig, device: Device) -> Tier:
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
    given = [axis for axis in spec.axes if axis in config.policy]
    if not given:
        return explain_default(
            spec.max_length, device, max_batch_tokens=config.limits.max_batch_tokens
        )
    default = [axis for axis in spec.axes if axis not in given]
    sources = f"{', '.join(given)} from the policy in the configuration"
    if default:
        sources += f", {', '.join(default)} by default for {device}"
    return (
        f"Sizes: {sources}. Combinations of more than {config.limits.max_batch_tokens} padded "
        "elements (limits.max_batch_tokens) are left out, except the smallest batch."
    )


def _expectation_dict(expected: Expectation) -> dict[str, Any]:
    others = {name: {f"padding_{expected.axis}": w.ratio} for name, w in expected.compared.items()}
    return {
        "rows": expected.rows,
        "outcomes": dict(expected.outcomes),
        "rows_by_size": {str(size): rows for size, rows in expected.by_size.items()},
        # Batch padding depends on which rows arrive together: null, not 0.
        "waste": {
            "configured": {f"padding_{expected.axis}": expected.waste.ratio, "padding_batch": None},
            **others,
        },
    }
