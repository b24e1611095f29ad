"""The whole state of a data directory, and the fold that makes it: one event after the other, in the log's order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from topics.core.clock import Ratchet
from topics.core.config import TopicConfig
from topics.core.errors import CorruptDirectory
from topics.core.records import Batch
from topics.core.tombstone import Hole
from topics.engine import deletion, frames, jobs, retention
from topics.engine.copying import Cargo, first_of
from topics.engine.dedupe import Appended
from topics.engine.frames import Link, RouterState
from topics.engine.queue import REMOVING
from topics.engine.router import Router, Routes, let_go
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
        # What a repair has found missing between two events: whose, which seqs, and where in the log.
        self.gaps: list[tuple[Topic, int, int, int]] = []
        # Hears of every topic that becomes visible.
        self.on_added: Callable[[Topic], None] | None = None
        self.routes = Routes()
        # Names this data directory among all.
        self.server_id = ""
        # Where the routers of a source lead, as the last event that says so has it.
        self._plans: dict[tuple[int, int], tuple[int, list[Link]]] = {}

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
        self.routes.source_added(topic)
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
        for router in list((topic.inlets or {}).values()):
            self.remove_router(topic, router.id)
        topic.wake()

    def put_router(self, home: Topic, what: RouterState) -> Router:
        """A router begins, or is told something else; how far it got stays."""
        router = home.inlets.get(what.id) if home.inlets is not None else None
        if router is None:
            router = Router(what, home)
            if home.inlets is None:
                home.inlets = {}
            home.inlets[router.id] = router
            self.next_epoch = max(self.next_epoch, router.id + 1)
            self.routes.add(router, self.by_name)
        router.config = router.staged_config = what.config
        return router

    def remove_router(self, home: Topic, router_id: int) -> None:
        router = home.inlets.pop(router_id, None) if home.inlets is not None else None
        if router is not None:
            home.inlets = home.inlets or None
            self.routes.remove(router, self.by_name)

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
            opened = frames.read_opened(frame)
            self.time.advance(opened.now)
            self.server_id = opened.server_id or self.server_id
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
            topic.offer(batch)
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
                topic.offer(hole)
        elif kind == frames.EXPIRED:
            self.time.advance(frame.last)
            self.guard(topic, lambda: retention.expire_through(topic, frame.first))
        elif kind == frames.EVICTED:
            self.guard(topic, lambda: retention.evict_through(topic, frame.first))
        elif kind == frames.DELETE:
            what = frames.read_deleted(frame)
            topic.outgoing.clear()
            self.guard(topic, lambda: deletion.delete(topic, what))
        elif kind == frames.QUEUE:
            event = frames.read_queued(frame)
            if event.kind in REMOVING:
                topic.outgoing.clear()
            self.guard(topic, lambda: jobs.fold(topic, event))
        elif kind == frames.ROUTER:
            self.put_router(topic, frames.read_router(frame))
        elif kind == frames.UNROUTED:
            self.remove_router(topic, frame.first)
        elif kind == frames.ADVANCED:
            router = (topic.inlets or {}).get(frame.first)
            if router is not None:
                far = frames.read_advanced(frame)
                router.advance(far.source_epoch, far.cursor, far.forwarded - router.forwarded, far.instance)
        elif kind == frames.CONFIG:
            self._close_gap(topic, frame)
            topic.config = frames.read_config(frame)
            self.guard(topic, lambda: retention.evict(topic))
        elif kind == frames.RESTART:
            if frame.last >= topic.next_seq:
                topic.offer(Hole(topic.next_seq, frame.last, "restart"))
            topic.restart(frame.last, frame.first)
        elif kind == frames.DROP:
            self.drop(topic)
        else:
            raise AssertionError(f"unknown event kind {kind}")

    def apply_routed(self, frame: Frame, is_news: Callable[[int], bool]) -> None:
        """Copies of one stretch of a source: each dest takes its own, unless a checkpoint has them already."""
        what, pieces = frames.read_routed(frame)
        self.time.advance(what.ts)
        if what.links is not None:
            self._plans[frame.epoch, what.slot] = (what.plan, what.links)
        plan, links = self._plans.get((frame.epoch, what.slot), (0, []))
        if plan != what.plan:
            if self.repairing:
                return
            raise CorruptDirectory(
                f"routed records at position {frame.at:#x} go where no event says; "
                "`topics verify --repair` turns what is missing into holes"
            )
        cargo = Cargo(frame.first, frame.last, pieces, what.instance or self.instance(frame.epoch))
        for index, link in enumerate(links):
            dest = self.topics.get(link.dest)
            router = (dest.inlets or {}).get(link.router) if dest is not None else None
            if dest is None or router is None or not is_news(link.dest):
                continue
            load = cargo.take(router.config, self.instance(dest.epoch))
            first = what.firsts.get(index, frame.first + link.offset if link.offset is not None else 0)
            if first and dest.config.durability != "ephemeral":
                self._append_copies(dest, frame, load.render(first, what.ts))
            records = what.records[index] if what.records is not None else load.records if first else 0
            router.advance(what.remote_epoch or frame.epoch, frame.last, records, what.instance)
        source = self.topics.get(frame.epoch)
        if source is not None:
            let_go(source)

    def _append_copies(self, dest: Topic, frame: Frame, pieces: list[Batch | Hole]) -> None:
        for piece in pieces:
            self._close_gap(dest, frame, first_of(piece))
            if isinstance(piece, Hole):
                dest.add_hole(piece)
            else:
                self.guard(dest, lambda ts=piece.ts: retention.expire(dest, ts))  # type: ignore[misc]  # bound now
                dest.append(piece)
                self.guard(dest, lambda: retention.evict(dest))
            dest.offer(piece)

    def instance(self, epoch: int) -> str:
        """A topic's name among all topics of all servers, for all times."""
        return f"{self.server_id}.{epoch}"

    def _close_gap(self, topic: Topic, frame: Frame, first: int | None = None) -> None:
        """Seqs that the log does not have between an event and the one before it."""
        missing = (frame.first if first is None else first) - 1
        if missing < topic.next_seq:
            return
        if topic.config.durability == "ephemeral":
            topic.offer(Hole(topic.next_seq, missing, "restart"))
            topic.lose_top(missing, self.time.latest)
        elif self.repairing:
            self.gaps.append((topic, topic.next_seq, missing, frame.at))
            topic.offer(Hole(topic.next_seq, missing, "corrupt"))
            topic.add_hole(Hole(topic.next_seq, missing, "corrupt"))
        else:
            raise CorruptDirectory(
                f"topic {topic.name!r}: the log goes from seq {topic.head_seq} to {missing + 1} "
                f"(position {frame.at:#x}); `topics verify --repair` turns what is missing into holes"
            )
