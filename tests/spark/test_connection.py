"""`topics.client.connection`: what is sent, what is tried again and for how long, and what an answer means.

Time is passed in: nothing here waits. A peer that says exactly what a test wants stands in for servers in trouble.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.http.server import DEADLINE, LocalServer, local_server
from topics.client.connection import Connection, topic_path
from topics.client.errors import NotReady, ServerError, Unreachable
from topics.core.errors import (
    Forbidden,
    InvalidRequest,
    PayloadTooLarge,
    ReadOnly,
    Throttled,
    TopicFull,
    TopicNotFound,
    TopicsError,
    Unauthorized,
)
from topics.core.limits import Limits


def answer(status: int, body: str = "{}", *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    kind = [] if any("content-type" in header for header in headers) else ["content-type: application/json"]
    lines = [f"HTTP/1.1 {status} X", f"content-length: {size}", *kind, *headers, "", body]
    return "\r\n".join(lines).encode()


def refusal(status: int, code: str, *headers: str) -> bytes:
    return answer(status, f'{{"error":{{"code":"{code}","message":"no: {code}"}}}}', *headers)


CHUNKED = b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
# Instead of an answer: the connection ends.
HANG_UP = b""


class Peer:
    """Takes requests and says what it was told to, one answer each; the last one again and again."""

    def __init__(self, *answers: bytes, port: int = 0) -> None:
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        # The head and the body of each request, and how many connections there were.
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE)

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            taken.settimeout(DEADLINE)
            with taken, taken.makefile("rb") as stream:
                self._serve(taken, stream)

    def _serve(self, taken: socket.socket, stream: Any) -> None:
        while head := self._head(stream):
            length = next(
                (int(line.split(":")[1]) for line in head.splitlines() if "content-length" in line.lower()), 0
            )
            self.requests.append((head, stream.read(length)))
            said = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if said:
                taken.sendall(said)
            # One that promised more than it said has to hang up, or both would wait.
            if not said or b"cut: short" in said or b"connection: close" in said:
                return

    def _head(self, stream: Any) -> str:
        lines = []
        while line := stream.readline().decode():
            if line == "\r\n":
                break
            lines.append(line.rstrip())
        return "\n".join(lines)


@contextmanager
def peer(*answers: bytes) -> Iterator[Peer]:
    opened = Peer(*answers)
    try:
        yield opened
    finally:
        opened.close()


class Time:
    """Passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@contextmanager
def connected(url: str, time: Time | None = None, **fields: Any) -> Iterator[Connection]:
    passing = time or Time()
    fields = {"timeout_ms": 10_000, "jitter": lambda: 0.5, "clock": passing.clock, "sleep": passing.sleep, **fields}
    connection = Connection(url, **fields)
    try:
        yield connection
    finally:
        connection.close()


# What is sent.


def test_one_connection_serves_many_requests() -> None:
    with peer(answer(200, '{"n":1}')) as server, connected(server.url) as connection:
        for _ in range(5):
            assert connection.get("/v0/topics") == {"n": 1}
        assert server.connections == 1


def test_a_request_has_its_query_its_key_and_its_media_type() -> None:
    with peer(answer(200)) as server, connected(server.url + "/base/", key="k") as connection:
        connection.post("/v0/x", {"a": [1]}, txn="a b/&", nothing=None, chunk=0)
        [(head, body)] = server.requests
    assert head.splitlines()[0] == "POST /base/v0/x?txn=a+b%2F%26&chunk=0 HTTP/1.1"
    assert "authorization: Bearer k" in head
    assert "content-type: application/json" in head
    assert body == b'{"a":[1]}'


def test_columns_are_sent_as_they_are() -> None:
    with peer(answer(200)) as server, connected(server.url) as connection:
        connection.post_arrow("/v0/x", memoryview(b"columns"))
        [(head, body)] = server.requests
    assert "content-type: application/vnd.apache.arrow.stream" in head
    assert body == b"columns"


