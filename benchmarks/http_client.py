"""A minimal HTTP/1.1 client on asyncio streams.

The load generator shares the cores with the server that it measures, so it does next to nothing:
requests are prebuilt bytes, connections are kept alive, of the head of an answer only the status
and the length are read.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
# 16 MiB of buffer: an answer of many rows is read in few steps.
_BUFFER_BYTES = 1 << 24
# A server closes what is idle for long (HAProxy after 90 s, others after 5), maybe in the moment in
# which a request is sent there. Clients close theirs earlier; this is aiohttp's default.
_MAX_IDLE_S = 15.0


@dataclass(frozen=True)
class Target:
    """Where requests go: an address, a path, and the model name to put into the body."""

    host: str
    port: int
    path: str
    model: str

    def request(self, body: bytes) -> bytes:
        """Return the bytes of one POST."""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection:
    """One kept-alive connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._used_s = time.monotonic()

    @property
    def usable(self) -> bool:
        """False once the server has closed its side, or may be about to."""
        closed = self._reader.at_eof() or self._writer.is_closing()
        return not closed and time.monotonic() - self._used_s < _MAX_IDLE_S

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Send one request; return the status and the body of its answer."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is None:
            raise ConnectionError("an answer without Content-Length")
        body = await self._reader.readexactly(int(length[1]))
        self._used_s = time.monotonic()
        return int(head[9:12]), body

    def close(self) -> None:
        """Close without waiting."""
        self._writer.close()


class Pool:
    """Connections to one server: the one used last is used first, more are opened as needed."""

    def __init__(self, target: Target, limit: int) -> None:
        self._target = target
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(limit)

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Send one request over a free connection."""
        async with self._slots:
            connection = await self._take()
            try:
                answer = await connection.exchange(request)
            except BaseException:
                connection.close()  # half-read: never to be used again
                raise
            self._idle.append(connection)
            return answer

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        address = (self._target.host, self._target.port)
        return Connection(*await asyncio.open_connection(*address, limit=_BUFFER_BYTES))
