"""`route`: SQL between topics, many pipelines in one Spark application, each batch of each exactly once. A loss in a
source becomes a hole in the destination, in the same transaction as the batch that met it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from topics.client.connection import Connection, topic_path
from topics.core.errors import InvalidRequest, TopicNotFound
from topics.core.progress import Progress
from topics.pipelines.pipeline_file import ONCE, PipelineError, PipelineFile, PipelineSpec, read_file
from topics.pipelines.progress import Publisher, Report, Show
from topics.pipelines.spans import Seqs, seqs
from topics.pipelines.starting import begin
from topics.pipelines.stores import Store, open_store
from topics.spark.lag import lag_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOSSES = "pipelines.losses"
_PER_TRIGGER = 500_000
# Nodes of a plan that make rows out of single rows: behind them a gap is as long as it was.
_ROW_WISE = {
    *("Project", "Filter", "SubqueryAlias", "View", "Generate", "EventTimeWatermark", "UnresolvedHint", "ResolvedHint"),
    *(
        "StreamingRelationV2",
        "StreamingRelation",
        "StreamingDataSourceV2ScanRelation",
        "LocalRelation",
        "OneRowRelation",
    ),
    *("Union", "WithCTE", "CTERelationDef", "CTERelationRef", "Relation"),
}
_AT = re.compile(r"line (\d+),? pos (\d+)")
_SECOND = 1


class Routing:
    """The queries of a file, running."""

    def __init__(self, queries: dict[str, StreamingQuery], reports: dict[str, Report]) -> None:
        self.queries = queries
        self._reports = reports
        self._told: dict[str, int] = {}

    def wait(self) -> dict[str, Progress]:
        """Until all have ended. One that fails ends the others, and is raised."""
        left = dict(self.queries)
        try:
            while left:
                for name, query in list(left.items()):
                    is_over = query.awaitTermination(_SECOND)
                    self._count(name, query)
                    self._reports[name].beat()
                    if is_over:
                        self._reports[name].finish()
                        del left[name]
        except BaseException as error:
            self.stop(error)
            raise
        return {name: report.progress for name, report in self._reports.items()}

    def _count(self, name: str, query: StreamingQuery) -> None:
        for progress in query.recentProgress:
            if progress["batchId"] > self._told.get(name, -1) and progress["numInputRows"]:
                self._told[name] = progress["batchId"]
                lags = [lag_of(_text(each["endOffset"]), _text(each["latestOffset"])) for each in progress["sources"]]
                lag = sum(sum(each.values()) for each in lags if each is not None)
                self._reports[name].count(progress["numInputRows"], lag=lag)

    def stop(self, error: BaseException | None = None) -> None:
        for name, query in self.queries.items():
            query.stop()
            self._reports[name].finish(error)


def _text(offset: Any) -> str | None:
    """Spark's progress has offsets as JSON text, or as what the text says."""
    return offset if offset is None or isinstance(offset, str) else msgspec.json.encode(offset).decode()


def route(
    spark: SparkSession,
    file: str | Path | PipelineFile,
    *,
    url: str | None = None,
    key: str | None = None,
    once: bool = False,
    show: Show | None = None,
) -> Routing:
    """Starts the pipelines of a file; `once` lets each take what is there now, whatever its trigger says."""
    pipelines = file if isinstance(file, PipelineFile) else read_file(file)
    where = url or pipelines.url
    if where is None:
        raise InvalidRequest(f"{pipelines.path} has no url: set it there, or give one")
    server = {"url": where, **({"key": key} if key else {})}
    queries: dict[str, StreamingQuery] = {}
    reports: dict[str, Report] = {}
    # All are looked at before one is started.
    routes = [_Route(spark, pipelines.path, spec, server) for spec in pipelines.pipelines]
    try:
        for each in routes:
            name = each.spec.name
            publisher = Publisher(lambda: Connection(where, key, timeout_ms=5_000, retry_ms=0))
            reports[name] = Report("route", name, shows=(publisher, *((show,) if show else ())))
            reports[name].stage("starting")
            queries[name] = each.start(reports[name], once)
            reports[name].stage("running")
    except BaseException as error:
        for query in queries.values():
            query.stop()
        for report in reports.values():
            report.finish(error)
        raise
    return Routing(queries, reports)


