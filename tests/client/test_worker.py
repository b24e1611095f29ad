"""`topics.Worker`: jobs are worked on, kept leased, settled, and given back when it stops."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.client.proxy import Cut, Proxy
from tests.client.test_cuts import no_wait_async
from tests.http.server import DEADLINE, Background, LocalServer, eventually
from topics.client.aio import AsyncClient
from topics.client.sync import Client
from topics.client.worker import Postpone, Worker
from topics.core.answers import Job, QueueState
from topics.core.errors import InvalidRequest, NotAQueue, TopicNotFound


def queue_of(client: Client, topic: str, count: int, **config: Any) -> str:
    client.put(topic, type="queue", **config)
    if count:
        client.write(topic, [{"data": n} for n in range(count)])
    return topic


def state_of(client: Client, topic: str) -> QueueState:
    state = client.get(topic).queue
    assert state is not None
    return state


class Ending:
    """A handler that notes its jobs, and ends the worker after so many."""

    def __init__(self, count: int) -> None:
        self.seen: Counter[Any] = Counter()
        self._count = count
        self._lock = threading.Lock()
        self.worker: Worker | None = None

    def note(self, job: Job) -> None:
        with self._lock:
            self.seen[job.data] += 1
            if len(self.seen) == self._count:
                assert self.worker is not None
                self.worker.stop()


def run(server: LocalServer, topic: str, ending: Ending, handler: Callable[[Job], Any], **fields: Any) -> Worker:
    ending.worker = worker = Worker(server.url, topic, handler, **fields)
    worker.run()
    return worker


def test_every_job_is_worked_on_and_acked_on_threads(server: LocalServer, client: Client, topic: str) -> None:
    queue_of(client, topic, 200)
    ending = Ending(200)
    worker = run(server, topic, ending, ending.note, concurrency=16)
    assert ending.seen == Counter(range(200))
    assert worker.done == 200
    assert (client.get(topic).count, state_of(client, topic).in_flight) == (0, 0)


def test_every_job_is_worked_on_and_acked_by_a_coroutine(server: LocalServer, client: Client, topic: str) -> None:
    async def handle(job: Job) -> None:
        await asyncio.sleep(0)
        ending.note(job)

    queue_of(client, topic, 200)
    ending = Ending(200)
    assert run(server, topic, ending, handle, concurrency=16).done == 200
    assert client.get(topic).count == 0


def test_no_more_jobs_at_a_time_than_asked_for(server: LocalServer, client: Client, topic: str) -> None:
    async def handle(job: Job) -> None:
        at_work.add(job.seq)
        most.append(len(at_work))
        for _ in range(10):
            await asyncio.sleep(0)
        at_work.remove(job.seq)
        ending.note(job)

    at_work: set[int] = set()
    most: list[int] = []
    queue_of(client, topic, 40)
    ending = Ending(40)
    run(server, topic, ending, handle, concurrency=3)
    assert max(most) == 3


def test_a_job_whose_handler_fails_comes_again_and_is_poison_in_the_end(
    server: LocalServer, client: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(job: Job) -> None:
        deliveries.append(job.deliveries)
        if job.data == 0 and len(deliveries) < 10:
            raise ValueError("cannot do this one")
        ending.note(job)

    queue_of(client, topic, 1, max_deliveries=3, dead_letter=f"{topic}.dead")
    deliveries: list[int] = []
    ending = Ending(1)
    ending.worker = worker = Worker(server.url, topic, handle, error_delay_ms=0, concurrency=1, wait_ms=500)
    running = Background(worker.run)
    eventually(lambda: any(state.topic == f"{topic}.dead" for state in client.topics(topic)), "the dead letter")
    worker.stop()
    running.result()
    assert deliveries == [1, 2, 3]
    assert worker.failed == 3
    (record,) = client.diff(f"{topic}.dead").records
    assert record.meta is not None
    assert record.meta["$dead_letter_deliveries"] == "3"
    assert "cannot do this one" in caplog.text


def test_a_handler_may_postpone_a_job(server: LocalServer, client: Client, topic: str) -> None:
    def handle(job: Job) -> None:
        if job.data == 0:
            ending.note(job)
            raise Postpone(delay_ms=3_600_000)
        ending.note(job)

    queue_of(client, topic, 2)
    ending = Ending(2)
    run(server, topic, ending, handle, concurrency=1)
    state = state_of(client, topic)
    assert (state.delayed, state.ready, state.in_flight) == (1, 0, 0)


class ManualSleep:
    """Sleeps that end when the test says so."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.asked: list[float] = []

    async def __call__(self, seconds: float) -> None:
        event = asyncio.Event()
        self.asked.append(seconds)
        self._waiting.append((asyncio.get_running_loop(), event))
        await event.wait()

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)


