"""Queues on the page: who holds what, what became poison, and how it gets out again."""

from __future__ import annotations

from typing import Any

import httpx

from tests.http.server import write
from tests.ui.conftest import ENTER, Page


def poisoned(client: httpx.Client, queue: str, **config: Any) -> None:
    """A queue whose first job was given back twice, and so is set aside."""
    client.put(f"/v0/topics/{queue}", json={"type": "queue", "max_deliveries": 2, **config})
    write(client, queue, *[{"job": number} for number in range(8)])
    for _ in range(2):
        assert client.post(f"/v0/topics/{queue}/claim", json={"node": "w1"}).json()["count"] == 1
        client.post(f"/v0/topics/{queue}/nack", json={"node": "w1", "seqs": [1]})
    claimed = client.post(f"/v0/topics/{queue}/claim", json={"node": "w2", "max": 3}).json()["claimed"]
    assert [job["$seq"] for job in claimed] == [2, 3, 4]
    client.post(f"/v0/topics/{queue}/ack", json={"node": "w2", "seqs": [3]})


def state(client: httpx.Client, queue: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v0/topics/{queue}?touch=false").json()["queue"]
    return found


def test_a_poison_job_is_shown_and_unblocked(page: Page, client: httpx.Client, topic: str) -> None:
    poisoned(client, topic, dlq_strategy="block")
    page.open(f"topics/{topic}")
    page.see(".poison", "1 poison job is set aside")
    counts = dict(zip(page.texts(".queue .tiles span"), page.texts(".queue .tiles b"), strict=True))
    assert counts == {
        "ready": "4",
        "in flight": "2",
        "delayed": "0",
        "blocked": "1",
        "dead-lettered": "0",
        "lost": "0",
    }
    rows = [row.text for row in page.all(".leases tbody tr")]
    assert rows[0].startswith("1 blocked")
    assert "2 of 2" in rows[0]
    assert rows[1].startswith("2 in flight w2 in ")
    # The jobs stand on the axis, and so does what is acked.
    assert page.ranges() == [(1, 2, "live"), (3, 3, "deleted"), (4, 8, "live")]
    page.until(lambda: len(page.all(".axis .job")) == 3, "jobs on the axis")
    assert len(page.all(".axis .job.blocked")) == 1
    page.see(".axis", "ack floor 0")
    page.see(".legend", "acked or deleted")
    page.shoot("queue")
    page.click(".leases button", "Unblock")
    page.see("#toasts", "1 back in line")
    page.until(lambda: state(client, topic)["blocked"] == 0, "an unblocked job")
    page.until(lambda: not page.all(".leases .tag.blocked"), "no blocked row")


def test_a_button_stays_while_numbers_change(page: Page, client: httpx.Client, topic: str) -> None:
    """The page looks every second: who is about to press something must not lose it."""
    poisoned(client, topic, dlq_strategy="block")
    page.open(f"topics/{topic}")
    button = page.find(".leases button")
    page.run("arguments[0].focus()", button)
    times = page.text(".leases tr[data-seq='2'] td:nth-child(4)")
    page.until(lambda: page.text(".leases tr[data-seq='2'] td:nth-child(4)") != times, "another second")
    write(client, topic, "more")
    page.see(".queue [data-field=ready] b", "5")
    assert page.driver.switch_to.active_element == button
    page.press(ENTER)
    page.until(lambda: state(client, topic)["blocked"] == 0, "an unblocked job")


def test_dead_letters_are_redriven(page: Page, client: httpx.Client, topic: str) -> None:
    dead = f"{topic}.dead"
    poisoned(client, topic, dead_letter=dead)
    page.open(f"topics/{topic}")
    page.see(".poison", "1 dead letter", dead)
    page.click(".poison a", dead)
    page.see("h1", dead)
    page.see(".poison", "Jobs that became poison elsewhere come here")
    page.shoot("dead-letters")
    page.click(".poison .redrive", "Redrive 1")
    page.see("#toasts", "1 moved back")
    page.until(lambda: client.get(f"/v0/topics/{dead}").json()["count"] == 0, "an empty dead-letter topic")
    assert state(client, topic)["ready"] == 5


def test_a_job_is_claimed_extended_given_back_and_acked(page: Page, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"type": "queue"})
    write(client, topic, {"mail": "a@example"})
    page.open(f"topics/{topic}")
    page.click(".try button", "Claim")
    page.see(".held", '{"mail":"a@example"}', "delivery 1")
    page.see(".leases tbody", "in flight", "page")
    page.click(".held button", "Extend")
    page.see("#toasts", "1 is held longer")
    page.click(".held button", "Nack")
    page.see("#toasts", "1 is back in line")
    page.gone(".held li")
    page.click(".try button", "Claim")
    page.see(".held", "delivery 2")
    page.click(".held button", "Ack")
    page.see("#toasts", "1 is done")
    assert client.get(f"/v0/topics/{topic}").json()["count"] == 0
    page.click(".try button", "Claim")
    page.see("#toasts", "Nothing is ready")


def test_jobs_that_a_cap_took_are_counted_as_lost(page: Page, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"type": "queue", "cap_records": 5})
    write(client, topic, *range(9))
    page.open(f"topics/{topic}")
    page.see(".queue [data-field=lost].bad", "4")
    page.until(lambda: page.ranges() == [(1, 4, "cap"), (5, 9, "live")], "the loss")
