"""Writers that batch: bounds, back-pressure, order, and nothing that is dropped silently."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from typing import Any

import pytest

from tests.client.proxy import Cut, Proxy
from tests.client.test_cuts import datas, no_wait_async, patient
from tests.http.server import DEADLINE, Background, LocalServer, eventually
from topics.client.aio import AsyncClient
from topics.client.buffer import Bounds, Buffer
from topics.client.sync import Client
from topics.core.errors import InvalidRequest, RecordTooLarge, TopicFull, TopicNotFound

# -- the buffer --------------------------------------------------------------------------------------------------------


def test_a_record_waits_for_company_no_longer_than_the_flush_interval() -> None:
    buffer = Buffer(Bounds(flush_ms=20))
    assert buffer.due_in(0.0) is None
    buffer.add(b"1", now=5.0)
    buffer.add(b"2", now=5.015)
    assert buffer.due_in(5.015) == pytest.approx(0.005)
    assert buffer.due_in(5.02) == 0.0
    assert buffer.first().records == [b"1", b"2"]


def test_a_batch_that_is_full_is_due_at_once() -> None:
    buffer = Buffer(Bounds(flush_ms=1000, batch_records=3))
    for n in range(3):
        assert buffer.due_in(0.0) != 0.0
        buffer.add(b"%d" % n, now=0.0)
    assert buffer.due_in(0.0) == 0.0


def test_a_batch_has_at_most_its_bytes_or_one_record() -> None:
    buffer = Buffer(Bounds(batch_bytes=10))
    for record in (b"x" * 6, b"x" * 4, b"x" * 7, b"x" * 50, b"x"):
        buffer.add(record, now=0.0)
    assert [[len(record) for record in batch.records] for batch in buffer.batches] == [[6, 4], [7], [50], [1]]


def test_what_is_being_sent_takes_no_more_records() -> None:
    buffer = Buffer(Bounds())
    buffer.add(b"1", now=0.0)
    sent = buffer.first()
    batch, index = buffer.add(b"2", now=0.0)
    assert batch is not sent
    assert index == 0


def test_the_buffer_is_bounded_in_records_and_bytes_but_takes_one_of_any_size() -> None:
    buffer = Buffer(Bounds(buffer_records=3, buffer_bytes=10))
    assert buffer.has_room(1000)
    buffer.add(b"x" * 8, now=0.0)
    assert buffer.has_room(2)
    assert not buffer.has_room(3)
    buffer.add(b"x", now=0.0)
    buffer.add(b"x", now=0.0)
    assert not buffer.has_room(0)
    buffer.finish(buffer.first())
    assert buffer.has_room(10)


@pytest.mark.parametrize("name", ["batch_records", "batch_bytes", "buffer_records", "buffer_bytes", "record_bytes"])
def test_a_bound_of_nothing_is_refused_by_name(name: str, client: Client) -> None:
    bounds: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidRequest, match=name):
        client.writer("t", **bounds)


# -- for threads -------------------------------------------------------------------------------------------------------


def test_records_are_written_in_order_and_receipts_know_their_seqs(client: Client, topic: str) -> None:
    with client.writer(topic, batch_records=7) as writer:
        receipts = [writer.write(n, tag="t", meta={"n": str(n)}) for n in range(100)]
    assert [receipt.result(0) for receipt in receipts] == list(range(1, 101))
    records = client.diff(topic, limit=1000, include_tags=True).records
    assert [record.data for record in records] == list(range(100))
    assert records[42].meta == {"n": "42"}
    assert records[42].tag == "t"


def test_a_record_goes_out_by_itself_when_its_time_has_come(client: Client, topic: str) -> None:
    writer = client.writer(topic, flush_ms=1)
    assert writer.write("alone").result(DEADLINE) == 1
    writer.close()


def test_flush_waits_for_everything_before_it(client: Client, topic: str) -> None:
    with client.writer(topic, flush_ms=3_600_000, batch_records=10) as writer:
        receipts = [writer.write(n) for n in range(25)]
        writer.flush()
        assert all(receipt.is_done for receipt in receipts)
        assert datas(client, topic) == list(range(25))
        assert not writer.unwritten


def test_a_writer_that_is_faster_than_the_server_waits(server: LocalServer, client: Client, topic: str) -> None:
    client.put(topic)
    count = itertools.count()
    writer = client.writer(topic, flush_ms=0, batch_records=5, buffer_records=20)
    with server.held():
        writing = Background(lambda: [writer.write(next(count)) for _ in range(100)])
        # It has handed over what there is room for, and made the one that waits.
        eventually(lambda: sum(len(batch.records) for batch in writer.unwritten) == 20, "a full buffer")
        assert not writing.is_done
    writing.result()
    writer.close()
    assert datas(client, topic) == list(range(100))


def test_a_full_buffer_does_not_wait_for_its_flush_interval(client: Client, topic: str) -> None:
    with client.writer(topic, flush_ms=3_600_000, batch_records=1000, buffer_records=3) as writer:
        for n in range(20):
            writer.write(n)
    assert datas(client, topic) == list(range(20))


def test_a_refusal_stops_the_writer_and_nothing_is_lost_silently(client: Client, topic: str) -> None:
    client.put(topic, cap_records=10, discard="reject")
    writer = client.writer(topic, flush_ms=3_600_000, batch_records=4)
    receipts = [writer.write(n) for n in range(12)]
    with pytest.raises(TopicFull):
        writer.flush()
    assert [receipt.result(DEADLINE) for receipt in receipts[:8]] == list(range(1, 9))
    for receipt in receipts[8:]:
        with pytest.raises(TopicFull):
            receipt.result(DEADLINE)
    with pytest.raises(TopicFull):
        writer.write("more")
    with pytest.raises(TopicFull):
        writer.close()
    writer.close()
    # What is left is in hand, with the key under which it may be tried again.
    (left,) = writer.unwritten
    assert left.records == [b'{"data":8}', b'{"data":9}', b'{"data":10}', b'{"data":11}']
    assert len(left.idempotency_key) == 32


def test_a_topic_that_must_exist_already_is_not_made(client: Client, topic: str) -> None:
    writer = client.writer(topic, create=False)
    receipt = writer.write(1)
    with pytest.raises(TopicNotFound):
        receipt.result(DEADLINE)
    with pytest.raises(TopicNotFound):
        writer.close()


def test_a_bad_record_is_refused_when_it_is_handed_over_and_hurts_no_other(client: Client, topic: str) -> None:
    with client.writer(topic, record_bytes=5000) as writer:
        writer.write("good")
        with pytest.raises(InvalidRequest, match="data"):
            writer.write(float("inf"))
        with pytest.raises(InvalidRequest, match="meta"):
            writer.write(1, meta={"n": 1})  # type: ignore[dict-item]  # that is the test
        with pytest.raises(RecordTooLarge, match="record_bytes is 5000"):
            writer.write("x" * 10_000)
        writer.write("good too")
    assert datas(client, topic) == ["good", "good too"]


def test_a_closed_writer_takes_nothing(client: Client, topic: str) -> None:
    writer = client.writer(topic)
    writer.close()
    writer.close()
    with pytest.raises(InvalidRequest, match="closed"):
        writer.write(1)


@pytest.mark.parametrize("at", [0, 1, 90, 200, 330, 350, 700])
@pytest.mark.parametrize("side", ["request", "response"])
def test_batches_through_connections_that_all_break_are_each_written_once(
    side: Any, at: int, proxy: Proxy, client: Client, topic: str
) -> None:
    """Every other connection is cut."""
    proxy.plan(*itertools.chain.from_iterable((Cut(side, at), None, Cut(side, at, "reset")) for _ in range(50)))
    with patient(proxy) as through, through.writer(topic, batch_records=4, flush_ms=0) as writer:
        receipts = [writer.write(n) for n in range(60)]
    assert [receipt.result(0) for receipt in receipts] == list(range(1, 61))
    assert datas(client, topic) == list(range(60))


def test_a_program_that_forgets_to_close_has_its_records_written(server: LocalServer, client: Client) -> None:
    code = f"""
