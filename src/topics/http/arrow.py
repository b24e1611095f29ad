"""Arrow IPC streams in and out, so that bulk clients never parse JSON. pyarrow is an extra: without it this says so."""

from __future__ import annotations

import importlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw

from topics.core.check import explain
from topics.core.errors import InvalidRequest, NotAcceptable, UnsupportedMediaType
from topics.core.limits import Limits
from topics.core.records import (
    META_KEY,
    AnyWrite,
    PlainRecord,
    PlainWrite,
    RecordIn,
    Write,
    check_plain,
    check_write,
)
from topics.engine.chunk import Chunk
from topics.engine.read import Diff

MEDIA_TYPE = b"application/vnd.apache.arrow.stream"
MAX_LIMIT = 1_000_000
MAX_BYTES = 64 << 20
# A batch ends with the chunk that reaches one of these.
_BATCH_ROWS = 1 << 16
_BATCH_BYTES = 16 << 20
_EXTRA = "this needs pyarrow: install `topics[arrow]`"
_COLUMNS = ("data", "tag", "node", "meta")
# Kinds of Arrow messages.
_DICTIONARY, _RECORD_BATCH = 2, 3

_encode_json = msgspec.json.Encoder().encode
_raw_decoder = msgspec.json.Decoder(Raw)
_raws_decoder = msgspec.json.Decoder(list[Raw])


def is_arrow(content_type: bytes | None) -> bool:
    return content_type is not None and content_type.split(b";", 1)[0].strip().lower() == MEDIA_TYPE


def is_accepted(accept: bytes | None) -> bool:
    return accept is not None and MEDIA_TYPE in accept


def wide(limits: Limits) -> Limits:
    """The bounds of a read in columns."""
    _pyarrow(NotAcceptable)
    return msgspec.structs.replace(limits, max_limit=MAX_LIMIT)


def budget(max_bytes: int | None) -> int:
    return min(max_bytes or MAX_BYTES, MAX_BYTES)


def _pyarrow(missing: type[NotAcceptable] | type[UnsupportedMediaType]) -> Any:
    try:
        importlib.import_module("pyarrow.compute")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise missing(_EXTRA) from None


def encode_diff(answer: Diff, include_meta: bool) -> list[bytes | memoryview]:
    """The records as columns; cursor fields and tombstone as JSON in the schema's metadata."""
    pa = _pyarrow(NotAcceptable)
    cursor = {
        "topic": answer.topic,
        "epoch": answer.epoch,
        "next_from_seq": answer.next_from_seq,
        "head_seq": answer.head_seq,
        "earliest_seq": answer.earliest_seq,
        "caught_up": answer.caught_up,
        "tombstone": answer.tombstone,
        "lag": answer.lag,
        "records_scanned": answer.scanned,
    }
    schema = pa.schema(
        [
            pa.field("seq", pa.int64(), nullable=False),
            pa.field("ts", pa.timestamp("us", "UTC"), nullable=False),
            pa.field("node", pa.string()),
            pa.field("tag", pa.string()),
            pa.field("meta", pa.string()),
            pa.field("data", pa.string(), nullable=False),
        ],
        metadata={"topics": _encode_json(cursor)},
    )
    sink = _Sink()
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), schema) as writer:
        for pieces in _gather(answer.runs or ()):
            batches = [_Piece(pa, chunk, runs).batch(schema, include_meta) for chunk, runs in pieces]
            # One batch for many chunks: a reader pays for each.
            table = pa.Table.from_batches(batches, schema)
            writer.write_table(table.combine_chunks() if len(batches) > 1 else table)
    return sink.parts


