"""Opening a data directory: the newest good checkpoint, then the WAL behind it, then what a crash has cost.

What recovery decides (holes, what a restart took) is written down before anybody can read it, so that running it again
changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import msgspec

from topics.core.clock import Clock, Ratchet
from topics.core.errors import CorruptDirectory, DirectoryInUse, StorageFault, UnknownFormat
from topics.core.limits import RESERVE_AHEAD, Limits
from topics.core.tombstone import Hole
from topics.engine import frames, retention
from topics.engine.checkpoint import (
    KIND_CLIENTS,
    KIND_HEAD,
    KIND_JOBS,
    KIND_KEYS,
    KIND_TOPIC,
    Clients,
    Head,
    TopicSnapshot,
)
from topics.engine.dedupe import Appended
from topics.engine.engine import Engine
from topics.engine.extent import restore
from topics.engine.frames import Event, RouterState
from topics.engine.options import Options
from topics.engine.queue import Job
from topics.engine.sealed import ChunkStore
from topics.engine.state import CommittedTxn, State
from topics.engine.syncer import Syncer
from topics.engine.topic import Topic
from topics.storage import checkpoint as checkpoints
from topics.storage import frame, segment, wal
from topics.storage.frame import HEADER, Damage, Frame, file_number, file_offset
from topics.storage.fs import FileSystem, Lock, read_file, write_all
from topics.storage.segment import Segments
from topics.storage.wal import KIND_FILE, KIND_GROUP, KIND_MARK, Wal, WalFile

FORMAT_FILE = "FORMAT"
LOCK_FILE = "LOCK"
REPAIR = "`topics verify --repair` turns what is missing into holes"
_SEQ_KINDS = (frames.APPEND, frames.HOLE, KIND_GROUP)
_FORMAT = b"topics data directory, format 1\n"

_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_topic = msgspec.msgpack.Decoder(TopicSnapshot).decode
_decode_jobs = msgspec.msgpack.Decoder(dict[int, Job]).decode
_decode_keys = msgspec.msgpack.Decoder(list[tuple[str, int, Appended]]).decode
_decode_clients = msgspec.msgpack.Decoder(Clients).decode


def open_engine(
    fs: FileSystem,
    clock: Clock,
    limits: Limits,
    options: Options,
    wal_syncer: Syncer,
    file_syncer: Syncer,
    on_progress: Callable[[float], None] | None = None,
) -> Engine:
    """Opens a data directory, new or old, and makes it ready for reading and writing."""
    lock = take_lock(fs)
    try:
        prepare(fs)
        segments = Segments(fs)
        recovery = Recovery(fs, clock, options, segments)
        recovery.run(on_progress)
        recovery.tidy()
        log = Wal(fs, recovery.last_wal + 1)
        boot_id = fs.boot_id()
        log_start(log, frames.opened(boot_id, recovery.state.time.latest, recovery.state.server_id), recovery.losses)
        engine = Engine(
            fs, lock, clock, limits, options, recovery.state, log, segments, wal_syncer, file_syncer, boot_id
        )
        engine.checkpointer.resume_from(recovery.first_wal, recovery.wal_bytes)
        return engine
    except OSError as error:
        lock.release()
        raise StorageFault(f"the data directory cannot be opened: {error}") from error
    except BaseException:
        lock.release()
        raise


def take_lock(fs: FileSystem) -> Lock:
    try:
        return fs.lock(LOCK_FILE)
    except BlockingIOError:
        raise DirectoryInUse(f"{fs}: another process has this data directory open") from None


def prepare(fs: FileSystem) -> None:
    """Makes a new directory, or checks that this version knows the old one."""
    check_format(fs)
    for directory in (wal.DIRECTORY, segment.DIRECTORY, checkpoints.DIRECTORY):
        fs.mkdir(directory)
    if not fs.exists(FORMAT_FILE):
        temporary = FORMAT_FILE + ".tmp"
        if fs.exists(temporary):
            fs.remove(temporary)
        file = fs.create(temporary)
        try:
            write_all(file, [_FORMAT])
            file.sync()
        finally:
            file.close()
        fs.rename(temporary, FORMAT_FILE)
    fs.sync_dir("")


def check_format(fs: FileSystem) -> None:
    if fs.exists(FORMAT_FILE):
        found = read_file(fs, FORMAT_FILE)
        if found != _FORMAT:
            raise UnknownFormat(
                f"{fs}/{FORMAT_FILE} says {found[:80]!r}, this version reads {_FORMAT!r}: "
                "use the version of topics that wrote it, or restore the file if it was damaged"
            )
    elif wal.wal_numbers(fs) or checkpoints.checkpoint_numbers(fs):
        raise UnknownFormat(f"{fs} has a log but no {FORMAT_FILE} file: restore it with the line {_FORMAT!r}")


def log_start(log: Wal, opened: Event, losses: list[Event]) -> None:
    """Writes down what recovery decided, as one event, before anything else."""
    log.stage(KIND_GROUP, 0, 0, 0, wal.encode_group([opened, *losses]))
    log.write()
    log.synced = log.sync(log.written)


class Lost(msgspec.Struct):
    """Something that repair could not save: an event of the log, and what is known of it."""

    at: int
    end: int
    what: str
    epoch: int = 0
    first: int = 0
    last: int = 0

    @property
    def where(self) -> str:
        return f"{wal.wal_name(file_number(self.at))} at offset {file_offset(self.at)}"


class Recovery:
    """Reads a directory into a `State`. With `repair`, damage becomes holes instead of a refusal."""

    def __init__(
        self, fs: FileSystem, clock: Clock, options: Options, segments: Segments, repair: bool = False
    ) -> None:
        self._fs = fs
        self._repair = repair
        self.state = State(ChunkStore(segments, options.cache_bytes), Ratchet(clock))
        self.state.repairing = repair
        self.losses: list[Event] = []
        self.lost: list[Lost] = []
        self.bad_checkpoints: list[int] = []
        self.first_wal = 1
        self.last_wal = 0
        self.wal_bytes = 0
        self._boot_id: str | None = None
        self._clean = False
        self._frozen_at: dict[int, int] = {}
        self._cut_at: int | None = None
        self._unidentified = False
        self._orphans: dict[int, list[Lost]] = {}

    def run(self, on_progress: Callable[[float], None] | None = None) -> None:
        self._load_checkpoint()
        self._replay(on_progress)
        self.state.server_id = self.state.server_id or secrets.token_hex(8)
        for topic, first, last, at in self.state.gaps:
            self.lost.append(Lost(at, at, "records that no event has", topic.epoch, first, last))
        self.lost.extend(lost for orphans in self._orphans.values() for lost in orphans)
        self._account()

    # -- the checkpoint --------------------------------------------------------------------------------------------

    def _load_checkpoint(self) -> None:
        numbers = checkpoints.checkpoint_numbers(self._fs)
        for number in reversed(numbers):
            found = checkpoints.read_checkpoint(self._fs, number)
            if found is not None:
                self._restore(found)
                return
            self.bad_checkpoints.append(number)
        if numbers and min(wal.wal_numbers(self._fs), default=0) != 1:
            raise CorruptDirectory(
                f"{checkpoints.checkpoint_name(numbers[-1])} is damaged and no older checkpoint is whole: "
                "restore the directory from a copy"
            )

    def _restore(self, found: list[Frame]) -> None:
        state = self.state
        for item in found:
            if item.kind == KIND_HEAD:
                head = _decode_head(item.payload)
                self.first_wal = head.wal_number
                self._boot_id = head.boot_id
                self._clean = head.clean
                state.time.advance(head.now)
                state.next_epoch = head.next_epoch
                state.server_id = head.server_id
            elif item.kind == KIND_TOPIC:
                snapshot = _decode_topic(item.payload)
                topic = _topic_of(item.epoch, snapshot, state.store)
                state.add(topic)
                _restore_routers(state, topic, snapshot.routers)
                self._frozen_at[item.epoch] = snapshot.at
            elif item.kind == KIND_KEYS:
                state.topics[item.epoch].dedupe.restore(_decode_keys(item.payload), {})
            elif item.kind == KIND_JOBS:
                _restore_jobs(state.topics[item.epoch], _decode_jobs(item.payload))
            elif item.kind == KIND_CLIENTS:
                last = _decode_clients(item.payload)
                state.txn_clients = {name: CommittedTxn(*done) for name, done in last.clients.items()}
                state.time.advance(last.now)

    # -- the WAL ---------------------------------------------------------------------------------------------------

    def _replay(self, on_progress: Callable[[float], None] | None) -> None:
        numbers = [number for number in wal.wal_numbers(self._fs) if number >= self.first_wal]
        self.last_wal = max([self.first_wal - 1, *numbers])
        if not numbers and self.first_wal > 1:
            self.last_wal = self.first_wal
        missing = sorted(set(range(self.first_wal, self.last_wal + 1)) - set(numbers))
        if missing and not self._repair:
            raise CorruptDirectory(f"{wal.wal_name(missing[0])} is missing: restore it, or {REPAIR}")
        for number in missing:
            self._unidentified = True
            at = frame.position(number, 0)
            self.lost.append(Lost(at, at, "a whole file"))
        for index, number in enumerate(numbers):
            file = WalFile(self._fs, number)
            self.wal_bytes += len(file.data)
            for item in self._sound_frames(file, is_last=number == self.last_wal):
                self._apply(item)
            self._check_length(file)
            if on_progress is not None:
                on_progress((index + 1) / len(numbers))

    def _check_length(self, file: WalFile) -> None:
        """A file that was cut off between two frames has no damage to be seen."""
        length, found = wal.sealed_length(self._fs, file.number), len(file.data)
        if length <= found:
            return
        if not self._repair:
            raise CorruptDirectory(
                f"{file.name} ends at offset {found}, and had {length} bytes: {REPAIR}", file=file.name, offset=found
            )
        self._unidentified = True
        self.lost.append(Lost(file.start + found, file.start + length, "the end of a file"))

    def _sound_frames(self, file: WalFile, is_last: bool) -> Iterator[Frame]:
        """The frames of a file up to a torn tail; damage that is not one refuses, or is noted in a repair."""
        items = frame.scan(file.data, file.start)
        for item in items:
            if isinstance(item, Frame):
                yield item
                continue
            rest = list(items)
            if is_last and self._is_torn(item, rest):
                self._cut_at = item.at
                return
            if not self._repair:
                raise CorruptDirectory(
                    f"{file.name} is damaged at offset {file_offset(item.at)}: {REPAIR}",
                    file=file.name,
                    offset=file_offset(item.at),
                )
            self._note_lost(item)
            for later in rest:
                if isinstance(later, Frame):
                    yield later
                else:
                    self._note_lost(later)
            return

    def _is_torn(self, damage: Damage, rest: list[Frame | Damage]) -> bool:
        """Whether damage is what an interrupted write leaves: a kill cuts off, a power loss may mix."""
        if damage.torn and not rest:
            return True
        return self._boot_id != self._fs.boot_id() and not wal.is_proven(damage, rest)

    def _note_lost(self, damage: Damage) -> None:
        header = damage.header
        if header is None:
            self._unidentified = True
            self.lost.append(Lost(damage.at, damage.end, "unreadable bytes"))
            return
        what = frames.NAMES.get(header.kind, "group of events" if header.kind == KIND_GROUP else "bookkeeping")
        if header.kind == KIND_GROUP and not header.epoch:
            self._unidentified = True
        self.lost.append(Lost(damage.at, damage.end, what, header.epoch, header.first, header.last))
        topic = self.state.topics.get(header.epoch)
        if header.kind == frames.ROUTED:
            self._lost_copies(header.epoch)
        elif topic is not None and header.kind in _SEQ_KINDS and header.last >= topic.next_seq:
            topic.add_hole(Hole(topic.next_seq, header.last, "corrupt"))

    def _lost_copies(self, source: int) -> None:
        """Copies are lost, and nobody knows which: whatever they were, readers of those topics are told."""
        for topic in self.state.topics.values():
            if any(router.source_epoch == source for router in (topic.inlets or {}).values()):
                last = max(topic.ceiling, topic.head_seq + RESERVE_AHEAD)
                topic.add_hole(Hole(topic.next_seq, last, "corrupt"))
                self.losses.append(frames.holed(topic.epoch, topic.holes[-1]))

    def _apply(self, item: Frame) -> None:
        if item.kind in (KIND_FILE, KIND_MARK):
            return
        self._clean = False
        if item.kind == KIND_GROUP:
            for inner in wal.decode_group(item):
                self._apply_one(inner)
        else:
            self._apply_one(item)

    def _apply_one(self, item: Frame) -> None:
        if item.kind == frames.OPEN:
            self._boot_id = frames.read_opened(item).boot_id
        if item.kind == frames.ROUTED:
            self.state.apply_routed(item, lambda epoch: item.at >= self._frozen_at.get(epoch, 0))
        elif item.at >= self._frozen_at.get(item.epoch, 0):
            if self._repair:
                self._apply_leniently(item)
            else:
                self.state.apply(item)

    def _apply_leniently(self, item: Frame) -> None:
        """In a repair an event may find that what it builds on was lost."""
        state = self.state
        topic = state.topics.get(item.epoch)
        if item.kind == frames.CREATE:
            older = state.by_name.get(frames.read_created(item).name)
            if older is not None:
                state.drop(older)
        elif topic is None and item.epoch:
            # Of a topic that a later event deletes, or whose creation was lost.
            if item.kind == frames.DROP:
                self._orphans.pop(item.epoch, None)
            else:
                what = f"{frames.NAMES[item.kind]} of a topic whose creation is lost"
                self._orphans.setdefault(item.epoch, []).append(
                    Lost(item.at, item.end, what, item.epoch, item.first, item.last)
                )
        elif topic is not None and item.kind in _SEQ_KINDS and item.first < topic.next_seq <= item.last:
            self.lost.append(Lost(item.at, item.end, "overlapping append", item.epoch, item.first, item.last))
            return
        state.apply(item)

    # -- what it has cost ------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """Turns what a crash took, or may have taken, into losses that readers are told of."""
        lost_machine = self._boot_id != self._fs.boot_id()
        for topic in self.state.topics.values():
            durability = topic.config.durability
            may_lose = not self._clean and (
                durability in ("ephemeral", "memory") or (durability == "disk" and lost_machine)
            )
            if self._unidentified:
                # Whatever was lost may have been this topic's, with its reservation.
                self._lose(topic, Hole(topic.next_seq, max(topic.ceiling, topic.head_seq + RESERVE_AHEAD), "corrupt"))
            last = max(topic.head_seq, topic.ceiling if may_lose else 0)
            if durability == "ephemeral":
                self._lose_ephemeral(topic, last)
            elif last > topic.head_seq:
                self._lose(topic, Hole(topic.next_seq, last, "crash"))
            self.state.guard(topic, lambda topic=topic: retention.evict(topic))  # type: ignore[misc]  # bound now

        self.state.end_reservations()

    def _lose(self, topic: Topic, hole: Hole) -> None:
        topic.add_hole(hole)
        self.losses.append(frames.holed(topic.epoch, hole))

    def _lose_ephemeral(self, topic: Topic, last: int) -> None:
        if topic.count:
            # Older records of a class that stays: only what came after them is lost.
            if last > topic.head_seq:
                self._lose(topic, Hole(topic.next_seq, last, "restart"))
        elif last >= topic.config.seq_base:
            now = self.state.time.now()
            topic.restart(last, now)
            self.losses.append(frames.restarted(topic.epoch, last, now))

    # -- leaving no traces -----------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Makes true what was found: the next log file says that all before it is durable and whole."""
        if self._fs.exists(wal.wal_name(self.last_wal)):
            data = read_file(self._fs, wal.wal_name(self.last_wal))
            end = len(data) if self._cut_at is None else file_offset(self._cut_at)
            if end < HEADER:
                wal.remove(self._fs, self.last_wal)
                self.last_wal -= 1
            elif not self._clean:
                wal.rewrite(self._fs, self.last_wal, data[:end])
        wal.remove_unfinished(self._fs)
        for number in self.bad_checkpoints:
            self._fs.remove(checkpoints.checkpoint_name(number))
        checkpoints.remove_unfinished(self._fs)
        # A checkpoint that was found by its name must still be there by that name when this start is past.
        self._fs.sync_dir(checkpoints.DIRECTORY)


