"""A topic may be far larger than memory: what is kept of it is bounded, and everything still reads right."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

import topics
from tests.helpers import Machine, live, told
from topics.engine.options import Options
from topics.engine.topic import Topic
from topics.log import Log

MIB = 1 << 20
CACHE = 1 * MIB
SMALL = Options(cache_bytes=CACHE, checkpoint_bytes=2 * MIB, reclaim_bytes=4 * MIB)


def data_of(seq: int) -> str:
    """About 1 KB that belongs to this seq alone."""
    return f"{seq:08}" * 125


def fill_to(log: Log, head: int, tag: str | None = None) -> None:
    start = log.get("t").head_seq + 1
    for first in range(start, head + 1, 100):
        seqs = range(first, min(first + 100, head + 1))
        log.append("t", [{"data": data_of(seq), "tag": tag or f"tag.{seq % 10}"} for seq in seqs])


def topic_of(log: Log) -> Topic:
    return log.engine.state.by_name["t"]


def resident(log: Log) -> int:
    """Bytes of records that the topic itself holds in memory, outside the cache."""
    chunks = [chunk for extent in topic_of(log).extents for chunk in extent.chunks or ()]
    return sum(len(chunk.body or b"") for chunk in chunks)


def cached(log: Log) -> int:
    return log.engine.state.store._chunks.bytes


@pytest.fixture
def machine() -> Machine:
    machine = Machine(options=SMALL)
    machine.log.put("t")
    return machine


def check_all(log: Log, first: int, last: int) -> None:
    """Reads everything in order and compares every byte."""
    seq = first
    for record in log.read("t", first - 1, limit=1000):
        assert isinstance(record, dict)
        assert (record["$seq"], record["data"]) == (seq, data_of(seq))
        seq += 1
    assert seq == last + 1


def test_a_topic_much_larger_than_the_cache_reads_right(machine: Machine) -> None:
    fill_to(machine.log, 12_000)
    check_all(machine.log, 1, 12_000)
    check_all(machine.restart(), 1, 12_000)


def test_what_a_topic_holds_in_memory_stays_bounded_while_it_grows(machine: Machine) -> None:
    most = 0
    for head in range(500, 12_001, 500):
        fill_to(machine.log, head)
        most = max(most, resident(machine.log))
    assert MIB < most < 6 * MIB
    assert machine.log.get("t").bytes > 11 * MIB


def test_the_cache_stays_bounded_while_everything_is_read(machine: Machine) -> None:
    fill_to(machine.log, 12_000)
    log = machine.restart()
    most = 0
    for seq in range(0, 12_000, 50):
        assert log.diff("t", seq, limit=1).count == 1
        most = max(most, cached(log))
    assert 0 < most <= CACHE
    assert resident(log) == 0


def test_reads_out_of_order_are_right(machine: Machine) -> None:
    fill_to(machine.log, 6000)
    log = machine.restart()
    for step in range(300):
        seq = step * 3571 % 6000 + 1
        (record,) = log.diff("t", seq - 1, limit=1).records
        assert (record["$seq"], record["data"]) == (seq, data_of(seq))
    assert cached(log) <= CACHE


def test_a_record_larger_than_the_cache_reads_right() -> None:
    machine = Machine(options=Options(cache_bytes=1000))
    for number in range(5):
        machine.log.append("t", [{"data": str(number) * 100_000}])
    machine.log.checkpoint()
    log = machine.restart()
    for number in range(5):
        assert log.diff("t", number, limit=1).records[0]["data"] == str(number) * 100_000


def test_filters_work_far_beyond_the_cache(machine: Machine) -> None:
    fill_to(machine.log, 6000)
    log = machine.restart()
    found = [record["$seq"] for record in log.read("t", match="tag.7") if isinstance(record, dict)]
    assert found == list(range(7, 6001, 10))
    assert cached(log) <= CACHE


def test_a_delete_by_tag_works_far_beyond_the_cache(machine: Machine) -> None:
    fill_to(machine.log, 6000)
    log = machine.restart()
    assert log.delete("t", match="tag.3").deleted == 600
    assert log.delete("t", match=["tag", "Glob", "tag.*"], before_seq=3001).deleted == 2700
    assert live(log, "t") == [seq for seq in range(3001, 6001) if seq % 10 != 3]
    assert cached(log) <= CACHE


def test_a_cap_works_far_beyond_the_cache(machine: Machine) -> None:
    fill_to(machine.log, 6000)
    machine.log.put("t", cap_bytes=1_002_000)
    assert machine.log.get("t").count == 1000
    check_all(machine.log, 5001, 6000)
    assert told(machine.restart(), "t")[0] == (1, 5000, "cap")


def test_a_capped_topic_stays_small_in_memory_and_on_disk(machine: Machine) -> None:
    machine.log.put("t", cap_records=500)
    for head in range(1000, 20_001, 1000):
        fill_to(machine.log, head)
        assert resident(machine.log) < 6 * MIB
    assert machine.disk_bytes < 16 * MIB
    check_all(machine.log, 19_501, 20_000)


def test_checkpoints_happen_by_themselves(machine: Machine) -> None:
    fill_to(machine.log, 12_000)
    assert machine.log.engine.checkpointer.completed >= 3
    wal = sum(size for name, size in machine.disk.names().items() if name.startswith("wal/"))
    assert wal < 8 * MIB


def test_many_topics_hold_no_chunks_after_a_checkpoint() -> None:
    machine = Machine(options=SMALL)
    for number in range(200):
        machine.log.append(f"t{number}", [{"data": "x" * 1000}])
    machine.log.checkpoint()
    held = [extent for topic in machine.log.engine.state.topics.values() for extent in topic.extents if extent.chunks]
    assert held == []
    for number in range(200):
        assert machine.log.diff(f"t{number}").count == 1


def test_the_process_itself_stays_small_on_a_real_disk(tmp_path: Path) -> None:
    with topics.open(tmp_path, options=SMALL) as log:
        log.put("t")
        fill_to(log, 1000)
        tracemalloc.start()
        try:
            fill_to(log, 12_000)
            check_all(log, 1, 12_000)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 12 * MIB
        assert log.get("t").bytes > 11 * MIB
