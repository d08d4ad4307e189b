"""What operators ask for: metrics, health, this document; and the routes of the administrator."""

from __future__ import annotations

from enum import StrEnum
from typing import get_args

from shapeserve.metrics import (
    CaptureOutcome,
    CompilePhase,
    CompileStage,
    EagerFrameReason,
    GraphBreakReason,
    RecompileReason,
    Tier,
)
from shapeserve.protocols import http
from shapeserve.protocols.health import State
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

ADMIN = "admin"
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
        **_admin_paths(),
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


def _admin_paths() -> Data:
    responses = {
        "200": answer("The record.", content(ref("CompileRecord"))),
        **errors("OipError", (400, 404, 500)),
    }
    operation = get(
        "compileRecord",
        "What one replica has compiled, and what it serves of that.",
        responses,
        [ref("Model", "parameters")],
        security=[{ADMIN: []}],
        description="A 404, as if there were no such path, unless SHAPESERVE_ADMIN_TOKEN is set "
        "where the service was started and the request has it.",
    )
    return {http.COMPILE: {"get": operation}}


def security_schemes() -> Data:
    """Return how the routes of the administrator are opened."""
    scheme = {"type": "http", "scheme": "bearer", "description": "SHAPESERVE_ADMIN_TOKEN"}
    return {ADMIN: scheme}


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
        "CompileRecord": _compile_record(),
    }


def _compile_record() -> Data:
    variant = fields(
        {
            "bucket": text(),
            "tier": words(*Tier),
            "wanted": words(*Tier),
            "degraded": {"type": "boolean"},
        }
    )
    stage = {"phase": words(*CompilePhase), "stage": words(*CompileStage)}
    recompile = fields(
        {
            "compile_id": text(),
            "program": text(),
            "reason": words(*RecompileReason),
            "guard": {"type": ["string", "null"], "description": "The guard that failed, in full."},
            "seconds": _SECONDS,
            "unix_s": _SECONDS,
        }
    )
    return fields(
        {
            "model": text(),
            "replica": text(),
            "grid": text("Its version."),
            "variants": list_of(variant),
            "compiles": list_of(fields({**stage, "count": whole(1), "seconds": _SECONDS})),
            "recompiles": _counts(RecompileReason),
            "recent_recompiles": list_of(recompile),
            "graph_breaks": _counts(GraphBreakReason),
            "eager_frames": _counts(EagerFrameReason),
            "captures": _counts(CaptureOutcome),
        }
    )


def _counts(reasons: type[StrEnum]) -> Data:
    """Return the schema of reason -> how often, of those that happened."""
    return fields({str(reason): whole(1) for reason in reasons}, optional=[*reasons])
