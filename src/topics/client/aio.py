"""`topics.AsyncClient`: the contract over one pool of connections, for one event loop. As thin a shell as `Client`."""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Unpack

import httpx

from topics.client import calls
from topics.client.buffer import Bounds
from topics.client.calls import Call, Holder, Match, NewRecords
from topics.client.cursor import Cursor, Item, Reading, Wishes, cursor_of
from topics.client.endpoint import DEFAULT_URL, Endpoint, answer_of
from topics.client.errors import Unreachable
from topics.client.following import Ended, Event, Following, Start
from topics.client.options import RouterOptions, WatchOptions, WriteOptions
from topics.client.retry import Backoff, Done, T, Timing
from topics.client.transaction import AsyncTransaction
from topics.client.writer import AsyncWriter
from topics.core import answers
from topics.core.config import ConfigPatch
from topics.core.errors import TopicsError
from topics.core.limits import MAX_PAGE_SIZE
from topics.core.routing import End


class AsyncClient:
    """One server, from one event loop. Close it, or use it with `async with`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        key: str | None = None,
        *,
        timeout_ms: int = 30_000,
        connect_timeout_ms: int = 5_000,
        retry_ms: int = 30_000,
        verify: bool | ssl.SSLContext = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        timing = Timing(retry_ms=retry_ms, clock=clock, random=random)
        self._endpoint = Endpoint(url, key, timeout_ms, connect_timeout_ms, timing)
        self._http = httpx.AsyncClient(verify=verify if self._endpoint.has_tls else False, limits=self._endpoint.limits)
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self._endpoint.url

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(self, call: Call[T]) -> T:
        """One call, tried again where that is safe; raises what the server refuses."""
        attempts = self._endpoint.attempts(call)
        while True:
            try:
                step = attempts.judge(answer_of(await self._http.send(self._endpoint.request(call))))
            except httpx.RequestError as error:
                step = attempts.judge(self._endpoint.failure_of(error))
            if isinstance(step, Done):
                return step.value
            await self._sleep(step.seconds)

    # -- topics --------------------------------------------------------------------------------------------------------

    async def put(
        self, topic: str, config: ConfigPatch | dict[str, Any] | None = None, /, **fields: Any
    ) -> answers.TopicPut:
        """Creates a topic, or changes the given fields of its configuration."""
        return await self.send(calls.put(topic, config, fields))

    async def get(self, topic: str, *, touch: bool = True) -> answers.TopicState:
        """A topic's watermarks, counts and configuration; `touch=False` leaves its recency clock alone."""
        return await self.send(calls.get(topic, touch))

    async def topics(self, prefix: str = "") -> AsyncIterator[answers.TopicState]:
        """All topics, sorted by name, through as many pages as it takes."""
        page = await self.list_topics(prefix, MAX_PAGE_SIZE)
        for topic in page.topics:
            yield topic
        while page.next_cursor is not None:
            page = await self.list_topics(prefix, MAX_PAGE_SIZE, page.next_cursor)
            for topic in page.topics:
                yield topic

    async def list_topics(self, prefix: str = "", page_size: int = 100, cursor: str | None = None) -> answers.TopicPage:
        return await self.send(calls.list_topics(prefix, page_size, cursor))

    async def drop(self, topic: str, *, if_empty: bool = False) -> answers.TopicDropped:
        """Deletes a topic with everything in it."""
        return await self.send(calls.drop(topic, if_empty))

    # -- records -------------------------------------------------------------------------------------------------------

    async def write(self, topic: str, records: NewRecords, **options: Unpack[WriteOptions]) -> answers.Written:
        """Appends all records or none. Tried again it is still written once: it carries a key."""
        return await self.send(calls.write(topic, records, secrets.token_hex(16), **options))

    def writer(
        self,
        topic: str,
        *,
        create: bool = True,
        flush_ms: int = 20,
        batch_records: int = 1000,
        batch_bytes: int = 1 << 20,
        buffer_records: int = 10_000,
        buffer_bytes: int = 16 << 20,
        record_bytes: int = 1 << 20,
    ) -> AsyncWriter:
        """A writer that takes records one by one and sends them in batches."""
        bounds = Bounds(
            flush_ms=flush_ms,
            batch_records=batch_records,
            batch_bytes=batch_bytes,
            buffer_records=buffer_records,
            buffer_bytes=buffer_bytes,
            record_bytes=record_bytes,
        )
        return AsyncWriter(self, topic, bounds, create, self._endpoint.timing.clock)

    async def diff(
        self,
        topic: str,
        from_seq: int | Cursor = 0,
        *,
        wait_ms: int = 0,
        to_seq: int | None = None,
        limit: int | None = None,
        node: str | Sequence[str] | None = None,
        match: Match | None = None,
        include_tags: bool = False,
        include_meta: bool = True,
        max_bytes: int | None = None,
        epoch: int | None = None,
    ) -> answers.Diff:
        """One read from a cursor."""
        cursor = cursor_of(from_seq)
        return await self.send(
            calls.diff(
                topic,
                cursor.seq,
                epoch=cursor.epoch if epoch is None else epoch,
                to_seq=to_seq,
                limit=limit,
                node=node,
                match=match,
                include_tags=include_tags,
                include_meta=include_meta,
                wait_ms=wait_ms,
                max_bytes=max_bytes,
            )
        )

    def read(
        self,
        topic: str,
        from_seq: int | Cursor = 0,
        *,
        to_seq: int | None = None,
        limit: int | None = None,
        node: str | Sequence[str] | None = None,
        match: Match | None = None,
        include_tags: bool = False,
        include_meta: bool = True,
    ) -> AsyncReader:
        """Records and tombstones up to the head (or `to_seq`); then it ends."""
        wishes = Wishes(
            to_seq=to_seq, limit=limit, node=node, match=match, include_tags=include_tags, include_meta=include_meta
        )
        return AsyncReader(self, Reading(topic, from_seq, wishes))

    def follow(
        self,
        topic: str,
        from_seq: int | Cursor = 0,
        *,
        wait_ms: int = 20_000,
        limit: int | None = None,
        node: str | Sequence[str] | None = None,
        match: Match | None = None,
        include_tags: bool = False,
        include_meta: bool = True,
    ) -> AsyncReader:
        """Records and tombstones, and then whatever comes, by long poll; it does not end by itself."""
        wishes = Wishes(limit=limit, node=node, match=match, include_tags=include_tags, include_meta=include_meta)
        return AsyncReader(self, Reading(topic, from_seq, wishes, max(wait_ms, 1)))

    async def seek(self, topic: str, ts: int) -> int:
        """The cursor from which a read starts at a time."""
        return (await self.send(calls.seek(topic, ts))).from_seq

    async def ranges(
        self, topic: str, from_seq: int = 0, *, to_seq: int | None = None, limit: int | None = None
    ) -> answers.Ranges:
        """What became of every seq: alive, deleted, or lost and why."""
        return await self.send(calls.ranges(topic, from_seq, to_seq, limit))

    async def delete(
        self, topic: str, before_seq: int | None = None, match: Match | None = None, *, purpose: str = "erase"
    ) -> answers.Deleted:
        """Deletes records by seq, by tag, or by both."""
        return await self.send(calls.delete(topic, before_seq, match, purpose))

    async def deletes(self, topic: str, after: int = 0) -> answers.Deletes:
        return await self.send(calls.deletes(topic, after))

    # -- transactions --------------------------------------------------------------------------------------------------

    def transaction(self, client_id: str | None = None, client_seq: int | None = None) -> AsyncTransaction:
        """`async with client.transaction() as txn`: what is written in it is committed at its end, all or nothing."""
        return AsyncTransaction(self, client_id, client_seq)

    async def spool(
        self, txn: str, topic: str, part: str, chunk: int, records: NewRecords, *, node: str | None = None
    ) -> answers.Spooled:
        return await self.send(calls.spool(txn, topic, part, chunk, records, node))

    async def commit(
        self,
        txn: str,
        parts: Sequence[Mapping[str, Any]],
        client_id: str | None = None,
        client_seq: int | None = None,
    ) -> answers.Committed:
        return await self.send(calls.commit(txn, parts, client_id, client_seq))

    async def abort(self, txn: str) -> answers.Aborted:
        return await self.send(calls.abort(txn))

    async def txn(self, txn: str) -> answers.TxnState:
        return await self.send(calls.get_txn(txn))

    # -- queues --------------------------------------------------------------------------------------------------------

    async def claim(
        self, topic: str, node: str, max: int = 1, *, lease_ms: int | None = None, wait_ms: int = 0
    ) -> answers.Claimed:
        """Leases jobs. Not tried again when its answer gets lost: the jobs are out then, until their lease is over."""
        return await self.send(calls.claim(topic, node, max, lease_ms, wait_ms))

    async def ack(
        self,
        topic: str,
        *,
        node: str | None = None,
        seqs: Sequence[int] | None = None,
        lease_ids: Sequence[str] | None = None,
        lease_id: str | None = None,
    ) -> answers.Acked:
        holder = Holder(node=node, seqs=seqs, lease_ids=lease_ids, lease_id=lease_id)
        return await self.send(calls.ack(topic, holder))

    async def nack(
        self,
        topic: str,
        *,
        node: str | None = None,
        seqs: Sequence[int] | None = None,
        lease_ids: Sequence[str] | None = None,
        lease_id: str | None = None,
        delay_ms: int = 0,
    ) -> answers.Nacked:
        holder = Holder(node=node, seqs=seqs, lease_ids=lease_ids, lease_id=lease_id)
        return await self.send(calls.nack(topic, holder, delay_ms))

    async def extend(
        self,
        topic: str,
        *,
        node: str | None = None,
        seqs: Sequence[int] | None = None,
        lease_ids: Sequence[str] | None = None,
        lease_id: str | None = None,
        lease_ms: int | None = None,
    ) -> answers.Extended:
        holder = Holder(node=node, seqs=seqs, lease_ids=lease_ids, lease_id=lease_id)
        return await self.send(calls.extend(topic, holder, lease_ms))

    async def unblock(self, topic: str, seqs: Sequence[int]) -> answers.Unblocked:
        return await self.send(calls.unblock(topic, seqs))

    async def redrive(self, topic: str, max: int = 1, to: str | None = None) -> answers.Redriven:
        return await self.send(calls.redrive(topic, max, to))

    async def leases(self, topic: str, page_size: int = 100, after: int = 0) -> answers.Leases:
        return await self.send(calls.list_leases(topic, page_size, after))

    # -- routers -------------------------------------------------------------------------------------------------------

    async def put_router(
        self,
        router: str,
        source: End | None = None,
        dest: End | None = None,
        **options: Unpack[RouterOptions],
    ) -> answers.Router:
        """Creates a router, or changes what is given."""
        return await self.send(calls.put_router(router, source, dest, options))

    async def router(self, router: str) -> answers.Router:
        return await self.send(calls.get_router(router))

    async def routers(
        self, prefix: str = "", source: str | None = None, dest: str | None = None
    ) -> AsyncIterator[answers.Router]:
        """All routers, through as many pages as it takes."""
        page = await self.send(calls.list_routers(prefix, source, dest, MAX_PAGE_SIZE, None))
        for each in page.routers:
            yield each
        while page.next_cursor is not None:
            page = await self.send(calls.list_routers(prefix, source, dest, MAX_PAGE_SIZE, page.next_cursor))
            for each in page.routers:
                yield each

    async def drop_router(self, router: str) -> answers.RouterDropped:
        return await self.send(calls.drop_router(router))

    # -- live, and the server itself -----------------------------------------------------------------------------------

    def watch(self, topics: Mapping[str, Start] | Sequence[str], **options: Unpack[WatchOptions]) -> AsyncWatch:
        """Follows topics over one stream: `{name: seq, or a Cursor, or "tail"}`."""
        return AsyncWatch(self, Following(topics, **options))

    async def health(self) -> answers.Health:
        return await self.send(calls.health())

    async def ready(self) -> answers.Ready:
        return await self.send(calls.ready())

    async def open_stream(self, following: Following) -> httpx.Response:
        request = self._endpoint.stream_request(following.target(), following.last_event_id, following.heartbeat_ms)
        return await self._http.send(request, stream=True)

    @property
    def timing(self) -> Timing:
        return self._endpoint.timing

    async def pause(self, seconds: float) -> None:
        await self._sleep(seconds)


