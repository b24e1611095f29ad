"""Queues: jobs a second through claim and ack over HTTP, and what a claim costs when a million jobs are ready, leased
or delayed."""

from __future__ import annotations

import asyncio
import http.client
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.measure import Figure, body_of
from benchmarks.servers import topics_server
from topics.core.clock import SystemClock
from topics.core.config import ConfigPatch
from topics.core.limits import Limits
from topics.core.records import decode_write
from topics.engine.commit import Commit
from topics.engine.engine import Engine
from topics.engine.jobs import Claim, Holder
from topics.engine.options import Options
from topics.engine.recovery import open_engine
from topics.engine.syncer import InlineSyncer
from topics.storage.fs import OsFileSystem

_SECONDS = 2.0
_MANY = 1_000_000
_FEW = 1_000
# Claims in one measurement, and measurements.
_CLAIMS = 500
_TURNS = 20


def run(directory: Path) -> list[Figure]:
    figures: list[Figure] = []
    with topics_server(directory / "http") as (url, _):
        for durability in ("disk", "fsync"):
            for most in (1, 10, 100):
                for workers in (1, 8, 32):
                    figures += _through(url, durability, most, workers)
    return [*figures, *_growth(directory)]


# -- over HTTP -------------------------------------------------------------------------------------------------------


def _through(url: str, durability: str, most: int, workers: int) -> list[Figure]:
    name = f"jobs-{durability}-{most}-{workers}"
    jobs = min(100_000, 15_000 * most)
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    headers = {"content-type": "application/json"}
    config = msgspec.json.encode({"type": "queue", "durability": durability})
    connection.request("PUT", f"/v0/topics/{name}", config, headers)
    connection.getresponse().read()
    for _ in range(jobs // 5000):
        connection.request("POST", f"/v0/topics/{name}?return_seqs=false", body_of(5000), headers)
        connection.getresponse().read()
    done, seconds, latencies = asyncio.run(_work(url, name, most, workers))
    latencies.sort()
    what = f"{durability}, max {most}, {workers} workers"
    target = ">= 10,000" if (durability, most, workers) == ("disk", 10, 8) else ""
    p99 = latencies[int(len(latencies) * 0.99)] * 1000
    return [Figure(f"jobs through claim+ack: {what}", done / seconds, "jobs/s", target, f"p99 of claim {p99:.2f} ms")]


async def _work(url: str, name: str, most: int, workers: int) -> tuple[int, float, list[float]]:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    latencies: list[float] = []
    until = time.perf_counter() + _SECONDS

    async def worker(number: int) -> int:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
        claim = _request(name, "claim", msgspec.json.encode({"node": f"w{number}", "max": most}))
        done = 0
        while time.perf_counter() < until:
            started = time.perf_counter()
            answer = await _ask(reader, writer, claim)
            latencies.append(time.perf_counter() - started)
            count = int(_between(answer, b'"count":', b","))
            if not count:
                break
            lease = _between(answer, b'"lease_id":"', b'"').decode()
            acked = await _ask(reader, writer, _request(name, "ack", msgspec.json.encode({"lease_id": lease})))
            done += int(_between(acked, b'"acked":', b","))
        writer.close()
        return done

    started = time.perf_counter()
    done = await asyncio.gather(*[worker(number) for number in range(workers)])
    return sum(done), time.perf_counter() - started, latencies


def _request(name: str, verb: str, body: bytes) -> bytes:
    head = f"POST /v0/topics/{name}/{verb} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"a worker was refused: {head!r}")
    return await reader.readexactly(int(_between(head.lower(), b"content-length: ", b"\r\n")))


def _between(text: bytes, start: bytes, end: bytes) -> bytes:
    at = text.rindex(start) + len(start)
    return text[at : text.index(end, at)]


# -- growth ----------------------------------------------------------------------------------------------------------


def _growth(directory: Path) -> list[Figure]:
    """The small and the large queue are measured in turns: what the machine does meanwhile, it does to both."""
    figures: list[Figure] = []
    for state in ("ready", "leased", "delayed"):
        few, many = _filled(directory / f"{state}-few", state, _FEW), _filled(directory / f"{state}-many", state, _MANY)
        try:
            costs = [(_cost(few), _cost(many)) for _ in range(_TURNS)]
        finally:
            few.close()
            many.close()
        small, large = (min(column) for column in zip(*costs, strict=True))
        figures.append(
            Figure(
                f"a claim with {_MANY:,} / {_FEW:,} jobs {state}",
                large / small,
                "ratio",
                "about 1",
                f"{small * 1e6:.0f} and {large * 1e6:.0f} µs, best of {_TURNS}",
            )
        )
    return figures


def _filled(directory: Path, state: str, jobs: int) -> Engine:
    """A queue with so many jobs in a state, and some behind them that are ready."""
    directory.mkdir(parents=True)
    fs = OsFileSystem(str(directory))
    engine = open_engine(fs, SystemClock(), Limits(), Options(), InlineSyncer(), InlineSyncer())
    _value(engine, engine.put("q", ConfigPatch(type="queue", lease_ms=86_400_000)))
    write = decode_write(body_of(min(jobs, 10_000)), engine.limits)
    for _ in range(max(jobs // 10_000, 1)):
        _value(engine, engine.write("q", write))
    if state != "ready":
        for _ in range(jobs // 1000):
            claim: Claim = _value(engine, engine.jobs.claim("q", "other", 1000))
            if state == "delayed":
                _value(engine, engine.jobs.nack("q", Holder(lease_id=claim.lease_id), 86_400_000))
    _value(engine, engine.write("q", decode_write(body_of(_CLAIMS * _TURNS), engine.limits)))
    return engine


def _cost(engine: Engine) -> float:
    """Seconds of a claim of one job."""
    started = time.process_time()
    for _ in range(_CLAIMS):
        _value(engine, engine.jobs.claim("q", "me", 1))
    return (time.process_time() - started) / _CLAIMS


def _value(engine: Engine, commit: Commit) -> Any:
    engine.flush()
    engine.poll()
    return commit.value()
