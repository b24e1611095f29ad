"""Several topics, one commit: what a transaction has spooled so far, and the two shells around it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from topics.client import calls
from topics.client.calls import Call, NewRecords
from topics.core.answers import Committed, Spooled
from topics.core.errors import InvalidRequest, TopicsError

if TYPE_CHECKING:
    from topics.client.aio import AsyncClient
    from topics.client.sync import Client

_PART = "part"


class _Spool:
    """Counts what was spooled: the commit names it, so that nothing of it can be missing."""

    def __init__(self, client_id: str | None, client_seq: int | None) -> None:
        if (client_id is None) != (client_seq is None):
            raise InvalidRequest("client_id and client_seq go together")
        self.txn = secrets.token_hex(16)
        self._client_id = client_id
        self._client_seq = client_seq
        self._chunk = 0
        self._counts: dict[str, int] = {}
        self.is_over = False

    def call(self, topic: str, records: NewRecords, node: str | None) -> Call[Spooled]:
        if self.is_over:
            raise InvalidRequest("the transaction is over")
        call = calls.spool(self.txn, topic, _PART, self._chunk, records, node)
        self._chunk += 1
        return call

    def take(self, spooled: Spooled) -> None:
        self._counts[spooled.topic] = self._counts.get(spooled.topic, 0) + spooled.count

    @property
    def is_empty(self) -> bool:
        return not self._counts

    def commit(self) -> Call[Committed]:
        if self.is_over:
            raise InvalidRequest("the transaction is over")
        parts: list[Mapping[str, Any]] = [{"part": _PART, "records": self._counts}] if self._counts else []
        return calls.commit(self.txn, parts, self._client_id, self._client_seq)


class Transaction:
    """`result` is there when it is committed. With a `client_id` and a `client_seq` of your own, a commit is made once
    over the whole server, even if your program runs it again."""

    def __init__(self, client: Client, client_id: str | None, client_seq: int | None) -> None:
        self._client = client
        self._spool = _Spool(client_id, client_seq)
        self.result: Committed | None = None

    @property
    def txn(self) -> str:
        return self._spool.txn

    def write(self, topic: str, records: NewRecords, *, node: str | None = None) -> None:
        """Spools records: nobody sees them, and they have no seqs, until the commit."""
        self._spool.take(self._client.send(self._spool.call(topic, records, node)))

    def commit(self) -> Committed | None:
        """Publishes everything at once. Where nothing was written there is nothing to commit."""
        if not self._spool.is_empty:
            self.result = self._client.send(self._spool.commit())
        self._spool.is_over = True
        return self.result

    def abort(self) -> None:
        if not self._spool.is_over and not self._spool.is_empty:
            self._client.send(calls.abort(self._spool.txn))
        self._spool.is_over = True

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if not self._spool.is_over:
                self.commit()
            return
        # What went wrong is what the caller must see; the server drops an idle transaction by itself.
        with suppress(TopicsError):
            self.abort()


class AsyncTransaction:
    def __init__(self, client: AsyncClient, client_id: str | None, client_seq: int | None) -> None:
        self._client = client
        self._spool = _Spool(client_id, client_seq)
        self.result: Committed | None = None

    @property
    def txn(self) -> str:
        return self._spool.txn

    async def write(self, topic: str, records: NewRecords, *, node: str | None = None) -> None:
        """Spools records: nobody sees them, and they have no seqs, until the commit."""
        self._spool.take(await self._client.send(self._spool.call(topic, records, node)))

    async def commit(self) -> Committed | None:
        """Publishes everything at once. Where nothing was written there is nothing to commit."""
        if not self._spool.is_empty:
            self.result = await self._client.send(self._spool.commit())
        self._spool.is_over = True
        return self.result

    async def abort(self) -> None:
        if not self._spool.is_over and not self._spool.is_empty:
            await self._client.send(calls.abort(self._spool.txn))
        self._spool.is_over = True

    async def __aenter__(self) -> AsyncTransaction:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if not self._spool.is_over:
                await self.commit()
            return
        # What went wrong is what the caller must see; the server drops an idle transaction by itself.
        with suppress(TopicsError):
            await self.abort()
