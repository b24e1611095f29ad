"""HTTP/1.1 by hand: connections, framing, encodings, limits, timeouts, and what must be refused."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator

import httpx
import pytest

from tests.http.server import JSON, LocalServer, datas, error_of, local_server, write
from tests.http.wire import Reply, Wire, chunked, record, request
from topics.core.limits import Limits

HEALTH = request("GET", "/v0/health")
MAX_BODY = 100_000
MAX_HEAD = 4096


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server with small limits and short timeouts."""
    with local_server(
        tmp_path_factory.mktemp("tight"),
        Limits(max_body_bytes=MAX_BODY),
        max_header_bytes=MAX_HEAD,
        header_timeout_ms=200,
        body_timeout_ms=200,
        idle_timeout_ms=200,
    ) as running:
        yield running


@pytest.fixture
def wire(server: LocalServer) -> Iterator[Wire]:
    with Wire(server.port) as opened:
        yield opened


@pytest.fixture
def tight_wire(tight: LocalServer) -> Iterator[Wire]:
    with Wire(tight.port) as opened:
        yield opened


def refused(wire: Wire, data: bytes, status: int = 400, code: str = "invalid_request") -> Reply:
    """Sends what must be refused: one answer, then the end."""
    wire.send_what_fits(data)
    reply = wire.read()
    assert (reply.status, reply.code) == (status, code)
    assert reply.headers["connection"] == "close"
    assert wire.is_ended
    return reply


# -- connections -----------------------------------------------------------------------------------------------------


def test_a_connection_serves_many_requests(wire: Wire) -> None:
    for _ in range(5):
        reply = wire.ask(HEALTH)
        assert reply.status == 200
        assert "connection" not in reply.headers


def test_connection_close_is_obeyed(wire: Wire) -> None:
    reply = wire.ask(request("GET", "/v0/health", None, "connection: close"))
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert wire.is_ended


def test_a_write_with_connection_close_is_answered_first(wire: Wire, topic: str) -> None:
    reply = wire.ask(request("POST", f"/v0/topics/{topic}", record(1), "connection: close"))
    assert reply.status == 201
    assert wire.is_ended


def test_nothing_behind_connection_close_is_served(wire: Wire, client: httpx.Client, topic: str) -> None:
    wire.send(request("GET", "/v0/health", None, "connection: close") + request("PUT", f"/v0/topics/{topic}"))
    assert wire.read().status == 200
    assert wire.is_ended
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_http_1_0_ends_after_its_answer(wire: Wire) -> None:
    reply = wire.ask(request("GET", "/v0/health", version="1.0", host=None))
    assert reply.status == 200
    assert wire.is_ended


def test_http_1_0_with_keep_alive_is_told_what_happens(wire: Wire) -> None:
    ask = request("GET", "/v0/health", None, "connection: keep-alive", version="1.0", host=None)
    reply = wire.ask(ask)
    if reply.headers.get("connection", "close").lower() == "keep-alive":
        assert wire.ask(ask).status == 200
    else:
        assert wire.is_ended


def test_a_request_in_single_bytes_is_a_request(wire: Wire, topic: str) -> None:
    for byte in request("POST", f"/v0/topics/{topic}", record("slow")):
        wire.send(bytes([byte]))
    assert wire.read().status == 201


def test_empty_lines_before_a_request_are_ignored(wire: Wire) -> None:
    assert wire.ask(b"\r\n\r\n" + HEALTH).status == 200


def test_an_error_of_the_contract_keeps_the_connection(wire: Wire) -> None:
    assert wire.ask(request("GET", "/v0/nothing")).status == 404
    assert wire.ask(request("POST", "/v0/topics/a", b"{")).status == 400
    assert wire.ask(HEALTH).status == 200


def test_a_client_that_half_closes_gets_its_answer(wire: Wire, topic: str) -> None:
    wire.send(request("POST", f"/v0/topics/{topic}", record(1)))
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.read().status == 201
    assert wire.is_ended


# -- pipelining ------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(wire: Wire, topic: str) -> None:
    wire.send(
        request("POST", f"/v0/topics/{topic}", record(1))
        + request("GET", f"/v0/topics/{topic}")
        + HEALTH
        + request("POST", f"/v0/topics/{topic}", record(2))
        + request("DELETE", f"/v0/topics/{topic}")
        + request("GET", f"/v0/topics/{topic}")
    )
    assert [wire.read().status for _ in range(6)] == [201, 200, 200, 200, 200, 404]


