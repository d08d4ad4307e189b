"""Assembles what an engine runs: model, programs, grid, variants, buffers, dispatcher."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from shapeserve import __version__
from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid
from shapeserve.compile.cache import ensure_cache_dir
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.variants import Programs, VariantSet
from shapeserve.config import ModelConfig, Policy
from shapeserve.dispatch import Dispatcher
from shapeserve.errors import ConfigError, ModelError
from shapeserve.layout import (
    Layout,
    PackedLayout,
    PaddedLayout,
    RaggedLayout,
    max_rows,
    takes_tokens,
)
from shapeserve.metrics import CompilePhase, Metrics, Mode, Tier
from shapeserve.models import load
from shapeserve.models.fuse import FusionReport, fuse_verified
from shapeserve.models.spec import LoadedModel, ModelSpec
from shapeserve.ops import linear_gelu
from shapeserve.policy import Device, grid_for, packed_grid
from shapeserve.runner import ModelRunner
from shapeserve.warmup import (
    TOLERANCE,
    Probe,
    WarmupContext,
    WarmupProgress,
    build_programs,
    compile_sizes,
    publish_variants,
    self_test,
    warm_up,
)

if TYPE_CHECKING:  # needs the extra ``hf``, which a service of other models may lack
    from shapeserve.models.tokenizer import TextTokenizer

log = logging.getLogger("shapeserve.engine")

_CPU = torch.device("cpu")
_FUSE_SIZE = 16  # of the row that compares joined layers with the original; arbitrary


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
    probe = Probe(model.spec, model.module, device)
    monitor = CompileMonitor(metrics, model.spec.name)
    ensure_cache_dir()
    if _fuses(config, device):
        report(WarmupProgress("fuse"))
        fuse_layers(model, probe, device)
    packed = choose_packed(model, config, probe, device, report)
    grid = make_grid(model.spec, config, config.policy, device, packed=packed)
    layout = make_layout(model.spec, config, grid, device)
    module = model.packed if packed else choose_padded(model, grid, layout, probe, report)
    programs = make_programs(module or model.module, config, device, monitor)
    _preset(metrics, model.spec, grid, programs, device)
    for step in build_programs(programs, model.spec, grid, layout, probe, monitor):
        report(step)
    if BATCH in grid.axes and programs.min_batch > 1:
        # One row has no program of its own: it runs in a batch of two, and the grid says so.
        grid = _without_single(grid)
        _preset(metrics, model.spec, grid, programs, device)
    runner = _runner(model.spec, config, grid, programs, layout, monitor, metrics, device)
    phase, strict = CompilePhase.WARMUP, config.compile.strict
    for step in warm_up(WarmupContext(runner, probe, monitor, metrics, phase, strict)):
        metrics.warmup_ratio.labels(model=model.spec.name).set(step.done / max(step.total, 1))
        report(step)
    publish_variants(runner, metrics)
    metrics.set_grid_version(model.spec.name, grid.version)
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
        grid = _without_single(grid)
    make_dispatcher(built.model, config, grid)
    _preset(metrics, built.spec, grid, programs, device)
    layout = make_layout(built.spec, config, grid, device)
    return _runner(built.spec, config, grid, programs, layout, built.monitor, metrics, device)


def pick_device(wanted: str) -> torch.device:
    """Return the device that the config asks for; ConfigError if it is not there."""
    kind = device_kind(wanted)
    if wanted == "cuda" and kind != "cuda":
        raise ConfigError("device: cuda asked for, but torch sees no GPU; use device: auto or cpu")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else _CPU


def device_kind(wanted: str) -> Device:
    """Return where a model with this ``device`` runs; ``cpu`` if there is no GPU."""
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def _fuses(config: ModelConfig, device: torch.device) -> bool:
    wanted = config.compile.fuse_layers
    automatic = device.type == "cuda" and config.path is not None
    return wanted == "on" or (wanted == "auto" and automatic)


def fuse_layers(model: LoadedModel, probe: Probe, device: torch.device) -> FusionReport:
    """Join layers of the loaded model, in place, if its answers stay the same; log what was done.

    The packed module has the same layers, so it changes with it.
    """
    spec = model.spec
    sizes = {
        axis: max(min(_FUSE_SIZE, end), spec.min_length.get(axis, 1))
        for axis, end in spec.max_length.items()
    }
    row = probe.row(sizes)
    inputs = probe.inputs(row)
    report = fuse_verified(
        model.module,
        lambda: model.module(*inputs),
        TOLERANCE[spec.dtype],
        # Elsewhere the operator is two kernels, which the compiler fuses better by itself.
        gelu=linear_gelu if device.type == "cuda" and spec.dtype == "bfloat16" else None,
    )
    if report.active:
        log.info(
            "%s: %d products of joined layers and %d GELUs within theirs (error %.1e)",
            spec.name,
            len(report.projections),
            len(report.gelus),
            report.error,
        )
    for skipped in report.skipped:
        log.info("%s: left alone %s: %s", spec.name, ", ".join(skipped.layers), skipped.reason)
    return report


def choose_packed(
    model: LoadedModel,
    config: ModelConfig,
    probe: Probe,
    device: torch.device,
    report: Callable[[WarmupProgress], None],
) -> bool:
    """Decide whether rows are packed: where the config wants it, and the model's answers agree.

    Raises:
        ModelError: ``layout: packed``, and the model cannot.
    """
    if not config.packs(_kind(device)):
        return False
    try:
        if model.packed is None:
            raise ModelError(
                f"{model.spec.name} cannot take packed rows: only text encoders that are told "
                "positions, with full bidirectional attention, can; use `layout: padded`"
            )
        report(WarmupProgress("self-test", detail="packed rows"))
        grid = make_grid(model.spec, config, config.policy, device, packed=True)
        self_test(
            model.packed, model.spec, grid, make_layout(model.spec, config, grid, device), probe
        )
    except ModelError as error:
        if config.layout == "packed" or TOKENS in config.policy:
            raise
        log.warning("rows are padded, because they cannot be packed: %s", error)
        return False
    return True


def choose_padded(
    model: LoadedModel,
    grid: Grid,
    layout: Layout,
    probe: Probe,
    report: Callable[[WarmupProgress], None],
) -> nn.Module:
    """Return the module for padded rows: the one with bounds where its answers are right.

    Raises:
        ModelError: padding changes the answers of the model itself.
    """
    if model.spec.padding_invariant is False:
        return model.module
    report(WarmupProgress("self-test", 0, len(grid.buckets)))
    if model.bounded is not None:
        try:
            self_test(model.bounded, model.spec, grid, layout, probe)
        except ModelError as error:
            log.warning("the attention keeps its mask: %s", error)
        else:
            return model.bounded
    self_test(model.module, model.spec, grid, layout, probe)
    return model.module


def make_grid(
    spec: ModelSpec, config: ModelConfig, policy: Policy, device: torch.device, *, packed: bool
) -> Grid:
    """Return the grid that ``policy`` makes for the model, within its limits."""
    if packed:
        return packed_grid(policy, config.limits.max_batch_tokens, spec.max_length)
    return grid_for(
        spec.axes,
        policy,
        device=_kind(device),
        max_batch_tokens=config.limits.max_batch_tokens,
        max_sizes=spec.max_length,
        hard_limits=spec.hard_limit,
        min_sizes=spec.min_length,
    )


def _kind(device: torch.device) -> Device:
    return "cuda" if device.type == "cuda" else "cpu"


def make_layout(spec: ModelSpec, config: ModelConfig, grid: Grid, device: torch.device) -> Layout:
    """Return the buffers of a grid: packed, padded on the device, or padded on the host."""
    capacity = _capacity(spec, config, grid)
    if BATCH not in grid.axes:
        return PackedLayout(spec, capacity, max_rows(capacity), device)
    if device.type == "cuda" and takes_tokens(spec):
        return RaggedLayout(spec, capacity, max(grid.max_size(BATCH), 2), device)
    return PaddedLayout(spec, capacity, device)


def make_programs(
    module: nn.Module, config: ModelConfig, device: torch.device, monitor: CompileMonitor
) -> Programs:
    """Return the callables of the module, nothing compiled yet."""
    return Programs(
        module,
        tier=_tier(config, device),
        compiles=config.compile.tier not in ("eager", "eager_graph"),
        freeze=config.compile.freeze == "on"
        or (config.compile.freeze == "auto" and device.type == "cpu"),
        backend=config.compile.backend,
        monitor=monitor,
    )


def make_dispatcher(model: LoadedModel, config: ModelConfig, grid: Grid) -> Dispatcher:
    """Return the dispatcher of a grid, with the model's hard limits and special tokens.

    Packed rows are not padded, so that their lengths have one step: the end of the grid.
    """
    spec = model.spec
    overhead = {"seq": model.tokenizer.special_tokens} if model.tokenizer else None
    if BATCH not in grid.axes:
        (axis,) = spec.row_axes
        grid = Grid((axis,), [Bucket(((axis, spec.max_length[axis]),))])
    return Dispatcher(
        grid,
        config.rare_shapes,
        spec.hard_limit,
        piece_overhead=overhead,
        padding_invariant=spec.padding_invariant is not False,
    )


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


def _capacity(spec: ModelSpec, config: ModelConfig, grid: Grid) -> int:
    """Elements of the largest area that may run: a bucket, or the longest row in the fallback."""
    longest = prod(max(size, 1) for size in spec.hard_limit.values())
    ends = prod(max(spec.hard_limit.get(a, 0), spec.max_length.get(a, 0)) for a in spec.row_axes)
    return max(
        config.limits.max_batch_tokens,
        max(bucket.area for bucket in grid.buckets),
        # One row without a program of its own is padded to two.
        2 * max(longest, ends),
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
    metrics: Metrics, spec: ModelSpec, grid: Grid, programs: Programs, device: torch.device
) -> None:
    modes = {Mode.EAGER, Mode.FALLBACK, Mode(programs.tier.value)}
    if programs.compiles:
        modes.add(Mode.COMPILED)
    metrics.preset(
        spec.name,
        [bucket.label for bucket in grid.buckets],
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
