"""The commit cycle: what is staged in one turn is written at once, synced together, and published in order.

A commit becomes visible when its level is reached, never earlier, and never before the commits of the same topic that
were staged before it. Engine state is touched on one thread only; syncs run on another and report back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from topics.core.errors import ReadOnly, StorageFault, TopicsError
from topics.engine.frames import Event
from topics.engine.syncer import InlineSyncer, Syncer
from topics.engine.topic import Topic
from topics.storage.wal import KIND_GROUP, Wal, encode_group


class Level(IntEnum):
    """What an answer waits for."""

    ACCEPTED = 0
    WRITTEN = 1
    SYNCED = 2


class Commit:
    """Something on its way to being durable and visible."""

    __slots__ = ("_callbacks", "_publish", "done", "end", "error", "is_ready", "level", "result", "start", "topics")

    def __init__(self, level: Level, topics: Sequence[Topic], publish: Callable[[], Any]) -> None:
        self.level = level
        self.topics = topics
        self.start = 0
        self.end = 0
        # Its level is reached; it may still wait for an earlier commit of its topics.
        self.is_ready = False
        self.done = False
        self.result: Any = None
        self.error: TopicsError | None = None
        self._publish = publish
        self._callbacks: list[Callable[[Commit], None]] | None = None

    def on_done(self, callback: Callable[[Commit], None]) -> None:
        if self.done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    @property
    def is_awaited(self) -> bool:
        return self._callbacks is not None

    def value(self) -> Any:
        """The result, or the error, of a commit that is done."""
        assert self.done
        if self.error is not None:
            raise self.error
        return self.result

    def publish(self) -> None:
        try:
            self.result = self._publish()
        except TopicsError as error:
            self.error = error
        self._finish()

    def fail(self, error: TopicsError) -> None:
        self.error = error
        self._finish()

    def _finish(self) -> None:
        self.done = True
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                callback(self)


class Committer:
    def __init__(
        self,
        wal: Wal,
        syncer: Syncer,
        background_ms: int,
        now: Callable[[], int],
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.wal = wal
        self._syncer = syncer
        self._background_ms = background_ms
        self._now = now
        self._written: deque[Commit] = deque()
        self._synced: deque[Commit] = deque()
        self._syncing = False
        self._unsynced_since: int | None = None
        self.read_only: ReadOnly | None = None
        self._timer = timer
        self.syncs = 0
        self.writes = 0
        # How long the last write and the last sync took, in seconds; `on_sync` hears of every one.
        self.write_seconds = 0.0
        self.sync_seconds = 0.0
        self.on_sync: Callable[[float], None] | None = None

    def check_writable(self) -> None:
        if self.read_only is not None:
            raise ReadOnly(self.read_only.message, **self.read_only.detail)

    def stage(
        self,
        level: Level,
        topics: Sequence[Topic],
        events: Sequence[Event],
        publish: Callable[[], Any],
        atomic: bool = False,
    ) -> Commit:
        """Gives events their place in the log. `atomic` ones live or die together."""
        commit = Commit(level, topics, publish)
        wal = self.wal
        commit.start = wal.staged
        if atomic and len(events) > 1:
            wal.stage(KIND_GROUP, *_span(events), encode_group(events))
        else:
            for event in events:
                wal.stage(*event)
        commit.end = wal.staged
        if level == Level.ACCEPTED:
            for topic in topics:
                self._publish_front(topic)
            if not any([topic.pending for topic in topics]):
                commit.publish()
                return commit
        for topic in topics:
            topic.pending.append(commit)
        if level == Level.ACCEPTED:
            commit.is_ready = True
        else:
            (self._written if level == Level.WRITTEN else self._synced).append(commit)
        return commit

    def log(self, event: Event) -> None:
        """Stages an event that nobody waits for: it only records what is so already."""
        if self.read_only is None:
            self.wal.stage(*event)

    def flush(self) -> None:
        """Ends a turn: hands everything staged to the kernel, publishes what that completes, asks for syncs."""
        wal = self.wal
        if wal.has_staged and self.read_only is None:
            started = self._timer()
            try:
                wal.write()
            except OSError as error:
                self.fail(f"writing the log failed: {error}")
                return
            self.writes += 1
            self.write_seconds = self._timer() - started
            if self._unsynced_since is None:
                self._unsynced_since = self._now()
        while self._written:
            self._publish(self._written.popleft())
        self._publish_synced()
        if self._synced and not self._syncing:
            self._request_sync()

    def tick(self) -> None:
        """Background syncs: nothing written stays unsynced for long, and an idle log says how far it is synced."""
        if self.read_only is not None or self._syncing:
            return
        if self.wal.has_unsynced:
            since = self._unsynced_since
            if since is None or abs(self._now() - since) >= self._background_ms:
                self._request_sync()
        elif self.wal.has_unmarked and not self.wal.has_staged:
            self.wal.mark()
            self.flush()

    def _request_sync(self) -> None:
        if not self.wal.has_unsynced or self.read_only is not None:
            return
        upto = self.wal.written
        self._syncing = True
        self._unsynced_since = None
        wal = self.wal
        started = self._timer()
        self._syncer.submit(lambda: wal.sync(upto), lambda error: self._on_synced(upto, started, error))

    def _on_synced(self, upto: int, started: float, error: OSError | None) -> None:
        self._syncing = False
        self.sync_seconds = self._timer() - started
        if error is not None:
            self.fail(f"syncing the log failed: {error}")
            return
        self.syncs += 1
        if self.on_sync is not None:
            self.on_sync(self.sync_seconds)
        self.wal.synced = upto
        self._publish_synced()
        if self.wal.has_unsynced:
            if self._unsynced_since is None:
                self._unsynced_since = self._now()
            if self._synced and self._synced[0].end <= self.wal.written:
                self._request_sync()

    def _publish_synced(self) -> None:
        while self._synced and self._synced[0].end <= self.wal.synced:
            self._publish(self._synced.popleft())

    def publish(self, commit: Commit) -> None:
        """Publishes a commit whose events are durable already, when its turn on its topics has come."""
        self._publish(commit)

    def _publish(self, commit: Commit) -> None:
        """Publishes a commit whose level is reached, as soon as those before it on its topics are; then those that
        waited for nothing but it."""
        commit.is_ready = True
        for topic in commit.topics:
            self._publish_front(topic)
        if len(commit.topics) == 1:
            # The usual case, without the bookkeeping of the general one.
            pending = commit.topics[0].pending
            if not pending or not pending[0].is_ready:
                return
            commit = pending[0]
        ready = [commit]
        while ready:
            first = ready.pop()
            if first.done or any([topic.pending[0] is not first for topic in first.topics]):
                continue
            for topic in first.topics:
                topic.pending.popleft()
            self._make_visible(first)
            ready.extend(topic.pending[0] for topic in first.topics if topic.pending and topic.pending[0].is_ready)

    def _publish_front(self, topic: Topic) -> None:
        """Publishes what stands first on a topic, and waits for nothing else."""
        pending = topic.pending
        while pending and pending[0].is_ready and len(pending[0].topics) == 1:
            self._make_visible(pending.popleft())

    def _make_visible(self, commit: Commit) -> None:
        try:
            commit.publish()
        except Exception as bug:
            # What is durable could not be made visible: memory is not what the log says, and only a restart mends that.
            commit.fail(StorageFault(f"an internal error: {bug!r}"))
            self.fail(f"an internal error while publishing: {bug!r}")
            raise

    def rotate(self) -> None:
        """Begins a new WAL file: all before it is synced and published."""
        self.flush_and_wait()
        if self.read_only is None:
            try:
                self.wal.rotate()
            except OSError as error:
                self.fail(f"beginning a new log file failed: {error}")

    def flush_and_wait(self) -> None:
        """Writes and syncs everything before it returns."""
        self._syncer.drain()
        assert not self._syncing
        syncer, self._syncer = self._syncer, InlineSyncer()
        try:
            self.flush()
            while self.wal.has_unsynced and self.read_only is None:
                self._request_sync()
        finally:
            self._syncer = syncer

    def fail(self, message: str) -> None:
        """The log cannot be trusted to take more: nothing staged becomes visible, and no write is accepted again."""
        if self.read_only is None:
            self.read_only = ReadOnly(f"{message}; reads go on, writes need a restart")
        self.wal.discard_staged()
        failed = [*self._written, *self._synced]
        self._written.clear()
        self._synced.clear()
        for commit in failed:
            for topic in commit.topics:
                failed.extend(topic.pending)
                topic.pending.clear()
            if not commit.done:
                commit.fail(ReadOnly(self.read_only.message))


def when_all(commits: Sequence[Commit], call: Callable[[], None]) -> None:
    """Calls when the last of some commits is done."""
    left = len(commits)

    def on_done(_: Commit) -> None:
        nonlocal left
        left -= 1
        if not left:
            call()

    for commit in commits:
        commit.on_done(on_done)


def _span(events: Sequence[Event]) -> tuple[int, int, int]:
    """The topic and the seqs that a group is about, if it is one topic's: what a damaged group has lost."""
    epochs = {event.epoch for event in events}
    if len(epochs) != 1:
        return 0, 0, 0
    return epochs.pop(), min(event.first for event in events), max(event.last for event in events)
