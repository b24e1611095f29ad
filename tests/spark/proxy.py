"""Stands between Spark and the server, and stops a chosen request or its answer at a chosen moment: a test that kills
something there kills it at that moment each time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

import msgspec

# A cold Spark with many queries on two busy cores.
PATIENCE = 120.0
_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}

Where = Literal["request", "answer"]
End = Literal["pass", "cut", "refuse"]


class Request(msgspec.Struct):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    client_port: int

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query))


Matches = Callable[[Request], bool]


class Hold:
    """Stops the first request that matches, or its answer; what comes after it passes."""

    def __init__(self, where: Where, matches: Matches) -> None:
        self.where = where
        self.matches = matches
        self.request: Request | None = None
        # What the server answered to a request that was held; None when it did not.
        self.status: int | None = None
        self._reached = threading.Event()
        self._released = threading.Event()
        self._done = threading.Event()
        self._end: End = "cut"

    def take(self, request: Request) -> None:
        self.request = request
        self._reached.set()

    def wait(self, seconds: float = PATIENCE) -> bool:
        return self._reached.wait(seconds)

    def release(self, end: End) -> None:
        """Lets go of what is held, if anything is, and waits until that has happened."""
        self._end = end
        self._released.set()
        if self._reached.is_set():
            assert self._done.wait(PATIENCE), "the held request never ended"

    def wait_for_release(self) -> End:
        self._released.wait()
        return self._end

    def finish(self) -> None:
        self._done.set()


class Proxy:
    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._holds: list[Hold] = []
        self._lock = threading.Lock()
        self._http = _Listener(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def hold(self, where: Where, matches: Matches) -> Hold:
        hold = Hold(where, matches)
        with self._lock:
            self._holds.append(hold)
        return hold

    def caught(self, request: Request, where: Where) -> Hold | None:
        with self._lock:
            for hold in self._holds:
                if hold.where == where and hold.matches(request):
                    self._holds.remove(hold)
                    hold.take(request)
                    return hold
        return None

    def ask(self, request: Request) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection("127.0.0.1", self._server_port, timeout=PATIENCE)
        try:
            connection.request(request.method, request.target, request.body, request.headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._holds.clear()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(PATIENCE)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is what these tests are about."""


def _handler_of(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # the library's names
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            request = Request(self.command, self.path, headers, body, self.client_address[1])
            hold = proxy.caught(request, "request")
            end: End = hold.wait_for_release() if hold is not None else "pass"
            try:
                if end == "pass":
                    self._ask(request, hold)
                elif end == "refuse":
                    self._answer(400, [], b'{"error":{"code":"invalid_request","message":"refused by the test"}}')
                else:
                    self.close_connection = True
            finally:
                if hold is not None:
                    hold.finish()

        def _ask(self, request: Request, held: Hold | None) -> None:
            try:
                status, headers, body = proxy.ask(request)
            except (OSError, HTTPException):
                self.close_connection = True
                return
            if held is not None:
                held.status = status
            hold = proxy.caught(request, "answer")
            if hold is not None:
                hold.status = status
                end = hold.wait_for_release()
                hold.finish()
                if end != "pass":
                    self.close_connection = True
                    return
            # Who asked may be dead by now.
            with suppress(OSError):
                self._answer(status, headers, body)

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def state_of(topic: str) -> Matches:
    """Spark's driver looks how far a topic is."""
    return lambda request: request.method == "GET" and request.path == f"/v0/topics/{topic}"


def read_of(topic: str) -> Matches:
    """A task reads."""
    return lambda request: request.path == f"/v0/topics/{topic}/diff"


def spool_of(topic: str, chunk: int) -> Matches:
    """A task sends a chunk of its part."""
    return lambda request: request.path == f"/v0/topics/{topic}" and request.query.get("chunk") == str(chunk)


def commit_of(topic: str) -> Matches:
    """Spark's driver commits a transaction that writes to a topic."""
    name = f'"{topic}":'.encode()
    return lambda request: request.path.endswith("/commit") and name in request.body


def when(matches: Matches, there: Path, not_there: Path | None = None) -> Matches:
    """Only once a file exists, and while another one does not: Spark's checkpoint tells where a query is."""
    return lambda request: matches(request) and there.exists() and not (not_there is not None and not_there.exists())


def process_of(request: Request, port: int) -> int:
    """The process that sent a request to this port, and still has its connection."""
    # Addresses in /proc/net/tcp are hexadecimal; the tenth column is the socket's inode.
    ends = f":{request.client_port:04X}", f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = [line[9] for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1])]
    assert len(inodes) == 1, f"{len(inodes)} connections from port {request.client_port}"
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(entry) == f"socket:[{inodes[0]}]":
                return int(entry.parts[2])
    raise AssertionError(f"nobody has the connection from port {request.client_port}")
