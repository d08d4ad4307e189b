"""Assembles what an engine runs: model, programs, grid, variants, buffers, dispatcher."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shapeserve import __version__
from shapeserve.buckets import BATCH, Grid
from shapeserve.compile.cache import ensure_cache_dir
from shapeserve.compile.decompose import load_decompositions
from shapeserve.compile.islands import island_waits
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.variants import Programs, VariantSet
from shapeserve.config import ModelConfig, Policy, predicted_waste
from shapeserve.dispatch import Dispatcher
from shapeserve.engine.modules import Prepared, make_grid, make_layout, prepare
from shapeserve.errors import ConfigError, ModelError
from shapeserve.lanes import dispatcher_for, without_single
from shapeserve.layout import Layout
from shapeserve.metrics import CompilePhase, Metrics, Mode, Tier
from shapeserve.models.spec import LoadedModel, ModelSpec
from shapeserve.runner import ModelRunner
from shapeserve.warmup import (
    Probe,
    WarmupContext,
    WarmupProgress,
    build_programs,
    publish_variants,
    warm_up,
)

if TYPE_CHECKING:  # needs the extra ``hf``, which a service of other models may lack
    from shapeserve.models.tokenizer import TextTokenizer

log = logging.getLogger("shapeserve.engine")


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded and warm model.

    Attributes:
        model: spec, module and tokenizer.
        config: what it was built from.
        programs: its compiled callables, shared by all grids.
        probe: makes rows for verify passes.
        monitor: counts its compiles.
        runner: the grid that serves.
        dispatcher: routes rows for that grid.
    """

    model: LoadedModel
    config: ModelConfig
    programs: Programs
    probe: Probe
    monitor: CompileMonitor
    runner: ModelRunner
    dispatcher: Dispatcher

    @property
    def spec(self) -> ModelSpec:
        """The model's tensors and limits."""
        return self.model.spec

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """Of a text model."""
        return self.model.tokenizer

    def with_runner(self, runner: ModelRunner) -> Built:
        """The same model on another grid."""
        dispatcher = make_dispatcher(self.model, self.config, runner.grid)
        return replace(self, runner=runner, dispatcher=dispatcher)


def build(config: ModelConfig, metrics: Metrics, report: Callable[[WarmupProgress], None]) -> Built:
    """Load, self-test, compile and warm a model. Runs on the device thread.

    Raises:
        ConfigError: the policy does not fit the model, or the device is not there.
        ModelError: see :func:`shapeserve.warmup.warm_up`.
    """
    ensure_cache_dir()
    prepared = prepare(config, report)
    model, probe, grid = prepared.model, prepared.probe, prepared.grid
    layout, device = prepared.layout, prepared.device
    monitor = CompileMonitor(metrics, model.spec.name)
    programs = make_programs(prepared, config, monitor)
    _preset(metrics, model.spec, grid, programs, device, of_buckets=False)
    for step in build_programs(programs, model.spec, grid, layout, probe, monitor):
        report(step)
    if BATCH in grid.axes and programs.min_batch > 1:
        # One row has no program of its own: it runs in a batch of two, and the grid says so.
        grid = without_single(grid)
    _preset(metrics, model.spec, grid, programs, device)
    runner = _runner(model.spec, config, grid, programs, layout, monitor, metrics, device)
    phase, strict = CompilePhase.WARMUP, config.compile.strict
    for step in warm_up(WarmupContext(runner, probe, monitor, metrics, phase, strict)):
        metrics.warmup_ratio.labels(model=model.spec.name).set(step.done / max(step.total, 1))
        report(step)
    publish_variants(runner, metrics)
    metrics.set_grid_version(model.spec.name, grid.version)
    metrics.set_predicted_waste(model.spec.name, predicted_waste(config.policy))
    dispatcher = make_dispatcher(model, config, grid)
    return Built(model, config, programs, probe, monitor, runner, dispatcher)


def new_runner(built: Built, config: ModelConfig, policy: Policy, metrics: Metrics) -> ModelRunner:
    """Make a cold runner for another policy of a built model. Runs on the device thread.

    Raises:
        ConfigError: the policy does not fit the model.
    """
    device, programs = built.runner.device, built.programs
    packed = BATCH not in built.runner.grid.axes
    grid = make_grid(built.spec, config, policy, device, packed=packed)
    if not packed and programs.min_batch > 1:
        grid = without_single(grid)
    make_dispatcher(built.model, config, grid)
    _preset(metrics, built.spec, grid, programs, device)
    layout = make_layout(built.spec, config, grid, device)
    return _runner(built.spec, config, grid, programs, layout, built.monitor, metrics, device)


