"""Keyword arguments that both clients take, as types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from topics.client.calls import Match


class WriteOptions(TypedDict, total=False):
    """`idempotency_key`: made by the client unless given. `client_id` makes a strict producer: each record then has a
    `client_seq`. `config` is used if this write creates the topic."""

    node: str | None
    idempotency_key: str | None
    client_id: str | None
    create: bool
    config: dict[str, Any] | None
    disable_backpressure: bool
    return_seqs: bool


class RouterOptions(TypedDict, total=False):
    start: Literal["head", "earliest"]
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    filter: Match | None
    allow_cycle: bool
    guarantee: Literal["exactly_once", "at_least_once"]


class WatchOptions(TypedDict, total=False):
    node: str | Sequence[str] | None
    limit: int | None
    max_batch_bytes: int | None
    heartbeat_ms: int
    include_meta: bool
    include_tags: bool
    include_data: bool
    lenient: bool
