"""Records: how a write is decoded and checked, and how a record is rendered.

A record is rendered once, into the exact bytes that a default read returns; from then on a read is a slice.
`data` and `meta` are never decoded into values on this path: they pass through as they were sent.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from topics.core.check import check_jsonable, explain, show
from topics.core.errors import BatchTooLarge, InvalidRequest, PayloadTooLarge, RecordTooLarge
from topics.core.limits import (
    MAX_CLIENT_ID,
    MAX_CLIENT_SEQ,
    MAX_DEPTH,
    MAX_IDEMPOTENCY_KEY,
    MAX_INTEGER,
    MAX_META_KEYS,
    MAX_VIA,
    Limits,
)
from topics.core.tombstone import Hole, HoleReason

_NOTHING = Raw()
_ONE = struct.Struct("=I")
# What a rendered record carries around its meta: `,"meta":`.
META_KEY = b',"meta":'
DATA_KEY = b'"data":'
# From this many records on, one format of them all is cheaper than one each.
_MANY = 32


class PlainRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A record of nothing but `data`: most are, and they take the short way."""

    data: Raw
    tag: ClassVar[None] = None
    node: ClassVar[None] = None
    meta: ClassVar[Raw] = _NOTHING
    client_seq: ClassVar[None] = None
    hole: ClassVar[None] = None
    via: ClassVar[None] = None


class RecordIn(msgspec.Struct, gc=False):
    """One element of a write's `records`, as sent. `hole` marks seqs that are lost from the start."""

    data: Raw = _NOTHING
    tag: str | None = None
    node: str | None = None
    meta: Raw = _NOTHING
    client_seq: int | None = None
    hole: int | None = None
    reason: str | None = None
    # What a router of another server says that it has been through.
    via: str | None = None


Record = PlainRecord | RecordIn


class _WriteFields(msgspec.Struct, kw_only=True):
    node: str | None = None
    idempotency_key: str | None = None
    client_id: str | None = None
    create: bool = True
    config: dict[str, Any] | None = None
    disable_backpressure: bool = False


class Write(_WriteFields, kw_only=True):
    """The body of a write, decoded."""

    records: list[RecordIn]


class PlainWrite(_WriteFields, kw_only=True):
    """The body of a write that has only plain records."""

    records: list[PlainRecord]


AnyWrite = Write | PlainWrite


class TextWrite(_WriteFields, kw_only=True):
    """Plain records on their way into a spool, without an object a record: their `data` one behind the other in
    `text`, and where each begins and the last ends."""

    text: bytes | memoryview
    offsets: array[int]

    @property
    def count(self) -> int:
        return len(self.offsets) - 1


class Batch(msgspec.Struct, gc=False):
    """A run of rendered records with contiguous seqs: `body` is `{…},{…},` with a comma behind each.

    `sizes` counts `data` + `meta` as sent, `metas` the meta part alone; `tags`, `nodes` and `metas` are None where no
    record of the run has one.
    """

    first_seq: int
    ts: int
    lens: Sequence[int]
    sizes: Sequence[int]
    metas: Sequence[int] | None
    tags: list[str | None] | None
    nodes: list[str | None] | None
    body: bytes | memoryview
    size: int
    # The topics that a router's copies have been through.
    vias: list[str | None] | None = None
    # Where each record ends in `body`, if whoever rendered the run knew.
    ends: array[int] | None = None

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.lens) - 1


_decoder = msgspec.json.Decoder(Write)
_plain_decoder = msgspec.json.Decoder(PlainWrite)
_meta_decoder = msgspec.json.Decoder(dict[str, str])
_encode_text = msgspec.json.Encoder().encode
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def decode_write(body: bytes, limits: Limits) -> AnyWrite:
    """Decodes and checks the body of a write; what it returns obeys every limit of a record.

    Plain records are tried first: that fails at the first record that is not, and costs little until there.
    """
    check_body(body, limits)
    try:
        plain = _plain_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        write: Write = _decode(body, _decoder)
        check_write(write, limits)
        return write
    check_plain(plain, limits)
    return plain


def encode_write(records: Sequence[Any], **fields: Any) -> bytes:
    """Python values as the body of a write; `msgspec.Raw` data passes through as it is."""
    body = {"records": records, **fields}
    for name, value in body.items():
        check_jsonable(name, value)
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"records: cannot be written as JSON: {error}") from None


def decode_json(body: bytes, decoder: msgspec.json.Decoder[Any], limits: Limits) -> Any:
    """Decodes JSON that is valid UTF-8 and within the body limit; msgspec refuses lone surrogate escapes itself."""
    check_body(body, limits)
    return _decode(body, decoder)


