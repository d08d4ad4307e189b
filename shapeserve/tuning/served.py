"""A model as its engine would serve it, without loading it: what the simulator runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from shapeserve.buckets import BATCH, TOKENS, Grid, Shape
from shapeserve.config import ModelConfig
from shapeserve.dispatch import Dispatcher
from shapeserve.expect import SPECIAL_TOKENS
from shapeserve.lanes import Lanes, Place, dispatcher_for, largest_area, without_single
from shapeserve.models.describe import describe
from shapeserve.models.spec import ModelSpec
from shapeserve.plan import planned_grid
from shapeserve.policy import Device, packed_grid
from shapeserve.traces import SEQ
from shapeserve.tuning.cost import Cost
from shapeserve.tuning.fit import Buckets
from shapeserve.tuning.stand_in import policy_of, stand_in

# As the engine measures it at start on a GPU: one row gets a program of its own if padding it to
# two costs 15 % more; and a GPU writes one batch while it works on another.
_SINGLE_PAYS_FROM = 1.15
_SLOTS: Mapping[Device, int] = {"cpu": 1, "cuda": 2}
_TYPICAL_SIZE = 40  # of the row that the engine measures this with


@dataclass(frozen=True, slots=True)
class Piece:
    """A row that is executed: a sample, or a part of one that is split.

    Attributes:
        sizes: row axis -> real size, after truncation.
        place: where it waits.
    """

    sizes: Shape
    place: Place


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What the decisions of an engine follow from.

    Attributes:
        spec: the model's tensors and limits.
        grid: the buckets.
        dispatcher: routes rows.
        lanes: places them.
        cost: seconds of a batch.
        overhead_elements: fixed cost of a launch, for the batcher.
        min_batch: rows that a batch has at least.
        slots: batches that may be launched and not finished.
        max_queue_rows: as ``limits.max_queue_rows``.
        max_queue_tokens: as ``limits.max_queue_tokens``.
        batch_wait_timeout_s: as ``batching.batch_wait_timeout_s``.
    """

    spec: ModelSpec
    grid: Grid
    dispatcher: Dispatcher
    lanes: Lanes
    cost: Cost
    overhead_elements: float
    min_batch: int
    slots: int
    max_queue_rows: int
    max_queue_tokens: int
    batch_wait_timeout_s: float
    _pieces: dict[tuple[int, ...], tuple[Piece, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        device: Device,
        cost: Cost,
        *,
        overhead_elements: float | None = None,
        min_batch: int | None = None,
    ) -> Self:
        """Build what the engine would from a configuration.

        Args:
            config: the model; a packed layout is taken as the model's own.
            device: kind of device.
            cost: seconds of a batch.
            overhead_elements: fixed cost of a launch; None: what ``cost`` says.
            min_batch: 2 if one row has no program of its own; None: what ``cost`` says.

        Raises:
            ConfigError: the policy does not fit the model.
            ModelError: the model's directory is incomplete.
        """
        spec = describe(config)
        grid = planned_grid(config, spec, device)
        return cls.of_grid(
            config,
            spec,
            grid,
            device,
            cost,
            overhead_elements=overhead_elements,
            min_batch=min_batch,
        )

    @classmethod
    def of_grid(
        cls,
        config: ModelConfig,
        spec: ModelSpec,
        grid: Grid,
        device: Device,
        cost: Cost,
        *,
        overhead_elements: float | None = None,
        min_batch: int | None = None,
    ) -> Self:
        """Build what the engine would with this grid; see :meth:`from_config`."""
        limits = config.limits
        area = largest_area(spec, limits.max_batch_tokens, grid)
        if min_batch is None:
            min_batch = _min_batch(config, spec, grid, device, cost)
        if min_batch > 1 and BATCH in grid.axes:
            grid = without_single(grid)
        special_tokens = None if spec.task == "module" else SPECIAL_TOKENS
        return cls(
            spec=spec,
            grid=grid,
            dispatcher=dispatcher_for(spec, config.rare_shapes, grid, special_tokens),
            lanes=Lanes(grid, area),
            cost=cost,
            overhead_elements=cost.overhead_elements
            if overhead_elements is None
            else overhead_elements,
            min_batch=min_batch,
            slots=_SLOTS[device],
            max_queue_rows=limits.max_queue_rows,
            max_queue_tokens=limits.max_queue_tokens,
            batch_wait_timeout_s=config.batching.batch_wait_timeout_s,
        )

    @classmethod
    def for_buckets(
        cls,
        buckets: Buckets,
        device: Device,
        cost: Cost,
        *,
        max_batch_tokens: int,
        batches: Sequence[int] | None = None,
        min_batch: int | None = None,
    ) -> Self:
        """Build a model that has only these buckets: none of its rows is refused or leaves them.

        Args:
            buckets: key of a policy -> its sizes or shapes.
            device: kind of device.
            cost: seconds of a batch.
            max_batch_tokens: padded elements of a batch.
            batches: sizes along ``batch``; None: what the device gets by default.
            min_batch: see :meth:`from_config`.

        Raises:
            ConfigError: there are more buckets than a policy may have.
        """
        config = stand_in(buckets, max_batch_tokens=max_batch_tokens, batches=batches)
        return cls.from_config(config, device, cost, min_batch=min_batch)

    @classmethod
    def for_tokens(
        cls,
        sizes: Sequence[int],
        longest: int,
        device: Device,
        cost: Cost,
        *,
        max_batch_tokens: int,
    ) -> Self:
        """Build a model of packed rows that has only these buckets.

        Args:
            sizes: of its batches, in tokens.
            longest: row that it takes.
            device: kind of device.
            cost: seconds of a batch.
            max_batch_tokens: tokens of a batch.

        Raises:
            ConfigError: the largest batch does not hold the longest row, or is too large.
        """
        config = stand_in({SEQ: (longest,)}, max_batch_tokens=max_batch_tokens)
        grid = packed_grid(policy_of({TOKENS: tuple(sizes)}), max_batch_tokens, {SEQ: longest})
        return cls.of_grid(config, describe(config), grid, device, cost)

    def refusal(self, sizes: Shape) -> str | None:
        """Return why a sample is refused, None if it is not."""
        if any(sizes[axis] < least for axis, least in self.spec.min_length.items()):
            return "too_short"
        return None if self.pieces(sizes) else "too_long"

    def pieces(self, sizes: Shape) -> tuple[Piece, ...]:
        """Return the rows that are executed for a sample; none if it is too long."""
        key = tuple(sizes.values())
        known = self._pieces.get(key)
        if known is None:
            known = self._pieces[key] = self._route(sizes)
        return known

    def _route(self, sizes: Shape) -> tuple[Piece, ...]:
        route = self.dispatcher.route(sizes)
        if route.action == "reject":
            return ()
        cut = {**sizes, **route.keep}
        if route.action != "split":
            return (Piece(cut, self.lanes.place(cut, route)),)
        parts = [{**cut, str(route.axis): size} for size in route.pieces]
        return tuple(
            Piece(part, self.lanes.place(part, self.dispatcher.route(part))) for part in parts
        )

    def executed(self, sizes: Mapping[str, int], *, fallback: bool) -> Mapping[str, int]:
        """Return what runs for a batch of ``sizes``: a row without a program is padded to two."""
        if fallback and sizes.get(BATCH, self.min_batch) < self.min_batch:
            return {**sizes, BATCH: self.min_batch}
        return sizes


def _min_batch(config: ModelConfig, spec: ModelSpec, grid: Grid, device: Device, cost: Cost) -> int:
    """Decide as the engine does whether one row gets a program of its own."""
    if TOKENS in grid.axes or config.compile.tier in ("eager", "eager_graph"):
        return 1
    batches = {bucket.size(BATCH) for bucket in grid.buckets}
    if 1 not in batches:
        return 2
    if device == "cpu" or batches == {1}:
        return 1
    row = {axis: min(_TYPICAL_SIZE, grid.max_size(axis)) for axis in spec.row_axes}
    one, two = (cost.seconds({BATCH: batch, **row}) for batch in (1, 2))
    return 1 if two > one * _SINGLE_PAYS_FROM else 2
