"""Writers that batch: records are handed over one by one and sent together, in order, each once.

Bounded: whoever writes faster than the server takes waits. Nothing is dropped silently: what a failed batch held, and
all behind it, stays in `unwritten`, and every later call raises what went wrong.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from topics.client import calls
from topics.client.buffer import Batch, Bounds, Buffer, encode_record
from topics.core.errors import InvalidRequest, TopicsError
from topics.core.names import check_topic_name

if TYPE_CHECKING:
    from topics.client.aio import AsyncClient
    from topics.client.sync import Client

_log = logging.getLogger("topics.writer")


class Receipt:
    """Stands for one record that was handed over: `result` waits until it is written, and says its seq."""

    __slots__ = ("_batch", "_index", "_writer")

    def __init__(self, writer: Writer, batch: Batch, index: int) -> None:
        self._writer = writer
        self._batch = batch
        self._index = index

    @property
    def is_done(self) -> bool:
        return self._batch.is_done

    def result(self, timeout: float | None = None) -> int:
        self._writer.wait_for(self._batch, timeout)
        return self._batch.seq(self._index)


class Writer:
    """A batching writer of one topic, safe for several threads; a thread of its own sends."""

    def __init__(
        self,
        client: Client,
        topic: str,
        bounds: Bounds,
        create: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = check_topic_name(topic)
        self._client = client
        self._create = create
        self._clock = clock
        self._buffer = Buffer(bounds)
        self._changed = threading.Condition()
        self._error: TopicsError | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"topics-writer-{topic}", daemon=True)
        self._thread.start()
        # A program that ends without closing has its records written all the same.
        atexit.register(self.close)

    @property
    def unwritten(self) -> list[Batch]:
        """What is not known to be written, oldest first."""
        with self._changed:
            return list(self._buffer.batches)

    def write(
        self, data: Any, *, tag: str | None = None, node: str | None = None, meta: Mapping[str, str] | None = None
    ) -> Receipt:
        """Hands a record over; waits while the buffer is full."""
        record = encode_record(data, tag, node, meta, self._buffer.bounds)
        with self._changed:
            self._check()
            while not self._buffer.has_room(len(record)):
                self._buffer.flush()
                self._changed.notify_all()
                self._changed.wait()
                self._check()
            before = self._buffer.due_in(0.0)
            batch, index = self._buffer.add(record, self._clock())
            if before is None or batch.is_closed:
                self._changed.notify_all()
        return Receipt(self, batch, index)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise InvalidRequest("the writer is closed")

    def wait_for(self, batch: Batch, timeout: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: batch.is_done or self._error is not None, timeout):
                raise TimeoutError("the record is not written yet")
            if not batch.is_done:
                batch.error = self._error

    def flush(self) -> None:
        """Sends what is there, and waits until it is written; raises what went wrong."""
        with self._changed:
            if self._buffer.batches:
                last = self._buffer.batches[-1]
                self._buffer.flush()
                self._changed.notify_all()
                self._changed.wait_for(lambda: last.is_done or self._error is not None)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._buffer.flush()
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        if self._error is not None and not was_closed:
            raise self._error

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch is None:
                return
            try:
                call = calls.write_encoded(self.topic, batch.records, batch.idempotency_key, self._create)
                written = self._client.send(call)
            except Exception as error:
                with self._changed:
                    self._error = error if isinstance(error, TopicsError) else TopicsError(f"cannot write: {error!r}")
                    batch.error = self._error
                    self._changed.notify_all()
                _log.error("%s: %d records are not written: %s", self.topic, self._buffer.records, error)
                return
            with self._changed:
                batch.written = written
                self._buffer.finish(batch)
                self._changed.notify_all()

    def _next(self) -> Batch | None:
        with self._changed:
            while True:
                left = self._buffer.due_in(self._clock())
                if left is None and self._is_closed:
                    return None
                if left == 0.0:
                    return self._buffer.first()
                self._changed.wait(left)


class AsyncReceipt:
    """Stands for one record that was handed over: awaited, it says its seq."""

    __slots__ = ("_batch", "_index", "_writer")

    def __init__(self, writer: AsyncWriter, batch: Batch, index: int) -> None:
        self._writer = writer
        self._batch = batch
        self._index = index

    @property
    def is_done(self) -> bool:
        return self._batch.is_done

    def __await__(self) -> Generator[Any, None, int]:
        yield from self._writer.wait_for(self._batch).__await__()
        return self._batch.seq(self._index)


class AsyncWriter:
    """A batching writer of one topic, for one event loop; a task of its own sends. Used with `async with`."""

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        bounds: Bounds,
        create: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = check_topic_name(topic)
        self._client = client
        self._create = create
        self._clock = clock
        self._buffer = Buffer(bounds)
        self._changed = asyncio.Condition()
        self._error: TopicsError | None = None
        self._is_closed = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def unwritten(self) -> list[Batch]:
        """What is not known to be written, oldest first."""
        return list(self._buffer.batches)

    async def __aenter__(self) -> AsyncWriter:
        self._task = asyncio.create_task(self._run(), name=f"topics-writer-{self.topic}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def write(
        self, data: Any, *, tag: str | None = None, node: str | None = None, meta: Mapping[str, str] | None = None
    ) -> AsyncReceipt:
        """Hands a record over; waits while the buffer is full."""
        record = encode_record(data, tag, node, meta, self._buffer.bounds)
        self._check()
        if not self._buffer.has_room(len(record)):
            async with self._changed:
                while not self._buffer.has_room(len(record)):
                    self._buffer.flush()
                    self._wake.set()
                    await self._changed.wait()
                    self._check()
        was_empty = not self._buffer.batches
        batch, index = self._buffer.add(record, self._clock())
        if was_empty or batch.is_closed:
            self._wake.set()
        return AsyncReceipt(self, batch, index)

    def _check(self) -> None:
        if self._task is None:
            raise InvalidRequest("the writer is not open: use it with `async with`")
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise InvalidRequest("the writer is closed")

    async def wait_for(self, batch: Batch) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: batch.is_done or self._error is not None)
        if not batch.is_done:
            batch.error = self._error

    async def flush(self) -> None:
        """Sends what is there, and waits until it is written; raises what went wrong."""
        if self._buffer.batches and self._error is None:
            last = self._buffer.batches[-1]
            self._buffer.flush()
            self._wake.set()
            await self.wait_for(last)
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        was_closed, self._is_closed = self._is_closed, True
        self._buffer.flush()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._error is not None and not was_closed:
            raise self._error

    async def _run(self) -> None:
        try:
            while True:
                batch = await self._next()
                if batch is None:
                    return
                call = calls.write_encoded(self.topic, batch.records, batch.idempotency_key, self._create)
                written = await self._client.send(call)
                async with self._changed:
                    batch.written = written
                    self._buffer.finish(batch)
                    self._changed.notify_all()
        except BaseException as error:
            why = error if isinstance(error, TopicsError) else TopicsError(f"cannot write: {error!r}")
            self._error = why
            _log.error("%s: %d records are not written: %s", self.topic, self._buffer.records, why)
            async with self._changed:
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise

    async def _next(self) -> Batch | None:
        while True:
            left = self._buffer.due_in(self._clock())
            if left is None and self._is_closed:
                return None
            if left == 0.0:
                return self._buffer.first()
            self._wake.clear()
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                pass