def _decode(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(explain(error)) from None
    except RecursionError:
        # A record stands three levels deep in a body. What is within the limit was refused only because the caller
        # himself stands deep: another thread has a stack of its own.
        if _too_deep(body, MAX_DEPTH + 3):
            raise InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels") from None
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_decode, body, decoder).result()


def check_body(body: bytes, limits: Limits) -> None:
    if limits.max_body_bytes and len(body) > limits.max_body_bytes:
        raise PayloadTooLarge(f"the body has {len(body)} bytes, TOPICS_MAX_BODY_BYTES is {limits.max_body_bytes}")
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None


def check_plain(write: PlainWrite, limits: Limits) -> None:
    _check_fields(write, len(write.records), limits)
    if write.client_id is not None:
        _check_producer(write)
    datas = [record.data for record in write.records]
    _check_datas(datas, list(map(len, datas)), limits)


def check_text_write(write: TextWrite, datas: Sequence[Raw], sizes: Sequence[int], limits: Limits) -> None:
    """The same for records that have no objects; `datas` and `sizes` are those of `text`."""
    _check_fields(write, write.count, limits)
    _check_datas(datas, sizes, limits)


def _check_datas(datas: Sequence[Raw], sizes: Sequence[int], limits: Limits) -> None:
    largest = max(sizes)
    if largest > limits.max_record_bytes:
        _refuse_size(sizes.index(largest), largest, limits)
    if largest > 2 * MAX_DEPTH:
        for index, data in enumerate(datas):
            _check_depth(data, index)


def _check_fields(write: AnyWrite | TextWrite, count: int, limits: Limits) -> None:
    if not count:
        raise InvalidRequest("records must have at least 1 record")
    if count > limits.max_batch_records:
        raise BatchTooLarge(f"records has {count} records, TOPICS_MAX_BATCH_RECORDS is {limits.max_batch_records}")
    check_node(write.node, "node", limits)
    if write.idempotency_key is not None and not 1 <= len(write.idempotency_key) <= MAX_IDEMPOTENCY_KEY:
        raise InvalidRequest(f"idempotency_key must have 1 to {MAX_IDEMPOTENCY_KEY} characters")


def check_write(write: Write, limits: Limits) -> None:
    _check_fields(write, len(write.records), limits)
    # Flat for speed: one pass per record, the unusual parts behind one test each.
    most = limits.max_record_bytes
    for index, record in enumerate(write.records):
        if record.hole is not None or record.reason is not None:
            _check_hole(record, index)
            continue
        size = len(record.data)
        if not size:
            raise InvalidRequest(f"records[{index}].data is required")
        if record.tag is not None and len(record.tag.encode()) > limits.max_tag_bytes:
            raise InvalidRequest(f"records[{index}].tag has more than TOPICS_MAX_TAG_BYTES {limits.max_tag_bytes}")
        if record.via is not None:
            _check_via(record.via, index)
        if record.node is not None:
            check_node(record.node, f"records[{index}].node", limits)
        meta = record.meta
        if len(meta):
            if bytes(meta) == b"null":
                record.meta = _NOTHING
            else:
                size += len(meta)
                _check_meta(meta, index, limits)
        if size > most:
            _refuse_size(index, size, limits)
        _check_depth(record.data, index)
    _check_producer(write)


def _refuse_size(index: int, size: int, limits: Limits) -> None:
    raise RecordTooLarge(
        f"records[{index}]: data and meta have {size} bytes, TOPICS_MAX_RECORD_BYTES is {limits.max_record_bytes}"
    )


def _check_depth(data: Raw, index: int) -> None:
    # 513 levels need 1,026 bytes: most records are too short to be too deep.
    if len(data) > 2 * MAX_DEPTH and _too_deep(bytes(data), MAX_DEPTH):
        raise InvalidRequest(f"records[{index}].data nests deeper than {MAX_DEPTH} levels")


def check_node(node: str | None, field: str, limits: Limits) -> None:
    if node is not None and len(node.encode()) > limits.max_node_bytes:
        raise InvalidRequest(f"{field} has more than TOPICS_MAX_NODE_BYTES {limits.max_node_bytes}")


def _check_via(via: str | None, index: int) -> None:
    if via is not None and not (via.isascii() and 0 < len(via) <= MAX_VIA):
        raise InvalidRequest(f"records[{index}].via must be 1 to {MAX_VIA} ASCII characters")


