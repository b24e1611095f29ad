"""Routers between servers. One task each: it pushes what its source has, or pulls what the other server has.

A push is a strict producer over there (`client_seq` is the seq here), so a repeat changes nothing; a pull takes records
and cursor into the log as one event. Both resume from the cursor, whichever side was away.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Raw

from topics.core.errors import InvalidRequest, TopicsError
from topics.core.records import Batch, RecordIn, contents, render_run
from topics.core.routing import Remote
from topics.core.tombstone import Hole
from topics.engine.commit import Commit
from topics.engine.copying import Cargo, chosen, has_been
from topics.engine.router import FROM_EARLIEST, FROM_HEAD, Router

if TYPE_CHECKING:
    from topics.http.app import App

_WAIT_MS = 20_000
_BEGIN_SECONDS = 3.0
_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 40.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0
_MAX_RECORDS = 1000
_MAX_BYTES = 4 << 20
_METADATA = ("fd00:ec2::254", "100.100.100.200")
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
_TOO_MUCH = ("topic_full", "batch_too_large", "payload_too_large")
_encode = msgspec.json.Encoder().encode


class Refused(TopicsError):
    """The other server said no, or nothing that we understand: `answered` is its status, if it is known."""

    answered: int | None = None


class _Again(Exception):
    """What we took for granted is not so any more: look again."""


class _Pulled(msgspec.Struct, rename={"seq": "$seq", "tag": "$tag", "node": "$node", "via": "$via"}):
    seq: int
    data: Raw
    meta: Raw = Raw()
    tag: str | None = None
    node: str | None = None
    via: str | None = None


class _Gap(msgspec.Struct):
    gap_from: int
    gap_to: int
    via: str = ""


class _Page(msgspec.Struct):
    epoch: int
    records: list[_Pulled]
    next_from_seq: int
    head_seq: int
    caught_up: bool
    instance: str
    tombstone: _Gap | None = None


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""
    detail: dict[str, Any] = {}


class _Refusal(msgspec.Struct):
    error: _Error


class _There(msgspec.Struct):
    """A topic of another server."""

    instance: str
    epoch: int
    head_seq: int
    earliest_seq: int


_decode_page = msgspec.json.Decoder(_Page).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode
_decode_there = msgspec.json.Decoder(_There).decode


class Remotes:
    """The tasks of all routers that lead to other servers, or come from them."""

    def __init__(self, app: App, jitter: Callable[[], float] = random.random) -> None:
        self._app = app
        self._jitter = jitter
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._version = -1
        self._pool: Any = None
        self._beginnings: dict[int, list[Callable[[], None]]] = {}

    def when_begun(self, router: Router, call: Callable[[], None]) -> None:
        """Calls when it is known where a router begins on another server. One that is not to be reached soon is read
        from its earliest record: whatever is written there from now on must not be passed over."""
        self.tick()
        if router.cursor != FROM_HEAD or router.is_removed:
            call()
            return
        self._beginnings.setdefault(router.id, []).append(call)
        self._app.loop.call_later(_BEGIN_SECONDS, self._begin_at_earliest, router)

    def _begin_at_earliest(self, router: Router) -> None:
        if router.id in self._beginnings:
            commit = begin_at_earliest(self._app, router)
            if commit is not None:
                commit.on_done(lambda _: self.begun(router))
                self._app.end_turn()
            else:
                self.begun(router)

    def begun(self, router: Router) -> None:
        for call in self._beginnings.pop(router.id, ()):
            call()

    def check(self, end: Remote) -> None:
        """Refuses what no router may reach: addresses that only this machine's keepers should talk to."""
        host = urlsplit(end.url).hostname or ""
        if not self._app.settings.allow_link_local and is_forbidden(host):
            raise InvalidRequest(
                f"url: {host} is a link-local or metadata address; TOPICS_ALLOW_LINK_LOCAL permits those"
            )

    def tick(self) -> None:
        """Begins and ends tasks as routers come and go."""
        routes = self._app.engine.state.routes
        if self._version == routes.version:
            return
        wanted = {router.id: router for router in routes.by_name.values() if not router.is_local}
        for number in [number for number in self._tasks if number not in wanted]:
            self._tasks.pop(number).cancel()
        if all([router.is_active for router in wanted.values()]):
            self._version = routes.version
        for number, router in wanted.items():
            if number not in self._tasks and router.is_active:
                task = _Task(self._app, router, self, self._jitter)
                self._tasks[number] = self._app.loop.create_task(task.run())

    @property
    def pool(self) -> Any:
        if self._pool is None:
            import httpcore

            context = ssl.create_default_context()
            guarded = _guarded(self._app.settings.allow_link_local)
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=context, network_backend=guarded, max_connections=None
            )
        return self._pool

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()


