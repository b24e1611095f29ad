"""A chunk: some 256 KiB of rendered records with contiguous seqs, and small arrays beside them.

What a read needs to know of a record (where it ends, when it came, how large it is, who wrote it, its tag) stands in
the arrays; the body holds the bytes that a default read returns, a comma behind each record.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, islice

import msgspec

from topics.core.records import DATA_KEY, META_KEY, Batch

TARGET_BYTES = 256 << 10

_encode_text = msgspec.json.Encoder().encode


class Chunk:
    """`body` is None while only the arrays of a sealed chunk are loaded.

    `metas`, `node_ids`, `tag_ids` and `via_ids` are None while no record has one; ids count from 1, 0 is none.
    """

    __slots__ = (
        *("body", "ends", "first_seq", "metas", "node_ids", "nodes", "size", "sizes", "tag_ids", "tags"),
        *("ts", "via_ids", "vias"),
    )

    def __init__(self, first_seq: int) -> None:
        self.first_seq = first_seq
        self.ends: array[int] = array("I")
        self.ts: array[int] = array("Q")
        self.sizes: array[int] = array("I")
        self.metas: array[int] | None = None
        self.node_ids: array[int] | None = None
        self.tag_ids: array[int] | None = None
        self.via_ids: array[int] | None = None
        self.nodes: dict[str, int] = {}
        self.tags: dict[str, int] = {}
        self.vias: dict[str, int] = {}
        self.size = 0
        self.body: bytearray | bytes | memoryview | None = bytearray()

    @property
    def count(self) -> int:
        return len(self.ends)

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.ends) - 1

    @property
    def ts_first(self) -> int:
        return self.ts[0]

    @property
    def ts_last(self) -> int:
        return self.ts[-1]

    @property
    def is_full(self) -> bool:
        return not isinstance(self.body, bytearray) or len(self.body) >= TARGET_BYTES

    def append(self, batch: Batch) -> None:
        body = self.body
        assert isinstance(body, bytearray), "only an open chunk grows"
        assert batch.first_seq == self.first_seq + len(self.ends)
        have, more = len(self.ends), len(batch.lens)
        if more == 1:
            self.ends.append(len(body) + batch.lens[0])
            self.ts.append(batch.ts)
        elif batch.ends is not None and not have:
            self.ends = batch.ends[:]
            self.ts.extend(array("Q", (batch.ts,)) * more)
        else:
            self.ends.extend(islice(accumulate(batch.lens, initial=len(body)), 1, None))
            self.ts.extend(array("Q", (batch.ts,)) * more)
        if not body and len(batch.body) >= TARGET_BYTES // 2:
            # A large run is a chunk of its own: its bytes stay where they are.
            self.body = batch.body
        else:
            body += batch.body
        self.sizes.extend(batch.sizes)
        self.size += batch.size
        if batch.metas is not None or self.metas is not None:
            self.metas = _extend(self.metas, have, more, batch.metas)
        if batch.nodes is not None or self.node_ids is not None:
            self.node_ids = _extend(self.node_ids, have, more, _ids(self.nodes, batch.nodes))
        if batch.tags is not None or self.tag_ids is not None:
            self.tag_ids = _extend(self.tag_ids, have, more, _ids(self.tags, batch.tags))
        if batch.vias is not None or self.via_ids is not None:
            self.via_ids = _extend(self.via_ids, have, more, _ids(self.vias, batch.vias))

    def close(self) -> None:
        """No more records: the body becomes immutable."""
        if isinstance(self.body, bytearray):
            self.body = bytes(self.body)

    def start(self, index: int) -> int:
        return self.ends[index - 1] if index else 0

    def slice(self, start: int, stop: int) -> bytes | memoryview:
        """Records `start` to `stop` (exclusive) as a read returns them, without the last comma.

        Not copied where the body can change no more; an open one is copied, or it could not grow.
        """
        body = self.body
        assert body is not None
        part = memoryview(body)[self.start(start) : self.ends[stop - 1] - 1]
        return bytes(part) if isinstance(body, bytearray) else part

    def record(self, index: int, include_tags: bool, include_meta: bool, include_via: bool = False) -> bytes:
        """One record, with the parts that a reader asked for."""
        whole = bytes(self.slice(index, index + 1))
        via = self.via(index) if include_via else None
        if via is not None:
            whole = b'{"$via":' + _encode_text(via) + b"," + whole[1:]
        meta = self.metas[index] if self.metas is not None else 0
        data = self.sizes[index] - meta
        tag = self.tag(index) if include_tags else None
        tail = len(META_KEY) + meta if meta else 0
        if tag is not None:
            at = len(whole) - 1 - tail - data - len(DATA_KEY)
            head = whole[:at] + b'"$tag":' + _encode_text(tag) + b"," + whole[at : len(whole) - 1 - tail]
        elif meta and not include_meta:
            head = whole[: len(whole) - 1 - tail]
        else:
            return whole
        return head + (whole[len(whole) - 1 - tail :] if include_meta else b"}")

    def parts(self, index: int) -> tuple[bytes, bytes]:
        """A record's `data` and `meta`, as they were sent; an absent meta is empty."""
        whole = bytes(self.slice(index, index + 1))
        meta = self.metas[index] if self.metas is not None else 0
        end = len(whole) - 1
        tail = whole[end - meta : end]
        data_end = end - (meta + len(META_KEY) if meta else 0)
        return whole[data_end - (self.sizes[index] - meta) : data_end], tail

    def node(self, index: int) -> str | None:
        if self.node_ids is None or not (number := self.node_ids[index]):
            return None
        return next(islice(self.nodes, number - 1, None))

    def tag(self, index: int) -> str | None:
        if self.tag_ids is None or not (number := self.tag_ids[index]):
            return None
        return next(islice(self.tags, number - 1, None))

    def via(self, index: int) -> str | None:
        if self.via_ids is None or not (number := self.via_ids[index]):
            return None
        return next(islice(self.vias, number - 1, None))

    def batch(self, start: int, stop: int) -> Batch:
        """Records `start` to `stop` (exclusive) as a run; the time of the first stands for all."""
        assert self.body is not None
        begin, ends = self.start(start), self.ends[start:stop]
        return Batch(
            self.first_seq + start,
            self.ts[start],
            [end - before for before, end in zip([begin, *ends], ends, strict=False)],
            self.sizes[start:stop],
            self.metas[start:stop] if self.metas is not None else None,
            _names(self.tags, self.tag_ids, start, stop),
            _names(self.nodes, self.node_ids, start, stop),
            bytes(memoryview(self.body)[begin : ends[-1]]),
            sum(self.sizes[start:stop]),
            _names(self.vias, self.via_ids, start, stop),
        )

    def ids_of(self, names: Sequence[str]) -> set[int]:
        """The ids that these nodes have here."""
        return {number for name in names if (number := self.nodes.get(name))}

    def encode_index(self) -> bytes:
        return _encode_index(
            _Index(
                self.first_seq,
                self.ends.tobytes(),
                self.ts.tobytes(),
                self.sizes.tobytes(),
                _bytes(self.metas),
                _bytes(self.node_ids),
                _bytes(self.tag_ids),
                list(self.nodes),
                list(self.tags),
                _bytes(self.via_ids),
                list(self.vias),
            )
        )


