"""`/openapi.json`, generated from the types that decode the requests and the table that routes them."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from topics.core.config import ConfigPatch
from topics.core.records import RecordIn, Write
from topics.core.routing import RouterPatch
from topics.engine.transactions import Part
from topics.http.auth import Scope
from topics.http.messages import (
    ClaimRequest,
    CommitRequest,
    DeleteRequest,
    DiffRequest,
    ErrorAnswer,
    ExtendRequest,
    HolderRequest,
    NackRequest,
    RedriveRequest,
    UnblockRequest,
    WatchRequest,
)

_JSON = "application/json"
_ARROW = "application/vnd.apache.arrow.stream"
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$"}
_ID = {"type": "string", "minLength": 1, "maxLength": 256}
_SEQ = {"type": "integer", "minimum": 0}
_ERRORS = {
    "400": "invalid_request, batch_too_large, record_too_large",
    "401": "unauthorized",
    "403": "forbidden",
    "404": "topic_not_found, router_not_found, txn_not_found, not_found",
    "405": "method_not_allowed",
    "406": "not_acceptable",
    "409": "topic_exists_incompatible, topic_not_empty, router_cycle, wrong_instance, not_a_queue, "
    "idempotency_conflict, txn_incomplete",
    "413": "payload_too_large",
    "415": "unsupported_media_type",
    "422": "topic_full",
    "429": "throttled, ack_hole_cap_exceeded, in_flight_cap_exceeded",
    "500": "internal",
    "503": "not_ready, shutting_down, read_only",
}
# What the name in a path is the name of.
_KINDS = {"/txns/": "id", "/watch/": "id", "/routers/": "router", "/ui/": "file"}
# What each route may answer beside the errors that any may: 400, 401, 403, 405, 429, 500, 503.
_ANY = ("400", "401", "403", "405", "429", "500", "503")


def _object(**properties: Any) -> dict[str, Any]:
    whole = {**properties, "performance": {"type": "object"}}
    return {"type": "object", "properties": whole, "required": sorted(whole)}


_TOMBSTONE = {
    "type": ["object", "null"],
    "properties": {
        **{name: {"type": "integer"} for name in ("gap_from", "gap_to", "missed_estimate", "earliest_seq", "head_seq")},
        "reason": {"enum": ["cap", "ttl", "mixed", "recreated", "source_trim", "crash", "restart", "corrupt"]},
    },
}
_RANGE = {
    "type": "object",
    "properties": {
        "first": {"type": "integer"},
        "last": {"type": "integer"},
        "kind": {"enum": ["live", "deleted", "evicted", "hole"]},
        "reason": {"enum": ["cap", "ttl", "mixed", "restart", "source_trim", "crash", "corrupt"]},
    },
    "required": ["first", "last", "kind"],
}
_CONFIG = {"type": "object"}
_TOPIC = {
    "topic": _NAME,
    "type": {"enum": ["log", "queue"]},
    **dict.fromkeys(("head_seq", "earliest_seq", "next_seq", "evict_floor", "count", "bytes", "epoch", "holes"), _SEQ),
    "config": _CONFIG,
    "effective_priority": {"type": "number"},
    "last_write_ts": {"type": ["integer", "null"]},
    "last_read_ts": {"type": ["integer", "null"]},
    "instance": {"type": "string"},
}
_SUMMARY = {"type": "object", "properties": _TOPIC, "required": sorted(_TOPIC)}
_FLAG = {"type": "boolean"}
_ROUTER_NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}$"}
_END = {"type": ["string", "object"]}
_ROUTER = {
    "router": _ROUTER_NAME,
    "source": _END,
    "dest": _END,
    "start": {"enum": ["head", "earliest"]},
    **dict.fromkeys(("preserve_node", "preserve_tag", "create_dest", "allow_cycle"), _FLAG),
    "filter": {"type": ["array", "null"]},
    "guarantee": {"enum": ["exactly_once", "at_least_once"]},
    **dict.fromkeys(("forwarded_total", "cursor", "lag"), _SEQ),
    "state": {"enum": ["running", "blocked", "catching_up"]},
    "last_error": {"type": ["string", "null"]},
}
_ROUTER_SUMMARY = {"type": "object", "properties": _ROUTER, "required": sorted(_ROUTER)}


def _query(name: str, schema: dict[str, Any], required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": schema}


_WRITTEN = {
    "type": "object",
    "properties": {
        "topic": _NAME,
        "first_seq": _SEQ,
        "last_seq": _SEQ,
        "seqs": {"type": "array", "items": _SEQ},
        "head_seq": _SEQ,
        "count": _SEQ,
        "created": _FLAG,
        "deduped": _FLAG,
        "performance": {"type": "object"},
    },
}


def _settled(word: str) -> dict[str, Any]:
    seqs = {"type": "array", "items": _SEQ}
    fields = {"topic": _NAME, **dict.fromkeys((word, "skipped", "ready", "in_flight"), _SEQ)}
    fields |= {f"{word}_seqs": seqs, "skipped_seqs": seqs}
    return {"answers": {"200": _object(**fields)}, "errors": ("404", "409", "413", "415")}


_OPERATIONS: dict[str, dict[str, Any]] = {
    "list_topics": {
        "summary": "Topics, sorted by name.",
        "parameters": [
            _query("prefix", {"type": "string"}),
            _query("page_size", {"type": "integer", "minimum": 1}),
            _query("cursor", {"type": "string"}),
        ],
        "answers": {
            "200": {
                "type": "object",
                "properties": {
                    "topics": {"type": "array", "items": _SUMMARY},
                    "next_cursor": {"type": "string"},
                    "performance": {"type": "object"},
                },
                "required": ["topics", "performance"],
            }
        },
    },
    "put_topic": {
        "summary": "Create a topic, or change the fields that are sent.",
        "body": ConfigPatch,
        "answers": dict.fromkeys(("200", "201"), _object(topic=_NAME, created=_FLAG, config=_CONFIG)),
        "errors": ("409", "413", "415"),
    },
    "get_topic": {
        "summary": "A topic's watermarks, counts and configuration.",
        "parameters": [_query("touch", _FLAG)],
        "answers": {"200": _object(**_TOPIC)},
        "errors": ("404",),
    },
    "write": {
        "summary": "Append records; with txn, part and chunk, spool them into a transaction.",
        "parameters": [
            _query("return_seqs", _FLAG),
            _query("txn", _ID),
            _query("part", _ID),
            _query("chunk", _SEQ),
            {"name": "Idempotency-Key", "in": "header", "required": False, "schema": _ID},
        ],
        "body": Write,
        "arrow_body": True,
        "answers": {"200": {"type": "object"}, "201": _WRITTEN},
        "errors": ("404", "409", "413", "415", "422"),
    },
    "delete_topic": {
        "summary": "Delete a topic with everything in it.",
        "parameters": [_query("if_empty", _FLAG)],
        "answers": {"200": _object(topic=_NAME, deleted=_FLAG, routers_removed=_SEQ)},
        "errors": ("409",),
    },
    "diff": {
        "summary": "Read the records behind a cursor, and every loss.",
        "body": DiffRequest,
        "body_optional": True,
        "arrow_answer": True,
        "answers": {
            "200": _object(
                topic=_NAME,
                epoch=_SEQ,
                records={"type": "array", "items": {"type": "object"}},
                next_from_seq=_SEQ,
                head_seq=_SEQ,
                earliest_seq=_SEQ,
                caught_up=_FLAG,
                tombstone=_TOMBSTONE,
                lag=_SEQ,
            )
        },
        "errors": ("404", "406", "413", "415"),
    },
    "seek": {
        "summary": "The cursor from which a read starts at a time.",
        "parameters": [_query("ts", _SEQ, required=True)],
        "answers": {"200": _object(from_seq=_SEQ)},
        "errors": ("404",),
    },
    "delete_records": {
        "summary": "Delete records by seq, by tag, or by both.",
        "body": DeleteRequest,
        "answers": {
            "200": _object(topic=_NAME, deleted=_SEQ, earliest_seq=_SEQ, head_seq=_SEQ, count=_SEQ, bytes=_SEQ)
        },
        "errors": ("404", "413", "415"),
    },
    "list_deletes": {
        "summary": "Past deletes, for those who follow them.",
        "parameters": [_query("after", _SEQ)],
        "answers": {
            "200": _object(
                topic=_NAME, deletes={"type": "array", "items": {"type": "object"}}, last_id=_SEQ, complete=_FLAG
            )
        },
        "errors": ("404",),
    },
    "list_ranges": {
        "summary": "What became of every seq: alive, deleted, or lost and why.",
        "parameters": [_query("from_seq", _SEQ), _query("to_seq", _SEQ), _query("limit", _SEQ)],
        "answers": {
            "200": _object(
                topic=_NAME,
                ranges={"type": "array", "items": _RANGE},
                complete=_FLAG,
                **dict.fromkeys(
                    ("epoch", "seq_base", "next_from_seq", "head_seq", "earliest_seq", "evict_floor"), _SEQ
                ),
            )
        },
        "errors": ("404",),
    },
    "get_txn": {
        "summary": "What a transaction has spooled.",
        "answers": {"200": _object(txn=_ID, parts={"type": "object"}, bytes=_SEQ, idle_ms=_SEQ)},
        "errors": ("404",),
    },
    "commit_txn": {
        "summary": "Publish the named parts over all topics at once.",
        "body": CommitRequest,
        "answers": {"200": _object(txn=_ID, topics={"type": "object"}, deduped=_FLAG)},
        "errors": ("404", "409", "413", "415", "422"),
    },
    "abort_txn": {
        "summary": "Drop a transaction.",
        "answers": {"200": _object(txn=_ID, aborted=_FLAG)},
        "errors": ("404",),
    },
    "claim": {
        "summary": "Lease jobs to a node.",
        "body": ClaimRequest,
        "answers": {
            "200": _object(
                topic=_NAME,
                claimed={"type": "array", "items": {"type": "object"}},
                lease_id={"type": ["string", "null"]},
                count=_SEQ,
                ready=_SEQ,
                lost=_SEQ,
                tombstone=_TOMBSTONE,
            )
        },
        "errors": ("404", "409", "413", "415"),
    },
    "ack": {"summary": "Jobs that are done: they go for good.", "body": HolderRequest, **_settled("acked")},
    "nack": {"summary": "Give jobs back, perhaps for later.", "body": NackRequest, **_settled("nacked")},
    "extend": {"summary": "Hold jobs longer.", "body": ExtendRequest, **_settled("extended")},
    "unblock": {"summary": "Put jobs back in line.", "body": UnblockRequest, **_settled("unblocked")},
    "redrive": {
        "summary": "Move dead-lettered jobs back where they came from.",
        "body": RedriveRequest,
        "body_optional": True,
        "answers": {"200": _object(topic=_NAME, moved=_SEQ, unblocked=_SEQ, skipped=_SEQ, ready=_SEQ)},
        "errors": ("404", "409", "413", "415", "422"),
    },
    "list_leases": {
        "summary": "Jobs that are out or set aside.",
        "parameters": [_query("page_size", _SEQ), _query("after", _SEQ)],
        "answers": {"200": _object(topic=_NAME, leases={"type": "array", "items": {"type": "object"}}, total=_SEQ)},
        "errors": ("404", "409"),
    },
    "work": {
        "summary": "Server-sent events: jobs, as many at a time as the worker can hold.",
        "parameters": [
            _query("node", {"type": "string"}, required=True),
            _query("max", {"type": "integer", "minimum": 1}),
            _query("lease_ms", _SEQ),
            _query("token", {"type": "string"}),
        ],
        "events": True,
        "answers": {"200": {}},
        "errors": ("404", "406", "409"),
    },
    "list_routers": {
        "summary": "Routers, sorted by name.",
        "parameters": [
            _query("prefix", {"type": "string"}),
            _query("source", {"type": "string"}),
            _query("dest", {"type": "string"}),
            _query("page_size", {"type": "integer", "minimum": 1}),
            _query("cursor", {"type": "string"}),
        ],
        "answers": {
            "200": {
                "type": "object",
                "properties": {
                    "routers": {"type": "array", "items": _ROUTER_SUMMARY},
                    "next_cursor": {"type": "string"},
                    "performance": {"type": "object"},
                },
                "required": ["performance", "routers"],
            }
        },
    },
    "put_router": {
        "summary": "Begin to copy what comes to one topic into another, or change how.",
        "body": RouterPatch,
        "answers": {status: _object(**_ROUTER, created=_FLAG) for status in ("200", "201")},
        "errors": ("404", "409", "413", "415"),
    },
    "get_router": {"summary": "How far a router is.", "answers": {"200": _object(**_ROUTER)}, "errors": ("404",)},
    "delete_router": {
        "summary": "End a router.",
        "answers": {"200": _object(router=_ROUTER_NAME, deleted=_FLAG)},
    },
    "create_watch": {
        "summary": "Begin to follow topics; the answer says where the stream is.",
        "parameters": [_query("lenient", _FLAG)],
        "body": WatchRequest,
        "answers": {
            "200": _object(
                wid={"type": "string"},
                stream_url={"type": "string"},
                session_ttl_ms=_SEQ,
                topics={"type": "object", "additionalProperties": {"type": "object"}},
            )
        },
        "errors": ("404", "413", "415"),
    },
    "watch": {
        "summary": "Server-sent events: records, tombstones, and what else happens to the topics.",
        "parameters": [
            {"name": "Last-Event-ID", "in": "header", "required": False, "schema": {"type": "string"}},
            _query("token", {"type": "string"}),
        ],
        "events": True,
        "answers": {"200": {}},
        "errors": ("404", "406"),
    },
    "websocket": {
        "summary": "The same over one WebSocket, with commands to subscribe, unsubscribe, publish and ping.",
        "parameters": [_query("token", {"type": "string"})],
        "answers": {"101": {}},
    },
    "health": {"summary": "Alive.", "answers": {"200": _object(status={"type": "string"})}},
    "ready": {"summary": "Ready for requests.", "answers": {"200": _object(status={"type": "string"})}},
    "metrics": {"summary": "Prometheus text, or JSON if that is accepted.", "text": True, "answers": {"200": {}}},
    "openapi": {"summary": "This document.", "answers": {"200": {"type": "object"}}},
    "page": {"summary": "The page.", "kind": "text/html", "answers": {"200": {}, "304": {}}},
    "page_file": {
        "summary": "A file of the page.",
        "kind": "*/*",
        "answers": {"200": {}, "304": {}, "308": {}},
        "errors": ("404",),
    },
}


def _without_raw(kind: Any) -> Any:
    """The same fields, with the JSON that passes through undecoded described as what it must be."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        if field.name == "records":
            fields.append((field.name, list[_without_raw(RecordIn)]))  # type: ignore[misc]  # made at run time
        elif field.type is msgspec.Raw:
            fields.append((field.name, dict[str, str] if field.name == "meta" else Any, msgspec.UNSET))
        else:
            fields.append((field.name, field.type, field.default))
    return msgspec.defstruct(kind.__name__, fields, kw_only=True)


