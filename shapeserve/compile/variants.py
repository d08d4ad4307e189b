"""The programs of a model, and the variants that a grid makes of them.

At most two compiles a model: ``many`` serves every batch of two rows and more, ``single`` serves
one row, because torch specialises sizes 0 and 1. Both are dynamic in every other axis. ``single``
is built only where padding one row to two is measured to cost more than it saves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError

from shapeserve.buckets import BATCH, Bucket, Grid
from shapeserve.compile.graph import GraphPool
from shapeserve.compile.program import Forward, compiled, freezing
from shapeserve.metrics import Mode, Tier

log = logging.getLogger("shapeserve.compile")

# Two padded rows may cost this much more than one before a program for one row pays: below it the
# second compile (10-25 s) buys less than the noise of a measurement. Arbitrary within 1.05-1.5.
_SINGLE_PAYS_FROM = 1.15
_TIMED_CALLS = 10


@dataclass(frozen=True, slots=True)
class Variant:
    """One runnable program for one bucket.

    Attributes:
        bucket: the padded shape it runs.
        tier: what it is.
        run: tensors in spec order -> outputs in spec order.
        wanted: the tier it was meant to have; a lower ``tier`` means that it failed there.
    """

    bucket: Bucket
    tier: Tier
    run: Forward
    wanted: Tier

    @property
    def mode(self) -> Mode:
        """The metric label of rows answered by this variant."""
        return Mode(self.tier.value)

    @property
    def degraded(self) -> bool:
        """Whether it serves at a lower tier than it was meant to."""
        return self.tier is not self.wanted


class Programs:
    """The callables of one model; built once, shared by every grid (old and new policy).

    Args:
        module: frozen module, tensors in spec order -> tuple of outputs.
        tier: ``eager`` compiles nothing; ``compiled`` and ``graph`` compile first.
        freeze: pack the weights as constants (CPU).
        backend: torch.compile backend, ``inductor`` or ``eager``.
        on_limit: called for every call that ran eager because of torch's recompile limit.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        tier: Tier,
        freeze: bool,
        backend: str,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self.eager: Forward = module
        self.tier = tier
        self.frozen = freeze
        self._backend = backend
        self._on_limit = on_limit
        self._module = module
        self._many: Forward | None = None
        self._single: Forward | None = None

    @property
    def min_batch(self) -> int:
        """The smallest batch that may be executed: 2 if there is no program for one row."""
        return 1 if self.tier is Tier.EAGER or self._single is not None else 2

    def compile_many(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Compile the program for two rows and more by running it once on ``inputs``.

        The sizes of ``inputs`` must differ from each other and be >= 2, else torch ties them
        together (duck sizing) and the first other shape recompiles.
        """
        self._many = self._compile("many", inputs)

    def compile_single(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Compile the program for one row by running it once on ``inputs`` (batch 1)."""
        self._single = self._compile("single", inputs)

    def _compile(self, name: str, inputs: tuple[torch.Tensor, ...]) -> Forward:
        """Compile as one graph; where the module breaks the graph, once more with breaks."""
        with freezing(self.frozen):
            try:
                program = compiled(self._module, name, backend=self._backend)
                program(*inputs)
            except (Unsupported, UserError) as error:
                log.warning("the model does not compile as one graph, breaks allowed: %s", error)
                program = compiled(self._module, name, backend=self._backend, fullgraph=False)
                program(*inputs)
        return self._or_eager(program)

    def _or_eager(self, program: Forward) -> Forward:
        """Answer eagerly, and count it, what torch refuses to compile once more."""

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            try:
                return program(*inputs)
            except FailOnRecompileLimitHit:
                self._on_limit()
                return self.eager(*inputs)

        return run

    def for_sizes(self, sizes: Mapping[str, int]) -> tuple[Forward, Tier]:
        """Return the program that runs these sizes (axis -> size), and its tier.

        A size of 1 on a row axis runs eagerly: torch would specialise it, a third compile.
        """
        if self.tier is Tier.EAGER or any(s == 1 for a, s in sizes.items() if a != BATCH):
            return self.eager, Tier.EAGER
        program = self._single if sizes[BATCH] == 1 else self._many
        return (program, Tier.COMPILED) if program is not None else (self.eager, Tier.EAGER)


def single_pays(forward: Forward, make_inputs: Callable[[int], tuple[torch.Tensor, ...]]) -> bool:
    """Measure whether one row padded to two costs enough to deserve a program of its own.

    Args:
        forward: the eager model; the ratio of one row to two is what counts, not the level.
        make_inputs: batch -> input tensors of a typical row shape.
    """
    inputs = make_inputs(1), make_inputs(2)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(_TIMED_CALLS):
        for rows, seconds in zip(inputs, times, strict=True):
            seconds.append(_seconds(forward, rows))
    # The fastest call: what else runs on the machine only ever adds.
    one, two = (min(seconds) for seconds in times)
    log.info("one row %.2f ms, padded to two %.2f ms (eager)", one * 1e3, two * 1e3)
    return two > one * _SINGLE_PAYS_FROM


def _seconds(forward: Forward, inputs: tuple[torch.Tensor, ...]) -> float:
    started = time.perf_counter()
    forward(*inputs)
    _synchronize(inputs)
    return time.perf_counter() - started


def _synchronize(inputs: tuple[torch.Tensor, ...]) -> None:
    if inputs and inputs[0].is_cuda:
        torch.cuda.synchronize(inputs[0].device)


class VariantSet:
    """One variant per bucket of a grid; immutable after :meth:`seal` (I2)."""

    def __init__(self, grid: Grid, programs: Programs, device: torch.device) -> None:
        self.grid = grid
        self._programs = programs
        self._sealed = False
        self._pool = GraphPool(device) if programs.tier is Tier.GRAPH else None
        self._variants: dict[Bucket, Variant] = {}
        for bucket in grid.buckets:
            self._variants[bucket] = self._base(bucket)

    def _base(self, bucket: Bucket) -> Variant:
        program, tier = self._programs.for_sizes(bucket.as_dict())
        return Variant(bucket, tier, program, self._programs.tier)

    def __getitem__(self, bucket: Bucket) -> Variant:
        return self._variants[bucket]

    @property
    def all(self) -> Mapping[Bucket, Variant]:
        """Bucket -> variant."""
        return self._variants

    @property
    def graph_bytes(self) -> int:
        """Memory reserved by the captures, 0 without graphs."""
        return self._pool.bytes if self._pool else 0

    def capture(self, bucket: Bucket, inputs: tuple[torch.Tensor, ...]) -> None:
        """Raise the variant of ``bucket`` to ``graph``; RuntimeError if it cannot be captured."""
        self._check_open("capture")
        if self._pool is None:
            return
        variant = self._variants[bucket]
        run = self._pool.capture(variant.run, inputs)
        self._variants[bucket] = replace(variant, tier=Tier.GRAPH, run=run)

    def demote(self, bucket: Bucket) -> None:
        """Serve ``bucket`` eagerly from now on; it stays marked as degraded."""
        self._check_open("demote")
        eager = replace(self._variants[bucket], tier=Tier.EAGER, run=self._programs.eager)
        self._variants[bucket] = eager

    def seal(self) -> None:
        """Refuse every later change: nothing compiles or captures on the request path."""
        self._sealed = True

    def _check_open(self, what: str) -> None:
        if self._sealed:
            raise RuntimeError(f"cannot {what}: the variants are sealed; build a new VariantSet")
