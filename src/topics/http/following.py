"""Following topics live: what a stream sends, whatever frames carry it.

A stream has a cursor in each of its topics, and the log is its buffer: while the client takes nothing, nothing is read
for it. What is visible is rendered once for all streams that are at the same place.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from topics.core.errors import TopicsError
from topics.core.tombstone import Tombstone
from topics.engine.engine import effective_priority
from topics.engine.read import Diff, Query, RunWalk
from topics.engine.topic import Topic
from topics.http.exchange import Outlet

if TYPE_CHECKING:
    from topics.http.app import App

# Steps of one stream before others have their turn.
_MAX_STEPS = 16
# What is rendered is kept for those who come to the same place, as far as these bytes go.
_KEPT_BYTES = 16 << 20
# Losses that a stream finds when it connects have a name of their own.
_TOO_OLD = ("cap", "ttl", "mixed")
_encode = msgspec.json.Encoder().encode


class Wishes(msgspec.Struct, frozen=True):
    """What a reader wants of each record, and how much at a time."""

    nodes: tuple[str, ...] = ()
    limit: int = 256
    max_bytes: int = 256 << 10
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True


class Position(msgspec.Struct):
    """Everything up to `seq` of the instance `epoch` was sent."""

    seq: int
    epoch: int


class Rendering(msgspec.Struct):
    """What a reader at one place gets next. `records` is JSON, empty where there are none; `framed` is for whoever puts
    it into frames, and wants to do so once."""

    epoch: int
    tombstone: Tombstone | None
    records: bytes
    from_seq: int
    to_seq: int
    head_seq: int
    framed: dict[str, bytes] = {}

    @property
    def is_last(self) -> bool:
        return self.to_seq == self.head_seq


class Renderings:
    """The latest renderings: those who follow a topic live are all at the same place."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._kept: OrderedDict[tuple[object, ...], Rendering] = OrderedDict()
        self._bytes = 0

    def next(self, topic: Topic, position: Position, wishes: Wishes) -> Rendering:
        engine = self._app.engine
        engine.settle(topic)
        topic.last_read_ts = engine.time.latest
        key = (
            *(topic.epoch, position.seq, position.epoch, wishes, topic.next_seq, topic.earliest_seq, topic.evict_floor),
            *(topic.last_delete_id, len(topic.holes), topic.config.dedupe_node),
        )
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        rendering = self._kept[key] = self._render(topic, position, wishes)
        # Beside itself, its frames: for events, for lines of data, for messages.
        self._bytes += _size(rendering)
        while self._bytes > _KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)
        return rendering

    def _render(self, topic: Topic, position: Position, wishes: Wishes) -> Rendering:
        query = Query(
            from_seq=position.seq,
            epoch=position.epoch,
            limit=wishes.limit,
            nodes=wishes.nodes,
            include_tags=wishes.include_tags,
            include_meta=wishes.include_meta,
            max_bytes=wishes.max_bytes,
        )
        answer = self._app.engine.diff(topic.name, query, walk_as=None if wishes.include_data else RunWalk)
        records = b",".join(answer.parts) if wishes.include_data else _without_data(answer, wishes)
        self._app.metrics.records_read += answer.count
        if answer.tombstone is not None:
            self._app.metrics.count_tombstone(answer.tombstone.reason)
        start = position.seq if answer.tombstone is None else _behind(answer.tombstone)
        return Rendering(
            topic.epoch, answer.tombstone, records, start, answer.next_from_seq, answer.head_seq, framed={}
        )


def _behind(tombstone: Tombstone) -> int:
    """The cursor of a reader who was told of a loss and has not got what follows. A recreated topic is told of as a
    whole, and what it holds still comes."""
    if tombstone.reason == "recreated":
        return min(tombstone.earliest_seq - 1, tombstone.head_seq)
    return tombstone.gap_to


def _size(rendering: Rendering) -> int:
    return 4 * len(rendering.records) + 1024


