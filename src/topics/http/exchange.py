"""One request and its answer, whatever protocol carried it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from topics.core.errors import InvalidRequest, TopicsError
from topics.http.auth import Key
from topics.http.head import Head

if TYPE_CHECKING:
    from topics.http.app import App

JSON = b"application/json"
_encode = msgspec.json.Encoder().encode
_RETRY_AFTER = {429: 1, 503: 5}


class Channel(Protocol):
    """Where an answer goes: a place in a connection's line of answers, or an HTTP/2 stream."""

    def send(self, exchange: Exchange, status: int, content_type: bytes, headers: Headers, body: Body) -> None: ...

    def open(self, exchange: Exchange, content_type: bytes, headers: Headers) -> Outlet: ...


class Outlet(Protocol):
    """Where an answer goes that has no end of its own. What is written while it `is_full`, it has to hold."""

    @property
    def is_full(self) -> bool: ...

    @property
    def unsent(self) -> int:
        """Bytes that the client has not taken yet."""
        ...

    def write(self, data: bytes) -> None: ...

    def end(self, why: TopicsError | None = None) -> None: ...


class Listener(Protocol):
    """Who writes to an outlet, and what it hears of it."""

    def on_room(self) -> None: ...

    def on_gone(self) -> None: ...


# An answer's bytes, in one piece or in several that are sent one after the other.
Body = bytes | list[bytes | memoryview]
Headers = tuple[tuple[bytes, bytes], ...]


class Exchange:
    __slots__ = (
        *("_app", "_channel", "_query", "answered", "body", "head", "hurry", "is_cancelled", "keep_alive", "key"),
        *("listener", "on_cancel", "reply", "route", "started", "status"),
    )

    def __init__(self, app: App, channel: Channel, head: Head, body: bytes) -> None:
        self._app = app
        self._channel = channel
        self.head = head
        self.body = body
        self.started = time.perf_counter()
        self.keep_alive = head.keep_alive
        self.answered = False
        # The bytes of the answer, until their turn comes.
        self.reply: list[bytes | memoryview] | None = None
        # The client is gone: `on_cancel` gives back what a waiting request holds.
        self.is_cancelled = False
        self.on_cancel: Callable[[], None] | None = None
        # Ends a request that waits, with what there is.
        self.hurry: Callable[[], None] | None = None
        self.key: Key | None = None
        self.route = "unknown"
        self.status = 0
        self._query: dict[str, str] | None = None
        # Who writes the answer, if it is one that goes on.
        self.listener: Listener | None = None

    @property
    def channel(self) -> Channel:
        return self._channel

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def headers(self) -> dict[bytes, bytes]:
        return self.head.headers

    @property
    def query(self) -> dict[str, str]:
        if self._query is None:
            try:
                pairs = parse_qsl(self.head.raw_query.decode("ascii"), keep_blank_values=True, max_num_fields=100)
            except (UnicodeDecodeError, ValueError):
                raise InvalidRequest("the query string is malformed") from None
            self._query = dict(pairs)
        return self._query

    def header(self, name: bytes) -> str | None:
        value = self.head.headers.get(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"the header {name.decode()} is not valid UTF-8") from None

    def flag(self, name: str, default: bool) -> bool:
        text = self.query.get(name) if self.head.raw_query else None
        if text is None:
            return default
        if text in ("true", "1"):
            return True
        if text in ("false", "0"):
            return False
        raise InvalidRequest(f"{name} must be true or false, got {text!r:.100}")

    def number(self, name: str, default: int | None = None) -> int:
        text = self.query.get(name)
        if text is None:
            if default is None:
                raise InvalidRequest(f"{name} is required")
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 20:
            raise InvalidRequest(f"{name} must be a whole number of 0 or more, got {text!r:.100}")
        return int(text)

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1000

    def performance(self) -> dict[str, float]:
        return {"server_total_ms": round(self.elapsed_ms(), 3)}

    # -- answers ---------------------------------------------------------------------------------------------------

    def send(self, status: int, body: Body, content_type: bytes = JSON, headers: Headers = ()) -> None:
        if self.answered or self.is_cancelled:
            return
        self.answered = True
        self.status = status
        self._app.finished(self)
        self._channel.send(self, status, content_type, headers, body)

    def open(self, listener: Listener, content_type: bytes, headers: Headers = ()) -> Outlet:
        """Begins an answer that goes on until somebody ends it."""
        assert not self.answered
        self.answered = True
        self.status = 200
        self._app.finished(self)
        self.listener = listener
        return self._channel.open(self, content_type, headers)

    def answer(self, fields: dict[str, Any], status: int = 200) -> None:
        """A success: a bare object with its timing."""
        fields["performance"] = self.performance()
        self.send(status, _encode(fields))

    def fail(self, error: TopicsError, headers: Headers = ()) -> None:
        body: dict[str, Any] = {"code": error.code, "message": error.message}
        detail = dict(error.detail)
        seconds = _RETRY_AFTER.get(error.status)
        if seconds is not None:
            if "limit" not in detail and error.status == 429:
                detail.setdefault("retry_after_ms", seconds * 1000)
            headers = (*headers, (b"retry-after", str(seconds).encode()))
        if error.status == 401:
            headers = (*headers, (b"www-authenticate", b"Bearer"))
        if detail:
            body["detail"] = detail
        self.send(error.status, _encode({"error": body}), JSON, headers)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.on_gone()
        if not self.answered and not self.is_cancelled:
            self.is_cancelled = True
            self._app.finished(self)
            if self.on_cancel is not None:
                self.on_cancel()
