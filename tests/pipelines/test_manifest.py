"""The manifest and the ledger: exact, whoever writes beside, wherever it lies."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from topics.core.errors import UnknownFormat
from topics.pipelines.lake import Change, Heads, LakeFile, Version
from topics.pipelines.manifest import Conflict, Manifest
from topics.pipelines.spans import Seqs, Span, account, covered, joined, restated, seqs, union, within, without
from topics.pipelines.stores import HadoopStore, LocalStore, Store


@pytest.fixture(params=["local", "hadoop"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "lake")
    spark: SparkSession = request.getfixturevalue("spark")
    return HadoopStore(f"file:{tmp_path}/lake", spark)


def add(manifest: Manifest, first: int, last: int) -> Version | None:
    file = LakeFile(f"f{first}", "2026-01-01", first, last, last - first + 1, 10, 0, 0)
    change = Change("t", 1, [Span(first, last, "archived")], add=[file])
    return manifest.commit("test", lambda _: Version(0, 0, "", [change], {"q": first}))


def test_a_file_is_created_once_and_whole(store: Store) -> None:
    assert store.read("a/b") is None
    assert store.create("a/b", b"one")
    assert not store.create("a/b", b"two")
    assert store.read("a/b") == b"one"
    store.replace("a/c", b"1")
    store.replace("a/c", b"2")
    assert store.read("a/c") == b"2"
    store.move("a/c", "topic=x%3Ay/c")
    found = {entry.path: entry.bytes for entry in store.walk("") if not entry.path.endswith(".crc")}
    assert found == {"a/b": 3, "topic=x%3Ay/c": 1}
    with pytest.raises(FileExistsError):
        store.move("a/b", "topic=x%3Ay/c")
    store.delete("a")
    store.delete("nothing")
    assert store.read("a/b") is None


def test_versions_add_up_and_snapshots_say_the_same(store: Store) -> None:
    manifest = Manifest(store)
    for number in range(40):
        add(manifest, number * 10 + 1, number * 10 + 10)
    fresh = Manifest(store)
    assert fresh.latest() == 40
    assert fresh.heads().head("t", 1).covered == [(1, 400)]
    assert fresh.heads().streams == {"q": 391}
    assert fresh.heads().head("t", 1).files == 40
    part = fresh.lake().part("t", 1)
    assert part.spans == [Span(1, 400, "archived")]
    assert [file.first for file in part.in_order()] == [number * 10 + 1 for number in range(40)]
    assert fresh.lake(33).part("t", 1).spans == [Span(1, 330, "archived")]


def test_what_reading_the_heads_costs_does_not_grow_with_the_history(tmp_path: Path) -> None:
    class Counting(LocalStore):
        reads = 0

        def read(self, path: str) -> bytes | None:
            self.reads += 1
            return super().read(path)

    store = Counting(tmp_path)
    costs: list[int] = []
    for count in (40, 400):
        manifest = Manifest(store)
        while manifest.latest() < count:
            number = manifest.latest()
            add(manifest, number * 10 + 1, number * 10 + 10)
        store.reads = 0
        Manifest(store).heads()
        costs.append(store.reads)
    # 8 versions behind a snapshot, then 16.
    assert costs[1] <= costs[0] + 20, costs


def test_of_two_writers_one_is_first_and_the_other_follows(store: Store) -> None:
    one, other = Manifest(store), Manifest(store)
    add(one, 1, 10)
    add(other, 11, 20)
    add(one, 21, 30)
    assert Manifest(store).heads().head("t", 1).covered == [(1, 30)]
    assert Manifest(store).latest() == 3


def test_many_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    def work(lane: int) -> None:
        manifest = Manifest(LocalStore(tmp_path))
        for number in range(10):
            change = Change(f"t{lane}", 1, [Span(number + 1, number + 1, "lost", "cap")])
            manifest.commit("test", lambda _, change=change: Version(0, 0, "", [change]))  # type: ignore[misc]

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heads = Manifest(LocalStore(tmp_path)).heads()
    assert heads.version == 40
    assert [heads.head(f"t{lane}", 1).covered for lane in range(4)] == [[(1, 10)]] * 4


def test_a_hint_that_is_missing_old_or_broken_costs_time_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(3):
        add(Manifest(store), number * 10 + 1, number * 10 + 10)
    for hint in (b"", b"1", b"99", b"x"):
        store.replace("_lake/latest", hint)
        assert Manifest(store).latest() == 3
    store.delete("_lake/latest")
    assert Manifest(store).latest() == 3


def test_versions_that_nobody_needs_are_forgotten_and_the_rest_still_adds_up(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    manifest = Manifest(store)
    for number in range(100):
        add(manifest, number * 10 + 1, number * 10 + 10)
    behind = Manifest(store)
    behind._heads = Manifest(store)._newest_heads(64)
    assert manifest.forget_before(1) == 95
    assert behind.heads().head("t", 1).covered == [(1, 1000)], "one that was behind goes on from a snapshot"
    fresh = Manifest(store)
    assert fresh.heads().head("t", 1).covered == [(1, 1000)]
    assert len(fresh.lake().part("t", 1).files) == 100


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create(f"_lake/log/{1:020d}.json", msgspec.json.encode({"version": 1, "ts": 0, "by": "", "format": 2}))
    with pytest.raises(UnknownFormat, match="has format 2"):
        Manifest(store).heads()


def test_a_writer_that_never_gets_through_says_so(tmp_path: Path) -> None:
    class Busy(LocalStore):
        def create(self, path: str, content: bytes) -> bool:
            return False

    with pytest.raises(Conflict, match="another writer was first"):
        add(Manifest(Busy(tmp_path)), 1, 2)


def numbers(ranges: list[Seqs]) -> set[int]:
    return {seq for first, last in ranges for seq in range(first, last + 1)}


def ranges_of(found: set[int]) -> list[Seqs]:
    return union((seq, seq) for seq in found)


SETS = st.sets(st.integers(1, 60))


@given(SETS, SETS)
def test_ranges_are_sets(one: set[int], other: set[int]) -> None:
    mine, theirs = ranges_of(one), ranges_of(other)
    assert numbers(mine) == one
    assert seqs(mine) == len(one)
    assert numbers(without(mine, theirs)) == one - other
    assert numbers(within(mine, theirs)) == one & other
    assert numbers(union([*mine, *theirs])) == one | other


@given(SETS, SETS, st.integers(1, 30), st.integers(31, 60))
def test_an_account_gives_every_seq_of_its_range_one_fate(
    archived: set[int], lost: set[int], first: int, last: int
) -> None:
    gaps = [Span(start, end, "lost", "cap") for start, end in ranges_of(lost)]
    spans = account(first, last, ranges_of(archived), gaps)
    assert covered(spans) == [(first, last)]
    fate = {seq: span.what for span in spans for seq in range(span.first, span.last + 1)}
    for seq in range(first, last + 1):
        assert fate[seq] == ("archived" if seq in archived else "lost" if seq in lost else "deleted")
    assert joined(spans) == spans


@given(SETS, SETS)
def test_what_is_erased_was_archived(archived: set[int], gone: set[int]) -> None:
    spans = account(1, 60, ranges_of(archived), [])
    after = restated(spans, ranges_of(gone))
    assert covered(after) == [(1, 60)]
    left = {seq for span in after if span.what == "archived" for seq in range(span.first, span.last + 1)}
    assert left == archived - gone


def test_heads_begin_empty() -> None:
    assert Heads().head("t", 1).covered == []
