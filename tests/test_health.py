"""Readiness as a function of what replicas reported and when."""

import json
from typing import Any

import pytest

from shapeserve.protocols.health import FORGET_S, FRESH_S, Board, ReplicaReport, live


def ready(board: Board, now: float) -> tuple[int, dict[str, Any]]:
    reply = board.ready(now)
    return reply.status, json.loads(reply.body)


def test_live_is_200_with_no_replica_at_all() -> None:
    assert live().status == 200


def test_before_any_report_the_service_is_starting() -> None:
    status, content = ready(Board(), 0.0)
    assert (status, content["state"], content["replicas"]) == (503, "starting", [])


def test_a_warming_replica_is_503_with_its_progress() -> None:
    board = Board()
    board.report(ReplicaReport("a", "warming", 12, 66, "compile", "batch=8,seq=64"), 10.0)
    board.report(ReplicaReport("b", "warming", 3, 66, "load"), 10.0)
    status, content = ready(board, 10.5)
    assert (status, content["state"]) == (503, "warming")
    assert (content["done"], content["total"]) == (15, 132)
    assert content["replicas"][0] == {
        "replica": "a",
        "state": "warming",
        "done": 12,
        "total": 66,
        "stage": "compile",
        "detail": "batch=8,seq=64",
        "message": "",
        "in_flight": 0,
        "age_s": 0.5,
        "fresh": True,
    }


def test_whoever_stops_the_service_sees_what_is_still_answered() -> None:
    board = Board()
    board.report(ReplicaReport("a", "draining", in_flight=3), 0.0)
    board.report(ReplicaReport("b", "draining", in_flight=2), 0.0)
    status, content = ready(board, 1.0)
    assert (status, content["state"], content["in_flight"]) == (503, "draining", 5)


def test_one_sealed_replica_is_enough() -> None:
    board = Board()
    board.report(ReplicaReport("a", "ready", 66, 66), 0.0)
    board.report(ReplicaReport("b", "warming", 3, 66), 0.0)
    assert ready(board, 1.0)[0] == 200


def test_a_silent_replica_stops_counting_and_its_successor_brings_readiness_back() -> None:
    board = Board()
    board.report(ReplicaReport("a", "ready"), 0.0)
    assert ready(board, FRESH_S - 0.01)[0] == 200
    status, content = ready(board, FRESH_S)
    assert (status, content["state"], content["replicas"][0]["fresh"]) == (503, "silent", False)
    board.report(ReplicaReport("b", "ready"), FRESH_S + 1)
    assert ready(board, FRESH_S + 1)[0] == 200


@pytest.mark.parametrize("state", ["unhealthy", "failed"])
def test_an_unhealthy_or_failed_replica_is_not_ready_and_says_why(state: Any) -> None:
    board = Board()
    board.report(ReplicaReport("a", state, message="the device thread is dead"), 0.0)
    status, content = ready(board, 0.0)
    assert (status, content["state"]) == (503, state)
    assert content["replicas"][0]["message"] == "the device thread is dead"


def test_draining_beats_every_ready_replica_until_it_is_taken_back() -> None:
    board = Board()
    board.report(ReplicaReport("a", "ready"), 0.0)
    board.drain(True)
    board.report(ReplicaReport("a", "ready"), 1.0)
    assert (ready(board, 1.0)[0], board.state(1.0)) == (503, "draining")
    board.drain(False)
    assert ready(board, 1.0)[0] == 200


def test_long_dead_replicas_leave_the_listing() -> None:
    board = Board()
    for i in range(1000):
        board.report(ReplicaReport(f"old-{i}", "ready"), 0.0)
    board.report(ReplicaReport("new", "ready"), FORGET_S)
    assert [r["replica"] for r in ready(board, FORGET_S)[1]["replicas"]] == ["new"]