def _without_data(answer: Diff, wishes: Wishes) -> bytes:
    """Records that are known by what the server made of them, and by their meta."""
    records: list[dict[str, Any]] = []
    for chunk, start, stop in answer.runs or ():
        nodes = [None, *chunk.nodes]
        for index in range(start, stop):
            record: dict[str, Any] = {"$seq": chunk.first_seq + index, "$ts": chunk.ts[index]}
            if chunk.node_ids is not None and chunk.node_ids[index]:
                record["$node"] = nodes[chunk.node_ids[index]]
            tag = chunk.tag(index) if wishes.include_tags else None
            if tag is not None:
                record["$tag"] = tag
            meta = chunk.parts(index)[1] if wishes.include_meta else b""
            if meta:
                record["meta"] = msgspec.Raw(meta)
            records.append(record)
    return _encode(records)[1:-1]


class Framing(Protocol):
    """How what happens to a topic is told."""

    def record(self, topic: str, rendering: Rendering) -> bytes: ...

    def tombstone(self, topic: str, epoch: int, tombstone: Tombstone, reason: str) -> bytes: ...

    def caught_up(self, topic: str, head_seq: int) -> bytes: ...

    def deleted(self, topic: str, head_seq: int) -> bytes: ...

    def error(self, error: TopicsError) -> bytes: ...


class _Followed:
    """One topic of one stream."""

    __slots__ = ("_stream", "head_seq", "is_live", "is_new", "is_queued", "name", "position", "topic", "wishes")

    def __init__(self, stream: Stream, name: str, position: Position, wishes: Wishes) -> None:
        self._stream = stream
        self.name = name
        self.wishes = wishes
        self.position = position
        self.topic: Topic | None = None
        self.head_seq = position.seq
        # Live: the client knows that it has everything. New: nothing has been sent of it yet.
        self.is_live = False
        self.is_new = True
        self.is_queued = False

    def on_change(self) -> None:
        self._stream.on_change(self)


