"""``/ui``: from what the replicas say to a page that loads nothing and runs nothing."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shapeserve import __version__
from shapeserve.metrics import NO_BUCKET
from shapeserve.protocols.health import FRESH_S, ReplicaReport
from shapeserve.protocols.http import Reply
from shapeserve.serve.heatmap import HeatMap, heat_map, waste
from shapeserve.serve.status import COUNTED, ModelStatus, ReplicaStatus, Series

REFRESH_S: Final = 5
EVENTS: Final = 20
"""Recompiles and fallbacks that are listed, the last ones."""
HTML: Final = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Event:
    """One recompile, or the rows of a request that went to the fallback.

    Attributes:
        unix_s: when.
        replica: where.
        what: ``recompile`` or ``fallback``.
        reason: its class, as in the metrics.
        about: how much, in words.
        detail: the compiler's own words; only the administrator is told.
    """

    unix_s: float
    replica: str
    what: str
    reason: str
    about: str
    detail: str = ""

    @property
    def time(self) -> str:
        """When, for people."""
        return f"{datetime.fromtimestamp(self.unix_s, UTC):%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model, all replicas together.

    Attributes:
        name: the model's.
        replicas: each one's id and status.
        map: its grid; None before there is one.
        waste: axis -> share of the executed elements.
        modes: mode, rows, batches and device seconds, those that were used.
        outside: rows answered by the fallback.
        earlier: rows answered in buckets of grids that serve no more.
        accepted: rows.
        dropped: rows that got no result.
        queue_rows: waiting.
        queue_tokens: waiting, padded.
        max_queue_rows: of all replicas.
        fallbacks: reason -> rows.
        recompiles: reason -> compiles on the request path.
        events: the last ones, newest first.
    """

    name: str
    replicas: tuple[tuple[str, ModelStatus], ...]
    map: HeatMap | None
    waste: Mapping[str, float]
    modes: tuple[tuple[str, int, int, float], ...]
    outside: int
    earlier: int
    accepted: int
    dropped: int
    queue_rows: int
    queue_tokens: int
    max_queue_rows: int
    fallbacks: Mapping[str, int]
    recompiles: Mapping[str, int]
    events: tuple[Event, ...]


def status_page(statuses: Sequence[ReplicaStatus], missing: int, *, admin: bool) -> Reply:
    """Return the page of a service.

    Args:
        statuses: of the replicas that answered.
        missing: how many did not.
        admin: whether the reader may see what the compiler said.
    """
    statuses = sorted(statuses, key=lambda status: status.report.replica)
    views = [model_view(name, statuses, admin=admin) for name in _models(statuses)]
    reports = [status.report for status in statuses]
    return _page("status.html", models=views, reports=reports, missing=missing, admin=admin)


def warmup_page(reports: Sequence[tuple[ReplicaReport, float]], state: str) -> Reply:
    """Return the page of a service of which perhaps no replica answers yet.

    Args:
        reports: what each replica said last, and how many seconds ago.
        state: of the service.
    """
    return _page("warmup.html", reports=reports, state=state, fresh_s=FRESH_S)


def model_view(name: str, statuses: Sequence[ReplicaStatus], *, admin: bool) -> ModelView:
    """Put together what all replicas say of one model."""
    replicas = [(s.report.replica, m) for s in statuses for m in s.models if m.model == name]
    sums = {metric: _sum(m.counts.get(metric, {}) for _, m in replicas) for metric in COUNTED}
    variants = [variant for _, model in replicas for variant in model.variants]
    rows, batches, tokens = (sums[f"{n}_total"] for n in ("rows", "batches", "tokens"))
    in_grid = {variant.bucket for variant in variants} | {NO_BUCKET}
    return ModelView(
        name=name,
        replicas=tuple(replicas),
        map=heat_map(variants, rows, batches, tokens),
        waste=waste(tokens),
        modes=_modes(rows, batches, sums["device_seconds_total"]),
        outside=int(sum(n for (_, bucket), n in rows.items() if bucket == NO_BUCKET)),
        earlier=int(sum(n for (_, bucket), n in rows.items() if bucket not in in_grid)),
        accepted=_total(sums["rows_accepted_total"]),
        dropped=_total(sums["rows_dropped_total"]),
        queue_rows=_total(sums["queue_rows"]),
        queue_tokens=_total(sums["queue_tokens"]),
        max_queue_rows=sum(model.max_queue_rows for _, model in replicas),
        fallbacks=_reasons(sums["fallbacks_total"]),
        recompiles=_reasons(sums["recompiles_total"]),
        events=_events(replicas, admin=admin),
    )


def _models(statuses: Iterable[ReplicaStatus]) -> list[str]:
    """Return the names of all models, in the order of the configuration."""
    return [*dict.fromkeys(model.model for status in statuses for model in status.models)]


def _sum(parts: Iterable[Series]) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for series in parts:
        for labels, value in series.items():
            sums[labels] += value
    return dict(sums)


def _total(series: Series) -> int:
    return int(sum(series.values()))


def _reasons(series: Series) -> dict[str, int]:
    """Return reason -> how often, of those that happened."""
    return {reason: int(value) for (reason,), value in series.items() if value}


def _modes(
    rows: Series, batches: Series, seconds: Series
) -> tuple[tuple[str, int, int, float], ...]:
    def of(series: Series, mode: str) -> float:
        return sum(value for (at, _), value in series.items() if at == mode)

    every = dict.fromkeys(mode for mode, _ in batches)
    found = [(m, int(of(rows, m)), int(of(batches, m)), of(seconds, m)) for m in every]
    return tuple(line for line in found if line[1] or line[2])


def _events(replicas: Iterable[tuple[str, ModelStatus]], *, admin: bool) -> tuple[Event, ...]:
    found: list[Event] = []
    for replica, model in replicas:
        for r in model.recompiles:
            detail = f"{r.program} [{r.compile_id}]: {r.guard or 'first compile of this code'}"
            took = f"{r.seconds:.1f} s"
            found.append(Event(r.unix_s, replica, "recompile", r.reason, took, detail))
        for f in model.fallbacks:
            rows = f"{f.rows} row{'s' if f.rows > 1 else ''}"
            found.append(Event(f.unix_s, replica, "fallback", f.reason, rows))
    found.sort(key=lambda event: -event.unix_s)
    return tuple(e if admin else replace(e, detail="") for e in found[:EVENTS])


def _page(template: str, **values: object) -> Reply:
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    page = _templates().get_template(template)
    text = page.render(
        **values,
        style=Markup(_style()),  # ours, and escaped it would be another text than the digest's
        now=now,
        refresh_s=REFRESH_S,
        version=__version__,
    )
    return Reply(200, text.encode(), dict(page_headers()), HTML)


@cache
def page_headers() -> Mapping[str, str]:
    """Return the headers of a page: it loads nothing, runs nothing and is kept nowhere."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("shapeserve.serve"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _style() -> str:
    """Return what stands between the style tags, to the letter: the policy has its digest."""
    return (files("shapeserve.serve") / "templates" / "style.css").read_text(encoding="utf-8")
