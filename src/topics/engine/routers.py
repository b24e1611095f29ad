"""Routers: the verbs, and how copies get from a source to the topics behind it.

A source's ack never waits for its routers. What is published waits in `outgoing`; a fan-out gives copies their seqs in
all dests and their place in the log as one event, which has the records once; when that is durable, each dest takes its
copies in a step of its own, between other work. A reader of a dest asks for all that first (`catch_up`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from topics.core.config import ConfigPatch
from topics.core.config import resolve as resolve_topic
from topics.core.errors import (
    RouterCycle,
    RouterNotFound,
    StorageFault,
    Throttled,
    TopicFull,
    TopicNotFound,
    TopicsError,
)
from topics.core.limits import MAX_INTEGER
from topics.core.names import check_router_name
from topics.core.routing import Remote, RouterConfig, RouterPatch, resolve
from topics.core.tombstone import Hole
from topics.engine import frames
from topics.engine.append import LEVELS, completed
from topics.engine.commit import Commit, Level, when_all
from topics.engine.copying import Cargo, Load, Piece, first_of, last_of, retained, waiting
from topics.engine.frames import Advanced, Event, Link, Routed, RouterState
from topics.engine.router import FROM_EARLIEST, FROM_HEAD, Router, let_go
from topics.engine.sealed import LostRange
from topics.engine.topic import Topic

if TYPE_CHECKING:
    from topics.engine.engine import Engine

# Dests of one fan-out: each more is a pause, each fan-out more is one more copy of the records in the log.
_MAX_LINKS = 128
# Bytes that may wait to be forwarded before writers wait for it.
_MAX_WAITING = 32 << 20
_FIRST_BACKOFF_MS, _LAST_BACKOFF_MS = 50, 2000


class RouterView(msgspec.Struct):
    router: str
    config: RouterConfig
    forwarded_total: int
    cursor: int
    lag: int
    state: str
    last_error: str | None

    def to_json(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        config = fields.pop("config").to_json()
        return {"router": fields.pop("router"), **config, **fields}


class PutRouter(msgspec.Struct):
    view: RouterView
    created: bool


class _Plan:
    """Where the routers of a source lead, as the log has it."""

    __slots__ = ("links", "number")

    def __init__(self, number: int, links: list[Link]) -> None:
        self.number = number
        self.links = links


class _Delivery(Commit):
    """The copies of one router, on their way into its dest."""

    __slots__ = ()


class Routers:
    def __init__(self, engine: Engine, timer: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._routes = engine.state.routes
        self._timer = timer
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._plans_in = 0
        # Sources with something to forward; deliveries whose log is durable; bytes that wait in sources.
        self._sources: dict[Topic, None] = {}
        self._due: deque[Commit] = deque()
        # What a pass over a source's routers has still to do; without routers, the pass is at its end.
        self._steps: deque[tuple[Topic, int, list[Router]]] = deque()
        self._waiting = 0
        self._blocked: dict[Router, None] = {}
        self._upstream: tuple[int, dict[int, list[Router]]] = (-1, {})
        # Called when there is something to do and was not before.
        self.on_work: Callable[[], None] | None = None
        for router in self._routes.by_name.values():
            router.is_active = True
            self._check_cursor(router)
        for topic in engine.state.topics.values():
            if topic.outlets:
                if topic.outgoing and last_of(topic.outgoing[-1]) < topic.head_seq:
                    # What a restart took from the top is in no event of its own.
                    topic.outgoing.append(Hole(last_of(topic.outgoing[-1]) + 1, topic.head_seq, "restart"))
                let_go(topic)
                self._sources[topic] = None

    def _check_cursor(self, router: Router) -> None:
        """A repair may have lost the end of a source, or its beginning."""
        name = router.source_name
        source = self._engine.state.by_name.get(name) if name is not None else None
        if source is not None:
            if router.source_epoch != source.epoch:
                router.source_epoch = 0
                router.begin(source)
            router.cursor = router.staged_cursor = min(router.cursor, source.head_seq)

    # -- the verbs -------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Router:
        check_router_name(name)
        router = self._routes.by_name.get(name)
        if router is None or not router.is_active:
            raise RouterNotFound(f"router {name!r} does not exist")
        return router

    def put(self, name: str, patch: RouterPatch) -> Commit:
        """Creates a router, or changes the fields that were sent; the result is a `PutRouter`."""
        engine = self._engine
        engine.check_open()
        check_router_name(name)
        known = self._routes.by_name.get(name)
        config = resolve(patch, known.staged_config if known is not None else None)
        is_new = known is None or _ends(config) != _ends(known.staged_config)
        self._check_cycle(name, config)
        if known is not None and not is_new:
            return self._change(known, config)
        most = engine.limits.max_routers
        if known is None and most and len(self._routes.by_name) >= most:
            raise Throttled(
                f"there are {most} routers, TOPICS_MAX_ROUTERS is {most}", limit="TOPICS_MAX_ROUTERS", max=most
            )
        # The topic that it lives with: where it leads, or, if that is elsewhere, where it begins.
        home_name = config.dest if isinstance(config.dest, str) else config.source
        assert isinstance(home_name, str)
        home = engine.staged_topic(home_name)
        if home is None and not config.create_dest and isinstance(config.dest, str):
            raise TopicNotFound(f"dest {home_name!r} does not exist, and create_dest is false")
        events: list[Event] = []
        made = home is None
        if home is None:
            home, event = engine.stage_topic(home_name, resolve_topic(ConfigPatch(), None, home_name))
            events.append(event)
        removed = known
        if removed is not None:
            self._end(removed)
            events.append(frames.router_dropped(removed.home.epoch, removed.id))
        router = Router(RouterState(engine.next_number(), name, config, *self._start(config)), home)
        events.append(frames.router_put(home.epoch, router.state()))
        self._routes.add(router, engine.state.by_name)
        topics = [home] if removed is None or removed.home is home else [home, removed.home]

        def publish() -> PutRouter:
            if made:
                engine.state.add(home)
            if removed is not None:
                engine.state.remove_router(removed.home, removed.id)
            if home.inlets is None:
                home.inlets = {}
            home.inlets[router.id] = router
            engine.state.next_epoch = max(engine.state.next_epoch, router.id + 1)
            router.is_active = True
            self._note(router)
            return PutRouter(self.view(router), created=removed is None)

        return engine.committer.stage(Level.SYNCED, topics, events, publish, atomic=True)

    def _start(self, config: RouterConfig) -> tuple[int, int]:
        """Where a new router begins: the instance of its source, and the cursor there."""
        engine = self._engine
        source = engine.state.by_name.get(config.source) if isinstance(config.source, str) else None
        if source is None:
            if isinstance(config.source, Remote):
                return 0, FROM_HEAD if config.start == "head" else FROM_EARLIEST
            return 0, 0
        engine.settle(source)
        return source.epoch, source.head_seq if config.start == "head" else source.earliest_seq - 1

    def _end(self, router: Router) -> None:
        """It copies what was acked until now, and nothing more."""
        self._take_waiting(router)
        self._routes.remove(router, self._engine.state.by_name)

    def _take_waiting(self, router: Router) -> None:
        source = self._engine.state.by_name.get(router.source_name or "")
        if source is not None:
            self._forward_waiting(source, [router])

    def _change(self, router: Router, config: RouterConfig) -> Commit:
        # What was acked before goes by what it was told before.
        self._take_waiting(router)
        router.staged_config = config
        what = msgspec.structs.replace(router.state(), config=config)

        def publish() -> PutRouter:
            router.config = config
            return PutRouter(self.view(router), created=False)

        event = frames.router_put(router.home.epoch, what)
        return self._engine.committer.stage(Level.SYNCED, (router.home,), (event,), publish)

    def _check_cycle(self, name: str, config: RouterConfig) -> None:
        if config.allow_cycle or config.is_remote:
            return
        assert isinstance(config.source, str)
        assert isinstance(config.dest, str)
        # From the dest on, wherever it leads.
        came_from: dict[str, str] = {config.dest: config.source}
        line = deque([config.dest])
        while line:
            at = line.popleft()
            for router in self._routes.reading(at):
                dest = router.staged_config.dest
                if router.name == name or not isinstance(dest, str) or dest in came_from:
                    continue
                came_from[dest] = at
                if dest == config.source:
                    cycle = [dest]
                    while len(cycle) == 1 or cycle[-1] != config.source:
                        cycle.append(came_from[cycle[-1]])
                    cycle.reverse()
                    raise cycle_of(cycle)
                line.append(dest)

    def delete(self, name: str) -> Commit:
        """Ends a router; the result says whether there was one."""
        engine = self._engine
        engine.check_open()
        check_router_name(name)
        router = self._routes.by_name.get(name)
        if router is None:
            return completed(False)
        self._end(router)
        home = router.home

        def publish() -> bool:
            engine.state.remove_router(home, router.id)
            return True

        event = frames.router_dropped(home.epoch, router.id)
        return engine.committer.stage(Level.SYNCED, (home,), (event,), publish)

    def leave(self, topic: Topic) -> tuple[int, list[Event], list[Topic], Callable[[], None]]:
        """A topic is about to go: its routers go with it. How many, the events that say so, whose topics these are,
        and what is left to do when that is durable."""
        engine = self._engine
        readers = [router for router in self._routes.reading(topic.name) if router.home is not topic]
        inlets = [router for router in (topic.inlets or {}).values() if not router.is_removed]
        # One that is on its way to its home is not among the home's yet.
        staged = [router for router in self._routes.by_name.values() if router.home is topic and router not in inlets]
        gone = [*readers, *inlets, *staged]
        self._forward_waiting(topic, readers)
        for router in gone:
            self._routes.remove(router, engine.state.by_name)

        def publish() -> None:
            for router in readers:
                engine.state.remove_router(router.home, router.id)

        events = [frames.router_dropped(router.home.epoch, router.id) for router in readers]
        homes = list(dict.fromkeys(router.home for router in readers))
        return len(gone), events, homes, publish

    def view(self, router: Router) -> RouterView:
        name = router.source_name
        source = self._engine.state.by_name.get(name) if name is not None else None
        head = source.head_seq if source is not None else router.remote_head
        lag = max(head - router.cursor, 0) if head is not None else 0
        state = "running"
        if router.last_error is not None:
            state = "blocked"
        elif source is not None and router.is_local and router.staged_cursor < _base(source):
            state = "catching_up"
        return RouterView(
            router.name, router.config, router.forwarded, max(router.cursor, 0), lag, state, router.last_error
        )

    def named(self) -> Sequence[Router]:
        """All routers, by name."""
        return [self._routes.by_name[name] for name in sorted(self._routes.by_name)]

    # -- forwarding ------------------------------------------------------------------------------------------------

    def on_published(self, source: Topic, pieces: Sequence[Piece] = ()) -> None:
        """A source has something new."""
        self._waiting += _weight(pieces)
        if source not in self._sources:
            was_idle = not self.has_work()
            self._sources[source] = None
            if was_idle and self.on_work is not None:
                self.on_work()

    def _note(self, router: Router) -> None:
        name = router.source_name
        source = self._engine.state.by_name.get(name) if name is not None else None
        if source is not None and router.is_local:
            self.on_published(source)

    def has_work(self) -> bool:
        return bool(self._due or self._steps or self._sources)

    def work(self, seconds: float) -> bool:
        """Forwards for a while; says whether there is more to do."""
        if not self.has_work() or self._engine.committer.read_only is not None:
            return False
        until = self._timer() + seconds
        while True:
            if self._due:
                self._deliver(self._due.popleft())
            elif self._steps:
                source, cursor, routers = self._steps.popleft()
                if routers:
                    self._step(source, cursor, routers)
                    self._engine.committer.flush()
                else:
                    self._end_pass(source)
            elif self._sources:
                source = next(iter(self._sources))
                del self._sources[source]
                self._steps += [(source, *step) for step in self._plan(source, source.outlets or ())]
                self._steps.append((source, 0, []))
            if not self.has_work():
                return False
            if self._timer() >= until:
                return True

    def tick(self) -> None:
        """What was refused is tried again, in time."""
        if self._blocked:
            now = self._engine.time.now()
            for router in [each for each in self._blocked if each.retry_at is not None and each.retry_at <= now]:
                router.retry_at = None
                self._note(router)
        self.work(0.005)

    def relieve(self) -> None:
        """Forwards at once, if more waits than memory should hold."""
        if self._waiting <= _MAX_WAITING:
            return
        # At most so much: what was forwarded meanwhile is still counted.
        self._waiting = sum(_weight(source.outgoing) for source in self._sources)
        if self._waiting > _MAX_WAITING:
            for source in list(self._sources):
                self._forward_waiting(source, source.outlets or ())
            self._engine.committer.flush()
            self._waiting = 0

    def finish(self) -> None:
        """At the end: nothing that could be forwarded is left for the next life, however long the way is."""
        committer, topics = self._engine.committer, self._engine.state.topics
        for _ in range(len(topics) + 1):
            sources = [topic for topic in topics.values() if topic.outgoing]
            has_moved = any([self._forward_waiting(source, source.outlets or ()) for source in sources])
            committer.flush_and_wait()
            while self._due and committer.read_only is None:
                self._deliver(self._due.popleft())
                has_moved = True
            if not has_moved:
                return

    def before_freeze(self, topic: Topic) -> None:
        """A checkpoint is about to take a topic in. What waits there for its routers is forwarded, for the log may not
        keep it; and copies whose event is in an older log file, which will go, are delivered."""
        pending = topic.pending
        while pending and isinstance(pending[0], _Delivery) and pending[0].is_ready:
            self._deliver(pending[0])
        self.before_removal(topic)

    def before_removal(self, topic: Topic) -> None:
        """Records are about to be deleted: routers that are up to date take them first, so that whoever has not taken
        them when the log says that they are deleted will not."""
        if topic.outgoing:
            self._forward_waiting(topic, topic.outlets or ())

    def _forward_waiting(self, source: Topic, routers: Sequence[Router]) -> bool:
        """Forwards all that waits for some routers which are up to date; says whether there was anything."""
        has_moved = False
        while not source.dropped:
            before = [router.staged_cursor for router in routers]
            for cursor, some in self._plan(source, routers, only_waiting=True):
                self._step(source, cursor, some)
            let_go(source)
            if [router.staged_cursor for router in routers] == before:
                break
            has_moved = True
        return has_moved

    def _plan(
        self, source: Topic, routers: Sequence[Router], only_waiting: bool = False
    ) -> Iterator[tuple[int, list[Router]]]:
        """Which routers can take the next stretch of a source, and from where: as many at a time as share an event."""
        base, head = _base(source), source.head_seq
        groups: dict[int, list[Router]] = {}
        for router in routers:
            cursor = router.staged_cursor
            if cursor < head and not (only_waiting and cursor < base) and router.can_forward:
                groups.setdefault(cursor, []).append(router)
        for cursor, some in groups.items():
            for start in range(0, len(some), _MAX_LINKS):
                yield cursor, some[start : start + _MAX_LINKS]

    def _step(self, source: Topic, cursor: int, routers: Sequence[Router]) -> None:
        """Gives the next stretch of a source its place in the log, for some routers."""
        routers = [router for router in routers if router.staged_cursor == cursor and router.can_forward]
        if source.dropped or not routers:
            return
        try:
            cargo = self._cargo(source, cursor, _base(source))
        except StorageFault as fault:
            for router in routers:
                self._block(router, fault)
            return
        self._stage(source, cargo, routers)

    def _end_pass(self, source: Topic) -> None:
        let_go(source)
        head = source.head_seq
        if not source.dropped and any(
            [router.staged_cursor < head and router.can_forward for router in source.outlets or ()]
        ):
            self._sources[source] = None

    def _cargo(self, source: Topic, cursor: int, base: int) -> Cargo:
        instance = self._engine.state.instance(source.epoch)
        if cursor >= base:
            pieces, last = waiting(source.outgoing, cursor, source.head_seq)
            return Cargo(cursor + 1, last, pieces, instance)
        self._engine.settle(source)
        while True:
            try:
                pieces, last = retained(source, cursor)
                return Cargo(cursor + 1, last, pieces, instance)
            except LostRange as lost:
                self._engine.lose(source, lost)

    def _stage(self, source: Topic, cargo: Cargo, routers: Sequence[Router]) -> None:
        classes: dict[str, list[Router]] = {}
        for router in routers:
            config = router.home.staged_config
            if config.discard == "reject" and (config.cap_records or config.cap_bytes):
                self._stage_what_fits(source, cargo, router)
            else:
                classes.setdefault(config.durability, []).append(router)
        for durability, some in classes.items():
            self._fan_out(source.epoch, cargo, some, durability)

    def _stage_what_fits(self, source: Topic, cargo: Cargo, router: Router) -> None:
        """A dest that refuses what is too much takes what it has room for; the rest waits in the source."""
        fitting = self._fitting(router, cargo)
        if fitting is not None:
            self._fan_out(source.epoch, fitting, [router], router.home.staged_config.durability)
        if fitting is not cargo:
            self._block(router, _full(router.home))

    def _fitting(self, router: Router, cargo: Cargo) -> Cargo | None:
        """As much as a dest has room for; None if that is nothing."""
        dest, config = router.home, router.home.staged_config
        self._engine.settle(dest)
        count = config.cap_records - dest.count - dest.pending_count if config.cap_records else None
        size = config.cap_bytes - dest.bytes - dest.pending_bytes if config.cap_bytes else None
        last = cargo.fitting(router.staged_config, self._engine.state.instance(dest.epoch), count, size)
        if last >= cargo.last:
            return cargo
        return cargo.until(last) if last >= cargo.first else None

    def _block(self, router: Router, why: TopicsError | str) -> None:
        router.last_error = why if isinstance(why, str) else why.message
        router.backoff_ms = min(max(2 * router.backoff_ms, _FIRST_BACKOFF_MS), _LAST_BACKOFF_MS)
        router.retry_at = self._engine.time.now() + router.backoff_ms
        self._blocked[router] = None

    def _unblock(self, router: Router) -> None:
        if router.last_error is not None:
            router.last_error = router.retry_at = None
            router.backoff_ms = 0
            self._blocked.pop(router, None)

    def _fan_out(
        self,
        epoch: int,
        cargo: Cargo,
        routers: Sequence[Router],
        durability: str,
        remote_epoch: int = 0,
        instance: str = "",
    ) -> None:
        """One event for all routers: seqs are taken, and deliveries wait until it is as durable as the dests are."""
        engine = self._engine
        committer, appender, state = engine.committer, engine.appender, engine.state
        now = engine.time.now()
        level = LEVELS[durability]
        takers: list[tuple[Router, Load, int]] = []
        try:
            appender.check_total(state.store.live_bytes)
        except Throttled as refusal:
            for router in routers:
                self._block(router, refusal)
            return
        for router in routers:
            dest = router.home
            load = cargo.take(router.staged_config, state.instance(dest.epoch))
            first = dest.staged_seq
            if first + load.count > MAX_INTEGER:
                self._block(router, f"dest {dest.name!r} has no seqs left")
                continue
            self._unblock(router)
            if load.count:
                last = first + load.count - 1
                dest.staged_seq = last + 1
                if last > dest.ceiling or last + dest.ahead // 2 > dest.reserved:
                    level = Level.SYNCED if appender.reserve(dest, last, now) else level
                dest.pending_count += load.records
                dest.pending_bytes += load.size
            router.staged_cursor = cargo.last
            takers.append((router, load, first if load.count else 0))
        if not takers:
            return
        event = self._event(epoch, cargo, takers, durability, now, remote_epoch, instance)
        start = committer.wal.staged
        deliveries: list[Commit] = []
        source_epoch = remote_epoch or epoch
        for router, load, first in takers:
            publish = partial(self._publish, router, load, first, now, (source_epoch, cargo.last, instance))
            delivery = _Delivery(level, (router.home,), publish)
            delivery.start = start
            router.home.pending.append(delivery)
            router.last_delivery = delivery
            deliveries.append(delivery)

        def ready() -> None:
            was_idle = not self.has_work()
            for delivery in deliveries:
                delivery.is_ready = True
                if delivery.is_awaited:
                    self._due.appendleft(delivery)
                else:
                    self._due.append(delivery)
            while self._due and self._due[0].is_awaited:
                self._deliver(self._due.popleft())
            if was_idle and self.on_work is not None:
                self.on_work()

        commit = committer.stage(level, (), (event,), ready)
        commit.on_done(lambda done: self._fail(deliveries, done))

    def _event(
        self,
        epoch: int,
        cargo: Cargo,
        takers: Sequence[tuple[Router, Load, int]],
        durability: str,
        now: int,
        remote_epoch: int,
        instance: str,
    ) -> Event:
        """The event of a fan-out. Links that stand in this log file already, at the same offsets, are not repeated."""
        wal = self._engine.committer.wal
        if self._plans_in != wal.number:
            self._plans_in = wal.number
            self._plans.clear()
        first, slot = cargo.first, takers[0][0].id
        key = (epoch, slot)
        plan = self._plans.get(key)
        firsts: dict[int, int] = {}
        links: list[Link] | None = None
        known = plan.links if plan is not None else ()
        is_known = len(known) == len(takers) and all(
            [link.router == router.id for link, (router, _, _) in zip(known, takers, strict=True)]
        )
        if is_known:
            for index, (link, (_, _, begins)) in enumerate(zip(known, takers, strict=True)):
                if link.offset is None or begins != first + link.offset:
                    firsts[index] = begins
        if not is_known or len(firsts) > len(takers) // 4 + 4:
            links = [
                Link(router.id, router.home.epoch, begins - first if begins else None) for router, _, begins in takers
            ]
            firsts = {index: 0 for index, (_, _, begins) in enumerate(takers) if not begins}
            plan = self._plans[key] = _Plan(wal.staged, links)
        assert plan is not None
        what = Routed(now, slot, plan.number, links, firsts, [], {}, remote_epoch, instance)
        if durability == "ephemeral":
            what.records = [load.records for _, load, _ in takers]
        is_carried = durability != "ephemeral" and any([begins for _, _, begins in takers])
        return frames.routed(epoch, first, cargo.last, what, cargo.pieces if is_carried else ())

    def _publish(self, router: Router, load: Load, first: int, ts: int, place: tuple[int, int, str]) -> None:
        source_epoch, last, instance = place
        dest = router.home
        if first:
            dest.pending_count -= load.records
            dest.pending_bytes -= load.size
            self._engine.appender.publish_pieces(dest, load.render(first, ts))
        router.advance(source_epoch, last, load.records, instance)

    def _deliver(self, delivery: Commit) -> None:
        if not delivery.done:
            self._engine.committer.publish(delivery)

    def _fail(self, deliveries: Iterable[Commit], commit: Commit) -> None:
        """The log took nothing: nor does any dest."""
        if commit.error is not None:
            for delivery in deliveries:
                if not delivery.done:
                    with suppress(ValueError):
                        delivery.topics[0].pending.remove(delivery)
                    delivery.fail(commit.error)

    # -- other servers ---------------------------------------------------------------------------------------------

    def next_cargo(self, router: Router) -> Cargo | None:
        """What a router to another server has to push next."""
        source = self._engine.state.by_name.get(router.source_name or "")
        if source is None or router.cursor >= source.head_seq:
            return None
        return self._cargo(source, router.cursor, source.head_seq)

    def pushed(self, router: Router, last: int, records: int) -> Commit | None:
        """The other server has it. A cursor that is lost costs a repeat, which changes nothing there."""
        if router.is_removed:
            return None
        return self._move(router, Advanced(router.source_epoch, last, router.forwarded + records))

    def begin_at(self, router: Router, source_epoch: int, cursor: int, instance: str = "") -> Commit | None:
        """Where a router begins in a topic of another server is known only when that is reached."""
        if router.is_removed:
            return None
        return self._move(router, Advanced(source_epoch, cursor, router.forwarded, instance))

    def _move(self, router: Router, what: Advanced) -> Commit:
        event = frames.router_advanced(router.home.epoch, router.id, what)

        def publish() -> None:
            router.advance(what.source_epoch, what.cursor, what.forwarded - router.forwarded, what.instance)

        return self._engine.committer.stage(Level.WRITTEN, (router.home,), (event,), publish)

    def take(self, router: Router, cargo: Cargo, source_epoch: int, instance: str) -> Commit | None:
        """What a router has pulled from another server, into its dest; as much of it as fits."""
        self._engine.check_open()
        if router.is_removed:
            return None
        dest, config = router.home, router.home.staged_config
        if config.discard == "reject" and (config.cap_records or config.cap_bytes):
            fitting = self._fitting(router, cargo)
            if fitting is None:
                raise TopicFull(_full(dest), topic=dest.name)
            cargo = fitting
        before = router.last_delivery
        self._fan_out(0, cargo, [router], config.durability, source_epoch, instance)
        if router.last_delivery is before:
            raise Throttled(router.last_error or "the dest takes nothing")
        return router.last_delivery

    def failed(self, router: Router, why: str) -> None:
        """The other server cannot be reached, or refuses."""
        router.last_error = why

    def recovered(self, router: Router) -> None:
        router.last_error = None

    # -- reading what is behind a router ---------------------------------------------------------------------------

    def catch_up(self, topic: Topic) -> Commit | None:
        """What the sources of a topic had acked before becomes visible in it, through all routers that are up to date;
        None if it is already."""
        routes = self._leading_to(topic)
        if not routes or self._engine.committer.read_only is not None:
            return None
        commit = Commit(Level.ACCEPTED, (), lambda: None)
        self._advance(routes, len({router.source_name for router in routes}) + 1, commit)
        return None if commit.done else commit

    def _advance(self, routes: Sequence[Router], rounds: int, commit: Commit) -> None:
        """One round takes everything one topic further."""
        while rounds > 0:
            rounds -= 1
            has_moved = self._push(routes)
            pending = [
                router.last_delivery
                for router in routes
                if router.last_delivery is not None and not router.last_delivery.done
            ]
            if pending:
                when_all(pending, partial(self._advance, routes, rounds, commit))
                return
            if not has_moved:
                break
        commit.publish()

    def _push(self, routes: Sequence[Router]) -> bool:
        engine = self._engine
        by_source: dict[str, list[Router]] = {}
        for router in routes:
            name = router.source_name
            source = engine.state.by_name.get(name) if name is not None else None
            if name is not None and source is not None and router.staged_cursor < source.head_seq:
                by_source.setdefault(name, []).append(router)
        has_moved = False
        for name, some in by_source.items():
            source = engine.state.by_name[name]
            has_moved = self._forward_waiting(source, some) or has_moved
        if has_moved:
            engine.committer.flush()
        for router in routes:
            delivery = router.last_delivery
            if delivery is not None and not delivery.done and delivery.is_ready:
                has_moved = True
                self._deliver(delivery)
        return has_moved

    def _leading_to(self, topic: Topic) -> list[Router]:
        """The routers of this server on all ways to a topic."""
        if not topic.inlets:
            return []
        version, known = self._upstream
        if version != self._routes.version:
            version, known = self._upstream = (self._routes.version, {})
        found = known.get(topic.epoch)
        if found is None:
            found = known[topic.epoch] = []
            seen = {topic.epoch}
            line = deque([topic])
            while line:
                for router in (line.popleft().inlets or {}).values():
                    name = router.source_name
                    if name is None or not router.is_local or router.is_removed:
                        continue
                    found.append(router)
                    source = self._engine.state.by_name.get(name)
                    if source is not None and source.epoch not in seen:
                        seen.add(source.epoch)
                        line.append(source)
        return found


def cycle_of(names: Sequence[str]) -> RouterCycle:
    return RouterCycle(f"{' -> '.join(names)} is a cycle: allow_cycle permits it", cycle=list(names))


def _base(source: Topic) -> int:
    """The cursor behind which everything is at hand, also what retention has taken."""
    return first_of(source.outgoing[0]) - 1 if source.outgoing else source.head_seq


def _full(dest: Topic) -> str:
    config = dest.staged_config
    return f"dest {dest.name!r} is full: cap_records is {config.cap_records}, cap_bytes is {config.cap_bytes}"


def _weight(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.body) for piece in pieces if not isinstance(piece, Hole))


def _ends(config: RouterConfig) -> list[object]:
    """What makes it another router: the key of a remote end does not."""
    return [(end.url, end.topic) if isinstance(end, Remote) else end for end in (config.source, config.dest)]