def _check_hole(record: RecordIn, index: int) -> None:
    _check_via(record.via, index)
    if record.hole is None:
        raise InvalidRequest(f"records[{index}].reason needs hole")
    if not 1 <= record.hole <= MAX_INTEGER:
        raise InvalidRequest(f"records[{index}].hole must be between 1 and {MAX_INTEGER}, got {show(record.hole)}")
    if record.reason not in (None, "source_trim"):
        raise InvalidRequest(f'records[{index}].reason must be "source_trim", got {show(record.reason)}')
    if len(record.data) or len(record.meta) or record.tag is not None or record.node is not None:
        raise InvalidRequest(f"records[{index}]: a hole has no data, meta, tag or node")


def _check_meta(meta: Raw, index: int, limits: Limits) -> None:
    if len(meta) > limits.max_meta_bytes:
        raise InvalidRequest(
            f"records[{index}].meta has {len(meta)} bytes, TOPICS_MAX_META_BYTES is {limits.max_meta_bytes}"
        )
    try:
        pairs = _meta_decoder.decode(meta)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"records[{index}].meta must be an object of strings") from None
    if len(pairs) > MAX_META_KEYS:
        raise InvalidRequest(f"records[{index}].meta has {len(pairs)} keys, at most {MAX_META_KEYS}")
    for key in pairs:
        if key.startswith("$"):
            raise InvalidRequest(f"records[{index}].meta: keys that start with $ are the server's, got {show(key)}")


def _check_producer(write: AnyWrite) -> None:
    records: Sequence[Record] = write.records
    if write.client_id is None:
        for index, record in enumerate(records):
            if record.client_seq is not None:
                raise InvalidRequest(f"records[{index}].client_seq needs client_id")
        return
    if not 1 <= len(write.client_id) <= MAX_CLIENT_ID:
        raise InvalidRequest(f"client_id must have 1 to {MAX_CLIENT_ID} characters")
    last = -1
    for index, record in enumerate(records):
        if record.client_seq is None:
            raise InvalidRequest(f"records[{index}].client_seq is missing: with client_id all records have one")
        if not 0 <= record.client_seq <= MAX_CLIENT_SEQ:
            raise InvalidRequest(f"records[{index}].client_seq must be between 0 and {MAX_CLIENT_SEQ}")
        if record.client_seq <= last:
            raise InvalidRequest(f"records[{index}].client_seq must be greater than the one before it")
        last = record.client_seq


def _too_deep(text: bytes, most: int) -> bool:
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    depth = 0
    for match in _BRACKETS.finditer(text):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            if depth > most:
                return True
        elif token in (b"]", b"}"):
            depth -= 1
    return False


def size_of(record: Record) -> int:
    return len(record.data) + len(record.meta)


def render(records: Sequence[Record], node: str | None, first_seq: int, ts: int) -> list[Batch | Hole]:
    """Renders a write whose first record gets `first_seq`: one run, or several with holes between them."""
    if isinstance(records[0], PlainRecord) or not any([record.hole for record in records]):
        return [render_run(records, node, first_seq, ts)]
    pieces: list[Batch | Hole] = []
    seq = first_seq
    start = 0
    for index, record in enumerate(records):
        if record.hole is None:
            continue
        if index > start:
            pieces.append(render_run(records[start:index], node, seq, ts))
            seq += index - start
        reason: HoleReason = "source_trim"
        pieces.append(Hole(seq, seq + record.hole - 1, reason, record.via or ""))
        seq += record.hole
        start = index + 1
    if start < len(records):
        pieces.append(render_run(records[start:], node, seq, ts))
    return pieces


def render_run(records: Sequence[Record], node: str | None, first_seq: int, ts: int) -> Batch:
    if isinstance(records[0], PlainRecord):
        return render_plain([record.data for record in records], node, first_seq, ts)
    return _render_rich(records, node, first_seq, ts)


def render_plain(datas: Sequence[bytes | Raw], node: str | None, first_seq: int, ts: int) -> Batch:
    """A run of nothing but `data`: flat on purpose."""
    template = _template(node, ts)
    count = len(datas)
    nodes: list[str | None] | None = [node] * count if node is not None else None
    if count == 1:
        body = template % (first_seq, datas[0])
        size = len(datas[0])
        return Batch(first_seq, ts, (len(body),), (size,), None, None, nodes, body, size)
    sizes = array("I", list(map(len, datas)))
    if count < _MANY:
        parts = [template % (seq, data) for seq, data in enumerate(datas, first_seq)]
        return Batch(first_seq, ts, list(map(len, parts)), sizes, None, None, nodes, b"".join(parts), sum(sizes))
    fields: list[Any] = [None] * (2 * count)
    fields[::2] = range(first_seq, first_seq + count)
    fields[1::2] = datas
    body = template * count % tuple(fields)
    lens = _lens(sizes, len(template % (0, b"")) - 1, first_seq)
    return Batch(first_seq, ts, lens, sizes, None, None, nodes, body, sum(sizes))


