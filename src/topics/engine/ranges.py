"""What became of every seq of a topic, as ranges: alive, deleted, or lost and why. Only looks, and only so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from topics.core.tombstone import Reason
from topics.engine.extent import Dead, Extent
from topics.engine.topic import Topic

Kind = Literal["live", "deleted", "evicted", "hole"]

# How many chunks one answer may look into: the loop must not stand still for a log that is full of small deletions.
_MAX_CHUNKS = 4096


class Range(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seqs that share one fate, inclusive at both ends; a loss has a reason.

    Below the evict floor only the watermarks of each kind of loss are kept: there `evicted` also covers what was
    deleted before, and `mixed` means that more than one kind took from the range.
    """

    first: int
    last: int
    kind: Kind
    reason: Reason | None = None


class Ranges(msgspec.Struct):
    """`complete` is false when there are more ranges than were asked for; they begin behind `next_from_seq`."""

    topic: str
    epoch: int
    seq_base: int
    ranges: list[Range]
    next_from_seq: int
    complete: bool
    head_seq: int
    earliest_seq: int
    evict_floor: int


def ranges(topic: Topic, from_seq: int, to_seq: int | None, limit: int) -> Ranges:
    """The fate of the seqs behind `from_seq` up to `to_seq`, in a topic whose watermarks are up to date. Neighbours
    always differ, so that the ranges are as few as they can be."""
    assert limit > 0
    head = topic.head_seq
    cursor = min(max(from_seq, topic.config.seq_base - 1), head)
    stop = head if to_seq is None else min(to_seq, head)
    found: list[Range] = []
    for piece in _pieces(topic, cursor + 1, stop):
        last = found[-1] if found else None
        if last is not None and (last.kind, last.reason) == (piece.kind, piece.reason):
            found[-1] = Range(last.first, piece.last, last.kind, last.reason)
        elif len(found) == limit:
            break
        else:
            found.append(piece)
        cursor = piece.last
    return Ranges(
        topic=topic.name,
        epoch=topic.epoch,
        seq_base=topic.config.seq_base,
        ranges=found,
        next_from_seq=cursor,
        complete=cursor >= stop,
        head_seq=head,
        earliest_seq=topic.earliest_seq,
        evict_floor=topic.evict_floor,
    )


def _pieces(topic: Topic, first: int, stop: int) -> Iterator[Range]:
    """Without a gap between them, from `first` up to `stop` or to where it has looked into enough chunks."""
    yield from _below_floor(topic, first, min(stop, topic.evict_floor - 1))
    seq = max(first, topic.evict_floor)
    looks = _Looks(_MAX_CHUNKS)
    while seq <= stop and looks.left:
        hole = topic.hole_behind(seq - 1)
        if hole is not None and hole.first <= seq:
            last = min(hole.last, stop)
            yield Range(seq, last, "hole", hole.reason)
        else:
            last = stop if hole is None else min(stop, hole.first - 1)
            yield from _kept(topic, seq, last, looks)
        seq = last + 1


def _below_floor(topic: Topic, first: int, stop: int) -> Iterator[Range]:
    marks: list[tuple[int, Reason]] = [
        (topic.cap_evicted, "cap"),
        (topic.ttl_expired, "ttl"),
        (topic.restart_lost, "restart"),
    ]
    for mark in sorted({mark for mark, _ in marks}):
        if first <= min(mark, stop):
            reasons = [reason for other, reason in marks if other >= mark]
            yield Range(first, min(mark, stop), "evicted", reasons[0] if len(reasons) == 1 else "mixed")
            first = mark + 1


class _Looks(msgspec.Struct):
    left: int


def _kept(topic: Topic, seq: int, last: int, looks: _Looks) -> Iterator[Range]:
    """Between the holes: what is stored, alive or dead, and what is not stored any more, which was deleted."""
    for extent in topic.extents[topic.extent_at(max(seq, topic.earliest_seq)) :]:
        first = max(extent.first_seq, topic.earliest_seq)
        if first > last:
            break
        if seq < first:
            yield Range(seq, first - 1, "deleted")
            seq = first
        stop = min(last, extent.last_seq)
        if not extent.dead and extent.is_solid:
            if seq <= stop:
                yield Range(seq, stop, "live")
                seq = stop + 1
            continue
        for piece in _stored(topic, extent, seq, stop, looks):
            yield piece
            seq = piece.last + 1
        if not looks.left:
            return
    if seq <= last:
        yield Range(seq, last, "deleted")


def _stored(topic: Topic, extent: Extent, seq: int, last: int, looks: _Looks) -> Iterator[Range]:
    store = topic.store
    refs = extent.refs(store)
    for index in range(extent.locate(store, seq), len(refs)):
        ref = refs[index]
        if ref.first_seq > last:
            break
        if not looks.left:
            return
        looks.left -= 1
        if seq < ref.first_seq:
            yield Range(seq, ref.first_seq - 1, "deleted")
            seq = ref.first_seq
        stop = min(last, ref.last_seq)
        dead = extent.dead.get(ref.first_seq)
        if dead is None:
            yield Range(seq, stop, "live")
        elif extent.is_dead(ref):
            yield Range(seq, stop, "deleted")
        else:
            yield from _runs(dead, ref.first_seq, seq, stop)
        seq = stop + 1


def _runs(dead: Dead, base: int, first: int, last: int) -> Iterator[Range]:
    """Runs of bits, found by arithmetic on all of them at once: a loop over records would be a hundred times slower."""
    bits = int.from_bytes(dead.bits, "little") >> (first - base)
    while first <= last:
        if bits & 1:
            kind: Kind = "deleted"
            length = (bits ^ (bits + 1)).bit_length() - 1
        else:
            kind = "live"
            length = (bits & -bits).bit_length() - 1 if bits else last - first + 1
        stop = min(first + length - 1, last)
        yield Range(first, stop, kind)
        bits >>= length
        first = stop + 1
