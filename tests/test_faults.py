"""A disk that fails: the error is typed, nothing refused is seen, reading goes on, a restart keeps every promise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import pytest

from tests.crash import (
    CLASSES,
    DEEP,
    ENDS,
    KILL,
    World,
    assert_same,
    dump,
    look,
    names,
    shrink_chunks,
    walk,
)
from tests.simdisk import COUNTED, SimDisk
from topics.core.config import Durability
from topics.core.errors import (
    CorruptDirectory,
    DirectoryInUse,
    ReadOnly,
    StorageFault,
    TopicsError,
    UnknownFormat,
)
from topics.log import Log, open_log


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_chunks(monkeypatch)


every_class = pytest.mark.parametrize("durability", CLASSES)
LASTING: tuple[Durability, ...] = ("memory", "disk", "fsync")


def a_world(durability: Durability = "disk") -> World:
    """Two topics with sealed records and some that are only in the WAL."""
    world = World(SimDisk(Random(7)))
    world.put("t", durability=durability)
    world.put("u", durability="fsync")
    world.append("t", 8, size=60, key="old")
    world.append("u", 3)
    world.checkpoint()
    world.append("t", 3, key="new")
    world.append("u", 2)
    world.tick()
    return world


def reopened(world: World, disk: SimDisk) -> Log:
    return Log(disk, clock=world.clock, options=world.options, background=False)


def assert_shows_what_was_acked(world: World) -> None:
    """Readers see every acked record and nothing else, also while nothing can be written."""
    for name, promise in world.promises.items():
        records, tombstones, _ = walk(world.log, name, include_tags=True)
        assert records == sorted(promise.records.values(), key=lambda record: record.seq)
        assert not tombstones
        assert world.log.get(name).head_seq == promise.head
    assert sorted(names(world.log)) == sorted(world.promises)


WRITES: dict[str, Callable[[World], object]] = {
    "append": lambda world: world.append("u", 2),
    "group": lambda world: world.group(("u", 1), ("t", 2)),
    "creation": lambda world: world.put("new", durability="fsync"),
    "creating append": lambda world: world.append("new", 2),
    "config": lambda world: world.put("t", cap_bytes=1 << 40),
    "delete": lambda world: world.delete("t", match="red"),
    "drop": lambda world: world.drop("t"),
    "transaction": lambda world: world.transact({"t": 1, "u": 2}),
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=[name.replace(" ", "_") for name in WRITES])


def assert_all_writes_are_refused(world: World) -> None:
    for write in WRITES.values():
        before = list(world.flight)
        with pytest.raises(ReadOnly) as refusal:
            write(world)
        assert (refusal.value.status, refusal.value.code) == (503, "read_only")
        world.flight = before


def assert_keeps_promises_after(world: World) -> None:
    """However this life ends now, the next one has what was acked; a refused write is there whole or not at all."""
    world.disk.heal()
    for end in ENDS:
        for seed in range(5 if DEEP else 1):
            again = world.reborn(world.end(end, Random(seed)), end)
            again.same_again()
            again.go_on()


# The log cannot be written


@every_class
@every_write
def test_a_failed_sync_of_the_log_refuses_the_write_and_all_later_ones(
    durability: Durability, write: Callable[[World], object]
) -> None:
    world = a_world(durability)
    fault = world.disk.fail("sync", "wal/", errno.EIO, times=1)
    with pytest.raises(ReadOnly, match="sync"):
        write(world)
    assert fault.hits == 1
    assert_shows_what_was_acked(world)
    assert_all_writes_are_refused(world)
    assert_shows_what_was_acked(world)
    assert_keeps_promises_after(world)


@every_class
@every_write
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failed_write_of_the_log_refuses_the_write_and_all_later_ones(
    durability: Durability, write: Callable[[World], object], error: int
) -> None:
    world = a_world(durability)
    fault = world.disk.fail("writev", "wal/", error, times=1)
    with pytest.raises(ReadOnly, match="writ"):
        write(world)
    assert fault.hits == 1
    assert_shows_what_was_acked(world)
    assert_all_writes_are_refused(world)
    assert_keeps_promises_after(world)


@every_class
@every_write
@pytest.mark.parametrize("free", [0, 1, 30, 47, 48, 49, 100, 200])
def test_a_disk_that_fills_up_in_the_middle_of_a_write_refuses_it_whole(
    durability: Durability, write: Callable[[World], object], free: int
) -> None:
    world = a_world(durability)
    world.disk.set_free(free)
    try:
        write(world)
    except ReadOnly:
        assert_shows_what_was_acked(world)
        assert_all_writes_are_refused(world)
    except StorageFault:
        # The spool of a transaction, which is not the log: nothing is staged, and writing goes on.
        world.disk.set_free(None)
        world.append("u", 1)
    assert_shows_what_was_acked(world)
    assert_keeps_promises_after(world)


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_a_failed_background_sync_turns_the_log_read_only(durability: Durability) -> None:
    world = a_world(durability)
    world.append("t", 2)
    fault = world.disk.fail("sync", "wal/", errno.EIO, times=1)
    world.clock.advance(100)
    world.log.engine.tick()
    assert fault.hits == 1
    assert_shows_what_was_acked(world)
    assert_all_writes_are_refused(world)
    assert_keeps_promises_after(world)


@every_class
def test_a_record_that_a_failed_sync_never_made_durable_is_not_taken_for_durable(durability: Durability) -> None:
    """Linux forgets the pages of a failed fsync: the next one succeeds and promises nothing."""
    world = a_world(durability)
    world.disk.forgets_failed_syncs = True
    world.append("t", 1)
    world.disk.fail("sync", "wal/", errno.EIO, times=1)
    with pytest.raises(ReadOnly):
        world.append("u", 1)
    world.disk.heal()
    # The process is restarted on the same machine, goes on, and only then the power goes.
    again = world.reborn(world.end(KILL, Random(1)), KILL)
    again.go_on()
    again.reborn(again.end("drop", Random(1)), "drop").go_on()


@every_class
def test_short_writes_everywhere_change_nothing(durability: Durability) -> None:
    world = World(SimDisk(Random(3)))
    world.disk.short_writes(Random(3))
    world.put("t", durability=durability)
    world.put("u", durability="fsync")
    world.append("t", 9, size=60, key="k")
    world.transact({"t": 2, "u": 3})
    world.checkpoint()
    world.delete("t", match="red")
    world.group(("t", 2), ("u", 1))
    world.checkpoint()
    world.append("t", 1)
    for end in ENDS:
        again = world.reborn(world.end(end, Random(1)), end)
        again.same_again()
        again.disk.short_writes(Random(4))
        again.go_on()


# A checkpoint that fails


def upkeep(world: World) -> None:
    world.append("t", 4, size=60)
    world.delete("t", before_seq=5)
    world.checkpoint()
    world.append("t", 1)
    world.delete("t", before_seq=13)
    world.checkpoint()
    world.append("u", 1)
    world.checkpoint()


FAULTS = [
    (op, prefix)
    for op in sorted(COUNTED - {"mkdir"})
    for prefix in ("wal/", "segments/", "checkpoints/")
    if (op, prefix) not in {("rename", "wal/"), ("rename", "segments/"), ("truncate", "segments/")}
    if (op, prefix) not in {("truncate", "checkpoints/"), ("truncate", "wal/")}
]


@pytest.mark.parametrize(("op", "prefix"), FAULTS)
@pytest.mark.parametrize("times", [1, None], ids=["once", "for_good"])
@pytest.mark.parametrize("durability", LASTING)
def test_a_failing_call_of_a_checkpoint_is_a_typed_error_and_loses_nothing(
    op: str, prefix: str, times: int | None, durability: Durability
) -> None:
    for after in range(1000):
        world = a_world(durability)
        fault = world.disk.fail(op, prefix, errno.EIO, after=after, times=times)
        with suppress(ReadOnly, StorageFault):
            upkeep(world)
        if not fault.hits:
            assert after > 0, "this fault never happens"
            return
        assert_shows_what_was_acked(world)
        if world.log.engine.committer.read_only is not None:
            assert_all_writes_are_refused(world)
        assert_keeps_promises_after(world)


@pytest.mark.parametrize(("op", "prefix"), [("sync", "wal/"), ("create", "wal/"), ("create", "segments/")])
def test_whoever_asks_for_a_checkpoint_is_told_that_it_failed(op: str, prefix: str) -> None:
    world = a_world()
    fault = world.disk.fail(op, prefix, errno.EIO, times=1)
    with pytest.raises(ReadOnly, match="Input/output error"):
        world.checkpoint()
    assert fault.hits
    assert_shows_what_was_acked(world)
    assert_all_writes_are_refused(world)


@pytest.mark.parametrize(("op", "prefix"), FAULTS)
@pytest.mark.parametrize("times", [1, None], ids=["once", "for_good"])
def test_a_close_that_fails_lets_the_directory_go_and_loses_nothing(op: str, prefix: str, times: int | None) -> None:
    for after in range(1000):
        world = a_world()
        world.append("t", 1)
        world.delete("t", before_seq=9)
        world.log.engine.checkpoint()
        fault = world.disk.fail(op, prefix, errno.EIO, after=after, times=times)
        with suppress(TopicsError):
            world.close()
        if not fault.hits:
            return
        world.disk.heal()
        reopened(world, world.disk.copy())
        assert_keeps_promises_after(world)


@pytest.mark.parametrize(("op", "prefix"), [*FAULTS, ("truncate", "wal/"), ("mkdir", ""), ("create", ""), ("sync", "")])
def test_a_failing_call_of_a_start_is_a_typed_error_and_the_next_start_works(op: str, prefix: str) -> None:
    crashed = a_world()
    crashed.append("t", 2)
    crashed.disk.fail("sync", "wal/", errno.EIO)
    with pytest.raises(ReadOnly):
        crashed.append("u", 1)
    crashed.disk.heal()
    for disk in (crashed.end("garbage", Random(5)), crashed.end("torn", Random(1)), SimDisk(Random(1))):
        was_new = not disk.names()
        for after in range(100):
            broken = disk.copy()
            fault = broken.fail(op, prefix, errno.EIO, after=after)
            with suppress(StorageFault, ReadOnly):
                reopened(crashed, broken)
            if not fault.hits:
                break
            broken.heal()
            if was_new:
                reopened(crashed, broken.kill())
            else:
                crashed.reborn(broken.kill(), "drop")


# The disk cannot be read


def test_a_read_error_in_a_segment_is_a_fault_and_never_a_hole() -> None:
    world = a_world("fsync")
    before = dump(world.log)
    log = reopened(world, world.disk.kill())
    disk = log.engine.transactions._fs
    assert isinstance(disk, SimDisk)
    fault = disk.fail("pread", "segments/", errno.EIO)
    for _ in range(2):
        with pytest.raises(StorageFault) as refusal:
            log.diff("t")
        assert refusal.value.status == 500
        assert "segments/" in refusal.value.message
    assert fault.hits
    assert log.get("t").holes == 0
    disk.heal()
    assert_same(dump(log), before)
    assert_same(dump(reopened(world, disk.kill())), before)


USES: list[Callable[[Log], object]] = [
    lambda log: log.diff("t"),
    lambda log: log.seek("t", 1_000_050),
    lambda log: log.delete("t", match="blue"),
    lambda log: log.delete("t", before_seq=3),
    lambda log: log.put("t", cap_records=4),
    lambda log: log.checkpoint(),
]


@pytest.mark.parametrize("op", ["pread", "open", "size"])
def test_no_read_error_anywhere_is_ever_a_hole(op: str) -> None:
    world = a_world("fsync")
    world.delete("t", match="red")
    for after in range(1000):
        disk = world.disk.copy().kill()
        fault = disk.fail(op, "", errno.EIO, after=after, times=3)
        try:
            log = reopened(world, disk)
        except StorageFault:
            disk.heal()
            log = reopened(world, disk.kill())
        for use in USES:
            with suppress(StorageFault):
                use(log)
        if not fault.hits:
            assert after > 0
            return
        disk.heal()
        for name in names(log):
            assert not look(log, name).holes


# Directories


def test_a_directory_that_is_open_is_not_opened_again() -> None:
    disk = SimDisk()
    log = Log(disk, background=False)
    with pytest.raises(DirectoryInUse):
        Log(disk, background=False)
    log.append("t", [{"data": 1}])
    log.close()
    again = Log(disk, background=False)
    assert again.diff("t").records_json.endswith(b'"data":1}]')


def test_a_directory_on_a_real_disk_that_is_open_is_not_opened_again(tmp_path: Path) -> None:
    with open_log(tmp_path), pytest.raises(DirectoryInUse, match=str(tmp_path)):
        open_log(tmp_path)
    open_log(tmp_path).close()


@pytest.mark.parametrize("content", [b"", b"topics data directory, format 2\n", b"\xff" * 100])
def test_an_unknown_format_is_refused_with_a_way_out(content: bytes) -> None:
    world = a_world()
    world.close()
    disk = world.disk.kill()
    disk.write("FORMAT", content)
    for _ in range(2):
        with pytest.raises(UnknownFormat, match="FORMAT"):
            reopened(world, disk)
    disk.write("FORMAT", b"topics data directory, format 1\n")
    world.reborn(disk, KILL)


def test_a_log_without_a_format_file_is_refused() -> None:
    world = a_world()
    disk = world.disk.kill()
    disk.remove("FORMAT")
    with pytest.raises(UnknownFormat, match="FORMAT"):
        reopened(world, disk)


def test_a_missing_file_of_the_log_is_refused_by_name() -> None:
    world = a_world()
    for name in [name for name in world.disk.names() if name.startswith("wal/")][1:]:
        disk = world.disk.copy().kill()
        disk.remove(name)
        with pytest.raises(CorruptDirectory, match=name):
            reopened(world, disk)


def test_a_missing_segment_file_is_a_corrupt_hole() -> None:
    world = a_world("fsync")
    disk = world.disk.kill()
    for name in disk.names():
        if name.startswith("segments/"):
            disk.remove(name)
    log = reopened(world, disk)
    records, tombstones, _ = walk(log, "t")
    assert [record.seq for record in records] == [9, 10, 11]
    assert [(each.gap_from, each.gap_to, each.reason) for each in tombstones] == [(1, 8, "corrupt")]


# Real processes on a real disk

CHILD = """
import sys
import topics
from topics.engine.options import Options
log = topics.open(sys.argv[1], options=Options(checkpoint_bytes=20_000, cache_bytes=1 << 16, reclaim_bytes=20_000))
n = int(sys.argv[2])
classes = ("ephemeral", "memory", "disk", "fsync")
for durability in classes:
    log.put(durability, durability=durability)
