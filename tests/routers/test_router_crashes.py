"""The power goes, or the process is killed, in every single I/O call while routers forward.

A copy and the cursor that says so are one event: whatever a crash takes of a dest, it takes of the router too. So after
it, and some time, every dest has each record that its sources still have exactly once, in their order, in every class
but `ephemeral`; and there what is gone is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from tests.clocks import ManualClock
from tests.crash import CLASSES, DEEP, ENDS, KILL, OPTIONS, assert_same, dump, left_by, names, shrink_chunks
from tests.simdisk import PowerCut, SimDisk
from topics.core.config import Durability
from topics.core.tombstone import Tombstone
from topics.engine.options import Options
from topics.log import Log


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_chunks(monkeypatch)


@dataclass
class Write:
    """What was written where, and of which class; `acked` when it was answered."""

    topic: str
    datas: list[str]
    durability: str
    acked: bool = False


class Net:
    """Topics, the routers between them, and what was written by hand."""

    def __init__(self, disk: SimDisk, options: Options = OPTIONS) -> None:
        self.disk = disk
        self.clock = ManualClock()
        self.options = options
        self.writes: list[Write] = []
        # Topics and routers that were deleted, or may have been.
        self.ended: set[str] = set()
        self._serial = 0
        self.open()

    def open(self) -> None:
        self.log = Log(self.disk, clock=self.clock, options=self.options, background=False)
        # A tick forwards all that it can, however busy the machine is.
        patch.object(self.log.engine.routers, "_timer", lambda: 0.0).start()

    # -- verbs -----------------------------------------------------------------------------------------------------

    def write(self, topic: str, number: int = 1, tag: str | None = None) -> None:
        datas = []
        for _ in range(number):
            self._serial += 1
            datas.append(f"{topic}{self._serial}" + "." * (40 * (self._serial % 2)))
        write = Write(topic, datas, self.log.engine.topic(topic).config.durability)
        self.writes.append(write)
        self.log.append(topic, [{"data": data, **({"tag": tag} if tag is not None else {})} for data in datas])
        write.acked = True

    def transact(self, *topics: str) -> None:
        self._serial += 1
        writes = [Write(topic, [f"{topic}{self._serial}"], "fsync") for topic in topics]
        txn = f"t{self._serial}"
        for write in writes:
            self.log.spool(txn, write.topic, "p", 0, [{"data": write.datas[0]}])
            if self.log.engine.topic(write.topic).config.durability == "ephemeral":
                write.durability = "ephemeral"
        self.writes += writes
        self.log.commit(txn, [{"part": "p", "records": dict.fromkeys(topics, 1)}], "c", self._serial)
        for write in writes:
            write.acked = True

    def work(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.log.engine.routers.work(0)

    def tick(self, ms: int = 100) -> None:
        self.clock.advance(ms)
        self.log.engine.tick()

    def unroute(self, router: str) -> None:
        self.ended.add(router)
        self.log.unroute(router)

    def drop(self, topic: str) -> None:
        self.ended.add(topic)
        self.log.drop(topic)

    # -- what there is ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Time passes until every router is where it can be."""
        for _ in range(4):
            self.tick(2100)
            while self.log.engine.routers.work(1):
                continue

    def datas(self, topic: str) -> list[str]:
        return [item["data"] for item in self.log.read(topic) if not isinstance(item, Tombstone)]

    def told(self, topic: str) -> list[str]:
        return [item.reason for item in self.log.read(topic) if isinstance(item, Tombstone)]

    def durability(self, topic: str) -> str:
        return self.log.engine.topic(topic).config.durability

    def seen(self) -> dict[str, Any]:
        """Everything that can be seen, routers too."""
        views: dict[str, Any] = dump(self.log)
        views["$routers"] = [(view.router, view.cursor, view.forwarded_total) for view in self.log.routers()]
        return views

    def reborn(self, disk: SimDisk) -> Net:
        other = Net.__new__(Net)
        other.__dict__.update(self.__dict__)
        other.disk = disk
        other.writes = [Write(each.topic, each.datas, each.durability, each.acked) for each in self.writes]
        other.ended = set(self.ended)
        other.open()
        return other


