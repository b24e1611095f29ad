"""Rows as records: tasks spool parts of a transaction, the driver commits it. Exactly once, over all topics."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from topics.core.errors import InvalidRequest, TopicsError, TxnIncomplete, TxnNotFound
from topics.spark.options import SinkOptions
from topics.spark.rows import Rows
from topics.spark.spooling import Spool


class Written(WriterCommitMessage):
    """What a task has spooled: the part, how many records each topic got, and for a stream whose batch it is."""

    def __init__(self, txn: str, part: str, records: dict[str, int], query: str | None) -> None:
        self.txn = txn
        self.part = part
        self.records = records
        self.query = query


class _Transaction:
    """One execution of a batch. Its id is made where Spark plans the execution, and travels to all its tasks: whatever
    an earlier execution left behind on the server is another transaction."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest(
                "a topic can only be appended to: use mode('append'), and for a stream outputMode('append') or "
                "'update'; output mode complete would rewrite what was written"
            )
        self._options = options
        self._rows = Rows(schema, options.topic)
        self._id = f"spark-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "write runs in a task"
        part = f"{context.partitionId()}.{context.taskAttemptId()}"
        with Spool(self._options, self._id, part) as spool:
            for batch in iterator:
                self._rows.spool(batch, spool)
            records = spool.finish()
        return Written(self._id, part, records, context.getLocalProperty("sql.streaming.queryId"))


def _commit(options: SinkOptions, messages: Sequence[Written], client_id: str | None, client_seq: int | None) -> None:
    """Publishes what the tasks have spooled. Saying it twice is saying it once."""
    parts = [{"part": message.part, "records": message.records} for message in messages if message.records]
    if not parts:
        return
    txn = messages[0].txn
    body = {"parts": parts, "client_id": client_id, "client_seq": client_seq}
    connection = options.server.connect()
    try:
        connection.post(f"/v0/txns/{txn}/commit", body)
    except (TxnNotFound, TxnIncomplete) as error:
        outcome = "nothing of the batch is visible, and running it again is safe"
        if client_id is None and isinstance(error, TxnNotFound):
            outcome = (
                "if the connection broke in that moment, the batch may be there: txnAppId and txnVersion make sure"
            )
        raise TopicsError(
            f"the server lost what this batch had sent before it could be committed ({error.message}); {outcome}"
        ) from None
    finally:
        connection.close()


def _abort(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Gives the server its space back. A transaction that is committed, or that nobody knows, is left alone."""
    for txn in {message.txn for message in messages if isinstance(message, Written)}:
        connection = options.server.connect()
        with suppress(TopicsError):
            connection.post(f"/v0/txns/{txn}/abort", {})
        connection.close()


def _whole(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    written = [message for message in messages if isinstance(message, Written)]
    assert len(written) == len(messages), "Spark commits only when every task has a message"
    return written


class BatchWriter(_Transaction, DataSourceArrowWriter):
    """With `txnAppId` and `txnVersion` a write that is repeated, by whomever, is made once."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._options, _whole(messages), self._options.app_id, self._options.version)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _abort(self._options, messages)


class StreamWriter(_Transaction, DataSourceStreamArrowWriter):
    """A batch is known by the query's id and its own number, whatever transaction carried it."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        written = _whole(messages)
        _commit(self._options, written, written[0].query if written else None, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _abort(self._options, messages)
