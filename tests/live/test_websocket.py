"""Section 8, `/v0/ws`: subscribe, unsubscribe, publish and ping over one WebSocket, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server import LocalServer, child, datas, diff, local_server, write, write_raw
from tests.http.wire import Wire, record, request
from tests.live.conftest import Connect, Watch, create
from tests.live.sse import Events
from tests.live.ws import ACCEPTED, BINARY, CLOSE, CONT, PING, PONG, TEXT, UPGRADE, Piece, Socket, encode
from topics.core.limits import Limits
from topics.http.following import Renderings
from topics.http.ws_protocol import WsProtocol


def put(client: httpx.Client, topic: str, **config: Any) -> int:
    """Creates a topic; returns its epoch."""
    assert client.put(f"/v0/topics/{topic}", json=config).status_code in (200, 201)
    epoch: int = client.get(f"/v0/topics/{topic}").json()["epoch"]
    return epoch


def subscribe(socket: Socket, topic: str, **fields: Any) -> dict[str, Any]:
    return socket.ask("subscribed", type="subscribe", request_id="s", topics={topic: {}}, **fields)


def publish(topic: str, *values: object, **fields: Any) -> dict[str, Any]:
    return {"type": "publish", "topic": topic, "records": [{"data": value} for value in values], **fields}


def seqs(message: dict[str, Any]) -> list[int]:
    return [each["$seq"] for each in message["records"]]


def told(messages: list[dict[str, Any]]) -> list[int | tuple[int, int, str]]:
    found: list[int | tuple[int, int, str]] = []
    for message in messages:
        if message["type"] == "record":
            found += seqs(message)
        elif message["type"] == "tombstone":
            found.append((message["gap_from"], message["gap_to"], message["reason"]))
    return found


# -- the handshake ---------------------------------------------------------------------------------------------------


def test_a_handshake_is_answered_with_101_and_the_proof(connect: Connect) -> None:
    socket = connect()
    assert socket.status == 101
    assert socket.headers["upgrade"].lower() == "websocket"
    assert socket.headers["sec-websocket-accept"] == ACCEPTED
    assert "sec-websocket-extensions" not in socket.headers


def test_a_message_that_comes_with_the_handshake_is_not_lost(connect: Connect) -> None:
    socket = connect(tail=encode(TEXT, b'{"type":"ping","request_id":1}'))
    assert socket.message("pong")["request_id"] == 1


def test_without_an_upgrade_it_is_400(client: httpx.Client) -> None:
    answer = client.get("/v0/ws")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"


def test_over_http_2_it_is_400(server: LocalServer) -> None:
    with server.client(http1=False, http2=True) as over:
        assert over.get("/v0/ws").status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        [UPGRADE[0], UPGRADE[1], UPGRADE[2]],
        [UPGRADE[0], UPGRADE[1], UPGRADE[3]],
        [UPGRADE[0], UPGRADE[1], "sec-websocket-version: 8", UPGRADE[3]],
        [UPGRADE[0], UPGRADE[1], UPGRADE[2], "sec-websocket-key: short"],
        [UPGRADE[0], UPGRADE[1], UPGRADE[2], "sec-websocket-key: \u00e9"],
    ],
)
def test_a_handshake_that_is_none_is_400(server: LocalServer, opened: ExitStack, headers: list[str]) -> None:
    wire = opened.enter_context(Wire(server.port))
    reply = wire.ask(request("GET", "/v0/ws", None, *headers))
    assert (reply.status, reply.code) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:4000", "http://127.0.0.1:4000", 101),
        ("localhost:4000", "https://localhost:4000", 101),
        ("[::1]:4000", "http://[::1]:4000", 101),
        ("localhost:4000", "http://evil.example", 403),
        ("localhost:4000", "http://localhost.evil.example:4000", 403),
        ("localhost:4000", "http://localhost:81", 403),
        ("localhost:4000", "null", 403),
        # A name of theirs that resolves to this machine.
        ("evil.example:4000", "http://evil.example:4000", 403),
    ],
)
def test_without_keys_only_our_own_pages_may_connect(
    server: LocalServer, opened: ExitStack, host: str, origin: str, status: int
) -> None:
    wire = opened.enter_context(Wire(server.port))
    wire.send(request("GET", "/v0/ws", None, *UPGRADE, f"origin: {origin}", host=host))
    assert wire.read_head()[0] == status


def test_an_upgrade_to_a_websocket_elsewhere_is_a_request_like_any_other(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    """Its body is its body, and not the next request."""
    put(client, topic)
    wire = opened.enter_context(Wire(server.port))
    hidden = request("DELETE", f"/v0/topics/{topic}")
    reply = wire.ask(request("POST", f"/v0/topics/{topic}", hidden, *UPGRADE))
    assert (reply.status, reply.code) == (400, "invalid_request")
    reply = wire.ask(request("POST", f"/v0/topics/{topic}", record(1), *UPGRADE))
    assert reply.json()["seqs"] == [1]
    assert client.get(f"/v0/topics/{topic}").status_code == 200


def test_a_request_that_is_refused_is_not_made_for_its_upgrade(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    put(client, topic)
    wire = opened.enter_context(Wire(server.port))
    reply = wire.ask(request("DELETE", f"/v0/topics/{topic}", None, *UPGRADE, host=None))
    assert reply.status == 400
    assert wire.is_ended
    assert client.get(f"/v0/topics/{topic}").status_code == 200


def test_a_handshake_behind_another_request_is_refused_or_made_but_never_lost(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    wire = opened.enter_context(Wire(server.port))
    wire.send(request("GET", "/v0/health") + request("GET", "/v0/ws", None, *UPGRADE))
    assert wire.read().status == 200
    assert wire.read_head()[0] in (101, 400)


# -- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["a", "", "é\n", 0, 7, -1, 2**53, "x" * 10_000])
def test_an_answer_carries_the_id_of_its_request(connect: Connect, request_id: str | int) -> None:
    socket = connect()
    socket.send(type="ping", request_id=request_id)
    answer = socket.message("pong")
    assert answer["request_id"] == request_id
    assert answer["ts"] > 0


def test_a_command_without_an_id_is_answered_without_one(connect: Connect) -> None:
    socket = connect()
    socket.send(type="ping")
    assert "request_id" not in socket.message("pong")


def test_a_subscription_says_where_it_begins(client: httpx.Client, topic: str, connect: Connect) -> None:
    epoch = put(client, topic, cap_records=3)
    write(client, topic, 1, 2, 3, 4, 5)
    socket = connect()
    socket.send(type="subscribe", request_id=1, topics={topic: {"from_seq": 4}})
    assert socket.message() == {
        "type": "subscribed",
        "request_id": 1,
        "topics": {topic: {"from_seq": 4, "head_seq": 5, "earliest_seq": 3, "epoch": epoch}},
    }


def test_a_record_message_has_what_a_record_frame_has_and_its_epoch(
    client: httpx.Client, topic: str, connect: Connect
) -> None:
    epoch = put(client, topic)
    write(client, topic, {"a": 1}, None)
    socket = connect()
    subscribe(socket, topic)
    assert socket.message() == {
        "type": "record",
        "topic": topic,
        "epoch": epoch,
        "records": diff(client, topic)["records"],
        "from_seq": 0,
        "to_seq": 2,
        "head_seq": 2,
    }
    assert socket.message() == {"type": "caught_up", "topic": topic, "head_seq": 2}


def test_a_tombstone_message_has_the_fields_of_a_tombstone(client: httpx.Client, topic: str, connect: Connect) -> None:
    epoch = put(client, topic)
    client.post(f"/v0/topics/{topic}", json={"records": [{"hole": 3, "reason": "source_trim"}]})
    socket = connect()
    subscribe(socket, topic)
    assert socket.message() == {
        "type": "tombstone",
        "topic": topic,
        "epoch": epoch,
        "gap_from": 1,
        "gap_to": 3,
        "reason": "source_trim",
        "missed_estimate": 3,
        "earliest_seq": 4,
        "head_seq": 3,
    }


def test_a_loss_found_when_subscribing_is_named_so(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic, cap_records=1)
    write(client, topic, 1, 2, 3)
    socket = connect()
    subscribe(socket, topic)
    assert told(socket.until("caught_up")) == [(1, 2, "from_seq_too_old"), 3]


def test_a_topic_deleted_and_recreated_is_told_of(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic)
    write(client, topic, 1)
    socket = connect()
    subscribe(socket, topic)
    socket.until("caught_up")
    client.delete(f"/v0/topics/{topic}")
    assert socket.message() == {"type": "topic_deleted", "topic": topic, "head_seq": 1, "reason": "deleted"}
    epoch = put(client, topic)
    again = socket.message("tombstone")
    assert (again["reason"], again["epoch"]) == ("recreated", epoch)


def test_data_comes_byte_for_byte_with_its_line_breaks(client: httpx.Client, topic: str, connect: Connect) -> None:
    data = b'{"b": 1.0,\r\n"a":1e400,\r"a":"\\u00e9 \xc3\xa9"\n}'
    put(client, topic)
    write_raw(client, topic, data)
    socket = connect()
    socket.send(type="subscribe", topics={topic: {}})
    socket.message("subscribed")
    assert b'"data":' + data + b"}]" in socket.text()


def test_a_subscription_has_the_wishes_of_a_watch(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic)
    body = {"records": [{"data": 1, "node": "n", "tag": "x"}, {"data": 2, "tag": "y"}, {"data": 3}]}
    client.post(f"/v0/topics/{topic}", json=body)
    socket = connect()
    subscribe(socket, topic, node="n", limit=1, include_tags=True, include_data=False)
    first, second = socket.message("record"), socket.message("record")
    assert [seqs(first), seqs(second)] == [[2], [3]]
    assert first["records"][0]["$tag"] == "y"
    assert "data" not in first["records"][0]


def test_one_connection_may_subscribe_to_many_topics_one_by_one(
    client: httpx.Client, topic: str, connect: Connect
) -> None:
    socket = connect()
    for number in range(3):
        put(client, f"{topic}-{number}")
        subscribe(socket, f"{topic}-{number}")
        socket.message("caught_up")
    for number in range(3):
        write(client, f"{topic}-{number}", 1)
        assert socket.message("record")["topic"] == f"{topic}-{number}"


def test_subscribing_again_starts_anew_from_where_one_says(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic)
    write(client, topic, 1, 2, 3)
    socket = connect()
    subscribe(socket, topic)
    socket.until("caught_up")
    socket.send(type="subscribe", topics={topic: {"from_seq": 1}})
    socket.message("subscribed")
    assert told(socket.until("caught_up")) == [2, 3]
    write(client, topic, 4)
    assert seqs(socket.message("record")) == [4]
    assert socket.ask("pong", type="ping", request_id=1)


def test_behind_unsubscribed_nothing_more_comes(client: httpx.Client, topic: str, connect: Connect) -> None:
    kept = f"{topic}-kept"
    put(client, topic)
    put(client, kept)
    socket = connect()
    socket.ask("subscribed", type="subscribe", request_id=1, topics={topic: {}, kept: {}})
    socket.message("caught_up")
    socket.message("caught_up")
    answer = socket.ask("unsubscribed", type="unsubscribe", request_id=2, topics=[topic, "never"])
    assert answer["topics"] == [topic]
    write(client, topic, 1)
    write(client, kept, 1)
    assert socket.message("record")["topic"] == kept


def test_a_subscription_is_all_or_nothing(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic)
    socket = connect()
    socket.send(type="subscribe", request_id=1, topics={topic: {}, f"{topic}-none": {}})
    assert socket.message("error")["code"] == "topic_not_found"
    write(client, topic, 1)
    assert socket.ask("pong", type="ping", request_id=2)


def test_lenient_leaves_out_what_is_not_there(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic)
    socket = connect()
    answer = socket.ask(
        "subscribed", type="subscribe", request_id=1, lenient=True, topics={topic: {}, f"{topic}-none": {}}
    )
    assert list(answer["topics"]) == [topic]


def test_a_publish_is_acked_like_a_write(client: httpx.Client, topic: str, connect: Connect) -> None:
    socket = connect()
    socket.send(**publish(topic, 1, 2, request_id="p"))
    assert socket.message() == {
        "type": "ack",
        "request_id": "p",
        "topic": topic,
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
    }
    assert datas(client, topic) == [1, 2]


def test_a_publish_keeps_its_data_byte_for_byte(client: httpx.Client, topic: str, connect: Connect) -> None:
    data = b'{"b": 1.0,\r\n"a":1e400 }'
    socket = connect()
    socket.send_bytes(encode(TEXT, b'{"type":"publish","topic":"%b","records":[{"data":%b}]}' % (topic.encode(), data)))
    socket.message("ack")
    assert b'"data":' + data + b"}]" in client.post(f"/v0/topics/{topic}/diff").content


def test_a_publish_takes_the_options_of_a_write(client: httpx.Client, topic: str, connect: Connect) -> None:
    socket = connect()
    assert socket.ask("error", **publish(topic, 1, create=False, request_id=1))["code"] == "topic_not_found"
    socket.ask("ack", **publish(topic, 1, config={"cap_records": 9}, idempotency_key="k", request_id=2))
    again = socket.ask("ack", **publish(topic, 1, idempotency_key="k", request_id=3))
    assert (again["seqs"], again["deduped"]) == ([1], True)
    assert client.get(f"/v0/topics/{topic}").json()["config"]["cap_records"] == 9


def test_a_publisher_sees_its_own_records(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic)
    socket = connect()
    subscribe(socket, topic)
    socket.message("caught_up")
    socket.send(**publish(topic, "mine", request_id=1))
    messages = {message["type"]: message for message in (socket.message(), socket.message())}
    assert set(messages) == {"ack", "record"}
    assert messages["record"]["records"][0]["data"] == "mine"


def test_many_publishes_in_flight_are_all_answered_in_order(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic, durability="fsync")
    socket = connect()
    whole = [encode(TEXT, json.dumps(publish(topic, number, request_id=number)).encode()) for number in range(300)]
    socket.send_bytes(b"".join(whole))
    acks = [socket.message("ack") for _ in whole]
    assert [ack["request_id"] for ack in acks] == list(range(300))
    assert [ack["seqs"] for ack in acks] == [[number + 1] for number in range(300)]
    assert socket.ask("pong", type="ping", request_id=1)


def test_publishes_and_writes_of_one_moment_keep_their_order(
    server: LocalServer, client: httpx.Client, topic: str, connect: Connect
) -> None:
    put(client, topic)
    socket = connect()
    subscribe(socket, topic)
    socket.message("caught_up")
    for number in range(5):
        socket.send(**publish(topic, number))
    for _ in range(5):
        socket.until("ack")
    assert datas(client, topic) == [0, 1, 2, 3, 4]


def test_a_publish_that_may_wait_out_pressure_does(
    server: LocalServer, topic: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.app.pressure, "measure", lambda *_: None)
    socket = connect()
    server.call(lambda: setattr(server.app.pressure, "level", 3))
    try:
        assert socket.ask("error", **publish(topic, 1, request_id=1))["code"] == "throttled"
        socket.send(**publish(topic, 2, disable_backpressure=True, request_id=2))
        assert socket.ask("pong", type="ping", request_id=3)
    finally:
        server.call(lambda: setattr(server.app.pressure, "level", 0))
    answer = socket.message()
    assert (answer["type"], answer["request_id"]) == ("ack", 2)


@pytest.mark.parametrize(
    ("text", "code", "request_id"),
    [
        (b"", "invalid_request", None),
        (b"{", "invalid_request", None),
        (b"[]", "invalid_request", None),
        (b"null", "invalid_request", None),
        (b'{"request_id":1}', "invalid_request", 1),
        (b'{"type":1,"request_id":1}', "invalid_request", 1),
        (b'{"type":"shout","request_id":1}', "invalid_request", 1),
        (b'{"type":"subscribe","request_id":1}', "invalid_request", 1),
        (b'{"type":"subscribe","request_id":1,"topics":{}}', "invalid_request", 1),
        (b'{"type":"subscribe","request_id":1,"topics":[]}', "invalid_request", 1),
        (b'{"type":"subscribe","request_id":1,"topics":{"a/b":{}}}', "invalid_request", 1),
        (b'{"type":"unsubscribe","request_id":1}', "invalid_request", 1),
        (b'{"type":"publish","request_id":1,"records":[{"data":1}]}', "invalid_request", 1),
        (b'{"type":"publish","request_id":1,"topic":5,"records":[{"data":1}]}', "invalid_request", 1),
        (b'{"type":"publish","request_id":1,"topic":"t"}', "invalid_request", 1),
        (b'{"type":"publish","request_id":1,"topic":"a/b","records":[{"data":1}]}', "invalid_request", 1),
        (b'{"type":"publish","request_id":1,"topic":"t","records":[{"tag":"x"}]}', "invalid_request", 1),
        (b'{"type":"publish","request_id":1,"topic":"t","records":[]}', "invalid_request", 1),
        (b'{"type":"ping","x":' + b"[" * 5000 + b"]" * 5000 + b"}", "invalid_request", None),
    ],
)
def test_a_bad_command_is_refused_and_the_connection_lives(
    connect: Connect, text: bytes, code: str, request_id: int | None
) -> None:
    socket = connect()
    socket.send_bytes(encode(TEXT, text))
    error = socket.message("error")
    assert (error["code"], error.get("request_id")) == (code, request_id)
    assert error["message"]
    assert socket.ask("pong", type="ping", request_id=2)


def test_one_rendering_serves_sockets_and_streams(
    client: httpx.Client, topic: str, connect: Connect, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, topic)
    sockets = [connect() for _ in range(5)]
    for socket in sockets:
        subscribe(socket, topic)
        socket.message("caught_up")
    streams = [watch(topic) for _ in range(5)]
    for events in streams:
        events.event("caught-up")
    rendered: list[object] = []
    render = Renderings._render

    def counted(self: Renderings, *args: Any) -> Any:
        rendered.append(args)
        return render(self, *args)

    monkeypatch.setattr(Renderings, "_render", counted)
    write(client, topic, 1)
    assert [seqs(socket.message("record")) for socket in sockets] == [[1]] * 5
    assert [events.event("record").seqs for events in streams] == [[1]] * 5
    assert len(rendered) == 1


# -- resuming --------------------------------------------------------------------------------------------------------


def test_a_client_resumes_by_seq_and_epoch_without_a_gap_or_a_repeat(
    client: httpx.Client, topic: str, connect: Connect
) -> None:
    put(client, topic)
    write(client, topic, *range(10))
    socket = connect()
    subscribe(socket, topic, limit=3)
    last = [socket.message("record"), socket.message("record")][-1]
    socket.reset()
    write(client, topic, 10)
    again = connect()
    again.send(type="subscribe", topics={topic: {"from_seq": last["to_seq"], "epoch": last["epoch"]}})
    again.message("subscribed")
    assert told(again.until("caught_up")) == [7, 8, 9, 10, 11]


def test_a_client_that_resumes_in_another_life_is_told(client: httpx.Client, topic: str, connect: Connect) -> None:
    epoch = put(client, topic)
    client.delete(f"/v0/topics/{topic}")
    write(client, topic, 1, 2)
    socket = connect()
    socket.send(type="subscribe", topics={topic: {"from_seq": 1, "epoch": epoch}})
    socket.message("subscribed")
    assert told(socket.until("caught_up")) == [(1, 2, "recreated"), 1, 2]


# -- the wire --------------------------------------------------------------------------------------------------------


def test_a_message_may_be_cut_into_two_fragments_at_every_byte(topic: str, connect: Connect) -> None:
    socket = connect()
    for cut in range(len(b'{"type":"ping","request_id":"\xc3\xa9000"}') + 1):
        text = f'{{"type":"ping","request_id":"é{cut:03}"}}'.encode()
        socket.send_bytes(encode(TEXT, text[:cut], fin=False) + encode(CONT, text[cut:]))
        assert socket.message("pong")["request_id"] == f"é{cut:03}"


def test_a_message_may_come_in_fragments_of_one_byte_with_pings_between(connect: Connect) -> None:
    socket = connect()
    text = b'{"type":"ping","request_id":1}'
    pieces = [encode(TEXT, text[:1], fin=False)]
    for index in range(1, len(text)):
        pieces.append(encode(PING, b"%d" % index))
        pieces.append(encode(CONT, text[index : index + 1], fin=index == len(text) - 1))
    socket.send_bytes(b"".join(pieces))
    seen = [socket.piece() for _ in text]
    assert [piece.payload for piece in seen if piece.opcode == PONG] == [b"%d" % n for n in range(1, len(text))]
    assert [json.loads(piece.payload)["request_id"] for piece in seen if piece.opcode == TEXT] == [1]


def test_a_frame_may_arrive_byte_by_byte(server: LocalServer, connect: Connect) -> None:
    socket = connect()
    for byte in encode(TEXT, b'{"type":"ping","request_id":1}'):
        socket.send_bytes(bytes([byte]))
        server.call(lambda: None)
    assert socket.message("pong")["request_id"] == 1


def test_a_ping_is_answered_with_its_payload(connect: Connect) -> None:
    socket = connect()
    socket.send_bytes(encode(PING, b"are you there"))
    assert socket.piece() == Piece(PONG, b"are you there")


def test_a_pong_that_nobody_asked_for_is_ignored(connect: Connect) -> None:
    socket = connect()
    socket.send_bytes(encode(PONG, b"hello"))
    assert socket.ask("pong", type="ping", request_id=1)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (encode(BINARY, b"{}"), 1003),
        (encode(TEXT, b"{}", masked=False), 1002),
        (encode(TEXT, b"{}", reserved=4), 1002),
        (encode(3, b"{}"), 1002),
        (encode(CONT, b"{}"), 1002),
        (encode(TEXT, b"{", fin=False) + encode(TEXT, b"}"), 1002),
        (encode(PING, b"x" * 126), 1002),
        (encode(PING, b"x", fin=False), 1002),
        (encode(CLOSE, b"\x03"), 1002),
        (encode(CLOSE, b"\x03\xe8"), 1000),
        (encode(CLOSE, b"\x0f\xa0bye"), 4000),
        (encode(TEXT, b'{"type":"ping\xff"}'), 1007),
        (encode(TEXT, b'{"type":"\xc3', fin=False) + encode(CONT, b'"}'), 1007),
    ],
)
def test_what_breaks_the_protocol_closes_with_its_code(connect: Connect, data: bytes, code: int) -> None:
    socket = connect()
    socket.send_bytes(data)
    piece = socket.piece()
    assert piece.opcode == CLOSE, piece
    assert piece.code == code


def test_a_close_without_a_code_is_answered_and_ends(connect: Connect) -> None:
    socket = connect()
    socket.send_bytes(encode(CLOSE, b""))
    assert socket.piece().opcode == CLOSE
    assert socket.piece_or_end() is None


def test_what_comes_behind_a_close_is_not_done(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic)
    socket = connect()
    socket.send_bytes(encode(BINARY, b"{}") + encode(TEXT, json.dumps(publish(topic, 1)).encode()))
    assert socket.closed() == 1003
    assert datas(client, topic) == []


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_message_that_is_too_big_closes_with_1009(tmp_path: Path, fragments: int) -> None:
    with local_server(tmp_path, Limits(max_body_bytes=3000)) as server, Socket(server.port) as socket:
        pad = b'{"type":"ping","pad":"' + b"x" * 3000 + b'"}'
        step = len(pad) // fragments + 1
        parts = [pad[start : start + step] for start in range(0, len(pad), step)]
        for index, part in enumerate(parts):
            socket.send_bytes(encode(CONT if index else TEXT, part, fin=index == len(parts) - 1))
        assert socket.closed() == 1009


def test_a_message_of_just_the_limit_is_taken(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_body_bytes=3000)) as server, Socket(server.port) as socket:
        text = b'{"type":"ping","pad":"' + b"x" * (3000 - 24) + b'"}'
        assert len(text) == 3000
        socket.send_bytes(encode(TEXT, text))
        socket.message("pong")


def test_a_limit_of_0_is_off(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_body_bytes=0)) as server, Socket(server.port) as socket:
        assert socket.ask("pong", type="ping", request_id=1)


def test_a_client_that_says_nothing_is_pinged_and_then_let_go(server: LocalServer, connect: Connect) -> None:
    socket = connect()
    assert socket.ask("pong", type="ping", request_id=1)
    look(server)
    assert socket.piece() == Piece(PING, b"")
    look(server)
    assert socket.piece_or_end() is None


def test_a_client_that_answers_pings_stays(server: LocalServer, connect: Connect) -> None:
    socket = connect()
    for number in range(3):
        look(server)
        assert socket.piece() == Piece(PING, b"")
        socket.send_bytes(encode(PONG, b""))
        assert socket.ask("pong", type="ping", request_id=number)


def look(server: LocalServer) -> None:
    """The server looks after its sockets as it will when their next ping is due."""

    def check() -> None:
        for socket in sockets_of(server):
            socket.check_deadline(socket._pings_at)

    server.call(check)


def sockets_of(server: LocalServer) -> list[WsProtocol]:
    found = [connection._successor for connection in server.app.connections]
    return [each for each in found if isinstance(each, WsProtocol)]


@pytest.mark.parametrize("end", ["close", "reset", "goodbye"])
def test_a_client_that_leaves_gives_its_place_back(
    server: LocalServer, client: httpx.Client, topic: str, connect: Connect, end: str
) -> None:
    put(client, topic)
    before = server.call(lambda: server.app.watches.open_streams)
    socket = connect()
    subscribe(socket, topic)
    socket.message("caught_up")
    assert server.call(lambda: server.app.watches.open_streams) == before + 1
    if end == "close":
        socket.close()
    elif end == "reset":
        socket.reset()
    else:
        socket.send_bytes(encode(CLOSE, b"\x03\xe8"))
    server.wait_until(lambda: server.app.watches.open_streams == before, "the place")
    assert not server.call(lambda: server.app.engine.topic(topic).waiters)


def test_a_publish_of_a_client_that_left_is_still_made(client: httpx.Client, topic: str, connect: Connect) -> None:
    put(client, topic, durability="fsync")
    socket = connect()
    socket.send(**publish(topic, 1))
    socket.close()
    assert diff(client, topic, wait_ms=10_000)["records"][0]["data"] == 1


# -- keys ------------------------------------------------------------------------------------------------------------

KEYS = "all,reader:read,writer:write,narrow:read+write:allowed.,maker:write+admin:allowed."


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("guarded"), api_keys=KEYS) as running:
        with running.client(headers={"authorization": "Bearer all"}) as client:
            for name in ("allowed.a", "other"):
                write(client, name, 1)
        yield running


def keyed(server: LocalServer, key: str) -> Socket:
    return Socket(server.port, "/v0/ws", f"authorization: Bearer {key}")


@pytest.mark.parametrize("headers", [[], ["authorization: Bearer wrong"]])
def test_a_socket_needs_a_key(guarded: LocalServer, headers: list[str]) -> None:
    with Socket(guarded.port, "/v0/ws", *headers) as socket:
        assert socket.status == 401
        assert socket.refusal()["code"] == "unauthorized"


def test_a_browser_sends_its_key_in_the_query_and_any_page_with_a_key_may(guarded: LocalServer) -> None:
    with Socket(guarded.port, "/v0/ws?token=reader", "origin: http://elsewhere.example") as socket:
        assert socket.status == 101
        subscribe(socket, "other")


@pytest.mark.parametrize(
    ("key", "command", "answer"),
    [
        ("reader", {"type": "subscribe", "topics": {"other": {}}}, "subscribed"),
        ("reader", publish("other", 1), "forbidden"),
        ("reader", {"type": "ping"}, "pong"),
        ("writer", {"type": "subscribe", "topics": {"other": {}}}, "forbidden"),
        ("writer", publish("other", 1), "ack"),
        ("writer", publish("new", 1, config={}), "forbidden"),
        ("narrow", {"type": "subscribe", "topics": {"allowed.a": {}}}, "subscribed"),
        ("narrow", {"type": "subscribe", "topics": {"allowed.a": {}, "other": {}}}, "forbidden"),
        ("narrow", {"type": "subscribe", "lenient": True, "topics": {"allowed.a": {}, "other": {}}}, "forbidden"),
        ("narrow", {"type": "subscribe", "topics": {"unknown": {}}}, "forbidden"),
        ("narrow", publish("allowed.a", 1), "ack"),
        ("narrow", publish("other", 1), "forbidden"),
        ("narrow", publish("unknown", 1, create=False), "forbidden"),
        ("maker", publish("allowed.b", 1, config={"type": "queue", "dead_letter": "other"}), "forbidden"),
        ("maker", publish("allowed.c", 1, config={"cap_records": 5}), "ack"),
    ],
)
def test_each_command_is_authorised_on_its_own(
    guarded: LocalServer, key: str, command: dict[str, Any], answer: str
) -> None:
    with keyed(guarded, key) as socket:
        socket.send(request_id=1, **command)
        reply = socket.message()
        assert (reply.get("code") or reply["type"]) == answer, reply
        assert reply["request_id"] == 1


def test_a_refused_command_leaves_the_others_of_its_connection_alone(guarded: LocalServer) -> None:
    with keyed(guarded, "narrow") as socket:
        subscribe(socket, "allowed.a")
        socket.until("caught_up")
        socket.send(**publish("other", 1))
        assert socket.message("error")["code"] == "forbidden"
        socket.send(**publish("allowed.a", "x", request_id=2))
        assert {socket.message()["type"], socket.message()["type"]} == {"ack", "record"}


# -- caps ------------------------------------------------------------------------------------------------------------


def test_sockets_count_as_streams(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_sse_connections=1)) as server, server.client() as client:
        put(client, "t")
        with Socket(server.port) as first:
            assert first.status == 101
            with Socket(server.port) as second:
                assert second.status == 429
                error = second.refusal()
                assert error["detail"] == {"limit": "TOPICS_MAX_SSE_CONNECTIONS", "max": 1}
            url = create(client, {"t": {}})["stream_url"]
            with Events(server.port, url) as events:
                assert events.open().status == 429
        server.wait_until(lambda: server.app.watches.open_streams == 0, "the place")
        with Socket(server.port) as third:
            assert third.status == 101


def test_the_topics_of_one_socket_are_bounded(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_watch_topics=2)) as server, server.client() as client:
        for name in "abc":
            put(client, name)
        with Socket(server.port) as socket:
            subscribe(socket, "a")
            subscribe(socket, "b")
            subscribe(socket, "a")
            error = socket.ask("error", type="subscribe", request_id=1, topics={"c": {}})
            assert "TOPICS_MAX_WATCH_TOPICS" in error["message"]
            socket.ask("unsubscribed", type="unsubscribe", request_id=2, topics=["a"])
            subscribe(socket, "c")


# -- shutdown --------------------------------------------------------------------------------------------------------


def test_sigterm_closes_with_1001(tmp_path: Path) -> None:
    with child(tmp_path) as running:
        running.wait_until_ready()
        with running.client() as client:
            put(client, "t")
        with Socket(running.port) as socket:
            subscribe(socket, "t")
            socket.message("caught_up")
            running.terminate()
            assert socket.closed() == 1001
        assert running.wait_for_end()[0] == 0


def test_a_publish_in_flight_at_shutdown_is_acked(tmp_path: Path) -> None:
    server = LocalServer(tmp_path).start()
    try:
        with server.client() as client:
            put(client, "t", durability="fsync")
        with Socket(server.port) as socket:
            socket.ask("pong", type="ping", request_id=0)
            frame = encode(TEXT, json.dumps(publish("t", 1, request_id=1)).encode())

            async def publish_and_stop() -> None:
                sockets_of(server)[0].data_received(frame)
                await server.server.stop()

            stopped = server.begin(publish_and_stop())
            assert socket.message("ack")["request_id"] == 1
            assert socket.closed() == 1001
            stopped()
    finally:
        server._is_stopped = True
        server._end()


def test_a_socket_that_never_answers_the_close_does_not_hold_the_shutdown(tmp_path: Path) -> None:
    server = LocalServer(tmp_path, shutdown_timeout_ms=200).start()
    with Socket(server.port) as socket:
        socket.ask("pong", type="ping", request_id=0)
        server.stop()
        pieces = []
        while (piece := socket.piece_or_end()) is not None:
            pieces.append(piece)
        assert [piece.code for piece in pieces] == [1001]
