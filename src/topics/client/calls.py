"""Every verb of the contract as a `Call`: what is sent, how its answer is read, and whether it may be sent twice.

Nothing here touches a socket. Both clients send the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Required, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from topics.client.errors import ServerError
from topics.core import answers
from topics.core.check import check_integer, check_jsonable, check_text, show
from topics.core.config import ConfigPatch, parse_patch
from topics.core.errors import InvalidRequest
from topics.core.limits import MAX_CLIENT_ID, MAX_IDEMPOTENCY_KEY, MAX_WAIT_MS
from topics.core.names import check_router_name, check_topic_name
from topics.core.records import encode_write
from topics.core.routing import End, Remote, RouterPatch

T = TypeVar("T")
Match = str | Sequence[str]
Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_MAX_ID = 256


class NewRecord(TypedDict, total=False):
    """A record to write. `hole` instead of `data` takes that many seqs that are lost from the start."""

    data: Required[Any]
    tag: str
    node: str
    meta: Mapping[str, str]
    client_seq: int


class NewHole(TypedDict, total=False):
    hole: Required[int]
    reason: str


NewRecords = Sequence[NewRecord | NewHole | Mapping[str, Any]]


class Call(msgspec.Struct, Generic[T], kw_only=True):
    """`is_repeatable`: sent twice it has the effect of once. `wait_ms` is how long the server may wait by itself."""

    method: str
    path: str
    read: Callable[[bytes], T]
    query: dict[str, Any] = {}
    body: bytes | None = None
    is_repeatable: bool = True
    wait_ms: int = 0
    # What is known of a strict write that comes back refused because its first try was carried out.
    topic: str = ""
    is_strict: bool = False
    is_commit: bool = False

    @property
    def target(self) -> str:
        given = {name: _shown(value) for name, value in self.query.items() if value is not None}
        return self.path + ("?" + urlencode(given) if given else "")


def _shown(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def reader(kind: type[T]) -> Callable[[bytes], T]:
    decoder = msgspec.json.Decoder(kind)

    def read(body: bytes) -> T:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            shown = body[:100].decode("utf-8", "replace")
            raise ServerError(f"the answer is not one of a topics server: {error}: {shown}") from None

    return read


def topic_path(name: str, verb: str = "") -> str:
    return f"/v0/topics/{quote(check_topic_name(name), safe='')}" + (f"/{verb}" if verb else "")


def _body(fields: Json) -> bytes:
    """The fields that are given, as JSON; what JSON does not have is refused here, by name."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        check_jsonable(name, value)
    return _encode(given)


# -- topics ------------------------------------------------------------------------------------------------------------

_read_put = reader(answers.TopicPut)
_read_topic = reader(answers.TopicState)
_read_topics = reader(answers.TopicPage)
_read_dropped = reader(answers.TopicDropped)


def put(topic: str, config: ConfigPatch | Json | None, fields: Json) -> Call[answers.TopicPut]:
    if isinstance(config, ConfigPatch):
        if fields:
            raise InvalidRequest("config is given as a ConfigPatch and as fields: choose one")
        patch = config
    else:
        if config is not None and not isinstance(config, dict):
            raise InvalidRequest(f"config must be a dict, got {show(config)}")
        whole = {**(config or {}), **fields}
        unknown = whole.keys() - set(ConfigPatch.__struct_fields__)
        if unknown:
            raise InvalidRequest(f"config has no field {min(unknown)!r}")
        patch = parse_patch(whole)
    return Call(method="PUT", path=topic_path(topic), read=_read_put, body=_encode(patch))


def get(topic: str, touch: bool) -> Call[answers.TopicState]:
    return Call(method="GET", path=topic_path(topic), read=_read_topic, query={"touch": None if touch else False})


def list_topics(prefix: str, page_size: int, cursor: str | None) -> Call[answers.TopicPage]:
    query = {"prefix": prefix or None, "page_size": check_integer("page_size", page_size, 1), "cursor": cursor}
    return Call(method="GET", path="/v0/topics", read=_read_topics, query=query)


