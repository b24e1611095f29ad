"""The offline check: it finds every damage, writes nothing, and a repair leaves a directory that opens and tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import topics
from tests.clocks import ManualClock
from tests.simdisk import SimDisk
from topics.core.errors import CorruptDirectory, DirectoryInUse, UnknownFormat
from topics.core.tombstone import Tombstone
from topics.engine.verify import verify
from topics.log import Log
from topics.storage import frame
from topics.storage.frame import Frame
from topics.storage.wal import WalFile, wal_name, wal_numbers


def open_log(disk: SimDisk) -> Log:
    return Log(disk, clock=ManualClock(), background=False)


def killed_with_three_topics() -> SimDisk:
    """Topics a, b, c with ten single appends each, in turns, in the WAL only."""
    disk = SimDisk()
    log = open_log(disk)
    for name in "abc":
        log.put(name, durability="fsync")
    for number in range(1, 11):
        for name in "abc":
            log.append(name, [{"data": f"{name}{number}"}])
    return disk.kill()


def closed_with_one_topic(records: int = 50) -> SimDisk:
    disk = SimDisk()
    log = open_log(disk)
    log.append("a", [{"data": number, "tag": "even" if number % 2 == 0 else "odd"} for number in range(records)])
    log.delete("a", match="even")
    log.close()
    return disk.kill()


def frames_of(disk: SimDisk, number: int) -> list[Frame]:
    items = frame.scan(WalFile(disk, number).data, frame.position(number, 0))
    return [item for item in items if isinstance(item, Frame)]


def append_frame(disk: SimDisk, epoch: int, first: int) -> Frame:
    from topics.engine import frames

    for number in wal_numbers(disk):
        for item in frames_of(disk, number):
            if item.kind == frames.APPEND and item.epoch == epoch and item.first == first:
                return item
    raise AssertionError("no such append in the WAL")


def flip(disk: SimDisk, at: int, offset: int) -> None:
    disk.flip_bit(wal_name(frame.file_number(at)), (frame.file_offset(at) + offset) * 8)


def seen(log: Log, topic: str) -> tuple[list[int], list[tuple[int, int, str]]]:
    items = list(log.read(topic))
    records = [item["$seq"] for item in items if not isinstance(item, Tombstone)]
    losses = [(item.gap_from, item.gap_to, str(item.reason)) for item in items if isinstance(item, Tombstone)]
    return records, losses


def test_a_sound_directory_is_ok_and_counted() -> None:
    report = verify(closed_with_one_topic())
    assert report.ok
    assert (report.topics, report.records, report.bytes) == (1, 25, sum(len(str(n)) for n in range(1, 50, 2)))


def test_a_killed_directory_is_ok_too() -> None:
    report = verify(killed_with_three_topics())
    assert report.ok
    assert (report.topics, report.records) == (3, 30)


@pytest.mark.parametrize("disk", [closed_with_one_topic(), killed_with_three_topics()], ids=["closed", "killed"])
def test_a_check_changes_no_file(disk: SimDisk) -> None:
    before = {name: disk.read(name) for name in disk.names() if name != "LOCK"}
    verify(disk)
    assert {name: disk.read(name) for name in disk.names() if name != "LOCK"} == before


def test_a_directory_in_use_is_refused() -> None:
    disk = SimDisk()
    log = open_log(disk)
    with pytest.raises(DirectoryInUse):
        verify(disk)
    log.close()


def test_an_unknown_format_is_refused_with_the_way_out() -> None:
    disk = closed_with_one_topic()
    disk.write("FORMAT", b"topics data directory, format 99\n")
    with pytest.raises(UnknownFormat, match="version of topics that wrote it"):
        verify(disk)


def test_a_damaged_append_is_named_exactly() -> None:
    disk = killed_with_three_topics()
    bad = append_frame(disk, epoch=2, first=4)
    flip(disk, bad.at, frame.HEADER + 8)
    with pytest.raises(CorruptDirectory, match=rf"{wal_name(1)} is damaged at offset {frame.file_offset(bad.at)}"):
        open_log(disk)
    (problem,) = verify(disk.kill()).problems
    assert (problem.topic, problem.first, problem.last) == ("b", 4, 4)
    assert problem.where == f"{wal_name(1)} at offset {frame.file_offset(bad.at)}"


def test_repair_turns_a_damaged_append_into_a_hole_of_its_range_and_keeps_the_rest() -> None:
    disk = killed_with_three_topics()
    flip(disk, append_frame(disk, epoch=2, first=4).at, frame.HEADER + 8)
    report = verify(disk, repair=True)
    assert report.repaired
    disk = disk.kill()
    assert verify(disk).ok
    log = open_log(disk)
    assert seen(log, "a") == (list(range(1, 11)), [])
    assert seen(log, "b") == ([1, 2, 3, 5, 6, 7, 8, 9, 10], [(4, 4, "corrupt")])
    assert log.append("b", [{"data": 11}]).first_seq == 11


def test_repair_after_a_lost_header_finds_the_hole_by_the_seqs_and_reuses_none() -> None:
    disk = killed_with_three_topics()
    bad = append_frame(disk, epoch=2, first=10)
    flip(disk, bad.at, 6)
    report = verify(disk, repair=True)
    assert [problem.what for problem in report.problems] == ["lost: unreadable bytes"]
    log = open_log(disk.kill())
    records, losses = seen(log, "b")
    assert records == list(range(1, 10))
    assert losses[0][0] == 10
    assert log.append("b", [{"data": 11}]).first_seq > 10


def test_repair_lists_the_events_of_a_topic_whose_creation_is_lost() -> None:
    from topics.engine import frames

    disk = killed_with_three_topics()
    (created,) = [item for item in frames_of(disk, 1) if item.kind == frames.CREATE and item.epoch == 3]
    flip(disk, created.at, frame.HEADER + 3)
    report = verify(disk, repair=True)
    lost = [problem.what for problem in report.problems]
    assert "lost: create topic" in lost
    assert lost.count("lost: append of a topic whose creation is lost") == 10
    log = open_log(disk.kill())
    assert [state.topic for state in log.topics().topics] == ["a", "b"]


def test_repair_of_a_missing_log_file_keeps_what_is_left() -> None:
    disk = SimDisk()
    log = open_log(disk)
    log.append("a", [{"data": 1}], config={"durability": "fsync"})
    log.checkpoint()
    log.append("a", [{"data": 2}])
    disk = disk.kill()
    disk.remove(wal_name(max(wal_numbers(disk))))
    with pytest.raises(CorruptDirectory, match="is missing"):
        open_log(disk)
    disk = disk.kill()
    assert verify(disk, repair=True).repaired
    log = open_log(disk.kill())
    records, losses = seen(log, "a")
    assert records == [1]
    assert losses[0][0] == 2
    assert losses[0][2] == "corrupt"


def test_damaged_sealed_records_become_a_hole_of_their_chunk() -> None:
    disk = closed_with_one_topic()
    (segment,) = [name for name in disk.names() if name.startswith("segments/")]
    index_length = frame.decode_header(disk.read(segment), frame.position(1, 0))
    assert index_length is not None
    body = frame.HEADER + index_length.length + frame.HEADER + 20
    disk.flip_bit(segment, body * 8)
    (problem,) = verify(disk).problems
    assert (problem.topic, problem.first, problem.last) == ("a", 1, 50)
    assert verify(disk.kill(), repair=True).repaired


def test_a_repaired_sealed_chunk_is_told_to_readers() -> None:
    disk = closed_with_one_topic()
    (segment,) = [name for name in disk.names() if name.startswith("segments/")]
    disk.flip_bit(segment, (frame.HEADER + 30) * 8)
    assert verify(disk, repair=True).repaired
    disk = disk.kill()
    assert verify(disk).ok
    log = open_log(disk)
    assert seen(log, "a") == ([], [(1, 50, "corrupt")])
    assert log.get("a").count == 0


def test_a_damaged_checkpoint_is_reported_and_an_older_one_serves() -> None:
    disk = SimDisk()
    log = open_log(disk)
    log.append("a", [{"data": 1}])
    log.checkpoint()
    log.append("a", [{"data": 2}])
    log.close()
    disk = disk.kill()
    newest = max(name for name in disk.names() if name.startswith("checkpoints/"))
    disk.flip_bit(newest, 8 * 60)
    (problem,) = verify(disk).problems
    assert problem.where == newest
    log = open_log(disk.kill())
    assert seen(log, "a") == ([1, 2], [])


def test_progress_is_told_from_zero_to_one() -> None:
    told: list[tuple[str, float]] = []
    verify(closed_with_one_topic(), on_progress=lambda what, part: told.append((what, part)))
    assert ("log", 1.0) in told
    assert told[-1] == ("topics", 1.0)


def test_the_command_finds_and_repairs_a_damaged_directory(tmp_path: Path) -> None:
    place = tmp_path / "data"
    with topics.open(place) as log:
        log.append("a", [{"data": number} for number in range(10)])
    (segment,) = (place / "segments").iterdir()
    damaged = bytearray(segment.read_bytes())
    damaged[frame.HEADER + 30] ^= 1
    segment.write_bytes(damaged)

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "topics", "verify", str(place), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    found = run()
    assert found.returncode == 1
    assert "corrupt records (topic a, seqs 1 to 10)" in found.stdout
    assert run("--repair").returncode == 0
    assert run().stdout.strip().endswith("sound")
    with topics.open(place) as log:
        assert seen(log, "a") == ([], [(1, 10, "corrupt")])


def test_the_command_refuses_what_is_no_data_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "topics", "verify", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "is not a data directory" in done.stderr
