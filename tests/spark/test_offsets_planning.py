"""Offsets, plans, pushed filters and lag: what only computes, without Spark and without a server."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from topics.spark import offsets, planning
from topics.spark.lag import lag_of
from topics.spark.offsets import BEGUN, Cursor, Offsets
from topics.spark.planning import Catalog, Range, TopicState
from topics.spark.pushdown import Wanted, ceil_ms


def state(topic: str, head: int, earliest: int = 1, epoch: int = 1, base: int = 1) -> TopicState:
    return TopicState(topic, epoch, head, earliest, planning._Config(base))


class Starts:
    """A catalog that begins every topic at one cursor."""

    def __init__(self, cursor: int) -> None:
        self.cursor = cursor

    def start(self, state: TopicState) -> int:
        return self.cursor


def next_offsets(start: Offsets, *states: TopicState, most: int | None = None, begin: int = 0) -> Offsets:
    catalog = cast(Catalog, Starts(begin))
    return planning.next_offsets(start, {each.topic: each for each in states}, catalog, most)


def spans(start: Offsets, end: Offsets, *states: TopicState, per_range: int = 100) -> list[tuple[Any, ...]]:
    planned = planning.ranges(start, end, {each.topic: each for each in states}, per_range)
    return [(span.topic, span.epoch, span.after, span.to, span.begins_anew) for span in planned]


# Offsets.


def test_offsets_are_written_in_one_order_whatever_order_they_came_in() -> None:
    there = {"b": Cursor(2, 5), "a": Cursor(1, 7, 0)}
    back = dict(reversed(there.items()))
    assert json.dumps(offsets.dump(there)) == json.dumps(offsets.dump(back))
    assert offsets.dump(there) == {"a": {"epoch": 1, "seq": 7, "start": 0}, "b": {"epoch": 2, "seq": 5}}


def test_offsets_come_back_as_they_were_written() -> None:
    there = {"a": Cursor(1, 7, 0), "b": Cursor(2, 5)}
    assert offsets.load(json.loads(json.dumps(offsets.dump(there)))) == there


def test_a_start_of_zero_is_kept() -> None:
    assert offsets.load({"a": {"epoch": 1, "seq": 7, "start": 0}})["a"].start == 0


# Where a batch ends.


def test_the_first_offsets_say_where_each_topic_was_begun() -> None:
    assert next_offsets({}, state("a", 10), begin=4) == {"a": Cursor(1, 10, 4)}


def test_a_topic_that_comes_later_begins_at_its_first_seq() -> None:
    start = {"a": Cursor(1, 10, 10)}
    assert next_offsets(start, state("a", 10), state("b", 205, base=200), begin=205)["b"] == Cursor(1, 205, 199)


def test_where_nothing_moved_the_offsets_are_the_same_text() -> None:
    start = {"a": Cursor(1, 10, 4), "b": Cursor(2, 3)}
    end = next_offsets(start, state("a", 10), state("b", 3, epoch=2))
    assert json.dumps(offsets.dump(end)) == json.dumps(offsets.dump(start))


def test_a_stream_that_has_not_seen_a_topic_knows_that_it_has_begun() -> None:
    begun = next_offsets({})
    assert begun == {BEGUN: Cursor(0, 0)}
    assert next_offsets(begun) == begun
    assert next_offsets(begun, state("a", 5), begin=5) == {"a": Cursor(1, 5, 0)}


def test_a_topic_that_is_gone_keeps_its_cursor() -> None:
    start = {"a": Cursor(1, 5), "b": Cursor(2, 5)}
    assert next_offsets(start, state("b", 7, epoch=2)) == {"a": Cursor(1, 5), "b": Cursor(2, 7)}


def test_a_recreated_topic_begins_at_its_first_seq() -> None:
    recreated = state("a", 202, epoch=2, base=200)
    assert next_offsets({"a": Cursor(1, 50)}, recreated) == {"a": Cursor(2, 202, 199)}


def test_a_stream_never_goes_back() -> None:
    start = {"a": Cursor(1, 99, 99)}
    assert next_offsets(start, state("a", 10)) == start


# Shares.


def shares(waiting: dict[str, int], most: int) -> dict[str, int]:
    return planning._share(dict.fromkeys(waiting, 0), {name: state(name, head) for name, head in waiting.items()}, most)


@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 1000), max_size=8), st.integers(1, 500))
def test_shares_sum_up_to_exactly_what_may_be_taken_and_exceed_nobodys_backlog(
    waiting: dict[str, int], most: int
) -> None:
    taken = shares(waiting, most)
    assert sum(taken.values()) == min(most, sum(waiting.values()))
    assert all(0 <= taken[name] <= count for name, count in waiting.items())


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_small_backlog_is_not_starved_by_a_large_one(names: tuple[str, str]) -> None:
    small, large = names
    assert shares({small: 1, large: 100_000}, 10) == {small: 1, large: 9}


@given(st.integers(2, 9), st.integers(1, 8), st.integers(0, 100))
def test_where_there_are_more_topics_than_records_each_has_its_turn(topics: int, most: int, offset: int) -> None:
    names = [f"t{number}" for number in range(topics)]
    cursors = {name: offset + 7 * index for index, name in enumerate(names)}
    served: set[str] = set()
    for _ in range(topics):
        states = {name: state(name, cursors[name] + 1000) for name in names}
        ends = planning._share(cursors, states, most)
        served |= {name for name in names if ends[name] > cursors[name]}
        cursors = ends
    assert served == set(names)


def test_what_is_gone_is_passed_and_counts_for_nothing() -> None:
    states = {"a": state("a", 1000, earliest=991), "b": state("b", 10)}
    ends = planning._share({"a": 5, "b": 0}, states, 10)
    assert (ends["a"] - 990) + ends["b"] == 10
    assert ends["a"] > 990


def test_a_topic_whose_all_is_gone_is_passed_up_to_its_head() -> None:
    assert planning._share({"a": 5}, {"a": state("a", 1000, earliest=1001)}, 1) == {"a": 1000}


# Ranges.


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 40))
def test_ranges_cover_every_seq_once_and_none_is_too_long(after: int, count: int, per_range: int) -> None:
    to = after + count
    planned = spans({"a": Cursor(1, after)}, {"a": Cursor(1, to)}, state("a", to), per_range=per_range)
    assert [seq for _, _, first, last, _ in planned for seq in range(first + 1, last + 1)] == list(
        range(after + 1, to + 1)
    )
    assert all(0 < last - first <= per_range for _, _, first, last, _ in planned)


def test_the_number_of_ranges_is_bounded() -> None:
    planned = spans({"a": Cursor(1, 0)}, {"a": Cursor(1, 10**9)}, state("a", 10**9), per_range=1)
    assert len(planned) == planning._MAX_RANGES
    assert planned[-1][3] == 10**9


def test_what_is_gone_is_one_range_however_long_it_is() -> None:
    planned = spans({"a": Cursor(1, 3)}, {"a": Cursor(1, 1000)}, state("a", 1000, earliest=997), per_range=2)
    assert planned == [("a", 1, 3, 996, False), ("a", 1, 996, 998, False), ("a", 1, 998, 1000, False)]


def test_a_new_topic_is_read_from_where_it_was_begun() -> None:
    assert spans({}, {"a": Cursor(1, 5, 2)}, state("a", 5)) == [("a", 1, 2, 5, False)]


def test_what_was_lost_since_a_batch_was_planned_is_in_its_ranges() -> None:
    planned = spans({}, {"a": Cursor(1, 5, 0)}, state("a", 100, earliest=90), per_range=2)
    assert planned == [("a", 1, 0, 5, False)]


def test_a_topic_that_did_not_move_has_no_range() -> None:
    same = {"a": Cursor(1, 5, 0), BEGUN: Cursor(0, 0)}
    assert spans(same, same, state("a", 5)) == []


def test_a_topic_that_is_gone_is_one_range_that_will_tell() -> None:
    assert spans({"a": Cursor(1, 5)}, {"a": Cursor(1, 9)}, per_range=1) == [("a", 1, 5, 9, False)]


def test_a_recreated_topic_says_so_once_and_in_front() -> None:
    planned = spans({"a": Cursor(1, 50)}, {"a": Cursor(2, 4)}, state("a", 4, epoch=2), per_range=2)
    assert planned == [("a", 2, 0, 0, True), ("a", 2, 0, 2, False), ("a", 2, 2, 4, False)]


def test_a_recreated_topic_says_what_was_gone_when_it_was_noticed() -> None:
    planned = spans({"a": Cursor(1, 50)}, {"a": Cursor(2, 14, 10)}, state("a", 14, 13, epoch=2, base=11))
    assert planned == [("a", 2, 10, 12, True), ("a", 2, 12, 14, False)]


def test_a_topic_recreated_again_behind_its_plan_will_tell_that_too() -> None:
    planned = spans({"a": Cursor(1, 50)}, {"a": Cursor(2, 4)}, state("a", 9, epoch=3))
    assert planned == [("a", 2, 0, 0, True), ("a", 2, 0, 4, False)]


def test_a_range_travels_to_its_task() -> None:
    span = pickle.loads(pickle.dumps(Range("a", 1, 2, 3, begins_anew=True)))
    assert (span.topic, span.epoch, span.after, span.to, span.begins_anew) == ("a", 1, 2, 3, True)


# Pushed filters.

NOON = datetime(2024, 5, 6, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def narrowed(*filters: Filter) -> tuple[Wanted, list[Filter]]:
    wanted = Wanted()
    left = list(wanted.narrow(filters))
    return wanted, left


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (EqualTo(("topic",), "a"), Wanted(topics=frozenset("a"))),
        (In(("topic",), cast(Any, ["a", "b"])), Wanted(topics=frozenset("ab"))),
        (GreaterThan(("seq",), 5), Wanted(first=6)),
        (GreaterThanOrEqual(("seq",), 5), Wanted(first=5)),
        (LessThan(("seq",), 5), Wanted(last=4)),
        (LessThanOrEqual(("seq",), 5), Wanted(last=5)),
        (EqualTo(("seq",), 5), Wanted(first=5, last=5)),
        (GreaterThan(("ts",), NOON), Wanted(since=NOON + MICROSECOND)),
        (GreaterThanOrEqual(("ts",), NOON), Wanted(since=NOON)),
        (LessThan(("ts",), NOON), Wanted(until=NOON)),
        (LessThanOrEqual(("ts",), NOON), Wanted(until=NOON + MICROSECOND)),
        (LessThanOrEqual(("ts",), datetime.max.replace(tzinfo=UTC)), Wanted()),
        (EqualTo(("tag",), "x"), Wanted(tag="x")),
        (StringStartsWith(("tag",), "x"), Wanted(tag=("tag", "Glob", "x*"))),
        (IsNotNull(("seq",)), Wanted()),
    ],
)
def test_a_filter_is_taken_in_exactly(given: Filter, expected: Wanted) -> None:
    assert narrowed(given) == (expected, [])


@pytest.mark.parametrize(
    "given",
    [
        EqualTo(("data",), "1"),
        EqualTo(("seq",), "5"),
        EqualTo(("ts",), NOON),
        In(("seq",), cast(Any, [1, 2])),
        IsNotNull(("tag",)),
        IsNotNull(("ts",)),
        IsNotNull(("data",)),
        Not(EqualTo(("seq",), 5)),
        StringStartsWith(("tag",), "x*"),
        StringStartsWith(("topic",), "x"),
        GreaterThan(("ts",), datetime.max.replace(tzinfo=UTC)),
        EqualTo(("meta", "topic"), "x"),
    ],
)
def test_a_filter_that_cannot_be_exact_is_left_to_spark(given: Filter) -> None:
    assert narrowed(given) == (Wanted(), [given])


@pytest.mark.parametrize("is_first", [True, False])
def test_not_null_goes_without_saying_wherever_spark_puts_it(is_first: bool) -> None:
    values: list[Filter] = [EqualTo(("tag",), "x"), GreaterThan(("ts",), NOON)]
    nulls: list[Filter] = [IsNotNull(("tag",)), IsNotNull(("ts",))]
    assert narrowed(*(nulls + values if is_first else values + nulls))[1] == []


def test_filters_narrow_together() -> None:
    wanted, left = narrowed(
        GreaterThan(("seq",), 5),
        GreaterThan(("seq",), 3),
        LessThan(("seq",), 9),
        LessThan(("seq",), 20),
        In(("topic",), cast(Any, ["a", "b"])),
        EqualTo(("topic",), "b"),
        GreaterThanOrEqual(("ts",), NOON),
        GreaterThanOrEqual(("ts",), NOON - MICROSECOND),
    )
    assert (wanted, left) == (Wanted(frozenset("b"), 6, 8, since=NOON), [])


def test_a_second_filter_on_tags_is_left_to_spark() -> None:
    second = StringStartsWith(("tag",), "x")
    wanted, left = narrowed(EqualTo(("tag",), "x1"), second)
    assert (wanted.tag, left) == ("x1", [second])


def test_a_time_without_a_zone_is_utc_and_one_with_another_zone_is_the_same_moment() -> None:
    assert narrowed(LessThan(("ts",), NOON.replace(tzinfo=None)))[0].until == NOON
    elsewhere = NOON.astimezone(timezone(timedelta(hours=-5)))
    assert narrowed(LessThan(("ts",), elsewhere))[0].until == NOON


@pytest.mark.parametrize(
    ("moment", "ms"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, tzinfo=UTC) + MICROSECOND, 1),
        (datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC), 1),
        (datetime(1970, 1, 1, tzinfo=UTC) - MICROSECOND, 0),
        (datetime(1969, 12, 31, 23, 59, 59, 998500, tzinfo=UTC), -1),
    ],
)
def test_a_moment_is_rounded_up_to_a_millisecond(moment: datetime, ms: int) -> None:
    assert ceil_ms(moment) == ms


# Lag.


def text_of(cursors: Offsets) -> str:
    return json.dumps(offsets.dump(cursors))


def test_lag_is_what_each_topic_has_beyond_the_batch() -> None:
    end = text_of({"a": Cursor(1, 4, 0), "b": Cursor(2, 9)})
    latest = text_of({"a": Cursor(1, 10), "b": Cursor(2, 9), "c": Cursor(3, 7)})
    assert lag_of(end, latest) == {"a": 6, "b": 0, "c": 7}


def test_the_lag_of_a_recreated_topic_is_all_of_it() -> None:
    assert lag_of(text_of({"a": Cursor(1, 4)}), text_of({"a": Cursor(2, 3)})) == {"a": 3}


def test_a_topic_that_is_gone_has_no_lag() -> None:
    assert lag_of(text_of({"a": Cursor(1, 4)}), text_of({})) == {}


def test_a_stream_that_begins_beyond_the_head_has_no_lag() -> None:
    assert lag_of(text_of({"a": Cursor(1, 99, 99)}), text_of({"a": Cursor(1, 10)})) == {"a": 0}


@pytest.mark.parametrize(
    ("end", "latest"),
    [
        (None, None),
        ("null", "null"),
        (text_of({"a": Cursor(1, 4)}), None),
        ("5", "9"),
        ("[1]", "[1]"),
        ("not JSON", "9"),
        ('{"topic": {"0": 5}}', '{"topic": {"0": 9}}'),
        ('{"logOffset": 3}', '{"logOffset": 4}'),
    ],
)
def test_what_is_not_the_offset_of_topics_has_no_lag(end: str | None, latest: str | None) -> None:
    assert lag_of(end, latest) is None
