"""Section 4 in columns: diffs and writes as Arrow IPC streams, and servers without pyarrow."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest
from msgspec import Raw

from tests.helpers import Machine
from tests.http.server import ARROW, JSON, Background, LocalServer, child, datas, diff, error_of, local_server, write
from topics.core.errors import InvalidRequest
from topics.core.limits import Limits
from topics.core.records import PlainWrite, RecordIn, TextWrite, Write
from topics.engine import bulk
from topics.engine.read import RunWalk, make_query
from topics.http import arrow
from topics.log import Log

# A write, and a chunk of a transaction: two ways in.
EITHER_WAY = pytest.mark.parametrize("query", ["", "?txn=x&part=p&chunk=0"], ids=["write", "spool"])


def read(client: httpx.Client, topic: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """A diff in columns: the table, and the cursor fields."""
    answer = client.post(f"/v0/topics/{topic}/diff", json=fields, headers={"accept": ARROW})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ARROW
    table = pa.ipc.open_stream(answer.content).read_all()
    return table, json.loads(table.schema.metadata[b"topics"])


def stream(columns: dict[str, Any], **options: Any) -> bytes:
    """Columns as an Arrow IPC stream."""
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def write_columns(client: httpx.Client, topic: str, body: bytes, query: str = "", **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(f"/v0/topics/{topic}{query}", content=body, headers={"content-type": ARROW, **names})


# -- diff ------------------------------------------------------------------------------------------------------------


def test_a_diff_has_the_columns_of_the_contract(client: httpx.Client, topic: str) -> None:
    records = [{"data": {"a": [1.0]}, "tag": "t", "node": "n", "meta": {"k": "v"}}, {"data": None}]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    table, _ = read(client, topic)
    assert [(field.name, str(field.type)) for field in table.schema] == [
        ("seq", "int64"),
        ("ts", "timestamp[us, tz=UTC]"),
        ("node", "string"),
        ("tag", "string"),
        ("meta", "string"),
        ("data", "string"),
    ]
    rows = table.drop_columns(["ts"]).to_pylist()
    assert rows == [
        {"seq": 1, "node": "n", "tag": "t", "meta": '{"k":"v"}', "data": '{"a":[1.0]}'},
        {"seq": 2, "node": None, "tag": None, "meta": None, "data": "null"},
    ]


def test_times_are_the_same_as_in_json(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    table, _ = read(client, topic)
    micros = table.column("ts").cast(pa.int64()).to_pylist()
    assert micros == [record["$ts"] * 1000 for record in diff(client, topic)["records"]]


def test_the_cursor_is_in_the_metadata(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(5))
    _, cursor = read(client, topic, limit=2)
    answer = diff(client, topic, limit=2)
    for field in ("topic", "epoch", "next_from_seq", "head_seq", "earliest_seq", "caught_up", "tombstone", "lag"):
        assert cursor[field] == answer[field], field
    assert (cursor["next_from_seq"], cursor["caught_up"]) == (2, False)


def test_a_tombstone_is_in_the_metadata(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}", json={"cap_records": 1})
    write(client, topic, 1, 2, 3)
    table, cursor = read(client, topic)
    assert cursor["tombstone"] == diff(client, topic)["tombstone"]
    assert (cursor["tombstone"]["gap_from"], cursor["tombstone"]["gap_to"]) == (1, 2)
    assert table.column("seq").to_pylist() == [3]


def test_an_empty_answer_is_a_stream_with_its_schema(client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    table, cursor = read(client, topic)
    assert (table.num_rows, len(table.schema), cursor["caught_up"]) == (0, 6, True)


def test_fields_choose_the_same_records_as_in_json(client: httpx.Client, topic: str) -> None:
    records = [{"data": number, "tag": f"t{number % 2}", "node": f"n{number % 3}"} for number in range(20)]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 3})
    for fields in (
        {},
        {"from_seq": 5},
        {"from_seq": 5, "to_seq": 9},
        {"limit": 3},
        {"node": ["n1", "n2"]},
        {"match": "t1"},
        {"match": ["tag", "Glob", "t*"], "node": "n0"},
    ):
        table, cursor = read(client, topic, **fields)
        answer = diff(client, topic, **fields)
        assert table.column("seq").to_pylist() == [record["$seq"] for record in answer["records"]], fields
        assert cursor["next_from_seq"] == answer["next_from_seq"], fields


def test_data_comes_back_byte_for_byte(client: httpx.Client, topic: str) -> None:
    texts = ["1.0", "1e400", '{"b":1,"a":2,"b":3}', '"\\u0041ü😀"', "[ 1 ,\t2 ]", "null"]
    body = '{"records":[' + ",".join(f'{{"data":{text}}}' for text in texts) + "]}"
    client.post(f"/v0/topics/{topic}", content=body.encode(), headers={"content-type": JSON})
    table, _ = read(client, topic)
    assert table.column("data").to_pylist() == texts


def test_meta_is_left_out_when_refused(client: httpx.Client, topic: str) -> None:
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "meta": {"a": "b"}}]})
    table, _ = read(client, topic, include_meta=False)
    assert table.column("meta").to_pylist() == [None]


def test_limit_goes_beyond_the_one_of_json(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(3000))
    assert read(client, topic, limit=2500)[0].num_rows == 2500
    assert read(client, topic, limit=10**9)[0].num_rows == 3000
    assert read(client, topic)[0].num_rows == 256


def test_the_budget_goes_beyond_the_one_of_json(client: httpx.Client, topic: str) -> None:
    for _ in range(4):
        write(client, topic, *["x" * 900_000] * 3)
    assert read(client, topic)[0].num_rows == 12
    assert read(client, topic, max_bytes=1_000_000)[0].num_rows < 3


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_long_answer_arrives_whole(client: httpx.Client, topic: str, encoding: str) -> None:
    texts = [f'"{number}{"x" * 100}"' for number in range(10_000)]
    write_columns(client, topic, stream({"data": texts}))
    headers = {"accept": ARROW, "accept-encoding": encoding}
    answer = client.post(f"/v0/topics/{topic}/diff", json={"limit": 10_000}, headers=headers)
    assert pa.ipc.open_stream(answer.content).read_all().column("data").to_pylist() == texts


def test_a_read_that_waits_answers_in_columns(server: LocalServer, client: httpx.Client, topic: str) -> None:
    client.put(f"/v0/topics/{topic}")
    call = Background(lambda: read(client, topic, wait_ms=30_000))
    server.wait_for_readings()
    write(client, topic, "late")
    table, cursor = call.result()
    assert (table.column("data").to_pylist(), cursor["caught_up"]) == (['"late"'], True)


def test_an_error_is_json_whatever_is_accepted(client: httpx.Client, topic: str) -> None:
    answer = client.post(f"/v0/topics/{topic}/diff", json={}, headers={"accept": ARROW})
    assert error_of(answer) == (404, "topic_not_found")


def test_arrow_may_be_one_of_several_accepted(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    answer = client.post(f"/v0/topics/{topic}/diff", json={}, headers={"accept": f"{ARROW}, application/json;q=0.5"})
    assert answer.headers["content-type"] == ARROW


# -- columns against JSON --------------------------------------------------------------------------------------------


class Shown(msgspec.Struct):
    """A record as JSON shows it, `data` and `meta` as they stand there."""

    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: Raw
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: Raw = Raw()


@pytest.fixture
def log() -> Log:
    return Machine(Limits(max_limit=arrow.MAX_LIMIT, max_batch_records=100_000)).log


def encode(log: Log, topic: str, include_meta: bool = True, **fields: Any) -> bytes:
    query = make_query(log.engine.limits, limit=arrow.MAX_LIMIT, max_bytes=8 << 20, **fields)
    answer = log.engine.diff(topic, query, walk_as=RunWalk)
    return b"".join(arrow.encode_diff(answer, include_meta))


def in_columns(log: Log, topic: str, **fields: Any) -> list[dict[str, Any]]:
    table = pa.ipc.open_stream(encode(log, topic, **fields)).read_all()
    table.validate(full=True)
    index = table.schema.get_field_index("ts")
    rows: list[dict[str, Any]] = table.set_column(index, "ts", table.column("ts").cast(pa.int64())).to_pylist()
    return rows


def in_json(log: Log, topic: str, **fields: Any) -> list[dict[str, Any]]:
    answer = log.diff(topic, include_tags=True, limit=arrow.MAX_LIMIT, max_bytes=8 << 20, **fields)
    return [
        {
            "seq": each.seq,
            "ts": each.ts * 1000,
            "node": each.node,
            "tag": each.tag,
            "meta": bytes(each.meta).decode() or None,
            "data": bytes(each.data).decode(),
        }
        for each in msgspec.json.decode(answer.records_json, type=list[Shown])
    ]


def mixed(random: Random, count: int) -> list[dict[str, Any]]:
    """Records with and without everything that a record may have."""
    texts = ["", "a", "ü😀", '},{"data":', '\\"', "%d%%", "x" * 300]
    records: list[dict[str, Any]] = []
    for _ in range(count):
        record: dict[str, Any] = {"data": random.choice([None, 1, [], {"meta": {}}, *texts])}
        if random.random() < 0.4:
            record["tag"] = random.choice(["t", "u", "ä"])
        if random.random() < 0.4:
            record["node"] = random.choice(["n", "long node " * 5, '"ö"'])
        if random.random() < 0.4:
            record["meta"] = random.choice([{}, {"k": "v"}, {"ü": '"'}])
        records.append(record)
    return records


@pytest.mark.parametrize("seq_base", [1, 7, 95, 995, 99_995, 2**53 - 60])
def test_plain_records_are_the_same_in_columns_over_every_number_of_digits(log: Log, seq_base: int) -> None:
    log.put("t", seq_base=seq_base)
    log.append("t", [{"data": "x" * number} for number in range(50)])
    assert in_columns(log, "t") == in_json(log, "t")
    assert [row["seq"] for row in in_columns(log, "t")] == list(range(seq_base, seq_base + 50))


@pytest.mark.parametrize("seed", range(20))
def test_mixed_records_are_the_same_in_columns(log: Log, seed: int) -> None:
    random = Random(seed)
    log.put("t", seq_base=random.choice([1, 9, 90, 99_990]))
    for _ in range(random.randrange(1, 4)):
        log.append("t", mixed(random, random.randrange(1, 40)))
    if random.random() < 0.5:
        log.checkpoint()
    for fields in ({}, {"from_seq": 5}, {"node": "n"}, {"match": "t"}, {"include_meta": False}):
        assert in_columns(log, "t", **fields) == in_json(log, "t", **fields), fields


def test_records_deleted_in_between_are_in_no_column(log: Log) -> None:
    for number in range(3):
        log.append("t", [{"data": "x" * 90, "tag": f"t{index % 3}"} for index in range(3000)])
        log.delete("t", match=f"t{number}")
        assert in_columns(log, "t") == in_json(log, "t")
        # A rewritten chunk has no bytes for them any more.
        log.checkpoint()
        assert in_columns(log, "t") == in_json(log, "t")


def test_large_records_are_the_same_in_columns(log: Log) -> None:
    log.append("t", [{"data": letter * 500_000, "meta": {"k": "v" * 10_000}} for letter in "aü"] + [{"data": ""}])
    log.append("t", [{"data": ["b" * 300_000]}, {"data": 1}])
    assert in_columns(log, "t") == in_json(log, "t")


def test_many_chunks_are_one_batch(log: Log) -> None:
    log.append("t", [{"data": "x" * 98}] * 10_000)
    assert len(list(pa.ipc.open_stream(encode(log, "t")))) == 1


@pytest.mark.parametrize("bound", ["_BATCH_ROWS", "_BATCH_BYTES"])
def test_a_batch_is_bounded(log: Log, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(arrow, bound, 1)
    log.append("t", [{"data": "x" * 98}] * 10_000)
    assert len(list(pa.ipc.open_stream(encode(log, "t")))) > 1
    assert in_columns(log, "t") == in_json(log, "t")


def test_a_topic_grows_while_an_answer_in_columns_is_kept(log: Log) -> None:
    log.append("t", mixed(Random(0), 10))
    query = make_query(log.engine.limits)
    kept = arrow.encode_diff(log.engine.diff("t", query, walk_as=RunWalk), include_meta=True)
    before = b"".join(kept)
    log.append("t", [{"data": "more" * 100}] * 1000)
    assert b"".join(kept) == before


# -- writes ----------------------------------------------------------------------------------------------------------


def test_a_write_in_columns(client: httpx.Client, topic: str) -> None:
    columns = {
        "data": ["1.0", '{"a": 1}', "null"],
        "tag": ["t", None, "u"],
        "node": [None, "n", None],
        "meta": ['{"k":"v"}', None, None],
    }
    answer = write_columns(client, topic, stream(columns))
    assert answer.status_code == 201
    assert (answer.json()["seqs"], answer.json()["count"]) == ([1, 2, 3], 3)
    raw = client.post(f"/v0/topics/{topic}/diff", json={"include_tags": True}).text
    assert '"data":1.0' in raw
    assert '"data":{"a": 1}' in raw
    records = diff(client, topic, include_tags=True)["records"]
    assert [record.get("$tag") for record in records] == ["t", None, "u"]
    assert [record.get("$node") for record in records] == [None, "n", None]
    assert [record.get("meta") for record in records] == [{"k": "v"}, None, None]


def test_only_data_is_needed_and_other_columns_are_ignored(client: httpx.Client, topic: str) -> None:
    body = stream({"data": ["1"], "seq": [9], "colour": ["blue"]})
    assert write_columns(client, topic, body).json()["seqs"] == [1]


def test_what_was_read_can_be_written(client: httpx.Client, topic: str) -> None:
    records = [{"data": {"n": number}, "tag": "t", "meta": {"a": "b"}} for number in range(5)]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    answer = client.post(f"/v0/topics/{topic}/diff", headers={"accept": ARROW})
    assert write_columns(client, f"{topic}.copy", answer.content).json()["count"] == 5
    original, copy = diff(client, topic, include_tags=True), diff(client, f"{topic}.copy", include_tags=True)
    for record in (*original["records"], *copy["records"]):
        del record["$ts"]
    assert original["records"] == copy["records"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_both_string_types_are_taken(client: httpx.Client, topic: str, kind: Any) -> None:
    assert write_columns(client, topic, stream({"data": pa.array(["1", "2"], kind)})).json()["count"] == 2


def test_a_stream_may_have_several_batches(client: httpx.Client, topic: str) -> None:
    sink = pa.BufferOutputStream()
    schema = pa.schema([("data", pa.string())])
    with pa.ipc.new_stream(sink, schema) as writer:
        for number in range(3):
            writer.write_batch(pa.record_batch([pa.array([str(number)] * 2)], schema=schema))
    write_columns(client, topic, sink.getvalue().to_pybytes())
    assert datas(client, topic) == [0, 0, 1, 1, 2, 2]


def test_the_rest_of_a_write_is_in_query_and_headers(client: httpx.Client, topic: str) -> None:
    body = stream({"data": ["1"]})
    assert error_of(write_columns(client, topic, body, "?create=false")) == (404, "topic_not_found")
    first = write_columns(client, topic, body, "?node=me&return_seqs=false", idempotency_key="k")
    assert "seqs" not in first.json()
    assert write_columns(client, topic, body, idempotency_key="k").json()["deduped"] is True
    assert diff(client, topic)["records"][0]["$node"] == "me"


def test_columns_can_be_spooled(client: httpx.Client, topic: str) -> None:
    write_columns(client, topic, stream({"data": ["1", "2"]}), f"?txn={topic}&part=p&chunk=0")
    body = {"parts": [{"part": "p", "records": {topic: 2}}]}
    assert client.post(f"/v0/txns/{topic}/commit", json=body).status_code == 200
    assert datas(client, topic) == [1, 2]


def test_a_body_may_be_packed_with_gzip(client: httpx.Client, topic: str) -> None:
    body = gzip.compress(stream({"data": ["1"] * 100}))
    assert write_columns(client, topic, body, content_encoding="gzip").json()["count"] == 100


def test_a_flag_that_is_neither_true_nor_false_is_400(client: httpx.Client, topic: str) -> None:
    assert error_of(write_columns(client, topic, stream({"data": ["1"]}), "?create=banana")) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"tag": ["t"]}, "data"),
        ({"data": [None]}, "records[0].data"),
        ({"data": ["1", "nul"]}, "records[1].data"),
        ({"data": ["1", ""]}, "records[1].data"),
        ({"data": ["1 2"]}, "records[0].data"),
        ({"data": ["[" * 513 + "]" * 513]}, "records[0].data"),
        ({"data": ["[" * 100_000]}, "records[0].data"),
        ({"data": ['"\\ud800"']}, "records[0].data"),
        ({"data": ["1"], "meta": ["[]"]}, "records[0].meta"),
        ({"data": ["1"], "meta": ['{"$a":"b"}']}, "records[0].meta"),
        ({"data": ["1"], "tag": ["x" * 257]}, "records[0].tag"),
        ({"data": ["1"], "node": ["x" * 129]}, "records[0].node"),
        ({"data": [1, 2]}, "data"),
        ({"data": [b"1"]}, "data"),
        ({"data": ["1"], "tag": [5]}, "tag"),
        ({"data": pa.array(["1"]).dictionary_encode()}, "data"),
        ({"data": pa.array([], pa.string())}, "record"),
    ],
)
@EITHER_WAY
def test_columns_that_are_no_write_are_400_by_name(
    client: httpx.Client, topic: str, columns: dict[str, Any], field: str, query: str
) -> None:
    answer = write_columns(client, topic, stream(columns), query)
    assert error_of(answer) == (400, "invalid_request")
    assert field in answer.json()["error"]["message"]
    assert client.get(f"/v0/topics/{topic}").status_code == 404


@pytest.mark.parametrize(
    "rows",
    [
        ["1,2", "[3", "4]"],
        ["[1", "2]"],
        ['"a', 'b"'],
        ["   [1", "2]", "55,6", "7"],
        ["1", "2,3"],
        ["1],[2"],
        ["", "1,2"],
    ],
)
@EITHER_WAY
def test_rows_that_are_json_only_together_are_refused(
    client: httpx.Client, topic: str, rows: list[str], query: str
) -> None:
    assert error_of(write_columns(client, topic, stream({"data": rows}), query)) == (400, "invalid_request")


def test_what_stands_around_a_value_is_no_part_of_it(client: httpx.Client, topic: str) -> None:
    write_columns(client, topic, stream({"data": [" 1", "2\n", "\t[ 3 ] "]}))
    table, _ = read(client, topic)
    assert table.column("data").to_pylist() == ["1", "2", "[ 3 ]"]


def rows_of(body: bytes) -> list[RecordIn]:
    write = arrow.decode_write(body, Limits(), create=True, node=None)
    rows = [RecordIn(record.data, record.tag, record.node, record.meta) for record in write.records]
    spooled = arrow.decode_spooled(body, Limits(), create=True, node=None)
    if isinstance(spooled, TextWrite):
        assert [RecordIn(Raw(bytes(data))) for data in bulk.cut(memoryview(spooled.text), spooled.offsets)] == rows
    else:
        assert spooled == write
    return rows


@pytest.mark.parametrize("seed", range(300))
def test_every_row_is_proven_on_its_own(seed: int) -> None:
    random = Random(seed)
    pieces = ["1", "22", "[1", "2]", "[]", '"a', 'b"', '"ü"', ",", " ", "[", "]", "{", "}", '"a":', "null", "\n"]
    rows = ["".join(random.choices(pieces, k=random.choice([1, 1, 1, 2, 3]))) for _ in range(random.randrange(1, 5))]
    try:
        wanted = [msgspec.json.decode(row, type=Raw) for row in rows]
    except msgspec.DecodeError:
        with pytest.raises(InvalidRequest, match=r"records\[\d\].data"):
            rows_of(stream({"data": rows}))
    else:
        assert rows_of(stream({"data": rows})) == [RecordIn(data) for data in wanted]


def test_columns_of_nothing_make_no_difference() -> None:
    plain = stream({"data": ["1", "[2]"]})
    nothing: dict[str, Any] = {"tag": pa.nulls(2, pa.string()), "node": pa.nulls(2), "meta": pa.array([None, None])}
    for body in (plain, stream({"data": ["1", "[2]"], **nothing})):
        assert isinstance(arrow.decode_write(body, Limits(), create=True, node=None), PlainWrite)
        assert rows_of(body) == [RecordIn(Raw(b"1")), RecordIn(Raw(b"[2]"))]
    some = stream({"data": ["1", "[2]"], **nothing, "tag": [None, ""]})
    assert isinstance(arrow.decode_write(some, Limits(), create=True, node=None), Write)
    assert rows_of(some) == [RecordIn(Raw(b"1")), RecordIn(Raw(b"[2]"), "")]


def test_offsets_need_not_begin_at_zero() -> None:
    assert rows_of(forged([0, 4, 8])) == [RecordIn(Raw(b"1111")), RecordIn(Raw(b"2222"))]
    assert rows_of(forged([2, 4, 8])) == [RecordIn(Raw(b"11")), RecordIn(Raw(b"2222"))]
    assert rows_of(forged([0, 4, 6])) == [RecordIn(Raw(b"1111")), RecordIn(Raw(b"22"))]


@EITHER_WAY
def test_a_row_that_is_too_large_is_named(client: httpx.Client, topic: str, query: str) -> None:
    answer = write_columns(client, topic, stream({"data": ["1", '"' + "x" * (1 << 20) + '"']}), query)
    assert error_of(answer)[1] == "record_too_large"
    assert "records[1]" in answer.json()["error"]["message"]


@EITHER_WAY
def test_too_many_rows_are_refused(client: httpx.Client, topic: str, query: str) -> None:
    assert error_of(write_columns(client, topic, stream({"data": ["1"] * 10_001}), query)) == (400, "batch_too_large")


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff\xff\xff\xff", b"\0" * 64, b"ARROW1\0\0"])
def test_a_body_that_is_no_stream_is_400(client: httpx.Client, topic: str, body: bytes) -> None:
    assert error_of(write_columns(client, topic, body)) == (400, "invalid_request")


def test_a_stream_that_is_cut_anywhere_writes_all_or_nothing(client: httpx.Client, topic: str) -> None:
    body = stream({"data": ["1", "2"], "tag": ["a", None]})
    for end in range(len(body)):
        answer = write_columns(client, topic, body[:end])
        assert answer.status_code in (200, 201, 400), (end, answer.text)
        assert answer.status_code == 400 or answer.json()["count"] == 2


def forged(offsets: list[int]) -> bytes:
    """A stream whose string offsets point where they must not."""
    body = stream({"data": ["1111", "2222"]})
    honest = b"".join(number.to_bytes(4, "little", signed=True) for number in (0, 4, 8))
    assert body.count(honest) == 1
    return body.replace(honest, b"".join(number.to_bytes(4, "little", signed=True) for number in offsets))


@pytest.mark.parametrize("offsets", [[0, 4, 1 << 30], [0, -4, 8], [0, 8, 4], [-(1 << 30), 0, 4], [0, 1 << 20, 1 << 21]])
@EITHER_WAY
def test_forged_offsets_are_refused_and_read_no_memory(
    client: httpx.Client, topic: str, offsets: list[int], query: str
) -> None:
    assert error_of(write_columns(client, topic, forged(offsets), query)) == (400, "invalid_request")
    assert client.get("/v0/health").status_code == 200


@EITHER_WAY
def test_text_that_is_not_utf_8_is_refused(client: httpx.Client, topic: str, query: str) -> None:
    body = stream({"data": ['"aaaa"']})
    assert body.count(b"aaaa") == 1
    answer = write_columns(client, topic, body.replace(b"aaaa", b"a\xff\xfea"), query)
    assert error_of(answer) == (400, "invalid_request")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_body_does_not_unpack_beyond_the_limit(tmp_path: Path, codec: str) -> None:
    with local_server(tmp_path, Limits(max_body_bytes=1 << 20)) as server, server.client() as client:
        bomb = stream({"data": [" " * (8 << 20) + "1"]}, compression=codec)
        assert len(bomb) < 1 << 18
        status, _ = error_of(write_columns(client, "a", bomb))
        assert status in (400, 413, 415)
        packed = gzip.compress(stream({"data": [" " * (8 << 20) + "1"]}))
        answer = write_columns(client, "a", packed, content_encoding="gzip")
        assert error_of(answer) == (413, "payload_too_large")


# -- without pyarrow -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server in whose Python there is no pyarrow."""
    prelude = "import sys; sys.modules['pyarrow'] = None; "
    with (
        child(tmp_path_factory.mktemp("bare"), prelude=prelude) as server,
        server.wait_until_ready().client() as client,
    ):
        write(client, "a", 1)
        yield client


def test_without_pyarrow_a_diff_in_columns_is_406_and_names_the_extra(bare: httpx.Client) -> None:
    answer = bare.post("/v0/topics/a/diff", json={}, headers={"accept": ARROW})
    assert error_of(answer) == (406, "not_acceptable")
    assert "topics[arrow]" in answer.json()["error"]["message"]


def test_without_pyarrow_a_write_in_columns_is_415_and_names_the_extra(bare: httpx.Client) -> None:
    answer = write_columns(bare, "a", stream({"data": ["1"]}))
    assert error_of(answer) == (415, "unsupported_media_type")
    assert "topics[arrow]" in answer.json()["error"]["message"]


def test_without_pyarrow_json_works(bare: httpx.Client) -> None:
    assert datas(bare, "a") == [1]
