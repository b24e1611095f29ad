"""What a batching writer holds: records that wait, in batches, within bounds. Pure state; the writers wait."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from topics.core.answers import Written
from topics.core.check import check_integer, check_jsonable, check_text
from topics.core.errors import InvalidRequest, RecordTooLarge, TopicsError

_encode = msgspec.json.Encoder().encode
_MAX_TAG = 1 << 16


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """`flush_ms` is how long a record may wait for company; the others bound a batch, and all that waits."""

    flush_ms: int = 20
    batch_records: int = 1000
    batch_bytes: int = 1 << 20
    buffer_records: int = 10_000
    buffer_bytes: int = 16 << 20
    record_bytes: int = 1 << 20

    def check(self) -> Bounds:
        for name in self.__struct_fields__:
            check_integer(name, getattr(self, name), 0 if name == "flush_ms" else 1)
        return self


class Batch:
    """Records that are written together. Its key makes a repeat harmless, also one by hand after a failure."""

    __slots__ = ("bytes", "due", "error", "idempotency_key", "is_closed", "records", "waiter", "written")

    def __init__(self, due: float) -> None:
        self.records: list[bytes] = []
        self.bytes = 0
        self.due = due
        self.idempotency_key = secrets.token_hex(16)
        self.is_closed = False
        self.written: Written | None = None
        self.error: TopicsError | None = None
        # What a receipt waits for: a thread's event, or a future. Made only when somebody waits.
        self.waiter: Any = None

    @property
    def is_done(self) -> bool:
        return self.written is not None or self.error is not None

    def seq(self, index: int) -> int:
        if self.error is not None:
            raise self.error
        assert self.written is not None
        return self.written.first_seq + index


class Buffer:
    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds.check()
        self.batches: deque[Batch] = deque()
        self.records = 0
        self.bytes = 0

    def has_room(self, size: int) -> bool:
        """One record always has, however large it is."""
        if not self.records:
            return True
        return self.records < self.bounds.buffer_records and self.bytes + size <= self.bounds.buffer_bytes

    def add(self, record: bytes, now: float) -> tuple[Batch, int]:
        assert self.has_room(len(record))
        last = self.batches[-1] if self.batches else None
        if last is None or last.is_closed or last.bytes + len(record) > self.bounds.batch_bytes:
            if last is not None:
                last.is_closed = True
            last = Batch(now + self.bounds.flush_ms / 1000)
            self.batches.append(last)
        last.records.append(record)
        last.bytes += len(record)
        if len(last.records) >= self.bounds.batch_records or last.bytes >= self.bounds.batch_bytes:
            last.is_closed = True
        self.records += 1
        self.bytes += len(record)
        return last, len(last.records) - 1

    def due_in(self, now: float) -> float | None:
        """How long until the first batch is to be sent; None when there is none."""
        if not self.batches:
            return None
        first = self.batches[0]
        return 0.0 if first.is_closed else max(first.due - now, 0.0)

    def flush(self) -> None:
        """Everything that is here now is due, because somebody waits for it."""
        if self.batches:
            self.batches[-1].is_closed = True

    def first(self) -> Batch:
        """The batch that is sent now. It stays in the buffer until it is done: what is not acked is held."""
        batch = self.batches[0]
        batch.is_closed = True
        return batch

    def finish(self, batch: Batch) -> None:
        assert self.batches[0] is batch
        self.batches.popleft()
        self.records -= len(batch.records)
        self.bytes -= batch.bytes


def encode_record(
    data: Any, tag: str | None, node: str | None, meta: Mapping[str, str] | None, bounds: Bounds
) -> bytes:
    """A record as JSON, refused here and not with its whole batch later."""
    fields: dict[str, Any] = {"data": data}
    check_jsonable("data", data)
    if tag is not None:
        fields["tag"] = check_text("tag", tag, _MAX_TAG) if tag else tag
    if node is not None:
        fields["node"] = check_text("node", node, _MAX_TAG) if node else node
    if meta is not None:
        if not isinstance(meta, Mapping) or not all([isinstance(value, str) for value in meta.values()]):
            raise InvalidRequest("meta must be an object of strings")
        fields["meta"] = dict(meta)
        check_jsonable("meta", fields["meta"])
    try:
        encoded = _encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"data: cannot be written as JSON: {error}") from None
    if len(encoded) > bounds.record_bytes + 1024:
        raise RecordTooLarge(f"the record has {len(encoded)} bytes, record_bytes is {bounds.record_bytes}")
    return encoded
