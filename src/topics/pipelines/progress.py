"""How far a pipeline is: counted in one place, shown on a terminal or as lines of JSON, and published to a topic."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, TextIO

import msgspec

from topics.client.connection import Connection, topic_path
from topics.core.errors import TopicsError
from topics.core.progress import TOPIC, Progress

_CONFIG = {"cap_records": 10_000}
# What nobody asked for is said no more often than this, and something at least this often.
_SECONDS = 1.0
_SILENT_SECONDS = 30.0


class Show(Protocol):
    def show(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class Lines:
    """One JSON object a line."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def show(self, progress: Progress) -> None:
        self._out.write(msgspec.json.encode(progress).decode() + "\n")
        self._out.flush()

    def close(self) -> None:
        pass


class Terminal:
    """A table that changes where it stands; one line for each pipeline."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._rows: dict[str, Progress] = {}
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)
        self._live.start()

    def show(self, progress: Progress) -> None:
        self._rows[progress.name] = progress
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.table import Table

        table = Table("pipeline", "name", "stage", box=None, header_style="dim")
        for column in ("records", "records/s", "lag", "lost"):
            table.add_column(column, justify="right")
        for row in self._rows.values():
            colour = {"running": "cyan", "done": "green", "failed": "red"}[row.state]
            table.add_row(
                row.pipeline,
                row.name,
                f"[{colour}]{row.stage if row.state == 'running' else row.state}[/]",
                f"{row.records:,}",
                f"{row.records_per_s:,.0f}",
                "" if row.lag is None else f"{row.lag:,}",
                f"[red]{row.lost:,}[/]" if row.lost else "0",
            )
        return table

    def close(self) -> None:
        self._live.stop()


class Publisher:
    """Sends the same to the topic. A pipeline does not stop because nobody hears it."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connection = connect()

    def show(self, progress: Progress) -> None:
        record = {"data": msgspec.to_builtins(progress), "tag": progress.pipeline, "node": progress.name}
        with suppress(TopicsError, OSError):
            # Not again when the answer is lost: twice would be worse than never.
            self._connection.post(topic_path(TOPIC), {"records": [record], "config": _CONFIG}, repeatable=False)

    def close(self) -> None:
        self._connection.close()


class Report:
    """Counts, and tells whoever is to be told. `stage` is called at each step of the work, in its order."""

    def __init__(
        self,
        pipeline: str,
        name: str,
        run: str = "",
        shows: tuple[Show, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shows = shows
        self._clock = clock
        self._started = clock()
        self._told = float("-inf")
        self._has_news = False
        self._lock = threading.Lock()
        self.progress = Progress(pipeline, name, run or f"{time.time_ns():x}", 0)

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(error)

    def stage(self, name: str) -> None:
        self.progress.stage = name
        self._tell()

    def count(self, records: int = 0, size: int = 0, lost: int = 0, deleted: int = 0, lag: int | None = None) -> None:
        progress = self.progress
        progress.records += records
        progress.bytes += size
        progress.lost += lost
        progress.deleted += deleted
        if lag is not None:
            progress.lag = lag
        self._tell()

    def beat(self) -> None:
        """Says what was held back, and now and then that the pipeline is still there. For those that only wait."""
        now = self._clock()
        if (self._has_news and now - self._told >= _SECONDS) or now - self._told >= _SILENT_SECONDS:
            self._tell(always=True)

    def finish(self, error: BaseException | None = None) -> None:
        if self.progress.state == "running":
            # Who stops a live pipeline has not broken it.
            is_failed = error is not None and not isinstance(error, KeyboardInterrupt)
            self.progress.state = "failed" if is_failed else "done"
            self.progress.error = cause_of(error) if error is not None and is_failed else ""
            self._tell(always=True)

    def _tell(self, always: bool = False) -> None:
        # A query counts on its own thread, and whoever waits for it on another.
        with self._lock:
            now = self._clock()
            self._has_news = True
            if always or now - self._told >= _SECONDS:
                self._told = now
                self._has_news = False
                elapsed = max(now - self._started, 1e-6)
                self.progress.records_per_s = round(self.progress.records / elapsed, 1)
                self.progress.ts = time.time_ns() // 1_000_000
                for each in self._shows:
                    each.show(self.progress)


def cause_of(error: BaseException) -> str:
    """What went wrong, in a line. Spark's errors go on for pages: what a Python process of it raised is the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        kind, colon, message = line.partition(": ")
        if colon and (kind.startswith("topics.") or kind in ("RuntimeError", "FileExistsError")):
            return message[:1000] if kind.startswith("topics.") else line[:1000]
    return (lines or [type(error).__name__])[0][:1000]


def showing(as_json: bool = False) -> Show:
    """Live on a terminal, lines of JSON elsewhere."""
    return Terminal() if sys.stderr.isatty() and not as_json else Lines()
