"""Section 7 of SPEC.md as a naive program: topics that routers lead out of and into, over the topics of `tests.model`.

When a router forwards is its own choice; what arrives then is not. The model is told of each fan-out (which stretch of
a source, to whom) and works out what every dest gets from its own history of the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from tests.model import Config, Hole, Item, Record, Refused, Topic, matches


@dataclass(frozen=True)
class Loss:
    """So many lost seqs, which have been through these topics."""

    length: int
    through: frozenset[int] = frozenset()


Taken = Loss | Record


class Node(Topic):
    """A topic that remembers what its records and losses have been through, and every hole it ever had."""

    def __init__(self, name: str, epoch: int, config: Config, is_queue: bool = False) -> None:
        super().__init__(name, epoch, config)
        self.is_queue = is_queue
        # Of each seq, the instances of topics that it was in before this one.
        self.through: dict[int, frozenset[int]] = {}
        self.lost_seqs: set[int] = set()

    def twin(self) -> Node:
        other = copy(self)
        for name in ("records", "fates", "through", "lost_seqs", "holes"):
            setattr(other, name, copy(getattr(self, name)))
        return other

    def add_hole(self, hole: Hole) -> None:
        super().add_hole(hole)
        self.lost_seqs.update(range(hole.first, hole.last + 1))

    def lose_all(self, head: int) -> None:
        super().lose_all(head)
        self.through.clear()
        self.lost_seqs.update(range(self.base, head + 1))

    def ack(self, seqs: Sequence[int]) -> None:
        self._take(seqs, "deleted")

    def has_room(self, record: Record) -> bool:
        caps = self.config
        return caps.discard != "reject" or not (
            (caps.cap_records and self.count() + 1 > caps.cap_records)
            or (caps.cap_bytes and self.bytes() + record.size > caps.cap_bytes)
        )


@dataclass
class Route:
    """A router. `is_behind`: it was refused, or began with older records, and has not reached the head since."""

    name: str
    number: int
    source: str
    dest: str
    start: str = "head"
    filter: Any = None
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    allow_cycle: bool = False
    source_epoch: int = 0
    cursor: int = 0
    forwarded: int = 0
    is_behind: bool = False


class Graph:
    """A whole data directory."""

    def __init__(self) -> None:
        self.topics: dict[str, Node] = {}
        self.routes: dict[str, Route] = {}

    def twin(self) -> Graph:
        other = Graph()
        other.topics = {name: topic.twin() for name, topic in self.topics.items()}
        other.routes = {name: replace(route) for name, route in self.routes.items()}
        return other

    # -- topics ----------------------------------------------------------------------------------------------------

    def create(self, name: str, epoch: int, config: Config, is_queue: bool = False) -> None:
        topic = self.topics[name] = Node(name, epoch, config, is_queue)
        for route in self.routes.values():
            if route.source == name:
                # A source that did not exist is read from its first record.
                route.source_epoch, route.cursor = epoch, topic.base - 1

    def drop(self, name: str) -> int:
        del self.topics[name]
        gone = [route.name for route in self.routes.values() if name in (route.source, route.dest)]
        for each in gone:
            del self.routes[each]
        return len(gone)

    def write(self, name: str, items: Sequence[Item], now: int) -> list[int]:
        topic = self.topics[name]
        topic.settle(now)
        topic.check_room(items)
        appended = topic.append(items, None, now)
        for seq in range(appended.first_seq, appended.last_seq + 1):
            topic.through[seq] = frozenset()
        return list(appended.seqs)

    def delete(self, name: str, before_seq: int | None, match: Any, now: int) -> int:
        topic = self.topics[name]
        topic.settle(now)
        return topic.delete(before_seq, match, "erase", now)

    def configure(self, name: str, fields: dict[str, Any], now: int) -> None:
        topic = self.topics[name]
        topic.configure(replace(topic.config, **fields), now)

    # -- routers ---------------------------------------------------------------------------------------------------

    def check_route(self, name: str, fields: dict[str, Any]) -> Route:
        """The router that a PUT makes or changes, not in its place yet."""
        known = self.routes.get(name)
        route = replace(known, **fields) if known is not None else Route(name, 0, **fields)
        if route.source == route.dest:
            raise Refused("invalid_request")
        if not route.allow_cycle and route.source in self.reached(route.dest, name):
            raise Refused("router_cycle")
        is_new = known is None or (known.source, known.dest) != (route.source, route.dest)
        if is_new:
            if not route.create_dest and route.dest not in self.topics:
                raise Refused("topic_not_found")
            route = replace(route, number=0, source_epoch=0, cursor=0, forwarded=0, is_behind=False)
        return route

    def reached(self, start: str, without: str) -> set[str]:
        """Every topic that routers lead to from one, itself included."""
        found = {start}
        while True:
            edges = [each for each in self.routes.values() if each.name != without]
            more = {each.dest for each in edges if each.source in found} - found
            if not more:
                return found
            found |= more

    def put_route(self, route: Route, number: int, now: int) -> None:
        if not route.number:
            source = self.topics.get(route.source)
            if source is not None:
                source.settle(now)
                route = replace(
                    route,
                    source_epoch=source.epoch,
                    cursor=source.head if route.start == "head" else source.earliest() - 1,
                )
                route.is_behind = route.cursor < source.head
        self.routes[route.name] = replace(route, number=number)

    # -- forwarding ------------------------------------------------------------------------------------------------

    def lost_from(self, source: Node, cursor: int) -> int:
        """The end of what a router that is behind finds evicted right behind its cursor."""
        return source.earliest() - 1 if cursor + 1 < source.evict_floor() else cursor

    def take(self, route: Route, last: int, from_log: bool) -> Iterator[tuple[int, Taken]]:
        """Everything that a router takes of its source behind its cursor up to a seq, with where that ends.

        One that is up to date takes every committed record. One that is behind skips what was deleted, and what its
        source has lost is lost for it too, if it reads the log (`from_log`).
        """
        source, dest = self.topics[route.source], self.topics[route.dest]
        at = route.cursor
        if route.is_behind and from_log and (end := self.lost_from(source, at)) > at:
            yield end, Loss(end - at)
            at = end
        for seq in range(at + 1, last + 1):
            through = source.through.get(seq, frozenset())
            if dest.epoch in through:
                continue
            if seq in source.lost_seqs:
                yield seq, Loss(1, through)
                continue
            fate, record = source.fates[seq], source.records[seq]
            if route.is_behind and fate == "deleted":
                continue
            assert not (route.is_behind and from_log) or fate == "live", f"{seq} of {source.name} is {fate}"
            if matches(route.filter, record.tag):
                yield seq, record

    def routed(self, source_name: str, last: int, from_log: bool, takers: Sequence[tuple[str, int]], now: int) -> None:
        """One fan-out: a stretch of a source up to `last`, and for each router the first seq that its dest gave."""
        source = self.topics[source_name]
        source.settle(now)
        for name, first in takers:
            route = self.routes[name]
            assert route.source == source_name
            assert route.source_epoch == source.epoch
            assert route.cursor < last <= source.head
            dest = self.topics[route.dest]
            dest.settle(now)
            taken = list(self.take(route, last, from_log))
            assert not taken or taken[-1][0] <= last, f"{name} stops inside a loss"
            before = dest.head + 1
            items: list[Item] = []
            through: list[frozenset[int]] = []
            for _, one in taken:
                if isinstance(one, Loss):
                    items.append(Item(hole=one.length))
                    through += [one.through | {source.epoch}] * one.length
                else:
                    tag = one.tag if route.preserve_tag else None
                    items.append(Item(one.data, one.meta, tag, one.node if route.preserve_node else None))
                    through.append(source.through[one.seq] | {source.epoch})
                    assert dest.has_room(one), f"{name} overfills {dest.name}"
                    # One by one: whether the next has room depends on it.
                if isinstance(one, Record) and dest.config.discard == "reject":
                    self._arrive(dest, items, through, now)
                    items, through = [], []
            self._arrive(dest, items, through, now)
            assert first == (before if taken else 0), f"{dest.name}: the copies are at {first}, expected {before}"
            route.cursor = last
            route.forwarded += sum(1 for _, one in taken if isinstance(one, Record))
            if last == source.head:
                route.is_behind = False

    def _arrive(self, dest: Node, items: Sequence[Item], through: Sequence[frozenset[int]], now: int) -> None:
        if items:
            dest.through.update(enumerate(through, dest.head + 1))
            dest.append(items, None, now)

    def refused(self, name: str, from_log: bool, now: int) -> None:
        """A router says that its dest is full: that must be true of the very next record."""
        route = self.routes[name]
        source, dest = self.topics[route.source], self.topics[route.dest]
        source.settle(now)
        dest.settle(now)
        following = next((one for _, one in self.take(route, source.head, from_log)), None)
        assert following is not None, f"{name} is blocked, and has nothing to bring"
        assert isinstance(following, Record), f"{name} is blocked in front of a loss, which has room everywhere"
        assert not dest.has_room(following), f"{name} is blocked, and {dest.name} has room for {following}"
        route.is_behind = True
