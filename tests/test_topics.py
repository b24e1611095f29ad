"""Topics: creation, configuration, state, listing and deletion (contract, section 2)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import KEEPING, Ending, Machine, gap, live, seqs, write
from topics.core.config import ConfigPatch
from topics.core.errors import (
    InvalidRequest,
    Throttled,
    TopicExistsIncompatible,
    TopicNotEmpty,
    TopicNotFound,
)
from topics.core.limits import Limits
from topics.core.records import decode_write
from topics.log import Log

DEFAULTS: dict[str, Any] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durability": "disk",
    "durable": False,
    "seq_base": 1,
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "dlq_strategy": "skip",
    "ordering_required": False,
    "max_ack_holes": 0,
    "max_in_flight": 0,
    "leases_durable": None,
}
OTHERS: dict[str, Any] = {
    "ttl_ms": 5000,
    "cap_records": 10,
    "cap_bytes": 1000,
    "discard": "reject",
    "durability": "memory",
    "priority": -7,
    "auto_priority": False,
    "auto_create": False,
    "idempotency_window_ms": 1,
    "dedupe_node": False,
    "lease_ms": 100,
    "claim_jitter_ms": 5000,
    "max_deliveries": 3,
    "dead_letter": "graveyard",
    "dlq_strategy": "block",
    "ordering_required": True,
    "max_ack_holes": 4,
    "max_in_flight": 5,
    "leases_durable": True,
}


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


def config_of(log: Log, topic: str) -> dict[str, Any]:
    return dict(log.get(topic).config)


# Creating


def test_put_creates_a_topic_and_says_so(log: Log) -> None:
    result = log.put("orders")
    assert (result.topic, result.created) == ("orders", True)


def test_a_second_put_creates_nothing(log: Log) -> None:
    log.put("orders")
    epoch = log.get("orders").epoch
    assert log.put("orders").created is False
    assert log.get("orders").epoch == epoch


def test_every_field_has_its_default(log: Log) -> None:
    log.put("orders")
    assert config_of(log, "orders") == DEFAULTS


def test_put_takes_a_dict_a_patch_or_fields(log: Log) -> None:
    log.put("a", {"ttl_ms": 7})
    log.put("b", ConfigPatch(ttl_ms=7))
    log.put("c", ttl_ms=7)
    assert config_of(log, "a") == config_of(log, "b") == config_of(log, "c") == {**DEFAULTS, "ttl_ms": 7}


def test_unknown_fields_are_ignored(log: Log) -> None:
    log.put("orders", {"color": "red", "ttl_ms": 7})
    assert config_of(log, "orders") == {**DEFAULTS, "ttl_ms": 7}


@pytest.mark.parametrize("name", ["a", "A9", "0", "a.b_c:d-e", "x" * 255])
def test_a_name_may_have_letters_digits_and_some_marks(log: Log, name: str) -> None:
    assert log.put(name).topic == name
    assert log.get(name).topic == name


def test_names_are_case_sensitive(log: Log) -> None:
    log.put("Orders")
    with pytest.raises(TopicNotFound):
        log.get("orders")


@pytest.mark.parametrize("name", ["CON", "a..b", "a:b", "wal", "FORMAT", "LOCK"])
def test_a_name_never_becomes_a_path(machine: Machine, name: str) -> None:
    before = set(machine.disk.names())
    machine.log.put(name)
    assert set(machine.disk.names()) == before


def test_the_number_of_topics_is_capped() -> None:
    log = Machine(Limits(max_topics=2)).log
    log.put("a")
    write(log, "b", 1)
    for create in (lambda: log.put("c"), lambda: write(log, "c", 1)):
        with pytest.raises(Throttled, match="TOPICS_MAX_TOPICS is 2") as refused:
            create()
        assert refused.value.detail == {"limit": "TOPICS_MAX_TOPICS", "max": 2}


def test_what_exists_is_never_capped() -> None:
    log = Machine(Limits(max_topics=1)).log
    log.put("a")
    assert log.put("a", ttl_ms=5).created is False
    assert write(log, "a", 1) == [1]


def test_a_deleted_topic_gives_its_place_back() -> None:
    log = Machine(Limits(max_topics=1)).log
    log.put("a")
    log.drop("a")
    assert log.put("b").created is True


# Changing


@pytest.mark.parametrize("field", OTHERS)
def test_a_field_can_be_set_at_creation(log: Log, field: str) -> None:
    log.put("orders", {field: OTHERS[field]})
    resolved = {**DEFAULTS, field: OTHERS[field]}
    if field == "ordering_required":
        resolved["dlq_strategy"] = "block"
    assert config_of(log, "orders") == resolved


def test_an_upsert_changes_only_what_was_sent(log: Log) -> None:
    log.put("orders", OTHERS)
    log.put("orders", {"ttl_ms": 9000})
    assert config_of(log, "orders") == {**DEFAULTS, **OTHERS, "ttl_ms": 9000}


def test_an_empty_upsert_changes_nothing(log: Log) -> None:
    log.put("orders", OTHERS)
    log.put("orders")
    assert config_of(log, "orders") == {**DEFAULTS, **OTHERS}


@pytest.mark.parametrize("field", ["priority", "dead_letter", "leases_durable"])
def test_null_takes_an_optional_field_back(log: Log, field: str) -> None:
    log.put("orders", {field: OTHERS[field]})
    log.put("orders", {field: None})
    assert config_of(log, "orders")[field] is None


@pytest.mark.parametrize("ending", [*KEEPING, "power"])
def test_the_configuration_survives_every_restart(machine: Machine, ending: Ending) -> None:
    machine.log.put("orders", OTHERS)
    log = machine.restart(ending)
    assert config_of(log, "orders") == {**DEFAULTS, **OTHERS}


@pytest.mark.parametrize(("field", "old", "new"), [("type", "log", "queue"), ("seq_base", 5, 6)])
def test_type_and_seq_base_never_change(log: Log, field: str, old: object, new: object) -> None:
    log.put("orders", {field: old})
    with pytest.raises(TopicExistsIncompatible, match=field) as refused:
        log.put("orders", {field: new, "ttl_ms": 5})
    assert refused.value.code == "topic_exists_incompatible"
    assert config_of(log, "orders") == {**DEFAULTS, field: old}


@pytest.mark.parametrize("config", [{"type": "log"}, {"seq_base": 5}])
def test_sending_an_immutable_field_unchanged_is_fine(log: Log, config: dict[str, Any]) -> None:
    log.put("orders", seq_base=5)
    assert log.put("orders", config).created is False


def test_a_queue_is_a_type(log: Log) -> None:
    log.put("jobs", type="queue")
    assert log.get("jobs").type == "queue"


# Aliases and clamps


@pytest.mark.parametrize(("durable", "durability"), [(True, "fsync"), (False, "disk")])
def test_durable_is_an_alias_of_durability(log: Log, durable: bool, durability: str) -> None:
    log.put("orders", durability="memory")
    log.put("orders", durable=durable)
    assert config_of(log, "orders")["durability"] == durability
    assert config_of(log, "orders")["durable"] is durable


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_an_explicit_durability_wins_and_durable_reports_it(log: Log, durability: str) -> None:
    log.put("orders", durability=durability, durable=durability != "fsync")
    assert config_of(log, "orders")["durability"] == durability
    assert config_of(log, "orders")["durable"] is (durability == "fsync")


@pytest.mark.parametrize(
    ("alias", "field", "value"),
    [("visibility_timeout_ms", "lease_ms", 500), ("max_delivery_attempts", "max_deliveries", 3)],
)
def test_an_alias_sets_its_field(log: Log, alias: str, field: str, value: int) -> None:
    log.put("jobs", {alias: value})
    assert config_of(log, "jobs") == {**DEFAULTS, field: value}


@pytest.mark.parametrize(
    ("alias", "field"), [("visibility_timeout_ms", "lease_ms"), ("max_delivery_attempts", "max_deliveries")]
)
def test_the_field_itself_wins_over_its_alias(log: Log, alias: str, field: str) -> None:
    log.put("jobs", {alias: 500, field: 600})
    assert config_of(log, "jobs")[field] == 600


@pytest.mark.parametrize(
    ("field", "sent", "kept"),
    [
        ("lease_ms", 99, 100),
        ("lease_ms", 0, 100),
        ("lease_ms", -5, 100),
        ("lease_ms", 100, 100),
        ("lease_ms", 86_400_000, 86_400_000),
        ("lease_ms", 86_400_001, 86_400_000),
        ("visibility_timeout_ms", 2**60, 86_400_000),
        ("claim_jitter_ms", -1, 0),
        ("claim_jitter_ms", 5000, 5000),
        ("claim_jitter_ms", 5001, 5000),
    ],
)
def test_a_field_with_bounds_is_clamped(log: Log, field: str, sent: int, kept: int) -> None:
    log.put("jobs", {field: sent})
    assert config_of(log, "jobs")["lease_ms" if field.endswith("timeout_ms") else field] == kept


@pytest.mark.parametrize(
    "field",
    ["ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "max_deliveries", "max_ack_holes", "max_in_flight"],
)
@pytest.mark.parametrize("value", [-1, 2**53, 2**64])
def test_a_count_out_of_range_is_refused(log: Log, field: str, value: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field} .*9007199254740991"):
        log.put("orders", {field: value})
    assert log.topics().topics == []


@pytest.mark.parametrize("value", [0, -1, 2**53])
def test_a_seq_base_out_of_range_is_refused(log: Log, value: int) -> None:
    with pytest.raises(InvalidRequest, match="seq_base"):
        log.put("orders", seq_base=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", "stack"),
        ("discard", "new"),
        ("durability", "paper"),
        ("durable", 1),
        ("dlq_strategy", "drop"),
        ("dedupe_node", None),
        ("ordering_required", "yes"),
        ("leases_durable", 0),
        ("priority", 1.5),
        ("ttl_ms", None),
        ("ttl_ms", "7"),
        ("ttl_ms", True),
        ("dead_letter", 5),
        ("dead_letter", "no spaces"),
    ],
)
def test_a_wrong_value_is_refused_by_name(log: Log, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        log.put("orders", {field: value})
    assert log.topics().topics == []


# Dead letters


def test_the_default_strategy_is_block_where_order_is_required(log: Log) -> None:
    log.put("jobs", ordering_required=True)
    assert config_of(log, "jobs")["dlq_strategy"] == "block"
    log.put("jobs", ordering_required=False)
    assert config_of(log, "jobs")["dlq_strategy"] == "skip"


@pytest.mark.parametrize("first", [{}, {"ordering_required": True}, {"dlq_strategy": "skip"}])
def test_an_explicit_skip_with_required_order_is_refused(log: Log, first: dict[str, Any]) -> None:
    log.put("jobs", first)
    before = config_of(log, "jobs")
    with pytest.raises(InvalidRequest, match="dlq_strategy"):
        log.put("jobs", ordering_required=True, dlq_strategy="skip")
    assert config_of(log, "jobs") == before


def test_block_and_dlq_needs_a_dead_letter_topic(log: Log) -> None:
    with pytest.raises(InvalidRequest, match="dead_letter"):
        log.put("jobs", dlq_strategy="block_and_dlq")
    log.put("jobs", dlq_strategy="block_and_dlq", dead_letter="graveyard")
    with pytest.raises(InvalidRequest, match="dead_letter"):
        log.put("jobs", dead_letter=None)
    assert config_of(log, "jobs")["dead_letter"] == "graveyard"


def test_a_topic_is_not_its_own_dead_letter(log: Log) -> None:
    with pytest.raises(InvalidRequest, match="dead_letter"):
        log.put("jobs", dead_letter="jobs")


# State


def test_an_empty_topic_stands_before_its_first_seq(log: Log) -> None:
    log.put("orders", seq_base=100)
    state = log.get("orders")
    assert (state.head_seq, state.next_seq, state.earliest_seq, state.evict_floor) == (99, 100, 100, 100)
    assert (state.count, state.bytes, state.holes) == (0, 0, 0)
    assert state.last_write_ts is None


def test_state_counts_records_and_the_bytes_of_data_and_meta(log: Log) -> None:
    body = b'{"records":[{"data": [1, 2] ,"tag":"t","node":"n"},{"data":"ab","meta":{"k" : "v"}}]}'
    log.append_json("orders", body)
    state = log.get("orders")
    assert (state.count, state.bytes) == (2, len("[1, 2]") + len('"ab"') + len('{"k" : "v"}'))
    assert (state.head_seq, state.next_seq, state.earliest_seq) == (2, 3, 1)


def test_state_knows_the_last_write(machine: Machine) -> None:
    write(machine.log, "orders", 1)
    machine.clock.advance(5)
    write(machine.log, "orders", 1)
    machine.clock.advance(5)
    assert machine.log.get("orders").last_write_ts == machine.clock.now() - 5


def test_a_diff_is_the_last_read(machine: Machine) -> None:
    write(machine.log, "orders", 1)
    assert machine.log.topics().topics[0].last_read_ts is None
    machine.log.diff("orders")
    read_at = machine.clock.now()
    machine.clock.advance(5)
    assert machine.log.topics().topics[0].last_read_ts == read_at


def test_a_look_without_touching_leaves_the_recency_clock_alone(machine: Machine) -> None:
    write(machine.log, "orders", 1)
    machine.log.get("orders", touch=False)
    assert machine.log.topics().topics[0].last_read_ts is None
    machine.log.get("orders")
    assert machine.log.topics().topics[0].last_read_ts == machine.clock.now()


def test_priority_is_clamped_in_effect_only(machine: Machine) -> None:
    machine.log.put("a", priority=5000, auto_priority=False)
    machine.log.put("b", priority=-5000, auto_priority=False)
    assert [state.effective_priority for state in machine.log.topics().topics] == [1000.0, -1000.0]
    assert machine.log.get("a").config["priority"] == 5000


def test_recent_reads_raise_the_priority_and_fade(machine: Machine) -> None:
    machine.log.put("orders", priority=10)
    effective = []
    machine.log.diff("orders")
    for step in (0, 30_000, 30_000, 240_000):
        machine.clock.advance(step)
        effective.append(machine.log.topics().topics[0].effective_priority)
    assert effective == [510.0, 260.0, 135.0, 10.0]


def test_a_read_never_creates(log: Log) -> None:
    for call in (
        lambda: log.get("ghost"),
        lambda: log.diff("ghost"),
        lambda: log.seek("ghost", 0),
        lambda: log.deletes("ghost"),
        lambda: log.delete("ghost", before_seq=5),
        lambda: list(log.read("ghost")),
    ):
        with pytest.raises(TopicNotFound, match="ghost") as refused:
            call()
        assert refused.value.code == "topic_not_found"
    assert log.topics().topics == []


# Tightening


def test_a_tightened_cap_acts_at_once(log: Log) -> None:
    write(log, "orders", 1, 2, 3, 4, 5)
    log.put("orders", cap_records=2)
    state = log.get("orders")
    assert (state.count, state.earliest_seq, state.evict_floor) == (2, 4, 4)
    assert gap(log.diff("orders")) == (1, 3, "cap")


def test_a_tightened_ttl_acts_at_once(machine: Machine) -> None:
    write(machine.log, "orders", 1)
    machine.clock.advance(100)
    write(machine.log, "orders", 2)
    machine.log.put("orders", ttl_ms=99)
    assert machine.log.get("orders").count == 1
    assert gap(machine.log.diff("orders")) == (1, 1, "ttl")


# Listing


def test_topics_are_listed_by_name(log: Log) -> None:
    for name in ("b", "a.2", "c", "a.10", "B"):
        log.put(name)
    page = log.topics()
    assert [state.topic for state in page.topics] == ["B", "a.10", "a.2", "b", "c"]
    assert page.next_cursor is None


def test_a_summary_is_the_state(log: Log) -> None:
    write(log, "a", 1, 2)
    (summary,) = log.topics().topics
    assert (summary.head_seq, summary.count, summary.epoch) == (2, 2, log.get("a").epoch)


def test_a_list_can_be_narrowed_to_a_prefix(log: Log) -> None:
    for name in ("a", "ab", "abc", "ac", "b"):
        log.put(name)
    assert [state.topic for state in log.topics(prefix="ab").topics] == ["ab", "abc"]
    assert log.topics(prefix="zz").topics == []


@pytest.mark.parametrize("prefix", ["", "t."])
@pytest.mark.parametrize("page_size", [1, 2, 3, 7])
def test_pages_give_every_topic_once(log: Log, prefix: str, page_size: int) -> None:
    for number in range(6):
        log.put(f"t.{number}")
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = log.topics(prefix, page_size, cursor)
        assert len(page.topics) <= page_size
        found += [state.topic for state in page.topics]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [f"t.{number}" for number in range(6)]


def test_a_full_last_page_has_no_cursor(log: Log) -> None:
    log.put("a")
    log.put("b")
    assert log.topics(page_size=2).next_cursor is None


def test_a_cursor_outlives_the_topic_it_ended_at(log: Log) -> None:
    for name in ("a", "b", "c"):
        log.put(name)
    cursor = log.topics(page_size=2).next_cursor
    log.drop("b")
    assert [state.topic for state in log.topics(cursor=cursor).topics] == ["c"]


@pytest.mark.parametrize("cursor", ["!", "a", "/w==", "Yg==\n", "é", "gA==", "\ud800"])
def test_a_corrupt_cursor_is_refused(log: Log, cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="cursor"):
        log.topics(cursor=cursor)


def test_the_default_page_has_100_topics() -> None:
    log = Machine().log
    for number in range(101):
        log.put(f"t{number:03}")
    page = log.topics()
    assert len(page.topics) == 100
    assert [state.topic for state in log.topics(cursor=page.next_cursor).topics] == ["t100"]


# Deleting


def test_deleting_a_topic_removes_it(log: Log) -> None:
    write(log, "orders", 1)
    assert log.drop("orders") is True
    with pytest.raises(TopicNotFound):
        log.get("orders")


def test_deleting_an_absent_topic_is_no_error(log: Log) -> None:
    assert log.drop("ghost") is False


@pytest.mark.parametrize("ending", [*KEEPING, "power"])
def test_a_deleted_topic_stays_away(machine: Machine, ending: Ending) -> None:
    write(machine.log, "orders", 1)
    machine.log.drop("orders")
    assert machine.restart(ending).topics().topics == []


def test_if_empty_spares_a_topic_with_records(log: Log) -> None:
    write(log, "orders", 1)
    with pytest.raises(TopicNotEmpty, match="orders") as refused:
        log.drop("orders", if_empty=True)
    assert refused.value.code == "topic_not_empty"
    assert live(log, "orders") == [1]


def test_if_empty_takes_a_topic_whose_records_are_all_gone(machine: Machine) -> None:
    machine.log.put("orders", ttl_ms=10)
    write(machine.log, "orders", 1)
    machine.clock.advance(11)
    assert machine.log.drop("orders", if_empty=True) is True


def test_if_empty_spares_a_topic_with_a_write_on_its_way(log: Log) -> None:
    log.put("orders", durability="fsync")
    log.engine.write("orders", decode_write(b'{"records":[{"data":1}]}', Limits()))
    with pytest.raises(TopicNotEmpty):
        log.engine.drop("orders", if_empty=True)


# Recreating


def test_a_recreated_topic_starts_over(log: Log) -> None:
    log.put("orders", cap_records=5)
    write(log, "orders", 1, 2, 3)
    log.drop("orders")
    assert write(log, "orders", 4) == [1]
    assert log.get("orders").config["cap_records"] == 0
    assert log.get("orders").evict_floor == 1


def test_a_recreated_topic_may_have_another_type_and_seq_base(log: Log) -> None:
    log.put("orders")
    log.drop("orders")
    log.put("orders", type="queue", seq_base=50)
    assert write(log, "orders", 1) == [50]


def test_an_instance_has_an_epoch_of_its_own(log: Log) -> None:
    epochs = set()
    for name in ("a", "b", "a", "a"):
        log.drop(name)
        log.put(name)
        epochs.add(log.get(name).epoch)
    assert len(epochs) == 4


@pytest.mark.parametrize("ending", [*KEEPING, "power"])
def test_epochs_are_not_reused_after_a_restart(machine: Machine, ending: Ending) -> None:
    machine.log.put("a")
    old = machine.log.get("a").epoch
    machine.log.drop("a")
    log = machine.restart(ending)
    log.put("a")
    assert log.get("a").epoch > old


def test_an_epoch_survives_a_restart(machine: Machine) -> None:
    machine.log.put("other")
    machine.log.put("a")
    epoch = machine.log.get("a").epoch
    assert machine.restart().get("a").epoch == epoch


def test_old_idempotency_keys_do_not_reach_a_new_instance(log: Log) -> None:
    write(log, "orders", 1, idempotency_key="k")
    log.drop("orders")
    assert log.append("orders", [{"data": 2}], idempotency_key="k").deduped is False


def test_old_producers_do_not_reach_a_new_instance(log: Log) -> None:
    log.append("orders", [{"data": 1, "client_seq": 9}], client_id="c")
    log.drop("orders")
    assert log.append("orders", [{"data": 1, "client_seq": 1}], client_id="c").seqs == [1]


def test_a_reader_of_the_old_instance_sees_nothing_of_it_in_the_new(log: Log) -> None:
    write(log, "orders", "old", "old")
    log.drop("orders")
    write(log, "orders", "new")
    answer = log.diff("orders", 2)
    assert gap(answer) == (1, 1, "recreated")
    assert seqs(answer) == [1]
