"""HTTP/2 with prior knowledge, on the same port: many streams, flow control, limits, resets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes, Settings

from tests.http.server import (
    ARROW,
    DEADLINE,
    JSON,
    Background,
    LocalServer,
    datas,
    diff,
    error_of,
    local_server,
    raw_data,
    write,
    write_raw,
)
from tests.http.wire import record
from topics.core.limits import Limits


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client(http1=False, http2=True) as opened:
        yield opened


class Streams:
    """A connection of HTTP/2 by hand."""

    def __init__(self, port: int, **settings: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self.h2 = H2Connection(H2Configuration(client_side=True))
        values = {SettingCodes[name.upper()]: value for name, value in settings.items()}
        self.h2.local_settings = Settings(client=True, initial_values={SettingCodes.ENABLE_PUSH: 0, **values})
        self.h2.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self.terminated = False
        self.flush()

    def __enter__(self) -> Streams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def ask(self, method: str, path: str, body: bytes | None = None, *, end: bool = True) -> int:
        """Puts a request into the next packet; returns its stream."""
        stream = self.h2.get_next_available_stream_id()
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "test")]
        if body is not None:
            headers.append(("content-type", JSON))
        self.h2.send_headers(stream, headers, end_stream=end and body is None)
        if body is not None:
            self.h2.send_data(stream, body, end_stream=end)
        return stream

    def step(self, acknowledge: bool = True) -> list[Event]:
        """Takes in what comes next; an empty list is the end."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            return []
        if not data:
            return []
        events = self.h2.receive_data(data)
        for event in events:
            if isinstance(event, ResponseReceived):
                self.statuses[event.stream_id] = int(dict(event.headers)[b":status"])
            elif isinstance(event, DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                if acknowledge:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset.add(event.stream_id)
            elif isinstance(event, ConnectionTerminated):
                self.terminated = True
        if not self.terminated:
            self.flush()
        return [*events, Event()]

    def wait_for(self, *streams: int) -> None:
        """Until these streams have their whole answers."""
        while not self.ended.issuperset(streams):
            assert self.step(), "the connection ended"

    def wait_for_end(self) -> None:
        while self.step():
            pass


@pytest.fixture
def streams(server: LocalServer) -> Iterator[Streams]:
    with Streams(server.port) as opened:
        yield opened


# -- the same contract -----------------------------------------------------------------------------------------------


def test_http_2_is_spoken_on_the_same_port(client: httpx.Client) -> None:
    answer = client.get("/v0/health")
    assert (answer.http_version, answer.status_code, answer.json()["status"]) == ("HTTP/2", 200, "ok")


def test_writes_and_reads_are_the_same(client: httpx.Client, topic: str) -> None:
    assert client.put(f"/v0/topics/{topic}").status_code == 201
    assert write(client, topic, 1, 2) == [1, 2]
    assert datas(client, topic) == [1, 2]
    assert client.delete(f"/v0/topics/{topic}").json()["deleted"] is True


def test_errors_are_the_same(client: httpx.Client, topic: str) -> None:
    assert error_of(client.get(f"/v0/topics/{topic}")) == (404, "topic_not_found")
    assert error_of(client.get("/nothing")) == (404, "not_found")
    assert error_of(client.post(f"/v0/topics/{topic}", content=b"{}")) == (415, "unsupported_media_type")
    answer = client.patch(f"/v0/topics/{topic}")
    assert error_of(answer) == (405, "method_not_allowed")
    assert "POST" in answer.headers["allow"]


def test_data_comes_back_byte_for_byte(client: httpx.Client, topic: str) -> None:
    data = b'{ "b" : 1.0, "a":1e400, "b":"\\u0041" }'
    write_raw(client, topic, data)
    assert raw_data(client.post(f"/v0/topics/{topic}/diff").content) == data


def test_head_and_options(client: httpx.Client) -> None:
    head = client.head("/v0/health")
    assert (head.status_code, head.content) == (200, b"")
    options = client.options("/v0/topics")
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")


def test_header_and_query_are_the_same(client: httpx.Client, topic: str) -> None:
    body = {"records": [{"data": 1}]}
    first = client.post(f"/v0/topics/{topic}?return_seqs=false", json=body, headers={"idempotency-key": "k"})
    assert "seqs" not in first.json()
    assert client.post(f"/v0/topics/{topic}", json=body, headers={"idempotency-key": "k"}).json()["deduped"] is True


def test_answers_are_packed_when_asked(server: LocalServer, topic: str) -> None:
    with server.client(http1=False, http2=True, headers={"accept-encoding": "gzip"}) as own:
        write(own, topic, *["x" * 100] * 100)
        answer = own.post(f"/v0/topics/{topic}/diff")
        assert answer.headers["content-encoding"] == "gzip"
        assert len(answer.json()["records"]) == 100


def test_arrow_is_the_same(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}/diff", headers={"accept": ARROW})
    assert answer.headers["content-type"] == ARROW


# -- streams ---------------------------------------------------------------------------------------------------------


def test_many_streams_at_once(server: LocalServer, client: httpx.Client, topic: str) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(
            base_url=server.url, http1=False, http2=True, timeout=DEADLINE, trust_env=False, verify=False
        ) as many:
            body = {"records": [{"data": 1}]}
            answers = await asyncio.gather(*[many.post(f"/v0/topics/{topic}", json=body) for _ in range(100)])
            return [answer.json()["last_seq"] for answer in answers]

    assert sorted(asyncio.run(run())) == list(range(1, 101))
    assert client.get(f"/v0/topics/{topic}").json()["count"] == 100


def test_a_read_that_waits_stands_beside_writes(server: LocalServer, streams: Streams, topic: str) -> None:
    created = streams.ask("PUT", f"/v0/topics/{topic}")
    streams.flush()
    streams.wait_for(created)
    waiting = streams.ask("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}')
    other = streams.ask("GET", "/v0/health")
    streams.flush()
    streams.wait_for(other)
    assert waiting not in streams.ended
    written = streams.ask("POST", f"/v0/topics/{topic}", record("now"))
    streams.flush()
    streams.wait_for(waiting, written)
    assert b'"data":"now"' in streams.bodies[waiting]


def test_a_stream_that_is_reset_frees_what_it_held(server: LocalServer, streams: Streams, topic: str) -> None:
    streams.ask("PUT", f"/v0/topics/{topic}")
    streams.flush()
    streams.wait_for(1)
    waiting = streams.ask("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}')
    streams.flush()
    server.wait_for_readings()
    streams.h2.reset_stream(waiting, ErrorCodes.CANCEL)
    streams.flush()
    server.wait_for_readings(0)
    assert server.call(lambda: server.app.inflight) == 0
    again = streams.ask("GET", "/v0/health")
    streams.flush()
    streams.wait_for(again)


def test_a_connection_that_ends_frees_all_its_streams(server: LocalServer, topic: str) -> None:
    with Streams(server.port) as streams:
        streams.ask("PUT", f"/v0/topics/{topic}")
        streams.flush()
        streams.wait_for(1)
        for _ in range(20):
            streams.ask("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}')
        streams.flush()
        server.wait_for_readings(20)
    server.wait_for_readings(0)
    assert server.call(lambda: server.app.inflight) == 0


def test_a_request_and_its_reset_in_one_packet_are_nothing(streams: Streams, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(20):
        streams.h2.reset_stream(streams.ask("GET", "/v0/health"), ErrorCodes.CANCEL)
    last = streams.ask("GET", "/v0/health")
    streams.flush()
    streams.wait_for(last)
    assert streams.statuses[last] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_goodbye_behind_a_request_is_no_failure(server: LocalServer, capfd: pytest.CaptureFixture[str]) -> None:
    with Streams(server.port) as streams:
        streams.ask("GET", "/v0/health")
        streams.h2.close_connection()
        streams.socket.sendall(streams.h2.data_to_send())
        while streams.socket.recv(1 << 16):
            pass
    assert "Traceback" not in capfd.readouterr().err


def test_frames_that_break_the_protocol_end_the_connection(streams: Streams) -> None:
    streams.socket.sendall(b"\0\0\x04\x00\x00\x00\x00\x00\x00abcd")
    streams.wait_for_end()
    assert streams.terminated


# -- flow control ----------------------------------------------------------------------------------------------------


def test_a_large_answer_comes_whole(client: httpx.Client, topic: str) -> None:
    for _ in range(2):
        write(client, topic, *["x" * 900_000] * 4)
    body = diff(client, topic, max_bytes=8 << 20)
    assert [len(each["data"]) for each in body["records"]] == [900_000] * 8


def test_a_large_body_goes_whole(client: httpx.Client, topic: str) -> None:
    assert write(client, topic, *["x" * 1_000_000] * 5) == [1, 2, 3, 4, 5]


def test_an_answer_waits_for_the_window(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, "x" * 5000)
    with Streams(server.port, initial_window_size=1000) as streams:
        stream = streams.ask("POST", f"/v0/topics/{topic}/diff", b"{}")
        streams.flush()
        while len(streams.bodies.get(stream, b"")) < 1000:
            assert streams.step(acknowledge=False)
        other = streams.ask("HEAD", "/v0/health")
        streams.flush()
        streams.wait_for(other)
        assert len(streams.bodies[stream]) == 1000
        streams.h2.increment_flow_control_window(100_000, stream)
        streams.flush()
        streams.wait_for(stream)
        assert len(streams.bodies[stream]) > 5000


def test_settings_that_open_the_window_let_an_answer_go_on(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, "x" * 5000)
    with Streams(server.port, initial_window_size=0) as streams:
        stream = streams.ask("POST", f"/v0/topics/{topic}/diff", b"{}")
        streams.flush()
        while stream not in streams.statuses:
            assert streams.step()
        streams.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 60_000})
        streams.flush()
        streams.wait_for(stream)
        assert b"xxxx" in streams.bodies[stream]


# -- limits and timeouts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(
        tmp_path_factory.mktemp("tight"),
        Limits(max_body_bytes=100_000),
        max_header_bytes=4096,
        header_timeout_ms=200,
        body_timeout_ms=200,
        idle_timeout_ms=200,
    ) as running:
        yield running


def test_a_body_too_large_is_413_and_the_connection_goes_on(tight: LocalServer) -> None:
    with Streams(tight.port) as streams:
        stream = streams.ask("POST", "/v0/topics/a", b"", end=False)
        streams.flush()
        for _ in range(8):
            while streams.h2.local_flow_control_window(stream) < 16_000:
                assert streams.step()
            if stream in streams.ended or stream in streams.reset:
                break
            streams.h2.send_data(stream, b" " * 16_000)
            streams.flush()
        streams.wait_for(stream)
        assert streams.statuses[stream] == 413
        again = streams.ask("GET", "/v0/health")
        streams.flush()
        streams.wait_for(again)


def test_headers_too_large_are_refused(tight: LocalServer) -> None:
    with Streams(tight.port) as streams:
        # The server's bound holds from the moment that the client has acknowledged it.
        first = streams.ask("GET", "/v0/health")
        streams.flush()
        streams.wait_for(first)
        stream = streams.h2.get_next_available_stream_id()
        headers = [(":method", "GET"), (":path", "/v0/health"), (":scheme", "http"), (":authority", "test")]
        streams.h2.send_headers(stream, [*headers, *[(f"x{n}", "y" * 1000) for n in range(12)]], end_stream=True)
        streams.flush()
        while stream not in streams.ended and streams.step():
            pass
        assert streams.statuses.get(stream, 400) == 400


def test_an_idle_connection_is_closed(tight: LocalServer) -> None:
    with Streams(tight.port) as streams:
        stream = streams.ask("GET", "/v0/health")
        streams.flush()
        streams.wait_for(stream)
        streams.wait_for_end()


def test_a_request_that_never_ends_is_ended(tight: LocalServer) -> None:
    with Streams(tight.port) as streams:
        stream = streams.ask("POST", "/v0/topics/a", b'{"records"', end=False)
        streams.flush()
        while stream not in streams.ended | streams.reset and streams.step():
            pass
        assert streams.statuses.get(stream, 400) == 400


def test_a_read_that_waits_is_no_idle_connection(tight: LocalServer) -> None:
    with Streams(tight.port) as streams:
        created = streams.ask("PUT", "/v0/topics/patient")
        streams.flush()
        streams.wait_for(created)
        stream = streams.ask("POST", "/v0/topics/patient/diff", b'{"wait_ms":2500}')
        streams.flush()
        streams.wait_for(stream)
        assert b'"records":[]' in streams.bodies[stream]


# -- shutdown --------------------------------------------------------------------------------------------------------


def test_streams_in_flight_are_answered_at_shutdown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with local_server(tmp_path) as server, Streams(server.port) as streams:
        streams.ask("PUT", "/v0/topics/a")
        streams.flush()
        streams.wait_for(1)
        waiting: Any = streams.ask("POST", "/v0/topics/a/diff", b'{"wait_ms":30000}')
        streams.flush()
        server.wait_for_readings()
        stopping = Background(server.stop)
        streams.wait_for(waiting)
        assert b'"records":[]' in streams.bodies[waiting]
        streams.wait_for_end()
        stopping.result()
    assert "Traceback" not in capfd.readouterr().err
