"""Writing: atomic, in order, with times that never go back, within the caps, acked as their class says (section 3)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import KEEPING, Ending, Machine, datas, gap, live, seqs, snapshot, told, write
from topics.core.errors import (
    BatchTooLarge,
    InvalidRequest,
    PayloadTooLarge,
    RecordTooLarge,
    TopicFull,
    TopicNotFound,
)
from topics.core.limits import Limits
from topics.core.records import decode_write
from topics.log import Log


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


def times(log: Log, topic: str) -> list[int]:
    return [int(str(record["$ts"])) for record in log.diff(topic).records]


# Seqs


def test_records_get_contiguous_seqs_in_array_order(log: Log) -> None:
    result = log.append("t", [{"data": "a"}, {"data": "b"}, {"data": "c"}])
    assert (result.first_seq, result.last_seq, result.seqs, result.head_seq, result.count) == (1, 3, [1, 2, 3], 3, 3)
    assert datas(log.diff("t")) == ["a", "b", "c"]


def test_the_next_write_goes_on_behind_the_last(log: Log) -> None:
    write(log, "t", 1, 2)
    assert write(log, "t", 3, 4) == [3, 4]


def test_the_first_seq_is_seq_base(log: Log) -> None:
    log.put("t", seq_base=1000)
    assert write(log, "t", 1, 2) == [1000, 1001]


def test_topics_count_on_their_own(log: Log) -> None:
    write(log, "a", 1, 2)
    assert write(log, "b", 1) == [1]


@pytest.mark.parametrize("ending", KEEPING)
def test_seqs_go_on_after_a_restart(machine: Machine, ending: Ending) -> None:
    write(machine.log, "t", 1, 2, 3)
    log = machine.restart(ending)
    assert write(log, "t", 4) == [4]
    assert datas(log.diff("t")) == [1, 2, 3, 4]


def test_seqs_are_not_reused_when_the_newest_records_are_deleted(machine: Machine) -> None:
    write(machine.log, "t", 1, 2, 3)
    machine.log.delete("t", before_seq=4)
    log = machine.restart()
    assert write(log, "t", 4) == [4]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk"])
def test_no_acked_seq_is_handed_out_again_after_a_power_cut(machine: Machine, durability: str) -> None:
    machine.log.put("t", durability=durability)
    acked = [seq for _ in range(5) for seq in write(machine.log, "t", *range(500))]
    (new,) = write(machine.restart("power"), "t", "x")
    assert new > acked[-1]


def test_a_topic_ends_at_the_last_number_that_json_holds_exactly(log: Log) -> None:
    log.put("t", seq_base=2**53 - 2)
    assert write(log, "t", 1, 2) == [2**53 - 2, 2**53 - 1]
    with pytest.raises(TopicFull, match="9007199254740991"):
        write(log, "t", 3)
    assert live(log, "t") == [2**53 - 2, 2**53 - 1]


def test_a_batch_that_would_run_out_of_seqs_writes_nothing(log: Log) -> None:
    log.put("t", seq_base=2**53 - 2)
    with pytest.raises(TopicFull):
        write(log, "t", 1, 2, 3)
    assert log.get("t").count == 0


# Atomicity


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"data": 1, "meta": {"k": 1}},
        {"data": 1, "meta": {"$k": "v"}},
        {"data": 1, "tag": 5},
        {"data": "x" * (1 << 20)},
        {"hole": 0},
        {"data": 1, "client_seq": 1},
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_record_refuses_the_whole_batch(log: Log, bad: dict[str, Any], place: int) -> None:
    write(log, "t", 0)
    before = snapshot(log)
    records: list[dict[str, Any]] = [{"data": 1}, {"data": 2}]
    records.insert(place, bad)
    with pytest.raises((InvalidRequest, RecordTooLarge), match=rf"records\[{place}\]"):
        log.append("t", records)
    assert snapshot(log) == before


def test_a_refused_write_does_not_create_its_topic(log: Log) -> None:
    with pytest.raises(InvalidRequest):
        log.append("t", [{"tag": "x"}])
    with pytest.raises(InvalidRequest):
        write(log, "t", 1, config={"ttl_ms": -1})
    assert log.topics().topics == []


def test_a_staged_write_is_invisible_until_it_is_written(log: Log) -> None:
    log.put("t")
    commit = log.engine.write("t", decode_write(b'{"records":[{"data":1},{"data":2}]}', Limits()))
    assert log.get("t").head_seq == 0
    log.engine.flush()
    assert commit.value().seqs == [1, 2]
    assert live(log, "t") == [1, 2]


def test_writes_of_one_turn_are_published_in_their_order(log: Log) -> None:
    log.put("t")
    commits = [
        log.engine.write("t", decode_write(b'{"records":[{"data":%d}]}' % number, Limits())) for number in range(4)
    ]
    log.engine.flush()
    assert [commit.value().seqs for commit in commits] == [[1], [2], [3], [4]]
    assert datas(log.diff("t")) == [0, 1, 2, 3]


# What a record carries


def test_tag_node_and_meta_come_back(log: Log) -> None:
    log.append("t", [{"data": 1, "tag": "red", "node": "n1", "meta": {"k": "v"}}])
    assert log.diff("t", include_tags=True).records == [
        {"$seq": 1, "$ts": 1_000_000, "$node": "n1", "$tag": "red", "data": 1, "meta": {"k": "v"}}
    ]


def test_absent_fields_stay_absent(log: Log) -> None:
    log.append("t", [{"data": None}])
    assert log.diff("t", include_tags=True).records == [{"$seq": 1, "$ts": 1_000_000, "data": None}]


def test_null_tag_node_and_meta_are_absent_ones(log: Log) -> None:
    log.append("t", [{"data": 1, "tag": None, "node": None, "meta": None}])
    assert log.diff("t", include_tags=True).records == [{"$seq": 1, "$ts": 1_000_000, "data": 1}]


def test_the_batch_node_is_a_default_for_its_records(log: Log) -> None:
    log.append("t", [{"data": 1}, {"data": 2, "node": "own"}], node="batch")
    assert [record["$node"] for record in log.diff("t").records] == ["batch", "own"]


def test_an_empty_tag_and_node_are_kept(log: Log) -> None:
    log.append("t", [{"data": 1, "tag": "", "node": ""}])
    (record,) = log.diff("t", include_tags=True).records
    assert (record["$tag"], record["$node"]) == ("", "")


def test_percent_signs_in_a_node_are_only_characters(log: Log) -> None:
    log.append("t", [{"data": 1, "node": "100%d%%b"}])
    assert log.diff("t").records[0]["$node"] == "100%d%%b"


# Limits


@pytest.mark.parametrize("count", [1, 10_000])
def test_a_batch_may_have_up_to_10000_records(log: Log, count: int) -> None:
    assert log.append("t", [{"data": 1}] * count).last_seq == count


def test_a_batch_of_10001_records_is_refused(log: Log) -> None:
    with pytest.raises(BatchTooLarge, match="10000") as refused:
        log.append("t", [{"data": 1}] * 10_001)
    assert refused.value.code == "batch_too_large"


def test_an_empty_batch_is_refused(log: Log) -> None:
    with pytest.raises(InvalidRequest, match="records"):
        log.append("t", [])


def test_data_and_meta_together_may_have_1_mib(log: Log) -> None:
    meta = {"k": "m" * 100}
    room = (1 << 20) - len('{"k":""}') - 100 - 2
    log.append("t", [{"data": "x" * room, "meta": meta}])
    with pytest.raises(RecordTooLarge, match="TOPICS_MAX_RECORD_BYTES is 1048576"):
        log.append("t", [{"data": "x" * (room + 1), "meta": meta}])
    assert live(log, "t") == [1]


@pytest.mark.parametrize(("field", "most"), [("tag", 256), ("node", 128)])
def test_tag_and_node_are_limited_in_bytes(log: Log, field: str, most: int) -> None:
    log.append("t", [{"data": 1, field: "é" * (most // 2)}])
    with pytest.raises(InvalidRequest, match=rf"records\[0\].{field} .*{most}"):
        log.append("t", [{"data": 1, field: "é" * (most // 2) + "x"}])


def test_the_batch_node_is_limited_in_bytes(log: Log) -> None:
    with pytest.raises(InvalidRequest, match=r"node .*128"):
        write(log, "t", 1, node="n" * 129)


def test_meta_is_limited_in_bytes_and_keys(log: Log) -> None:
    log.append("t", [{"data": 1, "meta": {str(key): "" for key in range(64)}}])
    with pytest.raises(InvalidRequest, match="meta has 65 keys, at most 64"):
        log.append("t", [{"data": 1, "meta": {str(key): "" for key in range(65)}}])
    log.append("t", [{"data": 1, "meta": {"k": "v" * ((16 << 10) - len('{"k":""}'))}}])
    with pytest.raises(InvalidRequest, match="16384"):
        log.append("t", [{"data": 1, "meta": {"k": "v" * ((16 << 10) - len('{"k":""}') + 1)}}])


def test_a_body_is_limited_before_it_is_parsed() -> None:
    log = Machine(Limits(max_body_bytes=100)).log
    with pytest.raises(PayloadTooLarge, match="TOPICS_MAX_BODY_BYTES is 100"):
        log.append_json("t", b"x" * 101)


def test_smaller_limits_are_obeyed() -> None:
    limits = Limits(max_batch_records=2, max_record_bytes=10, max_tag_bytes=3, max_node_bytes=3, max_meta_bytes=8)
    log = Machine(limits).log
    log.append("t", [{"data": 1, "tag": "abc", "node": "abc"}, {"data": 1, "meta": {"k": "v"[:0]}}])
    for bad in (
        {"data": "x" * 9},
        {"data": 1, "tag": "abcd"},
        {"data": 1, "node": "abcd"},
        {"data": 1, "meta": {"k": "vv"}},
    ):
        with pytest.raises((InvalidRequest, RecordTooLarge)):
            log.append("t", [bad])
    with pytest.raises(BatchTooLarge):
        log.append("t", [{"data": 1}] * 3)


# Times


def test_records_of_one_write_share_the_commit_time(machine: Machine) -> None:
    write(machine.log, "t", 1, 2)
    assert times(machine.log, "t") == [machine.clock.now()] * 2


def test_ts_does_not_go_back_with_the_clock(machine: Machine) -> None:
    for step in (0, -500, -500, 1001):
        machine.clock.advance(step)
        write(machine.log, "t", 1)
    assert times(machine.log, "t") == [1_000_000, 1_000_000, 1_000_000, 1_000_001]


@pytest.mark.parametrize("ending", KEEPING)
def test_ts_does_not_go_back_over_a_restart(machine: Machine, ending: Ending) -> None:
    write(machine.log, "t", 1)
    machine.clock.set(5)
    log = machine.restart(ending)
    write(log, "t", 2)
    assert times(log, "t") == [1_000_000, 1_000_000]


def test_ts_does_not_go_back_after_a_checkpoint_and_a_restart(machine: Machine) -> None:
    write(machine.log, "t", 1)
    machine.log.checkpoint()
    machine.clock.set(5)
    log = machine.restart("kill")
    write(log, "t", 2)
    assert times(log, "t") == [1_000_000, 1_000_000]


# Creating


def test_a_write_creates_its_topic(log: Log) -> None:
    assert log.append("t", [{"data": 1}]).created is True
    assert log.append("t", [{"data": 1}]).created is False


def test_create_false_refuses_an_absent_topic(log: Log) -> None:
    with pytest.raises(TopicNotFound, match="create is false"):
        write(log, "t", 1, create=False)
    assert log.topics().topics == []


def test_create_false_writes_to_a_topic_that_exists(log: Log) -> None:
    log.put("t")
    assert write(log, "t", 1, create=False) == [1]


def test_a_write_may_bring_the_configuration_of_its_topic(log: Log) -> None:
    write(log, "t", 1, config={"seq_base": 10, "ttl_ms": 99, "durable": True})
    state = log.get("t")
    assert (state.head_seq, state.config["ttl_ms"], state.config["durability"]) == (10, 99, "fsync")


def test_the_configuration_of_a_write_does_not_touch_a_topic_that_exists(log: Log) -> None:
    log.put("t", ttl_ms=5)
    write(log, "t", 1, config={"ttl_ms": 99, "type": "queue"})
    assert log.get("t").config["ttl_ms"] == 5


def test_the_caps_of_a_write_apply_to_the_write_itself(log: Log) -> None:
    write(log, "t", 1, 2, 3, config={"cap_records": 2})
    assert told(log, "t") == [(1, 1, "cap"), 2, 3]


def test_a_write_that_can_never_fit_does_not_create_its_topic(log: Log) -> None:
    with pytest.raises(BatchTooLarge):
        write(log, "t", 1, 2, 3, config={"cap_records": 2, "discard": "reject"})
    assert log.topics().topics == []


@pytest.mark.parametrize("ending", [*KEEPING, "power"])
@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_an_acked_creation_survives_in_every_class(machine: Machine, durability: str, ending: Ending) -> None:
    write(machine.log, "t", 1, config={"durability": durability, "seq_base": 7})
    state = machine.restart(ending).get("t")
    assert (state.config["durability"], state.config["seq_base"]) == (durability, 7)


# Caps, discard old


def test_a_cap_on_records_evicts_the_oldest(log: Log) -> None:
    log.put("t", cap_records=3)
    for number in range(5):
        write(log, "t", number)
    assert told(log, "t") == [(1, 2, "cap"), 3, 4, 5]
    assert log.get("t").count == 3


def test_a_cap_on_bytes_evicts_the_oldest(log: Log) -> None:
    log.put("t", cap_bytes=10)
    write(log, "t", 1234, 1234)
    write(log, "t", 123)
    state = log.get("t")
    assert (state.count, state.bytes, state.earliest_seq) == (2, 7, 2)


def test_exactly_full_evicts_nothing(log: Log) -> None:
    log.put("t", cap_records=2, cap_bytes=8)
    write(log, "t", 1234, 1234)
    assert log.get("t").evict_floor == 1


@pytest.mark.parametrize(("caps", "kept"), [((2, 100), [4, 5]), ((4, 3), [3, 4, 5]), ((1, 1), [5])])
def test_whichever_cap_is_hit_first_counts(log: Log, caps: tuple[int, int], kept: list[int]) -> None:
    log.put("t", cap_records=caps[0], cap_bytes=caps[1])
    for number in range(5):
        write(log, "t", number)
    assert live(log, "t") == kept


def test_a_batch_larger_than_the_cap_loses_its_own_first_records(log: Log) -> None:
    log.put("t", cap_records=2)
    write(log, "t", 0)
    assert write(log, "t", 1, 2, 3, 4) == [2, 3, 4, 5]
    assert told(log, "t") == [(1, 3, "cap"), 4, 5]


def test_a_record_larger_than_the_cap_is_lost_at_once_and_told(log: Log) -> None:
    log.put("t", cap_bytes=3)
    assert write(log, "t", "far too long") == [1]
    state = log.get("t")
    assert (state.count, state.bytes, state.earliest_seq, state.evict_floor) == (0, 0, 2, 2)
    assert gap(log.diff("t")) == (1, 1, "cap")


def test_deleted_records_count_in_no_cap(log: Log) -> None:
    log.put("t", cap_records=3)
    log.append("t", [{"data": 1, "tag": "x"}, {"data": 2}, {"data": 3}])
    log.delete("t", match="x")
    write(log, "t", 4)
    assert told(log, "t") == [2, 3, 4]


# Caps, discard reject


def test_a_full_topic_that_rejects_refuses(log: Log) -> None:
    log.put("t", cap_records=2, discard="reject")
    write(log, "t", 1, 2)
    before = snapshot(log)
    with pytest.raises(TopicFull, match="cap_records is 2") as refused:
        write(log, "t", 3)
    assert refused.value.code == "topic_full"
    assert refused.value.detail["topic"] == "t"
    assert snapshot(log) == before


def test_a_batch_that_does_not_fit_whole_is_refused_whole(log: Log) -> None:
    log.put("t", cap_records=3, discard="reject")
    write(log, "t", 1, 2)
    with pytest.raises(TopicFull):
        write(log, "t", 3, 4)
    assert write(log, "t", 3) == [3]


def test_bytes_can_be_full_too(log: Log) -> None:
    log.put("t", cap_bytes=10, discard="reject")
    write(log, "t", 123456)
    with pytest.raises(TopicFull, match="cap_bytes is 10"):
        write(log, "t", 12345)
    assert write(log, "t", 1234) == [2]


@pytest.mark.parametrize("config", [{"cap_records": 2}, {"cap_bytes": 2}])
def test_a_batch_that_can_never_fit_is_a_bad_request(log: Log, config: dict[str, Any]) -> None:
    log.put("t", discard="reject", **config)
    with pytest.raises(BatchTooLarge, match="can never fit"):
        write(log, "t", 1, 2, 3)


def test_a_record_that_can_never_fit_is_a_bad_request(log: Log) -> None:
    log.put("t", discard="reject", cap_bytes=2)
    with pytest.raises(RecordTooLarge, match="can never fit"):
        write(log, "t", 123)


def test_reject_without_a_cap_takes_everything(log: Log) -> None:
    log.put("t", discard="reject")
    assert write(log, "t", *range(100))[-1] == 100


def test_a_delete_makes_room(log: Log) -> None:
    log.put("t", discard="reject", cap_records=2)
    write(log, "t", 1, 2)
    log.delete("t", before_seq=2)
    assert write(log, "t", 3) == [3]


def test_a_ttl_makes_room(machine: Machine) -> None:
    machine.log.put("t", discard="reject", cap_records=1, ttl_ms=10)
    write(machine.log, "t", 1)
    machine.clock.advance(11)
    assert write(machine.log, "t", 2) == [2]


def test_two_writes_on_their_way_cannot_take_the_same_room(log: Log) -> None:
    log.put("t", discard="reject", cap_records=1)
    one = decode_write(b'{"records":[{"data":1}]}', Limits())
    log.engine.write("t", one)
    with pytest.raises(TopicFull):
        log.engine.write("t", one)


# Holes


def test_a_hole_takes_seqs_that_are_lost_from_the_start(log: Log) -> None:
    result = log.append("t", [{"data": "a"}, {"hole": 3, "reason": "source_trim"}, {"data": "b"}])
    assert (result.first_seq, result.last_seq, result.count) == (1, 5, 2)
    assert result.seqs == [1, 2, 5]
    assert told(log, "t") == [1, (2, 4, "source_trim"), 5]


def test_the_reason_of_a_hole_may_be_left_out(log: Log) -> None:
    log.append("t", [{"hole": 2}])
    assert gap(log.diff("t")) == (1, 2, "source_trim")


@pytest.mark.parametrize(
    "records",
    [
        [{"hole": 2}, {"data": 1}],
        [{"data": 1}, {"hole": 2}],
        [{"hole": 1}, {"hole": 1}, {"data": 1}, {"hole": 5}, {"data": 1}],
    ],
)
@pytest.mark.parametrize("ending", KEEPING)
def test_holes_anywhere_in_a_batch_survive(machine: Machine, records: list[dict[str, int]], ending: Ending) -> None:
    machine.log.append("t", records)
    before, state = told(machine.log, "t"), machine.log.get("t")
    log = machine.restart(ending)
    assert told(log, "t") == before
    assert (log.get("t").holes, log.get("t").head_seq) == (state.holes, state.head_seq)


def test_a_hole_counts_as_no_record(log: Log) -> None:
    log.put("t", cap_records=1, discard="reject")
    log.append("t", [{"hole": 100}, {"data": 1}])
    state = log.get("t")
    assert (state.count, state.head_seq, state.holes) == (1, 101, 1)


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"hole": 0}, "hole"),
        ({"hole": -1}, "hole"),
        ({"hole": 2**53}, "hole"),
        ({"hole": 1.5}, "hole"),
        ({"hole": 1, "reason": "crash"}, "reason"),
        ({"hole": 1, "data": 1}, "hole"),
        ({"hole": 1, "tag": "t"}, "hole"),
        ({"data": 1, "reason": "source_trim"}, "reason"),
    ],
)
def test_a_hole_that_makes_no_sense_is_refused(log: Log, record: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"records\[0\].*{field}"):
        log.append("t", [record])


def test_a_hole_that_runs_out_of_seqs_is_refused(log: Log) -> None:
    write(log, "t", 1)
    with pytest.raises(TopicFull, match="9007199254740991"):
        log.append("t", [{"hole": 2**53 - 1}])
    assert log.get("t").head_seq == 1


# Durability: what an ack has waited for


def reserve(log: Log, durability: str) -> None:
    """A topic whose reservation of seqs is durable already: it would hide what a write itself waits for."""
    log.put("t", durability=durability)
    write(log, "t", 0)


@pytest.mark.parametrize("durability", ["ephemeral", "memory"])
def test_the_light_classes_ack_without_any_write(machine: Machine, durability: str) -> None:
    reserve(machine.log, durability)
    machine.log.engine.flush()
    calls = machine.disk.calls
    commit = machine.log.engine.write("t", decode_write(b'{"records":[{"data":1}]}', Limits()))
    assert commit.value().seqs == [2]
    assert machine.disk.calls == calls


def test_disk_acks_when_the_kernel_has_the_bytes(machine: Machine) -> None:
    reserve(machine.log, "disk")
    syncs = machine.log.engine.committer.syncs
    commit = machine.log.engine.write("t", decode_write(b'{"records":[{"data":1}]}', Limits()))
    assert not commit.done
    machine.log.engine.flush()
    assert commit.value().seqs == [2]
    assert machine.log.engine.committer.syncs == syncs


def test_fsync_acks_when_the_bytes_are_synced(machine: Machine) -> None:
    reserve(machine.log, "fsync")
    syncs = machine.log.engine.committer.syncs
    write(machine.log, "t", 1)
    assert machine.log.engine.committer.syncs == syncs + 1
    assert datas(machine.restart("power").diff("t")) == [0, 1]


def test_writes_of_one_turn_share_a_sync(machine: Machine) -> None:
    log = machine.log
    for name in ("t", "a", "b"):
        log.put(name, durability="fsync")
        write(log, name, 0)
    syncs = log.engine.committer.syncs
    one = decode_write(b'{"records":[{"data":1}]}', Limits())
    commits = [log.engine.write(name, one) for name in ("t", "a", "b", "t")]
    log.engine.flush()
    assert [commit.value().seqs for commit in commits] == [[2], [2], [2], [3]]
    assert log.engine.committer.syncs == syncs + 1


def test_a_changed_class_applies_to_later_records(machine: Machine) -> None:
    machine.log.put("t", durability="ephemeral")
    write(machine.log, "t", "gone")
    machine.log.put("t", durability="fsync")
    write(machine.log, "t", "kept")
    log = machine.restart("kill")
    assert datas(log.diff("t")) == ["kept"]
    assert gap(log.diff("t")) == (1, 1, "restart")


def test_a_disk_record_survives_a_kill_though_never_synced(machine: Machine) -> None:
    reserve(machine.log, "disk")
    write(machine.log, "t", 1)
    log = machine.restart("kill")
    assert seqs(log.diff("t")) == [1, 2]
    assert log.diff("t").tombstone is None
