"""Traffic from the histogram ``shapeserve_request_length`` that a Prometheus has scraped.

Who asks Prometheus is given: nothing here opens a connection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic

Form = Literal["direct", "ray"]
"""How it was scraped: from ``/metrics`` of the service, or from the nodes of a Ray cluster."""

NAMES: Final[Mapping[Form, str]] = {
    "direct": "shapeserve_request_length_bucket",
    "ray": "ray_shapeserve_request_length_bucket",
}
_RANGE = re.compile(r"([0-9]+(ms|[smhdwy]))+")
_UNITS_S = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
_LONGEST_S = 100 * _UNITS_S["y"]

Ask = Callable[[str], Any]
"""PromQL -> what ``/api/v1/query`` answers, as plain data."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What one model's histogram says.

    Attributes:
        traffic: lengths and their rows, spread evenly over their place in the histogram.
        model: its name.
        form: how it was scraped.
        resolution: share by which a row can differ from what it is taken for, at most.
        beyond: rows longer than the last edge; they are taken for the last edge.
    """

    traffic: Traffic
    model: str
    form: Form
    resolution: float
    beyond: int


def duration_s(option: str, text: str) -> float:
    """Return the seconds of a PromQL duration.

    Raises:
        ConfigError: it is none, or longer than Prometheus or a clock can count.
    """
    if not _RANGE.fullmatch(text):
        raise ConfigError(f"{option} {text}: it must be a duration such as 24h, 90m or 7d")
    seconds = sum(int(n) * _UNITS_S[unit] for n, unit in re.findall(r"([0-9]+)(ms|[smhdwy])", text))
    if seconds > _LONGEST_S:
        raise ConfigError(f"{option} {text}: it must be at most 100y")
    return seconds


def read_lengths(ask: Ask, range_: str, model: str | None, form: Form | None) -> Lengths:
    """Ask for the lengths of the last ``range_``.

    Args:
        ask: asks Prometheus.
        range_: a PromQL duration, such as ``24h``.
        model: whose rows; None: the only model there is.
        form: how they were scraped; None: whichever is there, the service's own first.

    Raises:
        ConfigError: the range is none, there are no such series or no rows, the model is missing
            or not given among several, or it has several axes.
    """
    duration_s("--range", range_)
    for tried in [form] if form else NAMES:
        series = _series(ask(f"sum by (model, axis, le) (increase({NAMES[tried]}[{range_}]))"))
        if series:
            axes = _of_model(series, model, range_)
            return _lengths(axes, tried, range_)
    names = " or ".join([NAMES[form]] if form else NAMES.values())
    raise ConfigError(
        f"Prometheus has no increase of {names} in the last {range_}; check that it scrapes the "
        "service (its page Status > Targets), and give a longer --range"
    )


_Key = tuple[str, str]  # model, axis


def _series(answer: Any) -> dict[_Key, dict[float, float]]:
    """Return model, axis -> edge -> rows up to it."""
    try:
        if answer["status"] != "success":
            raise ConfigError(f"Prometheus refused the query: {answer['error']}")
        found: dict[_Key, dict[float, float]] = {}
        for item in answer["data"]["result"]:
            labels, (_, value) = item["metric"], item["value"]
            edges = found.setdefault((labels["model"], labels["axis"]), {})
            edges[float(labels["le"])] = float(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"what answered is no Prometheus: its answer has no {error}; give the address under "
            "which Prometheus' own pages are, such as http://127.0.0.1:9090"
        ) from None
    return found


def _of_model(
    series: Mapping[_Key, Mapping[float, float]], model: str | None, range_: str
) -> dict[_Key, Mapping[float, float]]:
    # `none` and models that nobody used in the time are no choice.
    used = {key: edges for key, edges in series.items() if edges.get(math.inf, 0) >= 0.5}
    models = sorted({name for name, _ in used})
    if model is None and len(models) > 1:
        raise ConfigError(
            f"--model is not given, and there are rows of {', '.join(models)}; choose one"
        )
    if model is not None and model not in models:
        raise ConfigError(
            f"--model {model}: no rows of it in the last {range_}; there are rows of "
            f"{', '.join(models) or 'no model'}; give one of those, or a longer --range"
        )
    if not models:
        raise ConfigError(
            f"no rows came in the last {range_}; give a longer --range, or a trace with --trace"
        )
    return {key: edges for key, edges in used.items() if key[0] == (model or models[0])}


def _lengths(axes: Mapping[_Key, Mapping[float, float]], form: Form, range_: str) -> Lengths:
    if len(axes) > 1:
        model, names = next(iter(axes))[0], ", ".join(sorted(axis for _, axis in axes))
        raise ConfigError(
            f"{model} has the axes {names}: a histogram of each does not say which sizes come "
            "together; record traffic (`models[].record` in the configuration) and give it with "
            "--trace"
        )
    (((model, axis), edges),) = axes.items()
    ends = sorted(edges)
    # Rounded before they are told apart: increase() extrapolates, so that counts are fractions.
    up_to = np.maximum.accumulate(np.rint([edges[end] for end in ends]))
    counts = np.diff(up_to, prepend=0.0)
    beyond = int(counts[-1]) if math.isinf(ends[-1]) else 0
    if math.isinf(ends[-1]):
        ends, counts = ends[:-1], counts[:-1]
    sizes, rows = _spread(np.array(ends, np.int64), counts)
    rows[-1] += beyond
    traffic = Traffic((axis,), sizes[rows > 0][:, None], rows[rows > 0], named=True)
    if traffic.rows < 4:
        raise ConfigError(
            f"{model} had {traffic.rows} rows in the last {range_}; at least 4 are needed; give a "
            "longer --range"
        )
    off = ((np.diff(ends, prepend=0) - 1) / ends)[counts > 0]
    return Lengths(traffic, model, form, float(off.max(initial=0.0)), beyond)


def _spread(ends: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every length up to the last edge, and its rows: each place's, spread evenly over it.

    Rows taken for the upper edge would seem to fit sizes that end there without any padding.

    Args:
        ends: upper edges, ascending.
        counts: rows of each place, whole numbers.
    """
    starts = [0, *ends[:-1]]
    rows = np.zeros(int(ends[-1]) + 1)
    for start, end, count in zip(starts, ends, counts, strict=True):
        shares = np.arange(end - start + 1) / (end - start)
        rows[start + 1 : end + 1] = np.diff(np.rint(count * shares))
    return np.arange(1, len(rows)), rows[1:]
