"""`/v0/watch`: topics as a stream of server-sent events, resumable from every frame."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from topics.core.errors import InvalidRequest, NotAcceptable, TopicsError
from topics.core.limits import DEFAULT_DIFF_LIMIT, MAX_DIFF_BYTES, MAX_INTEGER
from topics.core.tombstone import Tombstone
from topics.http.app import App
from topics.http.auth import Key
from topics.http.exchange import Exchange, Outlet
from topics.http.following import Position, Rendering, Stream, Wishes
from topics.http.messages import WatchRequest
from topics.http.watches import Session, copied

EVENT_STREAM = b"text/event-stream"
STREAM_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_DEFAULT_BATCH_BYTES = 256 << 10
_MIN_HEARTBEAT_MS, _MAX_HEARTBEAT_MS = 1000, 60_000
_HEARTBEAT = b": hb\n\n"
_EPOCHS = "$epoch"
# Room for what else a request has in its head.
_OTHER_HEADERS = 2048

_decode_id = msgspec.json.Decoder(dict[str, int | dict[str, int]]).decode
_decode_watch = msgspec.json.Decoder(WatchRequest)
_encode = msgspec.json.Encoder().encode


def create(app: App, exchange: Exchange, _: str) -> None:
    request: WatchRequest = app.body_of(exchange, _decode_watch)
    app.when_caught_up(exchange, request.topics, lambda: _create(app, exchange, request))


def _create(app: App, exchange: Exchange, request: WatchRequest) -> None:
    assert exchange.key is not None
    positions = begin(app, exchange.key, request, exchange.flag("lenient", False))
    _check_id(app, positions)
    heartbeat = min(max(request.heartbeat_ms, _MIN_HEARTBEAT_MS), _MAX_HEARTBEAT_MS) / 1000
    session = app.watches.add(exchange.key, wishes_of(app, request), heartbeat, positions)
    exchange.answer(
        {
            "wid": session.wid,
            "stream_url": f"/v0/watch/{session.wid}",
            "session_ttl_ms": app.settings.watch_ttl_ms,
            "topics": {name: describe(app, name, position) for name, position in positions.items()},
        }
    )


def _check_id(app: App, positions: dict[str, Position]) -> None:
    """What is followed must be resumable: its id comes back in a header."""
    longest = {name: Position(MAX_INTEGER, MAX_INTEGER) for name in positions}
    most = app.settings.max_header_bytes - _OTHER_HEADERS
    if len(Events(longest).id()) > most:
        raise InvalidRequest(
            f"topics: their names are too long together for an id of {most} bytes; TOPICS_MAX_HEADER_BYTES is "
            f"{app.settings.max_header_bytes}"
        )


def begin(app: App, key: Key, request: WatchRequest, lenient: bool) -> dict[str, Position]:
    """Where a stream begins in each of its topics. What is not there is refused, or left out."""
    most = app.limits.max_watch_topics
    if not request.topics:
        raise InvalidRequest("topics must name at least 1 topic")
    if most and len(request.topics) > most:
        raise InvalidRequest(f"topics names {len(request.topics)} topics, TOPICS_MAX_WATCH_TOPICS is {most}")
    positions: dict[str, Position] = {}
    for name, wanted in request.topics.items():
        key.need_topic(name)
        if lenient and name not in app.engine.state.by_name:
            continue
        topic = app.engine.topic(name)
        app.engine.settle(topic)
        seq = topic.head_seq if wanted.tail else wanted.from_seq
        positions[name] = Position(seq, topic.epoch if wanted.epoch is None or wanted.tail else wanted.epoch)
    if not positions:
        raise InvalidRequest("topics: none of them exists")
    return positions


def wishes_of(app: App, request: WatchRequest) -> Wishes:
    node = request.node
    return Wishes(
        nodes=(node,) if isinstance(node, str) else tuple(node or ()),
        limit=min(request.limit or DEFAULT_DIFF_LIMIT, app.limits.max_limit),
        max_bytes=min(request.max_batch_bytes or _DEFAULT_BATCH_BYTES, MAX_DIFF_BYTES),
        include_meta=request.include_meta,
        include_tags=request.include_tags,
        include_data=request.include_data,
    )


def describe(app: App, name: str, position: Position) -> dict[str, int]:
    topic = app.engine.topic(name)
    return {
        "from_seq": position.seq,
        "head_seq": topic.head_seq,
        "earliest_seq": topic.earliest_seq,
        "epoch": topic.epoch,
    }


def stream(app: App, exchange: Exchange, wid: str) -> None:
    assert exchange.key is not None
    session = app.watches.find(wid, exchange.key)
    need_event_stream(exchange)
    last = exchange.header(b"last-event-id") or exchange.query.get("last_event_id")
    positions = _read_id(last) if last is not None else {}
    if exchange.method == "HEAD":
        exchange.send(200, b"", EVENT_STREAM, STREAM_HEADERS)
        return
    if session.stream is not None:
        session.stream.fail(TakenOver("another connection has taken this watch over"))
    app.watches.check_room(exchange.key)
    resume(session, positions)
    EventStream(app, exchange, session)


def need_event_stream(exchange: Exchange) -> None:
    accept = exchange.headers.get(b"accept", b"").lower()
    if EVENT_STREAM not in accept and b"*/*" not in accept and b"text/*" not in accept:
        raise NotAcceptable("this is a stream: send Accept: text/event-stream")


class TakenOver(TopicsError):
    code = "taken_over"


def resume(session: Session, last: dict[str, Position]) -> None:
    """Goes back to where the client's last frame stood, never past what was sent; without one, to what it has shown to
    have before."""
    for name, sent in session.positions.items():
        # Epochs only grow: what is of a later one was not sent here.
        session.furthest[name] = max(session.furthest[name], sent, key=_place)
        if name in last:
            session.known[name] = min(last[name], session.furthest[name], key=_place)
    session.positions = copied(session.known)
    session.known = copied(session.known)


def _place(position: Position) -> tuple[int, int]:
    return position.epoch, position.seq


def _read_id(text: str) -> dict[str, Position]:
    try:
        cursors = _decode_id(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        epochs = msgspec.convert(cursors.pop(_EPOCHS), dict[str, int])
        return {name: msgspec.convert({"seq": seq, "epoch": epochs[name]}, Position) for name, seq in cursors.items()}
    except (binascii.Error, ValueError, KeyError, TypeError, msgspec.MsgspecError):
        raise InvalidRequest("Last-Event-ID is not one that this server gave") from None


class EventStream:
    """A session's connection."""

    def __init__(self, app: App, exchange: Exchange, session: Session) -> None:
        self._app = app
        self._session = session
        events = Events(session.positions)
        self._outlet: Outlet = exchange.open(self, EVENT_STREAM, STREAM_HEADERS)
        self._stream = session.stream = Stream(app, self._outlet, events, self._on_over)
        app.watches.open_one(session.owner)
        # An event without data only sets the id: whoever gets anything at all can resume from it.
        self._outlet.write(b"retry: 2000\nid: %b\n\n" % events.id())
        self._timer = app.loop.call_later(session.heartbeat, self._beat)
        for name, position in list(session.positions.items()):
            self._stream.follow(name, position, session.wishes)

    def _beat(self) -> None:
        """Says that it is alive, if nothing else did."""
        silent = self._app.clock() - self._stream.sent_at
        left = self._session.heartbeat - silent
        if left <= 0 and not self._outlet.is_full:
            self._outlet.write(_HEARTBEAT)
            left = self._session.heartbeat
        self._timer = self._app.loop.call_later(max(left, 0.05), self._beat)

    def on_room(self) -> None:
        self._stream.on_room()

    def on_gone(self) -> None:
        self._stream.close()

    def _on_over(self) -> None:
        self._timer.cancel()
        self._app.watches.close_one(self._session.owner)
        self._session.used_at = self._app.clock()
        if self._session.stream is self._stream:
            self._session.stream = None


