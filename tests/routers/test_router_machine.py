"""Random graphs of routers against the model, with crashes of every kind among everything that can happen to them.

Nothing forwards on its own here: a fan-out happens in a read of a dest, a step of work, a tick or a checkpoint. The
machine listens to which stretch goes where, in the order of the log, and the model says what must have arrived. After a
power cut what is left must be what the model was at one moment since the last sync.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.clocks import ManualClock
from tests.model import Config, Hole, Item, Refused, View
from tests.routers.model import Graph, Node
from tests.simdisk import MODES, Mode, SimDisk
from tests.test_model import shown, written
from topics.core.config import parse_patch
from topics.core.errors import RouterCycle, TopicsError
from topics.core.limits import Limits
from topics.core.records import decode_write, encode_write
from topics.core.routing import RouterPatch
from topics.core.selector import parse_selector
from topics.engine.commit import Commit
from topics.engine.copying import Cargo, first_of
from topics.engine.engine import Engine
from topics.engine.frames import Event as LogEvent
from topics.engine.jobs import Holder
from topics.engine.options import Options
from topics.engine.read import make_query
from topics.engine.router import Router
from topics.engine.transactions import Part
from topics.log import Log

# What a topic may have reserved ahead. The contract allows 1024: fewer make crashes cheap to look at.
RESERVE = 16
# After so long every blocked router has tried again.
LAST_BACKOFF_MS = 2000
BACKGROUND_SYNC_MS = 100

Event = Callable[[Graph], object]

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
ROUTERS = st.sampled_from(["r0", "r1", "r2", "r3", "r4>x", "r5"])
TAGS = st.sampled_from(["x", "xy", "y"])
FILTERS: st.SearchStrategy[Any] = st.sampled_from([None, None, "x", ["tag", "Glob", "x*"], ["tag", "Eq", "y"]])
RECORDS = st.builds(
    Item,
    data=st.sampled_from([b"", b"", b"", b"l" * 60, b"L" * 250]),
    meta=st.sampled_from([None, None, b'{ "k":"%d" }']),
    tag=st.none() | TAGS,
    node=st.sampled_from([None, None, "n1", "n2"]),
)
ITEMS = st.lists(st.one_of(RECORDS, RECORDS, RECORDS, st.builds(Item, hole=st.integers(1, 4))), min_size=1, max_size=5)
RETENTION = {
    "ttl_ms": st.sampled_from([0, 0, 0, 700]),
    "cap_records": st.sampled_from([0, 0, 1, 3, 6]),
    "cap_bytes": st.sampled_from([0, 0, 0, 120]),
    "discard": st.sampled_from(["old", "reject"]),
}
LATER = st.fixed_dictionaries({}, optional=RETENTION)
FIRST = st.fixed_dictionaries(
    {"durability": st.sampled_from(["ephemeral", "memory", "disk", "disk", "fsync", "fsync"])},
    optional={**RETENTION, "seq_base": st.sampled_from([1, 7]), "type": st.sampled_from(["log", "queue"])},
)
ENDS = st.fixed_dictionaries({"source": NAMES, "dest": NAMES})
ROUTES = st.fixed_dictionaries(
    {"allow_cycle": st.booleans()},
    optional={
        "start": st.sampled_from(["head", "earliest"]),
        "filter": FILTERS,
        "preserve_node": st.booleans(),
        "preserve_tag": st.booleans(),
        "create_dest": st.booleans(),
    },
)
DELAYS = st.sampled_from([0, 0, 0, 1, 60, 699, 701])
# One of what there is.
PICKS = st.integers(0, 59)
EDGES = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=5)


def line(*names: str) -> list[tuple[str, str]]:
    return list(pairwise(names))


SHAPES = st.one_of(
    st.sampled_from(
        [
            line("a", "b", "c", "d", "e"),
            [("a", "b"), ("a", "c"), ("a", "d"), ("a", "e")],
            [("a", "e"), ("b", "e"), ("c", "e"), ("d", "e")],
            [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "e")],
            line("a", "b", "c", "a"),
            [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")],
            [("a", "b"), ("a", "b"), ("b", "c")],
        ]
    ),
    EDGES,
)


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.clock = ManualClock()
        self.disk = SimDisk()
        self.serial = 0
        # All that happened in this life, on top of `base`, in the order of the log; so many are on the platter.
        self.base = Graph()
        self.events: list[Event] = []
        self.synced = 0
        self.from_log = False
        self.txns = 0
        self.log: Log

    @initialize(
        checkpoint_bytes=st.sampled_from([400, 2000, 1 << 20, 1 << 20]),
        chunk_bytes=st.sampled_from([120, 1000]),
        configs=st.tuples(*[st.one_of(FIRST, FIRST, FIRST, st.none())] * 5),
        shape=SHAPES,
        routes=st.tuples(*[ROUTES] * 6),
    )
    def begin(
        self,
        checkpoint_bytes: int,
        chunk_bytes: int,
        configs: tuple[dict[str, Any] | None, ...],
        shape: list[tuple[str, str]],
        routes: tuple[dict[str, Any], ...],
    ) -> None:
        self.patches = ExitStack()
        for name, size in {"TARGET_BYTES": chunk_bytes, "RESERVE_AHEAD": RESERVE}.items():
            owners = [module for path, module in sys.modules.items() if path.startswith("topics.engine")]
            found = [module for module in owners if hasattr(module, name)]
            assert found, f"no module has {name} any more"
            for module in found:
                self.patches.enter_context(patch.object(module, name, size))
        self.options = Options(checkpoint_bytes=checkpoint_bytes, cache_bytes=2000, reclaim_bytes=1500)
        self.open()
        for name, config in zip("abcde", configs, strict=True):
            if config is not None:
                self.put_topic(name, config)
        for number, ((source, dest), fields) in enumerate(zip(shape, routes, strict=False)):
            self.put_route(f"r{number}", {**fields, "source": source, "dest": dest, "create_dest": True})

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.close()

    # -- listening -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.log = Log(self.disk, self.clock, Limits(), self.options, background=False)
        self.engine = self.log.engine
        routers = self.engine.routers
        cargo, event, block = routers._cargo, routers._event, routers._block

        def on_cargo(source: Any, cursor: int, base: int) -> Cargo:
            self.from_log = cursor < base
            return cargo(source, cursor, base)

        def on_event(epoch: int, load: Cargo, takers: Sequence[Any], durability: str, now: int, *rest: Any) -> LogEvent:
            source = self.engine.state.topics[epoch].name
            went = [(router.name, first) for router, _, first in takers]
            numbers = [router.id for router, _, _ in takers]
            assert [self.graph.routes[name].number for name, _ in went] == numbers
            first, last, from_log = load.first, load.last, self.from_log
            for name, _ in went:
                assert self.graph.routes[name].cursor + 1 == first, f"{name} skips, or repeats"
            is_synced = durability == "fsync"
            self.did(lambda graph: graph.routed(source, last, from_log, went, now), is_synced)
            return event(epoch, load, takers, durability, now, *rest)

        def on_block(router: Router, why: Any) -> None:
            now, from_log = self.clock.now(), self.from_log
            self.did(lambda graph: graph.refused(router.name, from_log, now))
            block(router, why)

        for name, listener in {"_cargo": on_cargo, "_event": on_event, "_block": on_block}.items():
            self.patches.enter_context(patch.object(routers, name, listener))
        # Time for forwarding does not pass: what is asked for is done, whatever the machine is busy with.
        self.patches.enter_context(patch.object(routers, "_timer", lambda: 0.0))

    def did(self, event: Event, is_synced: bool = False) -> object:
        """Something took its place in the log."""
        result = event(self.graph)
        self.events.append(event)
        if is_synced:
            self.synced = len(self.events)
        return result

    def act(self, stage: Callable[[], Commit], modelled: Callable[[], Any]) -> Any:
        """One turn: the verb is staged, the model follows, and what the turn's end brings comes behind it."""
        commit, error = attempt(stage)
        if error is not None or commit is None:
            with pytest.raises(Refused) as refusal:
                modelled()
            assert error is not None
            assert error.code == refusal.value.code, error
            return error
        modelled()
        self.engine.flush()
        if not commit.done:
            # It stands behind copies on their way.
            self.engine.routers.work(1)
        assert commit.done
        return commit.value()

    # -- topics ----------------------------------------------------------------------------------------------------

    @rule(name=NAMES, first=FIRST, later=LATER)
    def put(self, name: str, first: dict[str, Any], later: dict[str, Any]) -> None:
        self.put_topic(name, later if name in self.graph.topics else first)

    def put_topic(self, name: str, fields: dict[str, Any]) -> None:
        now = self.clock.now()
        if name in self.graph.topics:
            self.visible(name)

        def modelled() -> None:
            if name in self.graph.topics:
                self.did(lambda graph: graph.configure(name, fields, now), True)
            else:
                self.created(name, fields)

        self.act(lambda: self.engine.put(name, parse_patch(fields)), modelled)

    def created(self, name: str, fields: dict[str, Any]) -> None:
        topic = self.engine.staged_topic(name)
        assert topic is not None
        epoch = topic.epoch
        config = Config(**{field: value for field, value in fields.items() if field != "type"})
        self.did(lambda graph: graph.create(name, epoch, config, fields.get("type") == "queue"), True)

    @rule(name=NAMES, fields=st.none() | FIRST, sure=st.sampled_from([False, False, True]))
    def drop(self, name: str, fields: dict[str, Any] | None, sure: bool) -> None:
        if name not in self.graph.topics or not (sure or fields is not None):
            return
        count: list[Any] = []

        def modelled() -> None:
            for route in self.graph.routes.values():
                if route.source == name:
                    self.check_last(route.name)
            count.append(self.did(lambda graph: graph.drop(name), True))

        result = self.act(lambda: self.engine.drop(name), modelled)
        assert (result.deleted, result.routers_removed) == (True, count[0])
        if fields is not None:
            self.put_topic(name, fields)

    # -- records ---------------------------------------------------------------------------------------------------

    def unlike(self, items: list[Item]) -> list[Item]:
        """Records whose data nobody else has."""
        made = []
        for item in items:
            self.serial += 1
            made.append(item if item.hole is not None else Item(b'"%d%s"' % (self.serial, item.data), *_rest(item)))
        return made

    def source(self, pick: int) -> str:
        """A topic that routers read, if there is one."""
        names = sorted({route.source for route in self.graph.routes.values()}) or list(self.graph.topics) or ["a"]
        return names[pick % len(names)]

    def dest(self, pick: int) -> str | None:
        names = sorted({route.dest for route in self.graph.routes.values()}) or list(self.graph.topics)
        return names[pick % len(names)] if names else None

    @rule(name=NAMES, items=ITEMS, delay=DELAYS)
    def write(self, name: str, items: list[Item], delay: int) -> None:
        self.clock.advance(delay)
        self.write_to(name, items)

    @rule(pick=PICKS, items=ITEMS, times=st.integers(1, 6), steps=st.integers(0, 6))
    def write_often(self, pick: int, items: list[Item], times: int, steps: int) -> None:
        for _ in range(times):
            self.write_to(self.source(pick), items)
        self.work(steps)

    @rule(pick=PICKS, items=ITEMS, steps=st.integers(0, 6), ending=st.sampled_from(["kill", *MODES]))
    def write_and_die(self, pick: int, items: list[Item], steps: int, ending: str) -> None:
        """A crash with copies on their way."""
        for _ in range(2):
            self.write_to(self.source(pick), items)
            self.work(steps)
        if ending == "kill":
            self.kill(0)
        else:
            self.power_cut(next(mode for mode in MODES if mode == ending), pick, 0)

    @rule(pick=PICKS, cap=st.integers(1, 3))
    def close_dest(self, pick: int, cap: int) -> None:
        """A dest that refuses what is too much."""
        name = self.dest(pick)
        if name is not None:
            self.put_topic(name, {"cap_records": cap, "discard": "reject"})

    @rule(pick=PICKS, wide=st.booleans())
    def make_room(self, pick: int, wide: bool) -> None:
        name = self.dest(pick)
        if name is not None and wide:
            self.put_topic(name, {"cap_records": 0, "cap_bytes": 0})
        elif name is not None:
            self.delete(pick, 1.0, None, in_dest=True)
        self.tick(701)

    def write_to(self, name: str, items: list[Item]) -> None:
        items = self.unlike(items)
        now = self.clock.now()
        write = decode_write(encode_write(written(items)), Limits())
        seqs: list[Any] = []

        def modelled() -> None:
            if name not in self.graph.topics:
                self.created(name, {})
            is_synced = self.graph.topics[name].config.durability == "fsync"
            # Refused writes are no events.
            self.graph.twin().write(name, items, now)
            seqs.append(self.did(lambda graph: graph.write(name, items, now), is_synced))

        result = self.act(lambda: self.engine.write(name, write), modelled)
        if seqs:
            assert list(result.seqs) == seqs[0]

    @rule(pick=PICKS, items=ITEMS, more=ITEMS)
    def transact(self, pick: int, items: list[Item], more: list[Item]) -> None:
        names = list(self.graph.topics)
        if len(names) < 2:
            return
        one, other = names[pick % len(names)], names[(pick + 1) % len(names)]
        self.txns += 1
        txn = f"t{self.txns}"
        writes = {one: self.unlike(items), other: self.unlike(more)}
        for name, each in writes.items():
            self.log.spool(txn, name, "p", 0, written(each))
        now = self.clock.now()

        def both(graph: Graph) -> None:
            for name, each in writes.items():
                graph.write(name, each, now)

        def modelled() -> None:
            both(self.graph.twin())
            self.did(both, True)

        counts = {name: len(each) for name, each in writes.items()}
        self.act(lambda: self.engine.transactions.commit(txn, [Part("p", counts)], "c", self.txns), modelled)

    @rule(pick=PICKS, share=st.none() | st.floats(0, 1.1), match=st.none() | TAGS, in_dest=st.booleans())
    def delete(self, pick: int, share: float | None, match: str | None, in_dest: bool) -> None:
        name = self.dest(pick) if in_dest else self.source(pick)
        if name is None or name not in self.graph.topics or (share is None and match is None):
            return
        self.visible(name)
        topic, now = self.graph.topics[name], self.clock.now()
        before = None if share is None else topic.base + int(share * (topic.head + 1 - topic.base))
        count: list[Any] = []
        selector = parse_selector(match) if match is not None else None
        result = self.act(
            lambda: self.engine.delete(name, before, selector),
            lambda: count.append(self.did(lambda graph: graph.delete(name, before, match, now), True)),
        )
        assert result.deleted == count[0]

    @rule(pick=PICKS, most=st.integers(1, 4))
    def work_off(self, pick: int, most: int) -> None:
        """Jobs of a queue, claimed and acked."""
        queues = [topic.name for topic in self.graph.topics.values() if topic.is_queue]
        if not queues:
            return
        name = queues[pick % len(queues)]
        self.visible(name)
        topic = self.graph.topics[name]
        topic.settle(self.clock.now())
        wanted = topic.live()[:most]
        claim = self.act(lambda: self.engine.jobs.claim(name, "w", most), lambda: None)
        assert [msgspec.json.decode(job)["$seq"] for job in claim.jobs] == wanted
        if wanted:
            is_synced = topic.config.durability == "fsync"
            self.act(
                lambda: self.engine.jobs.ack(name, Holder(node="w", seqs=wanted)),
                lambda: self.did(lambda graph: graph.topics[name].ack(wanted), is_synced),
            )

    # -- routers ---------------------------------------------------------------------------------------------------

    @rule(name=ROUTERS, ends=ENDS, fields=ROUTES)
    def route(self, name: str, ends: dict[str, str], fields: dict[str, Any]) -> None:
        self.put_route(name, {**ends, **fields})

    @rule(name=ROUTERS, fields=ROUTES)
    def change(self, name: str, fields: dict[str, Any]) -> None:
        if name in self.graph.routes:
            self.put_route(name, fields)

    def put_route(self, name: str, fields: dict[str, Any]) -> None:
        now = self.clock.now()
        known = self.graph.routes.get(name)
        source = fields.get("source", known.source if known is not None else None)
        if source in self.graph.topics:
            self.visible(source)

        def modelled() -> None:
            route = self.graph.check_route(name, fields)
            if route.dest not in self.graph.topics:
                self.created(route.dest, {})
            number = self.engine.state.routes.by_name[name].id
            assert (number == route.number) == bool(route.number)
            self.did(lambda graph: graph.put_route(route, number, now), True)

        before = set(self.graph.routes)
        result = self.act(lambda: self.engine.routers.put(name, msgspec.convert(fields, RouterPatch)), modelled)
        if isinstance(result, RouterCycle):
            self.check_cycle(name, fields, result.detail["cycle"])
        elif not isinstance(result, TopicsError):
            assert result.created == (name not in before)
            self.check_router(self.engine.routers.find(name))

    def check_cycle(self, name: str, fields: dict[str, Any], cycle: list[str]) -> None:
        known = self.graph.routes.get(name)
        edges = {(each.source, each.dest) for each in self.graph.routes.values() if each.name != name}
        edge = tuple(fields.get(end, getattr(known, end, None)) for end in ("source", "dest"))
        assert cycle[0] == cycle[-1]
        steps = line(*cycle)
        assert edge in steps
        assert set(steps) - {edge} <= edges, f"{cycle} is no way along the routers"
        assert len(set(cycle)) == len(steps)

    @rule(name=ROUTERS, sure=st.booleans())
    def unroute(self, name: str, sure: bool) -> None:
        if not sure and name in self.graph.routes:
            return
        existed = name in self.graph.routes

        def modelled() -> None:
            if existed:
                self.check_last(name)
                self.did(lambda graph: graph.routes.pop(name), True)

        assert self.act(lambda: self.engine.routers.delete(name), modelled) is existed

    def check_last(self, name: str) -> None:
        """A router that ends has copied what its source had acked, if nothing held it up."""
        route = self.graph.routes[name]
        source = self.engine.state.by_name.get(route.source)
        assert source is None or route.is_behind or route.cursor == source.head_seq, f"{route} ends too early"

    # -- time, and what happens in it ------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 4))
    def work(self, steps: int) -> None:
        """A little of the forwarding."""
        for _ in range(steps):
            self.engine.routers.work(0)

    @rule(delay=st.sampled_from([0, 20, 100, 701]))
    def tick(self, delay: int) -> None:
        self.clock.advance(delay)
        if delay >= BACKGROUND_SYNC_MS:
            self.synced = len(self.events)
        self.engine.tick()

    @rule(pick=PICKS)
    def read_dest(self, pick: int) -> None:
        name = self.dest(pick)
        if name is not None:
            self.read(name)

    def read(self, name: str) -> None:
        """A reader of one topic sees what its sources had acked, through every router that is not held up."""
        if name not in self.graph.topics:
            return
        self.visible(name)
        self.compare_topic(self.graph.topics[name])
        seen, line = {name}, [name]
        while line:
            at = line.pop()
            for route in self.graph.routes.values():
                source = self.graph.topics.get(route.source)
                if route.dest != at or source is None:
                    continue
                assert route.is_behind or route.cursor == source.head, f"{route} has not brought all to {name}"
                if route.source not in seen:
                    seen.add(route.source)
                    line.append(route.source)

    def visible(self, name: str) -> None:
        commit = self.engine.catch_up(name)
        assert commit is None or commit.done, "a read waits, and nothing is on its way"

    @rule()
    def look(self) -> None:
        for name in self.graph.topics:
            self.read(name)
        for name in self.graph.topics:
            self.visible(name)
        self.compare()

    @rule()
    def settle(self) -> None:
        """Time passes until nothing more happens: then every router is at the head, or has good reason not to be."""
        # A chain of full dests frees itself a topic at a time.
        for _ in range(8):
            self.clock.advance(LAST_BACKOFF_MS)
            self.tick(0)
        self.look()
        for route in self.graph.routes.values():
            source = self.graph.topics.get(route.source)
            router = self.engine.routers.find(route.name)
            head = source.head if source is not None else 0
            view = self.engine.routers.view(router)
            if source is None or route.cursor == head:
                assert (view.state, view.last_error, view.lag) == ("running", None, 0), view
            else:
                assert view.state == "blocked", f"{route} does not go on: {view}"
                assert view.last_error is not None
                assert route.dest in view.last_error
                self.graph.twin().refused(
                    route.name, router.cursor < _base(self.engine, route.source), self.clock.now()
                )

    # -- restarts --------------------------------------------------------------------------------------------------

    @rule()
    def checkpoint(self) -> None:
        self.engine.checkpoint()
        self.synced = len(self.events)

    @rule(delay=DELAYS)
    def restart(self, delay: int) -> None:
        self.log.close()
        self.clock.advance(delay)
        self.recover("close")

    @rule(delay=DELAYS)
    def kill(self, delay: int) -> None:
        self.disk = self.disk.kill()
        self.clock.advance(delay)
        self.recover("kill")

    @rule(mode=st.sampled_from(MODES), seed=st.integers(0, 1000), delay=DELAYS)
    def power_cut(self, mode: Mode, seed: int, delay: int) -> None:
        self.disk = self.disk.power_cut(Random(seed), mode)
        self.clock.advance(delay)
        self.recover("power")

    def recover(self, how: str) -> None:
        self.open()
        acked = self.graph
        oldest = self.synced if how == "power" else len(self.events)
        found = self.base
        for event in self.events[:oldest]:
            event(found)
        candidates = [found.twin()]
        for event in self.events[oldest:]:
            event(found)
            candidates.append(found.twin())
        failures: list[str] = []
        for graph in reversed(candidates):
            try:
                for name, topic in graph.topics.items():
                    self.recovered(topic, acked.topics[name].head, how)
                self.compare(graph)
            except AssertionError as failure:
                failures.append(str(failure))
                continue
            break
        else:
            raise AssertionError(f"{how}: it is none of what it may be: {failures}")
        for route in graph.routes.values():
            if self.engine.routers.view(self.engine.routers.find(route.name)).state == "catching_up":
                source = graph.topics[route.source]
                assert route.is_behind or source.head in source.lost_seqs, f"{route}: nothing new is lost in its source"
                route.is_behind = True
        self.graph, self.base = graph, graph.twin()
        self.events.clear()
        self.synced = 0

    def recovered(self, topic: Node, acked: int, how: str) -> None:
        """What a topic is after a restart."""
        real = self.engine.state.by_name.get(topic.name)
        assert real is not None, f"{topic.name} is gone"
        head, durability = real.head_seq, topic.config.durability
        assert head >= acked or durability == "fsync", f"{topic.name}: {acked} was given, and {head + 1} would be again"
        if how == "close" or durability == "fsync":
            assert head == topic.head, f"{topic.name}: the head is {head}, was {topic.head}"
        assert head <= acked + 4 * RESERVE
        if durability == "ephemeral":
            topic.lose_all(head)
        elif how == "power" or (how == "kill" and durability == "memory"):
            topic.crash(head)

    # -- comparing -------------------------------------------------------------------------------------------------

    def compare(self, graph: Graph | None = None) -> None:
        graph = graph or self.graph
        assert sorted(self.engine.state.by_name) == sorted(graph.topics)
        for topic in graph.topics.values():
            self.compare_topic(topic)
        assert [router.name for router in self.engine.routers.named()] == sorted(graph.routes)
        for router in self.engine.routers.named():
            self.check_router(router, graph)

    def compare_topic(self, topic: Node) -> None:
        name = topic.name
        topic.settle(self.clock.now())
        state, view = self.engine.get(name), View(topic)
        got = (state.epoch, state.head_seq, state.earliest_seq, state.evict_floor, state.count, state.bytes)
        expected = (topic.epoch, view.head, view.earliest, view.evict_floor, view.count, view.bytes)
        assert got == expected, f"{name}: epoch, head, earliest, floor, count, bytes: {got}, expected {expected}"
        holes = joined(self.engine.topic(name).holes)
        assert holes == joined(view.holes), f"{name}: the holes are {holes}, expected {view.holes}"
        records: list[dict[str, Any]] = []
        told: set[int] = set()
        cursor = topic.base - 1
        while cursor < view.head:
            answer = self.engine.diff(name, make_query(Limits(), cursor, include_tags=True))
            records += shown(answer)
            if answer.tombstone is not None:
                told.update(range(answer.tombstone.gap_from, answer.tombstone.gap_to + 1))
            assert answer.next_from_seq > cursor
            cursor = answer.next_from_seq
        wanted = [topic.records[seq].shown(True, True) for seq in view.live]
        assert records == wanted, f"{name}: {records}, expected {wanted}"
        assert told == view.told_of(topic.base - 1)

    def check_router(self, router: Router, graph: Graph | None = None) -> None:
        graph = graph or self.graph
        route = graph.routes[router.name]
        view = self.engine.routers.view(router)
        got = (router.id, view.forwarded_total, view.cursor)
        expected = (route.number, route.forwarded, route.cursor)
        assert got == expected, f"{route.name}: id, forwarded, cursor: {got}, expected {expected}"
        source = graph.topics.get(route.source)
        assert view.lag == (source.head - route.cursor if source is not None else 0)
        config = view.config.to_json()
        for field in ("source", "dest", "start", "preserve_node", "preserve_tag", "create_dest", "allow_cycle"):
            assert config[field] == getattr(route, field), f"{route.name}: {field} is {config[field]}"
        wanted = parse_selector(route.filter).to_json() if route.filter is not None else None
        assert config["filter"] == wanted
        if view.state == "running" and route.cursor == (source.head if source is not None else 0):
            assert view.last_error is None


def joined(holes: Sequence[Any]) -> list[Hole]:
    """Neighbours with the same reason as one."""
    found: list[Hole] = []
    for hole in holes:
        before = found[-1] if found else None
        if before is not None and (before.last + 1, before.reason) == (hole.first, hole.reason):
            found[-1] = Hole(before.first, hole.last, hole.reason)
        else:
            found.append(Hole(hole.first, hole.last, hole.reason))
    return found


def attempt(stage: Callable[[], Commit]) -> tuple[Commit | None, TopicsError | None]:
    try:
        return stage(), None
    except TopicsError as error:
        return None, error


def _rest(item: Item) -> tuple[bytes | None, str | None, str | None]:
    return item.meta, item.tag, item.node


def _base(engine: Engine, name: str) -> int:
    """The cursor behind which a source has everything at hand that it was ever given."""
    source = engine.state.by_name[name]
    return first_of(source.outgoing[0]) - 1 if source.outgoing else source.head_seq


# Every example has many crashes in it.
RouterMachine.TestCase.settings = settings(max_examples=settings().max_examples // 2)
# Passing takes a minute; the rest is for Hypothesis to shrink what it finds.
TestRouterMachine = pytest.mark.timeout(900)(RouterMachine.TestCase)
