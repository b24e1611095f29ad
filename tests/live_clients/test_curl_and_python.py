"""`curl -N`, an HTTP client and a WebSocket client in Python: each goes on after any cut without a gap or a repeat."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import pytest
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from tests.http.server import DEADLINE, Background, Child, child, client_of
from tests.live_clients.conftest import CuttingProxy, Mortal, Pen, Told, all_of, need

# The bytes of an answer at which it is cut: its head, the first frames, the middle of them, lengths of chunks.
CUTS = [*range(0, 240, 17), *range(240, 1200, 29), *range(1200, 3000, 401)]
_MAX_CONNECTIONS = 1000

Cursors = dict[str, dict[str, int]]


class NoSession(Exception):
    """The server does not know (any more) what we ask for."""


class Reader:
    """Follows topics until it was told enough, over as many connections as that takes."""

    def __init__(self, url: str, *topics: str, token: str = "", limit: int = 3) -> None:
        self.url = url
        self.told = {name: Told(records=[], losses=[]) for name in topics}
        self.connections = 0
        self._token = token
        self._limit = limit
        self._cursors: Cursors = {name: {"from_seq": 0} for name in topics}

    def read(self, heads: Callable[[], dict[str, int]], at_once: int | None = None) -> None:
        """Until everything up to these heads was told; or, at most, that many frames of one connection."""
        deadline = time.monotonic() + DEADLINE
        for _ in range(_MAX_CONNECTIONS):
            self.connections += 1
            for count, (kind, frame) in enumerate(self.frames(), 1):
                assert time.monotonic() < deadline, f"told no more than {self._seqs()} of {heads()}"
                self.told[frame["topic"]].frame(kind, frame)
                if self._seqs() == heads() or count == at_once:
                    return
            assert time.monotonic() < deadline, f"told no more than {self._seqs()} of {heads()}"
        raise AssertionError(f"{_MAX_CONNECTIONS} connections, and told no more than {self._seqs()} of {heads()}")

    def _seqs(self) -> dict[str, int]:
        return {name: told.seq for name, told in self.told.items()}

    def frames(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What one connection brings, until it ends."""
        raise NotImplementedError


class EventReader(Reader):
    """Server-sent events: resumes its session by the last id, or makes another one from there."""

    def __init__(self, url: str, *topics: str, token: str = "", limit: int = 3) -> None:
        super().__init__(url, *topics, token=token, limit=limit)
        self._stream_url = ""
        self._last_id = ""
        self.sessions = 0

    def post(self, url: str, body: bytes) -> bytes:
        """The answer, empty if the server is not there."""
        raise NotImplementedError

    def stream(self, url: str, last_id: str) -> Iterator[bytes]:
        """Bytes as they come, until the connection ends."""
        raise NotImplementedError

    def frames(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._stream_url and not self._create():
            return
        buffer = b""
        try:
            for data in self.stream(self._stream_url, self._last_id):
                *whole, buffer = (buffer + data).split(b"\n\n")
                for event in whole:
                    fields = self._take(event)
                    if fields is not None:
                        yield fields
        except NoSession:
            self._stream_url = ""

    def _create(self) -> bool:
        body = {"topics": self._cursors, "limit": self._limit}
        answer = self.post(self.url + "/v0/watch", msgspec.json.encode(body))
        if answer:
            self._stream_url = self.url + msgspec.json.decode(answer)["stream_url"]
            self._last_id = ""
            self.sessions += 1
        return bool(answer)

    def _take(self, event: bytes) -> tuple[str, dict[str, Any]] | None:
        """An event that is whole. One that is not does not count, and neither does its id."""
        fields = dict(line.split(b": ", 1) for line in event.splitlines() if not line.startswith(b":"))
        if b"id" in fields:
            self._last_id = fields[b"id"].decode()
        if b"data" not in fields:
            return None
        assert b"id" in fields
        places = msgspec.json.decode(base64.urlsafe_b64decode(self._last_id + "=" * (-len(self._last_id) % 4)))
        epochs = places.pop("$epoch")
        self._cursors = {name: {"from_seq": seq, "epoch": epochs[name]} for name, seq in places.items()}
        return fields[b"event"].decode(), msgspec.json.decode(fields[b"data"])


class HttpxReader(EventReader):
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token}"} if self._token else {}

    def post(self, url: str, body: bytes) -> bytes:
        try:
            with client_of(self.url, headers=self._headers()) as client:
                answer = client.post(url, content=body, headers={"content-type": "application/json"})
        except httpx.TransportError:
            return b""
        if answer.status_code == 503:
            return b""
        assert answer.status_code == 200, answer.text
        return answer.content

    def stream(self, url: str, last_id: str) -> Iterator[bytes]:
        headers = {"accept": "text/event-stream", **({"last-event-id": last_id} if last_id else {})}
        try:
            with (
                client_of(self.url, headers=self._headers()) as client,
                client.stream("GET", url, headers=headers) as answer,
            ):
                if answer.status_code == 404:
                    raise NoSession
                assert answer.status_code == 200, answer.read()
                yield from answer.iter_bytes()
        except httpx.TransportError:
            return


