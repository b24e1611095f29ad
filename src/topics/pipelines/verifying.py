"""`verify`: lake, ledger and log are laid over each other, and every seq must have exactly one fate. Reads every file's
seqs and all that the log holds; believes nothing that it can look at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from topics.client.connection import Connection, topic_path
from topics.core import progress
from topics.core.errors import TopicNotFound
from topics.pipelines.compacting import keys_of
from topics.pipelines.lake import Lake, LakeFile, Part
from topics.pipelines.progress import Publisher, Report, Show
from topics.pipelines.reading import opened
from topics.pipelines.spans import Seqs, covered, seqs, union, within, without
from topics.pipelines.staging import SCHEMA, prepare
from topics.pipelines.stores import Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

# So many are named; more of the same kind are counted.
_TOLD = 100


class Problem(msgspec.Struct, frozen=True):
    """Seqs that are not what they should be."""

    topic: str
    epoch: int
    first: int
    last: int
    what: str


class Instance(msgspec.Struct):
    """How many seqs of an instance have which fate. `waiting` are in the log and not in the lake yet."""

    topic: str
    epoch: int
    archived: int = 0
    lost: int = 0
    deleted: int = 0
    waiting: int = 0
    lost_in_log: int = 0
    deleted_in_log: int = 0
    is_over: bool = False


class Verified(msgspec.Struct):
    ok: bool
    version: int
    files: int
    rows: int
    instances: list[Instance]
    problems: list[Problem]
    more_problems: int = 0


class _Log(msgspec.Struct):
    """An instance as the log has it: from its first seq to its head, and what of that lives or is told lost."""

    epoch: int
    base: int
    head: int
    live: list[Seqs] = []
    lost: list[Seqs] = []


def verify(
    spark: SparkSession,
    root: str,
    *,
    url: str | None = None,
    key: str | None = None,
    topics: Collection[str] = (),
    report: Report | None = None,
    show: Show | None = None,
) -> Verified:
    """Accounts for every seq of the lake's topics, or of some. Without `url` the log is left out: then only what the
    lake says about itself is proven."""
    store = open_store(root, spark)
    shows: list[Show] = [Publisher(lambda: Connection(url, key, timeout_ms=5_000, retry_ms=0))] if url else []
    report = report or Report("verify", store.uri, shows=(*shows, *((show,) if show else ())))
    with report:
        lake = opened(store)
        # After the lake: what it says is lost or deleted was so before, and stays so, and what moves over in between is
        # still to be found in the log.
        names = sorted(name for name in lake.parts if not topics or name in topics)
        logs = _logs(spark, url, key, names, report) if url else {}
        return _Verify(spark, store, lake, topics, logs, report).run()


class _Verify:
    def __init__(
        self,
        spark: SparkSession,
        store: Store,
        lake: Lake,
        topics: Collection[str],
        logs: dict[str, _Log],
        report: Report,
    ) -> None:
        self._session = prepare(spark.newSession())
        self._store = store
        self._lake = lake
        self._chosen = [each for each in lake if not topics or each[0] in topics]
        self._logs = logs
        self._report = report
        self._problems: list[Problem] = []
        self._rows = 0

    def run(self) -> Verified:
        files = [file for _, _, part in self._chosen for file in part.files.values()]
        self._report.stage("looking at files")
        found = self._look(files)
        self._report.stage("reading the lake")
        runs, unsorted = self._read([file for file in files if file.path in found])
        instances: list[Instance] = []
        for topic, epoch, part in self._chosen:
            mine = list(self._check_lake(part, found, runs, unsorted))
            log = self._logs.get(topic)
            instance = Instance(topic, epoch, is_over=part.is_over)
            instance.archived, instance.lost, instance.deleted = [
                seqs(part.ranges(what)) for what in ("archived", "lost", "deleted")
            ]
            if log is not None and log.epoch == epoch:
                mine += self._check_log(part, log, instance)
            self._problems += [Problem(topic, epoch, *problem) for problem in mine]
            self._report.count(instance.archived, lost=instance.lost, deleted=instance.deleted, lag=instance.waiting)
            instances.append(instance)
        told = self._problems[:_TOLD]
        more = len(self._problems) - len(told)
        return Verified(not told, self._lake.version, len(files), self._rows, instances, told, more)

    def _look(self, files: list[LakeFile]) -> dict[str, str]:
        """The files that are there, and what is wrong with one at first sight."""
        folders = {file.path.split("/")[0] for file in files}
        sizes = {entry.path: entry.bytes for each in folders for entry in self._store.walk(each)}
        return {
            file.path: "" if sizes[file.path] == file.bytes else f"has {sizes[file.path]} bytes instead of {file.bytes}"
            for file in files
            if file.path in sizes
        }

    def _read(self, files: list[LakeFile]) -> tuple[dict[str, list[Seqs]], set[str]]:
        """All runs of seqs in each file, not joined: what is there twice must show."""
        from pyspark.sql import functions as f

        from topics.pipelines.staging import runs

        if not files:
            return {}, set()
        reader = self._session.read.schema(SCHEMA).option("ignoreCorruptFiles", "true")
        rows = reader.parquet(*[f"{self._store.uri}/{file.path}" for file in files])
        table = runs(rows.select(f.xxhash64("_metadata.file_name").alias("key"), "seq"))
        keys = keys_of(self._session, files)
        found: dict[str, list[Seqs]] = {}
        unsorted: set[str] = set()
        columns = [table.column(name).to_pylist() for name in ("key", "first", "last", "is_sorted")]
        for number, first, last, is_sorted in zip(*columns, strict=True):
            found.setdefault(keys[number], []).append((first, last))
            if not is_sorted:
                unsorted.add(keys[number])
            self._rows += last - first + 1
        return found, unsorted

    def _check_lake(
        self, part: Part, found: dict[str, str], runs: dict[str, list[Seqs]], unsorted: set[str]
    ) -> Iterator[tuple[int, int, str]]:
        archived = part.ranges("archived")
        everything: list[Seqs] = []
        for file in part.in_order():
            name = file.path.rpartition("/")[2]
            if file.path not in found:
                yield file.first, file.last, f"the file {file.path} is missing"
                continue
            if found[file.path]:
                yield file.first, file.last, f"the file {name} {found[file.path]}"
            mine = sorted(runs.get(file.path, []))
            if file.path in unsorted:
                yield file.first, file.last, f"the file {name} is not sorted by seq"
            if seqs(mine) != file.rows:
                yield file.first, file.last, f"the file {name} has {seqs(mine)} rows instead of {file.rows}"
            everything += mine
        yield from _twice(everything)
        there = union(everything)
        for first, last in without(archived, there):
            yield first, last, "archived by the ledger, and in no file"
        for first, last in without(there, archived):
            yield first, last, "in a file, and not archived by the ledger"
        for (_, end), (start, _) in zip(covered(part.spans), covered(part.spans)[1:], strict=False):
            if part.is_over:
                yield end + 1, start - 1, "not accounted for, and its instance is over"

    def _check_log(self, part: Part, log: _Log, instance: Instance) -> Iterator[tuple[int, int, str]]:
        known = covered(part.spans)
        everything = [(log.base, log.head)] if log.base <= log.head else []
        rest = without(everything, known)
        instance.waiting = seqs(within(log.live, rest))
        instance.lost_in_log = seqs(within(log.lost, rest))
        instance.deleted_in_log = seqs(rest) - instance.waiting - instance.lost_in_log
        for first, last in within(log.live, log.lost):
            yield first, last, "the log has it, and tells that it is lost"
        for what in ("lost", "deleted"):
            for first, last in within(log.live, part.ranges(what)):
                yield first, last, f"{what} by the ledger, and the log has it"
        for first, last in without(known, [(log.base, max(log.head, log.base - 1))]) if everything else known:
            if first < log.base:
                yield first, last, f"in the ledger, and the log begins at {log.base}"


def _twice(runs: Iterable[Seqs]) -> Iterator[tuple[int, int, str]]:
    reached = -1
    for first, last in sorted(runs):
        if first <= reached:
            yield first, min(last, reached), "in the lake more than once"
        reached = max(reached, last)


def _logs(spark: SparkSession, url: str, key: str | None, names: list[str], report: Report) -> dict[str, _Log]:
    """What the log holds of these topics now: one read over all of them."""
    import xxhash
    from pyspark.sql import functions as f

    report.stage("reading the log")
    connection = Connection(url, key)
    logs: dict[str, _Log] = {}
    try:
        for name in names:
            try:
                state = connection.get(topic_path(name), touch="false")
            except TopicNotFound:
                continue
            logs[name] = _Log(state["epoch"], state["config"]["seq_base"], state["head_seq"])
    finally:
        connection.close()
    read = sorted(name for name in logs if name != progress.TOPIC)
    if not read:
        return logs
    options = {"url": url, "topics": ",".join(read), **({"key": key} if key else {})}
    ends = msgspec.json.encode({name: logs[name].head for name in read}).decode()
    reader = spark.read.format("topics").options(**options).option("endingSeq", ends)
    rows = reader.schema("topic STRING, epoch BIGINT, seq BIGINT, kind STRING, gap_from BIGINT, gap_to BIGINT").load()
    told = rows.select(f.xxhash64("topic").alias("key"), "epoch", "seq", "kind", "gap_from", "gap_to")
    table = told.mapInArrow(
        _find_told, "key BIGINT, epoch BIGINT, first BIGINT, last BIGINT, is_lost BOOLEAN"
    ).toArrow()
    digests = {name: xxhash.xxh64_intdigest(name.encode(), seed=42) for name in read}
    by_number = {digest - (1 << 64) if digest >> 63 else digest: name for name, digest in digests.items()}
    columns = [table.column(name).to_pylist() for name in ("key", "epoch", "first", "last", "is_lost")]
    for number, epoch, first, last, is_lost in zip(*columns, strict=True):
        log = logs[by_number[number]]
        # Recreated since it was looked at: the next verify will see.
        if log.epoch == epoch and first <= last:
            (log.lost if is_lost else log.live).append((first, last))
    for log in logs.values():
        log.live, log.lost = union(log.live), union(log.lost)
    return logs


def _find_told(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs of records, and losses."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ["key", "epoch", "first", "last", "is_lost"]
    for batch in batches:
        is_record = pc.equal(batch.column("kind"), "record")
        records, losses = batch.filter(is_record), batch.filter(pc.invert(is_record))
        if losses.num_rows:
            flags = pa.array([True] * losses.num_rows)
            arrays = [losses.column(name) for name in ("key", "epoch", "gap_from", "gap_to")]
            yield pa.RecordBatch.from_arrays([*arrays, flags], names)
        if records.num_rows:
            numbers, epochs, seq = (records.column(name).to_numpy() for name in ("key", "epoch", "seq"))
            breaks = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(epochs) != 0) | (np.diff(seq) != 1))
            starts, ends = np.concatenate(([0], breaks + 1)), np.concatenate((breaks, [len(seq) - 1]))
            arrays = [pa.array(each) for each in (numbers[starts], epochs[starts], seq[starts], seq[ends])]
            yield pa.RecordBatch.from_arrays([*arrays, pa.array([False] * len(starts))], names)


__all__ = ["Problem", "Verified", "verify"]
