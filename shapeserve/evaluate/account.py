"""What the measured numbers of one evaluation add up to: the amortisation section."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shapeserve.amortize import (
    BreakCost,
    Fusion,
    Launches,
    Padding,
    Shape,
    Strategy,
    break_even_calls,
    cheaper_from,
    net_gain_s,
    one_dynamic,
    specialize_all,
    worth_specializing,
)
from shapeserve.evaluate.result import Arm, Evaluation, KernelAccount, Scope

HORIZONS = (1_000, 100_000, 10_000_000)
"""Calls after which the balance is drawn: minutes, hours, weeks of a busy service."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Something that costs seconds once and changes what a call takes.

    Attributes:
        what: it is.
        cost_s: once.
        before_s: a call without it.
        after_s: a call with it.
    """

    what: str
    cost_s: float
    before_s: float
    after_s: float

    @property
    def break_even(self) -> int | None:
        """Calls after which it has paid; None for never."""
        return break_even_calls(self.cost_s, self.before_s, self.after_s)

    def net_s(self, calls: int) -> float:
        """Seconds won after so many calls."""
        return net_gain_s(self.cost_s, self.before_s, self.after_s, calls)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        net = {str(calls): self.net_s(calls) for calls in HORIZONS}
        return {**asdict(self), "break_even_calls": self.break_even, "net_gain_s": net}


@dataclass(frozen=True, slots=True)
class Account:
    """What compiling is worth for a model; a part is empty where its numbers are missing.

    Attributes:
        serving: how the engine runs a bucket.
        compiling: eager against that, over all measured buckets.
        shapes: each specialised bucket against that.
        dynamic: one program for all buckets.
        special: one for each of them.
        fusion: label of a bucket -> launches of a call, eager and served.
        breaks: of a call, and their cost; None where that could not be timed.
        padding: against recompiles; None without recorded rows.
    """

    serving: Arm
    compiling: tuple[Gain, ...]
    shapes: tuple[Shape, ...]
    dynamic: Strategy | None
    special: Strategy | None
    fusion: Mapping[str, Fusion]
    breaks: BreakCost | None
    padding: Padding | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "serving": self.serving.value,
            "compiling": [gain.to_dict() for gain in self.compiling],
            "specializing": [_shape_dict(shape) for shape in self.shapes],
            "strategies": [asdict(s) for s in (self.dynamic, self.special) if s is not None],
            "specialize_all_pays_from_calls": self.specialize_all_from,
            "worth_specializing": {
                str(calls): [shape.name for shape in self.worth(calls)] for calls in HORIZONS
            },
            "fusion": {label: _fusion_dict(fusion) for label, fusion in self.fusion.items()},
            "graph_breaks": _breaks_dict(self.breaks) if self.breaks else None,
            "padding": _padding_dict(self.padding) if self.padding else None,
        }

    @property
    def specialize_all_from(self) -> int | None:
        """Calls of the mix from which a program for each bucket is the cheaper way."""
        if self.dynamic is None or self.special is None:
            return None
        return cheaper_from(self.dynamic, self.special)

    def worth(self, calls: int) -> list[Shape]:
        """The buckets that are worth specialising within so many calls of the mix."""
        return worth_specializing(self.shapes, calls) if self.shapes else []


def account(found: Evaluation) -> Account:
    """Add up what was measured."""
    serving = _serving(found)
    shapes = _shapes(found, serving)
    programs = found.start.programs
    once_s = found.start.once_s if programs else 0.0
    cold_s = sum(cost.seconds for cost in programs.values())
    cold_s += sum(found.start.capture_s.values())
    return Account(
        serving=serving,
        compiling=tuple(_compiling(found, serving, once_s + cold_s)),
        shapes=shapes,
        dynamic=one_dynamic(shapes, cold_s) if shapes else None,
        special=specialize_all(shapes) if shapes else None,
        fusion=_fusions(found, serving),
        breaks=_breaks(found, serving),
        padding=_padding(found, serving, shapes, cold_s),
    )


def _serving(found: Evaluation) -> Arm:
    """The best way that ran at all: where no bucket could be captured, compiled serves."""
    ran = {row.arm for row in found.rows if row.latency is not None}
    return next((arm for arm in (Arm.CAPTURED, Arm.COMPILED) if arm in ran), Arm.EAGER)


def _compiling(found: Evaluation, serving: Arm, cold_s: float) -> Iterable[Gain]:
    """Compare the module alone, then whole requests."""
    if serving is Arm.EAGER:
        return
    module = _means(found, Scope.MODULE, serving)
    if module is not None:
        what = "compile and capture" if serving is Arm.CAPTURED else "compile"
        yield Gain(f"{what}: a call of the module", cold_s, *module)
    request = _means(found, Scope.REQUEST, serving)
    if request is not None and found.eager_start is not None:
        extra_s = max(found.start.once_s + found.start.seconds - found.eager_start.seconds, 0.0)
        yield Gain("a longer start: a request", extra_s, *request)


def _means(found: Evaluation, scope: Scope, serving: Arm) -> tuple[float, float] | None:
    """Seconds of an average call, eager and served, over the buckets that have both."""
    before = after = whole = 0.0
    for label in found.buckets:
        eager = found.latency(label, Arm.EAGER, scope)
        served = found.latency(label, serving, scope)
        if eager is None or served is None:
            continue
        share = found.traffic.shares[label]
        whole += share
        before += share * eager.median_s
        after += share * served.median_s
    return (before / whole, after / whole) if whole else None


def _shapes(found: Evaluation, serving: Arm) -> tuple[Shape, ...]:
    """The buckets that were specialised; none if no traffic is expected in any of them."""
    shapes = []
    for label in found.buckets:
        special = found.latency(label, Arm.SPECIALIZED, Scope.MODULE)
        dynamic = found.latency(label, serving, Scope.MODULE)
        if special is not None and dynamic is not None:
            share = found.traffic.shares[label]
            shapes.append(
                Shape(label, share, special.first.seconds, special.median_s, dynamic.median_s)
            )
    return tuple(shapes) if any(shape.share for shape in shapes) else ()


def _fusions(found: Evaluation, serving: Arm) -> dict[str, Fusion]:
    fusions = {}
    for label in found.buckets:
        eager = _launches(found, label, Arm.EAGER)
        served = _launches(found, label, serving)
        if serving is not Arm.EAGER and eager is not None and served is not None:
            fusions[label] = Fusion(eager, served)
    return fusions


def _kernels(found: Evaluation, label: str, arm: Arm) -> KernelAccount | None:
    row = found.row(label, arm, Scope.MODULE)
    return row.kernels if row else None


def _launches(found: Evaluation, label: str, arm: Arm) -> Launches | None:
    """Kernels of a call, the time in which they run, and the rest of the call.

    On a GPU the profiler slows the launches (twice as long was seen) and not the kernels, so there
    the rest is that of the calls that were timed without it.
    """
    kernels, latency = _kernels(found, label, arm), found.latency(label, arm, Scope.MODULE)
    if kernels is None:
        return None
    launch_s = kernels.launch_s
    if kernels.platform == "cuda" and latency is not None and kernels.kernels:
        launch_s = max(latency.median_s - kernels.busy_s, 0.0) / kernels.kernels
    return Launches(kernels.kernels, kernels.busy_s, launch_s)


def _breaks(found: Evaluation, serving: Arm) -> BreakCost | None:
    """Breaks of a call as it is served: between n graphs there are n - 1, none in a replay.

    Torch's own count is of the compile, where one in a called function counts for its callers too.
    """
    if found.graph_break_s is None:
        return None
    seen = [_kernels(found, label, serving) for label in found.buckets]
    run = max((kernels.graphs_run for kernels in seen if kernels), default=0)
    return BreakCost(max(run - 1, 0), found.graph_break_s)


def _padding(
    found: Evaluation, serving: Arm, shapes: tuple[Shape, ...], cold_s: float
) -> Padding | None:
    traffic, module = found.traffic, _means(found, Scope.MODULE, serving)
    if traffic.waste is None or traffic.shapes is None or not shapes or module is None:
        return None
    return Padding(
        call_s=module[1],
        waste=traffic.waste,
        compile_s=sum(shape.compile_s for shape in shapes) / len(shapes),
        shapes=traffic.shapes,
        programs=len(found.start.programs),
        programs_s=cold_s,
    )


def _breaks_dict(breaks: BreakCost) -> dict[str, Any]:
    return {
        **asdict(breaks),
        "call_s": breaks.call_s,
        "million_calls_s": breaks.million_calls_s,
    }


def _shape_dict(shape: Shape) -> dict[str, Any]:
    return {**asdict(shape), "break_even_calls": shape.break_even}


def _fusion_dict(fusion: Fusion) -> dict[str, Any]:
    return {
        **asdict(fusion),
        "saved_s": fusion.saved_s,
        "launch_saved_s": fusion.launch_saved_s,
        "speedup": fusion.speedup,
    }


def _padding_dict(padding: Padding) -> dict[str, Any]:
    return {
        **asdict(padding),
        "padding_s": padding.padding_s,
        "recompiles_avoided": padding.recompiles_avoided,
        "avoided_s": padding.avoided_s,
        "pays_until_calls": padding.pays_until,
    }
