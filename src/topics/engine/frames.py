"""The events of the engine as frames: which kinds there are, and what each carries.

`epoch` names the topic instance; `first` and `last` are the seqs that an event is about, in the header, so that a
damaged payload still says which were lost.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from topics.core.config import TopicConfig
from topics.core.records import Batch, pack, unpack
from topics.core.routing import RouterConfig
from topics.core.selector import Selector
from topics.core.tombstone import Hole
from topics.engine.dedupe import Appended, Written
from topics.engine.queue import Lifecycle
from topics.storage.frame import Frame, Payload, length_of

OPEN = 32  # the directory was opened: boot id and time
CREATE = 33  # a topic instance begins
CONFIG = 34  # its configuration from `first` on
DROP = 35  # it ends
APPEND = 36  # records first..last
HOLE = 37  # first..last are lost; above the head they are new seqs
WRITTEN = 38  # what dedupe must remember of the write of first..last
RESERVE = 39  # no acked seq is above `first`; at time `last`
EXPIRED = 40  # TTL took everything up to `first`, seen at time `last`
DELETE = 41  # records deleted by a selector
COMMIT = 42  # a transaction's dedupe
QUEUE = 45  # what happened to jobs first..last of a queue
EVICTED = 44  # a cap took everything up to `first`, and the records that made it do so are not in the log
ROUTER = 46  # a router leads here, or is told something else
UNROUTED = 47  # a router that led here ends
ROUTED = 53  # routers copied first..last of their source, each to its dest
ADVANCED = 54  # a router to another server got to `last`
RESTART = 43  # everything up to `last` was lost at a restart, at time `first`

NAMES = {
    OPEN: "open",
    CREATE: "create topic",
    CONFIG: "config",
    DROP: "delete topic",
    APPEND: "append",
    HOLE: "hole",
    WRITTEN: "write dedupe",
    RESERVE: "reserve",
    EXPIRED: "expired",
    DELETE: "delete records",
    COMMIT: "commit",
    RESTART: "restart",
    EVICTED: "evicted",
    QUEUE: "queue",
    ROUTER: "router",
    UNROUTED: "delete router",
    ROUTED: "routed records",
    ADVANCED: "router cursor",
}


class Event(NamedTuple):
    """A frame to be staged."""

    kind: int
    epoch: int
    first: int
    last: int
    payload: Payload = b""


class Opened(msgspec.Struct, array_like=True):
    boot_id: str
    now: int
    # Names this data directory among all, from its first opening on.
    server_id: str = ""


class Created(msgspec.Struct, array_like=True):
    name: str
    config: TopicConfig


class Deleted(msgspec.Struct, array_like=True):
    id: int
    ts: int
    # The next seq at that moment: what came later it does not touch.
    next_seq: int
    before_seq: int | None
    match: Selector | None
    purpose: str


class Committed(msgspec.Struct, array_like=True):
    client_id: str
    client_seq: int
    topics: dict[str, Appended]


class RouterState(msgspec.Struct, array_like=True):
    """A router, and how far it got: `cursor` is a seq of the source's instance `source_epoch`, 0 if there is none."""

    id: int
    name: str
    config: RouterConfig
    source_epoch: int
    cursor: int
    forwarded: int = 0
    # Of a source on another server: which topic of all it is.
    instance: str = ""


class Advanced(msgspec.Struct, array_like=True):
    """How far a router is whose copies are not in this log."""

    source_epoch: int
    cursor: int
    forwarded: int
    instance: str = ""


