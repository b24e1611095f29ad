"""Parquet files on their way into a lake: Spark writes them aside, they are looked at, moved to their place, and only
then named in the manifest. What a crash leaves behind nobody reads; `compact` with `vacuum` removes it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from topics.pipelines.lake import LakeFile, file_name, folder
from topics.pipelines.spans import Seqs, union
from topics.pipelines.stores import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "_staging"
COLUMNS = ("seq", "ts", "node", "tag", "meta", "data")
SCHEMA = "seq BIGINT, ts TIMESTAMP, node STRING, tag STRING, meta STRING, data STRING"
_DAY_MICROS = 86_400_000_000
_SETTINGS = {
    # INT96, Spark's default, has no statistics.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Files are written side by side: without this Spark sorts by folder, and seqs would have to be sorted again.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "200000",
    "spark.sql.session.timeZone": "UTC",
}


class Staged(msgspec.Struct, frozen=True):
    """A file that Spark has written. `place` is what its writer calls the group that it belongs to."""

    path: str
    place: str
    day: str
    first: int
    last: int
    rows: int
    bytes: int
    min_ts: int
    max_ts: int
    # Where its seqs have gaps: what is there. Otherwise the whole.
    runs: tuple[Seqs, ...]


def prepare(session: SparkSession) -> SparkSession:
    """Settings of a session of ours, never of the user's."""
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    return session


def with_day(rows: DataFrame) -> DataFrame:
    """`day` of the record, in UTC whatever the session's zone is."""
    from pyspark.sql import functions as f

    days = f.floor(f.unix_micros("ts") / f.lit(_DAY_MICROS)).cast("int")
    return rows.withColumn("day", f.date_from_unix_date(f.coalesce(days, f.lit(0))))


class Staging:
    """One folder of files on their way."""

    def __init__(self, session: SparkSession, store: Store, what: str) -> None:
        self._session = session
        self._store = store
        self.token = uuid.uuid4().hex[:12]
        self._folder = f"{FOLDER}/{what}-{self.token}"

    @property
    def uri(self) -> str:
        return f"{self._store.uri}/{self._folder}"

    def write(self, rows: DataFrame) -> None:
        """Rows with the columns of a lake, `place` and `day`, those of a file in their order."""
        writer = rows.select(*COLUMNS, "place", "day").write.partitionBy("place", "day").mode("append")
        writer = writer.option("compression", "zstd").option(
            "mapreduce.fileoutputcommitter.marksuccessfuljobs", "false"
        )
        writer.parquet(self.uri)

    def rows(self, *places: str) -> DataFrame:
        """What was written, or some places of it."""
        reader = self._session.read.schema(f"{SCHEMA}, place STRING, day STRING").option("basePath", self.uri)
        return reader.parquet(*([f"{self.uri}/place={place}" for place in places] or [self.uri]))

    def files(self) -> list[Staged]:
        """What was written, looked at: one small job over the seqs."""
        from pyspark.sql import functions as f

        found = {tuple(entry.path.split("/")[-3:]): entry for entry in self._entries()}
        if not found:
            return []
        key = f.xxhash64("place", "day", "_metadata.file_name")
        rows = self.rows().select("place", "day", "_metadata.file_name", "seq", "ts", key.alias("key"))
        grouped = rows.groupBy("place", "day", "file_name", "key").agg(
            f.min("seq").alias("first"),
            f.max("seq").alias("last"),
            f.count("*").alias("rows"),
            f.min(f.unix_millis("ts")).alias("min_ts"),
            f.max(f.unix_millis("ts")).alias("max_ts"),
        )
        told = grouped.collect()
        if sum(1 for row in told) != len(found):
            raise RuntimeError(f"{self.uri}: {len(found)} files are there, and Spark reads {len(told)}")
        broken = [row["key"] for row in told if row["last"] - row["first"] + 1 != row["rows"] and row["place"] != LOST]
        parts = self._runs_of(broken)
        return [self._staged(row, found, parts) for row in told]

    def _staged(self, row: Any, found: dict[Any, Any], parts: dict[int, list[Seqs]]) -> Staged:
        entry = found[f"place={row['place']}", f"day={row['day']}", row["file_name"]]
        runs = tuple(parts.get(row["key"], [(row["first"], row["last"])]))
        fields = (row["first"], row["last"], row["rows"], entry.bytes, row["min_ts"] or 0, row["max_ts"] or 0)
        return Staged(entry.path, row["place"], row["day"], *fields, runs)

    def _runs_of(self, keys: list[int]) -> dict[int, list[Seqs]]:
        from pyspark.sql import functions as f

        if not keys:
            return {}
        rows = self.rows().withColumn("key", f.xxhash64("place", "day", "_metadata.file_name"))
        return by_key(runs(rows.where(f.col("key").isin(keys)).select("key", "seq")))

    def _entries(self) -> Iterator[Any]:
        for entry in self._store.walk(self._folder):
            if entry.path.endswith(".parquet"):
                yield entry

    def place(self, staged: Staged, topic: str, epoch: int, erased: int) -> LakeFile:
        """Where a file will be. Its name is new, so nothing is ever overwritten."""
        number = staged.path.rpartition("/")[2].split("-")[1]
        name = file_name(staged.first, staged.last, f"{self.token}{number}")
        path = f"{folder(topic, epoch, staged.day)}/{name}"
        fields = (staged.first, staged.last, staged.rows, staged.bytes, staged.min_ts, staged.max_ts)
        return LakeFile(path, staged.day, *fields, erased)

    def move(self, staged: Staged, file: LakeFile) -> None:
        self._store.move(staged.path, file.path)

    def discard(self) -> None:
        self._store.delete(self._folder)


# The place of rows that are losses; a place of records never has this name.
LOST = "lost"


def runs(rows: DataFrame) -> pa.Table:
    """For rows of (`key`, `seq`): the runs of seqs without a gap, as (key, first, last, is_sorted)."""
    return rows.mapInArrow(_find_runs, "key BIGINT, first BIGINT, last BIGINT, is_sorted BOOLEAN").toArrow()


def _find_runs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import numpy as np
    import pyarrow as pa

    for batch in batches:
        if not batch.num_rows:
            continue
        keys, seqs = batch.column(0).to_numpy(), batch.column(1).to_numpy()
        is_same, steps = np.diff(keys) == 0, np.diff(seqs)
        breaks = np.flatnonzero(~is_same | (steps != 1))
        starts, ends = np.concatenate(([0], breaks + 1)), np.concatenate((breaks, [len(seqs) - 1]))
        # A run begins out of order when the one before it in the same file is not below it.
        is_sorted = np.ones(len(starts), dtype=bool)
        is_sorted[1:] = ~is_same[breaks] | (steps[breaks] > 0)
        arrays = [pa.array(keys[starts]), pa.array(seqs[starts]), pa.array(seqs[ends]), pa.array(is_sorted)]
        yield pa.RecordBatch.from_arrays(arrays, ["key", "first", "last", "is_sorted"])


def by_key(table: pa.Table) -> dict[int, list[Seqs]]:
    """Runs in order, those that touch as one."""
    found: dict[int, list[Seqs]] = {}
    columns = [table.column(name).to_pylist() for name in ("key", "first", "last")]
    for key, first, last in zip(*columns, strict=True):
        found.setdefault(key, []).append((first, last))
    return {key: union(parts) for key, parts in found.items()}
