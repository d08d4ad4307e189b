"""The gRPC side of a replica with a fake engine, and what stands before it. No Ray, no sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import BUCKET, FakeEngine

from shapeserve.config import ModelConfig
from shapeserve.metrics import NO_MODEL, Metrics
from shapeserve.protocols import oip_grpc
from shapeserve.protocols.health import ReplicaReport
from shapeserve.protocols.proto import oip_pb2
from shapeserve.serve import grpc_ingress
from shapeserve.serve.frontend import Frontend
from shapeserve.serve.grpc import GrpcMethods

MAX_BODY = 2000


class Call:
    """A call's context as Ray passes it on, and what becomes of it."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = [(key.replace("_", "-"), value) for key, value in metadata.items()]
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.trailing = {"request_id": "rays"}

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [*self._metadata, ("trace-bin", b"\xff")]

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return list(self.trailing.items())

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        self.trailing = dict(trailing_metadata)


class Replica(GrpcMethods):
    """The methods around a frontend with two fake models, or around another one."""

    def __init__(self, frontend: Frontend | None = None) -> None:
        self.metrics = Metrics()
        self.state: Any = "ready"
        self.engines = {
            name: FakeEngine(
                ModelConfig(name=name, path="x", limits={"max_rows": 4}), self.metrics
            ).start()
            for name in ("mini", "other")
        }
        self.frontend = frontend or Frontend(
            self.engines,  # type: ignore[arg-type]
            aliases={"mini": ("ada",)},
            metrics=self.metrics,
            max_body_bytes=MAX_BODY,
            metrics_text=self._unused,
            report=lambda: ReplicaReport("r", self.state, 1, 3),
        )
        self._grpc = self.frontend.grpc

    async def _unused(self) -> str:
        return ""

    async def infer(self, *texts: str, call: Call | None = None, **fields: Any) -> Any:
        """Send texts; return the response, or None where the call failed."""
        raw = b"".join(len(t.encode()).to_bytes(4, "little") + t.encode() for t in texts)
        text = {"name": "text", "datatype": "BYTES", "shape": [len(texts)]}
        message = {"model_name": "mini", "inputs": [text], "raw_input_contents": [raw], **fields}
        call = call or Call()
        body = oip_pb2.ModelInferRequest(**message).SerializeToString()
        answer = await self.ModelInfer(body, grpc_context=call)
        if call.code is not grpc.StatusCode.OK:
            return None
        return oip_grpc.parse(answer.SerializeToString(), oip_pb2.ModelInferResponse)

    def requests(self) -> dict[tuple[str, str, str], float]:
        """Every request counted so far: (model, endpoint, outcome) -> how often."""
        return {
            (s.labels["model"], s.labels["endpoint"], s.labels["outcome"]): s.value
            for s in self.metrics.samples()
            if s.name == "shapeserve_requests_total" and s.value
        }


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.frontend.close()


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(test())  # type: ignore[arg-type]


def test_while_it_drains_calls_are_unavailable(replica: Replica) -> None:
    call = Call()
    replica.frontend.drain(lambda: None)
    assert run(lambda: replica.infer("a", call=call)) is None
    assert call.code is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in call.details


# --- answers --------------------------------------------------------------------------------------


def test_every_row_of_a_request_gets_its_own_vector(replica: Replica) -> None:
    call = Call()
    got = run(lambda: replica.infer("a", "b c", "d e f", call=call, model_name="ada", id="7"))
    assert (got.model_name, got.model_version, got.id) == ("mini", "1", "7")
    (output,) = got.outputs
    assert (output.name, output.datatype, list(output.shape)) == (
        "sentence_embedding",
        "FP32",
        [3, 4],
    )
    rows = np.frombuffer(got.raw_output_contents[0], "<f4").reshape(3, 4)
    np.testing.assert_allclose(rows[:, 3] / rows[:, 0] * 3, [1, 2, 3], rtol=1e-6)
    assert call.trailing["x-shapeserve-modes"] == "compiled=3"
    assert call.trailing["x-shapeserve-buckets"] == f"{BUCKET.label} x3"
    assert replica.requests() == {("mini", "oip_grpc", "ok"): 1}