class Events:
    """What happens to topics, as server-sent events. Each carries the whole cursor map as its id."""

    def __init__(self, positions: dict[str, Position]) -> None:
        self._positions = positions
        self._single = next(iter(positions)) if len(positions) == 1 else None

    def id(self) -> bytes:
        cursors: dict[str, Any] = {name: position.seq for name, position in self._positions.items()}
        cursors[_EPOCHS] = {name: position.epoch for name, position in self._positions.items()}
        return base64.urlsafe_b64encode(_encode(cursors)).rstrip(b"=")

    def _event(self, kind: bytes, data: bytes) -> bytes:
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (self.id(), kind, data)

    def record(self, topic: str, rendering: Rendering) -> bytes:
        # The id of a stream of one topic is the same for all that are at this place, and so is the frame.
        form = "event" if self._single is not None else "data"
        framed = rendering.framed.get(form)
        if framed is None:
            data = b'{"topic":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d}' % (
                *(topic.encode(), rendering.records, rendering.from_seq, rendering.to_seq, rendering.head_seq),
            )
            data = on_lines(data)
            framed = rendering.framed[form] = self._event(b"record", data) if form == "event" else data
        return framed if form == "event" else self._event(b"record", framed)

    def tombstone(self, topic: str, epoch: int, tombstone: Tombstone, reason: str) -> bytes:
        fields = {"topic": topic, **msgspec.structs.asdict(tombstone), "reason": reason}
        return self._event(b"tombstone", _encode(fields))

    def caught_up(self, topic: str, head_seq: int) -> bytes:
        return self._event(b"caught-up", _encode({"topic": topic, "head_seq": head_seq}))

    def deleted(self, topic: str, head_seq: int) -> bytes:
        return self._event(b"topic-deleted", _encode({"topic": topic, "head_seq": head_seq, "reason": "deleted"}))

    def error(self, error: TopicsError) -> bytes:
        fields: dict[str, Any] = {"code": error.code, "error": error.message}
        if "retry_after_ms" in error.detail:
            fields["retry_after_ms"] = error.detail["retry_after_ms"]
        return self._event(b"error", _encode(fields))


def on_lines(data: bytes) -> bytes:
    """Line breaks can only be white space between JSON tokens; a field of an event is one line."""
    if b"\n" not in data and b"\r" not in data:
        return data
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
