"""Exactly once, whatever is killed: drivers, tasks and the server, with -9, at chosen moments of a batch.

Starting a driver costs more than all that it does here. Therefore many copies, each of topics of its own, are brought
to the moments in which they shall die, and die together.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from tests.http.server import DEADLINE, Background, Child, client_of
from tests.spark.conftest import need_java
from tests.spark.copies import MAX_BATCH, fill, losses_of_copy, make, state
from tests.spark.driver import Copy, Driver
from tests.spark.proxy import (
    End,
    Hold,
    Matches,
    Proxy,
    Where,
    commit_of,
    process_of,
    read_of,
    spool_of,
    state_of,
    when,
)

# Three batches of 120, 120 and 60; tasks of 60, each of which sends two chunks.
RECORDS = 300
PER_BATCH = 120
PER_TASK = 60

# One fixture starts two drivers and brings all copies to their moments; on a busy machine that takes its time.
pytestmark = pytest.mark.timeout(900)

# A task may fail three times. Of all copies only those that are held while they spool keep a core, two at most.
_CONF = {"spark.master": "local[4,4]"}


class Place:
    """A server that can be killed, a proxy in front of it, and a driver: the one that is alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = self._serve(0)
        self.port = self._server.port
        self.proxy = Proxy(self.port)
        self.client = self._server.client()
        self._driver: Driver | None = None

    def _serve(self, port: int) -> Child:
        server = Child(self.folder / "data", TOPICS_PORT=str(port), TOPICS_MAX_BATCH_RECORDS=str(MAX_BATCH))
        try:
            return server.wait_until_ready()
        except BaseException:
            server.kill()
            raise

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            need_java()
            self._driver = Driver(self.folder / "driver.log", _CONF)
            self._driver.wait_until_ready()
        return self._driver

    def kill_driver(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None

    def kill_server(self) -> None:
        self._server.kill()

    def restart_server(self) -> None:
        self._server = self._serve(self.port)

    def close(self) -> None:
        self.kill_driver()
        self.proxy.close()
        self.client.close()
        self._server.kill()

    def checkpoint(self, name: str) -> Path:
        return self.folder / "checkpoints" / name

    def copy(self, name: str, durability: str = "disk", **source: str) -> Copy:
        """A source with its records, and an empty destination; the second time, the same copy again."""
        if not self.checkpoint(name).exists():
            make(self.client, f"{name}.from")
            make(self.client, f"{name}.to", durability=durability)
            fill(self.client, f"{name}.from", RECORDS)
        # Held as long as it takes to bring all the others to their moments.
        server = {"url": self.proxy.url, "timeoutMs": "600000", "retryMs": "600000"}
        options = {"maxRecordsPerTrigger": str(PER_BATCH), "recordsPerPartition": str(PER_TASK), **source}
        return Copy(
            name,
            source={**server, "topic": f"{name}.from", **options},
            sink={**server, "topic": f"{name}.to", "checkpointLocation": str(self.checkpoint(name))},
        )

    def evict(self, name: str, seqs: int) -> None:
        """The source loses its first records."""
        make(self.client, f"{name}.from", cap_records=RECORDS - seqs)
        assert state(self.client, f"{name}.from")["evict_floor"] == seqs + 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("kills"))
    yield place
    place.close()


class Moment(msgspec.Struct, frozen=True):
    """Where in its life a copy is stopped. `held` becomes of the request after the kill, `late` once all is over;
    `evicted` seqs are lost while nobody runs, and `lost` is what the destination must tell."""

    name: str
    where: Where
    matches: Callable[[str, Path], Matches]
    held: End = "cut"
    late: bool = False
    evicted: int = 0
    lost: tuple[tuple[int, int], ...] = ()
    durability: str = "disk"


def _planned(batch: int) -> Callable[[str, Path], Matches]:
    """Spark asks for the tasks of a batch whose offsets it has logged."""
    return lambda name, logs: when(state_of(f"{name}.from"), logs / "offsets" / str(batch))


