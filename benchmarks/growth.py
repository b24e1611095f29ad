"""What must not grow: the cost of an append and of a tail read, with the size of the log and the number of topics.

Small and large are measured in turns within one run, so that noise hits both; the ratio is what counts.
"""

from __future__ import annotations

import time
from pathlib import Path

import topics
from benchmarks.measure import Figure, body_of
from topics import Log

_ROUNDS = 40
_TIMES = 25


def run(directory: Path) -> list[Figure]:
    return [*_by_topics(directory), *_by_size(directory)]


def _by_topics(directory: Path) -> list[Figure]:
    counts = (10, 1_000, 100_000)
    logs: dict[int, Log] = {}
    figures: list[Figure] = []
    for count in counts:
        started = time.perf_counter()
        logs[count] = log = topics.open(directory / f"topics{count}", limits=topics.Limits(max_topics=0))
        _create(log, count)
        figures.append(Figure(f"created {count:,} topics at", count / (time.perf_counter() - started), "topics/s"))
    append, read = _compare({count: (logs[count], f"t{count // 2}") for count in counts})
    for count in counts[1:]:
        figures.append(Figure(f"append: {count:,} topics / 10 topics", append[count] / append[10], "ratio", "flat"))
        figures.append(Figure(f"tail read: {count:,} topics / 10 topics", read[count] / read[10], "ratio", "flat"))
    for log in logs.values():
        log.close()
    return figures


def _create(log: Log, count: int) -> None:
    """Many creations in one turn share a sync."""
    from topics.core.config import ConfigPatch

    engine = log.engine
    for start in range(0, count, 1000):
        with log._lock:
            for number in range(start, min(start + 1000, count)):
                engine.put(f"t{number}", ConfigPatch())
            engine.flush()
            engine.committer.flush_and_wait()


def _by_size(directory: Path) -> list[Figure]:
    sizes = (10_000, 3_000_000)
    logs: dict[int, Log] = {}
    for size in sizes:
        logs[size] = log = topics.open(directory / f"size{size}")
        body = body_of(10_000)
        for _ in range(size // 10_000):
            log.append_json("t", body)
        log.checkpoint()
    append, read = _compare({size: (logs[size], "t") for size in sizes})
    for log in logs.values():
        log.close()
    small, large = sizes
    name = f"{large:,} / {small:,} records in the log"
    return [
        Figure(f"append: {name}", append[large] / append[small], "ratio", "flat"),
        Figure(f"tail read: {name}", read[large] / read[small], "ratio", "flat"),
    ]


def _compare(places: dict[int, tuple[Log, str]]) -> tuple[dict[int, float], dict[int, float]]:
    """The best time of an append and of a tail read, each size in its turn."""
    body = body_of(1)
    append = dict.fromkeys(places, float("inf"))
    read = dict.fromkeys(places, float("inf"))
    for _ in range(_ROUNDS):
        for key, (log, name) in places.items():
            start = time.perf_counter()
            for _ in range(_TIMES):
                log.append_json(name, body)
            append[key] = min(append[key], time.perf_counter() - start)
            head = log.get(name).head_seq
            start = time.perf_counter()
            for _ in range(_TIMES):
                log.diff(name, max(head - 100, 0))
            read[key] = min(read[key], time.perf_counter() - start)
    return append, read
