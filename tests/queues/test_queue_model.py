"""Queues against the model: the same verbs to both, with moved clocks, restarts, kills and power cuts among them.

Every answer is compared, and after every step every queue: its records, its table, its counts and its leases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.queues import Desk, job_of
from tests.queues.model import Config, Job, Queue, Refused, World
from tests.simdisk import MODES, Mode
from topics.core.errors import TopicsError
from topics.core.limits import Limits
from topics.engine.jobs import Claim, Holder, Settled
from topics.engine.options import Options

# What a topic may have reserved ahead. The contract allows 1024: fewer make crashes cheap to look at.
RESERVE = 16
QUEUES = ("q", "r", "dead")
NAMES = st.sampled_from(["q", "q", "q", "r", "dead"])
NODES = st.sampled_from(["n1", "n2", "n3"])
TAGS = st.sampled_from([None, "x", "y"])
LEASES = st.sampled_from([None, None, 100, 400, 5000])
# How long a call comes after the one before it.
DELAYS = st.sampled_from([0, 0, 0, 0, 1, 60, 101, 999, 1001])
LIVELY: dict[str, st.SearchStrategy[Any]] = {
    "max_deliveries": st.sampled_from([1, 1, 2, 0]),
    "dead_letter": st.sampled_from(["dead", "dead", "dead", "dead", None]),
    "dlq_strategy": st.sampled_from(["skip", "block", "block_and_dlq"]),
    "ordering_required": st.sampled_from([False, False, True]),
    "max_in_flight": st.sampled_from([0, 0, 1, 3]),
    "max_ack_holes": st.sampled_from([0, 0, 1, 2]),
    "cap_records": st.sampled_from([0, 0, 0, 0, 4, 8]),
    "ttl_ms": st.sampled_from([0, 0, 0, 0, 0, 4000]),
    "lease_ms": st.sampled_from([100, 1000]),
}
PATCHES = st.fixed_dictionaries({}, optional=LIVELY)
CLASSES = st.sampled_from(["disk", "disk", "fsync", "fsync", "memory", "ephemeral"])
DURABLES = st.sampled_from([None, None, True, False])


@dataclass(frozen=True)
class Which:
    """Some jobs of one of the claims that were ever made, and how they are named."""

    pick: int
    is_held: bool
    how: str
    node: str | None
    subset: int
    extra: tuple[int, ...]
    is_doubled: bool


CLAIMS = st.builds(
    Which,
    pick=st.integers(0, 50),
    is_held=st.sampled_from([True, True, True, False]),
    how=st.sampled_from(["node", "node", "lease", "lease and seqs", "pairs", "wrong pairs"]),
    node=st.none() | NODES,
    subset=st.integers(0, 15),
    extra=st.sampled_from([(), (), (1,), (3, 12)]),
    is_doubled=st.booleans(),
)


def is_allowed(config: Config) -> bool:
    if config.dlq_strategy == "block_and_dlq" and config.dead_letter is None:
        return False
    return not (config.dlq_strategy == "skip" and config.ordering_required)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.desk: Desk
        self.number = 0
        # Every claim that was ever answered: its queue, node, lease and seqs.
        self.claims: list[tuple[str, str, str, list[int]]] = []

    @initialize(
        checkpoint_bytes=st.sampled_from([400, 2000, 1 << 20]),
        cache_bytes=st.sampled_from([0, 1 << 20]),
        chunk_bytes=st.sampled_from([120, 1000]),
        configs=st.tuples(PATCHES, PATCHES),
        classes=st.tuples(CLASSES, CLASSES, CLASSES),
        durables=st.tuples(DURABLES, DURABLES),
        dead_cap=st.sampled_from([0, 0, 3]),
        strategy=st.sampled_from(["block_and_dlq", "skip", "block"]),
    )
    def start(
        self,
        checkpoint_bytes: int,
        cache_bytes: int,
        chunk_bytes: int,
        configs: tuple[dict[str, Any], ...],
        classes: tuple[str, ...],
        durables: tuple[bool | None, ...],
        dead_cap: int,
        strategy: str,
    ) -> None:
        self.patches = ExitStack()
        owners = [module for path, module in sys.modules.items() if path.startswith("topics.engine")]
        for name, size in {"TARGET_BYTES": chunk_bytes, "RESERVE_AHEAD": RESERVE}.items():
            found = [module for module in owners if hasattr(module, name)]
            assert found, f"no module has {name} any more"
            for module in found:
                self.patches.enter_context(patch.object(module, name, size))
        self.desk = Desk(
            Limits(), Options(checkpoint_bytes=checkpoint_bytes, cache_bytes=cache_bytes, reclaim_bytes=2000)
        )
        self.put("dead", {"durability": classes[2], "cap_records": dead_cap, "discard": "reject"})
        lively = {"max_deliveries": 1, "dead_letter": "dead", "dlq_strategy": strategy}
        for name, config, durability, durable in zip(("q", "r"), configs, classes, durables, strict=False):
            self.put(name, {**lively, **config, "durability": durability, "leases_durable": durable})

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.close()

    # -- both sides ------------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        return self.desk.clock.now()

    def begin(self, delay: int) -> None:
        self.desk.clock.advance(delay)
        self.world.settle(self.now)

    def call(self, real: Callable[[], Any], refusal: str | None) -> Any:
        """A refusal must be one on both sides, with the same code."""
        result, code = None, None
        try:
            result = real()
        except TopicsError as error:
            code = error.code
        assert code == refusal, f"the answer is {code or result}, the contract says {refusal or 'yes'}"
        return result

    # -- topics ----------------------------------------------------------------------------------------------------

    def put(self, name: str, fields: dict[str, Any]) -> None:
        known = self.world.queues.get(name)
        config = replace(known.config if known is not None else Config(), **fields)
        sent = dict(fields) if known is not None else {"type": "queue", "lease_ms": 1000, **fields}
        result = self.call(lambda: self.desk.log.put(name, sent), None if is_allowed(config) else "invalid_request")
        if result is None:
            if known is None:
                self.put(name, {key: value for key, value in fields.items() if key != "dlq_strategy"})
            return
        queue = self.world.queues.setdefault(name, Queue(name, config))
        queue.config = config
        queue.settle(self.now)
        queue.evict()
        self.world.note(True)

    @rule(name=st.sampled_from(["q", "r"]), fields=PATCHES, delay=DELAYS)
    def configure(self, name: str, fields: dict[str, Any], delay: int) -> None:
        self.begin(delay)
        self.put(name, fields)

    @rule(name=NAMES, tags=st.lists(TAGS, min_size=1, max_size=5), delay=DELAYS)
    def write(self, name: str, tags: list[str | None], delay: int) -> None:
        self.begin(delay)
        self.append(name, tags)

    def append(self, name: str, tags: list[str | None]) -> None:
        queue = self.world.queues[name]
        jobs: list[Job] = []
        for tag in tags:
            self.number += 1
            jobs.append(Job(0, 0, self.number, tag))
        records = [{"data": job.data, **({"tag": job.tag} if job.tag is not None else {})} for job in jobs]
        refusal = None
        if not queue.has_room(len(jobs)):
            refusal = "batch_too_large" if len(jobs) > queue.config.cap_records else "topic_full"
        result = self.call(lambda: self.desk.log.append(name, records), refusal)
        if result is not None:
            queue.append(jobs, self.now)
            assert result.last_seq == queue.head
            self.world.note(queue.config.syncs)

    def refill(self, name: str) -> None:
        """A queue without jobs finds nothing."""
        if len(self.world.queues[name].views(self.now)["ready"]) < 2:
            self.append(name, [None, "x", None])

    @rule(name=NAMES, share=st.sampled_from([None, None, 0.1, 0.3, 1.1]), tag=TAGS, delay=DELAYS)
    def delete(self, name: str, share: float | None, tag: str | None, delay: int) -> None:
        self.begin(delay)
        queue = self.world.queues[name]
        before = None if share is None else int(share * (queue.head + 1))
        if before is None and tag is None:
            return
        result = self.desk.log.delete(name, before_seq=before, match=tag)
        assert result.deleted == queue.delete(before, tag)
        self.world.note(True)

    # -- claims ----------------------------------------------------------------------------------------------------

    @rule(name=NAMES, node=NODES, most=st.sampled_from([1, 1, 2, 3, 10]), lease_ms=LEASES, delay=DELAYS)
    def claim(self, name: str, node: str, most: int, lease_ms: int | None, delay: int) -> None:
        self.begin(delay)
        self.refill(name)
        self.take(name, node, most, lease_ms)

    def take(self, name: str, node: str, most: int, lease_ms: int | None) -> tuple[str, list[int]] | None:
        queue = self.world.queues[name]
        taken, poison, refusal = queue.plan(node, most, self.now)
        if poison:
            # It happens whatever comes of the claim.
            self.world.route(queue, poison, self.now)
        result: Claim | None = self.call(
            lambda: self.desk.claim_all(node, most, lease_ms, name), refusal if not taken else None
        )
        if result is None:
            return None
        found = [job_of(job) for job in result.jobs]
        assert [job.seq for job in found] == sorted(taken), f"{name}: {found}, expected {taken}"
        if not taken:
            assert result.lease_id is None
            return None
        assert result.lease_id is not None
        assert all(known[2] != result.lease_id for known in self.claims)
        deadline = self.now + queue.lease_ms(lease_ms)
        queue.lease(taken, result.lease_id, node, deadline)
        self.world.note(queue.config.syncs_leases)
        for job in found:
            own = queue.jobs[job.seq]
            assert (job.data, job.tag, job.ts) == (own.data, own.tag, own.ts)
            assert (job.lease_id, job.deadline, job.deliveries) == (own.lease, deadline, own.deliveries)
        assert result.lost == queue.lost
        assert (result.tombstone is not None) == (queue.lost > 0)
        assert result.ready == len(queue.views(self.now)["ready"])
        self.claims.append((name, node, result.lease_id, sorted(taken)))
        return result.lease_id, sorted(taken)

    @rule(name=NAMES, node=NODES, most=st.integers(1, 4), times=st.integers(1, 4), delay=st.sampled_from([0, 0, 700]))
    def fail(self, name: str, node: str, most: int, times: int, delay: int) -> None:
        """Claims and gives back, some times over, or lets the lease run out: so that jobs turn out to be poison."""
        self.begin(0)
        self.refill(name)
        for turn in range(times):
            got = self.take(name, node, most, None)
            if got is not None and turn != 2:
                self.settle_some("nack", name, Holder(lease_id=got[0]), delay)
                self.begin(delay)
            else:
                self.begin(self.world.queues[name].config.lease_ms)

    @rule(name=NAMES, node=NODES, most=st.integers(1, 4), keep=st.integers(0, 3))
    def work(self, name: str, node: str, most: int, keep: int) -> None:
        """Claims and acks at once, all but some of them."""
        self.begin(0)
        self.refill(name)
        got = self.take(name, node, most, None)
        if got is not None and got[1][keep:]:
            self.settle_some("ack", name, Holder(node=node, seqs=got[1][keep:]), None)

    # -- what holders do, and those who think they are -------------------------------------------------------------

    @rule(which=CLAIMS, delay=DELAYS)
    def ack(self, which: Which, delay: int) -> None:
        self.settle_claim("ack", which, None, delay)

    @rule(which=CLAIMS, pause=st.sampled_from([0, 0, 100, 3000]), delay=DELAYS)
    def nack(self, which: Which, pause: int, delay: int) -> None:
        self.settle_claim("nack", which, pause, delay)

    @rule(which=CLAIMS, lease_ms=st.sampled_from([None, 0, 100, 100, 3000]), delay=DELAYS)
    def extend(self, which: Which, lease_ms: int | None, delay: int) -> None:
        self.settle_claim("extend", which, lease_ms, delay)

    def settle_claim(self, verb: str, which: Which, amount: int | None, delay: int) -> None:
        """One of the claims that were ever made, fresh or stale, by its holder or by another, in part or doubled."""
        self.begin(delay)
        if not self.claims:
            return
        holding = [one for one in self.claims if self.world.queues[one[0]].held(None, None, None, one[2])[0]]
        claims = holding if which.is_held and holding else self.claims
        name, owner, lease, seqs = claims[which.pick % len(claims)]
        chosen = [seq for index, seq in enumerate(seqs) if which.subset >> index % 4 & 1 or not which.subset]
        chosen += which.extra
        if which.is_doubled:
            chosen = chosen + chosen[:1]
        if which.how == "node":
            holder = Holder(node=which.node or owner, seqs=chosen)
        elif which.how == "lease":
            holder = Holder(lease_id=lease)
        elif which.how == "lease and seqs":
            holder = Holder(lease_id=lease, seqs=chosen, node=which.node)
        else:
            other = self.claims[which.pick % len(self.claims)][2] if which.how == "wrong pairs" else lease
            pairs = [other if index % 2 else lease for index in range(len(chosen))]
            holder = Holder(node=which.node or owner, seqs=chosen, lease_ids=pairs)
        self.settle_some(verb, name, holder, amount)

    def settle_some(self, verb: str, name: str, holder: Holder, amount: int | None) -> None:
        queue = self.world.queues[name]
        done, skipped = queue.held(holder.node, holder.seqs, holder.lease_ids, holder.lease_id)
        jobs = self.desk.jobs
        if verb == "ack":
            result: Settled = self.desk.turn(lambda: jobs.ack(name, holder))
            queue.ack(done)
        elif verb == "nack":
            result = self.desk.turn(lambda: jobs.nack(name, holder, amount or 0))
            queue.nack(done, self.now + (amount or 0))
        else:
            result = self.desk.turn(lambda: jobs.extend(name, holder, amount))
            assert result.deadlines == queue.extend(done, self.now + queue.lease_ms(amount))
        assert (result.done, result.skipped) == (done, skipped), f"{verb} {holder}: {result}"
        views = queue.views(self.now)
        assert (result.ready, result.in_flight) == (len(views["ready"]), len(views["in_flight"]))
        if done:
            self.world.note(queue.config.syncs if verb == "ack" else queue.config.syncs_leases)

    @rule(name=st.sampled_from(["q", "q", "r"]), picks=st.lists(st.integers(0, 40), max_size=3), delay=DELAYS)
    def unblock(self, name: str, picks: list[int], delay: int) -> None:
        self.begin(delay)
        queue = self.world.queues[name]
        blocked = queue.views(self.now)["blocked"]
        seqs = list(dict.fromkeys([*(blocked[pick % len(blocked)] for pick in picks if blocked), *picks]))
        result = self.desk.unblock(*seqs, q=name)
        done = sorted(seq for seq in seqs if seq in blocked)
        queue.unblock(done)
        assert (result.done, result.skipped) == (done, [seq for seq in seqs if seq not in done])
        if done:
            self.world.note(queue.config.syncs)

    @rule(most=st.sampled_from([1, 2, 10]), to=st.sampled_from([None, None, None, "r"]), delay=DELAYS)
    def redrive(self, most: int, to: str | None, delay: int) -> None:
        self.begin(delay)
        before = self.world.copy()
        refusal, moved = None, (0, 0, 0)
        try:
            moved = self.world.redrive("dead", most, to, self.now)
        except Refused as refused:
            refusal = refused.code
            self.world.queues = before
        result = self.call(lambda: self.desk.redrive(most, to), refusal)
        if result is not None:
            assert (result.moved, result.unblocked, result.skipped) == moved, f"{result}, expected {moved}"
            if moved[0] or moved[1]:
                self.world.note(True)

    # -- time ------------------------------------------------------------------------------------------------------

    @rule(delay=st.sampled_from([99, 100, 500, 1000, 1501, 5000]), then=st.sampled_from(["", "sync", "checkpoint"]))
    def pass_time(self, delay: int, then: str) -> None:
        """And perhaps what happens in the background meanwhile."""
        self.begin(delay)
        if then == "sync":
            for pause in (0, 200):
                self.begin(pause)
                self.desk.log.engine.tick()
        elif then == "checkpoint":
            self.desk.log.checkpoint()
        if then:
            self.world.note(True)

    # -- restarts --------------------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["restart", "kill", "kill", "power", "power", "power"]),
        mode=st.sampled_from(MODES),
        seed=st.integers(0, 1 << 16),
        off=DELAYS,
    )
    def end(self, kind: str, mode: Mode, seed: int, off: int) -> None:
        """A clean stop, a `kill -9` or a power cut, and a start."""
        if kind == "restart":
            self.desk.log.close()
            self.world.note(True)
        elif kind == "kill":
            self.desk.disk = self.desk.disk.kill()
        else:
            self.desk.disk = self.desk.disk.power_cut(Random(seed), mode)
        self.reopen(kind, off)

    def reopen(self, kind: str, off: int) -> None:
        self.desk.clock.advance(off)
        self.desk.log = self.desk.open()
        keeping = {"restart": ("memory", "disk", "fsync"), "kill": ("disk", "fsync"), "power": ("fsync",)}[kind]
        certain = {queue.name for queue in self.world.queues.values() if queue.config.durability in keeping}
        self.world.note(False)
        failures: list[str] = []
        for past in reversed(self.world.past):
            found = {name: queue.copy() for name, queue in past.items()}
            try:
                if kind != "power":
                    # A kill takes no event of these, whatever it may take of others.
                    assert all(past[name] == self.world.queues[name] for name in certain)
                self.recover(found, certain)
            except AssertionError as failure:
                failures.append(str(failure))
                continue
            self.world.queues = found
            self.world.past.clear()
            self.world.note(True)
            return
        raise AssertionError(f"after a {kind} the queues are none of what they may be: {failures}")

    def recover(self, found: dict[str, Queue], certain: set[str]) -> None:
        assert [state.topic for state in self.desk.log.topics().topics] == sorted(found)
        for name, queue in found.items():
            state = self.desk.log.get(name)
            assert state.queue is not None
            head = self.world.queues[name].head
            assert state.head_seq >= head, f"{name}: {head} was given, {state.head_seq + 1} comes next"
            assert state.head_seq <= head + 2 * RESERVE
            if queue.config.durability == "ephemeral":
                fewest = queue.lost + len(queue.jobs)
                assert fewest <= state.queue.lost <= fewest + state.head_seq, f"{name}: {state.queue.lost} lost"
                queue.jobs = {}
                queue.head, queue.lost = state.head_seq, state.queue.lost
                queue.dead_lettered = state.queue.dead_lettered
            elif name not in certain:
                queue.settle(self.now)
                queue.crash(state.head_seq)
            queue.settle(self.now)
            self.check_queue(queue)

    # -- after every step ------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "desk"):
            return
        self.world.settle(self.now)
        for queue in self.world.queues.values():
            self.check_queue(queue)
        self.check_dead_letters()

    def check_queue(self, queue: Queue) -> None:
        desk, name, now = self.desk, queue.name, self.now
        state = desk.state(name)
        views = queue.views(now)
        got = (state.ready, state.in_flight, state.delayed, state.blocked)
        wanted = tuple(len(views[view]) for view in ("ready", "in_flight", "delayed", "blocked"))
        assert got == wanted, f"{name}: ready, in flight, delayed, blocked: {got}, expected {wanted}"
        assert sum(got) == len(queue.jobs) == desk.log.get(name).count
        assert (state.lost, state.dead_lettered) == (queue.lost, queue.dead_lettered), name
        floors = (queue.ack_floor(), queue.ack_holes())
        assert (state.ack_floor, state.ack_holes) == floors, f"{name}: {state}, expected {floors}"
        oldest = min((queue.jobs[seq].ts for seq in views["ready"]), default=None)
        assert state.oldest_ready_ts == oldest, name
        records = [(record["$seq"], record["data"], record["$ts"]) for record in desk.records(name)]
        assert records == [(seq, job.data, job.ts) for seq, job in sorted(queue.jobs.items())], name
        self.check_table(queue)

    def check_table(self, queue: Queue) -> None:
        inner = self.desk.log.engine.topic(queue.name).queue
        assert inner is not None
        for seq, job in sorted(queue.jobs.items()):
            real = inner.jobs.get(seq)
            if real is None:
                assert not job.deliveries, f"{queue.name}: {seq} was out {job.deliveries} times"
                continue
            got = (real.deliveries, real.lease, real.is_blocked, real.is_copied, real.limit)
            wanted = (job.deliveries, job.lease, job.is_blocked, job.is_copied, job.limit)
            assert got == wanted, f"{queue.name}: {seq} is {real}, not {job}"
            assert job.view(self.now) != "delayed" or real.not_before == job.not_before
            if job.lease:
                assert (real.node, real.deadline) == (job.node, job.deadline)
        listed = [(held.seq, held.state, held.lease_id, held.node) for held in self.desk.leases(queue.name)]
        views = {seq: job.view(self.now) for seq, job in sorted(queue.jobs.items())}
        expected = [
            (seq, view, queue.jobs[seq].lease or None, queue.jobs[seq].node or None)
            for seq, view in views.items()
            if view != "ready"
        ]
        assert listed == expected, f"{queue.name}: {listed}, expected {expected}"

    def check_dead_letters(self) -> None:
        """A dead letter says where it comes from, and lies there once."""
        records = self.desk.records("dead")
        origins = [
            (record["meta"]["$dead_letter_from"], record["meta"]["$dead_letter_src_seq"])
            for record in records
            if "meta" in record
        ]
        assert len(origins) == len(set(origins)), f"copied twice: {origins}"
        own = self.world.queues["dead"].jobs
        wanted = [(job.origin, str(job.source_seq)) for _, job in sorted(own.items()) if job.origin is not None]
        assert origins == wanted


# Passing takes much less; the rest is for Hypothesis to shrink what it finds.
TestQueueModel = pytest.mark.timeout(900)(QueueMachine.TestCase)