def _spooling(batch: int) -> Callable[[str, Path], Matches]:
    """A task has sent a chunk, and is about to send the next."""
    return lambda name, logs: when(spool_of(f"{name}.to", chunk=1), logs / "offsets" / str(batch))


def _committing(batch: int) -> Callable[[str, Path], Matches]:
    return lambda name, logs: when(commit_of(f"{name}.to"), logs / "offsets" / str(batch))


def _between(batch: int) -> Callable[[str, Path], Matches]:
    """A batch is in Spark's log of commits, and the next one is not planned."""
    return lambda name, logs: when(
        state_of(f"{name}.from"), logs / "commits" / str(batch), logs / "offsets" / str(batch + 1)
    )


DRIVER_MOMENTS = [
    Moment("first-batch-planned", "request", _planned(0)),
    Moment("second-batch-spooling", "request", _spooling(1), durability="fsync"),
    Moment("second-batch-spooled", "request", _committing(1), durability="fsync"),
    Moment("commit-arrives-before-the-restart", "request", _committing(1), held="pass"),
    Moment("commit-arrives-when-all-is-over", "request", _committing(0), held="pass", late=True),
    Moment("first-batch-committed", "answer", _committing(0)),
    Moment("between-batches", "request", _between(0)),
    Moment("first-batch-planned-then-evicted-in-part", "request", _planned(0), evicted=80, lost=((1, 80),)),
    Moment("first-batch-planned-then-all-evicted", "request", _planned(0), evicted=270, lost=((1, 270),)),
    Moment("second-batch-planned-then-evicted", "request", _planned(1), evicted=200, lost=((121, 200),)),
    Moment("second-batch-committed-then-evicted", "answer", _committing(1), evicted=270, lost=((241, 270),)),
]


class Outcome(msgspec.Struct):
    error: str | None
    late_status: int | None


@pytest.fixture(scope="module")
def killed_drivers(place: Place) -> dict[str, Outcome]:
    """All copies are brought to their moment, the driver is killed, another one goes on from their checkpoints."""
    copies = {moment.name: place.copy(moment.name, moment.durability) for moment in DRIVER_MOMENTS}
    holds: dict[str, Hold] = {}
    for moment in DRIVER_MOMENTS:
        name = moment.name
        holds[name] = place.proxy.hold(moment.where, moment.matches(name, place.checkpoint(name)))
        place.driver.start(copies[name])
        place.driver.bring(copies[name], holds[name])
    place.kill_driver()
    for moment in DRIVER_MOMENTS:
        if not moment.late:
            holds[moment.name].release(moment.held)
        if moment.evicted:
            place.evict(moment.name, moment.evicted)
    errors = {name: place.driver.run(copy) for name, copy in copies.items()}
    for moment in DRIVER_MOMENTS:
        if moment.late:
            holds[moment.name].release(moment.held)
    return {name: Outcome(errors[name], holds[name].status) for name in copies}


@pytest.mark.parametrize("moment", DRIVER_MOMENTS, ids=lambda moment: moment.name)
def test_a_driver_killed_at_any_moment_has_every_row_and_every_loss_once_after_a_restart(
    place: Place, killed_drivers: dict[str, Outcome], moment: Moment
) -> None:
    outcome = killed_drivers[moment.name]
    assert outcome.error is None, outcome.error
    assert losses_of_copy(place.client, f"{moment.name}.to", RECORDS) == list(moment.lost)


def test_a_commit_of_a_dead_driver_that_arrives_late_is_answered_and_changes_nothing(
    place: Place, killed_drivers: dict[str, Outcome]
) -> None:
    assert killed_drivers["commit-arrives-before-the-restart"].late_status == 200
    # Its batch was committed by the successor, and later ones too: the pair of query and batch is an old one.
    assert killed_drivers["commit-arrives-when-all-is-over"].late_status == 409
    assert losses_of_copy(place.client, "commit-arrives-when-all-is-over.to", RECORDS) == []


