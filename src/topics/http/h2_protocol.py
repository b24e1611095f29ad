"""HTTP/2 cleartext with prior knowledge, on the `h2` package: the same exchanges, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from topics.core.errors import InvalidRequest, TopicsError
from topics.http.exchange import Body, Exchange, Headers, Outlet
from topics.http.head import Head
from topics.http.protocol import BODILESS, GZIP_FROM, gzip, too_large

if TYPE_CHECKING:
    from topics.http.app import App

_MAX_STREAMS = 256
_WINDOW = 1 << 20
# Bytes of a stream that wait for flow control before it counts as full.
_MAX_HELD = 64 << 10


class H2Protocol(asyncio.Protocol):
    def __init__(self, app: App) -> None:
        self._app = app
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._streams: dict[int, _Stream] = {}
        self._transport: asyncio.Transport | None = None
        self._closing = False
        self._deadline = 0.0
        self.is_paused = False
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop has transports of its own.
        self._transport = cast("asyncio.Transport", transport)
        self._h2.initiate_connection()
        self._h2.update_settings(
            {
                SettingCodes.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: self._app.settings.max_header_bytes,
            }
        )
        self._h2.increment_flow_control_window(_WINDOW * 15)
        self._moved_on()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for stream in list(self._streams.values()):
            stream.end_exchange()
        self._streams.clear()

    def check_deadline(self, now: float) -> None:
        """Ends a connection that is idle, or whose client neither finishes its request nor takes its answer."""
        transport = self._transport
        if transport is None or now < self._deadline:
            return
        if self.is_paused and not transport.is_closing():
            left = transport.get_write_buffer_size()
            if left >= self._unsent:
                transport.abort()
            self._unsent = left
            self._moved_on()
            return
        if transport.is_closing() or any(stream.waits_for_client for stream in self._streams.values()):
            transport.abort()
        elif not self._streams:
            self.close_when_idle()

    def _moved_on(self) -> None:
        settings = self._app.settings
        is_arriving = any(stream.is_arriving for stream in self._streams.values())
        self._deadline = self._app.now + (settings.body_timeout_ms if is_arriving else settings.idle_timeout_ms) / 1000

    def data_received(self, data: bytes) -> None:
        try:
            events = self._h2.receive_data(data)
        except ProtocolError:
            self.flush()
            if self._transport is not None:
                self._transport.close()
            return
        for event in events:
            self._on_event(event)
        self._moved_on()
        self.flush()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            self._streams[event.stream_id] = _Stream(self, self._app, event.stream_id, event.headers)
        elif isinstance(event, DataReceived):
            stream = self._streams.get(event.stream_id)
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if stream is not None:
                stream.on_data(event.data)
        elif isinstance(event, StreamEnded):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.on_end()
        elif isinstance(event, StreamReset):
            stream = self._streams.pop(event.stream_id, None)
            if stream is not None:
                stream.end_exchange()
        elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
            for stream in list(self._streams.values()):
                stream.pump()
        elif isinstance(event, ConnectionTerminated):
            self.close_when_idle()

    def pause_writing(self) -> None:
        """Who does not take answers is not asked for more; one that takes nothing at all for long is let go."""
        self.is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()
            self._unsent = self._transport.get_write_buffer_size()
        self._moved_on()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._transport is not None:
            self._transport.resume_reading()
        self._moved_on()
        for stream in list(self._streams.values()):
            stream.pump()
        self.flush()

    def send_head(self, stream_id: int, headers: list[tuple[bytes, bytes]], is_all: bool) -> None:
        self._h2.send_headers(stream_id, headers, end_stream=is_all)

    def send_some(self, stream_id: int, body: memoryview, is_last: bool = True) -> int:
        """Sends what flow control allows; says how much. The last byte ends the stream, if it is the last."""
        room = min(self._h2.local_flow_control_window(stream_id), len(body))
        sent = 0
        while sent < room:
            size = min(room - sent, self._h2.max_outbound_frame_size)
            self._h2.send_data(
                stream_id, bytes(body[sent : sent + size]), end_stream=is_last and sent + size == len(body)
            )
            sent += size
        return sent

    def end_stream(self, stream_id: int) -> None:
        with contextlib.suppress(ProtocolError):
            self._h2.end_stream(stream_id)

    def finished(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)
        if self._closing and not self._streams:
            self.close_when_idle()

    def flush(self) -> None:
        if self._transport is not None:
            data = self._h2.data_to_send()
            if data:
                self._transport.write(data)

    def close_when_idle(self) -> None:
        """Says goodbye when the last stream has its answer; what comes meanwhile is told that we are leaving."""
        self._closing = True
        if not self._streams and self._transport is not None:
            with contextlib.suppress(ProtocolError):
                self._h2.close_connection()
            self.flush()
            self._moved_on()
            self._transport.close()


class _Stream:
    """One request on a connection; the channel of its answer."""

    def __init__(self, protocol: H2Protocol, app: App, stream_id: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._protocol = protocol
        self._app = app
        self._id = stream_id
        self._body: list[bytes] = []
        self._size = 0
        self._left: memoryview | None = None
        # Of an answer that goes on: what flow control holds back, and whether its end is wanted.
        self._held = bytearray()
        self._ends = False
        self._is_handled = False
        fields: dict[bytes, bytes] = {}
        for name, value in headers:
            fields[name] = fields[name] + b", " + value if name in fields else value
        method = fields.pop(b":method", b"").decode("latin-1")
        target = fields.pop(b":path", b"/")
        self.exchange = Exchange(app, self, Head(method, target, fields), b"")

    @property
    def is_arriving(self) -> bool:
        return not self._is_handled

    @property
    def waits_for_client(self) -> bool:
        """Whether its request is not whole, or its answer is not taken."""
        return not self._is_handled or self._left is not None or self._ends

    def on_data(self, data: bytes) -> None:
        most = self._app.limits.max_body_bytes
        self._size += len(data)
        if self._is_handled:
            return
        if most and self._size > most:
            self._is_handled = True
            self._body.clear()
            self.exchange.fail(too_large(self._size, most))
            return
        self._body.append(data)

    def on_end(self) -> None:
        if self._is_handled:
            return
        self._is_handled = True
        self.exchange.body = b"".join(self._body)
        self._body.clear()
        if len(self.exchange.head.raw_query) + len(self.exchange.path) > self._app.settings.max_header_bytes:
            self.exchange.fail(InvalidRequest("the request line is too long"))
            return
        self._app.handle(self.exchange)

    def end_exchange(self) -> None:
        """The client has given it up, or is gone."""
        self._left = None
        self._held.clear()
        self.exchange.cancel()

    def send(self, exchange: Exchange, status: int, content_type: bytes, headers: Headers, body: Body) -> None:
        body = b"".join(body) if isinstance(body, list) else body
        if exchange.head.accepts_gzip and len(body) >= GZIP_FROM:
            body = gzip(body)
            headers = (*headers, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"))
        if exchange.method == "HEAD" or status in BODILESS:
            length, body = len(body), b""
        else:
            length = len(body)
        head = [(b":status", b"%d" % status)]
        if status not in BODILESS:
            head += [(b"content-type", content_type), (b"content-length", b"%d" % length)]
        try:
            self._protocol.send_head(self._id, [*head, *headers], is_all=not body)
        except ProtocolError:
            # The client has given this stream up in the same breath.
            self._protocol.finished(self._id)
            return
        if body:
            self._left = memoryview(body)
            self.pump()
        else:
            self._protocol.finished(self._id)
        self._protocol.flush()

    def open(self, exchange: Exchange, content_type: bytes, headers: Headers) -> Outlet:
        head = [(b":status", b"200"), (b"content-type", content_type), *headers]
        with contextlib.suppress(ProtocolError):
            self._protocol.send_head(self._id, head, is_all=False)
        return self

    @property
    def is_full(self) -> bool:
        return len(self._held) >= _MAX_HELD or self._protocol.is_paused

    @property
    def unsent(self) -> int:
        return len(self._held)

    def write(self, data: bytes) -> None:
        if self.exchange.listener is not None:
            self._held += data
            self._pump_held()
            self._protocol.flush()

    def end(self, why: TopicsError | None = None) -> None:
        if self.exchange.listener is not None:
            self.exchange.listener = None
            self._ends = True
            self._pump_held()
            self._protocol.flush()

    def _pump_held(self) -> None:
        if self._held:
            try:
                with memoryview(self._held) as held:
                    sent = self._protocol.send_some(self._id, held, is_last=False)
            except ProtocolError:
                self._held.clear()
                self._protocol.finished(self._id)
                self.end_exchange()
                return
            del self._held[:sent]
        if self._ends and not self._held:
            self._ends = False
            self._protocol.end_stream(self._id)
            self._protocol.finished(self._id)

    def pump(self) -> None:
        if self.exchange.listener is not None or self._ends:
            self._pump_held()
            if self.exchange.listener is not None and not self.is_full:
                self.exchange.listener.on_room()
            return
        if self._left is None:
            return
        try:
            sent = self._protocol.send_some(self._id, self._left)
        except ProtocolError:
            self._left = None
            self._protocol.finished(self._id)
            return
        self._left = self._left[sent:]
        if not self._left:
            self._left = None
            self._protocol.finished(self._id)
