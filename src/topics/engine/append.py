"""Writing to a topic: the checks that need its state, the seqs, the class's promise, and the publication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from topics.core.config import TopicConfig
from topics.core.errors import (
    BatchTooLarge,
    IdempotencyConflict,
    RecordTooLarge,
    StorageFault,
    Throttled,
    TopicFull,
)
from topics.core.limits import MAX_INTEGER, RESERVE_AHEAD, Limits
from topics.core.records import AnyWrite, Batch, PlainRecord, PlainWrite, Record, render, render_run, size_of
from topics.core.tombstone import Hole
from topics.engine import frames, retention
from topics.engine.commit import Commit, Committer, Level
from topics.engine.dedupe import Appended, Producer, Written, digest_of
from topics.engine.frames import Event
from topics.engine.sealed import LostRange
from topics.engine.topic import Topic

LEVELS = {
    "ephemeral": Level.ACCEPTED,
    "memory": Level.ACCEPTED,
    "disk": Level.WRITTEN,
    "fsync": Level.SYNCED,
}


# Seqs are reserved a block ahead; under heavy writing up to this many, and one again after a moment of quiet.
_MAX_BLOCKS = 16
_QUIET_MS = 1000


class WriteResult(msgspec.Struct):
    topic: str
    appended: Appended
    head_seq: int
    created: bool
    deduped: bool

    @property
    def first_seq(self) -> int:
        return self.appended.first_seq

    @property
    def last_seq(self) -> int:
        return self.appended.last_seq

    @property
    def seqs(self) -> list[int]:
        return self.appended.seqs

    @property
    def count(self) -> int:
        return self.appended.count


class SharedResult(msgspec.Struct):
    """Where a run of several writes begins; their records follow one another."""

    first_seq: int
    head_seq: int


class Appender:
    def __init__(self, limits: Limits, committer: Committer, settle: Callable[[Topic], None]) -> None:
        self._limits = limits
        self._committer = committer
        self._settle = settle
        # Hears of sources that have something new for their routers.
        self.on_published: Callable[[Topic, Sequence[Batch | Hole]], None] | None = None

    def write(self, topic: Topic, write: AnyWrite, now: int, created: bool = False) -> Commit:
        if write.idempotency_key is not None or write.client_id is not None:
            repeated = self._find_repeat(topic, write, now)
            if repeated is not None:
                return repeated
        records = write.records
        if self._limits.max_total_bytes:
            self.check_total(topic.store.live_bytes)
        self.check_seqs(topic.name, topic.staged_seq, records)
        config = topic.staged_config
        if config.discard == "reject":
            self._settle(topic)
            live_count, live_bytes = topic.count + topic.pending_count, topic.bytes + topic.pending_bytes
            self.check_fits(topic.name, config, records, live_count, live_bytes)
        pieces = self.assign(topic, records, write.node, now)
        appended = appended_of(records, pieces)
        events: list[Event] = []
        level = LEVELS[config.durability]
        if config.durability != "ephemeral":
            events = [event_of(topic, piece) for piece in pieces]
        written = self._remember(write, appended, now)
        if written is not None and events:
            events.append(frames.written(topic.epoch, written))
        if self.reserve(topic, appended.last_seq, now):
            level = Level.SYNCED
        self.hold(topic, pieces)
        commit = self._committer.stage(
            level,
            (topic,),
            events,
            lambda: self._publish(topic, pieces, appended, written, created, not events),
            atomic=True,
        )
        if not commit.done:
            self._note_inflight(topic, write, commit)
        return commit

    def write_shared(self, topic: Topic, writes: Sequence[PlainWrite], now: int) -> Commit:
        """Plain writes that arrived together, as one run: flat, and for the hot path only.

        Nothing of them needs an answer of its own beside its seqs: no key, no producer, no cap that refuses.
        """
        records = [record for write in writes for record in write.records] if len(writes) > 1 else writes[0].records
        if self._limits.max_total_bytes:
            self.check_total(topic.store.live_bytes)
        self.check_seqs(topic.name, topic.staged_seq, records)
        batch = render_run(records, None, topic.staged_seq, now)
        last_seq = batch.last_seq
        topic.staged_seq = last_seq + 1
        durability = topic.staged_config.durability
        events = (frames.appended(topic.epoch, batch),) if durability != "ephemeral" else ()
        level = Level.SYNCED if self.reserve(topic, last_seq, now) else LEVELS[durability]
        pieces = [batch]
        self.hold(topic, pieces)

        def publish() -> SharedResult:
            self.release(topic, pieces)
            self.publish_pieces(topic, pieces)
            return SharedResult(batch.first_seq, topic.next_seq - 1)

        return self._committer.stage(level, (topic,), events, publish)

    def check_fits(
        self, name: str, config: TopicConfig, records: Sequence[Record], live_count: int, live_bytes: int
    ) -> None:
        """Refuses what a topic with `discard: "reject"` has no room for."""
        if config.discard != "reject" or not (config.cap_records or config.cap_bytes):
            return
        sizes = [size_of(record) for record in records if record.hole is None]
        count, size = len(sizes), sum(sizes)
        if config.cap_records and count > config.cap_records:
            raise BatchTooLarge(f"{count} records can never fit: cap_records of {name!r} is {config.cap_records}")
        if config.cap_bytes and size > config.cap_bytes:
            what = RecordTooLarge if count == 1 else BatchTooLarge
            raise what(f"{size} bytes can never fit: cap_bytes of {name!r} is {config.cap_bytes}")
        if config.cap_records and live_count + count > config.cap_records:
            raise TopicFull(
                f"topic {name!r} has {live_count} records, no room for {count}: cap_records is {config.cap_records}",
                topic=name,
            )
        if config.cap_bytes and live_bytes + size > config.cap_bytes:
            raise TopicFull(
                f"topic {name!r} has {live_bytes} bytes, no room for {size}: cap_bytes is {config.cap_bytes}",
                topic=name,
            )

    def check_total(self, live_bytes: int) -> None:
        most = self._limits.max_total_bytes
        if most and live_bytes >= most:
            raise Throttled(
                f"all topics together have {live_bytes} bytes, TOPICS_MAX_TOTAL_BYTES is {most}",
                limit="TOPICS_MAX_TOTAL_BYTES",
                max=most,
            )

    def check_seqs(self, name: str, next_seq: int, records: Sequence[Record]) -> None:
        """Refuses what would run out of seqs."""
        plain = isinstance(records[0], PlainRecord) or not any([record.hole for record in records])
        if plain and next_seq + len(records) <= MAX_INTEGER:
            return
        last = next_seq - 1 + sum(record.hole or 1 for record in records)
        if last > MAX_INTEGER:
            raise TopicFull(f"topic {name!r} has no seqs for this: {last} is above {MAX_INTEGER}", topic=name)

    def assign(self, topic: Topic, records: Sequence[Record], node: str | None, now: int) -> list[Batch | Hole]:
        """Gives records their seqs and renders them. From here on the seqs are taken."""
        pieces = render(records, node, topic.staged_seq, now)
        topic.staged_seq = _last_seq(pieces[-1]) + 1
        return pieces

    def reserve(self, topic: Topic, last_seq: int, now: int) -> bool:
        """Reserves seqs ahead; says whether this one is above the durable ceiling, and has to wait for a sync."""
        must_wait = last_seq > topic.ceiling
        topic.waited = topic.waited or must_wait
        if last_seq + topic.ahead // 2 > topic.reserved:
            if now - topic.reserved_at > _QUIET_MS:
                topic.ahead = RESERVE_AHEAD
            elif topic.waited:
                # Writers are faster than the sync of the last block: more blocks, or every turn waits for one.
                topic.ahead = min(2 * topic.ahead, RESERVE_AHEAD * _MAX_BLOCKS)
            topic.waited = False
            topic.reserved_at = now
            ceiling = last_seq + topic.ahead
            topic.reserved = ceiling

            def raise_ceiling() -> None:
                topic.ceiling = max(topic.ceiling, ceiling)

            self._committer.stage(Level.SYNCED, (), (frames.reserved(topic.epoch, ceiling, now),), raise_ceiling)
        return must_wait

    def hold(self, topic: Topic, pieces: Sequence[Batch | Hole]) -> None:
        """Counts records that are on their way, so that nobody else takes their room."""
        for piece in pieces:
            if isinstance(piece, Batch):
                topic.pending_count += len(piece.lens)
                topic.pending_bytes += piece.size

    def release(self, topic: Topic, pieces: Sequence[Batch | Hole]) -> None:
        for piece in pieces:
            if isinstance(piece, Batch):
                topic.pending_count -= len(piece.lens)
                topic.pending_bytes -= piece.size

    def publish_pieces(self, topic: Topic, pieces: Sequence[Batch | Hole]) -> None:
        """Makes assigned records visible and lets retention act, in the order in which a replay does."""
        if topic.outlets and self.on_published is not None:
            topic.outgoing.extend(pieces)
            self.on_published(topic, pieces)
        for piece in pieces:
            if isinstance(piece, Hole):
                topic.add_hole(piece)
                continue
            if topic.config.ttl_ms:
                self._retain(topic, lambda ts=piece.ts: retention.expire(topic, ts))  # type: ignore[misc]  # bound now
            topic.append(piece)
            if topic.config.cap_records or topic.config.cap_bytes:
                self._evict(topic)
        if topic.waiters:
            topic.wake()

    def _evict(self, topic: Topic) -> None:
        before = topic.cap_evicted
        lasts = topic.config.durability == "ephemeral" and not topic.extents[0].ephemeral
        self._retain(topic, lambda: retention.evict(topic))
        if lasts and topic.cap_evicted != before:
            # Records that stay were evicted by records that do not: a replay could not know.
            self._committer.log(frames.evicted(topic.epoch, topic.cap_evicted))
            self._committer.flush()

    def _retain(self, topic: Topic, work: Callable[[], object]) -> None:
        """Retention after a commit: a disk that does not answer only delays it."""
        if topic.unapplied:
            return
        try:
            work()
        except (StorageFault, LostRange):
            topic.unsettled = True

    def _publish(
        self,
        topic: Topic,
        pieces: list[Batch | Hole],
        appended: Appended,
        written: Written | None,
        created: bool,
        ephemeral: bool,
    ) -> WriteResult:
        self.release(topic, pieces)
        self.publish_pieces(topic, pieces)
        if written is not None:
            topic.dedupe.add(written, topic.config.idempotency_window_ms, ephemeral)
            if written.key is not None and topic.inflight_keys:
                topic.inflight_keys.pop(written.key, None)
            if written.client_id is not None and topic.inflight_clients:
                last = topic.inflight_clients.get(written.client_id)
                if last is not None and last[0] == written.client_seq:
                    del topic.inflight_clients[written.client_id]
        return WriteResult(topic.name, appended, topic.head_seq, created, deduped=False)

    # -- repeats ---------------------------------------------------------------------------------------------------

    def _remember(self, write: AnyWrite, appended: Appended, now: int) -> Written | None:
        if write.client_id is not None:
            seqs = _client_seqs(write)
            return Written(now, appended, write.idempotency_key, write.client_id, seqs[-1], digest_of(seqs))
        if write.idempotency_key is not None:
            return Written(now, appended, write.idempotency_key)
        return None

    def _note_inflight(self, topic: Topic, write: AnyWrite, commit: Commit) -> None:
        if write.idempotency_key is not None:
            if topic.inflight_keys is None:
                topic.inflight_keys = {}
            topic.inflight_keys[write.idempotency_key] = commit
        if write.client_id is not None:
            if topic.inflight_clients is None:
                topic.inflight_clients = {}
            topic.inflight_clients[write.client_id] = (_client_seqs(write)[-1], commit)

    def _find_repeat(self, topic: Topic, write: AnyWrite, now: int) -> Commit | None:
        """The answer to a write that was made before; None if it is new."""
        key = write.idempotency_key
        if key is not None:
            inflight = topic.inflight_keys.get(key) if topic.inflight_keys else None
            if inflight is not None:
                return follow(inflight, _as_repeat)
            known = topic.dedupe.by_key(key, now, topic.config.idempotency_window_ms)
            if known is not None:
                return completed(WriteResult(topic.name, known, topic.head_seq, created=False, deduped=True))
        if write.client_id is not None:
            return self._find_replay(topic, write, write.client_id)
        return None

    def _find_replay(self, topic: Topic, write: AnyWrite, client_id: str) -> Commit | None:
        first = _client_seqs(write)[0]
        inflight = topic.inflight_clients.get(client_id) if topic.inflight_clients else None
        if inflight is not None and first <= inflight[0]:
            # The outcome of the first is not known yet: the conflict is told when it is.
            def refuse(_: object) -> object:
                producer = topic.dedupe.producer(client_id)
                assert producer is not None
                raise _conflict(client_id, write, producer)

            return follow(inflight[1], refuse)
        producer = topic.dedupe.producer(client_id)
        if producer is None:
            most = self._limits.max_clients_per_topic
            if most and topic.dedupe.producer_count + len(topic.inflight_clients or ()) >= most:
                raise Throttled(
                    f"topic {topic.name!r} knows {most} strict producers, TOPICS_MAX_CLIENTS_PER_TOPIC is {most}",
                    limit="TOPICS_MAX_CLIENTS_PER_TOPIC",
                    max=most,
                )
        elif first <= producer.last:
            raise _conflict(client_id, write, producer)
        return None


def follow(commit: Commit, then: Callable[[object], object]) -> Commit:
    """A commit that is done when another one is, with a result made of its."""

    follower = Commit(Level.ACCEPTED, (), lambda: then(commit.value()))
    commit.on_done(lambda _: follower.publish())
    return follower


def _as_repeat(result: object) -> WriteResult:
    assert isinstance(result, WriteResult)
    return WriteResult(result.topic, result.appended, result.head_seq, created=False, deduped=True)


def completed(result: object) -> Commit:
    commit = Commit(Level.ACCEPTED, (), lambda: result)
    commit.publish()
    return commit


def appended_of(records: Sequence[Record], pieces: Sequence[Batch | Hole]) -> Appended:
    if len(pieces) == 1 and isinstance(pieces[0], Batch):
        return Appended(pieces[0].first_seq, pieces[0].last_seq, len(records))
    first, last = _first_seq(pieces[0]), _last_seq(pieces[-1])
    starts: list[int] = []
    for piece in pieces:
        starts.extend([piece.first] if isinstance(piece, Hole) else range(piece.first_seq, piece.last_seq + 1))
    return Appended(first, last, sum(1 for record in records if record.hole is None), starts)


def _conflict(client_id: str, write: AnyWrite, producer: Producer) -> IdempotencyConflict:
    seqs = _client_seqs(write)
    detail: dict[str, object] = {"last_client_seq": producer.last}
    if seqs[-1] == producer.last and digest_of(seqs) == producer.digest:
        detail["seqs"] = producer.appended.seqs
    return IdempotencyConflict(
        f"client_id {client_id!r} has written up to client_seq {producer.last}: "
        f"records[0].client_seq {seqs[0]} is not greater",
        **detail,
    )


def _client_seqs(write: AnyWrite) -> list[int]:
    return [record.client_seq for record in write.records if record.client_seq is not None]


def event_of(topic: Topic, piece: Batch | Hole) -> Event:
    return frames.holed(topic.epoch, piece) if isinstance(piece, Hole) else frames.appended(topic.epoch, piece)


def _first_seq(piece: Batch | Hole) -> int:
    return piece.first if isinstance(piece, Hole) else piece.first_seq


def _last_seq(piece: Batch | Hole) -> int:
    return piece.last if isinstance(piece, Hole) else piece.last_seq