class _Sink:
    """Takes a stream as it is written, without copying it together."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self._size = 0

    def write(self, data: Any) -> int:
        part = data if isinstance(data, bytes) else memoryview(data)
        if part:
            self.parts.append(part)
            self._size += len(part)
        return len(part)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...


def _gather(runs: Sequence[tuple[Chunk, int, int]]) -> Iterator[list[tuple[Chunk, list[range]]]]:
    """The runs of each chunk, and as many chunks at a time as make a batch."""
    pieces: list[tuple[Chunk, list[range]]] = []
    rows = size = 0
    for chunk, group in groupby(runs, lambda run: run[0]):
        if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield pieces
            pieces, rows, size = [], 0, 0
        own = [range(start, stop) for _, start, stop in group]
        rows += sum(map(len, own))
        size += chunk.ends[own[-1].stop - 1] - chunk.start(own[0].start)
        pieces.append((chunk, own))
    if pieces:
        yield pieces


class _Piece:
    """Rows of one chunk as columns, made of its arrays by kernels: no record is looked at by Python."""

    def __init__(self, pa: Any, chunk: Chunk, runs: list[range]) -> None:
        self._pa = pa
        self._compute = pa.compute
        self._chunk = chunk
        self._span = slice(runs[0].start, runs[-1].stop)
        self._is_whole = len(runs) == 1
        # Which of the span: with records deleted in between, not all of it.
        self._rows = _positions(pa, self._span.start, runs)

    def batch(self, schema: Any, include_meta: bool) -> Any:
        pa, chunk = self._pa, self._chunk
        return pa.record_batch(
            [
                self._compute.add(self._rows, chunk.first_seq + self._span.start),
                self._compute.multiply(self._numbers(chunk.ts, pa.int64()), 1000).view(schema.field("ts").type),
                self._names(chunk.node_ids, chunk.nodes),
                self._names(chunk.tag_ids, chunk.tags),
                self._metas() if include_meta else self._nothing(),
                self._datas(),
            ],
            schema=schema,
        )

    def _numbers(self, column: array[int], kind: Any) -> Any:
        numbers = column[self._span]
        values = self._pa.Array.from_buffers(kind, len(numbers), [None, self._pa.py_buffer(numbers)])
        return values if self._is_whole else values.take(self._rows)

    def _nothing(self) -> Any:
        return self._pa.nulls(len(self._rows), self._pa.string())

    def _names(self, ids: array[int] | None, table: dict[str, int]) -> Any:
        if ids is None:
            return self._nothing()
        return self._pa.array([None, *table], self._pa.string()).take(self._numbers(ids, self._pa.uint32()))

    def _datas(self) -> Any:
        """`…"data":DATA}` or `…"data":DATA,"meta":META}`, and a comma behind."""
        stops = self._stops()
        sizes = self._numbers(self._chunk.sizes, self._pa.int32())
        if self._chunk.metas is not None:
            compute = self._compute
            metas = self._numbers(self._chunk.metas, self._pa.int32())
            tails = compute.add(metas, self._int(len(META_KEY)))
            stops = compute.subtract(stops, compute.if_else(compute.greater(metas, 0), tails, metas))
            sizes = compute.subtract(sizes, metas)
        return self._texts(stops, sizes)

    def _metas(self) -> Any:
        if self._chunk.metas is None:
            return self._nothing()
        sizes = self._numbers(self._chunk.metas, self._pa.int32())
        texts = self._texts(self._stops(), sizes)
        return self._compute.if_else(self._compute.greater(sizes, 0), texts, None)

    def _stops(self) -> Any:
        return self._compute.subtract(self._numbers(self._chunk.ends, self._pa.int32()), self._int(len(b"},")))

    def _int(self, number: int) -> Any:
        return self._pa.scalar(number, self._pa.int32())

    def _texts(self, stops: Any, sizes: Any) -> Any:
        """Parts of the body. An Arrow array has no gaps: they are elements too here, and every second one is taken."""
        pa, count = self._pa, len(stops)
        offsets = array("i", bytes(8 * count))
        offsets[::2] = _ints(self._compute.subtract(stops, sizes))
        offsets[1::2] = _ints(stops)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._chunk.body or b"")]
        both = pa.Array.from_buffers(pa.string(), 2 * count - 1, buffers)
        return both.take(_every_second(pa, count))


def decode_write(body: bytes, limits: Limits, create: bool, node: str | None) -> AnyWrite:
    """An Arrow stream with columns `data`, `tag`, `node`, `meta`; the rest of a write is in the query."""
    pa = _pyarrow(UnsupportedMediaType)
    columns = _read_columns(pa, body)
    if "data" not in columns:
        raise InvalidRequest("the Arrow stream has no column `data`")
    rows = len(columns["data"])
    if rows > limits.max_batch_records:
        # The same refusal as for JSON, before any row is looked at.
        check_write(Write(records=[RecordIn()] * rows), limits)
    datas = _prove(pa, columns["data"]) or _prove_each(columns["data"])
    if all(column.null_count == rows for name, column in columns.items() if name != "data"):
        plain = PlainWrite(records=list(map(PlainRecord, datas)), create=create, node=node)
        check_plain(plain, limits)
        return plain
    write = Write(records=list(_records(datas, columns)), create=create, node=node)
    check_write(write, limits)
    return write


def _read_columns(pa: Any, body: bytes) -> dict[str, Any]:
    try:
        _refuse_compressed(pa, body)
        table = pa.ipc.open_stream(body).read_all()
        # Offsets are the sender's: nothing may be looked at before they are proven to lie within their buffers.
        table.validate(full=True)
        if len(set(table.column_names)) != len(table.column_names):
            raise InvalidRequest("the Arrow stream has two columns of one name")
        return {name: _column(pa, table, name) for name in _COLUMNS if name in table.column_names}
    except (pa.ArrowException, OSError, UnicodeDecodeError, struct.error) as error:
        raise InvalidRequest(f"the body is not an Arrow IPC stream: {str(error)[:200]}") from None


def _prove(pa: Any, column: Any) -> list[Raw] | None:
    """Rows that are JSON, proven at once as one array of it; None where each needs a look of its own.

    There must be as many elements as rows, each as long as its row: then no byte is left over for white space, and each
    element is its row. Else rows like `1,2`, or `[1` and `2]`, would pass for others.
    """
    if column.null_count:
        return None
    rows = pa.ListArray.from_arrays(pa.array([0, len(column)], pa.int32()), column)
    joined = pa.compute.binary_join(rows, ",")[0].as_buffer()
    try:
        raws = _raws_decoder.decode(b"".join((b"[", joined, b"]")))
    except (msgspec.DecodeError, RecursionError):
        return None
    return raws if array("i", list(map(len, raws))) == _ints(pa.compute.binary_length(column)) else None


def _prove_each(column: Any) -> list[Raw]:
    raws: list[Raw] = []
    for index, text in enumerate(column.to_pylist()):
        if text is None:
            raise InvalidRequest(f"records[{index}].data is required")
        raws.append(_raw(text, f"records[{index}].data"))
    return raws


def _refuse_compressed(pa: Any, body: bytes) -> None:
    """Compressed buffers may unpack to anything; `content-encoding: gzip` is bounded, and does the same."""
    reader = pa.ipc.MessageReader.open_stream(body)
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if _is_compressed(message.metadata.to_pybytes()):
            raise UnsupportedMediaType("compressed Arrow buffers are not taken; use content-encoding: gzip")


def _is_compressed(metadata: bytes) -> bool:
    """Whether a message's flatbuffer names a body compression: the fourth field of a record batch."""
    message = struct.unpack_from("<I", metadata)[0]
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if not kind or not header:
        return False
    table = header + struct.unpack_from("<I", metadata, header)[0]
    if metadata[kind] == _DICTIONARY:
        batch = _field(metadata, table, 1)
        table = batch + struct.unpack_from("<I", metadata, batch)[0] if batch else table
    elif metadata[kind] != _RECORD_BATCH:
        return False
    return bool(_field(metadata, table, 3))


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer table stands; 0 if it is absent."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _column(pa: Any, table: Any, name: str) -> Any:
    column = table.column(name)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type)):
        raise InvalidRequest(f"column {name} must be a string, got {column.type}")
    texts = column.cast(pa.string())
    return texts.chunk(0) if texts.num_chunks == 1 else texts.combine_chunks()


