"""Section 1: shapes of answers and errors, content types, names, and every code with its status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server import (
    ARROW,
    JSON,
    LocalServer,
    datas,
    diff,
    error_of,
    local_server,
    raw_data,
    write,
    write_raw,
)
from topics.core.limits import Limits

TOPIC_FIELDS = {
    *("topic", "type", "head_seq", "earliest_seq", "next_seq", "evict_floor", "count", "bytes", "epoch", "holes"),
    *("config", "effective_priority", "last_write_ts", "last_read_ts", "instance"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose limits are easy to reach."""
    limits = Limits(
        max_batch_records=3,
        max_record_bytes=100,
        max_body_bytes=10_000,
        max_meta_bytes=50,
        max_tag_bytes=5,
        max_node_bytes=5,
        max_txn_bytes=300,
    )
    with local_server(tmp_path_factory.mktemp("small"), limits) as server, server.client() as opened:
        yield opened


# -- success ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v0/topics/shapes", {}),
        ("POST", "/v0/topics/shapes", {"records": [{"data": 1}]}),
        ("GET", "/v0/topics/shapes", None),
        ("GET", "/v0/topics", None),
        ("POST", "/v0/topics/shapes/diff", {}),
        ("GET", "/v0/topics/shapes/seek?ts=0", None),
        ("POST", "/v0/topics/shapes/delete", {"before_seq": 0}),
        ("GET", "/v0/topics/shapes/deletes", None),
        ("POST", "/v0/topics/shapes?txn=x&part=p&chunk=0", {"records": [{"data": 1}]}),
        ("GET", "/v0/txns/x", None),
        ("POST", "/v0/txns/x/commit", {"parts": []}),
        ("GET", "/v0/health", None),
        ("GET", "/healthz", None),
        ("GET", "/v0/ready", None),
        ("GET", "/readyz", None),
        ("DELETE", "/v0/topics/shapes", None),
    ],
)
def test_a_success_is_a_bare_object_with_its_time(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    answer = client.request(method, path, json=body)
    assert answer.status_code in (200, 201), answer.text
    assert answer.headers["content-type"] == JSON
    assert answer.json()["performance"]["server_total_ms"] >= 0
    assert "error" not in answer.json()


def test_a_write_says_how_long_the_log_took(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}]})
    performance = answer.json()["performance"]
    assert set(performance) == {"server_total_ms", "wal_append_ms", "fsync_ms"}
    assert performance["wal_append_ms"] > 0
    assert performance["fsync_ms"] == 0.0


def test_a_write_that_waited_for_an_fsync_says_how_long(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"durability": "fsync"})
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}]})
    assert answer.json()["performance"]["fsync_ms"] > 0


def test_a_read_says_how_many_seqs_it_looked_at(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3, node="me")
    answer = diff(client, topic, node="me")
    assert answer["records"] == []
    assert answer["performance"]["records_scanned"] == 3


def test_unknown_fields_of_a_request_are_ignored(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/topics/{topic}", json={"from_the_future": {"a": [1]}})
    assert answer.status_code == 201
    body = {"records": [{"data": 1, "colour": "blue"}], "from_the_future": 1}
    assert client.post(f"/v0/topics/{topic}", json=body).status_code == 200
    assert datas(client, topic, from_the_future=True) == [1]
    answer = client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 2, "from_the_future": 1})
    assert answer.json()["deleted"] == 1


def test_unknown_query_parameters_are_ignored(client: httpx.Client, topic: str) -> None:
    assert client.put(f"/v0/topics/{topic}?from_the_future=1").status_code == 201
    assert client.get("/v0/topics?from_the_future=1").status_code == 200


def test_absent_fields_of_a_record_are_left_out(client: httpx.Client, topic: str) -> None:
    write(client, topic, None)
    assert set(diff(client, topic, include_tags=True)["records"][0]) == {"$seq", "$ts", "data"}


