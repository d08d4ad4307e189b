"""What an evaluation found: frozen values, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from shapeserve.evaluate.latency import Latency


class Arm(StrEnum):
    """How a bucket was run."""

    EAGER = "eager"
    COMPILED = "compiled"
    CAPTURED = "captured"
    SPECIALIZED = "specialized"


class Scope(StrEnum):
    """What was timed: the module alone, or a request through the engine."""

    MODULE = "module"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class CompileCost:
    """What one program, or one specialised bucket, cost before it could run.

    Attributes:
        seconds: all of it, by the clock.
        graphs: what Dynamo compiled.
        graph_breaks: between them.
        cache_hits: graphs found in the compile cache.
        cache_misses: graphs that were not.
        cache_bypasses: graphs that the cache was not asked for (packed weights).
        generated_kernels: that Inductor wrote; None where it does not say.
        bytes_moved: that the kernels read and write, as Inductor counts them; None where it does
            not say. Of a dynamic program it would be those of the sizes it was compiled at: None.
    """

    seconds: float
    graphs: int = 0
    graph_breaks: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bypasses: int = 0
    generated_kernels: int | None = None
    bytes_moved: int | None = None


@dataclass(frozen=True, slots=True)
class Numerics:
    """How far answers are from a reference: the eager model in higher precision.

    Attributes:
        reference: its arithmetic, ``float64`` or ``float32``.
        error: norm-wise relative error of the worst row.
        worst_row: its index.
        rows: that were compared.
        tolerance: what the verify pass allows between two programs of this dtype.
    """

    reference: str
    error: float
    worst_row: int
    rows: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class KernelAccount:
    """What the profiler saw of one call, the fastest of some.

    Attributes:
        platform: ``cuda``: kernels of the GPU. ``cpu``: operators that Python calls, views and
            allocations left out, and generated kernels.
        kernels: how many.
        busy_s: seconds in which at least one ran.
        gap_s: seconds in which none did: on CUDA between the first and the last, on the CPU from
            the call to its return.
        generated: name -> calls of the kernels that Inductor wrote.
        longest: name, calls and seconds of the kernels that take longest.
        peak_bytes: most that was allocated at a time beyond what was before the call.
        copied_bytes: between host and device; None on the CPU.
        launches: calls of the CUDA runtime that launch a kernel or a graph; None on the CPU.
        graphs_run: compiled graphs that ran; 0 in an eager call and in a replay.
    """

    platform: str
    kernels: int
    busy_s: float
    gap_s: float
    generated: Mapping[str, int] = field(default_factory=dict)
    longest: tuple[tuple[str, int, float], ...] = ()
    peak_bytes: int | None = None
    copied_bytes: int | None = None
    launches: int | None = None
    graphs_run: int = 0

    @property
    def launch_s(self) -> float:
        """Seconds between kernels for each of them."""
        return self.gap_s / self.kernels if self.kernels else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run one bucket.

    Attributes:
        bucket: label.
        arm: how it was run.
        scope: what was timed.
        latency: None if it was not measured: ``error`` or ``note`` says why.
        compile: what its program cost; None for an eager one.
        recompiles: compiles while it was timed; None where there is nothing to compile.
        numerics: None if it was not measured.
        kernels: None if it was not profiled.
        error: what went wrong.
        note: what a reader must know.
    """

    bucket: str
    arm: Arm
    scope: Scope
    latency: Latency | None = None
    compile: CompileCost | None = None
    recompiles: int | None = None
    numerics: Numerics | None = None
    kernels: KernelAccount | None = None
    error: str | None = None
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            **asdict(self),
            "arm": self.arm.value,
            "scope": self.scope.value,
            "latency": self.latency.to_dict() if self.latency else None,
        }


@dataclass(frozen=True, slots=True)
class Environment:
    """Where it was measured."""

    device: str
    threads: int
    dtype: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Start:
    """How the engine became ready.

    Attributes:
        seconds: until it was.
        once_s: before that, what the first compile of a process costs whatever it compiles: torch
            loads its compiler.
        programs: what was compiled -> its cost.
        capture_s: label of a bucket -> seconds of its capture.
        graph_bytes: memory of all captures.
        verify_s: label of a bucket -> seconds of its verification.
    """

    seconds: float
    once_s: float = 0.0
    programs: Mapping[str, CompileCost] = field(default_factory=dict)
    capture_s: Mapping[str, float] = field(default_factory=dict)
    graph_bytes: int = 0
    verify_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is known of the rows that will come.

    Attributes:
        observed: whether rows were recorded; else every bucket counts alike.
        shares: label of a measured bucket -> share of the calls.
        shapes: different row shapes.
        waste: padding / all elements along the row axes; None if nothing was recorded.
    """

    observed: bool
    shares: Mapping[str, float]
    shapes: int | None = None
    waste: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All that was measured of one model.

    Attributes:
        model: its name.
        environment: where.
        buckets: labels of the measured ones, ascending.
        grid_buckets: how many there are in all.
        start: of the engine as it is configured.
        eager_start: of the engine that runs the eager module; None if it failed.
        rows: by bucket, then scope, then arm.
        traffic: shares of the buckets.
        graph_break_s: what one graph break costs a call on this machine; None if not known.
    """

    model: str
    environment: Environment
    buckets: tuple[str, ...]
    grid_buckets: int
    start: Start
    eager_start: Start | None
    rows: tuple[Row, ...]
    traffic: Traffic
    graph_break_s: float | None

    @property
    def errors(self) -> tuple[Row, ...]:
        """The rows whose measurement failed."""
        return tuple(row for row in self.rows if row.error is not None)

    def row(self, bucket: str, arm: Arm, scope: Scope) -> Row | None:
        """Return one row; None if there is none of that kind."""
        wanted = (bucket, arm, scope)
        return next((r for r in self.rows if (r.bucket, r.arm, r.scope) == wanted), None)

    def latency(self, bucket: str, arm: Arm, scope: Scope) -> Latency | None:
        """Return the latency of one row; None if it was not measured."""
        row = self.row(bucket, arm, scope)
        return row.latency if row else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "model": self.model,
            "environment": asdict(self.environment),
            "buckets": list(self.buckets),
            "grid_buckets": self.grid_buckets,
            "start": asdict(self.start),
            "eager_start": asdict(self.eager_start) if self.eager_start else None,
            "traffic": asdict(self.traffic),
            "graph_break_s": self.graph_break_s,
            "rows": [row.to_dict() for row in self.rows],
        }
