"""`topics write`: a few records from arguments, or any number as lines on standard input."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
import typer
from msgspec import Raw

from topics.cli.common import (
    DEFAULT_URL,
    INTERRUPTED,
    USAGE,
    Json,
    Key,
    RetryMs,
    TopicName,
    Url,
    code_of,
    command,
    connect,
)
from topics.cli.show import complain, emit
from topics.core.errors import InvalidRequest, TopicsError

if TYPE_CHECKING:
    from topics.client.writer import Writer

_check_json = msgspec.json.Decoder(Raw).decode
# A line may have what a record may have, and some white space.
_MAX_LINE = 64 << 20


class _Line(msgspec.Struct):
    """A whole record on a line."""

    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: dict[str, str] | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


@command
def write(
    topic: TopicName,
    data: Annotated[
        list[str] | None, typer.Argument(help="Records as JSON; without any, lines of standard input.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="What is given is text, not JSON.")] = False,
    records: Annotated[bool, typer.Option("--records", help='Lines are whole records: {"data": …, "tag": …}.')] = False,
    tag: Annotated[str | None, typer.Option("--tag", help="Tag of all records.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="Node of all records.")] = None,
    meta: Annotated[list[str] | None, typer.Option("--meta", metavar="NAME=TEXT", help="Meta of all records.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Repeated with the same key, it is written once.")
    ] = None,
    create: Annotated[bool, typer.Option("--create/--no-create", help="Make the topic if it is not there.")] = True,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Lines that are written together.")] = 1000,
    flush_ms: Annotated[int, typer.Option("--flush-ms", min=0, help="How long a line may wait for others.")] = 100,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 30_000,
    as_json: Json = False,
) -> None:
    pairs = _meta_of(meta or [])
    if data:
        if records:
            raise typer.BadParameter("--records is for standard input")
        whole: dict[str, Any] = {"tag": tag, "node": node, "meta": pairs}
        given = {name: value for name, value in whole.items() if value is not None}
        made = [{"data": _data_of(each, text, f"argument {index}"), **given} for index, each in enumerate(data, 1)]
        with connect(url, key, retry_ms) as client:
            answer = client.write(topic, made, create=create, idempotency_key=idempotency_key)
        if as_json:
            emit(answer)
        else:
            where = f"seq {answer.first_seq}" if answer.count == 1 else f"seqs {answer.first_seq} to {answer.last_seq}"
            print(f"{topic}: {where}{' (was there already)' if answer.deduped else ''}")
        return
    if idempotency_key is not None:
        raise typer.BadParameter("--idempotency-key is for records that are arguments")
    if sys.stdin.isatty():
        complain("reading lines from the terminal; Ctrl-D ends")
    with connect(url, key, retry_ms) as client:
        writer = client.writer(topic, create=create, flush_ms=flush_ms, batch_records=batch, record_bytes=_MAX_LINE)
        _pump(writer, sys.stdin.buffer, text, records, tag, node, pairs, as_json)


def _pump(
    writer: Writer,
    source: IO[bytes],
    text: bool,
    whole: bool,
    tag: str | None,
    node: str | None,
    meta: dict[str, str] | None,
    as_json: bool,
) -> None:
    """Writes line by line, and says how far it came whatever ends it."""
    first = last = None
    code = 0
    count = number = 0
    with _progress(source, as_json) as bar:
        try:
            for number, raw in enumerate(_lines(source), 1):
                bar.advance(len(raw))
                line = raw.strip()
                if not line:
                    continue
                if whole:
                    record = _record_of(line, number)
                    own_meta = {**(meta or {}), **(record.meta or {})} or None
                    last = writer.write(record.data, tag=record.tag or tag, node=record.node or node, meta=own_meta)
                else:
                    value = _data_of(line.decode() if text else line, text, f"line {number}")
                    last = writer.write(value, tag=tag, node=node, meta=meta)
                count += 1
                first = first or last
        except KeyboardInterrupt:
            code = INTERRUPTED
        except (typer.BadParameter, InvalidRequest, UnicodeDecodeError) as error:
            complain(
                error.message if isinstance(error, typer.BadParameter | TopicsError) else f"line {number}: {error}"
            )
            code = USAGE
        except TopicsError:
            # It is told below, with how much is written.
            pass
        try:
            writer.close()
        except TopicsError as error:
            complain(error.message)
            code = code or code_of(error)
    unwritten = sum(len(each.records) for each in writer.unwritten)
    written = count - unwritten
    told: dict[str, Any] = {"topic": writer.topic, "written": written, "unwritten": unwritten}
    if written and first is not None:
        told["first_seq"] = first.result(0)
    if written and last is not None and not unwritten:
        told["last_seq"] = last.result(0)
    if as_json:
        emit(told)
    else:
        noun = "record" if written == 1 else "records"
        print(f"{writer.topic}: {written} {noun} written" + (f", {unwritten} not" if unwritten else ""))
    if code:
        raise typer.Exit(code)


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    while True:
        line = source.readline(_MAX_LINE + 1)
        if not line:
            return
        if len(line) > _MAX_LINE:
            raise InvalidRequest(f"a line has more than {_MAX_LINE} bytes")
        yield line


def _data_of(value: str | bytes, is_text: bool, where: str) -> Any:
    """JSON stays byte for byte as it is."""
    if is_text:
        return value
    try:
        return Raw(bytes(_check_json(value)))
    except (msgspec.DecodeError, UnicodeError) as error:
        raise typer.BadParameter(f"{where} is not JSON: {error}; --text takes it as text") from None


def _record_of(line: bytes, number: int) -> _Line:
    try:
        return _decode_line(line)
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"line {number} is not a record: {error}") from None


def _meta_of(pairs: list[str]) -> dict[str, str] | None:
    meta: dict[str, str] = {}
    for pair in pairs:
        name, is_there, value = pair.partition("=")
        if not is_there or not name:
            raise typer.BadParameter(f"--meta takes NAME=TEXT, got {pair!r}")
        meta[name] = value
    return meta or None


class _Bar(Protocol):
    def advance(self, size: int) -> None: ...


class _NoBar:
    def advance(self, size: int) -> None:
        pass


@contextmanager
def _progress(source: IO[bytes], as_json: bool) -> Iterator[_Bar]:
    """A bar on standard error, where somebody looks and the input is not typed."""
    if as_json or not sys.stderr.isatty() or source.isatty():
        yield _NoBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    status = os.fstat(source.fileno())
    total = status.st_size if stat.S_ISREG(status.st_mode) else None
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        class Bar:
            def advance(self, size: int) -> None:
                progress.advance(task, size)

        yield Bar()
