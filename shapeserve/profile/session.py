"""Measures one model's batches and variants in a warm, sealed engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch._inductor.utils as inductor_utils

from shapeserve import __version__
from shapeserve.buckets import BATCH
from shapeserve.config import ModelConfig
from shapeserve.engine import DeviceThread, Engine
from shapeserve.engine.modules import device_kind, kind_of, pick_device
from shapeserve.evaluate.choice import traffic
from shapeserve.evaluate.device import device_name
from shapeserve.evaluate.module import said
from shapeserve.evaluate.profile import wake_profiler
from shapeserve.evaluate.start import StartLog, first_compile_s
from shapeserve.evaluate.timing import Timing
from shapeserve.expect import expect
from shapeserve.metrics import Metrics, Tier
from shapeserve.plan import plan
from shapeserve.profile.bench import BatchBench, Load, variant_costs
from shapeserve.profile.choice import choose, costliest
from shapeserve.traces import Shapes
from shapeserve.tuning.conditions import conditions_of
from shapeserve.tuning.table import CostPoint, CostTable
from shapeserve.tuning.variants import SpecializedPoint
from shapeserve.warmup import WarmupProgress

log = logging.getLogger("shapeserve.profile")

Report = Callable[[int, int, str], None]
"""Called with steps done, steps in all (0: not known yet), and what is done now."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        points: batches at most.
        specialized: buckets to compile for themselves, those that cost most.
        recorded: rows that came; they say which buckets cost most. None: the longest calls do.
        timing: how often a batch is run.
    """

    points: int = 16
    specialized: int = 0
    recorded: Shapes | None = None
    timing: Timing = field(default_factory=lambda: Timing(least=7, most=100, budget_s=1.0))


def profile(config: ModelConfig, options: Options, report: Report) -> CostTable:
    """Start the model as it is served, from an empty compile cache, and measure what it costs.

    Args:
        config: the model.
        options: what to measure.
        report: shows progress; called in several threads.

    Raises:
        ConfigError: the config does not fit the model, or the rows.
        ModelError: the engine does not start.
    """
    with inductor_utils.fresh_cache():
        return _Session(config, options, report).run()


class _Session:
    """One profile, step by step."""

    def __init__(self, config: ModelConfig, options: Options, report: Report) -> None:
        self._config = config
        self._options = options
        self._report = report
        self._device = DeviceThread(threads=config.threads)

    def run(self) -> CostTable:
        # Refuses what would only be seen after minutes.
        plan(self._config, device_kind(self._config.device), self._options.recorded)
        wake_profiler()
        once_s = 0.0
        if self._config.compile.tier not in ("eager", "eager_graph"):
            self._report(0, 0, "loading torch's compiler")
            backend = self._config.compile.backend
            once_s = first_compile_s(backend, pick_device(self._config.device))
        metrics = Metrics()
        log = StartLog(metrics, self._starting, mark_kernels=False)
        engine = Engine(self._config, metrics=metrics, on_progress=log, device=self._device)
        with engine.start():
            start = log.finish(engine.runner.variants.graph_bytes, once_s)
            table = self._batches(engine)
            specialized = tuple(self._specialized(engine, table))
            variants = variant_costs(engine.runner, start, specialized)
        return replace(table, variants=variants)

    def _starting(self, step: WarmupProgress) -> None:
        self._report(step.done, step.total, f"start: {step.stage} {step.detail}".strip())

    def _batches(self, engine: Engine) -> CostTable:
        """Measure batches; return a table of them that knows the error of its fit."""
        bench = BatchBench(engine.runner, engine.probe, self._options.timing)
        # Packed buckets are measured with short rows and with long ones.
        each = 1 if BATCH in engine.grid.axes else 2
        choice = choose(engine.grid, self._options.points, each)
        fitted, held_out = bench.loads(choice.fitted), bench.loads(choice.held_out)
        loads = [*fitted, *held_out]
        measured = self._measured(engine, bench, loads)
        table = CostTable(self._conditions(engine), engine.grid.axes, measured)
        seen, unseen = measured[: len(fitted)], measured[len(fitted) :]
        return (
            replace(table, held_out=replace(table, points=seen).check(unseen)) if unseen else table
        )

    def _measured(
        self, engine: Engine, bench: BatchBench, loads: Sequence[Load]
    ) -> tuple[CostPoint, ...]:
        """Run all batches in turn, so that what else happens on the machine meets all of them."""
        rounds = self._options.timing.most + 1  # the first is not counted
        for done in range(rounds):
            self._report(done, rounds, f"batches: {len(loads)} of them in turn")
            if not engine.on_device(partial(bench.round, loads)):
                break
        points = []
        for done, load in enumerate(loads):
            self._report(done, len(loads), f"memory: {load.label}")
            points.append(engine.on_device(partial(bench.point, load)))
        return tuple(points)

    def _specialized(self, engine: Engine, table: CostTable) -> Iterator[SpecializedPoint]:
        number = self._options.specialized
        if not number or not engine.runner.programs.compiles:
            return
        spec, recorded, runner = engine.spec, self._options.recorded, engine.runner
        expected = None if recorded is None else expect(self._config, spec, engine.grid, recorded)
        shares = traffic(engine.grid.buckets, expected, None).shares
        compiled = [
            bucket
            for bucket in engine.grid.buckets
            if runner.programs.for_sizes(bucket.as_dict())[1] is Tier.COMPILED
        ]
        buckets = costliest(compiled, shares, table, number)
        bench = BatchBench(runner, engine.probe, self._options.timing)
        for done, bucket in enumerate(buckets):
            self._report(done, len(buckets), f"specialised: {bucket.label}")
            try:
                yield engine.on_device(partial(bench.specialized, bucket))
            except Exception as error:  # the user's model: whatever it raises is no reason to stop
                log.warning("%s cannot be specialised: %s", bucket.label, said(error))

    def _conditions(self, engine: Engine) -> dict[str, str]:
        device = engine.runner.device
        known = conditions_of(
            self._config, engine.spec, kind_of(device), packed=BATCH not in engine.grid.axes
        )
        if device.type == "cpu":
            known["threads"] = str(engine.on_device(torch.get_num_threads))
        return {
            **known,
            "device": device_name(device),
            "torch": torch.__version__,
            "shapeserve": __version__,
        }
