"""What section 9 says, as plainly as it can be said: every job a value, every question a loop over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

View = Literal["ready", "in_flight", "delayed", "blocked"]
MIN_LEASE, MAX_LEASE = 100, 86_400_000


class Refused(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Job:
    """A live job. `origin` and `source_seq` are a dead letter's."""

    seq: int
    ts: int
    data: int
    tag: str | None = None
    deliveries: int = 0
    lease: str = ""
    node: str = ""
    deadline: int = 0
    not_before: int = 0
    limit: int = 0
    is_blocked: bool = False
    is_copied: bool = False
    origin: str | None = None
    source_seq: int = 0

    def view(self, now: int) -> View:
        if self.is_blocked:
            return "blocked"
        if self.lease:
            return "in_flight" if self.deadline > now else "ready"
        return "delayed" if self.not_before > now else "ready"


@dataclass(frozen=True)
class Config:
    durability: str = "disk"
    leases_durable: bool | None = None
    lease_ms: int = 1000
    ttl_ms: int = 0
    cap_records: int = 0
    discard: str = "old"
    max_deliveries: int = 0
    dead_letter: str | None = None
    dlq_strategy: str | None = None
    ordering_required: bool = False
    max_ack_holes: int = 0
    max_in_flight: int = 0

    @property
    def strategy(self) -> str:
        return self.dlq_strategy or ("block" if self.ordering_required else "skip")

    @property
    def syncs(self) -> bool:
        return self.durability == "fsync"

    @property
    def syncs_leases(self) -> bool:
        if self.durability == "ephemeral":
            return False
        return self.syncs if self.leases_durable is None else self.leases_durable


