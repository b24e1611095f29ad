"""A topic: its watermarks, its records and its losses, and how each event changes them.

Everything here is a fold: the same methods run when a commit is published and when the WAL is replayed, in the same
order, and give the same state. Nothing here writes to disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from topics.core.config import TopicConfig
from topics.core.limits import DELETE_HISTORY, RESERVE_AHEAD
from topics.core.records import Batch, split
from topics.core.tombstone import Hole, HoleReason, Reason
from topics.engine.chunk import TARGET_BYTES, Chunk
from topics.engine.dedupe import Dedupe
from topics.engine.extent import Extent
from topics.engine.queue import Lifecycle, Queue
from topics.engine.sealed import ChunkRef, ChunkStore

if TYPE_CHECKING:
    from topics.engine.commit import Commit
    from topics.engine.deletion import PastDelete
    from topics.engine.frames import Deleted
    from topics.engine.router import Router

_first_seq = attrgetter("first_seq")
_last_of_hole = attrgetter("last")


class Topic:
    """One instance of a topic, from its creation to its deletion: `epoch` is its number, never reused.

    `cap_evicted`, `ttl_expired` and `restart_lost` are the last live seqs that each kind of loss took.
    """

    __slots__ = (
        *(
            "ahead",
            "cap_evicted",
            "ceiling",
            "config",
            "count",
            "dedupe",
            "deletes",
            "dropped",
            "earliest_seq",
            "epoch",
        ),
        *("extents", "holes", "inflight_clients", "inflight_keys", "inlets", "last_delete_id", "last_read_ts"),
        *("last_ts", "last_write_ts", "lost_ts", "name", "next_seq", "outgoing", "outlets", "pending"),
        *("pending_bytes", "pending_count", "queue"),
        *("reserved", "reserved_at", "restart_lost", "staged_config", "staged_delete_id", "staged_seq", "store"),
        *("ttl_expired", "unapplied", "unsettled", "waited", "waiters", "_bytes", "_front_ts"),
    )

    def __init__(self, name: str, epoch: int, config: TopicConfig, store: ChunkStore) -> None:
        self.name = name
        self.epoch = epoch
        self.config = config
        self.store = store
        self.next_seq = config.seq_base
        self.earliest_seq = config.seq_base
        self.cap_evicted = self.ttl_expired = self.restart_lost = config.seq_base - 1
        self.count = 0
        self._bytes = 0
        self.last_ts = 0
        # The newest time that anything lost by cap, TTL or restart may have had.
        self.lost_ts = -1
        self.last_write_ts: int | None = None
        self.last_read_ts: int | None = None
        self.extents: list[Extent] = []
        self.holes: list[Hole] = []
        self.dedupe = Dedupe()
        self.deletes: deque[PastDelete] | None = None
        self.last_delete_id = 0
        # Every acked seq is at or below the ceiling, and the ceiling is durable before the ack.
        self.ceiling = config.seq_base - 1
        self.dropped = False
        # Staged: in the WAL's order already, not yet visible.
        self.staged_seq = self.next_seq
        self.staged_config = config
        self.staged_delete_id = 0
        self.reserved = self.ceiling
        self.ahead = RESERVE_AHEAD
        self.reserved_at = 0
        # Whether a write had to wait for the last reservation.
        self.waited = False
        self.pending: deque[Commit] = deque()
        self.pending_count = 0
        self.pending_bytes = 0
        self.inflight_keys: dict[str, Commit] | None = None
        self.inflight_clients: dict[str, tuple[int, Commit]] | None = None
        self.unsettled = False
        # Deletes that are durable but wait for a disk that does not answer: until then the topic cannot be read.
        self.unapplied: list[Deleted | Lifecycle] = []
        # Called once when records, holes or the topic's end become visible.
        self.waiters: dict[Callable[[], None], None] | None = None
        self._front_ts: int | None = None
        # Routers that live with this topic (they lead here, or from here to another server), by id; routers that
        # read it; and what those that are up to date have not taken yet, even if a cap has evicted it meanwhile.
        self.inlets: dict[int, Router] | None = None
        self.outlets: list[Router] | None = None
        self.outgoing: deque[Batch | Hole] = deque()
        self.queue = Queue(config.seq_base) if config.type == "queue" else None

    @property
    def head_seq(self) -> int:
        return self.next_seq - 1

    @property
    def evict_floor(self) -> int:
        return max(self.cap_evicted, self.ttl_expired, self.restart_lost) + 1

    @property
    def bytes(self) -> int:
        return self._bytes

    @bytes.setter
    def bytes(self, size: int) -> None:
        # The directory's total goes along.
        self.store.live_bytes += size - self._bytes
        self._bytes = size

    def add_waiter(self, call: Callable[[], None]) -> None:
        if self.waiters is None:
            self.waiters = {}
        self.waiters[call] = None

    def forget_waiter(self, call: Callable[[], None]) -> None:
        if self.waiters is not None:
            self.waiters.pop(call, None)

    def wake(self) -> None:
        """Something new is visible: whoever waits for it looks again."""
        if self.waiters:
            waiters, self.waiters = self.waiters, None
            for waiter in waiters:
                waiter()

    def loss_reason(self, cursor: int) -> Reason:
        """Why the records behind a cursor that lies below the evict floor are gone."""
        if self.restart_lost > cursor and self.restart_lost >= max(self.cap_evicted, self.ttl_expired):
            return "restart"
        if self.cap_evicted > cursor:
            return "mixed" if self.ttl_expired > cursor else "cap"
        return "ttl"

    # -- growing ---------------------------------------------------------------------------------------------------

    def append(self, batch: Batch) -> None:
        assert batch.first_seq == self.next_seq
        if len(batch.body) <= TARGET_BYTES:
            self._append(batch)
            return
        for piece in split(batch, TARGET_BYTES):
            self._append(piece)

    def _append(self, batch: Batch) -> None:
        ephemeral = self.config.durability == "ephemeral"
        extent = self.extents[-1] if self.extents else None
        if extent is None or not extent.is_open or extent.ephemeral != ephemeral:
            extent = Extent(batch.first_seq, ephemeral)
            self.extents.append(extent)
        extent.append(batch)
        records = len(batch.lens)
        self.count += records
        self._bytes += batch.size
        self.store.live_bytes += batch.size
        self.next_seq = batch.first_seq + records
        self.last_ts = self.last_write_ts = batch.ts

    def offer(self, piece: Batch | Hole) -> None:
        """What is new waits for the routers that read here, whatever retention does to it."""
        if self.outlets:
            self.outgoing.append(piece)

    def skip(self, to_seq: int) -> None:
        """Moves the head without records: the seqs up to `to_seq` belong to a loss that the caller accounts for."""
        assert to_seq >= self.head_seq
        self.next_seq = to_seq + 1
        if not self.count:
            self.earliest_seq = self.next_seq

    def add_hole(self, hole: Hole) -> None:
        """A loss above the head: its seqs are taken."""
        assert hole.first == self.next_seq
        self.skip(hole.last)
        self._add_disjoint(hole)
        if self.queue is not None:
            self.queue.forget(hole.first, hole.last)
            self.queue.forget_below(self.earliest_seq)
            self.queue.note_loss(hole.first, hole.last, hole.last - hole.first + 1, hole.reason)

    def _insert_hole(self, hole: Hole) -> None:
        """Holes are disjoint and sorted: what lies in one already keeps its reason."""
        first = hole.first
        for known in [each for each in self.holes if each.last >= hole.first and each.first <= hole.last]:
            if first < known.first:
                self._add_disjoint(Hole(first, known.first - 1, hole.reason, hole.via))
            first = known.last + 1
        if first <= hole.last:
            self._add_disjoint(Hole(first, hole.last, hole.reason, hole.via))

    def _add_disjoint(self, hole: Hole) -> None:
        if hole.last < self.evict_floor:
            return
        at = bisect_right(self.holes, hole.first, key=attrgetter("first"))
        before = self.holes[at - 1] if at else None
        is_more = before is not None and before.last + 1 == hole.first
        if before is not None and is_more and (before.reason, before.via) == (hole.reason, hole.via):
            self.holes[at - 1] = Hole(before.first, hole.last, hole.reason, hole.via)
        else:
            self.holes.insert(at, hole)

    def hole_behind(self, cursor: int) -> Hole | None:
        """The first hole that is not wholly at or below a cursor."""
        at = bisect_right(self.holes, cursor, key=_last_of_hole)
        return self.holes[at] if at < len(self.holes) else None

    # -- finding ---------------------------------------------------------------------------------------------------

    def extent_at(self, seq: int) -> int:
        """The place in `extents` of the first one that ends at or behind `seq`."""
        at = max(bisect_right(self.extents, seq, key=_first_seq) - 1, 0)
        return at if at < len(self.extents) and self.extents[at].last_seq >= seq else at + 1

    def first_live(self, seq: int) -> int:
        """The first live record at or behind `seq`, else the next seq."""
        for at in range(self.extent_at(seq), len(self.extents)):
            found = self.extents[at].first_live(self.store, seq)
            if found is not None:
                return found
        return self.next_seq

    def last_live(self, below: int) -> int | None:
        """The last live record below `below`."""
        for extent in reversed(self.extents[: self.extent_at(below - 1) + 1]):
            found = extent.last_live(self.store, self.earliest_seq, below)
            if found is not None:
                return found
        return None

    def find(self, seq: int) -> tuple[Extent, Chunk | ChunkRef] | None:
        """Where a seq stands, if it is (or was) a record that is still on disk or in memory."""
        at = self.extent_at(seq)
        if at >= len(self.extents) or self.extents[at].first_seq > seq:
            return None
        extent = self.extents[at]
        refs = extent.refs(self.store)
        index = extent.locate(self.store, seq)
        if index >= len(refs) or refs[index].first_seq > seq:
            return None
        return extent, refs[index]

    def ts_of(self, seq: int) -> int:
        found = self.find(seq)
        assert found is not None
        extent, ref = found
        return extent.load(self.store, ref).ts[seq - ref.first_seq]

    @property
    def front_ts(self) -> int:
        """`$ts` of the earliest record."""
        assert self.count
        if self._front_ts is None:
            self._front_ts = self.ts_of(self.earliest_seq)
        return self._front_ts

    # -- shrinking -------------------------------------------------------------------------------------------------

    def advance(self, to_seq: int) -> int:
        """Removes every live record below `to_seq` from the front; says how many. Whose fault it was is the
        caller's to note."""
        if to_seq <= self.earliest_seq:
            return 0
        # All that may fail comes first: a read error changes nothing.
        whole = 0
        count = size = 0
        while whole < len(self.extents) and self.extents[whole].last_seq < to_seq:
            count += self.extents[whole].live_count
            size += self.extents[whole].live_bytes
            whole += 1
        front = self.extents[whole] if whole < len(self.extents) else None
        if front is not None and front.first_seq < to_seq:
            part = front.live_in(self.store, max(self.earliest_seq, front.first_seq), to_seq)
        else:
            part = 0, 0
        earliest = self.first_live(to_seq)
        for extent in self.extents[:whole]:
            self._retire(extent)
        del self.extents[:whole]
        if front is not None:
            front.live_count -= part[0]
            front.live_bytes -= part[1]
            front.drop_below(to_seq)
            self.store.dead_bytes += part[1]
            if not front.live_count:
                self._retire(front)
                del self.extents[0]
        self.count -= count + part[0]
        self.bytes -= size + part[1]
        self._set_earliest(earliest)
        return count + part[0]

    def kill(self, seq: int) -> bool:
        """Deletes one record, if it lives. `settle_front` must follow."""
        if seq < self.earliest_seq:
            return False
        at = self.extent_at(seq)
        if at >= len(self.extents) or self.extents[at].first_seq > seq:
            return False
        extent = self.extents[at]
        size = extent.kill(self.store, seq)
        if size is None:
            return False
        self.count -= 1
        self.bytes -= size
        self.store.dead_bytes += size
        if self.queue is not None:
            self.queue.forget(seq, seq)
        return True

    def settle_front(self) -> None:
        """After deletions in the middle: empty extents go, and the earliest record is found anew."""
        earliest = self.first_live(self.earliest_seq)
        for extent in self.extents:
            if not extent.live_count:
                self._retire(extent)
        self.extents = [extent for extent in self.extents if extent.live_count]
        self._set_earliest(earliest)

    def lose(self, first: int, last: int, reason: HoleReason) -> None:
        """A range inside the log is gone from the disk: it becomes a hole."""
        assert not self.is_lost(first, last), "nobody may look at what is lost already"
        for extent in self.extents[self.extent_at(first) :]:
            if extent.first_seq > last:
                break
            count, size = extent.lose(self.store, first, last, self.earliest_seq)
            self.count -= count
            self.bytes -= size
            if self.queue is not None:
                self.queue.note_loss(first, last, count, reason)
        if self.queue is not None:
            self.queue.forget(first, last)
        self._insert_hole(Hole(first, last, reason))
        self.settle_front()

    def is_lost(self, first: int, last: int) -> bool:
        """Whether a hole has the whole range already."""
        hole = self.hole_behind(first - 1)
        return last < self.evict_floor or (hole is not None and hole.first <= first and last <= hole.last)

    def lose_top(self, last: int, now: int) -> None:
        """A restart took the newest records, up to `last`; older ones were of a class that stays."""
        if last < self.next_seq:
            return
        if self.count:
            self.add_hole(Hole(self.next_seq, last, "restart"))
        else:
            self.restart(last, now)

    def restart(self, last: int, now: int) -> None:
        """A restart took everything up to `last`; none of it was newer than `now`."""
        if self.queue is not None:
            first = self.earliest_seq
            lost = max(last, self.head_seq) - first + 1
            self.queue.note_loss(first, last, lost - self.queue.done.covered(first, last), "restart")
        self.skip(max(last, self.head_seq))
        self._lose_all(now)

    def _lose_all(self, now: int) -> None:
        if self.next_seq == self.config.seq_base:
            return
        for extent in self.extents:
            self._retire(extent)
        self.extents = []
        self.count = self.bytes = 0
        self.restart_lost = self.head_seq
        self.lost_ts = now
        self._set_earliest(self.next_seq)
        self.prune_holes()

    def forget_ephemeral(self, ranges: list[tuple[int, int]]) -> None:
        """Records that were in memory only, and are not there any more when a checkpoint is loaded."""
        for first, last in ranges:
            if self.queue is not None:
                begin = max(first, self.earliest_seq)
                done = self.queue.done.covered(begin, last)
                self.queue.forget(first, last)
                self.queue.note_loss(begin, last, last - begin + 1 - done, "restart")
            if any(extent.first_seq < first and extent.live_count for extent in self.extents):
                self._insert_hole(Hole(first, last, "restart"))
            else:
                self.restart_lost = max(self.restart_lost, last)
                self.lost_ts = self.last_ts
        if ranges:
            self._set_earliest(self.first_live(max(self.earliest_seq, self.evict_floor)))
            self.prune_holes()

    def restore_deletes(self, deletes: list[PastDelete], last_id: int) -> None:
        if deletes:
            self.deletes = deque(deletes, maxlen=DELETE_HISTORY)
        self.last_delete_id = last_id

    def prune_holes(self) -> None:
        """Holes wholly below the evict floor have ended: the floor tells of them."""
        floor = self.evict_floor
        while self.holes and self.holes[0].last < floor:
            self.holes.pop(0)

    def _retire(self, extent: Extent) -> None:
        if extent.place is not None:
            self.store.dead_bytes += extent.place.bytes

    def _set_earliest(self, seq: int) -> None:
        assert seq >= self.earliest_seq
        self.earliest_seq = seq
        self._front_ts = None
        if self.queue is not None:
            self.queue.forget_below(seq)
        self.check()

    def check(self) -> None:
        """What must hold between any two events."""
        assert self.evict_floor <= self.earliest_seq <= self.next_seq, self.name
        assert self.count >= 0
        assert self.bytes >= 0
        assert (self.count == 0) == (self.earliest_seq == self.next_seq), self.name
