"""Calls through a connection that is cut at every byte, held back, or sent twice: no write is lost, none is doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.client.proxy import Cut, Hold, Proxy, Replay
from tests.http.server import LocalServer
from topics.client.aio import AsyncClient
from topics.client.errors import Unreachable
from topics.client.sync import Client
from topics.core.errors import IdempotencyConflict

RECORDS = [{"data": {"n": n}, "tag": "t", "meta": {"k": "v"}} for n in range(3)]
DATAS = [{"n": 0}, {"n": 1}, {"n": 2}]


def no_wait(_: float) -> None:
    """Between tries."""


async def no_wait_async(_: float) -> None:
    """Between tries."""


def patient(proxy: Proxy, **fields: Any) -> Client:
    return Client(proxy.url, sleep=no_wait, random=lambda: 0.5, **fields)


def datas(client: Client, topic: str) -> list[Any]:
    return [record.data for record in client.diff(topic, limit=1000).records]


def cuts_of(proxy: Proxy, call: Callable[[Client], object], step: int = 1) -> list[Cut]:
    """A cut at every byte (or every few) of what a call sends and gets, by looking at one that passes."""
    proxy.plan()
    with patient(proxy) as client:
        call(client)
    (traffic,) = proxy.traffic
    # Both ways for a connection to end, in turn. A request that passes whole is one whose answer is cut at 0.
    requests = [Cut("request", at, _how(at)) for at in range(0, len(traffic.request), step)]
    answers = [Cut("response", at, _how(at)) for at in range(0, len(traffic.response), step)]
    return requests + answers


def _how(at: int) -> Any:
    return "close" if at % 2 else "reset"


def test_a_write_that_is_cut_at_any_byte_is_made_once(proxy: Proxy, client: Client, topic: str) -> None:
    points = cuts_of(proxy, lambda through: through.write(topic, RECORDS))
    assert len(points) > 500
    for number, cut in enumerate(points):
        name = f"{topic}.{number}"
        proxy.plan(cut)
        with patient(proxy) as through:
            written = through.write(name, RECORDS)
        assert (written.first_seq, written.last_seq, written.seqs) == (1, 3, [1, 2, 3]), cut
        # Whoever was not answered was told later that it was there already.
        assert written.deduped == (cut.side == "response"), cut
        assert datas(client, name) == DATAS, cut


def test_a_write_on_a_connection_that_was_used_before_is_made_once(proxy: Proxy, client: Client, topic: str) -> None:
    def twice(through: Client) -> None:
        through.write(f"{topic}.base", [{"data": 1}])
        through.write(f"{topic}.base", RECORDS)

    for number, cut in enumerate(cuts_of(proxy, twice, step=9)):
        name = f"{topic}.{number}"
        proxy.plan(cut)
        with patient(proxy) as through:
            through.write(name, [{"data": 1}])
            through.write(name, RECORDS)
        assert datas(client, name) == [1, *DATAS], cut


def test_a_write_that_is_cut_several_times_in_a_row_is_made_once(proxy: Proxy, client: Client, topic: str) -> None:
    points = cuts_of(proxy, lambda through: through.write(topic, RECORDS), step=37)
    for number in range(len(points)):
        name = f"{topic}.{number}"
        proxy.plan(*(points[number:] + points[:number])[:7])
        with patient(proxy) as through:
            assert through.write(name, RECORDS).seqs == [1, 2, 3]
        assert datas(client, name) == DATAS


def test_an_async_write_that_is_cut_is_made_once(proxy: Proxy, client: Client, topic: str) -> None:
    async def main() -> None:
        for number, cut in enumerate(points):
            proxy.plan(cut)
            async with AsyncClient(proxy.url, sleep=no_wait_async, random=lambda: 0.5) as through:
                written = await through.write(f"{topic}.{number}", RECORDS)
            assert written.seqs == [1, 2, 3], cut

    points = cuts_of(proxy, lambda through: through.write(topic, RECORDS), step=5)
    asyncio.run(main())
    for number in range(len(points)):
        assert datas(client, f"{topic}.{number}") == DATAS


@pytest.mark.parametrize("answer", ["first", "second"])
def test_a_write_that_the_network_sends_twice_is_made_once(
    answer: Any, proxy: Proxy, client: Client, topic: str
) -> None:
    proxy.plan(Replay(answer))
    with patient(proxy) as through:
        written = through.write(topic, RECORDS)
        assert written.seqs == [1, 2, 3]
        assert written.deduped == (answer == "second")
        through.write(topic, [{"data": "next"}])
    assert datas(client, topic) == [*DATAS, "next"]


def test_a_write_that_arrives_after_its_repeat_is_made_once(proxy: Proxy, client: Client, topic: str) -> None:
    hold = Hold()
    proxy.plan(hold)
    with patient(proxy, timeout_ms=100) as through:
        written = through.write(topic, RECORDS)
    assert hold.is_held.is_set()
    assert (written.seqs, written.deduped) == ([1, 2, 3], False)
    hold.release()
    assert datas(client, topic) == DATAS


def test_an_async_write_that_arrives_after_its_repeat_is_made_once(proxy: Proxy, client: Client, topic: str) -> None:
    async def main() -> None:
        async with AsyncClient(proxy.url, timeout_ms=100, sleep=no_wait_async) as through:
            assert (await through.write(topic, RECORDS)).seqs == [1, 2, 3]

    hold = Hold()
    proxy.plan(hold)
    asyncio.run(main())
    hold.release()
    assert datas(client, topic) == DATAS


def test_a_strict_write_that_is_cut_is_made_once_and_answered(proxy: Proxy, client: Client, topic: str) -> None:
    strict = [{"data": n, "client_seq": n + 1} for n in range(3)]
    for number, cut in enumerate(cuts_of(proxy, lambda c: c.write(topic, strict, client_id="p"), step=7)):
        name = f"{topic}.{number}"
        proxy.plan(cut)
        with patient(proxy) as through:
            written = through.write(name, strict, client_id="p")
        assert (written.seqs, written.count) == ([1, 2, 3], 3), cut
        assert datas(client, name) == [0, 1, 2], cut
        # A repeat by the caller himself is still his conflict.
        with pytest.raises(IdempotencyConflict):
            client.write(name, strict, client_id="p")


def test_a_transaction_that_is_cut_anywhere_is_committed_once(proxy: Proxy, client: Client, topic: str) -> None:
    def commit(through: Client, name: str) -> None:
        with through.transaction() as txn:
            txn.write(f"{name}.a", RECORDS)
            txn.write(f"{name}.b", [{"data": "b"}])
            txn.write(f"{name}.a", [{"data": "more"}])

    for number, cut in enumerate(cuts_of(proxy, lambda through: commit(through, topic), step=19)):
        name = f"{topic}.{number}"
        proxy.plan(cut)
        with patient(proxy) as through:
            commit(through, name)
        assert datas(client, f"{name}.a") == [*DATAS, "more"], cut
        assert datas(client, f"{name}.b") == ["b"], cut


def test_an_ack_that_is_cut_anywhere_takes_exactly_its_jobs(proxy: Proxy, client: Client, topic: str) -> None:
    def settle(through: Client, name: str, claimed: Any) -> None:
        jobs = claimed.claimed
        ids = [job.lease_id for job in jobs]
        through.extend(name, node="w", seqs=[1, 2, 3], lease_ids=ids)
        through.ack(name, node="w", seqs=[1, 2], lease_ids=ids[:2])
        through.nack(name, node="w", seqs=[3], lease_ids=ids[2:])

    def queue(name: str) -> Any:
        client.put(name, type="queue")
        client.write(name, RECORDS)
        return client.claim(name, "w", 3)

    first = queue(topic)
    for number, cut in enumerate(cuts_of(proxy, lambda through: settle(through, topic, first), step=23)):
        name = f"{topic}.{number}"
        claimed = queue(name)
        proxy.plan(cut)
        with patient(proxy) as through:
            settle(through, name, claimed)
        state = client.get(name).queue
        assert state is not None
        assert (state.ready, state.in_flight, client.get(name).count) == (1, 0, 1), cut


UNSAFE: dict[str, Callable[[Client, str], object]] = {
    "claim": lambda client, name: client.claim(name, "w"),
    "delete by tag": lambda client, name: client.delete(name, match="t"),
    "drop": lambda client, name: client.drop(name),
    "drop_router": lambda client, name: client.drop_router(name),
    "redrive": lambda client, name: client.redrive(name),
    "unblock": lambda client, name: client.unblock(name, [1]),
    "nack without a lease": lambda client, name: client.nack(name, node="w", seqs=[1]),
}


@pytest.mark.parametrize("verb", UNSAFE)
def test_what_is_not_safe_to_repeat_is_not_repeated(verb: str, proxy: Proxy, client: Client, topic: str) -> None:
    """It may have been carried out: the caller is told that this is not known."""
    client.put(topic, type="queue")
    for cut in (Cut("response", 0), Cut("response", 20), Cut("request", 40)):
        proxy.plan(cut)
        with patient(proxy) as through, pytest.raises(Unreachable):
            UNSAFE[verb](through, topic)
        assert len(proxy.traffic) == 1


SAFE: dict[str, Callable[[Client, str], object]] = {
    "put": lambda client, name: client.put(name, ttl_ms=1_000_000),
    "put_router": lambda client, name: client.put_router(name, name, f"{name}.copy").dest,
    "get": lambda client, name: client.get(name).topic,
    "list": lambda client, name: [state.topic for state in client.topics(name)],
    "diff": lambda client, name: [record.seq for record in client.diff(name).records],
    "seek": lambda client, name: client.seek(name, 0),
    "delete by seq": lambda client, name: client.delete(name, before_seq=2).count,
    "deletes": lambda client, name: client.deletes(name).complete,
    "drop if empty": lambda client, name: client.drop(f"{name}.none", if_empty=True).deleted,
}


@pytest.mark.parametrize("verb", SAFE)
def test_what_is_safe_to_repeat_is_repeated(verb: str, proxy: Proxy, client: Client, topic: str) -> None:
    client.write(topic, RECORDS)
    plain = SAFE[verb](client, topic)
    for cut in cuts_of(proxy, lambda through: SAFE[verb](through, topic), step=41):
        proxy.plan(cut, cut)
        with patient(proxy) as through:
            assert SAFE[verb](through, topic) == plain, cut


def test_a_server_that_is_not_there_is_tried_until_the_time_is_over(server: LocalServer) -> None:
    now = 0.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    with (
        Client("http://127.0.0.1:9", retry_ms=10_000, clock=lambda: now, sleep=sleep, random=lambda: 0.5) as nobody,
        pytest.raises(Unreachable, match=r"cannot reach http://127.0.0.1:9"),
    ):
        nobody.get("orders")
    assert pauses[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert 8.0 < sum(pauses) <= 10.0


def test_a_claim_that_cannot_have_been_sent_is_tried_again(proxy: Proxy, client: Client, topic: str) -> None:
    """Refused at the door it changed nothing; so did one that was throttled."""
    client.put(topic, type="queue")
    tries = 0

    def sleep(_: float) -> None:
        nonlocal tries
        tries += 1

    with (
        Client(
            "http://127.0.0.1:9",
            retry_ms=1000,
            sleep=sleep,
            clock=lambda: 0.0 if tries < 5 else 10.0,
            random=lambda: 0.5,
        ) as nobody,
        pytest.raises(Unreachable),
    ):
        nobody.claim(topic, "w")
    assert tries == 5
