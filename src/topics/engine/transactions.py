"""Transactions: parts spooled aside, invisible and without seqs, then published over all topics in one commit.

The spool lives in files that do not survive a restart: until its commit a transaction promises nothing. The commit
is one group in the WAL, so a crash keeps all of it or none.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from topics.core.check import check_integer, check_text
from topics.core.config import ConfigPatch, TopicConfig, resolve
from topics.core.errors import (
    IdempotencyConflict,
    InvalidRequest,
    PayloadTooLarge,
    StorageFault,
    Throttled,
    TopicNotFound,
    TxnIncomplete,
    TxnNotFound,
)
from topics.core.limits import MAX_CLIENT_ID, MAX_CLIENT_SEQ, RESERVE_AHEAD, Limits
from topics.core.names import check_topic_name
from topics.core.records import AnyWrite, Batch, PlainRecord, PlainWrite, Record, RecordIn, TextWrite, Write, render
from topics.core.tombstone import Hole
from topics.engine import bulk, frames
from topics.engine.append import completed, event_of, follow
from topics.engine.commit import Commit, Level
from topics.engine.dedupe import Appended
from topics.engine.frames import Committed, Event
from topics.engine.state import CommittedTxn
from topics.engine.topic import Topic
from topics.storage.frame import MAX_PAYLOAD, Buffer
from topics.storage.fs import File, FileSystem, read_exactly, write_all

if TYPE_CHECKING:
    from topics.engine.engine import Engine

DIRECTORY = "spool"
_MAX_ID = 256
_REMEMBERED = 10_000
# What a spooled record costs beside its bytes, against the bound of a transaction.
_RECORD_OVERHEAD = 64
# What stands in a commit for a topic beside its records, and for each run of them.
_TOPIC_OVERHEAD = 4096
_RUN_OVERHEAD = 256
_MAX_UTF_8 = 4


class Part(msgspec.Struct):
    """One part of a commit, with the number of records that each topic must have got from it."""

    part: str
    records: dict[str, int]


class TxnResult(msgspec.Struct):
    txn: str
    topics: dict[str, Appended]
    deduped: bool


class TxnState(msgspec.Struct):
    txn: str
    parts: dict[str, dict[str, int]]
    bytes: int
    idle_ms: int


class Spooled(msgspec.Struct):
    """How many records a chunk has, and whether it was there already."""

    count: int
    repeated: bool


class _Spooled(msgspec.Struct, gc=False):
    """Where a chunk lies in the spool file, and the number of its elements.

    A plain one is where its records' `data` begin and the last one ends, then the datas; `node` is that of all of them.
    """

    offset: int
    length: int
    count: int
    is_plain: bool
    node: str | None


class _Target(msgspec.Struct):
    """A topic as the first spool into it found it: `epoch` None when it did not exist yet."""

    epoch: int | None
    patch: ConfigPatch


class _Stored(msgspec.Struct, array_like=True, gc=False):
    data: bytes
    tag: str | None
    node: str | None
    meta: bytes
    hole: int | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Stored]).decode


class Transaction:
    def __init__(self, txn_id: str, owner: str | None, name: str, file: File, now: int) -> None:
        self.id = txn_id
        self.owner = owner
        self.name = name
        self.file = file
        self.last_used = now
        self.size = 0
        self.end = 0
        self.targets: dict[str, _Target] = {}
        # part, topic, chunk: where it lies in the spool file.
        self.parts: dict[str, dict[str, dict[int, _Spooled]]] = {}
        self.committing: Commit | None = None

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            part: {topic: sum(spooled.count for spooled in chunks.values()) for topic, chunks in topics.items()}
            for part, topics in self.parts.items()
        }


class Transactions:
    def __init__(self, fs: FileSystem, limits: Limits, engine: Engine) -> None:
        self._fs = fs
        self._limits = limits
        self._engine = engine
        self._open: dict[str, Transaction] = {}
        # Ended transactions, the latest of them: a late chunk must not begin another one of the same id.
        # What a committed one became is kept with its owner, so that a commit whose answer was lost can be repeated.
        self._ended: dict[str, tuple[str | None, TxnResult] | None] = {}
        self._inflight: dict[str, tuple[int, Commit]] = {}
        self._number = 0
        for name in fs.listdir(DIRECTORY):
            fs.remove(f"{DIRECTORY}/{name}")

    def spool(
        self, txn_id: str, topic: str, part: str, chunk: int, write: AnyWrite | TextWrite, owner: str | None = None
    ) -> Spooled:
        """Takes one chunk of a part; a repeated one is answered, not added."""
        check_text("txn", txn_id, _MAX_ID)
        check_text("part", part, _MAX_ID)
        check_topic_name(topic)
        check_integer("chunk", chunk)
        if write.client_id is not None:
            raise InvalidRequest("client_id belongs to the commit of a transaction, not to its chunks")
        self._engine.check_open()
        txn = self._open.get(txn_id)
        if txn is None:
            if txn_id in self._ended:
                raise TxnNotFound(f"transaction {txn_id!r} has ended")
            target = self._target(topic, write)
            txn = self._begin(txn_id, owner)
            txn.targets[topic] = target
        else:
            self._check_owner(txn, owner)
            if txn.committing is not None:
                raise TxnNotFound(f"transaction {txn_id!r} is being committed")
            txn.targets.setdefault(topic, self._target(topic, write))
        chunks = txn.parts.setdefault(part, {}).setdefault(topic, {})
        known = chunks.get(chunk)
        txn.last_used = self._engine.time.now()
        if known is not None:
            return Spooled(known.count, repeated=True)
        payload = _pack(write)
        length = sum(map(len, payload))
        count = write.count if isinstance(write, TextWrite) else len(write.records)
        size = length + (_RECORD_OVERHEAD + len(write.node or "")) * count
        if txn.size + size > self._limits.max_txn_bytes:
            raise PayloadTooLarge(
                f"transaction {txn_id!r} would have {txn.size + size} bytes, "
                f"TOPICS_MAX_TXN_BYTES is {self._limits.max_txn_bytes}"
            )
        try:
            write_all(txn.file, payload)
        except OSError as error:
            self._rewind(txn)
            raise StorageFault(f"transaction {txn_id!r}: the chunk could not be spooled: {error}") from error
        chunks[chunk] = _Spooled(txn.end, length, count, not isinstance(write, Write), write.node)
        txn.end += length
        txn.size += size
        return Spooled(count, repeated=False)

    def _begin(self, txn_id: str, owner: str | None) -> Transaction:
        if self._limits.max_txns and len(self._open) >= self._limits.max_txns:
            raise Throttled(
                f"{len(self._open)} transactions are open, TOPICS_MAX_TXNS is {self._limits.max_txns}",
                limit="TOPICS_MAX_TXNS",
                max=self._limits.max_txns,
            )
        self._number += 1
        name = f"{DIRECTORY}/{self._number:012d}"
        try:
            self._fs.mkdir(DIRECTORY)
            file = self._fs.create(name)
        except OSError as error:
            raise StorageFault(f"transaction {txn_id!r}: no spool could be made: {error}") from error
        txn = self._open[txn_id] = Transaction(txn_id, owner, name, file, self._engine.time.now())
        return txn

    def _target(self, topic: str, write: AnyWrite | TextWrite) -> _Target:
        existing = self._engine.staged_topic(topic)
        if existing is not None:
            return _Target(existing.epoch, ConfigPatch())
        if not write.create:
            raise TopicNotFound(f"topic {topic!r} does not exist, and create is false")
        patch = self._engine.config_of(write)
        resolve(patch, None, topic)
        return _Target(None, patch)

    def _rewind(self, txn: Transaction) -> None:
        """Drops what a failed write left behind; a spool that cannot even do that is of no more use."""
        try:
            txn.file.truncate(txn.end)
        except OSError:
            self._drop(txn)

    def commit(
        self,
        txn_id: str,
        parts: Sequence[Part],
        client_id: str | None = None,
        client_seq: int | None = None,
        owner: str | None = None,
    ) -> Commit:
        """Publishes the named parts, in their order, over all topics at once; the result is a `TxnResult`."""
        check_text("txn", txn_id, _MAX_ID)
        if (client_id is None) != (client_seq is None):
            raise InvalidRequest("client_id and client_seq go together")
        if client_id is not None:
            check_text("client_id", client_id, MAX_CLIENT_ID)
            check_integer("client_seq", client_seq, 0, MAX_CLIENT_SEQ)
        self._engine.check_open()
        txn = self._open.get(txn_id)
        if txn is not None:
            self._check_owner(txn, owner)
        if client_id is not None and client_seq is not None:
            repeated = self._find_repeat(txn_id, txn, client_id, client_seq)
            if repeated is not None:
                return repeated
        if txn is None:
            ended = self._ended.get(txn_id)
            if ended is not None and ended[0] == owner and client_id is None:
                return completed(_as_repeat(txn_id, ended[1]))
            if parts or client_id is None:
                raise TxnNotFound(f"transaction {txn_id!r} is not open")
        elif txn.committing is not None:
            return follow(txn.committing, lambda result: _as_repeat(txn_id, result))
        else:
            txn.last_used = self._engine.time.now()
        _check_parts(txn, parts)
        done = None if client_id is None or client_seq is None else (client_id, client_seq)
        commit = self._stage(txn_id, txn, parts, done)
        if txn is not None:
            txn.committing = commit
        if done is not None and not commit.done:
            self._inflight[done[0]] = (done[1], commit)
        return commit

    def _find_repeat(self, txn_id: str, txn: Transaction | None, client_id: str, client_seq: int) -> Commit | None:
        inflight = self._inflight.get(client_id)
        if inflight is not None and inflight[0] == client_seq:
            if txn is not None and txn.committing is None:
                self._drop(txn)
            return follow(inflight[1], lambda result: _as_repeat(txn_id, result))
        known = self._engine.state.txn_clients.get(client_id)
        last = max(inflight[0] if inflight is not None else -1, known.client_seq if known is not None else -1)
        if client_seq < last:
            raise IdempotencyConflict(
                f"client_id {client_id!r} has committed client_seq {last}: {client_seq} is lower", last_client_seq=last
            )
        if known is not None and known.client_seq == client_seq:
            if txn is not None:
                self._drop(txn)
            return completed(TxnResult(txn_id, known.topics, deduped=True))
        most = self._limits.max_clients_per_topic
        if known is None and most and len(self._engine.state.txn_clients) + len(self._inflight) >= most:
            raise Throttled(
                f"{most} clients have committed transactions, TOPICS_MAX_CLIENTS_PER_TOPIC is {most}",
                limit="TOPICS_MAX_CLIENTS_PER_TOPIC",
                max=most,
            )
        return None

    def _stage(
        self, txn_id: str, txn: Transaction | None, parts: Sequence[Part], client: tuple[str, int] | None
    ) -> Commit:
        engine = self._engine
        # Everything that can be refused is refused here: what follows takes seqs and makes topics.
        rendered = self._render(txn, parts) if txn is not None else {}
        engine.check_topic_room(sum(engine.staged_topic(name) is None for name in rendered))
        engine.appender.check_total(engine.state.store.live_bytes)
        now = engine.time.now()
        events: list[Event] = []
        created: list[Topic] = []
        pieces: list[tuple[Topic, list[Batch | Hole]]] = []
        reserved: list[tuple[Topic, int]] = []
        results: dict[str, Appended] = {}
        for name, own in rendered.items():
            topic = engine.staged_topic(name)
            if topic is None:
                assert txn is not None
                topic, event = engine.stage_topic(name, resolve(txn.targets[name].patch, None, name))
                created.append(topic)
                events.append(event)
            results[name] = _appended(own)
            topic.staged_seq = results[name].last_seq + 1
            # A reservation stands behind the creation of its topic, or a replay would not know whose it is.
            topic.reserved = results[name].last_seq + RESERVE_AHEAD
            events.append(frames.reserved(topic.epoch, topic.reserved, now))
            reserved.append((topic, topic.reserved))
            pieces.append((topic, own))
            engine.appender.hold(topic, own)
            if topic.staged_config.durability != "ephemeral":
                events.extend(event_of(topic, piece) for piece in own)
        if client is not None:
            events.append(frames.committed(Committed(*client, results)))

        def publish() -> TxnResult:
            for topic in created:
                engine.state.add(topic)
            for topic, ceiling in reserved:
                topic.ceiling = max(topic.ceiling, ceiling)
            for topic, own in pieces:
                engine.appender.release(topic, own)
                engine.appender.publish_pieces(topic, own)
            if client is not None:
                engine.state.txn_clients[client[0]] = CommittedTxn(client[1], results)
                if self._inflight.get(client[0], (None,))[0] == client[1]:
                    del self._inflight[client[0]]
            result = TxnResult(txn_id, results, deduped=False)
            if txn is not None:
                self._drop(txn, result)
            return result

        topics = [topic for topic, _ in pieces]
        return engine.committer.stage(Level.SYNCED, topics, events, publish, atomic=True)

    def _render(self, txn: Transaction, parts: Sequence[Part]) -> dict[str, list[Batch | Hole]]:
        """The records of the named parts as each topic will get them, in the order of the parts and their chunks."""
        chunks_of = _chunks_of(txn, parts)
        first_seqs = {name: self._check_topic(txn, name, chunks) for name, chunks in chunks_of.items()}
        now = self._engine.time.now()
        rendered: dict[str, list[Batch | Hole]] = {}
        weight = _TOPIC_OVERHEAD * (1 + len(chunks_of))
        for name, chunks in chunks_of.items():
            pieces = rendered[name] = []
            first_seq = first_seqs[name]
            for own in bulk.in_order(self._renderings(txn, chunks, first_seq, now), len(chunks)):
                pieces += own
                weight += sum(map(_weight, own))
                _check_weight(txn.id, weight)
            # Only the number of seqs counts here, and a hole takes as many.
            seqs = _last_seq(pieces[-1]) + 1 - first_seq
            self._engine.appender.check_seqs(name, first_seq, [RecordIn(hole=seqs)])
        return rendered

    def _check_topic(self, txn: Transaction, name: str, chunks: Sequence[_Spooled]) -> int:
        """The first seq that a topic will give; one that refuses fails the whole commit before anything has changed."""
        topic = self._engine.staged_topic(name)
        target = txn.targets[name]
        if topic is None and target.epoch is None:
            config = resolve(target.patch, None, name)
            self._check_fits(txn, name, config, chunks, 0, 0)
            return config.seq_base
        if topic is None or (target.epoch is not None and topic.epoch != target.epoch):
            raise TopicNotFound(f"topic {name!r} was deleted after records had been spooled for it", topic=name)
        self._engine.settle(topic)
        count, size = topic.count + topic.pending_count, topic.bytes + topic.pending_bytes
        self._check_fits(txn, name, topic.staged_config, chunks, count, size)
        return topic.staged_seq

    def _check_fits(
        self, txn: Transaction, name: str, config: TopicConfig, chunks: Sequence[_Spooled], count: int, size: int
    ) -> None:
        # Only here every record is needed by itself: most topics never refuse.
        if config.discard == "reject":
            records = [record for chunk in chunks for record in self._records(txn, chunk)]
            self._engine.appender.check_fits(name, config, records, count, size)

    def _renderings(
        self, txn: Transaction, chunks: Sequence[_Spooled], seq: int, now: int
    ) -> Iterator[Callable[[], Sequence[Batch | Hole]]]:
        """One for each chunk. What they need is read here: whoever runs them may be on another thread."""
        for chunk in chunks:
            if chunk.is_plain:
                yield partial(bulk.render_text, *self._read_text(txn, chunk), chunk.node, seq, now)
                seq += chunk.count
            else:
                own = render(self._records(txn, chunk), chunk.node, seq, now)
                yield partial(list, own)
                seq = _last_seq(own[-1]) + 1

    def _records(self, txn: Transaction, chunk: _Spooled) -> Sequence[Record]:
        if chunk.is_plain:
            text, offsets = self._read_text(txn, chunk)
            return [PlainRecord(Raw(bytes(data))) for data in bulk.cut(text, offsets)]
        try:
            stored = _decode(self._read(txn, chunk))
        except msgspec.DecodeError as error:
            raise StorageFault(f"transaction {txn.id!r}: the spool cannot be read: {error}") from error
        return [RecordIn(Raw(one.data), one.tag, one.node, Raw(one.meta), None, one.hole) for one in stored]

    def _read_text(self, txn: Transaction, chunk: _Spooled) -> tuple[memoryview, memoryview]:
        payload = memoryview(self._read(txn, chunk))
        head = (chunk.count + 1) * bulk.OFFSET
        return payload[head:], payload[:head].cast("i")

    def _read(self, txn: Transaction, chunk: _Spooled) -> bytes:
        try:
            payload = read_exactly(txn.file, chunk.length, chunk.offset)
        except OSError as error:
            raise StorageFault(f"transaction {txn.id!r}: the spool cannot be read: {error}") from error
        if len(payload) != chunk.length:
            raise StorageFault(f"transaction {txn.id!r}: the spool is cut off")
        return payload

    def abort(self, txn_id: str, owner: str | None = None) -> None:
        txn = self._find(txn_id, owner)
        if txn.committing is not None:
            raise TxnNotFound(f"transaction {txn_id!r} is being committed")
        self._drop(txn)

    def get(self, txn_id: str, owner: str | None = None) -> TxnState:
        txn = self._find(txn_id, owner)
        return TxnState(txn.id, txn.counts(), txn.size, self._engine.time.now() - txn.last_used)

    def _find(self, txn_id: str, owner: str | None) -> Transaction:
        check_text("txn", txn_id, _MAX_ID)
        self._engine.check_not_closed()
        txn = self._open.get(txn_id)
        if txn is None:
            raise TxnNotFound(f"transaction {txn_id!r} is not open")
        self._check_owner(txn, owner)
        return txn

    def _check_owner(self, txn: Transaction, owner: str | None) -> None:
        # Somebody else's transaction is answered like one that does not exist.
        if txn.owner != owner:
            raise TxnNotFound(f"transaction {txn.id!r} is not open")

    def expire(self, now: int) -> None:
        """Drops the transactions that nobody has touched for long."""
        idle = [txn for txn in self._open.values() if now - txn.last_used > self._limits.txn_timeout_ms]
        for txn in idle:
            if txn.committing is None:
                self._drop(txn)

    def _drop(self, txn: Transaction, result: TxnResult | None = None) -> None:
        if self._open.pop(txn.id, None) is not None:
            self._ended[txn.id] = None if result is None else (txn.owner, result)
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            txn.file.close()
            try:
                self._fs.remove(txn.name)
            except OSError:
                # It is of no use to anybody; the next start removes it.
                return

    def close(self) -> None:
        for txn in list(self._open.values()):
            if txn.committing is None:
                self._drop(txn)


def _check_parts(txn: Transaction | None, parts: Sequence[Part]) -> None:
    """Every named part must be there, whole."""
    counts = txn.counts() if txn is not None else {}
    seen: set[str] = set()
    for part in parts:
        if part.part in seen:
            raise InvalidRequest(f"parts: {part.part!r} is named twice")
        seen.add(part.part)
        have = counts.get(part.part, {})
        for topic in {**part.records, **have}:
            wanted = part.records.get(topic, 0)
            if have.get(topic, 0) != wanted:
                raise TxnIncomplete(
                    f"part {part.part!r} has {have.get(topic, 0)} records for {topic!r}, the commit names {wanted}",
                    part=part.part,
                    topic=topic,
                    records=have.get(topic, 0),
                )


def _pack(write: AnyWrite | TextWrite) -> list[Buffer]:
    if isinstance(write, TextWrite):
        return [write.offsets.tobytes(), write.text]
    if isinstance(write, PlainWrite):
        datas = [record.data for record in write.records]
        return [array("i", accumulate(map(len, datas), initial=0)).tobytes(), b"".join(datas)]
    stored = [
        _Stored(bytes(record.data), record.tag, record.node, bytes(record.meta), record.hole)
        for record in write.records
    ]
    return [_encode(stored)]


def _chunks_of(txn: Transaction, parts: Sequence[Part]) -> dict[str, list[_Spooled]]:
    chunks_of: dict[str, list[_Spooled]] = {}
    for part in parts:
        for topic, chunks in txn.parts.get(part.part, {}).items():
            chunks_of.setdefault(topic, []).extend(chunks[number] for number in sorted(chunks))
    return {topic: chunks for topic, chunks in chunks_of.items() if chunks}


def _check_weight(txn_id: str, weight: int) -> None:
    """Refuses what is too long for the one frame that a commit is."""
    if weight > MAX_PAYLOAD:
        raise PayloadTooLarge(f"transaction {txn_id!r} would take more than the {MAX_PAYLOAD} bytes of a commit")


def _weight(piece: Batch | Hole) -> int:
    """At most the bytes that a piece takes in the log."""
    if isinstance(piece, Hole):
        return _RUN_OVERHEAD
    names = [name for column in (piece.tags, piece.nodes) for name in column or () if name is not None]
    text = sum(map(len, names)) * _MAX_UTF_8
    return _RUN_OVERHEAD + len(piece.body) + text + _RECORD_OVERHEAD * len(piece.lens)


def _appended(pieces: Sequence[Batch | Hole]) -> Appended:
    count = sum(len(piece.lens) for piece in pieces if isinstance(piece, Batch))
    starts: list[int] | None = None
    if any(isinstance(piece, Hole) for piece in pieces):
        starts = []
        for piece in pieces:
            starts.extend([piece.first] if isinstance(piece, Hole) else range(piece.first_seq, piece.last_seq + 1))
    return Appended(_first_seq(pieces[0]), _last_seq(pieces[-1]), count, starts)


def _first_seq(piece: Batch | Hole) -> int:
    return piece.first if isinstance(piece, Hole) else piece.first_seq


def _last_seq(piece: Batch | Hole) -> int:
    return piece.last if isinstance(piece, Hole) else piece.last_seq


def _as_repeat(txn_id: str, result: object) -> TxnResult:
    assert isinstance(result, TxnResult)
    return TxnResult(txn_id, result.topics, deduped=True)