def check(net: Net, killed: bool) -> None:
    """What every life promises, whatever ended it."""
    there = {topic: net.datas(topic) for topic in names(net.log)}
    for write in net.writes:
        if write.topic in net.ended:
            continue
        found = [data for data in there[write.topic] if data in write.datas]
        assert found in ([], write.datas), "a write is there in part, or doubled"
        is_safe = write.durability == "fsync" or (killed and write.durability == "disk")
        assert found or not (write.acked and is_safe), f"{write} is lost"
        assert found or not write.acked or net.told(write.topic), f"{write} is lost, and nobody is told"
    for view in net.log.routers():
        source, dest = str(view.config.source), str(view.config.dest)
        if view.state == "blocked":
            caps = net.log.engine.topic(dest).config
            assert caps.cap_records == len(there[dest]), f"{view}, but there is room"
            continue
        assert (view.state, view.lag, view.last_error) == ("running", 0, None), view
        if (
            source in there
            and not {dest, view.router} & net.ended
            and not {"ephemeral"} & {net.durability(source), net.durability(dest)}
        ):
            missing = Counter(there[source]) - Counter(there[dest])
            assert not missing, f"{view.router} has not brought {missing}"
    for topic, datas in there.items():
        inlets = [str(view.config.source) for view in net.log.routers() if view.config.dest == topic]
        assert not inlets or set(datas) <= {data for write in net.writes for data in write.datas}
        if len(inlets) < 2:
            doubled = [data for data, number in Counter(datas).items() if number > 1]
            assert not doubled, f"{topic} has {doubled} more than once"
        for write in net.writes:
            copies = [data for data in datas if data in write.datas]
            if len(copies) <= len(write.datas):
                assert copies == sorted(copies, key=write.datas.index), f"{topic}: {copies} are not in order"


Act = Callable[[Net], None]
Prepare = Callable[[Net, Durability, Durability], None]
Check = Callable[[Net], None]


@dataclass(frozen=True)
class Scenario:
    name: str
    prepare: Prepare
    act: Act
    check: Check
    options: Options = OPTIONS


def is_ephemeral(net: Net) -> bool:
    return "ephemeral" in {net.durability(topic) for topic in names(net.log)}


def equal(*topics: str) -> Check:
    """These have the same records, each once."""

    def compare(net: Net) -> None:
        if not is_ephemeral(net):
            first, *rest = [net.datas(topic) for topic in topics]
            assert len(set(first)) == len(first)
            for topic, datas in zip(topics[1:], rest, strict=True):
                assert datas == first, topic

    return compare


# -- a fan-out -------------------------------------------------------------------------------------------------------


def fan(net: Net, source: Durability, dest: Durability) -> None:
    net.log.put("a", durability=source)
    for topic in "bcd":
        net.log.put(topic, durability=dest)
        net.log.route(f"a>{topic}", source="a", dest=topic)
    net.write("a", 2)
    net.datas("b")
    net.tick()


def forward(net: Net) -> None:
    net.write("a", 3)
    net.work(2)
    net.write("a")
    net.datas("c")
    net.tick()
    net.transact("a", "b")
    net.work(20)


def b_has_its_own(net: Net) -> None:
    if not is_ephemeral(net):
        own = [data for write in net.writes if write.topic == "b" for data in write.datas]
        assert [data for data in net.datas("b") if data not in own] == net.datas("a")
        equal("a", "c", "d")(net)


# -- a way through several topics ------------------------------------------------------------------------------------


def diamond(net: Net, source: Durability, dest: Durability) -> None:
    net.log.put("a", durability=source)
    for topic, durability in (("b", dest), ("c", source), ("d", dest)):
        net.log.put(topic, durability=durability)
    for way in ("ab", "ac", "bd", "cd"):
        net.log.route(way, source=way[0], dest=way[1])
    net.write("a", 2)


def flow(net: Net) -> None:
    net.write("a", 2)
    net.work(3)
    net.write("b")
    net.datas("d")
    net.write("a")
    net.tick()
    net.work(20)


def d_has_all_twice(net: Net) -> None:
    if not is_ephemeral(net):
        here = Counter(net.datas("d"))
        assert here == Counter(net.datas("b")) + Counter(net.datas("c"))
        for data in net.datas("a"):
            assert here[data] == 2


