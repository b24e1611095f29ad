"""Checkpoints: records move from the WAL into segment files, everything else into a snapshot, and the WAL can go.

A checkpoint is taken topic by topic, in small steps between turns. Each topic is frozen at its own position of the
log; recovery replays a topic's events only from there. Two checkpoints are kept, and all that the older one needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

import msgspec

from topics.core.config import TopicConfig
from topics.core.errors import StorageFault
from topics.core.tombstone import Hole
from topics.engine import deletion, frames
from topics.engine.chunk import TARGET_BYTES, Chunk, without
from topics.engine.commit import Committer
from topics.engine.dedupe import Appended, Producer
from topics.engine.deletion import PastDelete
from topics.engine.extent import Dead, Extent, ExtentState
from topics.engine.frames import RouterState
from topics.engine.options import Options
from topics.engine.queue import QueueSnapshot
from topics.engine.sealed import ChunkRef, ExtentWriter, LostRange, Place
from topics.engine.state import State
from topics.engine.syncer import Syncer
from topics.engine.topic import Topic
from topics.storage import checkpoint as files
from topics.storage.checkpoint import CheckpointWriter
from topics.storage.fs import FileSystem
from topics.storage.segment import Segments, SegmentWriter, segment_numbers
from topics.storage.wal import wal_name, wal_numbers

KIND_HEAD = 48
KIND_TOPIC = 49
KIND_KEYS = 50
KIND_CLIENTS = 51
KIND_JOBS = 52

_KEYS_PER_FRAME = 10_000
_JOBS_PER_FRAME = 10_000
_TOPICS_PER_STEP = 64
_STEPS_PER_TICK = 16
_BYTES_PER_STEP = 128 << 10


class Head(msgspec.Struct, array_like=True):
    """What recovery must know first: where the WAL goes on, and whether the directory was closed cleanly."""

    number: int
    wal_number: int
    boot_id: str
    now: int
    next_epoch: int
    clean: bool
    server_id: str = ""


class TopicSnapshot(msgspec.Struct, array_like=True):
    """A topic at one position of the log."""

    name: str
    config: TopicConfig
    at: int
    next_seq: int
    earliest_seq: int
    cap_evicted: int
    ttl_expired: int
    restart_lost: int
    lost_ts: int
    last_ts: int
    last_write_ts: int | None
    ceiling: int
    holes: list[Hole]
    extents: list[ExtentState]
    ephemeral: list[tuple[int, int]]
    deletes: list[PastDelete]
    last_delete_id: int
    producers: dict[str, Producer]
    queue: QueueSnapshot | None = None
    routers: list[RouterState] = []


class Clients(msgspec.Struct, array_like=True):
    """What belongs to no topic, at the end of the checkpoint: transactions' dedupe, and the time."""

    clients: dict[str, tuple[int, dict[str, Appended]]]
    # The time at the end of the checkpoint: no record in it is newer.
    now: int


_encode = msgspec.msgpack.Encoder().encode


def _freeze_jobs(topic: Topic) -> list[bytes]:
    """The jobs of a queue at this moment, in pieces."""
    if topic.queue is None:
        return []
    jobs = list(topic.queue.jobs.items())
    return [_encode(dict(jobs[start : start + _JOBS_PER_FRAME])) for start in range(0, len(jobs), _JOBS_PER_FRAME)]


