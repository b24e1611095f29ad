"""`topics.spark.parsed` and `as_variant`: `data` in another shape than text."""

from __future__ import annotations

import httpx
import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # has no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.http.server import LocalServer, write, write_raw
from topics.spark import as_variant, parsed

# What fails inside the JVM's own code comes as either.
FAILED = (PySparkException, Py4JJavaError)


def load(spark: SparkSession, server: LocalServer, topic: str) -> DataFrame:
    return spark.read.format("topics").options(url=server.url, topic=topic).load()


def test_data_is_parsed_with_a_schema_and_a_tombstone_stays_null(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 0, {"id": 1, "name": "é", "more": []}, {"id": 2}, config={"cap_records": 2})
    rows = parsed(load(spark, server, topic), "id INT, name STRING")
    assert rows.schema["data"].dataType.simpleString() == "struct<id:int,name:string>"
    assert [field.name for field in rows.schema] == [field.name for field in load(spark, server, topic).schema]
    assert [row.data and tuple(row.data) for row in rows.orderBy("seq").collect()] == [None, (1, "é"), (2, None)]


def test_what_does_not_fit_is_null_and_no_row_is_lost(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, {"id": "text"}, [1], "text", 7, None)
    rows = parsed(load(spark, server, topic), "id INT").selectExpr("seq", "data.id").orderBy("seq").collect()
    assert [tuple(row) for row in rows] == [(seq, None) for seq in range(1, 6)]


def test_what_does_not_fit_fails_a_query_that_asked_for_it(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, {"id": "text"})
    with pytest.raises(FAILED, match="MALFORMED_RECORD_IN_PARSING"):
        parsed(load(spark, server, topic), "id INT", mode="FAILFAST").collect()


def test_data_is_a_variant_and_a_tombstone_stays_null(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    write(client, topic, 0, {"id": 1, "deep": [{"x": "y"}]}, [2.5], None, config={"cap_records": 3})
    rows = as_variant(load(spark, server, topic))
    assert rows.schema["data"].dataType.simpleString() == "variant"
    picked = rows.selectExpr(
        "variant_get(data, '$.deep[0].x', 'string') AS x", "variant_get(data, '$[0]', 'double') AS y", "data IS NULL"
    )
    found = [tuple(row) for row in picked.orderBy(rows.seq).collect()]
    assert found == [(None, None, True), ("y", None, False), (None, 2.5, False), (None, None, False)]


def test_a_variant_has_no_place_for_a_key_that_appears_twice(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    assert write_raw(client, topic, b'{"a":1,"a":2}').status_code == 201
    with pytest.raises(FAILED, match="VARIANT_DUPLICATE_KEY"):
        as_variant(load(spark, server, topic)).collect()


def test_another_column_may_be_shaped(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str
) -> None:
    client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "meta": {"k": "v"}}]})
    [row] = parsed(load(spark, server, topic), "k STRING", column="meta").collect()
    assert (row.meta.k, row.data) == ("v", "1")
