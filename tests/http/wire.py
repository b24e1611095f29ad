"""HTTP/1.1 by hand: exact bytes out, exact bytes in, every wait with a deadline."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from types import TracebackType
from typing import Any

import msgspec

from tests.http.server import DEADLINE


class Reply(msgspec.Struct):
    """One answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a refusal."""
        code: str = self.json()["error"]["code"]
        return code


class Wire:
    """A connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Ends the connection the hard way: the other side learns that nobody waits for anything."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_what_fits(self, data: bytes) -> None:
        """Sends to a peer that may not want all of it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def read_head(self) -> tuple[int, dict[str, str]]:
        """A status line and headers."""
        while b"\r\n\r\n" not in self._buffer:
            assert self._more(), f"the connection ended in the middle of a head: {self._buffer!r}"
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1", first
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            assert name.lower() not in headers, f"{name} appears twice"
            headers[name.lower()] = value.strip()
        return int(status), headers

    def read(self, method: str = "GET") -> Reply:
        """The next answer."""
        status, headers = self.read_head()
        length = 0 if method == "HEAD" or status in (100, 204) else int(headers["content-length"])
        while len(self._buffer) < length:
            assert self._more(), "the connection ended in the middle of a body"
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return Reply(status, headers, body)

    def ask(self, data: bytes, method: str = "GET") -> Reply:
        self.send(data)
        return self.read(method)

    def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        while self._more():
            pass
        data, self._buffer = self._buffer, b""
        return data

    @property
    def is_ended(self) -> bool:
        """Whether the server has closed, and said nothing more before."""
        return self.read_to_end() == b""


def request(
    method: str, path: str, body: bytes | None = None, *headers: str, version: str = "1.1", host: str | None = "test"
) -> bytes:
    """The bytes of a request; a body brings its length and type along."""
    lines = [f"{method} {path} HTTP/{version}"]
    if host is not None:
        lines.append(f"host: {host}")
    if body is not None:
        lines += [f"content-length: {len(body)}", "content-type: application/json"]
    lines += headers
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def chunked(*chunks: bytes) -> bytes:
    return b"".join([b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""]])


def record(data: object) -> bytes:
    """The body of a write of one record."""
    return json.dumps({"records": [{"data": data}]}).encode()
