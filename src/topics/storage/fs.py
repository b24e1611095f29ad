"""The file-system seam: the only place that touches a disk.

Everything above writes through `FileSystem` and `File`, so a test can hand in a disk that fails, writes short,
tears, reorders, lies, or loses power between any two calls. Names are relative to the data directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

# Linux's IOV_MAX: what one writev may take.
_IOV_MAX = 1024


class File(Protocol):
    """An open file. Writes always go to its end; reads name their offset."""

    def writev(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Appends, and says how many bytes were taken: possibly fewer than given."""
        ...

    def pread(self, length: int, offset: int) -> bytes:
        """Reads up to `length` bytes; fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """Returns when everything written so far survives a power loss. Called from background threads too."""
        ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class FileSystem(Protocol):
    def create(self, name: str) -> File:
        """Opens a new, empty file for append and read; one that exists is an error."""
        ...

    def open(self, name: str) -> File:
        """Opens an existing file for append and read."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Replaces `new` atomically."""
        ...

    def remove(self, name: str) -> None: ...

    def mkdir(self, name: str) -> None:
        """Makes a directory; one that exists is fine."""
        ...

    def listdir(self, name: str) -> list[str]:
        """The names in a directory, sorted; a missing directory has none."""
        ...

    def exists(self, name: str) -> bool: ...

    def sync_dir(self, name: str) -> None:
        """Makes created, renamed and removed names in a directory survive a power loss."""
        ...

    def lock(self, name: str) -> Lock:
        """Takes the exclusive lock of a data directory, or raises BlockingIOError."""
        ...

    def boot_id(self) -> str:
        """Names this run of the machine: it changes exactly when unsynced bytes may have been lost."""
        ...


def write_all(file: File, buffers: Iterable[bytes | memoryview]) -> int:
    """Appends every buffer whole, going on after short writes; returns the bytes written."""
    pending = [buffer for buffer in buffers if buffer]
    total = 0
    while pending:
        window = pending[:_IOV_MAX]
        written = file.writev(window)
        if written <= 0:
            raise OSError(errno.EIO, "the disk took no bytes of a write")
        total += written
        whole = 0
        while whole < len(window) and written >= len(window[whole]):
            written -= len(window[whole])
            whole += 1
        del pending[:whole]
        if written:
            pending[0] = pending[0][written:]
    return total


def read_exactly(file: File, length: int, offset: int) -> bytes:
    """Reads `length` bytes, or fewer only where the file ends."""
    data = file.pread(length, offset)
    if len(data) == length or not data:
        return data
    parts = [data]
    got = len(data)
    while got < length:
        more = file.pread(length - got, offset + got)
        if not more:
            break
        parts.append(more)
        got += len(more)
    return b"".join(parts)


def read_file(fs: FileSystem, name: str) -> bytes:
    file = fs.open(name)
    try:
        return read_exactly(file, file.size(), 0)
    finally:
        file.close()


class OsFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writev(self, buffers: Sequence[bytes | memoryview]) -> int:
        if len(buffers) == 1:
            return os.write(self._fd, buffers[0])
        return os.writev(self._fd, buffers)

    def pread(self, length: int, offset: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)


class OsLock:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        os.close(self._fd)


class OsFileSystem:
    """The real disk, rooted at a data directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))
        os.makedirs(self._root, exist_ok=True)

    def __str__(self) -> str:
        return self._root

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def create(self, name: str) -> OsFile:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return OsFile(os.open(self._path(name), flags, 0o600))

    def open(self, name: str) -> OsFile:
        return OsFile(os.open(self._path(name), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))

    def remove(self, name: str) -> None:
        os.remove(self._path(name))

    def mkdir(self, name: str) -> None:
        os.makedirs(self._path(name), exist_ok=True)

    def listdir(self, name: str) -> list[str]:
        try:
            return sorted(os.listdir(self._path(name)))
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        return os.path.exists(self._path(name))

    def sync_dir(self, name: str) -> None:
        fd = os.open(self._path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, name: str) -> OsLock:
        fd = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return OsLock(fd)

    def boot_id(self) -> str:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            # No way to tell a kill from a lost machine: assume the worse one.
            return os.urandom(16).hex()
