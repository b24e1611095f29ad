"""The bounds of the contract, each with its variable and default. A resource cap of 0 is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from topics.core.errors import InvalidRequest

# Seqs, times and durations are JSON numbers that every client can hold exactly.
MAX_INTEGER = 2**53 - 1
MAX_DEPTH = 512
MAX_META_KEYS = 64
MAX_IDEMPOTENCY_KEY = 256
MAX_CLIENT_ID = 256
MAX_CLIENT_SEQ = 2**63 - 1
DEFAULT_DIFF_LIMIT = 256
DEFAULT_DIFF_BYTES = 1 << 20
MAX_DIFF_BYTES = 8 << 20
MAX_PAGE_SIZE = 1000
# What a record has been through: some 2,000 topics.
MAX_VIA = 64 << 10
MAX_WAIT_MS = 30_000
# Seqs are reserved this far ahead: after a crash a hole may contain as many that were never assigned.
RESERVE_AHEAD = 1024
# Past deletes that a topic remembers for those who follow them.
DELETE_HISTORY = 1000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`TOPICS_MAX_…`: every field is the variable of the same name in capitals."""

    max_batch_records: Annotated[int, Meta(description="Records per write.")] = 10_000
    max_record_bytes: Annotated[int, Meta(description="Bytes of data + meta of a record.")] = 1 << 20
    max_body_bytes: Annotated[int, Meta(description="Bytes of a request body.")] = 64 << 20
    max_meta_bytes: Annotated[int, Meta(description="Bytes of a record's meta.")] = 16 << 10
    max_tag_bytes: Annotated[int, Meta(description="Bytes of a tag.")] = 256
    max_node_bytes: Annotated[int, Meta(description="Bytes of a node.")] = 128
    max_limit: Annotated[int, Meta(description="Records per diff.")] = 1000
    max_claim: Annotated[int, Meta(description="Jobs per claim.")] = 1000
    max_watch_topics: Annotated[int, Meta(description="Topics per watch.")] = 256
    max_watch_sessions: Annotated[int, Meta(description="Watch sessions; 0 is off.")] = 10_000
    max_sse_connections: Annotated[int, Meta(description="Streams at a time; 0 is off.")] = 10_000
    max_sse_connections_per_key: Annotated[int, Meta(description="Streams of one key at a time; 0 is off.")] = 1000
    max_clients_per_topic: Annotated[int, Meta(description="Strict producers per topic.")] = 100_000
    max_topics: Annotated[int, Meta(description="Topics; 0 is off.")] = 100_000
    max_routers: Annotated[int, Meta(description="Routers; 0 is off.")] = 10_000
    max_total_bytes: Annotated[int, Meta(description="Live bytes over all topics; 0 is off.")] = 0
    max_inflight_per_key: Annotated[int, Meta(description="Requests of one key at a time; 0 is off.")] = 1000
    max_txns: Annotated[int, Meta(description="Open transactions; 0 is off.")] = 1000
    max_txn_bytes: Annotated[int, Meta(description="Bytes that one transaction may spool.")] = 1 << 30
    txn_timeout_ms: Annotated[int, Meta(description="Idle time after which a transaction is dropped.")] = 900_000

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Limits:
        values: dict[str, int] = {}
        for field in cls.__struct_fields__:
            variable = f"TOPICS_{field.upper()}"
            text = env.get(variable)
            if text is None:
                continue
            if not text.isascii() or not text.isdigit():
                raise InvalidRequest(f"{variable} must be a whole number of 0 or more, got {text!r}")
            values[field] = int(text)
        return cls(**values)
