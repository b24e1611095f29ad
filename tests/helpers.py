"""A log on a simulated machine that a test can stop and start in every way, and short words for what it reads."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from tests.clocks import ManualClock
from tests.simdisk import SimDisk
from topics.core.limits import Limits
from topics.core.tombstone import Tombstone
from topics.engine.engine import TopicState
from topics.engine.options import Options
from topics.engine.read import Diff
from topics.log import Log

Ending = Literal["close", "kill", "power"]
# A restart that promises to keep everything that class `disk` holds.
KEEPING: tuple[Ending, ...] = ("close", "kill")


class Machine:
    """One data directory, its clock and its log. Nothing happens here that a test did not ask for."""

    def __init__(self, limits: Limits | None = None, options: Options | None = None) -> None:
        self.disk = SimDisk()
        self.clock = ManualClock()
        self.limits = limits or Limits()
        self.options = options or Options()
        self.log = self.open()

    def open(self) -> Log:
        return Log(self.disk, self.clock, self.limits, self.options, background=False)

    def restart(self, ending: Ending = "close") -> Log:
        """Ends the process (or the machine) and opens the directory again."""
        if ending == "close":
            self.log.close()
        elif ending == "kill":
            self.disk = self.disk.kill()
        else:
            self.disk = self.disk.power_cut(Random(0), "drop")
        self.log = self.open()
        return self.log

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.names().values())


def write(log: Log, topic: str, *datas: object, **fields: Any) -> list[int]:
    """Appends one record for each value; returns their seqs."""
    return log.append(topic, [{"data": data} for data in datas], **fields).seqs


def fill(log: Log, topic: str, count: int, size: int = 1) -> None:
    """Appends `count` records of `size` bytes each."""
    data = 1 if size == 1 else "x" * (size - 2)
    while count > 0:
        log.append(topic, [{"data": data}] * min(count, 1000))
        count -= 1000


def seqs(diff: Diff) -> list[int]:
    return [int(str(record["$seq"])) for record in diff.records]


def datas(diff: Diff) -> list[Any]:
    return [record["data"] for record in diff.records]


def live(log: Log, topic: str) -> list[int]:
    """The seqs of every live record, through as many answers as it takes."""
    return [int(str(item["$seq"])) for item in log.read(topic) if not isinstance(item, Tombstone)]


def gap(diff: Diff) -> tuple[int, int, str] | None:
    """What a tombstone says, in short."""
    stone = diff.tombstone
    return None if stone is None else (stone.gap_from, stone.gap_to, stone.reason)


def told(log: Log, topic: str, from_seq: int = 0) -> list[tuple[int, int, str] | int]:
    """What a reader is told in all: record seqs, and gaps."""
    return [
        (item.gap_from, item.gap_to, item.reason) if isinstance(item, Tombstone) else int(str(item["$seq"]))
        for item in log.read(topic, from_seq)
    ]


def snapshot(log: Log) -> tuple[object, ...]:
    """Everything that a refused call must leave as it was."""
    page = log.topics(page_size=1000)
    diffs = [
        (state.topic, bytes(log.diff(state.topic, include_tags=True).records_json), repr(log.deletes(state.topic)))
        for state in page.topics
    ]
    return ([_still(state) for state in page.topics], diffs)


def _still(state: TopicState) -> TopicState:
    """A state without the clocks that reading itself moves."""
    state.last_read_ts = None
    state.effective_priority = 0.0
    return state