def test_fields_that_are_sent_come_back_with_a_dollar(client: httpx.Client, topic: str) -> None:
    record = {"data": None, "tag": "t", "node": "n", "meta": {"a": "b"}}
    client.post(f"/v0/topics/{topic}", json={"records": [record]})
    [read] = diff(client, topic, include_tags=True)["records"]
    assert read == {
        "$seq": 1,
        "$ts": read["$ts"],
        "$node": "n",
        "$tag": "t",
        "data": None,
        "meta": {"a": "b"},
    }


def test_times_are_whole_milliseconds(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    [record] = diff(client, topic)["records"]
    assert isinstance(record["$ts"], int)
    assert client.get(f"/v0/topics/{topic}").json()["last_write_ts"] == record["$ts"]
    assert record["$ts"] > 1_600_000_000_000


# -- content types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/diff", "/delete"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_a_body_that_is_not_json_is_415(client: httpx.Client, topic: str, path: str, kind: str) -> None:
    client.put(f"/v0/topics/{topic}")
    answer = client.post(f"/v0/topics/{topic}{path}", content=b"{}", headers={"content-type": kind})
    assert error_of(answer) == (415, "unsupported_media_type")
    assert "application/json" in answer.json()["error"]["message"]


def test_a_put_body_that_is_not_json_is_415(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/topics/{topic}", content=b"{}", headers={"content-type": "text/plain"})
    assert error_of(answer) == (415, "unsupported_media_type")
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_a_body_without_a_content_type_is_415(client: httpx.Client, topic: str) -> None:
    answer = client.post(f"/v0/topics/{topic}", content=b'{"records":[{"data":1}]}')
    assert error_of(answer) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/json ;a=b"])
def test_a_content_type_may_have_parameters_and_capitals(client: httpx.Client, topic: str, kind: str) -> None:
    body = b'{"records":[{"data":1}]}'
    answer = client.post(f"/v0/topics/{topic}", content=body, headers={"content-type": kind})
    assert answer.status_code == 201


@pytest.mark.parametrize(("method", "path"), [("PUT", ""), ("POST", "/diff")])
def test_a_body_in_which_everything_is_optional_may_be_missing(
    client: httpx.Client, topic: str, method: str, path: str
) -> None:
    client.put(f"/v0/topics/{topic}")
    assert client.request(method, f"/v0/topics/{topic}{path}").status_code == 200


# -- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b"[]",
        b"null",
        b'"records"',
        b"{}",
        b'{"records":null}',
        b'{"records":{}}',
        b'{"records":[]}',
        b'{"records":[null]}',
        b'{"records":[1]}',
        b'{"records":[{}]}',
        b'{"records":[{"data":1,}]}',
        b'{"records":[{"data":01}]}',
        b'{"records":[{"data":1}]}x',
        b'{"records":[{"data":NaN}]}',
        b"{'records':[{'data':1}]}",
        b'{"records":[{"data":1,"tag":5}]}',
        b'{"records":[{"data":1,"node":{}}]}',
        b'{"records":[{"data":1,"meta":[]}]}',
        b'{"records":[{"data":1,"meta":{"a":1}}]}',
        b'{"records":[{"data":1,"meta":{"$a":"b"}}]}',
        b'{"records":[{"data":1}],"node":5}',
        b'{"records":[{"data":1}],"create":"yes"}',
        b'{"records":[{"data":1}],"idempotency_key":""}',
        b'{"records":[{"data":1}],"config":[]}',
        b'{"records":[{"data":"\xff"}]}',
        b'{"records":[{"data":"\xed\xa0\x80"}]}',
        b'{"records":[{"data":"\\ud800"}]}',
        b'{"records":[{"data":"a\nb"}]}',
        b"\xef\xbb\xbf" + b'{"records":[{"data":1}]}',
        '{"records":[{"data":1}]}'.encode("utf-16"),
    ],
)
def test_a_write_that_is_malformed_is_400_and_writes_nothing(client: httpx.Client, topic: str, body: bytes) -> None:
    answer = client.post(f"/v0/topics/{topic}", content=body, headers={"content-type": JSON})
    assert error_of(answer) == (400, "invalid_request")
    assert client.get(f"/v0/topics/{topic}").status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"records": [{"data": 1}, {"data": 1, "tag": 5}]}, "records[1].tag"),
        ({"records": [{"data": 1}, {}]}, "records[1].data"),
        ({"records": [{"data": 1, "meta": {"$x": "y"}}]}, "records[0].meta"),
        ({"records": [{"data": 1}], "create": 1}, "create"),
        ({"records": [{"data": 1}], "config": {"ttl_ms": "x"}}, "ttl_ms"),
    ],
)
def test_a_refusal_names_the_field(client: httpx.Client, topic: str, body: dict[str, Any], field: str) -> None:
    answer = client.post(f"/v0/topics/{topic}", json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("record", "variable"),
    [
        ({"data": 1, "tag": "x" * 6}, "TOPICS_MAX_TAG_BYTES"),
        ({"data": 1, "node": "x" * 6}, "TOPICS_MAX_NODE_BYTES"),
        ({"data": 1, "meta": {"a": "x" * 60}}, "TOPICS_MAX_META_BYTES"),
        ({"data": "x" * 101}, "TOPICS_MAX_RECORD_BYTES"),
    ],
)
def test_a_refusal_names_the_limit(small: httpx.Client, topic: str, record: dict[str, Any], variable: str) -> None:
    answer = small.post(f"/v0/topics/{topic}", json={"records": [record]})
    assert answer.status_code == 400
    assert variable in answer.json()["error"]["message"]


