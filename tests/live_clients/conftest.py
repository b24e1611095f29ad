"""What all live clients of this folder meet: a real server, a proxy that cuts their streams at chosen bytes, and the
count of what they were told. Chromium and curl are installed where that can be done."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from tests.http.server import DEADLINE, Child, child, write

_numbers = itertools.count(1)
_STREAMS = (b"GET /v0/watch/", b"GET /v0/ws")
# Closing with this sends a reset instead of an end.
_RESET = struct.pack("ii", 1, 0)


def need(commands: Sequence[str], packages: Sequence[str]) -> None:
    """Tools of Debian's packages, installed if that can be done here."""

    def missing() -> list[str]:
        return [command for command in commands if shutil.which(command) is None]

    said = ""
    if missing() and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        # Another worker may be installing something else.
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=240"]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run([*apt, *step], env=env, capture_output=True, text=True, check=False)
            said += done.stdout[-500:] + done.stderr[-500:]
    if missing():
        names = " ".join(packages)
        pytest.fail(f"{', '.join(missing())} not found; as root on Debian: apt-get install {names}\n{said}".strip())


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with child(tmp_path_factory.mktemp("data")) as started:
        yield started.wait_until_ready()


@pytest.fixture
def client(server: Child) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def topic() -> str:
    """A name that no other test uses; a short one, for it stands in every id."""
    return f"t{next(_numbers)}"


class Mortal:
    """A server that is killed and comes back on the same port, with the same data."""

    def __init__(self, data_dir: Path, **env: str) -> None:
        self._data_dir = data_dir
        self._env = env
        self._running = child(data_dir, **env)
        self._child = self._running.__enter__().wait_until_ready()

    @property
    def url(self) -> str:
        return self._child.url

    def client(self, **fields: Any) -> httpx.Client:
        return self._child.client(**fields)

    def kill(self) -> None:
        self._child.kill()

    def restart(self) -> None:
        port = self._child.port
        self.stop()
        self._running = child(self._data_dir, **{**self._env, "TOPICS_PORT": str(port)})
        self._child = self._running.__enter__().wait_until_ready()

    def stop(self) -> None:
        self._running.__exit__(None, None, None)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Mortal]:
    started = Mortal(tmp_path / "data")
    try:
        yield started
    finally:
        started.stop()


# -- what was written, and what a client was told ----------------------------------------------------------------------


class Pen:
    """Writes records whose `data` is their own seq."""

    def __init__(self, client: httpx.Client, topic: str, **config: object) -> None:
        self._client = client
        self.topic = topic
        self.head = 0
        made = client.put(f"/v0/topics/{topic}", json=config)
        assert made.status_code in (200, 201), made.text

    def write(self, count: int, client: httpx.Client | None = None) -> None:
        """That many records in one write."""
        numbers = list(range(self.head + 1, self.head + count + 1))
        assert write(client or self._client, self.topic, *numbers) == numbers
        self.head += count


class Told(msgspec.Struct):
    """What a client was told of one topic. Nothing may come twice or be left out: each record or loss begins where the
    one before it ended."""

    seq: int = 0
    records: list[int] = []
    losses: list[tuple[int, int, str]] = []

    def record(self, seq: int, data: object) -> None:
        assert seq == self.seq + 1, f"told of {seq} after {self.seq}"
        assert data == seq, f"record {seq} holds {data}"
        self.seq = seq
        self.records.append(seq)

    def loss(self, gap_from: int, gap_to: int, reason: str) -> None:
        assert gap_from == self.seq + 1, f"told of a loss from {gap_from} after {self.seq}"
        assert gap_to >= gap_from
        self.seq = gap_to
        self.losses.append((gap_from, gap_to, reason))

    def frame(self, kind: str, frame: dict[str, Any]) -> None:
        """One frame of a stream."""
        if kind == "record":
            assert frame["from_seq"] == self.seq
            for record in frame["records"]:
                self.record(record["$seq"], record["data"])
            assert frame["to_seq"] == self.seq
        elif kind == "tombstone":
            self.loss(frame["gap_from"], frame["gap_to"], frame["reason"])
        else:
            assert kind in ("caught-up", "caught_up"), f"a {kind} frame: {frame}"
            assert frame["head_seq"] == self.seq


def all_of(head: int) -> Told:
    """Everything, and nothing lost."""
    return Told(seq=head, records=list(range(1, head + 1)), losses=[])


# -- a proxy that cuts -------------------------------------------------------------------------------------------------


