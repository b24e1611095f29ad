"""Section 8: a slow reader costs only itself. The log is the buffer; what is held for it is bounded; the rest go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server import LocalServer, local_server, write
from tests.live.conftest import create
from tests.live.sse import Events, Frame, told
from tests.live.test_watch import H2Client
from tests.live.ws import CLOSE, PING, TEXT, Socket, encode
from topics.http.ws_protocol import WsProtocol

# Small enough that a few records fill what the kernel holds for a reader.
SMALL = 4096
BIG = "x" * 200_000
# What a server may hold for one reader: what asyncio calls full, and a frame of the default size.
MOST_HELD = 1 << 20


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server that closes nobody while these tests run."""
    with local_server(tmp_path_factory.mktemp("data"), shutdown_timeout_ms=500) as running:
        yield running


@pytest.fixture
def strict(tmp_path: Path, quick_sweeps: None) -> Iterator[LocalServer]:
    """A server that waits a tenth of a second for whoever takes nothing."""
    with local_server(tmp_path, stuck_timeout_ms=100, shutdown_timeout_ms=500) as running:
        yield running


@pytest.fixture
def fair(tmp_path: Path, quick_sweeps: None) -> Iterator[LocalServer]:
    """A server that waits long enough for a reader on a busy machine."""
    with local_server(tmp_path, stuck_timeout_ms=2000, shutdown_timeout_ms=500) as running:
        yield running


@pytest.fixture
def client(patient: LocalServer) -> Iterator[httpx.Client]:
    with patient.client() as opened:
        yield opened


def fill(client: httpx.Client, topic: str, count: int) -> None:
    """Big records, more than any kernel holds."""
    for _ in range(count):
        write(client, topic, BIG)


def held(server: LocalServer) -> list[int]:
    """The bytes that wait in the server for each of its connections."""

    def sizes() -> list[int]:
        found = [connection.transport for connection in server.app.connections]
        return [transport.get_write_buffer_size() for transport in found if transport is not None]

    return server.call(sizes)


def wait_until_full(server: LocalServer) -> None:
    server.wait_until(lambda: any(stream.outlet.is_full for stream in server.app.streams), "a stream that is full")


def url_of(client: httpx.Client, topic: str, **fields: Any) -> str:
    url: str = create(client, {topic: {}}, **fields)["stream_url"]
    return url


# -- events ----------------------------------------------------------------------------------------------------------


