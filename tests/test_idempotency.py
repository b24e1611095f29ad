"""Repeated writes: idempotency keys inside a window, strict producers forever (section 3)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import KEEPING, Ending, Machine, live, snapshot, write
from topics.core.errors import IdempotencyConflict, InvalidRequest, Throttled
from topics.core.limits import Limits
from topics.core.records import decode_write, encode_write
from topics.engine.append import WriteResult
from topics.engine.commit import Commit
from topics.log import Log


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


def keyed(log: Log, key: str, *datas: object) -> WriteResult:
    return log.append("t", [{"data": data} for data in datas or (0,)], idempotency_key=key)


def strict(log: Log, client_id: str, *client_seqs: int) -> WriteResult:
    return log.append("t", [{"data": 0, "client_seq": seq} for seq in client_seqs], client_id=client_id)


def stage(log: Log, **fields: Any) -> Commit:
    """A write that is on its way until the turn ends."""
    return log.engine.write("t", decode_write(encode_write(fields.pop("records", [{"data": 0}]), **fields), Limits()))


# Keys


def test_a_repeat_answers_the_first_seqs_and_appends_nothing(log: Log) -> None:
    first = keyed(log, "k", 1, 2)
    again = keyed(log, "k", 1, 2)
    assert (first.deduped, again.deduped) == (False, True)
    assert (again.seqs, again.first_seq, again.last_seq, again.count) == ([1, 2], 1, 2, 2)
    assert again.created is False
    assert live(log, "t") == [1, 2]


def test_a_repeat_tells_the_head_of_now(log: Log) -> None:
    keyed(log, "k")
    write(log, "t", 1, 2)
    assert keyed(log, "k").head_seq == 3


def test_the_body_of_a_repeat_is_not_compared(log: Log) -> None:
    keyed(log, "k", 1)
    assert keyed(log, "k", "other", "longer").seqs == [1]


def test_another_key_is_another_write(log: Log) -> None:
    keyed(log, "k")
    assert keyed(log, "K").seqs == [2]


def test_keys_belong_to_a_topic(log: Log) -> None:
    keyed(log, "k")
    assert write(log, "other", 1, idempotency_key="k") == [1]
    assert log.get("other").count == 1


def test_a_write_without_a_key_is_never_a_repeat(log: Log) -> None:
    assert [write(log, "t", 1), write(log, "t", 1)] == [[1], [2]]


def test_a_repeat_with_holes_answers_the_same_seqs(log: Log) -> None:
    records = [{"hole": 5}, {"data": 1}, {"hole": 2}]
    first = log.append("t", records, idempotency_key="k")
    again = log.append("t", records, idempotency_key="k")
    assert again.seqs == first.seqs == [1, 6, 7]
    assert (again.count, again.last_seq) == (1, 8)


@pytest.mark.parametrize("key", ["x", "x" * 256, "é" * 256, "\x00", "a b\n"])
def test_a_key_has_1_to_256_characters(log: Log, key: str) -> None:
    keyed(log, key)
    assert keyed(log, key).deduped is True


@pytest.mark.parametrize("key", ["", "x" * 257])
def test_a_key_of_another_length_is_refused(log: Log, key: str) -> None:
    with pytest.raises(InvalidRequest, match=r"idempotency_key .*256"):
        keyed(log, key)


def test_a_refused_write_does_not_use_its_key_up(log: Log) -> None:
    log.put("t", cap_records=1, discard="reject")
    with pytest.raises(Exception, match="can never fit"):
        keyed(log, "k", 1, 2)
    assert keyed(log, "k", 1).deduped is False


def test_a_repeat_is_answered_though_its_records_are_gone(log: Log) -> None:
    keyed(log, "k")
    log.delete("t", before_seq=2)
    assert keyed(log, "k").seqs == [1]
    assert log.get("t").count == 0


def test_a_repeat_is_answered_though_the_topic_is_full(log: Log) -> None:
    log.put("t", cap_records=1, discard="reject")
    keyed(log, "k")
    assert keyed(log, "k").deduped is True


# The window


def test_a_key_is_remembered_for_the_window(machine: Machine) -> None:
    keyed(machine.log, "k")
    machine.clock.advance(120_000)
    assert keyed(machine.log, "k").deduped is True
    machine.clock.advance(1)
    assert keyed(machine.log, "k").seqs == [2]


def test_other_keys_do_not_push_a_key_out_of_its_window(machine: Machine) -> None:
    keyed(machine.log, "k")
    machine.clock.advance(120_000)
    keyed(machine.log, "other")
    assert keyed(machine.log, "k").deduped is True


def test_a_repeat_does_not_prolong_the_window(machine: Machine) -> None:
    keyed(machine.log, "k")
    machine.clock.advance(100_000)
    keyed(machine.log, "k")
    machine.clock.advance(20_001)
    assert keyed(machine.log, "k").deduped is False


def test_a_topic_has_its_own_window(machine: Machine) -> None:
    machine.log.put("t", idempotency_window_ms=10)
    keyed(machine.log, "k")
    machine.clock.advance(11)
    assert keyed(machine.log, "k").deduped is False


def test_a_key_that_was_used_again_is_remembered_from_then(machine: Machine) -> None:
    keyed(machine.log, "k")
    machine.clock.advance(120_001)
    keyed(machine.log, "k")
    machine.clock.advance(120_000)
    assert keyed(machine.log, "k").seqs == [2]


def test_a_clock_that_goes_back_does_not_lengthen_the_window(machine: Machine) -> None:
    machine.log.put("t", idempotency_window_ms=10)
    keyed(machine.log, "k")
    machine.clock.advance(11)
    write(machine.log, "t", 1)
    machine.clock.advance(-11)
    assert keyed(machine.log, "k").deduped is False


# Restarts


@pytest.mark.parametrize("ending", KEEPING)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_key_survives_with_its_records(machine: Machine, ending: Ending, checkpoint: bool) -> None:
    keyed(machine.log, "k", 1, 2)
    if checkpoint:
        machine.log.checkpoint()
    log = machine.restart(ending)
    assert keyed(log, "k", 1, 2).seqs == [1, 2]
    assert live(log, "t") == [1, 2]


def test_an_fsync_key_survives_a_power_cut(machine: Machine) -> None:
    machine.log.put("t", durability="fsync")
    keyed(machine.log, "k")
    assert keyed(machine.restart("power"), "k").deduped is True


@pytest.mark.parametrize("ending", ["close", "kill", "power"])
def test_an_ephemeral_key_goes_with_its_records(machine: Machine, ending: Ending) -> None:
    machine.log.put("t", durability="ephemeral")
    keyed(machine.log, "k")
    log = machine.restart(ending)
    assert keyed(log, "k").deduped is False
    assert log.get("t").count == 1


def test_the_window_goes_on_over_a_restart(machine: Machine) -> None:
    keyed(machine.log, "k")
    machine.clock.advance(120_001)
    assert keyed(machine.restart(), "k").deduped is False


# Repeats in flight


def test_a_repeat_in_flight_waits_for_the_first(log: Log) -> None:
    log.put("t", durability="fsync")
    first = stage(log, idempotency_key="k")
    again = stage(log, idempotency_key="k")
    assert not first.done
    assert not again.done
    log.engine.flush()
    assert (first.value().deduped, again.value().deduped) == (False, True)
    assert first.value().seqs == again.value().seqs == [1]
    assert live(log, "t") == [1]


def test_a_repeat_of_the_write_that_creates_the_topic_waits_too(log: Log) -> None:
    first = stage(log, idempotency_key="k")
    again = stage(log, idempotency_key="k")
    log.engine.flush()
    assert (first.value().created, again.value().created) == (True, False)
    assert again.value().deduped is True


def test_a_repeat_in_flight_fails_with_the_first(machine: Machine) -> None:
    log = machine.log
    log.put("t", durability="fsync")
    first = stage(log, idempotency_key="k")
    again = stage(log, idempotency_key="k")
    machine.disk.fail("writev", "wal", 28)
    log.engine.flush()
    for commit in (first, again):
        with pytest.raises(Exception, match="writing the log failed"):
            commit.value()


def test_a_producers_replay_in_flight_is_told_when_the_first_is_done(log: Log) -> None:
    log.put("t", durability="fsync")
    records = [{"data": 0, "client_seq": 1}]
    first = stage(log, records=records, client_id="c")
    again = stage(log, records=records, client_id="c")
    assert not again.done
    log.engine.flush()
    assert first.value().seqs == [1]
    with pytest.raises(IdempotencyConflict) as conflict:
        again.value()
    assert conflict.value.detail == {"last_client_seq": 1, "seqs": [1]}


def test_a_producer_may_go_on_before_its_first_write_is_done(log: Log) -> None:
    log.put("t", durability="fsync")
    commits = [stage(log, records=[{"data": 0, "client_seq": seq}], client_id="c") for seq in (1, 2, 3)]
    log.engine.flush()
    assert [commit.value().seqs for commit in commits] == [[1], [2], [3]]
    with pytest.raises(IdempotencyConflict):
        strict(log, "c", 3)


# Strict producers


def test_a_producer_counts_up(log: Log) -> None:
    assert strict(log, "c", 0, 1, 5).seqs == [1, 2, 3]
    assert strict(log, "c", 6).seqs == [4]


def test_an_exact_replay_is_a_conflict_that_tells_the_seqs(log: Log) -> None:
    strict(log, "c", 1, 2)
    before = snapshot(log)
    with pytest.raises(IdempotencyConflict) as conflict:
        strict(log, "c", 1, 2)
    assert conflict.value.code == "idempotency_conflict"
    assert conflict.value.detail == {"last_client_seq": 2, "seqs": [1, 2]}
    assert snapshot(log) == before


@pytest.mark.parametrize("replay", [(1,), (2,), (2, 3), (1, 3), (0, 2), (1, 2, 3), (0,)])
def test_a_partial_replay_appends_nothing_and_tells_no_seqs(log: Log, replay: tuple[int, ...]) -> None:
    strict(log, "c", 1, 2)
    with pytest.raises(IdempotencyConflict) as conflict:
        strict(log, "c", *replay)
    assert conflict.value.detail == {"last_client_seq": 2}
    assert live(log, "t") == [1, 2]


def test_a_replay_of_an_earlier_write_tells_no_seqs(log: Log) -> None:
    strict(log, "c", 1)
    strict(log, "c", 2)
    with pytest.raises(IdempotencyConflict) as conflict:
        strict(log, "c", 1)
    assert conflict.value.detail == {"last_client_seq": 2}


def test_the_message_of_a_conflict_names_both_numbers(log: Log) -> None:
    strict(log, "c", 7)
    with pytest.raises(IdempotencyConflict, match=r"'c'.*7.*client_seq 5"):
        strict(log, "c", 5)


def test_a_replay_with_holes_tells_the_same_seqs(log: Log) -> None:
    records = [{"hole": 4, "client_seq": 1}, {"data": 0, "client_seq": 2}]
    log.append("t", records, client_id="c")
    with pytest.raises(IdempotencyConflict) as conflict:
        log.append("t", records, client_id="c")
    assert conflict.value.detail["seqs"] == [1, 5]


def test_producers_do_not_know_each_other(log: Log) -> None:
    strict(log, "c", 5)
    assert strict(log, "d", 1).seqs == [2]


def test_a_producer_counts_on_every_topic_alone(log: Log) -> None:
    strict(log, "c", 5)
    assert log.append("other", [{"data": 0, "client_seq": 1}], client_id="c").seqs == [1]


def test_a_producer_is_remembered_beyond_every_window(machine: Machine) -> None:
    machine.log.put("t", idempotency_window_ms=1, ttl_ms=1)
    strict(machine.log, "c", 1)
    machine.clock.advance(10**12)
    with pytest.raises(IdempotencyConflict):
        strict(machine.log, "c", 1)


@pytest.mark.parametrize("ending", KEEPING)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_producer_is_remembered_over_a_restart(machine: Machine, ending: Ending, checkpoint: bool) -> None:
    strict(machine.log, "c", 1, 9)
    if checkpoint:
        machine.log.checkpoint()
    log = machine.restart(ending)
    with pytest.raises(IdempotencyConflict) as conflict:
        strict(log, "c", 1, 9)
    assert conflict.value.detail == {"last_client_seq": 9, "seqs": [1, 2]}
    assert strict(log, "c", 10).seqs == [3]


def test_client_seqs_go_to_the_last_signed_number_of_64_bits(log: Log) -> None:
    assert strict(log, "c", 2**63 - 1).seqs == [1]
    with pytest.raises(InvalidRequest, match=r"records\[0\].client_seq"):
        strict(log, "d", 2**63)


@pytest.mark.parametrize(
    ("records", "client_id", "field"),
    [
        ([{"data": 0}], "c", r"records\[0\].client_seq"),
        ([{"data": 0, "client_seq": 1}, {"data": 0}], "c", r"records\[1\].client_seq"),
        ([{"data": 0, "client_seq": 1}], None, "client_id"),
        ([{"data": 0, "client_seq": 1}, {"data": 0, "client_seq": 1}], "c", r"records\[1\].client_seq"),
        ([{"data": 0, "client_seq": 2}, {"data": 0, "client_seq": 1}], "c", r"records\[1\].client_seq"),
        ([{"data": 0, "client_seq": -1}], "c", r"records\[0\].client_seq"),
        ([{"data": 0, "client_seq": 1.5}], "c", r"records\[0\].client_seq"),
        ([{"data": 0, "client_seq": 1}], "", "client_id"),
        ([{"data": 0, "client_seq": 1}], "c" * 257, "client_id"),
    ],
)
def test_a_producer_that_does_not_count_up_is_refused(
    log: Log, records: list[dict[str, Any]], client_id: str | None, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        log.append("t", records, client_id=client_id)
    assert log.topics().topics == []


def test_the_number_of_producers_is_capped() -> None:
    log = Machine(Limits(max_clients_per_topic=2)).log
    strict(log, "a", 1)
    strict(log, "b", 1)
    with pytest.raises(Throttled, match="TOPICS_MAX_CLIENTS_PER_TOPIC is 2") as refused:
        strict(log, "c", 1)
    assert refused.value.detail == {"limit": "TOPICS_MAX_CLIENTS_PER_TOPIC", "max": 2}
    assert strict(log, "a", 2).seqs == [3]


def test_producers_on_their_way_count_towards_the_cap() -> None:
    log = Machine(Limits(max_clients_per_topic=1)).log
    log.put("t", durability="fsync")
    stage(log, records=[{"data": 0, "client_seq": 1}], client_id="a")
    with pytest.raises(Throttled):
        stage(log, records=[{"data": 0, "client_seq": 1}], client_id="b")


# Both together


def test_a_key_answers_before_the_producer_is_asked(log: Log) -> None:
    records = [{"data": 0, "client_seq": 1}]
    log.append("t", records, client_id="c", idempotency_key="k")
    assert log.append("t", records, client_id="c", idempotency_key="k").deduped is True


def test_a_producer_is_asked_when_the_key_is_new(log: Log) -> None:
    records = [{"data": 0, "client_seq": 1}]
    log.append("t", records, client_id="c", idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        log.append("t", records, client_id="c", idempotency_key="other")
