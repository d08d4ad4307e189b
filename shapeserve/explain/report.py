"""What ``explain`` found, as frozen values that turn into JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shapeserve.metrics import GraphBreakReason, RecompileReason

AxisState = Literal["dynamic", "specialised", "one"]
BlockerKind = Literal["graph_break", "data_dependent", "cpu_sync", "host_random", "unsafe_op"]


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Break:
    """One place where torch leaves the graph.

    Attributes:
        place: the user's line; None if torch names none.
        kind: the reason's class.
        what: torch's own words, one line.
        remedy: what to do.
        eager_frame: whether the whole function around it runs eager, because torch cannot go on
            behind the break (it is in a loop).
        op: the operator, where one is the cause.
        island: the configured eager island; such a break is wanted.
    """

    place: Place | None
    kind: GraphBreakReason
    what: str
    remedy: str
    eager_frame: bool = False
    op: str | None = None
    island: str | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph.

    Attributes:
        function: where it begins.
        place: ``file:line`` of that function.
        nodes: of Dynamo's graph.
        ops: operators that Inductor gets, after decompositions.
        runs: how often one call of the model runs it.
        top_ops: the most frequent operators -> times.
    """

    function: str
    place: str
    nodes: int
    ops: int
    runs: int
    top_ops: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A guard on sizes that code of the model made, in axis names."""

    guard: str
    place: Place | None


@dataclass(frozen=True, slots=True)
class Axis:
    """What the trace says about one axis.

    Attributes:
        name: the axis.
        state: ``dynamic``; ``specialised``: compiled for this size only; ``one``: for a size of 1,
            which torch always specialises.
        size: of the trace.
        why: what specialised it, or empty.
        place: where.
        constraints: further guards on it.
        remedy: what to do about a specialised one.
    """

    name: str
    state: AxisState
    size: int
    why: str = ""
    place: Place | None = None
    constraints: tuple[Constraint, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Recompile:
    """A compile in a later call: at other sizes, or of a model that had changed.

    Attributes:
        reason: its class, as in ``recompiles_total``.
        what: the guard that failed, on one line.
        torchs: whether code of torch made the guard, such as a convolution's choice of a kernel.
            Warm-up runs every bucket, so it costs a longer start and nothing else.
        remedy: what to do.
    """

    reason: RecompileReason
    what: str
    torchs: bool
    remedy: str


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """One of the (at most two) programs of a model.

    Attributes:
        name: ``many`` for two rows and more, ``single`` for one.
        sizes: axis -> size that it was traced at.
        graphs: in the order of their first run.
        breaks: one for each place.
        axes: in grid order.
        guards: kind of guard -> number.
        checked_guards: those that every call checks; a program of one graph drops the guards on
            its frozen weights and attributes.
        recompiles: compiles in later calls: the same once more, then other sizes of the grid.
    """

    name: str
    sizes: Mapping[str, int]
    graphs: tuple[Graph, ...]
    breaks: tuple[Break, ...]
    axes: tuple[Axis, ...]
    guards: Mapping[str, int]
    checked_guards: int
    recompiles: tuple[Recompile, ...]

    @property
    def splits(self) -> int:
        """How often one call leaves the compiled code and comes back."""
        return max(sum(graph.runs for graph in self.graphs) - 1, 0)


@dataclass(frozen=True, slots=True)
class CustomOp:
    """An operator that torch does not bring.

    Attributes:
        name: ``namespace::name``.
        calls: in one call of the model.
        fake: whether it has a fake (meta) implementation; without one each call splits the graph.
        decomposed: whether ``compile.decompositions`` replaces it, so that it fuses.
        splits: graphs it splits in one call.
        us_per_call: what these splits cost at least, microseconds; None if nothing is split.
    """

    name: str
    calls: int
    fake: bool
    decomposed: bool
    splits: int = 0
    us_per_call: float | None = None


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why the model cannot be captured as a CUDA graph."""

    kind: BlockerKind
    what: str
    place: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers to compare before and after a remedy."""

    graphs: int
    breaks: int
    opaque_ops: int
    unfused_ops: int
    capture: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one model.

    Attributes:
        model: its name.
        device: where it was traced.
        torch: its version.
        programs: what would be compiled.
        custom_ops: operators that torch does not bring.
        blockers: why it cannot be captured; empty if it can.
        islands: ``compile.eager_islands``.
        decompositions: operators that the config decomposes.
        split_us: what leaving the compiled code once costs here at least; None if it is never left.
        before: the same model without its remedies (islands, decompositions, custom_ops); None
            without remedies, or where it does not run without them.
        notes: what limits these findings.
        wants_capture: whether the configured tier is one that captures on a GPU.
    """

    model: str
    device: str
    torch: str
    programs: tuple[TracedProgram, ...]
    custom_ops: tuple[CustomOp, ...]
    blockers: tuple[Blocker, ...]
    islands: tuple[str, ...] = ()
    decompositions: tuple[str, ...] = ()
    split_us: float | None = None
    before: Summary | None = None
    notes: tuple[str, ...] = ()
    wants_capture: bool = True

    @property
    def breaks(self) -> tuple[Break, ...]:
        """Breaks of all programs that nobody asked for, each place once."""
        found = {
            (b.place, b.kind, b.op): b for p in self.programs for b in p.breaks if not b.island
        }
        return tuple(found.values())

    @property
    def opaque_ops(self) -> tuple[CustomOp, ...]:
        """Operators that split a graph because they have no fake implementation."""
        return tuple(op for op in self.custom_ops if op.splits)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, one line each; empty means clean."""
        counts = {
            "graph breaks": len(self.breaks),
            "opaque operators": len(self.opaque_ops),
            "specialised axes": len({a.name for p in self.programs for a in p.axes if _bad(a)}),
            "recompiles": sum(not r.torchs for p in self.programs for r in p.recompiles),
            "reasons against a capture": len(self.blockers) if self.wants_capture else 0,
        }
        return tuple(f"{what}: {n}" for what, n in counts.items() if n)

    @property
    def summary(self) -> Summary:
        """The numbers to compare."""
        unfused = sum(op.fake and not op.decomposed for op in self.custom_ops)
        graphs = max((len(program.graphs) for program in self.programs), default=0)
        return Summary(
            graphs, len(self.breaks), len(self.opaque_ops), unfused, capture=not self.blockers
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        data = asdict(self)
        data["capture"] = {"possible": not self.blockers, "reasons": data.pop("blockers")}
        data["after"] = asdict(self.summary)
        data["faults"] = list(self.faults)
        data["clean"] = not self.faults
        return data


def _bad(axis: Axis) -> bool:
    return axis.state == "specialised"
