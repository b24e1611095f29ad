"""The bodies of requests, as msgspec decodes them. `/openapi.json` is generated from these same types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from topics.engine.transactions import Part

Seq = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class DiffRequest(msgspec.Struct, kw_only=True):
    """A read from a cursor."""

    from_seq: Seq = 0
    to_seq: Seq | None = None
    limit: Annotated[int, Meta(ge=0)] = 0
    node: str | list[str] | None = None
    match: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: Annotated[int, Meta(ge=0)] = 0
    max_bytes: Annotated[int, Meta(ge=0)] | None = None
    epoch: Seq | None = None
    include_via: bool = False


class WatchTopic(msgspec.Struct, kw_only=True):
    """Where a stream begins in a topic: behind a seq, or with what comes next."""

    from_seq: Seq = 0
    tail: bool = False
    epoch: Seq | None = None


class WatchRequest(msgspec.Struct, kw_only=True):
    """What a stream follows, and what it wants of each record."""

    topics: dict[str, WatchTopic]
    node: str | list[str] | None = None
    limit: Annotated[int, Meta(ge=0)] = 0
    max_batch_bytes: Annotated[int, Meta(ge=0)] = 0
    heartbeat_ms: Annotated[int, Meta(ge=0)] = 15_000
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True


class ClaimRequest(msgspec.Struct, kw_only=True):
    """Jobs for a node."""

    node: str = ""
    max: Annotated[int, Meta(ge=1)] = 1
    lease_ms: Annotated[int, Meta(ge=0)] | None = None
    wait_ms: Annotated[int, Meta(ge=0)] = 0


class HolderRequest(msgspec.Struct, kw_only=True):
    """Jobs that somebody holds: by node and seqs, or by lease."""

    node: str | None = None
    seqs: list[Seq] | None = None
    lease_ids: list[str] | None = None
    lease_id: str | None = None


class NackRequest(HolderRequest, kw_only=True):
    delay_ms: Annotated[int, Meta(ge=0)] = 0


class ExtendRequest(HolderRequest, kw_only=True):
    lease_ms: Annotated[int, Meta(ge=0)] | None = None


class UnblockRequest(msgspec.Struct, kw_only=True):
    seqs: list[Seq]


class RedriveRequest(msgspec.Struct, kw_only=True):
    max: Annotated[int, Meta(ge=1)] = 1
    to: str | None = None


class DeleteRequest(msgspec.Struct, kw_only=True):
    """Which records to remove: by seq, by tag, or by both; with `epoch`, of that instance of the topic or none."""

    before_seq: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    match: str | list[str] | None = None
    purpose: Literal["erase", "trim"] = "erase"
    epoch: int | None = None


class CommitRequest(msgspec.Struct, kw_only=True):
    """The parts of a transaction to publish, in their order."""

    parts: list[Part]
    client_id: str | None = None
    client_seq: int | None = None


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    code: str
    message: str
    detail: dict[str, Any] | None = None


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody
