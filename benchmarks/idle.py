"""10,000 connections that only wait, as long polls and as idle keep-alives: what each costs, itself and others."""

from __future__ import annotations

import resource
import socket
import time
from pathlib import Path

from benchmarks.measure import Figure, body_of
from benchmarks.servers import topics_server
from benchmarks.wire import _put, _wrk

_COUNT = 10_000


def run(directory: Path) -> list[Figure]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    try:
        return [*_measure(directory, "idle keep-alive", _health), *_measure(directory, "waiting long poll", _poll)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _health(topic: str) -> bytes:
    return b"GET /v0/health HTTP/1.1\r\nhost: b\r\n\r\n"


def _poll(topic: str) -> bytes:
    body = b'{"from_seq":0,"wait_ms":30000}'
    return (
        b"POST /v0/topics/%b/diff HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (topic.encode(), len(body), body)
    )


def _measure(directory: Path, what: str, request: object) -> list[Figure]:
    assert callable(request)
    settings = {"TOPICS_MAX_INFLIGHT_PER_KEY": "0", "TOPICS_IDLE_TIMEOUT_MS": "600000"}
    with topics_server(directory / what.replace(" ", "-"), **settings) as (url, pid):
        for number in range(100):
            _put(url, f"quiet{number}", b"{}")
        port = int(url.rpartition(":")[2])
        alone = max(_wrk(directory, f"{url}/v0/topics/busy", body_of(1)) for _ in range(3))
        before = _resident(pid)
        sockets: list[socket.socket] = []
        for number in range(_COUNT):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(request(f"quiet{number % 100}"))
            sockets.append(client)
        if what.startswith("idle"):
            for client in sockets:
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
        memory = (_resident(pid) - before) / _COUNT
        opened = time.perf_counter()
        together = max(_wrk(directory, f"{url}/v0/topics/busy", body_of(1)) for _ in range(3))
        assert time.perf_counter() - opened < 25, "the polls must still be waiting"
        for client in sockets:
            client.close()
    return [
        Figure(f"{what}: memory for each of {_COUNT:,}", memory, "bytes"),
        Figure(f"{what}: writes with them / without", together / alone, "ratio", ">= 0.9"),
    ]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
