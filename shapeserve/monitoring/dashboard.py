"""The Grafana dashboard: what on-call looks at first, then what tuning needs.

One file serves both forms: the variable ``prefix`` says where the names come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shapeserve.monitoring.panels import OVERVIEW, TUNING, VIEW, Panel, Query
from shapeserve.monitoring.rules import FORMS

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24  # Grafana's columns
# The first schema that Grafana 10 writes; later ones migrate it when they load it.
_SCHEMA_VERSION = 38


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    return {
        "annotations": {"list": []},
        "description": "Padding, compiles, fallbacks, queues and warm-up of shapeserve.",
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "links": [],
        "panels": _placed([("Overview", OVERVIEW), ("Tuning", TUNING)]),
        "refresh": "30s",
        "schemaVersion": _SCHEMA_VERSION,
        "tags": ["shapeserve"],
        "templating": {"list": _variables()},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": "shapeserve",
        "uid": "shapeserve",
        "version": 1,
    }


def _placed(rows: Sequence[tuple[str, Sequence[Panel]]]) -> list[dict[str, Any]]:
    """Return rows and panels, numbered, and laid out from left to right."""
    placed: list[dict[str, Any]] = []
    x = y = tallest = 0
    for title, panels in rows:
        y, x = y + tallest, 0
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        y, tallest = y + 1, 0
        for panel in panels:
            if x + panel.width > _WIDTH:
                y, x, tallest = y + tallest, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_panel(panel)})
            x, tallest = x + panel.width, max(tallest, panel.height)
    return placed


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, **_thresholds(panel)}
    if panel.type == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 0,
            "lineWidth": 1,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        }
    return {
        "type": panel.type,
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.type],
        "targets": [_target(panel, i, query) for i, query in enumerate(panel.queries)],
    }


def _thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    return {"thresholds": {"mode": "absolute", "steps": steps}}


def _target(panel: Panel, index: int, query: Query) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": "heatmap" if panel.type == "heatmap" else "time_series",
        "instant": query.instant,
        "range": not query.instant,
    }


_REDUCE = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": _REDUCE,
        "textMode": "auto",
    },
    "bargauge": {
        "displayMode": "gradient",
        "orientation": "horizontal",
        "reduceOptions": _REDUCE,
        "showUnfilled": True,
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "legend": {"show": True},
        "tooltip": {"show": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left"},
    },
}


def _variables() -> list[dict[str, Any]]:
    accepted = "${prefix}rows_accepted_total"
    lengths = VIEW.series("request_length_count")
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "hide": 0,
            "includeAll": False,
            "multi": False,
        },
        _custom(
            "prefix",
            "Scraped",
            {"/metrics": FORMS["metrics"].prefix, "Ray's agents": FORMS["ray"].prefix},
        ),
        _query("model", "Model", f"label_values({accepted}, model)", many=True),
        _query("axis", "Axis", f"label_values({lengths}, axis)"),
        _interval(),
    ]


def _custom(name: str, label: str, choices: dict[str, str]) -> dict[str, Any]:
    options = [
        {"selected": i == 0, "text": text, "value": value}
        for i, (text, value) in enumerate(choices.items())
    ]
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ", ".join(f"{text} : {value}" for text, value in choices.items()),
        "options": options,
        "current": options[0],
        "hide": 0,
        "includeAll": False,
        "multi": False,
    }


def _query(name: str, label: str, query: str, *, many: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "hide": 0,
        "includeAll": many,
        "multi": many,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]} if many else {},
    }


def _interval() -> dict[str, Any]:
    windows = ("1m", "5m", "15m", "1h", "6h")
    options = [{"selected": w == "5m", "text": w, "value": w} for w in windows]
    return {
        "name": "rate",
        "label": "Rates over",
        "type": "interval",
        "query": ",".join(windows),
        "options": options,
        "current": options[1],
        "auto": False,
        "auto_count": 30,
        "auto_min": "10s",
        "refresh": 2,
        "hide": 0,
    }
