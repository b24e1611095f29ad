"""Reading: every field of a diff, and what each one does to the cursor (section 4)."""

from __future__ import annotations

import threading
from itertools import islice
from typing import Any

import msgspec
import pytest

from tests.helpers import KEEPING, Ending, Machine, datas, fill, gap, live, seqs, write
from topics.core.errors import InvalidRequest, TopicNotFound
from topics.core.limits import Limits
from topics.core.tombstone import Tombstone
from topics.engine.read import Diff
from topics.log import Log


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


@pytest.fixture(params=["memory", "segment"])
def ten(request: pytest.FixtureRequest, machine: Machine) -> Log:
    """Records 1 to 10 from nodes a, b and none, tagged x.1, y and none: in memory, or in a segment file."""
    records: list[dict[str, Any]] = [{"data": number, "meta": {"n": str(number)}} for number in range(1, 11)]
    for record, node, tag in zip(records, "aabb..ab.a", ["x.1", "y", None, "x.2", "y"] * 2, strict=True):
        if node != ".":
            record["node"] = node
        if tag is not None:
            record["tag"] = tag
    machine.log.append("t", records)
    if request.param == "segment":
        machine.log.checkpoint()
        return machine.restart()
    return machine.log


# The cursor


@pytest.mark.parametrize(("from_seq", "first"), [(0, 1), (1, 2), (5, 6), (9, 10)])
def test_from_seq_is_exclusive(ten: Log, from_seq: int, first: int) -> None:
    answer = ten.diff("t", from_seq)
    assert seqs(answer) == list(range(first, 11))
    assert (answer.next_from_seq, answer.head_seq, answer.caught_up, answer.lag) == (10, 10, True, 0)


def test_the_default_cursor_is_the_beginning(ten: Log) -> None:
    assert seqs(ten.diff("t")) == list(range(1, 11))


def test_a_reader_at_the_head_is_caught_up(ten: Log) -> None:
    answer = ten.diff("t", 10)
    assert (answer.records, answer.next_from_seq, answer.caught_up, answer.tombstone) == ([], 10, True, None)


def test_an_empty_topic_is_caught_up_at_once(log: Log) -> None:
    log.put("t")
    answer = log.diff("t")
    assert (answer.next_from_seq, answer.head_seq, answer.earliest_seq, answer.caught_up) == (0, 0, 1, True)


@pytest.mark.parametrize("from_seq", [0, 1, 41, 42])
def test_a_cursor_below_seq_base_counts_as_the_beginning(log: Log, from_seq: int) -> None:
    log.put("t", seq_base=43)
    write(log, "t", 1, 2)
    answer = log.diff("t", from_seq)
    assert (seqs(answer), answer.tombstone, answer.scanned) == ([43, 44], None, 2)


def test_an_empty_topic_with_a_base_moves_the_cursor_to_it(log: Log) -> None:
    log.put("t", seq_base=43)
    answer = log.diff("t")
    assert (answer.next_from_seq, answer.caught_up, answer.lag) == (42, True, 0)


def test_an_answer_carries_the_watermarks_and_the_epoch(ten: Log) -> None:
    ten.delete("t", before_seq=3)
    answer = ten.diff("t", 5)
    assert (answer.topic, answer.epoch, answer.head_seq, answer.earliest_seq) == ("t", ten.get("t").epoch, 10, 3)


def test_scanned_counts_every_seq_that_was_looked_at(ten: Log) -> None:
    assert ten.diff("t", 2, node="a").scanned == 8
    assert ten.diff("t", limit=3).scanned == 3
    assert ten.diff("t", 10).scanned == 0


# limit


@pytest.mark.parametrize("limit", [1, 3, 9])
def test_limit_stops_behind_its_last_record(ten: Log, limit: int) -> None:
    answer = ten.diff("t", limit=limit)
    assert (seqs(answer), answer.next_from_seq) == (list(range(1, limit + 1)), limit)
    assert (answer.caught_up, answer.lag) == (False, 10 - limit)


