"""What routers carry: one stretch of a source, shared by all that copy it, and each copy made of it.

The same code makes a copy when it is published and when the log is replayed, so both are the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Raw

from topics.core.records import Batch, Record, RecordIn, contents, part_of, render_plain, render_run
from topics.core.routing import RouterConfig
from topics.core.selector import Selector
from topics.core.tombstone import Hole
from topics.engine.topic import Topic

# What one fan-out carries at most, more or less: what is behind it is the next one's.
STRETCH_BYTES = 4 << 20
_STRETCH_PIECES = 1000

Piece = Batch | Hole


class Load:
    """What one kind of router takes of a cargo: `count` seqs, of which `records` are records with `size` bytes."""

    __slots__ = ("_parts", "count", "records", "size")

    def __init__(self) -> None:
        # The length of a hole and what it has been through, or records with what each has.
        self._parts: list[tuple[int, str] | tuple[list[bytes] | list[Record], list[str | None]]] = []
        self.count = 0
        self.records = 0
        self.size = 0

    def add_hole(self, length: int, via: str) -> None:
        self._parts.append((length, via))
        self.count += length

    def add_records(self, records: list[bytes] | list[Record], vias: list[str | None], size: int) -> None:
        if records:
            self._parts.append((records, vias))
            self.count += len(records)
            self.records += len(records)
            self.size += size

    def render(self, first_seq: int, ts: int) -> list[Piece]:
        """The copies, with seqs and a time of their own."""
        pieces: list[Piece] = []
        seq = first_seq
        for records, vias in self._parts:
            if isinstance(records, int):
                assert isinstance(vias, str)
                pieces.append(Hole(seq, seq + records - 1, "source_trim", vias))
                seq += records
                continue
            assert not isinstance(vias, str)
            if isinstance(records[0], bytes):
                batch = render_plain(records, None, seq, ts)
            else:
                batch = render_run(records, None, seq, ts)
            batch.vias = vias
            pieces.append(batch)
            seq += len(records)
        return pieces


class Cargo:
    """Seqs `first` to `last` of a source: `pieces` are what of them is not deleted, in order. `instance` names the
    source among all topics of all servers."""

    def __init__(self, first: int, last: int, pieces: Sequence[Piece], instance: str) -> None:
        self.first = first
        self.last = last
        self.pieces = pieces
        self._instance = instance
        self.has_vias = any([piece.via if isinstance(piece, Hole) else piece.vias is not None for piece in pieces])
        self._loads: dict[tuple[Selector | None, bool, bool, str], Load] = {}
        self._contents: dict[int, list[tuple[bytes, bytes]]] = {}

    def take(self, config: RouterConfig, dest: str) -> Load:
        """What a router takes: what its filter lets through and what has not been in `dest` before, and every loss."""
        key = (config.filter, config.preserve_node, config.preserve_tag, dest if self.has_vias else "")
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = Load()
            for number, piece in enumerate(self.pieces):
                if isinstance(piece, Hole):
                    if not has_been(piece.via, dest):
                        load.add_hole(piece.last - piece.first + 1, self._via(piece.via or None))
                else:
                    self._take_batch(load, number, piece, config, dest)
        return load

    def _take_batch(self, load: Load, number: int, batch: Batch, config: RouterConfig, dest: str) -> None:
        found = self._contents.get(number)
        if found is None:
            found = self._contents[number] = contents(batch)
        keep: Sequence[int] = list(chosen(batch, config.filter, dest))
        vias: list[str | None] = [self._via(batch.vias[index] if batch.vias is not None else None) for index in keep]
        if batch.metas is None and batch.nodes is None and batch.tags is None:
            size = batch.size if len(keep) == len(found) else sum(len(found[index][0]) for index in keep)
            load.add_records([found[index][0] for index in keep], vias, size)
            return
        tags = batch.tags if config.preserve_tag else None
        nodes = batch.nodes if config.preserve_node else None
        records: list[Record] = [
            RecordIn(
                Raw(found[index][0]),
                tags[index] if tags is not None else None,
                nodes[index] if nodes is not None else None,
                Raw(found[index][1]),
            )
            for index in keep
        ]
        load.add_records(records, vias, sum(batch.sizes[index] for index in keep))

    def _via(self, before: str | None) -> str:
        return self._instance if before is None else f"{before},{self._instance}"

    def fitting(self, config: RouterConfig, dest: str, count: int | None, size: int | None) -> int:
        """The last seq up to which what a router takes fits into so many records and bytes. Holes always do."""
        for piece in self.pieces:
            if isinstance(piece, Hole):
                continue
            for index in chosen(piece, config.filter, dest):
                if count is not None:
                    count -= 1
                if size is not None:
                    size -= piece.sizes[index]
                if (count is not None and count < 0) or (size is not None and size < 0):
                    return piece.first_seq + index - 1
        return self.last

    def until(self, last: int) -> Cargo:
        """The same up to a seq."""
        return Cargo(self.first, last, list(between(self.pieces, self.first - 1, last)), self._instance)


def chosen(batch: Batch, wanted: Selector | None, dest: str) -> Iterable[int]:
    """Which records of a run pass a filter, and have not been in a topic."""
    tags, vias = batch.tags, batch.vias
    indexes: Iterable[int] = range(len(batch.lens))
    if wanted is not None:
        if tags is None:
            return ()
        indexes = [index for index in indexes if (tag := tags[index]) is not None and wanted.matches(tag)]
    if vias is not None:
        been = {via: has_been(via or "", dest) for via in set(vias)}
        indexes = [index for index in indexes if not been[vias[index]]]
    return indexes


def has_been(via: str, dest: str) -> bool:
    """Whether the way of a record or a loss led through a topic."""
    return bool(dest) and dest in via.split(",")


def first_of(piece: Piece) -> int:
    return piece.first if isinstance(piece, Hole) else piece.first_seq


def last_of(piece: Piece) -> int:
    return piece.last if isinstance(piece, Hole) else piece.last_seq


def between(pieces: Iterable[Piece], cursor: int, last: int) -> Iterator[Piece]:
    """Of some pieces, what lies behind a cursor, up to a seq."""
    for piece in pieces:
        first, end = max(first_of(piece), cursor + 1), min(last_of(piece), last)
        if first > end:
            continue
        if isinstance(piece, Hole):
            yield Hole(first, end, piece.reason, piece.via)
        else:
            yield part_of(piece, first - piece.first_seq, end - piece.first_seq + 1)


def waiting(outgoing: deque[Piece], cursor: int, head: int) -> tuple[list[Piece], int]:
    """Of what waits to be forwarded, a stretch behind a cursor, and where it ends."""
    taken: list[Piece] = []
    size = 0
    for piece in between(outgoing, cursor, head):
        if size >= STRETCH_BYTES or len(taken) == _STRETCH_PIECES:
            return taken, last_of(taken[-1])
        taken.append(piece)
        size += len(piece.body) if isinstance(piece, Batch) else 0
    return taken, last_of(taken[-1]) if taken else cursor


def retained(topic: Topic, cursor: int) -> tuple[list[Piece], int]:
    """A stretch of the log itself behind a cursor, and where it ends: live records, and what is lost among them."""
    taken: list[Piece] = []
    size = 0
    at = cursor
    if at + 1 < topic.evict_floor:
        taken.append(Hole(at + 1, topic.earliest_seq - 1, "source_trim"))
        at = topic.earliest_seq - 1
    while at < topic.head_seq and size < STRETCH_BYTES and len(taken) < _STRETCH_PIECES:
        live = topic.first_live(at + 1)
        hole = topic.hole_behind(at)
        if hole is not None and hole.first < live:
            taken.append(Hole(max(hole.first, at + 1), hole.last, "source_trim", hole.via))
            at = hole.last
            continue
        if live == topic.next_seq:
            return taken, topic.head_seq
        batch = _live_run(topic, live)
        taken.append(batch)
        size += len(batch.body)
        at = batch.last_seq
    return taken, at


def _live_run(topic: Topic, seq: int) -> Batch:
    """Live records from a live one on, as far as nothing is between them and they stand together."""
    found = topic.find(seq)
    assert found is not None
    extent, ref = found
    chunk = extent.load(topic.store, ref, body=True)
    dead = extent.dead.get(ref.first_seq)
    start = stop = seq - ref.first_seq
    while stop < ref.count and (dead is None or not dead.has(stop)):
        stop += 1
    return chunk.batch(start, stop)
