"""Starting a query on a machine that is busy. Spark gives the Python process of each of its sources ten seconds to come
up, and starts those of all queries at once: one after the other, and once more where that was not enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_STARTS = 5
_TOO_SLOW = ("failed to connect back", "CANNOT_OPEN_SOCKET", "Python worker exited unexpectedly")
_PAUSE = 0.02


def begin(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Returns when the query's sources are up, or when it has failed with something else. Nothing has been read by
    then, so starting it once more is as good as the first time."""
    for _ in range(_STARTS - 1):
        query = start()
        while query.isActive and query.status["message"].startswith("Initializing"):
            time.sleep(_PAUSE)
        error = None if query.isActive else query.exception()
        if error is None or query.lastProgress is not None or not any(each in str(error) for each in _TOO_SLOW):
            return query
    return start()
