"""What a batch reads: which topics, from where to where, and in how many tasks. Runs in the driver's processes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from pyspark.sql.datasource import InputPartition

from topics.client.connection import Connection, topic_path
from topics.core.errors import TopicNotFound
from topics.spark.offsets import BEGUN, Cursor, Offsets
from topics.spark.options import Position, SourceOptions

_PAGE = 1000
# More tasks than this serve nobody; each gets more instead.
_MAX_RANGES = 10_000


class _Config(msgspec.Struct):
    seq_base: int


class TopicState(msgspec.Struct):
    """A topic as the server describes it."""

    topic: str
    epoch: int
    head_seq: int
    earliest_seq: int
    config: _Config

    @property
    def base(self) -> int:
        """The cursor in front of its first seq."""
        return self.config.seq_base - 1


class Range(InputPartition):
    """The seqs above `after` up to `to` of one instance of a topic: a task's work. `begins_anew`: the stream was in
    another instance before, and these are the seqs of the new one that were gone when that was noticed."""

    def __init__(self, topic: str, epoch: int, after: int, to: int, begins_anew: bool = False) -> None:
        super().__init__(None)
        self.topic = topic
        self.epoch = epoch
        self.after = after
        self.to = to
        self.begins_anew = begins_anew


class Catalog:
    """The topics that the options name, as they are now."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._connection: Connection = options.server.connect()

    def close(self) -> None:
        self._connection.close()

    def look(self, must_exist: bool) -> dict[str, TopicState]:
        options = self._options
        if options.prefix is not None:
            return {state.topic: state for state in self._list(options.prefix)}
        states: dict[str, TopicState] = {}
        for name in options.topics:
            try:
                answer = self._connection.get(topic_path(name), touch="false")
            except TopicNotFound:
                if must_exist:
                    raise TopicNotFound(f"there is no topic {name!r} at {self._connection.url}") from None
            else:
                states[name] = msgspec.convert(answer, TopicState)
        return states

    def _list(self, prefix: str) -> Iterator[TopicState]:
        cursor: str | None = None
        while True:
            page = self._connection.get("/v0/topics", prefix=prefix, page_size=_PAGE, cursor=cursor)
            yield from msgspec.convert(page["topics"], list[TopicState])
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def start(self, state: TopicState) -> int:
        """The cursor at which the options begin with a topic."""
        if self._options.starting_ts is not None:
            return self.seek(state.topic, self._options.starting_ts)
        position = _of_topic(self._options.starting, state.topic, "earliest")
        if position == "latest":
            return state.head_seq
        return state.base if position == "earliest" else max(position - 1, state.base)

    def end(self, state: TopicState) -> int:
        """The last seq that the options want of a topic, as far as there is one."""
        position = _of_topic(self._options.ending, state.topic, "latest")
        return min(position, state.head_seq) if isinstance(position, int) else state.head_seq

    def seek(self, topic: str, ts: int) -> int:
        return int(self._connection.get(topic_path(topic, "seek"), ts=max(ts, 0))["from_seq"])

    def loss_at(self, state: TopicState, cursor: int) -> int | None:
        """Where a loss ends that begins right behind a cursor."""
        body = {"from_seq": cursor, "limit": 1, "epoch": state.epoch}
        tombstone = self._connection.post(topic_path(state.topic, "diff"), body)["tombstone"]
        return None if tombstone is None else int(tombstone["gap_to"])


def _of_topic(positions: Position | dict[str, Position], topic: str, default: Position) -> Position:
    return positions.get(topic, default) if isinstance(positions, dict) else positions


def next_offsets(start: Offsets, states: dict[str, TopicState], catalog: Catalog, most: int | None) -> Offsets:
    """How far a stream that is at `start` may go: to the heads, or `most` records further over all topics."""
    begins: dict[str, int] = {}
    for name, state in states.items():
        known = start.get(name)
        if known is None:
            # What appears later is read from its first record, whatever the stream began with.
            begins[name] = state.base if start else catalog.start(state)
        else:
            begins[name] = known.seq if known.epoch == state.epoch else state.base
    ends = _share(begins, states, most)
    offsets = {name: cursor for name, cursor in start.items() if name != BEGUN}
    for name, state in states.items():
        known = start.get(name)
        if known is None or known.epoch != state.epoch:
            offsets[name] = Cursor(state.epoch, ends[name], begins[name])
        elif known.seq != ends[name]:
            offsets[name] = Cursor(state.epoch, ends[name])
    return offsets or {BEGUN: Cursor(0, 0)}


def _share(begins: dict[str, int], states: dict[str, TopicState], most: int | None) -> dict[str, int]:
    """Divides `most` records over topics by what waits in each. What is gone already is no work, and is passed."""
    floors = {name: max(seq, min(states[name].earliest_seq - 1, states[name].head_seq)) for name, seq in begins.items()}
    waiting = {name: max(states[name].head_seq - floor, 0) for name, floor in floors.items()}
    total = sum(waiting.values())
    if most is None or total <= most:
        return {name: floors[name] + waiting[name] for name in begins}
    ends = dict(floors)
    for name in _in_turn(waiting, most, sum(begins.values())):
        # Rounded up, the smallest first: each gets at least one, and the sum is exact.
        share = min(-(-waiting[name] * most // total), most)
        total -= waiting[name]
        most -= share
        ends[name] += share
    return ends


def _in_turn(waiting: dict[str, int], most: int, progress: int) -> list[str]:
    """The topics that get something, the one with the least first. Where there are too many, others are among them each
    time that the stream has moved."""
    names = sorted(name for name, count in waiting.items() if count)
    if len(names) > most:
        first = progress % len(names)
        names = (names + names)[first : first + most]
    return sorted(names, key=lambda name: (waiting[name], name))


def ranges(start: Offsets, end: Offsets, states: dict[str, TopicState], per_range: int) -> list[Range]:
    """The tasks between two offsets."""
    planned: list[Range] = []
    for name, cursor in end.items():
        known, state = start.get(name), states.get(name)
        if name == BEGUN or known == cursor:
            continue
        after = known.seq if known is not None and known.epoch == cursor.epoch else cursor.start or 0
        is_here = state is not None and state.epoch == cursor.epoch
        floor = min(max(after, state.earliest_seq - 1), cursor.seq) if state is not None and is_here else cursor.seq
        if known is not None and known.epoch != cursor.epoch:
            planned.append(Range(name, cursor.epoch, after, floor if is_here else after, begins_anew=True))
            after = floor if is_here else after
        # What is gone is one range however long it is; what is there is divided.
        if floor > after:
            planned.append(Range(name, cursor.epoch, after, floor))
        planned.extend(_split(name, cursor.epoch, floor, cursor.seq, per_range))
    return planned


def _split(name: str, epoch: int, after: int, to: int, per_range: int) -> Iterator[Range]:
    count = min(-(-(to - after) // per_range), _MAX_RANGES)
    for index in range(count):
        yield Range(name, epoch, after + (to - after) * index // count, after + (to - after) * (index + 1) // count)
