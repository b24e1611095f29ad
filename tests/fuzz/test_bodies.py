"""Bodies at random, good and broken: a documented status always, nothing changed by a refusal, every byte kept."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.serving import DEADLINE, Running
from topics.http.openapi import document

ARROW = "application/vnd.apache.arrow.stream"
_numbers = itertools.count()


class Caller:
    """One kept-alive connection, and the document that every answer is held against."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        self._paths: dict[str, Any] = msgspec.json.decode(document())["paths"]

    def close(self) -> None:
        self._connection.close()

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] = b"",
        kind: str = "application/json",
        **headers: str,
    ) -> tuple[int, bytes]:
        sent = {"content-type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
        self._connection.request(method, path, body, sent)
        answer = self._connection.getresponse()
        status, data = answer.status, answer.read()
        operation = self._paths[re.sub(r"/(topics|txns)/[^/?]+", _named, path).partition("?")[0]][method.lower()]
        assert str(status) in operation["responses"], (status, data)
        assert status < 500, (status, data)
        if status >= 400:
            error = msgspec.json.decode(data)["error"]
            assert re.fullmatch(r"[a-z_]+", error["code"]), error
            assert error["message"], error
        return status, data

    def json(self, method: str, path: str, body: bytes = b"") -> Any:
        status, data = self.call(method, path, body)
        assert status < 300, (status, data)
        return msgspec.json.decode(data)

    def state(self, topic: str) -> tuple[Any, bytes, Any, Any]:
        """Everything that a refused request must leave as it was."""
        path = f"/v0/topics/{topic}"
        status, data = self.call("GET", f"{path}?touch=false")
        if status == 404:
            return None, b"", None, None
        seen = msgspec.json.decode(data)
        for moving in ("performance", "effective_priority", "last_read_ts"):
            del seen[moving]
        listed = [each["topic"] for each in self.json("GET", "/v0/topics?page_size=1000&prefix=fuzz")["topics"]]
        _, records = self.call("POST", f"{path}/diff", b'{"include_tags":true,"limit":1000,"max_bytes":8000000}')
        deletes = self.json("GET", f"{path}/deletes")["deletes"]
        return seen, re.sub(rb',"performance":\{[^}]*\}', b"", records), deletes, listed


def _named(match: re.Match[str]) -> str:
    return f"/{match[1]}/" + ("{topic}" if match[1] == "topics" else "{id}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = tmp_path_factory.mktemp("bodies")
    with Running(str(directory)) as running:
        yield running


@pytest.fixture(scope="module")
def caller(server: Running) -> Iterator[Caller]:
    with contextlib.closing(Caller(server.port)) as caller:
        for topic in ("fuzz-write", "fuzz-diff", "fuzz-delete", "fuzz-put"):
            caller.json("PUT", f"/v0/topics/{topic}")
            records = [{"data": n, "tag": f"tag{n}", "node": "n", "meta": {"k": "v"}} for n in range(5)]
            caller.json("POST", f"/v0/topics/{topic}", msgspec.json.encode({"records": records}))
        yield caller


# -- JSON of all sorts -------------------------------------------------------------------------------------------------

_SPACE = st.sampled_from(["", "", "", " ", "\n", "\r\n", "\t ", "  \n"])
_DIGITS = st.text("0123456789", min_size=1, max_size=30)
_NUMBERS = st.builds(
    lambda sign, whole, part, power: sign + (whole.lstrip("0") or "0") + part + power,
    st.sampled_from(["", "-"]),
    _DIGITS,
    st.one_of(st.just(""), _DIGITS.map(lambda digits: "." + digits)),
    st.one_of(
        st.just(""), st.builds(lambda e, digits: e + digits[:4], st.sampled_from(["e", "E+", "e-", "E"]), _DIGITS)
    ),
)
_CHARACTERS = st.one_of(
    st.characters(exclude_characters='"\\', exclude_categories=["Cs"], min_codepoint=32),
    st.sampled_from([r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u0000", r"\uD83D\ude00", r"\u00e9"]),
)
_STRINGS = st.lists(_CHARACTERS, max_size=12).map(lambda characters: '"' + "".join(characters) + '"')


@st.composite
def _arrays(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    inside = draw(st.lists(items, max_size=5))
    return "[" + ",".join([draw(_SPACE) + item + draw(_SPACE) for item in inside]) + "]"


@st.composite
def _objects(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    """With keys in any order, the same one twice among them."""
    inside = draw(st.lists(st.tuples(_STRINGS, items), max_size=5))
    pairs = [draw(_SPACE) + key + draw(_SPACE) + ":" + draw(_SPACE) + item + draw(_SPACE) for key, item in inside]
    return "{" + ",".join(pairs) + "}"


JSON = st.recursive(
    st.one_of(st.sampled_from(["null", "true", "false"]), _NUMBERS, _STRINGS),
    lambda items: st.one_of(_arrays(items), _objects(items)),
    max_leaves=20,
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31, 2**53 - 1, 2**53, 2**63, 2**64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["tag1", "tag*", "*", "a*b*", "", "n", "x" * 300, "$x", "disk", "queue", "reject", "source_trim"]),
)
VALUES = st.recursive(
    _LEAVES,
    lambda items: st.one_of(st.lists(items, max_size=4), st.dictionaries(st.text(max_size=5), items, max_size=4)),
    max_leaves=8,
)


def fields(*names: str, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """A body with some of these fields, of any type."""
    options = {**dict.fromkeys(names, VALUES), **special}
    return st.fixed_dictionaries({}, optional=options).map(msgspec.json.encode)


@st.composite
def broken(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """A body with a byte or two wrong, cut, or followed by something."""
    body = bytearray(draw(bodies))
    at = draw(st.integers(0, len(body) - 1))
    kind = draw(st.sampled_from(["cut", "change", "insert", "behind", "before"]))
    if kind == "cut":
        del body[at:]
    elif kind == "change":
        body[at] = draw(st.integers(0, 255))
    elif kind == "insert":
        body[at:at] = draw(
            st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\0", b"\\ud800", b"NaN", b",", b"}", b"[" * 600])
        )
    elif kind == "behind":
        body += draw(st.sampled_from([b"x", b"{}", b"\0", b"\xef\xbb\xbf"]))
    else:
        body[:0] = draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"x", b"["]))
    return bytes(body)


SELECTORS = st.one_of(
    VALUES,
    st.sampled_from(
        ["tag1", ["tag", "Eq", "tag1"], ["tag", "Glob", "tag*"], ["tag", "Glob", "*"], ["tag", "Glob", "a*b*"]]
    ),
)
RECORDS = st.one_of(
    VALUES,
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "data": VALUES,
                "tag": VALUES,
                "node": VALUES,
                "meta": st.one_of(VALUES, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)),
                "client_seq": VALUES,
                "hole": st.one_of(VALUES, st.integers(1, 100)),
                "reason": VALUES,
            },
        ),
        max_size=4,
    ),
)
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("ttl_ms", "cap_records", "cap_bytes", "seq_base", "priority", "idempotency_window_ms"), _LEAVES
        ),
        **dict.fromkeys(("lease_ms", "visibility_timeout_ms", "claim_jitter_ms", "max_deliveries"), _LEAVES),
        **dict.fromkeys(("max_delivery_attempts", "max_ack_holes", "max_in_flight", "leases_durable"), _LEAVES),
        **dict.fromkeys(("durable", "auto_priority", "auto_create", "dedupe_node", "ordering_required"), _LEAVES),
        "type": st.sampled_from(["log", "queue", "x", None]),
        "discard": st.sampled_from(["old", "reject", 1]),
        "durability": st.sampled_from(["ephemeral", "memory", "disk", "fsync", "none"]),
        "dead_letter": st.sampled_from(["fuzz-dead", None, "", "a/b", 5]),
        "dlq_strategy": st.sampled_from(["skip", "block", "block_and_dlq", 0]),
        "unknown": VALUES,
    },
)
WRITES = fields("node", "idempotency_key", "client_id", "create", "config", "disable_backpressure", records=RECORDS)
PUTS = st.one_of(CONFIG.map(msgspec.json.encode), VALUES.map(msgspec.json.encode))
DIFFS = fields(
    *("from_seq", "to_seq", "limit", "node", "include_tags", "include_meta", "max_bytes", "epoch"),
    match=SELECTORS,
    wait_ms=st.one_of(st.integers(-5, 5), st.none(), st.text(max_size=3)),
)
DELETES = fields("before_seq", "purpose", match=SELECTORS)
COMMITS = fields(
    "client_id",
    "client_seq",
    parts=st.one_of(
        VALUES,
        st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "part": st.one_of(st.sampled_from(["p", "q"]), VALUES),
                    "records": st.one_of(
                        VALUES,
                        st.dictionaries(
                            st.sampled_from(["fuzz-txn", "fuzz-no", "a/b"]), st.integers(-1, 3), max_size=2
                        ),
                    ),
                },
            ),
            max_size=3,
        ),
    ),
)
HUGE = b"9" * 5000


