"""Chooses which layers of a loaded model to rewrite, does it, and checks it against the original.

Layers are chosen by what one trial forward did with them, not by the names of architectures.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from shapeserve.models.fuse.layers import LinearGelu, absorb, join, restore
from shapeserve.models.fuse.watch import GeluCall, LinearCall, Observation, observe, tensors_of

log = logging.getLogger("shapeserve.models")

Trial = Callable[[], object]
"""Runs the module once, on small inputs; returns its tensors, nested in tuples, lists or dicts."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True)
class Skipped:
    """Layers that looked like something to fuse, and why they were left alone."""

    layers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FusionReport:
    """What was done to a module; layers go by their names in it.

    Attributes:
        projections: linear layers that are one product now, a tuple for each product.
        gelus: (linear layer, GELU that is computed with it).
        skipped: what was left alone.
        error: norm-wise relative error of the worst output against the original; None if not
            measured, or if nothing was fused.
        undone: why everything was restored; None if it was not. ``projections`` and ``gelus`` then
            say what had been tried.
    """

    projections: tuple[tuple[str, ...], ...] = ()
    gelus: tuple[tuple[str, str], ...] = ()
    skipped: tuple[Skipped, ...] = ()
    error: float | None = None
    undone: str | None = None

    @property
    def active(self) -> bool:
        """Whether the module runs differently than before."""
        return bool(self.projections or self.gelus) and self.undone is None


def fuse(
    module: nn.Module,
    trial: Trial,
    *,
    projections: bool = True,
    gelu: LinearGelu | None = None,
) -> FusionReport:
    """Rewrite the linear layers of ``module`` that can share or extend a product.

    Runs ``trial`` once. Call it on a module in eval mode, frozen and on its device, before it is
    compiled or captured. Later changes of weights in place are seen; moving or converting the
    module keeps the answers but copies joined weights, and weights that are replaced (such as by
    ``load_state_dict(assign=True)``) are not seen. Fused GELUs need one forward at a time, which
    they check. :func:`unfuse` takes everything back.

    Layers are joined if the trial called each once, one after the other and with the very same
    tensor. A GELU joins the layer before it if it got that layer's output and nothing else did.

    Args:
        module: what to rewrite, in place.
        trial: runs ``module`` once.
        projections: whether to join layers with the same input.
        gelu: computes a linear layer and a GELU at once; None leaves GELUs alone.

    Raises:
        Exception: what ``trial`` raises, or torch when memory runs out; nothing is changed then.
    """
    seen = observe(module, trial)
    plan = _Plan(module, seen)
    if projections:
        plan.join_siblings()
    if gelu is not None:
        plan.absorb_gelus()
    try:
        # Normal tensors, also where the caller runs the model under inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            for group in plan.groups:
                join(group)
            for activation, linears in plan.gelus:
                if gelu is not None:
                    absorb(linears, activation, gelu)
    except BaseException:
        unfuse(module)
        raise
    return plan.report()


def unfuse(module: nn.Module) -> int:
    """Restore every layer that :func:`fuse` rewrote; return how many there were."""
    with torch.inference_mode(False), torch.no_grad():
        return sum(restore(layer) for layer in list(module.modules()))


def fuse_verified(
    module: nn.Module,
    trial: Trial,
    tolerance: float,
    *,
    projections: bool = True,
    gelu: LinearGelu | None = None,
) -> FusionReport:
    """Do :func:`fuse` and keep it only if ``trial`` still returns the same.

    Runs ``trial`` three times: before, watched, and after.

    Args:
        module: what to rewrite, in place.
        trial: runs ``module`` once; equal inputs every time.
        tolerance: largest norm-wise relative error of an output that is kept, in (0, 1). Outputs
            that are not floating must be equal.
        projections: see :func:`fuse`.
        gelu: see :func:`fuse`.

    Returns:
        The report; ``undone`` says why if the original was restored.

    Raises:
        Exception: what ``trial`` raises on the untouched module. Later ones end up in ``undone``.
    """
    before = _outputs(trial)
    report = FusionReport()
    try:
        report = fuse(module, trial, projections=projections, gelu=gelu)
        if not report.active:
            return report
        error = _relative_error(_outputs(trial), before)
        report = dataclasses.replace(report, error=error)
        if not before:
            undone = "the trial returned no tensors to compare"
        elif error <= tolerance:
            return report
        else:
            undone = f"outputs differ by {error:.2g} from the original, tolerance {tolerance:g}"
    except Exception as error:  # a model's own code: whatever it raises, the original still runs
        undone = f"{type(error).__name__}: {error}"
    unfuse(module)
    log.warning("layers are left as they were: %s", undone)
    return dataclasses.replace(report, undone=undone)


def _outputs(trial: Trial) -> list[Tensor]:
    """Copies, because a trial may return buffers that the next one overwrites."""
    with torch.no_grad():
        return [tensor.detach().clone() for tensor in tensors_of(trial())]


