"""`format("topics")`: what Spark finds under this name, and its batch and streaming readers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from topics.spark import columns, offsets, planning
from topics.spark.offsets import Cursor, Offsets
from topics.spark.options import SourceOptions, sink_options, source_options
from topics.spark.planning import Catalog, Range, TopicState
from topics.spark.pushdown import Wanted, ceil_ms
from topics.spark.reading import Reading

# The process in which Spark asks for push-down. Only there may a reader know of it: anywhere else Spark refuses every
# read of a reader that does, unless `spark.sql.python.filterPushdown.enabled` is set, which it is not by default.
_PUSHDOWN_PROCESS = "pyspark.sql.worker.data_source_pushdown_filters"


class TopicsDataSource(DataSource):
    """Records of topics as rows, and rows as records. `topics.spark` says what the options are."""

    @classmethod
    def name(cls) -> str:
        return "topics"

    def schema(self) -> str:
        return columns.ddl(source_options(self.options).meta)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = source_options(self.options)
        columns.check_schema(schema, options.meta)
        kind = PushdownReader if options.push_filters and _is_pushdown_process() else BatchReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        return StreamReader(dict(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from topics.spark.sink import BatchWriter

        return BatchWriter(sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        from topics.spark.sink import StreamWriter

        return StreamWriter(sink_options(self.options), schema, overwrite)


def _is_pushdown_process() -> bool:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_PROCESS in sys.modules or (main is not None and main.name == _PUSHDOWN_PROCESS)


class BatchReader(DataSourceReader):
    """All that is there when the read is planned, or what `startingSeq` and `endingSeq` leave of it."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = Wanted()
        self._reading = Reading(options.server, options.filter, options.on_loss)

    def partitions(self) -> Sequence[InputPartition]:
        catalog = Catalog(self._options)
        wanted = self._wanted
        start: Offsets = {}
        end: Offsets = {}
        states = catalog.look(must_exist=True)
        for name, state in states.items():
            if wanted.topics is None or name in wanted.topics:
                first, last = self._bounds(catalog, state)
                start[name] = Cursor(state.epoch, first)
                end[name] = Cursor(state.epoch, max(first, last))
        return planning.ranges(start, end, states, self._options.records_per_partition)

    def _bounds(self, catalog: Catalog, state: TopicState) -> tuple[int, int]:
        """The cursors between which a topic is read: by the options, and by the filters that were taken in."""
        wanted = self._wanted
        first = max(catalog.start(state), wanted.first - 1)
        last = catalog.end(state)
        if wanted.last is not None:
            last = min(last, wanted.last)
        if wanted.since is not None:
            first = max(first, catalog.seek(state.topic, ceil_ms(wanted.since)))
        if wanted.until is not None:
            # Behind the last record that is old enough; but a loss right there may have been of such records.
            newest = catalog.seek(state.topic, ceil_ms(wanted.until))
            last = min(last, catalog.loss_at(state, newest) or newest)
        return first, last

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Where there is nothing to read, Spark makes a partition of its own.
        return self._reading.read(partition, self._schema) if isinstance(partition, Range) else iter(())


class PushdownReader(BatchReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        left = list(self._wanted.narrow(filters))
        wanted = self._wanted
        reading = self._reading
        if wanted.tag is not None:
            if reading.filter.match is not None:
                # The server takes one selector; this one stays with Spark.
                wanted.tag = None
                left += [each for each in filters if each not in left and getattr(each, "attribute", None) == ("tag",)]
            else:
                reading = msgspec.structs.replace(
                    reading, filter=msgspec.structs.replace(reading.filter, match=wanted.tag)
                )
        self._reading = msgspec.structs.replace(reading, until=wanted.until)
        return left


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Goes on where it was, batch by batch. Nothing is checked before Spark wants the first offset: an error earlier
    than that would be buried under another one."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._given = options
        self._schema = schema
        self._options: SourceOptions | None = None
        self._catalog: Catalog | None = None
        # Everything that was there when an AvailableNow query began; it ends when that is read.
        self._until: Offsets | None = None
        # The heads that this run of the query has seen.
        self._seen: Offsets = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None}

    def _checked(self) -> SourceOptions:
        if self._options is None:
            options = source_options(self._given)
            columns.check_schema(self._schema, options.meta)
            self._options = options
        return self._options

    def _look(self, must_exist: bool = False) -> tuple[Catalog, dict[str, TopicState]]:
        if self._catalog is None:
            self._catalog = Catalog(self._checked())
        return self._catalog, self._catalog.look(must_exist)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name, here and below
        """Nothing yet. Where a topic is begun stands in the first offset that is planned, because only that is kept."""
        self._checked()
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._checked().max_records
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, states = self._look()
        self._until = _heads(states)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        known = offsets.load(start)
        catalog, states = self._look(must_exist=not known)
        if self._until is not None:
            states = {name: self._as_it_was(state) for name, state in states.items() if self._was_there(state)}
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        reached = planning.next_offsets(known, states, catalog, most)
        # What was there and is gone with its whole topic is planned once more: the task that misses it tells.
        for name, seen in self._seen.items():
            cursor = known.get(name)
            if cursor is not None and name not in states and cursor.epoch == seen.epoch and cursor.seq < seen.seq:
                reached[name] = Cursor(seen.epoch, seen.seq)
        self._seen |= _heads(states)
        return offsets.dump(reached)

    def _was_there(self, state: TopicState) -> bool:
        assert self._until is not None
        then = self._until.get(state.topic)
        return then is not None and then.epoch == state.epoch

    def _as_it_was(self, state: TopicState) -> TopicState:
        assert self._until is not None
        return msgspec.structs.replace(state, head_seq=min(state.head_seq, self._until[state.topic].seq))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return offsets.dump(_heads(self._look()[1]))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        _, states = self._look()
        per_range = self._checked().records_per_partition
        return planning.ranges(offsets.load(start), offsets.load(end), states, per_range)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Range)
        options = self._checked()
        reading = Reading(options.server, options.filter, options.on_loss, loss_topic=options.loss_topic)
        return reading.read(partition, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """The server keeps no cursor for a stream: Spark's checkpoint has it."""

    def stop(self) -> None:
        if self._catalog is not None:
            self._catalog.close()


def _heads(states: dict[str, TopicState]) -> Offsets:
    return {name: Cursor(state.epoch, state.head_seq, state.base) for name, state in states.items()}
