"""The options of a source and a sink, read from what a user wrote; a wrong one is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from topics.client.connection import Connection
from topics.core.errors import InvalidRequest
from topics.core.names import check_topic_name
from topics.core.selector import parse_selector

# A seq, or a word for one.
Position = int | Literal["earliest", "latest"]
OnLoss = Literal["emit", "fail", "ignore"]
MetaForm = Literal["json", "map"]
_RECORDS_PER_PARTITION = 500_000


class Server(msgspec.Struct, frozen=True):
    """Where the server is and how it is asked; travels to every task."""

    url: str
    key: str | None
    timeout_ms: int
    retry_ms: int

    def connect(self) -> Connection:
        return Connection(self.url, self.key, self.timeout_ms, self.retry_ms)


class Filter(msgspec.Struct, frozen=True):
    """What of a range is wanted, as the server understands it: records that are not, and only they, stay away."""

    node: tuple[str, ...] = ()
    match: str | tuple[str, ...] | None = None


class SourceOptions(msgspec.Struct, frozen=True):
    """`starting` and `ending` are the same for all topics, or a map; `starting_ts` is in milliseconds."""

    server: Server
    topics: tuple[str, ...]
    prefix: str | None
    starting: Position | dict[str, Position]
    starting_ts: int | None
    ending: Position | dict[str, Position]
    max_records: int | None
    records_per_partition: int
    filter: Filter
    on_loss: OnLoss
    meta: MetaForm
    push_filters: bool
    loss_topic: str | None = None


class SinkOptions(msgspec.Struct, frozen=True):
    """`topic` is where rows go that do not say so themselves; `app_id` and `version` make a batch write happen once."""

    server: Server
    topic: str | None
    create: bool
    app_id: str | None
    version: int | None


class _Options:
    """Spark hands names over in lower case; in messages they are written as in the documentation."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}

    def text(self, name: str) -> str | None:
        value = self._options.get(name.lower())
        return value if value is not None and value.strip() else None

    def has(self, name: str) -> bool:
        return name.lower() in self._options

    def word(self, name: str, *words: str) -> Any:
        """One of some words; the first is the default."""
        value = self.text(name) or words[0]
        if value not in words:
            raise InvalidRequest(f"{name} must be one of {', '.join(words)}, got {value!r:.100}")
        return value

    def number(self, name: str, default: Any, least: int) -> Any:
        text = self.text(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise InvalidRequest(f"{name} must be a whole number of {least} or more, got {text!r:.100}")
        return int(text)

    def json(self, name: str) -> Any:
        try:
            return json.loads(self.text(name) or "")
        except ValueError as error:
            raise InvalidRequest(f"{name} is not valid JSON: {error}") from None

    def is_json(self, name: str, bracket: str) -> bool:
        return (self.text(name) or "").lstrip().startswith(bracket)

    def positions(self, name: str, default: Position, *words: str) -> Position | dict[str, Position]:
        text = self.text(name)
        if text is None:
            return default
        if not self.is_json(name, "{"):
            return _position(name, int(text) if text.isascii() and text.isdigit() else text, words)
        return {topic: _position(f"{name}: {topic!r:.100}", seq, words) for topic, seq in self.json(name).items()}


def _position(field: str, value: Any, words: tuple[str, ...]) -> Position:
    if value in words or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value  # type: ignore[no-any-return]  # one of the words, or a seq
    raise InvalidRequest(f"{field} must be {', '.join(words)} or a seq, got {value!r:.100}")


def source_options(options: Mapping[str, str]) -> SourceOptions:
    given = _Options(options)
    topics, prefix = _topics(given)
    starting_ts = _starting_ts(given)
    if starting_ts is not None and given.text("startingSeq") is not None:
        raise InvalidRequest("startingSeq and startingTs exclude each other")
    return SourceOptions(
        server=_server(given),
        topics=topics,
        prefix=prefix,
        starting=given.positions("startingSeq", "earliest", "earliest", "latest"),
        starting_ts=starting_ts,
        ending=given.positions("endingSeq", "latest", "latest"),
        max_records=given.number("maxRecordsPerTrigger", None, 1),
        records_per_partition=given.number("recordsPerPartition", _RECORDS_PER_PARTITION, 1),
        filter=_filter(given),
        on_loss=given.word("onLoss", "emit", "fail", "ignore"),
        meta=given.word("meta", "json", "map"),
        push_filters=given.word("pushFilters", "false", "true") == "true",
        loss_topic=_loss_topic(given),
    )


def _loss_topic(given: _Options) -> str | None:
    name = given.text("lossTopic")
    return None if name is None else check_topic_name(name, "lossTopic")


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    given = _Options(options)
    topic = given.text("topic")
    if topic is not None:
        check_topic_name(topic)
    app_id, version = given.text("txnAppId"), given.number("txnVersion", None, 0)
    if (app_id is None) != (version is None):
        raise InvalidRequest("txnAppId and txnVersion go together")
    return SinkOptions(_server(given), topic, given.word("create", "true", "false") == "true", app_id, version)


def _server(given: _Options) -> Server:
    url = given.text("url")
    if url is None:
        raise InvalidRequest('the option url is required: .option("url", "http://127.0.0.1:4000")')
    server = Server(url, given.text("key"), given.number("timeoutMs", 60_000, 1), given.number("retryMs", 30_000, 0))
    # Refuses a malformed one; nothing is sent.
    server.connect()
    return server


def _topics(given: _Options) -> tuple[tuple[str, ...], str | None]:
    named = [name for name in ("topic", "topics", "topicPrefix") if given.has(name)]
    if len(named) != 1:
        shown = " and ".join(named) or "none"
        raise InvalidRequest(f"exactly one of the options topic, topics and topicPrefix is needed, got {shown}")
    text = given.text(named[0]) or ""
    if named[0] == "topicPrefix":
        return (), text
    names = [text] if named[0] == "topic" else [name.strip() for name in text.split(",")]
    for name in names:
        check_topic_name(name)
    if len(set(names)) != len(names):
        raise InvalidRequest(f"topics names a topic twice: {text!r:.300}")
    return tuple(sorted(names)), None


def _filter(given: _Options) -> Filter:
    node, match = given.text("node"), given.text("tagMatch")
    nodes = () if node is None else tuple(given.json("node")) if given.is_json("node", "[") else (node,)
    if not all(isinstance(each, str) for each in nodes):
        raise InvalidRequest(f"node must be a string or a JSON list of strings, got {node!r:.100}")
    selector = tuple(given.json("tagMatch")) if given.is_json("tagMatch", "[") else match
    if selector is not None:
        parse_selector(selector, "tagMatch")
    return Filter(nodes, selector)


def _starting_ts(given: _Options) -> int | None:
    text = given.text("startingTs")
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"startingTs must be milliseconds or an ISO 8601 time, got {text!r:.100}") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
