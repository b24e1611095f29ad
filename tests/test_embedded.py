"""`topics.open`: the engine in this process, on a real disk, from many threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import topics
from tests.helpers import datas, live, write
from tests.simdisk import SimDisk, SimFile
from topics.core.errors import DirectoryInUse, InvalidRequest, ShuttingDown
from topics.core.limits import Limits
from topics.log import Log

# Opening and closing


def test_an_empty_folder_becomes_a_log(tmp_path: Path) -> None:
    with topics.open(tmp_path) as log:
        assert write(log, "orders", {"sku": 1}) == [1]
        assert datas(log.diff("orders")) == [{"sku": 1}]


@pytest.mark.parametrize("make", [str, Path])
def test_a_folder_that_is_not_there_is_made(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    with topics.open(make(tmp_path / "deep" / "data")) as log:
        log.put("t")
    assert (tmp_path / "deep" / "data").is_dir()


def test_a_log_can_be_opened_again(tmp_path: Path) -> None:
    for number in range(1, 4):
        with topics.open(tmp_path) as log:
            assert write(log, "t", number) == [number]
    with topics.open(tmp_path) as log:
        assert datas(log.diff("t")) == [1, 2, 3]


def test_the_context_manager_closes_also_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with topics.open(tmp_path) as log:
            write(log, "t", 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with topics.open(tmp_path) as log:
        assert live(log, "t") == [1]


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    log = topics.open(tmp_path)
    log.close()
    log.close()
    topics.open(tmp_path).close()


def test_a_second_open_in_this_process_is_refused(tmp_path: Path) -> None:
    with topics.open(tmp_path) as log:
        with pytest.raises(DirectoryInUse, match=str(tmp_path)):
            topics.open(tmp_path)
        assert write(log, "t", 1) == [1]


def test_a_second_open_in_another_process_is_refused(tmp_path: Path) -> None:
    script = "import sys, topics\ntry: topics.open(sys.argv[1])\nexcept topics.TopicsError as e: print(e); sys.exit(7)"
    with topics.open(tmp_path):
        other = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert (other.returncode, str(tmp_path) in other.stdout) == (7, True)


def test_a_refused_open_leaves_no_threads_behind(tmp_path: Path) -> None:
    with topics.open(tmp_path):
        before = set(threading.enumerate())
        with pytest.raises(DirectoryInUse):
            topics.open(tmp_path)
        assert set(threading.enumerate()) == before


def test_a_closed_log_leaves_no_threads_and_no_files_open(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), os.listdir("/proc/self/fd")
    log = topics.open(tmp_path)
    write(log, "t", 1)
    log.spool("x", "t", "p", 0, [{"data": 1}])
    log.checkpoint()
    live(log, "t")
    log.close()
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == len(files)


CALLS: dict[str, Callable[[Log], object]] = {
    "put": lambda log: log.put("u"),
    "get": lambda log: log.get("t"),
    "topics": lambda log: log.topics(),
    "drop": lambda log: log.drop("t"),
    "append": lambda log: write(log, "t", 1),
    "append_json": lambda log: log.append_json("t", b'{"records":[{"data":1}]}'),
    "diff": lambda log: log.diff("t"),
    "read": lambda log: list(log.read("t")),
    "seek": lambda log: log.seek("t", 0),
    "delete": lambda log: log.delete("t", before_seq=2),
    "deletes": lambda log: log.deletes("t"),
    "spool": lambda log: log.spool("y", "t", "p", 0, [{"data": 1}]),
    "commit": lambda log: log.commit("x", [{"part": "p", "records": {"t": 1}}]),
    "abort": lambda log: log.abort("x"),
    "txn": lambda log: log.txn("x"),
    "checkpoint": lambda log: log.checkpoint(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_log_refuses_and_touches_nothing(tmp_path: Path, call: str) -> None:
    log = topics.open(tmp_path)
    write(log, "t", 1)
    log.spool("x", "t", "p", 0, [{"data": 1}])
    log.close()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ShuttingDown) as refused:
        CALLS[call](log)
    assert refused.value.code == "shutting_down"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_reader_that_waits_is_told_of_the_close(tmp_path: Path) -> None:
    log = topics.open(tmp_path)
    log.put("t")
    got: list[object] = []

    def wait() -> None:
        try:
            got.append(log.diff("t", wait_ms=30_000))
        except topics.TopicsError as error:
            got.append(error.code)

    reader = threading.Thread(target=wait, daemon=True)
    reader.start()
    log.close()
    reader.join(20)
    assert got == ["shutting_down"]


def test_nothing_but_the_owner_may_read_the_files(tmp_path: Path) -> None:
    with topics.open(tmp_path / "data") as log:
        write(log, "t", "secret")
        log.checkpoint()
        files = [path for path in (tmp_path / "data").rglob("*") if path.is_file() and path.name != "FORMAT"]
        assert len(files) >= 3
        assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_limits_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_MAX_BATCH_RECORDS", "2")
    with topics.open(tmp_path) as log, pytest.raises(topics.TopicsError, match="TOPICS_MAX_BATCH_RECORDS is 2"):
        write(log, "t", 1, 2, 3)


@pytest.mark.parametrize("value", ["", "-1", "many", "1.5", "0x10", "٣"])
def test_a_malformed_limit_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TOPICS_MAX_LIMIT", value)
    with pytest.raises(InvalidRequest, match="TOPICS_MAX_LIMIT"):
        topics.open(tmp_path)


def test_limits_given_win_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_MAX_BATCH_RECORDS", "2")
    with topics.open(tmp_path, limits=Limits()) as log:
        assert write(log, "t", 1, 2, 3) == [1, 2, 3]


# Killed


def test_a_killed_process_loses_nothing_that_was_acked(tmp_path: Path) -> None:
    script = (
        "import os, sys, topics\n"
        "log = topics.open(sys.argv[1])\n"
        "for n in range(300): log.append('t', [{'data': n}])\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    with topics.open(tmp_path) as log:
        assert live(log, "t") == list(range(1, 301))
        assert log.get("t").holes == 0


# Threads


def in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_threads_append_without_losing_or_mixing_anything(tmp_path: Path, durability: str) -> None:
    with topics.open(tmp_path) as log:
        log.put("t", durability=durability)

        def work(number: int) -> None:
            for step in range(20):
                write(log, "t", [number, step, "a"], [number, step, "b"])

        in_threads(8, work)
        records = datas(log.diff("t", limit=1000))
    assert len(records) == 8 * 20 * 2
    for number in range(8):
        own = [(step, half) for owner, step, half in records if owner == number]
        assert own == [(step, half) for step in range(20) for half in "ab"]
    assert all(records[at][:2] == records[at + 1][:2] for at in range(0, len(records), 2))


def test_threads_on_their_own_topics_do_not_disturb_each_other(tmp_path: Path) -> None:
    with topics.open(tmp_path) as log:

        def work(number: int) -> None:
            for step in range(25):
                assert write(log, f"t{number}", step) == [step + 1]
                assert live(log, f"t{number}") == list(range(1, step + 2))

        in_threads(6, work)


class GatedDisk(SimDisk):
    """A disk whose WAL syncs wait at a gate once it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)

    def create(self, name: str) -> SimFile:
        file = super().create(name)
        return GatedFile(self, file) if name.startswith("wal/") else file


