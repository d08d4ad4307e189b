"""The HTTP side of a replica on a real socket, without Ray: for clients that need one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.requests import Request

from shapeserve.engine import Engine
from shapeserve.metrics import merge_texts
from shapeserve.protocols.health import ReplicaReport
from shapeserve.serve.admin import Guard
from shapeserve.serve.frontend import Frontend


@contextmanager
def serving(
    engines: Mapping[str, Engine], max_body_bytes: int = 1_000_000, guard: Guard | None = None
) -> Iterator[str]:
    """Serve started engines; the value is ``host:port``."""
    metrics = next(iter(engines.values())).metrics

    async def metrics_text() -> str:
        return merge_texts({"r": metrics.text()})

    frontend = Frontend(
        engines,
        aliases={},
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        metrics_text=metrics_text,
        report=lambda: ReplicaReport("r", "ready", 1, 1),
        guard=guard,
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = await frontend(Request(scope, receive))
        await response(scope, receive, send)

    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
        frontend.close()
