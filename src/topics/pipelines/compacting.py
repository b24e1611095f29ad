"""`compact`: small files become large ones, and what was erased from the log is erased from the lake. A new version of
the manifest names the new files instead of the old ones; those stay until `vacuum`, for readers that have begun."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from topics.client.connection import Connection, topic_path
from topics.core.errors import TopicNotFound
from topics.core.selector import Selector, parse_selector
from topics.pipelines.lake import Change, Heads, Instance, Lake, LakeFile, Part, Version
from topics.pipelines.manifest import Manifest
from topics.pipelines.progress import Publisher, Report, Show
from topics.pipelines.reading import opened
from topics.pipelines.spans import Seqs, seqs, union, within, without
from topics.pipelines.staging import COLUMNS, SCHEMA, Staged, Staging, by_key, prepare, runs
from topics.pipelines.staging import FOLDER as STAGING
from topics.pipelines.stores import open_store

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FILE_BYTES = 128 << 20
GRACE_MS = 3_600_000
# What nobody names may be about to be named: it stays for an hour at least.
_ORPHAN_MS = 3_600_000
# As much is rewritten in one commit.
_ROUND_BYTES = 16 << 30
_ROUND_GROUPS = 500


class Erase(msgspec.Struct, frozen=True):
    """A delete of the log, as its history tells: what it took, and nothing behind `head_seq`."""

    id: int
    head_seq: int
    before_seq: int | None = None
    match: tuple[str, ...] | None = None
    purpose: str = "erase"

    @property
    def last(self) -> int:
        return self.head_seq if self.before_seq is None else min(self.head_seq, self.before_seq - 1)

    def condition(self) -> Column:
        from pyspark.sql import functions as f

        condition = f.col("seq") <= self.last
        if self.match is not None:
            selector: Selector = parse_selector(list(self.match))
            tag = f.col("tag")
            condition &= f.coalesce(
                tag.startswith(selector.text) if selector.prefix else tag == selector.text, f.lit(False)
            )
        return condition


class Group(msgspec.Struct):
    """Files of one instance and day that become one, or none when all of it is erased."""

    topic: str
    epoch: int
    day: str
    files: list[LakeFile]
    erased: int
    # What is archived in them now, and what of it goes.
    held: list[Seqs]
    gone: list[Seqs]


class Compacted(msgspec.Struct):
    """What was done. `problems` are erasures that could not be followed."""

    version: int
    merged: int = 0
    made: int = 0
    erased: int = 0
    vacuumed: int = 0
    problems: list[str] = []


def compact(
    spark: SparkSession,
    root: str,
    *,
    url: str | None = None,
    key: str | None = None,
    topics: Collection[str] = (),
    file_bytes: int = FILE_BYTES,
    vacuum: bool = False,
    grace_ms: int = GRACE_MS,
    report: Report | None = None,
    show: Show | None = None,
    manifest: Manifest | None = None,
) -> Compacted:
    """Merges small files; with a server's `url` also follows its erasures; with `vacuum` removes files that no version
    younger than `grace_ms` names."""
    store = open_store(root, spark)
    manifest = manifest or Manifest(store)
    shows: list[Show] = [Publisher(lambda: Connection(url, key, timeout_ms=5_000, retry_ms=0))] if url else []
    report = report or Report("compact", store.uri, shows=(*shows, *((show,) if show else ())))
    with report:
        lake = opened(store)
        job = _Compact(spark, manifest, file_bytes, report)
        job.result.version = lake.version
        chosen = {(topic, epoch) for topic, epoch, _ in lake if not topics or topic in topics}
        if url is not None:
            connection = Connection(url, key)
            job.erase(lake, chosen, connection)
            connection.close()
            lake = manifest.lake()
        job.merge(lake, chosen)
        if vacuum:
            report.stage("vacuuming")
            job.result.vacuumed = remove_unnamed(manifest, grace_ms)
        job.result.version = manifest.heads().version
    return job.result


def merge(spark: SparkSession, manifest: Manifest, chosen: Collection[Instance], file_bytes: int) -> None:
    """Only the small files of some instances, for a tier that makes many."""
    job = _Compact(spark, manifest, file_bytes, Report("compact", "merge"))
    job.merge(manifest.lake(), chosen)


class _Compact:
    def __init__(self, spark: SparkSession, manifest: Manifest, file_bytes: int, report: Report) -> None:
        self._session = prepare(spark.newSession())
        self._manifest = manifest
        self._file_bytes = file_bytes
        self._report = report
        self.result = Compacted(0)

    # -- which files -----------------------------------------------------------------------------------------------

    def merge(self, lake: Lake, chosen: Collection[Instance]) -> None:
        groups: list[Group] = []
        for topic, epoch, part in lake:
            if (topic, epoch) in chosen:
                for files in _neighbours(part, self._file_bytes):
                    erased = min(file.erased for file in files)
                    groups.append(Group(topic, epoch, files[0].day, files, erased, _held(part, files), []))
        for some in _rounds(groups):
            self._rewrite(some)

    def erase(self, lake: Lake, chosen: Collection[Instance], connection: Connection) -> None:
        """Looks which files have what was erased, rewrites those, and notes for the others that they have nothing."""
        groups: list[Group] = []
        clean: list[tuple[str, int, list[LakeFile], int]] = []
        for topic, epoch, part in lake:
            if (topic, epoch) not in chosen or not part.files:
                continue
            asked = self._erases(connection, topic, epoch, part)
            if asked is None:
                continue
            erases, newest = asked
            behind = [file for file in part.in_order() if file.erased < newest]
            touched = [file for file in behind if any(erase.last >= file.first for erase in erases)]
            gone = self._matches(touched, erases)
            for file in touched:
                if gone.get(file.path):
                    held = _held(part, [file])
                    groups.append(Group(topic, epoch, file.day, [file], newest, held, gone[file.path]))
            rest = [file for file in behind if not gone.get(file.path)]
            if rest:
                clean.append((topic, epoch, rest, newest))
        for some in _rounds(groups):
            self._rewrite(some)
        if clean:
            self._note(clean)

    def _erases(self, connection: Connection, topic: str, epoch: int, part: Part) -> tuple[list[Erase], int] | None:
        """The erasures that some file of an instance has not seen, and the number of the newest delete."""
        after = min(file.erased for file in part.files.values())
        try:
            if connection.get(topic_path(topic), touch="false")["epoch"] != epoch:
                return None
            told = connection.get(topic_path(topic, "deletes"), after=after)
        except TopicNotFound:
            return None
        if not told["complete"]:
            self.result.problems.append(
                f"topic {topic!r}: the log does not know its deletes behind number {after} any more; records that they "
                "erased may still be in the lake"
            )
        deletes = msgspec.convert(told["deletes"], list[Erase])
        return [each for each in deletes if each.purpose == "erase"], int(told["last_id"])

    def _matches(self, files: list[LakeFile], erases: list[Erase]) -> dict[str, list[Seqs]]:
        """Which seqs of which files the erasures take."""
        from pyspark.sql import functions as f

        if not files or not erases:
            return {}
        condition = _any(erases)
        rows = self._read(files).where(condition)
        found = by_key(runs(rows.select(f.xxhash64("_metadata.file_name").alias("key"), "seq")))
        keys = keys_of(self._session, files)
        return {keys[key]: ranges for key, ranges in found.items()}

    def _read(self, files: list[LakeFile]) -> DataFrame:
        uri = self._manifest.store.uri
        return self._session.read.schema(SCHEMA).parquet(*[f"{uri}/{file.path}" for file in files])

    # -- new files for old ones ------------------------------------------------------------------------------------

    def _rewrite(self, groups: list[Group]) -> None:
        staging = Staging(self._session, self._manifest.store, "compact")
        self._report.stage("rewriting")
        staging.write(self._rows(groups))
        self._report.stage("rewritten")
        made: dict[int, list[Staged]] = {}
        for staged in staging.files():
            made.setdefault(int(staged.place), []).append(staged)
        changes: list[Change] = []
        for number, group in enumerate(groups):
            new = made.get(number, [])
            _check(group, new)
            targets = [staging.place(each, group.topic, group.epoch, group.erased) for each in new]
            for each, target in zip(new, targets, strict=True):
                staging.move(each, target)
                self._report.stage("moved-one")
            changes.append(Change(group.topic, group.epoch, deleted=group.gone, add=targets, remove=group.files))
        self._report.stage("moved")
        if self._commit(changes):
            self._report.stage("committed")
            self.result.merged += sum(len(group.files) for group in groups)
            self.result.made += sum(len(new) for new in made.values())
            self.result.erased += sum(seqs(group.gone) for group in groups)
            rows = sum(file.rows for change in changes for file in change.add)
            size = sum(file.bytes for change in changes for file in change.add)
            self._report.count(rows, size, deleted=sum(seqs(group.gone) for group in groups))
        staging.discard()

    def _rows(self, groups: list[Group]) -> DataFrame:
        """The rows that stay, each with the number of its group, sorted in it."""
        from pyspark.sql import functions as f

        names = [
            (file.path.rpartition("/")[2], str(number), group.day)
            for number, group in enumerate(groups)
            for file in group.files
        ]
        places = self._session.createDataFrame(names, "file_name STRING, place STRING, day STRING")
        rows = self._read([file for group in groups for file in group.files])
        rows = rows.select(*COLUMNS, f.col("_metadata.file_name").alias("file_name"))
        rows = rows.join(f.broadcast(places), "file_name").withColumn("day", f.to_date("day"))
        gone = [(str(number), span) for number, group in enumerate(groups) for span in group.gone]
        if gone:
            ranges = [(place, first, last) for place, (first, last) in gone]
            taken = self._session.createDataFrame(ranges, "taken_place STRING, taken_first BIGINT, taken_last BIGINT")
            condition = (f.col("place") == f.col("taken_place")) & f.col("seq").between(
                f.col("taken_first"), f.col("taken_last")
            )
            rows = rows.join(f.broadcast(taken), condition, "left_anti")
        return rows.repartition(min(len(groups), 64), "place").sortWithinPartitions("place", "day", "seq")

    def _note(self, clean: list[tuple[str, int, list[LakeFile], int]]) -> None:
        """These files have nothing of what was erased up to now."""
        changes = [
            Change(
                topic,
                epoch,
                remove=files,
                add=[msgspec.structs.replace(file, erased=newest) for file in files],
            )
            for topic, epoch, files, newest in clean
        ]
        self._commit(changes)

    def _commit(self, changes: list[Change]) -> bool:
        """False when another one has taken some of the files first; then nothing is changed, and nothing is wrong."""

        def make(newest: Heads) -> Version | None:
            lake = self._manifest.lake(newest.version)
            for change in changes:
                files = lake.part(change.topic, change.epoch).files
                if any(files.get(file.path) != file for file in change.remove):
                    return None
            return Version(0, self._manifest.now(), "compact", changes)

        made = self._manifest.commit("compact", make)
        if made is not None:
            self.result.version = made.version
            return True
        for change in changes:
            for file in change.add:
                if not any(file.path == old.path for old in change.remove):
                    self._manifest.store.delete(file.path)
        return False


def _any(erases: Iterable[Erase]) -> Column:
    """What any of them takes. Of those with the same selector the furthest one says it all; and the rest is a tree that
    is as flat as can be, because Spark goes down into it call by call."""
    furthest: dict[tuple[str, ...] | None, Erase] = {}
    for erase in erases:
        known = furthest.get(erase.match)
        if known is None or known.last < erase.last:
            furthest[erase.match] = erase
    level = [erase.condition() for erase in furthest.values()]
    while len(level) > 1:
        level = [one | other for one, other in zip(level[::2], level[1::2], strict=False)] + level[len(level) & ~1 :]
    return level[0]


def _neighbours(part: Part, file_bytes: int) -> Iterator[list[LakeFile]]:
    """Small files that follow each other, as many as make a large one."""
    some: list[LakeFile] = []
    for file in part.in_order():
        is_small = file.bytes < file_bytes // 2
        fits = is_small and bool(some) and some[-1].day == file.day
        if not fits or sum(each.bytes for each in some) + file.bytes > file_bytes:
            if len(some) > 1:
                yield some
            some = []
        if is_small:
            some.append(file)
    if len(some) > 1:
        yield some


def _held(part: Part, files: list[LakeFile]) -> list[Seqs]:
    """What the ledger says is in some files. None overlap, so what is archived between a file's ends is its own."""
    return within(part.ranges("archived"), union((file.first, file.last) for file in files))