class _Sealing:
    """One extent on its way into a segment file."""

    def __init__(self, extent: Extent, topic: Topic) -> None:
        self.extent = extent
        self.dead = {first: Dead(bytearray(d.bits), d.count, d.size) for first, d in extent.dead.items()}
        self.earliest = topic.earliest_seq
        self.refs: list[Chunk | ChunkRef] = list(extent.refs(topic.store))
        self.live = (extent.live_count, extent.live_bytes)
        self.place: Place | None = None
        self.left_out: list[int] = []
        self.first_seq = self.last_seq = 0
        self.count = self.size = 0

    def chunk(self, topic: Topic, ref: Chunk | ChunkRef) -> tuple[Chunk, list[bool] | None] | None:
        """A chunk as it is written, without the bytes of dead records, and which these are; None if all are."""
        dead = self.dead.get(ref.first_seq)
        if ref.last_seq < self.earliest or (dead is not None and dead.count == ref.count):
            self.dead.pop(ref.first_seq, None)
            self.left_out.append(ref.first_seq)
            return None
        chunk = self.extent.load(topic.store, ref, body=True)
        if dead is None and ref.first_seq >= self.earliest:
            return chunk, None
        below = self.earliest - ref.first_seq
        is_dead = [index < below or (dead is not None and dead.has(index)) for index in range(ref.count)]
        return without(chunk, is_dead), is_dead

    def note(self, chunk: Chunk) -> None:
        if not self.count:
            self.first_seq = chunk.first_seq
        self.last_seq = chunk.last_seq
        self.count += chunk.count
        self.size += chunk.size

    def state(self) -> ExtentState:
        assert self.place is not None
        return ExtentState(
            *(self.first_seq, self.last_seq, self.count, *self.live, self.size),
            *(self.extent.ts_last, self.place, self.dead),
        )

    def adopt(self) -> None:
        """The bytes are durable: the live extent reads them from there now."""
        assert self.place is not None
        self.extent.seal(self.place, self.first_seq, self.last_seq, self.count, self.size)
        for first in self.left_out:
            self.extent.dead.pop(first, None)


