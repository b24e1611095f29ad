"""What makes a repeated write harmless: idempotency keys for a while, strict producers forever."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest


class Appended(msgspec.Struct, array_like=True, gc=False):
    """What a write got. `starts` is there only when holes stand between its records."""

    first_seq: int
    last_seq: int
    count: int
    starts: list[int] | None = None

    @property
    def seqs(self) -> list[int]:
        """One seq for each element of the write: its record's, or the first that its hole takes."""
        return self.starts if self.starts is not None else list(range(self.first_seq, self.last_seq + 1))


class Producer(msgspec.Struct, array_like=True, gc=False):
    """A strict producer: its last `client_seq`, and what its last write was and got."""

    last: int
    digest: int
    appended: Appended
    ephemeral: bool = False


class Written(msgspec.Struct, array_like=True):
    """The part of a write that later writes are compared with."""

    ts: int
    appended: Appended
    key: str | None = None
    client_id: str | None = None
    client_seq: int = 0
    digest: int = 0


def digest_of(client_seqs: Sequence[int]) -> int:
    return xxh3_64_intdigest(array("Q", client_seqs).tobytes())


class Dedupe:
    """The memory of one topic instance. Keys stand in the order of their time, so the old ones go from the front.

    It survives what the records of a write survive: what came of an ephemeral one is in no checkpoint.
    """

    __slots__ = ("_keys", "_producers")

    def __init__(self) -> None:
        self._keys: dict[str, tuple[int, Appended, bool]] | None = None
        self._producers: dict[str, Producer] | None = None

    def add(self, written: Written, window: int, ephemeral: bool = False) -> None:
        if written.key is not None:
            self.forget(written.ts - window)
            if self._keys is None:
                self._keys = {}
            self._keys.pop(written.key, None)
            self._keys[written.key] = (written.ts, written.appended, ephemeral)
        if written.client_id is not None:
            if self._producers is None:
                self._producers = {}
            self._producers[written.client_id] = Producer(
                written.client_seq, written.digest, written.appended, ephemeral
            )

    def forget(self, before: int) -> None:
        """Drops the keys that are older than the window."""
        while self._keys:
            key, (ts, *_) = next(iter(self._keys.items()))
            if ts >= before:
                return
            del self._keys[key]

    def by_key(self, key: str, now: int, window: int) -> Appended | None:
        found = self._keys.get(key) if self._keys else None
        return found[1] if found is not None and now - found[0] <= window else None

    def producer(self, client_id: str) -> Producer | None:
        return self._producers.get(client_id) if self._producers else None

    @property
    def producer_count(self) -> int:
        return len(self._producers) if self._producers else 0

    def lasting_keys(self) -> list[tuple[str, int, Appended]]:
        return [(key, ts, done) for key, (ts, done, ephemeral) in (self._keys or {}).items() if not ephemeral]

    def lasting_producers(self) -> dict[str, Producer]:
        return {name: each for name, each in (self._producers or {}).items() if not each.ephemeral}

    def restore(self, keys: Sequence[tuple[str, int, Appended]], producers: dict[str, Producer]) -> None:
        if keys:
            self._keys = {**(self._keys or {}), **{key: (ts, done, False) for key, ts, done in keys}}
        if producers:
            self._producers = {**(self._producers or {}), **producers}
