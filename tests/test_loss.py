"""No loss is silent: watermarks, tombstones and holes, and that nothing lost comes back (section 5)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import KEEPING, Ending, Machine, datas, fill, gap, live, seqs, told, write
from topics.core.tombstone import Tombstone
from topics.log import Log

ENDINGS: tuple[Ending, ...] = ("close", "kill", "power")


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


def marks(log: Log) -> tuple[int, int, int]:
    state = log.get("t")
    assert state.evict_floor <= state.earliest_seq <= state.next_seq
    return state.evict_floor, state.earliest_seq, state.head_seq


# The tombstone


def test_a_tombstone_names_the_exact_range(log: Log) -> None:
    log.put("t", cap_records=2)
    write(log, "t", *range(5))
    assert log.diff("t", 1).tombstone == Tombstone(
        gap_from=2, gap_to=3, reason="cap", missed_estimate=2, earliest_seq=4, head_seq=5
    )


def test_the_records_behind_the_loss_come_in_the_same_answer(log: Log) -> None:
    log.put("t", cap_records=2)
    write(log, "t", *range(5))
    answer = log.diff("t")
    assert (gap(answer), seqs(answer), answer.next_from_seq, answer.caught_up) == ((1, 3, "cap"), [4, 5], 5, True)


@pytest.mark.parametrize("from_seq", [3, 4, 5])
def test_a_cursor_at_or_above_the_floor_is_told_nothing(log: Log, from_seq: int) -> None:
    log.put("t", cap_records=2)
    write(log, "t", *range(5))
    assert log.diff("t", from_seq).tombstone is None


def test_a_loss_is_told_once_to_a_reader_that_goes_on(log: Log) -> None:
    log.put("t", cap_records=2)
    write(log, "t", *range(5))
    assert told(log, "t") == [(1, 3, "cap"), 4, 5]


def test_a_topic_that_lost_everything_tells_so(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1, 2)
    machine.clock.advance(11)
    answer = machine.log.diff("t")
    assert (gap(answer), answer.records, answer.caught_up) == ((1, 2, "ttl"), [], True)
    assert marks(machine.log) == (3, 3, 2)


# Watermarks


def test_watermarks_stand_at_the_base_until_a_loss(log: Log) -> None:
    log.put("t", seq_base=10)
    write(log, "t", 1, 2)
    assert marks(log) == (10, 10, 11)


def test_an_eviction_moves_both_watermarks(log: Log) -> None:
    log.put("t", cap_records=1)
    write(log, "t", 1, 2, 3)
    assert marks(log) == (3, 3, 3)


def test_a_delete_moves_only_the_earliest_seq(log: Log) -> None:
    write(log, "t", 1, 2, 3)
    log.delete("t", before_seq=3)
    assert marks(log) == (1, 3, 3)


def test_records_deleted_before_their_eviction_do_not_move_the_floor(log: Log) -> None:
    write(log, "t", 1, 2, 3)
    log.delete("t", before_seq=3)
    log.put("t", cap_records=1)
    assert marks(log) == (1, 3, 3)
    write(log, "t", 4)
    assert marks(log) == (4, 4, 4)


def test_records_deleted_before_their_ttl_do_not_move_the_floor(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    machine.log.append("t", [{"data": 1}, {"data": 2, "tag": "x"}])
    machine.clock.advance(5)
    write(machine.log, "t", 3)
    machine.log.delete("t", match="x")
    machine.clock.advance(6)
    assert marks(machine.log) == (2, 3, 3)
    assert gap(machine.log.diff("t")) == (1, 2, "ttl")
    assert machine.log.diff("t", 1).tombstone is None


def test_all_deleted_and_then_past_their_ttl_is_no_loss(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1, 2)
    machine.log.delete("t", before_seq=3)
    machine.clock.advance(1000)
    assert marks(machine.log) == (1, 3, 2)
    assert machine.log.diff("t").tombstone is None


def test_a_delete_above_the_floor_lengthens_the_told_range(log: Log) -> None:
    log.put("t", cap_records=3)
    write(log, "t", 1, 2, 3, 4)
    log.delete("t", before_seq=3)
    assert marks(log) == (2, 3, 4)
    assert [gap(log.diff("t", cursor)) for cursor in (0, 1, 2)] == [(1, 2, "cap"), None, None]


# Reasons


def test_cap_and_ttl_together_are_mixed(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10, cap_records=4)
    write(machine.log, "t", 1, 2, 3, 4, 5)
    machine.clock.advance(11)
    write(machine.log, "t", 6)
    assert gap(machine.log.diff("t")) == (1, 5, "mixed")


def test_a_cursor_behind_the_eviction_is_told_of_the_ttl_only(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10, cap_records=4)
    write(machine.log, "t", 1, 2, 3, 4, 5)
    machine.clock.advance(11)
    write(machine.log, "t", 6)
    assert gap(machine.log.diff("t", 1)) == (2, 5, "ttl")


def test_a_cursor_behind_the_expiry_is_told_of_the_cap_only(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1)
    machine.clock.advance(11)
    write(machine.log, "t", 2, 3, 4)
    machine.log.get("t")
    machine.log.put("t", cap_records=1)
    assert gap(machine.log.diff("t")) == (1, 3, "mixed")
    assert gap(machine.log.diff("t", 1)) == (2, 3, "cap")


# TTL


def test_a_record_expires_strictly_after_its_ttl(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1)
    machine.clock.advance(10)
    assert live(machine.log, "t") == [1]
    machine.clock.advance(1)
    assert told(machine.log, "t") == [(1, 1, "ttl")]


def test_ttl_needs_no_write_to_act(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 12345)
    machine.clock.advance(11)
    state = machine.log.get("t")
    assert (state.count, state.bytes, state.earliest_seq, state.evict_floor) == (0, 0, 2, 2)


def test_ttl_acts_in_a_list_too(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1)
    machine.clock.advance(11)
    assert machine.log.topics().topics[0].count == 0


def test_ttl_takes_the_oldest_only(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    for number in range(5):
        write(machine.log, "t", number)
        machine.clock.advance(4)
    assert told(machine.log, "t") == [(1, 3, "ttl"), 4, 5]


def test_a_clock_that_goes_back_revives_nothing(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1)
    machine.clock.advance(11)
    assert machine.log.get("t").count == 0
    machine.clock.advance(-11)
    assert told(machine.log, "t") == [(1, 1, "ttl")]


@pytest.mark.parametrize("ending", KEEPING)
def test_a_clock_that_goes_back_over_a_restart_revives_nothing(machine: Machine, ending: Ending) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1)
    machine.clock.advance(11)
    assert machine.log.get("t").count == 0
    machine.clock.set(1_000_000)
    assert told(machine.restart(ending), "t") == [(1, 1, "ttl")]


def test_ttl_runs_while_nothing_does(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1)
    machine.log.close()
    machine.clock.advance(11)
    machine.log = machine.open()
    assert told(machine.log, "t") == [(1, 1, "ttl")]


# Lost stays lost


@pytest.mark.parametrize("ending", ["none", *KEEPING])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_raised_cap_brings_nothing_back(machine: Machine, ending: Any, checkpoint: bool) -> None:
    machine.log.put("t", cap_records=2)
    write(machine.log, "t", 1, 2, 3)
    if checkpoint:
        machine.log.checkpoint()
    machine.log.put("t", cap_records=0)
    log = machine.log if ending == "none" else machine.restart(ending)
    assert told(log, "t") == [(1, 1, "cap"), 2, 3]
    write(log, "t", 4)
    assert log.get("t").count == 3


@pytest.mark.parametrize("ending", ["none", *KEEPING])
@pytest.mark.parametrize("ttl_ms", [0, 1000])
def test_a_raised_ttl_brings_nothing_back(machine: Machine, ending: Any, ttl_ms: int) -> None:
    machine.log.put("t", ttl_ms=10)
    write(machine.log, "t", 1)
    machine.clock.advance(11)
    machine.log.put("t", ttl_ms=ttl_ms)
    log = machine.log if ending == "none" else machine.restart(ending)
    assert told(log, "t") == [(1, 1, "ttl")]


@pytest.mark.parametrize("ending", KEEPING)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_watermarks_survive_a_restart(machine: Machine, ending: Ending, checkpoint: bool) -> None:
    log = machine.log
    log.put("t", ttl_ms=100, cap_records=6)
    fill(log, "t", 8)
    machine.clock.advance(50)
    log.append("t", [{"data": 1, "tag": "x"}, {"hole": 4}, {"data": 2}, {"data": 3}])
    log.delete("t", match="x")
    if checkpoint:
        log.checkpoint()
    before, reads = log.get("t"), told(log, "t")
    machine.restart(ending)
    after = machine.log.get("t")
    assert (after.count, after.bytes, after.holes) == (before.count, before.bytes, before.holes)
    assert (after.evict_floor, after.earliest_seq, after.head_seq) == (
        before.evict_floor,
        before.earliest_seq,
        before.head_seq,
    )
    assert told(machine.log, "t") == reads


def test_the_watermarks_never_go_down(machine: Machine) -> None:
    machine.log.put("t", ttl_ms=30)
    last = (1, 1)
    for step in range(60):
        machine.clock.advance(7 if step % 5 else -10)
        write(machine.log, "t", step)
        if step % 7 == 0:
            machine.log.put("t", cap_records=step % 3 * 4)
        if step % 11 == 0:
            machine.log.delete("t", before_seq=step - 3 if step > 3 else 0)
        if step % 13 == 0:
            machine.restart("kill" if step % 2 else "close")
        floor, earliest, _ = marks(machine.log)
        assert floor >= last[0]
        assert earliest >= last[1]
        last = (floor, earliest)
    assert last > (1, 1)


# Holes


def test_a_hole_is_told_and_the_read_goes_on(log: Log) -> None:
    log.append("t", [{"hole": 3}, {"data": "a"}])
    answer = log.diff("t")
    assert (gap(answer), datas(answer), answer.caught_up) == ((1, 3, "source_trim"), ["a"], True)


def test_an_answer_with_records_stops_in_front_of_a_hole(log: Log) -> None:
    log.append("t", [{"data": "a"}, {"hole": 3}, {"data": "b"}])
    answer = log.diff("t")
    assert (gap(answer), seqs(answer), answer.next_from_seq, answer.caught_up) == (None, [1], 1, False)
    answer = log.diff("t", answer.next_from_seq)
    assert (gap(answer), seqs(answer)) == ((2, 4, "source_trim"), [5])


def test_an_answer_has_one_tombstone_at_most(log: Log) -> None:
    log.put("t", cap_records=2)
    log.append("t", [{"data": 1}, {"data": 2}, {"hole": 2}, {"data": 5}])
    answer = log.diff("t")
    assert (gap(answer), seqs(answer), answer.next_from_seq) == ((1, 1, "cap"), [2], 2)
    assert told(log, "t") == [(1, 1, "cap"), 2, (3, 4, "source_trim"), 5]


def test_an_answer_that_skipped_only_deleted_records_tells_of_the_hole_behind_them(log: Log) -> None:
    log.append("t", [{"data": 0}, {"data": 1, "tag": "x"}, {"data": 2, "tag": "x"}, {"hole": 2}, {"data": 6}])
    log.delete("t", match="x")
    answer = log.diff("t", 1)
    assert (gap(answer), seqs(answer)) == ((4, 5, "source_trim"), [6])


@pytest.mark.parametrize(("from_seq", "first"), [(1, 2), (2, 3), (3, 4)])
def test_a_cursor_inside_a_hole_is_told_the_rest_of_it(log: Log, from_seq: int, first: int) -> None:
    log.append("t", [{"data": 1}, {"hole": 3}, {"data": 5}])
    assert gap(log.diff("t", from_seq)) == (first, 4, "source_trim")


def test_a_hole_at_the_end_is_told(log: Log) -> None:
    log.append("t", [{"data": 1}, {"hole": 3}])
    assert told(log, "t") == [1, (2, 4, "source_trim")]
    assert log.diff("t", 4).caught_up


def test_neighbouring_holes_are_all_told(log: Log) -> None:
    log.append("t", [{"hole": 2}, {"hole": 3}])
    log.append("t", [{"hole": 1}])
    ranges = [stone for stone in told(log, "t") if isinstance(stone, tuple)]
    assert (ranges[0][0], ranges[-1][1]) == (1, 6)


@pytest.mark.parametrize("anchor", [{"data": 1}, {"data": 1, "tag": "x"}])
def test_two_holes_with_only_deleted_records_between_are_told_one_by_one(log: Log, anchor: dict[str, Any]) -> None:
    log.append("t", [anchor, {"hole": 2}, {"data": 4, "tag": "x"}, {"hole": 2}, {"data": 7}])
    log.delete("t", match="x")
    answer = log.diff("t", 1)
    assert (gap(answer), seqs(answer), answer.next_from_seq) == ((2, 3, "source_trim"), [], 4)
    answer = log.diff("t", answer.next_from_seq)
    assert (gap(answer), seqs(answer)) == ((5, 6, "source_trim"), [7])


def test_two_losses_side_by_side_are_told_one_by_one(machine: Machine) -> None:
    write(machine.log, "t", 1)
    machine.log.append("t", [{"hole": 2}])
    machine.log.engine.committer.flush_and_wait()
    log = machine.restart("power")
    head = log.get("t").head_seq
    assert told(log, "t") == [1, (2, 3, "source_trim"), (4, head, "crash")]


def test_a_hole_counts_in_no_cap_and_has_no_ttl(machine: Machine) -> None:
    machine.log.put("t", cap_records=2, ttl_ms=100)
    machine.log.append("t", [{"hole": 50}])
    machine.clock.advance(1000)
    write(machine.log, "t", 1, 2)
    assert marks(machine.log)[0] == 1
    assert told(machine.log, "t") == [(1, 50, "source_trim"), 51, 52]


def test_deletion_never_removes_a_hole(log: Log) -> None:
    log.append("t", [{"data": 1}, {"hole": 3}, {"data": 5}, {"data": 6}])
    log.delete("t", before_seq=6)
    assert log.get("t").holes == 1
    assert told(log, "t") == [(2, 4, "source_trim"), 6]


def test_deletion_never_shortens_a_hole(log: Log) -> None:
    log.append("t", [{"data": 1}, {"hole": 5}, {"data": 7}])
    log.delete("t", before_seq=4)
    assert gap(log.diff("t", 1)) == (2, 6, "source_trim")


@pytest.mark.parametrize("ending", KEEPING)
def test_a_hole_outlives_the_deletion_of_everything(machine: Machine, ending: Ending) -> None:
    machine.log.append("t", [{"data": 1}, {"hole": 3}, {"data": 5}])
    machine.log.delete("t", before_seq=100)
    log = machine.restart(ending)
    assert (log.get("t").count, log.get("t").earliest_seq) == (0, 6)
    assert told(log, "t") == [(2, 4, "source_trim")]


def test_a_hole_ends_when_it_lies_below_the_floor(log: Log) -> None:
    log.put("t", cap_records=2)
    log.append("t", [{"data": 1}, {"hole": 3}, {"data": 5}])
    assert log.get("t").holes == 1
    write(log, "t", 6, 7)
    assert (log.get("t").holes, marks(log)[0]) == (0, 6)
    assert told(log, "t") == [(1, 5, "cap"), 6, 7]


def test_a_hole_right_above_the_floor_stays(log: Log) -> None:
    log.put("t", cap_records=1)
    log.append("t", [{"data": 1}, {"hole": 3}, {"data": 5}])
    assert (log.get("t").holes, marks(log)) == (1, (2, 5, 5))
    assert told(log, "t") == [(1, 4, "cap"), 5]
    assert gap(log.diff("t", 1)) == (2, 4, "source_trim")


# The worked example of the contract: 1-3 evicted, 4-5 deleted, hole 6-7, live from 8


@pytest.fixture(params=["fresh", "close", "kill"])
def example(request: pytest.FixtureRequest, machine: Machine) -> Log:
    log = machine.log
    write(log, "t", 1, 2, 3)
    log.append("t", [{"data": 4, "tag": "x"}, {"data": 5, "tag": "x"}, {"hole": 2}, {"data": 8}, {"data": 9}])
    log.delete("t", match="x")
    log.put("t", cap_records=2)
    return log if request.param == "fresh" else machine.restart(request.param)


def test_the_example_has_its_watermarks(example: Log) -> None:
    assert marks(example) == (4, 8, 9)
    assert example.get("t").holes == 1


@pytest.mark.parametrize(
    ("from_seq", "lost"), [(0, (1, 7)), (2, (3, 7)), (3, (6, 7)), (5, (6, 7)), (6, (7, 7)), (7, None)]
)
def test_the_example_reads_as_the_contract_says(example: Log, from_seq: int, lost: tuple[int, int] | None) -> None:
    answer = example.diff("t", from_seq)
    assert (None if answer.tombstone is None else (answer.tombstone.gap_from, answer.tombstone.gap_to)) == lost
    assert seqs(answer) == [8, 9]


# Recreated


def recreated(log: Log, count: int = 3) -> int:
    """A topic in its second life, and the epoch of its first."""
    write(log, "t", *range(5))
    old = log.get("t").epoch
    log.drop("t")
    log.put("t")
    if count:
        write(log, "t", *range(count))
    return old


@pytest.mark.parametrize("from_seq", [4, 5, 100, 2**53 - 1])
def test_a_cursor_above_the_head_is_from_another_life(log: Log, from_seq: int) -> None:
    recreated(log)
    answer = log.diff("t", from_seq)
    assert (gap(answer), seqs(answer), answer.caught_up) == ((1, 3, "recreated"), [1, 2, 3], True)


@pytest.mark.parametrize("from_seq", [0, 2, 3, 100])
def test_another_epoch_is_from_another_life(log: Log, from_seq: int) -> None:
    old = recreated(log)
    answer = log.diff("t", from_seq, epoch=old)
    assert (gap(answer), seqs(answer)) == ((1, 3, "recreated"), [1, 2, 3])


def test_a_caught_up_reader_is_never_told_so(log: Log) -> None:
    recreated(log)
    epoch = log.get("t").epoch
    assert log.diff("t", 3).tombstone is None
    assert log.diff("t", 3, epoch=epoch).tombstone is None


def test_a_recreated_empty_topic_tells_an_empty_range(log: Log) -> None:
    old = recreated(log, 0)
    for answer in (log.diff("t", 5), log.diff("t", 0, epoch=old)):
        assert (gap(answer), answer.next_from_seq, answer.caught_up) == ((1, 0, "recreated"), 0, True)


def test_a_recreated_topic_is_read_from_its_earliest_record(log: Log) -> None:
    recreated(log)
    log.put("t", cap_records=2)
    log.delete("t", before_seq=3)
    answer = log.diff("t", 100)
    assert (gap(answer), seqs(answer)) == ((1, 3, "recreated"), [3])


def test_a_recreated_topic_with_a_base_tells_from_its_base(log: Log) -> None:
    write(log, "t", 1)
    old = log.get("t").epoch
    log.drop("t")
    log.put("t", seq_base=10)
    write(log, "t", 1, 2)
    assert gap(log.diff("t", 1, epoch=old)) == (10, 11, "recreated")


def test_a_recreated_topic_with_a_hole_tells_of_it_next(log: Log) -> None:
    old = recreated(log, 0)
    log.append("t", [{"data": 1}, {"hole": 2}, {"data": 4}])
    answer = log.diff("t", 0, epoch=old)
    assert (gap(answer), seqs(answer), answer.next_from_seq) == ((1, 4, "recreated"), [1], 1)
    assert gap(log.diff("t", 1)) == (2, 3, "source_trim")


# Crashes and restarts


@pytest.mark.parametrize("durability", ["disk", "fsync", "memory", "ephemeral"])
def test_a_clean_restart_leaves_no_hole(machine: Machine, durability: str) -> None:
    machine.log.put("t", durability=durability)
    write(machine.log, "t", 1, 2)
    log = machine.restart("close")
    assert (log.get("t").holes, log.get("t").head_seq) == (0, 2)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_kill_loses_nothing_of_disk_and_fsync(machine: Machine, durability: str) -> None:
    machine.log.put("t", durability=durability)
    write(machine.log, "t", 1, 2)
    log = machine.restart("kill")
    assert told(log, "t") == [1, 2]
    assert log.get("t").next_seq == 3


def test_a_power_cut_loses_nothing_of_fsync(machine: Machine) -> None:
    machine.log.put("t", durability="fsync")
    write(machine.log, "t", 1, 2)
    assert told(machine.restart("power"), "t") == [1, 2]


@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_a_power_cut_tells_what_it_may_have_taken(machine: Machine, durability: str) -> None:
    machine.log.put("t", durability=durability)
    write(machine.log, "t", "synced with the reservation")
    write(machine.log, "t", "unsynced")
    log = machine.restart("power")
    first, (gap_from, gap_to, reason) = told(log, "t")  # type: ignore[misc]  # a seq and a gap
    assert (first, gap_from, reason) == (1, 2, "crash")
    assert gap_to == log.get("t").head_seq
    assert gap_to - 1 <= 1 + 1024
    assert write(log, "t", "new") == [gap_to + 1]


def test_a_crash_hole_survives_another_restart(machine: Machine) -> None:
    write(machine.log, "t", 1)
    write(machine.log, "t", 2)
    before = told(machine.restart("power"), "t")
    assert told(machine.restart("close"), "t") == before
    assert told(machine.restart("kill"), "t") == before


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ephemeral_topic_has_lost_everything_after_any_restart(machine: Machine, ending: Ending) -> None:
    machine.log.put("t", durability="ephemeral")
    write(machine.log, "t", 1, 2, 3)
    log = machine.restart(ending)
    state = log.get("t")
    assert state.head_seq >= 3
    assert (state.count, state.bytes, state.evict_floor, state.holes) == (0, 0, state.head_seq + 1, 0)
    assert told(log, "t") == [(1, state.head_seq, "restart")]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ephemeral_topic_goes_on_after_a_restart(machine: Machine, ending: Ending) -> None:
    machine.log.put("t", durability="ephemeral")
    write(machine.log, "t", 1, 2, 3)
    log = machine.restart(ending)
    head = log.get("t").head_seq
    assert write(log, "t", 4) == [head + 1]
    assert told(log, "t") == [(1, head, "restart"), head + 1]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_unwritten_ephemeral_topic_has_lost_nothing(machine: Machine, ending: Ending) -> None:
    machine.log.put("t", durability="ephemeral")
    log = machine.restart(ending)
    assert (marks(log), told(log, "t")) == ((1, 1, 0), [])


def test_older_durable_records_survive_a_topic_that_became_ephemeral(machine: Machine) -> None:
    machine.log.put("t", durability="fsync")
    write(machine.log, "t", "kept")
    machine.log.put("t", durability="ephemeral")
    write(machine.log, "t", "gone")
    log = machine.restart("close")
    assert told(log, "t") == [1, (2, 2, "restart")]
    assert datas(log.diff("t")) == ["kept"]
