"""Kills and power cuts in the middle of every verb: it is there whole or not at all, no job is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from tests.clocks import ManualClock
from tests.queues import LEASE, Desk
from tests.simdisk import MODES, PowerCut, SimDisk
from topics.core.limits import Limits
from topics.engine.jobs import Holder
from topics.engine.options import Options
from topics.engine.recovery import open_engine
from topics.engine.syncer import Done, InlineSyncer, Job

KILL = "kill"
ENDS = (*MODES, KILL)
OPTIONS = Options(checkpoint_bytes=1 << 30, cache_bytes=2048, reclaim_bytes=1 << 30)

Prepare = Callable[[Desk], None]


def done_with(*_: object) -> None:
    """What the verbs of a scenario answered is not what it is about."""


def crashes(prepare: Prepare, act: Prepare) -> Iterator[tuple[Desk, bool]]:
    """Desks in which `act` was cut short in its first, second, ... call to the disk, and one in which it was not."""
    for number in count(1):
        desk = Desk(options=OPTIONS)
        prepare(desk)
        desk.disk.crash_at = desk.disk.calls + number
        try:
            act(desk)
        except PowerCut:
            yield desk, False
            continue
        desk.disk.crash_at = None
        assert number > 1, "this verb does no I/O"
        yield desk, True
        return


def reborn(desk: Desk, end: str, seed: int = 0) -> Desk:
    """The same machine after one way for it to end; the desk itself can end in others."""
    again = Desk.__new__(Desk)
    again.disk = desk.disk.kill() if end == KILL else desk.disk.power_cut(Random(seed), end)  # type: ignore[arg-type]
    again.clock = ManualClock(desk.clock.now())
    again.limits, again.options = desk.limits, desk.options
    again.log = again.open()
    return again


def all_ends(prepare: Prepare, act: Prepare) -> Iterator[tuple[Desk, bool]]:
    for desk, done in crashes(prepare, act):
        for seed, end in enumerate(ENDS):
            found = reborn(desk, end, seed)
            for state in found.log.topics().topics:
                if state.type == "queue":
                    found.check(state.topic)
            yield found, done


def exists(desk: Desk, topic: str) -> bool:
    return topic in [state.topic for state in desk.log.topics().topics]


# -- one verb cut short, class fsync: what was answered stays, what was not is whole or not at all -------------------


def one_claimed(desk: Desk) -> None:
    desk.queue("q", "a", "b", "c", durability="fsync")
    desk.claim("w", most=2)


def test_a_claim_that_is_cut_short_is_a_delivery_or_is_not() -> None:
    def prepare(desk: Desk) -> None:
        desk.queue("q", "a", "b", "c", durability="fsync")

    for desk, done in all_ends(prepare, lambda desk: done_with(desk.claim("w", most=2))):
        counts = desk.counts()
        assert counts in ([(1, 2, 0, 0)] if done else [(1, 2, 0, 0), (3, 0, 0, 0)])
        desk.clock.advance(LEASE)
        deliveries = [job.deliveries for job in desk.claim("x", most=3)]
        assert deliveries == ([2, 2, 1] if counts[1] else [1, 1, 1])


def test_an_ack_that_is_cut_short_takes_all_of_its_jobs_or_none() -> None:
    for desk, done in all_ends(one_claimed, lambda desk: done_with(desk.ack(1, 2, node="w"))):
        data = desk.data("q")
        assert data in ([["c"]] if done else [["c"], ["a", "b", "c"]])
        assert desk.counts() == ((1, 0, 0, 0) if data == ["c"] else (1, 2, 0, 0))
        desk.clock.advance(LEASE)
        assert [job.data for job in desk.claim("x", most=5)] == data
        assert desk.state().lost == 0


def test_a_nack_that_is_cut_short_is_there_or_is_not() -> None:
    for desk, done in all_ends(one_claimed, lambda desk: done_with(desk.nack(1, node="w", delay_ms=5000))):
        assert desk.counts() in ([(1, 1, 1, 0)] if done else [(1, 1, 1, 0), (1, 2, 0, 0)])


def test_an_extend_that_is_cut_short_is_there_or_is_not() -> None:
    for desk, done in all_ends(one_claimed, lambda desk: done_with(desk.extend(1, node="w", lease_ms=9000))):
        start = desk.clock.now()
        deadlines = [held.deadline for held in desk.leases()]
        late, soon = [start + 9000, start + LEASE], [start + LEASE, start + LEASE]
        assert deadlines in ([late] if done else [late, soon])
        assert [held.deliveries for held in desk.leases()] == [1, 1]


def blocked(strategy: str) -> Prepare:
    def prepare(desk: Desk) -> None:
        desk.queue("q", "bad", "good", durability="fsync", max_deliveries=1, dead_letter="dead", dlq_strategy=strategy)
        desk.claim("w")
        desk.nack(1, node="w")

    return prepare


@pytest.mark.parametrize("exists_already", [False, True])
@pytest.mark.parametrize("strategy", ["skip", "block_and_dlq"])
def test_poison_that_is_cut_short_on_its_way_is_neither_lost_nor_doubled(strategy: str, exists_already: bool) -> None:
    def prepare(desk: Desk) -> None:
        if exists_already:
            desk.queue("dead", durability="fsync")
        blocked(strategy)(desk)

    for desk, done in all_ends(prepare, lambda desk: done_with(desk.claim("w"))):
        dead = desk.data("dead") if exists(desk, "dead") else []
        here = "bad" in desk.data("q")
        if strategy == "skip":
            assert here + len(dead) == 1
        else:
            assert here
            assert len(dead) <= 1
            assert bool(desk.state().blocked) >= bool(dead)
        assert len(dead) == desk.state().dead_lettered
        if done:
            assert dead == ["bad"]
        desk.claim("x", most=5)
        assert desk.data("dead") == ["bad"]
        assert ("bad" in desk.data("q")) == (strategy != "skip")
        assert desk.state().dead_lettered == 1
        assert desk.state().lost == 0
        if exists_already:
            assert desk.state("dead").lost == 0


def routed(strategy: str) -> Prepare:
    def prepare(desk: Desk) -> None:
        desk.queue("dead", durability="fsync")
        blocked(strategy)(desk)
        desk.claim("w")

    return prepare


def test_a_redrive_that_is_cut_short_is_neither_lost_nor_doubled() -> None:
    for desk, done in all_ends(routed("skip"), lambda desk: done_with(desk.redrive())):
        found = desk.data("dead"), "bad" in desk.data("q")
        assert found in ([([], True)] if done else [([], True), (["bad"], False)])
        desk.redrive()
        assert (desk.data("dead"), desk.data("q").count("bad")) == ([], 1)
        assert (desk.state().lost, desk.state("dead").lost) == (0, 0)


def test_a_redrive_to_a_blocked_original_that_is_cut_short_is_there_or_is_not() -> None:
    for desk, done in all_ends(routed("block_and_dlq"), lambda desk: done_with(desk.redrive())):
        found = desk.data("dead"), desk.state().blocked
        assert found in ([([], 0)] if done else [([], 0), (["bad"], 1)])
        assert desk.data("q").count("bad") == 1


def test_an_unblock_that_is_cut_short_is_there_or_is_not() -> None:
    for desk, done in all_ends(routed("block"), lambda desk: done_with(desk.unblock(1))):
        assert desk.state().blocked in ([0] if done else [0, 1])
        if not desk.state().blocked:
            desk.clock.advance(LEASE)
            assert 1 in desk.seqs("x", most=5)


@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_after_any_crash_every_job_is_there_acked_or_told_as_lost(durability: str) -> None:
    """Of the classes that may lose a tail: an acked job may come back, a job may be lost, but not in silence."""

    def prepare(desk: Desk) -> None:
        desk.queue("q", "a", durability=durability)
        desk.log.checkpoint()
        desk.write("b")
        desk.claim("w", most=2)

    for desk, _ in all_ends(prepare, lambda desk: done_with(desk.write("c"), desk.ack(1, 2, node="w"))):
        alive = [record["$seq"] for record in desk.records("q")]
        state = desk.state()
        told = desk.claim_all("x").tombstone
        for seq in (1, 2, 3):
            is_told = told is not None and told.gap_from <= seq <= told.gap_to
            acked_at_last = seq < 3 and 1 not in alive
            assert seq in alive or is_told or acked_at_last or desk.log.get("q").head_seq < seq
        if told is not None:
            assert state.lost == told.gap_to - told.gap_from + 1


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("leases_durable", [None, False, True])
def test_what_a_power_cut_does_to_leases_is_what_leases_durable_says(end: str, leases_durable: bool | None) -> None:
    desk = Desk(options=OPTIONS)
    desk.queue("q", "a", durability="fsync", leases_durable=leases_durable)
    desk.claim("w")
    again = reborn(desk, end)
    kept = end == KILL or leases_durable is not False
    assert again.counts() in ([(0, 1, 0, 0)] if kept else [(0, 1, 0, 0), (1, 0, 0, 0)])
    if end == "drop" and leases_durable is False:
        assert again.counts() == (1, 0, 0, 0)


@pytest.mark.parametrize("leases_durable", [None, False, True])
def test_an_ack_of_class_fsync_survives_a_power_cut_whatever_leases_durable_says(leases_durable: bool | None) -> None:
    desk = Desk(options=OPTIONS)
    desk.queue("q", "a", "b", durability="fsync", leases_durable=leases_durable)
    desk.claim("w")
    desk.ack(1, node="w")
    again = reborn(desk, "drop")
    assert again.data("q") == ["b"]
    assert again.seqs("x", most=5) == [2]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def rich(desk: Desk) -> None:
    """A queue with something of everything."""
    desk.queue("dead", durability="fsync")
    desk.queue("q", durability="fsync", max_deliveries=2, dead_letter="dead", dlq_strategy="block_and_dlq")
    desk.log.append("q", [{"data": n, "tag": f"t{n}"} for n in range(12)])
    desk.claim("w", most=6)
    desk.ack(2, 4, node="w")
    desk.nack(1, node="w", delay_ms=5000)
    desk.nack(3, node="w")
    desk.claim("v")
    desk.nack(3, node="v")
    desk.claim("v")
    desk.log.delete("q", match="t8")
    desk.extend(5, node="w", lease_ms=7000)
    desk.log.append("q", [{"hole": 2, "reason": "source_trim"}])


def seen(desk: Desk) -> tuple[Any, ...]:
    topics = [name for name in ("q", "dead") if exists(desk, name)]
    return tuple((desk.state(name), desk.leases(name), desk.data(name)) for name in topics)


def test_a_checkpoint_that_is_cut_short_changes_nothing() -> None:
    for desk, _ in crashes(rich, lambda desk: desk.log.checkpoint()):
        fresh = Desk(options=OPTIONS)
        rich(fresh)
        wanted = [
            (state, [(h.seq, h.state, h.node, h.deadline, h.deliveries) for h in leases], data)
            for state, leases, data in seen(fresh)
        ]
        for seed, end in enumerate(ENDS):
            again = reborn(desk, end, seed)
            found = [
                (state, [(h.seq, h.state, h.node, h.deadline, h.deliveries) for h in leases], data)
                for state, leases, data in seen(again)
            ]
            assert found == wanted, end


@pytest.mark.parametrize("end", ENDS)
def test_recovering_twice_is_recovering_once(end: str) -> None:
    desk = Desk(options=OPTIONS)
    rich(desk)
    once = reborn(desk, end)
    before = seen(once)
    for _ in range(3):
        once = reborn(once, KILL)
        assert seen(once) == before


@pytest.mark.parametrize("verb", ["claim", "ack", "nack", "extend", "unblock", "redrive"])
def test_a_table_from_a_checkpoint_goes_on_as_the_one_it_was_taken_from(verb: str) -> None:
    """The same verb after a restart from a checkpoint, from the log, and without one."""
    outcomes = []
    for way in ("none", "checkpoint", "log"):
        desk = Desk(options=OPTIONS)
        rich(desk)
        if way == "checkpoint":
            desk.restart("close")
        elif way == "log":
            desk.restart("kill")
        if verb == "claim":
            desk.claim("x", most=3)
        elif verb == "unblock":
            desk.unblock(3)
        elif verb == "redrive":
            desk.redrive()
        else:
            getattr(desk, verb)(5, 6, node="w")
        desk.check()
        leases = [(held.seq, held.state, held.node, held.deadline, held.deliveries) for held in desk.leases()]
        outcomes.append((desk.state(), leases, desk.data("q"), desk.data("dead")))
    assert outcomes[0] == outcomes[1] == outcomes[2]


# -- a checkpoint between an event and its sync ----------------------------------------------------------------------


class LateSyncer(InlineSyncer):
    """Syncs that come only when a test lets them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Job, Done]] = []
        self.is_held = False

    def submit(self, job: Job, done: Done) -> None:
        if self.is_held:
            self.waiting.append((job, done))
        else:
            super().submit(job, done)

    def drain(self) -> None:
        waiting, self.waiting = self.waiting, []
        for job, done in waiting:
            super().submit(job, done)


