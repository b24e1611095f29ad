"""Section 8, `/v0/watch`: sessions, frames, ids, and going on from any of them."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx
import pytest

from tests.http.server import LocalServer, child, diff, error_of, local_server, write, write_raw
from tests.http.wire import Wire, record, request
from tests.live.conftest import Watch, create
from tests.live.sse import ACCEPT, Events, Frame, frames_in, gap, make_id, told
from topics.core.limits import Limits
from topics.core.tombstone import Hole
from topics.http.following import Renderings

Config = dict[str, Any]


def put(client: httpx.Client, topic: str, **config: Any) -> int:
    """Creates a topic; returns its epoch."""
    assert client.put(f"/v0/topics/{topic}", json=config).status_code in (200, 201)
    return epoch_of(client, topic)


def epoch_of(client: httpx.Client, topic: str) -> int:
    epoch: int = client.get(f"/v0/topics/{topic}").json()["epoch"]
    return epoch


def fill(client: httpx.Client, topic: str, count: int) -> None:
    """Records 1 to `count`, with their own number as data."""
    write(client, topic, *range(1, count + 1))


def append(client: httpx.Client, topic: str, *records: dict[str, Any]) -> None:
    answer = client.post(f"/v0/topics/{topic}", json={"records": list(records)})
    assert answer.status_code in (200, 201), answer.text


def url_of(session: dict[str, Any]) -> str:
    url: str = session["stream_url"]
    return url


# -- the session -----------------------------------------------------------------------------------------------------


def test_a_session_says_where_it_begins_in_each_topic(client: httpx.Client, topic: str) -> None:
    epoch = put(client, topic, cap_records=3)
    fill(client, topic, 5)
    session = create(client, {topic: {"from_seq": 4}})
    assert session["topics"] == {topic: {"from_seq": 4, "head_seq": 5, "earliest_seq": 3, "epoch": epoch}}


def test_a_session_has_an_id_of_128_bits_its_url_and_its_life(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    first, second = create(client, {topic: {}}), create(client, {topic: {}})
    assert len(bytes.fromhex(first["wid"])) == 16
    assert first["wid"] != second["wid"]
    assert first["stream_url"] == f"/v0/watch/{first['wid']}"
    assert first["session_ttl_ms"] == 300_000
    assert first["performance"]["server_total_ms"] >= 0


def test_a_session_begins_at_seq_0_unless_it_says_otherwise(client: httpx.Client, topic: str) -> None:
    fill(client, topic, 2)
    assert create(client, {topic: {}})["topics"][topic]["from_seq"] == 0


def test_tail_is_fixed_when_the_session_is_made(client: httpx.Client, topic: str, resume: Watch) -> None:
    fill(client, topic, 3)
    session = create(client, {topic: {"tail": True}})
    assert session["topics"][topic]["from_seq"] == 3
    write(client, topic, 4, 5)
    assert resume(url_of(session)).event("record").seqs == [4, 5]


def test_tail_of_an_empty_topic_is_in_front_of_its_first_record(
    client: httpx.Client, topic: str, resume: Watch
) -> None:
    put(client, topic, seq_base=100)
    session = create(client, {topic: {"tail": True}})
    assert session["topics"][topic]["from_seq"] == 99
    write(client, topic, 1)
    assert resume(url_of(session)).event("record").seqs == [100]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"topics": {}},
        {"topics": []},
        {"topics": {"T": 1}},
        {"topics": {"T": {"from_seq": -1}}},
        {"topics": {"T": {"from_seq": 2**53}}},
        {"topics": {"T": {"from_seq": "1"}}},
        {"topics": {"T": {"epoch": -1}}},
        {"topics": {"T": {"tail": 1}}},
        {"topics": {"T": {}}, "limit": -1},
        {"topics": {"T": {}}, "max_batch_bytes": -1},
        {"topics": {"T": {}}, "heartbeat_ms": -1},
        {"topics": {"T": {}}, "node": 5},
        {"topics": {"T": {}}, "node": [5]},
        {"topics": {"T": {}}, "include_data": "no"},
        {"topics": {"": {}}},
        {"topics": {"$epoch": {}}},
        {"topics": {"a/b": {}}},
    ],
)
def test_a_bad_session_is_refused(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    put(client, topic)
    if isinstance(body.get("topics"), dict):
        body = {**body, "topics": {topic if name == "T" else name: value for name, value in body["topics"].items()}}
    assert error_of(client.post("/v0/watch", json=body)) == (400, "invalid_request")


def test_fields_that_are_not_known_are_ignored(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    assert create(client, {topic: {"what": 1}}, colour="red")["topics"][topic]["from_seq"] == 0


def test_a_session_needs_json(client: httpx.Client) -> None:
    answer = client.post("/v0/watch", content=b"{}", headers={"content-type": "text/plain"})
    assert error_of(answer) == (415, "unsupported_media_type")


def test_a_topic_that_is_not_there_is_404(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    answer = client.post("/v0/watch", json={"topics": {topic: {}, f"{topic}-none": {}}})
    assert error_of(answer) == (404, "topic_not_found")


def test_lenient_leaves_out_what_is_not_there(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    session = create(client, {topic: {}, f"{topic}-none": {}}, lenient=True)
    assert list(session["topics"]) == [topic]


def test_lenient_with_nothing_left_is_400(client: httpx.Client, topic: str) -> None:
    answer = client.post("/v0/watch?lenient=true", json={"topics": {topic: {}}})
    assert error_of(answer) == (400, "invalid_request")


def test_a_refused_session_is_not_there(server: LocalServer, client: httpx.Client, topic: str) -> None:
    before = server.call(lambda: len(server.app.watches))
    assert client.post("/v0/watch", json={"topics": {topic: {}}}).status_code == 404
    assert server.call(lambda: len(server.app.watches)) == before


# -- the stream ------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_headers_that_keep_it_flowing(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    headers = watch(topic).headers
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-store"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"


def test_the_first_frame_says_when_to_come_back_and_where_it_begins(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    put(client, topic)
    events = opened.enter_context(Events(server.port, url_of(create(client, {topic: {}})))).open()
    frame = events.frame()
    assert frame == Frame(retry="2000", id=frame.id)
    assert frame.cursors == {topic: 0, "$epoch": {topic: epoch_of(client, topic)}}
    assert events.body.startswith(b"retry: 2000\n")


@pytest.mark.parametrize(
    "accept", ["accept: text/event-stream", "accept: text/html, text/event-stream;q=0.9", "accept: */*"]
)
def test_a_client_that_takes_events_gets_them(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack, accept: str
) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    assert opened.enter_context(Events(server.port, url, accept=accept)).open().status == 200


@pytest.mark.parametrize("accept", [None, "accept: application/json", "accept: text/html"])
def test_a_client_that_does_not_take_events_is_406(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack, accept: str | None
) -> None:
    put(client, topic)
    events = opened.enter_context(Events(server.port, url_of(create(client, {topic: {}})), accept=accept)).open()
    assert events.status == 406
    assert json.loads(events.body)["error"]["code"] == "not_acceptable"


def test_an_unknown_session_is_404(client: httpx.Client) -> None:
    answer = client.get(f"/v0/watch/{'0' * 32}", headers={"accept": "text/event-stream"})
    assert error_of(answer) == (404, "not_found")


def test_a_head_request_opens_no_stream(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    wire = opened.enter_context(Wire(server.port))
    wire.send(request("HEAD", url, None, ACCEPT))
    status, _ = wire.read_head()
    assert status == 200
    # What follows is the next answer, not a body.
    wire.send(request("GET", "/v0/health"))
    assert wire.read().json()["status"] == "ok"


# -- frames ----------------------------------------------------------------------------------------------------------


def test_a_record_frame_has_exactly_what_the_contract_names(client: httpx.Client, topic: str, watch: Watch) -> None:
    epoch = put(client, topic)
    append(client, topic, {"data": {"a": 1}, "tag": "x", "node": "n", "meta": {"k": "v"}}, {"data": None})
    expected = diff(client, topic)["records"]
    frame = watch(topic).event("record")
    assert frame.json() == {"topic": topic, "records": expected, "from_seq": 0, "to_seq": 2, "head_seq": 2}
    assert frame.cursors == {topic: 2, "$epoch": {topic: epoch}}


def test_a_frame_is_three_lines_and_an_empty_one(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    events = watch(topic)
    frame = events.event("caught-up")
    expected = f'id: {frame.id}\nevent: caught-up\ndata: {{"topic":"{topic}","head_seq":0}}\n\n'
    assert events.body.partition(b"\n\n")[2] == expected.encode()


def test_a_caught_up_frame_has_topic_and_head(client: httpx.Client, topic: str, watch: Watch) -> None:
    epoch = put(client, topic)
    fill(client, topic, 3)
    frame = watch(topic).until("caught-up")[-1]
    assert frame.json() == {"topic": topic, "head_seq": 3}
    assert frame.cursors == {topic: 3, "$epoch": {topic: epoch}}


def test_a_tombstone_frame_has_the_fields_of_a_tombstone_and_its_id_stands_at_its_end(
    client: httpx.Client, topic: str, watch: Watch
) -> None:
    epoch = put(client, topic)
    append(client, topic, {"data": 1}, {"hole": 3, "reason": "source_trim"}, {"data": 5})
    first, frame, rest, _ = watch(topic).until("caught-up")
    assert first.seqs == [1]
    assert frame.json() == {
        "topic": topic,
        "gap_from": 2,
        "gap_to": 4,
        "reason": "source_trim",
        "missed_estimate": 3,
        "earliest_seq": 1,
        "head_seq": 5,
    }
    assert frame.cursors == {topic: 4, "$epoch": {topic: epoch}}
    assert rest.json()["from_seq"] == 4


def test_a_topic_that_is_deleted_is_told_of_with_its_head(client: httpx.Client, topic: str, watch: Watch) -> None:
    epoch = put(client, topic)
    fill(client, topic, 2)
    events = watch(topic)
    events.until("caught-up")
    client.delete(f"/v0/topics/{topic}")
    frame = events.event("topic-deleted")
    assert frame.json() == {"topic": topic, "head_seq": 2, "reason": "deleted"}
    assert frame.cursors == {topic: 2, "$epoch": {topic: epoch}}


def test_every_id_stands_for_the_whole_cursor_map(client: httpx.Client, topic: str, watch: Watch) -> None:
    names = [f"{topic}-{number}" for number in range(3)]
    epochs = {name: put(client, name) for name in names}
    fill(client, names[0], 2)
    events = watch({names[0]: {}, names[1]: {}, names[2]: {}})
    for _ in range(3):
        events.until("caught-up")
    write(client, names[1], 1)
    frame = events.event("record")
    assert frame.cursors == {names[0]: 2, names[1]: 1, names[2]: 0, "$epoch": epochs}


def test_records_of_an_append_come_in_one_frame_behind_caught_up(
    client: httpx.Client, topic: str, watch: Watch
) -> None:
    put(client, topic)
    events = watch(topic)
    events.event("caught-up")
    fill(client, topic, 3)
    frame = events.event("record")
    assert frame.json()["from_seq"] == 0
    assert frame.seqs == [1, 2, 3]
    write(client, topic, 4)
    assert events.event().seqs == [4]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_every_class_of_topic_can_be_followed(client: httpx.Client, topic: str, watch: Watch, durability: str) -> None:
    put(client, topic, durability=durability)
    write(client, topic, 1)
    events = watch(topic)
    assert events.event("record").seqs == [1]
    events.event("caught-up")
    write(client, topic, 2)
    assert events.event("record").seqs == [2]


def test_a_commit_over_topics_reaches_who_watches_any_of_them(client: httpx.Client, topic: str, watch: Watch) -> None:
    names = [f"{topic}-a", f"{topic}-b"]
    for name in names:
        put(client, name)
    events = watch({names[0]: {}, names[1]: {}})
    events.until("caught-up")
    events.until("caught-up")
    for name in names:
        client.post(f"/v0/topics/{name}?txn={topic}&part=p&chunk=0", json={"records": [{"data": name}]})
    parts = [{"part": "p", "records": dict.fromkeys(names, 1)}]
    assert client.post(f"/v0/txns/{topic}/commit", json={"parts": parts}).status_code == 200
    seen = {frame.json()["topic"]: frame.json()["records"][0]["data"] for frame in (events.event(), events.event())}
    assert seen == {name: name for name in names}


def test_data_comes_byte_for_byte(client: httpx.Client, topic: str, watch: Watch) -> None:
    data = b'{"b": 1.0,"a":1e400,  "a":"\\u00e9\\/ \xc3\xa9", "c":[ ]}'
    put(client, topic)
    assert write_raw(client, topic, data).status_code == 200
    frame = watch(topic).event("record")
    assert frame.data is not None
    assert b'"data":' + data + b"}]" in frame.data.encode()


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (b'{\n"a":\n1}', b'{\n"a":\n1}'),
        (b'{\r\n"a":1\r\n}', b'{\n"a":1\n}'),
        (b'{\r"a":1}', b'{\n"a":1}'),
        (b"[1,\n\n2]", b"[1,\n\n2]"),
        (b"[1,\r\r\n\n2]", b"[1,\n\n\n2]"),
        (b'{"a":1,\n\t "b":"\\n\\r"}', b'{"a":1,\n\t "b":"\\n\\r"}'),
        ('"\u2028\u2029\u0085"'.encode(), '"\u2028\u2029\u0085"'.encode()),
    ],
)
def test_line_breaks_between_tokens_are_split_over_data_lines(
    client: httpx.Client, topic: str, watch: Watch, sent: bytes, arrives: bytes
) -> None:
    put(client, topic)
    assert write_raw(client, topic, sent).status_code == 200
    events = watch(topic)
    frame = events.event("record")
    assert frame.data is not None
    assert b'"data":' + arrives + b"}]" in frame.data.encode()
    assert frame.json()["records"][0]["data"] == json.loads(sent)
    assert events.event("caught-up").json()["head_seq"] == 1


def test_line_breaks_in_meta_are_split_too(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    body = b'{"records":[{"data":1,"meta":{"a":\r\n"b"\n,\r"c":"d"}}]}'
    assert client.post(f"/v0/topics/{topic}", content=body, headers={"content-type": "application/json"}).is_success
    assert watch(topic).event("record").json()["records"][0]["meta"] == {"a": "b", "c": "d"}


# -- what a reader wants ---------------------------------------------------------------------------------------------

FULL = {"data": {"a": 1}, "tag": "x", "node": "n", "meta": {"k": "v"}}


@pytest.mark.parametrize(
    ("wishes", "keys"),
    [
        ({}, {"data", "$node", "meta"}),
        ({"include_tags": True}, {"data", "$node", "meta", "$tag"}),
        ({"include_meta": False}, {"data", "$node"}),
        ({"include_data": False}, {"$node", "meta"}),
        ({"include_data": False, "include_meta": False}, {"$node"}),
        ({"include_data": False, "include_meta": False, "include_tags": True}, {"$node", "$tag"}),
        ({"include_data": False, "include_tags": True}, {"$node", "meta", "$tag"}),
        ({"include_meta": False, "include_tags": True}, {"data", "$node", "$tag"}),
    ],
)
def test_a_reader_gets_of_each_record_what_it_asked_for(
    client: httpx.Client, topic: str, watch: Watch, wishes: Config, keys: set[str]
) -> None:
    put(client, topic)
    append(client, topic, FULL, {"data": 2})
    full, bare = watch(topic, **wishes).event("record").json()["records"]
    known = {"data": {"a": 1}, "$tag": "x", "$node": "n", "meta": {"k": "v"}}
    assert {name: value for name, value in full.items() if name in known} == {name: known[name] for name in keys}
    assert set(full) - set(known) == {"$seq", "$ts"}
    assert set(bare) == {"$seq", "$ts"} | ({"data"} & keys)


@pytest.mark.parametrize("node", ["n1", ["n1"], ["x", "n1"]])
def test_a_readers_own_node_is_left_out_silently(
    client: httpx.Client, topic: str, watch: Watch, node: str | list[str]
) -> None:
    put(client, topic)
    append(client, topic, {"data": 1, "node": "n1"}, {"data": 2, "node": "n2"}, {"data": 3}, {"data": 4, "node": "n1"})
    frames = watch(topic, node=node).until("caught-up")
    assert told(frames) == [2, 3]
    assert frames[-1].cursors[topic] == 4


def test_records_that_are_all_filtered_still_move_the_cursor(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    events = watch(topic, node="n1")
    events.event("caught-up")
    append(client, topic, {"data": 1, "node": "n1"})
    append(client, topic, {"data": 2})
    frame = events.event("record")
    assert frame.seqs == [2]
    assert frame.cursors[topic] == 2


def test_a_topic_with_dedupe_node_off_gives_everything(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic, dedupe_node=False)
    append(client, topic, {"data": 1, "node": "n1"})
    assert watch(topic, node="n1").event("record").seqs == [1]


def test_limit_bounds_the_records_of_a_frame(client: httpx.Client, topic: str, watch: Watch) -> None:
    fill(client, topic, 5)
    frames = watch(topic, limit=2).until("caught-up")
    assert [frame.seqs for frame in frames[:-1]] == [[1, 2], [3, 4], [5]]
    assert [(frame.json()["from_seq"], frame.json()["to_seq"]) for frame in frames[:-1]] == [(0, 2), (2, 4), (4, 5)]


def test_the_default_limit_is_256_and_the_highest_1000(client: httpx.Client, topic: str, watch: Watch) -> None:
    fill(client, topic, 1001)
    assert len(watch(topic).event("record").seqs) == 256
    assert len(watch(topic, limit=0).event("record").seqs) == 256
    assert len(watch(topic, limit=10**9).event("record").seqs) == 1000


def test_max_batch_bytes_bounds_a_frame_but_one_record_always_fits(
    client: httpx.Client, topic: str, watch: Watch
) -> None:
    for _ in range(3):
        write(client, topic, "x" * 1000)
    frames = watch(topic, max_batch_bytes=2500).until("caught-up")
    assert [len(frame.seqs) for frame in frames[:-1]] == [2, 1]
    frames = watch(topic, max_batch_bytes=1).until("caught-up")
    assert [len(frame.seqs) for frame in frames[:-1]] == [1, 1, 1]


def test_a_frame_has_at_most_256_kib_unless_asked_otherwise(client: httpx.Client, topic: str, watch: Watch) -> None:
    for _ in range(9):
        write(client, topic, "x" * 100_000)
    assert len(watch(topic).event("record").seqs) == 2
    assert len(watch(topic, max_batch_bytes=1 << 30).event("record").seqs) == 9


# -- backlog and live ------------------------------------------------------------------------------------------------


def test_caught_up_comes_once_behind_a_backlog(client: httpx.Client, topic: str, watch: Watch) -> None:
    fill(client, topic, 6)
    events = watch(topic, limit=2)
    kinds = [frame.event for frame in events.until("caught-up")]
    assert kinds == ["record", "record", "record", "caught-up"]
    write(client, topic, 7)
    write(client, topic, 8)
    assert [events.event().seqs, events.event().seqs] == [[7], [8]]


def test_a_reader_that_falls_behind_is_told_when_it_is_live_again(
    client: httpx.Client, topic: str, watch: Watch
) -> None:
    put(client, topic)
    events = watch(topic, limit=2)
    events.event("caught-up")
    fill(client, topic, 3)
    frames = events.until("caught-up")
    assert [frame.event for frame in frames] == ["record", "record", "caught-up"]
    assert frames[-1].json()["head_seq"] == 3


def test_each_topic_of_a_stream_catches_up_by_itself(client: httpx.Client, topic: str, watch: Watch) -> None:
    names = [f"{topic}-{number}" for number in range(4)]
    for number, name in enumerate(names):
        put(client, name)
        if number:
            fill(client, name, number)
    events = watch({name: {} for name in names})
    seen: dict[str, list[int]] = {name: [] for name in names}
    live: dict[str, int] = {}
    while len(live) < len(names):
        frame = events.event()
        fields = frame.json()
        if frame.event == "caught-up":
            live[fields["topic"]] = fields["head_seq"]
        else:
            seen[fields["topic"]] += frame.seqs
    assert live == {name: number for number, name in enumerate(names)}
    assert seen == {name: list(range(1, number + 1)) for number, name in enumerate(names)}


def test_a_long_backlog_of_one_topic_does_not_keep_the_others_waiting(
    client: httpx.Client, topic: str, watch: Watch
) -> None:
    long, short = f"{topic}-long", f"{topic}-short"
    fill(client, long, 200)
    fill(client, short, 1)
    events = watch({long: {}, short: {}}, limit=1)
    frames = [events.event() for _ in range(40)]
    assert short in {frame.json()["topic"] for frame in frames}


def test_the_most_topics_on_one_stream_are_all_followed(client: httpx.Client, watch: Watch) -> None:
    names = [f"most-{number}" for number in range(256)]
    for name in names:
        put(client, name, durability="memory")
    events = watch({name: {} for name in names})
    for _ in names:
        events.event("caught-up")
    write(client, names[200], 1)
    assert events.event("record").json()["topic"] == names[200]


def test_one_topic_more_than_the_most_is_refused(client: httpx.Client, topic: str) -> None:
    answer = client.post("/v0/watch", json={"topics": {f"t{number}": {} for number in range(257)}})
    assert error_of(answer) == (400, "invalid_request")
    assert "TOPICS_MAX_WATCH_TOPICS" in answer.text


def test_topics_whose_id_could_not_be_sent_back_are_refused(client: httpx.Client) -> None:
    """256 topics with names of 255 characters: the id has them all, twice, and is the header of the next request."""
    names = [f"long-{number:03}-".ljust(255, "n") for number in range(256)]
    for name in names:
        put(client, name, durability="memory")
    answer = client.post("/v0/watch", json={"topics": {name: {} for name in names}})
    assert error_of(answer) == (400, "invalid_request")
    assert "TOPICS_MAX_HEADER_BYTES" in answer.text


def test_the_longest_id_that_is_given_can_be_sent_back(
    server: LocalServer, client: httpx.Client, resume: Watch, opened: ExitStack
) -> None:
    names: list[str] = []
    while True:
        name = f"wide-{len(names):03}-".ljust(255, "n")
        put(client, name, durability="memory", seq_base=2**53 - 1000)
        answer = client.post("/v0/watch", json={"topics": {each: {"tail": True} for each in [*names, name]}})
        if answer.status_code != 200:
            break
        names.append(name)
        url = answer.json()["stream_url"]
    assert len(names) > 10
    events = resume(url)
    last = [events.event("caught-up") for _ in names][-1]
    again = opened.enter_context(Events(server.port, url, last.id)).open()
    assert again.status == 200, again.body


def test_the_frames_of_an_append_go_out_in_the_turn_of_its_answer(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch
) -> None:
    put(client, topic)
    events = watch(topic)
    events.event("caught-up")
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}]})
    # The answer is here, and nothing on the server may run any more: the frame has been sent already.
    with server.held():
        assert events.event("record").seqs == [1]


def test_one_append_is_rendered_once_for_all_who_watch(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, topic)
    readers = [watch(topic) for _ in range(20)]
    for events in readers:
        events.event("caught-up")
    rendered = count_renderings(monkeypatch)
    write(client, topic, 1)
    assert [events.event("record").seqs for events in readers] == [[1]] * 20
    assert len(rendered) == 1


def test_readers_of_two_kinds_cost_two_renderings(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, topic)
    readers = [watch(topic, include_tags=bool(number % 2)) for number in range(20)]
    for events in readers:
        events.event("caught-up")
    rendered = count_renderings(monkeypatch)
    write(client, topic, 1)
    assert [events.event("record").seqs for events in readers] == [[1]] * 20
    assert len(rendered) == 2


def count_renderings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    rendered: list[object] = []
    render = Renderings._render

    def counted(self: Renderings, *args: Any) -> Any:
        rendered.append(args)
        return render(self, *args)

    monkeypatch.setattr(Renderings, "_render", counted)
    return rendered


# -- loss ------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_found_at_connect_has_a_name_of_its_own(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic, cap_records=2)
    fill(client, topic, 5)
    frames = watch(topic).until("caught-up")
    assert told(frames) == [(1, 3, "from_seq_too_old"), 4, 5]
    assert frames[0].cursors[topic] == 3


def test_the_loss_that_is_told_at_connect_begins_behind_the_cursor(
    client: httpx.Client, topic: str, watch: Watch
) -> None:
    put(client, topic, cap_records=2)
    fill(client, topic, 5)
    assert told(watch({topic: {"from_seq": 2}}).until("caught-up")) == [(3, 3, "from_seq_too_old"), 4, 5]
    assert told(watch({topic: {"from_seq": 3}}).until("caught-up")) == [4, 5]


def test_a_batch_that_evicts_its_own_records_is_told_of_as_cap(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic, cap_records=2)
    events = watch(topic)
    events.event("caught-up")
    fill(client, topic, 5)
    assert told([events.event(), events.event()]) == [(1, 3, "cap"), 4, 5]


def test_what_expires_before_it_is_taken_is_told_of_as_ttl(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch
) -> None:
    other = f"{topic}-other"
    put(client, topic, ttl_ms=1000)
    put(client, other)
    events = watch({other: {}, topic: {}})
    events.until("caught-up")
    events.until("caught-up")
    hold_back(server, topic)
    write(client, topic, 1, 2)
    pass_time(server, 1001)
    let_go(server, topic)
    frame = events.event("tombstone")
    assert gap(frame) == (1, 2, "ttl")
    assert frame.cursors[topic] == 2


def test_what_cap_and_ttl_took_together_is_told_of_as_mixed(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch
) -> None:
    put(client, topic, ttl_ms=1000, cap_records=2)
    events = watch(topic)
    events.event("caught-up")
    hold_back(server, topic)
    write(client, topic, 1, 2, 3)
    pass_time(server, 1001)
    write(client, topic, 4)
    let_go(server, topic)
    assert told(events.until_seq(4)) == [(1, 3, "mixed"), 4]


def test_a_record_that_expires_behind_its_reader_is_no_loss(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch
) -> None:
    put(client, topic, ttl_ms=1000)
    write(client, topic, 1)
    events = watch(topic)
    events.until("caught-up")
    pass_time(server, 1001)
    write(client, topic, 2)
    assert events.event().seqs == [2]


def hold_back(server: LocalServer, topic: str) -> None:
    """Whoever waits for a topic is not woken: so streams fall behind at a known place."""

    def hold() -> None:
        found = server.app.engine.topic(topic)
        held = server.app.__dict__.setdefault("_held_back", {})
        held[topic] = list(found.waiters or ())
        found.waiters = None

    server.call(hold)


def let_go(server: LocalServer, topic: str) -> None:
    """They are woken now."""

    def wake() -> None:
        for waiter in server.app.__dict__["_held_back"].pop(topic):
            waiter()

    server.call(wake)


def pass_time(server: LocalServer, ms: int) -> None:
    """Moves the time that TTL runs on."""
    server.call(lambda: server.app.engine.time.advance(server.app.engine.time.now() + ms))


def test_a_hole_in_the_backlog_is_a_frame_between_the_records(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    append(client, topic, {"data": 1}, {"hole": 2, "reason": "source_trim"}, {"data": 4})
    append(client, topic, {"hole": 1, "reason": "source_trim"}, {"hole": 1, "reason": "source_trim"})
    frames = watch(topic).until("caught-up")
    assert told(frames) == [1, (2, 3, "source_trim"), 4, (5, 6, "source_trim")]
    assert frames[-1].cursors[topic] == 6


def test_a_hole_that_opens_before_a_live_reader_is_told_at_once(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    events = watch(topic)
    events.event("caught-up")
    append(client, topic, {"hole": 4, "reason": "source_trim"})
    frame = events.event("tombstone")
    assert gap(frame) == (1, 4, "source_trim")
    assert frame.cursors[topic] == 4
    write(client, topic, 5)
    assert events.event("record").seqs == [5]


def test_a_hole_of_a_crash_keeps_its_reason_at_connect(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch
) -> None:
    put(client, topic)
    write(client, topic, 1)

    def crash() -> None:
        found = server.app.engine.topic(topic)
        found.add_hole(Hole(2, 4, "crash"))
        found.staged_seq = found.next_seq

    server.call(crash)
    assert told(watch({topic: {"from_seq": 1}}).until("caught-up")) == [(2, 4, "crash")]


def test_an_evicted_floor_and_a_hole_behind_it_are_one_gap(client: httpx.Client, topic: str, watch: Watch) -> None:
    """The example of section 5: 1-3 evicted, 4-5 deleted, hole 6-7, live from 8."""
    put(client, topic, cap_records=3)
    append(client, topic, *[{"data": 1}] * 3, {"data": 4, "tag": "x"}, {"data": 5, "tag": "x"})
    append(client, topic, {"hole": 2, "reason": "source_trim"}, {"data": 8})
    client.put(f"/v0/topics/{topic}", json={"cap_records": 0})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "x"})
    state = client.get(f"/v0/topics/{topic}").json()
    assert (state["evict_floor"], state["earliest_seq"]) == (4, 8)
    for cursor, expected in [
        (0, [(1, 7, "from_seq_too_old"), 8]),
        (2, [(3, 7, "from_seq_too_old"), 8]),
        (3, [(6, 7, "source_trim"), 8]),
        (6, [(7, 7, "source_trim"), 8]),
        (7, [8]),
    ]:
        assert told(watch({topic: {"from_seq": cursor}}).until("caught-up")) == expected, cursor


def test_deleted_records_are_passed_over_silently(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    append(client, topic, {"data": 1, "tag": "x"}, {"data": 2}, {"data": 3, "tag": "x"}, {"data": 4})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "x"})
    assert told(watch(topic).until("caught-up")) == [2, 4]
    client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 5})
    frames = watch(topic).until("caught-up")
    assert told(frames) == []
    assert frames[-1].cursors[topic] == 4


def test_a_delete_is_seen_by_those_who_have_not_read_yet(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch, resume: Watch
) -> None:
    """Also where the same place was rendered before."""
    put(client, topic)
    append(client, topic, {"data": 1, "tag": "x"}, {"data": 2})
    assert told(watch(topic).until("caught-up")) == [1, 2]
    client.post(f"/v0/topics/{topic}/delete", json={"match": "x"})
    assert told(watch(topic).until("caught-up")) == [2]


# -- deleted and recreated -------------------------------------------------------------------------------------------


def test_the_other_topics_go_on_when_one_is_deleted(client: httpx.Client, topic: str, watch: Watch) -> None:
    gone, kept = f"{topic}-gone", f"{topic}-kept"
    put(client, gone)
    put(client, kept)
    events = watch({gone: {}, kept: {}})
    events.until("caught-up")
    events.until("caught-up")
    client.delete(f"/v0/topics/{gone}")
    assert events.event("topic-deleted").json()["topic"] == gone
    write(client, kept, 1)
    assert events.event("record").json()["topic"] == kept


def test_a_topic_that_comes_back_goes_on_with_recreated(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    fill(client, topic, 5)
    events = watch(topic)
    events.until("caught-up")
    client.delete(f"/v0/topics/{topic}")
    events.event("topic-deleted")
    epoch = put(client, topic)
    frame = events.event("tombstone")
    assert frame.json() == {
        "topic": topic,
        "gap_from": 1,
        "gap_to": 0,
        "reason": "recreated",
        "missed_estimate": 0,
        "earliest_seq": 1,
        "head_seq": 0,
    }
    assert frame.cursors == {topic: 0, "$epoch": {topic: epoch}}
    events.event("caught-up")
    write(client, topic, 1)
    assert events.event("record").seqs == [1]


def test_a_topic_that_a_write_brings_back_gives_its_records(client: httpx.Client, topic: str, watch: Watch) -> None:
    write(client, topic, 1, 2)
    events = watch(topic)
    events.until("caught-up")
    client.delete(f"/v0/topics/{topic}")
    events.event("topic-deleted")
    write(client, topic, "new")
    frames = events.until("record")
    assert [gap(frame)[2] for frame in frames if frame.event == "tombstone"] == ["recreated"]
    assert frames[-1].seqs == [1]


def test_a_topic_deleted_and_recreated_at_once_is_told_as_both(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch
) -> None:
    fill(client, topic, 3)
    events = watch(topic)
    events.until("caught-up")
    with Wire(server.port) as wire, server.held():
        wire.send(request("DELETE", f"/v0/topics/{topic}") + request("POST", f"/v0/topics/{topic}", record("new")))
    frames = events.until("record")
    assert [frame.event for frame in frames if frame.event != "caught-up"] == ["topic-deleted", "tombstone", "record"]
    assert gap(next(frame for frame in frames if frame.event == "tombstone"))[2] == "recreated"


def test_every_life_of_a_topic_is_told_of(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    events = watch(topic)
    events.event("caught-up")
    for _ in range(3):
        client.delete(f"/v0/topics/{topic}")
        events.event("topic-deleted")
        put(client, topic)
        assert gap(events.event())[2] == "recreated"
        events.event("caught-up")


def test_a_topic_recreated_between_two_connections_is_told_of_as_recreated(
    client: httpx.Client, topic: str, resume: Watch
) -> None:
    fill(client, topic, 3)
    url = url_of(create(client, {topic: {}}))
    first = resume(url)
    last = first.until("caught-up")[-1]
    first.close()
    client.delete(f"/v0/topics/{topic}")
    fill(client, topic, 3)
    frames = resume(url, last.id).until("caught-up")
    assert told(frames) == [(1, 3, "recreated"), 1, 2, 3]
    assert frames[0].cursors == {topic: 0, "$epoch": {topic: epoch_of(client, topic)}}


def test_the_session_itself_knows_that_a_topic_was_recreated(client: httpx.Client, topic: str, resume: Watch) -> None:
    fill(client, topic, 3)
    url = url_of(create(client, {topic: {}}))
    client.delete(f"/v0/topics/{topic}")
    fill(client, topic, 2)
    assert told(resume(url).until("caught-up")) == [(1, 2, "recreated"), 1, 2]


def test_resuming_behind_recreated_tells_it_no_second_time(client: httpx.Client, topic: str, resume: Watch) -> None:
    fill(client, topic, 3)
    url = url_of(create(client, {topic: {}}))
    client.delete(f"/v0/topics/{topic}")
    fill(client, topic, 2)
    frame = resume(url).event("tombstone")
    assert told(resume(url, frame.id).until("caught-up")) == [1, 2]


def test_a_topic_deleted_between_two_connections_is_told_of_and_waited_for(
    client: httpx.Client, topic: str, resume: Watch
) -> None:
    fill(client, topic, 3)
    url = url_of(create(client, {topic: {}}))
    first = resume(url)
    last = first.until("caught-up")[-1]
    first.close()
    client.delete(f"/v0/topics/{topic}")
    events = resume(url, last.id)
    assert events.event("topic-deleted").json()["topic"] == topic
    put(client, topic)
    assert gap(events.event("tombstone"))[2] == "recreated"


def test_a_session_of_another_epoch_is_told_at_connect(client: httpx.Client, topic: str, watch: Watch) -> None:
    epoch = put(client, topic)
    fill(client, topic, 2)
    seen = told(watch({topic: {"from_seq": 2, "epoch": epoch + 1000}}).until("caught-up"))
    assert seen == [(1, 2, "recreated"), 1, 2]


def test_a_cursor_beyond_the_head_is_told_as_recreated(client: httpx.Client, topic: str, watch: Watch) -> None:
    fill(client, topic, 2)
    assert told(watch({topic: {"from_seq": 3}}).until("caught-up")) == [(1, 2, "recreated"), 1, 2]


def test_a_caught_up_reader_of_the_same_epoch_is_never_told_so(client: httpx.Client, topic: str, watch: Watch) -> None:
    epoch = put(client, topic)
    fill(client, topic, 2)
    assert watch({topic: {"from_seq": 2, "epoch": epoch}}).event().event == "caught-up"


# -- resuming --------------------------------------------------------------------------------------------------------


def test_an_id_rewinds_to_exactly_where_it_stands(client: httpx.Client, topic: str, resume: Watch) -> None:
    fill(client, topic, 6)
    url = url_of(create(client, {topic: {}}, limit=1))
    frames = resume(url).until("caught-up")
    for number, frame in enumerate(frames[:-1], 1):
        assert told(resume(url, frame.id).until("caught-up")) == list(range(number + 1, 7))


def test_without_an_id_a_stream_begins_at_what_the_client_has_shown_to_have(
    client: httpx.Client, topic: str, resume: Watch
) -> None:
    """What was only sent may be lost with its connection: a repeat is better than a gap that nobody tells of."""
    fill(client, topic, 3)
    url = url_of(create(client, {topic: {}}))
    first = resume(url)
    last = first.until("caught-up")[-1]
    first.close()
    write(client, topic, 4)
    assert told(resume(url).until("caught-up")) == [1, 2, 3, 4]
    assert told(resume(url, last.id).until("caught-up")) == [4]
    assert told(resume(url).until("caught-up")) == [4]


def test_an_id_counts_also_when_the_session_was_rewound_behind_it(
    server: LocalServer, client: httpx.Client, topic: str, resume: Watch, opened: ExitStack
) -> None:
    """It was delivered, on an earlier connection: whoever has it gets exactly what follows."""
    fill(client, topic, 60)
    url = url_of(create(client, {topic: {}}, limit=1))
    frames = resume(url).until("caught-up")
    with server.held():
        opened.enter_context(Events(server.port, url, frames[0].id))
        last = opened.enter_context(Events(server.port, url, frames[57].id))
    assert told(last.stream().until("caught-up")) == [59, 60]


def test_an_id_in_the_query_serves_a_browser_that_reloads(client: httpx.Client, topic: str, resume: Watch) -> None:
    fill(client, topic, 3)
    session = create(client, {topic: {}}, limit=1)
    first = resume(url_of(session)).event("record")
    assert told(resume(f"{url_of(session)}?last_event_id={first.id}").until("caught-up")) == [2, 3]


def test_an_id_never_goes_past_what_was_delivered(client: httpx.Client, topic: str, resume: Watch) -> None:
    epoch = put(client, topic)
    fill(client, topic, 5)
    url = url_of(create(client, {topic: {}}))
    forged = make_id({topic: 4, "$epoch": {topic: epoch}})
    assert told(resume(url, forged).until("caught-up")) == [1, 2, 3, 4, 5]


def test_an_id_of_a_later_life_never_goes_past_what_was_delivered(
    client: httpx.Client, topic: str, watch: Watch, resume: Watch
) -> None:
    fill(client, topic, 2)
    url = url_of(create(client, {topic: {}}))
    client.delete(f"/v0/topics/{topic}")
    fill(client, topic, 3)
    foreign = watch(topic).until("caught-up")[-1]
    assert told(resume(url, foreign.id).until("caught-up")) == [(1, 3, "recreated"), 1, 2, 3]


def test_an_id_rewinds_each_topic_by_itself(client: httpx.Client, topic: str, resume: Watch) -> None:
    a, b = f"{topic}-a", f"{topic}-b"
    fill(client, a, 3)
    fill(client, b, 3)
    url = url_of(create(client, {a: {}, b: {}}, limit=1))
    events = resume(url)
    frames = [events.event() for _ in range(8)]
    for frame in frames:
        seen: dict[str, list[int]] = {a: [], b: []}
        again = resume(url, frame.id)
        for _ in range(2):
            for each in again.until("caught-up")[:-1]:
                seen[each.json()["topic"]] += each.seqs
        assert seen == {name: list(range(frame.cursors[name] + 1, 4)) for name in (a, b)}


def test_topics_that_an_id_does_not_know_stay_where_they_are(client: httpx.Client, topic: str, resume: Watch) -> None:
    fill(client, topic, 3)
    url = url_of(create(client, {topic: {}}))
    last = resume(url).until("caught-up")[-1]
    assert resume(url, last.id).event().event == "caught-up"
    other = make_id({"other": 1, "$epoch": {"other": 1}})
    assert resume(url, other).event().event == "caught-up"


def test_a_loss_between_two_connections_is_told_at_the_second(client: httpx.Client, topic: str, resume: Watch) -> None:
    put(client, topic, cap_records=2)
    fill(client, topic, 2)
    url = url_of(create(client, {topic: {}}, limit=1))
    first = resume(url)
    last = first.event("record")
    first.close()
    write(client, topic, 3, 4, 5)
    assert told(resume(url, last.id).until("caught-up")) == [(2, 3, "from_seq_too_old"), 4, 5]


def test_resuming_from_a_tombstone_tells_it_no_second_time(client: httpx.Client, topic: str, resume: Watch) -> None:
    put(client, topic)
    append(client, topic, {"data": 1}, {"hole": 3, "reason": "source_trim"}, {"data": 5})
    url = url_of(create(client, {topic: {}}))
    frames = resume(url).until("caught-up")
    assert told(resume(url, frames[0].id).until("caught-up")) == [(2, 4, "source_trim"), 5]
    assert told(resume(url, frames[1].id).until("caught-up")) == [5]


def test_the_end_of_a_connection_at_any_byte_costs_nothing(client: httpx.Client, topic: str, resume: Watch) -> None:
    put(client, topic)
    append(client, topic, {"data": 1}, {"hole": 2, "reason": "source_trim"}, {"data": 4}, {"data": 5})
    url = url_of(create(client, {topic: {}}, limit=1))
    first = resume(url)
    whole = told(first.until("caught-up"))
    first.close()
    for cut in range(len(first.body) + 1):
        before = frames_in(first.body[:cut])
        ids = [frame.id for frame in before if frame.id]
        with resume(url, ids[-1] if ids else make_id({topic: 0, "$epoch": {topic: epoch_of(client, topic)}})) as again:
            assert told(before) + told(again.until("caught-up")) == whole, cut


@pytest.mark.parametrize(
    "last_id",
    [
        "!",
        "abc",
        "é",
        "e30",
        make_id({"t": 1}),
        make_id({"t": 1, "$epoch": 1}),
        make_id({"t": 1, "$epoch": {}}),
        make_id({"t": "1", "$epoch": {"t": 1}}),
        make_id({"t": 1.5, "$epoch": {"t": 1}}),
        make_id({"t": 1, "$epoch": {"t": "1"}}),
        make_id({"t": True, "$epoch": {"t": 1}}),
        base64.urlsafe_b64encode(b"[]").decode(),
        base64.urlsafe_b64encode(b"\xff\xff").decode(),
        base64.urlsafe_b64encode(b'{"t":' + b"[" * 3000 + b"]" * 3000 + b',"$epoch":{"t":1}}').decode(),
    ],
)
def test_an_id_that_no_server_gave_is_400(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack, last_id: str
) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    events = opened.enter_context(Events(server.port, url, last_id)).open()
    assert events.status == 400, events.body
    assert json.loads(events.body)["error"]["code"] == "invalid_request"


def test_a_refused_id_leaves_the_session_as_it_was(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack, resume: Watch
) -> None:
    fill(client, topic, 2)
    url = url_of(create(client, {topic: {}}))
    live = resume(url)
    live.until("caught-up")
    assert opened.enter_context(Events(server.port, url, "!")).open().status == 400
    write(client, topic, 3)
    assert live.event("record").seqs == [3]


def test_a_second_connection_takes_the_session_over(client: httpx.Client, topic: str, resume: Watch) -> None:
    fill(client, topic, 2)
    url = url_of(create(client, {topic: {}}))
    first = resume(url)
    last = first.until("caught-up")[-1]
    second = resume(url)
    second.until("caught-up")
    frame = first.event("error")
    assert set(frame.json()) == {"code", "error"}
    assert frame.cursors == last.cursors
    assert first.rest() == []
    write(client, topic, 3)
    assert second.event("record").seqs == [3]


def test_the_last_id_of_a_connection_that_was_taken_over_is_its_own(
    client: httpx.Client, topic: str, resume: Watch
) -> None:
    fill(client, topic, 5)
    url = url_of(create(client, {topic: {}}, limit=1))
    first = resume(url)
    frames = first.until("caught-up")
    resume(url, frames[0].id)
    assert first.event("error").cursors == frames[-1].cursors


def test_who_is_taken_over_a_hundred_times_leaves_nothing_behind(
    server: LocalServer, client: httpx.Client, topic: str, resume: Watch
) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    before = server.call(lambda: (len(server.app.streams), server.app.watches.open_streams))
    readers = [resume(url) for _ in range(100)]
    readers[-1].event("caught-up")
    after = server.call(lambda: (len(server.app.streams), server.app.watches.open_streams))
    assert after == (before[0] + 1, before[1] + 1)
    assert server.call(lambda: len(server.app.engine.topic(topic).waiters or ())) == 1


# -- the end of a connection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "reset", "half-close"])
def test_a_client_that_leaves_gives_its_place_back(
    server: LocalServer, client: httpx.Client, topic: str, resume: Watch, end: str
) -> None:
    put(client, topic)
    before = server.call(lambda: server.app.watches.open_streams)
    events = resume(url_of(create(client, {topic: {}})))
    events.event("caught-up")
    assert server.call(lambda: server.app.watches.open_streams) == before + 1
    if end == "close":
        events.close()
    elif end == "reset":
        events.reset()
    else:
        events.socket.shutdown(1)
    server.wait_until(lambda: server.app.watches.open_streams == before, "the place of the stream")
    assert not server.call(lambda: server.app.engine.topic(topic).waiters)


def test_a_client_that_asks_and_leaves_at_once_leaves_nothing(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    put(client, topic)
    before = server.call(lambda: server.app.watches.open_streams)
    for _ in range(20):
        Events(server.port, url_of(create(client, {topic: {}}))).reset()
    server.wait_until(lambda: server.app.watches.open_streams == before, "the places of the streams")


def test_a_request_behind_a_stream_is_answered_when_the_stream_has_ended(
    server: LocalServer, client: httpx.Client, topic: str, resume: Watch
) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    first = resume(url)
    first.event("caught-up")
    first.follow_up(request("GET", "/v0/health"))
    resume(url).event("caught-up")
    assert [frame.event for frame in first.rest()] == ["error"]
    status, body = first.next_answer()
    assert (status, json.loads(body)["status"]) == (200, "ok")


def test_a_stream_behind_a_write_shows_it(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    wire = opened.enter_context(Wire(server.port))
    wire.send(request("POST", f"/v0/topics/{topic}", record(1)) + request("GET", url, None, ACCEPT))
    assert wire.read().json()["seqs"] == [1]
    assert wire.read_head()[0] == 200


def test_an_old_client_reads_plain_bytes_until_the_connection_ends(
    server: LocalServer, client: httpx.Client, topic: str, resume: Watch, opened: ExitStack
) -> None:
    fill(client, topic, 2)
    url = url_of(create(client, {topic: {}}))
    old = opened.enter_context(Events(server.port, url, version="1.0")).stream()
    assert "transfer-encoding" not in old.headers
    assert old.headers["connection"] == "close"
    assert old.event("record").seqs == [1, 2]
    resume(url)
    assert [frame.event for frame in old.rest()] == ["caught-up", "error"], old.body


def test_a_client_that_wants_the_connection_closed_gets_its_stream_first(
    server: LocalServer, client: httpx.Client, topic: str, opened: ExitStack
) -> None:
    fill(client, topic, 2)
    url = url_of(create(client, {topic: {}}))
    events = opened.enter_context(Events(server.port, url, None, "connection: close")).stream()
    assert events.event("record").seqs == [1, 2]
    events.event("caught-up")
    write(client, topic, 3)
    assert events.event("record").seqs == [3]


# -- heartbeats ------------------------------------------------------------------------------------------------------


def test_an_idle_stream_has_heartbeats_without_an_id(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    events = watch(topic, heartbeat_ms=1)
    events.event("caught-up")
    assert events.frame() == Frame(comment="hb")
    assert events.body.endswith(b"\n\n: hb\n\n")


def test_a_heartbeat_is_no_reason_to_skip_what_follows(client: httpx.Client, topic: str, watch: Watch) -> None:
    put(client, topic)
    events = watch(topic, heartbeat_ms=0)
    events.event("caught-up")
    assert events.frame() == Frame(comment="hb")
    write(client, topic, 1)
    assert events.event("record").seqs == [1]


@pytest.mark.parametrize(
    ("asked", "used"), [(0, 1.0), (999, 1.0), (1000, 1.0), (15_000, 15.0), (60_001, 60.0), (None, 15.0)]
)
def test_heartbeats_are_clamped(
    server: LocalServer, client: httpx.Client, topic: str, asked: int | None, used: float
) -> None:
    put(client, topic)
    session = create(client, {topic: {}}, **({} if asked is None else Config(heartbeat_ms=asked)))
    assert server.call(lambda: server.app.watches._sessions[session["wid"]].heartbeat) == used


def test_a_stream_that_is_busy_has_no_heartbeats(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch, opened: ExitStack
) -> None:
    """An idle stream beside it has had two by then."""
    idle, busy = f"{topic}-idle", f"{topic}-busy"
    put(client, idle)
    put(client, busy, durability="memory")
    resting = watch(idle, heartbeat_ms=1000)
    resting.event("caught-up")
    working = watch(busy, heartbeat_ms=1000)
    working.event("caught-up")
    resting.socket.settimeout(0.1)
    beats = 0
    written = 0
    while beats < 2:
        written += 1
        write(client, busy, written)
        assert working.frame().event == "record"
        with contextlib.suppress(TimeoutError):
            assert resting.frame() == Frame(comment="hb")
            beats += 1


# -- keys ------------------------------------------------------------------------------------------------------------

KEYS = "all,reader:read,writer:write,narrow:read:allowed.,twin:read"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("guarded"), api_keys=KEYS, access_log=True) as running:
        with running.client(headers=bearer("all")) as client:
            for name in ("allowed.a", "other"):
                write(client, name, 1)
        yield running


@pytest.fixture(scope="module")
def anyone(guarded: LocalServer) -> Iterator[httpx.Client]:
    with guarded.client() as client:
        yield client


def session_of(client: httpx.Client, key: str, topic: str = "other") -> str:
    answer = client.post("/v0/watch", json={"topics": {topic: {}}}, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    url: str = answer.json()["stream_url"]
    return url


@pytest.mark.parametrize(
    ("key", "topics", "expected"),
    [
        (None, ["other"], (401, "unauthorized")),
        ("wrong", ["other"], (401, "unauthorized")),
        ("writer", ["other"], (403, "forbidden")),
        ("narrow", ["other"], (403, "forbidden")),
        ("narrow", ["allowed.a", "other"], (403, "forbidden")),
        ("narrow", ["nothing-there"], (403, "forbidden")),
    ],
)
def test_a_session_needs_the_right_key_for_every_topic(
    anyone: httpx.Client, key: str | None, topics: list[str], expected: tuple[int, str]
) -> None:
    headers = {} if key is None else bearer(key)
    answer = anyone.post("/v0/watch", json={"topics": {name: {} for name in topics}}, headers=headers)
    assert error_of(answer) == expected


def test_lenient_does_not_leave_out_what_is_forbidden(anyone: httpx.Client) -> None:
    body: Config = {"topics": {"allowed.a": {}, "other": {}}}
    assert error_of(anyone.post("/v0/watch?lenient=true", json=body, headers=bearer("narrow"))) == (403, "forbidden")


def test_a_key_may_watch_under_its_prefix(guarded: LocalServer, anyone: httpx.Client) -> None:
    url = session_of(anyone, "narrow", "allowed.a")
    with Events(guarded.port, url, None, "authorization: Bearer narrow") as events:
        assert events.stream().event("record").seqs == [1]


@pytest.mark.parametrize(
    ("key", "expected"), [(None, (401, "unauthorized")), ("writer", (403, "forbidden")), ("twin", (404, "not_found"))]
)
def test_a_session_belongs_to_the_key_that_made_it(
    anyone: httpx.Client, key: str | None, expected: tuple[int, str]
) -> None:
    url = session_of(anyone, "reader")
    headers = {"accept": "text/event-stream", **({} if key is None else bearer(key))}
    assert error_of(anyone.get(url, headers=headers)) == expected


def test_a_stream_takes_its_key_in_the_query(guarded: LocalServer, anyone: httpx.Client) -> None:
    with Events(guarded.port, f"{session_of(anyone, 'reader')}?token=reader") as events:
        assert events.stream().event("record").seqs == [1]


@pytest.mark.parametrize("token", ["wrong", "", "twin%20"])
def test_a_wrong_token_opens_nothing(anyone: httpx.Client, token: str) -> None:
    answer = anyone.get(f"{session_of(anyone, 'reader')}?token={token}", headers={"accept": "text/event-stream"})
    assert answer.status_code in (401, 404)


def test_a_wrong_header_is_not_mended_by_a_token(anyone: httpx.Client) -> None:
    url = f"{session_of(anyone, 'reader')}?token=reader"
    answer = anyone.get(url, headers={"accept": "text/event-stream", **bearer("wrong")})
    assert error_of(answer) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v0/topics"),
        ("GET", "/v0/topics/other"),
        ("PUT", "/v0/topics/other"),
        ("POST", "/v0/topics/other"),
        ("DELETE", "/v0/topics/other"),
        ("POST", "/v0/topics/other/diff"),
        ("POST", "/v0/watch"),
        ("GET", "/v0/metrics"),
        ("GET", "/openapi.json"),
    ],
)
def test_a_token_in_the_query_works_nowhere_else(anyone: httpx.Client, method: str, path: str) -> None:
    answer = anyone.request(method, f"{path}?token=all", headers={"accept": "text/event-stream, */*"})
    assert error_of(answer) == (401, "unauthorized")


def test_a_token_is_in_no_log(tmp_path: Path) -> None:
    with child(tmp_path, TOPICS_API_KEYS="s3cret-key", TOPICS_ACCESS_LOG="true") as running:
        running.wait_until_ready()
        with running.client() as client:
            client.put("/v0/topics/t", json={}, headers=bearer("s3cret-key"))
            url = session_of(client, "s3cret-key", "t")
            with Events(running.port, f"{url}?token=s3cret-key") as events:
                events.stream().event("caught-up")
            client.get(f"{url}x?token=s3cret-key", headers={"accept": "text/event-stream"})
            client.get(f"{url}?token=s3cret-key", headers={"accept": "text/html"})
            client.get(f"{url}?token=s3cret-keyx")
            client.get("/v0/ws?token=s3cret-key")
        running.terminate()
        code, said = running.wait_for_end()
    assert code == 0
    assert f'"path":"{url}"' in said
    assert "s3cret" not in said


# -- caps ------------------------------------------------------------------------------------------------------------


def refused_by_cap(answer: httpx.Response, limit: str, most: int) -> bool:
    assert error_of(answer) == (429, "throttled")
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["detail"] == {"limit": limit, "max": most}
    return True


def test_sessions_are_capped_and_their_places_come_back_with_their_ttl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topics.http.app._SWEEP_TICKS", 1 << 60)
    with local_server(tmp_path, Limits(max_watch_sessions=2), watch_ttl_ms=10) as server, server.client() as client:
        put(client, "t")
        create(client, {"t": {}})
        create(client, {"t": {}})
        assert refused_by_cap(client.post("/v0/watch", json={"topics": {"t": {}}}), "TOPICS_MAX_WATCH_SESSIONS", 2)
        monkeypatch.setattr("topics.http.app._SWEEP_TICKS", 1)
        server.wait_until(lambda: len(server.app.watches) == 0, "the end of idle sessions")
        create(client, {"t": {}})


def test_an_idle_session_is_collected_and_then_unknown(tmp_path: Path, quick_sweeps: None) -> None:
    with local_server(tmp_path, watch_ttl_ms=50) as server, server.client() as client:
        put(client, "t")
        session = create(client, {"t": {}})
        assert session["session_ttl_ms"] == 50
        server.wait_until(lambda: len(server.app.watches) == 0, "the end of the session")
        answer = client.get(url_of(session), headers={"accept": "text/event-stream"})
        assert error_of(answer) == (404, "not_found")


def test_a_session_that_is_streamed_is_not_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics.http.app._SWEEP_TICKS", 1 << 60)
    with local_server(tmp_path, watch_ttl_ms=50) as server, server.client() as client:
        put(client, "t")
        url = url_of(create(client, {"t": {}}))
        with Events(server.port, url) as events:
            events.stream().event("caught-up")
            monkeypatch.setattr("topics.http.app._SWEEP_TICKS", 1)
            idle = create(client, {"t": {}})["wid"]
            server.wait_until(lambda: idle not in server.app.watches._sessions, "the end of the idle session")
            write(client, "t", 1)
            assert events.event("record").seqs == [1]
        server.wait_until(lambda: len(server.app.watches) == 0, "the end of the session behind its stream")


@pytest.mark.parametrize("limit", ["max_sse_connections", "max_sse_connections_per_key"])
@pytest.mark.parametrize("end", ["close", "reset", "take-over"])
def test_streams_are_capped_and_a_place_is_free_however_it_ends(tmp_path: Path, limit: str, end: str) -> None:
    with local_server(tmp_path, Limits(**{limit: 1})) as server, server.client() as client:
        put(client, "t")
        first, second = (url_of(create(client, {"t": {}})) for _ in range(2))
        with Events(server.port, first) as events:
            events.stream().event("caught-up")
            answer = client.get(second, headers={"accept": "text/event-stream"})
            assert refused_by_cap(answer, f"TOPICS_{limit.upper()}", 1)
            if end == "take-over":
                # The same session has its place already.
                with Events(server.port, first) as again:
                    again.stream().event("caught-up")
            elif end == "close":
                events.close()
            else:
                events.reset()
        server.wait_until(lambda: server.app.watches.open_streams == 0, "the place")
        with Events(server.port, second) as events:
            events.stream().event("caught-up")


def test_a_stream_that_is_refused_for_the_cap_leaves_the_session_where_it_was(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_sse_connections=1)) as server, server.client() as client:
        write(client, "t", 1, 2, 3)
        url = url_of(create(client, {"t": {}}, limit=1))
        with Events(server.port, url) as events:
            frames = events.stream().until("caught-up")
        server.wait_until(lambda: server.app.watches.open_streams == 0, "the place")
        other = url_of(create(client, {"t": {}}))
        with Events(server.port, other) as events:
            events.stream().until("caught-up")
            with Events(server.port, url, frames[0].id) as refused:
                assert refused.open().status == 429
        server.wait_until(lambda: server.app.watches.open_streams == 0, "the place")
        with Events(server.port, url) as events:
            assert told(events.stream().until("caught-up")) == [1, 2, 3]


def test_caps_of_0_are_off(tmp_path: Path) -> None:
    limits = Limits(max_sse_connections=0, max_sse_connections_per_key=0, max_watch_sessions=0, max_watch_topics=0)
    with local_server(tmp_path, limits) as server, server.client() as client:
        put(client, "t")
        with Events(server.port, url_of(create(client, {"t": {}}))) as events:
            events.stream().event("caught-up")


def test_an_open_stream_is_no_request_in_flight(tmp_path: Path) -> None:
    with local_server(tmp_path, Limits(max_inflight_per_key=1)) as server, server.client() as client:
        put(client, "t")
        with Events(server.port, url_of(create(client, {"t": {}}))) as events:
            events.stream().event("caught-up")
            assert write(client, "t", 1) == [1]
            assert events.event("record").seqs == [1]


# -- shutdown --------------------------------------------------------------------------------------------------------


def test_sigterm_ends_streams_with_an_error_and_a_cursor_to_go_on_from(tmp_path: Path) -> None:
    with child(tmp_path) as running:
        running.wait_until_ready()
        with running.client() as client:
            write(client, "t", 1, 2)
            epoch = epoch_of(client, "t")
            with Events(running.port, url_of(create(client, {"t": {}}))) as events:
                events.stream().until("caught-up")
                running.terminate()
                frame = events.event("error")
                assert frame.json()["code"] == "shutting_down"
                assert frame.json()["error"]
                assert frame.json()["retry_after_ms"] > 0
                assert frame.cursors == {"t": 2, "$epoch": {"t": epoch}}
                assert events.rest() == []
        assert running.wait_for_end()[0] == 0
    with local_server(tmp_path) as server, server.client() as client:
        write(client, "t", 3)
        cursor = {"from_seq": frame.cursors["t"], "epoch": frame.cursors["$epoch"]["t"]}
        with Events(server.port, url_of(create(client, {"t": cursor}))) as events:
            assert told(events.stream().until("caught-up")) == [3]


# -- HTTP/2 ----------------------------------------------------------------------------------------------------------


class H2Client:
    """Streams over one HTTP/2 connection, with flow control in the test's hand."""

    def __init__(self, port: int, window: int = 65_535, receive_buffer: int | None = None) -> None:
        self.wire = Wire(port)
        if receive_buffer is not None:
            self.wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        # Streams that get no more room than they have.
        self.starved: set[int] = set()
        self._settings = 0
        self.body: dict[int, bytes] = {}
        self.status: dict[int, dict[str, str]] = {}
        self.ended: set[int] = set()
        self.flush()
        self.until(lambda: self._settings == 2)

    def __enter__(self) -> H2Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def flush(self) -> None:
        self.wire.send(self.h2.data_to_send())

    def get(self, path: str, *headers: tuple[str, str]) -> int:
        number = self.h2.get_next_available_stream_id()
        head = [(":method", "GET"), (":path", path), (":scheme", "http"), (":authority", "test")]
        self.h2.send_headers(number, [*head, ("accept", "text/event-stream"), *headers], end_stream=True)
        self.body[number] = b""
        self.flush()
        return number

    def until(self, holds: Callable[[], bool]) -> None:
        """Reads until something holds; gives the server back the room that its data took."""
        while not holds():
            data = self.wire.socket.recv(1 << 16)
            assert data, "the connection ended"
            for event in self.h2.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    self.body[event.stream_id] += event.data
                    if event.stream_id not in self.starved and event.flow_controlled_length:
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.ResponseReceived):
                    self.status[event.stream_id] = {str(name): str(value) for name, value in event.headers}
                elif isinstance(event, h2.events.StreamEnded):
                    self.ended.add(event.stream_id)
                elif isinstance(event, h2.events.SettingsAcknowledged):
                    self._settings += 1
            self.flush()

    def frames(self, number: int) -> list[Frame]:
        return [frame for frame in frames_in(self.body[number]) if frame.event is not None]

    def until_event(self, number: int, kind: str) -> list[Frame]:
        self.until(lambda: any(frame.event == kind for frame in self.frames(number)))
        return self.frames(number)