class AsyncReader:
    """Records and tombstones of one topic, in order, each once. `cursor` stands behind the last one handed out: pass
    it to the next reader, it is the acknowledgement."""

    def __init__(self, client: AsyncClient, reading: Reading) -> None:
        self._client = client
        self._reading = reading

    @property
    def topic(self) -> str:
        return self._reading.topic

    @property
    def cursor(self) -> Cursor:
        return self._reading.cursor

    @property
    def head_seq(self) -> int:
        """The head as the last answer told it."""
        return self._reading.head_seq

    def __aiter__(self) -> AsyncReader:
        return self

    async def __anext__(self) -> Item:
        while True:
            item = self._reading.pop()
            if item is not None:
                return item
            call = self._reading.call()
            if call is None:
                raise StopAsyncIteration
            self._reading.take(await self._client.send(call))


class AsyncWatch:
    """What happens to topics, over one stream that is opened again where it broke. Close it, or use `async with`."""

    def __init__(self, client: AsyncClient, following: Following) -> None:
        self._client = client
        self._following = following
        self._backoff = Backoff(client.timing)
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    @property
    def cursors(self) -> dict[str, Cursor]:
        """Behind the last event handed out; a watch that begins there goes on exactly."""
        return dict(self._following.cursors)

    async def close(self) -> None:
        self._chunks = None
        if self._response is not None:
            response, self._response = self._response, None
            with suppress(httpx.HTTPError):
                await response.aclose()

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> Event:
        while True:
            event = self._following.pop()
            if event is not None:
                return event
            await self._read()

    async def _read(self) -> None:
        """Reads on, from another connection if need be."""
        failure: TopicsError
        at_least = 0.0
        try:
            if self._chunks is None and not await self._open():
                return
            assert self._chunks is not None
            chunk = await anext(self._chunks, None)
            if chunk is not None:
                if self._following.feed(chunk):
                    self._backoff.reset()
                return
            failure = Unreachable(f"{self._client.url} ended the stream")
        except httpx.HTTPError as error:
            failure = Unreachable(f"cannot reach {self._client.url}: {error or type(error).__name__}")
        except Ended as ended:
            failure, at_least = ended.error, ended.seconds
        await self._wait(failure, at_least)

    async def _wait(self, failure: TopicsError, at_least: float = 0.0) -> None:
        await self.close()
        pause = self._backoff.next(at_least)
        if pause is None:
            raise failure
        await self._client.pause(pause)

    async def _open(self) -> bool:
        call = self._following.create_call()
        if call is not None:
            self._following.on_session(await self._client.send(call))
        response = await self._client.open_stream(self._following)
        if response.status_code != 200:
            await response.aread()
            refused = self._following.on_refused(answer_of(response))
            await self._wait(refused or Unreachable(f"{self._client.url} has dropped the watch"))
            return False
        self._response = response
        self._backoff.begin()
        self._chunks = response.aiter_raw()
        return True
