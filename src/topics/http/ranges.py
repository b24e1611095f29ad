"""`/v0/topics/:t/ranges`: what became of every seq of a topic."""

from __future__ import annotations

import msgspec

from topics.http.app import App
from topics.http.exchange import Exchange


def ranges(app: App, exchange: Exchange, name: str) -> None:
    to_seq = exchange.number("to_seq") if "to_seq" in exchange.query else None
    found = app.engine.ranges(name, exchange.number("from_seq", 0), to_seq, exchange.number("limit", 0))
    exchange.answer(msgspec.structs.asdict(found))