import topics
writer = topics.Client({server.url!r}).writer("forgotten", flush_ms=3_600_000)
for n in range(10):
    writer.write(n)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert datas(client, "forgotten") == list(range(10))


# -- for an event loop -------------------------------------------------------------------------------------------------


def test_an_async_writer_writes_in_order(server: LocalServer, client: Client, topic: str) -> None:
    async def main() -> list[int]:
        async with AsyncClient(server.url) as through, through.writer(topic, batch_records=7) as writer:
            receipts = [await writer.write(n) for n in range(100)]
            return [await receipt for receipt in receipts]

    assert asyncio.run(main()) == list(range(1, 101))
    assert datas(client, topic) == list(range(100))


def test_an_async_writer_that_is_faster_than_the_server_waits(server: LocalServer, client: Client, topic: str) -> None:
    async def main() -> None:
        async with (
            AsyncClient(server.url) as through,
            through.writer(topic, flush_ms=0, batch_records=5, buffer_records=20) as writer,
        ):
            with server.held():
                writing = asyncio.create_task(write_all(writer))
                async with asyncio.timeout(DEADLINE):
                    while sum(len(batch.records) for batch in writer.unwritten) < 20:
                        await asyncio.sleep(0)
                for _ in range(100):
                    await asyncio.sleep(0)
                assert sum(len(batch.records) for batch in writer.unwritten) == 20
                assert not writing.done()
            await writing
            await writer.flush()
            assert not writer.unwritten

    async def write_all(writer: Any) -> None:
        for n in range(100):
            await writer.write(n)

    client.put(topic)
    asyncio.run(main())
    assert datas(client, topic) == list(range(100))