class CurlReader(EventReader):
    """`--fail` and `--show-error` tell an answer with an error from none at all."""

    _COMMAND = ("curl", "-q", "-N", "-sS", "--fail", "--noproxy", "*", "--max-time", str(DEADLINE))
    # Could not connect; an answer cut short, in its head (0, to curl), or not there; an answer with an error.
    _GONE = (7, 18, 52, 55, 56)
    _REFUSED = 22

    def post(self, url: str, body: bytes) -> bytes:
        headers = ["-H", "content-type: application/json"]
        if self._token:
            headers += ["-H", f"authorization: Bearer {self._token}"]
        command = [*self._COMMAND, *headers, "--data-binary", "@-", url]
        done = subprocess.run(command, input=body, capture_output=True, check=False)
        assert done.returncode in (0, *self._GONE) or b"503" in done.stderr, done.stderr
        return done.stdout if done.returncode == 0 else b""

    def stream(self, url: str, last_id: str) -> Iterator[bytes]:
        headers = ["-H", f"Last-Event-ID: {last_id}"] if last_id else []
        if self._token:
            url += f"?token={self._token}"
        running = subprocess.Popen([*self._COMMAND, *headers, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert running.stdout is not None
        assert running.stderr is not None
        try:
            with running.stdout, running.stderr:
                while data := running.stdout.read1(65536):  # type: ignore[attr-defined]  # it is buffered
                    yield data
                said = running.stderr.read()
            code = running.wait(DEADLINE)
            if code == self._REFUSED and b"404" in said:
                raise NoSession
            assert code in (0, *self._GONE), f"curl ended with {code}: {said!r}"
        finally:
            # Read enough: it is killed wherever it is.
            running.kill()
            running.wait(DEADLINE)


class SocketReader(Reader):
    """A WebSocket: subscribes from the last seq and epoch that it was told of."""

    def frames(self) -> Iterator[tuple[str, dict[str, Any]]]:
        url = self.url.replace("http://", "ws://") + "/v0/ws" + (f"?token={self._token}" if self._token else "")
        try:
            with websockets.sync.client.connect(
                url, open_timeout=DEADLINE, close_timeout=1, proxy=None, compression=None
            ) as socket:
                socket.send(msgspec.json.encode(self._subscription()), text=True)
                answer = msgspec.json.decode(socket.recv(DEADLINE))
                assert answer["type"] == "subscribed", answer
                for name, topic in answer["topics"].items():
                    assert topic["from_seq"] == self._cursors[name]["from_seq"]
                while True:
                    message = msgspec.json.decode(socket.recv(DEADLINE))
                    self._note(message)
                    yield message["type"], message
        except InvalidStatus as refused:
            if refused.response.status_code != 503:
                raise AssertionError(f"{refused.response.status_code} {refused.response.body!r}") from None
        except (ConnectionClosed, InvalidHandshake, OSError, EOFError):
            return

    def _subscription(self) -> dict[str, Any]:
        return {"type": "subscribe", "request_id": 1, "topics": self._cursors, "limit": self._limit}

    def _note(self, message: dict[str, Any]) -> None:
        cursor = self._cursors[message["topic"]]
        if message["type"] == "record":
            cursor |= {"from_seq": message["to_seq"], "epoch": message["epoch"]}
        elif message["type"] == "tombstone":
            cursor |= {"from_seq": message["gap_to"], "epoch": message["epoch"]}


class MakesReader(Protocol):
    def __call__(self, url: str, *topics: str, token: str = "", limit: int = 3) -> Reader: ...


@pytest.fixture(params=[CurlReader, HttpxReader, SocketReader], ids=["curl", "httpx", "websockets"])
def make(request: pytest.FixtureRequest) -> MakesReader:
    if request.param is CurlReader:
        need(["curl"], ["curl"])
    chosen: MakesReader = request.param
    return chosen


def test_a_client_that_is_cut_at_any_byte_goes_on_without_gap_or_repeat(
    make: MakesReader, proxy: CuttingProxy, client: httpx.Client, topic: str
) -> None:
    pens = [Pen(client, f"{topic}{name}") for name in "ab"]
    for pen in pens:
        pen.write(40)
    proxy.plan(CUTS)
    reader = make(proxy.url, *[pen.topic for pen in pens])
    heads: dict[str, int] = {}

    def write_along() -> None:
        proxy.write_along(*pens)
        # Known before they are written, so that what comes last ends the reading.
        heads.update({pen.topic: pen.head + 1 for pen in pens})
        for pen in pens:
            pen.write(1)

    writing = Background(write_along)
    reader.read(lambda: heads)
    writing.result()
    assert proxy.is_done
    assert reader.connections > len(CUTS)
    assert reader.told == {pen.topic: all_of(pen.head) for pen in pens}


def test_a_client_that_leaves_and_comes_back_finds_what_came_meanwhile(
    make: MakesReader, server: Child, client: httpx.Client, topic: str
) -> None:
    pen = Pen(client, topic)
    reader = make(server.url, topic)
    for number in range(1, 11):
        for _ in range(number):
            pen.write(1)
        reader.read(lambda: {topic: pen.head}, at_once=1 + number % 3)
    reader.read(lambda: {topic: pen.head})
    assert reader.told[topic].records == list(range(1, pen.head + 1))


def test_a_client_outlives_servers_that_are_killed(make: MakesReader, mortal: Mortal) -> None:
    with mortal.client() as client:
        pen = Pen(client, "t")
        pen.write(20)
    reader = make(mortal.url, "t")
    for _ in range(2):
        # Somewhere in the middle, with more on its way.
        reader.read(lambda: {"t": pen.head}, at_once=4)
        mortal.kill()
        mortal.restart()
        with mortal.client() as client:
            pen.write(10, client)
    reader.read(lambda: {"t": pen.head})
    assert reader.told["t"] == all_of(40)


def test_a_client_is_told_what_it_lost_while_it_was_away(
    make: MakesReader, server: Child, client: httpx.Client, topic: str
) -> None:
    pen = Pen(client, topic, cap_records=10)
    pen.write(5)
    reader = make(server.url, topic)
    reader.read(lambda: {topic: 5})
    pen.write(30)
    reader.read(lambda: {topic: pen.head})
    assert reader.told[topic] == Told(
        seq=35, records=[*range(1, 6), *range(26, 36)], losses=[(6, 25, "from_seq_too_old")]
    )


def test_a_client_with_a_key_comes_back_with_it(make: MakesReader, tmp_path: Path) -> None:
    keys = "owner,reader:read:mine."
    with child(tmp_path / "data", TOPICS_API_KEYS=keys) as server:
        server.wait_until_ready()
        with server.client(headers={"authorization": "Bearer owner"}) as client:
            pen = Pen(client, "mine.t")
            pen.write(20)
            proxied = CuttingProxy(server.port)
            try:
                proxied.plan([300, 500, 700])
                reader = make(proxied.url, "mine.t", token="reader")
                reader.read(lambda: {"mine.t": 20})
                assert proxied.is_done
                assert reader.told["mine.t"].records == list(range(1, 21))
            finally:
                proxied.close()
        stranger = make(server.url, "mine.t", token="nobody")
        with pytest.raises(AssertionError, match="401"):
            stranger.read(lambda: {"mine.t": 20})
