"""What operators ask for: metrics, health, this document."""

from __future__ import annotations

from typing import get_args

from shapeserve.protocols import http
from shapeserve.protocols.health import State
from shapeserve.protocols.openapi.admin import ADMIN
from shapeserve.protocols.openapi.parts import (
    Data,
    answer,
    content,
    errors,
    fields,
    get,
    list_of,
    page,
    ref,
    text,
    whole,
    words,
)

_SECONDS: Data = {"type": "number", "minimum": 0}


def paths() -> Data:
    """Return path -> method -> operation."""
    health = content(ref("Readiness"))
    exposition = content(text(), http.PROMETHEUS.partition(";")[0])
    ready = {
        "200": answer("A sealed replica is alive.", health),
        "503": answer("None is; how far each is.", health),
    }
    return {
        http.METRICS: {
            "get": get(
                "metrics",
                "Prometheus text of all replicas.",
                {"200": answer("The series.", exposition), **errors("Error", (400, 500))},
            )
        },
        http.OPENAPI: {
            "get": get(
                "openapi",
                "This document.",
                {
                    "200": answer("OpenAPI 3.1.", content({"type": "object"})),
                    **errors("Error", (400, 500)),
                },
            )
        },
        http.LIVE: {
            "get": get(
                "live",
                "200 as soon as anything answers.",
                {
                    "200": answer("It does.", content(fields({"live": {"const": True}}))),
                    **errors("OipError", (400, 500)),
                },
            )
        },
        http.READY: {
            "get": get(
                "ready",
                "Whether the service can be sent requests.",
                {**ready, **errors("OipError", (400, 500))},
            )
        },
        **_pages(),
    }


def _pages() -> Data:
    status = {"200": page("What the replicas say."), **errors("Error", (400, 500))}
    warmup = {"200": page("What the replicas said last."), **errors("OipError", (400, 500))}
    return {
        http.UI: {
            "get": get(
                "ui",
                "The state of the service, for people.",
                status,
                security=[{}, {ADMIN: []}],
                description="The administrator is also shown the guards behind recompiles.",
            )
        },
        http.WARMUP_UI: {
            "get": get("warmupUi", "How far the warm-up of each replica is, for people.", warmup)
        },
    }


def schemas() -> Data:
    """Return the components that :func:`paths` refers to."""
    replica = fields(
        {
            "replica": text(),
            "state": words(*get_args(State)),
            "done": whole(description="Warm-up steps finished."),
            "total": whole(description="Warm-up steps in all."),
            "stage": text(),
            "detail": text(),
            "message": text(),
            "in_flight": whole(description="Requests that it is answering."),
            "age_s": _SECONDS,
            "fresh": {"type": "boolean"},
        }
    )
    states = (*get_args(State), "starting", "silent")
    return {
        "Readiness": fields(
            {
                "ready": {"type": "boolean"},
                "state": words(*states),
                "done": whole(),
                "total": whole(),
                "in_flight": whole(),
                "replicas": list_of(replica),
            }
        ),
    }
