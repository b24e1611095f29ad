"""The verbs of routers through the embedded API, and what section 7 promises of copies, losses, graphs and faults."""

from __future__ import annotations

import errno
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from tests.clocks import ManualClock
from tests.helpers import KEEPING, Ending, Machine, told, write
from tests.simdisk import SimDisk
from topics.core.errors import (
    InvalidRequest,
    ReadOnly,
    RouterCycle,
    RouterNotFound,
    Throttled,
    TopicNotFound,
)
from topics.core.limits import Limits
from topics.core.tombstone import Tombstone
from topics.engine.transactions import Part
from topics.log import Log


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


def got(log: Log, topic: str) -> list[Any]:
    """What a reader gets: the data of records, and lost ranges with their reason."""
    return [
        (item.gap_from, item.gap_to, item.reason) if isinstance(item, Tombstone) else item["data"]
        for item in log.read(topic)
    ]


def forward(log: Log) -> None:
    """Everything that can be forwarded is."""
    for _ in range(1000):
        if not log.engine.routers.work(1):
            return
    raise AssertionError("forwarding never ends")


def retry(machine: Machine) -> None:
    machine.clock.advance(2000)
    machine.log.engine.tick()
    forward(machine.log)


# -- PUT -------------------------------------------------------------------------------------------------------------


def test_a_new_router_says_everything_about_itself(log: Log) -> None:
    made = log.route("a>b", source="a", dest="b")
    assert made.created
    assert made.view.to_json() == {
        "router": "a>b",
        "source": "a",
        "dest": "b",
        "start": "head",
        "preserve_node": True,
        "preserve_tag": True,
        "create_dest": True,
        "filter": None,
        "allow_cycle": False,
        "guarantee": "exactly_once",
        "forwarded_total": 0,
        "cursor": 0,
        "lag": 0,
        "state": "running",
        "last_error": None,
    }
    assert log.router("a>b").to_json() == made.view.to_json()
    assert [view.router for view in log.routers()] == ["a>b"]


def test_a_router_makes_its_dest_and_never_its_source(log: Log) -> None:
    log.route("r", source="a", dest="b")
    assert [state.topic for state in log.topics().topics] == ["b"]


def test_create_dest_false_needs_a_dest(log: Log) -> None:
    with pytest.raises(TopicNotFound, match="'b'"):
        log.route("r", source="a", dest="b", create_dest=False)
    assert log.routers() == []
    log.put("b")
    assert log.route("r", source="a", dest="b", create_dest=False).created


