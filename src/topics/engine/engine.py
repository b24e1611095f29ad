"""The engine: every verb of the contract over one data directory, without HTTP.

It runs on one thread. A verb that changes something checks everything first, then stages a `Commit`; `flush` ends the
turn, and the commit is done when its class's promise is kept. Reads answer at once.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from topics.core.check import check_count, check_flag, check_integer, check_text, check_unicode, show
from topics.core.clock import Clock, Ratchet
from topics.core.config import ConfigPatch, TopicConfig, parse_patch, resolve
from topics.core.errors import (
    InvalidRequest,
    ShuttingDown,
    StorageFault,
    Throttled,
    TopicNotEmpty,
    TopicNotFound,
    WrongInstance,
)
from topics.core.limits import MAX_INTEGER, MAX_PAGE_SIZE, Limits
from topics.core.names import check_topic_name
from topics.core.records import AnyWrite, PlainWrite, TextWrite
from topics.core.selector import Selector
from topics.core.tombstone import Hole
from topics.engine import deletion, frames, read, retention
from topics.engine.append import Appender, completed
from topics.engine.checkpoint import Checkpointer
from topics.engine.commit import Commit, Committer, Level
from topics.engine.frames import Deleted, Event
from topics.engine.jobs import Jobs, QueueState
from topics.engine.options import Options
from topics.engine.ranges import Ranges, ranges
from topics.engine.read import Diff, Query
from topics.engine.routers import Routers
from topics.engine.sealed import LostRange
from topics.engine.state import State
from topics.engine.syncer import Syncer
from topics.engine.topic import Topic
from topics.engine.transactions import Transactions
from topics.storage.fs import FileSystem, Lock
from topics.storage.segment import Segments
from topics.storage.wal import Wal

# Half of the recency part of a priority is gone after this long, all of it after ten times as long.
_RECENCY_HALF_LIFE_MS = 30_000
_MAX_CURSOR = 1000


class PutResult(msgspec.Struct):
    topic: str
    created: bool
    config: dict[str, Any]


class Dropped(msgspec.Struct):
    deleted: bool
    routers_removed: int


class DeleteResult(msgspec.Struct):
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class TopicState(msgspec.Struct):
    topic: str
    type: str
    head_seq: int
    earliest_seq: int
    next_seq: int
    evict_floor: int
    count: int
    bytes: int
    epoch: int
    holes: int
    config: dict[str, Any]
    effective_priority: float
    last_write_ts: int | None
    last_read_ts: int | None
    # This topic among all topics of all servers, for all times.
    instance: str
    queue: QueueState | None = None


class Page(msgspec.Struct):
    topics: list[TopicState]
    next_cursor: str | None


class Deletes(msgspec.Struct):
    """Past deletes. `complete` is false when some after the reader's id are no longer remembered."""

    deletes: list[deletion.PastDelete]
    last_id: int
    complete: bool