def test_a_diff_behind_writes_sees_them(wire: Wire, topic: str) -> None:
    writes = b"".join(request("POST", f"/v0/topics/{topic}", record(number)) for number in range(10))
    wire.send(writes + request("POST", f"/v0/topics/{topic}/diff", b"{}"))
    assert [wire.read().json()["seqs"] for _ in range(10)] == [[number] for number in range(1, 11)]
    assert [each["data"] for each in wire.read().json()["records"]] == list(range(10))


def test_requests_behind_a_read_that_waits_wait_too(
    server: LocalServer, client: httpx.Client, wire: Wire, topic: str
) -> None:
    client.put(f"/v0/topics/{topic}")
    wire.send(request("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}') + HEALTH)
    server.wait_for_readings()
    write(client, topic, "now")
    assert wire.read().json()["records"][0]["data"] == "now"
    assert "uptime_ms" in wire.read().json()


def test_more_requests_than_may_wait_are_all_answered(wire: Wire, topic: str) -> None:
    wire.send(request("POST", f"/v0/topics/{topic}", record(1)) * 500)
    assert [wire.read().json()["last_seq"] for _ in range(500)] == list(range(1, 501))


def test_many_reads_behind_a_slow_write_are_all_answered(wire: Wire, topic: str) -> None:
    wire.send(request("PUT", f"/v0/topics/{topic}", b'{"durability":"fsync"}') + HEALTH * 300)
    assert [wire.read().status for _ in range(301)] == [201] + [200] * 300


def test_a_connection_goes_on_when_many_answers_leave_at_once(client: httpx.Client, wire: Wire, topic: str) -> None:
    slow, fast = f"{topic}.slow", f"{topic}.fast"
    client.put(f"/v0/topics/{slow}", json={"durability": "fsync"})
    for name in (slow, fast):
        write(client, name, 0)
    wire.send(request("POST", f"/v0/topics/{slow}", record(1)) + request("POST", f"/v0/topics/{fast}", record(1)) * 100)
    assert {wire.read().status for _ in range(101)} == {200}
    assert wire.ask(HEALTH).status == 200


def test_a_bad_request_behind_good_ones_is_answered_last(wire: Wire, topic: str) -> None:
    wire.send(request("POST", f"/v0/topics/{topic}", record(1)) + b"NONSENSE\r\n\r\n" + HEALTH)
    assert wire.read().status == 201
    assert wire.read().code == "invalid_request"
    assert wire.is_ended


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_a_chunked_body_is_a_body(wire: Wire, client: httpx.Client, topic: str) -> None:
    body = record({"a": "b" * 100})
    head = request("POST", f"/v0/topics/{topic}", None, "transfer-encoding: chunked", "content-type: application/json")
    assert wire.ask(head + chunked(body[:1], body[1:50], body[50:])).status == 201
    assert datas(client, topic) == [{"a": "b" * 100}]
    assert wire.ask(HEALTH).status == 200


def test_chunk_extensions_are_ignored_and_trailers_are_not_headers(
    wire: Wire, client: httpx.Client, topic: str
) -> None:
    body = record(1)
    head = request("POST", f"/v0/topics/{topic}", None, "transfer-encoding: chunked", "content-type: application/json")
    wire.send(head + b"%x;a=b\r\n%b\r\n0\r\nidempotency-key: k\r\n\r\n" % (len(body), body))
    assert wire.read().status == 201
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 2}], "idempotency_key": "k"})
    assert answer.json()["deduped"] is False


def test_expect_100_continue_is_answered_before_the_body(wire: Wire, topic: str) -> None:
    body = record(1)
    whole = request("POST", f"/v0/topics/{topic}", body, "expect: 100-continue")
    wire.send(whole[: -len(body)])
    assert wire.read_head() == (100, {})
    wire.send(body)
    assert wire.read().status == 201


def test_an_old_client_gets_no_100(wire: Wire, topic: str) -> None:
    whole = request("POST", f"/v0/topics/{topic}", record(1), "expect: 100-continue", version="1.0")
    assert wire.ask(whole).status == 201


