"""`/v0/topics`: create, change, look, list, delete."""

from __future__ import annotations

from typing import Any

import msgspec

from topics.core.config import ConfigPatch
from topics.core.limits import MAX_PAGE_SIZE
from topics.engine.engine import Dropped, PutResult, TopicState
from topics.http.app import App, check_name
from topics.http.exchange import Exchange

_decode_patch = msgspec.json.Decoder(ConfigPatch)


def put(app: App, exchange: Exchange, name: str) -> None:
    patch: ConfigPatch = app.body_of(exchange, _decode_patch, empty=b"{}")
    check_name(exchange, patch.dead_letter)

    def answer(result: PutResult) -> None:
        exchange.answer(msgspec.structs.asdict(result), 201 if result.created else 200)

    app.when_done(exchange, app.engine.put(name, patch), answer)


def get(app: App, exchange: Exchange, name: str) -> None:
    exchange.answer(describe(app.engine.get(name, exchange.flag("touch", True))))


def list_(app: App, exchange: Exchange, _: str) -> None:
    page_size = min(exchange.number("page_size", 100), MAX_PAGE_SIZE)
    assert exchange.key is not None
    page = app.engine.list(
        exchange.query.get("prefix", ""), page_size, exchange.query.get("cursor"), exchange.key.may_see
    )
    fields: dict[str, Any] = {"topics": [describe(state) for state in page.topics]}
    if page.next_cursor is not None:
        fields["next_cursor"] = page.next_cursor
    exchange.answer(fields)


def delete(app: App, exchange: Exchange, name: str) -> None:
    def answer(result: Dropped) -> None:
        exchange.answer({"topic": name, **msgspec.structs.asdict(result)})

    app.when_done(exchange, app.engine.drop(name, exchange.flag("if_empty", False)), answer)


def describe(state: TopicState) -> dict[str, Any]:
    fields = msgspec.structs.asdict(state)
    if state.queue is None:
        del fields["queue"]
    else:
        fields["queue"] = msgspec.structs.asdict(state.queue)
    return fields
