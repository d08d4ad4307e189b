"""Our service in Ray's gRPC servers: its methods, and what Ray would not pass on to replicas.

Ray imports this by name (``grpc_servicer_functions``) into its proxies and, with HAProxy, into the
replicas. It wants an ``application`` in the metadata where several applications are deployed, and
drops the client's deadline. Clients know nothing of the first, and rows that nobody waits for
should not run: so a call gets here whatever of both is missing before Ray sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from shapeserve.protocols.http import MAX_TIMEOUT_S
from shapeserve.serve.names import APP, HEALTH_APP

SERVICE = "inference.GRPCInferenceService"
# Those that the health application answers, because the replicas cannot while they warm up.
HEALTH_METHODS = ("ServerLive", "ServerReady")
METHODS = (*HEALTH_METHODS, "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")

TIMEOUT, REQUEST_ID = "x-request-timeout-seconds", "x-request-id"
LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]:", "ipv6:[::ffff:127.")
# A deadline that has passed still has to be above 0 to be one.
MIN_TIMEOUT_S = 0.001

Metadata = Sequence[tuple[str, str | bytes]]
Behavior = Callable[[bytes, Any], Awaitable[bytes]]


def add_to_server(_: object, server: Any) -> None:
    """Serve our methods on a gRPC server of Ray's; messages stay bytes until a replica reads them.

    Args:
        server: Ray's ``gRPCGenericServer``, which lets its own factory answer every method.
    """
    _add(server, lambda behavior: behavior)


def add_to_local_server(_: object, server: Any) -> None:
    """Do the same, for callers on this machine: Ray listens on all interfaces."""
    _add(server, _only_local)


def _add(server: Any, guard: Callable[[Behavior], Behavior]) -> None:
    make = server.service_handler_factory

    def make_ours(service_method: str, streaming_type: Any) -> Any:
        behavior = make(service_method=service_method, streaming_type=streaming_type)
        return guard(_with_metadata(behavior, service_method.rpartition("/")[2]))

    server.service_handler_factory = make_ours
    try:
        handlers = {name: grpc.unary_unary_rpc_method_handler(_unused) for name in METHODS}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    finally:
        server.service_handler_factory = make


def _unused(request: bytes, context: Any) -> bytes:
    raise NotImplementedError("Ray answers instead of this")


def _only_local(behavior: Behavior) -> Behavior:
    async def answer(request: bytes, context: Any) -> bytes:
        if not is_local(context.peer()):
            why = "serve.host lets only this machine in; set it to 0.0.0.0 to let others"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        return await behavior(request, context)

    return answer


def is_local(peer: str) -> bool:
    """Return whether gRPC's name of a caller (``ipv4:127.0.0.1:5``) is of this machine."""
    return peer.replace("%5B", "[").replace("%5D", "]").startswith(LOCAL_PEERS)


def _with_metadata(behavior: Behavior, method: str) -> Behavior:
    async def answer(request: bytes, context: Any) -> bytes:
        sent = context.invocation_metadata() or ()
        metadata = completed(method, tuple(sent), context.time_remaining())
        return await behavior(request, _Context(context, metadata))

    return answer


def completed(method: str, sent: Metadata, remaining_s: float | None) -> Metadata:
    """Return a call's metadata with what is missing in it.

    Args:
        method: last part of its path.
        sent: what the client sent; none of it is replaced.
        remaining_s: until the client's deadline; None if it has none.
    """
    given = dict(sent)
    ours: dict[str, str | bytes] = {
        "application": HEALTH_APP if method in HEALTH_METHODS else APP,
    }
    if remaining_s is not None and remaining_s <= MAX_TIMEOUT_S:
        ours[TIMEOUT] = f"{max(remaining_s, MIN_TIMEOUT_S):.6f}"
    if REQUEST_ID in given:
        ours["request_id"] = given[REQUEST_ID]  # Ray's name, for its logs
    return (*sent, *((key, value) for key, value in ours.items() if key not in given))


class _Context:
    """A call's context with other metadata."""

    def __init__(self, context: Any, metadata: Metadata) -> None:
        self._context = context
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