@dataclass
class Queue:
    name: str
    config: Config
    head: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    lost: int = 0
    dead_lettered: int = 0

    def copy(self) -> Queue:
        return replace(self, jobs=dict(self.jobs))

    # -- looking ---------------------------------------------------------------------------------------------------

    def views(self, now: int) -> dict[View, list[int]]:
        found: dict[View, list[int]] = {"ready": [], "in_flight": [], "delayed": [], "blocked": []}
        for seq in sorted(self.jobs):
            found[self.jobs[seq].view(now)].append(seq)
        return found

    def highest_done(self) -> int:
        return max((seq for seq in range(1, self.head + 1) if seq not in self.jobs), default=0)

    def ack_floor(self) -> int:
        return min(self.jobs, default=self.head + 1) - 1

    def ack_holes(self) -> int:
        """Runs of what is not done below the highest that is."""
        below = range(1, self.highest_done())
        return sum(seq in self.jobs and seq - 1 not in self.jobs for seq in below)

    # -- the log ---------------------------------------------------------------------------------------------------

    def settle(self, now: int) -> None:
        if self.config.ttl_ms:
            self._lose([seq for seq, job in self.jobs.items() if now - job.ts > self.config.ttl_ms])

    def _lose(self, seqs: list[int]) -> None:
        for seq in seqs:
            del self.jobs[seq]
        self.lost += len(seqs)

    def evict(self) -> None:
        if self.config.cap_records:
            over = max(len(self.jobs) - self.config.cap_records, 0)
            self._lose(sorted(self.jobs)[:over])

    def has_room(self, count: int) -> bool:
        config = self.config
        return config.discard != "reject" or not config.cap_records or len(self.jobs) + count <= config.cap_records

    def append(self, jobs: Sequence[Job], now: int) -> None:
        self.settle(now)
        for job in jobs:
            self.head += 1
            self.jobs[self.head] = replace(job, seq=self.head, ts=now)
        self.evict()

    def delete(self, before_seq: int | None, tag: str | None) -> int:
        gone = [
            seq
            for seq, job in self.jobs.items()
            if (before_seq is None or seq < before_seq) and (tag is None or job.tag == tag)
        ]
        for seq in gone:
            del self.jobs[seq]
        return len(gone)

    def crash(self, head: int) -> None:
        """What lies between the last job that was found and the reservation counts as lost."""
        self.lost += head - self.head
        self.head = head

    # -- the verbs -------------------------------------------------------------------------------------------------

    def line(self, now: int) -> list[int]:
        """What is ready, in the order in which it goes out: what was out before first."""
        ready = self.views(now)["ready"]
        return sorted(ready, key=lambda seq: (self.jobs[seq].deliveries == 0, seq))

    def is_poison(self, job: Job) -> bool:
        config = self.config
        if not job.deliveries or not config.max_deliveries:
            return False
        if config.strategy == "skip" and config.dead_letter is None:
            return False
        return job.deliveries >= max(job.limit, config.max_deliveries)

    def plan(self, node: str, most: int, now: int) -> tuple[list[int], list[int], str | None]:
        """What a claim takes, what it finds to have been out too often, and why it is refused if it gets nothing."""
        config = self.config
        views = self.views(now)
        if config.ordering_required and any(self.jobs[seq].node != node for seq in views["in_flight"]):
            return [], [], None
        refusal = None
        if config.max_in_flight:
            room = config.max_in_flight - len(views["in_flight"])
            most = min(most, room)
            refusal = "in_flight_cap_exceeded" if room <= 0 else None
        below = self.head + 1
        if config.max_ack_holes and self.ack_holes() > config.max_ack_holes:
            below = self.highest_done()
        taken: list[int] = []
        poison: list[int] = []
        held = [*views["delayed"], *views["blocked"]]
        for seq in self.line(now):
            if len(taken) >= most or seq >= below:
                break
            if config.ordering_required and any(other < seq for other in held):
                break
            if self.is_poison(self.jobs[seq]):
                poison.append(seq)
                if config.ordering_required:
                    break
            else:
                taken.append(seq)
        if not taken and below <= self.head and most > 0:
            refusal = "ack_hole_cap_exceeded"
        return taken, poison, refusal

    def lease(self, seqs: list[int], lease: str, node: str, deadline: int) -> None:
        for seq in seqs:
            job = self.jobs[seq]
            self.jobs[seq] = replace(
                job, deliveries=job.deliveries + 1, lease=lease, node=node, deadline=deadline, not_before=0
            )

    def lease_ms(self, asked: int | None) -> int:
        return min(max(asked or self.config.lease_ms, MIN_LEASE), MAX_LEASE)

    def held(
        self, node: str | None, seqs: list[int] | None, lease_ids: list[str] | None, lease_id: str | None
    ) -> tuple[list[int], list[int]]:
        """Which of the named jobs are held as claimed, and which are not."""
        if seqs is None:
            seqs = [seq for seq, job in sorted(self.jobs.items()) if job.lease and job.lease == lease_id]
        done: list[int] = []
        skipped: list[int] = []
        for index, seq in enumerate(seqs):
            job = self.jobs.get(seq)
            wanted = lease_id if lease_id is not None else lease_ids[index] if lease_ids is not None else None
            is_held = (
                job is not None
                and job.lease != ""
                and (wanted is None or job.lease == wanted)
                and (node is None or job.node == node)
                and seq not in done
            )
            (done if is_held else skipped).append(seq)
        return sorted(done), skipped

    def ack(self, seqs: list[int]) -> None:
        for seq in seqs:
            del self.jobs[seq]

    def nack(self, seqs: list[int], not_before: int) -> None:
        for seq in seqs:
            self.jobs[seq] = replace(self.jobs[seq], lease="", node="", deadline=0, not_before=not_before)

    def extend(self, seqs: list[int], deadline: int) -> dict[int, int]:
        for seq in seqs:
            self.jobs[seq] = replace(self.jobs[seq], deadline=max(self.jobs[seq].deadline, deadline))
        return {seq: self.jobs[seq].deadline for seq in seqs}

    def block(self, seqs: list[int], is_copied: bool) -> None:
        for seq in seqs:
            job = self.jobs[seq]
            is_copy = is_copied or job.is_copied
            self.jobs[seq] = replace(
                job, lease="", node="", deadline=0, not_before=0, is_blocked=True, is_copied=is_copy
            )
            self.dead_lettered += is_copied and not job.is_copied

    def unblock(self, seqs: list[int], takes_copy: bool = False) -> None:
        more = max(self.config.max_deliveries, 1)
        for seq in seqs:
            job = self.jobs[seq]
            self.jobs[seq] = replace(
                job,
                is_blocked=False,
                is_copied=job.is_copied and not takes_copy,
                limit=job.deliveries + more,
                not_before=0,
            )


