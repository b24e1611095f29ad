"""How far behind a stream is, from what Spark reports about each batch."""

from __future__ import annotations

import json
from collections.abc import Callable

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from topics.spark import offsets


class LagListener(StreamingQueryListener):
    """Calls `report(query name or id, {topic: seqs not read yet})` after each batch:

    spark.streams.addListener(LagListener(lambda query, lag: print(query, lag)))
    """

    def __init__(self, report: Callable[[str, dict[str, int]], None]) -> None:
        self._report = report

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802  # Spark's names
        progress = event.progress
        for source in progress.sources:
            lag = lag_of(source.endOffset, source.latestOffset)
            if lag is not None:
                self._report(progress.name or str(progress.id), lag)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        pass

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        pass


def lag_of(end: str | None, latest: str | None) -> dict[str, int] | None:
    """The lag of a source of topics; None for any other, and where Spark does not say."""
    try:
        ends, heads = json.loads(end or "null"), json.loads(latest or "null")
        return None if ends is None or heads is None else offsets.lag(offsets.load(ends), offsets.load(heads))
    except ValueError:
        return None
