"""`topics.open`: the engine in this process, without a server. Safe to use from several threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec

from topics.core.check import check_count, check_flag, explain, show
from topics.core.clock import Clock, SystemClock
from topics.core.config import ConfigPatch, parse_patch
from topics.core.errors import InvalidRequest, TopicNotFound
from topics.core.limits import MAX_WAIT_MS, Limits
from topics.core.names import check_topic_name
from topics.core.records import decode_write, encode_write
from topics.core.routing import Remote, RouterPatch
from topics.core.selector import parse_selector
from topics.core.tombstone import Tombstone
from topics.engine.append import WriteResult
from topics.engine.commit import Commit
from topics.engine.engine import DeleteResult, Deletes, Dropped, Engine, Page, PutResult, TopicState
from topics.engine.options import Options
from topics.engine.read import Diff, make_query
from topics.engine.recovery import open_engine
from topics.engine.routers import PutRouter, RouterView
from topics.engine.syncer import InlineSyncer, Syncer, ThreadSyncer
from topics.engine.topic import Topic
from topics.engine.transactions import Part, Spooled, TxnResult, TxnState
from topics.storage.fs import FileSystem, OsFileSystem

_TICK_SECONDS = 0.02


class Log:
    """A data directory, open. Every call returns when its topic's durability class is satisfied."""

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock | None = None,
        limits: Limits | None = None,
        options: Options | None = None,
        background: bool = True,
    ) -> None:
        # The engine runs under the lock. Syncers signal without it: one that waited for the lock could never finish
        # what its holder is waiting for.
        self._lock = threading.Lock()
        self._signal = threading.Condition()
        self._signals = 0
        self._stop = threading.Event()
        self._limits = limits or Limits()
        wal_syncer: Syncer = ThreadSyncer("topics-wal", self._wake) if background else InlineSyncer()
        file_syncer: Syncer = ThreadSyncer("topics-files", self._wake) if background else InlineSyncer()
        try:
            with self._lock:
                self.engine: Engine = open_engine(
                    fs, clock or SystemClock(), self._limits, options or Options(), wal_syncer, file_syncer
                )
        except BaseException:
            wal_syncer.close()
            file_syncer.close()
            raise
        self._ticker: threading.Thread | None = None
        if background:
            self._ticker = threading.Thread(target=self._tick, name="topics-tick", daemon=True)
            self._ticker.start()

    def _wake(self) -> None:
        """On a syncer's thread: something is durable now."""
        with self._signal:
            self._signals += 1
            self._signal.notify_all()

    def _tick(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            with self._lock:
                if not self._stop.is_set():
                    self.engine.poll()
                    self.engine.tick()

    def _commit(self, stage: Callable[[], Commit]) -> Any:
        """Runs a turn of its own and waits until what it staged is done: others that wait meanwhile share the sync."""
        with self._lock:
            self.engine.poll()
            commit = stage()
            self.engine.flush()
        self._wait(commit)
        return commit.value()

    def _wait(self, commit: Commit) -> None:
        with self._lock:
            # Whoever ends it: this thread, another one, or the one that ticks.
            commit.on_done(lambda _: self._wake())
        while not commit.done:
            seen = self._signals
            with self._lock:
                self.engine.poll()
            with self._signal:
                while self._signals == seen and not commit.done:
                    self._signal.wait()

    def _catch_up(self, topic: str) -> None:
        """What routers bring is there before a read."""
        with self._lock:
            commit = self.engine.catch_up(topic)
        if commit is not None:
            self._wait(commit)

    # -- topics ----------------------------------------------------------------------------------------------------

    def put(self, topic: str, config: ConfigPatch | dict[str, Any] | None = None, /, **fields: Any) -> PutResult:
        """Creates a topic, or changes the given fields of its configuration."""
        patch = _patch_of(config, fields)
        result: PutResult = self._commit(lambda: self.engine.put(topic, patch))
        return result

    def get(self, topic: str, *, touch: bool = True) -> TopicState:
        """A topic's watermarks, counts and configuration; `touch=False` leaves its recency clock alone."""
        check_topic_name(topic)
        check_flag("touch", touch)
        self._catch_up(topic)
        with self._lock:
            return self.engine.get(topic, touch)

    def topics(self, prefix: str = "", page_size: int = 100, cursor: str | None = None) -> Page:
        with self._lock:
            return self.engine.list(prefix, page_size, cursor)

    def drop(self, topic: str, *, if_empty: bool = False) -> bool:
        """Deletes a topic with everything in it; says whether there was one."""
        result: Dropped = self._commit(lambda: self.engine.drop(topic, if_empty))
        return result.deleted

    # -- records ---------------------------------------------------------------------------------------------------

    def append(self, topic: str, records: Sequence[Any], **fields: Any) -> WriteResult:
        """Appends records, each a dict with `data` and optionally `tag`, `node`, `meta`; all of them or none.

        `fields` are the other fields of a write: `node`, `idempotency_key`, `client_id`, `create`, `config`.
        """
        return self.append_json(topic, encode_write(records, **fields))

    def append_json(self, topic: str, body: bytes) -> WriteResult:
        """Appends a write as it comes over the wire: `{"records": […]}`. `data` is kept byte for byte."""
        check_topic_name(topic)
        write = decode_write(_bytes_of(body), self._limits)
        result: WriteResult = self._commit(lambda: self.engine.write(topic, write))
        return result

    def diff(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        to_seq: int | None = None,
        limit: int = 0,
        node: str | Sequence[str] = (),
        match: Any = None,
        include_tags: bool = False,
        include_meta: bool = True,
        max_bytes: int | None = None,
        epoch: int | None = None,
        wait_ms: int = 0,
    ) -> Diff:
        """Reads the records behind a cursor, and is told of every loss there.

        With `wait_ms` (at most 30,000) it waits that long for something to tell, if the cursor is at the end.
        """
        check_topic_name(topic)
        deadline = time.monotonic() + min(check_count("wait_ms", wait_ms), MAX_WAIT_MS) / 1000
        query = make_query(
            self._limits, from_seq, to_seq, limit, node, match, include_tags, include_meta, max_bytes, epoch
        )
        waiting_on: Topic | None = None
        self._catch_up(topic)
        while True:
            changed = threading.Event()
            with self._lock:
                if waiting_on is not None and waiting_on.dropped:
                    raise TopicNotFound(f"topic {topic!r} was deleted")
                answer = self.engine.diff(topic, query)
                left = deadline - time.monotonic()
                if left <= 0 or answer.count or answer.tombstone is not None or not answer.caught_up:
                    return answer
                waiting_on = self.engine.when_changed(topic, changed.set)
            if not changed.wait(left):
                with self._lock:
                    waiting_on.forget_waiter(changed.set)

    def read(self, topic: str, from_seq: int = 0, **query: Any) -> Iterator[dict[str, Any] | Tombstone]:
        """Everything behind a cursor up to the head: records as dicts, losses as tombstones.

        It follows the topic that it began with: if that is deleted and made again meanwhile, a tombstone says so.
        """
        to_seq = query.get("to_seq")
        while True:
            answer = self.diff(topic, from_seq, **query)
            query["epoch"] = answer.epoch
            if answer.tombstone is not None:
                yield answer.tombstone
            yield from answer.records
            from_seq = answer.next_from_seq
            if answer.caught_up or (to_seq is not None and from_seq >= to_seq):
                return

    def seek(self, topic: str, ts: int) -> int:
        """The cursor from which a read starts with the first record that is not older than `ts`."""
        check_topic_name(topic)
        self._catch_up(topic)
        with self._lock:
            return self.engine.seek(topic, ts)

    def delete(
        self, topic: str, *, before_seq: int | None = None, match: Any = None, purpose: str = "erase"
    ) -> DeleteResult:
        """Deletes records for good: every seq below `before_seq`, or by tag, or both."""
        check_topic_name(topic)
        selector = parse_selector(match) if match is not None else None
        self._catch_up(topic)
        result: DeleteResult = self._commit(lambda: self.engine.delete(topic, before_seq, selector, purpose))
        return result

    def deletes(self, topic: str, after: int = 0) -> Deletes:
        check_topic_name(topic)
        with self._lock:
            return self.engine.deletes(topic, after)

    # -- routers ---------------------------------------------------------------------------------------------------

    def route(self, router: str, **fields: Any) -> PutRouter:
        """Creates a router from `source` to `dest`, or changes the given fields of one."""
        try:
            patch = msgspec.convert(fields, RouterPatch)
        except msgspec.ValidationError as error:
            raise InvalidRequest(explain(error)) from None
        if isinstance(patch.source, Remote) or isinstance(patch.dest, Remote):
            raise InvalidRequest("source and dest must be topics of this log: routers between servers need a server")
        result: PutRouter = self._commit(lambda: self.engine.routers.put(router, patch))
        return result

    def router(self, router: str) -> RouterView:
        """How far a router is."""
        with self._lock:
            home = self.engine.routers.find(router).home.name
        self._catch_up(home)
        with self._lock:
            return self.engine.routers.view(self.engine.routers.find(router))

    def routers(self) -> list[RouterView]:
        with self._lock:
            return [self.engine.routers.view(each) for each in self.engine.routers.named()]

    def unroute(self, router: str) -> bool:
        """Ends a router; says whether there was one."""
        existed: bool = self._commit(lambda: self.engine.routers.delete(router))
        return existed

    # -- transactions ----------------------------------------------------------------------------------------------

    def spool(self, txn: str, topic: str, part: str, chunk: int, records: Sequence[Any], **fields: Any) -> Spooled:
        """Adds a chunk to a part of a transaction, invisible until the commit."""
        write = decode_write(encode_write(records, **fields), self._limits)
        with self._lock:
            return self.engine.transactions.spool(txn, topic, part, chunk, write)

    def commit(
        self,
        txn: str,
        parts: Sequence[Part | dict[str, Any]],
        client_id: str | None = None,
        client_seq: int | None = None,
    ) -> TxnResult:
        """Publishes the named parts of a transaction over all its topics at once."""
        try:
            named = msgspec.convert(parts, list[Part], from_attributes=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"parts: {explain(error)}") from None
        result: TxnResult = self._commit(lambda: self.engine.transactions.commit(txn, named, client_id, client_seq))
        return result

    def abort(self, txn: str) -> None:
        with self._lock:
            self.engine.transactions.abort(txn)

    def txn(self, txn: str) -> TxnState:
        with self._lock:
            return self.engine.transactions.get(txn)

    # -- the directory ---------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Moves everything out of the WAL now; it happens by itself as the WAL grows."""
        with self._lock:
            self.engine.checkpoint()

    def close(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
            self.engine.close()
        self._wake()
        if self._ticker is not None and threading.current_thread() is not self._ticker:
            self._ticker.join()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_log(
    path: str | os.PathLike[str],
    *,
    clock: Clock | None = None,
    limits: Limits | None = None,
    options: Options | None = None,
) -> Log:
    """Opens a data directory, making it if it is not there."""
    return Log(OsFileSystem(path), clock, limits or Limits.from_env(os.environ), options)


def _patch_of(config: Any, fields: dict[str, Any]) -> ConfigPatch:
    if isinstance(config, ConfigPatch) and not fields:
        return config
    if config is not None and not isinstance(config, dict):
        raise InvalidRequest(f"config must be a dict, got {show(config)}")
    return parse_patch({**(config or {}), **fields})


def _bytes_of(body: Any) -> bytes:
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InvalidRequest(f"body must be bytes, got {show(body)}")
    return bytes(body)