class Engine:
    def __init__(
        self,
        fs: FileSystem,
        lock: Lock,
        clock: Clock,
        limits: Limits,
        options: Options,
        state: State,
        wal: Wal,
        segments: Segments,
        wal_syncer: Syncer,
        file_syncer: Syncer,
        boot_id: str,
    ) -> None:
        self.limits = limits
        self.state = state
        self.time: Ratchet = state.time
        self._lock = lock
        self._closing = False
        self._closed = False
        self._syncers = (wal_syncer, file_syncer)
        self._segments = segments
        self.committer = Committer(wal, wal_syncer, options.background_sync_ms, clock.now)
        # Topics as the next write will find them: creations and deletions count from the moment they are staged.
        self._staged: dict[str, Topic] = dict(state.by_name)
        self._next_epoch = state.next_epoch
        self.appender = Appender(limits, self.committer, self.settle)
        self.transactions = Transactions(fs, limits, self)
        self.jobs = Jobs(self)
        self.routers = Routers(self)
        self.appender.on_published = self.routers.on_published
        self.checkpointer = Checkpointer(fs, state, segments, self.committer, file_syncer, options, boot_id)
        self.checkpointer.before_freeze = self.routers.before_freeze
        for topic in state.topics.values():
            topic.staged_seq = topic.next_seq
            topic.staged_config = topic.config
            topic.reserved = topic.ceiling
            topic.staged_delete_id = topic.last_delete_id
        self._log_found_lost()

    # -- topics ----------------------------------------------------------------------------------------------------

    def put(self, name: str, patch: ConfigPatch) -> Commit:
        """Creates a topic or changes the fields that were sent."""
        self.check_open()
        check_topic_name(name)
        topic = self._staged.get(name)
        if topic is None:
            config = resolve(patch, None, name)
            topic, event = self.stage_topic(name, config)
            return self.committer.stage(
                Level.SYNCED, (topic,), (event,), lambda: self._publish_put(topic, config, True)
            )
        config = resolve(patch, topic.staged_config, name)
        self.settle(topic)
        topic.staged_config = config
        event = frames.configured(topic.epoch, topic.staged_seq, config)
        return self.committer.stage(Level.SYNCED, (topic,), (event,), lambda: self._publish_put(topic, config, False))

    def _publish_put(self, topic: Topic, config: TopicConfig, created: bool) -> PutResult:
        if created:
            self.state.add(topic)
        else:
            topic.config = config
            self.enforce(topic)
        return PutResult(topic.name, created, config.to_json())

    def stage_topic(self, name: str, config: TopicConfig) -> tuple[Topic, Event]:
        """A topic that will exist once the event is published; `state.add` is the publisher's."""
        self.check_topic_room(1)
        topic = Topic(name, self.next_number(), config, self.state.store)
        self._staged[name] = topic
        return topic, frames.created(topic.epoch, name, config)

    def next_number(self) -> int:
        """A number that no topic and no router of this directory ever had."""
        self._next_epoch += 1
        return self._next_epoch - 1

    def check_topic_room(self, new: int) -> None:
        """Refuses what would make too many topics."""
        most = self.limits.max_topics
        if most and len(self._staged) + new > most:
            raise Throttled(
                f"there are {len(self._staged)} topics, TOPICS_MAX_TOPICS is {most}",
                limit="TOPICS_MAX_TOPICS",
                max=most,
            )

    def staged_topic(self, name: str) -> Topic | None:
        """The topic that a write to this name will reach."""
        return self._staged.get(name)

    def topic(self, name: str) -> Topic:
        self.check_not_closed()
        topic = self.state.by_name.get(name)
        if topic is None:
            check_topic_name(name)
            raise TopicNotFound(f"topic {name!r} does not exist")
        return topic

    def get(self, name: str, touch: bool = True) -> TopicState:
        topic = self.topic(name)
        self.settle(topic)
        if touch:
            topic.last_read_ts = self.time.now()
        return self._describe(topic)

    def _describe(self, topic: Topic) -> TopicState:
        return TopicState(
            topic=topic.name,
            type=topic.config.type,
            head_seq=topic.head_seq,
            earliest_seq=topic.earliest_seq,
            next_seq=topic.next_seq,
            evict_floor=topic.evict_floor,
            count=topic.count,
            bytes=topic.bytes,
            epoch=topic.epoch,
            holes=len(topic.holes),
            config=topic.config.to_json(),
            effective_priority=effective_priority(topic, self.time.now()),
            last_write_ts=topic.last_write_ts,
            last_read_ts=topic.last_read_ts,
            instance=self.state.instance(topic.epoch),
            queue=self.jobs.state(topic) if topic.queue is not None else None,
        )

    def list(
        self,
        prefix: str = "",
        page_size: int = 100,
        cursor: str | None = None,
        is_visible: Callable[[str], bool] | None = None,
    ) -> Page:
        """Topics by name; `is_visible` leaves out those that the caller may not see."""
        check_integer("page_size", page_size, 1, MAX_PAGE_SIZE)
        if not isinstance(prefix, str):
            raise InvalidRequest(f"prefix must be a string, got {show(prefix)}")
        check_unicode("prefix", prefix)
        self.check_not_closed()
        names = self.state.names
        start = bisect_left(names, prefix)
        if cursor is not None:
            check_text("cursor", cursor, _MAX_CURSOR)
            start = max(start, bisect_right(names, decode_cursor(cursor)))
        page: list[TopicState] = []
        while start < len(names) and names[start].startswith(prefix):
            if is_visible is None or is_visible(names[start]):
                if len(page) == page_size:
                    return Page(page, encode_cursor(page[-1].topic))
                topic = self.state.by_name[names[start]]
                self.settle(topic)
                page.append(self._describe(topic))
            start += 1
        return Page(page, None)

    def drop(self, name: str, if_empty: bool = False) -> Commit:
        """Deletes a topic, everything in it and the routers that touch it; the result is a `Dropped`."""
        self.check_open()
        check_topic_name(name)
        check_flag("if_empty", if_empty)
        topic = self._staged.get(name)
        if topic is None:
            return completed(Dropped(False, 0))
        if if_empty:
            self.settle(topic)
            if topic.count or topic.pending_count:
                raise TopicNotEmpty(f"topic {name!r} has {topic.count + topic.pending_count} records")
        del self._staged[name]
        removed, events, homes, leave = self.routers.leave(topic)

        def publish() -> Dropped:
            leave()
            self.state.drop(topic)
            return Dropped(True, removed)

        return self.committer.stage(
            Level.SYNCED, (topic, *homes), (*events, frames.dropped(topic.epoch)), publish, atomic=True
        )

    # -- records ---------------------------------------------------------------------------------------------------

    def write(self, name: str, write: AnyWrite) -> Commit:
        """Appends the records of a checked write; the result is a `WriteResult`."""
        self.check_open()
        topic = self._staged.get(name)
        if topic is not None:
            return self.appender.write(topic, write, self.time.now())
        check_topic_name(name)
        if not write.create:
            raise TopicNotFound(f"topic {name!r} does not exist, and create is false")
        config = resolve(self.config_of(write), None, name)
        self.appender.check_total(self.state.store.live_bytes)
        self.appender.check_fits(name, config, write.records, 0, 0)
        self.appender.check_seqs(name, config.seq_base, write.records)
        topic, event = self.stage_topic(name, config)
        new = topic
        self.committer.stage(Level.SYNCED, (new,), (event,), lambda: self.state.add(new))
        return self.appender.write(new, write, self.time.now(), created=True)

    def check_instance(self, name: str, instance: str) -> None:
        """Refuses a write that means another life of a name; empty is a topic that is not there."""
        topic = self._staged.get(name)
        found = self.state.instance(topic.epoch) if topic is not None else ""
        if found != instance:
            raise WrongInstance(f"topic {name!r} is {found or 'not there'}, not {show(instance)}", instance=found)

    def write_shared(self, name: str, writes: Sequence[PlainWrite]) -> Commit:
        """Appends several plain writes to a topic that exists as one commit; the result is a `SharedResult`."""
        self.check_open()
        topic = self._staged.get(name)
        if topic is None:
            raise TopicNotFound(f"topic {name!r} was deleted")
        return self.appender.write_shared(topic, writes, self.time.now())

    def config_of(self, write: AnyWrite | TextWrite) -> ConfigPatch:
        """What a write asks of the topic that it would create."""
        return parse_patch(write.config)

    def catch_up(self, name: str) -> Commit | None:
        """Before a read: what routers bring here from writes that were acked before becomes visible. None if it is."""
        topic = self.state.by_name.get(name)
        return self.routers.catch_up(topic) if topic is not None and topic.inlets else None

    def diff(self, name: str, query: Query, touch: bool = True, walk_as: type[read.Walk] | None = None) -> Diff:
        topic = self.topic(name)
        self.settle(topic)
        if touch:
            topic.last_read_ts = self.time.latest
        while True:
            try:
                answer = read.diff(topic, query, walk_as)
                if query.include_via:
                    answer.instance = self.state.instance(topic.epoch)
                return answer
            except LostRange as lost:
                self.lose(topic, lost)

    def when_changed(self, name: str, call: Callable[[], None]) -> Topic:
        """Calls once when something new is visible in a topic, or when it is gone."""
        topic = self.topic(name)
        topic.add_waiter(call)
        return topic

    def seek(self, name: str, ts: int) -> int:
        check_integer("ts", ts)
        topic = self.topic(name)
        self.settle(topic)
        while True:
            try:
                return read.seek(topic, ts)
            except LostRange as lost:
                self.lose(topic, lost)

    def ranges(self, name: str, from_seq: int = 0, to_seq: int | None = None, limit: int = 0) -> Ranges:
        """What became of the seqs behind `from_seq`; at most `limit` ranges of them."""
        check_integer("from_seq", from_seq)
        if to_seq is not None:
            check_integer("to_seq", to_seq)
        check_count("limit", limit)
        topic = self.topic(name)
        self.settle(topic)
        most = max(min(limit or self.limits.max_limit, self.limits.max_limit), 1)
        while True:
            try:
                return ranges(topic, from_seq, to_seq, most)
            except LostRange as lost:
                self.lose(topic, lost)

    def delete(
        self, name: str, before_seq: int | None = None, match: Selector | None = None, purpose: str = "erase"
    ) -> Commit:
        """Deletes records by seq, by tag, or by both; the result is a `DeleteResult`."""
        self.check_open()
        deletion.check_purpose(purpose)
        if before_seq is None and match is None:
            raise InvalidRequest("before_seq or match is required")
        if before_seq is not None:
            check_integer("before_seq", before_seq, 0, MAX_INTEGER + 1)
        topic = self.topic(name)
        self.settle(topic)
        self.guard(topic, lambda: deletion.preload(topic, match))
        self.routers.before_removal(topic)
        topic.staged_delete_id += 1
        what = Deleted(topic.staged_delete_id, self.time.now(), topic.staged_seq, before_seq, match, purpose)
        return self.committer.stage(
            Level.SYNCED, (topic,), (frames.deleted(topic.epoch, what),), lambda: self._publish_delete(topic, what)
        )

    def _publish_delete(self, topic: Topic, what: Deleted) -> DeleteResult:
        before = topic.count
        try:
            self.guard(topic, lambda: deletion.apply_waiting(topic))
            self.guard(topic, lambda: deletion.delete(topic, what))
        except StorageFault as fault:
            topic.unapplied.append(what)
            topic.unsettled = True
            raise StorageFault(f"the delete is durable and waits for the disk: {fault.message}") from fault
        return DeleteResult(before - topic.count, topic.earliest_seq, topic.head_seq, topic.count, topic.bytes)

    def deletes(self, name: str, after: int = 0) -> Deletes:
        check_integer("after", after)
        topic = self.topic(name)
        history = topic.deletes or ()
        first = history[0].id if history else topic.last_delete_id + 1
        kept = [past for past in history if past.id > after]
        return Deletes(kept, topic.last_delete_id, complete=after + 1 >= first or after >= topic.last_delete_id)

    # -- keeping watermarks exact ----------------------------------------------------------------------------------

    def settle(self, topic: Topic) -> None:
        """Makes a topic's watermarks exact now. What TTL took is as durable as the records before anybody is told."""
        now = self.time.now()
        if topic.config.ttl_ms or topic.unsettled:
            before = topic.ttl_expired
            self.guard(topic, lambda: deletion.apply_waiting(topic))
            self.guard(topic, lambda: retention.settle(topic, now))
            if topic.ttl_expired != before:
                self.committer.log(frames.expired(topic.epoch, topic.ttl_expired, now))
                if topic.config.durability == "fsync":
                    self.committer.flush_and_wait()
                else:
                    self.committer.flush()

    def enforce(self, topic: Topic) -> None:
        """Applies the caps after a change that is committed already: a disk that does not answer only delays it."""
        try:
            self.guard(topic, lambda: deletion.apply_waiting(topic))
            self.guard(topic, lambda: retention.evict(topic))
        except StorageFault:
            topic.unsettled = True

    def guard(self, topic: Topic, work: Callable[[], object]) -> None:
        self.state.guard(topic, work)
        if self.state.found_lost:
            self._log_found_lost()

    def lose(self, topic: Topic, lost: LostRange) -> None:
        topic.lose(lost.first, lost.last, "corrupt")
        self.state.found_lost.append((topic, lost))
        self._log_found_lost()

    def _log_found_lost(self) -> None:
        """Writes down the holes that reading the disk has revealed."""
        for topic, lost in self.state.found_lost:
            if not topic.dropped:
                self.committer.log(frames.holed(topic.epoch, Hole(lost.first, lost.last, "corrupt")))
        self.state.found_lost.clear()
        self.committer.flush()

    # -- the turn --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Ends a turn."""
        self.committer.flush()
        self.routers.relieve()
        self.checkpointer.keep_up()

    def poll(self) -> None:
        """Takes in what other threads have finished: call it when a syncer says so."""
        for syncer in self._syncers:
            syncer.poll()

    def tick(self) -> None:
        """Background work: call it every few tens of milliseconds, whether or not anything happens."""
        self.committer.tick()
        self.transactions.expire(self.time.now())
        self.routers.tick()
        self.checkpointer.tick()

    def check_open(self) -> None:
        """Refuses when nothing more can be written."""
        if self._closing:
            raise ShuttingDown("the log is being closed")
        self.committer.check_writable()

    def check_not_closed(self) -> None:
        if self._closed:
            raise ShuttingDown("the log is closed")

    def checkpoint(self) -> None:
        """Moves everything out of the WAL, on this thread."""
        self.check_open()
        self.checkpointer.run()
        self.committer.check_writable()

    def close(self) -> None:
        """Stops accepting, finishes what is on its way, writes a clean checkpoint and lets the directory go."""
        if self._closed:
            return
        self._closing = True
        self._closed = True
        try:
            self.transactions.close()
            if self.committer.read_only is None:
                self.routers.finish()
            if self.committer.read_only is None:
                self.checkpointer.run(clean=True)
        finally:
            for topic in self.state.topics.values():
                topic.wake()
            for syncer in self._syncers:
                syncer.close()
            self._segments.close()
            self.committer.wal.close()
            self._lock.release()


def effective_priority(topic: Topic, now: int) -> float:
    priority = max(-1000, min(1000, topic.config.priority or 0))
    if not topic.config.auto_priority or topic.last_read_ts is None:
        return float(priority)
    idle = now - topic.last_read_ts
    return priority + (500 * 2 ** (-idle / _RECENCY_HALF_LIFE_MS) if idle < 10 * _RECENCY_HALF_LIFE_MS else 0.0)


def encode_cursor(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_cursor(cursor: str) -> str:
    try:
        return base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        raise InvalidRequest(f"cursor is not one that this server gave, got {show(cursor)}") from None
