"""How we measure: the best of several runs (these machines are noisy), and ratios within one run for growth."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import msgspec


class Figure(msgspec.Struct):
    name: str
    value: float
    unit: str
    target: str = ""
    note: str = ""

    def line(self) -> str:
        value = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:,.2f}"
        return f"{self.name:<58} {value:>14} {self.unit:<10} {self.target:<12} {self.note}".rstrip()


def best_rate(work: Callable[[], int], repeat: int = 5) -> float:
    """The highest number of things a second that `work` (which says how many it did) reached."""
    best = 0.0
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - start))
    return best


def body_of(records: int, size: int = 100) -> bytes:
    """A write of that many records with `size` bytes of `data` each."""
    data = b'{"k":"' + b"x" * (size - 8) + b'"}'
    assert len(data) == size
    return b'{"records":[' + b",".join([b'{"data":' + data + b"}"] * records) + b"]}"
