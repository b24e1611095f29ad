"""`df.write.format("topics")` and `writeStream`: rows as records, exactly once, all of a batch or nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.http.server import DEADLINE, LocalServer, diff, local_server, write
from topics.core.errors import TopicsError
from topics.core.limits import Limits
from topics.spark import sink
from topics.spark.options import sink_options
from topics.spark.spooling import Spool


def save(rows: DataFrame, server: LocalServer, **options: Any) -> None:
    rows.write.format("topics").mode("append").options(url=server.url, **options).save()


def read_all(client: httpx.Client, topic: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = diff(client, topic, include_tags=True, limit=1000)["records"]
    return records


def exists(client: httpx.Client, topic: str) -> bool:
    return client.get(f"/v0/topics/{topic}").status_code == 200


def configure(client: httpx.Client, topic: str, **config: Any) -> None:
    answer = client.put(f"/v0/topics/{topic}", json=config)
    assert answer.status_code in (200, 201), answer.text


# What a row becomes.


def test_a_row_becomes_a_record_with_its_tag_node_and_meta(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    rows = spark.sql("""SELECT * FROM VALUES ('{"a": 1.0}', 't', 'n', '{"k":"v"}'), ('2', NULL, NULL, NULL)
        AS rows(data, tag, node, meta)""")
    save(rows.coalesce(1), server, topic=topic)
    first, second = read_all(client, topic)
    assert {name: first[name] for name in ("$tag", "$node", "meta")} == {"$tag": "t", "$node": "n", "meta": {"k": "v"}}
    assert set(second) == {"$seq", "$ts", "data"}
    assert '"data":{"a": 1.0}' in client.post(f"/v0/topics/{topic}/diff", json={}).text


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ('\'[1.0, {"b":1, "a":1e400}]\'', '[1.0, {"b":1, "a":1e400}]'),
        ("'null'", "null"),
        ("7", "7"),
        ("cast(9007199254740993 as bigint)", "9007199254740993"),
        ("1.25d", "1.25"),
        ("true", "true"),
        ("cast('12345678901234567.10' as decimal(19,2))", "12345678901234567.10"),
        ("named_struct('b', 1, 'a', cast(null as string), 'é', '\"')", '{"b":1,"a":null,"é":"\\""}'),
        ("array(1, null, 3)", "[1,null,3]"),
        ("map('k', array(1))", '{"k":[1]}'),
        ("map(1, 'one')", '{"1":"one"}'),
        ("timestamp'2020-01-02 03:04:05.678'", '"2020-01-02T03:04:05.678000Z"'),
        ("date'2020-01-02'", '"2020-01-02"'),
        ("unhex('00FF')", '"AP8="'),
        ("named_struct('variant', 'blue', 'float', 1)", '{"variant":"blue","float":1}'),
    ],
)
def test_data_is_json_text_or_is_written_as_json(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, expression: str, text: str
) -> None:
    save(spark.sql(f"SELECT {expression} AS data"), server, topic=topic)
    body = client.post(f"/v0/topics/{topic}/diff", json={}).text
    assert f'"data":{text}}}]' in body


def test_strings_may_be_large_in_the_session(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        rows = spark.sql("SELECT '{\"a\":1}' AS data, 't' AS tag, '{\"k\":\"v\"}' AS meta")
        save(rows, server, topic=topic)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    [record] = read_all(client, topic)
    assert (record["data"], record["$tag"], record["meta"]) == ({"a": 1}, "t", {"k": "v"})


def test_meta_may_be_a_map(spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str) -> None:
    rows = spark.sql("SELECT '1' AS data, map('k', 'v', 'é', '') AS meta UNION ALL SELECT '2', NULL").coalesce(1)
    save(rows, server, topic=topic)
    assert [record.get("meta") for record in read_all(client, topic)] == [{"k": "v", "é": ""}, None]


def test_rows_keep_the_order_of_their_partitions(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    save(spark.range(0, 1000, 1, 4).selectExpr("id AS data"), server, topic=topic)
    assert [record["data"] for record in read_all(client, topic)] == list(range(1000))


def test_a_column_says_where_a_row_goes(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    names = [f"{topic}.{letter}" for letter in "ab"]
    rows = spark.range(10).selectExpr(f"if(id % 2 = 0, '{names[0]}', '{names[1]}') AS topic", "id AS data")
    save(rows, server)
    assert [[record["data"] for record in read_all(client, name)] for name in names] == [
        [0, 2, 4, 6, 8],
        [1, 3, 5, 7, 9],
    ]


def test_the_option_wins_over_the_column(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    save(spark.sql(f"SELECT '{topic}.column' AS topic, '1' AS data"), server, topic=topic)
    assert len(read_all(client, topic)) == 1
    assert not exists(client, f"{topic}.column")


def test_no_rows_write_nothing_and_create_nothing(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    save(spark.sql("SELECT '1' AS data WHERE false"), server, topic=topic)
    assert not exists(client, topic)


def test_columns_that_mean_nothing_here_are_left_out(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    save(spark.sql("SELECT '1' AS data, 'order' AS kind, 5 AS seq, 6 AS price"), server, topic=topic)
    assert set(read_all(client, topic)[0]) == {"$seq", "$ts", "data"}


def test_a_tombstone_row_becomes_a_hole_of_the_same_length_in_its_place(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    rows = spark.sql("""SELECT * FROM VALUES ('1', 'record', NULL, NULL), (NULL, 'tombstone', 5L, 7L),
        (NULL, 'tombstone', 8L, 8L), ('2', 'record', NULL, NULL), (NULL, 'tombstone', 1L, 0L)
        AS rows(data, kind, gap_from, gap_to)""")
    save(rows.coalesce(1), server, topic=topic)
    described = client.get(f"/v0/topics/{topic}").json()
    assert described["head_seq"] == 7
    assert [(record["$seq"], record["data"]) for record in read_all(client, topic)] == [(1, 1)]
    told = diff(client, topic, from_seq=1)
    assert (told["tombstone"]["gap_from"], told["tombstone"]["gap_to"]) == (2, 5)
    assert told["tombstone"]["reason"] == "source_trim"
    assert [record["$seq"] for record in told["records"]] == [6]
    # A topic that was recreated and lost nothing that has a seq: that it was is still to be seen.
    assert diff(client, topic, from_seq=6)["tombstone"]["gap_to"] == 7


def test_a_topic_read_and_written_again_keeps_its_records_and_its_losses(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(10), config={"cap_records": 4})
    rows = spark.read.format("topics").options(url=server.url, topic=topic).load()
    save(rows, server, topic=f"{topic}.copy")
    assert diff(client, f"{topic}.copy")["tombstone"]["gap_to"] == 6
    originals = [(record["$seq"], record["data"]) for record in diff(client, topic)["records"]]
    assert [(record["$seq"], record["data"]) for record in diff(client, f"{topic}.copy")["records"]] == originals


# What cannot be written.


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT 1 AS other", "there is no column `data`, got other"),
        ("SELECT '1' AS data, 5 AS tag", "the column tag must be a string, got int"),
        ("SELECT '1' AS data, 5 AS meta", "the column meta must be a string or a map of strings, got int"),
        ("SELECT '1' AS data, 'x' AS kind, 1 AS gap_from, 1L AS gap_to", "the column gap_from must be a bigint"),
        ("SELECT parse_json('1') AS data", "variant"),
        ("SELECT array(named_struct('a', parse_json('1'))) AS data", "variant"),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused_by_its_column(
    spark: SparkSession, server: LocalServer, topic: str, query: str, message: str
) -> None:
    with pytest.raises(AnalysisException, match=message):
        save(spark.sql(query), server, topic=topic)


def test_rows_that_go_nowhere_are_refused(spark: SparkSession, server: LocalServer) -> None:
    with pytest.raises(AnalysisException, match="Set the option topic, or have a column `topic`"):
        save(spark.sql("SELECT '1' AS data"), server)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("'{\"a\":', NULL, NULL", "row 3 of this task.*data"),
        ("NULL, NULL, NULL", "row 3: data is null; JSON's null is the string 'null'"),
        ("'3', repeat('t', 257), NULL", "row 3 of this task.*tag"),
        ("'3', NULL, '{\"k\":1}'", "row 3 of this task.*meta"),
        ("'3', NULL, 'nonsense'", "row 3 of this task.*meta"),
        ("concat('\"', repeat('x', 2 * 1024 * 1024), '\"'), NULL, NULL", "row 3 of this task.*bytes"),
    ],
)
def test_a_row_that_cannot_be_written_fails_the_batch_is_named_and_nothing_is_visible(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, row: str, message: str
) -> None:
    rows = spark.sql(f"""SELECT * FROM VALUES ('1', NULL, NULL), ('2', 'x', '{{"k":"v"}}'), ({row})
        AS rows(data, tag, meta)""")
    with pytest.raises(PySparkException, match=message):
        save(rows.coalesce(1), server, topic=topic)
    assert not exists(client, topic)


def test_a_row_without_a_topic_is_named(spark: SparkSession, server: LocalServer) -> None:
    rows = spark.sql("SELECT '1' AS data, CAST(NULL AS STRING) AS topic")
    with pytest.raises(PySparkException, match="row 1: topic is null, and there is no option topic"):
        save(rows, server)


def test_a_topic_that_cannot_be_named_so_is_refused(spark: SparkSession, server: LocalServer) -> None:
    with pytest.raises(PySparkException, match=r"topic: a name is 1 to 255 of .* got '-bad'"):
        save(spark.sql("SELECT '1' AS data, '-bad' AS topic"), server)


@pytest.mark.parametrize("value", ["double('NaN')", "array(1.0d, double('-Infinity'))"])
def test_a_number_that_json_has_not_is_refused_and_not_changed(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, value: str
) -> None:
    with pytest.raises(PySparkException, match="row 1: JSON has no NaN and no Infinity"):
        save(spark.sql(f"SELECT {value} AS data"), server, topic=topic)


def test_a_tombstone_without_its_gap_is_named(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    rows = spark.sql("""SELECT '1' AS data, 'record' AS kind, 1L AS gap_from, 1L AS gap_to
        UNION ALL SELECT NULL, 'tombstone', 1L, NULL""")
    with pytest.raises(PySparkException, match="row 2: a tombstone needs gap_from and gap_to"):
        save(rows.coalesce(1), server, topic=topic)
    assert not exists(client, topic)


def test_one_bad_row_of_one_topic_leaves_all_topics_untouched(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, f"{topic}.a", "before")
    rows = spark.sql(f"SELECT * FROM VALUES ('{topic}.a', '1'), ('{topic}.b', 'bad') AS rows(topic, data)")
    with pytest.raises(PySparkException, match=f"for topic '{topic}.b'"):
        save(rows, server)
    assert [record["data"] for record in read_all(client, f"{topic}.a")] == ["before"]
    assert not exists(client, f"{topic}.b")


def test_a_full_topic_fails_the_whole_batch_and_is_named(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    configure(client, f"{topic}.full", cap_records=2, discard="reject")
    write(client, f"{topic}.full", 1)
    rows = spark.sql(f"""SELECT * FROM VALUES ('{topic}.other', '1'), ('{topic}.full', '2'), ('{topic}.full', '3')
        AS rows(topic, data)""")
    with pytest.raises(PySparkException, match=f"{topic}.full"):
        save(rows, server)
    assert len(read_all(client, f"{topic}.full")) == 1
    assert not exists(client, f"{topic}.other")


def test_a_topic_is_not_created_when_that_was_forbidden(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    with pytest.raises(PySparkException, match=f"topic '{topic}' does not exist, and create is false"):
        save(spark.sql("SELECT '1' AS data"), server, topic=topic, create="false")
    assert not exists(client, topic)
    write(client, topic, 0)
    save(spark.sql("SELECT '1' AS data"), server, topic=topic, create="false")
    assert len(read_all(client, topic)) == 2


def test_overwriting_is_refused_with_the_reason(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, "before")
    rows = spark.sql("SELECT '1' AS data")
    with pytest.raises(AnalysisException, match="a topic can only be appended to: use mode\\('append'\\)"):
        rows.write.format("topics").mode("overwrite").options(url=server.url, topic=topic).save()
    assert len(read_all(client, topic)) == 1


def test_a_key_that_may_not_write_is_refused(spark: SparkSession, tmp_path: Path, topic: str) -> None:
    with (
        local_server(tmp_path, api_keys="reader:read") as guarded,
        pytest.raises(PySparkException, match="Forbidden") as refused,
    ):
        save(spark.sql("SELECT '1' AS data"), guarded, topic=topic, key="reader")
    assert "scope" in str(refused.value)


def test_a_server_that_is_away_fails_the_write(spark: SparkSession, tmp_path: Path, topic: str) -> None:
    with local_server(tmp_path) as gone:
        pass
    with pytest.raises(PySparkException, match=f"cannot reach {gone.url}"):
        save(spark.sql("SELECT '1' AS data"), gone, topic=topic, retryMs="50")


# Exactly once.


def test_a_batch_write_with_an_app_id_and_a_version_is_made_once(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    for version in (1, 1, 2, 2):
        rows = spark.sql(f"SELECT '{version}' AS data")
        save(rows, server, topic=topic, txnAppId=f"app-{topic}", txnVersion=str(version))
    assert [record["data"] for record in read_all(client, topic)] == [1, 2]


def test_a_version_that_is_behind_is_refused(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    rows = spark.sql("SELECT '1' AS data")
    save(rows, server, topic=topic, txnAppId=f"app-{topic}", txnVersion="5")
    with pytest.raises(PySparkException, match="has committed client_seq 5: 4 is lower"):
        save(rows, server, topic=topic, txnAppId=f"app-{topic}", txnVersion="4")
    assert len(read_all(client, topic)) == 1


def test_two_writes_without_a_version_are_two(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    rows = spark.sql("SELECT '1' AS data")
    for _ in range(2):
        save(rows, server, topic=topic)
    assert len(read_all(client, topic)) == 2


def spooled(server: LocalServer, topic: str, *datas: str) -> sink.Written:
    """A task's part, without Spark around it."""
    txn = f"txn-{topic}"
    with Spool(sink_options({"url": server.url}), txn, "0.1") as spool:
        columns = {"$row": pa.array(range(len(datas)), pa.int64()), "data": pa.array(datas, pa.string())}
        spool.add_records(topic, pa.RecordBatch.from_pydict(columns))
        return sink.Written(txn, "0.1", spool.finish(), None)


