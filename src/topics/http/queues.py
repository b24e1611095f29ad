"""`/v0/topics/:q/claim`, `ack`, `nack`, `extend`, `work`, `unblock`, `redrive`, `leases`."""

from __future__ import annotations

from typing import Any

import msgspec

from topics.core.errors import AckHoleCapExceeded, InFlightCapExceeded, InvalidRequest, TopicNotFound, TopicsError
from topics.core.limits import MAX_PAGE_SIZE, MAX_WAIT_MS
from topics.engine.commit import Commit
from topics.engine.jobs import Claim, Holder, Redriven, Settled
from topics.engine.topic import Topic
from topics.http.app import App, check_name
from topics.http.exchange import Exchange, Outlet
from topics.http.messages import (
    ClaimRequest,
    ExtendRequest,
    HolderRequest,
    NackRequest,
    RedriveRequest,
    UnblockRequest,
)
from topics.http.watch import EVENT_STREAM, STREAM_HEADERS, need_event_stream, on_lines

_decode_claim = msgspec.json.Decoder(ClaimRequest)
_decode_holder = msgspec.json.Decoder(HolderRequest)
_decode_nack = msgspec.json.Decoder(NackRequest)
_decode_extend = msgspec.json.Decoder(ExtendRequest)
_decode_unblock = msgspec.json.Decoder(UnblockRequest)
_decode_redrive = msgspec.json.Decoder(RedriveRequest)
_encode = msgspec.json.Encoder().encode
# A claim that waits for what time alone brings looks again at least this often, in case the clock is set.
_LONGEST_LOOK = 1.0
_HEARTBEAT = 15.0
_CAPS = (AckHoleCapExceeded, InFlightCapExceeded)


def claim(app: App, exchange: Exchange, name: str) -> None:
    request: ClaimRequest = app.body_of(exchange, _decode_claim)
    if not request.node:
        raise InvalidRequest("node is required, and is not empty")
    topic, _ = app.engine.jobs.queue(name)
    app.pressure.check()
    waiting = WaitingClaim(app, exchange, topic, request)
    if topic.config.claim_jitter_ms:
        app.cohorts.join(topic, waiting)
    else:
        waiting.begin()


