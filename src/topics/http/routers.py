"""`/v0/routers`: create, change, look, list, delete."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import msgspec

from topics.core.check import check_integer, check_text
from topics.core.errors import RouterCycle
from topics.core.limits import MAX_PAGE_SIZE
from topics.core.routing import Remote, RouterConfig, RouterPatch, resolve
from topics.engine.engine import decode_cursor, encode_cursor
from topics.engine.routers import PutRouter, cycle_of
from topics.http.app import App
from topics.http.auth import Key
from topics.http.exchange import Exchange

_decode_patch = msgspec.json.Decoder(RouterPatch)
_MAX_CURSOR = 1000


def put(app: App, exchange: Exchange, name: str) -> None:
    patch: RouterPatch = app.body_of(exchange, _decode_patch)
    key = exchange.key
    assert key is not None
    known = app.engine.state.routes.by_name.get(name)
    if known is not None:
        _need(key, known.staged_config)
    config = resolve(patch, known.staged_config if known is not None else None)
    _need(key, config)
    for end in (config.source, config.dest):
        if isinstance(end, Remote):
            app.remotes.check(end)

    def answer(result: PutRouter) -> None:
        def send() -> None:
            view = app.engine.routers.view(router) if router is not None else result.view
            exchange.answer({**view.to_json(), "created": result.created}, 201 if result.created else 200)

        router = app.engine.state.routes.by_name.get(name)
        if router is not None and isinstance(config.source, Remote):
            app.remotes.when_begun(router, send)
        else:
            send()

    try:
        commit = app.engine.routers.put(name, patch)
    except RouterCycle as error:
        # The path may lead through what the key may not see.
        raise cycle_of([name if key.may_see(name) else "..." for name in error.detail["cycle"]]) from None
    app.when_done(exchange, commit, answer)


def get(app: App, exchange: Exchange, name: str) -> None:
    assert exchange.key is not None
    router = app.engine.routers.find(name)
    _need(exchange.key, router.config)

    def answer() -> None:
        exchange.answer(app.engine.routers.view(app.engine.routers.find(name)).to_json())

    app.when_caught_up(exchange, (router.home.name,), answer)


def list_(app: App, exchange: Exchange, _: str) -> None:
    key, query = exchange.key, exchange.query
    assert key is not None
    page_size = check_integer("page_size", min(exchange.number("page_size", 100), MAX_PAGE_SIZE), 1)
    prefix = query.get("prefix", "")
    names = sorted(app.engine.state.routes.by_name)
    start = bisect_left(names, prefix)
    if "cursor" in query:
        start = max(start, bisect_right(names, decode_cursor(check_text("cursor", query["cursor"], _MAX_CURSOR))))
    shown: list[dict[str, Any]] = []
    fields: dict[str, Any] = {"routers": shown}
    for name in names[start:]:
        if not name.startswith(prefix):
            break
        router = app.engine.state.routes.by_name[name]
        if not router.is_active or not _may_see(key, router.config) or not _is_between(router.config, query):
            continue
        if len(shown) == page_size:
            fields["next_cursor"] = encode_cursor(shown[-1]["router"])
            break
        shown.append(app.engine.routers.view(router).to_json())
    exchange.answer(fields)


def delete(app: App, exchange: Exchange, name: str) -> None:
    assert exchange.key is not None
    router = app.engine.state.routes.by_name.get(name)
    if router is not None:
        _need(exchange.key, router.config)

    def answer(existed: bool) -> None:
        exchange.answer({"router": name, "deleted": existed})

    app.when_done(exchange, app.engine.routers.delete(name), answer)


def _local_ends(config: RouterConfig) -> list[str]:
    return [end for end in (config.source, config.dest) if isinstance(end, str)]


def _need(key: Key, config: RouterConfig) -> None:
    for name in _local_ends(config):
        key.need_topic(name)


def _may_see(key: Key, config: RouterConfig) -> bool:
    return all(key.may_see(name) for name in _local_ends(config))


def _is_between(config: RouterConfig, query: dict[str, str]) -> bool:
    """Whether a router has the ends that a list was asked for; a remote one goes by its topic's name."""
    for field, end in (("source", config.source), ("dest", config.dest)):
        wanted = query.get(field)
        if wanted is not None and wanted != (end.topic if isinstance(end, Remote) else end):
            return False
    return True
