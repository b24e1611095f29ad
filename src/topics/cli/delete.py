"""`topics delete` and `topics deletes`: what is removed on purpose, silently for readers."""

from __future__ import annotations

from typing import Annotated

import typer

from topics.cli.common import (
    DEFAULT_URL,
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
from topics.cli.show import RED, emit, note, table, time_of


@command
def delete(
    topic: TopicName,
    before: Annotated[int | None, typer.Option("--before", min=0, help="Every seq below this one.")] = None,
    match: MatchTag = None,
    match_prefix: MatchPrefix = None,
    trim: Annotated[bool, typer.Option("--trim", help="It lives elsewhere now: not an erasure.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    chosen = selector(match, match_prefix)
    if before is None and chosen is None:
        raise typer.BadParameter(
            f"say which records: --before, --match or --match-prefix. `topics drop {topic}` deletes the topic itself"
        )
    with connect(url, key, retry_ms) as client:
        answer = client.delete(topic, before, chosen, purpose="trim" if trim else "erase")
    if as_json:
        emit(answer)
    else:
        print(f"{answer.deleted} records deleted; {answer.count} left, from seq {answer.earliest_seq}")


@command
def deletes(
    topic: TopicName,
    after: Annotated[int, typer.Option("--after", min=0, help="Only those behind this id.")] = 0,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        answer = client.deletes(topic, after)
    if as_json:
        emit(answer)
        return
    if not answer.complete:
        note(f"some behind {after} are no longer remembered", RED)
    rows = [
        [
            *(str(each.id), time_of(each.ts), each.purpose, "" if each.before_seq is None else str(each.before_seq)),
            *("" if each.match is None else " ".join(each.match), str(each.head_seq)),
        ]
        for each in answer.deletes
    ]
    table(["id", "time", "purpose", "before", "match", "head then"], rows)
