"""Deletion: permanent, at once, silent, of a point in time; its history, and the space it gives back (section 5)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import KEEPING, Ending, Machine, fill, gap, live, seqs, snapshot, told, write
from topics.core.errors import InvalidRequest
from topics.core.limits import DELETE_HISTORY, Limits
from topics.core.records import decode_write
from topics.core.selector import Selector
from topics.log import Log

TAGS = ["a", "b", None, "a.1", "a", "a.2", "b", None]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture(params=["memory", "segment"])
def log(request: pytest.FixtureRequest, machine: Machine) -> Log:
    """Records 1 to 8 with the tags of TAGS, in memory or in a segment file."""
    machine.log.append("t", [{"data": n, "tag": tag} for n, tag in enumerate(TAGS, 1)])
    if request.param == "segment":
        machine.log.checkpoint()
        return machine.restart()
    return machine.log


# Selecting


@pytest.mark.parametrize(
    ("selection", "gone"),
    [
        ({"before_seq": 4}, [1, 2, 3]),
        ({"before_seq": 1}, []),
        ({"before_seq": 0}, []),
        ({"before_seq": 9}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"before_seq": 2**53}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"match": "a"}, [1, 5]),
        ({"match": ["tag", "Eq", "a"]}, [1, 5]),
        ({"match": ("tag", "Eq", "b")}, [2, 7]),
        ({"match": ["tag", "Glob", "a*"]}, [1, 4, 5, 6]),
        ({"match": ["tag", "Glob", "a.*"]}, [4, 6]),
        ({"match": ["tag", "Glob", "*"]}, [1, 2, 4, 5, 6, 7]),
        ({"match": "nothing"}, []),
        ({"match": ""}, []),
        ({"match": "a", "before_seq": 5}, [1]),
        ({"match": "a", "before_seq": 6}, [1, 5]),
        ({"match": ["tag", "Glob", "a*"], "before_seq": 5}, [1, 4]),
        ({"match": "b", "before_seq": 1}, []),
    ],
)
def test_a_delete_takes_what_it_selects(log: Log, selection: dict[str, Any], gone: list[int]) -> None:
    kept = [seq for seq in range(1, 9) if seq not in gone]
    result = log.delete("t", **selection)
    assert live(log, "t") == kept
    assert (result.deleted, result.count, result.head_seq) == (len(gone), len(kept), 8)
    assert result.earliest_seq == (kept[0] if kept else 9)
    assert result.bytes == log.get("t").bytes == len(kept)


def test_a_star_in_a_bare_string_is_only_a_character(machine: Machine) -> None:
    machine.log.append("t", [{"data": 1, "tag": "a*"}, {"data": 2, "tag": "ab"}])
    machine.log.delete("t", match="a*")
    assert live(machine.log, "t") == [2]


def test_an_empty_tag_can_be_deleted(machine: Machine) -> None:
    machine.log.append("t", [{"data": 1, "tag": ""}, {"data": 2}])
    assert machine.log.delete("t", match="").deleted == 1
    assert live(machine.log, "t") == [2]


@pytest.mark.parametrize("tag", ["é", "😀", "a\x00b", 'quo"te', "%d", "x" * 256])
@pytest.mark.parametrize("sealed", [False, True])
def test_any_tag_can_be_deleted(machine: Machine, tag: str, sealed: bool) -> None:
    machine.log.append("t", [{"data": 1, "tag": tag}, {"data": 2, "tag": "other"}])
    if sealed:
        machine.log.checkpoint()
    assert machine.log.delete("t", match=tag).deleted == 1
    assert live(machine.log, "t") == [2]


def test_many_tags_in_a_segment_file_are_found(machine: Machine) -> None:
    machine.log.append("t", [{"data": n, "tag": f"user.{n:04}"} for n in range(1000)])
    machine.log.checkpoint()
    log = machine.restart()
    assert log.delete("t", match="user.0255").deleted == 1
    assert log.delete("t", match="user.0256").deleted == 1
    assert log.delete("t", match=["tag", "Glob", "user.05*"]).deleted == 100
    assert log.delete("t", match=["tag", "Glob", "user.0*"]).deleted == 898
    assert log.delete("t", match=["tag", "Glob", "z*"]).deleted == 0


def test_a_delete_without_a_selection_is_refused(log: Log) -> None:
    before = snapshot(log)
    with pytest.raises(InvalidRequest, match="before_seq or match"):
        log.delete("t")
    assert snapshot(log) == before


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"before_seq": -1}, "before_seq"),
        ({"before_seq": 2**53 + 1}, "before_seq"),
        ({"before_seq": 1.0}, "before_seq"),
        ({"before_seq": True}, "before_seq"),
        ({"before_seq": "5"}, "before_seq"),
        ({"match": 5}, "match"),
        ({"match": ["tag", "Glob", "a"]}, "match"),
        ({"match": ["tag", "Glob", "*a"]}, "match"),
        ({"match": ["tag", "Glob", "a**"]}, "match"),
        ({"match": ["data", "Eq", "a"]}, "match"),
        ({"match": ["tag", "Eq", None]}, "match"),
        ({"match": "\ud800"}, "match"),
        ({"before_seq": 5, "match": []}, "match"),
        ({"before_seq": 5, "purpose": "fun"}, "purpose"),
        ({"before_seq": 5, "purpose": None}, "purpose"),
    ],
)
def test_a_wrong_selection_deletes_nothing(log: Log, fields: dict[str, Any], named: str) -> None:
    before = snapshot(log)
    with pytest.raises(InvalidRequest, match=named):
        log.delete("t", **fields)
    assert snapshot(log) == before
    assert log.delete("t", before_seq=1).deleted == 0
    assert log.deletes("t").last_id == 1


# Silent, permanent, point in time


def test_a_deleted_gap_reads_silently(log: Log) -> None:
    log.delete("t", before_seq=4)
    log.delete("t", match="a")
    answer = log.diff("t")
    assert (gap(answer), seqs(answer), answer.caught_up) == (None, [4, 6, 7, 8], True)


def test_a_topic_deleted_to_its_head_reads_silently(log: Log) -> None:
    log.delete("t", before_seq=9)
    answer = log.diff("t")
    assert (gap(answer), answer.records, answer.next_from_seq, answer.caught_up) == (None, [], 8, True)


def test_a_delete_does_not_move_the_evict_floor(log: Log) -> None:
    log.delete("t", before_seq=4)
    log.delete("t", match=["tag", "Glob", "*"])
    state = log.get("t")
    assert (state.evict_floor, state.earliest_seq, state.count) == (1, 8, 1)


def test_a_delete_is_no_standing_filter(log: Log) -> None:
    log.delete("t", match="a", before_seq=2**53)
    log.append("t", [{"data": 9, "tag": "a"}])
    assert live(log, "t") == [2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("ending", [*KEEPING, "power"])
@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_delete_is_durable_when_it_is_answered(machine: Machine, durability: str, ending: Ending) -> None:
    machine.log.put("t", durability=durability)
    machine.log.append("t", [{"data": n, "tag": tag} for n, tag in enumerate(TAGS, 1)])
    machine.log.delete("t", match="a")
    machine.log.delete("t", before_seq=3)
    log = machine.restart(ending)
    assert [seq for seq in live(log, "t") if seq <= 8] == [3, 4, 6, 7, 8]


def test_a_delete_again_deletes_nothing(log: Log) -> None:
    assert log.delete("t", match="a").deleted == 2
    assert log.delete("t", match="a").deleted == 0
    assert log.delete("t", before_seq=6).deleted == 3
    assert log.delete("t", before_seq=6).deleted == 0


def test_a_write_staged_before_the_delete_is_deleted_and_one_after_is_not(machine: Machine) -> None:
    engine = machine.log.engine
    machine.log.put("t", durability="fsync")
    tagged = decode_write(b'{"records":[{"data":1,"tag":"a"}]}', Limits())
    engine.write("t", tagged)
    deleted = engine.delete("t", match=Selector("a"))
    engine.write("t", tagged)
    engine.flush()
    assert deleted.value().deleted == 1
    assert live(machine.log, "t") == [2]
    assert live(machine.restart("kill"), "t") == [2]


def test_deletes_of_open_and_sealed_records_mix(machine: Machine) -> None:
    log = machine.log
    for round_ in range(4):
        log.append("t", [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(10)])
        if round_ % 2:
            log.checkpoint()
    assert log.delete("t", match="odd").deleted == 20
    assert live(log, "t") == list(range(1, 41, 2))
    assert live(machine.restart("kill"), "t") == list(range(1, 41, 2))


def test_a_delete_in_a_segment_file_survives_the_next_checkpoint(machine: Machine) -> None:
    log = machine.log
    log.append("t", [{"data": n, "tag": tag} for n, tag in enumerate(TAGS, 1)])
    log.checkpoint()
    log.delete("t", match="a")
    log.checkpoint()
    log = machine.restart("kill")
    assert live(log, "t") == [2, 3, 4, 6, 7, 8]
    assert log.get("t").bytes == 6


# History


def test_the_history_lists_past_deletes(machine: Machine) -> None:
    log = machine.log
    write(log, "t", 1, 2, 3)
    log.delete("t", before_seq=2)
    machine.clock.advance(5)
    write(log, "t", 4)
    log.delete("t", match=["tag", "Glob", "x*"], purpose="trim")
    history = log.deletes("t")
    assert [past.to_json() for past in history.deletes] == [
        {"id": 1, "ts": 1_000_000, "head_seq": 3, "purpose": "erase", "before_seq": 2},
        {"id": 2, "ts": 1_000_005, "head_seq": 4, "purpose": "trim", "match": ["tag", "Glob", "x*"]},
    ]
    assert (history.last_id, history.complete) == (2, True)


def test_a_bare_string_is_listed_as_eq(machine: Machine) -> None:
    write(machine.log, "t", 1)
    machine.log.delete("t", match="x*", before_seq=5)
    (past,) = machine.log.deletes("t").deletes
    assert (past.to_json()["match"], past.to_json()["before_seq"]) == (["tag", "Eq", "x*"], 5)


def test_a_topic_without_deletes_has_an_empty_history(log: Log) -> None:
    history = log.deletes("t")
    assert (history.deletes, history.last_id, history.complete) == ([], 0, True)


@pytest.mark.parametrize(("after", "ids"), [(0, [1, 2, 3]), (1, [2, 3]), (3, []), (100, [])])
def test_a_follower_asks_for_what_came_after(log: Log, after: int, ids: list[int]) -> None:
    for seq in (2, 3, 4):
        log.delete("t", before_seq=seq)
    history = log.deletes("t", after)
    assert [past.id for past in history.deletes] == ids
    assert history.complete is True


@pytest.mark.parametrize("ending", [*KEEPING, "power"])
def test_the_history_survives_a_restart(machine: Machine, ending: Ending) -> None:
    write(machine.log, "t", 1, 2)
    machine.log.delete("t", match="x", purpose="trim")
    machine.log.checkpoint()
    machine.log.delete("t", before_seq=2)
    before = machine.log.deletes("t")
    log = machine.restart(ending)
    assert log.deletes("t") == before
    log.delete("t", before_seq=2)
    assert log.deletes("t").last_id == 3


def test_a_follower_that_fell_out_of_the_history_is_told(machine: Machine) -> None:
    write(machine.log, "t", 1)
    for _ in range(DELETE_HISTORY + 3):
        machine.log.delete("t", before_seq=1)
    log = machine.restart()
    history = log.deletes("t", 2)
    assert (history.complete, history.last_id, len(history.deletes)) == (False, DELETE_HISTORY + 3, DELETE_HISTORY)
    assert log.deletes("t", 3).complete is True


def test_a_new_instance_has_a_history_of_its_own(log: Log) -> None:
    log.delete("t", before_seq=2)
    log.drop("t")
    log.put("t")
    assert log.deletes("t").last_id == 0


# Space


def settle(machine: Machine) -> int:
    """The bytes of the directory after a few checkpoints: two of them are kept, with all that they need."""
    for _ in range(4):
        machine.log.checkpoint()
    return machine.disk_bytes


SIZE, COUNT = 1000, 2000


@pytest.fixture
def full(machine: Machine) -> int:
    """A topic of 2 MB, every tenth record tagged `keep`; the bytes of its directory."""
    for first in range(0, COUNT, 500):
        records = [{"data": "x" * (SIZE - 2), "tag": "drop" if n % 10 else "keep"} for n in range(first, first + 500)]
        machine.log.append("t", records)
    size = settle(machine)
    assert size > SIZE * COUNT
    return size


def test_space_comes_back_after_a_delete_by_seq(machine: Machine, full: int) -> None:
    machine.log.delete("t", before_seq=COUNT * 9 // 10 + 1)
    assert settle(machine) < full * 0.25
    assert len(live(machine.restart(), "t")) == COUNT // 10


def test_space_comes_back_after_a_delete_by_tag(machine: Machine, full: int) -> None:
    machine.log.delete("t", match="drop")
    assert settle(machine) < full * 0.25
    assert live(machine.restart(), "t") == list(range(1, COUNT + 1, 10))


def test_space_comes_back_after_an_eviction(machine: Machine, full: int) -> None:
    machine.log.put("t", cap_records=COUNT // 10)
    assert settle(machine) < full * 0.25
    assert told(machine.restart(), "t")[:2] == [(1, COUNT * 9 // 10, "cap"), COUNT * 9 // 10 + 1]


def test_space_comes_back_after_an_expiry(machine: Machine, full: int) -> None:
    machine.log.put("t", ttl_ms=10)
    machine.clock.advance(11)
    write(machine.log, "t", "new")
    assert settle(machine) < full * 0.05


def test_space_comes_back_after_a_topic_is_deleted(machine: Machine, full: int) -> None:
    machine.log.drop("t")
    assert settle(machine) < full * 0.01


def test_erased_bytes_are_gone_from_the_disk(machine: Machine) -> None:
    machine.log.append("t", [{"data": "the secret of user 7", "tag": "user.7"}, {"data": "other", "tag": "user.8"}])
    machine.log.checkpoint()
    machine.log.delete("t", match="user.7")
    settle(machine)
    assert not [name for name in machine.disk.names() if b"the secret" in machine.disk.read(name)]
    assert live(machine.log, "t") == [2]


def test_a_topic_under_a_cap_does_not_grow_without_bound(machine: Machine) -> None:
    machine.log.put("t", cap_records=100)
    sizes = []
    for _ in range(6):
        fill(machine.log, "t", 500, size=1000)
        sizes.append(settle(machine))
    assert sizes[-1] < 3 * 100 * 1000
