"""The lake: how fast tier fills it beside the same Parquet write from a source that reads nothing, what verify and a
query over all of it take, and what `tier --once` with nothing new costs for a small lake and a large one."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.measure import Figure, body_of
from benchmarks.servers import need, topics_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RECORDS = int(os.environ.get("BENCH_RECORDS", "10000000"))
_TOPICS = 20
_TURNS = int(os.environ.get("BENCH_TURNS", "2"))
_PER_TRIGGER = 20_000_000
_PER_PARTITION = 500_000
_IDLE_TURNS = 5
# Versions, each with a file for every topic, that make the large lake: a history of months.
_VERSIONS = 2_000


def run(directory: Path) -> list[Figure]:
    need("java", "openjdk-17-jre-headless")
    # Spark's Python processes must be ones that have this package.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    with topics_server(directory / "topics", TOPICS_CHECKPOINT_BYTES=str(256 << 20)) as (url, _):
        _fill(url)
        return _Lakes(directory, url).run()


def _fill(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    body = body_of(10_000)
    for number in range(_RECORDS // 10_000):
        path = f"/v0/topics/source.{number % _TOPICS}?return_seqs=false"
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status not in (200, 201):
            raise SystemExit(f"filling the topics failed: {answer.status}")


class _Lakes:
    def __init__(self, directory: Path, url: str) -> None:
        from pyspark.sql import SparkSession

        from benchmarks.synthetic import Synthetic

        self._directory = directory
        self._url = url
        self._number = 0
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "4")
        self._spark: SparkSession = builder.config("spark.driver.memory", "4g").getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self._spark.dataSource.register(Synthetic)

    def run(self) -> list[Figure]:
        try:
            return [*self._tier(), *self._whole(), *self._idle()]
        finally:
            self._spark.stop()

    def _tier(self) -> list[Figure]:
        best = {"tier": 0.0, "synthetic": 0.0}
        for _ in range(_TURNS):
            for name, job in (("synthetic", self._synthetic_to_parquet), ("tier", self._tier_all)):
                seconds = _timed(job)
                best[name] = max(best[name], _RECORDS / seconds)
        ratio = best["tier"] / best["synthetic"]
        return [
            Figure(f"tier, {_RECORDS:,} records over {_TOPICS} topics", best["tier"], "records/s"),
            Figure("the same Parquet write, ceiling", best["synthetic"], "records/s", note="reads nothing"),
            Figure("tier / ceiling", ratio, "ratio", ">= 0.5"),
        ]

    def _synthetic_to_parquet(self) -> None:
        self._number += 1
        data = body_of(1).decode().removeprefix('{"records":[{"data":').removesuffix("}]}")
        counts = {"rows": _RECORDS, "perPartition": _PER_PARTITION, "perTrigger": _PER_TRIGGER}
        options = {"data": data, **{name: str(count) for name, count in counts.items()}}
        rows = self._spark.readStream.format("synthetic").options(**options).load()
        path = self._directory / f"plain-{self._number}"
        writer = rows.select("seq", "ts", "node", "tag", "meta", "data").writeStream.format("parquet")
        writer = writer.option("compression", "zstd").option("path", str(path))
        writer = writer.option("checkpointLocation", str(self._directory / f"checkpoint-{self._number}"))
        writer.trigger(availableNow=True).start().awaitTermination()
        shutil.rmtree(path)

    def _tier_all(self) -> None:
        from topics.pipelines import tier

        self._number += 1
        shutil.rmtree(self._directory / "lake", ignore_errors=True)
        progress = tier(self._spark, self._url, self._lake, prefix="source.", max_records=_PER_TRIGGER).progress
        assert progress.records == _RECORDS, progress

    @property
    def _lake(self) -> str:
        return str(self._directory / "lake")

    def _whole(self) -> list[Figure]:
        from topics.pipelines import archived, files, verify

        verified = verify(self._spark, self._lake, url=self._url)
        assert verified.ok, verified.problems
        assert verified.rows == _RECORDS
        seconds = _timed(lambda: verify(self._spark, self._lake, url=self._url))
        alone = _timed(lambda: verify(self._spark, self._lake))
        rows = archived(self._spark, self._lake).selectExpr("topic", "length(data) AS size")
        query = _timed(lambda: rows.groupBy("topic").sum("size").collect())
        size = sum(file.bytes for file in files(self._lake))
        return [
            Figure("verify, lake and log", seconds, "s", note=f"{_RECORDS / seconds:,.0f} records/s"),
            Figure("verify, lake alone", alone, "s", note=f"{_RECORDS / alone:,.0f} records/s"),
            Figure("a query over all of data", query, "s", note=f"{_RECORDS / query:,.0f} records/s"),
            Figure("the lake", size / (1 << 20), "MiB", note=f"{len(files(self._lake))} files"),
        ]

    def _idle(self) -> list[Figure]:
        """Nothing new: the same stream over a lake of a few versions, and over one with a long history."""
        from topics.pipelines import tier
        from topics.pipelines.lake import Change, LakeFile, Version
        from topics.pipelines.manifest import Manifest
        from topics.pipelines.spans import Span
        from topics.pipelines.stores import LocalStore

        def once() -> None:
            assert tier(self._spark, self._url, self._lake, prefix="source.").progress.records == 0

        small = min(_timed(once) for _ in range(_IDLE_TURNS))
        manifest = Manifest(LocalStore(Path(self._lake)))
        for number in range(_VERSIONS):
            file = LakeFile(f"topic=old/{number}", "2026-01-01", number + 1, number + 1, 1, 1 << 27, 0, 0)
            changes = [
                Change(f"old.{topic}", 1, [Span(number + 1, number + 1, "archived")], add=[file])
                for topic in range(_TOPICS)
            ]
            manifest.commit("bench", lambda _, changes=changes: Version(0, 0, "", changes))  # type: ignore[misc]
        large = min(_timed(once) for _ in range(_IDLE_TURNS))
        return [
            Figure("tier --once with nothing new, small lake", small, "s"),
            Figure(f"the same, {_VERSIONS * _TOPICS:,} files more", large, "s"),
            Figure("large / small", large / small, "ratio", "about 1"),
        ]


def _timed(job: Callable[[], object]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started