def test_a_limit_that_is_just_enough_is_caught_up(ten: Log) -> None:
    assert ten.diff("t", limit=10).caught_up is True


@pytest.mark.parametrize(
    ("limit", "given"), [(0, 256), (256, 256), (999, 999), (1000, 1000), (1001, 1000), (2**32, 1000), (2**64, 1000)]
)
def test_limit_is_clamped_and_never_refused(log: Log, limit: int, given: int) -> None:
    fill(log, "t", 1100)
    assert log.diff("t", limit=limit).count == given


def test_the_clamp_is_a_limit_of_the_server() -> None:
    log = Machine(Limits(max_limit=5)).log
    fill(log, "t", 10)
    assert log.diff("t", limit=8).count == 5
    assert log.diff("t").count == 5


def test_a_filtered_record_does_not_use_the_limit_up(ten: Log) -> None:
    assert seqs(ten.diff("t", node="a", limit=4)) == [3, 4, 5, 6]


# to_seq


@pytest.mark.parametrize(("to_seq", "last"), [(1, 1), (7, 7), (10, 10), (11, 10), (2**53 - 1, 10)])
def test_to_seq_is_inclusive(ten: Log, to_seq: int, last: int) -> None:
    answer = ten.diff("t", to_seq=to_seq)
    assert (seqs(answer), answer.next_from_seq) == (list(range(1, last + 1)), last)


@pytest.mark.parametrize(("from_seq", "to_seq"), [(5, 5), (5, 4), (5, 0), (0, 0)])
def test_an_empty_range_leaves_the_cursor_where_it_is(ten: Log, from_seq: int, to_seq: int) -> None:
    answer = ten.diff("t", from_seq, to_seq=to_seq)
    assert (answer.records, answer.next_from_seq, answer.caught_up) == ([], from_seq, False)


def test_a_tombstone_is_cut_at_to_seq(log: Log) -> None:
    log.put("t", cap_records=2)
    write(log, "t", *range(10))
    answer = log.diff("t", to_seq=5)
    assert (gap(answer), answer.next_from_seq, answer.records) == ((1, 5, "cap"), 5, [])
    assert answer.tombstone is not None
    assert answer.tombstone.missed_estimate == 5


def test_a_hole_is_cut_at_to_seq(log: Log) -> None:
    log.append("t", [{"hole": 9}, {"data": 1}])
    answer = log.diff("t", to_seq=4)
    assert (gap(answer), answer.next_from_seq) == ((1, 4, "source_trim"), 4)
    assert gap(log.diff("t", answer.next_from_seq)) == (5, 9, "source_trim")


def test_a_filtered_range_ends_at_to_seq(ten: Log) -> None:
    answer = ten.diff("t", to_seq=2, node="a")
    assert (answer.records, answer.next_from_seq, answer.caught_up) == ([], 2, False)


# max_bytes


def test_the_byte_budget_ends_an_answer(log: Log) -> None:
    write(log, "t", *["x" * 100] * 10)
    answer = log.diff("t", max_bytes=450)
    assert 1 <= answer.count <= 4
    assert len(answer.records_json) <= 450 + 2
    assert answer.next_from_seq == answer.count


@pytest.mark.parametrize("query", [{}, {"include_meta": False}, {"include_tags": True}, {"node": "zz"}])
def test_an_answer_has_at_least_one_record_whatever_its_size(ten: Log, query: dict[str, Any]) -> None:
    read = []
    cursor = 0
    while cursor < 10:
        answer = ten.diff("t", cursor, max_bytes=1, **query)
        assert answer.count == 1
        read += seqs(answer)
        cursor = answer.next_from_seq
    assert read == list(range(1, 11))


def test_the_largest_record_passes_the_smallest_budget(log: Log) -> None:
    write(log, "t", "x" * ((1 << 20) - 2))
    assert log.diff("t", max_bytes=1).count == 1
    assert log.diff("t").count == 1


