"""A disk in memory whose power a test can cut at any I/O call, and whose every failure can be replayed.

It implements the seam of `topics.storage.fs` and promises no more than POSIX does: bytes survive when their file was
synced, names survive when their directory was synced, and nothing else is certain. Being this strict is the point: what
ext4 gives on top (journal commits that carry a neighbour along) would hide a missing sync.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as clone
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Mode = Literal["drop", "keep", "torn", "reorder", "garbage"]
MODES: tuple[Mode, ...] = get_args(Mode)

PAGE = 4096
IOV_MAX = 1024

# The calls that change the disk: `SimDisk.calls` counts them, and each is a moment to lose power.
COUNTED = frozenset({"writev", "sync", "truncate", "create", "rename", "remove", "sync_dir", "mkdir"})
# The calls that only look; they can fail, but the power never goes in them.
UNCOUNTED = frozenset({"pread", "size", "close", "open", "listdir", "exists", "lock"})


class PowerCut(BaseException):
    """The machine is off. Not an Exception, so that no handler in the code under test takes it for an error."""


class Inode:
    """A file's bytes, apart from its names.

    The page cache holds `current`. The platter holds `current[:synced] + tail`, where `tail` is what an unsynced
    truncate cut off. Sharing the prefix makes a sync cost nothing, however long the log is.
    """

    __slots__ = ("_mutex", "current", "forgot", "synced", "tail")

    def __init__(self, content: bytes | bytearray = b"") -> None:
        """A file whose bytes are all on the platter."""
        self.current = bytearray(content)
        self.synced = len(content)
        self.tail = b""
        self.forgot = False  # see SimDisk.forgets_failed_syncs
        self._mutex = threading.Lock()  # a sync in another thread may meet a truncate

    def durable(self) -> bytearray:
        return self.current[: self.synced] + self.tail

    def sync(self) -> None:
        with self._mutex:
            if not self.forgot:
                self.tail = b""
                self.synced = len(self.current)

    def sync_partly(self, rng: Random) -> None:
        """What a sync may have done when the power goes in it: nothing, a part or all."""
        with self._mutex:
            if not self.forgot and (not self.tail or rng.random() < 0.5):
                self.tail = b""
                self.synced = rng.randint(self.synced, len(self.current))

    def truncate(self, size: int) -> None:
        with self._mutex:
            if size <= self.synced:
                self.tail = bytes(self.current[size : self.synced]) + self.tail
                self.synced = size
                self.forgot = False
            del self.current[size:]
            self.current.extend(bytes(size - len(self.current)))

    def copy(self) -> Inode:
        with self._mutex:
            other = Inode(self.current)
            other.synced, other.tail, other.forgot = self.synced, self.tail, self.forgot
            return other

    def survivor(self, rng: Random, mode: Mode) -> bytearray:
        """The bytes found after a power cut; see `SimDisk.power_cut`."""
        if mode == "drop":
            return self.durable()
        if mode == "keep":
            return bytearray(self.current)
        if mode == "reorder":
            return self._reordered(rng)
        if self.tail and rng.random() < 0.5:
            return self.durable()  # the truncate itself was lost
        content = self.current[: rng.randint(self.synced, len(self.current))]
        if mode == "garbage":
            start = rng.randint(self.synced, len(content))
            content[start:] = rng.randbytes(len(content) - start)
        return content

    def _reordered(self, rng: Random) -> bytearray:
        new, old = self.current, self.durable()
        content = bytearray(rng.randint(self.synced, max(len(new), len(old))))
        content[: self.synced] = new[: self.synced]
        start = self.synced
        while start < len(content):
            end = min(start - start % PAGE + PAGE, len(content))
            fate = rng.choice(("new", "new", "old", "garbage"))
            if fate == "garbage":
                page = bytearray(rng.randbytes(end - start))
            else:
                page = (new if fate == "new" else old)[start:end]  # where it has no bytes, zeros stay
            content[start : start + len(page)] = page
            start = end
        return content


Tree = dict[str, Inode | None]
"""Every name with its file; None is a directory. The root is ""."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One atomic step of the name space: it unlinks a name, links one, or (rename) both at once."""

    unlink: str | None = None
    link: str | None = None
    node: Inode | None = None

    def names(self) -> set[str]:
        return {name for name in (self.unlink, self.link) if name is not None}

    def apply(self, tree: Tree) -> None:
        if self.unlink is not None:
            tree.pop(self.unlink, None)
        if self.link is not None:
            tree[self.link] = self.node