def test_a_full_async_buffer_does_not_wait_for_its_flush_interval(
    server: LocalServer, client: Client, topic: str
) -> None:
    async def main() -> None:
        async with (
            AsyncClient(server.url) as through,
            through.writer(topic, flush_ms=3_600_000, batch_records=1000, buffer_records=3) as writer,
        ):
            for n in range(20):
                await writer.write(n)

    asyncio.run(main())
    assert datas(client, topic) == list(range(20))


def test_a_refusal_stops_an_async_writer_too(server: LocalServer, client: Client, topic: str) -> None:
    async def main() -> None:
        async with AsyncClient(server.url) as through:
            writer = through.writer(topic, flush_ms=3_600_000, batch_records=2)
            with pytest.raises(InvalidRequest, match="async with"):
                await writer.write(1)
            await writer.__aenter__()
            receipts = [await writer.write(n) for n in range(6)]
            with pytest.raises(TopicFull):
                await writer.flush()
            assert await receipts[3] == 4
            with pytest.raises(TopicFull):
                await receipts[4]
            with pytest.raises(TopicFull):
                await writer.write("more")
            with pytest.raises(TopicFull):
                await writer.close()
            assert [batch.records for batch in writer.unwritten] == [[b'{"data":4}', b'{"data":5}']]

    client.put(topic, cap_records=5, discard="reject")
    asyncio.run(main())


def test_an_async_writer_through_connections_that_break(proxy: Proxy, client: Client, topic: str) -> None:
    async def main() -> None:
        async with (
            AsyncClient(proxy.url, sleep=no_wait_async) as through,
            through.writer(topic, batch_records=4, flush_ms=0) as writer,
        ):
            for n in range(60):
                await writer.write(n)

    proxy.plan(*itertools.chain.from_iterable((Cut("response", at), None) for at in range(0, 400, 20)))
    asyncio.run(main())
    assert datas(client, topic) == list(range(60))
