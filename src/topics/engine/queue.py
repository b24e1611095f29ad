"""A queue's lease table: what folding its lifecycle events gives.

The same methods run when an event is staged and when the WAL is replayed, in the same order, and give the same table.
Every event has a number, so that one which a checkpoint has taken in already changes nothing when it is replayed.
Expiry is no event: past its deadline a job counts as ready, which `settle` works out for a moment in time.

Seqs above `cursor` have never been leased, and cost nothing here; every live seq at or below it is in `jobs`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush

import msgspec

from topics.core.tombstone import Reason


class Kind(IntEnum):
    LEASED = 1  # by `node` under `lease` until `time`
    ACKED = 2  # done: the records go
    NACKED = 3  # given back, not to be had before `time`
    EXTENDED = 4  # held at least until `time`
    BLOCKED = 5  # set aside; with `has_copy`, a copy was put into the dead-letter topic
    UNBLOCKED = 6  # back in line, for `count` more deliveries; without `has_copy`, its copy is gone
    PARKED = 7  # moved to the dead-letter topic: the records go
    MOVED = 8  # moved back where they came from: the records go


# Events after which the records are gone.
REMOVING = (Kind.ACKED, Kind.PARKED, Kind.MOVED)


class Lifecycle(msgspec.Struct, array_like=True):
    """One event about some jobs of a queue. `runs` are first seqs and lengths, one after the other."""

    kind: Kind
    number: int
    runs: list[int]
    lease: str = ""
    node: str = ""
    time: int = 0
    count: int = 0
    has_copy: bool = False

    @property
    def seqs(self) -> Iterator[int]:
        for first, length in zip(self.runs[::2], self.runs[1::2], strict=True):
            yield from range(first, first + length)


def runs_of(seqs: Iterable[int]) -> list[int]:
    """Seqs in ascending order as runs."""
    runs: list[int] = []
    for seq in seqs:
        if runs and runs[-2] + runs[-1] == seq:
            runs[-1] += 1
        else:
            assert not runs or seq > runs[-2] + runs[-1], "each job once, in order"
            runs += (seq, 1)
    return runs


class View(IntEnum):
    """Where a job counts at the moment that was last settled."""

    READY = 0
    IN_FLIGHT = 1
    DELAYED = 2
    BLOCKED = 3


class Job(msgspec.Struct, array_like=True, gc=False):
    """A job that was leased at least once and is not done. `lease` is empty when nobody holds it. `limit` is how often
    it may be delivered, where an unblock has raised that."""

    deliveries: int = 0
    lease: str = ""
    node: str = ""
    deadline: int = 0
    not_before: int = 0
    limit: int = 0
    is_blocked: bool = False
    is_copied: bool = False
    view: View = View.READY


class Loss(msgspec.Struct, frozen=True, array_like=True):
    first: int
    last: int
    reason: Reason


class QueueSnapshot(msgspec.Struct, array_like=True):
    """The table without its jobs, which follow in pieces."""

    number: int
    cursor: int
    dead_lettered: int
    lost: int
    latest_loss: Loss | None
    done: list[int]


class Queue:
    def __init__(self, base: int) -> None:
        self.number = 0
        self.cursor = base - 1
        self.jobs: dict[int, Job] = {}
        self.dead_lettered = 0
        self.lost = 0
        self.latest_loss: Loss | None = None
        # Seqs that are done above the first that is not: what out-of-order acks, deletes and losses leave.
        self.done = Ranges()
        # Done and durable soon, but still to be seen in the topic; and those of them that TTL took before that.
        self.leaving: set[int] = set()
        # Where in the log its last event ends.
        self.staged_at = 0
        self.spared: set[int] = set()
        self.counts = [0, 0, 0, 0]
        self.holders: dict[str, int] = {}
        self.leases: dict[str, set[int]] = {}
        # Heaps of what may have changed; an entry that is no longer true is dropped when it comes up.
        self._deadlines: list[tuple[int, int]] = []
        self._delays: list[tuple[int, int]] = []
        self._again: list[int] = []
        self._held: list[int] = []
        self._known: list[int] = []
        # Called once when there may be something to claim.
        self.waiters: dict[Callable[[], None], None] = {}

    # -- events ----------------------------------------------------------------------------------------------------

    def apply(self, event: Lifecycle) -> bool:
        """Takes one event in, unless it is in already; says whether it was new."""
        if event.number <= self.number:
            return False
        self.number = event.number
        match event.kind:
            case Kind.LEASED:
                for seq in event.seqs:
                    self._lease(seq, event)
            case Kind.ACKED | Kind.PARKED | Kind.MOVED:
                self._finish(event)
            case Kind.NACKED:
                for seq in event.seqs:
                    self._give_back(seq, event.time)
            case Kind.EXTENDED:
                for seq in event.seqs:
                    self._extend(seq, event.time)
            case Kind.BLOCKED:
                for seq in event.seqs:
                    self._block(seq, event.has_copy)
            case Kind.UNBLOCKED:
                for seq in event.seqs:
                    self._unblock(seq, event.count, event.has_copy)
        return True

    def _lease(self, seq: int, event: Lifecycle) -> None:
        job = self.jobs.get(seq)
        if job is None:
            if seq <= self.cursor or seq in self.done:
                # Gone: what took it stands before this in the log, and was not to be seen yet when this was staged.
                return
            self._pass(seq)
            job = self._know(seq)
        else:
            self._release(seq, job)
        job.deliveries += 1
        job.lease, job.node = event.lease, event.node
        job.deadline, job.not_before = event.time, 0
        self.leases.setdefault(event.lease, set()).add(seq)
        self._look(seq, job, View.IN_FLIGHT)

    def _pass(self, seq: int) -> None:
        """The line of what was never out moves up to a seq. What it would leave behind stays in line: there is nothing,
        unless a repair has lost the event that took it."""
        skipped = self.done.next_outside(self.cursor + 1)
        while skipped < seq:
            self._look(skipped, self._know(skipped), View.READY)
            skipped = self.done.next_outside(skipped + 1)
        self.cursor = max(self.cursor, seq)

    def _know(self, seq: int) -> Job:
        job = self.jobs[seq] = Job()
        self.counts[View.READY] += 1
        heappush(self._known, seq)
        return job

    def _finish(self, event: Lifecycle) -> None:
        for first, length in zip(event.runs[::2], event.runs[1::2], strict=True):
            for seq in range(first, first + length):
                self._forget_job(seq)
            self.done.add(first, first + length - 1)
        self.leaving.update(event.seqs)
        if event.kind is Kind.PARKED:
            self.dead_lettered += sum(event.runs[1::2])

    def take_back(self, jobs: dict[int, Job]) -> None:
        """Jobs could not be finished after all, because the log takes nothing more: they stay in line."""
        for seq, job in jobs.items():
            if seq in self.leaving:
                self.leaving.discard(seq)
                self.done.discard(seq)
                self.restore_jobs({seq: job})

    def _give_back(self, seq: int, not_before: int) -> None:
        job = self.jobs.get(seq)
        if job is not None:
            self._release(seq, job)
            job.not_before = not_before
            self._look(seq, job, View.DELAYED)

    def _extend(self, seq: int, deadline: int) -> None:
        job = self.jobs.get(seq)
        if job is not None and job.lease and deadline > job.deadline:
            job.deadline = deadline
            if job.view is not View.IN_FLIGHT:
                self._look(seq, job, View.IN_FLIGHT)

    def _block(self, seq: int, is_copied: bool) -> None:
        job = self.jobs.get(seq)
        if job is not None:
            self._release(seq, job)
            job.is_blocked = True
            job.is_copied = job.is_copied or is_copied
            if is_copied:
                self.dead_lettered += 1
            self._look(seq, job, View.BLOCKED)

    def _unblock(self, seq: int, deliveries: int, has_copy: bool) -> None:
        job = self.jobs.get(seq)
        if job is not None and job.is_blocked:
            job.is_blocked = False
            job.is_copied = job.is_copied and has_copy
            job.limit = job.deliveries + deliveries
            job.not_before = 0
            self._look(seq, job, View.READY)

    def _release(self, seq: int, job: Job) -> None:
        """Nobody holds it any more. Where it belongs then is the caller's to say."""
        self._count(job, View.READY)
        if job.lease:
            held = self.leases[job.lease]
            held.discard(seq)
            if not held:
                del self.leases[job.lease]
            job.lease = ""

    # -- what the log itself does ----------------------------------------------------------------------------------

    def forget(self, first: int, last: int) -> None:
        """Records are gone, whoever took them."""
        self._settle_leaving(first, last)
        if last - first < len(self.jobs):
            for seq in range(first, last + 1):
                self._forget_job(seq)
        else:
            for seq in [seq for seq in self.jobs if first <= seq <= last]:
                self._forget_job(seq)
        self.done.add(first, last)

    def forget_below(self, seq: int) -> None:
        """Everything below is gone."""
        self._settle_leaving(0, seq - 1)
        while self._known and self._known[0] < seq:
            self._forget_job(heappop(self._known))
        self.done.drop_below(seq)
        self.cursor = max(self.cursor, seq - 1)

    def _forget_job(self, seq: int) -> None:
        job = self.jobs.get(seq)
        if job is not None:
            self._release(seq, job)
            del self.jobs[seq]
            self.counts[View.READY] -= 1

    def _settle_leaving(self, first: int, last: int) -> None:
        if self.leaving:
            self.leaving -= {seq for seq in self.leaving if first <= seq <= last}

    def spare(self, last: int) -> int:
        """TTL takes everything up to a seq. What an event before that has done is not lost; says how many."""
        spared = {seq for seq in self.leaving if seq <= last}
        self.leaving -= spared
        self.spared |= spared
        return len(spared)

    def note_loss(self, first: int, last: int, count: int, reason: Reason) -> None:
        """Jobs that somebody should have got, and nobody will."""
        if count > 0:
            self.lost += count
            self.latest_loss = Loss(first, last, reason)

    # -- a moment in time ------------------------------------------------------------------------------------------

    def settle(self, now: int) -> None:
        """What is past its deadline or its delay counts as ready."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq = heappop(self._deadlines)
            job = self.jobs.get(seq)
            if job is None or job.view is not View.IN_FLIGHT:
                continue
            if job.deadline <= now:
                self._look(seq, job, View.READY)
            else:
                heappush(self._deadlines, (job.deadline, seq))
        while self._delays and self._delays[0][0] <= now:
            _, seq = heappop(self._delays)
            job = self.jobs.get(seq)
            if job is not None and job.view is View.DELAYED and job.not_before <= now:
                self._look(seq, job, View.READY)

    def next_change(self) -> int | None:
        """When time alone may make something ready."""
        moments = [heap[0][0] for heap in (self._deadlines, self._delays) if heap]
        return min(moments) if moments else None

    def _count(self, job: Job, view: View) -> None:
        if job.view is View.IN_FLIGHT:
            self.holders[job.node] -= 1
            if not self.holders[job.node]:
                del self.holders[job.node]
        if view is View.IN_FLIGHT:
            self.holders[job.node] = self.holders.get(job.node, 0) + 1
        self.counts[job.view] -= 1
        self.counts[view] += 1
        job.view = view

    def _look(self, seq: int, job: Job, view: View) -> None:
        """A job counts somewhere from now on, and is found there when its time comes."""
        self._count(job, view)
        if view is View.READY:
            heappush(self._again, seq)
        elif view is View.IN_FLIGHT:
            heappush(self._deadlines, (job.deadline, seq))
        else:
            heappush(self._held, seq)
            if view is View.DELAYED:
                heappush(self._delays, (job.not_before, seq))

    def take_again(self, below: int | None = None) -> int | None:
        """The first job that was out before and is ready; it is taken from the line."""
        seq = self.peek_again()
        if seq is None or (below is not None and seq >= below):
            return None
        return heappop(self._again)

    def peek_again(self) -> int | None:
        while self._again:
            job = self.jobs.get(self._again[0])
            if job is not None and job.view is View.READY:
                return self._again[0]
            heappop(self._again)
        return None

    def put_again(self, seq: int) -> None:
        heappush(self._again, seq)

    def held_back(self) -> int | None:
        """The first job that is delayed or blocked."""
        while self._held:
            job = self.jobs.get(self._held[0])
            if job is not None and job.view in (View.DELAYED, View.BLOCKED):
                return self._held[0]
            heappop(self._held)
        return None

    def next_fresh(self, after: int, next_seq: int) -> int | None:
        """The first job behind a seq that has never been out."""
        seq = self.done.next_outside(max(after, self.cursor) + 1)
        return seq if seq < next_seq else None

    def ack_floor(self, earliest: int) -> int:
        """The last seq up to which everything is done."""
        return self.done.next_outside(earliest) - 1

    def ack_holes(self, earliest: int) -> int:
        """Runs of what is not done below the highest that is."""
        return self.done.count_from(earliest) - (earliest in self.done)

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, {}
        for call in waiters:
            call()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def snapshot(self) -> QueueSnapshot:
        return QueueSnapshot(
            *(self.number, self.cursor, self.dead_lettered, self.lost, self.latest_loss, self.done.to_list())
        )

    def restore(self, snapshot: QueueSnapshot) -> None:
        self.number, self.cursor = snapshot.number, snapshot.cursor
        self.dead_lettered, self.lost = snapshot.dead_lettered, snapshot.lost
        self.latest_loss = snapshot.latest_loss
        self.done = Ranges(snapshot.done)

    def restore_jobs(self, jobs: dict[int, Job]) -> None:
        for seq, job in jobs.items():
            view, job.view = job.view, View.READY
            self.jobs[seq] = job
            self.counts[View.READY] += 1
            self._known.append(seq)
            if job.lease:
                self.leases.setdefault(job.lease, set()).add(seq)
            self._look(seq, job, view)
        heapify(self._known)

    def check(self, live: int) -> None:
        """What must hold between any two events."""
        assert sum(self.counts) == len(self.jobs)
        assert all(count >= 0 for count in self.counts)
        assert self.counts[View.IN_FLIGHT] == sum(self.holders.values())
        assert len(self.jobs) + len(self.leaving) <= live


class Ranges:
    """Disjoint ranges of seqs, never touching one another."""

    def __init__(self, runs: list[int] | None = None) -> None:
        self._first: list[int] = list(runs[::2]) if runs else []
        lengths = runs[1::2] if runs else []
        self._last = [first + length - 1 for first, length in zip(self._first, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self._first)

    @property
    def highest(self) -> int:
        return self._last[-1] if self._last else 0

    def add(self, first: int, last: int) -> None:
        start = bisect_left(self._last, first - 1)
        stop = bisect_right(self._first, last + 1)
        if start < stop:
            first = min(first, self._first[start])
            last = max(last, self._last[stop - 1])
        self._first[start:stop] = [first]
        self._last[start:stop] = [last]

    def discard(self, seq: int) -> None:
        at = bisect_left(self._last, seq)
        if at < len(self._last) and self._first[at] <= seq:
            first, last = self._first[at], self._last[at]
            rest = [(one, other) for one, other in ((first, seq - 1), (seq + 1, last)) if one <= other]
            self._first[at : at + 1] = [one for one, _ in rest]
            self._last[at : at + 1] = [other for _, other in rest]

    def count_from(self, seq: int) -> int:
        """How many end at or behind a seq."""
        return len(self._last) - bisect_left(self._last, seq)

    def covered(self, first: int, last: int) -> int:
        """How many seqs of a range are in here."""
        total = 0
        for at in range(bisect_left(self._last, first), bisect_right(self._first, last)):
            total += min(self._last[at], last) - max(self._first[at], first) + 1
        return total

    def drop_below(self, seq: int) -> None:
        """What lies below is of no interest any more; what begins there is cut."""
        at = bisect_left(self._last, seq)
        del self._first[:at], self._last[:at]
        if self._first and self._first[0] <= seq:
            # It reaches from below to a seq that is gone as well: the first that is not stands behind it.
            self._first[0] = max(self._first[0], seq)

    def next_outside(self, seq: int) -> int:
        at = bisect_left(self._last, seq)
        return self._last[at] + 1 if at < len(self._last) and self._first[at] <= seq else seq

    def __contains__(self, seq: int) -> bool:
        return self.next_outside(seq) != seq

    def to_list(self) -> list[int]:
        runs: list[int] = []
        for first, last in zip(self._first, self._last, strict=True):
            runs += (first, last - first + 1)
        return runs