def _template(node: str | None, ts: int) -> bytes:
    """How a record without meta is rendered, for `% (seq, data)`."""
    if node is None:
        return b'{"$seq":%%d,"$ts":%d,"data":%%b},' % ts
    return b'{"$seq":%%d,"$ts":%d,"$node":%b,"data":%%b},' % (ts, _encode_text(node).replace(b"%", b"%%"))


def template_of(node: str | None, ts: int) -> tuple[bytes, bytes, bytes]:
    """The same in pieces: before the seq, between seq and data, behind the data."""
    head, tail = b'{"$seq":', b"},"
    return head, (_template(node, ts) % (0, b""))[len(head) + 1 : -len(tail)], tail


def _lens(sizes: Sequence[int], around: int, first_seq: int) -> array[int]:
    """How long rendered records are; `around` counts everything but the seq and `data`."""
    digits = len(str(first_seq))
    if len(str(first_seq + len(sizes) - 1)) == digits:
        around += digits
        return array("I", [size + around for size in sizes])
    return array("I", [size + around + len(str(seq)) for seq, size in enumerate(sizes, first_seq)])


def _render_rich(records: Sequence[Record], node: str | None, first_seq: int, ts: int) -> Batch:
    parts: list[bytes] = []
    sizes: list[int] = []
    metas: list[int] = []
    nodes: list[str | None] = []
    tags: list[str | None] = []
    templates: dict[str | None, bytes] = {}
    for seq, record in enumerate(records, first_seq):
        own = record.node if record.node is not None else node
        data, meta = record.data, record.meta
        template = templates.get(own)
        if template is None:
            template = templates[own] = _template(own, ts)
        part = template % (seq, data)
        if len(meta):
            part = part[:-2] + META_KEY + meta + b"},"
        parts.append(part)
        sizes.append(len(data) + len(meta))
        metas.append(len(meta))
        nodes.append(own)
        tags.append(record.tag)
    return Batch(
        first_seq,
        ts,
        list(map(len, parts)),
        sizes,
        metas if any(metas) else None,
        tags if any(tag is not None for tag in tags) else None,
        nodes if any(each is not None for each in nodes) else None,
        b"".join(parts),
        sum(sizes),
        [record.via for record in records] if any([record.via for record in records]) else None,
    )


def split(batch: Batch, target: int) -> Iterator[Batch]:
    """The same records in runs of at most `target` bytes, or one record."""
    if len(batch.body) <= target:
        yield batch
        return
    batch.body = memoryview(batch.body)
    ends = list(accumulate(batch.lens))
    begin = offset = 0
    while begin < len(ends):
        stop = max(bisect_right(ends, offset + target, begin), begin + 1)
        yield _cut(batch, begin, stop, offset, ends[stop - 1])
        begin, offset = stop, ends[stop - 1]


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Some of the records, by their place in the run."""
    if start == 0 and stop == len(batch.lens):
        return batch
    offset = sum(batch.lens[:start])
    return _cut(batch, start, stop, offset, offset + sum(batch.lens[start:stop]))


def _cut(batch: Batch, start: int, stop: int, offset: int, end: int) -> Batch:
    part = slice(start, stop)
    return Batch(
        batch.first_seq + start,
        batch.ts,
        batch.lens[part],
        batch.sizes[part],
        batch.metas[part] if batch.metas is not None else None,
        batch.tags[part] if batch.tags is not None else None,
        batch.nodes[part] if batch.nodes is not None else None,
        batch.body[offset:end],
        sum(batch.sizes[part]),
        batch.vias[part] if batch.vias is not None else None,
    )


def contents(batch: Batch) -> list[tuple[bytes, bytes]]:
    """`data` and `meta` of every record, as they were sent; an absent meta is empty."""
    body = batch.body
    found: list[tuple[bytes, bytes]] = []
    end = 0
    for index, length in enumerate(batch.lens):
        end += length
        size = batch.sizes[index]
        meta = batch.metas[index] if batch.metas is not None else 0
        # Behind them stand a brace and a comma.
        stop = end - 2
        if meta:
            data_stop = stop - meta - len(META_KEY)
            found.append((bytes(body[data_stop - (size - meta) : data_stop]), bytes(body[stop - meta : stop])))
        else:
            found.append((bytes(body[stop - size : stop]), b""))
    return found


def pack(numbers: Sequence[int]) -> bytes:
    return _ONE.pack(numbers[0]) if len(numbers) == 1 else array("I", numbers).tobytes()


def unpack(data: bytes) -> array[int]:
    numbers = array("I")
    numbers.frombytes(data)
    return numbers
