"""A WebSocket on what was an HTTP/1.1 connection, on the `websockets` package's protocol without I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from topics.core.errors import InvalidRequest

if TYPE_CHECKING:
    from topics.http.app import App
    from topics.http.exchange import Exchange

_PING_SECONDS = 20.0
# How long the other side may take to answer a close.
_CLOSE_SECONDS = 5.0


def text_frame(payload: bytes) -> bytes:
    """What a server sends is not masked, so the same frame serves every client."""
    return Frame(Opcode.TEXT, payload).serialize(mask=False)


def _is_text(message: bytes) -> bool:
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True


class Handshake:
    """A client's wish for a WebSocket, checked before anything is answered."""

    def __init__(self, exchange: Exchange, max_size: int) -> None:
        protocol = ServerProtocol()
        headers = Headers(
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers.items()]
        )
        response = protocol.accept(Request(exchange.path, headers))
        if response.status_code != 101:
            assert isinstance(protocol.handshake_exc, InvalidHandshake)
            raise InvalidRequest(f"this is no WebSocket handshake: {protocol.handshake_exc}")
        protocol.send_response(response)
        self.answer = b"".join(protocol.data_to_send())
        # That one would read a request first, which the HTTP parser has read already.
        self.protocol = ServerProtocol(state=State.OPEN, max_size=max_size or None)


class WsProtocol:
    """Frames in and out. `on_message` gets whole text messages; `on_room` and `on_gone` hear of the connection."""

    def __init__(
        self,
        app: App,
        handshake: Handshake,
        transport: asyncio.Transport,
        on_message: Callable[[bytes], None],
        on_room: Callable[[], None],
        on_gone: Callable[[], None],
        on_leave: Callable[[], None],
    ) -> None:
        self._app = app
        self._protocol = handshake.protocol
        self._transport: asyncio.Transport | None = transport
        self._on_message = on_message
        self._on_room = on_room
        self._on_gone = on_gone
        self._on_leave = on_leave
        self._message = bytearray()
        self._is_paused = False
        self._is_held = False
        self._is_reading = True
        self._closes_at: float | None = None
        self._heard = True
        self._pings_at = app.clock() + _PING_SECONDS
        transport.write(handshake.answer)

    # -- out -------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self._is_paused or self._transport is None

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def write(self, data: bytes) -> None:
        """Sends frames that are ready."""
        if self._transport is not None and self._protocol.state is State.OPEN:
            self._transport.write(data)

    def close(self, code: int, reason: str) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
            self._closes_at = self._app.clock() + _CLOSE_SECONDS
            self._flush()

    def hold(self, is_held: bool) -> None:
        """Reads nothing more for a while: too much is being worked on already."""
        self._is_held = is_held
        self._regulate()

    def _regulate(self) -> None:
        """Reads on exactly while the client takes its answers, and not too many are on their way."""
        may_read = not self._is_held and not self._is_paused
        if self._transport is not None and not self._transport.is_closing() and may_read != self._is_reading:
            self._is_reading = may_read
            if may_read:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # -- the connection --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
        self._flush()

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY:
            self.close(CloseCode.UNSUPPORTED_DATA, "messages are JSON text")
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT) and self._protocol.state is State.OPEN:
            self._message += frame.data
            if frame.fin:
                message, self._message = bytes(self._message), bytearray()
                if _is_text(message):
                    self._on_message(message)
                else:
                    self.close(CloseCode.INVALID_DATA, "messages are UTF-8")

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        for data in self._protocol.data_to_send():
            if data:
                transport.write(data)
            else:
                transport.close()
        if self._protocol.close_expected() and self._closes_at is None:
            self._closes_at = self._app.clock() + _CLOSE_SECONDS

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_gone()

    def pause_writing(self) -> None:
        self._is_paused = True
        self._regulate()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._heard = True
        self._regulate()
        self._on_room()

    def check_deadline(self, now: float) -> None:
        """Asked now and then: is the other side still there?"""
        transport = self._transport
        if transport is None:
            return
        if self._closes_at is not None:
            if now >= self._closes_at:
                transport.abort()
        elif now >= self._pings_at and self._is_reading:
            if not self._heard:
                transport.abort()
                return
            self._heard = False
            self._pings_at = now + _PING_SECONDS
            if not self._is_paused:
                self._protocol.send_ping(b"")
                self._flush()

    def close_when_idle(self) -> None:
        self._on_leave()
