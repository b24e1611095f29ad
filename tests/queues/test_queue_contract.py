"""Section 9, sentence by sentence, through the embedded engine."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.helpers import KEEPING, Ending
from tests.queues import LEASE, Desk
from tests.queues import job_of as decoded
from topics.core.errors import (
    AckHoleCapExceeded,
    IdempotencyConflict,
    InFlightCapExceeded,
    InvalidRequest,
    NotAQueue,
    ReadOnly,
    TopicExistsIncompatible,
    TopicFull,
    TopicNotFound,
    TopicsError,
)
from topics.core.limits import Limits
from topics.core.records import decode_write, encode_write
from topics.engine.jobs import Holder
from topics.engine.options import Options


@pytest.fixture
def desk() -> Desk:
    return Desk()


# -- claim -----------------------------------------------------------------------------------------------------------


def test_a_claim_gives_the_oldest_job_and_one_by_default(desk: Desk) -> None:
    desk.queue("q", "first", "second")
    assert [(job.seq, job.data) for job in desk.claim()] == [(1, "first")]


def test_a_claim_gives_up_to_max_jobs_ascending(desk: Desk) -> None:
    desk.queue("q", *range(5))
    assert desk.seqs(most=3) == [1, 2, 3]
    assert desk.seqs(most=3) == [4, 5]


def test_a_claim_shows_a_job_as_a_read_shows_a_record(desk: Desk) -> None:
    desk.queue("q")
    desk.log.append("q", [{"data": {"a": 1.5}, "tag": "t", "node": "maker", "meta": {"k": "v"}}])
    (job,) = desk.claim()
    assert (job.data, job.tag, job.node, job.meta) == ({"a": 1.5}, "t", "maker", {"k": "v"})
    assert job.ts == desk.clock.now()


def test_a_claim_gives_data_byte_for_byte(desk: Desk) -> None:
    desk.queue("q")
    desk.log.append_json("q", b'{"records":[{"data":{ "b":1.0, "a" : 1e400,"a":"\\u00e9"}}]}')
    assert b'"data":{ "b":1.0, "a" : 1e400,"a":"\\u00e9"}' in desk.claim_all().jobs[0]


def test_a_claim_leaves_out_what_a_job_does_not_have(desk: Desk) -> None:
    desk.queue("q", 1)
    rendered = desk.claim_all().jobs[0]
    assert b"$tag" not in rendered
    assert b"$node" not in rendered
    assert b"meta" not in rendered


def test_a_whole_claim_has_one_lease_id(desk: Desk) -> None:
    desk.queue("q", *range(3))
    claim = desk.claim_all(most=3)
    assert claim.lease_id is not None
    assert claim.lease_id.startswith("lease_")
    assert {decoded(job).lease_id for job in claim.jobs} == {claim.lease_id}


def test_two_claims_have_two_lease_ids(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    assert desk.claim_all().lease_id != desk.claim_all().lease_id


def test_a_claim_of_nothing_has_no_lease_and_is_no_event(desk: Desk) -> None:
    desk.queue("q")
    before = desk.disk_bytes
    claim = desk.claim_all()
    assert (claim.jobs, claim.lease_id, claim.ready, claim.lost, claim.tombstone) == ([], None, 0, 0, None)
    assert desk.disk_bytes == before


def test_a_claim_says_what_is_left(desk: Desk) -> None:
    desk.queue("q", *range(5))
    assert desk.claim_all(most=2).ready == 3


def test_a_claimed_job_is_nobody_elses(desk: Desk) -> None:
    desk.queue("q", 1)
    assert desk.seqs("a") == [1]
    assert desk.seqs("b") == []
    assert desk.seqs("a") == []


def test_a_deadline_is_the_queues_lease_ms_ahead(desk: Desk) -> None:
    desk.queue("q", 1, lease_ms=700)
    assert desk.claim()[0].deadline == desk.clock.now() + 700


def test_a_claims_own_lease_ms_wins(desk: Desk) -> None:
    desk.queue("q", 1, lease_ms=700)
    assert desk.claim(lease_ms=250)[0].deadline == desk.clock.now() + 250


@pytest.mark.parametrize(("asked", "given"), [(1, 100), (100_000_000, 86_400_000)])
def test_a_lease_is_clamped_as_the_configuration_is(desk: Desk, asked: int, given: int) -> None:
    desk.queue("q", 1)
    assert desk.claim(lease_ms=asked)[0].deadline == desk.clock.now() + given


@pytest.mark.parametrize("node", ["", None, 7])
def test_a_claim_needs_a_node(desk: Desk, node: Any) -> None:
    desk.queue("q", 1)
    with pytest.raises(InvalidRequest, match="node"):
        desk.claim(node)
    assert desk.counts() == (1, 0, 0, 0)


@pytest.mark.parametrize("most", [0, -1])
def test_a_claim_takes_at_least_one(desk: Desk, most: int) -> None:
    desk.queue("q", 1)
    with pytest.raises(InvalidRequest, match="max"):
        desk.claim(most=most)


def test_a_claim_gives_no_more_than_the_limit() -> None:
    desk = Desk(Limits(max_claim=2))
    desk.queue("q", 1, 2, 3)
    assert desk.seqs(most=1000) == [1, 2]


def test_a_queue_is_read_like_any_topic_while_its_jobs_are_out(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim()
    assert desk.data("q") == [1, 2]


def test_a_claim_of_jobs_that_are_sealed_reads_them_from_the_disk(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.log.checkpoint()
    desk.restart()
    assert [job.data for job in desk.claim(most=2)] == [1, 2]


# -- what was lost ---------------------------------------------------------------------------------------------------


def test_a_claim_tells_what_the_cap_took(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3, cap_records=2)
    claim = desk.claim_all()
    assert claim.lost == 1
    assert claim.tombstone is not None
    assert (claim.tombstone.gap_from, claim.tombstone.gap_to, claim.tombstone.reason) == (1, 1, "cap")


def test_a_claim_tells_what_the_ttl_took(desk: Desk) -> None:
    desk.queue("q", 1, 2, ttl_ms=500)
    desk.clock.advance(501)
    claim = desk.claim_all()
    assert (claim.jobs, claim.lost) == ([], 2)
    assert claim.tombstone is not None
    assert (claim.tombstone.gap_from, claim.tombstone.gap_to, claim.tombstone.reason) == (1, 2, "ttl")


def test_a_claim_tells_the_latest_loss(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3, cap_records=2)
    desk.write(4)
    claim = desk.claim_all()
    assert claim.lost == 2
    assert claim.tombstone is not None
    assert (claim.tombstone.gap_from, claim.tombstone.gap_to) == (2, 2)


def test_jobs_that_are_out_are_lost_too(desk: Desk) -> None:
    desk.queue("q", 1, 2, cap_records=2)
    desk.claim(most=2)
    desk.write(3)
    assert desk.state().lost == 1
    assert desk.counts() == (1, 1, 0, 0)
    assert desk.ack(1, 2).done == [2]


def test_what_was_acked_or_deleted_before_its_time_is_not_lost(desk: Desk) -> None:
    desk.queue("q", ttl_ms=500)
    desk.log.append("q", [{"data": 1}, {"data": 2, "tag": "x"}, {"data": 3}])
    desk.claim()
    desk.ack(1)
    desk.log.delete("q", match="x")
    desk.clock.advance(501)
    assert desk.claim_all().lost == 1


def test_a_hole_written_into_a_queue_is_told_as_lost(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.log.append("q", [{"hole": 3, "reason": "source_trim"}])
    claim = desk.claim_all()
    assert claim.lost == 3
    assert claim.tombstone is not None
    assert (claim.tombstone.gap_from, claim.tombstone.gap_to, claim.tombstone.reason) == (2, 4, "source_trim")


@pytest.mark.parametrize("ending", ["close", "kill", "power"])
def test_the_jobs_that_an_ephemeral_queue_held_are_told_as_lost_after_a_restart(desk: Desk, ending: Ending) -> None:
    desk.queue("q", 1, 2, 3, durability="ephemeral")
    desk.restart(ending)
    claim = desk.claim_all()
    assert claim.jobs == []
    assert claim.lost >= 3
    assert claim.tombstone is not None
    assert claim.tombstone.reason == "restart"
    assert claim.tombstone.gap_from <= 1
    assert claim.tombstone.gap_to >= 3


def test_a_job_that_was_acked_in_an_ephemeral_queue_is_not_lost_by_a_restart(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3, durability="ephemeral")
    desk.claim(most=2)
    desk.ack(2)
    desk.restart()
    assert desk.state().lost == 2


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_what_was_lost_is_not_counted_again_by_a_restart(desk: Desk, ending: Ending) -> None:
    desk.queue("q", 1, 2, 3, 4, cap_records=2)
    for _ in range(3):
        desk.restart(ending)
        assert desk.state().lost == 2


def test_a_power_cut_that_took_jobs_of_class_disk_is_told(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.log.engine.tick()
    desk.log.checkpoint()
    desk.write(2)
    desk.restart("power")
    claim = desk.claim_all(most=10)
    assert [decoded(job).seq for job in claim.jobs] == [1]
    assert claim.lost >= 1
    assert claim.tombstone is not None
    assert claim.tombstone.gap_from == 2
    assert claim.tombstone.reason == "crash"


# -- ack -------------------------------------------------------------------------------------------------------------


def test_an_ack_deletes_the_job(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim()
    done = desk.ack(1)
    assert (done.done, done.skipped, done.ready, done.in_flight) == ([1], [], 1, 0)
    assert desk.data("q") == [2]
    assert desk.log.get("q").earliest_seq == 2


def test_an_acked_job_reads_silently(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim()
    desk.ack(1)
    diff = desk.log.diff("q")
    assert diff.tombstone is None
    assert desk.log.get("q").evict_floor == 1


def test_an_ack_can_be_repeated(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.ack(1)
    again = desk.ack(1)
    assert (again.done, again.skipped) == ([], [1])


def test_a_seq_that_is_named_twice_is_acked_once(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    done = desk.ack(1, 1)
    assert (done.done, done.skipped) == ([1], [1])


def test_an_ack_of_what_was_never_claimed_is_skipped(desk: Desk) -> None:
    desk.queue("q", 1)
    done = desk.ack(1, 99)
    assert (done.done, done.skipped) == ([], [1, 99])
    assert desk.counts() == (1, 0, 0, 0)


def test_an_ack_by_another_node_is_skipped(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim("a")
    assert desk.ack(1, node="b").skipped == [1]
    assert desk.counts() == (0, 1, 0, 0)


def test_an_ack_with_another_lease_id_is_skipped(desk: Desk) -> None:
    desk.queue("q", 1)
    (old,) = desk.claim("a")
    desk.clock.advance(LEASE)
    (new,) = desk.claim("a")
    assert desk.ack(1, lease_ids=[old.lease_id]).skipped == [1]
    assert desk.ack(1, lease_ids=[new.lease_id]).done == [1]


def test_lease_ids_pair_with_seqs(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    first, second = desk.claim()[0].lease_id, desk.claim()[0].lease_id
    assert desk.ack(1, 2, lease_ids=[second, first]).skipped == [1, 2]
    assert desk.ack(1, 2, lease_ids=[first, second]).done == [1, 2]


def test_lease_ids_that_do_not_pair_are_refused(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    lease = desk.claim(most=2)[0].lease_id
    with pytest.raises(InvalidRequest, match="lease_ids"):
        desk.ack(1, 2, lease_ids=[lease])
    assert desk.counts() == (0, 2, 0, 0)


def test_an_ack_by_lease_without_seqs_is_for_all_that_it_still_holds(desk: Desk) -> None:
    desk.queue("q", *range(4))
    lease = desk.claim(most=3)[0].lease_id
    desk.ack(2)
    assert desk.ack(lease_id=lease).done == [1, 3]
    assert desk.counts() == (1, 0, 0, 0)


def test_an_ack_by_lease_can_name_some_of_its_seqs(desk: Desk) -> None:
    desk.queue("q", *range(4))
    lease = desk.claim(most=2)[0].lease_id
    done = desk.ack(2, 3, lease_id=lease)
    assert (done.done, done.skipped) == ([2], [3])


def test_an_ack_by_a_lease_that_is_unknown_does_nothing(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    assert desk.ack(lease_id="lease_none").done == []
    assert desk.ack(1, lease_id="lease_none").skipped == [1]


@pytest.mark.parametrize(
    "who",
    [
        Holder(),
        Holder(node="a"),
        Holder(seqs=[1]),
        Holder(node="", seqs=[1]),
        Holder(node="a", seqs=[-1]),
        Holder(lease_id="lease_1", lease_ids=["lease_1"], seqs=[1]),
    ],
)
def test_an_ack_says_whose_and_which(desk: Desk, who: Holder) -> None:
    desk.queue("q", 1)
    desk.claim()
    with pytest.raises(InvalidRequest):
        desk.turn(lambda: desk.jobs.ack("q", who))
    assert desk.counts() == (0, 1, 0, 0)


def test_an_ack_of_an_evicted_job_is_skipped(desk: Desk) -> None:
    desk.queue("q", 1, cap_records=1)
    desk.claim()
    desk.write(2)
    assert desk.ack(1).skipped == [1]


def test_an_ack_of_a_deleted_job_is_skipped(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim(most=2)
    desk.log.delete("q", before_seq=2)
    done = desk.ack(1, 2)
    assert (done.done, done.skipped) == ([2], [1])


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_whole_ack_request_is_one_event_and_at_most_one_sync(desk: Desk, durability: str) -> None:
    desk.queue("q", *range(500), durability=durability)
    desk.claim(most=500)
    before = desk.syncs
    written = desk.log.engine.committer.wal.bytes_written
    desk.ack(*range(1, 501, 2))
    assert desk.syncs - before == (1 if durability == "fsync" else 0)
    assert desk.log.engine.committer.wal.bytes_written - written < 2000


def test_acks_of_separate_requests_in_one_turn_share_a_sync(desk: Desk) -> None:
    desk.queue("q", *range(10), durability="fsync")
    desk.claim(most=10)
    before = desk.syncs
    commits = [desk.jobs.ack("q", Holder(node="a", seqs=[seq])) for seq in range(1, 11)]
    assert not any(commit.done for commit in commits)
    desk.log.engine.flush()
    assert [commit.value().done for commit in commits] == [[seq] for seq in range(1, 11)]
    assert desk.syncs - before == 1


def test_acks_of_several_queues_in_one_turn_share_a_sync(desk: Desk) -> None:
    for name in ("q", "r"):
        desk.queue(name, 1, durability="fsync")
        desk.claim(q=name)
    before = desk.syncs
    commits = [desk.jobs.ack(name, Holder(node="a", seqs=[1])) for name in ("q", "r")]
    desk.log.engine.flush()
    assert [commit.value().done for commit in commits] == [[1], [1]]
    assert desk.syncs - before == 1


def test_an_ack_that_skips_everything_writes_nothing(desk: Desk) -> None:
    desk.queue("q", 1, durability="fsync")
    before = desk.syncs, desk.disk_bytes
    desk.ack(1)
    assert (desk.syncs, desk.disk_bytes) == before


def test_two_acks_of_one_job_in_one_turn_ack_it_once(desk: Desk) -> None:
    desk.queue("q", 1, durability="fsync")
    desk.claim()
    first = desk.jobs.ack("q", Holder(node="a", seqs=[1]))
    second = desk.jobs.ack("q", Holder(node="a", seqs=[1]))
    desk.log.engine.flush()
    assert (first.value().done, second.value().done) == ([1], [])
    assert second.value().skipped == [1]


def test_a_job_is_not_claimed_twice_in_one_turn(desk: Desk) -> None:
    desk.queue("q", 1, durability="fsync")
    first, second = desk.jobs.claim("q", "a"), desk.jobs.claim("q", "b")
    desk.log.engine.flush()
    assert len(first.value().jobs) == 1
    assert len(second.value().jobs) == 0


def test_an_ack_whose_sync_failed_leaves_every_live_job_counted(desk: Desk) -> None:
    desk.queue("q", 1, 2, durability="fsync")
    desk.claim()
    desk.disk.fail("sync", "wal", errno.EIO)
    with pytest.raises(ReadOnly):
        desk.ack(1)
    state = desk.log.get("q").queue
    assert state is not None
    assert state.ready + state.in_flight + state.delayed + state.blocked == desk.log.get("q").count == 2


# -- nack ------------------------------------------------------------------------------------------------------------


def test_a_nacked_job_can_be_had_at_once(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim("a")
    done = desk.nack(1)
    assert (done.done, done.skipped, done.ready, done.in_flight) == ([1], [], 1, 0)
    assert [(job.seq, job.deliveries) for job in desk.claim("b")] == [(1, 2)]


def test_a_delayed_nack_holds_a_job_back(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.nack(1, delay_ms=5000)
    assert desk.counts() == (0, 0, 1, 0)
    desk.clock.advance(4999)
    assert desk.seqs() == []
    desk.clock.advance(1)
    assert desk.seqs() == [1]


def test_a_nack_of_what_is_not_held_is_skipped(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim("b")
    done = desk.nack(1, 2, 3, node="a")
    assert (done.done, done.skipped) == ([], [1, 2, 3])
    assert desk.counts() == (1, 1, 0, 0)


def test_after_a_nack_the_lease_is_over(desk: Desk) -> None:
    desk.queue("q", 1)
    lease = desk.claim()[0].lease_id
    desk.nack(1)
    assert desk.ack(1).skipped == [1]
    assert desk.ack(lease_id=lease).done == []
    assert desk.extend(lease_id=lease).done == []


def test_a_nack_by_lease_gives_all_of_it_back(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3)
    lease = desk.claim(most=3)[0].lease_id
    assert desk.nack(lease_id=lease).done == [1, 2, 3]
    assert desk.counts() == (3, 0, 0, 0)


def test_a_nack_is_no_delivery(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.nack(1, delay_ms=1000)
    assert [lease.deliveries for lease in desk.leases()] == [1]


def test_a_negative_delay_is_refused(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    with pytest.raises(InvalidRequest, match="delay_ms"):
        desk.nack(1, delay_ms=-1)
    assert desk.counts() == (0, 1, 0, 0)


# -- extend ----------------------------------------------------------------------------------------------------------


def test_an_extend_moves_the_deadline(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.clock.advance(600)
    done = desk.extend(1, lease_ms=900)
    assert done.done == [1]
    assert done.deadlines == {1: desk.clock.now() + 900}
    desk.clock.advance(899)
    assert desk.seqs("b") == []
    desk.clock.advance(1)
    assert desk.seqs("b") == [1]


def test_an_extend_without_lease_ms_takes_the_queues(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.clock.advance(10)
    assert desk.extend(1).deadlines == {1: desk.clock.now() + LEASE}


def test_an_extend_never_shortens(desk: Desk) -> None:
    desk.queue("q", 1)
    deadline = desk.claim(lease_ms=5000)[0].deadline
    assert desk.extend(1, lease_ms=200).deadlines == {1: deadline}
    desk.clock.advance(4999)
    assert desk.seqs("b") == []


def test_an_extend_is_no_delivery(desk: Desk) -> None:
    desk.queue("q", 1)
    lease = desk.claim()[0].lease_id
    for _ in range(5):
        desk.extend(1)
    assert [(held.lease_id, held.deliveries) for held in desk.leases()] == [(lease, 1)]


def test_an_extend_of_what_is_not_held_is_skipped(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim("a")
    done = desk.extend(1, 2, node="b")
    assert (done.done, done.skipped, done.deadlines) == ([], [1, 2], {})


def test_an_extend_by_lease_is_for_all_of_it(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    lease = desk.claim(most=2)[0].lease_id
    desk.clock.advance(1)
    moment = desk.clock.now() + LEASE
    assert desk.extend(lease_id=lease).deadlines == {1: moment, 2: moment}


# -- expiry ----------------------------------------------------------------------------------------------------------


def test_past_its_deadline_a_job_counts_as_ready(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.clock.advance(LEASE - 1)
    assert desk.counts() == (0, 1, 0, 0)
    desk.clock.advance(1)
    assert desk.counts() == (1, 0, 0, 0)


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_past_its_deadline_the_holder_may_still_act_until_a_claim_took_the_job(desk: Desk, verb: str) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.clock.advance(LEASE * 10)
    assert getattr(desk, verb)(1).done == [1]


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_once_another_has_claimed_the_job_the_old_holder_may_not(desk: Desk, verb: str) -> None:
    desk.queue("q", 1)
    desk.claim("a")
    desk.clock.advance(LEASE)
    assert desk.seqs("b") == [1]
    assert getattr(desk, verb)(1, node="a").skipped == [1]
    assert desk.ack(1, node="b").done == [1]


def test_an_extend_past_the_deadline_makes_the_job_held_again(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim("a")
    desk.clock.advance(LEASE)
    assert desk.counts() == (1, 0, 0, 0)
    desk.extend(1)
    assert desk.counts() == (0, 1, 0, 0)
    assert desk.seqs("b") == []


def test_a_job_that_is_given_back_past_its_deadline_is_claimed_once(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim()
    desk.clock.advance(LEASE)
    assert desk.counts() == (2, 0, 0, 0)
    desk.nack(1)
    assert desk.counts() == (2, 0, 0, 0)
    assert [(job.seq, job.deliveries) for job in desk.claim(most=5)] == [(1, 2), (2, 1)]


def test_a_job_that_expired_twice_is_claimed_once(desk: Desk) -> None:
    desk.queue("q", 1, 2)
    desk.claim()
    for _ in range(3):
        desk.clock.advance(LEASE)
        assert desk.counts() == (2, 0, 0, 0)
        desk.extend(1)
    desk.clock.advance(LEASE)
    assert [(job.seq, job.deliveries) for job in desk.claim(most=5)] == [(1, 2), (2, 1)]


def test_a_dead_letter_that_was_given_back_past_its_deadline_is_redriven_once(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    desk.claim(lease_ms=LEASE, q="dead")
    desk.clock.advance(LEASE)
    assert desk.counts("dead") == (1, 0, 0, 0)
    desk.nack(1, q="dead")
    assert desk.redrive().moved == 1
    assert desk.data("q") == [{"n": 1}]


def test_an_expiry_is_the_next_leases_delivery(desk: Desk) -> None:
    desk.queue("q", 1)
    for delivery in (1, 2, 3):
        assert [job.deliveries for job in desk.claim()] == [delivery]
        desk.clock.advance(LEASE)


def test_reclaimed_jobs_go_out_before_fresh_ones(desk: Desk) -> None:
    desk.queue("q", *range(5))
    desk.claim("a", most=2)
    desk.clock.advance(LEASE)
    assert desk.seqs("b") == [1]
    assert desk.seqs("b", most=3) == [2, 3, 4]


def test_nacked_jobs_go_out_before_fresh_ones(desk: Desk) -> None:
    desk.queue("q", *range(5))
    desk.claim("a", most=3)
    desk.nack(2)
    assert desk.seqs("b", most=2) == [2, 4]


def test_a_clock_that_steps_back_expires_nothing_twice(desk: Desk) -> None:
    desk.queue("q", 1)
    desk.claim("a")
    desk.clock.advance(LEASE)
    assert desk.seqs("b") == [1]
    desk.clock.advance(-10 * LEASE)
    assert desk.seqs("c") == []
    assert desk.ack(1, node="b").done == [1]


# -- deliveries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("ending", KEEPING)
def test_deliveries_are_exact_across_a_restart(desk: Desk, ending: Ending, durability: str) -> None:
    desk.queue("q", 1, durability=durability)
    for delivery in range(1, 7):
        assert [job.deliveries for job in desk.claim()] == [delivery]
        if delivery % 2:
            desk.nack(1)
        else:
            desk.extend(1)
            desk.clock.advance(LEASE)
        if delivery == 3:
            desk.log.checkpoint()
        desk.restart(ending)


def test_deliveries_of_class_fsync_are_exact_across_a_power_cut(desk: Desk) -> None:
    desk.queue("q", 1, durability="fsync")
    for delivery in range(1, 4):
        assert [job.deliveries for job in desk.claim()] == [delivery]
        desk.clock.advance(LEASE)
        desk.restart("power")


@pytest.mark.parametrize("ending", KEEPING)
def test_a_lease_survives_a_restart(desk: Desk, ending: Ending) -> None:
    desk.queue("q", 1)
    lease = desk.claim("a")[0].lease_id
    desk.restart(ending)
    assert desk.seqs("b") == []
    assert desk.ack(1, lease_ids=[lease]).done == [1]


@pytest.mark.parametrize("ending", KEEPING)
def test_a_delay_survives_a_restart(desk: Desk, ending: Ending) -> None:
    desk.queue("q", 1)
    desk.claim()
    desk.nack(1, delay_ms=5000)
    desk.restart(ending)
    assert desk.counts() == (0, 0, 1, 0)
    desk.clock.advance(5000)
    assert desk.seqs() == [1]


@pytest.mark.parametrize(
    ("durability", "leases_durable", "syncs"),
    [
        ("disk", None, 0),
        ("disk", False, 0),
        ("disk", True, 1),
        ("fsync", None, 1),
        ("fsync", False, 0),
        ("fsync", True, 1),
        ("memory", True, 1),
    ],
)
@pytest.mark.parametrize("verb", ["claim", "nack", "extend"])
def test_leases_durable_says_whether_a_lease_event_is_synced(
    desk: Desk, durability: str, leases_durable: bool | None, syncs: int, verb: str
) -> None:
    desk.queue("q", 1, durability=durability, leases_durable=leases_durable)
    if verb != "claim":
        desk.claim()
    before = desk.syncs
    desk.claim() if verb == "claim" else getattr(desk, verb)(1)
    assert desk.syncs - before == syncs


# -- poison ----------------------------------------------------------------------------------------------------------


def poison_queue(desk: Desk, strategy: str | None = None, deliveries: int = 2, **config: Any) -> None:
    fields: dict[str, Any] = {"max_deliveries": deliveries, "dead_letter": "dead", **config}
    if strategy is not None:
        fields["dlq_strategy"] = strategy
    desk.queue("q", **fields)
    desk.log.append("q", [{"data": {"n": 1}, "tag": "t", "node": "maker", "meta": {"k": "v"}}])


def test_a_job_is_delivered_at_most_max_deliveries_times(desk: Desk) -> None:
    poison_queue(desk, deliveries=3)
    desk.fail(1, times=3)
    assert desk.seqs() == []


def test_skip_moves_the_job_to_the_dead_letter_topic(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    assert desk.seqs() == []
    assert desk.data("q") == []
    assert desk.data("dead") == [{"n": 1}]
    state = desk.state()
    assert (state.ready, state.blocked, state.dead_lettered, state.lost) == (0, 0, 1, 0)


def test_a_dead_letter_says_where_it_comes_from(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    (record,) = desk.records("dead")
    assert record["meta"] == {
        "k": "v",
        "$dead_letter_from": "q",
        "$dead_letter_deliveries": "2",
        "$dead_letter_src_seq": "1",
    }
    assert (record["$tag"], record["$node"]) == ("t", "maker")


def test_a_dead_letter_has_the_data_byte_for_byte(desk: Desk) -> None:
    desk.queue("q", max_deliveries=1, dead_letter="dead")
    desk.log.append_json("q", b'{"records":[{"data":{ "b":1.0,"a" : 1e4,"a":"\\u00e9"}}]}')
    desk.fail(1, times=1)
    desk.claim()
    assert b'"data":{ "b":1.0,"a" : 1e4,"a":"\\u00e9"}' in desk.log.diff("dead").records_json


def test_a_missing_dead_letter_topic_is_made_as_a_queue(desk: Desk) -> None:
    poison_queue(desk, "skip")
    with pytest.raises(TopicNotFound):
        desk.log.get("dead")
    desk.fail(1, times=2)
    desk.claim()
    assert desk.log.get("dead").type == "queue"
    assert desk.seqs(q="dead") == [1]


def test_a_dead_letter_topic_may_be_a_log(desk: Desk) -> None:
    desk.log.put("dead")
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    assert desk.data("dead") == [{"n": 1}]


def test_the_claim_that_routes_poison_gives_the_jobs_behind_it(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.write("good")
    for _ in range(2):
        assert desk.seqs() == [1]
        desk.nack(1)
    assert desk.seqs() == [2]
    assert desk.data("dead") == [{"n": 1}]


def test_skip_without_a_dead_letter_topic_delivers_for_ever(desk: Desk) -> None:
    desk.queue("q", 1, max_deliveries=2)
    desk.fail(1, times=9)
    assert desk.claim()[0].deliveries == 10
    assert desk.state().blocked == 0


def test_block_sets_the_job_aside(desk: Desk) -> None:
    poison_queue(desk, "block")
    desk.fail(1, times=2)
    desk.write("good")
    assert desk.seqs(most=10) == [2]
    assert desk.counts() == (0, 1, 0, 1)
    assert desk.data("q") == [{"n": 1}, "good"]


def test_block_copies_nothing(desk: Desk) -> None:
    poison_queue(desk, "block")
    desk.fail(1, times=2)
    desk.claim()
    with pytest.raises(TopicNotFound):
        desk.log.get("dead")
    assert desk.state().dead_lettered == 0


@pytest.mark.parametrize("deliveries", [1, 3])
def test_an_unblock_allows_max_deliveries_further_deliveries(desk: Desk, deliveries: int) -> None:
    poison_queue(desk, "block", deliveries)
    desk.fail(1, times=deliveries)
    for _ in range(2):
        assert desk.seqs() == []
        done = desk.unblock(1)
        assert (done.done, done.skipped, done.ready) == ([1], [], 1)
        desk.fail(1, times=deliveries)
    assert desk.seqs() == []
    assert desk.counts() == (0, 0, 0, 1)


def test_an_unblock_keeps_the_count_of_deliveries(desk: Desk) -> None:
    poison_queue(desk, "block")
    desk.fail(1, times=2)
    desk.claim()
    desk.unblock(1)
    assert desk.claim()[0].deliveries == 3


def test_an_unblock_of_what_is_not_blocked_is_skipped(desk: Desk) -> None:
    poison_queue(desk, "block")
    done = desk.unblock(1, 7)
    assert (done.done, done.skipped) == ([], [1, 7])


def test_an_unblock_accounts_for_every_seq_that_it_is_given(desk: Desk) -> None:
    poison_queue(desk, "block")
    desk.fail(1, times=2)
    desk.claim()
    done = desk.unblock(1, 1)
    assert (done.done, done.skipped) == ([1], [1])


def test_a_blocked_job_cannot_be_acked(desk: Desk) -> None:
    poison_queue(desk, "block")
    desk.fail(1, times=2)
    desk.claim()
    assert desk.ack(1).skipped == [1]


@pytest.mark.parametrize("ending", KEEPING)
def test_a_block_survives_a_restart(desk: Desk, ending: Ending) -> None:
    poison_queue(desk, "block")
    desk.fail(1, times=2)
    desk.claim()
    desk.restart(ending)
    assert desk.seqs() == []
    assert desk.counts() == (0, 0, 0, 1)
    desk.unblock(1)
    desk.restart(ending)
    desk.fail(1, times=2)
    assert desk.seqs() == []


def test_block_and_dlq_does_both(desk: Desk) -> None:
    poison_queue(desk, "block_and_dlq")
    desk.fail(1, times=2)
    assert desk.seqs() == []
    assert desk.counts() == (0, 0, 0, 1)
    assert desk.data("q") == desk.data("dead") == [{"n": 1}]
    assert desk.state().dead_lettered == 1


def test_block_and_dlq_copies_a_job_once(desk: Desk) -> None:
    poison_queue(desk, "block_and_dlq")
    desk.fail(1, times=2)
    for _ in range(3):
        assert desk.seqs() == []
    assert desk.data("dead") == [{"n": 1}]


def test_block_and_dlq_copies_a_job_once_though_it_was_unblocked_and_failed_again(desk: Desk) -> None:
    poison_queue(desk, "block_and_dlq")
    desk.fail(1, times=2)
    desk.claim()
    desk.unblock(1)
    desk.fail(1, times=2)
    assert desk.seqs() == []
    assert desk.counts() == (0, 0, 0, 1)
    assert desk.data("dead") == [{"n": 1}]


def test_a_full_dead_letter_topic_leaves_the_job_blocked(desk: Desk) -> None:
    desk.queue("dead", "x", cap_records=1, discard="reject")
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    assert desk.seqs() == []
    assert desk.counts() == (0, 0, 0, 1)
    assert desk.data("dead") == ["x"]
    assert desk.state().dead_lettered == 0


def test_a_job_that_a_full_dead_letter_topic_left_blocked_can_be_unblocked(desk: Desk) -> None:
    desk.queue("dead", "x", cap_records=1, discard="reject")
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    desk.claim(q="dead")
    desk.ack(1, q="dead")
    desk.unblock(1)
    desk.fail(1, times=2)
    desk.claim()
    assert desk.data("dead") == [{"n": 1}]
    assert desk.data("q") == []


def test_a_dead_letter_topic_with_room_for_one_of_two_loses_neither(desk: Desk) -> None:
    desk.queue("dead", cap_records=1, discard="reject")
    desk.queue("q", 1, 2, max_deliveries=1, dead_letter="dead")
    desk.claim(most=2)
    desk.nack(1, 2)
    assert desk.seqs(most=2) == []
    assert sorted(desk.data("q") + desk.data("dead")) == [1, 2]
    assert desk.state().blocked == desk.log.get("q").count


def test_max_deliveries_can_be_lowered_while_jobs_are_out(desk: Desk) -> None:
    poison_queue(desk, "skip", deliveries=0)
    desk.fail(1, times=5)
    desk.log.put("q", max_deliveries=3)
    assert desk.seqs() == []
    assert desk.records("dead")[0]["meta"]["$dead_letter_deliveries"] == "5"


def test_max_deliveries_can_be_turned_off_again(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.log.put("q", max_deliveries=0)
    desk.fail(1, times=5)


def test_an_expired_lease_counts_as_a_delivery_towards_the_limit(desk: Desk) -> None:
    poison_queue(desk, "skip")
    for _ in range(2):
        assert desk.seqs() == [1]
        desk.clock.advance(LEASE)
    assert desk.seqs() == []
    assert desk.data("dead") == [{"n": 1}]


def test_the_holder_of_the_last_delivery_may_still_ack_past_its_deadline(desk: Desk) -> None:
    poison_queue(desk, "skip", deliveries=1)
    desk.claim()
    desk.clock.advance(LEASE)
    assert desk.ack(1).done == [1]
    assert desk.state().dead_lettered == 0


@pytest.mark.parametrize("strategy", ["skip", "block", "block_and_dlq"])
@pytest.mark.parametrize("ending", ["close", "kill", "power"])
def test_poison_is_routed_once_over_restarts(desk: Desk, strategy: str, ending: Ending) -> None:
    poison_queue(desk, strategy, durability="fsync")
    desk.fail(1, times=2)
    for _ in range(3):
        assert desk.seqs() == []
        desk.restart(ending)
    # Whether a job is set aside follows from its deliveries: the next claim finds it again, if nothing else did.
    assert desk.seqs() == []
    assert desk.state().blocked == (0 if strategy == "skip" else 1)
    assert desk.state().dead_lettered == (0 if strategy == "block" else 1)
    if strategy != "block":
        assert desk.data("dead") == [{"n": 1}]


def test_many_poison_jobs_are_all_routed_in_the_end(desk: Desk) -> None:
    desk.queue("q", *range(250), max_deliveries=1, dead_letter="dead")
    lease = desk.claim(most=250)[0].lease_id
    desk.nack(lease_id=lease)
    for _ in range(4):
        assert desk.seqs(most=10) == []
    assert desk.data("dead") == list(range(250))
    assert desk.state().dead_lettered == 250


# -- redrive ---------------------------------------------------------------------------------------------------------


def test_a_redrive_moves_jobs_back_where_they_came_from(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    done = desk.redrive()
    assert (done.moved, done.unblocked, done.skipped, done.ready) == (1, 0, 0, 0)
    assert desk.data("dead") == []
    (job,) = desk.claim()
    assert (job.seq, job.data, job.deliveries) == (2, {"n": 1}, 1)
    assert (job.tag, job.node, job.meta) == ("t", "maker", {"k": "v"})


def test_a_redriven_job_without_meta_of_its_own_has_none(desk: Desk) -> None:
    desk.queue("q", 1, max_deliveries=1, dead_letter="dead")
    desk.fail(1, times=1)
    desk.claim()
    desk.redrive()
    assert "meta" not in desk.records("q")[0]


def test_a_redriven_job_has_its_meta_as_it_was_written(desk: Desk) -> None:
    meta = b'{ "b" : "1", "a":"\\u00e9", "a":"2" }'
    desk.queue("q", max_deliveries=1, dead_letter="dead")
    desk.log.append_json("q", b'{"records":[{"data":1,"meta":' + meta + b"}]}")
    desk.fail(1, times=1)
    desk.claim()
    desk.redrive()
    assert meta in desk.log.diff("q").records_json


def test_a_redrive_takes_at_most_max(desk: Desk) -> None:
    desk.queue("q", *range(5), max_deliveries=1, dead_letter="dead")
    desk.nack(lease_id=desk.claim(most=5)[0].lease_id)
    desk.claim()
    assert desk.redrive(2).moved == 2
    assert desk.data("q") == [0, 1]
    assert desk.data("dead") == [2, 3, 4]


def test_a_redrive_goes_to_several_origins_in_one_commit(desk: Desk) -> None:
    for name in ("q", "r"):
        desk.queue(name, name, max_deliveries=1, dead_letter="dead", durability="fsync")
        desk.fail(1, times=1, q=name)
        desk.claim(q=name)
    before = desk.syncs
    assert desk.redrive().moved == 2
    assert desk.syncs - before == 1
    assert (desk.data("q"), desk.data("r"), desk.data("dead")) == (["q"], ["r"], [])


def test_a_redrive_can_go_elsewhere(desk: Desk) -> None:
    desk.queue("elsewhere")
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    assert desk.redrive(to="elsewhere").moved == 1
    (record,) = desk.records("elsewhere")
    assert record["meta"] == {"k": "v"}
    assert (desk.data("q"), desk.data("dead")) == ([], [])


def test_a_redrive_whose_original_is_still_blocked_unblocks_it_instead(desk: Desk) -> None:
    poison_queue(desk, "block_and_dlq")
    desk.fail(1, times=2)
    desk.claim()
    done = desk.redrive()
    assert (done.moved, done.unblocked) == (0, 1)
    assert desk.data("dead") == []
    assert desk.data("q") == [{"n": 1}]
    desk.fail(1, times=2)
    assert desk.seqs() == []
    assert desk.counts() == (0, 0, 0, 1)


def test_a_job_that_was_redriven_and_failed_again_is_copied_again(desk: Desk) -> None:
    poison_queue(desk, "block_and_dlq")
    desk.fail(1, times=2)
    desk.claim()
    desk.redrive()
    desk.fail(1, times=2)
    desk.claim()
    assert desk.data("dead") == [{"n": 1}]


def test_a_redrive_leaves_what_has_no_origin(desk: Desk) -> None:
    desk.queue("dead", "stray")
    done = desk.redrive()
    assert (done.moved, done.unblocked, done.skipped, done.ready) == (0, 0, 1, 1)
    assert desk.seqs(q="dead") == [1]


def test_a_redrive_leaves_what_has_lost_its_origin(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    desk.log.drop("q")
    assert desk.redrive().skipped == 1
    assert desk.data("dead") == [{"n": 1}]


def test_a_redrive_leaves_what_somebody_holds(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    desk.claim(q="dead")
    assert desk.redrive().moved == 0
    assert desk.ack(1, q="dead").done == [1]


def test_a_redrive_into_a_full_queue_moves_nothing(desk: Desk) -> None:
    poison_queue(desk, "skip", cap_records=1, discard="reject")
    desk.fail(1, times=2)
    desk.claim()
    desk.write("new")
    with pytest.raises(TopicFull):
        desk.redrive()
    assert (desk.data("q"), desk.data("dead")) == (["new"], [{"n": 1}])
    assert desk.counts("dead") == (1, 0, 0, 0)
    assert desk.seqs(q="dead") == [1]


def test_redriven_jobs_do_not_count_as_lost(desk: Desk) -> None:
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.claim()
    desk.redrive()
    assert (desk.state("dead").lost, desk.state("q").lost) == (0, 0)


def test_a_copy_of_an_older_instance_of_its_origin_is_not_lost_in_a_redrive(desk: Desk) -> None:
    poison_queue(desk, "block_and_dlq")
    desk.fail(1, times=2)
    desk.claim()
    desk.log.drop("q")
    desk.queue("q", "new", max_deliveries=2, dead_letter="dead", dlq_strategy="block_and_dlq")
    desk.fail(1, times=2)
    desk.claim()
    assert desk.data("dead") == [{"n": 1}, "new"]
    desk.redrive()
    found = [*desk.data("q"), *desk.data("dead")]
    assert {"n": 1} in found
    assert found.count("new") == 1


def test_a_copy_whose_original_has_run_out_of_time_is_moved_back(desk: Desk) -> None:
    poison_queue(desk, "block_and_dlq", ttl_ms=500)
    desk.fail(1, times=2)
    desk.claim()
    desk.clock.advance(501)
    done = desk.redrive()
    assert (done.moved, done.unblocked) == (1, 0)
    assert desk.data("q") == [{"n": 1}]


def test_a_redrive_into_a_queue_that_is_full_of_what_has_run_out_of_time_goes_well(desk: Desk) -> None:
    poison_queue(desk, "skip", cap_records=1, discard="reject", ttl_ms=500)
    desk.fail(1, times=2)
    desk.claim()
    desk.write("old")
    desk.clock.advance(501)
    assert desk.redrive().moved == 1
    assert desk.data("q") == [{"n": 1}]


def test_a_dead_letter_topic_that_is_full_of_what_has_run_out_of_time_is_not_full(desk: Desk) -> None:
    desk.queue("dead", "old", cap_records=1, discard="reject", ttl_ms=500)
    poison_queue(desk, "skip")
    desk.fail(1, times=2)
    desk.clock.advance(501)
    desk.claim()
    assert desk.data("dead") == [{"n": 1}]
    assert desk.counts() == (0, 0, 0, 0)


# -- ordering_required -----------------------------------------------------------------------------------------------


def test_while_one_node_holds_anything_others_get_nothing(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3, ordering_required=True)
    assert desk.seqs("a", most=2) == [1, 2]
    assert desk.seqs("b") == []
    desk.ack(1)
    assert desk.seqs("b") == []
    assert desk.seqs("a") == [3]
    desk.ack(2, 3)
    desk.write(4)
    assert desk.seqs("b") == [4]


def test_when_the_holders_leases_are_over_another_goes_on_from_the_first(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3, ordering_required=True)
    desk.claim("a", most=2)
    desk.clock.advance(LEASE)
    assert desk.seqs("b", most=5) == [1, 2, 3]
    assert desk.seqs("a") == []


def test_a_delayed_head_holds_the_line(desk: Desk) -> None:
    desk.queue("q", 1, 2, ordering_required=True)
    desk.claim()
    desk.nack(1, delay_ms=5000)
    assert desk.seqs(most=5) == []
    desk.clock.advance(5000)
    assert desk.seqs(most=5) == [1, 2]


def test_a_blocked_head_holds_the_line(desk: Desk) -> None:
    desk.queue("q", 1, 2, ordering_required=True, max_deliveries=1)
    desk.claim()
    desk.nack(1)
    assert desk.seqs(most=5) == []
    assert desk.counts() == (1, 0, 0, 1)
    assert desk.seqs(most=5) == []
    desk.unblock(1)
    assert desk.seqs(most=5) == [1, 2]


def test_a_nacked_job_comes_again_before_those_behind_it(desk: Desk) -> None:
    desk.queue("q", *range(4), ordering_required=True)
    desk.claim("a", most=3)
    desk.nack(2)
    assert desk.seqs("a", most=5) == [2, 4]


def test_a_poison_job_in_the_middle_stops_the_line_in_front_of_it(desk: Desk) -> None:
    desk.queue("q", *range(4), ordering_required=True, max_deliveries=1)
    desk.claim("a", most=2)
    desk.log.put("q", max_deliveries=2)
    desk.nack(1, 2)
    desk.claim("a")
    desk.nack(1)
    desk.log.put("q", max_deliveries=2)
    assert desk.seqs("a", most=5) == []
    assert [lease.seq for lease in desk.leases() if lease.state == "blocked"] == [1]


def test_block_and_dlq_stops_the_line_too(desk: Desk) -> None:
    desk.queue("q", 1, 2, ordering_required=True, max_deliveries=1, dead_letter="dead", dlq_strategy="block_and_dlq")
    desk.claim()
    desk.nack(1)
    assert desk.seqs(most=5) == []
    assert desk.data("dead") == [1]
    desk.redrive()
    assert desk.seqs(most=5) == [1, 2]


def test_an_ordered_queue_blocks_by_default_and_may_not_skip(desk: Desk) -> None:
    desk.queue("q", ordering_required=True)
    assert desk.log.get("q").config["dlq_strategy"] == "block"
    with pytest.raises(InvalidRequest, match="skip"):
        desk.log.put("q", dlq_strategy="skip")


@pytest.mark.parametrize("ending", KEEPING)
def test_the_order_holds_over_a_restart(desk: Desk, ending: Ending) -> None:
    desk.queue("q", 1, 2, 3, ordering_required=True)
    desk.claim("a", most=2)
    desk.restart(ending)
    assert desk.seqs("b") == []
    desk.nack(1, delay_ms=5000)
    desk.restart(ending)
    assert desk.seqs("a") == []
    desk.clock.advance(5000)
    assert desk.seqs("b", most=5) == [1, 2, 3]


# -- caps ------------------------------------------------------------------------------------------------------------


def test_ack_holes_are_runs_of_unacked_seqs_below_the_highest_acked(desk: Desk) -> None:
    desk.queue("q", *range(9))
    desk.claim(most=9)
    desk.ack(2, 3, 5, 8)
    state = desk.state()
    assert (state.ack_floor, state.ack_holes) == (0, 3)
    desk.ack(1)
    state = desk.state()
    assert (state.ack_floor, state.ack_holes) == (3, 2)
    desk.ack(4, 6, 7)
    state = desk.state()
    assert (state.ack_floor, state.ack_holes) == (8, 0)


def test_above_the_cap_a_claim_gives_only_jobs_below_the_highest_acked_seq(desk: Desk) -> None:
    desk.queue("q", *range(8), max_ack_holes=1)
    desk.claim(most=5)
    desk.ack(2, 4)
    desk.nack(3, 5)
    assert desk.seqs(most=8) == [3]
    with pytest.raises(AckHoleCapExceeded) as refused:
        desk.claim()
    assert refused.value.detail["holes"] == 2
    assert refused.value.detail["max"] == 1
    desk.ack(3)
    assert desk.seqs(most=8) == [5, 6, 7, 8]


def test_at_the_cap_a_claim_gives_everything(desk: Desk) -> None:
    desk.queue("q", *range(4), max_ack_holes=1)
    desk.claim(most=2)
    desk.ack(2)
    assert desk.seqs(most=4) == [3, 4]


def test_deleted_lost_and_dead_lettered_jobs_count_as_acked(desk: Desk) -> None:
    desk.queue("q", max_deliveries=1, dead_letter="dead")
    desk.log.append("q", [{"data": n, "tag": f"t{n}"} for n in range(1, 9)])
    desk.claim(most=4)
    desk.ack(2)
    desk.nack(3)
    desk.log.delete("q", match="t6")
    desk.claim()
    assert desk.data("dead") == [3]
    desk.log.append("q", [{"hole": 2, "reason": "source_trim"}])
    assert desk.state().ack_holes == 3  # 1, 4 to 5, 7 to 8


def test_blocked_jobs_do_not_count_as_acked(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3, max_deliveries=1, dlq_strategy="block")
    desk.claim(most=2)
    desk.nack(1)
    desk.claim()
    desk.ack(2)
    state = desk.state()
    assert (state.blocked, state.ack_floor, state.ack_holes) == (1, 0, 1)


def test_a_hole_in_front_of_everything_is_no_ack_hole(desk: Desk) -> None:
    desk.queue("q")
    desk.log.append("q", [{"hole": 3, "reason": "source_trim"}])
    assert (desk.state().ack_floor, desk.state().ack_holes) == (3, 0)
    desk.write(1, 2, 3)
    assert (desk.state().ack_floor, desk.state().ack_holes) == (3, 0)


def test_a_hole_that_was_passed_does_not_use_up_the_ack_holes(desk: Desk) -> None:
    desk.queue("q", max_ack_holes=1)
    desk.log.append("q", [{"hole": 3, "reason": "source_trim"}])
    desk.write(1, 2, 3)
    desk.claim(most=2)
    desk.ack(5)
    assert desk.state().ack_holes == 1
    assert desk.seqs() == [6]


@pytest.mark.parametrize("ending", KEEPING)
def test_ack_holes_are_the_same_after_a_restart(desk: Desk, ending: Ending) -> None:
    desk.queue("q", *range(9))
    desk.claim(most=9)
    desk.ack(2, 3, 5, 8)
    before = desk.state()
    desk.restart(ending)
    assert desk.state() == before


def test_max_in_flight_bounds_what_is_out(desk: Desk) -> None:
    desk.queue("q", *range(9), max_in_flight=3)
    assert desk.seqs("a", most=2) == [1, 2]
    assert desk.seqs("b", most=2) == [3]
    with pytest.raises(InFlightCapExceeded) as refused:
        desk.claim("b")
    assert refused.value.detail["max"] == 3
    desk.ack(1)
    assert desk.seqs("b", most=5) == [4]


def test_an_expired_job_is_not_in_flight(desk: Desk) -> None:
    desk.queue("q", 1, 2, max_in_flight=1)
    desk.claim("a")
    desk.clock.advance(LEASE)
    assert desk.seqs("b", most=2) == [1]


def test_max_in_flight_can_be_lowered_while_jobs_are_out(desk: Desk) -> None:
    desk.queue("q", *range(9))
    desk.claim(most=4)
    desk.log.put("q", max_in_flight=2)
    with pytest.raises(InFlightCapExceeded):
        desk.claim()
    desk.ack(1, 2, 3)
    assert desk.seqs(most=5) == [5]


# -- state -----------------------------------------------------------------------------------------------------------


def test_the_state_of_a_queue_counts_every_live_job_once(desk: Desk) -> None:
    desk.queue("q", *range(6), max_deliveries=1, dlq_strategy="block")
    desk.claim(most=4)
    desk.nack(1)
    desk.claim()
    desk.nack(2, delay_ms=5000)
    assert desk.counts() == (1, 3, 1, 1)
    assert desk.log.get("q").count == 6


def test_a_log_has_no_queue_state(desk: Desk) -> None:
    desk.log.put("t")
    assert desk.log.get("t").queue is None


def test_an_empty_queue_has_its_floor_at_the_head(desk: Desk) -> None:
    desk.queue("q", seq_base=50)
    assert desk.state().ack_floor == 49
    desk.write(1, 2)
    assert desk.state().ack_floor == 49
    desk.claim(most=2)
    desk.ack(50, 51)
    state = desk.state()
    assert (state.ack_floor, state.ack_holes, state.oldest_ready_ts) == (51, 0, None)


def test_the_oldest_ready_job_says_its_time(desk: Desk) -> None:
    desk.queue("q")
    start = desk.clock.now()
    for n in range(3):
        desk.write(n)
        desk.clock.advance(10)
    desk.claim()
    assert desk.state().oldest_ready_ts == start + 10
    desk.nack(1)
    assert desk.state().oldest_ready_ts == start


def test_the_leases_of_a_queue_say_who_holds_what_until_when(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3)
    (first,) = desk.claim("a")
    (second,) = desk.claim("b", lease_ms=5000)
    found = [(held.seq, held.node, held.lease_id, held.deadline, held.deliveries, held.state) for held in desk.leases()]
    assert found == [
        (1, "a", first.lease_id, first.deadline, 1, "in_flight"),
        (2, "b", second.lease_id, second.deadline, 1, "in_flight"),
    ]


def test_the_leases_of_a_queue_forget_what_is_over(desk: Desk) -> None:
    desk.queue("q", 1, 2, 3)
    desk.claim(most=2)
    desk.ack(1)
    assert [held.seq for held in desk.leases()] == [2]
    desk.clock.advance(LEASE)
    assert desk.leases() == []


# -- not a queue, not there ------------------------------------------------------------------------------------------

VERBS = ["claim", "ack", "nack", "extend", "unblock", "redrive", "leases"]


def do(desk: Desk, verb: str, q: str) -> None:
    if verb in ("ack", "nack", "extend", "unblock"):
        getattr(desk, verb)(1, q=q)
    else:
        getattr(desk, verb)(q=q)


@pytest.mark.parametrize("verb", VERBS)
def test_on_a_log_every_verb_is_refused(desk: Desk, verb: str) -> None:
    desk.log.put("t")
    with pytest.raises(NotAQueue, match="t"):
        do(desk, verb, "t")


@pytest.mark.parametrize("verb", VERBS)
def test_on_an_absent_topic_every_verb_is_refused(desk: Desk, verb: str) -> None:
    with pytest.raises(TopicNotFound):
        do(desk, verb, "none")
    with pytest.raises(TopicNotFound):
        desk.log.get("none")


def test_a_queue_stays_a_queue(desk: Desk) -> None:
    desk.queue("q", 1)
    with pytest.raises(TopicExistsIncompatible):
        desk.log.put("q", type="log")


def test_a_deleted_queue_takes_its_leases_along(desk: Desk) -> None:
    desk.queue("q", 1)
    lease = desk.claim()[0].lease_id
    desk.log.drop("q")
    desk.queue("q", 2)
    assert desk.counts() == (1, 0, 0, 0)
    assert desk.ack(1).skipped == [1]
    assert desk.ack(lease_id=lease).done == []


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "field", "found"),
    [
        ({"lease_ms": 1}, "lease_ms", 100),
        ({"lease_ms": 10**9}, "lease_ms", 86_400_000),
        ({"visibility_timeout_ms": 5000}, "lease_ms", 5000),
        ({"claim_jitter_ms": 10**6}, "claim_jitter_ms", 5000),
        ({"max_delivery_attempts": 4}, "max_deliveries", 4),
        ({}, "dlq_strategy", "skip"),
        ({}, "leases_durable", None),
        ({}, "max_deliveries", 0),
        ({}, "max_ack_holes", 0),
        ({}, "max_in_flight", 0),
    ],
)
def test_a_queues_configuration_is_echoed_resolved(desk: Desk, sent: dict[str, Any], field: str, found: Any) -> None:
    assert desk.log.put("q", {"type": "queue", **sent}).config[field] == found


def test_block_and_dlq_needs_a_dead_letter_topic(desk: Desk) -> None:
    with pytest.raises(InvalidRequest, match="dead_letter"):
        desk.log.put("q", type="queue", dlq_strategy="block_and_dlq")


def test_a_queue_is_not_its_own_dead_letter_topic(desk: Desk) -> None:
    with pytest.raises(InvalidRequest, match="dead_letter"):
        desk.log.put("q", type="queue", dead_letter="q")


# -- producing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", KEEPING)
def test_a_strict_producer_that_resends_everything_never_doubles_a_job(desk: Desk, ending: Ending) -> None:
    desk.queue("q")
    batches = [[{"data": n, "client_seq": n} for n in range(first, first + 3)] for first in (1, 4, 7)]
    for batch in batches:
        desk.log.append("q", batch, client_id="maker")
    desk.claim(most=4)
    desk.ack(1, 2)
    desk.restart(ending)
    for batch in batches:
        with pytest.raises(IdempotencyConflict) as refused:
            desk.log.append("q", batch, client_id="maker")
        assert refused.value.detail["last_client_seq"] == 9
    assert desk.data("q") == list(range(3, 10))
    assert desk.counts() == (5, 2, 0, 0)


def test_a_repeated_idempotency_key_doubles_no_job_though_the_first_is_done(desk: Desk) -> None:
    desk.queue("q")
    desk.write("job", idempotency_key="k")
    desk.claim()
    desk.ack(1)
    assert desk.log.append("q", [{"data": "job"}], idempotency_key="k").deduped
    assert desk.counts() == (0, 0, 0, 0)


def test_acked_jobs_give_a_rejecting_queue_its_room_back(desk: Desk) -> None:
    desk.queue("q", 1, 2, cap_records=2, discard="reject")
    with pytest.raises(TopicFull):
        desk.write(3)
    desk.claim()
    desk.ack(1)
    assert desk.write(3) == [3]


# -- several things on their way in one turn -------------------------------------------------------------------------


def stage_write(desk: Desk, *datas: object) -> None:
    body = encode_write([{"data": data} for data in datas])
    desk.log.engine.write("q", decode_write(body, desk.limits))


@pytest.mark.parametrize("ending", KEEPING)
def test_a_job_that_is_claimed_while_its_delete_is_on_its_way_is_gone_after_a_restart(
    desk: Desk, ending: Ending
) -> None:
    desk.queue("q", 1, 2, durability="fsync")
    desk.log.engine.delete("q", before_seq=2)
    desk.jobs.claim("q", "a")
    desk.log.engine.flush()
    desk.check()
    before = desk.state()
    desk.restart(ending)
    desk.check()
    assert desk.state() == before
    desk.clock.advance(LEASE)
    assert desk.seqs("b", most=5) == [2]


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_job_that_is_claimed_while_a_write_pushes_it_out_is_gone_after_a_kill(desk: Desk, durability: str) -> None:
    desk.queue("q", 1, 2, cap_records=2, durability=durability)
    stage_write(desk, 3)
    desk.jobs.claim("q", "a")
    desk.log.engine.flush()
    before = desk.state()
    desk.restart("kill")
    desk.check()
    assert desk.state() == before
    desk.clock.advance(LEASE)
    assert desk.seqs("b", most=5) == [2, 3]


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_job_that_is_acked_while_a_write_pushes_it_out_is_acked_or_lost_but_not_both(
    desk: Desk, durability: str
) -> None:
    desk.queue("q", 1, 2, cap_records=2, durability=durability)
    desk.claim()
    stage_write(desk, 3)
    ack = desk.jobs.ack("q", Holder(node="a", seqs=[1]))
    desk.log.engine.flush()
    desk.check()
    acked = len(ack.value().done)
    assert acked + desk.state().lost == 1
    before = desk.state()
    desk.restart("kill")
    assert desk.state() == before


def test_a_job_that_is_acked_while_its_time_runs_out_is_acked_or_lost_but_not_both(desk: Desk) -> None:
    desk.queue("q", 1, ttl_ms=500, durability="fsync")
    desk.claim()
    desk.clock.advance(500)
    ack = desk.jobs.ack("q", Holder(node="a", seqs=[1]))
    desk.clock.advance(1)
    desk.log.get("q")
    desk.log.engine.flush()
    assert len(ack.value().done) + desk.state().lost == 1
    before = desk.state()
    desk.restart("kill")
    assert desk.state() == before


def test_a_claim_sees_nothing_that_is_not_visible_yet(desk: Desk) -> None:
    desk.queue("q", durability="fsync")
    stage_write(desk, 1)
    claim = desk.jobs.claim("q", "a")
    assert (claim.value().jobs, claim.value().ready) == ([], 0)
    desk.log.engine.flush()
    assert desk.seqs() == [1]


def test_a_claim_is_answered_only_when_its_lease_is_durable(desk: Desk) -> None:
    desk.queue("q", 1, durability="fsync")
    claim = desk.jobs.claim("q", "a")
    assert not claim.done
    desk.log.engine.flush()
    assert claim.done


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_claim_that_routes_poison_is_done_when_that_is_durable(desk: Desk, jobs: int) -> None:
    """Whether or not it gets something else."""
    poison_queue(desk, "skip", deliveries=1, durability="disk")
    desk.fail(1, times=1)
    desk.write(*range(jobs - 1)) if jobs > 1 else None
    desk.queue("dead")
    claim = desk.jobs.claim("q", "a")
    assert not claim.done
    before = desk.syncs
    desk.log.engine.flush()
    assert desk.syncs - before == 1
    assert len(claim.value().jobs) == jobs - 1
    assert desk.data("dead") == [{"n": 1}]


@pytest.mark.parametrize("most", [1, 3])
def test_a_change_of_class_keeps_the_jobs_that_stay(desk: Desk, most: int) -> None:
    """Jobs of an ephemeral time are lost, told, and never come back as leases on nothing."""
    desk.queue("q", durability="ephemeral")
    desk.write(1, 2)
    desk.log.put("q", durability="disk")
    desk.write(3)
    assert desk.seqs(most=most) == [1, 2, 3][:most]
    desk.restart("kill")
    desk.check()
    desk.clock.advance(LEASE)
    assert desk.seqs(most=5) == [3]
    assert desk.state().lost >= 2


# -- a disk that lies ------------------------------------------------------------------------------------------------


def corrupted(desk: Desk) -> None:
    """The queue's only segment file has a wrong bit in its first chunk."""
    (name,) = [name for name in desk.disk.names() if name.startswith("seg")]
    desk.disk.flip_bit(name, desk.disk.read(name).index(b'"victim"') * 8)