def test_what_is_held_for_a_stuck_reader_is_bounded(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    fill(client, topic, 30)
    stuck = opened.enter_context(Events(patient.port, url_of(client, topic), receive_buffer=SMALL)).open()
    wait_until_full(patient)
    fill(client, topic, 30)
    assert max(held(patient)) < MOST_HELD
    assert sum(len(frame.seqs) for frame in stuck.until("caught-up") if frame.event == "record") == 60


def test_a_stuck_reader_of_many_topics_is_bounded_too(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    names = [f"{topic[-40:]}-{number}" for number in range(20)]
    for name in names:
        fill(client, name, 2)
    url = create(client, {name: {} for name in names})["stream_url"]
    opened.enter_context(Events(patient.port, url, receive_buffer=SMALL)).open()
    wait_until_full(patient)
    for name in names:
        fill(client, name, 1)
    assert max(held(patient)) < MOST_HELD


def test_others_go_on_while_one_is_stuck(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    fill(client, topic, 30)
    opened.enter_context(Events(patient.port, url_of(client, topic), receive_buffer=SMALL)).open()
    wait_until_full(patient)
    url = create(client, {topic: {"tail": True}})["stream_url"]
    quick = opened.enter_context(Events(patient.port, url)).stream()
    quick.event("caught-up")
    for number in range(31, 61):
        write(client, topic, number)
        assert quick.event("record").seqs == [number]


def test_a_reader_that_was_stuck_gets_everything_in_its_order(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    fill(client, topic, 30)
    slow = opened.enter_context(Events(patient.port, url_of(client, topic), receive_buffer=SMALL)).stream()
    wait_until_full(patient)
    write(client, topic, *range(500))
    assert told(slow.until_seq(530)) == list(range(1, 531))


def test_the_batches_of_a_reader_that_lags_grow(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    """One frame for many appends: what came meanwhile is joined."""
    fill(client, topic, 30)
    slow = opened.enter_context(Events(patient.port, url_of(client, topic), receive_buffer=SMALL)).stream()
    wait_until_full(patient)
    for number in range(50):
        write(client, topic, number)
    frames = [frame for frame in slow.until_seq(80) if frame.event == "record"]
    assert max(len(frame.seqs) for frame in frames) > 10


def test_what_a_slow_reader_loses_to_retention_is_told(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 20})
    fill(client, topic, 20)
    slow = opened.enter_context(Events(patient.port, url_of(client, topic), receive_buffer=SMALL)).stream()
    wait_until_full(patient)
    write(client, topic, *range(30))
    seen = told(slow.until_seq(50))
    gaps = [item for item in seen if not isinstance(item, int)]
    assert len(gaps) == 1
    assert gaps[0][2] == "cap"
    records = [item for item in seen if isinstance(item, int)]
    assert records == [*range(1, gaps[0][0]), *range(gaps[0][1] + 1, 51)]


def test_the_last_head_of_a_topic_deleted_before_a_stuck_reader_is_told(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    fill(client, topic, 30)
    slow = opened.enter_context(Events(patient.port, url_of(client, topic), receive_buffer=SMALL)).stream()
    wait_until_full(patient)
    write(client, topic, *range(100))
    client.delete(f"/v0/topics/{topic}")
    assert slow.until("topic-deleted")[-1].json()["head_seq"] == 130


def test_a_stuck_reader_has_no_heartbeats_pile_up(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    """A reader beside it has had one by then."""
    fill(client, topic, 30)
    client.put(f"/v0/topics/{topic}-idle")
    url = url_of(client, topic, heartbeat_ms=1000)
    slow = opened.enter_context(Events(patient.port, url, receive_buffer=SMALL)).stream()
    wait_until_full(patient)
    idle = opened.enter_context(Events(patient.port, url_of(client, f"{topic}-idle", heartbeat_ms=1000))).stream()
    idle.event("caught-up")
    assert idle.frame() == Frame(comment="hb")
    frame = slow.frame()
    while frame.event != "caught-up":
        assert frame.comment is None
        frame = slow.frame()


def test_a_stuck_reader_is_closed_with_a_last_error_and_its_place_is_free(strict: LocalServer) -> None:
    with strict.client() as client:
        fill(client, "t", 30)
        with Events(strict.port, url_of(client, "t"), receive_buffer=SMALL) as stuck:
            stuck.stream()
            strict.wait_until(lambda: strict.app.watches.open_streams == 0, "the place of the stuck reader")
            frames = [frame for frame in stuck.rest() if frame.comment is None]
    assert frames[-1].event == "error"
    assert frames[-1].json()["code"] == "slow_consumer"
    assert frames[-1].json()["retry_after_ms"] > 0
    delivered = told(frames[:-1])
    assert delivered == list(range(1, len(delivered) + 1))
    assert frames[-1].cursors["t"] == len(delivered) < 30


def test_the_session_of_a_stuck_reader_survives_and_resumes_without_a_gap(strict: LocalServer) -> None:
    with strict.client() as client:
        fill(client, "t", 30)
        url = url_of(client, "t")
        with Events(strict.port, url, receive_buffer=SMALL) as stuck:
            stuck.stream()
            strict.wait_until(lambda: strict.app.watches.open_streams == 0, "the place of the stuck reader")
            frames = stuck.rest()
        with Events(strict.port, url, frames[-1].id) as again:
            assert told(frames) + told(again.stream().until("caught-up")) == list(range(1, 31))


def test_what_retention_took_from_a_stuck_reader_is_a_tombstone_when_it_is_back(strict: LocalServer) -> None:
    with strict.client() as client:
        client.put("/v0/topics/t", json={"cap_records": 30})
        fill(client, "t", 30)
        url = url_of(client, "t")
        with Events(strict.port, url, receive_buffer=SMALL) as stuck:
            stuck.stream()
            strict.wait_until(lambda: strict.app.watches.open_streams == 0, "the place of the stuck reader")
            last = stuck.rest()[-1]
        at = last.cursors["t"]
        write(client, "t", *range(30))
        with Events(strict.port, url, last.id) as again:
            seen = told(again.stream().until("caught-up"))
        assert seen == [(at + 1, 30, "from_seq_too_old"), *range(31, 61)]


def test_a_reader_that_takes_a_little_is_not_stuck(fair: LocalServer) -> None:
    """It reads on while one that reads nothing is closed."""
    with fair.client() as client:
        fill(client, "t", 30)
        with (
            Events(fair.port, url_of(client, "t"), receive_buffer=SMALL) as slow,
            Events(fair.port, url_of(client, "t"), receive_buffer=SMALL) as stuck,
        ):
            slow.stream()
            stuck.open()
            taken = b""
            patience = slow.socket.gettimeout()
            slow.socket.settimeout(0.05)
            while fair.call(lambda: fair.app.watches.open_streams) == 2:
                # It may have everything before the other one is given up.
                with suppress(TimeoutError):
                    taken += slow.socket.recv(1 << 15)
            slow.socket.settimeout(patience)
            assert fair.call(lambda: fair.app.watches.open_streams) == 1
            slow._raw += taken
            assert told(slow.until("caught-up")) == list(range(1, 31))


def test_an_idle_reader_is_never_stuck(strict: LocalServer) -> None:
    with strict.client() as client:
        fill(client, "t", 30)
        client.put("/v0/topics/idle")
        with (
            Events(strict.port, url_of(client, "idle")) as idle,
            Events(strict.port, url_of(client, "t"), receive_buffer=SMALL) as stuck,
        ):
            idle.stream().event("caught-up")
            stuck.open()
            strict.wait_until(lambda: strict.app.watches.open_streams == 1, "the end of the stuck reader")
            write(client, "idle", 1)
            assert idle.event("record").seqs == [1]


def test_an_http_2_stream_that_is_stuck_is_closed_and_the_connection_lives(strict: LocalServer) -> None:
    with strict.client() as client, H2Client(strict.port, window=1000) as over:
        fill(client, "t", 30)
        client.put("/v0/topics/idle")
        stuck = over.get(url_of(client, "t"))
        free = over.get(url_of(client, "idle"))
        over.starved.add(stuck)
        over.until_event(free, "caught-up")
        strict.wait_until(lambda: strict.app.watches.open_streams == 1, "the place of the stuck stream")
        write(client, "idle", 1)
        over.until(lambda: told(over.frames(free)) == [1])
        over.h2.increment_flow_control_window(1 << 24)
        over.h2.increment_flow_control_window(1 << 24, stuck)
        over.flush()
        over.until(lambda: stuck in over.ended)
        last = over.frames(stuck)[-1]
        assert (last.event, last.json()["code"]) == ("error", "slow_consumer")


def test_an_http_2_client_that_never_takes_its_last_frame_does_not_stay_for_ever(
    tmp_path: Path, quick_sweeps: None
) -> None:
    with local_server(tmp_path, stuck_timeout_ms=100, idle_timeout_ms=200, shutdown_timeout_ms=500) as server:
        with server.client() as client:
            fill(client, "t", 30)
            url = url_of(client, "t")
        with H2Client(server.port, window=1000) as over:
            over.get(url)
            server.wait_until(lambda: server.app.metrics.records_read > 0, "the stream")
            server.wait_until(lambda: not server.app.connections, "the end of a connection that takes nothing")


def test_an_http_2_client_that_asks_and_never_reads_is_not_read_from_without_end(
    patient: LocalServer, opened: ExitStack
) -> None:
    """Each ping would have its answer held."""
    over = opened.enter_context(H2Client(patient.port, receive_buffer=SMALL))
    over.h2.ping(b"12345678")
    pings = over.h2.data_to_send() * 4000
    over.wire.socket.settimeout(0.5)
    sent = 0
    try:
        while sent < 8 << 20:
            sent += over.wire.socket.send(pings)
    except TimeoutError:
        pass
    assert max(held(patient)) < MOST_HELD


def test_a_client_that_never_takes_its_last_frame_does_not_stay_for_ever(tmp_path: Path, quick_sweeps: None) -> None:
    with (
        local_server(tmp_path, stuck_timeout_ms=100, idle_timeout_ms=200, shutdown_timeout_ms=500) as server,
        server.client() as client,
    ):
        fill(client, "t", 30)
        url = url_of(client, "t")
        client.close()
        with Events(server.port, url, receive_buffer=SMALL) as stuck:
            stuck.open()
            server.wait_until(lambda: not server.app.connections, "the end of a connection that takes nothing")


def test_shutdown_does_not_wait_long_for_a_stuck_reader(tmp_path: Path) -> None:
    server = LocalServer(tmp_path, shutdown_timeout_ms=200).start()
    try:
        with server.client() as client:
            fill(client, "t", 30)
            url = url_of(client, "t")
        with Events(server.port, url, receive_buffer=SMALL) as stuck:
            stuck.open()
            wait_until_full(server)
            server.stop()
    finally:
        server.stop()
    with local_server(tmp_path) as again, again.client() as client:
        assert client.get("/v0/topics/t").json()["head_seq"] == 30


# -- sockets ---------------------------------------------------------------------------------------------------------


def sockets_of(server: LocalServer) -> list[WsProtocol]:
    found = [connection._successor for connection in server.app.connections]
    return [each for each in found if isinstance(each, WsProtocol)]


def subscribe(server: LocalServer, topic: str) -> Socket:
    socket = Socket(server.port, "/v0/ws", receive_buffer=SMALL)
    socket.send(type="subscribe", topics={topic: {}})
    return socket


def test_what_is_held_for_a_stuck_socket_is_bounded_and_nothing_is_lost(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    fill(client, topic, 30)
    stuck = opened.enter_context(subscribe(patient, topic))
    wait_until_full(patient)
    fill(client, topic, 10)
    assert max(held(patient)) < MOST_HELD
    seen: list[int] = []
    while len(seen) < 40:
        message = stuck.message()
        if message["type"] == "record":
            seen += [record["$seq"] for record in message["records"]]
    assert seen == list(range(1, 41))


def test_a_stuck_socket_is_closed_with_1013_and_its_place_is_free(strict: LocalServer) -> None:
    with strict.client() as client:
        fill(client, "t", 30)
        with subscribe(strict, "t") as stuck:
            strict.wait_until(lambda: len(strict.app.streams) == 1, "the stream")
            strict.wait_until(lambda: len(strict.app.streams) == 0, "the end of the stream")
            pieces = []
            while (piece := stuck.piece_or_end()) is not None:
                pieces.append(piece)
                if piece.opcode == CLOSE:
                    stuck.send_bytes(encode(CLOSE, piece.payload[:2]))
            assert pieces[-1].code == 1013
            last = json.loads(pieces[-2].payload)
            assert (last["type"], last["code"]) == ("error", "slow_consumer")
        strict.wait_until(lambda: strict.app.watches.open_streams == 0, "the place")


@pytest.mark.parametrize("kind", ["command", "ping"])
def test_a_socket_that_asks_and_never_reads_is_not_read_from_without_end(
    patient: LocalServer, opened: ExitStack, kind: str
) -> None:
    """Each answer would have to be held: so the server stops reading."""
    socket = opened.enter_context(Socket(patient.port, "/v0/ws", receive_buffer=SMALL))
    text = json.dumps({"type": "ping", "request_id": "x" * 60_000}).encode()
    frame = encode(TEXT, text) if kind == "command" else encode(PING, b"x" * 125) * 400
    socket.socket.settimeout(0.5)
    sent = 0
    try:
        while sent < 64 << 20:
            sent += socket.socket.send(frame * 4)
    except TimeoutError:
        pass
    assert max(held(patient)) < 8 << 20
    assert sent < 64 << 20


def test_a_socket_that_reads_slowly_is_not_taken_for_dead(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    """Where there was no room for a ping, nobody can be blamed for not answering it."""
    fill(client, topic, 30)
    slow = opened.enter_context(subscribe(patient, topic))
    wait_until_full(patient)

    def look() -> None:
        for each in sockets_of(patient):
            each.check_deadline(each._pings_at)

    patient.call(look)
    slow._raw += slow.socket.recv(1 << 14)
    patient.call(look)
    seen = 0
    while seen < 30:
        message = slow.message()
        seen += len(message.get("records", ()))
    assert seen == 30


def test_others_go_on_while_a_socket_is_stuck(
    patient: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    fill(client, topic, 30)
    opened.enter_context(subscribe(patient, topic))
    wait_until_full(patient)
    quick = opened.enter_context(Socket(patient.port))
    quick.send(type="subscribe", topics={topic: {"tail": True}})
    quick.until("caught_up")
    for number in range(31, 41):
        write(client, topic, number)
        assert quick.message("record")["to_seq"] == number