def test_a_pipelined_100_continue_comes_behind_the_answers_before_it(wire: Wire, topic: str) -> None:
    body = record(1)
    head = request("POST", f"/v0/topics/{topic}", body, "expect: 100-continue")[: -len(body)]
    wire.send(request("PUT", f"/v0/topics/{topic}", b"{}") + head)
    assert wire.read().status == 201
    assert wire.read().status == 100
    assert wire.ask(body).json()["first_seq"] == 1


def test_another_expectation_is_refused(wire: Wire) -> None:
    refused(wire, request("POST", "/v0/topics/a", record(1), "expect: the-best"))


def test_a_body_that_is_expected_to_be_too_large_is_not_asked_for(tight_wire: Wire) -> None:
    head = request("POST", "/v0/topics/a", None, f"content-length: {MAX_BODY + 1}", "expect: 100-continue")
    refused(tight_wire, head, 413, "payload_too_large")


def test_a_get_may_have_a_body_that_nobody_reads(wire: Wire) -> None:
    wire.send(request("GET", "/v0/health", b"{}") + HEALTH)
    assert [wire.read().status for _ in range(2)] == [200, 200]


# -- methods ---------------------------------------------------------------------------------------------------------


def test_head_is_get_without_the_body(wire: Wire, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    for path in ("/v0/health", f"/v0/topics/{topic}", "/v0/topics", "/v0/metrics"):
        reply = wire.ask(request("HEAD", path), "HEAD")
        assert reply.status == 200
        assert int(reply.headers["content-length"]) > 0
    assert wire.ask(request("HEAD", "/v0/topics/nobody"), "HEAD").status == 404
    assert wire.ask(HEALTH).status == 200


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v0/topics", "GET, HEAD, OPTIONS"),
        ("/v0/topics/a", "DELETE, GET, HEAD, OPTIONS, POST, PUT"),
        ("/v0/topics/a/diff", "OPTIONS, POST"),
    ],
)
def test_options_names_the_methods(wire: Wire, path: str, allowed: str) -> None:
    reply = wire.ask(request("OPTIONS", path))
    assert (reply.status, reply.headers["allow"]) == (204, allowed)
    assert "content-length" not in reply.headers
    assert wire.ask(HEALTH).status == 200


def test_an_absolute_target_is_understood(wire: Wire) -> None:
    assert wire.ask(request("GET", "http://test/v0/health")).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA"),
        ("connection: upgrade", "upgrade: websocket", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="),
    ],
)
def test_an_upgrade_that_is_not_spoken_is_ignored(wire: Wire, headers: tuple[str, ...]) -> None:
    wire.send(request("GET", "/v0/health", None, *headers))
    assert wire.read().status == 200
    wire.send_what_fits(HEALTH)
    rest = wire.read_to_end() if wire.socket.recv(1, 2) == b"" else wire.read()
    assert rest == b"" or (isinstance(rest, Reply) and rest.status == 200)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_upgrade_with_a_body_has_its_body_read(wire: Wire, client: httpx.Client, topic: str, method: str) -> None:
    headers = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")
    path = f"/v0/topics/{topic}" if method == "POST" else "/v0/health"
    whole = request(method, path, record(1), *headers)
    for _ in range(2):
        assert wire.ask(whole).status in (200, 201)
    for byte in range(len(whole)):
        wire.send(whole[byte : byte + 1])
    assert wire.read().status == 200
    assert method == "GET" or datas(client, topic) == [1, 1, 1]


# -- gzip ------------------------------------------------------------------------------------------------------------


def test_a_body_may_be_packed(client: httpx.Client, topic: str) -> None:
    for number, encoding in enumerate(("gzip", "x-gzip", "GZIP", "identity")):
        body = record(number) if encoding == "identity" else gzip.compress(record(number))
        headers = {"content-type": JSON, "content-encoding": encoding}
        assert client.post(f"/v0/topics/{topic}", content=body, headers=headers).status_code in (200, 201)
    assert datas(client, topic) == [0, 1, 2, 3]


def test_every_json_body_may_be_packed(client: httpx.Client, topic: str) -> None:
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    put = client.put(f"/v0/topics/{topic}", content=gzip.compress(b'{"ttl_ms":5000}'), headers=headers)
    assert put.json()["config"]["ttl_ms"] == 5000
    diff = client.post(f"/v0/topics/{topic}/diff", content=gzip.compress(b'{"limit":1}'), headers=headers)
    assert diff.status_code == 200


