"""Server-sent events: how a stream's bytes become frames. Bounded: a frame that never ends is an error."""

from __future__ import annotations

import msgspec

from topics.client.errors import ServerError

# One record may have as much as a server allows it, and a batch has at least one.
MAX_FRAME_BYTES = 256 << 20


class Frame(msgspec.Struct):
    event: str = ""
    data: bytes = b""
    id: str | None = None


class FrameParser:
    """Takes bytes as they come; a frame is there when its last line is, so one that was cut off is never seen."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._event = ""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[Frame]:
        lines = chunk.split(b"\n")
        if len(lines) == 1:
            self._keep(chunk)
            return []
        self._rest.append(lines[0])
        lines[0] = b"".join(self._rest)
        self._rest.clear()
        self._rest_bytes = 0
        self._keep(lines.pop())
        frames: list[Frame] = []
        for line in lines:
            if line and line != b"\r":
                self._take(line.removesuffix(b"\r"))
            else:
                frame = self._end()
                if frame is not None:
                    frames.append(frame)
        return frames

    def _keep(self, rest: bytes) -> None:
        self._rest.append(rest)
        self._rest_bytes += len(rest)
        if self._rest_bytes + self._data_bytes > self._max_bytes:
            raise ServerError(f"an event has more than {self._max_bytes} bytes")

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value)
            if self._data_bytes > self._max_bytes:
                raise ServerError(f"an event has more than {self._max_bytes} bytes")
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id":
            self._id = value.decode("ascii", "replace")

    def _end(self) -> Frame | None:
        """A comment alone is no frame; an id alone is."""
        if not self._data and self._id is None:
            self._event = ""
            return None
        frame = Frame(self._event, b"\n".join(self._data), self._id)
        self._event = ""
        self._data = []
        self._data_bytes = 0
        self._id = None
        return frame
