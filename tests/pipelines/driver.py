"""A Spark driver in a process of its own, in which many pipelines are brought to chosen stages of their work, so that
all of them can be killed there at one moment."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import msgspec

from tests.spark.driver import _descendants
from tests.spark.proxy import PATIENCE
from topics.pipelines import staging
from topics.pipelines.progress import Report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT = Path(__file__).parents[2]


class Job(msgspec.Struct, frozen=True):
    """A pipeline with its arguments; `stop_at` is the stage at which it stands still until it is killed, when it comes
    there for the `nth` time. `kills_tasks`: a task of it is killed with -9."""

    name: str
    what: Literal["tier", "replay", "compact"]
    arguments: dict[str, Any]
    stop_at: str | None = None
    nth: int = 1
    kills_tasks: bool = False


class Said(msgspec.Struct):
    name: str
    how: Literal["ready", "reached", "done", "failed"]
    error: str = ""
    killed: int = 0


class Driver:
    """The test's end of it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        with log.open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.pipelines.driver"],
                cwd=_ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
            )
        self._said: dict[str, queue.Queue[Said]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(msgspec.DecodeError):
                said = msgspec.json.decode(line, type=Said)
                self._queue(said.name).put(said)

    def _queue(self, name: str) -> queue.Queue[Said]:
        with self._lock:
            return self._said.setdefault(name, queue.Queue())

    def start(self, *jobs: Job) -> None:
        assert self.process.stdin is not None
        for job in jobs:
            self.process.stdin.write(msgspec.json.encode(job) + b"\n")
        self.process.stdin.flush()

    def hear(self, name: str) -> Said:
        try:
            return self._queue(name).get(timeout=PATIENCE)
        except queue.Empty:
            told = self.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"nothing of {name}; the driver said: {told}") from None

    def kill(self) -> None:
        """-9 for the driver, Java and Python, at one moment."""
        processes = _descendants(self.process.pid)
        self.process.kill()
        for each in processes:
            each.kill()
            each.close()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()


_saying = threading.Lock()


def _say(said: Said) -> None:
    with _saying:
        sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
        sys.stdout.buffer.flush()


class Stopping(Report):
    """Stands still at a stage, and says so."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.what, job.name)
        self._job = job
        self._times = 0

    def stage(self, name: str) -> None:
        super().stage(name)
        if name == self._job.stop_at:
            self._times += 1
            if self._times == self._job.nth:
                _say(Said(self._job.name, "reached"))
                threading.Event().wait()


def _run(spark: SparkSession, job: Job) -> None:
    from tests.pipelines.calm import compact, replay_into, tier

    report = Stopping(job)
    if job.what == "tier":
        tier(spark, report=report, **job.arguments)
    elif job.what == "replay":
        replay_into(spark, report=report, **job.arguments)
    else:
        compact(spark, report=report, **job.arguments)


def _deadly(flag: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """What a task does with its rows, but for the first one that comes to it: that one dies."""

    def find_runs(batches: Iterable[Any]) -> Iterator[Any]:
        import os
        import signal

        from topics.pipelines.staging import _find_runs

        for batch in batches:
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                yield from _find_runs([batch])
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    return find_runs


def _thread(spark: SparkSession, job: Job) -> None:
    jvm: Any = spark.sparkContext._jvm
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)
    killed = 0
    try:
        if job.kills_tasks:
            flag = Path(job.arguments["root"]) / "killed"
            with patch.object(staging, "_find_runs", _deadly(str(flag))):
                _run(spark, job)
            killed = int(flag.exists())
        else:
            _run(spark, job)
    except Exception as error:
        _say(Said(job.name, "failed", str(error), killed))
    else:
        _say(Said(job.name, "done", killed=killed))


def main() -> None:
    from tests.spark.conftest import session

    spark = session(**{"spark.master": "local[4,4]"})
    _say(Said("driver", "ready"))
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=Job)
        threading.Thread(target=_thread, args=(spark, job), daemon=True).start()


if __name__ == "__main__":
    main()
