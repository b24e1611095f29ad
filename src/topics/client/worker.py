"""`topics.Worker`: takes jobs of a queue, keeps them leased while they are worked on, and settles them.

At least once: a job is acked when its handler has returned, and goes back in line in every other case. The handler may
be a coroutine function, or a plain one that then runs on a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

from topics.client.aio import AsyncClient
from topics.client.endpoint import DEFAULT_URL
from topics.client.errors import NotReady, Unreachable
from topics.client.retry import Backoff
from topics.core.answers import Claimed, Job, Lease
from topics.core.check import check_integer, check_text
from topics.core.errors import (
    AckHoleCapExceeded,
    InFlightCapExceeded,
    InvalidRequest,
    ShuttingDown,
    Throttled,
    TopicsError,
)
from topics.core.limits import MAX_PAGE_SIZE, MAX_WAIT_MS
from topics.core.names import check_topic_name
from topics.core.tombstone import Tombstone

Handler = Callable[[Job], Any] | Callable[[Job], Awaitable[Any]]
_log = logging.getLogger("topics.worker")
_MAX_CONCURRENCY = 1000
# What a worker waits out, however long it lasts.
_PASSING = (Unreachable, NotReady, ShuttingDown, Throttled, AckHoleCapExceeded, InFlightCapExceeded)
# A worker does not ask again and again for nothing.
_MIN_WAIT_MS = 100
# Seconds for telling the server what became of the last jobs.
_LAST_WORD = 5.0
_MIN_LEASE_MS, _MAX_LEASE_MS = 100, 86_400_000


class Postpone(Exception):  # it is no error: a handler says so
    """Raised by a handler: not now. The job goes back, to be had again after `delay_ms`."""

    def __init__(self, delay_ms: int = 0) -> None:
        super().__init__(f"postponed by {delay_ms} ms")
        self.delay_ms = check_integer("delay_ms", delay_ms)


class _Held:
    """A job in hand, and what is to become of it."""

    __slots__ = ("delay_ms", "is_lost", "job", "outcome", "task")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.task: asyncio.Task[None] | None = None
        self.outcome: Literal["ack", "nack"] | None = None
        self.delay_ms = 0
        # Its lease ran out and somebody else has it.
        self.is_lost = False


class Worker:
    """`run()` in a program of its own, `await serve()` inside an event loop; `stop()` from anywhere.

    `node` names this worker, and nobody else; without one it gets a name of its own. `error_delay_ms` is how long a job
    whose handler failed stays away. A stop waits `stop_ms` for handlers at work; what is not done then goes back.
    """

    def __init__(
        self,
        server: str | AsyncClient,
        queue: str,
        handler: Handler,
        *,
        key: str | None = None,
        node: str | None = None,
        concurrency: int = 8,
        lease_ms: int = 30_000,
        error_delay_ms: int = 1000,
        stop_ms: int = 30_000,
        wait_ms: int = 20_000,
        on_loss: Callable[[Tombstone | None, int], None] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.queue = check_topic_name(queue, "queue")
        if not callable(handler):
            raise InvalidRequest("handler must be a function, or a coroutine function")
        self._server: str | AsyncClient = server or DEFAULT_URL
        self._key = key
        self._handler = handler
        self._has_own_name = node is None
        self.node = check_text("node", node or f"{socket.gethostname()[:80]}-{os.getpid()}-{secrets.token_hex(6)}", 128)
        self._concurrency = check_integer("concurrency", concurrency, 1, _MAX_CONCURRENCY)
        self._lease_ms = check_integer("lease_ms", lease_ms, _MIN_LEASE_MS, _MAX_LEASE_MS)
        self._error_delay_ms = check_integer("error_delay_ms", error_delay_ms)
        self._stop_ms = check_integer("stop_ms", stop_ms)
        self._wait_ms = check_integer("wait_ms", wait_ms, _MIN_WAIT_MS, MAX_WAIT_MS)
        self._on_loss = on_loss
        self._sleep = sleep
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
        self._lost: int | None = None
        # By lease and seq: a job whose lease was lost may come again while it is still worked on.
        self._held: dict[tuple[str, int], _Held] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        # No handler is at work any more: what is left is to be settled.
        self._ending = asyncio.Event()
        # Some job has an outcome; some job is off our hands.
        self._has_outcome = asyncio.Event()
        self._has_room = asyncio.Event()
        self.done = 0
        self.failed = 0

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Works until SIGTERM or Ctrl-C; a second one does not wait for handlers."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                with suppress(NotImplementedError, ValueError, RuntimeError):
                    loop.add_signal_handler(number, self.stop)
            await self.serve()

        asyncio.run(main())

    def stop(self) -> None:
        """Ends gracefully: no new jobs, those in hand are finished. Called again, it hurries."""
        loop = self._loop
        if loop is None:
            self._stopping.set()
            return
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._on_stop)

    def _on_stop(self) -> None:
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()

    async def serve(self) -> None:
        """Works until `stop`, or until something is wrong that waiting does not mend; then it raises that."""
        if self._loop is not None:
            raise InvalidRequest("the worker runs already")
        self._loop = asyncio.get_running_loop()
        client = self._server if isinstance(self._server, AsyncClient) else AsyncClient(self._server, self._key)
        if not self._is_async:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="topics-job")
        beating = asyncio.create_task(self._beat(client))
        settling = asyncio.create_task(self._settle(client))
        try:
            await self._claim(client)
        finally:
            try:
                await self._drain()
                self._ending.set()
                self._has_outcome.set()
                await asyncio.wait([settling], timeout=max(self._stop_ms / 1000, _LAST_WORD))
            finally:
                beating.cancel()
                settling.cancel()
                await asyncio.wait([beating, settling])
                if self._held:
                    _log.error("%s: %d jobs are not settled; their leases run out", self.queue, len(self._held))
                if self._threads is not None:
                    self._threads.shutdown(wait=False, cancel_futures=True)
                if client is not self._server:
                    await client.close()
                self._loop = None

    # -- taking --------------------------------------------------------------------------------------------------------

    async def _claim(self, client: AsyncClient) -> None:
        backoff = Backoff(client.timing)
        while not self._stopping.is_set():
            room = self._concurrency - len(self._held)
            if not room:
                self._has_room.clear()
                await _first(self._has_room.wait(), self._stopping)
                continue
            asking = asyncio.ensure_future(
                client.claim(self.queue, self.node, room, lease_ms=self._lease_ms, wait_ms=self._wait_ms)
            )
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not asking.done() and self._has_own_name:
                # Nobody waits for the answer any more. What it may have leased all the same is found by our name.
                asking.cancel()
                await asyncio.wait([asking])
                await self._release(client)
                return
            try:
                claimed = await asking
            except _PASSING as error:
                pause = backoff.next()
                if pause is None:
                    _log.warning("%s: %s; going on trying", self.queue, error.message)
                    backoff.reset()
                    pause = 1.0
                await _first(self._sleep(pause), self._stopping)
                if isinstance(error, Unreachable) and self._has_own_name:
                    await self._take_up(client)
                continue
            backoff.reset()
            self._tell_loss(claimed)
            for job in claimed.claimed:
                self._begin(job)

    def _tell_loss(self, claimed: Claimed) -> None:
        """No job vanishes silently: what the queue has lost since the last look is told."""
        before, self._lost = self._lost, claimed.lost
        if claimed.lost > (before or 0):
            stone = claimed.tombstone
            where = f", latest seqs {stone.gap_from} to {stone.gap_to} ({stone.reason})" if stone is not None else ""
            _log.warning("%s has lost %d jobs%s", self.queue, claimed.lost - (before or 0), where)
            if self._on_loss is not None:
                self._on_loss(stone, claimed.lost - (before or 0))

    async def _unknown(self, client: AsyncClient) -> list[Lease]:
        """What a claim whose answer got lost has leased to this worker. Its name is nobody else's."""
        found: list[Lease] = []
        after = 0
        while True:
            page = await client.leases(self.queue, MAX_PAGE_SIZE, after)
            for lease in page.leases:
                if lease.node == self.node and lease.lease_id and (lease.lease_id, lease.seq) not in self._held:
                    found.append(lease)
            if len(page.leases) < MAX_PAGE_SIZE:
                return found
            after = page.leases[-1].seq

    async def _take_up(self, client: AsyncClient) -> None:
        """Works on them all the same: to claim them once more would cost them a delivery."""
        with suppress(*_PASSING):
            for lease in await self._unknown(client):
                answer = await client.diff(self.queue, lease.seq - 1, to_seq=lease.seq, limit=1, include_tags=True)
                for record in answer.records:
                    assert lease.lease_id is not None
                    job = Job(
                        seq=record.seq,
                        ts=record.ts,
                        node=record.node,
                        tag=record.tag,
                        meta=record.meta,
                        raw=record.raw,
                        lease_id=lease.lease_id,
                        deadline=lease.deadline or 0,
                        deliveries=lease.deliveries,
                    )
                    self._begin(job)

    async def _release(self, client: AsyncClient) -> None:
        """Gives them back."""
        with suppress(TopicsError):
            unknown = await self._unknown(client)
            if unknown:
                await client.nack(
                    self.queue,
                    node=self.node,
                    seqs=[lease.seq for lease in unknown],
                    lease_ids=[lease.lease_id for lease in unknown if lease.lease_id is not None],
                )

    # -- working -------------------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        held = self._held[job.lease_id, job.seq] = _Held(job)
        held.task = asyncio.create_task(self._work(held), name=f"topics-job-{job.seq}")

    async def _work(self, held: _Held) -> None:
        try:
            if self._threads is None:
                await self._handler(held.job)
            else:
                assert self._loop is not None
                await self._loop.run_in_executor(self._threads, self._handler, held.job)
            held.outcome = "ack"
        except Postpone as later:
            held.outcome, held.delay_ms = "nack", later.delay_ms
        except asyncio.CancelledError:
            held.outcome = "nack"
        except Exception:
            _log.exception("%s: job %d failed (delivery %d)", self.queue, held.job.seq, held.job.deliveries)
            self.failed += 1
            held.outcome, held.delay_ms = "nack", self._error_delay_ms
        self._has_outcome.set()

    async def _beat(self, client: AsyncClient) -> None:
        """Extends what is in hand, three times in a lease."""
        while True:
            await self._sleep(self._lease_ms / 3000)
            held = [each for each in self._held.values() if not each.is_lost]
            if held:
                await self._extend(client, held)

    async def _extend(self, client: AsyncClient, held: list[_Held]) -> None:
        try:
            extended = await client.extend(
                self.queue,
                node=self.node,
                seqs=[each.job.seq for each in held],
                lease_ids=[each.job.lease_id for each in held],
                lease_ms=self._lease_ms,
            )
        except TopicsError as error:
            _log.warning("%s: leases are not extended: %s", self.queue, error.message)
            return
        skipped = set(extended.skipped_seqs)
        for each in held:
            if each.job.seq in skipped and each.outcome is None:
                each.is_lost = True
                _log.warning("%s: the lease of job %d is lost; it may be done twice", self.queue, each.job.seq)

    # -- settling ------------------------------------------------------------------------------------------------------

    async def _settle(self, client: AsyncClient) -> None:
        """Tells the server what became of jobs. Those that are done while it does so go together next time."""
        backoff = Backoff(client.timing)
        while True:
            await self._has_outcome.wait()
            self._has_outcome.clear()
            try:
                await self._tell(client)
                backoff.reset()
            except _PASSING as error:
                # They stay in hand, and take room: a worker that cannot ack takes no more.
                _log.warning("%s: jobs are not settled yet: %s", self.queue, error.message)
                self._has_outcome.set()
                if self._ending.is_set():
                    return
                await _first(self._sleep(backoff.next() or 1.0), self._ending)
            if self._ending.is_set() and not self._held:
                return

    async def _tell(self, client: AsyncClient) -> None:
        settled = [each for each in self._held.values() if each.outcome is not None]
        groups: dict[tuple[str, int], list[_Held]] = {}
        for each in settled:
            assert each.outcome is not None
            groups.setdefault((each.outcome, each.delay_ms), []).append(each)
        for (outcome, delay_ms), group in groups.items():
            seqs = [each.job.seq for each in group]
            lease_ids = [each.job.lease_id for each in group]
            try:
                if outcome == "ack":
                    acked = await client.ack(self.queue, node=self.node, seqs=seqs, lease_ids=lease_ids)
                    self.done += acked.acked
                else:
                    await client.nack(self.queue, node=self.node, seqs=seqs, lease_ids=lease_ids, delay_ms=delay_ms)
            except _PASSING:
                raise
            except TopicsError as error:
                _log.error("%s: %d jobs cannot be settled: %s", self.queue, len(group), error.message)
            for each in group:
                del self._held[each.job.lease_id, each.job.seq]
            self._has_room.set()

    async def _drain(self) -> None:
        """Waits for handlers at work, but not for ever; those that are left are cancelled, and their jobs go back."""
        tasks = [each.task for each in self._held.values() if each.task is not None and not each.task.done()]
        if not tasks:
            return
        hurrying = asyncio.ensure_future(self._hurrying.wait())
        everything = asyncio.ensure_future(asyncio.wait(tasks))
        await asyncio.wait([everything, hurrying], timeout=self._stop_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _first(work: Awaitable[Any], event: asyncio.Event) -> None:
    """Waits for something, or for an event that is of more weight."""
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(work), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
