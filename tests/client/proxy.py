"""Stands between a client and the server and makes trouble at a chosen byte: cuts, holds back, sends again.

It knows of each connection, in the order in which they come, what is to happen to it; those without a plan pass.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from tests.http.server import DEADLINE


class Cut(msgspec.Struct, frozen=True):
    """Ends the connection when so many bytes of a direction have passed. A request that is cut short is never carried
    out; one whose answer is cut always is."""

    side: Literal["request", "response"]
    at: int
    how: Literal["close", "reset"] = "close"


class Replay(msgspec.Struct, frozen=True):
    """Sends the first request twice, over two connections; the client gets the chosen one of the two answers."""

    answer: Literal["first", "second"] = "second"


class Hold:
    """Keeps the first request back until it is released, whatever the client does meanwhile; then it is carried out."""

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self._release = threading.Event()
        self.is_answered = threading.Event()

    def release(self) -> None:
        self._release.set()
        assert self.is_answered.wait(DEADLINE), "the held request was never answered"

    async def wait(self) -> None:
        self.is_held.set()
        await asyncio.get_running_loop().run_in_executor(None, self._release.wait, DEADLINE)


Plan = Cut | Replay | Hold


class Traffic(msgspec.Struct):
    """What passed on one connection."""

    request: bytearray = msgspec.field(default_factory=bytearray)
    response: bytearray = msgspec.field(default_factory=bytearray)


class Proxy:
    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self._plans: deque[Plan | None] = deque()
        # What happens to connections that have no plan of their own.
        self.always: Plan | None = None
        self.traffic: list[Traffic] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._on_connection, "127.0.0.1", 0), self._loop
        ).result(DEADLINE)
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *plans: Plan | None) -> None:
        """What happens to the next connections, one each; None lets one pass. Whatever was planned before is off."""
        self._plans = deque(plans)
        self.traffic = []

    def cut_all(self) -> None:
        """Ends all connections that are open now."""

        async def end() -> None:
            for writer in self._open:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(DEADLINE)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(DEADLINE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()

    # -- one connection ------------------------------------------------------------------------------------------------

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plan = self._plans.popleft() if self._plans else self.always
        traffic = Traffic()
        self.traffic.append(traffic)
        self._open.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                if isinstance(plan, Replay):
                    await self._replay(reader, writer, plan)
                elif isinstance(plan, Hold):
                    await self._hold(reader, plan)
                else:
                    await self._relay(reader, writer, plan, traffic)
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: Cut | None, traffic: Traffic
    ) -> None:
        if cut is not None and cut.side == "request" and cut.at == 0:
            _end(writer, cut)
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        at = {"request": -1, "response": -1}
        if cut is not None:
            at[cut.side] = cut.at
        pumps = [
            asyncio.create_task(_pump(reader, up_writer, at["request"], traffic.request)),
            asyncio.create_task(_pump(up_reader, writer, at["response"], traffic.response)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if any(
                pump.done() and not pump.cancelled() and pump.exception() is None and pump.result() for pump in pumps
            ):
                assert cut is not None
                _end(writer, cut)
            else:
                # One side has ended by itself: what the other still says is passed on.
                if pumps[1].done():
                    writer.close()
                else:
                    up_writer.close()
                    await asyncio.wait(pumps, timeout=DEADLINE)
        finally:
            for pump in pumps:
                pump.cancel()
            up_writer.transport.abort()

    async def _replay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plan: Replay) -> None:
        request = await _read_message(reader)
        answers = [await self._ask(request) for _ in range(2)]
        writer.write(answers[0 if plan.answer == "first" else 1])
        await writer.drain()
        await self._relay(reader, writer, None, Traffic())

    async def _hold(self, reader: asyncio.StreamReader, hold: Hold) -> None:
        request = await _read_message(reader)
        await hold.wait()
        await self._ask(request)
        hold.is_answered.set()

    async def _ask(self, request: bytes) -> bytes:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        try:
            up_writer.write(request)
            return await _read_message(up_reader)
        finally:
            up_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at: int, passed: bytearray) -> bool:
    """Passes bytes on; says whether it stopped because the cut was reached."""
    while True:
        data = await reader.read(1 << 16)
        if not data:
            return False
        if at >= 0:
            data = data[: at - len(passed)]
        passed += data
        writer.write(data)
        await writer.drain()
        if at >= 0 and len(passed) >= at:
            return True


def _end(writer: asyncio.StreamWriter, cut: Cut) -> None:
    if cut.how == "reset":
        taken = writer.get_extra_info("socket")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """One HTTP message that says how long it is."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