class GatedFile(SimFile):
    __slots__ = ("_gated",)

    def __init__(self, disk: GatedDisk, file: SimFile) -> None:
        super().__init__(disk, file._name, file._inode)
        self._gated = disk

    def sync(self) -> None:
        self._gated.waiting.release()
        self._gated.gate.wait(20)
        super().sync()


def test_writers_that_wait_at_the_same_moment_share_a_sync() -> None:
    disk = GatedDisk()
    log = Log(disk)
    log.put("t", durability="fsync")
    log.put("u", durability="fsync")
    write(log, "t", 0)
    write(log, "u", 0)
    while disk.waiting.acquire(blocking=False):
        pass
    staged = threading.Semaphore(0)
    engine_write = log.engine.write

    def counted(*args: Any) -> Any:
        staged.release()
        return engine_write(*args)

    log.engine.write = counted  # type: ignore[method-assign,assignment]  # to see when a writer has the lock
    before = log.engine.committer.syncs
    disk.gate.clear()
    writers = [threading.Thread(target=write, args=(log, "tu"[number % 2], number)) for number in range(16)]
    writers[0].start()
    assert disk.waiting.acquire(timeout=20)
    for writer in writers[1:]:
        writer.start()
    for _ in writers:
        assert staged.acquire(timeout=20)
    with log._lock:
        disk.gate.set()
    for writer in writers:
        writer.join(20)
    assert log.engine.committer.syncs - before <= 3
    assert (log.get("t").count, log.get("u").count) == (9, 9)
    log.close()


# The import


def test_importing_topics_is_light() -> None:
    heavy = ["asyncio", "pyarrow", "pyspark", "ssl", "http", "numpy", "pandas"]
    script = f"import sys, topics; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_public_names_are_there() -> None:
    assert {"open", "Log", "Limits", "Options", "Tombstone", "TopicConfig", "TopicsError"} <= set(topics.__all__)
    assert all(hasattr(topics, name) for name in topics.__all__)
