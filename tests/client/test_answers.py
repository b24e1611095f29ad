"""The structs that clients decode into are true to the server: every field that it sends has a name here, and none is
missing."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tests.http.server import LocalServer, eventually
from topics.client import calls
from topics.client.calls import Call, Holder
from topics.client.errors import ServerError
from topics.client.sync import Client
from topics.core import answers
from topics.core.answers import Record
from topics.core.config import ConfigPatch, TopicConfig
from topics.core.errors import InvalidRequest, RouterNotFound
from topics.core.routing import Remote


def names(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)} - {"performance"}


def body_of(server: LocalServer, call: Call[Any]) -> dict[str, Any]:
    with server.client() as http:
        headers = {"content-type": "application/json"}
        answer = http.request(call.method, call.target, content=call.body, headers=headers)
    assert answer.status_code in (200, 201), answer.text
    # What the server says, our reader reads.
    assert call.read(answer.content) is not None
    body: dict[str, Any] = answer.json()
    body.pop("performance", None)
    return body


@pytest.fixture(scope="module")
def queue(client: Client) -> str:
    client.put("q", type="queue", max_deliveries=1, dead_letter="dead", dlq_strategy="block")
    client.write("q", [{"data": n, "tag": "t", "node": "n", "meta": {"k": "v"}} for n in range(10)])
    return "q"


def test_topics(server: LocalServer, client: Client, queue: str) -> None:
    assert set(body_of(server, calls.put("log", None, {}))) == names(answers.TopicPut)
    assert set(body_of(server, calls.get("q", True))) == names(answers.TopicState)
    state = body_of(server, calls.get("log", True))
    assert set(state) == names(answers.TopicState) - {"queue"}
    assert set(body_of(server, calls.get("q", True))["queue"]) == names(answers.QueueState)
    assert set(state["config"]) == names(TopicConfig) | {"durable"}
    page = body_of(server, calls.list_topics("", 1, None))
    assert set(page) == names(answers.TopicPage)
    assert set(body_of(server, calls.drop("log", False))) == names(answers.TopicDropped)


def test_records(server: LocalServer, queue: str) -> None:
    written = body_of(server, calls.write("r", [{"data": 1, "tag": "t", "node": "n", "meta": {"k": "v"}}], "key"))
    assert set(written) == names(answers.Written)
    diff = body_of(server, calls.diff("r", 0, include_tags=True))
    assert set(diff) == names(answers.Diff)
    assert set(diff["records"][0]) == names(answers.Record)
    assert set(body_of(server, calls.seek("r", 0))) == names(answers.Seek)
    assert set(body_of(server, calls.delete("r", 2, "t", "erase"))) == names(answers.Deleted)
    ranges = body_of(server, calls.ranges("r", 0, None, None))
    assert set(ranges) == names(answers.Ranges)
    assert set(ranges["ranges"][0]) <= names(answers.Range)
    deletes = body_of(server, calls.deletes("r", 0))
    assert set(deletes) == names(answers.Deletes)
    assert set(deletes["deletes"][0]) == names(answers.PastDelete)


def test_transactions(server: LocalServer) -> None:
    assert set(body_of(server, calls.spool("x", "r", "p", 0, [{"data": 1}], None))) == names(answers.Spooled)
    assert set(body_of(server, calls.get_txn("x"))) == names(answers.TxnState)
    committed = body_of(server, calls.commit("x", [{"part": "p", "records": {"r": 1}}], None, None))
    assert set(committed) == names(answers.Committed)
    assert set(committed["topics"]["r"]) == names(answers.CommittedTopic)
    body_of(server, calls.spool("y", "r", "p", 0, [{"data": 1}], None))
    assert set(body_of(server, calls.abort("y"))) == names(answers.Aborted)


def test_queues(server: LocalServer, queue: str) -> None:
    claimed = body_of(server, calls.claim("q", "w", 4, None, 0))
    assert set(claimed) == names(answers.Claimed)
    # Tags are on jobs whether asked for or not.
    assert set(claimed["claimed"][0]) == names(answers.Job)
    leases = body_of(server, calls.list_leases("q", 10, 0))
    assert set(leases) == names(answers.Leases)
    assert set(leases["leases"][0]) == names(answers.Lease)
    holder = Holder(node="w", seqs=[1])
    assert set(body_of(server, calls.extend("q", holder, 60_000))) == names(answers.Extended)
    assert set(body_of(server, calls.ack("q", holder))) == names(answers.Acked)
    assert set(body_of(server, calls.nack("q", Holder(node="w", seqs=[2]), 0))) == names(answers.Nacked)
    assert set(body_of(server, calls.unblock("q", [2]))) == names(answers.Unblocked)
    assert set(body_of(server, calls.redrive("q", 1, None))) == names(answers.Redriven)


def test_watch_and_health(server: LocalServer, queue: str) -> None:
    watch = body_of(server, calls.create_watch({"topics": {"q": {}}}, False))
    assert set(watch) == names(answers.WatchSession)
    assert set(watch["topics"]["q"]) == names(answers.WatchedTopic)
    assert names(answers.Health) <= set(body_of(server, calls.health()))
    assert names(answers.Ready) <= set(body_of(server, calls.ready()))


def test_data_comes_back_byte_for_byte_and_as_a_value(client: Client, topic: str) -> None:
    texts = [
        '{"b": 1.0,  "a": [1e2, "\\u00e9"]}',
        "1e400",
        "123456789012345678901234567890",
        "null",
        '"\\ud83d\\ude00"',
    ]
    client.write(topic, [{"data": msgspec.Raw(text.encode())} for text in texts])
    records = client.diff(topic).records
    assert [bytes(record.raw).decode() for record in records] == texts
    assert records[0].data == {"b": 1.0, "a": [100.0, "é"]}
    assert records[1].data == Decimal("1e400")
    assert records[2].data == 123456789012345678901234567890
    assert records[3].data is None
    assert records[4].data == "😀"


def test_a_record_as_json_is_what_the_server_sent(client: Client, topic: str) -> None:
    client.write(topic, [{"data": None}, {"data": 1, "tag": "t", "meta": {"k": "v"}}])
    first, second = client.diff(topic, include_tags=True).records
    assert msgspec.json.decode(msgspec.json.encode(first)) == {"$seq": 1, "$ts": first.ts, "data": None}
    assert set(msgspec.json.decode(msgspec.json.encode(second))) == {"$seq", "$ts", "$tag", "meta", "data"}


def test_unknown_fields_are_ignored() -> None:
    record = msgspec.json.decode(b'{"$seq": 1, "$ts": 2, "data": 3, "$new": 4}', type=Record)
    assert (record.seq, record.ts, record.data) == (1, 2, 3)


def test_an_answer_of_something_else_is_not_believed() -> None:
    with pytest.raises(ServerError, match="not one of a topics server"):
        calls.get("t", True).read(b'{"hello": "world"}')


BAD: dict[str, tuple[Any, str]] = {
    "a bad name": (lambda c: c.get("no spaces"), "topic"),
    "a name that is a path": (lambda c: c.get("../admin"), "topic"),
    "no records": (lambda c: c.write("t", []), "records"),
    "records that are no list": (lambda c: c.write("t", {"data": 1}), "records must be a list"),
    "data that JSON has not": (lambda c: c.write("t", [{"data": math.nan}]), r"records\[0\].data"),
    "data of a strange type": (lambda c: c.write("t", [{"data": object()}]), r"records\[0\].data"),
    "an unknown field of a config": (lambda c: c.put("t", cap_record=3), "cap_record"),
    "a wrong value in a config": (lambda c: c.put("t", discard="new"), "discard must be one of"),
    "a config twice": (lambda c: c.put("t", ConfigPatch(ttl_ms=1), ttl_ms=2), "choose one"),
    "a negative cursor": (lambda c: c.diff("t", -1), "from_seq"),
    "a cursor that is none": (lambda c: c.read("t", "5"), "from_seq"),
    "a delete of nothing": (lambda c: c.delete("t"), "before_seq"),
    "an empty node": (lambda c: c.claim("t", ""), "node"),
    "no job at all": (lambda c: c.claim("t", "w", 0), "max"),
    "an ack of nothing": (lambda c: c.ack("t", node="w"), "lease_id"),
    "an idempotency key that is too long": (lambda c: c.write("t", [{"data": 1}], idempotency_key="x" * 257), "256"),
    "half a transaction's identity": (lambda c: c.transaction("client"), "go together"),
    "a router's bad name": (lambda c: c.router("a/b"), "router"),
    "a negative wait": (lambda c: c.diff("t", wait_ms=-1), "wait_ms"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_by_name(what: str, client: Client) -> None:
    call, message = BAD[what]
    with pytest.raises(InvalidRequest, match=message):
        call(client)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "127.0.0.1:4000"}, "url must be http://"),
        ({"url": "http://host:port"}, "port is not a number"),
        ({"key": "a b"}, "key must be printable"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"retry_ms": -1}, "retry_ms"),
    ],
)
def test_a_client_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Client(**fields)


def test_routers(server: LocalServer, client: Client) -> None:
    client.write("router.source", [{"data": 1, "tag": "t"}])
    put = body_of(server, calls.put_router("a>b", "router.source", "router.dest", {"start": "earliest", "filter": "t"}))
    assert set(put) == names(answers.Router)
    assert set(body_of(server, calls.get_router("a>b"))) == names(answers.Router) - {"created"}
    assert set(body_of(server, calls.list_routers("", None, None, 10, None))) == {"routers"}
    assert set(body_of(server, calls.drop_router("a>b"))) == names(answers.RouterDropped)


def test_a_router_is_made_changed_and_deleted(client: Client, topic: str) -> None:
    client.write(f"{topic}.a", [{"data": n, "tag": "xy"[n % 2]} for n in range(4)])
    made = client.put_router(topic, f"{topic}.a", f"{topic}.b", start="earliest", filter="x", preserve_node=False)
    assert (made.created, made.filter, made.preserve_node) == (True, ["tag", "Eq", "x"], False)
    # What is not given stays.
    changed = client.put_router(topic, preserve_tag=False)
    assert (changed.created, changed.source, changed.preserve_node) == (False, f"{topic}.a", False)
    # A router that catches up is not waited for.
    eventually(lambda: [record.data for record in client.diff(f"{topic}.b").records] == [0, 2], "the copies")
    assert client.router(topic).forwarded_total == 2
    assert [router.router for router in client.routers(topic, source=f"{topic}.a")] == [topic]
    assert client.drop_router(topic).deleted
    assert not client.drop_router(topic).deleted
    with pytest.raises(RouterNotFound):
        client.router(topic)


def test_a_router_to_another_server_keeps_its_key_to_itself(server: LocalServer, client: Client, topic: str) -> None:
    body = calls.put_router("r", "a", Remote(server.url, "b", "secret"), {}).body
    assert body is not None
    assert msgspec.json.decode(body)["dest"] == {"url": server.url, "topic": "b", "key": "secret"}
    with pytest.raises(InvalidRequest, match="no field 'filters'"):
        client.put_router(topic, "a", "b", filters="x")  # type: ignore[call-arg]  # that is the test