def test_the_default_budget_is_1_mib_and_the_highest_8(log: Log) -> None:
    for _ in range(12):
        write(log, "t", "x" * (1_000_000 - 2))
    assert log.diff("t").count == 1
    assert log.diff("t", max_bytes=0).count == 1
    assert log.diff("t", max_bytes=4_100_000).count == 4
    assert log.diff("t", max_bytes=8 << 20).count == 8
    assert log.diff("t", max_bytes=2**64).count == 8


def test_a_record_that_is_filtered_does_not_use_the_budget_up(log: Log) -> None:
    log.append("t", [{"data": "x" * 1000, "node": "a"}, {"data": 1}])
    answer = log.diff("t", node="a", max_bytes=100)
    assert (datas(answer), answer.caught_up) == ([1], True)


# node


@pytest.mark.parametrize(
    ("node", "kept"),
    [
        ("a", [3, 4, 5, 6, 8, 9]),
        (["a"], [3, 4, 5, 6, 8, 9]),
        (["a", "b"], [5, 6, 9]),
        (("a", "b", "c"), [5, 6, 9]),
        ("c", list(range(1, 11))),
        ("A", list(range(1, 11))),
        ("", list(range(1, 11))),
        ([], list(range(1, 11))),
    ],
)
def test_records_of_the_readers_own_nodes_are_dropped(ten: Log, node: str | list[str], kept: list[int]) -> None:
    answer = ten.diff("t", node=node)
    assert (seqs(answer), answer.tombstone, answer.caught_up) == (kept, None, True)


def test_a_topic_full_of_own_records_is_read_in_one_answer(log: Log) -> None:
    log.append("t", [{"data": 1}] * 1130, node="me")
    answer = log.diff("t", node="me")
    assert (answer.records, answer.next_from_seq, answer.caught_up, answer.scanned) == ([], 1130, True, 1130)


def test_node_names_are_compared_byte_for_byte(log: Log) -> None:
    log.append("t", [{"data": 1, "node": "é"}, {"data": 2, "node": "e\u0301"}])
    assert seqs(log.diff("t", node="é")) == [2]


def test_an_empty_node_is_a_node(log: Log) -> None:
    log.append("t", [{"data": 1, "node": ""}, {"data": 2}])
    assert seqs(log.diff("t", node="")) == [2]


def test_dedupe_node_false_turns_the_filter_off(ten: Log) -> None:
    ten.put("t", dedupe_node=False)
    assert seqs(ten.diff("t", node="a")) == list(range(1, 11))
    ten.put("t", dedupe_node=True)
    assert seqs(ten.diff("t", node="a")) == [3, 4, 5, 6, 8, 9]


# match


@pytest.mark.parametrize(
    ("match", "kept"),
    [
        ("y", [2, 5, 7, 10]),
        (["tag", "Eq", "y"], [2, 5, 7, 10]),
        (["tag", "Glob", "x.*"], [1, 4, 6, 9]),
        (["tag", "Glob", "y*"], [2, 5, 7, 10]),
        (["tag", "Glob", "*"], [1, 2, 4, 5, 6, 7, 9, 10]),
        ("x.", []),
        ("x.*", []),
        ("", []),
        (("tag", "Eq", "x.1"), [1, 6]),
    ],
)
def test_match_keeps_the_records_with_that_tag(ten: Log, match: object, kept: list[int]) -> None:
    answer = ten.diff("t", match=match)
    assert (seqs(answer), answer.next_from_seq, answer.tombstone) == (kept, 10, None)


def test_node_and_match_work_together(ten: Log) -> None:
    assert seqs(ten.diff("t", match="y", node="a")) == [5]


def test_match_and_limit_stop_behind_the_last_match(ten: Log) -> None:
    answer = ten.diff("t", match="y", limit=2)
    assert (seqs(answer), answer.next_from_seq) == ([2, 5], 5)


