"""The verbs of a queue: claim, ack, nack, extend, unblock, redrive.

Each is one event, and is in the table from the moment it is staged, so that nobody gets what somebody else is getting;
the answer waits for what the queue's class promises.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from topics.core.check import check_integer, check_text
from topics.core.config import ConfigPatch, resolve
from topics.core.errors import (
    AckHoleCapExceeded,
    InFlightCapExceeded,
    InvalidRequest,
    NotAQueue,
    StorageFault,
    TopicsError,
)
from topics.core.limits import RESERVE_AHEAD
from topics.core.records import Batch, RecordIn
from topics.core.tombstone import Hole, Tombstone
from topics.engine import frames
from topics.engine.append import LEVELS, completed, event_of
from topics.engine.commit import Commit, Level
from topics.engine.frames import Event
from topics.engine.queue import REMOVING, Job, Kind, Lifecycle, Queue, View, runs_of
from topics.engine.sealed import LostRange
from topics.engine.topic import Topic

if TYPE_CHECKING:
    from topics.engine.engine import Engine

MIN_LEASE_MS, MAX_LEASE_MS = 100, 86_400_000
MAX_DELAY_MS = 365 * 86_400_000
# Poison that one claim routes: the rest is the next one's.
_MAX_POISON = 100
_FROM, _DELIVERIES, _SRC_SEQ = "$dead_letter_from", "$dead_letter_deliveries", "$dead_letter_src_seq"
_decode_meta = msgspec.json.Decoder(dict[str, str]).decode
_encode = msgspec.json.Encoder().encode


class Claim(msgspec.Struct):
    """What a claim got: `jobs` are rendered."""

    jobs: list[bytes]
    lease_id: str | None
    ready: int
    lost: int
    tombstone: Tombstone | None


class Settled(msgspec.Struct):
    """What became of the jobs that a request named."""

    done: list[int]
    skipped: list[int]
    ready: int
    in_flight: int
    deadlines: dict[int, int] | None = None


class Redriven(msgspec.Struct):
    moved: int
    unblocked: int
    skipped: int
    ready: int


class QueueState(msgspec.Struct):
    ready: int
    in_flight: int
    delayed: int
    blocked: int
    dead_lettered: int
    lost: int
    ack_floor: int
    ack_holes: int
    oldest_ready_ts: int | None


class Lease(msgspec.Struct):
    """A job that is out, or set aside."""

    seq: int
    state: str
    lease_id: str | None
    node: str | None
    deadline: int | None
    not_before: int | None
    deliveries: int


class Holder(msgspec.Struct):
    """Which jobs a request means, and as whose: by node with seqs, or by lease."""

    node: str | None = None
    seqs: list[int] | None = None
    lease_ids: list[str] | None = None
    lease_id: str | None = None

    def check(self) -> None:
        if self.lease_id is None:
            if not self.node or self.seqs is None:
                raise InvalidRequest("node and seqs are required, or lease_id")
        elif self.lease_ids is not None:
            raise InvalidRequest("lease_id and lease_ids exclude each other")
        if self.lease_ids is not None and len(self.lease_ids) != len(self.seqs or ()):
            raise InvalidRequest("lease_ids must pair with seqs, one each")
        for seq in self.seqs or ():
            check_integer("seqs", seq, 0)


def fold(topic: Topic, what: Lifecycle) -> None:
    """Replays one event of a queue."""
    assert topic.queue is not None
    topic.queue.apply(what)
    if what.kind in REMOVING:
        remove(topic, what)


def remove(topic: Topic, what: Lifecycle) -> set[int]:
    """Deletes the records of jobs that are done; says which were still there, or had been spared."""
    queue = topic.queue
    assert queue is not None
    killed = {seq for seq in what.seqs if topic.kill(seq)}
    if killed:
        topic.settle_front()
    spared = queue.spared & set(what.seqs) if queue.spared else set()
    queue.spared -= spared
    queue.leaving.difference_update(what.seqs)
    return killed | spared


class _Plan:
    """Which jobs a claim gives, and which have been out too often."""

    def __init__(self, topic: Topic, node: str | None, most: int, now: int) -> None:
        """Without a node it is for nobody: what is ready is moved, not leased, and no cap is in the way."""
        assert topic.queue is not None
        self._topic = topic
        self._queue = queue = topic.queue
        self._config = config = topic.config
        self._again: list[int] = []
        self._seen: set[int] = set()
        self._cursor = queue.cursor
        self.taken: list[int] = []
        self.poison: list[int] = []
        self.refusal: TopicsError | None = None
        self._below: int | None = None
        queue.settle(now)
        if node is None:
            self._take(most)
            return
        if config.ordering_required and any(holder != node for holder in queue.holders):
            return
        if config.max_in_flight:
            room = config.max_in_flight - queue.counts[View.IN_FLIGHT]
            if room <= 0:
                self.refusal = InFlightCapExceeded(
                    f"{queue.counts[View.IN_FLIGHT]} jobs of {topic.name!r} are in flight, max_in_flight is "
                    f"{config.max_in_flight}",
                    limit="max_in_flight",
                    max=config.max_in_flight,
                )
            most = min(most, room)
        holes = queue.ack_holes(topic.earliest_seq) if config.max_ack_holes else 0
        if holes > config.max_ack_holes:
            self._below = queue.done.highest
        self._take(most)
        if self._below is not None and not self.taken and most > 0:
            self.refusal = AckHoleCapExceeded(
                f"{topic.name!r} has {holes} ack holes, max_ack_holes is {config.max_ack_holes}",
                holes=holes,
                max=config.max_ack_holes,
                limit="max_ack_holes",
            )

    def _take(self, most: int) -> None:
        while len(self.taken) < most and len(self.poison) < _MAX_POISON and self._take_one():
            pass

    def _take_one(self) -> bool:
        queue = self._queue
        again = queue.peek_again()
        while again is not None and again in self._seen:
            # It stands in line more than once: it expired, and was given back after that.
            queue.take_again()
            again = queue.peek_again()
        fresh = queue.next_fresh(self._cursor, self._topic.next_seq)
        seq = again if again is not None else fresh
        if self._config.ordering_required and again is not None and fresh is not None:
            seq = min(again, fresh)
        if seq is None or (self._below is not None and seq >= self._below):
            return False
        held = queue.held_back() if self._config.ordering_required else None
        if held is not None and held < seq:
            return False
        if seq == again:
            queue.take_again()
            self._again.append(seq)
            self._seen.add(seq)
            if self._is_poison(queue.jobs[seq]):
                self.poison.append(seq)
                # Where the order counts, a job that is set aside stops the line.
                return not self._config.ordering_required
        else:
            self._cursor = seq
        self.taken.append(seq)
        return True

    def _is_poison(self, job: Job) -> bool:
        config = self._config
        if not config.max_deliveries or (config.strategy == "skip" and config.dead_letter is None):
            return False
        return job.deliveries >= max(job.limit, config.max_deliveries)

    def undo(self) -> None:
        """Nothing comes of it: what was taken from the line goes back."""
        for seq in self._again:
            self._queue.put_again(seq)
        self._again = []


class Jobs:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def queue(self, name: str) -> tuple[Topic, Queue]:
        topic = self._engine.topic(name)
        if topic.queue is None:
            raise NotAQueue(f"topic {name!r} is a log, not a queue")
        return topic, topic.queue

    # -- claim -----------------------------------------------------------------------------------------------------

    def claim(self, name: str, node: str, most: int = 1, lease_ms: int | None = None) -> Commit:
        """Leases up to `most` jobs; the result is a `Claim`. A cap that is reached refuses."""
        engine = self._engine
        engine.check_open()
        check_text("node", node, engine.limits.max_node_bytes)
        check_integer("max", most, 1)
        if lease_ms is not None:
            check_integer("lease_ms", lease_ms, 0)
        topic, queue = self.queue(name)
        engine.settle(topic)
        most = min(most, engine.limits.max_claim)
        while True:
            now = engine.time.now()
            plan = _Plan(topic, node, most, now)
            try:
                rendered = [self._render(topic, seq) for seq in plan.taken]
                poison = [self._record(topic, seq) for seq in plan.poison]
                break
            except LostRange as lost:
                plan.undo()
                engine.lose(topic, lost)
            except StorageFault:
                plan.undo()
                raise
        is_moved = bool(plan.poison) and self._route(topic, plan.poison, poison, now)
        if not plan.taken:
            if plan.refusal is not None:
                raise plan.refusal
            nothing = Claim([], None, *self._told(topic, queue))
            # Who is told that a job is in the dead-letter topic finds it there.
            return engine.committer.stage(Level.SYNCED, (), (), lambda: nothing) if is_moved else completed(nothing)
        lease_ms = min(max(lease_ms or topic.config.lease_ms, MIN_LEASE_MS), MAX_LEASE_MS)
        lease_id = f"lease_{secrets.token_hex(8)}"
        deadline = now + lease_ms
        runs = runs_of(sorted(plan.taken))
        self._stage(topic, Lifecycle(Kind.LEASED, queue.number + 1, runs, lease_id, node, deadline))
        head = b'{"lease_id":"%b","deadline":%d,"deliveries":%%d,' % (lease_id.encode(), deadline)
        pairs = sorted(zip(plan.taken, rendered, strict=True))
        jobs = [head % queue.jobs[seq].deliveries + record for seq, record in pairs]
        claim = Claim(jobs, lease_id, *self._told(topic, queue))
        if is_moved:
            return engine.committer.stage(Level.SYNCED, (), (), lambda: claim)
        return self._finish(topic, lambda: claim, is_lease=True)

    def _told(self, topic: Topic, queue: Queue) -> tuple[int, int, Tombstone | None]:
        loss = queue.latest_loss
        tombstone = None
        if loss is not None:
            missed = loss.last - loss.first + 1
            tombstone = Tombstone(loss.first, loss.last, loss.reason, missed, topic.earliest_seq, topic.head_seq)
        return self._ready(topic, queue), queue.lost, tombstone

    def available(self, topic: Topic) -> int:
        """How many jobs claims could get now."""
        queue, config = topic.queue, topic.config
        assert queue is not None
        queue.settle(self._engine.time.now())
        ready = self._ready(topic, queue)
        return min(ready, config.max_in_flight - queue.counts[View.IN_FLIGHT]) if config.max_in_flight else ready

    def held_by(self, topic: Topic, leases: set[str]) -> int:
        """How many jobs some leases hold; one past its deadline is nobody's."""
        queue = topic.queue
        assert queue is not None
        queue.settle(self._engine.time.now())
        held = [seq for lease in leases for seq in queue.leases.get(lease, ())]
        return sum(queue.jobs[seq].view is View.IN_FLIGHT for seq in held)

    def nothing(self, topic: Topic) -> Claim:
        """What a claim that may take nothing is told."""
        assert topic.queue is not None
        return Claim([], None, *self._told(topic, topic.queue))

    def has_ready(self, topic: Topic) -> bool:
        queue = topic.queue
        assert queue is not None
        queue.settle(self._engine.time.now())
        return self._ready(topic, queue) > 0

    def _ready(self, topic: Topic, queue: Queue) -> int:
        counts = queue.counts
        return topic.count - len(queue.leaving) - counts[View.IN_FLIGHT] - counts[View.DELAYED] - counts[View.BLOCKED]

    def _render(self, topic: Topic, seq: int) -> bytes:
        """A job's record as JSON, without its first brace."""
        found = topic.find(seq)
        assert found is not None, "what is claimed is there"
        chunk = found[0].load(topic.store, found[1], body=True)
        return chunk.record(seq - chunk.first_seq, include_tags=True, include_meta=True)[1:]

    def _record(self, topic: Topic, seq: int) -> RecordIn:
        found = topic.find(seq)
        assert found is not None, "what is moved is there"
        chunk = found[0].load(topic.store, found[1], body=True)
        index = seq - chunk.first_seq
        data, meta = chunk.parts(index)
        return RecordIn(Raw(data), chunk.tag(index), chunk.node(index), Raw(meta))

    # -- staging ---------------------------------------------------------------------------------------------------

    def _stage(self, topic: Topic, what: Lifecycle) -> None:
        """Takes an event into the table and gives it its place in the log; `_finish` waits for it."""
        assert topic.queue is not None
        topic.queue.apply(what)
        if topic.config.durability != "ephemeral":
            self._engine.committer.log(frames.queued(topic.epoch, what))
            topic.queue.staged_at = self._engine.committer.wal.staged

    def _finish(self, topic: Topic, result: Callable[[], Any], is_lease: bool) -> Commit:
        """A commit that is done when all that was staged is as durable as the queue promises."""
        config = topic.config
        level = LEVELS[config.durability]
        if is_lease and config.leases_durable is not None and config.durability != "ephemeral":
            level = Level.SYNCED if config.leases_durable else Level.WRITTEN
        return self._engine.committer.stage(level, (), (), result)

    # -- ack, nack, extend, unblock --------------------------------------------------------------------------------

    def _held(self, topic: Topic, queue: Queue, holder: Holder) -> tuple[list[int], list[int]]:
        """Which of the named jobs are held as claimed, and which are not."""
        holder.check()
        if holder.lease_id is not None:
            wanted = sorted(queue.leases.get(holder.lease_id, ())) if holder.seqs is None else holder.seqs
            leases: Sequence[str | None] = [holder.lease_id] * len(wanted)
        else:
            assert holder.seqs is not None
            wanted = holder.seqs
            leases = holder.lease_ids if holder.lease_ids is not None else [None] * len(wanted)
        held: set[int] = set()
        skipped: list[int] = []
        for seq, lease in zip(wanted, leases, strict=True):
            job = queue.jobs.get(seq)
            is_held = job is not None and bool(job.lease) and (lease is None or job.lease == lease)
            if is_held and job is not None and (holder.node is None or job.node == holder.node) and seq not in held:
                held.add(seq)
            else:
                skipped.append(seq)
        return sorted(held), skipped

    def ack(self, name: str, holder: Holder) -> Commit:
        """Jobs that are done: their records are deleted. One event, whatever their number."""
        self._engine.check_open()
        topic, queue = self.queue(name)
        self._engine.settle(topic)
        held, skipped = self._held(topic, queue, holder)
        if not held:
            return completed(self._settled(topic, queue, [], skipped))
        self._preload(topic, held)
        what = Lifecycle(Kind.ACKED, queue.number + 1, runs_of(held))

        def result(gone: set[int]) -> Settled:
            # What a write before it in the log has pushed out is lost, not acked.
            late = [seq for seq in held if seq not in gone]
            return self._settled(topic, queue, [seq for seq in held if seq in gone], skipped + late)

        return self._remove(topic, what, result)

    def _preload(self, topic: Topic, seqs: Sequence[int]) -> None:
        """A disk that does not answer refuses while nothing has changed."""

        def load() -> None:
            for seq in seqs:
                found = topic.find(seq)
                if found is not None:
                    found[0].load(topic.store, found[1])

        self._engine.guard(topic, load)

    def _remove(self, topic: Topic, what: Lifecycle, result: Callable[[set[int]], Any]) -> Commit:
        queue = topic.queue
        assert queue is not None
        jobs = {seq: msgspec.structs.replace(queue.jobs[seq]) for seq in what.seqs}
        self._engine.routers.before_removal(topic)
        queue.apply(what)
        events = () if topic.config.durability == "ephemeral" else (frames.queued(topic.epoch, what),)
        level = LEVELS[topic.config.durability]
        commit = self._engine.committer.stage(
            level, (topic,), events, lambda: result(self._publish_removal(topic, what))
        )
        queue.staged_at = commit.end
        commit.on_done(lambda done: queue.take_back(jobs) if done.error is not None else None)
        return commit

    def _publish_removal(self, topic: Topic, what: Lifecycle) -> set[int]:
        """Deletes the records of jobs that are done; says whose were still there."""
        queue = topic.queue
        assert queue is not None
        gone: set[int] = set()

        def take() -> None:
            gone.update(remove(topic, what))

        try:
            self._engine.guard(topic, take)
        except StorageFault:
            gone.update(what.seqs)
            topic.unapplied.append(what)
            topic.unsettled = True
        queue.wake()
        return gone

    def _settled(
        self, topic: Topic, queue: Queue, done: list[int], skipped: list[int], deadlines: dict[int, int] | None = None
    ) -> Settled:
        queue.settle(self._engine.time.now())
        return Settled(done, skipped, self._ready(topic, queue), queue.counts[View.IN_FLIGHT], deadlines)

    def nack(self, name: str, holder: Holder, delay_ms: int = 0) -> Commit:
        """Gives jobs back, to be had again after a while."""
        self._engine.check_open()
        check_integer("delay_ms", delay_ms, 0, MAX_DELAY_MS)
        topic, queue = self.queue(name)
        self._engine.settle(topic)
        held, skipped = self._held(topic, queue, holder)
        if not held:
            return completed(self._settled(topic, queue, [], skipped))
        now = self._engine.time.now()
        self._stage(topic, Lifecycle(Kind.NACKED, queue.number + 1, runs_of(held), time=now + delay_ms))

        def result() -> Settled:
            settled = self._settled(topic, queue, held, skipped)
            queue.wake()
            return settled

        return self._finish(topic, result, is_lease=True)

    def extend(self, name: str, holder: Holder, lease_ms: int | None = None) -> Commit:
        """Holds jobs longer, never shorter."""
        self._engine.check_open()
        if lease_ms is not None:
            check_integer("lease_ms", lease_ms, 0)
        topic, queue = self.queue(name)
        self._engine.settle(topic)
        held, skipped = self._held(topic, queue, holder)
        if not held:
            return completed(self._settled(topic, queue, [], skipped, {}))
        lease_ms = min(max(lease_ms or topic.config.lease_ms, MIN_LEASE_MS), MAX_LEASE_MS)
        deadline = self._engine.time.now() + lease_ms
        self._stage(topic, Lifecycle(Kind.EXTENDED, queue.number + 1, runs_of(held), time=deadline))
        deadlines = {seq: queue.jobs[seq].deadline for seq in held}
        return self._finish(topic, lambda: self._settled(topic, queue, held, skipped, deadlines), is_lease=True)

    def unblock(self, name: str, seqs: Sequence[int]) -> Commit:
        """Puts jobs that were set aside back in line, for `max_deliveries` more deliveries."""
        self._engine.check_open()
        topic, queue = self.queue(name)
        self._engine.settle(topic)
        found: set[int] = set()
        skipped: list[int] = []
        for seq in seqs:
            check_integer("seqs", seq, 0)
            job = queue.jobs.get(seq)
            if job is not None and job.is_blocked and seq not in found:
                found.add(seq)
            else:
                skipped.append(seq)
        blocked = sorted(found)
        if not blocked:
            return completed(self._settled(topic, queue, [], skipped))
        what = Lifecycle(
            Kind.UNBLOCKED, queue.number + 1, runs_of(blocked), count=max(topic.config.max_deliveries, 1), has_copy=True
        )
        self._stage(topic, what)

        def result() -> Settled:
            settled = self._settled(topic, queue, blocked, skipped)
            queue.wake()
            return settled

        return self._finish(topic, result, is_lease=False)

    # -- poison ----------------------------------------------------------------------------------------------------

    def _route(self, topic: Topic, seqs: list[int], records: list[RecordIn], now: int) -> bool:
        """Jobs that were out too often: to the dead-letter topic, set aside, or both. Says whether any were moved."""
        queue, config = topic.queue, topic.config
        assert queue is not None
        if config.strategy == "block":
            self._stage(topic, Lifecycle(Kind.BLOCKED, queue.number + 1, runs_of(seqs)))
            return False
        assert config.dead_letter is not None
        kind = Kind.PARKED if config.strategy == "skip" else Kind.BLOCKED
        fresh = [seq for seq in seqs if not queue.jobs[seq].is_copied]
        copies = [
            _marked(record, topic.name, queue.jobs[seq].deliveries, seq)
            for seq, record in zip(seqs, records, strict=True)
            if seq in fresh
        ]
        try:
            if copies:
                self._move(topic, kind, fresh, {config.dead_letter: copies}, now)
        except TopicsError:
            # It has no room, or cannot be made: the jobs wait here, where everybody sees them.
            self._stage(topic, Lifecycle(Kind.BLOCKED, queue.number + 1, runs_of(seqs)))
            return False
        again = [seq for seq in seqs if seq not in fresh]
        if again:
            self._stage(topic, Lifecycle(Kind.BLOCKED, queue.number + 1, runs_of(again)))
        return bool(copies)

    def _move(
        self,
        topic: Topic,
        kind: Kind,
        seqs: Sequence[int],
        copies: dict[str, list[RecordIn]],
        now: int,
        unblock: dict[str, list[int]] | None = None,
        result: Callable[[], Any] = lambda: None,
    ) -> Commit:
        """Takes jobs out of a queue (or sets them aside) and appends them elsewhere, in one commit over all topics."""
        engine = self._engine
        queue = topic.queue
        assert queue is not None
        appender = engine.appender
        new = [name for name in copies if engine.staged_topic(name) is None]
        engine.check_topic_room(len(new))
        for name, records in copies.items():
            found = engine.staged_topic(name)
            if found is not None:
                engine.settle(found)
            config = found.staged_config if found is not None else resolve(_dead_letter_of(topic), None, name)
            counts = (
                (found.count + found.pending_count, found.bytes + found.pending_bytes) if found is not None else (0, 0)
            )
            appender.check_seqs(name, found.staged_seq if found is not None else config.seq_base, records)
            appender.check_fits(name, config, records, *counts)
        events: list[Event] = []
        created: list[Topic] = []
        pieces: list[tuple[Topic, list[Batch | Hole], int]] = []
        for name, records in copies.items():
            dest = engine.staged_topic(name)
            if dest is None:
                dest, event = engine.stage_topic(name, resolve(_dead_letter_of(topic), None, name))
                created.append(dest)
                events.append(event)
            own = appender.assign(dest, records, None, now)
            dest.reserved = max(dest.reserved, dest.staged_seq - 1 + RESERVE_AHEAD)
            events.append(frames.reserved(dest.epoch, dest.reserved, now))
            if dest.staged_config.durability != "ephemeral":
                events += [event_of(dest, piece) for piece in own]
            appender.hold(dest, own)
            pieces.append((dest, own, dest.reserved))
        engine.routers.before_removal(topic)
        what = Lifecycle(kind, queue.number + 1, runs_of(seqs), has_copy=kind is Kind.BLOCKED)
        queue.apply(what)
        if topic.config.durability != "ephemeral":
            events.append(frames.queued(topic.epoch, what))
        for name, originals in (unblock or {}).items():
            origin = engine.topic(name)
            assert origin.queue is not None
            more = max(origin.config.max_deliveries, 1)
            freed = Lifecycle(Kind.UNBLOCKED, origin.queue.number + 1, runs_of(originals), count=more)
            origin.queue.apply(freed)
            if origin.config.durability != "ephemeral":
                events.append(frames.queued(origin.epoch, freed))

        def publish() -> Any:
            for dest in created:
                engine.state.add(dest)
            for dest, own, ceiling in pieces:
                dest.ceiling = max(dest.ceiling, ceiling)
                appender.release(dest, own)
                appender.publish_pieces(dest, own)
            if kind in REMOVING:
                self._publish_removal(topic, what)
            for name in unblock or ():
                origin = engine.state.by_name.get(name)
                if origin is not None and origin.queue is not None:
                    origin.queue.wake()
            return result()

        topics = [topic, *[dest for dest, _, _ in pieces]]
        commit = engine.committer.stage(Level.SYNCED, topics, events, publish, atomic=True)
        for name in (topic.name, *(unblock or ())):
            touched = engine.topic(name).queue
            assert touched is not None
            touched.staged_at = commit.end
        return commit

    def redrive(
        self, name: str, most: int = 1, to: str | None = None, may: Callable[[str], bool] | None = None
    ) -> Commit:
        """Moves dead-lettered jobs back where they came from, or to another queue. A copy whose original is still set
        aside goes, and the original is back in line."""
        engine = self._engine
        engine.check_open()
        check_integer("max", most, 1)
        topic, queue = self.queue(name)
        engine.settle(topic)
        now = engine.time.now()
        plan = _Plan(topic, None, min(most, engine.limits.max_claim), now)
        seqs: list[int] = []
        skipped = 0
        copies: dict[str, list[RecordIn]] = {}
        unblock: dict[str, list[int]] = {}
        try:
            for seq in sorted([*plan.taken, *plan.poison]):
                try:
                    record = self._record(topic, seq)
                except LostRange as lost:
                    engine.lose(topic, lost)
                    skipped += 1
                    continue
                origin, src_seq = _origin(record)
                dest = to or origin
                if dest is None or dest == name or engine.staged_topic(dest) is None or (may and not may(dest)):
                    skipped += 1
                    continue
                seqs.append(seq)
                blocked = self._blocked(origin, src_seq, record) if to is None else None
                if blocked is not None:
                    unblock.setdefault(dest, []).append(blocked)
                else:
                    copies.setdefault(dest, []).append(_unmarked(record))
        finally:
            plan.undo()
        moved = sum(map(len, copies.values()))
        freed = sum(map(len, unblock.values()))
        if not seqs:
            return completed(Redriven(0, 0, skipped, self._ready(topic, queue)))
        unblock = {dest: sorted(set(originals)) for dest, originals in unblock.items()}
        return self._move(
            topic,
            Kind.MOVED,
            seqs,
            copies,
            now,
            unblock,
            lambda: Redriven(moved, freed, skipped, self._ready(topic, queue)),
        )

    def _blocked(self, origin: str | None, src_seq: int | None, copy: RecordIn) -> int | None:
        """The original of a copy, if it is still set aside. A seq of another life of its queue is another job."""
        topic = self._engine.state.by_name.get(origin or "")
        if topic is None or topic.queue is None or src_seq is None:
            return None
        self._engine.settle(topic)
        job = topic.queue.jobs.get(src_seq)
        if job is None or not job.is_blocked or not job.is_copied:
            return None
        try:
            original = self._record(topic, src_seq)
        except LostRange as lost:
            self._engine.lose(topic, lost)
            return None
        is_same = bytes(original.data) == bytes(copy.data) and original.tag == copy.tag
        return src_seq if is_same else None

    # -- looking ---------------------------------------------------------------------------------------------------

    def state(self, topic: Topic) -> QueueState:
        queue = topic.queue
        assert queue is not None
        queue.settle(self._engine.time.now())
        counts = queue.counts
        first = queue.peek_again()
        fresh = queue.next_fresh(queue.cursor, topic.next_seq)
        oldest = min([seq for seq in (first, fresh) if seq is not None], default=None)
        return QueueState(
            ready=self._ready(topic, queue),
            in_flight=counts[View.IN_FLIGHT],
            delayed=counts[View.DELAYED],
            blocked=counts[View.BLOCKED],
            dead_lettered=queue.dead_lettered,
            lost=queue.lost,
            ack_floor=queue.ack_floor(topic.earliest_seq),
            ack_holes=queue.ack_holes(topic.earliest_seq),
            oldest_ready_ts=None if oldest is None else topic.ts_of(oldest),
        )

    def leases(self, name: str, most: int = 1000, after: int = 0) -> tuple[list[Lease], int]:
        """Jobs that are out or set aside, by seq, and how many there are."""
        topic, queue = self.queue(name)
        self._engine.settle(topic)
        queue.settle(self._engine.time.now())
        out = sorted(seq for seq, job in queue.jobs.items() if job.view is not View.READY and seq > after)
        listed = [_lease(seq, queue.jobs[seq]) for seq in out[:most]]
        return listed, len(out)


