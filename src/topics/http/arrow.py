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
    TextWrite,
    Write,
    check_plain,
    check_text_write,
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
            # One batch for many chunks: a reader pays for each.
            writer.write_batch(_Columns(pa, pieces).batch(schema, include_meta))
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


class _Piece(msgspec.Struct):
    """Rows of one chunk: some of the span, which is all of it unless records in between are deleted."""

    chunk: Chunk
    span: range
    runs: list[range]

    @property
    def first_seq(self) -> int:
        return self.chunk.first_seq + self.span.start

    @property
    def length(self) -> int:
        return len(self.span)


def _gather(runs: Sequence[tuple[Chunk, int, int]]) -> Iterator[list[_Piece]]:
    """The runs of each chunk, and as many chunks at a time as make a batch."""
    pieces: list[_Piece] = []
    rows = size = 0
    for chunk, group in groupby(runs, lambda run: run[0]):
        if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield pieces
            pieces, rows, size = [], 0, 0
        own = [range(start, stop) for _, start, stop in group]
        rows += sum(map(len, own))
        size += chunk.ends[own[-1].stop - 1] - chunk.start(own[0].start)
        pieces.append(_Piece(chunk, range(own[0].start, own[-1].stop), own))
    if pieces:
        yield pieces


class _Columns:
    """Rows of some chunks as columns, made of their arrays by kernels: no record is looked at by Python."""

    def __init__(self, pa: Any, pieces: list[_Piece]) -> None:
        self._pa = pa
        self._compute = pa.compute
        self._pieces = pieces
        self._length = sum(piece.length for piece in pieces)
        # Which of the spans, if not all of them.
        self._rows = _positions(pa, pieces) if any(len(piece.runs) > 1 for piece in pieces) else None
        self._count = self._length if self._rows is None else len(self._rows)

    def batch(self, schema: Any, include_meta: bool) -> Any:
        chunks = [piece.chunk for piece in self._pieces]
        ts = self._numbers([chunk.ts for chunk in chunks], self._pa.int64())
        metas = None
        if any(chunk.metas is not None for chunk in chunks):
            metas = self._numbers([chunk.metas for chunk in chunks], self._pa.int32())
        body, stops = self._bodies()
        return self._pa.record_batch(
            [
                self._seqs(),
                self._compute.multiply(ts, 1000).view(schema.field("ts").type),
                self._names([(chunk.node_ids, chunk.nodes) for chunk in chunks]),
                self._names([(chunk.tag_ids, chunk.tags) for chunk in chunks]),
                self._metas(body, stops, metas) if include_meta and metas is not None else self._nothing(),
                self._datas(body, stops, metas),
            ],
            schema=schema,
        )

    def _some(self, values: Any) -> Any:
        return values if self._rows is None else values.take(self._rows)

    def _nothing(self) -> Any:
        return self._pa.nulls(self._count, self._pa.string())

    def _seqs(self) -> Any:
        counting = _counting(self._pa, _power_above(self._length), 1)
        first, last = self._pieces[0], self._pieces[-1]
        if last.first_seq + last.length - first.first_seq == self._length:
            return self._some(self._compute.add(counting[: self._length], first.first_seq))
        seqs = [self._compute.add(counting[: piece.length], piece.first_seq) for piece in self._pieces]
        return self._some(self._pa.concat_arrays(seqs))

    def _numbers(self, columns: Sequence[array[int] | None], kind: Any) -> Any:
        return self._some(self._array(b"".join(map(self._bytes, self._pieces, columns)), kind))

    def _bytes(self, piece: _Piece, column: array[int] | None) -> memoryview | bytes:
        """A column of a chunk; one that no record has is zeros."""
        return memoryview(column)[piece.span.start : piece.span.stop] if column is not None else bytes(4 * piece.length)

    def _array(self, data: bytes, kind: Any) -> Any:
        return self._pa.Array.from_buffers(kind, 8 * len(data) // kind.bit_width, [None, self._pa.py_buffer(data)])

    def _names(self, columns: Sequence[tuple[array[int] | None, dict[str, int]]]) -> Any:
        """The tables of all chunks are one: in that of each stands none at 0."""
        if all(ids is None for ids, _ in columns):
            return self._nothing()
        names: list[str | None] = []
        places: list[Any] = []
        for piece, (ids, table) in zip(self._pieces, columns, strict=True):
            own = self._array(bytes(self._bytes(piece, ids)), self._pa.int32())
            places.append(self._compute.add(own, self._int(len(names))))
            names += [None, *table]
        return self._pa.array(names, self._pa.string()).take(self._some(self._pa.concat_arrays(places)))

    def _bodies(self) -> tuple[bytes, Any]:
        """All bodies as one, and where each record's last value stops in it: before its brace and its comma."""
        bodies: list[memoryview] = []
        stops: list[Any] = []
        size = 0
        for piece in self._pieces:
            chunk = piece.chunk
            start, stop = chunk.start(piece.span.start), chunk.ends[piece.span.stop - 1]
            ends = self._array(bytes(self._bytes(piece, chunk.ends)), self._pa.int32())
            stops.append(self._compute.add(ends, self._int(size - start - len(b"},"))))
            bodies.append(memoryview(chunk.body or b"")[start:stop])
            size += stop - start
        return b"".join(bodies), self._some(self._pa.concat_arrays(stops))

    def _datas(self, body: bytes, stops: Any, metas: Any) -> Any:
        """`…"data":DATA}` or `…"data":DATA,"meta":META}`."""
        compute = self._compute
        sizes = self._numbers([piece.chunk.sizes for piece in self._pieces], self._pa.int32())
        if metas is not None:
            tails = compute.add(metas, self._int(len(META_KEY)))
            stops = compute.subtract(stops, compute.if_else(compute.greater(metas, 0), tails, metas))
            sizes = compute.subtract(sizes, metas)
        return self._texts(body, stops, sizes)

    def _metas(self, body: bytes, stops: Any, metas: Any) -> Any:
        texts = self._texts(body, stops, metas)
        return self._compute.if_else(self._compute.greater(metas, 0), texts, None)

    def _int(self, number: int) -> Any:
        return self._pa.scalar(number, self._pa.int32())

    def _texts(self, body: bytes, stops: Any, sizes: Any) -> Any:
        """Parts of the body. An Arrow array has no gaps: they are elements too here, and every second one is taken."""
        pa, count = self._pa, self._count
        offsets = array("i", bytes(8 * count))
        offsets[::2] = _ints(self._compute.subtract(stops, sizes))
        offsets[1::2] = _ints(stops)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(body)]
        both = pa.Array.from_buffers(pa.string(), 2 * count - 1, buffers)
        return both.take(_every_second(pa, count))


