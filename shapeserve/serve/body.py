"""Reads request bodies within their limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.requests import ClientDisconnect, Request

from shapeserve.errors import Overloaded, PayloadTooLarge
from shapeserve.protocols import http
from shapeserve.serve.calls import Call

# Of a body over the limit, this many times the limit is read and thrown away, so that the client
# is still there to read the 413; a proxy that meets an unread body resets the connection instead.
DISCARD_FACTOR = 4
DISCARD_S = 5.0
# When bodies are too much: requests take a fraction of it.
RETRY_S = 1.0


class Bodies:
    """How much of request bodies this process holds.

    Args:
        max_bytes: of all of them together.

    Thread rule: one event loop.
    """

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def hold(self, call: Call, size_bytes: int) -> None:
        """Count ``size_bytes`` more of this call's body.

        Raises:
            Overloaded: all the bodies together would be too much.
        """
        if self.held_bytes + size_bytes > self._max_bytes:
            raise Overloaded(
                f"the requests under way hold {self.held_bytes} bytes, {self._max_bytes} is the "
                f"limit; retry in {RETRY_S:.0f} s, or raise `serve.max_inflight_bytes`.",
                code="queue_bytes",
                retry_after_s=RETRY_S,
            )
        self.held_bytes += size_bytes
        call.held_bytes += size_bytes

    def release(self, call: Call) -> None:
        """Forget this call's body."""
        self.held_bytes -= call.held_bytes
        call.held_bytes = 0


async def read_body(
    request: Request, content_length: str | None, max_bytes: int, hold: Callable[[int], None]
) -> bytes:
    """Return the body; keep at most ``max_bytes`` of it in memory, announced or not.

    Args:
        request: whose body is read.
        content_length: as announced, or None.
        max_bytes: the limit of one body.
        hold: told of every part, before it is kept; may raise :class:`Overloaded`.
    """
    stream = request.stream()
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        http.parse_content_length(content_length, max_bytes)
        async for chunk in stream:
            size_bytes += len(chunk)
            if size_bytes > max_bytes:
                raise http.too_large(None, max_bytes)
            hold(len(chunk))
            chunks.append(chunk)
    except (PayloadTooLarge, Overloaded):
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