def drop(topic: str, if_empty: bool) -> Call[answers.TopicDropped]:
    # A repeat might find what somebody else has made of it meanwhile.
    query = {"if_empty": if_empty or None}
    return Call(method="DELETE", path=topic_path(topic), read=_read_dropped, query=query, is_repeatable=if_empty)


# -- records -----------------------------------------------------------------------------------------------------------

_read_written = reader(answers.Written)
_read_diff = reader(answers.Diff)
_read_seek = reader(answers.Seek)
_read_ranges = reader(answers.Ranges)
_read_deleted = reader(answers.Deleted)
_read_deletes = reader(answers.Deletes)


def write(
    topic: str,
    records: NewRecords,
    key: str,
    *,
    node: str | None = None,
    idempotency_key: str | None = None,
    client_id: str | None = None,
    create: bool = True,
    config: Json | None = None,
    disable_backpressure: bool = False,
    return_seqs: bool = True,
) -> Call[answers.Written]:
    """`key` is used as idempotency key unless one is given, or the producer is strict."""
    if isinstance(records, Mapping | str | bytes) or not isinstance(records, Sequence):
        raise InvalidRequest(f"records must be a list, got {show(records)}")
    fields: Json = {}
    if client_id is not None:
        fields["client_id"] = check_text("client_id", client_id, MAX_CLIENT_ID)
    if idempotency_key is not None or client_id is None:
        fields["idempotency_key"] = check_text("idempotency_key", idempotency_key or key, MAX_IDEMPOTENCY_KEY)
    if node is not None:
        fields["node"] = node
    if not create:
        fields["create"] = False
    if config is not None:
        fields["config"] = config
    if disable_backpressure:
        fields["disable_backpressure"] = True
    return Call(
        method="POST",
        path=topic_path(topic),
        read=_read_written,
        query={"return_seqs": None if return_seqs else False},
        body=encode_write(records, **fields),
        topic=topic,
        is_strict=client_id is not None and idempotency_key is None,
    )


def write_encoded(topic: str, records: Sequence[bytes], idempotency_key: str, create: bool) -> Call[answers.Written]:
    """A write of records that are JSON already."""
    body = b'{"idempotency_key":%b,"create":%b,"records":[%b]}' % (
        _encode(idempotency_key),
        b"true" if create else b"false",
        b",".join(records),
    )
    query = {"return_seqs": False}
    return Call(method="POST", path=topic_path(topic), read=_read_written, query=query, body=body, topic=topic)


def diff(
    topic: str,
    from_seq: int,
    *,
    epoch: int | None = None,
    to_seq: int | None = None,
    limit: int | None = None,
    node: str | Sequence[str] | None = None,
    match: Match | None = None,
    include_tags: bool = False,
    include_meta: bool = True,
    wait_ms: int = 0,
    max_bytes: int | None = None,
) -> Call[answers.Diff]:
    wait_ms = min(check_integer("wait_ms", wait_ms), MAX_WAIT_MS)
    fields: Json = {
        "from_seq": check_integer("from_seq", from_seq),
        "to_seq": to_seq,
        "limit": limit,
        "node": node,
        "match": match,
        "include_tags": include_tags or None,
        "include_meta": None if include_meta else False,
        "wait_ms": wait_ms or None,
        "max_bytes": max_bytes,
        "epoch": epoch,
    }
    return Call(method="POST", path=topic_path(topic, "diff"), read=_read_diff, body=_body(fields), wait_ms=wait_ms)


def seek(topic: str, ts: int) -> Call[answers.Seek]:
    query = {"ts": check_integer("ts", ts)}
    return Call(method="GET", path=topic_path(topic, "seek"), read=_read_seek, query=query)


def ranges(topic: str, from_seq: int, to_seq: int | None, limit: int | None) -> Call[answers.Ranges]:
    query = {"from_seq": check_integer("from_seq", from_seq), "to_seq": to_seq, "limit": limit}
    return Call(method="GET", path=topic_path(topic, "ranges"), read=_read_ranges, query=query)


