"""Section 7 over the wire: create, change, look, list and delete routers; what reaches a dest, and who may see it."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import chain as joined
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server import (
    DEADLINE,
    Background,
    LocalServer,
    child,
    datas,
    diff,
    error_of,
    eventually,
    local_server,
    raw_data,
    write,
    write_raw,
)
from tests.http.wire import Wire, request
from tests.live.sse import Events
from tests.live.ws import Socket
from topics.core.limits import Limits
from topics.http.remotes import is_forbidden

DEFAULTS: dict[str, Any] = {
    "start": "head",
    "preserve_node": True,
    "preserve_tag": True,
    "create_dest": True,
    "filter": None,
    "allow_cycle": False,
    "guarantee": "exactly_once",
}
NEW: dict[str, Any] = {"forwarded_total": 0, "cursor": 0, "lag": 0, "state": "running", "last_error": None}
LONG = 25_000
NOWHERE = "http://127.0.0.1:1"


def put(client: httpx.Client, name: str, source: Any, dest: Any, **fields: Any) -> dict[str, Any]:
    answer = client.put(f"/v0/routers/{name}", json={"source": source, "dest": dest, **fields})
    assert answer.status_code in (200, 201), answer.text
    body: dict[str, Any] = answer.json()
    return body


def get(client: httpx.Client, name: str) -> dict[str, Any]:
    answer = client.get(f"/v0/routers/{name}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    del body["performance"]
    return body


def listed(client: httpx.Client, **query: Any) -> list[str]:
    answer = client.get("/v0/routers", params=query)
    assert answer.status_code == 200, answer.text
    return [each["router"] for each in answer.json()["routers"]]


def chain(client: httpx.Client, *topics: str, **config: Any) -> None:
    """A router from each topic to the next; all of them are there."""
    for name in topics:
        answer = client.put(f"/v0/topics/{name}", json=config)
        assert answer.status_code in (200, 201), answer.text
    for source, dest in pairwise(topics):
        put(client, f"{source}>{dest}", source, dest)


@pytest.fixture
def lazy(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers do nothing by themselves: what reaches a dest is what its readers ask for."""
    routers = server.app.engine.routers
    server.call(lambda: monkeypatch.setattr(routers, "work", lambda seconds: False))


# -- create, change, look --------------------------------------------------------------------------------------------


def test_put_creates_with_201_and_every_default(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/routers/{topic}", json={"source": f"{topic}.a", "dest": f"{topic}.b"})
    assert answer.status_code == 201
    body = answer.json()
    assert body.pop("performance")["server_total_ms"] >= 0
    shown = {"router": topic, "source": f"{topic}.a", "dest": f"{topic}.b", **DEFAULTS, **NEW}
    assert body == {**shown, "created": True}
    assert get(client, topic) == shown
    [summary] = client.get("/v0/routers", params={"prefix": topic}).json()["routers"]
    assert summary == shown
    assert client.get(f"/v0/topics/{topic}.b").status_code == 200
    assert client.get(f"/v0/topics/{topic}.a").status_code == 404


def test_put_again_is_200_and_changes_only_what_is_sent(client: httpx.Client, topic: str) -> None:
    put(client, topic, f"{topic}.a", f"{topic}.b", preserve_tag=False, filter="x")
    answer = client.put(f"/v0/routers/{topic}", json={"preserve_node": False})
    assert answer.status_code == 200
    assert answer.json()["created"] is False
    now = get(client, topic)
    assert (now["preserve_tag"], now["preserve_node"], now["filter"]) == (False, False, ["tag", "Eq", "x"])
    assert client.put(f"/v0/routers/{topic}", json={"filter": None}).json()["filter"] is None


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ({"start": "earliest"}, {"start": "earliest"}),
        ({"preserve_node": False, "preserve_tag": False}, {"preserve_node": False, "preserve_tag": False}),
        ({"create_dest": False}, {"create_dest": False}),
        ({"filter": "x"}, {"filter": ["tag", "Eq", "x"]}),
        ({"filter": ["tag", "Eq", "x*"]}, {"filter": ["tag", "Eq", "x*"]}),
        ({"filter": ["tag", "Glob", "x*"]}, {"filter": ["tag", "Glob", "x*"]}),
        ({"allow_cycle": True}, {"allow_cycle": True}),
        ({"guarantee": "at_least_once"}, {"guarantee": "at_least_once"}),
        ({"unknown": [1]}, {}),
    ],
)
def test_every_field_is_shown_as_it_counts(
    client: httpx.Client, topic: str, sent: dict[str, Any], shown: dict[str, Any]
) -> None:
    client.put(f"/v0/topics/{topic}.b")
    put(client, topic, f"{topic}.a", f"{topic}.b", **sent)
    expected = {"router": topic, "source": f"{topic}.a", "dest": f"{topic}.b", **DEFAULTS, **NEW, **shown}
    assert get(client, topic) == expected