@cache
def document() -> bytes:
    from topics.http.health import VERSION
    from topics.http.routes import ROUTES

    write = _without_raw(Write)
    bodies: list[Any] = [
        *(ConfigPatch, RouterPatch, write, DiffRequest, DeleteRequest, CommitRequest, Part, WatchRequest, ErrorAnswer),
        *(ClaimRequest, HolderRequest, NackRequest, ExtendRequest, UnblockRequest, RedriveRequest),
    ]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    references = dict(zip(bodies, schemas, strict=True))
    references[Write] = references[write]
    paths: dict[str, Any] = {}
    for path, methods in ROUTES.items():
        kind = next((kind for part, kind in _KINDS.items() if part in path), "topic")
        shown = path.replace("*", "{" + kind + "}")
        operations: dict[str, Any] = {}
        for method, route in methods.items():
            operations[method.lower()] = _operation(route.name, path, _OPERATIONS[route.name], route.scope, references)
        if "*" in path:
            schema = {"id": _ID, "file": _ID, "router": _ROUTER_NAME, "topic": _NAME}[kind]
            operations["parameters"] = [{"name": kind, "in": "path", "required": True, "schema": schema}]
        paths[shown] = operations
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "topics",
                "version": VERSION,
                "description": "A durable event log in which no loss is ever silent.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(name: str, path: str, what: dict[str, Any], scope: Scope, references: dict[Any, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, schema in what["answers"].items():
        content = {"text/plain": {"schema": {"type": "string"}}} if what.get("text") else {}
        if what.get("events"):
            content["text/event-stream"] = {"schema": {"type": "string"}}
        elif "kind" in what:
            content[what["kind"]] = {"schema": {"type": "string"}}
        elif status != "101":
            content[_JSON] = {"schema": schema}
        if what.get("arrow_answer"):
            content[_ARROW] = {"schema": {"type": "string", "format": "binary"}}
        answers[status] = {"description": "Success.", "content": content}
    for status in (*_ANY, *what.get("errors", ())):
        answers[status] = {
            "description": _ERRORS[status],
            "content": {_JSON: {"schema": references[ErrorAnswer]}},
        }
    operation: dict[str, Any] = {
        "operationId": name if not path.endswith("z") else name + "z",
        "summary": what["summary"],
        "responses": dict(sorted(answers.items())),
    }
    if scope is not Scope.NONE:
        operation["security"] = [{"key": []}, {}]
    if "parameters" in what:
        operation["parameters"] = what["parameters"]
    if "body" in what:
        content = {_JSON: {"schema": references[what["body"]]}}
        if what.get("arrow_body"):
            content[_ARROW] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": not what.get("body_optional"), "content": content}
    return operation
