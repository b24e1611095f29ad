"""The pipelines, started again where Spark has not waited for a Python process of its own: it gives one ten seconds to
come up, whatever else the machine does. What they promise makes that harmless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from topics import pipelines

_SLOW_START = ("connect back", "CANNOT_OPEN_SOCKET", "Python worker exited unexpectedly")
_STARTS = 5

T = TypeVar("T")


def calmly(run: Callable[[], T]) -> T:
    for _ in range(_STARTS - 1):
        try:
            return run()
        except Exception as error:
            if not any(each in str(error) for each in _SLOW_START):
                raise
    return run()


def tier(*given: Any, **named: Any) -> Any:
    return calmly(lambda: pipelines.tier(*given, **named))


def route(*given: Any, **named: Any) -> Any:
    """Until its pipelines have ended."""
    return calmly(lambda: pipelines.route(*given, **named).wait())


def replay_into(*given: Any, **named: Any) -> Any:
    return calmly(lambda: pipelines.replay_into(*given, **named))


def verify(*given: Any, **named: Any) -> Any:
    return calmly(lambda: pipelines.verify(*given, **named))


def compact(*given: Any, **named: Any) -> Any:
    return calmly(lambda: pipelines.compact(*given, **named))
