"""`/v0/topics/:t`: write, diff, seek, delete, deletes. Write and diff are the hot paths: flat on purpose."""

from __future__ import annotations

from typing import Any

import msgspec

from topics.core.check import check_text
from topics.core.errors import TopicNotFound
from topics.core.limits import (
    DEFAULT_DIFF_BYTES,
    DEFAULT_DIFF_LIMIT,
    MAX_DIFF_BYTES,
    MAX_IDEMPOTENCY_KEY,
    MAX_WAIT_MS,
)
from topics.core.records import AnyWrite, decode_json, decode_write
from topics.core.selector import parse_selector
from topics.engine.append import WriteResult
from topics.engine.engine import DeleteResult, effective_priority
from topics.engine.read import Diff, Query, RunWalk, make_query
from topics.engine.topic import Topic
from topics.http import arrow
from topics.http.app import App, check_name, check_scope, need_json
from topics.http.auth import Scope
from topics.http.exchange import JSON, Exchange
from topics.http.messages import DeleteRequest, DiffRequest
from topics.http.protocol import decode_body
from topics.http.sharing import answer_write
from topics.http.txns import spool

_decode_diff = msgspec.json.Decoder(DiffRequest)
_decode_delete = msgspec.json.Decoder(DeleteRequest)
_NO_DIFF = b"{}"


def write(app: App, exchange: Exchange, name: str) -> None:
    body = exchange.body
    headers = exchange.headers
    if b"content-encoding" in headers:
        body = decode_body(exchange, app.limits.max_body_bytes)
    if headers.get(b"content-type") == JSON:
        request: AnyWrite = decode_write(body, app.limits)
    elif arrow.is_arrow(headers.get(b"content-type")):
        create, node = exchange.flag("create", True), exchange.query.get("node")
        if _is_spooled(exchange):
            spool(app, exchange, name, arrow.decode_spooled(body, app.limits, create, node))
            return
        request = arrow.decode_write(body, app.limits, create, node)
    else:
        need_json(exchange)
        request = decode_write(body, app.limits)
    if request.config is not None:
        check_scope(exchange, Scope.ADMIN)
        check_name(exchange, request.config.get("dead_letter"))
    if request.idempotency_key is None and b"idempotency-key" in headers:
        key = exchange.header(b"idempotency-key")
        request.idempotency_key = check_text("Idempotency-Key", key, MAX_IDEMPOTENCY_KEY)
    if b"topics-instance" in headers:
        # A router of another server: what it means may be gone, or not be there yet.
        app.shared.stage(name)
        app.engine.check_instance(name, exchange.header(b"topics-instance") or "")
    return_seqs = True
    if exchange.head.raw_query:
        return_seqs = exchange.flag("return_seqs", True)
        if _is_spooled(exchange):
            spool(app, exchange, name, request)
            return
    if app.pressure.level >= 3:
        if request.disable_backpressure:
            app.when_relieved(lambda: _write_late(app, exchange, name, request, return_seqs))
            return
        app.pressure.check()
    if app.shared.add(name, exchange, request, return_seqs):
        app.end_turn()
    else:
        _write(app, exchange, name, request, return_seqs)


def _is_spooled(exchange: Exchange) -> bool:
    return bool(exchange.query.keys() & {"txn", "part", "chunk"})


def _write_late(app: App, exchange: Exchange, name: str, request: AnyWrite, return_seqs: bool) -> None:
    if not exchange.is_cancelled:
        try:
            _write(app, exchange, name, request, return_seqs)
        except Exception as error:
            app.refuse(exchange, error)


def _write(app: App, exchange: Exchange, name: str, request: AnyWrite, return_seqs: bool) -> None:
    # Its place in the log is behind what came before it.
    app.shared.stage(name)
    commit = app.engine.write(name, request)

    def answer(result: WriteResult) -> None:
        app.metrics.records_appended += 0 if result.deduped else result.count
        answer_write(app, exchange, commit, result, return_seqs)

    app.when_done(exchange, commit, answer)


def diff(app: App, exchange: Exchange, name: str) -> None:
    headers = exchange.headers
    if headers.get(b"content-type") == JSON and exchange.body and b"content-encoding" not in headers:
        request: DiffRequest = decode_json(exchange.body, _decode_diff, app.limits)
    else:
        request = app.body_of(exchange, _decode_diff, empty=_NO_DIFF)
    as_arrow = arrow.is_accepted(headers.get(b"accept"))
    if app.pressure.level:
        app.pressure.check()
    query = _query_of(app, request, as_arrow)
    reading = Reading(app, exchange, name, query, as_arrow)
    reading.read(request.wait_ms)