@dataclass(slots=True)
class Fault:
    """An injected error. `hits` lets a test prove that it happened."""

    op: str
    prefix: str
    error: OSError | int
    after: int
    times: int | None
    hits: int = 0

    def meet(self, op: str, name: str, other: str | None) -> None:
        if op != self.op or not any(f"{path}/".startswith(self.prefix) for path in (name, other) if path is not None):
            return
        if self.after > 0:
            self.after -= 1
        elif self.times is None or self.hits < self.times:
            self.hits += 1
            raise _os_error(self.error, name) if isinstance(self.error, int) else self.error.with_traceback(None)


class SimFile:
    """An open file of a SimDisk. Faults match the name it was opened by."""

    __slots__ = ("_closed", "_disk", "_inode", "_name")

    def __init__(self, disk: SimDisk, name: str, inode: Inode) -> None:
        self._disk = disk
        self._name = name
        self._inode = inode
        self._closed = False

    def writev(self, buffers: Sequence[bytes | memoryview]) -> int:
        with self._disk._call("writev", self._name) as cut:
            self._check_open()
            if len(buffers) > IOV_MAX:
                raise _os_error(errno.EINVAL, self._name)
            data = b"".join(buffers)
            taken = self._disk._room(len(data), self._name)
            if cut:
                taken = self._disk._rng.randint(0, taken)
            self._inode.current += data[:taken]
        return taken

    def pread(self, length: int, offset: int) -> bytes:
        self._look("pread")
        if length < 0 or offset < 0:
            raise _os_error(errno.EINVAL, self._name)
        return bytes(self._inode.current[offset : offset + length])

    def sync(self) -> None:
        try:
            with self._disk._call("sync", self._name) as cut:
                self._check_open()
                if cut:
                    self._inode.sync_partly(self._disk._rng)
                else:
                    self._inode.sync()
        except OSError:
            self._inode.forgot |= self._disk.forgets_failed_syncs and not self._closed
            raise

    def truncate(self, size: int) -> None:
        with self._disk._call("truncate", self._name) as cut:
            self._check_open()
            if size < 0:
                raise _os_error(errno.EINVAL, self._name)
            if size - len(self._inode.current) > self._disk._free():
                raise _os_error(errno.ENOSPC, self._name)
            if not cut or self._disk._rng.random() < 0.5:
                self._inode.truncate(size)

    def size(self) -> int:
        self._look("size")
        return len(self._inode.current)

    def close(self) -> None:
        self._look("close")
        self._closed = True

    def _look(self, op: str) -> None:
        self._disk._look(op, self._name)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise _os_error(errno.EBADF, self._name)


class SimLock:
    __slots__ = ("_disk", "_held", "_name")

    def __init__(self, disk: SimDisk, name: str) -> None:
        self._disk = disk
        self._name = name
        self._held = True

    def release(self) -> None:
        self._disk._check_on()
        if not self._held:
            raise _os_error(errno.EBADF, self._name)
        self._held = False
        self._disk._locks.discard(self._name)


