"""The read rule: what a reader at a cursor gets, and what it is told of.

Per candidate seq, in this order: the floor and holes (they make the tombstone), TTL, deleted, node, match. Every seq
that was looked at advances the cursor. Decisions are made per chunk; only a chunk in which something unusual really
happens is walked record by record.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from decimal import Decimal
from typing import Any

import msgspec

from topics.core.check import check_count, check_flag, check_integer, show
from topics.core.errors import InvalidRequest
from topics.core.limits import DEFAULT_DIFF_BYTES, DEFAULT_DIFF_LIMIT, MAX_DIFF_BYTES, Limits
from topics.core.selector import Selector, parse_selector
from topics.core.tombstone import CarriedTombstone, Reason, Tombstone
from topics.engine.chunk import Chunk
from topics.engine.extent import Dead, Extent
from topics.engine.retention import first_at
from topics.engine.sealed import ChunkRef
from topics.engine.topic import Topic

# How many chunks one answer may walk through: a filter that matches nothing must not hold the loop.
_MAX_CHUNKS = 64
# Above this many parts one copy is cheaper than many small writes.
_MAX_BUFFERS = 32

_encode_json = msgspec.json.Encoder().encode
_decode_records = msgspec.json.Decoder(list[dict[str, Any]]).decode


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A diff, checked and clamped."""

    from_seq: int = 0
    to_seq: int | None = None
    limit: int = DEFAULT_DIFF_LIMIT
    nodes: tuple[str, ...] = ()
    match: Selector | None = None
    include_tags: bool = False
    include_meta: bool = True
    max_bytes: int = DEFAULT_DIFF_BYTES
    epoch: int | None = None
    # For routers of other servers: what a record has been through.
    include_via: bool = False