def test_a_topics_name_is_one_step_of_the_path() -> None:
    assert topic_path("a.b:c") == "/v0/topics/a.b%3Ac"
    assert topic_path("../x", "diff") == "/v0/topics/..%2Fx/diff"


def test_an_answer_in_chunks_is_read_whole() -> None:
    chunked = CHUNKED + b'\r\n4\r\n{"a"\r\n3\r\n:1}\r\n0\r\n\r\n'
    with peer(chunked, answer(200, '{"b":2}')) as server, connected(server.url) as connection:
        assert connection.get("/") == {"a": 1}
        assert connection.get("/") == {"b": 2}
        assert server.connections == 1


def test_columns_are_read_as_they_are() -> None:
    columns = answer(200, "columns", "content-type: application/vnd.apache.arrow.stream")
    with peer(columns) as server, connected(server.url) as connection:
        assert connection.read_arrow("/", {}) == b"columns"
        assert "accept: application/vnd.apache.arrow.stream" in server.requests[0][0]


# What is tried again.


def test_a_server_that_is_not_there_yet_is_asked_until_it_is() -> None:
    with peer(HANG_UP) as gone:
        port = int(gone.url.rsplit(":", 1)[1])
    time = Time()
    started: list[Peer] = []

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if len(time.slept) == 3:
            started.append(Peer(answer(200, '{"back":true}'), port=port))

    with connected(gone.url, time, sleep=sleep) as connection:
        assert connection.get("/") == {"back": True}
    started[0].close()
    assert len(time.slept) == 3


def test_a_server_that_stays_away_is_given_up_after_the_time_for_it(tmp_path: Path) -> None:
    with local_server(tmp_path) as server:
        pass
    time = Time()
    with connected(server.url, time, retry_ms=10_000) as connection, pytest.raises(Unreachable, match=server.url):
        connection.get("/")
    assert 8 < time.now <= 10


def test_pauses_grow_up_to_a_bound_and_are_never_in_step(tmp_path: Path) -> None:
    with local_server(tmp_path) as server:
        pass
    for luck in (0.0, 0.5, 0.999):
        time = Time()
        with (
            connected(server.url, time, retry_ms=30_000, jitter=lambda luck=luck: luck) as connection,
            pytest.raises(Unreachable),
        ):
            connection.get("/")
        assert time.slept[:3] == pytest.approx([pause * (0.5 + luck) for pause in (0.05, 0.1, 0.2)])
        assert max(time.slept) == pytest.approx(2.0 * (0.5 + luck))


def test_with_no_time_for_it_nothing_is_tried_again() -> None:
    time = Time()
    with peer(HANG_UP) as server, connected(server.url, time, retry_ms=0) as connection:
        with pytest.raises(Unreachable):
            connection.get("/")
        assert (len(server.requests), time.slept) == (1, [])


def test_a_connection_that_ends_before_the_answer_is_opened_again() -> None:
    with peer(answer(200), HANG_UP, answer(200, '{"n":2}')) as server, connected(server.url) as connection:
        connection.get("/")
        assert connection.get("/") == {"n": 2}
        assert server.connections == 2