def test_losses_pass_every_filter(log: Log) -> None:
    log.append("t", [{"hole": 3}, {"data": 1, "tag": "x", "node": "n"}])
    answer = log.diff("t", match="y", node="n")
    assert (gap(answer), answer.records, answer.caught_up) == ((1, 3, "source_trim"), [], True)


def test_an_empty_answer_need_not_be_caught_up(machine: Machine) -> None:
    for _ in range(80):
        machine.log.append("t", [{"data": "x" * 65_000, "node": "me"}] * 5)
    answer = machine.log.diff("t", node="me")
    assert (answer.records, answer.tombstone) == ([], None)
    assert not answer.caught_up
    assert answer.next_from_seq > 0
    assert answer.lag == 400 - answer.next_from_seq
    assert list(machine.log.read("t", node="me")) == []


# What a record shows


def test_tags_are_left_out_unless_asked_for(ten: Log) -> None:
    assert not any("$tag" in record for record in ten.diff("t").records)
    tags = [record.get("$tag") for record in ten.diff("t", include_tags=True).records]
    assert tags == ["x.1", "y", None, "x.2", "y"] * 2


def test_meta_is_there_unless_refused(ten: Log) -> None:
    assert [record["meta"] for record in ten.diff("t", limit=2).records] == [{"n": "1"}, {"n": "2"}]
    assert not any("meta" in record for record in ten.diff("t", include_meta=False).records)


def test_tags_without_meta(ten: Log) -> None:
    record = ten.diff("t", include_tags=True, include_meta=False, limit=1).records[0]
    assert record == {"$seq": 1, "$ts": 1_000_000, "$node": "a", "$tag": "x.1", "data": 1}


def test_the_bytes_of_a_record_are_what_the_contract_says(log: Log) -> None:
    log.append_json("t", b'{"records":[{"data":{ "a" : 1.0 },"meta":{"k" :"v"},"tag":"\\u0041\\"","node":"n\\\\"}]}')
    assert log.diff("t", include_tags=True).records_json == (
        b'[{"$seq":1,"$ts":1000000,"$node":"n\\\\","$tag":"A\\"","data":{ "a" : 1.0 },"meta":{"k" :"v"}}]'
    )
    assert log.diff("t", include_meta=False).records_json == (
        b'[{"$seq":1,"$ts":1000000,"$node":"n\\\\","data":{ "a" : 1.0 }}]'
    )


@pytest.mark.parametrize("include_tags", [False, True])
@pytest.mark.parametrize("include_meta", [False, True])
def test_data_that_looks_like_a_record_is_only_data(log: Log, include_tags: bool, include_meta: bool) -> None:
    data = {"data": {"meta": {"a": "b"}}, "$tag": "x", "meta": {"k": ',"meta":{'}}
    log.append("t", [{"data": data, "tag": "real", "meta": {"data": '"data":'}}])
    (record,) = log.diff("t", include_tags=include_tags, include_meta=include_meta).records
    assert record["data"] == data
    assert record.get("$tag") == ("real" if include_tags else None)
    assert record.get("meta") == ({"data": '"data":'} if include_meta else None)


# The body of an answer


def test_the_body_of_an_answer_has_every_field(log: Log) -> None:
    log.put("t", cap_records=1)
    log.append("t", [{"data": 1}, {"data": [2, 1e3]}])
    body = msgspec.json.decode(log.diff("t").to_json(b'{"server_total_ms":0.5,"records_scanned":1}'))
    assert body == {
        "topic": "t",
        "epoch": log.get("t").epoch,
        "records": [{"$seq": 2, "$ts": 1_000_000, "data": [2, 1000.0]}],
        "next_from_seq": 2,
        "head_seq": 2,
        "earliest_seq": 2,
        "caught_up": True,
        "tombstone": {
            "gap_from": 1,
            "gap_to": 1,
            "reason": "cap",
            "missed_estimate": 1,
            "earliest_seq": 2,
            "head_seq": 2,
        },
        "lag": 0,
        "performance": {"server_total_ms": 0.5, "records_scanned": 1},
    }


