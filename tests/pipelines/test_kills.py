"""Whatever is killed, at whatever stage: after a restart `verify` is clean, and no row is doubled.

Starting Spark costs more than all that it does here. Therefore all pipelines are brought to the stages at which they
shall die in one driver, and die together.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from tests.http.server import Child
from tests.pipelines.calm import compact, replay_into, tier, verify
from tests.pipelines.driver import Driver, Job, Said
from tests.pipelines.logs import append, datas, delete, put, told
from tests.spark.conftest import need_java
from tests.spark.proxy import PATIENCE, Proxy, process_of, read_of, spool_of
from topics.pipelines import archived
from topics.pipelines.progress import Report

pytestmark = pytest.mark.timeout(900)

RECORDS = 60
TIER_STAGES = ["writing", "written", "moving", "moved-one", "moved", "committing", "committed", "trimmed"]
COMPACT_STAGES = ["rewriting", "rewritten", "moved-one", "moved", "committed"]
REPLAY_STAGES = ["planned", "reading", "writing", "written", "noted"]
# In the first batch, or in the second: what is done then is done on top of what is there.
TIER_MOMENTS = [(stage, 1 + number % 2) for number, stage in enumerate(TIER_STAGES)]
REPLAY_MOMENTS = [(stage, 1 if stage == "planned" else 2) for stage in REPLAY_STAGES]


class Place:
    """A server that can be killed, and a proxy in front of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = Child(folder / "data").wait_until_ready()
        self.port = self._server.port
        self.url = self._server.url
        self.proxy = Proxy(self.port)
        self.client = self._server.client()

    def kill_server(self) -> None:
        self._server.kill()
        self._server = Child(self.folder / "data", TOPICS_PORT=str(self.port)).wait_until_ready()

    def close(self) -> None:
        self.proxy.close()
        self.client.close()
        self._server.kill()

    def lake(self, name: str) -> str:
        return str(self.folder / "lakes" / name)

    def source(self, name: str) -> tuple[list[int], list[tuple[int, int, str]]]:
        """A topic with losses and deletions; what it tells now is what a lake of it must have."""
        append(self.client, name, RECORDS, tags=10)
        put(self.client, name, cap_records=50)
        put(self.client, name, cap_records=0)
        delete(self.client, name, match="t7")
        return told(self.client, name)

    def tiering(self, name: str) -> dict[str, Any]:
        return {"url": self.url, "root": self.lake(name), "topics": [name], "max_records": 30, "trim": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("kills"))
    yield place
    place.close()


class Killed(msgspec.Struct):
    """What the topics had when everything was alive, what tasks' deaths led to, and what pipelines said before."""

    sources: dict[str, list[int]]
    said: dict[str, Said]


class Compactable(msgspec.Struct):
    """A lake of two files, of which something was erased from the log; what is left when that is followed."""

    root: str
    left: list[int]


@pytest.fixture(scope="module")
def compactable(place: Place, spark: SparkSession) -> Compactable:
    """Those that are compacted and killed are copies of it."""
    left = [seq for seq in place.source("compact")[0] if seq % 10 != 3]
    tier(spark, **place.tiering("compact"))
    delete(place.client, "compact", match="t3")
    return Compactable(place.lake("compact"), left)


@pytest.fixture(scope="module")
def killed(place: Place, spark: SparkSession, compactable: Compactable) -> Killed:
    need_java()
    sources: dict[str, list[int]] = {}
    jobs: list[Job] = []
    for stage, nth in TIER_MOMENTS:
        name = f"tier-{stage}-{nth}"
        sources[name] = place.source(name)[0]
        jobs.append(Job(name, "tier", place.tiering(name), stage, nth))
    for stage in [*COMPACT_STAGES, "tasks"]:
        name = f"compact-{stage}"
        shutil.copytree(compactable.root, place.lake(name))
        jobs.append(Job(name, "compact", {"root": place.lake(name), "url": place.url}, stage, 1, stage == "tasks"))
    place.source("past")
    tier(spark, **{**place.tiering("past"), "trim": False})
    append(place.client, "past", 20)
    for stage, nth in REPLAY_MOMENTS:
        jobs.append(Job(f"replay-{stage}", "replay", replaying(place, f"replay-{stage}"), stage, nth))
    driver = Driver(place.folder / "driver.log")
    said: dict[str, Said] = {}
    try:
        driver.hear("driver")
        for job in jobs:
            driver.start(job)
            said[job.name] = driver.hear(job.name)
        said |= kill_tasks(place, driver, sources)
    finally:
        driver.kill()
    return Killed(sources, said)


def replaying(place: Place, name: str) -> dict[str, Any]:
    return {"topic": "past", "dest": name, "url": place.url, "root": place.lake("past"), "chunk": 15}


def kill_tasks(place: Place, driver: Driver, sources: dict[str, list[int]]) -> dict[str, Said]:
    """A tier's task while it reads, and a replay's while it writes: killed with -9."""
    name = "tier-task"
    sources[name] = place.source(name)[0]
    reading = place.proxy.hold("request", read_of(name))
    driver.start(Job(name, "tier", {**place.tiering(name), "url": place.proxy.url}))
    assert reading.wait()
    assert reading.request is not None
    os.kill(process_of(reading.request, place.proxy.port), signal.SIGKILL)
    reading.release("cut")
    copy = "replay-task"
    writing = place.proxy.hold("request", spool_of(copy, chunk=0))
    driver.start(Job(copy, "replay", {**replaying(place, copy), "url": place.proxy.url}))
    assert writing.wait()
    assert writing.request is not None
    os.kill(process_of(writing.request, place.proxy.port), signal.SIGKILL)
    writing.release("cut")
    return {name: driver.hear(name), copy: driver.hear(copy)}


