"""Plain writes that arrive in the same turn share the work: one run of records, one frame, one commit for each topic.

Most of what a small write costs is not its bytes. Every write is still whole: its records have contiguous seqs, and
the frame that carries it is there or is not. A write that asks for anything unusual goes its own way, behind those that
came before it. (16 writers of one record: 29 µs of CPU a request instead of 67, `python -m benchmarks wire`.)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from topics.core.records import AnyWrite, PlainWrite
from topics.engine.append import SharedResult, WriteResult
from topics.engine.commit import Commit, Level
from topics.http.exchange import Exchange

if TYPE_CHECKING:
    from topics.http.app import App

# A turn's share for one topic; past that the next one begins.
_MAX_RECORDS = 10_000


class SharedWrites:
    def __init__(self, app: App) -> None:
        self._app = app
        self._waiting: dict[str, list[tuple[Exchange, PlainWrite, bool]]] = {}

    def add(self, name: str, exchange: Exchange, write: AnyWrite, return_seqs: bool) -> bool:
        """Takes a write, if it is one that can share."""
        if (
            not isinstance(write, PlainWrite)
            or write.idempotency_key is not None
            or write.client_id is not None
            or write.node is not None
        ):
            return False
        topic = self._app.engine.staged_topic(name)
        if topic is None or topic.staged_config.discard != "old":
            return False
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = self._waiting[name] = []
        waiting.append((exchange, write, return_seqs))
        return True

    def stage(self, name: str) -> None:
        """Stages what waits for a topic: something that must come behind it is about to be staged."""
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            self._stage(name, waiting)

    def stage_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for name, writes in waiting.items():
            self._stage(name, writes)

    def _stage(self, name: str, writes: list[tuple[Exchange, PlainWrite, bool]]) -> None:
        start = records = 0
        for index, (_, write, _) in enumerate(writes):
            if records and records + len(write.records) > _MAX_RECORDS:
                self._stage_some(name, writes[start:index])
                start, records = index, 0
            records += len(write.records)
        self._stage_some(name, writes[start:])

    def _stage_some(self, name: str, writes: list[tuple[Exchange, PlainWrite, bool]]) -> None:
        app = self._app
        try:
            commit = app.engine.write_shared(name, [write for _, write, _ in writes])
        except Exception as error:
            for exchange, _, _ in writes:
                app.refuse(exchange, error)
            return
        commit.on_done(lambda done: self._answer(done, name, writes))

    def _answer(self, commit: Commit, name: str, writes: list[tuple[Exchange, PlainWrite, bool]]) -> None:
        app = self._app
        try:
            result = commit.value()
        except Exception as error:
            for exchange, _, _ in writes:
                app.refuse(exchange, error)
            return
        assert isinstance(result, SharedResult)
        # Flat for speed, and what all answers share is rendered once.
        first = seq = result.first_seq
        start = b'{"topic":"%b","first_seq":' % name.encode()
        head_seq = result.head_seq
        end = _timing(app, commit)
        now = time.perf_counter()
        for exchange, write, return_seqs in writes:
            count = len(write.records)
            last = seq + count - 1
            if not return_seqs:
                listed = b""
            elif count == 1:
                listed = b'"seqs":[%d],' % seq
            else:
                listed = b'"seqs":[%b],' % ",".join(map(str, range(seq, last + 1))).encode()
            exchange.send(
                200,
                b'%b%d,"last_seq":%d,%b"head_seq":%d,"count":%d,"created":false,"deduped":false,'
                b'"performance":{"server_total_ms":%.3f,%b'
                % (start, seq, last, listed, head_seq, count, (now - exchange.started) * 1000, end),
            )
            seq = last + 1
        app.metrics.records_appended += seq - first


def answer_write(app: App, exchange: Exchange, commit: Commit, result: WriteResult, return_seqs: bool) -> None:
    """The answer of a write that went its own way."""
    listed = b'"seqs":[%b],' % ",".join(map(str, result.seqs)).encode() if return_seqs else b""
    exchange.send(
        201 if result.created else 200,
        b'{"topic":"%b","first_seq":%d,"last_seq":%d,%b"head_seq":%d,"count":%d,"created":%b,"deduped":%b,'
        b'"performance":{"server_total_ms":%.3f,%b'
        % (
            result.topic.encode(),
            result.first_seq,
            result.last_seq,
            listed,
            result.head_seq,
            result.count,
            b"true" if result.created else b"false",
            b"true" if result.deduped else b"false",
            exchange.elapsed_ms(),
            _timing(app, commit),
        ),
    )


def _timing(app: App, commit: Commit) -> bytes:
    """The end of an answer: what it waited for."""
    committer = app.engine.committer
    return b'"wal_append_ms":%.3f,"fsync_ms":%.3f}}' % (
        committer.write_seconds * 1000 if commit.level != Level.ACCEPTED else 0.0,
        committer.sync_seconds * 1000 if commit.level == Level.SYNCED else 0.0,
    )
