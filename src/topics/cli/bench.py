"""`topics bench`: a small load against a running server, from this one process. `make bench` finds the limits."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from topics.cli.common import DEFAULT_URL, Json, Key, Url, command
from topics.cli.show import emit, note, table
from topics.core.errors import TopicsError

if TYPE_CHECKING:
    from topics.client.connection import Connection

_MOST_SAMPLES = 100_000
# What is written once so that there is something to read.
_TO_READ = 20_000


class Measured(msgspec.Struct):
    """`rate` is of records or jobs in a second, over all connections; times are of one request."""

    what: str
    rate: float
    requests: int
    p50_ms: float
    p99_ms: float


Step = Callable[["Connection"], int]


@command
def bench(
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=3600, help="Time for each measurement.")] = 3.0,
    connections: Annotated[int, typer.Option("--connections", "-c", min=1, max=64, help="At a time.")] = 4,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Records of a large write.")] = 100,
    size: Annotated[int, typer.Option("--size", min=1, max=1 << 20, help="Bytes of a record's data.")] = 100,
    durability: Annotated[str, typer.Option("--durability", help="ephemeral, memory, disk or fsync.")] = "disk",
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Json = False,
) -> None:
    from topics.client.connection import Connection, topic_path

    name = f"bench.{secrets.token_hex(4)}"
    data = "x" * max(size - 2, 0)
    record = {"data": data}

    def write(many: int) -> Step:
        body = {"records": [record] * many}
        return lambda link: int(link.post(topic_path(name), body, return_seqs="false")["count"])

    def read(link: Connection) -> int:
        cursor = secrets.randbelow(_TO_READ - 1000)
        return len(link.post(topic_path(name, "diff"), {"from_seq": cursor, "limit": 1000})["records"])

    def work(link: Connection) -> int:
        claimed = link.post(topic_path(jobs, "claim"), {"node": str(id(link)), "max": 10}, repeatable=False)
        if not claimed["count"]:
            link.post(topic_path(jobs), {"records": [record] * 1000}, return_seqs="false")
            return 0
        return int(link.post(topic_path(jobs, "ack"), {"lease_id": claimed["lease_id"]})["acked"])

    jobs = f"{name}.jobs"
    link = Connection(url, key, retry_ms=0)
    with _scratch(link, {name: {"durability": durability}, jobs: {"durability": durability, "type": "queue"}}):
        done = []
        for what, step, before in (
            ("writes of 1 record", write(1), None),
            (f"records in writes of {batch}", write(batch), None),
            ("records in reads of 1000", read, (name, _TO_READ)),
            ("jobs through claim and ack", work, (jobs, 10_000)),
        ):
            if before is not None:
                _fill(link, before[0], record, before[1])
            if not as_json:
                note(f"measuring {what} …")
            measured = _measure(what, step, [Connection(url, key, retry_ms=0) for _ in range(connections)], seconds)
            done.append(measured)
            if as_json:
                emit(measured)
                sys.stdout.flush()
    if not as_json:
        rows = [[each.what, f"{each.rate:,.0f}/s", f"{each.p50_ms:.2f}", f"{each.p99_ms:.2f}"] for each in done]
        table(["what", "rate", "p50 ms", "p99 ms"], rows)


@contextmanager
def _scratch(link: Connection, topics: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Topics of our own, that are gone afterwards, whatever happened."""
    from topics.client.connection import JSON, topic_path

    try:
        for name, config in topics.items():
            link.send("PUT", topic_path(name), msgspec.json.encode(config), {"content-type": JSON}, repeatable=True)
        yield
    finally:
        for name in topics:
            with suppress(TopicsError):
                link.send("DELETE", topic_path(name), None, {}, repeatable=True)
        link.close()


def _fill(link: Connection, name: str, record: dict[str, str], count: int) -> None:
    from topics.client.connection import topic_path

    for _ in range(count // 1000):
        link.post(topic_path(name), {"records": [record] * 1000}, return_seqs="false")


def _measure(what: str, step: Step, links: list[Connection], seconds: float) -> Measured:
    counts = [0] * len(links)
    samples: list[list[float]] = [[] for _ in links]
    failures: list[BaseException] = []
    stop = threading.Event()

    def run(index: int) -> None:
        link, taken = links[index], samples[index]
        try:
            while not stop.is_set():
                begin = time.perf_counter()
                counts[index] += step(link)
                if len(taken) < _MOST_SAMPLES:
                    taken.append(time.perf_counter() - begin)
        except BaseException as error:
            failures.append(error)
            stop.set()
        finally:
            link.close()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(links))]
    begin = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        stop.wait(seconds)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    elapsed = time.perf_counter() - begin
    if failures:
        raise failures[0]
    times = sorted(each for taken in samples for each in taken) or [0.0]
    return Measured(
        what,
        round(sum(counts) / elapsed, 1),
        len(times),
        round(1000 * times[len(times) // 2], 3),
        round(1000 * times[len(times) * 99 // 100], 3),
    )
