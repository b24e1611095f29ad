"""HTTP/1.1 on a bare asyncio.Protocol: keep-alive, pipelining answered in order, every buffer bounded.

Plain and flat for speed: three to four times as fast here as any ASGI server (benchmarks/wire.py has figures).
A connection that opens with HTTP/2's preface is handed to `h2_protocol`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

import httptools

from topics.core.errors import InvalidRequest, PayloadTooLarge, Throttled, TopicsError, UnsupportedMediaType
from topics.http.exchange import Body, Exchange, Headers, Outlet
from topics.http.head import END, Head

if TYPE_CHECKING:
    from topics.http.app import App
    from topics.http.h2_protocol import H2Protocol
    from topics.http.ws_protocol import WsProtocol

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
# They have no body, and so nothing that tells of one.
BODILESS = (204, 304)
_WEBSOCKET_PATH = b"/v0/ws"
# How long a client that was refused may go on sending.
_LINGER_MS = 2000
# Headers that must not come twice.
_SINGLE = (b"content-length", b"host", b"transfer-encoding", b"authorization", b"content-type")
_UPPER = frozenset(range(ord("A"), ord("Z") + 1))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpProtocol(asyncio.Protocol):
    __slots__ = (
        *("_app", "_arrived", "_body", "_body_size", "_closing", "_fed", "_head_size", "_headers", "_headers_done"),
        *("_in_message", "_is_lingering", "_is_paused", "_is_pumping", "_is_reading", "_is_started", "_line"),
        *("_owes_continue", "_parser", "_refusal", "_start", "_successor", "_target", "_unsent", "_waiting"),
        *("deadline", "transport"),
    )

    def __init__(self, app: App) -> None:
        self._app = app
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.deadline = 0.0
        # Exchanges in the order of their requests: those that have begun, whose answers go out in that order, and those
        # that wait for their turn.
        self._line: deque[Exchange] = deque()
        self._waiting: deque[Exchange] = deque()
        self._successor: H2Protocol | WsProtocol | None = None
        self._start = b""
        self._is_started = False
        self._is_paused = False
        self._unsent: int | None = None
        self._is_pumping = False
        self._is_reading = True
        self._is_lingering = False
        self._closing = False
        # What came in one piece, from the first byte of a request on.
        self._arrived = b""
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._in_message = False
        self._headers_done = False
        # Bytes of the request line and headers: those that are parsed, and those that the parser may be holding.
        self._head_size = 0
        self._fed = 0
        self._body: list[bytes] = []
        self._body_size = 0
        self._refusal: TopicsError | None = None
        self._owes_continue = False

    # -- the connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop has transports of its own.
        self.transport = cast("asyncio.Transport", transport)
        most = self._app.settings.max_connections
        is_full = most and len(self._app.connections) >= most
        self._app.connections.add(self)
        self._wait(self._app.settings.header_timeout_ms)
        if is_full:
            self._refuse(
                Throttled(
                    f"there are {most} connections, TOPICS_MAX_CONNECTIONS is {most}",
                    limit="TOPICS_MAX_CONNECTIONS",
                    max=most,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._app.connections.discard(self)
        if self._successor is not None:
            self._successor.connection_lost(exc)
        self._closing = True
        self.transport = None
        self._drop_all()

    def _drop_all(self) -> None:
        dropped = [*self._line, *self._waiting]
        self._line.clear()
        self._waiting.clear()
        for exchange in dropped:
            exchange.cancel()

    def _wait(self, ms: int) -> None:
        # The time of the last tick is near enough for a timeout.
        self.deadline = self._app.now + ms / 1000

    def check_deadline(self, now: float) -> None:
        """Called now and then: ends a connection on which nothing happened for too long."""
        transport = self.transport
        if transport is None:
            return
        if self._successor is not None:
            self._successor.check_deadline(now)
        elif now < self.deadline:
            return
        elif self._is_lingering:
            transport.abort()
        elif self._is_paused or transport.is_closing():
            # It has an answer and does not take it.
            left = transport.get_write_buffer_size()
            if self._unsent is not None and left >= self._unsent:
                transport.abort()
            self._unsent = left
            self._wait(self._app.settings.idle_timeout_ms)
        elif self._line:
            return
        elif self._in_message:
            self._refuse(InvalidRequest("the request took too long to arrive"))
        else:
            transport.close()

    def close_when_idle(self) -> None:
        """At shutdown: what is in flight is answered, then the connection ends."""
        self._closing = True
        if self._successor is not None:
            self._successor.close_when_idle()
        elif not self._line and not self._waiting and self.transport is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        self._is_paused = True
        self._unsent = None
        if self._successor is not None:
            self._successor.pause_writing()
        self._wait(self._app.settings.idle_timeout_ms)
        self._regulate()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._successor is not None:
            self._successor.resume_writing()
            return
        self._pump()
        if self._line and self._line[0].listener is not None:
            self._line[0].listener.on_room()

    def _regulate(self) -> None:
        """Reads on exactly while the client takes its answers and not too many requests wait."""
        if self.transport is None or self._successor is not None or self._closing:
            return
        may_read = not self._is_paused and len(self._line) + len(self._waiting) < _MAX_PIPELINED
        if may_read != self._is_reading:
            self._is_reading = may_read
            if may_read:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # -- bytes in --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._pass_on(data):
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
        if not self._in_message:
            data = self._take_known(data)
            self._arrived = data
        while data and not self._closing and not self._pass_on(data):
            data = self._feed(data)
        self._arrived = b""

    def _pass_on(self, data: bytes) -> bool:
        """Whether this connection belongs to another protocol by now, which gets the rest."""
        if self._successor is not None:
            self._successor.data_received(data)
        return self._successor is not None

    def _take_known(self, data: bytes) -> bytes:
        """Handles the requests that are whole and whose heads are known; returns the rest."""
        while data and not self._closing:
            start = data.find(END) + len(END)
            head = self._app.heads.find(data[:start])
            if head is None:
                break
            size = len(data)
            end = start + head.length
            if end > size:
                break
            exchange = Exchange(self._app, self, head, data[start:end])
            data = data[end:] if end < size else b""
            self._handle(exchange)
        return data

    def _feed(self, data: bytes) -> bytes:
        """Gives the parser what came; returns what it did not take."""
        if self._in_message and not self._headers_done:
            self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"the request is malformed: {error}"))
        if self._in_message and not self._headers_done and self._fed > self._app.settings.max_header_bytes:
            self._refuse_head()
        return b""

    def _upgrade(self) -> bytes:
        """A WebSocket is opened here, by a request without a body; anything else is not known, and is as if it had not
        been asked for."""
        headers = self._headers
        is_websocket = (
            headers.get(b"upgrade", b"").lower() == b"websocket"
            and self._parser.get_method() == b"GET"
            and self._target.partition(b"?")[0] == _WEBSOCKET_PATH
            and b"content-length" not in headers
            and b"transfer-encoding" not in headers
        )
        if self._closing or not is_websocket or self._line or self._waiting:
            return self._without_upgrade()
        head = Head("GET", self._target, headers)
        head.wants_websocket = True
        exchange = Exchange(self._app, self, head, b"")
        self._reset()
        self._parser = httptools.HttpRequestParser(self)
        self._arrived = b""
        self._handle(exchange)
        return b""

    def become_websocket(self, exchange: Exchange, make: Callable[[asyncio.Transport], WsProtocol]) -> None:
        """The exchange was a handshake: from here on the connection belongs to another protocol."""
        assert self.transport is not None
        assert self._line[0] is exchange
        self._line.clear()
        self._successor = make(self.transport)

    def _without_upgrade(self) -> bytes:
        """An Upgrade that we do not know is a request like any other, but the parser would not read its body: the head
        is given to another one without that wish."""
        method = self._parser.get_method()
        headers = {name: value for name, value in self._headers.items() if name not in (b"upgrade", b"expect")}
        if b"close" not in headers.pop(b"connection", b"").lower():
            headers[b"connection"] = b"keep-alive"
        else:
            headers[b"connection"] = b"close"
        lines = b"".join([b"%b: %b\r\n" % header for header in headers.items()])
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, self._parser.get_http_version().encode(), lines)
        self._parser = httptools.HttpRequestParser(self)
        self._arrived = b""
        self._reset()
        return head

    def _become_h2(self, data: bytes) -> None:
        from topics.http.h2_protocol import H2Protocol

        assert self.transport is not None
        self._successor = H2Protocol(self._app)
        self._successor.connection_made(self.transport)
        self._successor.data_received(data)

    def eof_received(self) -> bool:
        """The client sends no more, or is gone: nobody can tell. It gets what is on its way; reads do not wait on."""
        if self._successor is not None or not (self._line or self._waiting) or self._line[0].listener is not None:
            return False
        self._closing = True
        for exchange in list(self._line):
            if exchange.hurry is not None:
                exchange.hurry()
        return bool(self._line or self._waiting)

    def _refuse_head(self) -> None:
        most = self._app.settings.max_header_bytes
        self._refuse(InvalidRequest(f"the request line and headers have more than {most} bytes"))

    def _refuse(self, error: TopicsError) -> None:
        """Answers what is no request, and ends the connection: what follows on it cannot be trusted."""
        if self._closing:
            return
        self._closing = True
        exchange = Exchange(self._app, self, Head("GET", b"/", {}), b"")
        self._line.append(exchange)
        exchange.keep_alive = False
        exchange.fail(error)

    # -- the parser's callbacks ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_message = True
        self._wait(self._app.settings.header_timeout_ms)

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + 4
        if self._headers_done:
            # A trailer: it counts, and is dropped; nothing that we look at may come behind the body.
            if self._head_size > self._app.settings.max_header_bytes:
                self._refuse_head()
            return
        name = name.lower()
        headers = self._headers
        if name in headers:
            if name in _SINGLE:
                self._refusal = InvalidRequest(f"the header {name.decode('latin-1')} appears twice")
            headers[name] += b", " + value
        elif len(headers) >= _MAX_HEADERS:
            self._refusal = InvalidRequest(f"the request has more than {_MAX_HEADERS} headers")
        else:
            headers[name] = value

    def on_headers_complete(self) -> None:
        self._headers_done = True
        if self._head_size > self._app.settings.max_header_bytes:
            self._refuse_head()
            return
        headers = self._headers
        version = self._parser.get_http_version()
        refusal = self._refusal or self._check_framing(headers, version)
        if refusal is not None:
            self._refuse(refusal)
        elif b"expect" in headers and version == "1.1":
            if headers[b"expect"].lower() != b"100-continue":
                self._refuse(InvalidRequest("expect must be 100-continue"))
            else:
                self._owes_continue = True
                self._continue()

    def _continue(self) -> None:
        """Asks for the body of a client that waits to be asked, once all before it is answered."""
        if self._owes_continue and not self._line and not self._waiting and self.transport is not None:
            self._owes_continue = False
            self.transport.write(_CONTINUE)

    def _check_framing(self, headers: dict[bytes, bytes], version: str) -> TopicsError | None:
        """Where a request ends must be beyond doubt; what two servers may read differently is refused."""
        if version not in ("1.0", "1.1"):
            return InvalidRequest(f"HTTP/{version} is not spoken here; HTTP/1.1 and HTTP/2 are")
        if b"host" not in headers and version == "1.1":
            return InvalidRequest("the header host is required")
        if b"transfer-encoding" in headers:
            if b"content-length" in headers:
                return InvalidRequest("content-length and transfer-encoding exclude each other")
            if headers[b"transfer-encoding"].lower() != b"chunked":
                return InvalidRequest("transfer-encoding must be chunked")
        elif b"content-length" in headers:
            most = self._app.settings.limits.max_body_bytes
            length = headers[b"content-length"]
            if most and length.isdigit() and int(length[:20]) > most:
                return too_large(int(length[:20]), most)
        return None

    def on_body(self, data: bytes) -> None:
        if self._closing:
            return
        self._body_size += len(data)
        most = self._app.settings.limits.max_body_bytes
        if most and self._body_size > most:
            self._body.clear()
            self._refuse(too_large(self._body_size, most))
            return
        self._wait(self._app.settings.body_timeout_ms)
        self._body.append(data)

    def on_message_complete(self) -> None:
        parser = self._parser
        method = parser.get_method().decode("ascii")
        if self._closing or (parser.should_upgrade() and method != "CONNECT"):
            return
        head = Head(method, self._target, self._headers)
        head.keep_alive = method != "CONNECT" and parser.should_keep_alive()
        head.is_old = parser.get_http_version() == "1.0"
        body = self._body
        exchange = Exchange(self._app, self, head, body[0] if len(body) == 1 else b"".join(body))
        self._reset()
        if not head.keep_alive:
            self._closing = True
        self._handle(exchange)
        arrived, self._arrived = self._arrived, b""
        if arrived and head.keep_alive:
            self._remember(arrived, exchange)

    def _remember(self, data: bytes, exchange: Exchange) -> None:
        """Remembers the head of a request that arrived alone and whole, if its bytes alone say what it is: they end
        where its body begins, and nothing in them would be different the next time."""
        body = exchange.body
        end = data.find(END) + len(END)
        is_plain = b"transfer-encoding" not in exchange.headers and b"expect" not in exchange.headers
        if is_plain and data[end:] == body and data[0] in _UPPER:
            exchange.head.length = len(body)
            self._app.heads.remember(data[:end], exchange.head)

    def _handle(self, exchange: Exchange) -> None:
        self._wait(self._app.settings.idle_timeout_ms)
        if self._line or self._waiting or self._is_paused:
            self._waiting.append(exchange)
            self._pump()
        else:
            self._line.append(exchange)
            self._app.handle(exchange)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begins what may begin and sends what may be sent, until nothing changes. A loop, because each answer may let
        the next request begin, and that one may be answered at once."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._begin_next() or self._send_ready():
                pass
        finally:
            self._is_pumping = False
        self._continue()
        self._regulate()

    def _begin_next(self) -> bool:
        """Writes to topics may overlap: the log's order is theirs. All else waits until what was before is answered."""
        if not self._waiting or self._is_paused:
            return False
        exchange = self._waiting[0]
        overlaps = self._app.overlaps(exchange)
        if self._line and not (overlaps and self._app.overlaps(self._line[-1])):
            return False
        self._line.append(self._waiting.popleft())
        self._app.handle(exchange)
        return True

    def send(self, exchange: Exchange, status: int, content_type: bytes, headers: Headers, body: Body) -> None:
        """An exchange has its answer; it goes out when those before it are out."""
        head = exchange.head
        line = self._line
        if (
            body.__class__ is bytes
            and not headers
            and len(body) < GZIP_FROM
            and len(line) == 1
            and line[0] is exchange
            and not self._waiting
            and not self._closing
            and not self._owes_continue
            and not head.is_old
            and head.method != "HEAD"
            and self.transport is not None
        ):
            # Small, and alone on its connection, as most are: out with it.
            line.clear()
            self.transport.write(_HEADS[status] % (content_type, len(body)) + body)
            return
        parts = body if isinstance(body, list) else [body]
        length = sum(map(len, parts))
        if (
            not headers
            and not head.accepts_gzip
            and len(line) == 1
            and line[0] is exchange
            and not self._waiting
            and not self._closing
            and not self._owes_continue
            and not head.is_old
            and head.method != "HEAD"
            and self.transport is not None
        ):
            # Large, and alone.
            line.clear()
            self.transport.writelines([_HEADS[status] % (content_type, length), *parts])
            return
        if head.accepts_gzip and length >= GZIP_FROM:
            packed = gzip(b"".join(parts))
            parts, length = [packed], len(packed)
            headers = (*headers, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"))
        extra = b"".join([b"%b: %b\r\n" % header for header in headers])
        if not exchange.keep_alive:
            extra += b"connection: close\r\n"
        elif head.is_old:
            extra += b"connection: keep-alive\r\n"
        if status in BODILESS:
            start = b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, HTTPStatus(status).phrase.encode(), extra)
        else:
            start = _HEADS[status][:-2] % (content_type, length) + extra + b"\r\n"
        exchange.reply = [start] if head.method == "HEAD" or status in BODILESS else [start, *parts]
        if line and exchange is line[0]:
            self._pump()

    def open(self, exchange: Exchange, content_type: bytes, headers: Headers) -> Outlet:
        """Begins an answer that goes on. It is the only one: a request that is no write waits for all before it."""
        assert self._line[0] is exchange
        assert self.transport is not None
        is_chunked = not exchange.head.is_old
        head = [b"HTTP/1.1 200 OK", b"content-type: " + content_type, *[b"%b: %b" % header for header in headers]]
        head.append(b"transfer-encoding: chunked" if is_chunked else b"connection: close")
        exchange.keep_alive = exchange.keep_alive and is_chunked
        self.transport.write(b"\r\n".join([*head, b"", b""]))
        return _Stream(self, exchange, is_chunked)

    @property
    def is_full(self) -> bool:
        return self._is_paused or self.transport is None

    def end_stream(self, exchange: Exchange, last: bytes) -> None:
        if exchange.listener is not None:
            exchange.listener = None
            exchange.reply = [last]
            self._pump()

    def _send_ready(self) -> bool:
        """Sends the answers at the head of the line."""
        line = self._line
        transport = self.transport
        if transport is None or not line or line[0].reply is None:
            return False
        out: list[bytes | memoryview] = []
        is_last = False
        while line and line[0].reply is not None and not is_last:
            exchange = line.popleft()
            out += exchange.reply or ()
            is_last = not exchange.keep_alive or (self._closing and not line and not self._waiting)
        transport.writelines(out)
        if is_last:
            self._closing = True
            self._drop_all()
            self._leave(transport)
            return False
        return True

    def _leave(self, transport: asyncio.Transport) -> None:
        """Ends the connection. A client that is still sending would lose the answer to a reset: it is heard out, for a
        moment."""
        if self._in_message and transport.can_write_eof():
            self._is_lingering = True
            self._is_paused = False
            transport.write_eof()
            transport.resume_reading()
            self._wait(_LINGER_MS)
        else:
            transport.close()


class _Stream:
    """The outlet of a connection, in chunks; an old client reads until the connection ends."""

    __slots__ = ("_exchange", "_is_chunked", "_protocol")

    def __init__(self, protocol: HttpProtocol, exchange: Exchange, is_chunked: bool) -> None:
        self._protocol = protocol
        self._exchange = exchange
        self._is_chunked = is_chunked

    @property
    def is_full(self) -> bool:
        return self._protocol.is_full

    @property
    def unsent(self) -> int:
        transport = self._protocol.transport
        return transport.get_write_buffer_size() if transport is not None else 0

    def write(self, data: bytes) -> None:
        transport = self._protocol.transport
        if transport is not None and self._exchange.listener is not None:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self, why: TopicsError | None = None) -> None:
        self._protocol.end_stream(self._exchange, b"0\r\n\r\n" if self._is_chunked else b"")


def too_large(size: int, most: int) -> PayloadTooLarge:
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
        raise too_large(len(plain), most)
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
