"""The power goes, or the process is killed, in every single I/O call of everything that changes the disk."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.crash import (
    CLASSES,
    DEEP,
    ENDS,
    KILL,
    ManualClock,
    OPTIONS,
    Scenario,
    World,
    crashes,
    dump,
    shrink_chunks,
)
from tests.simdisk import PowerCut, SimDisk
from topics.core.config import Durability
from topics.engine.options import Options
from topics.log import Log


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_chunks(monkeypatch)


def nothing(world: World, durability: Durability) -> None:
    return


def topic(world: World, durability: Durability) -> None:
    world.put("t", durability=durability)


def records(world: World, durability: Durability) -> None:
    """A topic with a past: some of it synced, some not, some deleted."""
    world.put("t", durability=durability)
    world.append("t", 3, key="old")
    world.tick()
    world.append("t", 4)
    world.delete("t", match="red")
    world.append("t", 2, key="new")


def sealed(world: World, durability: Durability) -> None:
    """Records in a segment file, in the WAL behind it, and a second topic beside them."""
    world.put("t", durability=durability)
    world.put("u", durability="fsync")
    world.append("t", 9, size=60, key="old")
    world.append("u", 3)
    world.checkpoint()
    world.append("t", 4, size=60, key="new")
    world.append("u", 2)


def three(world: World, durability: Durability) -> None:
    for name in ("t", "u", "v"):
        world.put(name, durability=durability)
        world.append(name, 2)


def dead(world: World, durability: Durability) -> None:
    """A segment file of which almost nothing lives."""
    world.put("t", durability=durability)
    world.put("u", durability=durability)
    world.append("t", 12, size=60)
    world.append("u", 4, size=60)
    world.checkpoint()
    world.delete("t", before_seq=10)
    world.append("t", 2)
    world.delete("t", match="blue")


def write_some(world: World) -> None:
    world.append("t", 3, key="a")
    world.append("t", 1, key="b")
    world.tick()
    world.append("t", 2)


def write_in_groups(world: World) -> None:
    world.group(("t", 1), ("u", 3), ("t", 2), ("v", 1))
    world.group(("v", 2), ("t", 1))


def write_past_the_reservation(world: World) -> None:
    world.append("t", 600, size=1)
    world.append("t", 600, size=1)
    world.append("t", 1)


def create(world: World) -> None:
    world.put("a", durability="disk", seq_base=7)
    world.append("a", 2)
    world.append("b", 2, config={"durability": "fsync"})
    world.drop("a")
    world.put("a", durability="fsync")
    world.append("a", 1)
    world.drop("b")


def configure(world: World) -> None:
    world.put("t", cap_records=1000)
    world.append("t", 2)
    world.put("t", durability="fsync")
    world.append("t", 2)
    world.put("t", durability="memory", idempotency_window_ms=60_000)
    world.append("t", 2)
    world.put("t", durability="disk")
    world.append("t", 1)


def delete(world: World) -> None:
    world.delete("t", match="blue")
    world.append("t", 3)
    world.delete("t", before_seq=3)
    world.delete("t", before_seq=9, match="red")


def transact(world: World) -> None:
    world.transact({"t": 2, "u": 3})
    world.append("t", 1)
    world.transact({"u": 1, "t": 1, "v": 2})


def checkpoint(world: World) -> None:
    world.checkpoint()
    world.append("t", 2)
    world.checkpoint()


def rotate(world: World) -> None:
    world.log.engine.committer.rotate()
    world.append("t", 2)
    world.log.engine.committer.rotate()
    world.append("t", 1)


def reclaim(world: World) -> None:
    world.checkpoint()
    world.append("t", 1)
    world.delete("u", match="red")
    world.checkpoint()
    world.checkpoint()


def keep_up(world: World) -> None:
    """Checkpoints that run beside the writes, a step at a time."""
    for number in range(12):
        world.append("t", 2, size=60)
        if number % 4 == 3:
            world.delete("t", before_seq=4 * number)
        world.tick()


def close(world: World) -> None:
    world.close()


SCENARIOS = [
    Scenario("the first open", nothing, lambda world: create(world)),
    Scenario("appends", topic, write_some),
    Scenario("appends behind others", records, write_some),
    Scenario("group commits", three, write_in_groups),
    Scenario("appends past the reservation", topic, write_past_the_reservation),
    Scenario("creations", topic, create),
    Scenario("config changes", records, configure),
    Scenario("deletes", records, delete),
    Scenario("deletes in sealed records", sealed, delete),
    Scenario("transactions", three, transact),
    Scenario("checkpoints", records, checkpoint),
    Scenario("checkpoints behind others", sealed, checkpoint),
    Scenario("WAL rotation", records, rotate),
    Scenario("space reclaim", dead, reclaim),
    Scenario(
        "checkpoints in steps",
        topic,
        keep_up,
        Options(checkpoint_bytes=600, cache_bytes=2048, reclaim_bytes=500, rewrite_below=0.9),
    ),
    Scenario("close", sealed, close),
]

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "_"))
every_class = pytest.mark.parametrize("durability", CLASSES)
every_end = pytest.mark.parametrize("end", ENDS)


@every_scenario
@every_class
@every_end
def test_a_crash_in_any_call_breaks_no_promise(scenario: Scenario, durability: Durability, end: str) -> None:
    for number, crashed in enumerate(crashes(scenario, durability)):
        world = crashed.reborn(crashed.end(end, Random(f"{number} {end}")), end)
        if not crashed.closed:
            world.same_again(end)
        world.go_on()
        world.reborn(world.end("drop", Random(number)), "drop").go_on()
