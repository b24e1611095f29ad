"""Servers for tests, on loopback: one inside this process on a thread of its own, or a real `topics serve` child."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import uvloop

from topics.core.limits import Limits
from topics.http.app import App
from topics.http.server import Server
from topics.http.settings import Settings

# How long anything may take on a busy machine before a test gives up on it.
DEADLINE = 20.0
COMMAND = "from topics.cli import main; main()"

T = TypeVar("T")


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Asks again and again until something holds, but not for ever."""
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"never came: {what}"


class LocalServer:
    """A `Server` on a thread: real sockets, and its inside in reach through `call`."""

    def __init__(self, data_dir: Path, limits: Limits | None = None, **fields: Any) -> None:
        self.settings = Settings(port=0, data_dir=str(data_dir), limits=limits or Limits(), **fields)
        self.server = Server(self.settings)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="topics-test", daemon=True)
        self._is_stopped = False

    def start(self) -> LocalServer:
        self._thread.start()
        try:
            self.run(self.server.start())
        except BaseException:
            self._end()
            raise
        return self

    @property
    def app(self) -> App:
        assert self.server.app is not None
        return self.server.app

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    def begin(self, work: Coroutine[Any, Any, T]) -> Callable[[], T]:
        """Starts something on the server's loop; what is returned waits for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return lambda: future.result(DEADLINE)

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the server's loop."""

        async def once() -> T:
            return function()

        return self.run(once())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the server's loop still: what is sent meanwhile arrives in one moment."""
        go_on = threading.Event()
        is_held = threading.Event()

        async def hold() -> None:
            is_held.set()
            go_on.wait(DEADLINE)

        done = self.begin(hold())
        assert is_held.wait(DEADLINE)
        try:
            yield
        finally:
            go_on.set()
            done()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Asks the server's loop again and again until something holds."""
        eventually(lambda: self.call(holds), what)

    def wait_for_readings(self, count: int = 1) -> None:
        self.wait_until(lambda: len(self.app.readings) == count, f"{count} reads that wait")

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            try:
                self.run(self.server.stop())
            finally:
                self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()

    def client(self, **fields: Any) -> httpx.Client:
        return client_of(self.url, **fields)


def client_of(url: str, **fields: Any) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False, verify=False, **fields)


@contextmanager
def local_server(data_dir: Path, limits: Limits | None = None, **fields: Any) -> Iterator[LocalServer]:
    server = LocalServer(data_dir, limits, **fields).start()
    try:
        yield server
    finally:
        server.stop()


class Child:
    """`topics serve` in a process of its own."""

    def __init__(self, data_dir: Path, *flags: str, prelude: str = "", **env: str) -> None:
        self.data_dir = data_dir
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", prelude + COMMAND, "serve", *flags],
            env={
                **inherited,
                "TOPICS_PORT": "0",
                "TOPICS_DATA_DIR": str(data_dir),
                "COLUMNS": "200",
                "PYTHONUNBUFFERED": "1",
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        self.err.extend(self.process.stderr)

    def wait_until_ready(self) -> Child:
        """Until it has said everything that it says at its start."""
        self.url = ""
        while True:
            line = self._lines.get(timeout=DEADLINE)
            assert line is not None, "the server ended: " + self.wait_for_end()[1]
            if " on http://" in line:
                self.url = line.rsplit(" on ", 1)[1].strip()
            if "try:" in line:
                return self

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.wait_for_end()

    def wait_for_end(self) -> tuple[int, str]:
        """The exit code, and everything that was said."""
        code = self.process.wait(DEADLINE)
        for reader in self._readers:
            reader.join(DEADLINE)
        return code, "".join(self.out) + "".join(self.err)

    def client(self, **fields: Any) -> httpx.Client:
        return client_of(self.url, **fields)


@contextmanager
def child(data_dir: Path, *flags: str, prelude: str = "", **env: str) -> Iterator[Child]:
    """A child that is gone afterwards, whatever happened."""
    started = Child(data_dir, *flags, prelude=prelude, **env)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.wait_for_end()
        for stream in (started.process.stdout, started.process.stderr):
            assert stream is not None
            stream.close()


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal, whose shape is checked on the way."""
    body = answer.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) in ({"code", "message"}, {"code", "message", "detail"}), body
    assert body["error"]["message"], body
    return answer.status_code, body["error"]["code"]


def write(client: httpx.Client, topic: str, *datas: object, **fields: Any) -> list[int]:
    """Appends one record for each value; returns their seqs."""
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": data} for data in datas], **fields})
    assert answer.status_code in (200, 201), answer.text
    seqs: list[int] = answer.json()["seqs"]
    return seqs


def write_raw(client: httpx.Client, topic: str, data: bytes) -> httpx.Response:
    """Appends one record whose `data` is these bytes."""
    return client.post(
        f"/v0/topics/{topic}", content=b'{"records":[{"data":' + data + b"}]}", headers={"content-type": JSON}
    )


def diff(client: httpx.Client, topic: str, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"/v0/topics/{topic}/diff", json=fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def datas(client: httpx.Client, topic: str, **fields: Any) -> list[Any]:
    return [record["data"] for record in diff(client, topic, **fields)["records"]]


def raw_data(body: bytes) -> bytes:
    """The bytes of `data` of the first record of an answer."""
    records: list[_RawRecord] = msgspec.json.decode(body, type=_RawDiff).records
    return bytes(records[0].data)


class _RawRecord(msgspec.Struct):
    data: msgspec.Raw


class _RawDiff(msgspec.Struct):
    records: list[_RawRecord]


JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"


class Background:
    """A call on another thread; `result` waits for it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._outcome: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._outcome.put((function(), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def result(self) -> Any:
        value, error = self._outcome.get(timeout=DEADLINE)
        self._thread.join(DEADLINE)
        if error is not None:
            raise error
        return value

    @property
    def is_done(self) -> bool:
        return not self._outcome.empty()


__all__ = [
    *("ARROW", "DEADLINE", "JSON", "Background", "Child", "LocalServer", "child", "client_of", "datas", "diff"),
    *("error_of", "eventually", "local_server", "raw_data", "write", "write_raw"),
]
