"""``shapeserve explain``: does a model compile as one graph, can it be captured, and if not why."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shapeserve.cli.common import (
    check_target,
    config_argument,
    debug_options,
    json_option,
    load_config,
    model_option,
    with_debug,
    write_json,
)
from shapeserve.errors import ModelError

if TYPE_CHECKING:
    from shapeserve.explain import Explanation
    from shapeserve.explain.report import Axis, Break, CustomOp, Recompile, Summary, TracedProgram

_GUARDS = 3  # shown of an axis
_RECOMPILES = 4  # shown of a program


@click.command("explain")
@config_argument
@model_option
@debug_options
@json_option
@click.pass_context
def explain_command(
    context: click.Context,
    config_path: str | None,
    model: str | None,
    compile_debug_dir: str | None,
    log_recompiles: bool,
    json_target: str | None,
) -> None:
    """Trace a model as it would be served: breaks, opaque operators, guards, capture.

    Exits with 1 if a graph breaks, an operator is opaque, an axis is specialised or the model
    cannot be captured. Nothing is served and no code is generated; no GPU is needed.

    \b
    Examples:
      shapeserve explain service.yaml
      shapeserve explain --model ./all-MiniLM-L6-v2
      shapeserve explain service.yaml --json explain.json --compile-debug-dir trace
    """
    # Takes seconds: it imports torch.
    from shapeserve.compile.debug import keep_artefacts, log_all_recompiles
    from shapeserve.explain import explain

    check_target("--json", json_target)
    config = with_debug(load_config(config_path, model), compile_debug_dir, log_recompiles)
    explained, failed = [], []
    for one in config.models:
        if one.compile.log_recompiles:
            log_all_recompiles()
        # What the model prints is not what this command prints.
        with (
            keep_artefacts(one.compile.debug_dir, one.name or "model"),
            contextlib.redirect_stdout(sys.stderr),
        ):
            try:
                explained.append(explain(one))
            except ModelError as error:  # the next model may be explained
                failed.append(error)
        if one.compile.debug_dir is not None:
            click.echo(f"torch's trace and logs are in {one.compile.debug_dir}", err=True)
    if json_target is not None:
        write_json({"models": [e.to_dict() for e in explained]}, json_target)
    if json_target != "-":
        console = Console(highlight=False, soft_wrap=False)
        for explanation in explained:
            _print(console, explanation)
    if failed:
        raise ModelError("\n".join(map(str, failed)))
    if any(explanation.faults for explanation in explained):
        context.exit(1)


def _print(console: Console, found: Explanation) -> None:
    console.print(f"[bold]{escape(found.model)}[/bold] on {found.device}, torch {found.torch}")
    for note in found.notes:
        console.print(f"note: {escape(note)}")
    for index, program in enumerate(found.programs):
        known = {broken for p in found.programs[:index] for broken in p.breaks}
        _print_program(console, program, [b for b in program.breaks if b not in known])
    if found.custom_ops:
        console.print(_ops_table(found.custom_ops))
    if found.split_us is not None:
        splits = max(program.splits for program in found.programs)
        console.print(
            f"cost of leaving compiled code: {splits} times a call, about {found.split_us:.0f} us "
            f"each (measured here on small functions): {splits * found.split_us:.0f} us a call"
        )
    _print_capture(console, found)
    if found.before is not None:
        console.print(_before_after(found.before, found.summary))
    for fault in found.faults:
        console.print(f"[red]fault[/red]  {fault}")
    if not found.faults:
        console.print("[green]clean[/green]")


def _print_program(console: Console, program: TracedProgram, breaks: Sequence[Break]) -> None:
    sizes = ",".join(f"{axis}={size}" for axis, size in program.sizes.items())
    guards = sum(program.guards.values())
    console.print(
        f"\nprogram {program.name}, traced at {sizes}: {len(program.graphs)} graph(s), "
        f"{guards} guards, {program.checked_guards} of them checked at every call"
    )
    console.print(_graphs_table(program))
    for broken in breaks:
        _print_break(console, broken)
    if len(breaks) < len(program.breaks):
        console.print(f"and {len(program.breaks) - len(breaks)} break(s) as above")
    for axis in program.axes:
        _print_axis(console, axis)
    kinds = ", ".join(f"{kind} {n}" for kind, n in list(program.guards.items())[:5])
    console.print(f"guards: {kinds}")
    _print_recompiles(console, program.recompiles)


def _print_recompiles(console: Console, recompiles: Sequence[Recompile]) -> None:
    for again in recompiles[:_RECOMPILES]:
        mark = "recompiles" if again.torchs else "[red]recompiles[/red]"
        console.print(f"{mark} ({again.reason}): {escape(again.what)}", soft_wrap=True)
        console.print(f"    remedy: {escape(again.remedy)}", soft_wrap=True)
    if (more := len(recompiles) - _RECOMPILES) > 0:
        console.print(f"    and {more} more recompiles (--json has them)")


def _print_break(console: Console, broken: Break) -> None:
    mark = "eager island" if broken.island else "graph break"
    place = escape(str(broken.place or "unknown place"))
    console.print(f"[yellow]{mark}[/yellow] [bold]{place}[/bold] ({broken.kind})", soft_wrap=True)
    if broken.place and broken.place.code:
        console.print(f"    {escape(broken.place.code)}", soft_wrap=True)
    console.print(f"    {escape(broken.what)}", soft_wrap=True)
    if broken.eager_frame:
        console.print("    torch cannot go on behind it: the function around it runs eager")
    console.print(f"    remedy: {escape(broken.remedy)}", soft_wrap=True)


def _graphs_table(program: TracedProgram) -> Table:
    table = _table("graphs", "function", "nodes", "operators", "runs", "most frequent")
    for graph in program.graphs:
        top = ", ".join(f"{_short(name)} {n}" for name, n in list(graph.top_ops.items())[:3])
        table.add_row(
            escape(graph.function), str(graph.nodes), str(graph.ops), str(graph.runs), top
        )
    return table


def _print_axis(console: Console, axis: Axis) -> None:
    line = f"axis {axis.name}: {axis.state}"
    if axis.why:
        line += f" at {axis.size}: {axis.why}"
    if axis.place:
        line += f" ({axis.place} {axis.place.code})"
    specialised = axis.state == "specialised"
    console.print(escape(line), style="red" if specialised else "", soft_wrap=True)
    if specialised:
        console.print(f"    remedy: {escape(axis.remedy)}", soft_wrap=True)
    # The short ones are those that a reader understands; a convolution makes dozens.
    shown = sorted(axis.constraints, key=lambda c: len(c.guard))[:_GUARDS]
    for constraint in shown:
        place = f" ({constraint.place})" if constraint.place else ""
        console.print(f"    guard {escape(constraint.guard + place)}", soft_wrap=True)
    if more := len(axis.constraints) - len(shown):
        console.print(f"    and {more} more guards on it (--json has them)")


def _ops_table(ops: Iterable[CustomOp]) -> Table:
    table = _table("custom operators", "operator", "calls", "fake", "in the graph", "us a call")
    for op in ops:
        if op.splits:
            how = f"splits it {op.splits} times"
        else:
            how = "decomposed, fuses" if op.decomposed else "opaque, not fused"
        us = "" if op.us_per_call is None else f"{op.us_per_call:.0f}"
        table.add_row(op.name, str(op.calls), _yes(op.fake), how, us)
    return table


def _print_capture(console: Console, found: Explanation) -> None:
    if not found.blockers:
        console.print("CUDA graph: nothing found against a capture")
        return
    aside = "" if found.wants_capture else "; the configured tier captures nothing"
    console.print(f"CUDA graph: cannot be captured{aside}")
    for blocker in found.blockers:
        place = f" ({blocker.place})" if blocker.place else ""
        console.print(f"    {blocker.kind}: {escape(blocker.what + place)}", soft_wrap=True)


def _before_after(before: Summary, after: Summary) -> Table:
    table = _table("remedies", "", "before", "after")
    rows: Mapping[str, tuple[object, object]] = {
        "graph breaks": (before.breaks, after.breaks),
        "graphs": (before.graphs, after.graphs),
        "opaque operators": (before.opaque_ops, after.opaque_ops),
        "operators that do not fuse": (before.unfused_ops, after.unfused_ops),
        "can be captured": (_yes(before.capture), _yes(after.capture)),
    }
    for name, (old, new) in rows.items():
        table.add_row(name, str(old), str(new))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numeric = index and column not in ("most frequent", "in the graph", "fake")
        table.add_column(column, justify="right" if numeric else "left")
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