def _dead_letter_of(topic: Topic) -> ConfigPatch:
    """A dead-letter topic that does not exist is made: a queue, as durable as the one that its jobs come from."""
    return ConfigPatch(type="queue", durability=topic.config.durability)


def _lease(seq: int, job: Job) -> Lease:
    return Lease(
        seq,
        job.view.name.lower(),
        job.lease or None,
        job.node if job.lease else None,
        job.deadline if job.lease else None,
        job.not_before if job.view is View.DELAYED else None,
        job.deliveries,
    )


def _marked(record: RecordIn, source: str, deliveries: int, seq: int) -> RecordIn:
    """A record for the dead-letter topic: behind what its meta has, verbatim, it says where it comes from."""
    marks = _encode({_FROM: source, _DELIVERIES: str(deliveries), _SRC_SEQ: str(seq)})
    meta = bytes(_unmarked(record).meta)
    if meta:
        marks = meta[:-1] + (b"," if meta[1:-1].strip() else b"") + marks[1:]
    return RecordIn(record.data, record.tag, record.node, Raw(marks))


def _unmarked(record: RecordIn) -> RecordIn:
    meta = bytes(record.meta)
    at = meta.rfind(_encode(_FROM) + b":")
    if at >= 0 and _FROM in _decode_meta(meta):
        meta = meta[:at].removesuffix(b",") + b"}"
    return RecordIn(record.data, record.tag, record.node, Raw(b"" if meta == b"{}" else meta))


def _origin(record: RecordIn) -> tuple[str | None, int | None]:
    meta = _decode_meta(record.meta) if len(record.meta) else {}
    number = meta.get(_SRC_SEQ, "")
    return meta.get(_FROM), int(number) if number.isdigit() else None
