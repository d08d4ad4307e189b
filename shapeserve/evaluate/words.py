"""What an evaluation says, in sentences; the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Iterator

from shapeserve.amortize import Padding
from shapeserve.evaluate.account import HORIZONS, Account, Gain
from shapeserve.evaluate.result import Arm, Evaluation, Scope

# Medians of quiet runs differ by that much; what they contradict each other by above it is load.
_NOISE = 1.05


def sentences(found: Evaluation, sums: Account) -> list[str]:
    """Return what the numbers add up to, and what they rest on."""
    return [
        *_mix(found),
        *_noise(found),
        *_compiling(sums),
        *_specializing(found, sums),
        *_fusion(sums),
        *_rest(sums),
    ]


def _mix(found: Evaluation) -> Iterator[str]:
    if found.traffic.observed:
        yield "Calls are weighed by the recorded rows."
    else:
        yield "No traffic was given (--lengths), so every measured bucket counts alike."


def _noise(found: Evaluation) -> Iterator[str]:
    """Say so where the numbers contradict each other: a request contains a call of the module."""
    factor, where = 1.0, ""
    for label in found.buckets:
        for arm in Arm:
            module = found.latency(label, arm, Scope.MODULE)
            request = found.latency(label, arm, Scope.REQUEST)
            if module is None or request is None or request.median_s >= module.median_s:
                continue
            if (ratio := module.median_s / request.median_s) > factor:
                factor, where = ratio, f"{label} {arm}"
    if factor > _NOISE:
        yield (
            f"Noise: at {where} the module alone took {factor:.2f} times as long as a whole "
            "request with it, so other work ran on this machine. Differences below that factor, "
            "and the break-even points that rest on them, say nothing; measure again when it is "
            "quiet."
        )


def _compiling(sums: Account) -> Iterator[str]:
    if sums.serving is Arm.EAGER:
        yield "Nothing is compiled (compile.tier: eager), so there is nothing to earn back."
    for gain in sums.compiling:
        yield (
            f"{gain.what[0].upper()}{gain.what[1:]} takes {_ms(gain.after_s)} instead of "
            f"{_ms(gain.before_s)} for {gain.cost_s:.1f} s once; {_earned(gain)}"
        )


def _earned(gain: Gain) -> str:
    calls = gain.break_even
    if calls is None:
        return "it never pays."
    net = ", ".join(f"{gain.net_s(n):+,.0f} s after {n:,}" for n in HORIZONS)
    return f"paid back after {calls:,} calls ({net})."


def _specializing(found: Evaluation, sums: Account) -> Iterator[str]:
    for shape in sums.shapes:
        took = (
            f"{_ms(shape.specialized_s)} instead of {_ms(shape.dynamic_s)} for "
            f"{shape.compile_s:.1f} s"
        )
        calls = shape.break_even
        paid = "never pays" if calls is None else f"pays after {calls:,} calls of this bucket"
        yield f"Specialising {shape.name}: {took}: {paid}."
    if sums.dynamic is not None and sums.special is not None:
        start = sums.specialize_all_from
        whole_s = sums.special.cold_s / len(sums.shapes) * found.grid_buckets
        yield (
            f"{sums.special.name}: {sums.special.cold_s:.1f} s cold (all {found.grid_buckets} "
            f"buckets of the grid: about {whole_s:.0f} s), {_ms(sums.special.call_s)} a call; "
            f"{sums.dynamic.name}: {sums.dynamic.cold_s:.1f} s cold, {_ms(sums.dynamic.call_s)} a "
            "call. "
            + (
                "The dynamic one is never the dearer."
                if start is None
                else f"Instead of it, the specialised ones are no dearer from {start:,} calls of "
                "the mix on."
            )
        )


def _fusion(sums: Account) -> Iterator[str]:
    for label, fusion in sums.fusion.items():
        before, after = fusion.before, fusion.after
        yield (
            f"Launches of {label}: {before.kernels} kernels, {_ms(before.busy_s)} busy and "
            f"{_ms(before.overhead_s)} without one -> {after.kernels}, {_ms(after.busy_s)} and "
            f"{_ms(after.overhead_s)}: {fusion.speedup:.2f}x; of {_ms(fusion.saved_s)} saved, "
            f"{_ms(fusion.launch_saved_s)} without a kernel."
        )


def _rest(sums: Account) -> Iterator[str]:
    if (breaks := sums.breaks) is not None:
        yield (
            f"{breaks.breaks} graph breaks x {breaks.one_s * 1e6:.1f} us (measured here) = "
            f"{breaks.call_s * 1e6:.0f} us a call, {breaks.million_calls_s:.0f} s over a million."
        )
    if sums.padding is not None:
        yield _padding(sums.padding)


def _padding(padding: Padding) -> str:
    until = padding.pays_until
    return (
        f"Padding: {padding.waste:.1%} of the elements along the row axes, "
        f"{_ms(padding.padding_s)} a call; it avoids {padding.recompiles_avoided} compiles, "
        f"{padding.avoided_s:.0f} s, which is what it costs "
        + ("in no number of calls." if until is None else f"in {until:,} calls.")
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