class _Route:
    def __init__(self, spark: SparkSession, path: str, spec: PipelineSpec, server: dict[str, str]) -> None:
        self.spec = spec
        self._path = path
        self._server = server
        # Views of two pipelines may have the same name.
        self._session = spark.newSession()
        self._checkpoint = _checkpoint(path, spec.checkpoint)
        streams = {source.view: self._stream(source.options) for source in spec.sources}
        for view, stream in streams.items():
            self._view(stream, view)
        self._out = self._query(self._session)
        nodes = _nodes(self._out)
        self._keeps_length = nodes <= _ROW_WISE
        # Here the losses are among the rows.
        is_single = len(streams) == 1 and self._keeps_length
        self._single = self._stream(spec.sources[0].options, notes=False) if is_single else None
        if not self._out.isStreaming:
            raise self._fail(spec.sql_line, "the query reads none of its sources")

    def _fail(self, line: int, message: str) -> PipelineError:
        return PipelineError(self._path, line, message)

    def _stream(self, options: dict[str, str], notes: bool = True) -> DataFrame:
        reader = self._session.readStream.format("topics").option("maxRecordsPerTrigger", _PER_TRIGGER)
        reader = reader.option("lossTopic", LOSSES) if notes else reader
        return reader.options(**self._server, **options).load()

    def _view(self, rows: DataFrame, view: str) -> None:
        """What the query sees of a source: its records, `value` parsed out of `data` if there is a schema."""
        from pyspark.sql import functions as f

        source = next(each for each in self.spec.sources if each.view == view)
        rows = rows.where("kind = 'record'").drop("kind", "gap_from", "gap_to", "reason")
        if source.schema is not None:
            try:
                rows = rows.withColumn("value", f.from_json("data", source.schema))
            except Exception as error:
                raise self._fail(source.line, f"schema of {view}: {_first_line(error)}") from None
        if source.watermark is not None and rows.isStreaming:
            rows = rows.withWatermark("ts", source.watermark)
        rows.createOrReplaceTempView(view)

    def _query(self, session: SparkSession) -> DataFrame:
        try:
            return _shaped(session.sql(self.spec.sql))
        except PipelineError:
            raise
        except Exception as error:
            found = _AT.search(str(error))
            line = self.spec.sql_line + (int(found[1]) - 1 if found is not None else 0)
            raise self._fail(line, f"pipeline {self.spec.name}: {_first_line(error)}") from None

    def start(self, report: Report, once: bool) -> StreamingQuery:
        self._report = report
        checkpoints = open_store(self._checkpoint, self._session)
        if self._single is not None:
            stream, take = self._single, lambda rows, batch: self._take_rows(rows, batch, checkpoints)
        else:
            stream, take = self._out, lambda rows, batch: self._take_results(rows, batch, checkpoints)
        writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", self._checkpoint)
        writer = writer.queryName(self.spec.name).outputMode(self.spec.output_mode)
        is_once = once or self.spec.trigger == ONCE
        writer = writer.trigger(availableNow=True) if is_once else writer.trigger(processingTime=self.spec.trigger)
        try:
            return begin(writer.start)
        except Exception as error:
            raise self._fail(self.spec.sql_line, f"pipeline {self.spec.name}: {_first_line(error)}") from None

    def _take_rows(self, rows: DataFrame, batch: int, checkpoints: Store) -> None:
        """Row by row: the batch is read once, and what it tells of losses goes with what the query makes of it."""
        rows = rows.persist()
        try:
            losses = rows.where("kind = 'tombstone'").select("kind", "gap_from", "gap_to")
            found = [(row["gap_from"], row["gap_to"]) for row in losses.collect()]
            self._view(rows, self.spec.sources[0].view)
            self._write(self._query(rows.sparkSession), found, batch, checkpoints)
        finally:
            rows.unpersist()

    def _take_results(self, rows: DataFrame, batch: int, checkpoints: Store) -> None:
        """Behind state the losses of a source are not among the rows: the tasks that met them have left a note."""
        rows = rows.persist()
        try:
            # Reads the sources, and so leaves the notes.
            rows.count()
            found = self._noted(_query_id(checkpoints), batch)
            self._write(rows, found, batch, checkpoints)
        finally:
            rows.unpersist()

    def _noted(self, query: str, batch: int) -> list[Seqs]:
        """Tasks are tried again, and tell again; what overlaps is one loss."""
        connection = Connection(self._server["url"], self._server.get("key"))
        found: dict[tuple[str, int], list[Seqs]] = {}
        cursor, is_caught_up = 0, False
        try:
            while not is_caught_up:
                body = {"from_seq": cursor, "limit": 1000, "match": ["tag", "Eq", f"{query}:{batch}"]}
                answer = connection.post(topic_path(LOSSES, "diff"), body)
                for record in answer["records"]:
                    note = record["data"]
                    gap = (note["gap_from"], max(note["gap_to"], note["gap_from"]))
                    found.setdefault((note["topic"], note["epoch"]), []).append(gap)
                cursor, is_caught_up = answer["next_from_seq"], answer["caught_up"]
        except TopicNotFound:
            return []
        finally:
            connection.close()
        return [gap for gaps in found.values() for gap in _overlapping(gaps)]

    def _write(self, rows: DataFrame, losses: list[Seqs], batch: int, checkpoints: Store) -> None:
        """One transaction, known by the query and the number of the batch."""
        if losses:
            from pyspark.sql import functions as f

            session = rows.sparkSession
            gaps = losses if self._keeps_length else [(1, 1)] * len(losses)
            holes = session.createDataFrame(
                [("tombstone", first, last) for first, last in gaps], "kind STRING, gap_from BIGINT, gap_to BIGINT"
            ).coalesce(1)
            told = ("kind", "gap_from", "gap_to")
            rows = rows.drop(*told).withColumn("kind", f.lit("record"))
            rows = holes.unionByName(rows, allowMissingColumns=True)
            self._report.count(lost=seqs(losses))
        writer = rows.write.format("topics").options(**self._server, topic=self.spec.destination)
        writer = writer.option("txnAppId", _query_id(checkpoints)).option("txnVersion", batch)
        writer.mode("append").save()