PACKED = gzip.compress(record(1), mtime=0)


@pytest.mark.parametrize("body", [b"not gzip", PACKED[:-4], PACKED + b"x", PACKED * 2, zlib.compress(record(1))])
def test_a_body_that_is_badly_packed_is_400(client: httpx.Client, topic: str, body: bytes) -> None:
    headers = {"content-type": JSON, "content-encoding": "gzip"}
    answer = client.post(f"/v0/topics/{topic}", content=body, headers=headers)
    assert error_of(answer) == (400, "invalid_request")
    assert "gzip" in answer.json()["error"]["message"]


def test_a_zip_bomb_is_413(tight: LocalServer) -> None:
    bomb = gzip.compress(b" " * (50 * MAX_BODY))
    assert len(bomb) < MAX_BODY
    with tight.client() as client:
        headers = {"content-type": JSON, "content-encoding": "gzip"}
        for path in ("/v0/topics/a", "/v0/topics/a/diff", "/v0/topics/a/delete"):
            answer = client.post(path, content=bomb, headers=headers)
            assert error_of(answer) == (413, "payload_too_large")


def test_a_large_answer_is_packed_when_asked(wire: Wire, client: httpx.Client, topic: str) -> None:
    write(client, topic, *["x" * 100] * 100)
    reply = wire.ask(request("POST", f"/v0/topics/{topic}/diff", b"{}", "accept-encoding: gzip, br"))
    assert reply.headers["content-encoding"] == "gzip"
    assert "accept-encoding" in reply.headers["vary"].lower()
    assert len(json.loads(gzip.decompress(reply.body))["records"]) == 100
    assert len(reply.body) < 5000


@pytest.mark.parametrize(
    "accepts", [None, "accept-encoding: identity", "accept-encoding: gzip;q=0", "accept-encoding: br, gzip; q=0.0"]
)
def test_an_answer_is_not_packed_unasked(wire: Wire, client: httpx.Client, topic: str, accepts: str | None) -> None:
    write(client, topic, *["x" * 100] * 100)
    reply = wire.ask(request("POST", f"/v0/topics/{topic}/diff", b"{}", *([accepts] if accepts else [])))
    assert "content-encoding" not in reply.headers
    assert len(reply.json()["records"]) == 100


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_body_too_large_is_refused_before_it_is_sent(tight_wire: Wire) -> None:
    head = request("POST", "/v0/topics/a", None, f"content-length: {MAX_BODY + 1}", "content-type: application/json")
    reply = refused(tight_wire, head, 413, "payload_too_large")
    assert "TOPICS_MAX_BODY_BYTES" in reply.json()["error"]["message"]


@pytest.mark.parametrize("length", ["9" * 18, "9" * 19, "9" * 30, "9" * 2000])
def test_a_length_beyond_all_numbers_is_refused(tight_wire: Wire, length: str) -> None:
    tight_wire.send(request("POST", "/v0/topics/a", None, f"content-length: {length}"))
    assert tight_wire.read().status in (400, 413)
    assert tight_wire.is_ended


def test_a_body_that_was_sent_anyway_does_not_hide_the_answer(tight_wire: Wire) -> None:
    refused(tight_wire, request("POST", "/v0/topics/a", b" " * (MAX_BODY * 20)), 413, "payload_too_large")


def test_a_chunked_body_is_cut_at_the_limit(tight_wire: Wire) -> None:
    head = request("POST", "/v0/topics/a", None, "transfer-encoding: chunked", "content-type: application/json")
    body = chunked(*[b" " * 10_000] * 20)
    refused(tight_wire, head + body, 413, "payload_too_large")


def test_a_body_of_just_the_limit_is_taken(tight_wire: Wire) -> None:
    body = record(1)
    padded = body + b" " * (MAX_BODY - len(body))
    assert tight_wire.ask(request("POST", "/v0/topics/limit", padded)).status == 201


def test_headers_beyond_the_limit_are_refused(tight_wire: Wire) -> None:
    reply = refused(tight_wire, request("GET", "/v0/health", None, "x-long: " + "x" * MAX_HEAD))
    assert str(MAX_HEAD) in reply.json()["error"]["message"]