class World:
    """All queues of a directory, and every state of them that a power cut may go back to."""

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.past: list[dict[str, Queue]] = []

    def copy(self) -> dict[str, Queue]:
        return {name: queue.copy() for name, queue in self.queues.items()}

    def note(self, is_durable: bool) -> None:
        """One event has happened; once it is durable, so is everything before it."""
        if is_durable:
            self.past.clear()
        self.past.append(self.copy())

    def settle(self, now: int) -> None:
        for queue in self.queues.values():
            queue.settle(now)

    # -- what touches more than one queue --------------------------------------------------------------------------

    def route(self, queue: Queue, poison: list[int], now: int) -> None:
        """Jobs that were out too often."""
        strategy = queue.config.strategy
        dead = queue.config.dead_letter
        if strategy == "block":
            queue.block(poison, is_copied=False)
            self.note(False)
            return
        assert dead is not None
        fresh = [seq for seq in poison if not queue.jobs[seq].is_copied]
        again = [seq for seq in poison if seq not in fresh]
        target = self.queues.get(dead)
        if target is not None:
            target.settle(now)
        if fresh and target is not None and not target.has_room(len(fresh)):
            queue.block(poison, is_copied=False)
            self.note(False)
            return
        if fresh:
            copies = [self._copy(queue, seq) for seq in fresh]
            if target is None:
                target = self.queues[dead] = Queue(dead, Config())
            if strategy == "skip":
                queue.ack(fresh)
                queue.dead_lettered += len(fresh)
            else:
                queue.block(fresh, is_copied=True)
            target.append(copies, now)
            self.note(True)
        if again:
            # Copied before, perhaps under another strategy: a second copy would double it.
            queue.block(again, is_copied=False)
            self.note(False)

    def _copy(self, queue: Queue, seq: int) -> Job:
        job = queue.jobs[seq]
        return Job(0, 0, job.data, job.tag, origin=queue.name, source_seq=seq)

    def redrive(self, name: str, most: int, to: str | None, now: int) -> tuple[int, int, int]:
        """How many were moved, how many originals unblocked, and how many could go nowhere."""
        queue = self.queues[name]
        seqs = sorted(queue.line(now)[:most])
        copies: dict[str, list[Job]] = {}
        freed: dict[str, list[int]] = {}
        gone: list[int] = []
        skipped = 0
        for seq in seqs:
            job = queue.jobs[seq]
            target = to or job.origin
            if target is None or target == name or target not in self.queues:
                skipped += 1
                continue
            gone.append(seq)
            original = self.queues[target].jobs.get(job.source_seq) if to is None else None
            if original is not None and original.is_blocked and original.is_copied and original.data == job.data:
                freed.setdefault(target, []).append(original.seq)
            else:
                copies.setdefault(target, []).append(Job(0, 0, job.data, job.tag))
        for target, own in copies.items():
            if not self.queues[target].has_room(len(own)):
                raise Refused("topic_full")
        queue.ack(gone)
        for target, originals in freed.items():
            self.queues[target].unblock(originals, takes_copy=True)
        for target, own in copies.items():
            self.queues[target].append(own, now)
        return sum(map(len, copies.values())), sum(map(len, freed.values())), skipped
