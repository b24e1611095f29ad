"""Time comes in as an argument: a `Clock` says what time it is, and tests hand in their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> int:
        """Milliseconds since the Unix epoch; may step in either direction."""
        ...


class SystemClock:
    def now(self) -> int:
        return time.time_ns() // 1_000_000


class Ratchet:
    """A time that never goes back, whatever its clock does: `$ts` and TTL run on it, also over restarts."""

    __slots__ = ("_clock", "latest")

    def __init__(self, clock: Clock, latest: int = 0) -> None:
        self._clock = clock
        self.latest = latest

    def now(self) -> int:
        now = self._clock.now()
        if now > self.latest:
            self.latest = now
        return self.latest

    def advance(self, to: int) -> None:
        """Takes over a time that was seen in an earlier life."""
        if to > self.latest:
            self.latest = to
