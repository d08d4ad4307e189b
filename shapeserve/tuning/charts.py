"""The charts of a tuning report, as plotly figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shapeserve.buckets import TOKENS
from shapeserve.page import BLUE, GREEN, GREY, VERMILION, new_figure
from shapeserve.traces import Traffic
from shapeserve.tuning.fit import Buckets, assigned
from shapeserve.tuning.loads import Loads
from shapeserve.tuning.request import Scored
from shapeserve.tuning.study import Study
from shapeserve.tuning.words import NAMES

COLOUR = {"default": GREY, "pow2": BLUE, "proposed": VERMILION}
"""Policies that the charts compare."""
_SYMBOL = {
    "default": "x",
    "pow2": "x",
    "multiple_64": "square",
    "pad_to_max": "triangle-up",
    "proposed": "diamond",
}

_BIN_RATIO = 1.08  # of neighbouring bins of lengths, where a bin of one length is not wider
_MOST_DOTS = 2000  # shapes that are drawn one by one: a browser stays quick
_MOST_BARS = 40


def figures(study: Study) -> Iterator[Any]:
    """Yield the figures that the numbers suffice for."""
    scored = {name: found for name, found in study.named.items() if name in COLOUR}
    if len(study.judged.axes) == 1:
        yield _lengths(study.judged, scored)
    else:
        yield _shapes(study.judged, scored)
    yield from _by_bucket(study.judged, scored)
    yield _padding_by_number(study)
    if study.proposal.cost_source:
        yield _seconds_by_number(study)
    if study.loads is not None:
        yield _latencies(study.loads)


def _lengths(traffic: Traffic, scored: dict[str, Scored]) -> Any:
    """Rows by length above, the last length of every bucket below."""
    from plotly.subplots import make_subplots

    (axis,) = traffic.axes
    what = "Batches" if axis == TOKENS else "Rows"
    title = f"{what} by {axis}, and where buckets end"
    figure = new_figure(title, f"% of {what.lower()} per doubling", axis)
    figure = make_subplots(
        figure=figure, rows=2, cols=1, shared_xaxes=True, row_heights=[0.75, 0.25]
    )
    edges, density = log_density(traffic.sizes[:, 0], traffic.counts)
    figure.add_scatter(
        row=1,
        col=1,
        name=what.lower(),
        x=edges,
        y=[*density, density[-1]],
        mode="lines",
        line={"shape": "hv", "color": GREEN, "width": 1},
        fill="tozeroy",
    )
    for name, found in scored.items():
        (entries,) = found.buckets.values()
        figure.add_scatter(
            row=2,
            col=1,
            name=f"{NAMES[name]} ({found.shapes})",
            x=entries,
            y=[NAMES[name]] * len(entries),
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 14, "color": COLOUR[name]},
            marker_line_width=2,
        )
    for edge in scored["proposed"].buckets[axis]:
        figure.add_vline(edge, row=1, col=1, line={"color": VERMILION, "width": 1, "dash": "dot"})
    figure.update_xaxes(type="log", title="")
    figure.update_xaxes(row=2, col=1, title=axis)
    figure.update_yaxes(row=2, col=1, title="", showgrid=False)
    return figure


def log_density(lengths: np.ndarray, counts: np.ndarray) -> tuple[list[int], list[float]]:
    """Return edges of bins of lengths, and the % of rows in each, divided by its doublings.

    Bins of whole numbers grow in steps, so that plain numbers of rows would jump with them.
    """
    edges, end = [int(lengths.min())], int(lengths.max())
    while edges[-1] <= end:
        edges.append(max(edges[-1] + 1, round(edges[-1] * _BIN_RATIO)))
    rows, _ = np.histogram(lengths, bins=edges, weights=counts)
    doublings = np.diff(np.log2(edges))
    return edges, (100 * rows / counts.sum() / doublings).tolist()


def _shapes(traffic: Traffic, scored: dict[str, Scored]) -> Any:
    """A dot for every shape, a corner for every bucket: a row runs in one above and right of it."""
    down, across = traffic.axes
    distinct, places = np.unique(traffic.sizes, axis=0, return_inverse=True)
    rows = np.bincount(places.ravel(), traffic.counts)
    most = np.argsort(-rows, kind="stable")[:_MOST_DOTS]
    title = f"Rows by {down} and {across}, and the corners of the buckets"
    figure = new_figure(title, down, across)
    figure.add_scatter(
        name="rows" if len(most) == len(rows) else f"rows ({_MOST_DOTS:,} most frequent shapes)",
        x=distinct[most, 1].tolist(),
        y=distinct[most, 0].tolist(),
        text=[f"{int(n)} rows" for n in rows[most]],
        mode="markers",
        marker={
            "color": GREEN,
            "opacity": 0.4,
            "size": (3 + 25 * np.sqrt(rows[most] / rows.max())).tolist(),
        },
    )
    for name in ("default", "proposed"):
        x, y = corners(traffic, scored[name].buckets)
        figure.add_scatter(
            name=f"{NAMES[name]} ({scored[name].shapes})",
            x=x,
            y=y,
            mode="lines",
            line={"color": COLOUR[name], "width": 1 if name == "default" else 3},
        )
    figure.update_layout(height=620)
    return figure


def corners(traffic: Traffic, buckets: Buckets) -> tuple[list[int | None], list[int | None]]:
    """Return the upper right corner of every bucket as lines that end in None."""
    arms = {axis: max(size // 25, 1) for axis, size in traffic.longest.items()}
    down, across = traffic.axes
    x: list[int | None] = []
    y: list[int | None] = []
    for height, width in _grid(buckets):
        x += [width - arms[across], width, width, None]
        y += [height, height, height - arms[down], None]
    return x, y


def _grid(buckets: Buckets) -> list[tuple[int, ...]]:
    """Return the row shapes that all combinations of sizes make."""
    found: list[tuple[int, ...]] = [()]
    for entries in buckets.values():
        parts = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
        found = [shape + part for shape in found for part in parts]
    return found


class Bar(NamedTuple):
    """What one bucket executes: real and padded elements in % of all real ones."""

    label: str
    real: float
    padding: float
    rows: float


def _by_bucket(half: Traffic, scored: dict[str, Scored]) -> Iterator[Any]:
    """Yield, for today's default and the proposal, what each bucket executes."""
    found = {name: bars(half, scored[name].buckets) for name in ("default", "proposed")}
    top = max(bar.real + bar.padding for made in found.values() for bar in made)
    for name, made in found.items():
        title = f"{NAMES[name]}: what its buckets execute, {scored[name].second_half:.1%} padding"
        figure = new_figure(title[0].upper() + title[1:], "% of all real elements", "bucket")
        names = [bar.label for bar in made]
        texts = [f"{bar.rows:,.0f} rows" for bar in made]
        parts = {"real": [bar.real for bar in made], "padding": [bar.padding for bar in made]}
        for kind, colour in (("real", GREEN), ("padding", VERMILION)):
            figure.add_bar(name=kind, x=names, y=parts[kind], hovertext=texts, marker_color=colour)
        figure.update_layout(barmode="stack")
        figure.update_xaxes(type="category")
        figure.update_yaxes(range=[0, 1.05 * top])
        yield figure