def _overlapping(gaps: list[Seqs]) -> list[Seqs]:
    """Gaps that overlap as one; two that only touch are two losses."""
    result: list[Seqs] = []
    for first, last in sorted(gaps):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return result


def _shaped(rows: DataFrame) -> DataFrame:
    """A result with a column `data` says itself what its records are; of any other a row is a record."""
    from pyspark.sql import functions as f

    if "data" in rows.columns:
        kept = [name for name in ("data", "tag", "node", "meta") if name in rows.columns]
        return rows.select(*kept)
    return rows.select(f.to_json(f.struct("*"), {"ignoreNullFields": "false"}).alias("data"))


def _query_id(checkpoints: Store) -> str:
    told = checkpoints.read("metadata")
    assert told is not None, "Spark writes this before the first batch"
    return str(msgspec.json.decode(told)["id"])


def _nodes(rows: DataFrame) -> set[str]:
    """The kinds of nodes of a query's plan, those of its subqueries too."""
    left = [rows._jdf.queryExecution().analyzed()]
    names: set[str] = set()
    while left:
        plan = left.pop()
        names.add(str(plan.nodeName()).split(" ")[0])
        for children in (plan.children(), plan.subqueries(), plan.innerChildren()):
            left += [children.apply(index) for index in range(children.size())]
        if not plan.subqueries().isEmpty():
            names.add("Subquery")
    return {"Relation" if name.startswith("Relation") else name for name in names}


def _checkpoint(path: str, checkpoint: str) -> str:
    """A path without a scheme that is not absolute is meant from where the file is."""
    if "://" in checkpoint or os.path.isabs(checkpoint):
        return checkpoint
    return str(Path(path).absolute().parent / checkpoint)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:500]


__all__ = ["Routing", "route"]
