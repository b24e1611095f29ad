"""Streams against the model: writes, evictions, deletes, topics that go and come back, connections that end at any
byte, resumes from any earlier id.

Every reader gets exactly the frames that the read rule of section 5 promises, each once a pass. What is told is
computed by `tests.model`, which knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.clocks import ManualClock
from tests.http.server import LocalServer, local_server
from tests.live.sse import Events, Frame, frames_in
from tests.model import Item, Model, Query, View

# Far from now: the time that the server has seen already must not be ahead of the test's.
START = 4_000_000_000_000
LETTERS = ("a", "b")
TAGS = st.sampled_from(["x", "y"])
NODES = st.sampled_from(["n1", "n2"])
DATA = st.sampled_from([b"null", b"1.0", b'{"k": [1,\n2]}', b'"\\u00e9"', b"{\r\n}"])
RECORDS = st.builds(Item, data=DATA, tag=st.none() | TAGS, node=st.none() | NODES)
ITEMS = st.lists(st.one_of(RECORDS, RECORDS, RECORDS, st.builds(Item, hole=st.integers(1, 4))), min_size=1, max_size=6)
PATCHES = st.fixed_dictionaries(
    {}, optional={"cap_records": st.sampled_from([0, 1, 3, 8]), "ttl_ms": st.sampled_from([0, 1000, 5000])}
)

ACTIONS = (
    *["append"] * 8,
    *("put", "put", "delete by tag", "delete before", "drop", "pass time"),
    *("open", "open", "open", "resume", "resume", "take over", "cut", "cut", "disconnect", "disconnect"),
)

Cursor = tuple[int, int]
Told = tuple[Any, ...]
_examples = count()


@dataclass
class Following:
    """What one connection must have been told of one topic, and where it stands."""

    name: str
    seq: int
    epoch: int
    limit: int
    nodes: tuple[str, ...]
    # The instance that it has seen last.
    seen: int | None = None
    head: int = 0
    is_new: bool = True
    is_live: bool = False

    def step(self, model: Model) -> Iterator[Told]:
        """What must come now, with the cursor that stands in its id."""
        if self.name not in model.topics:
            if self.seen is not None or self.is_new:
                yield "topic-deleted", self.cursor
            self.seen, self.is_new, self.is_live = None, False, False
            return
        topic = model.topic(self.name)
        self.seen = topic.epoch
        view = View(topic)
        while True:
            before = self.seq
            answer = view.diff(Query(from_seq=self.seq, epoch=self.epoch, limit=self.limit, nodes=self.nodes))
            self.epoch = topic.epoch
            gap = answer.tombstone
            if gap is not None:
                reasons = gap.reasons
                before = gap.gap_to
                if "recreated" in reasons:
                    before = min(view.earliest - 1, view.head)
                elif self.is_new and reasons & {"cap", "ttl", "mixed"}:
                    reasons = frozenset({"from_seq_too_old"})
                yield "tombstone", (before, topic.epoch), gap.gap_from, gap.gap_to, reasons
            self.is_new = False
            self.seq = answer.next_from_seq
            if answer.records:
                shown = [(record.seq, record.ts, record.node) for record in answer.records]
                yield "record", self.cursor, before, shown
            if self.seq == view.head:
                if not self.is_live:
                    yield "caught-up", self.cursor, view.head
                self.is_live = True
                return
            self.is_live = False

    @property
    def cursor(self) -> Cursor:
        return self.seq, self.epoch


@dataclass
class Reader:
    """A session, and the connection that it has at the moment."""

    url: str
    limit: int
    nodes: tuple[str, ...]
    # Where a connection without an id begins.
    known: dict[str, Cursor]
    ids: list[tuple[str, dict[str, Cursor]]] = field(default_factory=list)
    events: Events | None = None
    following: dict[str, Following] = field(default_factory=dict)


def cursors_of(frame: Frame) -> dict[str, Cursor]:
    cursors = frame.cursors
    epochs = cursors.pop("$epoch")
    return {name: (seq, epochs[name]) for name, seq in cursors.items()}


def seen_in(frame: Frame) -> tuple[str, Told]:
    """The topic of a frame, and what the frame says, as `Following` would put it."""
    fields = frame.json()
    name = fields["topic"]
    kind = frame.event
    cursor = cursors_of(frame)[name]
    if kind == "record":
        shown = [(record["$seq"], record["$ts"], record.get("$node")) for record in fields["records"]]
        assert fields["to_seq"] == cursor[0]
        return name, (kind, cursor, fields["from_seq"], shown)
    if kind == "tombstone":
        assert fields["missed_estimate"] == fields["gap_to"] - fields["gap_from"] + 1
        return name, (kind, cursor, fields["gap_from"], fields["gap_to"], fields["reason"])
    if kind == "caught-up":
        return name, (kind, cursor, fields["head_seq"])
    return name, (kind, cursor)


def agree(expected: Told, seen: Told) -> bool:
    """Of the reasons of a tombstone several may be true."""
    if expected[0] == "tombstone" == seen[0]:
        return expected[:4] == seen[:4] and seen[4] in expected[4]
    return expected == seen


class Live(RuleBasedStateMachine):
    server: LocalServer
    client: httpx.Client
    clock: ManualClock

    def __init__(self) -> None:
        super().__init__()
        self.prefix = f"e{next(_examples)}"
        self.model = Model(txn_timeout_ms=10**9)
        self.readers: list[Reader] = []
        self.model.see(self.clock.now())

    @initialize()
    def begin(self) -> None:
        for letter in LETTERS:
            self._put(self._name(letter), {})

    def teardown(self) -> None:
        """Nothing more may have come than what was promised."""
        try:
            for reader in self.readers:
                if reader.events is not None:
                    with Events(self.server.port, reader.url) as newcomer:
                        newcomer.stream()
                        assert [frame.event for frame in reader.events.rest()] == ["error"]
        finally:
            for reader in self.readers:
                if reader.events is not None:
                    reader.events.close()

    def _name(self, letter: str) -> str:
        return f"{self.prefix}.{letter}"

    def _post(self, path: str, body: bytes) -> None:
        answer = self.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 201), answer.text

    def _put(self, name: str, patch: dict[str, Any]) -> None:
        answer = self.client.put(f"/v0/topics/{name}", json=patch)
        assert answer.status_code in (200, 201), answer.text
        self.model.put(name, patch, self.client.get(f"/v0/topics/{name}").json()["epoch"])

    @rule(
        action=st.sampled_from(ACTIONS),
        letter=st.sampled_from(LETTERS),
        items=ITEMS,
        number=st.integers(0, 3),
        choice=st.integers(0, 1000),
        part=st.floats(0, 1),
        hard=st.booleans(),
        data=st.data(),
    )
    def act(
        self,
        action: str,
        letter: str,
        items: list[Item],
        number: int,
        choice: int,
        part: float,
        hard: bool,
        data: st.DataObject,
    ) -> None:
        """One rule for all: Hypothesis leaves rules out at random, and a run without readers proves nothing."""
        if action == "append":
            self.append(letter, items)
        elif action == "put":
            self.put(letter, data.draw(PATCHES))
        elif action == "delete by tag":
            self.delete_by_tag(letter, data.draw(TAGS))
        elif action == "delete before":
            self.delete_before(letter, choice % 9)
        elif action == "drop":
            self.drop(letter)
        elif action == "pass time":
            self.pass_time(data.draw(st.sampled_from([1, 1000, 1001, 6000])))
        elif action == "open":
            if len(self.readers) < 4:
                self.open_session(
                    data.draw(st.sampled_from([("a", "b"), ("a",), ("b",)])),
                    choice % 13 - 2,
                    data.draw(st.booleans()),
                    data.draw(st.sampled_from([1, 2, 256])),
                    data.draw(st.sampled_from([(), (), ("n1",), ("n1", "n2")])),
                    data.draw(st.booleans()),
                )
            self.connect(number)
        elif action == "resume":
            self.resume_from_any_earlier_id(number, choice)
        elif action == "take over":
            self.take_over(number, choice)
        elif action == "cut":
            self.cut_off_at_any_byte(number, part, hard)
        else:
            self.disconnect(number, hard)

    # -- what happens to topics ------------------------------------------------------------------------------------

    def put(self, letter: str, patch: dict[str, Any]) -> None:
        """Creates a topic, brings one back, or changes what it keeps."""
        self._put(self._name(letter), patch)
        self._compare()

    def append(self, letter: str, items: list[Item]) -> None:
        name = self._name(letter)
        if name not in self.model.topics:
            self.put(letter, {})
        self._post(f"/v0/topics/{name}", b'{"records":[' + b",".join(map(_spell, items)) + b"]}")
        self.model.append(name, items)
        self._compare()

    def delete_by_tag(self, letter: str, match: str) -> None:
        self._delete(letter, b'{"match":"%b"}' % match.encode(), None, match)

    def delete_before(self, letter: str, back: int) -> None:
        topic = self.model.topics.get(self._name(letter))
        before = max(topic.head - back, 0) if topic is not None else 0
        self._delete(letter, b'{"before_seq":%d}' % before, before, None)

    def _delete(self, letter: str, body: bytes, before: int | None, match: str | None) -> None:
        name = self._name(letter)
        if name in self.model.topics:
            self._post(f"/v0/topics/{name}/delete", body)
            self.model.delete(name, before, match, "erase")
            self._compare()

    def drop(self, letter: str) -> None:
        name = self._name(letter)
        assert self.client.delete(f"/v0/topics/{name}").status_code == 200
        self.model.drop(name, False)
        self._compare()

    def pass_time(self, ms: int) -> None:
        self.clock.advance(ms)
        self.model.see(self.clock.now())

    # -- what readers do -------------------------------------------------------------------------------------------

    def open_session(
        self, letters: tuple[str, ...], back: int, tail: bool, limit: int, nodes: tuple[str, ...], stale: bool
    ) -> None:
        wanted: dict[str, dict[str, Any]] = {}
        known: dict[str, Cursor] = {}
        for name in map(self._name, letters):
            if name not in self.model.topics:
                continue
            topic = self.model.topic(name)
            at = topic.head if tail else max(topic.head - back, 0)
            epoch = topic.epoch - 1 if stale and not tail and topic.epoch > 1 else topic.epoch
            wanted[name] = {"from_seq": at, "tail": tail, **({"epoch": epoch} if epoch != topic.epoch else {})}
            known[name] = at, epoch
        if not wanted:
            return
        body = {"topics": wanted, "limit": limit, "node": list(nodes)}
        answer = self.client.post("/v0/watch", json=body)
        assert answer.status_code == 200, answer.text
        self.readers.append(Reader(answer.json()["stream_url"], limit, nodes, known))

    def _pick(self, number: int, connected: bool) -> Reader | None:
        found = [reader for reader in self.readers if (reader.events is not None) == connected]
        return found[number % len(found)] if found else None

    def _connect(self, reader: Reader, last: tuple[str, dict[str, Cursor]] | None) -> None:
        if last is not None:
            reader.known = dict(last[1])
        reader.events = Events(self.server.port, reader.url, last[0] if last else None).stream()
        reader.following = {
            name: Following(name, seq, epoch, reader.limit, reader.nodes) for name, (seq, epoch) in reader.known.items()
        }
        first = frames_in(reader.events.body)[0]
        assert cursors_of(first) == reader.known
        reader.ids.append((first.id or "", cursors_of(first)))
        self._compare()

    def connect(self, number: int) -> None:
        """Without an id: from what the client has shown to have."""
        reader = self._pick(number, connected=False)
        if reader is not None:
            self._connect(reader, None)

    def resume_from_any_earlier_id(self, number: int, choice: int) -> None:
        reader = self._pick(number, connected=False)
        if reader is not None and reader.ids:
            self._connect(reader, reader.ids[choice % len(reader.ids)])

    def take_over(self, number: int, choice: int) -> None:
        reader = self._pick(number, connected=True)
        if reader is not None and reader.events is not None:
            old = reader.events
            self._connect(reader, reader.ids[choice % len(reader.ids)])
            assert [frame.event for frame in old.rest()] == ["error"]
            old.close()

    def cut_off_at_any_byte(self, number: int, part: float, hard: bool) -> None:
        """What came behind that byte never arrived: the client goes on from the last whole frame, if it has one."""
        reader = self._pick(number, connected=True)
        if reader is None or reader.events is None:
            return
        body = reader.events.body
        if hard:
            reader.events.reset()
        else:
            reader.events.close()
        whole = frames_in(body[: int(len(body) * part)])
        ids = [(frame.id, cursors_of(frame)) for frame in whole if frame.id is not None]
        self._connect(reader, ids[-1] if ids else None)

    def disconnect(self, number: int, hard: bool) -> None:
        reader = self._pick(number, connected=True)
        if reader is not None and reader.events is not None:
            if hard:
                reader.events.reset()
            else:
                reader.events.close()
            reader.events = None
            self._wait_until_gone()

    def _wait_until_gone(self) -> None:
        """A server that has not noticed yet would go on telling a client that is not there."""
        connected = sum(reader.events is not None for reader in self.readers)
        self.server.wait_until(lambda: self.server.app.watches.open_streams == connected, "the end of a stream")

    # -- what they must have got -----------------------------------------------------------------------------------

    def _compare(self) -> None:
        for reader in self.readers:
            if reader.events is not None:
                self._compare_one(reader, reader.events)

    def _compare_one(self, reader: Reader, events: Events) -> None:
        expected = {name: list(each.step(self.model)) for name, each in reader.following.items()}
        for _ in range(sum(map(len, expected.values()))):
            frame = events.event()
            name, seen = seen_in(frame)
            assert expected[name], f"not promised: {frame}"
            promised = expected[name].pop(0)
            assert agree(promised, seen), f"promised {promised}, got {seen}"
            assert frame.id is not None
            reader.ids.append((frame.id, cursors_of(frame)))


def _spell(item: Item) -> bytes:
    if item.hole is not None:
        return b'{"hole":%d,"reason":"source_trim"}' % item.hole
    fields = [b'"data":' + item.data]
    if item.tag is not None:
        fields.append(b'"tag":"%b"' % item.tag.encode())
    if item.node is not None:
        fields.append(b'"node":"%b"' % item.node.encode())
    return b"{" + b",".join(fields) + b"}"


def test_every_reader_gets_exactly_what_the_contract_promises(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_server(tmp_path_factory.mktemp("data")) as server, server.client() as client:
        clock = ManualClock(START)
        monkeypatch.setattr(server.app.engine.time, "_clock", clock)
        # A busy machine must not change in how many frames something comes.
        monkeypatch.setattr(server.app.pressure, "measure", lambda *_: None)
        machine = type("Live", (Live,), {"server": server, "client": client, "clock": clock})
        bounded = settings(max_examples=100, stateful_step_count=40) if settings().derandomize else settings()
        run_state_machine_as_test(machine, settings=bounded)
