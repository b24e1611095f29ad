"""When a call is tried again, and after how long. Pure decisions: time and chance come in as arguments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from topics.client.calls import Call
from topics.client.errors import ServerError, Unreachable, error_of
from topics.core.answers import Written
from topics.core.errors import IdempotencyConflict, ReadOnly, Throttled, TopicsError, TxnNotFound

T = TypeVar("T")
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
# A stream that lived so long was well: what comes then is another trouble.
_LIVED = 5.0
# The longest that a server may ask us to wait before the next try.
_LONGEST_ASKED = 30.0
# A gateway says these of a server that it could not ask, or that did not answer it.
_GATEWAY = (502, 503, 504)
# The cap that passes by itself: others are answered to the caller at once.
_PASSING_CAP = "TOPICS_MAX_INFLIGHT_PER_KEY"


class Answer(msgspec.Struct):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Failure(msgspec.Struct):
    """No answer. `was_sent` is false where the request cannot have reached the server."""

    message: str
    was_sent: bool


class Pause(msgspec.Struct):
    seconds: float


class Done(msgspec.Struct, Generic[T]):
    value: T


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """`retry_ms` is how long a call is tried again after its first failure."""

    retry_ms: int = 30_000
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random


class Backoff:
    """Longer and longer pauses, never in step with others, until `retry_ms` after the first."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._deadline: float | None = None
        self._pause = _FIRST_PAUSE
        self._begun: float | None = None

    def begin(self) -> None:
        """A stream is open."""
        self._begun = self._timing.clock()

    def reset(self) -> None:
        self._deadline = None
        self._pause = _FIRST_PAUSE

    def next(self, at_least: float = 0.0) -> float | None:
        """How long to wait before the next try; None when it is time to give up."""
        now = self._timing.clock()
        if self._begun is not None and now - self._begun >= _LIVED:
            self.reset()
        self._begun = None
        if self._deadline is None:
            # However long the first try took, it is followed by others.
            self._deadline = now + self._timing.retry_ms / 1000
        pause = max(self._pause * (0.5 + self._timing.random()), at_least)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return pause if now + pause <= self._deadline else None


class Attempts(Generic[T]):
    """The tries of one call: takes what came of each, and says what next."""

    def __init__(self, call: Call[T], timing: Timing, url: str) -> None:
        self._call = call
        self._backoff = Backoff(timing)
        self._url = url
        # Whether an earlier try may have been carried out without our knowing.
        self._is_doubtful = False

    def judge(self, outcome: Answer | Failure) -> Done[T] | Pause:
        """The result, or the pause before another try; raises what is final."""
        if isinstance(outcome, Failure):
            failure: TopicsError = Unreachable(f"cannot reach {self._url}: {outcome.message}")
            return self._again(failure, outcome.was_sent, 0.0)
        if outcome.status < 300:
            return Done(self._call.read(outcome.body))
        if outcome.status < 400:
            raise ServerError(f"{self._url} is not a topics server: it answered {outcome.status}")
        error = error_of(outcome.status, outcome.body)
        if isinstance(error, ServerError) and outcome.status in _GATEWAY:
            return self._again(Unreachable(f"cannot reach {self._url}: {error.message}"), True, _retry_after(outcome))
        if is_passing(error, outcome.status):
            # A refusal changes nothing, so it may be repeated whatever it was.
            return self._again(error, False, _retry_after(outcome))
        return self._refused(error)

    def _again(self, failure: TopicsError, may_be_done: bool, at_least: float) -> Pause:
        if may_be_done:
            if not self._call.is_repeatable:
                raise failure
            self._is_doubtful = True
        pause = self._backoff.next(at_least)
        if pause is None:
            raise failure
        return Pause(pause)

    def _refused(self, error: TopicsError) -> Done[T]:
        """A refusal of a try that followed a doubtful one may be the proof that that was carried out."""
        if self._is_doubtful and self._call.is_strict and isinstance(error, IdempotencyConflict):
            seqs = error.detail.get("seqs")
            if isinstance(seqs, list) and seqs:
                return Done(self._call.read(_as_written(self._call.topic, seqs)))
        if self._is_doubtful and self._call.is_commit and isinstance(error, TxnNotFound):
            raise Unreachable(
                f"{error.message}: an earlier try may have committed it; with client_id and client_seq a repeat is told"
            )
        raise error


def is_passing(error: TopicsError, status: int) -> bool:
    """Whether it will not be so for long."""
    if isinstance(error, Throttled):
        return error.detail.get("limit") in (None, _PASSING_CAP)
    return status == 503 and not isinstance(error, ReadOnly)


def _as_written(topic: str, seqs: list[int]) -> bytes:
    written = Written(
        topic=topic,
        first_seq=seqs[0],
        last_seq=seqs[-1],
        head_seq=seqs[-1],
        count=len(seqs),
        created=False,
        deduped=True,
        seqs=seqs,
    )
    return msgspec.json.encode(written)


def _retry_after(answer: Answer) -> float:
    with suppress(ValueError):
        return min(max(float(answer.headers.get("retry-after", "0")), 0.0), _LONGEST_ASKED)
    return 0.0
