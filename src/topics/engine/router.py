"""A router: how far it got in its source. Its state lives with the topic that it leads to, so that a copy and the
cursor that says so are one event, at one position of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topics.core.routing import Remote
from topics.engine.copying import first_of, last_of
from topics.engine.frames import RouterState

if TYPE_CHECKING:
    from topics.engine.commit import Commit
    from topics.engine.topic import Topic


# Cursors of a router from another server that it has not reached yet.
FROM_HEAD, FROM_EARLIEST = -1, -2


class Router:
    """`config` and `cursor` are as published; `staged_config` and `staged_cursor` as the log will have them."""

    __slots__ = (
        *(
            "backoff_ms",
            "config",
            "cursor",
            "forwarded",
            "home",
            "id",
            "instance",
            "is_active",
            "is_local",
            "is_removed",
            "last_delivery",
        ),
        *("last_error", "name", "remote_head", "retry_at", "source_epoch", "staged_config", "staged_cursor"),
    )

    def __init__(self, state: RouterState, home: Topic) -> None:
        self.id = state.id
        self.name = state.name
        self.config = self.staged_config = state.config
        self.source_epoch = state.source_epoch
        self.cursor = self.staged_cursor = state.cursor
        self.forwarded = state.forwarded
        self.instance = state.instance
        self.home = home
        self.is_local = not state.config.is_remote
        # It is durable, and may forward.
        self.is_active = False
        self.is_removed = False
        # How far the source is on another server, as it said last.
        self.remote_head: int | None = None
        self.last_delivery: Commit | None = None
        # Why it cannot go on, since when it tries again, and how long it waits next time.
        self.last_error: str | None = None
        self.retry_at: int | None = None
        self.backoff_ms = 0

    @property
    def source_name(self) -> str | None:
        """The topic of this server that it reads."""
        return self.staged_config.source if isinstance(self.staged_config.source, str) else None

    @property
    def can_forward(self) -> bool:
        return self.is_active and self.retry_at is None and not self.is_removed and self.is_local

    @property
    def is_push(self) -> bool:
        return isinstance(self.staged_config.dest, Remote)

    def state(self) -> RouterState:
        return RouterState(
            self.id, self.name, self.config, self.source_epoch, self.cursor, self.forwarded, self.instance
        )

    def advance(self, source_epoch: int, cursor: int, records: int, instance: str = "") -> None:
        self.instance = instance or self.instance
        self.source_epoch = source_epoch
        self.cursor = cursor
        self.forwarded += records
        if self.staged_cursor < cursor:
            self.staged_cursor = cursor

    def begin(self, source: Topic) -> None:
        """The source that it waited for is there: it is read from its first record."""
        if not self.source_epoch:
            self.source_epoch = source.epoch
            self.cursor = self.staged_cursor = source.config.seq_base - 1


class Routes:
    """All routers, by name and by the topic that they read."""

    def __init__(self) -> None:
        self.by_name: dict[str, Router] = {}
        self._by_source: dict[str, list[Router]] = {}
        # Changes whenever a router comes or goes.
        self.version = 0

    def add(self, router: Router, topics: dict[str, Topic]) -> None:
        self.version += 1
        self.by_name[router.name] = router
        name = router.source_name
        if name is None:
            return
        readers = self._by_source.setdefault(name, [])
        readers.append(router)
        source = topics.get(name)
        if source is not None:
            source.outlets = readers
            router.begin(source)

    def remove(self, router: Router, topics: dict[str, Topic]) -> None:
        """Forgets a router, if it is not forgotten yet."""
        if router.is_removed:
            return
        router.is_removed = True
        self.version += 1
        if self.by_name.get(router.name) is router:
            del self.by_name[router.name]
        name = router.source_name
        readers = self._by_source.get(name) if name is not None else None
        if name is None or readers is None:
            return
        readers.remove(router)
        if not readers:
            del self._by_source[name]
            source = topics.get(name)
            if source is not None:
                source.outlets = None
                source.outgoing.clear()

    def source_added(self, topic: Topic) -> None:
        readers = self._by_source.get(topic.name)
        if readers is not None:
            topic.outlets = readers
            for router in readers:
                router.begin(topic)

    def reading(self, name: str) -> list[Router]:
        return list(self._by_source.get(name, ()))


def let_go(source: Topic) -> None:
    """Drops what no router that is up to date waits for any more."""
    outgoing = source.outgoing
    if not outgoing:
        return
    base = first_of(outgoing[0]) - 1
    # One that cannot go on does not hold anything: it finds what its source still has.
    ready = [router for router in source.outlets or () if router.is_local and router.last_error is None]
    cursors = [router.staged_cursor for router in ready]
    needed = min([cursor for cursor in cursors if cursor >= base], default=None)
    while outgoing and (needed is None or last_of(outgoing[0]) <= needed):
        outgoing.popleft()