class Checkpointer:
    def __init__(
        self,
        fs: FileSystem,
        state: State,
        segments: Segments,
        committer: Committer,
        file_syncer: Syncer,
        options: Options,
        boot_id: str,
    ) -> None:
        self._fs = fs
        self._state = state
        self._segments = segments
        self._committer = committer
        self._syncer = file_syncer
        self._options = options
        self._boot_id = boot_id
        numbers = files.checkpoint_numbers(fs)
        self._number = max(numbers, default=0)
        self._segment_number = max(segment_numbers(fs), default=0)
        self._running: Iterator[None] | None = None
        self._waiting = False
        self._error: OSError | None = None
        # Why the last checkpoint was given up: a disk that does not answer reads. The WAL still has everything.
        self._postponed: StorageFault | None = None
        self._work: _Work | None = None
        self._since = 0
        # Bytes of segment files that only the older of the two checkpoints names: the next one gives them back.
        self._leftover = 0
        # The segment files that the newest checkpoint names.
        self._needed: set[int] = set(segment_numbers(fs))
        self._last_wal = 0
        self.completed = 0
        # Hears of a topic that is about to be frozen.
        self.before_freeze: Callable[[Topic], None] = lambda _: None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def is_due(self) -> bool:
        if self._committer.read_only is not None:
            return False
        grown = self._committer.wal.bytes_written - self._since
        unused = max(self._state.store.dead_bytes, self._leftover)
        return grown >= self._options.checkpoint_bytes or unused >= self._options.reclaim_bytes

    def resume_from(self, wal_number: int, wal_bytes: int) -> None:
        """What recovery found: the WAL since the last checkpoint counts towards the next."""
        self._last_wal = wal_number
        self._since = self._committer.wal.bytes_written - wal_bytes

    def keep_up(self) -> None:
        """Does as much as the turn that just ended has added, and some more."""
        if self._running is None and not self.is_due:
            return
        backlog = self._committer.wal.bytes_written - self._since
        self._some_steps(2 + min(backlog, 1 << 20) // _BYTES_PER_STEP)
        if self._waiting and backlog > 2 * self._options.checkpoint_bytes:
            # Memory holds what the WAL holds: past this bound the writer waits for the disk.
            self._syncer.drain()

    def tick(self) -> None:
        if self.is_running or self.is_due:
            self._some_steps(_STEPS_PER_TICK)

    def _some_steps(self, most: int) -> None:
        if self._running is None:
            self._start(clean=False)
        for _ in range(most):
            if self._running is None or self._waiting:
                return
            self.step()

    def run(self, clean: bool = False) -> None:
        """Takes a whole checkpoint before it returns."""
        self._finish_running()
        self._postponed = None
        self._start(clean)
        self._finish_running()
        if self._postponed is not None:
            raise self._postponed

    def _finish_running(self) -> None:
        while self._running is not None:
            self._syncer.drain()
            if self._running is not None:
                self.step()

    def _start(self, clean: bool) -> None:
        self._work = _Work()
        self._running = self._checkpoint(self._work, clean)

    def step(self) -> None:
        """Does a little of the checkpoint that is running."""
        assert self._running is not None
        assert not self._waiting
        try:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            next(self._running)
        except StopIteration:
            self._running = None
        except StorageFault as fault:
            self._running = None
            self._postponed = fault
        except OSError as error:
            self._running = None
            self._committer.fail(f"writing a checkpoint failed: {error}")
        if self._running is None and self._work is not None:
            self._work.close()
            self._work = None

    def _aside(self, job: object) -> None:
        """Gives the syncer a job; steps do nothing until it is done."""
        assert callable(job)
        self._waiting = True
        self._syncer.submit(job, self._on_done)

    def _on_done(self, error: OSError | None) -> None:
        self._waiting = False
        self._error = error

    def _checkpoint(self, work: _Work, clean: bool) -> Iterator[None]:
        committer, state = self._committer, self._state
        committer.rotate()
        if committer.read_only is not None:
            return
        self._since = committer.wal.bytes_written
        state.store.dead_bytes = 0
        wal_number = committer.wal.number
        self._number += 1
        work.out = out = CheckpointWriter(self._fs, self._number)
        head = Head(
            self._number, wal_number, self._boot_id, state.time.latest, state.next_epoch, clean, state.server_id
        )
        out.add(KIND_HEAD, 0, _encode(head))
        topics = list(state.topics.values())
        rewrite = yield from self._mostly_dead(topics)
        used: set[int] = set()
        sealings: list[_Sealing] = []
        for index, topic in enumerate(topics):
            if not topic.dropped:
                yield from self._topic(work, topic, rewrite, sealings, used)
            if index % _TOPICS_PER_STEP == 0:
                yield
        clients = {name: (txn.client_seq, txn.topics) for name, txn in state.txn_clients.items()}
        out.add(KIND_CLIENTS, 0, _encode(Clients(clients, state.time.latest)))
        if work.segment is not None:
            work.segment.flush()
            self._aside(work.segment.sync)
            yield
        out.finish()
        self._aside(out.publish)
        yield
        for sealing in sealings:
            sealing.adopt()
        self._forget(wal_number, used)
        self.completed += 1

    def _topic(
        self, work: _Work, topic: Topic, rewrite: set[int], sealings: list[_Sealing], used: set[int]
    ) -> Iterator[None]:
        """Freezes a topic, writes its new records to the segment file and its state to the checkpoint."""
        while True:
            # A delete that waits for the disk is in the log before this point: a snapshot without it would undo it.
            self._state.guard(topic, lambda: deletion.apply_waiting(topic))
            try:
                self._merge_small(topic)
                self.before_freeze(topic)
                self._make_durable(topic)
                snapshot, own = self._freeze(topic, rewrite)
                jobs = _freeze_jobs(topic)
                for sealing in own:
                    yield from self._seal(work, topic, sealing)
                break
            except LostRange as lost:
                topic.lose(lost.first, lost.last, "corrupt")
                self._committer.log(frames.holed(topic.epoch, Hole(lost.first, lost.last, "corrupt")))
            except StorageFault:
                # A file that cannot be read now is left where it is.
                rewrite = set()
        snapshot.extents += [sealing.state() for sealing in own]
        snapshot.extents.sort(key=lambda extent: extent.first_seq)
        sealings += own
        used.update(extent.place.file for extent in snapshot.extents)
        assert work.out is not None
        work.out.add(KIND_TOPIC, topic.epoch, _encode(snapshot))
        keys = topic.dedupe.lasting_keys()
        for start in range(0, len(keys), _KEYS_PER_FRAME):
            work.out.add(KIND_KEYS, topic.epoch, _encode(keys[start : start + _KEYS_PER_FRAME]))
            yield
        for some in jobs:
            work.out.add(KIND_JOBS, topic.epoch, some)
            yield

    def _make_durable(self, topic: Topic) -> None:
        """A snapshot must not know what the log may forget: events of a queue that are not durable, or evictions of
        what routers have copied in an event that is not."""
        committer = self._committer
        is_ahead = topic.queue is not None and topic.queue.staged_at > committer.wal.synced
        if is_ahead or (topic.outlets and committer.wal.staged > committer.wal.synced):
            committer.flush_and_wait()
            if committer.read_only is not None:
                raise StorageFault("the log takes nothing more")

    def _freeze(self, topic: Topic, rewrite: set[int]) -> tuple[TopicSnapshot, list[_Sealing]]:
        kept: list[ExtentState] = []
        ephemeral: list[tuple[int, int]] = []
        sealings: list[_Sealing] = []
        for extent in topic.extents:
            if extent.ephemeral:
                ephemeral.append((extent.first_seq, extent.last_seq))
            elif extent.place is not None and extent.place.file not in rewrite:
                kept.append(extent.state(extent.place))
            else:
                extent.freeze()
                sealings.append(_Sealing(extent, topic))
        snapshot = TopicSnapshot(
            name=topic.name,
            config=topic.config,
            at=topic.pending[0].start if topic.pending else self._committer.wal.staged,
            next_seq=topic.next_seq,
            earliest_seq=topic.earliest_seq,
            cap_evicted=topic.cap_evicted,
            ttl_expired=topic.ttl_expired,
            restart_lost=topic.restart_lost,
            lost_ts=topic.lost_ts,
            last_ts=topic.last_ts,
            last_write_ts=topic.last_write_ts,
            ceiling=topic.ceiling,
            holes=list(topic.holes),
            extents=kept,
            ephemeral=ephemeral,
            deletes=list(topic.deletes or ()),
            last_delete_id=topic.last_delete_id,
            producers=topic.dedupe.lasting_producers(),
            queue=topic.queue.snapshot() if topic.queue is not None else None,
            routers=[router.state() for router in (topic.inlets or {}).values()],
        )
        return snapshot, sealings

    def _merge_small(self, topic: Topic) -> None:
        """Takes a small sealed extent back in front of new records, so that trickles do not make many small ones.

        Sizes double at least from one merge to the next: a record is rewritten a few times, not every time.
        """
        while len(topic.extents) > 1:
            older, newer = topic.extents[-2:]
            if older.place is None or newer.chunks is None or older.ephemeral or newer.ephemeral:
                return
            if older.size > min(newer.size, TARGET_BYTES):
                return
            try:
                refs = [ref for ref in older.refs(topic.store) if not older.is_dead(ref)]
                chunks = [older.load(topic.store, ref, body=True) for ref in refs]
            except StorageFault:
                return
            newer.absorb(older, chunks)
            del topic.extents[-2]

    def _seal(self, work: _Work, topic: Topic, sealing: _Sealing) -> Iterator[None]:
        if work.segment is None:
            self._segment_number += 1
            work.segment = SegmentWriter(self._fs, self._segment_number)
        writer = ExtentWriter(work.segment, topic.epoch)
        for ref in sealing.refs:
            found = sealing.chunk(topic, ref)
            if found is not None:
                chunk, is_dead = found
                writer.add(chunk, is_dead)
                sealing.note(chunk)
                if chunk.ends and chunk.ends[-1] > TARGET_BYTES // 2:
                    yield
        sealing.place = writer.finish()

    def _mostly_dead(self, topics: list[Topic]) -> Generator[None, None, set[int]]:
        """Segment files of which so little lives that a rewrite pays."""
        alive: dict[int, int] = {}
        for index, topic in enumerate(topics):
            for extent in topic.extents:
                if extent.place is not None:
                    alive[extent.place.file] = alive.get(extent.place.file, 0) + _alive(extent.place, extent)
            if index % _TOPICS_PER_STEP == 0:
                yield
        dead: set[int] = set()
        for number, size in alive.items():
            try:
                if size < self._options.rewrite_below * self._segments.size(number):
                    dead.add(number)
            except OSError:
                continue
        return dead

    def _forget(self, wal_number: int, used: set[int]) -> None:
        """Removes what neither this checkpoint nor the one before it needs."""
        for number in wal_numbers(self._fs):
            if number < self._last_wal:
                self._fs.remove(wal_name(number))
        self._last_wal = wal_number
        for number in files.checkpoint_numbers(self._fs):
            if number < self._number - 1:
                self._fs.remove(files.checkpoint_name(number))
        self._leftover = 0
        for number in segment_numbers(self._fs):
            if number not in used and number not in self._needed:
                self._segments.remove(number)
            elif number not in used:
                with contextlib.suppress(OSError):
                    self._leftover += self._segments.size(number)
        self._needed = used


def _alive(place: Place, extent: Extent) -> int:
    return place.bytes * extent.live_bytes // max(extent.size, 1)


class _Work:
    """The files that a checkpoint is writing."""

    def __init__(self) -> None:
        self.out: CheckpointWriter | None = None
        self.segment: SegmentWriter | None = None

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()
