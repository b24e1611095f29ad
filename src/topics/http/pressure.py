"""Pressure: how late the loop is and how much waits for the disk. The server sheds cost, never data."""

from __future__ import annotations

from collections.abc import Callable

from topics.core.errors import Throttled

# What a delivery gains each tick that it waits: the lowest priority overtakes the highest within a second or two.
_AGE_PER_TICK = 50.0
_PER_TICK = 256


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


class Deliveries:
    """Delivery work that pressure has put off: the highest priority goes first, and whoever waits rises."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put_off(self, priority: float, deliver: Callable[[], None]) -> None:
        self._waiting.append((priority, deliver))

    def run_some(self, most: int = _PER_TICK) -> None:
        """Once per tick."""
        self._waiting.sort(key=lambda each: each[0], reverse=True)
        due, rest = self._waiting[:most], self._waiting[most:]
        self._waiting = [(priority + _AGE_PER_TICK, deliver) for priority, deliver in rest]
        for _, deliver in due:
            deliver()
