"""One HTML file that needs nothing else: sentences, charts and tables of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shapeserve.evaluate.account import Account
from shapeserve.evaluate.charts import figures
from shapeserve.evaluate.result import CompileCost, Evaluation, Row
from shapeserve.evaluate.words import sentences
from shapeserve.page import bullets, chart, page, table, write_page


def write_report(pairs: Sequence[tuple[Evaluation, Account]], path: str) -> None:
    """Write the report of some models to ``path``.

    Raises:
        ConfigError: the file cannot be written, or plotly is not installed.
    """
    write_page(render(pairs), path)


def render(pairs: Sequence[tuple[Evaluation, Account]]) -> str:
    """Return the report as HTML."""
    names = ", ".join(found.model for found, _ in pairs)
    sections = "".join(_section(found, sums) for found, sums in pairs)
    return page(f"shapeserve evaluate: {names}", sections)


def _section(found: Evaluation, sums: Account) -> str:
    where = found.environment
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    facts = (
        f"{where.dtype} on {where.device}, {where.threads} threads; {versions}. "
        f"{len(found.buckets)} of {found.grid_buckets} buckets measured; ready after "
        f"{found.start.seconds:.1f} s."
    )
    return (
        f'<h1>{escape(found.model)}</h1><p class="dim">{escape(facts)}</p>'
        f"<h2>What compiling is worth</h2>{bullets(sentences(found, sums))}"
        f"<h2>Charts</h2>{''.join(map(chart, figures(found, sums)))}"
        f"<h2>Programs</h2>{_programs_table(found)}"
        f"<h2>Latency</h2>{_latency_table(found)}"
        f"<h2>Answers, kernels and memory</h2>{_kernel_table(found)}"
        f"<h2>Kernels that take longest</h2>{_longest_table(found)}"
    )


_COST = ("seconds", "graphs", "graph breaks", "cache hits", "misses", "not asked", "kernels", "MB")


def _programs_table(found: Evaluation) -> str:
    once = ("once a process", f"{found.start.once_s:.2f}")
    rows: list[Sequence[str]] = [once + ("",) * 7]
    rows += [(name, *_cost(cost)) for name, cost in found.start.programs.items()]
    rows += [
        (f"specialised {row.bucket}", *_cost(row.compile))
        for row in found.rows
        if row.arm.value == "specialized" and row.compile is not None
    ]
    return table(("program",), _COST, rows)


def _cost(cost: CompileCost) -> list[str]:
    moved = cost.bytes_moved
    return [
        f"{cost.seconds:.2f}",
        str(cost.graphs),
        str(cost.graph_breaks),
        str(cost.cache_hits),
        str(cost.cache_misses),
        str(cost.cache_bypasses),
        "" if cost.generated_kernels is None else str(cost.generated_kernels),
        "" if moved is None else f"{moved / 1e6:.1f}",
    ]


def _latency_table(found: Evaluation) -> str:
    words = ("bucket", "scope", "run")
    numbers = ("first call s", "median ms", "p99 ms", "calls", "recompiles")
    remarks = ("the first call includes",)
    return table(words, numbers, map(_latency_cells, found.rows), remarks)


def _latency_cells(row: Row) -> list[str]:
    head = [row.bucket, row.scope.value, row.arm.value]
    if row.latency is None:
        return [*head, row.error or row.note or ""]
    took = row.latency
    notes = [took.first.includes, *filter(None, (row.note, row.error))]
    return [
        *head,
        f"{took.first.seconds:.4g}",
        f"{took.median_s * 1e3:.3f}",
        f"{took.p99_s * 1e3:.3f}",
        str(len(took.later_s)),
        "" if row.recompiles is None else str(row.recompiles),
        "; ".join(notes),
    ]


def _kernel_table(found: Evaluation) -> str:
    words = ("bucket", "scope", "run")
    numerics = ("error", "worst row", "reference")
    kernels = ("kernels", "generated", "busy ms", "between ms", "peak MiB", "copied MB", "launches")
    return table(
        words, numerics + kernels, [_kernel_cells(row) for row in found.rows if row.numerics]
    )


def _kernel_cells(row: Row) -> list[str]:
    off, seen = row.numerics, row.kernels
    cells = [row.bucket, row.scope.value, row.arm.value]
    cells += [f"{off.error:.1e}", str(off.worst_row), off.reference] if off else [""] * 3
    if seen is None:
        return cells + [""] * 7
    return [
        *cells,
        str(seen.kernels),
        str(sum(seen.generated.values())),
        f"{seen.busy_s * 1e3:.3f}",
        f"{seen.gap_s * 1e3:.3f}",
        "" if seen.peak_bytes is None else f"{seen.peak_bytes / 2**20:.2f}",
        "" if seen.copied_bytes is None else f"{seen.copied_bytes / 1e6:.3f}",
        "" if seen.launches is None else str(seen.launches),
    ]


def _longest_table(found: Evaluation) -> str:
    rows = [
        (row.bucket, row.arm.value, name, str(calls), f"{seconds * 1e3:.3f}")
        for row in found.rows
        if row.kernels is not None
        for name, calls, seconds in row.kernels.longest
    ]
    return table(("bucket", "run", "kernel"), ("calls", "ms"), rows)
