"""Resource caps of section 1: 429 with `Retry-After`, what is never capped, and slots that come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.http.server import Background, LocalServer, datas, error_of, local_server, write
from tests.http.wire import Wire, record, request
from topics.core.limits import Limits

RECORDS = {"records": [{"data": 1}]}


def capped(answer: httpx.Response, limit: str, most: int) -> None:
    """The shape of a refusal by a cap."""
    assert error_of(answer) == (429, "throttled")
    assert int(answer.headers["retry-after"]) > 0
    detail = answer.json()["error"]["detail"]
    assert (detail["limit"], detail["max"]) == (limit, most)
    assert limit in answer.json()["error"]["message"]


# -- topics ----------------------------------------------------------------------------------------------------------


def test_topics_are_capped_and_what_exists_never_is(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_topics=2)) as server, server.client() as client:
        client.put("/v0/topics/a")
        write(client, "b", 1)
        capped(client.put("/v0/topics/c"), "TOPICS_MAX_TOPICS", 2)
        capped(client.post("/v0/topics/c", json=RECORDS), "TOPICS_MAX_TOPICS", 2)
        assert client.put("/v0/topics/a", json={"ttl_ms": 9}).status_code == 200
        assert client.post("/v0/topics/a", json=RECORDS).status_code == 200
        assert client.get("/v0/topics/c").status_code == 404


def test_a_deleted_topic_makes_room(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_topics=1)) as server, server.client() as client:
        client.put("/v0/topics/a")
        client.delete("/v0/topics/a")
        assert client.put("/v0/topics/b").status_code == 201


def test_a_commit_that_would_create_too_many_topics_is_refused(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_topics=1)) as server, server.client() as client:
        for name in ("a", "b"):
            client.post(f"/v0/topics/{name}?txn=x&part=p&chunk=0", json=RECORDS)
        body = {"parts": [{"part": "p", "records": {"a": 1, "b": 1}}]}
        capped(client.post("/v0/txns/x/commit", json=body), "TOPICS_MAX_TOPICS", 1)
        assert client.get("/v0/topics").json()["topics"] == []
        client.post("/v0/txns/x/abort")
        assert write(client, "a", "new") == [1]
        assert datas(client, "a") == ["new"]


def test_zero_turns_a_cap_off(tmp_path: Path) -> None:
    limits = Limits(max_topics=0, max_inflight_per_key=0, max_total_bytes=0, max_txns=0, max_clients_per_topic=0)
    with local_server(tmp_path, limits, max_connections=0) as server, server.client() as client:
        assert client.put("/v0/topics/a").status_code == 201
        assert client.post("/v0/topics/a?txn=x&part=p&chunk=0", json=RECORDS).status_code == 200
        body = {"client_id": "c", "records": [{"data": 1, "client_seq": 1}]}
        assert client.post("/v0/topics/a", json=body).status_code == 200


# -- bytes, transactions, producers ----------------------------------------------------------------------------------


def test_live_bytes_are_capped_over_all_topics(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_total_bytes=100)) as server, server.client() as client:
        write(client, "a", "x" * 60)
        write(client, "b", "x" * 60)
        capped(client.post("/v0/topics/a", json=RECORDS), "TOPICS_MAX_TOTAL_BYTES", 100)
        capped(client.post("/v0/topics/new", json=RECORDS), "TOPICS_MAX_TOTAL_BYTES", 100)
        assert datas(client, "a") == ["x" * 60]
        assert client.put("/v0/topics/a", json={}).status_code == 200
        assert client.put("/v0/topics/other").status_code == 201
        assert client.get("/v0/topics/new").status_code == 404
        client.post("/v0/topics/a/delete", json={"before_seq": 9})
        assert client.post("/v0/topics/a", json=RECORDS).status_code == 200


def test_open_transactions_are_capped(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_txns=1)) as server, server.client() as client:
        spool = "/v0/topics/a?part=p&chunk=0&txn="
        assert client.post(spool + "x", json=RECORDS).status_code == 200
        capped(client.post(spool + "y", json=RECORDS), "TOPICS_MAX_TXNS", 1)
        client.post("/v0/txns/x/abort")
        assert client.post(spool + "y", json=RECORDS).status_code == 200


def test_strict_producers_are_capped(tmp_path: Path) -> None:
    def strict(client: httpx.Client, name: str, number: int) -> httpx.Response:
        records = [{"data": 1, "client_seq": number}]
        return client.post("/v0/topics/a", json={"client_id": name, "records": records})

    with local_server(tmp_path, Limits(max_clients_per_topic=1)) as server, server.client() as client:
        assert strict(client, "one", 1).status_code == 201
        capped(strict(client, "two", 1), "TOPICS_MAX_CLIENTS_PER_TOPIC", 1)
        assert strict(client, "one", 2).status_code == 200


def test_connections_are_capped(tmp_path: Path) -> None:
    with local_server(tmp_path, max_connections=2) as server:
        with Wire(server.port) as first, Wire(server.port) as second:
            health = request("GET", "/v0/health")
            assert first.ask(health).status == 200
            assert second.ask(health).status == 200
            with Wire(server.port) as third:
                third.send_what_fits(health)
                reply = third.read()
                assert (reply.status, reply.code) == (429, "throttled")
                assert reply.json()["error"]["detail"] == {"limit": "TOPICS_MAX_CONNECTIONS", "max": 2}
                assert "retry-after" in reply.headers
                assert third.is_ended
            assert first.ask(health).status == 200
        server.wait_until(lambda: not server.app.connections, "no connection")
        with Wire(server.port) as fourth:
            assert fourth.ask(health).status == 200


# -- requests in flight ----------------------------------------------------------------------------------------------

WAIT = b'{"wait_ms":30000}'


def waiting(server: LocalServer, key: str = "", wait: bytes = WAIT) -> Wire:
    """A connection whose read waits, and so holds a slot."""
    before = server.call(lambda: len(server.app.readings))
    wire = Wire(server.port)
    wire.send(request("POST", "/v0/topics/a/diff", wait, *([f"authorization: Bearer {key}"] if key else [])))
    server.wait_for_readings(before + 1)
    return wire


def test_requests_in_flight_are_capped(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_inflight_per_key=2)) as server, server.client() as client:
        client.put("/v0/topics/a")
        with waiting(server), waiting(server):
            for answer in (client.get("/v0/topics/a"), client.post("/v0/topics/a", json=RECORDS)):
                capped(answer, "TOPICS_MAX_INFLIGHT_PER_KEY", 2)


def test_each_key_has_slots_of_its_own(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_inflight_per_key=1), api_keys="one,two") as server:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        with server.client() as client:
            client.put("/v0/topics/a", headers=one)
            with waiting(server, "one"):
                capped(client.get("/v0/topics/a", headers=one), "TOPICS_MAX_INFLIGHT_PER_KEY", 1)
                assert client.get("/v0/topics/a", headers=two).status_code == 200
                assert client.get("/v0/health").status_code == 200


def by_an_answer(server: LocalServer, client: httpx.Client) -> None:
    with waiting(server) as wire:
        server.call(server.app.end_waiting)
        assert wire.read().status == 200


def by_a_deadline(server: LocalServer, client: httpx.Client) -> None:
    with waiting(server, wait=b'{"wait_ms":300}') as wire:
        assert wire.read().status == 200


def by_a_disconnect(server: LocalServer, client: httpx.Client) -> None:
    waiting(server).close()
    server.wait_for_readings(0)


def by_an_error(server: LocalServer, client: httpx.Client) -> None:
    assert client.get("/v0/topics/nobody").status_code == 404
    assert client.post("/v0/topics/a", content=b"{", headers={"content-type": "application/json"}).status_code == 400


def by_a_bug(server: LocalServer, client: httpx.Client) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.app.engine, "get", broken)
        assert client.get("/v0/topics/a").status_code == 500


def by_a_refusal_of_the_cap(server: LocalServer, client: httpx.Client) -> None:
    with waiting(server) as wire:
        for _ in range(3):
            assert client.get("/v0/topics/a").status_code == 429
        server.call(server.app.end_waiting)
        assert wire.read().status == 200


def by_a_topic_that_is_gone(server: LocalServer, client: httpx.Client) -> None:
    with waiting(server) as wire:
        # The cap is one, and it is taken: the topic goes without a request.
        def drop() -> None:
            server.app.engine.drop("a")
            server.app.end_turn()

        server.call(drop)
        assert wire.read().status == 404
    assert client.put("/v0/topics/a").status_code == 201


def by_a_write_whose_writer_is_gone(server: LocalServer, client: httpx.Client) -> None:
    with Wire(server.port) as wire:
        wire.send(request("POST", "/v0/topics/a", record(1)))
    server.wait_until(lambda: server.app.engine.get("a", touch=False).head_seq == 1, "the write")


@pytest.mark.parametrize(
    "end",
    [
        by_an_answer,
        by_a_deadline,
        by_a_disconnect,
        by_an_error,
        by_a_bug,
        by_a_refusal_of_the_cap,
        by_a_topic_that_is_gone,
        by_a_write_whose_writer_is_gone,
    ],
)
def test_a_slot_is_freed(tmp_path: Path, end: Callable[[LocalServer, httpx.Client], None]) -> None:
    with local_server(tmp_path, Limits(max_inflight_per_key=1)) as server, server.client() as client:
        client.put("/v0/topics/a")
        end(server, client)
        server.wait_until(lambda: server.app.inflight == 0, "no request in flight")
        client.post("/v0/topics/a/delete", json={"before_seq": 9})
        client.delete("/v0/topics/a")
        client.put("/v0/topics/a")
        with waiting(server):
            capped(client.get("/v0/topics/a"), "TOPICS_MAX_INFLIGHT_PER_KEY", 1)


def test_a_forbidden_request_gives_no_slot_back_that_it_did_not_take(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_inflight_per_key=1), api_keys="one:rw:a,all") as server:
        one = {"authorization": "Bearer one"}
        with server.client() as client:
            client.put("/v0/topics/a", headers={"authorization": "Bearer all"})
            for method, path in (("GET", "/v0/topics/z"), ("PUT", "/v0/topics/a")):
                assert client.request(method, path, headers=one).status_code == 403
            assert server.call(lambda: server.app.inflight) == 0
            with waiting(server, "one"):
                capped(client.get("/v0/topics/a", headers=one), "TOPICS_MAX_INFLIGHT_PER_KEY", 1)


def test_pipelined_requests_of_a_waiting_connection_hold_no_slots(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_inflight_per_key=2)) as server, server.client() as client:
        client.put("/v0/topics/a")
        with waiting(server) as wire:
            wire.send(request("GET", "/v0/topics/a") * 5)
            write(client, "a", 1)
            assert wire.read().json()["records"][0]["data"] == 1
            assert [wire.read().status for _ in range(5)] == [200] * 5


def test_slots_are_counted_over_http_2_too(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_inflight_per_key=1)) as server:
        # Two connections: httpx cannot read one from two threads.
        kind = {"http1": False, "http2": True}
        with server.client(**kind) as client, server.client(**kind) as patient:
            client.put("/v0/topics/a")
            call = Background(lambda: patient.post("/v0/topics/a/diff", json={"wait_ms": 30_000}))
            server.wait_for_readings()
            capped(client.get("/v0/topics/a"), "TOPICS_MAX_INFLIGHT_PER_KEY", 1)
            server.call(server.app.end_waiting)
            assert call.result().status_code == 200
            assert client.get("/v0/topics/a").status_code == 200
