"""The options of source and sink: what each means, and that a wrong one is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from topics.core.errors import InvalidRequest
from topics.spark.options import Filter, SinkOptions, SourceOptions, sink_options, source_options

URL = "http://127.0.0.1:4000"


def source(**options: str) -> SourceOptions:
    return source_options({"url": URL, **options})


def sink(**options: str) -> SinkOptions:
    return sink_options({"url": URL, **options})


def test_a_topic_is_all_that_is_needed() -> None:
    options = source(topic="a")
    assert (options.topics, options.prefix) == (("a",), None)
    assert (options.starting, options.starting_ts, options.ending) == ("earliest", None, "latest")
    assert (options.max_records, options.on_loss, options.meta) == (None, "emit", "json")
    assert options.filter == Filter()
    assert not options.push_filters


def test_names_are_read_in_any_case() -> None:
    assert source_options({"URL": URL, "TOPICPREFIX": "a", "maxrecordspertrigger": "5"}).max_records == 5


def test_topics_are_a_list_in_canonical_order() -> None:
    assert source(topics=" b , a,c").topics == ("a", "b", "c")


def test_an_empty_prefix_is_every_topic() -> None:
    assert source(topicPrefix="").prefix == ""


def test_an_empty_option_is_one_that_was_not_given() -> None:
    assert source(topic="a", startingSeq="", key="", onLoss=" ").starting == "earliest"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("0", 0),
        ("12", 12),
        ('{"a": 5, "b": "latest", "c": "earliest"}', {"a": 5, "b": "latest", "c": "earliest"}),
    ],
)
def test_a_start_is_a_word_a_seq_or_a_map(text: str, meaning: Any) -> None:
    assert source(topic="a", startingSeq=text).starting == meaning


@pytest.mark.parametrize(
    ("text", "meaning"), [("latest", "latest"), ("7", 7), ('{"a": 5, "b": "latest"}', {"a": 5, "b": "latest"})]
)
def test_an_end_is_the_latest_a_seq_or_a_map(text: str, meaning: Any) -> None:
    assert source(topic="a", endingSeq=text).ending == meaning


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1700000000123", 1700000000123),
        ("2023-11-14T22:13:20.123+00:00", 1700000000123),
        ("2023-11-14T22:13:20.123", 1700000000123),
        ("2023-11-15T00:13:20+02:00", 1700000000000),
        ("2023-11-14", 1699920000000),
    ],
)
def test_a_starting_time_is_milliseconds_or_iso_8601(text: str, ms: int) -> None:
    assert source(topic="a", startingTs=text).starting_ts == ms


def test_nodes_are_one_or_a_list() -> None:
    assert source(topic="a", node="n").filter.node == ("n",)
    assert source(topic="a", node='["n", "m"]').filter.node == ("n", "m")


def test_a_tag_selector_is_a_tag_or_a_triple() -> None:
    assert source(topic="a", tagMatch="x").filter.match == "x"
    assert source(topic="a", tagMatch='["tag", "Glob", "x*"]').filter.match == ("tag", "Glob", "x*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of the options topic, topics and topicPrefix is needed, got none"),
        ({"topic": "a", "topicPrefix": "b"}, "exactly one of .* got topic and topicPrefix"),
        ({"topic": "a", "topics": "b"}, "exactly one of .* got topic and topics"),
        ({"topic": "-a"}, "^topic: a name is"),
        ({"topic": ""}, "^topic: a name is"),
        ({"topics": "a,,b"}, "^topics?: a name is"),
        ({"topics": "a,b,a"}, "^topics names a topic twice"),
        ({"topic": "a", "startingSeq": "first"}, "^startingSeq must be earliest, latest or a seq, got 'first'"),
        ({"topic": "a", "startingSeq": "-1"}, "^startingSeq must be"),
        ({"topic": "a", "startingSeq": "1.5"}, "^startingSeq must be"),
        ({"topic": "a", "startingSeq": "²"}, "^startingSeq must be"),
        ({"topic": "a", "startingSeq": '{"a": -1}'}, "^startingSeq: 'a' must be"),
        ({"topic": "a", "startingSeq": '{"a": true}'}, "^startingSeq: 'a' must be"),
        ({"topic": "a", "startingSeq": '{"a": [1]}'}, "^startingSeq: 'a' must be"),
        ({"topic": "a", "startingSeq": '{"a": 1'}, "^startingSeq is not valid JSON"),
        ({"topic": "a", "endingSeq": "earliest"}, "^endingSeq must be latest or a seq, got 'earliest'"),
        ({"topic": "a", "endingSeq": '{"a": "earliest"}'}, "^endingSeq: 'a' must be"),
        ({"topic": "a", "startingTs": "yesterday"}, "^startingTs must be milliseconds or an ISO 8601 time"),
        ({"topic": "a", "startingTs": "²"}, "^startingTs must be"),
        ({"topic": "a", "startingTs": "-5"}, "^startingTs must be"),
        ({"topic": "a", "startingTs": "5", "startingSeq": "5"}, "startingSeq and startingTs exclude each other"),
        ({"topic": "a", "maxRecordsPerTrigger": "0"}, "^maxRecordsPerTrigger must be a whole number of 1 or more"),
        ({"topic": "a", "maxRecordsPerTrigger": "many"}, "^maxRecordsPerTrigger must be"),
        ({"topic": "a", "recordsPerPartition": "0"}, "^recordsPerPartition must be a whole number of 1 or more"),
        ({"topic": "a", "retryMs": "-1"}, "^retryMs must be a whole number of 0 or more"),
        ({"topic": "a", "timeoutMs": "0"}, "^timeoutMs must be a whole number of 1 or more"),
        ({"topic": "a", "node": "[1]"}, "^node must be a string or a JSON list of strings"),
        ({"topic": "a", "node": '["a"'}, "^node is not valid JSON"),
        ({"topic": "a", "tagMatch": '["tag", "Like", "x"]'}, "^tagMatch must be"),
        ({"topic": "a", "tagMatch": '["tag", "Glob", "*x"]'}, '^tagMatch: "Glob" takes one star'),
        ({"topic": "a", "onLoss": "cry"}, "^onLoss must be one of emit, fail, ignore, got 'cry'"),
        ({"topic": "a", "meta": "xml"}, "^meta must be one of json, map, got 'xml'"),
        ({"topic": "a", "pushFilters": "yes"}, "^pushFilters must be one of false, true, got 'yes'"),
        ({"topic": "a", "url": ""}, "option url is required"),
        ({"topic": "a", "url": "localhost:4000"}, "^url must be http://HOST:PORT"),
        ({"topic": "a", "url": "ftp://localhost"}, "^url must be http://HOST:PORT"),
        ({"topic": "a", "url": "http://localhost:port"}, "^url: the port is not a number"),
        ({"topic": "a", "key": "secret\n"}, "^key must be printable ASCII"),
        ({"topic": "a", "key": "sécret"}, "^key must be printable ASCII"),
    ],
)
def test_a_wrong_option_of_a_source_is_refused_by_its_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        source(**options)
    assert "secret" not in str(refused.value)


def test_a_sink_needs_no_more_than_where_the_server_is() -> None:
    options = sink()
    assert (options.topic, options.create, options.app_id, options.version) == (None, True, None, None)


def test_a_sink_takes_where_to_and_what_makes_it_happen_once() -> None:
    options = sink(topic="a", create="false", txnAppId="app", txnVersion="0")
    assert (options.topic, options.create, options.app_id, options.version) == ("a", False, "app", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "no/slash"}, "^topic: a name is"),
        ({"create": "maybe"}, "^create must be one of true, false, got 'maybe'"),
        ({"txnAppId": "app"}, "txnAppId and txnVersion go together"),
        ({"txnVersion": "5"}, "txnAppId and txnVersion go together"),
        ({"txnAppId": "app", "txnVersion": "v1"}, "^txnVersion must be a whole number of 0 or more, got 'v1'"),
        ({"url": "nowhere"}, "^url must be"),
        ({"url": " "}, "option url is required"),
    ],
)
def test_a_wrong_option_of_a_sink_is_refused_by_its_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        sink(**options)
