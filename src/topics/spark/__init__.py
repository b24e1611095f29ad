"""Spark reads and writes topics: `spark.read.format("topics")`, `readStream`, `write`, `writeStream`.

Needs the extra `topics[spark]`. Executors talk to the server over HTTP; nothing is shared but its URL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from topics.spark.shape import as_variant, parsed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["as_variant", "parsed", "register"]


def register(spark: SparkSession) -> None:
    """Makes `format("topics")` known to a session that does not find it by itself."""
    from topics.spark.source import TopicsDataSource

    spark.dataSource.register(TopicsDataSource)