def test_metadata_and_readiness_of_server_and_model(replica: Replica) -> None:
    async def ask(method: str, request: Any) -> bytes:
        call = Call()
        answer = await getattr(replica, method)(request.SerializeToString(), grpc_context=call)
        assert call.code is grpc.StatusCode.OK
        return bytes(answer.SerializeToString())

    def asked(method: str, request: Any) -> Any:
        response = getattr(oip_pb2, type(request).__name__.replace("Request", "Response"))
        return oip_grpc.parse(run(lambda: ask(method, request)), response)

    assert asked("ServerLive", oip_pb2.ServerLiveRequest()).live is True
    assert asked("ServerReady", oip_pb2.ServerReadyRequest()).ready is True
    replica.state = "warming"
    assert asked("ServerReady", oip_pb2.ServerReadyRequest()).ready is False
    assert asked("ServerMetadata", oip_pb2.ServerMetadataRequest()).name == "shapeserve"
    named = {"name": "ada", "version": "1"}
    model = asked("ModelMetadata", oip_pb2.ModelMetadataRequest(**named))
    assert (model.name, [tensor.name for tensor in model.outputs]) == (
        "mini",
        ["sentence_embedding"],
    )
    assert asked("ModelReady", oip_pb2.ModelReadyRequest(**named)).ready is True
    replica.engines["mini"]._dead = "the device thread died"
    assert asked("ModelReady", oip_pb2.ModelReadyRequest(**named)).ready is False
    assert set(replica.requests()) == {(NO_MODEL, "other", "ok"), (NO_MODEL, "models", "ok")}


# --- refusals -------------------------------------------------------------------------------------

Code = grpc.StatusCode
REFUSED: dict[str, tuple[dict[str, Any], Code, str, str, str]] = {
    "model": ({"model_name": "x"}, Code.NOT_FOUND, "is not served", NO_MODEL, "client_error"),
    "version": ({"model_version": "2"}, Code.NOT_FOUND, "version '2'", NO_MODEL, "client_error"),
    "input": ({"inputs": []}, Code.INVALID_ARGUMENT, "raw_input_contents", "mini", "client_error"),
    "large": ({"id": "x" * MAX_BODY}, Code.RESOURCE_EXHAUSTED, "2000", NO_MODEL, "client_error"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_counted_once_and_ends_with_its_status(
    replica: Replica, name: str
) -> None:
    fields, code, words, model, outcome = REFUSED[name]
    call = Call()
    assert run(lambda: replica.infer("a", call=call, **fields)) is None
    assert call.code is code
    assert words in call.details
    assert replica.requests() == {(model, "oip_grpc", outcome): 1}


@pytest.mark.parametrize(
    ("text", "code", "outcome"),
    [
        (" ", Code.INVALID_ARGUMENT, "client_error"),
        ("full", Code.RESOURCE_EXHAUSTED, "overloaded"),
        ("nan", Code.INTERNAL, "server_error"),
        ("crash", Code.INTERNAL, "server_error"),
        ("die", Code.UNAVAILABLE, "unavailable"),
    ],
)
def test_what_the_engine_refuses_ends_with_its_status(
    replica: Replica, text: str, code: Code, outcome: str
) -> None:
    call = Call()
    assert run(lambda: replica.infer("fine", text, call=call)) is None
    assert call.code is code
    assert replica.requests() == {("mini", "oip_grpc", outcome): 1}
    assert "secret" not in call.details


def test_a_full_queue_says_when_to_come_again(replica: Replica) -> None:
    call = Call()
    run(lambda: replica.infer("full", call=call))
    assert call.trailing["retry-after"] == "2"
    assert call.details == "the queue is full; retry in 2 s"
    assert call.trailing["x-shapeserve-code"] == "queue_full"


def test_too_many_rows_are_refused(replica: Replica) -> None:
    call = Call()
    run(lambda: replica.infer(*"abcde", call=call))
    assert (call.code, call.trailing["x-shapeserve-code"]) == (
        Code.INVALID_ARGUMENT,
        "too_many_rows",
    )


# --- request id, deadline, cancellation -----------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message_id", "expected"),
    [
        ({}, "", "rays"),
        ({}, "theirs", "theirs"),
        ({}, "not fit for a log line", "rays"),
        ({"x_request_id": "mine"}, "theirs", "mine"),
    ],
)
def test_the_request_id_is_told_back_and_in_the_log(
    replica: Replica,
    caplog: pytest.LogCaptureFixture,
    metadata: dict[str, str],
    message_id: str,
    expected: str,
) -> None:
    call = Call(**metadata)
    with caplog.at_level(logging.INFO, "shapeserve.serve"):
        run(lambda: replica.infer("full", call=call, id=message_id))
    assert call.trailing["x-request-id"] == expected
    assert f"request={expected}:" in caplog.text


def test_a_request_id_that_does_not_fit_a_log_line_is_refused(replica: Replica) -> None:
    call = Call(x_request_id="a b")
    assert run(lambda: replica.infer("a", call=call)) is None
    assert (call.code, call.trailing["x-request-id"]) == (Code.INVALID_ARGUMENT, "rays")


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [({"x_request_timeout_seconds": "0.1"}, {}), ({}, {"timeout": 100_000})],
    ids=["metadata", "parameter"],
)
def test_a_deadline_ends_the_wait(
    replica: Replica, metadata: dict[str, str], parameters: dict[str, int]
) -> None:
    call = Call(**metadata)
    given = {name: oip_pb2.InferParameter(int64_param=us) for name, us in parameters.items()}
    assert run(lambda: replica.infer("slow 60", call=call, parameters=given)) is None
    assert call.code is Code.DEADLINE_EXCEEDED
    assert replica.requests() == {("mini", "oip_grpc", "deadline"): 1}


