"""A stream from a topic into a table, and from there, with SQL beside it, into another topic."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

URL = os.environ.get("TOPICS_URL", "http://127.0.0.1:4000")
spark = SparkSession.active()


@dp.table
def orders() -> DataFrame:
    """Every order, and every loss of one: `kind` tells them apart."""
    rows = spark.readStream.format("topics").option("url", URL).option("topic", "orders").load()
    value = f.from_json("data", "id BIGINT, country STRING, amount DOUBLE").alias("value")
    return rows.select("seq", "ts", "kind", "gap_from", "gap_to", value)


dp.create_sink("large_orders", "topics", {"url": URL, "topic": "orders.large"})


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """Large orders, as records of a topic; a loss goes on as a hole."""
    rows = spark.readStream.table("orders").where("kind = 'tombstone' OR value.amount >= 50")
    return rows.select("kind", "gap_from", "gap_to", f.to_json("value").alias("data"))
