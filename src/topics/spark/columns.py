"""The columns of a source's rows, and how they are filled from what the server sends."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from topics.core.errors import InvalidRequest
from topics.core.tombstone import Tombstone
from topics.spark.options import MetaForm

_COLUMNS = {
    "topic": "string",
    "epoch": "bigint",
    "seq": "bigint",
    "ts": "timestamp",
    "node": "string",
    "tag": "string",
    "meta": "string",
    "data": "string",
    "kind": "string",
    "gap_from": "bigint",
    "gap_to": "bigint",
    "reason": "string",
}
# What every row has, a tombstone too.
_ALWAYS = ("topic", "epoch", "seq", "kind")
_META_MAP = "map<string,string>"
# As many rows are made of a repeated value at once; a batch takes a slice.
_REPEATED = 1 << 16
_decode_meta = msgspec.json.Decoder(dict[str, str]).decode


def ddl(meta: MetaForm) -> str:
    return ", ".join(f"{name} {_type(name, meta)}" for name in _COLUMNS)


def _type(name: str, meta: MetaForm) -> str:
    return _META_MAP if name == "meta" and meta == "map" else _COLUMNS[name]


def check_schema(schema: StructType, meta: MetaForm) -> None:
    """A user may ask for fewer columns, or in another order; what is not asked for is not sent to Spark."""
    for field in schema.fields:
        if field.name not in _COLUMNS:
            raise InvalidRequest(f"there is no column {field.name!r}; there are {', '.join(_COLUMNS)}")
        wanted, given = _type(field.name, meta), field.dataType.simpleString()
        if given != wanted:
            raise InvalidRequest(f"the column {field.name} is a {wanted}, got {given}")
        if not field.nullable and field.name not in _ALWAYS:
            raise InvalidRequest(f"the column {field.name} may be null: a tombstone has none, and not every record has")


class Columns:
    """Makes the batches of one topic's instance. Spark takes exactly the types of its schema."""

    def __init__(self, schema: StructType, topic: str, epoch: int) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self.epoch = epoch
        self._topic = topic
        self._repeated: dict[str, Any] = {}

    def records(self, answer: pa.RecordBatch) -> pa.RecordBatch:
        count = answer.num_rows
        return self._batch([self._of_record(field, answer, count) for field in self._schema])

    def _of_record(self, field: pa.Field, answer: pa.RecordBatch, count: int) -> pa.Array:
        name = field.name
        if name in ("seq", "ts", "node", "tag", "data"):
            return answer.column(name)
        if name == "meta":
            metas = answer.column(name)
            return metas if pa.types.is_string(field.type) else _maps(metas, field.type)
        if count > _REPEATED or name not in self._repeated:
            value = {"topic": self._topic, "epoch": self.epoch, "kind": "record"}.get(name)
            self._repeated[name] = pa.repeat(pa.scalar(value, field.type), max(count, _REPEATED))
        return self._repeated[name].slice(0, count)

    def tombstone(self, gap_from: int, gap_to: int, reason: str) -> pa.RecordBatch:
        row = {
            "topic": self._topic,
            "epoch": self.epoch,
            "seq": gap_to,
            "kind": "tombstone",
            "gap_from": gap_from,
            "gap_to": gap_to,
            "reason": reason,
        }
        return self._batch([pa.array([row.get(field.name)], field.type) for field in self._schema])

    def _batch(self, arrays: list[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _maps(metas: pa.Array, kind: pa.MapType) -> pa.Array:
    if metas.null_count == len(metas):
        return pa.nulls(len(metas), kind)
    pairs = [None if meta is None else list(_decode_meta(meta).items()) for meta in metas.to_pylist()]
    return pa.array(pairs, kind)


class Told(msgspec.Struct):
    """What an answer in columns says beside its records."""

    epoch: int
    next_from_seq: int
    head_seq: int
    tombstone: Tombstone | None = None


def told_of(schema: pa.Schema) -> Told:
    return msgspec.json.decode(schema.metadata[b"topics"], type=Told)
