"""What is tried again, after how long, and what an answer means: decisions without a socket."""

from __future__ import annotations

from typing import Any

import pytest

from topics.client import calls
from topics.client.calls import Call
from topics.client.errors import NotReady, ServerError, Unreachable
from topics.client.retry import Answer, Attempts, Backoff, Done, Failure, Pause, Timing
from topics.core.errors import IdempotencyConflict, ReadOnly, Throttled, TopicFull, TopicsError

URL = "http://server"
WRITTEN = b'{"topic":"t","first_seq":4,"last_seq":4,"seqs":[4],"head_seq":4,"count":1,"created":false,"deduped":false}'


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def timing(self, retry_ms: int = 10_000) -> Timing:
        return Timing(retry_ms=retry_ms, clock=lambda: self.now, random=lambda: 0.5)


def attempts(call: Call[Any], time: Time | None = None) -> Attempts[Any]:
    return Attempts(call, (time or Time()).timing(), URL)


def refusal(status: int, code: str, detail: str = "{}", **headers: str) -> Answer:
    body = f'{{"error":{{"code":"{code}","message":"no: {code}","detail":{detail}}}}}'
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body.encode())


WRITE = calls.write("t", [{"data": 1}], "key")
STRICT = calls.write("t", [{"data": 1, "client_seq": 1}], "key", client_id="p")
CLAIM = calls.claim("q", "w", 1, None, 0)
LOST = Failure("cut", was_sent=True)
REFUSED = Failure("refused", was_sent=False)


def test_an_answer_is_the_result() -> None:
    step = attempts(WRITE).judge(Answer(201, {}, WRITTEN))
    assert isinstance(step, Done)
    assert step.value.seqs == [4]


def test_a_write_whose_answer_got_lost_is_tried_again() -> None:
    assert isinstance(attempts(WRITE).judge(LOST), Pause)


def test_a_claim_whose_answer_got_lost_is_not() -> None:
    with pytest.raises(Unreachable, match="cut"):
        attempts(CLAIM).judge(LOST)


def test_a_claim_that_was_never_sent_is_tried_again() -> None:
    assert isinstance(attempts(CLAIM).judge(REFUSED), Pause)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(422, "topic_full"), TopicFull),
        (refusal(503, "read_only", retry_after="1"), ReadOnly),
        (refusal(429, "throttled", '{"limit":"TOPICS_MAX_TOPICS","max":1}', retry_after="1"), Throttled),
        (refusal(500, "internal"), ServerError),
        (refusal(409, "what_is_this"), ServerError),
        (Answer(404, {}, b"<html>nothing here</html>"), ServerError),
        (Answer(302, {}, b""), ServerError),
        (Answer(200, {}, b"<html>welcome</html>"), ServerError),
    ],
)
def test_a_refusal_is_raised_at_once(answer: Answer, kind: type[TopicsError]) -> None:
    with pytest.raises(kind) as caught:
        attempts(WRITE).judge(answer)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "answer",
    [
        refusal(429, "throttled", '{"retry_after_ms":1000}', retry_after="1"),
        refusal(429, "throttled", '{"limit":"TOPICS_MAX_INFLIGHT_PER_KEY","max":1}', retry_after="1"),
        refusal(503, "not_ready", '{"replay_progress":0.5}', retry_after="1"),
        refusal(503, "shutting_down", retry_after="1"),
    ],
)
@pytest.mark.parametrize("call", [WRITE, CLAIM])
def test_what_passes_is_waited_out_whatever_the_call(answer: Answer, call: Call[Any]) -> None:
    step = attempts(call).judge(answer)
    assert isinstance(step, Pause)
    assert step.seconds == 1.0


def test_a_server_that_asks_for_more_time_gets_it() -> None:
    step = attempts(WRITE).judge(refusal(503, "not_ready", retry_after="7"))
    assert isinstance(step, Pause)
    assert step.seconds == 7.0


@pytest.mark.parametrize("asked", ["soon", "-5", "Wed, 21 Oct 2026 07:28:00 GMT", "nan"])
def test_a_strange_retry_after_is_our_own_pause(asked: str) -> None:
    step = attempts(WRITE).judge(refusal(503, "not_ready", retry_after=asked))
    assert isinstance(step, Pause)
    assert step.seconds == 0.05


def test_asked_to_wait_past_the_end_it_gives_up_and_says_why() -> None:
    with pytest.raises(NotReady):
        attempts(WRITE).judge(refusal(503, "not_ready", retry_after="30"))


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_that_could_not_ask_leaves_doubt(status: int) -> None:
    html = Answer(status, {}, b"<html>bad gateway</html>")
    assert isinstance(attempts(WRITE).judge(html), Pause)
    with pytest.raises(Unreachable):
        attempts(CLAIM).judge(html)


def test_pauses_grow_and_end() -> None:
    time = Time()
    backoff = Backoff(time.timing(5000))
    pauses: list[float] = []
    while (pause := backoff.next()) is not None:
        pauses.append(pause)
        time.now += pause
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]
    assert time.now <= 5.0


def test_pauses_of_two_clients_differ() -> None:
    low = Backoff(Timing(clock=lambda: 0.0, random=lambda: 0.0)).next()
    high = Backoff(Timing(clock=lambda: 0.0, random=lambda: 0.999)).next()
    assert low is not None
    assert high is not None
    assert low < 0.03 < 0.07 < high


def test_a_stream_that_lived_long_begins_anew() -> None:
    time = Time()
    backoff = Backoff(time.timing(5000))
    assert backoff.next() == 0.05
    backoff.begin()
    time.now += 3600
    assert backoff.next() == 0.05


def test_a_stream_that_dies_at_once_does_not() -> None:
    time = Time()
    backoff = Backoff(time.timing(5000))
    for expected in (0.05, 0.1, 0.2):
        assert backoff.next() == expected
        backoff.begin()
        time.now += 1.0


def test_a_strict_write_that_was_made_by_a_lost_try_is_answered() -> None:
    tries = attempts(STRICT)
    assert isinstance(tries.judge(LOST), Pause)
    step = tries.judge(refusal(409, "idempotency_conflict", '{"last_client_seq":1,"seqs":[7]}'))
    assert isinstance(step, Done)
    assert (step.value.seqs, step.value.deduped, step.value.count) == ([7], True, 1)


def test_a_strict_write_that_is_a_replay_of_the_callers_own_is_a_conflict() -> None:
    with pytest.raises(IdempotencyConflict):
        attempts(STRICT).judge(refusal(409, "idempotency_conflict", '{"last_client_seq":1,"seqs":[7]}'))


def test_a_strict_write_that_was_overtaken_is_a_conflict() -> None:
    tries = attempts(STRICT)
    tries.judge(LOST)
    with pytest.raises(IdempotencyConflict):
        tries.judge(refusal(409, "idempotency_conflict", '{"last_client_seq":9}'))


def test_a_commit_that_may_have_been_made_is_not_called_refused() -> None:
    tries = attempts(calls.commit("x", [{"part": "p", "records": {"t": 1}}], None, None))
    tries.judge(LOST)
    with pytest.raises(Unreachable, match="may have committed"):
        tries.judge(refusal(404, "txn_not_found"))


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (WRITE, b'"idempotency_key":"key"'),
        (calls.write("t", [{"data": 1}], "key", idempotency_key="mine"), b'"idempotency_key":"mine"'),
    ],
)
def test_every_write_carries_a_key(call: Call[Any], key: bytes) -> None:
    assert call.body is not None
    assert key in call.body


def test_a_strict_producer_needs_none() -> None:
    assert STRICT.body is not None
    assert b"idempotency_key" not in STRICT.body
