"""The charts of a report, as plotly figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shapeserve.amortize import net_gain_s
from shapeserve.evaluate.account import Account
from shapeserve.evaluate.latency import Latency
from shapeserve.evaluate.result import Arm, Evaluation, Scope
from shapeserve.page import BLUE, GREEN, GREY, VERMILION, new_figure

_COLOUR = {
    Arm.EAGER: GREY,
    Arm.COMPILED: BLUE,
    Arm.CAPTURED: GREEN,
    Arm.SPECIALIZED: VERMILION,
}
_CALLS = tuple(10 ** (i / 4) for i in range(4 * 8 + 1))  # 1 to 10^8
_TITLES = {
    Scope.MODULE: "A call of the module: median, up to the 99th percentile",
    Scope.REQUEST: "A request through the engine: median, up to the 99th percentile",
}


def figures(found: Evaluation, sums: Account) -> Iterator[Any]:
    """Yield the figures that the numbers suffice for."""
    for scope, title in _TITLES.items():
        if any(row.scope is scope and row.latency for row in found.rows):
            yield _latencies(found, scope, title)
    yield _first_calls(found)
    if sums.compiling or sums.shapes:
        yield _net_gain(sums)
    if sums.dynamic is not None and sums.special is not None:
        yield _strategies(sums)
    if sums.fusion:
        yield _launches(found, sums)


def _latencies(found: Evaluation, scope: Scope, title: str) -> Any:
    """Points, not bars: a logarithmic axis has no 0 for bars to stand on."""
    figure = new_figure(title, "milliseconds")
    for arm, there in _measured(found, scope):
        medians = [latency.median_s * 1e3 for latency in there.values()]
        beyond = [(t.p99_s - t.median_s) * 1e3 for t in there.values()]
        none = [0.0] * len(there)
        figure.add_scatter(
            name=arm.value,
            x=[*there],
            y=medians,
            error_y={"array": beyond, "arrayminus": none, "symmetric": False},
            mode="markers",
            marker={"color": _COLOUR[arm], "size": 10},
        )
    figure.update_yaxes(type="log")
    figure.update_layout(scattermode="group", scattergap=0.5)
    return figure


def _first_calls(found: Evaluation) -> Any:
    figure = new_figure("The first call of the module (diamond) and the later ones", "seconds")
    for arm, there in _measured(found, Scope.MODULE):
        for name, symbol, seconds in (
            ("first", "diamond", [latency.first.seconds for latency in there.values()]),
            ("later", "circle-open", [latency.median_s for latency in there.values()]),
        ):
            figure.add_scatter(
                name=f"{arm} {name}",
                x=[*there],
                y=seconds,
                mode="markers",
                offsetgroup=arm.value,
                marker={"color": _COLOUR[arm], "size": 10, "symbol": symbol},
            )
    figure.update_yaxes(type="log")
    figure.update_layout(scattermode="group", scattergap=0.5)
    return figure


def _net_gain(sums: Account) -> Any:
    figure = new_figure("Seconds won after so many calls (below 0: lost)", "seconds", "calls")
    for gain in sums.compiling:
        figure.add_scatter(name=gain.what, x=_CALLS, y=[gain.net_s(int(n)) for n in _CALLS])
    for shape in sums.shapes:
        seconds = (shape.compile_s, shape.dynamic_s, shape.specialized_s)
        figure.add_scatter(
            name=f"specialise {shape.name}",
            x=_CALLS,
            y=[net_gain_s(*seconds, int(n)) for n in _CALLS],
            line_dash="dot",
        )
    costs = [gain.cost_s for gain in sums.compiling] + [s.compile_s for s in sums.shapes]
    # Where the lines cross 0 is what matters; far beyond it they hide that.
    figure.update_yaxes(range=[-1.2 * max(costs), 3 * max(costs)], zerolinecolor="#000000")
    figure.update_xaxes(type="log")
    return figure


def _strategies(sums: Account) -> Any:
    figure = new_figure(
        "Seconds from a cold start for so many calls of the mix", "seconds", "calls"
    )
    for strategy in (sums.dynamic, sums.special):
        if strategy is not None:
            totals = [strategy.total_s(int(n)) for n in _CALLS]
            figure.add_scatter(name=strategy.name, x=_CALLS, y=totals)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def _launches(found: Evaluation, sums: Account) -> Any:
    figure = new_figure("Kernels of a call and the time without one", "% of the eager call")
    labels: list[str] = []
    runs: list[str] = []
    busy: list[float] = []
    gaps: list[float] = []
    texts: list[str] = []
    for label, fusion in sums.fusion.items():
        for run, launches in (("eager", fusion.before), (sums.serving.value, fusion.after)):
            labels.append(label)
            runs.append(run)
            busy.append(100 * launches.busy_s / fusion.before.total_s)
            gaps.append(100 * launches.overhead_s / fusion.before.total_s)
            texts.append(f"{launches.kernels} kernels")
    x = [labels, runs]
    figure.add_bar(name="busy", x=x, y=busy, text=texts, marker_color=_COLOUR[Arm.COMPILED])
    figure.add_bar(name="no kernel", x=x, y=gaps, marker_color=_COLOUR[Arm.SPECIALIZED])
    figure.update_layout(barmode="stack")
    return figure


def _measured(found: Evaluation, scope: Scope) -> Iterator[tuple[Arm, dict[str, Latency]]]:
    """Yield each way to run with its latencies by bucket, if there are any."""
    for arm in Arm:
        took = {bucket: found.latency(bucket, arm, scope) for bucket in found.buckets}
        there = {bucket: latency for bucket, latency in took.items() if latency is not None}
        if there:
            yield arm, there
