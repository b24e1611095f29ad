"""`/v0/txns`, and the spooling form of a write."""

from __future__ import annotations

import msgspec

from topics.core.errors import InvalidRequest
from topics.core.records import AnyWrite, TextWrite
from topics.engine.transactions import TxnResult
from topics.http.app import App, check_name
from topics.http.exchange import Exchange
from topics.http.messages import CommitRequest

_decode_commit = msgspec.json.Decoder(CommitRequest)


def spool(app: App, exchange: Exchange, name: str, request: AnyWrite | TextWrite) -> None:
    txn, part = exchange.query.get("txn"), exchange.query.get("part")
    if txn is None or part is None or "chunk" not in exchange.query:
        raise InvalidRequest("txn, part and chunk go together")
    chunk = exchange.number("chunk")
    spooled = app.engine.transactions.spool(txn, name, part, chunk, request, owner=_owner(exchange))
    exchange.answer(
        {
            "txn": txn,
            "topic": name,
            "part": part,
            "chunk": chunk,
            "count": spooled.count,
            "repeated": spooled.repeated,
        }
    )


def commit(app: App, exchange: Exchange, txn: str) -> None:
    request: CommitRequest = app.body_of(exchange, _decode_commit)
    for part in request.parts:
        for name in part.records:
            check_name(exchange, name)
    staged = app.engine.transactions.commit(
        txn, request.parts, request.client_id, request.client_seq, owner=_owner(exchange)
    )

    def answer(result: TxnResult) -> None:
        topics = {
            name: {"first_seq": done.first_seq, "last_seq": done.last_seq, "count": done.count}
            for name, done in result.topics.items()
        }
        if not result.deduped:
            app.metrics.records_appended += sum(done.count for done in result.topics.values())
        exchange.answer({"txn": txn, "topics": topics, "deduped": result.deduped})

    app.when_done(exchange, staged, answer)


def abort(app: App, exchange: Exchange, txn: str) -> None:
    app.engine.transactions.abort(txn, owner=_owner(exchange))
    exchange.answer({"txn": txn, "aborted": True})


def get(app: App, exchange: Exchange, txn: str) -> None:
    exchange.answer(msgspec.structs.asdict(app.engine.transactions.get(txn, owner=_owner(exchange))))


def _owner(exchange: Exchange) -> str | None:
    assert exchange.key is not None
    return exchange.key.id
