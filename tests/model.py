"""The contract of sections 2 to 6 of SPEC.md as a naive program: what every answer of the log must be.

Written from the contract, not from the engine. Nothing here is fast, clever, durable or shared: a topic is a dict from
seq to record and a dict from seq to what became of it, and every watermark is computed from these by its definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Fate = Literal["live", "deleted", "cap", "ttl", "cap or ttl", "restart", "hole"]
# What TTL and caps take, and a restart of an ephemeral topic: only this moves the evict floor.
LOST: tuple[Fate, ...] = ("cap", "ttl", "cap or ttl", "restart")


class Refused(Exception):
    """An error of the contract, by its code."""

    def __init__(self, code: str, **detail: Any) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Record:
    seq: int
    ts: int
    data: bytes
    meta: bytes | None
    tag: str | None
    node: str | None

    @property
    def size(self) -> int:
        return len(self.data) + len(self.meta or b"")

    def shown(self, include_tags: bool, include_meta: bool) -> dict[str, Any]:
        """As a reader gets it; `data` and `meta` as their exact bytes."""
        fields: dict[str, Any] = {"$seq": self.seq, "$ts": self.ts, "data": self.data}
        if self.node is not None:
            fields["$node"] = self.node
        if self.tag is not None and include_tags:
            fields["$tag"] = self.tag
        if self.meta is not None and include_meta:
            fields["meta"] = self.meta
        return fields


@dataclass(frozen=True)
class Hole:
    first: int
    last: int
    reason: str


@dataclass(frozen=True)
class Item:
    """One element of a write: a record, or with `hole` so many lost seqs."""

    data: bytes = b"null"
    meta: bytes | None = None
    tag: str | None = None
    node: str | None = None
    hole: int | None = None
    client_seq: int | None = None


@dataclass(frozen=True)
class Config:
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: str = "old"
    durability: str = "disk"
    seq_base: int = 1
    idempotency_window_ms: int = 120_000
    dedupe_node: bool = True


@dataclass(frozen=True)
class Appended:
    """What a write got: a seq for each element, a hole's being its first."""

    seqs: tuple[int, ...]
    first_seq: int
    last_seq: int
    count: int


@dataclass(frozen=True)
class Key:
    ts: int
    appended: Appended
    ephemeral: bool
    # A restart may have taken it, as it took the records of its write.
    certain: bool = True


@dataclass(frozen=True)
class Producer:
    client_seqs: tuple[int, ...]
    appended: Appended
    ephemeral: bool
    certain: bool = True

    @property
    def last(self) -> int:
        return self.client_seqs[-1]


@dataclass(frozen=True)
class Delete:
    ts: int
    head_seq: int
    before_seq: int | None
    match: Any
    purpose: str


@dataclass(frozen=True)
class Query:
    from_seq: int = 0
    to_seq: int | None = None
    limit: int = 256
    nodes: tuple[str, ...] = ()
    match: Any = None
    include_tags: bool = False
    include_meta: bool = True
    epoch: int | None = None


@dataclass(frozen=True)
class Gap:
    """A tombstone. Its range is exact; of the reasons several may be true."""

    gap_from: int
    gap_to: int
    reasons: frozenset[str]


@dataclass
class Answer:
    records: list[Record] = field(default_factory=list)
    tombstone: Gap | None = None
    next_from_seq: int = 0


def matches(match: Any, tag: str | None) -> bool:
    """A tag selector: a bare string, `["tag","Eq",x]` or `["tag","Glob","x*"]`."""
    if match is None:
        return True
    if tag is None:
        return False
    if isinstance(match, str):
        return tag == match
    _, operator, text = match
    return tag == text if operator == "Eq" else tag.startswith(text[:-1])