def test_a_url_beyond_the_limit_is_refused(tight_wire: Wire) -> None:
    refused(tight_wire, request("GET", "/v0/topics?prefix=" + "x" * MAX_HEAD))


def test_headers_without_end_are_refused_when_the_limit_is_reached(tight_wire: Wire) -> None:
    tight_wire.send_what_fits(b"GET /v0/health HTTP/1.1\r\nhost: a\r\nx: " + b"x" * (2 * MAX_HEAD))
    assert tight_wire.read().code == "invalid_request"
    assert tight_wire.is_ended


def test_too_many_headers_are_refused(wire: Wire) -> None:
    refused(wire, request("GET", "/v0/health", None, *[f"x-{number}: 1" for number in range(200)]))


def test_a_pipelined_request_has_the_same_limits(tight_wire: Wire) -> None:
    tight_wire.send_what_fits(HEALTH + request("GET", "/v0/health", None, "x-long: " + "x" * MAX_HEAD))
    assert tight_wire.read().status == 200
    assert tight_wire.read().code == "invalid_request"
    assert tight_wire.is_ended


def test_trailers_have_a_limit(tight_wire: Wire) -> None:
    head = request("POST", "/v0/topics/a", None, "transfer-encoding: chunked", "content-type: application/json")
    body = record(1)
    tight_wire.send_what_fits(head + b"%x\r\n%b\r\n0\r\n" % (len(body), body))
    tight_wire.send_what_fits(b"x: y\r\n" * MAX_HEAD + b"\r\n")
    assert tight_wire.read().code == "invalid_request"


# -- timeouts --------------------------------------------------------------------------------------------------------


def test_an_idle_connection_is_closed(tight_wire: Wire) -> None:
    assert tight_wire.ask(HEALTH).status == 200
    assert tight_wire.is_ended


def test_a_connection_that_says_nothing_is_closed(tight_wire: Wire) -> None:
    assert tight_wire.is_ended


def test_headers_that_do_not_come_end_the_connection(tight_wire: Wire) -> None:
    tight_wire.send(b"GET /v0/health HTTP/1.1\r\nhost: a\r\n")
    assert tight_wire.read().code == "invalid_request"
    assert tight_wire.is_ended


def test_a_body_that_does_not_come_ends_the_connection(tight_wire: Wire) -> None:
    tight_wire.send(request("POST", "/v0/topics/a", record(1))[:-5])
    reply = tight_wire.read()
    assert reply.code == "invalid_request"
    assert "too long" in reply.json()["error"]["message"]
    assert tight_wire.is_ended


def test_a_read_that_waits_is_no_idle_connection(tight: LocalServer, tight_wire: Wire) -> None:
    with tight.client() as client:
        client.put("/v0/topics/patient")
        tight_wire.send(request("POST", "/v0/topics/patient/diff", b'{"wait_ms":2500}'))
        assert tight_wire.read().json()["records"] == []


def test_a_client_that_does_not_read_is_let_go(tight: LocalServer) -> None:
    with tight.client() as client:
        for _ in range(20):
            client.post(
                "/v0/topics/wide",
                content=b'{"records":[{"data":"' + b"x" * 90_000 + b'"}]}',
                headers={"content-type": JSON},
            )
    tight.wait_until(lambda: not tight.app.connections, "no connection")
    with Wire(tight.port) as wire:
        wire.send(request("POST", "/v0/topics/wide/diff", b'{"max_bytes":8000000}') * 8)
        tight.wait_until(lambda: len(tight.app.connections) == 1, "a connection")
        tight.wait_until(lambda: not tight.app.connections, "the end of a connection that nobody reads")


# -- what two servers could read differently -------------------------------------------------------------------------


