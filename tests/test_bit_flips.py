"""One flipped bit anywhere in any file: a refusal that names the place, or the same data with every loss told."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest

from tests.crash import CLASSES, DEEP, ManualClock, View, World, covers, dump, shrink_chunks
from tests.simdisk import SimDisk
from topics.core.config import Durability
from topics.core.errors import CorruptDirectory, TopicsError, UnknownFormat
from topics.log import Log

SHARDS = 12
"""Each file's bytes are dealt out over so many tests."""

STRIDE = 1 if DEEP else 2
"""Of a body's bytes, every so-manieth is tried; of the small files and the last bytes of each, all."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_chunks(monkeypatch, 300)


def a_life(world: World) -> None:
    """Something of everything: two checkpoints and more, sealed and merged records, deletes, dedupe, transactions."""
    for durability in CLASSES:
        world.put(durability, durability=durability)
        world.append(durability, 5, size=40, key=f"first {durability}")
    world.checkpoint()
    world.log.append("fsync", [{"data": 1, "client_seq": 3}], client_id="strict")
    world.transact({"disk": 2, "fsync": 1, "memory": 1})
    world.delete("disk", match="red")
    world.append("disk", 2, size=200)
    world.checkpoint()
    world.append("fsync", 2, key="last")
    world.put("memory", cap_records=4)
    world.put("gone", durability="disk")
    world.drop("gone")
    world.checkpoint()
    world.append("disk", 2, key="last")
    world.group(("fsync", 1), ("memory", 1), ("disk", 1))
    world.delete("fsync", before_seq=3)


def closed() -> tuple[SimDisk, dict[str, Any]]:
    """A directory after a clean close, and what is in it."""
    world = World(SimDisk(Random(1)))
    a_life(world)
    world.close()
    return _with_contents(world.disk.kill())


def killed() -> tuple[SimDisk, dict[str, Any]]:
    """A directory after a kill, with much of it in the WAL."""
    world = World(SimDisk(Random(1)))
    a_life(world)
    world.tick()
    world.append("fsync", 1)
    world.append("disk", 1)
    return _with_contents(world.disk.kill())


def _with_contents(disk: SimDisk) -> tuple[SimDisk, dict[str, Any]]:
    return disk, dump(opened(disk.copy()))


def opened(disk: SimDisk) -> Log:
    return Log(disk, clock=ManualClock(2_000_000), background=False)


ENDS = {"closed": closed, "killed": killed}


def positions(disk: SimDisk, shard: int) -> list[tuple[str, int]]:
    """The bits that one test flips."""
    rng = Random(shard)
    found: list[tuple[str, int]] = []
    for name, size in disk.names().items():
        for offset in range(size):
            if offset % SHARDS == shard and (offset // SHARDS % STRIDE == 0 or size - offset < 100 or size < 100):
                found.append((name, offset * 8 + rng.randrange(8)))
    return found


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("end", ENDS)
def test_a_flipped_bit_is_refused_by_name_or_told_as_lost_and_never_wrong_data(end: str, shard: int) -> None:
    disk, wanted = ENDS[end]()
    outcomes = {"refused": 0, "same": 0, "lost": 0}
    for name, bit in positions(disk, shard):
        flipped = disk.copy()
        flipped.flip_bit(name, bit)
        try:
            log = opened(flipped)
        except (CorruptDirectory, UnknownFormat) as refusal:
            assert_names_the_place(refusal, name, bit >> 3)
            outcomes["refused"] += 1
            continue
        found = dump(log)
        try:
            lost = assert_differs_only_in_told_losses(found, wanted)
        except AssertionError as error:
            raise AssertionError(f"bit {bit & 7} of byte {bit >> 3} of {name}: {error}") from None
        outcomes["lost" if lost else "same"] += 1
        # What one life has told, the next one tells as well.
        if lost and bit % 5 == 0:
            assert dump(opened(flipped.kill())) == found
    assert all(outcomes.values()), outcomes


def assert_names_the_place(refusal: TopicsError, name: str, offset: int) -> None:
    """The message has the file, and an offset at or in front of the damage."""
    assert name in refusal.message, refusal.message
    if isinstance(refusal, CorruptDirectory):
        numbers = [int(number) for number in re.findall(r"offset (\d+)", refusal.message)]
        assert numbers, refusal.message
        assert numbers[0] <= offset, refusal.message


# What a restart without a clean close may cost a class, if the damage was in what said that it was clean.
ALSO: dict[str, set[str]] = {"ephemeral": {"restart"}, "memory": {"crash", "cap"}, "disk": set(), "fsync": set()}


def assert_differs_only_in_told_losses(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether something is lost. Every record is there, byte for byte, or under a tombstone; all else is the same."""
    assert sorted(found) == sorted(wanted), "topics are missing"
    assert found["$clients"] == wanted["$clients"]
    lost = False
    for name in CLASSES:
        ours, theirs = found[name], wanted[name]
        assert isinstance(ours, View)
        assert isinstance(theirs, View)
        have = {record.seq: record for record in ours.records}
        old = theirs.covered
        reasons = {"corrupt", *ALSO[name], *(tombstone.reason for tombstone in theirs.tombstones)}
        for tombstone in ours.tombstones:
            assert tombstone.reason in reasons, f"{name}: {tombstone}"
        for record in theirs.records:
            if record.seq in have:
                assert have.pop(record.seq) == record
            else:
                assert covers(ours.covered, record.seq, record.seq), f"{name}: {record.seq} is silently missing"
                lost = True
        assert not have, f"{name}: records that were not there before: {have}"
        for first, last in old:
            assert covers(ours.covered, first, last), f"{name}: the loss of {first} to {last} is forgotten"
        head, was = ours.state["head_seq"], theirs.state["head_seq"]
        assert head == was or (head > was and covers(ours.covered, was + 1, head) and ALSO[name]), (
            f"{name}: head {head}"
        )
        assert ours.state["config"] == theirs.state["config"]
        assert ours.state["epoch"] == theirs.state["epoch"]
        assert ours.keys == theirs.keys
        assert ours.producers == theirs.producers
        # The head at the time of a delete is not known to a log that never saw an ephemeral record.
        if name != "ephemeral":
            assert ours.deletes == theirs.deletes
    return lost


