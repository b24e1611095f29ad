"""What the queue tests share: a machine with queues on it, and short words for the verbs of section 9."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from tests.helpers import Machine
from topics.engine.commit import Commit
from topics.engine.jobs import Claim, Holder, Jobs, Lease, QueueState, Redriven, Settled

# Shorter than the shortest lease there is.
MOMENT = 10
LEASE = 1000


class Job(msgspec.Struct):
    """A job as a claim gives it."""

    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    lease_id: str
    deadline: int
    deliveries: int
    data: Any
    tag: str | None = msgspec.field(name="$tag", default=None)
    node: str | None = msgspec.field(name="$node", default=None)
    meta: dict[str, str] = {}


def job_of(rendered: bytes) -> Job:
    return msgspec.json.decode(rendered, type=Job)


class Desk(Machine):
    """A machine whose queues are used through the engine's own verbs, one turn each."""

    @property
    def jobs(self) -> Jobs:
        return self.log.engine.jobs

    def turn(self, stage: Callable[[], Commit]) -> Any:
        try:
            return self.log._commit(stage)
        finally:
            # A claim that is refused may have routed poison.
            self.log.engine.flush()

    def queue(self, name: str = "q", *datas: object, **config: Any) -> None:
        """A queue with these jobs in it."""
        self.log.put(name, {"type": "queue", "lease_ms": LEASE, **config})
        if datas:
            self.log.append(name, [{"data": data} for data in datas])

    def write(self, *datas: object, q: str = "q", **fields: Any) -> list[int]:
        return self.log.append(q, [{"data": data} for data in datas], **fields).seqs

    def claim_all(self, node: str = "a", most: int = 1, lease_ms: int | None = None, q: str = "q") -> Claim:
        claim: Claim = self.turn(lambda: self.jobs.claim(q, node, most, lease_ms))
        return claim

    def claim(self, node: str = "a", most: int = 1, lease_ms: int | None = None, q: str = "q") -> list[Job]:
        return [job_of(job) for job in self.claim_all(node, most, lease_ms, q).jobs]

    def seqs(self, node: str = "a", most: int = 1, lease_ms: int | None = None, q: str = "q") -> list[int]:
        """The seqs that a claim gets."""
        return [job.seq for job in self.claim(node, most, lease_ms, q)]

    def ack(self, *seqs: int, node: str = "a", q: str = "q", **fields: Any) -> Settled:
        done: Settled = self.turn(lambda: self.jobs.ack(q, holder(node, seqs, fields)))
        return done

    def nack(self, *seqs: int, delay_ms: int = 0, node: str = "a", q: str = "q", **fields: Any) -> Settled:
        done: Settled = self.turn(lambda: self.jobs.nack(q, holder(node, seqs, fields), delay_ms))
        return done

    def extend(self, *seqs: int, lease_ms: int | None = None, node: str = "a", q: str = "q", **fields: Any) -> Settled:
        done: Settled = self.turn(lambda: self.jobs.extend(q, holder(node, seqs, fields), lease_ms))
        return done

    def unblock(self, *seqs: int, q: str = "q") -> Settled:
        done: Settled = self.turn(lambda: self.jobs.unblock(q, seqs))
        return done

    def redrive(self, most: int = 1000, to: str | None = None, q: str = "dead") -> Redriven:
        done: Redriven = self.turn(lambda: self.jobs.redrive(q, most, to))
        return done

    def fail(self, seq: int, times: int, node: str = "a", q: str = "q") -> None:
        """A job, the only one that is ready, is claimed and given back again and again."""
        for _ in range(times):
            assert self.seqs(node, q=q) == [seq]
            self.nack(seq, node=node, q=q)

    def state(self, q: str = "q") -> QueueState:
        state = self.log.get(q).queue
        assert state is not None
        self.check(q)
        return state

    def counts(self, q: str = "q") -> tuple[int, int, int, int]:
        """Ready, in flight, delayed, blocked."""
        state = self.state(q)
        return state.ready, state.in_flight, state.delayed, state.blocked

    def leases(self, q: str = "q") -> list[Lease]:
        return self.jobs.leases(q)[0]

    def check(self, q: str = "q") -> None:
        """What must hold at any time: the table against itself, and against the records."""
        topic = self.log.engine.topic(q)
        assert topic.queue is not None
        topic.queue.check(topic.count)
        state = self.jobs.state(topic)
        numbers = (state.ready, state.in_flight, state.delayed, state.blocked)
        assert min(numbers) >= 0, numbers
        assert sum(numbers) == topic.count - len(topic.queue.leaving), (numbers, topic.count)

    @property
    def syncs(self) -> int:
        return self.log.engine.committer.syncs

    def data(self, topic: str) -> list[Any]:
        return [record["data"] for record in self.records(topic)]

    def records(self, topic: str) -> list[dict[str, Any]]:
        """Everything that lives, through as many answers as it takes."""
        found: list[dict[str, Any]] = []
        cursor = 0
        while True:
            diff = self.log.diff(topic, cursor, include_tags=True, limit=1000)
            found += json.loads(diff.records_json)
            if diff.caught_up:
                return found
            cursor = diff.next_from_seq


def holder(node: str, seqs: tuple[int, ...], fields: dict[str, Any]) -> Holder:
    """By lease if one is named, else by node."""
    if "lease_id" in fields:
        return Holder(lease_id=fields["lease_id"], seqs=list(seqs) or None, node=fields.get("as_node"))
    return Holder(node=node, seqs=list(seqs), **fields)
