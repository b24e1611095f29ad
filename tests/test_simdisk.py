"""The simulated disk is itself under test: a crash test above it is worth as much as this page."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.simdisk import MODES, PAGE, Mode, PowerCut, SimDisk, SimFile
from topics.storage.fs import File, FileSystem, OsFileSystem, write_all

SEEDS = range(200)


def disk_with(synced: bytes, unsynced: bytes) -> tuple[SimDisk, SimFile]:
    """A durable file "log", and bytes behind it that were never synced."""
    disk = SimDisk(Random(1))
    disk.write("log", synced)
    file = disk.open("log")
    assert file.writev([unsynced]) == len(unsynced)
    return disk, file


def survivors(disk: SimDisk, mode: Mode) -> list[bytes]:
    return [disk.copy().power_cut(Random(seed), mode).read("log") for seed in SEEDS]


def surviving_names(disk: SimDisk, mode: Mode = "drop") -> set[tuple[str, ...]]:
    return {tuple(disk.copy().power_cut(Random(seed), mode).names()) for seed in SEEDS}


# The seam


def random_call(fs: FileSystem, files: list[File], rng: Random) -> object:
    """One call chosen by `rng`: its result, or the error it raised."""
    plain = ["a", "b", "d/a", "d/b", "d/e/a"]
    names = [*plain, "d", "d/e", "a/x"]

    def keep(file: File) -> None:
        files.append(file)

    def close() -> None:
        files.pop(rng.randrange(len(files))).close()

    anywhere: list[Callable[[], object]] = [
        lambda: keep(fs.create(rng.choice(names))),
        lambda: keep(fs.open(rng.choice(names))),
        lambda: fs.rename(rng.choice([*plain, "a/x"]), rng.choice([*plain, "a/x", "f"])),
        lambda: fs.remove(rng.choice(names)),
        lambda: fs.mkdir(rng.choice(["", "d", "d/e", "f"])),
        lambda: fs.listdir(rng.choice(["", "d", "d/e", "missing"])),
        lambda: fs.exists(rng.choice(names)),
        lambda: fs.sync_dir(rng.choice(["", "d", "d/e", "missing"])),
    ]
    in_a_file: list[Callable[[], object]] = [
        lambda: rng.choice(files).writev([rng.randbytes(rng.randint(0, 20)) for _ in range(rng.randint(1, 3))]),
        lambda: rng.choice(files).writev([b""] * 1025),
        lambda: rng.choice(files).pread(rng.randint(0, 30), rng.randint(0, 30)),
        lambda: rng.choice(files).truncate(rng.randint(-1, 30)),
        lambda: rng.choice(files).size(),
        lambda: rng.choice(files).sync(),
        close,
    ]
    try:
        return rng.choice(anywhere + in_a_file if files else anywhere)()
    except OSError as error:
        return type(error), error.errno


def test_any_sequence_of_calls_answers_as_the_real_disk_does(tmp_path: Path) -> None:
    for seed in range(20):
        simulated, real = SimDisk(), OsFileSystem(tmp_path / str(seed))
        simulated_files: list[File] = []
        real_files: list[File] = []
        for number in range(300):
            expected = random_call(real, real_files, Random(f"{seed} {number}"))
            assert random_call(simulated, simulated_files, Random(f"{seed} {number}")) == expected, (seed, number)
        for file in real_files:
            file.close()


def test_a_closed_file_is_a_bad_descriptor() -> None:
    _, file = disk_with(b"", b"")
    file.close()
    with pytest.raises(OSError, match=r"\[Errno 9\]"):
        file.sync()


def test_a_held_lock_refuses_a_second_one_until_released() -> None:
    disk = SimDisk()
    lock = disk.lock("lock")
    with pytest.raises(BlockingIOError):
        disk.lock("lock")
    lock.release()
    disk.lock("lock")


# What a power cut leaves of the bytes


@pytest.mark.parametrize("mode", MODES)
def test_synced_bytes_survive_every_power_cut(mode: Mode) -> None:
    disk, file = disk_with(b"a" * 5000, b"b" * 5000)
    file.sync()
    file.writev([b"c" * 20_000])
    assert all(content.startswith(b"a" * 5000 + b"b" * 5000) for content in survivors(disk, mode))


def test_drop_loses_all_unsynced_bytes() -> None:
    disk, _ = disk_with(b"old", b"new")
    assert set(survivors(disk, "drop")) == {b"old"}


def test_keep_loses_nothing() -> None:
    disk, _ = disk_with(b"old", b"new")
    assert set(survivors(disk, "keep")) == {b"oldnew"}


def test_torn_leaves_every_prefix_of_the_unsynced_bytes() -> None:
    disk, _ = disk_with(b"old", b"new")
    assert set(survivors(disk, "torn")) == {b"old", b"oldn", b"oldne", b"oldnew"}


def test_garbage_overwrites_only_unsynced_bytes() -> None:
    disk, _ = disk_with(b"old", b"n" * 100)
    found = survivors(disk, "garbage")
    assert all(content.startswith(b"old") and len(content) <= 103 for content in found)
    assert any(content.startswith(b"oldn") and set(content[3:]) != {ord("n")} for content in found)


def test_reorder_can_lose_a_page_and_keep_a_later_one() -> None:
    disk, _ = disk_with(b"old", b"n" * 4 * PAGE)
    found = survivors(disk, "reorder")
    assert all(3 <= len(content) <= 3 + 4 * PAGE for content in found)
    lost = bytes(PAGE)
    assert any(lost in content[PAGE : 3 * PAGE] and content[3 * PAGE :].startswith(b"nnn") for content in found)
    assert any(set(content[PAGE : 2 * PAGE]) - {0, ord("n")} for content in found)


def test_an_unsynced_truncate_may_be_lost_even_when_bytes_were_appended_after_it() -> None:
    disk, file = disk_with(b"abcdef", b"")
    file.truncate(2)
    file.writev([b"XY"])
    assert set(survivors(disk, "drop")) == {b"abcdef"}
    assert set(survivors(disk, "torn")) == {b"abcdef", b"ab", b"abX", b"abXY"}
    assert {b"abXY\0\0", b"abcd", b"abXY"} <= set(survivors(disk, "reorder"))


def test_a_sync_makes_a_truncate_durable() -> None:
    disk, file = disk_with(b"abcdef", b"")
    file.truncate(2)
    file.sync()
    assert set(survivors(disk, "drop")) == {b"ab"}


# What a power cut leaves of the names


def test_a_synced_file_in_an_unsynced_directory_may_be_gone() -> None:
    disk = SimDisk()
    disk.create("new").sync()
    assert surviving_names(disk) == {(), ("new",)}
    assert surviving_names(disk, "keep") == {("new",)}


def test_a_synced_directory_keeps_its_names() -> None:
    disk = SimDisk()
    disk.create("new")
    disk.sync_dir("")
    assert surviving_names(disk) == {("new",)}


def test_a_synced_directory_is_lost_with_its_own_unsynced_name() -> None:
    disk = SimDisk()
    disk.mkdir("wal")
    disk.create("wal/1")
    disk.sync_dir("wal")
    assert surviving_names(disk) == {(), ("wal/1",)}
    disk.sync_dir("")
    assert surviving_names(disk) == {("wal/1",)}


def test_unsynced_names_survive_in_the_order_they_were_changed() -> None:
    disk = SimDisk()
    disk.write("1", b"")
    disk.create("2")
    disk.remove("1")
    disk.create("3")
    assert surviving_names(disk) == {("1",), ("1", "2"), ("2",), ("2", "3")}


def test_a_rename_is_atomic_and_publishes_bytes_that_may_be_lost() -> None:
    disk = SimDisk()
    disk.write("log", b"old")
    file = disk.create("log.tmp")
    file.writev([b"new"])
    disk.rename("log.tmp", "log")
    assert set(survivors(disk, "drop")) == {b"old", b""}
    file.sync()
    assert set(survivors(disk, "drop")) == {b"old", b"new"}
    disk.sync_dir("")
    assert set(survivors(disk, "drop")) == {b"new"}


def test_syncing_the_target_directory_of_a_move_leaves_no_second_name() -> None:
    disk = SimDisk()
    disk.mkdir("a")
    disk.mkdir("b")
    disk.sync_dir("")
    disk.create("a/x")
    disk.rename("a/x", "b/y")
    disk.create("a/z")
    disk.sync_dir("b")
    assert surviving_names(disk) == {("b/y",), ("a/z", "b/y")}


# The machine goes off


def test_the_power_goes_in_the_chosen_call_and_stays_off() -> None:
    disk, file = disk_with(b"", b"x")
    disk.crash_at = disk.calls + 2
    file.sync()
    with pytest.raises(PowerCut):
        file.sync()
    calls: list[Callable[[], object]] = [
        file.sync,
        file.size,
        file.close,
        lambda: file.pread(1, 0),
        lambda: disk.create("new"),
        lambda: disk.listdir(""),
        disk.boot_id,
    ]
    for call in calls:
        with pytest.raises(PowerCut):
            call()
    assert disk.calls == 3


def test_a_cut_write_leaves_every_prefix_in_the_page_cache() -> None:
    found = set()
    for seed in SEEDS:
        disk = SimDisk(Random(seed))
        file = disk.create("log")
        disk.crash_at = 2
        with pytest.raises(PowerCut):
            file.writev([b"a", b"bc"])
        found.add(disk.kill().read("log"))
    assert found == {b"", b"a", b"ab", b"abc"}


def test_a_cut_sync_promises_nothing() -> None:
    found = set()
    for seed in SEEDS:
        disk = SimDisk(Random(seed))
        disk.write("log", b"")
        file = disk.open("log")
        file.writev([b"abc"])
        disk.crash_at = 2
        with pytest.raises(PowerCut):
            file.sync()
        found.add(disk.power_cut(Random(seed), "drop").read("log"))
    assert found == {b"", b"a", b"ab", b"abc"}


def test_a_cut_truncate_happened_or_not() -> None:
    found = set()
    for seed in SEEDS:
        disk = SimDisk(Random(seed))
        disk.write("log", b"abc")
        file = disk.open("log")
        disk.crash_at = 1
        with pytest.raises(PowerCut):
            file.truncate(1)
        found.add(disk.kill().read("log"))
    assert found == {b"abc", b"a"}


def test_a_cut_rename_happened_or_not() -> None:
    found = set()
    for seed in SEEDS:
        disk = SimDisk(Random(seed))
        disk.write("old", b"")
        disk.crash_at = 1
        with pytest.raises(PowerCut):
            disk.rename("old", "new")
        found.add(tuple(disk.kill().names()))
    assert found == {("old",), ("new",)}


def test_a_cut_directory_sync_makes_names_durable_up_to_some_point() -> None:
    found = set()
    for seed in range(20):
        disk = SimDisk(Random(seed))
        disk.create("1")
        disk.create("2")
        disk.crash_at = 3
        with pytest.raises(PowerCut):
            disk.sync_dir("")
        found.add(frozenset(surviving_names(disk)))
    assert found == {
        frozenset({(), ("1",), ("1", "2")}),
        frozenset({("1",), ("1", "2")}),
        frozenset({("1", "2")}),
    }


def test_a_cut_call_that_would_have_failed_is_a_power_cut() -> None:
    disk = SimDisk()
    disk.crash_at = 1
    with pytest.raises(PowerCut):
        disk.remove("missing")


def test_a_power_cut_boots_anew_with_everything_found_durable_and_locks_gone() -> None:
    disk, _ = disk_with(b"old", b"new")
    before = disk.boot_id()
    disk.lock("lock")
    booted = disk.power_cut(Random(0), "keep")
    assert booted.boot_id() != before
    booted.lock("lock")
    assert set(survivors(booted, "drop")) == {b"oldnew"}


def test_a_kill_keeps_boot_and_bytes_and_makes_nothing_durable() -> None:
    disk, file = disk_with(b"old", b"new")
    before = disk.boot_id()
    disk.lock("lock")
    next_process = disk.kill()
    assert next_process.boot_id() == before
    next_process.lock("lock")
    assert next_process.read("log") == b"oldnew"
    assert set(survivors(next_process, "drop")) == {b"old"}
    with pytest.raises(PowerCut):
        file.writev([b"late"])


def test_a_copy_and_its_original_go_their_own_ways_from_the_same_state() -> None:
    disk, file = disk_with(b"old", b"new")
    disk.create("unsynced")
    fault = disk.fail("remove", "", errno.EIO, times=1)
    other = disk.copy()
    with pytest.raises(OSError, match="log"):
        other.remove("log")
    other.remove("log")
    assert other.names() == {"unsynced": 0}
    assert fault.hits == 0
    file.sync()
    assert disk.read("log") == b"oldnew"
    assert surviving_names(disk) == {("log",), ("log", "unsynced")}
    assert surviving_names(other) == {("log",), ("log", "unsynced"), ("unsynced",)}


def test_the_same_seed_gives_the_same_disk() -> None:
    disk, _ = disk_with(b"old", b"n" * 3 * PAGE)
    for mode in MODES:
        assert survivors(disk, mode) == survivors(disk, mode)


# Faults


def test_a_fault_lets_some_calls_pass_then_fails_as_often_as_told() -> None:
    disk = SimDisk()
    disk.mkdir("wal")
    file = disk.create("wal/1")
    other = disk.create("other")
    fault = disk.fail("writev", "wal/", errno.ENOSPC, after=1, times=2)
    file.writev([b"a"])
    for _ in range(2):
        with pytest.raises(OSError, match=r"\[Errno 28\]"):
            file.writev([b"lost"])
    other.writev([b"fine"])
    file.writev([b"b"])
    assert (disk.read("wal/1"), fault.hits) == (b"ab", 2)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("pread", lambda disk, file: file.pread(1, 0)),
        ("sync", lambda disk, file: file.sync()),
        ("truncate", lambda disk, file: file.truncate(0)),
        ("create", lambda disk, file: disk.create("d/new")),
        ("open", lambda disk, file: disk.open("d/log")),
        ("rename", lambda disk, file: disk.rename("d/log", "elsewhere")),
        ("rename", lambda disk, file: disk.rename("outside", "d/new")),
        ("remove", lambda disk, file: disk.remove("d/log")),
        ("mkdir", lambda disk, file: disk.mkdir("d/new")),
        ("listdir", lambda disk, file: disk.listdir("d")),
        ("sync_dir", lambda disk, file: disk.sync_dir("d")),
    ],
)
def test_a_failed_call_changes_nothing(op: str, call: Callable[[SimDisk, SimFile], object]) -> None:
    disk = SimDisk()
    disk.write("d/log", b"content")
    disk.write("outside", b"")
    file = disk.open("d/log")
    fault = disk.fail(op, "d/", OSError(errno.EIO, "the platter is scratched"))
    before = disk.names()
    with pytest.raises(OSError, match="scratched"):
        call(disk, file)
    assert disk.names() == before
    assert fault.hits == 1


def test_a_fault_on_an_unknown_call_is_refused() -> None:
    with pytest.raises(ValueError, match="fsync"):
        SimDisk().fail("fsync", "", errno.EIO)


def test_after_a_failed_sync_a_forgetful_disk_promises_nothing_until_the_file_is_cut_back() -> None:
    disk, file = disk_with(b"old", b"new")
    disk.forgets_failed_syncs = True
    disk.fail("sync", "log", errno.EIO, times=1)
    with pytest.raises(OSError, match="log"):
        file.sync()
    file.sync()
    assert set(survivors(disk, "drop")) == {b"old"}
    file.truncate(3)
    file.writev([b"again"])
    file.sync()
    assert set(survivors(disk, "drop")) == {b"oldagain"}


def test_short_writes_take_at_least_a_byte_and_write_all_goes_on() -> None:
    disk = SimDisk()
    disk.short_writes(Random(0))
    write_all(disk.create("log"), [b"abc", b"defgh"])
    assert disk.read("log") == b"abcdefgh"
    assert disk.calls > 2


def test_a_full_disk_takes_what_fits_then_none_until_space_comes_back() -> None:
    disk, file = disk_with(b"old", b"")
    disk.write("other", b"123")
    disk.set_free(2)
    assert file.writev([b"n", b"ew"]) == 2
    with pytest.raises(OSError, match=r"\[Errno 28\]"):
        file.writev([b"w"])
    disk.remove("other")
    assert file.writev([b"wxyz"]) == 3
    file.truncate(0)
    assert file.writev([b"01234567890"]) == 8


# By hand


def test_a_flipped_bit_is_on_the_platter_too() -> None:
    disk, _ = disk_with(b"\x00\x00", b"")
    disk.flip_bit("log", 9)
    assert set(survivors(disk, "drop")) == {b"\x00\x02"}