# The tail


def test_a_torn_tail_is_cut_and_what_is_before_it_stays() -> None:
    world = World(SimDisk(Random(1)))
    world.put("t", durability="fsync")
    for _ in range(6):
        world.append("t", 2)
    disk = world.disk.kill()
    [last] = [name for name in disk.names() if name.startswith("wal/")]
    whole = disk.read(last)
    wanted = dump(opened(disk.copy()))["t"].records
    heads: list[int] = []
    for size in range(len(whole) + 1):
        torn = disk.copy()
        torn.write(last, whole[:size])
        log = opened(torn)
        if not log.topics().topics:
            assert not heads, "the topic was there when less of the log was"
            continue
        found = dump(log)["t"]
        assert found.records == wanted[: len(found.records)]
        assert not found.tombstones
        heads.append(found.state["head_seq"])
        assert len(found.records) == heads[-1]
    assert heads == sorted(heads)
    assert set(heads) == set(range(0, 13, 2)), "a batch is cut whole"


@pytest.mark.parametrize("at", [0, 1, 2, 50, 100])
def test_damage_with_good_frames_behind_it_refuses_the_start_and_names_file_and_offset(at: int) -> None:
    world = World(SimDisk(Random(1)))
    world.put("t", durability="fsync")
    for _ in range(10):
        world.append("t", 1)
    disk = world.disk.kill()
    disk.flip_bit("wal/000000000001.wal", (100 + at * 5) * 8)
    for _ in range(2):
        with pytest.raises(CorruptDirectory, match=r"wal/000000000001\.wal .*offset \d+") as refusal:
            opened(disk)
        assert refusal.value.detail["file"] == "wal/000000000001.wal"
        assert refusal.value.detail["offset"] <= 100 + at * 5


def test_damage_in_what_was_proven_synced_is_refused_after_a_power_loss_too() -> None:
    world = World(SimDisk(Random(1)))
    world.put("t", durability="fsync")
    world.append("t", 3)
    world.tick()
    world.append("t", 1)
    disk = world.disk.power_cut(Random(1), "keep")
    disk.flip_bit("wal/000000000001.wal", 200 * 8)
    with pytest.raises(CorruptDirectory, match=r"wal/000000000001\.wal .*offset \d+"):
        opened(disk)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_damaged_segment_becomes_a_hole_that_stays(durability: Durability) -> None:
    world = World(SimDisk(Random(1)))
    world.put("t", durability=durability)
    world.append("t", 20, size=60)
    world.checkpoint()
    disk = world.disk.kill()
    name = next(name for name in disk.names() if name.startswith("segments/"))
    disk.flip_bit(name, disk.read(name).index(b'"n":7') * 8)
    log = opened(disk)
    found = dump(log)["t"]
    [tombstone] = found.tombstones
    assert tombstone.reason == "corrupt"
    assert tombstone.gap_from <= 7 <= tombstone.gap_to
    there = {record.seq for record in found.records}
    assert there == {seq for seq in range(1, 21) if not tombstone.gap_from <= seq <= tombstone.gap_to}
    assert len(there) >= 10, "one bad byte costs a chunk, not a file"
    assert log.get("t").holes == 1
    log.checkpoint()
    log.close()
    again = opened(disk.kill())
    assert dump(again)["t"].tombstones == found.tombstones
    assert dump(again)["t"].records == found.records
