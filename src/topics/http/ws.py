"""`/v0/ws`: subscribe, unsubscribe, publish and ping over one WebSocket. Each command is authorised on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from topics.core.errors import Forbidden, InvalidRequest, ShuttingDown, TopicsError
from topics.core.records import AnyWrite, decode_json, decode_write
from topics.core.tombstone import Tombstone
from topics.engine.append import WriteResult
from topics.engine.commit import Commit, when_all
from topics.http.app import App
from topics.http.auth import Scope
from topics.http.exchange import Exchange
from topics.http.following import Rendering, Stream
from topics.http.messages import WatchRequest
from topics.http.settings import is_loopback
from topics.http.watch import begin, describe, wishes_of

if TYPE_CHECKING:
    from topics.http.auth import Key
    from topics.http.ws_protocol import WsProtocol

# Publishes of one connection that wait for the log; past that nothing more is read from it.
_MAX_PUBLISHES = 64
_CLOSE_CODES = {"slow_consumer": 1013, "shutting_down": 1001}
_encode = msgspec.json.Encoder().encode


class _Asked(msgspec.Struct):
    request_id: object = None


class Command(msgspec.Struct, kw_only=True):
    """What all commands have in common."""

    type: str
    request_id: str | int | None = None
    topic: str | None = None


class Subscribe(WatchRequest, kw_only=True):
    """A watch; `lenient` leaves out what does not exist."""

    lenient: bool = False


class Unsubscribe(msgspec.Struct, kw_only=True):
    topics: list[str]


_decode_command = msgspec.json.Decoder(Command)
_decode_asked = msgspec.json.Decoder(_Asked)
_decode_subscribe = msgspec.json.Decoder(Subscribe)
_decode_unsubscribe = msgspec.json.Decoder(Unsubscribe)


def _request_id(message: bytes) -> str | int | None:
    """What a command is called, whatever else is wrong with it."""
    try:
        asked = _decode_asked.decode(message).request_id
    except (msgspec.DecodeError, RecursionError):
        return None
    return asked if isinstance(asked, str | int) else None


def open_(app: App, exchange: Exchange, _: str) -> None:
    from topics.http.protocol import HttpProtocol
    from topics.http.ws_protocol import Handshake

    assert exchange.key is not None
    key = exchange.key
    if not exchange.head.wants_websocket:
        raise InvalidRequest("this is a WebSocket: connect with an Upgrade, over HTTP/1.1")
    _check_origin(app, exchange)
    app.watches.check_room(key)
    handshake = Handshake(exchange, app.limits.max_body_bytes)
    channel = exchange.channel
    assert isinstance(channel, HttpProtocol)
    exchange.answered = True
    exchange.status = 101
    app.finished(exchange)
    channel.become_websocket(exchange, lambda transport: Socket(app, key, handshake, transport).protocol)


def _check_origin(app: App, exchange: Exchange) -> None:
    """Without keys every page that a browser shows could connect to a server on the same machine: only our own may."""
    origin = exchange.header(b"origin")
    if origin is None or app.keys.is_on:
        return
    # A name that is not ours may resolve to this machine: such a page is from elsewhere, whatever its Host says.
    is_ours = is_loopback(urlsplit(origin).hostname or "") or app.settings.allow_insecure_no_auth
    if origin.partition("://")[2] != exchange.header(b"host") or not is_ours:
        raise Forbidden(f"a page of {origin:.200} may not connect to a server without keys")


class Socket:
    """One client: its commands, and its one stream of topics."""

    def __init__(self, app: App, key: Key, handshake: Any, transport: asyncio.Transport) -> None:
        from topics.http.ws_protocol import WsProtocol

        self._app = app
        self._key = key
        self._publishes = 0
        self._is_leaving = False
        # Commands behind one that waits; None while none does.
        self._behind: list[bytes] | None = None
        app.watches.open_one(key.id)
        self.protocol: WsProtocol = WsProtocol(
            *(app, handshake, transport, self._on_message),
            *(lambda: self._stream.on_room(), lambda: self._stream.close(), self._leave),
        )
        outlet = _Closing(self.protocol, self._leave)
        self._stream: Stream = Stream(app, outlet, Messages(), lambda: app.watches.close_one(key.id))

    def _leave(self) -> None:
        """At shutdown: what is in flight is answered, then the connection ends."""
        self._is_leaving = True
        if not self._publishes:
            self.protocol.close(_CLOSE_CODES["shutting_down"], "the server is shutting down")

    def _on_message(self, message: bytes) -> None:
        if self._behind is not None:
            self._behind.append(message)
            return
        request_id: str | int | None = None
        try:
            if self._is_leaving:
                raise ShuttingDown("the server is shutting down")
            request_id = _request_id(message)
            command: Command = decode_json(message, _decode_command, self._app.limits)
            if command.type == "publish":
                self._publish(command, message)
            elif command.type == "subscribe":
                self._subscribe(request_id, decode_json(message, _decode_subscribe, self._app.limits))
            elif command.type == "unsubscribe":
                self._unsubscribe(request_id, decode_json(message, _decode_unsubscribe, self._app.limits))
            elif command.type == "ping":
                self._answer("pong", request_id, ts=self._app.engine.time.now())
            else:
                raise InvalidRequest(f"type must be subscribe, unsubscribe, publish or ping, got {command.type!r:.100}")
        except TopicsError as error:
            self._refuse(request_id, error)

    def _subscribe(self, request_id: str | int | None, request: Subscribe) -> None:
        """Begins to follow topics, when what routers bring to them is there."""
        pending = [commit for name in request.topics if (commit := self._app.engine.catch_up(name)) is not None]
        if not pending:
            self._follow(request_id, request)
            return

        def go_on() -> None:
            try:
                self._follow(request_id, request)
            except TopicsError as error:
                self._refuse(request_id, error)
            behind, self._behind = self._behind or [], None
            for message in behind:
                # If one of them waits as well, so do all that are behind it.
                self._on_message(message)
            self.protocol.hold(self._behind is not None or self._publishes >= _MAX_PUBLISHES)

        # What has arrived behind it waits, and no more is read.
        self._behind = []
        self.protocol.hold(True)
        self._app.end_turn()
        when_all(pending, go_on)

    def _follow(self, request_id: str | int | None, request: Subscribe) -> None:
        self._key.need(Scope.READ)
        positions = begin(self._app, self._key, request, request.lenient)
        most = self._app.limits.max_watch_topics
        new = sum(not self._stream.follows(name) for name in positions)
        if most and self._stream.topics + new > most:
            raise InvalidRequest(
                f"topics: this connection would follow {self._stream.topics + new}, TOPICS_MAX_WATCH_TOPICS is {most}"
            )
        topics = {name: describe(self._app, name, position) for name, position in positions.items()}
        self._answer("subscribed", request_id, topics=topics)
        wishes = wishes_of(self._app, request)
        for name, position in positions.items():
            self._stream.unfollow(name)
            self._stream.follow(name, position, wishes)

    def _unsubscribe(self, request_id: str | int | None, request: Unsubscribe) -> None:
        gone = [name for name in request.topics if self._stream.unfollow(name)]
        self._answer("unsubscribed", request_id, topics=gone)

    def _publish(self, command: Command, message: bytes) -> None:
        app = self._app
        name = command.topic
        if name is None:
            raise InvalidRequest("topic is required")
        self._key.need(Scope.WRITE)
        self._key.need_topic(name)
        write = decode_write(message, app.limits)
        if write.config is not None:
            self._key.need(Scope.ADMIN)
            dead_letter = write.config.get("dead_letter")
            if isinstance(dead_letter, str):
                self._key.need_topic(dead_letter)
        if app.pressure.level >= 3 and write.disable_backpressure:
            self._begin_publish()
            app.when_relieved(lambda: self._write(name, write, command.request_id))
            return
        app.pressure.check()
        self._begin_publish()
        self._write(name, write, command.request_id)

    def _begin_publish(self) -> None:
        self._publishes += 1
        if self._publishes == _MAX_PUBLISHES:
            self.protocol.hold(True)

    def _write(self, name: str, write: AnyWrite, request_id: str | int | None) -> None:
        app = self._app
        try:
            # Its place in the log is behind what came before it.
            app.shared.stage(name)
            commit = app.engine.write(name, write)
        except TopicsError as error:
            self._end_publish()
            self._refuse(request_id, error)
            return
        app.end_turn()
        commit.on_done(lambda done: self._on_published(request_id, done))

    def _end_publish(self) -> None:
        if self._publishes == _MAX_PUBLISHES:
            self.protocol.hold(False)
        self._publishes -= 1

    def _on_published(self, request_id: str | int | None, commit: Commit) -> None:
        self._end_publish()
        try:
            result = commit.value()
            assert isinstance(result, WriteResult)
            self._app.metrics.records_appended += 0 if result.deduped else result.count
            self._answer(
                "ack",
                request_id,
                topic=result.topic,
                first_seq=result.first_seq,
                last_seq=result.last_seq,
                seqs=result.seqs,
                head_seq=result.head_seq,
                count=result.count,
                created=result.created,
                deduped=result.deduped,
            )
        except TopicsError as error:
            self._refuse(request_id, error)
        if self._is_leaving:
            self._leave()

    def _answer(self, kind: str, request_id: str | int | None, **fields: Any) -> None:
        asked = {} if request_id is None else {"request_id": request_id}
        self._send({"type": kind, **asked, **fields})

    def _refuse(self, request_id: str | int | None, error: TopicsError) -> None:
        detail = {"detail": error.detail} if error.detail else {}
        self._answer("error", request_id, code=error.code, message=error.message, **detail)

    def _send(self, fields: dict[str, Any]) -> None:
        from topics.http.ws_protocol import text_frame

        self.protocol.write(text_frame(_encode(fields)))


class _Closing:
    """The outlet of a socket's stream. A stream that fails ends the connection, with a code that says why."""

    def __init__(self, protocol: WsProtocol, leave: Callable[[], None]) -> None:
        self._protocol = protocol
        self._leave = leave

    @property
    def is_full(self) -> bool:
        return self._protocol.is_full

    @property
    def unsent(self) -> int:
        return self._protocol.unsent

    def write(self, data: bytes) -> None:
        self._protocol.write(data)

    def end(self, why: TopicsError | None = None) -> None:
        if isinstance(why, ShuttingDown):
            self._leave()
        else:
            self._protocol.close(_CLOSE_CODES.get(why.code, 1011) if why is not None else 1000, "")