def test_a_commit_whose_answer_was_lost_may_be_repeated(server: LocalServer, client: httpx.Client, topic: str) -> None:
    options = sink_options({"url": server.url})
    part = spooled(server, topic, "1", "2")
    for _ in range(2):
        sink._commit(options, [part], None, None)
    assert len(read_all(client, topic)) == 2


def test_an_abort_behind_a_commit_takes_nothing_back(server: LocalServer, client: httpx.Client, topic: str) -> None:
    options = sink_options({"url": server.url})
    part = spooled(server, topic, "1", "2")
    sink._commit(options, [part], None, None)
    sink._abort(options, [part, None])
    assert len(read_all(client, topic)) == 2


def test_an_abort_drops_what_was_spooled(server: LocalServer, client: httpx.Client, topic: str) -> None:
    options = sink_options({"url": server.url})
    part = spooled(server, topic, "1")
    assert client.get(f"/v0/txns/{part.txn}").status_code == 200
    sink._abort(options, [None, part])
    assert client.get(f"/v0/txns/{part.txn}").status_code == 404
    assert not exists(client, topic)


def test_a_commit_of_what_the_server_has_lost_says_so(server: LocalServer, client: httpx.Client, topic: str) -> None:
    options = sink_options({"url": server.url})
    part = spooled(server, topic, "1")
    sink._abort(options, [part])
    with pytest.raises(TopicsError, match="the server lost what this batch had sent"):
        sink._commit(options, [part], "app", 1)
    assert not exists(client, topic)


