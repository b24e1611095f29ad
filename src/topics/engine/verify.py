"""The offline check of a data directory: every byte is read and proven, every count recounted.

A check writes nothing. A repair turns what is missing into holes (`corrupt`), says which events of the log are lost,
and leaves a directory that opens.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from topics.core.clock import Clock, SystemClock
from topics.core.errors import StorageFault, TopicsError
from topics.core.limits import Limits
from topics.core.tombstone import Hole
from topics.engine import frames
from topics.engine.engine import Engine
from topics.engine.options import Options
from topics.engine.recovery import Recovery, check_format, log_start, take_lock
from topics.engine.sealed import LostRange
from topics.engine.syncer import InlineSyncer
from topics.engine.topic import Topic
from topics.storage import checkpoint as checkpoints
from topics.storage.fs import FileSystem, Lock
from topics.storage.segment import Segments
from topics.storage.wal import Wal


class Problem(msgspec.Struct):
    """Something that is not as it was written. `first` and `last` are the seqs it cost, if it cost any."""

    where: str
    what: str
    topic: str | None = None
    first: int = 0
    last: int = 0


class Report(msgspec.Struct):
    problems: list[Problem] = []
    topics: int = 0
    records: int = 0
    bytes: int = 0
    repaired: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems


Progress = Callable[[str, float], None]


def verify(
    fs: FileSystem, repair: bool = False, clock: Clock | None = None, on_progress: Progress | None = None
) -> Report:
    """Checks a directory that nobody has open."""
    report = Report()
    lock = take_lock(fs)
    segments = Segments(fs)
    handed_over = False
    try:
        check_format(fs)
        recovery = Recovery(fs, clock or SystemClock(), Options(), segments, repair=True)
        try:
            recovery.run(None if on_progress is None else lambda part: on_progress("log", part))
        except (TopicsError, OSError) as error:
            report.problems.append(Problem(where=str(fs), what=str(error)))
            return report
        _report_log(recovery, report)
        _check_topics(recovery, report, on_progress)
        if repair and report.problems:
            recovery.tidy()
            handed_over = True
            _write_repaired(fs, lock, clock or SystemClock(), recovery, segments)
            report.repaired = True
        return report
    finally:
        if not handed_over:
            segments.close()
            lock.release()


def _report_log(recovery: Recovery, report: Report) -> None:
    for number in recovery.bad_checkpoints:
        name = checkpoints.checkpoint_name(number)
        report.problems.append(Problem(where=name, what="the checkpoint is damaged; an older one and the log serve"))
    for lost in recovery.lost:
        topic = recovery.state.topics.get(lost.epoch)
        report.problems.append(
            Problem(lost.where, f"lost: {lost.what}", topic.name if topic else None, lost.first, lost.last)
        )
    for topic, range_ in recovery.state.found_lost:
        report.problems.append(Problem(range_.where, "corrupt records", topic.name, range_.first, range_.last))


def _check_topics(recovery: Recovery, report: Report, on_progress: Progress | None) -> None:
    topics = list(recovery.state.topics.values())
    for index, topic in enumerate(topics):
        _check_topic(topic, recovery, report)
        report.topics += 1
        report.records += topic.count
        report.bytes += topic.bytes
        if on_progress is not None:
            on_progress("topics", (index + 1) / len(topics))


def _check_topic(topic: Topic, recovery: Recovery, report: Report) -> None:
    while True:
        try:
            count, size = _recount(topic)
        except LostRange as lost:
            topic.lose(lost.first, lost.last, "corrupt")
            recovery.losses.append(frames.holed(topic.epoch, Hole(lost.first, lost.last, "corrupt")))
            report.problems.append(Problem(lost.where, "corrupt records", topic.name, lost.first, lost.last))
        except StorageFault as fault:
            report.problems.append(Problem("segments", fault.message, topic.name))
            return
        else:
            break
    if (count, size) != (topic.count, topic.bytes):
        what = f"{count} live records with {size} bytes, the watermarks say {topic.count} with {topic.bytes}"
        report.problems.append(Problem("checkpoints", what, topic.name))


def _recount(topic: Topic) -> tuple[int, int]:
    """Live records and bytes, counted one by one; every byte is read on the way."""
    count = size = 0
    after = 0
    ts = 0
    for extent in topic.extents:
        for ref in extent.refs(topic.store):
            if extent.is_dead(ref):
                continue
            chunk = extent.load(topic.store, ref, body=True)
            assert chunk.body is not None
            if chunk.first_seq <= after or chunk.ts_first < ts or chunk.ends[-1] != len(chunk.body):
                raise LostRange(ref.first_seq, ref.last_seq, "seqs, times or lengths out of order")
            after, ts = chunk.last_seq, chunk.ts_last
            dead = extent.dead.get(ref.first_seq)
            for index, seq in enumerate(range(chunk.first_seq, chunk.last_seq + 1)):
                if seq >= topic.earliest_seq and (dead is None or not dead.has(index)):
                    count += 1
                    size += chunk.sizes[index]
    return count, size


def _write_repaired(fs: FileSystem, lock: Lock, clock: Clock, recovery: Recovery, segments: Segments) -> None:
    """Two clean checkpoints of what is left: nothing needs the damaged files any more."""
    log = Wal(fs, recovery.last_wal + 1)
    boot_id = fs.boot_id()
    log_start(log, frames.opened(boot_id, recovery.state.time.latest, recovery.state.server_id), recovery.losses)
    syncer = InlineSyncer()
    engine = Engine(fs, lock, clock, Limits(), Options(), recovery.state, log, segments, syncer, syncer, boot_id)
    engine.checkpointer.resume_from(recovery.first_wal, recovery.wal_bytes)
    engine.checkpoint()
    engine.close()