class SlowDesk(Desk):
    """A desk whose log syncs late while its checkpoints go on."""

    def __init__(self) -> None:
        self.disk, self.clock, self.limits, self.options = SimDisk(), ManualClock(), Limits(), OPTIONS
        self.log = self.open()
        self.log.engine.close()
        self.syncer = LateSyncer()
        self.log.engine = open_engine(self.disk, self.clock, self.limits, self.options, self.syncer, InlineSyncer())

    def checkpoint_behind(self, stage: Callable[[], object]) -> None:
        """Begins a checkpoint, stages something whose sync does not come, and ends the checkpoint."""
        checkpointer = self.log.engine.checkpointer
        checkpointer._start(clean=False)
        checkpointer.step()
        self.syncer.is_held = True
        stage()
        self.log.engine.flush()
        # It may also wait for the log: then it does not end.
        for _ in range(50):
            if checkpointer.is_running and not checkpointer._waiting:
                checkpointer.step()


@pytest.mark.parametrize("end", ["drop", "torn"])
def test_an_ack_that_a_checkpoint_has_seen_and_the_log_has_lost_loses_no_job(end: str) -> None:
    desk = SlowDesk()
    desk.queue("q", "a", "b", durability="fsync")
    desk.claim("w")
    desk.checkpoint_behind(lambda: desk.jobs.ack("q", Holder(node="w", seqs=[1])))
    again = reborn(desk, end)
    again.check()
    again.clock.advance(LEASE)
    assert [job.data for job in again.claim("x", most=5)] == again.data("q")


@pytest.mark.parametrize("strategy", ["skip", "block_and_dlq"])
def test_poison_that_a_checkpoint_has_seen_leave_and_the_log_has_lost_is_still_somewhere(strategy: str) -> None:
    desk = SlowDesk()
    blocked(strategy)(desk)
    desk.checkpoint_behind(lambda: desk.jobs.claim("q", "w"))
    again = reborn(desk, "drop")
    again.check()
    again.claim("x", most=5)
    assert again.data("dead") == ["bad"]
    assert ("bad" in again.data("q")) == (strategy != "skip")


def test_a_redrive_that_a_checkpoint_has_seen_and_the_log_has_lost_loses_no_job() -> None:
    desk = SlowDesk()
    routed("skip")(desk)
    desk.checkpoint_behind(lambda: desk.jobs.redrive("dead", 10))
    again = reborn(desk, "drop")
    again.check("dead")
    again.redrive()
    assert again.data("q").count("bad") + again.data("dead").count("bad") == 1
    assert "bad" in again.data("q")