def test_leases_are_extended_while_a_job_is_worked_on(server: LocalServer, client: Client, topic: str) -> None:
    def handle(job: Job) -> None:
        assert go_on.wait(DEADLINE)
        ending.note(job)

    def deadline() -> int:
        (lease,) = client.leases(topic).leases
        assert lease.deadline is not None
        return lease.deadline

    queue_of(client, topic, 1)
    go_on = threading.Event()
    sleep = ManualSleep()
    ending = Ending(1)
    ending.worker = worker = Worker(server.url, topic, handle, lease_ms=3_000_000, sleep=sleep)
    running = Background(worker.run)
    eventually(lambda: state_of(client, topic).in_flight == 1, "a job at work")
    for _ in range(3):
        before = deadline()
        eventually(lambda: bool(sleep._waiting), "the next heartbeat")
        # Two extensions in one millisecond look like one.
        eventually(lambda at=before - 3_000_000: time.time_ns() // 1_000_000 > at, "a later time")  # type: ignore[misc]
        sleep.wake()
        eventually(lambda before=before: deadline() > before, "an extended lease")  # type: ignore[misc]
    go_on.set()
    running.result()
    # Three times in a lease.
    assert set(sleep.asked) == {1000.0}
    assert worker.done == 1


def test_a_lease_that_was_lost_is_told_and_its_job_is_not_acked(
    server: LocalServer, client: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(job: Job) -> None:
        assert go_on.wait(DEADLINE)

    queue_of(client, topic, 1)
    go_on = threading.Event()
    sleep = ManualSleep()
    worker = Worker(server.url, topic, handle, node="slow", sleep=sleep, wait_ms=100, concurrency=1)
    running = Background(worker.run)
    eventually(lambda: state_of(client, topic).in_flight == 1, "a job at work")
    # Somebody takes it away.
    client.nack(topic, node="slow", seqs=[1])
    assert client.claim(topic, "thief").count == 1
    with caplog.at_level(logging.WARNING, "topics.worker"):
        eventually(lambda: bool(sleep._waiting), "the heartbeat")
        sleep.wake()
        eventually(lambda: "lease of job 1 is lost" in caplog.text, "the warning")
    go_on.set()
    worker.stop()
    running.result()
    assert worker.done == 0
    assert [lease.node for lease in client.leases(topic).leases] == ["thief"]


def test_a_stop_waits_for_jobs_at_work_and_takes_no_more(server: LocalServer, client: Client, topic: str) -> None:
    def handle(job: Job) -> None:
        begun.set()
        assert go_on.wait(DEADLINE)

    queue_of(client, topic, 5)
    begun, go_on = threading.Event(), threading.Event()
    worker = Worker(server.url, topic, handle, concurrency=1)
    running = Background(worker.run)
    assert begun.wait(DEADLINE)
    worker.stop()
    assert not running.is_done
    go_on.set()
    running.result()
    state = state_of(client, topic)
    assert (worker.done, state.ready, state.in_flight) == (1, 4, 0)


def test_a_stop_in_a_hurry_gives_jobs_back_at_once(server: LocalServer, client: Client, topic: str) -> None:
    async def handle(job: Job) -> None:
        begun.set()
        await asyncio.Event().wait()

    queue_of(client, topic, 3)
    begun = threading.Event()
    worker = Worker(server.url, topic, handle, concurrency=2)
    running = Background(worker.run)
    assert begun.wait(DEADLINE)
    eventually(lambda: state_of(client, topic).in_flight == 2, "two jobs at work")
    worker.stop()
    worker.stop()
    running.result()
    state = state_of(client, topic)
    assert (worker.done, state.ready, state.in_flight) == (0, 3, 0)


def test_a_stop_that_has_waited_long_enough_gives_jobs_back(server: LocalServer, client: Client, topic: str) -> None:
    async def handle(job: Job) -> None:
        begun.set()
        await asyncio.Event().wait()

    queue_of(client, topic, 1)
    begun = threading.Event()
    worker = Worker(server.url, topic, handle, stop_ms=1)
    running = Background(worker.run)
    assert begun.wait(DEADLINE)
    worker.stop()
    running.result()
    assert state_of(client, topic).ready == 1


def test_an_idle_worker_stops_at_once(server: LocalServer, client: Client, topic: str) -> None:
    queue_of(client, topic, 0)
    worker = Worker(server.url, topic, print, wait_ms=30_000)
    running = Background(worker.run)
    server.wait_for_readings()
    worker.stop()
    running.result()
    server.wait_for_readings(0)


def test_a_worker_that_is_told_to_stop_by_a_signal_finishes_its_job(
    server: LocalServer, client: Client, topic: str
) -> None:
    code = f"""
import sys, topics
def handle(job):
    print("begun", flush=True)
    sys.stdin.readline()
worker = topics.Worker({server.url!r}, {topic!r}, handle, concurrency=1)
worker.run()
print("done", worker.done, flush=True)
"""
    queue_of(client, topic, 2)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done 1\n"
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    state = state_of(client, topic)
    assert (state.ready, state.in_flight) == (1, 0)


@pytest.mark.parametrize("at", [0, 30, 200, 400])
def test_jobs_of_a_claim_whose_answer_got_lost_are_done_without_another_delivery(
    at: int, proxy: Proxy, client: Client, topic: str
) -> None:
    async def handle(job: Job) -> None:
        assert (job.deliveries, job.tag, job.meta) == (1, "t", {"n": str(job.data)})
        ending.note(job)

    async def main() -> None:
        async with AsyncClient(proxy.url, sleep=no_wait_async) as through:
            ending.worker = Worker(through, topic, handle, concurrency=4, lease_ms=86_400_000, sleep=brief)
            await ending.worker.serve()

    async def brief(seconds: float) -> None:
        # Heartbeats never come; pauses between tries are over at once.
        if seconds > 100:
            await asyncio.Event().wait()

    queue_of(client, topic, 0)
    client.write(topic, [{"data": n, "tag": "t", "meta": {"n": str(n)}} for n in range(20)])
    ending = Ending(20)
    proxy.plan(Cut("response", at), None)
    asyncio.run(main())
    assert ending.seen == Counter(range(20))
    assert (client.get(topic).count, state_of(client, topic).in_flight) == (0, 0)


@pytest.mark.parametrize("survives", [1500, 2000, 3000])
def test_jobs_through_connections_that_all_break_are_done_at_least_once_and_all_acked(
    survives: int, proxy: Proxy, client: Client, topic: str
) -> None:
    async def handle(job: Job) -> None:
        ending.note(job)

    async def main() -> None:
        async with AsyncClient(proxy.url, sleep=no_wait_async) as through:
            ending.worker = Worker(through, topic, handle, concurrency=2, sleep=brief)
            await ending.worker.serve()

    async def brief(seconds: float) -> None:
        if seconds >= 10:
            await asyncio.Event().wait()

    queue_of(client, topic, 30)
    ending = Ending(30)
    proxy.always = Cut("response", survives)
    asyncio.run(main())
    assert set(ending.seen) == set(range(30))
    assert len(proxy.traffic) > 3
    assert (client.get(topic).count, state_of(client, topic).in_flight) == (0, 0)


def test_jobs_that_a_queue_has_lost_are_told(server: LocalServer, client: Client, topic: str) -> None:
    queue_of(client, topic, 10, cap_records=4)
    ending = Ending(4)
    told: list[tuple[int, int, int]] = []
    run(
        server,
        topic,
        ending,
        ending.note,
        on_loss=lambda stone, lost: told.append((stone.gap_from, stone.gap_to, lost)),
    )
    assert told == [(1, 6, 6)]


def test_what_waiting_does_not_mend_ends_the_worker(server: LocalServer, client: Client, topic: str) -> None:
    with pytest.raises(TopicNotFound):
        Worker(server.url, topic, print).run()
    client.put(topic)
    with pytest.raises(NotAQueue):
        Worker(server.url, topic, print).run()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 1001}, "1000"),
        ({"lease_ms": 99}, "lease_ms"),
        ({"wait_ms": 30_001}, "wait_ms"),
        ({"wait_ms": 0}, "between 100 and"),
        ({"node": "x" * 200}, "node"),
        ({"handler": "work"}, "handler"),
        ({"queue": "no spaces"}, "queue"),
    ],
)
def test_a_worker_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"server": "http://127.0.0.1:4000", "queue": "q", "handler": print, **fields}
    with pytest.raises(InvalidRequest, match=message):
        Worker(whole.pop("server"), whole.pop("queue"), whole.pop("handler"), **whole)
