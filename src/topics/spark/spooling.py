"""A task's part of a transaction: gathers rows for each topic, and sends them in chunks that the server takes."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

import pyarrow as pa

from topics.client.connection import topic_path
from topics.core.errors import BatchTooLarge, InvalidRequest, PayloadTooLarge, RecordTooLarge, TopicsError
from topics.core.names import check_topic_name
from topics.spark.options import SinkOptions

# A chunk is what one request carries; the server's own limits may be lower, then it is halved.
_CHUNK_RECORDS = 10_000
_CHUNK_BYTES = 8 << 20
# Rows that wait for their chunk over all topics.
_MAX_WAITING_BYTES = 64 << 20
_INDEX = re.compile(r"records\[(\d+)\]")


class Spool:
    def __init__(self, options: SinkOptions, txn: str, part: str) -> None:
        self._options = options
        self._connection = options.server.connect()
        self._txn = txn
        self._part = part
        self._waiting: dict[str, list[pa.RecordBatch]] = {}
        self._waiting_bytes: dict[str, int] = {}
        self._chunks: dict[str, int] = {}
        self._records: dict[str, int] = {}
        self._rows = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def count_rows(self, count: int) -> int:
        """Takes the numbers of some rows; returns the first. Rows are counted from 1, as they come to their task."""
        first = self._rows + 1
        self._rows += count
        return first

    def add_records(self, topic: str, rows: pa.RecordBatch) -> None:
        """Rows with `data` and perhaps `tag`, `node` and `meta`; `$row` is where they stand."""
        waiting = self._waiting.setdefault(topic, [])
        waiting.append(rows)
        size = self._waiting_bytes.get(topic, 0) + rows.get_total_buffer_size()
        self._waiting_bytes[topic] = size
        if size >= _CHUNK_BYTES or sum(batch.num_rows for batch in waiting) >= _CHUNK_RECORDS:
            self._send_waiting(topic)
        elif sum(self._waiting_bytes.values()) >= _MAX_WAITING_BYTES:
            self._send_waiting(max(self._waiting_bytes, key=self._waiting_bytes.__getitem__))

    def add_losses(self, topic: str, lengths: list[int]) -> None:
        """Holes, behind what came before them."""
        self._send_waiting(topic)
        for start in range(0, len(lengths), _CHUNK_RECORDS):
            some = lengths[start : start + _CHUNK_RECORDS]
            records = [{"hole": length, "reason": "source_trim"} for length in some]
            body = {"records": records, "create": self._options.create}
            self._connection.post(topic_path(topic), body, **self._place(topic))
            self._count(topic, len(some))

    def finish(self) -> dict[str, int]:
        """Sends the rest; returns how many records each topic has got."""
        for topic in list(self._waiting):
            self._send_waiting(topic)
        return self._records

    def _send_waiting(self, topic: str) -> None:
        waiting = self._waiting.pop(topic, [])
        self._waiting_bytes.pop(topic, None)
        if not waiting:
            return
        check_topic_name(topic)
        rows = waiting[0] if len(waiting) == 1 else pa.Table.from_batches(waiting).combine_chunks().to_batches()[0]
        for start in range(0, rows.num_rows, _CHUNK_RECORDS):
            self._send(topic, rows.slice(start, _CHUNK_RECORDS))

    def _send(self, topic: str, rows: pa.RecordBatch) -> None:
        names = [name for name in rows.schema.names if name != "$row"]
        used = [name for name in names if name == "data" or rows.column(name).null_count < rows.num_rows]
        sink = pa.BufferOutputStream()
        chosen = rows.select(used)
        with pa.ipc.new_stream(sink, chosen.schema) as stream:
            stream.write_batch(chosen)
        body = memoryview(sink.getvalue())
        if len(body) > _CHUNK_BYTES and rows.num_rows > 1:
            self._send_halves(topic, rows)
            return
        create = "true" if self._options.create else "false"
        try:
            self._connection.post_arrow(topic_path(topic), body, create=create, **self._place(topic))
        except (BatchTooLarge, PayloadTooLarge) as error:
            if rows.num_rows == 1 or "TOPICS_MAX_TXN_BYTES" in error.message:
                raise _named(error, topic, rows) from None
            self._send_halves(topic, rows)
            return
        except (InvalidRequest, RecordTooLarge) as error:
            raise _named(error, topic, rows) from None
        self._count(topic, rows.num_rows)

    def _send_halves(self, topic: str, rows: pa.RecordBatch) -> None:
        half = rows.num_rows // 2
        self._send(topic, rows.slice(0, half))
        self._send(topic, rows.slice(half))

    def _place(self, topic: str) -> dict[str, Any]:
        return {"txn": self._txn, "part": self._part, "chunk": self._chunks.get(topic, 0)}

    def _count(self, topic: str, records: int) -> None:
        self._chunks[topic] = self._chunks.get(topic, 0) + 1
        self._records[topic] = self._records.get(topic, 0) + records


def _named(error: TopicsError, topic: str, rows: pa.RecordBatch) -> TopicsError:
    """A refusal that names the row as Spark counts it, not the place in our request."""
    found = _INDEX.search(error.message)
    if found is None and rows.num_rows > 1:
        return type(error)(f"topic {topic!r}: {error.message}")
    index = int(found[1]) if found is not None else 0
    row = rows.column("$row")[index].as_py()
    text = rows.column("data")[index].as_py()
    told = _INDEX.sub("", error.message, count=1).lstrip(".: ")
    return type(error)(f"row {row} of this task, for topic {topic!r}: {told}; its data begins with {text[:100]!r}")
