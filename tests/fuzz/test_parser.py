"""Raw bytes at the server's door: split, cut, mutated, oversized, slow, or no HTTP at all (sections 1 and 10)."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.serving import DEADLINE, Running, Wire, check_statuses, parse_answers, statuses
from topics.core.limits import Limits

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_BODY = 1 << 16
MAX_HEADER = 8192
HEALTH = b"GET /v0/health HTTP/1.1\r\nhost: x\r\n\r\n"
ENDING = b"GET /v0/health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def request(method: str, path: str, body: bytes = b"", extra: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b" % (
        *(method.encode(), path.encode(), len(body), extra, body),
    )


def chunked(method: str, path: str, *pieces: bytes, trailers: bytes = b"", extra: bytes = b"") -> bytes:
    head = b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n%b\r\n"
    body = b"".join([b"%x;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces])
    return head % (method.encode(), path.encode(), extra) + body + b"0\r\n" + trailers + b"\r\n"


WRITE = request("POST", "/v0/topics/t", b'{"records":[{"data":null}]}')
REFUSED_WRITE = request("POST", "/v0/topics/t", b'{"rekords":[{"data":null}]}')


def stream_of(topic: str) -> bytes:
    """Requests of every kind, pipelined: the last one ends the connection."""
    path = f"/v0/topics/{topic}"
    return b"".join(
        [
            request("PUT", path, b'{"cap_records":100}'),
            chunked("POST", path, b'{"records":[{"data"', b':"\xc3', b'\xa9","tag":"a"}', b"]}"),
            request("POST", path, b'{"records":[{"data":[1.0,2e3]}]}'),
            request("POST", path + "/diff", b'{"include_tags":true}'),
            b"\r\n" + request("POST", path, b'{"records":[}'),
            b"OPTIONS /v0/topics HTTP/1.1\r\nHost: x\r\n\r\n",
            chunked("POST", path + "/delete", b'{"match":"a"}', trailers=b"checksum: 1\r\n"),
            request("GET", path + "?touch=false"),
            request("GET", "/nowhere"),
            request("DELETE", path, extra=b"Connection: close\r\n"),
        ]
    )


_MOVING = re.compile(
    rb'"(?:epoch|instance|\$ts|last_write_ts|last_read_ts|effective_priority)":[^,}]*|"performance":\{[^}]*\}|'
    rb"content-length: \d+"
)


def still(answers: bytes, topic: str) -> bytes:
    """Answers without what differs from run to run."""
    return _MOVING.sub(b"", answers).replace(topic.encode(), b"TOPIC")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("parser")
    with Running(str(directory), Limits(max_body_bytes=MAX_BODY), max_header_bytes=MAX_HEADER) as running:
        yield running


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Running]:
    """A server whose patience ends within a second or two."""
    timeouts = {"header_timeout_ms": 200, "body_timeout_ms": 200, "idle_timeout_ms": 400, "shutdown_timeout_ms": 2000}
    with Running(str(tmp_path), Limits(max_body_bytes=8 << 20), max_header_bytes=MAX_HEADER, **timeouts) as running:
        yield running


def exchange(server: Running, *pieces: bytes) -> bytes:
    """Sends pieces, each read alone by the server; returns everything up to the end of the connection."""
    with server.connect() as wire:
        for piece in pieces[:-1]:
            wire.send_alone(piece)
        wire.send(pieces[-1])
        return wire.until_closed()


def blurt(server: Running, data: bytes) -> bytes:
    """Sends anything and hangs up: the server must answer what there is to answer, and let go."""
    with server.connect() as wire:
        wire.send(data)
        wire.half_close()
        received = wire.until_closed()
    check_statuses(received)
    return received


def burst(server: Running, data: bytes) -> bytes:
    """The same, all of it there before the server looks: requests, their resets and the end come in one read."""
    with server.connect() as wire:
        server.check_alive()  # this connection is accepted by now
        with server.held():
            wire.send(data)
            wire.half_close()
        received = wire.until_closed()
    check_statuses(received)
    return received


# -- the same bytes in other pieces ------------------------------------------------------------------------------------


def test_requests_split_at_every_byte_get_the_same_answers(server: Running) -> None:
    topic = "s00000"
    stream = stream_of(topic)
    expected = exchange(server, stream)
    assert [answer.status for answer in parse_answers(expected)] == [201, 200, 200, 200, 400, 204, 200, 200, 404, 200]

    def check(cut: int) -> None:
        name = f"s{cut:05}"
        data = stream_of(name)
        assert still(exchange(server, data[:cut], data[cut:]), name) == still(expected, topic), f"cut at {cut}"

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(check, range(1, len(stream))))


def test_requests_that_come_byte_by_byte_get_the_same_answers(server: Running) -> None:
    data = stream_of("bytes1")
    expected = exchange(server, data)
    pieces = [data[at : at + 1] for at in range(len(data))]
    assert still(exchange(server, *pieces), "") == still(expected, "")


@given(cuts=st.lists(st.integers(1, len(stream_of("s00000")) - 1), min_size=2, max_size=20, unique=True))
@settings(max_examples=40)
def test_requests_cut_into_any_pieces_get_the_same_answers(server: Running, cuts: list[int]) -> None:
    data = stream_of("s99999")
    expected = still(exchange(server, data), "")
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[begin:end] for begin, end in itertools.pairwise(edges)]
    assert still(exchange(server, *pieces), "") == expected


# -- what is no request ------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=2000))
def test_garbage_is_refused(server: Running, data: bytes) -> None:
    blurt(server, data)


@given(
    data=st.lists(
        st.sampled_from(
            [
                *(b"GET ", b"POST ", b"PUT ", b"PRI * ", b"/v0/topics/g", b"/diff", b"/", b"*", b" ", b"?", b"%", b"&"),
                *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b":", b": ", b";"),
                *(b"host: x\r\n", b"content-length: ", b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n"),
                *(
                    b"0",
                    b"5",
                    b"-1",
                    b"ffffffffffffffff",
                    b"99999999999999999999",
                    b"0\r\n\r\n",
                    b"connection: close\r\n",
                ),
                *(b"connection: upgrade\r\nupgrade: h2c\r\n", b"content-encoding: gzip\r\n", b"{}", b"\xff", b"SM"),
                b"content-type: application/json\r\n",
            ]
        ),
        max_size=30,
    ).map(b"".join)
)
@settings(max_examples=300)
def test_pieces_of_http_in_any_order_are_survived(server: Running, data: bytes) -> None:
    blurt(server, data)


def test_a_request_cut_off_anywhere_ends_with_its_connection(server: Running) -> None:
    data = chunked("POST", "/v0/topics/cut", b'{"records":[', b'{"data":1}]}', trailers=b"a: b\r\n")
    for cut in range(len(data)):
        assert statuses(blurt(server, data[:cut])) in ([], [400]), f"cut at {cut}"
    with server.connect() as wire:
        wire.send(request("GET", "/v0/topics/cut"))
        assert wire.answer().status == 404, "half a request was taken for a whole one"


@st.composite
def mutations(draw: st.DrawFn, data: bytes, most: int = 6) -> bytes:
    """Bytes changed, removed, repeated and put in at random places."""
    mutated = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(len(mutated) - 1, 0)))
        length = draw(st.integers(0, 16))
        kind = draw(st.sampled_from(["change", "remove", "repeat", "insert"]))
        if kind == "change" and mutated:
            mutated[at] = draw(st.integers(0, 255))
        elif kind == "remove":
            del mutated[at : at + length]
        elif kind == "repeat":
            mutated[at:at] = mutated[at : at + length]
        else:
            mutated[at:at] = draw(st.binary(max_size=length))
    return bytes(mutated)


@given(data=mutations(stream_of("mutant")))
@settings(max_examples=300)
def test_mutated_requests_are_survived(server: Running, data: bytes) -> None:
    blurt(server, data)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (MAX_HEADER + 1) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v0/health?" + b"a" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nhost: x\r\na: " + b"b" * MAX_HEADER + b"\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nhost: x\r\n" + b"a" * MAX_HEADER + b": b\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nhost: x\r\n" + b"a: bcdefgh\r\n" * 10_000 + b"\r\n",
        b"GET /v0/health HTTP/1.1\r\nhost: x\r\n" + b"".join([b"a%d: b\r\n" % n for n in range(101)]) + b"\r\n",
        b"A" * (1 << 20),
        b"GET " + b" " * (1 << 18),
        b"\r\n" * (1 << 17),
    ],
    ids=["path", "query", "value", "name", "one header often", "many headers", "method", "spaces", "blank lines"],
)
def test_an_oversized_head_is_refused(server: Running, head: bytes) -> None:
    received = blurt(server, head)
    assert set(statuses(received)) <= {400}
    assert 200 not in statuses(received)


@pytest.mark.parametrize(
    "data",
    [
        request("POST", "/v0/topics/big", b" " * (MAX_BODY + 1)),
        chunked("POST", "/v0/topics/big", *[b" " * 5000] * 20),
        request("POST", "/v0/topics/big").replace(b"length: 0", b"length: 18446744073709551615"),
    ],
    ids=["by length", "chunked", "announced only"],
)
def test_an_oversized_body_is_refused_before_it_is_read(server: Running, data: bytes) -> None:
    assert statuses(exchange(server, data)) == [413]


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ncontent-length: 5, 5\r\n\r\nhello",
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nhello",
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ncontent-length : 5\r\n\r\nhello",
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\nhello\n0\n\n",
        b"GET /v0/health HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nhost: x\r\na: b\0c\r\n\r\n",
        b"GET /v0/health HTTP/1.1\nhost: x\n\n",
    ],
)
def test_forms_that_two_servers_could_read_differently_are_refused(server: Running, data: bytes) -> None:
    """And nothing that follows them is taken for a request."""
    assert statuses(exchange(server, data + HEALTH)) == [400]


# -- order and number of answers ---------------------------------------------------------------------------------------


def test_many_pipelined_requests_behind_a_pending_write_are_all_answered(server: Running) -> None:
    answers = parse_answers(exchange(server, WRITE + HEALTH * 2000 + ENDING))
    assert [answer.status for answer in answers[1:]] == [200] * 2001


def test_a_line_that_empties_at_once_is_read_on(server: Running) -> None:
    with server.connect() as wire:
        wire.send_alone(WRITE + REFUSED_WRITE * 99)
        assert [wire.answer().status for _ in range(100)][1:] == [400] * 99
        wire.send(HEALTH)
        assert wire.answer().status == 200


@given(kinds=st.lists(st.sampled_from([WRITE, REFUSED_WRITE, HEALTH]), min_size=1, max_size=300))
@settings(max_examples=30)
def test_every_pipelined_request_gets_its_answer_in_its_place(server: Running, kinds: list[bytes]) -> None:
    answers = parse_answers(exchange(server, b"".join(kinds) + ENDING))
    shown = {WRITE: b'"first_seq"', REFUSED_WRITE: b'"invalid_request"', HEALTH: b'"uptime_ms"'}
    assert len(answers) == len(kinds) + 1
    for kind, answer in zip(kinds, answers, strict=False):
        assert shown[kind] in answer.body


@pytest.mark.parametrize(
    "data",
    [
        HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"),
        HEALTH.replace(
            b"\r\n\r\n",
            b"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA"
            b"\r\n\r\n",
        ),
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["websocket", "curl --http2", "connect"],
)
def test_an_upgrade_that_is_not_known_gets_one_answer(server: Running, data: bytes) -> None:
    received = blurt(server, data)
    assert len(statuses(received)) == 1, received


def test_trailers_are_not_headers(server: Running) -> None:
    data = chunked("POST", "/v0/topics/t", b"{}", trailers=b"content-type: application/json\r\n")
    data = data.replace(b"content-type: application/json\r\n", b"", 1)
    with server.connect() as wire:
        wire.send(data)
        assert wire.answer().status in (400, 415)
    key = b"idempotency-key: from a trailer\r\n"
    for _ in range(2):
        with server.connect() as wire:
            wire.send(chunked("POST", "/v0/topics/t", b'{"records":[{"data":1}]}', trailers=key))
            answer = wire.answer()
            assert answer.status == 400 or not answer.json()["deduped"]


@pytest.mark.parametrize("trailer", [b"a: bcdefgh\r\n", b"a: " + b"b" * 4000 + b"\r\n"])
def test_trailers_are_bounded(server: Running, trailer: bytes) -> None:
    times = 4 * MAX_HEADER // len(trailer)
    data = chunked("POST", "/v0/topics/t", b'{"records":[{"data":1}]}', trailers=trailer * times)
    assert statuses(blurt(server, data)) == [400]


def test_the_header_limit_holds_for_pipelined_requests(server: Running) -> None:
    large = HEALTH.replace(b"\r\n\r\n", b"\r\na: " + b"b" * 3 * MAX_HEADER + b"\r\n\r\n")
    assert statuses(blurt(server, HEALTH + large)) == [200, 400]


def test_options_has_no_body_and_no_length(server: Running) -> None:
    with server.connect() as wire:
        wire.send(b"OPTIONS /v0/topics HTTP/1.1\r\nhost: x\r\n\r\n" + HEALTH)
        answer = wire.answer(has_body=False)
        assert answer.status == 204
        assert "content-length" not in answer.headers
        assert wire.answer().status == 200


def test_head_has_the_head_of_get_and_nothing_behind_it(server: Running) -> None:
    with server.connect() as wire:
        wire.send(HEALTH.replace(b"GET", b"HEAD") + HEALTH)
        head = wire.answer(has_body=False)
        assert head.status == 200
        assert int(head.headers["content-length"]) > 0
        assert wire.answer().json()["status"] == "ok"


def test_a_client_that_half_closes_gets_its_answers(server: Running) -> None:
    """A write that makes its topic waits for the disk: its end of the connection is closed long before."""
    new = request("POST", "/v0/topics/half-closed", b'{"records":[{"data":null}]}')
    assert [answer.status for answer in parse_answers(burst(server, HEALTH + new + HEALTH))] == [200, 201, 200]


def test_a_forbidden_request_leaves_no_count_behind(tmp_path: Path) -> None:
    with Running(str(tmp_path), api_keys="one:r:a,two") as server:
        for path in ("/v0/topics/b", "/v0/topics/a", "/v0/topics", "/v0/health"):
            for key in (
                b"",
                b"authorization: Bearer one\r\n",
                b"authorization: Bearer two\r\n",
                b"authorization: \xff\r\n",
            ):
                for method in ("GET", "PUT", "POST", "DELETE", "PATCH"):
                    blurt(server, request(method, path, b"{}", extra=key))
        server.check_clean()


# -- those who take their time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\r\n", []),
        (b"P", []),
        (PREFACE[:20], []),
        (b"GET /v0/heal", [400]),
        (HEALTH[:-2], [400]),
        (HEALTH + HEALTH[:-2], [200, 400]),
        (HEALTH, [200]),
        (WRITE[:-5], [400]),
        (chunked("POST", "/v0/topics/slow", b"{", b"}")[:-8], [400]),
        (chunked("POST", "/v0/topics/slow", b"{", b"}")[:-2], [400]),
        (request("POST", "/v0/topics/slow", extra=b"expect: 100-continue\r\n").replace(b"h: 0", b"h: 9"), [100, 400]),
    ],
    ids=[
        *("nothing", "a blank line", "one letter", "half a preface", "half a line", "half a head"),
        *("a request and half a head", "a request", "half a body", "half the chunks", "no last line", "continue"),
    ],
)
def test_a_connection_on_which_nothing_more_happens_is_closed(
    impatient: Running, data: bytes, expected: list[int]
) -> None:
    with impatient.connect() as wire:
        wire.send(data)
        found = statuses(wire.until_closed())
    # A blank line is no request yet, or the beginning of one: both are fine.
    assert found == expected or (expected == [] and found == [400])


def test_a_slow_loris_is_cut_off_though_it_never_rests(impatient: Running) -> None:
    """A header byte by byte, each before its time is up: the head as a whole has a deadline."""
    with impatient.connect() as wire:
        wire.send(b"GET /v0/health HTTP/1.1\r\nhost: x\r\na: ")
        closed = threading.Event()

        def drip() -> None:
            while not closed.wait(0.05):
                wire.send(b"b")

        drops = threading.Thread(target=drip)
        drops.start()
        try:
            assert statuses(wire.until_closed()) in ([400], [])
        finally:
            closed.set()
            drops.join(DEADLINE)


def test_a_client_that_reads_nothing_is_cut_off(impatient: Running) -> None:
    data = request(
        "POST", "/v0/topics/big", b'{"records":[%b]}' % b",".join([b'{"data":"%b"}' % (b"x" * 500_000)] * 10)
    )
    with impatient.connect() as wire:
        wire.send(data)
        assert wire.answer().status == 201
    impatient.wait_for_connections(0)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(DEADLINE)
        reader.connect(("127.0.0.1", impatient.port))
        reader.sendall(request("POST", "/v0/topics/big/diff", b'{"max_bytes":8000000}') * 10)
        impatient.wait_for_connections(1)
        impatient.wait_for_connections(0)


def test_a_hundred_slow_clients_do_not_hold_up_a_fast_one(impatient: Running) -> None:
    wires = [impatient.connect() for _ in range(100)]
    try:
        for number, wire in enumerate(wires):
            wire.send((HEALTH, WRITE, PREFACE, b"POST ")[number % 4][: 4 + number % 20])
        impatient.check_alive()
        for wire in wires:
            wire.until_closed()
    finally:
        for wire in wires:
            wire.socket.close()


def test_clients_that_vanish_leave_nothing(server: Running) -> None:
    """Reset, in the middle of everything, a waiting read among it."""
    with server.connect() as wire:
        wire.send(request("PUT", "/v0/topics/waited"))
        wire.answer()
    waiting = request("POST", "/v0/topics/waited/diff", b'{"wait_ms":30000}')
    for data in (waiting, waiting + HEALTH * 5, WRITE, WRITE * 50, WRITE[:-3], HEALTH * 70, PREFACE, b"G"):
        with server.connect() as wire:
            wire.send_alone(data)
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.check_clean()


def test_no_more_connections_than_allowed(tmp_path: Path) -> None:
    with Running(str(tmp_path), max_connections=5) as server:
        wires = [server.connect() for _ in range(5)]
        try:
            for wire in wires:
                wire.send(HEALTH)
                assert wire.answer().status == 200
            with server.connect() as wire:
                wire.send(HEALTH)
                assert statuses(wire.until_closed()) == [429]
        finally:
            for wire in wires:
                wire.socket.close()
        server.wait_for_connections(0)
        server.check_alive()


# -- HTTP/2 ------------------------------------------------------------------------------------------------------------


def h2_client() -> H2Connection:
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    return client


def h2_request(client: H2Connection, method: str, path: str, body: bytes = b"", ends: bool = True) -> int:
    stream: int = client.get_next_available_stream_id()
    headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
    headers += [("content-type", "application/json")]
    client.send_headers(stream, headers, end_stream=ends and not body)
    if body:
        client.send_data(stream, body, end_stream=ends)
    return stream


def h2_stream(topic: str) -> bytes:
    """All bytes that a client sends in a conversation of four requests."""
    client = h2_client()
    h2_request(client, "PUT", f"/v0/topics/{topic}", b"{}")
    h2_request(client, "GET", "/v0/health")
    client.ping(b"12345678")
    h2_request(client, "POST", f"/v0/topics/{topic}", b'{"rekords":[]}')
    h2_request(client, "GET", "/nowhere")
    return client.data_to_send()


class H2Answers:
    """What a server says to a client that has sent its part already."""

    def __init__(self, client: H2Connection) -> None:
        self._client = client
        self.statuses: dict[int, int] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.is_terminated = False

    def read(self, wire: Wire, streams: int) -> None:
        while len(self.ended) < streams and (data := wire.receive()):
            for event in self._client.receive_data(data):
                self._take(event)
            wire.send(self._client.data_to_send())

    def _take(self, event: Event) -> None:
        if isinstance(event, ResponseReceived):
            self.statuses[event.stream_id] = int(dict(event.headers)[b":status"])
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, ConnectionTerminated):
            self.is_terminated = True


def h2_pending(streams: int) -> H2Connection:
    """A client that knows of requests which it sent by other means."""
    client = h2_client()
    for _ in range(streams):
        h2_request(client, "GET", "/")
    client.data_to_send()
    return client


def test_http2_frames_split_at_every_byte_get_the_same_answers(server: Running) -> None:
    for cut in range(1, len(h2_stream("h00000"))):
        data = h2_stream(f"h{cut:05}")
        with server.connect() as wire:
            wire.send_alone(data[:cut])
            wire.send(data[cut:])
            answers = H2Answers(h2_pending(4))
            answers.read(wire, 4)
        assert answers.statuses == {1: 201, 3: 200, 5: 400, 7: 404}, f"cut at {cut}"
        assert b'"created":true' in answers.bodies[1]


@given(
    data=st.one_of(
        st.binary(max_size=500).map(lambda tail: PREFACE + tail),
        st.builds(lambda at, tail: PREFACE[:at] + tail, st.integers(1, len(PREFACE)), st.binary(max_size=100)),
        mutations(PREFACE),
        st.sampled_from([PREFACE * 2, PREFACE + HEALTH, HEALTH + PREFACE, PREFACE.lower(), b"\r\n" + PREFACE]),
    )
)
@settings(max_examples=200)
def test_a_preface_and_garbage_behind_it_are_survived(server: Running, data: bytes) -> None:
    blurt(server, data)


@given(data=mutations(h2_stream("mutated-h2")))
@settings(max_examples=400)
def test_mutated_http2_frames_are_survived(server: Running, data: bytes) -> None:
    blurt(server, data)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Well-formed frame heads around anything."""
    out = PREFACE + b"\0\0\0\4\0\0\0\0\0"
    for _ in range(draw(st.integers(1, 12))):
        payload = draw(
            st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\0\0\0\0", b"\0" * 8, b"\x82\x84\x86"]))
        )
        kind = draw(st.integers(0, 11))
        flags = draw(st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D, 255]))
        stream = draw(st.sampled_from([0, 1, 1, 2, 3, 5, 2**31 - 1]))
        out += len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    return out


