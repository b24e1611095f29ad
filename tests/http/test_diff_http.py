"""Section 4 over the wire: every field of a diff, and reads that wait."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.http.server import DEADLINE, JSON, Background, LocalServer, datas, diff, error_of, write
from tests.http.wire import Wire, request
from topics.core.limits import MAX_WAIT_MS


def fill(client: httpx.Client, topic: str) -> None:
    records = [
        {"data": number, "tag": "odd" if number % 2 else "even", "node": f"n{number % 3}", "meta": {"a": str(number)}}
        for number in range(1, 11)
    ]
    client.post(f"/v0/topics/{topic}", json={"records": records})


def test_an_answer_has_every_field(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    answer = diff(client, topic, limit=1)
    assert set(answer) == {
        *("topic", "epoch", "records", "next_from_seq", "head_seq", "earliest_seq", "caught_up", "tombstone", "lag"),
        "performance",
    }
    assert (answer["topic"], answer["next_from_seq"], answer["head_seq"], answer["lag"]) == (topic, 1, 2, 1)
    assert (answer["earliest_seq"], answer["caught_up"], answer["tombstone"]) == (1, False, None)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, list(range(1, 11))),
        ({"from_seq": 7}, [8, 9, 10]),
        ({"from_seq": 2, "to_seq": 4}, [3, 4]),
        ({"to_seq": None}, list(range(1, 11))),
        ({"limit": 2}, [1, 2]),
        ({"limit": 0}, list(range(1, 11))),
        ({"node": "n1"}, [2, 3, 5, 6, 8, 9]),
        ({"node": ["n1", "n2"]}, [3, 6, 9]),
        ({"node": []}, list(range(1, 11))),
        ({"node": None}, list(range(1, 11))),
        ({"match": "odd"}, [1, 3, 5, 7, 9]),
        ({"match": ["tag", "Eq", "even"]}, [2, 4, 6, 8, 10]),
        ({"match": ["tag", "Glob", "o*"]}, [1, 3, 5, 7, 9]),
        ({"match": "odd", "node": "n1", "from_seq": 3}, [5, 9]),
        ({"max_bytes": 1}, [1]),
    ],
)
def test_fields_choose_the_records(client: httpx.Client, topic: str, fields: dict[str, Any], kept: list[int]) -> None:
    fill(client, topic)
    assert datas(client, topic, **fields) == kept


def test_tags_come_when_asked_for_and_meta_unless_refused(client: httpx.Client, topic: str) -> None:
    fill(client, topic)
    plain = diff(client, topic, limit=1)["records"][0]
    assert "$tag" not in plain
    assert plain["meta"] == {"a": "1"}
    rich = diff(client, topic, limit=1, include_tags=True, include_meta=False)["records"][0]
    assert rich["$tag"] == "odd"
    assert "meta" not in rich


@pytest.mark.parametrize("limit", [1001, 10**6, 10**30])
def test_limit_is_clamped_to_1000_and_not_refused(client: httpx.Client, topic: str, limit: int) -> None:
    write(client, topic, *range(1010))
    assert len(diff(client, topic, limit=limit)["records"]) == 1000


def test_the_default_limit_is_256(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(300))
    assert len(diff(client, topic)["records"]) == 256


def test_the_budget_is_1_mib_unless_asked_and_8_at_most(client: httpx.Client, topic: str) -> None:
    for _ in range(2):
        write(client, topic, *["x" * 900_000] * 5)
    assert len(diff(client, topic)["records"]) == 1
    assert len(diff(client, topic, max_bytes=3 << 20)["records"]) == 3
    assert len(diff(client, topic, max_bytes=10**12)["records"]) == 9


def test_filtered_seqs_advance_the_cursor(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3, node="me")
    answer = diff(client, topic, node="me")
    assert (answer["records"], answer["next_from_seq"], answer["caught_up"]) == ([], 3, True)


def test_a_wait_that_has_something_is_answered_at_once(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    started = time.monotonic()
    assert diff(client, topic, wait_ms=30_000)["records"] != []
    assert time.monotonic() - started < DEADLINE


def test_a_tombstone_is_not_waited_for(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    client.put(f"/v0/topics/{topic}", json={"cap_bytes": 1, "cap_records": 1})
    write(client, topic, 2)
    client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 3})
    answer = diff(client, topic, wait_ms=30_000)
    assert answer["records"] == []
    assert answer["tombstone"]["reason"] == "cap"


def test_a_cursor_beyond_the_head_is_told_at_once(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = diff(client, topic, from_seq=9, wait_ms=30_000)
    assert answer["tombstone"]["reason"] == "recreated"


@pytest.mark.parametrize(
    ("from_seq", "gap"), [(0, (1, 7)), (2, (3, 7)), (3, (6, 7)), (5, (6, 7)), (6, (7, 7)), (7, None), (8, None)]
)
def test_the_example_of_the_contract(
    client: httpx.Client, topic: str, from_seq: int, gap: tuple[int, int] | None
) -> None:
    write(client, topic, *range(1, 6))
    for cap in (2, 0):
        client.put(f"/v0/topics/{topic}", json={"cap_records": cap})
    client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 6})
    client.post(f"/v0/topics/{topic}", json={"records": [{"hole": 2}, {"data": 8}]})
    state = client.get(f"/v0/topics/{topic}").json()
    assert (state["evict_floor"], state["earliest_seq"], state["head_seq"], state["holes"]) == (4, 8, 8, 1)
    answer = diff(client, topic, from_seq=from_seq)
    stone = answer["tombstone"]
    assert (None if stone is None else (stone["gap_from"], stone["gap_to"])) == gap
    if stone is not None:
        assert stone["missed_estimate"] == stone["gap_to"] - stone["gap_from"] + 1
        assert (stone["earliest_seq"], stone["head_seq"]) == (8, 8)
    assert [each["$seq"] for each in answer["records"]] == ([8] if from_seq < 8 else [])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"from_seq": -1}, "from_seq"),
        ({"from_seq": "0"}, "from_seq"),
        ({"from_seq": 1.5}, "from_seq"),
        ({"from_seq": 2**53}, "from_seq"),
        ({"from_seq": None}, "from_seq"),
        ({"to_seq": -1}, "to_seq"),
        ({"limit": "many"}, "limit"),
        ({"node": 5}, "node"),
        ({"node": [5]}, "node"),
        ({"match": {}}, "match"),
        ({"match": ["tag", "Glob", "*"], "limit": True}, "limit"),
        ({"match": ["node", "Eq", "x"]}, "match"),
        ({"include_tags": "yes"}, "include_tags"),
        ({"include_meta": 1}, "include_meta"),
        ({"wait_ms": "long"}, "wait_ms"),
        ({"max_bytes": "all"}, "max_bytes"),
        ({"epoch": "x"}, "epoch"),
    ],
)
def test_a_field_of_another_type_is_400_by_name(
    client: httpx.Client, topic: str, body: dict[str, Any], field: str
) -> None:
    client.put(f"/v0/topics/{topic}")
    answer = client.post(f"/v0/topics/{topic}/diff", json=body)
    assert error_of(answer) == (400, "invalid_request")
    assert field in answer.json()["error"]["message"]


def test_seek_finds_the_first_record_of_a_time(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    ts = diff(client, topic)["records"][0]["$ts"]
    assert client.get(f"/v0/topics/{topic}/seek?ts={ts}").json()["from_seq"] == 0
    assert client.get(f"/v0/topics/{topic}/seek?ts={ts + 1}").json()["from_seq"] == 2
    assert client.get(f"/v0/topics/{topic}/seek?ts=0").json()["from_seq"] == 0


@pytest.mark.parametrize("query", ["", "?ts=", "?ts=x", "?ts=-1", "?ts=1.5", "?ts=99999999999999999999999"])
def test_seek_needs_a_time(client: httpx.Client, topic: str, query: str) -> None:
    client.put(f"/v0/topics/{topic}")
    answer = client.get(f"/v0/topics/{topic}/seek{query}")
    assert error_of(answer) == (400, "invalid_request")
    assert "ts" in answer.json()["error"]["message"]


# -- reads that wait -------------------------------------------------------------------------------------------------


def waiting(server: LocalServer, client: httpx.Client, topic: str, **fields: Any) -> Background:
    """A diff that is known to wait."""
    before = server.call(lambda: len(server.app.readings))
    call = Background(lambda: client.post(f"/v0/topics/{topic}/diff", json={"wait_ms": 30_000, **fields}))
    server.wait_for_readings(before + 1)
    return call


def test_a_waiting_read_wakes_on_the_commit(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    call = waiting(server, client, topic)
    assert not call.is_done
    write(client, topic, "hello")
    body = call.result().json()
    assert [record["data"] for record in body["records"]] == ["hello"]
    assert (body["next_from_seq"], body["caught_up"]) == (1, True)
    server.wait_for_readings(0)


def test_all_who_wait_wake(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    calls = [waiting(server, client, topic) for _ in range(5)]
    write(client, topic, 1)
    assert [call.result().json()["next_from_seq"] for call in calls] == [1] * 5


def test_a_commit_of_a_transaction_wakes_too(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    call = waiting(server, client, topic)
    client.post(f"/v0/topics/{topic}?txn={topic}&part=p&chunk=0", json={"records": [{"data": 1}]})
    assert not call.is_done
    client.post(f"/v0/txns/{topic}/commit", json={"parts": [{"part": "p", "records": {topic: 1}}]})
    assert [record["data"] for record in call.result().json()["records"]] == [1]


def test_a_record_of_another_topic_wakes_nobody(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    call = waiting(server, client, topic)
    write(client, f"{topic}2", 1)
    assert not call.is_done
    write(client, topic, 2)
    assert call.result().json()["records"][0]["data"] == 2


def test_a_record_of_the_readers_own_node_does_not_end_the_wait(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    client.put(f"/v0/topics/{topic}")
    call = waiting(server, client, topic, node="me")
    write(client, topic, "mine", node="me")
    assert not call.is_done
    write(client, topic, "yours", node="you")
    body = call.result().json()
    assert [record["data"] for record in body["records"]] == ["yours"]
    assert body["next_from_seq"] == 2


def test_a_wait_ends_with_an_empty_answer(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    started = time.monotonic()
    body = diff(client, topic, from_seq=1, wait_ms=50)
    assert time.monotonic() - started >= 0.05
    assert (body["records"], body["next_from_seq"], body["caught_up"], body["tombstone"]) == ([], 1, True, None)
    assert body["performance"]["server_total_ms"] >= 49


def test_a_wait_is_clamped(client: httpx.Client, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_WAIT_MS == 30_000
    monkeypatch.setattr("topics.http.records.MAX_WAIT_MS", 30)
    client.put(f"/v0/topics/{topic}")
    assert diff(client, topic, wait_ms=10**30)["records"] == []


def test_a_topic_that_goes_away_ends_the_wait_with_404(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    call = waiting(server, client, topic)
    client.delete(f"/v0/topics/{topic}")
    assert error_of(call.result()) == (404, "topic_not_found")
    server.wait_for_readings(0)


def test_a_hole_ends_the_wait(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    call = waiting(server, client, topic)
    client.post(f"/v0/topics/{topic}", json={"records": [{"hole": 2}]})
    stone = call.result().json()["tombstone"]
    assert (stone["gap_from"], stone["gap_to"], stone["reason"]) == (1, 2, "source_trim")


def test_a_reader_that_disconnects_leaves_nothing_behind(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    with Wire(server.port) as wire:
        wire.send(request("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}'))
        server.wait_for_readings()
        assert server.call(lambda: server.app.inflight) == 1
    server.wait_for_readings(0)
    assert server.call(lambda: server.app.inflight) == 0
    assert server.call(lambda: server.app.engine.topic(topic).waiters) in (None, [], {}, set())


def test_a_wait_on_a_topic_that_is_not_there_is_404_at_once(client: httpx.Client, topic: str) -> None:
    assert error_of(client.post(f"/v0/topics/{topic}/diff", json={"wait_ms": 30_000})) == (404, "topic_not_found")


def test_a_read_bumps_the_recency_clock(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    diff(client, topic)
    assert client.get(f"/v0/topics/{topic}?touch=false").json()["last_read_ts"] > 0


def test_hundreds_who_wait_are_all_answered(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    ask = request("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}')
    wires = [Wire(server.port) for _ in range(200)]
    try:
        for wire in wires:
            wire.send(ask)
        server.wait_for_readings(200)
        write(client, topic, "all")
        assert {wire.read().json()["records"][0]["data"] for wire in wires} == {"all"}
    finally:
        for wire in wires:
            wire.close()


def test_an_answer_is_json_unless_arrow_is_asked_for(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}/diff", headers={"accept": "text/html, */*;q=0.1"})
    assert answer.headers["content-type"] == JSON