# -- routers come, change and go -------------------------------------------------------------------------------------


def old_records(net: Net, source: Durability, dest: Durability) -> None:
    net.log.put("a", durability=source)
    net.log.put("d", durability=dest)
    net.write("a", 3)
    net.log.checkpoint()
    net.write("a", 2)


def put(net: Net) -> None:
    net.log.route("all", source="a", dest="b", start="earliest")
    net.work(2)
    net.write("a", 2)
    net.log.route("all", preserve_tag=False)
    net.write("a", 2)
    net.ended.add("young")
    net.log.route("young", source="a", dest="c")
    net.log.route("later", source="new", dest="d")
    net.log.put("new", durability="fsync")
    net.write("new", 2)
    net.datas("d")


def each_has_its_share(net: Net) -> None:
    routers = {view.router for view in net.log.routers()}
    if not is_ephemeral(net) and "all" in routers:
        equal("a", "b")(net)
    if not is_ephemeral(net) and "later" in routers and "new" in names(net.log):
        equal("new", "d")(net)
    assert routers <= {"all", "young", "later"}


def unroute(net: Net) -> None:
    net.write("a", 2)
    net.work(1)
    net.unroute("a>b")
    net.write("a")
    net.work(3)
    net.unroute("a>c")
    net.write("a")
    net.log.route("a>c", source="a", dest="c")
    net.write("a")


def none_comes_after_its_end(net: Net) -> None:
    equal("a", "d")(net)
    routers = {view.router for view in net.log.routers()}
    if not is_ephemeral(net):
        everything = net.datas("a")
        for topic in "bc":
            here = net.datas(topic)
            assert [data for data in everything if data in here] == here
            if topic == "b" and "a>b" not in routers:
                # What was acked before its end it has copied, and nothing that came after it.
                acked = [data for write in net.writes[:2] if write.acked for data in write.datas]
                assert here == [data for data in acked if data in everything]


def drop(net: Net) -> None:
    net.write("a", 2)
    net.work(1)
    net.drop("b")
    net.write("a")
    net.work(1)
    net.drop("a")
    net.log.put("a", durability="fsync")
    net.write("a")


def dropped_is_gone(net: Net) -> None:
    routers = {view.router: view for view in net.log.routers()}
    alive = set(names(net.log))
    for view in routers.values():
        assert {view.config.source, view.config.dest} <= alive
    if not is_ephemeral(net) and "a>c" in routers:
        equal("a", "c", "d")(net)
    elif not is_ephemeral(net):
        assert "a>d" not in routers
        # What the source had acked before it went is in the dests, in the same way.
        first = [data for write in net.writes[:3] if write.durability == "fsync" for data in write.datas]
        assert net.datas("c") == net.datas("d")
        assert [data for data in first if data in net.datas("c")] == first


# -- held up ---------------------------------------------------------------------------------------------------------


def full(net: Net, source: Durability, dest: Durability) -> None:
    net.log.put("a", durability=source)
    net.log.put("b", durability=dest, cap_records=2, discard="reject")
    net.ended.add("b")
    net.log.put("c", durability=dest)
    for way in ("ab", "bc"):
        net.log.route(way, source=way[0], dest=way[1])
    net.write("a", 3)
    net.tick()


def make_room(net: Net) -> None:
    net.write("a")
    net.log.delete("b", before_seq=2)
    net.tick(2100)
    net.log.put("b", cap_records=0)
    net.tick(2100)
    net.write("a")
    net.tick()


def all_came_through(net: Net) -> None:
    net.log.put("b", cap_records=0)
    net.settle()
    equal("a", "c")(net)


# -- in a ring -------------------------------------------------------------------------------------------------------


def ring(net: Net, source: Durability, dest: Durability) -> None:
    for topic, durability in (("a", source), ("b", dest), ("c", source)):
        net.log.put(topic, durability=durability)
    for way in ("ab", "bc", "ca"):
        net.log.route(way, source=way[0], dest=way[1], allow_cycle=True)
    net.write("a")


def go_round(net: Net) -> None:
    net.write("b", 2)
    net.work(2)
    net.write("c")
    net.datas("a")
    net.tick()
    net.write("a")
    net.work(30)


