"""What the trace says about each axis: dynamic, specialised, and under which guards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from traceback import FrameSummary

from shapeserve.compile.islands import user_frame
from shapeserve.explain.recompiles import SIZE_REMEDY
from shapeserve.explain.report import Axis, Constraint, Place
from shapeserve.explain.trace import SizeEvent

_SYMBOL = re.compile(r"\b[su]\d+\b")
_SAME = re.compile(r"Eq\((\w+), \1\)")


def read_axes(
    events: Sequence[SizeEvent], sizes: Mapping[str, int], *, tried: bool
) -> tuple[Axis, ...]:
    """Return a fact for each axis.

    The sizes of a trace are unlike each other, so that a symbol belongs to the axis that has its
    size. Where the grid leaves no such sizes, axes are tied: torch takes equal sizes for the same
    one (duck sizing).

    Args:
        events: what torch said of sizes.
        sizes: axis -> size of the trace.
        tried: whether other sizes ran without a compile. Then none of these is specialised: behind
            a graph break a hidden dimension may have the size of an axis, and be specialised.
    """
    symbols = {
        str(event.data["symbol"]): axis
        for event in events
        if event.kind == "create_symbol"
        for axis, size in sizes.items()
        if str(event.data.get("val")) == str(size)
    }
    heard = [e for e in events if not (tried and e.kind == "symbolic_shape_specialization")]
    return tuple(_axis(axis, sizes, symbols, heard) for axis in sizes)


def _axis(
    axis: str,
    sizes: Mapping[str, int],
    symbols: Mapping[str, str],
    events: Sequence[SizeEvent],
) -> Axis:
    size = sizes[axis]
    if size == 1:
        return Axis(axis, "one", 1, "torch specialises sizes 0 and 1; this program is for one row")
    twins = [other for other in sizes if other != axis and sizes[other] == size]
    if twins:
        why = f"of the size of {', '.join(twins)} in every trace: torch ties them (duck sizing)"
        return Axis(axis, "specialised", size, why, remedy="let the policy have other sizes")
    mine = [symbol for symbol, owner in symbols.items() if owner == axis]
    for event in events:
        if event.kind == "symbolic_shape_specialization" and event.data.get("symbol") in mine:
            why = f"the code holds for {axis}={event.data.get('value')} only"
            return Axis(axis, "specialised", size, why, _place(event), remedy=SIZE_REMEDY)
    return Axis(axis, "dynamic", size, constraints=_constraints(mine, symbols, events))


def _constraints(
    mine: Sequence[str], symbols: Mapping[str, str], events: Sequence[SizeEvent]
) -> tuple[Constraint, ...]:
    found: dict[str, Constraint] = {}
    for event in events:
        expr = str(event.data.get("expr", ""))
        if event.kind.startswith("guard_added") and set(_SYMBOL.findall(expr)) & set(mine):
            named = _SYMBOL.sub(lambda match: symbols.get(match[0], match[0]), expr)
            if _SAME.fullmatch(named):
                continue  # two inputs are of one size along the axis, as they always are
            found.setdefault(named, Constraint(named, _place(event)))
    return tuple(found.values())


def _place(event: SizeEvent) -> Place | None:
    frames = [
        FrameSummary(f["filename"], f["line"], f["name"], lookup_line=False, line=f.get("loc"))
        for f in event.stack
    ]
    frame = user_frame(frames) or (frames[-1] if frames else None)
    return None if frame is None else Place(frame.filename, frame.lineno or 0, frame.line or "")
