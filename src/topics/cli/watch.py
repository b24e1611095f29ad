"""`topics watch`: several topics over one live stream."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from topics.cli.common import (
    DEFAULT_URL,
    LOSS,
    FailOnLoss,
    Json,
    Key,
    RetryMs,
    Url,
    command,
    complete_topics,
    connect,
)
from topics.cli.read import Meta, Nodes, Tags
from topics.cli.show import DIM, YELLOW, emit, note, show_loss, show_record


@command
def watch(
    topics: Annotated[
        list[str],
        typer.Argument(
            help="Topics, each perhaps with where to begin: orders, orders@0, orders@17.",
            autocompletion=complete_topics,
        ),
    ],
    most: Annotated[int | None, typer.Option("--max", min=1, help="End after so many records.")] = None,
    until_caught_up: Annotated[bool, typer.Option("--until-caught-up", help="End where all have caught up.")] = False,
    node: Nodes = None,
    tags: Tags = True,
    meta: Meta = True,
    fail_on_loss: FailOnLoss = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 60_000,
    as_json: Json = False,
) -> None:
    from topics.client.following import CaughtUp, Lost, Received, Start

    starts: dict[str, Start] = {}
    for each in topics:
        name, has_start, start = each.partition("@")
        if has_start and not (start.isascii() and start.isdigit()):
            raise typer.BadParameter(f"a topic is NAME or NAME@SEQ, got {each!r}")
        starts[name] = int(start) if has_start else "tail"
    count = 0
    has_loss = False
    behind = set(starts)
    with (
        connect(url, key, retry_ms) as client,
        client.watch(starts, node=node, include_tags=tags, include_meta=meta) as events,
    ):
        for event in events:
            if isinstance(event, Received):
                count += 1
                if as_json:
                    emit({"topic": event.topic, "record": event.record})
                else:
                    show_record(event.record, event.topic)
            elif isinstance(event, Lost):
                has_loss = True
                if as_json:
                    emit({"topic": event.topic, "tombstone": event.tombstone})
                else:
                    show_loss(event.tombstone, event.topic)
                if fail_on_loss:
                    break
            elif isinstance(event, CaughtUp):
                behind.discard(event.topic)
                if as_json:
                    emit({"topic": event.topic, "caught_up": event.head_seq})
                else:
                    note(f"{event.topic} has caught up at {event.head_seq}", DIM)
            elif as_json:
                emit({"topic": event.topic, "deleted": event.head_seq})
            else:
                note(f"{event.topic} was deleted; the watch goes on if it is made again", YELLOW)
            sys.stdout.flush()
            if count == most or (until_caught_up and not behind):
                break
    if has_loss and fail_on_loss:
        raise typer.Exit(LOSS)
