"""Watch sessions: what a client follows and how far it is, kept between its connections, for a while."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from topics.core.errors import NotFound, Throttled
from topics.http.following import Position, Stream, Wishes

if TYPE_CHECKING:
    from topics.http.app import App
    from topics.http.auth import Key


class Session(msgspec.Struct, kw_only=True):
    """`owner` is the key that made it. `positions` go along with what is sent by `stream`; `known` is what the client
    has shown to have: it may not have got all that was sent, and `furthest` is what it may have got."""

    wid: str
    owner: str
    wishes: Wishes
    heartbeat: float
    positions: dict[str, Position]
    known: dict[str, Position]
    furthest: dict[str, Position]
    used_at: float
    stream: Stream | None = None


def copied(positions: dict[str, Position]) -> dict[str, Position]:
    return {name: Position(position.seq, position.epoch) for name, position in positions.items()}


class Watches:
    def __init__(self, app: App) -> None:
        self._app = app
        self._sessions: dict[str, Session] = {}
        self._streams: dict[str, int] = {}
        self.open_streams = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, key: Key, wishes: Wishes, heartbeat: float, positions: dict[str, Position]) -> Session:
        most = self._app.limits.max_watch_sessions
        if most and len(self._sessions) >= most:
            raise Throttled(
                f"there are {most} watch sessions, TOPICS_MAX_WATCH_SESSIONS is {most}",
                limit="TOPICS_MAX_WATCH_SESSIONS",
                max=most,
            )
        session = Session(
            wid=secrets.token_hex(16),
            owner=key.id,
            wishes=wishes,
            heartbeat=heartbeat,
            positions=positions,
            known=copied(positions),
            furthest=copied(positions),
            used_at=self._app.clock(),
        )
        self._sessions[session.wid] = session
        return session

    def find(self, wid: str, key: Key) -> Session:
        session = self._sessions.get(wid)
        if session is None or session.owner != key.id:
            raise NotFound("there is no such watch, or no more: create another one from where you are")
        return session

    def check_room(self, key: Key) -> None:
        """Refuses a stream too many. Its place is taken by `open_one` and given back by `close_one`."""
        limits = self._app.limits
        most, most_of_key = limits.max_sse_connections, limits.max_sse_connections_per_key
        if most and self.open_streams >= most:
            name = "TOPICS_MAX_SSE_CONNECTIONS"
            raise Throttled(f"there are {most} streams, {name} is {most}", limit=name, max=most)
        if most_of_key and self._streams.get(key.id, 0) >= most_of_key:
            name = "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY"
            raise Throttled(f"this key has {most_of_key} streams, {name} is {most_of_key}", limit=name, max=most_of_key)

    def open_one(self, owner: str) -> None:
        self.open_streams += 1
        self._streams[owner] = self._streams.get(owner, 0) + 1

    def close_one(self, owner: str) -> None:
        self.open_streams -= 1
        self._streams[owner] -= 1
        if not self._streams[owner]:
            del self._streams[owner]

    def sweep(self, now: float) -> None:
        """Drops sessions that nobody has used for too long."""
        oldest = now - self._app.settings.watch_ttl_ms / 1000
        for session in list(self._sessions.values()):
            if session.stream is None and session.used_at < oldest:
                del self._sessions[session.wid]