def make_programs(prepared: Prepared, config: ModelConfig, monitor: CompileMonitor) -> Programs:
    """Return the callables of the module, nothing compiled yet."""
    settings, device = config.compile, prepared.device
    return Programs(
        prepared.module,
        tier=_capturable(_tier(config, device), prepared, config),
        compiles=settings.tier not in ("eager", "eager_graph"),
        freeze=settings.freeze == "on" or (settings.freeze == "auto" and device.type == "cpu"),
        backend=settings.backend,
        monitor=monitor,
        one_graph=not settings.eager_islands,
        decompositions=load_decompositions(settings.decompositions),
    )


def _capturable(tier: Tier, prepared: Prepared, config: ModelConfig) -> Tier:
    """Lower ``graph`` to ``compiled`` where an eager island waits for the device.

    Raises:
        ModelError: the same, under ``compile.strict``.
    """
    islands, model = config.compile.eager_islands, prepared.model
    if tier is not Tier.GRAPH or not islands:
        return tier
    inputs = prepared.probe.inputs(prepared.probe.small())
    waits = island_waits(model.inner, islands, lambda: model.module(*inputs))
    if not waits:
        return tier
    found = ", ".join(f"{wait.op} at {wait.place or 'an unknown place'}" for wait in waits)
    why = f"{model.spec.name} cannot be captured, because an eager island waits for the device: "
    if config.compile.strict or config.compile.tier == "eager_graph":
        raise ModelError(f"{why}{found}; use `compile.tier: compiled`")
    log.warning("%s%s; it is served compiled", why, found)
    return Tier.COMPILED


def make_dispatcher(model: LoadedModel, config: ModelConfig, grid: Grid) -> Dispatcher:
    """Return the dispatcher of a grid; see :func:`shapeserve.lanes.dispatcher_for`."""
    special_tokens = model.tokenizer.special_tokens if model.tokenizer else None
    return dispatcher_for(model.spec, config.rare_shapes, grid, special_tokens)


def _runner(
    spec: ModelSpec,
    config: ModelConfig,
    grid: Grid,
    programs: Programs,
    layout: Layout,
    monitor: CompileMonitor,
    metrics: Metrics,
    device: torch.device,
) -> ModelRunner:
    budget = graph_budget(config, device)
    variants = VariantSet(grid, programs, layout, device, graph_bytes=budget)
    return ModelRunner(spec, variants, programs, layout, monitor, metrics, device)


def graph_budget(config: ModelConfig, device: torch.device) -> int | None:
    """Return the bytes that captures may reserve; None on the CPU, which has none."""
    if device.type != "cuda":
        return None
    whole = torch.cuda.get_device_properties(device).total_memory
    return int(whole * config.compile.graph_memory_fraction)


def _tier(config: ModelConfig, device: torch.device) -> Tier:
    if config.compile.tier == "auto":
        return Tier.GRAPH if device.type == "cuda" else Tier.COMPILED
    asked = config.compile.tier
    tier = Tier.GRAPH if asked == "eager_graph" else Tier(asked)
    if tier is Tier.GRAPH and device.type != "cuda":
        raise ConfigError(
            f"compile.tier: {asked} needs CUDA, the device is cpu; use auto or compiled"
        )
    return tier


def _preset(
    metrics: Metrics,
    spec: ModelSpec,
    grid: Grid,
    programs: Programs,
    device: torch.device,
    *,
    of_buckets: bool = True,
) -> None:
    """Make the series; those of buckets once it is known which ones serve."""
    modes = {Mode.EAGER, Mode.FALLBACK, Mode(programs.tier.value)}
    if programs.compiles:
        modes.add(Mode.COMPILED)
    metrics.preset(
        spec.name,
        [bucket.label for bucket in grid.buckets] if of_buckets else [],
        grid.axes,
        row_axes=spec.row_axes,
        max_sizes=spec.hard_limit,
        modes=sorted(modes),
    )
    metrics.build_info.labels(
        version=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    ).set(1)
