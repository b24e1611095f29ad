"""`replay`: the past of a topic once more, from the lake, from the log, or from both without a gap: what the ledger
covers comes from the lake, everything else from the log, and each loss is told in its place."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from topics.client.connection import Connection, topic_path
from topics.core.errors import InvalidRequest
from topics.core.names import check_topic_name
from topics.core.progress import Progress
from topics.pipelines.lake import LakeFile, Part
from topics.pipelines.progress import Publisher, Report, Show
from topics.pipelines.reading import frame, opened
from topics.pipelines.spans import Seqs, Span, covered, within, without
from topics.pipelines.stores import Store, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

From = Literal["lake", "log", "both"]
_CHUNK = 200_000
_MILLISECOND = timedelta(milliseconds=1)
COLUMNS = ("topic", "epoch", "seq", "ts", "node", "tag", "meta", "data", "kind", "gap_from", "gap_to", "reason")
_SCHEMA = (
    "topic STRING, epoch BIGINT, seq BIGINT, ts TIMESTAMP, node STRING, tag STRING, meta STRING, data STRING, "
    "kind STRING, gap_from BIGINT, gap_to BIGINT, reason STRING"
)


class Past(msgspec.Struct, frozen=True):
    """What is replayed: the seqs `first` to `last` of one instance, and of those what lies between two times."""

    topic: str
    epoch: int
    first: int
    last: int
    source: From
    since: int | None = None
    until: int | None = None


class _Plan(msgspec.Struct, frozen=True):
    """A replay into a topic, as it was begun: whoever goes on with it writes the same chunks under the same name."""

    id: str
    past: Past
    dest: str
    ends: tuple[int, ...]


def replay(
    spark: SparkSession,
    topic: str,
    *,
    root: str | None = None,
    url: str | None = None,
    key: str | None = None,
    source: From = "both",
    epoch: int | None = None,
    first: int | None = None,
    last: int | None = None,
    since: int | str | datetime | None = None,
    until: int | str | datetime | None = None,
) -> DataFrame:
    """A topic's past as rows, in the columns of `format("topics")`: `first` and `last` are seqs, inclusive; `since` and
    `until` times, the second exclusive. Rows come in no order: sort by `seq`, where a loss has its last one."""
    places = _Places(spark, topic, root, url, key, source)
    return places.rows(places.past(epoch, first, last, _millis("since", since), _millis("until", until)))


def replay_into(
    spark: SparkSession,
    topic: str,
    dest: str,
    *,
    url: str,
    root: str | None = None,
    key: str | None = None,
    source: From = "both",
    epoch: int | None = None,
    first: int | None = None,
    last: int | None = None,
    since: int | str | datetime | None = None,
    until: int | str | datetime | None = None,
    name: str | None = None,
    state: str | None = None,
    chunk: int = _CHUNK,
    report: Report | None = None,
    show: Show | None = None,
) -> Progress:
    """Writes a topic's past into another topic, in order, once. What is replayed is fixed by the first call of a
    `name`; later ones go on where it was. `state` is where that is kept: in the lake, if nothing else is said."""
    check_topic_name(dest, "dest")
    if dest == topic:
        raise InvalidRequest(f"a replay of {topic!r} into itself would never be told from the original")
    if state is None and root is None:
        raise InvalidRequest("where is its state kept? Set state, or root for the lake's own folder")
    name = name or f"{topic}-to-{dest}"
    check_topic_name(name, "name")
    places = _Places(spark, topic, root, url, key, source)
    kept = open_store(state, spark) if state is not None else open_store(str(root), spark)
    folder = name if state is not None else f"_replays/{name.replace(':', '%3A')}"
    publisher = Publisher(lambda: Connection(url, key, timeout_ms=5_000, retry_ms=0))
    report = report or Report("replay", name, shows=(publisher, *((show,) if show else ())))
    with report:
        plan = _planned(kept, folder)
        if plan is None:
            past = places.past(epoch, first, last, _millis("since", since), _millis("until", until))
            plan = _Plan(uuid.uuid4().hex, past, dest, tuple(places.ends(past, chunk)))
            if not kept.create(f"{folder}/plan.json", msgspec.json.encode(plan)):
                plan = _planned(kept, folder)
                assert plan is not None
        if plan.dest != dest or plan.past.topic != topic:
            raise InvalidRequest(
                f"the replay {name!r} was begun from {plan.past.topic!r} to {plan.dest!r}: use another name"
            )
        report.stage("planned")
        _run(places, plan, kept, folder, {"url": url, **({"key": key} if key else {})}, report)
    return report.progress


def _planned(kept: Store, folder: str) -> _Plan | None:
    told = kept.read(f"{folder}/plan.json")
    return None if told is None else msgspec.json.decode(told, type=_Plan)


def _run(places: _Places, plan: _Plan, kept: Store, folder: str, server: dict[str, str], report: Report) -> None:
    from pyspark.sql import functions as f

    done = kept.read(f"{folder}/next")
    begin = int(done) if done is not None and done.isdigit() else 0
    starts = [plan.past.first, *(end + 1 for end in plan.ends)]
    for number in range(begin, len(plan.ends)):
        some = msgspec.structs.replace(plan.past, first=starts[number], last=plan.ends[number])
        report.stage("reading")
        # One task, so that the order of the past is the order of the copy.
        rows = places.rows(some).repartition(1).sortWithinPartitions(f.coalesce("gap_from", "seq"))
        rows = rows.persist()
        try:
            counts = {row["kind"]: row for row in _counted(rows)}
            report.stage("writing")
            writer = rows.write.format("topics").options(**server, topic=plan.dest)
            writer = writer.option("txnAppId", f"replay-{plan.id}").option("txnVersion", number).mode("append")
            try:
                writer.save()
            except Exception as error:
                # A later chunk of this replay is committed: so is this one, and only the note of that was lost.
                if "IdempotencyConflict" not in str(error):
                    raise
        finally:
            rows.unpersist()
        report.stage("written")
        kept.replace(f"{folder}/next", str(number + 1).encode())
        records = counts["record"]["rows"] if "record" in counts else 0
        lost = counts["tombstone"]["seqs"] if "tombstone" in counts else 0
        report.count(records, lost=lost, lag=plan.past.last - plan.ends[number])
        report.stage("noted")


def _counted(rows: DataFrame) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    seqs = f.sum(f.col("gap_to") - f.col("gap_from") + 1)
    return [row.asDict() for row in rows.groupBy("kind").agg(f.count("*").alias("rows"), seqs.alias("seqs")).collect()]


class _Places:
    """Where the past of a topic lies."""

    def __init__(
        self, spark: SparkSession, topic: str, root: str | None, url: str | None, key: str | None, source: From
    ) -> None:
        check_topic_name(topic)
        if source not in ("lake", "log", "both"):
            raise InvalidRequest(f"source must be lake, log or both, got {source!r}")
        if root is None and source != "log":
            raise InvalidRequest(f"source {source!r} needs the root of a lake")
        if url is None and source != "lake":
            raise InvalidRequest(f"source {source!r} needs the url of a server")
        self._spark = spark
        self._topic = topic
        self._source = source
        self._store = open_store(root, spark) if root is not None and source != "log" else None
        self._url = url if source != "lake" else None
        self._key = key

    # -- what is asked for -----------------------------------------------------------------------------------------

    def past(
        self, epoch: int | None, first: int | None, last: int | None, since: int | None, until: int | None
    ) -> Past:
        state = self._state()
        parts = opened(self._store).parts.get(self._topic, {}) if self._store is not None else {}
        if epoch is None:
            known = [state.epoch] if state is not None else list(parts)
            if not known:
                raise InvalidRequest(f"the lake has no topic {self._topic!r}")
            epoch = max(known)
        part = parts.get(epoch) or Part()
        here = state if state is not None and state.epoch == epoch else None
        ranges = covered(part.spans)
        if here is None and not ranges:
            raise InvalidRequest(f"topic {self._topic!r} has no instance of epoch {epoch} here")
        lowest = min([*([here.base] if here else []), *(start for start, _ in ranges[:1])])
        highest = max([*([here.head] if here else []), *(end for _, end in ranges[-1:])])
        start = lowest if first is None else max(first, lowest)
        end = highest if last is None else min(last, highest)
        if since is not None:
            start = max(start, self._first_since(part, epoch, here, since, lowest))
        if until is not None:
            end = min(end, self._last_until(part, epoch, here, until, highest))
        missing = without([(start, end)] if start <= end else [], ranges) if here is None else []
        if missing:
            raise InvalidRequest(f"topic {self._topic!r}: seqs {missing[0][0]} to {missing[0][1]} are not in the lake")
        return Past(self._topic, epoch, start, end, self._source, since, until)

    def _state(self) -> _State | None:
        if self._url is None:
            return None
        connection = Connection(self._url, self._key)
        try:
            told = connection.get(topic_path(self._topic), touch="false")
        finally:
            connection.close()
        return _State(told["epoch"], told["config"]["seq_base"], told["head_seq"], told["earliest_seq"])

    def _first_since(self, part: Part, epoch: int, here: _State | None, since: int, lowest: int) -> int:
        """Right behind the last record that is older, so that a loss which may be as new is told."""
        older = [file for file in part.in_order() if file.min_ts < since]
        known = lowest
        if older:
            known = self._edge(older[-1], epoch, f"max(seq) FILTER (WHERE ts < timestamp_millis({since}))") + 1
        end = max([end for _, end in covered(part.spans)], default=0)
        if here is not None and not any(file.max_ts >= since for file in part.files.values()):
            sought = self._seek(since)
            return sought + 1 if sought > end else known
        return known

    def _last_until(self, part: Part, epoch: int, here: _State | None, until: int, highest: int) -> int:
        """Right in front of the first record that is too new."""
        newer = [file for file in part.in_order() if file.max_ts >= until]
        if newer:
            return self._edge(newer[0], epoch, f"min(seq) FILTER (WHERE ts >= timestamp_millis({until}))") - 1
        if here is None:
            return highest
        sought = max(self._seek(until), max([end for _, end in covered(part.spans)], default=0))
        connection = Connection(str(self._url), self._key)
        try:
            body = {"from_seq": sought, "limit": 1, "epoch": here.epoch}
            gap = connection.post(topic_path(self._topic, "diff"), body)["tombstone"]
        finally:
            connection.close()
        return sought if gap is None else max(sought, int(gap["gap_to"]))

    def _edge(self, file: LakeFile, epoch: int, what: str) -> int:
        from pyspark.sql import functions as f

        assert self._store is not None
        row = frame(self._spark, self._store, [(self._topic, epoch, file)]).select(f.expr(what).alias("seq")).first()
        assert row is not None, "an aggregate is one row"
        return int(row["seq"])

    def _seek(self, ts: int) -> int:
        connection = Connection(str(self._url), self._key)
        try:
            return int(connection.get(topic_path(self._topic, "seek"), ts=max(ts, 0))["from_seq"])
        finally:
            connection.close()

    def ends(self, past: Past, chunk: int) -> Iterator[int]:
        """Where chunks of about so many records end."""
        part = opened(self._store).part(past.topic, past.epoch) if self._store is not None else Part()
        state = self._state()
        spans = [span.cut(past.first, past.last) for span in part.spans if _touches(span, past)]
        gone_below = state.earliest if state is not None and state.epoch == past.epoch else past.last + 1
        for first, last in without([(past.first, past.last)], covered(part.spans)):
            # What the log has lost already is as cheap as one record.
            spans += [Span(start, end, "lost") for start, end in within([(first, last)], [(0, gone_below - 1)])]
            spans += [Span(start, end, "archived") for start, end in without([(first, last)], [(0, gone_below - 1)])]
        size, reached = 0, past.first - 1
        for span in sorted(spans, key=lambda each: each.first):
            if span.what != "archived":
                size, reached = size + 1, span.last
                continue
            while span.last - reached + size >= chunk:
                reached, size = reached + chunk - size, 0
                yield reached
            size, reached = size + span.last - reached, span.last
        if past.first <= past.last and (reached < past.last or size):
            yield past.last

    # -- the rows --------------------------------------------------------------------------------------------------

    def rows(self, past: Past) -> DataFrame:
        from pyspark.sql import functions as f

        wanted: list[Seqs] = [(past.first, past.last)] if past.first <= past.last else []
        part = opened(self._store).part(past.topic, past.epoch) if self._store is not None else Part()
        from_lake = within(wanted, covered(part.spans))
        rows = self._lake_rows(past, part, from_lake)
        for first, last in without(wanted, from_lake):
            rows = rows.unionByName(self._log_rows(past, first, last))
        is_loss = f.col("kind") == "tombstone"
        if past.since is not None:
            rows = rows.where(is_loss | (f.col("ts") >= f.timestamp_millis(f.lit(past.since))))
        if past.until is not None:
            rows = rows.where(is_loss | (f.col("ts") < f.timestamp_millis(f.lit(past.until))))
        return rows

    def _lake_rows(self, past: Past, part: Part, ranges: list[Seqs]) -> DataFrame:
        from pyspark.sql import functions as f

        losses = [
            (past.topic, past.epoch, last, None, None, None, None, None, "tombstone", first, last, span.reason)
            for span in part.spans
            if span.what == "lost"
            for first, last in within([(span.first, span.last)], ranges)
        ]
        told = self._spark.createDataFrame(losses, _SCHEMA)
        files = [file for file in part.in_order() if within([(file.first, file.last)], ranges)]
        if not files:
            return told
        assert self._store is not None
        rows = frame(self._spark, self._store, [(past.topic, past.epoch, file) for file in files])
        rows = rows.where(f.col("seq").between(past.first, past.last)).drop("day")
        rows = rows.withColumn("kind", f.lit("record"))
        for name, kind in (("gap_from", "bigint"), ("gap_to", "bigint"), ("reason", "string")):
            rows = rows.withColumn(name, f.lit(None).cast(kind))
        rows = rows.select(*COLUMNS)
        return rows.unionByName(told) if losses else rows

    def _log_rows(self, past: Past, first: int, last: int) -> DataFrame:
        from pyspark.sql import functions as f

        assert self._url is not None, "what is not in the lake is asked of a server"
        options = {"url": self._url, "topic": past.topic, **({"key": self._key} if self._key else {})}
        reader = self._spark.read.format("topics").options(**options)
        rows = reader.option("startingSeq", first).option("endingSeq", last).load()
        message = f"topic {past.topic!r} was recreated: seqs {first} to {last} of epoch {past.epoch} are gone"
        epoch = f.when(f.col("epoch") == past.epoch, f.col("epoch")).otherwise(f.raise_error(f.lit(message)))
        return rows.withColumn("epoch", epoch).select(*COLUMNS)


class _State(msgspec.Struct, frozen=True):
    epoch: int
    base: int
    head: int
    earliest: int


def _touches(span: Span, past: Past) -> bool:
    return span.first <= past.last and span.last >= past.first


def _millis(field: str, value: int | str | datetime | None) -> int | None:
    """Milliseconds, out of what people write; a time without a zone is UTC."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        if value.isascii() and value.isdigit():
            return int(value)
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidRequest(f"{field} must be milliseconds or an ISO 8601 time, got {value!r:.100}") from None
    # Counted in whole microseconds: a float would round.
    moment = value if value.tzinfo else value.replace(tzinfo=UTC)
    return -((datetime(1970, 1, 1, tzinfo=UTC) - moment) // _MILLISECOND)
