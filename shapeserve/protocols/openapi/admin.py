"""The routes of the administrator: what was compiled, which policy serves."""

from __future__ import annotations

from enum import StrEnum

from shapeserve.config import policy_schemas
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
from shapeserve.protocols.openapi.parts import (
    READS,
    Data,
    answer,
    content,
    errors,
    fields,
    get,
    list_of,
    post,
    ref,
    text,
    whole,
    words,
)

ADMIN = "admin"
_SECONDS: Data = {"type": "number", "minimum": 0}
_GUARDED: Data = {
    "security": [{ADMIN: []}],
    "description": "A 404 (405 to a PUT), as if there were no such path, unless "
    "SHAPESERVE_ADMIN_TOKEN is set where the service was started and the request has it.",
}


def paths() -> Data:
    """Return path -> method -> operation."""
    model = [ref("Model", "parameters")]
    record = answer("The record.", content(ref("CompileRecord")))
    states = answer("What each replica serves.", content(ref("PolicyStates")))
    refused = errors("OipError", (400, 404, 500))
    put = post(
        "putPolicy",
        "Give every replica another policy; it is warmed beside the one that serves.",
        content(ref("Policy")),
        {"200": states, **errors("OipError", (404, 405, *READS))},
        model,
    )
    return {
        http.COMPILE: {
            "get": get(
                "compileRecord",
                "What one replica has compiled, and what it serves of that.",
                {"200": record, **refused},
                model,
                **_GUARDED,
            )
        },
        http.POLICY: {
            "get": get(
                "policy",
                "Which policy each replica serves a model with.",
                {"200": states, **refused, **errors("OipError", (503,))},
                model,
                **_GUARDED,
            ),
            "put": {**put, **_GUARDED},
        },
    }


def security_schemes() -> Data:
    """Return how these routes are opened."""
    scheme = {"type": "http", "scheme": "bearer", "description": "SHAPESERVE_ADMIN_TOKEN"}
    return {ADMIN: scheme}


def schemas() -> Data:
    """Return the components that :func:`paths` refers to."""
    return {
        "CompileRecord": _compile_record(),
        "PolicyStates": _policy_states(),
        **policy_schemas("#/components/schemas/{model}"),
    }


def _policy_states() -> Data:
    results = ("serves", "applied", "unchanged", "rejected", "failed", "silent")
    state = fields(
        {
            "replica": text(),
            "result": words(*results),
            "grid": text("Version of the grid that serves now."),
            "policy": {"anyOf": [ref("Policy"), {"type": "null"}]},
            "message": text(),
        }
    )
    return fields(
        {
            "model": text(),
            "replica": text("The one that answers; the first of the list."),
            "grid": text("Its version."),
            "replicas": list_of(state),
            "lasts": text("For how long."),
        }
    )


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
