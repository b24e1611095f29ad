"""Section 2 over the wire: create, change, look, list and delete topics."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from tests.http.server import Background, LocalServer, datas, diff, error_of, write
from tests.http.test_conventions import TOPIC_FIELDS

DEFAULTS: dict[str, Any] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durability": "disk",
    "durable": False,
    "seq_base": 1,
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "dlq_strategy": "skip",
    "ordering_required": False,
    "max_ack_holes": 0,
    "max_in_flight": 0,
    "leases_durable": None,
}


def test_put_creates_with_201_and_every_default(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/topics/{topic}", json={})
    assert answer.status_code == 201
    body = answer.json()
    assert (body["topic"], body["created"], body["config"]) == (topic, True, DEFAULTS)
    assert set(body) == {"topic", "created", "config", "performance"}


def test_put_again_is_200_and_changes_only_what_is_sent(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"ttl_ms": 60_000, "cap_records": 5})
    answer = client.put(f"/v0/topics/{topic}", json={"cap_records": 7})
    assert answer.status_code == 200
    assert answer.json()["created"] is False
    assert answer.json()["config"] == {**DEFAULTS, "ttl_ms": 60_000, "cap_records": 7}


@pytest.mark.parametrize(
    ("sent", "resolved"),
    [
        ({"durable": True}, {"durability": "fsync", "durable": True}),
        ({"durable": False}, {"durability": "disk"}),
        ({"durable": True, "durability": "memory"}, {"durability": "memory"}),
        ({"durability": "fsync"}, {"durability": "fsync", "durable": True}),
        ({"type": "queue", "lease_ms": 1}, {"type": "queue", "lease_ms": 100}),
        ({"visibility_timeout_ms": 10**9}, {"lease_ms": 86_400_000}),
        ({"claim_jitter_ms": 9000}, {"claim_jitter_ms": 5000}),
        ({"max_delivery_attempts": 3}, {"max_deliveries": 3}),
        ({"ordering_required": True}, {"ordering_required": True, "dlq_strategy": "block"}),
        ({"priority": -5, "auto_priority": False}, {"priority": -5, "auto_priority": False}),
    ],
)
def test_config_is_echoed_whole_and_resolved(
    client: httpx.Client, topic: str, sent: dict[str, Any], resolved: dict[str, Any]
) -> None:
    whole = {**DEFAULTS, **resolved}
    assert client.put(f"/v0/topics/{topic}", json=sent).json()["config"] == whole
    assert client.get(f"/v0/topics/{topic}").json()["config"] == whole


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"ttl_ms": -1}, "ttl_ms"),
        ({"ttl_ms": 1.5}, "ttl_ms"),
        ({"cap_records": "5"}, "cap_records"),
        ({"discard": "none"}, "discard"),
        ({"durability": "tape"}, "durability"),
        ({"type": "stack"}, "type"),
        ({"seq_base": 0}, "seq_base"),
        ({"seq_base": 2**53}, "seq_base"),
        ({"dedupe_node": None}, "dedupe_node"),
        ({"type": "queue", "dlq_strategy": "block_and_dlq"}, "dead_letter"),
        ({"type": "queue", "ordering_required": True, "dlq_strategy": "skip"}, "dlq_strategy"),
        ({"type": "queue", "dead_letter": "no/name"}, "dead_letter"),
    ],
)
def test_a_config_that_cannot_be_is_400_and_makes_nothing(
    client: httpx.Client, topic: str, patch: dict[str, Any], field: str
) -> None:
    answer = client.put(f"/v0/topics/{topic}", json=patch)
    assert error_of(answer) == (400, "invalid_request")
    assert field in answer.json()["error"]["message"]
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_a_topic_is_not_its_own_dead_letter(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/topics/{topic}", json={"type": "queue", "dead_letter": topic})
    assert error_of(answer) == (400, "invalid_request")


def test_a_tightened_cap_takes_effect_at_once(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3)
    client.put(f"/v0/topics/{topic}", json={"cap_records": 1})
    state = client.get(f"/v0/topics/{topic}").json()
    assert (state["count"], state["earliest_seq"], state["evict_floor"]) == (1, 3, 3)


def test_get_shows_every_field(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"seq_base": 100})
    empty = client.get(f"/v0/topics/{topic}").json()
    assert set(empty) == TOPIC_FIELDS | {"performance"}
    assert (empty["head_seq"], empty["next_seq"], empty["earliest_seq"], empty["evict_floor"]) == (99, 100, 100, 100)
    assert empty["last_write_ts"] is None
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": "ab", "meta": {"a": "b"}}, {"data": 1}]})
    state = client.get(f"/v0/topics/{topic}").json()
    assert (state["head_seq"], state["next_seq"], state["count"], state["holes"]) == (101, 102, 2, 0)
    assert state["bytes"] == len('"ab"') + len('{"a":"b"}') + 1
    assert state["last_write_ts"] > 0


def test_get_moves_the_recency_clock_unless_told_not_to(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    assert client.get(f"/v0/topics/{topic}?touch=false").json()["last_read_ts"] is None
    assert client.get(f"/v0/topics/{topic}?touch=false").json()["last_read_ts"] is None
    client.get(f"/v0/topics/{topic}")
    assert client.get(f"/v0/topics/{topic}?touch=false").json()["last_read_ts"] > 0


def test_a_flag_that_is_neither_true_nor_false_is_400(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    for method, query in (("GET", "touch=maybe"), ("DELETE", "if_empty="), ("DELETE", "if_empty=yes")):
        answer = client.request(method, f"/v0/topics/{topic}?{query}")
        assert error_of(answer) == (400, "invalid_request")
    assert datas(client, topic) == [1]


def test_get_never_creates(client: httpx.Client, topic: str) -> None:
    client.get(f"/v0/topics/{topic}")
    client.post(f"/v0/topics/{topic}/diff", json={})
    assert client.get(f"/v0/topics/{topic}").status_code == 404


# -- lists -----------------------------------------------------------------------------------------------------------


def names(client: httpx.Client, **query: Any) -> list[str]:
    answer = client.get("/v0/topics", params=query)
    assert answer.status_code == 200, answer.text
    return [each["topic"] for each in answer.json()["topics"]]


def test_the_list_is_sorted_by_name_and_filtered_by_prefix(client: httpx.Client, topic: str) -> None:
    for name in ("b", "a", "B", "a.b", "a-b"):
        client.put(f"/v0/topics/{topic}.{name}")
    client.put(f"/v0/topics/z{topic}")
    assert names(client, prefix=f"{topic}.") == [f"{topic}.{name}" for name in ("B", "a", "a-b", "a.b", "b")]


def test_a_summary_has_what_get_has(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    [summary] = client.get("/v0/topics", params={"prefix": topic}).json()["topics"]
    assert set(summary) >= {"topic", "type", "head_seq", "earliest_seq", "count", "bytes", "epoch", "config"}
    assert summary["head_seq"] == 1


def test_pages_are_cut_and_go_on_at_their_cursor(client: httpx.Client, topic: str) -> None:
    for number in range(5):
        client.put(f"/v0/topics/{topic}.{number}")
    seen: list[str] = []
    cursor: dict[str, Any] = {}
    pages = 0
    while True:
        body = client.get("/v0/topics", params={"prefix": f"{topic}.", "page_size": 2, **cursor}).json()
        seen += [each["topic"] for each in body["topics"]]
        pages += 1
        if "next_cursor" not in body:
            break
        base64.b64decode(body["next_cursor"], altchars=b"-_", validate=True)
        cursor = {"cursor": body["next_cursor"]}
    assert seen == [f"{topic}.{number}" for number in range(5)]
    assert pages == 3


def test_a_full_last_page_has_no_cursor(client: httpx.Client, topic: str) -> None:
    for number in range(2):
        client.put(f"/v0/topics/{topic}.{number}")
    body = client.get("/v0/topics", params={"prefix": f"{topic}.", "page_size": 2}).json()
    assert len(body["topics"]) == 2
    assert "next_cursor" not in body


def test_a_cursor_survives_topics_that_come_and_go(client: httpx.Client, topic: str) -> None:
    for number in range(4):
        client.put(f"/v0/topics/{topic}.{number}")
    body = client.get("/v0/topics", params={"prefix": f"{topic}.", "page_size": 2}).json()
    client.delete(f"/v0/topics/{topic}.1")
    client.put(f"/v0/topics/{topic}.15")
    rest = names(client, prefix=f"{topic}.", cursor=body["next_cursor"])
    assert rest == [f"{topic}.15", f"{topic}.2", f"{topic}.3"]


def test_page_size_is_clamped_to_1000(client: httpx.Client) -> None:
    assert client.get("/v0/topics?page_size=100000").status_code == 200


@pytest.mark.parametrize("query", ["cursor=%25", "cursor=abc", "cursor=", "page_size=0", "page_size=-1", "page_size=x"])
def test_a_corrupt_cursor_or_page_size_is_400(client: httpx.Client, query: str) -> None:
    assert error_of(client.get(f"/v0/topics?{query}")) == (400, "invalid_request")


# -- deletion --------------------------------------------------------------------------------------------------------


def test_delete_takes_everything_and_says_so(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = client.delete(f"/v0/topics/{topic}")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["deleted"], body["routers_removed"]) == (True, 0)
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_delete_of_what_is_not_there_is_200(client: httpx.Client, topic: str) -> None:
    answer = client.delete(f"/v0/topics/{topic}")
    assert (answer.status_code, answer.json()["deleted"]) == (200, False)


def test_delete_if_empty_takes_an_empty_topic(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    assert client.delete(f"/v0/topics/{topic}?if_empty=true").json()["deleted"] is True


def test_a_topic_made_again_has_another_epoch_and_its_readers_are_told(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3)
    first = diff(client, topic)
    client.delete(f"/v0/topics/{topic}")
    write(client, topic, "new")
    answer = diff(client, topic, from_seq=first["next_from_seq"], epoch=first["epoch"])
    assert answer["epoch"] != first["epoch"]
    stone = answer["tombstone"]
    assert (stone["reason"], stone["gap_from"], stone["gap_to"]) == ("recreated", 1, 1)
    assert [record["data"] for record in answer["records"]] == ["new"]


def test_records_are_deleted_by_seq_and_by_tag(client: httpx.Client, topic: str) -> None:
    records = [{"data": number, "tag": tag} for number, tag in enumerate(["a", "b", "ab", "c"], 1)]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    path = f"/v0/topics/{topic}/delete"
    answer = client.post(path, json={"match": ["tag", "Glob", "a*"]}).json()
    assert answer.pop("performance")["server_total_ms"] >= 0
    assert answer == {"topic": topic, "deleted": 2, "earliest_seq": 2, "head_seq": 4, "count": 2, "bytes": 2}
    assert client.post(path, json={"match": "zzz"}).json()["deleted"] == 0
    assert client.post(path, json={"before_seq": 3, "match": ["tag", "Eq", "b"]}).json()["deleted"] == 1
    assert datas(client, topic) == [4]
    assert diff(client, topic)["tombstone"] is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"before_seq": -1},
        {"before_seq": "1"},
        {"match": ["tag", "Like", "x"]},
        {"match": ["tag", "Glob", "*x"]},
        {"match": 5},
        {"before_seq": 1, "purpose": "fun"},
        {"before_seq": 2**60},
    ],
)
def test_a_deletion_that_says_nothing_clear_is_400(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    write(client, topic, 1)
    assert error_of(client.post(f"/v0/topics/{topic}/delete", json=body)) == (400, "invalid_request")
    assert datas(client, topic) == [1]


def test_past_deletes_are_listed(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3)
    client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 2})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "x", "purpose": "trim"})
    body = client.get(f"/v0/topics/{topic}/deletes").json()
    first, second = body["deletes"]
    assert (first["id"], first["before_seq"], first["purpose"], first["head_seq"]) == (1, 2, "erase", 3)
    assert (second["id"], second["match"], second["purpose"]) == (2, ["tag", "Eq", "x"], "trim")
    assert first["ts"] > 0
    assert (body["last_id"], body["complete"]) == (2, True)
    [only] = client.get(f"/v0/topics/{topic}/deletes?after=1").json()["deletes"]
    assert only["id"] == 2
    assert error_of(client.get(f"/v0/topics/{topic}/deletes?after=x")) == (400, "invalid_request")


def test_two_creations_at_once_make_one_topic(server: LocalServer, client: httpx.Client, topic: str) -> None:
    calls = [Background(lambda: client.put(f"/v0/topics/{topic}")) for _ in range(4)]
    assert sorted(call.result().status_code for call in calls) == [200, 200, 200, 201]
