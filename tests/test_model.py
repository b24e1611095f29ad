"""The log against the model: the same calls to both, with crashes, clock jumps and restarts among them.

Every answer is compared, and after every step every topic is read from several cursors to its end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.clocks import ManualClock
from tests.model import LOST, Appended, Config, Gap, Hole, Item, Model, Query, Refused, Topic, View
from tests.simdisk import MODES, Mode, SimDisk
from topics import Log
from topics.core.errors import TopicsError
from topics.core.limits import Limits
from topics.engine.options import Options
from topics.engine.read import Diff

TXN_TIMEOUT_MS = 5000
# What a topic may have reserved ahead. The contract allows 1024: fewer make crashes cheap to look at.
RESERVE = 64
UNBOUNDED = 1_000_000
# Whether the time that only ephemeral records have seen survives a kill.
EPHEMERAL_TIME = False

NAMES = st.sampled_from(["a", "a.b", "c"])
TAGS = st.sampled_from(["x", "xy", "y", "%d", "é", ""])
NODES = st.sampled_from(["n1", "n%2", 'é"'])
DATA = st.sampled_from(
    [
        *(b"null", b"1.0", b"1e400", b'"%d %b %s"', b'{"b": 1,\n "a":2,"a":3}', b'"\\u00e9 \xc3\xa9 \\/"', b"[ ]"),
        *(b'"' + b"l" * 90 + b'"', b'"' + b"L" * 350 + b'"'),
    ]
)
METAS = st.sampled_from([b"{}", b'{"k":"v"}', b'{ "a" : "%d", "a" : "}" }'])
MATCHES: st.SearchStrategy[Any] = st.one_of(
    TAGS,
    TAGS.map(lambda tag: ["tag", "Eq", tag]),
    st.sampled_from(["", "x", "xy", "z"]).map(lambda prefix: ["tag", "Glob", prefix + "*"]),
)
RECORDS = st.builds(Item, data=DATA, meta=st.none() | METAS, tag=st.none() | TAGS, node=st.none() | NODES)
ITEMS = st.lists(st.one_of(RECORDS, RECORDS, RECORDS, st.builds(Item, hole=st.integers(1, 6))), min_size=1, max_size=7)
PATCHES = st.fixed_dictionaries(
    {},
    optional={
        "ttl_ms": st.sampled_from([0, 500, 500, 3000]),
        "cap_records": st.sampled_from([0, 1, 4, 12]),
        "cap_bytes": st.sampled_from([0, 5, 60, 400]),
        "discard": st.sampled_from(["old", "old", "reject"]),
        "durability": st.sampled_from(["ephemeral", "memory", "disk", "fsync"]),
        "dedupe_node": st.booleans(),
        "seq_base": st.sampled_from([1, 1, 1, 7]),
    },
)
KEYS = st.sampled_from(["k1", "k2", "k3"])
# The same over a restart: often back, to before what TTL has taken.
OFFS = st.sampled_from([0, 0, 501, 3500, -700, -5000])
# How long a call comes after the one before it; the clock may have been set back.
DELAYS = st.sampled_from([0, 0, 0, 1, 60, 499, 501, 3500, -700])
TXNS = st.sampled_from(["t1", "t2"])
PARTS = st.sampled_from(["p", "q"])


def written(items: list[Item]) -> list[dict[str, Any]]:
    """Elements as `Log.append` takes them."""
    fields: list[dict[str, Any]] = []
    for item in items:
        if item.hole is not None:
            one: dict[str, Any] = {"hole": item.hole, "reason": "source_trim"}
        else:
            one = {"data": msgspec.Raw(item.data)}
            if item.meta is not None:
                one["meta"] = msgspec.Raw(item.meta)
            one |= {name: value for name in ("tag", "node") if (value := getattr(item, name)) is not None}
        if item.client_seq is not None:
            one["client_seq"] = item.client_seq
        fields.append(one)
    return fields


def shown(answer: Diff) -> list[dict[str, Any]]:
    """The records of an answer, `data` and `meta` as their exact bytes."""
    decoded = msgspec.json.decode(answer.records_json, type=list[dict[str, msgspec.Raw]])
    return [
        {name: bytes(raw) if name in ("data", "meta") else msgspec.json.decode(raw) for name, raw in one.items()}
        for one in decoded
    ]


def appended_of(result: Any) -> Appended:
    return Appended(tuple(result.seqs), result.first_seq, result.last_seq, result.count)


def check_answer(view: View, query: Query, answer: Diff, max_bytes: int | None = None, may_stop: bool = False) -> None:
    """An answer is exactly what the model says, or, where it may stop early, a first part of that."""
    expected = view.diff(query)
    tell = f"{view.topic.name}: {query}"
    assert (answer.topic, answer.epoch) == (view.topic.name, view.topic.epoch)
    assert (answer.head_seq, answer.earliest_seq) == (view.head, view.earliest), tell
    assert answer.caught_up == (answer.next_from_seq == view.head)
    assert answer.lag == view.head - answer.next_from_seq
    gap = expected.tombstone
    if may_stop and answer.tombstone is None and gap is not None and answer.next_from_seq < gap.gap_from:
        # It stopped on the way to a hole; the next answer tells of it.
        assert not answer.count, tell
        assert max(query.from_seq, view.base - 1) < answer.next_from_seq, tell
        assert not any(view.delivers(seq, query) for seq in range(query.from_seq + 1, answer.next_from_seq + 1)), tell
        return
    check_tombstone(view, gap, answer, tell)
    got, wanted = shown(answer), [one.shown(query.include_tags, query.include_meta) for one in expected.records]
    assert len(got) == answer.count
    if max_bytes is None and not may_stop:
        assert got == wanted, f"{tell}: {got}, expected {wanted}"
        assert answer.next_from_seq == expected.next_from_seq, f"{tell}: next_from_seq is {answer.next_from_seq}"
        return
    assert got == wanted[: len(got)], f"{tell}: {got}, expected {wanted}"
    left = expected.records[len(got) :]
    start = gap.gap_to if gap is not None else max(query.from_seq, view.base - 1)
    low = got[-1]["$seq"] if got else min(start, view.earliest - 1, expected.next_from_seq)
    high = left[0].seq - 1 if left else expected.next_from_seq
    assert low <= answer.next_from_seq <= high, f"{tell}: next_from_seq is {answer.next_from_seq}, not {low} to {high}"
    spent = max_bytes is not None and len(answer.records_json) - 1 >= max_bytes
    assert left or may_stop or spent or answer.next_from_seq == high, tell
    assert answer.next_from_seq != query.from_seq or query.from_seq == expected.next_from_seq, f"{tell}: no progress"
    if max_bytes is not None:
        size = len(answer.records_json) - 1
        assert size <= max_bytes + 1 or len(got) <= 1, f"{tell}: {size} bytes, {max_bytes} were allowed"
        if left and not may_stop:
            assert got, f"{tell}: an answer carries at least one record"
            more = view.diff(replace(query, from_seq=left[0].seq - 1, limit=1)).records[0]
            assert size + len(rendered(more, query)) + 1 > max_bytes, f"{tell}: one more would have fitted"


def rendered(record: Any, query: Query) -> bytes:
    fields = record.shown(query.include_tags, query.include_meta)
    raw = {name: msgspec.Raw(value) if isinstance(value, bytes) else value for name, value in fields.items()}
    return msgspec.json.encode(raw)


def check_tombstone(view: View, gap: Gap | None, answer: Diff, tell: str) -> None:
    got = answer.tombstone
    if gap is None or got is None:
        assert gap is None and got is None, f"{tell}: expected {gap}, got {got}"  # noqa: PT018  # one statement
        return
    assert (got.gap_from, got.gap_to) == (gap.gap_from, gap.gap_to), f"{tell}: {got}, expected {gap}"
    assert got.reason in gap.reasons, f"{tell}: {got}, but the reasons are {set(gap.reasons)}"
    assert got.missed_estimate == gap.gap_to - gap.gap_from + 1
    assert (got.earliest_seq, got.head_seq) == (view.earliest, view.head)


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(TXN_TIMEOUT_MS)
        self.clock = ManualClock()
        self.disk = SimDisk()
        self.epochs: set[int] = set()
        self.floors: dict[int, tuple[int, int]] = {}
        self.steps = 0
        self.is_quiet = False
        self.log: Log

    @initialize(
        checkpoint_bytes=st.sampled_from([300, 1000, 3000, 1 << 20]),
        cache_bytes=st.sampled_from([0, 2000, 1 << 20]),
        chunk_bytes=st.sampled_from([120, 300, 1000]),
        max_chunks=st.sampled_from([3, UNBOUNDED]),
        configs=st.tuples(PATCHES, PATCHES, PATCHES),
    )
    def start(
        self,
        checkpoint_bytes: int,
        cache_bytes: int,
        chunk_bytes: int,
        max_chunks: int,
        configs: tuple[dict[str, Any], ...],
    ) -> None:
        self.patches = ExitStack()
        sizes = {"TARGET_BYTES": chunk_bytes, "RESERVE_AHEAD": RESERVE, "_MAX_CHUNKS": max_chunks}
        for name, size in sizes.items():
            owners = [module for path, module in sys.modules.items() if path.startswith("topics.engine")]
            found = [module for module in owners if hasattr(module, name)]
            assert found, f"no module has {name} any more"
            for module in found:
                self.patches.enter_context(patch.object(module, name, size))
        self.may_stop = max_chunks != UNBOUNDED
        self.options = Options(checkpoint_bytes=checkpoint_bytes, cache_bytes=cache_bytes, reclaim_bytes=1500)
        self.open()
        for topic, config in zip(("a", "a.b", "c"), configs, strict=True):
            self.put(topic, config, 0)

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.close()

    def open(self) -> None:
        limits = Limits(txn_timeout_ms=TXN_TIMEOUT_MS)
        self.log = Log(self.disk, clock=self.clock, limits=limits, options=self.options, background=False)

    # -- both sides ------------------------------------------------------------------------------------------------

    def begin(self, delay: int = 0) -> None:
        """Before a call: time has passed, and whoever is called looks at the clock."""
        self.clock.advance(delay)
        if not self.model.topics:
            self.log.engine.time.now()  # nothing else may look while there is no topic
        self.model.see(self.clock.now())

    def call(self, real: Callable[[], Any]) -> tuple[Any, TopicsError | None]:
        try:
            return real(), None
        except TopicsError as error:
            return None, error

    def expect(self, error: TopicsError | None, modelled: Callable[[], Any]) -> Any:
        """Does the same to the model; a refusal must be one on both sides, with the same code."""
        result, refused = None, None
        try:
            result = modelled()
        except Refused as refusal:
            refused = refusal
        if refused is None:
            assert error is None, f"{error.code}: {error.message}"
            return result
        assert error is not None, f"the contract says {refused.code}, the log did it"
        assert error.code == refused.code, f"{error.code}: {error.message}; the contract says {refused.code}"
        for name, value in refused.detail.items():
            assert error.detail.get(name) == value, error.detail
        assert ("seqs" in refused.detail) == ("seqs" in error.detail)
        return None

    def epoch(self, name: str) -> int:
        """The number of the instance that a name has now: never one that was there before."""
        if name not in self.log.engine.state.by_name:
            return 0
        epoch = self.log.get(name).epoch
        known = self.model.topics.get(name)
        if known is None:
            assert epoch not in self.epochs, f"epoch {epoch} is used again"
            self.epochs.add(epoch)
        else:
            assert epoch == known.epoch
        return epoch

    # -- topics ----------------------------------------------------------------------------------------------------

    @rule(name=NAMES, fields=PATCHES, delay=DELAYS)
    def put_topic(self, name: str, fields: dict[str, Any], delay: int) -> None:
        self.put(name, fields, delay)

    def put(self, name: str, fields: dict[str, Any], delay: int) -> None:
        self.begin(delay)
        result, error = self.call(lambda: self.log.put(name, fields))
        epoch = self.epoch(name)
        created = self.expect(error, lambda: self.model.put(name, fields, epoch))
        if error is None:
            assert result.created == created
            self.check_config(self.model.topics[name], result.config)

    def check_config(self, topic: Topic, config: dict[str, Any]) -> None:
        for name, value in vars(topic.config).items():
            assert config[name] == value, f"{topic.name}: {name} is {config[name]}, not {value}"
        assert config["durable"] == (topic.config.durability == "fsync")

    @rule(name=NAMES, if_empty=st.booleans(), fields=st.none() | PATCHES, sure=st.integers(0, 2), delay=DELAYS)
    def drop(self, name: str, if_empty: bool, fields: dict[str, Any] | None, sure: int, delay: int) -> None:
        """Mostly with a new instance behind it: a machine without topics finds nothing."""
        self.begin(delay)
        if_empty |= sure < 2
        existed, error = self.call(lambda: self.log.drop(name, if_empty=if_empty))
        dropped = self.expect(error, lambda: self.model.drop(name, if_empty))
        assert error is not None or existed == dropped
        if error is None and fields is not None:
            self.put(name, fields, 0)

    @rule(prefix=st.sampled_from(["", "a", "a.", "z"]), page_size=st.integers(1, 3))
    def list_topics(self, prefix: str, page_size: int) -> None:
        self.begin()
        names: list[str] = []
        cursor = None
        for _ in range(5):
            page = self.log.topics(prefix, page_size, cursor)
            assert len(page.topics) <= page_size
            for state in page.topics:
                assert state.count == self.model.topic(state.topic).count()
                names.append(state.topic)
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page.topics) == page_size
        assert names == sorted(name for name in self.model.topics if name.startswith(prefix))

    # -- writes ----------------------------------------------------------------------------------------------------

    @rule(
        name=NAMES,
        items=ITEMS,
        node=st.none() | NODES,
        key=st.none() | st.none() | KEYS,
        client=st.sampled_from([None, None, "w1", "w2"]),
        step=st.sampled_from([1, 1, 3, 0, -1]),
        create=st.sampled_from([True, True, True, False]),
        config=st.none() | PATCHES,
        delay=DELAYS,
    )
    def append(
        self,
        name: str,
        items: list[Item],
        node: str | None,
        key: str | None,
        client: str | None,
        step: int,
        create: bool,
        config: dict[str, Any] | None,
        delay: int,
    ) -> None:
        self.begin(delay)
        if client is not None:
            items = self.numbered(name, items, client, step)
        self.write(name, items, node=node, idempotency_key=key, client_id=client, create=create, config=config)

    def numbered(self, name: str, items: list[Item], client: str, step: int) -> list[Item]:
        """A strict producer's write: a new one, or one that overlaps its last (`step` below 1)."""
        topic = self.model.topics.get(name)
        last = topic.producers[client].client_seqs if topic is not None and client in topic.producers else ()
        if step == 0 and last:
            items = (items * len(last))[: len(last)]
            return [replace(item, client_seq=number) for item, number in zip(items, last, strict=True)]
        first = max((last[-1] if last else 10) + step, 0)
        return [replace(item, client_seq=first + index) for index, item in enumerate(items)]

    def write(self, name: str, items: list[Item], **fields: Any) -> None:
        sent = {field: value for field, value in fields.items() if value is not None}
        result, error = self.call(lambda: self.log.append(name, written(items), **sent))
        self.doubts(name, fields, result, error)
        epoch = self.epoch(name)
        existed = name in self.model.topics
        outcome = self.expect(
            error,
            lambda: self.model.append(
                name,
                items,
                fields.get("node"),
                fields.get("idempotency_key"),
                fields.get("client_id"),
                fields.get("create", True),
                fields.get("config"),
                epoch,
            ),
        )
        if outcome is not None:
            appended, deduped = outcome
            assert (appended_of(result), result.deduped) == (appended, deduped)
            assert result.created == (not existed)
            assert result.head_seq == self.model.topics[name].head

    def doubts(self, name: str, fields: dict[str, Any], result: Any, error: TopicsError | None) -> None:
        """Dedupe state that the contract leaves open after a restart: the model follows what the log says."""
        topic = self.model.topics.get(name)
        if topic is None:
            return
        key, client = fields.get("idempotency_key"), fields.get("client_id")
        if key in topic.keys and not topic.keys[key].certain and not (result is not None and result.deduped):
            del topic.keys[key]
        if client in topic.producers and not topic.producers[client].certain and result is not None:
            del topic.producers[client]

    @rule(name=NAMES, items=ITEMS, times=st.integers(1, 6), checkpoint=st.booleans(), delay=DELAYS)
    def append_often(self, name: str, items: list[Item], times: int, checkpoint: bool, delay: int) -> None:
        """A topic of some length, in several segments."""
        for _ in range(times):
            self.begin(delay // 2)
            self.write(name, items)
        if checkpoint:
            self.checkpoint_now()

    @rule(name=NAMES, items=ITEMS, key=KEYS, delay=DELAYS)
    def append_with_key(self, name: str, items: list[Item], key: str, delay: int) -> None:
        self.begin(delay)
        self.write(name, items, idempotency_key=key)

    @rule(
        name=NAMES,
        items=ITEMS,
        client=st.sampled_from(["w1", "w2"]),
        step=st.sampled_from([1, 0, -1]),
        checkpoint=st.booleans(),
        delay=DELAYS,
    )
    def append_as_producer(
        self, name: str, items: list[Item], client: str, step: int, checkpoint: bool, delay: int
    ) -> None:
        self.begin(delay)
        self.write(name, self.numbered(name, items, client, step), client_id=client)
        if checkpoint:
            self.checkpoint_now()

    @rule(name=NAMES, items=ITEMS, delay=DELAYS)
    def append_plainly(self, name: str, items: list[Item], delay: int) -> None:
        self.begin(delay)
        self.write(name, items)

    # -- reads -----------------------------------------------------------------------------------------------------

    @rule(
        name=NAMES,
        share=st.floats(0, 1.2),
        to_share=st.none() | st.floats(0, 1.1),
        limit=st.sampled_from([0, 1, 2, 5, 2000]),
        nodes=st.one_of(st.just(()), NODES.map(lambda node: (node,)), st.tuples(NODES, NODES)),
        match=st.none() | MATCHES,
        include_tags=st.booleans(),
        include_meta=st.booleans(),
        max_bytes=st.none() | st.sampled_from([1, 60, 200, 700]),
        epoch=st.sampled_from([None, None, 0, 1]),
        delay=DELAYS,
    )
    def diff(
        self,
        name: str,
        share: float,
        to_share: float | None,
        limit: int,
        nodes: tuple[str, ...],
        match: Any,
        include_tags: bool,
        include_meta: bool,
        max_bytes: int | None,
        epoch: int | None,
        delay: int,
    ) -> None:
        self.begin(delay)
        topic = self.model.topics.get(name)
        span = topic.head + 2 if topic is not None else 10
        from_seq = int(share * span)
        to_seq = None if to_share is None else int(to_share * span)
        # 0 stands for the epoch that the topic has, 1 for another.
        asked = None if epoch is None or topic is None else topic.epoch + epoch
        answer, error = self.call(
            lambda: self.log.diff(
                name,
                from_seq,
                to_seq=to_seq,
                limit=limit,
                node=list(nodes),
                match=match,
                include_tags=include_tags,
                include_meta=include_meta,
                max_bytes=max_bytes,
                epoch=asked,
            )
        )
        view = self.expect(error, lambda: View(self.model.topic(name)))
        if view is not None:
            query = Query(
                from_seq, to_seq, min(limit or 256, 1000), nodes, match, include_tags, include_meta, epoch=asked
            )
            check_answer(view, query, answer, max_bytes, self.may_stop)

    @rule(name=NAMES, back=st.integers(-2000, 6000), delay=DELAYS)
    def seek(self, name: str, back: int, delay: int) -> None:
        self.begin(delay)
        ts = self.model.time - back
        cursor, error = self.call(lambda: self.log.seek(name, ts))
        view = self.expect(error, lambda: View(self.model.topic(name)))
        if view is not None:
            view.check_seek(ts, cursor)

    # -- deletes ---------------------------------------------------------------------------------------------------

    @rule(
        name=NAMES,
        share=st.none() | st.floats(0, 1.2),
        match=st.none() | MATCHES,
        purpose=st.sampled_from(["erase", "trim"]),
        delay=DELAYS,
    )
    def delete(self, name: str, share: float | None, match: Any, purpose: str, delay: int) -> None:
        self.delete_some(name, share, match, purpose, delay)

    def delete_some(self, name: str, share: float | None, match: Any, purpose: str, delay: int) -> None:
        self.begin(delay)
        topic = self.model.topics.get(name)
        before = None if share is None else int(share * (topic.head + 2 if topic is not None else 10))
        result, error = self.call(lambda: self.log.delete(name, before_seq=before, match=match, purpose=purpose))
        if before is None and match is None:
            assert error is not None
            assert error.code == "invalid_request"
            return
        deleted = self.expect(error, lambda: self.model.delete(name, before, match, purpose))
        if deleted is not None:
            view = View(self.model.topics[name])
            expected = (deleted, view.earliest, view.head, view.count, view.bytes)
            assert (result.deleted, result.earliest_seq, result.head_seq, result.count, result.bytes) == expected

    # -- transactions ----------------------------------------------------------------------------------------------

    @rule(txn=TXNS, name=NAMES, part=PARTS, number=st.integers(0, 2), items=ITEMS, delay=DELAYS)
    def spool_one(self, txn: str, name: str, part: str, number: int, items: list[Item], delay: int) -> None:
        self.spool(txn, name, part, number, items, delay)

    def spool(self, txn: str, name: str, part: str, number: int, items: list[Item], delay: int) -> None:
        self.begin(delay)
        spooled, error = self.call(lambda: self.log.spool(txn, name, part, number, written(items)))
        expected = self.expect(error, lambda: self.model.spool(txn, name, part, number, items))
        assert error is not None or (spooled.count, spooled.repeated) == expected

    @rule(
        txn=st.sampled_from(["t1", "t2", "t3", "t4", "t5"]),
        chunks=st.lists(st.tuples(NAMES, PARTS, st.integers(0, 2), ITEMS), max_size=4),
        order=st.sampled_from([("p",), ("q",), ("p", "q"), ("q", "p"), ()]),
        short=st.sampled_from([0, 0, 0, 1]),
        client=st.sampled_from([None, "s1", "s2"]),
        step=st.sampled_from([1, 1, 1, 0, -1]),
        delay=DELAYS,
    )
    def commit(
        self,
        txn: str,
        chunks: list[tuple[str, str, int, list[Item]]],
        order: tuple[str, ...],
        short: int,
        client: str | None,
        step: int,
        delay: int,
    ) -> None:
        for name, part, number, items in chunks:
            self.spool(txn, name, part, number, items, 0)
        self.begin(delay)
        spooled = self.model.txns[txn].parts if txn in self.model.txns else {}
        # A part that nothing was spooled for is asked for now and then.
        named = [part for part in order if part in spooled or short]
        parts = [
            (part, {name: sum(map(len, own.values())) + short for name, own in spooled.get(part, {"a": {}}).items()})
            for part in named
        ]
        last = self.model.committed[client][0] if client in self.model.committed else 5
        pair = None if client is None else (client, last + step)
        asked = [{"part": part, "records": counts} for part, counts in parts]
        result, error = self.call(lambda: self.log.commit(txn, asked, *(pair or (None, None))))
        new = [name for part in named for name in spooled.get(part, {}) if name not in self.model.topics]
        epochs = [self.epoch(name) for name in dict.fromkeys(new)] if error is None and not result.deduped else []
        outcome = self.expect(error, lambda: self.model.commit(txn, parts, pair, epochs))
        if outcome is not None:
            topics, deduped = outcome
            assert result.deduped == deduped
            assert {name: appended_of(one) for name, one in result.topics.items()} == topics

    @rule(txn=TXNS)
    def abort(self, txn: str) -> None:
        self.begin()
        _, error = self.call(lambda: self.log.abort(txn))
        self.expect(error, lambda: self.model.abort(txn))

    # -- time ------------------------------------------------------------------------------------------------------

    @rule(delay=st.sampled_from([1, 100, 500, 501, 3001, 60_000, -1, -5000, -200_000]))
    def pass_time(self, delay: int) -> None:
        """Nobody looks before the next call: what TTL takes must be right whoever that is."""
        self.clock.advance(delay)
        self.is_quiet = True

    @rule(delay=DELAYS)
    def tick(self, delay: int) -> None:
        self.begin(delay)
        self.log.engine.tick()
        self.model.tick()

    @rule()
    def sync_in_background(self) -> None:
        """Class `disk`: what was written is synced after 100 ms at the latest."""
        for delay in (0, 200):
            self.begin(delay)
            self.log.engine.tick()
            self.model.tick()
        for topic in self.model.topics.values():
            if topic.config.durability == "disk":
                topic.is_durable()

    @rule()
    def checkpoint(self) -> None:
        self.checkpoint_now()

    def checkpoint_now(self) -> None:
        self.begin()
        self.log.checkpoint()
        for topic in self.model.topics.values():
            topic.is_durable()

    # -- restarts --------------------------------------------------------------------------------------------------

    @rule(off=OFFS)
    def restart(self, off: int) -> None:
        """A clean stop and start: nothing is lost but what was in memory only."""
        self.log.close()
        for topic in self.model.topics.values():
            topic.is_durable()
        self.clock.advance(off)
        self.recover("restart")

    @rule(off=OFFS)
    def kill(self, off: int) -> None:
        """`kill -9`: `disk` and `fsync` lose nothing, and `memory` says that it may have."""
        self.disk = self.disk.kill()
        self.clock.advance(off)
        self.recover("kill")

    @rule(
        mode=st.sampled_from(MODES),
        seed=st.integers(0, 1 << 16),
        name=NAMES,
        items=ITEMS,
        times=st.sampled_from([0, 0, 1, 3, 20]),
        match=st.none() | MATCHES,
        off=OFFS,
    )
    def cut_power(self, mode: Mode, seed: int, name: str, items: list[Item], times: int, match: Any, off: int) -> None:
        """`fsync` loses nothing; of `disk` and `memory` a tail may be gone, told by a hole. Some writes come just
        before: a tail that nothing has synced yet, longer than one reservation. Or a delete, which stays."""
        for _ in range(times):
            self.begin()
            self.write(name, items)
        if match is not None:
            self.delete_some(name, None, match, "erase", 0)
        self.disk = self.disk.power_cut(Random(seed), mode)
        self.clock.advance(off)
        self.recover("power")

    def recover(self, kind: str) -> None:
        before = self.model.time
        self.open()
        now = self.log.engine.time.latest
        assert now <= max(before, self.clock.now()), "a time that nobody has seen"
        assert now >= before or kind != "restart", "the time goes back over a clean restart"
        self.model.time = now
        self.model.restart()
        self.model.see(self.clock.now())
        assert [state.topic for state in self.log.topics().topics] == sorted(self.model.topics)
        for name, topic in list(self.model.topics.items()):
            self.model.topics[name] = self.recovered(topic, kind)
            # A power loss may take the newest records, and the time with them.
            kept = topic if kind != "power" else self.model.topics[name]
            seen = [one.ts for one in kept.records.values() if EPHEMERAL_TIME or one.seq not in kept.ephemeral_seqs]
            if kind != "power" or "ephemeral" not in topic.classes:
                assert now >= max(seen, default=0), f"{name}: the time goes back over a restart"

    def recovered(self, topic: Topic, kind: str) -> Topic:
        """What a topic may be after a restart: the newest of its past states that the log agrees with."""
        head = self.log.get(topic.name).head_seq
        assert topic.head <= head, f"{topic.name}: {topic.head} was acked, and {head + 1} would be handed out again"
        assert head <= topic.head + RESERVE, f"{topic.name}: {head} is too far above {topic.head}"
        if kind == "restart":
            assert head == topic.head, "a clean restart leaves no hole"
        states = [topic, *reversed(topic.past)] if kind == "power" else [topic]
        if len(states) > 1:
            self.floors.pop(topic.epoch, None)  # what evicted them may be lost itself
        failures: list[str] = []
        for state in states:
            found = state.copy()
            try:
                if topic.is_mixed:
                    self.adopt_mixed(found)
                elif topic.config.durability == "ephemeral":
                    found.lose_all(head)
                elif kind == "power" or topic.config.durability == "memory":
                    found.crash(head)
                found.settle(self.model.time)
                holes = self.holes(topic.name)
                assert found.holes == holes, f"{topic.name}: the holes are {holes}, expected {found.holes}"
                self.check_topic(found, [found.base - 1])
            except AssertionError as failure:
                failures.append(str(failure))
                continue
            found.is_durable()
            return found
        raise AssertionError(f"{topic.name} is none of what it may be after this: {failures}")

    def holes(self, name: str) -> list[Hole]:
        return [Hole(hole.first, hole.last, hole.reason) for hole in self.log.engine.state.by_name[name].holes]

    def adopt_mixed(self, found: Topic) -> None:
        """Some of its records were in memory only. Those are lost, and told; how is the log's choice, within the rules:
        what was lost or deleted stays so, and what was on disk is there."""
        real = self.log.engine.state.by_name[found.name]
        alive = {one["$seq"] for one in self.walk(found.name, found.base - 1)}
        found.settle(self.model.time)
        found.head = real.head_seq
        found.holes = self.holes(found.name)
        for one, other in zip(found.holes, found.holes[1:], strict=False):
            assert one.last < other.first, f"{found.name}: {one} and {other} overlap"
        assert alive <= set(found.records), f"{found.name}: nobody has written {alive - set(found.records)}"
        for seq, fate in found.fates.items():
            if seq in alive:
                assert fate == "live", f"{found.name}: {seq} was {fate} and is back"
                assert seq not in found.ephemeral_seqs, f"{found.name}: {seq} was in memory only"
            elif fate == "live":
                assert seq in found.ephemeral_seqs, f"{found.name}: {seq} was on disk and is gone"
                in_hole = any(hole.first <= seq <= hole.last for hole in found.holes)
                assert in_hole or seq < real.evict_floor, f"{found.name}: nobody is told that {seq} is gone"
                found.fates[seq] = "hole" if in_hole else "restart"
        found.restarted_at = max(found.restarted_at, real.restart_lost)
        if not alive and found.config.durability == "ephemeral" and real.evict_floor == real.head_seq + 1:
            found.lose_all(found.head)

    # -- after every step ------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "log"):
            return
        if self.is_quiet:
            self.is_quiet = False
            return
        self.begin()
        self.steps += 1
        for name in list(self.model.topics):
            topic = self.model.topic(name)
            span = topic.head + 2 - topic.base
            spread = [topic.base - 1, topic.base - 1 + self.steps * 7 % span, topic.base - 1 + self.steps * 13 % span]
            self.check_topic(topic, spread)
        for txn in ("t1", "t2", "t3"):
            self.check_txn(txn)

    def check_topic(self, topic: Topic, cursors: list[int]) -> None:
        state = self.log.get(topic.name)
        view = View(topic)
        assert state.epoch == topic.epoch
        got = (state.head_seq, state.next_seq, state.earliest_seq, state.evict_floor, state.count, state.bytes)
        expected = (view.head, view.head + 1, view.earliest, view.evict_floor, view.count, view.bytes)
        assert got == expected, f"{topic.name}: head, next, earliest, floor, count, bytes: {got}, expected {expected}"
        assert state.holes == len(view.holes), f"{topic.name}: {state.holes} holes, expected {view.holes}"
        assert state.evict_floor <= state.earliest_seq
        self.check_config(topic, state.config)
        self.check_deletes(topic)
        for index, cursor in enumerate(cursors):
            self.check_reader(view, cursor, limit=(3, 1, 50)[index % 3])
        floors = self.floors.get(topic.epoch, (0, 0))
        assert floors[0] <= state.evict_floor, f"{topic.name}: the evict floor went back from {floors[0]}"
        assert floors[1] <= state.earliest_seq, f"{topic.name}: earliest_seq went back from {floors[1]}"
        self.floors[topic.epoch] = (state.evict_floor, state.earliest_seq)

    def check_reader(self, view: View, cursor: int, limit: int) -> None:
        """A reader who goes on until it is caught up accounts for every seq: delivered, told of, or deleted."""
        topic = view.topic
        delivered: list[int] = []
        told: list[int] = []
        start = at = max(cursor, view.base - 1)
        for _ in range(view.head + 2):
            query = Query(at, limit=limit, include_tags=True)
            answer = self.log.diff(topic.name, at, limit=limit, include_tags=True)
            check_answer(view, query, answer, may_stop=self.may_stop)
            if answer.tombstone is not None:
                told += range(answer.tombstone.gap_from, answer.tombstone.gap_to + 1)
            delivered += [one["$seq"] for one in shown(answer)]
            if answer.caught_up:
                break
            at = answer.next_from_seq
        else:
            raise AssertionError(f"{topic.name}: a reader from {cursor} never catches up")
        assert delivered == [seq for seq in view.live if seq > start], "every live record once, in order"
        assert len(told) == len(set(told)), "a loss is told twice"
        assert not set(told) & set(delivered), "a record is delivered and said to be lost"
        for seq in range(start + 1, view.head + 1):
            fate = topic.fates.get(seq, "hole")
            lost_below = fate in LOST or fate == "hole"
            assert not lost_below or seq in told, f"{topic.name}: {seq} is lost ({fate}), and nobody is told"

    def check_deletes(self, topic: Topic) -> None:
        history = self.log.deletes(topic.name)
        assert history.complete
        ids = [past.id for past in history.deletes]
        assert ids == sorted(set(ids))
        got = [(past.ts, past.head_seq, past.before_seq, past.purpose) for past in history.deletes]
        expected = [(past.ts, past.head_seq, past.before_seq, past.purpose) for past in topic.deletes]
        assert got == expected, f"{topic.name}: the history is {got}, expected {expected}"
        if len(ids) > 1:
            assert [past.id for past in self.log.deletes(topic.name, ids[0]).deletes] == ids[1:]

    def check_txn(self, txn: str) -> None:
        known = self.model.txns.get(txn)
        state, error = self.call(lambda: self.log.txn(txn))
        if known is None:
            assert error is not None
            assert error.code == "txn_not_found"
            return
        assert error is None
        assert state.parts == {
            part: {name: sum(map(len, chunks.values())) for name, chunks in topics.items()}
            for part, topics in known.parts.items()
        }

    def walk(self, name: str, cursor: int) -> Iterator[dict[str, Any]]:
        while True:
            answer = self.log.diff(name, cursor, limit=1000)
            yield from shown(answer)
            cursor = answer.next_from_seq
            if answer.caught_up:
                return


# Passing takes a minute; the rest is for Hypothesis to shrink what it finds.
TestModel = pytest.mark.timeout(900)(LogMachine.TestCase)


# -- the worked example of section 5 ---------------------------------------------------------------------------------


@pytest.fixture(params=["as written", "sealed", "restarted", "killed"])
def example(request: pytest.FixtureRequest) -> Log:
    """1 to 3 evicted, 4 and 5 deleted, 6 and 7 a hole, live from 8."""
    disk, clock = SimDisk(), ManualClock()
    log = Log(disk, clock=clock, background=False)
    log.put("t", cap_records=4)
    log.append("t", [{"data": n} for n in (1, 2, 3)])
    log.append("t", [{"data": 4, "tag": "gone"}, {"data": 5, "tag": "gone"}, {"hole": 2, "reason": "source_trim"}])
    log.append("t", [{"data": 8}, {"data": 9}])
    log.put("t", cap_records=0)
    log.delete("t", match="gone")
    if request.param == "sealed":
        log.checkpoint()
    elif request.param == "restarted":
        log.close()
        log = Log(disk, clock=clock, background=False)
    elif request.param == "killed":
        log = Log(disk.kill(), clock=clock, background=False)
    return log


def test_the_worked_example_has_its_watermarks(example: Log) -> None:
    state = example.get("t")
    assert (state.evict_floor, state.earliest_seq, state.head_seq) == (4, 8, 9)
    assert (state.count, state.bytes, state.holes) == (2, 2, 1)


@pytest.mark.parametrize(
    ("from_seq", "gap", "reason"),
    [
        (0, (1, 7), "cap"),
        (1, (2, 7), "cap"),
        (2, (3, 7), "cap"),
        (3, (6, 7), "source_trim"),
        (4, (6, 7), "source_trim"),
        (5, (6, 7), "source_trim"),
        (6, (7, 7), "source_trim"),
    ],
)
def test_the_worked_example_tells_every_cursor_what_it_lost(
    example: Log, from_seq: int, gap: tuple[int, int], reason: str
) -> None:
    answer = example.diff("t", from_seq)
    assert answer.tombstone is not None
    assert (answer.tombstone.gap_from, answer.tombstone.gap_to) == gap
    assert answer.tombstone.reason == reason
    assert answer.tombstone.missed_estimate == gap[1] - gap[0] + 1
    assert (answer.tombstone.earliest_seq, answer.tombstone.head_seq) == (8, 9)
    assert [one["$seq"] for one in shown(answer)] == [8, 9]
    assert answer.caught_up


@pytest.mark.parametrize(("from_seq", "seqs"), [(7, [8, 9]), (8, [9]), (9, [])])
def test_the_worked_example_tells_a_cursor_behind_the_loss_nothing(
    example: Log, from_seq: int, seqs: list[int]
) -> None:
    answer = example.diff("t", from_seq)
    assert answer.tombstone is None
    assert [one["$seq"] for one in shown(answer)] == seqs


def test_the_worked_example_says_recreated_only_beyond_its_head(example: Log) -> None:
    answer = example.diff("t", 10)
    assert answer.tombstone is not None
    assert (answer.tombstone.gap_from, answer.tombstone.gap_to, answer.tombstone.reason) == (1, 9, "recreated")
    assert [one["$seq"] for one in shown(answer)] == [8, 9]


def test_the_worked_example_cuts_its_gaps_at_to_seq(example: Log) -> None:
    answer = example.diff("t", 0, to_seq=5)
    assert answer.tombstone is not None
    assert (answer.tombstone.gap_from, answer.tombstone.gap_to) == (1, 5)
    assert (answer.next_from_seq, answer.records) == (5, [])


def test_the_model_agrees_with_the_worked_example() -> None:
    topic = Topic("t", 1, Config(cap_records=4))
    topic.append([Item(b"1"), Item(b"2"), Item(b"3")], None, 0)
    topic.append([Item(b"4", tag="gone"), Item(b"5", tag="gone"), Item(hole=2)], None, 0)
    topic.append([Item(b"8"), Item(b"9")], None, 0)
    topic.configure(Config(), 0)
    topic.delete(None, "gone", "erase", 0)
    view = View(topic)
    assert (view.evict_floor, view.earliest, view.head) == (4, 8, 9)
    gaps = [view.diff(Query(cursor)).tombstone for cursor in (0, 2, 3, 6, 7)]
    assert [gap and (gap.gap_from, gap.gap_to) for gap in gaps] == [(1, 7), (3, 7), (6, 7), (7, 7), None]
