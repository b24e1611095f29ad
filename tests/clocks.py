"""Time as a test wants it: it moves only when it is told to, in either direction."""

from __future__ import annotations


class ManualClock:
    def __init__(self, now: int = 1_000_000) -> None:
        self._now = now

    def now(self) -> int:
        return self._now

    def set(self, now: int) -> None:
        self._now = now

    def advance(self, ms: int) -> None:
        """Moves the clock; a negative number steps it back, as NTP may."""
        self._now = max(0, self._now + ms)