def any_body(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(bodies, broken(bodies), st.binary(max_size=50))


# -- whatever the body is: a documented answer, and a refusal changes nothing ------------------------------------------


def check(caller: Caller, topic: str, method: str, path: str, body: bytes) -> int:
    before = caller.state(topic)
    status, data = caller.call(method, path, body)
    if status >= 400:
        assert caller.state(topic) == before, (status, data)
    return status


@given(body=any_body(WRITES))
@example(body=b'{"records":[{"data":1,"client_seq":%b}],"client_id":"c"}' % HUGE)
@example(body=b'{"records":[{"hole":%b}]}' % HUGE)
@example(body=b'{"records":[{"hole":9007199254740991}]}')
@example(body=b'{"records":[{"data":1}],"config":{"ttl_ms":%b}}' % HUGE)
@example(body=b'{"records":[{"data":%b}]}' % (b"[" * 100_000))
@example(body=b'{"records":%b}' % (b"[" * 100_000))
@example(body=b"[" * 1_000_000)
@example(body=b'{"x":' * 100_000)
@settings(max_examples=250)
def test_a_write_of_anything(caller: Caller, body: bytes) -> None:
    topic = f"fuzz-write-{next(_numbers)}"
    check(caller, "fuzz-write", "POST", "/v0/topics/fuzz-write", body)
    if check(caller, topic, "POST", f"/v0/topics/{topic}", body) < 300:
        caller.json("DELETE", f"/v0/topics/{topic}")


@given(body=any_body(PUTS))
@example(body=b'{"priority":%b}' % HUGE)
@example(body=b'{"lease_ms":%b}' % HUGE)
@example(body=b'{"seq_base":9007199254740991}')
@settings(max_examples=250)
def test_a_put_of_anything(caller: Caller, body: bytes) -> None:
    topic = f"fuzz-put-{next(_numbers)}"
    check(caller, "fuzz-put", "PUT", "/v0/topics/fuzz-put", body)
    if check(caller, topic, "PUT", f"/v0/topics/{topic}", body) < 300:
        # What was taken is in force: it can be read back, written to and deleted.
        caller.json("GET", f"/v0/topics/{topic}")
        caller.call("POST", f"/v0/topics/{topic}", b'{"records":[{"data":1},{"data":2}]}')
        caller.json("POST", f"/v0/topics/{topic}/diff")
        caller.json("DELETE", f"/v0/topics/{topic}")


@given(body=any_body(DIFFS))
@example(body=b'{"limit":%b}' % HUGE)
@example(body=b'{"from_seq":%b}' % HUGE)
@example(body=b'{"max_bytes":%b,"wait_ms":1}' % HUGE)
@settings(max_examples=250)
def test_a_diff_of_anything(caller: Caller, body: bytes) -> None:
    before = caller.state("fuzz-diff")
    status, _ = caller.call("POST", "/v0/topics/fuzz-diff/diff", body)
    as_arrow, stream = caller.call("POST", "/v0/topics/fuzz-diff/diff", body, accept=ARROW)
    assert as_arrow == status
    if status == 200:
        pa.ipc.open_stream(stream).read_all().validate(full=True)
    assert caller.state("fuzz-diff") == before


@given(body=any_body(DELETES))
@example(body=b'{"before_seq":%b}' % HUGE)
@settings(max_examples=250)
def test_a_delete_of_anything(caller: Caller, body: bytes) -> None:
    check(caller, "fuzz-delete", "POST", "/v0/topics/fuzz-delete/delete", body)


@given(body=any_body(COMMITS))
@example(body=b'{"parts":[],"client_id":"c","client_seq":%b}' % HUGE)
@example(body=b'{"parts":[{"part":"p","records":{"fuzz-txn":%b}}]}' % HUGE)
@settings(max_examples=250)
def test_a_commit_of_anything(caller: Caller, body: bytes) -> None:
    txn = f"txn-{next(_numbers)}"
    caller.json("POST", f"/v0/topics/fuzz-txn?txn={txn}&part=p&chunk=0", b'{"records":[{"data":1},{"data":2}]}')
    before = caller.state("fuzz-txn")
    spooled = caller.json("GET", f"/v0/txns/{txn}")
    status, data = caller.call("POST", f"/v0/txns/{txn}/commit", body)
    if status >= 400:
        assert caller.state("fuzz-txn") == before, (status, data)
        open_still = caller.json("GET", f"/v0/txns/{txn}")
        assert (open_still["parts"], open_still["bytes"]) == (spooled["parts"], spooled["bytes"])
        caller.json("POST", f"/v0/txns/{txn}/abort")


@given(
    query=st.lists(
        st.tuples(
            st.sampled_from(
                ["txn", "part", "chunk", "return_seqs", "touch", "ts", "after", "if_empty", "page_size", "cursor"]
            ),
            st.one_of(
                st.sampled_from(
                    ["", "0", "1", "true", "false", "-1", "1e3", "%00", "%ff", "%ED%A0%80", "+", "%zz", "a" * 300]
                ),
                st.integers(0, 10**22).map(str),
            ),
        ),
        max_size=4,
    ),
    where=st.sampled_from(
        [
            ("POST", "/v0/topics/fuzz-query"),
            ("GET", "/v0/topics/fuzz-query"),
            ("GET", "/v0/topics/fuzz-query/seek"),
            ("GET", "/v0/topics/fuzz-query/deletes"),
            ("DELETE", "/v0/topics/fuzz-query"),
            ("GET", "/v0/topics"),
        ]
    ),
)
@settings(max_examples=250)
def test_a_query_of_anything(caller: Caller, query: list[tuple[str, str]], where: tuple[str, str]) -> None:
    caller.json("POST", "/v0/topics/fuzz-query", b'{"records":[{"data":1}]}')
    before = caller.state("fuzz-query")
    method, path = where
    text = "&".join([f"{name}={value}" for name, value in query])
    body = b'{"records":[{"data":1}]}' if method == "POST" else b""
    status, data = caller.call(method, f"{path}?{text}" if text else path, body)
    if status >= 400:
        assert caller.state("fuzz-query") == before, (status, data)


# -- valid writes come back byte for byte ------------------------------------------------------------------------------

_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=0, max_size=20)
_METAS = st.dictionaries(_NAMES.filter(lambda key: not key.startswith("$")), _NAMES, max_size=4)