def _records(datas: list[Raw], columns: dict[str, Any]) -> Iterator[RecordIn]:
    nothing: list[str | None] = [None] * len(datas)
    metas, tags, nodes = (columns[name].to_pylist() if name in columns else nothing for name in ("meta", "tag", "node"))
    for index, (data, meta, tag, node) in enumerate(zip(datas, metas, tags, nodes, strict=True)):
        yield RecordIn(data, tag, node, _raw(meta, f"records[{index}].meta") if meta is not None else Raw())


def _raw(text: str, field: str) -> Raw:
    """JSON text, proven; what stands around a value is not part of it."""
    try:
        return _raw_decoder.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{field}: {explain(error)}") from None
    except RecursionError:
        raise InvalidRequest(f"{field} nests too deep") from None


def _ints(numbers: Any) -> array[int]:
    """An Arrow array of int32 as one of Python."""
    ints = array("i")
    ints.frombytes(numbers.buffers()[1].slice(4 * numbers.offset, 4 * len(numbers)))
    return ints


def _positions(pa: Any, first: int, runs: list[range]) -> Any:
    """Where the rows of `runs` stand behind `first`."""
    if len(runs) == 1:
        return _counting(pa, _power_above(len(runs[0])), 1)[: len(runs[0])]
    positions = array("q")
    for run in runs:
        positions.extend(range(run.start - first, run.stop - first))
    return pa.Array.from_buffers(pa.int64(), len(positions), [None, pa.py_buffer(positions)])


def _every_second(pa: Any, count: int) -> Any:
    return _counting(pa, _power_above(count), 2)[:count]


def _power_above(count: int) -> int:
    return 1 << count.bit_length()


@lru_cache(maxsize=32)
def _counting(pa: Any, count: int, step: int) -> Any:
    numbers = array("q", range(0, count * step, step))
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(numbers)])
