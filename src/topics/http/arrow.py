"""Arrow IPC streams in and out, so that bulk clients never parse JSON. pyarrow is an extra: without it this says so."""

from __future__ import annotations

import importlib
import struct
from array import array
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import Raw

from topics.core.check import explain
from topics.core.errors import InvalidRequest, NotAcceptable, UnsupportedMediaType
from topics.core.limits import Limits
from topics.core.records import META_KEY, RecordIn, Write, check_write
from topics.engine.chunk import Chunk
from topics.engine.read import Diff

MEDIA_TYPE = b"application/vnd.apache.arrow.stream"
MAX_LIMIT = 1_000_000
MAX_BYTES = 64 << 20
_EXTRA = "this needs pyarrow: install `topics[arrow]`"
_COLUMNS = ("data", "tag", "node", "meta")
# Kinds of Arrow messages.
_DICTIONARY, _RECORD_BATCH = 2, 3

_encode_json = msgspec.json.Encoder().encode
_raw_decoder = msgspec.json.Decoder(Raw)


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
        return importlib.import_module("pyarrow")
    except ImportError:
        raise missing(_EXTRA) from None


def encode_diff(answer: Diff, include_meta: bool) -> bytes:
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
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for chunk, start, stop in answer.runs or ():
            writer.write_batch(_batch(pa, schema, chunk, start, stop, include_meta))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]  # pyarrow is untyped


def _batch(pa: Any, schema: Any, chunk: Chunk, start: int, stop: int, include_meta: bool) -> Any:
    count = stop - start
    seqs = array("q", range(chunk.first_seq + start, chunk.first_seq + stop))
    times = array("q", [ts * 1000 for ts in chunk.ts[start:stop]])
    metas = chunk.metas[start:stop] if chunk.metas is not None else array("I", bytes(4 * count))
    body = memoryview(chunk.body or b"")
    # `…"data":DATA}` or `…"data":DATA,"meta":META}`, and a comma behind.
    ends = [
        end - 2 - (meta + len(META_KEY) if meta else 0) for end, meta in zip(chunk.ends[start:stop], metas, strict=True)
    ]
    lengths = [size - meta for size, meta in zip(chunk.sizes[start:stop], metas, strict=True)]
    data = b"".join([body[end - length : end] for end, length in zip(ends, lengths, strict=True)])
    offsets = array("i", accumulate(lengths, initial=0))
    text = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return pa.record_batch(
        [
            pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(seqs)]),
            pa.Array.from_buffers(pa.timestamp("us", "UTC"), count, [None, pa.py_buffer(times)]),
            _names(pa, chunk.node_ids, chunk.nodes, start, stop),
            _names(pa, chunk.tag_ids, chunk.tags, start, stop),
            _metas(pa, chunk, metas, start, stop) if include_meta else pa.nulls(count, pa.string()),
            text,
        ],
        schema=schema,
    )


def _names(pa: Any, ids: array[int] | None, table: dict[str, int], start: int, stop: int) -> Any:
    if ids is None:
        return pa.nulls(stop - start, pa.string())
    names = [None, *table]
    return pa.array([names[number] for number in ids[start:stop]], pa.string())


def _metas(pa: Any, chunk: Chunk, metas: array[int], start: int, stop: int) -> Any:
    if chunk.metas is None:
        return pa.nulls(stop - start, pa.string())
    body = memoryview(chunk.body or b"")
    texts = [
        str(body[end - 2 - meta : end - 2], "utf-8") if meta else None
        for end, meta in zip(chunk.ends[start:stop], metas, strict=True)
    ]
    return pa.array(texts, pa.string())


def decode_write(body: bytes, limits: Limits, create: bool, node: str | None) -> Write:
    """An Arrow stream with columns `data`, `tag`, `node`, `meta`; the rest of a write is in the query."""
    pa = _pyarrow(UnsupportedMediaType)
    try:
        _refuse_compressed(pa, body)
        table = pa.ipc.open_stream(body).read_all()
        # Offsets are the sender's: nothing may be looked at before they are proven to lie within their buffers.
        table.validate(full=True)
        if len(set(table.column_names)) != len(table.column_names):
            raise InvalidRequest("the Arrow stream has two columns of one name")
        columns = {name: _texts(pa, table, name) for name in _COLUMNS if name in table.column_names}
    except (pa.ArrowException, OSError, UnicodeDecodeError, struct.error) as error:
        raise InvalidRequest(f"the body is not an Arrow IPC stream: {str(error)[:200]}") from None
    if "data" not in columns:
        raise InvalidRequest("the Arrow stream has no column `data`")
    if table.num_rows > limits.max_batch_records:
        # The same refusal as for JSON, before any row is looked at.
        check_write(Write(records=[RecordIn()] * table.num_rows), limits)
    write = Write(records=list(_records(columns, table.num_rows)), create=create, node=node)
    check_write(write, limits)
    return write


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


def _texts(pa: Any, table: Any, name: str) -> list[str | None]:
    column = table.column(name)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type)):
        raise InvalidRequest(f"column {name} must be a string, got {column.type}")
    return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped


def _records(columns: dict[str, list[str | None]], rows: int) -> Iterator[RecordIn]:
    nothing: list[str | None] = [None] * rows
    metas, tags, nodes = (columns.get(name, nothing) for name in ("meta", "tag", "node"))
    for index, (data, meta, tag, node) in enumerate(zip(columns["data"], metas, tags, nodes, strict=True)):
        if data is None:
            raise InvalidRequest(f"records[{index}].data is required")
        yield RecordIn(
            _raw(data, f"records[{index}].data"),
            tag,
            node,
            _raw(meta, f"records[{index}].meta") if meta is not None else Raw(),
        )


def _raw(text: str, field: str) -> Raw:
    """JSON text, proven; what stands around a value is not part of it."""
    try:
        return _raw_decoder.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{field}: {explain(error)}") from None
    except RecursionError:
        raise InvalidRequest(f"{field} nests too deep") from None
