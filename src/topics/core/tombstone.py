"""What a reader is told of a loss: the exact range and why."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

Reason = Literal["cap", "ttl", "mixed", "recreated", "source_trim", "crash", "restart", "corrupt"]
HoleReason = Literal["crash", "source_trim", "corrupt", "restart"]

HOLE_REASONS: tuple[HoleReason, ...] = get_args(HoleReason)


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """A lost range inside the log, inclusive at both ends."""

    first: int
    last: int
    reason: HoleReason
    # The topics that routers have carried it through.
    via: str = ""


class Tombstone(msgspec.Struct, frozen=True):
    gap_from: int
    gap_to: int
    reason: Reason
    missed_estimate: int
    earliest_seq: int
    head_seq: int


class CarriedTombstone(Tombstone, frozen=True):
    """For routers of other servers: what the loss has been through."""

    via: str
