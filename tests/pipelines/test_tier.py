"""`tier`: what a topic holds is in the lake, once; what it has lost or deleted is in the ledger."""

from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.http.server import LocalServer, write_raw
from tests.pipelines.calm import tier, verify
from tests.pipelines.logs import append, delete, fates, put, state, told
from topics.core.errors import InvalidRequest
from topics.pipelines import archived, files, ledger
from topics.pipelines.manifest import Manifest
from topics.pipelines.stores import LocalStore


def rows_of(spark: SparkSession, lake: str, topic: str) -> list[int]:
    return sorted(row["seq"] for row in archived(spark, lake, topics=[topic]).select("seq").collect())


def test_records_losses_and_deletions_each_have_their_fate_in_the_ledger(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 100, tags=10)
    put(client, topic, cap_records=60)
    delete(client, topic, match="t5")
    append(client, topic, 3)
    delete(client, topic, match="none")
    tier(spark, server.url, lake, topics=[topic])
    live, losses = told(client, topic)
    assert rows_of(spark, lake, topic) == live
    assert fates(lake, topic)[0] == (losses[0][0], losses[0][1], "cap")
    deleted = [(first, last) for first, last, what in fates(lake, topic) if what == "deleted"]
    assert deleted == [(seq, seq) for seq in (45, 55, 65, 75, 85, 95) if seq > losses[0][1]]
    assert verify(spark, lake, url=server.url).ok


def test_deletions_at_the_end_of_a_batch_are_not_taken_for_what_is_not_there_yet(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 10)
    delete(client, topic, before_seq=11)
    tier(spark, server.url, lake, topics=[topic])
    assert fates(lake, topic) == [(1, 10, "deleted")]
    append(client, topic, 1)
    tier(spark, server.url, lake, topics=[topic])
    assert fates(lake, topic) == [(1, 10, "deleted"), (11, 11, "archived")]


def test_a_second_run_goes_on_and_one_with_nothing_new_makes_no_version(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 50)
    tier(spark, server.url, lake, topics=[topic])
    append(client, topic, 50)
    tier(spark, server.url, lake, topics=[topic])
    manifest = Manifest(LocalStore(Path(lake)))
    assert manifest.latest() == 2
    tier(spark, server.url, lake, topics=[topic])
    assert manifest.latest() == 2
    assert rows_of(spark, lake, topic) == list(range(1, 101))
    assert [(file.first, file.last) for file in files(lake, topic=topic)] == [(1, 50), (51, 100)]


def test_a_stream_that_lost_its_checkpoint_brings_nothing_in_twice(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 50)
    tier(spark, server.url, lake, topics=[topic])
    before = [Path(file.path).read_bytes() for file in files(lake)]
    shutil.rmtree(Path(lake) / "_streams")
    append(client, topic, 30)
    put(client, topic, cap_records=40)
    tier(spark, server.url, lake, topics=[topic])
    assert rows_of(spark, lake, topic) == list(range(1, 81))
    assert fates(lake, topic) == [(1, 80, "archived")], "what is archived is not lost, whatever the log says since"
    assert [Path(file.path).read_bytes() for file in files(lake)][:1] == before, "a named file was written again"
    assert verify(spark, lake, url=server.url).ok


def test_two_tiers_over_the_same_topic_share_the_lake(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 40)
    tier(spark, server.url, lake, topics=[topic])
    append(client, topic, 40)
    tier(spark, server.url, lake, prefix=topic)
    append(client, topic, 40)
    tier(spark, server.url, lake, topics=[topic])
    assert rows_of(spark, lake, topic) == list(range(1, 121))
    assert verify(spark, lake, url=server.url).ok


def test_a_recreated_topic_is_another_instance(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 20)
    tier(spark, server.url, lake, topics=[topic])
    client.delete(f"/v0/topics/{topic}")
    append(client, topic, 5)
    tier(spark, server.url, lake, topics=[topic])
    epochs = sorted({each.epoch for each in ledger(lake, topic=topic)})
    assert [(each.epoch, each.first, each.last) for each in ledger(lake, topic=topic)] == [
        (epochs[0], 1, 20),
        (epochs[1], 1, 5),
    ]
    verified = verify(spark, lake, url=server.url)
    assert verified.ok
    assert [each.is_over for each in verified.instances] == [True, False]


def test_trim_deletes_from_the_log_what_is_in_the_lake_and_nothing_else(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 30)
    tier(spark, server.url, lake, topics=[topic])
    assert state(client, topic)["count"] == 30
    # With nothing new: what an earlier run has brought in is trimmed, too.
    tier(spark, server.url, lake, topics=[topic], trim=True)
    assert state(client, topic)["count"] == 0
    history = client.get(f"/v0/topics/{topic}/deletes").json()["deletes"]
    assert [each["purpose"] for each in history] == ["trim"]
    append(client, topic, 5)
    assert verify(spark, lake, url=server.url).instances[0].waiting == 5
    assert state(client, topic)["count"] == 5
    assert rows_of(spark, lake, topic) == list(range(1, 31))


