"""Seek: the cursor for a time, below every loss that may matter (section 4)."""

from __future__ import annotations

import pytest

from tests.helpers import KEEPING, Ending, Machine, datas, gap, seqs, write
from topics.core.errors import InvalidRequest
from topics.log import Log

START = 1_000_000


def write_every(machine: Machine, step: int, count: int) -> Log:
    """Records 1 to `count`, the first at START, each `step` ms after the one before."""
    for number in range(count):
        machine.clock.set(START + number * step)
        write(machine.log, "t", number)
    return machine.log


@pytest.mark.parametrize(
    ("ts", "first"), [(0, 1), (START, 1), (START + 1, 2), (START + 10, 2), (START + 39, 5), (START + 40, 5)]
)
def test_a_diff_from_there_starts_with_the_first_record_that_new(ts: int, first: int) -> None:
    log = write_every(Machine(), 10, 5)
    answer = log.diff("t", log.seek("t", ts), limit=1)
    assert seqs(answer) == [first]
    assert answer.tombstone is None


def test_a_time_in_the_future_is_the_head() -> None:
    log = write_every(Machine(), 10, 3)
    assert log.seek("t", START + 21) == 3


@pytest.mark.parametrize("ts", [0, START, 2**53 - 1])
def test_an_empty_topic_has_only_its_beginning(ts: int) -> None:
    log = Machine().log
    log.put("t", seq_base=50)
    assert log.seek("t", ts) == 49


def test_records_of_one_moment_are_found_at_their_first() -> None:
    machine = Machine()
    write(machine.log, "t", "old")
    machine.clock.advance(1)
    write(machine.log, "t", "a", "b", "c")
    assert datas(machine.log.diff("t", machine.log.seek("t", START + 1))) == ["a", "b", "c"]


@pytest.mark.parametrize("ending", KEEPING)
def test_times_are_found_in_segment_files(ending: Ending) -> None:
    machine = Machine()
    write_every(machine, 10, 20)
    machine.log.checkpoint()
    log = machine.restart(ending)
    assert [log.seek("t", START + ts) for ts in (0, 1, 95, 100, 190, 191)] == [0, 1, 10, 10, 19, 20]


def test_something_that_new_was_evicted_and_the_reader_is_told() -> None:
    log = write_every(Machine(), 10, 5)
    log.put("t", cap_records=2)
    answer = log.diff("t", log.seek("t", START + 20))
    assert gap(answer) == (1, 3, "cap")
    assert seqs(answer) == [4, 5]


def test_only_older_records_were_evicted_and_nobody_is_told() -> None:
    log = write_every(Machine(), 10, 5)
    log.put("t", cap_records=2)
    answer = log.diff("t", log.seek("t", START + 21))
    assert seqs(answer) == [4, 5]
    assert answer.tombstone is None


def test_something_that_new_has_expired_and_the_reader_is_told() -> None:
    machine = Machine()
    write_every(machine, 10, 5)
    machine.log.put("t", ttl_ms=15)
    assert gap(machine.log.diff("t", machine.log.seek("t", START + 20))) == (1, 3, "ttl")


def test_deleted_records_are_passed_silently() -> None:
    log = write_every(Machine(), 10, 5)
    log.delete("t", before_seq=4)
    answer = log.diff("t", log.seek("t", START))
    assert seqs(answer) == [4, 5]
    assert answer.tombstone is None


def test_a_hole_before_the_first_record_that_new_is_told() -> None:
    machine = Machine()
    write(machine.log, "t", "old")
    machine.clock.advance(10)
    machine.log.append("t", [{"hole": 5}])
    machine.clock.advance(10)
    write(machine.log, "t", "new")
    answer = machine.log.diff("t", machine.log.seek("t", START + 15))
    assert gap(answer) == (2, 6, "source_trim")
    assert datas(answer) == ["new"]


def test_a_hole_below_an_older_record_is_not_told() -> None:
    machine = Machine()
    machine.log.append("t", [{"hole": 5}, {"data": "old"}])
    machine.clock.advance(10)
    write(machine.log, "t", "new")
    answer = machine.log.diff("t", machine.log.seek("t", START + 1))
    assert answer.tombstone is None
    assert datas(answer) == ["new"]


def test_a_hole_at_the_end_is_told_to_a_reader_of_the_future() -> None:
    machine = Machine()
    machine.log.append("t", [{"data": 1}, {"hole": 5}])
    assert gap(machine.log.diff("t", machine.log.seek("t", START + 1))) == (2, 6, "source_trim")


@pytest.mark.parametrize("ending", ["close", "kill", "power"])
def test_a_restart_of_an_ephemeral_topic_is_told(ending: Ending) -> None:
    machine = Machine()
    machine.log.put("t", durability="ephemeral")
    write_every(machine, 10, 3)
    log = machine.restart(ending)
    answer = log.diff("t", log.seek("t", START + 20))
    assert answer.tombstone is not None
    assert answer.tombstone.reason == "restart"
    assert answer.caught_up


def test_lost_times_are_remembered_over_a_restart() -> None:
    machine = Machine()
    write_every(machine, 10, 5)
    machine.log.put("t", cap_records=1)
    log = machine.restart()
    assert log.diff("t", log.seek("t", START + 30)).tombstone is not None
    assert log.diff("t", log.seek("t", START + 31)).tombstone is None


def test_a_clock_that_went_back_does_not_confuse_the_search() -> None:
    machine = Machine()
    for step in (0, 10, -100, 5, 200):
        machine.clock.advance(step)
        write(machine.log, "t", step)
    assert [machine.log.seek("t", START + ts) for ts in (0, 1, 10, 11)] == [0, 1, 1, 4]


@pytest.mark.parametrize("ts", [-1, 2**53, 1.5, True, None, "0"])
def test_a_time_is_a_whole_number_of_milliseconds(ts: object) -> None:
    log = Machine().log
    log.put("t")
    with pytest.raises(InvalidRequest, match=r"ts .*9007199254740991"):
        log.seek("t", ts)  # type: ignore[arg-type]  # what a careless caller sends