# -- every code with its status --------------------------------------------------------------------------------------


def test_400_invalid_request_for_a_name(client: httpx.Client) -> None:
    for name in ("-a", ".a", "_a", "a%20b", "a%00", "%C3%BC", "x" * 256, "a%0Ab"):
        for method in ("PUT", "GET", "DELETE"):
            assert error_of(client.request(method, f"/v0/topics/{name}")) == (400, "invalid_request"), name


@pytest.mark.parametrize("name", ["a", "A", "0", "a.b_c:d-e", "x" * 255, "con", "nul.txt", "a..b"])
def test_a_name_of_the_contract_is_accepted(client: httpx.Client, name: str) -> None:
    assert client.put(f"/v0/topics/{name}").status_code in (200, 201)
    assert client.get(f"/v0/topics/{name}").json()["topic"] == name


def test_names_are_case_sensitive(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}x")
    assert client.get(f"/v0/topics/{topic}X").status_code == 404


def test_a_name_may_be_percent_encoded(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}:a")
    assert client.get(f"/v0/topics/{topic}%3Aa").json()["topic"] == f"{topic}:a"


def test_an_encoded_slash_is_part_of_a_name_and_so_refused(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    for method, path in (("GET", "%2Fseek?ts=1"), ("POST", "%2Fdelete"), ("PUT", "%2Fx")):
        body = {"before_seq": 9} if method == "POST" else None
        answer = client.request(method, f"/v0/topics/{topic}{path}", json=body)
        assert error_of(answer)[0] in (400, 404), path
    assert datas(client, topic) == [1]


def test_400_batch_too_large(small: httpx.Client, topic: str) -> None:
    answer = small.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}] * 4})
    assert error_of(answer) == (400, "batch_too_large")
    assert "TOPICS_MAX_BATCH_RECORDS" in answer.json()["error"]["message"]


def test_400_record_too_large(small: httpx.Client, topic: str) -> None:
    answer = small.post(f"/v0/topics/{topic}", json={"records": [{"data": "x" * 99}]})
    assert error_of(answer) == (400, "record_too_large")