class Link(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A router in a fan-out. `offset` is how far its copies' seqs are from the source's, while that is steady."""

    router: int
    dest: int
    offset: int | None


class Routed(msgspec.Struct, array_like=True):
    """One stretch of a source, copied to many. `links` stand in the first event of their kind in a log file, and are
    known by `plan` behind it. `firsts` says where copies begin that do not stand at their link's offset. `pieces` are
    the bytes of each run, or minus the length of a hole."""

    ts: int
    # Which plan of its source's it follows: that of `slot`, as it stands since the position `plan`.
    slot: int
    plan: int
    links: list[Link] | None
    firsts: dict[int, int]
    pieces: list[int]
    # What holes among the pieces have been through.
    vias: dict[int, str]
    # Of a source on another server: which it is there.
    remote_epoch: int = 0
    instance: str = ""
    # How many records each router took, where the records themselves are not kept.
    records: list[int] | None = None


class _BatchHead(msgspec.Struct, array_like=True, gc=False):
    ts: int
    lens: bytes
    sizes: bytes
    metas: bytes | None = None
    tags: list[str | None] | None = None
    nodes: list[str | None] | None = None
    # One stands for all.
    vias: list[str | None] | None = None


_encode = msgspec.msgpack.Encoder().encode
_LENGTH = struct.Struct("<I")
# From here on, a copy costs more than one more piece.
_LARGE = 1 << 16
_decode_head = msgspec.msgpack.Decoder(_BatchHead).decode
_decode_opened = msgspec.msgpack.Decoder(Opened).decode
_decode_created = msgspec.msgpack.Decoder(Created).decode
_decode_config = msgspec.msgpack.Decoder(TopicConfig).decode
_decode_written = msgspec.msgpack.Decoder(Written).decode
_decode_deleted = msgspec.msgpack.Decoder(Deleted).decode
_decode_queued = msgspec.msgpack.Decoder(Lifecycle).decode
_decode_router = msgspec.msgpack.Decoder(RouterState).decode
_decode_routed = msgspec.msgpack.Decoder(Routed).decode
_decode_committed = msgspec.msgpack.Decoder(Committed).decode


def opened(boot_id: str, now: int, server_id: str) -> Event:
    return Event(OPEN, 0, 0, 0, _encode(Opened(boot_id, now, server_id)))


def created(epoch: int, name: str, config: TopicConfig) -> Event:
    return Event(CREATE, epoch, config.seq_base, 0, _encode(Created(name, config)))


def configured(epoch: int, next_seq: int, config: TopicConfig) -> Event:
    return Event(CONFIG, epoch, next_seq, 0, _encode(config))


def dropped(epoch: int) -> Event:
    return Event(DROP, epoch, 0, 0)


def appended(epoch: int, batch: Batch) -> Event:
    metas = pack(batch.metas) if batch.metas is not None else None
    vias = batch.vias[:1] if batch.vias is not None and len(set(batch.vias)) == 1 else batch.vias
    head = _encode(_BatchHead(batch.ts, pack(batch.lens), pack(batch.sizes), metas, batch.tags, batch.nodes, vias))
    head = _LENGTH.pack(len(head)) + head
    payload = head + batch.body if len(batch.body) < _LARGE else (head, batch.body)
    return Event(APPEND, epoch, batch.first_seq, batch.last_seq, payload)


def holed(epoch: int, hole: Hole) -> Event:
    return Event(HOLE, epoch, hole.first, hole.last, _encode(hole))


def written(epoch: int, what: Written) -> Event:
    return Event(WRITTEN, epoch, what.appended.first_seq, what.appended.last_seq, _encode(what))


def restarted(epoch: int, last_seq: int, now: int) -> Event:
    return Event(RESTART, epoch, now, last_seq)


def reserved(epoch: int, ceiling: int, now: int) -> Event:
    return Event(RESERVE, epoch, ceiling, now)


def evicted(epoch: int, last_seq: int) -> Event:
    return Event(EVICTED, epoch, last_seq, 0)


def expired(epoch: int, last_seq: int, now: int) -> Event:
    return Event(EXPIRED, epoch, last_seq, now)


def deleted(epoch: int, what: Deleted) -> Event:
    return Event(DELETE, epoch, 0, 0, _encode(what))


def committed(what: Committed) -> Event:
    return Event(COMMIT, 0, 0, 0, _encode(what))


def queued(epoch: int, what: Lifecycle) -> Event:
    last = what.runs[-2] + what.runs[-1] - 1
    return Event(QUEUE, epoch, what.runs[0], last, _encode(what))


def router_put(home: int, what: RouterState) -> Event:
    return Event(ROUTER, home, 0, 0, _encode(what))


def router_dropped(home: int, router: int) -> Event:
    return Event(UNROUTED, home, router, 0)


def router_advanced(home: int, router: int, what: Advanced) -> Event:
    return Event(ADVANCED, home, router, max(what.cursor, 0), _encode(what))


def routed(source: int, first: int, last: int, what: Routed, pieces: Sequence[Batch | Hole]) -> Event:
    buffers: list[bytes | memoryview] = []
    what.pieces = []
    for piece in pieces:
        if isinstance(piece, Hole):
            if piece.via:
                what.vias[len(what.pieces)] = piece.via
            what.pieces.append(piece.first - piece.last - 1)
            continue
        payload = appended(0, piece).payload
        what.pieces.append(length_of(payload))
        buffers += payload if isinstance(payload, tuple) else (payload,)
    head = _encode(what)
    return Event(ROUTED, source, first, last, (_LENGTH.pack(len(head)) + head, *buffers))


def read_router(frame: Frame) -> RouterState:
    return _decode_router(frame.payload)


def read_advanced(frame: Frame) -> Advanced:
    return msgspec.msgpack.decode(frame.payload, type=Advanced)


def read_routed(frame: Frame) -> tuple[Routed, list[Batch | Hole]]:
    """A fan-out, and its pieces one after the other: seqs that the source had deleted are not among them."""
    length = _LENGTH.unpack_from(frame.payload)[0]
    what = _decode_routed(memoryview(frame.payload)[4 : 4 + length])
    at = 4 + length
    seq = frame.first
    pieces: list[Batch | Hole] = []
    for number, size in enumerate(what.pieces):
        if size < 0:
            pieces.append(Hole(seq, seq - size - 1, "source_trim", what.vias.get(number, "")))
            seq -= size
        else:
            batch = _batch_of(seq, frame.payload[at : at + size])
            pieces.append(batch)
            at += size
            seq = batch.last_seq + 1
    return what, pieces


def read_queued(frame: Frame) -> Lifecycle:
    return _decode_queued(frame.payload)


def read_batch(frame: Frame) -> Batch:
    batch = _batch_of(frame.first, frame.payload)
    assert batch.last_seq == frame.last
    return batch


def _batch_of(first_seq: int, payload: bytes) -> Batch:
    length = _LENGTH.unpack_from(payload)[0]
    head = _decode_head(memoryview(payload)[4 : 4 + length])
    metas = unpack(head.metas) if head.metas is not None else None
    body = payload[4 + length :]
    sizes = unpack(head.sizes)
    vias = head.vias * len(sizes) if head.vias is not None and len(head.vias) == 1 else head.vias
    columns = (metas, head.tags, head.nodes, body, sum(sizes), vias)
    return Batch(first_seq, head.ts, unpack(head.lens), sizes, *columns)


def read_opened(frame: Frame) -> Opened:
    return _decode_opened(frame.payload)


def read_created(frame: Frame) -> Created:
    return _decode_created(frame.payload)


def read_config(frame: Frame) -> TopicConfig:
    return _decode_config(frame.payload)


def read_hole(frame: Frame) -> Hole:
    return msgspec.msgpack.decode(frame.payload, type=Hole)


def read_written(frame: Frame) -> Written:
    return _decode_written(frame.payload)


def read_deleted(frame: Frame) -> Deleted:
    return _decode_deleted(frame.payload)


def read_committed(frame: Frame) -> Committed:
    return _decode_committed(frame.payload)