class Messages:
    """What happens to topics, as messages. Each says of which instance it is, so that a client can resume from it."""

    def record(self, topic: str, rendering: Rendering) -> bytes:
        framed = rendering.framed.get("message")
        if framed is None:
            framed = rendering.framed["message"] = _frame(
                b'{"type":"record","topic":"%b","epoch":%d,"records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d}'
                % (
                    *(topic.encode(), rendering.epoch, rendering.records),
                    *(rendering.from_seq, rendering.to_seq, rendering.head_seq),
                )
            )
        return framed

    def tombstone(self, topic: str, epoch: int, tombstone: Tombstone, reason: str) -> bytes:
        fields = {"topic": topic, "epoch": epoch, **msgspec.structs.asdict(tombstone), "reason": reason}
        return _frame(_encode({"type": "tombstone", **fields}))

    def caught_up(self, topic: str, head_seq: int) -> bytes:
        return _frame(_encode({"type": "caught_up", "topic": topic, "head_seq": head_seq}))

    def deleted(self, topic: str, head_seq: int) -> bytes:
        fields = {"topic": topic, "head_seq": head_seq, "reason": "deleted"}
        return _frame(_encode({"type": "topic_deleted", **fields}))

    def error(self, error: TopicsError) -> bytes:
        return _frame(_encode({"type": "error", "code": error.code, "message": error.message, **error.detail}))


def _frame(payload: bytes) -> bytes:
    from topics.http.ws_protocol import text_frame

    return text_frame(payload)
