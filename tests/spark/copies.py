"""Numbered records, and what a copy of them must be. A record's `data` has its own seq, and a copied loss is a hole of
the same length: in a copy that has everything once, each record stands again at the seq that it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from tests.http.server import diff

# What the servers of these tests take in one write: a task's part is several chunks, with few records.
MAX_BATCH = 40


def make(client: httpx.Client, topic: str, **config: Any) -> None:
    answer = client.put(f"/v0/topics/{topic}", json=config)
    assert answer.status_code in (200, 201), answer.text


def fill(client: httpx.Client, topic: str, count: int) -> None:
    """Appends numbered records behind those that are there."""
    first = state(client, topic)["next_seq"]
    for start in range(first, first + count, MAX_BATCH):
        numbers = range(start, min(start + MAX_BATCH, first + count))
        answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": {"n": number}} for number in numbers]})
        assert answer.status_code in (200, 201), answer.text
        assert answer.json()["seqs"] == list(numbers)


def state(client: httpx.Client, topic: str) -> dict[str, Any]:
    answer = client.get(f"/v0/topics/{topic}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def entries(client: httpx.Client, topic: str) -> Iterator[tuple[int, int, int | None]]:
    """Everything that a topic tells, in its order: (first seq, last seq, number), the number None for a loss."""
    cursor, is_caught_up = 0, False
    while not is_caught_up:
        answer = diff(client, topic, from_seq=cursor, limit=1000)
        gap = answer["tombstone"]
        if gap is not None:
            yield gap["gap_from"], gap["gap_to"], None
        for record in answer["records"]:
            yield record["$seq"], record["$seq"], record["data"]["n"]
        cursor, is_caught_up = answer["next_from_seq"], answer["caught_up"]


def losses_of_copy(client: httpx.Client, topic: str, head: int) -> list[tuple[int, int]]:
    """Checks that a copy has each seq up to `head` once, as the record of that number or as a loss; returns the losses,
    those that touch as one."""
    losses: list[tuple[int, int]] = []
    expected = 1
    for first, last, number in entries(client, topic):
        assert first == expected, f"{topic}: seq {first} follows {expected - 1}"
        assert number is None or number == first, f"{topic}: the record of number {number} stands at seq {first}"
        expected = last + 1
        if number is None:
            touches = bool(losses) and losses[-1][1] == first - 1
            losses[-1:] = [(losses[-1][0], last)] if touches else [*losses[-1:], (first, last)]
    assert expected == head + 1, f"{topic} ends at {expected - 1}, its source at {head}"
    return losses
