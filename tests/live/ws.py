"""A WebSocket client by hand: exact frames out, exact frames in, every wait with a deadline."""

from __future__ import annotations

import base64
import json
import socket
import struct
from types import TracebackType
from typing import Any

import msgspec

from tests.http.server import DEADLINE
from tests.http.wire import request

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
UPGRADE = (
    "connection: Upgrade",
    "upgrade: websocket",
    "sec-websocket-version: 13",
    f"sec-websocket-key: {base64.b64encode(b'0123456789abcdef').decode()}",
)
# What RFC 6455 makes of that key.
ACCEPTED = "BACScCJPNqyz+UBoqMH89VmURoA="


class Piece(msgspec.Struct):
    """One frame of the wire."""

    opcode: int
    payload: bytes
    fin: bool = True

    @property
    def code(self) -> int:
        """The code of a close."""
        assert self.opcode == CLOSE, self
        code: int = struct.unpack("!H", self.payload[:2])[0]
        return code


def encode(opcode: int, payload: bytes, fin: bool = True, masked: bool = True, reserved: int = 0) -> bytes:
    """A frame as a client sends it."""
    head = bytes([(0x80 if fin else 0) | reserved << 4 | opcode])
    bit = 0x80 if masked else 0
    size = len(payload)
    if size < 126:
        head += bytes([bit | size])
    elif size < 1 << 16:
        head += bytes([bit | 126]) + struct.pack("!H", size)
    else:
        head += bytes([bit | 127]) + struct.pack("!Q", size)
    if not masked:
        return head + payload
    mask = b"\x37\xfa\x21\x3d"
    whole = mask * (size // 4 + 1)
    return head + mask + (int.from_bytes(payload) ^ int.from_bytes(whole[:size])).to_bytes(size)


class Socket:
    """One connection."""

    def __init__(
        self, port: int, path: str = "/v0/ws", *headers: str, receive_buffer: int | None = None, tail: bytes = b""
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(DEADLINE)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._raw = b""
        self.socket.sendall(request("GET", path, None, *UPGRADE, *headers) + tail)
        while b"\r\n\r\n" not in self._raw:
            assert self._more(), self._raw
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
        }

    def __enter__(self) -> Socket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._raw += data
        return bool(data)

    def refusal(self) -> dict[str, Any]:
        """The body of an answer that is no handshake."""
        while len(self._raw) < int(self.headers["content-length"]):
            assert self._more()
        error: dict[str, Any] = json.loads(self._raw)["error"]
        return error

    # -- out -------------------------------------------------------------------------------------------------------

    def send(self, **command: Any) -> None:
        self.socket.sendall(encode(TEXT, json.dumps(command).encode()))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    # -- in --------------------------------------------------------------------------------------------------------

    def piece(self) -> Piece:
        found = self.piece_or_end()
        assert found is not None, "the connection ended"
        return found

    def piece_or_end(self) -> Piece | None:
        while (found := self._take()) is None:
            if not self._more():
                assert not self._raw, self._raw[:100]
                return None
        return found

    def _take(self) -> Piece | None:
        raw = self._raw
        if len(raw) < 2:
            return None
        assert not raw[1] & 0x80, "a server masks nothing"
        assert not raw[0] & 0x70, "no extension was agreed on"
        size, start = raw[1] & 0x7F, 2
        if size >= 126:
            form, start = ("!H", 4) if size == 126 else ("!Q", 10)
            if len(raw) < start:
                return None
            size = struct.unpack(form, raw[2:start])[0]
        if len(raw) < start + size:
            return None
        self._raw = raw[start + size :]
        return Piece(raw[0] & 0x0F, raw[start : start + size], bool(raw[0] & 0x80))

    def text(self) -> bytes:
        """The bytes of the next message."""
        piece = self.piece()
        while piece.opcode == PING:
            self.socket.sendall(encode(PONG, piece.payload))
            piece = self.piece()
        assert piece.opcode == TEXT, piece
        assert piece.fin, piece
        return piece.payload

    def message(self, kind: str | None = None) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.text())
        assert kind is None or fields["type"] == kind, f"wanted {kind}, got {fields}"
        return fields

    def until(self, kind: str) -> list[dict[str, Any]]:
        """Everything up to and with the next message of a kind."""
        seen = [self.message()]
        while seen[-1]["type"] != kind:
            seen.append(self.message())
        return seen

    def ask(self, kind: str, **command: Any) -> dict[str, Any]:
        """Sends a command and returns what carries its request_id; what comes in between is dropped."""
        self.send(**command)
        while True:
            message = self.message()
            if message.get("request_id") == command["request_id"]:
                assert message["type"] == kind, message
                return message

    def closed(self) -> int:
        """The code of the close that comes next, behind any messages, and that the connection ends behind it."""
        piece = self.piece()
        while piece.opcode != CLOSE:
            piece = self.piece()
        self.socket.sendall(encode(CLOSE, piece.payload[:2]))
        assert self.piece_or_end() is None
        return piece.code
