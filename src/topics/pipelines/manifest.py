"""The manifest: numbered versions, each made exactly once, which together say what a lake holds.

    _lake/log/00000000000000000007.json        one commit
    _lake/snapshots/00000000000000000032/      everything up to a version: `heads.json` (small) and `lake.json`
    _lake/latest                               a hint

A version is a file that is created exclusively, so of two writers one wins and the other looks again. Readers take the
newest snapshot and the few versions behind it: what that costs does not grow with the history.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import msgspec

from topics.core.errors import TopicsError, UnknownFormat
from topics.pipelines.lake import FORMAT, Heads, Lake, Version
from topics.pipelines.stores import Store

FOLDER = "_lake"
# As many versions at most lie behind a snapshot.
_EVERY = 32
# A writer that loses this often against others gives up.
_TRIES = 100
# A file below this is worth merging.
SMALL_BYTES = 32 << 20

_LOG_NAME = re.compile(r"(\d{20})\.json")


class Conflict(TopicsError):
    """Another writer has changed what this one was about to change."""


class NotALake(TopicsError):
    """There is no manifest at this root."""


class Manifest:
    def __init__(self, store: Store, now: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self.store = store
        self.now = now
        self._heads = Heads()

    def latest(self) -> int:
        """The number of the newest version; 0 when there is none. What the hint says is only where to begin."""
        version = max(self._hint(), self._heads.version)
        while self._read(version + 1) is not None:
            version += 1
        return version

    def _hint(self) -> int:
        told = self.store.read(f"{FOLDER}/latest")
        if told is not None and told.isdigit() and self._read(int(told)) is not None:
            return int(told)
        # Missing, or half of one: the log itself knows.
        found = [_LOG_NAME.fullmatch(entry.path.rpartition("/")[2]) for entry in self.store.walk(f"{FOLDER}/log")]
        return max([int(match[1]) for match in found if match is not None], default=0)

    def heads(self) -> Heads:
        """How far the lake is. Goes on from what this object has seen before."""
        version = self.latest()
        known = self._heads.version
        # The versions in between may be forgotten by now.
        if version > known and (not known or version - known > _EVERY or self._read(known + 1) is None):
            self._heads = self._newest_heads(version)
        for each in self._versions(self._heads.version + 1, version):
            self._heads.apply(each, SMALL_BYTES)
        return self._heads

    def _newest_heads(self, version: int) -> Heads:
        for number in _snapshots_below(version):
            told = self.store.read(f"{_snapshot(number)}/heads.json")
            if told is not None:
                return msgspec.json.decode(told, type=Heads)
        return Heads()

    def lake(self, version: int | None = None) -> Lake:
        """Everything, as the newest version says, or an older one."""
        version = self.latest() if version is None else version
        lake = Lake()
        for number in _snapshots_below(version):
            told = self.store.read(f"{_snapshot(number)}/lake.json")
            if told is not None:
                lake = msgspec.json.decode(told, type=Lake)
                break
        for each in self._versions(lake.version + 1, version):
            lake.apply(each)
        return lake

    def _versions(self, first: int, last: int) -> Iterator[Version]:
        for number in range(first, last + 1):
            version = self._read(number)
            if version is None:
                raise TopicsError(f"{self.store.uri}: version {number} of the manifest is missing, {last} is there")
            yield version

    def _read(self, number: int) -> Version | None:
        told = self.store.read(_log(number)) if number else None
        if told is None:
            return None
        format_ = msgspec.json.decode(told, type=_Format).format
        if format_ != FORMAT:
            raise UnknownFormat(
                f"{self.store.uri}: version {number} of the manifest has format {format_}, and this release knows "
                f"{FORMAT}: use a newer one"
            )
        return msgspec.json.decode(told, type=Version)

    def commit(self, by: str, make: Callable[[Heads], Version | None]) -> Version | None:
        """Makes the next version out of what `make` gives for the newest heads; None from it is nothing to do. Whatever
        `make` raises ends it; nothing is changed then."""
        for _ in range(_TRIES):
            heads = self.heads()
            made = make(heads)
            if made is None:
                return None
            made.version, made.by = heads.version + 1, by
            if self.store.create(_log(made.version), msgspec.json.encode(made)):
                heads.apply(made, SMALL_BYTES)
                self._settle(made.version)
                return made
        raise Conflict(f"{self.store.uri}: {_TRIES} times another writer was first")

    def _settle(self, version: int) -> None:
        """What makes reading cheap. A crash in here costs time, never truth."""
        self.store.replace(f"{FOLDER}/latest", str(version).encode())
        if version % _EVERY == 0:
            # The heads come last: a snapshot that has them is whole.
            self.store.create(f"{_snapshot(version)}/lake.json", msgspec.json.encode(self.lake(version)))
            self.store.create(f"{_snapshot(version)}/heads.json", msgspec.json.encode(self._heads))

    def forget_before(self, moment: int) -> int:
        """Removes versions and snapshots that nobody needs who began to read after `moment`; says how many."""
        version = self.latest()
        kept = [number for number in _snapshots_below(version) if self._is_whole(number)]
        old = [number for number in kept if (made := self._read(number)) is not None and made.ts < moment]
        removed = 0
        if old:
            for entry in list(self.store.walk(f"{FOLDER}/log")):
                match = _LOG_NAME.fullmatch(entry.path.rpartition("/")[2])
                # A snapshot's own version stays: it says when that was.
                if match is not None and int(match[1]) < old[0]:
                    self.store.delete(entry.path)
                    removed += 1
            for number in old[1:]:
                self.store.delete(_snapshot(number))
        return removed

    def _is_whole(self, number: int) -> bool:
        return self.store.read(f"{_snapshot(number)}/heads.json") is not None


class _Format(msgspec.Struct):
    format: int = 1


def _log(number: int) -> str:
    return f"{FOLDER}/log/{number:020d}.json"


def _snapshot(number: int) -> str:
    return f"{FOLDER}/snapshots/{number:020d}"


def _snapshots_below(version: int) -> range:
    """The versions at which there may be a snapshot, the newest first. Few are looked at: nearly every one is there."""
    return range(version - version % _EVERY, 0, -_EVERY)