@given(data=frames())
@settings(max_examples=400)
def test_http2_frames_of_any_kind_are_survived(server: Running, data: bytes) -> None:
    blurt(server, data)


@given(
    steps=st.lists(
        st.sampled_from(["get", "write", "open", "data", "end", "reset", "ping", "window", "bye"]), max_size=25
    )
)
@settings(max_examples=150)
def test_http2_requests_reset_at_any_moment_are_survived(server: Running, steps: list[str]) -> None:
    """Valid frames, everything in one read: streams come and go before the server has looked at them."""
    client = h2_client()
    opened: list[int] = []
    streams: list[int] = []
    for step in steps:
        if step == "get":
            streams.append(h2_request(client, "GET", "/v0/health"))
        elif step == "write":
            streams.append(h2_request(client, "POST", "/v0/topics/h2", b'{"records":[{"data":1}]}'))
        elif step == "open":
            opened.append(h2_request(client, "POST", "/v0/topics/h2", ends=False))
        elif step == "data" and opened:
            client.send_data(opened[-1], b" ")
        elif step == "end" and opened:
            stream = opened.pop()
            client.end_stream(stream)
            streams.append(stream)
        elif step == "reset" and (opened or streams):
            client.reset_stream((opened or streams).pop())
        elif step == "ping":
            client.ping(b"abcdefgh")
        elif step == "window":
            client.increment_flow_control_window(1000)
        elif step == "bye":
            client.close_connection()
            break
    burst(server, client.data_to_send())


