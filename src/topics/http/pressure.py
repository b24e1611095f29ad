"""Pressure: how late the loop is and how much waits for the disk. The server sheds cost, never data."""

from __future__ import annotations

from topics.core.errors import Throttled


class Pressure:
    """Levels: 0 none, 1 coalesce pushes and widen group commit, 2 pause pushes to the lowest priorities, 3 throttle."""

    def __init__(self, delay_ms: int, waiting_bytes: int) -> None:
        self._delay = delay_ms / 1000
        self._bytes = waiting_bytes
        self.level = 0

    def measure(self, loop_delay: float, waiting_bytes: int) -> None:
        """Once per tick. It rises at once and falls one level at a time, so that it does not flutter."""
        part = max(
            loop_delay / self._delay if self._delay else 0.0, waiting_bytes / self._bytes if self._bytes else 0.0
        )
        level = 3 if part >= 1 else 2 if part >= 0.5 else 1 if part >= 0.25 else 0
        self.level = level if level >= self.level else self.level - 1

    def check(self) -> None:
        if self.level >= 3:
            raise Throttled("the server is under pressure; try again", retry_after_ms=1000)
