"""Tables, ratios and the plot: everything is made from the result that goes into the JSON file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.arms import OFFLINE_ARMS, SERVER_ARMS, SHAPESERVE

SERIAL, MANY_CLIENTS, MANY_ROWS = "serial", "closed-32x1", "closed-4x32"
OFFLINE_SHAPESERVE = f"offline-{SHAPESERVE}"
# What the ratios are made of: column, place in the outcome of an arm, is lower better?
COMPARED = (
    ("serial p50", ("scenarios", SERIAL, "p50_ms"), True),
    ("32x1 req/s", ("scenarios", MANY_CLIENTS, "requests_per_s"), False),
    ("32x1 p99", ("scenarios", MANY_CLIENTS, "p99_ms"), True),
    ("4x32 rows/s", ("scenarios", MANY_ROWS, "rows_per_s"), False),
    ("offline rows/s", ("rows_per_s",), False),
)
MAX_COSINE_DISTANCE = 1e-3
NO_VALUE = "-"

Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table that is shown on the terminal and written as Markdown."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> RichTable:
        """Return the table for a terminal."""
        table = RichTable()
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


def value(result: Result, arm: str, *keys: str) -> float | None:
    """Return a number of an arm, None if the arm failed before it or was not run."""
    found: Any = result["arms"].get(arm, {})
    for key in keys:
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, int | float) else None


def number(given: float | None, digits: int = 1) -> str:
    """Format a number of a table."""
    return NO_VALUE if given is None else f"{given:,.{digits}f}"


def tables(result: Result) -> list[Table]:
    """Return all tables that have rows."""
    every = [serving(result), open_loop(result), offline(result), ratios(result), failures(result)]
    return [table for table in every if table.rows]


def serving(result: Result) -> Table:
    """Start-up and closed loops of the servers."""
    columns = {
        "ready s": ("ready_s",),
        "first request s": ("first_request_s",),
        "serial p50 ms": ("scenarios", SERIAL, "p50_ms"),
        "32x1 req/s": ("scenarios", MANY_CLIENTS, "requests_per_s"),
        "32x1 p50 ms": ("scenarios", MANY_CLIENTS, "p50_ms"),
        "32x1 p99 ms": ("scenarios", MANY_CLIENTS, "p99_ms"),
        "4x32 rows/s": ("scenarios", MANY_ROWS, "rows_per_s"),
    }
    rows = [
        [arm, *(number(value(result, arm, *keys)) for keys in columns.values()), str(_errors(arm_))]
        for arm, arm_ in result["arms"].items()
        if arm in SERVER_ARMS
    ]
    return Table("Servers, closed loop", ["arm", *columns, "errors"], rows)


def open_loop(result: Result) -> Table:
    """Latency against the offered rate."""
    names = open_loop_names(result)
    rows = [
        [arm, *(_open_cell(result["arms"][arm].get("scenarios", {}).get(name)) for name in names)]
        for arm in result["arms"]
        if arm in SERVER_ARMS and names
    ]
    title = "Open loop (Poisson, single texts): p50 / p99 ms from the scheduled time"
    return Table(title, ["arm", *(f"{name.removeprefix('open-')}/s" for name in names)], rows)


def open_loop_names(result: Result) -> list[str]:
    """Return the open-loop scenarios of the run, lowest rate first."""
    return [s["name"] for s in result["settings"]["scenarios"] if s["rate_per_s"] is not None]


def offline(result: Result) -> Table:
    """Rows per second without a server."""
    rows = [
        [arm, *(number(value(result, arm, key)) for key in ("rows_per_s", "ready_s"))]
        for arm in result["arms"]
        if arm in OFFLINE_ARMS
    ]
    return Table("Offline", ["arm", "rows/s", "ready s"], rows)


def ratios(result: Result) -> Table:
    """shapeserve against every other arm; above 1 is better for shapeserve."""
    header = ["against", *(name for name, *_ in COMPARED)]
    rows = []
    for arm in result["arms"]:
        ours = OFFLINE_SHAPESERVE if arm in OFFLINE_ARMS else SHAPESERVE
        cells = [
            _ratio(value(result, ours, *keys), value(result, arm, *keys), lower_is_better)
            for _, keys, lower_is_better in COMPARED
        ]
        if arm != ours and any(cell != NO_VALUE for cell in cells):
            rows.append([arm, *cells])
    return Table("shapeserve is better by this factor", header, rows)


def failures(result: Result) -> Table:
    """Arms that failed, with the reason."""
    rows = [
        [arm, outcome["error"].strip().splitlines()[-1]]  # of a traceback: what was raised
        for arm, outcome in result["arms"].items()
        if outcome["status"] == "failed"
    ]
    return Table("Failed arms (log tails are in the JSON file)", ["arm", "error"], rows)


def agreement(result: Result) -> dict[str, float]:
    """Return the largest cosine distance of each pair of arms over the check texts."""
    vectors = {
        arm: outcome["check_vectors"]
        for arm, outcome in result["arms"].items()
        if "check_vectors" in outcome
    }
    return {
        f"{one} / {other}": max(map(cosine_distance, vectors[one], vectors[other]))
        for one, other in itertools.combinations(vectors, 2)
    }


def cosine_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return 1 - cosine of two vectors; 2, the largest, when their sizes differ."""
    if len(one) != len(other):
        return 2.0
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return 1 - product / (math.hypot(*one) * math.hypot(*other))


def headline(result: Result) -> str:
    """Return machine, versions and settings in a few lines."""
    about = result["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    distances = result.get("agreement") or {"no pair": 0.0}
    worst = max(distances, key=distances.__getitem__)
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}, "
        f"load {about['load_average_before']:.2f} before the run\n"
        f"Python {about['python']}, {versions}\n"
        f"commit {about['commit']}, seed {result['settings']['seed']}, "
        f"{result['settings']['duration_s']:g} s a scenario, "
        f"baselines behind Ray's {result['settings']['baseline_proxy']} proxy\n"
        f"largest cosine distance between two arms: {distances[worst]:.1e} ({worst})"
    )


def show(result: Result, console: Console) -> None:
    """Print everything."""
    console.print(headline(result), highlight=False)
    for table in tables(result):
        console.print(f"\n[bold]{table.title}[/bold]")
        console.print(table.rich())


def write_markdown(result: Result, path: Path) -> None:
    """Write everything as Markdown, to be pasted into a README."""
    parts = [
        headline(result).replace("\n", "  \n"),
        *(table.markdown() for table in tables(result)),
    ]
    path.write_text("\n\n".join(parts) + "\n")


def _ratio(ours: float | None, theirs: float | None, lower_is_better: bool) -> str:
    if not ours or not theirs:
        return NO_VALUE
    return f"{theirs / ours if lower_is_better else ours / theirs:.2f}x"


def _open_cell(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return NO_VALUE
    if "p50_ms" not in summary:
        return "saturated" if summary.get("skipped") else "failed"
    cell = f"{summary['p50_ms']:,.0f} / {summary['p99_ms']:,.0f}"
    return cell if summary["kept_up"] else f"{cell} (saturated)"


def _errors(outcome: dict[str, Any]) -> int:
    summaries = outcome.get("scenarios", {}).values()
    return sum(sum(summary.get("errors", {}).values()) for summary in summaries)