def decode_write(body: bytes, limits: Limits, create: bool, node: str | None) -> AnyWrite:
    """An Arrow stream with columns `data`, `tag`, `node`, `meta`; the rest of a write is in the query."""
    pa = _pyarrow(UnsupportedMediaType)
    columns = _checked_columns(pa, body, limits)
    return _as_write(columns, _prove(pa, columns["data"]), limits, create, node)


def decode_spooled(body: bytes, limits: Limits, create: bool, node: str | None) -> AnyWrite | TextWrite:
    """The same for a chunk of a transaction: plain records stay the text that they are."""
    pa = _pyarrow(UnsupportedMediaType)
    columns = _checked_columns(pa, body, limits)
    column = columns["data"]
    datas = _prove(pa, column)
    if datas and _is_plain(columns):
        offsets = _offsets(column)
        if offsets[0] == 0:
            write = TextWrite(
                text=memoryview(column.buffers()[2])[: offsets[-1]], offsets=offsets, create=create, node=node
            )
            check_text_write(write, datas, _ints(pa.compute.binary_length(column)), limits)
            return write
    return _as_write(columns, datas, limits, create, node)


def _as_write(
    columns: dict[str, Any], proven: list[Raw] | None, limits: Limits, create: bool, node: str | None
) -> AnyWrite:
    datas = proven or _prove_each(columns["data"])
    if _is_plain(columns):
        plain = PlainWrite(records=list(map(PlainRecord, datas)), create=create, node=node)
        check_plain(plain, limits)
        return plain
    write = Write(records=list(_records(datas, columns)), create=create, node=node)
    check_write(write, limits)
    return write


def _is_plain(columns: dict[str, Any]) -> bool:
    return all(column.null_count == len(column) for name, column in columns.items() if name != "data")


def _checked_columns(pa: Any, body: bytes, limits: Limits) -> dict[str, Any]:
    columns = _read_columns(pa, body)
    if "data" not in columns:
        raise InvalidRequest("the Arrow stream has no column `data`")
    rows = len(columns["data"])
    if rows > limits.max_batch_records:
        # The same refusal as for JSON, before any row is looked at.
        check_write(Write(records=[RecordIn()] * rows), limits)
    return columns


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


def _offsets(texts: Any) -> array[int]:
    """Where the elements of an Arrow array of strings begin, and where the last one ends."""
    offsets = array("i")
    offsets.frombytes(texts.buffers()[1].slice(4 * texts.offset, 4 * (len(texts) + 1)))
    return offsets


def _positions(pa: Any, pieces: list[_Piece]) -> Any:
    """Where the rows stand in all spans together."""
    positions = array("q")
    base = 0
    for piece in pieces:
        for run in piece.runs:
            positions.extend(range(base + run.start - piece.span.start, base + run.stop - piece.span.start))
        base += piece.length
    return pa.Array.from_buffers(pa.int64(), len(positions), [None, pa.py_buffer(positions)])


def _every_second(pa: Any, count: int) -> Any:
    return _counting(pa, _power_above(count), 2)[:count]


def _power_above(count: int) -> int:
    return 1 << count.bit_length()


@lru_cache(maxsize=32)
def _counting(pa: Any, count: int, step: int) -> Any:
    numbers = array("q", range(0, count * step, step))
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(numbers)])