@st.composite
def _records(draw: st.DrawFn) -> tuple[str, str, str | None, str | None, dict[str, str] | None]:
    """A record as text, its data, and the rest of it."""
    data = draw(JSON)
    tag, node, meta = draw(st.none() | _NAMES), draw(st.none() | _NAMES), draw(st.none() | _METAS)
    sent = [f'"data"{draw(_SPACE)}:{draw(_SPACE)}{data}{draw(_SPACE)}']
    for name, value in (("tag", tag), ("node", node), ("meta", meta)):
        if value is not None:
            sent.append(f'{draw(_SPACE)}"{name}"{draw(_SPACE)}:{draw(_SPACE)}' + msgspec.json.encode(value).decode())
    return "{" + ",".join(draw(st.permutations(sent))) + "}", data, tag, node, meta


class _Read(msgspec.Struct, rename={"seq": "$seq", "tag": "$tag", "node": "$node"}):
    seq: int
    data: msgspec.Raw
    tag: str | None = None
    node: str | None = None
    meta: msgspec.Raw = msgspec.Raw()


class _Diff(msgspec.Struct):
    records: list[_Read]


@given(
    records=st.lists(_records(), min_size=1, max_size=5),
    way=st.sampled_from(["plain", "gzip", "chunked", "txn"]),
)
@settings(max_examples=150)
def test_valid_writes_round_trip_byte_for_byte(
    caller: Caller,
    records: list[tuple[str, str, str | None, str | None, dict[str, str] | None]],
    way: str,
) -> None:
    topic = f"/v0/topics/fuzz-trip-{next(_numbers)}"
    body = b'{"records":[%b]}' % ",".join([record[0] for record in records]).encode()
    if way == "gzip":
        status, data = caller.call("POST", topic, gzip.compress(body), content_encoding="gzip")
    elif way == "txn":
        number = next(_numbers)
        caller.json("POST", f"{topic}?txn=trip{number}&part=p&chunk=0", body)
        parts = [{"part": "p", "records": {topic.rpartition("/")[2]: len(records)}}]
        status, data = caller.call("POST", f"/v0/txns/trip{number}/commit", msgspec.json.encode({"parts": parts}))
    elif way == "chunked":
        status, data = caller.call("POST", topic, iter([body[at : at + 7] for at in range(0, len(body), 7)]))
    else:
        status, data = caller.call("POST", topic, body)
    assert status in (200, 201), data
    _, answer = caller.call("POST", f"{topic}/diff", b'{"include_tags":true}')
    read = msgspec.json.decode(answer, type=_Diff).records
    assert [record.seq for record in read] == list(range(1, len(records) + 1))
    for (_, sent, tag, node, meta), back in zip(records, read, strict=True):
        assert bytes(back.data) == sent.encode()
        assert (back.tag, back.node) == (tag, node)
        assert bytes(back.meta) == (b"" if meta is None else msgspec.json.encode(meta))
    _, stream = caller.call("POST", f"{topic}/diff", b"{}", accept=ARROW)
    columns = pa.ipc.open_stream(stream).read_all()
    columns.validate(full=True)
    assert columns.column("data").to_pylist() == [record[1] for record in records]
    caller.json("DELETE", topic)


