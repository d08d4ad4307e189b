"""Measures one model: start, module, requests, eager and as it is configured."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch._inductor.config as inductor_config
import torch._inductor.utils as inductor_utils

from shapeserve import __version__
from shapeserve.buckets import Bucket
from shapeserve.config import ModelConfig
from shapeserve.engine import Engine
from shapeserve.engine.modules import device_kind, pick_device
from shapeserve.errors import ShapeServeError
from shapeserve.evaluate.choice import SAMPLED, choose, traffic
from shapeserve.evaluate.latency import FirstCall, Latency
from shapeserve.evaluate.module import ModuleBench, recompiles_total, said
from shapeserve.evaluate.profile import wake_profiler
from shapeserve.evaluate.reference import Case, Reference
from shapeserve.evaluate.result import (
    Arm,
    CompileCost,
    Environment,
    Evaluation,
    Row,
    Scope,
    Start,
)
from shapeserve.evaluate.start import StartLog, first_compile_s
from shapeserve.evaluate.timing import Timing, graph_break_s, time_calls, timed
from shapeserve.expect import expect
from shapeserve.metrics import Metrics, Mode, Tier
from shapeserve.traces import Shapes
from shapeserve.warmup import WarmupProgress

log = logging.getLogger("shapeserve.evaluate")

# Inductor counts bytes only if this logger would say so; nothing is printed by it.
_BYTES_LOGGER = "torch._inductor.compile_fx.__inductor_metrics"

_ARM_OF = {Mode.GRAPH: Arm.CAPTURED, Mode.SPECIALIZED: Arm.SPECIALIZED, Mode.COMPILED: Arm.COMPILED}

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

    def run(self) -> Evaluation:
        wake_profiler()
        once_s = 0.0
        if not self._is_eager:
            self._report(0, 0, "loading torch's compiler")
            backend = self._config.compile.backend
            once_s = first_compile_s(backend, pick_device(self._config.device))
        engine, start = self._engine(self._config, once_s)
        with engine:
            buckets = choose(engine.grid, self._options.grid)
            # The cases; module and request of each; the other engine and its requests.
            self._total = 1 + len(buckets) * (3 if self._is_eager else 4)
            self._step("answers of the reference")
            reference, cases = engine.on_device(partial(self._cases, engine, buckets))
            rows = [*self._module_rows(engine, start, reference, cases)]
            rows += [self._request(engine, start, reference, case) for case in cases]
            found = self._describe(engine, start, buckets)
        if not self._is_eager:
            eager_start, more = self._eager_requests(reference, cases)
            found, rows = replace(found, eager_start=eager_start), rows + more
        order = {label: i for i, label in enumerate(found.buckets)}
        rows.sort(key=lambda r: (order[r.bucket], [*Scope].index(r.scope), [*Arm].index(r.arm)))
        # Last, because its own graph breaks are no model's.
        return replace(found, rows=tuple(rows), graph_break_s=_graph_break_s())

    @property
    def _is_eager(self) -> bool:
        return self._config.compile.tier == "eager"

    def _step(self, what: str) -> None:
        self._report(self._done, self._total, what)
        self._done += 1

    def _engine(self, config: ModelConfig, once_s: float = 0.0) -> tuple[Engine, Start]:
        metrics = Metrics()
        cpu = device_kind(config.device) == "cpu"
        log = StartLog(metrics, partial(self._starting, config.compile.tier), mark_kernels=cpu)
        engine = Engine(config, metrics=metrics, on_progress=log).start()
        return engine, log.finish(engine.runner.variants.graph_bytes, once_s)

    def _starting(self, tier: str, step: WarmupProgress) -> None:
        self._report(self._done, self._total, f"start ({tier}): {step.stage} {step.detail}".strip())

    def _cases(self, engine: Engine, buckets: Sequence[Bucket]) -> tuple[Reference, list[Case]]:
        reference = Reference(self._config, engine.spec, engine.runner.device)
        return reference, [reference.case(bucket) for bucket in buckets]

    def _module_rows(
        self, engine: Engine, start: Start, reference: Reference, cases: Sequence[Case]
    ) -> list[Row]:
        timing = self._options.timing
        bench = ModuleBench(engine.runner, engine.metrics, start, reference.probe, timing)
        rows = []
        for case in cases:
            self._step(f"module {case.bucket.label}")
            rows += engine.on_device(partial(bench.measure, case))
        return rows

    def _request(self, engine: Engine, start: Start, reference: Reference, case: Case) -> Row:
        """Time a request whose rows fill the bucket."""
        wanted = _serving_arm(engine)
        self._step(f"request {case.bucket.label} ({wanted})")
        row = Row(case.bucket.label, wanted, Scope.REQUEST, compile=_whole_cost(start))
        try:
            return self._timed_request(row, engine, start, reference, case)
        except Exception as error:  # the user's model: whatever it raises is a result
            return replace(row, error=said(error))

    def _timed_request(
        self, row: Row, engine: Engine, start: Start, reference: Reference, case: Case
    ) -> Row:
        samples = [request.arrays for request in case.rows]
        cpu = torch.device("cpu")  # a result is on the host when it is there
        answers: list[Mapping[str, np.ndarray]] = []
        ran: Counter[tuple[Mode, str]] = Counter()

        def call() -> None:
            results = engine.admit_when_free(engine.prepare(samples))()
            answers[:] = []
            for result in results:
                if isinstance(result, ShapeServeError):
                    raise result
                answers.append(result.outputs)
                ran[result.mode, result.bucket] += 1

        before = recompiles_total(engine.metrics)
        first_s = timed(call, cpu)
        numerics = case.numerics(answers, reference.probe, engine.spec.dtype)
        seconds, failed = time_calls({"request": call}, cpu, self._options.timing)
        for error in failed.values():
            raise error
        start_s = start.once_s + start.seconds
        includes = f"the start of the engine ({start_s:.1f} s) and the first request"
        first = FirstCall(start_s + first_s, includes)
        return replace(
            row,
            latency=Latency(first, tuple(seconds["request"])),
            numerics=numerics,
            recompiles=recompiles_total(engine.metrics) - before,
            note=_where(ran, row),
        )

    def _eager_requests(
        self, reference: Reference, cases: Sequence[Case]
    ) -> tuple[Start | None, list[Row]]:
        """Time the same requests through an engine that compiles nothing."""
        compile_ = self._config.compile.model_copy(update={"tier": "eager"})
        config = self._config.model_copy(update={"compile": compile_})
        try:
            engine, start = self._engine(config)
        except ShapeServeError as error:
            rows = [
                Row(case.bucket.label, Arm.EAGER, Scope.REQUEST, error=said(error))
                for case in cases
            ]
            return None, rows
        with engine:
            return start, [self._request(engine, start, reference, case) for case in cases]

    def _describe(self, engine: Engine, start: Start, buckets: Sequence[Bucket]) -> Evaluation:
        recorded = self._options.recorded
        expected = (
            None if recorded is None else expect(self._config, engine.spec, engine.grid, recorded)
        )
        return Evaluation(
            model=engine.spec.name,
            environment=_environment(engine),
            buckets=tuple(bucket.label for bucket in buckets),
            grid_buckets=len(engine.grid),
            start=start,
            eager_start=start if self._is_eager else None,
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


def _serving_arm(engine: Engine) -> Arm:
    programs = engine.runner.programs
    if programs.tier is Tier.GRAPH:
        return Arm.CAPTURED
    return Arm.COMPILED if programs.compiles else Arm.EAGER


def _whole_cost(start: Start) -> CompileCost | None:
    """What all programs of the engine cost together."""
    costs = [*start.programs.values()]
    if not costs:
        return None
    kernels = [cost.generated_kernels for cost in costs]
    return CompileCost(
        seconds=sum(cost.seconds for cost in costs),
        graphs=sum(cost.graphs for cost in costs),
        graph_breaks=sum(cost.graph_breaks for cost in costs),
        cache_hits=sum(cost.cache_hits for cost in costs),
        cache_misses=sum(cost.cache_misses for cost in costs),
        cache_bypasses=sum(cost.cache_bypasses for cost in costs),
        generated_kernels=sum(k or 0 for k in kernels) or None,
    )


def _where(ran: Counter[tuple[Mode, str]], row: Row) -> str | None:
    """Say where rows ran, if not all of them in the bucket and the way that was meant."""
    if all(_ARM_OF.get(m, Arm.EAGER) is row.arm and b == row.bucket for m, b in ran):
        return None
    whole = ran.total()
    parts = (f"{n / whole:.0%} in {bucket} ({mode})" for (mode, bucket), n in ran.most_common())
    return f"rows ran {', '.join(parts)}"


def _environment(engine: Engine) -> Environment:
    device = engine.runner.device
    cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if cuda else f"cpu ({_processor()})",
        threads=engine.on_device(torch.get_num_threads),
        dtype=engine.spec.dtype,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "shapeserve": __version__,
        },
    )


def _processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1] for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].strip() if names else platform.machine()
