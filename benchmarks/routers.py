"""Routers: what a source's writers notice of 1 to 1,000 dests, what the log pays for them, and how fast copies are."""

from __future__ import annotations

import http.client
import statistics
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.measure import Figure, body_of
from benchmarks.servers import topics_server

_DESTS = (1, 10, 100, 1000)
# A writer that writes this often leaves the server idle most of the time: what it waits for is its ack.
_WRITES, _PAUSE = 100, 0.01
_TURNS = 5
_BULK = {1: 100_000, 10: 20_000, 100: 5_000, 1000: 1_000}
_HEADERS = {"content-type": "application/json"}


class _Client:
    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        self._connection.request(method, path, body, _HEADERS)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"{method} {path}: {answer.status} {content!r:.300}")
        return msgspec.json.decode(content) if content[:1] == b"{" else content

    def wal_bytes(self) -> float:
        for line in self.ask("GET", "/v0/metrics").decode().splitlines():
            if line.startswith("topics_wal_bytes_total "):
                return float(line.split()[1])
        raise SystemExit("the metrics have no topics_wal_bytes")


def run(directory: Path) -> list[Figure]:
    with topics_server(directory / "topics") as (url, _):
        client = _Client(url)
        for dests in _DESTS:
            for number in range(dests):
                body = msgspec.json.encode({"source": f"source-{dests}", "dest": f"dest-{dests}-{number}"})
                client.ask("PUT", f"/v0/routers/r-{dests}-{number}", body)
        return [*_latency(client), *_wal(client), *_copies(client), *_delay(client, url)]


def _latency(client: _Client) -> list[Figure]:
    """A source with many dests and one with a single one, in turns."""
    best: dict[int, list[float]] = {dests: [] for dests in _DESTS}
    for _ in range(_TURNS):
        for dests in _DESTS:
            best[dests].append(_median_ack(client, f"source-{dests}"))
    least = {dests: min(medians) for dests, medians in best.items()}
    return [
        Figure(
            f"ack of a write, {dests} dests / 1 dest",
            least[dests] / least[1],
            "ratio",
            "flat",
            f"{least[1] * 1e3:.2f} and {least[dests] * 1e3:.2f} ms, medians, best of {_TURNS}",
        )
        for dests in _DESTS[1:]
    ]


def _median_ack(client: _Client, source: str) -> float:
    body = body_of(1)
    latencies: list[float] = []
    for _ in range(_WRITES):
        started = time.perf_counter()
        client.ask("POST", f"/v0/topics/{source}", body)
        latencies.append(time.perf_counter() - started)
        time.sleep(_PAUSE)
    return statistics.median(latencies)


def _settle(client: _Client, dests: int) -> None:
    """Until the last dest has everything."""
    for number in range(dests):
        client.ask("POST", f"/v0/topics/dest-{dests}-{number}/diff", b'{"limit":1}')


def _wal(client: _Client) -> list[Figure]:
    used: dict[int, float] = {}
    for dests in (1, 100):
        _settle(client, dests)
        before = client.wal_bytes()
        for _ in range(2000):
            client.ask("POST", f"/v0/topics/source-{dests}", body_of(1))
        _settle(client, dests)
        used[dests] = client.wal_bytes() - before
    note = f"{used[1]:,.0f} and {used[100]:,.0f} bytes for 2,000 writes of a record"
    return [Figure("WAL bytes, 100 dests / 1 dest", used[100] / used[1], "ratio", "< 2", note)]


def _copies(client: _Client) -> list[Figure]:
    figures: list[Figure] = []
    for dests, records in _BULK.items():
        rates: list[float] = []
        for _ in range(3):
            _settle(client, dests)
            started = time.perf_counter()
            for _ in range(records // 500):
                client.ask("POST", f"/v0/topics/source-{dests}?return_seqs=false", body_of(500))
            _settle(client, dests)
            rates.append(records * dests / (time.perf_counter() - started))
        figures.append(Figure(f"copies to {dests} dests, writes of 500 records", max(rates), "copies/s"))
    return figures


def _delay(client: _Client, url: str) -> list[Figure]:
    """From the ack of a write to the answer of a long poll that waits at the last dest."""
    figures: list[Figure] = []
    reader = _Client(url)
    for dests in _DESTS:
        _settle(client, dests)
        delays: list[float] = []
        dest = f"dest-{dests}-{dests - 1}"
        for _ in range(50):
            head = client.ask("GET", f"/v0/topics/{dest}")["head_seq"]
            poll = msgspec.json.encode({"from_seq": head, "wait_ms": 10_000})
            reader._connection.request("POST", f"/v0/topics/{dest}/diff", poll, _HEADERS)
            client.ask("POST", f"/v0/topics/source-{dests}", body_of(1))
            acked = time.perf_counter()
            answer = msgspec.json.decode(reader._connection.getresponse().read())
            delays.append(time.perf_counter() - acked)
            assert answer["records"]
        figures.append(
            Figure(
                f"from ack to visible, {dests} dests", statistics.median(delays) * 1e3, "ms", "", "median, last dest"
            )
        )
    return figures
