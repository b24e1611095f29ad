"""Topics to bring into a lake, and what must be found there: the log's own account is the model."""

from __future__ import annotations

from typing import Any

import httpx

from tests.http.server import diff
from topics.pipelines import ledger
from topics.pipelines.reading import Account


def put(client: httpx.Client, topic: str, **config: Any) -> None:
    answer = client.put(f"/v0/topics/{topic}", json=config)
    assert answer.status_code in (200, 201), answer.text


def append(client: httpx.Client, topic: str, count: int, tags: int = 0) -> None:
    """Records that name their own seq; with `tags` they have that many tags in turn."""
    known = client.get(f"/v0/topics/{topic}")
    first = known.json()["next_seq"] if known.status_code == 200 else 1
    for start in range(first, first + count, 5000):
        records = [
            {"data": {"n": number}, **({"tag": f"t{number % tags}"} if tags else {})}
            for number in range(start, min(start + 5000, first + count))
        ]
        answer = client.post(f"/v0/topics/{topic}", json={"records": records})
        assert answer.status_code in (200, 201), answer.text


def delete(client: httpx.Client, topic: str, **what: Any) -> int:
    answer = client.post(f"/v0/topics/{topic}/delete", json=what)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["deleted"])


def state(client: httpx.Client, topic: str) -> dict[str, Any]:
    answer = client.get(f"/v0/topics/{topic}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def told(client: httpx.Client, topic: str) -> tuple[list[int], list[tuple[int, int, str]]]:
    """The seqs of the records of a topic, and its losses."""
    seqs: list[int] = []
    losses: list[tuple[int, int, str]] = []
    cursor, is_caught_up = 0, False
    while not is_caught_up:
        answer = diff(client, topic, from_seq=cursor, limit=1000)
        gap = answer["tombstone"]
        if gap is not None:
            losses.append((gap["gap_from"], gap["gap_to"], gap["reason"]))
        seqs += [record["$seq"] for record in answer["records"]]
        cursor, is_caught_up = answer["next_from_seq"], answer["caught_up"]
    return seqs, losses


def datas(client: httpx.Client, topic: str) -> list[Any]:
    """All that a topic has, in its order: `data` of a record, and the length of a hole."""
    found: list[Any] = []
    cursor, is_caught_up = 0, False
    while not is_caught_up:
        answer = diff(client, topic, from_seq=cursor, limit=1000)
        gap = answer["tombstone"]
        if gap is not None:
            found.append(("hole", gap["gap_to"] - gap["gap_from"] + 1))
        found += [record["data"] for record in answer["records"]]
        cursor, is_caught_up = answer["next_from_seq"], answer["caught_up"]
    return found


def fates(root: str, topic: str) -> list[tuple[int, int, str]]:
    return [(each.first, each.last, each.reason or each.what) for each in ledger(root, topic=topic)]


def accounts(root: str, topic: str) -> list[Account]:
    return ledger(root, topic=topic)
