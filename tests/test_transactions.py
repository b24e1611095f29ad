"""Transactions: spooled aside, invisible, then published over all topics at once, exactly once (section 3)."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from tests.helpers import Ending, Machine, datas, gap, live, snapshot, told, write
from tests.simdisk import MODES
from topics.core.errors import (
    BatchTooLarge,
    IdempotencyConflict,
    InvalidRequest,
    PayloadTooLarge,
    RecordTooLarge,
    Throttled,
    TopicFull,
    TopicNotFound,
    TxnIncomplete,
    TxnNotFound,
)
from topics.core.limits import Limits
from topics.core.records import decode_write
from topics.engine import bulk, transactions
from topics.engine.transactions import Part, TxnResult
from topics.log import Log

ENDINGS: tuple[Ending, ...] = ("close", "kill", "power")


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


def spool(log: Log, txn: str, topic: str, part: str, chunk: int, *values: object, **fields: Any) -> int:
    return log.spool(txn, topic, part, chunk, [{"data": value} for value in values], **fields).count


def part(name: str, **records: int) -> dict[str, Any]:
    return {"part": name, "records": records}


def commit_one(log: Log, txn: str, client_seq: int, value: object = 0) -> TxnResult:
    """A transaction of one record in `t`, by client `c`."""
    spool(log, txn, "t", "p", 0, value)
    return log.commit(txn, [part("p", t=1)], "c", client_seq)


# Spooling


def test_spooled_records_are_invisible_and_have_no_seqs(log: Log) -> None:
    log.put("t")
    assert spool(log, "x", "t", "p", 0, 1, 2) == 2
    assert (log.get("t").head_seq, log.get("t").count) == (0, 0)
    assert write(log, "t", "first") == [1]


def test_spooling_creates_no_topic(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1)
    assert log.topics().topics == []


def test_a_repeated_chunk_is_answered_and_not_added(log: Log) -> None:
    first = log.spool("x", "t", "p", 0, [{"data": 1}, {"data": 2}])
    again = log.spool("x", "t", "p", 0, [{"data": "other"}])
    assert (first.repeated, again.repeated) == (False, True)
    assert first.count == again.count == 2
    log.commit("x", [part("p", t=2)])
    assert datas(log.diff("t")) == [1, 2]


def test_chunks_of_other_parts_and_topics_are_others(log: Log) -> None:
    for topic, name, chunk in (("t", "p", 0), ("t", "p", 1), ("t", "q", 0), ("u", "p", 0)):
        spool(log, "x", topic, name, chunk, [topic, name, chunk])
    assert log.txn("x").parts == {"p": {"t": 2, "u": 1}, "q": {"t": 1}}


def test_a_transaction_tells_its_state(machine: Machine) -> None:
    spool(machine.log, "x", "t", "p", 0, 1, 2)
    machine.clock.advance(50)
    state = machine.log.txn("x")
    assert (state.txn, state.parts, state.idle_ms) == ("x", {"p": {"t": 2}}, 50)
    assert state.bytes > 0


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ([], InvalidRequest),
        ([{"tag": "x"}], InvalidRequest),
        ([{"data": 1, "meta": {"$k": "v"}}], InvalidRequest),
        ([{"data": "x" * (1 << 20)}], RecordTooLarge),
        ([{"data": 1}] * 10_001, BatchTooLarge),
    ],
)
def test_a_chunk_is_checked_when_it_is_spooled(log: Log, records: list[dict[str, Any]], error: type[Exception]) -> None:
    with pytest.raises(error):
        log.spool("x", "t", "p", 0, records)
    with pytest.raises(TxnNotFound):
        log.txn("x")


def test_a_chunk_names_no_producer(log: Log) -> None:
    with pytest.raises(InvalidRequest, match="client_id"):
        log.spool("x", "t", "p", 0, [{"data": 1, "client_seq": 1}], client_id="c")


def test_create_false_refuses_to_spool_for_an_absent_topic(log: Log) -> None:
    with pytest.raises(TopicNotFound, match="'t'"):
        spool(log, "x", "t", "p", 0, 1, create=False)


def test_a_wrong_config_is_refused_when_it_is_spooled(log: Log) -> None:
    with pytest.raises(InvalidRequest, match="ttl_ms"):
        spool(log, "x", "t", "p", 0, 1, config={"ttl_ms": -1})


@pytest.mark.parametrize("value", ["", "x" * 257, 5, None])
def test_the_ids_of_transactions_and_parts_are_short_strings(log: Log, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^txn .*256"):
        spool(log, value, "t", "p", 0, 1)
    with pytest.raises(InvalidRequest, match=r"^part .*256"):
        spool(log, "x", "t", value, 0, 1)


@pytest.mark.parametrize("chunk", [-1, 2**53, 1.5, True, "0", None])
def test_a_chunk_has_a_whole_number(log: Log, chunk: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^chunk "):
        spool(log, "x", "t", "p", chunk, 1)


def test_the_size_of_a_transaction_is_bounded() -> None:
    log = Machine(Limits(max_txn_bytes=1000)).log
    spool(log, "x", "t", "p", 0, "small")
    with pytest.raises(PayloadTooLarge, match="TOPICS_MAX_TXN_BYTES is 1000"):
        spool(log, "x", "t", "p", 1, "x" * 1000)
    log.commit("x", [part("p", t=1)])
    assert datas(log.diff("t")) == ["small"]


def test_the_node_of_a_chunk_counts_for_each_of_its_records() -> None:
    log = Machine(Limits(max_txn_bytes=1000)).log
    spool(log, "x", "t", "p", 0, *range(10))
    with pytest.raises(PayloadTooLarge):
        spool(log, "y", "t", "p", 0, *range(10), node="n" * 100)


def test_a_commit_that_no_frame_holds_is_refused_and_changes_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MAX_PAYLOAD", 1 << 20)
    write(log, "t", 1)
    for chunk in range(2):
        spool(log, "x", "t", "p", chunk, "x" * 600_000)
    before = snapshot(log)
    with pytest.raises(PayloadTooLarge, match="bytes of a commit"):
        log.commit("x", [part("p", t=2)])
    assert snapshot(log) == before
    assert log.txn("x").parts == {"p": {"t": 2}}
    assert write(log, "t", 2) == [2]


def test_the_number_of_open_transactions_is_bounded() -> None:
    log = Machine(Limits(max_txns=1)).log
    spool(log, "x", "t", "p", 0, 1)
    with pytest.raises(Throttled, match="TOPICS_MAX_TXNS is 1"):
        spool(log, "y", "t", "p", 0, 1)
    log.abort("x")
    assert spool(log, "y", "t", "p", 0, 1) == 1


# Committing


def test_a_commit_publishes_over_all_topics(log: Log) -> None:
    write(log, "t", "before")
    spool(log, "x", "t", "p", 0, "a", "b")
    spool(log, "x", "u", "p", 0, "c")
    result = log.commit("x", [part("p", t=2, u=1)])
    assert (result.txn, result.deduped) == ("x", False)
    assert {name: appended.seqs for name, appended in result.topics.items()} == {"t": [2, 3], "u": [1]}
    assert (datas(log.diff("t")), datas(log.diff("u"))) == (["before", "a", "b"], ["c"])


def test_parts_are_published_in_the_listed_order(log: Log) -> None:
    for name in ("1", "2", "3"):
        spool(log, "x", "t", name, 0, name)
    log.commit("x", [part("3", t=1), part("1", t=1), part("2", t=1)])
    assert datas(log.diff("t")) == ["3", "1", "2"]


def test_the_chunks_of_a_part_are_published_by_number(log: Log) -> None:
    for chunk in (10, 2, 0):
        spool(log, "x", "t", "p", chunk, chunk)
    log.commit("x", [part("p", t=3)])
    assert datas(log.diff("t")) == [0, 2, 10]


def test_parts_that_are_not_named_are_dropped(log: Log) -> None:
    spool(log, "x", "t", "p", 0, "kept")
    spool(log, "x", "t", "failed", 0, "dropped")
    log.commit("x", [part("p", t=1)])
    assert datas(log.diff("t")) == ["kept"]


def test_a_commit_ends_its_transaction(log: Log) -> None:
    commit_one(log, "x", 1)
    with pytest.raises(TxnNotFound, match="'x'"):
        log.txn("x")


@pytest.mark.parametrize("client", [(), ("c", 1)])
def test_a_commit_of_no_parts_is_valid(log: Log, client: tuple[Any, ...]) -> None:
    log.put("t")
    log.checkpoint()
    spool(log, "x", "t", "p", 0, 1)
    assert log.commit("x", [], *client).topics == {}
    assert log.get("t").head_seq == 0
    with pytest.raises(TxnNotFound):
        log.txn("x")


def test_a_commit_of_no_parts_needs_no_spool(log: Log) -> None:
    assert log.commit("never spooled", [], "c", 1).deduped is False
    assert log.commit("another", [], "c", 1).deduped is True


def test_a_commit_creates_the_topics_it_needs(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1, config={"seq_base": 5, "ttl_ms": 100})
    log.commit("x", [part("p", t=1)])
    state = log.get("t")
    assert (state.head_seq, state.config["ttl_ms"]) == (5, 100)


def test_records_keep_all_that_they_carry(log: Log) -> None:
    raw = msgspec.Raw(b'{ "a" : 1e400 }')
    log.spool("x", "t", "p", 0, [{"data": raw, "tag": "g", "meta": {"k": "v"}}, {"data": 2, "node": "own"}], node="n")
    log.commit("x", [part("p", t=2)])
    assert log.diff("t", include_tags=True).records_json == (
        b'[{"$seq":1,"$ts":1000000,"$node":"n","$tag":"g","data":{ "a" : 1e400 },"meta":{"k":"v"}},'
        b'{"$seq":2,"$ts":1000000,"$node":"own","data":2}]'
    )


def test_holes_can_be_committed(log: Log) -> None:
    log.spool("x", "t", "p", 0, [{"data": 1}, {"hole": 3, "reason": "source_trim"}, {"data": 2}])
    result = log.commit("x", [part("p", t=3)])
    assert result.topics["t"].seqs == [1, 2, 5]
    assert told(log, "t") == [1, (2, 4, "source_trim"), 5]


def test_plain_records_are_rendered_like_others(log: Log) -> None:
    log.put("t", seq_base=8)
    values = ["100%", "%d%b", "a\0b", "ü😀", "", None]
    spool(log, "x", "t", "p", 0, *values)
    spool(log, "x", "t", "p", 1, *values, node='n"%d')
    result = log.commit("x", [part("p", t=12)])
    assert result.topics["t"].seqs == list(range(8, 20))
    log.put("u", seq_base=8)
    log.append("u", [{"data": value} for value in values])
    log.append("u", [{"data": value} for value in values], node='n"%d')
    assert log.diff("t").records_json == log.diff("u").records_json


def test_a_large_chunk_is_rendered_like_small_writes(log: Log) -> None:
    for topic in ("t", "u"):
        log.put(topic, seq_base=990)
    values = [f"{number}%" for number in range(500)]
    spool(log, "x", "t", "p", 0, *values)
    log.commit("x", [part("p", t=500)])
    for value in values:
        write(log, "u", value)
    assert log.diff("t", limit=500).records_json == log.diff("u", limit=500).records_json


def test_chunks_of_every_kind_keep_their_order(machine: Machine) -> None:
    log = machine.log
    spool(log, "x", "t", "p", 2, "third", "fourth")
    log.spool("x", "t", "p", 1, [{"hole": 2, "reason": "source_trim"}, {"data": "second", "tag": "g"}])
    spool(log, "x", "t", "p", 0, "first")
    result = log.commit("x", [part("p", t=5)])
    assert (result.topics["t"].seqs, result.topics["t"].count) == ([1, 2, 4, 5, 6], 4)
    for ending in ENDINGS:
        assert told(log, "t") == [1, (2, 3, "source_trim"), 4, 5, 6]
        assert datas(log.diff("t", 3)) == ["second", "third", "fourth"]
        log = machine.restart(ending)


def test_many_chunks_survive_as_one(machine: Machine) -> None:
    for chunk in range(40):
        spool(machine.log, "x", "t", "p", chunk, *["x" * 100] * 100)
    result = machine.log.commit("x", [part("p", t=4000)], "c", 1)
    assert (result.topics["t"].first_seq, result.topics["t"].last_seq) == (1, 4000)
    assert result.topics["t"].starts is None
    for ending in ENDINGS:
        assert live(machine.restart(ending), "t") == list(range(1, 4001))


def test_ts_is_the_time_of_the_commit(machine: Machine) -> None:
    spool(machine.log, "x", "t", "p", 0, 1)
    machine.clock.advance(500)
    machine.log.commit("x", [part("p", t=1)])
    assert machine.log.diff("t").records[0]["$ts"] == 1_000_500


def test_a_commit_obeys_the_caps(log: Log) -> None:
    log.put("t", cap_records=2)
    spool(log, "x", "t", "p", 0, 1, 2, 3)
    log.commit("x", [part("p", t=3)])
    assert gap(log.diff("t")) == (1, 1, "cap")


def test_parts_may_be_structs(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1)
    assert log.commit("x", [Part("p", {"t": 1})]).topics["t"].seqs == [1]


def test_a_commit_is_all_or_nothing_while_it_is_on_its_way(log: Log) -> None:
    log.put("t")
    spool(log, "x", "t", "p", 0, 1)
    spool(log, "x", "u", "p", 0, 2)
    commit = log.engine.transactions.commit("x", [Part("p", {"t": 1, "u": 1})])
    assert log.get("t").head_seq == 0
    assert [state.topic for state in log.topics().topics] == ["t"]
    log.engine.flush()
    assert commit.done
    assert (live(log, "t"), live(log, "u")) == ([1], [1])


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_write_behind_a_commit_on_its_way_waits_for_it(log: Log, durability: str) -> None:
    for topic in ("t", "u"):
        log.put(topic, durability=durability)
        write(log, topic, "before")
    spool(log, "x", "t", "p", 0, "txn")
    spool(log, "x", "u", "p", 0, "txn")
    commit = log.engine.transactions.commit("x", [Part("p", {"t": 1, "u": 1})])
    behind = log.engine.write("u", decode_write(b'{"records":[{"data":"behind"}]}', Limits()))
    assert (commit.done, behind.done) == (False, False)
    assert datas(log.diff("u")) == ["before"]
    log.engine.flush()
    assert (commit.done, behind.done) == (True, True)
    assert datas(log.diff("u")) == ["before", "txn", "behind"]
    assert datas(log.diff("t")) == ["before", "txn"]


def test_commits_that_cross_are_published_in_the_order_of_the_log(log: Log) -> None:
    log.put("t")
    log.put("u")
    for txn, first, second in (("x", "t", "u"), ("y", "u", "t"), ("z", "t", "u")):
        spool(log, txn, first, "p", 0, txn)
        spool(log, txn, second, "p", 0, txn)
    commits = [log.engine.transactions.commit(txn, [Part("p", {"t": 1, "u": 1})]) for txn in "xyz"]
    log.engine.flush()
    assert [commit.value().topics["u"].seqs for commit in commits] == [[1], [2], [3]]
    assert datas(log.diff("t")) == datas(log.diff("u")) == ["x", "y", "z"]


# Durability


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_commit_is_durable_when_it_is_answered(machine: Machine, durability: str, ending: Ending) -> None:
    machine.log.put("t", durability=durability)
    spool(machine.log, "x", "t", "p", 0, 1, 2)
    spool(machine.log, "x", "u", "p", 0, 3)
    machine.log.commit("x", [part("p", t=2, u=1)])
    log = machine.restart(ending)
    assert (datas(log.diff("t")), datas(log.diff("u"))) == ([1, 2], [3])


def test_a_cut_in_the_commit_keeps_all_or_nothing() -> None:
    outcomes: set[int] = set()
    for seed, mode in enumerate([*MODES] * 8):
        machine = Machine()
        log = machine.log
        for topic in ("t", "u", "v"):
            log.put(topic)
            spool(log, "x", topic, "p", 0, *["x" * 3000] * 5)
        log.engine.transactions.commit("x", [Part("p", {"t": 5, "u": 5, "v": 5})])
        log.engine.committer.wal.write()
        machine.disk = machine.disk.power_cut(Random(seed), mode)
        log = machine.open()
        counts = {log.get(topic).count for topic in ("t", "u", "v")}
        assert len(counts) == 1
        outcomes |= counts
    assert outcomes == {0, 5}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_transaction_that_was_not_committed_is_gone_after_a_restart(machine: Machine, ending: Ending) -> None:
    spool(machine.log, "x", "t", "p", 0, 1)
    log = machine.restart(ending)
    with pytest.raises(TxnNotFound):
        log.txn("x")
    with pytest.raises(TxnNotFound):
        log.commit("x", [part("p", t=1)])
    assert log.topics().topics == []
    assert not [name for name in machine.disk.names() if name.startswith("spool/")]


# Incomplete


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([part("p", t=3)], "'p' has 2 records for 't', the commit names 3"),
        ([part("p", t=1)], "'p' has 2 records for 't', the commit names 1"),
        ([part("p", t=2, u=1)], "'p' has 0 records for 'u', the commit names 1"),
        ([part("p")], "'p' has 2 records for 't', the commit names 0"),
        ([part("p", t=2), part("missing", t=1)], "'missing' has 0 records for 't', the commit names 1"),
        ([part("p", t=-1)], "'p' has 2 records for 't', the commit names -1"),
    ],
)
def test_a_part_that_is_missing_or_short_refuses_the_commit(log: Log, parts: list[dict[str, Any]], named: str) -> None:
    log.put("t")
    spool(log, "x", "t", "p", 0, 1, 2)
    with pytest.raises(TxnIncomplete, match=named) as refused:
        log.commit("x", parts, "c", 1)
    assert refused.value.code == "txn_incomplete"
    assert log.get("t").head_seq == 0
    assert log.commit("x", [part("p", t=2)], "c", 1).deduped is False


def test_a_part_can_be_completed_after_a_refusal(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1)
    with pytest.raises(TxnIncomplete):
        log.commit("x", [part("p", t=2)])
    spool(log, "x", "t", "p", 1, 2)
    log.commit("x", [part("p", t=2)])
    assert datas(log.diff("t")) == [1, 2]


def test_a_part_is_named_once(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1)
    with pytest.raises(InvalidRequest, match="'p' is named twice"):
        log.commit("x", [part("p", t=1), part("p", t=1)])


def test_a_commit_of_an_unknown_transaction_is_not_found(log: Log) -> None:
    with pytest.raises(TxnNotFound, match="'x'") as refused:
        log.commit("x", [part("p", t=1)])
    assert refused.value.code == "txn_not_found"


# A topic that refuses


def two_topics(log: Log) -> list[dict[str, Any]]:
    spool(log, "x", "good", "p", 0, 1, 2)
    spool(log, "x", "t", "p", 0, 1, 2)
    return [part("p", good=2, t=2)]


def test_a_full_topic_fails_the_whole_commit_and_is_named(log: Log) -> None:
    log.put("good")
    log.put("t", cap_records=3, discard="reject")
    write(log, "t", 1, 2)
    parts = two_topics(log)
    with pytest.raises(TopicFull, match="'t'") as refused:
        log.commit("x", parts, "c", 1)
    assert refused.value.detail["topic"] == "t"
    assert (log.get("good").head_seq, log.get("t").head_seq) == (0, 2)
    log.delete("t", before_seq=2)
    assert log.commit("x", parts, "c", 1).topics["t"].seqs == [3, 4]


def test_a_commit_that_can_never_fit_is_named(log: Log) -> None:
    log.put("t", cap_records=1, discard="reject")
    parts = two_topics(log)
    with pytest.raises(BatchTooLarge, match="'t'"):
        log.commit("x", parts)
    assert log.txn("x").parts == {"p": {"good": 2, "t": 2}}


@pytest.mark.parametrize("again", [False, True])
def test_a_topic_that_is_gone_fails_the_whole_commit_and_is_named(log: Log, again: bool) -> None:
    log.put("t")
    parts = two_topics(log)
    log.drop("t")
    if again:
        log.put("t")
    with pytest.raises(TopicNotFound, match="'t'") as refused:
        log.commit("x", parts)
    assert refused.value.detail["topic"] == "t"
    assert log.txn("x").parts == {"p": {"good": 2, "t": 2}}
    with pytest.raises(TopicNotFound):
        log.get("good")


def test_a_topic_without_seqs_left_fails_the_whole_commit(log: Log) -> None:
    log.put("t", seq_base=2**53 - 1)
    parts = two_topics(log)
    before = snapshot(log)
    with pytest.raises(TopicFull, match="'t'"):
        log.commit("x", parts)
    assert snapshot(log) == before


def test_a_topic_made_meanwhile_takes_the_records(log: Log) -> None:
    parts = two_topics(log)
    log.put("t", seq_base=10)
    assert log.commit("x", parts).topics["t"].seqs == [10, 11]


# Dedupe


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("node", [None, "n"])
def test_large_parts_are_the_same_with_and_without_arrow(
    monkeypatch: pytest.MonkeyPatch, node: str | None, ending: Ending
) -> None:
    """Over a number of digits that grows in the middle of a chunk, and more chunks than one thread takes."""

    def bodies() -> bytes:
        machine = Machine(Limits(max_limit=100_000))
        for chunk in range(12):
            spool(machine.log, "x", "t", "p", chunk, *["ü" * ((chunk * n) % 90) for n in range(1200)], node=node)
        done = machine.log.commit("x", [part("p", t=14_400)])
        assert (done.topics["t"].first_seq, done.topics["t"].last_seq) == (1, 14_400)
        before = machine.log.diff("t", limit=100_000).parts
        after = machine.restart(ending).diff("t", limit=100_000).parts
        assert b",".join(before) == b",".join(after)
        assert machine.log.get("t").bytes == sum(2 + 2 * ((chunk * n) % 90) for chunk in range(12) for n in range(1200))
        return b",".join(after)

    with_arrow = bodies()
    monkeypatch.setattr(bulk, "_has_arrow", lambda: False)
    assert bodies() == with_arrow


def test_what_follows_a_large_part_is_apart_from_it_in_every_topic(machine: Machine) -> None:
    """Many small records: too many for one way of rendering, too few bytes for a chunk of their own."""
    log = machine.log
    log.put("t")
    for name in ("a", "b"):
        log.route(name, source="t", dest=name)
    spool(log, "x", "t", "p", 0, *range(1500))
    log.commit("x", [part("p", t=1500)])
    write(log, "t", "t")
    write(log, "a", "a")
    write(log, "b", "b")
    for _ in range(2):
        for name in ("t", "a", "b"):
            found = [*datas(log.diff(name, limit=1000)), *datas(log.diff(name, from_seq=1000, limit=1000))]
            assert [each for each in found if isinstance(each, int)] == [*range(1500)]
            assert {each for each in found if isinstance(each, str)} == {"t", name}
        log = machine.restart("kill")


def test_the_same_pair_answers_the_first_result(log: Log) -> None:
    first = commit_one(log, "x", 1, "a")
    again = commit_one(log, "y", 1, "b")
    assert (first.deduped, again.deduped) == (False, True)
    assert again.topics == first.topics
    assert datas(log.diff("t")) == ["a"]


def test_a_repeat_drops_its_spool(machine: Machine) -> None:
    commit_one(machine.log, "x", 1)
    commit_one(machine.log, "y", 1)
    with pytest.raises(TxnNotFound):
        machine.log.txn("y")
    assert not [name for name in machine.disk.names() if name.startswith("spool/")]


def test_a_repeat_needs_no_spool(log: Log) -> None:
    first = commit_one(log, "x", 1)
    again = log.commit("x", [part("p", t=1)], "c", 1)
    assert (again.deduped, again.topics) == (True, first.topics)


def test_a_commit_without_a_client_may_be_repeated(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1)
    first = log.commit("x", [part("p", t=1)])
    again = log.commit("x", [part("p", t=1)])
    assert (again.deduped, again.topics) == (True, first.topics)
    assert datas(log.diff("t")) == [1]


def test_an_aborted_transaction_cannot_be_committed(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1)
    log.abort("x")
    with pytest.raises(TxnNotFound):
        log.commit("x", [part("p", t=1)])


def test_a_repeat_in_flight_waits_and_drops_its_spool(log: Log) -> None:
    for txn in ("x", "y"):
        spool(log, txn, "t", "p", 0, txn)
    first = log.engine.transactions.commit("x", [Part("p", {"t": 1})], "c", 1)
    again = log.engine.transactions.commit("y", [Part("p", {"t": 1})], "c", 1)
    log.engine.flush()
    assert (first.value().deduped, again.value().deduped) == (False, True)
    assert again.value().txn == "y"
    assert datas(log.diff("t")) == ["x"]
    with pytest.raises(TxnNotFound):
        log.txn("y")


def test_a_higher_client_seq_is_a_new_commit(log: Log) -> None:
    commit_one(log, "x", 1)
    assert commit_one(log, "y", 5).topics["t"].seqs == [2]


def test_a_lower_client_seq_is_a_conflict(log: Log) -> None:
    commit_one(log, "x", 5)
    with pytest.raises(IdempotencyConflict, match="'c'") as conflict:
        commit_one(log, "y", 4)
    assert conflict.value.detail["last_client_seq"] == 5
    assert live(log, "t") == [1]


def test_clients_count_on_their_own(log: Log) -> None:
    commit_one(log, "x", 5)
    spool(log, "y", "t", "p", 0, 1)
    assert log.commit("y", [part("p", t=1)], "other", 1).deduped is False


def test_the_pair_counts_over_all_topics(log: Log) -> None:
    commit_one(log, "x", 1)
    spool(log, "y", "elsewhere", "p", 0, 1)
    assert log.commit("y", [part("p", elsewhere=1)], "c", 1).deduped is True
    assert [state.topic for state in log.topics().topics] == ["t"]


def test_a_transactions_client_is_not_a_topics_producer(log: Log) -> None:
    commit_one(log, "x", 5)
    assert log.append("t", [{"data": 1, "client_seq": 1}], client_id="c").seqs == [2]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_pair_is_remembered_over_a_restart(machine: Machine, ending: Ending, checkpoint: bool) -> None:
    first = commit_one(machine.log, "x", 3)
    if checkpoint:
        machine.log.checkpoint()
    log = machine.restart(ending)
    again = commit_one(log, "y", 3)
    assert (again.deduped, again.topics) == (True, first.topics)
    with pytest.raises(IdempotencyConflict):
        commit_one(log, "z", 2)


def test_the_pair_is_remembered_when_its_topic_is_gone(log: Log) -> None:
    commit_one(log, "x", 1)
    log.drop("t")
    assert commit_one(log, "y", 1).deduped is True
    assert log.topics().topics == []


def test_a_refused_commit_does_not_use_its_pair_up(log: Log) -> None:
    log.put("t", cap_records=1, discard="reject")
    write(log, "t", 0)
    with pytest.raises(TopicFull):
        commit_one(log, "x", 1)
    log.delete("t", before_seq=2)
    assert log.commit("x", [part("p", t=1)], "c", 1).deduped is False


@pytest.mark.parametrize("client", [("c", None), (None, 1)])
def test_client_id_and_client_seq_go_together(log: Log, client: tuple[Any, Any]) -> None:
    spool(log, "x", "t", "p", 0, 1)
    with pytest.raises(InvalidRequest, match="client_id and client_seq"):
        log.commit("x", [part("p", t=1)], *client)


@pytest.mark.parametrize(
    ("client_id", "client_seq", "field"),
    [
        ("", 1, "client_id"),
        ("c" * 257, 1, "client_id"),
        (b"c", 1, "client_id"),
        (5, 1, "client_id"),
        ("\ud800", 1, "client_id"),
        ("c", -1, "client_seq"),
        ("c", 2**63, "client_seq"),
        ("c", 1.5, "client_seq"),
        ("c", True, "client_seq"),
        ("c", "1", "client_seq"),
    ],
)
def test_a_wrong_client_is_refused_and_the_directory_opens_again(
    machine: Machine, client_id: Any, client_seq: Any, field: str
) -> None:
    spool(machine.log, "x", "t", "p", 0, 1)
    with pytest.raises(InvalidRequest, match=field):
        machine.log.commit("x", [part("p", t=1)], client_id, client_seq)
    assert write(machine.log, "t", "next") == [1]
    assert datas(machine.restart().diff("t")) == ["next"]


# Ending


def test_an_abort_drops_everything(machine: Machine) -> None:
    spool(machine.log, "x", "t", "p", 0, 1)
    machine.log.abort("x")
    with pytest.raises(TxnNotFound):
        machine.log.txn("x")
    with pytest.raises(TxnNotFound):
        machine.log.commit("x", [part("p", t=1)])
    assert machine.log.topics().topics == []
    assert not [name for name in machine.disk.names() if name.startswith("spool/")]


def test_an_unknown_transaction_cannot_be_aborted(log: Log) -> None:
    with pytest.raises(TxnNotFound, match="'x'"):
        log.abort("x")


def test_an_idle_transaction_is_dropped(machine: Machine) -> None:
    spool(machine.log, "x", "t", "p", 0, 1)
    machine.clock.advance(900_000)
    machine.log.engine.tick()
    assert machine.log.txn("x").idle_ms == 900_000
    machine.clock.advance(1)
    machine.log.engine.tick()
    with pytest.raises(TxnNotFound):
        machine.log.txn("x")


def test_a_spool_keeps_a_transaction_alive(machine: Machine) -> None:
    spool(machine.log, "x", "t", "p", 0, 1)
    machine.clock.advance(900_000)
    spool(machine.log, "x", "t", "p", 1, 1)
    machine.clock.advance(900_000)
    machine.log.engine.tick()
    assert machine.log.txn("x").parts == {"p": {"t": 2}}


@pytest.mark.parametrize("ending", ["commit", "abort", "timeout"])
def test_a_spool_into_an_ended_transaction_is_not_found(machine: Machine, ending: str) -> None:
    log = machine.log
    spool(log, "x", "t", "p", 0, 1)
    if ending == "commit":
        log.commit("x", [part("p", t=1)])
    elif ending == "abort":
        log.abort("x")
    else:
        machine.clock.advance(900_001)
        log.engine.tick()
    with pytest.raises(TxnNotFound, match="'x'"):
        spool(log, "x", "t", "p", 1, 2)


def test_a_commit_on_its_way_takes_no_more_chunks(log: Log) -> None:
    spool(log, "x", "t", "p", 0, 1)
    log.engine.transactions.commit("x", [Part("p", {"t": 1})])
    with pytest.raises(TxnNotFound):
        spool(log, "x", "t", "p", 1, 2)
    with pytest.raises(TxnNotFound):
        log.abort("x")
    log.engine.flush()
    assert live(log, "t") == [1]
