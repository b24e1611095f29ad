"""`replay`: the past once more, from the lake and the log, without a gap and without a row twice."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.http.server import LocalServer
from tests.pipelines.calm import replay_into, tier
from tests.pipelines.logs import append, datas, delete, put, state
from topics.core.errors import InvalidRequest
from topics.pipelines import replay


def entries(rows: DataFrame) -> list[tuple[int, int, str]]:
    """(first, last, kind) of what a DataFrame tells, in order."""
    found = rows.selectExpr("coalesce(gap_from, seq) AS first", "seq AS last", "kind").orderBy("first").collect()
    return [(row["first"], row["last"], row["kind"]) for row in found]


def records(first: int, last: int) -> list[tuple[int, int, str]]:
    return [(seq, seq, "record") for seq in range(first, last + 1)]


@pytest.fixture(scope="module")
def past(spark: SparkSession, server: LocalServer, client: httpx.Client, tmp_path_factory: Any) -> tuple[str, str]:
    """A topic whose 1 to 10 are lost, 11 to 40 are in the lake and trimmed, 41 to 60 in the log; 20 is deleted."""
    root = str(tmp_path_factory.mktemp("past") / "lake")
    append(client, "past", 40, tags=20)
    put(client, "past", cap_records=30)
    delete(client, "past", match="t0")
    tier(spark, server.url, root, topics=["past"], trim=True)
    put(client, "past", cap_records=0)
    assert state(client, "past")["count"] == 0
    append(client, "past", 20)
    return "past", root


WHOLE = [(1, 10, "tombstone"), *[each for each in records(11, 60) if each[0] not in (20, 40)]]


def test_lake_and_log_are_one_sequence_with_the_losses_in_their_places(
    spark: SparkSession, server: LocalServer, past: tuple[str, str]
) -> None:
    topic, root = past
    assert entries(replay(spark, topic, root=root, url=server.url)) == WHOLE
    assert entries(replay(spark, topic, root=root, source="lake")) == [each for each in WHOLE if each[1] <= 39]
    assert entries(replay(spark, topic, url=server.url, source="log")) == [(1, 40, "tombstone"), *records(41, 60)]
    assert entries(replay(spark, topic, root=root, url=server.url, first=5, last=45)) == [
        (5, 10, "tombstone"),
        *[each for each in WHOLE if 11 <= each[0] <= 45],
    ]


def test_a_replay_by_time_begins_and_ends_at_the_records_of_that_time(
    spark: SparkSession, server: LocalServer, past: tuple[str, str]
) -> None:
    topic, root = past
    rows = replay(spark, topic, root=root, url=server.url).where("kind = 'record'")
    times = {row["seq"]: row["t"] for row in rows.selectExpr("seq", "unix_millis(ts) AS t").collect()}
    middle = times[41]
    assert times[39] < middle
    since = entries(replay(spark, topic, root=root, url=server.url, since=middle))
    assert since == records(41, 60)
    until = entries(replay(spark, topic, root=root, url=server.url, until=middle))
    assert until == [each for each in WHOLE if each[1] <= 39]
    assert entries(replay(spark, topic, root=root, url=server.url, since=times[60] + 1)) == []
    # From the time of the first record on: a loss right in front of it may be as new, and is told.
    assert entries(replay(spark, topic, root=root, url=server.url, since=times[11])) == WHOLE


def test_a_replay_into_a_topic_has_each_record_and_each_loss_once_in_order(
    spark: SparkSession, server: LocalServer, client: httpx.Client, past: tuple[str, str]
) -> None:
    topic, root = past
    progress = replay_into(spark, topic, "copy", url=server.url, root=root, chunk=20)
    expected = [("hole", 10), *[{"n": seq} for seq in range(11, 61) if seq not in (20, 40)]]
    assert datas(client, "copy") == expected
    assert (progress.records, progress.lost, progress.lag) == (48, 10, 0)
    # The same again: it is done, and stays so.
    append(client, topic, 0)
    assert replay_into(spark, topic, "copy", url=server.url, root=root, chunk=20).records == 0
    assert datas(client, "copy") == expected


def test_a_replay_whose_note_of_progress_is_lost_writes_nothing_twice(
    spark: SparkSession, server: LocalServer, client: httpx.Client, past: tuple[str, str], tmp_path: Any
) -> None:
    topic, root = past
    where = tmp_path / "state"
    replay_into(spark, topic, "copy-2", url=server.url, root=root, chunk=30, state=str(where))
    before = datas(client, "copy-2")
    (where / "past-to-copy-2" / "next").unlink()
    replay_into(spark, topic, "copy-2", url=server.url, root=root, chunk=30, state=str(where))
    assert datas(client, "copy-2") == before


def test_what_cannot_be_replayed_is_refused_by_name(
    spark: SparkSession, server: LocalServer, past: tuple[str, str]
) -> None:
    topic, root = past
    with pytest.raises(InvalidRequest, match="into itself"):
        replay_into(spark, topic, topic, url=server.url, root=root)
    with pytest.raises(InvalidRequest, match="needs the root of a lake"):
        replay(spark, topic, url=server.url)
    with pytest.raises(InvalidRequest, match="needs the url of a server"):
        replay(spark, topic, root=root)
    with pytest.raises(InvalidRequest, match="has no topic 'other'"):
        replay(spark, "other", root=root, source="lake")
    replay_into(spark, topic, "one", url=server.url, root=root, last=12, name="name")
    with pytest.raises(InvalidRequest, match="use another name"):
        replay_into(spark, topic, "two", url=server.url, root=root, name="name")
