"""Section 3 over the wire: writes, idempotency, strict producers, transactions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server import Background, LocalServer, datas, diff, error_of, local_server, write
from tests.http.wire import Reply, Wire, record, request
from topics.core.limits import Limits


def post(client: httpx.Client, topic: str, *datas: object, query: str = "", **fields: Any) -> httpx.Response:
    return client.post(f"/v0/topics/{topic}{query}", json={"records": [{"data": data} for data in datas], **fields})


def test_a_write_that_creates_is_201_and_the_next_200(client: httpx.Client, topic: str) -> None:
    first = post(client, topic, 1, 2)
    assert first.status_code == 201
    body = first.json()
    del body["performance"]
    assert body == {
        "topic": topic,
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
    }
    second = post(client, topic, 3)
    assert second.status_code == 200
    assert (second.json()["seqs"], second.json()["created"]) == ([3], False)


def test_return_seqs_false_leaves_the_list_out(client: httpx.Client, topic: str) -> None:
    body = post(client, topic, 1, 2, query="?return_seqs=false").json()
    assert "seqs" not in body
    assert (body["first_seq"], body["last_seq"], body["count"]) == (1, 2, 2)
    assert post(client, topic, 1, query="?return_seqs=true").json()["seqs"] == [3]


def test_a_write_refused_for_its_query_writes_nothing(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    assert error_of(post(client, topic, 2, query="?return_seqs=banana")) == (400, "invalid_request")
    assert write(client, topic, 3) == [2]
    assert datas(client, topic) == [1, 3]


@pytest.mark.parametrize(
    "query", ["?part=p&chunk=0", "?part=p", "?chunk=0", "?txn=x", "?txn=x&part=p", "?txn=x&chunk=0"]
)
def test_txn_part_and_chunk_go_together(client: httpx.Client, topic: str, query: str) -> None:
    answer = post(client, topic, 1, query=query)
    assert error_of(answer) == (400, "invalid_request")
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_create_false_needs_the_topic(client: httpx.Client, topic: str) -> None:
    assert error_of(post(client, topic, 1, create=False)) == (404, "topic_not_found")
    client.put(f"/v0/topics/{topic}")
    assert post(client, topic, 1, create=False).status_code == 200


def test_config_counts_only_when_the_write_creates(client: httpx.Client, topic: str) -> None:
    post(client, topic, 1, config={"cap_records": 5, "seq_base": 10})
    config = client.get(f"/v0/topics/{topic}").json()["config"]
    assert (config["cap_records"], config["seq_base"]) == (5, 10)
    assert post(client, topic, 2, config={"cap_records": 9}).json()["seqs"] == [11]
    assert client.get(f"/v0/topics/{topic}").json()["config"]["cap_records"] == 5


def test_a_bad_config_refuses_the_write(client: httpx.Client, topic: str) -> None:
    assert error_of(post(client, topic, 1, config={"ttl_ms": -1})) == (400, "invalid_request")
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_node_of_the_body_is_the_default_of_the_batch(client: httpx.Client, topic: str) -> None:
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}, {"data": 2, "node": "own"}], "node": "all"})
    assert [record["$node"] for record in diff(client, topic)["records"]] == ["all", "own"]


def test_nulls_stand_for_what_is_not_there(client: httpx.Client, topic: str) -> None:
    record = {"data": 1, "tag": None, "node": None, "meta": None}
    body = {"records": [record], "node": None, "idempotency_key": None, "client_id": None, "config": None}
    assert client.post(f"/v0/topics/{topic}", json=body).status_code == 201
    assert set(diff(client, topic, include_tags=True)["records"][0]) == {"$seq", "$ts", "data"}


def test_the_largest_batch_is_accepted(client: httpx.Client, topic: str) -> None:
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}] * 10_000})
    assert answer.json()["last_seq"] == 10_000
    too_many = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}] * 10_001})
    assert error_of(too_many) == (400, "batch_too_large")


def test_a_hole_takes_seqs_and_is_told(client: httpx.Client, topic: str) -> None:
    body = {"records": [{"data": 1}, {"hole": 3, "reason": "source_trim"}, {"data": 2}]}
    written = client.post(f"/v0/topics/{topic}", json=body).json()
    assert (written["first_seq"], written["last_seq"], written["count"]) == (1, 5, 2)
    assert client.get(f"/v0/topics/{topic}").json()["holes"] == 1
    stone = diff(client, topic, from_seq=1)["tombstone"]
    assert (stone["gap_from"], stone["gap_to"], stone["reason"], stone["missed_estimate"]) == (2, 4, "source_trim", 3)


def test_writers_at_once_get_disjoint_contiguous_seqs(server: LocalServer, topic: str) -> None:
    def many(number: int) -> list[list[int]]:
        with server.client() as own:
            return [write(own, topic, *[number] * 3) for _ in range(10)]

    calls = [Background(lambda number=number: many(number)) for number in range(4)]  # type: ignore[misc]  # bound now
    batches = [batch for call in calls for batch in call.result()]
    assert all(batch == list(range(batch[0], batch[0] + 3)) for batch in batches)
    assert sorted(seq for batch in batches for seq in batch) == list(range(1, 121))


# -- requests of one moment ------------------------------------------------------------------------------------------


def at_once(server: LocalServer, *requests: bytes) -> list[Reply]:
    """Sends each request on a connection of its own, so that the server finds all of them at the same time."""
    wires = [Wire(server.port) for _ in requests]
    try:
        for wire in wires:
            assert wire.ask(request("GET", "/v0/health")).status == 200
        with server.held():
            for wire, each in zip(wires, requests, strict=True):
                wire.send(each)
        return [wire.read() for wire in wires]
    finally:
        for wire in wires:
            wire.close()


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_writes_of_one_moment_are_each_whole(
    server: LocalServer, client: httpx.Client, topic: str, durability: str
) -> None:
    client.put(f"/v0/topics/{topic}", json={"durability": durability})
    bodies = [{"records": [{"data": [number, part]} for part in range(number % 4 + 1)]} for number in range(20)]
    path = f"/v0/topics/{topic}"
    replies = at_once(server, *[request("POST", path, json.dumps(body).encode()) for body in bodies])
    stored = {each["$seq"]: each["data"] for each in diff(client, topic)["records"]}
    for number, (body, reply) in enumerate(zip(bodies, replies, strict=True)):
        answer = reply.json()
        assert answer["count"] == len(body["records"])
        assert answer["seqs"] == list(range(answer["first_seq"], answer["last_seq"] + 1))
        assert [stored[seq] for seq in answer["seqs"]] == [[number, part] for part in range(number % 4 + 1)]
        assert answer["head_seq"] >= answer["last_seq"]
    assert len(stored) == sum(len(body["records"]) for body in bodies)


def test_a_bad_write_of_one_moment_spoils_no_other(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, "before")
    path = f"/v0/topics/{topic}"
    good = request("POST", path, record("good"))
    replies = at_once(
        *(server, good, request("POST", path, b'{"records":[]}'), good, request("POST", path, b"{"), good),
        *(request("POST", f"{path}?return_seqs=x", record("bad")), good),
    )
    assert [reply.status for reply in replies] == [200, 400, 200, 400, 200, 400, 200]
    assert datas(client, topic) == ["before"] + ["good"] * 4


def test_plain_and_unusual_writes_of_one_moment_all_arrive(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 0)
    bodies: list[dict[str, Any]] = [
        {"records": [{"data": "plain"}]},
        {"records": [{"data": "tagged", "tag": "t"}]},
        {"records": [{"data": "keyed"}], "idempotency_key": "k"},
        {"records": [{"data": "plain"}]},
        {"records": [{"data": "keyed"}], "idempotency_key": "k"},
        {"records": [{"data": "noded"}], "node": "n"},
        {"records": [{"data": "strict", "client_seq": 1}], "client_id": "c"},
        {"records": [{"hole": 2}]},
        {"records": [{"data": "plain"}]},
    ]
    path = f"/v0/topics/{topic}"
    replies = at_once(server, *[request("POST", path, json.dumps(body).encode()) for body in bodies])
    assert [reply.status for reply in replies] == [200] * len(bodies)
    keyed = [replies[index].json() for index in (2, 4)]
    assert keyed[0]["seqs"] == keyed[1]["seqs"]
    assert sorted(answer["deduped"] for answer in keyed) == [False, True]
    taken = [seq for index, reply in enumerate(replies) if index != 4 for seq in (reply.json()["first_seq"],)]
    assert len(set(taken)) == len(taken)
    assert client.get(path).json()["head_seq"] == 10
    state = client.get(path).json()
    assert (state["count"], state["holes"]) == (8, 1)


@pytest.mark.parametrize("place", [0, 3, 6])
def test_writes_and_a_deletion_of_one_moment_agree(
    server: LocalServer, client: httpx.Client, topic: str, place: int
) -> None:
    write(client, topic, "old")
    path = f"/v0/topics/{topic}"
    requests = [request("POST", path, record(number)) for number in range(6)]
    requests.insert(place, request("DELETE", path))
    replies = at_once(server, *requests)
    deleted = replies.pop(place)
    assert (deleted.status, deleted.json()["deleted"]) == (200, True)
    assert {reply.status for reply in replies} <= {200, 201}
    created = [reply for reply in replies if reply.status == 201]
    assert len(created) <= 1
    if created:
        # Those of the new topic: one made it, and the others of it follow.
        there = diff(client, topic)["records"]
        assert [each["$seq"] for each in there] == list(range(1, len(there) + 1))
        by_data = {each["data"]: each["$seq"] for each in there}
        assert len(by_data) >= 1
        for number, seq in by_data.items():
            assert replies[number].json()["seqs"] == [seq]
    else:
        assert client.get(path).status_code == 404


def test_writes_and_a_new_config_of_one_moment_agree(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, "old")
    path = f"/v0/topics/{topic}"
    requests = [request("POST", path, record(number)) for number in range(6)]
    requests.insert(3, request("PUT", path, b'{"discard":"reject","cap_records":3}'))
    replies = at_once(server, *requests)
    assert replies.pop(3).status == 200
    assert {reply.status for reply in replies} <= {200, 422}
    state = client.get(path).json()
    assert state["count"] <= 3
    accepted = sum(reply.status == 200 for reply in replies)
    assert state["head_seq"] == 1 + accepted


# -- idempotency -----------------------------------------------------------------------------------------------------


def test_a_repeat_answers_the_first_seqs(client: httpx.Client, topic: str) -> None:
    first = post(client, topic, 1, 2, idempotency_key="k")
    again = post(client, topic, "another body", idempotency_key="k")
    assert (first.status_code, again.status_code) == (201, 200)
    body = again.json()
    assert (body["seqs"], body["deduped"], body["created"]) == ([1, 2], True, False)
    assert datas(client, topic) == [1, 2]


def test_the_header_is_an_idempotency_key(client: httpx.Client, topic: str) -> None:
    headers = {"Idempotency-Key": "k"}
    body = {"records": [{"data": 1}]}
    client.post(f"/v0/topics/{topic}", json=body, headers=headers)
    assert client.post(f"/v0/topics/{topic}", json=body, headers=headers).json()["deduped"] is True
    assert post(client, topic, 1, idempotency_key="k").json()["deduped"] is True


def test_the_key_of_the_body_wins(client: httpx.Client, topic: str) -> None:
    body = {"records": [{"data": 1}], "idempotency_key": "body"}
    client.post(f"/v0/topics/{topic}", json=body, headers={"Idempotency-Key": "header"})
    assert post(client, topic, 2, idempotency_key="header").json()["deduped"] is False
    assert post(client, topic, 2, idempotency_key="body").json()["deduped"] is True


def test_a_key_that_is_not_ascii_is_the_same_in_header_and_body(client: httpx.Client, topic: str) -> None:
    post(client, topic, 1, idempotency_key="schlüssel")
    headers = {b"Idempotency-Key": "schlüssel".encode()}
    again = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}]}, headers=headers)
    assert again.json()["deduped"] is True


def test_a_header_that_is_not_utf_8_is_400(client: httpx.Client, topic: str) -> None:
    headers = {b"Idempotency-Key": b"\xff"}
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}]}, headers=headers)
    assert error_of(answer) == (400, "invalid_request")


def test_a_key_has_1_to_256_characters(client: httpx.Client, topic: str) -> None:
    assert post(client, topic, 1, idempotency_key="k" * 256).status_code == 201
    assert error_of(post(client, topic, 1, idempotency_key="k" * 257)) == (400, "invalid_request")
    body = {"records": [{"data": 1}]}
    for key in ("", "k" * 257):
        answer = client.post(f"/v0/topics/{topic}", json=body, headers={"Idempotency-Key": key})
        assert error_of(answer) == (400, "invalid_request")
        assert "dempotency" in answer.json()["error"]["message"]


def test_a_key_belongs_to_its_topic(client: httpx.Client, topic: str) -> None:
    post(client, topic, 1, idempotency_key="k")
    assert post(client, f"{topic}2", 1, idempotency_key="k").json()["deduped"] is False


def test_repeats_at_once_append_one(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"durability": "fsync"})
    calls = [Background(lambda: post(client, topic, 1, idempotency_key="k")) for _ in range(5)]
    bodies = [call.result().json() for call in calls]
    assert [body["seqs"] for body in bodies] == [[1]] * 5
    assert sorted(body["deduped"] for body in bodies) == [False, True, True, True, True]


# -- strict producers ------------------------------------------------------------------------------------------------


def strict(client: httpx.Client, topic: str, *numbers: int) -> httpx.Response:
    records = [{"data": number, "client_seq": number} for number in numbers]
    return client.post(f"/v0/topics/{topic}", json={"client_id": "c", "records": records})


def test_a_strict_producer_goes_up(client: httpx.Client, topic: str) -> None:
    assert strict(client, topic, 1, 2).status_code == 201
    assert strict(client, topic, 7).json()["seqs"] == [3]


def test_an_exact_replay_is_a_conflict_that_tells_its_seqs(client: httpx.Client, topic: str) -> None:
    strict(client, topic, 1, 2)
    answer = strict(client, topic, 1, 2)
    assert error_of(answer) == (409, "idempotency_conflict")
    assert answer.json()["error"]["detail"] == {"last_client_seq": 2, "seqs": [1, 2]}


def test_a_partial_replay_appends_nothing(client: httpx.Client, topic: str) -> None:
    strict(client, topic, 1, 2)
    answer = strict(client, topic, 2, 3)
    assert error_of(answer) == (409, "idempotency_conflict")
    assert answer.json()["error"]["detail"] == {"last_client_seq": 2}
    assert datas(client, topic) == [1, 2]


@pytest.mark.parametrize(
    "body",
    [
        {"client_id": "c", "records": [{"data": 1}]},
        {"client_id": "c", "records": [{"data": 1, "client_seq": 1}, {"data": 1}]},
        {"records": [{"data": 1, "client_seq": 1}]},
        {"client_id": "c", "records": [{"data": 1, "client_seq": 2}, {"data": 1, "client_seq": 1}]},
        {"client_id": "", "records": [{"data": 1, "client_seq": 1}]},
        {"client_id": "c", "records": [{"data": 1, "client_seq": -1}]},
    ],
)
def test_client_seqs_are_for_all_records_and_go_up(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    answer = client.post(f"/v0/topics/{topic}", json=body)
    assert error_of(answer) == (400, "invalid_request")
    assert "client_" in answer.json()["error"]["message"]


# -- full ------------------------------------------------------------------------------------------------------------


def test_an_old_topic_evicts_and_tells(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 2})
    assert write(client, topic, 1, 2, 3) == [1, 2, 3]
    answer = diff(client, topic)
    stone = answer["tombstone"]
    assert (stone["gap_from"], stone["gap_to"], stone["reason"]) == (1, 1, "cap")
    assert [record["data"] for record in answer["records"]] == [2, 3]


@pytest.mark.parametrize(
    ("cap", "records", "code"),
    [
        ({"cap_records": 2}, [1, 2, 3], "batch_too_large"),
        ({"cap_bytes": 4}, ["too long"], "record_too_large"),
        ({"cap_bytes": 4}, [111, 222], "batch_too_large"),
    ],
)
def test_what_could_never_fit_is_400(
    client: httpx.Client, topic: str, cap: dict[str, int], records: list[object], code: str
) -> None:
    client.put(f"/v0/topics/{topic}", json={**cap, "discard": "reject"})
    assert error_of(post(client, topic, *records)) == (400, code)


# -- transactions ----------------------------------------------------------------------------------------------------


def spool(client: httpx.Client, txn: str, topic: str, part: str, chunk: int, *datas: object) -> httpx.Response:
    return post(client, topic, *datas, query=f"?txn={txn}&part={part}&chunk={chunk}")


def commit(client: httpx.Client, txn: str, *parts: tuple[str, dict[str, int]], **fields: Any) -> httpx.Response:
    body = {"parts": [{"part": part, "records": records} for part, records in parts], **fields}
    return client.post(f"/v0/txns/{txn}/commit", json=body)


def test_what_is_spooled_is_invisible(client: httpx.Client, topic: str) -> None:
    write(client, topic, 0)
    answer = spool(client, topic, topic, "p", 0, 1, 2)
    assert answer.status_code == 200
    body = answer.json()
    del body["performance"]
    assert body == {"txn": topic, "topic": topic, "part": "p", "chunk": 0, "count": 2, "repeated": False}
    assert datas(client, topic) == [0]
    assert write(client, topic, 3) == [2]


def test_a_commit_publishes_over_all_topics(client: httpx.Client, topic: str) -> None:
    first, second = f"{topic}.1", f"{topic}.2"
    spool(client, topic, first, "p", 0, "a")
    spool(client, topic, second, "p", 0, "b", "c")
    answer = commit(client, topic, ("p", {first: 1, second: 2}))
    assert answer.status_code == 200
    assert answer.json()["topics"] == {
        first: {"first_seq": 1, "last_seq": 1, "count": 1},
        second: {"first_seq": 1, "last_seq": 2, "count": 2},
    }
    assert answer.json()["deduped"] is False
    assert (datas(client, first), datas(client, second)) == (["a"], ["b", "c"])


def test_parts_are_published_in_the_listed_order_and_others_dropped(client: httpx.Client, topic: str) -> None:
    for part in ("a", "b", "dropped"):
        spool(client, topic, topic, part, 1, f"{part}1")
        spool(client, topic, topic, part, 0, f"{part}0")
    commit(client, topic, ("b", {topic: 2}), ("a", {topic: 2}))
    assert datas(client, topic) == ["b0", "b1", "a0", "a1"]


def test_a_repeated_chunk_is_answered_not_added(client: httpx.Client, topic: str) -> None:
    spool(client, topic, topic, "p", 0, 1)
    assert spool(client, topic, topic, "p", 0, 1).json()["repeated"] is True
    assert commit(client, topic, ("p", {topic: 1})).status_code == 200
    assert datas(client, topic) == [1]


def test_a_txn_tells_what_it_has(client: httpx.Client, topic: str) -> None:
    spool(client, topic, topic, "p", 0, 1, 2)
    body = client.get(f"/v0/txns/{topic}").json()
    assert body["parts"] == {"p": {topic: 2}}
    assert body["txn"] == topic


def test_a_short_part_leaves_the_transaction_open(client: httpx.Client, topic: str) -> None:
    spool(client, topic, topic, "p", 0, 1)
    assert error_of(commit(client, topic, ("p", {topic: 2}))) == (409, "txn_incomplete")
    assert error_of(commit(client, topic, ("q", {topic: 1}))) == (409, "txn_incomplete")
    spool(client, topic, topic, "p", 1, 2)
    assert commit(client, topic, ("p", {topic: 2})).status_code == 200
    assert datas(client, topic) == [1, 2]


def test_a_topic_that_refuses_is_named_and_nothing_is_published(client: httpx.Client, topic: str) -> None:
    full = f"{topic}.full"
    client.put(f"/v0/topics/{full}", json={"cap_records": 1, "discard": "reject"})
    write(client, full, 0)
    spool(client, topic, topic, "p", 0, 1)
    spool(client, topic, full, "p", 0, 1)
    answer = commit(client, topic, ("p", {topic: 1, full: 1}))
    assert error_of(answer) == (422, "topic_full")
    assert full in answer.json()["error"]["message"]
    assert client.get(f"/v0/topics/{topic}").status_code == 404
    client.put(f"/v0/topics/{full}", json={"cap_records": 2})
    assert commit(client, topic, ("p", {topic: 1, full: 1})).status_code == 200


def test_an_aborted_transaction_is_over(client: httpx.Client, topic: str) -> None:
    spool(client, topic, topic, "p", 0, 1)
    assert client.post(f"/v0/txns/{topic}/abort").json()["aborted"] is True
    assert error_of(spool(client, topic, topic, "p", 1, 2)) == (404, "txn_not_found")
    assert error_of(client.get(f"/v0/txns/{topic}")) == (404, "txn_not_found")


def test_a_spool_into_a_committed_transaction_is_404(client: httpx.Client, topic: str) -> None:
    spool(client, topic, topic, "p", 0, 1)
    commit(client, topic, ("p", {topic: 1}))
    assert error_of(spool(client, topic, topic, "p", 1, 2)) == (404, "txn_not_found")


def test_commits_are_deduped_by_client_whatever_the_txn(client: httpx.Client, topic: str) -> None:
    spool(client, f"{topic}.1", topic, "p", 0, 1)
    first = commit(client, f"{topic}.1", ("p", {topic: 1}), client_id=topic, client_seq=1)
    spool(client, f"{topic}.2", topic, "p", 0, 2)
    again = commit(client, f"{topic}.2", ("p", {topic: 1}), client_id=topic, client_seq=1)
    assert again.json()["deduped"] is True
    assert again.json()["topics"] == first.json()["topics"]
    assert error_of(client.get(f"/v0/txns/{topic}.2")) == (404, "txn_not_found")
    lower = commit(client, f"{topic}.3", client_id=topic, client_seq=0)
    assert error_of(lower) == (409, "idempotency_conflict")
    assert lower.json()["error"]["detail"]["last_client_seq"] == 1
    assert datas(client, topic) == [1]


def test_a_commit_of_nothing_is_valid(client: httpx.Client, topic: str) -> None:
    answer = commit(client, topic, client_id=topic, client_seq=1)
    assert (answer.status_code, answer.json()["topics"]) == (200, {})


@pytest.mark.parametrize(
    "body",
    [{}, {"parts": {}}, {"parts": [{"part": "p"}]}, {"parts": [], "client_id": "c"}, {"parts": [], "client_seq": 1}],
)
def test_a_malformed_commit_is_400_and_leaves_the_transaction(
    client: httpx.Client, topic: str, body: dict[str, Any]
) -> None:
    spool(client, topic, topic, "p", 0, 1)
    assert error_of(client.post(f"/v0/txns/{topic}/commit", json=body)) == (400, "invalid_request")
    assert client.get(f"/v0/txns/{topic}").status_code == 200


@pytest.mark.parametrize("query", ["txn=&part=p&chunk=0", "txn=x&part=&chunk=0", "txn=x&part=p&chunk=-1"])
def test_malformed_names_of_a_chunk_are_400(client: httpx.Client, topic: str, query: str) -> None:
    assert error_of(post(client, topic, 1, query=f"?{query}")) == (400, "invalid_request")


def test_an_idle_transaction_is_dropped(tmp_path: Path) -> None:
    limits = Limits(txn_timeout_ms=1)
    with local_server(tmp_path, limits) as server, server.client() as client:
        spool(client, "x", "a", "p", 0, 1)
        spooled = tmp_path / "spool"
        server.wait_until(lambda: not list(spooled.iterdir()), "the end of an idle transaction")
        assert error_of(client.get("/v0/txns/x")) == (404, "txn_not_found")
