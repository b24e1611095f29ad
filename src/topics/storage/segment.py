"""Segment files: frames that were moved out of the WAL to stay, in numbered files that are written once.

A read proves every byte it returns. Bytes that are proven wrong raise `Corrupt`; a disk that does not answer raises
`StorageFault`, which says nothing about the bytes.
"""

from __future__ import annotations

from collections import OrderedDict

from topics.core.errors import StorageFault
from topics.storage import frame
from topics.storage.frame import HEADER, Damage, Frame, position
from topics.storage.fs import File, FileSystem, read_exactly, write_all

DIRECTORY = "segments"
_SUFFIX = ".seg"
_OPEN_FILES = 128
_BUFFER = 1 << 20


class Corrupt(Exception):
    """The bytes at a place are not what was written there, read twice."""

    def __init__(self, name: str, offset: int) -> None:
        super().__init__(f"{name} at offset {offset}")
        self.name = name
        self.offset = offset


def segment_name(number: int) -> str:
    return f"{DIRECTORY}/{number:012d}{_SUFFIX}"


def segment_numbers(fs: FileSystem) -> list[int]:
    return [int(name[: -len(_SUFFIX)]) for name in fs.listdir(DIRECTORY) if name.endswith(_SUFFIX)]


class SegmentWriter:
    """One segment file while it is written."""

    def __init__(self, fs: FileSystem, number: int) -> None:
        self._fs = fs
        self.number = number
        self._file: File = fs.create(segment_name(number))
        self._buffer: list[bytes] = []
        self._buffered = 0
        self.offset = 0

    def append(self, kind: int, epoch: int, first: int, last: int, payload: bytes) -> int:
        """Adds a frame; returns its offset in the file."""
        at = self.offset
        self._buffer += (frame.encode(position(self.number, at), kind, epoch, first, last, payload), payload)
        self._buffered += HEADER + len(payload)
        self.offset = at + HEADER + len(payload)
        if self._buffered >= _BUFFER:
            self.flush()
        return at

    def flush(self) -> None:
        buffers, self._buffer, self._buffered = self._buffer, [], 0
        write_all(self._file, buffers)

    def sync(self) -> None:
        """Makes the file and its name survive a power loss. May run on another thread."""
        self._file.sync()
        self._fs.sync_dir(DIRECTORY)

    def close(self) -> None:
        self._file.close()


class Segments:
    """The sealed segment files, open as far as they are in use."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._open: OrderedDict[int, File] = OrderedDict()

    def read(self, number: int, offset: int, length: int) -> memoryview:
        """The payload, `length` bytes of it, of the frame at `offset`."""
        for _ in range(2):
            data = self.read_bytes(number, offset, HEADER + length)
            payload = frame.decode_payload(data, position(number, offset))
            if payload is not None and len(payload) == length:
                return payload
        raise Corrupt(segment_name(number), offset)

    def read_bytes(self, number: int, offset: int, length: int) -> bytes:
        try:
            return read_exactly(self._file(number), length, offset)
        except FileNotFoundError:
            raise Corrupt(segment_name(number), 0) from None
        except OSError as error:
            raise StorageFault(f"cannot read {segment_name(number)} at offset {offset}: {error}") from error

    def scan(self, number: int, offset: int, length: int) -> list[Frame | Damage]:
        """Everything between two offsets, damaged or not."""
        data = self.read_bytes(number, offset, length)
        return list(frame.scan(data, position(number, offset)))

    def size(self, number: int) -> int:
        return self._file(number).size()

    def _file(self, number: int) -> File:
        file = self._open.get(number)
        if file is None:
            file = self._open[number] = self._fs.open(segment_name(number))
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(number)
        return file

    def remove(self, number: int) -> None:
        file = self._open.pop(number, None)
        if file is not None:
            file.close()
        self._fs.remove(segment_name(number))

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
