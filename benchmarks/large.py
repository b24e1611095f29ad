"""A log of 10 million records in one topic: memory while it is written, killed with -9, and time until ready again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import topics
from benchmarks.measure import Figure, body_of

_RECORDS = 10_000_000


def run(directory: Path) -> list[Figure]:
    place = directory / "large"
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.large", str(place)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    started = time.perf_counter()
    line = child.stdout.readline().split()
    written = time.perf_counter() - started
    resident = int(line[1])
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    ready = min(_open(place), _open(place))
    on_disk = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return [
        Figure("10 M records: written at", _RECORDS / written, "records/s", note="with process start"),
        Figure("10 M records: resident memory", resident / 2**20, "MB", "< 300"),
        Figure("10 M records: ready after kill -9", ready, "s", "< 3"),
        Figure("10 M records: on disk", on_disk / 2**20, "MB"),
    ]


def _open(place: Path) -> float:
    """Opens in a process of its own, which is killed again: every open is one after a crash."""
    code = (
        "import sys, time, topics\n"
        "start = time.perf_counter()\n"
        "log = topics.open(sys.argv[1])\n"
        "answer = log.diff('t', log.get('t').head_seq - 10)\n"
        "assert answer.count == 10 and log.get('t').count == int(sys.argv[2])\n"
        "print(time.perf_counter() - start, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(place), str(_RECORDS)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    ready = float(child.stdout.readline())
    child.kill()
    child.wait()
    return ready


def _write(place: Path) -> None:
    log = topics.open(place)
    body = body_of(1000)
    most = 0
    for _ in range(_RECORDS // 1000):
        log.append_json("t", body)
        most = max(most, _resident()) if _ % 100 == 0 else most
    print("resident", most, flush=True)
    sys.stdin.read()
    signal.pause()


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