@pytest.mark.parametrize(
    "half",
    [
        answer(200, '{"n":', "cut: short", length=100),
        b"HTTP/1.1 200 X\r\ncut: short\r\ncontent-le",  # bug 14
        b"HTTP/1.1 200 X\r\ncut: short\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_asked_for_again(half: bytes) -> None:
    with peer(half, answer(200, '{"n":2}')) as server, connected(server.url) as connection:
        assert connection.get("/") == {"n": 2}
        assert server.connections == 2


def test_chunks_that_break_off_are_asked_for_again() -> None:
    half = CHUNKED + b'cut: short\r\n\r\n4\r\n{"a"\r\n9\r\n:1'
    with peer(half, answer(200, '{"n":2}')) as server, connected(server.url) as connection:
        assert connection.get("/") == {"n": 2}


def test_what_may_not_be_repeated_is_not_when_it_may_have_arrived() -> None:
    time = Time()
    with peer(HANG_UP) as server, connected(server.url, time) as connection:
        with pytest.raises(Unreachable):
            connection.post("/", {}, repeatable=False)
        assert (len(server.requests), time.slept) == (1, [])


def test_what_may_not_be_repeated_is_tried_again_when_nobody_took_it(tmp_path: Path) -> None:
    with local_server(tmp_path) as server:
        pass
    time = Time()
    with connected(server.url, time, retry_ms=1000) as connection, pytest.raises(Unreachable):
        connection.post("/", {}, repeatable=False)
    assert len(time.slept) > 1


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize(("status", "code"), [(429, "throttled"), (503, "not_ready"), (503, "shutting_down")])
def test_a_refusal_that_will_pass_is_waited_out(status: int, code: str, repeatable: bool) -> None:
    time = Time()
    busy = refusal(status, code, "retry-after: 1")
    with peer(busy, busy, answer(200)) as server, connected(server.url, time) as connection:
        connection.post("/", {}, repeatable=repeatable)
        assert len(server.requests) == 3
    assert time.slept == [1.0, 1.0]


def test_a_server_cannot_make_a_client_wait_for_ever() -> None:
    time = Time()
    busy = refusal(503, "not_ready", "retry-after: 86400")
    with peer(busy, answer(200)) as server, connected(server.url, time) as connection:
        connection.get("/")
    assert time.now <= 2.0


@pytest.mark.parametrize("said", ["soon", "-1", "nan", "Wed, 21 Oct 2065 07:28:00 GMT"])
def test_a_retry_after_that_is_no_number_of_seconds_does_no_harm(said: str) -> None:
    time = Time()
    busy = refusal(429, "throttled", f"retry-after: {said}")
    with peer(busy, answer(200)) as server, connected(server.url, time) as connection:
        connection.get("/")
    assert time.slept == [pytest.approx(0.05)]


def test_a_refusal_that_does_not_pass_is_told_in_the_end() -> None:
    with (
        peer(refusal(429, "throttled", "retry-after: 1")) as server,
        connected(server.url, retry_ms=3000) as connection,
        pytest.raises(Throttled, match="no: throttled"),
    ):
        connection.get("/")
    assert len(server.requests) == 4


# What an answer means.


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", InvalidRequest),
        (401, "unauthorized", Unauthorized),
        (403, "forbidden", Forbidden),
        (404, "topic_not_found", TopicNotFound),
        (422, "topic_full", TopicFull),
        (500, "internal", ServerError),
        (503, "read_only", ReadOnly),
        (400, "brand_new", ServerError),
    ],
)
def test_a_refusal_is_raised_at_once_as_what_it_is(status: int, code: str, kind: type[TopicsError]) -> None:
    time = Time()
    with peer(refusal(status, code)) as server, connected(server.url, time) as connection:
        with pytest.raises(kind, match=f"no: {code}"):
            connection.get("/")
        assert (len(server.requests), time.slept) == (1, [])


def test_the_detail_of_a_refusal_is_kept() -> None:
    body = '{"error":{"code":"throttled","message":"m","detail":{"limit":"x","self":1}}}'
    with (
        peer(answer(429, body)) as server,
        connected(server.url, retry_ms=0) as connection,
        pytest.raises(Throttled) as refused,
    ):
        connection.get("/")
    assert refused.value.detail == {"limit": "x", "self": 1}


def test_a_server_that_replays_its_log_is_told_apart() -> None:
    with (
        peer(refusal(503, "not_ready")) as server,
        connected(server.url, retry_ms=0) as connection,
        pytest.raises(NotReady),
    ):
        connection.get("/")


def test_an_error_page_of_somebody_else_is_shown() -> None:
    with (
        peer(answer(502, "<html>Bad Gateway</html>")) as server,
        connected(server.url, retry_ms=0) as connection,
        pytest.raises(TopicsError, match=r"502.*Bad Gateway"),
    ):
        connection.get("/")


