"""Two servers in separate processes, and one of them dies: the dest has every record once, in order, and every loss."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.http.server import diff, write
from tests.routers_remote.conftest import Members
from tests.routers_remote.servers import Member, Writer, count_of, data_of, deadly, read_all, settles

DIRECTIONS = pytest.mark.parametrize("direction", ["push", "pull"])


def connect(source: Member, dest: Member, direction: str, **fields: Any) -> Member:
    """A router between two servers; returns the one that it lives on."""
    home = source if direction == "push" else dest
    body: dict[str, Any] = {"source": "in", "dest": "out", "start": "earliest", **fields}
    if direction == "push":
        body["dest"] = {"url": dest.url, "topic": "out"}
    else:
        body["source"] = {"url": source.url, "topic": "in"}
    home.ask("PUT", "/v0/routers/r", body)
    return home


def wait_for_all(source: Member, dest: Member, home: Member, count: int) -> None:
    settles(
        lambda: count_of(dest.client, "out") >= count,
        lambda: (count_of(dest.client, "out"), home.router("r")),
    )
    settles(lambda: home.router("r")["lag"] == 0, lambda: home.router("r"))


@DIRECTIONS
def test_either_side_is_killed_under_load(members: Members, direction: str) -> None:
    source, dest = members(2)
    dest.ask("PUT", "/v0/topics/out", {"durability": "fsync" if direction == "pull" else "disk"})
    home = connect(source, dest, direction)
    luck = random.Random(direction)
    rounds, step = 4, 60
    writer = Writer(source.url, "in", "w", rounds * step)
    for number in range(rounds):
        writer.wait_for(number * step + luck.randrange(1, step - 10))
        (source, dest)[(number + (direction == "pull")) % 2].restart()
    written = writer.join()
    wait_for_all(source, dest, home, len(written))
    assert data_of(source.client, "in") == written
    records, lost = read_all(dest.client, "out")
    assert [record["data"] for record in records] == written
    assert [record["$seq"] for record in records] == [*range(1, len(written) + 1)]
    assert lost == []
    state = home.router("r")
    assert (state["cursor"], state["lag"], state["state"]) == (len(written), 0, "running")
    assert state["forwarded_total"] == len(written)


# Who dies (the home of the router, or the other), where, and whether before or behind that.
MOMENTS: dict[str, list[tuple[str, str, bool]]] = {
    "push": [
        ("home", "topics.engine.routers:Routers.pushed", True),
        ("home", "topics.engine.routers:Routers.pushed", False),
        ("other", "topics.engine.append:Appender.publish_pieces", True),
        ("other", "topics.http.exchange:Exchange.send", True),
    ],
    "pull": [
        ("home", "topics.engine.routers:Routers.take", False),
        ("home", "topics.engine.routers:Routers._publish", True),
        ("home", "topics.engine.routers:Routers._publish", False),
        ("other", "topics.http.exchange:Exchange.send", True),
    ],
}


@DIRECTIONS
def test_deaths_at_chosen_moments(members: Members, direction: str) -> None:
    source, dest = members(2)
    home = connect(source, dest, direction)
    other = dest if home is source else source
    written: list[str] = []
    for number, (victim, method, before) in enumerate(MOMENTS[direction]):
        dying = home if victim == "home" else other
        living = other if victim == "home" else home
        if living.is_dead:
            living.start()
        dying.restart(deadly(method, 2, before))
        # The first record goes alone, so that there is a second time.
        first = Writer(source.url, "in", f"{number}a", 1)
        settles(lambda: dying.is_dead or dest.count("out") > len(written), "the first")  # noqa: B023
        second = Writer(source.url, "in", f"{number}b", 20)
        dying.wait_for_death()
        dying.start()
        written += first.join() + second.join()
        wait_for_all(source, dest, home, len(written))
        records, lost = read_all(dest.client, "out")
        # Where the first was not acked before the second began, nobody promised their order.
        assert sorted(record["data"] for record in records) == sorted(written), method
        assert [record["data"] for record in records] == data_of(source.client, "in"), method
        assert lost == []
        assert home.router("r")["forwarded_total"] == len(written), method


@DIRECTIONS
def test_what_the_source_evicts_while_the_other_is_away_is_a_hole(members: Members, direction: str) -> None:
    source, dest = members(2)
    source.ask("PUT", "/v0/topics/in", {"cap_records": 10})
    home = connect(source, dest, direction)
    first = Writer(source.url, "in", "w", 5).join()
    wait_for_all(source, dest, home, 5)
    dest.kill()
    second = Writer(source.url, "in", "v", 40).join()
    dest.start()
    settles(lambda: count_of(dest.client, "out") >= 15, lambda: home.router("r"))
    records, lost = read_all(dest.client, "out")
    assert [record["data"] for record in records] == first + second[-10:]
    # 45 were written, the last 10 are there: 6 to 35 are gone.
    assert lost == [(6, 35, "source_trim")]
    assert [record["$seq"] for record in records] == [*range(1, 6), *range(36, 46)]
    settles(lambda: home.router("r")["lag"] == 0, lambda: home.router("r"))
    assert home.router("r")["forwarded_total"] == 15


def test_what_a_kill_takes_from_a_source_is_told_at_the_dest(members: Members) -> None:
    """Classes that promise less: the dest tells what a reader of the source is told, at the same seqs."""
    source, dest = members(2)
    for durability in ("memory", "ephemeral"):
        for direction in ("push", "pull"):
            name = f"{durability}-{direction}"
            source.ask("PUT", f"/v0/topics/{name}", {"durability": durability})
            end = {"url": (dest if direction == "push" else source).url, "topic": name}
            ends = {"source": name, "dest": end} if direction == "push" else {"source": end, "dest": name}
            home = source if direction == "push" else dest
            home.ask("PUT", f"/v0/routers/{name}", {**ends, "start": "earliest"})
    names = [f"{durability}-{direction}" for durability in ("memory", "ephemeral") for direction in ("push", "pull")]
    for name in names:
        write(source.client, name, *range(1, 6))
    for name in names:
        settles(lambda name=name: dest.count(name) == 5, name)  # type: ignore[misc]
    source.restart()
    for name in names:
        write(source.client, name, "new")
    for name in names:
        settles(lambda name=name: "new" in data_of(dest.client, name), name)  # type: ignore[misc]
        told = diff(source.client, name, from_seq=5)
        gap = told["tombstone"]
        records, lost = read_all(dest.client, name)
        assert [record["data"] for record in records] == [1, 2, 3, 4, 5, "new"], name
        assert records[-1]["$seq"] == told["records"][-1]["$seq"], name
        assert lost == ([(gap["gap_from"], gap["gap_to"], "source_trim")] if gap is not None else []), name


def test_a_server_that_comes_back_empty_is_told(members: Members) -> None:
    """The data of the source's server is gone; its new topic has the same name, and perhaps the same numbers."""
    source, dest = members(2)
    home = connect(source, dest, "pull")
    first = Writer(source.url, "in", "w", 5).join()
    wait_for_all(source, dest, home, 5)
    epoch = source.ask("GET", "/v0/topics/in")["epoch"]
    source.kill()
    source.data_dir = source.data_dir.with_name("empty")
    dest.kill()
    source.start()
    second = Writer(source.url, "in", "v", 8).join()
    assert source.ask("GET", "/v0/topics/in")["epoch"] == epoch
    dest.start()
    settles(lambda: count_of(dest.client, "out") >= 13, lambda: (home.router("r"), data_of(dest.client, "out")))
    records, lost = read_all(dest.client, "out")
    assert [record["data"] for record in records] == first + second
    assert [reason for _, _, reason in lost] == ["source_trim"]
