"""The same code on a cluster of two hosts: a second attempt beside the first one, and an executor that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.http.server import child
from tests.spark.cluster import cluster
from tests.spark.conftest import need_java
from tests.spark.copies import MAX_BATCH, fill, losses_of_copy, make
from tests.spark.driver import Copy, Driver, driving
from tests.spark.proxy import Hold, Matches, Proxy, process_of, spool_of

# Two tasks, one for each executor; each sends two chunks.
RECORDS = 120
PER_TASK = 60

# A cluster and a driver start in here.
pytestmark = pytest.mark.timeout(900)

_CONF = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.task.maxFailures": "4",
    "spark.locality.wait": "0",
    # A task is tried beside itself as soon as the other one is through.
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.quantile": "0.4",
    "spark.speculation.minTaskRuntime": "100ms",
}


class Place(msgspec.Struct):
    client: httpx.Client
    proxy: Proxy
    driver: Driver
    folder: Path

    def copy(self, name: str) -> Copy:
        make(self.client, f"{name}.from")
        make(self.client, f"{name}.to")
        fill(self.client, f"{name}.from", RECORDS)
        checkpoint = str(self.folder / "checkpoints" / name)
        server = {"url": self.proxy.url, "timeoutMs": "600000", "retryMs": "600000"}
        return Copy(
            name,
            source={**server, "topic": f"{name}.from", "recordsPerPartition": str(PER_TASK)},
            sink={**server, "topic": f"{name}.to", "checkpointLocation": checkpoint},
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need_java()
    folder = tmp_path_factory.mktemp("cluster")
    with child(folder / "data", TOPICS_MAX_BATCH_RECORDS=str(MAX_BATCH)) as server, cluster(folder) as master:
        proxy = Proxy(server.wait_until_ready().port)
        try:
            with (
                server.client() as client,
                driving(folder / "driver.log", {**_CONF, "spark.master": master}) as driver,
            ):
                yield Place(client, proxy, driver, folder)
        finally:
            proxy.close()


def _part_of(hold: Hold) -> str:
    """Of a held chunk: partition and attempt."""
    assert hold.request is not None
    return hold.request.query["part"]


def _rival_of(hold: Hold, topic: str) -> Matches:
    """The same chunk of the same partition, by another attempt."""
    part = _part_of(hold)
    partition = part.partition(".")[0]
    same_chunk = spool_of(topic, chunk=1)
    return lambda request: (
        same_chunk(request) and request.query["part"] != part and request.query["part"].partition(".")[0] == partition
    )


def test_a_speculative_second_attempt_of_a_stream_writes_no_row_twice(place: Place) -> None:
    copy = place.copy("speculative-stream")
    # The first attempt has sent its whole part, and is not told so.
    first = place.proxy.hold("answer", spool_of("speculative-stream.to", chunk=1))
    place.driver.start(copy)
    place.driver.bring(copy, first)
    second = place.proxy.hold("answer", _rival_of(first, "speculative-stream.to"))
    place.driver.bring(copy, second)
    assert (first.status, second.status) == (200, 200)
    # Both parts are whole on the server now; the second attempt comes through, and the first is of no use any more.
    second.release("pass")
    assert place.driver.end_of(copy) is None
    first.release("pass")
    assert losses_of_copy(place.client, "speculative-stream.to", RECORDS) == []


def test_a_speculative_second_attempt_of_a_batch_write_writes_no_row_twice(place: Place) -> None:
    copy = msgspec.structs.replace(place.copy("speculative-batch"), how="batch")
    first = place.proxy.hold("request", spool_of("speculative-batch.to", chunk=1))
    place.driver.start(copy)
    place.driver.bring(copy, first)
    second = place.proxy.hold("answer", _rival_of(first, "speculative-batch.to"))
    place.driver.bring(copy, second)
    second.release("pass")
    assert place.driver.end_of(copy) is None
    # What the first attempt had on its way arrives when all is over, and begins nothing.
    first.release("pass")
    assert first.status == 404
    assert losses_of_copy(place.client, "speculative-batch.to", RECORDS) == []


def test_an_executor_killed_while_its_task_spools_leaves_no_row_behind(place: Place) -> None:
    copy = place.copy("executor-killed")
    hold = place.proxy.hold("answer", spool_of("executor-killed.to", chunk=0))
    place.driver.start(copy)
    place.driver.bring(copy, hold)
    assert hold.request is not None
    os.kill(_executor_of(process_of(hold.request, place.proxy.port)), signal.SIGKILL)
    assert place.driver.end_of(copy) is None
    hold.release("pass")
    assert losses_of_copy(place.client, "executor-killed.to", RECORDS) == []


def _executor_of(pid: int) -> int:
    """The executor above one of its Python processes."""
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1, "no executor above"
    return pid
