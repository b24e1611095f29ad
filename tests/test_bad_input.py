"""Whatever a caller sends, it gets a typed error that names the field, and nothing has changed (sections 1 to 6)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.helpers import Machine, datas, snapshot
from topics.core.errors import TopicsError
from topics.log import Log

HUGE = 10**5000
LONG = "x" * 100_000


NO_TEXT: list[Any] = [True, 0, 1.5, b"x", ["x"], {"x": 1}, object(), HUGE]
NO_NUMBER: list[Any] = [True, False, 1.0, 1.5, float("nan"), float("inf"), "1", b"1", [1], {}, object()]
NO_FLAG: list[Any] = [None, 0, 1, "true", b"", [], {}, 1.0]
NO_NAME: list[Any] = [
    *(None, *NO_TEXT),
    *("", " ", ".a", "-a", "_a", ":a", "a b", "a/b", "../a", "a\x00", "a\n", "é", "a>b", "\ud800", "x" * 256, LONG),
]
BEYOND: list[Any] = [-1, -(2**64), 2**53, 2**63, 2**64, HUGE, -HUGE]
TOO_LOW: list[Any] = [-1, -(2**64), -HUGE]

Call = Callable[[Log], object]
Case = tuple[str, Call, str]


def label(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= HUGE:
        return "huge"
    if isinstance(value, str) and len(value) > 50:
        return f"text of {len(value)}"
    return "object" if type(value) is object else f"{type(value).__name__} {ascii(value)[:30]}"


def cases(method: str, field: str, call: Callable[[Log, Any], object], values: Iterable[Any]) -> list[Case]:
    return [(f"{method} {field}={label(value)}", lambda log, v=value: call(log, v), field) for value in values]  # type: ignore[misc]  # a lambda with a default


def record(**fields: Any) -> list[dict[str, Any]]:
    return [{"data": 1, **fields}]


def names() -> list[Case]:
    calls: dict[str, Callable[[Log, Any], object]] = {
        "put": lambda log, v: log.put(v),
        "get": lambda log, v: log.get(v),
        "drop": lambda log, v: log.drop(v),
        "append": lambda log, v: log.append(v, record()),
        "append_json": lambda log, v: log.append_json(v, b'{"records":[{"data":1}]}'),
        "diff": lambda log, v: log.diff(v),
        "read": lambda log, v: list(log.read(v)),
        "seek": lambda log, v: log.seek(v, 0),
        "delete": lambda log, v: log.delete(v, before_seq=1),
        "deletes": lambda log, v: log.deletes(v),
        "spool": lambda log, v: log.spool("open", v, "p", 1, record()),
    }
    return [case for method, call in calls.items() for case in cases(method, "topic", call, NO_NAME)]


COUNTS = (
    *("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms"),
    *("max_deliveries", "max_delivery_attempts", "max_ack_holes", "max_in_flight"),
)
FLAGS = ("durable", "auto_priority", "auto_create", "dedupe_node", "ordering_required")
CHOICES = ("type", "discard", "durability", "dlq_strategy")


def configs() -> list[Case]:
    fields: dict[str, list[Any]] = {
        **{name: [*NO_NUMBER, None, *BEYOND] for name in COUNTS},
        "seq_base": [*NO_NUMBER, None, *BEYOND, 0],
        "priority": [*NO_NUMBER, 2**53, -(2**53), HUGE, -HUGE],
        **{name: [*NO_NUMBER, None] for name in ("lease_ms", "visibility_timeout_ms", "claim_jitter_ms")},
        **dict.fromkeys(FLAGS, NO_FLAG),
        "leases_durable": NO_FLAG[1:],
        **{name: [*NO_TEXT, None, "", "other", "\ud800", LONG] for name in CHOICES},
        "dead_letter": NO_NAME[1:],
    }
    found: list[Case] = []
    for name, values in fields.items():
        found += cases("put", name, lambda log, v, name=name: log.put("new", {name: v}), values)  # type: ignore[misc]
        found += cases("upsert", name, lambda log, v, name=name: log.put("t", {name: v}), values)  # type: ignore[misc]
        found += cases(
            "append config",
            name,
            lambda log, v, name=name: log.append("new", record(), config={name: v}),  # type: ignore[misc]
            [value for value in values if not isinstance(value, float | bytes) and type(value) is not object],
        )
    found += cases("put", "config", lambda log, v: log.put("new", v), [True, 5, 1.5, "x", b"x", ["x"], []])
    found += cases("append", "config", lambda log, v: log.append("new", record(), config=v), [True, 5, "x", ["x"]])
    return found


def writes() -> list[Case]:
    def field(name: str) -> Callable[[Log, Any], object]:
        return lambda log, v: log.append("t", record(), **{name: v})

    def of_record(name: str) -> Callable[[Log, Any], object]:
        return lambda log, v: log.append("t", record(**{name: v}))

    def strict(log: Log, value: Any) -> object:
        return log.append("t", record(client_seq=value), client_id="c")

    return [
        *cases("append", "records", lambda log, v: log.append("t", v), [None, True, 5, "x", b"x", {}, []]),
        *cases("append", "records[0]", lambda log, v: log.append("t", [v]), [None, True, 5, "x", [], {}]),
        *cases("append", "node", field("node"), [*NO_TEXT, "\ud800", "n" * 129, LONG]),
        *cases("append", "idempotency_key", field("idempotency_key"), [*NO_TEXT, "", "\ud800", "k" * 257, LONG]),
        *cases("append", "client_id", field("client_id"), [*NO_TEXT, "", "\ud800", "c" * 257]),
        *cases("append", "create", field("create"), NO_FLAG),
        *cases("append", "data", of_record("data"), [object(), b"x", "\ud800", float("nan"), [float("inf")]]),
        *cases("append", "records[0].tag", of_record("tag"), [*NO_TEXT, "\ud800", "t" * 257, LONG]),
        *cases("append", "records[0].node", of_record("node"), [*NO_TEXT, "\ud800", "n" * 129, LONG]),
        *cases(
            "append",
            "records[0].meta",
            of_record("meta"),
            [*(True, 5, 1.5, "x", b"x", [], ["x"]), {"k": 1}, {"k": None}, {"$k": "v"}, {"k": "\ud800"}],
        ),
        *cases("append", "records[0].client_seq", strict, [*NO_NUMBER, -1, 2**63, 2**64, HUGE]),
        *cases(
            "append",
            "hole",
            lambda log, v: log.append("t", [{"hole": v}]),
            [*NO_NUMBER, 0, *BEYOND],
        ),
        *cases("append", "reason", lambda log, v: log.append("t", [{"hole": 1, "reason": v}]), [*NO_TEXT, "", "crash"]),
        *cases("append_json", "body", lambda log, v: log.append_json("t", v), [None, True, 5, "x", "é", [], {}]),
    ]


def reads() -> list[Case]:
    def diff(name: str) -> Callable[[Log, Any], object]:
        return lambda log, v: log.diff("t", **{name: v})

    return [
        *cases("diff", "from_seq", diff("from_seq"), [*NO_NUMBER, None, *BEYOND]),
        *cases("diff", "to_seq", diff("to_seq"), [*NO_NUMBER, *BEYOND]),
        *cases("diff", "epoch", diff("epoch"), [*NO_NUMBER, *BEYOND]),
        *cases("diff", "limit", diff("limit"), [*NO_NUMBER, None, *TOO_LOW]),
        *cases("diff", "max_bytes", diff("max_bytes"), [*NO_NUMBER, *TOO_LOW]),
        *cases("diff", "wait_ms", diff("wait_ms"), [*NO_NUMBER, None, *TOO_LOW]),
        *cases("diff", "node", diff("node"), [True, False, 0, 5, 1.5, b"x", {"a": 1}, [1], ["a", None], [b"a"]]),
        *cases(
            "diff", "match", diff("match"), [*NO_TEXT, [], ["tag"], ["tag", "Eq", 1], ["tag", "Glob", "x"], "\ud800"]
        ),
        *cases("diff", "include_tags", diff("include_tags"), NO_FLAG),
        *cases("diff", "include_meta", diff("include_meta"), NO_FLAG),
        *cases("seek", "ts", lambda log, v: log.seek("t", v), [*NO_NUMBER, None, *BEYOND]),
        *cases("get", "touch", lambda log, v: log.get("t", touch=v), NO_FLAG),
        *cases("topics", "prefix", lambda log, v: log.topics(prefix=v), [None, *NO_TEXT]),
        *cases("topics", "page_size", lambda log, v: log.topics(page_size=v), [*NO_NUMBER, None, 0, *TOO_LOW]),
        *cases("topics", "cursor", lambda log, v: log.topics(cursor=v), [*NO_TEXT, "!", "é", "\ud800", LONG[:9999]]),
        *cases("deletes", "after", lambda log, v: log.deletes("t", v), [*NO_NUMBER, None, *BEYOND]),
    ]


def deletions() -> list[Case]:
    def both(name: str) -> Callable[[Log, Any], object]:
        return lambda log, v: log.delete("t", **{"before_seq": 1, "match": "x", name: v})

    return [
        *cases("delete", "before_seq", both("before_seq"), [*NO_NUMBER, -1, 2**53 + 1, 2**64, HUGE, -HUGE]),
        *cases(
            "delete",
            "match",
            both("match"),
            [*NO_TEXT, [], ["tag", "Eq"], ["tag", "Eq", 5], ["x", "Eq", "x"], ["tag", "Glob", "*x"], "\ud800"],
        ),
        *cases("delete", "purpose", both("purpose"), [None, *NO_TEXT, "", "ERASE", "\ud800"]),
        *cases("drop", "if_empty", lambda log, v: log.drop("t", if_empty=v), NO_FLAG),
    ]


def transactions() -> list[Case]:
    def client(client_id: Any, client_seq: Any) -> Call:
        return lambda log: log.commit("open", [{"part": "p", "records": {"t": 1}}], client_id, client_seq)

    no_id = [None, *NO_TEXT, "", "x" * 257, LONG]
    no_parts: list[Any] = [None, True, 5, 1.5, "x", b"x", {"p": 1}, [None], [5], ["p"], [{}], [{"part": "p"}]]
    return [
        *cases("spool", "txn", lambda log, v: log.spool(v, "t", "p", 0, record()), no_id),
        *cases("spool", "part", lambda log, v: log.spool("open", "t", v, 0, record()), no_id),
        *cases("spool", "chunk", lambda log, v: log.spool("open", "t", "p", v, record()), [*NO_NUMBER, None, *BEYOND]),
        *cases(
            "spool", "records", lambda log, v: log.spool("open", "t", "p", 1, v), [None, True, 5, "x", b"x", {}, []]
        ),
        *cases("commit", "txn", lambda log, v: log.commit(v, []), no_id),
        *cases("abort", "txn", lambda log, v: log.abort(v), no_id),
        *cases("txn", "txn", lambda log, v: log.txn(v), no_id),
        *cases("commit", "parts", lambda log, v: log.commit("open", v), no_parts),
        *cases(
            "commit",
            "parts",
            lambda log, v: log.commit("open", [{"part": "p", "records": v}]),
            [None, 5, "t", [], {"t": "1"}, {"t": 1.5}, {"t": True}, {1: 1}],
        ),
        *cases("commit", "client_id", lambda log, v: client(v, 1)(log), [*NO_TEXT, "", "\ud800", "c" * 257]),
        *cases("commit", "client_seq", lambda log, v: client("c", v)(log), [*NO_NUMBER, -1, 2**63, 2**64, HUGE]),
    ]


JARGON = re.compile(
    r"NoneType|has no attribute|not supported between|unhashable|not iterable|codec can't|takes \d+ positional"
    r"|set_int_max_str_digits|Traceback"
)


ALL = [*names(), *configs(), *writes(), *reads(), *deletions(), *transactions()]


@pytest.mark.parametrize(("call", "field"), [pytest.param(call, field, id=name) for name, call, field in ALL])
def test_bad_input_is_refused_by_name_and_changes_nothing(call: Call, field: str) -> None:
    machine = Machine()
    log = machine.log
    log.append("t", [{"data": "kept", "tag": "a", "node": "n"}])
    log.spool("open", "t", "p", 0, [{"data": "spooled"}])
    before = snapshot(log), log.txn("open")
    with pytest.raises(TopicsError) as refused:
        call(log)
    message = refused.value.message
    assert refused.value.code == "invalid_request"
    assert field.rsplit(".", 1)[-1] in message
    assert not JARGON.search(message)
    assert len(message) < 1000
    message.encode()
    assert (snapshot(log), log.txn("open")) == before
    log.commit("open", [{"part": "p", "records": {"t": 1}}])
    assert datas(machine.restart("kill").diff("t")) == ["kept", "spooled"]


# Things that are right though they look wrong


@pytest.mark.parametrize("name", ["a", "0", "a.b", "A" * 255, "con", "null", "a..b", "a:b-c_d"])
def test_an_unusual_name_is_a_name(name: str) -> None:
    log = Machine().log
    assert log.append(name, record()).seqs == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"node": None},
        {"idempotency_key": None},
        {"client_id": None},
        {"config": None},
        {"create": True},
        {"disable_backpressure": True},
    ],
)
def test_optional_fields_may_be_none(fields: dict[str, Any]) -> None:
    assert Machine().log.append("t", record(), **fields).seqs == [1]


@pytest.mark.parametrize(
    "query",
    [
        {"to_seq": None},
        {"node": None},
        {"node": ()},
        {"match": None},
        {"max_bytes": None},
        {"epoch": None},
        {"limit": HUGE},
        {"max_bytes": HUGE},
        {"from_seq": 0, "to_seq": 2**53 - 1},
    ],
)
def test_optional_fields_of_a_read_may_be_left_open(query: dict[str, Any]) -> None:
    log = Machine().log
    log.append("t", [*record(), *record(), *record()])
    assert log.diff("t", **query).count == 3
    assert len(list(log.read("t", **query))) == 3


# Errors as values


def test_an_error_carries_code_status_message_and_detail() -> None:
    log = Machine().log
    log.put("t", cap_records=1, discard="reject")
    log.append("t", record())
    with pytest.raises(TopicsError) as refused:
        log.append("t", record())
    error = refused.value
    assert (error.code, error.status, error.detail) == ("topic_full", 422, {"topic": "t"})
    assert str(error) == error.message


@pytest.mark.parametrize(
    ("call", "code", "status"),
    [
        (lambda log: log.put("!"), "invalid_request", 400),
        (lambda log: log.append("t", [{"data": 1}] * 10_001), "batch_too_large", 400),
        (lambda log: log.append("t", [{"data": "x" * (1 << 20)}]), "record_too_large", 400),
        (lambda log: log.get("ghost"), "topic_not_found", 404),
        (lambda log: log.txn("ghost"), "txn_not_found", 404),
        (lambda log: log.put("t", type="queue"), "topic_exists_incompatible", 409),
        (lambda log: log.drop("t", if_empty=True), "topic_not_empty", 409),
        (lambda log: log.append("t", [{"data": 1, "client_seq": 1}], client_id="c"), "idempotency_conflict", 409),
        (lambda log: log.commit("open", [{"part": "q", "records": {"t": 1}}]), "txn_incomplete", 409),
        (lambda log: log.append_json("t", b" " * ((64 << 20) + 1)), "payload_too_large", 413),
    ],
)
def test_every_refusal_has_its_code(call: Call, code: str, status: int) -> None:
    log = Machine().log
    log.append("t", [{"data": 1, "client_seq": 1}], client_id="c")
    log.spool("open", "t", "p", 0, record())
    with pytest.raises(TopicsError) as refused:
        call(log)
    assert (refused.value.code, refused.value.status) == (code, status)