def test_a_body_without_a_loss_has_a_null_tombstone(log: Log) -> None:
    log.put("t")
    body = msgspec.json.decode(log.diff("t").to_json(b"{}"))
    assert (body["tombstone"], body["records"], body["caught_up"]) == (None, [], True)


def test_the_bytes_of_data_pass_through_the_body(log: Log) -> None:
    log.append_json("t", b'{"records":[{"data":[ 1e400,"\\u0041" ]}]}')
    assert b'"data":[ 1e400,"\\u0041" ]' in log.diff("t").to_json(b"{}")


# Reading everything


@pytest.mark.parametrize("limit", [1, 7, 1000])
@pytest.mark.parametrize("ending", KEEPING)
def test_read_gives_everything_up_to_the_head(machine: Machine, limit: int, ending: Ending) -> None:
    fill(machine.log, "t", 50)
    log = machine.restart(ending)
    assert [record["$seq"] for record in log.read("t", limit=limit) if isinstance(record, dict)] == list(range(1, 51))


def test_read_ends_at_to_seq(ten: Log) -> None:
    assert len(list(ten.read("t", 2, to_seq=5, limit=1))) == 3


@pytest.mark.parametrize("to_seq", [11, 100])
def test_read_ends_at_the_head_when_to_seq_is_beyond(ten: Log, to_seq: int) -> None:
    assert len(list(ten.read("t", to_seq=to_seq, limit=3))) == 10


def test_read_ends_when_there_is_nothing_below_to_seq(ten: Log) -> None:
    assert list(ten.read("t", 5, to_seq=3)) == []


def test_a_reader_gets_what_was_written_while_it_read(log: Log) -> None:
    write(log, "t", 1, 2)
    found = []
    for item in log.read("t", limit=1):
        assert isinstance(item, dict)
        found.append(item["$seq"])
        if len(found) == 1:
            write(log, "t", 3)
    assert found == [1, 2, 3]


def test_read_goes_on_in_the_new_life_of_a_topic_and_says_so(log: Log) -> None:
    write(log, "t", 1, 2)
    old = log.get("t").epoch
    log.drop("t")
    write(log, "t", "a", "b", "c")
    first, *rest = islice(log.read("t", 2, epoch=old, limit=1), 10)
    assert isinstance(first, Tombstone)
    assert first.reason == "recreated"
    assert [record["data"] for record in rest if isinstance(record, dict)] == ["a", "b", "c"]


def test_read_is_told_when_the_topic_is_recreated_under_it(log: Log) -> None:
    write(log, "t", 1, 2, 3)
    reader = islice(log.read("t", limit=1), 10)
    next(reader)
    log.drop("t")
    write(log, "t", "a", "b", "c")
    first, *rest = reader
    assert isinstance(first, Tombstone)
    assert first.reason == "recreated"
    assert [record["data"] for record in rest if isinstance(record, dict)] == ["a", "b", "c"]


def test_read_takes_every_field_of_a_diff(ten: Log) -> None:
    query: dict[str, Any] = {
        "to_seq": None,
        "limit": 2,
        "node": "a",
        "match": "y",
        "include_tags": True,
        "include_meta": False,
    }
    assert list(ten.read("t", **query)) == [{"$seq": 5, "$ts": 1_000_000, "$tag": "y", "data": 5}]


def test_many_small_writes_read_as_one_sequence(log: Log) -> None:
    for number in range(600):
        write(log, "t", number)
    assert live(log, "t") == list(range(1, 601))


# Waiting. No order of the two threads gives another answer: the wait is far longer than the test may take.


