"""A log file that is not the last and ends early, between two frames, looks whole: the next one knows better."""

from __future__ import annotations

import pytest

from tests.clocks import ManualClock
from tests.simdisk import SimDisk
from topics.core.errors import CorruptDirectory
from topics.engine.verify import verify
from topics.log import Log
from topics.storage import frame
from topics.storage.frame import file_offset, position
from topics.storage.fs import read_file
from topics.storage.wal import wal_name


def two_lives() -> SimDisk:
    disk = SimDisk()
    for topic in ("first", "second"):
        log = Log(disk, clock=ManualClock(), background=False)
        log.put(topic, durability="fsync")
        for number in range(3):
            log.append(topic, [{"data": number}])
        disk = disk.kill()
    return disk


def boundaries(disk: SimDisk) -> list[int]:
    data = read_file(disk, wal_name(1))
    return [file_offset(item.at) for item in frame.scan(data, position(1, 0))][1:]


def cut(disk: SimDisk, at: int) -> SimDisk:
    data = read_file(disk, wal_name(1))[:at]
    disk.remove(wal_name(1))
    file = disk.create(wal_name(1))
    file.writev([data])
    file.sync()
    disk.sync_dir("wal")
    return disk


@pytest.mark.parametrize("at", boundaries(two_lives()))
def test_a_file_that_was_cut_between_frames_is_refused_and_repaired(at: int) -> None:
    disk = cut(two_lives(), at)
    with pytest.raises(CorruptDirectory, match=rf"{wal_name(1)} ends at offset {at}"):
        Log(disk.copy(), clock=ManualClock(), background=False)
    assert not verify(disk.copy(), clock=ManualClock()).ok
    report = verify(disk, clock=ManualClock(), repair=True)
    assert report.repaired
    log = Log(disk, clock=ManualClock(), background=False)
    assert [record["data"] for record in log.read("second") if isinstance(record, dict)] == [0, 1, 2]
    if any(state.topic == "first" for state in log.topics().topics):
        # Whatever is gone is told, and its seqs are not handed out again.
        assert log.append("first", [{"data": "new"}]).first_seq > 3
        assert log.get("first").holes == 1
    assert verify(disk.kill(), clock=ManualClock()).ok
