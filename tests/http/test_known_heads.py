"""A head that came before is recognised by its bytes: everything must be as if it had been parsed again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import httpx
import pytest

from tests.http.server import LocalServer, datas, local_server
from tests.http.wire import Wire, chunked, record, request
from topics.http.head import Heads


@pytest.fixture
def wire(server: LocalServer) -> Iterator[Wire]:
    with Wire(server.port) as opened:
        yield opened


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    keys = "hushhush-one,hushhush-reader:read,hushhush-a::a"
    with local_server(tmp_path_factory.mktemp("guarded"), api_keys=keys) as running:
        yield running


def known(server: LocalServer) -> int:
    return server.call(lambda: len(server.app.heads))


def test_each_request_gets_its_own_body(wire: Wire, client: httpx.Client, topic: str) -> None:
    for number in range(10, 30):
        assert wire.ask(request("POST", f"/v0/topics/{topic}", record(number))).status in (200, 201)
    assert datas(client, topic) == list(range(10, 30))


def test_many_in_one_piece_are_answered_in_order(wire: Wire, client: httpx.Client, topic: str) -> None:
    one = [request("POST", f"/v0/topics/{topic}", record(number)) for number in range(100, 150)]
    assert wire.ask(one[0]).status == 201
    wire.send(b"".join(one))
    seqs = [wire.read().json()["first_seq"] for _ in one]
    assert seqs == list(range(2, 52))
    assert datas(client, topic) == [100, *range(100, 150)]


def test_a_known_head_may_arrive_cut_at_any_byte(wire: Wire, client: httpx.Client, topic: str) -> None:
    whole = request("POST", f"/v0/topics/{topic}", record(1))
    assert wire.ask(whole).status == 201
    for cut in range(1, len(whole)):
        wire.send(whole[:cut])
        assert wire.ask(whole[cut:]).status == 200
    assert client.get(f"/v0/topics/{topic}").json()["count"] == len(whole)


def test_a_known_one_and_half_of_the_next(wire: Wire, topic: str) -> None:
    whole = request("POST", f"/v0/topics/{topic}", record(1))
    assert wire.ask(whole).status == 201
    wire.send(whole + whole[:50])
    assert wire.read().json()["first_seq"] == 2
    assert wire.ask(whole[50:]).json()["first_seq"] == 3


def test_known_and_new_ones_mixed_in_one_piece(wire: Wire, topic: str) -> None:
    write = request("POST", f"/v0/topics/{topic}", record(1))
    assert wire.ask(write).status == 201
    odd = request("GET", f"/v0/topics/{topic}", None, "x-new: 1")
    wire.send(write + odd + write + odd)
    replies = [wire.read().json() for _ in range(4)]
    assert [reply.get("first_seq", reply["head_seq"]) for reply in replies] == [2, 2, 3, 3]


def test_a_refused_body_is_refused_with_a_known_head(wire: Wire, topic: str) -> None:
    good, bad = record(1), record(1).replace(b"data", b"date")
    for _ in range(2):
        assert wire.ask(request("POST", f"/v0/topics/{topic}", good)).status in (200, 201)
        assert wire.ask(request("POST", f"/v0/topics/{topic}", bad)).status == 400


def test_it_is_the_topic_of_the_moment_that_counts(wire: Wire, client: httpx.Client, topic: str) -> None:
    whole = request("POST", f"/v0/topics/{topic}/diff", b"{}")
    assert wire.ask(whole).status == 404
    client.put(f"/v0/topics/{topic}", json={})
    assert wire.ask(whole).status == 200
    client.delete(f"/v0/topics/{topic}")
    assert wire.ask(whole).status == 404


def test_head_has_no_body_when_its_head_is_known(wire: Wire) -> None:
    for _ in range(3):
        assert wire.ask(request("HEAD", "/v0/health"), "HEAD").status == 200
        assert wire.ask(request("GET", "/v0/health")).json()["status"] == "ok"


def test_blank_lines_before_a_request_are_not_taken_for_a_head(wire: Wire, server: LocalServer, topic: str) -> None:
    write = request("POST", f"/v0/topics/{topic}", record(1))
    before = known(server)
    assert wire.ask(b"\r\n\r\n" + write).status == 201
    assert known(server) == before
    assert wire.ask(b"\r\n\r\n" + write).json()["first_seq"] == 2
    assert wire.ask(b"\r\n\r\n" + request("GET", "/v0/health")).json()["status"] == "ok"


@pytest.mark.parametrize(
    "head",
    [
        "transfer-encoding: chunked",
        "expect: 100-continue",
        "connection: close",
        "connection: upgrade\r\nupgrade: h2c",
    ],
)
def test_what_needs_the_parser_is_not_remembered(server: LocalServer, topic: str, head: str) -> None:
    before = known(server)
    body = chunked(record(1)) if head.startswith("transfer") else record(1)
    length = "x-length" if head.startswith("transfer") else "content-length"
    lines = f"POST /v0/topics/{topic} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}\r\n"
    whole = f"{lines}{length}: {len(body)}\r\n\r\n".encode() + body
    for seq in (1, 2):
        with Wire(server.port) as wire:
            reply = wire.ask(whole)
            reply = wire.read() if reply.status == 100 else reply
            assert reply.json().get("first_seq") == seq, reply
    assert known(server) == before


def test_a_large_head_is_not_remembered(wire: Wire, server: LocalServer) -> None:
    before = known(server)
    for _ in range(2):
        assert wire.ask(request("GET", "/v0/health", None, f"x-large: {'x' * 1024}")).status == 200
    assert known(server) == before


def test_what_is_remembered_is_bounded(wire: Wire, server: LocalServer) -> None:
    for number in range(1100):
        assert wire.ask(request("GET", "/v0/health", None, f"x-number: {number}")).status == 200
    assert 0 < known(server) <= 1024


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_is_checked_whoever_sent_the_head_before(guarded: LocalServer) -> None:
    with Wire(guarded.port) as wire:
        for _ in range(3):
            assert wire.ask(request("GET", "/v0/topics", None, "authorization: Bearer hushhush-one")).status == 200
            assert wire.ask(request("GET", "/v0/topics", None, "authorization: Bearer hushhush-two")).status == 401
            assert wire.ask(request("GET", "/v0/topics")).status == 401


def test_scopes_and_prefixes_hold_for_known_heads(guarded: LocalServer) -> None:
    with Wire(guarded.port) as wire:

        def write(key: str, topic: str) -> int:
            bearer = f"authorization: Bearer hushhush-{key}"
            return wire.ask(request("POST", f"/v0/topics/{topic}", record(1), bearer)).status

        assert write("one", "b1") == 201
        for _ in range(3):
            assert write("one", "b1") == 200
            assert write("reader", "b1") == 403
            assert write("a", "b1") == 403
            assert write("a", "a1") in (200, 201)


def test_no_key_stays_in_memory(guarded: LocalServer) -> None:
    def secrets(found: Heads) -> list[object]:
        return [each for each in gc.get_referents(*gc.get_referents(found)) if b"hushhush" in repr(each).encode()]

    with Wire(guarded.port) as wire:
        for _ in range(2):
            assert wire.ask(request("GET", "/v0/topics", None, "authorization: Bearer hushhush-one")).status == 200
        assert known(guarded) > 0
        assert guarded.call(lambda: secrets(guarded.app.heads)) == []
        heads = guarded.call(lambda: [head.headers for head in guarded.app.heads])
    assert all("hushhush" not in repr(headers) for headers in heads)
