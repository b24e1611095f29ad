"""HTTP/1.1 on a bare asyncio.Protocol: keep-alive, pipelining answered in order, every buffer bounded.

Plain and flat for speed: three to four times as fast here as any ASGI server (benchmarks/wire.py has figures).
A connection that opens with HTTP/2's preface is handed to `h2_protocol`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

import httptools

from topics.core.errors import InvalidRequest, PayloadTooLarge, TopicsError, UnsupportedMediaType
from topics.http.exchange import Exchange, Headers

if TYPE_CHECKING:
    from topics.http.app import App

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Requests of one connection that may wait for their turn; past that nothing more is read from it.
_MAX_PIPELINED = 64
_MAX_HEADERS = 100
GZIP_FROM = 1024
_HEADS = {
    status.value: b"HTTP/1.1 %d %b\r\ncontent-type: %%b\r\ncontent-length: %%d\r\n\r\n"
    % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpProtocol(asyncio.Protocol):
    __slots__ = (
        *("_app", "_body", "_body_size", "_closing", "_head_size", "_headers", "_headers_done", "_is_paused"),
        *("_is_started", "_line", "_parser", "_refusal", "_start", "_successor", "_target", "deadline", "transport"),
    )

    def __init__(self, app: App) -> None:
        self._app = app
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.deadline = 0.0
        # Exchanges in the order of their requests; the first ones that are answered go out.
        self._line: deque[Exchange] = deque()
        self._successor: asyncio.Protocol | None = None
        self._start = b""
        self._is_started = False
        self._is_paused = False
        self._closing = False
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._headers_done = False
        self._head_size = 0
        self._body: list[bytes] = []
        self._body_size = 0
        self._refusal: TopicsError | None = None

    # -- the connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop has transports of its own.
        self.transport = cast("asyncio.Transport", transport)
        self._app.connections.add(self)
        self._wait(self._app.settings.header_timeout_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        self._app.connections.discard(self)
        if self._successor is not None:
            self._successor.connection_lost(exc)
        self._closing = True
        self.transport = None
        for exchange in self._line:
            exchange.cancel()
        self._line.clear()

    def _wait(self, ms: int) -> None:
        # The time of the last tick is near enough for a timeout.
        self.deadline = self._app.now + ms / 1000

    def check_deadline(self, now: float) -> None:
        """Called now and then: closes a connection on which nothing happened for too long."""
        if now >= self.deadline and not self._line and self.transport is not None and self._successor is None:
            if self._head_size or self._headers_done:
                self._refuse(InvalidRequest("the request took too long to arrive"))
            else:
                self.transport.close()

    @property
    def is_idle(self) -> bool:
        return not self._line and not self._head_size and not self._headers_done and self._successor is None

    def close_when_idle(self) -> None:
        """At shutdown: what is in flight is answered, then the connection ends."""
        self._closing = True
        if self._successor is not None:
            closer = getattr(self._successor, "close_when_idle", None)
            if closer is not None:
                closer()
        elif not self._line and self.transport is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        self._is_paused = True
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self.transport is not None and not self._is_paused and len(self._line) < _MAX_PIPELINED:
            self.transport.resume_reading()

    # -- bytes in --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._successor is not None:
            self._successor.data_received(data)
            return
        if not self._is_started:
            data = self._start + data
            if _PREFACE.startswith(data[: len(_PREFACE)]):
                if len(data) < len(_PREFACE):
                    self._start = data
                    return
                self._become_h2(data)
                return
            self._start = b""
            self._is_started = True
        if self._closing:
            return
        if not self._headers_done:
            if not self._head_size:
                self._wait(self._app.settings.header_timeout_ms)
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(InvalidRequest("this connection cannot be upgraded"))
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"the request is malformed: {error}"))
        else:
            if not self._headers_done and self._head_size > self._app.settings.max_header_bytes and not self._closing:
                self._refuse_head()

    def _become_h2(self, data: bytes) -> None:
        from topics.http.h2_protocol import H2Protocol

        assert self.transport is not None
        self._successor = H2Protocol(self._app)
        self._successor.connection_made(self.transport)
        self._successor.data_received(data)

    def eof_received(self) -> bool:
        return False

    def _refuse_head(self) -> None:
        most = self._app.settings.max_header_bytes
        self._refuse(InvalidRequest(f"the request line and headers have more than {most} bytes"))

    def _refuse(self, error: TopicsError) -> None:
        """Answers what is no request, and ends the connection: what follows on it cannot be trusted."""
        if self._closing:
            return
        self._closing = True
        exchange = self._exchange("GET", b"/")
        exchange.is_started = True
        exchange.keep_alive = False
        exchange.fail(error)

    # -- the parser's callbacks ------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        headers = self._headers
        if name in headers:
            if name in (b"content-length", b"host", b"transfer-encoding", b"authorization", b"content-type"):
                self._refusal = InvalidRequest(f"the header {name.decode('latin-1')} appears twice")
            headers[name] += b", " + value
        elif len(headers) >= _MAX_HEADERS:
            self._refusal = InvalidRequest(f"the request has more than {_MAX_HEADERS} headers")
        else:
            headers[name] = value

    def on_headers_complete(self) -> None:
        self._headers_done = True
        headers = self._headers
        limits = self._app.settings.limits
        if (
            self._head_size > self._app.settings.max_header_bytes
            and len(self._target) + sum([len(name) + len(value) for name, value in headers.items()])
            > self._app.settings.max_header_bytes
        ):
            self._refusal = InvalidRequest(
                f"the request line and headers have more than {self._app.settings.max_header_bytes} bytes"
            )
        if b"transfer-encoding" in headers:
            if b"content-length" in headers:
                self._refusal = InvalidRequest("content-length and transfer-encoding exclude each other")
            elif headers[b"transfer-encoding"].lower() != b"chunked":
                self._refusal = InvalidRequest("transfer-encoding must be chunked")
        elif b"content-length" in headers and limits.max_body_bytes:
            length = headers[b"content-length"]
            if length.isdigit() and int(length[:20]) > limits.max_body_bytes:
                self._refusal = _too_large(int(length[:20]), limits.max_body_bytes)
        if b"host" not in headers and self._parser.get_http_version() == "1.1":
            self._refusal = InvalidRequest("the header host is required")
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        if b"expect" in headers:
            if headers[b"expect"].lower() != b"100-continue":
                self._refuse(InvalidRequest("expect must be 100-continue"))
            elif self.transport is not None and not self._line:
                self.transport.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        if self._closing:
            return
        self._body_size += len(data)
        most = self._app.settings.limits.max_body_bytes
        if most and self._body_size > most:
            self._body.clear()
            self._refuse(_too_large(self._body_size, most))
            return
        self._wait(self._app.settings.body_timeout_ms)
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._closing:
            return
        method = self._parser.get_method().decode("ascii")
        exchange = self._exchange(method, self._target)
        exchange.keep_alive = self._parser.should_keep_alive()
        body = self._body
        exchange.body = body[0] if len(body) == 1 else b"".join(body)
        self._reset()
        if not exchange.keep_alive:
            self._closing = True
        self._wait(self._app.settings.idle_timeout_ms)
        self._advance()
        if len(self._line) >= _MAX_PIPELINED and self.transport is not None:
            self.transport.pause_reading()

    def _exchange(self, method: str, target: bytes) -> Exchange:
        exchange = Exchange(self._app, self, method, target, self._headers, b"")
        self._line.append(exchange)
        return exchange

    # -- answers ---------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Starts what may start. Writes to topics may overlap: the log's order is theirs; all else waits its turn."""
        line = self._line
        if len(line) == 1:
            self._begin(line[0])
            return
        for exchange in list(line):
            if not exchange.is_started:
                if exchange is not line[0] and not self._app.overlaps(exchange):
                    return
                self._begin(exchange)
            if not exchange.answered and not self._app.overlaps(exchange):
                return

    def _begin(self, exchange: Exchange) -> None:
        exchange.is_started = True
        if not exchange.answered:
            self._app.handle(exchange)

    def send(self, exchange: Exchange, status: int, content_type: bytes, headers: Headers, body: bytes) -> None:
        """An exchange has its answer; it goes out when those before it are out."""
        accepts = exchange.headers.get(b"accept-encoding")
        if accepts is not None and len(body) >= GZIP_FROM and b"gzip" in accepts:
            body = gzip(body)
            headers = (*headers, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"))
        if not headers and exchange.keep_alive:
            head = _HEADS[status] % (content_type, len(body))
        else:
            extra = b"".join([b"%b: %b\r\n" % header for header in headers])
            if not exchange.keep_alive:
                extra += b"connection: close\r\n"
            head = _HEADS[status][:-2] % (content_type, len(body)) + extra + b"\r\n"
        exchange.reply = [head] if exchange.method == "HEAD" or status == 204 else [head, body]
        if exchange is self._line[0]:
            self._send_ready()

    def _send_ready(self) -> None:
        """Sends the answers at the head of the line."""
        line = self._line
        transport = self.transport
        if transport is None:
            return
        out: list[bytes] = []
        ended = False
        while line and line[0].reply is not None:
            exchange = line.popleft()
            out += exchange.reply or ()
            if not exchange.keep_alive or (self._closing and not line):
                ended = True
                break
        transport.writelines(out)
        if ended:
            self._closing = True
            for exchange in line:
                exchange.cancel()
            line.clear()
            transport.close()
        elif line:
            if not line[0].is_started:
                self._advance()
            if len(line) == _MAX_PIPELINED - 1:
                self._resume_reading()


def _too_large(size: int, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body has {size} bytes or more, TOPICS_MAX_BODY_BYTES is {most}")


def gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(body) + packer.flush()


def gunzip(body: bytes, most: int) -> bytes:
    """Unpacks a body, but not beyond the limit that it would have had unpacked."""
    unpacker = zlib.decompressobj(31)
    try:
        plain = unpacker.decompress(body, most + 1 if most else 0)
    except zlib.error:
        raise InvalidRequest("the body is not valid gzip") from None
    if most and len(plain) > most:
        raise _too_large(len(plain), most)
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequest("the body is not one whole gzip stream")
    return plain


def decode_body(exchange: Exchange, most: int) -> bytes:
    """The body as it was before its content encoding."""
    encoding = exchange.headers.get(b"content-encoding")
    if encoding is None or encoding.lower() == b"identity":
        return exchange.body
    if encoding.lower() in (b"gzip", b"x-gzip"):
        return gunzip(exchange.body, most)
    raise UnsupportedMediaType(f"content-encoding {encoding.decode('latin-1')!r:.100} is not known; gzip is")