class _Task:
    def __init__(self, app: App, router: Router, remotes: Remotes, jitter: Callable[[], float]) -> None:
        self._app = app
        self._router = router
        self._remotes = remotes
        self._pool = remotes.pool
        self._jitter = jitter
        self._failures = 0
        self._there: _There | None = None
        # Of a push: how many records the other server takes at once.
        self._page = _MAX_RECORDS

    @property
    def _end(self) -> Remote:
        config = self._router.staged_config
        end = config.dest if self._router.is_push else config.source
        assert isinstance(end, Remote)
        return end

    async def run(self) -> None:
        routers = self._app.engine.routers
        while not self._router.is_removed:
            try:
                if self._router.is_push:
                    await self._push()
                else:
                    await self._pull()
                self._failures = 0
                routers.recovered(self._router)
            except asyncio.CancelledError:
                raise
            except _Again:
                continue
            except TopicsError as error:
                await self._pause(error.message)
            except Exception as error:
                await self._pause(f"{self._end.url}: {_reason(error)}")

    async def _pause(self, why: str) -> None:
        """Longer and longer, and never in step with others."""
        self._app.engine.routers.failed(self._router, why)
        await _done(begin_at_earliest(self._app, self._router), self._app)
        self._remotes.begun(self._router)
        self._there = None
        pause = min(_FIRST_PAUSE * 2.0**self._failures, _LONGEST_PAUSE)
        self._failures = min(self._failures + 1, 16)
        await asyncio.sleep(pause * (0.5 + self._jitter()))

    # -- the other server ------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, verb: str = "", body: Any = None, instance: str | None = None
    ) -> tuple[int, bytes]:
        end = self._end
        url = f"{end.url.rstrip('/')}/v0/topics/{quote(end.topic, safe='')}{verb}"
        headers = {"content-type": "application/json"}
        if end.key is not None:
            headers["authorization"] = f"Bearer {end.key}"
        if instance is not None:
            headers["topics-instance"] = instance
        content = _encode(body) if body is not None else None
        timeout = {"connect": _CONNECT_SECONDS, "read": _ANSWER_SECONDS, "write": _ANSWER_SECONDS, "pool": None}
        answer = await self._pool.request(
            method, url, headers=headers, content=content, extensions={"timeout": timeout}
        )
        return answer.status, answer.content

    async def _meet(self) -> _There | None:
        """Which topic it is over there; None while there is none."""
        if self._there is None:
            status, body = await self._ask("GET", "?touch=false")
            if status == 404 and _error_of(body).code == "topic_not_found":
                return None
            self._there = _decode_there(_good(status, body))
        return self._there

    # -- push ------------------------------------------------------------------------------------------------------

    async def _push(self) -> None:
        app, router = self._app, self._router
        cargo = app.engine.routers.next_cargo(router)
        if cargo is None:
            await self._news()
            return
        there = await self._meet_dest(cargo)
        records = list(self._outgoing(cargo, there))
        while records:
            page = _page_of(records, self._page)
            known = await self._push_page(page, there)
            if known is None:
                # Too much at once for the other server, or for the room that its topic has.
                self._page = max(len(page) // 2, 1)
                continue
            self._page = min(2 * self._page, _MAX_RECORDS)
            done = [record for record in records if record["client_seq"] <= known]
            records = records[len(done) :]
            last = known if records else cargo.last
            count = sum("data" in record for record in done)
            await _done(app.engine.routers.pushed(router, last, count), app)
        if router.cursor < cargo.last:
            await _done(app.engine.routers.pushed(router, cargo.last, 0), app)

    async def _meet_dest(self, cargo: Cargo) -> str | None:
        """Which topic it is over there, so that nothing enters a topic that it has been through; empty if there is none
        yet, None if the key may not know."""
        try:
            there = await self._meet()
        except Refused as refusal:
            # Who may only write may do that, as long as nothing could come back.
            if refusal.answered == 403 and not cargo.has_vias:
                return None
            raise
        return there.instance if there is not None else ""

    async def _push_page(self, page: list[dict[str, Any]], there: str | None) -> int | None:
        """Sends records; says how far the other server has them then. None if it will not take as many at once."""
        app, router = self._app, self._router
        client = f"router:{app.engine.state.server_id}.{router.id}.{router.source_epoch}"
        body = {"client_id": client, "create": router.staged_config.create_dest, "records": page}
        status, answer = await self._ask("POST", "?return_seqs=false", body, there)
        last: int = page[-1]["client_seq"]
        if status < 300:
            if there == "":
                # It has made the topic: the next page is for that one.
                self._there = None
                raise _Again
            return last
        error = _error_of(answer)
        if error.code == "wrong_instance":
            self._there = None
            raise _Again
        if error.code == "idempotency_conflict":
            # It has some of them already: somebody died between its answer and our cursor.
            known = error.detail.get("last_client_seq")
            if isinstance(known, int) and known >= page[0]["client_seq"]:
                return known
        if error.code in _TOO_MUCH and len(page) > 1:
            return None
        raise Refused(f"{self._end.url} answered {status} {error.code}: {error.message:.300}")

    def _outgoing(self, cargo: Cargo, there: str | None) -> Iterator[dict[str, Any]]:
        config = self._router.staged_config
        instance = self._app.engine.state.instance(self._router.source_epoch)
        for piece in cargo.pieces:
            if isinstance(piece, Hole):
                if not has_been(piece.via, there or ""):
                    path = f"{piece.via},{instance}" if piece.via else instance
                    length = piece.last - piece.first + 1
                    yield {"hole": length, "reason": "source_trim", "client_seq": piece.last, "via": path}
                continue
            found = contents(piece)
            for index in chosen(piece, config.filter, there or ""):
                data, meta = found[index]
                via = piece.vias[index] if piece.vias is not None else None
                record: dict[str, Any] = {"data": Raw(data), "client_seq": piece.first_seq + index}
                record["via"] = instance if via is None else f"{via},{instance}"
                if meta:
                    record["meta"] = Raw(meta)
                if config.preserve_tag and piece.tags is not None and piece.tags[index] is not None:
                    record["tag"] = piece.tags[index]
                if config.preserve_node and piece.nodes is not None and piece.nodes[index] is not None:
                    record["node"] = piece.nodes[index]
                yield record

    async def _news(self) -> None:
        """Waits until the source may have something."""
        name = self._router.source_name
        topic = self._app.engine.state.by_name.get(name or "")
        changed = asyncio.Event()
        if topic is not None:
            topic.add_waiter(changed.set)
        try:
            await asyncio.wait_for(changed.wait(), 1.0)
        except TimeoutError:
            if topic is not None:
                topic.forget_waiter(changed.set)

    # -- pull ------------------------------------------------------------------------------------------------------

    async def _pull(self) -> None:
        app, router = self._app, self._router
        routers = app.engine.routers
        there = await self._meet()
        if there is None:
            # What is not there yet is read from its first record, wherever this router was to begin.
            if router.cursor < 0:
                await _done(routers.begin_at(router, 0, 0), app)
            raise Refused(f"{self._end.url}: topic {self._end.topic!r} does not exist")
        if not router.source_epoch:
            at = {FROM_HEAD: there.head_seq, FROM_EARLIEST: there.earliest_seq - 1}.get(router.cursor, 0)
            await _done(routers.begin_at(router, there.epoch, at, there.instance), app)
        self._remotes.begun(router)
        # It may have been made again, or its server may have lost everything: then it is read from its beginning.
        is_new = router.instance not in ("", there.instance)
        query = {
            "from_seq": 0 if is_new else router.cursor,
            "limit": _MAX_RECORDS,
            "max_bytes": _MAX_BYTES,
            "include_tags": True,
            "include_via": True,
            # One that was away says so soon when it is back.
            "wait_ms": 0 if is_new or self._failures else _WAIT_MS,
        }
        status, body = await self._ask("POST", "/diff", query)
        page = _decode_page(_good(status, body))
        if page.instance != there.instance:
            # It is another one since we met.
            self._there = None
            return
        router.remote_head = page.head_seq
        pieces = _pieces_of(page)
        if is_new and page.tombstone is None:
            # What was not read of the old one, nobody can say.
            pieces.insert(0, Hole(0, 0, "source_trim"))
        first = 0 if is_new else router.cursor + 1
        if page.next_from_seq < first and not pieces:
            return
        cargo = Cargo(first, page.next_from_seq, pieces, there.instance)
        await _done(routers.take(router, cargo, page.epoch, there.instance), app)


def begin_at_earliest(app: App, router: Router) -> Commit | None:
    if router.cursor != FROM_HEAD or router.is_removed or app.engine.committer.read_only is not None:
        return None
    return app.engine.routers.begin_at(router, 0, FROM_EARLIEST)


def _pieces_of(page: _Page) -> list[Batch | Hole]:
    pieces: list[Batch | Hole] = []
    gap = page.tombstone
    if gap is not None:
        pieces.append(Hole(gap.gap_from, gap.gap_to, "source_trim", gap.via))
    run: list[_Pulled] = []
    for record in page.records:
        if run and run[-1].seq + 1 != record.seq:
            pieces.append(_batch_of(run))
            run = []
        run.append(record)
    if run:
        pieces.append(_batch_of(run))
    return pieces


def _batch_of(run: Sequence[_Pulled]) -> Batch:
    records = [RecordIn(record.data, record.tag, record.node, record.meta, via=record.via) for record in run]
    return render_run(records, None, run[0].seq, 0)


def _page_of(records: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The first records, as many as go in one write."""
    size = 0
    for count, record in enumerate(records[:most]):
        size += len(record["data"]) + len(record.get("meta", b"")) if "data" in record else 0
        if count and size > _MAX_BYTES:
            return list(records[:count])
    return list(records[:most])


async def _done(commit: Commit | None, app: App) -> None:
    """Waits for a commit of the engine."""
    if commit is None:
        return
    done = app.loop.create_future()

    def on_done(_: Commit) -> None:
        if not done.done():
            done.set_result(None)

    commit.on_done(on_done)
    app.end_turn()
    await done
    commit.value()


def _good(status: int, body: bytes) -> bytes:
    if status >= 300:
        error = _error_of(body)
        refusal = Refused(f"the other server answered {status} {error.code}: {error.message:.300}")
        refusal.answered = status
        raise refusal
    return body


def _error_of(body: bytes) -> _Error:
    try:
        return _decode_refusal(body).error
    except msgspec.DecodeError:
        return _Error("", body[:100].decode("utf-8", "replace"))


def _reason(error: Exception) -> str:
    """What went wrong, without secrets: nothing of a request is in it."""
    return str(error) or type(error).__name__


def is_forbidden(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().rstrip(".") == "metadata.google.internal"
    if address.is_link_local or str(address) in _METADATA:
        return True
    return isinstance(address, ipaddress.IPv6Address) and any(map(is_forbidden, _embedded(address)))


def _embedded(address: ipaddress.IPv6Address) -> Iterator[str]:
    """The IPv4 addresses that an IPv6 address may lead to: mapped, compatible, translated, 6to4, Teredo."""
    low = address.packed[-4:]
    if address in _TRANSLATED or address.ipv4_mapped is not None or address.packed[:12] == bytes(12):
        yield str(ipaddress.IPv4Address(low))
    if address.sixtofour is not None:
        yield str(address.sixtofour)
    if address.teredo is not None:
        yield from map(str, address.teredo)


def _guarded(allow_link_local: bool) -> Any:
    """Connections to addresses that were looked at after their name was resolved."""
    import httpcore

    class Guarded(httpcore.AsyncNetworkBackend):
        def __init__(self) -> None:
            self._inner = httpcore.AnyIOBackend()

        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: str | None = None,
            socket_options: Any = None,
        ) -> httpcore.AsyncNetworkStream:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [str(info[4][0]) for info in found]
            if not allow_link_local and any(is_forbidden(address) for address in addresses):
                raise OSError(f"{host} is a link-local or metadata address")
            for address in addresses[:-1]:
                try:
                    return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
                except httpcore.ConnectError:
                    continue
            return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    return Guarded()