def bars(half: Traffic, buckets: Buckets) -> list[Bar]:
    """Return a bar for every bucket that is used; the least of many are one."""
    sizes, places = np.unique(assigned(half, buckets), axis=0, return_inverse=True)
    rows = np.bincount(places.ravel(), half.counts)
    real = half.counts * half.sizes.prod(axis=1, dtype=np.float64)
    used = np.bincount(places.ravel(), real)
    padding = rows * sizes.prod(axis=1, dtype=np.float64) - used
    scale = 100 / real.sum()
    labels = ["x".join(map(str, size)) for size in sizes.tolist()]
    made = [*map(Bar, labels, used * scale, padding * scale, rows)]
    least = sorted(made, key=lambda bar: bar.real + bar.padding)[: max(len(made) - _MOST_BARS, 0)]
    if not least:
        return made
    others = Bar(
        f"{len(least)} others",
        sum(bar.real for bar in least),
        sum(bar.padding for bar in least),
        sum(bar.rows for bar in least),
    )
    return [*(bar for bar in made if bar not in least), others]


def _padding_by_number(study: Study) -> Any:
    counted = study.proposal.counted
    figure = new_figure(f"Padding against the number of {counted}", "% of all elements", counted)
    numbers = [*study.by_number]
    found = study.by_number.values()
    halves = {
        "fitted, first half (fitted to it)": ([100 * one.first_half for one in found], "dot"),
        "fitted, second half (not seen)": ([100 * one.second_half for one in found], "solid"),
    }
    for name, (values, dash) in halves.items():
        line = {"color": VERMILION, "dash": dash}
        figure.add_scatter(name=name, x=numbers, y=values, mode="lines", line=line)
    for name, scored in study.named.items():
        if scored.shapes <= numbers[-1]:
            figure.add_scatter(
                name=NAMES[name],
                x=[scored.shapes],
                y=[100 * scored.second_half],
                mode="markers",
                marker={"size": 11, "color": COLOUR.get(name, "#000000")},
                marker_symbol=_SYMBOL[name],
            )
    figure.update_yaxes(type="log", dtick="D2")
    return _chosen(figure, study)


def _seconds_by_number(study: Study) -> Any:
    how = "simulated" if study.proposal.packed else "in full batches"
    title = f"Device seconds of the second half, {how}"
    figure = new_figure(title, "seconds", study.proposal.counted)
    seconds = [one.device_s for one in study.by_number.values()]
    figure.add_scatter(
        name="fitted", x=[*study.by_number], y=seconds, mode="lines", line={"color": VERMILION}
    )
    for name in ("default", "pow2"):
        figure.add_hline(study.named[name].device_s, line={"color": COLOUR[name], "dash": "dash"})
        figure.add_scatter(  # a line of the layout has no entry in the legend
            name=NAMES[name],
            x=[None],
            y=[None],
            mode="lines",
            line={"color": COLOUR[name], "dash": "dash"},
        )
    figure.update_yaxes(type="log")
    return _chosen(figure, study)


def _chosen(figure: Any, study: Study) -> Any:
    number = study.proposal.proposed.shapes
    figure.add_vline(number, line={"color": "#000000", "width": 1, "dash": "dot"})
    text = f"K = {number}"
    figure.add_annotation(
        x=number, y=1, yref="paper", text=text, showarrow=False, xanchor="left", yanchor="top"
    )
    return figure


def _latencies(loads: Loads) -> Any:
    title = "Simulated latency against the load: p50 dotted, p99 solid"
    figure = new_figure(title, "milliseconds", "rows that come in a second")
    for name, points in loads.points.items():
        x = [point.rows_per_s for point in points]
        curves: Sequence[tuple[str, list[float], str]] = (
            ("p50", [1e3 * point.p50_s for point in points], "dot"),
            ("p99", [1e3 * point.p99_s for point in points], "solid"),
        )
        for kind, values, dash in curves:
            figure.add_scatter(
                name=f"{NAMES[name]} {kind}",
                x=x,
                y=values,
                text=[f"device busy {point.busy:.0%}" for point in points],
                mode="lines+markers",
                line={"color": COLOUR[name], "dash": dash},
            )
    figure.update_yaxes(type="log")
    return figure
