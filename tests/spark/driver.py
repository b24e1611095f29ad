"""A Spark driver in a process of its own, so that it can be killed: copies topics to topics as it is told on its
standard input, and says on its standard output how each copy ended."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from tests.spark.proxy import PATIENCE, Hold

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT = Path(__file__).parents[2]
_READY = "ready"
# Spark gives a new Python process ten seconds to come up, whatever else the machine does.
_SLOW_START = "connect back"
_STARTS = 5


class Copy(msgspec.Struct, frozen=True):
    """`available` is a stream that ends when it has all that was there, `endless` one that goes on until its stop."""

    name: str
    source: dict[str, str]
    sink: dict[str, str]
    how: Literal["available", "endless", "batch", "stop"] = "available"


class Ended(msgspec.Struct):
    name: str
    error: str | None = None


class Driver:
    """The test's end of it. `conf` is Spark's."""

    def __init__(self, log: Path, conf: dict[str, str]) -> None:
        self.log = log
        env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        with log.open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver", msgspec.json.encode(conf).decode()],
                cwd=_ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
            )
        self._ended: dict[str, queue.Queue[Ended]] = {}
        self._started: dict[str, list[Copy]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Java says this and that on its way.
            with suppress(msgspec.DecodeError):
                ended = msgspec.json.decode(line, type=Ended)
                copies = self._started.get(ended.name, [])
                if _SLOW_START in (ended.error or "") and len(copies) < _STARTS and copies[-1].how != "batch":
                    self.start(copies[-1])
                else:
                    self._queue(ended.name).put(ended)

    def _queue(self, name: str) -> queue.Queue[Ended]:
        with self._lock:
            return self._ended.setdefault(name, queue.Queue())

    def wait_until_ready(self) -> Driver:
        self._wait(_READY)
        return self

    def start(self, *copies: Copy) -> None:
        assert self.process.stdin is not None
        for copy in copies:
            if copy.how != "stop":
                self._started.setdefault(copy.name, []).append(copy)
            self.process.stdin.write(msgspec.json.encode(copy) + b"\n")
        self.process.stdin.flush()

    def end_of(self, copy: Copy) -> str | None:
        """Waits until a copy has ended; returns why, or None if it came to its end."""
        return self._wait(copy.name).error

    def bring(self, copy: Copy, hold: Hold) -> None:
        """Waits until a copy is where it shall be held."""
        deadline = time.monotonic() + PATIENCE
        while not hold.wait(0.1):
            if not self._queue(copy.name).empty():
                raise AssertionError(f"{copy.name} ended before: {self.end_of(copy)}")
            assert time.monotonic() < deadline, f"{copy.name} never came to where it is held"

    def run(self, copy: Copy) -> str | None:
        self.start(copy)
        return self.end_of(copy)

    def _wait(self, name: str) -> Ended:
        try:
            return self._queue(name).get(timeout=PATIENCE)
        except queue.Empty:
            told = self.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{name} did not come; the driver said: {told}") from None

    def kill(self) -> None:
        """-9 for the driver, Java and Python, at one moment; what else there is of it has lost its parent then."""
        processes = _descendants(self.process.pid)
        java = [each for each in processes if each.parent == self.process.pid]
        assert java or self.process.poll() is not None, "the driver has no Java"
        self.process.kill()
        for each in java:
            each.kill()
        self.process.wait(PATIENCE)
        # Spark's Python processes end when their Java does; one that a held request keeps busy would outlive the test.
        for each in processes:
            each.kill()
            each.close()
        self._close()

    def stop(self) -> None:
        """Ends whatever way it can."""
        if self.process.poll() is None:
            self.kill()
        else:
            self._close()

    def _close(self) -> None:
        self._reader.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            # What was not flushed has nowhere to go.
            with suppress(OSError):
                stream.close()


@contextmanager
def driving(log: Path, conf: dict[str, str]) -> Iterator[Driver]:
    driver = Driver(log, conf)
    try:
        yield driver.wait_until_ready()
    finally:
        driver.stop()


class Process:
    """One that is known by more than its number, which another one may have tomorrow."""

    def __init__(self, pid: int, parent: int) -> None:
        self.pid = pid
        self.parent = parent
        self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._handle)


def _descendants(pid: int) -> list[Process]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in brackets may have anything in it; the parent is the second field behind it.
            parents[int(entry.parts[2])] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    processes: list[Process] = []
    for one in found[1:]:
        with suppress(ProcessLookupError):
            processes.append(Process(one, parents[one]))
    return processes


def _start(spark: SparkSession, copy: Copy) -> Callable[[], object]:
    """Begins a copy; what is returned waits for its end. One in batch has ended then."""
    if copy.how == "batch":
        rows = spark.read.format("topics").options(**copy.source).load()
        rows.write.format("topics").options(**copy.sink).mode("append").save()
        return lambda: None
    stream = spark.readStream.format("topics").options(**copy.source).load()
    writer = stream.writeStream.format("topics").options(**copy.sink).queryName(copy.name)
    return (writer.trigger(availableNow=True) if copy.how == "available" else writer).start().awaitTermination


def _finish(name: str, wait: Callable[[], object]) -> None:
    try:
        wait()
    except Exception as error:
        _say(Ended(name, str(error)))
    else:
        _say(Ended(name))


_saying = threading.Lock()


def _say(ended: Ended) -> None:
    with _saying:
        sys.stdout.buffer.write(msgspec.json.encode(ended) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    from tests.spark.conftest import session

    spark = session(**msgspec.json.decode(sys.argv[1], type=dict[str, str]))
    _say(Ended(_READY))
    for line in sys.stdin:
        copy = msgspec.json.decode(line, type=Copy)
        if copy.how == "stop":
            for query in spark.streams.active:
                if query.name == copy.name:
                    query.stop()
            continue
        try:
            # Here and not in the thread: Spark finds a sink only where its session is the active one.
            wait = _start(spark, copy)
        except Exception as error:
            _say(Ended(copy.name, str(error)))
        else:
            threading.Thread(target=_finish, args=(copy.name, wait), daemon=True).start()


if __name__ == "__main__":
    main()