REMOTE = {"url": "http://127.0.0.1:1", "topic": "t"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"source": None}, "source"),
    ({"source": 5}, "source"),
    ({"source": ""}, "source"),
    ({"source": "no/name"}, "source"),
    ({"source": ".x"}, "source"),
    ({"source": "a>b"}, "source"),
    ({"source": "x" * 256}, "source"),
    ({"dest": None}, "dest"),
    ({"dest": ["t"]}, "dest"),
    ({"dest": "no/name"}, "dest"),
    ({"start": "tail"}, "start"),
    ({"start": 0}, "start"),
    ({"start": None}, "start"),
    ({"preserve_node": 1}, "preserve_node"),
    ({"preserve_node": None}, "preserve_node"),
    ({"preserve_tag": "true"}, "preserve_tag"),
    ({"create_dest": 0}, "create_dest"),
    ({"filter": 5}, "filter"),
    ({"filter": ["tag", "Like", "x"]}, "filter"),
    ({"filter": ["tag", "Glob", "*x"]}, "filter"),
    ({"filter": ["node", "Eq", "x"]}, "filter"),
    ({"filter": {}}, "filter"),
    ({"allow_cycle": "no"}, "allow_cycle"),
    ({"guarantee": "at_most_once"}, "guarantee"),
    ({"guarantee": True}, "guarantee"),
    ({"dest": {}}, "dest"),
    ({"dest": {"url": NOWHERE}}, "dest"),
    ({"dest": {"topic": "t"}}, "dest"),
    ({"dest": {**REMOTE, "url": 5}}, "dest"),
    ({"dest": {**REMOTE, "url": "127.0.0.1:1"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "ftp://127.0.0.1"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "file:///etc/passwd"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://h:99999"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://h:x"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://[::1"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://u:p@h"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://h/?q=1"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://h/#f"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://h\n/"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://h x/"}}, "dest.url"),
    ({"dest": {**REMOTE, "url": "http://h" + "h" * 2000}}, "dest.url"),
    ({"dest": {**REMOTE, "topic": "no/name"}}, "dest.topic"),
    ({"dest": {**REMOTE, "key": ""}}, "dest.key"),
    ({"dest": {**REMOTE, "key": "a\r\nb"}}, "dest.key"),
    ({"dest": {**REMOTE, "key": "é"}}, "dest.key"),
    ({"dest": {**REMOTE, "key": 5}}, "dest"),
    ({"source": REMOTE, "dest": {**REMOTE, "topic": "u"}}, "remote"),
]


@pytest.mark.parametrize(("patch", "field"), BAD, ids=[json.dumps(patch)[:60] for patch, _ in BAD])
def test_a_bad_field_is_400_names_it_and_makes_nothing(
    client: httpx.Client, topic: str, patch: dict[str, Any], field: str
) -> None:
    name = topic[:100] + str(BAD.index((patch, field)))
    answer = client.put(f"/v0/routers/{name}", json={"source": f"{name}.a", "dest": f"{name}.b", **patch})
    assert error_of(answer) == (400, "invalid_request")
    assert field in answer.json()["error"]["message"]
    assert client.get(f"/v0/routers/{name}").status_code == 404
    assert client.get(f"/v0/topics/{name}.b").status_code == 404


@pytest.mark.parametrize(("patch", "field"), BAD, ids=[json.dumps(patch)[:60] for patch, _ in BAD])
def test_a_bad_change_changes_nothing(client: httpx.Client, topic: str, patch: dict[str, Any], field: str) -> None:
    put(client, "kept", "kept.a", "kept.b", filter="x")
    before = get(client, "kept")
    assert error_of(client.put("/v0/routers/kept", json=patch)) == (400, "invalid_request")
    assert get(client, "kept") == before


def test_both_ends_are_required_at_first(client: httpx.Client, topic: str) -> None:
    for body, missing in (({}, "source"), ({"source": "a"}, "dest"), ({"dest": "b"}, "source")):
        answer = client.put(f"/v0/routers/{topic}", json=body)
        assert error_of(answer) == (400, "invalid_request")
        assert missing in answer.json()["error"]["message"]


def test_source_and_dest_must_differ(client: httpx.Client, topic: str) -> None:
    for more in ({}, {"allow_cycle": True}):
        answer = client.put(f"/v0/routers/{topic}", json={"source": topic, "dest": topic, **more})
        assert error_of(answer) == (400, "invalid_request")
    put(client, topic, f"{topic}.a", f"{topic}.b")
    assert error_of(client.put(f"/v0/routers/{topic}", json={"dest": f"{topic}.a"})) == (400, "invalid_request")


@pytest.mark.parametrize("name", [".x", "a%20b", "a%2Fb", "x" * 256, "%00", "-a", "%C3%A9"])
def test_a_bad_name_is_400_for_every_verb(client: httpx.Client, name: str) -> None:
    for method in ("PUT", "GET", "DELETE"):
        body = {"source": "a", "dest": "b"} if method == "PUT" else None
        assert error_of(client.request(method, f"/v0/routers/{name}", json=body)) == (400, "invalid_request"), method


@pytest.mark.parametrize("name", ["a>b", "A.b:c-d>e", "9", "x" * 255, "a%3Eb2"])
def test_a_good_name_is_taken_as_it_is(client: httpx.Client, topic: str, name: str) -> None:
    shown = name.replace("%3E", ">")
    assert put(client, name, f"{topic}.a", f"{topic}.b")["router"] == shown
    assert get(client, name)["router"] == shown
    assert client.delete(f"/v0/routers/{name}").json()["deleted"] is True


def test_what_is_no_json_object_is_refused(client: httpx.Client, topic: str) -> None:
    for content in (b"", b"{", b"[]", b"5", b'{"source":"\xff"}'):
        answer = client.put(f"/v0/routers/{topic}", content=content, headers={"content-type": "application/json"})
        assert error_of(answer) == (400, "invalid_request"), content
    answer = client.put(f"/v0/routers/{topic}", content=b"{}", headers={"content-type": "text/plain"})
    assert error_of(answer) == (415, "unsupported_media_type")


def test_other_methods_are_405_with_allow(client: httpx.Client) -> None:
    answer = client.post("/v0/routers/x", json={})
    assert error_of(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"
    answer = client.put("/v0/routers", json={})
    assert error_of(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS"


def test_a_router_that_is_not_there(client: httpx.Client, topic: str) -> None:
    assert error_of(client.get(f"/v0/routers/{topic}")) == (404, "router_not_found")


def test_delete_is_idempotent_and_ends_the_forwarding(client: httpx.Client, topic: str) -> None:
    chain(client, f"{topic}.a", f"{topic}.b")
    write(client, f"{topic}.a", 1)
    assert datas(client, f"{topic}.b") == [1]
    for existed in (True, False, False):
        answer = client.delete(f"/v0/routers/{topic}.a>{topic}.b")
        assert answer.status_code == 200
        body = answer.json()
        assert (body["router"], body["deleted"]) == (f"{topic}.a>{topic}.b", existed)
    write(client, f"{topic}.a", 2)
    assert datas(client, f"{topic}.b") == [1]
    assert error_of(client.get(f"/v0/routers/{topic}.a>{topic}.b")) == (404, "router_not_found")


def test_a_router_takes_what_was_acked_before_its_delete(client: httpx.Client, topic: str, lazy: None) -> None:
    """Nothing that a reader could have seen a moment before is missing afterwards."""
    chain(client, f"{topic}.a", f"{topic}.b")
    write(client, f"{topic}.a", 1)
    assert datas(client, f"{topic}.b") == [1]
    write(client, f"{topic}.a", 2)
    client.delete(f"/v0/routers/{topic}.a>{topic}.b")
    assert datas(client, f"{topic}.b") in ([1], [1, 2])


def test_create_dest_false_needs_a_dest(client: httpx.Client, topic: str) -> None:
    body = {"source": f"{topic}.a", "dest": f"{topic}.b", "create_dest": False}
    answer = client.put(f"/v0/routers/{topic}", json=body)
    assert error_of(answer) == (404, "topic_not_found")
    assert client.get(f"/v0/routers/{topic}").status_code == 404
    assert client.get(f"/v0/topics/{topic}.b").status_code == 404
    client.put(f"/v0/topics/{topic}.b")
    assert client.put(f"/v0/routers/{topic}", json=body).status_code == 201


def test_a_router_is_led_elsewhere_by_a_put(client: httpx.Client, topic: str) -> None:
    a, b, c = f"{topic}.a", f"{topic}.b", f"{topic}.c"
    put(client, topic, a, b)
    write(client, a, 1)
    assert datas(client, b) == [1]
    answer = client.put(f"/v0/routers/{topic}", json={"dest": c})
    assert (answer.status_code, answer.json()["created"], answer.json()["dest"]) == (200, False, c)
    write(client, a, 2)
    assert (datas(client, b), datas(client, c)) == ([1], [2])
    assert client.delete(f"/v0/topics/{b}").json()["routers_removed"] == 0
    assert client.delete(f"/v0/topics/{c}").json()["routers_removed"] == 1


# -- cycles ----------------------------------------------------------------------------------------------------------


def test_a_cycle_is_409_with_its_path(client: httpx.Client, topic: str) -> None:
    names = [f"{topic}.{letter}" for letter in "abcd"]
    chain(client, *names)
    put(client, f"{topic}.side", names[1], f"{topic}.elsewhere")
    edges = {*pairwise(names), (names[3], names[0])}
    answer = client.put(f"/v0/routers/{topic}.last", json={"source": names[3], "dest": names[0]})
    assert error_of(answer) == (409, "router_cycle")
    cycle = answer.json()["error"]["detail"]["cycle"]
    assert cycle[0] == cycle[-1]
    assert sorted(cycle[1:]) == names
    assert set(pairwise(cycle)) == edges
    assert client.get(f"/v0/routers/{topic}.last").status_code == 404
    answer = client.put(f"/v0/routers/{topic}.two", json={"source": names[1], "dest": names[0]})
    assert sorted(set(answer.json()["error"]["detail"]["cycle"])) == names[:2]


def test_a_change_can_close_a_cycle_too(client: httpx.Client, topic: str) -> None:
    a, b, c = f"{topic}.a", f"{topic}.b", f"{topic}.c"
    chain(client, a, b)
    put(client, topic, b, c)
    assert error_of(client.put(f"/v0/routers/{topic}", json={"dest": a})) == (409, "router_cycle")
    assert get(client, topic)["dest"] == c
    assert client.put(f"/v0/routers/{topic}", json={"dest": a, "allow_cycle": True}).status_code == 200
    # Its own old way does not count: turned around, it is no cycle.
    client.delete(f"/v0/routers/{a}>{b}")
    assert client.put(f"/v0/routers/{topic}", json={"source": a, "dest": b, "allow_cycle": False}).status_code == 200


def test_a_ring_of_topics_is_multi_master(client: httpx.Client, topic: str) -> None:
    """Everybody writes to a topic of their own and reads everything there, but for what they wrote themselves."""
    nodes = [f"n{number}" for number in range(4)]
    ring = {node: f"{topic}.{node}" for node in nodes}
    for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        put(client, f"{topic}.{here}", ring[here], ring[there], allow_cycle=True)

    def work(node: str) -> list[str]:
        written = []
        with httpx.Client(base_url=client.base_url, timeout=DEADLINE, trust_env=False) as own:
            for number in range(25):
                written.append(f"{node}-{number}")
                write(own, ring[node], written[-1], node=node)
        return written

    calls = [Background(lambda node=node: work(node)) for node in nodes]  # type: ignore[misc]
    written = dict(zip(nodes, [call.result() for call in calls], strict=True))
    for node in nodes:
        found = datas(client, ring[node], limit=1000)
        assert sorted(found) == sorted(joined(*written.values()))
        for other in nodes:
            assert [data for data in found if data.startswith(other)] == written[other]
        others = diff(client, ring[node], limit=1000, node=node)["records"]
        assert {record["$node"] for record in others} == {*nodes} - {node}
        assert len(others) == 75
        assert get(client, f"{topic}.{node}")["forwarded_total"] == 75


# -- lists -----------------------------------------------------------------------------------------------------------


def test_the_list_is_sorted_and_filtered(client: httpx.Client, topic: str) -> None:
    a, b, c = (f"{topic}.{letter}" for letter in "abc")
    for name, source, dest in (("3", a, b), ("1", a, c), (">2", b, c), ("B", a, b)):
        put(client, f"{topic}{name}", source, dest)
    assert listed(client, prefix=topic) == [f"{topic}{name}" for name in ("1", "3", ">2", "B")]
    assert listed(client, prefix=topic, source=a) == [f"{topic}{name}" for name in ("1", "3", "B")]
    assert listed(client, dest=c) == [f"{topic}{name}" for name in ("1", ">2")]
    assert listed(client, source=a, dest=c) == [f"{topic}1"]
    assert listed(client, source=c) == []
    assert listed(client, prefix=f"{topic}>") == [f"{topic}>2"]
    assert listed(client, prefix=f"{topic}zzz") == []


def test_pages_go_on_at_an_opaque_cursor(client: httpx.Client, topic: str) -> None:
    for number in range(5):
        put(client, f"{topic}>{number}", f"{topic}.a", f"{topic}.b{number}")
        put(client, f"{topic}>{number}x", f"{topic}.x", f"{topic}.c{number}")
    query: dict[str, Any] = {"prefix": topic, "source": f"{topic}.a", "page_size": 2}
    pages = []
    while True:
        body = client.get("/v0/routers", params=query).json()
        pages.append([each["router"] for each in body["routers"]])
        if "next_cursor" not in body:
            break
        base64.b64decode(body["next_cursor"], altchars=b"-_", validate=True)
        query["cursor"] = body["next_cursor"]
        client.delete(f"/v0/routers/{pages[-1][-1]}")
    assert pages == [[f"{topic}>{number}" for number in part] for part in ((0, 1), (2, 3), (4,))]
    put(client, f"{topic}>0", f"{topic}.a", f"{topic}.b0")
    full = client.get("/v0/routers", params={"prefix": topic, "source": f"{topic}.a", "page_size": 3}).json()
    assert len(full["routers"]) == 3
    assert "next_cursor" not in full


@pytest.mark.parametrize("query", ["cursor=%25", "cursor=abc", "cursor=", "page_size=0", "page_size=-1", "page_size=x"])
def test_a_corrupt_cursor_or_page_size_is_400(client: httpx.Client, query: str) -> None:
    assert error_of(client.get(f"/v0/routers?{query}")) == (400, "invalid_request")
    assert client.get("/v0/routers?page_size=100000").status_code == 200


# -- what a copy is --------------------------------------------------------------------------------------------------


def test_start_head_and_earliest_and_a_source_that_is_not_there_yet(client: httpx.Client, topic: str) -> None:
    a = f"{topic}.a"
    write(client, a, 1, 2, 3)
    client.post(f"/v0/topics/{a}/delete", json={"before_seq": 2})
    put(client, f"{topic}>h", a, f"{topic}.h")
    put(client, f"{topic}>e", a, f"{topic}.e", start="earliest")
    for name, start in (("nh", "head"), ("ne", "earliest")):
        put(client, f"{topic}>{name}", f"{topic}.later", f"{topic}.{name}", start=start)
    write(client, a, 4)
    client.put(f"/v0/topics/{topic}.later", json={"seq_base": 50})
    write(client, f"{topic}.later", "first")
    assert datas(client, f"{topic}.h") == [4]
    eventually(lambda: get(client, f"{topic}>e")["lag"] == 0, "what is retained")
    assert datas(client, f"{topic}.e") == [2, 3, 4]
    assert datas(client, f"{topic}.nh") == datas(client, f"{topic}.ne") == ["first"]
    assert diff(client, f"{topic}.nh")["tombstone"] is None
    assert get(client, f"{topic}>nh")["cursor"] == 50
    assert get(client, f"{topic}>e")["cursor"] == 4


@pytest.mark.parametrize("data", [b"1.0", b"1e400", b'{"b":1,"a":2,"b":3}', b'"\\u00e9\\/"', b"[ 1 ,2 ]", b"null"])
def test_data_is_carried_byte_for_byte(client: httpx.Client, topic: str, data: bytes) -> None:
    chain(client, f"{topic}.a", f"{topic}.b", f"{topic}.c")
    write_raw(client, f"{topic}.a", data)
    assert raw_data(client.post(f"/v0/topics/{topic}.c/diff", json={}).content) == data


def test_a_copy_has_a_seq_and_time_of_its_own_and_keeps_the_rest(client: httpx.Client, topic: str) -> None:
    a = f"{topic}.a"
    client.put(f"/v0/topics/{topic}.kept", json={"seq_base": 1000})
    put(client, f"{topic}>kept", a, f"{topic}.kept")
    put(client, f"{topic}>bare", a, f"{topic}.bare", preserve_node=False, preserve_tag=False)
    record = {"data": [1], "tag": "t", "node": "n", "meta": {"k": "v"}}
    client.post(f"/v0/topics/{a}", json={"records": [record, {"data": 2}]})
    first, second = diff(client, f"{topic}.kept", include_tags=True)["records"]
    assert first.pop("$ts") > 0
    assert first == {"$seq": 1000, "$tag": "t", "$node": "n", "data": [1], "meta": {"k": "v"}}
    assert set(second) == {"$seq", "$ts", "data"}
    first, second = diff(client, f"{topic}.bare", include_tags=True)["records"]
    assert set(first) == {"$seq", "$ts", "data", "meta"}
    assert [record["$seq"] for record in diff(client, f"{topic}.kept", node="n")["records"]] == [1001]
    assert [record["$seq"] for record in diff(client, f"{topic}.bare", node="n")["records"]] == [1, 2]


def test_the_way_of_a_record_is_not_shown(client: httpx.Client, server: LocalServer, topic: str) -> None:
    chain(client, f"{topic}.a", f"{topic}.b", f"{topic}.c")
    write(client, f"{topic}.a", 1)
    [record] = diff(client, f"{topic}.c", include_tags=True)["records"]
    assert set(record) == {"$seq", "$ts", "data"}
    session = client.post("/v0/watch", json={"topics": {f"{topic}.c": {}}}).json()
    with Events(server.port, session["stream_url"]) as events:
        [shown] = events.stream().event("record").json()["records"]
    assert set(shown) == {"$seq", "$ts", "data"}


@pytest.mark.parametrize(
    ("wanted", "expected"), [("a", [1]), (["tag", "Glob", "a*"], [1, 3]), (["tag", "Glob", "*"], [1, 2, 3])]
)
def test_a_filter_lets_through_what_it_says(client: httpx.Client, topic: str, wanted: Any, expected: list[int]) -> None:
    put(client, topic, f"{topic}.a", f"{topic}.b", filter=wanted)
    records = [{"data": 1, "tag": "a"}, {"data": 2, "tag": "b"}, {"data": 3, "tag": "ab"}, {"data": 4}]
    client.post(f"/v0/topics/{topic}.a", json={"records": records})
    assert datas(client, f"{topic}.b") == expected
    now = get(client, topic)
    assert (now["forwarded_total"], now["cursor"], now["lag"]) == (len(expected), 4, 0)


def test_fan_out_fan_in_and_a_diamond(client: httpx.Client, topic: str) -> None:
    a, b, c, d = (f"{topic}.{letter}" for letter in "abcd")
    for source, dest in ((a, b), (a, c), (b, d), (c, d)):
        put(client, f"{source}>{dest}", source, dest)
    for number in range(10):
        write(client, a, number)
    found = datas(client, d)
    assert sorted(found) == sorted([*range(10), *range(10)])
    # Two routers side by side are two copies too, each in order.
    put(client, f"{topic}.again", a, b)
    write(client, a, 10, 11)
    assert datas(client, b, from_seq=10) == [10, 11, 10, 11]


def test_a_txn_reaches_the_dests_of_its_topics(client: httpx.Client, topic: str) -> None:
    chain(client, f"{topic}.a", f"{topic}.z")
    put(client, f"{topic}.b>", f"{topic}.b", f"{topic}.z")
    for number, name in enumerate((f"{topic}.a", f"{topic}.b")):
        answer = client.post(f"/v0/topics/{name}?txn={topic}&part=p&chunk={number}", json={"records": [{"data": name}]})
        assert answer.status_code == 200, answer.text
    parts = [{"part": "p", "records": {f"{topic}.a": 1, f"{topic}.b": 1}}]
    answer = client.post(f"/v0/txns/{topic}/commit", json={"parts": parts})
    assert answer.status_code == 200, answer.text
    assert sorted(datas(client, f"{topic}.z")) == [f"{topic}.a", f"{topic}.b"]


# -- losses and full dests -------------------------------------------------------------------------------------------


def test_a_full_dest_blocks_its_router_and_nothing_else(client: httpx.Client, topic: str) -> None:
    a, b, free = f"{topic}.a", f"{topic}.b", f"{topic}.free"
    client.put(f"/v0/topics/{b}", json={"cap_records": 3, "discard": "reject"})
    put(client, topic, a, b)
    put(client, f"{topic}.free", a, free)
    for number in range(6):
        write(client, a, number)
    assert datas(client, b) == [0, 1, 2]
    assert datas(client, free) == [0, 1, 2, 3, 4, 5]
    now = get(client, topic)
    assert (now["state"], now["cursor"], now["lag"], now["forwarded_total"]) == ("blocked", 3, 3, 3)
    assert b in now["last_error"]
    assert get(client, f"{topic}.free")["state"] == "running"
    client.post(f"/v0/topics/{b}/delete", json={"before_seq": 3})
    eventually(lambda: datas(client, b) == [2, 3, 4], "room is used")
    client.put(f"/v0/topics/{b}", json={"cap_records": 0})
    eventually(lambda: datas(client, b) == [2, 3, 4, 5], "the rest")
    eventually(lambda: get(client, topic)["state"] == "running", "running again")
    now = get(client, topic)
    assert (now["lag"], now["last_error"], now["forwarded_total"]) == (0, None, 6)


def test_what_a_blocked_router_has_lost_is_a_hole_of_the_same_length(client: httpx.Client, topic: str) -> None:
    a, b = f"{topic}.a", f"{topic}.b"
    client.put(f"/v0/topics/{a}", json={"cap_records": 3})
    client.put(f"/v0/topics/{b}", json={"cap_records": 2, "discard": "reject"})
    put(client, topic, a, b, filter=["tag", "Glob", "*"])
    for number in range(1, 12):
        client.post(f"/v0/topics/{a}", json={"records": [{"data": number, "tag": "t"}]})
        diff(client, b)
    # 1 and 2 are there, 3 to 8 are gone, 9 to 11 wait. A loss needs no room.
    eventually(lambda: client.get(f"/v0/topics/{b}").json()["holes"] == 1, "the hole")
    answer = diff(client, b, from_seq=2)
    stone = answer["tombstone"]
    assert (stone["gap_from"], stone["gap_to"], stone["reason"]) == (3, 8, "source_trim")
    assert datas(client, b) == [1, 2]
    client.post(f"/v0/topics/{a}/delete", json={"match": "t", "before_seq": 10})
    client.put(f"/v0/topics/{b}", json={"cap_records": 0})
    eventually(lambda: get(client, topic)["lag"] == 0, "the rest")
    assert datas(client, b, from_seq=8) == [10, 11]
    assert [record["$seq"] for record in diff(client, b, from_seq=8)["records"]] == [9, 10]
    assert get(client, topic)["forwarded_total"] == 4


def test_a_router_takes_what_is_evicted_in_the_same_moment(client: httpx.Client, topic: str, lazy: None) -> None:
    a, b = f"{topic}.a", f"{topic}.b"
    client.put(f"/v0/topics/{a}", json={"cap_records": 1})
    put(client, topic, a, b)
    write(client, a, 1, 2, 3)
    write(client, a, 4)
    client.post(f"/v0/topics/{a}", json={"records": [{"data": 5}]})
    answer = diff(client, b)
    assert ([record["data"] for record in answer["records"]], answer["tombstone"]) == ([1, 2, 3, 4, 5], None)


def test_a_hole_written_at_the_source_is_a_hole_at_the_dest(client: httpx.Client, topic: str) -> None:
    chain(client, f"{topic}.a", f"{topic}.b", f"{topic}.c")
    records = [{"data": 1}, {"hole": 5, "reason": "source_trim"}, {"data": 2}]
    client.post(f"/v0/topics/{topic}.a", json={"records": records})
    assert datas(client, f"{topic}.c") == [1]
    stone = diff(client, f"{topic}.c", from_seq=1)["tombstone"]
    assert (stone["gap_from"], stone["gap_to"], stone["reason"]) == (2, 6, "source_trim")
    assert [record["$seq"] for record in diff(client, f"{topic}.c", from_seq=6)["records"]] == [7]


def test_a_start_at_earliest_tells_a_later_loss_only(client: httpx.Client, topic: str) -> None:
    a = f"{topic}.a"
    client.put(f"/v0/topics/{a}", json={"cap_records": 2})
    write(client, a, 1, 2, 3, 4)
    put(client, topic, a, f"{topic}.b", start="earliest")
    eventually(lambda: get(client, topic)["lag"] == 0, "what is retained")
    answer = diff(client, f"{topic}.b")
    assert ([record["data"] for record in answer["records"]], answer["tombstone"]) == ([3, 4], None)


def test_deletes_are_not_passed_on(client: httpx.Client, topic: str) -> None:
    chain(client, f"{topic}.a", f"{topic}.b")
    write(client, f"{topic}.a", 1, 2)
    assert datas(client, f"{topic}.b") == [1, 2]
    client.post(f"/v0/topics/{topic}.a/delete", json={"before_seq": 3})
    assert datas(client, f"{topic}.b") == [1, 2]


# -- topics that go --------------------------------------------------------------------------------------------------


def test_a_topic_takes_its_routers_along_and_counts_them(client: httpx.Client, topic: str) -> None:
    a, b, c = (f"{topic}.{letter}" for letter in "abc")
    chain(client, a, b, c)
    put(client, f"{topic}.far", b, {"url": NOWHERE, "topic": "x"})
    put(client, f"{topic}.near", {"url": NOWHERE, "topic": "x"}, b)
    put(client, f"{topic}.other", a, c)
    body = client.delete(f"/v0/topics/{b}").json()
    assert (body["deleted"], body["routers_removed"]) == (True, 4)
    assert listed(client, prefix=topic) == [f"{topic}.other"]
    write(client, b, "new")
    write(client, a, 1)
    assert (datas(client, b), datas(client, c)) == (["new"], [1])
    assert client.delete(f"/v0/topics/{a}").json()["routers_removed"] == 1
    assert datas(client, c) == [1]


def test_a_router_that_waits_for_its_source_outlives_nothing_else(client: httpx.Client, topic: str) -> None:
    put(client, topic, f"{topic}.a", f"{topic}.b")
    body = client.delete(f"/v0/topics/{topic}.a").json()
    assert body["deleted"] is False
    assert client.delete(f"/v0/topics/{topic}.b").json()["routers_removed"] == 1
    assert client.get(f"/v0/routers/{topic}").status_code == 404


def test_a_dest_is_not_empty_when_its_source_was_written(client: httpx.Client, topic: str, lazy: None) -> None:
    chain(client, f"{topic}.a", f"{topic}.b")
    write(client, f"{topic}.a", 1)
    assert error_of(client.delete(f"/v0/topics/{topic}.b?if_empty=true")) == (409, "topic_not_empty")


# -- limits ----------------------------------------------------------------------------------------------------------


def test_routers_are_capped_but_not_their_changes(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_routers=2)) as server, server.client() as client:
        put(client, "r1", "a", "b1")
        put(client, "r2", "a", "b2")
        answer = client.put("/v0/routers/r3", json={"source": "a", "dest": "b3"})
        assert error_of(answer) == (429, "throttled")
        assert answer.json()["error"]["detail"] == {"limit": "TOPICS_MAX_ROUTERS", "max": 2}
        assert int(answer.headers["retry-after"]) >= 1
        assert client.get("/v0/topics/b3").status_code == 404
        assert put(client, "r2", "a", "b2", filter="x")["created"] is False
        assert put(client, "r2", "a", "b4")["created"] is False
        client.delete("/v0/routers/r1")
        assert put(client, "r3", "a", "b3")["created"] is True


def test_a_dest_that_would_be_one_topic_too_many_is_not_made(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_topics=1)) as server, server.client() as client:
        client.put("/v0/topics/a")
        answer = client.put("/v0/routers/r", json={"source": "a", "dest": "b"})
        assert error_of(answer) == (429, "throttled")
        assert answer.json()["error"]["detail"]["limit"] == "TOPICS_MAX_TOPICS"
        assert client.get("/v0/routers/r").status_code == 404


# -- who may do what -------------------------------------------------------------------------------------------------

KEYS = {
    "all": "",
    "read": ":read",
    "write": ":write",
    "delete": ":delete",
    "admin": ":admin",
    "a": "::a",
    "b": "::b",
    "ab": "::a|b",
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    keys = ",".join(f"{key}-secret{rest}" for key, rest in KEYS.items())
    with local_server(tmp_path_factory.mktemp("guarded"), api_keys=keys) as running:
        yield running


Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(guarded: LocalServer) -> Iterator[Ask]:
    with guarded.client() as opened:

        def send(key: str, method: str, path: str, body: Any = None) -> httpx.Response:
            return opened.request(method, path, json=body, headers={"authorization": f"Bearer {key}-secret"})

        yield send


@pytest.mark.parametrize(
    ("method", "path", "body", "scope"),
    [
        ("PUT", "/v0/routers/scoped", {"source": "a.s", "dest": "b.s"}, "admin"),
        ("GET", "/v0/routers/scoped", None, "read"),
        ("GET", "/v0/routers", None, "read"),
        ("DELETE", "/v0/routers/scoped", None, "delete"),
    ],
)
def test_a_verb_needs_its_scope(ask: Ask, method: str, path: str, body: Any, scope: str) -> None:
    ask("all", "PUT", "/v0/routers/scoped", {"source": "a.s", "dest": "b.s"})
    for key in ("read", "write", "delete", "admin"):
        answer = ask(key, method, path, body)
        if key == scope:
            assert answer.status_code == 200, key
        else:
            assert error_of(answer) == (403, "forbidden"), key
    assert error_of(ask("nobody", method, path, body)) == (401, "unauthorized")


def test_a_put_needs_the_prefixes_of_both_ends(ask: Ask) -> None:
    for body, wanted in (
        ({"source": "a.1", "dest": "b.1"}, {"ab"}),
        ({"source": "a.1", "dest": "a.2"}, {"a", "ab"}),
        ({"source": {"url": NOWHERE, "topic": "z"}, "dest": "b.1"}, {"b", "ab"}),
        ({"source": "a.1", "dest": {"url": NOWHERE, "topic": "z"}}, {"a", "ab"}),
        ({"source": "c", "dest": "b.1"}, set()),
    ):
        for key in ("a", "b", "ab"):
            answer = ask(key, "PUT", "/v0/routers/prefixed", body)
            if key in wanted:
                assert answer.status_code == 201, (key, body)
                assert ask("all", "DELETE", "/v0/routers/prefixed").json()["deleted"] is True
            else:
                assert error_of(answer) == (403, "forbidden"), (key, body)
                assert ask("all", "GET", "/v0/routers/prefixed").status_code == 404


def test_a_router_of_others_is_not_seen_changed_or_deleted(ask: Ask) -> None:
    ask("all", "PUT", "/v0/routers/own>aa", {"source": "a.1", "dest": "a.2"})
    ask("all", "PUT", "/v0/routers/own>ab", {"source": "a.1", "dest": "b.2"})
    ask("all", "PUT", "/v0/routers/own>far", {"source": "b.1", "dest": {"url": NOWHERE, "topic": "a"}})
    seen = {"a": ["own>aa"], "b": ["own>far"], "ab": ["own>aa", "own>ab", "own>far"]}
    for key, names in seen.items():
        body = ask(key, "GET", "/v0/routers?prefix=own").json()
        assert [each["router"] for each in body["routers"]] == names
        metrics = ask(key, "GET", "/v0/metrics").text
        for name in ("own>aa", "own>ab", "own>far"):
            assert (f'topics_router_lag{{router="{name}"}}' in metrics) is (name in names)
            expected = 200 if name in names else 403
            assert ask(key, "GET", f"/v0/routers/{name}").status_code == expected
    # What is filtered out takes no place on a page.
    page = ask("b", "GET", "/v0/routers?prefix=own&page_size=1").json()
    assert ([each["router"] for each in page["routers"]], "next_cursor" in page) == (["own>far"], False)
    for patch in ({"source": "a.1", "dest": "a.2"}, {"dest": "a.3"}, {"filter": "x"}, {}):
        assert error_of(ask("a", "PUT", "/v0/routers/own>ab", patch)) == (403, "forbidden"), patch
    assert error_of(ask("a", "DELETE", "/v0/routers/own>ab")) == (403, "forbidden")
    assert ask("all", "GET", "/v0/routers/own>ab").json()["dest"] == "b.2"


def test_a_cycle_names_no_topic_that_the_key_may_not_see(ask: Ask) -> None:
    ask("all", "PUT", "/v0/routers/cy1", {"source": "a.cy1", "dest": "hidden-topic"})
    ask("all", "PUT", "/v0/routers/cy2", {"source": "hidden-topic", "dest": "a.cy2"})
    answer = ask("a", "PUT", "/v0/routers/cy3", {"source": "a.cy2", "dest": "a.cy1"})
    assert error_of(answer) == (409, "router_cycle")
    assert "hidden-topic" not in answer.text


# -- the key of a remote ---------------------------------------------------------------------------------------------


def test_the_key_of_a_remote_is_shown_nowhere(tmp_path: Path) -> None:
    secret = "SECRET5f3a"
    far = {"url": NOWHERE, "topic": "far", "key": secret}
    with child(tmp_path, "--access-log") as server:
        server.wait_until_ready()
        with server.client() as client:
            shown: list[httpx.Response] = []

            def ask(method: str, path: str, **body: Any) -> httpx.Response:
                shown.append(client.request(method, path, json=body or None))
                return shown[-1]

            assert ask("PUT", "/v0/routers/push", source="a", dest=far).json()["dest"] == REMOTE | {"topic": "far"}
            assert ask("PUT", "/v0/routers/pull", source=far, dest="b").json()["source"] == REMOTE | {"topic": "far"}
            ask("PUT", "/v0/routers/push", filter="x")
            ask("PUT", "/v0/routers/push", dest={**far, "url": "http://169.254.169.254"})
            ask("PUT", "/v0/routers/push", dest={**far, "topic": "no/name"})
            ask("PUT", "/v0/routers/push", dest={**far, "url": f"http://{secret}@h"})
            ask("PUT", "/v0/routers/push", dest={**far, "key": secret + "\n"})
            ask("PUT", "/v0/routers/push", source=far, dest=far)
            ask("PUT", "/v0/routers/push", dest={**far, "key": [secret]})
            ask("PUT", "/v0/routers/both", source=far, dest=far)
            ask("PUT", "/v0/routers/same", source="a", dest="a", key=secret)
            write(client, "a", 1, 2)
            for name in ("push", "pull"):
                eventually(lambda name=name: get(client, name)["state"] == "blocked", "refused")  # type: ignore[misc]
                body = ask("GET", f"/v0/routers/{name}").json()
                assert body["last_error"]
                assert "key" not in body["source"]
                assert "key" not in body["dest"]
            for path in ("/v0/routers", "/v0/metrics", "/openapi.json", "/v0/topics", "/v0/topics/a", "/v0/ready"):
                ask("GET", path)
            shown.append(client.get("/v0/metrics", headers={"accept": "application/json"}))
            ask("DELETE", "/v0/routers/pull")
            ask("DELETE", "/v0/topics/a")
            for answer in shown:
                assert secret not in answer.text, answer.text
                assert secret not in str(answer.headers)
        server.terminate()
        code, said = server.wait_for_end()
        assert code == 0
        assert "/v0/routers/push" in said, "the log is on"
        assert secret not in said


def test_a_key_stays_when_the_same_end_is_sent_without_it_and_goes_nowhere_else(
    client: httpx.Client, server: LocalServer, topic: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:

        def heard(listener: socket.socket) -> bytes:
            listener.settimeout(DEADLINE)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE)
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(4096)
            return data

        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in (first, second)]
        call = Background(lambda: heard(first))
        put(client, topic, {"url": urls[0], "topic": "far", "key": "SECRET"}, f"{topic}.b")
        assert b"Bearer SECRET" in call.result()
        put(client, topic, {"url": urls[0], "topic": "far"}, f"{topic}.b", filter="x")
        assert b"Bearer SECRET" in heard(first)
        call = Background(lambda: heard(second))
        put(client, topic, {"url": urls[1], "topic": "far"}, f"{topic}.b")
        assert b"SECRET" not in call.result()
        client.delete(f"/v0/routers/{topic}")


# -- where no router may go ------------------------------------------------------------------------------------------

FORBIDDEN = [
    "http://169.254.169.254",
    "http://169.254.169.254:80/",
    "https://169.254.0.1:8443",
    "http://[fe80::1]",
    "http://[fe80::1%25eth0]",
    "http://[::ffff:169.254.169.254]",
    "http://[::ffff:a9fe:a9fe]",
    "http://[fd00:ec2::254]",
    "http://100.100.100.200",
    "http://metadata.google.internal",
    "http://METADATA.google.internal.",
    "http://[::169.254.169.254]",
    "http://[64:ff9b::169.254.169.254]",
    "http://[2002:a9fe:a9fe::]",
]


@pytest.mark.parametrize("url", FORBIDDEN)
def test_a_link_local_or_metadata_address_is_refused(client: httpx.Client, topic: str, url: str) -> None:
    far = {"url": url, "topic": "t"}
    for body in ({"source": "a", "dest": far}, {"source": far, "dest": "b"}):
        answer = client.put(f"/v0/routers/{topic}", json=body)
        assert error_of(answer) == (400, "invalid_request")
        assert "link-local" in answer.json()["error"]["message"]
        assert client.get(f"/v0/routers/{topic}").status_code == 404


@pytest.mark.parametrize(
    "url", ["http://2852039166", "http://0xa9fea9fe", "http://169.16689662", "http://0251.0376.0251.0376"]
)
def test_a_name_that_leads_to_such_an_address_is_refused_when_it_is_resolved(
    client: httpx.Client, topic: str, url: str
) -> None:
    answer = client.put(f"/v0/routers/{topic}", json={"source": {"url": url, "topic": "t"}, "dest": f"{topic}.b"})
    if answer.status_code == 400:
        return
    eventually(lambda: get(client, topic)["state"] == "blocked", "refused")
    assert "link-local" in get(client, topic)["last_error"]
    client.delete(f"/v0/routers/{topic}")


def test_other_private_addresses_are_nobodys_business() -> None:
    for host in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "::1", "fd00::1", "example.com", "::ffff:10.0.0.1"):
        assert not is_forbidden(host), host


def test_a_setting_permits_them(tmp_path: Path) -> None:
    with local_server(tmp_path, allow_link_local=True) as server, server.client() as client:
        for number, url in enumerate(FORBIDDEN):
            put(client, f"r{number}", "a", {"url": url, "topic": "t"})


# -- a read sees what was acked --------------------------------------------------------------------------------------


def shape(client: httpx.Client, topic: str, kind: str, **config: Any) -> tuple[str, str, int]:
    """Topics with routers between them: the first, the last, and how many copies arrive."""
    names = [f"{topic}.{letter}" for letter in "abcd"]
    a, b, c, d = names
    last_is_queue = config.pop("queue", False)
    for name in names:
        kind_of = {"type": "queue"} if last_is_queue and name == d else {}
        assert client.put(f"/v0/topics/{name}", json={**config, **kind_of}).status_code == 201
    edges = {
        "one": [(a, d)],
        "chain": [(a, b), (b, c), (c, d)],
        "diamond": [(a, b), (a, c), (b, d), (c, d)],
        "ring": [(a, b), (b, c), (c, d), (d, a)],
    }[kind]
    for source, dest in edges:
        put(client, f"{source}>{dest}", source, dest, allow_cycle=kind == "ring")
    return a, d, 2 if kind == "diamond" else 1


CLASSES = pytest.mark.parametrize("durability", ["disk", "fsync"])
SHAPES = pytest.mark.parametrize("kind", ["one", "chain", "diamond", "ring"])


def see_diff(server: LocalServer, client: httpx.Client, dest: str) -> int:
    return len(diff(client, dest)["records"])


def see_poll(server: LocalServer, client: httpx.Client, dest: str) -> int:
    return len(diff(client, dest, wait_ms=LONG)["records"])


def see_state(server: LocalServer, client: httpx.Client, dest: str) -> int:
    count: int = client.get(f"/v0/topics/{dest}").json()["count"]
    return count


def see_seek(server: LocalServer, client: httpx.Client, dest: str) -> int:
    answer = client.get(f"/v0/topics/{dest}/seek?ts=9007199254740000").json()
    seq: int = answer["from_seq"]
    return seq


def see_delete(server: LocalServer, client: httpx.Client, dest: str) -> int:
    deleted: int = client.post(f"/v0/topics/{dest}/delete", json={"before_seq": 100}).json()["deleted"]
    assert see_state(server, client, dest) == 0
    return deleted


def see_delete_by_tag(server: LocalServer, client: httpx.Client, dest: str) -> int:
    deleted: int = client.post(f"/v0/topics/{dest}/delete", json={"match": "t"}).json()["deleted"]
    return deleted


def see_watch(server: LocalServer, client: httpx.Client, dest: str) -> int:
    session = client.post("/v0/watch", json={"topics": {dest: {}}}).json()
    with Events(server.port, session["stream_url"]) as events:
        events.stream()
        assert sum(len(frame.json()["records"]) for frame in events.until("caught-up")[:-1])
    head: int = session["topics"][dest]["head_seq"]
    return head


def see_watch_tail(server: LocalServer, client: httpx.Client, dest: str) -> int:
    session = client.post("/v0/watch", json={"topics": {dest: {"tail": True}}}).json()
    seq: int = session["topics"][dest]["from_seq"]
    return seq


def see_ws(server: LocalServer, client: httpx.Client, dest: str) -> int:
    with Socket(server.port) as ws:
        answer = ws.ask("subscribed", type="subscribe", request_id=1, topics={dest: {"tail": True}})
    seq: int = answer["topics"][dest]["from_seq"]
    return seq


def see_router(server: LocalServer, client: httpx.Client, dest: str) -> int:
    [name] = listed(client, dest=dest)[:1]
    cursor: int = get(client, name)["cursor"]
    count: int = client.get(f"/v0/topics/{dest}?touch=false").json()["count"]
    return count if cursor else 0


See = Callable[[LocalServer, httpx.Client, str], int]
READS: list[See] = [
    *(see_diff, see_poll, see_state, see_seek, see_delete, see_delete_by_tag, see_watch, see_watch_tail, see_ws),
    see_router,
]


@CLASSES
@SHAPES
@pytest.mark.parametrize("see", READS)
def test_a_read_of_a_dest_sees_what_was_acked_at_its_sources(
    server: LocalServer, client: httpx.Client, topic: str, lazy: None, durability: str, kind: str, see: See
) -> None:
    source, dest, copies = shape(client, topic, kind, durability=durability)
    records = [{"data": number, "tag": "t"} for number in range(3)]
    for _ in range(2):
        client.post(f"/v0/topics/{source}", json={"records": records})
    assert see(server, client, dest) == 6 * copies


@CLASSES
@SHAPES
def test_a_claim_on_a_dest_gets_what_was_acked_at_its_sources(
    client: httpx.Client, topic: str, lazy: None, durability: str, kind: str
) -> None:
    source, dest, copies = shape(client, topic, kind, durability=durability, queue=True)
    write(client, source, 1, 2)
    body = client.post(f"/v0/topics/{dest}/claim", json={"node": "w", "max": 10}).json()
    assert sorted(job["data"] for job in body["claimed"]) == sorted([1, 2] * copies)
    assert client.get(f"/v0/topics/{dest}/leases").json()["leases"]


@CLASSES
@pytest.mark.parametrize("kind", ["chain", "diamond", "ring"])
def test_a_read_sees_what_its_writer_was_told_under_load(
    client: httpx.Client, topic: str, durability: str, kind: str
) -> None:
    source, dest, copies = shape(client, topic, kind, durability=durability)

    def work(writer: int) -> None:
        with httpx.Client(base_url=client.base_url, timeout=DEADLINE, trust_env=False) as own:
            cursor = 0
            mine: list[str] = []
            for number in range(8):
                mine += [f"{writer}-{number}"] * copies
                write(own, source, mine[-1])
                # Everything that this writer was told is there, in its order.
                found = [data for data in datas(own, dest, limit=1000) if data.startswith(f"{writer}-")]
                assert found == mine or (copies == 2 and sorted(found) == sorted(mine))
                state = own.get(f"/v0/topics/{dest}").json()
                assert state["head_seq"] >= cursor + copies
                cursor = state["head_seq"]

    calls = [Background(lambda writer=writer: work(writer)) for writer in range(4)]  # type: ignore[misc]
    for call in calls:
        call.result()
    assert client.get(f"/v0/topics/{dest}").json()["count"] == 32 * copies


def test_a_read_behind_a_write_on_one_connection_sees_it_at_the_dest(
    server: LocalServer, client: httpx.Client, topic: str, lazy: None
) -> None:
    source, dest, _ = shape(client, topic, "chain", durability="fsync")
    body = b'{"records":[{"data":7}]}'
    with Wire(server.port) as wire:
        wire.send(request("POST", f"/v0/topics/{source}", body) + request("POST", f"/v0/topics/{dest}/diff", b"{}"))
        assert wire.read().status == 200
        assert [record["data"] for record in wire.read().json()["records"]] == [7]


def test_a_subscription_that_is_ended_at_once_is_ended(
    server: LocalServer, client: httpx.Client, topic: str, lazy: None
) -> None:
    """Commands count in their order, also when the first has to wait for routers."""
    source, dest, _ = shape(client, topic, "chain", durability="fsync")
    write(client, source, 1)
    with Socket(server.port) as ws:
        with server.held():
            ws.send(type="subscribe", request_id=1, topics={dest: {}})
            ws.send(type="unsubscribe", request_id=2, topics=[dest])
        answers: dict[int, Any] = {}
        while len(answers) < 2:
            message = ws.message()
            if "request_id" in message:
                answers[message["request_id"]] = message
        assert list(answers) == [1, 2]
        assert answers[2]["topics"] == [dest]
        ws.send(type="ping", request_id=3)
        while ws.message().get("request_id") != 3:
            pass
        write(client, source, 2)
        assert datas(client, dest) == [1, 2]
        ws.send(type="ping", request_id=4)
        assert ws.message()["type"] == "pong"


# -- a dest is awake -------------------------------------------------------------------------------------------------


@CLASSES
@SHAPES
def test_a_forward_wakes_whoever_waits_at_a_dest(
    server: LocalServer, client: httpx.Client, topic: str, durability: str, kind: str
) -> None:
    source, dest, _ = shape(client, topic, kind, durability=durability)
    session = client.post("/v0/watch", json={"topics": {dest: {}}}).json()
    with Events(server.port, session["stream_url"]) as events, Socket(server.port) as ws:
        events.stream().event("caught-up")
        ws.ask("subscribed", type="subscribe", request_id=1, topics={dest: {}})
        poll = Background(lambda: datas(client, dest, wait_ms=LONG))
        server.wait_for_readings()
        write(client, source, "news")
        assert poll.result()[0] == "news"
        assert events.event("record").json()["records"][0]["data"] == "news"
        assert ws.until("record")[-1]["records"][0]["data"] == "news"


@CLASSES
def test_a_forward_wakes_a_claim_and_a_worker(
    server: LocalServer, client: httpx.Client, topic: str, durability: str
) -> None:
    source, dest, _ = shape(client, topic, "chain", durability=durability, queue=True)
    body = {"node": "w", "wait_ms": LONG}
    claim = Background(lambda: client.post(f"/v0/topics/{dest}/claim", json=body).json())
    server.wait_for_readings()
    write(client, source, "job")
    assert [job["data"] for job in claim.result()["claimed"]] == ["job"]
    with Events(server.port, f"/v0/topics/{dest}/work?node=v&max=1") as events:
        events.open()
        write(client, source, "more")
        assert "more" in str(events.until("job")[-1].data)


# -- no router delays an ack -----------------------------------------------------------------------------------------


def test_routers_that_do_nothing_delay_no_ack(client: httpx.Client, topic: str, lazy: None) -> None:
    source = f"{topic}.a"
    for number in range(20):
        put(client, f"{topic}>{number}", source, f"{topic}.b{number}")
    client.put(f"/v0/topics/{topic}.full", json={"cap_records": 1, "discard": "reject"})
    put(client, f"{topic}>full", source, f"{topic}.full")
    put(client, f"{topic}>far", source, {"url": NOWHERE, "topic": "x"})
    for number in range(20):
        assert write(client, source, number) == [number + 1]
    assert datas(client, source) == [*range(20)]


def test_a_remote_that_never_answers_delays_no_ack(client: httpx.Client, topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        put(client, f"{topic}>", f"{topic}.a", {"url": url, "topic": "x"})
        put(client, f"{topic}-pull", {"url": url, "topic": "x"}, f"{topic}.b")
        for number in range(20):
            write(client, f"{topic}.a", number)
            write(client, f"{topic}.b", number)
        assert datas(client, f"{topic}.b") == [*range(20)]
        assert get(client, f"{topic}>")["lag"] == 20
        for name in (f"{topic}>", f"{topic}-pull"):
            assert client.delete(f"/v0/routers/{name}").json()["deleted"] is True


def test_a_dest_that_waits_for_the_disk_delays_no_ack(
    client: httpx.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is `disk`, its dest `fsync`, and the disk syncs nothing for now."""
    source, dest = f"{topic}.a", f"{topic}.b"
    chain(client, source)
    client.put(f"/v0/topics/{dest}", json={"durability": "fsync"})
    put(client, topic, source, dest)
    write(client, source, 0)
    assert datas(client, dest) == [0]
    go_on, is_held = threading.Event(), threading.Event()
    real = os.fdatasync

    def held(file: int) -> None:
        is_held.set()
        go_on.wait(DEADLINE)
        real(file)

    monkeypatch.setattr(os, "fdatasync", held)
    try:
        for number in range(1, 20):
            write(client, source, number)
        assert is_held.wait(DEADLINE)
        read = Background(lambda: datas(client, dest))
        for number in range(20, 30):
            write(client, source, number)
        assert not read.is_done
    finally:
        go_on.set()
    assert read.result()[:20] == [*range(20)]
    assert datas(client, dest) == [*range(30)]


# -- what is reported ------------------------------------------------------------------------------------------------


def test_metrics_have_lag_and_copies_of_each_router(client: httpx.Client, topic: str, lazy: None) -> None:
    client.put(f"/v0/topics/{topic}.full", json={"cap_records": 2, "discard": "reject"})
    put(client, f"{topic}>", f"{topic}.a", f"{topic}.full")
    write(client, f"{topic}.a", 1, 2, 3, 4, 5)
    assert datas(client, f"{topic}.full") == [1, 2]
    text = client.get("/v0/metrics").text
    assert f'topics_router_lag{{router="{topic}>"}} 3.0' in text
    assert f'topics_router_forwarded_total{{router="{topic}>"}} 2.0' in text
    answer = client.get("/v0/metrics", headers={"accept": "application/json"})
    assert answer.headers["content-type"].startswith("application/json")
    assert "topics_router_lag" in answer.text


def test_a_router_that_has_much_before_it_is_catching_up(client: httpx.Client, topic: str, lazy: None) -> None:
    write(client, f"{topic}.a", *range(5))
    put(client, topic, f"{topic}.a", f"{topic}.b", start="earliest")
    now = get(client, topic)
    assert (now["state"], now["lag"], now["cursor"], now["last_error"]) == ("catching_up", 5, 0, None)
    assert datas(client, f"{topic}.b") == []


def test_the_description_has_the_routers(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths["/v0/routers"]) - {"parameters"} == {"get"}
    assert set(paths["/v0/routers/{router}"]) - {"parameters"} == {"get", "put", "delete"}
    put_it = paths["/v0/routers/{router}"]["put"]["responses"]
    assert {"200", "201", "400", "404", "409", "429"} <= set(put_it)


def test_routers_survive_a_restart(tmp_path: Path) -> None:
    with local_server(tmp_path) as server, server.client() as client:
        chain(client, "a", "b")
        put(client, "waits", "later", "c", filter="x", preserve_tag=False)
        put(client, "far", "a", {"url": NOWHERE, "topic": "t", "key": "k"})
        write(client, "a", 1)
        assert datas(client, "b") == [1]
        before = [get(client, name) for name in ("a>b", "waits")]
    with local_server(tmp_path) as server, server.client() as client:
        assert [get(client, name) for name in ("a>b", "waits")] == before
        assert get(client, "far")["lag"] == 1
        write(client, "a", 2)
        assert datas(client, "b") == [1, 2]
        client.post("/v0/topics/later", json={"records": [{"data": 3, "tag": "x"}]})
        assert datas(client, "c") == [3]