print("ready", flush=True)
while True:
    for durability in classes:
        n += 1
        result = log.append(durability, [{"data": [n, i, "x" * (n % 90)]} for i in range(n % 4 + 1)])
        for i, seq in enumerate(result.seqs):
            print(durability, seq, n, i, flush=True)
    if n % 40 == 0:
        low = log.get("disk").head_seq - 60
        if low > 0:
            print("deleting", low, flush=True)
            log.delete("disk", before_seq=low)
            print("deleted", low, flush=True)
"""


def lives(path: Path, rounds: int) -> Iterator[list[list[str]]]:
    """What a child said before it was killed, life after life."""
    rng = Random(11)
    for number in range(rounds):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(number * 1_000_000)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(rng.randint(1, 400))]
        os.kill(child.pid, signal.SIGKILL)
        lines += child.stdout.readlines()
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        assert lines[0] == "ready\n", lines[0]
        # The last line may be cut off: what was printed in part was acked all the same, but cannot be told.
        yield [line.split() for line in lines if line.endswith("\n")]


def test_a_process_that_is_killed_at_any_moment_loses_nothing_acked(tmp_path: Path) -> None:
    acked: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in CLASSES}
    floor = wanted = 0
    for said in lives(tmp_path, 15):
        for word, *numbers in said:
            if word == "deleting":
                wanted = int(numbers[0])
            elif word == "deleted":
                floor = int(numbers[0])
            elif word != "ready":
                seq, n, i = map(int, numbers)
                assert seq not in acked[word], "a seq was handed out twice"
                acked[word][seq] = (n, i)
        with open_log(tmp_path) as log:
            past = log.deletes("disk").deletes
            if past and past[-1].before_seq == wanted:
                # A delete that was in flight: the history says that it is there, so it must be there whole.
                floor = wanted
            for name in CLASSES:
                check_topic(log, name, acked[name], floor if name == "disk" else 0)


def check_topic(log: Log, name: str, acked: dict[int, tuple[int, int]], floor: int) -> None:
    found: dict[int, tuple[int, int]] = {}
    lost: list[tuple[int, int]] = []
    cursor = 0
    while True:
        answer = log.diff(name, cursor, limit=1000)
        if answer.tombstone is not None:
            lost.append((answer.tombstone.gap_from, answer.tombstone.gap_to))
        for record in msgspec.json.decode(answer.records_json):
            n, i, text = record["data"]
            assert len(text) == n % 90
            assert record["$seq"] not in found
            found[record["$seq"]] = (n, i)
        cursor = answer.next_from_seq
        if answer.caught_up:
            break
    state = log.get(name)
    assert not acked or state.head_seq >= max(acked)
    assert not [seq for seq in found if seq < floor], "deleted records came back"
    for seq, what in acked.items():
        if seq in found:
            assert found[seq] == what
        elif seq >= floor:
            assert name in ("ephemeral", "memory"), f"{name}: {seq} is lost"
            assert any(first <= seq <= last for first, last in lost), f"{name}: {seq} is missing, and nobody is told"
    if name in ("disk", "fsync"):
        assert not lost
        assert state.holes == 0
