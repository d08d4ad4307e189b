"""Which module of a model serves, in which layout: loaded, joined, and not compiled yet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from shapeserve.buckets import BATCH, TOKENS, Grid
from shapeserve.compile.islands import make_islands
from shapeserve.config import ModelConfig, Policy
from shapeserve.errors import ConfigError, ModelError
from shapeserve.lanes import largest_area
from shapeserve.layout import (
    Layout,
    PackedLayout,
    PaddedLayout,
    RaggedLayout,
    max_rows,
    takes_tokens,
)
from shapeserve.models import load
from shapeserve.models.fuse import FusionReport, fuse_verified
from shapeserve.models.spec import LoadedModel, ModelSpec
from shapeserve.ops import linear_gelu
from shapeserve.policy import Device, grid_for, packed_grid
from shapeserve.warmup import TOLERANCE, Probe, WarmupProgress, compile_sizes, self_test

log = logging.getLogger("shapeserve.engine")

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model before its first compile.

    Attributes:
        model: spec, modules and tokenizer.
        module: the one that serves.
        probe: makes rows for it.
        grid: its buckets.
        layout: their buffers.
        device: where it runs.
    """

    model: LoadedModel
    module: nn.Module
    probe: Probe
    grid: Grid
    layout: Layout
    device: torch.device


def prepare(config: ModelConfig, report: Callable[[WarmupProgress], None]) -> Prepared:
    """Load a model, join its layers, set its eager islands, and choose layout and module.

    Raises:
        ConfigError: the policy does not fit the model, the device is not there, or there is no
            such island.
        ModelError: it cannot be loaded, or padding changes its answers.
    """
    device = pick_device(config.device)
    report(WarmupProgress("load"))
    model = load(config, device)
    probe = Probe(model.spec, model.module, device)
    if _fuses(config, device):
        report(WarmupProgress("fuse"))
        fuse_layers(model, probe, device)
    make_islands(model.inner, config.compile.eager_islands)
    packed = choose_packed(model, config, probe, device, report)
    grid = make_grid(model.spec, config, config.policy, device, packed=packed)
    layout = make_layout(model.spec, config, grid, device)
    module = model.packed if packed else choose_padded(model, grid, layout, probe, report)
    return Prepared(model, module or model.module, probe, grid, layout, device)


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
    inputs = probe.inputs(probe.small())
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
    if not config.packs(kind_of(device)) or model.spec.task == "classify":
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
        device=kind_of(device),
        max_batch_tokens=config.limits.max_batch_tokens,
        max_sizes=spec.max_length,
        hard_limits=spec.hard_limit,
        min_sizes=spec.min_length,
    )


def kind_of(device: torch.device) -> Device:
    """The kind of a device, as policies know it."""
    return "cuda" if device.type == "cuda" else "cpu"


def make_layout(spec: ModelSpec, config: ModelConfig, grid: Grid, device: torch.device) -> Layout:
    """Return the buffers of a grid: packed, padded on the device, or padded on the host."""
    capacity = _capacity(spec, config, grid)
    if BATCH not in grid.axes:
        return PackedLayout(spec, capacity, max_rows(capacity), device)
    if device.type == "cuda" and takes_tokens(spec):
        return RaggedLayout(spec, capacity, max(grid.max_size(BATCH), 2), device)
    return PaddedLayout(spec, capacity, device)


def _capacity(spec: ModelSpec, config: ModelConfig, grid: Grid) -> int:
    """Elements of the largest area that may run, the one of the compile included."""
    area = largest_area(spec, config.limits.max_batch_tokens, grid)
    return max(area, prod(compile_sizes(spec, grid).values()))
