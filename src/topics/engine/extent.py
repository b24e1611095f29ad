"""An extent: a stretch of one topic's log that is kept together, in memory first and then in a segment file.

An extent knows exactly how many of its records live and how many bytes they have. Deletions inside it are bits over
its chunks (`dead`); everything below the topic's `earliest_seq` is dead without bits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

import msgspec

from topics.core.records import Batch
from topics.core.selector import Selector
from topics.engine.chunk import TARGET_BYTES, Chunk, join
from topics.engine.sealed import ChunkRef, ChunkStore, Footer, Place

_first_seq = attrgetter("first_seq")


class Dead(msgspec.Struct, array_like=True):
    """The deleted records of one chunk: a bit each, how many, and their bytes."""

    bits: bytearray
    count: int = 0
    size: int = 0

    def has(self, index: int) -> bool:
        # The bits of an open chunk may end before its records do.
        return index >> 3 < len(self.bits) and bool(self.bits[index >> 3] >> (index & 7) & 1)

    def add(self, index: int, size: int) -> None:
        self.bits[index >> 3] |= 1 << (index & 7)
        self.count += 1
        self.size += size


class ExtentState(msgspec.Struct, array_like=True):
    """An extent in a checkpoint."""

    first_seq: int
    last_seq: int
    count: int
    live_count: int
    live_bytes: int
    size: int
    ts_last: int
    place: Place
    dead: dict[int, Dead]


class Extent:
    """In memory while `chunks` is there; sealed once `place` is."""

    __slots__ = (
        *("chunks", "count", "dead", "ephemeral", "first_seq", "frozen", "last_seq", "live_bytes", "live_count"),
        *("place", "size", "stale_tags", "tag_seqs", "ts_last"),
    )

    def __init__(self, first_seq: int, ephemeral: bool = False) -> None:
        self.first_seq = first_seq
        self.last_seq = first_seq - 1
        self.count = 0
        self.live_count = 0
        self.live_bytes = 0
        self.size = 0
        self.ts_last = 0
        self.dead: dict[int, Dead] = {}
        self.chunks: list[Chunk] | None = []
        self.tag_seqs: dict[str, list[int]] = {}
        self.stale_tags = 0
        self.place: Place | None = None
        self.ephemeral = ephemeral
        self.frozen = False

    @property
    def is_open(self) -> bool:
        """Whether it takes more records."""
        return not self.frozen and self.chunks is not None

    @property
    def is_solid(self) -> bool:
        """Whether every seq from first to last is a record, dead or alive."""
        return self.count == self.last_seq - self.first_seq + 1

    def append(self, batch: Batch) -> None:
        chunks = self.chunks
        assert chunks is not None
        assert not self.frozen
        # Seqs without records between two writes are a hole's: a chunk has none.
        is_large = len(batch.body) >= TARGET_BYTES // 2
        if not chunks or chunks[-1].is_full or is_large or self.last_seq + 1 != batch.first_seq:
            if chunks:
                chunks[-1].close()
            chunks.append(Chunk(batch.first_seq))
        chunks[-1].append(batch)
        records, size = len(batch.lens), batch.size
        self.last_seq = batch.first_seq + records - 1
        self.count += records
        self.live_count += records
        self.live_bytes += size
        self.size += size
        self.ts_last = batch.ts
        if batch.tags is not None:
            for seq, tag in enumerate(batch.tags, batch.first_seq):
                if tag is not None:
                    self.tag_seqs.setdefault(tag, []).append(seq)

    def freeze(self) -> None:
        """No more records: it is about to be sealed."""
        if self.is_open:
            self.frozen = True
            if self.chunks:
                self.chunks[-1].close()

    def seal(self, place: Place, first_seq: int, last_seq: int, count: int, size: int) -> None:
        """Its bytes are durable at `place`, chunks that were dead left out: memory may go."""
        self.place = place
        self.first_seq = first_seq
        self.last_seq = last_seq
        self.count = count
        self.size = size
        self.chunks = None
        self.tag_seqs = {}

    def refs(self, store: ChunkStore) -> Sequence[Chunk | ChunkRef]:
        return self.chunks if self.chunks is not None else self._footer(store).chunks

    def load(self, store: ChunkStore, ref: Chunk | ChunkRef, body: bool = False) -> Chunk:
        if isinstance(ref, Chunk):
            return ref
        assert self.place is not None
        return store.load(self.place, ref, body)

    def _footer(self, store: ChunkStore) -> Footer:
        assert self.place is not None
        return store.footer(self.place, self.first_seq, self.last_seq)

    def is_dead(self, ref: Chunk | ChunkRef) -> bool:
        """Whether no record of a chunk lives: then its bytes may be gone too, and nobody may look at them."""
        dead = self.dead.get(ref.first_seq)
        return dead is not None and dead.count == ref.count

    def locate(self, store: ChunkStore, seq: int) -> int:
        """The place in `refs` of the first chunk that ends at or behind `seq`."""
        refs = self.refs(store)
        index = max(bisect_right(refs, seq, key=_first_seq) - 1, 0)
        return index if index < len(refs) and refs[index].last_seq >= seq else index + 1

    def live_in(self, store: ChunkStore, first: int, below: int) -> tuple[int, int]:
        """How many live records, and bytes of them, stand between `first` and `below` (exclusive).

        `first` must not be below the topic's earliest seq.
        """
        count = size = 0
        refs = self.refs(store)
        for ref in refs[self.locate(store, first) :]:
            if ref.first_seq >= below:
                break
            dead = self.dead.get(ref.first_seq)
            if self.is_dead(ref):
                continue
            if first <= ref.first_seq and ref.last_seq < below:
                count += ref.count - (dead.count if dead else 0)
                size += ref.size - (dead.size if dead else 0)
                continue
            chunk = self.load(store, ref)
            start = max(first - ref.first_seq, 0)
            stop = min(below - ref.first_seq, ref.count)
            if dead is None:
                count += stop - start
                size += sum(chunk.sizes[start:stop])
            else:
                live = [index for index in range(start, stop) if not dead.has(index)]
                count += len(live)
                size += sum(chunk.sizes[index] for index in live)
        return count, size

    def first_live(self, store: ChunkStore, seq: int) -> int | None:
        """The first live record at or behind `seq`."""
        if not self.live_count or seq > self.last_seq:
            return None
        seq = max(seq, self.first_seq)
        if not self.dead and self.is_solid:
            return seq
        refs = self.refs(store)
        for ref in refs[self.locate(store, seq) :]:
            dead = self.dead.get(ref.first_seq)
            start = max(seq, ref.first_seq)
            if dead is None:
                return start
            if self.is_dead(ref):
                continue
            for index in range(start - ref.first_seq, ref.count):
                if not dead.has(index):
                    return ref.first_seq + index
        return None

    def last_live(self, store: ChunkStore, first: int, below: int) -> int | None:
        """The last live record between `first` (not below the topic's earliest seq) and `below` (exclusive)."""
        if not self.live_count or first > self.last_seq or below <= self.first_seq:
            return None
        if not self.dead and self.is_solid:
            return min(below - 1, self.last_seq)
        refs = self.refs(store)
        for ref in reversed(refs[: self.locate(store, below - 1) + 1]):
            dead = self.dead.get(ref.first_seq)
            if self.is_dead(ref):
                continue
            stop = min(below, ref.last_seq + 1) - 1
            for seq in range(stop, max(first, ref.first_seq) - 1, -1):
                if dead is None or not dead.has(seq - ref.first_seq):
                    return seq
        return None

    def kill(self, store: ChunkStore, seq: int) -> int | None:
        """Marks a record as deleted; returns its bytes, or None if it was not there or dead already.

        `seq` must not be below the topic's earliest seq.
        """
        refs = self.refs(store)
        at = self.locate(store, seq)
        if at >= len(refs) or refs[at].first_seq > seq:
            return None
        ref = refs[at]
        index = seq - ref.first_seq
        dead = self.dead.get(ref.first_seq)
        if dead is not None and dead.has(index):
            return None
        size = self.load(store, ref).sizes[index]
        if dead is None:
            dead = self.dead[ref.first_seq] = Dead(bytearray((ref.count + 7) // 8))
        if len(dead.bits) * 8 < ref.count:
            dead.bits.extend(bytes((ref.count + 7) // 8 - len(dead.bits)))
        dead.add(index, size)
        self.live_count -= 1
        self.live_bytes -= size
        return size

    def lose(self, store: ChunkStore, first: int, last: int, earliest: int) -> tuple[int, int]:
        """Drops a range whose bytes are gone, whole chunks of it; returns the live records and bytes that went."""
        if first <= self.first_seq and self.last_seq <= last:
            gone = self.live_count, self.live_bytes
            self.live_count = self.live_bytes = 0
            return gone
        refs = self.refs(store)
        count, size = self.live_count, self.live_bytes
        for ref in refs:
            if first <= ref.first_seq and ref.last_seq <= last:
                self.dead[ref.first_seq] = Dead(bytearray(b"\xff" * ((ref.count + 7) // 8)), ref.count, ref.size)
            elif ref.last_seq >= earliest:
                # The lost chunk's own arrays cannot be read: what it had is what the others have not.
                live, live_bytes = self.live_in(store, max(earliest, ref.first_seq), ref.last_seq + 1)
                count -= live
                size -= live_bytes
        self.live_count -= count
        self.live_bytes -= size
        return count, size

    def tagged(self, store: ChunkStore, selector: Selector) -> Iterator[int]:
        """The seqs, dead or alive, of records that a selector matches; in no order."""
        if self.chunks is not None:
            if not selector.prefix:
                yield from list(self.tag_seqs.get(selector.text, ()))
                return
            for tag in [tag for tag in self.tag_seqs if tag.startswith(selector.text)]:
                yield from list(self.tag_seqs[tag])
            return
        assert self.place is not None
        blocks = self._footer(store).tags
        if not blocks:
            yield from self._search(store, selector)
            return
        at = max(bisect_left(blocks, selector.text, key=attrgetter("first_tag")) - 1, 0)
        for block in blocks[at:]:
            if block.first_tag > selector.text and not selector.matches(block.first_tag):
                return
            entries = store.tag_entries(self.place, block)
            if entries is None:
                yield from self._search(store, selector)
                return
            start = bisect_left(entries.tags, selector.text)
            for tag, seqs in zip(entries.tags[start:], entries.seqs[start:], strict=True):
                if not selector.matches(tag):
                    return
                yield from seqs

    def forget_tagged(self, selector: Selector, below: int) -> None:
        """After a delete in memory: the index lets go of what is dead, so that nobody meets it again."""
        tags = [selector.text] if not selector.prefix else [t for t in self.tag_seqs if selector.matches(t)]
        for tag in tags:
            kept = [seq for seq in self.tag_seqs.pop(tag, ()) if seq >= below]
            if kept:
                self.tag_seqs[tag] = kept

    def _search(self, store: ChunkStore, selector: Selector) -> Iterator[int]:
        """The slow way: through the arrays of every chunk."""
        for ref in list(self.refs(store)):
            if self.is_dead(ref):
                continue
            chunk = self.load(store, ref)
            wanted = {number for tag, number in chunk.tags.items() if selector.matches(tag)}
            if wanted and chunk.tag_ids is not None:
                yield from (chunk.first_seq + i for i, number in enumerate(chunk.tag_ids) if number in wanted)

    def drop_below(self, seq: int) -> None:
        """Gives the memory of chunks that lie wholly below `seq` back."""
        if self.chunks is not None:
            while len(self.chunks) > 1 and self.chunks[0].last_seq < seq:
                gone = self.chunks.pop(0)
                self.dead.pop(gone.first_seq, None)
                self.count -= gone.count
                self.size -= gone.size
                self.first_seq = self.chunks[0].first_seq
                self.stale_tags += gone.count if gone.tags else 0
            if self.stale_tags > self.count:
                # Now and then, so that a record pays for it once.
                self.tag_seqs = _drop_tags(self.tag_seqs, seq)
                self.stale_tags = 0

    def absorb(self, older: Extent, chunks: list[Chunk]) -> None:
        """Takes the records of the extent in front of it, all its chunks in which something lives, into memory."""
        assert self.chunks is not None
        self.freeze()
        kept = {chunk.first_seq: older.dead[chunk.first_seq] for chunk in chunks if chunk.first_seq in older.dead}
        self.dead = {**kept, **self.dead}
        self.chunks = _coalesce([*chunks, *self.chunks], self.dead)
        self.first_seq = chunks[0].first_seq
        self.count += sum(chunk.count for chunk in chunks)
        self.size += sum(chunk.size for chunk in chunks)
        self.live_count += older.live_count
        self.live_bytes += older.live_bytes
        tags: dict[str, list[int]] = {}
        for chunk in chunks:
            if chunk.tag_ids is not None:
                names = ["", *chunk.tags]
                for seq, number in enumerate(chunk.tag_ids, chunk.first_seq):
                    if number:
                        tags.setdefault(names[number], []).append(seq)
        for tag, seqs in self.tag_seqs.items():
            tags.setdefault(tag, []).extend(seqs)
        self.tag_seqs = tags

    def state(self, place: Place) -> ExtentState:
        dead = {first: Dead(bytearray(bits.bits), bits.count, bits.size) for first, bits in self.dead.items()}
        return ExtentState(
            *(self.first_seq, self.last_seq, self.count, self.live_count, self.live_bytes),
            *(self.size, self.ts_last, place, dead),
        )


def _drop_tags(tag_seqs: dict[str, list[int]], below: int) -> dict[str, list[int]]:
    kept = {tag: [seq for seq in seqs if seq >= below] for tag, seqs in tag_seqs.items()}
    return {tag: seqs for tag, seqs in kept.items() if seqs}


def restore(state: ExtentState) -> Extent:
    extent = Extent(state.first_seq)
    extent.last_seq = state.last_seq
    extent.count = state.count
    extent.live_count = state.live_count
    extent.live_bytes = state.live_bytes
    extent.size = state.size
    extent.ts_last = state.ts_last
    extent.place = state.place
    extent.dead = state.dead
    extent.chunks = None
    extent.frozen = True
    return extent


def _coalesce(chunks: list[Chunk], dead: dict[int, Dead]) -> list[Chunk]:
    """Neighbours joined while the result stays small; deletions are bits per chunk, so those chunks stay apart."""
    joined: list[Chunk] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.last_seq + 1 == chunk.first_seq
            and last.first_seq not in dead
            and chunk.first_seq not in dead
            and last.ends[-1] + chunk.ends[-1] <= TARGET_BYTES
        ):
            joined[-1] = join(last, chunk)
        else:
            joined.append(chunk)
    return joined
