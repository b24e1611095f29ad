"""What the crash and fault tests share: a log on a simulated disk, and a ledger of everything that was promised of it.

A `World` does every verb through the embedded API and writes down what was answered. Whatever was still on its way when
the machine went is in flight: after a recovery it must be there whole or not at all. `World.reborn` opens the disk that
is left and holds it against the ledger.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from tests.simdisk import MODES, PowerCut, SimDisk
from topics.core.config import Durability, TopicConfig
from topics.core.errors import TopicNotFound
from topics.core.records import decode_write, encode_write
from topics.core.tombstone import Hole, Tombstone
from topics.engine.commit import Commit
from topics.engine.options import Options
from topics.log import Log

CLASSES: tuple[Durability, ...] = ("ephemeral", "memory", "disk", "fsync")
KILL = "kill"
ENDS: tuple[str, ...] = (*MODES, KILL)
"""How a life ends: the power goes, in one of the disk's modes, or only the process is killed."""

OPTIONS = Options(checkpoint_bytes=1 << 30, cache_bytes=2048, reclaim_bytes=1 << 30)
"""Checkpoints happen only when a test asks for them."""

DEEP = os.environ.get("TOPICS_DEEP") == "1"

_BACKGROUND_SYNC_MS = 100


def shrink_chunks(monkeypatch: pytest.MonkeyPatch, size: int = 400) -> None:
    """Makes a few records fill a chunk."""
    for module in ("chunk", "topic", "extent", "checkpoint"):
        monkeypatch.setattr(f"topics.engine.{module}.TARGET_BYTES", size)


class ManualClock:
    """Stands still until a test moves it."""

    def __init__(self, at: int = 1_000_000) -> None:
        self.at = at

    def now(self) -> int:
        return self.at

    def advance(self, by: int) -> None:
        self.at += by


# What a reader sees.


