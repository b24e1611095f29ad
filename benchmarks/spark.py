"""Spark over topics, beside the same jobs over a source that reads nothing: to nowhere, to Parquet, and to a topic."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from benchmarks.measure import Figure, body_of
from benchmarks.servers import need, topics_server

_RECORDS = int(os.environ.get("BENCH_RECORDS", "10000000"))
_PER_TRIGGER = 2_000_000
_PER_PARTITION = 500_000
_TURNS = 5


def run(directory: Path) -> list[Figure]:
    need("java", "openjdk-17-jre-headless")
    # Spark's Python processes must be ones that have this package.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    with topics_server(directory / "topics", TOPICS_CHECKPOINT_BYTES=str(256 << 20)) as (url, _):
        _fill(url)
        return _Jobs(directory, url).run()


def _fill(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    body = body_of(10_000)
    for _ in range(_RECORDS // 10_000):
        connection.request("POST", "/v0/topics/source?return_seqs=false", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status not in (200, 201):
            raise SystemExit(f"filling the topic failed: {answer.status}")


class _Jobs:
    def __init__(self, directory: Path, url: str) -> None:
        from pyspark.sql import SparkSession

        from benchmarks.synthetic import Synthetic

        self._directory = directory
        self._url = url
        self._number = 0
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        self._spark = (
            builder.config("spark.driver.memory", "4g").config("spark.ui.showConsoleProgress", "false").getOrCreate()
        )
        self._spark.sparkContext.setLogLevel("ERROR")
        self._spark.dataSource.register(Synthetic)
        self._topics = {
            "url": url,
            "topic": "source",
            "maxRecordsPerTrigger": str(_PER_TRIGGER),
            "recordsPerPartition": str(_PER_PARTITION),
        }
        self._synthetic = {
            "rows": str(_RECORDS),
            "perPartition": str(_PER_PARTITION),
            "perTrigger": str(_PER_TRIGGER),
            "data": body_of(1).decode().removeprefix('{"records":[{"data":').removesuffix("}]}"),
        }

    def run(self) -> list[Figure]:
        figures: list[Figure] = []
        try:
            figures += self._compare("batch to noop", 0.6, self._batch_to_noop)
            figures += self._compare("stream to noop", 0.6, self._stream_to_noop)
            figures += self._compare("stream to Parquet", 0.9, self._stream_to_parquet)
            figures += self._compare("stream to a topic", 0.6, self._stream_to_topic)
        finally:
            self._spark.stop()
        return figures

    def _compare(self, what: str, target: float, job: Callable[[str, dict[str, str]], None]) -> list[Figure]:
        """In pairs, one right behind the other and each first in turn: the machine's speed changes within a minute."""
        pair = [("synthetic", self._synthetic), ("topics", self._topics)]
        speeds: dict[str, list[float]] = {"topics": [], "synthetic": []}
        for _ in range(_TURNS):
            for name, options in pair:
                started = time.perf_counter()
                job(name, options)
                speeds[name].append(_RECORDS / (time.perf_counter() - started))
            pair.reverse()
        ratios = [topics / ceiling for topics, ceiling in zip(speeds["topics"], speeds["synthetic"], strict=True)]
        all_of_them = f"of {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        return [
            Figure(f"{what}, topics, best", max(speeds["topics"]), "records/s"),
            Figure(f"{what}, ceiling, best", max(speeds["synthetic"]), "records/s", note="a source that reads nothing"),
            Figure(f"{what}: topics / ceiling, median", median(ratios), "ratio", f">= {target}", all_of_them),
        ]

    def _batch_to_noop(self, source: str, options: dict[str, str]) -> None:
        self._spark.read.format(source).options(**options).load().write.format("noop").mode("overwrite").save()

    def _stream_to_noop(self, source: str, options: dict[str, str]) -> None:
        self._stream(source, options, "noop", {})

    def _stream_to_parquet(self, source: str, options: dict[str, str]) -> None:
        path = self._directory / f"lake-{self._number}"
        self._stream(source, options, "parquet", {"path": str(path)})
        shutil.rmtree(path)

    def _stream_to_topic(self, source: str, options: dict[str, str]) -> None:
        """The ceiling of this one has a sink, too, that takes rows and drops them."""
        sink = {"url": self._url, "topic": f"copy-{self._number}"} if source == "topics" else {}
        self._stream(source, options, source, sink)

    def _stream(self, source: str, options: dict[str, str], sink: str, sink_options: dict[str, str]) -> None:
        self._number += 1
        rows = self._spark.readStream.format(source).options(**options).load()
        checkpoint = str(self._directory / f"checkpoint-{self._number}")
        query = rows.writeStream.format(sink).options(**sink_options).option("checkpointLocation", checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()