def raw(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([*lines, b"", b""]) + body


POST = b"POST /v0/topics/smuggled HTTP/1.1"
GET = b"GET /v0/health HTTP/1.1"
HOST = b"host: test"
TYPE = b"content-type: application/json"
CHUNKED = b"transfer-encoding: chunked"


@pytest.mark.parametrize(
    "data",
    [
        raw(POST, HOST, TYPE, b"content-length: 5", CHUNKED, body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, CHUNKED, b"content-length: 5", body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, b"content-length: 2", b"content-length: 2", body=b"{}"),
        raw(POST, HOST, TYPE, b"content-length: 2", b"content-length: 3", body=b"{} "),
        raw(POST, HOST, TYPE, b"content-length: 2, 2", body=b"{}"),
        raw(POST, HOST, TYPE, b"content-length: +2", body=b"{}"),
        raw(POST, HOST, TYPE, b"content-length: -2", body=b"{}"),
        raw(POST, HOST, TYPE, b"content-length: 0x2", body=b"{}"),
        raw(POST, HOST, TYPE, b"content-length: 2a", body=b"{}"),
        raw(POST, HOST, TYPE, b"content-length:", body=b"{}"),
        raw(POST, HOST, TYPE, b"transfer-encoding: xchunked", body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, b"transfer-encoding: chunked, identity", body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, b"transfer-encoding: identity", b"transfer-encoding: chunked", body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, b"transfer-encoding:\x0bchunked", body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, b"transfer-encoding : chunked", body=b"0\r\n\r\n"),
        raw(POST, HOST, TYPE, CHUNKED, body=b"g\r\n{}\r\n0\r\n\r\n"),
        raw(POST, HOST, TYPE, CHUNKED, body=b"-1\r\n{}\r\n0\r\n\r\n"),
        raw(POST, HOST, TYPE, CHUNKED, body=b"2\r\n{}x\r\n0\r\n\r\n"),
        raw(POST, HOST, TYPE, CHUNKED, body=b"2\n{}\n0\n\n"),
        raw(POST, HOST, TYPE, CHUNKED, body=b"2;\nx\r\n{}\r\n0\r\n\r\n"),
        raw(POST, HOST, TYPE, CHUNKED, body=b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
        b"GET /v0/health HTTP/1.1\nhost: test\n\n",
        b"GET /v0/health HTTP/1.1\r\nhost: test\nx: y\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nhost: test\rx: y\r\n\r\n",
        raw(GET, HOST, b"x: a", b" folded"),
        raw(GET, HOST, b"x: a", b"\tfolded"),
        raw(GET, b" host: test"),
        raw(GET, b"host : test"),
        raw(GET, HOST, b"x y: z"),
        raw(GET, HOST, b"nocolon"),
        raw(GET, HOST, b": novalue"),
        raw(GET, HOST, b"x: a\0b"),
        raw(GET, HOST, b"x\xff: a"),
        raw(GET),
        raw(GET, HOST, HOST),
        raw(GET, HOST, b"Host: other"),
        raw(b"GET /v0/health HTTP/1.2", HOST),
        raw(b"GET /v0/health HTTP/2.0", HOST),
        raw(b"GET /v0/health HTTP/11", HOST),
        raw(b"GET /v0/health http/1.1", HOST),
        raw(b"GET /v0/ health HTTP/1.1", HOST),
        raw(b"get /v0/health HTTP/1.1", HOST),
        raw(b"BREW /v0/health HTTP/1.1", HOST),
        raw(b"GET v0/health HTTP/1.1", HOST),
        raw(b"GET /v0/\x01 HTTP/1.1", HOST),
        raw(b"/v0/health"),
        raw(b"GET /v0/health"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        b"\0" * 100 + b"\r\n\r\n",
    ],
)
def test_what_is_not_exactly_one_request_is_refused(server: LocalServer, client: httpx.Client, data: bytes) -> None:
    with Wire(server.port) as wire:
        wire.send(data + HEALTH)
        reply = wire.read()
        assert (reply.status, reply.code) == (400, "invalid_request")
        assert wire.is_ended
    assert client.get("/v0/topics/smuggled").status_code == 404


def test_a_duplicate_authorization_is_refused(wire: Wire) -> None:
    refused(wire, request("GET", "/v0/topics", None, "authorization: Bearer a", "authorization: Bearer b"))


def test_a_smuggled_request_is_never_served(server: LocalServer, client: httpx.Client, topic: str) -> None:
    inner = request("PUT", f"/v0/topics/{topic}")
    body = b"0\r\n\r\n" + inner
    with Wire(server.port) as wire:
        wire.send(raw(POST, HOST, TYPE, b"content-length: %d" % len(body), CHUNKED, body=body))
        assert wire.read().status == 400
        assert wire.is_ended
    assert client.get(f"/v0/topics/{topic}").status_code == 404
