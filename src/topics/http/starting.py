"""Before the log is replayed: every request gets 503 `not_ready` and how far it is; health is fine already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from topics.http.health import VERSION

_MAX_HEAD = 32 << 10


class StartingProtocol(asyncio.Protocol):
    """`others` are all connections that came early; there is room for `most` of them."""

    def __init__(self, progress: Callable[[], float], others: set[StartingProtocol], most: int, started: float) -> None:
        self._progress = progress
        self._others = others
        self._most = most
        self._head = b""
        self._started = started
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop has transports of its own.
        self._transport = cast("asyncio.Transport", transport)

        if self._most and len(self._others) >= self._most:
            self._transport.close()
        else:
            self._others.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._others.discard(self)

    def hand_over(self, successor: asyncio.Protocol) -> None:
        """The log is there: who has not been answered yet is served."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            self._transport = None
            self._others.discard(self)
            transport.set_protocol(successor)
            successor.connection_made(transport)
            if self._head:
                successor.data_received(self._head)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._head += data
        if b"\r\n\r\n" not in self._head and len(self._head) < _MAX_HEAD:
            return
        path = self._head.split(b" ", 2)[1:2]
        if path in ([b"/v0/health"], [b"/healthz"]):
            status = b"200 OK"
            body = b'{"status":"starting","version":"%b","uptime_ms":%d,"performance":{"server_total_ms":0.0}}' % (
                VERSION.encode(),
                (time.monotonic() - self._started) * 1000,
            )
        else:
            status = b"503 Service Unavailable"
            body = (
                b'{"error":{"code":"not_ready","message":"the log is being replayed",'
                b'"detail":{"replay_progress":%.3f}}}' % self._progress()
            )
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\n"
            b"connection: close\r\n\r\n%b" % (status, len(body), body)
        )
        self._transport.close()