def test_source_and_dest_must_differ(log: Log) -> None:
    with pytest.raises(InvalidRequest, match="source and dest"):
        log.route("r", source="a", dest="a", allow_cycle=True)
    log.route("r", source="a", dest="b")
    with pytest.raises(InvalidRequest, match="source and dest"):
        log.route("r", dest="a")
    assert log.router("r").config.dest == "b"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dest": "b"}, "source"),
        ({"source": "a"}, "dest"),
        ({"source": "a", "dest": 5}, "dest"),
        ({"source": "", "dest": "b"}, "source"),
        ({"source": "a", "dest": "a>b"}, "dest"),
        ({"source": "a", "dest": "x" * 256}, "255"),
        ({"source": "a", "dest": "b", "start": "tail"}, "start"),
        ({"source": "a", "dest": "b", "start": 5}, "start"),
        ({"source": "a", "dest": "b", "filter": ["tag", "Like", "x"]}, "filter"),
        ({"source": "a", "dest": "b", "filter": ["tag", "Glob", "x"]}, "filter"),
        ({"source": "a", "dest": "b", "filter": 5}, "filter"),
        ({"source": "a", "dest": "b", "preserve_node": "yes"}, "preserve_node"),
        ({"source": "a", "dest": "b", "preserve_tag": 1}, "preserve_tag"),
        ({"source": "a", "dest": "b", "create_dest": "no"}, "create_dest"),
        ({"source": "a", "dest": "b", "allow_cycle": "no"}, "allow_cycle"),
        ({"source": "a", "dest": "b", "guarantee": "at_most_once"}, "guarantee"),
        ({"source": {"url": "http://x:1", "topic": "t"}, "dest": "b"}, "source"),
        ({"source": "a", "dest": {"url": "http://x:1", "topic": "t"}}, "dest"),
    ],
)
def test_bad_input_names_what_is_bad(log: Log, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        log.route("r", **fields)
    assert log.routers() == []
    assert log.topics().topics == []


@pytest.mark.parametrize("name", ["", ">a", "a b", "a/b", "é", "x" * 256, ".a"])
def test_bad_router_names_are_refused_everywhere(log: Log, name: str) -> None:
    for verb in (lambda: log.route(name, source="a", dest="b"), lambda: log.router(name), lambda: log.unroute(name)):
        with pytest.raises(InvalidRequest, match="name"):
            verb()


@pytest.mark.parametrize("name", ["a>b", "a>b>c", "9", "x" * 255, "a.b:c_d-e"])
def test_router_names_may_show_the_way(log: Log, name: str) -> None:
    log.route(name, source="a", dest="b")
    assert log.router(name).router == name


def test_unknown_fields_are_ignored_and_at_least_once_is_accepted(log: Log) -> None:
    view = log.route("r", source="a", dest="b", colour="red", guarantee="at_least_once").view
    assert view.config.guarantee == "at_least_once"


def test_an_update_changes_what_was_sent_and_keeps_the_rest(machine: Machine) -> None:
    log = machine.log
    log.route("r", source="a", dest="b", filter="x", preserve_tag=False)
    log.append("a", [{"data": 1, "tag": "x"}, {"data": 2, "tag": "y"}])
    assert got(log, "b") == [1]
    result = log.route("r", filter=["tag", "Glob", "y*"])
    assert not result.created
    assert (result.view.cursor, result.view.forwarded_total) == (2, 1)
    assert result.view.config.preserve_tag is False
    log.append("a", [{"data": 3, "tag": "x"}, {"data": 4, "tag": "yy"}])
    assert got(log, "b") == [1, 4]
    log.route("r", filter=None)
    write(log, "a", 5)
    assert got(log, "b") == [1, 4, 5]
    for ending in KEEPING:
        log = machine.restart(ending)
        assert log.router("r").config.filter is None
        assert (log.router("r").cursor, log.router("r").forwarded_total) == (5, 3)


def test_what_was_acked_before_an_update_goes_by_the_old_fields(log: Log) -> None:
    log.route("r", source="a", dest="b")
    log.append("a", [{"data": 1, "tag": "x"}])
    log.route("r", filter="y")
    log.append("a", [{"data": 2, "tag": "x"}])
    assert got(log, "b") == [1]


def test_the_same_put_again_changes_nothing(log: Log) -> None:
    log.route("r", source="a", dest="b", start="earliest")
    write(log, "a", 1)
    assert got(log, "b") == [1]
    assert not log.route("r", source="a", dest="b", start="earliest").created
    assert got(log, "b") == [1]
    assert log.router("r").forwarded_total == 1


@pytest.mark.parametrize("fields", [{"source": "c"}, {"dest": "c"}])
def test_another_source_or_dest_begins_anew(log: Log, fields: dict[str, str]) -> None:
    log.route("r", source="a", dest="b")
    write(log, "a", 1)
    write(log, "c", 10)
    result = log.route("r", **fields)
    assert not result.created
    assert result.view.forwarded_total == 0
    assert got(log, "b") == [1]
    write(log, "a", 2)
    write(log, "c", 11)
    assert got(log, "b") == ([1, 11] if "source" in fields else [1])
    assert got(log, "c") == ([10, 11] if "source" in fields else [10, 11, 2])
    assert log.router("r").forwarded_total == 1


def test_start_head_begins_with_what_comes_next(log: Log) -> None:
    write(log, "a", 1, 2)
    log.route("r", source="a", dest="b")
    write(log, "a", 3)
    assert got(log, "b") == [3]
    assert (log.router("r").cursor, log.router("r").forwarded_total) == (3, 1)


def test_start_earliest_begins_with_what_is_retained_without_telling_of_older_losses(machine: Machine) -> None:
    log = machine.log
    log.put("a", cap_records=2)
    write(log, "a", 1, 2, 3, 4)
    view = log.route("r", source="a", dest="b", start="earliest").view
    assert (view.state, view.cursor, view.lag) == ("catching_up", 2, 2)
    forward(log)
    assert got(log, "b") == [3, 4]
    assert log.router("r").state == "running"


def test_a_router_that_catches_up_passes_on_every_loss_it_meets(machine: Machine) -> None:
    log = machine.log
    log.put("a", cap_records=3)
    write(log, "a", 1, 2)
    log.route("r", source="a", dest="b", start="earliest")
    log.append("a", [{"data": 3}, {"hole": 2, "reason": "source_trim"}, {"data": 6}, {"data": 7}])
    forward(log)
    assert got(log, "b") == [(1, 2, "source_trim"), 3, (4, 5, "source_trim"), 6, 7]


@pytest.mark.parametrize("start", ["head", "earliest"])
def test_a_source_that_comes_later_is_read_from_its_first_record(machine: Machine, start: str) -> None:
    log = machine.log
    log.route("r", source="a", dest="b", start=start)
    log.put("a", seq_base=5)
    write(log, "a", 1, 2)
    log = machine.restart("kill")
    assert got(log, "b") == [1, 2]
    assert (log.router("r").cursor, log.router("r").lag) == (6, 0)


# -- cycles ----------------------------------------------------------------------------------------------------------


def test_a_cycle_is_refused_with_its_path(log: Log) -> None:
    for way in ("ab", "bc", "cd", "bx"):
        log.route(way, source=way[0], dest=way[1])
    with pytest.raises(RouterCycle, match="allow_cycle") as refused:
        log.route("da", source="d", dest="a")
    assert refused.value.status == 409
    cycle = refused.value.detail["cycle"]
    assert cycle[0] == cycle[-1]
    turns = [cycle[at:-1] + cycle[:at] for at in range(len(cycle))]
    assert ["a", "b", "c", "d"] in turns
    assert [view.router for view in log.routers()] == ["ab", "bc", "bx", "cd"]


def test_a_cycle_of_two_is_refused_also_as_a_change(log: Log) -> None:
    log.route("ab", source="a", dest="b")
    log.route("bc", source="b", dest="c")
    with pytest.raises(RouterCycle) as refused:
        log.route("bc", dest="a")
    assert sorted(set(refused.value.detail["cycle"])) == ["a", "b"]
    log.route("bc", dest="a", allow_cycle=True)
    with pytest.raises(RouterCycle):
        log.route("bc", allow_cycle=False)
    with pytest.raises(RouterCycle):
        log.route("ab", preserve_tag=False, allow_cycle=False)
    assert log.router("bc").config.allow_cycle


def test_turning_a_router_round_is_no_cycle(log: Log) -> None:
    log.route("r", source="a", dest="b")
    assert not log.route("r", source="b", dest="a").created


def test_in_a_ring_everybody_gets_everything_once(machine: Machine) -> None:
    log = machine.log
    for way in ("ab", "bc", "cd", "da"):
        log.put(way[0])
        log.route(way, source=way[0], dest=way[1], allow_cycle=True)
    for number, topic in enumerate("abcd"):
        write(log, topic, number, number + 10, node=f"n-{topic}")
    forward(log)
    for ending in ("close", "kill", "power"):
        for topic in "abcd":
            assert sorted(got(log, topic)) == [0, 1, 2, 3, 10, 11, 12, 13]
            seen = {record["$node"] for record in log.diff(topic, node=f"n-{topic}").records}
            assert seen == {f"n-{other}" for other in "abcd" if other != topic}
        log.engine.tick()
        machine.clock.advance(200)
        log.engine.tick()
        log.checkpoint()
        log = machine.restart(ending)
        forward(log)


def test_in_a_mesh_a_record_never_comes_back(log: Log) -> None:
    for source in "abc":
        log.put(source)
    for source in "abc":
        for dest in "abc":
            if source != dest:
                log.route(source + dest, source=source, dest=dest, allow_cycle=True)
    write(log, "a", 1)
    forward(log)
    assert got(log, "a") == [1]
    # One way straight, one through the third.
    assert got(log, "b") == got(log, "c") == [1, 1]


def test_a_loss_in_a_ring_goes_round_once(machine: Machine) -> None:
    log = machine.log
    for way in ("ab", "bc", "ca"):
        log.put(way[0])
        log.route(way, source=way[0], dest=way[1], allow_cycle=True)
    log.append("a", [{"hole": 3, "reason": "source_trim"}, {"data": 1}])
    forward(log)
    for topic in "abc":
        assert got(log, topic) == [(1, 3, "source_trim"), 1]
    machine.restart("kill")
    forward(machine.log)
    assert [machine.log.get(topic).head_seq for topic in "abc"] == [4, 4, 4]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk"])
def test_what_a_crash_takes_from_a_ring_goes_round_once(machine: Machine, durability: str) -> None:
    log = machine.log
    for way in ("ab", "ba"):
        log.put(way[0], durability=durability)
        log.route(way, source=way[0], dest=way[1], allow_cycle=True)
    write(log, "a", 1)
    forward(log)
    log = machine.restart("power")
    forward(log)
    heads = [log.get(topic).head_seq for topic in "ab"]
    write(log, "a", 2)
    forward(log)
    assert [log.get(topic).head_seq for topic in "ab"] == [head + 1 for head in heads]
    assert got(log, "a")[-1] == got(log, "b")[-1] == 2


# -- GET, list, DELETE -----------------------------------------------------------------------------------------------


def test_a_router_that_is_not_there_is_404(log: Log) -> None:
    with pytest.raises(RouterNotFound, match="'r'"):
        log.router("r")


def test_a_delete_is_idempotent(log: Log) -> None:
    log.route("r", source="a", dest="b")
    write(log, "a", 1)
    assert log.unroute("r") is True
    assert log.unroute("r") is False
    write(log, "a", 2)
    assert got(log, "b") == [1]
    with pytest.raises(RouterNotFound):
        log.router("r")
    assert log.route("r", source="a", dest="b").created
    write(log, "a", 3)
    assert got(log, "b") == [1, 3]


def test_lists_are_sorted(log: Log) -> None:
    for name in ("c", "a", "b"):
        log.route(name, source="s", dest=f"d{name}")
    assert [view.router for view in log.routers()] == ["a", "b", "c"]


def test_lag_counts_what_is_not_copied(log: Log) -> None:
    log.route("r", source="a", dest="b")
    write(log, "a", 1, 2)
    assert [(view.cursor, view.lag) for view in log.routers()] == [(0, 2)]
    # Asking for one router brings what its source had acked.
    assert (log.router("r").cursor, log.router("r").lag) == (2, 0)


# -- limits ----------------------------------------------------------------------------------------------------------


def test_too_many_routers_are_429_and_a_put_of_one_that_exists_never_is() -> None:
    machine = Machine(Limits(max_routers=2))
    log = machine.log
    log.route("r1", source="a", dest="b")
    log.route("r2", source="a", dest="c")
    with pytest.raises(Throttled, match="TOPICS_MAX_ROUTERS") as refused:
        log.route("r3", source="a", dest="d")
    assert refused.value.detail["limit"] == "TOPICS_MAX_ROUTERS"
    assert refused.value.detail["max"] == 2
    assert [state.topic for state in log.topics().topics] == ["b", "c"], "the dest of a refused router"
    log.route("r1", filter="x")
    log.route("r2", dest="d")
    log.unroute("r1")
    log.route("r3", source="a", dest="d")


def test_a_dest_that_would_be_a_topic_too_many_is_429() -> None:
    log = Machine(Limits(max_topics=1)).log
    log.put("a")
    with pytest.raises(Throttled, match="TOPICS_MAX_TOPICS"):
        log.route("r", source="a", dest="b")
    assert log.routers() == []
    write(log, "a", 1)


def test_a_full_server_holds_routers_up_and_lets_them_go_on() -> None:
    machine = Machine(Limits(max_total_bytes=10))
    log = machine.log
    log.route("r", source="a", dest="b")
    write(log, "a", "12345678")
    forward(log)
    view = log.router("r")
    assert (view.state, view.lag) == ("running", 0) or view.state == "blocked"
    with pytest.raises(Throttled, match="TOPICS_MAX_TOTAL_BYTES"):
        write(log, "a", "12345678")
    log.delete("b", before_seq=100)
    log.delete("a", before_seq=100)
    write(log, "a", "x")
    retry(machine)
    assert got(log, "b")[-1] == "x"


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_record_with_a_seq_and_a_time_of_its_own(machine: Machine) -> None:
    log = machine.log
    body = b'{"records":[{"data":{"b": 1.0, "a":1e400,\\u0061":2}}]}'.replace(b'\\u0061"', b'"\\u0061"')
    log.put("b", seq_base=100)
    log.route("r", source="a", dest="b")
    log.append_json("a", body)
    log.append_json("a", b'{"records":[{"data":[ ],"meta":{ "k" : "v" },"tag":"x","node":"n"}]}')
    machine.clock.advance(50)
    first, second = log.diff("b", include_tags=True).records
    source = log.diff("a", include_tags=True)
    assert bytes(log.diff("b").records_json).count(b'{"b": 1.0, "a":1e400,"\\u0061":2}') == 1
    assert bytes(log.diff("b").records_json).count(b'{ "k" : "v" }') == 1
    assert (first["$seq"], second["$seq"]) == (100, 101)
    for copy, record in zip((first, second), source.records, strict=True):
        assert int(str(copy["$ts"])) >= int(str(record["$ts"]))
    assert (second["$tag"], second["$node"], second["meta"]) == ("x", "n", {"k": "v"})


@pytest.mark.parametrize("node", [True, False])
@pytest.mark.parametrize("tag", [True, False])
def test_preserve_says_what_a_copy_carries(log: Log, node: bool, tag: bool) -> None:
    log.route("r", source="a", dest="b", preserve_node=node, preserve_tag=tag)
    log.append("a", [{"data": 1, "tag": "x", "node": "n", "meta": {"k": "v"}}, {"data": 2}])
    first, second = log.diff("b", include_tags=True).records
    assert first.get("$node") == ("n" if node else None)
    assert first.get("$tag") == ("x" if tag else None)
    assert first["meta"] == {"k": "v"}
    assert not {"$node", "$tag", "meta"} & set(second)


@pytest.mark.parametrize(
    ("selector", "passed"),
    [
        ("x", [1, 4]),
        (["tag", "Eq", "xy"], [2]),
        (["tag", "Glob", "x*"], [1, 2, 4]),
        (["tag", "Glob", "*"], [1, 2, 3, 4]),
    ],
)
def test_a_filter_lets_through_what_matches(log: Log, selector: Any, passed: list[int]) -> None:
    log.route("r", source="a", dest="b", filter=selector)
    tags = ["x", "xy", "y", "x", None]
    log.append("a", [{"data": n, **({"tag": tag} if tag else {})} for n, tag in enumerate(tags, 1)])
    assert got(log, "b") == passed
    assert (log.router("r").cursor, log.router("r").forwarded_total) == (5, len(passed))


def test_a_filter_stops_no_loss(log: Log) -> None:
    log.route("r", source="a", dest="b", filter="x")
    log.append("a", [{"data": 1}, {"hole": 4, "reason": "source_trim"}, {"data": 2, "tag": "x"}])
    assert got(log, "b") == [(1, 4, "source_trim"), 2]


def test_through_a_diamond_a_dest_gets_a_copy_per_router(log: Log) -> None:
    for way in ("ab", "ac", "bd", "cd"):
        log.route(way, source=way[0], dest=way[1])
    write(log, "a", 1, 2)
    assert sorted(got(log, "d")) == [1, 1, 2, 2]
    log.route("ad", source="a", dest="d")
    log.route("ad2", source="a", dest="d")
    write(log, "a", 3)
    assert got(log, "d").count(3) == 4


def test_a_read_sees_what_was_acked_through_a_long_chain(log: Log) -> None:
    names = [f"t{number}" for number in range(30)]
    for source, dest in pairwise(names):
        log.route(f"{source}>{dest}", source=source, dest=dest)
    write(log, "t0", "x")
    assert log.seek("t29", 0) == 0
    assert log.get("t29").count == 1
    assert got(log, "t29") == ["x"]
    log.delete("t29", before_seq=2)
    write(log, "t0", "y")
    assert log.delete("t29", before_seq=100).deleted == 1


def test_an_up_to_date_router_copies_even_what_is_evicted_or_deleted_at_once(machine: Machine) -> None:
    log = machine.log
    log.put("a", cap_records=1, ttl_ms=100)
    log.route("r", source="a", dest="b")
    write(log, "a", 1, 2, 3)
    log.delete("a", before_seq=100)
    write(log, "a", 4)
    machine.clock.advance(1000)
    log = machine.restart("kill")
    assert got(log, "b") == [1, 2, 3, 4]
    assert told(log, "a") == [(1, 4, "mixed")] or log.get("a").count == 0


@pytest.mark.parametrize("ending", KEEPING)
def test_deletes_are_not_passed_on(machine: Machine, ending: Ending) -> None:
    log = machine.log
    log.route("r", source="a", dest="b")
    write(log, "a", 1, 2)
    assert got(log, "b") == [1, 2]
    log.delete("a", before_seq=2)
    assert got(machine.restart(ending), "b") == [1, 2]


def test_a_dest_keeps_its_own_retention(log: Log) -> None:
    log.put("b", cap_records=2)
    log.route("r", source="a", dest="b")
    write(log, "a", 1, 2, 3, 4)
    assert got(log, "b") == [(1, 2, "cap"), 3, 4]
    assert got(log, "a") == [1, 2, 3, 4]


def test_a_transaction_is_forwarded_from_each_of_its_topics(log: Log) -> None:
    log.put("a")
    log.put("b")
    log.route("ac", source="a", dest="c")
    log.route("bc", source="b", dest="c")
    log.spool("t", "a", "p", 0, [{"data": 1}])
    log.spool("t", "b", "p", 0, [{"data": 2}])
    assert got(log, "c") == []
    log.commit("t", [{"part": "p", "records": {"a": 1, "b": 1}}])
    assert sorted(got(log, "c")) == [1, 2]


def test_a_commit_behind_a_copy_on_its_way_does_not_wait(log: Log) -> None:
    log.put("c")
    log.route("r", source="a", dest="b")
    write(log, "a", 1)
    engine = log.engine
    for _ in range(3):
        engine.routers.work(0)
    for name in ("b", "c"):
        log.spool("t", name, "p", 0, [{"data": 2}])
    commit = engine.transactions.commit("t", [Part("p", {"b": 1, "c": 1})], "c", 1)
    engine.flush()
    assert commit.done
    assert got(log, "b") == [1, 2]


# -- held up ---------------------------------------------------------------------------------------------------------


def test_a_full_dest_blocks_its_router_and_nobody_else(machine: Machine) -> None:
    log = machine.log
    log.put("b", cap_records=2, discard="reject")
    log.route("ab", source="a", dest="b")
    log.route("ac", source="a", dest="c")
    log.append("a", [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(1, 6)])
    assert got(log, "b") == [1, 2]
    assert got(log, "c") == [1, 2, 3, 4, 5]
    view = log.router("ab")
    assert (view.state, view.cursor, view.lag, view.forwarded_total) == ("blocked", 2, 3, 2)
    assert view.last_error is not None
    assert "'b'" in view.last_error
    assert "cap_records is 2" in view.last_error
    log.delete("a", match="odd")
    log.delete("b", before_seq=2)
    retry(machine)
    assert got(log, "b") == [2, 4]
    assert log.router("ab").state in ("running", "blocked")
    retry(machine)
    view = log.router("ab")
    assert (view.state, view.cursor, view.lag, view.last_error) == ("running", 5, 0, None)
    assert view.forwarded_total == 3


def test_what_is_lost_while_a_router_is_blocked_is_a_hole_even_in_a_full_dest(machine: Machine) -> None:
    log = machine.log
    log.put("a", cap_records=2)
    log.put("b", cap_records=1, discard="reject")
    log.route("r", source="a", dest="b", filter="x")
    log.append("a", [{"data": 1, "tag": "x"}, {"data": 2, "tag": "x"}])
    assert got(log, "b") == [1]
    log.append("a", [{"data": n, "tag": "x"} for n in range(3, 7)])
    retry(machine)
    assert got(log, "b") == [1, (2, 4, "source_trim")]
    assert log.router("r").state == "blocked"
    log.put("b", cap_records=0)
    retry(machine)
    assert got(log, "b") == [1, (2, 4, "source_trim"), 5, 6]


@pytest.mark.parametrize("ending", KEEPING)
def test_what_was_deleted_while_a_router_was_blocked_is_skipped_also_after_a_restart(
    machine: Machine, ending: Ending
) -> None:
    log = machine.log
    log.put("b", cap_records=1, discard="reject")
    log.route("r", source="a", dest="b")
    for number, tag in ((1, "x"), (2, "secret"), (3, "x")):
        log.append("a", [{"data": number, "tag": tag}])
    assert got(log, "b") == [1]
    assert log.router("r").state == "blocked"
    log.delete("a", match="secret")
    log = machine.restart(ending)
    log.put("b", cap_records=0)
    retry(machine)
    assert got(log, "b") == [1, 3]


def test_several_routers_share_the_room_of_a_dest(machine: Machine) -> None:
    log = machine.log
    log.put("d", cap_records=3, discard="reject")
    for source in "abc":
        log.put(source)
        log.route(source, source=source, dest="d")
        write(log, source, f"{source}1", f"{source}2")
    assert len(got(log, "d")) == 3
    for _ in range(4):
        log.delete("d", before_seq=log.get("d").head_seq + 1)
        retry(machine)
    assert [log.router(source).lag for source in "abc"] == [0, 0, 0]
    assert log.get("d").head_seq == 6
    assert sum(log.router(source).forwarded_total for source in "abc") == 6


def test_a_router_into_a_queue_brings_jobs_and_one_out_of_it_copies_them(machine: Machine) -> None:
    log = machine.log
    log.put("q", type="queue")
    log.route("aq", source="a", dest="q")
    log.route("qb", source="q", dest="b")
    write(log, "a", 1, 2)
    assert log.get("q").count == 2
    jobs = log.engine.jobs
    claim = jobs.claim("q", "w", 10)
    log.engine.flush()
    assert len(claim.value().jobs) == 2
    assert got(log, "b") == [1, 2]


# -- topics come and go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", KEEPING)
def test_a_topic_takes_its_routers_along(machine: Machine, ending: Ending) -> None:
    log = machine.log
    for way in ("ab", "bc", "cd", "xb", "ax"):
        log.route(way, source=way[0], dest=way[1])
    log.put("a")
    write(log, "a", 1)
    dropped = log.engine.drop("b")
    log.engine.flush()
    assert (dropped.value().deleted, dropped.value().routers_removed) == (True, 3)
    assert [view.router for view in log.routers()] == ["ax", "cd"]
    log.put("b")
    write(log, "b", 2)
    log = machine.restart(ending)
    assert [view.router for view in log.routers()] == ["ax", "cd"]
    assert 2 not in got(log, "c")
    assert got(log, "b") == [2]
    assert got(log, "x") == [1]


def test_a_source_that_goes_leaves_what_it_had_acked(log: Log) -> None:
    log.route("r", source="a", dest="b")
    write(log, "a", 1, 2)
    log.drop("a")
    assert got(log, "b") == [1, 2]
    write(log, "a", 3)
    assert got(log, "b") == [1, 2]
    assert log.routers() == []


@pytest.mark.parametrize("ending", KEEPING)
def test_a_new_topic_with_an_old_name_is_another_one(machine: Machine, ending: Ending) -> None:
    """What has been through the old one may enter the new one."""
    log = machine.log
    log.route("ab", source="a", dest="b")
    write(log, "a", 1)
    assert got(log, "b") == [1]
    log.drop("a")
    log = machine.restart(ending)
    log.route("ba", source="b", dest="a", start="earliest")
    forward(log)
    assert got(log, "a") == [1]


# -- restarts --------------------------------------------------------------------------------------------------------


def test_a_clean_end_with_records_to_forward_leaves_no_hole(machine: Machine) -> None:
    log = machine.log
    log.put("m", durability="memory")
    write(log, "m", 0)
    for way in ("ab", "bc"):
        log.route(way, source=way[0], dest=way[1])
    write(log, "a", 1)
    log = machine.restart("close")
    assert (log.get("m").head_seq, log.get("m").holes) == (1, 0)
    assert [view.lag for view in log.routers()] == [0, 0]
    assert got(log, "c") == [1]


def test_a_kill_takes_nothing_from_what_was_forwarded_into_an_ephemeral_dest(machine: Machine) -> None:
    log = machine.log
    log.put("b", durability="ephemeral")
    log.route("r", source="a", dest="b")
    write(log, "a", 1, 2)
    assert log.router("r").forwarded_total == 2
    log = machine.restart("kill")
    assert (log.router("r").cursor, log.router("r").forwarded_total) == (2, 2)


@pytest.mark.parametrize("steps", range(6))
def test_a_copy_that_is_on_its_way_survives_a_checkpoint(machine: Machine, steps: int) -> None:
    log = machine.log
    log.put("a", cap_records=1)
    log.put("b", cap_records=1)
    for way in ("ab", "bc"):
        log.route(way, source=way[0], dest=way[1])
    write(log, "a", 1, 2)
    for _ in range(steps):
        log.engine.routers.work(0)
    log.checkpoint()
    write(log, "a", 3)
    log = machine.restart("kill")
    forward(log)
    assert got(log, "c") == [1, 2, 3]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_restart_tells_the_dests_what_it_took_from_the_source(durability: str) -> None:
    for ending in ("close", "kill", "power"):
        machine = Machine()
        log = machine.log
        log.put("a", durability=durability)
        log.put("b", durability="fsync")
        log.route("r", source="a", dest="b")
        write(log, "a", 1)
        assert got(log, "b") == [1]
        before = log.get("a").head_seq
        log = machine.restart(ending)
        forward(log)
        lost = log.get("a").head_seq - before
        assert got(log, "b") == [1, *([(2, 1 + lost, "source_trim")] if lost else [])]
        assert (lost > 0) == (
            (durability == "ephemeral" and ending != "close")
            or (durability == "memory" and ending != "close")
            or (durability == "disk" and ending == "power")
        )


# -- the log does not grow with the fan-out --------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
@pytest.mark.parametrize(("writes", "records", "size"), [(50, 1, 200), (20, 20, 100), (5, 200, 20)])
def test_a_hundred_dests_cost_the_log_less_than_twice_one(
    durability: str, writes: int, records: int, size: int
) -> None:
    def cost(dests: int) -> int:
        log = Machine().log
        log.put("a", durability=durability)
        for number in range(dests):
            log.put(f"d{number}", durability=durability)
            log.route(f"r{number}", source="a", dest=f"d{number}")
        before = log.engine.committer.wal.bytes_written
        for _ in range(writes):
            log.append("a", [{"data": "x" * size}] * records)
            forward(log)
        spent = log.engine.committer.wal.bytes_written - before
        for number in (0, dests - 1):
            assert log.get(f"d{number}").count == writes * records
        return spent

    one, hundred = cost(1), cost(100)
    assert hundred < 2 * one, f"{hundred} bytes for 100 dests, {one} for one"


# -- a disk that fails -----------------------------------------------------------------------------------------------


def check_refuses(log: Log) -> None:
    for verb in (
        lambda: log.route("new", source="a", dest="z"),
        lambda: log.route("ab", filter="x"),
        lambda: log.unroute("ab"),
        lambda: log.drop("a"),
        lambda: write(log, "a", 3),
    ):
        with pytest.raises(ReadOnly):
            verb()


FAULTS = [("writev", errno.ENOSPC), ("writev", errno.EIO), ("sync", errno.EIO)]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
@pytest.mark.parametrize(("op", "error"), FAULTS)
def test_a_fault_in_a_fan_out_makes_the_log_read_only_and_leaves_no_half_state(
    durability: str, op: str, error: int
) -> None:
    for after in range(4):
        machine = Machine()
        log = machine.log
        log.put("a", durability="disk")
        for topic in "bcd":
            log.put(topic, durability=durability)
            log.route(f"a{topic}", source="a", dest=topic)
        log.route("de", source="d", dest="e")
        write(log, "a", 1)
        before = [got(log, topic) for topic in "bcde"]
        assert before == [[1]] * 4
        if op == "writev":
            write(log, "a", 2)
        fault = machine.disk.fail(op, "wal/", error, after=after)
        with suppress(ReadOnly):
            if op == "sync":
                write(log, "a", 2)
        # Reads go on: they neither fail nor wait for what cannot come.
        for _ in range(3):
            now = [got(log, topic) for topic in "bcde"]
            for datas in now:
                assert datas in ([1], [1, 2])
            machine.clock.advance(200)
            log.engine.tick()
        assert got(log, "a") in ([1], [1, 2])
        if not fault.hits:
            continue
        assert log.engine.committer.read_only is not None
        check_refuses(log)
        views = {view.router: view for view in log.routers()}
        assert sorted(views) == ["ab", "ac", "ad", "de"]
        for view in views.values():
            assert (view.cursor, view.forwarded_total) in ((1, 1), (2, 2))
            dest = got(log, str(view.config.dest))
            assert len(dest) == view.forwarded_total, f"{view} and {dest}"
        log.close()
        for disk in (machine.disk.copy().power_cut(Random(1), "drop"), machine.disk.kill()):
            again = Log(disk, clock=machine.clock, background=False)
            forward(again)
            source = [data for data in got(again, "a") if isinstance(data, int)]
            for topic in "bcde":
                datas = [data for data in got(again, topic) if isinstance(data, int)]
                if durability == "ephemeral" and topic in "bcd":
                    assert set(datas) <= {2}
                elif durability == "ephemeral":
                    assert datas == sorted(set(datas))
                else:
                    assert datas == source, f"{topic}: {datas}, the source has {source}"


def test_a_read_that_waits_for_a_copy_ends_when_the_log_fails() -> None:
    machine = Machine()
    log = machine.log
    log.put("b", durability="fsync")
    log.route("r", source="a", dest="b")
    write(log, "a", 1)
    machine.disk.fail("sync", "wal/", errno.EIO)
    assert got(log, "b") == []
    assert log.engine.committer.read_only is not None
    assert got(log, "b") == []
    assert log.router("r").lag == 1
    again = Log(machine.disk.kill(), clock=ManualClock(2_000_000), background=False)
    assert got(again, "b") == [1]


def test_a_source_file_that_does_not_answer_holds_up_only_who_needs_it() -> None:
    machine = Machine()
    log = machine.log
    write(log, "a", 1, 2)
    log.checkpoint()
    log = machine.restart("close")
    log.route("new", source="a", dest="b")
    fault = machine.disk.fail("pread", "segments/", errno.EIO)
    log.route("old", source="a", dest="c", start="earliest")
    forward(log)
    if fault.hits:
        assert log.router("old").state == "blocked"
        write(log, "a", 3)
        assert got(log, "b") == [3]
        machine.disk.heal()
        retry(machine)
    assert got(log, "c")[:2] == [1, 2]
    assert log.router("old").state == "running"


def test_a_damaged_source_file_is_a_loss_that_the_dest_is_told_of() -> None:
    disk, clock = SimDisk(), ManualClock()
    log = Log(disk, clock=clock, background=False)
    log.append("a", [{"data": "x" * 100}] * 5)
    log.checkpoint()
    log.close()
    name = next(name for name in disk.names() if name.startswith("segments/"))
    disk.flip_bit(name, disk.names()[name] * 4)
    log = Log(disk, clock=clock, background=False)
    log.route("r", source="a", dest="b", start="earliest")
    forward(log)
    lost = [item for item in got(log, "a") if isinstance(item, tuple)]
    held = [item for item in got(log, "b") if isinstance(item, tuple)]
    assert [item[:2] for item in held] == [item[:2] for item in lost]
    assert log.get("b").head_seq == 5