def test_trim_leaves_a_topic_alone_whose_first_records_are_not_in_the_lake(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    from topics.pipelines.lake import Change, Version
    from topics.pipelines.spans import Span

    append(client, topic, 30)
    epoch = state(client, topic)["epoch"]
    # A lake that has 11 to 20 only.
    change = Change(topic, epoch, [Span(11, 20, "archived")])
    Manifest(LocalStore(Path(lake))).commit("test", lambda _: Version(0, 0, "", [change]))
    server_side = tier(spark, server.url, lake, prefix=f"{topic}-none", trim=True)
    assert server_side.progress.state == "done"
    tier(spark, server.url, lake, topics=[topic], trim=True)
    # All of it is archived now: 1 to 10 and 21 to 30 came in, 11 to 20 was there.
    assert fates(lake, topic) == [(1, 30, "archived")]


def test_a_trim_never_reaches_a_topic_that_was_recreated(client: httpx.Client, topic: str) -> None:
    append(client, topic, 10)
    epoch = state(client, topic)["epoch"]
    client.delete(f"/v0/topics/{topic}")
    append(client, topic, 10)
    answer = client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 11, "purpose": "trim", "epoch": epoch})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "topic_not_found")
    assert state(client, topic)["count"] == 10
    now = state(client, topic)["epoch"]
    assert delete(client, topic, before_seq=11, purpose="trim", epoch=now) == 10


def test_names_that_are_no_paths_and_names_that_are_too_long_for_one(
    spark: SparkSession, server: LocalServer, client: httpx.Client, lake: str
) -> None:
    names = ["a:b.c-d_e", "x" * 255, "y" + ":" * 200]
    for name in names:
        append(client, name, 3)
    tier(spark, server.url, lake, topics=names)
    found = archived(spark, lake).groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in found} == dict.fromkeys(names, 3)
    assert any("/topic=a%3Ab.c-d_e/epoch=" in file.path for file in files(lake))
    assert verify(spark, lake, url=server.url).ok


def test_data_and_meta_are_in_the_lake_as_they_were_sent(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    texts = ['{"b": 1.0, "a": 1e400, "a": 2}', '"\\u00e9\\n"', "null", "[ 1,2 ]"]
    for text in texts:
        write_raw(client, topic, text.encode())
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "tag": "t", "node": "n", "meta": {"k": "v"}}]})
    tier(spark, server.url, lake, topics=[topic])
    rows = archived(spark, lake, topics=[topic]).orderBy("seq").collect()
    assert [row["data"] for row in rows][:4] == texts
    assert (rows[4]["tag"], rows[4]["node"], rows[4]["meta"]) == ("t", "n", '{"k":"v"}')


def test_the_lake_opens_in_pyarrow_and_duckdb_with_the_same_rows(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 500, tags=7)
    append(client, f"{topic}:2", 100)
    delete(client, topic, match="t3")
    tier(spark, server.url, lake, prefix=topic)
    # What a crash may leave behind, and nobody must read.
    stray = Path(files(lake)[0].path)
    shutil.copy(stray, stray.with_name("stray.parquet"))
    names = ["seq", "ts", "node", "tag", "meta", "data"]
    ours = archived(spark, lake).orderBy("topic", "seq").select("topic", "epoch", *names).toArrow()
    tables = []
    for file in files(lake):
        table = pq.read_table(file.path, partitioning=None)
        assert table.schema.names == names
        assert table.schema.field("seq").type == pa.int64()
        assert table.schema.field("ts").type == pa.timestamp("us", tz="UTC")
        metadata = pq.read_metadata(file.path)
        assert metadata.row_group(0).column(0).compression == "ZSTD"
        assert metadata.row_group(0).column(0).statistics.min == file.first
        assert metadata.row_group(0).column(1).statistics.has_min_max
        assert table["seq"].to_pylist() == sorted(table["seq"].to_pylist())
        tables.append(table.add_column(0, "topic", pa.array([file.topic] * len(table))))
    theirs = pa.concat_tables(tables).sort_by([("topic", "ascending"), ("seq", "ascending")])
    for name in ["topic", *names]:
        assert theirs[name].to_pylist() == ours[name].to_pylist(), name
    with duckdb.connect() as database:
        paths = [file.path for file in files(lake)]
        query = "SELECT topic, epoch, seq, tag, data FROM read_parquet(?, hive_partitioning = true) ORDER BY topic, seq"
        found = database.execute(query, [paths]).fetchall()
    columns = [ours[name].to_pylist() for name in ("topic", "epoch", "seq", "tag", "data")]
    assert found == list(zip(*columns, strict=True))


def test_small_files_are_merged_while_a_topic_grows(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    for _ in range(5):
        append(client, topic, 10)
        tier(spark, server.url, lake, topics=[topic], small_files=2)
    assert len(files(lake, topic=topic)) <= 3
    assert rows_of(spark, lake, topic) == list(range(1, 51))
    assert verify(spark, lake, url=server.url).ok


def test_a_live_tier_brings_in_what_comes_and_tells_how_far_it_is(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 20)
    running = tier(spark, server.url, lake, topics=[topic], once=False, every="100 milliseconds", name=topic)
    try:
        running.query.processAllAvailable()
        append(client, topic, 20)
        running.query.processAllAvailable()
        assert rows_of(spark, lake, topic) == list(range(1, 41))
    finally:
        progress = running.stop()
    assert (progress.records, progress.lag, progress.state) == (40, 0, "done")
    published = client.post("/v0/topics/pipelines.progress/diff", json={"limit": 1000}).json()["records"]
    mine = [each["data"] for each in published if each["data"]["name"] == topic]
    assert mine[-1]["records"] == 40
    assert mine[-1]["state"] == "done"


def test_which_topics_must_be_said(spark: SparkSession, server: LocalServer, lake: str) -> None:
    with pytest.raises(InvalidRequest, match="which topics"):
        tier(spark, server.url, lake)
    with pytest.raises(InvalidRequest, match="which topics"):
        tier(spark, server.url, lake, topics=["a"], prefix="b")
