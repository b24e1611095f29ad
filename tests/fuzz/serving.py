"""A real server on a thread of its own, watched so closely that a test never has to guess when something happened."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar, cast

import msgspec
import uvloop

from topics.core.limits import Limits
from topics.engine.engine import Engine
from topics.http.app import App
from topics.http.protocol import HttpProtocol
from topics.http.server import Server
from topics.http.settings import Settings

# What a slow machine may need for one step; only a fault waits as long.
DEADLINE = 20.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_T = TypeVar("_T")


class _Connections(set[HttpProtocol]):
    """The server's own set of connections, which tells when one is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def add(self, connection: HttpProtocol, /) -> None:
        with self.changed:
            super().add(connection)
            self.changed.notify_all()

    def discard(self, connection: object, /) -> None:
        with self.changed:
            super().discard(cast("HttpProtocol", connection))
            self.changed.notify_all()


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Wire:
    """A client's end of a connection: bytes out, answers in, and a deadline on everything."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port: int = self.socket.getsockname()[1]
        # A port that an earlier connection had is counted anew.
        server.bytes_read[self._port] = 0
        self._received = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends as much as the server takes: it may have hung up already, and that shows in what it answered."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def send_alone(self, data: bytes) -> None:
        """Sends, and returns when the server has read exactly that in one piece."""
        with self._server.reads:
            expected = self._server.bytes_read[self._port] + len(data)
            self.socket.sendall(data)
            done = self._server.reads.wait_for(lambda: self._server.bytes_read[self._port] >= expected, DEADLINE)
        assert done, f"the server did not read {data[:100]!r}"

    def half_close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def receive(self) -> bytes:
        """What arrives next; nothing means that the server closed."""
        try:
            return self.socket.recv(1 << 16)
        except ConnectionError:
            return b""

    def until_closed(self) -> bytes:
        """Everything up to the end, which must come."""
        ends = time.monotonic() + DEADLINE
        while (piece := self.receive()) != b"":
            self._received += piece
            assert time.monotonic() < ends, "the connection does not end"
        received, self._received = self._received, b""
        return received

    def answer(self, has_body: bool = True) -> Answer:
        """The next answer, whole."""
        head = self._until(lambda data: data.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0)
        status, headers = parse_head(head)
        size = int(headers.get("content-length", "0")) if has_body else 0
        body = self._until(lambda data: size if len(data) >= size else 0) if size else b""
        return Answer(status, headers, body)

    def _until(self, length: Callable[[bytes], int]) -> bytes:
        while not (size := length(self._received)):
            piece = self.receive()
            assert piece, f"the connection ended inside an answer: {self._received!r:.300}"
            self._received += piece
        part, self._received = self._received[:size], self._received[size:]
        return part


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = head[:-4].decode("latin-1").split("\r\n")
    version, status, phrase = line.split(" ", 2)
    assert version == "HTTP/1.1"
    assert phrase
    headers: dict[str, str] = {}
    for each in lines:
        name, colon, value = each.partition(": ")
        assert colon, f"a malformed header in an answer: {each!r}"
        assert name not in headers, f"{name} twice in an answer"
        headers[name] = value
    return int(status), headers


def parse_answers(data: bytes) -> list[Answer]:
    """Answers to requests other than HEAD, and nothing beside them."""
    answers: list[Answer] = []
    while data:
        head, blank, rest = data.partition(b"\r\n\r\n")
        assert blank, f"no answer: {data!r:.300}"
        status, headers = parse_head(head + blank)
        size = int(headers.get("content-length", "0"))
        assert len(rest) >= size, f"a cut answer: {data!r:.300}"
        answers.append(Answer(status, headers, rest[:size]))
        data = rest[size:]
    return answers


def statuses(data: bytes) -> list[int]:
    """The statuses in what may be any number of answers, whole or cut."""
    return [int(status) for status in _STATUS.findall(data)]


def check_statuses(data: bytes) -> list[int]:
    """Whatever a stranger sends, it is not the server that fails: 5xx only for 503."""
    found = statuses(data)
    assert all([status < 500 or status == 503 for status in found]), f"{found}: {data!r:.1000}"
    return found


class Running:
    """A server that runs until the `with` ends, and is then proven to hold nothing and to have failed nowhere."""

    def __init__(self, data_dir: str, limits: Limits | None = None, **settings: Any) -> None:
        self.settings = Settings(data_dir=data_dir, port=0, limits=limits or Limits(), **settings)
        self.server = _WatchedServer(self.settings)
        # Faults that the event loop caught: each is a bug.
        self.faults: list[str] = []
        self.reads = threading.Condition()
        # What the server has read and dealt with, by the port of the client.
        self.bytes_read: dict[int, int] = {}
        self._connections = _Connections()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._sockets_at_start = 0
        self._is_stopped = False

    def __enter__(self) -> Running:
        self._begin()
        self.run(self.server.start())
        self._started()
        self._sockets_at_start = open_sockets()
        return self

    def _begin(self) -> None:
        self._loop.set_exception_handler(self._on_fault)
        self._thread.start()

    def _started(self) -> None:
        self.call(self._watch)

    @contextlib.contextmanager
    def starting(self) -> Iterator[Callable[[], None]]:
        """A server that is still replaying its log, until the block calls what it gets."""
        replayed = threading.Event()
        listening = threading.Event()
        opens = self.server._open

        def wait(loop: asyncio.AbstractEventLoop) -> Engine:
            listening.set()
            assert replayed.wait(DEADLINE)
            return opens(loop)

        self.server._open = wait  # type: ignore[method-assign]  # the only way to hold it there
        self._begin()
        start = asyncio.run_coroutine_threadsafe(self.server.start(), self._loop)

        def go_on() -> None:
            replayed.set()
            start.result(DEADLINE)
            self._started()

        assert listening.wait(DEADLINE)
        self._sockets_at_start = open_sockets()
        try:
            yield go_on
        except BaseException as error:
            replayed.set()
            start.result(DEADLINE)
            self.__exit__(type(error))
            raise
        self.__exit__(None)

    def stop(self) -> None:
        self._is_stopped = True
        self.run(self.server.stop())

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and not self._is_stopped:
                self.check_clean()
        finally:
            if not self._is_stopped:
                self.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEADLINE)
            self._loop.close()
            _RUNNING.pop(self.app, None)
        if kind is None:
            assert not self.faults, self.faults

    def _watch(self) -> None:
        # Those that came while the log was replayed are there already.
        self._connections.update(self.app.connections)
        self.app.connections = self._connections
        _RUNNING[self.app] = self

    def _on_fault(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error)) if error is not None else ""
        self.faults.append(f"{context.get('message')}\n{trace}")

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

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    def call(self, work: Callable[[], _T]) -> _T:
        """Runs `work` on the server's own thread, between two turns of its loop."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result(DEADLINE)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The server's thread stands still: what is sent meanwhile is all there when it goes on."""
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait(DEADLINE)

        self._loop.call_soon_threadsafe(stand)
        assert stands.wait(DEADLINE)
        try:
            yield
        finally:
            goes_on.set()

    def connect(self) -> Wire:
        return Wire(self)

    def wait_for_connections(self, count: int) -> None:
        with self._connections.changed:
            came = self._connections.changed.wait_for(lambda: len(self._connections) == count, DEADLINE)
        assert came, f"{len(self._connections)} connections, not {count}: one is stuck"

    def check_alive(self) -> None:
        """Others are answered."""
        with self.connect() as wire:
            wire.send(b"GET /v0/health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert wire.answer().status == 200

    def check_clean(self) -> None:
        """No connection, no request, no waiting read and no socket is left of all that was."""
        self.check_alive()
        self.wait_for_connections(0)
        app = self.app
        held = self.call(
            lambda: (app.inflight, len(app.readings), *[key.inflight for key in (app.keys.anyone, *app.keys._keys)])
        )
        assert not any(held), f"in flight, waiting, by key: {held}"
        assert self.call(open_sockets) == self._sockets_at_start
        assert not self.faults, self.faults


class _WatchedServer(Server):
    def _accept(self) -> asyncio.Protocol:
        protocol = super()._accept()
        if type(protocol) is HttpProtocol:
            protocol.__class__ = _WatchedProtocol
        return protocol


class _WatchedProtocol(HttpProtocol):
    """Counts what the server has read, after it has dealt with it."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        running = _RUNNING[self._app]
        assert self.transport is not None
        port = self.transport.get_extra_info("peername")[1]
        try:
            super().data_received(data)
        finally:
            with running.reads:
                running.bytes_read[port] = running.bytes_read.get(port, 0) + len(data)
                running.reads.notify_all()


_RUNNING: dict[App, Running] = {}


def open_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count