def test_jobs_whose_bytes_are_damaged_are_told_as_lost_by_a_claim() -> None:
    desk = Desk(options=Options(cache_bytes=0))
    desk.queue("q", "victim", "other")
    desk.restart()
    corrupted(desk)
    claim = desk.claim_all(most=5)
    assert (claim.jobs, claim.lost) == ([], 2)
    assert claim.tombstone is not None
    assert claim.tombstone.reason == "corrupt"
    desk.write("new")
    assert desk.seqs(most=5) == [3]


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_jobs_whose_bytes_are_damaged_while_they_are_out_leave_the_queue_sound(verb: str) -> None:
    desk = Desk(options=Options(cache_bytes=0))
    desk.queue("q", "victim", "other")
    desk.claim()
    desk.restart()
    corrupted(desk)
    getattr(desk, verb)(1)
    desk.claim(most=5)
    desk.check()
    desk.restart("kill")
    desk.check()


def test_the_state_of_a_queue_whose_bytes_are_damaged_can_be_asked_for() -> None:
    desk = Desk(options=Options(cache_bytes=0))
    desk.queue("q", "victim", "other")
    desk.restart()
    corrupted(desk)
    state = desk.log.get("q").queue
    assert state is not None
    assert state.ready in (0, 2)


def test_a_refused_verb_changes_nothing(desk: Desk) -> None:
    desk.queue("q", 1, 2, max_in_flight=1)
    desk.claim()
    before = desk.state(), desk.leases(), desk.disk_bytes
    for bad in (
        lambda: desk.claim(),
        lambda: desk.claim(most=0),
        lambda: desk.ack(1, lease_ids=[]),
        lambda: desk.nack(1, delay_ms=-1),
        lambda: desk.extend(1, lease_ms=-1),
        lambda: desk.unblock(-1),
        lambda: desk.redrive(0, q="q"),
    ):
        with pytest.raises(TopicsError):
            bad()
    assert (desk.state(), desk.leases(), desk.disk_bytes) == before