def check(spark: SparkSession, place: Place, name: str, expected: list[int]) -> None:
    """Every seq has one fate, and the rows are those that the topic had, each once, with its own data."""
    verified = verify(spark, place.lake(name), url=place.url)
    assert verified.ok, verified.problems
    (instance,) = verified.instances
    assert (instance.archived + instance.lost + instance.deleted, instance.waiting) == (RECORDS, 0)
    rows = archived(spark, place.lake(name)).selectExpr("seq", "get_json_object(data, '$.n') AS n").collect()
    assert sorted((row["seq"], int(row["n"])) for row in rows) == [(seq, seq) for seq in expected]


@pytest.mark.parametrize(("stage", "nth"), TIER_MOMENTS)
def test_a_tier_whose_driver_is_killed_goes_on_with_every_row_once(
    spark: SparkSession, place: Place, killed: Killed, stage: str, nth: int
) -> None:
    name = f"tier-{stage}-{nth}"
    assert killed.said[name].how == "reached", killed.said[name]
    tier(spark, **place.tiering(name))
    check(spark, place, name, killed.sources[name])


@pytest.mark.parametrize("stage", COMPACT_STAGES)
def test_a_compact_whose_driver_is_killed_leaves_a_lake_that_is_whole_before_and_after(
    spark: SparkSession, place: Place, killed: Killed, compactable: Compactable, stage: str
) -> None:
    name = f"compact-{stage}"
    assert killed.said[name].how == "reached", killed.said[name]
    assert verify(spark, place.lake(name), url=place.url).ok
    compact(spark, place.lake(name), url=place.url)
    check(spark, place, name, compactable.left)


PAST = [("hole", 10), *[{"n": seq} for seq in range(11, 81) if seq not in (17, 27, 37, 47, 57)]]


@pytest.mark.parametrize("stage", REPLAY_STAGES)
def test_a_replay_whose_driver_is_killed_goes_on_with_every_row_once(
    spark: SparkSession, place: Place, killed: Killed, stage: str
) -> None:
    name = f"replay-{stage}"
    assert killed.said[name].how == "reached", killed.said[name]
    replay_into(spark, **replaying(place, name))
    assert datas(place.client, name) == PAST


def test_tasks_that_are_killed_are_done_again_and_nothing_is_doubled(
    spark: SparkSession, place: Place, killed: Killed, compactable: Compactable
) -> None:
    for name in ("tier-task", "replay-task", "compact-tasks"):
        assert killed.said[name].how == "done", killed.said[name]
    check(spark, place, "tier-task", killed.sources["tier-task"])
    assert datas(place.client, "replay-task") == PAST
    assert killed.said["compact-tasks"].killed > 0, "no task was killed"
    check(spark, place, "compact-tasks", compactable.left)


class KillsServer(Report):
    """Kills the server at a stage, and starts it again: what comes next meets another process."""

    def __init__(self, place: Place, stage: str) -> None:
        super().__init__("kills", stage)
        self._place = place
        self._stage: str | None = stage

    def stage(self, name: str) -> None:
        super().stage(name)
        if name == self._stage:
            self._stage = None
            self._place.kill_server()

    @property
    def has_killed(self) -> bool:
        return self._stage is None


@pytest.mark.parametrize("stage", ["writing", "written", "committed"])
def test_a_tier_whose_server_is_killed_goes_on(spark: SparkSession, place: Place, stage: str) -> None:
    name = f"server-tier-{stage}"
    expected, _ = place.source(name)
    report = KillsServer(place, stage)
    tier(spark, report=report, **place.tiering(name))
    assert report.has_killed
    check(spark, place, name, expected)


def test_a_server_that_is_killed_while_a_task_reads_is_asked_again(spark: SparkSession, place: Place) -> None:
    expected, _ = place.source("server-read")
    hold = place.proxy.hold("answer", read_of("server-read"))
    running = tier(spark, **{**place.tiering("server-read"), "url": place.proxy.url, "once": False})
    assert hold.wait(PATIENCE)
    place.kill_server()
    hold.release("cut")
    running.query.processAllAvailable()
    running.stop()
    check(spark, place, "server-read", expected)


@pytest.mark.parametrize("stage", ["rewriting", "committed"])
def test_a_compact_whose_server_is_killed_goes_on(
    spark: SparkSession, place: Place, compactable: Compactable, stage: str
) -> None:
    name = f"server-compact-{stage}"
    shutil.copytree(compactable.root, place.lake(name))
    report = KillsServer(place, stage)
    compact(spark, place.lake(name), url=place.url, report=report)
    assert report.has_killed
    check(spark, place, name, compactable.left)


@pytest.mark.parametrize("stage", ["planned", "reading", "writing", "written"])
def test_a_replay_whose_server_is_killed_goes_on(spark: SparkSession, place: Place, killed: Killed, stage: str) -> None:
    name = f"server-replay-{stage}"
    report = KillsServer(place, stage)
    replay_into(spark, report=report, **replaying(place, name))
    assert report.has_killed
    assert datas(place.client, name) == PAST


def test_a_replay_whose_server_loses_what_was_spooled_is_run_again(
    spark: SparkSession, place: Place, killed: Killed
) -> None:
    arguments = {**replaying(place, "server-spool"), "url": place.proxy.url}
    hold = place.proxy.hold("request", lambda request: request.path.endswith("/commit"))
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            assert hold.wait(PATIENCE)
            place.kill_server()
            hold.release("cut")
        except BaseException as error:
            failed.append(error)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(Exception, match="the server lost what this batch had sent"):
        replay_into(spark, **arguments)
    killer.join(PATIENCE)
    assert not failed, failed
    replay_into(spark, **arguments)
    assert datas(place.client, "server-spool") == PAST