class _Index(msgspec.Struct, array_like=True):
    first_seq: int
    ends: bytes
    ts: bytes
    sizes: bytes
    metas: bytes | None
    node_ids: bytes | None
    tag_ids: bytes | None
    nodes: list[str]
    tags: list[str]
    via_ids: bytes | None = None
    vias: list[str] = []


_encode_index = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(_Index).decode


def decode_chunk(index: bytes | memoryview, size: int = 0) -> Chunk:
    """A sealed chunk, its body yet to come; its size stands beside it."""
    stored = _decode_index(index)
    chunk = Chunk(stored.first_seq)
    chunk.ends.frombytes(stored.ends)
    chunk.ts.frombytes(stored.ts)
    chunk.sizes.frombytes(stored.sizes)
    chunk.metas = _array(stored.metas)
    chunk.node_ids = _array(stored.node_ids)
    chunk.tag_ids = _array(stored.tag_ids)
    chunk.via_ids = _array(stored.via_ids)
    chunk.vias = {name: number for number, name in enumerate(stored.vias, 1)}
    chunk.nodes = {name: number for number, name in enumerate(stored.nodes, 1)}
    chunk.tags = {name: number for number, name in enumerate(stored.tags, 1)}
    chunk.size = size
    chunk.body = None
    return chunk


def without(chunk: Chunk, is_dead: Sequence[bool]) -> Chunk:
    """The same chunk with the bytes of dead records left out; seqs keep their places."""
    assert chunk.body is not None
    thin = Chunk(chunk.first_seq)
    for name in ("ts", "sizes", "metas", "node_ids", "tag_ids", "via_ids", "nodes", "tags", "vias", "size"):
        setattr(thin, name, getattr(chunk, name))
    body = bytearray()
    view = memoryview(chunk.body)
    for index, dead in enumerate(is_dead):
        if not dead:
            body += view[chunk.start(index) : chunk.ends[index]]
        thin.ends.append(len(body))
    thin.body = bytes(body)
    return thin


def join(first: Chunk, second: Chunk) -> Chunk:
    """Two neighbours as one chunk."""
    assert first.last_seq + 1 == second.first_seq
    assert first.body is not None
    assert second.body is not None
    joined = Chunk(first.first_seq)
    base = first.ends[-1]
    joined.ends = first.ends + array("I", [base + end for end in second.ends])
    joined.ts = first.ts + second.ts
    joined.sizes = first.sizes + second.sizes
    joined.size = first.size + second.size
    joined.body = bytes(first.body) + bytes(second.body)
    if first.metas is not None or second.metas is not None:
        joined.metas = _extend(_copy(first.metas), first.count, second.count, second.metas)
    for ids, table in (("node_ids", "nodes"), ("tag_ids", "tags"), ("via_ids", "vias")):
        one, two = getattr(first, ids), getattr(second, ids)
        if one is not None or two is not None:
            names = dict(getattr(first, table))
            other = [None, *getattr(second, table)]
            moved = _ids(names, [other[number] for number in two]) if two is not None else None
            setattr(joined, ids, _extend(_copy(one), first.count, second.count, moved))
            setattr(joined, table, names)
    return joined


def _extend(column: array[int] | None, have: int, more: int, values: Sequence[int] | None) -> array[int]:
    """A column that may begin in the middle: what came before has none."""
    if column is None:
        column = array("I", bytes(4 * have))
    column.extend(values if values is not None else array("I", bytes(4 * more)))
    return column


def _ids(table: dict[str, int], names: Sequence[str | None] | None) -> list[int] | None:
    if names is None:
        return None
    return [0 if name is None else table.setdefault(name, len(table) + 1) for name in names]


def _names(table: dict[str, int], ids: array[int] | None, start: int, stop: int) -> list[str | None] | None:
    if ids is None:
        return None
    names = [None, *table]
    return [names[number] for number in ids[start:stop]]


def _copy(column: array[int] | None) -> array[int] | None:
    return None if column is None else column[:]


def _bytes(column: array[int] | None) -> bytes | None:
    return None if column is None else column.tobytes()


def _array(data: bytes | None) -> array[int] | None:
    if data is None:
        return None
    column: array[int] = array("I")
    column.frombytes(data)
    return column
