"""Queues over real sockets: answers, refusals, waiting, cohorts, work streams, scopes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.http.conftest import client, server, topic
from tests.http.server import DEADLINE, Background, LocalServer, datas, error_of, local_server, write
from tests.http.wire import Reply, Wire, request
from topics.core.limits import Limits
from topics.http.queues import shares

__all__ = ["client", "server", "topic"]  # fixtures

# Longer than any test takes.
LONG = 25_000


def queue(client: httpx.Client, name: str, *jobs: object, **config: Any) -> None:
    answer = client.put(f"/v0/topics/{name}", json={"type": "queue", **config})
    assert answer.status_code == 201, answer.text
    if jobs:
        write(client, name, *jobs)


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v0/topics/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def claim(client: httpx.Client, name: str, **body: Any) -> dict[str, Any]:
    return post(client, f"{name}/claim", **{"node": "a", **body})


def claimed(client: httpx.Client, name: str, **body: Any) -> list[int]:
    return [job["$seq"] for job in claim(client, name, **body)["claimed"]]


def queue_state(client: httpx.Client, name: str) -> dict[str, Any]:
    state: dict[str, Any] = client.get(f"/v0/topics/{name}").json()["queue"]
    return state


# -- answers ---------------------------------------------------------------------------------------------------------


def test_a_claim_answers_with_everything_that_the_contract_names(client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    client.post(
        f"/v0/topics/{topic}",
        json={"records": [{"data": [1], "tag": "t", "node": "n", "meta": {"k": "v"}}, {"data": 2}]},
    )
    body = claim(client, topic, max=2, lease_ms=5000)
    assert set(body) == {"topic", "claimed", "lease_id", "count", "ready", "lost", "tombstone", "performance"}
    assert (body["count"], body["ready"], body["lost"], body["tombstone"]) == (2, 0, 0, None)
    first, second = body["claimed"]
    assert set(first) == {"$seq", "lease_id", "deadline", "deliveries", "$ts", "$tag", "$node", "data", "meta"}
    assert set(second) == {"$seq", "lease_id", "deadline", "deliveries", "$ts", "data"}
    assert (first["$seq"], first["$tag"], first["$node"], first["data"], first["meta"]) == (
        1,
        "t",
        "n",
        [1],
        {"k": "v"},
    )
    assert first["lease_id"] == second["lease_id"] == body["lease_id"]
    assert body["lease_id"].startswith("lease_")
    assert first["deliveries"] == 1
    assert 0 <= first["deadline"] - first["$ts"] - 5000 < DEADLINE * 1000


def test_a_claim_of_nothing_answers_with_nothing(client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    body = claim(client, topic)
    assert (body["claimed"], body["lease_id"], body["count"], body["ready"]) == ([], None, 0, 0)


def test_a_claim_tells_what_was_lost(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3, cap_records=1)
    body = claim(client, topic)
    assert body["lost"] == 2
    stone = body["tombstone"]
    assert (stone["gap_from"], stone["gap_to"], stone["reason"]) == (1, 2, "cap")
    assert set(stone) == {"gap_from", "gap_to", "reason", "missed_estimate", "earliest_seq", "head_seq"}


def test_an_ack_answers_with_what_became_of_each_job(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3)
    claim(client, topic, max=2)
    body = post(client, f"{topic}/ack", node="a", seqs=[1, 3])
    del body["performance"]
    assert body == {
        "topic": topic,
        "acked": 1,
        "skipped": 1,
        "acked_seqs": [1],
        "skipped_seqs": [3],
        "ready": 1,
        "in_flight": 1,
    }


def test_a_nack_answers_with_what_became_of_each_job(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3)
    claim(client, topic, max=2)
    body = post(client, f"{topic}/nack", node="a", seqs=[1, 3], delay_ms=60_000)
    del body["performance"]
    assert body == {
        "topic": topic,
        "nacked": 1,
        "skipped": 1,
        "nacked_seqs": [1],
        "skipped_seqs": [3],
        "ready": 1,
        "in_flight": 1,
    }
    assert queue_state(client, topic)["delayed"] == 1


def test_an_extend_answers_with_the_deadlines(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2)
    job = claim(client, topic, lease_ms=5000)["claimed"][0]
    body = post(client, f"{topic}/extend", node="a", seqs=[1, 2], lease_ms=60_000)
    assert (body["extended"], body["skipped"], body["extended_seqs"], body["skipped_seqs"]) == (1, 1, [1], [2])
    assert list(body["deadlines"]) == ["1"]
    assert body["deadlines"]["1"] >= job["$ts"] + 60_000
    assert (body["ready"], body["in_flight"]) == (1, 1)


def test_an_unblock_answers_with_what_became_of_each_job(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, max_deliveries=1, dlq_strategy="block")
    claim(client, topic)
    post(client, f"{topic}/nack", node="a", seqs=[1])
    assert claimed(client, topic) == []
    body = post(client, f"{topic}/unblock", seqs=[1, 2])
    assert (body["unblocked"], body["skipped"], body["unblocked_seqs"], body["skipped_seqs"]) == (1, 1, [1], [2])


def test_a_redrive_answers_with_what_it_moved(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, max_deliveries=1, dead_letter=f"{topic}.dead")
    claim(client, topic)
    post(client, f"{topic}/nack", node="a", seqs=[1])
    assert claimed(client, topic) == []
    assert datas(client, f"{topic}.dead") == [1]
    body = post(client, f"{topic}.dead/redrive", max=5)
    del body["performance"]
    assert body == {"topic": f"{topic}.dead", "moved": 1, "unblocked": 0, "skipped": 0, "ready": 0}
    assert datas(client, topic) == [1]


def test_a_claim_that_routed_poison_is_answered_when_the_dead_letter_is_there(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(5), max_deliveries=1, dead_letter=f"{topic}.dead")
    post(client, f"{topic}/nack", lease_id=claim(client, topic, max=5)["lease_id"])
    assert claimed(client, topic) == []
    assert queue_state(client, topic)["dead_lettered"] == 5
    assert datas(client, f"{topic}.dead") == [0, 1, 2, 3, 4]


def test_a_lease_is_acked_by_its_id_alone(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2)
    lease = claim(client, topic, max=2)["lease_id"]
    assert post(client, f"{topic}/ack", lease_id=lease)["acked_seqs"] == [1, 2]


def test_the_leases_of_a_queue_are_listed(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2)
    job = claim(client, topic)["claimed"][0]
    body = client.get(f"/v0/topics/{topic}/leases").json()
    (lease,) = body["leases"]
    assert body["total"] == 1
    assert lease["$seq"] == 1
    assert (lease["node"], lease["lease_id"], lease["deadline"]) == ("a", job["lease_id"], job["deadline"])
    assert (lease["deliveries"], lease["state"]) == (1, "in_flight")


def test_the_leases_of_a_queue_come_in_pages(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(5))
    claim(client, topic, max=5)
    seqs: list[int] = []
    for _ in range(5):
        page = client.get(f"/v0/topics/{topic}/leases?page_size=2&after={seqs[-1] if seqs else 0}").json()["leases"]
        seqs += [lease["$seq"] for lease in page]
        assert len(page) <= 2
    assert seqs == [1, 2, 3, 4, 5]


def test_the_state_of_a_queue_has_everything_that_the_contract_names(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    assert set(queue_state(client, topic)) == {
        *("ready", "in_flight", "delayed", "blocked", "dead_lettered", "lost", "ack_floor", "ack_holes"),
        "oldest_ready_ts",
    }


def test_a_queue_can_be_read_with_diff(client: httpx.Client, topic: str) -> None:
    queue(client, topic, "x", "y")
    claim(client, topic)
    assert datas(client, topic) == ["x", "y"]
    post(client, f"{topic}/ack", node="a", seqs=[1])
    assert datas(client, topic) == ["y"]


def test_a_producer_that_resends_doubles_no_job(client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    body = {"client_id": "maker", "records": [{"data": n, "client_seq": n} for n in (1, 2)]}
    assert client.post(f"/v0/topics/{topic}", json=body).status_code == 200
    again = client.post(f"/v0/topics/{topic}", json=body)
    assert error_of(again) == (409, "idempotency_conflict")
    assert again.json()["error"]["detail"] == {"last_client_seq": 2, "seqs": [1, 2]}
    assert queue_state(client, topic)["ready"] == 2


def test_the_routes_of_queues_are_described(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    found = {path.rsplit("/", 1)[1]: set(methods) for path, methods in paths.items()}
    for verb in ("claim", "ack", "nack", "extend", "unblock", "redrive"):
        assert "post" in found[verb]
    for verb in ("work", "leases"):
        assert "get" in found[verb]


@pytest.mark.parametrize(
    ("verb", "status"), [("claim", "429"), ("redrive", "422"), ("redrive", "403"), ("work", "409")]
)
def test_the_refusals_of_queues_are_described(client: httpx.Client, verb: str, status: str) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    (methods,) = [methods for path, methods in paths.items() if path.endswith(f"/{verb}")]
    (described,) = [one for name, one in methods.items() if name in ("get", "post")]
    assert status in described["responses"]


# -- refusals --------------------------------------------------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    "claim": {"node": "a"},
    "ack": {"node": "a", "seqs": [1]},
    "nack": {"node": "a", "seqs": [1]},
    "extend": {"node": "a", "seqs": [1]},
    "unblock": {"seqs": [1]},
    "redrive": {"max": 1},
}
STREAM = {"accept": "text/event-stream"}


def ask(client: httpx.Client, name: str, verb: str, **headers: str) -> httpx.Response:
    if verb == "leases":
        return client.get(f"/v0/topics/{name}/leases", headers=headers)
    if verb == "work":
        return client.get(f"/v0/topics/{name}/work?node=a", headers={**STREAM, **headers})
    return client.post(f"/v0/topics/{name}/{verb}", json=BODIES[verb], headers=headers)


@pytest.mark.parametrize("verb", [*BODIES, "leases", "work"])
def test_on_a_log_every_verb_is_a_conflict(client: httpx.Client, topic: str, verb: str) -> None:
    client.put(f"/v0/topics/{topic}", json={})
    assert error_of(ask(client, topic, verb)) == (409, "not_a_queue")


@pytest.mark.parametrize("verb", [*BODIES, "leases", "work"])
def test_on_an_absent_topic_every_verb_is_not_found(client: httpx.Client, topic: str, verb: str) -> None:
    assert error_of(ask(client, topic, verb)) == (404, "topic_not_found")


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("claim", {}, "node"),
        ("claim", {"node": ""}, "node"),
        ("claim", {"node": "a", "max": 0}, "max"),
        ("claim", {"node": "a", "max": "2"}, "max"),
        ("claim", {"node": "a", "lease_ms": -1}, "lease_ms"),
        ("claim", {"node": "a", "wait_ms": -1}, "wait_ms"),
        ("claim", {"node": "n" * 129}, "node"),
        ("ack", {"seqs": [1]}, "node"),
        ("ack", {"node": "a"}, "seqs"),
        ("ack", {"node": "a", "seqs": [1], "lease_ids": []}, "lease_ids"),
        ("ack", {"node": "a", "seqs": ["1"]}, "seqs"),
        ("nack", {"node": "a", "seqs": [1], "delay_ms": -1}, "delay_ms"),
        ("extend", {"node": "a", "seqs": [1], "lease_ms": -1}, "lease_ms"),
        ("unblock", {}, "seqs"),
        ("redrive", {"max": 0}, "max"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    client: httpx.Client, topic: str, verb: str, body: dict[str, Any], field: str
) -> None:
    queue(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}/{verb}", json=body)
    assert error_of(answer) == (400, "invalid_request")
    assert field in answer.json()["error"]["message"]
    assert queue_state(client, topic)["ready"] == 1


def test_too_many_ack_holes_are_refused_with_their_number(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(6), max_ack_holes=1)
    claim(client, topic, max=4)
    post(client, f"{topic}/ack", node="a", seqs=[2, 4])
    answer = client.post(f"/v0/topics/{topic}/claim", json={"node": "b"})
    assert error_of(answer) == (429, "ack_hole_cap_exceeded")
    detail = answer.json()["error"]["detail"]
    assert (detail["holes"], detail["max"], detail["limit"]) == (2, 1, "max_ack_holes")
    assert "retry-after" in answer.headers


def test_too_many_jobs_in_flight_are_refused_with_the_limit(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, max_in_flight=1)
    claim(client, topic)
    answer = client.post(f"/v0/topics/{topic}/claim", json={"node": "b"})
    assert error_of(answer) == (429, "in_flight_cap_exceeded")
    detail = answer.json()["error"]["detail"]
    assert (detail["limit"], detail["max"]) == ("max_in_flight", 1)
    assert "retry-after" in answer.headers


# -- waiting ---------------------------------------------------------------------------------------------------------


class Waiting:
    """A claim that waits, on a connection of its own."""

    def __init__(self, server: LocalServer, name: str, **body: Any) -> None:
        self.wire = Wire(server.port)
        fields = {"node": "w", "wait_ms": LONG, **body}
        self.wire.send(request("POST", f"/v0/topics/{name}/claim", json.dumps(fields).encode()))

    def reply(self) -> Reply:
        try:
            return self.wire.read()
        finally:
            self.wire.close()

    @property
    def seqs(self) -> list[int]:
        reply = self.reply()
        assert reply.status == 200, reply
        return [job["$seq"] for job in reply.json()["claimed"]]


@contextmanager
def waiting(server: LocalServer, name: str, count: int = 1, **body: Any) -> Iterator[list[Waiting]]:
    """Claims of which the server knows that they wait, in the order in which they came."""
    before = len(server.app.readings)
    claims: list[Waiting] = []
    for number in range(count):
        claims.append(Waiting(server, name, **body))
        server.wait_for_readings(before + number + 1)
    try:
        yield claims
    finally:
        for one in claims:
            one.wire.close()


def test_a_claim_that_waits_gets_what_is_written(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with waiting(server, topic) as (one,):
        write(client, topic, "x")
        assert one.seqs == [1]


def test_a_claim_that_waits_gets_what_is_nacked(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    claim(client, topic)
    with waiting(server, topic) as (one,):
        post(client, f"{topic}/nack", node="a", seqs=[1])
        assert one.seqs == [1]


def test_a_claim_that_waits_gets_what_was_delayed(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    claim(client, topic)
    with waiting(server, topic) as (one,):
        post(client, f"{topic}/nack", node="a", seqs=[1], delay_ms=50)
        assert one.seqs == [1]


def test_a_claim_that_waits_gets_what_expires(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    claim(client, topic, lease_ms=100)
    assert Waiting(server, topic).seqs == [1]


def test_a_claim_that_waits_gets_what_is_unblocked(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, max_deliveries=1, dlq_strategy="block")
    claim(client, topic)
    post(client, f"{topic}/nack", node="a", seqs=[1])
    claim(client, topic)
    with waiting(server, topic) as (one,):
        post(client, f"{topic}/unblock", seqs=[1])
        assert one.seqs == [1]


def test_a_claim_that_waits_gets_what_is_redriven(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, max_deliveries=1, dead_letter=f"{topic}.dead")
    claim(client, topic)
    post(client, f"{topic}/nack", node="a", seqs=[1])
    claim(client, topic)
    with waiting(server, topic) as (one,):
        post(client, f"{topic}.dead/redrive")
        assert one.seqs == [2]


def test_a_claim_that_waits_for_the_order_goes_on_when_the_holder_is_done(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, 1, 2, ordering_required=True)
    claim(client, topic)
    with waiting(server, topic) as (one,):
        post(client, f"{topic}/ack", node="a", seqs=[1])
        assert one.seqs == [2]


def test_a_claim_that_waits_for_room_in_flight_goes_on_when_there_is_some(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, 1, 2, max_in_flight=1)
    claim(client, topic)
    with waiting(server, topic) as (one,):
        post(client, f"{topic}/ack", node="a", seqs=[1])
        assert one.seqs == [2]


def test_a_claim_that_waits_for_fewer_ack_holes_goes_on_when_one_is_closed(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, *range(5), max_ack_holes=1)
    claim(client, topic, max=4)
    post(client, f"{topic}/ack", node="a", seqs=[2, 4])
    with waiting(server, topic) as (one,):
        post(client, f"{topic}/ack", node="a", seqs=[3])
        assert one.seqs == [5]


def test_a_claim_that_waits_for_room_in_flight_goes_on_when_a_cap_is_raised(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, 1, 2, max_in_flight=1)
    claim(client, topic)
    with waiting(server, topic) as (one,):
        client.put(f"/v0/topics/{topic}", json={"max_in_flight": 2})
        assert one.seqs == [2]


def test_a_claim_that_waits_in_vain_is_answered_with_nothing(client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    body = claim(client, topic, wait_ms=30)
    assert (body["claimed"], body["lease_id"]) == ([], None)
    assert body["performance"]["server_total_ms"] >= 29


@pytest.mark.parametrize("cap", ["max_in_flight", "max_ack_holes"])
def test_a_claim_that_waits_at_a_cap_is_refused_at_its_end(client: httpx.Client, topic: str, cap: str) -> None:
    queue(client, topic, *range(6), **{cap: 1})
    claim(client, topic, max=4)
    if cap == "max_ack_holes":
        post(client, f"{topic}/ack", node="a", seqs=[2, 4])
    answer = client.post(f"/v0/topics/{topic}/claim", json={"node": "b", "wait_ms": 30})
    assert answer.status_code == 429
    assert answer.json()["error"]["detail"]["limit"] == cap


def test_a_claim_that_waits_is_told_when_its_queue_is_deleted(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic)
    with waiting(server, topic) as (one,):
        client.delete(f"/v0/topics/{topic}")
        reply = one.reply()
        assert (reply.status, reply.code) == (404, "topic_not_found")


def test_a_claim_whose_client_has_gone_takes_nothing(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with waiting(server, topic) as (one,):
        one.wire.reset()
        server.wait_for_readings(0)
    write(client, topic, "x")
    assert [job["deliveries"] for job in claim(client, topic)["claimed"]] == [1]


def test_jobs_go_to_the_claim_that_has_waited_longest(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with waiting(server, topic, count=3) as claims:
        write(client, topic, "x")
        assert claims[0].seqs == [1]
        write(client, topic, "y", "z")
        assert (claims[1].seqs, claims[2].seqs) == ([2], [3])


def test_of_many_claims_that_wait_each_job_wakes_one(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with waiting(server, topic, count=20) as claims:
        write(client, topic, *range(20))
        assert sorted(seq for one in claims for seq in one.seqs) == list(range(1, 21))


def test_a_stop_answers_the_claims_that_wait(tmp_path_factory: pytest.TempPathFactory) -> None:
    with local_server(tmp_path_factory.mktemp("stop")) as own, own.client() as client:
        queue(client, "q")
        with waiting(own, "q") as (one,):
            own.stop()
            reply = one.reply()
            assert (reply.status, reply.json()["claimed"]) == (200, [])


# -- one sync for many -----------------------------------------------------------------------------------------------


def test_acks_that_arrive_together_share_a_sync(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(30), durability="fsync")
    claim(client, topic, max=30)
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.port)) for _ in range(30)]
        for wire in wires:
            assert wire.ask(request("GET", "/v0/health")).status == 200
        before = server.app.engine.committer.syncs
        with server.held():
            for seq, wire in enumerate(wires, 1):
                body = json.dumps({"node": "a", "seqs": [seq]}).encode()
                wire.send(request("POST", f"/v0/topics/{topic}/ack", body))
        assert [wire.read().json()["acked"] for wire in wires] == [1] * 30
    # What was sent while the loop stood still arrives in one turn; the kernel may split it in two.
    assert server.app.engine.committer.syncs - before <= 2


# -- cohorts ---------------------------------------------------------------------------------------------------------


def cohort(server: LocalServer, name: str, wanted: list[int], **body: Any) -> list[Reply]:
    """Claims that arrive in one moment, in this order."""
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.port)) for _ in wanted]
        for number, (wire, most) in enumerate(zip(wires, wanted, strict=True)):
            fields = {"node": f"n{number}", "max": most, **body}
            wire.send(request("POST", f"/v0/topics/{name}/claim", json.dumps(fields).encode()))
            server.wait_until(lambda want=number + 1: joined(server) >= want, "a cohort")  # type: ignore[misc]
        return [wire.read() for wire in wires]


def joined(server: LocalServer) -> int:
    return sum(len(waiting) for waiting in server.app.cohorts._waiting.values())


def counts(replies: list[Reply]) -> list[int]:
    return [reply.json()["count"] for reply in replies]


@pytest.mark.parametrize(
    ("wanted", "jobs", "got"),
    [
        ([10, 10], 10, [5, 5]),
        ([10, 10], 40, [10, 10]),
        ([30, 10], 8, [6, 2]),
        ([10, 10, 10], 9, [3, 3, 3]),
        ([1, 1, 1, 27], 10, [0, 0, 0, 9]),
    ],
)
def test_a_cohort_divides_what_there_is_in_proportion_to_max(
    server: LocalServer, client: httpx.Client, topic: str, wanted: list[int], jobs: int, got: list[int]
) -> None:
    queue(client, topic, *range(jobs), claim_jitter_ms=600)
    found = counts(cohort(server, topic, wanted))
    assert sum(found) == min(jobs, sum(wanted))
    assert all(have >= share for have, share in zip(found, got, strict=True)), found


def test_a_claim_whose_share_is_nothing_takes_nothing_from_the_others(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, *range(5), claim_jitter_ms=600)
    found = counts(cohort(server, topic, [1, 1, 1, 1, 1, 995]))
    assert found == [0, 0, 0, 0, 0, 5]


def test_a_cohort_divides_the_room_in_flight(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(20), claim_jitter_ms=600, max_in_flight=4)
    assert counts(cohort(server, topic, [10, 10])) == [2, 2]


def test_a_claim_alone_in_its_window_gets_what_it_wants(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3, claim_jitter_ms=20)
    assert claimed(client, topic, max=2) == [1, 2]


def test_no_job_goes_to_two_claims_of_a_cohort(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(7), claim_jitter_ms=600)
    replies = cohort(server, topic, [5, 5, 5])
    seqs = [job["$seq"] for reply in replies for job in reply.json()["claimed"]]
    assert sorted(seqs) == [1, 2, 3, 4, 5, 6, 7]


def test_a_claim_of_a_cohort_that_got_nothing_waits_for_more(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, claim_jitter_ms=20)
    with waiting(server, topic) as (one,):
        write(client, topic, "x")
        assert one.seqs == [1]


def test_a_queue_that_goes_in_the_window_answers_its_cohort(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, 1, claim_jitter_ms=600)
    with Wire(server.port) as wire:
        wire.send(request("POST", f"/v0/topics/{topic}/claim", b'{"node":"a"}'))
        server.wait_until(lambda: joined(server) == 1, "a cohort")
        client.delete(f"/v0/topics/{topic}")
        assert wire.read().status == 404


@pytest.mark.parametrize(
    ("wanted", "available", "given"),
    [
        ([1], 0, [0]),
        ([3, 3], 6, [3, 3]),
        ([3, 3], 5, [3, 2]),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([1, 99], 10, [0, 10]),
        ([50, 50], 7, [4, 3]),
    ],
)
def test_shares_are_whole_and_in_proportion(wanted: list[int], available: int, given: list[int]) -> None:
    assert shares(wanted, available) == given


# -- work ------------------------------------------------------------------------------------------------------------


class Worker:
    """A work stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def frame(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        for line in self._lines:
            if not line:
                assert "" not in fields, "a heartbeat: nothing has come for long"
                return fields
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name in fields else value
        raise AssertionError(f"the stream ended: {fields}")

    def job(self) -> dict[str, Any]:
        """The next job."""
        frame = self.frame()
        assert frame["event"] == "job", frame
        job: dict[str, Any] = json.loads(frame["data"])
        assert frame["id"] == str(job["$seq"])
        return job

    def error(self) -> dict[str, Any]:
        """The reason with which the stream ends."""
        frame = self.frame()
        assert frame["event"] == "error", frame
        assert list(self._lines) == []
        reason: dict[str, Any] = json.loads(frame["data"])
        return reason


@contextmanager
def working(server: LocalServer, name: str, node: str = "w", **query: Any) -> Iterator[Worker]:
    with (
        server.client() as own,
        own.stream("GET", f"/v0/topics/{name}/work", params={"node": node, **query}, headers=STREAM) as response,
    ):
        assert response.status_code == 200
        worker = Worker(response)
        assert worker.frame() == {"retry": "2000"}
        yield worker


def in_flight(client: httpx.Client, name: str) -> Callable[[], tuple[int, int]]:
    def look() -> tuple[int, int]:
        state = queue_state(client, name)
        return state["ready"], state["in_flight"]

    return look


def test_a_work_stream_is_a_stream_of_events(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with working(server, topic) as worker:
        assert worker.response.headers["content-type"].startswith("text/event-stream")
        assert worker.response.headers["cache-control"] == "no-store"


def test_a_work_stream_pushes_jobs_as_a_claim_gives_them(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": {"n": 1}, "tag": "t", "meta": {"k": "v"}}]})
    with working(server, topic, lease_ms=60_000) as worker:
        job = worker.job()
        assert set(job) == {"$seq", "lease_id", "deadline", "deliveries", "$ts", "$tag", "data", "meta"}
        assert (job["$seq"], job["data"], job["deliveries"]) == (1, {"n": 1}, 1)
        assert job["deadline"] >= job["$ts"] + 60_000
        (lease,) = client.get(f"/v0/topics/{topic}/leases").json()["leases"]
        assert (lease["node"], lease["lease_id"]) == ("w", job["lease_id"])


def test_a_work_stream_keeps_up_to_max_jobs_and_refills_on_an_ack(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, *range(4))
    with working(server, topic, max=2) as worker:
        assert [worker.job()["$seq"] for _ in range(2)] == [1, 2]
        assert in_flight(client, topic)() == (2, 2)
        post(client, f"{topic}/ack", node="w", seqs=[1])
        assert worker.job()["$seq"] == 3
        post(client, f"{topic}/ack", node="w", seqs=[2, 3])
        assert worker.job()["$seq"] == 4
        assert in_flight(client, topic)() == (0, 1)


def test_a_work_stream_pushes_what_is_written_later(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with working(server, topic) as worker:
        write(client, topic, "x")
        assert worker.job()["data"] == "x"


def test_a_work_stream_gets_what_it_gave_back(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    with working(server, topic) as worker:
        assert worker.job()["deliveries"] == 1
        post(client, f"{topic}/nack", node="w", seqs=[1])
        assert worker.job()["deliveries"] == 2


def test_a_work_streams_leases_are_released_at_once_when_it_drops(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, 1, 2, lease_ms=3_600_000)
    with working(server, topic, max=2) as worker:
        assert [worker.job()["$seq"] for _ in range(2)] == [1, 2]
        waiter = Waiting(server, topic, max=2)
        server.wait_for_readings()
    assert waiter.seqs == [1, 2]


def test_a_work_stream_that_drops_releases_only_what_is_its_own(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, 1, 2)
    with working(server, topic) as worker:
        assert worker.job()["$seq"] == 1
        assert claimed(client, topic, node="w") == [2]
    server.wait_until(lambda: not server.app.workers, "the end of the stream")
    assert in_flight(client, topic)() == (1, 1)
    assert [lease["$seq"] for lease in client.get(f"/v0/topics/{topic}/leases").json()["leases"]] == [2]


def test_two_work_streams_share_the_jobs(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with working(server, topic, "v") as one, working(server, topic, "w") as two:
        write(client, topic, 1, 2)
        assert sorted([one.job()["$seq"], two.job()["$seq"]]) == [1, 2]


def test_a_job_that_a_work_stream_let_expire_is_pushed_again(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, 1)
    with working(server, topic, lease_ms=100) as worker:
        assert worker.job()["deliveries"] == 1
        assert worker.job()["deliveries"] == 2


def test_a_work_stream_honours_the_order(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, ordering_required=True)
    claim(client, topic)
    with working(server, topic) as worker:
        post(client, f"{topic}/ack", node="a", seqs=[1])
        assert worker.job()["$seq"] == 2


def test_a_work_stream_waits_at_a_cap(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, max_in_flight=1)
    claim(client, topic)
    with working(server, topic) as worker:
        post(client, f"{topic}/ack", node="a", seqs=[1])
        assert worker.job()["$seq"] == 2


def test_a_work_stream_sends_data_with_line_breaks_whole(server: LocalServer, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    client.post(
        f"/v0/topics/{topic}",
        content=b'{"records":[{"data":{"a":\n 1,\r\n"b":2}}]}',
        headers={"content-type": "application/json"},
    )
    with working(server, topic) as worker:
        assert worker.job()["data"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_work_stream_ends_when_its_queue_is_deleted(
    server: LocalServer, client: httpx.Client, topic: str, jobs: int
) -> None:
    queue(client, topic, *range(jobs))
    with working(server, topic) as worker:
        for _ in range(jobs):
            worker.job()
        client.delete(f"/v0/topics/{topic}")
        assert worker.error()["code"] == "topic_not_found"


def test_a_work_stream_ends_with_a_reason_at_a_stop_and_its_jobs_are_free(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = tmp_path_factory.mktemp("stop")
    with local_server(data) as own, own.client() as client:
        queue(client, "q", 1, lease_ms=3_600_000)
        with working(own, "q") as worker:
            worker.job()
            stopping = Background(own.stop)
            assert worker.error()["code"] == "shutting_down"
        stopping.result()
    with local_server(data) as again, again.client() as client:
        assert [job["deliveries"] for job in claim(client, "q")["claimed"]] == [2]


@pytest.mark.parametrize(
    ("query", "field"), [("", "node"), ("node=", "node"), ("node=a&max=0", "max"), ("node=a&max=x", "max")]
)
def test_a_work_stream_says_who_and_how_many(client: httpx.Client, topic: str, query: str, field: str) -> None:
    queue(client, topic, 1)
    answer = client.get(f"/v0/topics/{topic}/work?{query}", headers=STREAM)
    assert error_of(answer) == (400, "invalid_request")
    assert field in answer.json()["error"]["message"]
    assert queue_state(client, topic)["ready"] == 1


def test_a_work_stream_must_be_acceptable(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    answer = client.get(f"/v0/topics/{topic}/work?node=a", headers={"accept": "application/json"})
    assert error_of(answer) == (406, "not_acceptable")
    assert queue_state(client, topic)["ready"] == 1


def test_work_streams_count_as_streams(tmp_path_factory: pytest.TempPathFactory) -> None:
    with local_server(tmp_path_factory.mktemp("cap"), Limits(max_sse_connections=1)) as own, own.client() as client:
        queue(client, "q")
        with working(own, "q"):
            answer = client.get("/v0/topics/q/work?node=b", headers=STREAM)
            assert error_of(answer) == (429, "throttled")
        own.wait_until(lambda: not own.app.workers, "the end of the stream")
        with working(own, "q"):
            pass


# -- who may ---------------------------------------------------------------------------------------------------------

KEYS = {"all": "", "read": ":read", "write": ":write", "rw": ":rw", "admin": ":admin", "mine": "::mine"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    keys = ",".join(f"{key}-secret{rest}" for key, rest in KEYS.items())
    with local_server(tmp_path_factory.mktemp("keys"), api_keys=keys) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}-secret"}


@pytest.mark.parametrize(
    ("verb", "may"),
    [
        ("claim", {"rw"}),
        ("work", {"rw"}),
        ("ack", {"write", "rw"}),
        ("nack", {"write", "rw"}),
        ("extend", {"write", "rw"}),
        ("unblock", {"admin"}),
        ("redrive", {"admin"}),
        ("leases", {"read", "rw"}),
    ],
)
def test_every_verb_needs_its_scope(guarded: LocalServer, verb: str, may: set[str]) -> None:
    with guarded.client() as client:
        # On a log: who is let in is told that it is no queue.
        client.put("/v0/topics/log", json={}, headers=bearer("all"))
        for key in ("read", "write", "rw", "admin"):
            status = ask(client, "log", verb, **bearer(key)).status_code
            assert status == (409 if key in may else 403), key
        assert ask(client, "log", verb).status_code == 401


@pytest.mark.parametrize("verb", [*BODIES, "leases", "work"])
def test_every_verb_needs_the_prefix_of_its_queue(guarded: LocalServer, verb: str) -> None:
    with guarded.client() as client:
        client.put("/v0/topics/other", json={"type": "queue"}, headers=bearer("all"))
        assert error_of(ask(client, "other", verb, **bearer("mine"))) == (403, "forbidden")


def test_a_work_stream_takes_its_key_from_the_query(guarded: LocalServer) -> None:
    with guarded.client() as client:
        client.put("/v0/topics/tokens", json={"type": "queue"}, headers=bearer("all"))
        with working(guarded, "tokens", token="rw-secret"):
            pass
        answer = client.get("/v0/topics/tokens/work?node=a&token=read-secret", headers=STREAM)
        assert error_of(answer) == (403, "forbidden")
        answer = client.post("/v0/topics/tokens/claim?token=rw-secret", json={"node": "a"})
        assert error_of(answer) == (401, "unauthorized")


@pytest.mark.parametrize("how", ["put", "write"])
def test_a_dead_letter_topic_needs_the_prefix_too(guarded: LocalServer, how: str) -> None:
    config = {"type": "queue", "dead_letter": "other.dead"}
    with guarded.client(headers=bearer("mine")) as client:
        if how == "put":
            answer = client.put("/v0/topics/mine.q1", json=config)
        else:
            answer = client.post("/v0/topics/mine.q1", json={"records": [{"data": 1}], "config": config})
        assert error_of(answer) == (403, "forbidden")
        assert client.get("/v0/topics/mine.q1").status_code == 404


def test_a_redrive_goes_only_where_its_key_may(guarded: LocalServer) -> None:
    with guarded.client(headers=bearer("all")) as client:
        queue(client, "other.q", 1, max_deliveries=1, dead_letter="mine.dead")
        claim(client, "other.q")
        post(client, "other.q/nack", node="a", seqs=[1])
        claim(client, "other.q")
    with guarded.client(headers=bearer("mine")) as client:
        answer = client.post("/v0/topics/mine.dead/redrive", json={"to": "other.q"})
        assert error_of(answer) == (403, "forbidden")
        body = post(client, "mine.dead/redrive")
        assert (body["moved"], body["skipped"]) == (0, 1)
    with guarded.client(headers=bearer("all")) as client:
        assert datas(client, "other.q") == []
        assert post(client, "mine.dead/redrive")["moved"] == 1


def test_a_redrive_to_a_topic_that_is_not_there_is_not_found(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}/redrive", json={"to": f"{topic}.none"})
    assert error_of(answer) == (404, "topic_not_found")
    assert queue_state(client, topic)["ready"] == 1


def test_a_redrive_to_the_topic_itself_moves_nothing(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}/redrive", json={"to": topic})
    if answer.status_code == 200:
        assert answer.json()["moved"] == 0
    else:
        assert error_of(answer) == (400, "invalid_request")
    assert claimed(client, topic) == [1]
