"""Sealed chunks: how an extent's records lie in a segment file, and how they are read back, proven and cached."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topics.engine.chunk import Chunk, decode_chunk
from topics.storage.cache import ByteCache
from topics.storage.frame import HEADER, Damage, file_offset
from topics.storage.segment import Corrupt, Segments, SegmentWriter

KIND_INDEX = 16
KIND_BODY = 17
KIND_TAGS = 18
KIND_FOOTER = 19

_TAGS_PER_BLOCK = 256


class LostRange(Exception):
    """Sealed records whose bytes are proven wrong: the topic must turn them into a hole and ask again."""

    def __init__(self, first: int, last: int, where: str) -> None:
        super().__init__(f"seqs {first} to {last} are corrupt: {where}")
        self.first = first
        self.last = last
        self.where = where


class ChunkRef(msgspec.Struct, array_like=True, gc=False):
    """Where a sealed chunk stands, and what must be known of it without loading it."""

    first_seq: int
    count: int
    ts_first: int
    ts_last: int
    size: int
    offset: int
    index_length: int
    body_length: int

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1


class TagBlock(msgspec.Struct, array_like=True, gc=False):
    first_tag: str
    offset: int
    length: int


class Footer(msgspec.Struct, array_like=True):
    chunks: list[ChunkRef]
    tags: list[TagBlock]


class Place(msgspec.Struct, array_like=True, frozen=True):
    """A sealed extent's bytes: `offset` to the footer's end, `length` of the footer's payload."""

    file: int
    offset: int
    footer_offset: int
    footer_length: int

    @property
    def bytes(self) -> int:
        return self.footer_offset + HEADER + self.footer_length - self.offset


class TagEntries(msgspec.Struct, array_like=True):
    tags: list[str]
    seqs: list[list[int]]


_encode = msgspec.msgpack.Encoder().encode
_decode_footer = msgspec.msgpack.Decoder(Footer).decode
_decode_tags = msgspec.msgpack.Decoder(TagEntries).decode


class ChunkStore:
    """Sealed chunks, loaded on demand and cached within a bound."""

    def __init__(self, segments: Segments, cache_bytes: int) -> None:
        self._segments = segments
        self._footers: ByteCache[tuple[int, int], Footer] = ByteCache(max(cache_bytes // 8, 1 << 20))
        self._chunks: ByteCache[tuple[int, int], Chunk] = ByteCache(cache_bytes)
        # Bytes in segment files that no reader can reach any more: what a rewrite would give back.
        self.dead_bytes = 0
        # `data` + `meta` of every live record of every topic.
        self.live_bytes = 0

    def footer(self, place: Place, first_seq: int, last_seq: int) -> Footer:
        """What stands at `place`; the seqs are what is lost if that cannot be known."""
        key = (place.file, place.footer_offset)
        footer = self._footers.get(key)
        if footer is None:
            try:
                payload = self._segments.read(place.file, place.footer_offset, place.footer_length)
                footer = _decode_footer(payload)
            except Corrupt as corrupt:
                footer = self._rebuild(place, first_seq, last_seq, corrupt)
            self._footers.put(key, footer, place.footer_length + 64)
        return footer

    def load(self, place: Place, ref: ChunkRef, body: bool) -> Chunk:
        key = (place.file, ref.offset)
        chunk = self._chunks.get(key)
        if chunk is not None and (chunk.body is not None or not body):
            return chunk
        try:
            if chunk is None:
                chunk = decode_chunk(self._segments.read(place.file, ref.offset, ref.index_length), ref.size)
            if body:
                at = ref.offset + HEADER + ref.index_length
                chunk.body = self._segments.read(place.file, at, ref.body_length)
        except Corrupt as corrupt:
            raise LostRange(ref.first_seq, ref.last_seq, str(corrupt)) from None
        self._chunks.put(key, chunk, ref.index_length * 2 + (ref.body_length if chunk.body is not None else 0))
        return chunk

    def tag_entries(self, place: Place, block: TagBlock) -> TagEntries | None:
        """One block of the tag index, or None where it is damaged."""
        try:
            return _decode_tags(self._segments.read(place.file, block.offset, block.length))
        except Corrupt:
            return None

    def _rebuild(self, place: Place, first_seq: int, last_seq: int, corrupt: Corrupt) -> Footer:
        """A footer out of the chunks that stand in front of it."""
        refs: list[ChunkRef] = []
        try:
            items = self._segments.scan(place.file, place.offset, place.footer_offset - place.offset)
        except Corrupt:
            raise LostRange(first_seq, last_seq, str(corrupt)) from None
        for item in items:
            if isinstance(item, Damage):
                raise LostRange(first_seq, last_seq, str(corrupt))
            if item.kind == KIND_INDEX:
                chunk = decode_chunk(item.payload)
                chunk.size = sum(chunk.sizes)
                offset = file_offset(item.at)
                refs.append(_ref(chunk, offset, len(item.payload), chunk.ends[-1]))
        # Without tag blocks a tag is looked for in the chunks themselves.
        return Footer(refs, [])


def _ref(chunk: Chunk, offset: int, index_length: int, body_length: int) -> ChunkRef:
    return ChunkRef(
        chunk.first_seq, chunk.count, chunk.ts_first, chunk.ts_last, chunk.size, offset, index_length, body_length
    )


class ExtentWriter:
    """Writes one extent into a segment file, chunk by chunk, so that no step takes long."""

    def __init__(self, writer: SegmentWriter, epoch: int) -> None:
        self._writer = writer
        self._epoch = epoch
        self._offset = writer.offset
        self._refs: list[ChunkRef] = []
        self._tags: dict[str, list[int]] = {}

    def add(self, chunk: Chunk, is_dead: Sequence[bool] | None) -> None:
        """Adds a chunk; dead records are not worth a place in the tag index."""
        assert chunk.body is not None
        index, body = chunk.encode_index(), bytes(chunk.body)
        span = (self._epoch, chunk.first_seq, chunk.last_seq)
        offset = self._writer.append(KIND_INDEX, *span, index)
        self._writer.append(KIND_BODY, *span, body)
        self._refs.append(_ref(chunk, offset, len(index), len(body)))
        if chunk.tag_ids is not None:
            names = ["", *chunk.tags]
            for at, number in enumerate(chunk.tag_ids):
                if number and not (is_dead is not None and is_dead[at]):
                    self._tags.setdefault(names[number], []).append(chunk.first_seq + at)

    def finish(self) -> Place:
        first, last = self._refs[0].first_seq, self._refs[-1].last_seq
        blocks: list[TagBlock] = []
        tags = sorted(self._tags)
        for start in range(0, len(tags), _TAGS_PER_BLOCK):
            some = tags[start : start + _TAGS_PER_BLOCK]
            payload = _encode(TagEntries(some, [self._tags[tag] for tag in some]))
            offset = self._writer.append(KIND_TAGS, self._epoch, first, last, payload)
            blocks.append(TagBlock(some[0], offset, len(payload)))
        payload = _encode(Footer(self._refs, blocks))
        footer = self._writer.append(KIND_FOOTER, self._epoch, first, last, payload)
        return Place(self._writer.number, self._offset, footer, len(payload))
