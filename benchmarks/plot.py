"""The plot of one result: latency against the offered rate, and the rates reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.arms import OFFLINE_ARMS, SERVER_ARMS
from benchmarks.report import MANY_CLIENTS, MANY_ROWS, Result, headline, open_loop_names, value


def write_plot(result: Result, path: Path) -> None:
    """Write a PNG."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), constrained_layout=True)
    servers = [arm for arm in result["arms"] if arm in SERVER_ARMS]
    _latency(axes[0][0], result, servers)
    _bars(axes[0][1], result, servers, ("scenarios", MANY_CLIENTS, "requests_per_s"))
    axes[0][1].set_title("32 clients x 1 text: requests/s")
    _bars(axes[1][0], result, servers, ("scenarios", MANY_ROWS, "rows_per_s"))
    axes[1][0].set_title("4 clients x 32 texts: rows/s")
    offline = [arm for arm in result["arms"] if arm in OFFLINE_ARMS]
    _bars(axes[1][1], result, offline, ("rows_per_s",))
    axes[1][1].set_title("offline: rows/s")
    figure.suptitle(headline(result), fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _latency(axis: Axes, result: Result, arms: list[str]) -> None:
    for arm in arms:
        scenarios = result["arms"][arm].get("scenarios", {})
        names = [name for name in open_loop_names(result) if "p99_ms" in scenarios.get(name, {})]
        if not names:
            continue
        points: list[dict[str, Any]] = [scenarios[name] for name in names]
        rates = [point["rate_per_s"] for point in points]
        (line,) = axis.loglog(rates, [p["p99_ms"] for p in points], marker="o", label=arm)
        axis.loglog(rates, [p["p50_ms"] for p in points], linestyle=":", color=line.get_color())
        axis.legend(fontsize=8)
    offered = result["settings"]["rates"]
    axis.set_xscale("log")
    axis.set_xticks(offered, [f"{rate:g}" for rate in offered])
    axis.minorticks_off()
    axis.set(xlabel="offered requests/s", ylabel="ms", title="open loop: p99 (solid), p50 (dotted)")


def _bars(axis: Axes, result: Result, arms: list[str], keys: tuple[str, ...]) -> None:
    reached = {arm: rate for arm in arms if (rate := value(result, arm, *keys)) is not None}
    bars = axis.barh(list(reached), list(reached.values()))
    axis.bar_label(bars, fmt="%.1f", padding=3)
    axis.invert_yaxis()