def test_a_client_that_leaves_frees_its_rows_and_is_counted(replica: Replica) -> None:
    async def leave() -> None:
        waiting = asyncio.create_task(replica.infer("slow 60"))
        while not replica.engines["mini"].waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(leave)
    assert replica.engines["mini"].cancelled == 1
    assert replica.requests() == {("mini", "oip_grpc", "cancelled"): 1}


# --- what stands before it, in Ray's servers ------------------------------------------------------


def test_what_a_client_lacks_is_added() -> None:
    added = dict(grpc_ingress.completed("ModelInfer", [("x-request-id", "7")], 1.5))
    assert added == {
        "x-request-id": "7",
        "request_id": "7",
        "application": "shapeserve",
        "x-request-timeout-seconds": "1.500000",
    }


def test_what_a_client_sent_is_kept() -> None:
    sent = [("application", "other"), ("x-request-timeout-seconds", "9"), ("x-request-id", "7")]
    sent.append(("request_id", "8"))
    assert list(grpc_ingress.completed("ModelInfer", sent, 1.5)) == sent


@pytest.mark.parametrize("remaining_s", [None, 1e9])
def test_no_deadline_and_one_in_years_stay_without_a_timeout(remaining_s: float | None) -> None:
    added = dict(grpc_ingress.completed("ModelInfer", [], remaining_s))
    assert added == {"application": "shapeserve"}


def test_a_deadline_that_has_passed_is_still_a_deadline() -> None:
    added = dict(grpc_ingress.completed("ModelInfer", [], 0.0))
    assert float(added["x-request-timeout-seconds"]) > 0


@pytest.mark.parametrize("method", ["ServerLive", "ServerReady"])
def test_health_is_asked_of_the_health_application(method: str) -> None:
    assert dict(grpc_ingress.completed(method, [], None))["application"] == "shapeserve-health"


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:4000", True),
        ("ipv4:127.8.0.1:4000", True),
        ("ipv6:[::1]:4000", True),
        ("ipv6:%5B::1%5D:4000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4000", True),
        ("ipv4:192.0.2.2:4000", False),
        ("ipv4:1.127.0.0:1", False),
        ("ipv6:%5B2001:db8::1%5D:4000", False),
        ("ipv6:%5B::127.0.0.1%5D:4000", False),
        ("", False),
    ],
)
def test_only_loopback_peers_are_of_this_machine(peer: str, local: bool) -> None:
    assert grpc_ingress.is_local(peer) is local


class RaysServer:
    """As much of Ray's ``gRPCGenericServer`` as the ingress uses."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.handlers: dict[str, Any] = {}
        self.service_handler_factory = self._factory

    def _factory(self, service_method: str, streaming_type: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            self.seen.append((service_method, dict(context.invocation_metadata())))
            return request + context.peer().encode()

        return answer

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for method in handlers[0]._method_handlers:
            self.handlers[method] = self.service_handler_factory(
                service_method=method, streaming_type=None
            )


class ServerContext:
    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> None:
        return None

    def time_remaining(self) -> float:
        return 2.0

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise PermissionError(code, details)


@pytest.mark.parametrize("add", [grpc_ingress.add_to_server, grpc_ingress.add_to_local_server])
def test_rays_server_serves_all_methods_with_completed_metadata(add: Any) -> None:
    server = RaysServer()
    factory = server.service_handler_factory
    add(None, server)
    assert server.service_handler_factory == factory  # other services keep Ray's
    names = [name.rpartition("/")[2] for name in server.handlers]
    assert sorted(names) == sorted(
        m.name for m in oip_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    )
    infer = server.handlers["/inference.GRPCInferenceService/ModelInfer"]
    assert run(lambda: infer(b"bytes ", ServerContext("ipv4:127.0.0.1:1"))) == (
        b"bytes ipv4:127.0.0.1:1"
    )
    ((_, metadata),) = server.seen
    assert metadata["application"] == "shapeserve"


def test_a_server_for_this_machine_turns_others_away() -> None:
    ours, everybodys = RaysServer(), RaysServer()
    grpc_ingress.add_to_local_server(None, ours)
    grpc_ingress.add_to_server(None, everybodys)
    stranger = ServerContext("ipv4:192.0.2.7:1")
    for behavior in ours.handlers.values():
        with pytest.raises(PermissionError, match="only this machine"):
            run(lambda behavior=behavior: behavior(b"", stranger))
    assert ours.seen == []
    for behavior in everybodys.handlers.values():
        run(lambda behavior=behavior: behavior(b"", stranger))
    assert len(everybodys.seen) == 6