# -- Arrow bodies ------------------------------------------------------------------------------------------------------


def arrow_stream(batches: int = 2, compression: str | None = None) -> bytes:
    schema = pa.schema([pa.field(name, pa.string()) for name in ("data", "tag", "node", "meta")])
    columns = [['{"a":1}', "[2]", '"\u00e9"'], ["x", None, "y"], [None, "n", None], ['{"k":"v"}', None, None]]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for _ in range(batches):
            writer.write_batch(pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=schema))
    return sink.getvalue()


def with_columns(columns: list[tuple[str, Any]]) -> bytes:
    sink = io.BytesIO()
    schema = pa.schema([pa.field(name, column.type) for name, column in columns])
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column for _, column in columns], schema=schema))
    return sink.getvalue()


@pytest.mark.parametrize(
    "columns",
    [
        [("data", pa.array(["1"])), ("data", pa.array(["2"]))],
        [("data", pa.array(["1"])), ("tag", pa.array(["1"])), ("tag", pa.array(["2"]))],
        [("data", pa.array([1]))],
        [("data", pa.array([b"1"]))],
        [("data", pa.array(["1"]).dictionary_encode())],
        [("data", pa.array([None], pa.string()))],
        [("data", pa.array([None], pa.null()))],
        [("data", pa.array([], pa.string()))],
        [("data", pa.array([""]))],
        [("data", pa.array(["{"]))],
        [("data", pa.array(["[" * 5000]))],
        [("data", pa.array(["1"])), ("meta", pa.array(["[]"]))],
        [("data", pa.array(["1"])), ("meta", pa.array(['{"$a":"b"}']))],
        [("data", pa.array(["1"])), ("tag", pa.array(["x" * 300]))],
        [("tag", pa.array(["1"]))],
    ],
)
def test_arrow_columns_that_are_no_records_are_refused(caller: Caller, columns: list[tuple[str, Any]]) -> None:
    before = caller.state("fuzz-write")
    status, _ = caller.call("POST", "/v0/topics/fuzz-write", with_columns(columns), ARROW)
    assert status == 400
    assert caller.state("fuzz-write") == before


