"""`topics verify`: the offline check of a data directory, and its repair."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from topics.core.errors import TopicsError
from topics.engine.verify import Report
from topics.engine.verify import verify as check
from topics.storage.fs import OsFileSystem


def verify(
    directory: Annotated[Path, typer.Argument(help="A data directory that no server has open.")] = Path("./data"),
    repair: Annotated[bool, typer.Option("--repair", help="Turn what is missing into holes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    if not (directory / "FORMAT").exists() and not (directory / "wal").exists():
        print(f"topics: {directory} is not a data directory", file=sys.stderr)
        raise typer.Exit(2)
    try:
        report = check(OsFileSystem(directory), repair)
    except (TopicsError, OSError) as error:
        print(f"topics: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(report)
    raise typer.Exit(0 if report.ok or report.repaired else 1)


def _show(report: Report) -> None:
    for problem in report.problems:
        whose = f" (topic {problem.topic}, seqs {problem.first} to {problem.last})" if problem.topic else ""
        print(f"{problem.where}: {problem.what}{whose}")
    state = (
        "sound"
        if report.ok
        else "repaired"
        if report.repaired
        else "damaged; --repair turns what is missing into holes"
    )
    print(f"{report.topics} topics, {report.records} records, {report.bytes} bytes: {state}")
