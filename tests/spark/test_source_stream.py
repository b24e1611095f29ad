"""`spark.readStream.format("topics")`: batches, offsets, restarts at every stage, and loss that is told once."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.http.server import DEADLINE, Background, LocalServer, eventually, local_server, write
from topics.spark.lag import LagListener, lag_of
from topics.spark.reading import Loss
from topics.spark.source import TopicsDataSource

SCHEMA = StructType(
    [
        StructField("seq", LongType()),
        StructField("kind", StringType()),
        StructField("gap_from", LongType()),
        StructField("gap_to", LongType()),
        StructField("reason", StringType()),
    ]
)
Callback = Callable[[int], None]


class Taken:
    """A destination that keeps each batch under its number, as an idempotent one would: a repeated one replaces."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}
        self.sizes: list[int] = []
        # What happens when a batch is planned and none of its tasks has run.
        self.before: Callback = lambda number: None

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.before(number)
        rows = frame.collect()
        self.batches[number] = rows
        self.sizes.append(len(rows))

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    @property
    def records(self) -> list[tuple[str, int]]:
        return sorted((row.topic, row.seq) for row in self.rows if row.kind == "record")

    @property
    def seqs(self) -> list[int]:
        return sorted(row.seq for row in self.rows if row.kind == "record")

    @property
    def losses(self) -> list[tuple[int, int, str]]:
        return sorted((row.gap_from, row.gap_to, row.reason) for row in self.rows if row.kind == "tombstone")

    @property
    def accounted(self) -> list[int]:
        """Every seq that is a row or told as lost, as often as it is."""
        spans = [range(row.gap_from if row.kind == "tombstone" else row.seq, row.seq + 1) for row in self.rows]
        return sorted(seq for span in spans for seq in span)


def stream(
    spark: SparkSession, server: LocalServer, checkpoint: Path, taken: Taken, **options: Any
) -> DataStreamWriter:
    rows = spark.readStream.format("topics").options(url=server.url, **options).load()
    return rows.writeStream.foreachBatch(taken).option("checkpointLocation", str(checkpoint))


def drain(spark: SparkSession, server: LocalServer, checkpoint: Path, taken: Taken, **options: Any) -> StreamingQuery:
    """Reads all that is there now, and ends."""
    return ended(stream(spark, server, checkpoint, taken, **options).trigger(availableNow=True).start())


def ended(query: StreamingQuery) -> StreamingQuery:
    try:
        assert query.awaitTermination(int(3 * DEADLINE)), "the query does not end"
    finally:
        query.stop()
    return query


def configure(client: httpx.Client, topic: str, **config: Any) -> None:
    answer = client.put(f"/v0/topics/{topic}", json=config)
    assert answer.status_code in (200, 201), answer.text


def describe(client: httpx.Client, topic: str) -> dict[str, Any]:
    answer = client.get(f"/v0/topics/{topic}")
    assert answer.status_code == 200, answer.text
    described: dict[str, Any] = answer.json()
    return described


def recreate(client: httpx.Client, topic: str, *datas: object) -> None:
    assert client.delete(f"/v0/topics/{topic}").json()["deleted"] is True
    write(client, topic, *datas)


def forget(checkpoint: Path, folder: str, number: int) -> None:
    """Takes the checkpoint back to before one of its files was written."""
    (checkpoint / folder / str(number)).unlink()
    (checkpoint / folder / f".{number}.crc").unlink(missing_ok=True)


def planned(checkpoint: Path, number: int) -> dict[str, Any]:
    """The offsets at which a batch ends, as the checkpoint has them."""
    offsets: dict[str, Any] = json.loads((checkpoint / "offsets" / str(number)).read_text().splitlines()[2])
    return offsets


class Halt(Exception):
    """A destination that is down."""


def halt(number: int) -> None:
    raise Halt


# Going on where it was.


