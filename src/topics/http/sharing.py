"""Plain writes that arrive in the same turn share the work: one run of records, one frame, one commit for each topic.

Most of what a small write costs is not its bytes. Every write is still whole: its records have contiguous seqs, and
the frame that carries it is there or is not. A write that asks for anything unusual goes its own way, behind those that
came before it. (16 writers of one record: 29 µs of CPU a request instead of 67, `python -m benchmarks wire`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from topics.core.records import AnyWrite, PlainWrite
from topics.engine.append import SharedResult
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
        first = result.first_seq
        for exchange, write, return_seqs in writes:
            count = len(write.records)
            answer_write(app, exchange, commit, name, range(first, first + count), result.head_seq, return_seqs)
            first += count
        app.metrics.records_appended += first - result.first_seq


def answer_write(
    app: App,
    exchange: Exchange,
    commit: Commit,
    name: str,
    seqs: range | list[int],
    head_seq: int,
    return_seqs: bool,
    last_seq: int | None = None,
    count: int | None = None,
    created: bool = False,
    deduped: bool = False,
) -> None:
    """The answer of a write, rendered by hand: it is the most frequent one. `last_seq` and `count` differ from the seqs
    where holes are written."""
    if not return_seqs:
        listed = b""
    elif len(seqs) == 1:
        listed = b'"seqs":[%d],' % seqs[0]
    else:
        listed = b'"seqs":[%b],' % ",".join(map(str, seqs)).encode()
    committer = app.engine.committer
    exchange.send(
        201 if created else 200,
        b'{"topic":"%b","first_seq":%d,"last_seq":%d,%b"head_seq":%d,"count":%d,"created":%b,"deduped":%b,'
        b'"performance":{"server_total_ms":%.3f,"wal_append_ms":%.3f,"fsync_ms":%.3f}}'
        % (
            name.encode(),
            seqs[0],
            seqs[-1] if last_seq is None else last_seq,
            listed,
            head_seq,
            len(seqs) if count is None else count,
            b"true" if created else b"false",
            b"true" if deduped else b"false",
            exchange.elapsed_ms(),
            committer.write_seconds * 1000 if commit.level != Level.ACCEPTED else 0.0,
            committer.sync_seconds * 1000 if commit.level == Level.SYNCED else 0.0,
        ),
    )
