"""`data` and `meta` come back byte for byte, and what is no JSON is refused (section 1)."""

from __future__ import annotations

import sys
from decimal import Decimal

import msgspec
import pytest

from tests.helpers import KEEPING, Ending, Machine
from topics.core.errors import InvalidRequest, RecordTooLarge
from topics.log import Log

MIB = 1 << 20


def nested(levels: int, opening: bytes = b"[", closing: bytes = b"]", inside: bytes = b"") -> bytes:
    return opening * levels + inside + closing * levels


HOSTILE: dict[str, bytes] = {
    "null": b"null",
    "false": b"false",
    "zero": b"0",
    "minus zero": b"-0",
    "a float that is whole": b"1.0",
    "trailing zeros": b"0.1000",
    "an infinite number": b"1e400",
    "a vanishing number": b"-1E-400",
    "a signed exponent": b"1e+05",
    "more digits than any machine has": b"123456789012345678901234567890.123456789012345678901234567890",
    "more digits than Python converts": b"9" * 5000,
    "2^53 + 1": b"9007199254740993",
    "2^64": b"18446744073709551616",
    "an empty string": b'""',
    "an empty object": b"{}",
    "an empty array with space": b"[ ]",
    "duplicate keys": b'{"a":1,"a":2,"a":1}',
    "keys out of order": b'{"b":1,"a":2,"":3}',
    "all short escapes": rb'"\"\\\/\b\f\n\r\t"',
    "escapes of plain characters": rb'"\u0041\u002f\u007F"',
    "upper and lower case hex": rb'"\u00e9\u00E9"',
    "NUL as an escape": rb'"\u0000"',
    "NUL in a key": rb'{"\u0000":0}',
    "a surrogate pair": rb'"\ud83d\ude00 \uD83D\uDE00"',
    "noncharacters": rb'"\uffff\ufffe"',
    "white space everywhere": b'{ \t"a" \r\n: [ 1 ,\n\n2 ] ,\t"b"\n:{ } }',
    "line breaks of every kind": b"[\r1,\n2,\r\n3]",
    "DEL": b'"\x7f"',
    "unicode": '"é ñ 漢字 \U0001f600 \u2028\u2029\ufeff\u202e\u200d"'.encode(),
    "combining marks": '"e\u0301 é"'.encode(),
    "the last code point": '"\U0010ffff"'.encode(),
    "a record inside": b'{"$seq":1,"data":{"meta":{}},"$tag":"x"}',
    "braces in a string": b'"}]},{\\"data\\":1}"',
    "percent signs": b'"%d%s%%b"',
    "brackets in a string": b'"' + b"[" * 600 + b'"',
    "escaped quotes before brackets": b'["\\\\","\\"' + b"{" * 600 + b'"]',
    "512 arrays": nested(512),
    "512 objects": nested(512, b'{"a":', b"}", b"1"),
    "512 levels with neighbours": nested(512, b"[1,", b"]", b"2"),
    "512 levels twice": b"[" + nested(511) + b"," + nested(511) + b"]",
    "600 neighbours": b"[" + b",".join([b"[]"] * 600) + b"]",
    "a string of 1 MiB": b'"' + b"x" * (MIB - 2) + b'"',
    "escapes of 1 MiB": b'"' + rb"\u0000" * ((MIB - 2) // 6) + b'"',
}

REFUSED: dict[str, bytes] = {
    "nothing": b"",
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "minus Infinity": b"-Infinity",
    "a leading zero": b"01",
    "a leading plus": b"+1",
    "no digit before the point": b".5",
    "no digit behind the point": b"1.",
    "no exponent": b"1e",
    "hex": b"0x1F",
    "two numbers": b"1 2",
    "a trailing comma in an array": b"[1,]",
    "a trailing comma in an object": b'{"a":1,}',
    "only a comma": b"[,]",
    "a key without quotes": b"{a:1}",
    "a key without a value": b'{"a"}',
    "single quotes": b"'a'",
    "a comment": b"/* */1",
    "a word": b"nul",
    "a raw line break in a string": b'"a\nb"',
    "a raw tab in a string": b'"a\tb"',
    "a raw NUL in a string": b'"a\x00b"',
    "an unknown escape": rb'"\x41"',
    "a short unicode escape": rb'"\u41"',
    "a lone high surrogate": rb'"\ud800"',
    "a lone high surrogate before text": rb'"\ud800abcdef"',
    "a lone low surrogate": rb'"\udc00"',
    "two high surrogates": rb'"\ud83d\ud83d"',
    "surrogates the wrong way round": rb'"\ude00\ud83d"',
    "a high surrogate before a letter": rb'"\ud83d\u0041"',
    "a lone surrogate in a key": rb'{"\udfff":1}',
    "a lone surrogate deep inside": rb'[[[{"a":["\ud800"]}]]]',
    "a byte that is no UTF-8": b'"\xff"',
    "an overlong NUL": b'"\xc0\x80"',
    "an encoded surrogate": b'"\xed\xa0\x80"',
    "a code point beyond the last": b'"\xf4\x90\x80\x80"',
    "a cut sequence": b'"\xe2\x82"',
    "latin-1": '"é"'.encode("latin-1"),
    "a BOM": b"\xef\xbb\xbf1",
    "a no-break space": "\u00a01".encode(),
    "an open string": b'"abc',
    "an open array": b"[1",
    "one bracket too many": b"[1]]",
    "the wrong bracket": b"[1}",
    "513 arrays": nested(513),
    "513 objects": nested(513, b'{"a":', b"}", b"1"),
    "513 levels of both": b"[" + nested(512, b'{"a":', b"}", b"1") + b"]",
    "100000 levels": nested(100_000),
    "100000 levels that never close": b"[" * 100_000,
}


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def log(machine: Machine) -> Log:
    return machine.log


def append_raw(log: Log, data: bytes, meta: bytes | None = None) -> int:
    extra = b"" if meta is None else b',"meta":' + meta
    return log.append_json("t", b'{"records":[{"data":' + data + extra + b"}]}").first_seq


def read_raw(log: Log, seq: int) -> bytes:
    """The bytes between `"data":` and the end of the record."""
    text = log.diff("t", seq - 1, limit=1).records_json
    head = b'[{"$seq":%d,"$ts":1000000,"data":' % seq
    assert text.startswith(head)
    assert text.endswith(b"}]")
    return text[len(head) : -2]


@pytest.mark.parametrize("name", HOSTILE)
def test_data_comes_back_byte_for_byte(log: Log, name: str) -> None:
    assert read_raw(log, append_raw(log, HOSTILE[name])) == HOSTILE[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_json_is_refused(log: Log, name: str) -> None:
    with pytest.raises(InvalidRequest):
        append_raw(log, REFUSED[name])
    assert log.topics().topics == []


@pytest.mark.parametrize("ending", KEEPING)
def test_every_byte_survives_in_the_wal(machine: Machine, ending: Ending) -> None:
    written = {append_raw(machine.log, data): data for data in HOSTILE.values()}
    log = machine.restart(ending)
    for seq, data in written.items():
        assert read_raw(log, seq) == data


@pytest.mark.parametrize("ending", KEEPING)
def test_every_byte_survives_in_a_segment_file(machine: Machine, ending: Ending) -> None:
    written = {append_raw(machine.log, data): data for data in HOSTILE.values()}
    machine.log.checkpoint()
    log = machine.restart(ending)
    for seq, data in written.items():
        assert read_raw(log, seq) == data


def test_every_byte_survives_the_rewrite_of_a_segment_file(machine: Machine) -> None:
    log = machine.log
    written = {}
    for data in HOSTILE.values():
        log.append("t", [{"data": "x" * 1000, "tag": "x"}] * 5)
        written[append_raw(log, data)] = data
    log.checkpoint()
    log.delete("t", match="x")
    for _ in range(3):
        log.checkpoint()
    log = machine.restart()
    for seq, data in written.items():
        assert read_raw(log, seq) == data


def test_one_batch_keeps_the_bytes_of_each(log: Log) -> None:
    small = [data for data in HOSTILE.values() if len(data) < 10_000]
    log.append_json("t", b'{"records":[' + b",".join(b'{"data":%b}' % data for data in small) + b"]}")
    assert [read_raw(log, seq) for seq in range(1, len(small) + 1)] == small


def test_white_space_around_a_value_is_not_part_of_it(log: Log) -> None:
    log.append_json("t", b' { "records" : [ \n { "data" \t: \r\n [ 1 ] \n , "meta" : \n{ "k":"v" } \t} ] } \n')
    assert log.diff("t").records_json == b'[{"$seq":1,"$ts":1000000,"data":[ 1 ],"meta":{ "k":"v" }}]'


def test_bytes_counts_data_as_it_was_sent(log: Log) -> None:
    append_raw(log, b"[ 1 , 2 ]")
    assert log.get("t").bytes == 9


def test_data_of_1_mib_fits_and_one_byte_more_does_not(log: Log) -> None:
    with pytest.raises(RecordTooLarge, match="1048577 bytes, TOPICS_MAX_RECORD_BYTES is 1048576"):
        append_raw(log, b'"' + b"x" * (MIB - 1) + b'"')
    append_raw(log, b'"' + b"x" * (MIB - 2) + b'"')


def test_a_record_too_deep_is_named_with_the_limit(log: Log) -> None:
    with pytest.raises(InvalidRequest, match=r"records\[1\].data nests deeper than 512 levels"):
        log.append_json("t", b'{"records":[{"data":1},{"data":' + nested(513) + b"}]}")


def test_512_levels_fit_however_deep_the_caller_stands(log: Log) -> None:
    def call_from(depth: int) -> int:
        return call_from(depth - 1) if depth else append_raw(log, nested(512))

    assert call_from(sys.getrecursionlimit() // 2) == 1


# meta


@pytest.mark.parametrize(
    "meta",
    [
        b"{}",
        b'{ "k" : "v" }',
        b'{"k":"1","k":"2"}',
        rb'{"\u0041":"\u0000\ud83d\ude00\/"}',
        '{"é":"漢字"}'.encode(),
        b'{"":""}',
        b'{"a$":"$"}',
    ],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_meta_comes_back_byte_for_byte(machine: Machine, meta: bytes, sealed: bool) -> None:
    append_raw(machine.log, b"1", meta)
    if sealed:
        machine.log.checkpoint()
        machine.restart()
    assert machine.log.diff("t").records_json == b'[{"$seq":1,"$ts":1000000,"data":1,"meta":' + meta + b"}]"


@pytest.mark.parametrize(
    "meta",
    [
        b"[]",
        b'"k"',
        b"5",
        b"true",
        b'{"k":1}',
        b'{"k":null}',
        b'{"k":{}}',
        b'{"k":["v"]}',
        b'{"$k":"v"}',
        rb'{"\u0024k":"v"}',
        b'{"k":"v","$":"v"}',
        rb'{"k":"\ud800"}',
        b'{"k":"v",}',
    ],
)
def test_meta_that_is_no_object_of_strings_of_ours_is_refused(log: Log, meta: bytes) -> None:
    with pytest.raises(InvalidRequest):
        append_raw(log, b"1", meta)


# Tags and nodes


@pytest.mark.parametrize("text", ["\x00", '"\\/', "é漢😀", "\u2028", "\x1f\x7f", "%d", " "])
@pytest.mark.parametrize("sealed", [False, True])
def test_tags_and_nodes_keep_every_character(machine: Machine, text: str, sealed: bool) -> None:
    machine.log.append("t", [{"data": 1, "tag": text, "node": text}])
    if sealed:
        machine.log.checkpoint()
        machine.restart()
    (record,) = machine.log.diff("t", include_tags=True).records
    assert (record["$tag"], record["$node"]) == (text, text)
    assert machine.log.diff("t", match=text).count == 1
    assert machine.log.diff("t", node=text).count == 0


# The whole body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"records"',
        b"{}",
        b'{"records":null}',
        b'{"records":{}}',
        b'{"records":[]}',
        b'{"records":[null]}',
        b'{"records":[1]}',
        b'{"records":[[]]}',
        b'{"records":[{}]}',
        b'{"records":[{"data":1}]',
        b'{"records":[{"data":1}]}}',
        b'{"records":[{"data":1}]} x',
        b'{"records":[{"data":1},]}',
        b'\xef\xbb\xbf{"records":[{"data":1}]}',
        '{"records":[{"data":1}]}'.encode("utf-16"),
        b'{"records":[{"data":1,"tag":"\xff"}]}',
        rb'{"records":[{"data":1,"tag":"\ud800"}]}',
        rb'{"records":[{"data":1}],"unknown":"\ud800"}',
        b'{"records":[{"data":1}],"unknown":NaN}',
    ],
)
def test_a_body_of_another_shape_is_refused(log: Log, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        log.append_json("t", body)
    assert log.topics().topics == []


def test_unknown_fields_are_ignored(log: Log) -> None:
    log.append_json("t", b'{"records":[{"data":1,"color":"red"}],"extra":{"a":[1,2]}}')
    assert log.diff("t").records == [{"$seq": 1, "$ts": 1_000_000, "data": 1}]


# Python values


def test_python_values_are_written_as_json(log: Log) -> None:
    log.append("t", [{"data": {"a": [1, 2.5, None, True, "é"]}}])
    assert read_raw(log, 1) == '{"a":[1,2.5,null,true,"é"]}'.encode()


def test_raw_json_passes_through_append(log: Log) -> None:
    log.append("t", [{"data": msgspec.Raw(b"[ 1e400 ]")}])
    assert read_raw(log, 1) == b"[ 1e400 ]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")], {"a": float("nan")}])
def test_numbers_that_json_does_not_have_are_refused(log: Log, value: object) -> None:
    with pytest.raises(InvalidRequest):
        log.append("t", [{"data": value}])


@pytest.mark.parametrize("value", ["\ud800", object(), print, b"bytes"])
def test_values_that_json_does_not_have_are_refused(log: Log, value: object) -> None:
    with pytest.raises(InvalidRequest):
        log.append("t", [{"data": value}])


def test_records_are_decoded_for_a_python_caller(log: Log) -> None:
    for data in (b'{"a":1,"a":2}', b"1e400", nested(512)):
        append_raw(log, data)
    records = log.diff("t").records
    assert records[0]["data"] == {"a": 2}
    assert records[1]["data"] == Decimal("1e400")


def test_a_number_with_very_many_digits_does_not_break_a_reader(log: Log) -> None:
    append_raw(log, b"7")
    append_raw(log, b"9" * 5000)
    assert log.diff("t").records[0]["data"] == 7
    assert len(list(log.read("t"))) == 2