def test_a_stream_reads_what_is_there_and_a_restart_only_what_is_new(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, 1, 2, 3)
    drain(spark, server, tmp_path, taken, topic=topic)
    assert taken.seqs == [1, 2, 3]
    write(client, topic, 4, 5)
    drain(spark, server, tmp_path, taken, topic=topic)
    assert [row.seq for row in taken.batches[1]] == [4, 5]
    drain(spark, server, tmp_path, taken, topic=topic)
    assert taken.sizes == [3, 2]


def test_the_checkpoint_has_canonical_offsets_with_epoch_and_resolved_start(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    names = [f"{topic}.{letter}" for letter in "bca"]
    for name in names:
        write(client, name, 1, 2)
    options = {"topics": ",".join(names), "startingSeq": f'{{"{names[0]}": 2, "{names[1]}": "latest"}}'}
    drain(spark, server, tmp_path, Taken(), **options)
    offsets = planned(tmp_path, 0)
    assert list(offsets) == sorted(names)
    starts = {name: cursor["start"] for name, cursor in offsets.items()}
    assert starts == {names[0]: 1, names[1]: 2, names[2]: 0}
    epochs = {name: describe(client, name)["epoch"] for name in names}
    assert {name: (cursor["epoch"], cursor["seq"]) for name, cursor in offsets.items()} == {
        name: (epochs[name], 2) for name in names
    }


def test_a_stream_that_begins_at_the_latest_reads_only_what_comes(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, 1, 2)
    drain(spark, server, tmp_path, taken, topic=topic, startingSeq="latest")
    write(client, topic, 3)
    drain(spark, server, tmp_path, taken, topic=topic, startingSeq="latest")
    assert taken.seqs == [3]


def test_a_running_stream_reads_what_comes(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, 1)
    query = stream(spark, server, tmp_path, taken, topic=topic, node="me").start()
    try:
        query.processAllAvailable()
        write(client, topic, 2, 3)
        write(client, topic, "mine", node="me")
        query.processAllAvailable()
        write(client, topic, 5)
        query.processAllAvailable()
        assert taken.seqs == [1, 2, 3, 5]
    finally:
        query.stop()


def test_a_batch_is_split_over_many_tasks(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    parts: list[int] = []

    def count(frame: DataFrame, number: int) -> None:
        parts.append(frame.rdd.getNumPartitions())

    write(client, topic, *range(10))
    rows = spark.readStream.format("topics").options(url=server.url, topic=topic, recordsPerPartition="3").load()
    ended(rows.writeStream.foreachBatch(count).trigger(availableNow=True).start())
    assert parts == [4]


def test_tag_selectors_meta_maps_and_own_schemas_work_in_a_stream(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    configure(client, topic, cap_records=2)
    records = [{"data": tag, "tag": tag, "meta": {"tag": tag}} for tag in ("x", "x", "y")]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    taken = Taken()
    rows = (
        spark.readStream.format("topics")
        .schema("kind string, seq bigint, meta map<string,string>")
        .options(url=server.url, topic=topic, meta="map", tagMatch="x")
        .load()
    )
    ended(rows.writeStream.foreachBatch(taken).trigger(availableNow=True).start())
    assert [tuple(row) for row in taken.rows] == [("tombstone", 1, None), ("record", 2, {"tag": "x"})]


# How much at a time.


def test_a_trigger_takes_at_most_what_it_may_and_all_batches_together_everything(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    names = [f"{topic}.{letter}" for letter in "abc"]
    for name, count in zip(names, (11, 2, 6), strict=True):
        write(client, name, *range(count))
    taken = Taken()
    drain(spark, server, tmp_path, taken, topics=",".join(names), maxRecordsPerTrigger="7")
    assert taken.sizes == [7, 7, 5]
    expected = [(name, seq) for name, count in zip(names, (11, 2, 6), strict=True) for seq in range(1, count + 1)]
    assert taken.records == expected


def test_available_now_takes_exactly_what_was_there_at_its_start(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, f"{topic}.a", *range(5))
    taken = Taken()

    def more(number: int) -> None:
        write(client, f"{topic}.a", "later")
        write(client, f"{topic}.new-{number}", "later")

    taken.before = more
    drain(spark, server, tmp_path, taken, topicPrefix=topic, maxRecordsPerTrigger="2")
    assert taken.records == [(f"{topic}.a", seq) for seq in range(1, 6)]
    assert taken.sizes == [2, 2, 1]
    taken.before = lambda number: None
    drain(spark, server, tmp_path, taken, topicPrefix=topic, maxRecordsPerTrigger="100")
    assert taken.records == [
        *((f"{topic}.a", seq) for seq in range(1, 9)),
        *((f"{topic}.new-{number}", 1) for number in range(3)),
    ]


def test_what_is_gone_already_is_told_at_once_and_counts_for_no_trigger(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, topic, *range(1000), config={"cap_records": 4})
    taken = Taken()
    drain(spark, server, tmp_path, taken, topic=topic, maxRecordsPerTrigger="2")
    assert taken.losses == [(1, 996, "cap")]
    assert taken.sizes == [3, 2]


# Topics that come and go.


def test_a_topic_that_appears_under_a_prefix_joins_from_its_first_record_even_behind_latest(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, f"{topic}.a", 1, 2)
    query = stream(spark, server, tmp_path, taken, topicPrefix=topic, startingSeq="latest").start()
    try:
        query.processAllAvailable()
        write(client, f"{topic}.b", 1, 2, 3, config={"cap_records": 2})
        write(client, f"{topic}.a", 3)
        query.processAllAvailable()
    finally:
        query.stop()
    assert taken.records == [(f"{topic}.a", 3), (f"{topic}.b", 2), (f"{topic}.b", 3)]
    assert taken.losses == [(1, 1, "cap")]


def test_a_topic_that_is_deleted_does_not_stop_the_others(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    names = [f"{topic}.a", f"{topic}.b"]
    for name in names:
        write(client, name, 1)
    taken = Taken()
    query = stream(spark, server, tmp_path, taken, topics=",".join(names)).start()
    try:
        query.processAllAvailable()
        client.delete(f"/v0/topics/{names[0]}")
        write(client, names[1], 2)
        query.processAllAvailable()
    finally:
        query.stop()
    assert taken.records == [(names[0], 1), (names[1], 1), (names[1], 2)]
    assert taken.losses == []


def test_a_topic_deleted_behind_the_plan_of_a_batch_is_told(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, topic, 1, 2, 3)
    taken = Taken()

    def delete(number: int) -> None:
        client.delete(f"/v0/topics/{topic}")

    taken.before = delete
    drain(spark, server, tmp_path, taken, topic=topic)
    assert (taken.seqs, taken.losses) == ([], [(1, 3, "deleted")])


def test_a_recreated_topic_is_told_and_read_from_its_first_record(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, 1, 2, 3)
    drain(spark, server, tmp_path, taken, topic=topic)
    old = describe(client, topic)["epoch"]
    # As many as before: by seq alone nobody would notice.
    recreate(client, topic, "a", "b", "c")
    drain(spark, server, tmp_path, taken, topic=topic)
    told, *records = taken.batches[1]
    assert (told.kind, told.reason) == ("tombstone", "recreated")
    assert [(row.seq, row.data) for row in records] == [(1, '"a"'), (2, '"b"'), (3, '"c"')]
    assert {row.epoch for row in taken.batches[1]} == {describe(client, topic)["epoch"]}
    assert old not in {row.epoch for row in taken.batches[1]}
    drain(spark, server, tmp_path, taken, topic=topic)
    assert len(taken.sizes) == 2, "told twice"


# Restarts, at every stage of a batch.


def test_a_batch_that_was_planned_and_not_done_is_done_after_the_restart_and_is_the_same(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, *range(3))
    taken.before = halt
    with pytest.raises(StreamingQueryException, match="Halt"):
        drain(spark, server, tmp_path, taken, topic=topic)
    write(client, topic, *range(2))
    taken.before = lambda number: None
    drain(spark, server, tmp_path, taken, topic=topic)
    assert {number: [row.seq for row in rows] for number, rows in taken.batches.items()} == {0: [1, 2, 3], 1: [4, 5]}


@pytest.mark.parametrize("last", [0, 2])
def test_a_batch_that_was_done_and_not_committed_is_repeated_the_same(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path, last: int
) -> None:
    taken = Taken()
    write(client, topic, *range(2 * last + 2))
    drain(spark, server, tmp_path, taken, topic=topic, maxRecordsPerTrigger="2")
    before = dict(taken.batches)
    forget(tmp_path, "commits", last)
    write(client, topic, "later")
    drain(spark, server, tmp_path, taken, topic=topic, maxRecordsPerTrigger="2")
    assert {number: taken.batches[number] for number in before} == before
    assert taken.sizes == [2] * (last + 1) + [2, 1]


def test_a_batch_that_was_not_even_planned_is_planned_anew(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, *range(4))
    drain(spark, server, tmp_path, taken, topic=topic, maxRecordsPerTrigger="2")
    forget(tmp_path, "commits", 1)
    forget(tmp_path, "offsets", 1)
    write(client, topic, "later")
    drain(spark, server, tmp_path, taken, topic=topic)
    assert [row.seq for row in taken.batches[1]] == [3, 4, 5]
    assert taken.seqs == [1, 2, 3, 4, 5]


def test_what_is_evicted_before_the_first_batch_is_done_is_told_after_the_restart(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, *range(5))
    taken.before = halt
    with pytest.raises(StreamingQueryException, match="Halt"):
        drain(spark, server, tmp_path, taken, topic=topic)
    configure(client, topic, cap_records=3)
    write(client, topic, "later")
    taken.before = lambda number: None
    drain(spark, server, tmp_path, taken, topic=topic)
    assert taken.losses == [(1, 3, "cap")]
    assert taken.accounted == [1, 2, 3, 4, 5, 6]


def test_a_start_at_the_latest_stays_where_it_was_resolved(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    """The first batch is planned again after a restart that came before its commit: `latest` is another seq by then."""
    names = [f"{topic}.a", f"{topic}.b"]
    for name in names:
        write(client, name, 1, 2)
    options = {"topics": ",".join(names), "startingSeq": f'{{"{names[0]}": "latest"}}'}
    taken = Taken()
    taken.before = halt
    with pytest.raises(StreamingQueryException, match="Halt"):
        drain(spark, server, tmp_path, taken, **options)
    for name in names:
        write(client, name, 3)
    taken.before = lambda number: None
    drain(spark, server, tmp_path, taken, **options)
    assert taken.records == [(names[0], 3), *((names[1], seq) for seq in (1, 2, 3))]


def test_a_topic_recreated_before_a_planned_batch_is_done_loses_the_old_and_then_reads_the_new(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    taken = Taken()
    write(client, topic, 1, 2, 3)
    taken.before = halt
    with pytest.raises(StreamingQueryException, match="Halt"):
        drain(spark, server, tmp_path, taken, topic=topic)
    recreate(client, topic, "a", "b")
    taken.before = lambda number: None
    drain(spark, server, tmp_path, taken, topic=topic)
    assert [(row.kind, row.gap_from, row.gap_to, row.reason) for row in taken.batches[0]] == [
        ("tombstone", 1, 3, "recreated")
    ]
    assert [row.data for row in taken.batches[1] if row.kind == "record"] == ['"a"', '"b"']


# Loss.


def test_what_is_evicted_behind_the_plan_of_a_batch_is_told_in_it(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, topic, *range(6))
    taken = Taken()
    taken.before = lambda number: configure(client, topic, cap_records=2)
    drain(spark, server, tmp_path, taken, topic=topic)
    assert (taken.losses, taken.seqs) == ([(1, 4, "cap")], [5, 6])


def test_under_a_fast_writer_rows_and_tombstones_account_for_every_seq_once(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    configure(client, topic, cap_records=50)
    write(client, topic, 0)
    taken = Taken()
    query = stream(
        spark, server, tmp_path, taken, topic=topic, maxRecordsPerTrigger="37", recordsPerPartition="10"
    ).start()

    def write_on() -> None:
        with server.client() as own:
            while len(taken.sizes) < 6:
                hole = {"hole": 3, "reason": "source_trim"}
                own.post(f"/v0/topics/{topic}", json={"records": [*[{"data": 0}] * 7, hole]})

    try:
        Background(write_on).result()
        query.processAllAvailable()
    finally:
        query.stop()
    head = describe(client, topic)["head_seq"]
    assert taken.accounted == list(range(1, head + 1))
    assert "cap" in {reason for _, _, reason in taken.losses}
    assert taken.seqs


def test_a_loss_stops_a_stream_that_asked_for_it_and_it_stops_again_after_a_restart(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    write(client, topic, *range(5), config={"cap_records": 2})
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=rf"topic '{topic}' has lost seqs 1 to 3 \(cap\)"):
            drain(spark, server, tmp_path, Taken(), topic=topic, onLoss="fail")
    taken = Taken()
    drain(spark, server, tmp_path, taken, topic=topic, onLoss="ignore")
    assert (taken.losses, taken.seqs) == ([], [4, 5])


# Driven by hand, as Spark does it: the cases that would each cost a query or three.


class Driven:
    """A stream's reader in this process; keeps what Spark's checkpoint would: the ends of batches."""

    def __init__(self, server: LocalServer, **options: str) -> None:
        self._source = TopicsDataSource({"url": server.url, **options})
        self._reader = self._source.streamReader(SCHEMA)
        self.offset: dict[str, Any] = self._reader.initialOffset()

    def next(self) -> list[dict[str, Any]]:
        """Plans a batch and reads it."""
        start, end = self.plan()
        return self.read(start, end)

    def plan(self) -> tuple[dict[str, Any], dict[str, Any]]:
        start = self.offset
        self.offset = json.loads(json.dumps(self._reader.latestOffset(start, self._reader.getDefaultReadLimit())))
        return start, self.offset

    def read(self, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
        """Each range on a reader of its own, as it came to a task."""
        parts = [pickle.loads(pickle.dumps(part)) for part in self._reader.partitions(start, end)]
        reader = pickle.loads(pickle.dumps(self._reader))
        return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]

    def newest(self) -> str:
        return json.dumps(self._reader.reportLatestOffset())

    def restart(self) -> None:
        self._reader.stop()
        self._reader = self._source.streamReader(SCHEMA)


def told(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Of a record its seq; of a loss its range and why."""
    return [
        (row["seq"],) if row["kind"] == "record" else (row["gap_from"], row["gap_to"], row["reason"]) for row in rows
    ]


def test_a_stream_that_begins_at_the_latest_of_an_empty_topic_reads_its_first_record(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    configure(client, topic, seq_base=5)
    driven = Driven(server, topic=topic, startingSeq="latest")
    assert driven.next() == []
    write(client, topic, "first")
    assert told(driven.next()) == [(5,)]


def test_a_stream_may_begin_at_a_seq_that_is_still_to_come(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1, 2)
    driven = Driven(server, topic=topic, startingSeq="4")
    assert driven.next() == []
    write(client, topic, 3, 4, 5)
    assert told(driven.next()) == [(4,), (5,)]


def test_a_stream_begins_at_a_time(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    ts = describe(client, topic)["last_write_ts"]
    assert told(Driven(server, topic=topic, startingTs=str(ts)).next()) == [(1,), (2,)]
    driven = Driven(server, topic=topic, startingTs=str(ts + 3_600_000))
    assert driven.next() == []
    write(client, topic, 3)
    assert told(driven.next()) == [(3,)]


def test_a_prefix_that_had_no_topic_at_first_reads_the_first_one_whole(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    driven = Driven(server, topicPrefix=topic, startingSeq="latest")
    assert driven.next() == []
    start, end = driven.plan()
    assert start == end, "a stream over nothing must not spin"
    write(client, f"{topic}.a", 1, 2)
    assert told(driven.next()) == [(1,), (2,)]


def test_where_nothing_is_new_the_offsets_are_the_same_text(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    for letter in "bac":
        write(client, f"{topic}.{letter}", 1)
    driven = Driven(server, topicPrefix=topic)
    driven.next()
    before = json.dumps(driven.offset)
    driven.restart()
    assert json.dumps(driven.plan()[1]) == before


def test_a_recreated_topic_tells_what_it_has_lost_since(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    driven = Driven(server, topic=topic, maxRecordsPerTrigger="1")
    assert told(driven.next()) == [(1,)]
    recreate(client, topic, *range(5))
    configure(client, topic, cap_records=2)
    assert told(driven.next()) == [(1, 3, "recreated"), (4,)]
    assert told(driven.next()) == [(5,)]


def test_a_recreated_topic_that_is_empty_is_told_once(server: LocalServer, client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    driven = Driven(server, topic=topic)
    driven.next()
    client.delete(f"/v0/topics/{topic}")
    configure(client, topic, seq_base=7)
    assert told(driven.next()) == [(7, 6, "recreated")]
    write(client, topic, "new")
    assert told(driven.next()) == [(7,)]


def test_a_recreated_topic_stops_a_stream_that_fails_on_loss(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1)
    driven = Driven(server, topic=topic, onLoss="fail")
    driven.next()
    recreate(client, topic, 1)
    with pytest.raises(Loss, match=f"topic '{topic}' was deleted and created again"):
        driven.next()


def test_a_deleted_topic_whose_name_comes_back_later_is_recreated(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1, 2)
    driven = Driven(server, topic=topic)
    driven.next()
    client.delete(f"/v0/topics/{topic}")
    start, end = driven.plan()
    assert start == end
    write(client, topic, "again")
    assert told(driven.next()) == [(1, 0, "recreated"), (1,)]


def test_a_topic_deleted_with_records_that_were_not_read_yet_tells_them_once(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(10))
    driven = Driven(server, topic=topic, maxRecordsPerTrigger="3")
    assert told(driven.next()) == [(1,), (2,), (3,)]
    client.delete(f"/v0/topics/{topic}")
    assert told(driven.next()) == [(4, 10, "deleted")]
    start, end = driven.plan()
    assert start == end


def test_a_planned_batch_tells_what_was_lost_however_often_it_is_read_again(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, *range(6))
    driven = Driven(server, topic=topic, recordsPerPartition="2")
    start, end = driven.plan()
    assert told(driven.read(start, end)) == [(seq,) for seq in range(1, 7)]
    configure(client, topic, cap_records=3)
    driven.restart()
    assert told(driven.read(start, end)) == [(1, 3, "cap"), (4,), (5,), (6,)]
    configure(client, topic, cap_records=1)
    write(client, topic, "more")
    driven.restart()
    assert told(driven.read(start, end)) == [(1, 6, "cap")]
    assert told(driven.next()) == [(7,)]


def test_a_hole_is_told_once_wherever_triggers_and_tasks_divide_it(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    hole = {"hole": 7, "reason": "source_trim"}
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1}, hole, {"data": 9}]})
    driven = Driven(server, topic=topic, maxRecordsPerTrigger="4", recordsPerPartition="3")
    lost: list[int] = []
    records: list[int] = []
    for _ in range(3):
        for item in told(driven.next()):
            if len(item) == 1:
                records.append(item[0])
            else:
                lost.extend(range(item[0], item[1] + 1))
                assert item[2] == "source_trim"
    assert (records, lost) == ([1, 9], list(range(2, 9)))


def test_deleted_records_are_silent_wherever_they_lie(server: LocalServer, client: httpx.Client, topic: str) -> None:
    records = [{"data": seq, "tag": "x" if seq in (1, 2, 4, 6) else "y"} for seq in range(1, 7)]
    client.post(f"/v0/topics/{topic}", json={"records": records})
    client.post(f"/v0/topics/{topic}/delete", json={"match": "x"})
    driven = Driven(server, topic=topic, recordsPerPartition="1")
    assert told(driven.next()) == [(3,), (5,)]


def test_the_lag_of_a_topic_that_was_not_begun_counts_only_seqs_that_it_has_had(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, f"{topic}.a", 1, config={"seq_base": 1000})
    driven = Driven(server, topicPrefix=topic)
    driven.next()
    write(client, f"{topic}.b", 1, 2, config={"seq_base": 5000})
    assert lag_of(json.dumps(driven.offset), driven.newest()) == {f"{topic}.a": 0, f"{topic}.b": 2}


def test_a_recreated_topic_that_is_gone_again_tells_no_seq_that_it_never_had(
    server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 1)
    driven = Driven(server, topic=topic)
    driven.next()
    client.delete(f"/v0/topics/{topic}")
    write(client, topic, 1, 2, config={"seq_base": 2000})
    start, end = driven.plan()
    client.delete(f"/v0/topics/{topic}")
    assert told(driven.read(start, end)) == [(2000, 1999, "recreated"), (2000, 2001, "deleted")]


# Errors, and what is shown.


def test_a_missing_topic_stops_the_stream_and_is_named(
    spark: SparkSession, server: LocalServer, topic: str, tmp_path: Path
) -> None:
    with pytest.raises(StreamingQueryException, match=f"there is no topic '{topic}' at {server.url}"):
        drain(spark, server, tmp_path, Taken(), topic=topic)


def test_a_server_that_is_away_stops_the_stream_and_is_named(spark: SparkSession, tmp_path: Path, topic: str) -> None:
    with local_server(tmp_path / "data") as gone:
        pass
    with pytest.raises(StreamingQueryException, match=f"cannot reach {gone.url}"):
        drain(spark, gone, tmp_path / "checkpoint", Taken(), topic=topic, retryMs="50")


def test_a_refused_key_stops_the_stream(spark: SparkSession, tmp_path: Path, topic: str) -> None:
    with (
        local_server(tmp_path / "data", api_keys="good:read:other") as guarded,
        pytest.raises(StreamingQueryException, match="Forbidden"),
    ):
        drain(spark, guarded, tmp_path / "checkpoint", Taken(), topic=topic, key="good")


def test_a_wrong_option_of_a_stream_with_its_own_schema_is_named(
    spark: SparkSession, server: LocalServer, topic: str, tmp_path: Path
) -> None:
    rows = (
        spark.readStream.format("topics")
        .schema("seq bigint")
        .options(url=server.url, topic=topic, maxRecordsPerTrigger="0")
        .load()
    )
    with pytest.raises(StreamingQueryException, match="maxRecordsPerTrigger must be a whole number of 1 or more"):
        ended(rows.writeStream.foreachBatch(Taken()).trigger(availableNow=True).start())


def test_the_newest_offsets_show_in_the_progress_and_the_listener_makes_them_lag(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, tmp_path: Path
) -> None:
    lags: list[tuple[str, dict[str, int]]] = []
    listener = LagListener(lambda query, lag: lags.append((query, lag)))
    write(client, topic, *range(5))
    spark.streams.addListener(listener)
    try:
        query = ended(
            stream(spark, server, tmp_path, Taken(), topic=topic, maxRecordsPerTrigger="2")
            .queryName("lagging")
            .trigger(availableNow=True)
            .start()
        )
        progress = query.recentProgress
        assert [json.loads(each["sources"][0]["latestOffset"])[topic]["seq"] for each in progress[:3]] == [5, 5, 5]
        eventually(lambda: ("lagging", {topic: 0}) in lags, "the lag of the last batch")
    finally:
        spark.streams.removeListener(listener)
    assert lags[:3] == [("lagging", {topic: lag}) for lag in (3, 1, 0)]