def test_a_stream_over_http_2_is_the_same_stream(server: LocalServer, client: httpx.Client, topic: str) -> None:
    fill(client, topic, 3)
    with H2Client(server.port) as over:
        number = over.get(url_of(create(client, {topic: {}})))
        frames = over.until_event(number, "caught-up")
        assert told(frames) == [1, 2, 3]
        head = over.status[number]
        assert (head[":status"], head["content-type"]) == ("200", "text/event-stream")
        assert (head["cache-control"], head["x-accel-buffering"]) == ("no-store", "no")
        assert over.body[number].startswith(b"retry: 2000\n")
        write(client, topic, 4)
        over.until(lambda: told(over.frames(number)) == [1, 2, 3, 4])


def test_many_streams_over_one_http_2_connection(server: LocalServer, client: httpx.Client, topic: str) -> None:
    put(client, topic)
    with H2Client(server.port) as over:
        numbers = [over.get(url_of(create(client, {topic: {}}))) for _ in range(20)]
        for number in numbers:
            over.until_event(number, "caught-up")
        write(client, topic, 1)
        over.until(lambda: all(told(over.frames(number)) == [1] for number in numbers))


def test_a_full_http_2_window_holds_a_stream_and_only_that(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    small = f"{topic}-small"
    put(client, topic)
    put(client, small)
    for _ in range(20):
        write(client, topic, "x" * 100_000)
    with H2Client(server.port, window=1000) as over:
        held = over.get(url_of(create(client, {topic: {}}, limit=1)))
        over.starved.add(held)
        over.until(lambda: len(over.body[held]) == 1000)
        # What waits for it is no more than a little.
        unsent = server.call(lambda: max(stream.outlet.unsent for stream in server.app.streams))
        assert unsent < 400_000
        free = over.get(url_of(create(client, {small: {}})))
        over.until_event(free, "caught-up")
        write(client, small, 1)
        over.until(lambda: told(over.frames(free)) == [1])
        over.starved.clear()
        over.h2.increment_flow_control_window(1 << 24)
        over.h2.increment_flow_control_window(1 << 24, held)
        over.flush()
        over.until(lambda: told(over.frames(held)) == list(range(1, 21)))


def test_a_stream_that_an_http_2_client_resets_gives_its_place_back(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    put(client, topic)
    before = server.call(lambda: server.app.watches.open_streams)
    with H2Client(server.port) as over:
        number = over.get(url_of(create(client, {topic: {}})))
        over.until_event(number, "caught-up")
        over.h2.reset_stream(number)
        over.flush()
        server.wait_until(lambda: server.app.watches.open_streams == before, "the place of the stream")
        # The connection lives on.
        again = over.get(url_of(create(client, {topic: {}})))
        over.until_event(again, "caught-up")


def test_an_http_2_stream_that_is_taken_over_ends(server: LocalServer, client: httpx.Client, topic: str) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    with H2Client(server.port) as over:
        first = over.get(url)
        over.until_event(first, "caught-up")
        second = over.get(url)
        over.until(lambda: first in over.ended)
        assert over.frames(first)[-1].event == "error"
        over.until_event(second, "caught-up")


def test_the_end_of_an_http_2_connection_frees_all_its_streams(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    put(client, topic)
    before = server.call(lambda: server.app.watches.open_streams)
    with H2Client(server.port) as over:
        for _ in range(5):
            over.until_event(over.get(url_of(create(client, {topic: {}}))), "caught-up")
    server.wait_until(lambda: server.app.watches.open_streams == before, "the places of the streams")


def test_a_head_request_over_http_2_opens_no_stream(server: LocalServer, client: httpx.Client, topic: str) -> None:
    put(client, topic)
    url = url_of(create(client, {topic: {}}))
    before = server.call(lambda: server.app.watches.open_streams)
    with server.client(http1=False, http2=True) as over:
        answer = over.head(url, headers={"accept": "text/event-stream"})
    assert answer.status_code == 200
    assert server.call(lambda: server.app.watches.open_streams) == before


def test_shutdown_ends_http_2_streams_with_an_error(tmp_path: Path) -> None:
    server = LocalServer(tmp_path).start()
    try:
        with server.client() as client:
            write(client, "t", 1)
            url = url_of(create(client, {"t": {}}))
        with H2Client(server.port) as over:
            number = over.get(url)
            over.until_event(number, "caught-up")
            stopped = server.begin(server.server.stop())
            over.until(lambda: number in over.ended)
            last = over.frames(number)[-1]
            assert (last.event, last.json()["code"], last.cursors["t"]) == ("error", "shutting_down", 1)
            stopped()
    finally:
        server._is_stopped = True
        server._end()


# -- under pressure --------------------------------------------------------------------------------------------------


def test_pushes_that_pressure_puts_off_all_arrive(
    server: LocalServer, client: httpx.Client, topic: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, topic)
    events = watch(topic)
    events.event("caught-up")
    monkeypatch.setattr(server.app.pressure, "measure", lambda *_: None)
    server.call(lambda: setattr(server.app.pressure, "level", 1))
    try:
        for number in range(1, 21):
            write(client, topic, number)
        assert told(events.until_seq(20)) == list(range(1, 21))
    finally:
        server.call(lambda: setattr(server.app.pressure, "level", 0))


def test_streams_and_sessions_can_be_read_off_the_metrics(tmp_path: Path) -> None:
    with local_server(tmp_path) as server, server.client() as client:
        put(client, "t")
        url = url_of(create(client, {"t": {}}))
        create(client, {"t": {}})
        with Events(server.port, url) as events:
            events.stream().event("caught-up")
            shown = client.get("/v0/metrics").text
    assert "\ntopics_streams 1.0\n" in shown
    assert "\ntopics_watch_sessions 2.0\n" in shown
