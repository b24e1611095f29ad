"""Deletion: permanent, silent, at once; by seq, by tag, or both. And the history that copies downstream follow."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, get_args

import msgspec

from topics.core.check import show
from topics.core.errors import InvalidRequest
from topics.core.limits import DELETE_HISTORY
from topics.core.selector import Selector
from topics.engine import jobs
from topics.engine.frames import Deleted
from topics.engine.queue import Lifecycle
from topics.engine.topic import Topic

Purpose = Literal["erase", "trim"]


class PastDelete(msgspec.Struct, array_like=True, frozen=True):
    """A delete as the history keeps it: `head_seq` is the head at that moment, what came later it did not touch."""

    id: int
    ts: int
    head_seq: int
    before_seq: int | None
    match: Selector | None
    purpose: str

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": self.id, "ts": self.ts, "head_seq": self.head_seq, "purpose": self.purpose}
        if self.before_seq is not None:
            entry["before_seq"] = self.before_seq
        if self.match is not None:
            entry["match"] = self.match.to_json()
        return entry


def check_purpose(purpose: object) -> str:
    if not isinstance(purpose, str) or purpose not in get_args(Purpose):
        raise InvalidRequest(f'purpose must be "erase" or "trim", got {show(purpose)}')
    return purpose


def preload(topic: Topic, match: Selector | None) -> None:
    """Reads what a delete will need: a disk that does not answer refuses it while nothing has changed."""
    if match is not None:
        for extent in topic.extents:
            for seq in extent.tagged(topic.store, match):
                found = topic.find(seq)
                if found is not None:
                    found[0].load(topic.store, found[1])


def apply_waiting(topic: Topic) -> None:
    """Carries out the deletes that wait for the disk, in their order."""
    while topic.unapplied:
        what = topic.unapplied[0]
        if isinstance(what, Lifecycle):
            jobs.remove(topic, what)
        else:
            delete(topic, what)
        topic.unapplied.pop(0)


def delete(topic: Topic, what: Deleted) -> int:
    """Removes what matches; says how many records that were alive."""
    below = what.next_seq if what.before_seq is None else min(what.before_seq, what.next_seq)
    if what.match is None:
        removed = topic.advance(min(below, topic.next_seq))
    else:
        removed = 0
        for extent in list(topic.extents):
            if extent.first_seq < below:
                seqs = [seq for seq in extent.tagged(topic.store, what.match) if seq < below]
                removed += sum([topic.kill(seq) for seq in seqs])
                extent.forget_tagged(what.match, below)
        if removed:
            topic.settle_front()
    if topic.deletes is None:
        topic.deletes = deque(maxlen=DELETE_HISTORY)
    topic.deletes.append(PastDelete(what.id, what.ts, what.next_seq - 1, what.before_seq, what.match, what.purpose))
    topic.last_delete_id = what.id
    return removed
