"""The write-ahead log: numbered files of frames, appended in the order in which things happen.

`stage` gives a frame its place, `write` hands all staged frames to the kernel at once, `sync` makes them survive a
power loss. Whoever stages decides which of these an answer waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics.storage import frame
from topics.storage.frame import HEADER, Damage, Frame, file_number, position
from topics.storage.fs import File, FileSystem, read_file, write_all

DIRECTORY = "wal"
_SUFFIX = ".wal"

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
        self._buffer: list[bytes] = []
        self._marked = 0
        self.bytes_written = 0
        self._start(number)

    def _start(self, number: int) -> None:
        """Begins a file; when this returns its name and header survive a power loss."""
        self.number = number
        self.start = position(number, 0)
        self._file: File = self._fs.create(wal_name(number))
        header = frame.encode(self.start, KIND_FILE, 0, number, 0, b"")
        write_all(self._file, [header])
        self._file.sync()
        self._fs.sync_dir(DIRECTORY)
        self.staged = self.written = self.synced = self.start + len(header)
        self._marked = self.synced

    def stage(self, kind: int, epoch: int, first: int, last: int, payload: bytes = b"") -> int:
        """Gives a frame its place behind all others; returns the place."""
        at = self.staged
        header = frame.encode(at, kind, epoch, first, last, payload)
        self._buffer.append(header)
        if payload:
            self._buffer.append(payload)
        self.staged = at + HEADER + len(payload)
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
        self._file.close()
        self._start(self.number + 1)

    def close(self) -> None:
        self._file.close()


def encode_group(parts: Sequence[tuple[int, int, int, int, bytes]]) -> bytes:
    """The payload of a group: frames that live or die together."""
    buffers: list[bytes] = []
    for kind, epoch, first, last, payload in parts:
        buffers.append(frame.encode(0, kind, epoch, first, last, payload))
        buffers.append(payload)
    return b"".join(buffers)


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


def is_proven(damage: Damage, behind: Sequence[Frame | Damage]) -> bool:
    """Whether a frame behind the damage says that the damaged bytes had been synced."""
    return any(isinstance(item, Frame) and item.kind == KIND_MARK and item.first > damage.at for item in behind)


def cut(fs: FileSystem, at: int) -> None:
    """Removes everything from `at` to the end of its file: a tail that was never wholly written."""
    name = wal_name(file_number(at))
    file = fs.open(name)
    try:
        file.truncate(frame.file_offset(at))
        file.sync()
    finally:
        file.close()