class _Wire(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: Raw
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: Raw = Raw()


_decode_wire = msgspec.json.Decoder(list[_Wire]).decode


@dataclass(frozen=True, slots=True)
class Record:
    """A record, byte for byte."""

    seq: int
    ts: int
    data: bytes
    node: str | None
    tag: str | None
    meta: bytes


@dataclass(frozen=True, slots=True)
class View:
    """Everything that can be seen of a topic."""

    state: dict[str, Any]
    records: tuple[Record, ...]
    plain: bytes
    tombstones: tuple[Tombstone, ...]
    holes: tuple[Hole, ...]
    deletes: bytes
    keys: dict[str, tuple[int, int]]
    producers: dict[str, tuple[int, int, int]]
    seeks: tuple[int, ...]

    @property
    def covered(self) -> list[tuple[int, int]]:
        """The seqs that readers are told are lost, as ranges."""
        return merged((tombstone.gap_from, tombstone.gap_to) for tombstone in self.tombstones)


def walk(log: Log, topic: str, **query: Any) -> tuple[list[Record], list[Tombstone], bytes]:
    """Reads a topic from its beginning to its head, and proves that the answers are in order."""
    records: list[Record] = []
    tombstones: list[Tombstone] = []
    plain: list[bytes] = []
    cursor = 0
    while True:
        answer = log.diff(topic, cursor, limit=7 if cursor < 30 else 500, **query)
        if answer.tombstone is not None:
            assert answer.tombstone.gap_from > cursor or cursor == 0
            tombstones.append(answer.tombstone)
        got = [
            Record(w.seq, w.ts, bytes(w.data), w.node, w.tag, bytes(w.meta)) for w in _decode_wire(answer.records_json)
        ]
        last = cursor if answer.tombstone is None else answer.tombstone.gap_to
        for record in got:
            assert last < record.seq <= answer.next_from_seq, (topic, last, record, answer.next_from_seq)
            last = record.seq
        records += got
        plain += [bytes(part) for part in answer.parts]
        assert answer.next_from_seq > cursor or answer.caught_up
        cursor = answer.next_from_seq
        if answer.caught_up:
            return records, tombstones, b",".join(plain)


def look(log: Log, topic: str) -> View:
    tagged, tombstones, _ = walk(log, topic, include_tags=True)
    _, again, plain = walk(log, topic)
    assert again == tombstones
    state = msgspec.structs.asdict(log.get(topic))
    del state["effective_priority"], state["last_read_ts"]
    inner = log.engine.topic(topic)
    now, window = log.engine.time.now(), inner.config.idempotency_window_ms
    keys = {key: (got.first_seq, got.last_seq) for key, ts, got in inner.dedupe.lasting_keys() if now - ts <= window}
    producers = {
        name: (producer.last, producer.appended.first_seq, producer.appended.last_seq)
        for name, producer in inner.dedupe.lasting_producers().items()
    }
    times = sorted({record.ts for record in tagged})
    seeks = tuple(log.seek(topic, ts) for ts in sorted({0, *times[:2], *times[-2:], now + 1}))
    deletes = msgspec.json.encode([past.to_json() for past in log.deletes(topic).deletes])
    assert state["count"] == len(tagged), "a live record that no reader gets"
    assert state["bytes"] == sum(len(record.data) + len(record.meta) for record in tagged)
    assert state["next_seq"] == state["head_seq"] + 1
    assert state["earliest_seq"] == (tagged[0].seq if tagged else state["next_seq"])
    assert state["evict_floor"] <= state["earliest_seq"]
    assert state["holes"] == len(inner.holes)
    return View(state, tuple(tagged), plain, tuple(tombstones), tuple(inner.holes), deletes, keys, producers, seeks)


def names(log: Log) -> list[str]:
    return [state.topic for state in log.topics(page_size=1000).topics]


def dump(log: Log) -> dict[str, Any]:
    """The whole observable state of a directory."""
    views: dict[str, Any] = {name: look(log, name) for name in names(log)}
    views["$clients"] = {
        client: (done.client_seq, {name: (got.first_seq, got.last_seq) for name, got in done.topics.items()})
        for client, done in log.engine.state.txn_clients.items()
    }
    return views


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Two dumps are equal; says in what they are not."""
    assert sorted(found) == sorted(wanted)
    for name, view in found.items():
        if isinstance(view, View):
            for part in view.__slots__:
                ours, theirs = getattr(view, part), getattr(wanted[name], part)
                if isinstance(ours, dict):
                    theirs = {key: theirs.get(key) for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
                    ours = {key: ours.get(key) for key in theirs}
                assert ours == theirs, f"{name}: {part} is {ours!r}, was {theirs!r}"
        assert view == wanted[name], f"{name} is {view!r}, was {wanted[name]!r}"


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def covers(ranges: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    """Whether one of some merged ranges holds all of first..last."""
    return any(low <= first and last <= high for low, high in ranges)


# What was promised.


@dataclass(frozen=True, slots=True)
class Line:
    """A record to be written. Its data is unlike any other's, and spelled so that only the very bytes are equal."""

    data: bytes
    tag: str | None
    node: str | None
    meta: bytes

    def wire(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"data": Raw(self.data)}
        if self.tag is not None:
            parts["tag"] = self.tag
        if self.node is not None:
            parts["node"] = self.node
        if self.meta:
            parts["meta"] = Raw(self.meta)
        return parts

    def at(self, seq: int, ts: int) -> Record:
        return Record(seq, ts, self.data, self.node, self.tag, self.meta)


@dataclass(slots=True)
class Promise:
    """One instance of a topic: what its users may rely on."""

    epoch: int
    config: TopicConfig
    head: int = 0
    """The highest seq that anybody was given."""
    records: dict[int, Record] = field(default_factory=dict)
    classes: dict[int, Durability] = field(default_factory=dict)
    """Of each record, the class that it was written in."""
    synced: set[int] = field(default_factory=set)
    """Records of a lower class that a background sync has made safe."""
    deleted: set[int] = field(default_factory=set)
    lost: list[tuple[int, int]] = field(default_factory=list)
    """What readers have been told is lost: it stays so."""
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    delete_ids: list[int] = field(default_factory=list)
    ever: set[Durability] = field(default_factory=set)
    """Every class that the topic has been in."""

    def copy(self) -> Promise:
        return replace(
            self,
            records=dict(self.records),
            classes=dict(self.classes),
            synced=set(self.synced),
            deleted=set(self.deleted),
            lost=list(self.lost),
            keys=dict(self.keys),
            delete_ids=list(self.delete_ids),
            ever=set(self.ever),
        )


# What may be in flight.


@dataclass(slots=True)
class Appending:
    topic: str
    lines: list[Line]
    key: str | None = None


@dataclass(slots=True)
class Deleting:
    topic: str
    seqs: set[int]


@dataclass(slots=True)
class Putting:
    topic: str
    config: TopicConfig


@dataclass(slots=True)
class Dropping:
    topic: str


@dataclass(slots=True)
class Committing:
    writes: list[Appending]
    client: str
    client_seq: int


Intent = Appending | Deleting | Putting | Dropping | Committing


class World:
    """A log, the disk it is on, and the ledger. Every verb writes down what it was promised when it returns."""

    def __init__(self, disk: SimDisk, clock: ManualClock | None = None, options: Options = OPTIONS) -> None:
        self.disk = disk
        self.clock = clock or ManualClock()
        self.options = options
        self.promises: dict[str, Promise] = {}
        self.epochs: set[int] = set()
        self.clients: dict[str, int] = {}
        self.flight: list[Intent] = []
        self.closed = False
        self._serial = count(1)
        self.log = self._open()

    def _open(self) -> Log:
        return Log(self.disk, clock=self.clock, options=self.options, background=False)

    # -- the verbs -------------------------------------------------------------------------------------------------

    def put(self, topic: str, **config: Any) -> None:
        old = self.promises.get(topic)
        wanted = msgspec.structs.replace(old.config if old is not None else TopicConfig(), **config)
        self.flight.append(Putting(topic, wanted))
        result = self.log.put(topic, config)
        assert result.created == (old is None)
        assert result.config == wanted.to_json()
        self._acked_put(topic, wanted)
        self.flight.pop()

    def _acked_put(self, topic: str, config: TopicConfig) -> None:
        promise = self.promises.get(topic)
        if promise is None:
            epoch = self.log.get(topic).epoch
            assert epoch not in self.epochs, "an epoch is never used again"
            self.epochs.add(epoch)
            promise = self.promises[topic] = Promise(epoch, config, head=config.seq_base - 1)
        promise.config = config
        promise.ever.add(config.durability)

    def name(self, prefix: str) -> str:
        """A name that nothing else has."""
        return f"{prefix}{next(self._serial)}"

    def lines(self, number: int, size: int = 20) -> list[Line]:
        made: list[Line] = []
        for _ in range(number):
            n = next(self._serial)
            pad = "x" * (size + n % 5)
            tag = ("red", "blue", None)[n % 3]
            node = "a" if n % 4 == 0 else None
            meta = b'{ "k":"%d" }' % n if n % 5 == 0 else b""
            made.append(Line(b'{ "n":%d,"f":1.0e0, "p":"%b"}' % (n, pad.encode()), tag, node, meta))
        return made

    def append(self, topic: str, number: int = 1, key: str | None = None, size: int = 20, **fields: Any) -> list[int]:
        write = Appending(topic, self.lines(number, size), key)
        self.flight.append(write)
        if key is not None:
            fields["idempotency_key"] = key
        result = self.log.append(topic, [line.wire() for line in write.lines], **fields)
        assert not result.deduped
        if topic not in self.promises:
            self._acked_put(topic, log_config(self.log, topic))
        self._acked_append(write, result.seqs)
        self.flight.remove(write)
        return result.seqs

    def _acked_append(self, write: Appending, seqs: Sequence[int]) -> None:
        promise = self.promises[write.topic]
        assert list(seqs) == list(range(seqs[0], seqs[0] + len(write.lines)))
        assert seqs[0] > promise.head, f"seq {seqs[0]} of {write.topic} was handed out before"
        ts = self.log.engine.time.latest
        for seq, line in zip(seqs, write.lines, strict=True):
            promise.records[seq] = line.at(seq, ts)
            promise.classes[seq] = promise.config.durability
        promise.head = seqs[-1]
        if write.key is not None:
            promise.keys[write.key] = (seqs[0], seqs[-1])

    def group(self, *writes: tuple[str, int]) -> None:
        """Several writes staged in one turn, one flush for all of them."""
        staged: list[tuple[Appending, Commit]] = []
        for topic, number in writes:
            write = Appending(topic, self.lines(number))
            self.flight.append(write)
            body = encode_write([line.wire() for line in write.lines])
            commit = self.log.engine.write(topic, decode_write(body, self.log.engine.limits))
            if commit.done:
                self._acked_commit(write, commit)
            else:
                staged.append((write, commit))
        for write, commit in staged:
            commit.on_done(lambda commit, write=write: self._acked_commit(write, commit))  # type: ignore[misc]
        self.log.engine.flush()
        assert not any(write in self.flight for write, _ in staged)

    def _acked_commit(self, write: Appending, commit: Commit) -> None:
        self._acked_append(write, commit.value().seqs)
        self.flight.remove(write)

    def delete(self, topic: str, before_seq: int | None = None, match: str | None = None) -> int:
        promise = self.promises[topic]
        seqs = {
            seq
            for seq, record in promise.records.items()
            if (before_seq is None or seq < before_seq) and (match is None or record.tag == match)
        }
        self.flight.append(Deleting(topic, seqs))
        result = self.log.delete(topic, before_seq=before_seq, match=match)
        self._acked_delete(topic, seqs)
        promise.delete_ids.append(self.log.deletes(topic).last_id)
        self.flight.pop()
        return result.deleted

    def _acked_delete(self, topic: str, seqs: Iterable[int]) -> None:
        promise = self.promises[topic]
        for seq in list(seqs):
            promise.deleted.add(seq)
            del promise.records[seq]

    def drop(self, topic: str) -> None:
        self.flight.append(Dropping(topic))
        assert self.log.drop(topic)
        del self.promises[topic]
        self.flight.pop()

    def transact(self, writes: dict[str, int], client: str = "c") -> None:
        """A transaction of one part over several topics."""
        appends = [Appending(topic, self.lines(number)) for topic, number in writes.items()]
        txn = self.name("txn-")
        for write in appends:
            self.log.spool(txn, write.topic, "p", 0, [line.wire() for line in write.lines])
        number = self.clients.get(client, 0) + 1
        self.flight.append(Committing(appends, client, number))
        result = self.log.commit(txn, [{"part": "p", "records": writes}], client, number)
        assert not result.deduped
        for write in appends:
            self._acked_append(write, result.topics[write.topic].seqs)
            promise = self.promises[write.topic]
            if promise.config.durability != "ephemeral":
                promise.synced |= set(result.topics[write.topic].seqs)
        self.clients[client] = number
        self.flight.pop()

    def checkpoint(self) -> None:
        self.log.checkpoint()
        self._all_safe()

    def tick(self) -> None:
        """Time passes, and the background work of that time is done: the un-fsynced tail is empty again."""
        self.clock.advance(_BACKGROUND_SYNC_MS)
        self.log.engine.tick()
        self._all_safe()

    def close(self) -> None:
        self.log.close()
        if self.log.engine.committer.read_only is None:
            self.closed = True
            self._all_safe()

    def _all_safe(self) -> None:
        for promise in self.promises.values():
            promise.synced |= {seq for seq in promise.records if promise.classes[seq] != "ephemeral"}

    # -- another life ----------------------------------------------------------------------------------------------

    def end(self, how: str, rng: Random) -> SimDisk:
        """The disk that is left when this life ends so; a life can end in several ways."""
        return left_by(self.disk, how, rng)

    def reborn(self, disk: SimDisk, how: str) -> World:
        """Opens what is left, and holds it against the ledger; what was in flight is settled by what is found."""
        world = World.__new__(World)
        world.disk = disk
        world.clock = self.clock
        world.options = self.options
        world.promises = {name: promise.copy() for name, promise in self.promises.items()}
        world.epochs = set(self.epochs)
        world.clients = dict(self.clients)
        world.flight = list(self.flight)
        world.closed = False
        world._serial = self._serial
        world.log = world._open()
        Audit(world, killed=how == KILL, clean=self.closed).run()
        return world

    def same_again(self) -> None:
        """Recovery twice is recovery once, whether the process or the machine is lost in between."""
        before = dump(self.log)
        for disk in (self.disk.copy().power_cut(Random(1), "drop"), self.disk.kill()):
            self.disk = disk
            self.log = self._open()
            assert_same(dump(self.log), before)

    def go_on(self) -> None:
        """Life goes on in every topic: new seqs are above all that anybody was given, new epochs are new."""
        for name in list(self.promises):
            self.append(name)
        self.put(self.name("new-"), durability="fsync")


def left_by(disk: SimDisk, how: str, rng: Random) -> SimDisk:
    """What a kill or a power cut leaves of a disk."""
    if how == KILL:
        return disk.kill()
    return disk.power_cut(rng, next(mode for mode in MODES if mode == how))


def log_config(log: Log, topic: str) -> TopicConfig:
    return log.engine.topic(topic).config


class Audit:
    """Holds a recovered log against the ledger."""

    def __init__(self, world: World, killed: bool, clean: bool = False) -> None:
        self.world = world
        self.killed = killed
        self.clean = clean
        self.views: dict[str, View] = {name: look(world.log, name) for name in names(world.log)}

    def run(self) -> None:
        flight, self.world.flight = self.world.flight, []
        self._settle_topics(flight)
        for intent in flight:
            if isinstance(intent, Committing):
                self._settle_txn(intent)
        for intent in flight:
            if isinstance(intent, Appending) and intent.topic in self.views:
                self._settle_append(intent)
        for name, promise in self.world.promises.items():
            deletes = [intent for intent in flight if isinstance(intent, Deleting) and intent.topic == name]
            self._check_topic(name, promise, deletes)
        for client, number in self.world.clients.items():
            assert self.world.log.engine.state.txn_clients[client].client_seq == number
        self.world._all_safe()

    # -- topics ----------------------------------------------------------------------------------------------------

    def _settle_topics(self, flight: Sequence[Intent]) -> None:
        """An acked creation, change or deletion is there; one in flight is there or not."""
        world = self.world
        for intent in flight:
            if isinstance(intent, Dropping) and intent.topic not in self.views:
                del world.promises[intent.topic]
            elif isinstance(intent, Putting) and intent.topic in self.views:
                if log_config(world.log, intent.topic) == intent.config:
                    world._acked_put(intent.topic, intent.config)
            elif isinstance(intent, Appending) and intent.topic in self.views:
                world._acked_put(intent.topic, log_config(world.log, intent.topic))
        assert sorted(self.views) == sorted(world.promises), "topics are lost, or came back"
        for name, promise in world.promises.items():
            assert self.views[name].state["epoch"] == promise.epoch
            assert log_config(world.log, name) == promise.config

    # -- what was in flight ----------------------------------------------------------------------------------------

    def _found(self, write: Appending) -> list[Record]:
        """The records of a write: all of them, next to each other, or none."""
        if write.topic not in self.views:
            return []
        wanted = {line.data for line in write.lines}
        found = [record for record in self.views[write.topic].records if record.data in wanted]
        if found:
            assert [record.data for record in found] == [line.data for line in write.lines], "a write is there in part"
            assert [record.seq for record in found] == list(range(found[0].seq, found[0].seq + len(found)))
            assert found[0].seq > self.world.promises[write.topic].head
        return found

    def _settle_append(self, write: Appending) -> None:
        found = self._found(write)
        promise = self.world.promises[write.topic]
        for record, line in zip(found, write.lines, strict=False):
            assert record == line.at(record.seq, record.ts)
            promise.records[record.seq] = record
            promise.classes[record.seq] = promise.config.durability
            promise.synced.add(record.seq)
            promise.head = record.seq
        if write.key is not None:
            assert (write.key in self.views[write.topic].keys) == bool(found), "a key survives as its records do"
            if found:
                promise.keys[write.key] = (found[0].seq, found[-1].seq)

    def _settle_txn(self, txn: Committing) -> None:
        stays = [write for write in txn.writes if self.world.promises[write.topic].config.durability != "ephemeral"]
        there = [bool(self._found(write)) for write in stays]
        assert all(there) or not any(there), "a transaction is there in part"
        known = self.world.log.engine.state.txn_clients.get(txn.client)
        committed = known is not None and known.client_seq == txn.client_seq
        if stays:
            assert committed == there[0]
        if committed:
            assert known is not None
            self.world.clients[txn.client] = txn.client_seq
            for write in txn.writes:
                promise = self.world.promises[write.topic]
                promise.head = max(promise.head, promise.head if write in stays else known.topics[write.topic].last_seq)
        for write in txn.writes:
            self._settle_append(write)

    # -- what was promised -----------------------------------------------------------------------------------------

    def _check_topic(self, name: str, promise: Promise, deletes: Sequence[Deleting]) -> None:
        view = self.views[name]
        present = {record.seq: record for record in view.records}
        covered = view.covered
        assert view.state["head_seq"] >= promise.head, "acked seqs would be handed out again"
        assert not promise.deleted & set(present), "deleted records came back"
        unknown = set(present) - set(promise.records)
        assert not unknown, f"records that nobody wrote, or that were lost before: {unknown}"
        for first, last in promise.lost:
            assert covers(covered, first, last), f"{name}: the loss of {first} to {last} is forgotten"
        for intent in deletes:
            self._settle_delete(name, promise, intent, present, covered)
        for tombstone in view.tombstones:
            inside = [seq for seq in present if tombstone.gap_from <= seq <= tombstone.gap_to]
            assert not inside, f"{inside} are there, and readers are told that they are lost"
        self._check_records(name, promise, view, present)
        self._check_no_needless_hole(name, promise, view)
        self._check_rest(promise, view)
        promise.lost = covered

    def _settle_delete(
        self,
        name: str,
        promise: Promise,
        intent: Deleting,
        present: dict[int, Record],
        covered: Sequence[tuple[int, int]],
    ) -> None:
        left = intent.seqs & set(present)
        missing = {seq for seq in intent.seqs - left if not covers(covered, seq, seq)}
        assert not left or not missing, "a delete is there in part"
        if not left:
            self.world._acked_delete(name, intent.seqs)

    def _check_records(self, name: str, promise: Promise, view: View, present: dict[int, Record]) -> None:
        first_lost: int | None = None
        for seq, record in sorted(promise.records.items()):
            if seq in present:
                assert present[seq] == record
                assert first_lost is None or promise.classes[first_lost] == "ephemeral", "only a tail can be lost"
                continue
            reasons = [each.reason for each in view.tombstones if each.gap_from <= seq <= each.gap_to]
            assert reasons, f"{name}: seq {seq} is missing, and nobody is told"
            own = promise.classes[seq]
            assert own != "fsync", f"{name}: the fsync record {seq} is lost"
            if own == "ephemeral":
                assert reasons == ["restart"], reasons
            else:
                assert reasons == ["crash"] or "ephemeral" in promise.ever, reasons
                assert seq not in promise.synced, f"{name}: seq {seq} was synced long ago and is lost"
                assert not self.clean
                assert own == "memory" or not self.killed, f"{name}: a kill has lost the {own} record {seq}"
            first_lost = seq if first_lost is None else first_lost
            del promise.records[seq]

    def _check_no_needless_hole(self, name: str, promise: Promise, view: View) -> None:
        certain: set[Durability] = {"disk", "fsync"} if self.killed else {"fsync"}
        if self.clean:
            certain |= {"memory", "disk"}
        if promise.ever <= certain:
            assert view.covered == promise.lost, f"{name}: a loss where nothing can be lost: {view.tombstones}"
            assert view.state["holes"] == len(promise.lost)
        if promise.ever == {"ephemeral"}:
            assert view.state["evict_floor"] == view.state["head_seq"] + 1
            assert view.state["holes"] == 0

    def _check_rest(self, promise: Promise, view: View) -> None:
        """Dedupe lives as long as the records of its write, and the history of deletes stays."""
        for key, (first, last) in list(promise.keys.items()):
            alive = all(
                promise.classes[seq] != "ephemeral" and (seq in promise.records or seq in promise.deleted)
                for seq in range(first, last + 1)
            )
            assert (view.keys.get(key) == (first, last)) == alive, f"key {key} of {first} to {last}: {view.keys}"
            if not alive:
                del promise.keys[key]
        ids = {past["id"] for past in msgspec.json.decode(view.deletes)}
        assert ids >= set(promise.delete_ids)


# Crashing at every call.

Act = Callable[[World], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is done first, and what is then cut short at every one of its calls."""

    name: str
    prepare: Callable[[World, Durability], None]
    act: Act
    options: Options = OPTIONS


def crashes(scenario: Scenario, durability: Durability) -> Iterator[World]:
    """The worlds in which the scenario was cut short in its first, second, ... call, and one where it was not."""
    for number in count(1):
        world = World(SimDisk(Random(number)), options=scenario.options)
        scenario.prepare(world, durability)
        world.disk.crash_at = world.disk.calls + number
        try:
            scenario.act(world)
        except PowerCut:
            yield world
            continue
        assert number > 1 or durability == "ephemeral", "this scenario does no I/O"
        yield world
        return


def is_there(log: Log, topic: str) -> bool:
    try:
        log.get(topic)
    except TopicNotFound:
        return False
    return True