def _query_of(app: App, request: DiffRequest, as_arrow: bool) -> Query:
    if not as_arrow and request.node is None and request.match is None:
        # The usual case, flat: the decoder has checked what there is.
        return Query(
            from_seq=request.from_seq,
            to_seq=request.to_seq,
            limit=min(request.limit or DEFAULT_DIFF_LIMIT, app.limits.max_limit),
            include_tags=request.include_tags,
            include_meta=request.include_meta,
            max_bytes=min(request.max_bytes or DEFAULT_DIFF_BYTES, MAX_DIFF_BYTES),
            epoch=request.epoch,
            include_via=request.include_via,
        )
    query = make_query(
        arrow.wide(app.limits) if as_arrow else app.limits,
        *(request.from_seq, request.to_seq, request.limit, request.node, request.match),
        *(request.include_tags, request.include_meta, request.max_bytes, request.epoch),
    )
    query = msgspec.structs.replace(query, include_via=request.include_via) if request.include_via else query
    return msgspec.structs.replace(query, max_bytes=arrow.budget(request.max_bytes)) if as_arrow else query


class Reading:
    """A diff, perhaps one that waits."""

    __slots__ = ("_app", "_as_arrow", "_deadline", "_exchange", "_name", "_query", "_timer", "_topic")

    def __init__(self, app: App, exchange: Exchange, name: str, query: Query, as_arrow: bool) -> None:
        self._app = app
        self._exchange = exchange
        self._name = name
        self._query = query
        self._as_arrow = as_arrow
        self._topic: Topic | None = None
        self._timer: Any = None
        self._deadline = 0.0

    def read(self, wait_ms: int) -> None:
        answer = self._diff()
        if wait_ms and not answer.count and answer.tombstone is None and answer.caught_up:
            self._wait(min(wait_ms, MAX_WAIT_MS))
        else:
            self._send(answer)

    def _diff(self) -> Diff:
        return self._app.engine.diff(self._name, self._query, walk_as=RunWalk if self._as_arrow else None)

    def _wait(self, wait_ms: int) -> None:
        app = self._app
        self._deadline = app.clock() + wait_ms / 1000
        self._timer = app.loop.call_at(self._deadline, self._on_deadline)
        self._exchange.on_cancel = self._stop
        self._exchange.hurry = self._on_deadline
        app.readings.add(self._on_deadline)
        self._topic = app.engine.when_changed(self._name, self._on_change)

    def _stop(self) -> None:
        if self._topic is not None:
            self._topic.forget_waiter(self._on_change)
            self._topic = None
            self._timer.cancel()
            self._app.readings.discard(self._on_deadline)

    def _on_change(self) -> None:
        topic = self._topic
        if topic is None:
            return
        if self._app.pressure.level >= 2 and not topic.dropped:
            priority = effective_priority(topic, self._app.engine.time.latest)
            self._app.deliveries.put_off(priority, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        topic = self._topic
        if topic is None:
            return
        try:
            if topic.dropped:
                raise TopicNotFound(f"topic {self._name!r} was deleted")
            answer = self._diff()
            if not answer.count and answer.tombstone is None and answer.caught_up:
                topic.add_waiter(self._on_change)
                return
            self._stop()
            self._send(answer)
        except Exception as error:
            self._stop()
            self._app.refuse(self._exchange, error)

    def _on_deadline(self) -> None:
        """Nothing came: that is the answer."""
        self._stop()
        try:
            self._send(self._diff())
        except Exception as error:
            self._app.refuse(self._exchange, error)

    def _send(self, answer: Diff) -> None:
        exchange = self._exchange
        metrics = self._app.metrics
        metrics.records_read += answer.count
        if answer.tombstone is not None:
            metrics.count_tombstone(answer.tombstone.reason)
        if self._as_arrow:
            exchange.send(200, arrow.encode_diff(answer, self._query.include_meta), arrow.MEDIA_TYPE)
            return
        timing = b'{"server_total_ms":%.3f,"records_scanned":%d}' % (exchange.elapsed_ms(), answer.scanned)
        exchange.send(200, answer.to_buffers(timing))


def seek(app: App, exchange: Exchange, name: str) -> None:
    exchange.answer({"from_seq": app.engine.seek(name, exchange.number("ts"))})


def delete(app: App, exchange: Exchange, name: str) -> None:
    request: DeleteRequest = app.body_of(exchange, _decode_delete)
    match = parse_selector(request.match) if request.match is not None else None
    if request.epoch is not None and app.engine.topic(name).epoch != request.epoch:
        raise TopicNotFound(f"topic {name!r} has no instance of epoch {request.epoch} any more; nothing was deleted")
    commit = app.engine.delete(name, request.before_seq, match, request.purpose)

    def answer(result: DeleteResult) -> None:
        exchange.answer({"topic": name, **msgspec.structs.asdict(result)})

    app.when_done(exchange, commit, answer)


def deletes(app: App, exchange: Exchange, name: str) -> None:
    past = app.engine.deletes(name, exchange.number("after", 0))
    entries = [each.to_json() for each in past.deletes]
    exchange.answer({"topic": name, "deletes": entries, "last_id": past.last_id, "complete": past.complete})