class Topic:
    """One instance of a topic."""

    def __init__(self, name: str, epoch: int, config: Config) -> None:
        self.name = name
        self.epoch = epoch
        self.config = config
        self.head = config.seq_base - 1
        self.records: dict[int, Record] = {}
        self.fates: dict[int, Fate] = {}
        self.holes: list[Hole] = []
        # The head at the last restart that took everything.
        self.restarted_at = config.seq_base - 1
        self.keys: dict[str, Key] = {}
        self.producers: dict[str, Producer] = {}
        self.deletes: list[Delete] = []
        self.ephemeral_seqs: set[int] = set()
        # Every class that it has had since a restart took all: with `ephemeral` among several it is mixed.
        self.classes = {config.durability}
        # What it was before each change that a power loss may undo, oldest first.
        self.past: list[Topic] = []

    def copy(self) -> Topic:
        other = copy(self)
        for name in ("records", "fates", "keys", "producers", "ephemeral_seqs", "classes"):
            setattr(other, name, copy(getattr(self, name)))
        other.holes = list(self.holes)
        other.deletes = list(self.deletes)
        other.past = []
        return other

    @property
    def base(self) -> int:
        return self.config.seq_base

    @property
    def is_mixed(self) -> bool:
        return "ephemeral" in self.classes and len(self.classes) > 1

    # -- watermarks, by definition ---------------------------------------------------------------------------------

    def live(self) -> list[int]:
        return sorted(seq for seq, fate in self.fates.items() if fate == "live")

    def earliest(self) -> int:
        return min(self.live(), default=self.head + 1)

    def evict_floor(self) -> int:
        return max([self.restarted_at, *(seq for seq, fate in self.fates.items() if fate in LOST)]) + 1

    def count(self) -> int:
        return len(self.live())

    def bytes(self) -> int:
        return sum(self.records[seq].size for seq in self.live())

    # -- what happens ----------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """What comes next may be undone by a power loss."""
        before = self.copy()
        self.past.append(before)

    def is_durable(self) -> None:
        """What was up to here is on the platter."""
        self.past.clear()

    def settle(self, now: int) -> None:
        """TTL: a record with `now - $ts > ttl_ms` is expired, and stays so."""
        expired = self._expired(self.config.ttl_ms, now)
        if expired:
            if self.config.durability != "fsync":
                self.remember()
            self._take(expired, "ttl")

    def _expired(self, ttl_ms: int, now: int) -> list[int]:
        return [seq for seq in self.live() if now - self.records[seq].ts > ttl_ms] if ttl_ms else []

    def _take(self, seqs: Iterable[int], fate: Fate) -> None:
        for seq in seqs:
            assert self.fates[seq] == "live"
            self.fates[seq] = fate
        self._prune_holes()

    def _over_cap(self) -> list[int]:
        """The oldest live records that must go until both caps hold."""
        live = self.live()
        size = sum(self.records[seq].size for seq in live)
        gone: list[int] = []
        caps = self.config
        while live and (
            (caps.cap_records and len(live) > caps.cap_records) or (caps.cap_bytes and size > caps.cap_bytes)
        ):
            gone.append(live.pop(0))
            size -= self.records[gone[-1]].size
        return gone

    def configure(self, config: Config, now: int) -> None:
        """A tightened cap or TTL takes effect at once; which of the two took a record that both would is open."""
        self.settle(now)
        self.config = config
        self.classes.add(config.durability)
        by_cap, by_ttl = set(self._over_cap()), set(self._expired(config.ttl_ms, now))
        self._take(by_cap & by_ttl, "cap or ttl")
        self._take(by_cap - by_ttl, "cap")
        self._take(by_ttl - by_cap, "ttl")

    def check_room(self, items: Sequence[Item]) -> None:
        """`discard: "reject"`: what has no room now is refused, and what could never have it is a bad request."""
        caps = self.config
        if caps.discard != "reject":
            return
        sizes = [len(item.data) + len(item.meta or b"") for item in items if item.hole is None]
        if caps.cap_records and len(sizes) > caps.cap_records:
            raise Refused("batch_too_large")
        if caps.cap_bytes and sum(sizes) > caps.cap_bytes:
            raise Refused("record_too_large" if len(sizes) == 1 else "batch_too_large")
        if caps.cap_records and self.count() + len(sizes) > caps.cap_records:
            raise Refused("topic_full")
        if caps.cap_bytes and self.bytes() + sum(sizes) > caps.cap_bytes:
            raise Refused("topic_full")

    def append(self, items: Sequence[Item], node: str | None, now: int) -> Appended:
        """Gives every element its seqs, in order, then lets the caps act."""
        first = self.head + 1
        seqs: list[int] = []
        for item in items:
            seqs.append(self.head + 1)
            if item.hole is not None:
                self.add_hole(Hole(self.head + 1, self.head + item.hole, "source_trim"))
                continue
            self.head += 1
            own = item.node if item.node is not None else node
            assert all(self.records[seq].ts <= now for seq in self.fates if seq not in self.ephemeral_seqs)
            self.records[self.head] = Record(self.head, now, item.data, item.meta, item.tag, own)
            self.fates[self.head] = "live"
            if self.config.durability == "ephemeral":
                self.ephemeral_seqs.add(self.head)
        self._take(self._over_cap(), "cap")
        return Appended(tuple(seqs), first, self.head, sum(1 for item in items if item.hole is None))

    def add_hole(self, hole: Hole) -> None:
        """A loss above the head. Neighbours that were lost for the same reason are one range."""
        assert hole.first == self.head + 1
        self.head = hole.last
        before = self.holes[-1] if self.holes else None
        if before is not None and before.last + 1 == hole.first and before.reason == hole.reason:
            self.holes[-1] = Hole(before.first, hole.last, hole.reason)
        else:
            self.holes.append(hole)

    def _prune_holes(self) -> None:
        """A hole ends only when it is wholly below the evict floor."""
        floor = self.evict_floor()
        self.holes = [hole for hole in self.holes if hole.last >= floor]

    def delete(self, before_seq: int | None, match: Any, purpose: str, now: int) -> int:
        gone = [
            seq
            for seq in self.live()
            if (before_seq is None or seq < before_seq) and matches(match, self.records[seq].tag)
        ]
        self._take(gone, "deleted")
        self.deletes.append(Delete(now, self.head, before_seq, match, purpose))
        return len(gone)

    def crash(self, head: int) -> None:
        """The counter resumes behind the reservation; what lies between is a hole."""
        if head > self.head:
            self.add_hole(Hole(self.head + 1, head, "crash"))

    def lose_all(self, head: int) -> None:
        """A restart of an ephemeral topic: everything it held is lost, and the floor says so."""
        self._take(self.live(), "restart")
        self.head = self.restarted_at = head
        self.classes = {self.config.durability}
        self._prune_holes()

    def doubt(self) -> None:
        """After a restart: dedupe state of writes that were never on disk may be gone with them."""
        self.keys = {name: replace(key, certain=key.certain and not key.ephemeral) for name, key in self.keys.items()}
        self.producers = {
            name: replace(one, certain=one.certain and not one.ephemeral) for name, one in self.producers.items()
        }