class WaitingClaim:
    """A claim, perhaps one that waits until there is something."""

    def __init__(self, app: App, exchange: Exchange, topic: Topic, request: ClaimRequest) -> None:
        self._app = app
        self._exchange = exchange
        self._topic = topic
        self._timer: Any = None
        self._deadline = app.clock() + min(request.wait_ms, MAX_WAIT_MS) / 1000
        self._is_over = False
        self.request = request
        exchange.on_cancel = self._stop
        exchange.hurry = self._on_hurry

    def begin(self, most: int | None = None) -> None:
        """Takes what there is; `most` is a share of it."""
        if self._is_over:
            return
        try:
            if self._topic.dropped:
                raise TopicNotFound(f"topic {self._topic.name!r} was deleted")
            if most == 0 and self._app.clock() >= self._deadline:
                # What is there is the share of others.
                self._stop()
                self._answer(self._app.engine.jobs.nothing(self._topic))
                return
            if most != 0 and self._claim(most):
                return
            self._wait()
        except Exception as error:
            self._stop()
            self._app.refuse(self._exchange, error)

    def _claim(self, most: int | None = None) -> bool:
        """Tries; says whether the client has an answer on its way."""
        app = self._app
        is_last = app.clock() >= self._deadline
        try:
            wanted = self.request.max if most is None else most
            commit = app.engine.jobs.claim(self._topic.name, self.request.node, wanted, self.request.lease_ms)
        except _CAPS:
            if is_last:
                raise
            return False
        finally:
            # Poison may have been routed, whatever came of the claim.
            app.end_turn()
        if commit.done and not commit.value().jobs and not is_last:
            return False
        app.when_done(self._exchange, commit, self._on_claimed)
        return True

    def _on_claimed(self, result: Claim) -> None:
        if not result.jobs and self._app.clock() < self._deadline and not self._is_over:
            # It has only put poison aside.
            self._wait()
            return
        self._stop()
        self._answer(result)

    def _answer(self, result: Claim) -> None:
        self._exchange.send(200, _rendered(self._topic.name, result, self._exchange.elapsed_ms()))

    def _wait(self) -> None:
        """Until something may be ready: a record, an ack, a nack, or time."""
        app = self._app
        if app.clock() >= self._deadline:
            # It had a share of nothing.
            if not self._claim():
                raise AssertionError("at its end a claim is answered")
            return
        self._line_up()
        app.readings.add(self._on_hurry)

    def _line_up(self) -> None:
        app, topic = self._app, self._topic
        assert topic.queue is not None
        pause = min(self._deadline - app.clock(), _LONGEST_LOOK)
        moment = topic.queue.next_change()
        if moment is not None:
            pause = min(pause, max(moment - app.engine.time.now(), 0) / 1000 + 0.001)
        topic.add_waiter(self._on_change)
        topic.queue.waiters[self._on_change] = None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = app.loop.call_later(max(pause, 0.0), self._on_time)

    def _on_change(self) -> None:
        """Something may be ready; somebody before it in the line may have taken it already."""
        if self._is_over:
            return
        topic = self._topic
        assert topic.queue is not None
        if not topic.dropped and not self._app.engine.jobs.has_ready(topic) and self._app.clock() < self._deadline:
            self._line_up()
            return
        self._leave()
        self.begin()

    def _on_time(self) -> None:
        if not self._is_over:
            self._leave()
            self.begin()

    def _on_hurry(self) -> None:
        """Nobody waits any longer, also if it is only just putting poison aside."""
        self._deadline = 0.0
        if self._timer is not None:
            self._on_time()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._topic.forget_waiter(self._on_change)
        assert self._topic.queue is not None
        self._topic.queue.waiters.pop(self._on_change, None)
        self._app.readings.discard(self._on_hurry)

    def _stop(self) -> None:
        self._is_over = True
        self._leave()


def _rendered(name: str, result: Claim, elapsed_ms: float) -> bytes:
    return b'{"topic":"%b","claimed":[%b],"lease_id":%b,"count":%d,"ready":%d,"lost":%d,"tombstone":%b,%b' % (
        name.encode(),
        b",".join(result.jobs),
        _encode(result.lease_id),
        len(result.jobs),
        result.ready,
        result.lost,
        _encode(result.tombstone),
        b'"performance":{"server_total_ms":%.3f}}' % elapsed_ms,
    )