def _check(group: Group, made: list[Staged]) -> None:
    """Whatever happened on the way: what stays is there, each seq once, and nothing else."""
    found = sorted(run for staged in made for run in staged.runs)
    expected = without(group.held, group.gone)
    rows = sum(staged.rows for staged in made)
    if union(found) != expected or rows != seqs(expected):
        raise RuntimeError(
            f"topic {group.topic!r}, epoch {group.epoch}, day {group.day}: {rows} rows were rewritten, and the ledger "
            f"has {seqs(expected)}; nothing was changed, and `verify` tells what is wrong"
        )


def _rounds(groups: list[Group]) -> Iterator[list[Group]]:
    some: list[Group] = []
    size = 0
    for group in groups:
        some.append(group)
        size += sum(file.bytes for file in group.files)
        if size >= _ROUND_BYTES or len(some) >= _ROUND_GROUPS:
            yield some
            some, size = [], 0
    if some:
        yield some


def keys_of(session: SparkSession, files: Iterable[LakeFile]) -> dict[int, str]:
    """Paths by the number that stands for a file's name in a job over its rows."""
    import xxhash

    paths = {file.path.rpartition("/")[2]: file.path for file in files}
    keys: dict[int, str] = {}
    for name, path in paths.items():
        digest = xxhash.xxh64_intdigest(name.encode(), seed=42)
        keys[digest - (1 << 64) if digest >> 63 else digest] = path
    assert len(keys) == len(paths), "two names have the same number"
    return keys


def remove_unnamed(manifest: Manifest, grace_ms: int) -> int:
    """Removes files that are out for longer than the grace, and what crashes have left; says how many."""
    store = manifest.store
    # Listed first: what is named after this is not taken for left over.
    found = [entry for entry in store.walk("") if entry.path.startswith(("topic=", f"{STAGING}/"))]
    lake = manifest.lake()
    now = manifest.now()
    due = [path for path, since in lake.removed.items() if since + grace_ms <= now]
    named = {path for _, _, part in lake for path in part.files} | set(lake.removed)
    orphans = [
        entry.path for entry in found if entry.path not in named and entry.changed + max(grace_ms, _ORPHAN_MS) <= now
    ]
    for path in [*due, *orphans]:
        store.delete(path)
    if due:
        manifest.commit("vacuum", lambda _: Version(0, now, "vacuum", forget=due))
    manifest.forget_before(now - grace_ms)
    return len(due) + len(orphans)


__all__ = ["Compacted", "compact", "merge", "remove_unnamed"]