# Chunks: what does not fit into one request goes in several.


def test_a_chunk_with_too_many_records_for_the_server_is_halved(tmp_path: Path, topic: str) -> None:
    with local_server(tmp_path, Limits(max_batch_records=3)) as small, small.client() as client:
        part = spooled(small, topic, *map(str, range(10)))
        sink._commit(sink_options({"url": small.url}), [part], None, None)
        assert [record["data"] for record in read_all(client, topic)] == list(range(10))


def test_a_chunk_that_is_too_large_for_the_server_is_halved(tmp_path: Path, topic: str) -> None:
    """Far larger than what sockets hold: the refusal comes while the body is still being sent."""
    large = json.dumps("x" * 200_000)
    with local_server(tmp_path, Limits(max_body_bytes=1 << 20)) as small, small.client() as client:
        part = spooled(small, topic, *[large] * 60)
        sink._commit(sink_options({"url": small.url}), [part], None, None)
        assert client.get(f"/v0/topics/{topic}").json()["count"] == 60


def test_a_single_row_that_is_too_large_for_the_server_is_named(tmp_path: Path, topic: str) -> None:
    with (
        local_server(tmp_path, Limits(max_body_bytes=100_000)) as small,
        pytest.raises(TopicsError, match=f"row 1 .*'{topic}'"),
    ):
        spooled(small, topic, "1", json.dumps("x" * 200_000), "3")


