"""Retention: what a cap or a TTL takes, exactly, oldest first.

Only live records that are lost here move the evict floor; what was deleted before its time came does not.
"""

from __future__ import annotations

from bisect import bisect_left

from topics.core.tombstone import Reason
from topics.engine.topic import Topic


def expire(topic: Topic, now: int, in_order: bool = True) -> bool:
    """Takes every record with `now - $ts > ttl_ms`; says whether live ones went. `in_order`: by an event that stands in
    the log before whatever is staged now."""
    ttl = topic.config.ttl_ms
    if not ttl or not topic.count:
        return False
    cutoff = now - ttl
    if topic.front_ts >= cutoff:
        return False
    to_seq = first_at(topic, cutoff)
    last = topic.last_live(to_seq)
    assert last is not None, "the earliest record has expired"
    expire_through(topic, last, in_order)
    return True


def expire_through(topic: Topic, last: int, in_order: bool = True) -> None:
    """Takes everything up to `last`, a record that TTL took: known from now on, whatever the clock says later."""
    if last >= topic.earliest_seq:
        if topic.find(last) is not None:
            topic.lost_ts = max(topic.lost_ts, topic.ts_of(last))
        _take(topic, last, "ttl", in_order)
    topic.ttl_expired = max(topic.ttl_expired, last)
    topic.prune_holes()


def _take(topic: Topic, last: int, reason: Reason, in_order: bool = True) -> None:
    first = topic.earliest_seq
    queue = topic.queue
    spared = queue.spare(last) if queue is not None and not in_order else 0
    count = topic.advance(last + 1)
    if queue is not None:
        queue.note_loss(first, last, count - spared, reason)


def first_at(topic: Topic, ts: int) -> int:
    """The first seq, dead or alive, of a stored record with `$ts >= ts`; the next seq when there is none."""
    extents = topic.extents
    at = bisect_left(extents, ts, key=lambda extent: extent.ts_last)
    if at == len(extents):
        return topic.next_seq
    extent = extents[at]
    refs = extent.refs(topic.store)
    index = bisect_left(refs, ts, key=lambda ref: ref.ts_last)
    if index == len(refs):
        return extent.last_seq + 1
    ref = refs[index]
    if extent.is_dead(ref) or ref.last_seq < topic.earliest_seq:
        # Nobody may look at what is dead: its bytes may be gone.
        return ref.first_seq
    return ref.first_seq + bisect_left(extent.load(topic.store, ref).ts, ts)


def evict(topic: Topic) -> None:
    """Takes the oldest live records until both caps hold."""
    config = topic.config
    records = topic.count - config.cap_records if config.cap_records else 0
    size = topic.bytes - config.cap_bytes if config.cap_bytes else 0
    if records <= 0 and size <= 0:
        return
    evict_through(topic, _last_evicted(topic, records, size))


def evict_through(topic: Topic, last: int) -> None:
    """Takes everything up to `last`, a record that a cap took."""
    if last >= topic.earliest_seq:
        lost_ts = topic.ts_of(last) if topic.find(last) is not None else topic.last_ts
        _take(topic, min(last, topic.head_seq), "cap")
        topic.lost_ts = max(topic.lost_ts, lost_ts)
    topic.cap_evicted = max(topic.cap_evicted, min(last, topic.head_seq))
    topic.prune_holes()


def _last_evicted(topic: Topic, records: int, size: int) -> int:
    """The last record that must go for `records` fewer live ones and `size` fewer live bytes."""
    last = topic.earliest_seq
    for extent in topic.extents:
        if extent.live_count <= records or (size > 0 and extent.live_bytes <= size):
            found = extent.last_live(topic.store, topic.earliest_seq, extent.last_seq + 1)
            last = found if found is not None else last
            records -= extent.live_count
            size -= extent.live_bytes
            if records <= 0 and size <= 0:
                return last
            continue
        refs = extent.refs(topic.store)
        start = max(topic.earliest_seq, extent.first_seq)
        for ref in refs[extent.locate(topic.store, start) :]:
            if extent.is_dead(ref):
                continue
            chunk = extent.load(topic.store, ref)
            dead = extent.dead.get(ref.first_seq)
            index = max(start - ref.first_seq, 0)
            if dead is None and size <= 0 and records <= ref.count - index:
                # The usual case, a cap on records with nothing deleted: no loop.
                return ref.first_seq + index + records - 1
            for position in range(index, ref.count):
                if dead is not None and dead.has(position):
                    continue
                last = ref.first_seq + position
                records -= 1
                size -= chunk.sizes[position]
                if records <= 0 and size <= 0:
                    return last
    return last


def settle(topic: Topic, now: int) -> bool:
    """Brings the watermarks up to date; says whether TTL took live records."""
    expired = expire(topic, now, in_order=False)
    evict(topic)
    topic.unsettled = False
    return expired
