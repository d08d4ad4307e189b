"""When does compiling pay: break-even points and accounts, from seconds that somebody measured.

Pure arithmetic. Break-even points are computed with exact fractions of the decimal numbers that are
given, because ``12 / (0.1 - 0.07)`` in binary floating point may be a hair above 400, and then the
answer would be 401.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_MILLION = 1_000_000


def break_even_calls(cost_s: float, before_s: float, after_s: float) -> int | None:
    """Return the number of calls after which a one-off cost is earned back; None for never.

    Args:
        cost_s: what compiling took, once.
        before_s: a call without it.
        after_s: a call with it.

    Raises:
        ValueError: a value is negative or not finite.
    """
    cost, saved = _exact("cost_s", cost_s), _saved(before_s, after_s)
    if cost == 0:
        return 0
    return math.ceil(cost / saved) if saved > 0 else None


def net_gain_s(cost_s: float, before_s: float, after_s: float, calls: int) -> float:
    """Return the seconds won after ``calls`` calls; a loss is negative.

    Raises:
        ValueError: a value is negative or not finite.
    """
    saved = _saved(before_s, after_s)
    return float(saved * _count("calls", calls) - _exact("cost_s", cost_s))


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of a mix.

    Attributes:
        name: of the shape.
        share: of the calls, 0 to 1; relative to the others.
        compile_s: a compile for exactly this shape.
        specialized_s: a call of what that compile gives.
        dynamic_s: a call of the program that serves all shapes.
    """

    name: str
    share: float
    compile_s: float
    specialized_s: float
    dynamic_s: float

    @property
    def break_even(self) -> int | None:
        """Calls of this shape after which specialising it has paid; None for never.

        Counted against a dynamic program that is compiled already.
        """
        return break_even_calls(self.compile_s, self.dynamic_s, self.specialized_s)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to serve a mix: what is compiled first, and what a call takes on average."""

    name: str
    cold_s: float
    call_s: float

    def total_s(self, calls: int) -> float:
        """Return the seconds that so many calls take from a cold start."""
        return self.cold_s + self.call_s * _count("calls", calls)


def specialize_all(shapes: Sequence[Shape]) -> Strategy:
    """One program for each shape, and nothing else.

    Raises:
        ValueError: there is no shape, or no share above 0.
    """
    cold = sum((_exact("compile_s", s.compile_s) for s in shapes), Fraction(0))
    call = _mean(shapes, [s.specialized_s for s in shapes])
    return Strategy(f"{len(shapes)} specialised programs", float(cold), call)


def one_dynamic(shapes: Sequence[Shape], compile_s: float) -> Strategy:
    """One dynamic-shape program for all of them.

    Args:
        shapes: the mix.
        compile_s: the compile of that program.

    Raises:
        ValueError: there is no shape, or no share above 0.
    """
    call = _mean(shapes, [s.dynamic_s for s in shapes])
    return Strategy("one dynamic program", float(_exact("compile_s", compile_s)), call)


def cheaper_from(first: Strategy, second: Strategy) -> int | None:
    """Return the calls from which ``second`` costs no more than ``first``; None for never."""
    if second.cold_s <= first.cold_s:
        return 0 if second.call_s <= first.call_s else None
    extra = float(_exact("cold_s", second.cold_s) - _exact("cold_s", first.cold_s))
    return break_even_calls(extra, first.call_s, second.call_s)


def worth_specializing(shapes: Sequence[Shape], calls: int) -> list[Shape]:
    """Return the shapes whose own compile is earned back within ``calls`` calls of the mix.

    Raises:
        ValueError: there is no shape, or no share above 0.
    """
    whole = _whole(shapes)
    return [
        shape
        for shape in shapes
        if shape.break_even is not None
        and _exact("share", shape.share) * _count("calls", calls) >= shape.break_even * whole
    ]


@dataclass(frozen=True, slots=True)
class Launches:
    """What one call launches.

    Attributes:
        kernels: how many.
        busy_s: seconds in which they run, together.
        launch_s: what launching one costs, in which none runs.
    """

    kernels: int
    busy_s: float
    launch_s: float

    @property
    def overhead_s(self) -> float:
        """Seconds that launching takes."""
        return float(self._overhead)

    @property
    def total_s(self) -> float:
        """Seconds of the call."""
        return float(_exact("busy_s", self.busy_s) + self._overhead)

    @property
    def _overhead(self) -> Fraction:
        return _count("kernels", self.kernels) * _exact("launch_s", self.launch_s)


@dataclass(frozen=True, slots=True)
class Fusion:
    """The launches of a call before and after kernels were joined."""

    before: Launches
    after: Launches

    @property
    def saved_s(self) -> float:
        """Seconds that a call takes less; negative if it takes more."""
        return float(_exact("before", self.before.total_s) - _exact("after", self.after.total_s))

    @property
    def launch_saved_s(self) -> float:
        """The part of ``saved_s`` that is launching."""
        return float(
            _exact("before", self.before.overhead_s) - _exact("after", self.after.overhead_s)
        )

    @property
    def speedup(self) -> float:
        """How many times as fast; infinite if nothing is left."""
        after = _exact("after", self.after.total_s)
        return float(_exact("before", self.before.total_s) / after) if after else math.inf


@dataclass(frozen=True, slots=True)
class BreakCost:
    """What graph breaks cost every call: each is a return to Python and a new guard check.

    The kernels that cannot be joined across a break cost more on top; that is not counted here.
    """

    breaks: int
    one_s: float

    @property
    def call_s(self) -> float:
        """Seconds a call."""
        return float(_count("breaks", self.breaks) * _exact("one_s", self.one_s))

    @property
    def million_calls_s(self) -> float:
        """Seconds in a million calls."""
        return float(_count("breaks", self.breaks) * _exact("one_s", self.one_s) * _MILLION)


@dataclass(frozen=True, slots=True)
class Padding:
    """What padding costs in calls, against the compiles that it makes unnecessary.

    Attributes:
        call_s: an average call.
        waste: padding / all elements, 0 to 1; that part of a call computes nothing of use.
        compile_s: a compile for one exact shape.
        shapes: different shapes in the traffic.
        programs: compiled with padding.
        programs_s: seconds that those took, together.
    """

    call_s: float
    waste: float
    compile_s: float
    shapes: int
    programs: int
    programs_s: float

    @property
    def padding_s(self) -> float:
        """Seconds a call spent on padding, taking time to grow with elements."""
        if not 0 <= self.waste <= 1:
            raise ValueError(f"waste is {self.waste}; it is a share, 0 to 1")
        return float(_exact("call_s", self.call_s) * _exact("waste", self.waste))

    @property
    def recompiles_avoided(self) -> int:
        """Compiles that a program for every exact shape would need on top."""
        return max(self.shapes - self.programs, 0)

    @property
    def avoided_s(self) -> float:
        """Seconds of compiling that padding saves; negative if it costs more."""
        every = _count("shapes", self.shapes) * _exact("compile_s", self.compile_s)
        return float(every - _exact("programs_s", self.programs_s))

    @property
    def pays_until(self) -> int | None:
        """Calls after which padding has cost what it saved; None: it never has."""
        if self.avoided_s <= 0:
            return 0
        wasted = _exact("padding_s", self.padding_s)
        return math.floor(_exact("avoided_s", self.avoided_s) / wasted) if wasted else None


def _mean(shapes: Sequence[Shape], seconds: Sequence[float]) -> float:
    whole = _whole(shapes)
    parts = (
        _exact("share", shape.share) * _exact("call_s", s)
        for shape, s in zip(shapes, seconds, strict=True)
    )
    return float(sum(parts, Fraction(0)) / whole)


def _whole(shapes: Sequence[Shape]) -> Fraction:
    whole = sum((_exact("share", s.share) for s in shapes), Fraction(0))
    if not whole:
        raise ValueError("a mix needs at least one shape with a share above 0")
    return whole


def _saved(before_s: float, after_s: float) -> Fraction:
    return _exact("before_s", before_s) - _exact("after_s", after_s)


def _count(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}; give 0 or more")
    return value


def _exact(name: str, value: float) -> Fraction:
    """The decimal number that ``value`` is printed as, exactly."""
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}; give a finite number, 0 or more")
    return Fraction(str(value))
