"""`tier`: topics flow into a lake, batch by batch. A batch's files, its ledger and the number of the batch are one
commit of the manifest, so that whatever is run again finds itself done, or not begun."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from topics.client.connection import Connection, topic_path
from topics.core import progress
from topics.core.errors import InvalidRequest, TopicNotFound
from topics.core.names import check_topic_name
from topics.core.progress import Progress
from topics.pipelines.lake import Change, Head, Heads, LakeFile, Version
from topics.pipelines.manifest import Conflict, Manifest
from topics.pipelines.progress import Publisher, Report, Show
from topics.pipelines.spans import Seqs, Span, account, within, without
from topics.pipelines.staging import LOST, Staged, Staging, prepare, spark_hash, with_day
from topics.pipelines.starting import begin
from topics.pipelines.stores import Store, open_store
from topics.spark import offsets
from topics.spark.offsets import BEGUN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FILE_BYTES = 128 << 20
SMALL_FILES = 32
_PER_TRIGGER = 20_000_000
_MOST_PER_TASK, _LEAST_PER_TASK = 500_000, 1_000
# So many topics are looked at, at most, to see how large records are.
_SAMPLE = 1000
_NEWEST = (1 << 53) - 1
_TRIES = 10
_SECOND = 1


class Read(msgspec.Struct, frozen=True):
    """The seqs `first` to `last` of one instance, which a batch has read; none when `last` is below `first`."""

    topic: str
    epoch: int
    first: int
    last: int
    # The instance that the topic was before, if this batch found it recreated.
    replaced: int | None = None


class Tiering:
    """A tier that runs. `progress` is what it has done so far."""

    def __init__(self, query: StreamingQuery, report: Report) -> None:
        self.query = query
        self._report = report

    @property
    def progress(self) -> Progress:
        return self._report.progress

    def wait(self) -> Progress:
        """Until it ends; raises what ended it."""
        with self._report:
            while not self.query.awaitTermination(_SECOND):
                self._report.beat()
        return self.progress

    def stop(self) -> Progress:
        self.query.stop()
        self._report.finish()
        return self.progress


def tier(
    spark: SparkSession,
    url: str,
    root: str,
    *,
    topics: Iterable[str] = (),
    prefix: str | None = None,
    key: str | None = None,
    once: bool = True,
    every: str = "10 seconds",
    trim: bool = False,
    checkpoint: str | None = None,
    name: str | None = None,
    max_records: int = _PER_TRIGGER,
    file_bytes: int = FILE_BYTES,
    small_files: int = SMALL_FILES,
    retry_ms: int = 30_000,
    report: Report | None = None,
    show: Show | None = None,
) -> Tiering:
    """Brings what topics hold into the lake at `root`; with `once` all that is there now, then it has ended. `trim`
    deletes from the log what is in the lake. `small_files` bounds how many small files an instance has as it grows."""
    chosen = choose(tuple(topics), prefix)
    store = open_store(root, spark)
    where = checkpoint or f"{store.uri}/_streams/{_stream_name(url, chosen)}"
    server = {"url": url, "retryMs": str(retry_ms), **({"key": key} if key else {})}
    connection = Connection(url, key, retry_ms=retry_ms)
    publisher = Publisher(lambda: Connection(url, key, timeout_ms=5_000, retry_ms=0))
    report = report or Report("tier", name or ",".join(chosen.values()), shows=(publisher, *((show,) if show else ())))
    left_out = () if prefix is None else (progress.TOPIC,)
    checkpoints = open_store(where, spark)
    job = _Tier(spark, connection, Manifest(store), checkpoints, report, trim, file_bytes, small_files, left_out)
    job.trim_all(chosen)
    per_task = _records_per_task(connection, chosen, file_bytes)
    stream = spark.readStream.format("topics").options(**server, **chosen)
    stream = stream.option("maxRecordsPerTrigger", max_records).option("recordsPerPartition", per_task)
    writer = stream.load().writeStream.foreachBatch(job.take).option("checkpointLocation", where)
    # Spark refuses a second query of the same name; without one any number run side by side.
    writer = writer.queryName(name) if name else writer
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=every)
    report.stage("starting")
    try:
        tiering = Tiering(begin(writer.start), report)
    except BaseException as error:
        report.finish(error)
        raise
    if once:
        tiering.wait()
    return tiering


def choose(topics: tuple[str, ...], prefix: str | None) -> dict[str, str]:
    """The option of the source that says which topics."""
    if bool(topics) == (prefix is not None):
        raise InvalidRequest("which topics? Name some, or a prefix, and not both")
    for topic in topics:
        check_topic_name(topic)
    return {"topics": ",".join(sorted(set(topics)))} if prefix is None else {"topicPrefix": prefix}


def _stream_name(url: str, chosen: dict[str, str]) -> str:
    """The same server and topics go on where they were."""
    return hashlib.sha256(msgspec.json.encode([url, sorted(chosen.items())])).hexdigest()[:16]


def _records_per_task(connection: Connection, chosen: dict[str, str], file_bytes: int) -> int:
    """As many as make a file of the wanted size at most, by what records have been like so far."""
    count = size = 0
    for state in _states(connection, chosen):
        count, size = count + state["count"], size + state["bytes"]
    wanted = file_bytes * max(count, 1) // max(size, 1)
    return max(_LEAST_PER_TASK, min(wanted, _MOST_PER_TASK))


def _states(connection: Connection, chosen: dict[str, str]) -> Iterable[dict[str, Any]]:
    if "topicPrefix" in chosen:
        prefix = chosen["topicPrefix"] or None
        yield from connection.get("/v0/topics", prefix=prefix, page_size=_SAMPLE)["topics"]
        return
    for topic in chosen["topics"].split(",")[:_SAMPLE]:
        try:
            yield connection.get(topic_path(topic), touch="false")
        except TopicNotFound:
            continue


class _Tier:
    def __init__(
        self,
        spark: SparkSession,
        connection: Connection,
        manifest: Manifest,
        checkpoint: Store,
        report: Report,
        trims: bool,
        file_bytes: int,
        small_files: int,
        left_out: tuple[str, ...],
    ) -> None:
        self._spark = spark
        self._connection = connection
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._report = report
        self._trims = trims
        self._file_bytes = file_bytes
        self._small_files = small_files
        # Its own progress is not what a tier is there for: it would never come to an end.
        self._left_out = left_out
        self._left_small: dict[tuple[str, int], int] = {}

    def take(self, rows: DataFrame, batch: int) -> None:
        """A micro-batch. Its rows are read once: everything else comes from the files that are made of them."""
        query = self._query_id()
        if self._manifest.heads().streams.get(query, -1) >= batch:
            self._report.stage("skipped")
            return
        reads = self._reads(batch)
        if not reads:
            return
        erased = {read.topic: self._last_delete(read.topic) for read in reads}
        session = prepare(rows.sparkSession)
        staging = Staging(session, self._manifest.store, f"tier-{batch}")
        self._report.stage("writing")
        staging.write(_placed(rows.where(~rows.topic.isin(*self._left_out)) if self._left_out else rows))
        self._report.stage("written")
        stagings = [staging]
        self._commit(query, batch, reads, erased, stagings)
        for each in stagings:
            each.discard()
        self._after(reads)

    def _query_id(self) -> str:
        told = self._checkpoint.read("metadata")
        assert told is not None, "Spark writes this before the first batch"
        return str(msgspec.json.decode(told)["id"])

    def _reads(self, batch: int) -> list[Read]:
        """What the batch covers, out of Spark's log of offsets, which it writes before a batch begins."""
        start, end = self._offsets(batch - 1) if batch else {}, self._offsets(batch)
        reads: list[Read] = []
        for topic, cursor in end.items():
            known = start.get(topic)
            if topic == BEGUN or known == cursor or topic in self._left_out:
                continue
            if known is not None and known.epoch == cursor.epoch:
                reads.append(Read(topic, cursor.epoch, known.seq + 1, cursor.seq))
            else:
                before = None if known is None else known.epoch
                reads.append(Read(topic, cursor.epoch, (cursor.start or 0) + 1, cursor.seq, before))
        return reads

    def _offsets(self, batch: int) -> offsets.Offsets:
        told = self._checkpoint.read(f"offsets/{batch}")
        assert told is not None, f"Spark's log of offsets has no batch {batch}"
        version, _, *sources = told.decode().splitlines()
        if version != "v1" or len(sources) != 1:
            raise RuntimeError(
                f"Spark's log of offsets has a form that is not known: {version}, {len(sources)} sources"
            )
        return offsets.load(msgspec.json.decode(sources[0]))

    def _last_delete(self, topic: str) -> int:
        """Asked before the rows are read: what was deleted until then is not among them."""
        try:
            return int(self._connection.get(topic_path(topic, "deletes"), after=_NEWEST)["last_id"])
        except TopicNotFound:
            return 0

    def _commit(
        self, query: str, batch: int, reads: list[Read], erased: dict[str, int], stagings: list[Staging]
    ) -> None:
        staging = stagings[0]
        staged = staging.files()
        lost = _losses(staging, staged)
        places = {_place(read.topic, read.epoch): read for read in reads}
        assert len(places) == len(reads), "two topics have the same place"
        archived = [file for file in staged if file.place != LOST]
        for file in archived:
            read = places.get(file.place)
            if read is None or file.first < read.first or file.last > read.last:
                raise RuntimeError(f"{file.path} has seqs {file.first} to {file.last}, and the batch has read {read}")
        for _ in range(_TRIES):
            heads = self._manifest.heads()
            kept = self._without_known(archived, places, heads, stagings)
            files = {file.path: _target(staging, file, places, erased) for file in kept}
            changes = list(_changes(reads, kept, files, lost, heads))
            self._report.stage("moving")
            for file in kept:
                staging.move(file, files[file.path])
                self._report.stage("moved-one")
            self._report.stage("moved")
            made = self._try(query, batch, changes, heads)
            if made is not None:
                self._count(made)
                return
            # Somebody else brought some of it in meanwhile: back to where they were, and look again.
            for file in kept:
                self._manifest.store.move(files[file.path].path, file.path)
        raise Conflict(f"{self._manifest.store.uri}: other writers bring in the same topics")

    def _try(self, query: str, batch: int, changes: list[Change], heads: Heads) -> Version | None:
        seen = {
            (change.topic, change.epoch): list(heads.head(change.topic, change.epoch).covered) for change in changes
        }

        def make(newest: Heads) -> Version | None:
            for (topic, epoch), ranges in seen.items():
                if newest.head(topic, epoch).covered != ranges:
                    return None
            return Version(0, self._manifest.now(), "tier", changes, {query: batch})

        self._report.stage("committing")
        made = self._manifest.commit("tier", make)
        if made is not None:
            self._report.stage("committed")
        return made

    def _without_known(
        self, archived: list[Staged], places: dict[str, Read], heads: Heads, stagings: list[Staging]
    ) -> list[Staged]:
        """Leaves out what the manifest holds already. A file that is known in part is written again without that part:
        this happens to a stream that lost its checkpoint, or that meets another one."""
        kept: list[Staged] = []
        mixed: dict[str, list[Seqs]] = {}
        for file in archived:
            read = places[file.place]
            known = within(list(file.runs), heads.head(read.topic, read.epoch).covered)
            if not known:
                kept.append(file)
            elif known != list(file.runs):
                mixed[file.place] = heads.head(read.topic, read.epoch).covered
        if not mixed:
            return kept
        again = Staging(prepare(self._spark.newSession()), self._manifest.store, "tier-again")
        stagings.append(again)
        for place, known in mixed.items():
            again.write(_outside(stagings[0].rows(place), known))
        kept = [file for file in kept if file.place not in mixed]
        return kept + again.files()

    def _count(self, made: Version) -> None:
        for change in made.changes:
            fates = {"archived": 0, "lost": 0, "deleted": 0}
            for span in change.spans:
                fates[span.what] += span.last - span.first + 1
            size = sum(file.bytes for file in change.add)
            self._report.count(fates["archived"], size, fates["lost"], fates["deleted"])

    def _after(self, reads: list[Read]) -> None:
        """What may be done once the batch is in the lake; a crash in here leaves it to the next one."""
        heads = self._manifest.heads()
        if self._trims:
            for read in reads:
                self._trim(read.topic, read.epoch, heads.head(read.topic, read.epoch))
            self._report.stage("trimmed")
        crowded = [read for read in reads if self._is_crowded(read, heads)]
        if crowded:
            from topics.pipelines.compacting import merge

            self._report.stage("merging")
            instances = {(read.topic, read.epoch) for read in crowded}
            merge(self._spark, self._manifest, instances, self._file_bytes)
            heads = self._manifest.heads()
            for topic, epoch in instances:
                self._left_small[topic, epoch] = heads.head(topic, epoch).small
        self._report.count(lag=self._lag(reads))
        self._report.stage("waiting")

    def _is_crowded(self, read: Read, heads: Heads) -> bool:
        """Small files that a merge has left, because nothing fits beside them, do not count again."""
        left = self._left_small.get((read.topic, read.epoch), 0)
        return heads.head(read.topic, read.epoch).small - left > self._small_files

    def _lag(self, reads: list[Read]) -> int:
        """Seqs that wait in the topics of this batch."""
        lag = 0
        for read in reads[:_SAMPLE]:
            try:
                state = self._connection.get(topic_path(read.topic), touch="false")
            except TopicNotFound:
                continue
            if state["epoch"] == read.epoch:
                lag += max(state["head_seq"] - read.last, 0)
        return lag

    def trim_all(self, chosen: dict[str, str]) -> None:
        """What an earlier run has brought in and not trimmed."""
        if self._trims:
            heads = self._manifest.heads()
            names = set(heads.instances)
            if "topics" in chosen:
                names &= set(chosen["topics"].split(","))
            for topic in sorted(name for name in names if name.startswith(chosen.get("topicPrefix", ""))):
                for epoch, head in heads.instances[topic].items():
                    if not head.is_over:
                        self._trim(topic, epoch, head)

    def _trim(self, topic: str, epoch: int, head: Head) -> None:
        """Deletes from the log what the manifest covers without a gap from the first live record on."""
        try:
            state = self._connection.get(topic_path(topic), touch="false")
            if state["epoch"] != epoch:
                return
            for first, last in head.covered:
                if first <= state["earliest_seq"] <= last:
                    body = {"before_seq": last + 1, "purpose": "trim", "epoch": epoch}
                    self._connection.post(topic_path(topic, "delete"), body)
        except TopicNotFound:
            return