# Streams.


def copy(
    spark: SparkSession, server: LocalServer, checkpoint: Path, source: dict[str, str], **options: Any
) -> StreamingQuery:
    """Topic to topic, all that is there now."""
    rows = spark.readStream.format("topics").options(url=server.url, **source).load()
    query = (
        rows.writeStream.format("topics")
        .options(url=server.url, checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(int(3 * DEADLINE)), "the query does not end"
    finally:
        query.stop()
    return query


def forget(checkpoint: Path, folder: str, number: int) -> None:
    (checkpoint / folder / str(number)).unlink()
    (checkpoint / folder / f".{number}.crc").unlink(missing_ok=True)


def test_a_stream_copies_topics_with_their_losses_exactly_once_over_restarts_at_every_stage(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    source = {"topic": topic, "maxRecordsPerTrigger": "3"}
    write(client, topic, *range(10), config={"cap_records": 6})
    copied = f"{topic}.copy"
    datas: list[int] = [*range(4, 10)]
    for stage in ("all done", "not committed", "not planned"):
        copy(spark, server, tmp_path, source, topic=copied)
        assert [record["data"] for record in read_all(client, copied)] == datas, stage
        assert diff(client, copied)["tombstone"]["gap_to"] == 4, stage
        last = max(int(path.name) for path in (tmp_path / "commits").iterdir() if path.name.isdigit())
        if stage != "not planned":
            forget(tmp_path, "commits", last)
        if stage == "not committed":
            forget(tmp_path, "offsets", last)
    write(client, topic, 10)
    copy(spark, server, tmp_path, source, topic=copied)
    assert [record["data"] for record in read_all(client, copied)] == [*datas, 10]


def test_a_batch_that_the_destination_refused_is_there_once_after_the_restart(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    """The first batch was planned and never committed; meanwhile the source evicts: its loss becomes a hole."""
    copied = f"{topic}.copy"
    configure(client, copied, cap_records=1, discard="reject")
    write(client, topic, *range(5))
    with pytest.raises(StreamingQueryException, match=copied):
        copy(spark, server, tmp_path, {"topic": topic}, topic=copied)
    assert client.get(f"/v0/topics/{copied}").json()["head_seq"] == 0
    configure(client, topic, cap_records=3)
    write(client, topic, 5)
    configure(client, copied, cap_records=0)
    copy(spark, server, tmp_path, {"topic": topic}, topic=copied)
    told = diff(client, copied)
    assert (told["tombstone"]["gap_from"], told["tombstone"]["gap_to"]) == (1, 3)
    assert [(record["$seq"], record["data"]) for record in told["records"]] == [(4, 3), (5, 4), (6, 5)]


def test_a_stream_writes_many_topics_and_keeps_what_records_have(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    names = [f"{topic}.{letter}" for letter in "ab"]
    for name in names:
        record = {"data": name, "tag": "t", "node": "n", "meta": {"k": "v"}}
        client.post(f"/v0/topics/{name}", json={"records": [record]})
    rows = (
        spark.readStream.format("topics")
        .options(url=server.url, topics=",".join(names), meta="map")
        .load()
        .selectExpr("concat(topic, '.copy') AS topic", "data", "tag", "node", "meta")
    )
    query = (
        rows.writeStream.format("topics")
        .options(url=server.url, checkpointLocation=str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(int(3 * DEADLINE))
    for name in names:
        [copied] = read_all(client, f"{name}.copy")
        del copied["$ts"]
        assert copied == {"$seq": 1, "$node": "n", "$tag": "t", "data": name, "meta": {"k": "v"}}


def test_batches_without_rows_commit_nothing(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, topic, 1, 2)
    rows = spark.readStream.format("topics").options(url=server.url, topic=topic).load().where("seq > 100")
    query = (
        rows.writeStream.format("topics")
        .options(url=server.url, checkpointLocation=str(tmp_path), topic=f"{topic}.copy")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(int(3 * DEADLINE))
    assert not exists(client, f"{topic}.copy")


def test_output_mode_complete_is_refused_with_the_reason(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, topic, 1, 2)
    counts = (
        spark.readStream.format("topics")
        .options(url=server.url, topic=topic)
        .load()
        .groupBy("kind")
        .count()
        .selectExpr("count AS data")
    )
    query = (
        counts.writeStream.format("topics")
        .outputMode("complete")
        .options(url=server.url, checkpointLocation=str(tmp_path), topic=f"{topic}.counts")
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match="output mode complete would rewrite what was written"):
        query.awaitTermination(int(3 * DEADLINE))
    assert not exists(client, f"{topic}.counts")


def test_a_malformed_row_of_a_stream_stops_it_and_nothing_of_its_batch_is_visible(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, topic, 1, 2, 3)
    rows = (
        spark.readStream.format("topics")
        .options(url=server.url, topic=topic)
        .load()
        .selectExpr("if(seq = 2, 'oops', data) AS data")
    )
    query = (
        rows.writeStream.format("topics")
        .options(url=server.url, checkpointLocation=str(tmp_path), topic=f"{topic}.copy")
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match=f"row 2 of this task, for topic '{topic}.copy'"):
        query.awaitTermination(int(3 * DEADLINE))
    assert not exists(client, f"{topic}.copy")


def test_a_batch_write_inside_a_stream_is_made_once_by_its_version(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    calls = itertools.count()

    def twice(frame: DataFrame, number: int) -> None:
        next(calls)
        for _ in range(2):
            save(frame.select("data"), server, topic=f"{topic}.copy", txnAppId=topic, txnVersion=str(number))

    write(client, topic, 1, 2)
    rows = spark.readStream.format("topics").options(url=server.url, topic=topic, maxRecordsPerTrigger="1").load()
    query = rows.writeStream.foreachBatch(twice).trigger(availableNow=True).start()
    assert query.awaitTermination(int(3 * DEADLINE))
    assert next(calls) == 2
    assert [record["data"] for record in read_all(client, f"{topic}.copy")] == [1, 2]