class Stream:
    """Sends what its topics have to an outlet, in turn, as fast as it is taken."""

    def __init__(self, app: App, outlet: Outlet, framing: Framing, on_over: Callable[[], None]) -> None:
        self._app = app
        self._on_over = on_over
        self.outlet = outlet
        self._framing = framing
        self._followed: dict[str, _Followed] = {}
        self._queue: deque[_Followed] = deque()
        self._is_scheduled = False
        self._is_sending = False
        self.is_over = False
        self.sent_at = app.clock()
        # Since when nothing was taken, and what was left then.
        self._stuck_since: float | None = None
        self._unsent = 0
        app.streams.add(self)

    def follow(self, name: str, position: Position, wishes: Wishes) -> None:
        """Begins with a topic; the position goes along with what is sent."""
        followed = self._followed[name] = _Followed(self, name, position, wishes)
        self._enqueue(followed)

    def unfollow(self, name: str) -> bool:
        followed = self._followed.pop(name, None)
        if followed is None:
            return False
        self._release(followed)
        return True

    @property
    def topics(self) -> int:
        return len(self._followed)

    def follows(self, name: str) -> bool:
        return name in self._followed

    def close(self) -> None:
        """Lets everything go. What was sent, was sent; the positions say how far that is."""
        if not self.is_over:
            self.is_over = True
            self._app.streams.discard(self)
            for followed in self._followed.values():
                self._release(followed)
            self._queue.clear()
            self._on_over()

    def _release(self, followed: _Followed) -> None:
        if followed.topic is not None:
            followed.topic.forget_waiter(followed.on_change)
            followed.topic = None
        self._app.arrivals.forget(followed.name, followed.on_change)

    # -- sending ---------------------------------------------------------------------------------------------------

    def on_change(self, followed: _Followed) -> None:
        """A topic has something new, or is gone, or is back."""
        if self.is_over or self._followed.get(followed.name) is not followed:
            return
        app = self._app
        if app.pressure.level and followed.topic is not None and not followed.topic.dropped:
            # Pushes are put off, and so joined; the highest priority goes first.
            priority = effective_priority(followed.topic, app.engine.time.latest)
            app.deliveries.put_off(priority, lambda: self._enqueue(followed))
        else:
            self._enqueue(followed)

    def _enqueue(self, followed: _Followed) -> None:
        if not self.is_over and not followed.is_queued:
            followed.is_queued = True
            self._queue.append(followed)
            self.pump()

    def pump(self) -> None:
        """Sends until nothing is left, the client has enough, or it is somebody else's turn."""
        if self._is_sending:
            return
        self._is_sending = True
        try:
            steps = 0
            while self._queue and not self.outlet.is_full and not self.is_over:
                if steps == _MAX_STEPS:
                    self._schedule()
                    break
                steps += 1
                followed = self._queue.popleft()
                followed.is_queued = False
                if self._followed.get(followed.name) is followed and self._step(followed):
                    followed.is_queued = True
                    self._queue.append(followed)
        except TopicsError as error:
            self.fail(error)
        finally:
            self._is_sending = False

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._app.loop.call_soon(self._on_scheduled)

    def _on_scheduled(self) -> None:
        self._is_scheduled = False
        if not self.is_over:
            self.pump()

    def _step(self, followed: _Followed) -> bool:
        """Sends the next of one topic; says whether there is more."""
        topic = self._find(followed)
        if topic is None:
            return False
        framing = self._framing
        position = followed.position
        rendering = self._app.renderings.next(topic, position, followed.wishes)
        if rendering.tombstone is not None:
            reason: str = rendering.tombstone.reason
            if followed.is_new and reason in _TOO_OLD:
                reason = "from_seq_too_old"
            position.seq = rendering.from_seq
            position.epoch = rendering.epoch
            self._send(framing.tombstone(followed.name, rendering.epoch, rendering.tombstone, reason))
        followed.is_new = False
        followed.head_seq = rendering.head_seq
        position.epoch = rendering.epoch
        position.seq = rendering.to_seq
        if rendering.records:
            self._send(framing.record(followed.name, rendering))
        if not rendering.is_last:
            followed.is_live = False
            return True
        if not followed.is_live:
            followed.is_live = True
            self._send(framing.caught_up(followed.name, rendering.head_seq))
        topic.add_waiter(followed.on_change)
        return False

    def _find(self, followed: _Followed) -> Topic | None:
        """The topic as it is now. One that is gone is told of once, and waited for."""
        topic = followed.topic
        if topic is not None and not topic.dropped:
            return topic
        if topic is not None:
            followed.head_seq = topic.head_seq
        followed.topic = self._app.engine.state.by_name.get(followed.name)
        if followed.topic is None:
            if topic is not None or followed.is_new:
                followed.is_new = followed.is_live = False
                self._send(self._framing.deleted(followed.name, followed.head_seq))
            self._app.arrivals.wait(followed.name, followed.on_change)
        elif topic is not None:
            # Gone and back between two looks.
            self._send(self._framing.deleted(followed.name, followed.head_seq))
        return followed.topic

    def _send(self, frame: bytes) -> None:
        self.sent_at = self._app.clock()
        self.outlet.write(frame)

    def fail(self, error: TopicsError) -> None:
        """Ends the stream with the reason as its last frame."""
        if not self.is_over:
            self.close()
            self.outlet.write(self._framing.error(error))
            self.outlet.end(error)

    def on_room(self) -> None:
        self._stuck_since = None
        self.pump()

    def is_stuck(self, now: float, most: float) -> bool:
        """Whether the client has taken nothing for too long; asked now and then."""
        unsent = self.outlet.unsent
        if not self.outlet.is_full or self._stuck_since is None or unsent < self._unsent:
            self._stuck_since = now if self.outlet.is_full else None
            self._unsent = unsent
            return False
        return now - self._stuck_since >= most


class Arrivals:
    """Who waits for a topic that does not exist (any more)."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Callable[[], None]]] = {}

    def wait(self, name: str, call: Callable[[], None]) -> None:
        self._waiting.setdefault(name, set()).add(call)

    def forget(self, name: str, call: Callable[[], None]) -> None:
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.discard(call)
            if not waiting:
                del self._waiting[name]

    def on_added(self, topic: Topic) -> None:
        for call in self._waiting.pop(topic.name, ()):
            call()
