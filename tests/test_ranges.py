"""What became of every seq: the ranges say exactly what reads say, one seq at a time."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers import Ending, Machine, fill, live
from topics.core.limits import Limits
from topics.core.tombstone import HOLE_REASONS
from topics.engine.ranges import Range
from topics.log import Log

Piece = tuple[int, int, str, str | None]


def shown(log: Log, topic: str, from_seq: int = 0, to_seq: int | None = None, limit: int = 0) -> list[Piece]:
    found = log.engine.ranges(topic, from_seq, to_seq, limit)
    return [(each.first, each.last, each.kind, each.reason) for each in found.ranges]


def fates(log: Log, topic: str) -> dict[int, tuple[str, bool]]:
    """What a reader who asks for one seq at a time is told: the kind of its fate, and whether it was told of a loss."""
    state = log.get(topic)
    told: dict[int, tuple[str, bool]] = {}
    for seq in range(state.config["seq_base"], state.head_seq + 1):
        answer = log.diff(topic, from_seq=seq - 1, to_seq=seq)
        if answer.tombstone is not None:
            told[seq] = ("evicted" if seq < state.evict_floor else "hole", True)
        else:
            told[seq] = ("live" if answer.count else "deleted", False)
    return told


def test_a_topic_without_records_has_no_ranges() -> None:
    log = Machine().log
    log.put("t", seq_base=5)
    found = log.engine.ranges("t")
    assert (found.ranges, found.next_from_seq, found.complete) == ([], 4, True)


def test_the_example_of_the_contract() -> None:
    """1-3 evicted, 4-5 deleted, a hole at 6-7, alive from 8."""
    log = Machine().log
    log.append("t", [{"data": n, "tag": "x" if n in (4, 5) else None} for n in range(1, 6)])
    log.append("t", [{"hole": 2, "reason": "source_trim"}])
    log.append("t", [{"data": 8}])
    log.delete("t", match="x")
    log.put("t", cap_records=1)
    assert shown(log, "t") == [
        (1, 3, "evicted", "cap"),
        (4, 5, "deleted", None),
        (6, 7, "hole", "source_trim"),
        (8, 8, "live", None),
    ]


def test_each_kind_of_loss_has_its_reason() -> None:
    machine = Machine()
    log = machine.log
    log.put("t", cap_records=4)
    fill(log, "t", 6)
    assert shown(log, "t") == [(1, 2, "evicted", "cap"), (3, 6, "live", None)]
    log.put("t", ttl_ms=1000)
    machine.clock.advance(1001)
    fill(log, "t", 1)
    # The cap has taken the first two; the rest can only have been the TTL.
    assert shown(log, "t") == [(1, 2, "evicted", "mixed"), (3, 6, "evicted", "ttl"), (7, 7, "live", None)]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_ranges_go_on_where_an_answer_ended(is_sealed: bool) -> None:
    machine = Machine()
    log = machine.log
    log.append("t", [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(1, 101)])
    log.delete("t", match="even")
    if is_sealed:
        log.checkpoint()
        log = machine.restart()
    found: list[Range] = []
    cursor = 0
    while True:
        answer = log.engine.ranges("t", cursor, limit=7)
        assert len(answer.ranges) <= 7
        found += answer.ranges
        cursor = answer.next_from_seq
        if answer.complete:
            break
    assert [(each.first, each.last, each.kind) for each in found] == [
        (seq, seq, "live" if seq % 2 else "deleted") for seq in range(1, 101)
    ]


def test_ranges_are_cut_at_both_ends() -> None:
    log = Machine().log
    log.append("t", [{"data": n, "tag": "x" if 4 <= n <= 6 else None} for n in range(1, 11)])
    log.delete("t", match="x")
    assert shown(log, "t", 4, 8) == [(5, 6, "deleted", None), (7, 8, "live", None)]
    assert shown(log, "t", 10) == []
    assert shown(log, "t", 99) == []
    assert shown(log, "t", 8, 3) == []


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_deletion_from_the_front_is_no_loss(is_sealed: bool) -> None:
    """It leaves no bits behind: below the earliest record everything is dead."""
    machine = Machine()
    fill(machine.log, "t", 10)
    if is_sealed:
        machine.log.checkpoint()
    machine.log.delete("t", before_seq=5)
    assert shown(machine.log, "t") == [(1, 4, "deleted", None), (5, 10, "live", None)]
    machine.log.put("t", cap_records=3)
    assert shown(machine.restart(), "t") == [(1, 7, "evicted", "cap"), (8, 10, "live", None)]


def test_looking_changes_nothing() -> None:
    log = Machine().log
    fill(log, "t", 3)
    before = log.get("t", touch=False)
    log.engine.ranges("t")
    assert log.get("t", touch=False) == before


ENDINGS: tuple[Ending, ...] = ("close", "kill", "power")


@pytest.mark.parametrize("number", range(40))
def test_the_ranges_say_what_reads_say(number: int) -> None:
    """Random lives of a topic: writes, holes, deletes, caps, expiry, checkpoints and every kind of restart."""
    random = Random(number)
    machine = Machine(limits=Limits(max_limit=random.choice((3, 1000))))
    base = random.choice((1, 7))
    machine.log.put("t", seq_base=base, durability=random.choice(("disk", "memory", "ephemeral")))
    for _ in range(40):
        log = machine.log
        act = random.randrange(10)
        if act < 4:
            log.append("t", [{"data": 1, "tag": random.choice("abc")} for _ in range(random.randrange(1, 12))])
        elif act == 4:
            log.append("t", [{"hole": random.randrange(1, 4), "reason": "source_trim"}])
        elif act == 5:
            below = random.randrange(1, log.get("t").next_seq + 1)
            log.delete("t", match=random.choice(("a", "b", "c", None)), before_seq=below)
        elif act == 6:
            log.put("t", cap_records=random.choice((0, 0, 3, 20)), ttl_ms=random.choice((0, 500)))
        elif act == 7:
            machine.clock.advance(random.randrange(400))
        elif act == 8:
            log.checkpoint()
        else:
            machine.restart(random.choice(ENDINGS))
    log = machine.log
    state = log.get("t")
    found: list[Range] = []
    cursor, complete = 0, False
    while not complete:
        answer = log.engine.ranges("t", cursor)
        cursor, complete = answer.next_from_seq, answer.complete
        found += answer.ranges
    # Every seq is in one range.
    assert [each.first for each in found] == [base, *[each.last + 1 for each in found[:-1]]][: len(found)]
    assert not found or found[-1].last == state.head_seq
    assert {
        seq: (each.kind, each.reason is not None) for each in found for seq in range(each.first, each.last + 1)
    } == (fates(log, "t"))
    assert all(each.reason in HOLE_REASONS for each in found if each.kind == "hole")
    assert [seq for each in found if each.kind == "live" for seq in range(each.first, each.last + 1)] == live(log, "t")