class View:
    """A topic at one moment, for reading: the read rule of section 5, seq by seq."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.base = topic.base
        self.head = topic.head
        self.live = topic.live()
        self.earliest = min(self.live, default=topic.head + 1)
        self.evict_floor = topic.evict_floor()
        self.count = len(self.live)
        self.bytes = sum(topic.records[seq].size for seq in self.live)
        self.holes = list(topic.holes)
        self._hole_at = {seq: hole for hole in topic.holes for seq in range(hole.first, hole.last + 1)}

    def diff(self, query: Query) -> Answer:
        topic = self.topic
        stop = self.head if query.to_seq is None else min(query.to_seq, self.head)
        answer = Answer()
        cursor = max(query.from_seq, self.base - 1)
        if query.from_seq > self.head or (query.epoch is not None and query.epoch != topic.epoch):
            stop = max(stop, self.base - 1)
            answer.tombstone = Gap(self.base, stop, frozenset({"recreated"}))
            cursor = min(self.earliest - 1, stop)
        elif cursor + 1 < self.evict_floor and cursor < stop:
            last = min(self.earliest - 1, stop)
            answer.tombstone = Gap(cursor + 1, last, self._why(cursor + 1, last))
            cursor = last
        while cursor < stop and len(answer.records) < query.limit:
            hole = self._hole_at.get(cursor + 1)
            if hole is not None:
                if answer.records or answer.tombstone is not None:
                    break
                last = min(hole.last, stop)
                answer.tombstone = Gap(cursor + 1, last, frozenset({hole.reason}))
                cursor = last
                continue
            cursor += 1
            if self.delivers(cursor, query):
                answer.records.append(topic.records[cursor])
        answer.next_from_seq = cursor
        return answer

    def delivers(self, seq: int, query: Query) -> bool:
        if self.topic.fates.get(seq) != "live":
            return False
        record = self.topic.records[seq]
        if self.topic.config.dedupe_node and record.node is not None and record.node in query.nodes:
            return False
        return matches(query.match, record.tag)

    def _why(self, first: int, last: int) -> frozenset[str]:
        """The reasons that a gap at the floor may be given: the true ones of the records lost in it.

        A range that is cut at `to_seq` may have lost none itself; then what the floor knows behind it counts.
        """
        lost = [fate for seq, fate in self.topic.fates.items() if seq >= first and fate in LOST]
        by_cap = [fate for fate in lost if fate in ("cap", "cap or ttl")]
        by_ttl = [fate for fate in lost if fate in ("ttl", "cap or ttl")]
        reasons: set[str] = set()
        restarted = self.topic.restarted_at >= first or "restart" in lost
        if restarted:
            # Beside a restart any part of the truth will do: the reason is a hint, the range is the contract.
            reasons.add("restart")
        if by_cap and (restarted or len(by_cap) == len(lost)):
            reasons.add("cap")
        if by_ttl and (restarted or len(by_ttl) == len(lost)):
            reasons.add("ttl")
        if by_cap and by_ttl and len(lost) > 1:
            reasons.add("mixed")
        return frozenset(reasons)

    def told_of(self, cursor: int) -> set[int]:
        """Every seq behind a cursor that a reader who goes on from there is told has been lost."""
        told: set[int] = set()
        while cursor < self.head:
            answer = self.diff(Query(cursor))
            if answer.tombstone is not None:
                told.update(range(answer.tombstone.gap_from, answer.tombstone.gap_to + 1))
            cursor = answer.next_from_seq
        return told

    def check_seek(self, ts: int, cursor: int) -> None:
        """`seek`: a read from there starts with the first record that is new enough, and is told of every loss that
        may have been."""
        topic = self.topic
        first = min((seq for seq in self.live if topic.records[seq].ts >= ts), default=self.head + 1)
        assert self.base - 1 <= cursor < first, f"seek {ts}: {cursor}, the first record is {first}"
        older = [seq for seq in self.live if cursor < seq < first]
        assert not older, f"seek {ts}: a read from {cursor} starts with {older[0]}, which is older"
        told = self.told_of(cursor)
        for seq, fate in topic.fates.items():
            if fate in LOST and topic.records[seq].ts >= ts:
                assert seq in told, f"seek {ts}: {seq} was lost, and a read from {cursor} is not told"
        for hole in self.holes:
            if hole.first < first and not any(r.seq > hole.last and r.ts < ts for r in topic.records.values()):
                assert set(range(hole.first, hole.last + 1)) <= told, f"seek {ts}: from {cursor} nobody tells of {hole}"
        if not self.holes and topic.restarted_at < self.base and cursor + 1 < self.evict_floor:
            new = [seq for seq, fate in topic.fates.items() if fate in LOST and topic.records[seq].ts >= ts]
            assert new, f"seek {ts}: nothing that new is lost, but a read from {cursor} says so"


@dataclass
class Txn:
    last_used: int
    parts: dict[str, dict[str, dict[int, tuple[Item, ...]]]] = field(default_factory=dict)
    # The instance that the first spool into a topic found.
    epochs: dict[str, int | None] = field(default_factory=dict)


class Model:
    """A whole data directory."""

    def __init__(self, txn_timeout_ms: int) -> None:
        self.topics: dict[str, Topic] = {}
        self.time = 0
        self.txns: dict[str, Txn] = {}
        # What a transaction became, if it was committed.
        self.ended_txns: dict[str, dict[str, Appended] | None] = {}
        self.committed: dict[str, tuple[int, dict[str, Appended]]] = {}
        self._txn_timeout_ms = txn_timeout_ms

    def see(self, now: int) -> int:
        """The time that `$ts` and TTL run on: it never goes back."""
        self.time = max(self.time, now)
        return self.time

    def topic(self, name: str) -> Topic:
        """A topic as a reader finds it."""
        if name not in self.topics:
            raise Refused("topic_not_found")
        self.topics[name].settle(self.time)
        return self.topics[name]

    def put(self, name: str, patch: dict[str, Any], epoch: int) -> bool:
        """Creates a topic as instance `epoch`, or changes the sent fields; says whether it created."""
        topic = self.topics.get(name)
        if topic is None:
            self.topics[name] = Topic(name, epoch, replace(Config(), **patch))
            return True
        if patch.get("seq_base", topic.base) != topic.base:
            raise Refused("topic_exists_incompatible")
        topic.configure(replace(topic.config, **patch), self.time)
        topic.is_durable()
        return False

    def drop(self, name: str, if_empty: bool) -> bool:
        if name not in self.topics:
            return False
        if if_empty and self.topic(name).count():
            raise Refused("topic_not_empty")
        del self.topics[name]
        return True

    def append(
        self,
        name: str,
        items: Sequence[Item],
        node: str | None = None,
        key: str | None = None,
        client_id: str | None = None,
        create: bool = True,
        patch: dict[str, Any] | None = None,
        epoch: int = 0,
    ) -> tuple[Appended, bool]:
        """What the write got, and whether it was a repeat."""
        topic = self.topics.get(name)
        if topic is None:
            if not create:
                raise Refused("topic_not_found")
            topic = Topic(name, epoch, replace(Config(), **(patch or {})))
        topic.settle(self.time)
        known = self.known_key(topic, key)
        if known is not None:
            return known.appended, True
        client_seqs = tuple(item.client_seq for item in items if item.client_seq is not None)
        if client_id is not None:
            self._check_producer(topic, client_id, client_seqs)
        topic.check_room(items)
        self.topics[name] = topic
        topic.remember()
        appended = topic.append(items, node, self.time)
        ephemeral = topic.config.durability == "ephemeral"
        if key is not None:
            topic.keys[key] = Key(self.time, appended, ephemeral)
        if client_id is not None:
            topic.producers[client_id] = Producer(client_seqs, appended, ephemeral)
        if topic.config.durability == "fsync":
            topic.is_durable()
        return appended, False

    def known_key(self, topic: Topic, key: str | None) -> Key | None:
        found = topic.keys.get(key) if key is not None else None
        inside = found is not None and self.time - found.ts <= topic.config.idempotency_window_ms
        return found if inside else None

    def _check_producer(self, topic: Topic, client_id: str, client_seqs: tuple[int, ...]) -> None:
        producer = topic.producers.get(client_id)
        if producer is not None and client_seqs[0] <= producer.last:
            detail: dict[str, Any] = {"last_client_seq": producer.last}
            if client_seqs == producer.client_seqs:
                detail["seqs"] = list(producer.appended.seqs)
            raise Refused("idempotency_conflict", **detail)

    def delete(self, name: str, before_seq: int | None, match: Any, purpose: str) -> int:
        topic = self.topic(name)
        deleted = topic.delete(before_seq, match, purpose, self.time)
        topic.is_durable()
        return deleted

    # -- transactions ----------------------------------------------------------------------------------------------

    def spool(self, txn_id: str, name: str, part: str, chunk: int, items: Sequence[Item]) -> tuple[int, bool]:
        """How many records the chunk has, and whether it was there already."""
        if txn_id in self.ended_txns:
            raise Refused("txn_not_found")
        txn = self.txns.setdefault(txn_id, Txn(self.time))
        txn.last_used = self.time
        txn.epochs.setdefault(name, self.topics[name].epoch if name in self.topics else None)
        chunks = txn.parts.setdefault(part, {}).setdefault(name, {})
        repeated = chunk in chunks
        return len(chunks.setdefault(chunk, tuple(items))), repeated

    def commit(
        self,
        txn_id: str,
        parts: Sequence[tuple[str, dict[str, int]]],
        client: tuple[str, int] | None,
        epochs: list[int],
    ) -> tuple[dict[str, Appended], bool]:
        """What every topic got, and whether it was a repeat. New topics take the next of `epochs`."""
        if client is not None and client[0] in self.committed:
            last, results = self.committed[client[0]]
            if client[1] < last:
                raise Refused("idempotency_conflict", last_client_seq=last)
            if client[1] == last:
                self._end(txn_id)
                return results, True
        ended = self.ended_txns.get(txn_id)
        if ended is not None and client is None:
            return ended, True
        if txn_id not in self.txns and (parts or client is None):
            raise Refused("txn_not_found")
        txn = self.txns.get(txn_id, Txn(self.time))
        txn.last_used = self.time
        for part, counts in parts:
            have = {name: sum(map(len, chunks.values())) for name, chunks in txn.parts.get(part, {}).items()}
            if have != counts:
                raise Refused("txn_incomplete")
        items: dict[str, list[Item]] = {}
        for part, _ in parts:
            for name, chunks in txn.parts[part].items():
                items.setdefault(name, []).extend(item for number in sorted(chunks) for item in chunks[number])
        for name, own in items.items():
            self._check_target(name, txn.epochs[name], own)
        results = {}
        for name, own in items.items():
            if name not in self.topics:
                self.topics[name] = Topic(name, epochs.pop(0), Config())
            topic = self.topics[name]
            results[name] = topic.append(own, None, self.time)
            topic.is_durable()
        if client is not None:
            self.committed[client[0]] = (client[1], results)
        self._end(txn_id, results)
        return results, False

    def _check_target(self, name: str, epoch: int | None, items: Sequence[Item]) -> None:
        topic = self.topics.get(name)
        if epoch is not None and (topic is None or topic.epoch != epoch):
            raise Refused("topic_not_found", topic=name)
        if topic is not None:
            topic.settle(self.time)
            topic.check_room(items)

    def abort(self, txn_id: str) -> None:
        if txn_id not in self.txns:
            raise Refused("txn_not_found")
        self._end(txn_id)

    def tick(self) -> None:
        for txn_id, txn in list(self.txns.items()):
            if self.time - txn.last_used > self._txn_timeout_ms:
                self._end(txn_id)

    def _end(self, txn_id: str, results: dict[str, Appended] | None = None) -> None:
        if self.txns.pop(txn_id, None) is not None:
            self.ended_txns[txn_id] = results

    def restart(self) -> None:
        """Spools do not survive; nor does the memory of which ids have ended."""
        self.txns.clear()
        self.ended_txns.clear()
        for topic in self.topics.values():
            topic.doubt()
