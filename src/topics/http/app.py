"""The application: routes, who may use them, and the turn that all requests of a moment share."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import msgspec

from topics.core.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    ShuttingDown,
    Throttled,
    TopicsError,
    UnsupportedMediaType,
)
from topics.core.records import decode_json
from topics.engine.commit import Commit, Level, when_all
from topics.engine.engine import Engine
from topics.http.auth import Key, Keys, Scope
from topics.http.exchange import JSON, Exchange
from topics.http.following import Arrivals, Renderings, Stream
from topics.http.head import Heads
from topics.http.metrics import Metrics
from topics.http.pressure import Deliveries, Pressure
from topics.http.protocol import HttpProtocol, decode_body
from topics.http.remotes import Remotes
from topics.http.settings import Settings
from topics.http.sharing import SharedWrites
from topics.http.watches import Watches

if TYPE_CHECKING:
    from topics.http.queues import Work

TICK_SECONDS = 0.02
_SWEEP_TICKS = 50
_WIDER_TURN = 0.001
_ROUTING_SECONDS = 0.0003
_encode = msgspec.json.Encoder().encode

Handler = Callable[["App", Exchange, str], None]


class Route(msgspec.Struct, frozen=True):
    """A method of a path. `topic`: the path names one, whose prefix a key must have. `changes`: it takes a
    place in the log by itself, behind the writes that came before it. `looks`: what routers bring to the topic is there
    first. `stream`: it goes on, and its key may be in the query, because a browser cannot send it otherwise. `public`:
    anybody may have it, whatever keys there are."""

    name: str
    handler: Handler
    scope: Scope
    topic: bool = False
    changes: bool = False
    looks: bool = False
    stream: bool = False
    public: bool = False


# A request that may be made: its route, the name in its path, and whose it is.
Access = tuple[Route, str, Key]


class Stuck(TopicsError):
    """A stream whose client takes nothing."""

    code = "slow_consumer"
    status = 503


class Internal(TopicsError):
    """A bug of ours: the caller gets no more than that."""


class App:
    def __init__(self, engine: Engine, settings: Settings, keys: Keys, loop: asyncio.AbstractEventLoop) -> None:
        from topics.http.queues import Cohorts
        from topics.http.routes import ROUTES

        self.engine = engine
        self.settings = settings
        self.limits = settings.limits
        self.keys = keys
        self.loop = loop
        self.clock = loop.time
        self.now = loop.time()
        self.connections: set[HttpProtocol] = set()
        self.heads = Heads(hide=keys.is_on)
        # How to end each read that waits.
        self.readings: set[Callable[[], None]] = set()
        self.inflight = 0
        self.is_closing = False
        self.started = time.monotonic()
        self.metrics = Metrics()
        self.shared = SharedWrites(self)
        self.streams: set[Stream] = set()
        self.renderings = Renderings(self)
        self.arrivals = Arrivals()
        self.watches = Watches(self)
        self.workers: set[Work] = set()
        self.cohorts = Cohorts(self)
        engine.state.on_added = self.arrivals.on_added
        self.deliveries = Deliveries()
        self.pressure = Pressure(settings.pressure_delay_ms, settings.pressure_bytes)
        self._routes = ROUTES
        self._turn_is_open = False
        self._ticks = 0
        self._next_tick = 0.0
        self._relief: list[Callable[[], None]] = []
        engine.committer.on_sync = self.metrics.syncs.observe
        self.remotes = Remotes(self)
        self._is_routing = False
        engine.routers.on_work = self._route_soon
        if engine.routers.has_work():
            self._route_soon()

    # -- the turn --------------------------------------------------------------------------------------------------

    def end_turn(self) -> None:
        """Sees to it that what was staged is written when all requests of this moment have been handled."""
        if not self._turn_is_open:
            self._turn_is_open = True
            if self.pressure.level:
                # A wider turn: more writers share the write and the sync.
                self.loop.call_later(_WIDER_TURN * self.pressure.level, self._flush)
            else:
                self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._turn_is_open = False
        self.shared.stage_all()
        self.engine.flush()

    def _route_soon(self) -> None:
        if not self._is_routing:
            self._is_routing = True
            self.loop.call_soon(self._route)

    def _route(self) -> None:
        """Routers work in small pieces, between requests."""
        self._is_routing = False
        if not self.is_closing and self.engine.routers.work(_ROUTING_SECONDS):
            self._route_soon()

    def start_ticking(self) -> None:
        self._next_tick = self.clock() + TICK_SECONDS
        self.loop.call_at(self._next_tick, self._tick)

    def _tick(self) -> None:
        if self.is_closing:
            return
        now = self.now = self.clock()
        delay = max(now - self._next_tick, 0.0)
        self.metrics.loop_delay = delay
        wal = self.engine.committer.wal
        self.pressure.measure(delay, wal.staged - wal.synced)
        if self.pressure.level < 3 and self._relief:
            relief, self._relief = self._relief, []
            for call in relief:
                call()
        self.engine.tick()
        self.remotes.tick()
        if self.deliveries:
            self.deliveries.run_some()
        self._ticks += 1
        if self._ticks % _SWEEP_TICKS == 0:
            for connection in list(self.connections):
                connection.check_deadline(now)
            self.watches.sweep(now)
            for stream in list(self.streams):
                if stream.is_stuck(now, self.settings.stuck_timeout_ms / 1000):
                    stream.fail(Stuck("nothing was taken for too long; resume from the last id", retry_after_ms=1000))
        self._next_tick = self.clock() + TICK_SECONDS
        self.loop.call_at(self._next_tick, self._tick)

    def when_relieved(self, call: Callable[[], None]) -> None:
        """Runs `call` once there is no pressure; for those who would rather wait than be refused."""
        if len(self._relief) >= max(self.limits.max_inflight_per_key, 1000):
            self.pressure.check()
        self._relief.append(call)

    def end_waiting(self) -> None:
        """At shutdown: reads that wait are answered with what there is, and writes that wait are made."""
        relief, self._relief = self._relief, []
        for call in relief:
            call()
        readings, self.readings = self.readings, set()
        for end in readings:
            end()
        for worker in list(self.workers):
            worker.fail(ShuttingDown("the server is shutting down"))
        for stream in [stream for stream in self.streams if stream.topics]:
            stream.fail(ShuttingDown("the server is shutting down; resume from the last id", retry_after_ms=1000))

    # -- requests --------------------------------------------------------------------------------------------------

    def overlaps(self, exchange: Exchange) -> bool:
        """Whether a request may start while earlier ones of its connection are not answered: writes may."""
        return exchange.method == "POST" and exchange.path.count("/") == 3 and exchange.path.startswith("/v0/topics/")

    def handle(self, exchange: Exchange) -> None:
        try:
            self._dispatch(exchange)
        except Exception as error:
            self.refuse(exchange, error)

    def refuse(self, exchange: Exchange, error: Exception) -> None:
        """Answers with an error; one that is not of the contract is a bug, and is logged."""
        if isinstance(error, MethodNotAllowed):
            exchange.fail(error, ((b"allow", str(error.detail["allow"]).encode()),))
        elif isinstance(error, TopicsError):
            if error.status == 429:
                self.metrics.throttled += 1
            exchange.fail(error)
        else:
            print(f"topics: {exchange.route} failed", file=sys.stderr)
            traceback.print_exception(error)
            exchange.fail(Internal("something went wrong in the server; its log says what"))

    def _dispatch(self, exchange: Exchange) -> None:
        access = exchange.head.access
        if access is None:
            access = self._admit(exchange)
            if access is None:
                return
        route, name, key = access
        exchange.route = route.name
        if self.is_closing:
            raise ShuttingDown("the server is shutting down")
        most = self.limits.max_inflight_per_key
        if most and key.inflight >= most:
            raise Throttled(
                f"this key has {key.inflight} requests in flight, TOPICS_MAX_INFLIGHT_PER_KEY is {most}",
                limit="TOPICS_MAX_INFLIGHT_PER_KEY",
                max=most,
            )
        exchange.key = key
        key.inflight += 1
        self.inflight += 1
        if route.changes:
            self.shared.stage_all()
        if route.looks and (commit := self.engine.catch_up(name)) is not None:
            self.when_done(exchange, commit, lambda _: self._go_on(exchange, route, name))
        else:
            route.handler(self, exchange, name)

    def _go_on(self, exchange: Exchange, route: Route, name: str) -> None:
        if not exchange.is_cancelled:
            route.handler(self, exchange, name)

    def _admit(self, exchange: Exchange) -> Access | None:
        """Who asks, and for what; None if that is answered already. It depends on nothing but the head."""
        method = "GET" if exchange.method == "HEAD" else exchange.method
        methods, name = self._find(exchange.path)
        if method == "OPTIONS":
            exchange.send(204, b"", headers=((b"allow", _allow(methods)),))
            return None
        route = methods.get(method)
        if route is None:
            raise MethodNotAllowed(f"{method:.20} is not allowed here", allow=_allow(methods).decode())
        exchange.route = route.name
        key = self._authorize(exchange, route)
        if route.topic:
            key.need_topic(name)
        exchange.head.access = (route, name, key)
        return exchange.head.access

    def _authorize(self, exchange: Exchange, route: Route) -> Key:
        is_probe = route.scope is Scope.NONE and not route.stream
        if not self.keys.is_on or route.public or (is_probe and not self.settings.probe_auth):
            return self.keys.anyone
        header = exchange.header(b"authorization")
        if header is None and route.stream and "token" in exchange.query:
            header = f"Bearer {exchange.query['token']}"
        key = self.keys.check(header)
        key.need(route.scope)
        return key

    def _find(self, path: str) -> tuple[dict[str, Route], str]:
        methods = self._routes.get(path)
        if methods is not None:
            return methods, ""
        parts = path.split("/")
        if len(parts) == 4 and parts[2] == "topics" and parts[1] == "v0" and parts[3]:
            return self._routes["/v0/topics/*"], _unquote(parts[3])
        if len(parts) in (4, 5) and parts[1] == "v0" and not parts[0]:
            methods = self._routes.get("/".join(("", "v0", parts[2], "*", *parts[4:])))
            if methods is not None and parts[3]:
                return methods, _unquote(parts[3])
        if len(parts) == 3 and parts[1] == "ui" and not parts[0]:
            return self._routes["/ui/*"], _unquote(parts[2])
        raise NotFound(f"there is nothing at {path:.300}")

    def finished(self, exchange: Exchange) -> None:
        """However a request ends, what it held is free again."""
        if exchange.key is not None:
            exchange.key.inflight -= 1
            self.inflight -= 1
            exchange.key = None
        seconds = time.perf_counter() - exchange.started
        self.metrics.count_request(exchange.route, exchange.status, seconds)
        if self.settings.access_log:
            line = {
                "ts": time.time_ns() // 1_000_000,
                "method": exchange.method[:20],
                "path": exchange.path[:300],
                "status": exchange.status,
                "ms": round(seconds * 1000, 3),
            }
            sys.stderr.write(_encode(line).decode() + "\n")

    # -- what handlers share ---------------------------------------------------------------------------------------

    def body_of(self, exchange: Exchange, decoder: msgspec.json.Decoder[Any], empty: bytes | None = None) -> Any:
        """The JSON body of a request; `empty` stands in for one that has none."""
        if not exchange.body and empty is not None:
            return decoder.decode(empty)
        need_json(exchange)
        return decode_json(decode_body(exchange, self.limits.max_body_bytes), decoder, self.limits)

    def when_done(self, exchange: Exchange, commit: Commit, answer: Callable[[Any], None]) -> None:
        """Answers with a commit's result as soon as it has one."""
        self.end_turn()

        def finish(done: Commit) -> None:
            try:
                answer(done.value())
            except Exception as error:
                self.refuse(exchange, error)

        commit.on_done(finish)

    def when_caught_up(self, exchange: Exchange, names: Iterable[str], answer: Callable[[], None]) -> None:
        """Answers when what routers bring to some topics is there."""
        pending = [commit for name in names if (commit := self.engine.catch_up(name)) is not None]
        if not pending:
            answer()
            return
        commit = Commit(Level.ACCEPTED, (), lambda: None)
        when_all(pending, commit.publish)
        self.when_done(exchange, commit, lambda _: None if exchange.is_cancelled else answer())


def _unquote(part: str) -> str:
    """A part of a path. The path is split first: an escaped slash is no slash."""
    if "%" not in part and part.isascii():
        return part
    try:
        return unquote_to_bytes(part.encode("latin-1")).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the path is not valid UTF-8") from None


def need_json(exchange: Exchange) -> None:
    kind = exchange.headers.get(b"content-type")
    if kind is None or kind.split(b";", 1)[0].strip().lower() != JSON:
        shown = "nothing" if kind is None else repr(kind.decode("latin-1")[:100])
        raise UnsupportedMediaType(f"content-type must be application/json, got {shown}")


def _allow(methods: dict[str, Route]) -> bytes:
    return ", ".join(sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])})).encode()


def check_scope(exchange: Exchange, scope: Scope) -> None:
    """A scope that only the body shows to be needed."""
    assert exchange.key is not None
    exchange.key.need(scope)


def check_name(exchange: Exchange, name: object) -> None:
    """A topic that a body names: the key's prefixes hold for it too."""
    assert exchange.key is not None
    if isinstance(name, str):
        exchange.key.need_topic(name)
