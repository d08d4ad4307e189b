"""Liveness and readiness: what the replicas said last, and what that makes the service.

A replica that is still warming up cannot answer HTTP (Ray Serve holds its requests back), so
replicas report to a board somewhere else and the board answers for them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from shapeserve.protocols.http import Reply, json_reply

State = Literal["warming", "ready", "draining", "unhealthy", "failed"]
HEARTBEAT_S: Final = 1.0
# Five heartbeats: some may be late on a busy machine, five in a row mean a dead process.
FRESH_S: Final = 5 * HEARTBEAT_S
# How long a silent replica stays in the listing, for whoever looks for the reason.
FORGET_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica says of itself, once per heartbeat.

    Attributes:
        replica: Serve's id of the replica.
        state: ``ready`` only when every required variant is warm and sealed.
        done: warm-up steps finished.
        total: warm-up steps in all; 0 before the plan is known.
        stage: the step under way (``load``, ``compile``, ``verify`` …).
        detail: what of that stage (a bucket, for example), or empty.
        message: why it is unhealthy or failed, or empty.
        in_flight: requests that it is answering.
    """

    replica: str
    state: State
    done: int = 0
    total: int = 0
    stage: str = ""
    detail: str = ""
    message: str = ""
    in_flight: int = 0


class Board:
    """The last report of every replica. Not thread-safe: one event loop owns it.

    Every method takes ``now``, monotonic seconds.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, ReplicaReport]] = {}
        self._draining = False

    def report(self, report: ReplicaReport, now: float) -> None:
        """Keep the report and forget replicas that have long been silent."""
        self._last[report.replica] = (now, report)
        self._last = {k: v for k, v in self._last.items() if now - v[0] < FORGET_S}

    def drain(self, draining: bool) -> None:
        """Say whether the service finishes what it has and stops; then it is not ready."""
        self._draining = draining

    def state(self, now: float) -> str:
        """Return ``ready``, ``draining``, or the best that a live replica reaches.

        ``starting`` before any replica has been heard of, ``silent`` when none is heard any more.
        """
        if self._draining:
            return "draining"
        fresh = {r.state for seen_s, r in self._last.values() if now - seen_s < FRESH_S}
        order = ("ready", "warming", "draining", "unhealthy", "failed")
        best = (state for state in order if state in fresh)
        return next(best, "silent" if self._last else "starting")

    def reports(self, now: float) -> list[tuple[ReplicaReport, float]]:
        """Return what each replica said last, and how many seconds ago, by name."""
        return [
            (report, now - seen_s)
            for seen_s, report in sorted(self._last.values(), key=lambda item: item[1].replica)
            if now - seen_s < FORGET_S
        ]

    def ready(self, now: float) -> Reply:
        """Return 200 while a sealed replica is alive, else 503 with each replica's progress."""
        state = self.state(now)
        replicas: list[dict[str, Any]] = [
            {**asdict(report), "age_s": round(age_s, 3), "fresh": age_s < FRESH_S}
            for report, age_s in self.reports(now)
        ]
        live = [replica for replica in replicas if replica["fresh"]]
        content = {
            "ready": state == "ready",
            "state": state,
            "done": sum(replica["done"] for replica in live),
            "total": sum(replica["total"] for replica in live),
            "in_flight": sum(replica["in_flight"] for replica in live),
            "replicas": replicas,
        }
        return json_reply(content, 200 if state == "ready" else 503)


def live() -> Reply:
    """Return 200: the process answers; whether it can serve is readiness."""
    return json_reply({"live": True})
