"""Assembles what an engine runs: model, programs, grid, variants, buffers, dispatcher."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from shapeserve import __version__
from shapeserve.buckets import BATCH, Bucket, Grid
from shapeserve.compile.cache import ensure_cache_dir
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.variants import Programs, VariantSet
from shapeserve.config import ModelConfig, Policy
from shapeserve.dispatch import Dispatcher
from shapeserve.errors import ConfigError
from shapeserve.layout import PaddedLayout
from shapeserve.metrics import CompilePhase, Metrics, Mode, Tier
from shapeserve.models import load
from shapeserve.models.spec import LoadedModel, ModelSpec
from shapeserve.policy import grid_for
from shapeserve.runner import ModelRunner
from shapeserve.warmup import (
    Probe,
    WarmupContext,
    WarmupProgress,
    build_programs,
    compile_sizes,
    publish_variants,
    warm_up,
)

if TYPE_CHECKING:  # needs the extra ``hf``, which a service of other models may lack
    from shapeserve.models.tokenizer import TextTokenizer


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
    device = pick_device(config.device)
    report(WarmupProgress("load"))
    model = load(config, device)
    spec = model.spec
    grid = make_grid(spec, config, config.policy, device)
    monitor = CompileMonitor(metrics, spec.name)
    ensure_cache_dir()
    programs = Programs(
        model.module,
        tier=_tier(config, device),
        freeze=config.compile.freeze == "on"
        or (config.compile.freeze == "auto" and device.type == "cpu"),
        backend=config.compile.backend,
        on_limit=monitor.count_eager_frame,
    )
    _preset(metrics, spec, grid, programs.tier, device)
    probe = Probe(spec, model.module, device)
    layout = PaddedLayout(spec, _capacity(spec, config, grid), device)
    for step in build_programs(programs, spec, grid, layout, probe, monitor):
        report(step)
    if programs.min_batch > 1:
        # One row has no program of its own: it runs in a batch of two, and the grid says so.
        grid = _without_single(grid)
        _preset(metrics, spec, grid, programs.tier, device)
    runner = ModelRunner(
        spec, VariantSet(grid, programs, device), programs, layout, monitor, metrics
    )
    phase, strict = CompilePhase.WARMUP, config.compile.strict
    for step in warm_up(WarmupContext(runner, probe, monitor, metrics, phase, strict)):
        metrics.warmup_ratio.labels(model=spec.name).set(step.done / max(step.total, 1))
        report(step)
    publish_variants(runner, metrics)
    metrics.set_grid_version(spec.name, grid.version)
    dispatcher = make_dispatcher(model, config, grid)
    return Built(model, config, programs, probe, monitor, runner, dispatcher)


def new_runner(built: Built, config: ModelConfig, policy: Policy, metrics: Metrics) -> ModelRunner:
    """Make a cold runner for another policy of a built model. Runs on the device thread.

    Raises:
        ConfigError: the policy does not fit the model.
    """
    device = pick_device(config.device)
    grid = make_grid(built.spec, config, policy, device)
    if built.programs.min_batch > 1:
        grid = _without_single(grid)
    make_dispatcher(built.model, config, grid)
    _preset(metrics, built.spec, grid, built.programs.tier, device)
    layout = PaddedLayout(built.spec, _capacity(built.spec, config, grid), device)
    variants = VariantSet(grid, built.programs, device)
    return ModelRunner(built.spec, variants, built.programs, layout, built.monitor, metrics)


def pick_device(wanted: str) -> torch.device:
    """Return the device that the config asks for; ConfigError if it is not there."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("device: cuda asked for, but torch sees no GPU; use device: auto or cpu")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if wanted != "cpu" and there
        else (torch.device("cpu"))
    )


def make_grid(spec: ModelSpec, config: ModelConfig, policy: Policy, device: torch.device) -> Grid:
    """Return the grid that ``policy`` makes for the model, within its limits."""
    return grid_for(
        spec.axes,
        policy,
        device="cuda" if device.type == "cuda" else "cpu",
        max_batch_tokens=config.limits.max_batch_tokens,
        max_sizes=spec.max_length,
        hard_limits=spec.hard_limit,
    )


def make_dispatcher(model: LoadedModel, config: ModelConfig, grid: Grid) -> Dispatcher:
    """Return the dispatcher of a grid, with the model's hard limits and special tokens."""
    overhead = {"seq": model.tokenizer.special_tokens} if model.tokenizer else None
    return Dispatcher(
        grid,
        config.rare_shapes,
        model.spec.hard_limit,
        piece_overhead=overhead,
        padding_invariant=model.spec.padding_invariant is not False,
    )


def _tier(config: ModelConfig, device: torch.device) -> Tier:
    if config.compile.tier == "auto":
        return Tier.GRAPH if device.type == "cuda" else Tier.COMPILED
    tier = Tier(config.compile.tier)
    if tier is Tier.GRAPH and device.type != "cuda":
        raise ConfigError("compile.tier: graph needs CUDA, the device is cpu; use auto or compiled")
    return tier


def _capacity(spec: ModelSpec, config: ModelConfig, grid: Grid) -> int:
    """Elements of the largest area that may run: a bucket, or the longest row in the fallback."""
    largest_row: Mapping[str, int] = {
        axis: max(spec.hard_limit.get(axis, 0), grid.max_size(axis)) for axis in grid.row_axes
    }
    return max(
        config.limits.max_batch_tokens,
        max(bucket.area for bucket in grid.buckets),
        # One row without a program of its own is padded to two.
        2 * prod(largest_row.values()),
        prod(compile_sizes(spec, grid).values()),
    )


def _without_single(grid: Grid) -> Grid:
    """Drop the buckets of one row whose row shape has a larger batch; widen the others to two."""
    kept: list[Bucket] = []
    for bucket in grid.buckets:
        if bucket.size(BATCH) > 1:
            kept.append(bucket)
        elif len(grid.batch_sizes(bucket.without(BATCH))) == 1:
            kept.append(Bucket(tuple((a, 2 if a == BATCH else s) for a, s in bucket.sizes)))
    return Grid(grid.axes, kept)


def _preset(
    metrics: Metrics, spec: ModelSpec, grid: Grid, tier: Tier, device: torch.device
) -> None:
    modes = {Mode.EAGER, Mode.FALLBACK, Mode(tier.value), Mode.COMPILED}
    if tier is Tier.EAGER:
        modes.discard(Mode.COMPILED)
    metrics.preset(
        spec.name,
        [bucket.label for bucket in grid.buckets],
        grid.axes,
        max_sizes=spec.hard_limit,
        modes=sorted(modes),
    )
    metrics.build_info.labels(
        version=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    ).set(1)