@st.composite
def _bent(draw: st.DrawFn) -> bytes:
    body = bytearray(arrow_stream(compression=draw(st.sampled_from([None, None, "lz4", "zstd"]))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body) - 1))
        value = draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 127, 128, 255])))
        body[at] = value
    return bytes(body[: draw(st.one_of(st.just(len(body)), st.integers(0, len(body))))])


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Caller, subprocess.Popen[bytes]]]:
    """A server in a process of its own: bytes that pyarrow trusts could end it, and with it these tests."""
    directory: Path = tmp_path_factory.mktemp("arrow")
    command = [sys.executable, "-m", "topics", "serve", "--port", "0", "--data-dir", str(directory / "data")]
    errors = directory / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ})
    assert process.stdout is not None
    try:
        found = re.search(rb"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None
        with contextlib.closing(Caller(int(found[1]))) as caller:
            yield caller, process
    finally:
        process.terminate()
        assert process.wait(DEADLINE) == 0
        process.stdout.close()
    assert b"Traceback" not in errors.read_bytes(), errors.read_text()


@given(body=_bent())
@settings(max_examples=400)
def test_a_bent_arrow_stream_is_refused_or_read_and_never_ends_the_server(
    child: tuple[Caller, subprocess.Popen[bytes]], body: bytes
) -> None:
    caller, process = child
    try:
        status, data = caller.call("POST", "/v0/topics/fuzz-arrow", body, ARROW)
    except (ConnectionError, http.client.HTTPException):
        assert process.poll() is None, f"the server died: {process.wait()}"
        raise
    if status < 300:
        seqs = msgspec.json.decode(data)["seqs"]
        read = caller.json("POST", "/v0/topics/fuzz-arrow/diff", b'{"from_seq":%d}' % (seqs[0] - 1))
        assert len(read["records"]) == len(seqs)
