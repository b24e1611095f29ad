"""Readers and watches: every record once and in order, every loss once, whatever happens to their connections."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.client.proxy import Cut, Proxy, proxy_to
from tests.client.test_cuts import cuts_of, no_wait_async, patient
from tests.http.server import Background, LocalServer
from topics.client.aio import AsyncClient
from topics.client.cursor import Cursor, Item
from topics.client.errors import ServerError, Unreachable
from topics.client.following import CaughtUp, Event, Lost, Received, TopicGone
from topics.client.sync import Client, Watch
from topics.core.answers import Record
from topics.core.errors import InvalidRequest, TopicNotFound
from topics.core.tombstone import Tombstone

Short = int | tuple[int, int]


def short(item: Item) -> Short:
    """A record by its seq, a loss by its range."""
    return item.seq if isinstance(item, Record) else (item.gap_from, item.gap_to)


def full_of_losses(client: Client, topic: str) -> list[Short]:
    """A topic in which everything happens that can: evicted, deleted, a hole, and records between them."""
    client.put(topic, cap_records=20)
    client.write(topic, [{"data": n} for n in range(12)])
    client.write(topic, [{"hole": 4, "reason": "source_trim"}])
    client.write(topic, [{"data": n, "tag": "gone" if n % 3 == 0 else "kept"} for n in range(12)])
    client.delete(topic, match="gone")
    client.write(topic, [{"hole": 2}, {"data": "x"}, {"hole": 1}, {"data": "last"}])
    client.write(topic, [{"data": n} for n in range(6)])
    return [short(item) for item in client.read(topic, limit=4)]


def test_a_reader_gets_everything_up_to_the_head_once(client: Client, topic: str) -> None:
    items = full_of_losses(client, topic)
    assert [item for item in items if isinstance(item, tuple)] == [(1, 8), (13, 16), (29, 30), (32, 32)]
    seqs = [item for item in items if isinstance(item, int)]
    assert seqs == sorted(set(seqs))
    covered = set(seqs) | {seq for item in items if isinstance(item, tuple) for seq in range(item[0], item[1] + 1)}
    # What is not there is only what was deleted on purpose.
    assert set(range(1, 40)) - covered == {17, 20, 23, 26}


@pytest.mark.parametrize("limit", [1, 4])
def test_a_reader_that_is_cut_anywhere_gets_everything_once(
    limit: int, proxy: Proxy, client: Client, topic: str
) -> None:
    expected = full_of_losses(client, topic)
    for cut in cuts_of(proxy, lambda through: list(through.read(topic, limit=limit)), step=97):
        proxy.plan(cut)
        with patient(proxy) as through:
            assert [short(item) for item in through.read(topic, limit=limit)] == expected, cut


def test_an_async_reader_that_is_cut_anywhere_gets_everything_once(proxy: Proxy, client: Client, topic: str) -> None:
    async def main() -> None:
        for cut in points:
            proxy.plan(cut)
            async with AsyncClient(proxy.url, sleep=no_wait_async) as through:
                assert [short(item) async for item in through.read(topic, limit=3)] == expected, cut

    expected = full_of_losses(client, topic)
    points = cuts_of(proxy, lambda through: list(through.read(topic, limit=3)), step=173)
    asyncio.run(main())


def test_a_cursor_resumes_behind_any_item(client: Client, topic: str) -> None:
    expected = full_of_losses(client, topic)
    for stop in range(len(expected) + 1):
        reader = client.read(topic, limit=5)
        before = [short(item) for item in itertools.islice(reader, stop)]
        after = [short(item) for item in client.read(topic, reader.cursor, limit=5)]
        assert before + after == expected


def test_a_reader_ends_at_to_seq(client: Client, topic: str) -> None:
    client.write(topic, [{"data": n} for n in range(10)])
    reader = client.read(topic, 2, to_seq=7, limit=2)
    assert [short(item) for item in reader] == [3, 4, 5, 6, 7]
    assert reader.cursor.seq == 7
    assert reader.head_seq == 10


@pytest.mark.parametrize("survives", [900, 1300, 2100])
def test_a_follower_gets_what_is_written_meanwhile_once(
    survives: int, proxy: Proxy, client: Client, topic: str
) -> None:
    """No connection lives for longer than so many bytes."""
    expected: list[Short] = [*range(1, 61)]
    client.put(topic)
    proxy.always = Cut("response", survives)
    with patient(proxy) as through:
        following = Background(lambda: [short(each) for each in itertools.islice(through.follow(topic, limit=3), 60)])
        for start in range(0, 60, 4):
            client.write(topic, [{"data": n} for n in range(start, start + 4)])
        assert following.result() == expected
    assert len(proxy.traffic) > 3


def test_a_follower_of_a_topic_that_is_made_again_is_told(client: Client, topic: str) -> None:
    client.write(topic, [{"data": n} for n in range(3)])
    reader = client.follow(topic)
    assert [short(item) for item in itertools.islice(reader, 3)] == [1, 2, 3]
    client.drop(topic)
    client.write(topic, [{"data": n} for n in range(5)])
    told = next(reader)
    assert isinstance(told, Tombstone)
    assert (told.reason, told.gap_from, told.gap_to) == ("recreated", 1, 5)
    assert [short(item) for item in itertools.islice(reader, 5)] == [1, 2, 3, 4, 5]


def test_a_cursor_taken_between_a_recreation_and_its_records_misses_nothing(client: Client, topic: str) -> None:
    client.write(topic, [{"data": 1}])
    first = client.read(topic)
    list(first)
    client.drop(topic)
    client.write(topic, [{"data": n} for n in range(4)])
    second = client.read(topic, first.cursor)
    assert isinstance(next(second), Tombstone)
    assert [short(item) for item in client.read(topic, second.cursor)] == [1, 2, 3, 4]


def test_a_follower_of_a_topic_that_goes_away_is_told(server: LocalServer, client: Client, topic: str) -> None:
    client.put(topic)
    following = Background(lambda: next(client.follow(topic)))
    server.wait_for_readings()
    client.drop(topic)
    with pytest.raises(TopicNotFound):
        following.result()


# -- watch -------------------------------------------------------------------------------------------------------------


def told_of(event: Event) -> tuple[str, Short] | None:
    if isinstance(event, Received):
        return event.topic, event.record.seq
    if isinstance(event, Lost):
        return event.topic, (event.tombstone.gap_from, event.tombstone.gap_to)
    return None


def until_caught_up(watch: Watch, topics: set[str]) -> dict[str, list[Short]]:
    told: dict[str, list[Short]] = {topic: [] for topic in topics}
    behind = set(topics)
    for event in watch:
        each = told_of(event)
        if each is not None:
            told[each[0]].append(each[1])
        elif isinstance(event, CaughtUp):
            behind.discard(event.topic)
            if not behind:
                return told
    raise AssertionError("a watch does not end by itself")


def test_a_watch_that_is_cut_anywhere_tells_everything_once(proxy: Proxy, client: Client, topic: str) -> None:
    expected = {name: full_of_losses(client, name) for name in (f"{topic}.a", f"{topic}.b")}

    def run(through: Client) -> dict[str, list[Short]]:
        with through.watch(dict.fromkeys(expected, 0), limit=3) as watch:
            return until_caught_up(watch, set(expected))

    points = cuts_of(proxy, run, step=61)
    assert len(points) > 100
    for cut in points:
        proxy.plan(cut)
        with patient(proxy) as through:
            assert run(through) == expected, cut


@pytest.mark.parametrize("survives", [1000, 1500, 2500])
def test_a_watch_whose_connections_all_die_early_gets_there(survives: int, proxy: Proxy, client: Client) -> None:
    expected = {name: full_of_losses(client, name) for name in (f"{survives}.a", f"{survives}.b")}
    proxy.always = Cut("response", survives, "reset")
    with patient(proxy) as through, through.watch(dict.fromkeys(expected, 0), limit=2) as watch:
        told: dict[str, list[Short]] = {name: [] for name in expected}
        while told != expected:
            each = told_of(next(watch))
            if each is not None:
                told[each[0]].append(each[1])
    assert len(proxy.traffic) > 2


def test_an_async_watch_that_is_cut_anywhere_tells_everything_once(proxy: Proxy, client: Client, topic: str) -> None:
    async def run(cut: Cut) -> list[Short]:
        proxy.plan(cut)
        told: list[Short] = []
        async with (
            AsyncClient(proxy.url, sleep=no_wait_async) as through,
            through.watch({topic: 0}, limit=3) as watch,
        ):
            async for event in watch:
                each = told_of(event)
                if each is not None:
                    told.append(each[1])
                elif isinstance(event, CaughtUp):
                    break
        return told

    def once(through: Client) -> None:
        with through.watch({topic: 0}, limit=3) as watch:
            until_caught_up(watch, {topic})

    expected = full_of_losses(client, topic)
    for cut in cuts_of(proxy, once, step=113):
        assert asyncio.run(run(cut)) == expected, cut


def test_a_watch_resumes_from_its_cursors_behind_any_event(client: Client, topic: str) -> None:
    names = {f"{topic}.a", f"{topic}.b"}
    expected = {name: full_of_losses(client, name) for name in names}
    total = sum(map(len, expected.values()))
    for stop in range(0, total, 5):
        told: dict[str, list[Short]] = {name: [] for name in names}
        with client.watch(dict.fromkeys(names, 0), limit=4) as watch:
            count = 0
            while count < stop:
                each = told_of(next(watch))
                if each is not None:
                    told[each[0]].append(each[1])
                    count += 1
            cursors = watch.cursors
        with client.watch(cursors, limit=4) as watch:
            rest = until_caught_up(watch, names)
        assert {name: told[name] + rest[name] for name in names} == expected


def test_a_tail_misses_nothing_from_the_moment_it_began(proxy: Proxy, client: Client, topic: str) -> None:
    """Also when its first connection gives nothing, and what it watches is written meanwhile."""
    client.write(topic, [{"data": "before"}])
    size = len(_traffic_of_tail(proxy, topic))
    for at in range(size - 30, size + 200, 11):
        proxy.plan(Cut("response", at))
        with patient(proxy) as through, through.watch({topic: "tail"}) as watch:
            assert isinstance(next(watch), CaughtUp)
            (seq,) = client.write(topic, [{"data": at}]).seqs
            received = next(event for event in watch if isinstance(event, Received))
            assert (received.record.seq, received.record.data) == (seq, at)


def _traffic_of_tail(proxy: Proxy, topic: str) -> bytes:
    proxy.plan()
    with patient(proxy) as through, through.watch({topic: "tail"}) as watch:
        next(watch)
    return bytes(proxy.traffic[0].response)


def test_a_watch_goes_on_when_its_topic_is_made_again(client: Client, topic: str) -> None:
    client.write(topic, [{"data": 1}])
    with client.watch([topic]) as watch:
        assert told_of(next(watch)) == (topic, 1)
        assert isinstance(next(watch), CaughtUp)
        client.drop(topic)
        assert next(watch) == TopicGone(topic, 1)
        client.write(topic, [{"data": n} for n in range(3)])
        lost = next(watch)
        assert isinstance(lost, Lost)
        assert lost.tombstone.reason == "recreated"
        told = [each for each in (told_of(next(watch)) for _ in range(4)) if each is not None]
        assert told == [(topic, 1), (topic, 2), (topic, 3)]


def test_readers_watches_and_writers_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    first = LocalServer(tmp_path).start()
    with proxy_to(first.port) as proxy, patient(proxy) as client:
        client.put("t", durability="fsync")
        client.write("t", [{"data": n} for n in range(3)])
        reader = client.follow("t")
        assert [short(item) for item in itertools.islice(reader, 3)] == [1, 2, 3]
        with client.watch(["t"]) as watch:
            assert [told_of(next(watch)) for _ in range(3)] == [("t", 1), ("t", 2), ("t", 3)]
            first.stop()
            writing = Background(lambda: client.write("t", [{"data": 3}]).seqs)
            second = LocalServer(tmp_path).start()
            try:
                proxy.server_port = second.port
                assert writing.result() == [4]
                assert short(next(reader)) == 4
                # The session is gone with the server: a new one begins where the old one was.
                assert next(each for each in map(told_of, watch) if each is not None) == ("t", 4)
            finally:
                second.stop()


def test_a_watch_gives_up_when_nobody_is_there_for_too_long(proxy: Proxy, client: Client, topic: str) -> None:
    client.put(topic)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    with (
        Client(proxy.url, retry_ms=5000, clock=lambda: now, sleep=sleep) as through,
        through.watch([topic]) as watch,
    ):
        assert isinstance(next(watch), CaughtUp)
        proxy.always = Cut("request", 0)
        proxy.cut_all()
        with pytest.raises(Unreachable):
            next(watch)


def test_another_connection_that_takes_a_watch_over_ends_it(client: Client, server: LocalServer, topic: str) -> None:
    client.put(topic)
    with client.watch([topic]) as watch:
        assert isinstance(next(watch), CaughtUp)
        wid = server.call(lambda: list(server.app.watches._sessions)[-1])
        with (
            server.client() as other,
            other.stream("GET", f"/v0/watch/{wid}", headers={"accept": "text/event-stream"}),
            pytest.raises(ServerError, match="taken this watch over"),
        ):
            next(watch)


BAD_STARTS: list[tuple[Any, type[Exception]]] = [
    ({}, InvalidRequest),
    ({"no such": 0}, InvalidRequest),
    ({"t": -1}, InvalidRequest),
    ({"t": "head"}, InvalidRequest),
    ({"t": Cursor(0)}, TopicNotFound),
    ({"t": "tail"}, TopicNotFound),
]


@pytest.mark.parametrize(("topics", "kind"), BAD_STARTS)
def test_a_watch_that_cannot_be_is_refused(topics: Any, kind: type[Exception], client: Client) -> None:
    with pytest.raises(kind), client.watch(topics) as watch:
        next(watch)