class Cohorts:
    """Claims that arrive within a queue's `claim_jitter_ms` share what is there, in proportion to what each wants."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._waiting: dict[int, list[WaitingClaim]] = {}

    def join(self, topic: Topic, claim: WaitingClaim) -> None:
        cohort = self._waiting.get(topic.epoch)
        if cohort is None:
            self._waiting[topic.epoch] = [claim]
            self._app.loop.call_later(topic.config.claim_jitter_ms / 1000, self._divide, topic)
        else:
            cohort.append(claim)

    def _divide(self, topic: Topic) -> None:
        cohort = self._waiting.pop(topic.epoch)
        available = 0
        if not topic.dropped:
            self._app.engine.settle(topic)
            available = max(self._app.engine.jobs.available(topic), 0)
        wanted = [min(claim.request.max, self._app.limits.max_claim) for claim in cohort]
        for claim, share in zip(cohort, shares(wanted, available), strict=True):
            claim.begin(share)


def shares(wanted: list[int], available: int) -> list[int]:
    """Divides by what each wants; what rounding leaves over goes to the largest remainders, the first first."""
    total = sum(wanted)
    if total <= available:
        return wanted
    whole = [want * available // total for want in wanted]
    rest = available - sum(whole)
    order = sorted(range(len(wanted)), key=lambda index: (-(wanted[index] * available % total), index))
    for index in order[:rest]:
        whole[index] += 1
    return whole


# -- what holders do -------------------------------------------------------------------------------------------------


def _holder(request: HolderRequest) -> Holder:
    return Holder(request.node, request.seqs, request.lease_ids, request.lease_id)


def _answer_settled(app: App, exchange: Exchange, name: str, commit: Commit, word: str) -> None:
    def answer(result: Settled) -> None:
        fields: dict[str, Any] = {
            "topic": name,
            word: len(result.done),
            "skipped": len(result.skipped),
            f"{word}_seqs": result.done,
            "skipped_seqs": result.skipped,
            "ready": result.ready,
            "in_flight": result.in_flight,
        }
        if result.deadlines is not None:
            fields["deadlines"] = {str(seq): deadline for seq, deadline in result.deadlines.items()}
        exchange.answer(fields)

    app.when_done(exchange, commit, answer)


def ack(app: App, exchange: Exchange, name: str) -> None:
    request: HolderRequest = app.body_of(exchange, _decode_holder)
    _answer_settled(app, exchange, name, app.engine.jobs.ack(name, _holder(request)), "acked")


def nack(app: App, exchange: Exchange, name: str) -> None:
    request: NackRequest = app.body_of(exchange, _decode_nack)
    _answer_settled(app, exchange, name, app.engine.jobs.nack(name, _holder(request), request.delay_ms), "nacked")


def extend(app: App, exchange: Exchange, name: str) -> None:
    request: ExtendRequest = app.body_of(exchange, _decode_extend)
    commit = app.engine.jobs.extend(name, _holder(request), request.lease_ms)
    _answer_settled(app, exchange, name, commit, "extended")


def unblock(app: App, exchange: Exchange, name: str) -> None:
    request: UnblockRequest = app.body_of(exchange, _decode_unblock)
    _answer_settled(app, exchange, name, app.engine.jobs.unblock(name, request.seqs), "unblocked")


def redrive(app: App, exchange: Exchange, name: str) -> None:
    request: RedriveRequest = app.body_of(exchange, _decode_redrive, empty=b"{}")
    if request.to is not None:
        check_name(exchange, request.to)
        app.engine.topic(request.to)
    assert exchange.key is not None

    def answer(result: Redriven) -> None:
        exchange.answer({"topic": name, **msgspec.structs.asdict(result)})

    commit = app.engine.jobs.redrive(name, request.max, request.to, exchange.key.may_see)
    app.when_done(exchange, commit, answer)


def leases(app: App, exchange: Exchange, name: str) -> None:
    most = min(exchange.number("page_size", 100) or 100, MAX_PAGE_SIZE)
    listed, total = app.engine.jobs.leases(name, most, exchange.number("after", 0))
    entries = [{"$seq": lease.seq, **_without(msgspec.structs.asdict(lease), "seq")} for lease in listed]
    exchange.answer({"topic": name, "leases": entries, "total": total})


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


# -- work ------------------------------------------------------------------------------------------------------------


def work(app: App, exchange: Exchange, name: str) -> None:
    node = exchange.query.get("node")
    if not node:
        raise InvalidRequest("node is required, and is not empty")
    most = exchange.number("max", 1)
    if not 1 <= most <= app.limits.max_claim:
        raise InvalidRequest(f"max must be between 1 and TOPICS_MAX_CLAIM {app.limits.max_claim}, got {most}")
    lease_ms = exchange.number("lease_ms", 0)
    need_event_stream(exchange)
    assert exchange.key is not None
    topic, _ = app.engine.jobs.queue(name)
    app.watches.check_room(exchange.key)
    if exchange.method == "HEAD":
        exchange.send(200, b"", EVENT_STREAM, STREAM_HEADERS)
        return
    Work(app, exchange, topic, node, most, lease_ms or None)


class Work:
    """A worker's connection: up to `most` jobs are its, and pushed; when it drops, they are anybody's again at once."""

    def __init__(self, app: App, exchange: Exchange, topic: Topic, node: str, most: int, lease_ms: int | None) -> None:
        assert exchange.key is not None
        self._app = app
        self._topic = topic
        self._node = node
        self._most = most
        self._lease_ms = lease_ms
        self._owner = exchange.key.id
        self._leases: set[str] = set()
        self._is_over = False
        self._timer: Any = None
        self._claiming = False
        self._sent_at = app.clock()
        self._outlet: Outlet = exchange.open(self, EVENT_STREAM, STREAM_HEADERS)
        app.watches.open_one(self._owner)
        app.workers.add(self)
        self._outlet.write(b"retry: 2000\n\n")
        self._fill()

    def on_room(self) -> None:
        self._fill()

    def on_gone(self) -> None:
        self._end()

    def _held(self) -> int:
        queue = self._topic.queue
        assert queue is not None
        self._leases = {lease for lease in self._leases if lease in queue.leases}
        return self._app.engine.jobs.held_by(self._topic, self._leases)

    def _fill(self) -> None:
        """Leases and pushes until the worker has all that it can hold; then waits until that changes."""
        if self._is_over or self._claiming:
            return
        self._leave()
        app = self._app
        if self._topic.dropped:
            self.fail(TopicNotFound(f"topic {self._topic.name!r} was deleted"))
            return
        room = self._most - self._held()
        if room > 0 and not self._outlet.is_full:
            try:
                commit = app.engine.jobs.claim(self._topic.name, self._node, room, self._lease_ms)
            except _CAPS:
                pass
            except TopicsError as error:
                self.fail(error)
                return
            else:
                if not commit.done or commit.value().jobs:
                    self._claiming = True
                    app.end_turn()
                    commit.on_done(self._push)
                    return
            app.end_turn()
        self._wait()

    def _push(self, commit: Commit) -> None:
        self._claiming = False
        try:
            result: Claim = commit.value()
        except TopicsError as error:
            self.fail(error)
            return
        if result.lease_id is None:
            self._wait()
            return
        self._leases.add(result.lease_id)
        if self._is_over:
            self._release()
            return
        for job in result.jobs:
            seq = msgspec.json.decode(job, type=_Seq).seq
            self._outlet.write(b"id: %d\nevent: job\ndata: %b\n\n" % (seq, on_lines(job)))
        self._sent_at = self._app.clock()
        self._fill()

    def _wait(self) -> None:
        topic = self._topic
        assert topic.queue is not None
        now = self._app.clock()
        left = self._sent_at + _HEARTBEAT - now
        if left <= 0:
            if not self._outlet.is_full:
                self._outlet.write(b": hb\n\n")
            self._sent_at, left = now, _HEARTBEAT
        moment = topic.queue.next_change()
        if moment is not None:
            left = min(left, max(moment - self._app.engine.time.now(), 0) / 1000 + 0.001)
        self._timer = self._app.loop.call_later(max(left, 0.001), self._fill)
        topic.add_waiter(self._fill)
        topic.queue.waiters[self._fill] = None

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._topic.forget_waiter(self._fill)
        assert self._topic.queue is not None
        self._topic.queue.waiters.pop(self._fill, None)

    def fail(self, error: TopicsError) -> None:
        """Ends the stream with the reason as its last frame."""
        if not self._is_over:
            self._end()
            fields: dict[str, Any] = {"code": error.code, "error": error.message}
            self._outlet.write(b"event: error\ndata: %b\n\n" % _encode(fields))
            self._outlet.end(error)

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._leave()
        self._app.workers.discard(self)
        self._app.watches.close_one(self._owner)
        self._release()

    def _release(self) -> None:
        """What it holds goes back in line at once; nobody waits for the answer."""
        engine = self._app.engine
        self._held()
        for lease in self._leases:
            try:
                engine.jobs.nack(self._topic.name, Holder(lease_id=lease))
            except TopicsError:
                # The topic is gone, or nothing can be written: the deadline does it then.
                return
        self._app.end_turn()


class _Seq(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
