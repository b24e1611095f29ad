"""Servers that talk to each other: processes that are killed and come back at the same address, and writers and readers
that go on over that."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.http.server import Background, Child, client_of

# How long a whole set of servers may take to settle after the last kill.
PATIENCE = 20.0
# Routers try again sooner than they would for people.
QUICK = "import topics.http.remotes as _r; _r._FIRST_PAUSE, _r._LONGEST_PAUSE = 0.02, 0.2; "
# Kills the process at the n-th call of a method: before it, or when it has returned.
_KILL = """
import os as _os, signal as _s, importlib as _i
_owner = _i.import_module({module!r})
for _part in {path!r}.split('.')[:-1]:
    _owner = getattr(_owner, _part)
_name, _real, _calls = {path!r}.split('.')[-1], getattr(_owner, {path!r}.split('.')[-1]), [0]
def _deadly(*args, **fields):
    _calls[0] += 1
    if _calls[0] == {number} and {before}:
        _os.kill(_os.getpid(), _s.SIGKILL)
    found = _real(*args, **fields)
    if _calls[0] == {number}:
        _os.kill(_os.getpid(), _s.SIGKILL)
    return found
setattr(_owner, _name, _deadly)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def deadly(method: str, number: int, before: bool) -> str:
    """Code in front of a server: `method` is `module:path.to.it`."""
    module, _, path = method.partition(":")
    return _KILL.format(module=module, path=path, number=number, before=before)


class Member:
    """A server at an address of its own, however often it dies."""

    def __init__(self, data_dir: Path, **env: str) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = client_of(self.url)
        self._env = env
        self._child: Child | None = None
        self.deaths = 0

    def start(self, prelude: str = "") -> Member:
        env = {**self._env, "TOPICS_PORT": str(self.port)}
        self._child = Child(self.data_dir, prelude=QUICK + prelude, **env).wait_until_ready()
        return self

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._close()

    def wait_for_death(self) -> None:
        """Until it has killed itself."""
        assert self._child is not None
        code, said = self._child.wait_for_end()
        assert code == -9, said
        self._close()

    def _close(self) -> None:
        assert self._child is not None
        for stream in (self._child.process.stdout, self._child.process.stderr):
            assert stream is not None
            stream.close()
        self._child = None
        self.deaths += 1

    @property
    def is_dead(self) -> bool:
        return self._child is None or self._child.process.poll() is not None

    def restart(self, prelude: str = "") -> None:
        if self._child is not None:
            self.kill()
        self.start(prelude)

    @property
    def said(self) -> str:
        assert self._child is not None
        return "".join(self._child.err)

    def stop(self) -> None:
        self.client.close()
        if self._child is not None:
            self.kill()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Asks until there is an answer; a server that is away comes back."""
        answer = insist(self.client, method, path, body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def count(self, topic: str) -> int:
        """The records of a topic; none while the server is away."""
        try:
            return int(self.client.get(f"/v0/topics/{topic}?touch=false").json()["count"])
        except (httpx.TransportError, KeyError):
            return 0

    def router(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v0/routers/{name}")
        return found


def insist(client: httpx.Client, method: str, path: str, body: Any = None) -> httpx.Response:
    """What the server answers, however often it is away first."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            answer = client.request(method, path, json=body)
            if answer.status_code != 503:
                return answer
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"no answer to {method} {path}"
        threading.Event().wait(0.01)


def settles(holds: Callable[[], bool], what: Callable[[], object] | str) -> None:
    """Asks until something holds, with patience for servers that come back."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"never came: {what if isinstance(what, str) else what()}"
        threading.Event().wait(0.01)


class Writer:
    """Writes numbered records one after the other, each exactly once whatever happens to the server."""

    def __init__(self, url: str, topic: str, name: str, count: int, **fields: Any) -> None:
        self.acked = 0
        self.name = name
        self._url, self._topic, self._count, self._fields = url, topic, count, fields
        self._reached = threading.Condition()
        self._call = Background(self._run)

    def _run(self) -> None:
        with client_of(self._url) as client:
            while self.acked < self._count:
                number = self.acked + 1
                record = {"data": f"{self.name}-{number}", "client_seq": number}
                body = {"records": [record], "client_id": self.name, **self._fields}
                answer = insist(client, "POST", f"/v0/topics/{self._topic}", body)
                assert answer.status_code in (200, 201, 409), answer.text
                with self._reached:
                    self.acked = number
                    self._reached.notify_all()

    def wait_for(self, number: int) -> None:
        with self._reached:
            assert self._reached.wait_for(lambda: self.acked >= number, PATIENCE), f"{self.name} stopped"

    @property
    def written(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(1, self._count + 1)]

    def join(self) -> list[str]:
        self.wait_for(self._count)
        self._call.result()
        return self.written


def read_all(
    client: httpx.Client, topic: str, **fields: Any
) -> tuple[list[dict[str, Any]], list[tuple[int, int, str]]]:
    """All records of a topic from its beginning, and all ranges that it tells as lost."""
    records: list[dict[str, Any]] = []
    lost: list[tuple[int, int, str]] = []
    cursor = 0
    while True:
        answer = insist(client, "POST", f"/v0/topics/{topic}/diff", {"from_seq": cursor, "limit": 1000, **fields})
        if answer.status_code == 404:
            return [], []
        body = answer.json()
        records += body["records"]
        stone = body["tombstone"]
        if stone is not None:
            lost.append((stone["gap_from"], stone["gap_to"], stone["reason"]))
        cursor = body["next_from_seq"]
        if body["caught_up"]:
            return records, lost


def data_of(client: httpx.Client, topic: str, **fields: Any) -> list[Any]:
    return [record["data"] for record in read_all(client, topic, **fields)[0]]


def count_of(client: httpx.Client, topic: str) -> int:
    answer = insist(client, "GET", f"/v0/topics/{topic}?touch=false")
    return int(answer.json()["count"]) if answer.status_code == 200 else 0


__all__ = [
    *("DEADLINE", "PATIENCE", "Member", "Writer", "count_of", "data_of", "deadly", "free_port", "insist", "read_all"),
    "settles",
]