class ServerMoment(msgspec.Struct, frozen=True):
    """`told` is what a copy that cannot recover by trying again says; None when it can."""

    name: str
    where: Where
    matches: Callable[[str, Path], Matches]
    told: str | None
    durability: str


_LOST = "the server lost what this batch had sent before it could be committed"
_STAGES: list[tuple[str, Where, Callable[[str, Path], Matches], str | None]] = [
    ("planned", "request", _planned(1), None),
    ("spooling", "request", _spooling(1), _LOST),
    ("spooled", "request", _committing(1), _LOST),
    ("committed", "answer", _committing(1), None),
]

SERVER_MOMENTS = [
    ServerMoment(f"server-{name}-{durability}", where, matches, told, durability)
    for durability in ("disk", "fsync")
    for name, where, matches, told in _STAGES
]


@pytest.fixture(scope="module")
def killed_servers(place: Place) -> dict[str, Outcome]:
    """All copies are brought to their moment, the server is killed and comes back; copies that fail are run again."""
    copies = {moment.name: place.copy(moment.name, moment.durability) for moment in SERVER_MOMENTS}
    holds: dict[str, Hold] = {}
    for moment in SERVER_MOMENTS:
        name = moment.name
        holds[name] = place.proxy.hold(moment.where, moment.matches(name, place.checkpoint(name)))
        place.driver.start(copies[name])
        place.driver.bring(copies[name], holds[name])
    place.kill_server()
    for hold in holds.values():
        hold.release("cut")
    place.restart_server()
    errors = {name: place.driver.end_of(copy) for name, copy in copies.items()}
    return {name: Outcome(errors[name], None) for name in copies}


@pytest.mark.parametrize("moment", SERVER_MOMENTS, ids=lambda moment: moment.name)
def test_a_server_killed_at_any_moment_is_waited_for_or_told_and_has_every_row_once(
    place: Place, killed_servers: dict[str, Outcome], moment: ServerMoment
) -> None:
    outcome = killed_servers[moment.name]
    if moment.told is None:
        assert outcome.error is None, outcome.error
    else:
        assert moment.told in (outcome.error or ""), outcome.error
        # Nothing of the batch is there, and all of the one before.
        assert losses_of_copy(place.client, f"{moment.name}.to", PER_BATCH) == []
        copy = place.copy(moment.name)
        assert place.driver.run(copy) is None
    assert losses_of_copy(place.client, f"{moment.name}.to", RECORDS) == []


def test_a_server_that_stays_away_is_told_and_the_copy_goes_on_when_it_is_back(place: Place) -> None:
    name = "server-away"
    copy = place.copy(name, retryMs="200")
    hold = place.proxy.hold("request", _planned(1)(name, place.checkpoint(name)))
    place.driver.start(copy)
    place.driver.bring(copy, hold)
    place.kill_server()
    hold.release("cut")
    told = place.driver.end_of(copy)
    place.restart_server()
    assert f"cannot reach {place.proxy.url}" in (told or "")
    assert place.driver.run(copy) is None
    assert losses_of_copy(place.client, f"{name}.to", RECORDS) == []


def test_a_task_whose_process_is_killed_while_it_spools_is_tried_again_and_its_rows_are_there_once(
    place: Place,
) -> None:
    name = "task-killed"
    copy = place.copy(name)
    hold = place.proxy.hold("request", spool_of(f"{name}.to", chunk=1))
    place.driver.start(copy)
    place.driver.bring(copy, hold)
    assert hold.request is not None
    os.kill(process_of(hold.request, place.proxy.port), signal.SIGKILL)
    assert place.driver.end_of(copy) is None
    # What the dead one had on its way arrives when all is over.
    hold.release("pass")
    assert hold.status == 404
    assert losses_of_copy(place.client, f"{name}.to", RECORDS) == []


