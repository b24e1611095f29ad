"""Server-sent events by hand over a raw socket: exact frames, every wait with a deadline, resume from any id."""

from __future__ import annotations

import base64
import json
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec

from tests.http.server import DEADLINE
from tests.http.wire import request

ACCEPT = "accept: text/event-stream"


class Frame(msgspec.Struct):
    """What stands between two empty lines of a stream."""

    id: str | None = None
    event: str | None = None
    data: str | None = None
    retry: str | None = None
    comment: str | None = None

    def json(self) -> Any:
        assert self.data is not None, self
        return json.loads(self.data)

    @property
    def cursors(self) -> dict[str, Any]:
        """The cursor map that the id stands for."""
        assert self.id is not None, self
        assert "=" not in self.id, "base64url has no padding here"
        cursors: dict[str, Any] = json.loads(base64.urlsafe_b64decode(self.id + "=" * (-len(self.id) % 4)))
        return cursors

    @property
    def seqs(self) -> list[int]:
        return [record["$seq"] for record in self.json()["records"]]


def make_id(cursors: dict[str, Any]) -> str:
    """An id as a server would make it."""
    return base64.urlsafe_b64encode(json.dumps(cursors).encode()).rstrip(b"=").decode()


def parse(block: bytes) -> Frame:
    """One frame; every line of it must be of a kind that the contract knows."""
    frame = Frame()
    for line in block.decode().split("\n"):
        assert "\r" not in line, block
        name, colon, value = line.partition(":")
        assert colon, f"a line without a field: {line!r}"
        value = value.removeprefix(" ")
        if name == "data":
            frame.data = value if frame.data is None else f"{frame.data}\n{value}"
        else:
            field = name or "comment"
            assert field in ("id", "event", "retry", "comment"), f"an unknown field: {line!r}"
            assert getattr(frame, field) is None, f"{field} twice in {block!r}"
            setattr(frame, field, value)
    return frame


def frames_in(body: bytes) -> list[Frame]:
    """The frames that are whole in the first bytes of a stream; the rest is lost with its connection."""
    *blocks, _ = body.split(b"\n\n")
    return [parse(block) for block in blocks]


class Events:
    """One connection to a stream. `body` is everything that came behind the head, without its chunks."""

    def __init__(
        self,
        port: int,
        path: str,
        last_id: str | None = None,
        *headers: str,
        version: str = "1.1",
        accept: str | None = ACCEPT,
        receive_buffer: int | None = None,
        method: str = "GET",
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(DEADLINE)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = [*headers, *([accept] if accept else []), *([f"last-event-id: {last_id}"] if last_id else [])]
        self.socket.sendall(request(method, path, None, *fields, version=version))
        self._raw = b""
        self.body = b""
        self._parsed = 0
        self.is_over = False
        self.status = 0
        self.headers: dict[str, str] = {}

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Ends the connection the hard way."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._raw += data
        return bool(data)

    def open(self) -> Events:
        """Reads the head of the answer; one that is no stream is read whole."""
        while b"\r\n\r\n" not in self._raw:
            assert self._more(), f"the connection ended in the middle of a head: {self._raw!r}"
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(":")
            assert name.lower() not in self.headers, f"{name} appears twice"
            self.headers[name.lower()] = value.strip()
        if "content-length" in self.headers:
            while len(self._raw) < int(self.headers["content-length"]):
                assert self._more(), "the connection ended in the middle of a body"
            self.body, self._raw = self._raw, b""
            self.is_over = True
        return self

    def stream(self) -> Events:
        """Reads the head of a stream, and what every stream begins with."""
        self.open()
        assert self.status == 200, self.body
        first = self.frame()
        # It says where the stream begins, so that whoever is cut off before the first event can resume.
        assert first == Frame(retry="2000", id=first.id)
        assert first.cursors
        return self

    def _unchunk(self) -> bool:
        """Moves what is whole from the wire to the body; whether anything moved."""
        if self.headers.get("transfer-encoding") != "chunked":
            self.body, self._raw, moved = self.body + self._raw, b"", bool(self._raw)
            return moved
        moved = False
        while b"\r\n" in self._raw and not self.is_over:
            size, _, rest = self._raw.partition(b"\r\n")
            length = int(size, 16)
            if len(rest) < length + 2:
                break
            assert rest[length : length + 2] == b"\r\n", self._raw[:100]
            self.body += rest[:length]
            self._raw = rest[length + 2 :]
            self.is_over = length == 0
            moved = True
        return moved

    def frame(self) -> Frame:
        """The next frame, of whatever kind."""
        found = self.frame_or_end()
        assert found is not None, f"the stream ended with {self.body[self._parsed :]!r}"
        return found

    def frame_or_end(self) -> Frame | None:
        """The next frame; None where the stream has ended, between two frames."""
        while True:
            end = self.body.find(b"\n\n", self._parsed)
            if end >= 0:
                block = self.body[self._parsed : end]
                self._parsed = end + 2
                return parse(block)
            if self._unchunk():
                continue
            if self.is_over or not self._more():
                self.is_over = True
                return None

    # -- events ----------------------------------------------------------------------------------------------------

    def event(self, kind: str | None = None) -> Frame:
        """The next frame that is no heartbeat; it must be of this kind."""
        frame = self.frame()
        while frame.comment is not None:
            assert frame == Frame(comment="hb"), frame
            frame = self.frame()
        assert kind is None or frame.event == kind, f"wanted {kind}, got {frame}"
        return frame

    def until(self, kind: str) -> list[Frame]:
        """Everything up to and with the next frame of a kind."""
        seen = [self.event()]
        while seen[-1].event != kind:
            seen.append(self.event())
        return seen

    def until_seq(self, seq: int) -> list[Frame]:
        """Everything up to and with the frame that has a record, or a loss, up to a seq."""
        seen = [self.event()]
        while True:
            fields = seen[-1].json()
            if fields.get("to_seq", fields.get("gap_to", -1)) >= seq:
                return seen
            seen.append(self.event())

    def rest(self) -> list[Frame]:
        """Everything until the server ends the stream."""
        seen: list[Frame] = []
        while (frame := self.frame_or_end()) is not None:
            seen.append(frame)
        return seen

    def records(self, count: int) -> Iterator[dict[str, Any]]:
        """So many records, whatever else comes between them."""
        while count > 0:
            frame = self.event()
            if frame.event == "record":
                for record in frame.json()["records"]:
                    count -= 1
                    yield record

    def follow_up(self, data: bytes) -> None:
        """Sends more on the same connection."""
        self.socket.sendall(data)

    def next_answer(self) -> tuple[int, bytes]:
        """The answer behind a stream that has ended."""
        assert self.is_over
        follower = Events.__new__(Events)
        follower.socket, follower._raw, follower.body, follower._parsed = self.socket, self._raw, b"", 0
        follower.is_over, follower.status, follower.headers = False, 0, {}
        follower.open()
        return follower.status, follower.body


def gap(frame: Frame) -> tuple[int, int, str]:
    """What a tombstone says, in short."""
    assert frame.event == "tombstone", frame
    fields = frame.json()
    return fields["gap_from"], fields["gap_to"], fields["reason"]


def told(frames: list[Frame]) -> list[int | tuple[int, int, str]]:
    """Record seqs and gaps of one topic, in their order."""
    found: list[int | tuple[int, int, str]] = []
    for frame in frames:
        if frame.event == "record":
            found += frame.seqs
        elif frame.event == "tombstone":
            found.append(gap(frame))
    return found