class Diff(msgspec.Struct, kw_only=True):
    """The answer of a read. `parts` are slices of ready JSON; `records` decodes them for a Python caller; `runs` are
    where they stand, for a reader of columns."""

    topic: str
    epoch: int
    parts: list[bytes | memoryview]
    count: int
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    scanned: int
    # Which topic of all servers it is, for routers that ask.
    instance: str | None = None
    runs: list[tuple[Chunk, int, int]] | None = None

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq

    @property
    def lag(self) -> int:
        return self.head_seq - self.next_from_seq

    @property
    def records_json(self) -> bytes:
        """The records as one JSON array."""
        return b"[" + b",".join(self.parts) + b"]"

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records as Python values; a number that no int or float holds is a `Decimal`."""
        try:
            return _decode_records(self.records_json)
        except msgspec.DecodeError:
            records: list[dict[str, Any]] = json.loads(self.records_json, parse_int=_int, parse_float=_float)
            return records

    def to_json(self, performance: bytes) -> bytes:
        """The body of an answer; `performance` is its timing, rendered."""
        return b"".join(self.to_buffers(performance))

    def to_buffers(self, performance: bytes) -> list[bytes | memoryview]:
        """The same as it stands in memory: what is written from here is not copied before the kernel does."""
        head = b'{"topic":"%b","epoch":%d,"records":[' % (self.topic.encode(), self.epoch)
        if self.instance is not None:
            head = b'{"instance":"%b",%b' % (self.instance.encode(), head[1:])
        end = (
            b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d,'
            b'"performance":%b}'
            % (
                self.next_from_seq,
                self.head_seq,
                self.earliest_seq,
                b"true" if self.next_from_seq == self.head_seq else b"false",
                b"null" if self.tombstone is None else _encode_json(self.tombstone),
                self.head_seq - self.next_from_seq,
                performance,
            )
        )
        if len(self.parts) <= _MAX_BUFFERS:
            buffers: list[bytes | memoryview] = [head]
            for part in self.parts:
                buffers += (part, b",")
            buffers[-1] = end if self.parts else head + end
            return buffers
        return [head, b",".join(self.parts), end]


def _int(text: str) -> int | Decimal:
    try:
        return int(text)
    except ValueError:
        return Decimal(text)


def _float(text: str) -> float | Decimal:
    number = float(text)
    return number if math.isfinite(number) else Decimal(text)


def make_query(
    limits: Limits,
    from_seq: Any = 0,
    to_seq: Any = None,
    limit: Any = 0,
    node: Any = (),
    match: Any = None,
    include_tags: Any = False,
    include_meta: Any = True,
    max_bytes: Any = None,
    epoch: Any = None,
) -> Query:
    """Checks and clamps the fields of a read."""
    check_integer("from_seq", from_seq, 0)
    if to_seq is not None:
        check_integer("to_seq", to_seq, 0)
    if epoch is not None:
        check_integer("epoch", epoch, 0)
    check_count("limit", limit)
    if max_bytes is not None:
        check_count("max_bytes", max_bytes)
    check_flag("include_tags", include_tags)
    check_flag("include_meta", include_meta)
    nodes = (node,) if isinstance(node, str) else () if node is None else node
    if not isinstance(nodes, list | tuple) or not all(isinstance(each, str) for each in nodes):
        raise InvalidRequest(f"node must be a string or an array of strings, got {show(node)}")
    return Query(
        from_seq=from_seq,
        to_seq=to_seq,
        limit=min(limit or DEFAULT_DIFF_LIMIT, limits.max_limit),
        nodes=tuple(nodes),
        match=parse_selector(match) if match is not None else None,
        include_tags=include_tags,
        include_meta=include_meta,
        max_bytes=min(max_bytes or DEFAULT_DIFF_BYTES, MAX_DIFF_BYTES),
        epoch=epoch,
    )


def diff(topic: Topic, query: Query, walk_as: type[Walk] | None = None) -> Diff:
    """Reads a topic whose watermarks are up to date."""
    head = topic.head_seq
    base = topic.config.seq_base
    stop = head if query.to_seq is None else min(query.to_seq, head)
    cursor = max(query.from_seq, base - 1)
    tombstone: Tombstone | None = None
    scanned = 0
    if query.from_seq > head or (query.epoch is not None and query.epoch != topic.epoch):
        # The cursor is from another life of this name.
        stop = max(stop, base - 1)
        cursor = min(topic.earliest_seq - 1, stop)
        tombstone = _tombstone(topic, base, stop, "recreated")
    elif cursor + 1 < topic.evict_floor and cursor < stop:
        last = min(topic.earliest_seq - 1, stop)
        tombstone = _tombstone(topic, cursor + 1, last, topic.loss_reason(cursor))
        cursor = last
    walk = (walk_as or Walk)(topic, query)
    while cursor < stop and not walk.is_over:
        hole = topic.hole_behind(cursor)
        if hole is not None and hole.first <= cursor + 1:
            if walk.count or tombstone is not None:
                break
            last = min(hole.last, stop)
            tombstone = _tombstone(topic, cursor + 1, last, hole.reason, hole.via if query.include_via else "")
            cursor = last
            continue
        limit = stop if hole is None else min(stop, hole.first - 1)
        reached = walk.through(cursor, limit)
        scanned += reached - cursor
        cursor = reached
    return Diff(
        topic=topic.name,
        epoch=topic.epoch,
        parts=walk.parts,
        count=walk.count,
        next_from_seq=cursor,
        head_seq=head,
        earliest_seq=topic.earliest_seq,
        tombstone=tombstone,
        scanned=scanned,
        runs=walk.runs if isinstance(walk, RunWalk) else None,
    )


def _tombstone(topic: Topic, first: int, last: int, reason: Reason, via: str = "") -> Tombstone:
    fields = (first, last, reason, last - first + 1, topic.earliest_seq, topic.head_seq)
    return CarriedTombstone(*fields, via) if via else Tombstone(*fields)


class Walk:
    """Collects records upwards until a limit of the query is reached, as slices of ready JSON."""

    def __init__(self, topic: Topic, query: Query) -> None:
        self._topic = topic
        self._query = query
        self._nodes = query.nodes if topic.config.dedupe_node else ()
        self._room = query.max_bytes
        self._chunks = 0
        self.parts: list[bytes | memoryview] = []
        self.count = 0
        self.is_over = False

    def through(self, cursor: int, last: int) -> int:
        """Examines the seqs behind `cursor` up to `last`, where no hole is; returns the last one examined."""
        topic = self._topic
        store = topic.store
        cursor = max(cursor, min(topic.earliest_seq - 1, last))
        for at in range(topic.extent_at(cursor + 1), len(topic.extents)):
            extent = topic.extents[at]
            if cursor >= last or extent.first_seq > last:
                break
            refs = extent.refs(store)
            for index in range(extent.locate(store, cursor + 1), len(refs)):
                ref = refs[index]
                if ref.first_seq > last:
                    break
                cursor = max(cursor, ref.first_seq - 1)
                start = cursor + 1 - ref.first_seq
                stop = min(last - ref.first_seq + 1, ref.count)
                dead = extent.dead.get(ref.first_seq)
                if extent.is_dead(ref):
                    cursor = ref.first_seq + stop - 1
                    continue
                self._chunks += 1
                taken = self._take(extent, ref, dead, start, stop)
                cursor = ref.first_seq + taken - 1
                if self.is_over:
                    return cursor
        # What is left is neither stored nor lost: deleted, and given back to the disk.
        return last

    def _take(self, extent: Extent, ref: Chunk | ChunkRef, dead: Dead | None, start: int, stop: int) -> int:
        """Takes what fits of records `start` to `stop`; returns the index behind the last one examined."""
        query = self._query
        chunk = extent.load(self._topic.store, ref)
        if self._chunks >= _MAX_CHUNKS:
            self.is_over = True
        drop = chunk.ids_of(self._nodes) if self._nodes and chunk.node_ids is not None else None
        wanted: set[int] | None = None
        if query.match is not None:
            wanted = {number for tag, number in chunk.tags.items() if query.match.matches(tag)}
            if not wanted:
                return stop
        extent.load(self._topic.store, ref, body=True)
        respell = (query.include_tags and chunk.tag_ids is not None) or (
            not query.include_meta and chunk.metas is not None
        )
        respell = respell or (query.include_via and chunk.via_ids is not None)
        if dead is not None or drop or wanted is not None or respell:
            return self._take_each(chunk, dead, drop, wanted, respell, start, stop)
        most = min(stop, start + query.limit - self.count)
        begin = chunk.start(start)
        end = bisect_right(chunk.ends, begin + self._room, start, most)
        if end == start and not self.count:
            end = start + 1
        if end < most or end - start >= query.limit - self.count:
            self.is_over = True
        if end > start:
            self._add_run(chunk, start, end)
            self.count += end - start
            self._room -= chunk.ends[end - 1] - begin
        return end

    def _take_each(
        self,
        chunk: Chunk,
        dead: Dead | None,
        drop: set[int] | None,
        wanted: set[int] | None,
        respell: bool,
        start: int,
        stop: int,
    ) -> int:
        query = self._query
        nodes = chunk.node_ids if drop else None
        for index in range(start, stop):
            if dead is not None and dead.has(index):
                continue
            if nodes is not None and drop and nodes[index] in drop:
                continue
            if wanted is not None and (chunk.tag_ids is None or chunk.tag_ids[index] not in wanted):
                continue
            size = self._add_one(chunk, index, respell)
            if not size:
                self.is_over = True
                return index
            self.count += 1
            self._room -= size
            if self.count >= query.limit or self._room <= 0:
                self.is_over = True
                return index + 1
        return stop

    def _add_run(self, chunk: Chunk, start: int, stop: int) -> None:
        self.parts.append(chunk.slice(start, stop))

    def _add_one(self, chunk: Chunk, index: int, respell: bool) -> int:
        """Adds a record and says how long it is; 0 when it does not fit."""
        if respell:
            part: bytes | memoryview = chunk.record(
                index, self._query.include_tags, self._query.include_meta, self._query.include_via
            )
        else:
            part = chunk.slice(index, index + 1)
        if self.count and len(part) + 1 > self._room:
            return 0
        self.parts.append(part)
        return len(part) + 1


class RunWalk(Walk):
    """The same, for a reader of columns: where the records stand, not their bytes."""

    def __init__(self, topic: Topic, query: Query) -> None:
        super().__init__(topic, query)
        self.runs: list[tuple[Chunk, int, int]] = []

    def _add_run(self, chunk: Chunk, start: int, stop: int) -> None:
        self.runs.append((chunk, start, stop))

    def _add_one(self, chunk: Chunk, index: int, respell: bool) -> int:
        size = chunk.ends[index] - chunk.start(index)
        if self.count and size > self._room:
            return 0
        last = self.runs[-1] if self.runs else None
        if last is not None and last[0] is chunk and last[2] == index:
            self.runs[-1] = (chunk, last[1], index + 1)
        else:
            self.runs.append((chunk, index, index + 1))
        return size


def seek(topic: Topic, ts: int) -> int:
    """The cursor of a reader who wants everything from `ts` on: below the first record that new, and below any loss
    that may have been."""
    if topic.lost_ts >= ts:
        return topic.config.seq_base - 1
    first = first_at(topic, ts)
    seq = max(first, topic.earliest_seq)
    # Records that were deleted since still say how new what stood before them may have been.
    known = _last_stored(topic, first)
    hole = topic.hole_behind(known)
    if hole is not None and hole.first < seq:
        return max(hole.first, known + 1) - 1
    return seq - 1


def _last_stored(topic: Topic, below: int) -> int:
    """The last seq below `below` whose time is known."""
    for extent in reversed(topic.extents[: topic.extent_at(below - 1) + 1]):
        for ref in reversed(extent.refs(topic.store)):
            if ref.first_seq < below:
                return min(ref.last_seq, below - 1)
    return topic.evict_floor - 1
