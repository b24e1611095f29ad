"""What the server answers, as types: the words of the contract, one struct an answer.

Clients decode into these. Fields that they do not know are ignored, as the contract asks of them.
"""

from __future__ import annotations

from decimal import Decimal
from functools import cached_property
from typing import Any, Literal

import msgspec
from msgspec import Raw

from topics.core.config import TopicConfig
from topics.core.routing import End, Guarantee, Start
from topics.core.tombstone import Reason, Tombstone

_NULL = Raw(b"null")
_decode = msgspec.json.Decoder().decode
_decode_exactly = msgspec.json.Decoder(float_hook=Decimal).decode


def _value_of(raw: Raw) -> Any:
    """JSON as Python values; a number that no float can hold comes as a `Decimal`."""
    try:
        return _decode(raw)
    except msgspec.ValidationError:
        return _decode_exactly(raw)


class Record(msgspec.Struct, frozen=True, dict=True, kw_only=True, omit_defaults=True):
    """A record as a read returns it. `raw` is `data` byte for byte as it was written, `data` is that as a value.

    `raw` is a piece of the whole answer; `raw.copy()` is for keeping.
    """

    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: dict[str, str] | None = None
    raw: Raw = msgspec.field(name="data", default=_NULL)

    @cached_property
    def data(self) -> Any:
        return _value_of(self.raw)

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "raw"]
        return f"{type(self).__name__}({', '.join(shown)}, data={self.data!r})"


class Diff(msgspec.Struct, kw_only=True):
    topic: str
    epoch: int
    records: list[Record]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    tombstone: Tombstone | None
    lag: int
    performance: dict[str, float] = {}


class Seek(msgspec.Struct, kw_only=True):
    from_seq: int


# -- topics ------------------------------------------------------------------------------------------------------------


class QueueState(msgspec.Struct, kw_only=True):
    ready: int
    in_flight: int
    delayed: int
    blocked: int
    dead_lettered: int
    lost: int
    ack_floor: int
    ack_holes: int
    oldest_ready_ts: int | None


class TopicState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A topic's watermarks, counts and configuration; `queue` is there for queues."""

    topic: str
    type: Literal["log", "queue"]
    head_seq: int
    earliest_seq: int
    next_seq: int
    evict_floor: int
    count: int
    bytes: int
    epoch: int
    holes: int
    config: TopicConfig
    effective_priority: float
    last_write_ts: int | None
    last_read_ts: int | None
    # The same over all servers for one instance of the topic, and for no other.
    instance: str = ""
    queue: QueueState | None = None


class TopicPage(msgspec.Struct, kw_only=True):
    topics: list[TopicState]
    next_cursor: str | None = None


class TopicPut(msgspec.Struct, kw_only=True):
    topic: str
    created: bool
    config: TopicConfig


class TopicDropped(msgspec.Struct, kw_only=True):
    topic: str
    deleted: bool
    routers_removed: int


# -- records -----------------------------------------------------------------------------------------------------------


class Written(msgspec.Struct, kw_only=True):
    """Where a write stands. `deduped`: it was there already, and these are the seqs that it got then."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    count: int
    created: bool
    deduped: bool
    seqs: list[int] = []
    performance: dict[str, float] = {}


class Deleted(msgspec.Struct, kw_only=True):
    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class PastDelete(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`head_seq` is the head at that moment: what came later it did not touch."""

    id: int
    ts: int
    head_seq: int
    purpose: str
    before_seq: int | None = None
    match: list[str] | None = None


class Deletes(msgspec.Struct, kw_only=True):
    """Past deletes. `complete` is false when some after the reader's id are no longer remembered."""

    topic: str
    deletes: list[PastDelete]
    last_id: int
    complete: bool


class Range(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Seqs that share one fate, inclusive at both ends; a loss has a reason."""

    first: int
    last: int
    kind: str
    reason: Reason | None = None


class Ranges(msgspec.Struct, kw_only=True):
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


# -- transactions ------------------------------------------------------------------------------------------------------


class Spooled(msgspec.Struct, kw_only=True):
    txn: str
    topic: str
    part: str
    chunk: int
    count: int
    repeated: bool


class CommittedTopic(msgspec.Struct, kw_only=True):
    first_seq: int
    last_seq: int
    count: int


class Committed(msgspec.Struct, kw_only=True):
    txn: str
    topics: dict[str, CommittedTopic]
    deduped: bool


class Aborted(msgspec.Struct, kw_only=True):
    txn: str
    aborted: bool


class TxnState(msgspec.Struct, kw_only=True):
    txn: str
    parts: dict[str, dict[str, int]]
    bytes: int
    idle_ms: int


# -- queues ------------------------------------------------------------------------------------------------------------


class Job(Record, frozen=True, dict=True, kw_only=True, omit_defaults=True):
    """A record that is leased: `deadline` is when it is anybody's again, `deliveries` how often it was given out."""

    lease_id: str
    deadline: int
    deliveries: int


class Claimed(msgspec.Struct, kw_only=True):
    """`lost` counts the jobs that this queue has lost so far, and `tombstone` is the latest such range."""

    topic: str
    claimed: list[Job]
    lease_id: str | None
    count: int
    ready: int
    lost: int
    tombstone: Tombstone | None


class _Settled(msgspec.Struct, kw_only=True):
    topic: str
    skipped: int
    skipped_seqs: list[int]
    ready: int
    in_flight: int


class Acked(_Settled, kw_only=True):
    acked: int
    acked_seqs: list[int]


class Nacked(_Settled, kw_only=True):
    nacked: int
    nacked_seqs: list[int]


class Extended(_Settled, kw_only=True):
    extended: int
    extended_seqs: list[int]
    deadlines: dict[int, int] = {}


class Unblocked(_Settled, kw_only=True):
    unblocked: int
    unblocked_seqs: list[int]


class Redriven(msgspec.Struct, kw_only=True):
    topic: str
    moved: int
    unblocked: int
    skipped: int
    ready: int


class Lease(msgspec.Struct, kw_only=True):
    """A job that is out, or set aside."""

    seq: int = msgspec.field(name="$seq")
    state: str
    lease_id: str | None
    node: str | None
    deadline: int | None
    not_before: int | None
    deliveries: int


class Leases(msgspec.Struct, kw_only=True):
    topic: str
    leases: list[Lease]
    total: int


# -- routers -----------------------------------------------------------------------------------------------------------


class Router(msgspec.Struct, kw_only=True):
    """`created` is there in the answer to a PUT. A remote end comes without its key."""

    router: str
    source: End
    dest: End
    start: Start
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    filter: list[str] | None
    allow_cycle: bool
    guarantee: Guarantee
    forwarded_total: int
    cursor: int
    lag: int
    state: str
    last_error: str | None
    created: bool = False


class RouterPage(msgspec.Struct, kw_only=True):
    routers: list[Router]
    next_cursor: str | None = None


class RouterDropped(msgspec.Struct, kw_only=True):
    router: str
    deleted: bool


# -- watch -------------------------------------------------------------------------------------------------------------


class WatchedTopic(msgspec.Struct, kw_only=True):
    from_seq: int
    head_seq: int
    earliest_seq: int
    epoch: int


class WatchSession(msgspec.Struct, kw_only=True):
    wid: str
    stream_url: str
    session_ttl_ms: int
    topics: dict[str, WatchedTopic]


# -- the server --------------------------------------------------------------------------------------------------------


class Health(msgspec.Struct, kw_only=True):
    status: str
    version: str
    uptime_ms: int


class Ready(msgspec.Struct, kw_only=True):
    status: str
    wal_replay_complete: bool
    topics: int