def _placed(rows: DataFrame) -> DataFrame:
    """Records go by their instance and day; losses go aside, told in `data`."""
    from pyspark.sql import functions as f

    is_record = f.col("kind") == "record"
    told = f.to_json(f.struct("topic", "epoch", "gap_from", "gap_to", "reason"))
    # A number: as text it would be made anew for every row.
    place = f.when(is_record, f.xxhash64("topic", "epoch")).otherwise(f.lit(LOST).cast("bigint"))
    rows = rows.withColumn("place", place)
    return with_day(rows.withColumn("data", f.when(is_record, f.col("data")).otherwise(told)))


def _place(topic: str, epoch: int) -> str:
    return str(spark_hash(topic, epoch))


class _Loss(msgspec.Struct):
    topic: str
    epoch: int
    gap_from: int
    gap_to: int
    reason: str


def _losses(staging: Staging, staged: list[Staged]) -> list[_Loss]:
    if not any(file.place == LOST for file in staged):
        return []
    return [msgspec.json.decode(row["data"], type=_Loss) for row in staging.rows(LOST).select("data").collect()]


def _target(staging: Staging, file: Staged, places: dict[str, Read], erased: dict[str, int]) -> LakeFile:
    read = places[file.place]
    return staging.place(file, read.topic, read.epoch, erased[read.topic])