def test_an_http2_stream_that_is_reset_at_once_is_forgotten(server: Running) -> None:
    client = h2_client()
    for _ in range(50):
        client.reset_stream(h2_request(client, "GET", "/v0/health"))
        client.reset_stream(h2_request(client, "POST", "/v0/topics/h2", b'{"records":[{"data":1}]}'))
    last = h2_request(client, "GET", "/v0/health")
    with server.connect() as wire:
        wire.send(client.data_to_send())
        answers = H2Answers(client)
        answers.read(wire, 1)
    assert answers.statuses == {last: 200}


def test_goaway_behind_a_request_is_no_failure(server: Running) -> None:
    client = h2_client()
    h2_request(client, "GET", "/v0/health")
    client.close_connection()
    with server.connect() as wire:
        wire.send(client.data_to_send())
        wire.until_closed()


def test_a_window_that_settings_open_lets_the_answer_go(server: Running) -> None:
    client = h2_client()
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    stream = h2_request(client, "GET", "/v0/health")
    with server.connect() as wire:
        wire.send_alone(client.data_to_send())
        client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65535})
        wire.send(client.data_to_send())
        answers = H2Answers(client)
        answers.read(wire, 1)
    assert answers.statuses == {stream: 200}
    assert b"uptime_ms" in answers.bodies[stream]