def test_404_topic_not_found(client: httpx.Client, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    assert error_of(client.get(path)) == (404, "topic_not_found")
    assert error_of(client.post(f"{path}/diff", json={})) == (404, "topic_not_found")
    assert error_of(client.post(f"{path}/delete", json={"before_seq": 1})) == (404, "topic_not_found")
    assert error_of(client.get(f"{path}/seek?ts=0")) == (404, "topic_not_found")
    assert error_of(client.get(f"{path}/deletes")) == (404, "topic_not_found")
    answer = client.post(path, json={"records": [{"data": 1}], "create": False})
    assert error_of(answer) == (404, "topic_not_found")


def test_404_txn_not_found(client: httpx.Client) -> None:
    assert error_of(client.get("/v0/txns/nobody")) == (404, "txn_not_found")
    assert error_of(client.post("/v0/txns/nobody/abort")) == (404, "txn_not_found")
    body = {"parts": [{"part": "p", "records": {"a": 1}}]}
    assert error_of(client.post("/v0/txns/nobody/commit", json=body)) == (404, "txn_not_found")


@pytest.mark.parametrize(
    "path", ["/", "/v0", "/v0/", "/v1/topics", "/v0/topics/", "/v0/topics/a/b", "/v0/topics/a/diff/x", "/v0/txns", "//"]
)
def test_404_not_found(client: httpx.Client, path: str) -> None:
    assert error_of(client.get(path)) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v0/topics", {"GET", "HEAD", "OPTIONS"}),
        ("PATCH", "/v0/topics/a", {"DELETE", "GET", "HEAD", "OPTIONS", "POST", "PUT"}),
        ("GET", "/v0/topics/a/diff", {"OPTIONS", "POST"}),
        ("DELETE", "/v0/health", {"GET", "HEAD", "OPTIONS"}),
    ],
)
def test_405_method_not_allowed_names_what_is(client: httpx.Client, method: str, path: str, allowed: set[str]) -> None:
    answer = client.request(method, path)
    assert error_of(answer) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == allowed


def test_409_topic_exists_incompatible(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"seq_base": 10})
    for patch in ({"type": "queue"}, {"seq_base": 11}):
        assert error_of(client.put(f"/v0/topics/{topic}", json=patch)) == (409, "topic_exists_incompatible")


def test_409_topic_not_empty(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    assert error_of(client.delete(f"/v0/topics/{topic}?if_empty=true")) == (409, "topic_not_empty")


def test_409_idempotency_conflict(client: httpx.Client, topic: str) -> None:
    body = {"client_id": "c", "records": [{"data": 1, "client_seq": 5}]}
    client.post(f"/v0/topics/{topic}", json=body)
    answer = client.post(f"/v0/topics/{topic}", json=body)
    assert error_of(answer) == (409, "idempotency_conflict")
    assert answer.json()["error"]["detail"] == {"last_client_seq": 5, "seqs": [1]}


def test_409_txn_incomplete(client: httpx.Client, topic: str) -> None:
    client.post(f"/v0/topics/{topic}?txn={topic}&part=p&chunk=0", json={"records": [{"data": 1}]})
    body = {"parts": [{"part": "p", "records": {topic: 2}}]}
    assert error_of(client.post(f"/v0/txns/{topic}/commit", json=body)) == (409, "txn_incomplete")


def test_413_payload_too_large(small: httpx.Client, topic: str) -> None:
    answer = small.post(f"/v0/topics/{topic}", content=b" " * 10_001, headers={"content-type": JSON})
    assert error_of(answer) == (413, "payload_too_large")
    assert "TOPICS_MAX_BODY_BYTES" in answer.json()["error"]["message"]
    assert "10000" in answer.json()["error"]["message"]


def test_413_for_a_transaction_that_spools_too_much(small: httpx.Client, topic: str) -> None:
    records = [{"data": "x" * 90}] * 3
    answer = small.post(f"/v0/topics/{topic}?txn={topic}&part=p&chunk=0", json={"records": records})
    assert error_of(answer) == (413, "payload_too_large")


def test_415_unsupported_content_encoding(client: httpx.Client, topic: str) -> None:
    headers = {"content-type": JSON, "content-encoding": "br"}
    answer = client.post(f"/v0/topics/{topic}", content=b"{}", headers=headers)
    assert error_of(answer) == (415, "unsupported_media_type")
    assert "gzip" in answer.json()["error"]["message"]


def test_422_topic_full(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 1, "discard": "reject"})
    write(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 2}]})
    assert error_of(answer) == (422, "topic_full")
    assert datas(client, topic) == [1]