def _changes(
    reads: list[Read], kept: list[Staged], files: dict[str, LakeFile], lost: list[_Loss], heads: Heads
) -> Iterable[Change]:
    for read in reads:
        known = heads.head(read.topic, read.epoch).covered
        mine = [file for file in kept if file.place == _place(read.topic, read.epoch)]
        runs = [run for file in mine for run in file.runs]
        gaps = [
            Span(loss.gap_from, loss.gap_to, "lost", loss.reason)
            for loss in lost
            if (loss.topic, loss.epoch) == (read.topic, read.epoch) and loss.gap_from <= loss.gap_to
        ]
        spans = account(read.first, read.last, runs, gaps) if read.first <= read.last else []
        fresh = [span.cut(first, last) for span in spans for first, last in without([(span.first, span.last)], known)]
        change = Change(read.topic, read.epoch, fresh, add=[files[file.path] for file in mine])
        if fresh or change.add:
            yield change
        if read.replaced is not None:
            yield Change(read.topic, read.replaced, is_over=True)


def _outside(rows: DataFrame, known: list[Seqs]) -> DataFrame:
    from pyspark.sql import functions as f

    condition = f.lit(True)
    for first, last in known:
        condition = condition & ~f.col("seq").between(first, last)
    return rows.where(condition).withColumn("day", f.to_date("day")).sortWithinPartitions("day", "seq")
