"""Reads request bodies within their limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from shapeserve.errors import PayloadTooLarge
from shapeserve.protocols import http

# Of a body over the limit, this many times the limit is read and thrown away, so that the client
# is still there to read the 413; a proxy that meets an unread body resets the connection instead.
DISCARD_FACTOR = 4
DISCARD_S = 5.0


async def read_body(request: Request, content_length: str | None, max_bytes: int) -> bytes:
    """Return the body; keep at most ``max_bytes`` of it in memory, announced or not."""
    stream = request.stream()
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        http.parse_content_length(content_length, max_bytes)
        async for chunk in stream:
            size_bytes += len(chunk)
            if size_bytes > max_bytes:
                raise http.too_large(None, max_bytes)
            chunks.append(chunk)
    except PayloadTooLarge:
        chunks.clear()
        await _discard(stream, DISCARD_FACTOR * max_bytes)
        raise
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes], max_bytes: int) -> None:
    """Read on without keeping anything, up to ``max_bytes`` and ``DISCARD_S`` seconds."""
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_S):
            async for chunk in stream:
                max_bytes -= len(chunk)
                if max_bytes < 0:
                    return