def delete(topic: str, before_seq: int | None, match: Match | None, purpose: str) -> Call[answers.Deleted]:
    if before_seq is None and match is None:
        raise InvalidRequest("delete needs before_seq, match, or both")
    # A tag alone matches what is written between two tries as well.
    body = _body({"before_seq": before_seq, "match": match, "purpose": purpose})
    path = topic_path(topic, "delete")
    return Call(method="POST", path=path, read=_read_deleted, body=body, is_repeatable=before_seq is not None)


def deletes(topic: str, after: int) -> Call[answers.Deletes]:
    query = {"after": check_integer("after", after)}
    return Call(method="GET", path=topic_path(topic, "deletes"), read=_read_deletes, query=query)


# -- transactions ------------------------------------------------------------------------------------------------------

_read_spooled = reader(answers.Spooled)
_read_committed = reader(answers.Committed)
_read_aborted = reader(answers.Aborted)
_read_txn = reader(answers.TxnState)


def _txn_path(txn: str, verb: str = "") -> str:
    return f"/v0/txns/{quote(check_text('txn', txn, _MAX_ID), safe='')}" + (f"/{verb}" if verb else "")


def spool(txn: str, topic: str, part: str, chunk: int, records: NewRecords, node: str | None) -> Call[answers.Spooled]:
    query = {
        "txn": check_text("txn", txn, _MAX_ID),
        "part": check_text("part", part, _MAX_ID),
        "chunk": check_integer("chunk", chunk),
    }
    fields = {} if node is None else {"node": node}
    body = encode_write(records, **fields)
    return Call(method="POST", path=topic_path(topic), read=_read_spooled, query=query, body=body)


def commit(
    txn: str, parts: Sequence[Mapping[str, Any]], client_id: str | None, client_seq: int | None
) -> Call[answers.Committed]:
    """Safe to repeat: a transaction that is committed is not there to be committed again."""
    body = _body({"parts": list(parts), "client_id": client_id, "client_seq": client_seq})
    path = _txn_path(txn, "commit")
    return Call(method="POST", path=path, read=_read_committed, body=body, is_commit=client_id is None)


def abort(txn: str) -> Call[answers.Aborted]:
    return Call(method="POST", path=_txn_path(txn, "abort"), read=_read_aborted)


def get_txn(txn: str) -> Call[answers.TxnState]:
    return Call(method="GET", path=_txn_path(txn), read=_read_txn)


# -- queues ------------------------------------------------------------------------------------------------------------

_read_claimed = reader(answers.Claimed)
_read_acked = reader(answers.Acked)
_read_nacked = reader(answers.Nacked)
_read_extended = reader(answers.Extended)
_read_unblocked = reader(answers.Unblocked)
_read_redriven = reader(answers.Redriven)
_read_leases = reader(answers.Leases)