def test_an_oversized_http2_body_is_refused(server: Running) -> None:
    client = h2_client()
    stream = h2_request(client, "POST", "/v0/topics/big", b" " * 16_000, ends=False)
    with server.connect() as wire:
        wire.send(client.data_to_send())
        answers = H2Answers(client)
        sent = 16_000
        while sent <= MAX_BODY and client.local_flow_control_window(stream) > 0:
            size = min(16_000, client.local_flow_control_window(stream))
            client.send_data(stream, b" " * size)
            wire.send(client.data_to_send())
            sent += size
            if client.local_flow_control_window(stream) < 16_000:
                for event in client.receive_data(wire.receive()):
                    answers._take(event)
        answers.read(wire, 1)
    assert answers.statuses == {stream: 413}


def test_an_idle_http2_connection_is_closed(impatient: Running) -> None:
    with impatient.connect() as wire:
        wire.send(h2_client().data_to_send())
        wire.until_closed()


def test_an_http2_request_that_never_ends_is_ended(impatient: Running) -> None:
    client = h2_client()
    h2_request(client, "POST", "/v0/topics/slow", b"{", ends=False)
    with impatient.connect() as wire:
        wire.send(client.data_to_send())
        wire.until_closed()


def test_an_http2_answer_that_is_never_taken_is_given_up(impatient: Running) -> None:
    client = h2_client()
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    h2_request(client, "GET", "/v0/health")
    with impatient.connect() as wire:
        wire.send(client.data_to_send())
        wire.until_closed()


