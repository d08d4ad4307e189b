"""Refuses requests with headers that Ray cannot read. Runs in Ray's proxies and replicas.

Ray decodes some header values as UTF-8 before any application sees the request, and answers what it
cannot decode with a plain 500 that nothing counts. ``launch`` names :func:`middlewares` in
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``; on a cluster of your own, set it on every node.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shapeserve.errors import InvalidRequest
from shapeserve.protocols import http

IMPORT_PATH = "shapeserve.serve.header_guard:middlewares"


def middlewares() -> list[Middleware]:
    """Return what Ray puts around its applications."""
    return [Middleware(HeaderGuard)]


class HeaderGuard:
    """Answers 400, naming the header, where a name or a value is not UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        bad = _unreadable(scope) if scope["type"] == "http" else None
        if bad is None:
            await self._app(scope, receive, send)
            return
        error = InvalidRequest(
            f"the header {bad!r} is not UTF-8; send ASCII, or leave it out.", param=bad
        )
        reply = http.error_reply(error, scope["path"])
        response = Response(reply.body, reply.status, reply.headers, reply.media_type)
        await response(scope, receive, send)


def _unreadable(scope: Scope) -> str | None:
    """Return the name of the first header that is not UTF-8."""
    for name, value in scope["headers"]:
        if name.isascii() and value.isascii():  # the rule
            continue
        try:
            (name + value).decode()
        except UnicodeDecodeError:
            return str(name[:40], "ascii", "replace")
    return None
