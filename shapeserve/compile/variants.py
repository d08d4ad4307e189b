"""The programs of a model, and the variants that a grid makes of them.

At most two compiles a model: ``many`` serves every batch of two rows and more, ``single`` serves
one row, because torch specialises sizes 0 and 1. Both are dynamic in every other axis. ``single``
is built only where padding one row to two is measured to cost more than it saves.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError

from shapeserve.buckets import BATCH, Bucket, Grid
from shapeserve.compile.decompose import Table
from shapeserve.compile.graph import GraphPool
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.program import Program, compiled, freezing
from shapeserve.layout import Forward, Layout
from shapeserve.metrics import EagerFrameReason, Mode, Tier

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
        tier: what the variants shall be.
        compiles: whether there are compiled programs; without them the eager module is run, or
            captured.
        freeze: pack the weights as constants (CPU).
        backend: torch.compile backend, ``inductor`` or ``eager``.
        monitor: counts its compiles, and the calls that ran eager because of torch's recompile
            limit.
        one_graph: whether to try without graph breaks first; they are certain where the module
            has eager islands.
        decompositions: what operators are made of, beside Inductor's own table.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        tier: Tier,
        freeze: bool,
        backend: str,
        monitor: CompileMonitor,
        compiles: bool | None = None,
        one_graph: bool = True,
        decompositions: Table | None = None,
    ) -> None:
        self.eager: Forward = module
        self.tier = tier
        self.compiles = tier is not Tier.EAGER if compiles is None else compiles
        self.frozen = freeze
        self._backend = backend
        self._monitor = monitor
        self._one_graph = one_graph
        self._decompositions = decompositions
        self._module = module
        self._dynamic = True
        self._many: Program | None = None
        self._single: Program | None = None

    def specialized(self, monitor: CompileMonitor) -> Programs:
        """The same module with programs for exactly the sizes of their first call, none yet.

        Args:
            monitor: counts their compiles.
        """
        twin = copy.copy(self)
        twin._dynamic, twin._monitor = False, monitor
        twin._many = twin._single = None
        return twin

    @property
    def min_batch(self) -> int:
        """The smallest batch that may be executed: 2 if there is no program for one row."""
        return 1 if not self.compiles or self._single is not None else 2

    def compile_many(self, run: Callable[[Forward], object]) -> None:
        """Compile the program for two rows and more by running it once.

        Args:
            run: calls the program on inputs whose sizes differ from each other and are >= 2, else
                torch ties them together (duck sizing) and the first other shape recompiles.
        """
        self._many = self._compile("many", run)

    def compile_single(self, run: Callable[[Forward], object]) -> None:
        """Compile the program for one row; ``run`` calls it on a batch of 1."""
        self._single = self._compile("single", run)

    def _compile(self, name: str, run: Callable[[Forward], object]) -> Program:
        """Compile as one graph; where the module breaks the graph, once more with breaks."""
        with freezing(self.frozen):
            try:
                program = self._wrapped(name, fullgraph=self._one_graph)
                run(program)
            except (Unsupported, UserError) as error:
                if not self._one_graph:
                    raise
                log.warning(
                    "the model does not compile as one graph, breaks allowed (`shapeserve explain` "
                    "lists them): %s",
                    error,
                )
                self._monitor.discard()
                program = self._wrapped(name, fullgraph=False)
                run(program)
        return program

    def _wrapped(self, name: str, *, fullgraph: bool) -> Program:
        return compiled(
            self._module,
            name,
            backend=self._backend,
            monitor=self._monitor,
            fullgraph=fullgraph,
            decompositions=self._decompositions,
            dynamic=self._dynamic,
        )

    def _or_eager(self, program: Program) -> Forward:
        """Answer eagerly, and count it, what torch refuses to compile once more."""

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            try:
                return program(*inputs)
            except FailOnRecompileLimitHit:
                self._monitor.count_eager_frame(EagerFrameReason.RECOMPILE_LIMIT)
                return self.eager(*inputs)

        return run

    def for_sizes(self, sizes: Mapping[str, int]) -> tuple[Forward, Tier]:
        """Return the program that runs these sizes (axis -> size), and its tier.

        A size of 1 on a row axis runs eagerly: torch would specialise it, a third compile.
        """
        program = self._program(sizes)
        return (
            (self.eager, Tier.EAGER)
            if program is None
            else (self._or_eager(program), Tier.COMPILED)
        )

    def without_compiling(self, sizes: Mapping[str, int]) -> Forward:
        """Return what runs these sizes and never compiles, whatever they are.

        Sizes that clients choose may be some for which no compile holds: behind the strides of a
        convolution a small one becomes 1, which torch specialises. Those run eagerly.
        """
        program = self._program(sizes)
        return self.eager if program is None else partial(program.run_only, self.eager)

    def _program(self, sizes: Mapping[str, int]) -> Program | None:
        """The program for these sizes; None if they run eagerly."""
        if not self.compiles or any(s == 1 for a, s in sizes.items() if a != BATCH):
            return None
        return self._single if sizes.get(BATCH) == 1 else self._many


def single_pays(run: Callable[[int], None], device: torch.device) -> bool:
    """Measure whether one row padded to two costs enough to deserve a program of its own.

    Args:
        run: runs the eager model on so many rows of a typical shape; the ratio of one row to two
            is what counts, not the level.
        device: where it runs.
    """
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(_TIMED_CALLS):
        for batch, seconds in times.items():
            started = time.perf_counter()
            run(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    # The fastest call: what else runs on the machine only ever adds.
    one, two = min(times[1]), min(times[2])
    log.info("one row %.2f ms, padded to two %.2f ms (eager)", one * 1e3, two * 1e3)
    return two > one * _SINGLE_PAYS_FROM


class VariantSet:
    """One variant per bucket of a grid; immutable after :meth:`seal` (I2).

    Args:
        grid: the buckets.
        programs: what they run.
        layout: gives the programs their inputs.
        device: where they run.
        graph_bytes: captures stop once their pool has reserved so much; None: no bound.
    """

    def __init__(
        self,
        grid: Grid,
        programs: Programs,
        layout: Layout,
        device: torch.device,
        *,
        graph_bytes: int | None = None,
    ) -> None:
        self.grid = grid
        self._programs = programs
        self._layout = layout
        self._graph_bytes = graph_bytes
        self._sealed = False
        self._pool = GraphPool(device) if programs.tier is Tier.GRAPH else None
        self._grown: dict[Bucket, int] = {}
        self._variants: dict[Bucket, Variant] = {}
        for bucket in grid.buckets:
            self._variants[bucket] = self._base(bucket)

    def _base(self, bucket: Bucket) -> Variant:
        sizes = bucket.as_dict()
        program, tier = self._programs.for_sizes(sizes)
        return Variant(bucket, tier, self._layout.bind(program, sizes), self._programs.tier)

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

    @property
    def captured_bytes(self) -> Mapping[Bucket, int]:
        """Captured bucket -> what its capture added to that memory, in the order of capture."""
        return self._grown

    def capture(self, bucket: Bucket, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Raise the variant of ``bucket`` to ``graph``, unless the memory budget is used up.

        Returns whether it was captured.

        Raises:
            RuntimeError: it cannot be captured.
        """
        self._check_open("capture")
        if self._pool is None:
            return False
        before = self._pool.bytes
        if self._graph_bytes is not None and before >= self._graph_bytes:
            return False
        variant = self._variants[bucket]
        run = self._pool.capture(variant.run, inputs)
        self._grown[bucket] = self._pool.bytes - before
        self._variants[bucket] = replace(variant, tier=Tier.GRAPH, run=run)
        return True

    def demote(self, bucket: Bucket) -> None:
        """Serve ``bucket`` eagerly from now on; it stays marked as degraded."""
        self._check_open("demote")
        run = self._layout.bind(self._programs.eager, bucket.as_dict())
        self._variants[bucket] = replace(self._variants[bucket], tier=Tier.EAGER, run=run)

    def seal(self) -> None:
        """Refuse every later change: nothing compiles or captures on the request path."""
        self._sealed = True

    @property
    def sealed(self) -> bool:
        """Whether requests may run."""
        return self._sealed

    def _check_open(self, what: str) -> None:
        if self._sealed:
            raise RuntimeError(f"cannot {what}: the variants are sealed; build a new VariantSet")
