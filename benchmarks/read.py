"""Diffs of 1000 records: the tail in memory, the whole log in order through the chunk cache, and plain copies beside
them as the ceiling."""

from __future__ import annotations

from pathlib import Path

import topics
from benchmarks.measure import Figure, best_rate, body_of

_RECORDS = 2_000_000


def run(directory: Path) -> list[Figure]:
    with topics.open(directory / "read") as log:
        body = body_of(10_000)
        for _ in range(_RECORDS // 10_000):
            log.append_json("t", body)
        head = log.get("t").head_seq
        answer = log.diff("t", head - 1000, limit=1000)
        whole = answer.records_json

        def tail() -> int:
            for _ in range(2000):
                log.diff("t", head - 1000, limit=1000)
            return 2000 * 1000

        def everything() -> int:
            cursor = read = 0
            while cursor < head:
                answer = log.diff("t", cursor, limit=1000)
                cursor = answer.next_from_seq
                read += answer.count
            assert read == head
            return read

        def copies() -> int:
            source = bytearray(whole)
            for _ in range(2000):
                bytes(source)
            return 2000 * 1000

        return [
            Figure("diff of 1000, tail", best_rate(tail), "records/s", ">= 15 M"),
            Figure("diff of 1000, whole log in order", best_rate(everything), "records/s", ">= 15 M"),
            Figure("ceiling: copying the same bytes once", best_rate(copies), "records/s"),
        ]