def waiting(log: Log, from_seq: int = 0, **query: Any) -> tuple[threading.Thread, list[Diff | Exception]]:
    """A reader on a thread of its own, and where it leaves what it got."""
    got: list[Diff | Exception] = []

    def wait() -> None:
        try:
            got.append(log.diff("t", from_seq, wait_ms=30_000, **query))
        except Exception as error:
            got.append(error)

    reader = threading.Thread(target=wait, daemon=True)
    reader.start()
    return reader, got


def answer_of(reader: threading.Thread, got: list[Diff | Exception]) -> Diff | Exception:
    reader.join(20)
    assert not reader.is_alive()
    return got[0]


def test_a_reader_at_the_end_waits_for_a_record(log: Log) -> None:
    write(log, "t", 1)
    reader = waiting(log, 1)
    write(log, "t", 2)
    answer = answer_of(*reader)
    assert isinstance(answer, Diff)
    assert seqs(answer) == [2]


def test_a_reader_at_the_end_waits_for_a_loss(log: Log) -> None:
    write(log, "t", 1)
    reader = waiting(log, 1)
    log.append("t", [{"hole": 3}])
    answer = answer_of(*reader)
    assert isinstance(answer, Diff)
    assert gap(answer) == (2, 4, "source_trim")


def test_a_waiting_reader_is_told_when_the_topic_goes_away(log: Log) -> None:
    log.put("t")
    reader = waiting(log)
    log.drop("t")
    assert isinstance(answer_of(*reader), TopicNotFound)


def test_a_record_that_is_filtered_does_not_end_the_wait(log: Log) -> None:
    log.put("t")
    reader = waiting(log, node="me")
    write(log, "t", 1, node="me")
    write(log, "t", 2, node="you")
    answer = answer_of(*reader)
    assert isinstance(answer, Diff)
    assert datas(answer) == [2]


def test_a_reader_with_something_to_read_does_not_wait(ten: Log) -> None:
    assert ten.diff("t", 5, wait_ms=30_000).count == 5
    assert ten.diff("t", 100, wait_ms=30_000).tombstone is not None
    assert ten.diff("t", 0, to_seq=3, node=["a", "b"], wait_ms=30_000).next_from_seq == 3


def test_a_wait_ends_with_an_empty_answer(ten: Log) -> None:
    answer = ten.diff("t", 10, wait_ms=1)
    assert (answer.records, answer.caught_up) == ([], True)


# Epochs


def test_the_right_epoch_changes_nothing(ten: Log) -> None:
    answer = ten.diff("t", 3, epoch=ten.get("t").epoch)
    assert (seqs(answer), answer.tombstone) == (list(range(4, 11)), None)


# Types


@pytest.mark.parametrize("field", ["from_seq", "to_seq", "epoch"])
@pytest.mark.parametrize("value", [-1, 2**53, 1.0, "1", True])
def test_a_wrong_number_is_refused_by_name(ten: Log, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} "):
        ten.diff("t", **{field: value})  # type: ignore[arg-type]  # what a careless caller sends


@pytest.mark.parametrize("field", ["limit", "max_bytes"])
@pytest.mark.parametrize("value", [-1, 1.0, "1", True])
def test_a_wrong_bound_is_refused_by_name(ten: Log, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} "):
        ten.diff("t", **{field: value})  # type: ignore[arg-type]  # what a careless caller sends


@pytest.mark.parametrize(
    "match", [5, [], ["tag"], ["tag", "Eq"], ["node", "Eq", "a"], ["tag", "Like", "a"], ["tag", "Eq", 5], {"tag": "x"}]
)
def test_a_selector_of_another_shape_is_refused(ten: Log, match: object) -> None:
    with pytest.raises(InvalidRequest, match="match"):
        ten.diff("t", match=match)


@pytest.mark.parametrize("glob", ["a", "*a", "a*b*", "**", "a*b", ""])
def test_a_glob_has_one_star_at_its_end(ten: Log, glob: str) -> None:
    with pytest.raises(InvalidRequest, match="star"):
        ten.diff("t", match=["tag", "Glob", glob])
