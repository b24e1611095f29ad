"""`spark.read.format("topics")`: rows, options, loss as data, and push-down that never changes what is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.http.server import LocalServer, diff, local_server, write
from topics.client.connection import Connection
from topics.spark.options import Filter, OnLoss, Server
from topics.spark.planning import Range
from topics.spark.reading import Loss, Reading

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
# The columns that say what became of each seq.
FATE = StructType(
    [
        StructField("seq", LongType()),
        StructField("kind", StringType()),
        StructField("gap_from", LongType()),
        StructField("gap_to", LongType()),
        StructField("reason", StringType()),
    ]
)


def load(spark: SparkSession, server: LocalServer, **options: Any) -> DataFrame:
    return spark.read.format("topics").options(url=server.url, **options).load()


def write_records(client: httpx.Client, topic: str, *records: dict[str, Any]) -> None:
    answer = client.post(f"/v0/topics/{topic}", json={"records": records})
    assert answer.status_code in (200, 201), answer.text


def configure(client: httpx.Client, topic: str, **config: Any) -> None:
    answer = client.put(f"/v0/topics/{topic}", json=config)
    assert answer.status_code in (200, 201), answer.text


def delete(client: httpx.Client, topic: str, **selector: Any) -> None:
    answer = client.post(f"/v0/topics/{topic}/delete", json=selector)
    assert answer.status_code == 200, answer.text


def load_pushed(spark: SparkSession, server: LocalServer, **options: Any) -> DataFrame:
    return load(spark, server, pushFilters="true", **options)


def seqs(rows: DataFrame) -> list[int]:
    return sorted(row.seq for row in rows.where("kind = 'record'").collect())


def losses(rows: list[Row]) -> list[tuple[int, int, str]]:
    return [(row.gap_from, row.gap_to, row.reason) for row in rows if row.kind == "tombstone"]


@contextmanager
def pushdown(spark: SparkSession, setting: str) -> Iterator[None]:
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, setting)
    try:
        yield
    finally:
        spark.conf.set(PUSHDOWN, str(before))


# What a row has.


def test_a_record_is_a_row_with_all_its_columns(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write_records(client, topic, {"data": {"a": 1.0}, "tag": "t", "node": "n", "meta": {"k": "v"}}, {"data": None})
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    ts = diff(client, topic)["records"][0]["$ts"]
    rows = load(spark, server, topic=topic)
    assert [(field.name, field.dataType.simpleString()) for field in rows.schema] == [
        ("topic", "string"),
        ("epoch", "bigint"),
        ("seq", "bigint"),
        ("ts", "timestamp"),
        ("node", "string"),
        ("tag", "string"),
        ("meta", "string"),
        ("data", "string"),
        ("kind", "string"),
        ("gap_from", "bigint"),
        ("gap_to", "bigint"),
        ("reason", "string"),
    ]
    first, second = rows.selectExpr("unix_millis(ts) AS ms", "*").orderBy("seq").collect()
    assert (first.topic, first.epoch, first.seq, first.ms) == (topic, epoch, 1, ts)
    assert (first.node, first.tag, first.meta, first.data) == ("n", "t", '{"k":"v"}', '{"a":1.0}')
    assert (first.kind, first.gap_from, first.gap_to, first.reason) == ("record", None, None, None)
    assert (second.seq, second.node, second.tag, second.meta, second.data) == (2, None, None, None, "null")


def test_data_is_the_text_that_was_sent_byte_for_byte(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    texts = ['{"b":1e400,"a":[ 1 , 2.50 ],"b":"\\u00e9\U0001f600"}', "1.0", '""', "  [ ]".strip()]
    body = '{"records":[' + ",".join('{"data":' + text + "}" for text in texts) + "]}"
    answer = client.post(f"/v0/topics/{topic}", content=body.encode(), headers={"content-type": "application/json"})
    assert answer.status_code == 201, answer.text
    rows = load(spark, server, topic=topic).orderBy("seq").collect()
    assert [row.data for row in rows] == texts


def test_meta_is_a_map_when_asked_for(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write_records(client, topic, {"data": 1, "meta": {"k": "v", "é": ""}}, {"data": 2}, {"data": 3, "meta": {}})
    rows = load(spark, server, topic=topic, meta="map")
    assert rows.schema["meta"].dataType.simpleString() == "map<string,string>"
    assert [row.meta for row in rows.orderBy("seq").collect()] == [{"k": "v", "é": ""}, None, {}]


def test_a_user_may_ask_for_some_columns_in_any_order(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1, 2, config={"cap_records": 1})
    rows = (
        spark.read.format("topics")
        .schema("data string, gap_to bigint, topic string")
        .options(url=server.url, topic=topic)
        .load()
    )
    assert {tuple(row) for row in rows.collect()} == {(None, 1, topic), ("2", None, topic)}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("colour string", "there is no column 'colour'"),
        ("seq string", "the column seq is a bigint, got string"),
        ("seq bigint not null, data string not null", "the column data .*null"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_by_the_column(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, schema: str, message: str
) -> None:
    write(client, topic, 1)
    with pytest.raises(AnalysisException, match=message):
        spark.read.format("topics").schema(schema).options(url=server.url, topic=topic).load().collect()


# Which records.


def test_a_read_begins_and_ends_where_the_options_say(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(1, 7))
    assert seqs(load(spark, server, topic=topic, startingSeq="3", endingSeq="5")) == [3, 4, 5]
    assert seqs(load(spark, server, topic=topic, startingSeq="earliest", endingSeq="2")) == [1, 2]
    assert seqs(load(spark, server, topic=topic, startingSeq="6", endingSeq="latest")) == [6]
    assert seqs(load(spark, server, topic=topic, startingSeq="latest")) == []
    assert seqs(load(spark, server, topic=topic, startingSeq="99")) == []
    assert seqs(load(spark, server, topic=topic, startingSeq="5", endingSeq="4")) == []


def test_each_topic_of_a_map_has_its_own_bounds(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    names = [f"{topic}.{letter}" for letter in "abc"]
    for name in names:
        write(client, name, 1, 2, 3)
    rows = load(
        spark,
        server,
        topics=", ".join(names),
        startingSeq=f'{{"{names[0]}": 2, "{names[1]}": "latest"}}',
        endingSeq=f'{{"{names[0]}": 2}}',
    )
    assert sorted((row.topic, row.seq) for row in rows.collect()) == [
        (names[0], 2),
        *((names[2], seq) for seq in (1, 2, 3)),
    ]


def test_a_read_begins_at_a_time(spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    newest = ts_of(client, topic, 1)
    while (ts := next_ts(client, topic)) == newest:
        pass
    first = diff(client, topic)["records"]
    expected = [record["$seq"] for record in first if record["$ts"] >= ts]
    text = datetime.fromtimestamp(ts / 1000, UTC).isoformat()
    assert expected[0] > 1
    assert seqs(load(spark, server, topic=topic, startingTs=str(ts))) == expected
    assert seqs(load(spark, server, topic=topic, startingTs=text)) == expected
    assert seqs(load(spark, server, topic=topic, startingTs=str(ts + 3_600_000))) == []


def ts_of(client: httpx.Client, topic: str, seq: int) -> int:
    return int(diff(client, topic, from_seq=seq - 1, limit=1)["records"][0]["$ts"])


def next_ts(client: httpx.Client, topic: str) -> int:
    """Appends a record; returns its time."""
    return ts_of(client, topic, write(client, topic, "later")[0])


def test_a_prefix_reads_all_its_topics_and_no_others(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    for suffix in ("", ".x", "-y"):
        write(client, f"{topic}.in{suffix}", suffix)
    write(client, f"{topic}.out", "out")
    rows = load(spark, server, topicPrefix=f"{topic}.in").collect()
    assert sorted(row.topic for row in rows) == [f"{topic}.in", f"{topic}.in-y", f"{topic}.in.x"]


def test_where_no_topic_has_the_prefix_there_are_no_rows(spark: SparkSession, server: LocalServer, topic: str) -> None:
    assert load(spark, server, topicPrefix=topic).collect() == []


def test_an_empty_topic_has_no_rows(spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str) -> None:
    configure(client, topic, seq_base=7)
    assert load(spark, server, topic=topic).collect() == []


def test_a_topic_is_read_by_as_many_tasks_as_its_ranges(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(10))
    rows = load(spark, server, topic=topic, recordsPerPartition="3")
    assert rows.rdd.getNumPartitions() == 4
    assert seqs(rows) == list(range(1, 11))


def test_a_topic_may_begin_at_any_seq(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    base = 2**53 - 10
    write(client, topic, 1, 2, config={"seq_base": base})
    assert [(row.seq, row.kind) for row in load(spark, server, topic=topic).orderBy("seq").collect()] == [
        (base, "record"),
        (base + 1, "record"),
    ]


def test_records_of_a_node_stay_away(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write_records(client, topic, {"data": 1, "node": "a"}, {"data": 2, "node": "b"}, {"data": 3})
    write_records(client, topic, {"data": 4, "node": "c"})
    assert seqs(load(spark, server, topic=topic, node="a")) == [2, 3, 4]
    assert seqs(load(spark, server, topic=topic, node='["a", "c"]')) == [2, 3]


def test_a_tag_selector_leaves_its_records_and_every_tombstone(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    configure(client, topic, cap_records=3)
    tags = ["x1", "x1", "x2", "y"]
    write_records(client, topic, *({"data": tag, "tag": tag} for tag in tags))
    exact = load(spark, server, topic=topic, tagMatch="x1").collect()
    assert [row.seq for row in exact if row.kind == "record"] == [2]
    assert losses(exact) == [(1, 1, "cap")]
    starting = load(spark, server, topic=topic, tagMatch='["tag", "Glob", "x*"]').collect()
    assert sorted((row.seq, row.kind) for row in starting) == [(1, "tombstone"), (2, "record"), (3, "record")]


# Loss is data.


def test_an_evicted_range_is_one_row_in_front_of_the_records(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(1, 11), config={"cap_records": 4})
    rows = load(spark, server, topic=topic).orderBy("seq").collect()
    lost = rows[0]
    assert (lost.topic, lost.kind, lost.seq, lost.gap_from, lost.gap_to, lost.reason) == (
        *(topic, "tombstone", 6, 1, 6, "cap"),
    )
    assert (lost.data, lost.ts, lost.node, lost.tag, lost.meta) == (None, None, None, None, None)
    assert lost.epoch == rows[1].epoch
    assert [row.seq for row in rows[1:]] == [7, 8, 9, 10]


def test_a_read_that_begins_inside_a_loss_is_told_the_rest_of_it(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(1, 11), config={"cap_records": 4})
    assert losses(load(spark, server, topic=topic, startingSeq="5").collect()) == [(5, 6, "cap")]
    assert losses(load(spark, server, topic=topic, startingSeq="2", endingSeq="3").collect()) == [(2, 3, "cap")]
    assert losses(load(spark, server, topic=topic, startingSeq="7").collect()) == []


def test_holes_are_told_and_deleted_records_are_silent(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write_records(client, topic, {"data": 1}, {"hole": 3, "reason": "source_trim"}, {"data": 5, "tag": "x"})
    write(client, topic, 6)
    delete(client, topic, match="x")
    rows = load(spark, server, topic=topic, recordsPerPartition="100").collect()
    assert losses(rows) == [(2, 4, "source_trim")]
    assert sorted(row.seq for row in rows if row.kind == "record") == [1, 6]


def test_however_a_topic_is_divided_each_lost_seq_is_told_once(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    configure(client, topic, cap_records=9)
    for _ in range(3):
        write_records(client, topic, *[{"data": 0}] * 3, {"hole": 4, "reason": "source_trim"}, {"data": 1})
    head = client.get(f"/v0/topics/{topic}").json()["head_seq"]
    rows = load(spark, server, topic=topic, recordsPerPartition="2").collect()
    told = [seq for row in rows for seq in range(row.gap_from or row.seq, row.seq + 1)]
    assert sorted(told) == list(range(1, head + 1))


def test_a_loss_stops_a_read_that_asked_for_it_and_names_the_range(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(1, 11), config={"cap_records": 4})
    with pytest.raises(PythonException, match=rf"topic '{topic}' has lost seqs 1 to 6 \(cap\)"):
        load(spark, server, topic=topic, onLoss="fail").collect()


def test_a_read_that_fails_on_loss_reads_what_lost_nothing(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(1, 11), config={"cap_records": 4})
    assert seqs(load(spark, server, topic=topic, onLoss="fail", startingSeq="7")) == [7, 8, 9, 10]


def test_an_ignored_loss_is_no_row(spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(1, 11), config={"cap_records": 4})
    rows = load(spark, server, topic=topic, onLoss="ignore").collect()
    assert sorted((row.seq, row.kind) for row in rows) == [(seq, "record") for seq in (7, 8, 9, 10)]


# One task, without Spark around it: what happens between its plan and its run.


def fates(server: LocalServer, span: Range, on_loss: OnLoss = "emit") -> list[dict[str, Any]]:
    reading = Reading(Server(server.url, None, 10_000, 0), Filter(), on_loss)
    return [row for batch in reading.read(span, FATE) for row in batch.to_pylist()]


def gaps(rows: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return [(row["gap_from"], row["gap_to"], row["reason"]) for row in rows if row["kind"] == "tombstone"]


def test_what_is_evicted_between_plan_and_run_is_told(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3, 4)
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    configure(client, topic, cap_records=1)
    rows = fates(server, Range(topic, epoch, 1, 4))
    assert gaps(rows) == [(2, 3, "cap")]
    assert [row["seq"] for row in rows if row["kind"] == "record"] == [4]


def test_a_task_whose_whole_range_is_evicted_tells_its_range_and_no_more(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(10), config={"cap_records": 1})
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    rows = fates(server, Range(topic, epoch, 2, 5))
    assert (gaps(rows), len(rows)) == ([(3, 5, "cap")], 1)


def test_a_topic_deleted_between_plan_and_run_is_told(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2, 3)
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    client.delete(f"/v0/topics/{topic}")
    assert gaps(fates(server, Range(topic, epoch, 1, 3))) == [(2, 3, "deleted")]


def test_a_topic_recreated_between_plan_and_run_gives_none_of_its_new_records(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1, 2, 3)
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    client.delete(f"/v0/topics/{topic}")
    write(client, topic, *range(10))
    rows = fates(server, Range(topic, epoch, 1, 3))
    assert (gaps(rows), len(rows)) == ([(2, 3, "recreated")], 1)


def test_a_task_that_must_fail_on_loss_names_its_range(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(10), config={"cap_records": 1})
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    with pytest.raises(Loss, match=r"has lost seqs 3 to 5 \(cap\)"):
        fates(server, Range(topic, epoch, 2, 5), "fail")


def test_an_ignored_loss_is_logged_and_counted(
    server: LocalServer, client: httpx.Client, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(client, topic, *range(10), config={"cap_records": 1})
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    assert fates(server, Range(topic, epoch, 2, 5), "ignore") == []
    said = capsys.readouterr().err
    assert "seqs 3 to 5 (cap)" in said
    assert "3 records, ignored" in said


def test_a_range_of_many_answers_is_read_whole(
    server: LocalServer, client: httpx.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topics.spark.reading._ANSWER_RECORDS", 3)
    asked: list[Any] = []
    read_arrow = Connection.read_arrow

    def counted(self: Connection, path: str, body: Any) -> bytearray:
        asked.append(body["from_seq"])
        return read_arrow(self, path, body)

    monkeypatch.setattr(Connection, "read_arrow", counted)
    write(client, topic, *range(10))
    epoch = client.get(f"/v0/topics/{topic}").json()["epoch"]
    assert [row["seq"] for row in fates(server, Range(topic, epoch, 0, 10))] == list(range(1, 11))
    assert asked == [0, 3, 6, 9]


# Errors that a Spark user understands.


def test_a_missing_topic_is_named(spark: SparkSession, server: LocalServer, topic: str) -> None:
    with pytest.raises(AnalysisException, match=f"there is no topic '{topic}' at {server.url}"):
        load(spark, server, topic=topic).collect()


def test_one_missing_topic_of_many_is_named(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1)
    with pytest.raises(AnalysisException, match=f"there is no topic '{topic}.gone'"):
        load(spark, server, topics=f"{topic},{topic}.gone").collect()


def test_a_server_that_is_away_is_named(spark: SparkSession, tmp_path: Path, topic: str) -> None:
    with local_server(tmp_path) as gone:
        pass
    with pytest.raises(AnalysisException, match=f"cannot reach {gone.url}"):
        load(spark, gone, topic=topic, retryMs="50").collect()


def test_a_key_is_refused_with_the_servers_words_and_never_shown(
    spark: SparkSession, tmp_path: Path, topic: str
) -> None:
    with local_server(tmp_path, api_keys="good:read") as guarded:
        with guarded.client(headers={"authorization": "Bearer good"}) as admin:
            assert admin.get("/v0/topics").status_code == 200
        with pytest.raises(AnalysisException, match=r"(?i)Unauthorized") as refused:
            load(spark, guarded, topic=topic, key="wrong-secret").collect()
        assert "wrong-secret" not in str(refused.value)


def test_the_key_is_not_in_the_plan(
    spark: SparkSession,
    server: LocalServer,
    client: httpx.Client,
    topic: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(client, topic, 1)
    load(spark, server, topic=topic, key="my-own-secret").explain(extended=True)
    plan = capsys.readouterr().out
    assert "BatchScan topics" in plan
    assert "my-own-secret" not in plan


def test_an_option_that_is_wrong_is_named_to_the_user(spark: SparkSession, server: LocalServer, topic: str) -> None:
    with pytest.raises(AnalysisException, match="onLoss must be one of emit, fail, ignore, got 'shrug'"):
        load(spark, server, topic=topic, onLoss="shrug")


# Push-down: the same records with and without, and tombstones pass.


@pytest.fixture(scope="module")
def filtered(client: httpx.Client) -> str:
    """Prefix of two topics with tags, times, a loss in front and a hole in the middle."""
    prefix = "filtered"
    for name in ("filtered.a", "filtered.b"):
        configure(client, name, cap_records=6)
        tags = ["x", "x.1", "y", None, "x", "x*"]
        for index, tag in enumerate(tags):
            ts = ts_of(client, name, write(client, name, index)[0]) if index else 0
            while index and next_ts(client, name) == ts:
                pass
            write_records(client, name, {"data": index, **({"tag": tag} if tag else {})})
        write_records(client, name, {"hole": 2, "reason": "source_trim"}, {"data": "last", "tag": "x"})
        configure(client, name, cap_records=5)
    return prefix


FILTERS = [
    "seq > {middle}",
    "seq >= {middle} and seq < {middle} + 2",
    "seq = {middle}",
    "seq < 0",
    "topic = 'filtered.a'",
    "topic in ('filtered.b', 'nowhere')",
    "tag = 'x'",
    "tag like 'x%'",
    "tag = 'x' and tag like 'x%'",
    "tag is null",
    "ts >= {ts}",
    "ts > {ts}",
    "ts < {ts}",
    "ts <= {ts}",
    "ts = {ts}",
    "ts > {ts} - interval 500 microseconds and ts < {ts} + interval 500 microseconds",
    "ts <= timestamp'9999-12-31 23:59:59.999999' and seq > 0",
    "ts < timestamp'1960-01-01 00:00:00'",
    "topic = 'filtered.a' and tag = 'x' and seq > {middle} and data <> '5'",
]


def test_pushed_filters_leave_the_same_records(spark: SparkSession, server: LocalServer, filtered: str) -> None:
    everything = load(spark, server, topicPrefix=filtered).where("kind = 'record'").cache()
    rows = sorted(everything.select("seq", "ts").collect())
    middle, moment = rows[len(rows) // 2]
    given = {"middle": middle, "ts": f"timestamp'{moment:%Y-%m-%d %H:%M:%S.%f}'"}
    for text in FILTERS:
        condition = text.format(**given)
        with pushdown(spark, "true"):
            found = load_pushed(spark, server, topicPrefix=filtered).where(condition).collect()
        expected = everything.where(condition).collect()
        assert sorted(row for row in found if row.kind == "record") == sorted(expected), condition
    everything.unpersist()


@pytest.mark.parametrize("condition", ["tag = 'x'", "tag like 'x%'", "ts > timestamp'2020-01-01 00:00:00'"])
def test_tombstones_pass_pushed_filters(
    spark: SparkSession, server: LocalServer, filtered: str, condition: str
) -> None:
    all_rows = load(spark, server, topic=f"{filtered}.a").collect()
    with pushdown(spark, "true"):
        rows = load_pushed(spark, server, topic=f"{filtered}.a").where(condition).collect()
    assert [reason for _, _, reason in sorted(losses(rows))] == ["cap", "source_trim"]
    assert sorted(losses(rows)) == sorted(losses(all_rows))


def test_filters_on_seq_cut_tombstones_at_their_bounds(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(1, 11), config={"cap_records": 4})
    with pushdown(spark, "true"):
        rows = load_pushed(spark, server, topic=topic).where("seq >= 3 and seq <= 5").collect()
    assert losses(rows) == [(3, 5, "cap")]


def test_a_pushed_tag_filter_and_the_tag_option_both_hold(
    spark: SparkSession, server: LocalServer, filtered: str
) -> None:
    with pushdown(spark, "true"):
        rows = load_pushed(spark, server, topicPrefix=filtered, tagMatch='["tag","Glob","x*"]').where("tag = 'x.1'")
        tags = {row.tag for row in rows.where("kind = 'record'").collect()}
    assert tags <= {"x.1"}


def test_a_pushed_filter_means_its_time_in_the_sessions_zone(
    spark: SparkSession, server: LocalServer, filtered: str
) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        records = load(spark, server, topic=f"{filtered}.a").where("kind = 'record'")
        text = records.selectExpr("cast(max(ts) as string) as text").collect()[0].text
        with pushdown(spark, "true"):
            rows = load_pushed(spark, server, topic=f"{filtered}.a").where(f"ts >= timestamp'{text}'").collect()
        assert 1 <= sum(row.kind == "record" for row in rows) < records.count()
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))


@pytest.mark.parametrize("setting", ["true", "false"])
def test_a_read_that_did_not_ask_for_push_down_is_right_under_either_setting(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, setting: str
) -> None:
    """Spark 4.3 keeps a narrowed reader for every other use of the same frame."""
    write(client, topic, 1, 2, 3)
    with pushdown(spark, setting):
        rows = load(spark, server, topic=topic)
        assert rows.where("seq > 2").count() == 1
        assert rows.count() == 3
        one, two = rows.where("seq = 1"), rows.where("seq = 2")
        assert sorted(row.seq for row in one.union(two).collect()) == [1, 2]


def test_asking_for_push_down_breaks_no_read_while_spark_has_it_switched_off(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1, 2, 3)
    with pushdown(spark, "false"):
        assert load_pushed(spark, server, topic=topic).where("seq > 2").count() == 1


def test_a_pushed_filter_is_not_left_to_spark(
    spark: SparkSession,
    server: LocalServer,
    client: httpx.Client,
    topic: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(client, topic, 1)
    with pushdown(spark, "true"):
        load_pushed(spark, server, topic=topic).where("tag = 'x' and seq > 0 and topic = 'a'").explain()
    plan = capsys.readouterr().out
    assert "BatchScan topics" in plan
    assert "Filter (" not in plan


def test_strings_may_be_large_in_the_session(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, {"a": 1})
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        assert [row.data for row in load(spark, server, topic=topic).collect()] == ['{"a":1}']
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