def test_http2_requests_in_flight_are_answered_at_shutdown(tmp_path: Path) -> None:
    with Running(str(tmp_path)) as server:
        client = h2_client()
        h2_request(client, "PUT", "/v0/topics/t", b"{}")
        with server.connect() as wire:
            wire.send(client.data_to_send())
            H2Answers(client).read(wire, 1)
            stream = h2_request(client, "POST", "/v0/topics/t/diff", b'{"wait_ms":30000}')
            wire.send_alone(client.data_to_send())
            server.stop()
            answers = H2Answers(client)
            answers.read(wire, 1)
            assert answers.statuses == {stream: 200}
            assert wire.until_closed() == b""


# -- before the log is there -------------------------------------------------------------------------------------------


def test_a_connection_made_while_the_log_is_replayed_does_not_stay(tmp_path: Path) -> None:
    """It is refused at once when it asks; when it is silent it lives no longer than any other."""
    server = Running(str(tmp_path), header_timeout_ms=200, body_timeout_ms=200, idle_timeout_ms=400)
    with server.starting() as go_on:
        silent, half, asking = server.connect(), server.connect(), server.connect()
        with silent, half, asking:
            half.send(HEALTH[:20])
            asking.send(HEALTH.replace(b"health", b"topics"))
            assert statuses(asking.until_closed()) == [503]
            go_on()
            assert statuses(silent.until_closed()) == []
            assert statuses(half.until_closed()) == [400]
