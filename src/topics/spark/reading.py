"""Reading one range of seqs: runs in a task. Every seq of the range is a row, or part of a told loss, or deleted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import StructType

from topics.client.connection import Connection, topic_path
from topics.core.errors import TopicNotFound, TopicsError
from topics.spark.columns import Columns, told_of
from topics.spark.options import Filter, OnLoss, Server
from topics.spark.planning import Range

# One answer: large enough that requests cost nothing, small enough that the server's other readers do not notice.
_ANSWER_BYTES = 8 << 20
_ANSWER_RECORDS = 65_536
# Notes of losses are read by the batch that they belong to, and never again.
_NOTES = 100_000
_BATCH = "streaming.sql.batchId"


class Loss(TopicsError):
    """Records are lost, and the reader asked to be stopped then."""


class Reading(msgspec.Struct, frozen=True):
    """How ranges are read; travels to every task. `until` cuts by time what the seqs alone cannot."""

    server: Server
    filter: Filter
    on_loss: OnLoss
    until: datetime | None = None
    # Where losses are noted besides, for those whom the rows do not reach.
    loss_topic: str | None = None

    def read(self, span: Range, schema: StructType) -> Iterator[pa.RecordBatch]:
        columns = Columns(schema, span.topic, span.epoch)
        if span.begins_anew:
            yield from self._lost(columns, span.topic, span.after + 1, span.to, "recreated")
            return
        connection = self.server.connect()
        try:
            yield from self._read(connection, span, columns)
        finally:
            connection.close()

    def _read(self, connection: Connection, span: Range, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Asks for the next answer while Spark takes what is in this one."""

        def ask(cursor: int) -> Future[bytearray]:
            return ahead.submit(connection.read_arrow, topic_path(span.topic, "diff"), self._request(span, cursor))

        with ThreadPoolExecutor(1) as ahead:
            yield from self._follow(ask, span, columns)

    def _follow(
        self, ask: Callable[[int], Future[bytearray]], span: Range, columns: Columns
    ) -> Iterator[pa.RecordBatch]:
        cursor = span.after
        asked = ask(cursor)
        while cursor < span.to:
            try:
                answer = asked.result()
            except TopicNotFound:
                yield from self._lost(columns, span.topic, cursor + 1, span.to, "deleted")
                return
            stream = pa.ipc.open_stream(pa.py_buffer(answer))
            told = told_of(stream.schema)
            if told.epoch != span.epoch:
                yield from self._lost(columns, span.topic, cursor + 1, span.to, "recreated")
                return
            if told.next_from_seq <= cursor:
                raise TopicsError(f"topic {span.topic!r}: the server does not go on from seq {cursor} to {span.to}")
            cursor = told.next_from_seq
            if cursor < span.to:
                asked = ask(cursor)
            if told.tombstone is not None:
                gap = told.tombstone
                yield from self._lost(columns, span.topic, gap.gap_from, gap.gap_to, gap.reason)
            for batch in _few(stream):
                yield columns.records(self._cut(batch))

    def _request(self, span: Range, cursor: int) -> dict[str, Any]:
        return {
            "from_seq": cursor,
            "to_seq": span.to,
            "epoch": span.epoch,
            "limit": _ANSWER_RECORDS,
            "max_bytes": _ANSWER_BYTES,
            "include_tags": True,
            "node": list(self.filter.node) or None,
            "match": self.filter.match,
        }

    def _cut(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.until is None:
            return batch
        return batch.filter(pc.less(batch.column("ts"), pa.scalar(self.until, pa.timestamp("us", "UTC"))))

    def _lost(self, columns: Columns, topic: str, gap_from: int, gap_to: int, reason: str) -> Iterator[pa.RecordBatch]:
        what = f"topic {topic!r} has lost seqs {gap_from} to {gap_to} ({reason})"
        if reason == "recreated" and gap_to < gap_from:
            what = f"topic {topic!r} was deleted and created again"
        if self.on_loss == "fail":
            raise Loss(f"{what}; onLoss=emit makes this a row, onLoss=ignore goes on without")
        if self.on_loss == "ignore":
            print(f"topics: {what}: {max(gap_to - gap_from + 1, 0)} records, ignored", file=sys.stderr)
        else:
            if self.loss_topic is not None:
                self._note(self.loss_topic, topic, columns.epoch, gap_from, gap_to, reason)
            yield columns.tombstone(gap_from, gap_to, reason)

    def _note(self, where: str, topic: str, epoch: int, gap_from: int, gap_to: int, reason: str) -> None:
        """Leaves a note of a loss under the query and batch that met it, before the row that tells it."""
        context = TaskContext.get()
        assert context is not None, "ranges are read in tasks"
        query, batch = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty(_BATCH)
        data = {"topic": topic, "epoch": epoch, "gap_from": gap_from, "gap_to": gap_to, "reason": reason}
        key = f"{query}:{batch}:{epoch}:{gap_from}:{gap_to}"
        body = {
            "records": [{"data": data, "tag": f"{query}:{batch}"}],
            "idempotency_key": key,
            "config": {"durability": "fsync", "cap_records": _NOTES},
        }
        connection = self.server.connect()
        try:
            connection.post(topic_path(where), body)
        finally:
            connection.close()


def _few(stream: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """The records of an answer in as few batches as it takes: each costs Spark the same, however small."""
    yield from stream.read_all().combine_chunks().to_batches()
