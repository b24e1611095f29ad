"""How far a stream is: `{topic: {epoch, seq}}`, in one canonical order, because Spark compares offsets as text.

Spark keeps only the end of each batch. The first batch of a topic therefore ends at an offset that says where the topic
was begun (`start`): when that batch is run again, what was evicted in between is still told.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything up to `seq` of the instance `epoch` has been read; `start` is where that began, if it just did."""

    epoch: int
    seq: int
    start: int | None = None


Offsets = dict[str, Cursor]

# Stands for a stream that has begun and has not seen a topic yet: what appears from now on is read from its first
# record. No topic can have this name.
BEGUN = "$begun"


def load(offset: dict[str, Any]) -> Offsets:
    return msgspec.convert(offset, Offsets)


def dump(offsets: Offsets) -> dict[str, Any]:
    return {name: msgspec.to_builtins(offsets[name]) for name in sorted(offsets)}


def lag(end: Offsets, latest: Offsets) -> dict[str, int]:
    """How many seqs each topic is ahead of a stream; of one that is new or recreated, all behind its `start`."""
    behind: dict[str, int] = {}
    for name, head in latest.items():
        cursor = end.get(name)
        is_same = cursor is not None and cursor.epoch == head.epoch
        behind[name] = max(head.seq - (cursor.seq if cursor is not None and is_same else head.start or 0), 0)
    return behind
