"""Slow disk work aside: one thread per syncer, results taken in on the engine's own thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

Job = Callable[[], object]
Done = Callable[[OSError | None], None]


class Syncer(Protocol):
    def submit(self, job: Job, done: Done) -> None:
        """Runs `job` aside, one after the other; `done` gets its error, or None, on the engine's thread."""
        ...

    def poll(self) -> None:
        """Calls `done` for what has finished."""
        ...

    def drain(self) -> None:
        """Waits for everything submitted, and calls `done` for it."""
        ...

    def close(self) -> None: ...


class InlineSyncer:
    """Does the work at once, in the caller: for tests and tools, where nothing else waits."""

    def submit(self, job: Job, done: Done) -> None:
        done(_run(job))

    def poll(self) -> None:
        return

    def drain(self) -> None:
        return

    def close(self) -> None:
        return


class ThreadSyncer:
    """A thread of its own. `wake` is called there whenever something has finished."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Job, Done] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[Done, OSError | None]] = queue.SimpleQueue()
        self._outstanding = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            self._finished.put((done, _run(job)))
            self._wake()

    def submit(self, job: Job, done: Done) -> None:
        self._outstanding += 1
        self._jobs.put((job, done))

    def poll(self) -> None:
        while self._outstanding and not self._finished.empty():
            self._take_one()

    def drain(self) -> None:
        while self._outstanding:
            self._take_one()

    def _take_one(self) -> None:
        done, error = self._finished.get()
        self._outstanding -= 1
        done(error)

    def close(self) -> None:
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run(job: Job) -> OSError | None:
    try:
        job()
    except OSError as error:
        return error
    return None