def _relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm-wise, of the worst output; infinite if one is not finite or of another kind."""
    if len(got) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if not a.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(a, b) else float("inf"))
            continue
        wide = b.double()
        gap = (a.double() - wide).norm()
        error = float(gap / wide.norm().clamp_min(1e-12))
        worst = max(worst, error if bool(gap.isfinite()) else float("inf"))
    return worst


class _Plan:
    """Decides from an observation what to rewrite; changes nothing."""

    def __init__(self, module: nn.Module, seen: Observation) -> None:
        self._seen = seen
        self._names = {layer: name for name, layer in module.named_modules()}
        self._calls = Counter(call.layer for call in seen.linears)
        # A parameter that two modules hold is tied: it must stay one tensor of one place.
        self._holders = Counter(
            id(parameter) for layer in self._names for parameter in layer.parameters(recurse=False)
        )
        self.groups: list[list[nn.Linear]] = []
        self.gelus: list[tuple[nn.Module, list[nn.Linear]]] = []
        self._skipped: list[Skipped] = []

    def report(self) -> FusionReport:
        """Name what was planned."""
        name = self._names
        return FusionReport(
            projections=tuple(tuple(name[layer] for layer in group) for group in self.groups),
            gelus=tuple((name[lin], name[act]) for act, linears in self.gelus for lin in linears),
            # A layer called ten times is skipped once.
            skipped=tuple(dict.fromkeys(self._skipped)),
        )

    def join_siblings(self) -> None:
        """Plan to join the layers of each run of calls with one input."""
        for calls in _runs(self._seen.linears):
            layers = [call.layer for call in calls]
            reason = self._why_not_joined(calls)
            if reason is None:
                self.groups.append(layers)
            else:
                self._skip(dict.fromkeys(layers), reason)

    def absorb_gelus(self) -> None:
        """Plan to move each GELU into the layers before it."""
        makers = {id(call.output): call.layer for call in self._seen.linears}
        by_layer: dict[nn.Module, list[GeluCall]] = {}
        for call in self._seen.gelus:
            by_layer.setdefault(call.layer, []).append(call)
        for activation, calls in by_layer.items():
            linears = [makers.get(id(call.input)) for call in calls]
            found = [linear for linear in linears if linear is not None]
            reason = (
                self._why_not_absorbed(activation, calls, found)
                if len(found) == len(calls)
                else "its input is not the output of a linear layer"
            )
            if reason is None:
                self.gelus.append((activation, found))
            else:
                self._skip(dict.fromkeys([*found, activation]), reason)

    def _skip(self, layers: Iterable[nn.Module], reason: str) -> None:
        self._skipped.append(Skipped(tuple(self._names[layer] for layer in layers), reason))

    def _why_not_joined(self, calls: list[LinearCall]) -> str | None:
        layers = [call.layer for call in calls]
        for layer in layers:
            if reason := self._why_not_linear(layer):
                return f"{self._names[layer]} {reason}"
        if len({call.version for call in calls}) > 1:
            return "the input is written in place between the calls"
        kinds = {
            (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
            for layer in layers
        }
        return "they differ in width, dtype, device or bias" if len(kinds) > 1 else None

    def _why_not_absorbed(
        self, activation: nn.Module, calls: list[GeluCall], linears: list[nn.Linear]
    ) -> str | None:
        if reason := _why_patched(activation):
            return f"{self._names[activation]} {reason}"
        joined = {layer for group in self.groups for layer in group}
        for call, linear in zip(calls, linears, strict=True):
            name = self._names[linear]
            if reason := self._why_not_linear(linear):
                return f"{name} {reason}"
            bias: Tensor | None = linear.bias
            if bias is None:
                return f"{name} has no bias"
            if linear in joined:
                return f"{name} shares a product with other layers"
            if self._seen.uses[id(call.input)] != 1:
                return f"the output of {name} is used elsewhere too"
            if not _is_exact_gelu(activation, call.input):
                return f"{self._names[activation]} is not the exact (erf) GELU"
        return None

    def _why_not_linear(self, layer: nn.Linear) -> str | None:
        """What forbids to rewrite ``layer``, as the end of a sentence that begins with its name."""
        if type(layer) is not nn.Linear:
            return f"is a {type(layer).__name__}, not a plain nn.Linear"
        if self._calls[layer] != 1:
            return f"is called {self._calls[layer]} times"
        if reason := _why_patched(layer):
            return reason
        for parameter in layer.parameters(recurse=False):
            # Quantised and distributed weights are subclasses in a plain nn.Linear.
            if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
                return f"has a weight of type {type(parameter).__name__} ({parameter.dtype})"
            if parameter.requires_grad:
                return "is trainable; freeze it with requires_grad_(False)"
            if parameter.is_inference():
                return "has a weight made under inference_mode"
            if self._holders[id(parameter)] > 1:
                return "has a weight that another module holds too"
        return None


def _runs(calls: Sequence[LinearCall]) -> Iterator[list[LinearCall]]:
    """Yield runs of two and more consecutive calls with the same tensor object."""
    run: list[LinearCall] = []
    for call in calls:
        if run and run[-1].input is not call.input:
            if len(run) > 1:
                yield run
            run = []
        run.append(call)
    if len(run) > 1:
        yield run


def _why_patched(layer: nn.Module) -> str | None:
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        return "has a hook"
    return "has a forward of its own" if "forward" in layer.__dict__ else None


def _is_exact_gelu(activation: nn.Module, like: Tensor) -> bool:
    """Whether it computes what torch's GELU does, bit for bit, on this device and in this dtype."""
    # From where the GELU is 0 to where it is the identity.
    probe = torch.linspace(-6, 6, 101, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        answer: object = activation.forward(probe)
        return isinstance(answer, Tensor) and torch.equal(answer, F.gelu(probe))
