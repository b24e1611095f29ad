"""Where a reader stands, and how it goes on: diffs are asked for, their items handed out one by one, in order, once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from topics.client import calls
from topics.client.calls import Call, Match
from topics.core.answers import Diff, Record
from topics.core.check import check_integer, show
from topics.core.errors import InvalidRequest
from topics.core.limits import MAX_WAIT_MS
from topics.core.tombstone import Tombstone

Item = Record | Tombstone


class Cursor(msgspec.Struct, frozen=True):
    """Everything up to `seq` was handed out. `epoch` is the topic's instance: with it, a reader of a topic that was
    deleted and made again is told so."""

    seq: int = 0
    epoch: int | None = None


def cursor_of(value: int | Cursor, field: str = "from_seq") -> Cursor:
    if isinstance(value, Cursor):
        return value
    if not isinstance(value, int):
        raise InvalidRequest(f"{field} must be a seq or a Cursor, got {show(value)}")
    return Cursor(check_integer(field, value))


def behind(tombstone: Tombstone, epoch: int) -> Cursor:
    """Where a reader stands who was told of a loss and has not got what follows. A recreated topic is told of as a
    whole, and what it holds still comes."""
    if tombstone.reason == "recreated":
        return Cursor(min(tombstone.earliest_seq - 1, tombstone.head_seq), epoch)
    return Cursor(tombstone.gap_to, epoch)


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader wants of a topic."""

    to_seq: int | None = None
    limit: int | None = None
    node: str | Sequence[str] | None = None
    match: Match | None = None
    include_tags: bool = False
    include_meta: bool = True
    max_bytes: int | None = None


class Reading:
    """One reader of one topic. With `wait_ms` it follows for ever, without it ends where it has caught up."""

    def __init__(self, topic: str, start: int | Cursor, wishes: Wishes, wait_ms: int = 0) -> None:
        self.topic = topic
        self.cursor = cursor_of(start)
        self.head_seq = self.cursor.seq
        self._wishes = wishes
        self._wait_ms = check_integer("wait_ms", wait_ms, 0, MAX_WAIT_MS)
        # Where it stands when all that is pending was handed out.
        self._end = self.cursor
        self._pending: deque[tuple[Item, Cursor]] = deque()
        self._is_over = False

    def pop(self) -> Item | None:
        """The next item, if there is one here; the cursor goes along."""
        if not self._pending:
            return None
        item, self.cursor = self._pending.popleft()
        return item

    def call(self) -> Call[Diff] | None:
        """What to ask next; None at the end."""
        assert not self._pending
        if self._is_over:
            return None
        wishes = self._wishes
        return calls.diff(
            self.topic,
            self._end.seq,
            epoch=self._end.epoch,
            to_seq=wishes.to_seq,
            limit=wishes.limit,
            node=wishes.node,
            match=wishes.match,
            include_tags=wishes.include_tags,
            include_meta=wishes.include_meta,
            max_bytes=wishes.max_bytes,
            wait_ms=self._wait_ms,
        )

    def take(self, diff: Diff) -> None:
        self._end = Cursor(diff.next_from_seq, diff.epoch)
        self.head_seq = diff.head_seq
        if diff.tombstone is not None:
            self._pending.append((diff.tombstone, behind(diff.tombstone, diff.epoch)))
        self._pending.extend((record, Cursor(record.seq, diff.epoch)) for record in diff.records)
        if self._pending:
            # Behind the last item may be seqs that are silently not there.
            last, _ = self._pending.pop()
            self._pending.append((last, self._end))
        else:
            self.cursor = self._end
        to_seq = self._wishes.to_seq
        if (to_seq is not None and diff.next_from_seq >= to_seq) or (not self._wait_ms and diff.caught_up):
            self._is_over = True
