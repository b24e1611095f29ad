"""Appends: 100-record batches and single records, by durability class, in process, one writer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import topics
from benchmarks.measure import Figure, best_rate, body_of
from topics import Log


def run(directory: Path) -> list[Figure]:
    figures: list[Figure] = []
    with topics.open(directory / "append") as log:
        for durability in ("ephemeral", "memory", "disk", "fsync"):
            log.put(durability, durability=durability, cap_records=2_000_000)
            times = 400 if durability == "fsync" else 3000
            rate = best_rate(partial(_append, log, durability, 100, times))
            target = ">= 600,000" if durability == "disk" else ""
            figures.append(Figure(f"append, {durability}, 100 records of 100 bytes", rate, "records/s", target))
            rate = best_rate(partial(_append, log, durability, 1, times))
            figures.append(Figure(f"append, {durability}, single records", rate, "records/s"))
    return figures


def _append(log: Log, topic: str, records: int, times: int) -> int:
    body = body_of(records)
    for _ in range(times):
        log.append_json(topic, body)
    return times * records
