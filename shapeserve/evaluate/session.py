"""Measures one model: start, module, requests, eager and as it is configured."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch._inductor.config as inductor_config
import torch._inductor.utils as inductor_utils

from shapeserve import __version__
from shapeserve.buckets import Bucket
from shapeserve.config import ModelConfig
from shapeserve.engine import DeviceThread, Engine
from shapeserve.engine.modules import device_kind, pick_device
from shapeserve.errors import ShapeServeError
from shapeserve.evaluate.choice import SAMPLED, choose, traffic
from shapeserve.evaluate.device import device_name
from shapeserve.evaluate.module import ModuleBench, said
from shapeserve.evaluate.profile import wake_profiler
from shapeserve.evaluate.reference import Case, Reference
from shapeserve.evaluate.request import Served, measure_requests
from shapeserve.evaluate.result import Arm, Environment, Evaluation, Row, Scope, Start
from shapeserve.evaluate.start import StartLog, first_compile_s
from shapeserve.evaluate.timing import Timing, graph_break_s
from shapeserve.expect import expect
from shapeserve.metrics import Metrics
from shapeserve.plan import plan
from shapeserve.traces import Shapes
from shapeserve.warmup import WarmupProgress

log = logging.getLogger("shapeserve.evaluate")

# Inductor counts bytes only if this logger would say so; nothing is printed by it.
_BYTES_LOGGER = "torch._inductor.compile_fx.__inductor_metrics"

Report = Callable[[int, int, str], None]
"""Called with steps done, steps in all (0: not known yet), and what is done now."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        grid: which buckets, see :func:`shapeserve.evaluate.choice.choose`.
        recorded: rows that came; None: every bucket counts alike.
        timing: how often calls are timed.
    """

    grid: str = SAMPLED
    recorded: Shapes | None = None
    timing: Timing = field(default_factory=Timing)


def evaluate(config: ModelConfig, options: Options, report: Report) -> Evaluation:
    """Measure a model in some of its buckets.

    The compile cache is an empty one of its own, so that the first calls are those of a machine
    that has not seen the model.

    Args:
        config: the model.
        options: what to measure.
        report: shows progress; called in several threads.

    Raises:
        ConfigError: the config does not fit the model, or a bucket is not in the grid.
        ModelError: the engine does not start.
    """
    # What no grid of this config has is said before minutes of compiling.
    choose(plan(config, device_kind(config.device)).grid, options.grid)
    logger = logging.getLogger(_BYTES_LOGGER)
    level, marks = logger.level, inductor_config.cpp.enable_kernel_profile
    logger.setLevel(logging.INFO)
    try:
        with inductor_utils.fresh_cache():
            return _Session(config, options, report).run()
    finally:
        logger.setLevel(level)
        inductor_config.cpp.enable_kernel_profile = marks  # before torch 2.13 it is of the process


class _Session:
    """One evaluation, step by step."""

    def __init__(self, config: ModelConfig, options: Options, report: Report) -> None:
        self._config = config
        self._options = options
        self._report = report
        self._total = self._done = 0
        # One for both engines: two pools of CPU threads would wait for each other by spinning.
        self._device = DeviceThread(threads=config.threads)

    def run(self) -> Evaluation:
        wake_profiler()
        once_s = 0.0
        if not self._is_eager:
            self._report(0, 0, "loading torch's compiler")
            backend = self._config.compile.backend
            once_s = first_compile_s(backend, pick_device(self._config.device))
        with ExitStack() as running:
            served = self._served(self._config, running, once_s)
            buckets = choose(served.engine.grid, self._options.grid)
            self._total = 1 + 2 * len(buckets)  # the answers; module and requests of each bucket
            self._step("answers of the reference")
            cases = partial(self._cases, served.engine, buckets)
            reference, filled = served.engine.on_device(cases)
            rows = self._module_rows(served, reference, filled)
            found = self._describe(served, buckets)
            eager_start, more = self._request_rows(served, reference, filled, running)
        order = {label: i for i, label in enumerate(found.buckets)}
        rows += more
        rows.sort(key=lambda r: (order[r.bucket], [*Scope].index(r.scope), [*Arm].index(r.arm)))
        return replace(
            found,
            rows=tuple(rows),
            eager_start=eager_start,
            # Last, because its own graph breaks are no model's.
            graph_break_s=_graph_break_s(),
        )

    @property
    def _is_eager(self) -> bool:
        return self._config.compile.tier == "eager"

    def _step(self, what: str) -> None:
        self._report(self._done, self._total, what)
        self._done += 1

    def _served(self, config: ModelConfig, running: ExitStack, once_s: float = 0.0) -> Served:
        """Start an engine, which ``running`` closes."""
        metrics = Metrics()
        cpu = device_kind(config.device) == "cpu"
        log = StartLog(metrics, partial(self._starting, config.compile.tier), mark_kernels=cpu)
        engine = Engine(config, metrics=metrics, on_progress=log, device=self._device).start()
        running.enter_context(engine)
        return Served(engine, log.finish(engine.runner.variants.graph_bytes, once_s))

    def _starting(self, tier: str, step: WarmupProgress) -> None:
        self._report(self._done, self._total, f"start ({tier}): {step.stage} {step.detail}".strip())

    def _cases(self, engine: Engine, buckets: Sequence[Bucket]) -> tuple[Reference, list[Case]]:
        reference = Reference(self._config, engine.spec, engine.runner.device)
        return reference, [reference.case(bucket) for bucket in buckets]

    def _module_rows(
        self, served: Served, reference: Reference, cases: Sequence[Case]
    ) -> list[Row]:
        engine, timing = served.engine, self._options.timing
        bench = ModuleBench(engine.runner, engine.metrics, served.start, reference.probe, timing)
        rows = []
        for case in cases:
            self._step(f"module {case.bucket.label}")
            rows += engine.on_device(partial(bench.measure, case))
        return rows

    def _request_rows(
        self, served: Served, reference: Reference, cases: Sequence[Case], running: ExitStack
    ) -> tuple[Start | None, list[Row]]:
        """Time requests, in turn with those of an engine that compiles nothing."""
        engines, rows = [served], []
        eager_start: Start | None = served.start
        if not self._is_eager:
            compile_ = self._config.compile.model_copy(update={"tier": "eager"})
            config = self._config.model_copy(update={"compile": compile_})
            try:
                engines.insert(0, self._served(config, running))
                eager_start = engines[0].start
            except ShapeServeError as error:
                eager_start = None
                labels = (case.bucket.label for case in cases)
                rows = [Row(b, Arm.EAGER, Scope.REQUEST, error=said(error)) for b in labels]
        for case in cases:
            self._step(f"requests {case.bucket.label}")
            rows += measure_requests(engines, case, reference.probe, self._options.timing)
        return eager_start, rows

    def _describe(self, served: Served, buckets: Sequence[Bucket]) -> Evaluation:
        engine, recorded = served.engine, self._options.recorded
        expected = (
            None if recorded is None else expect(self._config, engine.spec, engine.grid, recorded)
        )
        return Evaluation(
            model=engine.spec.name,
            environment=_environment(engine),
            buckets=tuple(bucket.label for bucket in buckets),
            grid_buckets=len(engine.grid),
            start=served.start,
            eager_start=None,
            rows=(),
            traffic=traffic(buckets, expected, len(recorded.rows) if recorded else None),
            graph_break_s=None,
        )


def _graph_break_s() -> float | None:
    try:
        return graph_break_s()
    except Exception as error:  # what a break costs is not worth losing the rest
        log.warning("a graph break cannot be timed: %s", said(error))
        return None


def _environment(engine: Engine) -> Environment:
    return Environment(
        device=device_name(engine.runner.device),
        threads=engine.on_device(torch.get_num_threads),
        dtype=engine.spec.dtype,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shapeserve": __version__,
        },
    )
