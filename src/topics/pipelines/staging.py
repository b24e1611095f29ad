"""Parquet files on their way into a lake: Spark writes them aside, they are looked at, moved to their place, and only
then named in the manifest. What a crash leaves behind nobody reads; `compact` with `vacuum` removes it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

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


# Place, day and name of a file.
_Key = tuple[str, str, str]


class _Look(NamedTuple):
    """What is in a file."""

    first: int
    last: int
    rows: int
    min_ts: int | None
    max_ts: int | None

    @property
    def is_broken(self) -> bool:
        """Whether seqs in between are missing."""
        return self.last - self.first + 1 != self.rows


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
        """What was written, looked at: in the footers where this machine has the files, else by a job over the seqs."""
        found = {_key(entry.path): entry for entry in self._entries()}
        if not found:
            return []
        looks = self._footers(list(found.values())) or self._look()
        if looks.keys() != found.keys():
            raise RuntimeError(f"{self.uri}: {len(found)} files are there, and {len(looks)} can be read")
        broken = [key for key, look in looks.items() if look.is_broken and key[0] != LOST]
        parts = self._runs_of(broken)
        return [self._staged(found[key], key, look, parts.get(key)) for key, look in looks.items()]

    def _staged(self, entry: Any, key: _Key, look: _Look, parts: list[Seqs] | None) -> Staged:
        runs = tuple(parts or [(look.first, look.last)])
        fields = (look.first, look.last, look.rows, entry.bytes, look.min_ts or 0, look.max_ts or 0)
        return Staged(entry.path, key[0], key[1], *fields, runs)

    def _footers(self, entries: list[Any]) -> dict[_Key, _Look] | None:
        """What the footers say: 1 ms a file, however large. None where they are out of reach, or do not say."""
        import pyarrow.parquet as pq

        looks: dict[_Key, _Look] = {}
        for entry in entries:
            path = self._store.local(entry.path)
            look = None if path is None else _look(pq.read_metadata(path))
            if look is None:
                return None
            looks[_key(entry.path)] = look
        return looks

    def _look(self) -> dict[_Key, _Look]:
        from pyspark.sql import functions as f

        rows = self.rows().select("place", "day", "_metadata.file_name", "seq", "ts")
        grouped = rows.groupBy("place", "day", "file_name").agg(
            f.min("seq"),
            f.max("seq"),
            f.count("*"),
            f.min(f.unix_millis("ts")),
            f.max(f.unix_millis("ts")),
        )
        return {(row[0], row[1], row[2]): _Look(*row[3:]) for row in grouped.collect()}

    def _runs_of(self, keys: list[_Key]) -> dict[_Key, list[Seqs]]:
        from pyspark.sql import functions as f

        if not keys:
            return {}
        numbers = {spark_hash(*key): key for key in keys}
        rows = self.rows().withColumn("key", f.xxhash64("place", "day", "_metadata.file_name"))
        found = by_key(runs(rows.where(f.col("key").isin(list(numbers))).select("key", "seq")))
        return {numbers[number]: parts for number, parts in found.items()}

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


# The place of rows that are losses.
LOST = "-1"


def spark_hash(*values: str | int) -> int:
    """The same as Spark's xxhash64 of these columns."""
    number = 42
    for value in values:
        data = value.encode() if isinstance(value, str) else value.to_bytes(8, "little", signed=True)
        number = xxhash.xxh64_intdigest(data, seed=number)
    return number - (1 << 64) if number >> 63 else number


def _key(path: str) -> _Key:
    place, day, name = path.split("/")[-3:]
    return place.removeprefix("place="), day.removeprefix("day="), name


def _look(footer: Any) -> _Look | None:
    """The least and the largest of seqs and times; None if the footer does not say."""
    names = footer.schema.names
    seqs: list[int] = []
    times: list[int] = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for name, found in (("seq", seqs), ("ts", times)):
            column = group.column(names.index(name))
            told = column.statistics
            if told is None or (not told.has_min_max and told.null_count != group.num_rows):
                return None
            if told.has_min_max:
                found += [told.min_raw, told.max_raw]
    if not seqs:
        return None
    least, most = (min(times) // 1000, max(times) // 1000) if times else (None, None)
    return _Look(min(seqs), max(seqs), footer.num_rows, least, most)


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