class CuttingProxy:
    """Passes bytes on. A new stream (a watch, a WebSocket) gets the next plan: after how many bytes of its answer it is
    cut, and so at each of its comebacks, until the plan is at its end. Every second cut is a reset."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._plans: list[list[int]] = []
        self._plan_of: dict[bytes, list[int]] = {}
        self._lock = threading.Lock()
        self._has_request = threading.Condition(self._lock)
        self._is_open = threading.Event()
        self._is_open.set()
        self._streams: set[_Connection] = set()
        self._connections: list[_Connection] = []
        # The heads of the requests for streams; cuts that were planned, and those that were made.
        self.requests: list[bytes] = []
        self._planned = 0
        self._planned_streams = 0
        self._made = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *plans: Sequence[int]) -> None:
        with self._lock:
            self._plans += [list(plan) for plan in plans]
            self._planned += sum(len(plan) for plan in plans)
            self._planned_streams += len(plans)

    @property
    def is_done(self) -> bool:
        """Whether every planned cut has been made."""
        with self._lock:
            return self._made == self._planned

    def write_along(self, *pens: Pen) -> None:
        """Writes a few records whenever a stream begins, until the last cut is made and the streams are back. So each
        of them finds a backlog, and something new."""
        # Each comes once more than it is cut.
        for number in range(self._planned + self._planned_streams):
            with self._has_request:
                has_come = self._has_request.wait_for(lambda: len(self.requests) > number, DEADLINE)  # noqa: B023  # now
            assert has_come, f"{number} of {self._planned + self._planned_streams} streams began"
            for pen in pens:
                pen.write(5)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Cuts all streams; those that come back wait at the door until the end."""
        self._is_open.clear()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.end(is_reset=False)
        try:
            yield
        finally:
            self._is_open.set()

    def close(self) -> None:
        self._is_open.set()
        # Wakes the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE)
        self._listener.close()
        for connection in self._connections:
            connection.end(is_reset=False)
            connection.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._connections.append(_Connection(self, client, server))

    def on_request(self, connection: _Connection, head: bytes) -> int | None:
        """A stream is asked for; says after how many bytes it is cut."""
        assert self._is_open.wait(DEADLINE), "nobody opened the door"
        target = head.split(b" ", 2)[1]
        with self._lock:
            self.requests.append(head)
            self._has_request.notify_all()
            if target not in self._plan_of:
                self._plan_of[target] = self._plans.pop(0) if self._plans else []
            plan = self._plan_of[target]
            self._streams.add(connection)
            return plan.pop(0) if plan else None

    def on_cut(self) -> int:
        with self._lock:
            self._made += 1
            return self._made

    def on_end(self, connection: _Connection) -> None:
        with self._lock:
            self._streams.discard(connection)


class _Connection:
    def __init__(self, proxy: CuttingProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        # Bytes that may still go to the client; None for all.
        self._left: int | None = None
        self._lock = threading.Lock()
        self._is_ended = False
        self._running = 2
        self._threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True) for work in (self._up, self._down)
        ]
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        with suppress(OSError):
            work()
        self.end(is_reset=False)
        self._proxy.on_end(self)
        with self._lock:
            self._running -= 1
            is_last = not self._running
        if is_last:
            self._client.close()
            self._server.close()

    def _up(self) -> None:
        """From the client to the server. What is asked for is seen here, before the server sees it."""
        while data := self._client.recv(65536):
            if data.startswith(_STREAMS):
                while b"\r\n\r\n" not in data and (more := self._client.recv(65536)):
                    data += more
                self._left = self._proxy.on_request(self, data.partition(b"\r\n\r\n")[0])
            self._server.sendall(data)

    def _down(self) -> None:
        while data := self._server.recv(65536):
            left = self._left
            if left is not None and len(data) >= left:
                self._client.sendall(data[:left])
                self.end(is_reset=self._proxy.on_cut() % 2 == 0)
                return
            if left is not None:
                self._left = left - len(data)
            self._client.sendall(data)

    def end(self, is_reset: bool) -> None:
        """Wakes both threads; the last of them closes, and that is what sends a reset."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            if is_reset:
                self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Either of them may have gone by itself.
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_RD if is_reset else socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE)


@pytest.fixture
def proxy(server: Child) -> Iterator[CuttingProxy]:
    made = CuttingProxy(server.port)
    try:
        yield made
    finally:
        made.close()


# -- a browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Debian's Chromium with Debian's driver for it, both of one version: Selenium has nothing to download."""
    need(["chromium", "chromedriver"], ["chromium", "chromium-driver"])
    os.environ["SE_OFFLINE"] = "true"
    os.environ["SE_AVOID_STATS"] = "true"
    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (
        "--headless=new",
        # Chromium refuses to run as root with one.
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--no-proxy-server",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    driver = Chrome(options=options, service=Service(executable_path=str(shutil.which("chromedriver"))))
    try:
        driver.set_page_load_timeout(DEADLINE)
        driver.set_script_timeout(DEADLINE)
        yield driver
    finally:
        driver.quit()
