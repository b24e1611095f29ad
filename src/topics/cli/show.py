"""How things look on a terminal. Colours mean something: loss is red, what waits is yellow. None where nobody looks."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from topics.core.answers import Record
from topics.core.tombstone import Tombstone

RED, YELLOW, GREEN, DIM, BOLD = "31", "33", "32", "2", "1"
_encode = msgspec.json.Encoder().encode


def has_colour(stream: Any) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: Any = None) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if has_colour(stream or sys.stdout) else text


def safe(text: str) -> str:
    """Text of others cannot steer the terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def complain(message: str) -> None:
    sys.stdout.flush()
    print(f"{paint('topics:', RED, sys.stderr)} {safe(message)}", file=sys.stderr)


def note(message: str, colour: str = DIM) -> None:
    """Something beside the output."""
    print(paint(safe(message), colour, sys.stderr), file=sys.stderr)


def line_of(value: Any) -> str:
    """Any value or struct as one line of JSON. Line breaks can only be white space between tokens."""
    return _encode(value).replace(b"\r", b" ").replace(b"\n", b" ").decode()


def emit(value: Any) -> None:
    print(line_of(value))


def time_of(ts: int | None) -> str:
    if ts is None:
        return "never"
    moment = datetime.fromtimestamp(ts / 1000, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{ts % 1000:03d}Z"


def show_record(record: Record, topic: str | None = None) -> None:
    parts = [f"{record.seq:>8}", paint(time_of(record.ts), DIM)]
    if topic is not None:
        parts.insert(0, paint(topic, BOLD))
    if record.tag is not None:
        parts.append(paint(f"[{safe(record.tag)}]", GREEN))
    if record.node is not None:
        parts.append(paint(f"@{safe(record.node)}", DIM))
    data = bytes(record.raw).replace(b"\r", b" ").replace(b"\n", b" ").decode()
    parts.append(safe(data))
    if record.meta:
        parts.append(paint(safe(_encode(record.meta).decode()), DIM))
    print("  ".join(parts))


def show_loss(stone: Tombstone, topic: str | None = None) -> None:
    where = f"{topic}  " if topic is not None else ""
    noun = "record" if stone.missed_estimate == 1 else "records"
    text = (
        f"{where}{'LOST':>8}  seqs {stone.gap_from} to {stone.gap_to}: {stone.missed_estimate} {noun}, {stone.reason}"
    )
    print(paint(text, RED))


def table(headers: list[str], rows: list[list[str]]) -> None:
    """Columns; numbers to the right."""
    cells = [[safe(cell) for cell in row] for row in rows]
    widths = [max([len(header), *(len(row[index]) for row in cells)]) for index, header in enumerate(headers)]
    right = [bool(cells) and all(row[index].lstrip("-").isdigit() for row in cells) for index in range(len(headers))]

    def line(row: list[str]) -> str:
        return "  ".join(
            cell.rjust(width) if on_right else cell.ljust(width)
            for cell, width, on_right in zip(row, widths, right, strict=True)
        ).rstrip()

    print(paint(line(headers), BOLD))
    for row in cells:
        print(line(row))


def fields(pairs: dict[str, Any], alarming: set[str] | None = None) -> None:
    """Names and values, one a line; the alarming ones in red."""
    width = max(map(len, pairs))
    for name, value in pairs.items():
        shown = value if isinstance(value, str) else line_of(value)
        text = f"{name.ljust(width)}  {safe(shown)}"
        print(paint(text, RED) if alarming and name in alarming else text)
