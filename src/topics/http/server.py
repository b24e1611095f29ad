"""Running a server: open the log, listen, serve until a signal, and leave nothing half done."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
import sys
import time
import traceback
from collections.abc import Callable

import msgspec

from topics.core.clock import SystemClock
from topics.core.errors import StorageFault, TopicsError
from topics.engine.engine import Engine
from topics.engine.options import Options
from topics.engine.recovery import open_engine
from topics.engine.syncer import ThreadSyncer
from topics.http.app import App
from topics.http.auth import parse_keys
from topics.http.protocol import HttpProtocol
from topics.http.settings import Settings
from topics.http.starting import StartingProtocol
from topics.storage.fs import OsFileSystem

_BACKLOG = 4096
_GC_THRESHOLD = (10_000, 50, 100)
# Parameters of mallopt, and what they are set to.
_TRIM_THRESHOLD, _KEPT_BYTES = -1, 64 << 20
_MMAP_THRESHOLD, _HEAP_BYTES = -3, 32 << 20


class Server:
    """A listening server. While the log is replayed it answers 503 `not_ready`; then `app` takes over."""

    def __init__(self, settings: Settings) -> None:
        settings.check()
        self._keys = parse_keys(settings.api_keys)
        # Only digests stay in memory.
        self.settings = msgspec.structs.replace(settings, api_keys="")
        self._progress = 0.0
        self._started = time.monotonic()
        self._engine: Engine | None = None
        self._listener: asyncio.Server | None = None
        self._early: set[StartingProtocol] = set()
        self.app: App | None = None
        self.port = settings.port

    @property
    def key_count(self) -> int:
        return len(self._keys)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._accept, self.settings.host, self.settings.port, backlog=_BACKLOG, reuse_address=True
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        try:
            self._engine = await loop.run_in_executor(None, self._open, loop)
        except BaseException:
            self._listener.close()
            raise
        self.app = App(self._engine, self.settings, self._keys, loop)
        self.app.start_ticking()
        for connection in list(self._early):
            connection.hand_over(HttpProtocol(self.app))

    def _accept(self) -> asyncio.Protocol:
        app = self.app
        try:
            if app is None:
                return StartingProtocol(
                    lambda: self._progress, self._early, self.settings.max_connections, self._started
                )
            return HttpProtocol(app)
        except Exception as error:
            # An exception from here would leave the listener deaf for good.
            traceback.print_exception(error)
            return _Hangup()

    def _open(self, loop: asyncio.AbstractEventLoop) -> Engine:
        """On another thread, so that the loop can tell how far it is; nobody touches the engine until this returns."""

        def wake() -> None:
            loop.call_soon_threadsafe(self._poll)

        def on_progress(part: float) -> None:
            self._progress = part

        settings = self.settings
        options = Options(checkpoint_bytes=settings.checkpoint_bytes, cache_bytes=settings.cache_bytes)
        try:
            fs = OsFileSystem(settings.data_dir)
        except OSError as error:
            raise StorageFault(f"TOPICS_DATA_DIR {settings.data_dir} cannot be used: {error}") from error
        return open_engine(
            fs,
            SystemClock(),
            settings.limits,
            options,
            ThreadSyncer("topics-wal", wake),
            ThreadSyncer("topics-files", wake),
            on_progress,
        )

    def _poll(self) -> None:
        if self._engine is not None:
            self._engine.poll()

    async def stop(self) -> None:
        """Stops accepting, answers what is in flight, writes a clean checkpoint."""
        assert self._listener is not None
        self._listener.close()
        app = self.app
        if app is None:
            return
        app.is_closing = True
        app.remotes.close()
        for connection in list(app.connections):
            connection.close_when_idle()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.shutdown_timeout_ms / 1000
        app.end_waiting()
        while app.connections and loop.time() < deadline:
            await asyncio.sleep(0.01)
            app.engine.tick()
        for connection in list(app.connections):
            if connection.transport is not None:
                connection.transport.abort()
        app.engine.close()


class _Hangup(asyncio.Protocol):
    """A connection that cannot be served."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def serve(settings: Settings, on_ready: Callable[[Server], None] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    import uvloop

    try:
        return uvloop.run(_serve(settings, on_ready))
    except TopicsError as error:
        print(f"topics: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"topics: cannot listen on {settings.host}:{settings.port}: {error}", file=sys.stderr)
        return 1


async def _serve(settings: Settings, on_ready: Callable[[Server], None] | None) -> int:
    server = Server(settings)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    # What is there now stays; and a server with many connections has much that a collection would walk through in vain.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)
    _keep_freed_memory()
    if on_ready is not None:
        on_ready(server)
    await stop.wait()
    await server.stop()
    return 0


def _keep_freed_memory() -> None:
    """Has glibc keep what large bodies took for the next ones. By default it goes back to the kernel when it is freed,
    and comes again page by page: 300,000 faults of 2 µs for 6 million records through a transaction."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_MMAP_THRESHOLD, _HEAP_BYTES)