class SimDisk:
    """The FileSystem. All chance comes from `rng`: the same seed and the same calls give the same disk."""

    def __init__(self, rng: Random | None = None) -> None:
        self.calls = 0
        self.crash_at: int | None = None
        # Linux after a failed fsync: the pages count as clean, so the next fsync succeeds and promises nothing, over a
        # kill too. Only a truncate to what was synced before heals the file. Off by default; worth a test of its own.
        self.forgets_failed_syncs = False
        self._rng = rng or Random(0)
        self._tree: Tree = {"": None}
        self._durable: Tree = {"": None}
        self._pending: list[Change] = []  # from _durable to _tree, in order
        self._locks: set[str] = set()
        self._faults: list[Fault] = []
        self._short: Random | None = None
        self._capacity: int | None = None
        self._boot = 1
        self._off = False

    # The seam.

    def create(self, name: str) -> SimFile:
        with self._call("create", name) as cut:
            self._check_parent(name)
            if name in self._tree:
                raise _os_error(errno.EEXIST, name)
            inode = Inode()
            self._change(cut, [Change(link=name, node=inode)])
        return SimFile(self, name, inode)

    def open(self, name: str) -> SimFile:
        self._look("open", name)
        return SimFile(self, name, self._file(name))

    def rename(self, old: str, new: str) -> None:
        with self._call("rename", old, new) as cut:
            if self._is_directory(old):
                raise NotImplementedError("the simulated disk renames files only")
            self._check_parent(old)
            self._check_parent(new)
            inode = self._file(old)
            if self._is_directory(new):
                raise _os_error(errno.EISDIR, new)
            if old != new:
                self._change(cut, [Change(unlink=old, link=new, node=inode)])

    def remove(self, name: str) -> None:
        with self._call("remove", name) as cut:
            self._file(name)
            self._change(cut, [Change(unlink=name)])

    def mkdir(self, name: str) -> None:
        name = _directory(name)
        with self._call("mkdir", name) as cut:
            paths = [*_ancestors(name), name]
            for path in paths:
                if self._tree.get(path) is not None:
                    raise _os_error(errno.EEXIST if path == name else errno.ENOTDIR, path)
            self._change(cut, [Change(link=path) for path in paths if path not in self._tree])

    def listdir(self, name: str) -> list[str]:
        name = _directory(name)
        self._look("listdir", name)
        try:
            self._check_directory(name)
        except FileNotFoundError:
            return []
        return sorted(path.rpartition("/")[2] for path in self._tree if path and _parent(path) == name)

    def exists(self, name: str) -> bool:
        name = _directory(name)
        self._look("exists", name)
        return name in self._tree

    def sync_dir(self, name: str) -> None:
        name = _directory(name)
        with self._call("sync_dir", name) as cut:
            self._check_directory(name)
            needed = self._needed(lambda path: _parent(path) == name)
            self._make_durable(needed[: self._rng.randint(0, len(needed))] if cut else needed)

    def lock(self, name: str) -> SimLock:
        """Leaves its file behind, as the real one does."""
        self._look("lock", name)
        self._check_parent(name)
        if name not in self._tree:
            self._change(False, [Change(link=name, node=Inode())])
        self._file(name)
        if name in self._locks:
            raise _os_error(errno.EAGAIN, name)
        self._locks.add(name)
        return SimLock(self, name)

    def boot_id(self) -> str:
        self._check_on()
        return f"boot-{self._boot}"

    # What happens to the machine. Each of these leaves this disk off, and may be asked of a disk that is off, also more
    # than once: one crash can be continued in several ways.

    def power_cut(self, rng: Random, mode: Mode) -> SimDisk:
        """The disk as the next boot finds it; injected faults are gone, its capacity is not.

        What was synced is always there. Of the unsynced rest, "drop" loses all bytes, "keep" loses nothing, "torn"
        keeps a prefix of what was appended, "garbage" also overwrites the end of that prefix, and "reorder" decides per
        page between the new bytes, zeros (or what a lost truncate cut off) and garbage, and picks a size. Unsynced
        names survive as one random prefix of the order they were changed in (under "keep" all of them); a file also
        needs the names of all its directories. So under "drop" a rename may survive without the bytes it published.
        """
        self._off = True
        assert mode in MODES, mode
        disk = SimDisk(rng)
        disk._boot = self._boot + 1
        disk.forgets_failed_syncs = self.forgets_failed_syncs
        disk._capacity = self._capacity
        tree = dict(self._durable)
        for change in self._pending[: len(self._pending) if mode == "keep" else rng.randint(0, len(self._pending))]:
            change.apply(tree)
        for name in sorted(tree):  # a directory sorts before what is in it
            node = tree[name]
            if disk._is_directory(_parent(name)):
                disk._tree[name] = None if node is None else Inode(node.survivor(rng, mode))
        disk._durable = dict(disk._tree)
        return disk

    def kill(self) -> SimDisk:
        """The disk as the next process finds it: nothing is lost, nothing became durable, the locks are free."""
        self._off = True
        disk = self.copy()
        disk._off = False
        disk.calls = 0
        disk.crash_at = None
        disk._locks.clear()
        disk._faults.clear()
        disk._short = None
        return disk

    def copy(self) -> SimDisk:
        """An independent disk in the same state, this one left as it is. Open files stay with this one."""
        copies: dict[Inode, Inode] = {}

        def inode(node: Inode | None) -> Inode | None:
            if node is None:
                return None
            if node not in copies:
                copies[node] = node.copy()
            return copies[node]

        disk = SimDisk(clone(self._rng))
        disk.calls = self.calls
        disk.crash_at = self.crash_at
        disk.forgets_failed_syncs = self.forgets_failed_syncs
        disk._tree = {name: inode(node) for name, node in self._tree.items()}
        disk._durable = {name: inode(node) for name, node in self._durable.items()}
        disk._pending = [Change(change.unlink, change.link, inode(change.node)) for change in self._pending]
        disk._locks = set(self._locks)
        disk._faults = [clone(fault) for fault in self._faults]
        disk._short = clone(self._short)
        disk._capacity = self._capacity
        disk._boot = self._boot
        disk._off = self._off
        return disk

    # What a test injects.

    def fail(self, op: str, name_prefix: str, error: OSError | int, after: int = 0, times: int | None = None) -> Fault:
        """Fails calls of `op` on names with the prefix: lets `after` pass, then fails `times` (None: all).

        A failed call changes nothing. A rename matches by either name, a directory with or without its last slash.
        """
        if op not in COUNTED | UNCOUNTED:
            raise ValueError(f"no such call: {op}")  # a fault that can never happen would make a test pass for nothing
        fault = Fault(op, name_prefix, error, after, times)
        self._faults.append(fault)
        return fault

    def short_writes(self, rng: Random | None) -> None:
        """Makes each writev take a random part of its bytes, at least one; None stops it."""
        self._short = rng

    def set_free(self, free: int | None) -> None:
        """Leaves room for so many more bytes; None lifts the limit. Removed and truncated bytes give room back."""
        self._capacity = None if free is None else self._used() + free

    def heal(self) -> None:
        """Takes every fault, short write and space limit back."""
        self._faults.clear()
        self._short = None
        self._capacity = None

    # What a test looks at and changes by hand. Not counted, never fails, works on a disk that is off.

    def names(self) -> dict[str, int]:
        """Every file with its size, sorted."""
        return {name: len(node.current) for name, node in sorted(self._tree.items()) if node is not None}

    def read(self, name: str) -> bytes:
        return bytes(self._file(name).current)

    def write(self, name: str, content: bytes) -> None:
        """Puts a file there, durable with its name and directories; one that exists keeps its open handles."""
        paths = [*_ancestors(name), name]
        self._make_durable(self._needed(lambda path: path in paths))
        for path in paths[:-1]:
            self._tree.setdefault(path, None)
            self._durable.setdefault(path, None)
        inode = self._file(name) if name in self._tree else Inode()
        inode.truncate(0)
        inode.current += content
        inode.sync()
        self._tree[name] = self._durable[name] = inode

    def flip_bit(self, name: str, bit_index: int) -> None:
        """Bit rot: in the page cache, and on the platter where the byte is already there."""
        self._file(name).current[bit_index >> 3] ^= 1 << (bit_index & 7)

    # Inside.

    @contextmanager
    def _call(self, op: str, name: str, other: str | None = None) -> Iterator[bool]:
        """Counts a call, and yields whether the power goes in the middle of it; then PowerCut outranks any error."""
        self._check_on()
        self.calls += 1
        cut = self.crash_at is not None and self.calls >= self.crash_at
        self._off |= cut
        try:
            self._meet_faults(op, name, other)
            yield cut
        finally:
            if cut:
                raise PowerCut(f"in call {self.calls}: {op} {name}")

    def _look(self, op: str, name: str) -> None:
        self._check_on()
        self._meet_faults(op, name, None)

    def _check_on(self) -> None:
        if self._off:
            raise PowerCut("the machine is off")

    def _meet_faults(self, op: str, name: str, other: str | None) -> None:
        for fault in self._faults:
            fault.meet(op, name, other)

    def _change(self, cut: bool, changes: list[Change]) -> None:
        if cut:
            changes = changes[: self._rng.randint(0, len(changes))]
        for change in changes:
            change.apply(self._tree)
        self._pending += changes

    def _needed(self, wanted: Callable[[str], bool]) -> list[Change]:
        """The pending changes that touch a wanted name, with the earlier ones of the same names, in order.

        The rest shares no name with them, so it can be made durable later, or lost, without them.
        """
        needed: list[Change] = []
        names: set[str] = set()
        for change in reversed(self._pending):
            touched = change.names()
            if touched & names or any(wanted(name) for name in touched):
                names |= touched
                needed.append(change)
        return needed[::-1]

    def _make_durable(self, changes: list[Change]) -> None:
        for change in changes:
            change.apply(self._durable)
        done = set(changes)
        self._pending = [change for change in self._pending if change not in done]

    def _file(self, name: str) -> Inode:
        self._check_parent(name)
        if name not in self._tree:
            raise _os_error(errno.ENOENT, name)
        node = self._tree[name]
        if node is None:
            raise _os_error(errno.EISDIR, name)
        return node

    def _check_parent(self, name: str) -> None:
        if name:
            self._check_directory(_parent(name))

    def _check_directory(self, name: str) -> None:
        for path in [*_ancestors(name), name]:
            if path not in self._tree:
                raise _os_error(errno.ENOENT, path)
            if self._tree[path] is not None:
                raise _os_error(errno.ENOTDIR, path)

    def _is_directory(self, name: str) -> bool:
        return name in self._tree and self._tree[name] is None

    def _used(self) -> int:
        return sum(len(node.current) for node in self._tree.values() if node is not None)

    def _free(self) -> int:
        return sys.maxsize if self._capacity is None else max(0, self._capacity - self._used())

    def _room(self, length: int, name: str) -> int:
        """How many of `length` bytes the next write takes."""
        if not length:
            return 0
        length = min(length, self._free())
        if not length:
            raise _os_error(errno.ENOSPC, name)
        return self._short.randint(1, length) if self._short else length


def _os_error(number: int, name: str) -> OSError:
    """OSError picks the subclass (FileNotFoundError, ...) by the number."""
    return OSError(number, os.strerror(number), name)


def _directory(name: str) -> str:
    return name.rstrip("/")


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _ancestors(name: str) -> list[str]:
    """The directories above a name, topmost first, without the root."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
