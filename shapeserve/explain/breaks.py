"""From torch's report of a graph break to a place, a class and a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

from torch import nn

from shapeserve.compile.breaks import ISLAND_MARK, classify_break
from shapeserve.compile.islands import user_frame
from shapeserve.explain import trace
from shapeserve.explain.report import Break, Place
from shapeserve.metrics import GraphBreakReason

_TRACER = Path(trace.__file__).resolve()
_HEAD = re.compile(r"Graph break in user code at (.+):(\d+)")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (\S+)\n(?:    (.+))?', re.MULTILINE)
_OP = re.compile(r"unsupported operator: ([\w.]+)")
_ISLAND = re.compile(rf"{ISLAND_MARK} ([\w.]+)")
_HINT = re.compile(r"^  Hint: (.+)$", re.MULTILINE)
_PREAMBLES = ("Encountered graph break when attempting to trace", "Failed to handle graph break")
_MOST_ISLANDS = 3  # arbitrary: of many layers of one class a few names say enough


def read_breaks(reports: Iterable[str], root: nn.Module) -> tuple[Break, ...]:
    """Return one break for each place: torch reports one again in every function around it.

    Args:
        reports: texts of the artefact ``dynamo_graph_break_reason``.
        root: the model, to name the sub-module that a break is in.
    """
    found: dict[tuple[object, ...], Break] = {}
    for report in reports:
        broken = _read(report, root)
        key = (broken.island,) if broken.island else (broken.place, broken.kind, broken.op)
        known = found.get(key)
        if known is None or (broken.eager_frame and not known.eager_frame):
            found[key] = broken
    return tuple(found.values())


def _read(report: str, root: nn.Module) -> Break:
    reason, _, rest = report.partition("User code traceback:")
    place = _place(rest.partition("\nTraceback (most recent call last)")[0], report)
    kind = classify_break(reason)
    op = match[1] if (match := _OP.search(reason)) else None
    island = match[1] if (match := _ISLAND.search(reason)) else None
    return Break(
        place=place,
        kind=kind,
        what=_what(reason),
        remedy=_remedy(kind, op, place, root, reason),
        eager_frame="falling back to eager" in reason,
        op=op,
        island=island,
    )


def _place(stack: str, report: str) -> Place | None:
    frames = [
        traceback.FrameSummary(file, int(line), name, lookup_line=False, line=code)
        for file, line, name, code in _FRAME.findall(stack)
    ]
    # The program's own frame is ours; who called it is not of the model.
    ours = [i for i, frame in enumerate(frames) if Path(frame.filename) == _TRACER]
    frames = frames[ours[-1] + 1 :] if ours else frames
    if frame := user_frame(frames):
        return Place(frame.filename, frame.lineno or 0, (frame.line or "").strip())
    head = _HEAD.search(report)
    return Place(head[1], int(head[2])) if head else None


def _what(reason: str) -> str:
    """Torch's name of the break: the first line that is not about how it was met."""
    text = reason.partition("Graph Break Reason:")[2] or reason
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith(_PREAMBLES):
            return line
    return "unknown"


def _remedy(
    kind: GraphBreakReason, op: str | None, place: Place | None, root: nn.Module, reason: str
) -> str:
    if kind is GraphBreakReason.EAGER_ISLAND:
        return "wanted by compile.eager_islands"
    island = _island_remedy(place, root)
    if kind is GraphBreakReason.OPAQUE_OP:
        name = (op or "namespace.name").replace(".default", "").replace(".", "::", 1)
        return (
            f'register a fake implementation: @torch.library.register_fake("{name}") in a module '
            f"named by compile.custom_ops; or {island}"
        )
    if kind is GraphBreakReason.DATA_DEPENDENT:
        return f"compute both sides and choose with torch.where, or use torch.cond; or {island}"
    if kind is GraphBreakReason.SIDE_EFFECT:
        return (
            "take the call out of forward, or put it under `not torch.compiler.is_compiling()`; "
            f"or {island}"
        )
    if kind is GraphBreakReason.EXPLICIT:
        return "remove the call that asks torch for a break"
    if kind is GraphBreakReason.UNSUPPORTED_CALL:
        return (
            "write it in torch operators, or make it an operator with a fake implementation "
            f"(torch.library.custom_op, compile.custom_ops); or {island}"
        )
    hints = _HINT.findall(reason)
    return f"{hints[0] if hints else 'change the code'}; or {island}"


def _island_remedy(place: Place | None, root: nn.Module) -> str:
    names = [] if place is None else _around(place, root)
    if not names:
        return "move it into a sub-module and name that in compile.eager_islands"
    more = f" and {len(names) - _MOST_ISLANDS} more" if len(names) > _MOST_ISLANDS else ""
    return f"compile.eager_islands: [{', '.join(names[:_MOST_ISLANDS])}]{more}"


def _around(place: Place, root: nn.Module) -> list[str]:
    """The sub-modules in whose ``forward`` a place is."""
    return [
        name
        for name, module in root.named_modules()
        if name and _within(place, getattr(type(module).forward, "__code__", None))
    ]


def _within(place: Place, code: CodeType | None) -> bool:
    if code is None or code.co_filename != place.file:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_firstlineno <= place.line <= max(lines, default=0)