def all_have_all_once(net: Net) -> None:
    if not is_ephemeral(net):
        every = {data for topic in "abc" for data in net.datas(topic)}
        for topic in "abc":
            assert Counter(net.datas(topic)) == Counter(every), topic


# -- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint(net: Net) -> None:
    net.write("a", 2)
    net.work(1)
    net.log.checkpoint()
    net.write("a")
    net.log.checkpoint()
    net.work(2)
    net.write("a")
    net.log.engine.committer.rotate()
    net.datas("d")


def keep_up(net: Net) -> None:
    for _ in range(3):
        net.write("a", 2)
        net.work(1)
        net.tick()


def close(net: Net) -> None:
    net.write("a", 2)
    net.work(1)
    net.log.close()


SMALL = Options(checkpoint_bytes=600, cache_bytes=2048, reclaim_bytes=500, rewrite_below=0.9)
SCENARIOS = [
    Scenario("fan-out", fan, forward, b_has_its_own),
    Scenario("diamond", diamond, flow, d_has_all_twice),
    Scenario("put", old_records, put, each_has_its_share),
    Scenario("unroute", fan, unroute, none_comes_after_its_end),
    Scenario("drop", fan, drop, dropped_is_gone),
    Scenario("held up", full, make_room, all_came_through),
    Scenario("ring", ring, go_round, all_have_all_once),
    Scenario("checkpoints", fan, checkpoint, equal("a", "b", "c", "d")),
    Scenario("checkpoints in steps", fan, keep_up, equal("a", "b", "c", "d"), SMALL),
    Scenario("close", diamond, close, d_has_all_twice),
]
PAIRS: list[tuple[Durability, Durability]] = [
    *((each, each) for each in CLASSES),
    *(("ephemeral", "fsync"), ("fsync", "ephemeral"), ("disk", "fsync"), ("fsync", "memory")),
]


def crashes(scenario: Scenario, classes: tuple[Durability, Durability]) -> Iterator[Net]:
    """Nets in which the scenario was cut short in its first, second, ... call, and one in which it was not."""
    for number in count(1):
        net = Net(SimDisk(Random(number)), scenario.options)
        scenario.prepare(net, *classes)
        net.disk.crash_at = net.disk.calls + number
        try:
            scenario.act(net)
        except PowerCut:
            yield net
            continue
        net.disk.crash_at = None
        yield net
        return


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "_"))
@pytest.mark.parametrize("classes", PAIRS, ids="-".join)
def test_a_crash_in_any_call_loses_and_doubles_no_copy(
    scenario: Scenario, classes: tuple[Durability, Durability]
) -> None:
    ends = ENDS if len(set(classes)) == 1 else ("drop", "torn", KILL)
    for number, crashed in enumerate(crashes(scenario, classes)):
        for end in ends if DEEP else [ends[number % len(ends)]]:
            net = crashed.reborn(left_by(crashed.disk, end, Random(f"{number} {end}")))
            net.settle()
            check(net, killed=end == KILL)
            scenario.check(net)
            if number % 4 and not DEEP:
                continue
            # Life goes on, and what was settled stays so over the next end.
            if "a" in names(net.log):
                net.write("a", 2)
            net.settle()
            check(net, killed=end == KILL)
            scenario.check(net)
            again = net.reborn(net.disk.kill())
            again.settle()
            check(again, killed=end == KILL)
            scenario.check(again)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("classes", PAIRS, ids="-".join)
def test_recovering_twice_is_recovering_once(classes: tuple[Durability, Durability], end: str) -> None:
    for scenario in SCENARIOS[:4]:
        net = Net(SimDisk(Random(1)), scenario.options)
        scenario.prepare(net, *classes)
        scenario.act(net)
        once = net.reborn(left_by(net.disk, end, Random(1)))
        before = [(view.router, view.cursor, view.forwarded_total) for view in once.log.routers()]
        once = once.reborn(once.disk.kill())
        if not {"ephemeral", "memory"} & set(classes):
            assert [(view.router, view.cursor, view.forwarded_total) for view in once.log.routers()] == before
        once.settle()
        seen = once.seen()
        if {"ephemeral", "memory"} & set(classes):
            continue
        once = once.reborn(once.disk.kill())
        assert_same(once.seen(), seen)
