"""`topics diff`, `tail`, `seek`: reading one topic."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from topics.cli.common import (
    DEFAULT_URL,
    LOSS,
    FailOnLoss,
    Json,
    Key,
    MatchPrefix,
    MatchTag,
    RetryMs,
    TopicName,
    Url,
    command,
    connect,
    selector,
)
from topics.cli.show import DIM, emit, note, show_loss, show_record
from topics.core.answers import Record
from topics.core.tombstone import Tombstone

Nodes = Annotated[list[str] | None, typer.Option("--node", help="Leave out what these nodes wrote.")]
Tags = Annotated[bool, typer.Option("--tags/--no-tags", help="Show tags.")]
Meta = Annotated[bool, typer.Option("--meta/--no-meta", help="Show meta.")]
_AGO = re.compile(r"(\d{1,15})(ms|s|m|h|d)")
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def show_item(item: Record | Tombstone, as_json: bool) -> bool:
    """Prints a record or a loss; says whether it was a loss."""
    if isinstance(item, Tombstone):
        if as_json:
            emit({"tombstone": item})
        else:
            show_loss(item)
        return True
    if as_json:
        emit(item)
    else:
        show_record(item)
    return False


@command
def diff(
    topic: TopicName,
    from_seq: Annotated[int, typer.Option("--from", min=0, help="The cursor: read what is behind it.")] = 0,
    to_seq: Annotated[int | None, typer.Option("--to", min=0, help="The last seq.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Records of one answer.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Go on up to the head.")] = False,
    wait_ms: Annotated[int, typer.Option("--wait-ms", min=0, max=30_000, help="Wait for something.")] = 0,
    epoch: Annotated[int | None, typer.Option("--epoch", min=0, help="The instance the cursor is of.")] = None,
    node: Nodes = None,
    match: MatchTag = None,
    match_prefix: MatchPrefix = None,
    tags: Tags = True,
    meta: Meta = True,
    fail_on_loss: FailOnLoss = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    from topics.client.cursor import Cursor

    chosen = selector(match, match_prefix)
    has_loss = False
    with connect(url, key, retry_ms) as client:
        if everything:
            reader = client.read(
                topic,
                Cursor(from_seq, epoch),
                to_seq=to_seq,
                limit=limit or 1000,
                node=node,
                match=chosen,
                include_tags=tags,
                include_meta=meta,
            )
            for item in reader:
                has_loss = show_item(item, as_json) or has_loss
            if not as_json:
                note(f"next: --from {reader.cursor.seq} --epoch {reader.cursor.epoch}")
        else:
            answer = client.diff(
                topic,
                Cursor(from_seq, epoch),
                to_seq=to_seq,
                limit=limit,
                wait_ms=wait_ms,
                node=node,
                match=chosen,
                include_tags=tags,
                include_meta=meta,
            )
            has_loss = answer.tombstone is not None
            if as_json:
                emit(answer)
            else:
                for item in ([answer.tombstone] if answer.tombstone else []) + list(answer.records):
                    show_item(item, False)
                rest = "caught up" if answer.caught_up else f"{answer.lag} behind the head"
                note(f"next: --from {answer.next_from_seq} --epoch {answer.epoch} ({rest})")
    if has_loss and fail_on_loss:
        raise typer.Exit(LOSS)


@command
def tail(
    topic: TopicName,
    from_seq: Annotated[
        int | None, typer.Option("--from", min=0, help="Begin behind this seq, and not with what comes next.")
    ] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Begin with the last so many seqs.")] = 0,
    most: Annotated[int | None, typer.Option("--max", min=1, help="End after so many records.")] = None,
    node: Nodes = None,
    match: MatchTag = None,
    match_prefix: MatchPrefix = None,
    tags: Tags = True,
    meta: Meta = True,
    fail_on_loss: FailOnLoss = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 60_000,
    as_json: Json = False,
) -> None:
    from topics.client.cursor import Cursor

    if last and from_seq is not None:
        raise typer.BadParameter("--last and --from both say where to begin: give one")
    has_loss = False
    with connect(url, key, retry_ms) as client:
        state = client.get(topic)
        start = max(state.head_seq - last, 0) if from_seq is None else from_seq
        chosen = selector(match, match_prefix)
        # A cursor of one's own may be ahead of a topic that was made again; one that was just looked up is not.
        epoch = state.epoch if from_seq is None else None
        reader = client.follow(
            topic, Cursor(start, epoch), node=node, match=chosen, include_tags=tags, include_meta=meta
        )
        if not as_json:
            note(f"following {topic} behind seq {start}; Ctrl-C ends it")
        count = 0
        try:
            for item in reader:
                if show_item(item, as_json):
                    has_loss = True
                    if fail_on_loss:
                        break
                else:
                    count += 1
                sys.stdout.flush()
                if count == most:
                    break
        finally:
            if not as_json:
                note(f"next: --from {reader.cursor.seq}", DIM)
    if has_loss and fail_on_loss:
        raise typer.Exit(LOSS)


@command
def seek(
    topic: TopicName,
    when: Annotated[str, typer.Argument(help="Milliseconds, an ISO time, or so long ago: 15m, 2h, 1d.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    ts = parse_time(when, time.time_ns() // 1_000_000)
    with connect(url, key, retry_ms) as client:
        from_seq = client.seek(topic, ts)
    if as_json:
        emit({"topic": topic, "ts": ts, "from_seq": from_seq})
    else:
        print(from_seq)


def parse_time(text: str, now: int) -> int:
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return max(now - int(ago[1]) * _UNITS[ago[2]], 0)
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"a time is milliseconds, an ISO time, or how long ago: 15m, 2h, 1d; got {text!r}"
        ) from None
    # Without a zone it is UTC, as everywhere here.
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