@pytest.mark.parametrize("how", ["available", "batch"])
def test_a_task_that_fails_while_it_spools_is_tried_again_and_its_rows_are_there_once(
    place: Place, how: Literal["available", "batch"]
) -> None:
    name = f"task-failed-{how}"
    copy = msgspec.structs.replace(place.copy(name), how=how)
    hold = place.proxy.hold("request", spool_of(f"{name}.to", chunk=1))
    place.driver.start(copy)
    place.driver.bring(copy, hold)
    hold.release("refuse")
    assert place.driver.end_of(copy) is None
    assert losses_of_copy(place.client, f"{name}.to", RECORDS) == []


def test_seqs_that_are_evicted_between_their_planning_and_their_reading_are_a_loss_told_once(place: Place) -> None:
    name = "evicted-under-a-task"
    copy = place.copy(name, recordsPerPartition=str(PER_BATCH))
    hold = place.proxy.hold("request", read_of(f"{name}.from"))
    place.driver.start(copy)
    place.driver.bring(copy, hold)
    place.evict(name, 80)
    hold.release("pass")
    assert place.driver.end_of(copy) is None
    assert losses_of_copy(place.client, f"{name}.to", RECORDS) == [(1, 80)]


class Writer:
    """Appends numbered records as fast as it can, on a thread of its own."""

    def __init__(self, url: str, topic: str) -> None:
        self._client = client_of(url)
        self._topic = topic
        self._head = 0
        self._has_grown = threading.Condition()
        self._may_write = threading.Event()
        self._may_write.set()
        self._is_over = False
        self._work = Background(self._write)

    def _write(self) -> None:
        while not self._is_over:
            self._may_write.wait()
            fill(self._client, self._topic, MAX_BATCH)
            with self._has_grown:
                self._head += MAX_BATCH
                self._has_grown.notify_all()

    def wait_for(self, more: int) -> None:
        with self._has_grown:
            wanted = self._head + more
            assert self._has_grown.wait_for(lambda: self._head >= wanted, DEADLINE), "the writer stands"

    def pause(self) -> None:
        self._may_write.clear()

    def go_on(self) -> None:
        self._may_write.set()

    def stop(self) -> None:
        self._is_over = True
        self.go_on()
        try:
            self._work.result()
        finally:
            self._client.close()


def test_a_stream_that_cannot_follow_a_fast_writer_accounts_for_every_seq_once(place: Place) -> None:
    name, cap, rounds = "fast-writer", 2000, 3
    source, sink = f"{name}.from", f"{name}.to"
    copy = place.copy(name, recordsPerPartition=str(cap // 4), maxRecordsPerTrigger=str(2 * cap))
    make(place.client, source, cap_records=cap)
    writer = Writer(f"http://127.0.0.1:{place.port}", source)
    hold = place.proxy.hold("answer", commit_of(sink))
    try:
        place.driver.start(msgspec.structs.replace(copy, how="endless"))
        for number in range(2 * rounds):
            place.driver.bring(copy, hold)
            # The writer races with every other batch; in front of the ones between it makes sure of a loss, and rests
            # so that something is left.
            if number % 2 == 0:
                writer.wait_for(more=2 * cap)
                writer.pause()
            else:
                writer.go_on()
            held, hold = hold, place.proxy.hold("answer", commit_of(sink))
            held.release("pass")
    finally:
        writer.stop()
    place.driver.start(msgspec.structs.replace(copy, how="stop"))
    hold.release("pass")
    assert place.driver.end_of(copy) is None
    assert place.driver.run(copy) is None
    head = state(place.client, source)["head_seq"]
    losses = losses_of_copy(place.client, sink, head)
    assert len(losses) >= rounds
    count = state(place.client, sink)["count"]
    assert count >= rounds * cap // 2
    assert sum(last - first + 1 for first, last in losses) + count == head