class Holder(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Jobs that somebody holds: by node and seqs (with or without their leases), or by lease."""

    node: str | None = None
    seqs: Sequence[int] | None = None
    lease_ids: Sequence[str] | None = None
    lease_id: str | None = None

    def fields(self) -> Json:
        if self.lease_id is None and (self.node is None or self.seqs is None):
            raise InvalidRequest("needs lease_id, or node and seqs")
        return {
            "node": self.node,
            "seqs": None if self.seqs is None else list(self.seqs),
            "lease_ids": None if self.lease_ids is None else list(self.lease_ids),
            "lease_id": self.lease_id,
        }


def claim(topic: str, node: str, most: int, lease_ms: int | None, wait_ms: int) -> Call[answers.Claimed]:
    """Not repeatable: the jobs of a claim whose answer got lost are out until their lease is over."""
    wait_ms = min(check_integer("wait_ms", wait_ms), MAX_WAIT_MS)
    fields = {
        "node": check_text("node", node, _MAX_ID),
        "max": check_integer("max", most, 1),
        "lease_ms": lease_ms,
        "wait_ms": wait_ms or None,
    }
    path = topic_path(topic, "claim")
    return Call(method="POST", path=path, read=_read_claimed, body=_body(fields), is_repeatable=False, wait_ms=wait_ms)


def ack(topic: str, holder: Holder) -> Call[answers.Acked]:
    return Call(method="POST", path=topic_path(topic, "ack"), read=_read_acked, body=_body(holder.fields()))


def nack(topic: str, holder: Holder, delay_ms: int) -> Call[answers.Nacked]:
    # Without its lease, a job that the same node has claimed again meanwhile would be given back by a repeat.
    by_lease = holder.lease_id is not None or holder.lease_ids is not None
    body = _body({**holder.fields(), "delay_ms": check_integer("delay_ms", delay_ms)})
    return Call(method="POST", path=topic_path(topic, "nack"), read=_read_nacked, body=body, is_repeatable=by_lease)


def extend(topic: str, holder: Holder, lease_ms: int | None) -> Call[answers.Extended]:
    body = _body({**holder.fields(), "lease_ms": lease_ms})
    return Call(method="POST", path=topic_path(topic, "extend"), read=_read_extended, body=body)


def unblock(topic: str, seqs: Sequence[int]) -> Call[answers.Unblocked]:
    path = topic_path(topic, "unblock")
    return Call(method="POST", path=path, read=_read_unblocked, body=_body({"seqs": list(seqs)}), is_repeatable=False)


def redrive(topic: str, most: int, to: str | None) -> Call[answers.Redriven]:
    body = _body({"max": check_integer("max", most, 1), "to": to})
    path = topic_path(topic, "redrive")
    return Call(method="POST", path=path, read=_read_redriven, body=body, is_repeatable=False)


def list_leases(topic: str, page_size: int, after: int) -> Call[answers.Leases]:
    query = {"page_size": check_integer("page_size", page_size, 1), "after": check_integer("after", after)}
    return Call(method="GET", path=topic_path(topic, "leases"), read=_read_leases, query=query)


# -- routers -----------------------------------------------------------------------------------------------------------

_read_router = reader(answers.Router)
_read_routers = reader(answers.RouterPage)
_read_router_dropped = reader(answers.RouterDropped)


def router_path(name: str) -> str:
    return f"/v0/routers/{quote(check_router_name(name), safe='')}"


def put_router(router: str, source: End | None, dest: End | None, options: Mapping[str, Any]) -> Call[answers.Router]:
    """What is not given stays as it is, or gets its default."""
    unknown = options.keys() - set(RouterPatch.__struct_fields__)
    if unknown:
        raise InvalidRequest(f"a router has no field {min(unknown)!r}")
    ends = {"source": _end(source, "source"), "dest": _end(dest, "dest")}
    given = {name: value for name, value in ends.items() if value is not None} | dict(options)
    for name, value in given.items():
        check_jsonable(name, value)
    return Call(method="PUT", path=router_path(router), read=_read_router, body=_encode(given))


def _end(end: End | None, field: str) -> Any:
    if isinstance(end, Remote):
        return {**end.to_json(), **({} if end.key is None else {"key": end.key})}
    return None if end is None else check_topic_name(end, field)


def get_router(router: str) -> Call[answers.Router]:
    return Call(method="GET", path=router_path(router), read=_read_router)


def list_routers(
    prefix: str, source: str | None, dest: str | None, page_size: int, cursor: str | None
) -> Call[answers.RouterPage]:
    query = {"prefix": prefix or None, "source": source, "dest": dest, "page_size": page_size, "cursor": cursor}
    return Call(method="GET", path="/v0/routers", read=_read_routers, query=query)


def drop_router(router: str) -> Call[answers.RouterDropped]:
    # A repeat might find what somebody else has made of it meanwhile.
    return Call(method="DELETE", path=router_path(router), read=_read_router_dropped, is_repeatable=False)


# -- watch, and the server itself --------------------------------------------------------------------------------------

_read_watch = reader(answers.WatchSession)
_read_health = reader(answers.Health)
_read_ready = reader(answers.Ready)


def create_watch(fields: Json, lenient: bool) -> Call[answers.WatchSession]:
    query = {"lenient": lenient or None}
    return Call(method="POST", path="/v0/watch", read=_read_watch, query=query, body=_body(fields))


def health() -> Call[answers.Health]:
    return Call(method="GET", path="/v0/health", read=_read_health)


def ready() -> Call[answers.Ready]:
    return Call(method="GET", path="/v0/ready", read=_read_ready)
