"""What a row says about its record: checked once against the schema, then taken apart in columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    FloatType,
    LongType,
    MapType,
    StringType,
    StructType,
    VariantType,
)

from topics.core.errors import InvalidRequest
from topics.spark.spooling import Spool

_TEXTS = ("topic", "tag", "node", "kind", "reason")
_GAPS = ("gap_from", "gap_to")
_encode = msgspec.json.Encoder(decimal_format="number").encode


class Rows:
    """`data` is JSON text if it is a string, and is written as JSON if it is anything else. A row whose `kind` is
    `tombstone` is a loss, and becomes a hole."""

    def __init__(self, schema: StructType, topic: str | None) -> None:
        self._topic = topic
        types = {field.name: field.dataType for field in schema.fields}
        if "data" not in types:
            raise InvalidRequest(f"there is no column `data`, got {', '.join(types) or 'no column'}")
        if topic is None and "topic" not in types:
            raise InvalidRequest("where do rows go? Set the option topic, or have a column `topic`")
        for name in _TEXTS:
            if name in types and not isinstance(types[name], StringType):
                raise InvalidRequest(f"the column {name} must be a string, got {types[name].simpleString()}")
        for name in _GAPS:
            if "kind" in types and name in types and not isinstance(types[name], LongType):
                raise InvalidRequest(f"the column {name} must be a bigint, got {types[name].simpleString()}")
        meta = types.get("meta")
        is_map = isinstance(meta, MapType) and isinstance(meta.keyType, StringType)
        if meta is not None and not is_map and not isinstance(meta, StringType):
            raise InvalidRequest(f"the column meta must be a string or a map of strings, got {meta.simpleString()}")
        within = set(_types(types["data"]))
        if VariantType in within:
            raise InvalidRequest(
                "the column data has a variant: use to_json, and how its numbers are spelled is Spark's"
            )
        self._has_floats = bool(within & {FloatType, DoubleType})
        self._has_losses = "kind" in types and all(name in types for name in _GAPS)
        self._names = set(types)

    def spool(self, batch: pa.RecordBatch, spool: Spool) -> None:
        """Sends a batch on its way, each topic's rows in their order."""
        first_row = spool.count_rows(batch.num_rows)
        if not batch.num_rows:
            return
        table = batch.append_column("$row", pc.add(_counting(batch.num_rows), first_row))
        for topic, rows in self._by_topic(table):
            for run, is_loss in self._runs(rows):
                if is_loss:
                    spool.add_losses(topic, list(_lengths(run)))
                else:
                    spool.add_records(topic, self._records(run))

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The option wins over the column, as in Spark's other sinks: a source's column says where rows were."""
        if self._topic is not None:
            yield self._topic, rows
            return
        column = rows.column("topic")
        if column.null_count:
            raise InvalidRequest(f"{_row(rows, pc.is_null(column))}: topic is null, and there is no option topic")
        names = pc.unique(column).to_pylist()
        for name in names:
            yield name, rows if len(names) == 1 else rows.filter(pc.equal(column, name))

    def _runs(self, rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """Records and losses apart, in their order."""
        if not self._has_losses:
            yield rows, False
            return
        losses = pc.fill_null(pc.equal(rows.column("kind"), "tombstone"), False)
        if not pc.any(losses).as_py():
            yield rows, False
            return
        flags = losses.to_pylist()
        start = 0
        for index in range(1, len(flags) + 1):
            if index == len(flags) or flags[index] != flags[start]:
                yield rows.slice(start, index - start), flags[start]
                start = index

    def _records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        data = rows.column("data")
        if data.null_count:
            raise InvalidRequest(f"{_row(rows, pc.is_null(data))}: data is null; JSON's null is the string 'null'")
        columns: dict[str, pa.Array] = {"$row": rows.column("$row"), "data": self._data(rows)}
        for name in ("tag", "node", "meta"):
            if name in self._names:
                columns[name] = _text(rows.column(name))
        return pa.RecordBatch.from_pydict(columns)

    def _data(self, rows: pa.RecordBatch) -> pa.Array:
        data = rows.column("data")
        if self._has_floats:
            for index, value in enumerate(data.to_pylist(maps_as_pydicts="strict")):
                if not _is_finite(value):
                    raise InvalidRequest(f"row {rows.column('$row')[index].as_py()}: JSON has no NaN and no Infinity")
        return _text(data)


@lru_cache(maxsize=4)
def _counting(count: int) -> pa.Array:
    return pa.array(range(count), pa.int64())


def _text(column: pa.Array) -> pa.Array:
    """A column as JSON text, or as the text that it is. A time is ISO 8601, bytes are base64."""
    if pa.types.is_string(column.type):
        return column
    if pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    values = column.to_pylist(maps_as_pydicts="strict")
    return pa.array([None if value is None else _encode(value).decode() for value in values], pa.string())


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


def _types(kind: DataType) -> Iterator[type[DataType]]:
    """A type and everything in it."""
    yield type(kind)
    if isinstance(kind, StructType):
        for field in kind.fields:
            yield from _types(field.dataType)
    elif isinstance(kind, ArrayType):
        yield from _types(kind.elementType)
    elif isinstance(kind, MapType):
        yield from _types(kind.keyType)
        yield from _types(kind.valueType)


def _lengths(losses: pa.RecordBatch) -> Iterator[int]:
    firsts, lasts = losses.column("gap_from").to_pylist(), losses.column("gap_to").to_pylist()
    for index, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        if first is None or last is None:
            number = losses.column("$row")[index].as_py()
            raise InvalidRequest(f"row {number}: a tombstone needs gap_from and gap_to")
        # A topic that was recreated may have lost nothing that has a seq; that it was is still to be seen.
        yield max(last - first + 1, 1)


def _row(rows: pa.RecordBatch, which: pa.Array) -> str:
    """Names the first row of which something holds."""
    return f"row {rows.filter(which).column('$row')[0].as_py()}"