def _topic_of(epoch: int, snapshot: TopicSnapshot, store: ChunkStore) -> Topic:
    topic = Topic(snapshot.name, epoch, snapshot.config, store)
    topic.next_seq = snapshot.next_seq
    topic.earliest_seq = snapshot.earliest_seq
    topic.cap_evicted = snapshot.cap_evicted
    topic.ttl_expired = snapshot.ttl_expired
    topic.restart_lost = snapshot.restart_lost
    topic.lost_ts = snapshot.lost_ts
    topic.last_ts = snapshot.last_ts
    topic.last_write_ts = snapshot.last_write_ts
    topic.ceiling = snapshot.ceiling
    topic.holes = snapshot.holes
    topic.extents = [restore(state) for state in snapshot.extents]
    topic.count = sum(extent.live_count for extent in topic.extents)
    topic.bytes = sum(extent.live_bytes for extent in topic.extents)
    topic.restore_deletes(snapshot.deletes, snapshot.last_delete_id)
    topic.dedupe.restore([], snapshot.producers)
    if topic.queue is not None and snapshot.queue is not None:
        topic.queue.restore(snapshot.queue)
    topic.forget_ephemeral(snapshot.ephemeral)
    return topic


def _restore_routers(state: State, topic: Topic, routers: list[RouterState]) -> None:
    for known in routers:
        state.put_router(topic, known)


def _restore_jobs(topic: Topic, jobs: dict[int, Job]) -> None:
    """Jobs whose records were in memory only are gone with them."""
    queue = topic.queue
    assert queue is not None
    queue.restore_jobs({seq: job for seq, job in jobs.items() if seq >= topic.earliest_seq and seq not in queue.done})
