"""`topics routers …`: what is copied from where to where."""

from __future__ import annotations

from typing import Annotated

import typer

from topics.cli.common import (
    DEFAULT_URL,
    REFUSED,
    Json,
    Key,
    MatchPrefix,
    MatchTag,
    RetryMs,
    Url,
    command,
    complete_routers,
    complete_topics,
    connect,
    selector,
)
from topics.cli.show import RED, emit, fields, note, paint, table
from topics.client.options import RouterOptions
from topics.core.answers import Router
from topics.core.routing import Remote

app = typer.Typer(help="Routers between topics: put, get, list, delete.", no_args_is_help=True, add_completion=False)
RouterName = Annotated[str, typer.Argument(help="A router.", autocompletion=complete_routers)]


def _end(topic: str | None, remote: str | None, key: str | None) -> str | Remote | None:
    if remote is None or topic is None:
        if key is not None:
            raise typer.BadParameter("a remote key needs a remote URL")
        return topic
    return Remote(url=remote, topic=topic, key=key)


@app.command(help="Create a router, or change it.")
@command
def put(
    router: RouterName,
    source: Annotated[
        str | None, typer.Argument(help="The topic to copy from.", autocompletion=complete_topics)
    ] = None,
    dest: Annotated[str | None, typer.Argument(help="The topic to copy to.", autocompletion=complete_topics)] = None,
    earliest: Annotated[
        bool | None, typer.Option("--earliest/--head", help="Begin with what is retained, or with what comes.")
    ] = None,
    match: MatchTag = None,
    match_prefix: MatchPrefix = None,
    preserve_node: Annotated[bool | None, typer.Option("--preserve-node/--no-preserve-node")] = None,
    preserve_tag: Annotated[bool | None, typer.Option("--preserve-tag/--no-preserve-tag")] = None,
    create_dest: Annotated[bool | None, typer.Option("--create-dest/--no-create-dest")] = None,
    allow_cycle: Annotated[
        bool | None, typer.Option("--allow-cycle/--no-allow-cycle", help="Cycles are meant.")
    ] = None,
    source_url: Annotated[str | None, typer.Option("--source-url", help="The source is on another server.")] = None,
    source_key: Annotated[str | None, typer.Option("--source-key", envvar="TOPICS_SOURCE_KEY")] = None,
    dest_url: Annotated[str | None, typer.Option("--dest-url", help="The destination is on another server.")] = None,
    dest_key: Annotated[str | None, typer.Option("--dest-key", envvar="TOPICS_DEST_KEY")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    options: RouterOptions = {}
    if earliest is not None:
        options["start"] = "earliest" if earliest else "head"
    chosen = selector(match, match_prefix)
    if chosen is not None:
        options["filter"] = chosen
    if preserve_node is not None:
        options["preserve_node"] = preserve_node
    if preserve_tag is not None:
        options["preserve_tag"] = preserve_tag
    if create_dest is not None:
        options["create_dest"] = create_dest
    if allow_cycle is not None:
        options["allow_cycle"] = allow_cycle
    with connect(url, key, retry_ms) as client:
        answer = client.put_router(
            router, _end(source, source_url, source_key), _end(dest, dest_url, dest_key), **options
        )
    if not as_json:
        print(f"{router} is {'created' if answer.created else 'changed'}")
    _show(answer, as_json)


def _name(end: str | Remote) -> str:
    return end if isinstance(end, str) else f"{end.url}/{end.topic}"


def _show(router: Router, as_json: bool) -> None:
    if as_json:
        emit(router)
        return
    shown = {
        "router": router.router,
        "source": _name(router.source),
        "dest": _name(router.dest),
        "state": router.state,
        "lag": router.lag,
        "cursor": router.cursor,
        "forwarded_total": router.forwarded_total,
        "filter": router.filter,
        "guarantee": router.guarantee,
        "last_error": router.last_error,
    }
    fields({name: value for name, value in shown.items() if value is not None}, {"last_error"})


@app.command(help="Show a router.")
@command
def get(
    router: RouterName,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        answer = client.router(router)
    _show(answer, as_json)


@app.command(name="list", help="List routers.")
@command
def list_(
    prefix: Annotated[str, typer.Argument(help="Only names that start so.")] = "",
    source: Annotated[str | None, typer.Option("--source", help="Only those of this source.")] = None,
    dest: Annotated[str | None, typer.Option("--dest", help="Only those to this destination.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        if as_json:
            for router in client.routers(prefix, source, dest):
                emit(router)
            return
        rows = [
            [
                *(router.router, _name(router.source), _name(router.dest), router.state),
                *("" if router.lag is None else str(router.lag), str(router.forwarded_total)),
            ]
            for router in client.routers(prefix, source, dest)
        ]
    if rows:
        table(["router", "source", "dest", "state", "lag", "forwarded"], rows)
    else:
        note("no routers")


@app.command(help="Delete a router.")
@command
def delete(
    router: RouterName,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        answer = client.drop_router(router)
    if as_json:
        emit(answer)
    elif answer.deleted:
        print(f"{router} is deleted")
    else:
        print(paint(f"there was no {router}", RED))
    if not answer.deleted:
        raise typer.Exit(REFUSED)