def test_500_internal_says_nothing_of_the_inside(
    server: LocalServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the inside")

    with monkeypatch.context() as patch:
        patch.setattr(server.app.engine, "get", broken)
        answer = client.get("/v0/topics/a")
    assert error_of(answer) == (500, "internal")
    assert "secret" not in answer.text
    assert "a secret of the inside" in capfd.readouterr().err


def test_503_read_only_goes_on_reading_and_says_so(tmp_path: Path) -> None:
    with local_server(tmp_path) as server, server.client() as client:
        write(client, "a", 1)
        server.call(lambda: server.app.engine.committer.fail("the disk is full"))
        answer = client.post("/v0/topics/a", json={"records": [{"data": 2}]})
        assert error_of(answer) == (503, "read_only")
        assert int(answer.headers["retry-after"]) > 0
        assert error_of(client.put("/v0/topics/b")) == (503, "read_only")
        assert error_of(client.post("/v0/topics/a/delete", json={"before_seq": 9})) == (503, "read_only")
        assert error_of(client.delete("/v0/topics/a")) == (503, "read_only")
        assert datas(client, "a") == [1]
        assert client.get("/v0/ready").json()["status"] == "read_only"
        assert "topics_read_only 1.0" in client.get("/v0/metrics").text


# -- verbatim data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"1.0",
        b"1e400",
        b"-0",
        b"-0.0e-0",
        b"1E+2",
        b"123456789012345678901234567890",
        b"9" * 5000,
        b"0." + b"1" * 5000,
        b"null",
        b"true",
        b'""',
        b'"\\u0041\\n\\/\\"\\\\\\b\\f\\r\\t"',
        b'"\\ud83d\\ude00"',
        '"ü€😀\u2028\ufeff"'.encode(),
        b'{"b":1,"a":2,"b":3}',
        b'{"":"", "$seq":9, "data":{}}',
        b"[ 1 ,\t2 ,\r\n3 ]",
        b'{ "a" : [ ] , "b" : { } }',
        b'"]},{\\"$seq\\":1"',
        b'"%d %s %%"',
        b"[" * 512 + b"]" * 512,
        b'{"a":' * 511 + b"[]" + b"}" * 511,
        b'"' + b"x" * ((1 << 20) - 2) + b'"',
        b'"' + b"\\u00e9" * 170_000 + b'"',
    ],
    ids=lambda data: repr(data[:24]) if isinstance(data, bytes) else None,
)
def test_data_comes_back_byte_for_byte(client: httpx.Client, topic: str, data: bytes) -> None:
    assert write_raw(client, topic, data).status_code == 201
    assert raw_data(client.post(f"/v0/topics/{topic}/diff").content) == data
    client.delete(f"/v0/topics/{topic}")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 513 + b"]" * 513,
        b'{"a":' * 513 + b"1" + b"}" * 513,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'"\\udc00"',
        b'"\\ud800\\ud800"',
        b'{"\\ud800":1}',
        b'"\xc3"',
        b'"\xc0\x80"',
        b'"\xf5\x80\x80\x80"',
        b'"\x00"',
        b"+1",
        b".5",
        b"1.",
        b"Infinity",
        b"1,2",
    ],
    ids=lambda data: repr(data[:24]) if isinstance(data, bytes) else None,
)
def test_data_that_is_not_json_of_the_contract_is_400(client: httpx.Client, topic: str, data: bytes) -> None:
    assert error_of(write_raw(client, topic, data)) == (400, "invalid_request")
    assert client.get(f"/v0/topics/{topic}").status_code == 404


def test_meta_comes_back_byte_for_byte(client: httpx.Client, topic: str) -> None:
    meta = b'{ "b" : "1" , "a":"\\u0041", "b":"2"}'
    body = b'{"records":[{"data":1,"meta":' + meta + b"}]}"
    client.post(f"/v0/topics/{topic}", content=body, headers={"content-type": JSON})
    assert b'"meta":' + meta in client.post(f"/v0/topics/{topic}/diff").content


def test_a_read_that_accepts_anything_gets_json(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}/diff", headers={"accept": "*/*"})
    assert answer.headers["content-type"] == JSON
    assert answer.headers["content-type"] != ARROW
