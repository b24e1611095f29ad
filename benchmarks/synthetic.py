"""A Spark source that reads nothing: the same rows again and again, in the schema of `topics`. What a job over it
reaches is what the same job over topics could reach at best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from topics.spark.columns import ddl

_ROWS = 65_536


class Span(InputPartition):
    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self.rows = rows


class Synthetic(DataSource):
    """Options: `rows`, `perPartition`, `perTrigger`, `data`. As a sink it takes rows and drops them."""

    @classmethod
    def name(cls) -> str:
        return "synthetic"

    def schema(self) -> str:
        return ddl("json")

    def reader(self, schema: StructType) -> DataSourceReader:
        return Reader(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's names
        return StreamReader(dict(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return Writer()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        return StreamWriter()


class Reader(DataSourceReader):
    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self.options = {name.lower(): value for name, value in options.items()}
        self.schema = schema

    def spans(self, rows: int) -> Sequence[Span]:
        per = int(self.options["perpartition"])
        return [Span(min(per, rows - start)) for start in range(0, rows, per)]

    def partitions(self) -> Sequence[InputPartition]:
        return self.spans(int(self.options["rows"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Span)
        batch = _batch(to_arrow_schema(self.schema, timezone="UTC"), self.options["data"])
        for start in range(0, partition.rows, _ROWS):
            yield batch.slice(0, min(_ROWS, partition.rows - start))


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._reader = Reader(options, schema)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"row": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(int(self._reader.options["pertrigger"]))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else 1 << 60
        return {"row": min(start["row"] + most, int(self._reader.options["rows"]))}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._reader.spans(end["row"] - start["row"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition)


class Writer(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class StreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Writer().write(iterator)


def _batch(schema: pa.Schema, data: str) -> pa.RecordBatch:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    values = {"topic": "synthetic", "epoch": 1, "ts": now, "data": data, "kind": "record"}
    arrays = [
        pa.array(range(_ROWS), pa.int64())
        if field.name == "seq"
        else pa.repeat(pa.scalar(values.get(field.name), field.type), _ROWS)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
