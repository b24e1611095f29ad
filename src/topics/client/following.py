"""A watch over several topics: which session, from where, and what its events mean. Both clients drive it."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from topics.client import calls
from topics.client.calls import Call
from topics.client.cursor import Cursor, behind, cursor_of
from topics.client.errors import ServerError, error_named, error_of
from topics.client.events import Frame, FrameParser
from topics.client.retry import Answer, is_passing
from topics.core.answers import Record, WatchSession
from topics.core.check import check_integer
from topics.core.errors import InvalidRequest, NotFound, TopicsError
from topics.core.names import check_topic_name
from topics.core.tombstone import Reason, Tombstone

Start = int | Cursor | Literal["tail"]
_EPOCHS = "$epoch"
# The stream ends, and another connection goes on.
_PASSING = ("shutting_down", "slow_consumer", "not_ready", "throttled")


class Received(msgspec.Struct, frozen=True):
    topic: str
    record: Record


class Lost(msgspec.Struct, frozen=True):
    topic: str
    tombstone: Tombstone


class CaughtUp(msgspec.Struct, frozen=True):
    """Everything up to the head was handed out; what comes now is live."""

    topic: str
    head_seq: int


class TopicGone(msgspec.Struct, frozen=True):
    """The topic was deleted. If it is made again, the watch goes on with it."""

    topic: str
    head_seq: int


Event = Received | Lost | CaughtUp | TopicGone


class _RecordFrame(msgspec.Struct):
    topic: str
    records: list[Record]


class _TombstoneFrame(msgspec.Struct):
    topic: str
    gap_from: int
    gap_to: int
    reason: Reason | Literal["from_seq_too_old"]
    missed_estimate: int
    earliest_seq: int
    head_seq: int


class _TopicFrame(msgspec.Struct):
    topic: str
    head_seq: int


class _ErrorFrame(msgspec.Struct):
    code: str
    error: str
    retry_after_ms: int = 0


_read_record = calls.reader(_RecordFrame)
_read_tombstone = calls.reader(_TombstoneFrame)
_read_topic = calls.reader(_TopicFrame)
_read_error = calls.reader(_ErrorFrame)
_decode_id = msgspec.json.Decoder(dict[str, int | dict[str, int]]).decode


class Ended(Exception):
    """The stream is over, for a reason that passes."""

    def __init__(self, error: TopicsError, seconds: float) -> None:
        super().__init__(error.message)
        self.error = error
        self.seconds = seconds


class Following:
    """`cursors` says for each topic what was handed out: a watch that begins there misses and repeats nothing."""

    def __init__(
        self,
        topics: Mapping[str, Start] | Sequence[str],
        *,
        node: str | Sequence[str] | None = None,
        limit: int | None = None,
        max_batch_bytes: int | None = None,
        heartbeat_ms: int = 15_000,
        include_meta: bool = True,
        include_tags: bool = False,
        include_data: bool = True,
        lenient: bool = False,
    ) -> None:
        names = [topics] if isinstance(topics, str) else topics
        starts: Mapping[str, Start] = names if isinstance(names, Mapping) else dict.fromkeys(names, 0)
        if not starts:
            raise InvalidRequest("topics must name at least 1 topic")
        self._tails = {name for name, start in starts.items() if start == "tail"}
        self.cursors: dict[str, Cursor] = {
            check_topic_name(name): Cursor() if start == "tail" else cursor_of(start, f"topics.{name}")
            for name, start in starts.items()
        }
        self.heartbeat_ms = check_integer("heartbeat_ms", heartbeat_ms)
        self._wishes: dict[str, Any] = {
            "node": node,
            "limit": limit,
            "max_batch_bytes": max_batch_bytes,
            "heartbeat_ms": heartbeat_ms,
            "include_meta": None if include_meta else False,
            "include_tags": include_tags or None,
            "include_data": None if include_data else False,
        }
        self._lenient = lenient
        self._session: WatchSession | None = None
        self._parser = FrameParser()
        self._pending: deque[tuple[Event | None, dict[str, Cursor]]] = deque()
        self.last_event_id: str | None = None
        # Topics of which was told that they have caught up, and nothing since: another connection says it again.
        self._live: dict[str, int] = {}

    # -- connecting ----------------------------------------------------------------------------------------------------

    def create_call(self) -> Call[WatchSession] | None:
        """How to get a session, if there is none."""
        if self._session is not None:
            return None
        topics = {name: self._start(name, cursor) for name, cursor in self._ends().items()}
        return calls.create_watch({"topics": topics, **self._wishes}, self._lenient)

    def _ends(self) -> dict[str, Cursor]:
        """Where it stands when all that is pending was handed out."""
        ends = dict(self.cursors)
        for _, moved in self._pending:
            ends |= moved
        return ends

    def _start(self, name: str, cursor: Cursor) -> dict[str, Any]:
        if name in self._tails:
            return {"tail": True}
        start: dict[str, Any] = {"from_seq": cursor.seq}
        if cursor.epoch is not None:
            start["epoch"] = cursor.epoch
        return start

    def on_session(self, session: WatchSession) -> None:
        """Pins where it begins: from now on nothing is missed, whatever happens to the session."""
        self._session = session
        self.last_event_id = None
        for name, told in session.topics.items():
            if name in self._tails or (name in self.cursors and self.cursors[name].epoch is None):
                self.cursors[name] = Cursor(told.from_seq, told.epoch)
        self._tails -= session.topics.keys()

    def target(self) -> str:
        assert self._session is not None
        self._parser = FrameParser()
        return self._session.stream_url

    def on_refused(self, answer: Answer) -> TopicsError | None:
        """What a refused stream means: an error that passes, or None for a session that is gone; raises the rest."""
        error = error_of(answer.status, answer.body)
        if isinstance(error, NotFound):
            self._session = None
            return None
        if is_passing(error, answer.status) or answer.status in (502, 503, 504):
            return error
        raise error

    # -- what comes ----------------------------------------------------------------------------------------------------

    def feed(self, chunk: bytes) -> bool:
        """Takes bytes of the stream; says whether that made progress."""
        before = self.last_event_id, len(self._pending)
        for frame in self._parser.feed(chunk):
            self._take(frame)
        return before != (self.last_event_id, len(self._pending))

    def pop(self) -> Event | None:
        while self._pending:
            event, moved = self._pending.popleft()
            self.cursors |= moved
            if event is not None:
                return event
        return None

    def _take(self, frame: Frame) -> None:
        ends = _cursors_of(frame.id) if frame.id is not None else {}
        if frame.event == "record":
            batch = _read_record(frame.data)
            end = ends.get(batch.topic, Cursor())
            self._live.pop(batch.topic, None)
            for record in batch.records:
                moved = {batch.topic: Cursor(record.seq, end.epoch)}
                self._pending.append((Received(batch.topic, record), moved))
        elif frame.event == "tombstone":
            told = _read_tombstone(frame.data)
            self._live.pop(told.topic, None)
            stone = Tombstone(
                told.gap_from,
                told.gap_to,
                told.reason,  # type: ignore[arg-type]  # a watch has one reason more
                told.missed_estimate,
                told.earliest_seq,
                told.head_seq,
            )
            epoch = ends[told.topic].epoch if told.topic in ends else None
            moved = {told.topic: behind(stone, epoch) if epoch is not None else Cursor(stone.gap_to)}
            self._pending.append((Lost(told.topic, stone), moved))
        elif frame.event == "caught-up":
            topic = _read_topic(frame.data)
            if self._live.get(topic.topic) != topic.head_seq:
                self._live[topic.topic] = topic.head_seq
                self._pending.append((CaughtUp(topic.topic, topic.head_seq), {}))
        elif frame.event == "topic-deleted":
            topic = _read_topic(frame.data)
            self._live.pop(topic.topic, None)
            self._pending.append((TopicGone(topic.topic, topic.head_seq), {}))
        elif frame.event == "error":
            error = _read_error(frame.data)
            self._on_error(error)
        if frame.id is not None and frame.id != self.last_event_id:
            self.last_event_id = frame.id
            self._pending.append((None, ends))

    def _on_error(self, told: _ErrorFrame) -> None:
        error = error_named(told.code, told.error)
        if told.code in _PASSING:
            raise Ended(error, told.retry_after_ms / 1000)
        raise error


def _cursors_of(text: str) -> dict[str, Cursor]:
    try:
        map_ = _decode_id(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        epochs = map_.pop(_EPOCHS)
        assert isinstance(epochs, dict)
        return {name: Cursor(seq, epochs[name]) for name, seq in map_.items() if isinstance(seq, int)}
    except (binascii.Error, ValueError, KeyError, AssertionError, msgspec.MsgspecError):
        raise ServerError(f"an event's id is not one of a topics server: {text[:100]!r}") from None
