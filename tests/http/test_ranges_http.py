"""`/v0/topics/:t/ranges`: what became of every seq, over the wire."""

from __future__ import annotations

import time

import httpx

from tests.http.server import error_of, write


def test_ranges_tell_the_fate_of_every_seq(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 3})
    write(client, topic, 1, 2, 3, 4)
    client.post(f"/v0/topics/{topic}", json={"records": [{"hole": 2, "reason": "source_trim"}, {"data": 7}]})
    body = client.get(f"/v0/topics/{topic}/ranges").json()
    assert body["ranges"] == [
        {"first": 1, "last": 2, "kind": "evicted", "reason": "cap"},
        {"first": 3, "last": 4, "kind": "live"},
        {"first": 5, "last": 6, "kind": "hole", "reason": "source_trim"},
        {"first": 7, "last": 7, "kind": "live"},
    ]
    assert set(body) == {
        *("topic", "epoch", "seq_base", "ranges", "next_from_seq", "complete", "head_seq", "earliest_seq"),
        *("evict_floor", "performance"),
    }
    marks = ("topic", "seq_base", "next_from_seq", "complete", "head_seq", "earliest_seq", "evict_floor")
    assert [body[mark] for mark in marks] == [topic, 1, 7, True, 7, 3, 3]


def test_what_is_left_out_is_said(client: httpx.Client, topic: str) -> None:
    records = [{"data": n, "tag": "gone" if n % 2 else "kept"} for n in range(1, 11)]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "gone"})
    first = client.get(f"/v0/topics/{topic}/ranges", params={"limit": 4}).json()
    assert (len(first["ranges"]), first["next_from_seq"], first["complete"]) == (4, 4, False)
    rest = client.get(f"/v0/topics/{topic}/ranges", params={"from_seq": 4, "to_seq": 10, "limit": 99}).json()
    assert (len(rest["ranges"]), rest["ranges"][0]["first"], rest["complete"]) == (6, 5, True)


def test_a_queue_that_is_worked_out_of_order(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"type": "queue"})
    write(client, topic, *range(5))
    client.post(f"/v0/topics/{topic}/claim", json={"node": "w", "max": 5})
    client.post(f"/v0/topics/{topic}/ack", json={"node": "w", "seqs": [2, 3]})
    kinds = [(r["first"], r["last"], r["kind"]) for r in client.get(f"/v0/topics/{topic}/ranges").json()["ranges"]]
    assert kinds == [(1, 1, "live"), (2, 3, "deleted"), (4, 5, "live")]


def test_refusals(client: httpx.Client, topic: str) -> None:
    assert error_of(client.get(f"/v0/topics/{topic}/ranges")) == (404, "topic_not_found")
    write(client, topic, 1)
    for query in ("from_seq=-1", "from_seq=x", f"from_seq={2**53}", "to_seq=", "limit=1.5"):
        assert error_of(client.get(f"/v0/topics/{topic}/ranges?{query}")) == (400, "invalid_request"), query


def test_a_log_that_is_full_of_small_deletions_answers_soon(client: httpx.Client, topic: str) -> None:
    for _ in range(10):
        records = [{"data": n, "tag": "gone" if n % 2 else "kept"} for n in range(10_000)]
        client.post(f"/v0/topics/{topic}?return_seqs=false", json={"records": records})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "gone"})
    started = time.perf_counter()
    body = client.get(f"/v0/topics/{topic}/ranges").json()
    assert time.perf_counter() - started < 2
    assert (len(body["ranges"]), body["complete"], body["next_from_seq"]) == (1000, False, 1000)
