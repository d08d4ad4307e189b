"""One HTML file that needs nothing else: sentences, charts and tables of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from shapeserve.errors import ConfigError
from shapeserve.evaluate.account import Account
from shapeserve.evaluate.result import CompileCost, Evaluation, Row
from shapeserve.evaluate.words import sentences

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1.5rem;
  color: #1b1b1b; background: #fff; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #e5e5e5; }
th { background: #f5f5f5; } td.word, th.word { text-align: left; }
td.bad { color: #a40000; } .scroll { overflow-x: auto; } .dim { color: #555; }
"""


def require_plotly() -> None:
    """Check that reports can be drawn, before minutes of measuring.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--report needs the extra tune ({error}); install it: pip install 'shapeserve[tune]'"
        ) from error


def write_report(pairs: Sequence[tuple[Evaluation, Account]], path: str) -> None:
    """Write the report of some models to ``path``.

    Raises:
        ConfigError: the file cannot be written, or plotly is not installed.
    """
    text = render(pairs)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--report {path}: cannot be written: {error.strerror}; give another path"
        ) from error


def render(pairs: Sequence[tuple[Evaluation, Account]]) -> str:
    """Return the report as HTML."""
    require_plotly()
    from plotly.offline import get_plotlyjs

    names = ", ".join(found.model for found, _ in pairs)
    sections = "".join(_section(found, sums) for found, sums in pairs)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>shapeserve evaluate: {escape(names)}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{sections}</body></html>\n"
    )


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
        f"<h2>What compiling is worth</h2>{_list(sentences(found, sums))}"
        f"<h2>Charts</h2>{''.join(_charts(found, sums))}"
        f"<h2>Programs</h2>{_programs_table(found)}"
        f"<h2>Latency</h2>{_latency_table(found)}"
        f"<h2>Answers, kernels and memory</h2>{_kernel_table(found)}"
        f"<h2>Kernels that take longest</h2>{_longest_table(found)}"
    )


def _charts(found: Evaluation, sums: Account) -> Iterator[str]:
    from plotly.io import to_html

    from shapeserve.evaluate.charts import figures

    for figure in figures(found, sums):
        yield str(
            to_html(
                figure,
                config={"displaylogo": False, "responsive": True},
                include_plotlyjs=False,
                full_html=False,
            )
        )


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(
    words: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[str]],
    remarks: Sequence[str] = (),
) -> str:
    """A table with columns of words, of numbers, and of words again.

    A row that ends early ends in words, over what is left of it: what went wrong.
    """
    kinds = ["word"] * len(words) + ["number"] * len(numbers) + ["word"] * len(remarks)
    names = (*words, *numbers, *remarks)
    head = "".join(f'<th class="{k}">{escape(n)}</th>' for k, n in zip(kinds, names, strict=True))
    body = ""
    for row in rows:
        cells = [f'<td class="{k}">{escape(c)}</td>' for k, c in zip(kinds, row, strict=False)]
        if len(row) < len(kinds):
            span = len(kinds) - len(row) + 1
            cells[-1] = f'<td class="word bad" colspan="{span}">{escape(row[-1])}</td>'
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


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
    return _table(("program",), _COST, rows)


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
    return _table(words, numbers, map(_latency_cells, found.rows), remarks)


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
    return _table(
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
    return _table(("bucket", "run", "kernel"), ("calls", "ms"), rows)
