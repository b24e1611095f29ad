"""`verify` finds whatever is wrong with a lake; `compact` changes its files, and never what they say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.http.server import LocalServer
from tests.pipelines.calm import compact, tier, verify
from tests.pipelines.logs import append, delete, fates, put
from topics.pipelines import archived, files
from topics.pipelines.compacting import remove_unnamed
from topics.pipelines.lake import Change, LakeFile, Version
from topics.pipelines.manifest import Manifest, NotALake
from topics.pipelines.spans import Span
from topics.pipelines.stores import LocalStore


def manifest_of(root: str) -> Manifest:
    return Manifest(LocalStore(Path(root)))


def seqs_of(spark: SparkSession, root: str, topic: str) -> list[int]:
    return sorted(row["seq"] for row in archived(spark, root, topics=[topic]).select("seq").collect())


@pytest.fixture(scope="module")
def sound(spark: SparkSession, server: LocalServer, client: httpx.Client, tmp_path_factory: Any) -> str:
    """A lake with two files of one topic, 1 to 20 and 21 to 40, of which 1 to 5 are lost."""
    root = str(tmp_path_factory.mktemp("sound") / "lake")
    append(client, "sound", 20)
    put(client, "sound", cap_records=15)
    tier(spark, server.url, root, topics=["sound"])
    put(client, "sound", cap_records=0)
    append(client, "sound", 20)
    tier(spark, server.url, root, topics=["sound"])
    return root


def _first(root: str) -> Path:
    return Path(files(root)[0].path)


def _second(root: str) -> Path:
    return Path(files(root)[1].path)


def _rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(path, partitioning=None)
    pq.write_table(change(table), path, compression="zstd")


def _say(root: str, **fields: Any) -> None:
    lake = manifest_of(root).lake()
    topic, epoch, _ = next(iter(lake))
    manifest_of(root).commit("test", lambda _: Version(0, 0, "", [Change(topic, epoch, **fields)]))


def _name_again(root: str) -> None:
    """The same rows under another name."""
    copy = _first(root).with_name("00000000000000000006-00000000000000000020-copy.parquet")
    shutil.copy(_first(root), copy)
    known = next(file for _, _, part in manifest_of(root).lake() for file in part.in_order())
    path = str(copy.relative_to(root))
    again = LakeFile(path, known.day, known.first, known.last, known.rows, known.bytes, known.min_ts, known.max_ts)
    _say(root, add=[again])


DAMAGES: list[tuple[str, Callable[[str], object], str]] = [
    ("missing", lambda root: _first(root).unlink(), "is missing"),
    ("garbage", lambda root: _first(root).write_bytes(b"PAR1 and nothing"), "rows instead of 15"),
    (
        "short",
        lambda root: _rewrite(_first(root), lambda table: table.slice(1)),
        "archived by the ledger, and in no file",
    ),
    (
        "doubled",
        lambda root: _rewrite(_second(root), lambda table: pa.concat_tables([table, table.slice(3, 1)])),
        "in the lake more than once",
    ),
    (
        "unsorted",
        lambda root: _rewrite(_second(root), lambda table: table.take(list(range(19, -1, -1)))),
        "not sorted by seq",
    ),
    ("named twice", _name_again, "in the lake more than once"),
    (
        "not in the log any more",
        lambda root: _say(root, deleted=[(6, 10)]),
        "in a file, and not archived by the ledger",
    ),
    ("said lost", lambda root: _say(root, deleted=[(25, 25)]), "deleted by the ledger, and the log has it"),
]


@pytest.mark.parametrize(("how", "damage", "told"), DAMAGES, ids=[name for name, _, _ in DAMAGES])
def test_verify_finds_what_is_wrong(
    spark: SparkSession,
    server: LocalServer,
    sound: str,
    tmp_path: Path,
    how: str,
    damage: Callable[[str], object],
    told: str,
) -> None:
    root = str(tmp_path / "lake")
    shutil.copytree(sound, root)
    damage(root)
    verified = verify(spark, root, url=server.url)
    assert not verified.ok
    assert any(told in problem.what for problem in verified.problems), verified.problems


def test_verify_accounts_for_every_seq_of_a_sound_lake(spark: SparkSession, server: LocalServer, sound: str) -> None:
    verified = verify(spark, sound, url=server.url)
    assert verified.ok, verified.problems
    (instance,) = verified.instances
    assert (instance.archived, instance.lost, instance.deleted, instance.waiting) == (35, 5, 0, 0)
    assert verified.rows == 35
    assert verify(spark, sound).ok, "without the log too"


def test_what_is_no_lake_says_so(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotALake, match="has no manifest"):
        verify(spark, str(tmp_path))


def test_compact_merges_small_files_and_erases_what_the_log_erased(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    for _ in range(3):
        append(client, topic, 20, tags=10)
        tier(spark, server.url, lake, topics=[topic], trim=True)
    append(client, topic, 10, tags=10)
    before = {file.path for file in files(lake)}
    assert len(before) == 3
    # By tag, by seq, and by both; a trim is no erasure.
    delete(client, topic, match="t3")
    delete(client, topic, before_seq=5)
    delete(client, topic, before_seq=30, match=["tag", "Glob", "t7*"])
    result = compact(spark, lake, url=server.url)
    kept = [seq for seq in range(1, 61) if seq % 10 != 3 and seq >= 5 and not (seq < 30 and seq % 10 == 7)]
    assert seqs_of(spark, lake, topic) == kept
    assert result.erased == 60 - len(kept)
    assert len(files(lake)) == 1
    assert result.problems == []
    assert sum(last - first + 1 for first, last, what in fates(lake, topic) if what == "deleted") == result.erased
    assert verify(spark, lake, url=server.url).ok
    assert all(Path(path).exists() for path in before), "readers that have begun still have their files"
    again = compact(spark, lake, url=server.url)
    assert (again.merged, again.erased, again.version) == (0, 0, result.version), "nothing to do is nothing done"
    # What comes in later was read after the erasures.
    tier(spark, server.url, lake, topics=[topic])
    assert compact(spark, lake, url=server.url).erased == 0
    assert verify(spark, lake, url=server.url).ok


def test_a_reader_has_all_of_one_version_or_all_of_the_other(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    for _ in range(2):
        append(client, topic, 10, tags=2)
        tier(spark, server.url, lake, topics=[topic])
    reader = archived(spark, lake)
    delete(client, topic, match="t1")
    compact(spark, lake, url=server.url)
    assert reader.count() == 20
    assert archived(spark, lake).count() == 10
    # Every file that a version names is there as long as that version may be read.
    assert compact(spark, lake, vacuum=True, grace_ms=60_000).vacuumed == 0
    assert reader.count() == 20
    assert compact(spark, lake, vacuum=True, grace_ms=0).vacuumed > 0
    left = {str(path) for path in Path(lake).rglob("*.parquet")}
    assert left == {file.path for file in files(lake)}
    assert verify(spark, lake, url=server.url).ok


def test_vacuum_takes_what_crashes_left_once_it_is_old(sound: str, tmp_path: Path) -> None:
    root = str(tmp_path / "lake")
    shutil.copytree(sound, root)
    stray = _first(root).with_name("stray.parquet")
    stray.write_bytes(b"x")
    staged = Path(root) / "_staging" / "tier-0-x" / "part.parquet"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"x")
    named = [Path(file.path) for file in files(root)]
    assert remove_unnamed(manifest_of(root), 0) == 0
    now = manifest_of(root).now()
    assert remove_unnamed(Manifest(LocalStore(Path(root)), now=lambda: now + 3_700_000), 0) == 2
    assert not stray.exists()
    assert not staged.exists()
    assert all(path.exists() for path in named)


def test_a_history_of_deletes_that_the_log_has_forgotten_is_told(
    spark: SparkSession, server: LocalServer, client: httpx.Client, topic: str, lake: str
) -> None:
    append(client, topic, 5)
    tier(spark, server.url, lake, topics=[topic])
    for number in range(1001):
        delete(client, topic, match=f"nothing-{number}")
    result = compact(spark, lake, url=server.url)
    assert len(result.problems) == 1
    assert "does not know its deletes behind number 0" in result.problems[0]


def test_a_lake_whose_ledger_has_a_gap_is_not_sound_when_its_instance_is_over(
    spark: SparkSession, sound: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "lake")
    shutil.copytree(sound, root)
    _say(root, spans=[Span(50, 60, "lost", "cap")], is_over=True)
    assert [(each.first, each.last) for each in verify(spark, root).problems] == [(41, 49)]