@pytest.mark.parametrize(
    "said",
    [
        answer(200, "<html>welcome</html>", "content-type: text/html"),
        answer(302, "", "location: http://elsewhere/"),
        answer(200, ""),
    ],
)
def test_a_url_that_is_not_of_a_topics_server_is_named(said: bytes) -> None:
    # bug 14
    with peer(said) as server, connected(server.url) as connection, pytest.raises(TopicsError, match=server.url):
        connection.get("/v0/topics")


def test_columns_that_are_none_are_named_with_their_url() -> None:
    with (
        peer(answer(200, "<html>welcome</html>", "content-type: text/html")) as server,
        connected(server.url) as connection,
        pytest.raises(TopicsError, match=server.url),  # bug 14
    ):
        connection.read_arrow("/v0/topics/a/diff", {})


def test_something_that_does_not_speak_http_is_named() -> None:
    with (
        peer(b"SSH-2.0-OpenSSH cut: short\r\n") as server,
        connected(server.url, retry_ms=0) as connection,
        pytest.raises(Unreachable, match=f"cannot reach {server.url}"),
    ):
        connection.get("/")


def test_a_host_that_does_not_exist_is_named() -> None:
    with (
        connected("http://no-such-host.invalid:4000", retry_ms=0) as connection,
        pytest.raises(Unreachable, match=r"cannot reach http://no-such-host\.invalid:4000"),
    ):
        connection.get("/")


@pytest.mark.parametrize("url", ["", "localhost:4000", "http://", "ftp://host", "http://host:x", "http://host:99999"])
def test_a_malformed_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^url"):
        Connection(url)


def test_a_password_in_the_url_is_never_shown() -> None:
    with (
        connected("http://me:secret@127.0.0.1:1", retry_ms=0) as connection,
        pytest.raises(Unreachable, match=r"cannot reach http://127\.0\.0\.1:1:"),
    ):
        connection.get("/")


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nx: y", "sec ret", "secr\u00e9t", "secret\u20ac"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^key") as refused:
        Connection("http://127.0.0.1:1", key)
    assert key not in str(refused.value)


# A real server.


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("guarded"), api_keys="good,narrow:read:mine") as running:
        yield running


def test_a_real_server_reuses_the_connection_after_answers_refusals_and_columns(guarded: LocalServer) -> None:
    ports = set()
    with connected(guarded.url, key="good") as connection:
        for number in range(3):
            connection.post(topic_path("reuse"), {"records": [{"data": number}]})
            with pytest.raises(TopicNotFound):
                connection.get(topic_path("missing"))
            body = connection.read_arrow(topic_path("reuse", "diff"), {})
            assert pa.ipc.open_stream(pa.py_buffer(body)).read_all().num_rows == number + 1
            ports.add(connection._http.sock.getsockname())
    assert len(ports) == 1


@pytest.mark.parametrize("key", [None, "wrong-key"])
def test_a_missing_or_wrong_key_is_unauthorized(guarded: LocalServer, key: str | None) -> None:
    with connected(guarded.url, key=key) as connection, pytest.raises(Unauthorized) as refused:
        connection.get("/v0/topics")
    assert "wrong-key" not in str(refused.value)


def test_a_key_for_other_topics_is_forbidden(guarded: LocalServer) -> None:
    with connected(guarded.url, key="narrow") as connection, pytest.raises(Forbidden):
        connection.get(topic_path("yours"))


def test_a_body_that_is_far_too_large_is_refused_as_that(tmp_path: Path) -> None:
    """The server refuses by the head, while the body is still on its way."""
    with (
        local_server(tmp_path, Limits(max_body_bytes=1 << 16)) as server,
        connected(server.url, retry_ms=1000) as connection,
        pytest.raises(PayloadTooLarge),
    ):
        connection.post_arrow(topic_path("large"), bytes(32 << 20))
