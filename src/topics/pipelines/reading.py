"""Reading a lake: which files it is made of, what the ledger says, and all of it as a DataFrame.

A lake is what its manifest names: never list its folders, a file that is on its way in or out lies there too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from topics.core.errors import InvalidRequest
from topics.pipelines.lake import Lake, LakeFile, folder
from topics.pipelines.manifest import Manifest, NotALake
from topics.pipelines.spans import What
from topics.pipelines.staging import COLUMNS, SCHEMA
from topics.pipelines.stores import Store, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ArchivedFile(msgspec.Struct, frozen=True):
    """A file of the lake; `path` is whole, as Spark, pyarrow and DuckDB take it."""

    path: str
    topic: str
    epoch: int
    day: str
    first: int
    last: int
    rows: int
    bytes: int


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of some seqs of an instance."""

    topic: str
    epoch: int
    first: int
    last: int
    what: What
    reason: str = ""


def files(
    root: str, *, topic: str | None = None, epoch: int | None = None, spark: SparkSession | None = None
) -> list[ArchivedFile]:
    """The files that the newest version of a lake is made of, in the order of topic, epoch and seq."""
    store = open_store(root, spark)
    return [
        ArchivedFile(f"{store.uri}/{file.path}", name, number, file.day, file.first, file.last, file.rows, file.bytes)
        for name, number, part in opened(store)
        if topic in (None, name) and epoch in (None, number)
        for file in part.in_order()
    ]


def ledger(
    root: str, *, topic: str | None = None, epoch: int | None = None, spark: SparkSession | None = None
) -> list[Account]:
    """What the newest version of a lake says about each seq. What is above the last range is not there yet."""
    return [
        Account(name, number, span.first, span.last, span.what, span.reason)
        for name, number, part in opened(open_store(root, spark))
        if topic in (None, name) and epoch in (None, number)
        for span in part.spans
    ]


def opened(store: Store) -> Lake:
    lake = Manifest(store).lake()
    if not lake.version:
        raise NotALake(f"{store.uri} has no manifest: `tier` makes one")
    return lake


def archived(spark: SparkSession, root: str, *, topics: Iterable[str] = (), epoch: int | None = None) -> DataFrame:
    """Every record of the lake, one version of it: `topic, epoch, day` and the columns of the files."""
    store = open_store(root, spark)
    lake = opened(store)
    wanted = set(topics)
    unknown = wanted - set(lake.parts)
    if unknown:
        raise InvalidRequest(f"{store.uri} has no topic {sorted(unknown)[0]!r}")
    chosen = [
        (name, number, file)
        for name, number, part in lake
        if (not wanted or name in wanted) and epoch in (None, number)
        for file in part.in_order()
    ]
    return frame(spark, store, chosen)


def frame(spark: SparkSession, store: Store, chosen: list[tuple[str, int, LakeFile]]) -> DataFrame:
    """Exactly these files, with what their paths say as columns."""
    from pyspark.sql import functions as f

    reader = spark.read.schema(f"{SCHEMA}, topic STRING, epoch BIGINT, day DATE").option("basePath", store.uri)
    if not chosen:
        return spark.createDataFrame([], f"topic STRING, epoch BIGINT, day DATE, {SCHEMA}")
    rows = reader.parquet(*[f"{store.uri}/{file.path}" for _, _, file in chosen])
    # A name that was too long for a path is known by its folder.
    names = {name for name, _, _ in chosen}
    cut = {name: unquote(folder(name, 0, "").split("/")[0].removeprefix("topic=")) for name in names}
    topic = f.col("topic")
    for name, short in cut.items():
        if "~" in short:
            topic = f.when(f.col("topic") == short, f.lit(name)).otherwise(topic)
    return rows.select(topic.alias("topic"), "epoch", "day", *COLUMNS)
