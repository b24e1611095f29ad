"""The write-ahead log: numbered files of frames, appended in the order in which things happen.

`stage` gives a frame its place, `write` hands all staged frames to the kernel at once, `sync` makes them survive a
power loss. Whoever stages decides which of these an answer waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from topics.storage import frame
from topics.storage.frame import HEADER, Buffer, Damage, Frame, Payload, length_of, position
from topics.storage.fs import File, FileSystem, read_exactly, read_file, write_all

DIRECTORY = "wal"
_SUFFIX = ".wal"
_UNFINISHED = ".tmp"

# Kinds below 8 belong to the files themselves; what is above has a meaning only to the engine.
KIND_FILE = 1
KIND_MARK = 2
KIND_GROUP = 3


def wal_name(number: int) -> str:
    return f"{DIRECTORY}/{number:012d}{_SUFFIX}"


def wal_numbers(fs: FileSystem) -> list[int]:
    return [int(name[: -len(_SUFFIX)]) for name in fs.listdir(DIRECTORY) if name.endswith(_SUFFIX)]


class Wal:
    """The WAL file in use. `staged`, `written` and `synced` are positions, in that order from far to near."""

    def __init__(self, fs: FileSystem, number: int) -> None:
        self._fs = fs
        self._buffer: list[Buffer] = []
        self.bytes_written = 0
        before = wal_name(number - 1)
        self._use(self._begin(number, len(read_file(fs, before)) if fs.exists(before) else 0), number)

    def _begin(self, number: int, length_before: int) -> File:
        """A new file; when this returns, its name and header survive a power loss. The header says how long the file
        before it is: one that is cut off between two frames looks whole."""
        file = self._fs.create(wal_name(number))
        try:
            write_all(file, [frame.encode(position(number, 0), KIND_FILE, 0, number, length_before, b"")])
            file.sync()
            self._fs.sync_dir(DIRECTORY)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                self._fs.remove(wal_name(number))
            raise
        return file

    def _use(self, file: File, number: int) -> None:
        self._file = file
        self.number = number
        self.staged = self.written = self.synced = self._marked = position(number, HEADER)

    def stage(self, kind: int, epoch: int, first: int, last: int, payload: Payload = b"") -> int:
        """Gives a frame its place behind all others; returns the place."""
        at = self.staged
        header = frame.encode(at, kind, epoch, first, last, payload)
        self._buffer.append(header)
        if isinstance(payload, tuple):
            self._buffer += payload
        elif payload:
            self._buffer.append(payload)
        self.staged = at + HEADER + length_of(payload)
        return at

    @property
    def has_staged(self) -> bool:
        return self.staged != self.written

    @property
    def has_unsynced(self) -> bool:
        return self.written != self.synced

    @property
    def has_unmarked(self) -> bool:
        """Whether no frame says yet how far the log is synced."""
        return self.synced > self._marked

    def mark(self) -> None:
        """Stages the proof that everything up to here was synced: damage below it is not a torn tail."""
        self.stage(KIND_MARK, 0, self.synced, 0)
        self._marked = self.staged

    def write(self) -> None:
        if self._buffer:
            if self.has_unmarked:
                self.mark()
            buffers, self._buffer = self._buffer, []
            self.bytes_written += write_all(self._file, buffers)
            self.written = self.staged

    def sync(self, upto: int) -> int:
        """Syncs the file; `upto` is a written position from before the call. May run on another thread."""
        self._file.sync()
        return upto

    def discard_staged(self) -> None:
        """After a failed write: cuts the file back to its last good byte, if the disk lets us."""
        self._buffer = []
        self.staged = self.written
        try:
            self._file.truncate(frame.file_offset(self.written))
        except OSError:
            # A torn tail then, which recovery cuts.
            return

    def rotate(self) -> None:
        """Seals this file and begins the next. The sealed one is wholly synced: damage in it is damage."""
        assert not self._buffer
        self._file.sync()
        file = self._begin(self.number + 1, frame.file_offset(self.written))
        self._file.close()
        self._use(file, self.number + 1)

    def close(self) -> None:
        self._file.close()


def encode_group(parts: Sequence[tuple[int, int, int, int, Payload]]) -> Payload:
    """The payload of a group: frames that live or die together."""
    buffers: list[Buffer] = []
    for kind, epoch, first, last, payload in parts:
        buffers.append(frame.encode(0, kind, epoch, first, last, payload))
        if isinstance(payload, tuple):
            buffers += payload
        elif payload:
            buffers.append(payload)
    return tuple(buffers)


def decode_group(group: Frame) -> list[Frame]:
    view = memoryview(group.payload)
    offset = 0
    frames: list[Frame] = []
    while offset < len(view):
        header = frame.decode_header(view[offset:], 0)
        assert header is not None, "a group's checksum covers its frames"
        start = offset + HEADER
        offset = start + header.length
        payload = bytes(view[start:offset])
        frames.append(Frame(group.at, header.kind, header.epoch, header.first, header.last, payload, group.end))
    return frames


class WalFile:
    """A WAL file as recovery finds it."""

    def __init__(self, fs: FileSystem, number: int) -> None:
        self.number = number
        self.name = wal_name(number)
        self.start = position(number, 0)
        self.data = read_file(fs, self.name)

    def items(self) -> list[Frame | Damage]:
        return list(frame.scan(self.data, self.start))


def sealed_length(fs: FileSystem, number: int) -> int:
    """How long a file was when the next one was begun; 0 if nothing says so."""
    name = wal_name(number + 1)
    if not fs.exists(name):
        return 0
    file = fs.open(name)
    try:
        header = frame.decode_header(read_exactly(file, HEADER, 0), position(number + 1, 0))
    finally:
        file.close()
    return header.last if header is not None and header.kind == KIND_FILE else 0


def is_proven(damage: Damage, behind: Sequence[Frame | Damage]) -> bool:
    """Whether a frame behind the damage says that the damaged bytes had been synced."""
    return any(isinstance(item, Frame) and item.kind == KIND_MARK and item.first > damage.at for item in behind)


def rewrite(fs: FileSystem, number: int, data: bytes) -> None:
    """Puts a file's bytes on the disk anew, in a new file of the same name.

    A sync of bytes that another process wrote proves nothing: where its own sync had failed, the kernel takes the pages
    for clean. A new file's pages are dirty, so its sync is true. It also cuts a torn tail, if `data` ends before it.
    """
    name = wal_name(number)
    if fs.exists(name + _UNFINISHED):
        fs.remove(name + _UNFINISHED)
    file = fs.create(name + _UNFINISHED)
    try:
        write_all(file, [data])
        file.sync()
    finally:
        file.close()
    fs.rename(name + _UNFINISHED, name)
    fs.sync_dir(DIRECTORY)


def remove(fs: FileSystem, number: int) -> None:
    fs.remove(wal_name(number))
    fs.sync_dir(DIRECTORY)


def remove_unfinished(fs: FileSystem) -> None:
    for name in fs.listdir(DIRECTORY):
        if name.endswith(_UNFINISHED):
            fs.remove(f"{DIRECTORY}/{name}")
