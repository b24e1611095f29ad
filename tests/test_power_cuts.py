"""The power goes, or the process is killed, in every single I/O call of everything that changes the disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from random import Random

import pytest

from tests.crash import (
    CLASSES,
    DEEP,
    ENDS,
    KILL,
    OPTIONS,
    Scenario,
    World,
    assert_same,
    crashes,
    dump,
    left_by,
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


def three_new(world: World, durability: Durability) -> None:
    for name in ("t", "u", "v"):
        world.put(name, durability=durability)


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
    world.group(("t", 600), ("t", 1))
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
    for number in range(6):
        world.append("t", 3, size=60)
        if number % 2:
            world.delete("t", before_seq=3 * number)
        world.tick()


def close(world: World) -> None:
    world.close()


SCENARIOS = [
    Scenario("the first open", nothing, lambda world: create(world)),
    Scenario("appends", topic, write_some),
    Scenario("appends behind others", records, write_some),
    Scenario("group commits", three, write_in_groups),
    Scenario("group commits in new topics", three_new, write_in_groups),
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
        world.same_again()
        world.go_on()
        world.reborn(world.end("drop", Random(number)), "drop").go_on()


# Crashes in the recovery from a crash.


def a_whole_life(world: World) -> None:
    """Something of everything, so that a recovery finds all kinds of files and frames."""
    world.append("t", 5, size=60, key="k")
    world.put("u", durability="fsync")
    world.transact({"t": 2, "u": 1})
    world.checkpoint()
    world.delete("t", match="red")
    world.append("t", 3, key="l")
    world.checkpoint()
    world.group(("t", 1), ("u", 2), ("t", 2))
    world.drop("u")


LIFE = Scenario("a whole life", topic, a_whole_life)
PAIRS = [("torn", "drop"), ("reorder", "torn"), ("garbage", KILL), (KILL, "drop")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@every_class
def test_a_crash_in_any_call_of_a_recovery_breaks_no_promise(durability: Durability, first: str, second: str) -> None:
    recoveries = 0
    for number, crashed in enumerate(crashes(LIFE, durability)):
        if number % len(PAIRS) != PAIRS.index((first, second)) and not DEEP:
            continue
        left = crashed.end(first, Random(f"{number} {first}"))
        for call in count(1):
            disk = left.copy()
            disk.crash_at = call
            try:
                Log(disk, clock=crashed.clock, options=OPTIONS, background=False)
            except PowerCut:
                # The ledger is the one of the first crash: what that took it took, however the second one ended.
                again = left_by(disk, second, Random(call))
                world = crashed.reborn(again, KILL if first == second == KILL else "drop")
                world.same_again()
                world.go_on()
                recoveries += 1
            else:
                break
    assert recoveries > 100


# Two ways to the same state.


class Hoarder(SimDisk):
    """A disk on which the WAL never goes away."""

    def remove(self, name: str) -> None:
        if not name.startswith("wal/"):
            super().remove(name)


def wander(world: World, rng: Random, classes: Sequence[Durability], retention: bool = False) -> None:
    """A random life in which topics change their class, and come and go.

    With `retention` they also lose records by cap and TTL. The ledger does not follow that: only for comparing dumps.
    """
    for _ in range(rng.randint(8, 30)):
        name = rng.choice("tuvw")
        world.clock.advance(rng.choice((0, 0, 1, 40)))
        if name not in world.promises:
            world.put(name, durability=rng.choice(classes), seq_base=rng.choice((1, 1, 5)))
            continue
        match rng.randint(0, 15):
            case 0:
                world.put(name, durability=rng.choice(classes))
            case 1:
                world.delete(name, match=rng.choice(("red", "blue")))
            case 2:
                head = world.log.get(name).head_seq
                world.delete(name, before_seq=rng.randint(max(head - 9, 0), head + 1))
            case 3:
                world.drop(name)
            case 4 | 5:
                world.checkpoint()
            case 6:
                world.transact({each: rng.randint(1, 3) for each in world.promises})
            case 7:
                world.tick()
            case 8 if retention:
                world.put(name, cap_records=rng.choice((0, 3, 8)), ttl_ms=rng.choice((0, 0, 300)))
            case _:
                world.append(name, rng.randint(1, 6), key=rng.choice((None, world.name("k"))), size=rng.choice((5, 80)))


LASTING: tuple[Durability, ...] = ("memory", "disk", "fsync")
SEEDS = range(500 if DEEP else 60)


@pytest.mark.parametrize("seed", SEEDS)
def test_recovery_from_a_checkpoint_equals_recovery_from_the_whole_wal(seed: int) -> None:
    rng = Random(seed)
    disk = Hoarder(rng)
    world = World(disk)
    for _ in range(rng.randint(1, 3)):
        wander(world, rng, LASTING, retention=True)
        world.checkpoint()
    wander(world, rng, LASTING, retention=True)
    short = disk.kill()
    whole = short.copy()
    for name in short.names():
        if name.startswith("checkpoints/"):
            whole.remove(name)
    assert len(short.names()) > len(whole.names())
    logs = [Log(each, clock=world.clock, options=OPTIONS, background=False) for each in (short, whole)]
    assert_same(dump(logs[0]), dump(logs[1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_of_disk_and_fsync_changes_nothing_that_can_be_seen(seed: int) -> None:
    rng = Random(seed)
    world = World(SimDisk(rng))
    wander(world, rng, ("disk", "fsync"), retention=True)
    before = dump(world.log)
    log = Log(world.disk.kill(), clock=world.clock, options=OPTIONS, background=False)
    assert_same(dump(log), before)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_restart_changes_nothing_that_can_be_seen(seed: int) -> None:
    rng = Random(seed)
    world = World(SimDisk(rng))
    wander(world, rng, LASTING, retention=True)
    before = dump(world.log)
    world.close()
    log = Log(world.disk.kill(), clock=world.clock, options=OPTIONS, background=False)
    assert_same(dump(log), before)


@pytest.mark.parametrize("seed", SEEDS)
def test_many_lives_with_crashes_anywhere_break_no_promise(seed: int) -> None:
    rng = Random(seed)
    world = World(SimDisk(rng))
    for _ in range(6):
        world.disk.crash_at = world.disk.calls + rng.randint(1, 150)
        with suppress(PowerCut):
            wander(world, rng, CLASSES)
            world.close()
        end = rng.choice(ENDS)
        world = world.reborn(world.end(end, rng), end)
