"""What a lake holds: for each instance of a topic its ledger and its files, as one version of the manifest says.

`Heads` is the small half, which grows with the number of topics; `Lake` has everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from urllib.parse import quote

import msgspec

from topics.pipelines.spans import Seqs, Span, covered, joined, restated, union

FORMAT = 1
# A name in a path has at most 255 bytes almost everywhere.
_LONGEST_FOLDER = 200

Instance = tuple[str, int]


class LakeFile(msgspec.Struct, frozen=True):
    """A Parquet file: sorted by seq, of one instance and one day. `path` is below the lake's root. `erased` is the last
    delete of the log that its rows were read or rewritten after."""

    path: str
    day: str
    first: int
    last: int
    rows: int
    bytes: int
    min_ts: int
    max_ts: int
    erased: int = 0


class Change(msgspec.Struct, omit_defaults=True):
    """What a version does to one instance. `spans` are seqs that had no fate before, `deleted` are archived ones that
    are taken out; `is_over`: the topic was recreated, and nothing comes after."""

    topic: str
    epoch: int
    spans: list[Span] = []
    deleted: list[Seqs] = []
    add: list[LakeFile] = []
    remove: list[LakeFile] = []
    is_over: bool = False


class Version(msgspec.Struct, omit_defaults=True):
    """One commit: data, ledger and how far a stream is, together. `forget` are files that were removed before and are
    not on disk any more."""

    version: int
    ts: int
    by: str
    changes: list[Change] = []
    streams: dict[str, int] = {}
    forget: list[str] = []
    format: int = FORMAT


class Head(msgspec.Struct):
    """An instance, without its details: which seqs the ledger covers, and what files there are."""

    covered: list[Seqs] = []
    files: int = 0
    small: int = 0
    rows: int = 0
    bytes: int = 0
    is_over: bool = False


class Heads(msgspec.Struct):
    """`streams` says for each query the last batch that is in the lake."""

    version: int = 0
    streams: dict[str, int] = {}
    instances: dict[str, dict[int, Head]] = {}

    def head(self, topic: str, epoch: int) -> Head:
        return self.instances.get(topic, {}).get(epoch) or Head()

    def apply(self, version: Version, small_bytes: int) -> None:
        assert version.version == self.version + 1, (version.version, self.version)
        self.version = version.version
        self.streams = {**self.streams, **version.streams}
        for change in version.changes:
            head = self.instances.setdefault(change.topic, {}).setdefault(change.epoch, Head())
            head.covered = union([*head.covered, *covered(change.spans)])
            for sign, files in ((1, change.add), (-1, change.remove)):
                head.files += sign * len(files)
                head.small += sign * sum(1 for file in files if file.bytes < small_bytes)
                head.rows += sign * sum(file.rows for file in files)
                head.bytes += sign * sum(file.bytes for file in files)
            head.is_over = head.is_over or change.is_over


class Part(msgspec.Struct):
    """An instance, with everything: its ledger, and its files by path."""

    spans: list[Span] = []
    files: dict[str, LakeFile] = {}
    is_over: bool = False

    def in_order(self) -> list[LakeFile]:
        return sorted(self.files.values(), key=lambda file: file.first)

    def ranges(self, what: str) -> list[Seqs]:
        return [(span.first, span.last) for span in self.spans if span.what == what]


class Lake(msgspec.Struct):
    """`removed` are files that no reader of this version reads, and when they were taken out."""

    version: int = 0
    parts: dict[str, dict[int, Part]] = {}
    removed: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, int, Part]]:
        for topic in sorted(self.parts):
            for epoch in sorted(self.parts[topic]):
                yield topic, epoch, self.parts[topic][epoch]

    def part(self, topic: str, epoch: int) -> Part:
        return self.parts.get(topic, {}).get(epoch) or Part()

    def apply(self, version: Version) -> None:
        assert version.version == self.version + 1, (version.version, self.version)
        self.version = version.version
        for change in version.changes:
            part = self.parts.setdefault(change.topic, {}).setdefault(change.epoch, Part())
            if change.spans:
                part.spans = joined([*part.spans, *change.spans])
            if change.deleted:
                part.spans = restated(part.spans, change.deleted)
            for file in change.remove:
                del part.files[file.path]
                self.removed[file.path] = version.ts
            for file in change.add:
                assert file.path not in part.files, f"{file.path} is there already"
                part.files[file.path] = file
                self.removed.pop(file.path, None)
            part.is_over = part.is_over or change.is_over
        for path in version.forget:
            self.removed.pop(path, None)


def folder(topic: str, epoch: int, day: str) -> str:
    """Where the files of an instance and a day are. A name that is too long for a path is cut, and told apart by a
    hash: the manifest has the whole one."""
    name = quote(topic, safe="")
    if len(name) > _LONGEST_FOLDER:
        name = f"{_cut(name)}~{hashlib.sha256(topic.encode()).hexdigest()[:16]}"
    return f"topic={name}/epoch={epoch}/day={day}"


def _cut(name: str) -> str:
    """Not in the middle of an escape."""
    cut = name[: _LONGEST_FOLDER - 20]
    return cut[: cut.rindex("%")] if "%" in cut[-2:] else cut


def file_name(first: int, last: int, token: str) -> str:
    return f"{first:020d}-{last:020d}-{token}.parquet"
