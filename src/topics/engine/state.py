"""The whole state of a data directory, and the fold that makes it: one event after the other, in the log's order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from topics.core.clock import Ratchet
from topics.core.config import TopicConfig
from topics.core.errors import CorruptDirectory
from topics.core.tombstone import Hole
from topics.engine import deletion, frames, jobs, retention
from topics.engine.dedupe import Appended
from topics.engine.sealed import ChunkStore, LostRange
from topics.engine.topic import Topic
from topics.storage.frame import Frame


class CommittedTxn:
    """The last transaction of a client, over all topics."""

    __slots__ = ("client_seq", "topics")

    def __init__(self, client_seq: int, topics: dict[str, Appended]) -> None:
        self.client_seq = client_seq
        self.topics = topics


class State:
    def __init__(self, store: ChunkStore, time: Ratchet) -> None:
        self.store = store
        self.time = time
        self.topics: dict[int, Topic] = {}
        self.by_name: dict[str, Topic] = {}
        self.names: list[str] = []
        self.next_epoch = 1
        self.txn_clients: dict[str, CommittedTxn] = {}
        # Damage that the fold met on its way: holes that are not in the log yet.
        self.found_lost: list[tuple[Topic, LostRange]] = []
        self.repairing = False
        # Hears of every topic that becomes visible.
        self.on_added: Callable[[Topic], None] | None = None

    def create(self, epoch: int, name: str, config: TopicConfig) -> Topic:
        topic = Topic(name, epoch, config, self.store)
        self.add(topic)
        return topic

    def add(self, topic: Topic) -> None:
        assert topic.name not in self.by_name
        self.topics[topic.epoch] = topic
        self.by_name[topic.name] = topic
        insort(self.names, topic.name)
        self.next_epoch = max(self.next_epoch, topic.epoch + 1)
        if self.on_added is not None:
            self.on_added(topic)

    def drop(self, topic: Topic) -> None:
        del self.topics[topic.epoch]
        del self.by_name[topic.name]
        del self.names[bisect_left(self.names, topic.name)]
        for extent in topic.extents:
            if extent.place is not None:
                self.store.dead_bytes += extent.place.bytes
        topic.bytes = 0
        topic.dropped = True
        topic.wake()

    def end_reservations(self) -> None:
        """A life's reservations are its own: what was reserved and not lost at its end is free again."""
        for topic in self.topics.values():
            topic.ceiling = topic.head_seq

    def guard(self, topic: Topic, work: Callable[[], object]) -> None:
        """Does work on a topic; sealed bytes that prove wrong on the way become a hole, and the work goes on."""
        for _ in range(len(topic.extents) * 1024 + 1024):
            try:
                work()
                return
            except LostRange as lost:
                topic.lose(lost.first, lost.last, "corrupt")
                self.found_lost.append((topic, lost))
        raise AssertionError("every pass loses a chunk, and chunks are finite")

    def apply(self, frame: Frame) -> None:
        """Replays one event. Events of a topic that a later event deletes may find it gone already."""
        kind = frame.kind
        if kind == frames.OPEN:
            self.time.advance(frames.read_opened(frame).now)
            self.end_reservations()
            return
        if kind == frames.COMMIT:
            done = frames.read_committed(frame)
            self.txn_clients[done.client_id] = CommittedTxn(done.client_seq, done.topics)
            return
        if kind == frames.CREATE:
            made = frames.read_created(frame)
            self.create(frame.epoch, made.name, made.config)
            return
        topic = self.topics.get(frame.epoch)
        if topic is not None:
            self._apply_to(topic, frame)

    def _apply_to(self, topic: Topic, frame: Frame) -> None:
        kind = frame.kind
        if kind == frames.APPEND:
            batch = frames.read_batch(frame)
            self.time.advance(batch.ts)
            self._close_gap(topic, frame)
            self.guard(topic, lambda: retention.expire(topic, batch.ts))
            topic.append(batch)
            self.guard(topic, lambda: retention.evict(topic))
        elif kind == frames.RESERVE:
            topic.ceiling = max(topic.ceiling, frame.first)
            self.time.advance(frame.last)
        elif kind == frames.WRITTEN:
            topic.dedupe.add(frames.read_written(frame), topic.config.idempotency_window_ms)
        elif kind == frames.HOLE:
            hole = frames.read_hole(frame)
            if topic.is_lost(hole.first, hole.last):
                return
            if hole.last < topic.next_seq:
                topic.lose(hole.first, hole.last, hole.reason)
            else:
                self._close_gap(topic, frame)
                topic.add_hole(hole)
        elif kind == frames.EXPIRED:
            self.time.advance(frame.last)
            self.guard(topic, lambda: retention.expire_through(topic, frame.first))
        elif kind == frames.EVICTED:
            self.guard(topic, lambda: retention.evict_through(topic, frame.first))
        elif kind == frames.DELETE:
            what = frames.read_deleted(frame)
            self.guard(topic, lambda: deletion.delete(topic, what))
        elif kind == frames.QUEUE:
            event = frames.read_queued(frame)
            self.guard(topic, lambda: jobs.fold(topic, event))
        elif kind == frames.CONFIG:
            self._close_gap(topic, frame)
            topic.config = frames.read_config(frame)
            self.guard(topic, lambda: retention.evict(topic))
        elif kind == frames.RESTART:
            topic.restart(frame.last, frame.first)
        elif kind == frames.DROP:
            self.drop(topic)
        else:
            raise AssertionError(f"unknown event kind {kind}")

    def _close_gap(self, topic: Topic, frame: Frame) -> None:
        """Seqs that the log does not have between an event and the one before it."""
        missing = frame.first - 1
        if missing < topic.next_seq:
            return
        if topic.config.durability == "ephemeral":
            topic.lose_top(missing, self.time.latest)
        elif self.repairing:
            topic.add_hole(Hole(topic.next_seq, missing, "corrupt"))
        else:
            raise CorruptDirectory(
                f"topic {topic.name!r}: the log goes from seq {topic.head_seq} to {frame.first} "
                f"(position {frame.at:#x}); `topics verify --repair` turns what is missing into holes"
            )
